"""The two exchanges: scores of all chunks to every rank, and rows of key, value and key_bias to the ranks that need them, with their gradients.

They are ops, so that a compiled graph holds each of them as one node: how many rows go where is known when the graph runs, not when it is
traced.

Between two ranks the second rank's slots are filled whole. Among more, ranks send exactly the rows that are needed: their number is read
from the device, so that the host waits for the mask, but not for attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import distributed_c10d

from dmattn._library import renewed
from dmattn.distributed import agreement, needs, traffic
from dmattn.distributed.chunks import Chunks, all_gather_flat

library = renewed("dmattn_distributed")
library.define("gather_scores(Tensor scores, SymInt[] lengths, int rank, str group, SymInt[] call_signature) -> Tensor")
library.define("share_seed(Tensor seed, str group) -> Tensor")
library.define(
    "carry(Tensor key, Tensor value, Tensor? key_bias, Tensor? start, Tensor end, Tensor slots, SymInt[] counts, SymInt[] lengths, int rank, "
    "str group, SymInt[] call_signature) -> (Tensor, Tensor, Tensor, Tensor)"
)
library.define(
    "carry_back(Tensor grad_key, Tensor grad_value, Tensor? grad_key_bias, Tensor? start, Tensor end, Tensor slots, Tensor splits, "
    "SymInt[] counts, SymInt[] lengths, int rank, str group) -> (Tensor, Tensor, Tensor)"
)
library.define(
    "fetch(Tensor key, Tensor value, Tensor scores, Tensor? key_bias, int window, int local, int sink_keys, SymInt[] lengths, int rank, "
    "str group, SymInt[] call_signature) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
library.define(
    "fetch_back(Tensor grad_key, Tensor grad_value, Tensor grad_scores, Tensor? grad_key_bias, Tensor positions, SymInt count, "
    "SymInt[] lengths, int rank, str group) -> (Tensor, Tensor, Tensor, Tensor)"
)


def group_named(name: str) -> dist.ProcessGroup:
    group: dist.ProcessGroup = getattr(distributed_c10d, "_resolve_process_group")(name)  # noqa: B009
    return group


def agreed(group: dist.ProcessGroup, call_signature: Sequence[int], lengths: Sequence[int]) -> None:
    """In a compiled graph the first exchange is where ranks compare their arguments; eager calls have done so before."""
    if call_signature:
        refused = refusal(call_signature, agreement.agree(group, call_signature), lengths)
        if refused:
            raise ValueError(refused)


def wrong_mask_length(mask_length: int, lengths: Sequence[int], is_base: bool) -> str:
    name = "base" if is_base else "mask"
    return f"{name}: expected one for {sum(lengths)} keys, the sum of the chunks {list(lengths)}, got one for {mask_length}"


def refusal(call_signature: Sequence[int], given: Sequence[int], lengths: Sequence[int]) -> str | None:
    """Why a graph that was traced for chunks of these lengths cannot take the ``given`` ones; the same on every rank."""
    mask_length = call_signature[agreement.FIELDS.index("length of the mask")]
    if mask_length not in (0, sum(given)):
        return wrong_mask_length(mask_length, given, call_signature[agreement.FIELDS.index(agreement.KIND)] == 3)
    # Unequal parts before the last one may be what one rank has guessed, and are never what all have.
    if list(given) == list(lengths) and len(set(given[:-1])) <= 1:
        return None
    return (
        f"query: expected, while compiling, chunks of one length, got {list(given)}; "
        "chunks of different lengths need a mask of the whole sequence, of which all ranks but the last hold equal parts"
    )


# Scores --------------------------------------------------------------------------------------------------------------------------------


def _gather_scores(scores: Tensor, lengths: Sequence[int], rank: int, group: str, call_signature: Sequence[int]) -> Tensor:
    """[B, Hkv, n] of every rank -> [B, Hkv, N]."""
    ranks = group_named(group)
    agreed(ranks, call_signature, lengths)
    longest, own = max(lengths), lengths[rank]
    batch, heads, _ = scores.shape
    sent = scores if own == longest else torch.nn.functional.pad(scores, (0, longest - own))
    sent = sent.contiguous().view(torch.uint8).flatten()
    received = sent.new_empty(len(lengths) * sent.numel())
    all_gather_flat(received, sent, ranks)
    traffic.count("scores", received.numel() - sent.numel())
    chunks = received.view(scores.dtype).view(len(lengths), batch, heads, longest)
    if min(lengths) == longest:
        return chunks.permute(1, 2, 0, 3).reshape(batch, heads, len(lengths) * longest)
    return torch.cat([chunk[..., :length] for chunk, length in zip(chunks, lengths, strict=True)], dim=-1)


def _share_seed(seed: Tensor, group: str) -> Tensor:
    """The first rank's seed."""
    shared = seed.clone()
    dist.broadcast(shared, group=group_named(group), group_src=0)
    return shared


