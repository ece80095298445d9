"""Tables of benchmarks/earlier_systems.py: what five earlier systems projected or showed, what was measured here, and FlashKernel's sweeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dmattn_bench.tables import markdown, plain_ratio

Row = dict[str, Any]
Found = dict[tuple[str, str], Row]
# Each system's own statement: a factor, or the two ends of a range, of forward (and backward) over its baseline.
FLASH_DMA = {"1,024 @ 0.2": (3.3, 4.0), "4,096 @ 0.1": (5.0, 6.7), "16,384 @ 0.05": (6.7, 10.0), "65,536 @ 0.025": (8.0, 13.3)}
README = {"4,096": (10.4, 3.5), "8,192": (25.9, 7.0), "16,384": (35.3, 8.0), "32,768": (50.5, 5.6)}  # forward, backward
ONE_QUERY = 10.3
TABLES = {"8,192": 4.0, "16,384": 5.6, "65,536": 7.7}  # 1 / 0.25, 1 / 0.18 and 1 / 0.13 of the runtime, batch 1
HALF_OF_THE_BLOCKS, HALF_OF_THE_HEADS = 2.0, 1.8
TRITON = {"forward": {"128": 1.17, "1,024": 0.94, "2,432": 1.01}, "backward": {"128": 1.20, "1,024": 0.75, "2,432": 0.64}}
# FlashKernel's shares of a T4: 262 of 300 GB/s, 38.2 of 65 TFLOP/s; NVIDIA's numbers of an H200.
MEMORY_SHARE, COMPUTE_SHARE = 0.87, 0.59
GIGABYTES, TERAFLOPS = 4800.0, 989.0
CAUSAL_GAIN = 2.0
ROUNDED = 0.995  # what rounds to the projection is as much
NAMES = {
    "F.scaled_dot_product_attention": "SDPA",
    "F.scaled_dot_product_attention by FLASH_ATTENTION": "FlashAttention-2",
    "F.scaled_dot_product_attention by CUDNN_ATTENTION": "cuDNN",
    "F.scaled_dot_product_attention with a dense mask": "SDPA with a dense mask",
    "dmattn.attention, dense": "dmattn, dense",
}


def projected(result: Row) -> str:
    """Every headline once; a miss gives the share of the projection that was reached."""
    found = {(row["workload"], row["case"]): row for row in result["rows"]}
    titles = [
        "system, case",
        "baseline",
        "projected",
        "whole call",
        "kernels",
        "reached",
        "second baseline",
        "whole call",
        "kernels",
    ]
    return markdown(titles, [line for make in (dma, dmattn, blocks, flashkernel, triton) for line in make(found)], texts=2)


def dma(found: Found) -> Iterator[list[str]]:
    for causal in ("causal", "not causal"):
        for case, (least, most) in FLASH_DMA.items():
            for part in ("forward", "backward"):
                yield line("Flash-DMA", f"{case}, {causal}", found, part, least, most)


def dmattn(found: Found) -> Iterator[list[str]]:
    for share in (1.0, 0.5, 0.25, 0.1, 0.05):
        for part in ("forward", "backward"):
            yield line("flash-dmattn", f"1 / p, p = {share:g}", found, part, 1 / share)
    for length, both in README.items():
        for part, factor in zip(("forward", "backward"), both, strict=True):
            yield line("flash-dmattn", f"{length}, window 1,024", found, part, factor)
    yield line("flash-dmattn", "one query on 524,288 keys, window 1,024", found, "forward", ONE_QUERY)


def blocks(found: Found) -> Iterator[list[str]]:
    system = "Block-Sparse-Attention"
    yield line(system, "197 tokens, half of the blocks", found, "forward", HALF_OF_THE_BLOCKS)
    for length, factor in TABLES.items():
        case = next(case for of, case in found if of == system and case.startswith(f"{length}, causal"))
        yield line(system, case, found, "forward", factor)
    yield line(system, "65,536, half of the heads see 64 + 256 keys", found, "forward", HALF_OF_THE_HEADS)


def flashkernel(found: Found) -> Iterator[list[str]]:
    """Shares of what the hardware can do, and the gain of causality."""
    system = "FlashKernel"

    def of_hardware(case: str, work: float, most: float, least: float, what: str) -> list[str]:
        row = found[system, case]
        shares = [work / row[times]["forward"] / most for times in ("medians", "kernel_medians")]
        cells = [f"{system}: {case}", what, f"{least:.0%}", *(f"{share:.0%}" for share in shares), reached(shares, least)]
        return [*cells, "-", "-", "-"]

    elements, length, size = 10**8, 4096, 128
    yield of_hardware(f"reduce_sum, {elements:,} elements", 4e-9 * elements, GIGABYTES, MEMORY_SHARE, "memory's 4.8 TB/s")
    work = 4e-12 * 8 * 8 * length**2 * size
    yield of_hardware(f"attention, B = 8, N = {length:,}, D = {size}", work, TERAFLOPS, COMPUTE_SHARE, "989 TFLOP/s")
    for number in ("512", "1,024", "2,048"):
        case = f"attention, B = 1, N = {number}, D = 64"
        full, causal = found[system, case], found[system, f"{case}, causal"]
        gains = [None, full["kernel_medians"]["forward"] / causal["kernel_medians"]["forward"]]  # the host's part is the same
        cells = [plain_ratio(CAUSAL_GAIN), *shown(gains), reached(gains, CAUSAL_GAIN)]
        yield [f"{system}: {case}, causal", "not causal", *cells, "-", "-", "-"]


def triton(found: Found) -> Iterator[list[str]]:
    for part, factors in TRITON.items():
        for length, factor in factors.items():
            case = next(
                case
                for of, case in found
                if of == "triton-flashattn" and case.startswith(part) and case.endswith(f"N = {length}")
            )
            yield line("triton-flashattn", case, found, part, factor)


def line(system: str, case: str, found: Found, part: str, least: float, most: float | None = None) -> list[str]:
    """One headline; the first peer is the baseline of the projection."""
    row = found[system, case]
    words = f"{system}: {case}" + (f", {part}" if f"peer_{part}" in row.get("medians", {}) and part not in case else "")
    projection = plain_ratio(least) + (f" to {plain_ratio(most)}" if most else "")
    if "medians" not in row:
        return [
            words,
            "-",
            projection,
            "-",
            "-",
            str(row.get("refused") or row.get("cannot_run") or "not measured"),
            "-",
            "-",
            "-",
        ]
    peers = [NAMES.get(name, name) for name in row["peer_names"]]
    gains = over(row, part, "peer_")
    second = ["-", "-", "-"]
    if len(peers) > 1:
        second = [str(peers[1]), *shown(over(row, part, "peer2_"))]
    return [words, str(peers[0]), projection, *shown(gains), reached(gains, least), *second]


def over(row: Row, part: str, prefix: str) -> list[float | None]:
    """The peer's time divided by ours: of whole calls, and of kernels where both could be captured."""
    gains: list[float | None] = []
    for times in (row["medians"], row["kernel_medians"]):
        gains.append(times[prefix + part] / times[part] if part in times and prefix + part in times else None)
    return gains


