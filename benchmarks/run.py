"""Times the ops beside their peers, in one process, by turns: ``make bench``. Writes JSON; prints a table; refuses on wrong results."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import dmattn
import torch
from cases import QUICK_LENGTHS, TABLES, Case, workload
from measure import WrongResultError, extra_memory, gate, median, tflops, times
from report import console_table

HERE = Path(__file__).parent


def main() -> None:
    options = parse()
    table = TABLES[options.table]
    if table.device == "cpu":
        torch.set_num_threads(options.threads)
    wanted = [case for case in table.cases if not options.only or case.group in options.only]
    cases = [shrunk(case) for case in wanted] if options.quick else wanted
    repeats = options.repeats or (3 if options.quick else table.repeats)

    print(f"Gate: results against the reference, {len(cases)} kinds of case ...", end=" ", flush=True)
    try:
        for case in cases:
            gate(case, table.device)
    except WrongResultError as error:
        refuse(error)
    print("passed.")
    busy = os.getloadavg()[0]
    if busy > (0.7 if table.device == "cpu" else (os.cpu_count() or 1) / 2):  # where a GPU works, the host launches on one core
        print(f"bench: the load average is {busy:.1f}; times will suffer from what else is running here", file=sys.stderr)

    rows = [measured(case, table.device, repeats, options) for case in cases]
    for line in (*ideals(rows), *scaling(rows)):
        print(line)
    family = os.environ.get("DMATTN_FAMILY", "auto")
    result = {**provenance(table.device), "family": family, "table": options.table, "groups": options.only or table.groups,
              "quick": options.quick, "repeats": repeats, "settle": options.settle, "load": busy, "rows": rows}  # fmt: skip
    print("\n" + console_table(result))
    folder = options.output or (None if options.quick else HERE / "results")
    if folder is None:
        print("\nA quick run is no evidence: nothing written (--output FOLDER writes it).")
        return
    name = "-".join(
        [
            options.table,
            *options.only,
            *([family] if family != "auto" else []),
            *(["settled"] if options.settle else []),
            *(["quick"] if options.quick else []),
        ]
    )
    path = folder / result["machine"]["name"] / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nWritten: {os.path.relpath(path)}")


def parse() -> argparse.Namespace:
    groups = sorted({group for table in TABLES.values() for group in table.groups})
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", choices=list(TABLES), default="cpu", help="which cases, on which device (default cpu)")
    parser.add_argument(
        "--only", nargs="+", choices=groups, default=[], metavar="GROUP", help=f"some groups: {', '.join(groups)}"
    )
    parser.add_argument("--repeats", type=int, help="turns of each case, at most (default: the table's own)")
    parser.add_argument("--quick", action="store_true", help="short lengths, few repeats: does it run, roughly how fast")
    parser.add_argument(
        "--settle", type=float, default=0.0, metavar="SECONDS", help="time kernels after so long of themselves (default 0; CUDA)"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    parser.add_argument("--output", type=Path, help="folder for the JSON (default benchmarks/results; none with --quick)")
    options = parser.parse_args()
    if options.settle < 0:
        parser.error(f"--settle: expected seconds, got {options.settle:g}")
    if options.settle and TABLES[options.table].device == "cpu":
        parser.error(f"--settle: expected a table of a GPU, got {options.table}; a CPU keeps its clock")
    unknown = [group for group in options.only if group not in TABLES[options.table].groups]
    if unknown:
        parser.error(
            f"--only: expected groups of the table {options.table}, {', '.join(TABLES[options.table].groups)}, got {unknown[0]}"
        )
    return options


def measured(case: Case, device: str, repeats: int, options: argparse.Namespace) -> dict[str, Any]:
    """The row of one case."""
    print(f"  {case.name} ...", end=" ", flush=True)
    began = time.perf_counter()
    load = workload(case, device)
    try:
        taken = times(case, load, device, repeats, options.settle)
    except WrongResultError as error:
        refuse(error)
    medians, kernels = ({name: median(samples) for name, samples in given.items()} for given in (taken.calls, taken.kernels))
    row = {
        "case": case.name,
        "peer_names": [call.name for call in load.peers],
        **dataclasses.asdict(case),
        "pairs": load.pairs,
        "dense_pairs": load.dense_pairs,
        "medians": medians,
        "kernel_medians": kernels,
        "tflops": tflops(case, load, medians),
        "kernel_tflops": tflops(case, load, kernels),
        "samples": taken.calls,
        "kernel_samples": taken.kernels,
    }
    if taken.not_captured:
        row["not_captured"] = taken.not_captured
    del load, taken  # the GPU has one case in memory at a time
    if not options.no_memory:
        row["extra_bytes"] = extra_memory(case, device, options.threads)
    print(f"{time.perf_counter() - began:.1f} s", flush=True)
    return row


def refuse(error: WrongResultError) -> NoReturn:
    sys.exit(f"refused.\nbench: no times are reported, because results are wrong.\n  {error}")


def ideals(rows: list[dict[str, Any]]) -> list[str]:
    """How near a mask comes to the time its share of a dense call would take, where the peer is our own dense call; adds it to the rows."""
    lines = []
    for row in rows:
        if row["peers"][:1] != ("dmattn",):
            continue
        share = row["pairs"] / row["dense_pairs"]
        row["share_of_ideal"] = {
            name: share * row["medians"][f"peer_{name}"] / row["medians"][name] for name in ("forward", "backward")
        }
        parts = ", ".join(f"{name} at {part:.0%} of the ideal" for name, part in row["share_of_ideal"].items())
        lines.append(f"  {row['case']}: {share:.1%} of the dense pairs; {parts}")
    return lines


def scaling(rows: list[dict[str, Any]]) -> list[str]:
    """Whether a peer that is given a table of blocks really skips them: its time beside its own at density 1; adds it to the rows."""
    blocks = {row["density"]: row for row in rows if row["kind"] == "blocks"}
    whole = blocks.get(1.0)
    lines = []
    for density, row in blocks.items():
        if whole is None or row is whole:
            continue
        row["peer_time_of_dense"] = part = row["medians"]["peer_forward"] / whole["medians"]["peer_forward"]
        lines.append(f"  {row['peer_names'][0]} at density {density:g} takes {part:.2f} of its time at density 1")
        if part > 0.5 + density / 2:
            lines[-1] += ": IT DOES NOT SKIP BLOCKS, do not quote it"
    return lines


def shrunk(case: Case) -> Case:
    return case.resized(QUICK_LENGTHS.get(case.length, case.length))


# What the numbers were measured on ------------------------------------------------------------------------------------------------


def provenance(device: str) -> dict[str, Any]:
    named = os.environ.get("DMATTN_COMMIT", "")  # where git does not know the files; who names the commit answers for it
    changed = git("status", "--porcelain", "--untracked-files=no", ":/cpp", ":/python", ":/benchmarks")
    return {
        "machine": machine(device),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dmattn": dmattn.__version__,
        "commit": named or git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(changed) and not named,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def machine(device: str) -> dict[str, Any]:
    if device == "cpu":
        model = cpu_model()
        about = {"cpu": model, "threads": torch.get_num_threads(), "instructions": torch.backends.cpu.get_cpu_capability()}
        return {"name": slug(f"{model} {torch.get_num_threads()} threads"), **about}
    model = torch.cuda.get_device_name(device)
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    return {"name": slug(model), "gpu": model, "driver": driver.stdout.split("\n")[0].strip()}


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def slug(words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    main()
