"""Habits of this code base that a program can watch; they need the checkout, and parts of them readelf or nm."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import dmattn
import pytest
import torch

ROOT = Path(__file__).parent.parent
OPS = {"select", "pack_tiles", "pack_bits", "forward", "backward"}


def tracked(*patterns: str) -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def output_of(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def schema_names() -> set[str]:
    return set(re.findall(r'm\.def\(\s*"(\w+)\(', (ROOT / "cpp/schema.cpp").read_text()))


def test_one_schema_block_in_one_file():
    blocks = {
        path.name: len(re.findall(r"^STABLE_TORCH_LIBRARY(?:_FRAGMENT)?\(", path.read_text(), re.M)) for path in tracked("cpp")
    }
    assert {name: count for name, count in blocks.items() if count} == {"schema.cpp": 1}


def test_every_op_has_a_fake_an_opcheck_and_a_refusal():
    names = schema_names()
    assert names == OPS
    fakes = set(re.findall(r'register_fake\("dmattn::(\w+)"', (ROOT / "python/dmattn/fake.py").read_text()))
    checked = set(re.findall(r"opcheck\(\s*ops\.(\w+)\.default", (ROOT / "tests/test_registration.py").read_text()))
    assert fakes == names
    assert checked == names
    for name in names:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dmattn::{name}", "CPU")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dmattn::{name}", "CompositeExplicitAutograd")


def test_ops_are_functional_and_take_no_lists():
    for name in schema_names():
        schema = str(getattr(torch.ops.dmattn, name).default._schema)
        assert "!" not in schema
        assert "[]" not in schema
        assert "*" not in schema


def test_the_specification_is_short_and_calls_no_kernel():
    source = (ROOT / "python/dmattn/reference.py").read_text()
    assert len(source.splitlines()) < 80
    imported = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.name for node in imported if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in imported if isinstance(node, ast.ImportFrom)}
    assert modules <= {"__future__", "collections.abc", "torch"}
    assert "torch.ops" not in source


def included(path: Path, seen: set[Path]) -> set[str]:
    """Everything a file includes, through our own headers."""
    seen.add(path)
    found = set()
    for kind, name in re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)', path.read_text(), re.M):
        ours = (path.parent / name).resolve()
        if kind == '"' and ours.is_file():
            if ours not in seen:
                found |= included(ours, seen)
        else:
            found.add(name)
    return found


def test_no_torch_below_the_plain_data_border():
    below = [
        ROOT / "cpp/params.h",
        ROOT / "cpp/cpu/kernels.h",
        ROOT / "cpp/cpu/kernels.cpp",
        *tracked("cpp/cuda/**/*.cu", "cpp/cuda/**/*.cuh"),
    ]
    for path in below:
        wrong = [name for name in included(path, set()) if name.startswith(("torch/", "ATen/", "c10/"))]
        assert not wrong, f"{path.relative_to(ROOT)} includes {wrong}"


def test_instruction_set_objects_export_their_table_only():
    """A weak symbol compiled for AVX-512 could be the one the linker keeps for everybody."""
    objects = [path for path in ROOT.glob("build/**/dmattn_cpu_*.dir/**/*.o") if "asan" not in str(path)]
    if not objects:
        pytest.skip("no build tree at hand")
    for path in objects:
        shared = [
            line.split()[-1]
            for line in output_of("nm", "--defined-only", "--extern-only", str(path)).splitlines()
            if line.strip()
        ]
        weak = [line for line in output_of("nm", str(path)).splitlines() if re.search(r" [VWu] ", line)]
        defined_weak = [line for line in weak if line.split()[0] not in ("w", "v", "W", "V")]
        assert not defined_weak, f"{path.name}: weak symbols {defined_weak[:5]}"
        assert all("kKernels" in name for name in shared), f"{path.name} exports {shared[:5]}"


def test_one_version_in_one_place():
    quoted = re.compile(rf'["\']{re.escape(dmattn.__version__)}["\']')
    stated = [path for path in tracked("*.py", "*.toml", "*.txt", "*.cmake", "*.cpp", "*.h") if quoted.search(path.read_text())]
    assert [str(path.relative_to(ROOT)) for path in stated] == ["python/dmattn/_version.py"]


def test_no_paths_of_a_machine():
    places = re.compile(r"(/home/|/root/|/Users/|/mnt/|/work" + r"/|\b[A-Z]:\\\\Users)")
    text = (".py", ".h", ".cpp", ".cu", ".cuh", ".cmake", ".txt", ".toml", ".md", ".sh", ".yml", ".yaml", "")
    for path in tracked():
        if path.suffix in text and path != Path(__file__):
            found = places.search(path.read_text(errors="ignore"))
            assert not found, f"{path.relative_to(ROOT)}: {found.group(0)}"


def test_the_ops_library_needs_libtorch_and_no_other_torch_or_cuda_library():
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", output_of("readelf", "-d", dmattn.library_path()))
    assert [name for name in needed if re.search(r"torch|c10|cuda|nv|gomp|omp", name)] == ["libtorch.so"]
    assert not re.search(r"RPATH|RUNPATH", output_of("readelf", "-d", dmattn.library_path()))


def test_the_stable_abi_audit_passes():
    program = Path(sys.executable).parent / "torch-abi-audit"
    if not program.is_file():
        pytest.skip("torch-abi-audit is not installed")
    audited = subprocess.run([str(program), "--check", "both", dmattn.library_path()], capture_output=True, text=True)
    assert audited.returncode == 0, audited.stdout + audited.stderr


def test_every_file_opens_by_saying_what_it_is():
    for path in tracked("*.py", "*.h", "*.cpp", "*.cu", "*.cuh", "*.cmake", "*.sh"):
        lines = [
            line for line in path.read_text().splitlines() if line.strip() and not re.match(r"#!|# ruff:|#pragma once", line)
        ]
        opens = {".py": ('"""', 'r"""')}.get(path.suffix, ("//", "#"))
        assert lines, f"{path.relative_to(ROOT)} is empty"
        assert lines[0].startswith(opens), f"{path.relative_to(ROOT)} opens with: {lines[0]}"


def test_typed_marker_is_installed():
    assert (Path(dmattn.__file__).parent / "py.typed").is_file()
