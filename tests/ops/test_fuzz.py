"""Every op against brute force on drawn inputs, through the public functions and directly.

HYPOTHESIS_PROFILE=nightly draws 5,000 examples an op, those of decoding, of the cache and of reductions too, in shards that pytest-xdist runs
side by side. DMATTN_FUZZ_SEED=n begins at seed n instead of 0. DMATTN_FUZZ_LOG=path.json has every shard write what it did beside path; the
file as a program makes one summary of them. On a GPU, for one family after the other:

    DMATTN_FAMILY=sm80 HYPOTHESIS_PROFILE=nightly OMP_NUM_THREADS=2 DMATTN_FUZZ_LOG=fuzz.json python -m pytest -n 10 tests/ops/test_fuzz.py
    python tests/ops/test_fuzz.py fuzz.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import brute_check
import brute_force
import dmattn
import hypothesis
import numpy as np
import pytest
import test_backward
import test_cache
import test_decode
import test_index_loss
import test_indexer
import test_reduce
import torch
from dmattn import BlockMask, IndexMask, IntervalMask
from dmattn.testing import AttentionCase, poisoned_memory, run, strategies
from dmattn_bench.rows import to_json
from hypothesis import strategies as st

ALWAYS, FOREVER = -(2**31), 2**31 - 1
# Lengths around which kernels change their path: vectors, tiles, chunks, segments, reductions.
THRESHOLDS = (1, 31, 32, 33, 63, 64, 65, 95, 97, 127, 128, 129, 191, 192, 193, 255, 256, 257, 383, 384, 385, 511, 512, 513, 767, 768, 769,
              1023, 1024, 1025)  # fmt: skip
HEAD_DIMS = (8, 16, 24, 32, 56, 64, 72, 96, 120, 128, 136, 192, 248, 256)
USUAL_WORK, LARGEST_WORK = 1 << 16, 1 << 19  # elements of the matrix of weights
SHARDS = 10 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 1
FIRST_SEED = int(os.environ.get("DMATTN_FUZZ_SEED", "0"))


# What is drawn ----------------------------------------------------------------------------------------------------------------------


def lengths():
    return st.integers(0, 40) | st.sampled_from(THRESHOLDS)


@st.composite
def shapes(draw):
    """Sizes whose matrix of weights is not too large, whatever has to become small for it."""
    kv_heads = draw(st.sampled_from((1, 1, 2, 2, 3, 4, 5, 8)))
    heads = kv_heads * draw(st.sampled_from([group for group in (1, 2, 3, 4, 7, 8) if group * kv_heads <= 8]))
    batch, keys = draw(st.integers(1, 3)), draw(lengths())
    queries = draw(st.just(keys) | lengths())
    work = draw(st.sampled_from((*[USUAL_WORK] * 15, LARGEST_WORK)))
    if batch * heads * queries * keys > work:
        batch = 1
    if batch * heads * queries * keys > work:
        heads, kv_heads = heads // kv_heads, 1
    if batch * heads * queries * keys > work:
        heads = 1
    if heads * queries * keys > work:
        queries = max(1, min(queries, work // keys))
    size = draw(st.sampled_from(HEAD_DIMS))
    return strategies.Shape(batch, heads, kv_heads, queries, keys, size, draw(st.just(size) | st.sampled_from(HEAD_DIMS)))


def generators():
    return st.integers(0, 2**32 - 1).map(np.random.default_rng)


@st.composite
def leads(draw, shape):
    """[B|1, H|Hkv|1]."""
    return draw(st.sampled_from((1, shape.B))), draw(st.sampled_from((1, shape.Hkv, shape.H)))


@st.composite
def intervals(draw, shape):
    """start and end, int32 [B|1, H|Hkv|1, Sk], each of its own lead; None: not given."""
    kind = draw(st.sampled_from(("none", "random", "sliding", "documents", "padding", "streaming", "lifetimes", "empty")))
    random, keys = draw(generators()), np.arange(shape.Sk)
    if kind == "none":
        return None, None
    sizes = [(*draw(leads(shape)), shape.Sk) for _ in range(2)]
    if kind == "random":
        low, high = -shape.Sq - 3, 2 * shape.Sk + 3
        start, end = (random.integers(low, high, size) for size in sizes)
    elif kind == "sliding":
        start, end = keys - draw(st.integers(-2, 70)), keys + draw(st.integers(-1, 140))
    elif kind == "documents":
        cuts = np.sort(random.integers(0, shape.Sk + 1, draw(st.integers(0, 6))))
        bounds = np.concatenate([[0], cuts, [shape.Sk]])
        document = np.searchsorted(bounds, keys, side="right") - 1
        start, end = bounds[document], bounds[document + 1]
    elif kind == "padding":
        start, end = (
            np.full(sizes[0], ALWAYS),
            np.where(keys < random.integers(0, shape.Sk + 1, (*sizes[1][:2], 1)), FOREVER, ALWAYS),
        )
    elif kind == "streaming":
        start, end = keys, np.where(keys < draw(st.integers(0, 4)), FOREVER, keys + draw(st.integers(0, 200)))
    elif kind == "lifetimes":
        start, end = keys, keys + random.geometric(draw(st.sampled_from((0.5, 0.05, 0.01))), sizes[1])
    else:
        start, end = np.full(sizes[0], 7), np.full(sizes[1], 7)
    start, end = (np.broadcast_to(x, size).astype(np.int32) for x, size in zip((start, end), sizes, strict=True))
    dropped = draw(st.sampled_from(("", "", "", "start", "end")))
    return None if dropped == "start" else start, None if dropped == "end" else end


@st.composite
def patterns(draw, size):
    """Booleans of a size [.., rows, columns]: scattered, in blocks so that tiles are empty and full, all or nothing."""
    random = draw(generators())
    kind = draw(st.sampled_from(("scattered", "blocks", "both", "all", "nothing")))
    if kind in ("all", "nothing"):
        return np.full(size, kind == "all")
    made = random.random(size) < draw(st.sampled_from((0.02, 0.3, 0.8)))
    if kind != "scattered":
        block = draw(st.sampled_from((16, 32, 64, 128)))
        table = random.random((*size[:2], -(-size[2] // block), -(-size[3] // block))) < 0.5
        blocks = table.repeat(block, 2).repeat(block, 3)[:, :, : size[2], : size[3]]
        made = blocks if kind == "blocks" else blocks & made
    return made


@st.composite
def index_lists(draw, shape):
    """int32 [B|1, H|Hkv|1, Sq, K], and the keys of an entry, of a local window, and sinks."""
    random, size = draw(generators()), draw(st.sampled_from((1, 1, 2, 16, 64, 128)))
    blocks = -(-shape.Sk // size)
    entries = random.integers(
        -1, max(blocks, 1), (*draw(leads(shape)), shape.Sq, draw(st.integers(0, 20) | st.just(min(blocks, 200))))
    )
    shared = random.random(entries.shape) < draw(st.sampled_from((0.0, 0.5)))  # with neighbours
    entries = np.where(shared, entries[:, :, :1], entries)
    beside = st.sampled_from((0, 0, 1, 5, 130))
    return np.where(entries < blocks, entries, -1).astype(np.int32), size, draw(beside), draw(beside)


@dataclasses.dataclass
class Fuzzed:
    """One problem in all its forms: a case for the public function and for the rule, visibility and tensors for brute force and the op."""

    case: AttentionCase  # mask is what the public function gets; visible is everything, is_causal's part too
    is_causal: bool
    start: torch.Tensor | None
    end: torch.Tensor | None
    block: torch.Tensor | None
    lists: IndexMask | None
    tile: tuple[int, int]

    def __repr__(self):
        given = [name for name in ("start", "end", "block", "lists") if getattr(self, name) is not None]
        return f"{self.case!r}, is_causal={self.is_causal}, {given}, tile={self.tile}"


@st.composite
def problems(draw, device):
    dtype, shape = draw(strategies.dtypes(device)), draw(shapes())
    subnormal, huge = torch.finfo(dtype).tiny / 8, 64.0 if dtype == torch.float16 else 1e30
    seed, magnitude = draw(strategies.seeds()), draw(st.sampled_from((1.0, 1.0, 4.0, 0.0, subnormal)))
    magnitudes = (magnitude, magnitude, draw(st.sampled_from((magnitude, magnitude, subnormal, huge))))
    start, end = draw(intervals(shape))
    block = draw(patterns((*draw(leads(shape)), shape.Sq, shape.Sk))) if draw(st.sampled_from((False, False, True))) else None
    lists = draw(index_lists(shape)) if draw(st.sampled_from((False, False, True))) else None
    is_causal = draw(st.booleans())
    first = offset = None
    if draw(st.sampled_from((False, False, False, True))):
        offset = draw(strategies.query_offsets(shape, device))
        first = torch.as_tensor(offset).reshape(-1).tolist()
    visible = brute_force.visibility(shape.B, shape.H, shape.Sq, shape.Sk, start, end, block, is_causal, first, lists)

    by_key_head = visible.reshape(shape.B, shape.Hkv, shape.H // shape.Hkv * shape.Sq, shape.Sk)
    hidden = ~by_key_head.any(axis=2)
    sizes = {
        "query": (shape.H, shape.Sq, shape.D),
        "key": (shape.Hkv, shape.Sk, shape.D),
        "value": (shape.Hkv, shape.Sk, shape.Dv),
    }
    leaves = {}
    bad = draw(st.sampled_from((0.0, torch.nan, torch.inf, -torch.inf)))
    for number, (name, size) in enumerate(sizes.items()):
        layout = draw(st.sampled_from(strategies.LAYOUTS))
        made = magnitudes[number] * strategies.random_tensor((shape.B, *size), seed + number, dtype)
        if name != "query" and bad != 0.0 and layout != "expanded":
            made = made.masked_fill(torch.from_numpy(hidden)[..., None], bad)
        leaves[name] = strategies.laid_out(made.to(device), layout)

    for number, name in enumerate(("key_bias", "bias")):
        if not draw(st.booleans()):
            continue
        rest = (shape.Sk,) if name == "key_bias" else (draw(st.sampled_from((1, shape.Sq, shape.Sq))), shape.Sk)
        made = strategies.random_tensor((*draw(leads(shape)), *rest), seed + 7 + number) * draw(st.sampled_from((1.0, 8.0)))
        if draw(st.booleans()):
            gone = strategies.random_tensor(made.shape, seed + 9 + number) > 1.5
            made = made.masked_fill(gone, -torch.inf)
        leaves[name] = made.to(device, draw(st.sampled_from((dtype, torch.float32))))
        if draw(st.booleans()):
            leaves[name] = leaves[name].transpose(-1, -2).contiguous().transpose(-1, -2)

    def on_device(given):
        return None if given is None else torch.from_numpy(given).to(device)

    start, end, block = (on_device(given) for given in (start, end, block))
    mask = None
    if start is not None or end is not None:
        bounds = (start, end, ALWAYS), (end, start, FOREVER)
        mask = IntervalMask(*(torch.full_like(other, default) if given is None else given for given, other, default in bounds))
    if block is not None:
        size = draw(strategies.block_sizes())
        plain = mask is None and draw(st.booleans())
        packed = block if plain else BlockMask.from_bool(block, size)
        mask = packed if mask is None else mask & packed
    if lists is not None:
        entries, size, local, sinks = lists
        lists = IndexMask(on_device(entries), size, local=local, sink_keys=sinks)
        mask = BlockMask.from_bool(mask) if isinstance(mask, torch.Tensor) else mask
        mask = lists if mask is None else mask & lists
    # In float64 the truth is rounded like a result, and in sums of equal numbers all roundings may go one way.
    layouts = strategies.LAYOUTS if dtype == torch.float64 and magnitude < 1 else strategies.GRADIENT_LAYOUTS
    tiles = st.sampled_from((128, 256) if device == "cuda" else (32, 64, 96, 128, 160, 256))
    case = AttentionCase(
        **leaves, mask=mask, visible=torch.from_numpy(visible).to(device),
        scale=draw(st.sampled_from((None, None, 0.3, 1.0, -0.5, 0.0))), softcap=draw(st.sampled_from((0.0, 0.0, 0.5, 8.0, 30.0, 400.0))),
        dropout_p=draw(st.sampled_from((0.0, 0.0, 0.2, 0.9))), dropout_seed=draw(st.integers(-(2**63), 2**63 - 1)),
        deterministic=draw(st.booleans()), grad_seed=seed, grad_through_lse=draw(st.booleans()),
        grad_layout=draw(st.sampled_from(layouts)), query_offset=offset,
    )  # fmt: skip
    if draw(st.sampled_from((False, False, True))):
        case = strategies.with_expanded_biases(case)
    return Fuzzed(case, is_causal, start, end, block, lists, (draw(tiles), draw(tiles)))


# How each op is run -----------------------------------------------------------------------------------------------------------------


def through_the_public_function(fuzzed, gradients):
    """out, lse and gradients by name, of dmattn.attention."""
    case = dataclasses.replace(fuzzed.case, visible=None, is_causal=fuzzed.is_causal)
    leaves = {name: leaf.detach().requires_grad_(gradients) for name, leaf in case.leaves().items()}
    out, lse = case.with_leaves(leaves).call()
    results = {"out": out.detach(), "lse": lse.detach()}
    if gradients:
        grad_out, grad_lse = case.incoming_gradients()
        incoming = case.laid_out_gradients(grad_out.to(out.dtype), grad_lse.to(lse.dtype))
        incoming = incoming if case.grad_through_lse else incoming[:1]
        made = torch.autograd.grad((out, lse)[: len(incoming)], list(leaves.values()), incoming)
        results |= {f"grad_{name}": gradient for name, gradient in zip(leaves, made, strict=True)}
    return results


def through_the_ops(fuzzed, gradients, layout, wanted):
    """The same of torch.ops.dmattn.forward and backward. layout: of grad_out. wanted: whether biases get gradients."""
    case = fuzzed.case
    summed = brute_check.tolerance.accumulate_dtype(case.query.dtype)
    queries, keys = case.query.shape[2], case.key.shape[2]
    tables = (None,) * 4
    if fuzzed.block is not None:
        lengths_and_tiles = (queries, keys, 1, 1, *fuzzed.tile)
        tiles, rows, columns = torch.ops.dmattn.pack_tiles(fuzzed.block, *lengths_and_tiles)
        bits = torch.ops.dmattn.pack_bits(fuzzed.block, tiles, *lengths_and_tiles, int((tiles >= 2).sum()))
        tables = (tiles, rows, columns, bits)
    key_bias = None if case.key_bias is None else case.key_bias.to(summed)
    bias = None
    if case.bias is not None:
        bias = case.bias if case.bias.dtype in (summed, case.query.dtype) else case.bias.to(summed)
        bias = bias.expand(*bias.shape[:2], queries, keys)
    seed = torch.tensor([case.dropout_seed], device=case.query.device) if case.dropout_p > 0 else None
    scale = case.query.shape[3] ** -0.5 if case.scale is None else case.scale
    options = (fuzzed.is_causal, scale, case.softcap, case.dropout_p, case.deterministic)
    tensors = (case.query, case.key, case.value)
    lists = fuzzed.lists
    indices = None if lists is None else lists.indices
    given = (fuzzed.start, fuzzed.end, *tables, indices, None, key_bias, bias, seed, *options)
    last = () if lists is None else (False, 0, lists.block_size, lists.local, lists.sink_keys)
    out, lse, *rest = torch.ops.dmattn.forward(*tensors, *given, *last)
    results = {"out": out, "lse": lse}
    if gradients:
        grad_out, grad_lse = case.incoming_gradients()
        grad_out = strategies.laid_out(grad_out.to(out.dtype), layout)
        grad_lse = grad_lse.to(lse.dtype) if case.grad_through_lse else None
        need = [wanted and tensor is not None for tensor in (key_bias, bias)]
        made = torch.ops.dmattn.backward(grad_out, grad_lse, *tensors, out, lse, *given, *need, *rest, *last)
        results |= dict(zip(("grad_query", "grad_key", "grad_value", "grad_key_bias", "grad_bias"), made, strict=True))
        for name, needed in zip(("grad_key_bias", "grad_bias"), need, strict=True):
            if not needed:
                assert results.pop(name).numel() == 0
        if need[1]:  # one row that all queries share is a view of as many
            results["grad_bias"] = results["grad_bias"].sum_to_size(case.bias.shape)
    return results


def check_attention(data, device, gradients):
    fuzzed = data.draw(problems(device))
    directly, layout, wanted = (
        data.draw(st.booleans()) and fuzzed.case.query_offset is None,  # which is no argument of the ops
        data.draw(st.sampled_from(strategies.LAYOUTS[:3])),
        data.draw(st.booleans()),
    )
    with poisoned_memory(fuzzed.case.query):
        results = (
            through_the_ops(fuzzed, gradients, layout, wanted) if directly else through_the_public_function(fuzzed, gradients)
        )
    assert results["out"].dtype == fuzzed.case.query.dtype
    return brute_check.assert_right(fuzzed.case, results)


def check_forward(data, device):
    return check_attention(data, device, gradients=False)


def check_backward(data, device):
    return check_attention(data, device, gradients=True)


def check_dynamic(data, device):
    """dmattn.dynamic_mask_attention: the scores select the keys and are added to their logits."""
    draw, shape = data.draw, data.draw(shapes())
    dtype, seed, is_causal = draw(strategies.dtypes(device)), draw(strategies.seeds()), draw(st.booleans())
    window = draw(st.integers(1, 5) | st.integers(1, shape.Sk + 1) | st.sampled_from((64, 128, 256)))
    local, sink_keys = draw(beside(shape.Sk)) if is_causal else (0, 0)
    sizes = ((shape.H, shape.Sq, shape.D), (shape.Hkv, shape.Sk, shape.D), (shape.Hkv, shape.Sk, shape.Dv))
    tensors = [
        strategies.laid_out(
            strategies.random_tensor((shape.B, *size), seed + i, dtype, device), draw(st.sampled_from(strategies.LAYOUTS))
        )
        for i, size in enumerate(sizes)
    ]
    kind = draw(st.sampled_from(strategies.SCORE_KINDS))
    scores = strategies.make_scores(
        (shape.B, shape.Hkv, shape.Sk), kind, seed, draw(st.sampled_from((dtype, torch.float32))), device
    )
    visible = np.zeros((shape.B, shape.Hkv, shape.Sq, shape.Sk), dtype=bool)
    if shape.Sk > 0:
        chosen = brute_force.selected(brute_check.numbers(scores), window, is_causal, None, local, sink_keys)
        position = np.arange(shape.Sk - shape.Sq, shape.Sk)
        # Positions before the first key see nothing, unless one set of keys serves all.
        visible = chosen[:, :, position.clip(0)] & ((position >= 0) | (not is_causal))[:, None]
    visible = brute_force.by_query_head(visible, shape.B, shape.H).copy()
    case = AttentionCase(
        *tensors, visible=torch.from_numpy(visible).to(device), key_bias=scores, softcap=draw(st.sampled_from((0.0, 5.0))),
        dropout_p=draw(st.sampled_from((0.0, 0.0, 0.3))), dropout_seed=seed, grad_seed=seed, deterministic=draw(st.booleans()),
    )  # fmt: skip

    def call(query, key, value, mask, *, key_bias, bias, **options):
        return dmattn.dynamic_mask_attention(
            query, key, value, key_bias, window, **options | {"is_causal": is_causal}, local=local, sink_keys=sink_keys
        )

    return brute_check.assert_right(case, run(case, call))


def beside(length):
    """(local, sink_keys), both 0 half of the time."""
    return st.just((0, 0)) | st.tuples(st.integers(0, 9) | st.integers(0, length + 2), st.integers(0, 9) | st.just(2**40))


def make_scores(data, shape, device):
    """Scores [B, Hkv, Sk] in any dtype and layout, with ties, infinities and NaN."""
    random = data.draw(generators())
    made = random.standard_normal(shape)
    kind = data.draw(st.sampled_from(("random", "ties", "constant", "increasing", "decreasing", "signed zeros")))
    if kind == "ties":
        made = np.round(made * data.draw(st.sampled_from((0.5, 2.0))))
    elif kind == "constant":
        made = np.ones(shape)
    elif kind == "signed zeros":
        made = np.where(made > 0, 0.0, -0.0)
    elif kind != "random":
        made = np.sort(made, axis=2)[:, :, :: 1 if kind == "increasing" else -1]
    for bad in (-np.inf, np.nan, np.inf):
        if data.draw(st.sampled_from((False, False, True))):
            made = np.where(random.random(shape) < data.draw(st.sampled_from((0.05, 0.7))), bad, made)
    scores = torch.from_numpy(made.copy()).to(data.draw(st.sampled_from(strategies.CPU_DTYPES))).to(device)
    layout = data.draw(st.sampled_from(strategies.LAYOUTS))
    return strategies.laid_out(scores[..., None], layout)[..., 0] if layout in ("bshd", "strided") else scores


def check_select(data, device):
    """The visible sets of all queries, exactly; through IntervalMask.top_k and through the op."""
    length = data.draw(lengths())
    batch, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    while batch * heads * length * length > LARGEST_WORK and batch * heads > 1:
        batch, heads = max(1, batch - 1), max(1, heads - 1)
    scores = make_scores(data, (batch, heads, length), device)
    is_causal = data.draw(st.booleans())
    local, sink_keys = data.draw(beside(length)) if is_causal else (0, 0)
    least = 0 if local or sink_keys else 1
    window = data.draw(st.integers(least, 9) | st.integers(least, length + 2) | st.just(2**40))
    keys = np.arange(length)
    random = data.draw(generators())
    base = segment_end = mask = None
    kind = data.draw(st.sampled_from(("none", "documents", "padding", "both")))
    lead = data.draw(st.sampled_from((1, batch)))
    start = np.full((1, 1, length), ALWAYS)
    if kind != "none":
        run = np.sort(random.integers(0, data.draw(st.integers(1, 6)), (lead, length)), axis=1)
        ids = np.where(run == data.draw(st.integers(0, 6)), -1, run) if kind != "padding" else np.zeros((lead, length), int)
        real = random.integers(0, length + 1, (lead, 1)) if kind != "documents" else np.full((lead, 1), length)
        same = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, None, :]
        base = (same & (keys < real)[:, None, :])[:, None]
        last = np.stack([[(keys[ids[b] == ids[b, j]]).max() + 1 if ids[b, j] >= 0 else 0 for j in keys] for b in range(lead)])
        first = np.stack([[(keys[ids[b] == ids[b, j]]).min() for j in keys] for b in range(lead)])
        last, first = (x.reshape(lead, 1, length) for x in (last, first))
        beyond = np.array([0, ALWAYS, -1])[random.integers(0, 3, (lead, 1, length))]
        segment_end = np.where((keys < real)[:, None], last, beyond).astype(np.int32)
        segment_end = np.where((segment_end == length) & (random.random() < 0.5), FOREVER, segment_end).astype(np.int32)
        start = first if kind != "padding" else start
        mask = IntervalMask.documents(length, ids=torch.from_numpy(ids).to(device), is_causal=False)
        if kind != "documents":
            padding = IntervalMask.padding(length, torch.from_numpy(real[:, 0].astype(np.int32)).to(device))
            mask = padding if kind == "padding" else mask & padding
    expected = brute_force.selected(brute_check.numbers(scores), window, is_causal, base, local, sink_keys)
    if is_causal:
        start = keys
    if data.draw(st.booleans()):
        segments = None if segment_end is None else torch.from_numpy(segment_end).to(device)
        with poisoned_memory(scores):
            end = torch.ops.dmattn.select(scores, segments, window, is_causal, local, sink_keys).cpu().numpy()
    else:
        with poisoned_memory(scores):
            made = IntervalMask.top_k(scores, window, is_causal, mask, local=local, sink_keys=sink_keys)
        start, end = made.start.cpu().numpy(), made.end.cpu().numpy()
    assert end.dtype == np.int32
    assert end.shape == (batch, heads, length)
    start = np.broadcast_to(start, (1, 1, length)) if start.ndim == 1 else np.broadcast_to(start, (*start.shape[:2], length))
    visible = brute_force.visibility(batch, heads, length, length, start, end)
    assert np.array_equal(visible, expected), (
        f"{(visible != expected).sum()} elements differ, first {np.argwhere(visible != expected)[0]}"
    )
    return 0.0


def check_pack(data, device):
    """Tiles, lists and bits mean what was packed; through BlockMask and through the ops."""
    queries, keys = data.draw(lengths()), data.draw(lengths())
    lead = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    block = (
        data.draw(st.sampled_from((1, 1, 1, 2, 16, 33, 64, 128, 200))),
        data.draw(st.sampled_from((1, 1, 1, 2, 16, 33, 64, 128, 200))),
    )
    if data.draw(st.booleans()):
        block = (1, 1)
    table = data.draw(patterns((*lead, -(-queries // block[0]), -(-keys // block[1]))))
    expected = table.repeat(block[0], 2).repeat(block[1], 3)
    given = torch.from_numpy(table).to(device)
    if data.draw(st.booleans()):
        given = given.transpose(2, 3).contiguous().transpose(2, 3)
    tile = data.draw(st.sampled_from((32, 64, 96, 128, 256))), data.draw(st.sampled_from((32, 64, 96, 128, 256)))
    with poisoned_memory(given.float()):
        if data.draw(st.booleans()):
            size = data.draw(strategies.block_sizes())
            mask = BlockMask.from_bool(given, size) if block == (1, 1) else BlockMask.from_blocks(given, block)
            tiles, rows, columns, bits = mask.tiles, mask.rows, mask.columns, mask.bits
            queries, keys = mask.lengths
            assert np.array_equal(mask.to_bool().cpu().numpy(), expected)
        else:
            sizes = (queries, keys, *block, *tile)
            tiles, rows, columns = torch.ops.dmattn.pack_tiles(given, *sizes)
            bits = torch.ops.dmattn.pack_bits(given, tiles, *sizes, int((tiles >= 2).sum()))
            expected = expected[:, :, :queries, :keys]
    tiles, rows, columns, bits = (t.cpu().numpy() for t in (tiles, rows, columns, bits))
    assert np.array_equal(brute_force.unpacked(tiles, bits, queries, keys), expected)
    for table, lists in ((tiles, rows), (tiles.swapaxes(2, 3), columns)):
        for where in np.ndindex(table.shape[:3]):
            (occupied,) = np.nonzero(table[where])
            assert lists[where][0] == occupied.size
            assert np.array_equal(lists[where][1 : 1 + occupied.size], occupied)
    tile_q, tile_k = bits.shape[1], bits.shape[2] * 32
    for b, h, row, column in np.ndindex(tiles.shape):
        part = expected[b, h, row * tile_q : (row + 1) * tile_q, column * tile_k : (column + 1) * tile_k]
        kind = 0 if part.size == 0 or not part.any() else 1 if part.all() else 2
        assert min(tiles[b, h, row, column], 2) == kind, (b, h, row, column)
    partial = tiles[tiles >= 2] - 2
    assert np.array_equal(np.sort(partial), np.arange(partial.size)), "slots are not one each"
    return 0.0


# The drawn tests of other files, which run there in the profile ci.


def check_decode(data, device):
    test_decode.test_drawn_cases.hypothesis.inner_test(device, data)
    return 0.0


def check_cache(data, device):
    exact = torch.bfloat16 if device == "cuda" else torch.float64
    kind = data.draw(st.sampled_from(strategies.SCORE_KINDS))
    test_cache.test_any_cuts_of_any_history.hypothesis.inner_test(device, exact, data, kind)
    return 0.0


def check_rewind(data, device):
    exact = torch.bfloat16 if device == "cuda" else torch.float64
    kind = data.draw(st.sampled_from(("random", "ties", "increasing")))
    test_cache.test_rewind_is_as_if_the_tokens_had_never_come.hypothesis.inner_test(device, exact, data, kind)
    return 0.0


def check_index_top_k(data, device):
    test_indexer.test_lists_equal_brute_force.hypothesis.inner_test(
        device, torch.bfloat16 if device == "cuda" else torch.float32, data
    )
    return 0.0


def check_index_loss(data, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    test_index_loss.test_drawn_losses.hypothesis.inner_test(device, dtype, data.draw(test_index_loss.loss_cases()))
    return 0.0


def check_cases(data, device):
    """Sinks, every constructor of a mask, and all else that dmattn.testing draws."""
    test_backward.test_drawn_cases.hypothesis.inner_test(device, data)
    return 0.0


def check_reduce(data, device):
    test_reduce.test_any_shape.hypothesis.inner_test(device, data)
    return 0.0


CHECKS = {
    "select": check_select,
    "pack": check_pack,
    "forward": check_forward,
    "backward": check_backward,
    "dynamic": check_dynamic,
}
if SHARDS > 1:
    CHECKS |= {"decode": check_decode, "cache": check_cache, "rewind": check_rewind, "reduce": check_reduce}
    CHECKS |= {"index_top_k": check_index_top_k, "index_loss": check_index_loss, "cases": check_cases}


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("op", CHECKS)
def test_fuzz(device, op, shard):
    seed = FIRST_SEED + shard
    report = {
        "op": op,
        "seed": seed,
        "build": build(),
        "examples": 0,
        "failures": 0,
        "seconds": 0.0,
        "worst_error_of_allowed": 0.0,
    }

    @hypothesis.seed(seed * 100 + list(CHECKS).index(op))
    @hypothesis.settings(max_examples=max(1, hypothesis.settings.default.max_examples // SHARDS), database=None)
    @hypothesis.given(st.data())
    def draw_and_check(data):
        report["examples"] += 1
        report["worst_error_of_allowed"] = max(report["worst_error_of_allowed"], CHECKS[op](data, device))

    began = time.perf_counter()
    try:
        draw_and_check()
    except BaseException:
        report["failures"] += 1
        raise
    finally:
        report["seconds"] = round(time.perf_counter() - began, 2)
        write_log(report, device)


# The log ----------------------------------------------------------------------------------------------------------------------------


@functools.cache
def build():
    """A digest of the package that is tested, and of the tests that draw."""
    digest, package = hashlib.sha256(), Path(dmattn.__file__).parent
    for folder, pattern in ((package, "*.py"), (package, "*.so"), (Path(__file__).parents[1], "*.py")):
        for path in sorted(folder.rglob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def write_log(report, device):
    """Writes what a shard did beside the path that DMATTN_FUZZ_LOG names."""
    path = os.environ.get("DMATTN_FUZZ_LOG")
    if not path:
        return
    report |= {
        "torch": torch.__version__, "dmattn": dmattn.__version__, "hypothesis": hypothesis.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "family": os.environ.get("DMATTN_FAMILY", "auto"),
    }  # fmt: skip
    name = Path(path)
    name.parent.mkdir(parents=True, exist_ok=True)
    shard = name.with_name(f"{name.stem}-{report['family']}-{report['op']}-{report['build']}-{report['seed']}.part.json")
    shard.write_text(json.dumps(report) + "\n")


def merge_logs(path):
    """One summary of all shards beside a path: per family, op and build their seeds, examples, failures, seconds and the worst error."""
    path = Path(path)
    parts = [json.loads(part.read_text()) for part in sorted(path.parent.glob(f"{path.stem}-*.part.json"))]
    same = ("torch", "dmattn", "hypothesis", "device")
    summary = {name: sorted({part[name] for part in parts}) for name in same}
    summary = {name: values[0] if len(values) == 1 else values for name, values in summary.items()} | {"runs": []}
    key = ("family", "op", "build")
    for of_run in sorted({tuple(part[name] for name in key) for part in parts}):
        shards = [part for part in parts if tuple(part[name] for name in key) == of_run]
        summary["runs"].append(
            dict(zip(key, of_run, strict=True))
            | {"seeds": sorted(part["seed"] for part in shards)}
            | {name: sum(part[name] for part in shards) for name in ("examples", "failures")}
            | {"seconds": round(sum(part["seconds"] for part in shards), 1)}
            | {"worst_error_of_allowed": round(max(part["worst_error_of_allowed"] for part in shards), 3)}
        )
    with contextlib.suppress(KeyError):
        summary["commit"] = os.environ["DMATTN_COMMIT"]
    path.write_text(to_json(summary))
    return summary


if __name__ == "__main__":
    print(json.dumps(merge_logs(sys.argv[1]), indent=1))
