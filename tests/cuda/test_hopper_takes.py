"""Which family of kernels takes a call on Hopper, by the names of the kernels that run: what docs/support.md says."""

from __future__ import annotations

import itertools
import warnings

import dmattn
import pytest
import torch
from dmattn import BlockMask, IntervalMask

pytestmark = pytest.mark.gpu

LENGTH, HEADS, KV_HEADS = 300, 4, 2
MASKS = {
    "none": lambda: None,
    "documents": lambda: IntervalMask.documents(LENGTH, torch.tensor([100, 170, LENGTH], device="cuda")),
    "of each head": lambda: lifetimes(HEADS),
    "of each group": lambda: lifetimes(KV_HEADS),
    "block": lambda: BlockMask.from_bool(torch.rand(LENGTH, LENGTH, device="cuda") < 0.5),
    "block of each head": lambda: BlockMask.from_bool(torch.rand(1, HEADS, LENGTH, LENGTH, device="cuda") < 0.5),
    "block and of each head": lambda: lifetimes(HEADS) & BlockMask.from_bool(torch.rand(LENGTH, LENGTH, device="cuda") < 0.5),
}
OPTIONS = [
    {"softcap": 5.0},
    {"softcap": 400.0},
    {"scale": -0.1},
    {"dropout_p": 0.2, "dropout_seed": 3},
    {"key_bias": (1, HEADS, LENGTH)},
    {"bias": (1, HEADS, LENGTH, LENGTH)},
    {"is_causal": True},
]


def lifetimes(heads):
    start = torch.arange(LENGTH, device="cuda", dtype=torch.int32).expand(1, heads, LENGTH)
    return IntervalMask(start, start + torch.randint(1, 200, (1, heads, LENGTH), device="cuda", dtype=torch.int32))


def kernels_of(call):
    """The names of dmattn's attention kernels that a call launches."""
    call()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
    return {event.name for event in profile.events() if "dmattn::cuda::sm" in event.name}


@pytest.fixture(autouse=True)
def needs_hopper(monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    monkeypatch.delenv("DMATTN_FAMILY", raising=False)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_hopper_takes_every_mask_beside_every_pair_of_options(mask, size, deterministic):
    torch.manual_seed(0)
    query, grad_out = (torch.randn(1, HEADS, LENGTH, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    key, value = (torch.randn(1, KV_HEADS, LENGTH, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    given = MASKS[mask]()
    for chosen in (*itertools.combinations(OPTIONS, 1), *itertools.combinations(OPTIONS, 2)):
        options = {name: value for option in chosen for name, value in option.items()}
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        if "dropout_seed" in options:
            options["dropout_seed"] = torch.tensor([options["dropout_seed"]], device="cuda")
        for name in ("key_bias", "bias"):
            if name in options:
                options[name] = torch.randn(options[name], device="cuda").requires_grad_()
                leaves.append(options[name])

        def step(options=options, leaves=leaves):
            out = dmattn.attention(*leaves[:3], given, deterministic=deterministic, **options)
            torch.autograd.grad(out, leaves, grad_out)

        names = kernels_of(step)
        needs_bias = "scale" in options or options.get("softcap") == 400.0
        gathers = isinstance(given, IntervalMask) and not ("bias" in options or needs_bias)
        family = "sm80" if deterministic and size > 128 and gathers else "sm90"
        forward, backward = (
            {name.split("dmattn::cuda::")[1][:4] for name in names if any(word in name for word in words)}
            for words in (["forward"], ["backward", "major"])
        )
        assert (forward, backward) == ({"sm90"}, {family}), (options.keys(), names)
