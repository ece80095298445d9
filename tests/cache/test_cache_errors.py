"""Bad and odd input of the bounded cache: an error that names the argument and changes nothing, or the result that is documented."""

from __future__ import annotations

import copy
import math

import dmattn
import pytest
import torch
from dmattn import BoundedCache, checks
from dmattn.nn import MixedCache
from dmattn_bench import two_ways
from test_cache import STATE, History, assert_same_state

INF = math.inf
SIZES = {"local": 3, "sink_keys": 2, "rewind": 4}


def cache_of(window=4, batch=2, heads=2, **options):
    return BoundedCache(batch, heads, window, 8, 16, **{**SIZES, **options})


def good(**changes):
    arguments = {
        "query": torch.zeros(2, 4, 3, 8), "key": torch.zeros(2, 2, 3, 8), "value": torch.zeros(2, 2, 3, 16), "scores": torch.zeros(2, 2, 3),
    }  # fmt: skip
    return {**arguments, **changes}


META = {"device": "meta"}


@pytest.mark.brief
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": torch.zeros(2, 4, 3, 8, **META)}, ValueError, "query: expected device cpu like the cache, got meta"),
        ({"query": torch.zeros(2, 4, 3, 16)}, ValueError, r"query: expected \[B, H, T, D\] with B=2, D=8 and a multiple H of Hkv=2"),
        ({"query": torch.zeros(4, 3, 8)}, ValueError, r"query: expected \[B, H, T, D\] .*, got \[4, 3, 8\]"),
        ({"query": torch.zeros(0, 4, 3, 8)}, ValueError, r"query: expected .* with B=2, .* got \[0, 4, 3, 8\]"),
        ({"query": torch.zeros(2, 4, 3, 8).bfloat16()}, TypeError, "query: expected dtype torch.float32 like the cache, got torch.bfloat16"),
        ({"value": torch.zeros(2, 2, 3, 16).double()}, TypeError, "value: expected dtype torch.float32 like the cache, got torch.float64"),
        ({"key": torch.zeros(2, 1, 3, 8)}, ValueError, r"key: expected \[B, Hkv, T, D\] with B=2, Hkv=2, T=3, D=8, got \[2, 1, 3, 8\]"),
        ({"scores": torch.zeros(2, 2, 3, **META)}, ValueError, "scores: expected device cpu like the cache, got meta"),
        ({"scores": torch.zeros(2, 2, 3).double()}, TypeError, "scores: expected dtype float32, bfloat16, float16, got float64"),
        ({"scores": torch.zeros(2, 4, 3)}, ValueError, r"scores: expected \[B, Hkv, T\] with B=2, Hkv=2, T=3, got \[2, 4, 3\]"),
        ({"scores": [0.0]}, TypeError, "scores: expected a torch.Tensor, got list"),
        ({"scores": torch.zeros(2, 2, 3, requires_grad=True)}, RuntimeError, "BoundedCache.attend has no gradient"),
        ({"slopes": torch.ones(2, requires_grad=True)}, RuntimeError, "BoundedCache.attend has no gradient"),
        ({"slopes": torch.ones(4)}, ValueError, r"slopes: expected \[Hkv\] with Hkv=2, got \[4\]"),
        ({"slopes": torch.ones(2).int()}, TypeError, "slopes: expected dtype float32, bfloat16, float16, got int32"),
        ({"slopes": torch.ones(2, **META)}, ValueError, "slopes: expected device cpu like the cache, got meta"),
        ({"slopes": 0.5}, TypeError, "slopes: expected a torch.Tensor, got float"),
        ({"select_only": None}, TypeError, "select_only: expected a bool, got NoneType"),
        ({"lengths": torch.tensor([1.0, 2.0])}, TypeError, "lengths: expected dtype int32, got float32"),
        ({"lengths": torch.tensor([[1, 2]]).int()}, ValueError, r"lengths: expected \[B\] = \[2\], got \[1, 2\]"),
        ({"query": torch.zeros(2, 3, 3, 8)}, ValueError, r"query: expected \[B, H, T, D\] with B=2, D=8 and a multiple H of Hkv=2, got \[2, 3,"),
        ({"query": torch.zeros(2, 4, 0, 8)}, ValueError, "query: expected 1 to 1048567 tokens a call, got T=0"),
        ({"query": torch.zeros(()).expand(2, 4, 2**20, 8)}, ValueError, "query: expected 1 to 1048567 tokens a call, got T=1048576"),
        ({"key": torch.zeros(2, 2, 2, 8)}, ValueError, r"key: expected \[B, Hkv, T, D\] with B=2, Hkv=2, T=3, D=8, got \[2, 2, 2, 8\]"),
        ({"value": torch.zeros(2, 2, 3, 8)}, ValueError, r"value: expected \[B, Hkv, T, Dv\] with B=2, Hkv=2, T=3, Dv=16, got \[2, 2, 3, 8\]"),
        ({"value": None}, TypeError, "value: expected a torch.Tensor, got NoneType"),
        ({"key": torch.zeros(2, 2, 3, 8).half()}, TypeError, "key: expected dtype torch.float32 like the cache, got torch.float16"),
        ({"key": torch.zeros(2, 2, 3, 8, device="meta")}, ValueError, "key: expected device cpu like the cache, got meta"),
        ({"scores": None}, ValueError, r"scores: expected \[B, Hkv, T\] with a window of 4, got None"),
        ({"lengths": torch.tensor([1, 2])}, TypeError, "lengths: expected dtype int32, got int64"),
        ({"lengths": torch.tensor([1, 2, 3]).int()}, ValueError, r"lengths: expected \[B\] = \[2\], got \[3\]"),
        ({"lengths": torch.tensor([1, 2], device="meta").int()}, ValueError, "lengths: expected device cpu like the cache, got meta"),
        ({"lengths": [1, 2]}, TypeError, "lengths: expected a torch.Tensor, got list"),
        ({"padding_side": "top"}, ValueError, "padding_side: expected 'left' or 'right', got 'top'"),
        ({"scale": INF}, ValueError, "scale: expected a finite number"),
        ({"softcap": -1.0}, ValueError, "softcap: expected a finite number >= 0"),
        ({"return_lse": 1}, TypeError, "return_lse: expected a bool, got int"),
        ({"query": torch.zeros(2, 4, 3, 8, requires_grad=True)}, RuntimeError, "BoundedCache.attend has no gradient"),
    ],
)  # fmt: skip
def test_refused_tokens_change_nothing(changes, error, message):
    cache = cache_of()
    cache.attend(**good())
    before = copy.deepcopy(cache)
    with pytest.raises(error, match=message):
        cache.attend(**good(**changes))
    assert_same_state(cache, before)


