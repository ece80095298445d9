"""The short way between two ranks where scores select: neither needs the mask of the whole sequence.

The first rank selects among its own keys. Those that are alive behind its chunk take the second rank's slots: their scores and rows leave in
one message. Meanwhile the second rank copies its own rows behind its slots. Then it selects among slots and its own keys, which gives the
ends that the whole sequence gives. A key's end depends on earlier keys' scores, so attention on the second rank cannot begin before these
have come, and the rows come with them.

Slots hold, in the order of positions: the sinks; the keys that have been selected, at most ``window``; the last ``local`` keys, which do not
compete yet. So every slot that counts as local is as far from the second rank's queries as in the whole sequence, and all others are
farther than ``local``. A slot of the middle part that stays empty has a score of -inf, which is never selected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dmattn import ops
from dmattn.distributed import agreement, exchange, traffic
from dmattn.distributed.chunks import Chunks, begin_message

ALIGNMENT = 16  # bytes at whose multiples each tensor's rows begin within what is sent


class Selection(NamedTuple):
    window: int
    local: int
    sink_keys: int

    def slots(self, first: int) -> tuple[int, int, int]:
        """Numbers of slots for sinks, for selected keys and for local ones of a chunk that begins at ``first``."""
        sink_keys = min(self.sink_keys, first)
        local = min(self.local, first - sink_keys)
        return sink_keys, min(self.window, first - sink_keys - local), local


class Begun(NamedTuple):
    """What a rank has done without the other one, and the message between them.

    Attributes:
        chunks, selection: what it was done for.
        slots: the number M of the second rank's slots.
        end: on the first rank, of its own keys, [B, Hkv, n]; on the second only if it has no slots.
        positions: on the first rank, of the keys that the slots get, int64 [B, Hkv, M].
        message: on its way. The first rank waits for it after attention. None if there are no slots.
        parts: of the message, [B, Hkv, M, *], of scores (* is 1), key, value and, if given, key_bias.
        scores: on the second rank, [B, Hkv, M + n, 1], whose slots are still to be filled.
        room: on the second rank, the other tensors, [B, Hkv, M + n, *], whose slots are still to be filled.
    """

    chunks: Chunks
    selection: Selection
    slots: int
    end: Tensor | None
    positions: Tensor | None
    message: dist.Work | None
    parts: list[Tensor]
    scores: Tensor | None
    room: exchange.Room | None


@torch.no_grad()
def begin(tensors: Sequence[Tensor], selection: Selection, chunks: Chunks) -> Begun:
    """Everything that needs nothing from the other rank. tensors: scores [B, Hkv, n, 1], key, value and, if given, key_bias [B, Hkv, n, *]."""
    slots = selection.slots(chunks.first(1))
    count = sum(slots)
    if count and chunks.rank == 1:
        scores, *others = tensors
        # On a GPU own rows are copied beside the message and the selection.
        room = exchange.make_room(others, count, ends_in_order=True)
        try:
            message, parts = _receive(tensors, count, chunks)
            joined = scores.new_empty(*scores.shape[:2], count + scores.shape[2], 1)
            joined[:, :, count:] = scores
        except BaseException:
            room.wait()
            raise
        return Begun(chunks, selection, count, None, None, message, parts, joined, room)
    window, local, sink_keys = selection
    end = ops.select(tensors[0].detach()[..., 0], None, window, True, local, sink_keys)
    if not count:
        return Begun(chunks, selection, 0, end, None, None, [], None, None)
    positions, is_empty = _living(end, slots)
    packed, parts = _packet(tensors, count)
    for part, tensor in zip(parts, tensors, strict=True):
        torch.gather(tensor, 2, positions[..., None].expand(part.shape), out=part)
    if is_empty is not None:
        parts[0][:, :, slots[0] : slots[0] + slots[1], 0].masked_fill_(is_empty, -math.inf)
    message = begin_message(packed, 0, exchange.group_named(chunks.group))
    return Begun(chunks, selection, count, end, positions, message, parts, None, None)


def _receive(tensors: Sequence[Tensor], count: int, chunks: Chunks) -> tuple[dist.Work, list[Tensor]]:
    packed, parts = _packet(tensors, count)
    traffic.count("rows", packed.numel())
    return begin_message(packed, 0, exchange.group_named(chunks.group)), parts


Result = TypeVar("Result")


def exchanged(
    group: dist.ProcessGroup,
    call_signature: Sequence[int],
    tensors: Sequence[Tensor],
    selection: Selection,
    refusal: Callable[[Sequence[int]], str | None],
    use: Callable[[Begun], Result],
) -> Result:
    """What ``use`` makes of the message that both ranks agree on.

    A rank that is called as both expect does everything before it asks for the other's answer. Where the other was called differently, what
    has come is thrown away. ``refusal`` says why chunks of these lengths, the same on both ranks, are refused.

    Raises:
        ValueError: ranks differ, or their lengths are refused; on both ranks.
    """
    rank, device = dist.get_rank(group), tensors[0].device
    question = agreement.Question(group, call_signature, device)
    lengths = question.expected
    result: Result | None = None
    error: Exception | None = None
    if lengths is None or refusal(lengths):
        question.ask()
    else:
        chunks = Chunks(group.group_name, rank, lengths)
        size = _packet_size(tensors, sum(selection.slots(chunks.first(1))))[1]
        # Over gloo questions and messages come in one order; over NCCL the other rank waits for the message alone.
        asks_first = agreement.in_one_order(group, device)
        if asks_first:
            question.ask(size)
        begun = begin(tensors, selection, chunks)
        if not asks_first:
            question.ask(size)
        # A rank whose own part fails still tells whether the other one exchanges again.
        try:
            result = _used(begun, use)
        except Exception as caught:
            error = caught
    lengths = question.answer()
    if result is not None and question.all_went_ahead:
        return result
    if error is not None and question.all_went_ahead:
        raise error
    refused = refusal(lengths)
    if refused:
        raise ValueError(refused)
    return _used(begin(tensors, selection, Chunks(group.group_name, rank, lengths)), use)


def _used(begun: Begun, use: Callable[[Begun], Result]) -> Result:
    try:
        result = use(begun)
    except BaseException:
        if begun.room is not None:
            begun.room.wait()
        raise
    if begun.message is not None and begun.chunks.rank == 0:
        begun.message.wait()
    return result


def _living(end: Tensor, slots: tuple[int, int, int]) -> tuple[Tensor, Tensor | None]:
    """Positions of the keys for slots, int64 [B, Hkv, M], and which slots of selected keys stay empty; None if none does."""
    sink_keys, window, local = slots
    batch, heads, length = end.shape
    if sink_keys + window + local == length:
        return torch.arange(length, device=end.device).expand(end.shape), None
    last = length - local
    # Count the keys that live on through all heads: one long scan keeps a GPU busy, a short one for each head does not.
    lives = torch.gt(
        end[..., sink_keys:last], length, out=torch.empty_like(end[..., sink_keys:last], memory_format=torch.contiguous_format)
    )
    lives = lives.view(batch * heads, last - sink_keys)
    counted = lives.view(-1).cumsum(0, dtype=torch.int32).view(lives.shape)
    before = counted[:, :1] - lives[:, :1]
    ordinals = before + torch.arange(1, window + 1, dtype=torch.int32, device=end.device)
    found = torch.searchsorted(counted.view(-1), ordinals)
    # Where a head has fewer than the window, what is found lies in the next one.
    firsts = torch.arange(0, lives.numel(), lives.shape[1], device=end.device)[:, None]
    places = (found - firsts).view(batch, heads, window)
    positions = places.clamp(max=last - sink_keys - 1)
    if sink_keys or local:
        own = torch.arange(length, device=end.device).expand(end.shape)
        positions = torch.cat((own[..., :sink_keys], positions + sink_keys, own[..., last:]), dim=2)
    return positions, places >= last - sink_keys


def _fetch(tensors: Sequence[Tensor], begun: Begun) -> tuple[Sequence[Tensor], Tensor]:
    """The tensors of :func:`begin` with the rows of the rank's slots in front, and end for these."""
    (window, local, sink_keys), count = begun.selection, begun.slots
    if begun.end is not None:
        return tensors, begun.end
    assert begun.message is not None
    assert begun.scores is not None
    assert begun.room is not None
    begun.message.wait()
    joined = [begun.scores, *begun.room.joined]
    joined[0][:, :, :count] = begun.parts[0]
    end = ops.select(joined[0][..., 0], None, window, True, local, sink_keys)
    for whole, part in zip(joined[1:], begun.parts[1:], strict=True):
        exchange.copy_rows(whole[:, :, :count], part)
    begun.room.wait()
    return joined, end


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
        begin_message(packed, 1, exchange.group_named(chunks.group)).wait()
        own = [tensor[:, :, count:] for tensor in gradients]
        return own if in_place else [tensor.clone(memory_format=torch.contiguous_format) for tensor in own]
    assert positions is not None
    # Scores and key_bias may have one gradient between them, and it is small: only those of key and value are worth adding to in place.
    contiguous = torch.contiguous_format
    own = [
        tensor if in_place and place in (1, 2) else tensor.clone(memory_format=contiguous)
        for place, tensor in enumerate(gradients)
    ]
    traffic.count("gradients", packed.numel())
    begin_message(packed, 1, exchange.group_named(chunks.group)).wait()
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
    firsts, total = _packet_size(like, count)
    packed = like[0].new_empty(total, dtype=torch.uint8)
    parts = []
    for first, tensor in zip(firsts, like, strict=True):
        shape = *tensor.shape[:2], count, tensor.shape[3]
        parts.append(packed[first : first + math.prod(shape) * tensor.element_size()].view(tensor.dtype).view(shape))
    return packed, parts


