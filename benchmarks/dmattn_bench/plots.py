"""Plots of results, with matplotlib: speed and memory over length, time over density, decoding, a roofline, learning."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import re
import statistics
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dmattn_bench.page_tables import share_of
from dmattn_bench.quality_report import NAMES, described
from dmattn_bench.records import Result, Row, first_peer

BLUE, ORANGE, GREEN, GREY = "#2f6fb0", "#e08e45", "#4d9a6a", "#7b8794"
COLORS = (BLUE, ORANGE, GREEN, GREY, "#8d5fa8", "#b5483d")
KIND_COLORS = (*COLORS, "#c9a227", "#2a9d9b")  # one for each kind of case
STYLE = {"svg.hashsalt": "dmattn", "svg.fonttype": "none", "font.size": 9}
MOST_CURVES = len(COLORS)
# Settings of runs that are compared.
BUDGET = ("steps", "seconds", "length", "visible", "lr", "layers", "width", "pairs", "symbols")
MOST_SPREAD = 1.1  # between tokens per second of the fastest and the slowest seed
TASKS = {"text": "text", "mqar": "names and their values", "passkey": "secrets in source text"}
Run = dict[str, Any]


class NothingToDrawError(Exception):
    """The results hold nothing of what a plot shows."""


def pyplot() -> Any:
    """matplotlib's, drawing to files.

    Raises:
        ImportError: matplotlib is not installed.
    """
    importlib.import_module("matplotlib").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def is_possible() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def rows(results: list[Result], least: int = 1, **wanted: Any) -> list[Row]:
    """The measured rows of the first result that has as many with these values, by length.

    Raises:
        NothingToDrawError: no result has.
    """
    for result in results:
        found = [row for row in result["rows"] if all(row.get(name) == value for name, value in wanted.items())]
        found = [row for row in found if "medians" in row or "us" in row]
        if len(found) >= least:
            return sorted(found, key=lambda row: row.get("length", 0))
    raise NothingToDrawError


def two_plots(title: str) -> tuple[Any, Any]:
    figure, axes = pyplot().subplots(1, 2, figsize=(8, 3.2), layout="constrained", sharey=True)
    figure.suptitle(title, fontsize=11)
    for ax, name in zip(axes, ("forward", "backward"), strict=True):
        ax.set_title(name, fontsize=10)
        ax.grid(alpha=0.3)
    return figure, axes


def by_length(ax: Any, lengths: list[int]) -> None:
    ticks = [4096, 16384, 65536] if 4096 in lengths else sorted(set(lengths))[::2]
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [f"{length:,}" for length in ticks])
    ax.set_xlabel("tokens")


def kernels(row: Row) -> dict[str, float]:
    """Times of kernels alone, on a CPU of calls."""
    found: dict[str, float] = row["kernel_medians"] or row["medians"]
    return found


def has_times(row: Row) -> bool:
    """Whether forward and backward were timed, ours and the first peer's, in calls and, if any, as kernels alone."""
    wanted = {"forward", "backward", "peer_forward", "peer_backward"}
    return wanted <= row["medians"].keys() and wanted <= kernels(row).keys()


def dynamic(results: list[Result]) -> list[Row]:
    """Causal dynamic masks with random scores, one row a length, vs. a dense peer."""
    for result in results:
        chosen = [
            row for row in result["rows"]
            if row.get("kind") == "dma" and row["is_causal"] and row["scores"] == "random" and "peer_forward" in row.get("medians", {})
            and not row.get("documents") and not row.get("local")
        ]  # fmt: skip
        chosen = [row for row in chosen if has_times(row)]
        heads = max((row["heads"] for row in chosen if row["heads"] == row["kv_heads"]), default=0)
        by_size = {row["length"]: row for row in reversed(chosen) if row["heads"] == row["kv_heads"] == heads}
        if len(by_size) > 1:
            return [by_size[length] for length in sorted(by_size)]
    raise NothingToDrawError


def peer_of(row: Row) -> str:
    name = first_peer(row)
    return {"F.scaled_dot_product_attention by CUDNN_ATTENTION": "cuDNN", "F.scaled_dot_product_attention": "torch's SDPA"}.get(
        name, name
    )


