"""Index lists in the ops forward and backward: all that lists may hold, beside everything else that the ops take, against the reference."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from dmattn import BlockMask, reference
from dmattn.testing import AttentionCase, assert_close_to_reference, strategies
from hypothesis import given
from hypothesis import strategies as st

tensor = strategies.random_tensor
NO_BLOCKS = (None,) * 4


@dataclasses.dataclass
class Lists:
    """The ops' arguments of index lists."""

    indices: torch.Tensor
    block: int = 1
    local: int = 0
    sinks: int = 0
    offset: torch.Tensor | None = None

    def visible(self, Sk):
        """bool [B|1, H|Hkv|1, Sq, Sk] from the definition."""
        listed = torch.zeros(*self.indices.shape[:3], Sk + 1, dtype=torch.bool)  # the last key takes what is none
        for place in range(self.block):
            key = self.indices.long() * self.block + place
            listed.scatter_(-1, torch.where((self.indices >= 0) & (key < Sk), key, Sk), True)
        listed = listed[..., :Sk]
        Sq, key = self.indices.shape[2], torch.arange(Sk)
        first = torch.tensor([Sk - Sq]) if self.offset is None else self.offset.long()
        position = (first[:, None] + torch.arange(Sq))[:, None, :, None]
        return listed | ((key > position - self.local) & (key <= position)) | (key < self.sinks)


def run(case, lists, interval=(None, None), blocks=NO_BLOCKS):
    """out, lse and gradients by the ops themselves, by name."""
    seed = torch.tensor([case.dropout_seed]) if case.dropout_p > 0 else None
    options = (case.is_causal, case.query.shape[-1] ** -0.5, case.softcap, case.dropout_p, case.deterministic)
    arguments = (*interval, *blocks, lists.indices, lists.offset, case.key_bias, case.bias, seed, *options)
    rest = (False, 0, lists.block, lists.local, lists.sinks)
    inputs = (case.query, case.key, case.value)
    wanted = (case.key_bias is not None, case.bias is not None)
    with torch.no_grad():
        out, lse, lse_rest = torch.ops.dmattn.forward(*inputs, *arguments, *rest)
        grad_out, grad_lse = (given.to(of.dtype) for given, of in zip(case.incoming_gradients(), (out, lse), strict=True))
        gradients = torch.ops.dmattn.backward(grad_out, grad_lse, *inputs, out, lse, *arguments, *wanted, lse_rest, *rest)
    names = ("grad_query", "grad_key", "grad_value", "grad_key_bias", "grad_bias")
    kept = (True, True, True, *wanted)
    return {"out": out, "lse": lse} | {name: g for name, g, keep in zip(names, gradients, kept, strict=True) if keep}


def with_bad_keys(case):
    """NaN in every key that no query sees."""
    kv_heads = case.key.shape[1]
    seen = case.seen().unflatten(1, (kv_heads, -1)).any(dim=2).any(dim=2)
    key, value = (torch.where(seen[..., None], given, math.nan) for given in (case.key, case.value))
    return dataclasses.replace(case, key=key, value=value)


