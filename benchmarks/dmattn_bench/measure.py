"""Measuring: time by turns (CPU clock or CUDA events, with a cold L2), peak extra memory in a process of its own, and the gate before both."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from dmattn import reference
from torch import Tensor

from dmattn_bench import two_ways
from dmattn_bench.cases import Case, Workload, workload
from dmattn_bench.peers import Call
from dmattn_bench.records import prefix_of

L2_FLUSH_BYTES = 256 << 20
GATE_LENGTH = 200  # not a multiple of any tile
SECONDS_A_CASE = 3.0  # of timed turns; a case that takes longer gets fewer of them, but never less than FEWEST_TURNS
FEWEST_TURNS = 3
CHECKED_IN_FULL = ("efficient", "flex", "eager")  # peers that compute the same mask: each is compared where it is timed
WARM_UP_SECONDS = 0.2  # at least; and at least one turn
GRAPH_WARM_UP = 3  # replays
Runs = Mapping[str, Callable[[], object]]


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """What a job is told: short sizes if quick, and how often to repeat (None: its own number)."""

    device: str
    quick: bool = False
    repeats: int | None = None


class CannotRunError(Exception):
    """A case or a job cannot run on this machine; says why."""


class WrongResultError(Exception):
    """The gate: results are not what the reference says, so times of them are not reported."""


# Time -----------------------------------------------------------------------------------------------------------------------------


def seconds(run: Callable[[], object], device: str) -> float:
    """One call: wall clock on a CPU; on CUDA between two events, after the L2 cache was overwritten."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device=device).zero_()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    run()
    last.record()
    torch.cuda.synchronize()
    milliseconds: float = first.elapsed_time(last)
    return milliseconds / 1e3


def both_ways(call: Callable[[], Tensor], leaves: Sequence[Tensor], prefix: str = "") -> dict[str, Callable[[], object]]:
    """A call without gradients, and the backward pass of one call, by their names."""
    out = call()
    incoming = torch.randn_like(out)

    def forward() -> object:
        with torch.no_grad():
            return call()

    return {
        f"{prefix}forward": forward,
        f"{prefix}backward": lambda: torch.autograd.grad(out, leaves, incoming, retain_graph=True),
    }


def by_turns(
    runs: Runs, device: str, repeats: int, settle: float = 0.0, most_seconds: float = SECONDS_A_CASE
) -> dict[str, list[float]]:
    """Seconds of every run, the runs taking turns, after a warm-up that is thrown away; each after `settle` seconds of the same run.

    There are fewer turns than `repeats`, but not less than FEWEST_TURNS, when all of them together took `most_seconds`.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    while True:
        for run in runs.values():
            run()
        if device != "cpu":
            torch.cuda.synchronize()
        if not runs or time.perf_counter() - begin > WARM_UP_SECONDS:
            break
    for turn in range(repeats):
        if turn >= FEWEST_TURNS and sum(map(sum, samples.values())) > most_seconds:
            break
        for name, run in runs.items():
            keep_busy(run, settle)
            samples[name].append(seconds(run, device))
    return samples


def keep_busy(run: Callable[[], object], duration: float) -> None:
    """Brings a GPU to the clock that its power leaves to this run: after another one it would still have that one's."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < duration:
        run()
        torch.cuda.synchronize()


@dataclasses.dataclass(frozen=True)
class Times:
    """Samples by name: forward (selection included), backward, select or mask (what makes the mask, alone), peer_forward, peer_backward,
    peer_mask, and peer2_... for a second peer. calls: whole eager calls. kernels: the same calls replayed from a CUDA graph, where no host
    time can hide; a call that cannot be captured is missing there."""

    calls: dict[str, list[float]]
    kernels: dict[str, list[float]]
    not_captured: dict[str, str]


