"""What an attention call will do, counted from its mask without running it: visible pairs, live keys, tiles, bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dmattn import checks
from dmattn.call import NO_MASK, at_offset, mask_tensors, options_of, with_mask
from dmattn.composed import LISTS, Masks, pairs_seen
from dmattn.fake import accumulate_dtype
from dmattn.masks import BlockMask, CombinedMask, IndexMask, IntervalMask, Mask
from dmattn.masks.heads import same_heads
from dmattn.sizes import sizes_of

TILE = (128, 128)  # queries and keys
MAX_EXTENT = 1 << 54  # the largest product of a tensor's sizes, as in the kernels


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Stats:
    """Counts of one attention call. Tensors are int64 [B, H] on the CPU, one number for each batch and query head.

    A *tile* is ``tile[0]`` queries by ``tile[1]`` keys, the last ones of a head fewer. A key is *live* for a row of tiles when one of its
    queries sees it.

    Args:
        query_shape: (B, H, Sq, D).
        key_shape: (B, Hkv, Sk, D).
        value_dim: Dv.
        dtype: of query, key and value.
        kind: "none", or the parts of the mask: "interval", "block", "index", "interval & block" and so on.
        tile: queries and keys of a tile.
        visible_pairs: pairs of a query and a key that it sees.
        live_keys: keys that are live for a row of tiles, summed over rows.
        computed_pairs: pairs that kernels compute: the queries of a row by its live keys, or, with a block mask and no index mask, whole
            tiles.
        active_tiles: tiles with a visible pair.
        full_tiles: tiles whose pairs are all visible.
        dense_pairs: pairs that dense attention computes for one head, without tiles above the diagonal where no query sees a later key.
        is_causal: whether no query sees a key behind its own position.
        mask_bytes: memory of the mask's tensors.
    """

    query_shape: tuple[int, int, int, int]
    key_shape: tuple[int, int, int, int]
    value_dim: int
    dtype: torch.dtype
    kind: str
    tile: tuple[int, int]
    visible_pairs: Tensor
    live_keys: Tensor
    computed_pairs: Tensor
    active_tiles: Tensor
    full_tiles: Tensor
    dense_pairs: int
    is_causal: bool
    mask_bytes: int

    @property
    def tiles(self) -> int:
        """Tiles of one head."""
        return math.prod(
            -(-length // size) for length, size in zip((self.query_shape[2], self.key_shape[2]), self.tile, strict=True)
        )

    @property
    def partial_tiles(self) -> Tensor:
        """Tiles with visible and hidden pairs, [B, H]."""
        return self.active_tiles - self.full_tiles

    @property
    def skipped_tiles(self) -> Tensor:
        """Tiles without a visible pair, [B, H]."""
        return self.tiles - self.active_tiles

    @property
    def skip_rate(self) -> float:
        """The share of tiles that are skipped, over all heads."""
        return _share(self.skipped_tiles, self.tiles)

    @property
    def density(self) -> float:
        """The share of all pairs that are visible."""
        return _share(self.visible_pairs, self.query_shape[2] * self.key_shape[2])

    @property
    def effective_density(self) -> float:
        """The share of all pairs that are computed. The part above ``density`` is what computing queries in tiles costs."""
        return _share(self.computed_pairs, self.query_shape[2] * self.key_shape[2])

    @property
    def live_keys_of_a_tile(self) -> float:
        """The mean number of live keys of a row of tiles."""
        return _share(self.live_keys, -(-self.query_shape[2] // self.tile[0]))

    @property
    def predicted_speedup(self) -> float:
        """Pairs that dense attention computes for each that this call computes, which is the speedup of the products alone.

        It is an upper bound: selection, lists of live keys, launches and the slower loading of scattered rows are not in it. See the page
        "Accuracy and cost". 1 where there are no pairs at all, inf where none of them is visible.
        """
        dense, computed = self.dense_pairs * self.computed_pairs.numel(), int(self.computed_pairs.sum())
        return dense / computed if computed else math.inf if dense else 1.0

    @property
    def read_bytes(self) -> int:
        """Bytes of query, key, value, out and lse that a forward pass reads and writes if each row of tiles reads its live keys once."""
        batch, heads, queries, size = self.query_shape
        rows = batch * heads * queries
        elements = rows * (size + self.value_dim) + int(self.live_keys.sum()) * (size + self.value_dim)
        return elements * self.dtype.itemsize + rows * accumulate_dtype(self.dtype).itemsize

    @property
    def dense_mask_bytes(self) -> int:
        """Bytes of the mask as a bool tensor [B, H, Sq, Sk]."""
        return math.prod(self.query_shape[:3]) * self.key_shape[2]

    @property
    def line(self) -> str:
        """The most important in one line, as DMATTN_LOG=1 prints it."""
        return (
            f"query {list(self.query_shape)} key {list(self.key_shape)} {_name(self.dtype)}, mask {self.kind}: {self.density:.2%} of pairs "
            f"visible, {self.effective_density:.2%} computed, {self.live_keys_of_a_tile:,.0f} live keys a tile, {self.skip_rate:.1%} of "
            f"tiles skipped, predicted {self.predicted_speedup:.1f}x of dense{' causal' if self.is_causal else ''}"
        )

    def __repr__(self) -> str:
        heads = self.visible_pairs.numel()
        rows = (("visible pairs", self.visible_pairs), ("computed pairs", self.computed_pairs), ("live keys", self.live_keys),
                ("active tiles", self.active_tiles), ("full tiles", self.full_tiles), ("partial tiles", self.partial_tiles),
                ("skipped tiles", self.skipped_tiles))  # fmt: skip
        beside = "dense causal" if self.is_causal else "dense"
        facts = (("density", f"{self.density:.2%}"), ("effective density", f"{self.effective_density:.2%}"),
                 ("skip rate", f"{self.skip_rate:.2%}"), ("live keys of a tile", f"{self.live_keys_of_a_tile:,.1f}"),
                 ("predicted speed-up", f"{self.predicted_speedup:.2f}x of {beside}"), ("bytes read and written", f"{self.read_bytes:,}"),
                 ("bytes of the mask", f"{self.mask_bytes:,} ({self.dense_mask_bytes:,} as a bool tensor)"))  # fmt: skip
        lines = [
            f"attention of query {list(self.query_shape)} and key {list(self.key_shape)}, Dv={self.value_dim}, {_name(self.dtype)}",
            f"mask: {self.kind}; tiles of {self.tile[0]} queries and {self.tile[1]} keys, {self.tiles:,} of each head",
            f"{'':<24}{f'all {heads} heads':>18}{'least head':>18}{'most head':>18}",
            *(f"{name:<24}{int(of.sum()):>18,}{_extreme(of, min):>18,}{_extreme(of, max):>18,}" for name, of in rows),
            *(f"{name:<24}{fact}" for name, fact in facts),
        ]
        return "\n".join(lines)


def stats(
    query_shape: Sequence[int],
    mask: Mask | Tensor | None = None,
    key_shape: Sequence[int] | None = None,
    *,
    value_dim: int | None = None,
    is_causal: bool = False,
    query_offset: int | Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    tile: int | tuple[int, int] | None = None,
) -> Stats:
    """What a call of :func:`attention` would do, without running it.

    Interval masks take memory and time in proportion to keys and tiles. Block masks and lists are looked at element by element, in pieces.
    Reading the mask waits for its device.

    Args:
        query_shape: [B, H, Sq, D], as ``query.shape``.
        mask: as :func:`attention` takes it.
        key_shape: [B, Hkv, Sk, D]; default: the heads of the query, and the mask's number of keys, else Sq.
        value_dim: Dv, default D.
        is_causal, query_offset: as in the call.
        dtype: of query, key and value; counts in bytes.
        tile: queries and keys of a tile; default 128 of each, with a block mask the tiles it is packed in.

    Returns:
        The counts, for each batch and head; ``print`` it for a table.

    Raises:
        TypeError, ValueError: as :func:`attention`; or the mask has no values (it is on the meta device or being traced).
    """
    query = _four("query_shape", query_shape)
    length = _key_length(mask)
    key = (*query[:2], query[2] if length is None else length, query[3]) if key_shape is None else _four("key_shape", key_shape)
    checks.instance("dtype", dtype, torch.dtype, "a torch.dtype")
    if value_dim is not None:
        checks.positive_int("value_dim", value_dim)
    width = query[3] if value_dim is None else value_dim
    shapes = (query, key, (*key[:3], width))
    for name, shape in zip(("query_shape", "key_shape", "value_dim"), shapes, strict=True):
        if math.prod(max(size, 1) for size in shape) > MAX_EXTENT:
            raise ValueError(f"{name}: expected sizes whose product is at most 2^54, got {list(shape)}")
    sizes = sizes_of(*(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes))
    sizes = sizes._replace(device=torch.device("cpu") if mask is None else getattr(mask, "device", torch.device("cpu")))
    options = with_mask(options_of(sizes, None, checks.flag("is_causal", is_causal), None), mask)
    masks = NO_MASK if mask is None else mask_tensors(mask, sizes)
    if not all(checks.values_are_known(given) or given.is_cuda for given in masks if given is not None):
        raise ValueError("mask: expected a mask with values, got one on the meta device or of a program that is being traced")
    if query_offset is not None:
        masks, options = at_offset(query_offset, masks, options, sizes)
    return count(shapes, dtype, masks, options.is_causal, options.lists(), None if tile is None else _tile_of(tile))


def count(
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    masks: tuple[Tensor | None, ...],
    is_causal: bool,
    lists: tuple[int, int, int] = LISTS,
    tile: tuple[int, int] | None = None,
) -> Stats:
    """The counts of a call from what the op ``forward`` takes: shapes of query, key and value, its eight tensors of the mask, and how lists
    are read."""
    start, end, tiles, _, _, bits, indices, index_offset = masks
    if tile is None:
        tile = TILE if bits is None else (bits.shape[1], bits.shape[2] * 32)
    (batch, heads, queries, _), keys = shapes[0], shapes[1][2]
    if tiles is None and indices is None:
        found = _by_intervals(start, end, is_causal, queries, keys, tile)
    else:
        by_element = Masks(start, end, tiles, bits, indices, index_offset)
        found = by_elements(by_element, is_causal, lists, queries, keys, tile, of_tiles=indices is None)
    *counts, sees_later = found
    parts = {"interval": start is not None or end is not None, "block": tiles is not None, "index": indices is not None}
    kind = " & ".join(name for name, has in parts.items() if has) or "none"
    pairs, live, computed, active, full = (
        of.cpu().repeat_interleave(heads // max(of.shape[1], 1), 1).expand(batch, heads) for of in counts
    )
    return Stats(
        query_shape=_four("query", shapes[0]),
        key_shape=_four("key", shapes[1]),
        value_dim=shapes[2][3],
        dtype=dtype,
        kind=kind,
        tile=tile,
        visible_pairs=pairs,
        live_keys=live,
        computed_pairs=computed,
        active_tiles=active,
        full_tiles=full,
        dense_pairs=_dense_pairs(queries, keys, tile[0], not sees_later),
        is_causal=not sees_later,
        mask_bytes=sum(_bytes(given) for given in masks if given is not None),
    )


def queries_of_keys(start: Tensor | None, end: Tensor | None, is_causal: bool, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """The queries [first, last) that see each key under an interval mask, int64 [B|1, H|Hkv|1, Sk]; none where last <= first."""
    device = next((given.device for given in (start, end) if given is not None), torch.device("cpu"))
    key, base = torch.arange(keys, device=device), keys - queries
    first = torch.zeros((1, 1, keys), dtype=torch.int64, device=device) if start is None else start.long() - base
    last = torch.full((1, 1, keys), queries, device=device) if end is None else end.long() - base
    first, last = same_heads(first.expand(-1, -1, keys), last.expand(-1, -1, keys), "end", "start")
    first, last = torch.broadcast_tensors(first, last)
    first = torch.maximum(first, key - base) if is_causal else first
    return first.clamp(0, queries), last.clamp(0, queries)


def _by_intervals(
    start: Tensor | None, end: Tensor | None, is_causal: bool, queries: int, keys: int, tile: tuple[int, int]
) -> tuple[Any, ...]:
    """(visible pairs, live keys, computed pairs, active tiles, full tiles, whether a query sees a later key), tensors [B|1, H|Hkv|1]."""
    first, last = queries_of_keys(start, end, is_causal, queries, keys)
    device = first.device
    key = torch.arange(keys, device=device)
    seen = last > first
    first, last = torch.where(seen, first, 0), torch.where(seen, last, 0)

    # A key is live for a run of rows of tiles, and seen by all queries of a shorter run: count both by their ends.
    tile_q, tile_k = tile
    rows, columns = -(-queries // tile_q), -(-keys // tile_k)
    row_of = key // tile_k * (rows + 1)
    whole_from = -(-first // tile_q)
    whole_to = torch.where(last == queries, rows, last // tile_q)
    is_whole = seen & (whole_to > whole_from)
    live_from, live_to = first // tile_q, torch.where(seen, (last - 1) // tile_q + 1, 0)
    queries_of = torch.full((rows,), tile_q, device=device)
    keys_of = torch.full((columns, 1), tile_k, device=device)
    if rows and columns:
        queries_of[-1], keys_of[-1] = queries - (rows - 1) * tile_q, keys - (columns - 1) * tile_k

    def ends(begin: Tensor, finish: Tensor, counts: Tensor) -> Tensor:
        """Keys of each column of tiles whose run [begin, finish) holds a row, [columns, rows]."""
        changes = torch.zeros(columns * (rows + 1), dtype=torch.int64, device=device)
        changes.scatter_add_(0, row_of + begin, counts.long())
        changes.scatter_add_(0, row_of + finish, -counts.long())
        return changes.view(columns, rows + 1).cumsum(1)[:, :rows]

    size = first.shape[:2]
    live_keys, computed, active, full = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(4))
    for b, h in torch.cartesian_prod(torch.arange(size[0]), torch.arange(size[1])).tolist():
        live = ends(live_from[b, h], live_to[b, h], seen[b, h])
        whole = ends(
            torch.where(is_whole[b, h], whole_from[b, h], 0), torch.where(is_whole[b, h], whole_to[b, h], 0), is_whole[b, h]
        )
        live_keys[b, h], computed[b, h] = live.sum(), (live.sum(0) * queries_of).sum()
        active[b, h], full[b, h] = (live > 0).sum(), (whole == keys_of).sum()
    sees_later = bool((seen & (first + (keys - queries) < key)).any())
    return (last - first).sum(-1), live_keys, computed, active, full, sees_later


def by_elements(
    masks: Masks, is_causal: bool, lists: tuple[int, int, int], queries: int, keys: int, tile: tuple[int, int], *, of_tiles: bool
) -> tuple[Any, ...]:
    """The same for block masks and lists, alone or with others: every element is looked at, a few rows of tiles at a time.

    of_tiles: whether whole tiles are computed, not the live keys of a row of tiles.
    """
    given = [table for table in (masks.start, masks.end, masks.tiles, masks.indices) if table is not None]
    device, base = given[0].device, keys - queries
    key = torch.arange(keys, device=device)
    tile_q, tile_k = tile
    columns = -(-keys // tile_k)
    size = (max(table.shape[0] for table in given), max(table.shape[1] for table in given))
    pairs, live_keys, computed, active, full = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(5))
    area = torch.nn.functional.pad(torch.ones_like(key), (0, columns * tile_k - keys)).view(columns, tile_k).sum(1)
    sees_later = False
    for row in range(0, queries, tile_q):
        rows = torch.arange(row, min(row + tile_q, queries), device=device)
        query, visible = rows[:, None], pairs_seen(masks, is_causal, lists, rows, (0, keys), base, size[1])
        assert visible is not None
        seen, count_of = visible.any(2), visible.sum(2)
        in_tiles = torch.nn.functional.pad(count_of, (0, columns * tile_k - keys)).unflatten(-1, (columns, tile_k)).sum(-1)
        pairs += count_of.sum(-1)
        live_keys += seen.sum(-1)
        active += (in_tiles > 0).sum(-1)
        full += (in_tiles == area * len(query)).sum(-1) if keys else 0
        computed += ((in_tiles > 0) * area * len(query)).sum(-1) if of_tiles else seen.sum(-1) * len(query)
        sees_later = sees_later or bool((visible & (key > query + base)).any())
    return pairs, live_keys, computed, active, full, sees_later


def _key_length(mask: object) -> int | None:
    """How many keys a mask is for, None for any number."""
    if isinstance(mask, IntervalMask | BlockMask | CombinedMask):
        return mask.key_length
    if isinstance(mask, IndexMask):
        return None
    return mask.shape[-1] if isinstance(mask, Tensor) and mask.dim() and mask.shape[-1] != 1 else None


def _dense_pairs(queries: int, keys: int, tile_q: int, is_causal: bool) -> int:
    """Pairs that dense attention computes for one head, the queries of a tile together."""
    if not is_causal:
        return queries * keys
    total = 0
    for row in range(0, queries, tile_q):
        until = min(row + tile_q, queries)
        total += (until - row) * max(0, min(keys, until + keys - queries))
    return total


def _bytes(given: Tensor) -> int:
    """Memory of a tensor, what is repeated counted once."""
    elements = (size for size, stride in zip(given.shape, given.stride(), strict=True) if stride)
    return math.prod(elements) * given.element_size()


def _four(name: str, shape: Sequence[int]) -> tuple[int, int, int, int]:
    """A shape as four ints.

    Raises:
        TypeError, ValueError: it is none.
    """
    checks.instance(name, shape, Sequence, "four ints")
    if len(shape) != 4:
        raise ValueError(f"{name}: expected four ints [B, heads, S, D], got {list(shape)}")
    for size in shape:
        checks.natural_int(name, size)
    batch, heads, length, width = shape
    return int(batch), int(heads), int(length), int(width)


def _tile_of(tile: object) -> tuple[int, int]:
    """A tile as two ints.

    Raises:
        TypeError, ValueError: it is none.
    """
    sizes = tile if isinstance(tile, Sequence) else (tile, tile) if isinstance(tile, int) else ()
    if len(sizes) != 2:
        error = ValueError if isinstance(tile, Sequence) else TypeError
        raise error(f"tile: expected a positive int or two of them, got {tile}")
    for size in sizes:
        checks.positive_int("tile", size)
    return sizes[0], sizes[1]


def _share(counts: Tensor, of_each: int) -> float:
    """The mean count, as a share of what there is for one head."""
    everything = counts.numel() * of_each
    return int(counts.sum()) / everything if everything else 0.0


def _extreme(counts: Tensor, which: Callable[..., int]) -> int:
    return which(counts.flatten().tolist(), default=0)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