# Rows ----------------------------------------------------------------------------------------------------------------------------------


class Room(NamedTuple):
    """Tensors [B, Hkv, slots + n, *] whose slots are still to be filled; on a GPU ``done`` says when the rank's own rows have been copied."""

    joined: list[Tensor]
    done: torch.cuda.Event | None

    def wait(self) -> None:
        """Has the current stream wait for the copy."""
        if self.done is not None:
            self.done.wait(torch.cuda.current_stream(self.joined[0].device))


_copying: dict[torch.device, torch.cuda.Stream] = {}  # the stream for copies on each GPU


def copy_rows(to: Tensor, rows: Tensor) -> None:
    """Copies rows [.., width] of the same dtype. GPUs copy what lies apart element by element, so elements are made wide where they can be."""
    if to.device.type == "cuda" and all(_can_be_wide(tensor) for tensor in (to, rows)):
        to, rows = to.view(torch.complex128), rows.view(torch.complex128)
    to.copy_(rows)


def _can_be_wide(tensor: Tensor) -> bool:
    """Whether rows lie at multiples of 16 bytes and have as many."""
    wide = torch.complex128.itemsize // tensor.element_size()
    numbers = *tensor.stride()[:-1], tensor.shape[-1], tensor.storage_offset()
    return (
        tensor.stride(-1) == 1
        and all(number % wide == 0 for number in numbers)
        and tensor.data_ptr() % torch.complex128.itemsize == 0
    )


@torch.no_grad()
def make_room(tensors: Sequence[Tensor], slots: int, ends_in_order: bool = False) -> Room:
    """Copies a rank's own rows [B, Hkv, n, *] behind ``slots`` empty ones; on a GPU beside whatever runs in the current stream.

    ``ends_in_order``: the caller has the current stream wait for the copy whatever happens. Otherwise the allocator sees to it that nothing is
    used again while the copy runs, which takes more memory where the host is ahead of the GPU.
    """
    joined = [tensor.new_empty(*tensor.shape[:2], slots + tensor.shape[2], tensor.shape[3]) for tensor in tensors]
    device = tensors[0].device
    if device.type != "cuda":
        for whole, tensor in zip(joined, tensors, strict=True):
            copy_rows(whole[:, :, slots:], tensor)
        return Room(joined, None)
    stream = _copying.get(device)
    if stream is None:
        stream = _copying[device] = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for whole, tensor in zip(joined, tensors, strict=True):
            copy_rows(whole[:, :, slots:], tensor)
            # A call that fails before it has waited for the copy frees both while it runs.
            for each in () if ends_in_order else (whole, tensor):
                each.record_stream(stream)
        return Room(joined, stream.record_event())


class Routes(NamedTuple):
    """Which rows leave and where those that come in belong.

    Attributes:
        sent: int64 [rows out], a row as ``(b * Hkv + h) * n + j``, by destination.
        sent_counts, received_counts: rows for and from each rank of the group.
        filled: int64 [rows in], a slot as ``(b * Hkv + h) * M + slot``, by source.
    """

    sent: Tensor
    sent_counts: list[int]
    received_counts: list[int]
    filled: Tensor


