"""The sizes of one attention call, checked once, and the shapes of its masks and biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dmattn import checks
from dmattn.fake import accumulate_dtype
from dmattn.masks import BlockMask, IndexMask
from dmattn.masks.heads import with_rank


class Sizes(NamedTuple):
    """What query [B, H, Sq, D], key [B, Hkv, Sk, D] and value [B, Hkv, Sk, Dv] have in common."""

    batch: int
    heads: int
    kv_heads: int
    query_length: int
    key_length: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"B={self.batch}, H={self.heads}, Hkv={self.kv_heads}, Sq={self.query_length}, Sk={self.key_length}"


def padded(given: Tensor) -> Tensor:
    """The last dimension filled with zeros up to a multiple of 8, which the kernels ask for; it changes no product."""
    missing = -given.shape[-1] % 8
    return F.pad(given, (0, missing)) if missing else given


def sizes_of(query: Tensor, key: Tensor, value: Tensor, *, longest: int | None = None) -> Sizes:
    """Checks rank, dtype, device, head counts and sizes of query, key and value, and returns them.

    Args:
        longest: the largest length; None: checks.MAX_LENGTH.

    Raises:
        TypeError, ValueError: names the first argument that does not fit.
    """
    if not (
        isinstance(query, Tensor)
        and isinstance(key, Tensor)
        and isinstance(value, Tensor)
        and query.layout is key.layout is value.layout is torch.strided
        and not (query.is_nested or key.is_nested or value.is_nested)
    ):
        checks.tensor("query", query), checks.tensor("key", key), checks.tensor("value", value)
    device, dtype = query.device, query.dtype
    dtypes = checks.DTYPES.get(device.type) or checks.kernels_for("query", query)
    if dtype not in dtypes:
        checks.dtype("query", query, dtypes)
    query_shape, key_shape, value_shape = query.shape, key.shape, value.shape
    alike = key.device == device == value.device and key.dtype == dtype == value.dtype
    if not alike or not len(query_shape) == len(key_shape) == len(value_shape) == 4:
        check_alike(("query", query, "[B, H, Sq, D]"), ("key", key, "[B, Hkv, Sk, D]"), ("value", value, "[B, Hkv, Sk, Dv]"))
    batch, heads, query_length, head_dim = query_shape
    key_batch, kv_heads, key_length, key_dim = key_shape
    value_batch, value_heads, value_length, value_dim = value_shape
    if key_batch != batch or key_dim != head_dim:
        raise ValueError(f"key: expected [B, Hkv, Sk, D] with B={batch}, D={head_dim}, got {checks.shape_of(key)}")
    if value_batch != batch or value_heads != kv_heads or value_length != key_length:
        raise ValueError(
            f"value: expected [B, Hkv, Sk, Dv] with B={batch}, Hkv={kv_heads}, Sk={key_length}, got {checks.shape_of(value)}"
        )
    if (heads % kv_heads if kv_heads else heads) != 0:
        raise ValueError(f"key: expected a number of heads that divides H={heads} of query, got Hkv={kv_heads}")
    for name, size in (("query", head_dim), ("value", value_dim)):
        if size % 8 or not 0 < size <= checks.MAX_HEAD_DIM:
            checks.head_size(name, size, "a last dimension that is ")
    longest = checks.MAX_LENGTH if longest is None else longest
    if query_length > longest or key_length > longest:
        raise ValueError(f"query, key: expected lengths up to {longest}, got Sq={query_length}, Sk={key_length}")
    return Sizes(batch, heads, kv_heads, query_length, key_length, head_dim, dtype, device)


def check_alike(*named: tuple[str, Tensor, str], any_dtype: bool = False) -> None:
    """Checks that tensors, each with its name and layout, have as many dimensions as that, and the device and dtype of the first."""
    like_name, like, _ = named[0]
    for name, given, layout in named:
        rank = layout.count(",") + 1
        if given.dim() != rank:
            raise ValueError(f"{name}: expected {rank} dimensions {layout}, got shape {checks.shape_of(given)}")
        checks.same_device(name, given, like, like_name)
        if given.dtype != like.dtype and not any_dtype:
            raise TypeError(f"{name}: expected dtype {like.dtype} like {like_name}, got {given.dtype}")


def per_head(
    name: str, given: Tensor, sizes: Sizes, rest: Sequence[int], layout: str, shape: Sequence[int] | None = None
) -> None:
    """Checks that a mask or bias has the shape [B|1, H|Hkv|1, *rest] and lies on query's device; messages name ``shape``, by default its own."""
    if given.device != sizes.device:
        raise ValueError(f"{name}: expected device {sizes.device} like query, got {given.device}")
    batch, heads, *rest_given = given.shape if given.dim() > 1 else (0, 0)
    fits = rest_given == [*rest] and (batch == 1 or batch == sizes.batch)
    if not (fits and (heads == 1 or heads == sizes.heads or heads == sizes.kv_heads)):
        raise ValueError(f"{name}: expected {layout} with {sizes}, got {list(given.shape if shape is None else shape)}")


