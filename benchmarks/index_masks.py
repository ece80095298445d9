"""Times index masks vs. dense causal attention: ``python benchmarks/index_masks.py [--device cuda] [--output index.json]``.

Random lists share almost nothing between neighbouring queries, which is the hardest case. Skewed lists are drawn from scores that favour some
keys for all queries: the keys that 16, 32, 64 or 128 neighbouring queries list together, over those of one query, are then as many as lists of a
trained model had (2.1 to 3.8, 2.4 to 4.7, 2.7 to 5.4 and 2.9 to 5.9 over six layers, at 256 of 4,096 keys). The factors of every case are
in the results. Whole eager calls, the making of unions included. The peer is cuDNN's dense causal kernel on a GPU, torch's choice on a CPU, by
turns.

With --peers three cases are timed with FlexAttention as well (compiled, its mask_mod looks the same lists up, its block tables are made outside
the timed calls), and with the selected attention of flash-linear-attention (fla-core), which takes groups of 16 and more heads.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import dmattn
import torch
import torch.nn.functional as F
from dmattn.testing import AttentionCase, assert_close_to_reference
from dmattn_bench.measure import both_ways, by_turns
from dmattn_bench.records import provenance
from dmattn_bench.rows import to_json
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

SKEW = 4.8  # how strongly skewed lists favour some keys
RECENCY = 2e-4  # and later ones, for each key
TILES = (16, 32, 64, 128)
Row = dict[str, object]


@dataclasses.dataclass(frozen=True)
class Case:
    """``keys`` keys a query, in blocks of ``block``. list_heads: how many lists a query has."""

    length: int
    keys: int
    block: int = 1
    lists: str = "skewed"
    heads: int = 32
    kv_heads: int = 8
    list_heads: int = 8
    head_dim: int = 128
    value_dim: int = 128
    deterministic: bool = False

    def __str__(self) -> str:
        shape = f"{self.length}, {self.heads} heads on {self.kv_heads}, D={self.head_dim}/{self.value_dim}"
        order = ", deterministic" if self.deterministic else ""
        return f"{shape}, {self.keys} keys in blocks of {self.block}, {self.list_heads} lists, {self.lists}{order}"


CUDA = [
    *(Case(32768, 1024, block, lists) for lists in ("skewed", "random") for block in (1, 16, 64)),
    Case(32768, 1024, deterministic=True),
    Case(32768, 1024, 64, heads=64, kv_heads=4, list_heads=4),
    Case(65536, 2048, heads=16, kv_heads=16, list_heads=1, head_dim=192),
    Case(131072, 2048, 64),
    Case(2048, 2048, lists="all"),
]
WITH_PEERS = [Case(32768, 1024), Case(32768, 1024, 64), Case(32768, 1024, 64, heads=64, kv_heads=4, list_heads=4)]
CPU = [
    Case(4096, 256, block, lists, heads, kv_heads, kv_heads, 64, 64)
    for heads, kv_heads in ((8, 2), (8, 8))
    for lists in ("skewed", "random")
    for block in (1, 16)
]


def lists_of(case: Case, device: str) -> Tensor:
    """int32 [1, list_heads, length, keys / block]: distinct blocks that begin at or before the query, sorted, -1 behind them."""
    blocks, count = case.length // case.block, case.keys // case.block
    generator = torch.Generator(device).manual_seed(1)
    popularity = torch.randn(case.list_heads, 1, blocks, device=device, generator=generator)
    first_keys = torch.arange(blocks, device=device) * case.block
    found = torch.full((1, case.list_heads, case.length, count), -1, dtype=torch.int32, device=device)
    step = max(1, (1 << 26) // (case.list_heads * blocks))
    for start in range(0, case.length, step):
        queries = torch.arange(start, min(start + step, case.length), device=device)
        drawn = torch.rand(case.list_heads, len(queries), blocks, device=device, generator=generator).clamp_(1e-9, 1 - 1e-7)
        scores = -torch.log(-torch.log(drawn))  # the largest of these are a draw without replacement
        if case.lists == "skewed":
            scores += SKEW * popularity + RECENCY * first_keys
        scores.masked_fill_(first_keys > queries[:, None], -math.inf)
        best = scores.topk(min(count, blocks), dim=2)
        chosen = torch.where(best.values == -math.inf, blocks, best.indices).sort(2).values
        found[0, :, queries] = torch.where(chosen == blocks, -1, chosen).int()
    return found


def union_factors(lists: Tensor) -> dict[str, float]:
    """For tiles of neighbouring queries: the entries that they list together, over those of one query. Of late queries, where lists are full."""
    factors = {}
    for tile in TILES:
        rows = lists[0, 0, -16 * tile :].reshape(-1, tile * lists.shape[3])
        factors[str(tile)] = round(sum(len(row[row >= 0].unique()) for row in rows) / len(rows) / lists.shape[3], 2)
    return factors


def gate(case: Case, device: str) -> None:
    """The first 256 tokens of such a call give what the specification says."""
    small = dataclasses.replace(case, length=256, keys=min(case.keys, 64))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query, key, value = inputs(small, device, dtype)
    mask = dmattn.IndexMask(lists_of(small, device), small.block, is_causal=True)
    out, lse = dmattn.attention(query, key, value, mask, return_lse=True)
    given = AttentionCase(query, key, value, visible=mask.to_bool(256, 256), is_causal=True)
    assert_close_to_reference(given, {"out": out, "lse": lse})


def inputs(case: Case, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((case.heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, case.value_dim))
    query, key, value = (torch.randn(1, heads, case.length, size, device=device, dtype=dtype) for heads, size in shapes)
    return query, key, value


def flex_peer(case: Case, lists: Tensor) -> Callable[..., Tensor]:
    """FlexAttention with the same lists: full tiles of 128 x 128 are not tested, others look pairs up in a table of bits."""
    blocks, tile, heads, rows = case.length // case.block, 128 // case.block, case.heads // case.list_heads, case.length // 128
    counts = torch.zeros(case.list_heads, rows, rows, dtype=torch.int32, device=lists.device)
    words = torch.zeros(case.list_heads, case.length, -(-blocks // 32), dtype=torch.int32, device=lists.device)
    powers = torch.ones(32, dtype=torch.int32, device=lists.device) << torch.arange(32, dtype=torch.int32, device=lists.device)
    for row in range(rows):
        of_row = lists[0, :, row * 128 : (row + 1) * 128].long()
        listed = torch.zeros(case.list_heads, 128, words.shape[2] * 32 + 1, dtype=torch.int32, device=lists.device)
        listed = listed.scatter_(2, torch.where(of_row < 0, listed.shape[2] - 1, of_row), 1)[..., :-1]
        counts[:, row] = listed[..., :blocks].unflatten(2, (-1, tile)).sum((1, 3), dtype=torch.int32)
        words[:, row * 128 : (row + 1) * 128] = (listed.unflatten(2, (-1, 32)) * powers).sum(3, dtype=torch.int32)
    is_full = (counts == 128 * tile) & ~torch.eye(rows, dtype=torch.bool, device=lists.device)
    tables = [kind.repeat_interleave(heads, 0)[None].int() for kind in ((counts > 0) & ~is_full, is_full)]
    given = [part for kind in tables for part in (kind.sum(3), torch.argsort(kind, dim=3, descending=True, stable=True))]

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = key // case.block
        return (words[head // heads, query, block // 32] >> (block % 32) & 1 != 0) & (query >= key)

    block_mask = BlockMask.from_kv_blocks(
        *(part.int() for part in given), BLOCK_SIZE=128, mask_mod=mask_mod, seq_lengths=(case.length, case.length)
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda query, key, value: compiled(query, key, value, block_mask=block_mask, enable_gqa=case.heads != case.kv_heads)


def fla_peer(case: Case, lists: Tensor) -> Callable[..., Tensor] | None:
    """flash-linear-attention's selected attention, whose layout of tensors is [B, S, H, D]; None where it does not take the case."""
    if case.block < 16 or case.heads // case.kv_heads < 16 or case.list_heads != case.kv_heads:
        return None
    attend = importlib.import_module("fla.ops.nsa.parallel").ParallelNSAFunction.apply
    count = (lists >= 0).sum(3).transpose(1, 2).contiguous()
    chosen = lists.transpose(1, 2).contiguous().long()
    scale = case.head_dim**-0.5

    def selected(*tensors: Tensor) -> Tensor:
        query, key, value = (given.transpose(1, 2) for given in tensors)
        return attend(query, key, value, chosen, count, case.block, scale, None).transpose(1, 2)

    return selected


