"""``python -m dmattn shape``: is a dynamic mask faster than dense attention for one shape, on this machine?"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import platform
import signal
import sys
import time
import warnings
from collections.abc import Sequence

import torch
from torch.nn.attention import SDPBackend

from dmattn import checks
from dmattn._library import build_info
from dmattn.shape_times import Candidate, Inputs, Shape, time_rounds, warm_up

SECONDS = 45.0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STEP = ("forward", "backward")
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
TIMES, SIZES = (1000, ("us", "ms", "s")), (1024, ("B", "KiB", "MiB", "GiB"))
LONGEST_PROBE = {"cuda": 8192, "cpu": 1024}  # tokens of the short calls that predict long ones
LEAST_COMPILE_SECONDS = 5.0
ALIKE = 1.05  # ratios of times up to it count as no difference


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=1, help="sequences (1)")
    parser.add_argument("--heads", type=int, required=True, help="query heads")
    parser.add_argument("--kv-heads", type=int, help="key heads (as many as query heads)")
    parser.add_argument("--head-dim", type=int, default=128, help="head size of queries, keys and values (128)")
    parser.add_argument("--length", type=int, required=True, help="tokens of a sequence; causal")
    parser.add_argument("--window", type=int, required=True, help="keys that a query selects")
    parser.add_argument("--local", type=int, default=0, help="latest keys that a query sees whatever their scores (0)")
    parser.add_argument("--sink-keys", type=int, default=0, help="first keys that every query sees (0)")
    parser.add_argument("--dtype", choices=DTYPES, help="bf16 on a GPU, fp32 on a CPU unless given")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="the GPU if there is one that this build can use")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"time for measuring ({SECONDS:g})")


def checked(given: argparse.Namespace) -> Shape:
    """The shape that the arguments describe.

    Raises:
        ValueError: names the argument, what was expected and what it got.
    """
    most = checks.MAX_LENGTH
    for name in ("batch", "heads", "kv_heads", "head_dim", "length", "window", "local", "sink_keys"):
        value, least = getattr(given, name), int(name not in ("window", "local", "sink_keys"))
        if value is not None and not least <= value <= most:
            raise ValueError(f"--{name.replace('_', '-')}: expected an int from {least} to {most}, got {value}")
    kv_heads = given.kv_heads or given.heads
    if given.heads % kv_heads:
        raise ValueError(f"--heads: expected a multiple of --kv-heads = {kv_heads}, got {given.heads}")
    if given.head_dim % 8 or given.head_dim > checks.MAX_HEAD_DIM:
        raise ValueError(f"--head-dim: expected a multiple of 8 up to {checks.MAX_HEAD_DIM}, got {given.head_dim}")
    if not 0 < given.window + given.local + given.sink_keys <= given.length:
        parts = f"{given.window} + {given.local} + {given.sink_keys}"
        raise ValueError(f"--window: expected --window + --local + --sink-keys from 1 to --length = {given.length}, got {parts}")
    if not 0 < given.seconds < float("inf"):
        raise ValueError(f"--seconds: expected a positive number, got {given.seconds:g}")
    missing = (
        "torch finds no GPU"
        if not torch.cuda.is_available()
        else ""
        if build_info()["cuda"]
        else "this build has no CUDA kernels"
    )
    if given.device == "cuda" and missing:
        raise ValueError(f"--device: expected cpu, because {missing}, got cuda")
    device = given.device or ("cpu" if missing else "cuda")
    if device == "cuda" and given.dtype == "fp32":
        raise ValueError("--dtype: expected bf16 or fp16 on cuda, got fp32")
    dtype = given.dtype or ("fp32" if device == "cpu" else "bf16")
    sizes = (given.batch, given.heads, kv_heads, given.head_dim, given.length, given.window, given.local, given.sink_keys)
    return Shape(*sizes, DTYPES[dtype], device)


def dense_candidates(inputs: Inputs) -> list[Candidate]:
    """torch's attention by each backend that takes the shape."""
    found = []
    for name, backend in BACKENDS.items():
        with contextlib.suppress(RuntimeError):
            found.append(warm_up(inputs.dense(name, backend), inputs.grad_out))
    return found


