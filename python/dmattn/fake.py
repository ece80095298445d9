"""Fake functions: the shapes, dtypes and strides each op returns, for tracing. They ask no device for anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from dmattn._library import arguments_of, by_name, rules

F = TypeVar("F", bound=Callable[..., object])
OPS: list[str] = []  # the names of all ops
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# What reduce_sum and reduce_max take.
REDUCED = (*FLOATING, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def fake(function: F) -> F:
    """Registers a function as the fake of the op of its name. It takes those of the op's arguments that it needs, by name."""
    op = function.__name__
    like = "query" if op == "backward" else next(iter(arguments_of(op)))

    def checked(*inputs: object) -> object:
        given = by_name(op, inputs)
        check_one_device(op, like, given)
        return function(**given)

    OPS.append(op)
    torch.library.register_fake(f"dmattn::{op}", checked, lib=rules())
    return function


def table_size(length: int, tile: int) -> int:
    """Tiles in a block table along a length; never 0 or 1, sizes on which tracing would specialise."""
    return length // tile + 2


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse and of everything summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_in_order_of(like: Tensor, width: int) -> Tensor:
    """An empty [B, heads, S, width] whose first dimensions lie in memory in the order of ``like``'s: the rule of cpp/tensors.h."""
    order = [0, 1, 2]
    for a, b in ((0, 1), (1, 2), (0, 1)):
        if like.stride(order[a]) < like.stride(order[b]):
            order[a], order[b] = order[b], order[a]
    strides: list[int] = [0, 0, 0, 1]
    step = width
    for axis in reversed(order):
        strides[axis] = step
        step = step * max(like.shape[axis], 1)
    return like.new_empty_strided((*like.shape[:3], width), strides)


def check_one_device(op: str, like: str, given: dict[str, Any]) -> None:
    """Raises for a mix of devices, as the kernels do: one meta tensor among others is enough to come here."""
    device = given[like].device
    for other in given.values():
        if isinstance(other, Tensor) and other.device != device:
            raise RuntimeError(f"dmattn: {op}: expected the device of {like}, {device}, for all tensors, got {other.device}")


@fake
def select(scores: Tensor, **_: object) -> Tensor:
    return scores.new_empty(scores.shape, dtype=torch.int32)


@fake
def pack_tiles(
    mask: Tensor, query_length: int, key_length: int, tile_q: int, tile_k: int, **_: object
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = table_size(query_length, tile_q), table_size(key_length, tile_k)
    sizes = ((rows, columns), (rows, columns + 1), (columns, rows + 1))
    tiles, of_rows, of_columns = (mask.new_empty((*mask.shape[:2], *size), dtype=torch.int32) for size in sizes)
    return tiles, of_rows, of_columns


@fake
def pack_bits(mask: Tensor, tile_q: int, tile_k: int, slots: int, **_: object) -> Tensor:
    return mask.new_empty((slots, tile_q, tile_k // 32), dtype=torch.int32)


@fake
def forward(
    query: Tensor, value: Tensor, key_bias: Tensor | None, bias: Tensor | None, **_: object
) -> tuple[Tensor, Tensor, Tensor]:
    lse = query.new_empty(query.shape[:3], dtype=accumulate_dtype(query.dtype))
    has_bias = key_bias is not None or bias is not None
    return empty_in_order_of(query, value.shape[3]), lse, lse.new_empty(lse.shape if has_bias else (0,))


@fake
def forward_plain(query: Tensor, value: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    return empty_in_order_of(query, value.shape[3]), query.new_empty(query.shape[:3], dtype=accumulate_dtype(query.dtype))


@fake
def backward(
    query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None, bias: Tensor | None, need_key_bias: bool, need_bias: bool,
    **_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    summed = accumulate_dtype(query.dtype)
    return (
        empty_in_order_of(query, query.shape[3]),
        empty_in_order_of(key, key.shape[3]),
        empty_in_order_of(value, value.shape[3]),
        query.new_empty(key_bias.shape if need_key_bias and key_bias is not None else (0,), dtype=summed),
        query.new_empty(bias.shape if need_bias and bias is not None else (0,), dtype=summed),
    )


@fake
def index_top_k(
    index_query: Tensor, key_length: int, k: int, block_size: int, is_pooled: bool, with_scores: bool, **_: object
) -> tuple[Tensor, Tensor]:
    blocks = key_length // block_size if is_pooled else -(-key_length // block_size)
    shape = (*index_query.shape[:3], torch.sym_min(k, blocks))
    scores = index_query.new_empty(shape if with_scores else (0,), dtype=accumulate_dtype(index_query.dtype))
    return index_query.new_empty(shape, dtype=torch.int32), scores


@fake
def index_loss(
    logits: Tensor, products: Tensor, weights: Tensor, to_bfloat16: bool, **_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_row = logits.new_empty(weights.shape[:3])
    of_products = products.new_empty(products.shape, dtype=torch.bfloat16 if to_bfloat16 else products.dtype)
    return of_row, of_products, weights.new_empty(weights.shape), torch.empty_like(of_row)


@fake
def decode(query: Tensor, value: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    return empty_in_order_of(query, value.shape[3]), query.new_empty(query.shape[:3], dtype=accumulate_dtype(query.dtype))


@fake
def cache_update(**_: object) -> None:
    """Like cache_extend and cache_rewind, it only writes its arguments."""


@fake
def cache_step(score_cache: Tensor, query: Tensor, value: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    return empty_in_order_of(query, value.shape[3]), score_cache.new_empty(query.shape[:3])


@fake
def cache_join(
    score_cache: Tensor, position: Tensor, key: Tensor, value: Tensor, visible: int, **_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    heads, keys = key.shape[:2], visible + key.shape[2]
    return (
        key.new_empty((*heads, keys, key.shape[3])),
        key.new_empty((*heads, keys, value.shape[3])),
        score_cache.new_empty((*heads, keys)),
        position.new_empty((*heads, keys)),
        position.new_empty((*heads, visible)),
        position.new_empty((*heads, keys)),
    )


@fake
def cache_extend(**_: object) -> None: ...


@fake
def cache_rewind(**_: object) -> None: ...


def check_dim(shape: torch.Size, dim: int | None) -> None:
    places = max(len(shape), 1)  # a scalar has a dimension 0
    if dim is not None and not -places <= dim < places:
        raise RuntimeError(f"dmattn: dim: expected a dimension from {-places} to {places - 1} of input {list(shape)}, got {dim}")


def reduced_shape(name: str, given: Tensor, dim: int | None, keepdim: bool) -> list[int]:
    """The shape of a reduction's result; raises as the kernels do."""
    rank = given.dim()
    if given.dtype not in REDUCED:
        raise RuntimeError(f"dmattn: input: expected dtype {', '.join(str(dtype) for dtype in REDUCED)}, got {given.dtype}")
    check_dim(given.shape, dim)
    reduced = range(rank) if dim is None or rank == 0 else [dim % rank]
    if name == "reduce_max":
        for axis in reduced:
            torch._check(
                given.shape[axis] != 0, lambda: "dmattn: reduce_max: expected at least one element to take the maximum of"
            )
    return [1 if axis in reduced else size for axis, size in enumerate(given.shape) if keepdim or axis not in reduced]


@fake
def reduce_sum(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    dtype = input.dtype if input.is_floating_point() else torch.int64
    return input.new_empty(reduced_shape("reduce_sum", input, dim, keepdim), dtype=dtype)


@fake
def reduce_max(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return input.new_empty(reduced_shape("reduce_max", input, dim, keepdim))
