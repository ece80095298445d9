"""The tensors of a block mask: tables of tiles, lists of the occupied ones, bits; what they say, and checks that they agree."""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn import checks
from dmattn.fake import table_size

TILE_PARTIAL = 2  # tiles: 0 empty, 1 full, 2 + slot partial (cpp/params.h)
MAX_TILE = 4096  # of the ops (cpp/checks.h)


def occupied(tiles: Tensor) -> Tensor:
    """For each row of tiles the number of non-empty ones, then their indices, ascending."""
    present = (tiles != 0).int()
    return torch.cat([present.sum(-1, keepdim=True), present.argsort(dim=-1, descending=True, stable=True)], dim=-1).int()


def from_lists(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Lists of block columns per block row, as a bool table; list entries past the count are ignored."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    table = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    return table.scatter(-1, torch.where(listed, indices, columns).long(), True)[..., :columns]


def hide_beyond(tiles: Tensor, tile: tuple[int, int], lengths: tuple[int, int]) -> Tensor:
    """Tiles that begin beyond these lengths become empty."""
    touched = [
        torch.arange(count, device=tiles.device) * size < length
        for count, size, length in zip(tiles.shape[2:], tile, lengths, strict=True)
    ]
    return tiles * (touched[0][:, None] & touched[1])


def renumber(tiles: Tensor, offset: int) -> Tensor:
    """Tiles whose bits begin ``offset`` slots later."""
    return torch.where(tiles >= TILE_PARTIAL, tiles + offset, tiles) if offset else tiles


def elements(tiles: Tensor, bits: Tensor, query_length: int, key_length: int) -> Tensor:
    """What a table of tiles says of each element, bool [B|1, H|Hkv|1, query_length, key_length]."""
    tile_q, words = bits.shape[1], bits.shape[2]
    shift = torch.arange(32, dtype=torch.int32, device=bits.device)
    partial = ((bits[..., None] >> shift) & 1).bool().reshape(-1, tile_q, words * 32)
    empty_and_full = torch.zeros((2, tile_q, words * 32), dtype=torch.bool, device=bits.device)
    empty_and_full[1] = True
    by_tile = torch.cat([empty_and_full, partial])[tiles.long()]  # [.., Nq, Nk, tile_q, tile_k]
    batch, heads, tiles_q, tiles_k = tiles.shape
    whole = by_tile.transpose(3, 4).reshape(batch, heads, tiles_q * tile_q, tiles_k * words * 32)
    return whole[:, :, :query_length, :key_length]


def check_structure(tiles: object, rows: object, columns: object, bits: object, query_length: int, key_length: int) -> None:
    """Types, dtypes, devices and shapes of a block mask's tensors.

    Raises:
        TypeError, ValueError: names the first one that does not fit.
    """
    given = {"tiles": tiles, "rows": rows, "columns": columns, "bits": bits}
    dense = {name: checks.tensor(name, value) for name, value in given.items()}
    for name, tensor in dense.items():
        checks.dtype(name, tensor, (torch.int32,))
        checks.same_device(name, tensor, dense["tiles"], "tiles")
    packed, table = dense["bits"], dense["tiles"]
    fits = (
        packed.dim() == 3
        and 0 < packed.shape[1] <= MAX_TILE
        and packed.shape[1] % 32 == 0
        and 0 < packed.shape[2] <= MAX_TILE // 32
    )
    if not fits:
        raise ValueError(f"bits: expected [slots, tile_q, tile_k / 32] with tiles of multiples of 32 up to {MAX_TILE}, "
                         f"got shape {checks.shape_of(packed)}")  # fmt: skip
    tiles_q, tiles_k = table_size(query_length, packed.shape[1]), table_size(key_length, packed.shape[2] * 32)
    if table.dim() != 4 or tuple(table.shape[2:]) != (tiles_q, tiles_k):
        raise ValueError(f"tiles: expected [B|1, H|Hkv|1, Nq, Nk] with Nq={tiles_q}, Nk={tiles_k} for lengths {query_length}, {key_length}, "
                         f"got shape {checks.shape_of(table)}")  # fmt: skip
    for name, size in (("rows", (tiles_q, tiles_k + 1)), ("columns", (tiles_k, tiles_q + 1))):
        expected = (*table.shape[:2], *size)
        if tuple(dense[name].shape) != expected:
            raise ValueError(f"{name}: expected shape {list(expected)} with tiles, got {checks.shape_of(dense[name])}")


def check_values(tiles: Tensor, rows: Tensor, columns: Tensor, bits: Tensor, query_length: int, key_length: int) -> None:
    """That slots exist, that nothing lies beyond the lengths, and that the lists say what tiles says. Reads all of the tables.

    Raises:
        ValueError: names the tensor, and the first place where it is wrong.
    """
    slots, tile = bits.shape[0], (bits.shape[1], bits.shape[2] * 32)
    wrong = (tiles < 0) | (tiles >= TILE_PARTIAL + slots)
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"tiles: expected 0, 1 or 2 + slot with slots below {slots} in bits, got {int(tiles[tuple(place)])} at {place}"
        )
    wrong = tiles != hide_beyond(tiles, tile, (query_length, key_length))
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"tiles: expected 0 beyond the lengths {query_length}, {key_length}, got {int(tiles[tuple(place)])} at {place}"
        )
    for name, lists, table in (("rows", rows, tiles), ("columns", columns, tiles.transpose(2, 3))):
        expected = occupied(table)
        listed = torch.arange(-1, lists.shape[-1] - 1) < expected[..., :1]  # the count, and as many indices
        wrong = ((lists != expected) & listed).any(dim=-1)
        if bool(wrong.any()):
            place = wrong.nonzero()[0].tolist()
            right, got = (t[tuple(place)][: 1 + int(expected[tuple(place)][0])].tolist() for t in (expected, lists))
            raise ValueError(
                f"{name}: expected the number of non-empty tiles and their indices, ascending: at {place} {right}, got {got}"
            )
