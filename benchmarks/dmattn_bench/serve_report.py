"""The table of docs/serving.md: what a step of generation takes, from results/*/serve.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dmattn_bench.tables import duration, markdown


def table(results: Path) -> str:
    """A line for each machine and number of sequences, and a caption for each machine."""
    titles = ["", "sequences", "step", "step, longer context", "torch, same keys", "torch, all keys"]
    titles += ["our `decode_attention`, all keys"]
    lines, captions = [], []
    for path in sorted(results.glob("*/serve.json"), reverse=True):
        result = json.loads(path.read_text())
        machine, rows = short(result), result["rows"]
        for batch in sorted({row["batch"] for row in rows if row["kind"] == "step"}):
            lines.append([machine, str(batch), *cells(rows, batch)])
        captions.append(caption(result))
    return markdown(titles, lines, texts=1) + "\n\n" + " ".join(captions)


def cells(rows: list[dict[str, Any]], batch: int) -> list[str]:
    of_batch = [row for row in rows if row["batch"] == batch]
    steps = sorted((row for row in of_batch if row["kind"] == "step"), key=lambda row: row["context"])
    full = [row for row in of_batch if row["kind"] == "full" and "page" not in row]
    paged = [row for row in of_batch if row["kind"] == "full" and "page" in row]

    def seconds(us: float) -> str:
        return duration(us / 1e6)

    def best(peers: list[dict[str, Any]]) -> str:
        times = [us for row in peers for us in row["peer_us"].values()]
        return seconds(min(times)) if times else "-"

    ours = ", ".join([seconds(row["us"]) for row in full] + [f"{seconds(row['us'])} in pages" for row in paged]) or "-"
    return [seconds(steps[0]["us"]), seconds(steps[-1]["us"]), best(steps), best(full), ours]


def short(result: dict[str, Any]) -> str:
    about = result["machine"]
    return about["gpu"].removeprefix("NVIDIA ") if "gpu" in about else f"{about['threads']} CPU threads"


def caption(result: dict[str, Any]) -> str:
    about, rows = result["machine"], result["rows"]
    contexts = sorted({row["context"] for row in rows if row["kind"] == "step"})
    peers = sorted({name for row in rows if row["kind"] != "prefill" for name in row["peer_us"]})
    full = max((row["keys"] for row in rows if row["kind"] == "full"), default=0)
    words = [
        f"{short(result)}{'' if 'gpu' in about else ' of an ' + about['cpu']}: {'bfloat16, CUDA graphs' if 'gpu' in about else 'float32'}",
        f"contexts {contexts[0]:,} and {contexts[-1]:,}, all keys {full:,}",
        f"torch {result['torch']}, best of {len(peers)} ways",
        f"commit {result['commit'][:9] or 'unknown'}{', changed' if result['uncommitted_changes'] else ''}, {result['date'][:10]}",
    ]
    words += [f"others used {result['others']:.0%} of the processors"] if result.get("others", 0.0) > 0.02 else []
    for row in (row for row in rows if row["kind"] == "prefill"):
        ratio = row["us"] / row["peer_us"]["one call"]
        words.append(f"{row['keys']:,} tokens in chunks of {row['chunk']:,} take {ratio:.2f}x of one call")
    return "; ".join(words) + "."
