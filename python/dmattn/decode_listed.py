"""Decoding with an index mask: one op finds the keys that each query sees, and ``decode`` reads them as pages of one key."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dmattn import ops, sharding
from dmattn.autograd import refuse_gradients
from dmattn.fake import empty_in_order_of
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
    keys, counts = ops.list_keys(
        lists, lengths, page_table, pages, page_size, capacity, mask.block_size, mask.local, mask.sink_keys
    )
    heads = sizes.heads if keys.shape[1] not in (1, sizes.kv_heads) else sizes.kv_heads
    keys, counts = (given.expand(-1, heads, *given.shape[2:]) for given in (keys, counts))
    group = sizes.heads // heads

    def as_sequences(given: Tensor) -> Tensor:
        """[B, H, T, x] as [B * heads * T, group, x]."""
        sequences: Tensor = given.unflatten(1, (heads, group)).transpose(2, 3).flatten(0, 2)
        return sequences

    key, value, rows = _as_rows(cache, keys, sizes.kv_heads)
    bias = None if key_bias is None else as_sequences(_bias_of(keys, key_bias, sizes))
    out, lse = ops.decode(
        as_sequences(query)[:, :, None], key, value, counts.flatten(), rows.flatten(0, 2), bias, None, True, scale, softcap
    )
    shape = (sizes.batch, heads, sizes.query_length, group)
    lse = lse.view(shape).transpose(2, 3).flatten(1, 2)
    placed = empty_in_order_of(query, out.shape[3]).copy_(out.view(*shape, -1).transpose(2, 3).flatten(1, 2))
    return (placed if sinks is None else with_sinks(placed, lse, sinks, sizes)), lse


def _as_rows(cache: Cache, keys: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Both caches as pages of one key, [rows, 1, 1, D or Dv], and which row is each key's, int32 like keys [B, heads, T, M]."""
    device, (batch, heads) = keys.device, keys.shape[:2]
    key, value, steps = cache.key, cache.value, _row_steps(cache.key)
    if steps is None or steps != _row_steps(value):
        key, value = key.contiguous(), value.contiguous()
        steps = (key.shape[1] * key.shape[2], key.shape[2], 1)
    count = 1 + (key.shape[0] - 1) * steps[0] + (key.shape[1] - 1) * steps[1] + (key.shape[2] - 1) * steps[2]
    if count >= MAX_ROWS:
        raise ValueError(f"key_cache: expected fewer than 2^31 rows with a mask, got {count}")
    # The usual cache, in two launches: a step is so short that each of them counts.
    if cache.page_table is None and heads == kv_heads and steps == (heads * steps[1], steps[1], 1) and steps[1] > 0:
        first = torch.arange(0, batch * steps[0], steps[1], dtype=keys.dtype, device=device)
        return _with_rows(key, count), _with_rows(value, count), keys + first.view(batch, heads, 1, 1)
    head = (torch.arange(heads, device=device) * kv_heads // heads).view(-1, 1, 1)
    sequence = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    if cache.page_table is None:
        rows = sequence * steps[0] + head * steps[1] + keys * steps[2]
    else:
        size = key.shape[1]
        inside = keys.clamp(min=0)
        page = cache.page_table[sequence, inside // size].clamp(0, key.shape[0] - 1)
        rows = page * steps[0] + inside % size * steps[1] + head * steps[2]
    return _with_rows(key, count), _with_rows(value, count), rows.int()


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
