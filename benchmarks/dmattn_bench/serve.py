"""Times generation with a bounded cache, its update included: ``python -m dmattn_bench run serving``.

A step takes one token of each sequence in and attends. Its time cannot depend on how long the context is, for nothing that a step reads does but
the numbers in the slots; it is measured after a short and after a long one, which one sequence has taken in token by token, in chunks. The other
sequences of a batch are copies of it, each in memory of its own. A new key always wins a slot: that is the most a step can have to do.

On CUDA, times are of one step in a graph that holds several of them, each with a cache of its own, so that together they are larger than the L2
cache, as in a model whose layers follow each other. On a CPU the runs take turns. With its own options: ``python -m dmattn_bench.serve``.

Beside the steps stand torch's kernels over as many keys without any update, and over all keys of a long context, which is what a growing cache
costs; then our own kernel over all keys, in one piece and in pages; and a prompt in chunks vs. one call. Nothing is timed before results
were compared.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import dmattn
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dmattn_bench.decode import CUDA_BACKENDS, assert_alike, in_pages, random_pages, steps_in_a_graph
from dmattn_bench.measure import JobOptions, WrongResultError, by_turns, graph_samples
from dmattn_bench.records import Row, provenance
from dmattn_bench.rows import to_json

HEADS, KV_HEADS, HEAD_DIM, WINDOW = 32, 8, 128, 2048
SHORT, LONG, LONGEST = 4096, 131_072, 1 << 20
CHUNK, FILL = 4096, 16_384
QUIET = 0.1  # part of a CPU's time that others may use while it is timed
SURE_TO_WIN = 1e4  # a score; those of the context are standard normal
Run = Callable[[], object]


def dtype_of(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def tokens(batch: int, count: int, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value and scores of so many tokens."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads: int) -> Tensor:
        return torch.randn(batch, heads, count, HEAD_DIM, generator=generator, device=device, dtype=dtype_of(device))

    scores = torch.randn(batch, KV_HEADS, count, generator=generator, device=device)
    return draw(HEADS), draw(KV_HEADS), draw(KV_HEADS), scores


def new_cache(batch: int, device: str) -> dmattn.BoundedCache:
    return dmattn.BoundedCache(batch, KV_HEADS, WINDOW, HEAD_DIM, dtype=dtype_of(device), device=device)


def copies_of(cache: dmattn.BoundedCache, batch: int, count: int) -> list[dmattn.BoundedCache]:
    """So many caches of ``batch`` sequences, each of which is a copy of the one sequence of a cache."""
    copies = []
    for _ in range(count):
        copies.append(new_cache(batch, cache.key.device.type))
        for name, buffer in copies[-1].named_buffers():
            if name != "sizes_saved":
                buffer.copy_(cache.get_buffer(name).expand_as(buffer))
    return copies


def filled(contexts: list[int], device: str) -> dict[int, dmattn.BoundedCache]:
    """Caches of one sequence that have taken so many tokens in; refuses where the first of them answers a query wrongly."""
    cache, at, caches = new_cache(1, device), 0, {}
    parts = []
    for context in contexts:
        while at < context:
            _, key, value, scores = tokens(1, min(FILL if device == "cuda" else CHUNK, context - at), device, at)
            # What these queries see is not looked at: as few heads as there can be are the cheapest.
            cache.attend(key, key, value, scores)
            at += key.shape[2]
            if context == contexts[0]:
                parts.append((key, value, scores))
        (caches[context],) = copies_of(cache, 1, 1)
    query, *new = tokens(1, 1, device, LONGEST)
    key, value, scores = (torch.cat(all_parts, 2) for all_parts in zip(*parts, new, strict=True))
    (copy,) = copies_of(caches[contexts[0]], 1, 1)
    assert_alike(
        copy.attend(query, *new),
        dmattn.dynamic_mask_attention(query, key, value, scores, WINDOW),
    )
    return caches


# Time ---------------------------------------------------------------------------------------------------------------------------------------


def row_of(case: str, samples: list[float], peers: dict[str, list[float]] | None = None, **facts: object) -> Row:
    """A line of the results; times are medians, in microseconds."""
    peer_us = {name: statistics.median(times) for name, times in (peers or {}).items()}
    return {"case": case, **facts, "us": statistics.median(samples), "peer_us": peer_us, "samples": samples}


def bytes_read(batch: int, keys: int, device: str) -> int:
    """Bytes of the keys and values that a step over so many keys reads."""
    return batch * KV_HEADS * keys * HEAD_DIM * 2 * dtype_of(device).itemsize


def sdpa(query: Tensor, key: Tensor, value: Tensor, backend: SDPBackend | None) -> Tensor:
    if backend is None:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def sdpa_in_groups(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same for one token, with a key head's query heads in the place of tokens: on a CPU torch then copies no keys."""
    return F.scaled_dot_product_attention(query.view(query.shape[0], KV_HEADS, -1, HEAD_DIM), key, value).view(query.shape)


