"""Times dynamic-mask attention vs. dense attention of the same shape over length, window and heads: ``python benchmarks/sweep.py``.

Both are dmattn's, causal, D = 128, bfloat16, with random scores, on CUDA. Times are of the kernels alone, from CUDA graphs, selection
included. A ratio is the dense time divided by that of the dynamic mask: above 1 the mask is faster. Prints every ratio, writes JSON with
--output, and ends with 1 when any ratio is below what is promised (a dynamic mask takes at most 5 % longer than no mask).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import dmattn
import torch
from dmattn_bench.measure import captured
from dmattn_bench.records import provenance
from dmattn_bench.rows import to_json
from torch import Tensor

HEAD_DIM = 128
LENGTHS = tuple(256 * 4**i for i in range(7))
SHARES = (1 / 64, 1 / 16, 1 / 4, 1 / 2, 3 / 4, 1.0)
HEADS = (1, 16, 512)
PROMISE = 1 / 1.05
MOST_KEYS = 1 << 22  # length x heads: more would not fit into memory
MOST_PAIRS = 1.2e12  # length^2 x heads: more would take minutes
SHORT = 2e-4  # seconds: calls that take less are put into one graph several times
PASSES = ("forward", "backward")
Row = dict[str, float]


def replayed(replay: Callable[[], object]) -> float:
    """Seconds of one replay of a graph."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    replay()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3


def seconds_of(run: Callable[[], object], budget: float) -> float:
    """The median time of a call in graphs; long calls are measured fewer times, once at least."""
    run()
    once = replayed(captured(run))
    if once > budget:
        return once
    times = 20 if once < SHORT else 1

    def run_often() -> None:
        for _ in range(times):
            run()

    replay = captured(run_often)
    repeats = int(min(7, max(1, budget / (once * times))))
    return statistics.median(replayed(replay) for _ in range(repeats)) / times


def measure(length: int, heads: int, budget: float) -> list[Row]:
    """A row for each window at one length and number of heads."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    # More heads than a model has are a batch of them.
    batch, each = max(1, heads // 16), min(heads, 16)
    query, key, value, grad_out = (draw(batch, each, length, HEAD_DIM).bfloat16() for _ in range(4))
    scores = draw(batch, each, length)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    learned = scores.requires_grad_()

    def timed(forward: Callable[[], Tensor], inputs: list[Tensor]) -> tuple[float, float]:
        with torch.no_grad():
            alone = seconds_of(forward, budget)
        out = forward()
        return alone, seconds_of(lambda: torch.autograd.grad(out, inputs, grad_out, retain_graph=True), budget)

    def dense() -> Tensor:
        return dmattn.attention(query, key, value, is_causal=True)

    dense_forward, dense_backward = timed(dense, leaves)
    rows: list[Row] = []
    for share in SHARES:
        window = max(1, int(length * share))

        def masked(window: int = window) -> Tensor:
            return dmattn.dynamic_mask_attention(query, key, value, scores, window)

        forward, backward = timed(masked, [*leaves, learned])
        rows.append(
            {
                "length": length,
                "heads": heads,
                "window": window,
                "share": share,
                "forward": forward,
                "backward": backward,
                "dense_forward": dense_forward,
                "dense_backward": dense_backward,
            }
        )
    return rows


def ratio(row: Row, name: str) -> float:
    return row[f"dense_{name}"] / row[name]


def line(rows: list[Row]) -> str:
    cells = [f"{ratio(row, 'forward'):5.2f}/{ratio(row, 'backward'):5.2f}" for row in rows]
    dense = f"{rows[0]['dense_forward'] * 1e6:9.0f}/{rows[0]['dense_backward'] * 1e6:9.0f}"
    return f"{rows[0]['length']:>8} {rows[0]['heads']:>5} {dense}   " + "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="default: 256 to 1048576")
    parser.add_argument("--heads", type=int, nargs="+", default=list(HEADS), help="batches x heads (default: 1 16 512)")
    parser.add_argument("--budget", type=float, default=0.1, help="seconds of repeats of one call (default 0.1)")
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("sweep: expected a GPU, found none")
    began, rows = time.perf_counter(), []
    print("dense time over the dynamic mask's, forward/backward, by window as a share of the length")
    print(f"{'length':>8} {'heads':>5} {'dense us':>19}   " + "  ".join(f"{share:>11.4g}" for share in SHARES))
    stream = torch.cuda.Stream()  # the default stream cannot be captured
    with torch.cuda.stream(stream):
        for length in options.lengths:
            for heads in options.heads:
                if length * heads > MOST_KEYS or length**2 * heads > MOST_PAIRS:
                    continue
                some = measure(length, heads, options.budget)
                print(line(some), flush=True)
                rows += some
                torch.cuda.empty_cache()
    if not rows:
        sys.exit("sweep: expected a length and a number of heads that fit into memory and take seconds, got none")
    ratios = [(ratio(row, name), name, row["length"], row["heads"], row["window"]) for row in rows for name in PASSES]
    worst = min(ratios, key=lambda each: each[0])
    is_kept = worst[0] >= PROMISE
    print(f"lowest ratio {worst[0]:.2f}: {worst[1]} at length {worst[2]}, {worst[3]} heads, window {worst[4]}")
    print(f"at most 5 % slower than dense: {'kept' if is_kept else 'BROKEN'}; {time.perf_counter() - began:.0f} s")
    if options.output is not None:
        result = {**provenance("cuda"), "head_dim": HEAD_DIM, "rows": rows}
        path = options.output / result["machine"]["name"] / "sweep.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_json(result))
        print(f"Written: {path}")
    sys.exit(0 if is_kept else 1)


if __name__ == "__main__":
    main()
