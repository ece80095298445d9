"""An AOTInductor package with dmattn ops runs in Python and, through the program in examples/aot_inductor, in C++ without Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import dmattn
import pytest
import torch
import torch._inductor.codecache  # torch 2.10 forgets to, and then cannot load a package

EXAMPLE = Path(__file__).parent.parent / "examples" / "aot_inductor"


def run(*command: str | Path) -> str:
    done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{command[0]} gave {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What export_model.py writes."""
    folder = tmp_path_factory.mktemp("aot_inductor")
    run(sys.executable, EXAMPLE / "export_model.py", folder)
    return folder


@pytest.mark.slow
def test_package_runs_in_python_at_any_length(folder: Path) -> None:
    model = torch._inductor.aoti_load_package(str(folder / "attention.pt2"))
    cases = sorted(folder.glob("case_*.pt"))
    assert len(cases) == 2
    for case in cases:
        *given, expected = torch.load(case)
        torch.testing.assert_close(model(*given), expected)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler")
def test_package_runs_in_a_cpp_program(folder: Path) -> None:
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{Path('/usr/bin')}") or "cmake"
    build = folder / "build"
    run(cmake, "-S", EXAMPLE, "-B", build, f"-DTORCH_DIR={torch.__path__[0]}")
    run(cmake, "--build", build)
    printed = run(build / "run_package", dmattn.library_path(), folder)
    assert printed.count("agrees") == 2

    refused = subprocess.run([build / "run_package", folder / "nowhere.so", folder], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "nowhere.so" in refused.stderr
