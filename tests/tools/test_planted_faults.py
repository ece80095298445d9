"""Mutations are small slips in code alone, named and drawn alike whatever changes elsewhere; those planted have their outcomes recorded."""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import types
from pathlib import Path

import mutations
import planted_faults
import pytest
from equivalent_mutations import EQUIVALENT, UNFOUND
from mutations import AREAS, ROOT, mutations_of, sample

PYTHON = '''
"""At most 3 + 4."""
@overload
def clip(x, low=1): ...
def clip(x: Literal[1], low, high):
    if not x <= low + 1 and True:
        raise ValueError(f"{x + 1} and {low - 1}")
    self.last = max(low, high)
'''
CPP = """
#include "a + b.h"  // 1 < 2
namespace n {
template <int N, class T> struct Sums {
  template <class U> __global__ void __launch_bounds__(32, 2) add(const T& x, int n) {
    for (int i = 0; i < n; ++i) sums[i] += read<T, N>("1 < 2", low, high);  /* 1 + 2 */
    __syncthreads();
    if (!done && x->is_last()) *where = R"(1 + "2)"[min(a, b) - 1];
  }
};
}  // namespace n
"""


def edits(text: str, language: str) -> set[str]:
    """A file's edits with the functions they are in."""
    edits_of = mutations.python_edits if language == "python" else mutations.cpp_edits
    return {f"{function}: {operator}: {text[start:end]} -> {new}" for function, operator, start, end, new in edits_of(text)}


def test_operators_on_python():
    assert edits(PYTHON, "python") == {
        "clip: and, or: not x <= low + 1 and True -> (not x <= low + 1 or True)",
        "clip: dropped not: not x <= low + 1 -> (x <= low + 1)",
        "clip: comparison: x <= low + 1 -> (x < low + 1)",
        "clip: arithmetic: low + 1 -> (low - 1)",
        "clip: off by one: 1 -> 2",
        "clip: true, false: True -> False",
        'clip: removed raise: raise ValueError(f"{x + 1} and {low - 1}") -> pass',
        "clip: minimum, maximum: max -> min",
        "clip: swapped arguments: low, high -> high, low",
        "clip: removed statement: self.last = max(low, high) -> pass",
    }


def test_operators_on_cpp():
    assert edits(CPP, "cpp") == {
        "Sums.add: off by one: 0 -> 1",
        "Sums.add: comparison: < -> <=",
        "Sums.add: arithmetic: += -> -=",
        'Sums.add: removed statement: sums[i] += read<T, N>("1 < 2", low, high) -> ',
        "Sums.add: swapped arguments: low, high -> high, low",
        "Sums.add: removed barrier: __syncthreads() -> ",
        "Sums.add: dropped not: ! -> ",
        "Sums.add: and, or: && -> ||",
        "Sums.add: minimum, maximum: min -> max",
        "Sums.add: swapped arguments: a, b -> b, a",
        "Sums.add: arithmetic: - -> +",
        "Sums.add: off by one: 1 -> 2",
    }


@pytest.mark.parametrize("area", AREAS)
def test_mutations_of_the_sources(area):
    found = mutations_of(area)
    assert len(found) == len({mutation.name for mutation in found}) > 1000
    for mutation in sample(found)[:50]:
        text = (ROOT / mutation.file).read_text()
        changed = mutation.applied(text)
        assert changed != text
        assert changed.startswith(text[: mutation.start])
        assert changed.endswith(text[mutation.end :])
        if area == "python":
            ast.parse(changed)
    for file in {mutation.file for mutation in found}:
        for name in planted_faults.tests_of(file):
            assert list((ROOT / "tests").rglob(name)), f"{file}: no {name}"


def test_a_change_of_one_function_renames_and_redraws_no_other(tmp_path):
    file = tmp_path / "python/dmattn/it.py"
    file.parent.mkdir(parents=True)
    file.write_text(PYTHON)

    def drawn():
        names: dict[str, list[str]] = {}
        for mutation in sample(mutations_of("python", tmp_path)):
            if mutation.function == "clip":
                names.setdefault(mutation.operator, []).append(mutation.name)
        return names

    before = drawn()
    file.write_text("def other():\n    return 1 < 2\n" + PYTHON)
    assert drawn() == before


