"""The bounded cache: after every token its visible keys and its output are those of the whole history, however that was cut into calls."""

from __future__ import annotations

import bisect
import copy
import itertools
import math
from random import Random

import brute_check
import dmattn
import pytest
import torch
import torch._dynamo.testing
from dmattn import BoundedCache
from dmattn.testing import AttentionCase, poisoned_memory, strategies, tolerance, top_k_visible
from dmattn_bench import two_ways
from hypothesis import given, settings
from hypothesis import strategies as st

tensor = strategies.random_tensor
INF = math.inf
STATE = ("key", "value", "score", "position", "entered", "steps", "kept")
# window, local, sink_keys
SIZES = [(5, 0, 0), (5, 3, 0), (5, 3, 2), (0, 3, 2), (1, 1, 1), (100, 3, 2), (4, 0, 2), (0, 0, 3), (3, 40, 4)]


class History:
    """A history of tokens of B sequences, and what the whole of it says."""

    def __init__(self, length, dtype, device, kind="random", bad=(), B=2, H=4, Hkv=2, D=8, Dv=16, seed=0):
        self.query = tensor((B, H, length, D), seed, dtype, device)
        self.key, self.value = (
            tensor((B, Hkv, length, D), seed + 1, dtype, device),
            tensor((B, Hkv, length, Dv), seed + 2, dtype, device),
        )
        self.scores = strategies.make_scores((B, Hkv, length), kind, seed, torch.float32, device)
        chosen = torch.rand(self.scores.shape, generator=torch.Generator().manual_seed(seed))
        for number, value in enumerate(bad):
            self.scores[(chosen > number / 8) & (chosen < (number + 1) / 8)] = value
        self.length = length

    def cache(self, window, local, sink_keys, rewind=0, batch=None):
        B, Hkv, _, D = self.key.shape
        sizes = {"local": local, "sink_keys": sink_keys, "rewind": rewind, "dtype": self.key.dtype, "device": self.key.device}
        return BoundedCache(B if batch is None else batch, Hkv, window, D, self.value.shape[3], **sizes)

    def tokens(self, first, last, rows=slice(None)):
        return tuple(x[rows, :, first:last] for x in (self.query, self.key, self.value, self.scores))

    def case(self, visible, scores=None, **options):
        return AttentionCase(
            self.query, self.key, self.value, visible=visible, key_bias=self.scores if scores is None else scores, **options
        )

    def visible(self, cache, ranks=None):
        """bool [B, Hkv, length, length]: which keys each query sees; ranks: what selects, by default the scores."""
        return top_k_visible(
            self.scores if ranks is None else ranks, cache.sizes.window, local=cache.sizes.local, sink_keys=cache.sizes.sink_keys
        )


def seen_by(cache, length):
    """bool [B, Hkv, length]: the positions that the cache holds for a query to see."""
    position = cache.position[:, :, : cache.sizes.visible()].long()
    there = torch.zeros(*position.shape[:2], length + 1, dtype=torch.bool, device=position.device)
    return there.scatter(2, torch.where(position < 0, length, position), True)[..., :length]


def feed(cache, history, cuts, ranks=None, **options):
    """Takes the tokens in, in calls of the given numbers of tokens; checks the visible keys after each call. (out, lse) of all."""
    visible, results, first = history.visible(cache, ranks), [], 0
    for tokens in cuts:
        with poisoned_memory(history.query):
            results.append(cache.attend(*history.tokens(first, first + tokens), return_lse=True, **options))
        first += tokens
        assert torch.equal(seen_by(cache, history.length), visible[:, :, first - 1])
        assert (cache.length == first).all()
    return tuple(torch.cat(parts, 2) for parts in zip(*results, strict=True))


def assert_same_state(a, b, regions="all"):
    """Bit for bit; regions: "visible" leaves the log out. All are compared on the device, which is asked once."""
    same = {}
    for name in STATE if regions == "all" else (*STATE[:4], "steps"):
        x, y = getattr(a, name), getattr(b, name)
        if regions == "visible" and name != "steps":
            x, y = x[:, :, : a.sizes.visible()], y[:, :, : b.sizes.visible()]
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        same[name] = (x.nan_to_num(nan=123.0) == y.nan_to_num(nan=123.0)).all()
    assert torch.stack(list(same.values())).all(), [name for name, is_same in same.items() if not is_same]


