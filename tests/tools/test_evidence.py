"""What chooses and records tests for a GPU machine works without one: the marker ``gpu``, shards, and ``tools/evidence.sh`` beside tools that
only seem to be there.
"""

from __future__ import annotations

import collections
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import hypothesis
import pytest
import torch
from evidence import facts, record_fuzz

TESTS = Path(__file__).parents[1]
COMMIT = "0123456"
CHECKED_OPS = {
    "select", "pack", "forward", "backward", "dynamic", "decode", "cache", "rewind", "reduce", "index_top_k", "index_loss", "cases",
}  # fmt: skip
# Seven tests, so that no shard is empty and shards are not equally large; ids with blanks, as real ones have.
NAMES = [f"some keys, {n}" for n in range(7)]

# A compute-sanitizer that runs the program and reports what DMATTN_STUB says, in the words of the real one.
STUB = """#!/usr/bin/env bash
tool=$2
while [ "$1" != "$STUB_PYTHON" ]; do shift; done
if [ "$2" = -c ]; then
  [ "${DMATTN_STUB:-}" = blind ] || echo "========= Invalid __global__ read of size 4 bytes"
  exit 99
fi
"$@"
code=$?
errors=0
[ "${DMATTN_STUB:-}" != "$tool-$DMATTN_SHARD" ] || errors=3
if [ "${DMATTN_STUB:-}" = silent-$tool ]; then exit $code; fi
if [ $tool = racecheck ]; then
  echo "========= RACECHECK SUMMARY: $errors hazards displayed ($errors errors, 0 warnings)"
else
  echo "========= ERROR SUMMARY: $errors errors"
fi
[ $errors = 0 ] || exit 99
exit $code
"""
WRITES_ITS_NAME = f"""
import os
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("name", {NAMES})
def test_one(name, request):
    where = "-".join(os.environ.get(key, "") for key in ("DMATTN_FAMILY", "DMATTN_SANITIZER"))
    with open(os.environ["STUB_LOG"], "a") as log:
        log.write(f"{{where}} {{request.node.name}}" + chr(10))
    assert name != os.environ.get("STUB_FAILS")
"""
FUZZ = f"""
import json, os
from pathlib import Path
import pytest

@pytest.mark.gpu
def test_fuzz():
    if "DMATTN_FUZZ_LOG" not in os.environ:  # in the suite
        return
    assert os.environ["HYPOTHESIS_PROFILE"] == "nightly"
    path = Path(os.environ["DMATTN_FUZZ_LOG"])
    runs = json.loads(path.read_text())["runs"] if path.is_file() else []
    runs.append({{"family": os.environ["DMATTN_FAMILY"], "op": "select", "build": "b", "seeds": [0], "examples": 5000, "failures": 0}})
    path.write_text(json.dumps({{"torch": "1", "runs": runs, "commit": "{COMMIT}"}}))
"""


# In place of what takes seconds to import.
STAND_INS = {
    "modules/torch.py": "class cuda:\n    is_available = staticmethod(lambda: True)\n    get_device_capability = lambda: (9, 0)\n",
    "modules/dmattn/__init__.py": '__version__ = "1"\n',
    "modules/dmattn_bench/__init__.py": "",
    "modules/dmattn_bench/rows.py": (TESTS.parent / "benchmarks/dmattn_bench/rows.py").read_text(),
    "modules/dmattn_bench/records.py": f"""
def provenance(device):
    machine = {{"name": "a-gpu", "gpu": "A GPU", "driver": "1"}}
    date = "2026-01-01T00:00:00+00:00"
    return {{"commit": "{COMMIT}89", "date": date, "machine": machine, "torch": "1", "cuda": "1", "python": "3", "uncommitted_changes": False}}
""",
    "pyproject.toml": """
[tool.pytest.ini_options]
pythonpath = ["tests/support"]
addopts = ["--strict-markers", "--import-mode=importlib"]
markers = ["gpu: as there"]
""",
}
FEW_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture
def checkout(tmp_path):
    """A folder like the repository whose tests take no time, on a machine that seems to have a GPU."""
    tests = tmp_path / "checkout/tests"
    tests.mkdir(parents=True)
    for folder in ("support", "ops", "cuda"):
        (tests / folder).mkdir()
    shutil.copy(TESTS / "support/selection.py", tests / "support")
    (tests.parent / "tools").mkdir()
    for name in ("evidence.sh", "evidence.py"):
        shutil.copy(TESTS.parent / "tools" / name, tests.parent / "tools")
    (tests / "support/devices.py").write_text('DEVICE = "cuda"\n')
    (tests / "conftest.py").write_text("from selection import pytest_addoption, pytest_collection_modifyitems\n")
    (tests / "cuda/test_sanitized.py").write_text(WRITES_ITS_NAME)
    (tests / "ops/test_fuzz.py").write_text(FUZZ)
    for name, text in STAND_INS.items():
        (tests.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (tests.parent / name).write_text(text)
    stub = tmp_path / "bin/compute-sanitizer"
    stub.parent.mkdir()
    stub.write_text(STUB)
    stub.chmod(0o755)
    return tests.parent


def evidence(checkout, *arguments, **environment):
    """Runs evidence.sh; returns the finished process and which test ran how often under which family and tool."""
    log = checkout / "ran"
    log.write_text("")
    program = ["bash", str(checkout / "tools/evidence.sh"), "-o", str(checkout / "out"), *arguments]
    given = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("DMATTN_", "PYTEST_"))},
        "PATH": f"{checkout.parent / 'bin'}:{os.environ['PATH']}", "PYTHON": sys.executable, "STUB_PYTHON": sys.executable,
        "PYTHONPATH": str(checkout / "modules"), "STUB_LOG": str(log), "FAMILIES": "sm80", "WORKERS": "1", **FEW_PLUGINS, **environment,
    }  # fmt: skip
    done = subprocess.run(program, env=given, capture_output=True, text=True, timeout=300)
    return done, collections.Counter(log.read_text().splitlines())


