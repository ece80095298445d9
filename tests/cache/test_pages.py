"""Bounded caches on pages: sequences see what the policy's mask shows them, whatever joins, leaves or is swapped, and no page is lost."""

from __future__ import annotations

import mmap
import random
import sys
from pathlib import Path

import dmattn
import pytest
import torch
from dmattn import eviction
from dmattn.testing import strategies
from dmattn_bench import two_ways
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

H, HKV, D, DV = 4, 2, 8, 16
POLICIES = [
    eviction.Streaming(20, sink_keys=2),
    eviction.H2O(17, every=3, local=2),
    eviction.Gated(40, every=5, local=3),
    eviction.SnapKV(18, every=20, local=4, pool=3),
    eviction.H2O(12, every=4, floor=0.3),
    eviction.ExpectedAttention(16, every=2, observed=6),
]


def tokens(length, seed=0, B=1, dtype=torch.float32, device="cpu"):
    sizes = ((B, H, length, D), (B, HKV, length, D), (B, HKV, length, DV), (B, HKV, length))
    return [strategies.random_tensor(size, seed * 4 + i, dtype, device) for i, size in enumerate(sizes)]


def pool_of(pages, page_size=16, dtype=torch.float32, device="cpu"):
    pool = eviction.PagePool(pages, page_size, D, DV, dtype=dtype, device=device)
    for rows in (pool.key, pool.value, pool.memory):
        rows.fill_(torch.nan)  # what lies on a page that was not written counts for nothing
    return pool


def assert_no_page_is_lost(pool, *caches):
    held = [page for cache in caches for sequence in cache._sequences.values() for pages in sequence.pages for page in pages]
    assert sorted(held + pool.free) == list(range(pool.key.shape[0]))


def held_by(mask, length):
    """Positions of the keys that the query at position ``length`` will see before its own comes, of each key head."""
    return [row[:length].nonzero().flatten().tolist() for row in mask.alive(length)[0]]


@pytest.mark.parametrize("cuts", [[1] * 60, [60], [3, 40, 1, 16]], ids=len)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_pages_show_what_the_mask_shows(device, policy, cuts):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    # On a GPU other kernels decode, which round weights elsewhere.
    compare = two_ways.assert_same_in_another_order if device == "cpu" else two_ways.assert_same_by_another_way
    given, pool = [tokens(60, seed, dtype=dtype, device=device) for seed in range(3)], pool_of(60, dtype=dtype, device=device)
    cache, masks = eviction.PagedCache(policy, pool, H, HKV), [eviction.lifetimes(policy, *x) for x in given]
    for name in range(3):
        cache.join(name)
    cache.attend([1], *(x[:, :, :7] for x in given[1]))  # so sequences are at different phases
    starts, parts, at = [0, 7, 0], [[], [], []], 0
    for count in cuts:
        count = min(count, 53 - at)
        if count < 1:
            break
        both = [torch.cat([x[i][:, :, s + at : s + at + count] for x, s in zip(given, starts, strict=True)]) for i in range(4)]
        out = cache.attend([0, 1, 2], *both)
        at += count
        for name, start in enumerate(starts):
            parts[name].append(out[name : name + 1])
            assert cache.positions(name) == held_by(masks[name], start + at)
            assert cache.length(name) == start + at
        assert_no_page_is_lost(pool, cache)
    for name, start in enumerate(starts):
        expected = dmattn.attention(*given[name][:3], masks[name])[:, :, start : start + at]
        compare(torch.cat(parts[name], 2), expected, dtype)


def test_pages_give_what_a_bounded_cache_gives():
    policy, given = POLICIES[1], tokens(50)
    cache, pool = eviction.EvictionCache(policy, 1, H, HKV, D, DV), pool_of(20)
    paged = eviction.PagedCache(policy, pool, H, HKV)
    paged.join("a")
    for t in range(50):
        part = [x[:, :, t : t + 1] for x in given]
        expected = cache.attend(*part)
        two_ways.assert_same_in_another_order(paged.attend(["a"], *part), expected, torch.float32)
        held = [sorted(p for p in row if p >= 0) for row in cache.cache.position[0].tolist()]
        assert paged.positions("a") == held


