"""Interval masks from masks that say nothing of intervals: each key's queries are found, and whether they are one run is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmattn import checks
from dmattn.masks.bounds import ALWAYS
from dmattn.masks.heads import with_rank

PAIRS_AT_ONCE = 1 << 24  # pairs of a query and a key looked at together, about
MESSAGE = "expected every key to be visible to one unbroken run of queries"


def on_grid(fn: Callable[..., Any], sizes: tuple[int, int, int, int], first: int, last: int, device: Any) -> Tensor:
    """``fn(b, h, q, k)`` for all batches, heads and keys of ``sizes`` [B, H, Sq, Sk] and queries [first, last), as bool of that shape."""
    index = [
        torch.arange(*(first, last) if axis == 2 else (size,), device=device).view([-1 if i == axis else 1 for i in range(4)])
        for axis, size in enumerate(sizes)
    ]
    if not callable(fn):
        raise TypeError(f"fn: expected a function of (b, h, q, k), got {checks.type_of(fn)}")
    visible = fn(*index)
    shape = (*sizes[:2], last - first, sizes[3])
    if isinstance(visible, Tensor) and not all(n in (1, size) for n, size in zip(visible.shape[::-1], shape[::-1], strict=False)):
        raise ValueError(
            f"fn: expected a result that broadcasts to [B, H, Sq, Sk] = {list(shape)}, got {checks.shape_of(visible)}"
        )
    if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
        raise TypeError(f"fn: expected it to return a bool tensor, got {getattr(visible, 'dtype', type(visible).__name__)}")
    return visible.expand(shape)


def four_dims(mask: Tensor) -> Tensor:
    """A mask as bool [B|1, H|Hkv|1, Sq, Sk], checked; leading dimensions may be left out."""
    checks.tensor("mask", mask, (torch.bool,))
    if mask.dim() not in (2, 3, 4) or max(mask.shape[-2:]) > checks.MAX_LENGTH:
        raise ValueError(
            f"mask: expected [B|1, H|Hkv|1, Sq, Sk] with lengths up to {checks.MAX_LENGTH}, got shape {checks.shape_of(mask)}"
        )
    return with_rank(mask, 4)


def function_sizes(B: int | None, H: int | None, Sq: int, Sk: int) -> tuple[int, int, int, int]:
    """[B, H, Sq, Sk] of a mask made by a function; None counts as 1."""
    batch, heads = (1 if size is None else size for size in (B, H))
    checks.each(checks.length, B=batch, H=heads, Sq=Sq, Sk=Sk)
    return batch, heads, Sq, Sk


def interval_of(
    name: str, sizes: tuple[int, int, int, int], rows: Callable[[int, int], Tensor], device: torch.device
) -> tuple[Tensor, Tensor]:
    """start and end [B, H, Sk] from ``rows(first, last)``, bool [B, H, last - first, Sk], called for some queries after the others.

    Raises:
        ValueError: some key's queries are no run; names the first such key. While tracing the check becomes a part of the program.
    """
    batch, heads, queries, keys = sizes
    shape = (batch, heads, keys)
    first = torch.full(shape, queries, dtype=torch.int32, device=device)
    last, count = torch.full_like(first, -1), torch.zeros_like(first)
    for begin, end in spans(queries, batch * heads * keys):
        visible = rows(begin, end)
        query = torch.arange(begin, end, dtype=torch.int32, device=device)[:, None]
        first = torch.minimum(first, torch.where(visible, query, queries).amin(2).to(torch.int32))
        last = torch.maximum(last, torch.where(visible, query, -1).amax(2).to(torch.int32))
        count = count + visible.sum(2, dtype=torch.int32)
    one_run = (count == 0) | (count == last - first + 1)
    if torch.compiler.is_compiling():
        torch.ops.aten._assert_async.msg(one_run.all(), f"{name}: {MESSAGE}")
    elif device.type != "meta" and not bool(one_run.all()):
        b, h, k = (~one_run).nonzero()[0].tolist()
        raise ValueError(
            f"{name}: {MESSAGE}, got key {k} of batch {b}, head {h} visible to {int(count[b, h, k])} of the queries from "
            f"{int(first[b, h, k])} to {int(last[b, h, k])}; BlockMask takes any mask"
        )
    offset = keys - queries  # from a query's number to its position
    seen = count > 0
    return torch.where(seen, first + offset, ALWAYS), torch.where(seen, last + (offset + 1), ALWAYS)


def spans(queries: int, pairs_of_each: int) -> list[tuple[int, int]]:
    """Queries [first, last) that are looked at together: all while tracing, else as many as fit in memory."""
    if torch.compiler.is_compiling():
        return [(0, queries)]
    step = max(1, PAIRS_AT_ONCE // max(1, pairs_of_each))
    return [(first, min(first + step, queries)) for first in range(0, queries, step)]
