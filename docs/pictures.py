"""Draws the other pictures of the pages: each mask constructor, and plots of the committed results. ``python docs/pictures.py`` rewrites them.

They lie in docs/generated/ and are committed, so that pages show them wherever they are read. ``--check`` (in ``make docs``) fails when one
is not what this script draws. Their text depends on matplotlib's version: the docs and test groups of pyproject.toml pin it, and pictures
of another version are not compared.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch

matplotlib.use("Agg")
from dmattn import BlockMask, IntervalMask
from matplotlib import pyplot
from matplotlib.figure import Figure
from torch.nn.attention.flex_attention import create_block_mask

RESULTS = Path(__file__).parent.parent / "benchmarks/results/nvidia-h200/cuda.json"
COMMITTED = Path(__file__).parent / "generated"
BLUE, ORANGE, GREEN, GREY = "#2f6fb0", "#e08e45", "#4d9a6a", "#7b8794"
LENGTH = 64


def flex_mask() -> BlockMask:
    return BlockMask.from_flex(
        create_block_mask(lambda b, h, q, k: (q - k).abs() < 90, None, None, 256, 256, device="cpu", BLOCK_SIZE=64)
    )


def gallery() -> dict[str, IntervalMask | BlockMask | Any]:
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
    return {
        "intervals": IntervalMask(keys, keys + keys % 16 + 1),
        "causal": IntervalMask.causal(LENGTH),
        "sliding_window": IntervalMask.sliding_window(LENGTH, left=11, right=3),
        "streaming": IntervalMask.streaming(LENGTH, sink=4, local=12),
        "documents": IntervalMask.documents(LENGTH, ends),
        "documents_whole": IntervalMask.documents(LENGTH, ends, causal=False),
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
        "top_k_local": IntervalMask.top_k(scores, 6, local=8, sink=2),
        "top_k_whole": IntervalMask.top_k(scores, 12, causal=False),
        "intersection": IntervalMask.documents(LENGTH, ends) & IntervalMask.sliding_window(LENGTH, left=11),
        "from_bool": BlockMask.from_bool(odd, block_size=32),
        "from_blocks": BlockMask.from_blocks(table, block_size=32),
        "from_function": BlockMask.from_function(
            lambda b, h, q, k: (q // 48 + k // 48) % 2 == 0, None, None, 192, 192, block_size=32
        ),
        "from_flex": flex_mask(),
        "combined": IntervalMask.causal(192) & BlockMask.from_blocks(table, block_size=32),
    }


def draw_gallery(folder: Path) -> None:
    for name, mask in gallery().items():
        figure, ax = pyplot.subplots(figsize=(2.6, 2.6), layout="constrained")
        mask.plot(mask.shape[-2] if not isinstance(mask, IntervalMask) else LENGTH, ax=ax)
        ax.tick_params(labelsize=7)
        save(figure, folder / f"mask_{name}.svg")
    figure, ax = pyplot.subplots(figsize=(5, 3), layout="constrained")
    gallery()["top_k"].plot(ax=ax)
    save(figure, folder / "lifetimes.svg")


def rows(**wanted: Any) -> list[dict[str, Any]]:
    """The measured rows that have these values, by length."""
    found = [row for row in json.loads(RESULTS.read_text())["rows"] if all(row[name] == value for name, value in wanted.items())]
    return sorted(found, key=lambda row: row["length"])


def two_plots(title: str) -> tuple[Figure, Any]:
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.2), layout="constrained", sharey=True)
    figure.suptitle(title, fontsize=11)
    for ax, name in zip(axes, ("forward", "backward"), strict=True):
        ax.set_title(name, fontsize=10)
        ax.grid(alpha=0.3)
    return figure, axes


def by_length(ax: Any) -> None:
    lengths = [4096, 16384, 65536]
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
    ax.set_xlabel("tokens")


def draw_speed_over_length(path: Path) -> None:
    figure, axes = two_plots("Dynamic masks: how much faster than dense causal cuDNN")
    for ax, name in zip(axes, ("forward", "backward"), strict=True):
        measured = rows(kind="dma", is_causal=True, scores="random", heads=16)
        lengths = [row["length"] for row in measured]
        for source, color, words in (("medians", BLUE, "whole eager calls"), ("kernel_medians", ORANGE, "kernels alone")):
            ax.plot(
                lengths, [row[source]["peer_" + name] / row[source][name] for row in measured], "o-", color=color, label=words
            )
        ax.axhline(1, color=GREY, lw=1)
        ax.set_yscale("log")
        ax.set_yticks([1, 2, 5, 10, 20], ["1x", "2x", "5x", "10x", "20x"])
        ax.minorticks_off()
        by_length(ax)
    axes[0].legend(fontsize=8)
    save(figure, path)


def draw_time_over_length(path: Path) -> None:
    figure, axes = two_plots("Time of the kernels alone")
    for ax, name in zip(axes, ("forward", "backward"), strict=True):
        measured = rows(kind="dma", is_causal=True, scores="random", heads=16)
        lengths = [row["length"] for row in measured]
        ax.plot(
            lengths,
            [1e3 * row["kernel_medians"]["peer_" + name] for row in measured],
            "o-",
            color=GREY,
            label="cuDNN, dense causal",
        )
        ax.plot(lengths, [1e3 * row["kernel_medians"][name] for row in measured], "o-", color=BLUE, label="dmattn, dynamic mask")
        for row in measured:
            at = (row["length"], 1e3 * row["kernel_medians"][name])
            ax.annotate(f"{row['window']:,}", at, (0, -13), textcoords="offset points", fontsize=7, ha="center")
        ax.set_yscale("log")
        ax.set_ylim(0.03, 500)
        ax.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
        by_length(ax)
    axes[0].set_ylabel("milliseconds")
    axes[0].legend(fontsize=8)
    save(figure, path)


def draw_density(path: Path) -> None:
    figure, axes = two_plots("Block masks of 128 x 128, 16,384 tokens: kernels alone")
    for ax, name in zip(axes, ("forward", "backward"), strict=True):
        measured = sorted(rows(kind="blocks"), key=lambda row: row["density"])
        density = [row["density"] for row in measured]
        times = [1e3 * row["kernel_medians"][name] for row in measured]
        ax.plot(
            density,
            [1e3 * row["kernel_medians"]["peer_" + name] for row in measured],
            "o-",
            color=GREY,
            label="FlexAttention, compiled",
        )
        ax.plot(density, times, "o-", color=BLUE, label="dmattn")
        ax.plot(density, [times[-1] * share for share in density], ":", color=BLUE, lw=1, label="in proportion to density")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xticks(density, [f"{share:g}" for share in density])
        ax.minorticks_off()
        ax.set_xlabel("share of blocks that are visible")
    axes[0].set_yticks([0.2, 0.5, 1, 2, 5, 10], ["0.2", "0.5", "1", "2", "5", "10"])
    axes[0].set_ylabel("milliseconds")
    axes[0].legend(fontsize=8)
    save(figure, path)


def draw_memory(path: Path) -> None:
    figure, ax = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    measured = rows(kind="dma", is_causal=True, scores="random", heads=16)
    lengths = [row["length"] for row in measured]
    dense = [3 * row["kv_heads"] * row["length"] ** 2 / 2**20 for row in measured]
    ax.plot(lengths, dense, ":", color=GREY, label="a bool mask and a bfloat16 bias, [16, N, N] (computed)")
    for name, color in (("backward", ORANGE), ("forward", BLUE)):
        taken = [row["extra_bytes"][name] / 2**20 for row in measured]
        ax.plot(lengths, taken, "o-", color=color, label=f"dmattn, {name} (measured)")
    ax.set_yscale("log")
    ax.set_ylim(1, 2e7)
    ax.set_yticks([1, 100, 1e4, 1e6], ["1 MB", "100 MB", "10 GB", "1 TB"])
    ax.set_title("Memory beyond inputs and results", fontsize=11)
    ax.grid(alpha=0.3)
    by_length(ax)
    ax.legend(fontsize=8)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Writes a figure with coordinates of two decimals, which all machines agree on."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Format": None, "Type": None})
    pyplot.close(figure)
    rounded = re.sub(r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", text.getvalue())
    path.write_text("".join(f"{line.rstrip()}\n" for line in rounded.splitlines()))


PLOTS: dict[str, Callable[[Path], None]] = {
    "speed_over_length": draw_speed_over_length,
    "time_over_length": draw_time_over_length,
    "density": draw_density,
    "memory": draw_memory,
}


def draw_all(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "dmattn", "svg.fonttype": "none", "font.size": 9}):
        draw_gallery(folder)
        for name, draw in PLOTS.items():
            draw(folder / f"{name}.svg")


def content_of(path: Path) -> str:
    """A picture's text with the pixels of the images in it, whose compression is not the same everywhere."""

    def pixels(found: re.Match[str]) -> str:
        image = pyplot.imread(io.BytesIO(base64.b64decode(found[1])))
        return hashlib.sha256(image.tobytes()).hexdigest() + '"'

    text = re.sub(r'data:image/png;base64,\s*([^"]+)"', pixels, path.read_text())
    return re.sub(r'id="image\w+"', "", text)


def version_of(path: Path) -> str:
    """The version of matplotlib that drew a picture."""
    found = re.search(r"Matplotlib v([\w.]+),", path.read_text())
    return found[1] if found else ""


def changed(committed: Path = COMMITTED) -> list[str]:
    """Names of the pictures that are not what this script draws now: other ones, missing ones, and ones that nothing draws."""
    with tempfile.TemporaryDirectory() as folder:
        draw_all(Path(folder))
        drawn = {path.name: content_of(path) for path in Path(folder).iterdir()}
    there = {path.name: content_of(path) for path in committed.iterdir()}
    return sorted(name for name in drawn.keys() | there.keys() if drawn.get(name) != there.get(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed pictures instead of writing them")
    if not parser.parse_args().check:
        draw_all(COMMITTED)
        return
    versions = {version_of(path) for path in COMMITTED.iterdir()}
    if versions != {matplotlib.__version__}:
        print(f"docs/generated: drawn by matplotlib {', '.join(versions)}, not compared with {matplotlib.__version__}")
    elif names := changed():
        sys.exit(f"docs/generated: {', '.join(names)}: not what docs/pictures.py draws; run it and commit them")


if __name__ == "__main__":
    main()
