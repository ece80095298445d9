"""Installs one wheel beside every Python and torch that it is for, runs tests there, and writes what came of it as JSON.

    python tools/wheel_matrix.py dist/dmattn-*.whl
    python tools/wheel_matrix.py dist/dmattn-*.whl --python 3.10 --torch 2.10.0 --all-tests
    python tools/wheel_matrix.py --list

A Python is python3.N of the PATH or of pyenv, or what NAME=PATH says; one that is not there is recorded as missing. Each pair has a virtual
environment of its own, removed afterwards. By default it runs QUICK, files that call every op and public function; --all-tests runs the suite,
after installing everything that tests use. The table is about one file and keeps one row for a Python and a torch: a later run with that file
replaces its own rows alone. A row names the commit whose tests ran.

Where pip finds only torch's builds for CUDA, --share-cuda FOLDER installs NVIDIA's packages once for a release of torch, in FOLDER, and links
them: they are equal for every Python. torch of the CPU is found with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

from dmattn_bench.rows import to_json
from planted_faults import commit_of_sources

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.10.*", "2.12.*", "newest")
OUTPUT = ROOT / "benchmarks/results/wheel_matrix.json"
QUICK = (
    "ops/test_library.py", "ops/test_forward.py", "ops/test_backward.py", "ops/test_select.py", "masks/test_masks.py",
    "masks/test_masks_as_data.py", "ops/test_errors.py", "ops/test_dynamic_mask_attention.py", "ops/test_sdpa.py",
    "ops/test_autograd.py", "ops/test_registration.py", "ops/test_decode.py", "cache/test_cache.py", "ops/test_varlen.py",
    "ops/test_reduce.py", "masks/test_stats.py", "nn/test_layer.py", "ops/test_model_arguments.py",
    "distributed/test_wrappers.py", "ops/test_profiling.py",
)  # fmt: skip
# Long tests of arithmetic, which no torch and no Python changes.
QUICK_BUT = "not (drawn or 20000 or 65535 or instruction_set or brute_force)"
QUICK_NEEDS = ("pytest>=8.4", "pytest-timeout>=2.3", "hypothesis>=6.100", "numpy>=1.26", "expecttest>=0.3")
IMPORT_LIMIT = 0.3  # seconds of import dmattn beside import torch
# Seconds that pass and seconds of the processor; the first are more where other programs run.
IMPORT_PROGRAM = """
import time
import torch
passed, worked = time.perf_counter(), time.process_time()
import dmattn
print(time.perf_counter() - passed, time.process_time() - worked, torch.__version__)
"""
Row = dict[str, Any]


def run(*command: object, **options: Any) -> str:
    """Runs a program and returns what it printed.

    Raises:
        RuntimeError: it ended with something else than 0.
    """
    finished = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    if finished.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{finished.stdout[-2000:]}\n{finished.stderr[-2000:]}")
    return finished.stdout


def interpreter(python: str) -> str | None:
    """The program for 3.N or for NAME=PATH; None where there is none."""
    name, _, path = python.partition("=")
    roots = [os.environ.get("PYENV_ROOT", ""), Path.home() / ".pyenv"]
    found = [str(program) for root in roots if root for program in Path(root).glob(f"versions/{name}.*/bin/python{name}")]
    for program in [path] if path else [*sorted(found, reverse=True), shutil.which(f"python{name}")]:
        if (
            program
            and shutil.which(program)
            and subprocess.run([program, "-c", "import venv"], capture_output=True).returncode == 0
        ):
            return program
    return None


def install_torch(python: Path, torch: str, shared: Path | None) -> None:
    """Installs a release of torch; with ``shared``, NVIDIA's packages there, unless they are, and links to them."""
    wanted = "torch" if torch == "newest" else f"torch=={torch}"
    if shared is None:
        run(python, "-m", "pip", "install", "-q", wanted)
        return
    run(python, "-m", "pip", "install", "-q", "--no-compile", "--no-deps", wanted)
    said = json.loads(
        run(python, "-c", "import importlib.metadata as m, json; print(json.dumps([m.version('torch'), m.requires('torch')]))")
    )
    release, needed = said[0], [need for need in said[1] if "extra ==" not in need]
    nvidia = [need for need in needed if re.match(r"nvidia|cuda-toolkit", need)]
    run(python, "-m", "pip", "install", "-q", *[need for need in needed if not re.match(r"nvidia|cuda|triton", need)])
    if nvidia:
        folder = shared.resolve() / f"torch-{release}"
        if not (folder / "complete").exists():
            run(python, "-m", "pip", "install", "-q", "--no-compile", "--target", folder, *nvidia)
            (folder / "complete").touch()
        site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        os.symlink(folder / "nvidia", Path(site) / "nvidia")


def install_wheel(python: Path, wheel: Path, alone: bool) -> None:
    """Installs the wheel and what it needs; ``alone``: without what torch needs, which pip would complete."""
    run(python, "-m", "pip", "install", "-q", *(["--no-deps"] if alone else []), wheel)
    if alone:
        needed = json.loads(run(python, "-c", "import importlib.metadata as m, json; print(json.dumps(m.requires('dmattn')))"))
        others = [need for need in needed if not re.match(r"torch\b", need) and "extra ==" not in need]
        run(python, "-m", "pip", "install", "-q", *others)