# On CUDA ------------------------------------------------------------------------------------------------------------------------------------


def cuda_peers(
    query: Tensor, caches: list[tuple[Tensor, Tensor]], repeats: int, expected: Tensor | None
) -> dict[str, list[float]]:
    """torch's kernels over the same keys; one that cannot is left out and named on stderr.

    Raises:
        AssertionError: one gives something else.
    """
    peers = {}
    for name, backend in CUDA_BACKENDS.items():
        try:
            if expected is not None:
                assert_alike(sdpa(query, *caches[0], backend), expected)
            runs: list[Run] = [functools.partial(sdpa, query, key, value, backend) for key, value in caches]
            peers[name] = graph_samples(runs, repeats)
        except RuntimeError as reason:
            print(f"  {name}: {str(reason).splitlines()[0][:100]}", file=sys.stderr)
    return peers


def cuda_step_rows(batch: int, filled_caches: dict[int, dmattn.BoundedCache], repeats: int) -> list[Row]:
    rows = []
    query, key, value, scores = tokens(batch, 1, "cuda", 1)
    scores.fill_(SURE_TO_WIN)
    for context, one in filled_caches.items():
        caches = copies_of(one, batch, steps_in_a_graph(one.nbytes * batch))
        runs: list[Run] = [functools.partial(cache.attend, query, key, value, scores) for cache in caches]
        peers = {}
        samples = graph_samples(runs, repeats)
        if context == min(filled_caches):
            peers = cuda_peers(query, [(cache.key, cache.value) for cache in caches], repeats, None)
        facts = {"kind": "step", "batch": batch, "context": context, "keys": WINDOW, "cache_bytes": caches[0].nbytes}
        rows.append(row_of(f"step, B={batch} after {context} tokens", samples, peers,
                           **facts, bytes=bytes_read(batch, WINDOW, "cuda")))  # fmt: skip
    return rows


def cuda_full_rows(batch: int, keys: int, repeats: int) -> list[Row]:
    """decode_attention over all keys of a context, in one piece and in pages, vs. torch's kernels."""
    query, *_ = tokens(batch, 1, "cuda", 1)
    key, value = (torch.randn(batch, KV_HEADS, keys, HEAD_DIM, device="cuda", dtype=query.dtype) for _ in range(2))
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    facts: Row = {"kind": "full", "batch": batch, "keys": keys, "bytes": bytes_read(batch, keys, "cuda")}
    expected = dmattn.decode_attention(query, key, value, lengths)
    samples = graph_samples([lambda: dmattn.decode_attention(query, key, value, lengths)], repeats)
    peers = cuda_peers(query, [(key, value)], repeats, expected)
    rows = [row_of(f"decode_attention, B={batch} over {keys} keys", samples, peers, **facts)]
    page = 64
    table = random_pages(batch, keys, page, "cuda")
    key, value = (in_pages(cache, table, page) for cache in (key, value))
    assert_alike(dmattn.decode_attention(query, key, value, lengths, page_table=table), expected)
    samples = graph_samples([lambda: dmattn.decode_attention(query, key, value, lengths, page_table=table)], repeats)
    rows.append(row_of(f"decode_attention, B={batch} over {keys} keys in pages of {page}", samples, **facts, page=page))
    return rows


