# ruff: noqa: E501  (one case a line, however long)
"""IndexMask against its definition: lists, local window and sinks, selection, intersection; as data; decoding; what is refused."""

from __future__ import annotations

import math
import re

import dmattn
import pytest
import torch
from dmattn import BlockMask, CombinedMask, IndexMask, IntervalMask
from dmattn.testing import AttentionCase, assert_matches_reference, per_query_head, strategies
from hypothesis import given
from hypothesis import strategies as st

tensor = strategies.random_tensor
INF = math.inf


def lists(*size, most=12, seed=0):
    return torch.randint(-1, most, size, generator=torch.Generator().manual_seed(seed))


def assert_says(mask, visible, shape):
    full = (shape.B, shape.H, shape.Sq, shape.Sk)
    made = per_query_head(mask.to_bool() if isinstance(mask, BlockMask) else mask.to_bool(shape.Sq, shape.Sk), shape.H)
    assert torch.equal(made.expand(full), per_query_head(visible, shape.H).expand(full))


# Meaning ----------------------------------------------------------------------------------------------------------------------------


def test_by_hand():
    mask = IndexMask(torch.tensor([[2, 0, 2, -1], [-1, 1, -1, -1], [-1, -1, -1, -1]]), 2, local=1, sink_keys=1)
    shown = [[0, 1, 2, 4, 5], [0, 2, 3], [0, 4]]  # queries stand at 2, 3 and 4 of 5 keys (2 * 2 + 1 is no key)
    rows = mask.to_bool(3, 5)[0, 0]
    assert [row.nonzero().flatten().tolist() for row in rows] == [[k for k in row if k < 5] for row in shown]
    causal = IndexMask(mask.indices, 2, is_causal=True, local=1, sink_keys=1).to_bool(3, 5)[0, 0]
    assert [row.nonzero().flatten().tolist() for row in causal] == [[0, 1, 2], [0, 2, 3], [0, 4]]
    assert mask.query_length == 3
    assert IndexMask(lists(3, 4)).to_bool(3, 0).shape == (1, 1, 3, 0)


@pytest.mark.parametrize("entry", [-(2**31), -2, 5, 2**20, 2**31 - 1])
@pytest.mark.parametrize("block", [1, 128])
def test_what_no_sequence_has_is_listed_nowhere(device, entry, block):
    """Where nobody reads the values."""
    indices = torch.full((1, 1, 3, 2), entry, dtype=torch.int32, device=device)
    indices[0, 0, 1, 0] = 0
    mask = IndexMask(lists(1, 1, 3, 2, most=1).to(device), block)._replace(indices=indices)
    expected = torch.zeros(3, 5, dtype=torch.bool, device=device)
    expected[1, :block] = True
    assert torch.equal(mask.to_bool(3, 5)[0, 0], expected)


@given(data=st.data())
def test_and_is_the_intersection(device, data):
    shape = data.draw(strategies.shapes(max_length=130))
    local, sink_keys = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 3))
    kinds = (strategies.index_masks, strategies.interval_masks, strategies.block_masks)
    both_kinds = strategies.combined_masks(shape, device, kinds=("interval", "block"))
    strategy = st.one_of(*(kind(shape, device) for kind in kinds), both_kinds)
    parts = data.draw(st.lists(strategy, min_size=2, max_size=4))
    made, visible = [], torch.ones((1, 1, shape.Sq, shape.Sk), dtype=torch.bool, device=device)
    for part in parts:
        mask, says = part.mask, part.visible
        if isinstance(mask, IndexMask):
            mask = mask._replace(local=local, sink_keys=sink_keys)
            says = strategies.listed_rows(mask, strategies.positions(shape.Sq, shape.Sk, device)[0], shape.Sk)
        made.append(mask)
        visible = visible & per_query_head(says, shape.H)
    both = made[0]
    for mask in made[1:]:
        both = both & mask
    assert_says(both.cut(shape.Sq, shape.Sk) if isinstance(both, BlockMask) else both, visible, shape)
    types = {type(mask) for mask in made}
    assert type(both) is (CombinedMask if len(types) > 1 else types.pop())


