"""Attention with lists of keys: forward and all gradients against brute force, every option beside them, and what torch makes of calls."""

from __future__ import annotations

import dataclasses

import dmattn
import pytest
import torch
from cases import threads
from dmattn import BlockMask, IndexMask, IntervalMask, autograd
from dmattn.testing import (
    FEATURES,
    AttentionCase,
    assert_matches_reference,
    assert_same_bits,
    attention_cases,
    per_query_head,
    run,
    strategies,
)  # fmt: skip
from dmattn.testing.case import positions_from
from dmattn.testing.features import MASK_TYPES
from hypothesis import given
from hypothesis import strategies as st
from programs import assert_compiles_once, assert_exports
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

ops = torch.ops.dmattn
tensor = strategies.random_tensor
INT = torch.iinfo(torch.int32)


def lists(*size, most=12, seed=0, device="cpu"):
    return torch.randint(-1, most, size, generator=torch.Generator().manual_seed(seed), dtype=torch.int32).to(device)


def case_of(device, dtype, mask, *, B=2, H=4, Hkv=2, Sk=50, D=16, Dv=24, visible=None, **options):
    """A problem of a mask, which says what it means by brute force."""
    Sq = mask.query_length
    sizes = ((B, H, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv))
    leaves = [tensor(size, number, dtype, device) for number, size in enumerate(sizes)]
    if visible is None:
        visible = strategies.listed_rows(mask, strategies.positions(Sq, Sk, device)[0], Sk)
    return AttentionCase(*leaves, mask, visible, **options)


def shape_of(case):
    (B, H, Sq, D), (_, Hkv, Sk, Dv) = case.query.shape, case.value.shape
    return strategies.Shape(B, H, Hkv, Sq, Sk, D, Dv)


# Numbers ----------------------------------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_everything_at_once(device, data):
    case = data.draw(attention_cases(device, max_length=150, features=set(FEATURES) - set(MASK_TYPES)))
    shape = shape_of(case)
    drawn = data.draw(strategies.index_masks(shape, device))
    visible = drawn.visible
    if case.query_offset is not None:
        visible = strategies.listed_rows(drawn.mask, positions_from(case.query_offset, shape.Sq, device), shape.Sk)
    assert_matches_reference(dataclasses.replace(case, mask=drawn.mask, visible=visible, description=drawn.description))


@given(data=st.data())
def test_beside_intervals_and_blocks(device, data):
    case = data.draw(attention_cases(device, max_length=150, features=set(FEATURES) - set(MASK_TYPES) - {"query_offset"}))
    shape = shape_of(case)
    parts = [data.draw(strategies.index_masks(shape, device))]
    for others in (strategies.interval_masks, strategies.block_masks):
        parts += [data.draw(others(shape, device))] if data.draw(st.booleans()) else []
    mask, visible = parts[0].mask, per_query_head(parts[0].visible, shape.H)
    for part in parts[1:]:
        mask, visible = mask & part.mask, visible & per_query_head(part.visible, shape.H)
    description = " & ".join(part.description for part in parts)
    assert_matches_reference(dataclasses.replace(case, mask=mask, visible=visible, description=description))


