"""What tests of benchmarks share: arguments of a small run, settings that a test leaves as they were, and calls that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dmattn.bench import __main__, measure

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SMALL = ["--device", "cpu", "--lengths", "96", "--repeats", "2", "--seconds", "0.01", "--no-memory", "--threads", "1"]


@pytest.fixture
def as_it_was(monkeypatch):
    """Short warm-ups, and as many threads after a test as before."""
    monkeypatch.setattr(measure, "WARM_UP_SECONDS", 0.0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def assert_refused(call, sentence, capsys):
    """``python -m dmattn.bench`` with these words says one sentence and makes no results."""
    assert __main__.main(call.split()) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.startswith("bench: ")
    assert said.count("\n") == 1
    assert not Path("bench-results").exists()