@pytest.mark.parametrize("causal", [(True, False), (False, True), (False, False)])
def test_an_intersection_is_causal_if_one_of_its_masks_is(causal):
    masks = [IndexMask(lists(6, 4, seed=seed), 2, is_causal=given) for seed, given in enumerate(causal)]
    both = masks[0] & masks[1]
    assert both.is_causal == any(causal)
    assert torch.equal(both.to_bool(6, 9), masks[0].to_bool(6, 9) & masks[1].to_bool(6, 9))


# Selection --------------------------------------------------------------------------------------------------------------------------


def best_by_hand(scores, k, position, keys, block, is_causal, base, local, sink_keys):
    """The places that one query selects, by sorting; base: bool [keys]."""

    def competes(place):
        own = [j for j in range(place * block, min(keys, place * block + block)) if not is_causal or j <= position]
        return any(bool(base[j]) and j >= sink_keys and not position - local < j <= position for j in own)

    real = [place for place in range(len(scores)) if scores[place] > -INF and competes(place)]
    return sorted(sorted(real, key=lambda place: (scores[place], place))[max(0, len(real) - k) :])


@given(data=st.data())
def test_selection_is_brute_force(device, data):
    block = data.draw(st.sampled_from((1, 1, 2, 4, 16)))
    shape = data.draw(strategies.shapes(max_length=24, max_batch=2))
    heads = data.draw(st.sampled_from((1, shape.Hkv, shape.H)))
    places = -(-shape.Sk // block)
    dtype = data.draw(st.sampled_from((torch.float32, torch.float64, torch.bfloat16)))
    given_scores = tensor((shape.B, heads, shape.Sq, places), data.draw(strategies.seeds()))
    if data.draw(st.booleans()):
        given_scores = (given_scores * 1.5).round()
        given_scores = torch.where(
            given_scores == 2, INF, torch.where(given_scores == -2, -INF, torch.where(given_scores == 3, math.nan, given_scores))
        )
    given_scores = given_scores.to(dtype)
    k, is_causal = data.draw(st.integers(0, places + 2)), data.draw(st.booleans())
    local, sink_keys = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 3))
    offset = data.draw(st.none() | st.integers(-3, shape.Sk + 3))
    base, shown = None, torch.ones(shape.B, shape.Sq, shape.Sk, dtype=torch.bool)
    if data.draw(st.booleans()) and offset is None:
        drawn = data.draw(strategies.padding_masks(shape) | strategies.document_masks(shape))
        base, shown = drawn.mask.to(device), drawn.visible[:, 0].expand(shape.B, -1, -1)
    mask = IndexMask.top_k(
        given_scores.to(device), k, block_size=block, key_length=shape.Sk, is_causal=is_causal, base=base, local=local, sink_keys=sink_keys,
        query_offset=offset,
    )  # fmt: skip
    assert (mask.block_size, mask.is_causal, mask.local, mask.sink_keys) == (block, is_causal, local, sink_keys)
    assert mask.shape == (shape.B, heads, shape.Sq, min(k, places))
    first = shape.Sk - shape.Sq if offset is None else offset
    for b, rows in enumerate(mask.indices.tolist()):
        for h, of_head in enumerate(rows):
            for i, entries in enumerate(of_head):
                expected = best_by_hand(
                    given_scores[b, h, i].tolist(), k, first + i, shape.Sk, block, is_causal, shown[b, i], local, sink_keys
                )  # fmt: skip
                assert entries == expected + [-1] * (len(entries) - len(expected))