def assert_alike(results, expected, dtype):
    """(out, lse) pairs that differ only in the order of sums; what is not finite is the same."""
    for ours, theirs in zip(results, expected, strict=True):
        is_finite = torch.isfinite(theirs)
        assert torch.equal(ours[~is_finite].nan_to_num(9.0), theirs[~is_finite].nan_to_num(9.0))
        two_ways.assert_same_in_another_order(ours.masked_fill(~is_finite, 0.0), theirs.masked_fill(~is_finite, 0.0), dtype)


def padded(rows, tokens, side):
    """Tokens of each sequence, [1, heads, n, ...], as a batch of so many tokens: what is not real holds NaN."""
    batch = []
    for row in rows:
        rubbish = [x.new_full((1, x.shape[1], tokens - x.shape[2], *x.shape[3:]), torch.nan) for x in row]
        batch.append([torch.cat(pair if side == "right" else pair[::-1], 2) for pair in zip(row, rubbish, strict=True)])
    return [torch.cat(parts) for parts in zip(*batch, strict=True)]


def cuts_of(draw, length, longest=40):
    cuts = []
    while sum(cuts) < length:
        cuts.append(draw(st.one_of(st.just(1), st.integers(1, longest))))
    return [*cuts[:-1], length - sum(cuts[:-1])]


# Exactness ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "has_slopes", "select_only"),
    [
        *((kind, False, False) for kind in ("random", "ties", "constant", "increasing", "decreasing")),
        *(("random", *how) for how in ((True, False), (False, True), (True, True))),
    ],
)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_steps_and_chunks_are_the_whole_history(device, exact, sizes, kind, has_slopes, select_only):
    """Ranks are scores + slope * position, and logits get both, or recency alone; NaN is in scores where logits do not get them."""
    history = History(60, exact, device, kind, bad=(-INF, math.nan) if select_only else (-INF,))
    slopes = torch.tensor([0.2, 0.01], device=device) if has_slopes else None
    recency = torch.zeros(2, 60, device=device)
    if has_slopes:
        recency = slopes.to(tolerance.accumulate_dtype(exact))[:, None] * torch.arange(60, device=device)
    ranks = history.scores + recency
    bias = recency.expand_as(ranks).to(ranks.dtype) if select_only else ranks
    caches = []
    for cuts in ([1] * 60, [60], [9] * 6 + [6], [1, 30, 2, 8, 19]):
        cache = history.cache(*sizes, rewind=7)
        out, lse = feed(cache, history, cuts, ranks, slopes=slopes, select_only=select_only)
        brute_check.assert_right(history.case(history.visible(cache, ranks), bias), {"out": out, "lse": lse})
        caches.append(cache)
    for other in caches[1:]:
        assert_same_state(caches[0], other)


@given(data=st.data(), kind=st.sampled_from(strategies.SCORE_KINDS))
def test_any_cuts_of_any_history(device, exact, data, kind):
    length = data.draw(st.integers(1, 90))
    window, local, sink_keys = data.draw(strategies.selection_sizes(length, True))
    bad = data.draw(st.sampled_from([(), (-INF,), (math.nan, -INF)]))
    history = History(
        length, exact, device, kind, bad, seed=data.draw(strategies.seeds()), H=3, Hkv=data.draw(st.sampled_from([1, 3]))
    )
    rewind = data.draw(st.integers(0, 12))
    first, second = (history.cache(window, local, sink_keys, rewind) for _ in range(2))
    softcap, scale = data.draw(st.sampled_from([0.0, 3.0])), data.draw(st.sampled_from([None, 0.4]))
    outs = [feed(cache, history, cuts_of(data.draw, length), softcap=softcap, scale=scale) for cache in (first, second)]
    assert_same_state(first, second)
    if not (math.nan in bad and local + sink_keys > 0):  # a NaN that is seen may spread
        case = history.case(history.visible(first), softcap=softcap, scale=scale)
        for out, lse in outs:
            brute_check.assert_right(case, {"out": out, "lse": lse})


