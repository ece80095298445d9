"""Masks of trees in depth-first order: every node is seen by its descendants, which stand next to each other."""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn import checks
from dmattn.masks.heads import with_rank


def interval_of(enter: object, leave: object) -> tuple[Tensor, Tensor]:
    """start and end [B|1, 1, Sk] of the keys: the queries q with ``enter[k] <= enter[q] < leave[k]``."""
    enter, leave = _numbers("enter", enter), _numbers("leave", leave)
    checks.same_device("leave", leave, enter, "enter")
    if enter.shape != leave.shape or enter.dtype != leave.dtype:
        raise ValueError(
            f"leave: expected {enter.dtype} {checks.shape_of(enter)} like enter, got {leave.dtype} {checks.shape_of(leave)}"
        )
    if checks.values_are_known(enter) and not bool((enter[:, 1:] >= enter[:, :-1]).all()):
        raise ValueError("enter: expected keys in depth-first order, so that enter never decreases; sort the keys by enter first")
    enter = enter.contiguous()
    start, end = (torch.searchsorted(enter, bound.contiguous(), out_int32=True) for bound in (enter, leave))
    return start[:, None], end[:, None]


def subtree_ends(parents: object) -> Tensor:
    """For nodes in depth-first order the index behind each one's last descendant, int32 [B|1, 1, Sk]."""
    given = _numbers("parents", parents)
    length = given.shape[1]
    if checks.values_are_known(given):
        _check_order(given)
    # What has no parent gets one behind all nodes, which nobody reads.
    up = torch.cat([torch.where(given < 0, length, given), torch.full_like(given[:, :1], length)], dim=1) if length else given
    up = up.long().clamp(max=length)
    last = torch.arange(length + 1, device=given.device).expand_as(up) if length else up
    # After n steps ``up`` is the ancestor 2^n generations back, and ``last`` the last of the descendants of fewer generations.
    for _ in range(_steps(length)):
        last, up = last.scatter_reduce(1, up, last, "amax"), up.gather(1, up)
    return (last[:, :length] + 1).to(torch.int32)[:, None]


def _steps(length: int) -> int:
    """How often generations double until they are more than any tree of this length has; a bound for all lengths while tracing."""
    return (
        length.bit_length() if isinstance(length, int) and not torch.compiler.is_compiling() else checks.MAX_LENGTH.bit_length()
    )


def _numbers(name: str, given: object) -> Tensor:
    numbers = checks.tensor(name, given, (torch.int32, torch.int64))
    if numbers.dim() not in (1, 2) or numbers.shape[-1] > checks.MAX_LENGTH:
        expected = f"[Sk] or [B, Sk] with at most {checks.MAX_LENGTH} keys"
        raise ValueError(f"{name}: expected {expected}, got shape {checks.shape_of(numbers)}")
    return with_rank(numbers, 2)


def _check_order(parents: Tensor) -> None:
    """In depth-first order the parent of a node is the node before it or one of that node's ancestors."""
    for row in parents.tolist():
        path = [-1]  # from the root down to the node before, with what roots have for a parent first
        for node, parent in enumerate(row):
            while path and path[-1] != parent:
                path.pop()
            if not path:
                raise ValueError(
                    "parents: expected nodes in depth-first order, each one's parent being -1, the node before it or an ancestor "
                    f"of that, got {parent} for node {node}"
                )
            path.append(node)
