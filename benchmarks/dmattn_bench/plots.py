"""Plots of results, with matplotlib: speed and time over length, time over density, decoding, learning."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dmattn_bench.front_page import LONG, RECALL, SHORT
from dmattn_bench.quality_report import NAMES, model_of, prefer_layer_convolution
from dmattn_bench.records import Result, Row, first_peer
from dmattn_bench.style import MODELS, OURS, OURS_TOO, RC, baseline, short

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
    figure.suptitle(title)
    for ax, name in zip(axes, ("forward", "backward"), strict=True):
        ax.set_title(name)
        ax.grid(alpha=0.3)
    return figure, axes


def by_length(ax: Any, lengths: list[int], label: str = "tokens") -> None:
    lengths = sorted(set(lengths))
    ticks = lengths if len(lengths) < 7 else lengths[::2]
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [short(length) for length in ticks])
    ax.minorticks_off()
    ax.set_xlabel(label)


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
    figure, axes = two_plots(f"Dynamic masks, compared with dense causal {peer_of(measured[0])}")
    for ax, name in zip(axes, ("forward", "backward"), strict=True):
        lengths = [row["length"] for row in measured]
        for source, color, words in (("medians", OURS, "whole calls"), ("kernel_medians", OURS_TOO, "kernels alone")):
            if all(row[source] for row in measured):
                ratios = [row[source]["peer_" + name] / row[source][name] for row in measured]
                ax.plot(lengths, ratios, "o-", color=color, label=words)
        ax.axhline(1, color=baseline(peer_of(measured[0])), lw=1.5, label=peer_of(measured[0]))
        ax.set_yscale("log")
        ax.set_yticks([1, 2, 5, 10, 20], ["1x", "2x", "5x", "10x", "20x"])
        by_length(ax, lengths)
    axes[0].set_ylabel("speedup")
    axes[0].legend()
    save(figure, path)


def draw_density(results: list[Result], path: Path) -> None:
    measured = sorted(rows(results, 2, kind="blocks"), key=lambda row: row["density"])
    measured = [row for row in measured if row.get("block", 128) == 128 and {"forward", "backward"} <= kernels(row).keys()]
    if len({row["density"] for row in measured}) < 2:
        raise NothingToDrawError
    what = "kernels alone" if measured[0]["kernel_medians"] else "whole calls"
    figure, axes = two_plots(f"Block masks of 128 x 128, {short(measured[0]['length'])} tokens: {what}")
    peer = "FlexAttention" if "flex" in peer_of(measured[0]) else peer_of(measured[0])
    for ax, name in zip(axes, ("forward", "backward"), strict=True):
        density = [row["density"] for row in measured]
        times = [1e3 * kernels(row)[name] for row in measured]
        theirs = [1e3 * kernels(row)["peer_" + name] for row in measured if "peer_" + name in kernels(row)]
        if len(theirs) == len(density):
            ax.plot(density, theirs, "o-", color=baseline(peer), label=peer)
        ax.plot(density, times, "o-", color=OURS, label="dmattn")
        proportional = [times[-1] * share / density[-1] for share in density]
        ax.plot(density, proportional, ":", color=OURS, lw=1, label="in proportion to density")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xticks(density, [f"{share:g}" for share in density])
        ax.minorticks_off()
        ax.set_xlabel("share of blocks that are visible")
    axes[0].set_yticks([0.2, 0.5, 1, 2, 5, 10], ["0.2", "0.5", "1", "2", "5", "10"])
    axes[0].set_ylabel("milliseconds")
    axes[0].legend()
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
    ax.plot([row["length"] for row in measured], [row["us"] for row in measured], "o-", color=OURS_TOO, label="dmattn, all keys")
    for name in dict.fromkeys(name for row in measured for name in row["peer_us"]):
        having = [row for row in measured if name in row["peer_us"]]
        times = [row["peer_us"][name] for row in having]
        ax.plot([row["length"] for row in having], times, "o-", color=baseline(name), label=f"{name}, all keys")
    lengths = [row["length"] for row in measured]
    steps = [row for result in results for row in result["rows"] if row.get("kind") == "step" and row.get("batch") == 1]
    if steps:
        lengths.append(max(max(row["context"] for row in steps), lengths[-1]))
        us = statistics.fmean(row["us"] for row in steps)
        ax.plot([lengths[0], lengths[-1]], [us, us], "-", color=OURS, label=f"dmattn, bounded, {short(steps[0]['keys'])} keys")
    ax.set_yscale("log")
    by_length(ax, lengths, "keys in the context")
    ax.set_ylabel("microseconds")
    ax.set_title(f"One token, {shape['heads']} heads on {shape['kv_heads']}")
    ax.grid(alpha=0.3)
    ax.legend()
    save(figure, path)


# Learning ---------------------------------------------------------------------------------------------------------------------------


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


def draw_curves(ax: Any, chosen: dict[str, list[Run]], across: str, what: str) -> None:
    """Means over seeds, and bands from the least to the most."""
    for model, found in chosen.items():
        color = MODELS[model]
        moments, values = over_seeds(found, across, what)
        ax.plot(moments, [statistics.fmean(at) for at in values], color=color, label=model)
        ax.fill_between(moments, [min(at) for at in values], [max(at) for at in values], color=color, alpha=0.2, lw=0)
    ax.set_xlabel({"step": "steps", "seconds": "seconds of training"}[across])
    ax.grid(alpha=0.3)


def draw_models(runs: list[Run], path: Path) -> None:
    """Bits over steps and over seconds, and associative recall beyond the window, of the models that were trained for each.

    Raises:
        NothingToDrawError: for one of them no model was trained.
    """
    panels = (
        ("8k tokens, equal steps", {**SHORT, "conv": 1}, "step", "held_bits", (0.75, 1.6)),
        ("32k tokens, equal time", LONG, "seconds", "held_bits", (0.6, 1.6)),
        ("associative recall, 16 pairs", RECALL, "step", "held_accuracy", (0, 1.02)),
    )
    figure, axes = pyplot().subplots(1, 3, figsize=(9, 3), layout="constrained")
    for ax, (title, settings, across, what, limits) in zip(axes, panels, strict=True):
        # A run that was stopped had the learning rates of a whole one until then, so its curve over steps counts.
        kept = [run for run in runs if (run["complete"] or across == "step") and settings.items() <= run["settings"].items()]
        of_seed = {(model_of(run), run["settings"]["seed"]): run for run in prefer_layer_convolution(kept)}
        chosen = {model: [run for (named, _), run in of_seed.items() if named == model] for model in NAMES.values()}
        if not any(chosen.values()):
            pyplot().close(figure)
            raise NothingToDrawError
        draw_curves(ax, {model: found for model, found in chosen.items() if found}, across, what)
        ax.set_title(title)
        ax.set_ylim(*limits)
        ax.set_ylabel("recall" if what == "held_accuracy" else "held-out bits per byte")
    axes[0].legend()
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
    "density": draw_density,
    "decode_over_context": draw_decode_over_context,
}


def draw_all(results: list[Result], runs: list[Run], folder: Path) -> list[str]:
    """Every plot that these results and training runs have something for; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    draws: dict[str, Callable[[Path], None]] = {name: functools.partial(draw, results) for name, draw in PLOTS.items()}
    draws["models"] = functools.partial(draw_models, runs)
    with importlib.import_module("matplotlib").rc_context(RC):
        for name, draw in draws.items():
            try:
                draw(folder / f"{name}.svg")
            except NothingToDrawError:
                continue
            drawn.append(name)
    return drawn
