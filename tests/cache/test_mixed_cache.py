"""MixedCache: two bounded caches give what one mask of all heads gives, and refuse tokens before one of them takes any in."""

from __future__ import annotations

import math

import brute_check
import pytest
import torch
from dmattn import BoundedCache
from dmattn.nn import MixedCache
from dmattn.testing import top_k_visible
from test_cache import History, assert_same_state


def made(history, first=1, window=5, local=3, sink_keys=2, rewind=4):
    """A cache of all key heads of a history; so many of them stream."""
    B, Hkv, _, D = history.key.shape
    options = {"local": local, "sink_keys": sink_keys, "rewind": rewind, "dtype": history.key.dtype, "device": history.key.device}
    sizes = (D, history.value.shape[3])
    return MixedCache(BoundedCache(B, first, 0, *sizes, **options), BoundedCache(B, Hkv - first, window, *sizes, **options))


@pytest.mark.parametrize("cuts", [[1] * 40, [40], [11, 1, 20, 8]], ids=len)
@pytest.mark.parametrize("select_only", [False, True])
@pytest.mark.parametrize("first", [1, 2])
def test_all_heads_see_what_one_mask_shows_them(device, exact, first, select_only, cuts):
    history = History(40, exact, device, "ties", H=6, Hkv=3)
    slopes = torch.tensor([0.4, 0.1, 0.02], device=device)
    wide = torch.float64 if exact == torch.float64 else torch.float32
    recency = slopes.to(wide)[:, None] * torch.arange(40, device=device)
    ranks, cache, at, parts = history.scores + recency, made(history, first), 0, []
    for tokens in cuts:
        parts.append(cache.attend(*history.tokens(at, at + tokens), slopes=slopes, select_only=select_only, return_lse=True))
        at += tokens
        assert cache.next_positions(1).flatten().tolist() == [at, at]
    out, lse = (torch.cat(part, 2) for part in zip(*parts, strict=True))
    never = torch.cat([torch.full_like(ranks[:, :first], -math.inf), ranks[:, first:]], 1)
    bias = recency.expand_as(ranks) if select_only else ranks
    brute_check.assert_right(history.case(top_k_visible(never, 5, local=3, sink_keys=2), bias), {"out": out, "lse": lse})
    assert torch.equal(cache.length, torch.full_like(cache.length, 40))
    assert cache.nbytes == cache.streaming.nbytes + cache.selecting.nbytes
    assert cache.streaming.key.shape[2] == 5 + 4


def test_refused_tokens_leave_no_trace():
    history = History(10, torch.float32, "cpu", H=6, Hkv=3)
    cache, tokens = made(history), dict(zip(("query", "key", "value", "scores"), history.tokens(0, 4), strict=True))
    for changes, error, message in (
        ({"query": tokens["query"][:, :4]}, ValueError, r"query: expected \[B, H, T, D\] with B=2, D=8 and a multiple H of Hkv=3, got"),
        ({"key": tokens["key"][:, :2]}, ValueError, r"key: expected \[B, Hkv, T, D\] with B=2, Hkv=3, T=4, D=8, got \[2, 2, 4, 8\]"),
        ({"scores": None}, ValueError, r"scores: expected \[B, Hkv, T\] with a window of 5, got None"),
        ({"scores": tokens["scores"].double()}, TypeError, "scores: expected dtype float32, bfloat16, float16, got float64"),
        ({"slopes": torch.ones(2)}, ValueError, r"slopes: expected \[Hkv\] with Hkv=3, got \[2\]"),
        ({"lengths": torch.tensor([1, 2])}, TypeError, "lengths: expected dtype int32"),
        ({"select_only": 1}, TypeError, "select_only: expected a bool, got int"),
        ({"query": tokens["query"].clone().requires_grad_()}, RuntimeError, "BoundedCache.attend has no gradient"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            cache.attend(**{**tokens, **changes})
    with pytest.raises(ValueError, match="n: expected at most 4 tokens, got 5"):
        cache.rewind(5)
    assert_same_state(cache.streaming, made(history).streaming)
    assert_same_state(cache.selecting, made(history).selecting)


def test_tokens_that_only_the_streaming_cache_has_no_room_for_leave_no_trace():
    cache = MixedCache(BoundedCache(1, 1, 0, 8, local=2**20 - 4), BoundedCache(1, 1, 3, 8, local=2))
    tokens = [torch.zeros(1, 2, 9, *size) for size in ((8,), (8,), (8,), ())]
    with pytest.raises(ValueError, match="query: expected 1 to 4 tokens a call, got T=9"):
        cache.attend(*tokens)
    assert cache.selecting.length.tolist() == cache.streaming.length.tolist() == [0]


def test_both_caches_reset_the_rows_of_an_iterator_and_say_what_can_be_taken_back():
    history = History(6, torch.float32, "cpu", H=6, Hkv=3)
    cache = made(history)
    cache.attend(*history.tokens(0, 6))
    assert cache.kept.tolist() == [[4, 4, 4], [4, 4, 4]]
    cache.reset(iter([1]))
    assert cache.streaming.length.tolist() == cache.selecting.length.tolist() == [6, 0]
    assert cache.kept.tolist() == [[4, 4, 4], [0, 0, 0]]


def test_caches_that_do_not_fit_each_other():
    streaming, selecting = BoundedCache(2, 1, 0, 8, local=3), BoundedCache(2, 1, 4, 8, local=3)
    for one, other, error, message in (
        (None, selecting, TypeError, "streaming: expected a dmattn.BoundedCache, got NoneType"),
        (selecting, selecting, ValueError, "streaming: expected a cache with window=0, got BoundedCache.*window=4"),
        (streaming, BoundedCache(3, 1, 4, 8, local=3), ValueError, "selecting: expected the batch, sizes, rewind, dtype and device of"),
        (streaming, BoundedCache(2, 1, 4, 8, local=3, rewind=1), ValueError, "selecting: expected the batch"),
        (streaming, BoundedCache(2, 1, 4, 8, local=3, dtype=torch.float16), ValueError, "selecting: expected the batch"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            MixedCache(one, other)


def test_state_is_saved_and_loaded(device, exact):
    history = History(30, exact, device, H=6, Hkv=3)
    cache, other = made(history), made(history)
    cache.attend(*history.tokens(0, 20))
    other.load_state_dict(cache.state_dict())
    assert torch.equal(cache.attend(*history.tokens(20, 30)), other.attend(*history.tokens(20, 30)))
