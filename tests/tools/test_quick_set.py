"""``pytest --quick``, which ``make test`` runs: it leaves no op, no public function and no public method out."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import types
from collections import defaultdict
from pathlib import Path

import dmattn
import selection

TESTS = Path(__file__).parents[1]
SCHEMA = TESTS.parent / "cpp" / "schema.cpp"
LEFT_OUT = selection.NOT_QUICK | {"gpu"}  # markers of tests that do not run, in the quick set or on a machine without a GPU
MODULES = [
    "dmattn", "dmattn.masks", "dmattn.nn", "dmattn.distributed", "dmattn.testing", "dmattn.compat", "dmattn.compat.block_sparse_attn",
    "dmattn.compat.flash_attn", "dmattn.compat.flash_dmattn", "dmattn.compat.flashmask", "dmattn.compat.triton_flashattn",
    "dmattn.integrations.transformers",
]  # fmt: skip


def names_in(node: ast.AST) -> set[str]:
    """Names and attributes that code reads or calls, and its arguments, which may be fixtures. Imports are no use of a name."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            found.add(each.id)
        elif isinstance(each, ast.Attribute):
            found.add(each.attr)
        elif isinstance(each, ast.arg):
            found.add(each.arg)
    return found


def names_in_body(function: ast.FunctionDef) -> set[str]:
    """Without the decorators: of the cases that they list the quick set runs a few."""
    parts = [function.args, *function.body]
    return set().union(*(names_in(part) for part in parts))


def markers(node: ast.AST) -> set[str]:
    return {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "pytest.mark"}


@functools.cache
def quick_names() -> frozenset[str]:
    """What the test functions of the quick set name, and the helpers that they name, and so on."""
    wanted: set[str] = set()
    helpers: dict[str, set[str]] = defaultdict(set)
    for path in TESTS.rglob("*.py"):
        tree = ast.parse(path.read_text())
        of_all = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
        is_left_out = any(LEFT_OUT & markers(node) for node in of_all)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                if not (is_left_out or any(LEFT_OUT & markers(each) for each in node.decorator_list)):
                    wanted |= names_in_body(node)
            elif isinstance(node, ast.FunctionDef):
                helpers[node.name] |= names_in_body(node)
            elif isinstance(node, ast.ClassDef):
                helpers[node.name] |= names_in(node)
    reached: set[str] = set()
    while new := wanted - reached:
        reached |= new
        wanted = wanted.union(*(helpers[name] for name in new if name in helpers))
    return frozenset(reached)


def public_names(module: types.ModuleType) -> set[str]:
    """Functions and classes."""
    given = getattr(module, "__all__", vars(module))
    found = {name: getattr(module, name) for name in given if not name.startswith("_")}
    return {
        name for name, value in found.items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__.startswith("dmattn")
    }  # fmt: skip


def public_methods(module: types.ModuleType) -> set[str]:
    """Methods and properties that its public classes define themselves, and do not override: those their base class calls."""
    classes = [getattr(module, name) for name in public_names(module) if inspect.isclass(getattr(module, name))]
    kinds = (types.FunctionType, classmethod, staticmethod, property)
    return {
        f"{each.__name__}.{name}" for each in classes for name, value in vars(each).items()
        if isinstance(value, kinds) and not name.startswith("_") and not any(hasattr(base, name) for base in each.__mro__[1:])
    }  # fmt: skip


def unnamed(names: set[str]) -> list[str]:
    return sorted(name for name in names if name.rpartition(".")[2] not in quick_names())


def test_every_public_function_is_in_the_quick_set():
    modules = MODULES if importlib.util.find_spec("transformers") else [name for name in MODULES if "transformers" not in name]
    missing = {name: unnamed(public_names(importlib.import_module(name))) for name in modules}
    assert not any(missing.values()), f"no test of the quick set names {missing}"


def test_every_public_method_is_in_the_quick_set():
    methods = {"IntervalMask.top_k", "BoundedCache.reset", "DynamicMaskAttention.new_cache"}
    found = public_methods(dmattn) | public_methods(dmattn.nn)
    assert methods <= found
    assert not unnamed(found), f"no test of the quick set names {unnamed(found)}"


def test_every_op_is_in_the_quick_set():
    ops = set(re.findall(r'm\.def\(\s*"(\w+)\(', SCHEMA.read_text()))
    assert "forward" in ops
    assert not unnamed(ops), f"no test of the quick set names {unnamed(ops)}"


class Item:
    """What ``selection.quick_set`` asks of a test."""

    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid, self.marks = nodeid, marks

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


def test_the_quick_set_has_some_cases_of_every_function():
    cases = [Item(f"a.py::many[{i}]", *["skip"] * (i % 2)) for i in range(20)]
    others = [Item("a.py::one"), Item("b.py::many"), Item("a.py::gpu[0]", "skip")]
    left_out = [Item("a.py::minutes", "slow"), Item("a.py::programs", "long")]
    brief = [Item(f"a.py::errors[{i}]", "brief") for i in range(9)]
    chosen = selection.quick_set([*cases, *others, *left_out, *brief])
    assert {*brief} <= {*chosen}
    assert {*others} == {item for item in {*others, *left_out} if item in chosen}
    of_many = [item for item in chosen if item.nodeid.startswith("a.py::many")]
    assert len(of_many) == selection.QUICK_CASES
    assert not any(item.marks for item in of_many)


def test_names_are_those_of_bodies_without_decorators_and_imports():
    tree = ast.parse("@mark(a.b)\ndef test_it(c):\n    from d import e\n    f.g(h)\n")
    assert names_in_body(tree.body[0]) == {"c", "f", "g", "h"}
