"""Arguments that models need: sinks, query_offset, softcap=None, and the weights of chosen heads and queries."""

from __future__ import annotations

import dataclasses

import dmattn
import pytest
import torch
import torch.nn.functional as F
from dmattn import BlockMask, IntervalMask
from dmattn.masks.heads import with_rank
from dmattn.testing import AttentionCase, assert_close_to_reference, per_query_head, run, run_reference, strategies
from hypothesis import given
from hypothesis import strategies as st

tensor = strategies.random_tensor


# Sinks ------------------------------------------------------------------------------------------------------------------------------


def with_a_key_for_the_sink(case: AttentionCase, sinks: torch.Tensor) -> AttentionCase:
    """The same problem with the sink as one more key: zero, so that its product is zero, with the sink for its bias and a value of zero."""
    heads, keys = case.query.shape[1], case.key.shape[2]
    dtype = torch.float64 if case.query.dtype == torch.float64 else torch.float32
    key_bias = torch.zeros(1, 1, keys, device=sinks.device) if case.key_bias is None else with_rank(case.key_bias, 3)[:1]
    key_bias = per_query_head(key_bias.to(dtype), heads).expand(-1, heads, -1)
    return dataclasses.replace(
        case,
        key=F.pad(case.key, (0, 0, 0, 1)),
        value=F.pad(case.value, (0, 0, 0, 1)),
        key_bias=torch.cat([key_bias, sinks.to(dtype)[None, :, None]], dim=2),
        visible=F.pad(case.seen(), (0, 1), value=True),
        mask=None,
        is_causal=False,
        query_offset=None,
    )


@given(data=st.data())
def test_sinks_are_keys_without_a_value(device, data):
    drawn = dataclasses.replace(data.draw(strategies.attention_cases(device, max_length=100)), bias=None, sinks=None)
    heads, keys = drawn.query.shape[1], drawn.key.shape[2]
    sinks = 2 * tensor((heads,), data.draw(strategies.seeds()), device=device)
    if data.draw(st.booleans()):
        sinks[::2] = -torch.inf
    case = with_a_key_for_the_sink(drawn, sinks)

    def fn(query, key, value, _, *, key_bias, **options):
        options |= {
            "mask": drawn.mask,
            "is_causal": drawn.is_causal,
            "query_offset": drawn.query_offset,
            "key_bias": key_bias[:, :, :keys],
            "sinks": key_bias[0, :, keys],
        }
        out, lse = dmattn.attention(query, key[:, :, :keys], value[:, :, :keys], **options)
        return out, dmattn.lse_with_sink(lse, options["sinks"])

    results, expected = run(case, fn), run_reference(case)
    for name in ("grad_key", "grad_value"):  # of the key that is not there
        results[name][:, :, keys] = expected[name][:, :, keys]
    assert_close_to_reference(case, results)


def test_without_keys_nothing_becomes_nan(device, dtype):
    q, k = tensor((1, 2, 5, 8), 0, dtype, device).requires_grad_(), tensor((1, 2, 3, 8), 1, dtype, device)
    for value in (1.0, -torch.inf, torch.inf):
        sinks = torch.full((2,), value, device=device, requires_grad=True)
        out, lse = dmattn.attention(q, k, k, is_causal=True, sinks=sinks, return_lse=True)
        assert (out[:, :, :2] == 0).all()
        whole = dmattn.lse_with_sink(lse, sinks)
        gradients = torch.autograd.grad((out.sum(), whole.masked_fill(whole.isinf(), 0.0).sum()), (q, sinks))
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert torch.equal(whole[:, :, :2], sinks.detach()[None, :, None].expand(1, 2, 2).to(whole.dtype))


