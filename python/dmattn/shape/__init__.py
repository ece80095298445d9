"""``python -m dmattn shape``: is a dynamic mask faster than dense attention for one shape, on this machine?"""

from __future__ import annotations

import argparse
import platform
import sys
import warnings

import torch

from dmattn import checks
from dmattn._library import build_info
from dmattn.shape import text
from dmattn.shape.measure import first_line, measured
from dmattn.shape.times import Shape, ShapeError

SECONDS = 40.0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=1, help="sequences (1)")
    parser.add_argument("--heads", type=int, required=True, help="query heads")
    parser.add_argument("--kv-heads", type=int, help="key heads (as many as query heads)")
    parser.add_argument("--head-dim", type=int, required=True, help="head size of queries, keys and values")
    parser.add_argument("--length", type=int, required=True, help="tokens of a sequence; causal")
    parser.add_argument("--window", type=int, required=True, help="keys that a query selects")
    parser.add_argument("--local", type=int, default=0, help="latest keys that a query sees whatever their scores (0)")
    parser.add_argument("--sink-keys", type=int, default=0, help="first keys that every query sees (0)")
    parser.add_argument("--dtype", choices=DTYPES, help="bf16 on a GPU, fp32 on a CPU unless given")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="the GPU if there is one that this build can use")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"time for measuring ({SECONDS:g})")


def checked(given: argparse.Namespace) -> Shape:
    """The shape that the arguments say.

    Raises:
        ShapeError: names the argument, what was expected and what it got.
    """
    for name in ("batch", "heads", "kv_heads", "head_dim", "length"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise ShapeError(f"--{name.replace('_', '-')}: expected a positive int, got {value}")
    for name in ("window", "local", "sink_keys"):
        if getattr(given, name) < 0:
            raise ShapeError(f"--{name.replace('_', '-')}: expected an int >= 0, got {getattr(given, name)}")
    kv_heads = given.kv_heads or given.heads
    keys = given.window + given.local + given.sink_keys
    if given.heads % kv_heads:
        raise ShapeError(f"--heads: expected a multiple of --kv-heads = {kv_heads}, got {given.heads}")
    if given.head_dim % 8 or given.head_dim > checks.MAX_HEAD_DIM:
        raise ShapeError(f"--head-dim: expected a multiple of 8 up to {checks.MAX_HEAD_DIM}, got {given.head_dim}")
    if given.length > checks.MAX_LENGTH:
        raise ShapeError(f"--length: expected at most {checks.MAX_LENGTH}, got {given.length}")
    if not 0 < keys <= given.length:
        parts = f"{given.window} + {given.local} + {given.sink_keys}"
        raise ShapeError(f"--window: expected --window + --local + --sink-keys from 1 to --length = {given.length}, got {parts}")
    if not 0 < given.seconds < float("inf"):
        raise ShapeError(f"--seconds: expected a positive number, got {given.seconds:g}")
    device = checked_device(given.device)
    dtype = given.dtype or ("fp32" if device == "cpu" else "bf16")
    if device == "cuda" and dtype == "fp32":
        raise ShapeError("--dtype: expected bf16 or fp16 on cuda, got fp32")
    sizes = (given.batch, given.heads, kv_heads, given.head_dim, given.length, given.window, given.local, given.sink_keys)
    return Shape(*sizes, DTYPES[dtype], device)


def checked_device(wanted: str | None) -> str:
    missing = (
        "torch finds no GPU"
        if not torch.cuda.is_available()
        else ""
        if build_info()["cuda"]
        else "this build has no CUDA kernels"
    )
    if wanted == "cuda" and missing:
        raise ShapeError(f"--device: expected cpu, because {missing}, got cuda")
    return wanted or ("cpu" if missing else "cuda")


def report(shape: Shape, seconds: float) -> str:
    """Measures for about so many seconds and puts it into words.

    Raises:
        ShapeError: this does not fit the time or the memory.
    """
    result = measured(shape, seconds)
    rows = [row for row in (result.ours, result.dense, result.sliding) if row is not None]
    cpu = f"{platform.machine()} CPU, threads: {torch.get_num_threads()}"
    machine = torch.cuda.get_device_name() if shape.device == "cuda" else cpu
    parts = [
        text.title(result.shape, machine),
        text.table(rows),
        "\n".join([text.legend(result.shape, result.rounds), *result.notes]),
    ]
    return "\n\n".join([*parts, text.advice(result.ours, result.dense, result.sliding)])


def run(given: argparse.Namespace) -> int:
    """Prints the report, or one sentence that says why there is none. Returns the exit status."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's reasons for each backend that it does not take
            shape = checked(given)
            if sys.stderr.isatty():
                print(f"Measuring for at most about {given.seconds:g} s ...", file=sys.stderr)
            print(report(shape, given.seconds))
    except ShapeError as error:
        reason = str(error)
    except torch.OutOfMemoryError as error:
        reason = f"out of memory: expected a smaller --batch or --length, got: {first_line(error)}"
    except (RuntimeError, ValueError) as error:
        reason = f"cannot run this shape: {first_line(error)}"
    else:
        return 0
    print(f"python -m dmattn shape: {reason}", file=sys.stderr)
    return 2
