"""dmattn.compat.flashmask against FlashMask's definition, written out by rows and columns."""

from __future__ import annotations

import dmattn
import pytest
import torch
from dmattn.compat.flashmask import flashmask_attention, interval_masks
from dmattn.testing import AttentionCase, assert_close_to_reference, run, strategies
from hypothesis import given
from hypothesis import strategies as st

tensor = strategies.random_tensor
TRUTH = torch.float64


def seen_by_rows(indices, queries, causal):
    """Row by row and column by column, as the documentation of flashmask_attention says it."""
    batch, heads, keys, columns = indices.shape
    seen = torch.ones(batch, heads, queries, keys, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for j in range(keys):
                r = indices[b, h, j].tolist()
                hidden = [(r[0], queries)] if columns == 1 else [(r[0], r[1])]
                if columns == 2 and not causal:
                    hidden = [(r[0], queries), (0, r[1])]
                if columns == 4:
                    hidden = [(r[0], r[1]), (r[2], r[3])]
                for i in range(queries):
                    if any(first <= i < end for first, end in hidden) or (causal and j > i + keys - queries):
                        seen[b, h, i, j] = False
    return seen


def call(indices, causal, **options):
    def fn(query, key, value, _, *, dropout_p, scale, **__):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, lse = flashmask_attention(
            q, k, v, indices, causal=causal, dropout=dropout_p, softmax_scale=scale, return_softmax_lse=True, **options
        )
        return out.transpose(1, 2), lse

    return fn


def case_of(queries, keys, visible, dtype=TRUTH, device="cpu", **fields):
    q, k, v = (tensor((2, h, n, 16), h, dtype, device) for h, n in ((4, queries), (2, keys), (2, keys)))
    return AttentionCase(q, k, v, visible=visible.to(device), **fields)


FORMS = [(True, 1), (True, 2), (False, 2), (False, 4)]


@pytest.mark.parametrize(("causal", "columns"), FORMS)
@given(data=st.data())
def test_any_rows(device, exact, causal, columns, data):
    """Runs that are empty, that begin behind their end, that overlap, and rows out of range."""
    heads = data.draw(st.sampled_from([1, 2, 4]))
    queries, keys = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    rows = st.integers(-2, queries + 2)
    numbers = data.draw(st.lists(rows, min_size=2 * heads * keys * columns, max_size=2 * heads * keys * columns))
    indices = torch.tensor(numbers, dtype=torch.int32).view(2, heads, keys, columns)
    case = case_of(queries, keys, seen_by_rows(indices.clamp(min=0), queries, causal), exact, device, scale=0.3)
    assert_close_to_reference(case, run(case, call(indices.to(device), causal)))


@pytest.mark.parametrize(("causal", "columns"), FORMS)
def test_masks_are_disjoint_and_say_the_same(causal, columns):
    torch.manual_seed(columns)
    indices = torch.randint(0, 11, (2, 2, 10, columns), dtype=torch.int32)
    masks = interval_masks(indices, 10, causal)
    assert len(masks) == {(True, 1): 1, (True, 2): 2, (False, 2): 1, (False, 4): 3}[causal, columns]
    counts = sum(mask.to_bool(10, 10).int() for mask in masks)
    assert torch.equal(counts, seen_by_rows(indices, 10, causal).int())


def documents(lengths):
    ends = torch.tensor(lengths).cumsum(0).int()
    return torch.repeat_interleave(ends, torch.tensor(lengths)).view(1, 1, -1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    """Answers that share a question, and the same with the last rows seeing every key before them: one run of rows a key, and two."""
    indices = documents([40, 50, 20]).expand(1, 1, -1, 1).clone()
    indices[:, :, :20] = 110
    gap = torch.cat((indices, torch.full_like(indices, 100)), 3)
    for given_indices in (indices, gap):
        case = case_of(110, 110, seen_by_rows(given_indices, 110, True).expand(2, -1, -1, -1), dtype)
        assert_close_to_reference(case, run(case, call(given_indices, True)))


@pytest.mark.parametrize("columns", [1, 2])
def test_dropout_is_that_of_one_pass(columns):
    indices = torch.tensor([[4, 7]] * 9, dtype=torch.int32)[None, None, :, :columns]
    pair = torch.tensor([123, 4])
    seen = seen_by_rows(indices, 9, True)
    q, k, v = (tensor((2, 9, h, 16), h, TRUTH) for h in (4, 2, 2))
    options = {"causal": True, "dropout": 0.4}
    out, back = flashmask_attention(q, k, v, indices, fixed_seed_offset=pair, return_seed_offset=True, **options)
    seed = pair[:1] * dmattn.compat.flashmask.MIX + pair[1:]
    expected = dmattn.attention(*(x.transpose(1, 2) for x in (q, k, v)), seen, dropout_p=0.4, dropout_seed=seed)
    torch.testing.assert_close(out.transpose(1, 2), expected)
    assert torch.equal(back, pair)
    drawn, pair = flashmask_attention(q, k, v, indices, return_seed_offset=True, **options)
    assert torch.equal(flashmask_attention(q, k, v, indices, fixed_seed_offset=pair, **options), drawn)
    assert not torch.equal(drawn, out)
    plain = flashmask_attention(q, k, v, indices, causal=True)
    assert torch.equal(flashmask_attention(q, k, v, indices, training=False, **options), plain)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [3, (2, 4), (-1, 2), None])
def test_window(causal, window):
    left, right = (window, window) if isinstance(window, int) else window or (-1, -1)
    seen = torch.ones(9, 12, dtype=torch.bool)
    for i in range(9):
        for j in range(12):
            p = i + 3
            seen[i, j] = (left < 0 or j >= p - left) and (right < 0 or j <= p + right) and (not causal or j <= p)
    case = case_of(9, 12, seen[None, None])
    assert_close_to_reference(case, run(case, call(None, causal, window_size=window)))


def test_blocks_are_hidden_in_every_pass():
    indices = torch.tensor([[50, 90]] * 200, dtype=torch.int32)[None, None].expand(2, -1, -1, -1)
    blocks = torch.tensor([[[[1, 0], [1, 1]]], [[[0, 1], [0, 1]]]], dtype=torch.int32)
    dense = blocks.bool().repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :200, :200]
    case = case_of(200, 200, seen_by_rows(indices, 200, True) & dense)
    assert_close_to_reference(case, run(case, call(indices, True, block_mask=blocks)))


def test_gradients_by_differences():
    indices = torch.tensor([[2, 4, 5, 6]] * 3 + [[0, 2, 1, 7]] * 3, dtype=torch.int32)[None, None]

    def fn(q, k, v):
        out, lse = flashmask_attention(q, k, v, indices, return_softmax_lse=True)
        return out, torch.where(lse > -torch.inf, lse, 0.0)

    leaves = [tensor((1, 6, h, 8), h, TRUTH).requires_grad_() for h in (2, 1, 1)]
    assert torch.autograd.gradcheck(fn, leaves)


def test_compiles_without_a_graph_break():
    indices = torch.tensor([[3, 5, 0, 1]] * 8, dtype=torch.int32)[None, None]
    q, k, v = (tensor((1, 8, 2, 16), i) for i in range(3))
    compiled = torch.compile(flashmask_attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v, indices), flashmask_attention(q, k, v, indices))
