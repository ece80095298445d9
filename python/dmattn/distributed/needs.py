"""Which rank needs which rows, from the mask of the whole sequence alone: the part of context parallelism without communication.

A rank needs an earlier key if some query of its chunk sees it. Its needed keys get slots, in the order of their positions, in front of its
own keys, separately for each batch and key head. The number of slots is a bound known on the host; slots that stay empty are hidden from all
queries.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from dmattn import checks
from dmattn.distributed.chunks import Chunks
from dmattn.masks import ALWAYS, IntervalMask
from dmattn.masks.heads import repeat_heads, same_heads

EMPTY = -1  # the position in a slot that holds no key
FAR = 4 * checks.MAX_LENGTH  # no position is as far from 0, also after a move


def seen_by(start: Tensor | None, end: Tensor, first: int | Tensor, last: int | Tensor) -> Tensor:
    """Which of these keys, all before ``first``, the queries at [first, last) see, as bools; first and last broadcast with end [.., keys]."""
    seen = end > first if start is None else start.clamp(min=first) < end.clamp(max=last)
    return seen & (first < last)


def per_key_head(seen: Tensor, kv_heads: int) -> Tensor:
    """[.., H|Hkv|1, keys] to [.., Hkv|1, keys]: a key head needs what one of its query heads sees."""
    return seen if seen.shape[-2] in (1, kv_heads) else seen.unflatten(-2, (kv_heads, -1)).any(-2)


def places_of(marked: Tensor, count: int) -> Tensor:
    """The places of the first ``count`` True of each row [.., n], int64 [.., count]; n where there are fewer."""
    *rows, length = marked.shape
    if length == 0:
        return torch.zeros(*rows, count, dtype=torch.int64, device=marked.device)
    marked = marked.reshape(math.prod(rows), length)
    # One long scan keeps a GPU busy, a short one for each row does not.
    counted = marked.flatten().cumsum(0, dtype=torch.int32).view(marked.shape)
    before = counted[:, :1] - marked[:, :1].int()
    found = torch.searchsorted(counted.flatten(), before + torch.arange(1, count + 1, dtype=torch.int32, device=marked.device))
    firsts = torch.arange(marked.shape[0], device=marked.device)[:, None] * length
    # Where a row has fewer, what is found lies in a later one.
    return (found - firsts).clamp(max=length).view(*rows, count)


def slots_of(start: Tensor | None, end: Tensor, chunks: Chunks, kv_heads: int, slots: int) -> Tensor:
    """The position of the key in each of this rank's slots, int32 [B|1, Hkv|1, slots], ascending; EMPTY in slots behind the last key.

    Args:
        start, end: of the whole sequence, [B|1, H|Hkv|1, N]; start None: each key is visible from its own position on.
    """
    places = places_of(_seen_earlier(start, end, chunks, kv_heads), slots)
    first = chunks.first(chunks.rank)
    return torch.where(places < first, places, EMPTY).int()


def _seen_earlier(start: Tensor | None, end: Tensor, chunks: Chunks, kv_heads: int) -> Tensor:
    """Which keys of earlier ranks some query of this rank sees, bool [B|1, Hkv|1, keys of earlier ranks]."""
    first, last = chunks.first(chunks.rank), chunks.first(chunks.rank + 1)
    earlier = None if start is None else start[..., :first]
    return per_key_head(seen_by(earlier, end[..., :first], first, last), kv_heads)


def wanted_by_later(start: Tensor | None, end: Tensor, chunks: Chunks, kv_heads: int) -> Tensor:
    """Which of this rank's keys each later rank needs, bool [later ranks, B|1, Hkv|1, n]."""
    firsts = torch.tensor(chunks.firsts()[chunks.rank + 1 :], dtype=torch.int32).to(end.device, non_blocking=True)[
        :, None, None, None
    ]
    own = slice(chunks.first(chunks.rank), chunks.first(chunks.rank + 1))
    return per_key_head(
        seen_by(None if start is None else start[None, ..., own], end[None, ..., own], firsts[:-1], firsts[1:]), kv_heads
    )


