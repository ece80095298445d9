"""The tables of faults fit the sources: each can still be planted, and names tests that exist. ``tools/planted_faults.py`` plants them."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import planted_faults
import pytest
from faults import KINDS, all_faults

ROOT = Path(__file__).parents[2]
FAULTS = all_faults()


@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_still_applies(kind):
    for fault in FAULTS:
        if fault.kind == kind:
            assert planted_faults.applied(fault, ROOT) != (ROOT / fault.file).read_text(), f"{fault}: changes nothing"


def test_a_fault_whose_text_is_gone_says_so():
    gone = dataclasses.replace(FAULTS[0], old="no such text anywhere")
    with pytest.raises(ValueError, match="this fault must be rewritten: its old text occurs 0 times"):
        planted_faults.applied(gone, ROOT)
    often = dataclasses.replace(FAULTS[0], old="return")
    with pytest.raises(ValueError, match=r"this fault must be rewritten: its old text occurs [0-9]+ times"):
        planted_faults.applied(often, ROOT)


def test_every_named_test_exists():
    for fault in FAULTS:
        for test in fault.tests.split():
            file, _, function = test.partition("::")
            text = (ROOT / "tests" / file).read_text()
            assert not function or re.search(rf"^def {function}\(", text, re.M), f"{fault}: no test {test}"


def test_outcomes_are_added_to_a_table(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    first, second = (fault for fault in FAULTS[:2])
    survived, found = planted_faults.Outcome(first, "survived"), planted_faults.Outcome(second, "found", "test_x.py::test_y")
    planted_faults.write_table(path, [found, planted_faults.Outcome(dataclasses.replace(first, wrong="gone"), "found")])
    monkeypatch.setenv("PATH", "")  # no git
    monkeypatch.setenv("DMATTN_COMMIT", "0123456")
    planted_faults.write_table(path, [survived])
    table = json.loads(path.read_text())
    assert (table["planted"], table["found"]) == (2, 1)
    assert [(row["fault"], row["outcome"]) for row in table["faults"]] == [(str(first), "survived"), (str(second), "found")]
    assert table["faults"][0]["commit"] == "0123456"


# Plants three faults one after the other: the tests of the first fail, those of the second never end.
PROGRAM = """
import argparse, asyncio, sys, types
from pathlib import Path
import planted_faults
from faults import Fault

work = Path(sys.argv[1])
base = types.SimpleNamespace(source=work / "source", site=work / "site", build=work)
options = argparse.Namespace(jobs=1, test_jobs=1, timeout=100, all_tests=False, keep=False, no_baseline=True, table=work / "table.json")
faults = [Fault("python", "python/dmattn/it.py", "1", str(n), f"it is {n}", f"test_{n}.py") for n in (2, 3, 4)]
planted_faults.all_faults = lambda: faults
sys.exit(asyncio.run(planted_faults.plant_all(options, faults, {64: base}, work)))
"""


def test_an_interrupted_run_says_what_it_knows(tmp_path):
    for folder in ("source/python/dmattn", "source/tests", "site/dmattn"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "source/python/dmattn/it.py").write_text("IT = 1\n")
    (tmp_path / "source/tests/test_2.py").write_text("def test_it():\n    assert False\n")
    says_who = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    (tmp_path / "source/tests/test_3.py").write_text(f"import os, time\ndef test_it():\n    {says_who}\n    time.sleep(100)\n")
    program = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tools'}:{ROOT / 'benchmarks'}", "PYTHONUNBUFFERED": "1"}
    running = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert running.poll() is None, running.communicate()
            assert time.monotonic() < until
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        output, errors = running.communicate(timeout=60)
    finally:
        running.kill()
    assert errors == ""
    assert running.returncode == 1
    assert "interrupted" in output
    assert "1 of 3 planted: 1 found, 0 survived, 0 not as they should be" in output
    assert [row["fault"] for row in json.loads((tmp_path / "table.json").read_text())["faults"]] == ["it.py: it is 2"]
    with pytest.raises(ProcessLookupError):  # nothing that it started is left
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_faults_of_kernels_are_built_for_the_size_they_name():
    instances = [f"CMakeFiles/x.dir/generated/{name}.cu.o" for name in (
        "sm80_key_major_64", "sm90_forward_64_kAll", "sm80_decode_256", "sm90_forward_256_kAll", "sm90_backward_wide_256_kInOrder"
    )]  # fmt: skip
    common = "CMakeFiles/x.dir/cpp/cuda/common/reduce/sum.cu.o"
    assert [name for name in (*instances, common) if planted_faults.is_tested(name, 64)] == [*instances[:2], common]
    assert [name for name in (*instances, common) if planted_faults.is_tested(name, 256)] == [*instances[2:], common]
    wide = [fault for fault in FAULTS if fault.file.endswith("backward/kernel_wide.cuh")]
    assert wide
    assert {fault.size for fault in wide} == {256}


def test_a_build_of_other_sources_is_refused(tmp_path):
    built, source = tmp_path / "built", tmp_path / "source"
    shutil.copytree(ROOT / "cpp", source / "cpp")
    (source / "cpp/params.h").write_text("// something else\n")
    built.mkdir()
    (built / "CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={source}\n")
    with pytest.raises(SystemExit, match=r"--build: expected a build of these sources, got one with another cpp/params\.h"):
        planted_faults.Base(tmp_path / "work", None, "", 1, built)


def test_the_committed_table_is_of_faults_that_exist_and_has_no_survivor():
    rows = planted_faults.read_table(ROOT / "benchmarks/results/planted_faults.json")
    assert {row["outcome"] for row in rows.values()} == {"found"}
    counted = collections.Counter(row["kind"] for row in rows.values())
    assert min(counted[kind] for kind in KINDS if kind.startswith("cuda")) >= 20
