"""Times generation with a bounded cache, its update included: ``python benchmarks/serve.py [--device cuda]``. Writes JSON with --output.

A step takes one token of each sequence in and attends. On CUDA steps are timed in a graph that holds several of them, each with a cache of its
own, so that together they are larger than the L2 cache, as in a model whose layers follow each other. Beside them stand torch's kernels over
as many keys without any update, and over all keys of the context. Prefill is a whole prompt in chunks, beside one call without a cache.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import dmattn
import torch
import torch.nn.functional as F
from dmattn.testing.tolerance import assert_same_by_another_way
from measure import graphed
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM, WINDOW = 32, 8, 128, 2048
COLD_BYTES, MOST_STEPS = 400 << 20, 48
LONG, CHUNK, FILL = 131_072, 4096, 16_384
Row = dict[str, object]


def tokens(batch: int, count: int, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value and scores of so many tokens."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def draw(heads: int) -> Tensor:
        return torch.randn(batch, heads, count, HEAD_DIM, generator=generator, device=device, dtype=dtype)

    scores = torch.randn(batch, KV_HEADS, count, generator=generator, device=device)
    return draw(HEADS), draw(KV_HEADS), draw(KV_HEADS), scores


def filled(batch: int, context: int, device: str) -> dmattn.BoundedCache:
    """A cache that has taken so many tokens in."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    cache = dmattn.BoundedCache(batch, KV_HEADS, WINDOW, HEAD_DIM, dtype=dtype, device=device)
    fill = FILL // batch if device == "cuda" else CHUNK
    for first in range(0, context, fill):
        query, key, value, scores = tokens(batch, min(fill, context - first), device, first)
        # What queries see does not matter here: one head group's worth of them is the cheapest.
        cache.attend(query[:, :KV_HEADS], key, value, scores)
    return cache


def clocked(runs: list[Callable[[], object]], repeats: int) -> float:
    """Microseconds of one run on a CPU: the median."""
    samples = []
    for turn in range(repeats + 3):
        begin = time.perf_counter()
        runs[turn % len(runs)]()
        if turn >= 3:
            samples.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(samples)


def step_row(batch: int, context: int, device: str, repeats: int) -> Row:
    """A step after so many tokens."""
    timed = graphed if device == "cuda" else clocked
    cache = filled(batch, context, device)
    copies = max(1, min(MOST_STEPS, -(-COLD_BYTES // cache.nbytes))) if device == "cuda" else 1
    caches = [cache]
    for _ in range(copies - 1):
        caches.append(dmattn.BoundedCache(batch, KV_HEADS, WINDOW, HEAD_DIM, dtype=cache.key.dtype, device=device))
        caches[-1].load_state_dict(cache.state_dict())
    query, key, value, scores = tokens(batch, 1, device, 1)

    def step_of(each: dmattn.BoundedCache) -> Callable[[], object]:
        return lambda: each.attend(query, key, value, scores)

    def peer_of(each: dmattn.BoundedCache) -> Callable[[], object]:
        return lambda: F.scaled_dot_product_attention(query, each.key, each.value, enable_gqa=True)

    us = timed([step_of(each) for each in caches], repeats)
    peer = timed([peer_of(each) for each in caches], repeats)
    return {
        "case": f"step, {batch} sequences after {context} tokens",
        "us": us,
        "sdpa_over_window_us": peer,
        "bytes": cache.nbytes,
    }


def full_row(batch: int, device: str, repeats: int) -> Row:
    """torch's kernel over all keys of a long context: what a growing cache costs."""
    query, one, *_ = tokens(batch, 1, device, 1)
    key, value = (torch.randn(batch, KV_HEADS, LONG, HEAD_DIM, device=device, dtype=one.dtype) for _ in range(2))
    timed = graphed if device == "cuda" else clocked
    us = timed([lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True)], repeats)
    return {"case": f"SDPA, {batch} sequences over {LONG} keys", "us": us}


def prefill_row(device: str, length: int, chunk: int, repeats: int) -> Row:
    """A prompt in chunks beside one call; refuses where they differ."""
    query, key, value, scores = tokens(1, length, device, 3)
    cache = dmattn.BoundedCache(1, KV_HEADS, WINDOW, HEAD_DIM, dtype=query.dtype, device=device)

    def in_chunks() -> Tensor:
        cache.reset()
        parts = range(0, length, CHUNK)
        return torch.cat(
            [cache.attend(*(x[:, :, first : first + CHUNK] for x in (query, key, value, scores))) for first in parts], 2
        )

    def at_once() -> Tensor:
        whole: Tensor = dmattn.dynamic_mask_attention(query, key, value, scores, WINDOW)
        return whole

    assert_same_by_another_way(in_chunks(), at_once(), query.dtype)
    timed = graphed if device == "cuda" else clocked
    chunked, once = (timed([run], repeats) for run in (in_chunks, at_once))
    return {"case": f"prefill, {length} tokens in chunks of {chunk}", "us": chunked, "one_call_us": once, "ratio": chunked / once}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="short contexts only, to see that it runs")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    device, repeats, rows = options.device, options.repeats, []
    contexts = [4096] if options.quick else [4096, LONG] if device == "cpu" else [4096, LONG, 1 << 20]
    batches = [1] if device == "cpu" or options.quick else [1, 16, 64]
    with torch.inference_mode():
        jobs: list[Callable[[], Row]] = [lambda context=context: step_row(1, context, device, repeats) for context in contexts]
        jobs += [lambda batch=batch: step_row(batch, 4096, device, repeats) for batch in batches[1:]]
        jobs += [lambda batch=batch: full_row(batch, device, min(repeats, 5)) for batch in batches[:2] if not options.quick]
        length, chunk = (512, 256) if options.quick else (3 * CHUNK, CHUNK) if device == "cpu" else (LONG, CHUNK)
        jobs += [lambda: prefill_row(device, length, chunk, min(repeats, 5))]
        for job in jobs:
            try:
                row = job()
            except AssertionError as reason:
                sys.exit(f"refused: {reason}")
            rows.append(row)
            print("  ".join(f"{name} {x:.2f}" if isinstance(x, float) else f"{x}" for name, x in row.items()), flush=True)
    if options.output:
        facts = {
            "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
            "torch": torch.__version__,
            "dmattn": dmattn.__version__,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }
        options.output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
