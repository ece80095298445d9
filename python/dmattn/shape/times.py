"""Times and memory of dmattn, torch's attention and FlexAttention for one shape: what ``python -m dmattn shape`` measures."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from dmattn.attention import dynamic_mask_attention
from dmattn.cache import BoundedCache

MOST_ROUNDS = 50
L2_FLUSH_BYTES = 256 << 20
FLEX_BLOCK = 128
BACKENDS = {
    "cuda": {
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    },
    "cpu": {"flash": SDPBackend.FLASH_ATTENTION},
}


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
        """Visible pairs of a query and a key over all batches and heads, where a query sees at most the last ``keys`` ones."""
        return self.batch * self.heads * (self.length * keys - keys * (keys - 1) // 2)

    def draw(self, heads: int, length: int) -> Tensor:
        """Normal numbers [batch, heads, length, head_dim]."""
        return torch.randn(self.batch, heads, length, self.head_dim, device=self.device, dtype=self.dtype)


class Row(NamedTuple):
    """What was measured of one implementation: seconds of a call, and bytes; None where it was not measured or does not exist."""

    name: str
    forward: float | None = None
    backward: float | None = None
    decode: float | None = None
    memory: int | None = None
    cache: int | None = None

    def step(self) -> float | None:
        """Seconds of forward and backward."""
        return None if self.forward is None or self.backward is None else self.forward + self.backward


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One implementation to time.

    Args:
        attend: makes out [batch, heads, length, head_dim].
        inputs: the tensors whose gradients backward computes; () where it has no backward.
        decode: attends one token of each sequence to the cache.
        cache: bytes of the keys and values that decode keeps.
        backend: of torch's attention. It is chosen around a call, because choosing takes longer than some calls.
    """

    name: str
    attend: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]
    decode: Callable[[], Tensor] | None = None
    cache: int | None = None
    backend: SDPBackend | None = None

    def chosen(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend)


class ShapeError(Exception):
    """This shape cannot be measured here; says why in one sentence."""


class OutOfTimeError(BaseException):
    """The time for one step is over. Not an Exception, so that a compiler that is interrupted does not take it for one of its own."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Interrupts what runs inside after so many seconds, then every second: an exception can be lost in a callback.

    Raises:
        OutOfTimeError: inside.
    """

    def stop(*_: object) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


# Implementations -----------------------------------------------------------------------------------------------------------------


class Inputs:
    """Random normal tensors of a shape, from the same seed for everybody."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.shape = shape
        self.query = shape.draw(shape.heads, shape.length).requires_grad_()
        self.key, self.value = (shape.draw(shape.kv_heads, shape.length).requires_grad_() for _ in range(2))
        self.scores = torch.randn(self.key.shape[:3], device=shape.device, requires_grad=True)
        self.grad_out = shape.draw(shape.heads, shape.length)

    def dynamic_mask(self) -> Candidate:
        """dmattn, the selection of keys included, and a bounded cache that is full."""
        shape, inputs = self.shape, (self.query, self.key, self.value, self.scores)
        cache = BoundedCache(
            shape.batch,
            shape.kv_heads,
            shape.window,
            shape.head_dim,
            local=shape.local,
            sink_keys=shape.sink_keys,
            dtype=shape.dtype,
            device=shape.device,
        )
        key, value, scores = (given.detach()[:, :, : shape.keys] for given in inputs[1:])
        with torch.no_grad():
            cache.attend(key, key, value, scores)
        query, key, value = (shape.draw(heads, 1) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
        score = torch.randn(key.shape[:3], device=shape.device)

        def attend() -> Tensor:
            return dynamic_mask_attention(*inputs, shape.window, local=shape.local, sink_keys=shape.sink_keys)

        def decode() -> Tensor:
            out: Tensor = cache.attend(query, key, value, score)
            return out

        return Candidate("dmattn", attend, inputs, decode, cache.nbytes)

    def dense(self, name: str, backend: SDPBackend) -> Candidate:
        """torch's attention over all earlier keys, by one of its backends; a decode step reads the keys of the whole length."""
        inputs, grouped = (self.query, self.key, self.value), self.shape.heads != self.shape.kv_heads
        token, key, value = self.shape.draw(self.shape.heads, 1), self.key.detach(), self.value.detach()

        def attend() -> Tensor:
            return F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=grouped)

        def decode() -> Tensor:
            return F.scaled_dot_product_attention(token, key, value, enable_gqa=grouped)

        return Candidate(name, attend, inputs, decode, key.nbytes + value.nbytes, backend)

    def sliding(self) -> Candidate:
        """FlexAttention, compiled, with a sliding window of as many keys: it selects none. On a CPU it has no backward."""
        shape, inputs = self.shape, (self.query, self.key, self.value)
        if shape.device == "cpu":
            inputs = tuple(given.detach() for given in inputs)  # type: ignore[assignment]
        mask, grouped = sliding_mask(shape), shape.heads != shape.kv_heads
        compiled: Callable[..., Tensor] = torch.compile(flex_attention.flex_attention, dynamic=False)

        def attend() -> Tensor:
            return compiled(*inputs, block_mask=mask, enable_gqa=grouped)

        return Candidate("FlexAttention", attend, () if shape.device == "cpu" else inputs)


