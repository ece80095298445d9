"""IndexedAttention with a lifetime_window: queries choose among keys that live, and a cache of fixed size holds just those."""

from __future__ import annotations

import math

import pytest
import torch
from dmattn.nn import IndexedAttention, IndexRecipe
from dmattn.testing import AttentionCase, strategies, top_k_visible
from dmattn_bench import two_ways
from generation import assert_prompts_generate, assert_rewinds_and_reorders, assert_step_compiles_once, convolved
from torch import nn

tensor = strategies.random_tensor
KINDS = [
    {}, {"local": 0}, {"sink_keys": 2}, {"recency": None, "local": 5, "local_heads": 0, "sink_keys": 2}, {"window": 11}, {"window": 0},
]  # fmt: skip


def layer_of(dtype=torch.float64, **options):
    torch.manual_seed(0)
    fields = {
        name: options.pop(name) for name in ("recency", "local_heads", "groups", "block_size", "queries") if name in options
    }
    sizes = {"window": 6, "num_kv_heads": 4, "head_dim": 8, "local": 3, "lifetime_window": 11, "dtype": dtype, **options}
    layer = IndexedAttention(
        32, 8, recipe=IndexRecipe(**{"index_heads": 2, "index_dim": 8, "local_heads": "half", **fields}), **sizes
    )
    nn.init.normal_(layer.lifetime_proj.weight)
    return layer


def by_hand(layer, hidden):
    """The layer from its definition: lifetimes of all keys, and of those that live the best by the scores of all pairs."""
    hidden = convolved(layer, hidden)
    parts, position, first = layer.indexer(hidden), torch.arange(hidden.shape[1]), layer.local_heads
    slopes = torch.zeros(4) if layer.log_slope is None else layer.log_slope.exp()
    recency = (slopes[:, None] * position)[None]
    ranks = (layer.lifetime_proj(hidden).transpose(1, 2) + recency)[:, first:]
    living = top_k_visible(ranks, layer.lifetime_window, local=layer.local, sink_keys=layer.sink_keys)
    distance = position - position[:, None]
    forced = (distance <= 0) & ((distance > -layer.local) | (position < layer.sink_keys))
    products = torch.einsum("bgthd,bgsd->bghts", parts.query, parts.key) * layer.indexer.head_dim**-0.5
    scores = torch.einsum("bgth,bghts->bgts", parts.weights, products.relu()) + layer.indexer.slope[:, None, None] * distance
    best = scores.masked_fill(~living | forced, -math.inf).topk(layer.window, dim=3)
    visible = torch.zeros_like(living).scatter(3, best.indices, best.values > -math.inf) | forced
    visible = torch.cat((forced.expand(hidden.shape[0], first, -1, -1), visible), 1)
    query, key, value = layer.projected(hidden)
    out, _ = AttentionCase(query, key, value, visible=visible, key_bias=recency).call_reference()
    return layer.o_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("cuts", [[1] * 60, [60], [22, 1, 5, 12, 20]], ids=len)
def test_the_layer_and_generation_are_the_definition(options, cuts):
    layer, hidden = layer_of(**options).eval(), tensor((3, 60, 32), 0, torch.float64)
    cache, longer = layer.new_cache(3), layer.new_cache(3, 10**6)
    with torch.no_grad():
        expected = by_hand(layer, hidden)
        outs = [layer(part, cache=cache) for part in hidden.split(cuts, 1)]
        torch.testing.assert_close(layer(hidden), expected)
    two_ways.assert_same_in_another_order(torch.cat(outs, 1), expected, torch.float64)
    assert cache.nbytes == longer.nbytes
    selecting = cache.selecting if layer.local_heads else cache
    assert selecting.key.shape[2] == 11 + layer.local + layer.sink_keys
    assert selecting.value.shape[3] == 8 + 8