def test_the_object_files_that_a_change_needs():
    """Those that include the file: of the CPU kernels for this processor alone, of the CUDA kernels for the size that is built."""
    names = [
        "x.dir/cpp/cpu/forward.cpp.o", "dmattn_cpu_avx2.dir/cpp/cpu/kernels.cpp.o", "dmattn_cpu_baseline.dir/cpp/cpu/kernels.cpp.o",
        "x.dir/generated/sm80_forward_64_kPlain.cu.o", "x.dir/generated/sm90_forward_256_kPlain.cu.o", "x.dir/cpp/cuda/sum.cu.o",
    ]  # fmt: skip
    ninja = "\n\n".join(f"{name}: #deps 2, deps mtime 1 (VALID)\n    ../source/cpp/a.h\n    /usr/include/b.h" for name in names)
    base = types.SimpleNamespace(
        build=Path("/w/build"), compiled=Path("/w/source"), level="avx2", size=64, dependencies=f"{ninja}\n\n"
    )
    assert planted_faults.Build.objects_of(base, "cpp/a.h") == [names[0], names[1], names[3], names[5]]
    assert planted_faults.Build.objects_of(base, "cpp/b.h") == []


def test_outcomes_are_recorded(tmp_path, monkeypatch):
    for folder in ("source/python/dmattn", "source/tests", "source/tools", "site/dmattn"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "tools/executed.py", tmp_path / "source/tools")
    (tmp_path / "site/dmattn/__init__.py").touch()
    for folder in ("source/python", "site"):
        (tmp_path / folder / "dmattn/it.py").write_text("def limit():\n    return 1\n\ndef name():\n    return False\n")
    (tmp_path / "source/pytest.ini").write_text("[pytest]")
    (tmp_path / "source/tests/conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--quick', action='store_true')"
    )
    (tmp_path / "source/tests/test_it.py").write_text(
        "import dmattn.it\ndef test_limit():\n    assert dmattn.it.limit() < 2\n\n"
        "def test_that_always_fails():\n    raise RuntimeError\n"
    )
    monkeypatch.setattr(planted_faults, "TESTS", (("it", "it"),))
    base = types.SimpleNamespace(source=tmp_path / "source", site=tmp_path / "site", size=None)
    options = argparse.Namespace(compilers=1, full=False, timeout=100, threads=1, jobs=1)
    drawn = mutations_of("python", tmp_path / "source")
    record = tmp_path / "record.json"
    planter = planted_faults.Planter(base, options, False)
    planter.survey(drawn)
    assert [*planter.passing] == ["tests/test_it.py::test_limit"]
    assert planted_faults.plant_all(planter, drawn, 2, record) == 1
    table = json.loads(record.read_text())
    assert table["areas"]["python"] == {"found": 1, "survived": 1, "equivalent": 0}
    assert table["areas"]["cpu"] == "not run"
    rows = {row["function"]: (row["outcome"], row["found_by"]) for row in table["mutations"]}
    assert rows == {"limit": ("found", "tests/test_it.py::test_limit"), "name": ("survived", "")}
    monkeypatch.setitem(EQUIVALENT, drawn[1].name, (drawn[1].edit, "nobody asks"))
    assert planted_faults.plant_all(planter, drawn[1:], 1, record) == 0
    assert json.loads(record.read_text())["areas"]["python"] == {"found": 1, "survived": 0, "equivalent": 1}


def test_mutations_with_a_reason_exist():
    known = {mutation.name: mutation.edit for area in AREAS for mutation in mutations_of(area)}
    given = {**EQUIVALENT, **UNFOUND}
    assert {name: edit for name, (edit, _) in given.items()} == {name: known.get(name) for name in given}


def test_survivors_in_the_record_are_few_and_are_those_with_a_reason():
    record = json.loads(planted_faults.RECORD.read_text())
    areas = {area: counts for area, counts in record["areas"].items() if counts != "not run"}
    assert areas["python"]["found"] >= 30
    assert areas["cpu"]["found"] >= 15
    survivors = [row for row in record["mutations"] if row["outcome"] == "survived"]
    assert len(survivors) <= 0.02 * sum(counts["found"] + counts["survived"] for counts in areas.values())
    names = (f"{row['file']}:{row['function']}: {row['operator']} {row['occurrence']}" for row in survivors)
    reasons = dict(zip(names, (row["found_by"] for row in survivors), strict=True))
    assert reasons == {name: reason for name, (_, reason) in UNFOUND.items()}
