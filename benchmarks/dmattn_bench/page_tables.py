"""Tables of single pages, each from one committed result."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import dmattn
import torch

from dmattn_bench import earlier_report
from dmattn_bench.records import BadResultError, rows_by_case
from dmattn_bench.tables import duration, markdown, plain_ratio, ratio

MACHINE = "nvidia-h200"
PREDICTED = (("dma", "32768, window 1024, D=128"), ("dma", "4096, window 410, D=128"))  # groups and cases
H100 = "nvidia-h100-80gb-hbm3"
FLA = "flash-linear-attention"
Row = dict[str, Any]


def table(name: str, results: Path) -> str:
    """The table of a page and a line of what it was measured on.

    Raises:
        BadResultError: the result is not there.
    """
    lines_of, path = TABLES[name][1], path_of(name, results)
    if not path.is_file():
        raise BadResultError(f"no results for bench:{name}: expected {path}")
    result = json.loads(path.read_text())
    return lines_of(result) + "\n\n" + measured_on([result] if "machine" in result else result["rows"])


def path_of(name: str, results: Path) -> Path:
    """The result of a table: on MACHINE where its file names no other."""
    file, _ = TABLES[name]
    return results / (file if "/" in file else f"{MACHINE}/{file}")


def measured_on(results: list[Row]) -> str:
    """Each machine, torch, commit and day once; rows of jobs have theirs with them."""
    words = [
        f"{one['machine']['gpu']}, torch {one['torch']}, commit {one['commit'][:9] or 'unknown'}"
        f"{' with uncommitted changes' * one['uncommitted_changes']}, {one['date'][:10]}"
        for one in results
    ]
    return "; ".join(dict.fromkeys(words)) + "."


def milliseconds(row: Row, name: str) -> str:
    return duration(row[name] / 1e3) if name in row else "-"


def ranks(result: Row) -> str:
    """Of dmattn_bench.context_parallel: forward, and forward and backward together."""
    titles = [
        "tokens",
        "forward, idle",
        "in a row",
        "one chunk alone",
        "torch's",
        "both directions, idle",
        "one chunk alone",
        "torch's",
    ]
    lines = []
    for row in result["rows"]:
        ours, alone, theirs = (row.get(key, {}) for key in ("ours", "one_chunk_alone", "torch_context_parallel_cudnn"))
        idle, in_a_row = (milliseconds(alone, name) for name in ("forward_ms", "forward_in_a_row_ms"))
        unit = idle[idle.index(" ") :] if " " in idle else " "
        both = (idle.removesuffix(unit) if in_a_row.endswith(unit) else idle) + f", {in_a_row}"
        cells = [milliseconds(ours, "forward_ms"), milliseconds(ours, "forward_in_a_row_ms"), both]
        cells += [milliseconds(theirs, "forward_ms")]
        cells += [milliseconds(of, "forward_backward_ms") for of in (ours, alone, theirs)]
        lines.append([f"{row['length']:,}", *cells])
    return markdown(titles, lines, texts=0)


def packs(result: Row) -> str:
    """Of benchmarks/varlen.py."""
    titles = ["pack, causal", "forward", "per pair vs. dense", "torch", "backward", "per pair vs. dense", "torch"]
    lines = []
    for row in result["rows"]:
        line = [f"{row['case']}: {row['tokens'] / 1e6:.1f} million tokens"]
        for part in ("forward", "backward"):
            theirs = "fails" if "torch" in row else milliseconds(row, f"torch_{part}_ms")
            line += [milliseconds(row, f"{part}_ms"), f"{row[f'{part}_over_proportional']:.2f}x", theirs]
        lines.append(line)
    return markdown(titles, lines, texts=1)


def predictions(result: Row) -> str:
    """What dmattn.stats predicts of cases of the workload pages, and their measured speedups over the first peer."""
    found = rows_by_case(result, "results of the workload pages")
    lines = []
    for case in PREDICTED:
        row = found[case]
        length, window = row["length"], row["window"]
        scores = torch.rand(1, 1, length, generator=torch.Generator().manual_seed(0))
        mask = dmattn.IntervalMask.top_k(scores, window)
        predicted = dmattn.stats((1, 1, length, row["head_dim"]), mask).predicted_speedup
        ratios = [row[times]["peer_forward"] / row[times]["forward"] for times in ("kernel_medians", "medians")]
        lines.append([f"{length:,} tokens, window {window:,}", *map(ratio, (predicted, *ratios))])
    return markdown(["causal, 16 heads of 128", "predicted", "kernels, forward", "whole call, forward"], lines, texts=1)


def training_steps(result: Row) -> str:
    """Of dmattn_bench.training_step: each length and number of ranks once."""
    found: dict[tuple[int, int], dict[str, Row]] = {}
    for row in result["rows"]:
        if not row.get("documents"):
            found.setdefault((row["length"], row["ranks"]), {})[row["name"]] = row
    lines = []
    for (length, count), both in found.items():
        ours, theirs = both["dynamic"], both["causal"]
        notes = ["one step each"] if len(ours["samples"]) == len(theirs["samples"]) == 1 else []
        notes += ["the baseline is not compiled"] if ours["compiled"] and not theirs["compiled"] else []
        words = f"{length:,}, {ours['window']:,}, {count}" + (f" ({'; '.join(notes)})" if notes else "")
        rates = [row["tokens_per_second"] for row in (ours, theirs)]
        lines.append([words, *(f"{rate:,.0f}" for rate in rates), plain_ratio(rates[0] / rates[1])])
    return markdown(["tokens, window, GPUs", "dynamic", "causal", "faster"], lines, texts=1)


def models(result: Row) -> str:
    """Of benchmarks/models.py: forward and backward, and peak memory."""
    found: dict[int, dict[str, Row]] = {}
    for row in result["rows"]:
        found.setdefault(row["length"], {})[row["name"]] = row
    names = dict.fromkeys(row["name"] for row in result["rows"])
    lines = []
    for length, at_length in found.items():
        line = [f"{length:,}"]
        for name in names:
            row = at_length.get(name, {})
            if "forward_ms" in row:
                line += [f"{row['forward_ms']:.0f} + {row['backward_ms']:.0f} ms", f"{row['peak_gib']:.1f} GiB"]
            else:
                line += ["out of memory" if row.get("out_of_memory") else "-", "-"]
        lines.append(line)
    return markdown(["tokens", *(title for name in names for title in (name, "peak memory"))], lines, texts=0)


def reductions(result: Row) -> str:
    """Of benchmarks/reduce.py."""
    names = ("reduce_sum", "torch_sum", "reduce_max", "torch_amax", "copy")
    titles = ["GB/s", "`reduce_sum`", "`torch.sum`", "`reduce_max`", "`torch.amax`", "copy"]
    lines = [[row["case"], *(f"{row[name]:,.0f}" if name in row else "-" for name in names)] for row in result["rows"]]
    return markdown(titles, lines, texts=1)


def index_case(row: Row) -> str:
    """A case of benchmarks/index_masks.py in words."""
    size = f"{row['head_dim']}" + (f" / {row['value_dim']}" if row["value_dim"] != row["head_dim"] else "")
    heads = f"{row['heads']} heads of {size}" + (f" on {row['kv_heads']}" if row["kv_heads"] != row["heads"] else "")
    kind = "single keys" if row["block"] == 1 else f"keys in blocks of {row['block']}"
    keys = "every key" if row["lists"] == "all" else f"{row['keys']:,} {kind}, {row['lists']}"
    return f"{row['length']:,} tokens, {heads}, {keys}" + (", deterministic" if row["deterministic"] else "")


def index_masks(result: Row) -> str:
    """Of benchmarks/index_masks.py: whole eager calls, over a dense causal call of cuDNN."""
    rows = sorted(result["rows"], key=lambda row: (row["lists"] == "random", row["length"], row["heads"]))
    lines = [
        [
            index_case(row),
            *(f"{ratio(row[f'{way}_speedup'])}, {duration(row[f'{way}_ms'] / 1e3)}" for way in ("forward", "backward")),
        ]
        for row in rows
    ]
    return markdown(["case, bfloat16", "forward", "backward"], lines, texts=1)


def index_peers(result: Row) -> str:
    """The cases of benchmarks/index_masks.py that were timed with peers: speedups over the same dense call."""
    lines = [
        [index_case(row), *(plain_ratio(row[f"dense_{way}_ms"] / row[f"{name}{way}_ms"]) if f"{name}{way}_ms" in row else "-"
                            for way in ("forward", "backward") for name in ("", "flex_", "fla_"))]
        for row in result["rows"] if "flex_forward_ms" in row
    ]  # fmt: skip
    return markdown(["case", "forward: dmattn", "FlexAttention", FLA, "backward: dmattn", "FlexAttention", FLA], lines, texts=1)


def share_of(row: Row) -> str:
    """The window of a dynamic mask beside the length, as it is written."""
    return {1.0: "all"}.get(row["share"], str(Fraction(row["share"]).limit_denominator(64)))


def beside_dense(result: Row) -> str:
    """Of benchmarks/sweep.py: the speedup over our dense causal attention."""
    shares = list(dict.fromkeys(map(share_of, result["rows"])))
    found: dict[tuple[int, int], dict[str, Row]] = {}
    for row in result["rows"]:
        found.setdefault((row["length"], row["heads"]), {})[share_of(row)] = row
    lines = []
    for (length, heads), by_share in found.items():
        cells = [
            f"{by_share[share][f'dense_{part}'] / by_share[share][part]:.2f}" if share in by_share else "-"
            for part in ("forward", "backward")
            for share in shares
        ]
        lines.append([f"{length:,}, {heads}", *cells])
    titles = ["tokens, heads", f"forward: {shares[0]}", *shares[1:], f"backward: {shares[0]}", *shares[1:]]
    return markdown(titles, lines, texts=1)


def case_in_words(case: str) -> str:
    """Of benchmarks/builds.py, whose names say what a case is given: "length=4096 batch=4 window=410"."""
    given = dict(part.split("=", 1) for part in case.split())
    batch, length, heads, kv_heads, window, causal, dim, blocks = (
        given.pop(name, "") for name in ("batch", "length", "heads", "kv_heads", "window", "causal", "dim", "blocks")
    )
    words = [f"{batch} x {int(length):,}" if batch else f"{int(length):,}"]
    if window:
        words.append(f"window {window}{' of all' if causal == 'False' else ''}")
    elif blocks:
        words.append(f"blocks of density {blocks}")
    else:
        words.append("causal" if causal == "True" else "full")
    words += [f"{heads} heads on {kv_heads}"] if kv_heads else [f"{heads} heads"] if heads else []
    words += [f"D = {dim}"] if dim else []
    return ", ".join([*words, *(name if value == "True" else f"{name} {value}" for name, value in given.items())])


def single_calls(result: Row) -> str:
    """Of benchmarks/builds.py, one build: kernels, and how many times as long the others take."""
    peers = ("cudnn", "dense", "plain")
    lines = []
    for row in result["rows"]:
        us, cells = row["us"], []
        for part in ("forward", "backward"):
            ratios = (f"{us[f'{peer} {part}'] / us[part]:.2f}" if f"{peer} {part}" in us else "-" for peer in peers)
            cells += [f"{us[part] / 1e3:.2f}", *ratios]
        lines.append([case_in_words(row["case"]), *cells])
    return markdown(["case", "forward, ms", "cuDNN", "dense", "plain", "backward, ms", "cuDNN", "dense", "plain"], lines, texts=1)


TABLES: dict[str, tuple[str, Callable[[Row], str]]] = {  # the file of a name, and what makes its table
    "ranks": ("context_parallel.json", ranks),
    "packs": ("varlen.json", packs),
    "predictions": ("cuda.json", predictions),
    "training-steps": ("training_step.json", training_steps),
    "doge": ("doge.json", models),
    "deepseek": ("deepseek.json", models),
    "reductions": ("reduce.json", reductions),
    "index-masks": ("index_masks.json", index_masks),
    "index-peers": (f"{H100}/index_masks.json", index_peers),
    "sweep": ("sweep.json", beside_dense),
    "builds": ("builds.json", single_calls),
    "projected": ("earlier_systems.json", earlier_report.projected),
    "sweep-of-attention": ("earlier_systems.json", earlier_report.sweep_of_attention),
    "sweep-of-reductions": ("earlier_systems.json", earlier_report.sweep_of_reductions),
}
