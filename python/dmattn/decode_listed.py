"""Decoding with an index mask: the listed rows of a cache are gathered, and the op ``decode`` attends to them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dmattn import ops, sharding
from dmattn.fake import empty_in_order_of
from dmattn.masks import IndexMask
from dmattn.masks.heads import repeat_heads, with_rank
from dmattn.sinks import with_sinks
from dmattn.sizes import Sizes


class Cache(NamedTuple):
    """Keys and values of sequences, as :func:`dmattn.decode_attention` takes them."""

    key: Tensor  # [B, Hkv, Smax, D] or [pages, page_size, Hkv, D]
    value: Tensor  # [B, Hkv, Smax, Dv] or [pages, page_size, Hkv, Dv]
    lengths: Tensor  # int32 [B]
    page_table: Tensor | None  # int32 [B, max_pages]


def decode_listed(
    query: Tensor, cache: Cache, mask: IndexMask, key_bias: Tensor | None, sinks: Tensor | None, sizes: Sizes, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [B, H, T, Dv] and lse [B, H, T] of queries [B, H, T, D]. The caller has checked the arguments.

    Every query of every head that has lists of its own becomes a sequence, whose few keys are those that it sees.
    """
    if sharding.any_sharded((query, *cache, mask.indices, key_bias)):
        sharding.refuse("decode_attention(mask=)")
    if 0 in (sizes.batch, sizes.heads, sizes.key_length, cache.key.shape[0]):  # no rows to gather from
        return ops.decode(query, *cache, key_bias, sinks, True, scale, softcap)
    keys, counts = listed_keys(mask, cache, sizes)
    heads = sizes.heads if keys.shape[1] not in (1, sizes.kv_heads) else sizes.kv_heads
    keys, counts = (given.expand(-1, heads, *given.shape[2:]) for given in (keys, counts))
    group = sizes.heads // heads

    def as_sequences(given: Tensor) -> Tensor:
        """[B, H, T, x] as [B * heads * T, group, x]."""
        sequences: Tensor = given.unflatten(1, (heads, group)).transpose(2, 3).flatten(0, 2)
        return sequences

    rows = Rows(keys, cache.page_table, sizes.kv_heads)
    bias = None if key_bias is None else as_sequences(rows.bias(key_bias, sizes))
    out, lse = ops.decode(
        as_sequences(query)[:, :, None], rows.gathered(cache.key), rows.gathered(cache.value), counts.flatten().int(), None, bias, None,
        True, scale, softcap,
    )  # fmt: skip
    shape = (sizes.batch, heads, sizes.query_length, group)
    lse = lse.view(shape).transpose(2, 3).flatten(1, 2)
    placed = empty_in_order_of(query, out.shape[3]).copy_(out.view(*shape, -1).transpose(2, 3).flatten(1, 2))
    return (placed if sinks is None else with_sinks(placed, lse, sinks, sizes)), lse


def listed_keys(mask: IndexMask, cache: Cache, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """The keys that each query sees, int64 [B, H|Hkv|1, T, M], ascending and each once, Smax behind them; and how many, [B, H|Hkv|1, T]."""
    capacity, device = sizes.key_length, cache.key.device
    length = cache.lengths.long().clamp(0, capacity)
    if cache.page_table is not None:  # a page that is none empties its sequence
        page_size = cache.key.shape[1]
        in_use = torch.arange(cache.page_table.shape[1], device=device) * page_size < length[:, None]
        is_none = (cache.page_table < 0) | (cache.page_table >= cache.key.shape[0])
        length = torch.where((in_use & is_none).any(1), 0, length)
    position = length.view(-1, 1, 1, 1) + torch.arange(-sizes.query_length, 0, device=device)[:, None]
    lists = with_rank(mask.keys(), 4)
    recent, first = (torch.arange(count, device=device) for count in (mask.local, mask.sink_keys))
    whole = (sizes.batch, lists.shape[1], sizes.query_length, -1)
    keys = torch.cat([given.expand(whole) for given in (lists, position - recent, first.view(1, 1, 1, -1))], dim=3)
    keys = torch.where((keys >= 0) & (keys <= position), keys, capacity).sort(dim=3).values
    again = torch.zeros_like(keys, dtype=torch.bool)
    again[..., 1:] = keys[..., 1:] == keys[..., :-1]
    keys = torch.where(again, capacity, keys).sort(dim=3).values[..., :capacity]
    return keys, (keys < capacity).sum(3)


class Rows(NamedTuple):
    """Which rows of a cache are gathered."""

    keys: Tensor  # int64 [B, heads, T, M], Smax for none
    page_table: Tensor | None
    kv_heads: int

    def gathered(self, cache: Tensor) -> Tensor:
        """[B * heads * T, 1, M, D or Dv]."""
        device, (batch, heads) = self.keys.device, self.keys.shape[:2]
        sequence = torch.arange(batch, device=device).view(-1, 1, 1, 1)
        head = (torch.arange(heads, device=device) * self.kv_heads // heads).view(-1, 1, 1)
        if self.page_table is None:
            rows = cache[sequence, head, self.keys.clamp(max=cache.shape[2] - 1)]
        else:
            size = cache.shape[1]
            key = self.keys.clamp(max=self.page_table.shape[1] * size - 1)
            page = self.page_table[sequence, key // size].long().clamp(0, cache.shape[0] - 1)
            rows = cache[page, key % size, head]
        return rows.flatten(0, 2)[:, None]

    def bias(self, key_bias: Tensor, sizes: Sizes) -> Tensor:
        """key_bias [B|1, H|Hkv|1, Smax] of these rows: [B, H, T, M]."""
        whole = repeat_heads(key_bias, sizes.heads).expand(sizes.batch, sizes.heads, -1)
        keys = repeat_heads(self.keys, sizes.heads).expand(-1, sizes.heads, -1, -1).clamp(max=sizes.key_length - 1)
        return whole[:, :, None].expand(-1, -1, keys.shape[2], -1).gather(3, keys)
