"""Attention forward against the reference: drawn cases, then the hostile ones by name."""

from __future__ import annotations

import dataclasses
import math

import dmattn
import pytest
import torch
from cases import make
from dmattn import BlockMask, IntervalMask
from dmattn.testing import (
    AttentionCase,
    assert_close_to_reference,
    assert_matches_reference,
    assert_same_bits,
    attention_cases,
    run,
    strategies,
    tolerance,
)
from hypothesis import given
from hypothesis import strategies as st

INF = float("inf")
tensor = strategies.random_tensor


@given(data=st.data())
def test_drawn_cases(device, data):
    assert_matches_reference(data.draw(attention_cases(device)), gradients=False)


@pytest.mark.parametrize(("D", "Dv"), [(8, 256), (256, 8), (136, 120), (24, 40), (256, 256)])
def test_head_sizes(device, dtype, D, Dv):
    assert_matches_reference(make(device, dtype, D=D, Dv=Dv, is_causal=True), gradients=False)


def test_a_query_that_sees_nothing(device, dtype):
    case = make(device, dtype, Sq=9, Sk=5, is_causal=True)
    results = assert_matches_reference(case, gradients=False)
    assert not results["out"][:, :, :4].any()
    assert (results["lse"][:, :, :4] == -INF).all()
    assert torch.isfinite(results["lse"][:, :, 4:]).all()


@pytest.mark.parametrize("kind", ["interval", "block", "bias", "key_bias"])
def test_all_hidden(device, dtype, kind):
    case = make(device, dtype, Sq=40)
    hidden = torch.zeros(1, 1, 40, 40, dtype=torch.bool, device=device)
    nothing = torch.zeros(40, dtype=torch.int32, device=device)
    case = {
        "interval": dataclasses.replace(case, mask=IntervalMask(nothing + 7, nothing + 7), visible=hidden),
        "block": dataclasses.replace(case, mask=BlockMask.from_bool(hidden), visible=hidden),
        "bias": dataclasses.replace(case, bias=torch.full((40, 40), -INF, device=device)),
        "key_bias": dataclasses.replace(case, key_bias=torch.full((40,), -INF, device=device)),
    }[kind]
    results = assert_matches_reference(case)
    assert not results["out"].any()
    assert (results["lse"] == -INF).all()
    assert not any(gradient.any() for name, gradient in results.items() if name.startswith("grad_"))


@pytest.mark.parametrize("ahead", [3, 8, -5, -16])
@pytest.mark.parametrize("D", [64, 128])
def test_a_bad_key_has_no_effect_on_queries_far_before_it(device, dtype, ahead, D):
    """Whole tiles of queries come before a key that causality hides from them, wherever in a chunk of the bias it lies."""
    first, Sq = 128, 256  # of the queries that may see the key
    bias = strategies.random_tensor((1, 2, Sq, Sq + 16), 3, dtype, device)[..., : Sq + ahead]
    case = make(device, dtype, H=2, Hkv=2, Sq=Sq, Sk=Sq + ahead, D=D)
    q, k, v = case.query, case.key, case.value

    def outputs():
        return dmattn.attention(q, k, v, bias=bias, is_causal=True)[:, :, :first]

    clean = outputs()
    k[:, :, first + ahead], v[:, :, first + ahead] = float("nan"), float("nan")
    assert torch.equal(outputs(), clean)
    assert torch.isfinite(clean).all()


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
@pytest.mark.parametrize("kind", ["padding", "block", "bool", "top_k", "empty interval", "empty interval & block"])
def test_what_nobody_sees_has_no_effect(device, dtype, bad, kind):
    clean = make(device, dtype, B=2, H=4, Hkv=2, Sq=70, Sk=150)
    hidden = torch.zeros(150, dtype=torch.bool, device=device)
    hidden[110:] = True
    if kind != "padding":
        hidden[[3, 40, 41, 99]] = True
    scores = torch.where(hidden, -INF, 1.0).expand(2, 2, 150)
    masks = {
        "padding": IntervalMask.padding(150, 110, device=device),
        "block": BlockMask.from_bool(~hidden.expand(70, 150), 32),
        "bool": ~hidden,
        "top_k": IntervalMask.top_k(scores, 150, is_causal=False),
        "empty interval": IntervalMask(torch.zeros(150, dtype=torch.int32, device=device), torch.where(hidden, 0, 500).int()),
    }
    everything = BlockMask.from_bool(torch.ones(70, 150, dtype=torch.bool, device=device))  # so keys are met in order
    masks["empty interval & block"] = masks["empty interval"] & everything
    visible = (~hidden).expand(1, 1, 70, 150)
    clean = dataclasses.replace(
        clean, mask=masks[kind], visible=visible, key_bias=strategies.random_tensor((1, 2, 150), 9, device=device)
    )
    dirty = {"key": clean.key.clone(), "value": clean.value.clone(), "key_bias": clean.key_bias.clone()}
    dirty["key"][:, :, hidden] = bad
    dirty["value"][:, :, hidden] = bad
    dirty["key_bias"][:, :, hidden] = bad
    assert_matches_reference(clean.with_leaves(dirty))
    clean = dataclasses.replace(clean, deterministic=True)  # without it, sums on a GPU may differ in their last bits
    assert_same_bits(assert_matches_reference(clean.with_leaves(dirty)), run(clean))


