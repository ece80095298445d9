# ruff: noqa: E501  (one case a line, however long)
"""The layer's positions and head counts: packed documents told by positions that restart, and heads that are distributed to ranks."""

from __future__ import annotations

import dmattn
import pytest
import rank_shards
import torch
from dmattn import IntervalMask
from dmattn.testing import strategies
from layers import layer_with
from rank_pool import Ranks

tensor = strategies.random_tensor
SCORES = {
    "scores of values": {},
    "linear scores": {"score": "linear"},
    "select only, recency, local": {"score": "linear", "select_only": True, "recency": 0.25, "local": 3, "sink_keys": 1},
}


def layer_of(**options):
    """A layer whose scores differ from key to key, float64."""
    torch.manual_seed(0)
    layer = layer_with(64, 4, window=5, **rank_shards.OPTIONS, **options)
    for name, parameter in layer.named_parameters():
        if name == "A" or name.startswith("score_proj"):
            torch.nn.init.normal_(parameter)
    return layer


# Positions ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [*SCORES.values(), {"is_causal": False}], ids=str)
def test_documents_whose_positions_restart_are_kept_apart(options):
    layer = layer_of(**options)
    hidden = tensor((2, 20, 64), 0, torch.float64)
    lengths = [(9, 4, 7), (1, 18, 1)]
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in given]) for given in lengths])
    out = layer(hidden, position_ids=position_ids)
    for b, given in enumerate(lengths):
        alone = torch.cat([layer(part) for part in hidden[b : b + 1].split(given, 1)], 1)
        torch.testing.assert_close(out[b : b + 1], alone)
    torch.testing.assert_close(layer(hidden[:1], position_ids=position_ids[0]), out[:1])


def test_positions_turn_heads_and_a_base_says_where_documents_are():
    layer = layer_of()
    hidden = tensor((2, 20, 64), 0, torch.float64)

    def by_hand(positions, base=None):
        query, key, value = layer.projected(hidden, positions)
        out = dmattn.dynamic_mask_attention(query, key, value, layer.scores(value), 5, base=base)
        return layer.o_proj(out.transpose(1, 2).flatten(2))

    plain, ascending = layer(hidden), torch.arange(20)
    torch.testing.assert_close(layer(hidden, position_ids=ascending), plain)
    torch.testing.assert_close(layer(hidden, position_ids=2 * ascending + 5), by_hand(2 * ascending[None] + 5))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(by_hand(2 * ascending[None] + 5), plain)
    restarting, whole = ascending % 10, IntervalMask.documents(20, torch.tensor([0, 20]))
    torch.testing.assert_close(layer(hidden, whole, position_ids=restarting), by_hand(restarting[None]))
    halves = IntervalMask.documents(20, torch.tensor([0, 10, 20]))
    torch.testing.assert_close(layer(hidden, position_ids=restarting), by_hand(restarting[None], halves))
    assert layer(hidden[:, :0], position_ids=restarting[:0]).shape == (2, 0, 64)


HIDDEN = tensor((2, 6, 64), 0, torch.float64)
BAD = {
    "a list": (lambda layer: layer(HIDDEN, position_ids=[0, 1]), TypeError, "position_ids: expected a torch.Tensor, got list"),
    "floats": (lambda layer: layer(HIDDEN, position_ids=torch.arange(6.0)), TypeError, "position_ids: expected dtype int32, int64, got float32"),
    "another length": (lambda layer: layer(HIDDEN, position_ids=torch.arange(5)), ValueError, r"position_ids: expected \[S\] or \[B\|1, S\] with B=2, S=6, got \[5\]"),
    "another batch": (lambda layer: layer(HIDDEN, position_ids=torch.arange(18).view(3, 6)), ValueError, r"position_ids: expected .* got \[3, 6\]"),
    "with a cache": (lambda layer: layer(HIDDEN, cache=layer.new_cache(2), position_ids=torch.arange(6)), ValueError, "position_ids: expected its default with a cache"),
}  # fmt: skip


@pytest.mark.parametrize(("act", "error", "message"), BAD.values(), ids=BAD)
def test_bad_positions(act, error, message):
    with pytest.raises(error, match=message):
        act(layer_of())


# Shards -------------------------------------------------------------------------------------------------------------------------------


def rows_of(parameter, rank):
    """The half of the rows that a rank of two holds."""
    return torch.nn.Parameter(parameter.detach().chunk(2)[rank])


def test_what_does_not_fit_a_shard_is_refused():
    hidden = tensor((2, 20, 64), 0, torch.float64)
    for options, message in (
        ({"score": "linear"}, r"score: expected \[B, S, Hkv\] with B=2, S=20, Hkv=1, got \[2, 20, 2\]"),
        (
            {"score": "linear", "local": 3, "local_heads": 1},
            "local_heads: expected 0 where key heads are distributed to ranks, got 1",
        ),
        ({"rotated_heads": 1}, "rotated_heads: expected None where key heads are distributed to ranks, got 1"),
        ({}, r"dt_proj: expected a module|A: expected|mat1 and mat2"),
    ):
        part = layer_of(**options)
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(part, name).weight = rows_of(getattr(part, name).weight, 0)
        with pytest.raises((ValueError, RuntimeError), match=message):
            part(hidden)
    for heads in (1, 9):
        with pytest.raises(ValueError, match="local_heads: expected 0 where key heads are distributed to ranks, got 1"):
            layer_of(score="linear", local=3, local_heads=1).new_cache(2, num_kv_heads=heads)
    with pytest.raises(TypeError, match="num_kv_heads: expected a positive int, got float"):
        layer_of().new_cache(2, num_kv_heads=1.0)


@pytest.fixture(scope="module")
def two_ranks():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize("options", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("local", [True, False], ids=["local tensors", "DTensors"])
def test_two_ranks_compute_the_layer(two_ranks, options, local):
    """By the plan of the page on training: out, gradients, generated tokens."""
    layer, hidden = layer_of(**options), tensor((2, 20, 64), 0, torch.float64)
    position_ids = torch.arange(20) % 9
    given = (options, layer.state_dict(), hidden, position_ids, local)
    hidden = hidden.clone().requires_grad_()
    out = layer(hidden, position_ids=position_ids)
    out.square().sum().backward()
    with torch.no_grad():
        plain = layer(hidden)
    for got, grad_hidden, gradients, generated in two_ranks.run("rank_shards:run", [given, given]):
        torch.testing.assert_close(got, out.detach())
        torch.testing.assert_close(grad_hidden, hidden.grad)
        assert (generated is not None) == local
        if local:
            torch.testing.assert_close(generated, plain)
        assert set(gradients) == {name for name, _ in layer.named_parameters()}
        for name, parameter in layer.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(gradients[name], parameter.grad, msg=lambda text, name=name: f"{name}: {text}")
