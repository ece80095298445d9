"""What vmap makes of each op: the vmapped dimension becomes part of the batch, and one call serves all of it.

Dropout is the exception: a weight is dropped by its place in the batch, so a folded batch would drop others than a loop over samples does.
With dropout_p > 0 the rules are that loop. Every rule takes what to call, vmap's ``info`` (``batch_size`` is what V stands for below), for each
argument the dimension that is vmapped over or None, and the op's arguments; it gives back results and their vmapped dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dmattn._library import rules
from dmattn.composed import in_front, in_one_pool

DROPOUT_P = 3  # its place among is_causal, scale, softcap, dropout_p, deterministic
FIRST_SLOT = 2  # tiles: 0 empty, 1 full, 2 + slot partial


def batch_of(given: Tensor, dim: int | None) -> int:
    """B of a [B, ..] tensor that may have a vmapped dimension."""
    return given.shape[0] if dim is None or dim % given.dim() != 0 else given.shape[1]


def fold(given: Tensor | None, dim: int | None, size: int, batch: int, *, shared: bool = False) -> Tensor | None:
    """[B|1, ..], with a vmapped dimension of V or without one, as [V * B, ..].

    Args:
        given: the tensor.
        dim: its vmapped dimension.
        size: V.
        batch: B.
        shared: what has no vmapped dimension and no batch may stay [1, ..].
    """
    if given is None or (shared and dim is None and given.shape[0] == 1):
        return given
    given = in_front(given, dim, size)
    if given.shape[1] != batch:
        given = given.expand(size, batch, *given.shape[2:])
    return given.flatten(0, 1)


def unfold(given: Tensor, size: int, batch: int) -> Tensor:
    """[V * B, ..] as [V, B, ..]."""
    whole: Tensor = given.unflatten(0, (size, batch))
    return whole


def one_by_one(call: Callable[..., Any], size: int, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The loop over samples that vmap stands for, results stacked."""
    samples = [
        call(*(x if dim is None else x.select(dim, number) for x, dim in zip(inputs, in_dims, strict=True)))
        for number in range(size)
    ]
    return tuple(torch.stack(results) for results in zip(*samples, strict=True))


def fold_masks(tensors: tuple[Tensor | None, ...], dims: tuple[int | None, ...], size: int, batch: int) -> list[Tensor | None]:
    """start, end, tiles, rows, columns, bits, indices and index_offset; bits with a vmapped dimension become one pool that tiles point into."""
    *tables, bits = tensors[:6]
    lists = [fold(x, dim, size, batch, shared=True) for x, dim in zip(tensors[6:], dims[6:], strict=True)]
    if bits is not None and dims[5] is not None and tables[2] is not None:
        tiles, bits = in_one_pool(in_front(tables[2], dims[2], size), bits.movedim(dims[5], 0))
        tables[2], dims = tiles, (*dims[:2], 0, *dims[3:])
    return [*(fold(x, dim, size, batch, shared=True) for x, dim in zip(tables, dims[:5], strict=True)), bits, *lists]


