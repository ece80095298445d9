"""CombinedMask: masks of several kinds, visible where all of them say so."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from dmattn import checks
from dmattn.masks import drawing
from dmattn.masks.block import BlockMask
from dmattn.masks.data import MaskData, unknown_operand
from dmattn.masks.heads import same_heads
from dmattn.masks.index import IndexMask
from dmattn.masks.interval import IntervalMask

KINDS: dict[str, type[MaskData]] = {"interval": IntervalMask, "block": BlockMask, "index": IndexMask}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CombinedMask(MaskData):
    """Visible where all its parts say so; made by ``interval & block``, ``interval & index``, ``block & index`` and all three. A part that
    is not there is None.

    Raises:
        TypeError: a part of another kind.
        ValueError: fewer than two parts, or parts that are for different numbers of queries or keys or lie on different devices.
    """

    interval: IntervalMask | None = None
    block: BlockMask | None = None
    index: IndexMask | None = None

    LEAVES: ClassVar[tuple[str, ...]] = ("interval", "block", "index")
    CONSTANTS: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            given = getattr(self, name)
            if given is not None and not isinstance(given, kind):
                article = "a" if kind is BlockMask else "an"
                raise TypeError(f"{name}: expected {article} {kind.__name__}, got {type(given).__name__}")
        names = self._leaf_names()
        if len(names) < 2:
            raise ValueError(f"interval, block, index: expected at least two of them, got {', '.join(names) or 'none'}")
        interval, block, index = self.interval, self.block, self.index
        Sk = None if interval is None else interval.key_length
        if block is not None and Sk is not None and not block.fits(block.query_length, Sk):
            raise ValueError(
                f"block: expected a BlockMask for Sk={Sk} keys like the interval mask, got one for {block.key_length}"
            )
        if block is not None and index is not None and not block.fits(index.query_length, block.key_length):
            raise ValueError(
                f"index: expected an IndexMask for Sq={block.query_length} queries like the block mask, got one for {index.query_length}"
            )
        first = self._parts()[0]
        for name in names[1:]:
            checks.same_device(name, getattr(self, name)._tensors()[0], first._tensors()[0], f"the {names[0]} mask")

    def _leaf_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.LEAVES if getattr(self, name) is not None)

    def _parts(self) -> list[Any]:
        return [getattr(self, name) for name in self._leaf_names()]

    def __and__(self, other: IntervalMask | BlockMask | IndexMask | CombinedMask) -> CombinedMask:
        both: CombinedMask = self._beside(other)
        return both

    @property
    def query_length(self) -> int:
        """The number of queries Sq, that of the block mask or the index mask."""
        with_queries = self.index or self.block
        assert with_queries is not None
        return with_queries.query_length

    @property
    def key_length(self) -> int | None:
        """The number of keys Sk, that of the interval mask or the block mask; None when the mask serves any."""
        # A block mask may serve shorter lengths as well, an interval mask does not.
        length = None if self.interval is None else self.interval.key_length
        return self.block.key_length if length is None and self.block is not None else length

    @property
    def shape(self) -> torch.Size:
        """[B|1, H|Hkv|1, Sq, Sk]; the last is 1 when the mask serves any number of keys."""

        def larger(m: int, n: int) -> int:
            return max(m, n) if 1 not in (m, n) else m * n

        batch, heads = (reduce(larger, sizes) for sizes in zip(*(part.shape[:2] for part in self._parts()), strict=True))
        return torch.Size((batch, heads, self.query_length, 1 if self.key_length is None else self.key_length))

    def to_bool(self, Sq: int, Sk: int) -> Tensor:
        """The mask as booleans [B|1, H|Hkv|1, Sq, Sk], True = visible."""
        if self.block is not None and not self.block.fits(Sq, Sk):
            raise ValueError(f"Sq, Sk: expected the block mask's lengths {self.block.lengths}, got {(Sq, Sk)}")
        parts = (part.cut(Sq, Sk).to_bool() if isinstance(part, BlockMask) else part.to_bool(Sq, Sk) for part in self._parts())
        return reduce(lambda a, b: torch.logical_and(*same_heads(a, b, "mask")), parts)

    def plot(self, Sq: int | None = None, head: int = 0, batch: int = 0, ax: Any = None) -> Any:
        interval, block, index = self.interval, self.block, self.index
        of_queries = block or index
        assert of_queries is not None
        Sq = of_queries._drawn_length(Sq)
        Sk = self.key_length
        if Sk is None:
            assert index is not None
            Sk = index._last_key()
        heads = self.shape[1]
        return drawing.pairs(
            None if interval is None else interval._of_head(head, batch, heads, Sk),
            None if block is None else block._of_head(head, batch, heads),
            Sq, Sk, ax,
            None if index is None else index._of_head(head, batch, heads, Sk),
        )  # fmt: skip

    def _describe(self) -> str:
        return ", ".join([f"shape={list(self.shape)}", *(f"{name}={getattr(self, name)!r}" for name in self._leaf_names())])

    def _for_device(self, device: torch.device) -> CombinedMask:
        block = None if self.block is None else self.block._for_device(device)
        return self if block is self.block else self._replace(block=block)

    def _select(self, index: slice | Tensor) -> CombinedMask:
        parts = {name: getattr(self, name) for name in self._leaf_names()}
        return self._replace(**{name: part if part.shape[0] == 1 else part._select(index) for name, part in parts.items()})

    @classmethod
    def _cat(cls, masks: Sequence[CombinedMask]) -> CombinedMask:
        names = masks[0]._leaf_names()
        for mask in masks:
            if mask._leaf_names() != names:
                raise ValueError(f"masks: expected each to be {' & '.join(names)}, got {' & '.join(mask._leaf_names())}")
        wide = [mask._expand(mask.shape[0]) for mask in masks]
        return cls(**{name: type(getattr(wide[0], name)).cat([getattr(mask, name) for mask in wide]) for name in names})

    def _expand(self, batch: int) -> CombinedMask:
        return self._replace(**{name: getattr(self, name)._expand(batch) for name in self._leaf_names()})


def combined(a: MaskData, b: object) -> Any:
    """``a & b`` for masks of several kinds."""
    if not isinstance(b, MaskData):
        return unknown_operand(b)
    parts = _parts_by_name(a)
    for name, part in _parts_by_name(b).items():
        parts[name] = parts[name] & part if name in parts else part
    return CombinedMask(**parts)


def _parts_by_name(mask: Any) -> dict[str, Any]:
    if isinstance(mask, CombinedMask):
        return {name: getattr(mask, name) for name in mask._leaf_names()}
    return {name: mask for name, kind in KINDS.items() if isinstance(mask, kind)}


MaskData._beside = combined
