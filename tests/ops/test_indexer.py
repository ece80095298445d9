"""The indexer's scores and its choice of keys against brute force."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import dmattn
import pytest
import torch
import torch.nn.functional as F
from dmattn import IntervalMask
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


def test_positions_far_away_choose_as_those_behind_all_keys():
    given = tensor((1, 1, 5, 2, 8), 0), tensor((1, 1, 9, 8), 1), tensor((1, 1, 5, 2), 2)
    expected = dmattn.index_top_k(*given, 3, query_offset=20).indices
    for far in (2**31 - 2, torch.tensor(2**40)):
        assert torch.equal(dmattn.index_top_k(*given, 3, query_offset=far).indices, expected)


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