def local_mask(start: Tensor | None, end: Tensor, slots: Tensor, chunks: Chunks) -> IntervalMask:
    """The mask of this rank's call: keys are its slots and its own keys, queries its own, and causality is the op's.

    Positions move so that the rank's first query stands behind the slots, as bottom-right alignment has it.
    """
    count = slots.shape[-1]
    first, last = chunks.first(chunks.rank), chunks.first(chunks.rank + 1)
    by = count - first
    heads = max(end.shape[1], slots.shape[1], 1 if start is None else start.shape[1])
    batch = torch.broadcast_shapes(end.shape[:1], slots.shape[:1], (1,) if start is None else start.shape[:1])[0]
    slots = repeat_heads(slots, heads)
    source = slots.expand(batch, heads, count).clamp(min=0).long()

    def joined(bound: Tensor, empty: int) -> Tensor:
        bound = repeat_heads(bound, heads).expand(batch, heads, -1)
        carried = torch.where(slots == EMPTY, empty, bound.gather(2, source))
        return _moved(torch.cat((carried, bound[..., first:last]), dim=2), by)

    local_end = joined(end, ALWAYS)
    return IntervalMask(local_end.new_full((1, 1, 1), ALWAYS) if start is None else joined(start, ALWAYS), local_end)


def _moved(bound: Tensor, by: int) -> Tensor:
    """Starts or ends so many positions later. What lies far behind or before all positions may move, too, as long as nothing wraps."""
    return bound.clamp(-FAR, FAR) + by


# Bounds --------------------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class KnownNeeds:
    """What has been read from a mask on the host, kept as long as the mask lives and its tensors do not change: the number of slots each rank
    needs, and a checksum."""

    versions: tuple[int, ...]
    checksum: int | None = None
    slots: dict[tuple[tuple[int, ...], int], list[int]] = dataclasses.field(default_factory=dict)


_known: weakref.WeakKeyDictionary[IntervalMask, KnownNeeds] = weakref.WeakKeyDictionary()


def _known_of(mask: IntervalMask) -> KnownNeeds:
    """What is known of a mask as it is now."""
    if mask.start.is_inference() or mask.end.is_inference():  # which do not say when they are written to
        return KnownNeeds(())
    versions = (mask.start._version, mask.end._version)
    known = _known.get(mask)
    if known is None or known.versions != versions:
        known = _known[mask] = KnownNeeds(versions)
    return known


def checksum_of(mask: IntervalMask) -> int:
    """A number that two different masks seldom share. Reads the mask once, which on a GPU waits for the device."""
    known = _known_of(mask)
    if known.checksum is None:
        known.checksum = int(digest(mask))
    return known.checksum


def digest(mask: IntervalMask) -> Tensor:
    """:func:`checksum_of` on the mask's device, int64 []."""
    return weighed(mask.start) * 3 + weighed(mask.end) * 5


def weighed(numbers: Tensor) -> Tensor:
    """A sum of integers, each mixed with its place by the steps of a 64-bit hash (splitmix64's, without their last)."""
    flat = numbers.long().flatten()
    mixed = flat + torch.arange(1, flat.shape[0] + 1, device=flat.device) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    return (mixed ^ (mixed >> 27)).sum()


def slots_from_mask(mask: IntervalMask, chunks: Chunks, kv_heads: int) -> list[int]:
    """For each rank the largest number of earlier keys that a key head of its chunk sees. Reads the mask once."""
    known = _known_of(mask)
    key = (tuple(chunks.lengths), kv_heads)
    if key not in known.slots:
        firsts = chunks.firsts()
        start, end = (bound.expand(-1, -1, chunks.length()) for bound in same_heads(mask.start, mask.end, "mask"))
        counts = [
            per_key_head(seen_by(start[..., :first], end[..., :first], first, last), kv_heads).sum(-1).max()
            for first, last in itertools.pairwise(firsts[1:])
        ]
        known.slots[key] = [0, *torch.stack(counts).tolist()]
    return known.slots[key]


def slots_from_bound(bound: int, chunks: Chunks) -> list[int]:
    """For each rank as many slots as a bound asks for, and no more than there are earlier keys."""
    return [min(bound, first) for first in chunks.firsts()[:-1]]


def assert_fits(start: Tensor | None, end: Tensor, chunks: Chunks, kv_heads: int, slots: Sequence[int]) -> None:
    """Stops, when the graph or the device gets there, where a bound given by the caller is too small for this rank."""
    seen = _seen_earlier(start, end, chunks, kv_heads)
    fits = (seen.sum(-1) <= slots[chunks.rank]).all()
    torch.ops.aten._assert_async.msg(fits, "window: expected at least the number of earlier keys that some query of a chunk sees")
