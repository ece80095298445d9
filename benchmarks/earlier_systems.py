"""Measures every headline of five earlier systems in their own configurations: ``python benchmarks/earlier_systems.py --output FILE.json``.

Flash-DMA's lengths and shares of keys, flash-dmattn's table and its 1 / p, Block-Sparse-Attention's image tokens and causal tables,
FlashKernel's sweeps, triton-flashattn's lengths: each with torch's attention or reductions in the same process. Whole calls (medians, cold
L2) and the same calls as CUDA graphs. A sparse case is compared with the reference on a short length first, and a peer that computes the
same with our output. FILE.json has a row a line, FILE.csv all times. --tiny shrinks every case, for a CPU. About two minutes on an H200.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dmattn
import torch
import torch.nn.functional as F
from dmattn import BlockMask, IntervalMask, reference
from dmattn_bench.cases import Case, Workload, workload
from dmattn_bench.measure import WrongResultError, gate, times
from dmattn_bench.peers import SDPA, Call, Problem, missing, peer_call
from dmattn_bench.records import provenance, write
from dmattn_bench.rows import to_json
from torch import Tensor

FLASH_DMA = ((1024, 0.2), (4096, 0.1), (16384, 0.05), (65536, 0.025))
FLASH_DMATTN_LENGTHS = (4096, 8192, 16384, 32768)
TILE_SHARES = (1.0, 0.5, 0.25, 0.1, 0.05)
CAUSAL_TABLES = ((8192, 0.0923), (16384, 0.0946), (65536, 0.0983))  # length, share of visible blocks
ATTENTION_LENGTHS = (128, 256, 512, 1024, 2048, 4096)
ELEMENTS = (10**3, 10**4, 10**5, 10**6, 10**7, 10**8)
MATRICES = ((128, 4096), (512, 4096), (1024, 2048), (4096, 1024), (8192, 512))
TRITON_LENGTHS = (128, 1024, 2432)
SHORT = 300  # tokens of the check, not a multiple of any tile
TINY = 256
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Headline:
    """One case of one earlier system.

    Args:
        system: its name.
        case: the shape; its kind is "dense" where ``build`` makes something else of it.
        name: what the table calls it.
        build: makes inputs and contestants from a case.
        facts: what rates need, and the numbers that the table is sorted by.
        is_sparse: compared with the reference on SHORT tokens.
    """

    system: str
    case: Case
    name: str
    build: Callable[[Case, str], Workload]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_sparse: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="file for the JSON; the CSV has its name, too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=20, help="turns of each case, at most")
    parser.add_argument("--seconds", type=float, default=0.5, help="of timed turns of each case, about")
    parser.add_argument("--tiny", action="store_true", help="short lengths in float32")
    parser.add_argument("--systems", nargs="*", help="only those, by name")
    options = parser.parse_args()
    rows, began = [], time.perf_counter()
    for headline in headlines():
        if options.systems and headline.system not in options.systems:
            continue
        row: Row = {"workload": headline.system, "case": headline.name}
        try:
            row |= measured(shrunk(headline) if options.tiny else headline, options)
            said = ", ".join(f"{name} {seconds * 1e6:.0f} us" for name, seconds in row["medians"].items())
        except WrongResultError as error:
            row["refused"] = said = str(error)
        except (RuntimeError, ValueError) as error:
            row["cannot_run"] = said = str(error).split("\n")[0]
        rows.append(row)
        print(f"{time.perf_counter() - began:5.0f} s  {headline.system}: {headline.name}: {said}", flush=True)
        if options.device != "cpu":
            torch.cuda.empty_cache()
    result = {**provenance(options.device), "repeats": options.repeats, "tiny": options.tiny, "rows": rows}
    write(result, options.output)  # and the CSV
    options.output.write_text(to_json(result))
    if any("medians" not in row for row in rows):
        sys.exit("some cases have no times")


def headlines() -> Iterator[Headline]:
    yield from flash_dma()
    yield from flash_dmattn()
    yield from block_sparse_attention()
    yield from flash_kernel()
    yield from triton_flashattn()


def flash_dma() -> Iterator[Headline]:
    """The table of projected speedups over FlashAttention in its integration document."""
    for causal in (True, False):
        for length, share in FLASH_DMA:
            case = shape(length, kind="dma", window=int(length * share), is_causal=causal, peers=("flash", "cudnn"))
            name = f"{length:,} @ {share:g}, {'causal' if causal else 'not causal'}"
            yield Headline("Flash-DMA", case, name, workload, {"length": length, "share": share}, is_sparse=True)


def flash_dmattn() -> Iterator[Headline]:
    """The 1 / p of its report, p the share of visible tiles; and the table of its README, whose peer is SDPA with a dense mask."""
    for share in TILE_SHARES:
        case = shape(16384, kind="blocks", density=share, is_causal=False, peers=("dmattn", "cudnn"))
        yield Headline("flash-dmattn", case, f"1 / p, p = {share:g}", workload, {"share": share}, is_sparse=True)
    for length in FLASH_DMATTN_LENGTHS:
        case = shape(length, kind="dma", window=1024, heads=2, kv_heads=1, head_dim=64, peers=("cudnn",))
        yield Headline("flash-dmattn", case, f"{length:,}, window 1,024", with_dense_mask, {"length": length}, is_sparse=True)
    decode = shape(524288, window=1024, heads=2, kv_heads=1, head_dim=64)
    yield Headline("flash-dmattn", decode, "one query on 524,288 keys, window 1,024", one_query)


def block_sparse_attention() -> Iterator[Headline]:
    """Image tokens with half of the blocks (the fork for vision models); causal tables and streaming heads (mit-han-lab)."""
    peers = ("flash", "cudnn")
    vit = shape(197, batch=4, heads=12, kv_heads=12, head_dim=64, dtype="float16", is_causal=False, density=0.5, peers=peers)
    yield Headline("Block-Sparse-Attention", vit, "197 tokens, half of the blocks", diagonal_blocks, is_sparse=True)
    for length, share in CAUSAL_TABLES:
        case = shape(length, heads=32, kv_heads=32, density=share, peers=peers)
        name = f"{length:,}, causal, {1 - share:.1%} of blocks hidden"
        yield Headline("Block-Sparse-Attention", case, name, causal_blocks, {"length": length}, is_sparse=True)
    case = shape(65536, heads=32, kv_heads=32, peers=peers)
    yield Headline("Block-Sparse-Attention", case, "65,536, half of the heads see 64 + 256 keys", streaming_heads, is_sparse=True)


def flash_kernel() -> Iterator[Headline]:
    """Sweeps of its two benchmarks: forward in float16 at every length with B = 1, 4, 8; sums and maxima of float32."""
    for size in (64, 128):
        for causal in (False, True) if size == 64 else (False,):
            for batch in (1, 4, 8):
                for length in ATTENTION_LENGTHS:
                    case = shape(length, batch=batch, heads=8, kv_heads=8, head_dim=size, dtype="float16", is_causal=causal,
                                 peers=("cudnn", "flash"))  # fmt: skip
                    name = f"attention, B = {batch}, N = {length:,}, D = {size}{', causal' * causal}"
                    yield Headline("FlashKernel", case, name, forward_alone, {"length": length, "size": size, "causal": causal})
    for op in ("sum", "max"):
        for elements in ELEMENTS:
            case = shape(elements, dtype="float32")
            yield Headline("FlashKernel", case, f"reduce_{op}, {elements:,} elements", reduction(op), {"bytes": 4 * elements})
    for rows, columns in MATRICES:
        name = f"reduce_sum of the rows of {rows:,} x {columns:,}"
        yield Headline("FlashKernel", shape(rows * columns), name, reduction("sum", rows), {"bytes": 4 * rows * columns})


def triton_flashattn() -> Iterator[Headline]:
    """The lengths of its notebook, causal, float16: forward of 100 x 8 heads, backward of 5 x 8; the peer is SDPA."""
    for batch, build in ((100, forward_alone), (5, workload)):
        for length in TRITON_LENGTHS:
            case = shape(length, batch=batch, heads=8, kv_heads=8, dtype="float16", peers=("torch", "cudnn"))
            name = f"{'forward' if batch == 100 else 'backward'}, {batch} x 8 heads, N = {length:,}"
            yield Headline("triton-flashattn", case, name, build, {"length": length})


def shape(length: int, **options: Any) -> Case:
    return dataclasses.replace(Case(length, heads=16, kv_heads=16, head_dim=128, dtype="bfloat16"), **options)


def shrunk(headline: Headline) -> Headline:
    """A few tokens in float32; the peer is torch's own choice of kernel."""
    case = headline.case.resized(min(headline.case.length, TINY))
    kv_heads = min(2, case.kv_heads)
    heads = kv_heads * case.heads // case.kv_heads
    peers = tuple(dict.fromkeys("dmattn" if name == "dmattn" else "torch" for name in case.peers))
    return dataclasses.replace(
        headline,
        case=dataclasses.replace(case, batch=min(2, case.batch), heads=heads, kv_heads=kv_heads, dtype="float32", peers=peers),
    )


