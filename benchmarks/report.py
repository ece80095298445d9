"""Turns benchmarks/results into tables of README.md and pages of docs/, between ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->``.

NAME is that of results/*/NAME.json, or of one of the short tables below, or of one of quality_report.py; serve is that of serve_report.py.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import quality_report
import serve_report

HERE = Path(__file__).parent
PAGES = (
    HERE.parent / "README.md",
    HERE.parent / "docs/performance.md",
    HERE.parent / "docs/serving.md",
    HERE.parent / "docs/lab/results.md",
    HERE.parent / "docs/lab/learning.md",
)
GPU, CPU = "nvidia-h200/cuda.json", "amd-epyc-2-threads/cpu.json"
SHORT_TABLES = {  # results, then cases of them
    "summary": {
        GPU: (
            "32768, window 1024, D=128", "131072, window 2048, D=128", "4096, window 410, D=128", "16384, blocks, density 0.1, D=128",
            "16384, dense causal, D=128",
        ),
        CPU: ("16384, window 819",),
    },
    "lengths": {
        GPU: ("1024, window 204 of all, D=128", "4096, window 410, D=128", "32768, window 1024, D=128"),
        CPU: ("4096, window 410", "16384, window 819"),
    },
    "intervals": {GPU: ("65536, sliding window 4096, D=128", "65536, streaming 64 + 1024, D=128", "65536, 64 documents, D=128")},
    "dense": {
        GPU: ("16384, dense full, D=128", "16384, dense causal, D=128", "16384, dense full, D=64", "16384, dense causal, D=64"),
        CPU: ("16384, dense causal",),
    },
}  # fmt: skip
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
        line.append(("beside", short(peers_of(row)[0])))
    for name, theirs in (("forward", "peer_forward"), ("backward", "peer_backward")):
        line += [(name, duration(calls[name])), ("peer", duration(calls[theirs])), ("faster", ratio(calls[theirs] / calls[name]))]
        if with_kernels:
            is_there = name in kernels and theirs in kernels
            line.append(("kernels alone", ratio(kernels[theirs] / kernels[name]) if is_there else "-"))
    extra = max(row["extra_bytes"].values()) / 2**20 if "extra_bytes" in row else None
    line.append(("selection alone", duration(calls["select"]) if "select" in calls else "-"))
    line.append(("extra memory", "-" if extra is None else f"{extra:.1f} MB"))
    return line


def peers_of(row: dict[str, Any]) -> list[str]:
    """The names of a row's peers; older results have one to a row."""
    return list(row["peer_names"]) if "peer_names" in row else [row["peer"]]


def short(peer: str) -> str:
    return SHORT_NAMES.get(peer, peer)


def ratio(times: float) -> str:
    return f"{times:.2f}x" if times < 10 else f"{times:.1f}x"


def duration(seconds: float) -> str:
    """Three digits, in the unit that suits."""
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms") if seconds >= 1e-3 else (seconds * 1e6, "us")
    return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"


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
        f"by turns with the peer: {peers}{settled}."
    )


def mixed(rows: list[dict[str, Any]]) -> bool:
    """Whether rows have shapes of their own; those of older results are in their names."""
    return "kind" in rows[0] and len({(row["batch"], row["heads"], row["kv_heads"], row["head_dim"]) for row in rows}) > 1


