"""Decoding: a few queries over a cache of keys, in one piece and in pages, against brute force and against itself."""

from __future__ import annotations

import dataclasses
import math

import brute_check
import dmattn
import pytest
import torch
from dmattn import IndexMask
from dmattn.testing import AttentionCase, per_query_head, poisoned_memory, strategies
from hypothesis import given
from hypothesis import strategies as st
from programs import assert_compiles_once, exported

ops = torch.ops.dmattn
tensor = strategies.random_tensor
INF = math.inf


@dataclasses.dataclass(frozen=True)
class Decode:
    """One problem: caches [B, Hkv, Smax, D or Dv] that hold NaN behind each sequence's length, and what else decode_attention takes."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    lengths: torch.Tensor
    key_bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    softcap: float = 0.0
    scale: float | None = None
    mask: IndexMask | None = None

    def call(self, **changes):
        """(out, lse), out of poisoned memory."""
        options = {
            "key_bias": self.key_bias,
            "sinks": self.sinks,
            "softcap": self.softcap,
            "scale": self.scale,
            "mask": self.mask,
            **changes,
        }
        with poisoned_memory(self.query):
            key, value = options.pop("key", self.key), options.pop("value", self.value)
            return dmattn.decode_attention(self.query, key, value, self.lengths, return_lse=True, **options)

    def row(self, b):
        """The problem of one sequence alone."""
        bias = self.key_bias if self.key_bias is None or self.key_bias.shape[0] == 1 else self.key_bias[b : b + 1]
        rows = (t[b : b + 1].clone() for t in (self.query, self.key, self.value, self.lengths))
        return Decode(*rows, bias, self.sinks, self.softcap, self.scale)

    def visible(self):
        """bool [B, 1, T, Smax], or with lists [B, H|Hkv|1, T, Smax], by the definition."""
        queries, capacity = self.query.shape[2], self.key.shape[2]
        length = self.lengths.long().clamp(0, capacity).view(-1, 1, 1, 1)
        position = length - queries + torch.arange(queries, device=length.device).view(-1, 1)
        key = torch.arange(capacity, device=length.device)
        if self.mask is None:
            return key <= position
        block, indices = self.mask.block_size, self.mask.indices.long()
        listed = (indices[..., None] * block + torch.arange(block, device=length.device)).flatten(3)
        listed = torch.where((listed < 0) | (listed >= capacity), capacity, listed)
        seen = torch.zeros(*listed.shape[:3], capacity + 1, dtype=torch.bool, device=length.device).scatter(3, listed, True)
        return (seen[..., :capacity] | (position - self.mask.local < key) | (key < self.mask.sink_keys)) & (key <= position)

    def case(self, with_sinks):
        """The same for brute force: a sink is one more key, of zeros, with a bias and no value."""
        key, value, bias, visible = self.key.nan_to_num(), self.value.nan_to_num(), self.key_bias, self.visible()
        if with_sinks and self.sinks is not None:
            batch, heads, *_ = self.query.shape
            key, value = (torch.cat([t, torch.zeros_like(t[:, :, :1])], 2) for t in (key, value))
            bias = torch.zeros(1, 1, self.key.shape[2], device=key.device) if bias is None else bias
            bias = bias.repeat_interleave(heads // bias.shape[1], 1).expand(batch, -1, -1).nan_to_num()
            bias = torch.cat([bias, self.sinks.to(bias.dtype).view(1, -1, 1).expand(batch, -1, 1)], 2)
            visible = torch.cat([visible, visible.any(-1, keepdim=True)], 3)
        bias = None if bias is None else bias.nan_to_num(neginf=-INF)
        return AttentionCase(self.query, key, value, visible=visible, key_bias=bias, scale=self.scale, softcap=self.softcap)


def make(device, dtype, lengths, H=4, Hkv=2, T=1, Smax=300, D=16, Dv=24, seed=0, bias=False, sinks=False, **options):
    B = len(lengths)
    summed = torch.float64 if dtype == torch.float64 else torch.float32
    given = Decode(
        tensor((B, H, T, D), seed, dtype, device),
        tensor((B, Hkv, Smax, D), seed + 1, dtype, device),
        tensor((B, Hkv, Smax, Dv), seed + 2, dtype, device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        tensor((B, Hkv, Smax), seed + 3, summed, device) if bias else None,
        tensor((H,), seed + 4, summed, device) if sinks else None,
        **options,
    )
    for b, length in enumerate(lengths):
        for cache in (given.key, given.value):
            cache[b, :, max(0, length) :] = torch.nan
        if bias:
            given.key_bias[b, :, max(0, length) :] = torch.nan
    return given


def assert_right(given, results=None):
    out, lse = given.call() if results is None else results
    assert out.dtype == given.query.dtype
    if given.sinks is None:
        brute_check.assert_right(given.case(False), {"out": out, "lse": lse})
    else:  # sinks take a share of out, but none of lse
        brute_check.assert_right(given.case(True), {"out": out})
        brute_check.assert_right(given.case(False), {"lse": lse})
    empty = ~per_query_head(given.visible().any(-1, keepdim=True), lse.shape[1])[..., 0].expand(lse.shape)
    assert (lse[empty] == -INF).all()
    assert (out[empty] == 0).all()
    return out, lse


def paged(given, page_size, seed=0, spare=3):
    """Caches as pools of pages in random order, other pages NaN, and the table, whose unused entries point nowhere."""
    batch, heads, capacity, _ = given.key.shape
    per_sequence = capacity // page_size
    assert per_sequence * page_size == capacity
    order = torch.randperm(batch * per_sequence + spare, generator=torch.Generator().manual_seed(seed))
    table = order[: batch * per_sequence].view(batch, per_sequence).to(torch.int32).to(given.key.device)
    pools = []
    for cache in (given.key, given.value):
        pool = cache.new_full((len(order), page_size, heads, cache.shape[3]), torch.nan)
        pool[table.flatten().long()] = cache.transpose(1, 2).reshape(-1, page_size, heads, cache.shape[3])
        pools.append(pool)
    used = -(-given.lengths.clamp(0, capacity) // page_size)
    unused = torch.arange(per_sequence, device=table.device) >= used[:, None]
    return *pools, torch.where(unused, torch.tensor(2**31 - 1, dtype=torch.int32, device=table.device), table)


def dtypes(device):
    return strategies.CUDA_DTYPES if device == "cuda" else [torch.float64, torch.float32, torch.bfloat16, torch.float16]


SHAPES = {
    "one split": {"lengths": [0, 1, 60, 64, 100, 128], "Smax": 128},
    "splits": {"lengths": [0, 1, 128, 129, 513, 601], "Smax": 601},
    "beyond the capacity": {"lengths": [-1, -(2**31), 301, 2**31 - 1], "Smax": 300},
    "several queries": {"lengths": [0, 1, 4, 5, 6, 129, 300], "T": 5, "Smax": 300},
    "16 queries": {"lengths": [15, 16, 17, 540], "T": 16, "Smax": 540, "H": 6, "Hkv": 2},
    "chunks that only later queries see whole": {"lengths": [18, 65, 130], "T": 16, "H": 2},
    "more rows than a tile": {"lengths": [15, 300], "T": 16, "H": 12, "Hkv": 1},
    "one head a key head": {"lengths": [20, 300], "H": 3, "Hkv": 3},
    "wide": {"lengths": [20, 300], "D": 256, "Dv": 248, "T": 2},
    "wide, many rows": {"lengths": [20, 540], "D": 256, "Dv": 256, "T": 9, "Smax": 540, "H": 8},
    "middling": {"lengths": [20, 300], "D": 72, "Dv": 128, "H": 32, "Hkv": 4},
    "value wider": {"lengths": [20, 300], "D": 8, "Dv": 200},
    "every option": {"lengths": [0, 77, 600], "T": 3, "Smax": 600, "bias": True, "sinks": True, "softcap": 2.0, "scale": 0.3},
    "negative scale": {"lengths": [77], "scale": -0.5, "bias": True},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(device, shape):
    for dtype in dtypes(device):
        assert_right(make(device, dtype, **shape))


@pytest.mark.parametrize("capacity", [4500, 70_001, 1 << 20])
def test_few_keys_far_apart(device, dtype, capacity):
    """Brute force over the keys that a bias of -inf does not hide; all splits but those are empty."""
    few = make(device, dtype, [200, 200], Smax=200, bias=True, sinks=True)
    places = torch.randperm(capacity, generator=torch.Generator().manual_seed(0))[:200]
    places[:2] = torch.tensor([0, capacity - 1])
    places = places.sort().values.to(device)
    bias = few.key_bias.new_full((2, 2, capacity), -INF)
    bias[:, :, places] = few.key_bias
    caches = []
    for cache in (few.key, few.value):
        caches.append(cache.new_ones((2, 2, 1, cache.shape[3])).repeat(1, 1, capacity, 1))
        caches[-1][:, :, places] = cache
    lengths = torch.tensor([capacity, int(places[150])], dtype=torch.int32, device=device)
    results = dataclasses.replace(few, lengths=lengths).call(key=caches[0], value=caches[1], key_bias=bias)
    assert_right(dataclasses.replace(few, lengths=torch.tensor([200, 150], dtype=torch.int32, device=device)), results)


@given(data=st.data())
def test_drawn_cases(device, data):
    draw = data.draw
    queries, capacity = draw(st.integers(1, 16)), draw(st.integers(1, 300) | st.integers(500, 600))
    kv_heads, group, batch = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 3))
    edges = st.sampled_from([0, 1, queries - 1, queries, 128, 512, capacity - 1, capacity, capacity + 1])
    lengths = draw(st.lists(edges | st.integers(0, capacity), min_size=batch, max_size=batch))
    case = make(
        device, draw(st.sampled_from(dtypes(device))), lengths, kv_heads * group, kv_heads, queries, capacity,
        draw(strategies.head_dims()), draw(strategies.head_dims()), draw(st.integers(0, 1000)), draw(st.booleans()), draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 1.5])),
    )  # fmt: skip
    out, lse = assert_right(case)
    for b in range(batch):  # alone
        assert_equal(case.row(b).call(), (out[b : b + 1], lse[b : b + 1]))
    if page_size := draw(st.sampled_from([0, 16, 48])):
        room = -capacity % page_size
        wider = dataclasses.replace(
            case,
            key=torch.nn.functional.pad(case.key, (0, 0, 0, room), value=torch.nan),
            value=torch.nn.functional.pad(case.value, (0, 0, 0, room), value=torch.nan),
            lengths=case.lengths.clamp(max=capacity),
            key_bias=None if case.key_bias is None else torch.nn.functional.pad(case.key_bias, (0, room), value=torch.nan),
        )
        key, value, table = paged(wider, page_size)
        assert_equal(wider.call(key=key, value=value, page_table=table), wider.call())


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


# Caches ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bshd", "sliced", "strided"])
def test_strided_caches(device, dtype, layout):
    case = make(device, dtype, [3, 300, 129], T=2, bias=True)
    key, value = (strategies.laid_out(cache, layout) for cache in (case.key, case.value))
    assert_equal(case.call(key=key, value=value), case.call())


@pytest.mark.parametrize("page_size", [16, 48, 128, 768])
def test_pages_in_any_order_give_the_same_bits(device, dtype, page_size):
    case = make(device, dtype, [0, 1, 700, 768, 5], Smax=768, Dv=16, T=3, bias=True, sinks=True)
    key, value, table = paged(case, page_size)
    assert_equal(case.call(key=key, value=value, page_table=table), case.call())
    between = torch.stack([key, value], 1)  # keys and values of a page side by side
    assert_equal(case.call(key=between[:, 0], value=between[:, 1], page_table=table), case.call())
    wide = torch.nn.functional.pad(table, (0, 3))[:, :-3]
    assert_equal(case.call(key=key, value=value, page_table=wide), case.call())


@pytest.mark.parametrize("entry", [-1, 21, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("place", [0, 3, 8])
def test_a_page_number_out_of_range_empties_its_sequence(device, dtype, entry, place):
    case = make(device, dtype, [144, 144], Smax=144, T=2, bias=True, sinks=True)
    key, value, table = paged(case, 16)
    assert len(key) == 21
    out, lse = case.call(key=key, value=value, page_table=table)
    table[0, place] = entry
    wrong_out, wrong_lse = case.call(key=key, value=value, page_table=table)
    assert (wrong_out[0] == 0).all()
    assert (wrong_lse[0] == -INF).all()
    assert_equal((wrong_out[1], wrong_lse[1]), (out[1], lse[1]))
    shorter = dataclasses.replace(case, lengths=torch.tensor([16 * place, 144], dtype=torch.int32, device=device))
    assert_equal(shorter.call(key=key, value=value, page_table=table), shorter.call())


@pytest.mark.parametrize("place", [0, 7, 100, 149])
@pytest.mark.parametrize("heads", [4, 32])
def test_a_bad_page_of_a_listed_key_empties_all_rows(device, dtype, heads, place):
    """Rows of more than one warp share the keys; pages that no list names are not looked at."""
    query, pool = tensor((1, heads, 2, 64), 0, dtype, device), tensor((200, 16, 1, 64), 1, dtype, device)
    table = torch.randperm(200, generator=torch.Generator().manual_seed(0))[None, :150].int().to(device)
    lengths = torch.tensor([150 * 16], dtype=torch.int32, device=device)
    one_of_each_page = torch.randperm(150, generator=torch.Generator().manual_seed(1)).to(device) * 16
    mask = IndexMask(one_of_each_page.expand(2, 150))

    def call(mask):
        return dmattn.decode_attention(query, pool, pool, lengths, page_table=table, mask=mask, return_lse=True)

    rows = pool[table[0].long()].flatten(0, 1).transpose(0, 1)[None]
    expected = dmattn.decode_attention(query, rows, rows, lengths, mask=mask, return_lse=True)
    assert_equal(call(mask), expected)
    page = int(one_of_each_page[place]) // 16
    table[0, page] = 200
    out, lse = call(mask)
    assert not out.any()
    assert (lse == -INF).all()
    others = IndexMask(one_of_each_page[one_of_each_page != page * 16].expand(2, 149))
    assert_equal(call(others), dmattn.decode_attention(query, rows, rows, lengths, mask=others, return_lse=True))


# Lists ----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [100, 1500])
@pytest.mark.parametrize("lengths", [[3000], [*range(1, 3001, 250)]], ids=["one", "many"])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("own", [2, 4], ids=["lists of key heads", "of each head"])
def test_lists_of_many_keys(device, dtype, keys, lengths, queries, own):
    """More keys than one block reads: blocks, clusters, and parts that are added up."""
    case = make(device, dtype, lengths, T=queries, Smax=3000, bias=True, sinks=True)
    scores = tensor((len(lengths), own, queries, 3000), 7, torch.float32, device)
    position = case.lengths.view(-1, 1, 1, 1) - queries + torch.arange(queries, device=device)[:, None]
    scores = scores.masked_fill(torch.arange(3000, device=device) > position, -INF)
    chosen = IndexMask.top_k(scores, keys, is_causal=False)
    repeated = IndexMask(chosen.indices.repeat(1, 1, 1, 2).flip(3), local=7, sink_keys=2)
    assert_right(dataclasses.replace(case, mask=chosen))
    assert_right(dataclasses.replace(case, mask=repeated))


def test_a_bias_of_each_head_beside_lists_that_heads_share(device, dtype):
    case = make(device, dtype, [300, 40], H=8, T=2, D=64, Dv=64)
    bias = tensor((2, 8, 300), 7, torch.float64 if dtype == torch.float64 else torch.float32, device)
    lists = torch.randint(-1, 19, (2, 2, 2, 9), generator=torch.Generator().manual_seed(0)).to(device)
    assert_right(dataclasses.replace(case, key_bias=bias, mask=IndexMask(lists, 16, local=5)))


# Numbers --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", [-INF, -50.0, 0.0, 80.0, 1e30, INF])
def test_sinks(device, dtype, sink):
    case = make(device, dtype, [0, 1, 700], Smax=700, T=2)
    plain, lse = case.call()
    out, with_sinks = case.call(sinks=torch.full((4,), sink, device=device))
    assert torch.equal(with_sinks, lse)
    if sink == -INF:
        assert torch.equal(out, plain)
    elif sink > 50.0:
        assert (out.abs() < 1e-20).all()
    else:
        assert_right(dataclasses.replace(case, sinks=torch.full((4,), sink, device=device)))


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (1, 4), (3, 1), (3, 4)])
def test_key_bias_of_every_shape(device, dtype, shape):
    case = make(device, dtype, [0, 133, 700], Smax=700, T=3)
    assert_right(dataclasses.replace(case, key_bias=tensor((*shape, 700), 5, device=device)))


def test_a_bias_of_minus_infinity_hides(device, dtype):
    case = make(device, dtype, [300, 300, 300], bias=True)
    case.key_bias[0, :, ::2] = -INF
    case.key_bias[1, :, 5:] = -INF
    case.key_bias[2] = -INF
    out, lse = case.call()
    assert (out[2] == 0).all()
    assert (lse[2] == -INF).all()
    rows = dataclasses.replace(case, lengths=torch.tensor([300, 5, 0], dtype=torch.int32, device=device))
    brute_check.assert_right(rows.case(False), {"out": out, "lse": lse})


@pytest.mark.parametrize("huge", [-1e9, 1e9, -1e30])
def test_huge_biases(device, dtype, huge):
    case = make(device, dtype, [700, 3], Smax=700)
    bias = torch.full((1, 1, 700), huge, device=device)
    bias[..., ::2] += 128.0 if abs(huge) < 1e10 else 0.0
    out, lse = case.call(key_bias=bias)
    case = dataclasses.replace(case, key_bias=bias).case(False)
    brute_check.assert_right(case, {"out": out, "lse": lse}, rounded=True)


@pytest.mark.parametrize("finite", [0, 1, 40, 600], ids=lambda n: f"{n} finite")
def test_a_logit_of_nan_makes_its_head_nan(device, dtype, finite):
    """Whatever else the row sees, in the same split or in another one; other heads do not notice."""
    query, key, value = (tensor((1, heads, n, 16), i, dtype, device) for i, (heads, n) in enumerate(((4, 1), (2, 900), (2, 900))))
    bias = torch.full((1, 2, 900), -INF, device=device)
    bias[:, 0, :finite] = bias[:, 1] = 0.0
    bias[:, 0, 700] = torch.nan
    lengths = torch.tensor([900], device=device, dtype=torch.int32)
    out, lse = dmattn.decode_attention(query, key, value, lengths, key_bias=bias, return_lse=True)
    assert out[0, :2].isnan().all()
    assert lse[0, :2].isnan().all()
    assert out[0, 2:].isfinite().all()
    assert lse[0, 2:].isfinite().all()


@pytest.mark.gpu
def test_values_that_only_later_queries_see_may_be_infinite(device, dtype):
    """Such a key is alone in its chunk, of 16 keys, so that all the chunk adds to the other query is 0 times infinity."""
    case = make(device, dtype, [145], T=2, Smax=145)
    out, lse = case.call()
    value = case.value.clone()
    value[:, :, 144] = INF
    bad_out, bad_lse = case.call(value=value)
    assert_equal((bad_out[:, :, :1], bad_lse), (out[:, :, :1], lse))
    assert not bad_out[:, :, 1].isfinite().any()


def test_nothing_at_all(device, dtype):
    for sizes in (
        {"lengths": []},
        {"lengths": [0, 3], "Smax": 0},
        {"lengths": [5], "H": 0, "Hkv": 0},
        {"lengths": [5], "H": 0, "Hkv": 2},
    ):
        out, lse = make(device, dtype, **sizes).call()
        assert (out == 0).all()
        assert (lse == -INF).all()
    empty = make(device, dtype, [0, 3], Smax=0)
    for pages, entries in ((0, 0), (0, 1), (2, 0)):
        pools = (torch.zeros(pages, 16, 2, size, dtype=dtype, device=device) for size in (16, 24))
        table = torch.zeros(2, entries, dtype=torch.int32, device=device)
        out, lse = dmattn.decode_attention(empty.query, *pools, empty.lengths, page_table=table, return_lse=True)
        assert (out == 0).all()
        assert (lse == -INF).all()


@pytest.mark.parametrize("heads", [(4, 2), (32, 4)])
def test_not_causal(device, dtype, heads):
    """The op for callers whose queries all see every key."""
    case = make(device, dtype, [0, 2, 300], H=heads[0], Hkv=heads[1], T=4)
    out, lse = ops.decode(case.query, case.key, case.value, case.lengths, None, None, None, None, False, 0.25, 0.0, 1, 0, 0)
    visible = (torch.arange(300, device=device) < case.lengths.view(-1, 1, 1, 1)).expand(-1, -1, 4, -1)
    problem = dataclasses.replace(case, scale=0.25).case(False)
    brute_check.assert_right(dataclasses.replace(problem, visible=visible), {"out": out, "lse": lse})


def test_no_lengths_means_all_keys(device, dtype):
    case = make(device, dtype, [300, 300], T=3)
    options = (None, None, None, None, True, 0.25, 0.0, 1, 0, 0)
    given = (case.query, case.key, case.value)
    assert_equal(ops.decode(*given, None, *options), ops.decode(*given, case.lengths, *options))


# Independence ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [1, 4])
def test_a_sequence_does_not_depend_on_its_batch(device, dtype, queries):
    lengths = [1500, 0, 1, 127, 999, 1500, 513]
    case = make(device, dtype, lengths, H=8, T=queries, Smax=1500, bias=True, sinks=True)
    out, lse = case.call()
    for b in range(len(lengths)):
        assert_equal(case.row(b).call(), (out[b : b + 1], lse[b : b + 1]))
    again = Decode(*(torch.cat([t] * 9) for t in (case.query, case.key, case.value, case.lengths, case.key_bias)), case.sinks)
    assert_equal(again.call(), (out.repeat(9, 1, 1, 1), lse.repeat(9, 1, 1)))


# In torch -------------------------------------------------------------------------------------------------------------------------------


def test_no_gradient(device, dtype):
    case = make(device, dtype, [3, 300])
    expected = case.call()
    for name in ("query", "key", "value"):
        wanting = dataclasses.replace(case, **{name: getattr(case, name).clone().requires_grad_()})
        with pytest.raises(RuntimeError, match=r"decode_attention has no gradient.*torch.no_grad\(\)"):
            wanting.call()
        with pytest.raises(RuntimeError, match="decode_attention has no gradient"):
            ops.decode(wanting.query, wanting.key, wanting.value, case.lengths, None, None, None, None, True, 0.25, 0.0, 1, 0, 0)
        with torch.no_grad():
            assert_equal(wanting.call(), expected)
    listed = dmattn.IndexMask(torch.zeros(1, 1, dtype=torch.int32, device=device), local=2)
    sinks = torch.zeros(case.query.shape[1], device=device, requires_grad=True)
    for mask in (None, listed):
        with pytest.raises(RuntimeError, match="decode_attention has no gradient"):
            dmattn.decode_attention(case.query, case.key, case.value, case.lengths, mask=mask, sinks=sinks)
    with pytest.raises(RuntimeError, match="decode_attention has no gradient"):
        torch.func.grad(lambda q: dmattn.decode_attention(q, case.key, case.value, case.lengths).sum())(case.query)
    with torch.inference_mode():
        assert_equal(case.call(), expected)


@pytest.mark.long
@pytest.mark.parametrize("pages", [False, True])
def test_compile_serves_all_lengths(device, dtype, pages):
    def step(query, key, value, lengths, bias, sinks, table):
        return dmattn.decode_attention(
            query * 2, key, value, lengths, key_bias=bias, sinks=sinks, page_table=table, return_lse=True
        )

    def given_of(lengths, capacity):
        case = make(device, dtype, lengths, H=6, Hkv=3, T=2, Smax=capacity, bias=True, sinks=True)
        key, value, table = paged(case, 16) if pages else (case.key, case.value, None)
        return case.query, key, value, case.lengths, case.key_bias, case.sinks, table

    # Sizes that are equal by chance would be guarded.
    sizes = (([5, 200, 1, 3, 9], 208), ([208, 0, 7, 1, 2], 208), ([3, 100, 7], 160), ([1, 2, 3, 4], 768))
    assert_compiles_once(step, (given_of(*size) for size in sizes), backend="inductor")


class Step(torch.nn.Module):
    def forward(self, query, key, value, lengths):
        return dmattn.decode_attention(query, key, value, lengths)


def test_export(tmp_path, device, dtype):
    case = make(device, dtype, [5, 200])
    room = torch.export.Dim("room", min=2, max=4096)
    shapes = ({}, {2: room}, {2: room}, {})
    loaded = exported(Step(), (case.query, case.key, case.value, case.lengths), tmp_path / "step.pt2", dynamic_shapes=shapes)
    for capacity in (2, 77, 700):
        case = make(device, dtype, [1, capacity], Smax=capacity)
        assert torch.equal(loaded(case.query, case.key, case.value, case.lengths), case.call()[0])


@pytest.mark.parametrize("pages", [False, True])
def test_vmap(device, dtype, pages):
    cases = [make(device, dtype, [3, 96], Smax=96, T=2, seed=seed, bias=True, sinks=True) for seed in (0, 10, 20)]
    given = [
        [case.query, *(paged(case, 16) if pages else (case.key, case.value, None)), case.lengths, case.key_bias, case.sinks]
        for case in cases
    ]

    def call(query, key, value, table, lengths, bias, sinks):
        return dmattn.decode_attention(query, key, value, lengths, page_table=table, key_bias=bias, sinks=sinks)

    for mapped in ({0}, {0, 1, 2}, {0, 3, 4}, {4}, {0, 5}, set(range(7))):
        if not pages:
            mapped = mapped - {3}
        arguments, dims, samples = [], [], [list(given[0]) for _ in given]
        for place in range(7):
            if place in mapped:
                arguments.append(torch.stack([sample[place] for sample in given]))
                for sample, own in zip(samples, given, strict=True):
                    sample[place] = own[place]
            else:
                arguments.append(given[0][place])
            dims.append(0 if place in mapped else None)
        if not any(dim == 0 for dim in dims):
            continue
        expected = torch.stack([call(*sample) for sample in samples])
        assert torch.equal(torch.vmap(call, tuple(dims))(*arguments).nan_to_num(), expected.nan_to_num())


def test_flops(device, dtype):
    from torch.utils.flop_counter import FlopCounterMode

    case = make(device, dtype, [0, 2, 300, 301], T=3)
    with FlopCounterMode(display=False) as counter:
        case.call()
    pairs = 0 + (2 + 1) + 2 * (300 + 299 + 298)
    assert counter.get_total_flops() == 2 * 4 * pairs * (16 + 24)
    listed = dataclasses.replace(
        case, mask=IndexMask(torch.tensor([[0, 0, 250], [3, -1, 4], [299, 298, 2]], device=device), local=1)
    )
    with FlopCounterMode(display=False) as counter:
        listed.call()
    pairs = 0 + (1 + 1) + 2 * (3 + 3 + 3)
    assert counter.get_total_flops() == 2 * 4 * pairs * (16 + 24)


def test_meta_and_autocast(device, dtype):
    case = make(device, dtype, [3, 300])
    out, lse = dmattn.decode_attention(*(t.to("meta") for t in (case.query, case.key, case.value, case.lengths)), return_lse=True)
    assert out.shape == (2, 4, 1, 24)
    assert lse.shape == (2, 4, 1)
    with torch.autocast(device, torch.bfloat16):
        out = dmattn.decode_attention(case.query.float(), case.key.bfloat16(), case.value.bfloat16(), case.lengths)
    assert torch.equal(
        out, dmattn.decode_attention(case.query.bfloat16(), case.key.bfloat16(), case.value.bfloat16(), case.lengths)
    )


# By attention itself --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def decoding(monkeypatch, device):
    """Calls of the op decode that attention makes: on a CPU, too, where it would not choose it."""
    calls = []
    whole = dmattn.ops.decode_if_plain

    def counted(*inputs):
        result = whole(*inputs)
        calls.append(result is not None)
        return result

    monkeypatch.setattr(dmattn.ops, "decode_if_plain", counted)
    monkeypatch.setattr(dmattn.call, "DECODE_DEVICES", frozenset({device}))
    return calls


@pytest.mark.parametrize("Sq", [1, 2, 16])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "scale": 0.3}, {"biased": True}, {"sunk": True}], ids=str)
def test_attention_with_few_queries_decodes(device, dtype, decoding, Sq, is_causal, options):
    options = dict(options)
    q, k, v = (tensor((2, heads, n, 64), seed, dtype, device) for seed, (heads, n) in enumerate([(8, Sq), (2, 700), (2, 700)]))
    bias = tensor((1, 2, 700), 3, torch.float32, device) if options.pop("biased", False) else None
    sinks = tensor((8,), 4, torch.float32, device) if options.pop("sunk", False) else None
    out, lse = dmattn.attention(q, k, v, key_bias=bias, is_causal=is_causal, sinks=sinks, return_lse=True, **options)
    assert decoding == [True]
    visible = torch.ones(1, 1, Sq, 700, dtype=torch.bool, device=device)
    visible = visible.tril(700 - Sq) if is_causal else visible
    case = AttentionCase(q, k, v, visible=visible, key_bias=bias, **options)
    # The same by the kernels of forward: a mask that hides nothing more.
    mask = (
        dmattn.IntervalMask.causal(700, device=device)
        if is_causal
        else dmattn.IntervalMask.padding(700, torch.tensor([700] * 2, device=device))
    )
    other, other_lse = dmattn.attention(q, k, v, mask, key_bias=bias, sinks=sinks, return_lse=True, **options)
    assert decoding == [True]
    for results in ((out, lse), (other, other_lse)):
        brute_check.assert_right(case, {"lse": results[1]})
        if sinks is None:
            brute_check.assert_right(case, {"out": results[0]})
        elif is_causal:
            lengths = torch.tensor([700, 700], device=device)
            brute_check.assert_right(Decode(q, k, v, lengths, bias, sinks).case(True), {"out": results[0]})


def test_attention_decodes_only_what_decode_can_say(device, dtype, decoding):
    q, k, v = (tensor((1, heads, n, 16), seed, dtype, device) for seed, (heads, n) in enumerate([(4, 2), (2, 600), (2, 600)]))
    dmattn.attention(q, k, v, dropout_p=0.5)
    dmattn.attention(q, k, v, dmattn.IntervalMask.causal(600, device=device))
    dmattn.attention(q, k, v, bias=tensor((1, 1, 2, 600), 3, torch.float32, device))
    dmattn.attention(q, k, v, is_causal=True, query_offset=5)
    dmattn.attention(q, k[:, :, :511], v[:, :, :511])
    dmattn.attention(q.repeat(1, 1, 9, 1), k, v)
    dmattn.dynamic_mask_attention(q, k, v, tensor((1, 2, 600), 3, torch.float32, device), 100)
    dmattn.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert decoding == []
    dmattn.attention(q.clone().requires_grad_(), k, v).sum().backward()
    assert decoding == []
    with torch.no_grad():
        dmattn.attention(q.clone().requires_grad_(), k, v, is_causal=True, query_offset=598)
    dmattn.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert decoding == [True, True]


# What only a GPU can show ---------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [100, 2048, 5000])
def test_one_graph_serves_all_lengths_and_tables(capacity):
    capacity = -(-capacity // 16) * 16
    case = make("cuda", torch.bfloat16, [capacity, capacity, 3], H=8, Smax=capacity, D=128, Dv=128, bias=True, sinks=True)
    key, value, table = paged(case, 16)
    lengths = case.lengths.clone()
    case = dataclasses.replace(case, lengths=lengths)
    call = lambda: (*case.call(), *case.call(key=key, value=value, page_table=table))  # noqa: E731
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    options = {"key_bias": case.key_bias, "sinks": case.sinks, "return_lse": True}
    with torch.cuda.graph(graph):
        captured = [
            *dmattn.decode_attention(case.query, case.key, case.value, lengths, **options),
            *dmattn.decode_attention(case.query, key, value, lengths, page_table=table, **options),
        ]
    for new in ([0, 1, 3], [capacity, 99, 2], [17, capacity - 1, 1]):
        lengths.copy_(torch.tensor(new, dtype=torch.int32))
        case.query.copy_(tensor(case.query.shape, sum(new), torch.bfloat16))
        graph.replay()
        for got, expected in zip(captured, call(), strict=True):
            assert torch.equal(got, expected)
        assert_equal(captured[:2], captured[2:])


@pytest.mark.gpu
def test_concurrent_streams_do_not_meet():
    cases = [make("cuda", torch.bfloat16, [2048] * 4, H=8, Smax=2048, D=128, Dv=128, seed=10 * i) for i in range(4)]
    expected = [case.call() for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    got = [[] for _ in cases]
    for _ in range(50):
        for case, stream, results in zip(cases, streams, got, strict=True):
            with torch.cuda.stream(stream):
                given = (case.query, case.key, case.value, case.lengths)
                results.append(dmattn.decode_attention(*given, return_lse=True))
    torch.cuda.synchronize()
    for results, right in zip(got, expected, strict=True):
        for result in results:
            assert_equal(result, right)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    key = torch.zeros(3, 8, 100_000, 1024, dtype=torch.bfloat16, device="cuda")[..., :128]
    key[2] = tensor((1, 1, 1, 128), 1, torch.bfloat16, "cuda")
    key[2, 7, 99_999] *= 2
    query = tensor((3, 8, 1, 128), 0, torch.bfloat16, "cuda")
    lengths = torch.full((3,), 100_000, dtype=torch.int32, device="cuda")
    out, lse = dmattn.decode_attention(query, key, key, lengths, return_lse=True)
    alone = dmattn.decode_attention(query[2:, 7:], key[2:, 7:].clone(), key[2:, 7:].clone(), lengths[2:], return_lse=True)
    assert_equal((out[2:, 7:], lse[2:, 7:]), alone)
    assert (out[:2] == 0).all()