@pytest.mark.parametrize("side", ["left", "right"])
def test_recency_goes_by_each_sequence_s_own_positions(device, exact, side):
    history, slopes = History(40, exact, device, B=2), torch.tensor([0.5, 0.02], device=device)
    together, alone = history.cache(4, 3, 1), [history.cache(4, 3, 1, batch=1) for _ in range(2)]
    for first, last, short in ((0, 20, 13), (20, 24, 3), (30, 31, 0)):
        tokens = last - first
        rows = [history.tokens(first, last, slice(0, 1)), history.tokens(first, first + short, slice(1, 2))]
        lengths = torch.tensor([tokens, short], dtype=torch.int32, device=device)
        together.attend(*padded(rows, tokens, side), lengths=lengths, padding_side=side, slopes=slopes, select_only=True)
        for cache, row in zip(alone, rows, strict=True):
            if row[0].shape[2]:
                cache.attend(*row, slopes=slopes, select_only=True)
    for b in range(2):
        assert_same_state(together_row(together, b), alone[b])


class Lives:
    """Which keys of one key head live, token by token, kept in a sorted list: an oracle that knows nothing of intervals or slots."""

    def __init__(self, window, local, sink_keys):
        self.window, self.local, self.sink_keys = window, local, sink_keys
        self.best = []  # (score, position), worst first

    def after(self, scores, position):
        leaver = position - self.local
        if leaver >= self.sink_keys and scores[leaver] > -INF:
            bisect.insort(self.best, (scores[leaver], leaver))
            del self.best[: max(0, len(self.best) - self.window)]
        latest = range(max(self.sink_keys, position - self.local + 1), position + 1) if self.local else ()
        return {*range(min(self.sink_keys, position + 1)), *latest, *(key for _, key in self.best)}


LONG = 20_000


def long_history(device, dtype, B=1, **sizes):
    """A history of LONG tokens whose four key heads have ties, NaN, -inf, scores that grow, and scores that are all equal."""
    history = History(LONG, dtype, device, B=B, H=4, Hkv=4, **sizes)
    for head, kind in enumerate(("ties", "random", "increasing", "constant")):
        history.scores[:, head] = strategies.make_scores((B, LONG), kind, head, torch.float32, device)
    history.scores[:, 1, ::5] = torch.nan
    history.scores[:, 2, 1::3] = -INF
    history.scores[:, 1] -= torch.arange(LONG, device=device) / 3000  # else the best keys are soon found
    return history