def sliding_mask(shape: Shape) -> flex_attention.BlockMask:
    """What ``create_block_mask`` makes for a sliding window, without a table of all pairs of queries and keys."""
    window = shape.keys

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < window)

    first = torch.arange(0, shape.length, FLEX_BLOCK, device=shape.device)
    queries, keys = first[:, None], first[None, :]
    last = FLEX_BLOCK - 1
    some = (keys <= queries) & (queries - (keys + last) < window)
    full = (keys + last <= queries) & (queries + last - keys < window) & (queries + last < shape.length)
    return flex_attention.BlockMask.from_kv_blocks(
        *block_lists(some & ~full),
        *block_lists(full),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=visible,
        seq_lengths=(shape.length, shape.length),
    )


def block_lists(table: Tensor) -> tuple[Tensor, Tensor]:
    """bool [N, N] -> how many blocks each row has, int32 [1, 1, N], and which, first in int32 [1, 1, N, N]."""
    rows = table[None, None].int()
    return rows.sum(-1, dtype=torch.int32), rows.argsort(dim=-1, descending=True, stable=True).int()


# Measuring -----------------------------------------------------------------------------------------------------------------------


def timed(call: Callable[[], Tensor], device: str) -> tuple[Tensor, float]:
    """The result and the seconds of a whole eager call: wall clock on a CPU; on CUDA between two events, with a cold L2 cache and an idle
    GPU before it, so that the time of launching counts."""
    if device == "cpu":
        begin = time.perf_counter()
        result = call()
        return result, time.perf_counter() - begin
    torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device=device).zero_()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    result = call()
    last.record()
    torch.cuda.synchronize()
    return result, first.elapsed_time(last) / 1e3


def warm_up(candidate: Candidate, grad_out: Tensor) -> int | None:
    """Runs everything once and returns the bytes of a training step beyond its inputs, None without a backward.

    On CUDA the peak that a second step allocates; on a CPU the sizes of the output, of what is saved for backward, and of the gradients.
    """

    def step() -> int:
        kept = {given.untyped_storage().data_ptr(): 0 for given in candidate.inputs}

        def save(tensor: Tensor) -> Tensor:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
        with hooks if grad_out.device.type == "cpu" and candidate.inputs else contextlib.nullcontext():
            out = candidate.attend()
        save(out.detach())
        if not candidate.inputs:
            return 0
        gradients = torch.autograd.grad(out, candidate.inputs, grad_out)
        return sum(kept.values()) + sum(gradient.nbytes for gradient in gradients)

    size = step()
    if grad_out.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        size = torch.cuda.max_memory_allocated() - before
    return size if candidate.inputs else None


def ready(candidate: Candidate, grad_out: Tensor) -> tuple[Candidate, int | None]:
    """The candidate after a warm-up, without ``decode`` where it refuses a single query, and its memory.

    Raises:
        RuntimeError: it refuses the shape, or memory is short.
    """
    with candidate.chosen():
        memory = warm_up(candidate, grad_out)
        try:
            with torch.no_grad():
                _ = candidate.decode and candidate.decode()
        except RuntimeError:
            candidate = dataclasses.replace(candidate, decode=None)
    return candidate, memory


def turn(candidate: Candidate, grad_out: Tensor, taken: dict[str, list[float]]) -> None:
    """Times forward, backward and decode once, as far as they exist."""
    device = grad_out.device.type
    out, seconds = timed(candidate.attend, device)
    taken["forward"].append(seconds)
    if candidate.inputs:
        taken["backward"].append(timed(lambda: torch.autograd.grad(out, candidate.inputs, grad_out)[0], device)[1])
    if candidate.decode is not None:
        with torch.no_grad():
            taken["decode"].append(timed(candidate.decode, device)[1])


def rounds(
    candidates: Sequence[tuple[Candidate, int | None]],
    grad_out: Tensor,
    until: float,
    summary: Callable[[list[float]], float] = statistics.median,
) -> tuple[list[Row], int]:
    """Medians over rounds in which everybody takes a turn, at least one, until the clock would pass ``until``; and how many rounds."""
    samples: list[dict[str, list[float]]] = [{"forward": [], "backward": [], "decode": []} for _ in candidates]
    count, longest = 0, 0.0
    while count == 0 or (count < MOST_ROUNDS and time.perf_counter() + longest < until):
        begin = time.perf_counter()
        for (candidate, _), taken in zip(candidates, samples, strict=True):
            with candidate.chosen():
                turn(candidate, grad_out, taken)
        count, longest = count + 1, max(longest, time.perf_counter() - begin)
    rows = []
    for (candidate, memory), taken in zip(candidates, samples, strict=True):
        medians = {column: summary(values) for column, values in taken.items() if values}
        rows.append(Row(candidate.name, **medians, memory=memory, cache=candidate.cache))
    return rows, count
