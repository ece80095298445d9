"""Curves of training by different kernels: tools/training_paths.py, which a GPU runs for 2,000 steps."""

from __future__ import annotations

import json

import dmattn
import pytest
import torch
import training_paths

SMALL = ["--paths", "cpu", "--seeds", "2", "--steps", "4", "--every", "2", "--layers", "2", "--length", "20"]


def test_runs_become_curves(tmp_path, capsys):
    assert training_paths.main([*SMALL, "--output", str(tmp_path / "curves.json")]) == 0
    written = json.loads((tmp_path / "curves.json").read_text())
    first, second = written["curves"]["cpu"]
    assert len(first) == len(second) == 2
    assert first != second
    assert json.loads(capsys.readouterr().out) == {name: written[name] for name in ("between_paths", "between_seeds")}


def test_the_reference_learns_what_the_kernels_learn(monkeypatch):
    given = {"steps": 6, "layers": 2, "length": 40, "every": 2}
    ours = training_paths.curve("cpu", 0, **given)
    monkeypatch.setattr(dmattn, "attention", training_paths.by_reference)
    torch.testing.assert_close(torch.tensor(training_paths.curve("cpu", 0, **given)), torch.tensor(ours))


@pytest.mark.parametrize(("moved", "code"), [(0.05, 0), (0.5, 1)])
def test_paths_further_apart_than_seeds_are_told(monkeypatch, moved, code):
    curves = {"hopper": [[4.0, 3.0], [4.1, 3.1]], "portable": [[4.0 + moved, 3.0], [4.1 + moved, 3.1]]}
    monkeypatch.setattr(training_paths, "side_by_side", lambda options: curves)
    assert training_paths.main(["--paths", "hopper", "portable"]) == code