def test_logits_beyond_the_storage_dtype_but_not_the_sum():
    case = make("cpu", torch.float16, Sq=20, D=16)
    case = case.with_leaves({"query": case.query * 1000, "key": case.key * 1000})
    results = run(case, gradients=False)
    assert torch.isfinite(results["out"]).all()
    assert float(results["lse"].max()) > torch.finfo(torch.float16).max


@pytest.mark.parametrize("last", [300, -300])  # kernels may walk the keys from either end
def test_rising_logits_rescale_the_sum(device, dtype, last):
    case = make(device, dtype, Sq=1, Sk=1000, key_bias=torch.linspace(-last, last, 1000, device=device))
    assert_matches_reference(case, gradients=False)


@pytest.mark.parametrize("is_start", [True, False])
@pytest.mark.parametrize("heads", [1, 2])
def test_sequences_whose_masks_differ(device, dtype, heads, is_start):
    """In one sequence each of the first 1,000 keys is hidden from all but one query, in the other none is, in either order."""
    length = 2048
    keys = torch.arange(length, dtype=torch.int32, device=device)
    is_early = keys < 1000
    start = torch.where(is_early, 2000, 0) if is_start else keys * 0
    end = torch.where(is_early, 2001, length) if is_start else torch.where(is_early, keys + 1, length)
    narrow = IntervalMask(start.int(), end.int())
    wide = IntervalMask(keys * 0, keys * 0 + length)
    query, key, value = (tensor((2, heads, length, 16), n, dtype, device) for n in range(3))
    for pair in ((narrow, wide), (wide, narrow)):
        together = IntervalMask(*(torch.cat([getattr(mask, name) for mask in pair]) for name in ("start", "end")))
        out = dmattn.attention(query, key, value, together)
        for n, mask in enumerate(pair):
            alone = dmattn.attention(query[n : n + 1], key[n : n + 1], value[n : n + 1], mask)
            torch.testing.assert_close(out[n : n + 1], alone)


@pytest.mark.parametrize("layout", strategies.LAYOUTS)
def test_strides(device, dtype, layout):
    case = make(device, dtype, B=2, H=3, Sq=50, is_causal=True)
    moved = {name: strategies.laid_out(getattr(case, name), layout) for name in ("query", "key", "value")}
    results = assert_matches_reference(case.with_leaves(moved))
    if layout == "bshd":
        assert results["out"].transpose(1, 2).is_contiguous()
        assert results["grad_key"].transpose(1, 2).is_contiguous()
    if layout == "contiguous":
        assert results["out"].is_contiguous()


@pytest.mark.parametrize("left", [None, 1], ids=["full", "a window"])
def test_more_than_65535_heads(device, dtype, left):
    """With so few keys every tile of a kernel has a single chunk of them."""
    case = make(device, dtype, B=70, H=1000, Hkv=500, Sq=3, Sk=2, D=8)
    if left is not None:
        mask = dmattn.IntervalMask.sliding_window(2, left, device=device)
        case = dataclasses.replace(case, mask=mask, visible=mask.to_bool(3, 2))
    assert_matches_reference(case)


@pytest.mark.slow
def test_values_wider_than_two_to_the_31_elements(device, dtype):
    """Offsets beyond 2^31: key and value are rows of one long allocation, addressed by stride, of which only a few pages are touched."""
    B, Sk, D = 3, 16, 32
    stride = (1 << 30) + 64
    room = torch.empty(2 * stride + Sk * D, dtype=dtype, device=device)  # pages nobody touches cost nothing on a CPU
    far = room.as_strided((B, 1, Sk, D), (stride, Sk * D, D, 1))
    far.copy_(strategies.random_tensor((B, 1, Sk, D), 1, dtype, device))
    case = AttentionCase(strategies.random_tensor((B, 1, 5, D), 0, dtype, device), far, far, is_causal=True)
    near = dataclasses.replace(case, key=far.contiguous(), value=far.contiguous())
    assert_close_to_reference(near, run(case, gradients=False))


@pytest.mark.slow
def test_more_than_two_to_the_31_elements_of_query_and_out(dtype, device):
    """Stride-0 query, real out of 2^31 + elements in bfloat16: 4 GB."""
    case = make(device, torch.bfloat16, B=1, H=1, Sq=1 << 18, Sk=2, D=8, Dv=256)
    heads = 33
    query = case.query.expand(1, heads, 1 << 18, 8)
    out = dmattn.attention(query, case.key.expand(1, heads, 2, 8), case.value.expand(1, heads, 2, 256))
    assert out.numel() > 2**31
    assert torch.equal(out[0, 0], out[0, heads - 1])
    assert_close_to_reference(dataclasses.replace(case, query=case.query[:, :, -64:]), {"out": out[:, heads - 1 :, -64:]})