@given(seed=st.integers(0, 2**30))
@settings(max_examples=max(2, settings.default.max_examples // 100))
def test_20000_tokens_of_each_sequence_in_any_calls(device, exact, seed):
    """Calls of 0 to 500 tokens, other numbers for each sequence, padded on either side, some tokens refused and taken back."""
    random, sizes, rewind, B = Random(seed), (40, 6, 2), 16, 3
    history, wrong = long_history(device, exact, B, Dv=8), History(500, exact, device, B=B, H=4, Hkv=4, Dv=8, seed=5)
    cache, lives = history.cache(*sizes, rewind=rewind), [[Lives(*sizes) for _ in range(4)] for _ in range(B)]
    known, at, expected = history.scores.tolist(), [0] * B, [[set()] * 4 for _ in range(B)]
    while min(at) < LONG:
        tokens = random.choice((1, 1, 1, 3, 8, 9, 60, 500, 500, 500))
        side = random.choice(("left", "right"))
        real = [min(random.randint(0, tokens), LONG - n) for n in at]
        refused = [random.randint(0, min(rewind, n)) for n in real]
        rows = []
        for b in range(B):
            kept = real[b] - refused[b]
            rows.append([torch.cat([x, y], 2) for x, y in zip(history.tokens(at[b], at[b] + kept, slice(b, b + 1)),
                                                              wrong.tokens(0, refused[b], slice(b, b + 1)), strict=True)])  # fmt: skip
        lengths, back = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (real, refused))
        out, lse = cache.attend(*padded(rows, tokens, side), lengths=lengths, padding_side=side, return_lse=True)
        cache.rewind(back)
        for b in range(B):
            kept = real[b] - refused[b]
            for head, alive in enumerate(lives[b]):
                for p in range(at[b], at[b] + kept):
                    expected[b][head] = alive.after(known[b][head], p)
            if kept and random.random() < 0.03:  # what the kept tokens were given is what the whole history gives
                first = 0 if side == "right" else tokens - real[b]
                ours = [x[b : b + 1, :, first : first + kept] for x in (out, lse)]
                query, key, value, scores = history.tokens(0, at[b] + kept, slice(b, b + 1))
                window, local, sink_keys = sizes
                whole = dmattn.dynamic_mask_attention(
                    query[:, :, at[b] :], key, value, scores, window, local=local, sink_keys=sink_keys, return_lse=True
                )
                # A NaN that is seen may spread to queries of its tile on a GPU: its head is left out.
                assert_alike_on_either_path(*([x[:, [0, 2, 3]] for x in pair] for pair in (ours, whole)), exact)
            at[b] += kept
        for row, sets in zip(cache.position[:, :, : sum(sizes)].tolist(), expected, strict=True):
            for positions, keys in zip(row, sets, strict=True):
                assert {q for q in positions if q >= 0} == keys
        assert cache.length.tolist() == at
    at_once = history.cache(*sizes, rewind=rewind)
    at_once.attend(*history.tokens(0, LONG))
    assert_same_state(cache, at_once, "visible")


def assert_alike_on_either_path(results, expected, dtype):
    """For (out, lse) of kernels that round weights to bfloat16 at different places."""
    if dtype == torch.float64:
        return assert_alike(results, expected, dtype)
    rules = two_ways.assert_same_by_another_way, two_ways.assert_same_lse_by_another_way
    for ours, theirs, rule in zip(results, expected, rules, strict=True):
        is_finite = torch.isfinite(theirs)
        assert torch.equal(torch.isfinite(ours), is_finite)
        rule(ours.masked_fill(~is_finite, 0.0), theirs.masked_fill(~is_finite, 0.0), dtype)


@pytest.mark.parametrize("local", [0, 2])
def test_nan_and_minus_inf_never_win_a_slot(device, exact, local):
    history = History(40, exact, device, "ties", bad=(math.nan, -INF, math.nan, -INF))
    cache = history.cache(6, local, 0)
    feed(cache, history, [1] * 20 + [20])
    selected = cache.score[:, :, local:]
    assert (selected > -INF).sum() == (cache.position[:, :, local:] >= 0).sum()


def test_float64_scores_are_not_rounded():
    history = History(30, torch.float64, "cpu")
    scores = 1.0 + 1e-12 * strategies.make_scores((2, 2, 30), "random", 3, torch.float64)
    cache, history.scores = history.cache(4, 0, 0), scores
    feed(cache, history, [1] * 15 + [15])
    narrow = BoundedCache(2, 2, 4, 8, 16)
    with pytest.raises(TypeError, match="scores: expected dtype float32, bfloat16, float16, got float64"):
        narrow.attend(*(x[:, :, :1].float() for x in (history.query, history.key, history.value)), scores[:, :, :1])


# Batches --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("sizes", [(5, 3, 2), (5, 0, 0), (0, 3, 2)], ids=str)
def test_sequences_of_different_lengths(device, exact, sizes, side):
    """What is not real leaves no trace, may hold anything, and gets nothing; the others are as if they were alone."""
    history = History(50, exact, device, "ties", bad=(-INF,), B=3)
    together, alone = history.cache(*sizes, rewind=4), [history.cache(*sizes, rewind=4, batch=1) for _ in range(3)]
    at = [0, 0, 0]
    for tokens, lengths in (
        (12, [12, 3, 0]),
        (1, [1, 0, 1]),
        (5, [2, 5, 9]),
        (1, [-3, 1, 1]),
        (20, [0, 20, 11]),
        (4, [-(2**31), 3, 9]),
        (1, [1, 1, 1]),
    ):
        real = [max(0, min(n, tokens)) for n in lengths]
        rows = [history.tokens(at[b], at[b] + real[b], slice(b, b + 1)) for b in range(3)]
        given_lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        positions = together.next_positions(tokens, given_lengths, side)
        out, lse = together.attend(*padded(rows, tokens, side), lengths=given_lengths, padding_side=side, return_lse=True)
        for b in range(3):
            inside = slice(0, real[b]) if side == "right" else slice(tokens - real[b], tokens)
            is_real = torch.zeros(tokens, dtype=torch.bool, device=device)
            is_real[inside] = True
            assert not out[b][:, ~is_real].any()
            assert (lse[b][:, ~is_real] == -INF).all()
            assert positions[b, inside].tolist() == list(range(at[b], at[b] + real[b]))
            if real[b]:
                row = alone[b].attend(*history.tokens(at[b], at[b] + real[b], slice(b, b + 1)), return_lse=True)
                assert_alike([x[b : b + 1, :, inside] for x in (out, lse)], row, exact)
            at[b] += real[b]
            assert_same_state(together_row(together, b), alone[b])
    assert together.length.tolist() == at


def together_row(cache, b):
    """One sequence of a cache as a cache."""
    _, Hkv, _, D = cache.key.shape
    sizes = {name: size for name, size in cache.sizes._asdict().items() if name != "window"}
    row = BoundedCache(
        1, Hkv, cache.sizes.window, D, cache.value.shape[3], dtype=cache.key.dtype, device=cache.key.device, **sizes
    )
    for name in STATE:
        getattr(row, name).copy_(getattr(cache, name)[b : b + 1])
    return row


@pytest.mark.parametrize("window", [20, 300, 2048])
def test_a_step_does_not_depend_on_the_batch(device, dtype, window):
    history = History(400, dtype, device, "ties", B=5, D=64, Dv=64)
    together, alone = history.cache(window, 16, 4), history.cache(window, 16, 4, batch=1)
    together.attend(*history.tokens(0, 380))
    for name in STATE:
        getattr(alone, name).copy_(getattr(together, name)[2:3])
    for p in range(380, 400):
        ours = together.attend(*history.tokens(p, p + 1), return_lse=True)
        theirs = alone.attend(*history.tokens(p, p + 1, slice(2, 3)), return_lse=True)
        for x, y in zip(ours, theirs, strict=True):
            assert torch.equal(x[2:3], y)
    assert_same_state(together_row(together, 2), alone)


def test_steps_in_one_call_are_steps(device, dtype):
    """Up to eight tokens are taken in one after another, with the same bits."""
    history = History(48, dtype, device, "ties")
    one, eight = history.cache(6, 4, 2, rewind=5), history.cache(6, 4, 2, rewind=5)
    steps = [one.attend(*history.tokens(p, p + 1)) for p in range(48)]
    calls = [eight.attend(*history.tokens(p, p + 8)) for p in range(0, 48, 8)]
    assert torch.equal(torch.cat(steps, 2), torch.cat(calls, 2))
    assert_same_state(one, eight)


# Rewind, reorder, reset -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, *(pytest.param(batch, marks=pytest.mark.gpu) for batch in (16, 64))])
@pytest.mark.parametrize(
    "sizes",
    [
        (100, 0, 0, 0),
        (20, 30, 4, 3),
        (0, 64, 4, 0),
        *(pytest.param(sizes, marks=pytest.mark.gpu) for sizes in ((1000, 20, 4, 0), (2100, 100, 4, 0))),
    ],
    ids=str,
)
def test_a_step_is_an_update_and_the_attention_over_all_slots(device, dtype, sizes, batch):
    """One op or two, the same bits: batches are cut into blocks in different ways, and some sequences do not take the token."""
    window, local, sink_keys, _rewind = sizes
    history = History(window + 60, dtype, device, "ties", bad=(-INF,), B=batch, H=8, Hkv=2, D=64, Dv=32)
    one, two = (history.cache(*sizes) for _ in range(2))
    for cache in (one, two):
        cache.attend(*history.tokens(0, window + 40))
    visible, ops = one.sizes.visible(), torch.ops.dmattn
    for t in range(window + 40, window + 60):
        query, *new = history.tokens(t, t + 1)
        lengths = (torch.arange(batch, device=device) + t).remainder(3).to(torch.int32)
        step = (*one._state(), query, *new, lengths, window, local, sink_keys, 0.3, 0.0)
        out, lse = ops.cache_step(*step)
        ops.cache_update(*two._state(), *new, lengths, window, local, sink_keys)
        seen = [x[:, :, :visible] for x in two._state()[:3]]
        slots = torch.where(lengths > 0, visible, 0).to(torch.int32)
        expected = ops.decode(query, *seen[:2], slots, None, seen[2], None, None, False, 0.3, 0.0, 1, 0, 0)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
        assert (lse[lengths == 0] == -INF).all()
        assert_same_state(one, two)


@pytest.mark.parametrize(("lengths", "taken"), [(None, 3), ((1, 0, 1), 2)])
def test_flops_of_a_step(device, dtype, lengths, taken):
    from torch.utils.flop_counter import FlopCounterMode

    history = History(1, dtype, device, B=3, H=4, D=8, Dv=16)
    lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=device)
    with FlopCounterMode(display=False) as counter:
        history.cache(5, 3, 2).attend(*history.tokens(0, 1), lengths=lengths)
    assert counter.get_total_flops() == 2 * taken * 4 * (5 + 3 + 2) * (8 + 16)