def draw_speed_over_length(results: list[Result], path: Path) -> None:
    measured = dynamic(results)
    figure, axes = two_plots(f"Dynamic masks: speedup over dense causal {peer_of(measured[0])}")
    for ax, name in zip(axes, ("forward", "backward"), strict=True):
        lengths = [row["length"] for row in measured]
        for source, color, words in (("medians", BLUE, "whole eager calls"), ("kernel_medians", ORANGE, "kernels alone")):
            if all(row[source] for row in measured):
                ratios = [row[source]["peer_" + name] / row[source][name] for row in measured]
                ax.plot(lengths, ratios, "o-", color=color, label=words)
        ax.axhline(1, color=GREY, lw=1)
        ax.set_yscale("log")
        ax.set_yticks([1, 2, 5, 10, 20], ["1x", "2x", "5x", "10x", "20x"])
        ax.minorticks_off()
        by_length(ax, lengths)
    axes[0].legend(fontsize=8)
    save(figure, path)


def draw_time_over_length(results: list[Result], path: Path) -> None:
    measured = dynamic(results)
    figure, axes = two_plots("Time of the kernels alone" if measured[0]["kernel_medians"] else "Time of calls")
    for ax, name in zip(axes, ("forward", "backward"), strict=True):
        lengths = [row["length"] for row in measured]
        theirs = [1e3 * kernels(row)["peer_" + name] for row in measured]
        ax.plot(lengths, theirs, "o-", color=GREY, label=f"{peer_of(measured[0])}, dense causal")
        ours = [1e3 * kernels(row)[name] for row in measured]
        ax.plot(lengths, ours, "o-", color=BLUE, label="dmattn, dynamic mask")
        for row, time in zip(measured, ours, strict=True):
            at = (row["length"], time)
            ax.annotate(f"{row['window']:,}", at, (0, -13), textcoords="offset points", fontsize=7, ha="center")
        ax.set_yscale("log")
        if min(ours) > 0.03 and max(theirs) < 500:
            ax.set_ylim(0.03, 500)
            ax.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
        by_length(ax, lengths)
    axes[0].set_ylabel("milliseconds")
    axes[0].legend(fontsize=8)
    save(figure, path)


def draw_density(results: list[Result], path: Path) -> None:
    measured = sorted(rows(results, 2, kind="blocks"), key=lambda row: row["density"])
    measured = [row for row in measured if row.get("block", 128) == 128 and {"forward", "backward"} <= kernels(row).keys()]
    if len({row["density"] for row in measured}) < 2:
        raise NothingToDrawError
    what = "kernels alone" if measured[0]["kernel_medians"] else "calls"
    figure, axes = two_plots(f"Block masks of 128 x 128, {measured[0]['length']:,} tokens: {what}")
    for ax, name in zip(axes, ("forward", "backward"), strict=True):
        density = [row["density"] for row in measured]
        times = [1e3 * kernels(row)[name] for row in measured]
        theirs = [1e3 * kernels(row)["peer_" + name] for row in measured if "peer_" + name in kernels(row)]
        if len(theirs) == len(density):
            words = "FlexAttention, compiled" if "flex" in peer_of(measured[0]) else peer_of(measured[0])
            ax.plot(density, theirs, "o-", color=GREY, label=words)
        ax.plot(density, times, "o-", color=BLUE, label="dmattn")
        proportional = [times[-1] * share / density[-1] for share in density]
        ax.plot(density, proportional, ":", color=BLUE, lw=1, label="in proportion to density")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xticks(density, [f"{share:g}" for share in density])
        ax.minorticks_off()
        ax.set_xlabel("share of blocks that are visible")
    axes[0].set_yticks([0.2, 0.5, 1, 2, 5, 10], ["0.2", "0.5", "1", "2", "5", "10"])
    axes[0].set_ylabel("milliseconds")
    axes[0].legend(fontsize=8)
    save(figure, path)


