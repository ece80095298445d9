"""Decoding: a few new queries of each sequence attend to its cache of keys and values, in one piece or in pages."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from dmattn import checks, ops, unsupported
from dmattn.composed import LISTS
from dmattn.fake import accumulate_dtype
from dmattn.masks import IndexMask
from dmattn.masks.heads import with_rank
from dmattn.sinks import sinks_of_heads
from dmattn.sizes import Sizes, check_alike, fitting_lists, key_bias_rows

MAX_QUERIES = 16
PAGE_UNIT = 16  # page sizes are multiples of it


@overload
def decode_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, *, key_bias: Tensor | None = None,
    page_table: Tensor | None = None, mask: IndexMask | None = None, sinks: Tensor | None = None, scale: float | None = None,
    softcap: float = 0.0, return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def decode_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, *, key_bias: Tensor | None = None,
    page_table: Tensor | None = None, mask: IndexMask | None = None, sinks: Tensor | None = None, scale: float | None = None,
    softcap: float = 0.0, return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    *,
    key_bias: Tensor | None = None,
    page_table: Tensor | None = None,
    mask: IndexMask | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of T new queries of each sequence over its cache, which holds the T new keys already. For inference: it has no gradient.

    Query t of sequence b stands at position ``lengths[b] - T + t`` and sees the keys up to its own position. A position below 0 sees nothing and
    gives 0 (and lse = -inf). What lies in the cache beyond ``lengths[b]`` is never read, so it may hold anything.

    Lengths and page numbers are read on the device: a call waits for nothing, launches the same kernels whatever they are, and can be
    captured in a CUDA graph. The result for a sequence does not depend on the others of its batch, bit for bit.

    Args:
        query: [B, H, T, D], T from 1 to 16; dtypes as in :func:`attention`.
        key_cache: [B, Hkv, Smax, D] with H % Hkv == 0. Any strides with a dense last dimension; on CUDA caches whose rows do not begin at
            multiples of 16 bytes are copied. With ``page_table``: [pages, page_size, Hkv, D], page_size a multiple of 16.
        value_cache: [B, Hkv, Smax, Dv] or [pages, page_size, Hkv, Dv]. D and Dv: multiples of 8 up to 256.
        lengths: int32 [B] on query's device, the number of keys of each sequence; taken as within 0 and Smax.
        key_bias: added to every logit of a key, [B|1, H|Hkv|1, Smax].
        page_table: int32 [B, max_pages] on query's device. Key j of sequence b lies in page ``page_table[b, j // page_size]``, and Smax is
            max_pages * page_size. A number that is out of range is no wrong access: if a key below ``lengths[b]`` would lie there, all of
            sequence b is empty, 0 with lse = -inf. With a mask only the queries that would see such a key are.
        mask: an :class:`IndexMask` for the T queries: each sees those of its keys that are listed, in its local window or among the sinks, and
            no others are read. Entries count a sequence's keys from its first one, with a page_table, too. Masks of :func:`index_top_k` and
            :meth:`IndexMask.top_k` have no entry twice; the lists of others are sorted in every call, to drop repeated entries.
        sinks: [H], learned logits that only take weight: exp(sinks[h]) is added to the denominator. lse leaves them out.
        scale: factor of the products, default D ** -0.5.
        softcap: if > 0, products become ``softcap * tanh(s / softcap)`` before biases are added.
        return_lse: also return the log-sum-exp of each query's logits, natural logarithm, float32 (float64 for float64).

    Returns:
        out [B, H, T, Dv] in query's dtype and stride order, or (out, lse [B, H, T]).

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, device or value. Both name the argument, what was expected and what it got.
        RuntimeError: a tensor requires a gradient, and gradients are on.
    """
    checks.flag("return_lse", return_lse)
    checks.tensor("query", query), checks.tensor("key_cache", key_cache), checks.tensor("value_cache", value_cache)
    if query.dtype != key_cache.dtype and torch._C._is_any_autocast_enabled():
        query = query.to(key_cache.dtype)
    sizes = _sizes_of(query, key_cache, value_cache, page_table)
    checks.per_sequence("lengths", lengths, query)
    if key_bias is not None:
        key_bias = key_bias_rows(key_bias, sizes, "[B|1, H|Hkv|1, Sk=Smax]")
    if sinks is not None:
        sinks = sinks_of_heads(sinks, sizes.heads, query.device, accumulate_dtype(query.dtype))
        sinks = sinks.clamp(max=torch.finfo(sinks.dtype).max)  # an infinite one takes all weight, too
    scale = sizes.head_dim**-0.5 if scale is None else checks.scale(scale)
    softcap = checks.softcap(softcap)
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        unsupported.refuse_onnx()
    lists, shown = None, LISTS
    if mask is not None:
        checks.instance("mask", mask, IndexMask, "an IndexMask")
        lists, shown = _lists_of(mask, sizes), (mask.block_size, mask.local, mask.sink_keys)
    tensors = query, key_cache, value_cache, lengths, page_table, key_bias, sinks, lists
    out, lse = ops.decode(*tensors, True, scale, softcap, *shown)
    return (out, lse) if return_lse else out


