"""What of a shape fits the time and the memory, and the rows that are measured of it."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dmattn.shape.text import duration, size
from dmattn.shape.times import (
    BACKENDS,
    Candidate,
    Inputs,
    OutOfTimeError,
    Row,
    Shape,
    ShapeError,
    at_most,
    ready,
    rounds,
)

LONGEST_PROBE = {"cuda": 8192, "cpu": 1024}  # tokens of the short calls that predict long ones
LEAST_COMPILE_SECONDS = 5.0
PROBE_SECONDS = 1.0  # for their rounds: the first calls of a process are slow


# What fits -----------------------------------------------------------------------------------------------------------------------


def probe_of(shape: Shape) -> Shape:
    """A short call of the same kind, whose time predicts the long one."""
    length = min(shape.length, LONGEST_PROBE[shape.device])
    sizes = {"batch": 1, "length": length, "window": min(shape.keys, length), "local": 0, "sink_keys": 0}
    if shape.device == "cpu":
        sizes |= {"heads": shape.heads // shape.kv_heads, "kv_heads": 1}
    return dataclasses.replace(shape, **sizes)  # type: ignore[arg-type]


def fitted(shape: Shape, cost: Callable[[Shape], float], most: float) -> Shape:
    """The shape with its batch halved, then its heads, until its cost is at most ``most`` or one key head of one sequence is left."""
    while cost(shape) > most and (shape.batch > 1 or shape.kv_heads > 1):
        if shape.batch > 1:
            shape = dataclasses.replace(shape, batch=shape.batch // 2)
        else:
            kv_heads = shape.kv_heads // 2
            shape = dataclasses.replace(shape, heads=shape.heads // shape.kv_heads * kv_heads, kv_heads=kv_heads)
    return shape


def check_memory(shape: Shape) -> None:
    """Raises ShapeError where inputs, results, gradients and float32 sums of one step do not fit into the memory that is free."""
    needed = shape.batch * shape.length * shape.head_dim * (shape.heads + shape.kv_heads) * (4 * shape.dtype.itemsize + 4)
    free = free_bytes(shape.device)
    if free is not None and needed > free:
        raise ShapeError(
            f"--batch, --length: out of memory: expected a shape whose step fits {size(free)}, got one of about {size(needed)}"
        )


def free_bytes(device: str) -> int | None:
    """Of the GPU, or of the machine where it says so."""
    if device == "cuda":
        torch.cuda.empty_cache()  # what the short calls left
        return int(torch.cuda.mem_get_info()[0])
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


# Measuring -----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    """Rows of the table, how many rounds their medians are of, the shape that was measured, and remarks."""

    shape: Shape
    ours: Row
    dense: Row | None
    sliding: Row | None
    rounds: int
    notes: list[str]


def predicted(shape: Shape) -> Callable[[Shape], tuple[float, float]]:
    """A function that predicts the seconds of a training step of dmattn, and of torch's dense attention, for shapes like this one."""
    probe = probe_of(shape)
    inputs = Inputs(probe)
    candidates = [ready(inputs.dynamic_mask(), inputs.grad_out), *dense_candidates(inputs, [])]
    rows, _ = rounds(candidates, inputs.grad_out, time.perf_counter() + PROBE_SECONDS, min)
    ours, dense = (min((row.step() or 0.0 for row in part), default=0.0) for part in (rows[:1], rows[1:]))

    def seconds(other: Shape) -> tuple[float, float]:
        ours_part = other.pairs(other.keys) / probe.pairs(probe.window)
        return ours * ours_part, dense * other.pairs(other.length) / probe.pairs(probe.length)

    return seconds


def dense_candidates(inputs: Inputs, notes: list[str]) -> list[tuple[Candidate, int | None]]:
    """torch's attention by each backend that takes the shape; the others leave a note."""
    found = []
    for name, backend in BACKENDS[inputs.shape.device].items():
        try:
            found.append(ready(inputs.dense(name, backend), inputs.grad_out))
        except RuntimeError as error:
            notes.append(f"SDPA's {name} backend was skipped: {first_line(error)}")
    return found


def sliding_candidate(inputs: Inputs, seconds: float, notes: list[str]) -> list[tuple[Candidate, int | None]]:
    """FlexAttention, if it compiles in time."""
    if seconds < LEAST_COMPILE_SECONDS:
        notes.append("FlexAttention was skipped: no time was left to compile it.")
        return []
    try:
        with at_most(seconds):
            return [ready(inputs.sliding(), inputs.grad_out)]
    except OutOfTimeError:
        notes.append(f"FlexAttention was skipped: it did not compile in the {seconds:.0f} s that were left.")
    except Exception as error:  # whatever a compiler and its tools raise
        notes.append(f"FlexAttention was skipped: {first_line(error)}")
    return []


def measured(asked: Shape, seconds: float) -> Result:
    """Everybody's rows within about so many seconds, for the shape or the part of its batch and heads that fits.

    Raises:
        ShapeError: not even that fits the time or the memory.
    """
    begin = time.perf_counter()
    notes = busy(os.getloadavg()[0], os.cpu_count() or 1) if asked.device == "cpu" else []
    cost = predicted(asked)
    shape = fitted(asked, lambda other: sum(cost(other)), seconds / 16)
    ours, dense = cost(shape)
    if ours > seconds / 4:
        raise ShapeError(
            f"--length: expected a step of dmattn that fits --seconds {seconds:g} several times, got about {duration(ours)}"
        )
    check_memory(shape)
    if shape != asked:
        part = f"batch {shape.batch} of {asked.batch} and {shape.heads} of {asked.heads} heads"
        notes.append(f"Measured with {part}, because the whole would not fit into {seconds:g} s; compare rows, not times.")
    inputs = Inputs(shape)
    candidates = [ready(inputs.dynamic_mask(), inputs.grad_out)]
    needed = 4 * dense * len(BACKENDS[shape.device])  # two warm-ups, a round, and as much again for the others
    if needed > seconds:
        notes.append(
            f"SDPA was skipped: a training step would take about {duration(dense)}; --seconds {needed:.0f} leaves time for it."
        )
    else:
        candidates += dense_candidates(inputs, notes)
    backends = len(candidates) - 1
    candidates += sliding_candidate(inputs, begin + seconds * 0.7 - time.perf_counter(), notes)
    rows, count = rounds(candidates, inputs.grad_out, begin + seconds)
    sliding = rows[1 + backends] if len(rows) > 1 + backends else None
    return Result(shape, rows[0], best(rows[1 : 1 + backends], notes), sliding, count, notes)


def busy(load: float, cores: int) -> list[str]:
    """A remark where other programs take the machine's time."""
    return [f"Other programs keep this machine busy (load {load:.0f} on {cores} cores), so times vary."] if load > cores else []


def best(rows: Sequence[Row], notes: list[str]) -> Row | None:
    """The backend with the fastest training step, with the fastest decode step of them all; None for no backend."""
    if not rows:
        return None
    chosen = min(rows, key=lambda row: row.step() or float("inf"))
    decoding = min(rows, key=lambda row: row.decode or float("inf"))
    if decoding.name != chosen.name:
        notes.append(f"SDPA decodes fastest by its {decoding.name} backend, which is the time shown.")
    return chosen._replace(name=f"SDPA ({chosen.name})", decode=decoding.decode)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
