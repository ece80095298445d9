"""dmattn.stats: counts of every kind of mask against counting by hand, what follows from them, and what it refuses."""

from __future__ import annotations

import math
import re

import dmattn
import pytest
import torch
from dmattn import BlockMask, IntervalMask, reference, visible_pairs
from dmattn.testing import masks, shapes, strategies
from hypothesis import given, settings
from hypothesis import strategies as st

TWO = "expected a positive int or two of them, got "


def by_hand(seen, tile):
    """The counts of visible pairs seen, bool [B, H, Sq, Sk], tile by tile."""
    counts = {
        name: torch.zeros(seen.shape[:2], dtype=torch.int64) for name in ("pairs", "live", "rows", "area", "active", "full")
    }
    for row in range(0, seen.shape[2], tile[0]):
        rows = seen[:, :, row : row + tile[0]]
        counts["live"] += rows.any(2).sum(-1)
        counts["rows"] += rows.any(2).sum(-1) * rows.shape[2]
        for column in range(0, seen.shape[3], tile[1]):
            part = rows[..., column : column + tile[1]].flatten(2)
            counts["pairs"] += part.sum(-1)
            counts["active"] += part.any(-1)
            counts["area"] += part.any(-1) * part.shape[2]
            counts["full"] += part.all(-1)
    return counts


@settings(max_examples=80)
@given(shape=shapes(max_length=70, max_batch=2), data=st.data())
def test_counts_are_those_of_counting_by_hand(shape, data):
    drawn = data.draw(masks(shape))
    is_causal, tile = data.draw(st.booleans()), data.draw(st.sampled_from(((16, 16), (8, 32), (128, 128))))
    query, key = (shape.B, shape.H, shape.Sq, shape.D), (shape.B, shape.Hkv, shape.Sk, shape.D)
    found = dmattn.stats(query, drawn.mask, key, value_dim=shape.Dv, is_causal=is_causal, tile=tile)
    seen = torch.ones((1, 1, shape.Sq, shape.Sk), dtype=torch.bool)
    seen = seen if drawn.visible is None else seen & reference.per_query_head(drawn.visible, shape.H)
    seen = (seen.tril(shape.Sk - shape.Sq) if is_causal else seen).expand(*query[:2], -1, -1)
    expected = by_hand(seen, tile)
    computed = expected["area" if "block" in found.kind else "rows"]
    assert torch.equal(found.visible_pairs, expected["pairs"])
    assert torch.equal(found.live_keys, expected["live"])
    assert torch.equal(found.computed_pairs, computed)
    assert torch.equal(found.active_tiles, expected["active"])
    assert torch.equal(found.full_tiles, expected["full"])
    assert torch.equal(found.active_tiles + found.skipped_tiles, torch.full(query[:2], found.tiles))
    assert found.is_causal == (not seen.triu(shape.Sk - shape.Sq + 1).any())
    if not isinstance(drawn.mask, torch.Tensor):
        total = visible_pairs(drawn.mask, shape.Sq, shape.Sk, is_causal=is_causal, batch=shape.B, heads=shape.H)
        assert int(found.visible_pairs.sum()) == total


def test_what_follows_from_counts():
    """A sliding window of 64 over 512 positions, in tiles of 64: two tiles and 127 keys for each row of tiles but the first."""
    found = dmattn.stats(
        (2, 4, 512, 64), IntervalMask.sliding_window(512, left=63), (2, 1, 512, 64), tile=64, dtype=torch.float32
    )
    assert found.visible_pairs.unique().tolist() == [sum(min(i + 1, 64) for i in range(512))]
    assert found.live_keys.unique().tolist() == [64 + 7 * 127]
    assert found.active_tiles.unique().tolist() == [15]
    assert found.full_tiles.unique().tolist() == [0]
    assert found.tiles == 64
    assert found.skip_rate == 49 / 64
    assert found.density == sum(min(i + 1, 64) for i in range(512)) / 512**2
    assert found.effective_density == (64 + 7 * 127) * 64 / 512**2
    assert found.live_keys_of_a_tile == (64 + 7 * 127) / 8
    assert found.predicted_speedup == 36 / (64 + 7 * 127) * 64  # 36 of 64 tiles are on or below the diagonal
    assert found.read_bytes == 8 * ((512 * 128 + (64 + 7 * 127) * 128) * 4 + 512 * 4)
    assert found.dense_mask_bytes == 8 * 512 * 512
    assert found.mask_bytes == 2 * 4 * 512
    assert found.is_causal


