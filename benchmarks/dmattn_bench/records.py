"""Results as files: what they were measured on, statistics of samples, JSON and CSV, and one list of measurements whatever wrote them."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
import math
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import dmattn
import torch

from dmattn_bench import forms
from dmattn_bench.rows import to_json

Result = dict[str, Any]
Row = dict[str, Any]


class BadResultError(ValueError):
    """A file that is no result of a benchmark; says which file and why."""


# What the numbers were measured on ------------------------------------------------------------------------------------------------


def provenance(device: str) -> Result:
    """The machine, the versions and the commit.

    ``DMATTN_COMMIT`` names the commit where git does not know the files; who names it answers for it.
    """
    named = os.environ.get("DMATTN_COMMIT", "")
    root = checkout()
    changed = git(root, "status", "--porcelain", "--untracked-files=no", ":/cpp", ":/python", ":/benchmarks")
    return {
        "machine": machine(device),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dmattn": dmattn.__version__,
        "commit": named or git(root, "rev-parse", "HEAD"),
        "uncommitted_changes": bool(changed) and not named,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def checkout() -> Path | None:
    """The checkout of dmattn that the current folder or this file lies in, if any."""
    for start in (Path.cwd(), Path(__file__).resolve().parent):
        for folder in (start, *start.parents):
            if (folder / "benchmarks/results").is_dir() and (folder / "python/dmattn/_version.py").is_file():
                return folder
    return None


def machine(device: str) -> dict[str, Any]:
    if device == "cpu":
        model = cpu_model()
        about = {"cpu": model, "threads": torch.get_num_threads(), "instructions": torch.backends.cpu.get_cpu_capability()}
        return {"name": slug(f"{model} {torch.get_num_threads()} threads"), **about}
    model = torch.cuda.get_device_name(device)
    return {"name": slug(model), "gpu": model, "driver": nvidia_smi("driver_version").get("driver_version", "")}


def clocks(device: str) -> dict[str, str]:
    """Clocks, power and temperature of a GPU now, in nvidia-smi's words; empty for a CPU."""
    if device == "cpu":
        return {}
    fields = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")
    return nvidia_smi(*fields)


