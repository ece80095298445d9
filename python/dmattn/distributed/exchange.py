"""The exchanges: scores and the dropout seed to all ranks, rows of key, value and key_bias to those that need them, and their gradients back.

They are ops, so that a compiled graph holds each of them as one node: how many rows go where is known when the graph runs, not when it is
traced.

Between two ranks the second rank's slots are filled whole. Among more, ranks send exactly the rows that are needed: their number is read
from the device, so that the host waits for the mask, but not for attention.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from dmattn._library import renewed
from dmattn.distributed import agreement, failures, needs, traffic
from dmattn.distributed.chunks import Chunks, all_gather_flat

library = renewed("dmattn_distributed")
library.define("gather_scores(Tensor scores, SymInt[] lengths, int rank, str group, SymInt[]? call_signature) -> Tensor")
library.define("share_seed(Tensor seed, str group) -> Tensor")
library.define(
    "carry(Tensor[] rows, Tensor? start, Tensor end, Tensor slots, SymInt[] counts, SymInt[] lengths, int rank, str group, "
    "SymInt[]? call_signature) -> (Tensor[], Tensor)"
)
library.define(
    "carry_back(Tensor[] gradients, Tensor? start, Tensor end, Tensor slots, Tensor splits, SymInt[] counts, SymInt[] lengths, int rank, "
    "str group) -> Tensor[]"
)


def group_named(name: str) -> dist.ProcessGroup:
    group: dist.ProcessGroup = getattr(distributed_c10d, "_resolve_process_group")(name)  # noqa: B009
    return group


def implement(name: str, function: Callable[..., Any]) -> None:
    """Registers what an op does. Where one rank alone fails in it, the others are told."""
    place = list(inspect.signature(function).parameters).index("group")

    @functools.wraps(function)
    def reporting(*given: Any) -> Any:
        with failures.Reporting(group_named(given[place])):
            return function(*given)

    library.impl(name, reporting, "CompositeExplicitAutograd")


def agreed(group: dist.ProcessGroup, call_signature: Sequence[int] | None, lengths: Sequence[int]) -> None:
    """In a compiled graph the first exchange is where ranks compare their arguments; eager calls, which give no signature, have done so before.

    Raises:
        ValueError: ranks differ, or their chunks are not those of the graph; on every rank.
    """
    if not call_signature:
        return
    given = agreement.agree(group, call_signature)
    # Unequal parts before the last one may be what one rank has guessed, and are never what all have.
    if list(given) != list(lengths) or len(set(given[:-1])) > 1:
        raise ValueError(
            f"query: expected, while compiling, chunks of one length, got {list(given)}; "
            "chunks of different lengths need a mask of the whole sequence, of which all ranks but the last hold equal parts"
        )


# Scores --------------------------------------------------------------------------------------------------------------------------------


def _gather_scores(scores: Tensor, lengths: Sequence[int], rank: int, group: str, call_signature: Sequence[int] | None) -> Tensor:
    """[B, Hkv, n] of every rank -> [B, Hkv, N]."""
    ranks = group_named(group)
    agreed(ranks, call_signature, lengths)
    longest = max(lengths)
    sent = torch.nn.functional.pad(scores, (0, longest - lengths[rank])).contiguous().view(torch.uint8).flatten()
    received = sent.new_empty(len(lengths) * sent.numel())
    failures.wait(all_gather_flat(received, sent, ranks), ranks, received)
    traffic.count("scores", received.numel() - sent.numel())
    chunks = received.view(scores.dtype).view(len(lengths), *scores.shape[:2], longest)
    return torch.cat([chunk[..., :length] for chunk, length in zip(chunks, lengths, strict=True)], dim=-1)


def _share_seed(seed: Tensor, group: str) -> Tensor:
    """The first rank's seed."""
    shared = seed.clone()
    ranks = group_named(group)
    failures.wait(dist.broadcast(shared, group=ranks, group_src=0, async_op=True), ranks, shared)
    return shared