# Contestants -------------------------------------------------------------------------------------------------------------------------


def drawn(case: Case, device: str, *, with_gradients: bool) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((heads, case.length, case.head_dim) for heads in (case.heads, case.kv_heads, case.kv_heads))
    q, k, v = (
        torch.randn(case.batch, *size, generator=generator, device=device).to(getattr(torch, case.dtype)) for size in sizes
    )
    return tuple(x.requires_grad_(with_gradients) for x in (q, k, v))  # type: ignore[return-value]


def contest(
    case: Case, inputs: tuple[Tensor, Tensor, Tensor], run: Callable[[], Tensor], visible: Callable[[], Tensor | None],
    *, with_gradients: bool = True, pairs: int = 0,
) -> Workload:  # fmt: skip
    """Our call with the dense peers of the case."""
    problem = Problem(*inputs, case.is_causal)
    names = [name for name in case.peers if missing(name, inputs[0].device.type) is None]
    peers = tuple(peer_call(name, problem) for name in names)
    if not with_gradients:
        peers = tuple(dataclasses.replace(call, inputs=(), masked=True) for call in peers)
    grad_out = torch.randn_like(inputs[0]) if with_gradients else inputs[0]
    ours = Call("dmattn", run, inputs if with_gradients else ())
    dense = dmattn.visible_pairs(None, case.length, case.length, is_causal=case.is_causal, batch=case.batch, heads=case.heads)
    return Workload(ours, peers, None, grad_out, None, pairs, dense, visible)


