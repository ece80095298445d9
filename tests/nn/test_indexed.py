"""IndexedAttention and its indexer: what they compute, what teaches them, and generation with a cache."""

from __future__ import annotations

import copy
import dataclasses
import math

import dmattn
import pytest
import torch
import torch._dynamo.testing
from dmattn import IntervalMask
from dmattn.nn import IndexedAttention, IndexedCache, Indexer, IndexProjections, IndexRecipe
from dmattn.nn import scores as scores_module
from dmattn.testing import AttentionCase, strategies
from dmattn_bench import two_ways
from generation import assert_prompts_generate, assert_rewinds_and_reorders, assert_step_compiles_once, convolved
from programs import assert_compiles_once, exported
from torch.utils.checkpoint import checkpoint

tensor = strategies.random_tensor

RECIPES = [
    {},
    {"groups": 1, "block_size": 4},
    {"block_size": 4, "block_score": "mean_key", "sink_keys": 2},
    {"local_heads": 0, "recency": None, "sink_keys": 1, "conv": 5},
    {"local": 0, "rope_theta": None, "conv": 1},
    {"window": 0, "sink_keys": 2, "softcap": 3.0},
]
FIELDS = {field.name for field in dataclasses.fields(IndexRecipe)}


def layer_of(dtype=torch.float64, **options):
    """A layer whose indexer tells keys apart."""
    torch.manual_seed(0)
    fields = {name: options.pop(name) for name in FIELDS & options.keys()}
    softcap = options.pop("softcap", 0.0)
    sizes = {"window": 8, "num_kv_heads": 4, "head_dim": 8, "local": 3, "dtype": dtype, **options}
    layer = IndexedAttention(
        32, 8, recipe=IndexRecipe(**{"index_heads": 2, "index_dim": 8, "local_heads": "half", **fields}), **sizes
    )
    layer.softcap = softcap
    return layer


