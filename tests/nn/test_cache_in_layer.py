"""Generating with the layer and a bounded cache: what it gives is what it would give at once over the whole history."""

from __future__ import annotations

import math

import dmattn
import pytest
import torch
from dmattn.testing import strategies
from dmattn_bench import two_ways
from generation import assert_prompts_generate, assert_rewinds_and_reorders, assert_step_compiles_once
from layers import layer_with

tensor = strategies.random_tensor
INF = math.inf


LEARNING = {"local": 3, "local_heads": 1, "score": "linear", "select_only": True, "recency": 0.25}  # the recommended settings
LAYERS = [
    {},
    {"local": 3, "sink_keys": 2},
    {"rope_theta": None, "softcap": 2.0},
    {"partial_rotary_factor": 0.25},
    {"recency": 0.3},
    {"score": "linear", "local": 3},
    {"score": torch.nn.Sequential(torch.nn.Linear(32, 2, dtype=torch.float64), torch.nn.Tanh()), "recency": 0.25},
    {"select_only": True},
    {"select_only": True, "local": 3, "sink_keys": 1},
    {"select_only": True, "recency": 0.25},
    {"local": 3, "local_heads": 1},
    {"local": 3, "sink_keys": 1, "local_heads": 1, "recency": 0.1},
    {"local": 3, "sink_keys": 1, "local_heads": 1, "select_only": True},
    LEARNING,
    {**LEARNING, "sink_keys": 2, "softcap": 5.0, "rope_theta": None},
    {**LEARNING, "rotated_heads": 1},
    {"window": 0, "local": 4, "recency": 0.25},
]


def layer(dtype=torch.float64, device="cpu", **options):
    torch.manual_seed(3)
    sizes = {"window": 6, "num_kv_heads": 2, "dtype": dtype, "device": device}
    made = layer_with(32, 4, **{**sizes, **options}).eval()
    for name, parameter in made.named_parameters():
        if name in ("A", "score_proj.weight"):
            torch.nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize("options", LAYERS, ids=lambda options: ",".join(options) or "plain")
@pytest.mark.parametrize("cuts", [[1] * 40, [40], [12, 1, 1, 26]], ids=len)
def test_the_layer_generates_what_it_would_see_at_once(options, cuts):
    made, hidden = layer(**options), tensor((3, 40, 32), 0, torch.float64)
    cache, first, outs = made.new_cache(3), 0, []
    with torch.no_grad():
        for tokens in cuts:
            outs.append(made(hidden[:, first : first + tokens], cache=cache))
            first += tokens
        two_ways.assert_same_in_another_order(torch.cat(outs, 1), made(hidden), torch.float64)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", [{"local": 3}, LEARNING], ids=len)
def test_the_layer_generates_from_prompts_of_different_lengths(options, side):
    made = layer(**options)
    assert_prompts_generate(made, tensor((3, 30, 32), 0, torch.float64), made.new_cache(3, rewind=2), side)


@pytest.mark.parametrize("options", [{"local": 3, "recency": 0.3}, LEARNING], ids=len)
def test_the_layer_s_cache_is_rewound_reordered_and_reset(options):
    made, hidden = layer(**options), tensor((2, 40, 32), 0, torch.float64)
    cache = made.new_cache(2, rewind=4)
    assert_rewinds_and_reorders(made, hidden, cache, tensor((2, 4, 32), 9, torch.float64))
    with torch.no_grad():
        out = made(hidden[:, :12], cache=cache)
        two_ways.assert_same_in_another_order(out[1], made(hidden[:, :12])[1], torch.float64)


@pytest.mark.parametrize("options", [{"local": 3, "recency": 0.3}, LEARNING], ids=len)
def test_the_layer_s_step_compiles_once(options):
    made = layer(**options)
    assert_step_compiles_once(made, tensor((2, 40, 32), 0, torch.float64), made.new_cache(2))


class TwoNumbers(torch.nn.Module):
    """Scores that are numbers of the hidden state as they are: no product rounds them otherwise for one token than for many."""

    def forward(self, hidden):
        return hidden[..., :2]


