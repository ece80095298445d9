"""Tables of the page "Does it learn?", from quality.jsonl of every machine in benchmarks/results, and the form in which runs are kept there."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dmattn_bench.tables import markdown

Run = dict[str, Any]
TABLES: dict[str, Callable[[dict[str, Any]], bool]] = {  # which settings belong to which table
    "quality-text": lambda s: s["task"] == "text" and not s["seconds"],
    "quality-seconds": lambda s: s["task"] == "text" and s["seconds"] > 0,
    "quality-headers": lambda s: s["task"] == "headers",
    "quality-series": lambda s: s["task"] == "series",
    "quality-recall": lambda s: s["task"] == "mqar",
    "quality-passkey": lambda s: s["task"] == "passkey",
}
NAMES = {  # of the models that are compared with each other, by the name of their runs
    "query+local+recency+barely+rows4+peak+explore+last": "per-query",
    "all heads select": "per-query",
    "query+local+recency+mixed+barely+rows4+peak+explore+last": "half local",
    "taught+local4+recency+mixed+rows4+peak+explore+last+nearby": "per-key",
    "recommended": "per-key",
    "dense+recency+barely": "dense+",
    "sliding+recency+mixed+barely+hybrid": "hybrid",
    "sliding+recency+mixed+barely": "sliding+",
}
PARTS_OF_THE_CURVE = ("step", "seconds", "held_bits", "held_accuracy", "near_accuracy")


def kept(run: Run) -> Run:
    """A run as it is committed: without what neither a table nor a drawing needs."""
    curve = [
        {
            name: round(point[name], 4)
            for name in PARTS_OF_THE_CURVE
            if name in point and (name != "held_bits" or "held_accuracy" not in point)
        }
        for point in run["curve"]
    ]
    parts = ("name", "complete", "settings", "parameters", "steps", "seconds", "tokens_per_second", "machine", "cuda", "torch", "commit",
             "uncommitted_changes", "date")  # fmt: skip
    return {name: run[name] for name in parts} | {"curve": curve}


def described(s: dict[str, Any]) -> str:
    """What tells a run's mask from others, in words."""
    if s["mask"] == "query":
        unit = "keys" if s["index_block"] == 1 else f"blocks of {s['index_block']} keys"
        words = [f"{unit} chosen by each query" + (", by their mean key" if s["index_pooled"] else ""), f"{s['local']} local"]
        words += [f"{s['index_heads']} index heads"] if s["index_heads"] != 4 else []
        words += [f"among the best {s['lifetime_window']} of a bounded cache"] if s["lifetime_window"] else []
        words += ["one list for all heads"] if s["index_shared"] else []
        words += [f"lists of one layer in {s['index_layers']}"] if s.get("index_layers", 1) > 1 else []
    elif s["mask"] == "gated":
        words = ["keys evicted by a gate" + (", distilled from the same model while dense" if s.get("distill") else "")]
    elif s["mask"] != "dynamic":
        words = [{"dense": "dense", "sliding": "sliding window", "streaming": "sinks and sliding window"}[s["mask"]]]
    else:
        taught = s["bias"] == "none"
        words = ["taught scores" if taught else f"{'Doge' if s['score'] == 'exp' else 'linear'} scores added to logits"]
        words += [f"{s['local']} local"] if s["local"] else []
        words += [f"{s['sink']} sinks"] if s["sink"] else []
    kv_heads = s.get("kv_heads") or s["heads"]
    where = f" in the first {s['plain_layers']} of {s['layers']} layers" if s.get("plain_layers") else ""
    words += (
        [f"{s['plain_heads']} of {kv_heads} heads with {s['plain_local']} local keys alone{where}"] if s["plain_heads"] else []
    )
    words += [f"one layer in {s['dense_every']} dense"] if s.get("dense_every") else []
    words += ["the others not rotated"] if s.get("rope_plain") else []
    words += ["recency"] if s["recency"] else []
    words += [f"{s['flat_heads']} heads without it"] if s.get("flat_heads") else []
    words += ["selection without it"] if s["recency"] and not s["recency_selects"] else []
    share = s.get("rope_share", 1.0)
    words += [] if share == 1 else ["no rotation" if share == 0 else f"{share:.0%} rotated"]
    words += ["dense at first"] if s["dense_until"] else []
    words += ["a falling window"] if s["anneal_until"] else []
    words += ["exploring queries"] if s["explore"] else []
    words += [f"{s['teach_rows']} teaching queries"] if s["teach"] and s["teach_rows"] != 64 else []
    words += ["half of them late"] if s.get("teach_last") else []
    words += ["the rest in the second half"] if s.get("teach_from") else []
    words += ["sharp queries weighted more"] if s.get("teach_peak") else []
    words += ["noise"] if s["noise"] else []
    words += ["scores that look ahead"] if s["lookahead"] else []
    return ", ".join(words)


