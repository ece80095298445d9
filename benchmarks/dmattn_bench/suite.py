"""Runs named workloads: checks each case, measures it vs. its peers, and makes one result of everything."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from dmattn_bench import tables, workloads
from dmattn_bench.cases import Case, Workload, workload
from dmattn_bench.measure import (
    SECONDS_A_CASE,
    CannotRunError,
    JobOptions,
    WrongResultError,
    ceiling,
    extra_memory,
    gate,
    peers_memory,
    tflops,
    times,
)
from dmattn_bench.records import Result, Row, clocks, first_peer, measurements, provenance, summary

# What a case may raise whose sizes do not fit together or do not fit the machine. Any other RuntimeError is a defect.
CANNOT_RUN = (CannotRunError, ValueError, MemoryError, torch.OutOfMemoryError)
SHORT_OF_CPU_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # torch raises a plain RuntimeError there


@dataclasses.dataclass(frozen=True)
class Options:
    """How to measure. None: what the workload says.

    Args:
        device: cpu or cuda.
        quick: short lengths, few repeats.
        repeats: turns of each case, at most.
        seconds: of timed turns of each case, about; calls and kernels alone each.
        settle: seconds of the same kernels before each timed one.
        threads: of a CPU.
        memory: whether peak memory is measured.
        peers: instead of the workloads' own.
        lengths: instead of the workloads' own; windows and documents in proportion.
        shape: batch, heads, kv_heads, head_dim, dtype instead of the workloads' own.
        trained: the file of trained scores.
    """

    device: str = "cpu"
    quick: bool = False
    repeats: int | None = None
    seconds: float = SECONDS_A_CASE
    settle: float = 0.0
    threads: int = 2
    memory: bool = True
    peers: tuple[str, ...] | None = None
    lengths: tuple[int, ...] = ()
    shape: dict[str, Any] = dataclasses.field(default_factory=dict)
    trained: str = workloads.TRAINED

    @property
    def turns(self) -> int:
        return self.repeats or (3 if self.quick else 5 if self.device == "cpu" else 20)


def run(names: list[str], options: Options) -> Result:
    """One result of these workloads; a case that fails, or whose results are wrong, has no times, but ``refused``. An interrupt ends it."""
    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    busy = os.getloadavg()[0]
    if busy > (0.7 if options.device == "cpu" else (os.cpu_count() or 1) / 2):  # where a GPU works, the host launches on one core
        print(f"bench: the load average is {busy:.1f}; times will suffer from what else is running here", file=sys.stderr)
    steps = list(planned(names, options))
    before = clocks(options.device)
    ceilings: dict[str, dict[str, float]] = {}
    rows: list[Row] = []
    is_whole = False
    try:
        for name, step in progress(steps):
            try:
                if isinstance(step, Case):
                    if step.dtype not in ceilings:
                        ceilings[step.dtype] = ceiling(options.device, step.dtype)
                    found = [case_row(step, options, ceilings[step.dtype])]
                else:
                    found = job_rows(step, options)
            except (*CANNOT_RUN, RuntimeError) as error:
                reason = (str(error) or type(error).__name__).split("\n")[0]
                cannot_run = isinstance(error, CANNOT_RUN) or SHORT_OF_CPU_MEMORY in reason
                found = [
                    {"case": step.name, "cannot_run": f"{step.name}: cannot run: {reason}"}
                    if cannot_run
                    else {"case": step.name, "refused": f"{step.name}: failed: {reason}"}
                ]
            rows += [{"workload": name, **row} for row in found]
            if options.device != "cpu":
                torch.cuda.empty_cache()
        is_whole = True
    except KeyboardInterrupt:
        print(f"\nbench: interrupted after {len(rows)} rows", file=sys.stderr)
    return {
        **provenance(options.device), "family": os.environ.get("DMATTN_FAMILY", "auto"), "workloads": names, "quick": options.quick,
        "repeats": options.turns, "settle": options.settle, "load": busy, "ceiling": ceilings, "complete": is_whole,
        "clocks": {"before": before, "after": clocks(options.device)}, "rows": rows,
    }  # fmt: skip


def planned(names: list[str], options: Options) -> Iterator[tuple[str, Case | workloads.Named]]:
    """Cases as they are measured here, and jobs, with the names of their workloads; each case once."""
    known = workloads.named(options.trained)
    for name in names:
        if name == "pages":
            cases = workloads.pages(options.device)
            yield from ((name, shrunk(case) if options.quick else case) for case in cases)
            continue
        named = known[name]
        if named.cases is None:
            yield name, named
            continue
        seen = set()
        for case in named.cases():
            for found in adapted(case, options):
                if found not in seen:
                    seen.add(found)
                    yield name, found


def adapted(case: Case, options: Options) -> Iterator[Case]:
    """A case at each length asked for, and in the shape asked for."""
    if options.peers is not None:
        case = dataclasses.replace(case, peers=options.peers)
    case = workloads.for_device(case, options.device)
    if options.shape:
        case = dataclasses.replace(case, **options.shape)
    for length in options.lengths or (case.length,):
        sized = case if length == case.length else case.resized(length)
        yield shrunk(sized) if options.quick else sized


def shrunk(case: Case) -> Case:
    """The case at the length of a quick run: 1,024 up to 4,096, and at most 4,096."""
    return case if case.length <= 1024 else case.resized(1024 << min(2, max(0, round(math.log2(case.length / 4096) / 2))))


def progress(steps: list[tuple[str, Case | workloads.Named]]) -> Iterator[tuple[str, Case | workloads.Named]]:
    """The steps, with a bar on a terminal where tqdm is installed; a line for each elsewhere. All on stderr."""
    has_bar = sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None
    bar: Any = importlib.import_module("tqdm").tqdm(steps, unit="case") if has_bar else steps
    for number, (name, step) in enumerate(bar, 1):
        words = f"{name}: {step.name}" if isinstance(step, Case) else name
        if has_bar:
            bar.set_description(words)
            yield name, step
            continue
        began = time.perf_counter()
        print(f"  {number}/{len(steps)} {words} ...", end=" ", flush=True, file=sys.stderr)
        yield name, step
        print(f"{time.perf_counter() - began:.1f} s", flush=True, file=sys.stderr)


def job_rows(named: workloads.Named, options: Options) -> list[Row]:
    assert named.job is not None
    try:
        return named.job(JobOptions(options.device, options.quick, options.repeats))
    except WrongResultError as error:
        return [{"case": named.name, "refused": str(error)}]
    except CannotRunError as error:
        return [{"case": named.name, "cannot_run": str(error)}]


def case_row(case: Case, options: Options, most: dict[str, float]) -> Row:
    """The row of one case: facts, samples, their statistics, rates and bytes."""
    facts: Row = {"case": case.name, **dataclasses.asdict(case)}
    left_out: dict[str, str] = {}
    try:
        gate(case, options.device)
        load = with_peers_that_run(workload(case, options.device, left_out=left_out), left_out)
        taken = times(case, load, options.device, options.turns, options.settle, options.seconds)
    except WrongResultError as error:
        return {**facts, "refused": str(error)}
    medians, kernels = (
        {name: statistics.median(samples) for name, samples in given.items()} for given in (taken.calls, taken.kernels)
    )
    row = {
        **facts,
        "peer_names": [call.name for call in load.peers],
        "pairs": load.pairs,
        "dense_pairs": load.dense_pairs,
        "medians": medians,
        "kernel_medians": kernels,
        "samples": taken.calls,
        "kernel_samples": taken.kernels,
        "tokens_per_second": {
            name: case.batch * case.length / each for name, each in medians.items() if name.endswith(("forward", "backward"))
        },
    }
    for prefix, found in (("", medians), ("kernel_", kernels)):
        rates = tflops(case, load, found)
        row |= {f"{prefix}tflops": rates}
        row |= {f"{prefix}percent_of_ceiling": {name: 100 * rate / most["tflops"] for name, rate in rates.items()}}
    if taken.not_captured:
        row["not_captured"] = taken.not_captured
    if left_out:
        row["left_out"] = left_out
    row["peak_bytes"] = peers_memory(load, options.device) if options.memory else {}
    del load, taken  # the GPU has one case in memory at a time
    if options.memory:
        row["extra_bytes"] = extra_memory(case, options.device, options.threads)
        row["peak_bytes"] = {**row["extra_bytes"], **row["peak_bytes"]}
    return row


def with_peers_that_run(load: Workload, left_out: dict[str, str]) -> Workload:
    """Tries each peer once, forward and backward; one that fails is left out, with the reason."""
    kept = []
    # Not on the default stream: what autograd notes of inputs there could not be captured later.
    stream = torch.cuda.Stream() if load.grad_out.is_cuda else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in load.peers:
            try:
                out = call.run()
                if call.inputs:
                    torch.autograd.grad(out, call.inputs, load.grad_out)
                if stream is not None:
                    stream.synchronize()  # kernels that fail, fail here
                kept.append(call)
            except Exception as error:  # compilers and other libraries raise all sorts of errors
                left_out[call.name] = f"{type(error).__name__}: {error}".split("\n")[0]
    return dataclasses.replace(load, peers=tuple(kept))


# What to print ---------------------------------------------------------------------------------------------------------------------


def table(result: Result) -> str:
    """A line for each measurement."""
    lines = [["case", "who", "what", "n", "median", "mean", "std", "p95", "p99", "tokens/s", "TFLOP/s", "% of matmul", "MB"]]
    last: tuple[str, ...] = ()
    for found in measurements(result):
        of = summary(found.samples)
        rates = [found.facts.get(name) for name in ("tokens_per_second", "tflops", "percent_of_ceiling", "peak_bytes")]
        if rates[3] is not None:
            rates[3] /= 2**20
        words = ["" if rate is None else tables.number(rate) for rate in rates]
        cells = [f"{of[name] * 1e3:.4g}" for name in ("p50", "mean", "std", "p95", "p99")]
        lines.append([found.case if found.key[:2] != last else "", found.who, found.what, str(of["n"]), *cells, *words])
        last = found.key[:2]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [
        "  ".join(cell.ljust(w) if i < 3 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
    return "\n".join([*text, "Times in milliseconds; MB: beyond inputs and results."])


def remarks(result: Result) -> list[str]:
    """What is to be known beside the times."""
    rows = result["rows"]
    lines = [f"REFUSED, no times: {row['refused']}" for row in rows if "refused" in row]
    lines += [row["cannot_run"] for row in rows if "cannot_run" in row]
    lines += [f"{row['case']}: without {name} ({why})" for row in rows for name, why in row.get("left_out", {}).items()]
    return [*lines, *ideals(rows), *crossings(rows), *scaling(rows)]


def ideals(rows: list[Row]) -> list[str]:
    """How near a mask comes to its share of a dense call's time, where the first peer is our own dense call; adds it to the rows."""
    lines = []
    for row in rows:
        if not row.get("pairs") or not first_peer(row).startswith("dmattn"):
            continue
        share = row["pairs"] / row["dense_pairs"]
        row["share_of_ideal"] = {
            name: share * row["medians"][f"peer_{name}"] / row["medians"][name] for name in ("forward", "backward")
        }
        parts = ", ".join(f"{name} at {part:.0%} of the ideal" for name, part in row["share_of_ideal"].items())
        lines.append(f"{row['case']}: {share:.1%} of the dense pairs; {parts}")
    return lines