@pytest.mark.parametrize("block", [1, 2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("own", [1, 2, 4], ids=["lists of all heads", "of a group", "one's own"])
def test_blocks_and_heads(device, dtype, block, own):
    mask = IndexMask(lists(2, own, 130, 5, most=-(-200 // block), device=device), block, is_causal=True, local=9, sink_keys=3)
    assert_matches_reference(case_of(device, dtype, mask, Sk=200))


@pytest.mark.parametrize("heads", [9, 20])
def test_more_heads_of_a_group_than_a_cpu_computes_at_once(device, dtype, heads):
    mask = IndexMask(lists(1, 1, 70, 11, most=90, device=device), is_causal=True)
    assert_matches_reference(case_of(device, dtype, mask, B=1, H=heads, Hkv=1, Sk=90))


@pytest.mark.parametrize(("D", "Dv"), [(192, 128), (256, 256), (128, 128), (8, 256), (200, 136), (256, 8)])
@pytest.mark.parametrize(("H", "Hkv"), [(1, 1), (4, 1), (16, 1), (6, 3)])
@pytest.mark.parametrize("block", [1, 16])
def test_sizes(device, dtype, D, Dv, H, Hkv, block):
    mask = IndexMask(lists(1, Hkv, 70, 11, most=90 // block, device=device), block, is_causal=True)
    assert_matches_reference(case_of(device, dtype, mask, B=1, H=H, Hkv=Hkv, Sk=90, D=D, Dv=Dv))


ODD = {
    "no entries": IndexMask(lists(40, 0)),
    "no entries, a window": IndexMask(lists(40, 0), local=7, sink_keys=2),
    "empty lists": IndexMask(torch.full((40, 5), -1)),
    "more entries than keys": IndexMask(lists(2, 1, 40, 130, most=50)),
    "all keys": IndexMask(torch.arange(50).expand(1, 1, 40, 50), is_causal=True),
    "one key, often": IndexMask(torch.full((40, 70), 3)),
    "one list of all": IndexMask(torch.arange(9).expand(2, 4, 40, 9), 4),
    "future keys": IndexMask(torch.arange(49, 39, -1).expand(1, 1, 40, 10), is_causal=True),
    "-1 in the middle": IndexMask(torch.tensor([7, -1, -1, 30, -1, 2]).expand(40, 6)),
    "a window of all": IndexMask(lists(40, 2), local=2**20, is_causal=True),
    "sinks of all": IndexMask(lists(40, 2), sink_keys=2**20),
    "more queries": IndexMask(lists(2, 2, 90, 6, most=50), is_causal=True, local=3),
    "the last block is cut": IndexMask(torch.tensor([1, 0]).expand(40, 2), 32),
    "duplicates in order": IndexMask((torch.arange(40)[:, None] + torch.tensor([0, 0, 9, 9])).clamp(max=49)),
}


@pytest.mark.parametrize("block", [16, 32, 64])
def test_long_lists(device, dtype, block):
    # On a GPU backward takes 8,192 queries at a time.
    length, keys = (8192 + 200 if device == "cuda" else 400), 300
    mask = IndexMask(lists(1, 1, length, 3, most=-(-keys // block), device=device), block, local=length // 2, sink_keys=3)
    assert_matches_reference(case_of(device, dtype, mask, B=1, H=2, Hkv=1, Sk=keys, D=64, Dv=64))


@pytest.mark.parametrize("neighbours", [1, 16, 48, 64])
@pytest.mark.parametrize(("D", "Dv", "H", "Hkv"), [(64, 64, 8, 2), (128, 128, 4, 1), (128, 128, 2, 2), (192, 128, 2, 1)])
def test_keys_that_some_queries_of_a_tile_see(device, dtype, neighbours, D, Dv, H, Hkv):
    # So many neighbouring queries list 150 keys that no others list; all queries list 90 more. Unions have thousands of keys.
    length, keys = (300, 20000) if device == "cuda" else (100, 3000)
    group = torch.arange(length) // neighbours
    own = (group[:, None] * 613 + torch.arange(150) * 19) % (keys // 2)
    entries = torch.cat((own, (keys // 2 + torch.arange(90) * 61 % (keys // 2)).expand(length, -1)), 1).int()
    mask = IndexMask(entries.to(device), local=40, sink_keys=2, is_causal=True)
    assert_matches_reference(case_of(device, dtype, mask, B=1, H=H, Hkv=Hkv, Sk=keys, D=D, Dv=Dv))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [1, 64])
def test_sums_that_do_not_fit_into_one_part(block):
    # Three key heads whose gradients' sums have room for two: the last part of the call has one. Lists end where their memory ends.
    device, dtype, length, heads = "cuda", torch.bfloat16, 81920, 16
    entries = lists(1, 3, length, 64, most=length // block, device=device)
    leaves = [
        tensor((1, 3 * per, length, 64), number, dtype, device).requires_grad_() for number, per in enumerate((heads, 1, 1))
    ]
    incoming = tensor(leaves[0].shape, 4, dtype, device)
    found = torch.autograd.grad(dmattn.attention(*leaves, IndexMask(entries, block, is_causal=True)), leaves, incoming)
    for head in range(3):
        some, query_heads = slice(head, head + 1), slice(heads * head, heads * (head + 1))
        cut = [leaf.detach()[:, part].requires_grad_() for leaf, part in zip(leaves, (query_heads, some, some), strict=True)]
        out = dmattn.attention(*cut, IndexMask(entries[:, some], block, is_causal=True))
        expected = torch.autograd.grad(out, cut, incoming[:, query_heads])
        for given_grad, wanted, part in zip(found, expected, (query_heads, some, some), strict=True):
            assert (given_grad[:, part] - wanted).norm() < wanted.norm() / 100


@pytest.mark.parametrize("name", ODD)
def test_odd_lists(device, dtype, name):
    assert_matches_reference(case_of(device, dtype, ODD[name].to(device)))


@pytest.mark.parametrize("block", [1, 8])
@pytest.mark.parametrize(
    "beside", [{}, {"local": 5}, {"sink_keys": 3}, {"local": 21, "sink_keys": 9}, {"local": 2000, "sink_keys": 2000}]
)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("H", [2, 8])
def test_ascending_lists(device, dtype, block, beside, is_causal, H):
    """Lists as selection leaves them: distinct entries in ascending order, -1 behind them."""
    distinct = tensor((1, 2, 90, -(-135 // block)), 5).argsort(dim=-1)[..., :12].sort(dim=-1).values
    kept = torch.arange(12) < torch.arange(90)[:, None] % 13
    mask = IndexMask(torch.where(kept, distinct, -1).int().to(device), block, is_causal=is_causal, **beside)
    assert_matches_reference(case_of(device, dtype, mask, H=H, Sk=135))


@pytest.mark.parametrize("shared", [0.0, 0.95], ids=["own keys", "shared keys"])
def test_lists_of_several_chunks(device, dtype, shared):
    """Keys with ever larger logits, so that maxima of later chunks take the place of earlier ones."""
    indices = lists(1, 2, 5, 1100, most=1500)
    is_shared = torch.rand(indices.shape, generator=torch.Generator().manual_seed(0)) < shared
    mask = IndexMask(torch.where(is_shared, indices[:, :, :1], indices).to(device))
    rising = torch.linspace(0, 20, 1500, device=device)[None, None]
    assert_matches_reference(case_of(device, dtype, mask, Sk=1500, key_bias=rising))


def test_positions_far_away(device, dtype):
    """Of queries that stand beyond all keys, and before them; local windows go by positions."""
    mask, offset = (
        IndexMask(torch.full((1, 1, 70, 1), 5), local=1000, sink_keys=2).to(device),
        torch.tensor([1100, -(2**30)], device=device),
    )
    visible = strategies.listed_rows(mask, positions_from(offset, 70, torch.device(device)), 200)
    assert_matches_reference(case_of(device, dtype, mask, Sk=200, visible=visible, query_offset=offset))


@given(data=st.data())
def test_any_numbers_are_only_lists(device, dtype, data):
    """Through the ops, which nobody has checked lists for: what is no key is not visible, and never read."""
    block = data.draw(st.sampled_from((1, 8, 128)))
    entries = st.sampled_from((INT.min, INT.min + 1, -129, -2, -1, 0, 1, 5, 6, 40, 49, 50, 51, 2**24, 2**25, 2**30, INT.max))
    rows = data.draw(st.lists(st.lists(entries, min_size=4, max_size=4), min_size=40, max_size=40))
    mask = IndexMask(lists(40, 4, most=1).to(device), block)._replace(
        indices=torch.tensor([[rows]], dtype=torch.int32, device=device)
    )
    case = case_of(device, dtype, mask)

    def direct(query, key, value, mask, *, is_causal, return_lse, **others):
        options = (is_causal, 0.25, 0.0, 0.0, False, False, 0, mask.block_size, 0, 0)
        return autograd.Attention.apply(query, key, value, *(None,) * 6, mask.indices, *(None,) * 4, *options)[:2]

    assert_matches_reference(dataclasses.replace(case, scale=0.25), direct)


@pytest.mark.parametrize("block", [1, 16])
def test_gradients_are_the_same_in_every_run(device, dtype, block):
    mask = IndexMask(lists(2, 2, 200, 12, most=300 // block, device=device), block, is_causal=True)
    case = case_of(device, dtype, mask, Sk=300, deterministic=True, key_bias=tensor((2, 2, 300), 5, device=device))
    first = run(case)
    for count in (torch.get_num_threads(), 1, 3):
        with threads(count):
            assert_same_bits(run(case), first)
    twice = IndexMask(torch.cat([mask.indices] * 2, -1).flip(-1), block, is_causal=True)
    assert_same_bits(run(dataclasses.replace(case, mask=twice)), first)


@pytest.mark.parametrize("listed", [0, 1], ids=["even blocks", "odd blocks"])
@pytest.mark.parametrize("block", [1, 16, 64])
def test_a_key_that_nobody_lists_may_hold_anything(device, dtype, block, listed):
    """The first key of all, too."""
    mask = IndexMask(2 * lists(2, 2, 40, 6, most=3, device=device).clamp(min=0) + listed, block)
    case = case_of(device, dtype, mask, Sk=6 * block)
    nan = [given.clone() for given in (case.key, case.value)]
    for given_tensor in nan:
        given_tensor.unflatten(2, (6, block))[:, :, 1 - listed :: 2] = torch.nan
    results = assert_matches_reference(dataclasses.replace(case, key=nan[0], value=nan[1]))
    assert not any(result.isnan().any() for result in results.values())


@pytest.mark.parametrize("hides", ["causality", "an interval"])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_a_listed_key_that_no_query_sees_may_hold_anything(device, dtype, block, hides):
    """Each query lists a block, and something else hides a key of it from just these queries."""
    length = keys = 5 * block - 4
    entries = torch.full((length, 2), -1)
    entries[2 * block + 5 : 2 * block + 9, 0] = 2  # queries before most keys of their block, or in it
    entries[-1, 1] = 4
    mask = IndexMask(entries.int().to(device), block, is_causal=hides == "causality")
    case = case_of(device, dtype, mask, Sk=keys, D=64, Dv=64)
    if hides == "an interval":  # its first queries alone see key 2 * block + 12
        end = torch.full((1, 1, keys), keys, dtype=torch.int32, device=device)
        end[..., 2 * block + 12] = 2 * block
        interval = IntervalMask(torch.zeros_like(end), end)
        visible = case.visible & interval.to_bool(length, keys)
        case = dataclasses.replace(case, mask=mask & interval, visible=visible)
    seen = case.visible.expand(2, 4, length, keys).flatten(0, 2).any(0)
    assert not seen[2 * block + 12]
    nan = [given.masked_fill(~seen[:, None], torch.nan) for given in (case.key, case.value)]
    results = assert_matches_reference(dataclasses.replace(case, key=nan[0], value=nan[1]))
    assert not any(result.isnan().any() for result in results.values())


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("kind", ["index", "interval & index"])
def test_packed_documents_have_lists_of_their_own(device, dtype, same, block, kind):
    lengths_k, lengths_q = [9, 3, 8, 0, 14], [9, 3, 8, 0, 14] if same else [5, 0, 15, 13, 6]
    Tq, Tk = sum(lengths_q) + 3, sum(lengths_k) + 3
    mask = IndexMask(lists(1, 2, Tq, 4, most=-(-16 // block), device=device), block, is_causal=True, local=2, sink_keys=1)
    interval = IntervalMask.sliding_window(Tk, 6, device=device)
    visible, q, k = torch.zeros((1, 2, Tq, Tk), dtype=torch.bool, device=device), 0, 0
    for Lq, Lk in zip(lengths_q, lengths_k, strict=True):
        own = mask._replace(indices=mask.indices[:, :, q : q + Lq])
        seen = strategies.listed_rows(own, strategies.positions(Lq, Lk, device)[0], Lk)
        if kind != "index":
            p, j = strategies.positions(Lq, Lk, device)
            seen = seen & (p - 6 <= j)
        visible[:, :, q : q + Lq, k : k + Lk] = seen
        q, k = q + Lq, k + Lk
    ends_q, ends_k = (torch.tensor([0, *lengths]).cumsum(0).to(device) for lengths in (lengths_q, lengths_k))

    def packed(query, key, value, mask, *, return_lse, is_causal, deterministic, dropout_p, dropout_seed, **options):
        given_tensors = (given[0].transpose(0, 1) for given in (query, key, value))
        named = {name: given for name, given in options.items() if given is not None}
        out, lse = dmattn.varlen_attention(*given_tensors, ends_q, None if same else ends_k, mask=mask, return_lse=True, **named)
        return out.transpose(0, 1)[None], lse[None]

    given_mask = mask if kind == "index" else interval & mask
    sizes = ((1, 4, Tq, 16), (1, 2, Tk, 16), (1, 2, Tk, 24))
    case = AttentionCase(*(tensor(size, n, dtype, device) for n, size in enumerate(sizes)), given_mask, visible)
    assert_matches_reference(case, packed)


# What torch makes of calls ----------------------------------------------------------------------------------------------------------


def patterns():
    """Name to the arguments of ``dmattn::forward``."""
    q, k, v = (tensor(size, n) for n, size in enumerate(((2, 4, 40, 16), (2, 2, 50, 16), (2, 2, 50, 24))))
    grad = [given.clone().requires_grad_() for given in (q, k, v)]
    block = BlockMask.from_bool(tensor((4, 40, 50), 7) > -0.5, 32)
    interval = IntervalMask.sliding_window(50, 20)
    options, offset = (True, 0.25, 0.0, 0.0, False, False, 0), torch.tensor([3, 11], dtype=torch.int32)
    key_bias = tensor((2, 2, 50), 5).requires_grad_()
    own = lists(2, 2, 40, 5)
    return {
        "lists": (q, k, v, *(None,) * 6, own, *(None,) * 4, *options, 2, 3, 1),
        "gradients": (*grad, *(None,) * 6, lists(1, 4, 40, 5), None, key_bias, None, None, *options, 2, 3, 1),
        "offsets": (*grad, *(None,) * 6, own.transpose(1, 2).contiguous().transpose(1, 2), offset, *(None,) * 3, *options, 1, 3, 0),
        "all masks": (*grad, interval.start, interval.end, block.tiles, block.rows, block.columns, block.bits, own, *(None,) * 4, *options),
        "no entries": (*grad, *(None,) * 6, own[..., :0], *(None,) * 4, *options, 16, 5, 0),
    }  # fmt: skip


PATTERNS = patterns()


@pytest.mark.parametrize("arguments", PATTERNS.values(), ids=PATTERNS)
def test_opcheck(arguments):
    torch.library.opcheck(ops.forward.default, arguments)
    arguments = tuple(given.detach() if isinstance(given, torch.Tensor) else given for given in arguments)
    out, lse, rest = ops.forward(*arguments)
    needs = (arguments[11] is not None, False)
    given_tensors = (tensor(out.shape, 4), tensor(lse.shape, 5), *arguments[:3], out, lse)
    torch.library.opcheck(ops.backward.default, (*given_tensors, *arguments[3:19], *needs, rest, *arguments[19:]))


def small(dtype=torch.float64):
    leaves = [tensor(size, n, dtype).requires_grad_() for n, size in enumerate(((2, 4, 5, 8), (2, 2, 9, 8), (2, 2, 9, 8)))]
    return leaves, IndexMask(lists(2, 2, 5, 3, most=5), 2, is_causal=True, local=2, sink_keys=1)


def test_gradcheck():
    leaves, mask = small()
    bias = tensor((2, 4, 9), 9, torch.float64).requires_grad_()
    call = lambda q, k, v, b: dmattn.attention(q, k, v, mask & IntervalMask.sliding_window(9, 7), key_bias=b, softcap=3.0)  # noqa: E731
    assert torch.autograd.gradcheck(call, (*leaves, bias), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, (*leaves, bias))


@pytest.mark.parametrize("offset", [None, 2, torch.tensor([1, 3])], ids=str)
def test_further_derivatives_are_those_of_the_bool_mask(offset):
    leaves, mask = small()
    p = strategies.positions(5, 9)[0] if offset is None else positions_from(offset, 5, torch.device("cpu"))
    visible = strategies.listed_rows(mask, p, 9)
    directions = tuple(tensor(leaf.shape, 20, torch.float64) for leaf in leaves)
    made = []
    for given_mask, at in ((mask, offset), (visible, None)):
        call = lambda *tensors: dmattn.attention(*tensors, given_mask, query_offset=at)  # noqa: B023, E731
        made.append(torch.func.jvp(call, tuple(leaves), directions)[1])
    torch.testing.assert_close(*made)


def test_vmap():
    leaves, mask = small(torch.float32)
    many = torch.stack([leaves[0], 2 * leaves[0], -leaves[0]])
    attend = lambda q, mask: dmattn.attention(q, *leaves[1:], mask)  # noqa: E731
    torch.testing.assert_close(torch.vmap(attend, in_dims=(0, None))(many, mask), torch.stack([attend(q, mask) for q in many]))
    masks = [mask, mask._replace(indices=mask.indices.flip(2)), mask._replace(indices=lists(2, 2, 5, 3, most=5, seed=3))]
    stacked = mask._replace(indices=torch.stack([given.indices for given in masks]))
    expected = torch.stack([attend(many[0], given) for given in masks])
    torch.testing.assert_close(torch.vmap(attend, in_dims=(None, 0))(many[0], stacked), expected)
    gradients = lambda q, mask: torch.func.grad(lambda q: attend(q, mask).sin().sum())(q)  # noqa: E731
    torch.testing.assert_close(
        torch.vmap(gradients, in_dims=(0, 0))(many, stacked), torch.stack([gradients(*given) for given in zip(many, masks, strict=True)])
    )  # fmt: skip


def masked(q, k, v, indices):
    mask = IndexMask(indices, 2, is_causal=True, local=3)
    return dmattn.attention(q, k, v, mask & IntervalMask.sliding_window(k.shape[2], 30, device=k.device))


def arguments_of(length, entries, device, dtype):
    leaves = [tensor((1, heads, length, 16), n, dtype, device).requires_grad_() for n, heads in enumerate((4, 2, 2))]
    return *leaves, lists(1, 2, length, entries, most=length // 2, device=device)


@pytest.mark.long
def test_compile_without_recompiling(device, dtype):
    def step(call, length, entries):
        given_tensors = arguments_of(length, entries, device, dtype)
        out = call(*given_tensors)
        return out, *torch.autograd.grad(out.sum(), given_tensors[:3])

    assert_compiles_once(masked, ((450, 11), (230, 9), (300, 40)), step, "inductor")


class Attends(torch.nn.Module):
    def forward(self, q, k, v, mask):
        return dmattn.attention(q, k, v, mask)


def test_export_with_dynamic_shapes(tmp_path):
    length, entries = Dim("length", min=2, max=4096), Dim("entries", min=2, max=512)

    def example(length, entries):
        *leaves, indices = arguments_of(length, entries, "cpu", torch.float32)
        return *(leaf.detach() for leaf in leaves), IndexMask(indices, 2, is_causal=True, local=5)

    shapes = (*({2: length},) * 3, [{2: length, 3: entries}])
    others = (example(5, 3), example(333, 20))
    assert_exports(Attends(), example(40, 7), others, tmp_path / "lists.pt2", dynamic_shapes=shapes, strict=False)


class Packed(torch.nn.Module):
    def forward(self, q, k, v, boundaries, indices):
        return dmattn.varlen_attention(q, k, v, boundaries, mask=IndexMask(indices))


class Decodes(torch.nn.Module):
    def forward(self, q, k, v, lengths, indices):
        return dmattn.decode_attention(q, k, v, lengths, mask=IndexMask(indices))


class Selects(torch.nn.Module):
    def forward(self, scores):
        return IndexMask.top_k(scores, 3).indices


def listed(*shape):
    return (tensor(shape, 4).abs() * 3).int().clamp(max=5)


def test_export_with_lists_of_packed_documents(tmp_path):
    def example(tokens):
        leaves = (tensor((tokens, heads, 8), seed) for seed, heads in enumerate((4, 2, 2)))
        return *leaves, torch.tensor([0, 4, tokens], dtype=torch.int32), listed(tokens, 3)

    tokens = Dim("tokens", min=5, max=500)
    shapes = (*({0: tokens},) * 3, None, {0: tokens})
    assert_exports(Packed(), example(10), (example(6), example(90)), tmp_path / "packed.pt2", dynamic_shapes=shapes, strict=False)


def test_export_of_decoding_with_any_number_of_entries(tmp_path):
    def example(entries):
        q, k, v = (tensor((2, heads, length, 8), seed) for seed, (heads, length) in enumerate(((4, 1), (2, 20), (2, 20))))
        return q, k, v, torch.tensor([20, 7], dtype=torch.int32), listed(2, 2, 1, entries)

    shapes = (None, None, None, None, {3: Dim("entries", min=1, max=64)})
    others = tuple(example(entries) for entries in (1, 2, 3, 30))
    assert_exports(Decodes(), example(7), others, tmp_path / "decodes.pt2", dynamic_shapes=shapes, strict=False)


def test_export_of_a_selection(tmp_path):
    shapes = ({0: Dim("batch", min=2, max=64), 1: Dim("heads", min=2, max=64)},)
    others = ((tensor((5, 3, 6, 9), 1),), (tensor((3, 7, 6, 9), 2),))
    assert_exports(Selects(), (tensor((2, 4, 6, 9), 0),), others, tmp_path / "selects.pt2", dynamic_shapes=shapes, strict=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_a_package_of_aot_inductor(tmp_path):
    given_tensors = tuple(given.detach() for given in arguments_of(60, 7, "cpu", torch.float32))

    class Masked(torch.nn.Module):
        def forward(self, *tensors):
            return masked(*tensors)

    length = Dim("length", min=8, max=4096)
    program = torch.export.export(Masked(), given_tensors, dynamic_shapes=(tuple({2: length} for _ in range(4)),))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "lists.pt2"))
    loaded = torch._inductor.aoti_load_package(package)
    for count in (60, 100):
        tensors = tuple(given.detach() for given in arguments_of(count, 7, "cpu", torch.float32))
        torch.testing.assert_close(loaded(*tensors), masked(*tensors))


def test_checkpointed_and_under_autocast(device):
    *leaves, indices = arguments_of(60, 7, device, torch.bfloat16)
    expected = torch.autograd.grad(masked(*leaves, indices).float().square().sum(), leaves)
    again = torch.autograd.grad(checkpoint(masked, *leaves, indices, use_reentrant=False).float().square().sum(), leaves)
    assert all(map(torch.equal, expected, again))
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(masked(*(leaf.float() for leaf in leaves), indices), masked(*leaves, indices))
