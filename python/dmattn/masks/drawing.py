"""Draws masks with matplotlib, which only this file needs: lifetimes of keys, and which query sees which key."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from dmattn import checks
from dmattn.composed import visible_in_blocks

MOST = 1024  # keys or queries drawn; of more, so many at equal distances
COLORS = ("#f6f8fa", "#2f6fb0", "#fbe6d0", "#e08e45")
HIDDEN, VISIBLE, HIDDEN_IN_PARTIAL, VISIBLE_IN_PARTIAL = range(4)


def axes_or_new(ax: Any) -> Any:
    """The axes given, or those of a new figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ImportError("mask.plot() needs matplotlib; install it with: pip install matplotlib") from error
    return pyplot.subplots(figsize=(5, 5), layout="constrained")[1] if ax is None else ax


def head_of(given: Tensor, head: int, batch: int, heads: int) -> Tensor:
    """[B|1, h|1, ...] as the [...] of one batch and head, on the CPU; ``head`` counts among ``heads``, which share rows of fewer.

    Raises:
        TypeError: head or batch is not an int.
        IndexError: one that the mask does not have. A size of 1 serves any.
    """
    for name, index, size in (("batch", batch, given.shape[0]), ("head", head, heads)):
        checks.length(name, index)
        if size != 1 and index >= size:
            raise IndexError(f"{name}: expected 0 <= {name} < {size}, got {index}")
    own_batch = batch if given.shape[0] != 1 else 0
    own_head = head * given.shape[1] // heads if given.shape[1] != 1 else 0
    return given[own_batch, own_head].detach().cpu()


def lifetimes(start: Tensor, end: Tensor, ax: Any) -> Any:
    """Draws the interval of each key as a vertical bar: keys across, query positions down. start, end: int32 [Sk]."""
    ax = axes_or_new(ax)
    keys = sample(end.shape[0])
    first, last = start[keys].long(), end[keys].long()
    limit = checks.MAX_LENGTH  # beyond it lies no position: an interval without a start or an end
    finite = torch.cat([first[first.abs() <= limit], last[last.abs() <= limit]]).tolist()
    top, bottom = min([0, *finite]), max([end.shape[0], *finite])
    width = 0.9 * max(1.0, end.shape[0] / MOST)
    bars = [
        [(key - width / 2, low), (key - width / 2, high), (key + width / 2, high), (key + width / 2, low)]
        for key, low, high in zip(keys.tolist(), first.clamp(top, bottom).tolist(), last.clamp(top, bottom).tolist(), strict=True)
        if low < high
    ]
    collections = importlib.import_module("matplotlib.collections")
    ax.add_collection(collections.PolyCollection(bars, facecolors=COLORS[VISIBLE], edgecolors="none"))
    ax.set(
        xlim=(-0.5, max(end.shape[0], 1) - 0.5), ylim=(max(bottom, top + 1), top), xlabel="key", ylabel="position of the query"
    )
    return ax


def pairs(
    interval: tuple[Tensor, Tensor] | None,
    block: tuple[Tensor, Tensor] | None,
    Sq: int,
    Sk: int,
    ax: Any,
    listed: Tensor | None = None,
) -> Any:
    """Draws which query sees which key.

    Args:
        interval: start and end, int32 [Sk]; None for no interval mask.
        block: tiles int32 [Nq, Nk] and bits int32 [slots, tile_q, tile_k / 32]; None for no block mask.
        listed: what an index mask shows to the sampled queries, bool [queries, keys]; None for no index mask.
    """
    ax = axes_or_new(ax)
    queries, keys = sample(Sq), sample(Sk)
    codes = torch.full((len(queries), len(keys)), VISIBLE)
    if block is not None:
        codes = tile_codes(*block, queries, keys)
    inside = torch.ones_like(codes, dtype=torch.bool) if listed is None else listed
    if interval is not None:
        start, end = interval
        position = (queries + (Sk - Sq))[:, None]
        inside = inside & (start[keys] <= position) & (position < end[keys])
    if interval is not None or listed is not None:
        codes = torch.where(inside, codes, torch.where(codes >= HIDDEN_IN_PARTIAL, HIDDEN_IN_PARTIAL, HIDDEN))
    colors = importlib.import_module("matplotlib.colors").ListedColormap(COLORS)
    edges = (-0.5, max(Sk, 1) - 0.5, max(Sq, 1) - 0.5, -0.5)
    if codes.numel():
        ax.imshow(codes.tolist(), cmap=colors, vmin=0, vmax=3, extent=edges, interpolation="nearest", aspect="auto")
    ax.set(xlim=edges[:2], ylim=edges[2:], xlabel="key", ylabel="query")
    if block is not None:
        tile_q, tile_k = block[1].shape[1], block[1].shape[2] * 32
        if max(Sq // tile_q, Sk // tile_k) <= 64:
            lines = {"colors": "#9aa5b1", "linewidths": 0.5}
            ax.hlines([at - 0.5 for at in range(tile_q, Sq, tile_q)], *edges[:2], **lines)
            ax.vlines([at - 0.5 for at in range(tile_k, Sk, tile_k)], *edges[2:], **lines)
    return ax


def sample(count: int) -> Tensor:
    """All of ``count`` indices, or MOST of them at equal distances; int64."""
    return torch.arange(count) if count <= MOST else torch.arange(MOST) * count // MOST


def tile_codes(tiles: Tensor, bits: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """What a block mask says of these pairs, one code of COLORS for each."""
    tile = tiles[queries // bits.shape[1]][:, keys // (bits.shape[2] * 32)]  # 0 empty, 1 full, 2 + slot partial
    seen = visible_in_blocks(tiles, bits, queries[:, None], keys)
    partial = torch.where(seen, VISIBLE_IN_PARTIAL, HIDDEN_IN_PARTIAL)
    return torch.where(tile >= 2, partial, torch.where(seen, VISIBLE, HIDDEN))
