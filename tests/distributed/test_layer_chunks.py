"""Layers with a sequence in chunks on two ranks: what one process gives, the lists included."""

from __future__ import annotations

import re

import dmattn
import pytest
import rank_layers
import torch
from dmattn import IntervalMask
from dmattn.nn import IndexedAttention, IndexRecipe, score_loss
from dmattn.nn.scores import drawn_rows
from dmattn.testing import strategies
from generation import convolved
from rank_pool import Ranks

pytestmark = pytest.mark.slow
tensor = strategies.random_tensor


@pytest.fixture(scope="module")
def two_ranks():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("recipe", "ends", "compiled"),
    [
        ({}, [44], False),
        ({"groups": 1, "block_size": 4, "conv": 4}, [9, 23, 44], False),
        ({"block_size": 4, "block_score": "mean_key", "local_heads": 0, "conv": 1}, [44], False),
        ({}, [9, 22, 44], True),
        ({"conv": 7}, [3, 10], False),  # a chunk has fewer rows than the convolution looks back
    ],
    ids=str,
)
def test_two_ranks_compute_the_layer(two_ranks, recipe, ends, compiled):
    """So many queries are drawn that all of them teach, wherever they lie."""
    length, half = ends[-1], ends[-1] // 2
    layer, hidden = rank_layers.layer_of(recipe), tensor((2, length, 32), 0, torch.float64)
    base = IntervalMask.documents(length, torch.tensor([0, *ends], dtype=torch.int32)) if len(ends) > 1 else None
    results = two_ranks.run("rank_layers:run", [(recipe, layer.state_dict(), hidden, base, compiled)] * 2)
    hidden.requires_grad_()
    out, lists = layer(hidden, base, return_index_mask=True)
    of_documents = hidden.tensor_split(ends[:-1], 1)
    rows = torch.cat([convolved(layer, part) for part in of_documents], 1)
    query, key, value = layer.projected(rows)
    bias = (layer.log_slope.exp()[:, None] * torch.arange(length))[None]
    dense = dmattn.attention(query, key, value, base, is_causal=True, key_bias=bias)
    out = layer.o_proj(dense.transpose(1, 2).flatten(2))  # all queries explore
    own = slice(4, None) if layer.local_heads else slice(None)
    of_kv = slice(layer.local_heads, None)
    losses = []
    for rank in range(2):
        torch.manual_seed(rank)
        drawn = drawn_rows(half, 2048, 0.0, hidden.device) + half * rank
        losses.append(
            layer.indexer.loss(rows, query[:, own], key[:, of_kv], rows=drawn, base=base, key_bias=bias[:, of_kv], sharp=True)
        )
    (out.square().sum() + sum(losses)).backward()
    for rank, (got, indices, loss, of_hidden, gradients) in enumerate(results):
        chunk = slice(half * rank, half * rank + half)
        torch.testing.assert_close(got, out[:, chunk].detach())
        assert torch.equal(indices, lists.indices[:, :, chunk])
        torch.testing.assert_close(of_hidden, hidden.grad[:, chunk])
        torch.testing.assert_close(loss, losses[rank].detach())
        torch.testing.assert_close(gradients, {name: parameter.grad for name, parameter in layer.named_parameters()})


