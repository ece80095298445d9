"""Ranks that fail in the middle of a call, and what the others do: functions of a process group and this rank's arguments."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from datetime import timedelta
from typing import Any, NoReturn
from unittest import mock

import dmattn
import torch
import torch.distributed as dist
from dmattn import IntervalMask
from dmattn.distributed import context_parallel_attention
from dmattn.testing.strategies import random_tensor
from dmattn_bench.two_ways import assert_same_in_another_order

# What fails, by the phase of the call. Those of backward fail there alone.
PHASES = {
    "selection": "dmattn.distributed.needs.slots_of",
    "exchange": "dmattn.distributed.exchange._begin_exchange",
    "attention": "dmattn.distributed.attention.attention",
    "backward": "dmattn.distributed.exchange._begin_exchange",
    "message between two": "dmattn.distributed.pair.begin_message",
    "attention of two": "dmattn.distributed.attention._over_slots",
    "backward of two": "dmattn.distributed.pair.begin_message",
}
_faults: list[float] = []  # when this process failed last; the clock is that of every process of the machine


def compare(group: dist.ProcessGroup, lengths: list[int], way: str, failing: str | None = None, how: str = "") -> None:
    """Out and gradients of this rank's chunk are those of one process, unless a phase fails: ``how`` is memory, exception or kill."""
    rank, first = dist.get_rank(group), sum(lengths[: dist.get_rank(group)])
    chunk, length = slice(first, first + lengths[rank]), sum(lengths)
    whole = [random_tensor((2, heads, length, 8), seed, torch.float64, "cpu") for seed, heads in enumerate((4, 2, 2))]
    scores = random_tensor((2, 2, length), 3, torch.float64, "cpu")
    of_two = len(lengths) == 2
    options: dict[str, Any] = {"window": 5} if of_two else {"mask": IntervalMask.sliding_window(length, 7), "window": 7}

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        named = {"scores" if of_two else "key_bias": bias}
        return context_parallel_attention(query, key, value, **named, **options, group=group)

    if way == "compiled":
        torch._dynamo.reset()
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    leaves = [x[:, :, chunk].clone().requires_grad_() for x in (*whole, scores)]
    in_backward = failing is not None and failing.startswith("backward")
    fault = mock.patch(PHASES[failing], side_effect=lambda *_, **__: _fail(how)) if failing else contextlib.nullcontext()
    with contextlib.nullcontext() if in_backward else fault:
        out = run(*leaves)
    with fault if in_backward else contextlib.nullcontext():
        gradients = torch.autograd.grad(out.square().sum(), leaves)
    all_leaves = [x.clone().requires_grad_() for x in (*whole, scores)]
    mask = IntervalMask.top_k(scores, 5) if of_two else options["mask"]
    expected = dmattn.attention(*all_leaves[:3], mask, key_bias=all_leaves[3], is_causal=True)
    wanted = torch.autograd.grad(expected.square().sum(), all_leaves)
    for got, one in zip((out, *gradients), (expected, *wanted), strict=True):
        assert_same_in_another_order(got.detach(), one.detach()[:, :, chunk], torch.float64)


def _fail(how: str) -> NoReturn:
    _faults.append(time.monotonic())
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "memory":
        torch.empty(1 << 50, dtype=torch.uint8)
    raise ArithmeticError("a fault of a test")


def fail_and_recover(
    group: dist.ProcessGroup, lengths: list[int], way: str, failing: str | None, how: str
) -> tuple[str, float, float | None, str]:
    """What this rank raises and when, when it failed itself, and what it says of a second call. A new group then works."""
    _faults.clear()
    ours = dist.new_group(timeout=timedelta(seconds=60))
    compare(ours, lengths, way)
    raised, moment = _error_of(ours, lengths, way, failing, how), time.monotonic()
    again = _error_of(ours, lengths, way, None, "")
    failed = _faults[-1] if _faults else None
    dist.destroy_process_group(ours)
    new = dist.new_group(timeout=timedelta(seconds=60))
    compare(new, lengths, way)
    dist.destroy_process_group(new)
    return raised, moment, failed, again


def outlive(
    group: dist.ProcessGroup, lengths: list[int], way: str, failing: str | None, store: str, place: int
) -> tuple[str, float]:
    """What a rank raises when another is killed, and when. The ranks that are left then work in a new world."""
    compare(group, lengths, way)
    raised, moment = _error_of(group, lengths, way, failing, "kill"), time.monotonic()
    dist.destroy_process_group()
    world = len(lengths) - 1
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=place, world_size=world)
    assert dist.group.WORLD is not None
    if world > 1:
        compare(dist.group.WORLD, [9] * world, way)
    return raised, moment


def _error_of(group: dist.ProcessGroup, lengths: list[int], way: str, failing: str | None, how: str) -> str:
    try:
        compare(group, lengths, way, failing, how)
    except (RuntimeError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