def test_a_head_with_a_small_budget_holds_few_pages():
    class First(eviction.Policy):
        """The keys of the first head are the best."""

        def rank(self, seen):
            return torch.tensor([[[2.0], [1.0]]]).expand(seen.memory.shape)

    pool, given = pool_of(20), tokens(64)
    cache = eviction.PagedCache(First(32, every=32, floor=0.1), pool, H, HKV)
    cache.join("a")
    cache.attend(["a"], *given)
    assert [len(row) for row in cache.positions("a")] == [61, 3]
    assert [len(pages) for pages in cache._sequences["a"].pages] == [4, 1]
    assert cache.pages_held("a") == 5 <= cache.most_pages


def test_too_few_pages_change_nothing():
    pool, given = pool_of(6), tokens(40)
    cache = eviction.PagedCache(eviction.H2O(32, every=3), pool, H, HKV)
    cache.join("a"), cache.join("b")
    cache.attend(["a"], *(x[:, :, :20] for x in given))
    cache.attend(["b"], *(x[:, :, :10] for x in given))
    before = cache.positions("a"), pool.free[:], cache.length("a")
    both = [x[:, :, 20:40].expand(2, -1, -1, *[-1] * (x.dim() - 3)) for x in given]
    with pytest.raises(eviction.OutOfPagesError, match=r"pages: expected at least \d+ that are free, got 0"):
        cache.attend(["a", "b"], *both)
    assert (cache.positions("a"), pool.free, cache.length("a")) == before
    cache.swap_out("b")
    cache.attend(["a"], *(x[:, :, 20:40] for x in given))
    with pytest.raises(eviction.OutOfPagesError):
        cache.swap_in("b")
    cache.leave("a")
    cache.swap_in("b")
    assert cache.positions("b") == [list(range(10))] * 2
    assert_no_page_is_lost(pool, cache)


class Serving(RuleBasedStateMachine):
    """Any order of join, attend, swap and leave, in two layers that share a pool: each sequence is what its own mask says."""

    @initialize(policy=st.sampled_from(POLICIES), pages=st.integers(24, 40))
    def begin(self, policy, pages):
        self.pool = pool_of(pages)
        self.layers = [eviction.PagedCache(policy, self.pool, H, HKV) for _ in range(2)]
        self.policy, self.count, self.given, self.swapped = policy, 0, {}, set()

    @rule()
    def join(self):
        self.given[self.count] = [[x[:, :, :0] for x in tokens(1)] for _ in self.layers]
        for layer in self.layers:
            layer.join(self.count)
        self.count += 1

    @precondition(lambda self: self.given)
    @rule(data=st.data(), count=st.integers(1, 25))
    def attend(self, data, count):
        here = sorted(self.given.keys() - self.swapped)
        if not here:
            return
        names = data.draw(st.lists(st.sampled_from(here), min_size=1, max_size=3, unique=True))
        if sum(layer.pages_needed(names, count) for layer in self.layers) > len(self.pool.free):
            return
        for number, layer in enumerate(self.layers):
            new = tokens(count, seed=self.count * 99 + number + layer.length(names[0]), B=len(names))
            out = layer.attend(names, *new)
            for i, name in enumerate(names):
                whole = [torch.cat((x, y[i : i + 1]), 2) for x, y in zip(self.given[name][number], new, strict=True)]
                self.given[name][number] = whole
                mask, length = eviction.lifetimes(self.policy, *whole), whole[0].shape[2]
                assert layer.positions(name) == held_by(mask, length)
                expected = dmattn.attention(*whole[:3], mask)[:, :, -count:]
                two_ways.assert_same_in_another_order(out[i : i + 1], expected, torch.float32)

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def swap(self, data):
        name = data.draw(st.sampled_from(sorted(self.given)))
        if name not in self.swapped:
            before = [layer.positions(name) for layer in self.layers]
            for layer in self.layers:
                layer.swap_out(name)
                assert layer.pages_held(name) == 0
            self.swapped.add(name)
            self.before = {**getattr(self, "before", {}), name: before}
        elif sum(layer.pages_needed([name], 0) for layer in self.layers) <= len(self.pool.free):
            for layer, before in zip(self.layers, self.before[name], strict=True):
                layer.swap_in(name)
                assert layer.positions(name) == before
            self.swapped.remove(name)

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def leave(self, data):
        name = data.draw(st.sampled_from(sorted(self.given)))
        for layer in self.layers:
            layer.leave(name)
        del self.given[name]
        self.swapped.discard(name)

    @invariant()
    def no_page_is_lost(self):
        if hasattr(self, "pool"):
            assert_no_page_is_lost(self.pool, *self.layers)


