"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, theta: float, positions: Tensor | None = None) -> Tensor:
    """Rotary position embedding of [B, H, S, D], D even: pairs (d, d + D/2) turn by ``position * theta ** (-2d / D)``.

    positions: [B, S], by default 0, 1, ... in every sequence.
    """
    half = x.shape[3] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    if positions is None:
        angle = torch.arange(x.shape[2], device=x.device, dtype=torch.float32)[:, None] * frequency
    else:
        angle = positions[:, None, :, None].to(torch.float32) * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
