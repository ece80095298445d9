"""FLOP formulas for ``torch.utils.flop_counter.FlopCounterMode``: visible query-key pairs only, 2 * (D + Dv) each forward, 2.5x backward.

Counting pairs reads the mask's values (a device sync); a counter is a diagnostic. While tracing, where there are no values, all pairs count.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dmattn import checks
from dmattn.masks import BlockMask, CombinedMask, IntervalMask, Mask
from dmattn.stats import queries_of_keys, visible_rows

COUNTER = "torch.utils.flop_counter"
CHUNK = 1 << 22  # elements of a block mask that are counted at once


def visible_pairs(mask: Mask | None, Sq: int, Sk: int, *, is_causal: bool = False, batch: int = 1, heads: int = 1) -> int:
    """How many (query, key) pairs a mask lets through, over all batches and heads. Interval masks take O(N) memory.

    Args:
        mask: None (all), IntervalMask, BlockMask or ``interval & block``.
        Sq: number of queries.
        Sk: number of keys.
        is_causal: also hide later keys.
        batch: B; a mask with one batch counts B times, one with more sets B.
        heads: H; a mask with Hkv or one head counts for its group, one with more sets H.

    Raises:
        TypeError, ValueError: a mask of another type or for other lengths.
    """
    for name, size in (("Sq", Sq), ("Sk", Sk), ("batch", batch), ("heads", heads)):
        checks.length(name, size)
    checks.flag("is_causal", is_causal)
    start = end = tiles = bits = None
    if isinstance(mask, IntervalMask):
        start, end = mask.start, mask.end
    elif isinstance(mask, BlockMask):
        tiles, bits = mask.tiles, mask.bits
    elif isinstance(mask, CombinedMask):
        start, end, tiles, bits = mask.interval.start, mask.interval.end, mask.block.tiles, mask.block.bits
    elif mask is not None:
        raise TypeError(f"mask: expected an IntervalMask, a BlockMask, interval & block or None, got {checks.type_of(mask)}")
    interval = mask.interval if isinstance(mask, CombinedMask) else mask
    if isinstance(interval, IntervalMask) and not interval.serves(Sk):
        raise ValueError(f"mask: expected an IntervalMask for Sk={Sk} keys, got one for {interval.key_length}")
    block = mask.block if isinstance(mask, CombinedMask) else mask
    if isinstance(block, BlockMask) and not block.fits(Sq, Sk):
        raise ValueError(f"mask: expected a BlockMask for Sq={Sq}, Sk={Sk}, got one for {block.lengths}")
    tables = [t for t in (start, end, tiles) if t is not None]
    batch = max([batch, *(t.shape[0] for t in tables)])
    heads = max([heads, *(t.shape[1] for t in tables)])
    for t in tables:
        if t.shape[0] not in (1, batch) or heads % max(1, t.shape[1]):
            raise ValueError(f"mask: expected [B|1, H|Hkv|1, ..] with B={batch}, H={heads}, got {checks.shape_of(t)}")
    return _pairs(start, end, tiles, bits, is_causal, batch, heads, Sq, Sk)


def _pairs(
    start: Tensor | None, end: Tensor | None, tiles: Tensor | None, bits: Tensor | None, is_causal: bool,
    batch: int, heads: int, Sq: int, Sk: int,
) -> int:  # fmt: skip
    if any(isinstance(t, FakeTensor) or t.is_meta for t in (start, end, tiles) if t is not None):
        return batch * heads * Sq * Sk
    if tiles is not None and bits is not None:
        chunks = visible_rows(start, end, tiles, bits, is_causal, Sq, Sk, max(1, CHUNK // max(Sk, 1)))
        return sum(int(chunk.sum()) * _repeats(chunk, batch, heads) for _, chunk in chunks)
    if start is None and end is None:
        before = max(0, Sk - Sq)  # a query at position p sees p + 1 keys
        return batch * heads * ((Sk * (Sk + 1) - before * (before + 1)) // 2 if is_causal else Sq * Sk)
    first, last = queries_of_keys(start, end, is_causal, Sq, Sk)
    count = (last - first).clamp(min=0)
    return int(count.sum()) * _repeats(count, batch, heads)


def _repeats(given: Tensor, batch: int, heads: int) -> int:
    """How many batches and heads each of a mask's own stands for."""
    return batch * heads // max(1, given.shape[0] * given.shape[1])


def _forward_flops(
    query: Tensor, key: Tensor, value: Tensor, start: Tensor | None, end: Tensor | None, tiles: Tensor | None, rows: Tensor | None,
    columns: Tensor | None, bits: Tensor | None, key_bias: Tensor | None, bias: Tensor | None, dropout_seed: Tensor | None,
    is_causal: bool, *options: object, **kwargs: object,
) -> int:  # fmt: skip
    batch, heads, length, size = query.shape
    pairs = _pairs(start, end, tiles, bits, is_causal, batch, heads, length, key.shape[2])
    return 2 * pairs * (size + value.shape[3])


def _backward_flops(grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
                    *mask_and_options: Any, **kwargs: object) -> int:  # fmt: skip
    """Five products for forward's two: S again, dP, dQ, dK of size D and dP, dV of size Dv."""
    forward: int = _forward_flops(query, key, value, *mask_and_options)
    return forward * 5 // 2


def _step_flops(key_cache: Tensor, value_cache: Tensor, score_cache: Tensor, position: Tensor, entered: Tensor, steps: Tensor,
                kept: Tensor, query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None, lengths: Tensor | None,
                window: int, local: int, sink: int, *options: Any, **kwargs: Any) -> int:  # fmt: skip
    """A token's query sees all visible slots; while tracing every sequence takes its token."""
    known = lengths is not None and not (isinstance(lengths, FakeTensor) or lengths.is_meta)
    taken = int((lengths > 0).sum()) if known and lengths is not None else query.shape[0]
    return 2 * taken * query.shape[1] * (window + local + sink) * (query.shape[3] + value.shape[3])


def _decode_flops(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, page_table: Tensor | None, key_bias: Tensor | None,
    sinks: Tensor | None, is_causal: bool, *options: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """Each query sees the keys up to its position; while tracing every length counts as Smax."""
    batch, heads, queries, size = query.shape
    capacity = key.shape[2] if page_table is None else page_table.shape[1] * key.shape[1]
    known = lengths is not None and not (isinstance(lengths, FakeTensor) or lengths.is_meta)
    given = lengths.long().clamp(0, capacity).tolist() if known and lengths is not None else [capacity] * batch
    pairs = sum(max(0, length - later) for length in given for later in (range(queries) if is_causal else [0] * queries))
    return 2 * heads * pairs * (size + value.shape[3])


def _register(counter: ModuleType) -> None:
    formulas: dict[Any, Callable[..., int]] = {
        torch.ops.dmattn.forward: _forward_flops,
        torch.ops.dmattn.backward: _backward_flops,
        torch.ops.dmattn.cache_step: _step_flops,
        torch.ops.dmattn.decode: _decode_flops,
    }
    for op, formula in formulas.items():
        counter.flop_registry.pop(op, None)  # of an earlier import
        counter.register_flop_formula(op, get_raw=True)(formula)


class _Registering(importlib.abc.MetaPathFinder):
    """Registers the formulas once somebody imports torch's counter, which is slow to import beside triton."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                _register(module)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


if COUNTER in sys.modules:
    _register(sys.modules[COUNTER])
else:
    sys.meta_path.insert(0, _Registering())