def crossings(rows: list[Row]) -> list[str]:
    """Up to which kept share dynamic masks are faster than our own dense kernel, for each length of the ablation."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        if row.get("workload") == "ablation-threshold" and first_peer(row) == "dmattn.attention, dense":
            found.setdefault(row["length"], []).append(row)
    lines = []
    for length, at in found.items():
        parts = []
        for name in ("forward", "backward"):
            times = [(row["window"] / length, row["kernel_medians"] or row["medians"]) for row in at]
            faster = [share for share, taken in times if taken[name] < taken["peer_" + name]]
            parts.append(f"{name} up to {max(faster):.2f}" if faster else f"{name} at none of them")
        shares = ", ".join(f"{row['window'] / length:.2f}" for row in at)
        lines.append(f"{length:,} tokens, kept shares {shares}: faster than the dense kernel {', '.join(parts)}")
    return lines


def scaling(rows: list[Row]) -> list[str]:
    """Whether a peer that is given a table of blocks really skips them: its time beside its own at density 1; adds it to the rows."""
    blocks = {row["density"]: row for row in rows if row.get("kind") == "blocks" and "flex" in first_peer(row)}
    whole = blocks.get(1.0)
    lines = []
    for density, row in blocks.items():
        if whole is None or row is whole:
            continue
        row["peer_time_of_dense"] = part = row["medians"]["peer_forward"] / whole["medians"]["peer_forward"]
        lines.append(f"{first_peer(row)} at density {density:g} takes {part:.2f} of its time at density 1")
        if part > 0.5 + density / 2:
            lines[-1] += ": IT DOES NOT SKIP BLOCKS, do not quote it"
    return lines