def nvidia_smi(*fields: str) -> dict[str, str]:
    """What nvidia-smi says of the current GPU; empty where it does not run."""
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    command = ["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return {}
    values = [value.strip() for value in done.stdout.split("\n")[0].split(",")]
    return dict(zip(fields, values, strict=True)) if done.returncode == 0 and len(values) == len(fields) else {}


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def slug(words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def git(folder: Path | None, *arguments: str) -> str:
    if folder is None:
        return ""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# Statistics -----------------------------------------------------------------------------------------------------------------------


def percentile(samples: Sequence[float], percent: float) -> float:
    """Linear between the two nearest samples, as numpy's default."""
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Number, mean, standard deviation (of a sample; 0 for one), and percentiles, in the samples' unit."""
    return {
        "n": len(samples),
        "mean": statistics.fmean(samples),
        "std": statistics.stdev(samples) if len(samples) > 1 else 0.0,
        **{f"p{percent}": percentile(samples, percent) for percent in (50, 95, 99)},
    }


# Measurements ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One thing that was timed.

    Args:
        workload: the workload's name; empty in results of before there were any.
        case: the case's name.
        who: dmattn or the peer.
        what: forward, backward, step and the like; kernels alone have names of their own.
        samples: seconds.
        shape: of the case, where its name does not say it: batch, heads, key heads, head dimension, dtype.
        facts: rates and bytes that belong to it.
        group: of the case; cases of two groups may have the same name.
    """

    workload: str
    case: str
    who: str
    what: str
    samples: tuple[float, ...]
    facts: dict[str, float]
    shape: str = ""
    group: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """What a measurement of another result must have in common to be compared."""
        return self.workload, self.group, self.case, self.shape, self.who, self.what


OURS = "dmattn"
RATES = ("tokens_per_second", "tflops", "percent_of_ceiling", "peak_bytes")


def peers_of(row: Row) -> list[str]:
    """The names of a row's peers; older results have one to a row."""
    return list(row["peer_names"]) if "peer_names" in row else [row["peer"]] if "peer" in row else []


def first_peer(row: Row) -> str:
    """Empty for a row without peers."""
    return next(iter(peers_of(row)), "")


def prefix_of(number: int) -> str:
    """What the names of times begin with: nothing for dmattn, which is number 0, ``peer_`` for its first peer, then ``peer2_``, ..."""
    return "" if number == 0 else "peer_" if number == 1 else f"peer{number}_"


def prefixes(row: Row) -> dict[str, str]:
    """Who is behind each prefix of a row's times."""
    return {prefix_of(number): name for number, name in enumerate([OURS, *peers_of(row)])}


def measurements(result: Result) -> list[Measurement]:
    """All that a result's file holds times of: rows of calls, of single times in microseconds, and of training steps."""
    return [found for row in result["rows"] for found in _of_row(row)]


def rows_by_case(result: Result, source: str) -> dict[tuple[str, str], Row]:
    """A result's rows by group ("" where they have none) and case.

    Raises:
        BadResultError: two rows have the same group and case; names ``source``, which the result was read from.
    """
    found: dict[tuple[str, str], Row] = {}
    for row in result["rows"]:
        key = (row.get("group", ""), row["case"])
        if key in found:
            raise BadResultError(
                f"{source}: expected one row for each group and case, got two of group {key[0]!r}, case {key[1]!r}"
            )
        found[key] = row
    return found


def _of_row(row: Row) -> Iterator[Measurement]:
    of = str(row.get("workload", ""))
    shape = " ".join(str(row.get(name, "")) for name in ("batch", "heads", "kv_heads", "head_dim", "dtype"))
    if isinstance(row.get("samples"), dict):
        of_prefix = prefixes(row)
        for source, words in (("samples", ""), ("kernel_samples", " kernels")):
            for name, samples in row.get(source, {}).items():
                prefix = next((p for p in of_prefix if p and name.startswith(p)), "")
                facts = {rate: row[_of(source, rate)][name] for rate in RATES if name in row.get(_of(source, rate), {})}
                what = name.removeprefix(prefix) + words
                yield Measurement(of, row["case"], of_prefix[prefix], what, tuple(samples), facts, shape, row.get("group", ""))
    elif "us" in row:
        samples = row.get("samples") or [row["us"]]
        tokens = row["keys"] if row.get("kind") == "prefill" else row["batch"] * row.get("queries", 1) if "batch" in row else 0
        facts = {"tokens_per_second": tokens / (row["us"] / 1e6)} if tokens else {}
        yield Measurement(of, row["case"], OURS, "step", tuple(us / 1e6 for us in samples), facts)
        for name, us in row.get("peer_us", {}).items():
            samples = row.get("peer_samples", {}).get(name, [us])
            yield Measurement(of, row["case"], name, "step", tuple(us / 1e6 for us in samples), {})
    elif "milliseconds" in row:
        case = f"training step, {row['length']} tokens on {row['ranks']} ranks"
        who = OURS if row["name"] == "dynamic" else row["name"]
        samples = row.get("samples") or [row["milliseconds"] / 1e3]
        case += f", {row['documents']} documents" if row.get("documents") else ""
        facts = {"tokens_per_second": row["tokens_per_second"]}
        facts |= {"peak_bytes": row["peak_gib"] * 2**30} if row["peak_gib"] is not None else {}
        yield Measurement(of, case, who, "step", tuple(samples), facts)
    elif "dense_forward" in row:  # of a sweep vs. dense attention
        case = f"{row['length']} tokens, {row['heads']} heads, window {row['window']}"
        for what in ("forward", "backward"):
            yield Measurement(of, case, OURS, f"{what} kernels", (row[what],), {})
            yield Measurement(of, case, "dmattn, dense", f"{what} kernels", (row[f"dense_{what}"],), {})
    elif "forward_ms" in row:  # of packed sequences
        for prefix, who in (("", OURS), ("torch_", "torch")):
            for what in ("forward", "backward"):
                if f"{prefix}{what}_ms" in row:
                    yield Measurement(of, row["case"], who, what, (row[f"{prefix}{what}_ms"] / 1e3,), {})
    elif "ours" in row:
        case = f"context parallel, {row['length']} tokens on {row['ranks']} ranks"
        for key, who in (("ours", OURS), ("one_chunk_alone", "one chunk alone"), ("torch_context_parallel_cudnn", "torch")):
            for what, milliseconds in row.get(key, {}).items():
                if what.endswith("_ms"):
                    yield Measurement(of, case, who, what.removesuffix("_ms"), (milliseconds / 1e3,), {})


def _of(source: str, rate: str) -> str:
    """The rates of kernels alone have a prefix; bytes and tokens are those of calls."""
    return f"kernel_{rate}" if source == "kernel_samples" else rate


# Files ----------------------------------------------------------------------------------------------------------------------------

CSV_FIELDS = ("workload", "group", "case", "who", "what", "n", "mean", "std", "p50", "p95", "p99", *RATES)


def write(result: Result, path: Path) -> None:
    """JSON, and beside it the same as CSV: a line for each measurement, times in seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(result))
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, CSV_FIELDS)
        writer.writeheader()
        for found in measurements(result):
            writer.writerow(
                {
                    "workload": found.workload,
                    "group": found.group,
                    "case": found.case,
                    "who": found.who,
                    "what": found.what,
                    **summary(found.samples),
                    **found.facts,
                }
            )


def read(path: Path) -> Result:
    """Raises BadResultError for a file that is not there, is not JSON, or is no result."""
    result = parsed(path, text_of(path), "JSON that `python -m dmattn_bench run` wrote")
    if not isinstance(result, dict) or not isinstance(result.get("rows"), list):
        raise BadResultError(f"{path}: expected a result with rows, which `python -m dmattn_bench run` writes, got other JSON")
    if reason := forms.wrong(result, forms.HEADER):
        raise BadResultError(f"{path}: expected {reason}")
    for number, row in enumerate(result["rows"], 1):
        if reason := forms.wrong_row(row):
            raise BadResultError(f"{path}: expected a result of `python -m dmattn_bench run`: in row {number} {reason}")
    for each in measurements(result):
        if not each.samples or not all(map(forms.is_positive, each.samples)):
            got = forms.shortened(list(each.samples[:3]))
            raise BadResultError(f"{path}: {each.case}: expected samples of {each.what}, all numbers > 0, got {got}")
    return result


def read_runs(path: Path) -> list[Row]:
    """The training runs of a file of JSON lines.

    Raises:
        BadResultError: it is not there, or no such file.
    """
    runs = [parsed(path, line, "training runs as JSON lines") for line in text_of(path).splitlines() if line.strip()]
    for number, run in enumerate(runs, 1):
        if reason := forms.wrong_run(run):
            raise BadResultError(f"{path}: expected training runs: in run {number} {reason}")
    if not any(run["complete"] and run["curve"] for run in runs):
        raise BadResultError(f"{path}: expected training runs that are complete, got none")
    return runs


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise BadResultError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise BadResultError(f"{path}: expected a text, got other bytes") from None


def parsed(path: Path, text: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadResultError(f"{path}: expected {expected}, got something else") from None