def fit(asked: Shape, seconds: float) -> tuple[Shape, str]:
    """The shape with its batch halved, then its heads, until it fits the time; and why SDPA must be skipped, or "".

    Times of a training step are those of a short call, in proportion to the pairs of a query and a key.

    Raises:
        ValueError: one key head of one sequence does not fit.
    """
    length, shape = min(asked.length, LONGEST_PROBE[asked.device]), asked
    heads, kv_heads = (asked.heads, asked.kv_heads) if asked.device == "cuda" else (asked.heads // asked.kv_heads, 1)
    sizes = {"batch": 1, "heads": heads, "kv_heads": kv_heads, "length": length, "window": min(asked.keys, length)}
    probe = dataclasses.replace(asked, **sizes, local=0, sink_keys=0)  # type: ignore[arg-type]
    inputs = Inputs(probe)
    ours, dense = warm_up(inputs.dynamic_mask(), inputs.grad_out), dense_candidates(inputs)
    time_rounds([ours, *dense], inputs.grad_out, time.perf_counter() + 1.0)  # of several rounds: first calls are slow

    def cost() -> tuple[float, float]:
        own = ours.seconds(*STEP) * shape.pairs(shape.keys) / probe.pairs(probe.keys)
        fastest = min((each.seconds(*STEP) for each in dense), default=0.0)
        return own, fastest * shape.pairs(shape.length) / probe.pairs(length)

    while sum(cost()) > seconds / 16 and shape.batch * shape.kv_heads > 1:
        batch, kv_heads = max(shape.batch // 2, 1), shape.kv_heads if shape.batch > 1 else shape.kv_heads // 2
        shape = dataclasses.replace(shape, batch=batch, heads=asked.heads // asked.kv_heads * kv_heads, kv_heads=kv_heads)
    own_step, dense_step = cost()
    if own_step > seconds / 4:
        step = scaled(own_step * 1e6, *TIMES)
        raise ValueError(f"--length: expected a step that fits --seconds {seconds:g} four times, got one of about {step}")
    least = 4 * dense_step * len(dense)  # two steps to warm up, one round, and as much again for the others
    return shape, f"SDPA was skipped: it needs about --seconds {least:.0f}." if least > seconds else ""


def sliding_candidate(inputs: Inputs, seconds: float) -> Candidate | str:
    """FlexAttention if it compiles in time, or a sentence that says why not."""
    too_little = "FlexAttention was skipped: there was too little time to compile it."
    if seconds < LEAST_COMPILE_SECONDS:
        return too_little
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return warm_up(inputs.sliding(), inputs.grad_out)
    except KeyboardInterrupt:
        return too_little
    except Exception as error:  # whatever a compiler and its tools raise
        return f"FlexAttention was skipped: {first_line(error)}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def best(dense: list[Candidate]) -> Candidate:
    """The backend whose step is fastest, with the decode time of the backend that decodes fastest; both are named."""
    row, decoders = min(dense, key=lambda each: each.seconds(*STEP)), [each for each in dense if each.decode]
    decoder = min(decoders, key=lambda each: each.seconds("decode"), default=row)
    name = f"SDPA ({row.name})" if decoder is row else f"SDPA ({row.name}, {decoder.name} decodes)"
    return dataclasses.replace(row, name=name, samples={**decoder.samples, **{key: row.samples[key] for key in STEP}})


def report(asked: Shape, seconds: float) -> str:
    """Measures for about so many seconds. Returns the table, how it was measured, and one sentence of advice.

    Raises:
        ValueError, RuntimeError: the shape does not fit the time or the memory, or no kernel takes it.
    """
    begin = time.perf_counter()
    shape, skipped = fit(asked, seconds)
    part = f"batch {shape.batch} of {asked.batch} and {shape.heads} of {asked.heads} heads"
    cut = f"Measured with {part} to fit {seconds:g} s; compare rows, not times." if shape != asked else ""
    inputs = Inputs(shape)
    ours, dense = warm_up(inputs.dynamic_mask(), inputs.grad_out), [] if skipped else dense_candidates(inputs)
    found = sliding_candidate(inputs, begin + seconds * 0.85 - time.perf_counter())
    sliding = [found] if isinstance(found, Candidate) else []
    rounds = time_rounds([ours, *dense, *sliding], inputs.grad_out, begin + seconds)
    rows = [ours, *([best(dense)] if dense else []), *sliding]
    clock = "CUDA events, a cold L2 cache, launching included" if shape.device == "cuda" else "wall clock"
    legend = (
        f"Times: medians of eager calls ({rounds} rounds), {clock}; dmattn's forward selects its keys by random scores.\n"
        f"Decode: one token of each sequence; dmattn reads {shape.keys:,} keys, SDPA {shape.length:,}. Cache: what decoding keeps.\n"
        "Memory: peak of a training step beyond its inputs, measured on a GPU only."
    )
    notes = [legend, *(note for note in (cut, skipped, found) if note and isinstance(note, str))]
    return "\n\n".join([title(shape), table(rows), "\n".join(notes), advice(rows)])


def scaled(value: float | None, base: int, units: Sequence[str]) -> str:
    if not value:
        return "-"
    power = next((power for power in range(len(units) - 1) if value / base**power < 999.5), len(units) - 1)
    return f"{value / base**power:.3g} {units[power]}"


def title(shape: Shape) -> str:
    cpu = f"{platform.machine()} CPU, threads: {torch.get_num_threads()}"
    machine = torch.cuda.get_device_name() if shape.device == "cuda" else cpu
    sizes = f"batch {shape.batch}, {shape.heads} heads on {shape.kv_heads}, head size {shape.head_dim}, {shape.length:,} tokens"
    return f"{sizes}, {shape.keys:,} keys of each query, {str(shape.dtype).removeprefix('torch.')}, {machine}"


def table(rows: Sequence[Candidate]) -> str:
    """Columns aligned, numbers to the right."""
    columns = ("forward", "backward", "decode")
    lines = [["", *columns, "memory", "cache"]]
    for row in rows:
        times = [scaled(row.seconds(each) * 1e6, *TIMES) for each in columns]
        lines.append([row.name, *times, scaled(row.memory, *SIZES), scaled(row.cache, *SIZES)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [[cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join([line[0].ljust(widths[0]), *cells[1:]]) for line, cells in zip(lines, aligned, strict=True))


def compared(ours: float, theirs: float) -> str:
    factor = max(ours / theirs, theirs / ours)
    words = f"{factor:.2g}x" if factor < 10 else f"{factor:.0f}x"
    return "as fast" if factor <= ALIKE else f"{words} {'faster' if ours < theirs else 'slower'}"


def advice(rows: Sequence[Candidate]) -> str:
    """One sentence that says nothing but what the rows say."""
    (ours, *others), said = rows, []
    for other in others:
        pairs = [
            (verb, ours.seconds(*names), other.seconds(*names)) for verb, names in (("trains", STEP), ("decodes", ("decode",)))
        ]
        speeds = [f"{verb} {compared(own, theirs)}" for verb, own, theirs in pairs if own and theirs]
        said += [f"compared with {other.name}, dmattn {' and '.join(speeds)}"] if speeds else []
    if not said or not others[0].cache:
        return "Dense attention was not measured, so these numbers do not say which is faster for this shape."
    one_way = "dmattn" if "faster" in said[0] else "dense attention" if "slower" in said[0] else "either"
    choice = "by what you do more" if "faster" in said[0] and "slower" in said[0] else one_way
    return f"Choose {choice} for this shape: {'; '.join(said)}."


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def run(given: argparse.Namespace) -> int:
    """Prints the report, or one sentence that says why there is none. Returns the exit status."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's reasons for each backend that it does not take
            print(report(checked(given), given.seconds))
    except (RuntimeError, ValueError) as error:  # RuntimeError: memory, or a kernel that refuses
        print(f"python -m dmattn shape: {first_line(error)}", file=sys.stderr)
        return 2
    return 0