def _packet_size(like: Sequence[Tensor], count: int) -> tuple[list[int], int]:
    """At which byte each tensor's part of a packet begins, and the bytes of all."""
    firsts, total = [], 0
    for tensor in like:
        firsts.append(total)
        size = tensor.shape[0] * tensor.shape[1] * count * tensor.shape[3] * tensor.element_size()
        total += -(-size // ALIGNMENT) * ALIGNMENT
    return firsts, total


# Compiled calls ------------------------------------------------------------------------------------------------------------------------


def _fetch_op(
    key: Tensor, value: Tensor, scores: Tensor, key_bias: Tensor | None, window: int, local: int, sink_keys: int, lengths: Sequence[int],
    rank: int, group: str, call_signature: Sequence[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    """What :func:`_fetch` gives, none of it a part of what is given, and the positions of the rows that have left, int64 [B, Hkv, M]."""
    tensors, selection = _listed(key, value, scores, key_bias), Selection(window, local, sink_keys)

    def fetched(begun: Begun) -> tuple[Tensor, ...]:
        results, end = _fetch(tensors, begun)
        if begun.end is not None:
            results = [tensor.clone(memory_format=torch.contiguous_format) for tensor in results]
        empty = torch.empty(0, dtype=torch.int64, device=key.device)
        positions = empty if begun.positions is None else begun.positions.contiguous()
        return results[1], results[2], results[0], key.new_empty(0) if key_bias is None else results[3], end, positions

    if not call_signature:
        return _used(begin(tensors, selection, Chunks(group, rank, lengths)), fetched)

    def refusal(given: Sequence[int]) -> str | None:
        return exchange.refusal(call_signature, given, lengths)

    return exchanged(exchange.group_named(group), call_signature, tensors, selection, refusal, fetched)


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
    key: Tensor, value: Tensor, scores: Tensor, key_bias: Tensor | None, window: int, local: int, sink_keys: int, lengths: Sequence[int],
    rank: int, *_: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    count = sum(Selection(window, local, sink_keys).slots(lengths[0]))
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
    _, _, _, key_bias, window, local, sink_keys, lengths, rank, group, _ = inputs
    ctx.mark_non_differentiable(output[4], output[5])
    ctx.save_for_backward(output[5])
    ctx.has_bias = key_bias is not None
    ctx.rest = sum(Selection(window, local, sink_keys).slots(lengths[0])), lengths, rank, group


def _backward(ctx: Any, key: Tensor, value: Tensor, scores: Tensor, key_bias: Tensor, *_: object) -> tuple[Any, ...]:
    own = torch.ops.dmattn_distributed.fetch_back(
        key, value, scores, key_bias if ctx.has_bias else None, *ctx.saved_tensors, *ctx.rest
    )
    return *own[:3], own[3] if ctx.has_bias else None, *(None for _ in range(7))


exchange.library.impl("fetch", _fetch_op, "CompositeExplicitAutograd")
exchange.library.impl("fetch_back", _fetch_back_op, "CompositeExplicitAutograd")
torch.library.register_autograd("dmattn_distributed::fetch", _backward, setup_context=_keep, lib=exchange.library)
