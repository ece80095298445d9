"""Times the choice of keys by an indexer, its loss, and decoding: ``python benchmarks/indexer.py [--device cuda] [--output indexer.json]``.

The peer of ``index_top_k`` is torch: scores of a few queries at a time (products in bfloat16, relu, the weighted sum), causality, and topk.
Whole eager calls, by turns. Decoding is timed in CUDA graphs: the choice of keys from a full cache, and attention to what it lists beside
attention to a cache of as many keys.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import dmattn
import torch
from dmattn_bench.measure import by_turns, graph_samples
from dmattn_bench.records import provenance
from dmattn_bench.rows import to_json
from torch import Tensor

Row = dict[str, object]
SCORES_AT_ONCE = 1 << 28  # of the peer, over all index heads


@dataclasses.dataclass(frozen=True)
class Case:
    """``keys`` keys a query, in blocks of ``block``."""

    length: int
    keys: int
    block: int = 1
    block_score: str = "max"
    groups: int = 8
    heads: int = 4
    head_dim: int = 32

    def __str__(self) -> str:
        shape = f"{self.length} tokens, G={self.groups}, Hi={self.heads}, Di={self.head_dim}"
        return f"{shape}, {self.keys} keys in blocks of {self.block} ({self.block_score})"


CUDA = [
    Case(32768, 1024),
    Case(32768, 1024, 16),
    Case(32768, 1024, 16, "mean_key"),
    Case(131072, 2048, 16),
    Case(131072, 2048, 16, "mean_key"),
    Case(65536, 2048, groups=1, heads=64, head_dim=128),
]
CPU = [Case(4096, 256), Case(4096, 256, 16, "mean_key")]
# Of the loss: keys, groups, heads of a group, D
CUDA_LOSS = [(32768, 8, 4, 128), (32768, 4, 1, 64), (131072, 8, 4, 128)]
CPU_LOSS = [(4096, 8, 4, 64)]
DECODE = [(1, 131072, 2048), (16, 131072, 2048)]  # sequences, keys, keys that are listed


def tensors(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = ((case.length, case.heads, case.head_dim), (case.length, case.head_dim), (case.length, case.heads))
    query, key, weights = (torch.randn(1, case.groups, *size, device=device, dtype=dtype) for size in sizes)
    return query, key, weights


def chosen_by_torch(case: Case, query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """The lists in torch operations, in no order. Blocks are scored by their largest key."""
    step = max(1, SCORES_AT_ONCE // (case.groups * case.heads * case.length))
    places = torch.arange(case.length, device=query.device)
    found = []
    for first in range(0, case.length, step):
        rows = slice(first, first + step)
        products = query[:, :, rows].flatten(2, 3) @ key.transpose(2, 3)
        active = products.relu_().unflatten(2, (-1, case.heads))
        scores = (weights[:, :, rows, None] @ active).squeeze(3).float() * case.head_dim**-0.5
        scores.masked_fill_(places > places[rows, None], -math.inf)
        if case.block > 1:
            scores = scores.unflatten(3, (-1, case.block)).amax(4)
        best = scores.topk(min(case.keys // case.block, scores.shape[3]), dim=3, sorted=False)
        found.append(torch.where(best.values > -math.inf, best.indices, -1).int())
    return torch.cat(found, dim=2)


def peak(call: Callable[[], object], device: str) -> float:
    """Megabytes that a call takes beside what was there."""
    if device != "cuda":
        return math.nan
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def row_of(case: Case, device: str, repeats: int) -> Row:
    given = tensors(case, device)
    options = {"block_size": case.block, "block_score": case.block_score}

    def ours() -> object:
        return dmattn.index_top_k(*given, case.keys // case.block, **options)

    runs: dict[str, Callable[[], object]] = {"ours": ours}
    if case.block_score == "max":
        runs["torch"] = lambda: chosen_by_torch(case, *given)
    times = {name: statistics.median(samples) for name, samples in by_turns(runs, device, repeats).items()}
    row = {
        "case": str(case),
        **dataclasses.asdict(case),
        **{f"{name}_ms": round(taken * 1e3, 4) for name, taken in times.items()},
    }
    if "torch" in times:
        row["speedup"] = round(times["torch"] / times["ours"], 2)
    return row | {f"{name}_peak_mb": round(peak(run, device), 1) for name, run in runs.items()}


def loss_row(length: int, groups: int, heads: int, head_dim: int, device: str, repeats: int) -> Row:
    """256 queries teach; the loss and all its gradients."""
    case = Case(length, length, groups=groups)
    given = tuple(part.requires_grad_() for part in tensors(case, device))
    query, key = (torch.randn(1, n, length, head_dim, device=device, dtype=given[0].dtype) for n in (groups * heads, groups))
    rows = torch.arange(256, device=device) * (length // 256) + length // 512

    def loss() -> object:
        return dmattn.index_loss(*given, query, key, rows=rows, sharp=True)

    taken = statistics.median(by_turns({"loss": loss}, device, repeats)["loss"])
    name = f"index_loss, {length} tokens, G={groups}, 256 queries of {heads} heads, D={head_dim}"
    return {
        "case": name,
        **dataclasses.asdict(case),
        "loss_ms": round(taken * 1e3, 4),
        "loss_peak_mb": round(peak(loss, device), 1),
    }


def decode_row(sequences: int, length: int, listed: int, repeats: int) -> Row:
    """32 query heads on 8, D = 128."""
    device, dtype = "cuda", torch.bfloat16
    case = Case(length, listed)
    index_query, index_key, weights = (
        torch.randn(sequences, 8, *size, device=device, dtype=dtype) for size in ((1, 4, 32), (length, 32), (1, 4))
    )
    query = torch.randn(sequences, 32, 1, 128, device=device, dtype=dtype)
    key, value = (torch.randn(sequences, 8, length, 128, device=device, dtype=dtype) for _ in range(2))
    few_keys, few_values = (given[:, :, :listed].contiguous() for given in (key, value))
    lengths, few = (torch.full((sequences,), n, dtype=torch.int32, device=device) for n in (length, listed))
    mask = dmattn.index_top_k(index_query, index_key, weights, listed, lengths=lengths)
    runs = {
        "index_top_k": lambda: dmattn.index_top_k(index_query, index_key, weights, listed, lengths=lengths),
        "listed": lambda: dmattn.decode_attention(query, key, value, lengths, mask=mask),
        "few": lambda: dmattn.decode_attention(query, few_keys, few_values, few),
        "full": lambda: dmattn.decode_attention(query, key, value, lengths),
    }
    times = {name: statistics.median(graph_samples([run] * 8, repeats)) for name, run in runs.items()}
    row = {"case": f"decode {sequences} x {length} keys, {listed} listed", **dataclasses.asdict(case), "sequences": sequences}
    row |= {f"{name}_us": round(taken, 2) for name, taken in times.items()}
    return row | {"listed_over_few": round(times["listed"] / times["few"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="the first case alone, short")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    cases, losses = (CUDA, CUDA_LOSS) if on_gpu else (CPU, CPU_LOSS)
    if arguments.quick:
        losses = []
        cases = [dataclasses.replace(cases[0], length=512, keys=64)]
    rows = []
    for case in cases:
        rows.append(row_of(case, arguments.device, 1 if arguments.quick else arguments.repeats))
        print(
            {name: rows[-1][name] for name in rows[-1] if name == "case" or name.endswith(("_ms", "speedup", "_mb"))}, flush=True
        )
    for sizes in losses:
        rows.append(loss_row(*sizes, arguments.device, arguments.repeats))
        print({name: rows[-1][name] for name in ("case", "loss_ms", "loss_peak_mb")}, flush=True)
    for sizes in DECODE if on_gpu and not arguments.quick else []:
        rows.append(decode_row(*sizes, repeats=arguments.repeats))
        print({name: rows[-1][name] for name in rows[-1] if name == "case" or name.endswith(("_us", "_few"))}, flush=True)
    if arguments.output:
        arguments.output.write_text(to_json({**provenance(arguments.device), "rows": rows}))


if __name__ == "__main__":
    sys.exit(main())
