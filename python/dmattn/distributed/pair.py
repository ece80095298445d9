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
        room_for: the number M of the second rank's slots.
        end: on the first rank, of its own keys, [B, Hkv, n]; on the second only if it has no slots.
        positions: on the first rank, of the keys that the slots get, int64 [B, Hkv, M].
        scores: on the first rank of these keys, [B, Hkv, M]; on the second of slots and its own keys, [B, Hkv, M + n].
        room: on the second rank, for the rows of slots before its own.
        sent: on the first rank, what leaves it, once it does; to be waited for after attention.
    """

    chunks: Chunks
    selection: Selection
    room_for: int
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


def _fetch(key: Tensor, value: Tensor, scores: Tensor, key_bias: Tensor | None, begun: Begun) -> tuple[Any, ...]:
    """(key, value, scores, key_bias or None) with the rows of the rank's slots in front, and end for these."""
    chunks, _, count, end, positions, moving, *_ = begun
    rows = [key, value] if key_bias is None else [key, value, key_bias]
    if end is None:
        scores, end, joined = _receive(rows, begun)
        return joined[0], joined[1], scores, None if key_bias is None else joined[2], end
    if count:
        assert positions is not None
        begun.sent.append(_move(moving.view(torch.uint8).flatten(), 0, chunks, "rows"))
        packed, parts = _packet(rows, count)
        for part, tensor in zip(parts, rows, strict=True):
            torch.gather(tensor, 2, positions[..., None].expand(-1, -1, -1, tensor.shape[3]), out=part)
        begun.sent.append(_move(packed, 0, chunks, "rows"))
    return key, value, scores, key_bias, end


def _send_back(
    gradients: Sequence[Tensor], positions: Tensor | None, count: int, chunks: Chunks, in_place: bool
) -> Sequence[Tensor]:
    """Gradients [B, Hkv, M + n, *] of what :func:`_fetch` gave -> those of the rank's own rows, the other rank's part included.

    Keys that nobody sees have gradients of zero, so those that empty slots send back change nothing. ``in_place``: results may be parts of
    what is given, which nobody needs any more.
    """
    if not count:
        return gradients if in_place else [tensor.clone() for tensor in gradients]
    packed, parts = _packet(gradients, count)
    if chunks.rank == 1:
        for part, tensor in zip(parts, gradients, strict=True):
            part.copy_(tensor[:, :, :count])
        _move(packed, 1, chunks, "gradients").wait()
        own = [tensor[:, :, count:] for tensor in gradients]
        return own if in_place else [tensor.clone(memory_format=torch.contiguous_format) for tensor in own]
    assert positions is not None
    contiguous = torch.contiguous_format
    own = [tensor.contiguous() if in_place else tensor.clone(memory_format=contiguous) for tensor in gradients]
    batch, heads, length, _ = own[0].shape
    groups = torch.arange(batch * heads, device=positions.device).view(batch, heads, 1)
    places = (positions + groups * length).flatten()
    _move(packed, 1, chunks, "gradients").wait()
    for tensor, part in zip(own, parts, strict=True):
        tensor.view(-1, tensor.shape[3]).index_add_(0, places, part.view(-1, part.shape[3]))
    return own


