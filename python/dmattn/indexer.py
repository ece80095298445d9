"""The indexer: small queries and keys whose scores say, for each query, which keys attention should read.

It is that of DeepSeek's sparse attention (DSA, arXiv 2512.02556), with a slope over positions. For query t, key s and index heads h

    score[t, s] = sum_h weights[t, h] * relu(<index_query[t, h], index_key[s]> * scale) + slope * (s - t)
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from dmattn import checks, ops
from dmattn.composed import without_autocast
from dmattn.fake import accumulate_dtype
from dmattn.masks import IndexMask, IntervalMask, bounds
from dmattn.masks.index import check_block_size
from dmattn.sharding import any_sharded, refuse

BlockScore = Literal["max", "mean_key"]
MAX_INDEX_HEADS = 128


class IndexSizes(NamedTuple):
    batch: int
    groups: int
    query_length: int
    key_length: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def index_sizes(index_query: Tensor, index_key: Tensor, weights: Tensor, slope: Tensor | None) -> IndexSizes:
    """Checks the indexer's tensors and returns their sizes.

    Raises:
        TypeError, ValueError: names the first argument that does not fit.
    """
    floating, like = checks.DTYPES["cpu"], (index_query, "index_query")
    batch, groups, queries, heads, head_dim = checks.shaped("index_query", index_query, "[B, G, Sq, Hi, Di]", floating).shape
    checks.kernels_for("index_query", index_query)
    checks.shaped("index_key", index_key, "[B, G, Sk, Di]", (), *like, B=batch, G=groups, Di=head_dim)
    if index_key.dtype != index_query.dtype:
        raise TypeError(f"index_key: expected dtype {index_query.dtype} like index_query, got {index_key.dtype}")
    checks.shaped("weights", weights, "[B, G, Sq, Hi]", floating, *like, B=batch, G=groups, Sq=queries, Hi=heads)
    keys = index_key.shape[2]
    checks.head_size("index_query", head_dim, "Di, ")
    if heads <= 0 or heads > MAX_INDEX_HEADS:
        raise ValueError(f"index_query: expected 1 to {MAX_INDEX_HEADS} heads Hi, got {heads}")
    for name, length in (("index_query", queries), ("index_key", keys)):
        if length > checks.MAX_LENGTH:
            raise ValueError(f"{name}: expected lengths up to {checks.MAX_LENGTH}, got {length}")
    if slope is not None:
        checks.shaped("slope", slope, "[G]", floating, *like, G=groups)
    return IndexSizes(batch, groups, queries, keys, heads, head_dim, index_query.dtype, index_query.device)


def index_scale(scale: float | None, head_dim: int) -> float:
    return head_dim**-0.5 if scale is None else checks.scale(scale)


def index_scores(
    index_query: Tensor,
    index_key: Tensor,
    weights: Tensor,
    *,
    scale: float | None = None,
    slope: Tensor | None = None,
    activation: Literal["relu", "none"] = "relu",
    rows: Tensor | None = None,
) -> Tensor:
    """An indexer's scores of all keys for a few queries, in torch operations: the definition, differentiable, and memory for every pair.

    ``score[t, s] = sum_h weights[t, h] * relu(<index_query[t, h], index_key[s]> * scale) + slope * (s - t)``, where query t stands at
    position ``t + Sk - Sq``. Later keys are scored, too.

    Args:
        index_query: [B, G, Sq, Hi, Di]; G lists are chosen, one for each group of query heads (G is H, Hkv or 1).
        index_key: [B, G, Sk, Di], of the same dtype.
        weights: [B, G, Sq, Hi], floating point.
        scale: factor of the products; default ``1 / sqrt(Di)``.
        slope: [G], what a key gains by each position that it stands later; None: 0.
        activation: "relu", or "none" for the products as they are.
        rows: int64 [R], numbers of the queries; None: all.

    Returns:
        [B, G, R, Sk], float32 (float64 for float64 tensors).

    Raises:
        TypeError, ValueError: a wrong type, dtype, shape or device.
    """
    sizes = index_sizes(index_query, index_key, weights, slope)
    checks.one_of("activation", activation, "relu", "none")
    row = torch.arange(sizes.query_length, device=sizes.device)
    if rows is not None:
        row = checked_rows(rows, index_query)
        index_query, weights = index_query.index_select(2, row), weights.index_select(2, row)
    products = index_products(index_query, index_key, index_scale(scale, sizes.head_dim))
    active = products.relu() if activation == "relu" else products
    scores = (weights.to(active.dtype).transpose(2, 3)[..., None] * active).sum(2)
    if slope is None:
        return scores
    distance = torch.arange(sizes.key_length, device=sizes.device) - (row[:, None] + (sizes.key_length - sizes.query_length))
    return scores + slope.to(scores.dtype)[:, None, None] * distance.to(scores.dtype)


def index_products(index_query: Tensor, index_key: Tensor, scale: float) -> Tensor:
    """<query, key> * scale of all heads, [B, G, Hi, R, Sk], summed in float32 or wider."""
    dtype = accumulate_dtype(index_query.dtype)
    with without_autocast(index_query):
        return (index_query.transpose(2, 3).to(dtype) @ index_key.to(dtype).transpose(2, 3)[:, :, None]) * scale


def checked_rows(rows: Tensor, index_query: Tensor) -> Tensor:
    checks.shaped("rows", rows, "[R]", (torch.int64,), index_query, "index_query")
    checks.numbers_below("rows", rows, index_query.shape[2])
    return rows


def mean_keys(index_key: Tensor, block_size: int) -> Tensor:
    """The mean index key of every whole block, [B, G, Sk // block_size, Di]."""
    whole = index_key.shape[2] // block_size
    blocks: Tensor = index_key[:, :, : whole * block_size].unflatten(2, (whole, block_size))
    return blocks.mean(3)


def whole_blocks(base: IntervalMask, block_size: int, keys: int) -> IntervalMask:
    """When all keys of each whole block are visible."""
    start, end = (bound.expand(-1, -1, keys)[..., : keys // block_size * block_size] for bound in (base.start, base.end))
    return IntervalMask(start.unflatten(2, (-1, block_size)).amax(3), end.unflatten(2, (-1, block_size)).amin(3))


def checked_block_score(block_score: object, block_size: int) -> bool:
    """Whether blocks are scored by their mean key."""
    check_block_size(block_size)
    checks.one_of("block_score", block_score, "max", "mean_key")
    return block_score == "mean_key" and block_size > 1


def checked_base(base: IntervalMask | None, sizes: IndexSizes) -> IntervalMask | None:
    """base with a start and an end for each key."""
    if base is None:
        return None
    checks.instance("base", base, IntervalMask, "an IntervalMask")
    if not base.serves(sizes.key_length):
        raise ValueError(f"base: expected a mask for {sizes.key_length} keys, got one for {base.key_length}")
    for bound in (base.start, base.end):
        if bound.device != sizes.device:
            raise ValueError(f"base: expected device {sizes.device} like index_query, got {bound.device}")
        checks.shaped("base", bound, "[B|1, G|1, Sk]", B=sizes.batch, G=sizes.groups)
    return IntervalMask(base.start.expand(-1, -1, sizes.key_length), base.end.expand(-1, -1, sizes.key_length))


@overload
def index_top_k(
    index_query: Tensor, index_key: Tensor, weights: Tensor, k: int, *, block_size: int = 1, block_score: BlockScore = "max",
    is_causal: bool = True, base: IntervalMask | None = None, local: int = 0, sink_keys: int = 0, scale: float | None = None,
    slope: Tensor | None = None, query_offset: int | Tensor | None = None, lengths: Tensor | None = None,
    page_table: Tensor | None = None, return_scores: Literal[False] = False,
) -> IndexMask: ...  # fmt: skip
@overload
def index_top_k(
    index_query: Tensor, index_key: Tensor, weights: Tensor, k: int, *, block_size: int = 1, block_score: BlockScore = "max",
    is_causal: bool = True, base: IntervalMask | None = None, local: int = 0, sink_keys: int = 0, scale: float | None = None,
    slope: Tensor | None = None, query_offset: int | Tensor | None = None, lengths: Tensor | None = None,
    page_table: Tensor | None = None, return_scores: Literal[True],
) -> tuple[IndexMask, Tensor]: ...  # fmt: skip
def index_top_k(
    index_query: Tensor,
    index_key: Tensor,
    weights: Tensor,
    k: int,
    *,
    block_size: int = 1,
    block_score: BlockScore = "max",
    is_causal: bool = True,
    base: IntervalMask | None = None,
    local: int = 0,
    sink_keys: int = 0,
    scale: float | None = None,
    slope: Tensor | None = None,
    query_offset: int | Tensor | None = None,
    lengths: Tensor | None = None,
    page_table: Tensor | None = None,
    return_scores: bool = False,
) -> IndexMask | tuple[IndexMask, Tensor]:
    """Each query's ``k`` best keys, or blocks of keys, by an indexer's scores (:func:`index_scores`), without Sq x Sk memory.

    The choice among the scores that the kernel computes is exact, and the same from run to run; equal scores: the later one. NaN is never
    chosen. Chosen are keys that the query may see and that neither ``local`` nor ``sink_keys`` show it. The mask carries is_causal, local
    and sink_keys, but not base: attend with ``mask & base``. Selection has no gradient; :func:`index_loss` teaches the indexer.

    Args:
        index_query: [B, G, Sq, Hi, Di], Di a multiple of 8; G is 1 or the number of (key) heads that the mask is for.
        index_key: [B, G, Sk, Di], of the same dtype; with page_table [pages, page_size, G, Di].
        weights: [B, G, Sq, Hi], floating point, used in float32 (float64 where index_query is).
        k: how many are chosen at most, >= 0.
        block_size: a power of two from 1 to 128.
        block_score: of a block: "max", the largest score of its keys that compete; "mean_key", the score of the mean of its index keys, at
            the mean of their positions. Then blocks compete only where the query may see them whole.
        is_causal: choose among keys up to the query's position.
        base: an interval mask [B|1, G|1, Sk]: documents, padding, any.
        local, sink_keys: as of :class:`IndexMask`.
        scale: factor of the products; default ``1 / sqrt(Di)``.
        slope: [G], what a key gains by each position that it stands later.
        query_offset: position of the first query, an int, or integers [] or [B]; default: the number of keys minus Sq.
        lengths: int32 [B], the number of keys of each sequence; default Sk.
        page_table: int32 [B, max_pages], which pages of index_key hold a sequence's keys; needs lengths.
        return_scores: also return the scores of the entries.

    Returns:
        An IndexMask [B, G, Sq, min(k, blocks)] whose lists are ascending, -1 behind them ("mean_key": whole blocks alone count); or that and
        their scores, float32 (float64), -inf for -1.

    Raises:
        TypeError, ValueError: a wrong type, dtype, shape, size or device.
    """
    if any_sharded((index_query, index_key, weights)):
        refuse("index_top_k")
    if page_table is not None:
        index_key = _gathered_pages(index_key, page_table, lengths)
    sizes = index_sizes(index_query, index_key, weights, slope)
    checks.dtype("index_query", index_query, checks.DTYPES[sizes.device.type])  # those of the kernels
    checks.natural_int("k", k)
    is_pooled = checked_block_score(block_score, block_size)
    checks.each(checks.flag, is_causal=is_causal, return_scores=return_scores)
    checks.each(checks.length, local=local, sink_keys=sink_keys)
    base = checked_base(base, sizes)
    dtype = accumulate_dtype(sizes.dtype)
    given_offset = None if query_offset is None else _per_sequence(query_offset, sizes)
    if lengths is not None:
        checks.per_sequence("lengths", lengths, index_query, "index_query")
    if is_pooled:
        index_key = mean_keys(index_key, block_size)
        base = None if base is None else whole_blocks(base, block_size, sizes.key_length)
    indices, scores = ops.index_top_k(
        index_query, index_key, weights.to(dtype), None if slope is None else slope.to(dtype), None if base is None else base.start,
        None if base is None else base.end, given_offset, lengths, sizes.key_length, k, block_size, is_pooled, is_causal, local,
        sink_keys, index_scale(scale, sizes.head_dim), return_scores,
    )  # fmt: skip
    mask = IndexMask._of_lists(indices, block_size, is_causal, local, sink_keys)
    return (mask, scores) if return_scores else mask


def _per_sequence(query_offset: int | Tensor, sizes: IndexSizes) -> Tensor:
    """int32 [B], so that the positions of all queries are int32, too."""
    offset: Any = bounds.position("query_offset", query_offset, sizes.device, sizes.batch, room=checks.MAX_LENGTH)
    if isinstance(offset, Tensor):
        return offset.reshape(-1).to(sizes.device, torch.int32).expand(sizes.batch)
    return torch.full((sizes.batch,), offset, dtype=torch.int32, device=sizes.device)


def _gathered_pages(index_key: Tensor, page_table: Tensor, lengths: Tensor | None) -> Tensor:
    """Pages [pages, page_size, G, Di] as [B, G, max_pages * page_size, Di]."""
    checks.shaped("index_key", index_key, "[pages, page_size, G, Di]")
    checks.shaped("page_table", page_table, "[B, max_pages]", (torch.int32,), index_key, "index_key")
    if lengths is None:
        raise ValueError("lengths: expected int32 [B] with page_table, got None")
    if index_key.shape[0] == 0:
        raise ValueError(f"index_key: expected at least one page, got shape {checks.shape_of(index_key)}")
    pages = index_key[page_table.long().clamp(0, index_key.shape[0] - 1)]  # [B, max_pages, page_size, G, Di]
    return pages.flatten(1, 2).transpose(1, 2)
