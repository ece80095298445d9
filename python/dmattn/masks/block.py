"""BlockMask: any boolean mask as tiles that are empty, full or partial, with one bit per element for partial tiles only.

The tiles that kernels walk need not be the blocks the mask was given in. Blocks smaller than a tile become bits of a
partial tile; results never depend on it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dmattn import checks
from dmattn.fake import table_size
from dmattn.masks import drawing, tables
from dmattn.masks.data import MaskData, join_batches
from dmattn.masks.detect import four_dims, function_sizes, on_grid
from dmattn.masks.heads import same_heads, with_rank
from dmattn.sharding import is_sharded

if TYPE_CHECKING:
    from torch.nn.attention import flex_attention

GPU_TILE = 128  # queries and keys: the tiles that CUDA kernels walk


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockMask(MaskData):
    """Use one of the constructors ``from_bool``, ``from_blocks``, ``from_function``, ``from_flex``.

    A mask made of tensors of your own is checked: its shapes, dtypes and devices always, and where its tensors lie on the CPU (and nothing is
    being traced) that the values of rows, columns and bits agree with tiles. On a GPU that would wait for the device, so values are not
    checked there: a wrong table gives wrong results then, never a wrong access.

    Args:
        tiles: int32 [B|1, H|Hkv|1, Nq, Nk]: 0 empty, 1 full, 2 + slot partial.
        rows: int32 [B|1, H|Hkv|1, Nq, 1 + Nk]: count and indices of the non-empty tiles of each row.
        columns: int32 [B|1, H|Hkv|1, Nk, 1 + Nq]: the same by columns.
        bits: int32 [slots, tile_q, tile_k / 32]: bit j % 32 of word j // 32 is key j of the tile.
        query_length: queries the mask was made for.
        key_length: keys the mask was made for.
        block_size: (bq, bk) of the block table that made the mask, (1, 1) for element masks. Lengths may be shorter within a last block.

    Raises:
        TypeError: a field of another type, or a tensor that is not dense or not int32.
        ValueError: shapes or devices that do not go together; lists that disagree with tiles, or a tile whose slot is not in bits.
    """

    tiles: Tensor
    rows: Tensor
    columns: Tensor
    bits: Tensor
    query_length: int
    key_length: int
    block_size: tuple[int, int] = (1, 1)

    LEAVES: ClassVar[tuple[str, ...]] = ("tiles", "rows", "columns", "bits", "query_length", "key_length")
    CONSTANTS: ClassVar[tuple[str, ...]] = ("block_size",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", _pair(self.block_size))
        checks.each(checks.length, query_length=self.query_length, key_length=self.key_length)
        tables.check_structure(self.tiles, self.rows, self.columns, self.bits, self.query_length, self.key_length)
        if all(map(checks.values_are_known, self._tensors())):
            tables.check_values(self.tiles, self.rows, self.columns, self.bits, self.query_length, self.key_length)

    @classmethod
    def from_bool(cls, mask: Tensor, block_size: int | tuple[int, int] = 128) -> BlockMask:
        """From booleans, True = visible.

        Args:
            mask: bool, [B|1, H|Hkv|1, Sq, Sk], or with leading dimensions left out.
            block_size: granularity at which hidden keys are skipped; changes speed, never results.

        Raises:
            TypeError: mask is not a bool tensor.
            ValueError: it has fewer than 2 or more than 4 dimensions or a length over 2^20, or block_size is not positive.
        """
        mask = four_dims(mask)
        return _pack(mask, mask.shape[2], mask.shape[3], (1, 1), _pair(block_size))

    @classmethod
    def from_blocks(cls, table: Tensor, block_size: int | tuple[int, int]) -> BlockMask:
        """From a table of blocks, True = every key of the block is visible to every query of it.

        Args:
            table: bool [B|1, H|Hkv|1, ceil(Sq/bq), ceil(Sk/bk)], or with leading dimensions left out.
            block_size: int or (bq, bk).

        The table does not say where the sequences end. If they end within a block, each call cuts the mask to them; ``.cut(Sq, Sk)`` does
        so once.

        Raises:
            TypeError: table is not a bool tensor.
            ValueError: it has fewer than 2 or more than 4 dimensions, block_size is not positive, or the blocks go beyond 2^20.
        """
        checks.tensor("table", table, (torch.bool,))
        if table.dim() < 2 or table.dim() > 4:
            raise ValueError(f"table: expected [B|1, H|Hkv|1, ceil(Sq/bq), ceil(Sk/bk)], got shape {checks.shape_of(table)}")
        block = _pair(block_size)
        for axis, size in zip((-2, -1), block, strict=True):
            if table.shape[axis] * size > checks.MAX_LENGTH + size:
                raise ValueError(
                    f"block_size: expected blocks that cover lengths up to {checks.MAX_LENGTH}, got {table.shape[axis]} of {size}"
                )
        table = with_rank(table, 4)
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

        ``q`` counts queries from 0, whatever Sk is. B or H None: the mask is the same for all. While it is made, it takes memory for all
        pairs, a byte each.

        Raises:
            TypeError, ValueError: sizes that are no such numbers, fn that does not give bools of that shape, or as :meth:`from_bool`.
        """
        sizes = function_sizes(B, H, Sq, Sk)
        return cls.from_bool(on_grid(fn, sizes, 0, Sq, device), block_size)

    @classmethod
    def from_flex(cls, block_mask: flex_attention.BlockMask) -> BlockMask:
        """From a ``torch.nn.attention.flex_attention.BlockMask``: its full blocks, and its ``mask_mod`` inside its partial blocks.

        While it is made, it takes memory for all pairs, a byte each.

        Raises:
            TypeError: block_mask is no such mask.
            ValueError: as :meth:`from_bool`.
        """
        # Whoever has such a mask has imported the module, which not every torch does by itself.
        module = sys.modules.get("torch.nn.attention.flex_attention")
        if module is None or not isinstance(block_mask, module.BlockMask):
            raise TypeError(
                f"block_mask: expected a torch.nn.attention.flex_attention.BlockMask, got {checks.type_of(block_mask)}"
            )
        batch, heads, query_length, key_length = block_mask.shape
        size = block_mask.BLOCK_SIZE
        device = block_mask.kv_num_blocks.device
        inside = torch.zeros((batch, heads, query_length, key_length), dtype=torch.bool, device=device)

        def elements(counts: Tensor, indices: Tensor) -> Tensor:
            table = tables.from_lists(counts, indices, -(-key_length // size[1]))
            return table.repeat_interleave(size[0], 2).repeat_interleave(size[1], 3)[:, :, :query_length, :key_length]

        index = [
            torch.arange(n, device=device).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(inside.shape)
        ]
        inside |= elements(block_mask.kv_num_blocks, block_mask.kv_indices) & block_mask.mask_mod(*index)
        if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
            inside |= elements(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        return cls.from_bool(inside, size)

    @overload
    def __and__(self, other: BlockMask) -> BlockMask: ...
    @overload
    def __and__(self, other: MaskData) -> Any: ...
    def __and__(self, other: object) -> Any:
        if not isinstance(other, BlockMask):
            return self._beside(other)
        Sq, Sk = (min(m, n) for m, n in zip(self.lengths, other.lengths, strict=True))
        if not (self.fits(Sq, Sk) and other.fits(Sq, Sk)):
            raise ValueError(f"other: expected a mask for (Sq, Sk) = {self.lengths}, got one for {other.lengths}")
        a, b = same_heads(self.cut(Sq, Sk).to_bool(), other.cut(Sq, Sk).to_bool(), "other")
        # Of both last blocks the one that begins later: the shorter lengths that end within it are those that both masks serve.
        sizes = zip((Sq, Sk), self.block_size, other.block_size, strict=True)
        latest = tuple(max(pair, key=lambda size: -(-length // size) * size - size) for length, *pair in sizes)
        return BlockMask.from_bool(a & b, self.tile)._replace(block_size=latest)

    @property
    def shape(self) -> torch.Size:
        """[B|1, H|Hkv|1, query_length, key_length]."""
        return torch.Size((*self.tiles.shape[:2], self.query_length, self.key_length))

    @property
    def tile(self) -> tuple[int, int]:
        """(tile_q, tile_k): the queries and keys of one entry of tiles."""
        return self.bits.shape[1], self.bits.shape[2] * 32

    @property
    def lengths(self) -> tuple[int, int]:
        """(query_length, key_length)."""
        return self.query_length, self.key_length

    def fits(self, Sq: int, Sk: int) -> bool:
        """Whether the mask can serve these lengths: its own, or shorter ones that end within its last blocks."""
        if Sq == self.query_length and Sk == self.key_length:
            return True
        lengths = zip(self.lengths, (Sq, Sk), self.block_size, strict=True)
        return all(length <= own and -(-own // block) == -(-length // block) for own, length, block in lengths)

    def cut(self, Sq: int, Sk: int) -> BlockMask:
        """The mask for the first Sq queries and Sk keys: lengths that end within the last block of ``from_blocks``."""
        if Sq == self.query_length and Sk == self.key_length:
            return self
        tile_q, tile_k = self.tile
        tiles = self.tiles[:, :, : table_size(Sq, tile_q), : table_size(Sk, tile_k)]
        tiles = tables.hide_beyond(tiles, self.tile, (Sq, Sk))
        rows, columns = tables.occupied(tiles), tables.occupied(tiles.transpose(2, 3))
        return self._replace(tiles=tiles, rows=rows, columns=columns, query_length=Sq, key_length=Sk)

    def to_bool(self) -> Tensor:
        """The mask as booleans [B|1, H|Hkv|1, query_length, key_length], True = visible."""
        return tables.elements(self.tiles, self.bits, self.query_length, self.key_length)

    def plot(self, Sq: int | None = None, head: int = 0, batch: int = 0, ax: Any = None) -> Any:
        Sq = self._drawn_length(Sq)
        return drawing.pairs(None, self._of_head(head, batch, self.tiles.shape[1]), Sq, self.key_length, ax)

    def _drawn_length(self, Sq: int | None) -> int:
        if Sq is None:
            return self.query_length
        checks.length("Sq", Sq)
        if not self.fits(Sq, self.key_length):
            raise ValueError(f"Sq: expected the mask's own number of queries {self.query_length}, got {Sq}")
        return Sq

    def _of_head(self, head: int, batch: int, heads: int) -> tuple[Tensor, Tensor]:
        """tiles int32 [Nq, Nk] of one head of ``heads``, and bits, on the CPU."""
        return drawing.head_of(self.tiles, head, batch, heads), self.bits.detach().cpu()

    def _describe(self) -> str:
        table = f"tiles={checks.shape_of(self.tiles)} of {self.tile[0]}x{self.tile[1]}, slots={self.bits.shape[0]}"
        return f"shape={list(self.shape)}, {table}, block_size={self.block_size}, dtype=int32, device={str(self.device)!r}"

    def _select(self, index: slice | Tensor) -> BlockMask:
        """A part of the batch; bits stay as they are, since the slots in tiles are numbers of theirs."""
        tiles, rows, columns = (t if t.shape[0] == 1 else t[index] for t in (self.tiles, self.rows, self.columns))
        return self._replace(tiles=tiles, rows=rows, columns=columns)

    def _expand(self, batch: int) -> BlockMask:
        wide = {name: (given := getattr(self, name)).expand(batch, *given.shape[1:]) for name in ("tiles", "rows", "columns")}
        return self._replace(**wide)

    def _for_device(self, device: torch.device) -> BlockMask:
        """Tiles of 128 for a GPU: on a CPU, smaller blocks make smaller tiles."""
        tile_q, tile_k = self.tile
        if device.type != "cuda" or (tile_q % GPU_TILE == 0 and tile_k % GPU_TILE == 0):
            return self
        return self._with_tiles((GPU_TILE, GPU_TILE))

    def _with_tiles(self, tile: tuple[int, int]) -> BlockMask:
        """The same mask in tiles of another size, through booleans."""
        if tile == self.tile:
            return self
        return BlockMask.from_bool(self.to_bool(), tile)._replace(block_size=self.block_size)

    @classmethod
    def _cat(cls, masks: Sequence[BlockMask]) -> BlockMask:
        first = masks[0]
        for mask in masks:
            if mask.lengths != first.lengths:
                raise ValueError(f"masks: expected one (Sq, Sk), got {first.lengths} and {mask.lengths}")
        if any(mask.tile != first.tile for mask in masks):
            masks = [mask._with_tiles((GPU_TILE, GPU_TILE)) for mask in masks]
        all_tiles: list[Tensor] = []
        all_bits: list[Tensor] = []
        offsets: dict[int, int] = {}  # of masks that share their bits, as parts of one batch do, one copy is enough
        slots = 0
        for mask in masks:
            if id(mask.bits) not in offsets:
                offsets[id(mask.bits)] = slots
                all_bits.append(mask.bits)
                slots += mask.bits.shape[0]
            all_tiles.append(tables.renumber(mask.tiles, offsets[id(mask.bits)]))
        batches = [mask.tiles.shape[0] for mask in masks]
        tiles, rows, columns = (
            join_batches("masks", tensors, batches, tensors[0].shape[2:])
            for tensors in (all_tiles, [mask.rows for mask in masks], [mask.columns for mask in masks])
        )
        bits = torch.cat(all_bits) if len(all_bits) > 1 else all_bits[0]
        block_size = first.block_size if all(mask.block_size == first.block_size for mask in masks) else (1, 1)
        return cls._build(
            tiles=tiles, rows=rows, columns=columns, bits=bits, query_length=first.query_length, key_length=first.key_length,
            block_size=block_size,
        )  # fmt: skip


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
    if is_sharded(mask):
        raise TypeError("mask: expected a plain tensor, the same on all ranks, got a DTensor: a block mask is packed whole")
    tile_q, tile_k = _tile(wanted[0], mask.device), _tile(wanted[1], mask.device)
    tiles, rows, columns = torch.ops.dmattn.pack_tiles(mask, query_length, key_length, *given, tile_q, tile_k)
    bits = torch.ops.dmattn.pack_bits(mask, tiles, query_length, key_length, *given, tile_q, tile_k, _slots(tiles))
    return BlockMask._build(
        tiles=tiles, rows=rows, columns=columns, bits=bits, query_length=query_length, key_length=key_length, block_size=given
    )


def _slots(tiles: Tensor) -> int:
    """How many partial tiles there are; while tracing, under torch.func or capturing a CUDA graph, where no number can be asked for: how many
    there could be."""
    if torch._C._are_functorch_transforms_active():  # samples of a vmap may differ
        return tiles.numel()
    if torch.compiler.is_compiling() or torch._C._is_tracing() or isinstance(tiles, FakeTensor) or tiles.is_meta:
        return tiles.numel()
    if tiles.is_cuda and torch.cuda.is_current_stream_capturing():
        return tiles.numel()
    return max(2, int((tiles >= tables.TILE_PARTIAL).sum()))  # never 0 or 1, sizes on which tracing would specialise
