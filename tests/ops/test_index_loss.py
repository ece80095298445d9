"""The indexer's loss and its gradients against autograd."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import sys
from unittest import mock

import dmattn
import pytest
import torch
import torch.nn.functional as F
from dmattn import IndexMask, IntervalMask
from dmattn.index_products import AllProducts
from dmattn.indexer import mean_keys
from dmattn.testing import strategies, tolerance
from hypothesis import given
from hypothesis import strategies as st
from test_indexer import Choice, Indexer

tensor = strategies.random_tensor


def by_autograd(indexer, query, key, key_bias, choice, *, rows, listed=None, sharp=False):
    """The loss by its definition, over all pairs; indexer's tensors in float64."""
    B, G, Sq, Sk, size = *indexer.weights.shape[:3], key.shape[2], choice.block_size
    seen = listed if listed is None or choice.base is None else listed & choice.base
    weights = dmattn.attention_weights(query, key, choice.base if listed is None else seen, is_causal=True, key_bias=key_bias)
    weights = weights.unflatten(1, (G, -1)).mean(2)[:, :, rows]
    position, place = rows[:, None] + (Sk - Sq), torch.arange(Sk)
    visible = (place <= position).expand(B, G, -1, -1)
    if choice.base is not None:
        visible = visible & choice.base.to_bool(Sq, Sk)[:, :, rows]
    forced = (place < choice.sink_keys) | ((place <= position) & (place > position - choice.local))
    competing = visible & ~forced
    if listed is not None:
        competing = competing & IndexMask(listed.indices, size).to_bool(Sq, Sk)[:, :, rows]
    taught = Indexer(indexer.query[:, :, rows] * 4 / 16**0.5, indexer.key, indexer.weights[:, :, rows], indexer.slope)
    whole = Sk // size if choice.block_score == "mean_key" else -(-Sk // size)

    def blocks(given, beyond):
        return F.pad(given, (0, max(0, whole * size - Sk)), value=beyond)[..., : whole * size].unflatten(3, (whole, size))

    compete = blocks(competing, False).any(4)
    if choice.block_score == "mean_key":
        scores = taught.scores(position, mean_keys(indexer.key, size), torch.arange(whole) * size + (size - 1) / 2)
        compete = compete & blocks(visible, False).all(4)
    else:
        scores = blocks(torch.where(competing, taught.scores(position), -math.inf), -math.inf).amax(4)
    mass = torch.where(compete, blocks(torch.where(competing, weights, 0.0), 0.0).sum(4), 0.0)
    total = mass.sum(3, keepdim=True)
    share = torch.where(total > 0, mass / total, 0.0)
    predicted = torch.where(compete, scores, -1e30).log_softmax(3)
    divergence = torch.where(share > 0, share * (share.clamp(min=1e-300).log() - predicted), 0.0).sum(3)
    factor = total * mass.amax(3, keepdim=True) if sharp else (total > 0).double()
    if choice.base is not None:  # a query whose own key is hidden is padding
        factor = factor * visible.gather(3, position.clamp(min=0).expand(B, G, -1, 1))
    return (factor[..., 0] * divergence).mean()