def visible_by_hand(layer, hidden, documents=None):
    """bool [B, Hkv, S, S] from the definition: scores of all pairs, sorted; hidden is convolved; documents [B, S] are numbers."""
    indexer, length = layer.indexer, hidden.shape[1]
    parts, size = indexer(hidden), layer.recipe.block_size
    position = torch.arange(length)
    scores = torch.einsum("bgthd,bgsd->bghts", parts.query, parts.key) * indexer.head_dim**-0.5
    scores = torch.einsum("bgth,bghts->bgts", parts.weights, scores.relu())
    scores = scores + indexer.slope[:, None, None] * (position - position[:, None])
    allowed = (position <= position[:, None]).expand(hidden.shape[0], -1, -1)
    if documents is not None:
        allowed = allowed & (documents[:, :, None] == documents[:, None])
    allowed = allowed[:, None]
    forced = allowed & ((position > position[:, None] - layer.local) | (position < layer.sink_keys))
    competes = (allowed & ~forced).expand_as(scores)
    whole = -(-length // size) * size

    def blocks(given, beyond):
        return torch.nn.functional.pad(given, (0, whole - length), value=beyond).unflatten(3, (-1, size))

    if layer.recipe.block_score == "max":
        of_blocks = blocks(scores.masked_fill(~competes, -math.inf), -math.inf).amax(4)
    else:
        count = length // size
        mean = parts.key[:, :, : count * size].unflatten(2, (-1, size)).mean(3)
        of_blocks = torch.einsum("bgthd,bgsd->bghts", parts.query, mean) * indexer.head_dim**-0.5
        of_blocks = torch.einsum("bgth,bghts->bgts", parts.weights, of_blocks.relu())
        where = torch.arange(count) * size + (size - 1) / 2
        of_blocks = of_blocks + indexer.slope[:, None, None] * (where - position[:, None])
        may = blocks(competes, False).any(4) & blocks(allowed.expand_as(scores), False).all(4)
        of_blocks = of_blocks.masked_fill(~may[..., :count], -math.inf)
        of_blocks = torch.nn.functional.pad(of_blocks, (0, whole // size - count), value=-math.inf)
    best = of_blocks.topk(min(layer.window // size, of_blocks.shape[3]), dim=3)
    chosen = torch.zeros_like(of_blocks, dtype=torch.bool).scatter(3, best.indices, best.values > -math.inf)
    selecting = (chosen.repeat_interleave(size, 3)[..., :length] & allowed) | forced
    selecting = selecting.expand(-1, layer.num_kv_heads - layer.local_heads, -1, -1)
    return torch.cat((forced.expand(hidden.shape[0], layer.local_heads, -1, -1), selecting), 1)


def output_by_hand(layer, hidden, visible):
    query, key, value = layer.projected(hidden)
    bias = None
    if layer.log_slope is not None:
        bias = (layer.log_slope.exp()[:, None] * torch.arange(hidden.shape[1]))[None]
    out, _ = AttentionCase(query, key, value, visible=visible, key_bias=bias, softcap=layer.softcap).call_reference()
    return layer.o_proj(out.transpose(1, 2).flatten(2))


# What it computes ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", RECIPES, ids=str)
def test_layer_is_its_formula(options):
    layer, hidden = layer_of(**options), tensor((2, 41, 32), 0, torch.float64).requires_grad_()
    out = layer(hidden)
    rows = convolved(layer, hidden)
    expected = output_by_hand(layer, rows, visible_by_hand(layer, rows))
    torch.testing.assert_close(out, expected)
    leaves = [hidden, *(p for name, p in layer.named_parameters() if not name.startswith("indexer"))]
    for ours, theirs in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_documents_and_padding_are_kept_apart():
    layer, hidden = layer_of(), tensor((2, 41, 32), 0, torch.float64)
    cuts = torch.tensor([0, 17, 41], dtype=torch.int32)
    documents = (torch.arange(41) >= 17).long().expand(2, -1)
    rows = torch.cat([convolved(layer, part) for part in hidden.split([17, 24], 1)], 1)
    expected = output_by_hand(layer, rows, visible_by_hand(layer, rows, documents))
    torch.testing.assert_close(layer(hidden, IntervalMask.documents(41, cuts)), expected)
    lengths = torch.tensor([41, 30], dtype=torch.int32)
    padded = layer(hidden, IntervalMask.padding(41, lengths))
    torch.testing.assert_close(padded[0], layer(hidden)[0])
    torch.testing.assert_close(padded[1, :30], layer(hidden[1:, :30])[0])
    padded = layer(hidden, IntervalMask.padding(41, lengths, "left"))
    torch.testing.assert_close(padded[1, 11:], layer(hidden[1:, 11:])[0])


def test_positions_that_start_again_are_documents():
    layer, hidden = layer_of(), tensor((1, 41, 32), 0, torch.float64)
    positions = torch.cat((torch.arange(17), torch.arange(24)))
    parts = torch.cat((layer(hidden[:, :17]), layer(hidden[:, 17:])), 1)
    torch.testing.assert_close(layer(hidden, position_ids=positions), parts)
    table = layer.rotation(positions[None])
    again = layer(hidden, position_ids=positions, rotation=table)
    torch.testing.assert_close(again, parts)


def test_lists_go_to_the_next_layer():
    first, hidden = layer_of(), tensor((2, 41, 32), 0, torch.float64)
    second = layer_of(groups=0)
    assert second.indexer is None
    assert not [name for name in second.state_dict() if name.startswith("indexer")]
    second.load_state_dict({name: p for name, p in first.state_dict().items() if not name.startswith("indexer")})
    out, lists = first(hidden, return_index_mask=True)
    assert lists.shape == (2, 2, 41, 8)
    torch.testing.assert_close(second(hidden, index_mask=lists), out)
    with pytest.raises(ValueError, match="index_mask: expected the lists of another layer"):
        second(hidden)


@pytest.mark.parametrize("side", ["left", "right"])
def test_lists_go_to_the_next_layer_with_prompts_of_different_lengths(side):
    first, hidden, lengths = layer_of().eval(), tensor((3, 20, 32), 0, torch.float64), [20, 3, 11]
    second = layer_of(groups=0).eval()
    second.load_state_dict({name: p for name, p in first.state_dict().items() if not name.startswith("indexer")})
    given = {"lengths": torch.tensor(lengths, dtype=torch.int32), "padding_side": side}
    with torch.no_grad():
        out, lists = first(hidden, cache=first.new_cache(3, 20), return_index_mask=True, **given)
        torch.testing.assert_close(second(hidden, cache=second.new_cache(3, 20), index_mask=lists, **given), out)
        shared = dmattn.IndexMask(lists.indices[:1])
        alike = dmattn.IndexMask(shared.indices.expand(3, -1, -1, -1))
        one, each = (second(hidden, cache=second.new_cache(3, 20), index_mask=mask, **given) for mask in (shared, alike))
    torch.testing.assert_close(one, each)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
@pytest.mark.parametrize("local_heads", [0, 1, "half"])
def test_heads_of_the_recommended_layer_see_so_many_keys_on_average(kv_heads, local_heads):
    options = {"recipe": IndexRecipe(local_heads=local_heads)} if local_heads else {}
    if kv_heads == 1 and local_heads:
        with pytest.raises(ValueError, match=r"expected at least 2, half of which|expected fewer than the 1 key heads"):
            IndexedAttention.recommended(192, 24, 32, num_kv_heads=kv_heads, **options)
        return
    layer = IndexedAttention.recommended(192, 24, 32, num_kv_heads=kv_heads, **options)
    expected = kv_heads // 2 if local_heads == "half" else local_heads
    assert (layer.local, layer.local_heads, layer.partial_rotary_factor) == (16, expected, 0.25)
    seen = kv_heads * layer.local + (kv_heads - layer.local_heads) * layer.window
    assert 31 < seen / kv_heads <= 32


@pytest.mark.parametrize("layer", [IndexedAttention, dmattn.nn.DynamicMaskAttention])
def test_what_belongs_in_the_recipe_is_named(layer):
    with pytest.raises(TypeError, match=r"queries: expected it in the recipe, recipe=(Index|Score)Recipe\(queries=...\)"):
        layer.recommended(32, 4, 8, queries=3)


def test_the_recommended_window_is_of_whole_blocks():
    in_blocks = IndexedAttention.recommended(64, 8, 80, num_kv_heads=4, recipe=IndexRecipe(block_size=16))
    assert (in_blocks.window, in_blocks.indexer.k) == (32, 2)
    assert IndexedAttention.recommended(64, 8, 32, window=5).window == 5
    with pytest.raises(ValueError, match="visible: expected enough for a block of 16 keys that is chosen, got 8"):
        IndexedAttention.recommended(32, 4, 8, recipe=IndexRecipe(block_size=16))
    assert IndexedAttention.recommended(32, 4, 8, recipe=IndexRecipe(block_size=16), window=32).window == 32


# What teaches it ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", RECIPES[:4], ids=str)
def test_only_the_loss_teaches_the_indexer_and_it_teaches_nothing_else(options):
    layer, hidden = layer_of(**options), tensor((2, 41, 32), 0, torch.float64).requires_grad_()
    out, loss = layer(hidden, with_index_loss=True)
    names = [name for name, _ in layer.named_parameters()]
    taught = torch.autograd.grad(loss, [hidden, *layer.parameters()], allow_unused=True, retain_graph=True)
    assert loss > 0
    for name, gradient in zip(["hidden", *names], taught, strict=True):
        is_taught = name.startswith("indexer")
        assert (gradient is not None and bool(gradient.any())) == is_taught, name
    others = torch.autograd.grad(out.sum(), list(layer.indexer.parameters()), allow_unused=True)
    assert all(gradient is None for gradient in others)


def test_the_loss_is_that_of_the_drawn_queries_and_of_the_heads_that_select():
    layer, hidden = layer_of(queries=16), tensor((2, 41, 32), 0, torch.float64)
    torch.manual_seed(3)
    rows = scores_module.drawn_rows(41, 16, 0.5, torch.device("cpu"))
    torch.manual_seed(3)
    _, loss = layer(hidden, with_index_loss=True)
    rows_of_hidden = convolved(layer, hidden)
    query, key, _ = layer.projected(rows_of_hidden)
    bias = (layer.log_slope.exp()[2:, None] * torch.arange(41))[None]
    parts, indexer = layer.indexer(rows_of_hidden), layer.indexer
    expected = dmattn.index_loss(
        *parts, query[:, 4:], key[:, 2:], rows=rows, local=3, key_bias=bias, slope=indexer.slope, sharp=True
    )  # fmt: skip
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(indexer.loss(rows_of_hidden, query[:, 4:], key[:, 2:], rows=rows, key_bias=bias, sharp=True), loss)


@pytest.mark.parametrize("with_base", [False, True])
def test_queries_that_explore_see_all_keys(with_base):
    layer, hidden = layer_of(queries=8, last=0.0), tensor((2, 64, 32), 0, torch.float64)
    base = IntervalMask.documents(64, torch.tensor([0, 20, 64], dtype=torch.int32)) if with_base else None
    lists = layer(hidden, base)
    torch.manual_seed(3)
    rows = scores_module.drawn_rows(64, 8, 0.0, torch.device("cpu"))
    torch.manual_seed(3)
    out, _ = layer(hidden, base, with_index_loss=True)
    parts = hidden.split([20, 44] if with_base else [64], 1)
    query, key, value = layer.projected(torch.cat([convolved(layer, part) for part in parts], 1))
    bias = (layer.log_slope.exp()[:, None] * torch.arange(64))[None]
    dense = dmattn.attention(query, key, value, base, is_causal=True, key_bias=bias)
    dense = layer.o_proj(dense.transpose(1, 2).flatten(2))
    drawn = (torch.arange(64)[:, None] == rows).any(1)
    torch.testing.assert_close(out[:, drawn], dense[:, drawn])
    torch.testing.assert_close(out[:, ~drawn], lists[:, ~drawn])
    assert not torch.equal(dense[:, drawn], lists[:, drawn])
    assert torch.equal(layer.eval()(hidden, base, with_index_loss=True)[0], lists)
    (far,) = torch.autograd.grad(out[:, drawn][:, -1].square().sum(), layer.k_proj.weight)
    assert far.any()


def test_the_indexer_learns_which_keys_attention_reads():
    """After some steps of the loss alone the chosen keys hold more of the dense attention than at first."""
    layer, hidden = layer_of(queries=64, explore=False, recency=None), tensor((4, 64, 32), 0, torch.float64)
    with torch.no_grad():
        layer.q_proj.weight.mul_(4), layer.k_proj.weight.mul_(4)
    rows = convolved(layer, hidden).detach()
    query, key, _ = layer.projected(rows)
    dense = (query[:, 4:].unflatten(1, (2, 2)) @ key[:, 2:, None].transpose(3, 4) * 8**-0.5).masked_fill(
        ~torch.ones(64, 64, dtype=torch.bool).tril(), -math.inf
    )
    dense = dense.softmax(4).mean(2).detach()

    def seen():
        return (dense * visible_by_hand(layer, rows)[:, 2:]).sum(3).mean().item()

    before, optimizer = seen(), torch.optim.Adam(layer.indexer.parameters(), lr=3e-3)
    for _ in range(60):
        layer(hidden, with_index_loss=True)[1].backward()
        optimizer.step(), optimizer.zero_grad()
    assert seen() > before + 0.02


# Generation ---------------------------------------------------------------------------------------------------------------------------


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
    assert repr(cache.recent) == "RecentRows(batch_size=2, size=3, embed_dim=32, most_back=0)"
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


def test_the_loss_of_no_tokens_is_zero():
    layer = layer_of()
    out, loss = layer(tensor((2, 0, 32), 0, torch.float64), with_index_loss=True)
    loss.backward()
    assert out.shape == (2, 0, 32)
    assert loss.item() == 0


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


def test_projections_are_named_and_select_alike():
    layer, hidden = layer_of(), tensor((2, 40, 32), 0, torch.float64)
    parts = layer.indexer(hidden)
    assert isinstance(parts, IndexProjections)
    assert parts.query.shape[:3] == parts.key.shape[:3] == parts.weights.shape[:3]
    assert torch.equal(layer.indexer.select(parts).indices, layer.indexer.select(hidden).indices)


# Tools of torch -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"lifetime_window": 11}], ids=["all keys", "keys that live"])
def test_the_layer_compiles_whole_for_any_length(options):
    layer = layer_of(torch.float32, queries=8, **options)

    def step(call, length):
        torch.manual_seed(1)
        out, loss = call(tensor((2, length, 32), length), with_index_loss=True)
        return out, loss, *torch.autograd.grad(out.square().sum() + loss, list(layer.parameters()))

    assert_compiles_once(layer, ((41,), (50,), (67,)), step)


def test_inference_is_exported_for_any_length(tmp_path):
    layer = layer_of(torch.float32).eval()
    length = torch.export.Dim("length", min=2, max=4096)
    loaded = exported(layer, (tensor((1, 41, 32), 0),), tmp_path / "layer.pt2", dynamic_shapes=({1: length},))
    for length in (41, 64):
        hidden = tensor((1, length, 32), 1)
        torch.testing.assert_close(loaded(hidden), layer(hidden))


def test_checkpointing_draws_the_same_queries():
    layer, hidden = layer_of(queries=8), tensor((2, 41, 32), 0, torch.float64).requires_grad_()
    results = []
    for call in (layer, lambda *given, **options: checkpoint(layer, *given, use_reentrant=False, **options)):
        torch.manual_seed(2)
        out, loss = call(hidden, with_index_loss=True)
        results.append(torch.autograd.grad(out.square().sum() + loss, [hidden, *layer.parameters()]))
    torch.testing.assert_close(*results)


def test_autocast_computes_in_half_precision():
    layer, hidden = layer_of(torch.float32, queries=8), tensor((2, 41, 32), 0)
    with torch.autocast("cpu", torch.bfloat16):
        out, loss = layer(hidden, with_index_loss=True)
    assert out.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    (out.float().sum() + loss).backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    layer.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cached = layer(hidden, cache=layer.new_cache(2, 41))
        torch.testing.assert_close(cached, layer(hidden))


def test_a_copy_and_a_state_dict_compute_the_same():
    layer, hidden = layer_of(), tensor((1, 30, 32), 0, torch.float64)
    names = ["q_proj", "k_proj", "v_proj", "indexer.q_proj", "indexer.k_proj", "indexer.weights_proj", "o_proj"]
    expected = {f"{name}.weight" for name in (*names, "conv")} | {"log_slope", "indexer.slope", "indexer.weights_proj.bias"}
    assert set(layer.state_dict()) == expected
    other = layer_of()
    torch.nn.init.zeros_(other.q_proj.weight)
    other.load_state_dict(layer.state_dict())
    for again in (other, copy.deepcopy(layer)):
        assert torch.equal(again(hidden), layer(hidden))


# What is refused ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"window": 6, "block_size": 4}, ValueError, "window: expected a multiple of block_size=4"),
        ({"local_heads": 4}, ValueError, "local_heads: expected fewer than the 4 key heads"),
        ({"local": 0, "local_heads": 1}, ValueError, "local_heads"),
        ({"recipe": dmattn.nn.ScoreRecipe()}, TypeError, "recipe: expected None or an IndexRecipe"),
        ({"window": 0, "local": 0}, ValueError, "window"),
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads: expected a divisor"),
    ],
)
def test_layers_that_cannot_be(options, error, words):
    fields = {name: options.pop(name) for name in FIELDS & options.keys()}
    options = {"window": 8, "num_kv_heads": 4, "head_dim": 8, "local": 3, "recipe": IndexRecipe(**fields), **options}
    with pytest.raises(error, match=words):
        IndexedAttention(32, 8, **options)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"groups": 2}, "groups"), ({"groups": True}, "groups"),
        ({"groups": 1.0}, "groups"), ({"rotary_factor": 1.5}, "rotary_factor"), ({"recency": 0.0}, "recency"),
        ({"local_heads": -1}, "local_heads"), ({"queries": 0}, "queries"), ({"last": 2.0}, "last"), ({"index_dim": 12}, "index_dim"),
        ({"index_heads": 129}, "index_heads"), ({"conv": 0}, "conv"), ({"conv": 17}, "conv"),
        ({"block_size": 3}, "block_size"), ({"block_score": "sum"}, "block_score"),
    ],
)  # fmt: skip
def test_recipes_that_cannot_be(fields, words):
    with pytest.raises(ValueError, match=f"{words}: expected"):
        IndexRecipe(**fields)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"groups": 0}, "groups"), ({"num_heads": 129}, "num_heads"), ({"head_dim": 12}, "head_dim"), ({"k": -1}, "k"),
        ({"block_size": 3}, "block_size"), ({"block_score": "sum"}, "block_score"),
    ],
)  # fmt: skip
def test_indexers_that_cannot_be(sizes, words):
    with pytest.raises(ValueError, match=f"{words}: expected"):
        Indexer(32, **{"groups": 1, "k": 2, **sizes})


