"""The demo's two pictures: the loss curve, and how long one head keeps each byte of a text."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from torch import Tensor

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.collections import LineCollection

STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "axes.edgecolor": "#888888",
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titlepad": 12,
    "font.size": 10,
}


def plot_loss(
    path: Path, train: list[float], held_out: list[tuple[int, float]], peers: dict[str, list[tuple[int, float]]]
) -> None:
    """Bits per byte over steps, and what others came to; the last held-out value is written beside its point."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        axes.plot(range(1, len(train) + 1), train, color="#9ec5e8", linewidth=1.2, label="train, each step")
        steps, losses = zip(*held_out, strict=True)
        axes.plot(steps, losses, color="#c2410c", marker="o", markersize=4, linewidth=1.6, label="held out")
        for (name, curve), colour in zip(peers.items(), ("#6b7280", "#15803d"), strict=True):
            axes.plot(*zip(*curve, strict=True), color=colour, linewidth=1.2, linestyle="--", label=f"held out, {name}")
        axes.annotate(
            f"{losses[-1]:.2f}", (steps[-1], losses[-1]), (0, 8), textcoords="offset points", ha="center", color="#c2410c"
        )
        axes.set(xlabel="step", ylabel="bits per byte", title="A byte-level language model that learns which keys to keep")
        axes.set_xlim(0, len(train) * 1.03)
        axes.set_ylim(0, None)
        axes.legend(frameon=False)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def plot_lifetimes(path: Path, end: Tensor, text: bytes, window: int, local: int, where: str) -> None:
    """One bar per key, from its own position to the query that first does without it, and the text itself in the same colours.

    Args:
        end: [S], the first query that key j is hidden from (beyond S: never).
        text: the S bytes.
        window: best keys that a query sees beside the last ``local``.
        where: which layer and head, for the title.
    """
    length = len(text)
    last = end.clamp(max=length)
    life = [int(stop) - j for j, stop in enumerate(last.tolist())]
    share = [n / (length - j) for j, n in enumerate(life)]  # of the queries that come after the key, how many see it
    colours = plt.get_cmap("viridis_r")
    shade = plt.Normalize(0, 1)
    with plt.rc_context(STYLE):
        figure, (axes, page) = plt.subplots(1, 2, figsize=(13, 6.4), layout="constrained", width_ratios=[1.25, 1])
        bars = LineCollection(
            [[(j, j), (j + n, j)] for j, n in enumerate(life)], cmap=colours, norm=shade, linewidths=420 / length
        )
        bars.set_array(share)
        axes.add_collection(bars)
        axes.plot([0, length], [0, length], color="#888888", linewidth=0.8)
        band = f"the last {local} keys, which every query sees"
        axes.fill_between(
            [0, local, length], [0, 0, length - local], [0, local, length], color="#e8a33d", alpha=0.45, zorder=3, label=band
        )
        seen = window + local
        sliding = f"where a sliding window of {seen} would drop it"
        axes.plot([seen, length], [0, length - seen], color="#d1495b", linewidth=1.4, linestyle="--", label=sliding)
        axes.legend(loc="lower left", frameon=False)
        axes.set(
            xlim=(0, length),
            ylim=(length, 0),
            xlabel="query position (byte of the text)",
            ylabel="key position (byte of the text)",
        )
        axes.set_title(
            f"Lifetimes of keys, {where}: each key's bar spans the queries that see it,\nat most {window + local} bars over any query"
        )
        figure.colorbar(bars, ax=axes, label="share of the later queries that see the key", pad=0.02)
        draw_text(page, text, [colours(n) for n in share])
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw_text(page: plt.Axes, text: bytes, colours: list[tuple[float, float, float, float]], columns: int = 32) -> None:
    """The bytes as a grid of letters on their colours."""
    rows = -(-len(text) // columns)
    for j, (byte, colour) in enumerate(zip(text, colours, strict=True)):
        x, y = j % columns, j // columns
        page.add_patch(plt.Rectangle((x, y), 1, 1, color=colour, linewidth=0))
        letter = "\u21b5" if byte == 10 else chr(byte) if 32 <= byte < 127 else "\u00b7"
        dark = 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] < 0.5
        page.text(x + 0.5, y + 0.55, "\u2423" if letter == " " else letter, ha="center", va="center", family="monospace",
                  fontsize=7.5, color="white" if dark else "#222222", alpha=0.35 if letter == " " else 1.0)  # fmt: skip
    page.set(xlim=(0, columns), ylim=(rows, 0))
    page.set_aspect(1.9, anchor="N")
    page.axis("off")
    page.set_title("The same keys as letters\n(dark: kept)")