def console_table(result: dict[str, Any]) -> str:
    """Everything, a line for each peer: whole calls, then kernels alone where a graph could be captured, then rates."""
    header = ["length, mask", "beside", "forward", "peer", "faster", "kernel", "peer", "TFLOP/s", "peer"]
    header += ["backward", "peer", "faster", "kernel", "peer", "TFLOP/s", "peer", "mask alone", "extra memory"]
    lines = [header, *(line for row in result["rows"] for line in console_lines(row))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = ["  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines]  # fmt: skip
    return "\n".join([text[0], "-" * len(text[0]), *text[1:], "", caption(result, result["rows"])])


def console_lines(row: dict[str, Any]) -> list[list[str]]:
    calls, kernels, rates = row["medians"], row.get("kernel_medians", {}), row.get("tflops", {})
    lines = []
    for number, peer in enumerate(peers_of(row), 1):
        prefix = f"peer{number if number > 1 else ''}_"
        line = [row["case"] if number == 1 else "", short(peer)]
        for name in ("forward", "backward"):
            theirs = prefix + name
            line += [duration(calls[name]), duration(calls[theirs]), ratio(calls[theirs] / calls[name])]
            line += [duration(times[key]) if key in times else "-" for times, key in ((kernels, name), (kernels, theirs))]
            line += [f"{rates[key]:.3g}" if key in rates else "-" for key in (name, theirs)]
        made = calls.get("select", calls.get("mask"))
        extra = max(row["extra_bytes"].values()) / 2**20 if "extra_bytes" in row else None
        lines.append([*line, "-" if made is None else duration(made), "-" if extra is None else f"{extra:.1f} MB"])
    return lines


def markdown_table(result: dict[str, Any]) -> str:
    """The rows chosen for tables (``in_readme``), all of them in older results, each beside its first peer."""
    rows = [row for row in result["rows"] if row.get("in_readme", True)]
    several = len({peers_of(row)[0] for row in rows}) > 1
    with_kernels = any(row.get("kernel_medians") for row in rows)
    lines = [columns(row, several, with_kernels) for row in rows]
    texts = 1 + several  # columns that are not numbers
    text = ["| " + " | ".join(header for header, _ in lines[0]) + " |", "|" + "---|" * texts + "---:|" * (len(lines[0]) - texts)]
    text += ["| " + " | ".join(cell for _, cell in line) + " |" for line in lines]
    return "\n".join(text) + "\n\n" + caption(result, rows)


def short_table(name: str, results: Path) -> str:
    """How much faster calls are than the peer, whole and (but in the README) as kernels alone, and how long whole calls take."""
    with_kernels = name != "summary"
    titles = [
        "length and mask",
        "beside",
        "forward",
        *["its kernels"] * with_kernels,
        "backward",
        *["its kernels"] * with_kernels,
    ]
    lines = ["| " + " | ".join(titles) + " |", "|---|---|" + "---:|" * (len(titles) - 2)]
    machines = []
    for path, cases in SHORT_TABLES[name].items():
        result = json.loads((results / path).read_text())
        found = {row["case"]: row for row in result["rows"]}
        first, machine = found[cases[0]], result["machine"]
        hardware = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
        differ = len({found[case]["head_dim"] for case in cases}) > 1
        shape = f"{first['dtype']}, {first['heads']} heads of {first['head_dim']}{' unless named' * differ}"
        machines.append(f"{hardware}, {shape}, torch {result['torch']}, {result['date'][:10]}")
        for case in cases:
            row = found[case]
            line = [f"{row['length']:,} tokens, {plain_mask(row)}", short_peer(row)]
            line[0] += f", D = {row['head_dim']}" if row["head_dim"] != first["head_dim"] else ""
            line[0] += "" if "gpu" in machine else f" ({machine['threads']} CPU threads)"
            for part in ("forward", "backward"):
                line.append(plain_ratio(row["medians"], part) + ", " + duration(row["medians"][part]))
                if with_kernels:
                    line.append(plain_ratio(row["kernel_medians"], part) if row.get("kernel_medians") else "-")
            lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines) + "\n\n" + "; ".join(machines) + "."


def plain_mask(row: dict[str, Any]) -> str:
    kind, window = row.get("kind", "dense" if row["window"] is None else "dma"), row["window"]
    dense = "dense causal" if row["is_causal"] else "dense"
    return {
        "dense": dense,
        "dma": f"window {window:,}{'' if row['is_causal'] else ' of all'}" if window else "",
        "blocks": f"block mask, {row.get('density', 1):.0%} visible",
        "sliding": f"sliding window {window:,}" if window else "",
        "streaming": f"{row.get('sink')} sinks and {window:,} local keys" if window else "",
        "documents": f"{row.get('documents')} documents",
    }[kind]


def short_peer(row: dict[str, Any]) -> str:
    name = short(peers_of(row)[0])
    name = {"SDPA": "torch's SDPA", "dmattn dense": "dmattn"}.get(name, name)
    return name if name == "FlexAttention" else name + (", causal" if row["is_causal"] else ", dense")


def plain_ratio(times: dict[str, float], part: str) -> str:
    """Two digits are what can be relied on."""
    ratio = times["peer_" + part] / times[part]
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x" if ratio >= 1 else f"{ratio:.2f}x"


def rewritten(text: str, results: Path) -> str:
    """The text with every marked place filled from the results of that name.

    Raises:
        SystemExit: a marker names a table that has no results.
    """

    def fill(found: re.Match[str]) -> str:
        name = found[1]
        if name in SHORT_TABLES:
            return f"<!-- bench:{name} -->\n{short_table(name, results)}\n<!-- /bench:{name} -->"
        if name in quality_report.TABLES:
            return f"<!-- bench:{name} -->\n{quality_report.table(name, results)}\n<!-- /bench:{name} -->"
        paths = sorted(results.glob(f"*/{name}.json"))
        if name == "serve" and paths:
            return f"<!-- bench:serve -->\n{serve_report.table(results, duration)}\n<!-- /bench:serve -->"
        if not paths:
            sys.exit(f"report: no results for bench:{name}, expected {results}/*/{name}.json; make bench writes them")
        tables = "\n\n".join(markdown_table(json.loads(path.read_text())) for path in paths)
        return f"<!-- bench:{name} -->\n{tables}\n<!-- /bench:{name} -->"

    return re.sub(r"<!-- bench:([\w-]+) -->.*?<!-- /bench:\1 -->", fill, text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a page is not what the results say")
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES)
    options = parser.parse_args()
    for page in options.pages:
        before = page.read_text()
        after = rewritten(before, HERE / "results")
        if before == after:
            continue
        if options.check:
            sys.exit(f"report: {page.name} differs from benchmarks/results; python benchmarks/report.py rewrites it")
        page.write_text(after)
        print(f"{page.name} rewritten")


if __name__ == "__main__":
    main()
