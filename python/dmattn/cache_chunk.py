"""Many tokens at once into a bounded cache: the same slots, bit for bit, as one token after another gives.

Nothing here waits for the device and no shape depends on data, so that it compiles, exports and can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dmattn import ops
from dmattn.cache_choice import Choice, attend_chunk
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


class CacheCall(NamedTuple):
    """What a call of ``attend`` is given in addition to query, key and value; tensors have as many key heads as key and value."""

    scores: Tensor | None  # [B, Hkv, T], recency included
    adds_scores: bool  # whether logits get the score; else they get recency alone, slopes[h] * position
    slopes: Tensor | None  # [Hkv]
    lengths: Tensor | None  # [B]
    shift: Tensor | None  # [B], by how many places real tokens stand behind padding on the left
    scale: float
    softcap: float
    choice: Choice | None = None  # of which keys each query reads, for heads that select; without it all that the cache shows

    def of_heads(self, kv_heads: slice) -> CacheCall:
        """The part of this call that is about some of the key heads."""
        scores = None if self.scores is None else self.scores[:, kv_heads]
        return self._replace(scores=scores, slopes=None if self.slopes is None else self.slopes[kv_heads])

    def recency(self, position: Tensor, like: Tensor) -> Tensor:
        """Recency of keys at positions [B, Hkv, S], in the dtype of ``like``; 0 without slopes. It means nothing where there is no key."""
        return like.new_zeros(()) if self.slopes is None else self.slopes[:, None] * position.to(like.dtype)


def take_chunk(
    state: CacheState, sizes: CacheSizes, query: Tensor, key: Tensor, value: Tensor, call: CacheCall
) -> tuple[Tensor, Tensor]:
    """Attention of T new tokens over cached and new keys, and the state after them: (out, lse).

    Cached keys stand before the new ones in the order of their positions. That of a cached key's place is as good as its position for
    the selection: the keys of the local window follow each other without gaps, and the others are older.
    """
    # Put the cached keys in order, empty slots in front, and the new ones behind them.
    old = (state.key, state.value, state.score, state.position, state.steps)
    all_key, all_value, score, position, slot, segment_end = ops.cache_join(
        *old, key, value, call.scores, call.lengths, sizes.visible()
    )
    # Select, attend, and keep what is alive.
    end = ops.select(score, segment_end, sizes.window, True, sizes.local, sizes.sink_keys)
    of_call = sizes_of(query, all_key, all_value)
    options = options_of(of_call, None, True, call.scale, call.softcap)
    bias = score if call.adds_scores else None if call.slopes is None else call.recency(position, score)
    if call.choice is None or not sizes.window:
        result = attend(query, all_key, all_value, of_call, (None, end, *NO_MASK[2:]), bias, None, options)
    else:
        result = attend_chunk(call.choice, query, all_key, all_value, position, end, bias, sizes[:2], call.scale, call.softcap)
    ops.cache_extend(
        *state, all_key, all_value, score, position, slot, end, call.lengths, sizes.window, sizes.local, sizes.sink_keys
    )
    return result
