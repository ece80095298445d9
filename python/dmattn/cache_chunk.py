"""Many tokens at once into a bounded cache: the same slots, bit for bit, as one token after another gives.

Nothing here waits for the device and no shape depends on data, so that it compiles, exports and can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dmattn import ops
from dmattn.call import NO_MASK, attend, options_of
from dmattn.sizes import sizes_of


class CacheSizes(NamedTuple):
    """How many slots a key head has, region by region."""

    sink_keys: int
    local: int
    window: int
    rewind: int

    def visible(self) -> int:
        """Slots that a query may see: sinks, then the ring of the local window, then selected keys."""
        return self.sink_keys + self.local + self.window


class CacheState(NamedTuple):
    """The tensors of a cache, in the order in which the ops take them; N = visible + rewind slots."""

    key: Tensor  # [B, Hkv, N, D]
    value: Tensor  # [B, Hkv, N, Dv]
    score: Tensor  # [B, Hkv, N]
    position: Tensor  # int32 [B, Hkv, N], -1 where a slot is empty
    entered: Tensor  # int32 [B, Hkv, rewind]
    steps: Tensor  # int32 [B, Hkv]
    kept: Tensor  # int32 [B, Hkv]


class AddedToLogits(NamedTuple):
    """What a key's logits get in addition to the product."""

    scores: bool  # its score, in which recency is included
    slopes: Tensor | None  # [Hkv]; without the score recency alone: slopes[h] * position

    def bias(self, position: Tensor, like: Tensor) -> Tensor:
        """Recency of keys at positions [B, Hkv, S], in the dtype of ``like``; 0 without slopes. It means nothing where there is no key."""
        return like.new_zeros(()) if self.slopes is None else self.slopes[:, None] * position.to(like.dtype)


def take_chunk(
    state: CacheState, sizes: CacheSizes, query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None, lengths: Tensor | None,
    added: AddedToLogits, scale: float, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of T new tokens over cached and new keys, and the state after them: (out, lse).

    Cached keys stand before the new ones in the order of their positions. That of a cached key's place is as good as its position for
    the selection: the keys of the local window follow each other without gaps, and the others are older.
    """
    # Put the cached keys in order, empty slots in front, and the new ones behind them.
    old = (state.key, state.value, state.score, state.position, state.steps)
    all_key, all_value, score, position, slot, segment_end = ops.cache_join(*old, key, value, scores, lengths, sizes.visible())
    # Select, attend, and keep what is alive.
    end = ops.select(score, segment_end, sizes.window, True, sizes.local, sizes.sink_keys)
    call = sizes_of(query, all_key, all_value)
    masks = (None, end, *NO_MASK[2:])
    bias = score if added.scores else None if added.slopes is None else added.bias(position, score)
    result = attend(query, all_key, all_value, call, masks, bias, None, options_of(call, None, True, scale, softcap))
    ops.cache_extend(*state, all_key, all_value, score, position, slot, end, lengths, sizes.window, sizes.local, sizes.sink_keys)
    return result
