"""Times training steps of a 12-layer model, dynamic masks vs. cuDNN's causal attention: ``python -m dmattn.bench run training-step``.

Both models are the same but for attention, bfloat16, and compiled layer by layer; each query sees length / 64 keys, but at least 1,024.
Of long documents, dynamic masks select within each; the peer has no mask for them. With its own options:
``python -m dmattn.bench.training_step``. Started by ``torchrun -m``, ranks share the sequence: ours with ``dmattn.distributed``, the peer
with torch's ``context_parallel``. ``--output`` keeps the rows of other cases in the file.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

import dmattn
from dmattn import reference
from dmattn.bench.measure import JobOptions, WrongResultError
from dmattn.bench.records import Row, provenance
from dmattn.distributed import context_parallel_attention
from dmattn.nn import DynamicMaskAttention

VOCABULARY = 512
CHECKED_LENGTH = 256


class Layer(nn.Module):
    """One layer for this rank's chunk; ``window`` None means that queries see all earlier keys, by torch's attention."""

    def __init__(self, width: int, heads: int, kv_heads: int, window: int | None, world: int, ends: Tensor | None) -> None:
        super().__init__()
        self.window, self.world, self.ends = window, world, ends
        self.attention = DynamicMaskAttention(width, heads, window or 1, num_kv_heads=kv_heads)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.up, self.gate = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def attend(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        attention = self.attention
        rows = attention.projected(x, rotation=rotation, heads_first=False)
        query, key, value = (each.transpose(1, 2) for each in rows)
        scores = None if self.window is None else attention.scores(rows[2].transpose(1, 2))
        return self.attended(query, key, value, scores)

    def attended(self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None) -> Tensor:
        if self.window is None or scores is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=key.shape[1] != query.shape[1])
        if self.world == 1:
            base = None if self.ends is None else dmattn.IntervalMask.documents(key.shape[2], self.ends)
            return dmattn.dynamic_mask_attention(query, key, value, scores, self.window, base=base)
        return context_parallel_attention(query, key, value, scores=scores, window=self.window)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention.o_proj(self.attend(self.attention_norm(x), rotation).transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class Model(nn.Module):
    """tokens [1, n] at positions [1, n], the byte that follows each -> mean cross-entropy of this rank's chunk."""

    def __init__(self, options: argparse.Namespace, window: int | None, world: int, ends: Tensor | None = None) -> None:
        super().__init__()
        width = options.width
        self.embedding = nn.Embedding(VOCABULARY, width)
        sizes = (width, options.heads, options.kv_heads, window, world, ends)
        self.layers = nn.ModuleList(Layer(*sizes) for _ in range(options.layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, following: Tensor) -> Tensor:
        x = self.embedding(tokens)
        first = self.layers[0]
        assert isinstance(first, Layer)
        rotation = first.attention.rotation(positions)
        for layer in self.layers:
            x = layer(x, rotation)
        return self.loss(x, following)

    def loss(self, x: Tensor, following: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), following.flatten())