def _lists_of(mask: IndexMask, sizes: Sizes) -> Tensor:
    """The mask's lists, int32 [B|1, H|Hkv|1, T, K], checked, without repeated entries."""
    listed = fitting_lists(mask, sizes).shape[3] * mask.block_size
    if listed + mask.local + mask.sink_keys > checks.MAX_LENGTH:
        listed += min(mask.local, sizes.key_length) + min(mask.sink_keys, sizes.key_length)
        if listed > checks.MAX_LENGTH:
            raise ValueError(
                f"mask: expected lists of up to {checks.MAX_LENGTH} keys, local ones and sinks included, got room for {listed}"
            )
    return with_rank(mask._without_repeats().indices, 4)


def _sizes_of(query: Tensor, key: Tensor, value: Tensor, page_table: Tensor | None) -> Sizes:
    """Checks query, both caches and the table; T is the sizes' query_length and Smax their key_length."""
    checks.dtype("query", query, checks.kernels_for("query", query))
    sizes = "[B, Hkv, Smax, {}]" if page_table is None else "[pages, page_size, Hkv, {}]"
    check_alike(
        ("query", query, "[B, H, T, D]"), ("key_cache", key, sizes.format("D")), ("value_cache", value, sizes.format("Dv"))
    )
    batch, heads, queries, head_dim = query.shape
    value_dim = value.shape[3]
    if queries < 1 or queries > MAX_QUERIES:
        raise ValueError(f"query: expected 1 to {MAX_QUERIES} queries a sequence, got T={queries}")
    if page_table is None:
        first, kv_heads, capacity, key_dim = key.shape
        if first != batch or key_dim != head_dim:
            raise ValueError(f"key_cache: expected [B, Hkv, Smax, D] with B={batch}, D={head_dim}, got {checks.shape_of(key)}")
    else:
        _, page_size, kv_heads, key_dim = key.shape
        if key_dim != head_dim:
            raise ValueError(f"key_cache: expected [pages, page_size, Hkv, D] with D={head_dim}, got {checks.shape_of(key)}")
        if page_size % PAGE_UNIT != 0 or page_size <= 0:
            raise ValueError(f"key_cache: expected a page_size that is a multiple of {PAGE_UNIT}, got {page_size}")
        checks.tensor("page_table", page_table, (torch.int32,), query)
        if page_table.dim() != 2 or page_table.shape[0] != batch:
            raise ValueError(f"page_table: expected [B, max_pages] with B={batch}, got {checks.shape_of(page_table)}")
        capacity = page_table.shape[1] * page_size
    if value.shape[:3] != key.shape[:3]:
        expected = [*key.shape[:3], "Dv"]
        raise ValueError(f"value_cache: expected {sizes.format('Dv')} = {expected} like key_cache, got {checks.shape_of(value)}")
    if (heads % kv_heads if kv_heads else heads) != 0:
        raise ValueError(f"key_cache: expected a number of heads that divides H={heads} of query, got Hkv={kv_heads}")
    for name, size in (("query", head_dim), ("value_cache", value_dim)):
        checks.head_size(name, size, "a last dimension that is ")
    if capacity > checks.MAX_LENGTH:
        raise ValueError(f"key_cache: expected room for up to {checks.MAX_LENGTH} keys, got {capacity}")
    return Sizes(batch, heads, kv_heads, queries, capacity, head_dim, query.dtype, query.device)