@given(data=st.data(), kind=st.sampled_from(["random", "ties", "increasing"]))
def test_rewind_is_as_if_the_tokens_had_never_come(device, exact, data, kind):
    window, local, sink_keys = data.draw(st.sampled_from(SIZES))
    rewind = data.draw(st.integers(1, 20))
    history = History(80, exact, device, kind, bad=(-INF, math.nan), seed=data.draw(strategies.seeds()))
    wrong = History(80, exact, device, "random", seed=99)  # tokens that are taken back
    cache, plain = history.cache(window, local, sink_keys, rewind), history.cache(window, local, sink_keys)
    at = 0
    while at < 80:
        tokens = min(80 - at, data.draw(st.integers(1, 14)))
        back = data.draw(st.integers(0, min(rewind, tokens)))
        proposed = [torch.cat([x[:, :, : tokens - back], y[:, :, tokens - back :]], 2) for x, y in
                    zip(history.tokens(at, at + tokens), wrong.tokens(at, at + tokens), strict=True)]  # fmt: skip
        cache.attend(*proposed)
        cache.rewind(back)
        if tokens > back:
            plain.attend(*history.tokens(at, at + tokens - back))
        at += tokens - back if tokens > back else 0
        assert_same_state(cache, plain, "visible")
        if tokens == back and data.draw(st.booleans()):
            break