def results(checkout, name="suite"):
    (path,) = (checkout / "out").glob(f"*/{name}.json")
    return json.loads(path.read_text())


@pytest.mark.long
def test_all_parts_of_both_families(checkout):
    done, ran = evidence(checkout, FAMILIES="")  # those that the device runs
    assert done.returncode == 0, done.stdout + done.stderr
    # Every test once in each suite and once under each tool: the shards leave none out and run none twice.
    tools = ("", "memcheck", "racecheck", "synccheck")
    places = [f"{family}-{tool}" for family in ("auto", "sm80") for tool in tools]
    assert ran == {f"{place} test_one[{name}]": 1 for place in places for name in NAMES}
    (run,) = results(checkout)["runs"]
    assert run["commit"] == COMMIT
    assert run["suite"]["complete"]
    for family in ("auto", "sm80"):
        assert {key: run["suite"][family][key] for key in ("passed", "failed", "skipped")} == {
            "passed": 8,
            "failed": 0,
            "skipped": 0,
        }
        assert run["fuzz"][family]["passed"] == 1
        assert run["sanitizers"][family]["sees_a_planted_read"]
        for tool in tools[1:]:
            assert (run["sanitizers"][family][tool]["passed"], run["sanitizers"][family][tool]["errors"]) == (len(NAMES), 0)
    assert (run["sanitizers"]["of_tests"], run["sanitizers"]["reports"]) == (len(NAMES), 0)
    assert [entry["family"] for entry in results(checkout, "fuzz")["runs"]] == ["auto", "sm80"]
    with tarfile.open(checkout / "out/evidence.tgz") as archive:
        assert sum(name.endswith(".log") for name in archive.getnames()) == 2 * (1 + 1 + 3 * 4 + 1)


def test_the_fuzz_accumulates_over_builds_and_seeds(tmp_path):
    (tmp_path / "facts.json").write_text(json.dumps({"run": {"commit": COMMIT}}))
    path = tmp_path / "kept.json"
    usual = {"family": "auto", "op": "select", "build": "b", "seeds": [0, 1], "examples": 10, "failures": 0}
    for changed in ({}, {"examples": 11}, {"seeds": [2]}, {"build": "c"}, {"family": "sm80"}, {"seeds": [1, 2], "examples": 12}):
        run = usual | changed
        (tmp_path / "made.json").write_text(json.dumps({"device": "a GPU", "runs": [run]}))
        assert record_fuzz(tmp_path / "made.json", path, run["family"]) == []
    kept = json.loads(path.read_text())["runs"]
    assert sorted((run["family"], run["build"], *run["seeds"], run["examples"]) for run in kept) == [
        ("auto", "b", 1, 2, 12), ("auto", "c", 0, 1, 10), ("sm80", "b", 0, 1, 10)
    ]  # fmt: skip
    (tmp_path / "made.json").write_text(json.dumps({"device": "another GPU", "runs": [usual | {"failures": 1}]}))
    assert record_fuzz(tmp_path / "made.json", path, "auto") == ["fuzz auto select: 1 shards failed"]
    assert len(json.loads(path.read_text())["runs"]) == 1