INT = torch.int32
BAD_CALLS = [
    (lambda cache: cache.rewind(torch.tensor([1, 1], dtype=INT, **META)), ValueError, "n: expected device cpu like the cache, got meta"),
    (lambda cache: cache.rewind(True), TypeError, "n: expected an int >= 0, got bool"),
    (lambda cache: cache.rewind(-1), ValueError, "n: expected an int >= 0, got -1"),
    (lambda cache: cache.rewind(1.0), TypeError, "n: expected an int >= 0, got float"),
    (lambda cache: cache.rewind(4), ValueError, "n: expected at most 3 tokens for sequence 0, the last whose state is kept, got 4"),
    (lambda cache: cache_of(rewind=0).rewind(1), ValueError, "n: expected at most 0 tokens, got 1: .* make the cache with rewind=1"),
    (lambda cache: cache.rewind(torch.tensor([0, 0])), TypeError, "n: expected dtype int32, got int64"),
    (lambda cache: cache.rewind(torch.tensor([0], dtype=INT)), ValueError, r"n: expected \[B\] = \[2\], got \[1\]"),
    (lambda cache: cache.reorder(torch.tensor([0.0, 1.0])), TypeError, "index: expected dtype int32, int64, got float32"),
    (lambda cache: cache.reorder([0, 1]), TypeError, "index: expected a torch.Tensor, got list"),
    (lambda cache: cache.reorder(torch.tensor([0])), ValueError, r"index: expected \[B\] = \[2\], got \[1\]"),
    (lambda cache: cache.reorder(torch.tensor([0, -1])), ValueError, "index: expected numbers from 0 to 1"),
    (lambda cache: cache.reorder(torch.tensor([0, 1], **META)), ValueError, "index: expected device cpu like the cache, got meta"),
    (lambda cache: cache.reset(torch.ones(2, **META).bool()), ValueError, "rows: expected device cpu like the cache, got meta"),
    (lambda cache: cache.reset([-1]), ValueError, "rows: expected an int >= 0, got -1"),
    (lambda cache: cache.reset(["0"]), TypeError, "rows: expected an int >= 0, got str"),
    (lambda cache: cache.reset([2]), ValueError, "rows: expected numbers of sequences from 0 to 1, got 2"),
    (lambda cache: cache.reset(torch.tensor([1])), TypeError, "rows: expected dtype bool, got int64"),
    (lambda cache: cache.reset(torch.tensor([True])), ValueError, r"rows: expected \[B\] = \[2\], got \[1\]"),
    (lambda cache: cache.reset(1.5), TypeError, r"rows: expected bool \[B\], numbers of sequences or None, got float"),
    (lambda cache: cache.next_positions(1, torch.tensor([1, 2])), TypeError, "lengths: expected dtype int32, got int64"),
    (lambda cache: cache.next_positions(-1), ValueError, "tokens: expected an int >= 0, got -1"),
    (lambda cache: cache.next_positions(1.5), TypeError, "tokens: expected an int >= 0, got float"),
    (lambda cache: cache.next_positions(2, padding_side="top"), ValueError, "padding_side: expected 'left' or 'right', got 'top'"),
    (lambda cache: load(cache, torch.tensor(5)), ValueError, "state_dict: expected .* got one with 5"),
    (lambda cache: load(cache, [1]), ValueError, r"state_dict: expected .* got one with \[1\]"),
    (torch.jit.script, NotImplementedError, "torch.jit.script is not supported"),
]  # fmt: skip


