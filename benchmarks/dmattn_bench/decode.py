"""Times decode_attention in CUDA graphs, beside torch's kernels over the same keys: ``python -m dmattn_bench run decode``.

A graph holds several steps, each over caches of its own, so that together they are larger than the L2 cache: keys come from memory, as in a
model whose layers follow each other. Times are of one step; bytes are those of the keys and values that a step has to read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable

import dmattn
import torch
import torch.nn.functional as F
from dmattn import reference
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dmattn_bench import two_ways
from dmattn_bench.measure import JobOptions, WrongResultError, by_turns, graph_samples
from dmattn_bench.records import Row

COLD_BYTES = 400 << 20  # of all caches in a graph, where they are not larger by themselves
MOST_STEPS = 48  # in a graph
CUDA_BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}
PEERS: dict[str, dict[str, SDPBackend | None]] = {"cuda": {**CUDA_BACKENDS}, "cpu": {"SDPA": None}}
MOST_BYTES = 40 * 10**9  # of all caches of a case


@dataclasses.dataclass(frozen=True)
class Case:
    """``length`` keys in caches of that capacity; ``page_size`` 0: in one piece."""

    batch: int
    length: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    queries: int = 1
    page_size: int = 0
    has_bias: bool = False

    @property
    def bytes(self) -> int:
        return self.batch * self.kv_heads * self.length * self.head_dim * 2 * 2

    @property
    def steps(self) -> int:
        return steps_in_a_graph(self.bytes)


def steps_in_a_graph(cache_bytes: int) -> int:
    """So many that caches of this size, one for each step, are together larger than the L2 cache."""
    return max(1, min(MOST_STEPS, -(-COLD_BYTES // cache_bytes)))


WINDOW, LONG = 2048, 131072
CASES = [
    *(Case(batch, WINDOW) for batch in (1, 16, 64)),
    *(Case(batch, WINDOW, has_bias=True) for batch in (1, 64)),
    *(Case(batch, WINDOW, page_size=16) for batch in (1, 16, 64)),
    *(Case(batch, LONG) for batch in (1, 16)),
    *(Case(batch, LONG, page_size=page_size) for batch in (1, 16) for page_size in (16, 64, 256)),
    *(Case(1, length) for length in (128, 512, 4096, 8192, 16384, 32768)),
    *(Case(8, 8192, queries=queries) for queries in (1, 4, 16)),
    *(Case(8, 8192, kv_heads=kv_heads) for kv_heads in (1, 32)),
    *(Case(8, 8192, head_dim=head_dim) for head_dim in (64, 256)),
]


def rows(options: JobOptions) -> list[Row]:
    """A row for each case; on a CPU few and short ones, timed by turns.

    Raises:
        WrongResultError: results differ from torch's, or with a key_bias from the reference's.
    """
    cases = [case for case in CASES if case.bytes * case.steps <= MOST_BYTES]
    if options.device == "cpu":
        cases = [Case(1, length, heads=8, kv_heads=2, head_dim=64) for length in (512, 2048, 8192)]
    if options.quick:
        cases = [case for case in cases if case.length <= WINDOW and case.batch == 1]
    found = []
    for case in cases:
        found.append(measured(case, options.repeats or 20, options.device))
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return found


def assert_alike(result: Tensor, expected: Tensor) -> None:
    """Kernels round weights to bfloat16 at different places; float32 sums have another order."""
    rule = two_ways.assert_same_in_another_order if result.dtype == torch.float32 else two_ways.assert_same_by_another_way
    rule(result, expected, result.dtype)


def microseconds(runs: list[Callable[[], object]], repeats: int, device: str) -> list[float]:
    """Of one run."""
    if device == "cuda":
        return graph_samples(runs, repeats)
    return [seconds * 1e6 for seconds in by_turns({"": runs[0]}, device, repeats)[""]]


def measured(case: Case, repeats: int, device: str) -> Row:
    """The row of one case; refuses on results that differ from torch's, or with a key_bias from the reference's."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    query = draw(case.batch, case.heads, case.queries, case.head_dim)
    steps = case.steps if device == "cuda" else 1
    caches = [tuple(draw(case.batch, case.kv_heads, case.length, case.head_dim) for _ in range(2)) for _ in range(steps)]
    lengths = torch.full((case.batch,), case.length, dtype=torch.int32, device=device)
    bias = torch.randn(case.batch, case.kv_heads, case.length, device=device) if case.has_bias else None

    def ours(key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = dmattn.decode_attention(query, key, value, lengths, key_bias=bias)
        return out

    mask = None
    if case.queries > 1:
        mask = torch.ones(case.queries, case.length, dtype=torch.bool, device=device).tril(case.length - case.queries)

    def peer(backend: SDPBackend | None) -> Callable[[Tensor, Tensor], Tensor]:
        def attend(key: Tensor, value: Tensor) -> Tensor:
            with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=case.heads != case.kv_heads)

        return attend

    if bias is not None:
        wanted = (given.float() for given in (query, *caches[0]))
        try:
            assert_alike(ours(*caches[0]), reference.attention(*wanted, key_bias=bias, is_causal=True)[0])
        except AssertionError as reason:
            raise WrongResultError(f"{name_of(case)}: differs from the reference: {reason}") from None
    peer_samples: dict[str, list[float]] = {}
    if not case.has_bias and case.page_size == 0:
        expected = ours(*caches[0])
        for name, backend in PEERS[device].items():
            try:
                assert_alike(peer(backend)(*caches[0]), expected)
                peer_samples[name] = microseconds(steps_over(peer(backend), caches), repeats, device)
            except AssertionError as reason:
                raise WrongResultError(f"{name_of(case)}: differs from {name}: {reason}") from None
            except RuntimeError as reason:
                print(f"  {name}: {str(reason).splitlines()[0][:100]}", file=sys.stderr)
    run = ours
    if case.page_size:
        expected = ours(*caches[0])
        table = random_pages(case.batch, case.length, case.page_size, device)
        for number in range(steps):  # one after the other: both forms of all caches would not fit
            caches[number] = tuple(in_pages(cache, table, case.page_size) for cache in caches[number])

        def run(key: Tensor, value: Tensor) -> Tensor:
            out: Tensor = dmattn.decode_attention(query, key, value, lengths, key_bias=bias, page_table=table)
            return out

        if not torch.equal(run(*caches[0]), expected):
            raise WrongResultError(f"{name_of(case)}: differs from the same keys in one piece")
    samples = microseconds(steps_over(run, caches), repeats, device)
    return {
        "case": name_of(case),
        "kind": "decode",
        **dataclasses.asdict(case),
        "bytes": case.bytes * dtype.itemsize // 2,
        "us": statistics.median(samples),
        "peer_us": {name: statistics.median(taken) for name, taken in peer_samples.items()},
        "peer_samples": peer_samples,
        "samples": samples,
    }