def prefill_row(device: str, length: int, chunk: int, repeats: int) -> Row:
    """A prompt in chunks vs. one call."""
    query, key, value, scores = tokens(1, length, device, 3)
    cache = new_cache(1, device)

    def in_chunks() -> Tensor:
        cache.reset()
        starts = range(0, length, chunk)
        outs = [cache.attend(*(x[:, :, first : first + chunk] for x in (query, key, value, scores))) for first in starts]
        return torch.cat(outs, 2)

    def at_once() -> Tensor:
        whole: Tensor = dmattn.dynamic_mask_attention(query, key, value, scores, WINDOW)
        return whole

    assert_alike(in_chunks(), at_once())
    if device == "cuda":
        chunked, once = graph_samples([in_chunks], repeats), graph_samples([at_once], repeats)
    else:
        times = by_turns({"chunks": in_chunks, "once": at_once}, device, repeats)
        chunked, once = ([each * 1e6 for each in times[name]] for name in ("chunks", "once"))
    facts = {"kind": "prefill", "batch": 1, "keys": length, "chunk": chunk}
    return row_of(f"prefill, {length} tokens in chunks of {chunk}", chunked, {"one call": once}, **facts)


def cuda_rows(repeats: int, quick: bool) -> list[Row]:
    caches = filled([SHORT] if quick else [SHORT, LONGEST], "cuda")
    rows = []
    for batch in (1,) if quick else (1, 16, 64):
        rows += cuda_step_rows(batch, caches, repeats)
        torch.cuda.empty_cache()
    for batch in (1,) if quick else (1, 16):
        rows += cuda_full_rows(batch, SHORT if quick else LONG, min(repeats, 10))
        torch.cuda.empty_cache()
    return [*rows, prefill_row("cuda", 2 * CHUNK if quick else LONG, CHUNK, min(repeats, 5))]


# On a CPU -----------------------------------------------------------------------------------------------------------------------------------


def processor_seconds() -> tuple[float, float, float]:
    """Seconds of all processors that passed since they started, that they worked, and that this process had of these; 0 outside Linux."""
    if not Path("/proc/stat").exists():
        return 0.0, 0.0, 0.0
    with open("/proc/stat") as file:
        ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in file.readline().split()[1:9]]
    own = os.times()
    return sum(ticks), sum(ticks) - ticks[3] - ticks[4], own.user + own.system


def share_of_others(before: tuple[float, float, float]) -> float:
    """What part of the processors' time others have used since."""
    passed, worked, own = (now - then for now, then in zip(processor_seconds(), before, strict=True))
    return max(0.0, worked - own) / max(passed, 1e-9)


def at_a_quiet_time(take: Callable[[], dict[str, list[float]]], patience: float) -> tuple[dict[str, list[float]], float]:
    """What ``take`` gives when others use the processors the least, and how much that is; it is tried again for so many seconds."""
    best, last = None, time.monotonic() + patience
    while True:
        before = processor_seconds()
        result = take()
        share = share_of_others(before)
        if best is None or share < best[1]:
            best = result, share
        while share > QUIET and time.monotonic() < last:
            before = processor_seconds()
            time.sleep(1.0)
            if (now := share_of_others(before)) <= QUIET:
                break
            share = now
        if best[1] <= QUIET or time.monotonic() >= last:
            return best


