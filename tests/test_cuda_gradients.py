"""Gradients of problems so long, or of so many heads, that CUDA kernels compute them in parts; and equal bits run to run."""

from __future__ import annotations

import dmattn
import pytest
import torch
from cuda_inputs import LONG_KINDS, inputs, long_spans, step
from dmattn.testing.tolerance import assert_same_by_another_way, assert_same_in_another_order

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(
    ("kind", "lengths"), [(k, n) for k, n in LONG_KINDS if n[0] > 1 and sum(n) > 4096 and n[0] * n[1] < 2e8], ids=str
)
def test_gradients_of_long_problems(kind, lengths, size):
    """The kernels that add beside those with a fixed order of sums: they share neither walk nor sums."""
    queries, keys = lengths
    torch.manual_seed(0)
    shapes = (4, queries, size), (2, keys, size), (2, keys, size), (2, keys)
    q, k, v, key_bias = (torch.randn(2, *shape, device="cuda") for shape in shapes)
    leaves = [x.requires_grad_() for x in (q.bfloat16(), k.bfloat16(), v.bfloat16(), key_bias)]
    grad_out = torch.randn_like(leaves[0])
    start, end = long_spans(kind, 2, queries, keys)
    if queries > keys:
        start = start - 100000  # far below the first position, too

    def gradients(deterministic):
        out = dmattn.attention(
            *leaves[:3], dmattn.IntervalMask(start, end), key_bias=leaves[3], is_causal=kind in ("window", "top_k", "local", "most"),
            deterministic=deterministic,
        )  # fmt: skip
        return torch.autograd.grad(out, leaves, grad_out)

    for got, expected in zip(gradients(False), gradients(True), strict=True):
        assert_same_by_another_way(got, expected, torch.bfloat16)


@pytest.mark.parametrize(("batches", "kv_heads", "length"), [(1, 5, 130000), (3, 2, 90000)])
def test_gradients_of_heads_in_parts(batches, kv_heads, length):
    """So many floats of sums that backward takes some heads, or batches, after the others."""
    q, k, v, scores, grad_out = inputs(length, 2 * kv_heads, kv_heads, 128, batch=batches)
    together = step_of_heads(q, k, v, scores, grad_out)
    for batch, head in ((0, 0), (0, 1), (batches - 1, kv_heads - 1)):
        one, pair = slice(head, head + 1), slice(2 * head, 2 * head + 2)
        at, heads = slice(batch, batch + 1), (pair, one, one, one)
        alone = step_of_heads(*(x[at, h] for x, h in zip((q, k, v, scores), heads, strict=True)), grad_out[at, pair])
        for got, expected, h in zip(together, alone, heads, strict=True):
            assert_same_in_another_order(got[at, h], expected, torch.bfloat16)


def step_of_heads(q, k, v, scores, grad_out):
    leaves = [x.detach().requires_grad_() for x in (q, k, v, scores)]
    return torch.autograd.grad(dmattn.dynamic_mask_attention(*leaves, 512), leaves, grad_out)


def test_block_mask_gradients_of_heads_in_parts():
    q, k, v, _, grad_out = inputs(20000, 120, 60, 128, batch=1)
    table = torch.rand(1, 60, 157, 157, device="cuda") < 0.02

    def gradients(heads, kv_heads):
        leaves = [x[:, h].detach().requires_grad_() for x, h in ((q, heads), (k, kv_heads), (v, kv_heads))]
        out = dmattn.attention(*leaves, dmattn.BlockMask.from_blocks(table[:, kv_heads], 128))
        return torch.autograd.grad(out, leaves, grad_out[:, heads])

    together = gradients(slice(None), slice(None))
    for head in (0, 31, 59):
        one, pair = slice(head, head + 1), slice(2 * head, 2 * head + 2)
        for got, expected, h in zip(together, gradients(pair, one), (pair, one, one), strict=True):
            assert_same_in_another_order(got[:, h], expected, torch.bfloat16)


@pytest.mark.parametrize("sparse", [True, False])
def test_deterministic_gradients_are_equal_over_twenty_runs(sparse):
    q, k, v, scores, grad_out = inputs(length=1500)

    def run():
        if sparse:
            return step(q, k, v, scores, grad_out)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(dmattn.attention(*leaves, is_causal=True, deterministic=True), leaves, grad_out)

    first = run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))