def four_dims(name: str, given: Tensor, sizes: Sizes) -> Tensor:
    """A mask or bias broadcastable to [B, H|Hkv, Sq, Sk] as [B|1, H|Hkv|1, Sq|1, Sk]."""
    layout = "[B|1, H|Hkv|1, Sq|1, Sk]"
    if given.dim() > 4 or given.dim() < 1:
        raise ValueError(f"{name}: expected {layout}, got shape {checks.shape_of(given)}")
    came = given.shape
    given = with_rank(given, 4)
    if given.shape[3] == 1 and sizes.key_length != 1:
        given = given.expand(-1, -1, -1, sizes.key_length)
    rows = sizes.query_length if given.shape[2] != 1 else 1
    per_head(name, given, sizes, (rows, sizes.key_length), layout, came)
    return given


def interval_rows(name: str, given: Tensor, sizes: Sizes) -> Tensor:
    """The start or end of an interval mask as [B|1, H|Hkv|1, Sk]."""
    given = with_rank(given, 3)  # fewer under torch.vmap over a mask's batch
    if given.shape[2] == 1 and sizes.key_length != 1:
        given = given.expand(-1, -1, sizes.key_length)
    per_head(name, given, sizes, (sizes.key_length,), "[B|1, H|Hkv|1, Sk]")
    return given


def fitting_block(block: BlockMask, sizes: Sizes) -> BlockMask:
    """A block mask cut to the call's lengths."""
    if not block.fits(sizes.query_length, sizes.key_length):
        raise ValueError(
            f"mask: expected a BlockMask for Sq={sizes.query_length}, Sk={sizes.key_length}, "
            f"got one for Sq={block.query_length}, Sk={block.key_length}"
        )
    tiles = block.tiles
    per_head("mask", tiles, sizes, tiles.shape[2:], "[B|1, H|Hkv|1, Sq, Sk]", block.shape)
    return block.cut(sizes.query_length, sizes.key_length)


def entry_beyond(index: IndexMask, key_length: int) -> int | None:
    """The largest entry of lists, if it is known and beyond the keys."""
    lists = index.indices
    if not checks.values_are_known(lists) or not lists.numel():
        return None
    most = int(lists.amax())
    return most if most >= -(-key_length // index.block_size) else None


def fitting_lists(index: IndexMask, sizes: Sizes) -> Tensor:
    """The lists of an index mask, checked against the call's sizes. Entries beyond the keys are refused where their values are known."""
    lists = with_rank(index.indices, 4)  # fewer under torch.vmap over a mask's batch
    if lists.shape[2] != sizes.query_length:
        raise ValueError(f"mask: expected an IndexMask for Sq={sizes.query_length}, got one for Sq={lists.shape[2]}")
    per_head("mask", lists, sizes, lists.shape[2:], "[B|1, H|Hkv|1, Sq, K]", index.indices.shape)
    most = entry_beyond(index, sizes.key_length)
    if most is not None:
        blocks = -(-sizes.key_length // index.block_size)
        raise ValueError(
            f"mask: expected entries below {blocks} for Sk={sizes.key_length} keys in blocks of {index.block_size}, got {most}"
        )
    return lists if lists.stride(3) == 1 else lists.contiguous()


def key_bias_rows(key_bias: Tensor, sizes: Sizes, layout: str = "[B|1, H|Hkv|1, Sk]") -> Tensor:
    """key_bias as the op takes it: [B|1, H|Hkv|1, Sk] in the dtype things are summed in. layout: what messages say of its shape."""
    checks.tensor("key_bias", key_bias, checks.DTYPES["cpu"])
    if key_bias.dim() > 3 or key_bias.dim() < 1:
        raise ValueError(f"key_bias: expected {layout}, got shape {checks.shape_of(key_bias)}")
    came = key_bias.shape
    key_bias = with_rank(key_bias, 3)
    per_head("key_bias", key_bias, sizes, (sizes.key_length,), layout, came)
    summed = accumulate_dtype(sizes.dtype)
    return key_bias if key_bias.dtype == summed else key_bias.to(summed)


def check_scores(scores: Tensor, query: Tensor, key: Tensor, layout: str) -> None:
    """Checks scores of keys, of the shape and on the device of key [B, Hkv, Sk, D]."""
    checks.tensor("scores", scores, checks.DTYPES["cpu"])
    if scores.shape != key.shape[:3]:
        raise ValueError(f"scores: expected {layout} = {list(key.shape[:3])}, got {checks.shape_of(scores)}")
    checks.same_device("scores", scores, query)


def with_own_gradient(given: Tensor) -> Tensor:
    """The same numbers, for a sum of two biases: the gradient of ``given`` then has memory of its own.

    A sum hands both its terms one gradient. Where both are views of leaves, autograd keeps views of that one as the leaves' gradients, and a
    second backward pass adds to it twice.
    """
    return given * 1


def bias_rows(bias: Tensor, sizes: Sizes) -> tuple[Tensor | None, Tensor | None]:
    """A bias as (key_bias part, bias part): one that is the same for all queries belongs to the keys."""
    checks.tensor("bias", bias, checks.DTYPES["cpu"])
    bias = four_dims("bias", bias, sizes)
    summed = accumulate_dtype(sizes.dtype)
    if bias.shape[2] == 1:
        return bias[:, :, 0].to(summed), None
    return None, bias if bias.dtype == sizes.dtype else bias.to(summed)