TestServing = Serving.TestCase
TestServing.settings = settings(deadline=None, max_examples=15, stateful_step_count=20)


@pytest.mark.slow
def test_a_thousand_requests_lose_no_page():
    """Sequences of random lengths in a pool that is too small for all that run: they are preempted, come back and end."""
    rng, pool = random.Random(0), pool_of(48)
    cache = eviction.PagedCache(eviction.H2O(17, every=8, local=2), pool, H, HKV)
    waiting = [(name, rng.randint(1, 40), rng.randint(1, 8)) for name in range(1000)]
    lengths = {name: prompt + answer for name, prompt, answer in waiting}
    running, swapped, left, given, preempted = {}, [], set(), tokens(48), 0
    while waiting or running or swapped:
        while swapped and cache.pages_needed(swapped[0][:1], 0) <= len(pool.free):
            name, count = swapped.pop(0)
            cache.swap_in(name)
            running[name] = count
        while waiting and not swapped and len(running) < 16:
            name, prompt, answer = waiting.pop(0)
            cache.join(name)
            if cache.pages_needed([name], prompt) > len(pool.free):
                cache.leave(name)
                waiting.insert(0, (name, prompt, answer))
                break
            cache.attend([name], *(x[:, :, :prompt] for x in given))
            running[name] = answer
        while cache.pages_needed(list(running), 1) > len(pool.free):  # the latest goes first
            name = max(running)
            cache.swap_out(name)
            swapped.append((name, running.pop(name)))
            preempted += 1
        names = list(running)
        at = [cache.length(name) for name in names]
        cache.attend(names, *(torch.cat([x[:, :, p : p + 1] for p in at]) for x in given))
        assert_no_page_is_lost(pool, cache)
        for name in names:
            running[name] -= 1
            if running[name] == 0:
                assert cache.length(name) == lengths[name]
                del running[name]
                cache.leave(name)
                left.add(name)
    assert left == set(range(1000))
    assert preempted > 20
    assert sorted(pool.free) == list(range(48))


def one(**changes):
    """A cache with one sequence "a", and what it is called with."""
    cache = eviction.PagedCache(POLICIES[1], pool_of(20), H, HKV)
    cache.join("a")
    return cache, dict(zip(("query", "key", "value", "scores"), tokens(5), strict=True)) | {"names": ["a"]} | changes


@pytest.mark.brief
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"names": ["b"]}, ValueError, "name: expected a sequence that has joined, got 'b'"),
        ({"names": ["a", "a"]}, ValueError, "names: expected B=1 different sequences"),
        ({"query": torch.zeros(1, 6, 5, D)}, ValueError, r"query: expected \[B, H, T, D\] with H=4"),
        ({"value": torch.zeros(1, 2, 5, D)}, ValueError, r"value: expected \[B, Hkv, T, Dv\] with Hkv=2, Dv=16, got"),
        ({"key": torch.zeros(1, 2, 4, D)}, ValueError, r"query: expected \[B, H, T, D\] with B=1, T=4"),
        ({"query": torch.zeros(1, 4, 5, D, requires_grad=True)}, RuntimeError, "PagedCache.attend has no gradient"),
    ],
)  # fmt: skip
def test_refused_tokens_leave_no_trace(changes, error, message):
    cache, call = one(**changes)
    with pytest.raises(error, match=message):
        cache.attend(**call)
    assert cache.length("a") == cache.pages_held("a") == 0


