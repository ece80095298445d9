"""The script that tests one wheel beside many Pythons: what it runs calls everything there is, and its table says what came of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import dmattn
import pytest
import wheel_matrix

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks/results/wheel_matrix.json"


def test_the_quick_tests_call_every_op_and_public_function():
    texts = "".join((ROOT / "tests" / name).read_text() for name in wheel_matrix.QUICK)
    ops = re.findall(r'"(\w+)\(', (ROOT / "cpp/schema.cpp").read_text())
    assert len(ops) > 10
    public = [name for name in dmattn.__all__ if callable(getattr(dmattn, name))]
    # Nobody calls these by name: a cache's chunks are joined and extended by ops, and stats() makes a Stats.
    called_by = {"cache_join": "BoundedCache", "cache_extend": "BoundedCache", "Stats": "stats"}
    missing = [name for name in [*ops, *public] if not re.search(rf"\b{called_by.get(name, name)}\b", texts)]
    assert not missing


def test_the_matrix_is_what_the_project_promises():
    said = re.search(r'requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text())
    least = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert said is not None
    assert least is not None
    assert said[1] == wheel_matrix.PYTHONS[0]
    assert wheel_matrix.TORCHES[0] == f"{least[1]}.*"


def test_rows_replace_their_own(tmp_path):
    path = tmp_path / "table.json"
    row = {"python": "3.10", "asked": "newest", "torch": "2.99.0", "passed": 3, "failed": 0, "skipped": 1, "seconds": 2}
    row |= {"import_seconds": 0.1}
    wheel_matrix.record(path, {"sha256": "1"}, [row | {"asked": "2.98.*"}, row | {"python": "3.9"}])
    wheel_matrix.record(path, {"sha256": "1"}, [row, row | {"asked": "2.98.*", "failed": 1}])
    table = json.loads(path.read_text())
    assert [(row["python"], row["asked"], row["failed"]) for row in table["rows"]] == [
        ("3.9", "newest", 0), ("3.10", "2.98.*", 1), ("3.10", "newest", 0),
    ]  # fmt: skip
    assert [wheel_matrix.is_good(row) for row in table["rows"]] == [True, False, True]
    assert not wheel_matrix.is_good(row | {"import_seconds": wheel_matrix.IMPORT_LIMIT})
    assert not wheel_matrix.is_good({"python": "3.14", "asked": "newest", "error": "missing"})
    assert "wrong" in wheel_matrix.line_of(table["rows"][1])
    # What is known of one file says nothing of another.
    wheel_matrix.record(path, {"sha256": "2"}, [row])
    assert json.loads(path.read_text()) == {"sha256": "2", "rows": [row]}


def test_a_report_of_pytest_is_counted(tmp_path):
    report = tmp_path / "report.xml"
    cases = '<testcase classname="a" name="b"/><testcase classname="a" name="c"><skipped/></testcase>'
    report.write_text(f'<testsuites>{cases}<testcase classname="a" name="d"><failure/></testcase></testsuites>')
    assert wheel_matrix.counts(report) == {"passed": 1, "failed": 1, "skipped": 1, "failures": ["a::d"]}


@pytest.mark.skipif(not TABLE.exists(), reason="no table is committed")
def test_the_committed_table_is_good_throughout():
    rows = json.loads(TABLE.read_text())["rows"]
    assert {row["python"] for row in rows} == set(wheel_matrix.PYTHONS)
    assert all(wheel_matrix.is_good(row) for row in rows)
