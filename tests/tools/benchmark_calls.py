"""What tests of benchmarks share: arguments of a small run, and calls that are refused."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from dmattn_bench import __main__

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = ["--device", "cpu", "--lengths", "96", "--repeats", "2", "--seconds", "0.01", "--no-memory", "--threads", "1"]


def script(name):
    """A benchmark of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_refused(call, sentence, capsys):
    """``python -m dmattn_bench`` with these words says one sentence and makes no results."""
    assert __main__.main(call.split()) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.startswith("bench: ")
    assert said.count("\n") == 1
    assert not Path("bench-results").exists()