def test_rewind_by_sequence_and_in_parts(device, exact):
    history = History(40, exact, device, "ties", B=3)
    cache = history.cache(4, 3, 1, rewind=10)
    cache.attend(*history.tokens(0, 30))
    cache.rewind(torch.tensor([0, 4, 10], dtype=torch.int32, device=device))
    cache.rewind(torch.tensor([3, 1, 0], dtype=torch.int32, device=device))
    assert cache.kept[:, 0].tolist() == [7, 5, 0]
    for b, length in enumerate((27, 25, 20)):
        alone = history.cache(4, 3, 1, rewind=10, batch=1)
        alone.attend(*history.tokens(0, length, slice(b, b + 1)))
        assert_same_state(together_row(cache, b), alone, "visible")
    cache.attend(*history.tokens(0, 2))
    assert cache.kept[:, 0].tolist() == [9, 7, 2]


@pytest.mark.parametrize("sizes", [(4, 3, 5), (4, 0, 0), (0, 8, 0)], ids=str)
def test_rewind_to_the_beginning(device, exact, sizes):
    history = History(12, exact, device)
    cache = history.cache(*sizes, rewind=12)
    cache.attend(*history.tokens(0, 12))
    cache.rewind(12)
    assert_same_state(cache, history.cache(*sizes, rewind=12))


def test_more_than_is_kept_is_refused_or_empties(device, exact):
    history = History(30, exact, device)
    cache = history.cache(4, 3, 0, rewind=6)
    cache.attend(*history.tokens(0, 20))
    cache.rewind(4)
    with pytest.raises(ValueError, match="n: expected at most 6 tokens, got 7: the state before them is gone"):
        cache.rewind(7)
    too_many = torch.tensor([3, 1], dtype=torch.int32, device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match="n: expected at most 2 tokens for sequence 0, the last whose state is kept, got 3"):
            cache.rewind(too_many)
        with pytest.raises(ValueError, match=r"n: expected at most 2 tokens for sequence 1, .* got -1"):
            cache.rewind(torch.tensor([0, -1], dtype=torch.int32))
        state = [getattr(cache, name) for name in STATE]
        torch.ops.dmattn.cache_rewind(*state, too_many, 4, 3, 0)
    else:
        cache.rewind(too_many)
    assert cache.length.tolist() == [0, 15]
    assert_same_state(together_row(cache, 0), history.cache(4, 3, 0, rewind=6, batch=1))


def test_reorder(device, exact):
    history = History(40, exact, device, B=3)
    cache = history.cache(4, 3, 1, rewind=2)
    cache.attend(*history.tokens(0, 30))
    before = copy.deepcopy(cache)
    cache.reorder(torch.tensor([2, 2, 0], device=device))
    for b, source in enumerate((2, 2, 0)):
        assert_same_state(together_row(cache, b), together_row(before, source))
    with pytest.raises(ValueError, match="index: expected numbers from 0 to 2, got"):
        before.cpu().reorder(torch.tensor([0, 1, 3]))