def peers_of(
    case: Case, lists: Tensor, ours: Callable[..., Tensor], leaves: tuple[Tensor, ...]
) -> dict[str, Callable[[], object]]:
    """The forward and backward calls of the peers that run the case and agree with ours to 5 % of the norm; others are named with the reason."""
    found: dict[str, Callable[[], object]] = {}
    expected = ours(*leaves).detach().float()
    by_tokens = tuple(leaf.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for leaf in leaves)
    for name, make, given in (("flex", flex_peer, leaves), ("fla", fla_peer, by_tokens)):
        try:
            peer = make(case, lists)
            if peer is None:
                continue
            with torch.no_grad():
                error = (peer(*given).float() - expected).norm() / expected.norm()
            if not error < 0.05:
                print(f"{case}: {name} gives other values, by {error:.3f} of the norm")
                continue
            runs = both_ways(functools.partial(peer, *given), given, f"{name}_")
            runs[f"{name}_backward"]()
        except (ImportError, RuntimeError) as problem:
            print(f"{case}: {name} does not run: {str(problem).splitlines()[0][:160]}")
            continue
        found |= runs
    return found


def row_of(case: Case, device: str, repeats: int, with_peers: bool = False) -> Row:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    leaves = tuple(given.requires_grad_() for given in inputs(case, device, dtype))
    lists = lists_of(case, device)
    mask = dmattn.IndexMask(lists, case.block, is_causal=True)
    # Heads of 192 are more than cuDNN's backward takes here.
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    if device == "cpu":
        backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

    def ours(*tensors: Tensor) -> Tensor:
        return dmattn.attention(*tensors, mask, deterministic=case.deterministic)

    def dense(*tensors: Tensor) -> Tensor:
        with sdpa_kernel(backends, set_priority=True):
            return F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=case.heads != case.kv_heads)

    runs = both_ways(lambda: ours(*leaves), leaves) | both_ways(lambda: dense(*leaves), leaves, "dense_")
    if with_peers:
        runs |= peers_of(case, lists, ours, leaves)
    times = {name: statistics.median(samples) for name, samples in by_turns(runs, device, repeats).items()}
    speedups = {f"{way}_speedup": round(times[f"dense_{way}"] / times[way], 3) for way in ("forward", "backward")}
    return {
        "case": str(case), **dataclasses.asdict(case), "union_factors": union_factors(lists),
        **{f"{name}_ms": round(seconds * 1e3, 4) for name, seconds in times.items()}, **speedups,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="the first case alone, short")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--peers", action="store_true", help="time FlexAttention and fla-core as well, where they run")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    cases = CUDA if arguments.device == "cuda" else CPU
    if arguments.quick:
        cases = [dataclasses.replace(cases[0], length=1024, keys=64)]
    rows = []
    for case in cases:
        gate(case, arguments.device)
        rows.append(
            row_of(case, arguments.device, 1 if arguments.quick else arguments.repeats, arguments.peers and case in WITH_PEERS)
        )
        speeds = ", ".join(f"{way} {rows[-1][f'{way}_ms']} ms ({rows[-1][f'{way}_speedup']}x)" for way in ("forward", "backward"))
        print(f"{case}: {speeds}", flush=True)
    if arguments.output:
        arguments.output.write_text(to_json({**provenance(arguments.device), "rows": rows}))


if __name__ == "__main__":
    sys.exit(main())
