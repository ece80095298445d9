"""The numbers in an interval: positions, and the two that lie before and behind every position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmattn import checks

ALWAYS = torch.iinfo(torch.int32).min
"""A start before every position, so that a key is visible from the beginning; or an end before every position: never visible."""
FOREVER = torch.iinfo(torch.int32).max
"""An end behind every position."""


def fewer(count: int, other: int) -> int:
    """The smaller of two numbers of keys; of those that a program leaves open, without a condition on the program."""
    least: int = min(count, other) if type(count) is type(other) is int else torch.sym_min(count, other)
    return least


def position(name: str, given: object, device: torch.device, batch: int | None = None, room: int = 0) -> Any:
    """A position as an int, or as an int64 tensor that broadcasts with [B, 1, 1]: from an int, or integers without dimensions or [B], where
    ``batch`` says B if it is known.

    A tensor's numbers beyond int32 count as the first or the last position there is. Behind the last are ``room`` more that are int32, too.

    Raises:
        TypeError: another type or dtype.
        ValueError: more dimensions, another B, another device (one number may lie on the CPU), or an int beyond int32.
    """
    if isinstance(given, Tensor):
        checks.tensor(name, given)
        if given.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: expected an int, or a tensor of int32 or int64, got {given.dtype}")
        if given.dim() > 1:
            raise ValueError(f"{name}: expected an int or a tensor [] or [B], got shape {checks.shape_of(given)}")
        if given.dim() and batch is not None and given.shape[0] not in (1, batch):
            raise ValueError(f"{name}: expected an int or a tensor [] or [B] with B={batch}, got {checks.shape_of(given)}")
        if given.device != device and (given.dim() or given.device.type != "cpu"):
            raise ValueError(f"{name}: expected device {device}, got {given.device}")
        given = given.long().clamp(ALWAYS + 1, FOREVER - 1 - room)  # int32 would wrap where positions are subtracted or compared
        return given if given.dim() == 0 else given.view(-1, 1, 1)
    if isinstance(given, bool) or not isinstance(given, int | torch.SymInt):
        raise TypeError(f"{name}: expected an int or a tensor of integers, got {type(given).__name__}")
    if not ALWAYS < given < FOREVER:
        raise ValueError(f"{name}: expected an int of magnitude below 2^31 - 1, got {given}")
    known: Any = given
    return fewer(known, FOREVER - 1 - room) if room else known


def moved(bound: Tensor, by: int | Tensor) -> Tensor:
    """A start or an end [B|1, H|Hkv|1, Sk] later by so many positions; ALWAYS and FOREVER stay, and nothing wraps."""
    later = (bound.long() + by).clamp(ALWAYS + 1, FOREVER - 1).to(torch.int32)
    return torch.where((bound == ALWAYS) | (bound == FOREVER), bound, later)
