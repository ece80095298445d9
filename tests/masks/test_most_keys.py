"""The hint how many keys a query sees at most: which masks know it, what keeps it, which calls give it, and that it changes no result."""

from __future__ import annotations

import copy
import io
import itertools

import dmattn
import hypothesis
import pytest
import torch
from dmattn import BlockMask, IntervalMask
from dmattn.masks import collate
from dmattn.nn import DynamicMaskAttention, MaskBuffer, ScoreRecipe
from dmattn.testing import AttentionCase, assert_matches_reference, strategies
from hypothesis import strategies as st
from layers import layer_with
from programs import assert_exports, exported
from torch.export import Dim
from torch.utils import _pytree as pytree

tensor = strategies.random_tensor
MOST = 2**20
SK = 24
SCORES = tensor((1, 2, SK), 3)
ENDS = torch.tensor([0, 5, 6, SK])
DOCUMENTS, PADDING = IntervalMask.documents(SK, ENDS), IntervalMask.padding(SK, 20)
BEYOND = 2**63 - 1  # twice as much is more than an op takes


def window(count=6, **beside):
    return IntervalMask.top_k(SCORES, count, **beside)


# What masks know ----------------------------------------------------------------------------------------------------------------------

KNOWN = {
    "top_k": (window, 6),
    "top_k beside others": (lambda: window(local=3, sink_keys=2), 11),
    "top_k of no keys": (lambda: window(0, local=3), 3),
    "top_k, not causal": (lambda: window(is_causal=False), 6),
    "a window beyond all keys": (lambda: window(1000), 1000),
    "a window beyond all numbers": (lambda: window(BEYOND, local=BEYOND), MOST),
    "top_k in documents": (lambda: window(base=DOCUMENTS), 0),
    "top_k in padding": (lambda: window(base=PADDING), 0),
    "top_k in chunks": (lambda: window(base=IntervalMask.chunked(SK, 4)), 4),
    "top_k in large chunks": (lambda: window(base=IntervalMask.chunked(SK, 9)), 6),
    "top_k in a text": (lambda: window(base=IntervalMask.causal(SK)), 6),
    "causal": (lambda: IntervalMask.causal(SK), MOST),
    "sliding window": (lambda: IntervalMask.sliding_window(SK, 4), 5),
    "sliding window to both sides": (lambda: IntervalMask.sliding_window(SK, 4, 2), 7),
    "streaming": (lambda: IntervalMask.streaming(SK, 2, 5), 7),
    "chunked": (lambda: IntervalMask.chunked(SK, 4, is_causal=False), 4),
    "one chunk": (lambda: IntervalMask.chunked(SK, BEYOND), MOST),
    "documents": (lambda: DOCUMENTS, 0),
    "padding": (lambda: PADDING, 0),
    "prefix": (lambda: IntervalMask.prefix(SK, 4), 0),
    "tensors": (lambda: IntervalMask(window().start, window().end), 0),
    "one tensor": (lambda: IntervalMask.from_tensor(window().to_tensor()), 0),
    "booleans": (lambda: IntervalMask.from_bool(window().to_bool(SK, SK)), 0),
}  # fmt: skip


@pytest.mark.parametrize(("mask", "count"), KNOWN.values(), ids=KNOWN)
def test_what_a_mask_knows(mask, count):
    assert mask().most_keys == count
    assert type(mask().most_keys) is int


@hypothesis.given(st.data())
def test_no_query_sees_more(data):
    """At its own positions and before and behind them, and after intersecting, joining and moving masks."""
    shape = data.draw(strategies.shapes(max_length=60, min_length=1))
    first, second = (data.draw(strategies.interval_masks(shape)).mask for _ in range(2))
    for mask in (first, first & second, first.shift(3), IntervalMask.cat([first, second])):
        if mask.most_keys:
            seen = mask.to_bool(2 * shape.Sk, shape.Sk).sum(-1).max()
            assert int(seen) <= mask.most_keys