# query_offset -----------------------------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_query_offset_moves_positions(device, dtype, data):
    shape = data.draw(strategies.shapes(max_length=100))
    drawn = data.draw(strategies.interval_masks(shape, device))
    numbers = data.draw(st.lists(st.integers(-shape.Sq - 2, shape.Sk + 3), min_size=shape.B, max_size=shape.B))
    kind = data.draw(st.sampled_from(("int", "0-d", "batch", "default")))
    numbers = numbers if kind == "batch" else numbers[:1]
    numbers = [shape.Sk - shape.Sq] if kind == "default" else numbers
    offset = numbers[0] if kind in ("int", "default") else torch.tensor(numbers, device=device)
    offset = offset[0] if kind == "0-d" else offset
    causal = data.draw(st.booleans())
    start, end = (per_query_head(bound, shape.H).long()[:, :, None] for bound in (drawn.mask.start, drawn.mask.end))
    p = torch.tensor(numbers, device=device)[:, None, None, None] + torch.arange(shape.Sq, device=device)[:, None]
    visible = (start <= p) & (p < end)
    visible = visible & (torch.arange(shape.Sk, device=device) <= p) if causal else visible
    visible = visible.expand(-1, -1, shape.Sq, shape.Sk)
    sizes = ((shape.H, shape.Sq, shape.D), (shape.Hkv, shape.Sk, shape.D), (shape.Hkv, shape.Sk, shape.Dv))
    case = AttentionCase(*(tensor((shape.B, *size), i, dtype, device) for i, size in enumerate(sizes)), visible=visible)

    def fn(query, key, value, _, *, is_causal, **options):
        return dmattn.attention(query, key, value, drawn.mask, is_causal=causal, query_offset=offset, **options)

    assert_close_to_reference(case, run(case, fn))


def test_query_offset_keeps_starts_that_come_after_causality(device, dtype):
    q, k = tensor((1, 1, 6, 8), 0, dtype, device), tensor((1, 1, 20, 8), 1, dtype, device)
    keys, p = torch.arange(20, dtype=torch.int32, device=device), 9 + torch.arange(6, device=device)[:, None]
    late = IntervalMask(keys + 4, torch.full_like(keys, dmattn.FOREVER))
    out = dmattn.attention(q, k, k, late, is_causal=True, query_offset=9)
    assert torch.equal(out, dmattn.attention(q, k, k, keys + 4 <= p))


def test_query_offset_leaves_block_masks(device, dtype):
    q, k = tensor((1, 1, 6, 8), 0, dtype, device), tensor((1, 1, 20, 8), 1, dtype, device)
    seen = tensor((6, 20), 2, device=device) > 0
    for mask in (seen, BlockMask.from_bool(seen), IntervalMask.causal(20, device=device) & BlockMask.from_bool(seen)):
        out = dmattn.attention(q, k, k, mask, is_causal=True, query_offset=9)
        p = 9 + torch.arange(6, device=device)[:, None]
        assert torch.equal(out, dmattn.attention(q, k, k, seen & (torch.arange(20, device=device) <= p)))


@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
def test_positions_at_the_ends_of_their_dtype_do_not_wrap(device, dtype, integers):
    least, most = (
        torch.tensor(end, dtype=integers, device=device) for end in (torch.iinfo(integers).min, torch.iinfo(integers).max)
    )
    q, k = tensor((1, 1, 6, 8), 0, dtype, device), tensor((1, 1, 20, 8), 1, dtype, device)
    assert not dmattn.attention(q, k, k, is_causal=True, query_offset=least).any()
    last = dmattn.attention(q, k, k, is_causal=True, query_offset=most)
    assert torch.equal(last, dmattn.attention(q, k, k, torch.ones(6, 20, dtype=torch.bool, device=device)))
    causal, near = IntervalMask.causal(20, device=device), IntervalMask.sliding_window(20, 3, device=device)
    assert causal.alive(most).all()
    assert not causal.alive(least).any()
    assert causal.alive(torch.stack((least, most)).clamp(-7, 7)).sum(2).flatten().tolist() == [0, 8]
    for n, hidden in ((least, near.shift(least).end < 0), (most, near.shift(most).start > 20)):
        assert hidden.all(), n


@pytest.mark.parametrize("causal", [True, False])
def test_dynamic_masks_of_a_chunk(causal):
    """The queries of a prompt in chunks, over all keys, give what the whole prompt gives."""
    q, k, v = (tensor((2, h, 60, 16), i, torch.float64) for i, h in enumerate((4, 2, 2)))
    scores, sinks = tensor((2, 2, 60), 4), tensor((4,), 5)
    whole = dmattn.dynamic_mask_attention(q, k, v, scores, 7, is_causal=causal, sinks=sinks)
    for first in (0, 20, 40):
        chunk = q[:, :, first : first + 20]
        for offset in (first, torch.tensor(first), torch.full((2,), first)):
            out = dmattn.dynamic_mask_attention(chunk, k, v, scores, 7, is_causal=causal, query_offset=offset, sinks=sinks)
            torch.testing.assert_close(out, whole[:, :, first : first + 20])


