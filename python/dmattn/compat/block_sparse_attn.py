"""Block-Sparse-Attention's functions: heads that are dense, streaming or masked by blocks of 128 in one call, over packed sequences.

The same names, arguments and layouts; docs/other_libraries.md says what differs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dmattn import checks
from dmattn.attention import attention
from dmattn.compat import layouts
from dmattn.compat.layouts import Sequences
from dmattn.masks import BlockMask, CombinedMask, IntervalMask

BLOCK = 128  # queries and keys
NAMES = ("q", "k", "v")
Results = Tensor | tuple[Tensor, Tensor, None]


def block_sparse_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    head_mask_type: Tensor,
    streaming_info: Tensor | None,
    base_blockmask: Tensor | None,
    max_seqlen_q_: int,
    max_seqlen_k_: int,
    p_dropout: float,
    deterministic: bool = False,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    exact_streaming: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Attention over packed sequences with a kind of mask for each head, by Block-Sparse-Attention's name.

    Dense and streaming heads are intervals, one pair of integers a key and head. With ``base_blockmask`` the sequences are padded to
    ``max_seqlen_q_`` and ``max_seqlen_k_``, so that their blocks begin where the tables say.

    Args:
        q: [Tq, H, D], sequences one after the other.
        k: [Tk, Hkv, D].
        v: [Tk, Hkv, Dv].
        cu_seqlens_q, cu_seqlens_k: int32 or int64 [B + 1]: 0 and the end of each sequence. Values are checked where they lie on the CPU.
        head_mask_type: integers [H]. 0: dense. Less: streaming. 1: the head takes the next table, in the order of heads; n > 1: table n - 1.
        streaming_info: integers [2 * H]: the number of sinks and of local keys of each head, in blocks or, with exact_streaming, in keys. A
            query sees its sequence's first blocks and the last ones up to its own block's last key; without causality the sequence's last
            ones. None: no head streams (a streaming head would see nothing).
        base_blockmask: bool ``[B, tables, ceil(max_seqlen_q_ / 128), ceil(max_seqlen_k_ / 128)]``, True = visible, or None without such heads.
        ``max_seqlen_q_``, ``max_seqlen_k_``: the greatest lengths.
        p_dropout: probability of dropping a weight.
        deterministic: gradients bitwise equal from run to run.
        softmax_scale: default D ** -0.5.
        is_causal: bottom-right aligned within each sequence, for all heads.
        exact_streaming: sinks and local windows count keys: ``j < sink or p - j < local``; only with is_causal. It has gradients.
        return_attn_probs: also return lse.

    Returns:
        out [Tq, H, Dv], or (out, lse [B, H, ``max_seqlen_q_``], None); lse is -inf behind a sequence's end.

    Raises:
        TypeError, ValueError: names the argument, what was expected and what it got.
    """
    q, k, v = layouts.checked(NAMES, q, k, v, layouts.PACKED)
    checks.each(checks.flag, deterministic=deterministic, is_causal=is_causal, exact_streaming=exact_streaming)
    checks.flag("return_attn_probs", return_attn_probs)
    checks.each(checks.natural_int, max_seqlen_q_=max_seqlen_q_, max_seqlen_k_=max_seqlen_k_)
    ends_q, ends_k = layouts.check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, q, k.shape[0])
    layouts.check_longest("max_seqlen_q_", ends_q, max_seqlen_q_)
    layouts.check_longest("max_seqlen_k_", ends_k, max_seqlen_k_)
    if exact_streaming and not is_causal:
        raise ValueError("exact_streaming: expected False without is_causal, got True")
    heads, batch = q.shape[1], ends_q.shape[0] - 1
    integers: tuple[Any, ...] = ((torch.int32, torch.int64), q, "q")
    kinds = checks.shaped("head_mask_type", head_mask_type, "[H]", *integers, H=heads).int()
    info = streaming_info
    if info is not None:
        info = checks.shaped("streaming_info", info, "[2 * H]", *integers, **{"2 * H": 2 * heads}).int()
    if info is None and checks.values_are_known(kinds) and bool((kinds < 0).any()):
        raise ValueError("streaming_info: expected [2 * H] for streaming heads, got None")
    dropout_p = layouts.of_dropout("p_dropout", p_dropout)
    scale = layouts.of_scale(softmax_scale, q.shape[-1])
    tables = _tables(base_blockmask, kinds, [batch, -(-max_seqlen_q_ // BLOCK), -(-max_seqlen_k_ // BLOCK)], q)
    value_size = v.shape[-1]

    # Lay the sequences out: one after the other, or each in a row of its own.
    if tables is None:
        sequences, _, _ = layouts.packed(ends_q, ends_k, q.shape[0], k.shape[0])
        query, key, value = layouts.heads_first(q, k, v)
    else:
        rows, columns = _rows(ends_q, max_seqlen_q_, q.shape[0]), _rows(ends_k, max_seqlen_k_, k.shape[0])
        sequences = layouts.of_batch(max_seqlen_q_, max_seqlen_k_, ends_k.diff(), q.device)
        sequences = sequences._replace(queries=ends_q.diff().int().view(-1, 1, 1))
        query, key, value = layouts.heads_first(_taken(q, rows), _taken(k, columns), _taken(v, columns))
    mask: IntervalMask | CombinedMask = _intervals(sequences, kinds, info, is_causal, exact_streaming)
    if tables is not None:
        mask = mask & BlockMask.from_blocks(tables, BLOCK)
    out, lse = attention(query, key, value, mask, scale=scale, dropout_p=dropout_p, deterministic=deterministic, return_lse=True)

    # Bring the results back into the caller's layout.
    if tables is None:
        out = out.squeeze(0).transpose(0, 1)
    else:
        of_query = layouts.document_of(ends_q, q.shape[0])
        number = torch.arange(q.shape[0], device=q.device) - ends_q[of_query].long()
        behind = number >= ends_q.diff()[of_query]
        place = of_query * max_seqlen_q_ + number.clamp(max=max(max_seqlen_q_ - 1, 0))
        out = _taken(out.transpose(1, 2).flatten(0, 1), place).masked_fill(behind[:, None, None], 0.0)
    out = out[..., :value_size]
    if not return_attn_probs:
        return out
    if tables is None:
        lse = _taken(lse[0].T, _rows(ends_q, max_seqlen_q_, q.shape[0])).transpose(1, 2)
        within = torch.arange(max_seqlen_q_, device=q.device) < ends_q.diff()[:, None]
        lse = lse.masked_fill(~within[:, None], -torch.inf)
    return out, lse, None


def token_streaming_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    head_mask_type: Tensor,
    streaming_info: Tensor,
    max_seqlen_q_: int,
    max_seqlen_k_: int,
    deterministic: bool = False,
    softmax_scale: float | None = None,
    return_attn_probs: bool = False,
) -> Results:
    """:func:`block_sparse_attn_func`, causal, with sinks and local windows in keys and without tables."""
    return block_sparse_attn_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info, None, max_seqlen_q_, max_seqlen_k_, p_dropout=0.0,
        deterministic=deterministic, softmax_scale=softmax_scale, is_causal=True, exact_streaming=True, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def block_streaming_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    head_mask_type: Tensor,
    streaming_info: Tensor,
    max_seqlen_q_: int,
    max_seqlen_k_: int,
    p_dropout: float,
    deterministic: bool = False,
    softmax_scale: float | None = None,
    is_causal: bool = True,
    return_attn_probs: bool = False,
) -> Results:
    """:func:`block_sparse_attn_func` with sinks and local windows in blocks and without tables."""
    return block_sparse_attn_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info, None, max_seqlen_q_, max_seqlen_k_, p_dropout=p_dropout,
        deterministic=deterministic, softmax_scale=softmax_scale, is_causal=is_causal, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def _intervals(sequences: Sequences, kinds: Tensor, info: Tensor | None, causal: bool, exact: bool) -> IntervalMask:
    """The interval of each key in each head, [B|1, H, Sk]: causality, and the sinks and local windows of streaming heads."""
    key, keys, queries = sequences.number, sequences.keys, sequences.queries
    sink, local = (torch.zeros_like(kinds) if info is None else info[side::2] for side in (0, 1))
    sink, local, streams = sink.view(1, -1, 1), local.clamp(max=checks.MAX_LENGTH).view(1, -1, 1), (kinds < 0).view(1, -1, 1)
    shift = torch.zeros_like(key) + sequences.shift()
    if exact:
        end = torch.where(key < sink, queries, key + local - shift)
    elif causal:
        # The query in block r sees the `local` blocks before block r + reach, and itself lies in one of them.
        block = key // BLOCK
        reach = (shift.clamp(min=0) + BLOCK - 1) // BLOCK + 1 - (-shift).clamp(min=0) // BLOCK
        end = torch.where(block < sink, queries, (block + local - reach + 1) * BLOCK)
    else:
        block, blocks = key // BLOCK, (torch.zeros_like(key) + keys + BLOCK - 1) // BLOCK
        end = torch.where((block < sink) | (block >= blocks - local), queries, 0)
    return sequences.mask(key - shift if causal else 0, torch.where(streams, end, queries))


def _tables(given: object, kinds: Tensor, sizes: list[int], like: Tensor) -> Tensor | None:
    """The table of each head, bool [B, H, rows, columns], all True for heads that have none."""
    if given is None:
        if checks.values_are_known(kinds) and bool((kinds > 0).any()):
            raise ValueError("base_blockmask: expected a table for each head with head_mask_type > 0, got None")
        return None
    dtypes, named = (
        (torch.bool, torch.uint8, torch.int32, torch.int64),
        dict(zip(("B", "blocks_q", "blocks_k"), sizes, strict=True)),
    )
    table = checks.shaped("base_blockmask", given, "[B, tables, blocks_q, blocks_k]", dtypes, like, "q", **named)
    number = torch.where(kinds == 1, (kinds == 1).cumsum(0), kinds)
    if checks.values_are_known(number) and number.numel() and int(number.max()) > table.shape[1]:
        raise ValueError(f"base_blockmask: expected at least {int(number.max())} tables for head_mask_type, got {table.shape[1]}")
    if table.shape[1] == 0:
        return None
    chosen = (table != 0)[:, (number - 1).clamp(0, table.shape[1] - 1).long()]
    return chosen | (kinds <= 0).view(1, -1, 1, 1)


def _rows(ends: Tensor, length: int, tokens: int) -> Tensor:
    """The packed row of each place of a padded batch, [B, length]; places behind a sequence's end hold any row."""
    places = ends[:-1].long()[:, None] + torch.arange(length, device=ends.device)
    return places.clamp(max=max(tokens - 1, 0))


def _taken(given: Tensor, rows: Tensor) -> Tensor:
    """given[rows], and zeros where there are no rows at all."""
    return (F.pad(given, (0, 0) * (given.dim() - 1) + (0, 1)) if given.shape[0] == 0 else given)[rows]


__all__ = ["block_sparse_attn_func", "block_streaming_attn_func", "token_streaming_attn_func"]
