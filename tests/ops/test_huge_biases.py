"""Large finite biases: additive masks of -1e9 and the like, on some keys of a row or on all of them, forward and backward.

The truth is brute force with logits rounded as kernels round them. In rows where every visible key has -1e9, float32 swallows the products
(its neighbours lie 64 apart there), so all keys weigh the same; nothing else is right, and nothing may become huge, infinite or NaN.
"""

from __future__ import annotations

import dataclasses

import brute_check
import pytest
import torch
from dmattn.testing import AttentionCase, assert_close_to_reference, run, strategies, tolerance
from hypothesis import given
from hypothesis import strategies as st

SINGLE = torch.finfo(torch.float32)
VALUES = (-1e4, -6e4, -1e9, -1e30, SINGLE.min)


@pytest.fixture(params=strategies.CPU_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def any_dtype(request, device):
    if device == "cuda" and request.param not in strategies.CUDA_DTYPES:
        pytest.skip("CUDA has no kernels for this dtype")
    return request.param


def make(device, dtype, B=1, H=2, Hkv=None, Sq=150, Sk=None, D=64, Dv=None, seed=0, **options) -> AttentionCase:
    """Normal numbers, none far from 0, so that no product reaches what a huge bias swallows."""
    Hkv, Sk, Dv = H if Hkv is None else Hkv, Sq if Sk is None else Sk, D if Dv is None else Dv
    sizes = ((B, H, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv))
    tensors = (strategies.random_tensor(size, seed + i).clamp(-3, 3).to(device, dtype) for i, size in enumerate(sizes))
    return AttentionCase(*tensors, **{"grad_seed": seed, **options})


def usual_size(dtype) -> float:
    """Up to this size (2^17 in float32) a logit may round by an ulp otherwise in backward, which changes a weight by less than 1 / 64."""
    return 1 / (64 * torch.finfo(tolerance.accumulate_dtype(dtype)).eps)


def fits(value, dtype) -> bool:
    return abs(value) <= torch.finfo(dtype).max


# The classic mask -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("size", [64, 136])
def test_left_padding_by_a_large_key_bias(device, any_dtype, value, softcap, size):
    """(1 - mask) * -1e9 on the first half of the keys, causal: the first 75 rows see nothing else."""
    key_bias = torch.zeros(1, 1, 150, device=device)
    key_bias[..., :75] = value
    case = make(device, any_dtype, D=size, key_bias=key_bias, is_causal=True, softcap=softcap)
    brute_check.assert_right(case, run(case), rounded=True)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("same_dtype", [True, False])
@pytest.mark.parametrize("size", [64, 136])
def test_rows_masked_by_a_large_bias(device, any_dtype, value, softcap, same_dtype, size):
    dtype = any_dtype if same_dtype else torch.float32
    bias = torch.zeros(1, 1, 150, 150, device=device)
    bias[:, :, :75] = max(value, torch.finfo(dtype).min)
    case = make(device, any_dtype, D=size, bias=bias.to(dtype), softcap=softcap)
    brute_check.assert_right(case, run(case), rounded=True)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("length", [129, 600, 1100])
@pytest.mark.parametrize("is_first", [False, True])
def test_good_keys_in_a_later_chunk(device, any_dtype, value, length, is_first):
    """All chunks of keys but the last hold nothing but huge biases; or all but the first, for kernels that begin at the end."""
    key_bias = torch.zeros(length, device=device)
    key_bias[: length - 5] = value
    key_bias = key_bias.flip(0) if is_first else key_bias
    case = make(device, any_dtype, H=1, Sq=70, Sk=length, D=32, key_bias=key_bias)
    brute_check.assert_right(case, run(case), rounded=True)


@pytest.mark.parametrize("value", [-1e9, 1e9, SINGLE.min])
def test_dropout_of_rows_that_see_only_huge_biases(device, any_dtype, value):
    key_bias = torch.full((150,), value, device=device)
    case = make(device, any_dtype, key_bias=key_bias, is_causal=True, dropout_p=0.3, dropout_seed=5, deterministic=True)
    brute_check.assert_right(case, run(case), rounded=True)


# Drawn ------------------------------------------------------------------------------------------------------------------------------


@st.composite
def huge_cases(draw, device, values, *, mixed=False, usual=True):
    """Cases whose biases hold one value of ``values`` on rows, keys, everything or anywhere; elsewhere numbers up to 3.

    mixed: several values at once, in both biases. usual: the rest are numbers, not 0.
    """
    dtype = draw(strategies.dtypes(device))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    batch, heads = draw(st.integers(1, 2)), kv_heads * group
    lengths = st.integers(1, 40) | st.sampled_from((63, 64, 65, 127, 128, 129, 191, 193, 257))
    keys = draw(lengths)
    queries = draw(st.just(keys) | lengths)
    case = make(
        device, dtype, batch, heads, kv_heads, queries, keys, draw(st.sampled_from((8, 64, 72, 128, 136))), draw(st.sampled_from((16, 64, 128))),
        draw(strategies.seeds()), is_causal=draw(st.booleans()), softcap=draw(st.sampled_from((0.0, 30.0))),
        deterministic=draw(st.booleans()),
    )  # fmt: skip
    if draw(st.booleans()):
        visible = torch.rand(1, 1, queries, keys, generator=torch.Generator().manual_seed(draw(strategies.seeds()))) < 0.8
        case = dataclasses.replace(case, mask=visible.to(device), visible=visible.to(device), description="bool")
    value, given = draw(st.sampled_from(values)), draw(st.sampled_from(("key_bias", "bias", "both")))
    biases = {}
    for name, rank in (("key_bias", 1), ("bias", 2)):
        if given not in (name, "both"):
            continue
        lead = draw(st.sampled_from(((), (1, 1), (batch, heads), (1, kv_heads), (batch, 1))))
        seed = draw(strategies.seeds())
        generator = torch.Generator().manual_seed(seed)
        tensor = strategies.random_tensor((*lead, *((queries, keys)[-rank:])), seed).clamp(-3, 3) * usual
        place = draw(st.sampled_from(("keys", "rows", "everything", "anywhere", "left", "right")))
        chosen = torch.ones(tensor.shape, dtype=torch.bool)
        column = torch.arange(keys).expand(tensor.shape)
        if place == "keys":
            chosen &= torch.rand(keys, generator=generator) < 0.5
        elif place == "rows" and rank == 2:
            chosen &= (torch.rand(queries, generator=generator) < 0.5)[:, None]
        elif place == "anywhere":
            chosen = torch.rand(tensor.shape, generator=generator) < 0.5
        elif place == "left":
            chosen = column < draw(st.integers(0, keys))
        elif place == "right":
            chosen = column >= draw(st.integers(0, keys))
        half = 0.49 * value if given == "both" else value  # two of them are finite, in bfloat16 too
        tensor = torch.where(chosen, half, tensor)
        if mixed:
            pool = torch.tensor([0.49 * v for v in values])
            picked = pool[torch.randint(len(values), tensor.shape, generator=generator)]
            tensor = torch.where(torch.rand(tensor.shape, generator=generator) < 0.5, picked, tensor)
        own = dtype if draw(st.booleans()) and not mixed and fits(half, dtype) and dtype != torch.float64 else torch.float32
        biases[name] = tensor.to(device, own)
    return dataclasses.replace(case, **biases)


@given(data=st.data())
def test_one_huge_value_among_usual_biases(device, data):
    values = (-1e9, -1e30, SINGLE.min, -6e4, 6e4, 1e9, -1e4)
    case = data.draw(huge_cases(device, values))
    brute_check.assert_right(case, run(case), rounded=True)


@given(data=st.data())
def test_whole_numbers_are_exact_at_every_size(device, data):
    """Products and biases are whole and every sum of them fits float32: no rounding, in whatever order a kernel adds."""
    size = data.draw(st.sampled_from((2**10, 2**15, 2**20, 2**22)))
    case = data.draw(huge_cases(device, (-size, size, size - 3, 5 - size, 1 - size), usual=False, mixed=data.draw(st.booleans())))
    leaves = case.leaves()
    keep = torch.arange(case.query.shape[3], device=device) % 8 == 0  # so that softmax has more than one winner
    whole = {"query": (leaves["query"].round().clamp(-1, 1) * keep), "key": leaves["key"].round().clamp(-1, 1)}
    whole |= {name: leaf.round() for name, leaf in leaves.items() if name in ("key_bias", "bias")}
    case = dataclasses.replace(case.with_leaves(whole), scale=1.0, softcap=0.0)
    brute_check.assert_right(case, run(case), rounded=True, exact_from=usual_size(case.query.dtype))


@given(data=st.data())
def test_a_huge_negative_bias_hides_a_key_from_rows_that_see_another(device, data):
    """Rows that mix -1e9 and usual biases are as exact as with the keys hidden by -inf."""
    value = data.draw(st.sampled_from((-1e9, -1e30, SINGLE.min)))
    case = data.draw(huge_cases(device, (0.0,)))
    case = dataclasses.replace(case, key_bias=case.key_bias if case.key_bias is None else case.key_bias.float(), bias=None)
    hidden = torch.rand(case.key.shape[2], generator=torch.Generator().manual_seed(case.grad_seed)).to(device) < 0.5
    hidden[torch.where(case.seen().sum(2) > 0, 1, 0).sum((0, 1)).argmax()] = False
    sees = (case.seen() & ~hidden).any(dim=3, keepdim=True) | ~case.seen().any(dim=3, keepdim=True)
    visible = (case.seen() & sees).contiguous()
    key_bias = torch.zeros_like(hidden, dtype=torch.float32) if case.key_bias is None else case.key_bias
    case = dataclasses.replace(
        case, mask=visible, visible=visible, key_bias=torch.where(hidden, value, key_bias), description="bool"
    )
    without = dataclasses.replace(case, key_bias=torch.where(hidden, -torch.inf, key_bias))
    assert_close_to_reference(without, run(case))


# Whatever the biases ----------------------------------------------------------------------------------------------------------------

ANYTHING = (-1e9, 1e9, -1e30, 1e30, SINGLE.min, SINGLE.max, -6e4, 6e4, 0.0, 1e7, -1e7)


@given(data=st.data())
def test_forward_and_backward_weigh_alike(device, data):
    """With value = 1 out is the weights; with grad_out = 1 grad_value is their transpose. They agree, and each row's sum is 1."""
    values = [value for value in ANYTHING if abs(value) != 1e7]  # there an ulp is 1: how products round would decide
    case = data.draw(huge_cases(device, values, mixed=data.draw(st.booleans())))
    batch, heads, queries, _ = case.query.shape
    keys, kv_heads = min(case.key.shape[2], 256), case.key.shape[1]
    queries, width = min(queries, 256), -(-max(keys, min(queries, 256)) // 8) * 8
    cut = {"key_bias": lambda t: t[..., :keys], "bias": lambda t: t[..., :queries, :keys]}
    leaves = {name: cut[name](leaf) for name, leaf in case.leaves().items() if name in cut}
    dtype = case.query.dtype
    identity = torch.eye(max(keys, queries), width, dtype=dtype, device=device)
    first = case.query[:, :: heads // kv_heads, :queries].detach().requires_grad_()  # one query head per key head
    leaves = {
        name: leaf[..., :: heads // kv_heads, :, :]
        if name == "bias" and leaf.dim() > 2 and leaf.shape[-3] == heads
        else leaf[..., :: heads // kv_heads, :]
        if name == "key_bias" and leaf.dim() > 1 and leaf.shape[-2] == heads
        else leaf
        for name, leaf in leaves.items()
    }
    value = identity[:keys].expand(batch, kv_heads, keys, width).detach().requires_grad_()
    mask = None if case.visible is None else case.visible[:, :, :queries, :keys]
    smaller = dataclasses.replace(case, query=first, key=case.key[:, :, :keys], value=value, mask=mask, visible=mask, **leaves)
    out, lse = smaller.call()
    (grad_value,) = torch.autograd.grad(out, value, identity[:queries].expand_as(out))
    forward, backward = (x.detach().double() for x in (out[..., :keys], grad_value[..., :queries].transpose(2, 3)))
    sees = smaller.seen().any(dim=3)
    summed, stored = torch.finfo(tolerance.accumulate_dtype(dtype)), torch.finfo(dtype)
    logit_ulps = torch.where(sees, lse.double(), 0.0).abs().clamp(max=usual_size(dtype))[..., None]
    allowed = tolerance.STORAGE_ULPS * stored.eps + (tolerance.ARITHMETIC_ULPS + logit_ulps) * summed.eps
    for weights in (forward, backward):
        assert bool((weights >= 0).all())
        assert bool((weights <= 1 + allowed).all()), "a weight exceeds 1"
        total = weights.sum(dim=3)
        assert bool(((total - sees.double()).abs() <= keys * stored.tiny + allowed[..., 0]).all()), (
            "weights of a row do not sum to 1"
        )
    assert bool(((forward - backward).abs() <= forward * allowed + 2 * stored.tiny).all()), "forward and backward disagree"


@given(data=st.data())
def test_results_stay_within_what_a_mean_of_values_can_be(device, data):
    """Huge biases of all signs, cancelling, in one row: no bound depends on how logits round."""
    case = data.draw(huge_cases(device, ANYTHING, mixed=True))
    results = run(case)
    sees = case.seen().any(dim=3)
    for name, result in results.items():
        finite = torch.isfinite(result) if name != "lse" else torch.isfinite(result) | ~sees
        assert bool(finite.all()), name
    exact, heads = case.to(torch.float64), case.query.shape[1]
    group = heads // case.key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (exact.key, exact.value))
    grad_out, grad_lse = (g.double() for g in case.incoming_gradients())
    scale = exact.query.shape[3] ** -0.5
    # The output, weights and gradients are rounded on the way.
    slack = 1 + tolerance.STORAGE_ULPS * torch.finfo(case.query.dtype).eps * 4
    visible = case.seen()[..., None]
    largest = lambda t: torch.where(visible, t[:, :, None], 0.0).amax(dim=3) if t.shape[2] else t.new_zeros(())  # noqa: E731
    assert bool((results["out"].double().abs() <= largest(value.abs()) * slack).all())
    dp = torch.where(case.seen(), (grad_out @ value.transpose(2, 3)).abs(), 0.0).amax(dim=3)
    # The logit gradients of a row, w (dp - mean dp + dlse), sum up to this at most.
    spread = (2 * dp + (grad_out.abs() * value.abs().amax(dim=2, keepdim=True)).sum(3) * (slack - 1) + grad_lse.abs()) * sees
    of_query = scale * spread[..., None] * key.abs().amax(dim=2, keepdim=True)
    assert bool((results["grad_query"].double().abs() <= of_query * slack).all())
    of_key = (scale * spread[..., None] * exact.query.abs()).sum(dim=2, keepdim=True).unflatten(1, (-1, group)).sum(2)
    assert bool((results["grad_key"].double().abs() <= of_key * slack).all())
    of_value = (grad_out.abs() * sees[..., None]).sum(dim=2, keepdim=True).unflatten(1, (-1, group)).sum(2)
    assert bool((results["grad_value"].double().abs() <= of_value * slack).all())
