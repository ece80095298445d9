"""The table of docs/serving.md: what a step of generation takes, from results/*/serve.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def table(results: Path, duration: Callable[[float], str]) -> str:
    """A line for each machine and number of sequences; ``duration`` words seconds."""
    header = [
        "sequences",
        "a step with a window of {window:,}",
        "torch over {window:,} keys, no update",
        "torch over {full:,} keys",
    ]
    header += ["`decode_attention` over them", "in pages"]
    blocks = []
    for path in sorted(results.glob("*/serve.json"), reverse=True):
        result = json.loads(path.read_text())
        rows = result["rows"]
        full = max((row["keys"] for row in rows if row["kind"] == "full"), default=0)
        words = [word.format(window=result["window"], full=full) for word in header]
        lines = ["| " + " | ".join(words) + " |", "|" + "---:|" * len(words)]
        lines += [line(rows, batch, duration) for batch in sorted({row["batch"] for row in rows if row["kind"] == "step"})]
        blocks.append("\n".join(lines) + "\n\n" + caption(result))
    return "\n\n".join(blocks)


def line(rows: list[dict[str, Any]], batch: int, duration: Callable[[float], str]) -> str:
    of_batch = [row for row in rows if row["batch"] == batch]
    steps = [row for row in of_batch if row["kind"] == "step"]
    full = [row for row in of_batch if row["kind"] == "full" and "page" not in row]
    paged = [row for row in of_batch if row["kind"] == "full" and "page" in row]

    def seconds(us: float) -> str:
        return duration(us / 1e6)

    def best(peers: list[dict[str, Any]]) -> str:
        times = {name: us for row in peers for name, us in row["peer_us"].items()}
        return f"{seconds(min(times.values()))} ({min(times, key=times.__getitem__)})" if times else "-"

    contexts = ", ".join(f"{seconds(row['us'])} after {row['context']:,} tokens" for row in steps)
    ours = [seconds(row["us"]) for row in full] or ["-"]
    pages = [seconds(row["us"]) for row in paged] or ["-"]
    return f"| {batch} | {contexts} | {best(steps)} | {best(full)} | {ours[0]} | {pages[0]} |"


def caption(result: dict[str, Any]) -> str:
    about = result["machine"]
    hardware = f"{about['gpu']}, CUDA {result['cuda']}" if "gpu" in about else f"{about['cpu']}, {about['threads']} threads"
    shape = f"{result['heads']} query heads on {result['kv_heads']}, D = {result['head_dim']}"
    dtype = "bfloat16, in a CUDA graph" if "gpu" in about else "float32"
    changed = " with uncommitted changes" if result["uncommitted_changes"] else ""
    others = f"; other processes used {result['others']:.0%} of the processors" if result.get("others", 0.0) > 0.02 else ""
    prefill = ""
    for row in (row for row in result["rows"] if row["kind"] == "prefill"):
        ratio = row["us"] / row["peer_us"]["one call"]
        prefill = (
            f" A prompt of {row['keys']:,} tokens in chunks of {row['chunk']:,} takes {ratio:.2f} times as long as one call."
        )
    return (
        f"{shape}, {dtype}; {hardware}, torch {result['torch']}; commit {result['commit'][:9] or 'unknown'}{changed}, {result['date'][:10]}; "
        f"medians{others}.{prefill}"
    )
