"""Which CUDA targets a build has: those of the GPUs that nvidia-smi lists (AUTO), all (ON), none (OFF), or those that are named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import dmattn
import pytest
from dmattn.__main__ import report

ROOT = Path(__file__).parents[2]
CMAKE = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or ""
ALL = "80-real;90a-real;100-real;120-real;80-virtual"
PROJECT = """
cmake_minimum_required(VERSION 3.26)
project(choice LANGUAGES NONE)
list(APPEND CMAKE_MODULE_PATH "{root}/cmake")
include(cuda)
message(STATUS "got ${{DMATTN_WITH_CUDA}} [${{DMATTN_CUDA_ARCH_LIST}}] ${{DMATTN_CUDA_CHOICE}}")
"""


def is_new_enough() -> bool:
    text = subprocess.run([CMAKE, "--version"], capture_output=True, text=True).stdout if CMAKE else ""
    found = re.search(r"version (\d+)\.(\d+)", text)
    return found is not None and (int(found[1]), int(found[2])) >= (3, 26)


needs_cmake = pytest.mark.skipif(not is_new_enough(), reason="needs CMake 3.26")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Call it with what nvidia-smi lists on a machine, None where it fails."""

    def with_gpus(listed: str | None) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text("#!/bin/sh\nexit 9\n" if listed is None else f"#!/bin/sh\ncat <<'END'\n{listed}\nEND\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return with_gpus


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    own = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "CUDA", "CUDA_ARCHS")  # of a make that runs these tests
    environment = {name: value for name, value in os.environ.items() if name not in own}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


def choice(*settings: str) -> str:
    """What cmake/cuda_choice.cmake prints as a script."""
    finished = run(CMAKE, *(f"-D{each}" for each in settings), "-P", "cmake/cuda_choice.cmake")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("\n") == 1
    return finished.stdout


def configured(folder: Path, *settings: str) -> tuple[int, str]:
    """The exit status and the words of a configuration that includes cmake/cuda.cmake and nothing else."""
    (folder / "project").mkdir()
    (folder / "project" / "CMakeLists.txt").write_text(PROJECT.format(root=ROOT))
    finished = run(CMAKE, "-S", folder / "project", "-B", folder / "out", *(f"-D{each}" for each in settings))
    return finished.returncode, " ".join((finished.stdout + finished.stderr).split())


@needs_cmake
@pytest.mark.parametrize(
    ("listed", "targets"),
    [
        ("9.0", "90a-real"),
        ("8.9", "89-real"),
        ("8.0\n8.0", "80-real"),
        ("7.5\n8.6\n9.0", "86-real, 90a-real"),
        ("12.0", "120-real"),
        ("9.0\nWARNING: infoROM is corrupted at gpu 0000:3B:00.0", "90a-real"),
    ],
    ids=["hopper", "ada", "two alike", "three", "blackwell", "with a warning"],
)
def test_auto_names_the_visible_gpus(machine, listed, targets):
    machine(listed)
    assert f"CUDA code for {targets}, if CMake finds nvcc" in choice("DMATTN_CUDA=AUTO")


@needs_cmake
@pytest.mark.parametrize("listed", [None, "", "7.5", "[N/A]"], ids=["fails", "lists none", "old", "unknown"])
def test_auto_without_a_gpu_says_how_to_get_cuda_code(machine, listed):
    machine(listed)
    said = choice("DMATTN_CUDA=AUTO")
    assert "no CUDA code" in said
    assert "make CUDA=ON" in said
    assert "-C cmake.define.DMATTN_CUDA=ON" in said


@needs_cmake
@pytest.mark.parametrize("listed", [None, "9.0"], ids=["no GPU", "GPU"])
def test_on_and_off_do_not_depend_on_the_machine(machine, listed):
    machine(listed)
    assert f"CUDA code for {ALL.replace(';', ', ')}, if" in choice("DMATTN_CUDA=ON")
    assert "no CUDA code: DMATTN_CUDA=OFF" in choice("DMATTN_CUDA=OFF", "DMATTN_CUDA_ARCHS=90a-real")
    for setting in ("AUTO", "ON"):
        assert "CUDA code for 89-real, 90-virtual, if" in choice(f"DMATTN_CUDA={setting}", "DMATTN_CUDA_ARCHS=89-real;90-virtual")


@needs_cmake
def test_without_nvcc_auto_says_so_and_on_fails(machine, tmp_path, monkeypatch):
    machine("9.0")
    monkeypatch.setenv("CUDACXX", str(tmp_path / "missing" / "nvcc"))
    (tmp_path / "auto").mkdir()
    (tmp_path / "on").mkdir()
    status, said = configured(tmp_path / "auto", "DMATTN_CUDA=AUTO")
    assert status == 0
    assert "got OFF [] DMATTN_CUDA=AUTO found no nvcc for the GPU (90a-real)" in said
    status, said = configured(tmp_path / "on", "DMATTN_CUDA=ON")
    assert status != 0
    assert "DMATTN_CUDA=ON, but no CUDA compiler was found" in said


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(("rule", "setting"), [("build", "AUTO"), ("test", "AUTO"), ("wheel", "ON"), ("hub", "ON")])
def test_make_builds_for_this_machine_and_wheels_for_all(rule, setting):
    for given, expected in (((), setting), (("CUDA=OFF",), "OFF"), (("CUDA=ON",), "ON")):
        printed = run("make", "-n", rule, *given).stdout
        assert set(re.findall(r"DMATTN_CUDA=(\w+)", printed)) == {expected}
        assert "cmake/cuda_choice.cmake" in printed


def test_the_report_says_which_case_the_build_was():
    chosen = dmattn.build_info()["cuda_choice"]
    assert re.match(r"DMATTN_CUDA=(AUTO|ON|OFF)\b", chosen)
    assert re.search(rf"^cuda choice +: {re.escape(chosen)}$", report(), re.M)