@pytest.mark.brief
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda cache: cache.join("a"), ValueError, "name: expected one that no sequence has, got 'a'"),
        (lambda cache: cache.leave("b"), ValueError, "name: expected a sequence that has joined, got 'b'"),
        (lambda cache: cache.swap_in("a"), ValueError, "name: expected a sequence that was swapped out, got 'a'"),
        (lambda cache: [cache.swap_out("a") for _ in "12"], ValueError, "name: expected a sequence with pages, got 'a', which"),
        (lambda cache: cache.pool.give([3]), ValueError, "pages: expected pages that were taken, got 3, which is free"),
        (lambda cache: cache.pool.give([-1]), ValueError, "pages: expected numbers below 20, got -1"),
        (lambda cache: eviction.PagedCache(eviction.TOVA(3), None, H, HKV), TypeError, "pool: expected a dmattn.eviction.PagePool"),
        (lambda cache: cache.pool.take(-1), ValueError, "count: expected an int >= 0, got -1"),
        (lambda cache: cache.pool.take(21), eviction.OutOfPagesError, "pages: expected at least 21 that are free, got 20 of 20"),
        (lambda cache: pool_of(4, 20), ValueError, "page_size: expected a multiple of 16, got 20"),
        (lambda cache: pool_of(0), ValueError, "pages: expected a positive int, got 0"),
        (lambda cache: eviction.PagedCache(3, cache.pool, H, HKV), TypeError, "policy: expected a dmattn.eviction.Policy, got int"),
        (lambda cache: eviction.PagedCache(eviction.TOVA(3), cache.pool, H, 3), ValueError, "num_heads: expected a multiple of"),
        (lambda cache: eviction.PagedCache(eviction.TOVA(3, every=0), cache.pool, H, HKV), ValueError, "policy: expected one that decides"),
        (lambda cache: eviction.PagedCache(eviction.TOVA(999), cache.pool, H, HKV), ValueError, "pool: expected the 126 pages that"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call(one()[0])


def test_a_pool_knows_its_bytes():
    assert pool_of(20).nbytes == 20 * 16 * (4 * (D + DV) + 4 + 4)


def test_the_example_preempts_and_answers_as_alone(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import serve_paged

    monkeypatch.setattr(sys, "argv", ["serve_paged.py", "--requests", "12", "--pages", "20", "--longest", "30", "--check"])
    with torch.random.fork_rng(devices=[]):
        serve_paged.main()
    printed = capsys.readouterr().out
    assert "12 answers" in printed
    assert " 0 times" not in printed
    assert "20 of 20 pages are free" in printed
    assert "every answer is what its prompt gives alone" in printed
    monkeypatch.setattr(sys, "argv", ["serve_paged.py", "--pages", "6"])
    with pytest.raises(SystemExit, match="--pages: expected at least 8"):
        serve_paged.main()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of a process as Linux says it")
def test_serving_does_not_grow():
    """Sequences join, decode and leave: after 1,500 steps the process has grown by far less than the tokens took."""
    drawn, pool, names = random.Random(0), eviction.PagePool(80, 16, 128, dtype=torch.float32), []
    cache = eviction.PagedCache(eviction.Streaming(24, every=8, local=8), pool, 4, 2)

    def serve(steps):
        tokens = 0
        for _ in range(steps):
            if len(names) < 8 and drawn.random() < 0.3:
                names.append(object())
                cache.join(names[-1])
            if names and drawn.random() < 0.25:
                cache.leave(names.pop(drawn.randrange(len(names))))
            if names:
                cache.attend(names, *(torch.randn(len(names), heads, 1, 128) for heads in (4, 2, 2)))
            tokens += len(names)
        return tokens

    serve(200)
    before = resident_bytes()
    tokens = serve(1500)
    assert resident_bytes() - before < tokens * 2 * 2 * 128 * 4 / 4  # a quarter of their keys and values in float32
    for name in names:
        cache.leave(name)
    assert len(pool.free) == 80


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