@pytest.mark.parametrize("recipe", [{}, {"recency": None, "local_heads": 0}, None], ids=str)
@pytest.mark.parametrize(("documents", "compiled"), [(False, False), (True, False), (True, True)])
def test_two_ranks_compute_the_layer_of_scores(two_ranks, recipe, documents, compiled):
    """All queries teach; each looks at the keys of its own chunk."""
    batch = 1 if recipe is None else 2  # aot_eager decomposes the gradient of key_scores for one sequence only
    layer, hidden = rank_layers.scored_layer_of(recipe), tensor((batch, 44, 32), 0, torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    base = IntervalMask.documents(44, torch.tensor([0, 9, 44], dtype=torch.int32)) if documents else None
    results = two_ranks.run("rank_layers:run_scored", [(recipe, layer.state_dict(), hidden, base, compiled)] * 2)
    hidden.requires_grad_()
    out = layer(hidden, base)
    query, key, value = layer.projected(hidden)
    ranks, bias = layer.ranked(hidden, value)
    losses = []
    for rank, ends in enumerate(([0, 9, 22], [0, 22])):
        own = slice(22 * rank, 22 * rank + 22)
        torch.manual_seed(rank)
        loss = score_loss(
            query[:, :, own], key[:, :, own], ranks[:, :, own], key_bias=None if bias is None else bias[:, :, own],
            base=IntervalMask.documents(22, torch.tensor(ends, dtype=torch.int32)) if documents else None, local=3, sink_keys=1,
            queries=layer.recipe.queries if recipe is not None else 64, sharp=layer.recipe.sharp, first_head=layer.local_heads,
        )  # fmt: skip
        losses.append(loss.mean())
    (out.square().sum() + sum(losses)).backward()
    for rank, (got, loss, of_hidden, gradients) in enumerate(results):
        own = slice(22 * rank, 22 * rank + 22)
        torch.testing.assert_close(got, out[:, own].detach())
        torch.testing.assert_close(loss, losses[rank].detach())
        torch.testing.assert_close(of_hidden, hidden.grad[:, own])
        torch.testing.assert_close(gradients, {name: parameter.grad for name, parameter in layer.named_parameters()})


def test_distributed_heads_are_refused(two_ranks):
    for said in two_ranks.run("rank_layers:with_distributed_heads", [(tensor((1, 8, 32), 0, torch.float64),)] * 2):
        assert said.startswith("IndexedAttention: expected all heads on every rank")


LAYERS = [rank_layers.layer_of({}), rank_layers.scored_layer_of(None)]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_chunks_that_differ_are_an_error_on_every_rank(two_ranks, layer):
    first, other = tensor((2, 8, 32), 0, torch.float64), tensor((2, 12, 32), 0, torch.float64)
    for said in two_ranks.run("rank_layers:said_of", [(layer, first, {}), (layer, other, {})]):
        assert said == "hidden_states [B, S, E], S: expected the same on every rank, got 8 on rank 0 and 12 on rank 1"
    assert two_ranks.run("rank_layers:said_of", [(layer, first, {})] * 2) == [None, None]


def documents(*ends: int) -> IntervalMask:
    return IntervalMask.documents(16, torch.tensor(ends, dtype=torch.int32))


@pytest.mark.parametrize("first", [{}, {"base": documents(0, 7, 16)}], ids=["alone", "documents"])
@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"base": documents(0, 6, 16)}, "base"),
        ({"base": IntervalMask.documents(24, torch.tensor([0, 6, 24], dtype=torch.int32))}, "length of base (0 none)"),
        ({"with_index_loss": True}, "with_index_loss"),
    ],
    ids=["values", "length", "loss"],
)
def test_arguments_that_differ_are_an_error_on_every_rank(two_ranks, first, other, name):
    layer, hidden = LAYERS[0], tensor((2, 8, 32), 0, torch.float64)
    if not first and name == "base":
        name = "length of base (0 none)"
    said = two_ranks.run("rank_layers:said_of", [(layer, hidden, first), (layer, hidden, first | other)])
    assert said[0] == said[1]
    assert said[0].startswith(f"{name}: expected the same")


@pytest.mark.parametrize(
    "name",
    [
        "num_kv_heads",
        "window",
        "local",
        "groups",
        "index_dim",
        "block_size",
        "index_heads",
        "recency",
        "block_score",
        "conv",
        "training",
    ],
)
def test_layers_that_differ_are_an_error_on_every_rank(two_ranks, name):
    """What would else end in the transport, or in wrong numbers."""
    fields = {"index_heads": 2, "index_dim": 8, "queries": 4}
    sizes = {"num_kv_heads": 4, "head_dim": 8, "window": 8, "local": 3}
    layer = IndexedAttention(32, 8, **sizes, recipe=IndexRecipe(**fields))
    changed = {
        "num_kv_heads": 2,
        "window": 16,
        "local": 4,
        "groups": 1,
        "index_dim": 16,
        "block_size": 4,
        "index_heads": 3,
        "recency": None,
        "block_score": "mean_key",
        "conv": 2,
    }
    fields |= {key: value for key, value in changed.items() if key == name and key not in sizes}
    sizes |= {key: value for key, value in changed.items() if key == name and key in sizes}
    other = IndexedAttention(32, 8, **sizes, recipe=IndexRecipe(**fields)).train(name != "training")
    hidden = tensor((1, 8, 32), 0)
    said = two_ranks.run("rank_layers:said_of", [(layer, hidden, {}), (other, hidden, {})])
    assert said[0] == said[1]
    assert re.match(rf"{name}( \(0 .*\))?: expected the same on every rank, got ", said[0])


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_groups_of_a_wrong_kind_are_named(two_ranks, layer):
    for mesh, text, outside in two_ranks.run("rank_layers:said_of_groups", [(layer, tensor((1, 8, 32), 0, torch.float64))] * 2):
        assert mesh == "TypeError: group: expected a torch.distributed.ProcessGroup, got DeviceMesh; give mesh.get_group()"
        assert text == "TypeError: group: expected a torch.distributed.ProcessGroup, got str"
        assert outside == "ValueError: group: expected a group that this rank is a member of, got one without it"