KEEPING = {
    "to": lambda mask: mask.to("meta"),
    "pin_memory": lambda mask: mask.cpu(),
    "index": lambda mask: mask[0],
    "slice": lambda mask: mask[:1],
    "tensor": lambda mask: mask[torch.tensor([0, 0])],
    "shift": lambda mask: mask.shift(3),
    "as_base": lambda mask: mask.as_base("causal"),
    "cat": lambda mask: IntervalMask.cat([mask, mask]),
    "stack": lambda mask: IntervalMask.stack([mask, mask])[1],
    "collate": lambda mask: collate([mask, mask]),
    "copy": copy.deepcopy,
    "tree": lambda mask: pytree.tree_map(torch.clone, mask),
    "buffer": lambda mask: MaskBuffer(mask).mask,
    "causality": lambda mask: IntervalMask.causal(SK) & mask,
    "itself": lambda mask: mask & mask,
    "part of blocks": lambda mask: (mask & BlockMask.from_bool(torch.ones(SK, SK, dtype=torch.bool))).interval,
}


@pytest.mark.parametrize("fn", KEEPING.values(), ids=KEEPING)
def test_what_keeps_it(fn):
    made = IntervalMask.cat([window(), window()])
    assert fn(window()).most_keys == 6
    if fn is not KEEPING["stack"] and fn is not KEEPING["collate"]:
        assert fn(made).most_keys == 6


def test_the_smaller_of_an_intersection_and_the_larger_of_a_batch():
    masks = {count: IntervalMask.sliding_window(SK, count - 1) for count in (3, 5, 9)}
    for few, many in itertools.permutations(masks, 2):
        assert (masks[few] & masks[many]).most_keys == min(few, many)
        assert IntervalMask.cat([masks[few], masks[many]]).most_keys == max(few, many)
    assert IntervalMask.stack(list(masks.values())).most_keys == 9
    # Documents may be far shorter than a window, and of a mask in a batch nothing may be known.
    assert (masks[3] & DOCUMENTS).most_keys == (DOCUMENTS & masks[3]).most_keys == 0
    assert IntervalMask.cat([masks[3], DOCUMENTS]).most_keys == IntervalMask.cat([DOCUMENTS, masks[3]]).most_keys == 0