def draw_memory(results: list[Result], path: Path) -> None:
    measured = [row for row in dynamic(results) if {"forward", "backward"} <= row.get("extra_bytes", {}).keys()]
    if not measured:
        raise NothingToDrawError
    figure, ax = pyplot().subplots(figsize=(6, 3.2), layout="constrained")
    lengths, heads = [row["length"] for row in measured], measured[0]["kv_heads"]
    wide = 4 if measured[0]["dtype"] == "float32" else 2
    dense = [(1 + wide) * heads * length**2 / 2**20 for length in lengths]
    words = f"a bool mask and a {measured[0]['dtype']} bias, [{heads}, N, N] (computed)"
    ax.plot(lengths, dense, ":", color=GREY, label=words)
    for name, color in (("backward", ORANGE), ("forward", BLUE)):
        taken = [max(row["extra_bytes"][name], 1) / 2**20 for row in measured]
        ax.plot(lengths, taken, "o-", color=color, label=f"dmattn, {name} (measured)")
    ax.set_yscale("log")
    if min(lengths) >= 4096:
        ax.set_ylim(1, 2e7)
        ax.set_yticks([1, 100, 1e4, 1e6], ["1 MB", "100 MB", "10 GB", "1 TB"])
    else:
        ax.set_ylabel("MB")
    ax.set_title("Memory beyond inputs and results", fontsize=11)
    ax.grid(alpha=0.3)
    by_length(ax, lengths)
    ax.legend(fontsize=8)
    save(figure, path)


def draw_decode_over_context(results: list[Result], path: Path) -> None:
    """A step over all keys, ours and the peers', and one with a bounded cache where a result has it."""
    measured = [
        row for row in rows(results, 3, kind="decode")
        if row["batch"] == 1 and row["queries"] == 1 and not row["page_size"] and not row["has_bias"]
    ]  # fmt: skip
    if len(measured) < 2:
        raise NothingToDrawError
    figure, ax = pyplot().subplots(figsize=(6, 3.2), layout="constrained")
    shape = measured[0]
    ax.plot([row["length"] for row in measured], [row["us"] for row in measured], "o-", color=BLUE, label="dmattn, all keys")
    names = list(dict.fromkeys(name for row in measured for name in row["peer_us"]))
    for name, color in zip(names, (GREY, GREEN, ORANGE), strict=False):
        having = [row for row in measured if name in row["peer_us"]]
        ax.plot(
            [row["length"] for row in having],
            [row["peer_us"][name] for row in having],
            "o-",
            color=color,
            label=f"{name}, all keys",
        )
    steps = [row for result in results for row in result["rows"] if row.get("kind") == "step" and row.get("batch") == 1]
    if steps:
        reached = max(row["context"] for row in steps)
        us = statistics.fmean(row["us"] for row in steps)
        ends = [shape["length"], max(reached, measured[-1]["length"])]
        ax.plot(ends, [us, us], "--", color=ORANGE, label=f"dmattn, bounded cache of {steps[0]['keys']:,} keys")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    lengths = [row["length"] for row in measured]
    ticks = sorted({*lengths[::2], lengths[-1]})
    ax.set_xticks(ticks, [f"{length:,}" for length in ticks])
    ax.set_xlabel("keys in the context")
    ax.set_ylabel("microseconds")
    ax.set_title(f"One token, {shape['heads']} heads on {shape['kv_heads']}", fontsize=11)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    save(figure, path)


def draw_beside_dense(results: list[Result], path: Path) -> None:
    """Of benchmarks/sweep.py: a line for each window, a plot for each number of heads."""
    measured = next((one["rows"] for one in results if one["rows"] and "dense_forward" in one["rows"][0]), None)
    if measured is None:
        raise NothingToDrawError
    all_heads = sorted({row["heads"] for row in measured})
    figure, axes = pyplot().subplots(
        2, len(all_heads), figsize=(8, 5), layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    figure.suptitle("Dynamic masks: speedup over our own dense causal attention", fontsize=11)
    for line, name in zip(axes, ("forward", "backward"), strict=True):
        for ax, heads in zip(line, all_heads, strict=True):
            here = [row for row in measured if row["heads"] == heads]
            for share, color in zip(sorted({row["share"] for row in measured}), KIND_COLORS, strict=False):
                drawn = [row for row in here if row["share"] == share]
                words = f"window {share_of(drawn[0])}" if drawn else None
                ratios = [row[f"dense_{name}"] / row[name] for row in drawn]
                ax.plot([row["length"] for row in drawn], ratios, "o-", ms=3, color=color, label=words)
            ax.axhline(1, color="black", lw=0.8)
            ax.set_yscale("log")
            ax.set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5x", "1x", "2x", "5x", "10x", "20x", "50x"])
            ax.minorticks_off()
            by_length(ax, [row["length"] for row in measured])
            ax.set_title(f"{name}, {heads} head{'s' * (heads > 1)}", fontsize=9)
            ax.grid(alpha=0.3)
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=6)
    save(figure, path)