class Fetch(torch.autograd.Function):
    """:func:`_fetch` for eager calls, which have begun before the other rank has answered."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, scores: Tensor, key_bias: Tensor | None, begun: Begun) -> tuple[Any, ...]:
        output = _fetch(key, value, scores, key_bias, begun)
        ctx.rest = begun.room_for, begun.chunks
        ctx.save_for_backward(begun.positions)
        ctx.mark_non_differentiable(output[4])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        key, value, scores, key_bias, _ = gradients
        rows = [key, value, scores[..., None]] if key_bias is None else [key, value, scores[..., None], key_bias]
        (positions,), (count, chunks) = ctx.saved_tensors, ctx.rest
        own = _send_back(rows, positions, count, chunks, in_place=True)
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
    work: dist.Work = dist.all_to_all_single(
        incoming, outgoing, received, sent, group=exchange.group_named(chunks.group), async_op=True
    )
    return work


# Compiled calls ------------------------------------------------------------------------------------------------------------------------


def _fetch_op(
    key: Tensor, value: Tensor, scores: Tensor, key_bias: Tensor | None, window: int, local: int, sink: int, lengths: Sequence[int],
    rank: int, group: str, said: Sequence[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    """What :func:`_fetch` gives, none of it a part of what is given, and the positions of the rows that have left, int64 [B, Hkv, M]."""
    rows = [key, value] if key_bias is None else [key, value, key_bias]
    begun = begin(rows, scores, Selection(window, local, sink), Chunks(group, rank, lengths))
    exchange.agreed(exchange.group_named(group), said, lengths)
    *results, end = _fetch(key, value, scores, key_bias, begun)
    for work in begun.sent:
        work.wait()
    if begun.end is not None:
        results = [None if tensor is None else tensor.clone(memory_format=torch.contiguous_format) for tensor in results]
    nothing = key.new_empty(0)
    positions = torch.empty(0, dtype=torch.int64, device=key.device) if begun.positions is None else begun.positions.contiguous()
    return results[0], results[1], results[2], nothing if key_bias is None else results[3], end, positions


def _fetch_back_op(
    grad_key: Tensor, grad_value: Tensor, grad_scores: Tensor, grad_key_bias: Tensor | None, positions: Tensor, count: int,
    lengths: Sequence[int], rank: int, group: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows = [grad_key, grad_value, grad_scores[..., None], *(() if grad_key_bias is None else (grad_key_bias,))]
    own = _send_back(rows, positions, count, Chunks(group, rank, lengths), False)
    return own[0], own[1], own[2][..., 0], grad_key.new_empty(0) if grad_key_bias is None else own[3]


@torch.library.register_fake("dmattn_distributed::fetch", lib=exchange.library)
def _(
    key: Tensor, value: Tensor, scores: Tensor, key_bias: Tensor | None, window: int, local: int, sink: int, lengths: Sequence[int],
    rank: int, *_: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    count = sum(Selection(window, local, sink).slots(lengths[0]))
    batch, heads, own = key.shape[:3]
    length = own + (count if rank == 1 else 0)
    joined = [
        key.new_empty(0) if tensor is None else tensor.new_empty(batch, heads, length, tensor.shape[3])
        for tensor in (key, value, key_bias)
    ]
    positions = key.new_empty((batch, heads, count) if rank == 0 else 0, dtype=torch.int64)
    whole = scores.new_empty(batch, heads, length)
    return joined[0], joined[1], whole, joined[2], torch.empty_like(whole, dtype=torch.int32), positions


@torch.library.register_fake("dmattn_distributed::fetch_back", lib=exchange.library)
def _(
    grad_key: Tensor, grad_value: Tensor, grad_scores: Tensor, grad_key_bias: Tensor | None, positions: Tensor, count: int,
    lengths: Sequence[int], rank: int, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, heads, length = grad_key.shape[:3]
    own = length - (count if rank == 1 else 0)
    key, value, key_bias = (
        grad_key.new_empty(0) if tensor is None else tensor.new_empty(batch, heads, own, tensor.shape[3])
        for tensor in (grad_key, grad_value, grad_key_bias)
    )
    return key, value, grad_scores.new_empty(batch, heads, own), key_bias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, key_bias, window, local, sink, lengths, rank, group, _ = inputs
    ctx.mark_non_differentiable(output[4], output[5])
    ctx.save_for_backward(output[5])
    ctx.has_bias = key_bias is not None
    ctx.rest = sum(Selection(window, local, sink).slots(lengths[0])), lengths, rank, group


def _backward(ctx: Any, key: Tensor, value: Tensor, scores: Tensor, key_bias: Tensor, *_: Any) -> tuple[Any, ...]:
    own = torch.ops.dmattn_distributed.fetch_back(
        key, value, scores, key_bias if ctx.has_bias else None, *ctx.saved_tensors, *ctx.rest
    )
    return *own[:3], own[3] if ctx.has_bias else None, *(None for _ in range(7))


exchange.library.impl("fetch", _fetch_op, "CompositeExplicitAutograd")
exchange.library.impl("fetch_back", _fetch_back_op, "CompositeExplicitAutograd")
torch.library.register_autograd("dmattn_distributed::fetch", _backward, setup_context=_keep, lib=exchange.library)