def test_parts_of_one_commit_are_one_run(checkout):
    assert evidence(checkout, "fuzz", FAMILIES="auto")[0].returncode == 0
    done, _ = evidence(checkout, "suite", STUB_FAILS=NAMES[2])
    assert done.returncode == 1
    assert NAMES[2] in done.stdout
    (run,) = results(checkout)["runs"]
    assert run["suite"]["sm80"]["failed"] == len(run["suite"]["sm80"]["failures"]) == 1
    assert run["suite"]["complete"]
    assert run["fuzz"]["auto"]["passed"] == 1


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"STUB_FAILS": NAMES[4]}, f"test_one[{NAMES[4]}]"),
        ({"DMATTN_STUB": "memcheck-3/4"}, "sanitizers-sm80-memcheck-3: exit 99, 2 passed, 0 skipped, 3 errors"),
        ({"DMATTN_STUB": "silent-memcheck"}, "no summary"),
        ({"DMATTN_STUB": "blind"}, "memcheck did not see a read past the end"),
        ({"PATH": "/usr/bin:/bin"}, "exit 127"),
    ],
    ids=["a test fails", "a tool reports", "a tool does not end", "the tool sees nothing", "there is no tool"],
)
def test_what_goes_wrong_under_a_sanitizer_is_a_failure(checkout, environment, said):
    if "PATH" in environment and shutil.which("compute-sanitizer", path=environment["PATH"]):
        pytest.skip("the tool is there")
    done, _ = evidence(checkout, "sanitizers", TOOLS="memcheck", **environment)
    assert done.returncode == 1
    assert said in done.stdout, done.stdout + done.stderr


def test_without_a_gpu_nothing_counts_as_passed(checkout):
    (checkout / "tests/support/devices.py").write_text('DEVICE = "cpu"\n')
    fuzz = checkout / "out/a-gpu/fuzz.json"
    fuzz.parent.mkdir(parents=True)
    fuzz.write_text("{}")
    done, ran = evidence(checkout, "suite", "fuzz")
    assert done.returncode == 1
    assert not ran
    (run,) = results(checkout)["runs"]
    assert (run["suite"]["sm80"]["passed"], run["suite"]["complete"]) == (0, False)
    assert fuzz.read_text() == "{}"


def pytest_in(folder, *arguments, **environment):
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    given = {**os.environ, "STUB_LOG": str(folder / "ran"), **FEW_PLUGINS, **environment}
    done = subprocess.run(program, cwd=folder, env=given, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_a_shard_has_to_be_one_of_its_number(checkout):
    for shard in ("5/4", "0/4", "1"):
        code, said = pytest_in(checkout, DMATTN_SHARD=shard)
        assert code == 4
        assert f"DMATTN_SHARD: expected K/N with 1 <= K <= N, got {shard}" in said


@pytest.mark.parametrize("there", ["cuda", "cpu"])
def test_the_marker_follows_the_device(checkout, there):
    """Who takes the fixture, itself or through another one, has the marker where the device is a GPU; who is marked is skipped where not."""
    tests = checkout / "tests"
    (tests / "support/devices.py").write_text(f"DEVICE = {there!r}\n")
    (tests / "cuda/test_sanitized.py").unlink()
    (tests / "ops/test_fuzz.py").write_text(
        """
import pytest
@pytest.fixture
def device(): return "any"
@pytest.fixture
def dtype(device): return "any"
def test_takes_it(device): pass
def test_takes_it_through_another(dtype): pass
def test_takes_none(): pass
@pytest.mark.gpu
def test_marked(): pass
"""
    )
    code, said = pytest_in(checkout, "-vv", "-m", "gpu")
    chosen = dict(re.findall(r"::(\w+) (PASSED|SKIPPED)", said))
    of_a_gpu = dict.fromkeys(("test_takes_it", "test_takes_it_through_another", "test_marked"), "PASSED")
    assert chosen == (of_a_gpu if there == "cuda" else {"test_marked": "SKIPPED"})
    assert code == 0
    code, said = pytest_in(checkout, "-vv", "-m", "not gpu")
    everyone_else = {"test_takes_none"} | (set() if there == "cuda" else {"test_takes_it", "test_takes_it_through_another"})
    assert set(re.findall(r"::(\w+) PASSED", said)) == everyone_else


def test_facts_are_those_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("WHEEL", raising=False)
    families = facts(tmp_path)
    assert set(families.split()) <= {"auto", "sm80"}
    known = json.loads((tmp_path / "facts.json").read_text())
    assert known["folder"] == known["folder"].lower()
    assert (known["run"]["torch"], known["run"]["cuda"]) == (torch.__version__, torch.version.cuda)
    assert "wheel" not in known["run"]


def test_one_place_asks_for_a_gpu():
    """A test that asked by itself could run on a GPU without the marker."""
    asks = re.compile(r"cuda\.is_available\(\)|cuda\.is_initialized\(\)|skipif\([^)]*cuda(?!\.device_count)")
    found = {path.name for path in TESTS.rglob("*.py") if path != Path(__file__) and asks.search(path.read_text())}
    assert found == {"devices.py"}


@pytest.mark.long
def test_the_nightly_profile_draws_5000_examples_of_every_op(run_python):
    assert hypothesis.settings.get_profile("nightly").max_examples >= 5000
    program = "import test_fuzz; print(*test_fuzz.CHECKS, test_fuzz.SHARDS)"
    printed = run_python("-c", program, HYPOTHESIS_PROFILE="nightly").stdout.split()
    assert set(printed[:-1]) == CHECKED_OPS
    assert int(printed[-1]) > 1