@pytest.mark.parametrize("options", [{"local": 3}, {**LEARNING, "local_heads": 0}, LEARNING], ids=len)
def test_the_layer_in_the_device_s_own_dtype(device, dtype, options):
    made, hidden = layer(dtype, device, **{**options, "score": TwoNumbers()}), tensor((2, 60, 32), 0, dtype, device)
    caches = [made.new_cache(2) for _ in range(3)]
    # Kernels for one token and for many round weights to bfloat16 at other places; float32 sums have another order.
    assert_alike = two_ways.assert_same_in_another_order if dtype == torch.float32 else two_ways.assert_same_by_another_way
    with torch.no_grad():
        expected = made(hidden)
        for cache, tokens in zip(caches, (1, 12, 60), strict=True):
            outs = [made(hidden[:, p : p + tokens], cache=cache) for p in range(0, 60, tokens)]
            assert_alike(torch.cat(outs, 1), expected, dtype)
    for cache in caches[1:]:
        for name, buffer in cache.named_buffers():
            if name.endswith(("position", "score", "steps")):
                assert torch.equal(buffer, caches[0].get_buffer(name)), name


def test_the_layer_refuses_what_it_cannot_generate():
    made, hidden = layer(local=3), torch.zeros(2, 5, 32, dtype=torch.float64)
    mixed = layer(**LEARNING)
    for call, error, message in (
        (lambda: made(hidden, cache=layer().new_cache(2)), ValueError, r"local, window, index_dim\) = \[\(2, 0, 3, 6, 0\)\] like"),
        (lambda: mixed(hidden, cache=made.new_cache(2)), ValueError, r"\(1, 0, 3, 6, 0\)\] like the layer, got \[\(2, 0, 3, 6, 0\)\]"),
        (lambda: made(hidden, cache=mixed.new_cache(2)), ValueError, r"like the layer, got \[\(1, 0, 3, 0, 0\), \(1, 0, 3, 6, 0\)\]"),
        (lambda: made(hidden, cache=layer(num_kv_heads=4, local=3).new_cache(2)), ValueError, r"like the layer, got \[\(4, 0, 3, 6, 0\)\]"),
        (lambda: made(hidden, cache=made.new_cache(3)), ValueError, r"hidden_states: expected .* with B=3, got \[2, "),
        (lambda: made(hidden, cache={}), TypeError, "cache: expected a dmattn.BoundedCache or a dmattn.nn.MixedCache, got dict"),
        (lambda: made(hidden, dmattn.IntervalMask.padding(5, 3), made.new_cache(2)), ValueError, "base: expected its default with a cache"),
        (lambda: made(hidden, cache=made.new_cache(2), window=3), ValueError, "window: expected its default with a cache"),
        (lambda: made(hidden, cache=made.new_cache(2), with_score_loss=True), ValueError, "with_score_loss: expected its default with a cache"),
        (lambda: made(hidden, lengths=torch.tensor([1, 2])), ValueError, "lengths: expected None without a cache"),
        (lambda: made(hidden, cache=made.new_cache(2), lengths=torch.tensor([1, 2])), TypeError, "lengths: expected dtype int32, got int64"),
        (lambda: layer(is_causal=False)(hidden, cache=layer().new_cache(2)), ValueError, "is_causal=False"),
        (lambda: layer(is_causal=False).new_cache(2), ValueError, "is_causal=False"),
        (lambda: layer(dropout=0.1).train()(hidden, cache=layer().new_cache(2)), ValueError, "or without dropout, got one .* dropout=0.1"),
        (lambda: made.float()(hidden.float(), cache=layer(local=3).new_cache(2)), TypeError, "query: expected dtype torch.float64 like"),
    ):  # fmt: skip
        with torch.no_grad(), pytest.raises(error, match=message):
            call()
    with pytest.raises(RuntimeError, match=r"BoundedCache.attend has no gradient"):
        made(hidden.float(), cache=made.new_cache(2))
    for cache in (made.new_cache(2), mixed.new_cache(2)):
        assert cache.length.tolist() == [0, 0]


def test_a_layer_generates_unless_it_drops_weights():
    hidden = torch.randn(2, 5, 32, dtype=torch.float64)
    made = layer(dropout=0.1).eval()
    with torch.no_grad():
        expected = made(hidden, cache=made.new_cache(2))
        made.dropout = 0.0
        torch.testing.assert_close(made.train()(hidden, cache=made.new_cache(2)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"local": 3}, LEARNING], ids=len)
def test_a_cuda_graph_holds_the_layer_s_step(options):
    made, hidden = layer(torch.bfloat16, "cuda", **options), tensor((2, 60, 32), 0, torch.bfloat16, "cuda")
    captured, eager, token = made.new_cache(2), made.new_cache(2), hidden[:, :1].clone()
    with torch.no_grad():
        made(token, cache=captured)  # loads the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = made(token, cache=captured)
        captured.reset()
        for p in range(60):
            token.copy_(hidden[:, p : p + 1])
            graph.replay()
            assert torch.equal(out, made(hidden[:, p : p + 1], cache=eager))
