"""The examples that generate: with bounded caches and with growing ones, many prompts in one batch, and what a byte costs."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from dmattn import BoundedCache
from dmattn_bench import two_ways

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import cost
    import growing
    import model

    return model, growing, cost


def made(model, window=12, local=4):
    """A small model whose scores differ."""
    torch.manual_seed(0)
    small = model.ByteModel(2, 32, 4, 2, window, local).eval().double()
    for name, parameter in small.named_parameters():
        if name.endswith("score_proj.weight"):
            torch.nn.init.normal_(parameter)
    return small


def in_parts(small, tokens, caches):
    cuts = (0, 21, 22, 23, tokens.shape[1])
    with torch.no_grad():
        return torch.cat([small.generate(tokens[:, a:b], caches) for a, b in itertools.pairwise(cuts)], 1)


def test_the_model_generates_what_it_would_see_at_once(modules):
    small, tokens = made(modules[0]), torch.arange(120).view(2, 60) % 7
    with torch.no_grad():
        expected = small(tokens)
    two_ways.assert_same_in_another_order(in_parts(small, tokens, small.new_caches(2)), expected, torch.float64)


def test_a_growing_cache_is_the_same_model_that_sees_all_keys(modules):
    model, growing, _ = modules
    small, tokens = made(model, local=60), torch.arange(120).view(2, 60) % 7
    caches = [growing.GrowingCache(layer.attention, 2, 64) for layer in small.layers]
    with torch.no_grad():
        expected, _ = small.with_scores_loss(tokens, 60, False)
    two_ways.assert_same_in_another_order(in_parts(small, tokens, caches), expected, torch.float64)
    assert sum(cache.nbytes for cache in caches) == 2 * 2 * 2 * 2 * 60 * 8 * 8


@pytest.fixture
def serve(modules, monkeypatch, tmp_path, capsys):
    """Runs the example with arguments on a small model, whose greedy answers rounding cannot change; returns what it prints."""
    import serve

    made(modules[0]).save(tmp_path / "weights.pt")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["serve.py", "--weights", str(tmp_path / "weights.pt"), *arguments])
        serve.main()
        return capsys.readouterr().out

    return run


def test_prompts_are_served_side_by_side(serve):
    options = ["--prompts", "6", "--rows", "3", "--bytes", "9", "--chunk", "10", "--show", "1", "--check"]
    printed = serve(*options)
    assert "6 answers of 9 bytes" in printed
    assert "every answer is what its prompt gives alone" in printed


def test_the_server_refuses_an_empty_batch(serve, capsys):
    with pytest.raises(SystemExit):
        serve("--rows", "0")
    assert "--rows: expected at least 1, got 0" in capsys.readouterr().err


def test_the_check_of_the_server_sees_a_row_that_was_not_reset(serve, monkeypatch):
    monkeypatch.setattr(BoundedCache, "reset", lambda self, rows=None: None)
    with pytest.raises(SystemExit, match=r"in the batch, and .* alone"):
        serve("--prompts", "4", "--rows", "2", "--bytes", "4", "--check")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")  # of torch.export
def test_the_demo_trains_exports_compares_and_draws(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_language_model as program

    with torch.random.fork_rng(devices=[]):
        program.main(["--quick", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert printed.count(": the same logits, largest difference") == 2
    assert all(f"\n{number}. " in printed for number in range(1, 9))
    made = {"loss.png", "cost.png", "lifetimes.png", "model.pt2", "weights.pt", "scores.pt"}
    assert {path.name for path in tmp_path.iterdir()} == made