def random_pages(batch: int, keys: int, page_size: int, device: str) -> Tensor:
    """int32 [B, pages]: a table of pages that lie anywhere in their pool."""
    return torch.randperm(batch * (keys // page_size), device=device, dtype=torch.int32).view(batch, -1)


def in_pages(cache: Tensor, table: Tensor, page_size: int) -> Tensor:
    """[B, Hkv, S, D] -> the pool [all pages, page_size, Hkv, D] in which a table of pages finds the same rows."""
    pool = cache.new_empty(table.numel(), page_size, cache.shape[1], cache.shape[3])
    pool[table.flatten().long()] = cache.transpose(1, 2).reshape(pool.shape)
    return pool


def steps_over(run: Callable[[Tensor, Tensor], Tensor], caches: list[tuple[Tensor, ...]]) -> list[Callable[[], object]]:
    """One step over each pair of caches."""
    return [functools.partial(run, *pair) for pair in caches]


def name_of(case: Case) -> str:
    parts = [f"{case.batch} x {case.length}, {case.heads} heads on {case.kv_heads}, D={case.head_dim}"]
    parts += [f"{case.queries} queries"] if case.queries > 1 else []
    parts += [f"pages of {case.page_size}"] if case.page_size else []
    parts += ["key_bias"] if case.has_bias else []
    return ", ".join(parts)