def test_a_reset_sequence_begins_at_0(device, exact):
    history = History(60, exact, device, B=3)
    cache, new = history.cache(4, 3, 1, rewind=2), history.cache(4, 3, 1, rewind=2)
    cache.attend(*history.tokens(0, 30))
    kept = copy.deepcopy(cache)
    cache.reset([1])
    assert_same_state(together_row(cache, 1), together_row(new, 1))
    for b in (0, 2):
        assert_same_state(together_row(cache, b), together_row(kept, b))
    for tokens in ((30, 31), (31, 60)):
        ours, theirs = cache.attend(*history.tokens(*tokens)), new.attend(*history.tokens(*tokens))
        assert torch.equal(ours[1], theirs[1])
    assert cache.length.tolist() == [60, 30, 60]
    cache.reset(torch.tensor([True, False, True], device=device))
    assert cache.length.tolist() == [0, 30, 0]
    cache.reset(1)
    assert_same_state(cache, history.cache(4, 3, 1, rewind=2))
    kept.reset()
    assert_same_state(kept, cache)


# As a module ----------------------------------------------------------------------------------------------------------------------------


def test_a_cache_that_an_earlier_version_pickled_is_used():
    cache = BoundedCache(2, 2, 4, 8, local=2)
    del cache.__dict__["recent"]
    loaded = copy.deepcopy(cache)
    loaded.reorder(torch.tensor([1, 0]))
    loaded.reset()
    assert loaded.nbytes == BoundedCache(2, 2, 4, 8, local=2).nbytes


def test_state_is_saved_and_loaded(device, exact, tmp_path):
    history = History(60, exact, device)
    cache, other = history.cache(4, 3, 1, rewind=2), history.cache(4, 3, 1, rewind=2)
    cache.attend(*history.tokens(0, 30))
    torch.save(cache.state_dict(), tmp_path / "cache.pt")
    other.load_state_dict(torch.load(tmp_path / "cache.pt"))
    assert_same_state(cache, other)
    assert torch.equal(cache.attend(*history.tokens(30, 60)), other.attend(*history.tokens(30, 60)))
    with pytest.raises(ValueError, match=r"expected that of a cache with .*'window': 3.*, got one with .*'window': 4"):
        history.cache(3, 4, 1, rewind=2).load_state_dict(cache.state_dict())


def test_scores_stay_as_exact_as_they_were():
    history = History(30, torch.float32, "cpu")
    cache = history.cache(4, 3, 1)
    cache.attend(*history.tokens(0, 20))
    score = cache.score.clone()
    for move in (lambda: cache.to(torch.bfloat16), cache.half, cache.float):
        move()
        assert cache.score.dtype == torch.float32
        assert torch.equal(cache.score, score)
    assert cache.key.dtype == torch.float32
    assert cache.double().score.dtype == torch.float64
    assert cache.to("meta").score.device.type == "meta"


def test_memory_does_not_grow(device, exact):
    history = History(300, exact, device)
    cache = history.cache(4, 3, 1, rewind=2)
    places, size = [getattr(cache, name).data_ptr() for name in STATE], cache.nbytes
    for first, last in itertools.pairwise((0, 100, 101, 102, 110, 300)):
        cache.attend(*history.tokens(first, last))
        cache.rewind(0)
        cache.reorder(torch.tensor([1, 0], device=device))
    assert [getattr(cache, name).data_ptr() for name in STATE] == places
    assert cache.nbytes == size
    assert "window=4" in repr(cache)


def test_a_chunk_that_finds_no_memory_changes_nothing(monkeypatch):
    history = History(60, torch.float64, "cpu")
    cache, expected = (history.cache(5, 3, 2, rewind=2) for _ in range(2))
    feed(cache, history, [20]), feed(expected, history, [20])

    def no_memory(*_):
        raise torch.OutOfMemoryError("no memory left")

    with monkeypatch.context() as patched:
        patched.setattr("dmattn.cache_chunk.attend", no_memory)
        with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
            cache.attend(*history.tokens(20, 60))
    assert_same_state(cache, expected)
    assert torch.equal(cache.attend(*history.tokens(20, 30)), expected.attend(*history.tokens(20, 30)))


def test_autocast_brings_tokens_to_the_cache(device):
    history = History(20, torch.float32, device)
    cache, narrow = (
        BoundedCache(2, 2, 4, 8, 16, dtype=torch.bfloat16, device=device),
        [x.bfloat16() for x in history.tokens(0, 20)[:3]],
    )
    with torch.autocast(device, torch.bfloat16):
        out = cache.attend(*history.tokens(0, 20))
    cache.reset()
    assert torch.equal(out, cache.attend(*narrow, history.scores))


