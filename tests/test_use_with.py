"""The examples of other libraries run and learn, each where its library is installed."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


# What each needs beside torch.
EXAMPLES_OF = {
    "per_sample_gradients": None, "with_accelerate": "accelerate", "with_lightning": "pytorch_lightning", "with_peft": "peft",
    "with_x_transformers": "x_transformers",
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


def test_every_example_of_a_library_is_here():
    assert {path.stem for path in EXAMPLES.glob("with_*.py")} < set(EXAMPLES_OF)
