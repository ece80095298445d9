"""Lists of live keys and what is computed from them, around every edge of tiles and segments and at lengths far beyond one list."""

from __future__ import annotations

import itertools

import dmattn
import pytest
import torch
from cuda_inputs import LONG_KINDS, long_spans
from dmattn.testing.case import AttentionCase
from dmattn.testing.tolerance import assert_close_to_reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("kind", "lengths"), LONG_KINDS, ids=str)
def test_lists_of_long_problems(kind, lengths, size):
    queries, keys = lengths
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, size, device="cuda").bfloat16() for h, n in ((6, queries), (3, keys), (3, keys)))
    start, end = long_spans(kind, 3, queries, keys)
    causal = kind in ("window", "top_k", "local", "most")
    out, lse = dmattn.attention(q, k, v, dmattn.IntervalMask(start, end), is_causal=causal, return_lse=True)
    check_some_rows(out, lse, q, k, v, start, end, causal)


@pytest.mark.parametrize("kind", ["window", "top_k", "local", "any", "short"])
@pytest.mark.parametrize("queries", [9000, 500])
def test_lists_of_many_heads(kind, queries):
    """Several parts of a head's keys by one block, two lists by one block; starts that all heads share."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 70, n, 64, device="cuda").bfloat16() for n in (queries, 9000, 9000))
    start, end = long_spans(kind, 70, queries, 9000)
    start, causal = start[:1, :1], kind in ("window", "top_k", "local")
    out, lse = dmattn.attention(q, k, v, dmattn.IntervalMask(start, end), is_causal=causal, return_lse=True)
    check_some_rows(out, lse, q, k, v, start, end, causal)


@pytest.mark.parametrize("kind", ["full", "causal", "window", "any", "short"])
@pytest.mark.parametrize("heads", [(3, 3), (6, 1), (64, 1), (128, 1)], ids=str)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("queries", [1, 191, 192, 193, 385, 767, 768, 769, 1537])
def test_edges_of_tiles_and_segments(queries, size, heads, kind):
    """Tiles are 128 or 192 rows, of up to 64 or 128 heads each; segments 768 queries and more."""
    torch.manual_seed(0)
    keys = queries + queries % 3 * 50
    q, k, v = (
        torch.randn(2, h, n, size, device="cuda").half() for h, n in zip((*heads, heads[1]), (queries, keys, keys), strict=True)
    )
    causal, mask, key_bias = kind in ("causal", "window"), None, None
    start, end = torch.full((2, heads[1], keys), -(2**31), dtype=torch.int32, device="cuda"), None
    if kind in ("full", "causal"):
        end = torch.full_like(start, 2**31 - 1)
    else:
        start, end = long_spans(kind, heads[1], queries, keys)
        mask, key_bias = dmattn.IntervalMask(start, end), torch.randn(2, heads[1], keys, device="cuda")
    out, lse = dmattn.attention(q, k, v, mask, key_bias=key_bias, is_causal=causal, return_lse=True)
    check_some_rows(out, lse, q, k, v, start, end, causal, key_bias)


def test_more_than_a_thousand_lists():
    torch.manual_seed(0)
    length = 900_000
    q, k, v = (torch.randn(1, 1, length, 64, device="cuda").bfloat16() for _ in range(3))
    start = torch.arange(length, device="cuda", dtype=torch.int32)[None, None]
    end = start + torch.randint(-100, 900, (1, 1, length), device="cuda", dtype=torch.int32)
    out, lse = dmattn.attention(q, k, v, dmattn.IntervalMask(start, end), is_causal=True, return_lse=True)
    check_some_rows(out, lse, q, k, v, start, end, True)


@pytest.mark.parametrize(
    "kind", ["all queries see them", "some leave", "some come late", "more than are copied", "none in one head"]
)
@pytest.mark.parametrize(
    ("heads", "mask_heads", "bias_heads"), [(2, 2, 2), (2, 1, None), (6, 2, 2), (6, 6, 6), (6, 2, 6), (32, 2, 2)]
)
@pytest.mark.parametrize(
    ("size", "lengths"), [(64, (9000, 3001)), (128, (8192, 5000)), (256, (8200, 2000)), (72, (3000, 9000)), (64, (512, 4096))]
)
def test_one_list_of_keys_for_all_queries(kind, heads, mask_heads, bias_heads, size, lengths):
    """Without causality: long enough for compact keys where the live keys are the same for all queries."""
    queries, keys = lengths
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, h, n, size, device="cuda").bfloat16() for h, n in ((heads, queries), (2, keys), (2, keys)))
    key_bias = None if bias_heads is None else torch.randn(2, bias_heads, keys, device="cuda")
    window = keys // 2 if kind == "more than are copied" else keys // 5
    end = torch.ops.dmattn.select(torch.randn(2, mask_heads, keys, device="cuda"), None, window, False)
    if kind == "some leave":
        inside = torch.randint(keys - queries, keys, end.shape, device="cuda", dtype=torch.int32)
        end = torch.where((end > 0) & (torch.rand(end.shape, device="cuda") < 0.1), inside, end)
    if kind == "none in one head":
        end[1, 0] = -(2**31)
    start = torch.full_like(end, -(2**31))
    if kind == "some come late":  # within the first segment
        start[:, :, ::5] = keys - queries + 200
    out, lse = dmattn.attention(q, k, v, dmattn.IntervalMask(start, end), key_bias=key_bias, return_lse=True)
    check_some_rows(out, lse, q, k, v, start, end, False, key_bias)


def test_keys_that_the_last_query_of_a_segment_sees():
    """And the first of the next: 768 neighbouring keys each, so that whole groups of keys begin there. Nobody else sees anything."""
    length, generator = 9216, torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, 2, length, 64, generator=generator).bfloat16().cuda().requires_grad_() for _ in range(3)]
    start = (torch.arange(length, dtype=torch.int32, device="cuda") // 768 + 1) * 768 - 1
    position = torch.arange(length, device="cuda")
    rows = position[(position % 768 == 0) | (position % 768 == 767)][1:]  # key 0 is seen from query 767 on
    visible = (start <= rows[:, None]) & (rows[:, None] < start + 2)
    assert visible.any(-1).all()
    case = AttentionCase(leaves[0].detach()[:, :, rows], *(x.detach() for x in leaves[1:]), visible=visible[None, None])
    out, lse = dmattn.attention(*leaves, dmattn.IntervalMask(start, start + 2), return_lse=True)
    incoming = [torch.zeros_like(x) for x in (out, lse)]
    for whole, part in zip(incoming, case.incoming_gradients(), strict=True):
        whole[:, :, rows] = part.to(whole.dtype)
    grad_query, grad_key, grad_value = torch.autograd.grad((out, lse), leaves, incoming)
    results = {"out": out.detach()[:, :, rows], "lse": lse.detach()[:, :, rows]}
    results |= {"grad_query": grad_query[:, :, rows], "grad_key": grad_key, "grad_value": grad_value}
    assert_close_to_reference(case, results)
    others = torch.ones(length, dtype=torch.bool, device="cuda").index_fill(0, rows, False)
    assert not out[:, :, others].any()
    assert torch.isneginf(lse[:, :, others]).all()
    assert not grad_query[:, :, others].any()


def check_some_rows(out, lse, q, k, v, start, end, causal, key_bias=None):
    """Some of the queries, by the rule, for each head of the keys; start, end and key_bias for each of them, or for each of the queries.

    The case is in float32, which holds the numbers exactly, so that lse has to be as exact as sums in float32 are.
    """
    (batches, heads, queries, _), kv_heads, keys = q.shape, k.shape[1], k.shape[2]
    rows = torch.randint(0, queries, (200,), device="cuda")
    rows[100:] = torch.randint(max(0, queries - keys), queries, (100,), device="cuda")  # those in front may see nothing
    rows[0], rows[1] = 0, queries - 1
    group = heads // kv_heads

    def of_head(x, batch, kv_head):
        wide = x.repeat_interleave(heads // x.shape[1], 1).expand(batches, heads, keys)
        return wide[batch, kv_head * group : (kv_head + 1) * group][None]

    for batch, kv_head in itertools.product(range(batches), range(kv_heads)):
        alone = slice(batch, batch + 1), slice(kv_head * group, (kv_head + 1) * group)
        key, value = (x[batch : batch + 1, kv_head : kv_head + 1].float() for x in (k, v))
        for some in rows.split(max(1, 2**25 // (group * keys))):
            positions = (some + keys - queries)[:, None]
            visible = of_head(start, batch, kv_head)[:, :, None] <= positions
            visible &= of_head(end, batch, kv_head)[:, :, None] > positions
            if causal:
                visible &= torch.arange(keys, device="cuda") <= positions
            case = AttentionCase(
                q[alone][:, :, some].float(), key, value, visible=visible,
                key_bias=None if key_bias is None else of_head(key_bias, batch, kv_head),
            )  # fmt: skip
            assert_close_to_reference(case, {"out": out[alone][:, :, some], "lse": lse[alone][:, :, some]})
