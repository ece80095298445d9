"""Turns results into tables and plots: those of README.md and docs/, or a report of any results.

A page has places ``<!-- bench:NAME -->`` to ``<!-- /bench:NAME -->``. NAME is that of results/*/NAME.json, or of one of the short tables below,
or of one of quality_report.py or page_tables.py; models is that of front_page.py, serve that of serve_report.py, shape is a recorded output.
A single number in a sentence is ``<!-- n: FILE PATH | FORMAT -->`` to ``<!-- /n -->``: see cited.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from dmattn_bench import cited, front_page, page_tables, plots, quality_report, serve_report
from dmattn_bench.records import (
    BadResultError,
    Result,
    first_peer,
    measurements,
    peers_of,
    read,
    read_runs,
    rows_by_case,
    summary,
)
from dmattn_bench.tables import duration, markdown, number, ratio

PAGES = ("README.md", "docs/**/*.md", "research/lab/*.md")  # patterns
RESULTS = "benchmarks/results"
GPU, CPU = "nvidia-h200/cuda.json", "amd-epyc-2-threads/cpu.json"
# Committed results that plots are made of, the first that has what a plot shows; and those of training runs.
DRAWN = (GPU, *(f"nvidia-h200/{name}.json" for name in ("decode", "serve", "lengths", "ancestor", "sweep")))
LEARNED = ("nvidia-h100-80gb-hbm3/quality.jsonl", "nvidia-h200/quality.jsonl")
ANCESTOR = "nvidia-h200/ancestor.json"
SHAPE = "nvidia-h200/shape.txt"  # what `python -m dmattn shape` printed
SHORT_TABLES: dict[str, dict[str, tuple[tuple[str, str], ...]]] = {  # results, then group and case of their rows
    "summary": {
        GPU: (
            ("dma-local", "32768, window 1024 with 4 + 256, D=128"), ("dma-local", "131072, window 2048 with 4 + 256, D=128"),
            ("dma", "32768, window 1024, D=128"), ("dma", "131072, window 2048, D=128"), ("dma", "4096, window 410, D=128"),
            ("blocks", "16384, blocks, density 0.1, D=128"), ("dense", "16384, dense causal, D=128"),
            ("dense", "4 x 4096, dense causal, D=128"),
        ),
        ANCESTOR: (("", "4096, window 409, D=128"),),
        CPU: (("", "16384, window 819"),),
    },
    "lengths": {
        GPU: (
            ("dma-full", "1024, window 204 of all, D=128"), ("dma", "4096, window 410, D=128"), ("dma", "32768, window 1024, D=128"),
            ("dma", "131072, window 2048, D=128"), ("dma-local", "16384, window 819 with 4 + 256, D=128"),
            ("dma-local", "32768, window 1024 with 4 + 256, D=128"), ("dma-local", "131072, window 2048 with 4 + 256, D=128"),
        ),
        ANCESTOR: (("", "4096, window 409, D=128"),),
        CPU: (("", "16384, window 819"),),
    },
    "intervals": {
        GPU: (
            ("intervals", "65536, sliding window 4096, D=128"), ("intervals", "65536, streaming 64 + 1024, D=128"),
            ("intervals", "65536, 64 documents, D=128"),
        ),
    },
    "dense": {
        GPU: (
            ("dense", "16384, dense full, D=128"), ("dense", "16384, dense causal, D=128"), ("dense", "4 x 4096, dense causal, D=128"),
            ("dense", "16384, dense causal, D=64"), ("dense", "4 x 4096, dense causal, D=64"),
        ),
        CPU: (("", "16384, dense causal"),),
    },
}  # fmt: skip
SHORT_TABLES["kernels"] = {path: cases for path, cases in SHORT_TABLES["lengths"].items() if path != CPU}
SHORT_NAMES = {
    "F.scaled_dot_product_attention": "SDPA",
    "F.scaled_dot_product_attention by CUDNN_ATTENTION": "cuDNN",
    "F.scaled_dot_product_attention by FLASH_ATTENTION": "FlashAttention-2",
    "flex_attention, compiled": "FlexAttention",
    "dmattn.attention, dense": "dmattn dense",
}


def columns(row: dict[str, Any], with_peer: bool, with_kernels: bool) -> list[tuple[str, str]]:
    """One line of a table of results, headers and cells; forward includes the selection; the extra memory is the larger of forward's and
    backward's."""
    calls, kernels = row["medians"], row.get("kernel_medians", {})
    line = [("length, mask", row["case"])]
    if with_peer:
        line.append(("baseline", short(first_peer(row))))
    for name, theirs in (("forward", "peer_forward"), ("backward", "peer_backward")):
        line += [(name, duration(calls[name])), ("peer", duration(calls[theirs])), ("faster", ratio(calls[theirs] / calls[name]))]
        if with_kernels:
            is_there = name in kernels and theirs in kernels
            line.append(("kernels alone", ratio(kernels[theirs] / kernels[name]) if is_there else "-"))
    extra = max(row["extra_bytes"].values()) / 2**20 if "extra_bytes" in row else None
    line.append(("selection alone", duration(calls["select"]) if "select" in calls else "-"))
    line.append(("extra memory", "-" if extra is None else f"{extra:.1f} MB"))
    return line


