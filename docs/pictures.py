"""Draws the other pictures of the pages, in docs/generated/: each mask constructor, and plots of the committed results (``make docs``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import torch

matplotlib.use("Agg")
from dmattn import BlockMask, IndexMask, IntervalMask
from dmattn_bench.plots import save
from dmattn_bench.report import draw_committed
from dmattn_bench.style import RC
from matplotlib import pyplot
from torch.nn.attention.flex_attention import create_block_mask

ROOT = Path(__file__).resolve().parent.parent
LENGTH = 64


def flex_mask() -> BlockMask:
    return BlockMask.from_flex(
        create_block_mask(lambda b, h, q, k: (q - k).abs() < 90, None, None, 256, 256, device="cpu", BLOCK_SIZE=64)
    )


def gallery() -> dict[str, IntervalMask | BlockMask | IndexMask | Any]:
    """One mask for each constructor, by the name of its picture."""
    scores = torch.rand(1, 1, LENGTH, generator=torch.Generator().manual_seed(3))
    ends = torch.tensor([0, 20, 28, LENGTH])
    odd = torch.arange(128)[:, None] // 40 != torch.arange(128) // 40
    table = torch.rand(6, 6, generator=torch.Generator().manual_seed(5)) < 0.4
    keys = torch.arange(LENGTH, dtype=torch.int32)
    parents = keys - 1
    parents[[28, 40, 52]] = torch.tensor([15, 31, 15], dtype=torch.int32)
    nodes = keys // 8  # nodes 0 to 7: two children of 0, with two and three children of their own
    leave = torch.tensor([8, 4, 3, 4, 8, 6, 7, 8], dtype=torch.int32)[nodes.long()]
    queries, columns = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    pairs = torch.rand(1, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(7))
    chosen = pairs[..., :8] < 0.4
    documents = IntervalMask.documents(LENGTH, ends)
    return {
        "intervals": IntervalMask(keys, keys + keys % 16 + 1),
        "causal": IntervalMask.causal(LENGTH),
        "sliding_window": IntervalMask.sliding_window(LENGTH, left=11, right=3),
        "streaming": IntervalMask.streaming(LENGTH, sink_keys=4, local=12),
        "documents": documents,
        "documents_whole": IntervalMask.documents(LENGTH, ends, is_causal=False),
        "prefix": IntervalMask.prefix(LENGTH, 20),
        "padding": IntervalMask.padding(LENGTH, 44),
        "padding_left": IntervalMask.padding(LENGTH, 44, side="left"),
        "chunked": IntervalMask.chunked(LENGTH, size=16),
        "tree": IntervalMask.tree_from_parents(parents),
        "tree_nodes": IntervalMask.tree(nodes, leave),
        "from_bool_interval": IntervalMask.from_bool((columns <= queries) & (columns * 2 >= queries)),
        "from_function_interval": IntervalMask.from_function(
            lambda b, h, q, k: (q - k).abs() + (k % 8) < 12, None, None, LENGTH, LENGTH
        ),
        "top_k": IntervalMask.top_k(scores, 12),
        "top_k_documents": IntervalMask.top_k(scores, 8, base=IntervalMask.documents(LENGTH, ends)),
        "top_k_local": IntervalMask.top_k(scores, 6, local=8, sink_keys=2),
        "top_k_whole": IntervalMask.top_k(scores, 12, is_causal=False),
        "intersection": IntervalMask.documents(LENGTH, ends) & IntervalMask.sliding_window(LENGTH, left=11),
        "from_bool": BlockMask.from_bool(odd, block_size=32),
        "from_blocks": BlockMask.from_blocks(table, block_size=32),
        "from_function": BlockMask.from_function(
            lambda b, h, q, k: (q // 48 + k // 48) % 2 == 0, None, None, 192, 192, block_size=32
        ),
        "from_flex": flex_mask(),
        "lists": IndexMask((pairs[..., :10] * LENGTH).int()),
        "lists_top_k": IndexMask.top_k(pairs, 8, local=6, sink_keys=2),
        "lists_blocks": IndexMask.top_k(pairs[..., :16], 3, block_size=4, local=4),
        "lists_from_bool": IndexMask.from_bool(chosen.repeat_interleave(8, 3), block_size=8),
        "lists_documents": IndexMask.top_k(pairs, 8, local=6, base=documents) & documents,
        "combined": IntervalMask.causal(192) & BlockMask.from_blocks(table, block_size=32),
    }


def draw_gallery(folder: Path) -> None:
    for name, mask in gallery().items():
        figure, ax = pyplot.subplots(figsize=(2.6, 2.6), layout="constrained")
        mask.plot(mask.shape[2] if not isinstance(mask, IntervalMask) else LENGTH, ax=ax)
        ax.tick_params(labelsize=7)
        save(figure, folder / f"mask_{name}.svg")
    figure, ax = pyplot.subplots(figsize=(5, 3), layout="constrained")
    gallery()["top_k"].plot(ax=ax)
    save(figure, folder / "lifetimes.svg")


def draw_all(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with matplotlib.rc_context(RC):
        draw_gallery(folder)
    draw_committed(ROOT, folder)


if __name__ == "__main__":
    draw_all(ROOT / "docs/generated")
