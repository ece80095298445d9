"""CombinedMask: an interval mask and a block mask at once, what ``interval & block`` gives."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from dmattn.masks.block import BlockMask
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
        interval, block = self.interval.to_bool(Sq, Sk), self.block.to_bool()[:, :, :Sq, :Sk]
        heads = max(interval.shape[1], block.shape[1])
        if interval.shape[1] not in (1, heads):
            interval = interval.repeat_interleave(heads // interval.shape[1], dim=1)
        if block.shape[1] not in (1, heads):
            block = block.repeat_interleave(heads // block.shape[1], dim=1)
        return interval & block
