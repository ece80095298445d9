"""Two deterministic trainings give the same bits: tools/bitwise_training.py, which a GPU runs for 300 steps of 12 layers."""

from __future__ import annotations

import json

import bitwise_training

SMALL = ["--steps", "2", "--layers", "3", "--length", "40", "--device", "cpu", "--dtype", "float32"]


def test_two_runs_are_equal(capsys):
    assert bitwise_training.main(SMALL) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["equal"]
    assert said["parameters"] == 3 * 14 + 3
    assert said["first_loss"] != said["last_loss"]


def test_a_bit_that_differs_is_told(capsys, monkeypatch):
    train, runs = bitwise_training.train, []

    def other_train(*sizes):
        losses, parameters = train(*sizes)
        runs.append(losses)
        parameters[-1][0] += len(runs) * 1e-6
        return losses, parameters

    monkeypatch.setattr(bitwise_training, "train", other_train)
    assert bitwise_training.main(SMALL) == 1
    assert json.loads(capsys.readouterr().out)["differing"] == 1


def test_ranks_are_equal(capsys):
    assert bitwise_training.main([*SMALL, "--ranks", "2"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ranks_alike"]
    assert said["digest"]
