"""AOTInductor packages with dmattn ops run in Python and, through the programs in examples/aot_inductor, in C++ without Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import dmattn
import pytest
import torch
import torch._inductor.codecache  # torch 2.10 forgets to, and then cannot load a package

EXAMPLE = Path(__file__).parents[2] / "examples" / "aot_inductor"


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


@pytest.fixture(scope="module")
def generation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What export_generation.py writes: a step of a model with its caches as state."""
    folder = tmp_path_factory.mktemp("generation")
    run(sys.executable, EXAMPLE.parent / "export_generation.py", folder)
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
def test_a_package_keeps_what_it_has_read(generation: Path) -> None:
    """Step after step in Python: the bytes that the whole text at once predicts, and again after a new beginning."""
    model = torch._inductor.aoti_load_package(str(generation / "step.pt2"))
    prompts, expected, expected_logits = torch.load(generation / "prompts.pt")
    for _ in range(2):
        text, fresh = prompts, torch.ones(len(prompts), dtype=torch.bool)
        for position in range(prompts.shape[1] + expected.shape[1] - 1):
            logits = model(text[:, position : position + 1].contiguous(), fresh)
            fresh = torch.zeros_like(fresh)
            if position >= prompts.shape[1] - 1:
                text = torch.cat([text, logits.argmax(-1, keepdim=True)], 1)
        assert torch.equal(text[:, prompts.shape[1] :], expected)
        torch.testing.assert_close(logits, expected_logits)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler")
def test_packages_run_in_cpp_programs(folder: Path, generation: Path) -> None:
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{Path('/usr/bin')}") or "cmake"
    build = folder / "build"
    run(cmake, "-S", EXAMPLE, "-B", build, f"-DTORCH_DIR={torch.__path__[0]}")
    run(cmake, "--build", build)
    printed = run(build / "run_package", dmattn.library_path(), folder)
    assert printed.count("agrees") == 2
    printed = run(build / "run_generation", dmattn.library_path(), generation)
    assert printed.count("bytes of each sequence agree") == 2

    for program in ("run_package", "run_generation"):
        refused = subprocess.run([build / program, folder / "nowhere.so", folder], capture_output=True, text=True)
        assert refused.returncode == 2
        assert "nowhere.so" in refused.stderr
