"""Short problems on CUDA: selection in one launch, tiles without lists, one list for backward, and a key_bias beside keys in order."""

from __future__ import annotations

import functools

import dmattn
import pytest
import torch
from cuda_inputs import assert_same_results, long_spans
from dmattn.testing.case import AttentionCase
from dmattn.testing.checks import assert_matches_reference

pytestmark = pytest.mark.gpu
LENGTHS = [1, 2, 31, 128, 511, 512, 513, 1024, 1025, 2047, 2049, 4095, 4096, 4097]


def scores_of(kind, length, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(2, 3, length, generator=generator)
    chance = torch.rand(2, 3, length, generator=generator)
    if kind == "ties":
        draw = (draw * 2).round()
    if kind == "equal":
        draw = torch.zeros_like(draw)
    if kind == "rising":
        draw = torch.linspace(0, 1, length).expand_as(draw).clone()
    if kind == "close":  # alike in the bits that are sorted by first, because one score is far from the others
        draw = (1 + 1e-6 * draw).index_fill(2, torch.tensor([length // 2]), -torch.inf)
    if kind == "never":
        draw = draw.masked_fill(chance < 0.3, -torch.inf).masked_fill(chance > 0.8, torch.nan)
    return draw.to(dtype)


@pytest.mark.parametrize("kind", ["random", "ties", "equal", "rising", "close", "never"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", LENGTHS)
def test_short_selection_is_the_same_as_on_a_cpu(length, dtype, kind):
    scores = scores_of(kind, length, dtype)
    for window in sorted({1, length // 5 + 1, length // 2 + 1, max(1, length - 1), length}):
        for causal, local, sink in ((True, 0, 0), (True, min(7, length), min(3, length)), (False, 0, 0)):
            expected = torch.ops.dmattn.select(scores, None, window, causal, local, sink)
            got = torch.ops.dmattn.select(scores.cuda(), None, window, causal, local, sink)
            assert torch.equal(got.cpu(), expected), (window, causal, local, sink)


@pytest.mark.parametrize("kind", ["random", "ties", "never"])
@pytest.mark.parametrize("length", [100, 500, 1000, 1024])
def test_many_short_heads_are_selected_as_few_are(length, kind):
    """Keys of few short heads are counted, those of many are sorted."""
    few = scores_of(kind, length, torch.float32).cuda()
    many = few.repeat(60, 1, 1)
    for window in (1, length // 5 + 1, length - 1):
        for local, sink in ((0, 0), (7, 3)):
            expected = torch.ops.dmattn.select(few, None, window, True, local, sink)
            got = torch.ops.dmattn.select(many, None, window, True, local, sink)
            assert torch.equal(got, expected.repeat(len(many) // len(few), 1, 1)), (window, local, sink)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1025, 2049])
def test_selection_of_half_a_block_takes_no_longer_than_of_a_whole(length):
    """What stands in the places that have no key is alike, and must not be compared with each other."""

    def microseconds(keys):
        scores = torch.randn(1, 8, keys, generator=torch.Generator().manual_seed(0)).cuda()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                torch.ops.dmattn.select(scores, None, keys // 4, True)
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / 20)
        return min(times)

    assert microseconds(length) < 2 * microseconds(2 * (length - 1))


@pytest.mark.parametrize("heads", [(2, 2), (8, 2)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 1), (63, 64), (200, 200), (513, 513), (300, 1100), (900, 600)], ids=str)
@pytest.mark.parametrize("size", [64, 96, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_short_selected_keys(causal, size, lengths, heads):
    queries, keys = lengths
    generator = torch.Generator("cuda").manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, device="cuda")
    query, key, value = (draw(2, h, n, size).bfloat16() for h, n in ((heads[0], queries), (heads[1], keys), (heads[1], keys)))
    scores = draw(2, heads[1], keys)
    mask = dmattn.IntervalMask.top_k(scores, max(1, keys // 4), is_causal=causal)
    mask = dmattn.IntervalMask(mask.start, mask.end)  # of which nobody knows how many keys a query sees, so backward lists them
    case = AttentionCase(query, key, value, mask, mask.to_bool(queries, keys), key_bias=scores, is_causal=causal)
    assert_matches_reference(case)


def test_keys_that_nobody_sees_may_hold_anything():
    generator = torch.Generator("cuda").manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, device="cuda")
    leaves = [draw(2, 4, 1000, 128).bfloat16() for _ in range(3)]
    scores = draw(2, 4, 1000)
    grad_out = draw(2, 4, 1000, 128).bfloat16()
    dead = dmattn.IntervalMask.top_k(scores, 100).end == torch.arange(1000, device="cuda")
    assert dead.any()

    def results(strange):
        query, key, value = (x.clone() for x in leaves)
        if strange:
            key[dead], value[dead] = torch.nan, torch.inf
        inputs = [x.requires_grad_() for x in (query, key, value, scores.clone())]
        out = dmattn.dynamic_mask_attention(*inputs, 100)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]

    assert_same_results(results(True), results(False))
    assert all(got.isfinite().all() for got in results(True))


@pytest.mark.parametrize("kind", ["window", "top_k", "any", "short", "most"])
@pytest.mark.parametrize("lengths", [(500, 500), (769, 900), (4096, 4096), (4096, 1500), (1500, 4096), (4097, 4096)], ids=str)
@pytest.mark.parametrize("size", [64, 128])
def test_gradients_of_one_list(kind, lengths, size):
    """Beside those with a fixed order of sums, whose lists are those of segments."""
    queries, keys = lengths
    if kind == "top_k" and queries != keys:
        queries = keys
    torch.manual_seed(0)
    shapes = (4, queries, size), (2, keys, size), (2, keys, size), (2, keys)
    q, k, v, key_bias = (torch.randn(2, *shape, device="cuda") for shape in shapes)
    leaves = [x.requires_grad_() for x in (q.bfloat16(), k.bfloat16(), v.bfloat16(), key_bias)]
    grad_out = torch.randn_like(leaves[0])
    start, end = long_spans(kind, 2, queries, keys)

    def gradients(deterministic):
        mask = dmattn.IntervalMask(start, end)
        causal = kind in ("window", "top_k", "most")
        out = dmattn.attention(*leaves[:3], mask, key_bias=leaves[3], is_causal=causal, deterministic=deterministic)
        return torch.autograd.grad(out, leaves, grad_out)

    assert_same_results(gradients(False), gradients(True))


@pytest.mark.parametrize("bias", ["usual", "huge", "hides some"])
@pytest.mark.parametrize("lengths", [(1, 1), (64, 64), (200, 77), (77, 200), (700, 700)], ids=str)
@pytest.mark.parametrize(("heads", "size"), [((4, 4, 4), 128), ((8, 2, 2), 64), ((6, 2, 6), 128), ((4, 1, 1), 256)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_key_bias_without_a_mask(causal, heads, size, lengths, bias):
    (query_heads, kv_heads, bias_heads), (queries, keys) = heads, lengths
    generator = torch.Generator("cuda").manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, device="cuda")
    query, key, value = (draw(2, h, n, size).bfloat16() for h, n in ((query_heads, queries), (kv_heads, keys), (kv_heads, keys)))
    key_bias = draw(2, bias_heads, keys) * (1e6 if bias == "huge" else 1)
    if bias == "hides some":
        key_bias[:, :, ::3] = -torch.inf
    assert_matches_reference(AttentionCase(query, key, value, key_bias=key_bias, is_causal=causal))
