"""The short way between two ranks where scores select: neither needs the mask of the whole sequence.

The first rank selects among its own keys. Those that are alive behind its chunk take the second rank's slots: their scores and rows leave in
one message. Meanwhile the second rank copies its own rows behind its slots. Then it selects among slots and its own keys, which gives the
ends that the whole sequence gives.

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
from dmattn.distributed import exchange, traffic
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
        slots: the number M of the second rank's slots.
        end: on the first rank, of its own keys, [B, Hkv, n]; on the second only if it has no slots.
        positions: on the first rank, of the keys that the slots get, int64 [B, Hkv, M].
        packed: the message, as bytes: on the first rank what leaves it, on the second room for what comes.
        parts: of the message, [B, Hkv, M, *], of scores (* is 1), key, value and, if given, key_bias.
        joined: on the second rank, of the same tensors, [B, Hkv, M + n, *], whose slots are still to be filled.
        sent: on the first rank, the message on its way, to be waited for after attention.
    """

    chunks: Chunks
    selection: Selection
    slots: int
    end: Tensor | None
    positions: Tensor | None
    packed: Tensor | None
    parts: list[Tensor]
    joined: list[Tensor]
    sent: list[dist.Work]


@torch.no_grad()
def begin(tensors: Sequence[Tensor], selection: Selection, chunks: Chunks) -> Begun:
    """Everything that needs nothing from the other rank. tensors: scores [B, Hkv, n, 1], key, value and, if given, key_bias [B, Hkv, n, *]."""
    slots = selection.slots(chunks.first(1))
    count = sum(slots)
    if count and chunks.rank == 1:
        joined = [tensor.new_empty(*tensor.shape[:2], count + tensor.shape[2], tensor.shape[3]) for tensor in tensors]
        for whole, tensor in zip(joined, tensors, strict=True):
            exchange.copy_rows(whole[:, :, count:], tensor)
        return Begun(chunks, selection, count, None, None, *_packet(tensors, count), joined, [])
    window, local, sink = selection
    end = ops.select(tensors[0].detach()[..., 0], None, window, True, local, sink)
    if not count:
        return Begun(chunks, selection, 0, end, None, None, [], [], [])
    positions, is_empty = _living(end, slots)
    packed, parts = _packet(tensors, count)
    for part, tensor in zip(parts, tensors, strict=True):
        torch.gather(tensor, 2, positions[..., None].expand(part.shape), out=part)
    if is_empty is not None:
        parts[0][:, :, slots[0] : slots[0] + slots[1], 0].masked_fill_(is_empty, -math.inf)
    return Begun(chunks, selection, count, end, positions, packed, parts, [], [])


def _living(end: Tensor, slots: tuple[int, int, int]) -> tuple[Tensor, Tensor | None]:
    """Positions of the keys for slots, int64 [B, Hkv, M], and which slots of selected keys stay empty; None if none does."""
    sink, window, local = slots
    batch, heads, length = end.shape
    if sink + window + local == length:
        return torch.arange(length, device=end.device).expand(end.shape), None
    last = length - local
    # Count the keys that live on through all heads: one long scan keeps a GPU busy, a short one for each head does not.
    lives = torch.gt(
        end[..., sink:last], length, out=torch.empty_like(end[..., sink:last], memory_format=torch.contiguous_format)
    )
    lives = lives.view(batch * heads, last - sink)
    counted = lives.view(-1).cumsum(0, dtype=torch.int32).view(lives.shape)
    before = counted[:, :1] - lives[:, :1]
    ordinals = before + torch.arange(1, window + 1, dtype=torch.int32, device=end.device)
    found = torch.searchsorted(counted.view(-1), ordinals)
    # Where a head has fewer than the window, what is found lies in the next one.
    firsts = torch.arange(0, lives.numel(), lives.shape[1], device=end.device)[:, None]
    places = (found - firsts).view(batch, heads, window)
    positions = places.clamp(max=last - sink - 1)
    if sink or local:
        own = torch.arange(length, device=end.device).expand(end.shape)
        positions = torch.cat((own[..., :sink], positions + sink, own[..., last:]), dim=2)
    return positions, places >= last - sink


def _fetch(tensors: Sequence[Tensor], begun: Begun) -> tuple[Sequence[Tensor], Tensor]:
    """The tensors of :func:`begin` with the rows of the rank's slots in front, and end for these."""
    chunks, (window, local, sink), count, end, _, packed, parts, joined, sent = begun
    if packed is None:
        assert end is not None
        return tensors, end
    work = _move(packed, 0, chunks, "rows")
    if end is not None:
        sent.append(work)
        return tensors, end
    work.wait()
    for whole, part in zip(joined, parts, strict=True):
        exchange.copy_rows(whole[:, :, :count], part)
    return joined, ops.select(joined[0][..., 0], None, window, True, local, sink)


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
    # Scores and key_bias may have one gradient between them, and it is small: only those of key and value are worth adding to in place.
    contiguous = torch.contiguous_format
    own = [
        tensor if in_place and place in (1, 2) else tensor.clone(memory_format=contiguous)
        for place, tensor in enumerate(gradients)
    ]
    _move(packed, 1, chunks, "gradients").wait()
    return [_with_rows(tensor, positions, part) for tensor, part in zip(own, parts, strict=True)]


