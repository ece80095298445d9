"""What a mask means: intervals (O(N)), blocks, lists of keys for each query. All types are frozen dataclasses and pytrees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data._utils.collate import default_collate_fn_map

from dmattn.masks.block import BlockMask
from dmattn.masks.bounds import ALWAYS, FOREVER
from dmattn.masks.combined import CombinedMask
from dmattn.masks.data import MaskData, collate
from dmattn.masks.index import IndexMask
from dmattn.masks.interval import IntervalMask, Segments

Mask = IntervalMask | BlockMask | IndexMask | CombinedMask


@dataclasses.dataclass(frozen=True)
class IntervalContext:
    """What a pytree keeps of an IntervalMask in addition to start and end. Trees of masks with and without segments are equal, so that a program
    exported with one mask takes another; a program that selects within a base checks the base's values (interval.py)."""

    any_length: bool
    segments: Segments | None = dataclasses.field(compare=False)
    most_keys: int = dataclasses.field(compare=False, default=0)

    @classmethod
    def of(cls, mask: IntervalMask) -> IntervalContext:
        # A number that the program leaves open is no constant of a tree.
        return cls(mask.any_length, mask.segments, mask.most_keys if type(mask.most_keys) is int else 0)


def _register(cls: type[MaskData], context: Callable[[Any], Any], constants: Callable[[Any], dict[str, Any]], to_json: Callable[[Any], Any],
              from_json: Callable[[Any], Any]) -> None:  # fmt: skip
    """Makes a mask type a pytree, so that it passes through compile and export. Rebuilding skips the constructor's checks: a tree may hold
    placeholders."""

    def flatten(mask: Any) -> tuple[list[Any], Any]:
        return [getattr(mask, name) for name in mask._leaf_names()], context(mask)

    def flatten_with_keys(mask: Any) -> tuple[list[tuple[Any, Any]], Any]:
        values, kept = flatten(mask)
        return [(pytree.GetAttrKey(name), value) for name, value in zip(mask._leaf_names(), values, strict=True)], kept

    def unflatten(values: Any, kept: Any) -> Any:
        names = kept if cls is CombinedMask else cls.LEAVES
        fields = dict.fromkeys(cls.LEAVES) | dict(zip(names, values, strict=True))
        return cls._build(**fields, **constants(kept))

    pytree.register_pytree_node(
        cls, flatten, unflatten, serialized_type_name=f"dmattn.{cls.__name__}", flatten_with_keys_fn=flatten_with_keys,
        to_dumpable_context=to_json, from_dumpable_context=from_json,
    )  # fmt: skip


_register(
    IntervalMask,
    IntervalContext.of,
    lambda kept: {"any_length": kept.any_length, "segments": kept.segments, "most_keys": kept.most_keys},
    lambda kept: [kept.any_length, kept.segments, kept.most_keys],
    lambda given: IntervalContext(*given),
)
_register(BlockMask, lambda mask: mask.block_size, lambda kept: {"block_size": kept}, list, tuple)
_register(
    IndexMask,
    lambda mask: tuple(getattr(mask, name) for name in IndexMask.CONSTANTS),
    lambda kept: dict(zip(IndexMask.CONSTANTS, kept, strict=True)),
    list,
    tuple,
)
# Which parts there are; programs of earlier versions do not say it.
_register(CombinedMask, CombinedMask._leaf_names, lambda kept: {}, list, lambda given: tuple(given or ("interval", "block")))

for _type in (IntervalMask, BlockMask, IndexMask, CombinedMask):
    torch.serialization.add_safe_globals([_type])  # torch.load(weights_only=True); saved programs hold example inputs
    default_collate_fn_map[_type] = collate  # torch.utils.data.DataLoader

__all__ = ["ALWAYS", "FOREVER", "BlockMask", "CombinedMask", "IndexMask", "IntervalMask", "Mask", "collate"]