def shown(gains: Sequence[float | None]) -> list[str]:
    return ["-" if gain is None else plain_ratio(gain) for gain in gains]


def reached(gains: Sequence[float | None], least: float) -> str:
    """Whether the whole call reaches it, or its kernels alone; else the larger speedup as a share of the projection."""
    call, kernels = (0.0 if gain is None else gain for gain in gains)
    if call >= ROUNDED * least:
        return "yes"
    if kernels >= ROUNDED * least:
        return "kernels alone"
    best = max(call, kernels)
    return f"**no**, {best / least:.0%}"


# FlashKernel's sweeps -----------------------------------------------------------------------------------------------------------------


def sweep_of_attention(result: Row) -> str:
    """Forward over the faster of cuDNN and FlashAttention-2: whole call, kernels."""
    found = {row["case"]: row for row in result["rows"] if row["workload"] == "FlashKernel"}
    columns = [(size, causal, batch) for size, causal in ((64, ""), (64, ", causal"), (128, "")) for batch in (1, 4, 8)]
    lines = []
    for length in (128, 256, 512, 1024, 2048, 4096):
        cells = []
        for size, causal, batch in columns:
            row = found[f"attention, B = {batch}, N = {length:,}, D = {size}{causal}"]
            cells.append(
                ", ".join(f"{best_peer(row[times]) / row[times]['forward']:.2f}" for times in ("medians", "kernel_medians"))
            )
        lines.append([f"{length:,}", *cells])
    return markdown(["N", *(f"D = {size}{causal}, B = {batch}" for size, causal, batch in columns)], lines, texts=0)


def best_peer(times: dict[str, float]) -> float:
    return min(seconds for name, seconds in times.items() if name.startswith("peer"))


def sweep_of_reductions(result: Row) -> str:
    """GB/s that a call reads."""
    titles = ["float32", "whole call, us", "torch's", "kernels, us", "torch's", "kernels, GB/s", "torch's"]
    lines = []
    for row in result["rows"]:
        if row["case"].startswith("reduce_"):
            pairs = [[row[times][name] for name in ("forward", "peer_forward")] for times in ("medians", "kernel_medians")]
            cells = [f"{1e6 * seconds:,.1f}" for pair in pairs for seconds in pair]
            lines.append([row["case"], *cells, *(f"{row['bytes'] / seconds / 1e9:,.0f}" for seconds in pairs[1])])
    return markdown(titles, lines, texts=1)