def _splits(
    wanted: Tensor, slots: Tensor, sizes: tuple[int, int], counts: Sequence[int], chunks: Chunks
) -> tuple[list[int], list[int]]:
    """Numbers of rows sent to and received from each rank."""
    world, rank = len(chunks.lengths), chunks.rank
    groups = sizes[0] * sizes[1]
    if world == 2:
        whole = groups * counts[1]
        return ([0, whole], [0, 0]) if rank == 0 else ([0, 0], [whole, 0])
    factor = groups // max(1, wanted.shape[1] * wanted.shape[2])
    repeated = groups // max(1, slots.shape[0] * slots.shape[1])
    lasts = torch.tensor(chunks.firsts()[1:], dtype=torch.int32).to(slots.device, non_blocking=True)
    owner = torch.bucketize(slots.flatten().contiguous(), lasts, right=True)
    owner = torch.where(slots.flatten() == needs.EMPTY, world, owner)
    incoming = torch.zeros(world + 1, dtype=torch.int64, device=slots.device).index_add_(0, owner, torch.ones_like(owner))[:world]
    outgoing = wanted.flatten(1).sum(1)
    read = torch.cat((outgoing * factor, incoming * repeated)).tolist()
    later = world - rank - 1
    return [0] * (rank + 1) + read[:later], read[later:]


def _routes(
    wanted: Tensor,
    slots: Tensor,
    splits: tuple[list[int], list[int]],
    sizes: tuple[int, int, int],
    counts: Sequence[int],
    chunks: Chunks,
) -> Routes:
    """The rows behind the numbers. wanted bool [later ranks, B|1, Hkv|1, n], slots int32 [B|1, Hkv|1, M]; sizes are B, Hkv and n."""
    batch, heads, own = sizes
    world, rank = len(chunks.lengths), chunks.rank
    count = slots.shape[-1]
    device = slots.device
    if world == 2:
        if rank == 1:
            return Routes(
                torch.empty(0, dtype=torch.int64, device=device), *splits, torch.arange(batch * heads * count, device=device)
            )
        places = needs.places_of(wanted[0], counts[1]).expand(batch, heads, -1).long().clamp(max=max(own - 1, 0))
        rows = torch.arange(batch * heads, device=device).view(batch, heads, 1) * own
        return Routes((places + rows).flatten(), *splits, torch.empty(0, dtype=torch.int64, device=device))
    marked = wanted.expand(-1, batch, heads, own).flatten()
    sent = needs.places_of(marked, sum(splits[0])).long() % max(1, batch * heads * own)
    lasts = torch.tensor(chunks.firsts()[1:], dtype=torch.int32).to(device, non_blocking=True)
    everyone = slots.expand(batch, heads, count).flatten().contiguous()
    owner = torch.where(everyone == needs.EMPTY, world, torch.bucketize(everyone, lasts, right=True))
    filled = owner.sort(stable=True).indices[: sum(splits[1])]  # by source, then as the source has them in order
    return Routes(sent, *splits, filled)


