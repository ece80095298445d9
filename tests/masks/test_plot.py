"""mask.plot(): pictures say what to_bool says, for every kind of mask, and a missing matplotlib is named."""

from __future__ import annotations

import sys

import pytest
import torch
from dmattn import BlockMask, IndexMask, IntervalMask

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

SCORES = torch.rand(2, 4, 200, generator=torch.Generator().manual_seed(0))
LISTS = torch.randint(-1, 200, (2, 4, 200, 9), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
CHECKED = torch.arange(200)[:, None] % 7 <= torch.arange(200) % 11


def masks():
    top_k = IntervalMask.top_k(SCORES, 20)
    blocks = BlockMask.from_blocks(torch.rand(2, 2, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.5, 32)
    blocks = blocks.cut(200, 200)
    full = BlockMask.from_bool(torch.ones(200, 200, dtype=torch.bool))
    return {
        "causal": IntervalMask.causal(200),
        "window": IntervalMask.sliding_window(200, 9, 3),
        "prefix": IntervalMask.prefix(200, torch.tensor([17, 90])),
        "top_k": top_k,
        "partial": BlockMask.from_bool(CHECKED & torch.ones(200, 200).tril().bool(), 64),
        "blocks": blocks,
        "no bits": BlockMask(full.tiles, full.rows, full.columns, full.bits[:0], 200, 200),
        "combined": top_k & blocks,
        "lists": IndexMask(LISTS, is_causal=True, local=3),
        "lists within intervals": IndexMask(LISTS[:, :1]) & top_k,
        "combined, one head": IntervalMask.sliding_window(200, 9) & BlockMask.from_bool(CHECKED, 64),
    }


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


@pytest.mark.parametrize(("head", "batch"), [(0, 0), (3, 1)])
@pytest.mark.parametrize("name", list(masks()))
def test_the_picture_is_the_mask(name, head, batch):
    mask = masks()[name]
    expected = mask.to_bool() if isinstance(mask, BlockMask) else mask.to_bool(200, 200)
    heads = expected.shape[1]
    if isinstance(mask, BlockMask) and heads == 2:
        head //= 2
    expected = expected[batch % expected.shape[0], head % heads]
    (image,) = mask.plot(200, head, batch).get_images()
    codes = torch.as_tensor(image.get_array())
    assert torch.equal(codes % 2 == 1, expected)
    block = mask if isinstance(mask, BlockMask) else getattr(mask, "block", None)
    partial = torch.zeros_like(expected)
    if block is not None:  # tiles that have bits are in colors of their own, whatever an interval hides of them
        own = block.tiles.shape[1]
        tiles = block.tiles[batch % block.tiles.shape[0], head * own // heads if own > 1 else 0]
        partial = (
            (tiles >= 2).repeat_interleave(block.bits.shape[1], 0).repeat_interleave(block.bits.shape[2] * 32, 1)[:200, :200]
        )
    assert torch.equal(codes >= 2, partial)


def test_a_picture_of_lists_ends_with_the_last_key_that_is_listed():
    mask = IndexMask(torch.tensor([[[[0, 7], [4, -1]]]], dtype=torch.int32), block_size=2)
    (image,) = mask.plot().get_images()
    assert torch.equal(torch.as_tensor(image.get_array()) % 2 == 1, mask.to_bool(2, 16)[0, 0])


@pytest.mark.parametrize("name", ["causal", "window", "prefix", "top_k"])
def test_lifetimes_are_bars_from_start_to_end(name):
    mask = masks()[name]
    ax = mask.plot(head=1, batch=1)
    (bars,) = ax.collections
    drawn = {round((box.x0 + box.x1) / 2): (box.y0, box.y1) for box in (path.get_extents() for path in bars.get_paths())}
    bottom, top = ax.get_ylim()
    assert ax.get_xlim() == (-0.5, 199.5)
    for key in range(200):
        start = mask.start[1 % mask.start.shape[0], 1 % mask.start.shape[1], key]
        end = mask.end[1 % mask.end.shape[0], 1 % mask.end.shape[1], key]
        assert (key in drawn) == bool(start < end)
        if key in drawn:
            assert drawn[key] == (max(int(start), top), min(int(end), bottom))


def test_long_masks_are_sampled():
    (image,) = IntervalMask.sliding_window(100_000, 50_000).plot(100_000).get_images()
    assert image.get_array().shape == (1024, 1024)
    (bars,) = IntervalMask.causal(100_000).plot().collections
    assert len(bars.get_paths()) == 1024


def test_any_length_fewer_queries_and_axes_of_ones_own():
    figure, axes = pyplot.subplots(1, 2)
    always = IntervalMask(torch.tensor([-5], dtype=torch.int32), torch.tensor([500], dtype=torch.int32))
    assert always.plot(7, ax=axes[0]) is axes[0]
    assert axes[0].get_images()[0].get_array().shape == (7, 7)
    (image,) = IntervalMask.causal(40).plot(10, ax=axes[1]).get_images()
    assert torch.equal(torch.as_tensor(image.get_array()) == 1, IntervalMask.causal(40).to_bool(10, 40)[0, 0])
    figure.canvas.draw()
    assert not IntervalMask.causal(0).plot(0).get_images()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: m["top_k"].plot(head=4), IndexError, "head: expected 0 <= head < 4, got 4"),
        (lambda m: m["top_k"].plot(batch=2), IndexError, "batch: expected 0 <= batch < 2, got 2"),
        (lambda m: m["top_k"].plot(head=-1), ValueError, "head: expected 0 <= head"),
        (lambda m: m["top_k"].plot(head=1.0), TypeError, "head: expected an int"),
        (lambda m: m["top_k"].plot(2.5), TypeError, "Sq: expected an int"),
        (lambda m: m["partial"].plot(100), ValueError, "Sq: expected the mask's own number of queries 200, got 100"),
        (lambda m: m["combined"].plot(100), ValueError, "Sq: expected the mask's own number of queries 200, got 100"),
    ],
)
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call(masks())


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"mask.plot\(\) needs matplotlib; install it with: pip install matplotlib$"):
        IntervalMask.causal(8).plot()
