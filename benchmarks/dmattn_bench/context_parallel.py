"""Times context parallelism beside torch's own, on any number of ranks: ``python -m dmattn_bench run context-parallel``.

Each rank has a chunk of the sequence. Beside our call stand the same call on one rank's chunk alone, without anything from other ranks, and
torch's ``context_parallel`` with cuDNN's causal attention, all in one run. Bytes are those that a rank receives, the most of any rank. With
``--bytes`` only they are counted: the exchanges run, attention does not. With its own options: ``torchrun --nproc-per-node 2 -m
dmattn_bench.context_parallel``; ``--output`` keeps the rows of other numbers of ranks in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import dmattn
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dmattn.distributed import context_parallel_attention, needs, record_traffic
from dmattn.distributed.chunks import Chunks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from dmattn_bench.measure import CannotRunError, JobOptions, WrongResultError
from dmattn_bench.records import Row, provenance
from dmattn_bench.rows import to_json
from dmattn_bench.two_ways import assert_same_by_another_way, assert_same_sums_by_another_way

GATE_LENGTH, GATE_WINDOW = 4096, 200  # of the case whose results are compared with those of one process


class Job:
    """One length: this rank's tensors, and what is timed."""

    def __init__(self, length: int, options: argparse.Namespace, device: torch.device, seed: int = 0) -> None:
        self.length, self.options, self.device = length, options, device
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.own = length // self.world
        self.dtype = torch.bfloat16
        generator = torch.Generator(device).manual_seed(seed * 1000 + self.rank)

        def draw(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(1, *shape, generator=generator, device=device, dtype=dtype, requires_grad=True)

        self.query = draw(options.heads, self.own, options.head_dim)
        self.key, self.value = (draw(options.kv_heads, self.own, options.head_dim) for _ in range(2))
        self.scores = draw(options.kv_heads, self.own, dtype=torch.float32)
        self.grad_out = draw(options.heads, self.own, options.head_dim).detach()

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value, self.scores

    def ours(self, window: int | None = None) -> Tensor:
        out: Tensor = context_parallel_attention(
            self.query, self.key, self.value, scores=self.scores, window=window or self.options.window
        )
        return out

    def alone(self) -> Tensor:
        out: Tensor = dmattn.dynamic_mask_attention(*self.inputs, self.options.window)
        return out

    def peer(self) -> Tensor:
        grouped = self.options.heads != self.options.kv_heads
        return F.scaled_dot_product_attention(self.query, self.key, self.value, is_causal=True, enable_gqa=grouped)


def timed(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Milliseconds of one run that begins when all ranks and GPUs are idle: the median, of the slowest rank."""
    samples = []
    for turn in range(repeats + 2):
        dist.barrier()
        if device.type == "cuda":
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            run()
            last.record()
            torch.cuda.synchronize()
            sample = first.elapsed_time(last)
        else:
            began = time.perf_counter()
            run()
            sample = (time.perf_counter() - began) * 1e3
        if turn >= 2:
            samples.append(sample)
    return largest(statistics.median(samples), device)


def in_a_row(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Milliseconds of each of several runs that follow each other, as layers of a model do: hosts work ahead of their GPUs."""
    run()
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(2 * repeats):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return largest((time.perf_counter() - began) * 1e3 / (2 * repeats), device)


def largest(number: float, device: torch.device) -> float:
    """Of all ranks."""
    shared = torch.tensor([number], dtype=torch.float64, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.item()


def times(run: Callable[[], Tensor], inputs: tuple[Tensor, ...], grad_out: Tensor, repeats: int) -> dict[str, float]:
    def both() -> object:
        return torch.autograd.grad(run(), inputs, grad_out)

    device = grad_out.device
    with torch.no_grad():
        result = {"forward_ms": timed(run, repeats, device), "forward_in_a_row_ms": in_a_row(run, repeats, device)}
    return result | {
        "forward_backward_ms": timed(both, repeats, device), "forward_backward_in_a_row_ms": in_a_row(both, repeats, device)
    }  # fmt: skip


def peer_times(job: Job, repeats: int) -> dict[str, float]:
    mesh = init_device_mesh("cuda", (job.world,))
    some = torch.zeros(1, 256 * job.world, device=job.device)  # newer releases of torch ask a buffer for its device
    with context_parallel(mesh, buffers=[some], buffer_seq_dims=[1]), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return times(job.peer, job.inputs[:3], job.grad_out, repeats)


def bytes_in(job: Job) -> dict[str, float]:
    """What the rank that receives the most gets, forward and backward."""
    with record_traffic() as traffic:
        if job.options.bytes:
            exchange_only(job)
        else:
            torch.autograd.grad(job.ours(), job.inputs, job.grad_out)
    return {name: largest(value, job.device) for name, value in vars(traffic).items()}


def exchange_only(job: Job) -> None:
    """Everything of our call but attention."""
    chunks = Chunks(dist.distributed_c10d._get_default_group().group_name, job.rank, [job.own] * job.world)
    ops = torch.ops.dmattn_distributed
    if job.world == 2:
        selection = job.options.window, 0, 0
        place = chunks.lengths, job.rank, chunks.group, None
        (bias, key, value), *_ = ops.fetch([job.scores[..., None], job.key, job.value], *selection, *place)
        rows = key, value, bias
        torch.autograd.grad(rows, job.inputs[1:], [torch.ones_like(x) for x in rows])
        return
    scores = ops.gather_scores(job.scores.detach(), chunks.lengths, job.rank, chunks.group, None)
    end = torch.ops.dmattn.select(scores, None, job.options.window, True)
    counts = needs.slots_from_bound(job.options.window, chunks)
    slots = needs.slots_of(None, end, chunks, job.options.kv_heads, counts[job.rank])
    place = chunks.lengths, job.rank, chunks.group, None
    (key, value, bias), _ = ops.carry([job.key, job.value, job.scores[..., None]], None, end, slots, counts, *place)
    torch.autograd.grad((key, value, bias), job.inputs[1:], [torch.ones_like(x) for x in (key, value, bias)])


def row(length: int, options: argparse.Namespace, device: torch.device) -> Row:
    job = Job(length, options, device)
    width = 2 * options.head_dim * job.dtype.itemsize
    result: Row = {
        "length": length, "ranks": job.world, "window": options.window, "heads": options.heads, "kv_heads": options.kv_heads,
        "head_dim": options.head_dim, "bytes_in": bytes_in(job), "most_bytes_of_rows": options.window * options.kv_heads * (width + 4),
        "ring_bytes_in": (length - job.own) * options.kv_heads * width,
    }  # fmt: skip
    if options.bytes:
        return result
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    result["ours"] = times(job.ours, job.inputs, job.grad_out, options.repeats)
    if device.type == "cuda":
        result["peak_gib"] = largest(torch.cuda.max_memory_allocated() / 2**30, device)
    result["one_chunk_alone"] = times(job.alone, job.inputs, job.grad_out, options.repeats)
    if device.type == "cuda" and length <= options.peer_up_to:
        try:
            result["torch_context_parallel_cudnn"] = peer_times(job, 2 if length > 200_000 else 3)
        except (RuntimeError, ValueError, NotImplementedError, AttributeError, IndexError) as reason:
            result["torch_context_parallel_cudnn"] = {"error": str(reason)[:200]}
    return result


def gate(options: argparse.Namespace, device: torch.device) -> None:
    """Compares a small case with one process.

    Raises:
        AssertionError: results differ.
    """
    job = Job(GATE_LENGTH, options, device, seed=1)
    ours = job.ours(GATE_WINDOW)
    gradients = torch.autograd.grad(ours, job.inputs, job.grad_out)

    def whole(chunk: Tensor) -> Tensor:
        parts = [torch.empty_like(chunk, memory_format=torch.contiguous_format) for _ in range(job.world)]
        dist.all_gather(parts, chunk.detach().contiguous())
        return torch.cat(parts, dim=2)

    query, key, value, scores = leaves = [whole(x).requires_grad_() for x in job.inputs]
    out = dmattn.dynamic_mask_attention(query, key, value, scores, GATE_WINDOW)
    expected = torch.autograd.grad(out, leaves, whole(job.grad_out))
    for got, wanted in zip((ours, *gradients), (out, *expected), strict=True):
        rule = assert_same_sums_by_another_way if wanted.dim() == 3 else assert_same_by_another_way  # scores, and all others
        rule(whole(got), wanted, job.dtype)


def shown(result: Row) -> str:
    ours, alone, peer = (result.get(name) for name in ("ours", "one_chunk_alone", "torch_context_parallel_cudnn"))
    text = f"{result['length']:>8} tokens on {result['ranks']} ranks: bytes in {result['bytes_in']}"
    if isinstance(ours, dict) and isinstance(alone, dict):
        for name, milliseconds in ours.items():
            text += f"\n    {name:31} {milliseconds:9.2f}, one chunk alone {alone[name]:9.2f} (+{100 * (milliseconds / alone[name] - 1):.0f} %)"
            if isinstance(peer, dict) and name in peer:
                text += f", torch's {peer[name]:9.2f}: {peer[name] / milliseconds:.1f}x"
    if isinstance(peer, dict) and "error" in peer:
        text += f"\n    torch's: {peer['error']}"
    return text


def write(path: Path, rows: list[Row], device: torch.device) -> None:
    """The rows, and those of other numbers of ranks that the file had."""
    world = dist.get_world_size()
    kept = [old for old in json.loads(path.read_text())["rows"] if old["ranks"] != world] if path.exists() else []
    facts = provenance(device.type)
    together = sorted(kept + [{**facts, **each} for each in rows], key=lambda each: (each["ranks"], each["length"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json({"rows": together}))


def rows(options: JobOptions) -> list[Row]:
    """All rows, of processes that this one starts: a rank for each GPU, or two on a CPU.

    Raises:
        CannotRunError: there is one GPU alone.
        WrongResultError: ranks compute something else than one process.
    """
    world = torch.cuda.device_count() if options.device == "cuda" else 2
    if world < 2:
        raise CannotRunError("context-parallel: needs two GPUs, here is one")
    sizes = ["--lengths", "131072", *(() if options.quick else ("262144",))]
    if options.device == "cpu":
        sizes = ["--lengths", "1024", "--window", "64", "--heads", "2", "--kv-heads", "2", "--head-dim", "32"]
    if options.repeats:
        sizes += ["--repeats", str(options.repeats)]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        command += ["-m", "dmattn_bench.context_parallel", *sizes, "--output", str(output)]
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {}
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **hidden})
        if "refused: " in done.stderr:
            raise WrongResultError("context-parallel: " + done.stderr.split("refused: ", 1)[1].split("\n")[0])
        if done.returncode:
            raise CannotRunError(f"context-parallel: its processes ended with {done.returncode}: {done.stderr[-500:]}")
        found: list[Row] = json.loads(output.read_text())["rows"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[131_072, 262_144, 524_288, 1_048_576])
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--peer-up-to", type=int, default=262_144, help="longest sequence that torch's context_parallel is timed at"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bytes", action="store_true", help="count bytes and time nothing")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo")
    if not options.bytes:
        try:
            gate(options, device)
        except AssertionError as reason:
            sys.exit(f"refused: {reason}")
    found = []
    for length in options.lengths:
        found.append(row(length, options, device))
        if dist.get_rank() == 0:
            print(shown(found[-1]), flush=True)
            if options.output:
                write(options.output, found, device)
        if use_cuda:
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