def test_a_long_dynamic_mask_takes_no_matrix():
    """2^18 keys: 6.9 * 10^10 pairs. Live keys of a tile are about as many as the window."""
    mask = IntervalMask.top_k(strategies.random_tensor((1, 1, 1 << 18), 0), 1024)
    found = dmattn.stats((1, 2, 1 << 18, 64), mask, (1, 1, 1 << 18, 64))
    assert int(found.visible_pairs.sum()) == 2 * sum(min(i + 1, 1024) for i in range(1 << 18))
    assert 900 < found.live_keys_of_a_tile < 1200
    assert 100 < found.predicted_speedup < 140


def test_offsets_move_queries():
    mask = IntervalMask.sliding_window(100, left=9)
    usual = dmattn.stats((1, 1, 20, 8), mask, is_causal=True)
    assert usual.key_shape == (1, 1, 100, 8)
    assert (
        dmattn.stats((1, 1, 20, 8), mask, is_causal=True, query_offset=80).visible_pairs.tolist() == usual.visible_pairs.tolist()
    )
    at_the_head = dmattn.stats((1, 1, 20, 8), mask, is_causal=True, query_offset=torch.tensor([0]))
    assert at_the_head.visible_pairs.tolist() == [[sum(min(i + 1, 10) for i in range(20))]]


def test_bool_masks_and_masks_of_blocks():
    visible = torch.zeros(256, 256, dtype=torch.bool)
    visible[:128, :128] = True
    visible[130, 7] = True
    for mask in (visible, BlockMask.from_bool(visible)):
        found = dmattn.stats((1, 2, 256, 16), mask)
        assert found.kind == "block"
        assert (found.active_tiles.tolist(), found.full_tiles.tolist()) == ([[2, 2]], [[1, 1]])
        assert found.computed_pairs.tolist() == [[2 * 128 * 128] * 2]
        assert found.tile == (128, 128)
    assert dmattn.stats((1, 1, 64, 8), BlockMask.from_bool(visible[:64, :64], 32)).tile == (32, 32)
    keys = dmattn.stats((1, 1, 10, 8), torch.arange(30) < 7, (1, 1, 30, 8))
    assert keys.kind == "interval"
    assert keys.visible_pairs.tolist() == [[70]]


def test_nothing_visible():
    found = dmattn.stats((1, 1, 30, 8), IntervalMask.padding(30, 0))
    assert found.predicted_speedup == math.inf
    assert found.skip_rate == 1.0
    assert found.density == 0.0
    for shape in ((1, 1, 0, 8), (0, 1, 3, 8)):
        assert dmattn.stats(shape).density == 0.0
        assert dmattn.stats(shape).predicted_speedup == 1.0
        assert repr(dmattn.stats(shape))