def times(
    case: Case, load: Workload, device: str, repeats: int, settle: float = 0.0, most_seconds: float = SECONDS_A_CASE
) -> Times:
    """Every call of a workload; kernels each after `settle` seconds of themselves, calls and kernels each for at most `most_seconds`.

    Raises:
        WrongResultError: a peer that computes the same mask gives another result.
    """
    if device == "cpu":
        return Times(by_turns(_runs(case, load), device, repeats, 0.0, most_seconds), {}, {})
    # One stream for all: a backward pass runs on its forward's stream, and the default stream cannot be captured.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        runs = _runs(case, load)
        calls = by_turns(runs, device, repeats, 0.0, most_seconds)
        torch.cuda.empty_cache()  # what earlier cases left cannot be freed while capturing
        graphs, not_captured = {}, {}
        for name, run in runs.items():
            if name.endswith("mask"):  # made once, and some read a count from the device
                continue
            try:
                graphs[name] = captured(run)
            except RuntimeError as error:
                not_captured[name] = str(error).split("\n")[0]
        kernels = by_turns(graphs, device, repeats, settle, most_seconds)
    torch.cuda.synchronize()
    return Times(calls, kernels, not_captured)


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph on the current stream; what it returns is freed, its memory stays with the graph."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    graph.capture_begin()
    try:
        run()
    finally:
        graph.capture_end()
    return graph.replay


def graphed(runs: Sequence[Callable[[], object]], repeats: int) -> float:
    """Microseconds of one run: the median over replays of a CUDA graph that holds all of them."""
    return statistics.median(graph_samples(runs, repeats))