def random_lists(data, shape, heads):
    block = data.draw(st.sampled_from((1, 1, 2, 4, 8, 16, 32, 64, 128)))
    blocks = -(-shape.Sk // block)
    size = (data.draw(st.sampled_from((1, shape.B))), heads, shape.Sq, data.draw(st.sampled_from((0, 1, 7, 40, 2 * shape.Sk))))
    generator = torch.Generator().manual_seed(data.draw(strategies.seeds()))
    indices = torch.randint(-2, blocks + 3, size, generator=generator, dtype=torch.int32)
    if data.draw(st.booleans()):
        indices = indices.sort(dim=-1).values
    if data.draw(st.booleans()):  # neighbours share most of what they list
        indices = torch.where(torch.rand(size, generator=generator) < 0.1, indices, indices[:, :, :1])
    far = torch.rand(size, generator=generator) < data.draw(st.sampled_from((0.0, 0.1)))
    indices = torch.where(far, data.draw(st.sampled_from((-(2**31), 2**24, 2**31 - 1))), indices)
    indices = torch.where(torch.rand((*size[:3], 1), generator=generator) < data.draw(st.sampled_from((0.0, 0.3))), -1, indices)
    numbers = st.sampled_from((0, 0, 1, 40, 2000))
    offset = data.draw(st.none() | st.lists(st.integers(-20, shape.Sk + 20), min_size=shape.B, max_size=shape.B))
    return Lists(
        indices,
        block,
        data.draw(numbers),
        data.draw(numbers),
        None if offset is None else torch.tensor(offset, dtype=torch.int32),
    )


@given(data=st.data())
def test_drawn_lists(dtype, data):
    """Everything at once: lists of a head, of a group or of all; intervals and blocks; biases, softcap, dropout, causality."""
    shape = data.draw(strategies.shapes(max_length=150, min_length=1))
    of_heads = st.sampled_from((1, shape.H, shape.Hkv))
    lists = random_lists(data, shape, data.draw(of_heads))
    full = (shape.B, shape.H, shape.Sq, shape.Sk)
    visible = reference.per_query_head(lists.visible(shape.Sk), shape.H).expand(full)
    interval, blocks = (None, None), NO_BLOCKS
    if data.draw(st.booleans()):
        drawn = data.draw(strategies.raw_interval_masks(shape))
        interval = tuple(given.expand(*given.shape[:2], shape.Sk) for given in (drawn.mask.start, drawn.mask.end))
        visible = visible & reference.per_query_head(drawn.visible, shape.H)
    if data.draw(st.booleans()):
        seen = tensor((1, data.draw(of_heads), shape.Sq, shape.Sk), data.draw(strategies.seeds())) > -0.5
        mask = BlockMask.from_bool(seen, data.draw(st.sampled_from((32, 128))))
        blocks = (mask.tiles, mask.rows, mask.columns, mask.bits)
        visible = visible & reference.per_query_head(seen, shape.H)
    summed = torch.float64 if dtype == torch.float64 else torch.float32
    case = AttentionCase(
        tensor((shape.B, shape.H, shape.Sq, shape.D), 1, dtype),
        tensor((shape.B, shape.Hkv, shape.Sk, shape.D), 2, dtype),
        tensor((shape.B, shape.Hkv, shape.Sk, shape.Dv), 3, dtype),
        visible=visible,
        is_causal=data.draw(st.booleans()),
        key_bias=tensor((1, data.draw(of_heads), shape.Sk), 4, summed) if data.draw(st.booleans()) else None,
        bias=tensor((1, data.draw(of_heads), shape.Sq, shape.Sk), 5, summed) if data.draw(st.booleans()) else None,
        softcap=data.draw(st.sampled_from((0.0, 2.0))),
        dropout_p=data.draw(st.sampled_from((0.0, 0.3))),
        dropout_seed=data.draw(strategies.seeds()),
        description=f"lists {list(lists.indices.shape)}, block {lists.block}, local {lists.local}, sinks {lists.sinks}",
    )
    case = with_bad_keys(case)
    assert_close_to_reference(case, run(case, lists, interval, blocks))


def plain(lists, dtype=torch.float32, H=4, Hkv=2, Sk=200, **options):
    Sq = lists.indices.shape[2]
    return AttentionCase(
        tensor((2, H, Sq, 16), 1, dtype), tensor((2, Hkv, Sk, 16), 2, dtype), tensor((2, Hkv, Sk, 24), 3, dtype),
        visible=lists.visible(Sk).expand(2, -1, -1, -1), **options,
    )  # fmt: skip


NAMED = {
    "duplicates": Lists(torch.tensor([7, 3, 3, 7, 7, 3, 150, 3]).int().expand(1, 1, 70, 8)),
    "duplicates in order": Lists((torch.arange(70)[:, None] + torch.tensor([0, 0, 100, 100])).int().expand(1, 1, 70, 4)),
    "no entries": Lists(torch.empty(1, 1, 70, 0, dtype=torch.int32)),
    "nothing listed": Lists(torch.full((1, 1, 70, 3), -1, dtype=torch.int32), local=2),
    "more entries than keys": Lists(torch.arange(300).int().flip(0).expand(1, 2, 70, 300)),
    "out of range": Lists(torch.tensor([-(2**31), -1, 199, 200, 2**25, 2**31 - 1]).int().expand(1, 1, 70, 6)),
    "the last block is cut": Lists(torch.tensor([1, 2**24 + 1, 0]).int().expand(1, 4, 70, 3), 128),
    "only the future": Lists(torch.full((1, 1, 70, 1), 199, dtype=torch.int32)),
    "far positions": Lists(
        torch.full((1, 1, 70, 1), 5, dtype=torch.int32), 1, 1000, 2, torch.tensor([1100, -(2**31)], dtype=torch.int32)
    ),
}


@pytest.mark.parametrize("lists", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("is_causal", [False, True])
def test_by_name(lists, is_causal):
    case = with_bad_keys(plain(lists, is_causal=is_causal))
    results = run(case, lists)
    assert_close_to_reference(case, results)
    sees_nothing = ~case.seen().any(dim=-1)
    assert (results["lse"][sees_nothing] == -math.inf).all()
    assert not results["out"][sees_nothing].any()
    assert not results["grad_query"][sees_nothing].any()


@pytest.mark.parametrize("block", [1, 8])
@pytest.mark.parametrize(("local", "sinks"), [(0, 0), (5, 0), (0, 3), (21, 9), (2000, 2000)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("H", [2, 8])
def test_ascending_lists(block, local, sinks, is_causal, H):
    """Lists as selection leaves them: distinct entries in ascending order, -1 behind them; some end beyond the last key."""
    blocks = -(-135 // block)
    distinct = tensor((1, 2, 90, blocks + 2), 5).argsort(dim=-1)[..., :12].sort(dim=-1).values
    kept = torch.arange(12) < torch.arange(90)[:, None] % 13
    lists = Lists(torch.where(kept, distinct, -1).int(), block, local, sinks)
    case = with_bad_keys(plain(lists, H=H, Sk=135, is_causal=is_causal))
    assert_close_to_reference(case, run(case, lists))


@pytest.mark.parametrize("own", [1, 2, 8])
@pytest.mark.parametrize("group", [1, 3, 8, 12])
def test_heads_that_share_lists(own, group):
    """Lists of all heads, of a group and of a head; groups that fill no block of rows, and those of several."""
    heads, H = {1: 1, 2: 2, 8: 2 * group}[own], 2 * group
    lists = Lists(torch.randint(-1, 90, (1, heads, 33, 20), generator=torch.Generator().manual_seed(own)).int())
    case = plain(lists, H=H, Sk=90, key_bias=tensor((1, H, 90), 4), bias=tensor((1, 1, 33, 90), 5))
    assert_close_to_reference(case, run(case, lists))


@pytest.mark.parametrize("shared", [0.0, 0.95], ids=["own keys", "shared keys"])
def test_lists_of_several_chunks(dtype, shared):
    """Keys with ever larger logits, so that maxima of later chunks take the place of earlier ones."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, 1500, (1, 2, 5, 1100), generator=generator)
    indices = torch.where(torch.rand(indices.shape, generator=generator) < shared, indices[:, :, :1], indices).int()
    rising = torch.linspace(0, 20, 1500, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    case = plain(Lists(indices), dtype, Sk=1500, key_bias=rising[None, None])
    assert_close_to_reference(case, run(case, Lists(indices)))


@pytest.mark.parametrize("shared", [0.0, 0.95], ids=["own keys", "shared keys"])
def test_equal_bits_from_equal_calls(shared):
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, 200, (1, 1, 70, 60), generator=generator)
    indices = torch.where(torch.rand(indices.shape, generator=generator) < shared, indices[:, :, :1], indices).int()
    lists = Lists(indices)
    case = plain(lists, H=2, Hkv=1, deterministic=True, bias=tensor((1, 1, 70, 200), 5), key_bias=tensor((200,), 6)[None, None])
    first, threads = run(case, lists), torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            again = run(case, lists)
        finally:
            torch.set_num_threads(threads)
        assert all(torch.equal(first[name], again[name]) for name in first)
    shuffled = Lists(torch.cat([indices, indices], dim=-1).flip(-1).contiguous())
    assert all(torch.equal(first[name], other) for name, other in run(case, shuffled).items())


def test_gradcheck():
    lists = Lists(torch.randint(-1, 20, (1, 2, 6, 5), generator=torch.Generator().manual_seed(0)).int(), local=2)
    leaves = [
        tensor(size, i, torch.float64).requires_grad_() for i, size in enumerate(((1, 2, 6, 8), (1, 2, 20, 8), (1, 2, 20, 8)))
    ]

    def call(query, key, value):
        masks = (None,) * 6
        options = (None, None, None, True, 0.3, 2.0, 0.0, False, False, 0, lists.block, lists.local, lists.sinks)
        return torch.ops.dmattn.forward(query, key, value, *masks, lists.indices, None, *options)[:2]

    assert torch.autograd.gradcheck(call, leaves)