def intensity(row: Row) -> float:
    """Operations of the forward pass for each byte of query, key, value and result, each moved once."""
    heads = 2 * row["heads"] + 2 * row["kv_heads"]
    moved = row["batch"] * row["length"] * row["head_dim"] * heads * (4 if row["dtype"] == "float32" else 2)
    return float(4 * row["head_dim"] * row["pairs"] / moved)


def rates_of(row: Row) -> dict[str, float]:
    """10^12 operations a second of kernels alone, on a CPU of calls."""
    found: dict[str, float] = row.get("kernel_tflops") or row.get("tflops", {})
    return found


def draw_roofline(results: list[Result], path: Path) -> None:
    """Forward passes of all cases under what this machine gave to a product of matrices and to a copy."""
    of_each = (
        (one, [row for row in one["rows"] if row.get("pairs") and "forward" in rates_of(row) and row["dtype"] in one["ceiling"]])
        for one in results
        if one.get("ceiling")
    )
    result, measured = next((found for found in of_each if found[1]), (None, []))
    if result is None:
        raise NothingToDrawError
    most = result["ceiling"][measured[0]["dtype"]]
    figure, ax = pyplot().subplots(figsize=(6, 3.2), layout="constrained")
    at = [intensity(row) for row in measured]
    ends = [min(*at, 10.0), max(*at, 2000.0)]
    corner = most["tflops"] * 1e3 / most["gigabytes_per_second"]
    line = sorted({ends[0], corner, ends[1]})
    roof = [min(most["tflops"], x * most["gigabytes_per_second"] / 1e3) for x in line]
    ax.plot(
        line,
        roof,
        color="black",
        lw=1,
        label=f"a product of matrices: {most['tflops']:.3g} TFLOP/s; a copy: {most['gigabytes_per_second']:,.0f} GB/s",
    )
    for number, kind in enumerate(dict.fromkeys(row["kind"] for row in measured)):
        color = KIND_COLORS[number % len(KIND_COLORS)]
        found = [row for row in measured if row["kind"] == kind]
        rates = [rates_of(row)["forward"] for row in found]
        ax.plot([intensity(row) for row in found], rates, "o", color=color, ms=4, label="dynamic mask" if kind == "dma" else kind)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ticker = importlib.import_module("matplotlib.ticker")
    ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    ax.yaxis.set_minor_formatter(ticker.NullFormatter())
    ax.set_xlabel("operations for each byte of query, key, value and result")
    ax.set_ylabel("TFLOP/s on visible pairs")
    ax.set_title("Forward passes under the roofline", fontsize=11)
    ax.grid(alpha=0.3)
    figure.legend(fontsize=7, loc="outside lower center", ncols=3)
    save(figure, path)


# Learning ---------------------------------------------------------------------------------------------------------------------------


def chosen_runs(runs: list[Run], task: str) -> dict[str, list[Run]]:
    """Of the task and budget with the most runs, the models of NAMES and the variants with the most seeds; of a seed the latest run.

    Raises:
        NothingToDrawError: there are no runs of the task.
    """
    by_budget: dict[tuple[Any, ...], dict[str, dict[int, Run]]] = {}
    for run in runs:
        s = run["settings"]
        if s["task"] == task and run["complete"]:
            recalls = any("held_accuracy" in point for point in run["curve"])  # not drawn beside what has bits alone
            budget = (recalls, *(s.get(name) for name in BUDGET))
            by_budget.setdefault(budget, {}).setdefault(run["name"], {})[s["seed"]] = run
    if not by_budget:
        raise NothingToDrawError
    names = max(by_budget.values(), key=lambda found: sum(map(len, found.values())))
    most = sorted(names, key=lambda name: (name not in NAMES, -len(names[name])))[:MOST_CURVES]
    repeated = [name for name in most if len(names[name]) > 1]
    return {name: list(names[name].values()) for name in sorted(repeated or most)}


def have_comparable_seconds(chosen: dict[str, list[Run]]) -> bool:
    """Whether seeds of a variant were equally fast. Where they were not, runs shared a GPU or came from other builds."""
    rates = [[run.get("tokens_per_second", 1.0) for run in found] for found in chosen.values()]
    return all(max(found) <= MOST_SPREAD * min(found) for found in rates)