def test_calls_that_cannot_be():
    layer, hidden = layer_of(), tensor((2, 20, 32), 0, torch.float64)
    lists = layer(hidden, return_index_mask=True)[1]
    cache, base = layer.new_cache(2, 20), IntervalMask.padding(20, 20)
    for options, words in (
        ({"cache": cache, "base": base}, "base: expected its default with a cache"),
        ({"cache": cache, "with_index_loss": True}, "with_index_loss: expected its default with a cache"),
        ({"index_mask": lists, "with_index_loss": True}, "with_index_loss: expected its default with index_mask"),
        ({"lengths": torch.tensor([20, 20])}, "lengths: expected None without a cache"),
        ({"cache": layer.new_cache(3, 20)}, "hidden_states: expected .* with B=3"),
        (
            {"cache": layer_of(conv=1).new_cache(2, 20)},
            r"cache: expected one of a layer with \(conv, embed_dim\) = \(3, 32\), got no convolution",
        ),
        (
            {"cache": layer_of(conv=4).new_cache(2, 20)},
            r"cache: expected one of a layer with .* got \(conv, embed_dim\) = \(4, 32\)",
        ),
        ({"index_mask": dmattn.IndexMask(lists.indices[:, :, :10])}, r"index_mask: expected \[B\|1, heads\|1, S, K\] with B="),
    ):
        with pytest.raises(ValueError, match=words), torch.no_grad():
            layer(hidden, **options)
    for wrong in (hidden[0], hidden[..., :16]):
        for call in (layer, layer.indexer, layer.indexer.select):
            with pytest.raises(ValueError, match=r"hidden_states: expected .*\[B, S, E\]"):
                call(wrong)
    with pytest.raises(RuntimeError, match="has no gradient"):
        layer(hidden, cache=cache)
    with pytest.raises(TypeError, match="expected a dmattn"), torch.no_grad():
        layer(hidden, cache=object())
    layer = layer_of(conv=1)
    own = {"local_heads": 2, "local": 3, "groups": 2, "index_dim": 8, "dtype": torch.float64}
    for sizes, words in (
        ({"groups": 3}, "groups of index keys"),
        (
            {"local": 5},
            r"cache: expected one with local_heads, local and sink_keys = \(2, 3, 0\) like the layer, got \(2, 5, 0\)",
        ),
        ({"local_heads": 0}, r"cache: expected one with .* got \(0, 0, 0\)"),
        ({"index_dim": 16}, r"index.key: expected \[B, G, T, Di\] with B=2, G=2, T=20, Di=16"),
    ):
        with pytest.raises(ValueError, match=words), torch.no_grad():
            layer(hidden, cache=IndexedCache(2, 4, 20, 8, **own | sizes))
    with pytest.raises(ValueError, match="block_size: expected a positive int"):
        IndexedAttention.recommended(32, 4, 8, recipe=IndexRecipe(block_size=0))


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


def test_heads_that_other_ranks_have_are_refused():
    layer = IndexedAttention(32, 4, num_kv_heads=2, window=4)
    query = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match="expected all heads on every rank"):
        layer._check_not_dealt_out(query, query[:, :1])
    layer._check_not_dealt_out(query.repeat(1, 2, 1, 1), query)
