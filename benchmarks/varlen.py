"""Times packed sequences vs. the time that their visible pairs would take in a dense call: ``python benchmarks/varlen.py [--device cuda]``.

The peer is torch's own packed attention (FlashAttention), where this torch has it for the device. The best that can be expected is the time of
one dense causal call, divided by its pairs and multiplied by those that are visible here. Documents have from 1 to ``--longest`` tokens,
all lengths equally likely. Writes JSON with --output.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import dmattn
import torch
import torch.nn.functional as F
from dmattn import reference
from dmattn.testing import AttentionCase, assert_close_to_reference
from dmattn_bench.measure import both_ways, by_turns
from dmattn_bench.records import provenance
from dmattn_bench.rows import to_json
from torch import Tensor

HEAD_DIM = 128
DENSE_HEADS = 16  # of the dense call: enough to fill a GPU
MOST_CHECKED = 300  # keys of a document that is checked
Row = dict[str, object]


@dataclasses.dataclass(frozen=True)
class Case:
    """Packed documents, causal.

    Args:
        window: keys selected by random scores; 0: all keys.
        queries: of each document's tokens, the part (from the end on) that are queries.
    """

    documents: int
    heads: int
    window: int = 0
    queries: float = 1.0

    def __str__(self) -> str:
        beside = f", window {self.window}" if self.window else ""
        return f"{self.documents} documents, {self.heads} heads{beside}" + (
            f", the last {self.queries:.0%}" if self.queries < 1 else ""
        )


def ends_of(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def visible_pairs(lengths_q: Tensor, lengths_k: Tensor, window: int) -> int:
    """Of one head. Query a of Lq sees a + Lk - Lq + 1 keys, or as many as the window has."""
    total = 0
    for queries, keys in zip(lengths_q.tolist(), lengths_k.tolist(), strict=True):
        seen = range(keys - queries + 1, keys + 1)
        total += sum(seen) if not window else sum(min(n, window) for n in seen)
    return total


def torchs_call(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, longest_q: int, longest_k: int
) -> Callable[[], Tensor] | None:
    """torch's packed attention, causal; None where there is none."""
    if query.device.type != "cuda" or importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return None
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    causal = {"is_causal": True} if "is_causal" in inspect.signature(varlen_attn).parameters else {"window_size": (-1, 0)}
    return lambda: varlen_attn(query, key, value, ends_q, ends_k, longest_q, longest_k, **causal)


def dense_rate(device: str, dtype: torch.dtype, length: int, repeats: int) -> dict[str, float]:
    """Pairs a second of a dense causal call, forward and backward."""
    tensors = [torch.randn(1, DENSE_HEADS, length, HEAD_DIM, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    runs = both_ways(lambda: dmattn.attention(*tensors, is_causal=True), tensors)
    times = by_turns(runs, device, repeats)
    pairs = DENSE_HEADS * length * (length + 1) // 2
    return {name: pairs / statistics.median(samples) for name, samples in times.items()}


def gate(query: Tensor, key: Tensor, value: Tensor, ends: tuple[Tensor, Tensor], scores: Tensor | None, window: int) -> None:
    """Some short documents of the pack give what the specification says of them alone."""
    selected = {} if scores is None else {"scores": scores, "window": window}
    with torch.no_grad():
        out, lse = dmattn.varlen_attention(query, key, value, *ends, is_causal=True, return_lse=True, **selected)
    spans = list(zip(*(itertools.pairwise(given.tolist()) for given in ends), strict=True))
    short = [(of_q, of_k) for of_q, of_k in spans if of_k[1] - of_k[0] <= MOST_CHECKED]
    for (a, b), (c, d) in (short[0], short[len(short) // 2], short[-1]):
        four = [given.detach().transpose(0, 1)[None] for given in (query[a:b], key[c:d], value[c:d])]
        rows = None if scores is None else scores[c:d].T[None]
        visible = None if rows is None else reference.top_k_visible(rows, window)[:, :, d - c - (b - a) :]
        case = AttentionCase(*four, visible=visible, key_bias=rows, is_causal=True)
        assert_close_to_reference(case, {"out": out[a:b].transpose(0, 1)[None], "lse": lse[None, :, a:b]})


def row_of(case: Case, longest: int, device: str, repeats: int, rates: dict[str, float]) -> Row:
    generator = torch.Generator().manual_seed(1)
    lengths_k = torch.randint(1, longest + 1, (case.documents,), generator=generator)
    lengths_q = (lengths_k * case.queries).long().clamp(1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    Tq, Tk = int(lengths_q.sum()), int(lengths_k.sum())
    sizes = ((Tq, case.heads), (Tk, case.heads), (Tk, case.heads))
    query, key, value = (torch.randn(*size, HEAD_DIM, device=device, dtype=dtype, requires_grad=True) for size in sizes)
    leaves = [query, key, value]
    # On the device as usual; on the CPU where there are more tokens than one call takes.
    place = device if max(Tq, Tk) <= 1 << 20 else "cpu"
    ends = ends_of(lengths_q).to(place), ends_of(lengths_k).to(place)
    if case.queries == 1:
        ends = ends[:1] * 2
    scores = torch.randn(Tk, case.heads, device=device) if case.window else None
    gate(query, key, value, ends, scores, case.window)

    def ours() -> Tensor:
        selected = {} if scores is None else {"scores": scores, "window": case.window}
        out: Tensor = dmattn.varlen_attention(query, key, value, *ends, is_causal=True, **selected)
        return out

    pairs = case.heads * visible_pairs(lengths_q, lengths_k, case.window)
    times = {name: statistics.median(t) for name, t in by_turns(both_ways(ours, leaves), device, repeats).items()}
    row: Row = {"case": str(case), "tokens": Tk, "pairs": pairs}
    for name, taken in times.items():
        row |= {f"{name}_ms": taken * 1e3, f"{name}_over_proportional": taken * rates[name] / pairs}
    most = int(lengths_q.max()), int(lengths_k.max())
    peer = None if case.window else torchs_call(query, key, value, *(e.to(device) for e in ends), *most)
    if peer is not None:
        try:
            samples = by_turns(both_ways(peer, leaves), device, repeats)
            row |= {f"torch_{name}_ms": statistics.median(given) * 1e3 for name, given in samples.items()}
        except (RuntimeError, ValueError) as reason:
            row["torch"] = str(reason).split("\n")[0]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--longest", type=int, help="tokens of the longest documents; 5000 on CUDA")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    is_cuda, device = options.device == "cuda", options.device
    longest = options.longest or (5000 if is_cuda else 300)
    dtype = torch.bfloat16 if is_cuda else torch.float32
    many = 400 if is_cuda else 10
    cases = [Case(many, 8), Case(many, 8, queries=0.25), Case(many, 8, window=min(512, longest // 4))]
    cases += [Case(10_000, 1)] if is_cuda else []
    rates = dense_rate(device, dtype, 16_384 if is_cuda else 1024, options.repeats)
    rows = []
    for case in cases:
        try:
            row = row_of(case, longest, device, options.repeats, rates)
        except AssertionError as reason:
            sys.exit(f"refused: {reason}")
        rows.append(row)
        print("  ".join(f"{name} {x:.3f}" if isinstance(x, float) else f"{name} {x}" for name, x in row.items()), flush=True)
    if options.output:
        facts = {**provenance(device), "dense_pairs_a_second": rates}
        options.output.write_text(to_json({**facts, "longest": longest, "rows": rows}))


if __name__ == "__main__":
    main()
