"""A rank that fails in the middle of a call: the others raise its name within seconds, and a new group works."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch
from dmattn.distributed import failures
from rank_pool import Ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="ranks talk over gloo")
SECONDS = 10.0  # after the fault, within which every rank has raised
EAGER = ["selection", "exchange", "attention", "backward", "message between two", "attention of two", "backward of two"]
COMPILED = ["exchange", "backward", "message between two", "backward of two"]


@pytest.fixture(scope="module")
def pools():
    """Worlds of two and of four ranks."""
    made = {size: Ranks(size, timeout=60.0) for size in (2, 4)}
    yield made
    for pool in made.values():
        pool.close()


def test_a_group_with_a_failed_rank_is_refused(monkeypatch):
    monkeypatch.setattr(failures, "_failures", {"a group": "rank 1 failed: no memory"})
    failures.check("another group")
    with pytest.raises(RuntimeError, match="rank 1 failed: no memory; its group cannot be used any more"):
        failures.check("a group")


@pytest.mark.parametrize(("rank", "found"), [(0, {}), (1, {"a group": "rank 0 failed: its process is gone"})])
def test_a_lost_store_is_no_failure_of_the_rank_that_looks(monkeypatch, rank, found):
    def lost(group):
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(failures, "_failures", {})
    monkeypatch.setattr(failures, "_store", lost)
    monkeypatch.setattr(failures, "_is_gone", lambda group, probed: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
    failures._look("a group")
    assert failures._failures == found


def lengths_of(phase, way, world):
    """Of uneven chunks; compiled, only the last of several may be shorter."""
    if phase.endswith("two"):
        return [9, 9] if way == "compiled" else [11, 6]
    return [8] * (world - 1) + [5] if way == "compiled" else [4, 9, 2, 7][:world]


@pytest.mark.long
@pytest.mark.parametrize("how", ["memory", "exception"])
@pytest.mark.parametrize(("way", "phase"), [*(("eager", phase) for phase in EAGER), *(("compiled", phase) for phase in COMPILED)])
def test_an_error_of_one_rank_is_raised_on_every_rank(pools, way, phase, how):
    lengths = lengths_of(phase, way, 4)
    failing = len(lengths) // 2
    given = [(lengths, way, phase if rank == failing else None, how) for rank in range(len(lengths))]
    answers = pools[len(lengths)].run("rank_failures:fail_and_recover", given)
    for rank, (raised, moment, _, again) in enumerate(answers):
        message = r"RuntimeError: .*can't allocate memory" if how == "memory" else "ArithmeticError: a fault of a test"
        told = rf"RuntimeError: rank {failing} failed: {message}"
        assert re.match(message if rank == failing else told, raised), raised
        assert re.match(told, again), again
        assert 0 < moment - answers[failing][2] < SECONDS


def test_an_error_of_one_rank_is_raised_on_the_other(pools):
    """The shortest of the cases above, for the quick set."""
    given = [([11, 6], "eager", phase, "exception") for phase in (None, "message between two")]
    (raised, moment, _, again), (own, _, failed, _) = pools[2].run("rank_failures:fail_and_recover", given)
    assert own == "ArithmeticError: a fault of a test"
    assert raised == again
    assert raised.startswith("RuntimeError: rank 1 failed: ArithmeticError: a fault of a test")
    assert 0 < moment - failed < SECONDS


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "phase", "killed"),
    [
        ("eager", "exchange", 3), ("eager", "exchange", 0), ("eager", "attention", 1), ("eager", "backward", 2), ("compiled", "exchange", 1),
        ("compiled", "backward", 3), ("eager", "message between two", 0), ("eager", "backward of two", 1),
        ("compiled", "message between two", 1),
    ],
)  # fmt: skip
def test_a_rank_that_is_killed_frees_the_others(tmp_path, way, phase, killed):
    lengths = lengths_of(phase, way, 4)
    pool = Ranks(len(lengths), timeout=60.0)
    try:
        survivors = [rank for rank in range(len(lengths)) if rank != killed]
        for rank in range(len(lengths)):
            place = survivors.index(rank) if rank != killed else -1
            arguments = (lengths, way, phase if rank == killed else None, str(tmp_path / "store"), place)
            pool.ask(rank, "rank_failures:outlive", len(lengths), arguments)
        pool.processes[killed].join()
        died = time.monotonic()
        for rank in survivors:
            answer, error = pool.answer(rank)
            assert error is None, error
            raised, moment = answer
            assert raised.startswith(f"RuntimeError: rank {killed} failed: its process is gone"), raised
            assert moment - died < SECONDS
    finally:
        pool.close()


@pytest.mark.long
def test_training_goes_on_from_its_checkpoint_when_a_rank_was_killed(tmp_path, run_python):
    """Under torchrun, with one restart: every loss is that of a run that nothing happened to, bit for bit."""
    losses = {}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "--max-restarts=1", "--monitor-interval=0.1"]
    for killed_step in (-1, 3):
        folder, output = tmp_path / str(killed_step), tmp_path / f"{killed_step}.jsonl"
        program = [str(Path(__file__).with_name("rank_elastic.py")), str(folder), str(output), str(killed_step)]
        # Without a store of its own a new attempt would find the addresses of the ranks before it: torch's gloo then connects to nobody.
        run = run_python(*torchrun, *program, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", OMP_NUM_THREADS="1")
        assert run.returncode == 0, run.stdout + run.stderr
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        assert [(attempt, step) for attempt, step, _ in rows] == [(int(step >= killed_step > 0), step) for step in range(6)]
        losses[killed_step] = [loss for *_, loss in rows]
    assert losses[3] == losses[-1]
    assert losses[-1][-1] < losses[-1][0]