@dataclasses.dataclass
class LossCase:
    """What index_loss is asked for; float64 tensors of ``sizes`` B, G, H, Hkv, Sq, Sk, Hi."""

    sizes: tuple[int, ...]
    choice: Choice
    rows: torch.Tensor | None = None
    lists: torch.Tensor | None = None
    sharp: bool = False
    has_bias: bool = True
    has_slope: bool = True

    def __post_init__(self):
        B, G, H, kv_heads, Sq, Sk, Hi = self.sizes
        sizes = ((B, G, Sq, Hi, 16), (B, G, Sk, 16), (B, G, Sq, Hi), (G,), (B, H, Sq, 16), (B, kv_heads, Sk, 16), (1, H, Sk))
        drawn = [tensor(size, n, torch.bfloat16).double() for n, size in enumerate(sizes)]
        self.leaves, self.given = drawn[: 4 if self.has_slope else 3], drawn[4:6]
        self.key_bias = drawn[6] if self.has_bias else None

    def loss(self, device="cpu", dtype=torch.float64):
        """The loss and its gradients, on the CPU in float64."""
        leaves = [leaf.to(device, leaf.dtype if n == 3 else dtype).requires_grad_() for n, leaf in enumerate(self.leaves)]
        choice = self.choice
        options = {} if self.lists is not None else {"local": choice.local, "sink_keys": choice.sink_keys, "is_causal": True}
        options["mask"] = None if self.lists is None else self.listed().to(device)
        loss = dmattn.index_loss(
            *leaves[:3], *(given.to(device, dtype) for given in self.given), rows=None if self.rows is None else self.rows.to(device),
            base=None if choice.base is None else choice.base.to(device), key_bias=None if self.key_bias is None else self.key_bias.to(device),
            block_size=choice.block_size, block_score=choice.block_score, slope=leaves[3] if self.has_slope else None, sharp=self.sharp,
            **options,
        )  # fmt: skip
        return [given.detach().cpu().double() for given in (loss, *torch.autograd.grad(loss, leaves))]

    def listed(self):
        choice = self.choice
        return IndexMask(self.lists, choice.block_size, is_causal=True, local=choice.local, sink_keys=choice.sink_keys)

    def expected(self):
        leaves = [leaf.clone().requires_grad_() for leaf in self.leaves]
        rows = torch.arange(self.sizes[4]) if self.rows is None else self.rows
        listed = None if self.lists is None else self.listed()
        indexer = Indexer(*leaves, *(() if self.has_slope else (None,)))
        loss = by_autograd(indexer, *self.given, self.key_bias, self.choice, rows=rows, listed=listed, sharp=self.sharp)
        gradients = (
            torch.autograd.grad(loss, leaves, materialize_grads=True) if loss.requires_grad else map(torch.zeros_like, leaves)
        )
        return [loss.detach(), *gradients]