def forward(call: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
    """query, key, value, eight tensors of masks, key_bias, bias, dropout_seed, options -> out, lse, lse_rest."""
    size, batch = info.batch_size, batch_of(inputs[0], in_dims[0])
    has_bias = inputs[11] is not None or inputs[12] is not None  # else lse_rest is empty
    out_dims = (0, 0, 0 if has_bias else None)
    if inputs[14 + DROPOUT_P] > 0:
        out, lse, lse_rest = one_by_one(call, size, in_dims, inputs)
        return (out, lse, lse_rest) if has_bias else (out, lse, lse_rest[0]), out_dims
    tensors = [fold(x, dim, size, batch) for x, dim in zip(inputs[:3], in_dims[:3], strict=True)]
    tensors += fold_masks(inputs[3:11], in_dims[3:11], size, batch)
    tensors += [fold(x, dim, size, batch, shared=True) for x, dim in zip(inputs[11:13], in_dims[11:13], strict=True)]
    results = call(*tensors, None, *inputs[14:])
    return tuple(unfold(x, size, batch) if dim == 0 else x for x, dim in zip(results, out_dims, strict=True)), out_dims


def backward(call: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
    """grad_out, grad_lse, query, key, value, out, lse, then as forward's, need_key_bias, need_bias, lse_rest, more options -> five gradients."""
    size, batch = info.batch_size, batch_of(inputs[2], in_dims[2])
    needs, lse_rest = inputs[23:25], inputs[25]
    out_dims = (0, 0, 0, *(0 if need else None for need in needs))
    if inputs[18 + DROPOUT_P] > 0:
        stacked = one_by_one(call, size, in_dims, inputs)
        return tuple(x if dim == 0 else x[0] for x, dim in zip(stacked, out_dims, strict=True)), out_dims
    tensors = [fold(x, dim, size, batch) for x, dim in zip(inputs[:7], in_dims[:7], strict=True)]
    tensors += fold_masks(inputs[7:15], in_dims[7:15], size, batch)
    # A bias that needs a gradient needs one for every sample.
    biases = list(zip(inputs[15:17], in_dims[15:17], needs, strict=True))
    tensors += [fold(x, dim, size, batch, shared=not need) for x, dim, need in biases]
    if lse_rest is not None and lse_rest.dim() - (in_dims[25] is not None) == 3:
        lse_rest = fold(lse_rest, in_dims[25], size, batch)
    *results, grad_key_bias, grad_bias = call(*tensors, None, *inputs[18:25], lse_rest, *inputs[26:])
    results = [unfold(x, size, batch) for x in results]
    for gradient, (bias, dim, need) in zip((grad_key_bias, grad_bias), biases, strict=True):
        if need:
            gradient = unfold(gradient, size, batch)
            gradient = gradient.sum(1, keepdim=True) if batch_of(bias, dim) != batch else gradient
        results.append(gradient)
    return tuple(results), out_dims


def select(call: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
    """scores, segment_end, window, is_causal, local, sink -> end."""
    scores, segment_end, *options = inputs
    size, batch = info.batch_size, batch_of(scores, in_dims[0])
    end = call(fold(scores, in_dims[0], size, batch), fold(segment_end, in_dims[1], size, batch, shared=True), *options)
    return unfold(end, size, batch), 0


def pack_tiles(call: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], mask: Tensor, *options: Any) -> Any:
    """mask, lengths, block and tile sizes -> tiles, rows, columns. Slots are numbered from 0 in every sample, as a loop would."""
    size, batch = info.batch_size, batch_of(mask, in_dims[0])
    tiles, rows, columns = (unfold(x, size, batch) for x in call(fold(mask, in_dims[0], size, batch), *options))
    partial = (tiles >= FIRST_SLOT).flatten(1)
    slots = (partial.cumsum(1, dtype=torch.int32) - 1).view_as(tiles)
    return (torch.where(tiles >= FIRST_SLOT, slots + FIRST_SLOT, tiles), rows, columns), (0, 0, 0)


def pack_bits(call: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], mask: Tensor, tiles: Tensor, *options: Any) -> Any:
    """mask, tiles, lengths, block and tile sizes, slots -> bits [V, slots, ..]."""
    *sizes, slots = options
    size, batch = info.batch_size, batch_of(mask, in_dims[0])
    offset = (torch.arange(size, device=tiles.device, dtype=tiles.dtype) * slots).view(-1, 1, 1, 1, 1)
    tiles = in_front(tiles, in_dims[1], size)
    pooled = torch.where(
        tiles >= FIRST_SLOT + slots, FIRST_SLOT + size * slots, torch.where(tiles >= FIRST_SLOT, tiles + offset, tiles)
    )
    pooled = pooled.flatten(0, 1).contiguous()
    bits = call(fold(mask, in_dims[0], size, batch), pooled, *sizes, size * slots)
    return bits.unflatten(0, (size, slots)), 0


def decode(call: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
    """query, key, value, lengths, page_table, key_bias, sinks, indices, options -> out, lse. Vmapped pools of pages or sinks: a loop."""
    size, batch = info.batch_size, batch_of(inputs[0], in_dims[0])
    is_paged, shares_pools = inputs[4] is not None, in_dims[1] is None and in_dims[2] is None
    if in_dims[6] is not None or (is_paged and not shares_pools):
        return one_by_one(call, size, in_dims, inputs), (0, 0)
    caches = inputs[1:3] if is_paged else tuple(fold(inputs[i], in_dims[i], size, batch) for i in (1, 2))
    query, lengths, page_table = (fold(inputs[i], in_dims[i], size, batch) for i in (0, 3, 4))
    key_bias, indices = (fold(inputs[i], in_dims[i], size, batch, shared=True) for i in (5, 7))
    out, lse = call(query, *caches, lengths, page_table, key_bias, inputs[6], indices, *inputs[8:])
    return (unfold(out, size, batch), unfold(lse, size, batch)), (0, 0)


def index_top_k(call: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
    """index_query, index_key, weights, slope, start, end, query_offset, lengths, options -> indices, scores. Vmapped slopes: a loop."""
    size, batch = info.batch_size, batch_of(inputs[0], in_dims[0])
    if in_dims[3] is not None:
        return one_by_one(call, size, in_dims, inputs), (0, 0)
    tensors = [fold(x, dim, size, batch) for x, dim in zip(inputs[:3], in_dims[:3], strict=True)]
    base = [fold(x, dim, size, batch, shared=True) for x, dim in zip(inputs[4:6], in_dims[4:6], strict=True)]
    counts = [fold(x, dim, size, batch) for x, dim in zip(inputs[6:8], in_dims[6:8], strict=True)]
    indices, scores = call(*tensors, inputs[3], *base, *counts, *inputs[8:])
    has_scores = inputs[-1]
    return (unfold(indices, size, batch), unfold(scores, size, batch) if has_scores else scores), (0, 0 if has_scores else None)


# forward and backward come here through dmattn.autograd, the others, which have no derivatives, through torch's own registration.
for _name, _rule in (
    ("select", select),
    ("pack_tiles", pack_tiles),
    ("pack_bits", pack_bits),
    ("index_top_k", index_top_k),
    ("decode", decode),
):
    torch.library.register_vmap(f"dmattn::{_name}", partial(_rule, getattr(torch.ops.dmattn, _name)), lib=rules())