def test_softcap_and_scale(device, dtype):
    for softcap in (0.1, 5.0, 1e4, 1e8):
        for scale in (None, 3.0, -1.0, 0.0):
            assert_matches_reference(make(device, dtype, Sq=40, softcap=softcap, scale=scale), gradients=False)


def test_dropout_is_a_function_of_the_seed(device, dtype):
    case = make(device, dtype, B=2, H=3, Sq=60, dropout_p=0.5, dropout_seed=-(2**62) + 12345)
    results = assert_matches_reference(case, gradients=False)
    assert_same_bits(results, run(case, gradients=False))
    other = run(dataclasses.replace(case, dropout_seed=1), gradients=False)
    assert not torch.equal(results["out"], other["out"])
    assert torch.equal(results["lse"], other["lse"])


@pytest.mark.parametrize("difference", [0x85EBCA6B << 32, 1 << 32, 1, 0x85EBCA6B, -(1 << 32), (1 << 32) + 1])
def test_related_seeds_drop_unrelated_weights(device, difference):
    """No head of one seed has the mask of any head of another, nor the mask of a head moved by some rows or keys."""
    heads, length, seed = 6, 96, 1234567

    def kept(seed):
        ones = torch.zeros(1, heads, length, 8, device=device, dtype=torch.float16)
        seed = torch.tensor([(seed + 2**63) % 2**64 - 2**63], device=device)
        parts = []
        for first in range(0, length, 8):  # values that tell eight keys apart
            value = torch.zeros_like(ones)
            value[:, :, first : first + 8] = torch.eye(8, device=device, dtype=ones.dtype)
            parts.append(dmattn.attention(ones, ones, value, dropout_p=0.5, dropout_seed=seed) > 0)
        return torch.cat(parts, dim=-1)[0]

    masks = torch.cat([kept(seed), kept(seed + difference)]).float() * 2 - 1  # [2 * heads, length, length]
    for rows in (0, 1, 2):
        for keys in (0, 1, 2):
            moved = masks.roll((rows, keys), (1, 2)).flatten(1)
            agreement = masks.flatten(1) @ moved.T / length**2
            if rows == keys == 0:
                agreement.fill_diagonal_(0.0)
            assert agreement.abs().max() < 6 / length  # six standard deviations of unrelated masks


def test_dropout_without_a_seed_follows_torchs_generator(device, dtype):
    case = make(device, dtype, Sq=60)

    def once(seed):
        torch.manual_seed(seed)
        return dmattn.attention(case.query, case.key, case.value, dropout_p=0.3)

    assert torch.equal(once(0), once(0))
    assert not torch.equal(once(0), once(1))


def test_dropout_drops_the_share_it_says(device, dtype):
    ones = torch.ones(1, 1, 2000, 8, device=device, dtype=dtype)
    wide = torch.eye(8, device=device, dtype=dtype).repeat(250, 1)[None, None]
    out = dmattn.attention(ones * 0, ones * 0, wide, dropout_p=0.25, dropout_seed=torch.tensor([7], device=device))
    kept = out.float().sum() * 0.75 / 2000  # each kept weight is 1 / (2000 * 0.75)
    deviation = math.sqrt(0.25 * 0.75 / 2000**2)
    assert abs(float(kept) - 0.75) < 5 * deviation + tolerance.STORAGE_ULPS * torch.finfo(dtype).eps


@pytest.mark.slow
def test_memory_stays_linear(run_python):
    """At 16384 tokens a dense mask alone would be 256 MB; forward and backward may grow the process by 32 MB beyond their results."""
    program = """
import re, torch, dmattn
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
N, D = 16384, 32
q, k, v = (torch.randn(1, 2, N, D, requires_grad=True) for _ in range(3))
scores = torch.randn(1, 2, N, requires_grad=True)
def step(n):
    s = [t[:, :, :n] for t in (q, k, v)]
    out = dmattn.dynamic_mask_attention(*s, scores[:, :, :n], 128)
    torch.autograd.grad(out, (q, k, v, scores), torch.ones_like(out))
step(64)
before = peak()
step(N)
results = (4 + 3) * q.numel() * 4 / 2**20  # out, grad_out, its gradients: with respect to slices and to the whole
print(peak() - before - results)
"""
    finished = run_python("-c", program)
    assert finished.returncode == 0, finished.stderr
    assert float(finished.stdout) < 32


def test_no_query_heads_over_some_key_heads():
    q, k = torch.randn(1, 0, 300, 8), torch.randn(1, 2, 300, 8)
    assert dmattn.dynamic_mask_attention(q, k, k, torch.randn(1, 2, 300), 4).shape == q.shape
