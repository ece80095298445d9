"""The short way between two ranks where scores select: neither needs the mask of the whole sequence.

The first rank selects among its own keys. Those that are alive behind its chunk take the second rank's slots: their scores leave first and
their rows follow. The second rank selects among slots and its own keys, which gives the ends that the whole sequence gives, and does so
while rows come in.

Slots hold, in the order of positions: the sinks; the keys that have been selected, at most ``window``; the last ``local`` keys, which do not
compete yet. So every slot that counts as local is as far from the second rank's queries as in the whole sequence, and all others are
farther than ``local``. A slot of the middle part that stays empty has a score of -inf, which is never selected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dmattn import ops
from dmattn.distributed import exchange, needs, traffic
from dmattn.distributed.chunks import Chunks

ALIGNMENT = 16  # bytes at whose multiples each tensor's rows begin within what is sent


class Selection(NamedTuple):
    window: int
    local: int
    sink: int

    def slots(self, first: int) -> tuple[int, int, int]:
        """Numbers of slots for sinks, for selected keys and for local ones of a chunk that begins at ``first``."""
        sink = min(self.sink, first)
        local = min(self.local, first - sink)
        return sink, min(self.window, first - sink - local), local


class Begun(NamedTuple):
    """What a rank has done before anything moves.

    Attributes:
        chunks, selection: what it was done for.
        count: the number M of the second rank's slots.
        end: on the first rank, of its own keys, [B, Hkv, n]; on the second only if it has no slots.
        positions: on the first rank, of the keys that the slots get, int64 [B, Hkv, M].
        scores: on the first rank of these keys, [B, Hkv, M]; on the second of slots and its own keys, [B, Hkv, M + n].
        room: on the second rank, for the rows of slots before its own.
        sent: on the first rank, what leaves it, once it does; to be waited for after attention.
    """

    chunks: Chunks
    selection: Selection
    count: int
    end: Tensor | None
    positions: Tensor | None
    scores: Tensor
    room: exchange.Room | None
    sent: list[dist.Work]


@torch.no_grad()
def begin(tensors: Sequence[Tensor], scores: Tensor, selection: Selection, chunks: Chunks) -> Begun:
    """Everything that needs nothing from the other rank. tensors: rows [B, Hkv, n, *]; scores: [B, Hkv, n]."""
    slots = selection.slots(chunks.first(1))
    count = sum(slots)
    window, local, sink = selection
    if chunks.rank == 1 and count:
        whole = scores.new_empty(*scores.shape[:2], count + scores.shape[2])
        whole[..., count:] = scores
        return Begun(chunks, selection, count, None, None, whole, exchange.make_room(tensors, count), [])
    end = ops.select(scores.detach(), None, window, True, local, sink)
    if chunks.rank == 1:  # the first rank has no keys
        return Begun(chunks, selection, 0, end, None, scores, None, [])
    positions, is_empty = _living(end, slots)
    leaving = scores.gather(2, positions)
    if is_empty is not None:
        leaving[..., slots[0] : slots[0] + slots[1]].masked_fill_(is_empty, -math.inf)
    return Begun(chunks, selection, count, end, positions, leaving, None, [])


def _living(end: Tensor, slots: tuple[int, int, int]) -> tuple[Tensor, Tensor | None]:
    """Positions of the keys for slots, int64 [B, Hkv, M], and which slots of selected keys stay empty; None if none does."""
    sink, window, local = slots
    length = end.shape[2]
    everything = torch.arange(length, device=end.device).expand(end.shape)
    if sink + window + local == length:
        return everything, None
    places = needs.places_of(end[..., sink : length - local] > length, window)
    last = length - local - sink - 1
    selected = places.clamp(max=last).long()
    if sink or local:
        selected = torch.cat((everything[..., :sink], selected + sink, everything[..., length - local :]), dim=2)
    return selected, places > last


class Fetch(torch.autograd.Function):
    """(key, value, scores, key_bias or None, :class:`Begun`) -> the same four with the rows of the rank's slots in front, and end for these.

    Keys that nobody sees have gradients of zero, so those that empty slots send back change nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, scores: Tensor, key_bias: Tensor | None, begun: Begun
    ) -> tuple[Tensor | None, ...]:
        chunks, _, count, end, positions, moving, *_ = begun
        ctx.rest = chunks, count
        ctx.save_for_backward(positions)
        rows = [key, value] if key_bias is None else [key, value, key_bias]
        if end is None:
            scores, end, joined = _receive(rows, begun)
            key, value, key_bias = joined[0], joined[1], None if key_bias is None else joined[2]
        elif count:
            assert positions is not None
            begun.sent.append(_move(moving.view(torch.uint8).flatten(), 0, chunks, "rows"))
            packed, parts = _packet(rows, count)
            for part, tensor in zip(parts, rows, strict=True):
                torch.gather(tensor, 2, positions[..., None].expand(-1, -1, -1, tensor.shape[3]), out=part)
            begun.sent.append(_move(packed, 0, chunks, "rows"))
        ctx.mark_non_differentiable(end)
        return key, value, scores, key_bias, end

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        chunks, count = ctx.rest
        key, value, scores, key_bias, _ = gradients
        rows = [key, value, scores[..., None]] if key_bias is None else [key, value, scores[..., None], key_bias]
        packed, parts = _packet(rows, count)
        if chunks.rank == 1 and count:
            for part, tensor in zip(parts, rows, strict=True):
                part.copy_(tensor[:, :, :count])
            _move(packed, 1, chunks, "gradients").wait()
            own = [tensor[:, :, count:] for tensor in rows]
        elif count:
            (positions,) = ctx.saved_tensors
            own = [tensor.contiguous() for tensor in rows]
            batch, heads, length, _ = key.shape
            groups = torch.arange(batch * heads, device=key.device).view(batch, heads, 1)
            places = (positions + groups * length).flatten()
            _move(packed, 1, chunks, "gradients").wait()
            for tensor, part in zip(own, parts, strict=True):
                tensor.view(-1, tensor.shape[3]).index_add_(0, places, part.view(-1, part.shape[3]))
        else:
            own = rows
        return own[0], own[1], own[2][..., 0], None if key_bias is None else own[3], None


