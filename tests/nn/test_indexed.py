"""IndexedAttention and its indexer: what they compute, and what teaches them."""

from __future__ import annotations

import copy
import math

import dmattn
import pytest
import torch
import torch._dynamo.testing
from dmattn import IntervalMask
from dmattn.nn import IndexedAttention, IndexedCache, Indexer, IndexProjections, IndexRecipe
from dmattn.nn import scores as scores_module
from dmattn.testing import AttentionCase, strategies
from generation import convolved
from indexed_layers import FIELDS, RECIPES, layer_of
from programs import assert_compiles_once, exported
from torch.utils.checkpoint import checkpoint

tensor = strategies.random_tensor


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


def test_the_loss_of_no_tokens_is_zero():
    layer = layer_of()
    out, loss = layer(tensor((2, 0, 32), 0, torch.float64), with_index_loss=True)
    loss.backward()
    assert out.shape == (2, 0, 32)
    assert loss.item() == 0


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


def test_heads_that_other_ranks_have_are_refused():
    layer = IndexedAttention(32, 4, num_kv_heads=2, window=4)
    query = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match="expected all heads on every rank"):
        layer._check_not_dealt_out(query, query[:, :1])
    layer._check_not_dealt_out(query.repeat(1, 2, 1, 1), query)