# Rows ----------------------------------------------------------------------------------------------------------------------------------


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


def behind_slots(rows: Sequence[Tensor], slots: int) -> list[Tensor]:
    """Copies a rank's own rows [B, Hkv, n, *] behind ``slots`` empty ones."""
    joined = [tensor.new_empty(*tensor.shape[:2], slots + tensor.shape[2], tensor.shape[3]) for tensor in rows]
    for whole, tensor in zip(joined, rows, strict=True):
        copy_rows(whole[:, :, slots:], tensor)
    return joined


class Routes(NamedTuple):
    """Which rows leave and where those that come in belong.

    Attributes:
        sent: int64 [rows out], a row as ``(b * Hkv + h) * n + j``, by destination.
        filled: int64 [rows in], a slot's row among slots and own keys as ``(b * Hkv + h) * (M + n) + slot``, by source.
        splits: numbers of rows sent to and received from each rank.
    """

    sent: Tensor
    filled: Tensor
    splits: tuple[list[int], list[int]]


def _routes(
    start: Tensor | None, end: Tensor, slots: Tensor, counts: Sequence[int], chunks: Chunks, sizes: Sequence[int],
    splits: tuple[list[int], list[int]] | None = None,
) -> Routes:  # fmt: skip
    """From start and end [B|1, H|Hkv|1, N] and slots [B|1, Hkv|1, M]; sizes are B and Hkv. Reads ``splits`` from the device, unless given."""
    world, rank, own = len(chunks.lengths), chunks.rank, chunks.lengths[chunks.rank]
    wanted = needs.wanted_by_later(start, end, chunks, sizes[1]).expand(-1, *sizes, own)
    slots = slots.expand(*sizes, -1)
    groups, count = sizes[0] * sizes[1], slots.shape[-1]
    if world == 2:  # empty slots travel, too, so that nothing is read
        places = needs.places_of(wanted, counts[1]).clamp(max=own - 1)
        sent = (places + own * torch.arange(groups, device=slots.device).view(*sizes, 1)).flatten()
        filled = torch.arange(groups * count, device=slots.device)
        splits = [0, len(sent)], [len(filled), 0]
    else:
        lasts = torch.tensor(chunks.firsts()[1:], dtype=torch.int32).to(slots.device, non_blocking=True)
        owner = torch.where(slots == needs.EMPTY, world, torch.bucketize(slots.contiguous(), lasts, right=True)).flatten()
        if splits is None:
            incoming = torch.zeros(world + 1, dtype=torch.int64, device=slots.device).index_add_(0, owner, torch.ones_like(owner))
            read = torch.cat((wanted.flatten(1).sum(1), incoming[:world])).tolist()
            later = world - rank - 1
            splits = [0] * (rank + 1) + read[:later], read[later:]
        sent = needs.places_of(wanted.flatten(), sum(splits[0])) % max(1, groups * own)
        filled = owner.sort(stable=True).indices[: sum(splits[1])]  # by source, then as the source has them in order
    return Routes(sent, filled + filled // max(1, count) * own, splits)


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


def _begin_exchange(packed: Tensor, sent: list[int], received: list[int], group: str, kind: str) -> tuple[dist.Work, Tensor]:
    """The rows that come in are there when the work has been waited for."""
    incoming = packed.new_empty(sum(received), packed.shape[1])
    traffic.count(kind, incoming.numel())
    return dist.all_to_all_single(incoming, packed, received, sent, group=group_named(group), async_op=True), incoming


def _carry(
    rows: Sequence[Tensor], start: Tensor | None, end: Tensor, slots: Tensor, counts: Sequence[int], lengths: Sequence[int], rank: int,
    group: str, call_signature: Sequence[int] | None,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """Tensors [B, Hkv, n, *] with the rows in this rank's M slots in front, [B, Hkv, M + n, *], and the splits, int64 [2, ranks] on the CPU."""
    agreed(group_named(group), call_signature, lengths)
    routes = _routes(start, end, slots, counts, Chunks(group, rank, lengths), rows[0].shape[:2])
    message, incoming = _begin_exchange(_packed(rows, routes.sent), *routes.splits, group, "rows")
    joined = behind_slots(rows, slots.shape[-1])
    failures.wait(message, group_named(group), incoming)
    for whole, part in zip(joined, _unpacked(incoming, rows), strict=True):
        whole.view(-1, whole.shape[-1])[routes.filled] = part
    return joined, torch.tensor(routes.splits)


def _carry_back(
    gradients: Sequence[Tensor], start: Tensor | None, end: Tensor, slots: Tensor, splits: Tensor, counts: Sequence[int],
    lengths: Sequence[int], rank: int, group: str,
) -> list[Tensor]:  # fmt: skip
    """Gradients of what :func:`_carry` gave -> gradients of the rank's own rows, those from other ranks included."""
    sent, received = splits.tolist()
    routes = _routes(start, end, slots, counts, Chunks(group, rank, lengths), gradients[0].shape[:2], (sent, received))
    packed = _packed(gradients, routes.filled)
    # The rows' way back: what had come in goes out.
    message, incoming = _begin_exchange(packed, received, sent, group, "gradients")
    own = [gradient[:, :, slots.shape[-1] :].clone(memory_format=torch.contiguous_format) for gradient in gradients]
    failures.wait(message, group_named(group), incoming)
    for total, part in zip(own, _unpacked(incoming, gradients), strict=True):
        _add_rows(total.view(-1, total.shape[-1]), routes.sent, part, sent)
    return own


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

implement("gather_scores", _gather_scores)
implement("share_seed", _share_seed)
implement("carry", _carry)
implement("carry_back", _carry_back)


def refuse_second_gradients(*_: object) -> NoReturn:
    raise NotImplementedError("context_parallel_attention: expected first gradients alone, got a call for gradients of gradients")


def longer(tensors: Sequence[Tensor], by: int) -> list[Tensor]:
    """Fakes of tensors [B, Hkv, length, *] with so many more rows."""
    return [tensor.new_empty(*tensor.shape[:2], tensor.shape[2] + by, tensor.shape[3]) for tensor in tensors]


@torch.library.register_fake("dmattn_distributed::gather_scores", lib=library)
def _(scores: Tensor, lengths: Sequence[int], rank: int, group: str, call_signature: Sequence[int] | None) -> Tensor:
    return scores.new_empty(*scores.shape[:2], sum(lengths))


@torch.library.register_fake("dmattn_distributed::share_seed", lib=library)
def _(seed: Tensor, group: str) -> Tensor:
    return torch.empty_like(seed)


@torch.library.register_fake("dmattn_distributed::carry", lib=library)
def _(rows: Sequence[Tensor], start: Any, end: Any, slots: Tensor, counts: Any, lengths: Any, *_: Any) -> Any:
    return longer(rows, slots.shape[-1]), torch.empty(2, len(lengths), dtype=torch.int64, device="cpu")


@torch.library.register_fake("dmattn_distributed::carry_back", lib=library)
def _(gradients: Sequence[Tensor], start: Any, end: Any, slots: Tensor, *_: Any) -> Any:
    return longer(gradients, -slots.shape[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[list[Tensor], Tensor]) -> None:
    _, start, end, slots, *ctx.rest, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(start, end, slots, output[1])


def _backward(ctx: Any, gradients: list[Tensor], _: Any) -> tuple[Any, ...]:
    return torch.ops.dmattn_distributed.carry_back(gradients, *ctx.saved_tensors, *ctx.rest), *(None for _ in range(8))


torch.library.register_autograd("dmattn_distributed::carry", _backward, setup_context=_keep, lib=library)
torch.library.register_autograd("dmattn_distributed::carry_back", refuse_second_gradients, lib=library)