def test_query_offset_and_sinks_compile_once_for_all_lengths_and_offsets():
    compiles = []

    def counted(graph, inputs):
        compiles.append(graph)
        return graph.forward

    def attend(q, k, offset, sinks):
        return dmattn.attention(q, k, k, is_causal=True, query_offset=offset, sinks=sinks, softcap=None)

    traced = torch.compile(attend, fullgraph=True, dynamic=True, backend=counted)
    sinks = tensor((2,), 3)
    for Sq, Sk, offset in ((5, 9, 2), (7, 12, 5), (9, 30, 21), (4, 40, 0)):
        q, k = tensor((1, 2, Sq, 8), 0), tensor((1, 2, Sk, 8), 1)
        given = torch.tensor(offset)
        torch.testing.assert_close(traced(q, k, given, sinks), attend(q, k, given, sinks))
    assert len(compiles) == 1


def test_softcap_none_is_none(device, dtype):
    q = tensor((1, 2, 9, 16), 0, dtype, device)
    assert torch.equal(dmattn.attention(q, q, q, softcap=None), dmattn.attention(q, q, q))
    scores = tensor((1, 2, 9), 1, device=device)
    ours = dmattn.dynamic_mask_attention(q, q, q, scores, 3, softcap=None)
    assert torch.equal(ours, dmattn.dynamic_mask_attention(q, q, q, scores, 3))


# Weights ----------------------------------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_weights_are_those_of_the_reference(data):
    """With the identity for values the reference's output is its weights."""
    drawn = data.draw(strategies.attention_cases(max_length=100))
    case = dataclasses.replace(drawn.to(torch.float64), dropout_p=0.0)
    batch, heads, queries, _ = case.query.shape
    keys = case.key.shape[2]
    identity = torch.eye(keys, dtype=torch.float64).expand(*case.key.shape[:2], -1, -1)
    weights, lse = dataclasses.replace(case, value=identity).call_reference()
    head = data.draw(st.lists(st.integers(0, heads - 1), max_size=3))
    row = data.draw(st.lists(st.integers(0, queries - 1), max_size=5)) if queries else []
    options = {
        name: getattr(case, name) for name in ("key_bias", "bias", "is_causal", "scale", "softcap", "sinks", "query_offset")
    }
    expected = weights[:, head][:, :, row]
    for chosen in ((head, row), (torch.tensor(head).long(), torch.tensor(row).int())):
        for known in (None, lse):
            ours = dmattn.attention_weights(case.query, case.key, case.mask, known, heads=chosen[0], rows=chosen[1], **options)
            assert ours.shape == (batch, len(head), len(row), keys)
            torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("offset", [-1e9, 1e9, torch.finfo(torch.float32).min])
def test_weights_beside_large_biases_are_those_of_the_output(offset):
    """lse is rounded there: it does not say what the weights of a row are divided by."""
    q, k, v = (tensor((1, 2, n, 8), i, torch.float32) for i, n in enumerate((5, 7, 7)))
    for options in ({}, {"sinks": torch.tensor([0.0, offset])}):
        options = {"key_bias": torch.full((7,), offset), **options}
        out, lse = dmattn.attention(q, k, v, return_lse=True, **options)
        for known in (None, lse):
            weights = dmattn.attention_weights(q, k, None, known, **options)
            torch.testing.assert_close(weights @ v, out)


def test_weights_under_autocast_are_float32():
    """query and key are rounded, as those of attention are; products of them are not."""
    q, k = (tensor((1, 2, n, 8), i, torch.float32) for i, n in enumerate((5, 7)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = dmattn.attention_weights(q, k)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, dmattn.attention_weights(q.bfloat16(), k.bfloat16()))


def test_weights_have_gradients_and_do_not_read_hidden_keys():
    q, k = tensor((1, 2, 5, 8), 0).requires_grad_(), tensor((1, 2, 7, 8), 1)
    k[:, :, 4] = torch.nan
    k.requires_grad_()
    hidden = torch.ones(5, 7, dtype=torch.bool)
    hidden[:, 4] = False
    weights = dmattn.attention_weights(q, k, hidden, rows=[1, 3])
    assert weights.isfinite().all()
    gradients = torch.autograd.grad(weights.square().sum(), (q, k))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][:, :, [0, 2, 4]] == 0).all()
