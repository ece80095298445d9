"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn import checks
from dmattn.sharding import beside


def rotate(x: Tensor, theta: float, positions: Tensor | None = None, factor: float = 1.0) -> Tensor:
    """Rotary position embedding of [B, H, S, D], D even: pairs (d, d + D/2) turn by ``position * theta ** (-2d / D)``.

    positions: [B|1, S], by default 0, 1, ... in every sequence. factor: the part of the dimensions, the first ones, that turn, as if
    D were ``D * factor``, rounded down to an even number; the others stay as they are.

    Raises:
        TypeError: x or positions is no tensor, or x is not of a floating-point dtype.
        ValueError: x is not of such a shape, or positions do not fit it.
    """
    checks.dtype("x", checks.tensor("x", x), checks.DTYPES["cpu"])
    if x.dim() != 4 or x.shape[3] % 2 != 0:
        raise ValueError(f"x: expected [B, H, S, D] with an even D, got {checks.shape_of(x)}")
    if positions is not None:
        shape = checks.tensor("positions", positions).shape
        if len(shape) != 2 or shape[0] not in (1, x.shape[0]) or shape[1] != x.shape[2]:
            raise ValueError(f"positions: expected [B|1, S] with B={x.shape[0]}, S={x.shape[2]}, got {list(shape)}")
    half = int(x.shape[3] * factor) // 2
    if not half:
        return x
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    if positions is None:
        angle = torch.arange(x.shape[2], device=x.device, dtype=torch.float32)[:, None] * frequency
    else:
        angle = positions[:, None, :, None].to(torch.float32) * frequency
    cos, sin = (beside(x, part.to(x.dtype)) for part in (angle.cos(), angle.sin()))
    first, second = x[..., :half], x[..., half : 2 * half]
    unturned = (x[..., 2 * half :],) if 2 * half < x.shape[3] else ()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, *unturned), dim=-1)
