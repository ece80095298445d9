"""Times and memory of dmattn, torch's attention and FlexAttention for one shape: what ``python -m dmattn shape`` measures."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from dmattn.attention import dynamic_mask_attention
from dmattn.cache import BoundedCache

MOST_ROUNDS = 50
L2_FLUSH_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Shape:
    """One causal attention call: query [batch, heads, length, head_dim], key and value [batch, kv_heads, length, head_dim]."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    window: int
    local: int
    sink_keys: int
    dtype: torch.dtype
    device: str

    @property
    def keys(self) -> int:
        """The most keys that a query sees under the dynamic mask."""
        return self.window + self.local + self.sink_keys

    def pairs(self, keys: int) -> int:
        """Pairs of a query and a key over all batches and heads, where a query sees at most the last ``keys`` keys."""
        return self.batch * self.heads * (self.length * keys - keys * (keys - 1) // 2)


@dataclasses.dataclass
class Candidate:
    """One implementation to time: ``attend`` makes out [batch, heads, length, head_dim], backward the gradients of ``inputs`` (none if ()),
    ``decode`` attends one token of each sequence to a cache of so many bytes. ``memory``: bytes of a step. ``samples``: seconds by column."""

    name: str
    attend: Callable[[], Tensor]
    inputs: tuple[Tensor, ...] = ()
    decode: Callable[[], Tensor] | None = None
    cache: int | None = None
    context: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    memory: int | None = None
    samples: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def seconds(self, *columns: str) -> float:
        """The sum of the medians of "forward", "backward" or "decode"; 0 where one was not measured."""
        return sum(statistics.median(self.samples[name]) for name in columns) if set(columns) <= set(self.samples) else 0.0


class Inputs:
    """Random normal tensors of a shape, and the implementations that take them."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.shape, self.grouped = shape, shape.heads != shape.kv_heads
        self.query, self.key, self.value = (
            torch.randn(shape.batch, heads, shape.length, shape.head_dim, dtype=shape.dtype, device=shape.device).requires_grad_()
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        self.scores = torch.randn(self.key.shape[:3], device=shape.device, requires_grad=True)
        self.grad_out = torch.randn_like(self.query)
        self.token = self.grad_out[:, :, :1].contiguous()

    def dynamic_mask(self) -> Candidate:
        """dmattn, the selection of keys included, and a bounded cache that is full."""
        shape, inputs = self.shape, (self.query, self.key, self.value, self.scores)
        attend = functools.partial(dynamic_mask_attention, *inputs, shape.window, local=shape.local, sink_keys=shape.sink_keys)
        sizes = (shape.batch, shape.kv_heads, shape.window, shape.head_dim)
        cache = BoundedCache(*sizes, local=shape.local, sink_keys=shape.sink_keys, dtype=shape.dtype, device=shape.device)
        key, value, scores = (given.detach()[:, :, : shape.keys] for given in inputs[1:])
        with torch.no_grad():
            cache.attend(key, key, value, scores)
        key, value, scores = (given[:, :, :1].contiguous() for given in (key, value, scores))
        return Candidate("dmattn", attend, inputs, lambda: cache.attend(self.token, key, value, scores), cache.nbytes)

    def dense(self, name: str, backend: SDPBackend) -> Candidate:
        """torch's attention over all earlier keys, by one of its backends; a decode step reads the keys of the whole length."""
        inputs, key, value = (self.query, self.key, self.value), self.key.detach(), self.value.detach()
        attend = functools.partial(F.scaled_dot_product_attention, *inputs, is_causal=True, enable_gqa=self.grouped)
        decode = functools.partial(F.scaled_dot_product_attention, self.token, key, value, enable_gqa=self.grouped)
        # The backend is chosen outside of what is timed, because choosing takes longer than some calls.
        return Candidate(name, attend, inputs, decode, key.nbytes + value.nbytes, lambda: sdpa_kernel(backend))

    def sliding(self) -> Candidate:
        """FlexAttention, compiled, with a sliding window of as many keys: it selects none. On a CPU it has no backward."""
        window, length, inputs = self.shape.keys, self.shape.length, (self.query, self.key, self.value)
        mask = sliding_blocks(window, length, self.shape.device)
        compiled: Callable[..., Tensor] = torch.compile(flex_attention.flex_attention, dynamic=False)
        query, key, value = inputs if self.query.is_cuda else (given.detach() for given in inputs)
        attend = functools.partial(compiled, query, key, value, block_mask=mask, enable_gqa=self.grouped)
        return Candidate("FlexAttention", attend, inputs if self.query.is_cuda else ())


def sliding_blocks(window: int, length: int, device: str) -> flex_attention.BlockMask:
    """FlexAttention's mask of the last ``window`` keys, made from a table of blocks instead of one of all pairs."""
    size = 128
    first = torch.arange(0, length, size, device=device)  # position of each block's first token
    query, key = first[:, None], first
    is_full = (key + size - 1 <= query) & (query + size - 1 - key < window) & (query + size <= length)
    is_partial = (key <= query) & (query - (key + size - 1) < window) & ~is_full
    ordered = [
        (
            blocks.sum(1, dtype=torch.int32)[None, None],
            blocks.int().argsort(dim=1, descending=True, stable=True).int()[None, None],
        )
        for blocks in (is_partial, is_full)
    ]
    return flex_attention.BlockMask.from_kv_blocks(
        *ordered[0], *ordered[1], size, lambda b, h, q, k: (k <= q) & (q - k < window), seq_lengths=(length, length)
    )


def timed(call: Callable[[], Tensor], device: str) -> tuple[Tensor, float]:
    """The result and the seconds of an eager call: wall clock on a CPU; on CUDA between two events, with a cold L2 cache and an idle GPU
    before it, so that the time of launching counts."""
    if device == "cpu":
        begin = time.perf_counter()
        return call(), time.perf_counter() - begin
    torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device=device).zero_()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    result = call()
    last.record()
    torch.cuda.synchronize()
    return result, first.elapsed_time(last) / 1e3


