"""The examples of other libraries run and learn, each where its library is installed; every example has a quick form."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


# What each needs beside torch.
EXAMPLES_OF = {
    "per_sample_gradients": None, "with_accelerate": "accelerate", "with_lightning": "pytorch_lightning", "with_peft": "peft",
    "with_torchtitan": "torchtitan", "with_x_transformers": "x_transformers",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # what other libraries warn of is not ours to mend
@pytest.mark.parametrize("example", EXAMPLES_OF)
def test_it_runs_and_learns(example, monkeypatch):
    if EXAMPLES_OF[example] is not None:
        pytest.importorskip(EXAMPLES_OF[example])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with torch.random.fork_rng(devices=[]):
        first, last = runpy.run_path(str(EXAMPLES / f"{example}.py"))["main"]([])
    assert last < 0.9 * first


@pytest.mark.parametrize(
    ("world", "sharing", "lists"), [(1, 1, {}), (2, 2, {}), (2, 1, {}), (4, 2, {}), (2, 2, {"LISTS": "1"})], ids=str
)
def test_training_from_scratch_learns_alone_and_on_ranks(world, sharing, lists):
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)] if world > 1 else [sys.executable]
    given = [*start, str(EXAMPLES / "train_from_scratch.py")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "CP": str(sharing), **lists}
    ran = subprocess.run(given, capture_output=True, text=True, env=environment, timeout=300)
    assert ran.returncode == 0, ran.stderr
    first, *_, last = map(float, re.findall(r"loss ([\d.]+)", ran.stdout))
    assert 5.4 < first < 6
    assert last < 0.6 * first


def test_layers_on_ranks_compute_what_one_process_does():
    """The example compares by itself."""
    given = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLES / "layers_on_ranks.py")]
    ran = subprocess.run(given, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert len(re.findall(r"rank [01], \w+: loss", ran.stdout)) == 4


def test_training_from_scratch_fits_on_a_page():
    _, _, program = (EXAMPLES / "train_from_scratch.py").read_text().split('"""', 2)
    assert len([line for line in program.splitlines() if line.strip() and not line.lstrip().startswith("#")]) <= 60


def programs() -> list[str]:
    return sorted(path.stem for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("example", programs())
def test_a_small_run_is_asked_for_by_quick(example, monkeypatch, capsys):
    path = EXAMPLES / f"{example}.py"
    for library in ("transformers" if "transformers" in path.read_text() else "torch", EXAMPLES_OF.get(example) or "torch"):
        pytest.importorskip(library)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(path), run_name="__main__")
    assert "--quick" in capsys.readouterr().out


def test_every_example_of_a_library_is_here():
    assert {path.stem for path in EXAMPLES.glob("with_*.py")} < set(EXAMPLES_OF)
