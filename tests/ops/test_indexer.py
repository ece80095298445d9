"""The indexer's choice of keys against brute force, and its loss against autograd."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import sys
from functools import partial
from unittest import mock

import dmattn
import pytest
import torch
import torch.nn.functional as F
from dmattn import IndexMask, IntervalMask
from dmattn.index_products import AllProducts
from dmattn.indexer import mean_keys
from dmattn.testing import poisoned_memory, strategies, tolerance
from hypothesis import given
from hypothesis import strategies as st

tensor = strategies.random_tensor


@dataclasses.dataclass
class Indexer:
    """Numbers whose scores are the same in whatever order and dtype they are summed: small integers, and a scale of 1/4."""

    query: torch.Tensor
    key: torch.Tensor
    weights: torch.Tensor
    slope: torch.Tensor | None

    @classmethod
    def exact(cls, B, G, Sq, Sk, Hi, dtype, device, *, seed=0, slope=True, distinct=3):
        draw = torch.Generator().manual_seed(seed)

        def integers(*size, most=distinct):
            return torch.randint(-most, most + 1, size, generator=draw).to(device, dtype)

        slopes = torch.tensor([0.0, 0.25, -0.5, 1.0])[:G].to(device) if slope else None
        return cls(integers(B, G, Sq, Hi, 16), integers(B, G, Sk, 16), integers(B, G, Sq, Hi), slopes)

    @property
    def tensors(self):
        return self.query, self.key, self.weights

    def scores(self, position, keys=None, places=None):
        """[B, G, Sq, n] in float64, of queries at ``position`` [B|1, 1, Sq, 1]; keys [B, G, n, Di] at ``places`` [n]."""
        keys = self.key if keys is None else keys
        places = torch.arange(keys.shape[2], device=keys.device) if places is None else places
        products = torch.einsum("bgthd,bgsd->bgths", self.query.double(), keys.double()) / 4
        scores = (products.relu() * self.weights.double()[..., None]).sum(3)
        return scores if self.slope is None else scores + self.slope.double()[:, None, None] * (places - position)


def best(scores, k):
    """The places of the k largest numbers of each row, equal ones: the later; ascending, -1 behind them."""
    n = scores.shape[-1]
    order = n - 1 - scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :k]
    order = torch.where(scores.gather(-1, order) > -math.inf, order, n).sort(dim=-1).values
    return torch.where(order == n, -1, order).int()


@dataclasses.dataclass
class Choice:
    """What may be chosen: options of index_top_k, and the sets that they mean."""

    Sq: int
    Sk: int
    block_size: int = 1
    block_score: str = "max"
    is_causal: bool = True
    local: int = 0
    sink_keys: int = 0
    base: IntervalMask | None = None
    offset: torch.Tensor | None = None
    lengths: torch.Tensor | None = None

    def expected(self, indexer, k):
        """Lists, by brute force over pairs."""
        device = indexer.key.device
        key, row = torch.arange(self.Sk, device=device), torch.arange(self.Sq, device=device)[:, None]
        lengths = (
            torch.tensor(self.Sk, device=device) if self.lengths is None else self.lengths[:, None, None, None].clamp(0, self.Sk)
        )
        position = row + (lengths - self.Sq if self.offset is None else self.offset.view(-1, 1, 1, 1))
        position = position.view(-1, 1, self.Sq, 1)
        visible = (key < lengths) & ((key <= position) | (not self.is_causal))
        if self.base is not None:
            visible = visible & (self.base.start[:, :, None] <= position) & (position < self.base.end[:, :, None])
        forced = (key < self.sink_keys) | ((key <= position) & (key > position - self.local))
        if self.block_score == "max" or self.block_size == 1:
            scores = torch.where(visible & ~forced, indexer.scores(position), -math.inf)
            scores = F.pad(scores, (0, -self.Sk % self.block_size), value=-math.inf).unflatten(3, (-1, self.block_size)).amax(4)
            return best(scores, k)
        whole = self.Sk // self.block_size
        places = torch.arange(whole, device=device) * self.block_size + (self.block_size - 1) / 2
        scores = indexer.scores(position, mean_keys(indexer.key, self.block_size), places)
        visible, forced = (
            x[..., : whole * self.block_size].unflatten(-1, (whole, self.block_size))
            for x in torch.broadcast_tensors(visible, forced)
        )
        return best(torch.where(visible.all(-1) & ~forced.all(-1), scores, -math.inf), k)

    def options(self):
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: given[name] for name in given if name not in ("Sq", "Sk", "offset")} | {
            "query_offset": self.offset,
            "scale": 0.25,
        }


@st.composite
def choices(draw, B, G, device):
    Sq, Sk = draw(st.integers(1, 70)), draw(st.integers(1, 300) | st.just(700))
    base = offset = lengths = None
    if draw(st.booleans()):
        heads = draw(st.sampled_from([1, G]))
        start = torch.tensor(draw(st.lists(st.integers(-3, Sk), min_size=heads * Sk, max_size=heads * Sk))).view(1, heads, Sk)
        length = torch.tensor(draw(st.lists(st.integers(0, 2 * Sk), min_size=heads * Sk, max_size=heads * Sk))).view(1, heads, Sk)
        base = IntervalMask(start.int().to(device), (start + length).int().to(device))
    if draw(st.booleans()):
        lengths = torch.tensor(draw(st.lists(st.integers(0, Sk + 2), min_size=B, max_size=B)), dtype=torch.int32, device=device)
    if draw(st.booleans()):
        offset = torch.tensor(draw(st.lists(st.integers(-Sq, Sk), min_size=B, max_size=B)), dtype=torch.int32, device=device)
    return Choice(
        Sq, Sk, draw(st.sampled_from([1, 1, 2, 4, 8, 16, 32, 64, 128])), draw(st.sampled_from(["max", "mean_key"])), draw(st.booleans()),
        draw(st.sampled_from([0, 1, 7, 64, 500])), draw(st.sampled_from([0, 1, 5, 400])), base, offset, lengths,
    )  # fmt: skip


@given(data=st.data())
def test_lists_equal_brute_force(device, dtype, data):
    B, G = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    choice = data.draw(choices(B, G, device))
    indexer = Indexer.exact(
        B, G, choice.Sq, choice.Sk, data.draw(st.integers(1, 5)), dtype, device, seed=data.draw(strategies.seeds()),
        slope=data.draw(st.booleans()), distinct=data.draw(st.sampled_from([1, 3])),
    )  # fmt: skip
    if choice.block_score == "mean_key":  # a mean of integers, too
        indexer.key = (
            indexer.key * 0 + indexer.key[:, :, :: choice.block_size].repeat_interleave(choice.block_size, 2)[:, :, : choice.Sk]
        )
    k = data.draw(st.sampled_from([0, 1, 3, 17, 64, 1000]))
    with poisoned_memory(indexer.query):
        mask, scores = dmattn.index_top_k(*indexer.tensors, k, slope=indexer.slope, return_scores=True, **choice.options())
    expected = choice.expected(indexer, k)
    assert torch.equal(mask.indices, expected)
    assert (mask.block_size, mask.is_causal, mask.local, mask.sink_keys) == (
        choice.block_size, choice.is_causal, choice.local, choice.sink_keys,
    )  # fmt: skip
    assert torch.equal(scores == -math.inf, expected == -1)


@pytest.mark.brief
@pytest.mark.parametrize(("local", "heads"), [(0, 1), (1, 128), (2, 4)])
def test_keys_that_are_local_or_sinks_are_not_listed(device, dtype, local, heads):
    query, key = torch.ones(1, 1, 9, heads, 16, device=device, dtype=dtype), torch.ones(1, 1, 9, 16, device=device, dtype=dtype)
    weights = torch.ones(1, 1, 9, heads, device=device)
    lists = dmattn.index_top_k(query, key, weights, 9, local=local, sink_keys=1).indices[0, 0].tolist()
    assert lists == [[*range(1, row - local + 1), *[-1] * 9][:9] for row in range(9)]


@pytest.mark.parametrize("length", [2048, 2049, 8200, 33_000])
@pytest.mark.parametrize("kind", ["ties", "steps", "wide", "infinite", "where samples are"])
def test_long_rows(device, dtype, length, kind):
    """Lengths at which a GPU takes another kernel, and scores that bins part badly, or of which a regular sample says little."""
    draw, rows = torch.Generator().manual_seed(length), 150 if kind == "wide" else 3  # few rows have more threads each
    value = {
        "ties": torch.ones(length),
        "steps": torch.randint(0, 3, (length,), generator=draw).float(),
        "wide": 2.0 ** torch.randint(-14, 14, (length,), generator=draw),
        "infinite": torch.where(torch.rand(length, generator=draw) < 0.1, math.inf, torch.rand(length, generator=draw)),
        "where samples are": (torch.arange(length) * 128 % length < 128) + torch.rand(length, generator=draw),
    }[kind]
    key = torch.zeros(1, 1, length, 16)
    key[..., 0] = value
    key[..., ::7, 1] = math.nan
    key[..., ::11, 0] = 0.0
    key = key.to(device, dtype)
    query = torch.zeros(1, 1, rows, 1, 16, device=device, dtype=dtype)
    query[..., :2] = 1.0
    weights = torch.ones(1, 1, rows, 1, device=device)
    scores = torch.where(key[0, 0, :, 1].isnan(), -math.inf, key[0, 0, :, 0].double()).expand(1, 1, rows, -1)
    for k in (1, 100, length // 3, length - 5):
        got = dmattn.index_top_k(query, key, weights, k, scale=1.0, is_causal=False)
        assert torch.equal(got.indices, best(scores, k))


def sampled_block(group, log2):
    """Which block of a group of 2^log2 a GPU has in its sample: the hash of cpp/params.h."""
    x = group ^ (group >> 16)
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return (group << log2) + ((x ^ (x >> 16)) & ((1 << log2) - 1))


@pytest.mark.parametrize("heads", [1, 7])
@pytest.mark.parametrize("is_better", [False, True])
@pytest.mark.parametrize("log2", range(2, 8))
def test_a_sample_that_misleads(device, dtype, log2, is_better, heads):
    """The sample, whichever a GPU takes, has the best scores, or the worst: rows with too few or too many candidates are scored again."""
    length = 16384
    sampled = torch.tensor([sampled_block(group, log2) for group in range(length >> log2)])
    score = torch.randperm(length, generator=torch.Generator().manual_seed(log2)) + length
    score[sampled] += length if is_better else -length
    key = torch.zeros(1, 1, length, 16)
    key[..., 0], key[..., 1] = score // 256, score % 256
    query = torch.zeros(1, 1, 5, heads, 16)
    query[..., 0, 0], query[..., 0, 1] = 256.0, 1.0
    weights = torch.ones(1, 1, 5, heads, device=device)
    offset = torch.tensor([length - 4], dtype=torch.int32, device=device)
    positions = length - 4 + torch.arange(5)[:, None]
    expected = torch.where(torch.arange(length) <= positions, score.double(), -math.inf)
    for k in (40, 1500):
        mask, scores = dmattn.index_top_k(
            query.to(device, dtype), key.to(device, dtype), weights, k, scale=1.0, query_offset=offset, return_scores=True
        )
        assert torch.equal(mask.indices[0, 0], best(expected, k).to(device))
        assert torch.equal(scores[0, 0].double().cpu(), expected.gather(1, mask.indices[0, 0].long().cpu()))


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 8), (4, 32), (2, 40), (3, 64), (64, 128), (2, 136), (1, 256)])
@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_scores_are_those_of_the_definition(device, dtype, heads, head_dim, block_size):
    query, key = tensor((2, 2, 70, heads, head_dim), 0, dtype, device), tensor((2, 2, 333, head_dim), 1, dtype, device)
    weights, slope = tensor((2, 2, 70, heads), 2, torch.float32, device), tensor((2,), 3, torch.float32, device) / 100
    mask, scores = dmattn.index_top_k(
        query, key, weights, 20, slope=slope, block_size=block_size, is_causal=False, return_scores=True
    )

    def of_blocks(given, beyond=-math.inf):
        return F.pad(given, (0, -333 % block_size), value=beyond).unflatten(3, (-1, block_size)).amax(4)

    eager = of_blocks(dmattn.index_scores(query, key, weights, slope=slope)).double()
    exact = of_blocks(dmattn.index_scores(*(x.double() for x in (query, key, weights)), slope=slope.double()))
    # What a score sums, without signs.
    sizes = torch.einsum("bgthd,bgsd->bgths", query.double() ** 2, key.double() ** 2).sqrt() / head_dim**0.5
    sizes = (sizes * weights.double().abs()[..., None]).sum(3) + slope.double().abs()[:, None, None] * 400
    listed = mask.indices.long()
    assert (listed >= 0).all()
    own = tolerance.Terms(torch.zeros_like(scores), of_blocks(sizes).gather(3, listed))
    compare = partial(tolerance.compare_in, torch.float32, terms=own, case=None)
    compare("lse", scores, exact.gather(3, listed), eager.gather(3, listed))
    # Nothing outside beats anything inside: the chosen ones are the best, by their exact scores.
    k = listed.shape[3]
    by_eager = exact.gather(3, eager.topk(k).indices).sort(3, descending=True).values
    compare("lse", exact.gather(3, listed).sort(3, descending=True).values, exact.topk(k).values, by_eager)


def test_prefill_and_decoding_choose_alike(device, dtype):
    query, key, weights = (tensor((2, 2, *size), n, dtype, device) for n, size in enumerate(((90, 4, 32), (90, 32), (90, 4))))
    slope = torch.tensor([0.01, 0.0], device=device)
    whole = dmattn.index_top_k(query, key, weights, 12, local=5, sink_keys=2, slope=slope)
    pages = torch.randperm(12, generator=torch.Generator().manual_seed(0)).view(2, 6).int().to(device)
    pool = torch.zeros(12, 16, 2, 32, dtype=dtype, device=device)
    padded = F.pad(key, (0, 0, 0, 6)).unflatten(2, (6, 16)).permute(0, 2, 3, 1, 4)  # [B, 6, 16, G, Di]
    pool[pages.long()] = padded
    for step in (0, 31, 89):
        lengths = torch.full((2,), step + 1, dtype=torch.int32, device=device)
        given = (query[:, :, step : step + 1], weights[:, :, step : step + 1])
        for keys, table in ((key, None), (pool, pages)):
            alone = dmattn.index_top_k(
                given[0], keys, given[1], 12, local=5, sink_keys=2, slope=slope, lengths=lengths, page_table=table
            )
            assert torch.equal(alone.indices[..., :12], whole.indices[:, :, step : step + 1])


def test_the_same_lists_from_run_to_run(device, dtype):
    query, key, weights = (tensor((1, 2, *size), n, dtype, device) for n, size in enumerate(((300, 4, 32), (300, 32), (300, 4))))
    first = dmattn.index_top_k(query, key, weights, 40)
    for _ in range(3):
        assert torch.equal(dmattn.index_top_k(query, key, weights, 40).indices, first.indices)


def test_strided_and_unaligned_inputs(device, dtype):
    query, key, weights = (tensor((2, 2, *size), n, dtype, device) for n, size in enumerate(((40, 3, 24), (50, 24), (40, 3))))
    expected = dmattn.index_top_k(query, key, weights, 7)
    odd = F.pad(query, (1, 0))[..., 1:], F.pad(key, (3, 0))[..., 3:], weights.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(dmattn.index_top_k(*odd, 7).indices, expected.indices)
    heads = tensor((2, 2, 40, 8, 24), 3, dtype, device), tensor((2, 2, 40, 8), 4, dtype, device)
    alone = F.pad(heads[0], (0, 1))[..., :24]  # heads alone are not at multiples of 16 bytes
    assert torch.equal(
        dmattn.index_top_k(alone, key, heads[1], 7).indices, dmattn.index_top_k(heads[0], key, heads[1], 7).indices
    )
    as_projected = (
        query.permute(0, 2, 1, 3, 4).contiguous().permute(0, 2, 1, 3, 4),
        key.transpose(1, 2).contiguous().transpose(1, 2),
    )
    assert torch.equal(dmattn.index_top_k(*as_projected, weights, 7).indices, expected.indices)


def test_one_bound_alone(device, dtype):
    """The op takes either bound without the other, whose place has every key visible from the first query on, or for ever."""
    indexer = Indexer.exact(1, 2, 30, 41, 3, dtype, device)
    draw = torch.Generator().manual_seed(0)
    start, end = (torch.randint(low, 41, (1, 1, 41), generator=draw).int().to(device) for low in (0, 20))

    def chosen(start, end):
        given = (
            indexer.query,
            indexer.key,
            indexer.weights.to(torch.promote_types(dtype, torch.float32)),
            indexer.slope,
            start,
            end,
        )
        return torch.ops.dmattn.index_top_k(*given, None, None, 41, 6, 1, False, True, 0, 0, 0.25, False)[0]

    assert torch.equal(chosen(start, None), chosen(start, torch.full_like(end, 41)))
    assert torch.equal(chosen(None, end), chosen(torch.zeros_like(start), end))
    assert not torch.equal(chosen(start, None), chosen(None, None))
    assert not torch.equal(chosen(None, end), chosen(None, None))


def test_selection_has_no_gradient(device, dtype):
    query, key, weights = (
        tensor((1, 1, *size), n, dtype, device).requires_grad_() for n, size in enumerate(((9, 2, 8), (9, 8), (9, 2)))
    )
    mask, scores = dmattn.index_top_k(query, key, weights, 3, return_scores=True)
    assert not scores.requires_grad
    out = dmattn.attention(*(tensor((1, 2, 9, 16), n, dtype, device) for n in range(3)), mask)
    assert not out.requires_grad


@pytest.mark.long
def test_compile_with_dynamic_shapes(device, dtype):
    def chosen(query, key, weights, lengths):
        return dmattn.index_top_k(query, key, weights, 9, local=2, lengths=lengths).indices

    compiled = torch.compile(chosen, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (40, 77, 130):
            given = [tensor((2, 3, length, *rest), n, dtype, device) for n, rest in enumerate(((4, 16), (16,), (4,)))]
            lengths = torch.tensor([length, length - 9], dtype=torch.int32, device=device)
            assert torch.equal(compiled(*given, lengths), chosen(*given, lengths))


def test_vmap(device, dtype):
    query, key, weights = (tensor((3, 2, 2, *size), n, dtype, device) for n, size in enumerate(((12, 2, 8), (20, 8), (12, 2))))
    slopes = torch.rand(3, 2, device=device)

    def chosen(query, key, weights, slope):
        return dmattn.index_top_k(query, key, weights, 4, slope=slope, return_scores=True)[0].indices

    for slope, dim in ((slopes, 0), (slopes[0], None)):
        got = torch.vmap(chosen, in_dims=(0, 0, 0, dim))(query, key, weights, slope)
        each = [
            chosen(*given, slope if dim is None else slope[n]) for n, given in enumerate(zip(query, key, weights, strict=True))
        ]
        assert torch.equal(got, torch.stack(each))


# The loss ----------------------------------------------------------------------------------------------------------------------------


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


def test_a_pool_without_pages():
    query, weights, pages = tensor((1, 1, 1, 2, 8), 0), tensor((1, 1, 1, 2), 1), torch.zeros(0, 16, 1, 8)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="index_key: expected at least one page"):
        dmattn.index_top_k(query, pages, weights, 2, page_table=table, lengths=lengths)


def test_activation_none_is_linear():
    query, key, weights = (tensor((1, 2, *size), n) for n, size in enumerate(((5, 3, 8), (7, 8), (5, 3))))
    scores = dmattn.index_scores(query, key, weights, activation="none", scale=1.0)
    torch.testing.assert_close(scores, torch.einsum("bgthd,bgsd,bgth->bgts", query, key, weights))
    rows = torch.tensor([4, 0])
    torch.testing.assert_close(
        dmattn.index_scores(query, key, weights, rows=rows), dmattn.index_scores(query, key, weights)[:, :, rows]
    )