def test_it_reads_well():
    found = dmattn.stats((1, 8, 4096, 64), IntervalMask.streaming(4096, 4, 512), (1, 2, 4096, 64))
    lines = repr(found).splitlines()
    assert lines[0] == "attention of query [1, 8, 4096, 64] and key [1, 2, 4096, 64], Dv=64, bfloat16"
    assert lines[1] == "mask: interval; tiles of 128 queries and 128 keys, 1,024 of each head"
    assert lines[2].split("  ")[-3:] != [""]
    assert [line.split("  ")[0] for line in lines[3:10]] == [
        "visible pairs", "computed pairs", "live keys", "active tiles", "full tiles", "partial tiles", "skipped tiles",
    ]  # fmt: skip
    assert "x of dense causal" in lines[13 + 1]
    assert found.line.startswith("query [1, 8, 4096, 64] key [1, 2, 4096, 64] bfloat16, mask interval: ")
    assert "\n" not in found.line


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (((1, 2, 3),), {}, ValueError, r"query_shape: expected four ints \[B, heads, S, D\], got \[1, 2, 3\]"),
        ((torch.zeros(4),), {}, TypeError, "query_shape: expected four ints, got "),
        (((1, 2, 30, 8.0),), {}, TypeError, "query_shape: "),
        (((1, 2, 30, 8), None, (1, 2, 30)), {}, ValueError, "key_shape: expected four ints"),
        (((1, 3, 30, 8), None, (1, 2, 30, 8)), {}, ValueError, "key: expected a number of heads that divides H=3"),
        (((1, 2, 30, 7),), {}, ValueError, "query: expected a last dimension that is a multiple of 8"),
        (((1, 2, 30, 8),), {"value_dim": 0}, ValueError, "value_dim: "),
        (((1, 2, 30, 8),), {"dtype": "bfloat16"}, TypeError, "dtype: expected a torch.dtype, got str"),
        (((1, 2, 30, 8),), {"is_causal": 1}, TypeError, "is_causal: "),
        (((1, 2, 30, 8),), {"tile": 0}, ValueError, "tile: "),
        (((1, 2, 30, 8),), {"tile": (64, "64")}, TypeError, "tile: expected a positive int, got str"),
        *((((1, 2, 30, 8),), {"tile": tile}, ValueError, re.escape(f"tile: {TWO}{tile}")) for tile in ((1, 2, 3), (1,), ())),
        (((1, 2, 30, 8),), {"tile": 1.5}, TypeError, f"tile: {TWO}1.5"),
        (((1, 2, 30, 8),), {"tile": torch.tensor([64, 64])}, TypeError, f"tile: {TWO}tensor"),
        (((2**40, 2**30, 8, 8),), {}, ValueError, r"query_shape: expected sizes whose product is at most 2\^54, got \["),
        (((1, 2, 8, 8), None, (2**40, 2**30, 8, 8)), {}, ValueError, "key_shape: expected sizes whose product"),
        (((1, 2, 8, 8),), {"value_dim": 2**60}, ValueError, "value_dim: expected sizes whose product"),
        (((1, 2, 30, 8),), {"query_offset": 1.5}, TypeError, "query_offset: "),
        (((1, 2, 30, 8), "causal"), {}, TypeError, "mask: expected an IntervalMask, a BlockMask, an IndexMask, an intersection"),
        (((1, 2, 30, 8), IntervalMask.causal(31), (1, 2, 30, 8)), {}, ValueError, "mask: expected an IntervalMask for Sk=30"),
        (((1, 2, 30, 8), IntervalMask.causal(30, device="meta")), {}, ValueError, "mask: expected a mask with values"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments, options, error, message):
    with pytest.raises(error, match=message):
        dmattn.stats(*arguments, **options)


def test_tiles_are_full_partial_or_skipped():
    found = dmattn.stats((1, 2, 300, 16), dmattn.IntervalMask.sliding_window(300, left=99), is_causal=True)
    assert isinstance(found, dmattn.Stats)
    assert torch.equal(found.full_tiles + found.partial_tiles + found.skipped_tiles, torch.full((1, 2), found.tiles))
    assert bool((found.partial_tiles > 0).all())


@settings(max_examples=5)
@given(seed=strategies.seeds())
def test_a_mask_on_the_device_of_the_tests(seed, device):
    mask = IntervalMask.top_k(strategies.random_tensor((1, 2, 300), seed, device=device), 16)
    here = dmattn.stats((1, 4, 300, 16), mask.to("cpu"), (1, 2, 300, 16))
    there = dmattn.stats((1, 4, 300, 16), mask, (1, 2, 300, 16))
    assert torch.equal(here.live_keys, there.live_keys)
    assert there.live_keys.device.type == "cpu"