def test_it_is_saved_and_loaded():
    file = io.BytesIO()
    torch.save(window(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True).most_keys == 6
    holder = MaskBuffer(IntervalMask.causal(SK)[:1])
    holder.load_state_dict(MaskBuffer(IntervalMask.streaming(SK, 2, 5)).state_dict())
    assert holder.mask.most_keys == 7


# What calls tell the ops --------------------------------------------------------------------------------------------------------------

PLACE, BACKWARD_PLACE = 20, 27  # of the hint among the ops' arguments


def tokens(length=SK, seed=0, heads=(4, 2)):
    sizes = ((1, heads[0], length, 16), (1, heads[1], length, 16), (1, heads[1], length, 16))
    return [tensor(size, seed + i).requires_grad_() for i, size in enumerate(sizes)]


@pytest.fixture
def told(monkeypatch):
    """What the ops forward and backward are told, in turn."""
    counts, below_autograd = [], dmattn.autograd.below_autograd
    assert torch.ops.dmattn.forward.default._schema.arguments[PLACE].name == "most_keys"
    assert torch.ops.dmattn.backward.default._schema.arguments[BACKWARD_PLACE].name == "most_keys"

    def call(op, inputs):
        counts.append(inputs[PLACE if op is torch.ops.dmattn.forward else BACKWARD_PLACE])
        return below_autograd(op, inputs)

    monkeypatch.setattr(dmattn.autograd, "below_autograd", call)
    return counts


CALLS = {
    "a mask": (lambda q, k, v: dmattn.attention(q, k, v, window()), 6),
    "a mask and causality": (lambda q, k, v: dmattn.attention(q, k, v, window(), is_causal=True), 6),
    "later queries": (lambda q, k, v: dmattn.attention(q, k, v, window(), query_offset=2), 6),
    "blocks beside it": (lambda q, k, v: dmattn.attention(q, k, v, window() & BlockMask.from_bool(torch.ones(SK, SK) > 0)), 0),
    "booleans": (lambda q, k, v: dmattn.attention(q, k, v, window().to_bool(SK, SK)), 0),
    "no mask": (lambda q, k, v: dmattn.attention(q, k, v, is_causal=True), 0),
    "a selection": (lambda q, k, v: dmattn.dynamic_mask_attention(q, k, v, SCORES, 6, local=2), 8),
    "a selection in chunks": (
        lambda q, k, v: dmattn.dynamic_mask_attention(q, k, v, SCORES, 6, base=IntervalMask.chunked(SK, 4)), 4
    ),
    "a selection in documents": (lambda q, k, v: dmattn.dynamic_mask_attention(q, k, v, SCORES, 6, base=DOCUMENTS), 0),
    "a selection of all": (lambda q, k, v: dmattn.dynamic_mask_attention(q, k, v, SCORES, BEYOND, sink_keys=9), MOST),
}  # fmt: skip


@pytest.mark.parametrize(("call", "count"), CALLS.values(), ids=CALLS)
def test_which_calls_give_it(told, call, count):
    call(*tokens()).sum().backward()
    assert told == [count, count]


def layers():
    """Layers of every way to attention, with the number of keys that a query sees at most, over all heads."""
    return {
        "plain": (DynamicMaskAttention(64, 4, window=6, num_kv_heads=2), 6),
        "beside local keys": (DynamicMaskAttention(64, 4, window=6, local=3, sink_keys=2), 11),
        "taught": (layer_with(64, 4, window=6, score="linear", select_only=True), 6),
        "heads that differ": (layer_with(64, 4, window=6, local=3, local_heads=2), 9),
        "recommended": (DynamicMaskAttention.recommended(64, 4, visible=8, recipe=ScoreRecipe(queries=4)), 14),
    }


@pytest.mark.parametrize("name", layers())
def test_the_layer_gives_it(told, name):
    layer, count = layers()[name]
    layer(tensor((2, SK, 64), 1)).sum().backward()
    assert told == [count, count]
    told.clear()
    layer(tensor((2, SK, 64), 1), base=DOCUMENTS)
    layer(tensor((2, SK, 64), 1), window=5)
    assert told == [0, count - layer.window + 5]


def counts_of(graph):
    """Programs leave out what is the default, 0."""
    return [(*node.args[PLACE:], 0)[0] for node in graph.nodes if "dmattn.forward" in str(node.target)]


@pytest.mark.parametrize("name", ["plain", "heads that differ", "recommended"])
def test_the_compiled_and_the_exported_layer_give_it(name):
    layer, count = layers()[name]
    graphs, x = [], tensor((2, SK, 64), 1)
    compiled = torch.compile(layer.eval(), fullgraph=True, backend=lambda module, _: graphs.append(module.graph) or module)
    assert torch.equal(compiled(x), layer(x))
    assert [counts_of(graph) for graph in graphs] == [[count]]
    assert counts_of(torch.export.export(layer, (x,)).graph) == [count]


def test_parts_of_dtensors_get_it():
    """A mask of plain tensors beside DTensors, and one of DTensors."""
    mesh_of = torch.distributed.device_mesh.init_device_mesh
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh, counts, forward = mesh_of("cpu", (1,)), [], dmattn.sharding.forward
        q, k, v = (distribute_tensor(x.detach(), mesh, [Shard(1)]) for x in tokens())
        mask = pytree.tree_map(lambda x: distribute_tensor(x.expand(1, 2, SK), mesh, [Shard(1)]), window())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dmattn.sharding, "forward", lambda inputs: counts.append(inputs[PLACE]) or forward(inputs))
            for given in (window(), mask):
                dmattn.attention(q, k, v, given)
    finally:
        torch.distributed.destroy_process_group()
    assert counts == [6, 6]


# Compiled and exported programs -------------------------------------------------------------------------------------------------------


def attend(q, k, v, mask):
    return dmattn.attention(q, k, v, mask)


def attend_within(q, k, v, mask):
    return dmattn.attention(q, k, v, mask & IntervalMask.sliding_window(k.shape[2], 30))


def attend_to_both(q, k, v, mask):
    return dmattn.attention(q, k, v, IntervalMask.cat([mask[:1], mask[:1]])[:1])