def counts(report: Path) -> Row:
    """How the tests of one pytest ended."""
    cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))
    failures = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    found: Row = {"passed": len(cases) - len(failures) - skipped, "failed": len(failures), "skipped": skipped}
    return found | ({"failures": failures} if failures else {})


def one(wheel: Path, program: str, torch: str, place: Path, options: argparse.Namespace) -> Row:
    """Installs, imports and tests one pair; leaves nothing behind."""
    row: Row = {}
    try:
        run(program, "-m", "venv", place)
        python = place / "bin/python"
        run(python, "-m", "pip", "install", "-q", "pip>=25.1")
        install_torch(python, torch, options.share_cuda)
        install_wheel(python, wheel, options.share_cuda is not None)
        needs = ["--group", f"{ROOT}/pyproject.toml:test"] if options.all_tests else QUICK_NEEDS
        run(python, "-m", "pip", "install", "-q", *needs)
        # Import from a folder that has no dmattn; the first time compiles Python files.
        said = [run(python, "-W", "ignore", "-c", IMPORT_PROGRAM, cwd=place).split() for _ in range(4)][1:]
        row |= {"torch": said[0][2], "import_seconds": round(min(float(words[0]) for words in said), 3)}
        row["import_processor_seconds"] = round(min(float(words[1]) for words in said), 3)
        tests = [] if options.all_tests else QUICK
        report = place / "report.xml"
        began = time.monotonic()
        finished = subprocess.run(
            [python, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "--junitxml", report]
            + (["-m", "not gpu"] if options.all_tests else ["-m", "not slow and not gpu", "-k", QUICK_BUT])
            + options.pytest
            + ([f"{ROOT}/tests/{test}" for test in tests] or [f"{ROOT}/tests"]),
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        row |= {"tests": "all" if options.all_tests else "quick", "seconds": round(time.monotonic() - began)}
        if options.pytest:
            row["pytest"] = shlex.join(options.pytest)
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
            (options.logs / f"{place.name}.log").write_text(finished.stdout + finished.stderr)
        if not report.exists():
            raise RuntimeError(f"pytest ended with {finished.returncode}: {finished.stdout[-2000:]}{finished.stderr[-2000:]}")
        row |= counts(report)
    except RuntimeError as error:
        row["error"] = str(error)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return row


def is_good(row: Row) -> bool:
    """Whether the wheel was installed, imported soon enough, and passed tests."""
    return "error" not in row and row["failed"] == 0 and row["passed"] > 0 and row["import_seconds"] < IMPORT_LIMIT


def line_of(row: Row) -> str:
    if "error" in row:
        return f"{row['python']:8} torch {row.get('torch') or row['asked']:14} {row['error'].splitlines()[-1][:100]}"
    return (
        f"{row['python']:8} torch {row['torch']:14} {row['passed']:5} passed {row['failed']:3} failed {row['skipped']:4} skipped "
        f"in {row['seconds']} s; import {row['import_seconds']} s{'' if is_good(row) else '  <- wrong'}"
    )


def record(output: Path, about: Row, rows: list[Row]) -> None:
    """Puts rows into the table, in place of those of the same Python and request, and of all rows of another file."""
    table = json.loads(output.read_text()) if output.exists() else {"rows": []}
    kept = table["rows"] if table.get("sha256") == about["sha256"] else []
    new = {(row["python"], row["asked"]) for row in rows}
    both = [row for row in kept if (row["python"], row["asked"]) not in new] + rows
    both.sort(key=lambda row: ([int(part) for part in row["python"].split(".")], row["asked"]))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(to_json(about | {"rows": both}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, nargs="?", help="the file to install; default: the newest in dist")
    parser.add_argument("--python", nargs="+", default=PYTHONS, help="3.N or 3.N=PATH")
    parser.add_argument("--torch", nargs="+", default=TORCHES, help="versions as pip takes them after torch==, or newest")
    parser.add_argument("--all-tests", action="store_true", help="run the whole suite")
    parser.add_argument(
        "--pytest", type=shlex.split, default=[], help="more arguments for pytest, in one word: --pytest='-x -n 2'"
    )
    parser.add_argument("--share-cuda", type=Path, metavar="FOLDER", help="install NVIDIA's packages once for a torch")
    parser.add_argument("--work", type=Path, help="folder of the virtual environments; default: a temporary one")
    parser.add_argument("--logs", type=Path, help="folder for what pytest prints")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the table")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    options = parser.parse_args()
    if options.list:
        print("\n".join(line_of(row) for row in json.loads(options.output.read_text())["rows"]))
        return 0
    wheels = sorted(ROOT.glob("dist/*.whl"), key=lambda path: path.stat().st_mtime)
    wheel = options.wheel or (wheels[-1] if wheels else parser.error("there is no wheel in dist: make wheel"))
    about = {"about": "tools/wheel_matrix.py: one wheel beside several Pythons and torches, on a CPU.", "wheel": wheel.name}
    about |= {"megabytes": round(wheel.stat().st_size / 1e6, 1), "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}
    all_good = True
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        for python in options.python:
            program = interpreter(python)
            for torch in options.torch:
                row: Row = {"python": python.partition("=")[0], "asked": torch, "commit": commit_of_sources()}
                place = Path(work) / f"py{row['python']}-torch{torch.replace('*', 'x')}"
                row |= (
                    {"error": "missing: no such Python here"}
                    if program is None
                    else one(wheel.resolve(), program, torch, place, options)
                )
                record(options.output, about, [row])
                all_good &= is_good(row)
                print(line_of(row), flush=True)
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