def short(peer: str) -> str:
    return SHORT_NAMES.get(peer, peer)


def caption(result: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    about = result["machine"]
    hardware = f"{about['gpu']}, driver {about['driver']}, CUDA {result['cuda']}" if "gpu" in about else ""
    hardware = hardware or f"{about['cpu']}, {about['threads']} threads, {about['instructions']}"
    first = rows[0]
    shape = f"B={first['batch']}, H={first['heads']}, Hkv={first['kv_heads']}, D={first['head_dim']}, {first['dtype']}"
    peers = ", ".join(f"`{peer}`" for peer in sorted({peer for row in rows for peer in peers_of(row)}))
    changed = " with uncommitted changes" if result["uncommitted_changes"] else ""
    family = f"; kernels of {result['family']}" if result.get("family", "auto") != "auto" else ""
    turns = {len(row["samples"]["forward"]) for row in rows}
    settled = f"; kernels after {result['settle'] * 1e3:.0f} ms of themselves" if result.get("settle") else ""
    median = f"median of {min(turns)}" + (f" to {max(turns)}" if len(turns) > 1 else "")
    return (
        f"{shape}{' unless named' if mixed(rows) else ''}; {hardware}; torch {result['torch']}; "
        f"commit {result['commit'][:9] or 'unknown'}{changed}, {result['date'][:10]}{family}; {median}, "
        f"alternating with the baseline: {peers}{settled}."
    )


def mixed(rows: list[dict[str, Any]]) -> bool:
    """Whether rows have shapes of their own; those of older results are in their names."""
    return "kind" in rows[0] and len({(row["batch"], row["heads"], row["kv_heads"], row["head_dim"]) for row in rows}) > 1


def markdown_table(result: dict[str, Any]) -> str:
    """The rows chosen for tables (``in_readme``), all of them where none is chosen, each beside its first peer."""
    measured = [row for row in result["rows"] if "medians" in row]
    rows = [row for row in measured if row.get("in_readme", True)] or measured
    several = len({first_peer(row) for row in rows}) > 1
    with_kernels = any(row.get("kernel_medians") for row in rows)
    lines = [columns(row, several, with_kernels) for row in rows]
    titles, cells = [title for title, _ in lines[0]], [[cell for _, cell in line] for line in lines]
    return markdown(titles, cells, texts=1 + several) + "\n\n" + caption(result, rows)


def short_table(name: str, results: Path) -> str:
    """Speedups over the baseline and times, of whole calls; the table kernels has those of the kernels alone."""
    source = "kernel_medians" if name == "kernels" else "medians"
    lines, machines = [], []
    for path, cases in SHORT_TABLES[name].items():
        result = json.loads((results / path).read_text())
        found = rows_by_case(result, path)
        first, machine = found[cases[0]], result["machine"]
        hardware = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
        differ = len({found[case]["head_dim"] for case in cases}) > 1
        shape = f"{first['dtype']}, {first['heads']} heads of {first['head_dim']}{' unless named' * differ}"
        machines.append(f"{hardware}, {shape}, torch {result['torch']}, {result['date'][:10]}")
        for case in cases:
            row = found[case]
            batch = f"{row['batch']} x " if row.get("batch", 1) > 1 else ""
            line = [f"{batch}{row['length']:,} tokens, {plain_mask(row)}", short_peer(row)]
            line[0] += f", D = {row['head_dim']}" if row["head_dim"] != first["head_dim"] else ""
            line[0] += "" if "gpu" in machine else f" ({machine['threads']} CPU threads)"
            times = row[source]
            line += [f"{faster(times, part)}, {duration(times[part])}" for part in ("forward", "backward")]
            lines.append(line)
    return (
        markdown(["length and mask", "baseline", "forward", "backward"], lines, texts=2)
        + "\n\n"
        + "; ".join(dict.fromkeys(machines))
        + "."
    )


def plain_mask(row: dict[str, Any]) -> str:
    kind, window = row.get("kind", "dense" if row["window"] is None else "dma"), row["window"]
    dense = "dense causal" if row["is_causal"] else "dense"
    local, sinks = row.get("local", 0), row.get("sink", 0)  # counted in a dynamic mask's window
    selected = (
        f"{window - local - sinks:,} selected + {local} local + {sinks} sinks"
        if local
        else f"window {window:,}"
        if window
        else ""
    )
    return {
        "dense": dense,
        "dma": f"{selected}{'' if row['is_causal'] else ', not causal'}",
        "blocks": f"block mask, {row.get('density', 1):.0%} visible",
        "sliding": f"sliding window {window:,}" if window else "",
        "streaming": f"{row.get('sink')} sinks and {window:,} local keys" if window else "",
        "documents": f"{row.get('documents')} documents",
    }[kind]


def short_peer(row: dict[str, Any]) -> str:
    name = short(first_peer(row))
    name = {"SDPA": "torch's SDPA", "dmattn dense": "dmattn"}.get(name, name)
    return name if name == "FlexAttention" else name + (", causal" if row["is_causal"] else ", dense")


def faster(times: dict[str, float], part: str) -> str:
    return ratio(times["peer_" + part] / times[part])


def rewritten(text: str, results: Path) -> str:
    """The text with every marked place filled from the results of that name.

    Raises:
        BadResultError: a marker names a table that has no results.
    """

    def fill(found: re.Match[str]) -> str:
        return f"<!-- bench:{found[1]} -->\n{table_of(found[1], results)}\n<!-- /bench:{found[1]} -->"

    return cited.rewritten(cited.TABLE.sub(fill, text), results)


def table_of(name: str, results: Path) -> str:
    """Raises BadResultError: there are no results of that name."""
    if name == "models":
        return front_page.table(results)
    if name == "shape":
        return f"```text\n{(results / SHAPE).read_text()}```"
    if name in SHORT_TABLES:
        return short_table(name, results)
    if name in quality_report.TABLES:
        return quality_report.table(name, results)
    if name in page_tables.TABLES:
        return page_tables.table(name, results)
    paths = sorted(results.glob(f"*/{name}.json"))
    if name == "serve" and paths:
        return serve_report.table(results)
    if not paths:
        raise BadResultError(f"no results for bench:{name}: expected {results}/*/{name}.json, which `make bench` writes")
    return "\n\n".join(markdown_table(json.loads(path.read_text())) for path in paths)


# Reports ----------------------------------------------------------------------------------------------------------------------------


def pages(root: Path, check: bool) -> list[str]:
    """Names of the pages of a checkout that are not what the committed results say; unless ``check`` they are rewritten.

    Raises:
        BadResultError: a result is missing.
    """
    changed = []
    for page in sorted(page for pattern in PAGES for page in root.glob(pattern)):
        name = str(page.relative_to(root))
        before = page.read_text()
        after = rewritten(before, root / RESULTS)
        if before != after:
            changed.append(name)
            if not check:
                page.write_text(after)
    return changed


def draw_committed(root: Path, folder: Path) -> list[str]:
    """The plots of the committed results, for docs/pictures.py; their names."""
    found = [read(root / RESULTS / name) for name in DRAWN if (root / RESULTS / name).is_file()]
    runs = [run for name in LEARNED if (root / RESULTS / name).is_file() for run in read_runs(root / RESULTS / name)]
    return plots.draw_all(found, runs, folder)


def of_results(paths: list[Path], folder: Path) -> Path:
    """A page report.md with a table of everything and all plots there is something for.

    Raises:
        BadResultError: a file is neither a result nor training runs, or matplotlib is not installed.
    """
    if not plots.is_possible():  # before anything is written
        raise BadResultError("report: plots need matplotlib, which is not installed (pip install matplotlib)")
    results, runs, parts = [], [], ["# Benchmarks of dmattn"]
    for path in paths:
        if path.suffix == ".jsonl":
            runs += read_runs(path)
            continue
        results.append(read(path))
        if not measurements(results[-1]) and not not_measured(results[-1]):
            raise BadResultError(f"{path}: expected a result with times, got none that a report could show")
        parts += [f"## {path.name}", about(results[-1]), everything(results[-1])]
    folder.mkdir(parents=True, exist_ok=True)
    parts += [f"![{name}]({name}.svg)" for name in plots.draw_all(results, runs, folder)]
    page = folder / "report.md"
    page.write_text("\n\n".join(parts) + "\n")
    return page


def about(result: Result) -> str:
    """What a result was measured on, in a line."""
    machine = result.get("machine", {})
    changed = " with uncommitted changes" if result.get("uncommitted_changes") else ""
    words = [machine.get("gpu") or f"{machine.get('cpu', 'unknown machine')}, {machine.get('threads', '?')} threads"]
    words += [f"driver {machine['driver']}, CUDA {result.get('cuda')}"] if "driver" in machine else []
    words += [
        f"torch {result.get('torch', '?')}",
        f"commit {str(result.get('commit', ''))[:9] or 'unknown'}{changed}",
        str(result.get("date", ""))[:10],
    ]
    for dtype, most in result.get("ceiling", {}).items():
        words.append(
            f"a product of {dtype} matrices {most['tflops']:.3g} TFLOP/s, a copy {most['gigabytes_per_second']:,.0f} GB/s"
        )
    clocks = result.get("clocks", {}).get("after", {})
    words += [", ".join(f"{name} {value}" for name, value in clocks.items())] if clocks else []
    return "; ".join(words) + "."


def everything(result: Result) -> str:
    """Markdown: a line for each measurement, in microseconds where they are short."""
    titles = [
        "group",
        "case",
        "who",
        "what",
        "samples",
        "median",
        "mean",
        "std",
        "p95",
        "p99",
        "tokens/s",
        "TFLOP/s",
        "% of matmul",
        "MB",
    ]
    lines = []
    for found in measurements(result):
        of, facts = summary(found.samples), found.facts
        rates = [number(facts.get(name)) for name in ("tokens_per_second", "tflops", "percent_of_ceiling")]
        memory = f"{facts['peak_bytes'] / 2**20:,.1f}" if "peak_bytes" in facts else "-"
        times = [duration(of[name]) for name in ("p50", "mean", "std", "p95", "p99")]
        lines.append([found.group or "-", found.case, short(found.who), found.what, str(of["n"]), *times, *rates, memory])
    return "\n\n".join([markdown(titles, lines, texts=4), *not_measured(result)])


def not_measured(result: Result) -> list[str]:
    """Why cases have no times."""
    refused = [f"Refused, no times: {row['refused']}" for row in result["rows"] if "refused" in row]
    return refused + [f"Not measured: {row['cannot_run']}" for row in result["rows"] if "cannot_run" in row]
