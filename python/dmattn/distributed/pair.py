"""Two ranks where scores select: one message from the first to the second, and neither needs the mask of the whole sequence.

The first rank selects among its own keys and sends the scores and rows of those that are alive behind its chunk. They fill the second rank's
slots, behind which it has copied its own rows meanwhile. Then it selects among slots and own keys, which gives the ends that the whole
sequence gives. A key's end depends on earlier keys' scores, so its attention cannot begin before the message has come.

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
from dmattn.distributed import exchange, failures, needs, traffic
from dmattn.distributed.chunks import Chunks, begin_message

ALIGNMENT = 16  # bytes at whose multiples each tensor's rows begin within a message

exchange.library.define(
    "fetch(Tensor[] rows, int window, int local, int sink_keys, SymInt[] lengths, int rank, str group, SymInt[]? call_signature) "
    "-> (Tensor[], Tensor, Tensor)"
)
exchange.library.define(
    "fetch_back(Tensor[] gradients, Tensor positions, SymInt count, SymInt[] lengths, int rank, str group) -> Tensor[]"
)


class Selection(NamedTuple):
    window: int
    local: int
    sink_keys: int

    def slots(self, first: int) -> tuple[int, int, int]:
        """Numbers of slots for sinks, for selected keys and for local ones of a chunk that begins at ``first``."""
        sink_keys = min(self.sink_keys, first)
        local = min(self.local, first - sink_keys)
        return sink_keys, min(self.window, first - sink_keys - local), local

    def ends(self, scores: Tensor) -> Tensor:
        """end of the keys with these scores [B, Hkv, keys, 1]."""
        end: Tensor = ops.select(scores.detach()[..., 0], None, self.window, True, self.local, self.sink_keys)
        return end


class Pending(NamedTuple):
    """What a rank has done without the other one. M is the number of the second rank's slots.

    Attributes:
        rows: scores, key, value and, if given, key_bias, [B, Hkv, *, *]: on the first rank as they are, on the second behind M slots, which
            are still to be filled.
        parts: the message, as the parts of each of ``rows``, [B, Hkv, M, *].
        message: on its way; None if there are no slots.
        end: on the first rank, of its own keys, [B, Hkv, n]; on the second only if it has no slots.
        positions: on the first rank, of the keys that the slots get, int64 [B, Hkv, M].
    """

    selection: Selection
    chunks: Chunks
    rows: Sequence[Tensor]
    parts: list[Tensor]
    message: dist.Work | None
    end: Tensor | None
    positions: Tensor | None


@torch.no_grad()
def begin(rows: Sequence[Tensor], selection: Selection, chunks: Chunks) -> Pending:
    """Everything that needs nothing from the other rank. rows: scores [B, Hkv, n, 1], key, value and, if given, key_bias [B, Hkv, n, *]."""
    group = exchange.group_named(chunks.group)
    with failures.Reporting(group):
        slots = selection.slots(chunks.lengths[0])
        count = sum(slots)
        packed, parts = _message(rows, count)
        if count and chunks.rank == 1:
            traffic.count("rows", packed.numel())
            message = begin_message(packed, 0, group)
            return Pending(selection, chunks, exchange.behind_slots(rows, count), parts, message, None, None)
        end = selection.ends(rows[0])
        if not count:
            return Pending(selection, chunks, rows, parts, None, end, None)
        positions, is_empty = _alive_behind(end, slots)
        for part, tensor in zip(parts, rows, strict=True):
            torch.gather(tensor, 2, positions[..., None].expand(part.shape), out=part)
        parts[0][:, :, slots[0] : slots[0] + slots[1], 0].masked_fill_(is_empty, -math.inf)
        return Pending(selection, chunks, rows, parts, begin_message(packed, 0, group), end, positions)


def _alive_behind(end: Tensor, slots: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Positions of the keys for slots, int64 [B, Hkv, M], and which slots of selected keys stay empty, [B, Hkv, window]."""
    sink_keys, window, local = slots
    length = end.shape[2]
    middle = slice(sink_keys, length - local)
    places = needs.places_of(end[..., middle] > length, window) + sink_keys
    own = torch.arange(length, device=end.device).expand(end.shape)
    positions = torch.cat((own[..., :sink_keys], places.clamp(max=middle.stop - 1), own[..., middle.stop :]), dim=2)
    return positions, places == middle.stop


def _receive(pending: Pending) -> tuple[Sequence[Tensor], Tensor]:
    """The rows with those of the slots in front, and the end of each."""
    if pending.end is not None:
        return pending.rows, pending.end
    _wait(pending)
    for whole, part in zip(pending.rows, pending.parts, strict=True):
        exchange.copy_rows(whole[:, :, : part.shape[2]], part)
    return pending.rows, pending.selection.ends(pending.rows[0])


def _wait(pending: Pending) -> None:
    """Until the message has come or left."""
    assert pending.message is not None
    failures.wait(pending.message, exchange.group_named(pending.chunks.group), pending.rows[0])


def wait_sent(pending: Pending) -> None:
    """Called behind attention, because on the first rank the message leaves while that runs."""
    if pending.message is not None and pending.chunks.rank == 0:
        _wait(pending)


