"""Many tokens at once into a bounded cache: the same slots, bit for bit, as one token after another gives.

Nothing here waits for the device and no shape depends on data, so that it compiles, exports and can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dmattn import ops
from dmattn.call import attend, options_of
from dmattn.sizes import sizes_of


class CacheSizes(NamedTuple):
    """How many slots a key head has, region by region."""

    sink: int
    local: int
    window: int
    rewind: int

    @property
    def visible(self) -> int:
        """Slots that a query may see: sinks, then the ring of the local window, then selected keys."""
        return self.sink + self.local + self.window


class CacheState(NamedTuple):
    """The tensors of a cache, in the order in which the ops take them; N = visible + rewind slots."""

    key: Tensor  # [B, Hkv, N, D]
    value: Tensor  # [B, Hkv, N, Dv]
    score: Tensor  # [B, Hkv, N]
    position: Tensor  # int32 [B, Hkv, N], -1 where a slot is empty
    entered: Tensor  # int32 [B, Hkv, rewind]
    steps: Tensor  # int32 [B, Hkv]
    kept: Tensor  # int32 [B, Hkv]


def take_chunk(
    state: CacheState, sizes: CacheSizes, query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None, lengths: Tensor | None,
    scale: float, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of T new tokens over cached and new keys, and the state after them: (out, lse).

    Cached keys stand before the new ones in the order of their positions. That of a cached key's place is as good as its position for
    the selection: the keys of the local window follow each other without gaps, and the others are older.
    """
    visible, tokens = sizes.visible, key.shape[2]
    token = torch.arange(tokens, device=key.device, dtype=torch.int32)
    taken = token.new_full((), tokens) if lengths is None else lengths.clamp(0, tokens).view(-1, 1, 1)
    # Put the cached keys in order, empty slots in front, and the new ones behind them.
    old_position, slot = state.position[:, :, :visible].sort(dim=-1)
    position = torch.cat([old_position, torch.where(token < taken, state.steps[..., None] + token, -1)], 2)
    new_score = state.score.new_zeros(key.shape[:3]) if scores is None else scores.to(state.score.dtype)
    score = torch.cat([state.score[:, :, :visible].gather(2, slot), new_score], 2)
    all_key, all_value = (
        torch.cat([cache.gather(2, slot[..., None].expand(-1, -1, -1, cache.shape[3])), new], 2)
        for cache, new in ((state.key, key), (state.value, value))
    )
    # Select, attend, and keep what is alive.
    segment_end = torch.where(position >= 0, taken + visible, 0).to(torch.int32)
    end = ops.select(score, segment_end, sizes.window, True, sizes.local, sizes.sink)
    call = sizes_of(query, all_key, all_value)
    masks = (None, end, None, None, None, None)
    result = attend(query, all_key, all_value, call, masks, score, None, options_of(call, None, True, scale, softcap))
    ops.cache_extend(*state, all_key, all_value, score, position, slot, end, lengths, sizes.window, sizes.local, sizes.sink)
    return result