def cpu_rows(repeats: int, quick: bool, patience: float) -> tuple[list[Row], float]:
    """Steps after both contexts, and torch's kernels over as many and over all keys, by turns, so that all meet the same disturbances; and what
    part of the processors' time others used meanwhile."""
    long = 2 * SHORT if quick else LONG
    caches = filled([SHORT, long], "cpu")
    query, key, value, scores = tokens(1, 1, "cpu", 1)
    scores.fill_(SURE_TO_WIN)
    all_keys, all_values = (torch.randn(1, KV_HEADS, long, HEAD_DIM) for _ in range(2))
    window, everything = (caches[SHORT].key, caches[SHORT].value), (all_keys, all_values)
    lengths = torch.tensor([long], dtype=torch.int32)
    # Over all keys torch's grouped heads alone are compared: float32 sums of its other way are off by more than the rule allows.
    assert_alike(sdpa_in_groups(query, *everything), dmattn.decode_attention(query, *everything, lengths))
    assert_alike(sdpa(query, *window, None), sdpa_in_groups(query, *window))
    runs: dict[str, Run] = {"decode": lambda: dmattn.decode_attention(query, *everything, lengths)}
    for context, cache in caches.items():
        runs[f"step {context}"] = functools.partial(cache.attend, query, key, value, scores)
    for keys, pair in ((WINDOW, window), (long, everything)):
        runs[f"SDPA {keys}"] = functools.partial(sdpa, query, pair[0], pair[1], None)
        runs[f"SDPA, heads in groups {keys}"] = functools.partial(sdpa_in_groups, query, pair[0], pair[1])
    seconds, others = at_a_quiet_time(lambda: by_turns(runs, "cpu", repeats), patience)
    times = {name: [each * 1e6 for each in samples] for name, samples in seconds.items()}

    def peers(keys: int) -> dict[str, list[float]]:
        return {name: times[f"{name} {keys}"] for name in ("SDPA", "SDPA, heads in groups")}

    rows = []
    for context, cache in caches.items():
        facts = {"kind": "step", "batch": 1, "context": context, "keys": WINDOW, "cache_bytes": cache.nbytes}
        rows.append(row_of(f"step, B=1 after {context} tokens", times[f"step {context}"],
                           peers(WINDOW) if context == SHORT else {}, **facts, bytes=bytes_read(1, WINDOW, "cpu")))  # fmt: skip
    facts = {"kind": "full", "batch": 1, "keys": long, "bytes": bytes_read(1, long, "cpu")}
    rows.append(row_of(f"decode_attention, B=1 over {long} keys", times["decode"], peers(long), **facts))
    return rows + ([prefill_row("cpu", 512, 256, 1)] if quick else []), others


def rows(options: JobOptions) -> list[Row]:
    """All rows; on a CPU after short contexts.

    Raises:
        WrongResultError: results differ from those of one call.
    """
    try:
        with torch.inference_mode():
            if options.device == "cuda":
                return cuda_rows(options.repeats or 20, options.quick)
            return cpu_rows(options.repeats or 20, True, 0.0)[0]
    except AssertionError as error:
        raise WrongResultError(f"generation with a bounded cache: {error}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="short contexts only, to see that it runs")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait for others to leave a CPU alone")
    parser.add_argument("--output", type=Path, help="folder for the JSON, benchmarks/results for those of the documentation")
    options = parser.parse_args()
    family, began = os.environ.get("DMATTN_FAMILY", "auto"), time.perf_counter()
    about = {"repeats": options.repeats, "family": family, "quick": options.quick}
    try:
        with torch.inference_mode():
            if options.device == "cuda":
                rows = cuda_rows(options.repeats, options.quick)
            else:
                rows, about["others"] = cpu_rows(options.repeats, options.quick, options.patience)
    except AssertionError as reason:
        sys.exit(f"refused: {reason}")
    for row in rows:
        peers = "  ".join(f"{name} {us:.2f}" for name, us in row["peer_us"].items())
        rate = f"{row['bytes'] / row['us'] / 1e3:6.0f} GB/s" if "bytes" in row else ""
        print(f"{row['case']:64s} {row['us']:10.2f} us {rate}  {peers}")
    others = f"; others used {about['others']:.0%} of the processors" if "others" in about else ""
    print(f"{time.perf_counter() - began:.0f} s{others}")
    if options.output:
        facts = {
            **provenance(options.device),
            **about,
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "window": WINDOW,
        }
        name = "serve" + ("" if family == "auto" else f"-{family}") + "-quick" * options.quick
        path = options.output / facts["machine"]["name"] / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_json({**facts, "rows": rows}))
        print(path)


if __name__ == "__main__":
    main()
