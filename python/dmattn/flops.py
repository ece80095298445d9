"""FLOP formulas for ``torch.utils.flop_counter.FlopCounterMode``: visible query-key pairs only, 2 * (D + Dv) each forward, 2.5x backward.

Counting pairs reads the mask's values (a device sync); a counter is a diagnostic. While tracing, where there are no values, all pairs count.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dmattn import checks
from dmattn._library import by_name
from dmattn.call import Options, mask_tensors, with_mask
from dmattn.composed import LISTS, Masks, visible_in_lists
from dmattn.masks import BlockMask, CombinedMask, IndexMask, IntervalMask, Mask
from dmattn.sizes import Sizes
from dmattn.stats import TILE, by_elements, queries_of_keys

COUNTER = "torch.utils.flop_counter"


def visible_pairs(mask: Mask | None, Sq: int, Sk: int, *, is_causal: bool = False, batch: int = 1, heads: int = 1) -> int:
    """How many (query, key) pairs a mask lets through, over all batches and heads. Interval masks take O(N) memory.

    Args:
        mask: None (all), IntervalMask, BlockMask, IndexMask or an intersection of such.
        Sq: number of queries.
        Sk: number of keys.
        is_causal: also hide later keys.
        batch: B; a mask with one batch counts B times, one with more sets B.
        heads: H; a mask with Hkv or one head counts for its group, one with more sets H.

    Raises:
        TypeError, ValueError: a mask of another type or for other lengths.
    """
    checks.each(checks.length, Sq=Sq, Sk=Sk, batch=batch, heads=heads)
    checks.flag("is_causal", is_causal)
    expected = "an IntervalMask, a BlockMask, an IndexMask, an intersection of such or None"
    checks.instance("mask", mask, IntervalMask | BlockMask | IndexMask | CombinedMask | None, expected)
    if mask is None:
        return _pairs(Masks(None, None, None, None, None, None), LISTS, is_causal, batch, heads, Sq, Sk)
    parts = mask._parts() if isinstance(mask, CombinedMask) else [mask]
    batch, heads = (max(size, *(part.shape[place] for part in parts)) for place, size in enumerate((batch, heads)))
    fewer = min((part.shape[1] for part in parts if part.shape[1] != 1), default=1)  # Hkv
    sizes = Sizes(batch, heads, fewer, Sq, Sk, 8, torch.float32, mask.device)
    if heads % max(1, fewer):
        raise ValueError(f"mask: expected [B|1, H|Hkv|1, ..] with {sizes}, got {mask!r}")
    start, end, tiles, _, _, bits, indices, _ = mask_tensors(mask, sizes)
    options = with_mask(Options(None, is_causal, 1.0, 0.0, 0.0, False), mask)
    return _pairs(Masks(start, end, tiles, bits, indices, None), options.lists(), options.is_causal, batch, heads, Sq, Sk)


def _pairs(masks: Masks, lists: tuple[int, int, int], is_causal: bool, batch: int, heads: int, Sq: int, Sk: int) -> int:
    start, end = masks.start, masks.end
    if any(_has_no_values(t) for t in masks if t is not None):
        return batch * heads * Sq * Sk
    if masks.tiles is not None or masks.indices is not None:
        count: Tensor = by_elements(masks, is_causal, lists, Sq, Sk, TILE, of_tiles=False)[0]
        return int(count.sum()) * (batch * heads // max(1, count.numel()))
    if start is None and end is None:
        before = max(0, Sk - Sq)  # a query at position p sees p + 1 keys
        return batch * heads * ((Sk * (Sk + 1) - before * (before + 1)) // 2 if is_causal else Sq * Sk)
    first, last = queries_of_keys(start, end, is_causal, Sq, Sk)
    count = (last - first).clamp(min=0)
    return int(count.sum()) * (batch * heads // max(1, count.shape[0] * count.shape[1]))


def _forward_flops(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, index_block: int, index_local: int, index_sinks: int, **given: Any
) -> int:
    (batch, heads, length, size), masks = query.shape, Masks(*(given[name] for name in Masks._fields))
    pairs = _pairs(masks, (index_block, index_local, index_sinks), is_causal, batch, heads, length, key.shape[2])
    return 2 * pairs * (size + value.shape[3])


def _backward_flops(**given: Any) -> int:
    """Five products for forward's two: S again, dP, dQ, dK of size D and dP, dV of size Dv."""
    return _forward_flops(**given) * 5 // 2


def _step_flops(query: Tensor, value: Tensor, lengths: Tensor | None, window: int, local: int, sink: int, **_: Any) -> int:
    """A token's query sees all visible slots; while tracing every sequence takes its token."""
    taken = query.shape[0] if lengths is None or _has_no_values(lengths) else int((lengths > 0).sum())
    return 2 * taken * query.shape[1] * (window + local + sink) * (query.shape[3] + value.shape[3])


def _decode_flops(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, page_table: Tensor | None, indices: Tensor | None,
    is_causal: bool, index_block: int, index_local: int, index_sinks: int, **_: Any,
) -> int:  # fmt: skip
    """Each query sees the keys up to its position, or of them those of its list; while tracing every length counts as Smax."""
    batch, heads, queries, size = query.shape
    capacity = key.shape[2] if page_table is None else page_table.shape[1] * key.shape[1]
    known = lengths is not None and not _has_no_values(lengths)
    given = lengths.long().clamp(0, capacity).tolist() if known and lengths is not None else [capacity] * batch
    if indices is not None and not _has_no_values(indices):
        shown = (index_block, index_local, index_sinks)
        position = torch.tensor(given, device=indices.device).view(-1, 1, 1, 1) - queries
        position = position + torch.arange(queries, device=indices.device)[:, None]
        seen = visible_in_lists(indices, shown, position, (0, capacity)) & (
            torch.arange(capacity, device=indices.device) <= position
        )
        return 2 * int(seen.sum()) * (heads // seen.shape[1]) * (size + value.shape[3])
    pairs = sum(max(0, length - later) for length in given for later in (range(queries) if is_causal else [0] * queries))
    return 2 * heads * pairs * (size + value.shape[3])


def _has_no_values(given: Tensor) -> bool:
    return isinstance(given, FakeTensor) or given.is_meta


def _register(counter: ModuleType) -> None:
    formulas: dict[str, Callable[..., int]] = {
        "forward": _forward_flops, "backward": _backward_flops, "cache_step": _step_flops, "decode": _decode_flops,
    }  # fmt: skip
    for name, formula in formulas.items():
        op = getattr(torch.ops.dmattn, name)
        counter.flop_registry.pop(op, None)  # of an earlier import
        counter.register_flop_formula(op, get_raw=True)(partial(_counted, name, formula))


def _counted(op: str, formula: Callable[..., int], *inputs: Any, **_: Any) -> int:
    return formula(**by_name(op, inputs))


class _Registering(importlib.abc.MetaPathFinder):
    """Registers the formulas once somebody imports torch's counter, which is slow to import with triton."""

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
