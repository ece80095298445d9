"""Inputs that several files of tests of CUDA kernels share."""

from __future__ import annotations

import functools

import dmattn
import torch
from dmattn_bench.two_ways import assert_same_by_another_way, assert_same_sums_by_another_way


def inputs(length=777, heads=4, kv_heads=2, size=64, seed=0, batch=2):
    generator = torch.Generator("cuda").manual_seed(seed)
    draw = functools.partial(torch.randn, batch, generator=generator, device="cuda")
    q, k, v = (draw(h, length, size).bfloat16() for h in (heads, kv_heads, kv_heads))
    return q, k, v, draw(kv_heads, length), draw(heads, length, size).bfloat16()


def step(q, k, v, scores, grad_out, deterministic=True):
    leaves = [x.detach().requires_grad_() for x in (q, k, v, scores)]
    out = dmattn.dynamic_mask_attention(*leaves, 100, deterministic=deterministic)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def assert_same_results(results, expected):
    """By another way, in bfloat16: out and the gradients of query, key and value, and that of key_bias, which has three dimensions."""
    for ours, theirs in zip(results, expected, strict=True):
        rule = assert_same_sums_by_another_way if theirs.dim() == 3 else assert_same_by_another_way
        rule(ours.detach(), theirs.detach(), torch.bfloat16)


def long_spans(kind, heads, queries, keys):
    """Starts and ends that make the lists of live keys short, long, many, or not worth it."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(low, high):
        return torch.randint(low, high, (2, heads, keys), generator=generator, device="cuda", dtype=torch.int32)

    def noise(of=torch.randn):
        return of(2, heads, keys, generator=generator, device="cuda")

    always = torch.zeros(2, heads, keys, device="cuda", dtype=torch.int32)  # what is causal begins with its key
    if kind == "window":
        return always, (torch.arange(keys, device="cuda", dtype=torch.int32) + keys // 8).expand(2, heads, keys).contiguous()
    if kind == "top_k":
        return always, torch.ops.dmattn.select(noise(), None, keys // 16, True)
    if kind == "local":
        return always, torch.ops.dmattn.select(noise(), None, keys // 32, True, keys // 32, 5)
    if kind == "any":
        return tuple(torch.stack([draw(-100, keys), draw(-100, keys)]).sort(0).values)
    if kind == "short":
        start = draw(-100, keys)
        return start, start + draw(0, 900)
    return always, torch.where(noise(torch.rand) < 0.9, 2**31 - 1, 0).int()  # most


LONG = [
    (769, 900),
    (4097, 4097),
    (9000, 9000),
    (5000, 12001),
    (12001, 5000),
    (40000, 40000),
    (9000, 70001),
    (66000, 3000),
    (1, 66000),
]
LONG_KINDS = [
    (kind, n)
    for kind in ("window", "top_k", "local", "any", "short", "most")
    for n in LONG
    if kind not in ("top_k", "local") or n[0] == n[1]
]
