"""Turns what tools/evidence.sh left in a folder of logs into JSON of results beside those of the benchmarks, and says what failed.

python tools/evidence.py facts LOGS                      writes what the machine is; prints the families of kernels that it runs
python tools/evidence.py record LOGS OUTPUT PART FAMILY  adds a part to OUTPUT/MACHINE/suite.json or fuzz.json; ends with 1 if it failed
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

from dmattn_bench.rows import to_json

ROOT = Path(__file__).resolve().parent.parent
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)", re.M)
Results = dict[str, Any]


def facts(logs: Path) -> str:
    """Writes facts.json; returns the values of DMATTN_FAMILY to test with: auto is the best for each call, on Hopper sm90 almost always."""
    import dmattn
    import torch
    from dmattn_bench.records import provenance

    known = provenance("cuda" if torch.cuda.is_available() else "cpu")
    machine = known["machine"]
    written = {
        "commit": known["commit"][:7], "date": known["date"][:10], "machine": machine.get("gpu", machine["name"]),
        "driver": machine.get("driver"), "torch": known["torch"], "cuda": known["cuda"], "python": known["python"],
    }  # fmt: skip
    if wheel := os.environ.get("WHEEL"):
        written["wheel"] = {"name": Path(wheel).name, "sha256": hashlib.sha256(Path(wheel).read_bytes()).hexdigest()}
    if known["uncommitted_changes"]:
        written["uncommitted_changes"] = True
    (logs / "facts.json").write_text(json.dumps({"folder": machine["name"], "run": written}))
    print(f"dmattn {dmattn.__version__} at {Path(dmattn.__file__).parent}, on {written['machine']}", file=sys.stderr)
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return "auto sm80" if is_hopper else "sm80"


def counts(logs: Path, name: str) -> Results:
    """How the tests of one pytest ended; exit is its status."""
    code, began, ended = (logs / f"{name}.exit").read_text().split()
    result: Results = {
        "passed": 0,
        "failed": 0,
        "skipped": 0,
        "seconds": round(float(ended) - float(began), 1),
        "exit": int(code),
    }
    report = logs / f"{name}.xml"
    if report.is_file():
        tree = xml.etree.ElementTree.parse(report)
        result["failures"] = [
            f"{case.get('classname')}::{case.get('name')}"
            for case in tree.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
        result["failed"] = len(result["failures"])
        result["skipped"] = sum(case.find("skipped") is not None for case in tree.iter("testcase"))
        result["passed"] = sum(1 for _ in tree.iter("testcase")) - result["failed"] - result["skipped"]
    if not result.get("failures"):
        result.pop("failures", None)
    return result


def of_pytest(logs: Path, part: str, family: str) -> tuple[Results, list[str]]:
    """The counts of a suite or of the fuzz, and what is wrong."""
    result = counts(logs, f"{part}-{family}")
    wrong = (
        [] if result["exit"] == 0 and result["passed"] else [f"{part} {family}: exit {result['exit']}, {result['passed']} passed"]
    )
    return result, wrong + [f"  {name}" for name in result.get("failures", [])]


def of_sanitizers(logs: Path, family: str) -> tuple[Results, list[str]]:
    """For each tool the counts of all shards together and the number of errors it reported (None: it did not end), and what is wrong."""
    result: Results = {}
    wrong: list[str] = []
    runs = [path.stem.removeprefix(f"sanitizers-{family}-") for path in logs.glob(f"sanitizers-{family}-*-*.exit")]
    for tool in sorted({run.rsplit("-", 1)[0] for run in runs}):
        total: Results = {"passed": 0, "failed": 0, "skipped": 0, "errors": 0, "seconds": 0.0}
        for shard in sorted(run for run in runs if run.startswith(f"{tool}-")):
            name = f"sanitizers-{family}-{shard}"
            one = counts(logs, name)
            summary = SUMMARY.findall((logs / f"{name}.log").read_text(errors="replace"))
            errors = int(summary[-1]) if summary else None
            total["errors"] = None if errors is None or total["errors"] is None else total["errors"] + errors
            for key in ("passed", "failed", "skipped"):
                total[key] += one[key]
            total["seconds"] = max(total["seconds"], one["seconds"])
            if one["exit"] != 0 or errors != 0 or not one["passed"] or one["skipped"]:
                said = "no summary" if errors is None else f"{errors} errors"
                wrong.append(f"{name}: exit {one['exit']}, {one['passed']} passed, {one['skipped']} skipped, {said}")
                wrong += [f"  {failure}" for failure in one.get("failures", [])]
        result[tool] = total
    if len({tool["passed"] for tool in result.values()}) > 1:
        wrong.append(f"sanitizers {family}: the tools did not run equally many tests")
    planted = (logs / f"sanitizers-{family}-planted.log").read_text(errors="replace")
    result["sees_a_planted_read"] = "Invalid __global__ read" in planted
    if not result["sees_a_planted_read"]:
        wrong.append(f"sanitizers {family}: memcheck did not see a read past the end that is there on purpose")
    return result, wrong


def record(logs: Path, output: Path, part: str, family: str) -> list[str]:
    """Adds the results of a part to the JSON of this machine; returns what is wrong with them."""
    known = json.loads((logs / "facts.json").read_text())
    folder = output / known["folder"]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "suite.json"
    kept = json.loads(path.read_text()) if path.is_file() else {"about": "Runs of tools/evidence.sh.", "runs": []}
    same = ("commit", "machine", "torch")
    run = next((run for run in kept["runs"] if all(run.get(key) == known["run"][key] for key in same)), None)
    if run is None:
        run = {}
        kept["runs"].insert(0, run)
    run |= known["run"]
    if part == "sanitizers":
        result, wrong = of_sanitizers(logs, family)
        tools = [value for value in result.values() if isinstance(value, dict)]
        about = run.setdefault("sanitizers", {})
        about["of_tests"] = max((sum(tool[key] for key in ("passed", "failed", "skipped")) for tool in tools), default=0)
        about[family] = result
        by_tool = [tool for of in about.values() if isinstance(of, dict) for tool in of.values() if isinstance(tool, dict)]
        about["reports"] = sum(tool["errors"] or 0 for tool in by_tool)
        line = ", ".join(
            f"{tool} {value['passed']} passed, {value['errors']} errors" for tool, value in result.items() if value in tools
        )
    else:
        result, wrong = of_pytest(logs, part, family)
        about = run.setdefault(part, {})
        about[family] = result
        about["complete"] = all(
            value["exit"] in (0, 1) and value["passed"] > 0 for value in about.values() if isinstance(value, dict)
        )
        line = f"{result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped in {result['seconds']} s"
    if part == "fuzz":
        wrong += record_fuzz(logs / "fuzz.json", folder / "fuzz.json", family)
    path.write_text(to_json(kept))
    print(f"{part:10} {family}  {line}")
    return wrong


def draws_of(runs: list[dict]) -> set[tuple]:
    """What has been drawn: seeds of an op of a family, by a build. Runs from before 2026-11-26 do not say it."""
    return {(run["family"], run["op"], run.get("build"), seed) for run in runs for seed in run.get("seeds", ())}


def record_fuzz(made: Path, path: Path, family: str) -> list[str]:
    """Adds the merged logs of the fuzz to earlier ones of the same device and packages. What is drawn again by the same build counts once."""
    if not made.is_file():
        return [f"fuzz {family}: no log was written"]
    summary = json.loads(made.read_text())
    if not any(run["family"] == family for run in summary["runs"]):  # what is committed stays
        return [f"fuzz {family}: no log was written"]
    summary.pop("commit", None)
    commit = json.loads((made.parent / "facts.json").read_text())["run"]["commit"]
    summary["runs"] = [{**run, "commit": commit} for run in summary["runs"]]
    before = json.loads(path.read_text()) if path.is_file() else {}
    if all(before.get(key) == value for key, value in summary.items() if key != "runs"):
        now = draws_of(summary["runs"])
        summary["runs"] += [run for run in before["runs"] if not draws_of([run]) & now]
        summary["runs"].sort(key=lambda run: (run["family"], run["op"]))
    path.write_text(to_json(summary))
    mine = [run for run in summary["runs"] if run["family"] == family]
    return [f"fuzz {family} {run['op']}: {run['failures']} shards failed" for run in mine if run["failures"]]


if __name__ == "__main__":
    if sys.argv[1] == "facts":
        print(facts(Path(sys.argv[2])))
    else:
        problems = record(Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
        for problem in problems:
            print(problem)
        sys.exit(bool(problems))
