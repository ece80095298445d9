"""Measuring: time by turns (CPU clock or CUDA events, with a cold L2), peak extra memory in a process of its own, and the gate before both."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from cases import Case, Workload, workload
from dmattn import reference
from torch import Tensor

L2_FLUSH_BYTES = 256 << 20
GATE_LENGTH = 200  # not a multiple of any tile


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
    return first.elapsed_time(last) / 1e3


def by_turns(runs: Mapping[str, Callable[[], object]], device: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of every run, the runs taking turns, after one turn of warm-up that is thrown away."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            spent = seconds(run, device)
            if turn > 0:
                samples[name].append(spent)
    return samples


def times(case: Case, device: str, repeats: int) -> dict[str, list[float]]:
    """Samples of select, forward (selection included), backward, peer_forward and peer_backward."""
    load = workload(case, device)
    out, peer_out = load.ours(), load.peer()
    runs: dict[str, Callable[[], object]] = {
        "forward": load.ours,
        "peer_forward": load.peer,
        "backward": lambda: torch.autograd.grad(out, load.differentiable, load.grad_out, retain_graph=True),
        "peer_backward": lambda: torch.autograd.grad(peer_out, load.peer_differentiable, load.grad_out, retain_graph=True),
    }
    if load.select is not None:
        runs["select"] = load.select
    return by_turns(runs, device, repeats)


def median(samples: list[float]) -> float:
    return statistics.median(samples)


# Memory ---------------------------------------------------------------------------------------------------------------------------


def extra_memory(case: Case, table_device: str, threads: int) -> dict[str, int]:
    """Peak bytes beyond inputs and results: {forward, backward}. On a CPU the peak of a fresh process's resident memory."""
    if table_device != "cpu":
        return _extra_cuda(workload(case, table_device))
    command = [sys.executable, str(Path(__file__)), json.dumps(vars(case)), str(threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def _extra_cuda(load: Workload) -> dict[str, int]:
    def peak(run: Callable[[], tuple[Tensor, ...]]) -> tuple[int, tuple[Tensor, ...]]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - sum(r.nbytes for r in results), results

    forward, (out,) = peak(lambda: (load.ours(),))
    backward, _ = peak(lambda: torch.autograd.grad(out, load.differentiable, load.grad_out))
    return {"forward": forward, "backward": backward}


def _extra_cpu(load: Workload) -> dict[str, int]:
    def peak(run: Callable[[], tuple[Tensor, ...]]) -> tuple[int, tuple[Tensor, ...]]:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to what is resident now
        before = _status("VmHWM")
        results = run()
        return _status("VmHWM") - before - sum(r.nbytes for r in results), results

    forward, (out,) = peak(lambda: (load.ours(),))
    backward, _ = peak(lambda: torch.autograd.grad(out, load.differentiable, load.grad_out))
    return {"forward": forward, "backward": backward}


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def _memory_process() -> None:
    """The child: warms up on a small case, so that threads and libraries are there, then prints the peaks."""
    case, threads = Case(**json.loads(sys.argv[1])), int(sys.argv[2])
    torch.set_num_threads(threads)
    small = workload(case.resized(256), "cpu")
    torch.autograd.grad(small.ours(), small.differentiable, small.grad_out)
    print(json.dumps(_extra_cpu(workload(case, "cpu"))))


# The gate -------------------------------------------------------------------------------------------------------------------------


def gate(case: Case, device: str) -> None:
    """Compares outputs and gradients on a small case of the same kind with the reference in float64.

    Allowed: twice the error of the reference in the case's own dtype, and four units in the last place of the largest value.

    Raises:
        WrongResultError: says which result is wrong by how much.
    """
    small = case.resized(GATE_LENGTH)
    load = workload(small, device)
    ours = _out_and_grads(load.ours(), load.differentiable, load.grad_out)
    exact, rounded = (_reference(small, load, dtype) for dtype in (torch.float64, load.grad_out.dtype))
    names = ("out", "grad of query", "grad of key", "grad of value", "grad of scores")
    for name, got, truth, eager in zip(names, ours, exact, rounded, strict=False):
        error, eager_error = ((x.double() - truth).abs().max().item() for x in (got, eager))
        allowed = 2 * eager_error + 4 * torch.finfo(load.grad_out.dtype).eps * truth.abs().max().item()
        if not error <= allowed:
            raise WrongResultError(f"{case.name}: {name} differs from the reference by {error:.1e}, allowed {allowed:.1e}")
    peer_error, eager_error = ((x.double() - exact[0]).abs().max().item() for x in (load.peer(), rounded[0]))
    allowed = 2 * eager_error + 4 * torch.finfo(load.grad_out.dtype).eps * exact[0].abs().max().item()
    if case.window is None and not peer_error <= allowed:
        raise WrongResultError(f"{case.name}: {case.peer} computes something else (difference {peer_error:.1e})")


def _reference(case: Case, load: Workload, dtype: torch.dtype) -> list[Tensor]:
    copies = [x.detach().to(dtype).requires_grad_() for x in load.differentiable]
    visible = None
    if case.window is not None:
        assert load.scores is not None
        visible = reference.top_k_visible(load.scores.detach(), case.window)
    key_bias = copies[3] if case.window is not None else None
    out, _ = reference.attention(*copies[:3], visible, key_bias=key_bias, is_causal=case.is_causal)
    return _out_and_grads(out, tuple(copies), load.grad_out.to(dtype))


def _out_and_grads(out: Tensor, inputs: tuple[Tensor, ...], grad_out: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]


if __name__ == "__main__":
    _memory_process()