def over_seeds(runs: list[Run], across: str, what: str) -> tuple[list[float], list[list[float]]]:
    """Moments that all runs reach, and what each run had then, linear between its evaluations."""
    curves = [[(point[across], point[what]) for point in run["curve"]] for run in runs]
    first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    moments = sorted({moment for curve in curves for moment, _ in curve if first <= moment <= last})

    def at(curve: list[tuple[float, float]], moment: float) -> float:
        after = next(place for place, (reached, _) in enumerate(curve) if reached >= moment)
        (x0, y0), (x1, y1) = curve[max(after - 1, 0)], curve[after]
        return y1 if x1 <= x0 or moment == x1 else y0 + (y1 - y0) * (moment - x0) / (x1 - x0)

    return moments, [[at(curve, moment) for curve in curves] for moment in moments]


def draw_learning(runs: list[Run], task: str, path: Path) -> None:
    """What was reached on held-out data over steps: means over seeds, and bands from least to most; also over seconds of training where
    these can be compared."""
    chosen = chosen_runs(runs, task)
    if not all(run["curve"] for found in chosen.values() for run in found):
        raise NothingToDrawError
    axes_of = {"step": "steps", "seconds": "seconds of training"} if have_comparable_seconds(chosen) else {"step": "steps"}
    names = [NAMES.get(name) or described(found[0]["settings"]) for name, found in chosen.items()]
    legend = ["\n".join(textwrap.wrap(words, 120)) for words in names]
    lines = sum(1 + words.count("\n") for words in legend)
    figure, drawn = pyplot().subplots(
        1, len(axes_of), figsize=(8, 3 + 0.14 * lines), layout="constrained", sharey=True, squeeze=False
    )
    axes = list(drawn[0])
    first = next(iter(chosen.values()))[0]
    recalls = "held_accuracy" in first["curve"][-1]
    what = "held_accuracy" if recalls else "held_bits"
    s = first["settings"]
    figure.suptitle(f"{TASKS.get(task, task)}: {s['length']:,} tokens, {s['visible']:,} visible but for dense", fontsize=11)
    for ax, (across, title) in zip(axes, axes_of.items(), strict=True):
        for words, found, color in zip(legend, chosen.values(), COLORS, strict=False):
            moments, values = over_seeds(found, across, what)
            label = f"{words} ({len(found)} seed{'s' * (len(found) > 1)})"
            ax.plot(moments, [statistics.fmean(at) for at in values], color=color, label=label)
            ax.fill_between(moments, [min(at) for at in values], [max(at) for at in values], color=color, alpha=0.2, lw=0)
        ax.set_xlabel(title)
        ax.grid(alpha=0.3)
        if not recalls:
            last = [run["curve"][-1][what] for found in chosen.values() for run in found]
            ax.set_ylim(min(last) - 0.03, max(last) + 0.4)
    axes[0].set_ylabel("right beyond the window" if recalls else "held-out bits per byte")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=7, loc="outside lower center")
    save(figure, path)


# Files ------------------------------------------------------------------------------------------------------------------------------


def save(figure: Any, path: Path) -> None:
    """Writes a figure with coordinates of two decimals, which all machines agree on."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Format": None, "Type": None})
    pyplot().close(figure)
    rounded = re.sub(r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", text.getvalue())
    path.write_text("".join(f"{line.rstrip()}\n" for line in rounded.splitlines()))


PLOTS: dict[str, Callable[[list[Result], Path], None]] = {
    "speed_over_length": draw_speed_over_length,
    "time_over_length": draw_time_over_length,
    "density": draw_density,
    "memory": draw_memory,
    "decode_over_context": draw_decode_over_context,
    "roofline": draw_roofline,
    "beside_dense": draw_beside_dense,
}


def draw_all(results: list[Result], runs: list[Run], folder: Path) -> list[str]:
    """Every plot that these results and training runs have something for; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    draws: dict[str, Callable[[Path], None]] = {name: functools.partial(draw, results) for name, draw in PLOTS.items()}
    for task in dict.fromkeys(run["settings"]["task"] for run in runs):
        draws[f"learning_{task}"] = functools.partial(draw_learning, runs, task)
    with importlib.import_module("matplotlib").rc_context(STYLE):
        for name, draw in draws.items():
            try:
                draw(folder / f"{name}.svg")
            except NothingToDrawError:
                continue
            drawn.append(name)
    return drawn
