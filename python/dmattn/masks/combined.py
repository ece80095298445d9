"""CombinedMask: an interval mask and a block mask at once, what ``interval & block`` gives."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from dmattn.masks.block import BlockMask
from dmattn.masks.heads import same_heads
from dmattn.masks.interval import IntervalMask


@dataclasses.dataclass(frozen=True, eq=False)
class CombinedMask:
    """Visible where both masks say so; made by ``interval & block``."""

    interval: IntervalMask
    block: BlockMask

    def __and__(self, other: Any) -> CombinedMask:
        if isinstance(other, CombinedMask):
            return CombinedMask(self.interval & other.interval, self.block & other.block)
        if isinstance(other, IntervalMask):
            return CombinedMask(self.interval & other, self.block)
        if isinstance(other, BlockMask):
            return CombinedMask(self.interval, self.block & other)
        return NotImplemented

    __rand__ = __and__

    def to_bool(self, Sq: int, Sk: int) -> Tensor:
        """The mask as booleans [B|1, H|Hkv|1, Sq, Sk], True = visible."""
        if not self.block.fits(Sq, Sk):
            raise ValueError(f"Sq, Sk: expected the block mask's lengths {self.block.lengths}, got {(Sq, Sk)}")
        interval, block = same_heads(self.interval.to_bool(Sq, Sk), self.block.cut(Sq, Sk).to_bool(), "block")
        return interval & block
