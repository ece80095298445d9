"""Generation with an IndexedAttention: caches in one piece, on pages and of fixed size, beside the call over the whole sequence."""

from __future__ import annotations

import math

import dmattn
import pytest
import torch
import torch._dynamo.testing
from dmattn.testing import strategies
from dmattn_bench import two_ways
from generation import assert_prompts_generate, assert_rewinds_and_reorders, assert_step_compiles_once
from indexed_layers import RECIPES, layer_of

tensor = strategies.random_tensor


def reserved(layer, batch, length, **options):
    return layer.new_cache(batch, length, **options)


def on_pages(layer, batch, length, **options):
    """A cache on shuffled pages that hold NaN; the last one is nobody's, and a sequence's table ends with the pages of another."""
    needed = -(-length // 16)
    cache = layer.new_cache(batch, length + 16, pages=batch * needed + 1, page_size=16, **options)
    for buffer in (cache.key, cache.value, cache.index_key):
        buffer.fill_(math.nan)
    numbers = torch.randperm(batch * needed, generator=torch.Generator().manual_seed(0)).int().view(batch, needed)
    cache.page_table[:, :needed] = numbers
    cache.page_table[:, needed:] = numbers.roll(1, 0)[:, :1] if batch > 1 else -1
    return cache


BOTH_CACHES = pytest.mark.parametrize("make", [reserved, on_pages])


@BOTH_CACHES
@pytest.mark.parametrize("options", [*RECIPES, {"num_kv_heads": 1, "local_heads": 0}], ids=str)
@pytest.mark.parametrize("cuts", [[1] * 40, [40], [22, 1, 5, 12]], ids=len)
def test_generation_is_the_whole_call_and_chooses_the_same_keys(options, cuts, make):
    layer, hidden = layer_of(**options).eval(), tensor((3, 40, 32), 0, torch.float64)
    cache, first, outs, lists = make(layer, 3, 40), 0, [], []
    with torch.no_grad():
        whole, expected = layer(hidden, return_index_mask=True)
        for tokens in cuts:
            out, mask = layer(hidden[:, first : first + tokens], cache=cache, return_index_mask=True)
            outs.append(out), lists.append(mask.indices)
            first += tokens
    two_ways.assert_same_in_another_order(torch.cat(outs, 1), whole, torch.float64)
    assert torch.equal(torch.cat(lists, 2), expected.indices)


@BOTH_CACHES
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", [{}, RECIPES[2], RECIPES[3]], ids=len)
def test_prompts_of_different_lengths(options, side, make):
    layer = layer_of(**options).eval()
    assert_prompts_generate(layer, tensor((3, 30, 32), 0, torch.float64), make(layer, 3, 24), side)


@pytest.mark.parametrize("options", [RECIPES[3], {"local_heads": 0, "block_size": 4, "block_score": "mean_key"}], ids=len)
def test_sequences_join_take_pages_and_leave(options):
    """A scheduler's work: prompts alone, by a table of their own; steps together; a sequence leaves, and its pages go to another."""
    layer, hidden = layer_of(**options).eval(), tensor((3, 60, 32), 0, torch.float64)
    cache, free = layer.new_cache(2, 60, pages=6, page_size=16, rewind=3), [4, 2, 5, 0, 3, 1]

    def join(row, sequence, tokens):
        cache.reset([row])
        cache.page_table[row] = -1
        taken = [free.pop() for _ in range(-(-tokens // 16))]
        cache.page_table[row, : len(taken)] = torch.tensor(taken, dtype=torch.int32)
        one = slice(row, row + 1)
        alone = cache.on_pages(cache.page_table[one, : len(taken)], cache.length[one], cache.recent[one])
        return layer(hidden[sequence : sequence + 1, :tokens], cache=alone)

    def leave(row):
        free.extend(page for page in cache.page_table[row].tolist() if page >= 0)

    with torch.no_grad():
        whole = layer(hidden)
        outs = [join(0, 0, 40), join(1, 1, 20)]
        assert cache.length.tolist() == [40, 20]
        torch.testing.assert_close(outs, [whole[:1, :40], whole[1:2, :20]])
        for step in range(4):
            out = layer(torch.stack((hidden[0, 40 + step], hidden[1, 20 + step]))[:, None], cache=cache)
            torch.testing.assert_close(out[:, 0], torch.stack((whole[0, 40 + step], whole[1, 20 + step])))
        leave(0)
        torch.testing.assert_close(join(0, 2, 50), whole[2:, :50])
        assert not free
        out = layer(torch.stack((hidden[2, 50], hidden[1, 24]))[:, None], cache=cache)
        torch.testing.assert_close(out[:, 0], torch.stack((whole[2, 50], whole[1, 24])))
        cache.rewind(torch.tensor([1, 3], dtype=torch.int32))
        out = layer(torch.stack((hidden[2, 50], hidden[1, 22]))[:, None], cache=cache)
        torch.testing.assert_close(out[:, 0], torch.stack((whole[2, 50], whole[1, 22])))


def test_pages_are_shared_and_change_hands():
    """A prefix of two sequences lies once in memory; beams change places; a prompt that has no place yet comes into one."""
    layer, hidden = layer_of(local_heads=0).eval(), tensor((3, 40, 32), 0, torch.float64)
    cache = layer.new_cache(2, 48, pages=9, page_size=16)
    cache.page_table.copy_(torch.arange(6, dtype=torch.int32).view(2, 3))
    hidden[1, :32] = hidden[0, :32]
    with torch.no_grad():
        whole = layer(hidden)
        layer(hidden[:2, :32], cache=cache, lengths=torch.tensor([32, 0], dtype=torch.int32))
        cache.page_table[1, :2], cache.length[1] = cache.page_table[0, :2], cache.length[0]
        cache.recent[1:2].copy_(cache.recent[:1])
        two_ways.assert_same_in_another_order(layer(hidden[:2, 32:36], cache=cache), whole[:2, 32:36], torch.float64)
        other = torch.tensor([1, 0])
        for state in (cache.page_table, cache.length):
            state.copy_(state[other])
        cache.recent.reorder(other)
        out = layer(hidden[other, 36:38], cache=cache)
        two_ways.assert_same_in_another_order(out, whole[other, 36:38], torch.float64)
        table, length = torch.tensor([[6, 7]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        prompt = cache.on_pages(table, length, cache.recent.empty(1))
        layer(hidden[2:, :20], cache=prompt)
        cache.page_table[0, :2], cache.length[0] = table[0], length[0]
        cache.recent[:1].copy_(prompt.recent)
        out = layer(torch.stack((hidden[2, 20:22], hidden[0, 38:40])), cache=cache)
        two_ways.assert_same_in_another_order(out, torch.stack((whole[2, 20:22], whole[0, 38:40])), torch.float64)
        cache.length[0] = 1  # less than was kept
        assert cache.kept.tolist() == [0, 0]
    assert repr(cache.recent) == "RecentRows(batch_size=2, size=3, embed_dim=32, most_back=0, counts=True)"
    assert repr(layer.conv) == "CausalConvolution(embed_dim=32, size=3)"


def test_pages_that_cannot_be():
    layer = layer_of(local_heads=0).eval()
    cache, hidden = layer.new_cache(2, 40, pages=4, page_size=16), tensor((2, 20, 32), 0, torch.float64)
    cache.page_table[:, :2] = torch.tensor([[0, 1], [2, 4]])
    assert cache.max_length == 48
    assert cache.nbytes == 4 * 2 * (3 + 1) + 8 * 5 * 16 * 4 * (8 + 8 + 8) + 8 * 2 * 2 * 32 + 4 * 2
    with torch.no_grad():
        with pytest.raises(
            ValueError, match=r"cache\.page_table: expected the numbers of pages below 4 .* got none for sequence 1"
        ):
            layer(hidden, cache=cache)
        assert cache.length.tolist() == [0, 0]
        layer(hidden[:, :16], cache=cache)
        with pytest.raises(ValueError, match="cache: expected one without pages, got one with them"):
            cache.reorder(torch.tensor([1, 0]))
        cache.page_table = cache.page_table.long()
        with pytest.raises(TypeError, match=r"cache\.page_table: expected dtype int32"):
            layer(hidden[:, 16:17], cache=cache)
    table, length = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for given, words in (
        ((table[0], length), r"page_table: expected 2 dimensions \[b, n\]"),
        ((table, length.expand(2)), r"length: expected \[b\] with b=1, got \[2\]"),
    ):
        with pytest.raises(ValueError, match=words):
            cache.on_pages(*given)
    for recent, error, words in (
        (None, TypeError, r"recent: expected rows such as cache\.recent\.empty\(1\), got NoneType"),
        (cache.recent, ValueError, r"recent\.rows: expected \[B, N, E\] with B=1, N=2, E=32, got \[2, 2, 32\]"),
        (layer_of(conv=2).new_cache(1, 40, rewind=1).recent, ValueError, r"recent: expected rows of a cache like this one"),
        (layer_of(local_heads=2).new_cache(1, 40).recent, ValueError, r"recent: expected rows of a cache like this one"),
    ):
        with pytest.raises(error, match=words):
            cache.on_pages(table, length, recent)
    with pytest.raises(TypeError, match="sequences: expected a slice, got int"):
        cache.recent[0]
    with pytest.raises(ValueError, match="cache: expected one with pages and without local heads, got one without pages"):
        layer.new_cache(2, 40).on_pages(table, length)
    with pytest.raises(ValueError, match="got one with local heads"):
        layer_of().new_cache(2, 40, pages=4).on_pages(table, length)
    with pytest.raises(ValueError, match="max_length: expected up to 1048576 in whole pages of 48, got 1048570"):
        layer.new_cache(2, 2**20 - 6, pages=4, page_size=48)
    with pytest.raises(ValueError, match="page_size: expected a multiple of 16, got 8"):
        layer.new_cache(2, 40, pages=4, page_size=8)
    with pytest.raises(ValueError, match="pages: expected its default with lifetime_window"):
        layer_of(lifetime_window=11).new_cache(2, pages=4)


@pytest.mark.parametrize("options", [{}, RECIPES[3]], ids=len)
def test_the_cache_is_rewound_reordered_and_sequences_leave_and_join(options):
    layer, hidden = layer_of(**options).eval(), tensor((2, 40, 32), 0, torch.float64)
    cache = layer.new_cache(2, 40, rewind=4)
    assert_rewinds_and_reorders(layer, hidden, cache, tensor((2, 4, 32), 9, torch.float64))
    with torch.no_grad():
        idle = torch.tensor([0, 12], dtype=torch.int32)
        out = layer(hidden[:, :12], cache=cache, lengths=idle)
        two_ways.assert_same_in_another_order(out[1], layer(hidden[:, :12])[1], torch.float64)
        assert cache.length.tolist() == [40, 12]
        with pytest.raises(ValueError, match="room for all tokens"):
            layer(hidden[:, :1], cache=cache)
        assert cache.length.tolist() == [40, 12]
        with pytest.raises(ValueError, match="n: expected at most"):
            cache.rewind(41)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("leaves", [lambda cache: cache.reset(), lambda cache: cache.rewind(20)], ids=["reset", "rewind"])
@pytest.mark.parametrize(
    "options", [{}, {"local_heads": 0, "sink_keys": 6}, {"block_size": 4}], ids=["half", "all heads", "blocks"]
)
def test_nothing_that_an_earlier_sequence_left_is_read(options, leaves, side):
    layer = layer_of(**options).eval()
    cache, prompt = layer.new_cache(1, 40, rewind=20), tensor((1, 8, 32), 0, torch.float64)
    padded = torch.cat((torch.full_like(prompt[:, :3], math.nan), prompt[:, :5]), 1) if side == "left" else prompt
    with torch.no_grad():
        layer(torch.full((1, 20, 32), math.nan, dtype=torch.float64), cache=cache)
        leaves(cache)
        out = layer(padded, cache=cache, lengths=torch.tensor([5], dtype=torch.int32), padding_side=side)
        real = slice(3, 8) if side == "left" else slice(0, 5)
        torch.testing.assert_close(out[:, real], layer(prompt[:, :5]))


@pytest.mark.parametrize("local_heads", [0, "half"])
def test_a_call_that_is_refused_changes_nothing(local_heads):
    layer = layer_of(groups=0, local_heads=local_heads).eval()
    cache, hidden = layer.new_cache(2, 40), tensor((2, 5, 32), 0, torch.float64)
    heads = 4 - layer.local_heads
    with torch.no_grad():
        with pytest.raises(ValueError, match="mask: expected entries below"):
            layer(hidden, cache=cache, index_mask=dmattn.IndexMask(torch.full((2, heads, 5, 3), 1000)))
        assert cache.next_positions(1).tolist() == [[0], [0]]
        assert cache.streaming is None or cache.streaming.next_positions(1).tolist() == [[0], [0]]
        assert not cache.recent.rows.any()


def test_a_cache_of_another_dtype_is_refused():
    layer = layer_of().eval()
    cache, hidden = layer.new_cache(2, 40), tensor((2, 5, 32), 0, torch.float64)
    layer.float()
    with (
        torch.no_grad(),
        pytest.raises(TypeError, match=r"query: expected dtype torch\.float64 like the cache, got torch\.float32"),
    ):
        layer(hidden.float(), cache=cache)
    assert cache.length.tolist() == [0, 0]
    assert not cache.recent.rows.any()
    with torch.no_grad(), pytest.raises(TypeError, match=r"hidden_states: expected dtype torch\.float32 like the layer"):
        layer(hidden, cache=layer.new_cache(2, 40))
    with pytest.raises(TypeError, match=r"hidden_states: expected dtype .* like the layer, got torch\.int64"):
        layer.indexer(hidden.long())


@pytest.mark.parametrize("trained", ["q_proj", "k_proj", "v_proj", "indexer"])
def test_a_cache_has_no_gradients(trained):
    layer = layer_of(local_heads=0).requires_grad_(False)
    getattr(layer, trained).requires_grad_(True)
    with pytest.raises(RuntimeError, match="IndexedAttention with a cache has no gradient"):
        layer(tensor((1, 5, 32), 0, torch.float64), cache=layer.new_cache(1, 8))


def test_lists_that_are_not_causal_show_no_later_token():
    """In calls of few tokens and of many."""
    query, key, value = (tensor((1, 1, 32, 8), seed, torch.float32) for seed in range(3))
    lists = torch.randint(0, 32, (1, 1, 32, 4), generator=torch.Generator().manual_seed(0))

    def attended(tokens):
        cache = dmattn.nn.IndexedCache(1, 1, 64, 8, groups=0)
        parts = []
        for first in range(0, 32, tokens):
            of_part = [given[:, :, first : first + tokens] for given in (query, key, value, lists)]
            parts.append(cache.attend(*of_part[:3], None, dmattn.IndexMask(of_part[3], local=1))[0])
        return torch.cat(parts, 2)

    expected = dmattn.attention(query, key, value, dmattn.IndexMask(lists, local=1, is_causal=True))
    for tokens in (16, 32):
        torch.testing.assert_close(attended(tokens), expected)


@pytest.mark.parametrize(
    ("sizes", "error", "words"),
    [
        ({"head_dim": 12}, ValueError, "head_dim: expected a multiple of 8 up to 256, got 12"),
        ({"index_dim": 264}, ValueError, "index_dim: expected a multiple of 8 up to 256, got 264"),
        ({"local": -1}, ValueError, "local: expected 0 <= local <= 1048576, got -1"),
        ({"sink_keys": 2**30}, ValueError, "sink_keys: expected 0 <= sink_keys"),
        ({"rewind": 2**40}, ValueError, "rewind: expected 0 <= rewind"),
        ({"dtype": torch.int32}, TypeError, "dtype: expected dtype .*float32.*, got int32"),
    ],
)
def test_sizes_of_a_cache_are_checked(sizes, error, words):
    with pytest.raises(error, match=words):
        dmattn.nn.IndexedCache(2, 2, **{"max_length": 16, "head_dim": 8, **sizes})


@BOTH_CACHES
@pytest.mark.parametrize("local_heads", [0, "half"])
def test_a_compiled_call_without_room_takes_nothing_in(make, local_heads):
    """Where nobody can be told: the sequence goes on as if the call had not been."""
    layer, hidden = layer_of(local_heads=local_heads).eval(), tensor((2, 50, 32), 0, torch.float64)
    cache = make(layer, 2, 32)
    if cache.page_table is not None:
        cache.page_table[:, 2:] = -1
    step = torch.compile(lambda given, **options: layer(given, cache=cache, **options), backend="eager")
    with torch.no_grad():
        whole = layer(hidden)
        step(hidden[:, :30], lengths=torch.tensor([30, 10], dtype=torch.int32))
        out = step(hidden[:, 10:28])  # the second sequence alone has room
        torch.testing.assert_close(out[1], whole[1, 10:28])
        assert cache.length.tolist() == [30, 28]
        step(hidden[:, :6], lengths=torch.tensor([5, 0], dtype=torch.int32), padding_side="left")
        assert cache.length.tolist() == [30, 28]
        if cache.page_table is not None:
            cache.page_table[0, 1:] = -1
            step(hidden[:, 28:29])
            assert cache.length.tolist() == [30, 29]
        else:
            out = torch.stack([step(torch.stack((hidden[0, 30 + n], hidden[1, 28 + n]))[:, None]) for n in range(2)])
            torch.testing.assert_close(out[:, 0, 0], whole[0, 30:32])
            torch.testing.assert_close(out[:, 1, 0], whole[1, 28:30])
            assert cache.next_positions(1).tolist() == [[32], [30]]


# Each has a cache of another kind.
KINDS = [{"local_heads": 0}, {}, {"local_heads": 0, "lifetime_window": 11}, {"lifetime_window": 11}]


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("conv", [2, 5])
def test_sequences_grow_by_different_numbers_of_tokens(options, side, conv):
    """Some calls give a sequence nothing, and what is not real is NaN."""
    layer, hidden = layer_of(conv=conv, **options).eval(), tensor((3, 20, 32), 0, torch.float64)
    cache, first = layer.new_cache(3, 20), [0, 0, 0]
    with torch.no_grad():
        whole = layer(hidden)
        for lengths in ([1, 0, 4], [2, 3, 0], [0, 1, 4], [1, 1, 0], [9, 4, 2], [3, 0, 9]):
            most = max(lengths)
            given = torch.full((3, most, 32), math.nan, dtype=torch.float64)
            places = [slice(most - n, most) if side == "left" else slice(0, n) for n in lengths]
            for b, n in enumerate(lengths):
                given[b, places[b]] = hidden[b, first[b] : first[b] + n]
            out = layer(given, cache=cache, lengths=torch.tensor(lengths, dtype=torch.int32), padding_side=side)
            for b, n in enumerate(lengths):
                expected = whole[b, first[b] : first[b] + n]
                two_ways.assert_same_in_another_order(out[b, places[b]], expected, torch.float64)
                first[b] += n
    assert cache.length.tolist() == first == [16, 9, 19]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_tokens_are_taken_back_as_far_as_a_cache_knows_them(options):
    layer, hidden = layer_of(**options).eval(), tensor((2, 30, 32), 0, torch.float64)
    cache, wrong = layer.new_cache(2, 30, rewind=4), tensor((2, 30, 32), 1, torch.float64)

    def kept():
        return cache.kept.view(2, -1).amax(1).tolist()

    with torch.no_grad():
        layer(hidden[:, :3], cache=cache, lengths=torch.tensor([3, 1], dtype=torch.int32))
        assert kept() == [3, 1]
        layer(hidden[:, 3:7], cache=cache, lengths=torch.tensor([4, 0], dtype=torch.int32))
        layer(torch.stack((wrong[0, :3], hidden[1, 1:4])), cache=cache)
        assert kept() == [4, 4]
        cache.rewind(torch.tensor([3, 0], dtype=torch.int32))
        assert kept() == [1, 4]
        with pytest.raises(ValueError, match="n: expected at most 1 tokens for sequence 0"):
            cache.rewind(2)
        with pytest.raises(ValueError, match="n: expected at most 4 tokens, got 5"):
            cache.rewind(5)
        layer(wrong[:, 3:4], cache=cache)
        assert kept() == [2, 4]
        cache.rewind(torch.tensor([2, 1], dtype=torch.int32))
        assert cache.length.tolist() == [6, 4]
        out = layer(torch.stack((hidden[0, 6:14], hidden[1, 4:12])), cache=cache)
        whole = layer(hidden)
        two_ways.assert_same_in_another_order(out, torch.stack((whole[0, 6:14], whole[1, 4:12])), torch.float64)
        # Compiled, where nobody can be told, a sequence becomes empty that is to go back too far.
        torch.compile(cache.rewind, backend="eager")(torch.tensor([5, 1], dtype=torch.int32))
        assert cache.length.tolist() == [0, 11]
        assert kept() == [0, 3]
        out = layer(torch.stack((hidden[0, :5], hidden[1, 11:16])), cache=cache)
        two_ways.assert_same_in_another_order(out, torch.stack((whole[0, :5], whole[1, 11:16])), torch.float64)
        cache.reorder(torch.tensor([1, 0]))
        out = layer(torch.stack((hidden[1, 16:18], hidden[0, 5:7])), cache=cache)
        two_ways.assert_same_in_another_order(out, torch.stack((whole[1, 16:18], whole[0, 5:7])), torch.float64)
        if cache.recent.kept is not None:
            cache.length[1] = 2  # by hand: less than there was to take back
            assert kept()[1] == 2
        cache.reset([0])
        assert kept()[0] == 0
        assert cache.recent.rows.flatten(1).any(1).tolist() == [False, True]


@BOTH_CACHES
def test_a_step_compiles_once_and_reads_no_length(make):
    layer = layer_of(torch.float32).eval()
    assert_step_compiles_once(layer, tensor((2, 20, 32), 0), make(layer, 2, 20))


@BOTH_CACHES
@pytest.mark.parametrize("local_heads", [0, "half"])
def test_a_cache_moves_and_is_saved_with_its_state(make, local_heads):
    layer, hidden = layer_of(local_heads=local_heads).eval(), tensor((2, 20, 32), 0, torch.float64)
    cache, other = make(layer, 2, 20, rewind=2), make(layer, 2, 20, rewind=2)
    with torch.no_grad():
        layer(hidden[:, :15], cache=cache)
        other.load_state_dict(cache.state_dict())
        assert torch.equal(layer(hidden[:, 15:], cache=other), layer(hidden[:, 15:], cache=cache))
    assert other.kept.tolist() == [2, 2]
    assert cache.streaming is None or cache.streaming.key.shape[2] == 3 + 2
    for kept in ([2, 3], [-1, 0]) if cache.streaming is None else ():
        with pytest.raises(ValueError, match=r"recent\.kept: expected numbers of tokens that can be taken back, got"):
            other.load_state_dict(cache.state_dict() | {"recent.kept": torch.tensor(kept, dtype=torch.int32)})
    assert cache.nbytes > cache.recent.nbytes >= 8 * 2 * (2 + 2) * 32
    assert cache.to(torch.float32).recent.rows.dtype == torch.float32
    assert cache.max_length == (20 if make is reserved else 48)


def test_tensors_that_a_cache_cannot_take():
    layer, hidden = layer_of(), tensor((2, 3, 32), 0, torch.float64)
    query, rows, index = tensor((2, 8, 3, 8), 0, torch.float64), tensor((2, 4, 3, 8), 1, torch.float64), layer.indexer(hidden)
    longer = layer.indexer(tensor((2, 5, 32), 0, torch.float64))
    for given, words in (
        ((query[0], rows, rows, index), "query: expected 4 dimensions"),
        ((query[:, :3], rows, rows, index), r"query: expected \[B, H, T, D\]"),
        ((query, rows[:, :, :2], rows, index), r"key: expected \[B, Hkv, T, D\]"),
        ((query, rows, rows[..., :4], index), r"value: expected \[B, Hkv, T, D\]"),
        ((query, rows, rows, longer), r"index.key: expected \[B, G, T, Di\]"),
    ):
        with pytest.raises(ValueError, match=words):
            layer.new_cache(2, 20).attend(*given, layer.indexer)