def forward_alone(case: Case, device: str) -> Workload:
    inputs = drawn(case, device, with_gradients=False)
    return contest(case, inputs, lambda: dmattn.attention(*inputs, is_causal=case.is_causal), lambda: None, with_gradients=False)


def diagonal_blocks(case: Case, device: str) -> Workload:
    count = -(-case.length // case.block)
    return of_table(case, device, torch.eye(count, dtype=torch.bool, device=device).expand(1, case.heads, -1, -1))


def causal_blocks(case: Case, device: str) -> Workload:
    """Random blocks below the diagonal, and all of the diagonal, so that a share ``density`` of the causal blocks is visible."""
    count = -(-case.length // case.block)
    below = max(1, count * (count - 1) // 2)
    chance = max(0.0, case.density * (below + count) - count) / below
    generator = torch.Generator(device).manual_seed(1)
    table = torch.rand(1, case.heads, count, count, generator=generator, device=device) < chance
    return of_table(case, device, (table | torch.eye(count, dtype=torch.bool, device=device)).tril())


def of_table(case: Case, device: str, table: Tensor) -> Workload:
    inputs = drawn(case, device, with_gradients=True)
    mask = BlockMask.from_blocks(table, case.block).cut(case.length, case.length)

    def visible() -> Tensor:
        return mask.to_bool()[..., : case.length, : case.length]

    return contest(case, inputs, lambda: dmattn.attention(*inputs, mask, is_causal=case.is_causal), visible)


def streaming_heads(case: Case, device: str) -> Workload:
    """The first half of the heads is dense, the others see the first 64 keys and the last 256."""
    inputs = drawn(case, device, with_gradients=True)
    dense, streaming = (
        IntervalMask.causal(case.length, device=device),
        IntervalMask.streaming(case.length, 64, 256, device=device),
    )
    is_dense = torch.arange(case.heads, device=device)[:, None] < case.heads // 2
    mask = IntervalMask(*(torch.where(is_dense, x, y)[None] for x, y in zip(dense_of(dense), dense_of(streaming), strict=True)))
    return contest(case, inputs, lambda: dmattn.attention(*inputs, mask), lambda: mask.to_bool(case.length, case.length))


def dense_of(mask: IntervalMask) -> tuple[Tensor, Tensor]:
    """start and end as [Sk]."""
    return mask.start.reshape(-1), mask.end.reshape(-1)


def with_dense_mask(case: Case, device: str) -> Workload:
    """Our selection and attention; the peer is SDPA with one additive mask of every pair, which is made once and not timed."""
    load = workload(case, device)
    query, key, value, scores = load.ours.inputs
    mask = IntervalMask.top_k(scores.detach(), case.window or 1)
    least = torch.finfo(query.dtype).min
    # [1, 1, S, S]: one key head.
    added = torch.where(mask.to_bool(case.length, case.length), scores.detach()[:, :, None], least).to(query.dtype)

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=added, enable_gqa=True)

    rounding = torch.finfo(query.dtype).eps * scores.detach().abs().max().item()
    theirs = Call(f"{SDPA} with a dense mask", attend, (query, key, value), masked=True, rounding=rounding)
    return dataclasses.replace(load, peers=(theirs, *load.peers))


def one_query(case: Case, device: str) -> Workload:
    """The newest token on all keys, forward alone: selection and attention; the peer is SDPA with a mask [1, 1, 1, S]."""
    query, key, value = drawn(case, device, with_gradients=False)
    query, window = query[:, :, -1:], case.window or 1
    scores = torch.randn(1, case.kv_heads, case.length, generator=torch.Generator(device).manual_seed(1), device=device)
    scores = scores.to(query.dtype).float()
    mask = IntervalMask.top_k(scores, window).to_bool(1, case.length)
    added = torch.where(mask, scores[:, :, None], torch.finfo(query.dtype).min).to(query.dtype)

    def ours() -> Tensor:
        out = dmattn.dynamic_mask_attention(query, key, value, scores, window)
        assert isinstance(out, Tensor)
        return out

    def theirs() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=added, enable_gqa=True)

    peer = Call(f"{SDPA} with a dense mask", theirs, (), masked=True, rounding=torch.finfo(query.dtype).eps * 6)
    return Workload(Call("dmattn", ours, ()), (peer,), None, query, None, 0, 0, lambda: None)


def reduction(op: str, rows: int = 0) -> Callable[[Case, str], Workload]:
    """Of all elements, or of each of so many rows."""

    def build(case: Case, device: str) -> Workload:
        given = torch.randn(case.length, generator=torch.Generator(device).manual_seed(0), device=device)
        count = rows if rows and case.length % rows == 0 else 1
        given, dim = (given.view(count, -1), 1) if rows else (given, None)
        ours, theirs = getattr(torch.ops.dmattn, f"reduce_{op}"), torch.sum if op == "sum" else torch.amax
        dims = tuple(range(given.dim()))[-1:]  # torch.amax takes no None
        exact, size = theirs(given.double(), dims), torch.sum(given.double().abs(), dims)
        error = (ours(given, dim).double() - exact).abs()
        if not bool((error <= 1e-6 * size).all()):
            raise WrongResultError(f"reduce_{op} of {case.length} elements differs from float64 by {error.max().item():.1e}")
        peer = Call("torch." + ("sum" if op == "sum" else "amax"), lambda: theirs(given, dims), ())
        return Workload(Call("dmattn", lambda: ours(given, dim), ()), (peer,), None, given, None, 0, 0, lambda: None)

    return build


# Measuring ---------------------------------------------------------------------------------------------------------------------------


def measured(headline: Headline, options: argparse.Namespace) -> Row:
    case, device = headline.case, options.device
    if headline.build is workload:
        gate(case, device)
    elif headline.is_sparse:
        check(headline, device)
    load = headline.build(case, device)
    taken = times(case, load, device, options.repeats, most_seconds=options.seconds)
    calls, kernels = (
        {name: [float(f"{one:.4g}") for one in samples] for name, samples in of.items()} for of in (taken.calls, taken.kernels)
    )
    return {
        **{name: getattr(case, name) for name in ("batch", "heads", "kv_heads", "head_dim", "dtype")},
        **headline.facts,
        "peer_names": [call.name for call in load.peers],
        "medians": {name: statistics.median(samples) for name, samples in calls.items()},
        "kernel_medians": {name: statistics.median(samples) for name, samples in kernels.items()},
        "samples": calls,
        "kernel_samples": kernels,
    }


def check(headline: Headline, device: str) -> None:
    """Compares a short case of the same kind with the reference in float64, by the rule of ``dmattn_bench.measure.gate``."""
    load = headline.build(headline.case.resized(min(SHORT, headline.case.length)), device)
    query, key, value = load.ours.inputs[:3]

    def expected(dtype: torch.dtype) -> Tensor:
        bias = None if load.key_bias is None else load.key_bias.to(dtype)
        tensors = (x.detach().to(dtype) for x in (query, key, value))
        return reference.attention(*tensors, load.visible(), key_bias=bias, is_causal=headline.case.is_causal)[0].double()

    exact, rounded = expected(torch.float64), expected(query.dtype)
    allowed = 2 * (rounded - exact).abs().max().item() + 4 * torch.finfo(query.dtype).eps * exact.abs().max().item()
    error = (load.ours.run().double() - exact).abs().max().item()
    if not error <= allowed:
        raise WrongResultError(f"{headline.name}: differs from the reference by {error:.1e}, allowed {allowed:.1e}")


if __name__ == "__main__":
    main()
