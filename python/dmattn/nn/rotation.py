"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmattn import checks
from dmattn.nn.opaque import opaque
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
    checks.tensor("x", x, checks.DTYPES["cpu"])
    if x.dim() != 4 or x.shape[3] % 2 != 0:
        raise ValueError(f"x: expected [B, H, S, D] with an even D, got {checks.shape_of(x)}")
    if checks.number("theta", theta, low=0.0) == 0:
        raise ValueError(f"theta: expected a number > 0, got {theta}")
    checks.number("factor", factor, low=0.0, high=1.0)
    if positions is not None:
        dtypes = (torch.int64, torch.int32, torch.int16, torch.uint8, *checks.DTYPES["cpu"])
        checks.shaped("positions", positions, "[B|1, S]", dtypes, x, "x", B=x.shape[0], S=x.shape[2])
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
    return turned(query, table, heads * (query.shape[2] // key.shape[2])), turned(key, table, heads)


@opaque("rotated")
def rotated(
    query: Tensor, key: Tensor, positions: Tensor | None, theta: float, factor: float, heads: int, back: bool = False
) -> tuple[Tensor, Tensor]:
    """:func:`both_turned` to positions [B|1, S], by default 0, 1, ..., or back."""
    positions = torch.arange(query.shape[1], device=query.device)[None] if positions is None else positions
    cos, sin = rotation_table(positions, query.shape[3], theta, factor, query.dtype)
    query, key = both_turned(query, key, (cos, -sin if back else sin), heads)
    return query.contiguous(), key.contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, positions, *ctx.options, _ = inputs
    ctx.save_for_backward(positions)


def _rotated_back(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    return *rotated(*grads, *ctx.saved_tensors, *ctx.options, True), *(None,) * 5


rotated.register_autograd(_rotated_back, setup_context=_save)