def _receive(rows: Sequence[Tensor], begun: Begun) -> tuple[Tensor, Tensor, list[Tensor]]:
    """On the second rank: scores and end of slots and own keys, [B, Hkv, M + n], and the joined rows [B, Hkv, M + n, *]."""
    chunks, (window, local, sink), count, _, _, scores, room, _ = begun
    assert room is not None
    first = scores.new_empty(*scores.shape[:2], count)
    scores_come = _move(first.view(torch.uint8).flatten(), 0, chunks, "rows")
    packed, parts = _packet(rows, count)
    rows_come = _move(packed, 0, chunks, "rows")
    scores_come.wait()
    scores[..., :count] = first
    end = ops.select(scores, None, window, True, local, sink)
    rows_come.wait()
    for whole, part in zip(room.joined, parts, strict=True):
        whole[:, :, :count] = part
    if room.done is not None:
        room.done.wait()
    return scores, end, room.joined


def _packet(like: Sequence[Tensor], count: int) -> tuple[Tensor, list[Tensor]]:
    """Room for ``count`` rows a key head of each tensor [B, Hkv, length, *], as bytes, and each tensor's part of it, [B, Hkv, count, *]."""
    begins, total = [], 0
    for tensor in like:
        begins.append(total)
        size = tensor.shape[0] * tensor.shape[1] * count * tensor.shape[3] * tensor.element_size()
        total += -(-size // ALIGNMENT) * ALIGNMENT
    packed = like[0].new_empty(total, dtype=torch.uint8)
    parts = []
    for begin_at, tensor in zip(begins, like, strict=True):
        shape = *tensor.shape[:2], count, tensor.shape[3]
        parts.append(packed[begin_at : begin_at + math.prod(shape) * tensor.element_size()].view(tensor.dtype).view(shape))
    return packed, parts


def _move(packed: Tensor, source: int, chunks: Chunks, kind: str) -> dist.Work:
    """Begins to send bytes from one rank of two to the other."""
    sent, received = [0, 0], [0, 0]
    is_source = chunks.rank == source
    (sent if is_source else received)[1 - chunks.rank] = packed.numel()
    nothing = packed[:0]
    incoming, outgoing = (nothing, packed) if is_source else (packed, nothing)
    if not is_source:
        traffic.count(kind, packed.numel())
    work: dist.Work = dist.all_to_all_single(incoming, outgoing, received, sent, group=exchange.group_named(chunks.group), async_op=True)
    return work

