"""The examples with transformers in their quick form, which takes seconds: they end, and what they return is as it should be."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return lambda name, *arguments: importlib.import_module(name).main(["--quick", *arguments])


def test_train_doge(run, capsys):
    before, after, by_eager = run("train_doge")
    assert after < before
    assert abs(after - by_eager) < 0.01  # scores tie, and torch.topk takes other keys then
    assert "eager" in capsys.readouterr().out


def test_swap_attention(run, capsys):
    assert run("swap_attention") < 0.01
    assert "SDPA" in capsys.readouterr().out


def test_convert_and_fine_tune(run):
    bits = run("convert_and_fine_tune")
    assert bits["difference after loading"] == 0
    assert bits["converted and fine-tuned"] < bits["converted, window slides"]


def test_generate_with_bounded_cache(run, tmp_path):
    picture = tmp_path / "cost.png"
    rows = run("generate_with_bounded_cache", "--output", str(picture))
    assert len({row.bounded_bytes for row in rows}) == 1
    assert rows[-1].growing_bytes == rows[-1].context // rows[0].context * rows[0].growing_bytes
    assert rows[-1].bounded_bytes < rows[-1].growing_bytes
    assert picture.stat().st_size > 0