class TokenByToken(nn.Module):
    """A linear layer whose rounding does not depend on the number of tokens."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.weight = linear, linear.weight

    def forward(self, hidden):
        return torch.cat([self.linear(token.contiguous()) for token in hidden.split(1, 1)], 1)


@pytest.mark.parametrize("options", KINDS[:4], ids=str)
def test_steps_in_half_precision_choose_the_same_keys(options):
    layer, hidden = layer_of(torch.bfloat16, **options).eval(), tensor((3, 60, 32), 0, torch.bfloat16)
    for module in (layer, layer.indexer):
        for name, linear in [(name, part) for name, part in module.named_children() if isinstance(part, nn.Linear)]:
            setattr(module, name, TokenByToken(linear))
    cache = layer.new_cache(3)
    with torch.no_grad():
        steps = torch.cat([layer(token, cache=cache) for token in hidden.split(1, 1)], 1)
        two_ways.assert_same_in_another_order(steps, layer(hidden), torch.bfloat16)


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_of_different_lengths_rewind_reorder_and_leave(side):
    layer, hidden = layer_of(sink_keys=2).eval(), tensor((3, 40, 32), 0, torch.float64)
    assert_prompts_generate(layer, hidden, layer.new_cache(3), side)
    cache = layer.new_cache(2, rewind=4)
    assert_rewinds_and_reorders(layer, hidden[:2], cache, tensor((2, 4, 32), 9, torch.float64))
    with torch.no_grad():
        out = layer(hidden[:2, :12], cache=cache, lengths=torch.tensor([0, 12], dtype=torch.int32))
        two_ways.assert_same_in_another_order(out[1], layer(hidden[1:2, :12])[0], torch.float64)
        other = layer.new_cache(2, rewind=4)
        other.load_state_dict(cache.state_dict())
        assert torch.equal(layer(hidden[:2, :1], cache=other), layer(hidden[:2, :1], cache=cache))


def test_a_step_compiles_once():
    assert_step_compiles_once(layer := layer_of(torch.float32).eval(), tensor((2, 20, 32), 0), layer.new_cache(2))


def test_the_loss_teaches_lifetimes_and_the_indexer_and_falls():
    layer, hidden = layer_of(torch.float32), tensor((2, 60, 32), 0)
    taught = [*layer.indexer.parameters(), layer.lifetime_proj.weight]
    optimizer, losses = torch.optim.Adam(taught, 0.01), []
    for _ in range(40):
        torch.manual_seed(1)
        out, loss = layer(hidden, with_index_loss=True)
        assert not any(grad is not None for grad in torch.autograd.grad(out.sum(), taught, allow_unused=True, retain_graph=True))
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        assert all(weight.grad.any() for weight in taught)
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_what_cannot_be():
    for options, words in (
        ({"lifetime_window": 5}, "lifetime_window: expected at least window=6, got 5"),
        ({"lifetime_window": 0}, "lifetime_window: expected a positive int"),
        ({"groups": 1}, "lifetime_window: expected None with a recipe of groups=1"),
        ({"block_size": 2}, "lifetime_window: expected None with a recipe of .* block_size=2"),
        ({"head_dim": 256}, "index_dim: expected at most 256 with head_dim=256 together"),
    ):
        with pytest.raises(ValueError, match=words):
            layer_of(**options)
    layer, hidden = layer_of(), tensor((2, 20, 32), 0, torch.float64)
    plain = IndexedAttention(32, 8, 6, num_kv_heads=4, head_dim=8, local=3, dtype=torch.float64)
    lists = layer(hidden, return_index_mask=True)[1]
    for call, error, words in (
        (lambda: layer(hidden, index_mask=lists), ValueError, "index_mask: expected its default with lifetime_window"),
        (lambda: layer(hidden, group=object()), ValueError, "group: expected its default with lifetime_window"),
        (
            lambda: layer(hidden, None, layer.new_cache(2), return_index_mask=True),
            ValueError,
            "return_index_mask: expected its default",
        ),
        (lambda: layer(hidden, cache=plain.new_cache(2, 9)), TypeError, "cache: expected a dmattn.BoundedCache"),
        (lambda: layer(hidden, cache=layer_of(local=4).new_cache(2)), ValueError, "cache: expected one with .* like the layer"),
        (lambda: layer(hidden, cache=layer.new_cache(2)), RuntimeError, "has no gradient"),
        (lambda: plain.new_cache(2), ValueError, "max_length: expected a number of tokens for a layer without lifetime_window"),
    ):
        with pytest.raises(error, match=words):
            call()
