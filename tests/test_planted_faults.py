"""The tables of faults fit the sources: each can still be planted, and names tests that exist. ``tests/planted_faults.py`` plants them."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import planted_faults
import pytest
from faults import KINDS, all_faults

ROOT = Path(__file__).parent.parent
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


def test_there_are_enough_of_them():
    counted = collections.Counter(fault.kind for fault in FAULTS if not fault.harmless)
    assert counted["python"] + counted["cpu"] >= 62
    assert min(counted[kind] for kind in KINDS) >= 20
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)


def test_the_list_is_printed():
    program = [sys.executable, str(ROOT / "tests/planted_faults.py"), "--list", "--only", "cpu", "--match", "bfloat16"]
    finished = subprocess.run(program, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "cpu/convert.h: bfloat16 is truncated  [test_rounding.py]" in finished.stdout


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


def test_the_committed_table_is_of_faults_that_exist_and_has_no_survivor():
    rows = planted_faults.read_table(ROOT / "benchmarks/results/planted_faults.json")
    assert {row["outcome"] for row in rows.values()} == {"found"}
    counted = collections.Counter(row["kind"] for row in rows.values())
    assert min(counted[kind] for kind in KINDS if kind.startswith("cuda")) >= 20