def model_of(run: Run) -> str | None:
    """The model of NAMES that a run trained, or None. One with local heads has a name only if they see as many keys as the layers recommend."""
    name, s = NAMES.get(run["name"]), run["settings"]
    local_part = {"half local": 2, "per-key": 4}.get(name or "")
    return None if local_part and s["plain_local"] * local_part != s["visible"] else name


def called(run: Run) -> str:
    """What a table calls a run's model: its mask in words, after its name where it has one."""
    name = model_of(run)
    return (f"**{name}**: " if name else "") + described(run["settings"])


def runs_of(results: Path) -> list[Run]:
    """The runs of all machines. Those of the H100, and those of commit 90ae256, shared GPUs: their seconds cannot be compared."""
    return [json.loads(line) for path in sorted(results.glob("*/quality.jsonl")) for line in path.read_text().splitlines()]


def table(name: str, results: Path) -> str:
    """Markdown: the runs of each budget, the best first, means over seeds."""
    chosen = [run for run in runs_of(results) if TABLES[name](run["settings"]) and run["complete"]]
    groups: dict[str, list[Run]] = {}
    for run in chosen:
        groups.setdefault(heading(run), []).append(run)
    tables = [f"{title}:\n\n{rows_of(found)}" for title, found in groups.items()]
    return "\n\n".join([*tables, measured_on(chosen)])


def measured_on(runs: list[Run], with_commits: bool = True) -> str:
    """Each machine and torch once, with the days of its runs, and all commits."""
    days: dict[str, set[str]] = {}
    for run in runs:
        days.setdefault(f"{run['machine']['gpu']}, torch {run['torch']}", set()).add(run["date"][:10])
    about = "; ".join(
        f"{machine}, {min(found)}" + (f" to {max(found)}" if len(found) > 1 else "") for machine, found in sorted(days.items())
    )
    commits = ", ".join(sorted({run["commit"] for run in runs if run["commit"] and with_commits}))
    return about + (f"; commit {commits}." if commits else ".")


def latest(runs: list[Run]) -> list[Run]:
    """Of the runs of one name and seed the last."""
    return list({(run["name"], run["settings"]["seed"]): run for run in runs}.values())


def prefer_layer_convolution(runs: list[Run]) -> list[Run]:
    """The runs that convolve hidden states, as IndexedAttention does, of the models that have some; all runs of the others."""
    convolving = {model_of(run) for run in runs if run["settings"].get("conv_hidden")}
    return [run for run in runs if run["settings"].get("conv_hidden") or model_of(run) not in convolving]


def heading(run: Run) -> str:
    s = run["settings"]
    budget = f"{s['seconds']:.0f} seconds of training" if s["seconds"] else f"{s['steps']:,} steps"
    size = f"{s['layers']} layers of {s['width']}" + (f" with {s['heads']} heads on {s['kv_heads']}" if s.get("kv_heads") else "")
    convolved = "hidden states over" if s.get("conv_hidden") else "queries, keys and values over"
    size += f", convolution of {convolved} {s['conv']} tokens" if s.get("conv", 1) > 1 else ""
    asked = "" if s["task"] in ("text", "headers", "series") else f", {s['pairs']} pairs"
    asked += f" of {s['symbols']} symbols" if s["task"] == "mqar" else ""
    return f"{s['length']:,} tokens{asked}, {budget}, {size}, learning rate {s['lr']:g}"


def rows_of(runs: list[Run]) -> str:
    recalls = "held_accuracy" in runs[0]["curve"][-1]
    column = "held_accuracy" if recalls else "held_bits"
    newest = {(called(run), run["settings"]["visible"], run["settings"]["seed"]): run for run in runs}
    by_what: dict[tuple[str, int], list[Run]] = {}
    for (what, visible, _), run in newest.items():
        by_what.setdefault((what, visible), []).append(run)
    reached = ["right beyond the window", "right nearby"] if recalls else ["held-out bits per byte", "million tokens"]
    lines = []

    def mean(found: list[Run], name: str) -> float:
        return statistics.fmean(run["curve"][-1][name] for run in found)

    for (what, visible), found in sorted(by_what.items(), key=lambda item: mean(item[1], column), reverse=recalls):
        seen = "all" if found[0]["settings"]["mask"] == "dense" else f"{visible:,}"
        if recalls:
            cells = [f"{mean(found, name):.1%}" for name in ("held_accuracy", "near_accuracy")]
        else:
            values = [run["curve"][-1][column] for run in found]
            spread = f" ± {max(abs(value - statistics.fmean(values)) for value in values):.3f}" if len(values) > 1 else ""
            tokens = statistics.fmean(run["steps"] * run["settings"]["batch"] * run["settings"]["length"] for run in found) / 1e6
            cells = [f"{mean(found, column):.3f}{spread}", f"{tokens:.0f}"]
        lines.append([what, seen, *cells, str(len(found))])
    return markdown(["mask", "visible", *reached, "seeds"], lines, texts=1)
