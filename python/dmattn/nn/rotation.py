"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmattn import checks
from dmattn.nn.opaque import is_opaque, opaque
from dmattn.sharding import beside


def rotate(x: Tensor, theta: float, positions: Tensor | None = None, factor: float = 1.0) -> Tensor:
    """Rotary position embedding of [B, H, S, D], D even: pairs (d, d + D/2) turn by ``position * theta ** (-2d / D)``.

    positions: [B|1, S], by default 0, 1, ... in every sequence. factor: the part of the dimensions, the first ones, that turn, as if
    D were ``D * factor``, rounded down to an even number; the others stay as they are.

    Angles are computed in float64 for float64 and in float32 for all other dtypes, as in transformers' models. There they are off by
    up to ``position * 2 ** -23`` radians, a tenth at position 10^6.

    Raises:
        TypeError: x or positions is no tensor, x is not of a floating-point dtype, or positions are no real numbers.
        ValueError: x is not of such a shape, or positions do not fit it; theta is not positive, or factor not in [0, 1].
    """
    checks.dtype("x", checks.tensor("x", x), checks.DTYPES["cpu"])
    if x.dim() != 4 or x.shape[3] % 2 != 0:
        raise ValueError(f"x: expected [B, H, S, D] with an even D, got {checks.shape_of(x)}")
    if checks.number("theta", theta, low=0.0) == 0:
        raise ValueError(f"theta: expected a number > 0, got {theta}")
    checks.number("factor", factor, low=0.0, high=1.0)
    if positions is not None:
        shape = checks.tensor("positions", positions).shape
        checks.dtype("positions", positions, (torch.int64, torch.int32, torch.int16, torch.uint8, *checks.DTYPES["cpu"]))
        checks.same_device("positions", positions, x, "x")
        if len(shape) != 2 or shape[0] not in (1, x.shape[0]) or shape[1] != x.shape[2]:
            raise ValueError(f"positions: expected [B|1, S] with B={x.shape[0]}, S={x.shape[2]}, got {list(shape)}")
    if positions is None:
        positions = torch.arange(x.shape[2], device=x.device)[None]
    table = rotation_table(positions, x.shape[3], theta, factor, x.dtype)
    return turned(x.transpose(1, 2), table).transpose(1, 2)


def turning_pairs(size: int, factor: float) -> int:
    """How many pairs of a head's ``size`` dimensions turn, if the part ``factor`` of its dimensions does."""
    return int(size * factor) // 2


def rotation_table(positions: Tensor, size: int, theta: float, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines by which :func:`turned` rotates heads of ``size`` dimensions to positions [B|1, S]: two tensors [B|1, S, 1, half]."""
    half = turning_pairs(size, factor)
    wide = torch.promote_types(dtype, torch.float32)
    frequency = theta ** (-torch.arange(half, device=positions.device, dtype=wide) / half)
    angle = positions[:, :, None, None].to(wide) * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def turned(x: Tensor, table: tuple[Tensor, Tensor], heads: int | None = None) -> Tensor:
    """x [B, S, H, D], of which the first ``heads`` heads, by default all, are rotated by a :func:`rotation_table`. Heads stay side by side
    in memory, so that their outputs need no copy."""
    half = table[0].shape[3]
    if not half:
        return x
    if heads is not None and heads < x.shape[2]:
        return torch.cat((turned(x[:, :, :heads], table), x[:, :, heads:]), dim=2)
    cos, sin = (beside(x, part) for part in table)
    first, second = x[..., :half], x[..., half : 2 * half]
    unturned = (x[..., 2 * half :],) if 2 * half < x.shape[3] else ()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, *unturned), dim=-1)


def both_turned(query: Tensor, key: Tensor, table: tuple[Tensor, Tensor], heads: int) -> tuple[Tensor, Tensor]:
    """query [B, S, H, D] and key [B, S, Hkv, D], of which the first ``heads`` key heads and their query heads are rotated."""
    if is_opaque(query) and table[0].shape[3] and not any(part.requires_grad for part in table):
        both: tuple[Tensor, Tensor] = torch.ops.dmattn_nn.turned(query, key, *table, heads)
        return both
    return turned(query, table, heads * (query.shape[2] // key.shape[2])), turned(key, table, heads)


@opaque("turned")
def _turned(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, heads: int, back: bool = False
) -> tuple[Tensor, Tensor]:
    return both_turned(query, key, (cos, -sin if back else sin), heads)


@_turned.register_fake
def _(query: Tensor, key: Tensor, cos: Tensor, *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, cos.dtype)) for x in (query, key)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, _, cos, sin, ctx.heads, _ = inputs
    ctx.dtype = query.dtype
    ctx.save_for_backward(cos, sin)


def _turned_back(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    back = torch.ops.dmattn_nn.turned(*grads, *ctx.saved_tensors, ctx.heads, True)
    return *(grad.to(ctx.dtype) for grad in back), None, None, None, None


_turned.register_autograd(_turned_back, setup_context=_save)
