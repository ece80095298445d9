"""What a bounded cache takes from a state dict: only a state that some history of tokens leaves behind."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dmattn import checks
from dmattn.cache_chunk import CacheSizes, CacheState

FLOATING = ("key", "value", "score")


def check_loaded(prefix: str, state_dict: Mapping[str, object], own: CacheState, sizes: CacheSizes) -> None:
    """Refuses what cannot be the state of a cache like ``own``. What is missing or has another shape is left to torch, which refuses it, too.

    Raises:
        TypeError: a wrong dtype.
        ValueError: slots, counts or scores that contradict each other, where their values lie on the CPU.
    """
    found: dict[str, Tensor] = {}
    for name, mine in own._asdict().items():
        given = state_dict.get(prefix + name)
        if not isinstance(given, Tensor):
            continue
        if not (given.is_floating_point() if name in FLOATING else given.dtype == mine.dtype):
            expected = "a floating-point dtype" if name in FLOATING else mine.dtype
            raise TypeError(f"{prefix}{name}: expected {expected}, got {given.dtype}")
        if given.shape == mine.shape and checks.values_are_known(given):
            found[name] = given
    if found.keys() != own._asdict().keys():
        return
    position, steps, kept = (found[name].long() for name in ("position", "steps", "kept"))
    score, slot = found["score"], torch.arange(position.shape[-1])
    is_selected = (slot >= sizes.sink_keys + sizes.local) & (slot < sizes.visible())
    is_right = {
        "steps": (steps >= 0) & (steps == steps[:, :1]),
        "kept": (kept >= 0) & (kept <= steps.clamp(max=sizes.rewind)),
        "position": _fits_slots(position, steps[..., None], sizes),
        "entered": _is_none_or(found["entered"], sizes.sink_keys + sizes.local, sizes.visible()),
        "score": torch.where(position < 0, score == -torch.inf, ~is_selected | (score > -torch.inf)),
    }
    for name, right in is_right.items():
        if not bool(right.all()):
            place = (~right).nonzero()[0].tolist()
            raise ValueError(
                f"{prefix}{name}: expected the state that tokens leave in a cache, got {found[name][tuple(place)].item()} at {place}"
            )


def check_same_lengths(prefix: str, state_dict: Mapping[str, object], *names: str) -> None:
    """Refuses parts of one cache whose sequences have other lengths, or that know other numbers of tokens back.

    Args:
        names: of two tensors in the state dict, [B] or [B, heads] with the same number in every head.

    Raises:
        ValueError: they differ, where their values lie on the CPU. Other shapes and dtypes are refused elsewhere.
    """
    given = [state_dict.get(prefix + name) for name in names]
    tensors = [x for x in given if isinstance(x, Tensor) and x.dim() in (1, 2) and x.numel() and checks.values_are_known(x)]
    if len(tensors) < len(names):
        return
    first, second = (x if x.dim() == 1 else x[:, 0] for x in tensors)
    if first.shape == second.shape and not torch.equal(first, second):
        raise ValueError(
            f"{prefix}{names[1]}: expected {first.tolist()} like {prefix}{names[0]}, which has the same sequences, got {second.tolist()}"
        )


def _fits_slots(position: Tensor, steps: Tensor, sizes: CacheSizes) -> Tensor:
    """Which positions can be in their slots after so many steps [B, Hkv, 1]; see :class:`dmattn.BoundedCache`."""
    sinks, local, visible = sizes.sink_keys, sizes.local, sizes.visible()
    ring, selected = sinks + local, position[..., sinks + local : visible]
    slot = torch.arange(ring)
    latest = steps - 1 - (steps - 1 - slot) % max(local, 1)
    expected = torch.where(slot < sinks, slot, latest)
    expected = torch.where((steps > slot) & (expected >= 0), expected, -1)
    in_order, place = selected.sort(dim=-1)
    is_double = torch.zeros_like(selected, dtype=torch.bool)
    is_double[..., 1:] = (in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] >= 0)
    is_single = torch.ones_like(is_double).scatter(-1, place, ~is_double)
    return torch.cat(
        (
            position[..., :ring] == expected,
            is_single & _is_none_or(selected, sinks, steps - local),
            _is_none_or(position[..., visible:], 0, steps),
        ),
        dim=-1,
    )


def _is_none_or(number: Tensor, first: int, end: Tensor | int) -> Tensor:
    return (number == -1) | ((number >= first) & (number < end))
