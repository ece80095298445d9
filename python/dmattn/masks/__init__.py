"""What a mask means: intervals (O(N)) and blocks (everything else). All types are frozen dataclasses and pytrees."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from dmattn.masks.block import BlockMask
from dmattn.masks.combined import CombinedMask
from dmattn.masks.interval import IntervalMask

Mask = IntervalMask | BlockMask | CombinedMask


def _register(cls: type, leaves: tuple[str, ...], constants: tuple[str, ...]) -> None:
    """Makes a mask type a pytree, so that it passes through compile and export. Rebuilding skips the constructor's checks: a tree may
    hold placeholders. Optional fields that are None are leaves, too."""

    def flatten(mask: Any) -> tuple[list[Any], list[Any]]:
        context = [getattr(mask, name) for name in constants]
        return [getattr(mask, name) for name in leaves], [
            list(c) if isinstance(c, tuple) else c for c in context
        ]  # as JSON gives it back

    def flatten_with_keys(mask: Any) -> tuple[list[tuple[Any, Any]], list[Any]]:
        values, context = flatten(mask)
        return [(pytree.GetAttrKey(name), value) for name, value in zip(leaves, values, strict=True)], context

    def unflatten(values: Any, context: Any) -> Any:
        mask: Any = object.__new__(cls)
        for name, value in zip((*leaves, *constants), (*values, *context), strict=True):
            object.__setattr__(mask, name, tuple(value) if isinstance(value, list) else value)
        return mask

    pytree.register_pytree_node(
        cls, flatten, unflatten, serialized_type_name=f"dmattn.{cls.__name__}", flatten_with_keys_fn=flatten_with_keys
    )


_register(IntervalMask, ("start", "end", "segment_end"), ("segment_is_causal",))
_register(BlockMask, ("tiles", "rows", "columns", "bits", "query_length", "key_length"), ("block_size",))
_register(CombinedMask, ("interval", "block"), ())
torch.serialization.add_safe_globals([IntervalMask, BlockMask, CombinedMask])  # saved programs hold example inputs

__all__ = ["BlockMask", "CombinedMask", "IntervalMask", "Mask"]