def warm_up(candidate: Candidate, grad_out: Tensor) -> Candidate:
    """The candidate after a step, on a GPU with the peak of a second one's memory, and without ``decode`` where it refuses a single query.

    Raises:
        RuntimeError: it refuses the shape, or memory is short.
    """
    with candidate.context():
        for _ in range(2 if grad_out.is_cuda else 1):
            before = torch.cuda.memory_allocated()
            if grad_out.is_cuda:
                torch.cuda.reset_peak_memory_stats()
            out = candidate.attend()
            if candidate.inputs:
                torch.autograd.grad(out, candidate.inputs, grad_out)
            candidate.memory = torch.cuda.max_memory_allocated() - before if grad_out.is_cuda else None
            del out
        with torch.no_grad():
            try:
                _ = candidate.decode and candidate.decode()
            except RuntimeError:
                candidate.decode = None
    return candidate


def time_rounds(candidates: Sequence[Candidate], grad_out: Tensor, until: float) -> int:
    """Times every candidate once a round, at least one round, until the clock would pass ``until``. Returns how many rounds."""

    def sample(candidate: Candidate, column: str, call: Callable[[], Tensor]) -> Tensor:
        result, seconds = timed(call, grad_out.device.type)
        candidate.samples.setdefault(column, []).append(seconds)
        return result

    def sample_all(candidate: Candidate) -> None:
        out = sample(candidate, "forward", candidate.attend)
        if candidate.inputs:
            sample(candidate, "backward", lambda: torch.autograd.grad(out, candidate.inputs, grad_out)[0])
        if candidate.decode is not None:
            with torch.no_grad():
                sample(candidate, "decode", candidate.decode)

    count, longest = 0, 0.0
    while count == 0 or (count < MOST_ROUNDS and time.perf_counter() + longest < until):
        begin = time.perf_counter()
        for candidate in candidates:
            with candidate.context():
                sample_all(candidate)
        count, longest = count + 1, max(longest, time.perf_counter() - begin)
    return count