@pytest.mark.brief
@pytest.mark.parametrize("sharp", [False, True])
@pytest.mark.parametrize("way", ["rows", "all", "lists"])
@pytest.mark.parametrize(("block_size", "block_score"), [(1, "max"), (4, "max"), (4, "mean_key")])
@pytest.mark.parametrize(("groups", "kv_heads"), [(2, 2), (1, 2), (4, 2)])
def test_loss_and_gradients(monkeypatch, sharp, way, block_size, block_score, groups, kv_heads):
    monkeypatch.setattr(sys.modules["dmattn.index_loss"], "ELEMENTS", 1 << 12)  # a few queries at once
    base = IntervalMask.documents(37, torch.tensor([0, 20, 37])) if way != "all" else None
    choice = Choice(33, 37, block_size, block_score, local=3, sink_keys=1, base=base)
    lists = torch.randint(-1, -(-37 // block_size), (2, groups, 33, 6), generator=torch.Generator().manual_seed(0))
    case = LossCase(
        (2, groups, 4, kv_heads, 33, 37, 3), choice, torch.tensor([3, 0, 17, 17, 32]) if way == "rows" else None,
        lists if way == "lists" else None, sharp,
    )  # fmt: skip
    for got, wanted in zip(case.loss(), case.expected(), strict=True):
        torch.testing.assert_close(got, wanted)


class Rounded:
    """The tolerance rule for the loss's gradients by index queries and keys, which are products with gradients rounded to bfloat16."""

    def __init__(self):
        self.by_query = self.by_key = None  # sums of squares of what is rounded; none for lists, which round nothing

    @contextlib.contextmanager
    def recorded(self):
        """Of a loss in float64 that is computed within, for all its queries at once."""
        original = AllProducts.gradients

        def gradients(products, index_query, of_products):
            assert self.by_query is None
            squared = copy.copy(products)
            squared.finite_key = products.finite_key.square()
            self.by_query, self.by_key = original(squared, index_query.square(), of_products.square())
            return original(products, index_query, of_products)

        with mock.patch.object(AllProducts, "gradients", gradients):
            yield

    def compare(self, dtype, got, expected, leaves, rows, block_size):
        """The loss and its gradients by index queries, index keys, weights and slopes, of which the first two have terms of their own."""
        B, G, Sq, Hi, _ = leaves[0].shape
        rows = torch.arange(Sq) if rows is None else rows
        sums = [torch.zeros_like(given) for given in expected[1:3]]
        if self.by_query is not None:
            sums[0].index_add_(2, rows, self.by_query)
            is_pooled = self.by_key.shape[2] < sums[1].shape[2]  # by the means of blocks
            by_key = (self.by_key / block_size**2).repeat_interleave(block_size, dim=2) if is_pooled else self.by_key
            sums[1][:, :, : by_key.shape[2]] += by_key
        mean = 1 / (B * G * len(rows))
        # An attention weight and a softmax of 1 each, rounded, times all that they are multiplied with.
        arithmetic = mean * (Hi * len(rows)) ** 0.5 * math.prod(given.abs().max().item() for given in leaves[:3])
        for name, result, truth, squares in zip(("query", "key"), got[1:3], expected[1:3], sums, strict=True):
            terms = tolerance.Terms(mean * squares.sqrt(), torch.full_like(truth, arithmetic))
            tolerance.compare_in(dtype, f"grad_index_{name}", result.to(dtype), truth, truth.to(dtype), terms, case=None)
        for result, truth in zip((got[0], *got[3:]), (expected[0], *expected[3:]), strict=True):
            torch.testing.assert_close(result.to(dtype), truth.to(dtype))


@st.composite
def loss_cases(draw):
    groups, kv_heads = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (3, 3), (4, 2)]))
    B, heads = draw(st.integers(1, 2)), max(groups, kv_heads) * draw(st.integers(1, 3))
    block_size, block_score = draw(st.sampled_from([1, 1, 2, 8, 32])), draw(st.sampled_from(["max", "mean_key"]))
    Sq, Sk = draw(st.integers(1, 40)), draw(st.integers(block_size if block_score == "mean_key" else 1, 70))
    base = None
    if draw(st.booleans()):
        numbers = [draw(st.lists(st.integers(low, 2 * Sk), min_size=Sk, max_size=Sk)) for low in (-Sk, 0)]
        start, length = (torch.tensor(given).view(1, 1, Sk) for given in numbers)
        base = IntervalMask(start.int(), (start + length).int())
    choice = Choice(
        Sq, Sk, block_size, block_score, local=draw(st.sampled_from([0, 1, 5, 80])),
        sink_keys=draw(st.sampled_from([0, 1, 30])), base=base,
    )  # fmt: skip
    generator, rows, lists = torch.Generator().manual_seed(draw(strategies.seeds())), None, None
    has_lists = groups in (1, kv_heads, heads)  # attention has none of other groups
    ways = ["rows", "all", "lists"] if has_lists else ["rows", "all"]
    way = draw(st.sampled_from(ways))
    if way == "rows":
        rows = torch.randint(0, Sq, (draw(st.integers(1, 9)),), generator=generator)
    elif way == "lists":
        sizes = (draw(st.sampled_from([1, B])), draw(st.sampled_from([1, groups])), Sq, draw(st.integers(1, 12)))
        lists = torch.randint(-1, -(-Sk // block_size), sizes, generator=generator)
    beside = [draw(st.booleans()) for _ in range(3)]
    return LossCase((B, groups, heads, kv_heads, Sq, Sk, draw(st.integers(1, 5))), choice, rows, lists, *beside)


@given(case=loss_cases())
def test_drawn_losses(device, dtype, case):
    if device == "cpu":
        for got, wanted in zip(case.loss(), case.expected(), strict=True):
            torch.testing.assert_close(got, wanted)
    else:
        rounded = Rounded()
        with rounded.recorded():
            expected = case.loss()
        rounded.compare(dtype, case.loss(device, dtype), expected, case.leaves, case.rows, case.choice.block_size)


@pytest.mark.parametrize("way", ["rows", "lists", "pooled"])
def test_padding_may_hold_anything(way):
    """Tokens that nobody sees change neither the loss nor its gradients."""
    length = 24
    sizes = ((1, 2, length, 3, 16), (1, 2, length, 16), (1, 2, length, 3))
    leaves = [tensor(size, 3 + n, torch.float64) for n, size in enumerate(sizes)]
    query, key = tensor((1, 4, length, 16), 0, torch.float64), tensor((1, 2, length, 16), 1, torch.float64)
    base = IntervalMask.padding(length, torch.tensor([17]))
    options = {"base": base, "sharp": True}
    if way == "lists":
        lists = torch.randint(0, length, (1, 2, length, 6), generator=torch.Generator().manual_seed(0))
        options["mask"] = IndexMask(lists, is_causal=True, local=2)
    else:
        options |= {"local": 2, "block_size": 4, "block_score": "mean_key"} if way == "pooled" else {"local": 2}
    found = []
    for filling in (0.0, math.nan):
        given = [leaf.clone() for leaf in (*leaves, query, key)]
        for leaf in given:
            leaf[:, :, 17:] = filling
        given = [leaf.requires_grad_(n < 3) for n, leaf in enumerate(given)]
        loss = dmattn.index_loss(*given, **options)
        found.append((loss, *torch.autograd.grad(loss, given[:3])))
    for plain, filled in zip(*found, strict=True):
        assert torch.equal(plain, filled)
    assert all(gradient.abs().sum() > 0 for gradient in found[0][1:])


def test_loss_in_short_dtypes(device, dtype):
    sizes = ((1, 2, 60, 2, 16), (1, 2, 60, 16), (1, 2, 60, 2), (1, 4, 60, 32), (1, 2, 60, 32))
    given = [tensor(size, n, dtype, device) for n, size in enumerate(sizes)]
    rows = torch.arange(0, 60, 7)

    def found(given):
        leaves = [leaf.detach().requires_grad_() for leaf in given[:3]]
        loss = dmattn.index_loss(*leaves, *given[3:], rows=rows.to(given[0].device), local=4, softcap=5.0)
        return [x.detach().cpu().double() for x in (loss, *torch.autograd.grad(loss, leaves))]

    rounded = Rounded()
    with rounded.recorded():
        expected = found([x.cpu().double() for x in given])
    results = found(given)
    torch.testing.assert_close(results[0].float(), expected[0].float())
    rounded.compare(dtype, results, expected, [x.cpu() for x in given], rows, block_size=1)


def test_loss_teaches_what_attention_looks_at(device):
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 64, 16, device=device).bfloat16() * 2, torch.randn(1, 2, 64, 16, device=device).bfloat16()
    leaves = [torch.randn(size, device=device).requires_grad_() for size in ((1, 2, 64, 2, 16), (1, 2, 64, 16), (1, 2, 64, 2))]
    adam = torch.optim.Adam(leaves, 0.05)
    losses = []
    for _ in range(60):
        loss = dmattn.index_loss(leaves[0].bfloat16(), leaves[1].bfloat16(), leaves[2], query, key)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4


def test_loss_compiles(device, dtype):
    query, key = tensor((1, 4, 40, 32), 0, dtype, device), tensor((1, 2, 40, 32), 1, dtype, device)
    sizes = ((1, 40, 2, 2, 16), (1, 40, 2, 16), (1, 40, 2, 2))
    leaves = [tensor(size, 3 + n, dtype, device).requires_grad_() for n, size in enumerate(sizes)]
    rows = torch.arange(0, 40, 3, device=device)

    def loss(*leaves):  # of views, as a layer's projections are
        return dmattn.index_loss(*(leaf.transpose(1, 2) for leaf in leaves), query, key, rows=rows, local=4)

    compiled = torch.compile(loss, fullgraph=True)
    for got, wanted in zip(
        torch.autograd.grad(compiled(*leaves), leaves), torch.autograd.grad(loss(*leaves), leaves), strict=True
    ):
        torch.testing.assert_close(got, wanted)


def test_loss_is_differentiated_once():
    leaves = [
        tensor(size, n, torch.float64).requires_grad_() for n, size in enumerate(((1, 1, 9, 2, 8), (1, 1, 9, 8), (1, 1, 9, 2)))
    ]
    loss = dmattn.index_loss(*leaves, *(tensor((1, 2, 9, 8), n, torch.float64) for n in (4, 5)))
    with pytest.raises(RuntimeError, match="index_loss: its gradient cannot be differentiated again"):
        torch.autograd.grad(loss, leaves, create_graph=True)


def test_loss_refuses_what_would_lose_its_gradient():
    query, *rest = (tensor(size, n, torch.float64) for n, size in enumerate(((1, 1, 9, 2, 8), (1, 1, 9, 8), (1, 1, 9, 2))))
    rest += [tensor((1, 2, 9, 8), n, torch.float64) for n in (4, 5)]

    def loss(query):
        return dmattn.index_loss(query, *rest)

    for differentiate in (torch.func.grad(loss), lambda x: torch.func.jvp(loss, (x,), (x,))):
        with pytest.raises(RuntimeError, match=r"index_loss: expected backward\(\) or torch.autograd.grad"):
            differentiate(query)
    torch.testing.assert_close(torch.vmap(loss)(torch.stack((query, -query))), torch.stack((loss(query), loss(-query))))


@pytest.mark.parametrize(("end", "is_padding"), [(7, True), (8, False)])
def test_a_query_that_does_not_see_its_own_key_is_padding(end, is_padding):
    given = [tensor(size, n) for n, size in enumerate(((1, 1, 9, 2, 8), (1, 1, 9, 8), (1, 1, 9, 2), (1, 2, 9, 8), (1, 2, 9, 8)))]
    ends = torch.full((1, 1, 9), 9, dtype=torch.int32)
    ends[..., 7] = end
    base = IntervalMask(torch.zeros_like(ends), ends)
    assert (dmattn.index_loss(*given, rows=torch.tensor([7]), base=base).item() == 0) == is_padding


@pytest.mark.parametrize(
    "options", [{"k": 0}, {"block_size": 16, "block_score": "mean_key"}], ids=["no entries", "no whole block"]
)
def test_loss_where_nothing_competes(options):
    sizes = ((1, 2, 9, 2, 8), (1, 2, 9, 8), (1, 2, 9, 2), (2,))
    *leaves, slope = (tensor(size, n).requires_grad_() for n, size in enumerate(sizes))
    k, options = options.get("k"), {name: option for name, option in options.items() if name != "k"}
    mask = None if k is None else dmattn.index_top_k(*leaves, k)
    loss = dmattn.index_loss(*leaves, *(tensor((1, 2, 9, 8), n) for n in (4, 5)), slope=slope, mask=mask, **options)
    gradients = torch.autograd.grad(loss, (*leaves, slope))
    assert loss.item() == 0
    assert not any(gradient.any() for gradient in gradients)


def test_groups_may_have_several_key_heads():
    """Two lists for eight heads on four key heads: the mean of the two groups' losses."""
    index_query, index_key, weights = (
        tensor(size, n, torch.float64) for n, size in enumerate(((1, 2, 9, 2, 8), (1, 2, 9, 8), (1, 2, 9, 2)))
    )
    query, key = tensor((1, 8, 9, 8), 3, torch.float64), tensor((1, 4, 9, 8), 4, torch.float64)
    mask = dmattn.index_top_k(index_query, index_key, weights, 3)
    of_groups = [
        dmattn.index_loss(
            *(given[:, g : g + 1] for given in (index_query, index_key, weights)), query[:, 4 * g : 4 * g + 4], key[:, 2 * g : 2 * g + 2],
            mask=mask._replace(indices=mask.indices[:, g : g + 1]),
        )
        for g in range(2)
    ]  # fmt: skip
    torch.testing.assert_close(dmattn.index_loss(index_query, index_key, weights, query, key, mask=mask), sum(of_groups) / 2)
    ends = torch.tensor([[[*[4] * 4, *[9] * 5], [*[6] * 6, *[9] * 3]]], dtype=torch.int32)
    base = IntervalMask(torch.zeros_like(ends), ends)  # documents of each group
    of_groups = [
        dmattn.index_loss(
            *(given[:, g : g + 1] for given in (index_query, index_key, weights)), query[:, 4 * g : 4 * g + 4], key[:, 2 * g : 2 * g + 2],
            mask=mask._replace(indices=mask.indices[:, g : g + 1]), base=IntervalMask(base.start[:, g : g + 1], ends[:, g : g + 1]),
        )
        for g in range(2)
    ]  # fmt: skip
    loss = dmattn.index_loss(index_query, index_key, weights, query, key, mask=mask, base=base)
    torch.testing.assert_close(loss, sum(of_groups) / 2)
