"""dmattn.compat.block_sparse_attn against the masks that Block-Sparse-Attention's documentation and tests describe, element by element."""

from __future__ import annotations

import pytest
import torch
from dmattn.compat.block_sparse_attn import block_sparse_attn_func, block_streaming_attn_func, token_streaming_attn_func
from dmattn.testing import AttentionCase, assert_close_to_reference, per_query_head, run, strategies

tensor = strategies.random_tensor
TRUTH = torch.float64
LENGTHS = [((130, 300), (300, 300)), ((300, 1, 0), (140, 5, 7)), ((257,), (512,)), ((512,), (257,))]
HEADS = 4


def ceil(a, b):
    return -(-a // b)


def seen_by_kind(queries, keys, kind, tables, sink, local, causal, exact):
    """bool [queries, keys] of one sequence and head: first blocks and the last blocks that the query's own block reaches."""
    i, j = torch.arange(queries)[:, None], torch.arange(keys)[None]
    p = i + keys - queries
    seen = (j <= p) if causal else torch.ones(queries, keys, dtype=torch.bool)
    if kind > 0:
        seen &= tables[kind - 1].repeat_interleave(128, 0).repeat_interleave(128, 1)[:queries, :keys]
    elif kind < 0 and exact:
        seen &= (j < sink) | (p - j < local)
    elif kind < 0:
        for row in range(ceil(queries, 128)):
            # The columns that row's blocks reach, as the kernels count them.
            skipped = max((queries - keys) // 128, 0)
            reached = ceil(max(keys - queries, 0), 128) + 1 + row - skipped if causal else ceil(keys, 128)
            columns = torch.arange(ceil(keys, 128))
            shown = (columns < sink) | ((columns >= reached - local) & (columns < reached))
            seen[row * 128 : (row + 1) * 128] &= shown.repeat_interleave(128)[:keys]
    return seen


def problem(lengths, kinds, info, causal, exact, tables=None, dtype=TRUTH, device="cpu"):
    """A packed case, what each pair sees, and the arguments."""
    lengths_q, lengths_k = lengths
    seen = torch.zeros(1, HEADS, sum(lengths_q), sum(lengths_k), dtype=torch.bool)
    for n, (m, k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        i, j = sum(lengths_q[:n]), sum(lengths_k[:n])
        for h, kind in enumerate(kinds):
            number = kind if kind != 1 else sum(x == 1 for x in kinds[: h + 1])
            own = None if tables is None else tables[n]
            seen[0, h, i : i + m, j : j + k] = seen_by_kind(m, k, number, own, *info[h], causal, exact)
    q, k, v = (tensor((1, h, sum(n), 16), h, dtype, device) for h, n in ((HEADS, lengths_q), (2, lengths_k), (2, lengths_k)))
    case = AttentionCase(q, k, v, visible=seen.to(device), scale=0.3)
    ends = (torch.tensor([0, *n]).cumsum(0).int() for n in lengths)
    arguments = (*ends, torch.tensor(kinds, dtype=torch.int32), torch.tensor(info, dtype=torch.int32).flatten())
    return case, tuple(given.to(device) for given in arguments)


def packed_call(fn, arguments, lengths_q, **options):
    """The function in the layout of dmattn.attention; lse is brought back from a row a sequence."""

    def call(query, key, value, _, *, scale, **__):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out, lse, nothing = fn(q, k, v, *arguments, softmax_scale=scale, return_attn_probs=True, **options)
        assert nothing is None
        assert lse.shape == (len(lengths_q), HEADS, max(lengths_q))
        for row, length in zip(lse, lengths_q, strict=True):
            assert bool((row[:, length:] == -torch.inf).all())
        lse = torch.cat([row[:, :n] for row, n in zip(lse, lengths_q, strict=True)], dim=1)
        return out.transpose(0, 1)[None], lse[None]

    return call


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_dense_streaming_and_block_heads_in_one_call(device, exact, lengths, causal):
    torch.manual_seed(0)
    most = [max(n) for n in lengths]
    tables = torch.rand(len(lengths[0]), 2, ceil(most[0], 128), ceil(most[1], 128)) < 0.5
    case, arguments = problem(lengths, (0, 1, -1, 1), [(1, 1)] * 2 + [(1, 2), (0, 0)], causal, False, tables, exact, device)
    options = {
        "base_blockmask": tables.to(device),
        "max_seqlen_q_": most[0],
        "max_seqlen_k_": most[1],
        "p_dropout": 0.0,
        "is_causal": causal,
    }
    assert_close_to_reference(case, run(case, packed_call(block_sparse_attn_func, arguments, lengths[0], **options)))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("with_tables", [False, True])
def test_exact_streaming_has_gradients(lengths, with_tables):
    most = [max(n) for n in lengths]
    kinds = (-1, 0, -1, 1 if with_tables else -1)
    tables = torch.ones(len(lengths[0]), 1, ceil(most[0], 128), ceil(most[1], 128), dtype=torch.bool)
    tables[:, :, :, 1:] = False
    case, arguments = problem(lengths, kinds, [(3, 20), (0, 0), (0, 1), (150, 7)], True, True, tables)
    options = {"max_seqlen_q_": most[0], "max_seqlen_k_": most[1]}
    fn = token_streaming_attn_func
    if with_tables:
        fn = block_sparse_attn_func
        options |= {"base_blockmask": tables, "p_dropout": 0.0, "is_causal": True, "exact_streaming": True}
    assert_close_to_reference(case, run(case, packed_call(fn, arguments, lengths[0], **options)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_block_streaming(lengths, causal):
    most = [max(n) for n in lengths]
    case, arguments = problem(lengths, (-1, -2, 0, -1), [(1, 1), (0, 2), (9, 9), (2, 0)], causal, False)
    options = {"max_seqlen_q_": most[0], "max_seqlen_k_": most[1], "p_dropout": 0.0, "is_causal": causal}
    assert_close_to_reference(case, run(case, packed_call(block_streaming_attn_func, arguments, lengths[0], **options)))


def test_dropout_drops_its_part():
    lengths = (200,), (200,)
    case, arguments = problem(lengths, (0, 0, -1, -1), [(1, 1)] * 4, True, False)
    q, k, _ = (x[0].transpose(0, 1) for x in (case.query, case.key, case.value))
    ones = torch.ones_like(k)
    torch.manual_seed(2)
    out = block_sparse_attn_func(q, k, ones, *arguments, None, 200, 200, 0.25, is_causal=True)
    assert out.std() > 0
    assert abs(out.mean() - 1) < 4 * out.std() / (200 * HEADS) ** 0.5
    _, lse = case.call_reference()
    plain = block_sparse_attn_func(
        q, k, ones, *arguments, None, 200, 200, 0.0, is_causal=True, softmax_scale=0.3, return_attn_probs=True
    )
    torch.testing.assert_close(plain[1], lse)
    torch.testing.assert_close(plain[0], torch.ones_like(out))


def test_rows_behind_the_sequences_are_zero():
    tables = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    _, arguments = problem(((5,), (6,)), (0, 1, 0, 0), [(0, 0)] * 4, False, False, tables)
    q, k, v = (tensor((n, h, 16), h, TRUTH) for n, h in ((9, HEADS), (8, 2), (8, 2)))
    for base, kinds in ((None, torch.zeros(HEADS).int()), (tables, arguments[2])):
        out = block_sparse_attn_func(q, k, v, *arguments[:2], kinds, arguments[3], base, 5, 6, 0.0)
        weights = (q[:5].transpose(0, 1) @ per_query_head(k[None, :6].transpose(1, 2), HEADS)[0].mT / 4).softmax(-1)
        expected = weights @ per_query_head(v[None, :6].transpose(1, 2), HEADS)[0]
        torch.testing.assert_close(out[:5].transpose(0, 1), expected)
        assert torch.equal(out[5:], torch.zeros_like(out[5:]))


@pytest.mark.parametrize("kinds", [(0, 0, 0, 0), (1, 0, 0, -1)], ids=["intervals", "tables"])
@pytest.mark.parametrize(("tokens_q", "tokens_k"), [(0, 3), (2, 0), (0, 0), (2, 3)])
def test_sequences_that_are_all_empty_give_zeros(kinds, tokens_q, tokens_k):
    """Also with rows behind them, and with greatest lengths that are too large."""
    none = torch.tensor([0, 0], dtype=torch.int32)
    k = tensor((tokens_k, 2, 16), 1)
    for longest in (0, 5):
        q = tensor((tokens_q, HEADS, 16), 0).requires_grad_()
        tables = torch.ones(1, 1, ceil(longest, 128), ceil(longest, 128), dtype=torch.bool)
        info = torch.ones(2 * HEADS, dtype=torch.int32)
        sizes = (tables if 1 in kinds else None, longest, longest, 0.0)
        out, lse, _ = block_sparse_attn_func(q, k, k, none, none, torch.tensor(kinds), info, *sizes, return_attn_probs=True)
        assert torch.equal(out, torch.zeros(tokens_q, HEADS, 16))
        assert torch.equal(lse, torch.full((1, HEADS, longest), -torch.inf))
        out.sum().backward()
        assert torch.equal(q.grad, torch.zeros_like(q))