# CUDA graphs ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 60])
def test_a_cuda_graph_takes_tokens_in(tokens):
    """The same graph serves every length: nothing in it knows how many tokens came before."""
    history = History(600, torch.bfloat16, "cuda", "ties", bad=(-INF,), D=64, Dv=64)
    captured, eager = (history.cache(100, 20, 4, rewind=3) for _ in range(2))
    given = [x.clone() for x in history.tokens(0, tokens)]
    captured.attend(*given)  # loads the kernels
    captured.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.attend(*given)
    captured.reset()
    for first in range(0, 600 if tokens > 4 else 100, tokens):
        for place, new in zip(given, history.tokens(first, first + tokens), strict=True):
            place.copy_(new)
        graph.replay()
        assert torch.equal(out, eager.attend(*history.tokens(first, first + tokens)))
        assert_same_state(captured, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["fresh", "loaded", "reset"])
def test_a_graph_of_many_caches(how):
    """One cache has run before; the others are captured as they were made, as they were loaded, or as reset left them."""
    history = History(2100, torch.bfloat16, "cuda", B=1, H=32, Hkv=8, D=128, Dv=128)
    with torch.inference_mode():
        caches = [history.cache(2048, 0, 0) for _ in range(12)]
        caches[0].attend(*history.tokens(0, 2099))
        if how == "loaded":
            for cache in caches[1:]:
                cache.load_state_dict(caches[0].state_dict())
        if how == "reset":
            for cache in caches:
                cache.reset()
        expected = [copy.deepcopy(cache) for cache in caches]
        token = history.tokens(2099, 2100)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            copy.deepcopy(caches[0]).attend(*token)  # loads the kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                results = [cache.attend(*token) for cache in caches]
            graph.replay()
        torch.cuda.synchronize()
        for cache, eager, out in zip(caches, expected, results, strict=True):
            assert torch.equal(out, eager.attend(*token))
            assert_same_state(cache, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(2048, 0, 0, 16), (300, 100, 7, 40), (0, 64, 4, 0), (5000, 3, 0, 1)], ids=str)
def test_the_gpu_keeps_what_the_cpu_keeps(sizes):
    """Steps, chunks longer than what a block finds places for at once, and rewinds; bit for bit."""
    window, local, sink_keys, rewind = sizes
    history = History(12_000, torch.bfloat16, "cpu", "ties", bad=(-INF, math.nan), D=16, Dv=8)
    cpu = history.cache(window, local, sink_keys, rewind)
    gpu = history.cache(window, local, sink_keys, rewind).cuda()
    first = 0
    for tokens, back in ((3, 1), (700, 0), (1, 0), (9500, 5), (1, 1), (1, 0), (40, 30), (1, 0)):
        for cache in (cpu, gpu):
            cache.attend(*(x.to(cache.key.device) for x in history.tokens(first, first + tokens)))
            cache.rewind(min(back, rewind))
        first += tokens
        assert_same_state(cpu, copy.deepcopy(gpu).cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("dies_at", [(2, 0), (2, 0, 1)], ids=str)
def test_ends_before_a_key_competes(dies_at):
    """Keys of a chunk that die, by a wrong ``end``, before they compete: nothing takes their place, and no chain of places goes round."""
    window, tokens = 4, len(dies_at)
    caches = [BoundedCache(1, 1, window, 8, rewind=3, dtype=torch.bfloat16, device=device) for device in ("cpu", "cuda")]
    key, scores = tensor((1, 1, window + tokens, 8), 0, torch.bfloat16), tensor((1, 1, window + tokens), 1)
    position = torch.tensor([-1] * window + list(range(tokens)), dtype=torch.int32).expand(1, 1, -1)
    slot = torch.arange(window, dtype=torch.int32).expand(1, 1, -1)
    end = torch.tensor([0] * window + [window + token for token in dies_at], dtype=torch.int32).expand(1, 1, -1)
    for cache in caches:
        given = (x.to(cache.key.device) for x in (key, key, scores, position, slot, end))
        torch.ops.dmattn.cache_extend(*(getattr(cache, name) for name in STATE), *given, None, window, 0, 0)
    assert_same_state(caches[0], caches[1].cpu())