def load(cache, sizes):
    cache.load_state_dict({**cache.state_dict(), "sizes_saved": sizes})


def test_other_calls_that_are_refused_change_nothing():
    for call, error, message in BAD_CALLS:
        cache = cache_of()
        cache.attend(**good())
        before = copy.deepcopy(cache)
        with pytest.raises(error, match=message):
            call(cache)
        assert_same_state(cache, before)


def test_a_state_that_requires_a_gradient_is_refused_and_unchanged():
    cache = cache_of()
    cache.attend(**good())
    cache.key.requires_grad_()
    before = [tensor.detach().clone() for tensor in cache._state()]
    for tokens in (3, 12):  # one after another, and as a chunk
        longer = {name: given.repeat_interleave(tokens // 3, 2) for name, given in good().items()}
        with pytest.raises(RuntimeError, match=r"BoundedCache\.attend has no gradient, got a tensor that requires one"):
            cache.attend(**longer)
    with pytest.raises(RuntimeError, match=r"BoundedCache\.rewind has no gradient, got a tensor that requires one"):
        cache.rewind(1)
    assert all(map(torch.equal, cache._state(), before))


def test_nothing_can_be_taken_back_behind_a_reset():
    cache = cache_of()
    cache.attend(**good())
    cache.reset([1])
    with pytest.raises(ValueError, match="n: expected at most 0 tokens for sequence 1, the last whose state is kept, got 1"):
        cache.rewind(1)
    cache.rewind(torch.tensor([3, 0], dtype=torch.int32))
    assert_same_state(cache, cache_of())


def test_steps_that_do_not_belong_to_the_positions(device):
    """As a state dict may have them: without a local window a chunk then puts keys anywhere, but no processor divides by its length, 0."""
    history = History(60, torch.bfloat16, device)
    cache = history.cache(4, 0, 0)
    cache.attend(*history.tokens(0, 40))
    cache.steps.zero_()
    cache.attend(*history.tokens(40, 60))
    assert (cache.steps == 20).all()


@pytest.mark.parametrize("step", [-1, 2**31 - 1])
def test_steps_that_no_token_can_follow(device, step):
    """As a state dict may have them: then no token is taken in, with its attention, before it, or in a chunk."""
    history = History(20, torch.bfloat16, device)
    cache = history.cache(4, 3, 2, rewind=4)
    cache.attend(*history.tokens(0, 8))
    cache.steps.fill_(step)
    before = copy.deepcopy(cache)
    for last, select_only in ((9, False), (9, True), (20, False)):
        cache.attend(*history.tokens(8, last), select_only=select_only)
        assert_same_state(cache, before)


@pytest.mark.parametrize("window", [4, 3000])
@pytest.mark.parametrize("select_only", [False, True])
def test_a_state_whose_scores_are_all_nan(device, select_only, window):
    """None of the selected keys is the worst then, and a score of inf beats what stands for none: no slot is written that is not there."""
    history = History(20, torch.bfloat16, device)
    cache = history.cache(window, 0, 0)
    cache.attend(*history.tokens(0, 10), select_only=select_only)
    cache.score.fill_(math.nan)
    query, key, value, scores = history.tokens(10, 11)
    cache.attend(query, key, value, torch.full_like(scores, INF), select_only=select_only)
    assert (cache.steps == 11).all()
    assert (cache.position < 11).all()


def test_an_empty_sequence_sees_nothing():
    """A row that waits, and all rows after a reset: 0 and -inf, and no trace."""
    cache, none = cache_of(), torch.zeros(2, dtype=torch.int32)
    for tokens in (1, 3, 20):
        given = {name: x[:, :, :1].expand(-1, -1, tokens, *x.shape[3:]) for name, x in good().items()}
        out, lse = cache.attend(**given, lengths=none, return_lse=True)
        assert not out.any()
        assert (lse == -INF).all()
    assert_same_state(cache, cache_of())


def test_lengths_beyond_the_tokens_are_taken_as_within():
    history = History(40, torch.float32, "cpu")
    for tokens in (3, 20):
        cache, same = history.cache(4, 3, 2), history.cache(4, 3, 2)
        beyond = torch.tensor([1000, -7], dtype=torch.int32)
        within = torch.tensor([tokens, 0], dtype=torch.int32)
        given = history.tokens(0, tokens)
        assert torch.equal(cache.attend(*given, lengths=beyond), same.attend(*given, lengths=within))
        assert_same_state(cache, same)


@pytest.mark.parametrize("tokens", [1, 5, 30])
def test_a_window_of_0_takes_scores_or_none(tokens):
    """With window=0 scores only bias logits; without a score every logit is the product."""
    history = History(60, torch.float64, "cpu")
    scored, plain = history.cache(0, 6, 2), history.cache(0, 6, 2)
    for first in range(0, 60, tokens):
        last = first + tokens
        query, key, value, scores = history.tokens(first, last)
        outs = scored.attend(query, key, value, scores), plain.attend(query, key, value)
        seen = history.key[:, :, :last], history.value[:, :, :last], dmattn.IntervalMask.streaming(last, 2, 6)
        for out, bias in zip(outs, (history.scores[..., :last], None), strict=True):
            expected = dmattn.attention(query, *seen, key_bias=bias)
            two_ways.assert_same_in_another_order(out, expected, torch.float64)


@pytest.mark.parametrize("tokens", [1, 4, 30])
def test_inputs_need_not_be_contiguous(device, tokens):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    history = History(60, dtype, device, "ties")
    cache, same = history.cache(4, 3, 2, rewind=2), history.cache(4, 3, 2, rewind=2)
    lengths = torch.tensor([[tokens, 9], [tokens - 1, 9]], dtype=torch.int32, device=device)[:, 0]
    slopes = torch.tensor([[0.5, 9], [0.1, 9]], device=device)[:, 0]
    for first in range(0, 60, tokens):
        given = history.tokens(first, first + tokens)
        by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
        outs = [
            cache.attend(*by_token, lengths=lengths, slopes=slopes),
            same.attend(*(x.contiguous() for x in given), lengths=lengths.contiguous(), slopes=slopes.contiguous()),
        ]
        assert torch.equal(*outs)
    assert_same_state(cache, same)
    back = torch.tensor([[1, 9], [0, 9]], dtype=torch.int32, device=device)[:, 0]
    cache.rewind(back)
    same.rewind(back.contiguous())
    assert_same_state(cache, same)


def test_the_longest_window_is_taken(monkeypatch):
    monkeypatch.setattr(checks, "MAX_LENGTH", 11)
    assert cache_of(window=4, rewind=2).key.shape[2] == 11
    with pytest.raises(ValueError, match="from 1 to 11, got 12"):
        cache_of(window=5, rewind=2)


def test_a_saved_state_fits_its_own_kind_alone():
    for other, error, message in (
        (cache_of(window=5), ValueError, r"expected that of a cache with .*'window': 5.*, got one with .*'window': 4"),
        (cache_of(local=4), ValueError, r"expected that of a cache with .*'local': 4"),
        (cache_of(rewind=0), ValueError, r"expected that of a cache with .*'rewind': 0"),
        (cache_of(heads=1), RuntimeError, "size mismatch for key"),
        (cache_of(batch=3), RuntimeError, "size mismatch for key"),
    ):
        with pytest.raises(error, match=message):
            other.load_state_dict(cache_of().state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        MixedCache(cache_of(window=0), cache_of()).load_state_dict(cache_of().state_dict())


# Direct calls of the ops ----------------------------------------------------------------------------------------------------------------


def state_of(cache, **changes):
    return [changes.get(name, getattr(cache, name)) for name in STATE]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": torch.zeros(2, 2, 12, 8)}, r"key_cache: expected \[B, Hkv, N, D\], N = window \+ local \+ sink \+ rewind"),
        ({"key": torch.zeros(2, 2, 13, 8).transpose(2, 3)}, "key_cache: expected"),
        (
            {"key": torch.zeros(2, 13, 2, 8).transpose(1, 2)},
            "key_cache: expected a contiguous tensor, because it is written in place",
        ),
        (
            {"value": torch.zeros(2, 2, 13, 12)},
            "value_cache: expected a last dimension that is a multiple of 8 up to 256, got 12",
        ),
        ({"value": torch.zeros(2, 2, 13, 16).half()}, "value_cache: expected"),
        ({"score": torch.zeros(2, 2, 13).double()}, "score_cache: expected"),
        ({"position": torch.zeros(2, 2, 13)}, "position: expected"),
        ({"entered": torch.zeros(2, 2, 3, dtype=torch.int32)}, "key_cache: expected"),
        ({"steps": torch.zeros(2, dtype=torch.int32)}, "steps: expected"),
        ({"kept": torch.zeros(2, 2)}, "kept: expected"),
    ],
)
def test_ops_refuse_a_state_that_is_none(changes, message):
    cache, tokens = cache_of(), good()
    token = [tokens[name][:, :, :1] for name in ("key", "value", "scores")]
    for call in (
        lambda: torch.ops.dmattn.cache_update(*state_of(cache, **changes), *token, None, 4, 3, 2),
        lambda: torch.ops.dmattn.cache_rewind(*state_of(cache, **changes), torch.zeros(2, dtype=torch.int32), 4, 3, 2),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
    assert_same_state(cache, cache_of())


def test_ops_refuse_other_tokens_and_sizes():
    cache, given = cache_of(), good()
    state, token = state_of(cache), [given[name][:, :, :1] for name in ("key", "value", "scores")]
    update, rewind = torch.ops.dmattn.cache_update, torch.ops.dmattn.cache_rewind
    long = torch.tensor([1, 1])
    for call, message in (
        (lambda: update(*state, *token, None, 5, 3, 2), "key_cache: expected"),
        (lambda: update(*state, *token, None, -4, 3, 10), "window: expected a number of keys from 0"),
        (lambda: update(*state, *(x[:, :1] for x in token), None, 4, 3, 2), r"key: expected \[B, Hkv, 1, D\]"),
        (lambda: update(*state, token[0], token[1][..., :8], token[2], None, 4, 3, 2), r"value: expected \[B, Hkv, 1, Dv\]"),
        (lambda: update(*state, *token[:2], None, None, 4, 3, 2), r"scores: expected \[B, Hkv, 1\] with a window of 4, got none"),
        (lambda: update(*state, *token[:2], token[2].double(), None, 4, 3, 2), "scores: expected float32, bfloat16 or float16"),
        (lambda: update(*state, token[0].half(), *token[1:], None, 4, 3, 2), "key: expected"),
        (lambda: update(*state, *token, long, 4, 3, 2), "lengths: expected"),
        (lambda: update(*state, *token, long.int()[:1], 4, 3, 2), "lengths: expected"),
        (lambda: rewind(*state, long, 4, 3, 2), "count: expected"),
        (lambda: rewind(*state, long.int()[:1], 4, 3, 2), "count: expected"),
        (lambda: rewind(*state, long.int(), 4, 3, 3), "key_cache: expected"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            call()
    assert_same_state(cache, cache_of())


def test_numbers_out_of_range_in_a_state_are_no_wrong_access():
    """A state that nobody made by attending: what comes out means nothing, and no other memory is touched."""
    generator = torch.Generator().manual_seed(0)
    for tokens in (1, 3, 20):
        cache, history = cache_of(dtype=torch.float32), History(20, torch.float32, "cpu")
        for name in ("position", "entered", "steps", "kept"):
            tensor = getattr(cache, name)
            tensor.copy_(torch.randint(-(2**31), 2**31 - 1, tensor.shape, generator=generator, dtype=torch.int64))
        cache.attend(*history.tokens(0, tokens))
        torch.ops.dmattn.cache_rewind(*state_of(cache), torch.tensor([2, 4], dtype=torch.int32), 4, 3, 2)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((2, 2, 0, 8), {}, ValueError, "window: expected a positive int, got 0"),
        ((2, 2, -1, 8), {"local": 3}, ValueError, "window: expected an int >= 0, got -1"),
        ((2, 2, 0, 8), {"sink_keys": -1}, ValueError, "sink_keys: expected an int >= 0, got -1"),
        ((0, 2, 4, 8), {}, ValueError, "batch_size: expected a positive int, got 0"),
        ((2, 2.0, 4, 8), {}, TypeError, "num_kv_heads: expected a positive int, got float"),
        ((2, 2, 4, 12), {}, ValueError, "head_dim: expected a multiple of 8 up to 256, got 12"),
        ((2, 2, 4, 8, 264), {}, ValueError, "value_dim: expected a multiple of 8 up to 256, got 264"),
        ((2, 2, 4, 8), {"rewind": -1}, ValueError, "rewind: expected an int >= 0, got -1"),
        ((2, 2, 2**20, 8), {"rewind": 1}, ValueError, r"window: expected window \+ local \+ sink_keys \+ rewind from 1 to 1048576, got 1048577"),
        ((2, 2, 4, 8), {"dtype": torch.int32}, TypeError, "dtype: expected dtype float64, float32, bfloat16, float16, got int32"),
    ],
)  # fmt: skip
def test_bad_sizes(arguments, options, error, message):
    with pytest.raises(error, match=message):
        BoundedCache(*arguments, **options)
