"""Decoding with an index mask: one op finds the keys that each query sees, and ``decode`` reads them as pages of one key."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dmattn import ops, sharding
from dmattn.autograd import refuse_gradients
from dmattn.fake import in_order_of
from dmattn.masks import IndexMask
from dmattn.masks.heads import repeat_heads, with_rank
from dmattn.sinks import with_sinks
from dmattn.sizes import Sizes

MAX_ROWS = 1 << 31


class Cache(NamedTuple):
    """Keys and values of sequences, as :func:`dmattn.decode_attention` takes them."""

    key: Tensor  # [B, Hkv, Smax, D] or [pages, page_size, Hkv, D]
    value: Tensor  # [B, Hkv, Smax, Dv] or [pages, page_size, Hkv, Dv]
    lengths: Tensor  # int32 [B]
    page_table: Tensor | None  # int32 [B, max_pages]


def decode_listed(
    query: Tensor, cache: Cache, mask: IndexMask, key_bias: Tensor | None, sinks: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """out [B, H, T, Dv] and lse [B, H, T] of queries [B, H, T, D]. The caller has checked the arguments."""
    if sinks is not None and torch.is_grad_enabled() and sinks.requires_grad:
        refuse_gradients()
    inputs = (query, *cache, key_bias, sinks, with_rank(mask.indices, 4), mask, scale, softcap)
    if sharding.any_sharded(inputs):
        return sharding.decode(inputs, _decode_listed)
    return _decode_listed(*inputs)


def _decode_listed(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, page_table: Tensor | None, key_bias: Tensor | None,
    sinks: Tensor | None, lists: Tensor, mask: IndexMask, scale: float, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Every query of every head that has lists of its own becomes a sequence, whose few keys are those that it sees. ``lists`` are those of
    mask, or a rank's part of them."""
    cache = Cache(key_cache, value_cache, lengths, page_table)
    batch, query_heads, queries, head_dim = query.shape
    pages, page_size, capacity, kv_heads = 0, 0, key_cache.shape[2], key_cache.shape[1]
    if page_table is not None:
        pages, page_size, kv_heads = key_cache.shape[:3]
        capacity = page_table.shape[1] * page_size
    sizes = Sizes(batch, query_heads, kv_heads, queries, capacity, head_dim, query.dtype, query.device)
    if 0 in (batch, query_heads, capacity, key_cache.shape[0]):  # no rows to read
        return ops.decode(query, *cache, key_bias, sinks, True, scale, softcap)
    heads = kv_heads if lists.shape[1] in (1, kv_heads) else query_heads
    group = query_heads // heads

    def as_sequences(given: Tensor) -> Tensor:
        """[B, H, T, x] as [B * heads * T, group, x]."""
        sequences: Tensor = given.unflatten(1, (heads, group)).transpose(2, 3).flatten(0, 2)
        return sequences

    def listed(table: Tensor | None, *steps: int) -> tuple[Tensor, Tensor]:
        """Which row of a cache each key has, [B, heads, T, M], and how many there are, [B, heads, T]. A row is the page (the sequence), the
        key head and the key's place times these steps."""
        shown = mask.block_size, mask.local, mask.sink_keys
        return ops.list_keys(lists, lengths, table, pages, page_size, capacity, heads, kv_heads, *steps, *shown)

    key, value, steps = _as_rows(cache)
    rows, counts = listed(page_table, *steps)
    bias = None
    if key_bias is not None:
        bias = as_sequences(_bias_of(listed(None, 0, 0, 1)[0], key_bias, sizes))
    out, lse = ops.decode(
        as_sequences(query)[:, :, None], key, value, counts.flatten(), rows.flatten(0, 2), bias, None, True, scale, softcap
    )
    shape = (batch, heads, queries, group)
    out, lse = (x.view(*shape, *x.shape[3:]).transpose(2, 3).flatten(1, 2) for x in (out, lse[..., 0]))
    return in_order_of(query, out if sinks is None else with_sinks(out, lse, sinks, sizes)), lse


def _as_rows(cache: Cache) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """Both caches as pages of one key, [rows, 1, 1, D or Dv], and the rows from one page (sequence), key head and key to the next."""
    if ops._watched(cache):
        key, value, steps = _reshaped(cache.key, cache.value)
    else:
        key, value, steps = _as_they_lie(cache.key, cache.value)
    if key.shape[0] >= MAX_ROWS:
        raise ValueError(f"key_cache: expected fewer than 2^31 rows with a mask, got {key.shape[0]}")
    if cache.page_table is not None:  # [pages, page_size, Hkv, D]
        steps = (steps[0], steps[2], steps[1])
    return key, value, steps


def _reshaped(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """For programs that are recorded, whose later inputs may have other strides. Copies a cache that cannot be viewed as rows."""
    inner, is_swapped = key.shape[1] * key.shape[2], bool(key.stride(1) < key.stride(2))
    steps = (inner, 1, key.shape[1]) if is_swapped else (inner, key.shape[2], 1)
    if is_swapped:
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    return key.reshape(-1, 1, 1, key.shape[3]), value.reshape(-1, 1, 1, value.shape[3]), steps


def _as_they_lie(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """For eager calls: by the strides of the caches, without a copy unless those of key and value differ."""
    steps = _row_steps(key)
    if steps is None or steps != _row_steps(value):
        key, value = key.contiguous(), value.contiguous()
        steps = (key.shape[1] * key.shape[2], key.shape[2], 1)
    count = 1 + (key.shape[0] - 1) * steps[0] + (key.shape[1] - 1) * steps[1] + (key.shape[2] - 1) * steps[2]
    return _with_rows(key, count), _with_rows(value, count), steps


def _with_rows(cache: Tensor, count: int) -> Tensor:
    return cache.as_strided((count, 1, 1, cache.shape[3]), (_unit(cache), 0, 0, cache.stride(3)))


def _unit(cache: Tensor) -> int:
    """The elements from one row to the next."""
    unit = -1
    for size, step in zip(cache.shape[:3], cache.stride()[:3], strict=True):
        unit = step if size > 1 and (unit < 0 or step < unit) else unit
    return cache.shape[3] if unit < 0 else unit


def _row_steps(cache: Tensor) -> tuple[int, int, int] | None:
    """How many rows apart neighbours along each of the first three dimensions are; None where that is no number of rows."""
    unit = _unit(cache)
    first, second, third = cache.stride()[:3]
    if unit < cache.shape[3] or first % unit or second % unit or third % unit:
        return None
    return first // unit, second // unit, third // unit


def _bias_of(keys: Tensor, key_bias: Tensor, sizes: Sizes) -> Tensor:
    """key_bias [B|1, H|Hkv|1, Smax] of listed keys: [B, H, T, M]."""
    whole = repeat_heads(key_bias, sizes.heads).expand(sizes.batch, sizes.heads, -1)
    keys = repeat_heads(keys, sizes.heads).expand(-1, sizes.heads, -1, -1).clamp(min=0).long()
    return whole[:, :, None].expand(-1, -1, keys.shape[2], -1).gather(3, keys)