def _packed(tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Rows [B, Hkv, length, *] of several tensors side by side, as bytes [rows, bytes]."""
    _, heads, length, _ = tensors[0].shape
    head, place = rows // max(1, length), rows % max(1, length)
    batch, head = head // heads, head % heads
    return torch.cat([tensor[batch, head, place].contiguous().view(torch.uint8) for tensor in tensors], dim=1)


def _unpacked(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The rows of each tensor again, [rows, *]."""
    widths = [tensor.shape[-1] * tensor.element_size() for tensor in like]
    return [part.contiguous().view(tensor.dtype) for part, tensor in zip(packed.split(widths, dim=1), like, strict=True)]


def _exchanged(packed: Tensor, sent: list[int], received: list[int], chunks: Chunks, kind: str) -> Tensor:
    incoming = packed.new_empty(sum(received), packed.shape[1])
    dist.all_to_all_single(incoming, packed, received, sent, group=group_named(chunks.group))
    traffic.count(kind, incoming.numel())
    return incoming


def _carry(
    key: Tensor,
    value: Tensor,
    key_bias: Tensor | None,
    start: Tensor | None,
    end: Tensor,
    slots: Tensor,
    counts: Sequence[int],
    lengths: Sequence[int],
    rank: int,
    group: str,
    call_signature: Sequence[int],
    room: Room | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """key, value and key_bias [B, Hkv, n, *] with the rows in this rank's M slots in front, [B, Hkv, M + n, *], and the numbers of rows sent and
    received, int64 [2, ranks] on the CPU."""
    agreed(group_named(group), call_signature, lengths)
    chunks = Chunks(group, rank, lengths)
    batch, heads, own, _ = key.shape
    count = slots.shape[-1]
    tensors = [key, value] if key_bias is None else [key, value, key_bias]
    room = make_room(tensors, count) if room is None else room
    wanted = needs.wanted_by_later(start, end, chunks, heads)
    splits = _splits(wanted, slots, (batch, heads), counts, chunks)
    routes = _routes(wanted, slots, splits, (batch, heads, own), counts, chunks)
    received = _exchanged(_packed(tensors, routes.sent), *splits, chunks, "rows")
    if count:
        head, slot = routes.filled // count, routes.filled % count
        for whole, rows in zip(room.joined, _unpacked(received, tensors), strict=True):
            whole[head // heads, head % heads, slot] = rows
    room.wait()
    joined = room.joined
    return joined[0], joined[1], key.new_empty(0) if key_bias is None else joined[2], torch.tensor(splits)


def _carry_back(
    grad_key: Tensor,
    grad_value: Tensor,
    grad_key_bias: Tensor | None,
    start: Tensor | None,
    end: Tensor,
    slots: Tensor,
    splits: Tensor,
    counts: Sequence[int],
    lengths: Sequence[int],
    rank: int,
    group: str,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what :func:`_carry` gave -> gradients of the rank's own key, value and key_bias, those from other ranks included.

    ``in_place``: results may be parts of what is given, which nobody needs any more.
    """
    chunks = Chunks(group, rank, lengths)
    batch, heads, length, _ = grad_key.shape
    count = slots.shape[-1]
    own = length - count
    gradients = [grad_key, grad_value] if grad_key_bias is None else [grad_key, grad_value, grad_key_bias]
    sent_counts, received_counts = splits.tolist()
    wanted = needs.wanted_by_later(start, end, chunks, heads)
    routes = _routes(wanted, slots, (sent_counts, received_counts), (batch, heads, own), counts, chunks)
    head, slot = routes.filled // max(1, count), routes.filled % max(1, count)
    packed = _packed(gradients, head * length + slot)
    # The rows' way back: what had come in goes out.
    returned = _unpacked(_exchanged(packed, received_counts, sent_counts, chunks, "gradients"), gradients)
    before = count if in_place else 0  # rows of slots in front of the own ones
    places = routes.sent + (routes.sent // max(1, own) + 1) * before
    own_gradients = []
    for gradient, rows in zip(gradients, returned, strict=True):
        whole = gradient.contiguous() if in_place else gradient[:, :, count:].clone(memory_format=torch.contiguous_format)
        _add_rows(whole.view(-1, whole.shape[-1]), places, rows, sent_counts)
        own_gradients.append(whole[:, :, before:])
    return own_gradients[0], own_gradients[1], grad_key.new_empty(0) if grad_key_bias is None else own_gradients[2]


def _add_rows(total: Tensor, places: Tensor, rows: Tensor, counts: Sequence[int]) -> None:
    """Adds rows to ``total`` [all rows, width] at their places, in the order of ranks and rounded once, so that results do not vary."""
    if sum(count > 0 for count in counts) <= 1:  # the places differ, but for rows of empty slots, which are zeros
        total.index_add_(0, places, rows)
        return
    touched, inverse = torch.unique(places, return_inverse=True)
    summed = total[touched].to(torch.promote_types(total.dtype, torch.float32))
    for part, at in zip(rows.split(list(counts)), inverse.split(list(counts)), strict=True):
        if len(part):
            summed.index_add_(0, at, part.to(summed.dtype))
    total[touched] = summed.to(total.dtype)


# Registration --------------------------------------------------------------------------------------------------------------------------

library.impl("gather_scores", _gather_scores, "CompositeExplicitAutograd")
library.impl("share_seed", _share_seed, "CompositeExplicitAutograd")
library.impl("carry", _carry, "CompositeExplicitAutograd")
library.impl("carry_back", _carry_back, "CompositeExplicitAutograd")


@torch.library.register_fake("dmattn_distributed::gather_scores", lib=library)
def _(scores: Tensor, lengths: Sequence[int], rank: int, group: str, call_signature: Sequence[int]) -> Tensor:
    return scores.new_empty(*scores.shape[:2], sum(lengths))


@torch.library.register_fake("dmattn_distributed::share_seed", lib=library)
def _(seed: Tensor, group: str) -> Tensor:
    return torch.empty_like(seed)


@torch.library.register_fake("dmattn_distributed::carry", lib=library)
def _(
    key: Tensor, value: Tensor, key_bias: Tensor | None, start: Any, end: Any, slots: Tensor, counts: Any, lengths: Any, *_: Any
) -> Any:
    length = key.shape[2] + slots.shape[-1]
    joined = [
        key.new_empty(0) if tensor is None else tensor.new_empty(*tensor.shape[:2], length, tensor.shape[3])
        for tensor in (key, value, key_bias)
    ]
    return *joined, torch.empty(2, len(lengths), dtype=torch.int64, device="cpu")


@torch.library.register_fake("dmattn_distributed::carry_back", lib=library)
def _(grad_key: Tensor, grad_value: Tensor, grad_key_bias: Tensor | None, start: Any, end: Any, slots: Tensor, *_: Any) -> Any:
    own = grad_key.shape[2] - slots.shape[-1]
    return tuple(
        grad_key.new_empty(0) if tensor is None else tensor.new_empty(*tensor.shape[:2], own, tensor.shape[3])
        for tensor in (grad_key, grad_value, grad_key_bias)
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, key_bias, start, end, slots, counts, lengths, rank, group, _ = inputs
    ctx.mark_non_differentiable(output[3])
    ctx.save_for_backward(start, end, slots, output[3])
    ctx.has_bias, ctx.rest = key_bias is not None, (counts, lengths, rank, group)


def _backward(ctx: Any, grad_key: Tensor, grad_value: Tensor, grad_key_bias: Tensor, _: Any) -> tuple[Any, ...]:
    return _gradients(torch.ops.dmattn_distributed.carry_back, ctx, grad_key, grad_value, grad_key_bias)


def _gradients(back: Any, ctx: Any, grad_key: Tensor, grad_value: Tensor, grad_key_bias: Tensor, *rest: Any) -> tuple[Any, ...]:
    grads = back(grad_key, grad_value, grad_key_bias if ctx.has_bias else None, *ctx.saved_tensors, *ctx.rest, *rest)
    return grads[0], grads[1], grads[2] if ctx.has_bias else None, *(None for _ in range(8))


class Carry(torch.autograd.Function):
    """The op ``carry`` for eager calls, which begin to copy a rank's own rows before the mask is known: with an empty ``call_signature`` and a
    :class:`Room`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = _carry(*inputs)
        _keep(ctx, inputs[:-1], output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return *_gradients(_carry_back, ctx, *gradients[:3], True), None


torch.library.register_autograd("dmattn_distributed::carry", _backward, setup_context=_keep, lib=library)