def graph_samples(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Microseconds of one run, a sample for each replay of a CUDA graph that holds all of them, after replays that are thrown away."""
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        raise RuntimeError(
            "PYTORCH_NO_CUDA_MEMORY_CACHING: expected unset, because memory must not be given back inside a capture"
        )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for run in runs:
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for run in runs:
                run()
        samples = []
        for turn in range(repeats + GRAPH_WARM_UP):
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            graph.replay()
            last.record()
            torch.cuda.synchronize()
            if turn >= GRAPH_WARM_UP:
                samples.append(first.elapsed_time(last) * 1e3 / len(runs))
    return samples


def _runs(case: Case, load: Workload) -> dict[str, Callable[[], object]]:
    contestants = {prefix_of(number): call for number, call in enumerate((load.ours, *load.peers))}
    outputs = {prefix: call.run() for prefix, call in contestants.items()}
    for prefix, call in contestants.items():
        if call.masked:
            _same_result(case, call, outputs[prefix], outputs[""])
    runs: dict[str, Callable[[], object]] = {f"{prefix}forward": call.run for prefix, call in contestants.items()}
    for prefix, call in contestants.items():
        if call.inputs:
            runs[f"{prefix}backward"] = functools.partial(
                torch.autograd.grad, outputs[prefix], call.inputs, load.grad_out, retain_graph=True
            )
        if call.build is not None:
            runs[f"{prefix}mask"] = call.build
    if load.build is not None:
        runs["select" if case.kind == "dma" else "mask"] = load.build
    return runs


def _same_result(case: Case, call: Call, theirs: Tensor, ours: Tensor) -> None:
    if ours.dtype == torch.float32:
        try:
            two_ways.assert_same_in_another_order(theirs, ours, ours.dtype)
        except AssertionError as reason:
            raise WrongResultError(f"{case.name}: {call.name} differs from dmattn: {reason}") from None
        return
    error = (theirs.detach().float() - ours.detach().float()).abs().max().item()
    size = ours.detach().abs().max().item()
    # A logit that is wrong by r makes weights wrong by the part r, and by as much again their sum.
    allowed = (4 * torch.finfo(ours.dtype).eps + 2 * call.rounding) * size
    if not error <= allowed:
        raise WrongResultError(f"{case.name}: {call.name} differs from dmattn by {error:.1e}, allowed {allowed:.1e}")


def tflops(case: Case, load: Workload, medians: Mapping[str, float]) -> dict[str, float]:
    """10^12 useful operations a second: 2 * (D + Dv) for each visible pair forward, 2.5 times that backward; a dense peer's pairs are all it
    computes."""
    pairs = {"": load.pairs}
    for number, call in enumerate(load.peers, 1):
        pairs[prefix_of(number)] = load.pairs if call.masked else load.dense_pairs
    rates = {}
    for prefix, count in pairs.items():
        for name, factor in (("forward", 1.0), ("backward", 2.5)):
            if count and f"{prefix}{name}" in medians:
                rates[f"{prefix}{name}"] = factor * 4 * case.head_dim * count / medians[f"{prefix}{name}"] / 1e12
    return rates


# The ceiling ----------------------------------------------------------------------------------------------------------------------


def ceiling(device: str, dtype: str) -> dict[str, float]:
    """What this machine gives now to a product of square matrices (tflops) and to a copy (gigabytes_per_second, read and written)."""
    size, count = (8192, 1 << 28) if device != "cpu" else (1024, 1 << 24)
    left, right = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    source = torch.randn(count, device=device)
    target = torch.empty_like(source)
    taken = by_turns({"product": lambda: left @ right, "copy": lambda: target.copy_(source)}, device, 10, most_seconds=1.0)
    product, copy = (statistics.median(taken[name]) for name in ("product", "copy"))
    return {"tflops": 2 * size**3 / product / 1e12, "gigabytes_per_second": 2 * source.nbytes / copy / 1e9}


# Memory ---------------------------------------------------------------------------------------------------------------------------


def extra_memory(case: Case, device: str, threads: int) -> dict[str, int]:
    """Peak bytes beyond inputs and results: {forward, backward}. On a CPU the peak of a fresh process's resident memory.

    Raises:
        CannotRunError: that process failed.
    """
    if device != "cpu":
        load = workload(case, device, with_peers=False)
        return _extra_cuda(load.ours, load.grad_out)
    command = [sys.executable, "-m", "dmattn_bench.measure", json.dumps(vars(case)), str(threads)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # it imports what this process does
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        reason = (done.stderr.strip() or "it said nothing").split("\n")[-1]
        raise CannotRunError(f"the process that measures memory ended with {done.returncode}: {reason}")
    return dict(json.loads(done.stdout))


def peers_memory(load: Workload, device: str) -> dict[str, int]:
    """The same of each peer, with its mask made anew, by the names of its times; {} on a CPU, whose peers are not measured."""
    found: dict[str, int] = {}
    for number, call in enumerate(load.peers if device != "cpu" else (), 1):

        def with_mask(call: Call = call) -> Tensor:
            made = call.build() if call.build is not None else None
            out = call.run()
            del made
            return out

        extra = _extra_cuda(dataclasses.replace(call, run=with_mask), load.grad_out)
        found |= {prefix_of(number) + name: count for name, count in extra.items()}
    return found


def _extra_cuda(call: Call, grad_out: Tensor) -> dict[str, int]:
    def peak(run: Callable[[], tuple[Tensor, ...]]) -> tuple[int, tuple[Tensor, ...]]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - sum(r.nbytes for r in results), results

    return _forward_and_backward(call, grad_out, peak)


def _extra_cpu(call: Call, grad_out: Tensor) -> dict[str, int]:
    def peak(run: Callable[[], tuple[Tensor, ...]]) -> tuple[int, tuple[Tensor, ...]]:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to what is resident now
        before = _status("VmHWM")
        results = run()
        # Results may take pages that were resident before.
        return max(0, _status("VmHWM") - before - sum(r.nbytes for r in results)), results

    return _forward_and_backward(call, grad_out, peak)


def _forward_and_backward(
    call: Call, grad_out: Tensor, peak: Callable[[Callable[[], tuple[Tensor, ...]]], tuple[int, tuple[Tensor, ...]]]
) -> dict[str, int]:
    forward, (out,) = peak(lambda: (call.run(),))
    if not call.inputs:
        return {"forward": forward}
    backward, _ = peak(lambda: torch.autograd.grad(out, call.inputs, grad_out))
    return {"forward": forward, "backward": backward}


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def _memory_process() -> None:
    """The child: warms up on a small case, so that threads and libraries are there, then prints the peaks."""
    case, threads = Case(**json.loads(sys.argv[1])), int(sys.argv[2])
    torch.set_num_threads(threads)
    small = workload(case.resized(256), "cpu", with_peers=False)
    out = small.ours.run()
    if small.ours.inputs:
        torch.autograd.grad(out, small.ours.inputs, small.grad_out)
    load = workload(case, "cpu", with_peers=False)
    print(json.dumps(_extra_cpu(load.ours, load.grad_out)))


# The gate -------------------------------------------------------------------------------------------------------------------------


def gate(case: Case, device: str) -> None:
    """Compares outputs and gradients on a small case of the same kind with the reference in float64.

    Allowed: twice the error of the reference in the case's own dtype, and four units in the last place of the largest value.

    Raises:
        WrongResultError: says which result is wrong by how much.
    """
    small = case.resized(max(GATE_LENGTH, case.block * 3 // 2 + 8))  # more than one block, and a part of one
    checked = tuple(name for name in case.peers if case.kind == "dense" and name not in CHECKED_IN_FULL)
    load = workload(dataclasses.replace(small, peers=checked), device, left_out={})
    if case.kind == "select":
        _gate_selection(small, load)
        return
    ours = _out_and_grads(load.ours.run(), load.ours.inputs, load.grad_out)
    exact, rounded = (_reference(small, load, dtype) for dtype in (torch.float64, load.grad_out.dtype))
    names = ("out", "grad of query", "grad of key", "grad of value", "grad of scores")
    for name, got, truth, eager in zip(names, ours, exact, rounded, strict=False):
        error, eager_error = ((x.double() - truth).abs().max().item() for x in (got, eager))
        allowed = 2 * eager_error + 4 * torch.finfo(load.grad_out.dtype).eps * truth.abs().max().item()
        if not error <= allowed:
            raise WrongResultError(f"{case.name}: {name} differs from the reference by {error:.1e}, allowed {allowed:.1e}")
    eager_error = (rounded[0].double() - exact[0]).abs().max().item()
    allowed = 2 * eager_error + 4 * torch.finfo(load.grad_out.dtype).eps * exact[0].abs().max().item()
    for peer in load.peers:
        error = (peer.run().double() - exact[0]).abs().max().item()
        if not error <= allowed:
            raise WrongResultError(f"{case.name}: {peer.name} computes something else (difference {error:.1e})")


def _gate_selection(case: Case, load: Workload) -> None:
    """Every key is visible as long as the definition says, from its own query on."""
    visible, end = load.visible(), load.ours.run()
    assert visible is not None
    keys = torch.arange(case.length, device=end.device)
    seen = (keys <= keys[:, None]) & (keys[:, None] < end[:, :, None])
    wrong = int((seen != visible).sum())
    if wrong:
        raise WrongResultError(f"{case.name}: {wrong} pairs differ from the reference")


def _reference(case: Case, load: Workload, dtype: torch.dtype) -> list[Tensor]:
    copies = [x.detach().to(dtype).requires_grad_() for x in load.ours.inputs]
    key_bias = None if load.key_bias is None else copies[3]
    query, key, value = copies[:3]
    out, _ = reference.attention(query, key, value, load.visible(), key_bias=key_bias, is_causal=case.is_causal)
    return _out_and_grads(out, tuple(copies), load.grad_out.to(dtype))


def _out_and_grads(out: Tensor, inputs: tuple[Tensor, ...], grad_out: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]


if __name__ == "__main__":
    _memory_process()