def peer_context(world: int, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """torch's context_parallel for the peer on several ranks, and cuDNN's attention."""
    stack = contextlib.ExitStack()
    if world > 1:
        mesh = init_device_mesh(device.type, (world,))
        some = torch.zeros(1, 256 * world, device=device)  # newer releases of torch ask a buffer for its device
        stack.enter_context(context_parallel(mesh, buffers=[some], buffer_seq_dims=[1]))
    if device.type == "cuda":
        stack.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
    return stack


def document_ends(length: int, documents: int, device: torch.device) -> Tensor | None:
    """int32 [documents + 1]: documents of nearly equal length; None for a single one."""
    if documents < 2:
        return None
    return torch.linspace(0, length, documents + 1, device=device).round().to(torch.int32)


def reference_attended(
    layer: Layer, dtype: torch.dtype, query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None
) -> Tensor:
    """What a layer's ``attended`` is by definition, computed in this dtype."""
    visible = None
    if layer.window is not None and scores is not None:
        base = None
        if layer.ends is not None:
            document = torch.bucketize(torch.arange(key.shape[2], device=key.device), layer.ends, right=True)
            base = (document == document[:, None])[None, None]
        visible = reference.top_k_visible(scores.detach(), layer.window, base=base)
    key_bias = None if scores is None else scores.to(dtype)
    out, _ = reference.attention(query.to(dtype), key.to(dtype), value.to(dtype), visible, key_bias=key_bias, is_causal=True)
    return out.to(query.dtype)


def check(name: str, options: argparse.Namespace, device: torch.device) -> None:
    """Compares one layer of the model on a short sequence with the same layer whose attention is the reference in float64: the loss, and
    the gradients of all weights of attention. With more layers, rounding could select other keys.

    Allowed: twice the error of the reference in bfloat16, and four units in the last place of the largest value.

    Raises:
        WrongResultError: says what is wrong by how much.
    """
    torch.manual_seed(0)
    window = None if name == "causal" else min(options.least_window, CHECKED_LENGTH // 8)
    ends = document_ends(CHECKED_LENGTH, min(options.documents, 4), device)
    model = Model(argparse.Namespace(**{**vars(options), "layers": 1}), window, 1, ends).to(device, torch.bfloat16)
    tokens, following = (torch.randint(0, VOCABULARY, (1, CHECKED_LENGTH), device=device) for _ in range(2))
    layer = model.layers[0]
    assert isinstance(layer, Layer)

    def results() -> dict[str, Tensor]:
        model.zero_grad()
        loss = model(tokens, torch.arange(CHECKED_LENGTH, device=device)[None], following)
        loss.backward()
        weights = layer.attention.named_parameters()
        grads = {f"grad of {which}": (torch.zeros_like(w) if w.grad is None else w.grad).double() for which, w in weights}
        return {"loss": loss.detach().double(), **grads}

    with peer_context(1, device) if window is None else contextlib.nullcontext():
        ours = results()
    expected = []
    for dtype in (torch.float64, torch.bfloat16):
        layer.attended = functools.partial(reference_attended, layer, dtype)  # type: ignore[method-assign]
        expected.append(results())
    for what, truth in expected[0].items():
        error, eager_error = ((found[what] - truth).abs().max().item() for found in (ours, expected[1]))
        allowed = 2 * eager_error + 4 * torch.finfo(torch.bfloat16).eps * truth.abs().max().item()
        if not error <= allowed:
            raise WrongResultError(
                f"training step, {name}: {what} differs from the reference by {error:.1e}, allowed {allowed:.1e}"
            )


def measured(name: str, length: int, options: argparse.Namespace, device: torch.device, world: int, rank: int) -> dict[str, Any]:
    """The row of a model.

    Raises:
        WrongResultError: on one rank, a short version of the model gives something else than the reference.
    """
    if world == 1:
        check(name, options, device)
    torch.manual_seed(0)
    torch.compiler.reset()
    window = None if name == "causal" else max(options.least_window, length // 64)
    model = Model(options, window, world, document_ends(length, options.documents, device)).to(device, torch.bfloat16)
    context = peer_context(world, device) if window is None else contextlib.nullcontext()
    # torch's context_parallel replaces attention while it runs, which compiled layers would not see.
    is_compiled = not options.eager and (window is not None or world == 1)
    if is_compiled:
        for layer in model.layers:
            layer.compile(fullgraph=True, dynamic=False)
        model.loss = torch.compile(model.loss, fullgraph=True, dynamic=False)  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    own = length // world
    tokens, following = (torch.randint(0, VOCABULARY, (1, own), device=device) for _ in range(2))
    positions = torch.arange(rank * own, (rank + 1) * own, device=device)[None]

    def step() -> None:
        model(tokens, positions, following).backward()
        if world > 1:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat)
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient) / world)
        optimizer.step()
        optimizer.zero_grad()

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    with context:
        began = clock()
        step()
        first = clock() - began
        for _ in range(options.warm_ups):
            step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        samples = []
        for _ in range(options.repeats):
            began = clock()
            step()
            samples.append(clock() - began)
        seconds = statistics.fmean(samples)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {
        "name": name, "length": length, "ranks": world, "window": window, "milliseconds": seconds * 1e3, "tokens_per_second": length / seconds,
        "samples": samples,
        "peak_gib": peak, "first_step_seconds": first, "compiled": is_compiled,
        "documents": options.documents,
    }  # fmt: skip


def rows(options: JobOptions, documents: int = 0) -> list[Row]:
    """Both models at each length, on this process's device."""
    is_cuda = options.device == "cuda"
    sizes = {"layers": 12, "width": 1024, "heads": 8, "kv_heads": 8, "least_window": 1024, "eager": False}
    if not is_cuda:
        sizes = {"layers": 2, "width": 64, "heads": 2, "kv_heads": 2, "least_window": 64, "eager": True}
    elif options.quick:
        sizes = {**sizes, "layers": 2}
    lengths = [512] if not is_cuda else [8192] if options.quick else [32_768, 131_072]
    given = argparse.Namespace(**sizes, documents=documents, repeats=options.repeats or 5, warm_ups=2)
    device = torch.device(options.device)
    found = []
    for length in lengths:
        for name in ("dynamic", "causal"):
            found.append(measured(name, length, given, device, 1, 0))
            if is_cuda:
                torch.cuda.empty_cache()
    return found


def document_rows(options: JobOptions) -> list[Row]:
    """The same on eight documents."""
    return rows(options, documents=8)


def write(path: Path, found: list[Row]) -> None:
    """The rows, and those of other lengths, numbers of ranks and models that the file had."""

    def case(row: Row) -> tuple[Any, ...]:
        return row["ranks"], row["length"], row.get("documents", 0), row["name"]

    kept = [old for old in json.loads(path.read_text())["rows"] if case(old) not in map(case, found)] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": sorted(kept + found, key=lambda row: case(row)[:3])}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", help="default: 32768 131072 on one rank, 262144 on several")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--least-window", type=int, default=1024)
    parser.add_argument("--documents", type=int, default=0, help="how many documents a sequence holds; on one rank")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-ups", type=int, default=2, help="steps that are not timed, beside the first")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and options.documents:
        parser.error(f"--documents: expected none on {world} ranks, which share one sequence, got {options.documents}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if world > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    found: list[Row] = []
    for length in options.lengths or ([32_768, 131_072] if world == 1 else [262_144]):
        pair = []
        for name in ("dynamic", "causal"):
            try:
                pair.append(measured(name, length, options, device, world, rank))
            except (RuntimeError, ValueError, NotImplementedError, AttributeError, IndexError) as reason:
                if world == 1 or name == "dynamic":
                    raise
                # torch's context_parallel does not run here.
                pair.append({"name": name, "length": length, "ranks": world, "error": str(reason)[:200]})
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if rank == 0:
                print("  ".join(f"{key} {x:.1f}" if isinstance(x, float) else f"{x}" for key, x in pair[-1].items()), flush=True)
                found.append({**provenance(device.type), **pair[-1]})
                if options.output:
                    write(options.output, found)
        if rank == 0 and "milliseconds" in pair[1]:
            print(f"  dynamic is {pair[1]['milliseconds'] / pair[0]['milliseconds']:.2f}x faster", flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