def test_selection_some_queries_at_a_time(monkeypatch):
    scores, offset = tensor((2, 2, 37, 50), 1), torch.tensor([13, 4])
    expected = IndexMask.top_k(scores, 5, local=3, sink_keys=1, query_offset=offset).indices
    monkeypatch.setattr(dmattn.masks.detect, "PAIRS_AT_ONCE", 1000)
    assert torch.equal(IndexMask.top_k(scores, 5, local=3, sink_keys=1, query_offset=offset).indices, expected)
    for b in range(2):
        alone = IndexMask.top_k(scores[b : b + 1], 5, local=3, sink_keys=1, query_offset=int(offset[b])).indices
        assert torch.equal(alone, expected[b : b + 1])


def test_selection_has_no_gradient_and_compiles():
    scores = tensor((1, 2, 20, 20), 1).requires_grad_()
    eager = IndexMask.top_k(scores, 3, local=2)
    assert not eager.indices.requires_grad
    compiled = torch.compile(lambda s: IndexMask.top_k(s, 3, local=2), fullgraph=True, dynamic=True, backend="aot_eager")(scores)
    assert torch.equal(compiled.indices, eager.indices)


@given(data=st.data())
def test_from_bool_there_and_back(device, data):
    shape = data.draw(strategies.shapes(max_length=60))
    block = data.draw(st.sampled_from((1, 2, 16, 128)))
    table = data.draw(strategies.bool_patterns((shape.B, shape.Hkv, shape.Sq, -(-shape.Sk // block)), device))
    visible = table.repeat_interleave(block, 3)[..., : shape.Sk]
    longest = int(table.sum(-1).max()) if table.numel() else 0
    for room in (None, longest, longest + 3):
        mask = IndexMask.from_bool(visible, block, room)
        assert torch.equal(mask.to_bool(shape.Sq, shape.Sk), visible)
        assert mask.shape[3] == min(longest if room is None else room, table.shape[3])
        past = mask.indices < 0
        assert torch.equal(past, past.sort(dim=-1).values)  # -1 behind the others


# As data ----------------------------------------------------------------------------------------------------------------------------


def kinds():
    index = IndexMask(lists(3, 2, 20, 5), 2, is_causal=True, local=4, sink_keys=1)
    interval = IntervalMask.padding(24, torch.tensor([24, 9, 17]))
    block = BlockMask.from_bool(torch.rand(3, 1, 20, 24, generator=torch.Generator().manual_seed(4)) < 0.7, 32)
    return {
        "index": index,
        "interval & index": interval & index,
        "block & index": block & index,
        "all three": index & block & interval,
    }


def same(a, b):
    return type(a) is type(b) and torch.equal(a.to_bool(20, 24), b.to_bool(20, 24))


@pytest.fixture(params=list(kinds()))
def mask(request):
    return kinds()[request.param]


def test_joining_takes_what_it_can():
    a, b = IndexMask(lists(2, 2, 6, 3), 4), IndexMask(lists(1, 1, 6, 5), 4)
    joined = IndexMask.cat([a, b])
    assert joined.shape == (3, 2, 6, 5)
    assert joined.block_size == 4
    assert torch.equal(joined[:2].to_bool(6, 50), a.to_bool(6, 50))
    assert torch.equal(joined[2].to_bool(6, 50), b.to_bool(6, 50).expand(-1, 2, -1, -1))


# Counting and looking ---------------------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_pairs_are_counted(device, data):
    shape = data.draw(strategies.shapes(max_length=60, min_length=1))
    drawn, interval = data.draw(strategies.index_masks(shape, device)), data.draw(strategies.interval_masks(shape, device))
    full = (shape.B, shape.H, shape.Sq, shape.Sk)
    for mask, visible in (
        (drawn.mask, drawn.visible),
        (drawn.mask & interval.mask, per_query_head(drawn.visible, shape.H) & per_query_head(interval.visible, shape.H)),
    ):
        seen = per_query_head(visible, shape.H).expand(full)
        assert dmattn.visible_pairs(mask, shape.Sq, shape.Sk, batch=shape.B, heads=shape.H) == int(seen.sum())
        counted = dmattn.stats((shape.B, shape.H, shape.Sq, 16), mask, (shape.B, shape.Hkv, shape.Sk, 16), tile=(16, 16))
        assert torch.equal(counted.visible_pairs, seen.sum((2, 3)).cpu())
        live = sum(rows.any(2).sum(2) for rows in seen.split(16, 2))
        assert torch.equal(counted.live_keys, live.cpu())
        assert counted.kind == ("index" if mask is drawn.mask else "interval & index")


@given(data=st.data())
def test_weights_are_those_of_the_bool_mask(device, dtype, data):
    shape = data.draw(strategies.shapes(max_length=40, min_length=1))
    drawn = data.draw(strategies.index_masks(shape, device))
    query, key = (
        tensor((shape.B, shape.H, shape.Sq, shape.D), 1, dtype, device),
        tensor((shape.B, shape.Hkv, shape.Sk, shape.D), 2, dtype, device),
    )
    rows = data.draw(st.none() | st.lists(st.integers(0, shape.Sq - 1), min_size=1, max_size=4))
    made, expected = (dmattn.attention_weights(query, key, mask, rows=rows) for mask in (drawn.mask, drawn.visible))
    assert torch.equal(made, expected)
    offset = data.draw(st.integers(-3, shape.Sk))
    made = dmattn.attention_weights(query, key, drawn.mask, rows=rows, query_offset=offset)
    p = offset + torch.arange(shape.Sq, device=device)[:, None]
    expected = dmattn.attention_weights(query, key, strategies.listed_rows(drawn.mask, p, shape.Sk), rows=rows)
    assert torch.equal(made, expected)


@pytest.mark.parametrize(("head", "batch"), [(0, 0), (1, 2)])
def test_the_picture_is_the_mask(mask, head, batch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    (image,) = mask.plot(20, head, batch).get_images()
    assert torch.equal(torch.as_tensor(image.get_array()) % 2 == 1, mask.to_bool(20, image.get_array().shape[1])[batch, head])
    if isinstance(mask, IndexMask):
        (image,) = mask.plot(head=head, batch=batch, Sk=13).get_images()
        assert torch.equal(torch.as_tensor(image.get_array()) % 2 == 1, mask.to_bool(20, 13)[batch, head])


# Decoding ---------------------------------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_decoding_sees_what_is_listed(device, data):
    shape = data.draw(strategies.shapes(max_length=60))
    queries, page = data.draw(st.integers(1, 16)), 16
    dtype = data.draw(strategies.dtypes(device))
    paged = data.draw(st.booleans())
    capacity = -(-shape.Sk // page) * page if paged else shape.Sk
    drawn = data.draw(strategies.index_masks(strategies.Shape(shape.B, shape.H, shape.Hkv, queries, shape.Sk, 8, 8), device))
    lengths = torch.tensor(
        data.draw(st.lists(st.integers(0, shape.Sk), min_size=shape.B, max_size=shape.B)), dtype=torch.int32, device=device
    )
    mask = drawn.mask
    if data.draw(st.booleans()):  # without repeated entries, in any order, and known to be so
        indices = mask._without_repeats().indices
        order = torch.randperm(indices.shape[3], generator=torch.Generator().manual_seed(4)).to(device)
        mask = IndexMask._of_lists(indices[..., order], mask.block_size, mask.is_causal, mask.local, mask.sink_keys)
    query = tensor((shape.B, shape.H, queries, shape.D), 1, dtype, device)
    key, value = (tensor((shape.B, shape.Hkv, capacity, size), 2 + size, dtype, device) for size in (shape.D, shape.Dv))
    bias = data.draw(
        st.none() | strategies.key_biases(strategies.Shape(shape.B, shape.H, shape.Hkv, queries, capacity, 8, 8), dtype, device)
    )
    sinks = data.draw(st.none() | strategies.sinks_of_heads(shape, dtype, device))
    position = lengths.view(-1, 1, 1, 1) - queries + torch.arange(queries, device=device)[:, None]
    j = torch.arange(capacity, device=device)
    visible = strategies.listed_rows(drawn.mask, position, capacity) & (j <= position)

    def decode(query, key, value, mask, *, key_bias, scale, softcap, return_lse, sinks=None, **_):
        # What nobody sees is never read: it may hold anything.
        hidden = ~per_query_head(visible, query.shape[1]).expand(-1, query.shape[1], -1, -1).any(2).unflatten(
            1, (key.shape[1], -1)
        ).any(2)
        key, value = (given.masked_fill(hidden[..., None], math.nan) for given in (key, value))
        table = None
        if paged:
            order = torch.randperm(shape.B * (capacity // page), generator=torch.Generator().manual_seed(3)).to(device)
            table = order.view(shape.B, -1).int()
            pages = []
            for given in (key, value):
                own = given.unflatten(2, (-1, page)).permute(0, 2, 3, 1, 4).flatten(0, 1)  # [B * pages, page, Hkv, D]
                pages.append(torch.empty_like(own).index_copy_(0, order, own))
            key, value = pages
        return dmattn.decode_attention(
            query, key, value, lengths, mask=mask, page_table=table, key_bias=key_bias, sinks=sinks, scale=scale, softcap=softcap,
            return_lse=return_lse,
        )  # fmt: skip

    options = {
        "key_bias": bias,
        "softcap": data.draw(st.sampled_from((0.0, 5.0))),
        "sinks": sinks,
        "description": drawn.description,
    }
    case = AttentionCase(query, key, value, drawn.mask, visible, **options)
    assert_matches_reference(case, decode, gradients=False)


def test_decoding_keeps_the_stride_order_and_refuses_gradients():
    query = tensor((2, 3, 4, 16), 1).transpose(1, 2)
    key = tensor((2, 2, 30, 16), 2)
    lengths = torch.tensor([30, 7], dtype=torch.int32)
    mask = IndexMask(lists(1, 1, 3, 5))
    out = dmattn.decode_attention(query, key, key, lengths, mask=mask)
    assert out.stride() == dmattn.decode_attention(query, key, key, lengths).stride()
    compiled = torch.compile(dmattn.decode_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(query, key, key, lengths, mask=mask), out)
    with pytest.raises(RuntimeError, match="decode_attention has no gradient"):
        dmattn.decode_attention(query.requires_grad_(), key, key, lengths, mask=mask)


def test_a_page_that_is_none_empties_the_queries_that_see_it():
    pages = tensor((3, 16, 1, 8), 1)
    table, lengths = torch.tensor([[0, 1], [2, 7], [2, 7]], dtype=torch.int32), torch.tensor([20, 20, 20], dtype=torch.int32)
    mask = IndexMask(torch.tensor([0, 0, 17])[:, None, None, None], sink_keys=1)
    out, lse = dmattn.decode_attention(
        tensor((3, 1, 1, 8), 2), pages, pages, lengths, page_table=table, mask=mask, return_lse=True
    )
    assert torch.equal(out[2], torch.zeros_like(out[2]))
    assert (lse > -INF).flatten().tolist() == [True, True, False]


# What is refused ----------------------------------------------------------------------------------------------------------------------

MASK = IndexMask(lists(2, 1, 6, 3))
Q, K = tensor((2, 4, 6, 16), 1), tensor((2, 2, 12, 16), 2)
LENGTHS = torch.tensor([5, 12], dtype=torch.int32)
SCORES = tensor((1, 1, 6, 12), 3)
REFUSED = {
    "a list": (lambda: IndexMask([[0]]), TypeError, "indices: expected a torch.Tensor, got list"),
    "floats": (lambda: IndexMask(torch.zeros(2, 3)), TypeError, "indices: expected dtype int32, int64, got float32"),
    "one dimension": (lambda: IndexMask(lists(6)), ValueError, "indices: expected [B|1, H|Hkv|1, Sq, K], got shape [6]"),
    "blocks of 3": (lambda: IndexMask(lists(6, 3), 3), ValueError, "block_size: expected a power of two from 1 to 128, got 3"),
    "blocks of 256": (lambda: IndexMask(lists(6, 3), 256), ValueError, "block_size: expected a power of two from 1 to 128, got 256"),
    "blocks of half a key": (lambda: IndexMask(lists(6, 3), 0.5), TypeError, "block_size: expected a positive int, got float"),
    "causal by name": (lambda: IndexMask(lists(6, 3), is_causal=1), TypeError, "is_causal: expected a bool, got int"),
    "a window of -1": (lambda: IndexMask(lists(6, 3), local=-1), ValueError, "local: expected 0 <= local <= 1048576, got -1"),
    "sinks of -1": (lambda: IndexMask(lists(6, 3), sink_keys=-1), ValueError, "sink_keys: expected 0 <= sink_keys <= 1048576, got -1"),
    "an entry of -2": (lambda: IndexMask(torch.tensor([[0, -2]])), ValueError, "indices: expected numbers of keys below 1048576 in blocks of 1, or -1 for none, got -2"),
    "an entry of 2^13 blocks": (lambda: IndexMask(torch.tensor([[0, 2**13]]), 128), ValueError, "indices: expected numbers of keys below 1048576 in blocks of 128, or -1 for none, got 8192"),
    "an entry beyond int32": (lambda: IndexMask(torch.tensor([[0, 2**32]])), ValueError, "got 4294967296"),
    "other queries": (lambda: dmattn.attention(Q[:, :, :5], K, K, MASK), ValueError, "mask: expected an IndexMask for Sq=5, got one for Sq=6"),
    "other heads": (lambda: dmattn.attention(Q, K, K, IndexMask(lists(1, 3, 6, 2))), ValueError, "mask: expected [B|1, H|Hkv|1, Sq, K] with B=2, H=4, Hkv=2, Sq=6, Sk=12, got [1, 3, 6, 2]"),
    "another device": (lambda: dmattn.attention(Q, K, K, MASK.to("meta")), ValueError, "mask: expected device cpu like query, got meta"),
    "entries beyond the keys": (lambda: dmattn.attention(Q, K, K, IndexMask(torch.tensor([[6]]).expand(6, 1), 2)), ValueError, "mask: expected entries below 6 for Sk=12 keys in blocks of 2, got 6"),
    "to_bool of others": (lambda: MASK.to_bool(5, 12), ValueError, "Sq: expected the mask's own number of queries 6, got 5"),
    "pairs of others": (lambda: dmattn.visible_pairs(MASK, 5, 12), ValueError, "mask: expected an IndexMask for Sq=5, got one for Sq=6"),
    "windows that differ": (lambda: MASK & IndexMask(MASK.indices, local=3), ValueError, "other: expected an index mask with local=0 and sink_keys=0"),
    "queries that differ": (lambda: MASK & IndexMask(lists(5, 3)), ValueError, "other: expected index masks for Sq=6 queries, got one for 5"),
    "blocks of other queries": (lambda: MASK & BlockMask.from_bool(torch.ones(5, 12, dtype=torch.bool)), ValueError, "index: expected an IndexMask for Sq=5 queries like the block mask, got one for 6"),
    "one part": (lambda: CombinedMask(index=MASK), ValueError, "interval, block, index: expected at least two of them, got index"),
    "another part": (lambda: CombinedMask(index=K, block=MASK), TypeError, "block: expected a BlockMask, got IndexMask"),
    "& a tensor": (lambda: MASK & K, TypeError, "other: expected a mask, got a tensor; make it one by BlockMask.from_bool"),
    "interval & a tensor": (lambda: IntervalMask.causal(12) & K, TypeError, "other: expected a mask, got a tensor"),
    "& a number": (lambda: MASK & 3, TypeError, "unsupported operand type"),
    "joined blocks": (lambda: IndexMask.cat([MASK, IndexMask(MASK.indices, 4)]), ValueError, "masks: expected one block_size, got"),
    "joined causality": (lambda: IndexMask.cat([MASK, IndexMask(MASK.indices, is_causal=True)]), ValueError, "masks: expected one is_causal, got False and True"),
    "joined parts": (lambda: CombinedMask.cat([MASK & IntervalMask.causal(12), MASK & BlockMask.from_bool(torch.ones(6, 12, dtype=torch.bool))]), ValueError, "masks: expected each to be interval & index, got block & index"),
    "a part of a block": (lambda: IndexMask.from_bool(torch.tensor([[True, False]]), 2), ValueError, "mask: expected blocks of 2 keys that are visible whole or not at all"),
    "too little room": (lambda: IndexMask.from_bool(torch.ones(1, 3, dtype=torch.bool), 1, 2), ValueError, "max_entries: expected room for the longest list, 3, got 2"),
    "no values": (lambda: IndexMask.from_bool(torch.ones(1, 3, dtype=torch.bool, device="meta")), ValueError, "max_entries: expected a number where the mask has no values that can be read"),
    "scores of rank 3": (lambda: IndexMask.top_k(SCORES[0], 2), ValueError, "scores: expected 4 dimensions [B|1, H|Hkv|1, Sq, n], got shape [1, 6, 12]"),
    "scores of integers": (lambda: IndexMask.top_k(SCORES.int(), 2), TypeError, "scores: expected dtype"),
    "scores of other blocks": (lambda: IndexMask.top_k(SCORES, 2, block_size=2, key_length=22), ValueError, "scores: expected n=11 for 22 keys in blocks of 2, got [1, 1, 6, 12]"),
    "k of -1": (lambda: IndexMask.top_k(SCORES, -1), ValueError, "k: expected an int >= 0, got -1"),
    "a base of blocks": (lambda: IndexMask.top_k(SCORES, 2, base=MASK), TypeError, "base: expected an IntervalMask, got IndexMask"),
    "a base of other keys": (lambda: IndexMask.top_k(SCORES, 2, base=IntervalMask.causal(11)), ValueError, "base: expected a mask for 12 keys, got one for 11"),
    "decode intervals": (lambda: dmattn.decode_attention(Q, K, K, LENGTHS, mask=IntervalMask.causal(12)), TypeError, "mask: expected an IndexMask, got IntervalMask"),
    "decode other queries": (lambda: dmattn.decode_attention(Q[:, :, :5], K, K, LENGTHS, mask=MASK), ValueError, "mask: expected an IndexMask for Sq=5, got one for Sq=6"),
    "varlen blocks": (lambda: dmattn.varlen_attention(Q[0].transpose(0, 1), Q[0].transpose(0, 1), Q[0].transpose(0, 1), torch.tensor([0, 6]), mask=BlockMask.from_bool(torch.ones(6, 6, dtype=torch.bool))), TypeError, "mask: expected an IntervalMask, an IndexMask or interval & index, got BlockMask"),
    "heads of torch's": (lambda: dmattn.nn.MultiheadAttention(16, 2)(K[0], K[0], K[0], mask=MASK & IntervalMask.causal(12)), TypeError, "mask: expected an IntervalMask, a BlockMask or both joined, got one with an IndexMask"),
    "keys in blocks of 3": (lambda: MASK.keys(3), ValueError, "unit: expected a divisor of block_size"),
    "keys in blocks of 0.5": (lambda: MASK.keys(0.5), TypeError, "unit: expected a positive int, got float"),
    "a picture of others": (lambda: MASK.plot(5), ValueError, "Sq: expected the mask's own number of queries 6, got 5"),
}  # fmt: skip


@pytest.mark.brief
@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


@pytest.mark.parametrize("shape", [((1 << 20) + 1, 1), (1, (1 << 20) + 1)])
def test_lists_longer_than_sequences_are_refused(shape):
    with pytest.raises(ValueError, match=r"indices: expected \[B\|1, H\|Hkv\|1, Sq, K\], got shape"):
        IndexMask(torch.zeros(1, 1, dtype=torch.int32).expand(shape))