def _send_back(gradients: Sequence[Tensor], positions: Tensor | None, count: int, chunks: Chunks) -> Sequence[Tensor]:
    """Gradients [B, Hkv, M + n, *] of what :func:`_receive` gave -> those of the rank's own rows, the other rank's part included.

    Results are parts of what is given, to which the first rank adds in place. Keys that nobody sees have gradients of zero, so those that
    empty slots send back change nothing.
    """
    if not count:
        return gradients
    packed, parts = _message(gradients, count)
    if chunks.rank == 1:
        for part, tensor in zip(parts, gradients, strict=True):
            part.copy_(tensor[:, :, :count])
    else:
        traffic.count("gradients", packed.numel())
    group = exchange.group_named(chunks.group)
    failures.wait(begin_message(packed, 1, group), group, packed)
    if chunks.rank == 1:
        return [tensor[:, :, count:] for tensor in gradients]
    assert positions is not None
    for tensor, part in zip(gradients, parts, strict=True):
        tensor.scatter_add_(2, positions[..., None].expand(part.shape), part)
    return gradients


class Fetch(torch.autograd.Function):
    """:func:`_receive` for eager calls: the rows, and end."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, *rows: Tensor) -> tuple[Tensor, ...]:
        results, end = _receive(pending)
        ctx.rest = pending.parts[0].shape[2], pending.chunks
        ctx.save_for_backward(pending.positions)
        ctx.mark_non_differentiable(end)
        return *results, end

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scores: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> tuple[Any, ...]:
        # Scores and key_bias may have one gradient between them, and two leaves would both keep it and add to it in place.
        gradients = [scores.clone(), key, value, *(bias.clone() for bias in rest[:-1])]
        with failures.Reporting(exchange.group_named(ctx.rest[1].group)):
            return None, *_send_back(gradients, *ctx.saved_tensors, *ctx.rest)


def _message(like: Sequence[Tensor], count: int) -> tuple[Tensor, list[Tensor]]:
    """Memory for ``count`` rows a key head of each tensor [B, Hkv, length, *], as bytes, and each tensor's part of it, [B, Hkv, count, *]."""
    sizes = [tensor.shape[0] * tensor.shape[1] * count * tensor.shape[3] * tensor.element_size() for tensor in like]
    sizes = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    packed = like[0].new_empty(sum(sizes), dtype=torch.uint8)
    parts = []
    for part, tensor in zip(packed.split(sizes), like, strict=True):
        shape = *tensor.shape[:2], count, tensor.shape[3]
        parts.append(part.view(tensor.dtype)[: math.prod(shape)].view(shape))
    return packed, parts


# Compiled calls ------------------------------------------------------------------------------------------------------------------------


def _fetch_op(
    rows: Sequence[Tensor], window: int, local: int, sink_keys: int, lengths: Sequence[int], rank: int, group: str,
    call_signature: Sequence[int] | None,
) -> tuple[list[Tensor], Tensor, Tensor]:  # fmt: skip
    """What :func:`_receive` gives, none of it a part of what is given, and the positions of the rows that have left, int64 [B, Hkv, M]."""
    exchange.agreed(exchange.group_named(group), call_signature, lengths)
    pending = begin(rows, Selection(window, local, sink_keys), Chunks(group, rank, lengths))
    results, end = _receive(pending)
    wait_sent(pending)
    if pending.end is not None:
        results = [tensor.clone(memory_format=torch.contiguous_format) for tensor in results]
    empty = torch.empty(0, dtype=torch.int64, device=end.device)
    return list(results), end, empty if pending.positions is None else pending.positions


def _fetch_back_op(
    gradients: Sequence[Tensor], positions: Tensor, count: int, lengths: Sequence[int], rank: int, group: str
) -> list[Tensor]:
    own = [tensor.clone(memory_format=torch.contiguous_format) for tensor in gradients]
    return [tensor.contiguous() for tensor in _send_back(own, positions, count, Chunks(group, rank, lengths))]


exchange.implement("fetch", _fetch_op)
exchange.implement("fetch_back", _fetch_back_op)


@torch.library.register_fake("dmattn_distributed::fetch", lib=exchange.library)
def _(rows: Sequence[Tensor], window: int, local: int, sink_keys: int, lengths: Sequence[int], rank: int, *_: object) -> Any:
    count = sum(Selection(window, local, sink_keys).slots(lengths[0]))
    joined = exchange.longer(rows, count if rank == 1 else 0)
    positions = rows[0].new_empty((*rows[0].shape[:2], count) if rank == 0 else 0, dtype=torch.int64)
    return joined, joined[0].new_empty(joined[0].shape[:3], dtype=torch.int32), positions


@torch.library.register_fake("dmattn_distributed::fetch_back", lib=exchange.library)
def _(gradients: Sequence[Tensor], positions: Any, count: int, lengths: Sequence[int], rank: int, *_: object) -> Any:
    return exchange.longer(gradients, -count if rank == 1 else 0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[list[Tensor], Tensor, Tensor]) -> None:
    _, window, local, sink_keys, *place, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(output[2])
    ctx.rest = sum(Selection(window, local, sink_keys).slots(place[0][0])), *place


def _backward(ctx: Any, gradients: list[Tensor], *_: object) -> tuple[Any, ...]:
    return torch.ops.dmattn_distributed.fetch_back(gradients, *ctx.saved_tensors, *ctx.rest), *(None for _ in range(7))


torch.library.register_autograd("dmattn_distributed::fetch", _backward, setup_context=_keep, lib=exchange.library)
torch.library.register_autograd("dmattn_distributed::fetch_back", exchange.refuse_second_gradients, lib=exchange.library)
