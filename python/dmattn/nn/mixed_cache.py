"""MixedCache: the cache of a layer in which some key heads select keys, and the others see the latest and the first ones alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dmattn import checks
from dmattn.cache import BoundedCache, PaddingSide, chosen_rows
from dmattn.cache_chunk import CacheCall
from dmattn.cache_loaded import check_same_lengths
from dmattn.cache_recent import RecentRows


def cache_of_layer(
    batch_size: int, kv_heads: int, local_heads: int, window: int, head_dim: int, value_dim: int | None = None, *,
    index_dim: int = 0, **options: Any,
) -> BoundedCache | MixedCache:  # fmt: skip
    """An empty cache for a layer whose first ``local_heads`` key heads stream and whose others select, and choose among what they hold by
    index keys of ``index_dim`` numbers (0: they see it all); options as of BoundedCache."""
    value_dim = head_dim if value_dim is None else value_dim

    def part(heads: int, window: int, index_dim: int) -> BoundedCache:
        return BoundedCache(batch_size, heads, window, head_dim, value_dim + index_dim, **options)

    selecting = part(kv_heads - local_heads, window, index_dim)
    selecting.index_dim = index_dim
    return MixedCache(part(local_heads, 0, 0), selecting) if local_heads else selecting


def check_cache_of_layer(cache: BoundedCache | MixedCache, local_heads: int, *selecting: int) -> None:
    """Refuses a cache that :func:`cache_of_layer` does not give for such a layer; selecting: kv_heads, sink_keys, local, window, index_dim."""
    parts = (cache.streaming, cache.selecting) if isinstance(cache, MixedCache) else (cache,)
    wanted = [(selecting[0] - local_heads, *selecting[1:])]
    if local_heads:
        wanted.insert(0, (local_heads, *selecting[1:3], 0, 0))
    given = [(part.num_kv_heads, *part.sizes[:3], part.index_dim) for part in parts]
    if given != wanted:
        raise ValueError(
            f"cache: expected one with (heads, sink_keys, local, window, index_dim) = {wanted} like the layer, got {given}"
        )


class MixedCache(nn.Module):
    """Two bounded caches as one: that of the first key heads, which stream, and that of the others, which select.

    A streaming head keeps ``sink_keys + local`` keys and none of the ``window`` others, so it needs neither memory nor time for them. This is
    used like a :class:`dmattn.BoundedCache` of all heads, with the same guarantees.

    Args:
        streaming: cache of the first key heads, made with ``window=0``.
        selecting: cache of the other key heads, with as many sequences, and with the same head sizes, ``rewind``, dtype and device.

    Raises:
        TypeError, ValueError: no such caches.
    """

    streaming: BoundedCache
    selecting: BoundedCache

    def __init__(self, streaming: BoundedCache, selecting: BoundedCache) -> None:
        super().__init__()
        for name, cache in (("streaming", streaming), ("selecting", selecting)):
            checks.instance(name, cache, BoundedCache, "a dmattn.BoundedCache")
        if streaming.sizes.window:
            raise ValueError(f"streaming: expected a cache with window=0, got {streaming}")
        common = [
            (c.key.shape[0], c.key.shape[3], c.value.shape[3] - c.index_dim, c.sizes.rewind, c.key.dtype, c.key.device)
            for c in (streaming, selecting)
        ]
        if common[0] != common[1]:
            raise ValueError(f"selecting: expected the batch, sizes, rewind, dtype and device of {streaming}, got {selecting}")
        self.streaming, self.selecting = streaming, selecting
        self.recent: RecentRows | None = None  # of a layer that convolves

    # Use ------------------------------------------------------------------------------------------------------------------------

    attend = BoundedCache.attend  # of all heads: query [B, H, T, D], key, value and scores of all Hkv key heads
    forward = attend

    def rewind(self, n: int | Tensor) -> None:
        """See :meth:`dmattn.BoundedCache.rewind`."""
        self.streaming.rewind(n)
        self.selecting.rewind(n)

    def reorder(self, index: Tensor) -> None:
        """See :meth:`dmattn.BoundedCache.reorder`."""
        self.streaming.reorder(index)
        self.selecting.reorder(index)
        if self.recent is not None:
            self.recent.reorder(index)

    def reset(self, rows: Tensor | Sequence[int] | int | None = None) -> None:
        """See :meth:`dmattn.BoundedCache.reset`."""
        chosen = chosen_rows(rows, self.selecting.key)
        self.streaming.reset(chosen)
        self.selecting.reset(chosen)
        if self.recent is not None:
            self.recent.reset(chosen)

    def next_positions(self, tokens: int, lengths: Tensor | None = None, padding_side: PaddingSide = "right") -> Tensor:
        """See :meth:`dmattn.BoundedCache.next_positions`."""
        return self.selecting.next_positions(tokens, lengths, padding_side)

    @property
    def length(self) -> Tensor:
        """int32 [B]: how many tokens of each sequence were taken in."""
        return self.selecting.length

    @property
    def kept(self) -> Tensor:
        """int32 [B, Hkv]: how many tokens can be taken back, see :class:`dmattn.BoundedCache`; a copy."""
        return torch.cat((self.streaming.kept, self.selecting.kept), 1)

    @property
    def batch_size(self) -> int:
        """Number of sequences B."""
        return self.selecting.batch_size

    @property
    def num_kv_heads(self) -> int:
        """Number of key heads Hkv."""
        return self.streaming.num_kv_heads + self.selecting.num_kv_heads

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; the same at every length."""
        return self.streaming.nbytes + self.selecting.nbytes + (0 if self.recent is None else self.recent.nbytes)

    # Inside ---------------------------------------------------------------------------------------------------------------------

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        for name in ("steps", "kept"):
            check_same_lengths(prefix, state_dict, f"selecting.{name}", f"streaming.{name}")
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _autocast(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.selecting._autocast(*tensors)

    def _check(self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None, slopes: Tensor | None) -> None:
        """Refuses what does not fit before one of the caches takes tokens in."""
        for cache in (self.selecting, self.streaming):
            own_value = value if cache is self.selecting else value[..., : cache.value.shape[3]]
            cache._check(query, key, own_value, scores, slopes, kv_heads=self.num_kv_heads)

    def _checked_call(self, *arguments: Any) -> CacheCall:
        return self.selecting._checked_call(*arguments)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, call: CacheCall) -> tuple[Tensor, Tensor]:
        first, group = self.streaming.key.shape[1], query.shape[1] // self.num_kv_heads
        parts = [
            cache._attend(
                query[:, heads], key[:, kv_heads], value[:, kv_heads, :, : cache.value.shape[3]], call.of_heads(kv_heads)
            )
            for cache, kv_heads, heads in (
                (self.streaming, slice(0, first), slice(0, first * group)),
                (self.selecting, slice(first, None), slice(first * group, None)),
            )
        ]
        out, lse = (torch.cat(both, 1) for both in zip(*parts, strict=True))
        return out, lse
