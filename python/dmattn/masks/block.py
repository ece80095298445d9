"""BlockMask: any boolean mask as tiles that are empty, full or partial, with one bit per element for partial tiles only.

The one surprise: the tiles that kernels walk need not be the blocks the mask was given in. Blocks smaller than a tile become bits of a
partial tile; results never depend on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmattn import checks
from dmattn.fake import table_size
from dmattn.masks.heads import same_heads

TILE_PARTIAL = 2  # tiles: 0 empty, 1 full, 2 + slot partial (cpp/params.h)


@dataclasses.dataclass(frozen=True, eq=False)
class BlockMask:
    """Use one of the constructors ``from_bool``, ``from_blocks``, ``from_function``, ``from_flex``.

    Args:
        tiles: int32 [B|1, H|Hkv|1, Nq, Nk]: 0 empty, 1 full, 2 + slot partial.
        rows: int32 [B|1, H|Hkv|1, Nq, 1 + Nk]: count and indices of the non-empty tiles of each row.
        columns: int32 [B|1, H|Hkv|1, Nk, 1 + Nq]: the same by columns.
        bits: int32 [slots, tile_q, tile_k / 32]: bit j % 32 of word j // 32 is key j of the tile.
        query_length: queries the mask was made for.
        key_length: keys the mask was made for.
        block_size: (bq, bk) of the block table the mask came from, (1, 1) for element masks. Lengths may be shorter within a last block.
    """

    tiles: Tensor
    rows: Tensor
    columns: Tensor
    bits: Tensor
    query_length: int
    key_length: int
    block_size: tuple[int, int] = (1, 1)

    @classmethod
    def from_bool(cls, mask: Tensor, block_size: int | tuple[int, int] = 128) -> BlockMask:
        """From booleans, True = visible.

        Args:
            mask: bool, [B|1, H|Hkv|1, Sq, Sk], or with leading dimensions left out.
            block_size: granularity at which hidden keys are skipped; changes speed, never results.

        Raises:
            TypeError: mask is not a bool tensor.
            ValueError: it has fewer than 2 or more than 4 dimensions, or block_size is not positive.
        """
        checks.tensor("mask", mask)
        checks.dtype("mask", mask, (torch.bool,))
        if mask.dim() < 2 or mask.dim() > 4:
            raise ValueError(f"mask: expected [B|1, H|Hkv|1, Sq, Sk], got shape {checks.shape_of(mask)}")
        mask = mask[(None,) * (4 - mask.dim())]
        return _pack(mask, mask.shape[2], mask.shape[3], (1, 1), _pair(block_size))

    @classmethod
    def from_blocks(cls, table: Tensor, block_size: int | tuple[int, int]) -> BlockMask:
        """From a table of blocks, True = every key of the block is visible to every query of it.

        Args:
            table: bool [B|1, H|Hkv|1, ceil(Sq/bq), ceil(Sk/bk)], or with leading dimensions left out.
            block_size: int or (bq, bk).
        """
        checks.tensor("table", table)
        checks.dtype("table", table, (torch.bool,))
        if table.dim() < 2 or table.dim() > 4:
            raise ValueError(f"table: expected [B|1, H|Hkv|1, ceil(Sq/bq), ceil(Sk/bk)], got shape {checks.shape_of(table)}")
        block = _pair(block_size)
        for axis, size in zip((-2, -1), block, strict=True):
            if table.shape[axis] * size > checks.MAX_LENGTH + size:
                raise ValueError(
                    f"block_size: expected blocks that cover lengths up to {checks.MAX_LENGTH}, got {table.shape[axis]} of {size}"
                )
        table = table[(None,) * (4 - table.dim())]
        return _pack(table, table.shape[2] * block[0], table.shape[3] * block[1], block, block)

    @classmethod
    def from_function(
        cls,
        fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        B: int | None,
        H: int | None,
        Sq: int,
        Sk: int,
        *,
        block_size: int | tuple[int, int] = 128,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """From ``fn(b, h, q, k) -> bool``, called once with index tensors that broadcast to [B, H, Sq, Sk] (FlexAttention's ``mask_mod``).

        ``q`` counts queries from 0, whatever Sk is. B or H None: the mask is the same for all.
        """
        for name, size in (("B", 1 if B is None else B), ("H", 1 if H is None else H), ("Sq", Sq), ("Sk", Sk)):
            checks.length(name, size)
        sizes = (1 if B is None else B, 1 if H is None else H, Sq, Sk)
        index = [
            torch.arange(size, device=device).view([-1 if i == axis else 1 for i in range(4)]) for axis, size in enumerate(sizes)
        ]
        visible = fn(*index)
        if isinstance(visible, Tensor) and not all(
            n in (1, size) for n, size in zip(visible.shape[::-1], sizes[::-1], strict=False)
        ):
            raise ValueError(
                f"fn: expected a result that broadcasts to [B, H, Sq, Sk] = {list(sizes)}, got {checks.shape_of(visible)}"
            )
        if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
            raise TypeError(f"fn: expected it to return a bool tensor, got {getattr(visible, 'dtype', type(visible).__name__)}")
        return cls.from_bool(visible.expand(sizes), block_size)

    @classmethod
    def from_flex(cls, block_mask: Any) -> BlockMask:
        """From a ``torch.nn.attention.flex_attention.BlockMask``: its full blocks, and its ``mask_mod`` inside its partial blocks."""
        from torch.nn.attention import flex_attention

        if not isinstance(block_mask, flex_attention.BlockMask):
            raise TypeError(
                f"block_mask: expected a torch.nn.attention.flex_attention.BlockMask, got {type(block_mask).__name__}"
            )
        batch, heads, query_length, key_length = block_mask.shape
        size = block_mask.BLOCK_SIZE
        device = block_mask.kv_num_blocks.device
        inside = torch.zeros((batch, heads, query_length, key_length), dtype=torch.bool, device=device)

        def elements(counts: Tensor, indices: Tensor) -> Tensor:
            table = _table_from_lists(counts, indices, -(-key_length // size[1]))
            return table.repeat_interleave(size[0], 2).repeat_interleave(size[1], 3)[:, :, :query_length, :key_length]

        index = [
            torch.arange(n, device=device).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(inside.shape)
        ]
        inside |= elements(block_mask.kv_num_blocks, block_mask.kv_indices) & block_mask.mask_mod(*index)
        if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
            inside |= elements(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        return cls.from_bool(inside, size)

    def __and__(self, other: Any) -> Any:
        from dmattn.masks.combined import CombinedMask
        from dmattn.masks.interval import IntervalMask

        if isinstance(other, IntervalMask):
            return CombinedMask(other, self)
        if not isinstance(other, BlockMask):
            return NotImplemented
        Sq, Sk = (min(m, n) for m, n in zip(self.lengths, other.lengths, strict=True))
        if not (self.fits(Sq, Sk) and other.fits(Sq, Sk)):
            raise ValueError(f"other: expected a mask for (Sq, Sk) = {self.lengths}, got one for {other.lengths}")
        a, b = same_heads(self.cut(Sq, Sk).to_bool(), other.cut(Sq, Sk).to_bool(), "other")
        return BlockMask.from_bool(a & b, (self.bits.shape[1], self.bits.shape[2] * 32))

    __rand__ = __and__

    @property
    def lengths(self) -> tuple[int, int]:
        """(query_length, key_length)."""
        return self.query_length, self.key_length

    def fits(self, Sq: int, Sk: int) -> bool:
        """Whether the mask can serve these lengths: its own, or shorter ones that end within its last blocks."""
        if Sq == self.query_length and Sk == self.key_length:
            return True
        lengths = zip(self.lengths, (Sq, Sk), self.block_size, strict=True)
        return all(-(-own // block) == -(-length // block) for own, length, block in lengths)

    def cut(self, Sq: int, Sk: int) -> BlockMask:
        """The mask for the first Sq queries and Sk keys: lengths that end within the last block of ``from_blocks``."""
        if Sq == self.query_length and Sk == self.key_length:
            return self
        tile_q, tile_k = self.bits.shape[1], self.bits.shape[2] * 32
        tiles = self.tiles[:, :, : table_size(Sq, tile_q), : table_size(Sk, tile_k)]
        touched = [torch.arange(n, device=tiles.device) * tile < length for n, tile, length in zip(
            tiles.shape[2:], (tile_q, tile_k), (Sq, Sk), strict=True)]  # fmt: skip
        tiles = tiles * (touched[0][:, None] & touched[1])
        return BlockMask(tiles, _occupied(tiles), _occupied(tiles.transpose(2, 3)), self.bits, Sq, Sk, self.block_size)

    def to_bool(self) -> Tensor:
        """The mask as booleans [B|1, H|Hkv|1, query_length, key_length], True = visible."""
        tile_q, words = self.bits.shape[1], self.bits.shape[2]
        shift = torch.arange(32, dtype=torch.int32, device=self.bits.device)
        bits = ((self.bits[..., None] >> shift) & 1).bool().reshape(-1, tile_q, words * 32)
        empty_and_full = torch.zeros((2, tile_q, words * 32), dtype=torch.bool, device=self.bits.device)
        empty_and_full[1] = True
        elements = torch.cat([empty_and_full, bits])[self.tiles.long()]  # [.., Nq, Nk, tile_q, tile_k]
        batch, heads, tiles_q, tiles_k = self.tiles.shape
        whole = elements.transpose(3, 4).reshape(batch, heads, tiles_q * tile_q, tiles_k * words * 32)
        return whole[:, :, : self.query_length, : self.key_length]


def _pair(block_size: int | tuple[int, int]) -> tuple[int, int]:
    pair = block_size if isinstance(block_size, tuple | list) else (block_size, block_size)
    if len(pair) != 2:
        raise ValueError(f"block_size: expected an int or (bq, bk), got {block_size}")
    for size in pair:
        checks.positive_int("block_size", size)
    return pair[0], pair[1]


def _tile(block: int, device: torch.device) -> int:
    """The tile kernels walk for a block size: 128, or on a CPU also 32, 64 and 96 when blocks are that small."""
    step = 32 if device.type == "cpu" else 128
    return min(128, -(-block // step) * step)


def _pack(mask: Tensor, query_length: int, key_length: int, given: tuple[int, int], wanted: tuple[int, int]) -> BlockMask:
    tile_q, tile_k = _tile(wanted[0], mask.device), _tile(wanted[1], mask.device)
    tiles, rows, columns = torch.ops.dmattn.pack_tiles(mask, query_length, key_length, *given, tile_q, tile_k)
    bits = torch.ops.dmattn.pack_bits(mask, tiles, query_length, key_length, *given, tile_q, tile_k, _slots(tiles))
    return BlockMask(tiles, rows, columns, bits, query_length, key_length, given)


def _slots(tiles: Tensor) -> int:
    """How many partial tiles there are; while tracing or capturing a CUDA graph, where the device cannot be asked: how many there could be."""
    from torch._subclasses.fake_tensor import FakeTensor

    if torch.compiler.is_compiling() or torch._C._is_tracing() or isinstance(tiles, FakeTensor) or tiles.is_meta:
        return tiles.numel()
    if tiles.is_cuda and torch.cuda.is_current_stream_capturing():
        return tiles.numel()
    return max(2, int((tiles >= TILE_PARTIAL).sum()))  # never 0 or 1, sizes on which tracing would specialise


def _occupied(tiles: Tensor) -> Tensor:
    """For each row of tiles the number of non-empty ones, then their indices, ascending."""
    occupied = (tiles != 0).int()
    return torch.cat([occupied.sum(-1, keepdim=True), occupied.argsort(dim=-1, descending=True, stable=True)], dim=-1).int()


def _table_from_lists(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Lists of block columns per block row, as a bool table; list entries past the count are ignored."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    table = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    return table.scatter(-1, torch.where(listed, indices, columns).long(), True)[..., :columns]
