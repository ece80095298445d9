"""Turns benchmarks/results/*/NAME.json into the README's tables, between ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->``."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COLUMNS = ("length, mask", "forward", "peer", "faster", "backward", "peer", "faster", "selection alone", "extra memory")


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table; forward includes the selection; the extra memory is the larger of forward's and backward's."""
    m = row["medians"]
    extra = max(row["extra_bytes"].values()) / 2**20 if "extra_bytes" in row else None
    return [
        row["case"],
        duration(m["forward"]),
        duration(m["peer_forward"]),
        ratio(m["peer_forward"] / m["forward"]),
        duration(m["backward"]),
        duration(m["peer_backward"]),
        ratio(m["peer_backward"] / m["backward"]),
        duration(m["select"]) if "select" in m else "-",
        "-" if extra is None else f"{extra:.1f} MB",
    ]


def ratio(times: float) -> str:
    return f"{times:.2f}x" if times < 10 else f"{times:.1f}x"


def duration(seconds: float) -> str:
    """Three digits, in the unit that suits."""
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms") if seconds >= 1e-3 else (seconds * 1e6, "us")
    return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"


def caption(result: dict[str, Any]) -> str:
    about = result["machine"]
    hardware = f"{about['gpu']}, driver {about['driver']}, CUDA {result['cuda']}" if "gpu" in about else ""
    hardware = hardware or f"{about['cpu']}, {about['threads']} threads, {about['instructions']}"
    first = result["rows"][0]
    shape = f"B={first['batch']}, H={first['heads']}, Hkv={first['kv_heads']}, D={first['head_dim']}, {first['dtype']}"
    peers = ", ".join(sorted({f"`{row['peer']}`" for row in result["rows"]}))
    changed = " with uncommitted changes" if result["uncommitted_changes"] else ""
    return (
        f"{shape}; {hardware}; torch {result['torch']}; commit {result['commit'][:9] or 'unknown'}{changed}, {result['date'][:10]}; "
        f"median of {result['repeats']}, by turns with the peer: {peers}."
    )


def console_table(result: dict[str, Any]) -> str:
    lines = [list(COLUMNS), *(cells(row) for row in result["rows"])]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    text = ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines]  # fmt: skip
    return "\n".join([text[0], "-" * len(text[0]), *text[1:], "", caption(result)])


def markdown_table(result: dict[str, Any]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in result["rows"]]
    return "\n".join(lines) + "\n\n" + caption(result)


def rewritten(text: str, results: Path) -> str:
    """The text with every marked place filled from the results of that name.

    Raises:
        SystemExit: a marker names a table that has no results.
    """

    def fill(found: re.Match[str]) -> str:
        name = found[1]
        paths = sorted(results.glob(f"*/{name}.json"))
        if not paths:
            sys.exit(f"report: no results for bench:{name}, expected {results}/*/{name}.json; make bench writes them")
        tables = "\n\n".join(markdown_table(json.loads(path.read_text())) for path in paths)
        return f"<!-- bench:{name} -->\n{tables}\n<!-- /bench:{name} -->"

    return re.sub(r"<!-- bench:([\w-]+) -->.*?<!-- /bench:\1 -->", fill, text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when the README is not what the results say")
    parser.add_argument("--readme", type=Path, default=HERE.parent / "README.md")
    options = parser.parse_args()
    before = options.readme.read_text()
    after = rewritten(before, HERE / "results")
    if before == after:
        return
    if options.check:
        sys.exit(f"report: {options.readme.name} differs from benchmarks/results; python benchmarks/report.py rewrites it")
    options.readme.write_text(after)
    print(f"{options.readme.name} rewritten")


if __name__ == "__main__":
    main()
