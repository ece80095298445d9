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
from pathlib import Path
from typing import Any

import dmattn
import torch
from cases import QUICK_LENGTHS, TABLES, Case
from measure import WrongResultError, extra_memory, gate, median, times
from report import console_table

HERE = Path(__file__).parent


def main() -> None:
    options = parse()
    table = TABLES[options.table]
    if table.device == "cpu":
        torch.set_num_threads(options.threads)
    cases = [shrunk(case) for case in table.cases] if options.quick else list(table.cases)
    repeats = 3 if options.quick else table.repeats

    print(f"Gate: results against the reference, {len(cases)} kinds of case ...", end=" ", flush=True)
    try:
        for case in cases:
            gate(case, table.device)
    except WrongResultError as error:
        sys.exit(f"refused.\nbench: no times are reported, because results are wrong.\n  {error}")
    print("passed.")
    busy = os.getloadavg()[0]
    if busy > 0.7:
        print(f"bench: the load average is {busy:.1f}; times will suffer from what else is running here", file=sys.stderr)

    rows = []
    for case in cases:
        print(f"  {case.name} ...", flush=True)
        samples = times(case, table.device, repeats)
        row = {
            "case": case.name,
            "peer": case.peer,
            **dataclasses.asdict(case),
            "medians": {k: median(v) for k, v in samples.items()},
            "samples": samples,
        }
        if not options.no_memory:
            row["extra_bytes"] = extra_memory(case, table.device, options.threads)
        rows.append(row)

    result = {**provenance(table.device), "table": options.table, "quick": options.quick, "repeats": repeats, "load": busy,
              "rows": rows}  # fmt: skip
    print("\n" + console_table(result))
    folder = options.output or (None if options.quick else HERE / "results")
    if folder is None:
        print("\nA quick run is no evidence: nothing written (--output FOLDER writes it).")
        return
    path = folder / result["machine"]["name"] / f"{options.table}{'-quick' if options.quick else ''}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nWritten: {os.path.relpath(path)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", choices=list(TABLES), default="cpu", help="which cases, on which device (default cpu)")
    parser.add_argument("--quick", action="store_true", help="short lengths, few repeats: does it run, roughly how fast")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    parser.add_argument("--output", type=Path, help="folder for the JSON (default benchmarks/results; none with --quick)")
    return parser.parse_args()


def shrunk(case: Case) -> Case:
    return case.resized(QUICK_LENGTHS.get(case.length, case.length))


# What the numbers were measured on ------------------------------------------------------------------------------------------------


def provenance(device: str) -> dict[str, Any]:
    return {
        "machine": machine(device),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dmattn": dmattn.__version__,
        "commit": os.environ.get("DMATTN_COMMIT") or git("rev-parse", "HEAD"),  # for a machine that has the files but not git
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no", ":/cpp", ":/python", ":/benchmarks")),
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