@pytest.mark.parametrize("fn", [attend, attend_within, attend_to_both])
def test_numbers_that_differ_compile_once(fn):
    def masks(length):
        scores = tensor((1, 2, length), 5)
        yield IntervalMask.top_k(scores, 7)
        yield IntervalMask.top_k(scores, 1)
        yield IntervalMask.top_k(scores, 16, local=9)
        yield IntervalMask.top_k(scores, 10**9)
        if fn is not attend_to_both:  # whose number has a condition: known of all, or of none
            mask = IntervalMask.top_k(scores, 5)
            yield IntervalMask(mask.start, mask.end)

    def run(call, length):
        return [call(*(x.detach() for x in tokens(length)), mask) for mask in masks(length)]

    compiled = torch.compile(fn, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(*(x.detach() for x in tokens(90)), next(masks(90)))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (90, 70):
            assert all(map(torch.equal, run(compiled, length), run(fn, length)))


def test_windows_that_a_program_leaves_open_compile_once():
    def fn(q, k, v, scores, count, local):
        mask = IntervalMask.top_k(scores, count, local=local) & IntervalMask.causal(k.shape[2])
        return dmattn.attention(q, k, v, mask, key_bias=scores), mask.most_keys

    compiled = torch.compile(fn, fullgraph=True, dynamic=True, backend="aot_eager")
    inputs = [x.detach() for x in (*tokens(), SCORES)]
    compiled(*inputs, 8, 6)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for sizes in ((9, 5), (5, 9), (41, 50)):
            (ours, known), (eager, expected) = compiled(*inputs, *sizes), fn(*inputs, *sizes)
            assert torch.equal(ours, eager)
            assert known == expected == sum(sizes)


class Attends(torch.nn.Module):
    def forward(self, q, k, v, mask):
        return dmattn.attention(q, k, v, mask)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_keeps_that_of_its_example(tmp_path, strict):
    """And that keys are in order. An example of start and end alone makes a program without hints."""
    example = [x.detach() for x in tokens()]
    few, many = (IntervalMask.top_k(SCORES[:, :1], count) for count in (6, SK))
    bare = IntervalMask(few.start, few.end)
    for mask, count in ((few, 6), (IntervalMask.causal(SK), MOST), (bare, 0)):
        assert counts_of(torch.export.export(Attends(), (*example, mask), strict=strict).graph) == [count]
        others = [(*example, other) for other in (few, many, DOCUMENTS, bare)]
        assert_exports(Attends(), (*example, mask), others, tmp_path / "attends.pt2", strict=strict)


class Makes(torch.nn.Module):
    def forward(self, scores):
        return IntervalMask.top_k(scores, scores.shape[2] // 2), IntervalMask.top_k(scores, 6)


def test_a_program_returns_masks(tmp_path):
    """A number that follows a length is none of the program's, and left out."""
    shapes, scores = ({2: Dim("length", min=8, max=4096)},), tensor((1, 2, 40), 7)
    half, six = exported(Makes(), (SCORES,), tmp_path / "makes.pt2", dynamic_shapes=shapes, strict=False)(scores)
    assert [half.most_keys, six.most_keys] == [0, 6]
    assert torch.equal(half.end, IntervalMask.top_k(scores, 20).end)


# Right or wrong, it changes no result -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("claimed", [1, 100, 700, MOST, -3])
@pytest.mark.parametrize("kind", ["few", "most", "sliding", "streaming", "any"])
@pytest.mark.parametrize("key_bias", [True, False])
@pytest.mark.parametrize(("heads", "size"), [((4, 2), 64), ((2, 2), 128), ((2, 1), 256)], ids=str)
def test_a_wrong_number_changes_no_result(device, dtype, claimed, kind, key_bias, heads, size):
    """Beside the specification on a GPU, where it picks kernels; keys that nobody sees hold NaN."""
    queries, keys = (700, 1000) if device != "cpu" else (40, 70)
    size = size if device != "cpu" else 16
    scores = tensor((2, heads[1], keys), 7, device=device)
    start, end = tensor((2, 2, heads[1], keys), 8, device=device).mul(keys / 2).add(keys / 2).int().sort(0).values
    mask = {
        "few": lambda: IntervalMask.top_k(scores, keys // 20),
        "most": lambda: IntervalMask.top_k(scores, keys * 9 // 10, is_causal=False),
        "sliding": lambda: IntervalMask.sliding_window(keys, keys // 3, 5, device=device),
        "streaming": lambda: IntervalMask.streaming(keys, 9, keys // 8, device=device),
        "any": lambda: IntervalMask(start, end),
    }[kind]()._replace(most_keys=claimed)  # fmt: skip
    query, key, value = (
        tensor((2, count, length, size), i, dtype, device)
        for i, (count, length) in enumerate(((heads[0], queries), (heads[1], keys), (heads[1], keys)))
    )
    visible = mask.to_bool(queries, keys)
    seen = visible.any(2).expand(2, heads[1], -1)
    key, value = (x.masked_fill(~seen[..., None], torch.nan) for x in (key, value))

    def hinted(query, key, value, _=None, **options):
        return dmattn.attention(query, key, value, mask, **options)

    given = {"key_bias": scores} if key_bias else {}
    assert_matches_reference(AttentionCase(query, key, value, visible=visible, **given), hinted)
