"""Eviction policies: a mask over the whole sequence and a bounded cache show the same keys, and policies keep what their papers say."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import dmattn
import pytest
import torch
from dmattn import IntervalMask, eviction
from dmattn.testing import strategies
from dmattn_bench import two_ways

POLICIES = {
    "streaming": eviction.Streaming(9, every=4, sink_keys=2),
    "scored": eviction.Scored(8, every=1, local=2, sink_keys=1),
    "gated": eviction.Gated(12, every=3, local=3),
    "norm": eviction.KeyNorm(8, every=5, sink_keys=1),
    "h2o": eviction.H2O(8, every=3, local=2),
    "h2o, every token": eviction.H2O(8),
    "tova": eviction.TOVA(8, every=2),
    "snapkv": eviction.SnapKV(12, every=6, local=4, pool=3),
    "expected": eviction.ExpectedAttention(8, every=4, observed=7, sink_keys=1),
    "h2o, own budgets": eviction.H2O(6, every=3, local=2, floor=0.5),
    "snapkv, own budgets": eviction.SnapKV(10, every=4, local=4, floor=0.4),
}

SCORED = POLICIES["scored"]


def tokens(length=47, B=2, H=6, Hkv=3, D=8, Dv=16, dtype=torch.float32, device="cpu", seed=0):
    """query, key, value and scores."""
    sizes = ((B, H, length, D), (B, Hkv, length, D), (B, Hkv, length, Dv), (B, Hkv, length))
    return [strategies.random_tensor(size, seed + i, dtype, device) for i, size in enumerate(sizes)]


def cache_for(policy, query, key, value, **options):
    B, H, _, D = query.shape
    return eviction.EvictionCache(policy, B, H, key.shape[1], D, value.shape[3], dtype=key.dtype, device=key.device, **options)


def seen_by_cache(cache, length):
    """bool [B, Hkv, length]: which positions are held."""
    position = cache.cache.position
    held = torch.zeros((*position.shape[:2], length + 1), dtype=torch.bool, device=position.device)
    return held.scatter(2, torch.where(position < 0, length, position).long(), True)[..., :length]


@pytest.mark.parametrize("cuts", [[1] * 47, [47], [13, 1, 1, 30, 2]], ids=len)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_mask_and_cache_show_the_same_keys(device, policy, cuts):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    given = tokens(dtype=dtype, device=device)
    mask, cache, at, parts = eviction.lifetimes(policy, *given), cache_for(policy, *given[:3]), 0, []
    for count in cuts:
        parts.append(cache.attend(*(x[:, :, at : at + count] for x in given)))
        at += count
        assert torch.equal(seen_by_cache(cache, 47), mask.alive(at) & (torch.arange(47, device=device) < at))
        assert int(cache.held.max()) <= policy.slots(3) == cache.cache.key.shape[2]
    expected = dmattn.attention(*given[:3], mask)
    two_ways.assert_same_in_another_order(torch.cat(parts, 2), expected, dtype)
    assert bool((mask.end < dmattn.FOREVER).any())


def test_budgets_bound_what_a_query_sees():
    for policy in POLICIES.values():
        mask = eviction.lifetimes(policy, *tokens())
        most = mask.to_bool(47, 47).sum(3)
        if policy.floor == 1:
            assert int(most.max()) <= policy.budget + policy.every
        else:  # all heads together
            assert int(most.sum(1).max()) <= 3 * (policy.budget + policy.every)
            assert len({int(x) for x in most[0, :, -1]}) > 1


def test_a_gradient_flows_through_attention_under_the_mask():
    query, key, value, _ = tokens()
    mask = eviction.lifetimes(POLICIES["h2o"], query, key, value)
    key.requires_grad_()
    dmattn.attention(query, key, value, mask).sum().backward()
    assert bool(key.grad.isfinite().all())
    assert bool(key.grad.any())


# Policies -------------------------------------------------------------------------------------------------------------------------------


def test_streaming_is_the_streaming_mask():
    given = tokens()
    mask = eviction.lifetimes(eviction.Streaming(2 + 6, sink_keys=2), *given)
    assert torch.equal(mask.to_bool(47, 47), IntervalMask.streaming(47, 2, 7).to_bool(47, 47).expand(2, 3, -1, -1))


@pytest.mark.parametrize(("window", "local", "sink_keys"), [(5, 1, 0), (4, 3, 2), (1, 2, 0)])
def test_scored_is_top_k(window, local, sink_keys):
    given = tokens()
    given[3] = (given[3] * 3).round()  # ties
    policy = eviction.Scored(window + local - 1 + sink_keys, local=local - 1, sink_keys=sink_keys)
    expected = IntervalMask.top_k(given[3], window, local=local, sink_keys=sink_keys)
    assert torch.equal(eviction.lifetimes(policy, *given).to_bool(47, 47), expected.to_bool(47, 47))


def test_gated_keys_go_when_they_are_old_enough():
    given = tokens()
    mask = eviction.lifetimes(eviction.Gated(47, local=5), *given)
    keys = torch.arange(47)
    lives = torch.where(given[3] > 0, keys + 6, dmattn.FOREVER)
    assert torch.equal(mask.to_bool(47, 47), IntervalMask(keys.int(), lives.int()).to_bool(47, 47))


def brute_force(policy, rank, given):
    """Visible pairs, token after token: rank(keys, weights of all queries so far over all keys) -> numbers of those keys."""
    query, key = given[:2]
    group = query.shape[1] // key.shape[1]
    visible = torch.zeros((2, 3, 47, 47), dtype=torch.bool)
    for b, h in itertools.product(range(2), range(3)):
        held, weights = [], torch.zeros(group, 47, 47)
        for p in range(47):
            held.append(p)
            visible[b, h, p, held] = True
            logits = query[b, h * group : (h + 1) * group, p] @ key[b, h, held].T / 8**0.5
            weights[:, p, held] = logits.softmax(-1)
            if (p + 1) % policy.every == 0:
                ranks = rank(b, h, held, weights[:, : p + 1, held])
                forced = [i for i, key_at in enumerate(held) if key_at < policy.sink_keys or key_at > p - policy.local]
                others = [i for i in range(len(held)) if i not in forced]
                best = sorted(others, key=lambda i: (float(ranks[i]), held[i]), reverse=True)[: policy.budget - len(forced)]
                held = [held[i] for i in sorted(forced + best)]
    return visible


def test_h2o_keeps_the_largest_sums():
    policy, given = POLICIES["h2o"], tokens()
    expected = brute_force(policy, lambda b, h, held, weights: weights.sum((0, 1)), given)
    assert torch.equal(eviction.lifetimes(policy, *given[:3]).to_bool(47, 47), expected)
    with_prior = eviction.lifetimes(policy, *given)  # scores that came with keys count beside the weights
    assert not torch.equal(with_prior.to_bool(47, 47), expected)


def test_keys_of_small_norm_stay():
    policy, given = POLICIES["norm"], tokens()
    expected = brute_force(policy, lambda b, h, held, weights: -given[1][b, h, held].norm(dim=-1), given)
    assert torch.equal(eviction.lifetimes(policy, *given).to_bool(47, 47), expected)


def seen_of(given, length=47, queries=5, slots=50):
    """What a policy is shown of the first tokens, and the weights of the latest queries over them, [B, Hkv, group, R, length]."""
    query, key, value, scores = (x[:, :, :length] for x in given)
    position = torch.full((2, 3, slots), -1, dtype=torch.int32)
    position[..., :length] = torch.arange(length)
    held = [torch.nn.functional.pad(x, (0, 0, 0, slots - length)) for x in (key, value)]
    memory = torch.nn.functional.pad(scores, (0, slots - length))
    seen = eviction.Seen(position, *held, memory, query[:, :, -queries:], length, 8**-0.5)
    logits = query[:, :, -queries:].unflatten(1, (3, 2)) @ key[:, :, None].transpose(3, 4) / 8**0.5
    later = torch.arange(length) > torch.arange(length - queries, length)[:, None]
    return seen, logits.masked_fill(later, -torch.inf).softmax(-1)


def test_weights_are_those_of_the_latest_queries():
    seen, expected = seen_of(tokens())
    two_ways.assert_same_in_another_order(seen.weights()[..., :47], expected, torch.float32)
    assert not seen.weights()[..., 47:].any()


def test_snapkv_and_tova_rank_by_the_latest_queries():
    seen, weights = seen_of(tokens())
    pooled = torch.nn.functional.avg_pool1d(weights.mean((2, 3)), 3, stride=1, padding=1)
    found = eviction.SnapKV(20, local=5, pool=3).rank(seen)[..., :46]
    two_ways.assert_same_in_another_order(found, pooled[..., :46], torch.float32)
    found = eviction.TOVA(20).rank(seen._replace(query=seen.query[:, :, -1:]))[..., :47]
    expected = weights[:, :, :, -1].mean((1, 2))[:, None].expand(-1, 3, -1)
    two_ways.assert_same_in_another_order(found, expected, torch.float32)


def test_expected_attention_ranks_by_the_distribution_of_queries():
    given = tokens()
    seen, _ = seen_of(given, queries=30)
    query, key = seen.query.unflatten(1, (3, 2)).double(), seen.key[:, :, :47].double()
    mean = query.mean(3)
    covariance = torch.stack([torch.stack([torch.stack([torch.cov(x.T, correction=0) for x in g]) for g in b]) for b in query])
    logits = torch.einsum("bhgd,bhnd->bhgn", mean, key) / 8**0.5
    logits += torch.einsum("bhni,bhgij,bhnj->bhgn", key, covariance, key) / 16
    expected = logits.softmax(-1).mean(2) * seen.value[:, :, :47].double().norm(dim=-1)
    found = eviction.ExpectedAttention(20, observed=30).rank(seen)[..., :47]
    two_ways.assert_same_in_another_order(found, expected.float(), torch.float32)
    few = seen._replace(length=10, query=torch.cat((torch.zeros_like(seen.query[:, :, :20]), seen.query[:, :, :10]), 2))
    fewer = seen._replace(length=10, query=seen.query[:, :, :10])
    ranks = [eviction.ExpectedAttention(20, observed=x.query.shape[2]).rank(x) for x in (few, fewer)]
    two_ways.assert_same_in_another_order(*ranks, torch.float32)


def test_shared_budgets_go_to_the_best_keys_of_all_heads():
    rank = torch.tensor([[[9.0, 8, 7, 1, 1], [2, 3, 6, 5, 1]]])

    class Fixed(eviction.Policy):
        def rank(self, seen):
            return rank

    position = torch.arange(5, dtype=torch.int32).expand(1, 2, -1)
    seen = eviction.Seen(position, *[torch.zeros(1, 2, 5, 8)] * 2, torch.zeros(1, 2, 5), torch.zeros(1, 2, 0, 8), 5, 1.0)
    kept = Fixed(3, floor=0.34).keeps(seen)
    assert kept.tolist() == [[[True, True, True, False, False], [False, True, True, True, False]]]
    rank[0, 0] = torch.tensor([9.0, 8, 7, 6.5, 6.4])
    assert Fixed(3, floor=0.34).keeps(seen)[0].sum(1).tolist() == [5, 1]
    rank[0, 1, 2] = torch.nan  # and what has no rank goes
    rank[0, 0, :2] = -torch.inf
    assert Fixed(5).keeps(seen)[0].tolist() == [[False, False, True, True, True], [True, True, False, True, True]]
    rank = rank.to(torch.complex64)
    with pytest.raises(TypeError, match="rank: expected dtype float64, float32, bfloat16, float16, got complex64"):
        Fixed(3).keeps(seen)


# Decisions ------------------------------------------------------------------------------------------------------------------------------


def test_any_decisions_are_a_mask():
    dropped = [(4, torch.tensor([[[0, -1]], [[2, 3]]])), (6, torch.tensor([[[1, 0]], [[-1, -1]]]))]
    mask = eviction.interval_of(dropped, (2, 1, 8))
    later = dmattn.FOREVER
    assert mask.end.tolist() == [[[4, 6, *[later] * 6]], [[later, later, 4, 4, *[later] * 4]]]
    assert mask.start.tolist() == [[list(range(8))]] * 2
    for at, keys, error, words in (
        (4, torch.tensor([[[7]]]), ValueError, "dropped: expected positions below S=3, got 7"),
        (4, torch.tensor([[[3]]]), ValueError, "dropped: expected positions below S=3, got 3"),
        (4, torch.tensor([1]), ValueError, r"dropped: expected 3 dimensions \[B, Hkv, any number\], got shape \[1\]"),
        (4, torch.tensor([[[1.0]]]), TypeError, "dropped: expected dtype int32, int64"),
        (1 << 40, torch.tensor([[[1]]]), ValueError, "position: expected 0 <= position"),
    ):
        with pytest.raises(error, match=words):
            eviction.interval_of([(at, keys)], (1, 1, 3))


def test_a_policy_of_ones_own():
    class Even(eviction.Policy):
        """Keys at even positions, the latest first."""

        def rank(self, seen):
            return torch.where(seen.position % 2 == 0, seen.position.float(), -torch.inf)

    given = tokens()
    mask = eviction.lifetimes(Even(4), *given)
    assert mask.alive(47)[0, 0].nonzero().flatten().tolist() == [40, 42, 44, 46]


# The cache ------------------------------------------------------------------------------------------------------------------------------


def test_a_cache_decides_when_it_is_asked():
    given, policy = tokens(), eviction.SnapKV(12, every=0, local=4)
    cache = cache_for(policy, *given[:3], slots=47)
    cache.attend(*(x[:, :, :40] for x in given[:3]))
    assert cache.held.tolist() == [[40] * 3] * 2
    cache.evict()
    assert cache.held.tolist() == [[12] * 3] * 2
    cache.attend(*(x[:, :, 40:45] for x in given[:3]))
    with pytest.raises(ValueError, match="slots: expected room for 40 more tokens, got a cache of 47 slots"):
        cache.attend(*(x[:, :, :40] for x in given[:3]))
    assert cache.held.tolist() == [[17] * 3] * 2


def test_state_is_saved_and_reset():
    given, policy = tokens(), POLICIES["h2o"]
    first, other = (cache_for(policy, *given[:3]) for _ in range(2))
    parts = [[x[:, :, a:b] for x in given] for a, b in ((0, 20), (20, 47))]
    first.attend(*parts[0])
    other.load_state_dict(first.state_dict())
    out = first.attend(*parts[1])
    assert torch.equal(out, other.attend(*parts[1]))
    first.reset()
    first.attend(*parts[0])
    assert torch.equal(out, first.attend(*parts[1]))
    assert first.nbytes == cache_for(policy, *given[:3]).nbytes


def test_the_state_of_another_policy_is_refused():
    given = tokens()
    first, other, third = (
        cache_for(kind(budget, every=every), *given[:3])
        for kind, budget, every in ((eviction.KeyNorm, 8, 4), (eviction.KeyNorm, 2, 10), (eviction.Scored, 8, 4))
    )
    first.attend(*(x[:, :, :12] for x in given))
    with pytest.raises(ValueError, match=r"state_dict: expected that of a cache whose policy has \{.*'budget': 2, .*'budget': 8"):
        other.load_state_dict(first.state_dict())
    assert other.length == 0
    with pytest.raises(ValueError, match=r"'kind': 'Scored', .*'kind': 'KeyNorm'"):
        third.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="got one with an earlier version's, without sizes"):
        first.load_state_dict(first.state_dict() | {"_extra_state": 12})


def test_ranks_of_a_wrong_shape_are_named():
    class Wrong(eviction.Policy):
        def rank(self, seen):
            return seen.key[..., 0].mean(1)

    given = tokens()
    with pytest.raises(ValueError, match=r"rank: expected 3 dimensions \[B, Hkv, N\]"):
        cache_for(Wrong(4, every=2), *given[:3]).attend(*given)


def test_lse_comes_if_asked():
    given, policy = tokens(), POLICIES["h2o"]
    mask = eviction.lifetimes(policy, *given, scale=0.3, softcap=5.0)
    expected = dmattn.attention(*given[:3], mask, scale=0.3, softcap=5.0, return_lse=True)
    found = cache_for(policy, *given[:3]).attend(*given, scale=0.3, softcap=5.0, return_lse=True)
    for x, y in zip(found, expected, strict=True):
        two_ways.assert_same_in_another_order(x, y, torch.float32)


@pytest.mark.brief
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: eviction.Streaming(0), ValueError, "budget: expected a positive int, got 0"),
        (lambda: eviction.Streaming(4, local=3, sink_keys=2), ValueError, r"budget: expected at least local \+ sink_keys = 3 \+ 2"),
        (lambda: eviction.Streaming(4, floor=2), ValueError, "floor: expected 0 <= floor <= 1, got 2"),
        (lambda: eviction.SnapKV(4, local=2, pool=4), ValueError, "pool: expected an odd number, got 4"),
        (lambda: eviction.H2O(4, every=0), ValueError, "every: expected a positive int, got 0"),
        (lambda: eviction.ExpectedAttention(4, observed=0), ValueError, "observed: expected a positive int, got 0"),
        (lambda: cache_for(4, *tokens()[:3]), TypeError, "policy: expected a dmattn.eviction.Policy, got int"),
        (lambda: cache_for(eviction.TOVA(4, every=0), *tokens()[:3]), ValueError, "slots: expected a number for a policy with every=0"),
        (lambda: cache_for(eviction.TOVA(4), *tokens()[:3], slots=3), ValueError, "slots: expected at least the 5 that the policy needs"),
        (lambda: eviction.EvictionCache(eviction.TOVA(4), 1, 4, 3, 8), ValueError, "num_heads: expected a multiple of num_kv_heads=3"),
        (lambda: eviction.lifetimes(eviction.TOVA(4, every=0), *tokens()), ValueError, "policy: expected one that decides every so many"),
        (lambda: eviction.lifetimes(eviction.TOVA(4), *tokens()[1::-1], tokens()[2]), ValueError, r"value: expected \[B, Hkv, T, Dv\] with"),
        (lambda: eviction.lifetimes(eviction.TOVA(4), *tokens()[:2], tokens(5)[2]), ValueError, r"value: expected \[B, Hkv, T, Dv\]"),
        (lambda: eviction.lifetimes(eviction.TOVA(4), *tokens()[:3], tokens(5)[3]), ValueError, r"scores: expected \[B, Hkv, T\]"),
        (lambda: eviction.lifetimes(eviction.TOVA(4), *tokens()[:3], tokens()[3].to("meta")), ValueError, "scores: expected device cpu"),
        (lambda: eviction.lifetimes("tova", *tokens()), TypeError, "policy: expected a dmattn.eviction.Policy, got str"),
        (lambda: eviction.lifetimes(eviction.TOVA(4), *tokens(Hkv=1)[:1], *tokens(Hkv=0)[1:]), ValueError, "with a multiple H of Hkv=0"),
        (lambda: cache_for(eviction.TOVA(4), *tokens()[:3], slots="9"), TypeError, "slots: expected a positive int, got str"),
        (lambda: cache_for(SCORED, *tokens()[:3]).attend(*tokens(0)), ValueError, "query: expected at least one token, got T=0"),
        (lambda: cache_for(SCORED, *tokens()[:3]).attend(*tokens(H=3)), ValueError, "query: expected H=6 heads like the cache, got 3"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_scores_that_want_a_gradient_leave_no_graph_in_the_cache():
    query, key, value, scores = tokens()
    cache = cache_for(SCORED, query, key, value)
    with pytest.raises(RuntimeError, match=r"EvictionCache\.attend has no gradient"):
        cache.attend(query, key, value, scores.requires_grad_())
    with torch.no_grad():
        cache.attend(query, key, value, scores)
    assert not cache.memory.requires_grad


def test_policies_are_data():
    assert dataclasses.replace(POLICIES["snapkv"], budget=20) == eviction.SnapKV(20, every=6, local=4, pool=3)
    with pytest.raises(NotImplementedError):
        eviction.lifetimes(eviction.Policy(4), *tokens())


def test_the_reference_has_every_public_name():
    text = (Path(__file__).parents[2] / "docs/api.md").read_text()
    for name in eviction.__all__:
        assert f"dmattn.eviction.{name}\n" in text, name