def _with_rows(total: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    """Adds rows [B, Hkv, M, *] to those of ``total`` [B, Hkv, n, *] at their positions: in place if heads or positions lie side by side."""
    batch, heads, length, width = total.shape
    head = torch.arange(heads, device=total.device)[:, None]
    sequence = torch.arange(batch, device=total.device)[:, None, None]
    turned = total.transpose(1, 2)
    if turned.is_contiguous():
        turned.view(-1, width).index_add_(0, ((sequence * length + positions) * heads + head).flatten(), rows.view(-1, width))
        return total
    total = total.contiguous()
    total.view(-1, width).index_add_(0, ((sequence * heads + head) * length + positions).flatten(), rows.view(-1, width))
    return total


class Fetch(torch.autograd.Function):
    """:func:`_fetch` for eager calls, which have begun before the other rank has answered: its results, and end."""

    @staticmethod
    def forward(ctx: Any, begun: Begun, *tensors: Tensor) -> tuple[Tensor, ...]:
        results, end = _fetch(tensors, begun)
        ctx.rest = begun.slots, begun.chunks
        ctx.save_for_backward(begun.positions)
        ctx.mark_non_differentiable(end)
        return *results, end

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (positions,), (count, chunks) = ctx.saved_tensors, ctx.rest
        scores, *others = _send_back(gradients[:-1], positions, count, chunks, in_place=True)
        # Scores and key_bias may have one gradient between them, and two leaves would both keep it and add to it in place.
        return None, scores.clone() if len(others) == 3 else scores, *others


def _packet(like: Sequence[Tensor], count: int) -> tuple[Tensor, list[Tensor]]:
    """Room for ``count`` rows a key head of each tensor [B, Hkv, length, *], as bytes, and each tensor's part of it, [B, Hkv, count, *]."""
    firsts, total = [], 0
    for tensor in like:
        firsts.append(total)
        size = tensor.shape[0] * tensor.shape[1] * count * tensor.shape[3] * tensor.element_size()
        total += -(-size // ALIGNMENT) * ALIGNMENT
    packed = like[0].new_empty(total, dtype=torch.uint8)
    parts = []
    for first, tensor in zip(firsts, like, strict=True):
        shape = *tensor.shape[:2], count, tensor.shape[3]
        parts.append(packed[first : first + math.prod(shape) * tensor.element_size()].view(tensor.dtype).view(shape))
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
    tensors = _listed(key, value, scores, key_bias)
    begun = begin(tensors, Selection(window, local, sink), Chunks(group, rank, lengths))
    exchange.agreed(exchange.group_named(group), said, lengths)
    results, end = _fetch(tensors, begun)
    for work in begun.sent:
        work.wait()
    if begun.end is not None:
        results = [tensor.clone(memory_format=torch.contiguous_format) for tensor in results]
    positions = torch.empty(0, dtype=torch.int64, device=key.device) if begun.positions is None else begun.positions.contiguous()
    return results[1], results[2], results[0], key.new_empty(0) if key_bias is None else results[3], end, positions


def _fetch_back_op(
    grad_key: Tensor, grad_value: Tensor, grad_scores: Tensor, grad_key_bias: Tensor | None, positions: Tensor, count: int,
    lengths: Sequence[int], rank: int, group: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    gradients = [tensor.contiguous() for tensor in _listed(grad_key, grad_value, grad_scores, grad_key_bias)]
    own = _send_back(gradients, positions, count, Chunks(group, rank, lengths), in_place=False)
    return own[1], own[2], own[0], grad_key.new_empty(0) if grad_key_bias is None else own[3]


def _listed(key: Tensor, value: Tensor, scores: Tensor, key_bias: Tensor | None) -> list[Tensor]:
    return [scores, key, value] if key_bias is None else [scores, key, value, key_bias]


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
        for tensor in (key, value, scores, key_bias)
    ]
    positions = key.new_empty((batch, heads, count) if rank == 0 else 0, dtype=torch.int64)
    return *joined, key.new_empty((batch, heads, length), dtype=torch.int32), positions


@torch.library.register_fake("dmattn_distributed::fetch_back", lib=exchange.library)
def _(
    grad_key: Tensor, grad_value: Tensor, grad_scores: Tensor, grad_key_bias: Tensor | None, positions: Tensor, count: int,
    lengths: Sequence[int], rank: int, *_: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, heads, length = grad_key.shape[:3]
    own = length - (count if rank == 1 else 0)
    return tuple(
        grad_key.new_empty(0) if tensor is None else tensor.new_empty(batch, heads, own, tensor.shape[3])
        for tensor in (grad_key, grad_value, grad_scores, grad_key_bias)
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, key_bias, window, local, sink, lengths, rank, group, _ = inputs
    ctx.mark_non_differentiable(output[4], output[5])
    ctx.save_for_backward(output[5])
    ctx.has_bias = key_bias is not None
    ctx.rest = sum(Selection(window, local, sink).slots(lengths[0])), lengths, rank, group


def _backward(ctx: Any, key: Tensor, value: Tensor, scores: Tensor, key_bias: Tensor, *_: object) -> tuple[Any, ...]:
    own = torch.ops.dmattn_distributed.fetch_back(
        key, value, scores, key_bias if ctx.has_bias else None, *ctx.saved_tensors, *ctx.rest
    )
    return *own[:3], own[3] if ctx.has_bias else None, *(None for _ in range(7))


exchange.library.impl("fetch", _fetch_op, "CompositeExplicitAutograd")
exchange.library.impl("fetch_back", _fetch_back_op, "CompositeExplicitAutograd")
torch.library.register_autograd("dmattn_distributed::fetch", _backward, setup_context=_keep, lib=exchange.library)
