"""Doge models of transformers with dmattn's selection: what eager gives where scores are distinct, and the same with and without a cache."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers
from dmattn.integrations.transformers import enable_dynamic_mask_attention
from dmattn.integrations.transformers.doge import DynamicMaskDogeAttention
from tiny_models import SIZES, distinct, padded
from torch.testing import assert_close
from watched import Watched


def doge(**options) -> torch.nn.Module:
    """A Doge model with random weights, A among them, so that scores are distinct where tokens are."""
    torch.manual_seed(0)
    model = transformers.DogeForCausalLM(transformers.DogeConfig(**SIZES | {"keep_window_size": 5} | options)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.A.normal_()
    return model


@pytest.fixture(scope="module")
def eager():
    model = doge()
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="module")
def ours(eager):
    model = enable_dynamic_mask_attention(copy.deepcopy(eager))
    assert all(type(layer.self_attn) is DynamicMaskDogeAttention for layer in model.model.layers)
    return model


def repeated(length: int = 160) -> torch.Tensor:
    """Tokens that come again and again, so that scores tie."""
    return torch.randint(3, 9, (1, length), generator=torch.Generator().manual_seed(2))


def loss_and_gradients(model, **inputs):
    seen = inputs.get("attention_mask")
    labels = inputs["input_ids"]
    if seen is not None:  # nor does padding predict the first token
        labels = labels.masked_fill((seen == 0) | (seen.cumsum(1) == 1), -100)
    out = model(**inputs, labels=labels)
    logits = out.logits if seen is None else out.logits[seen.bool()]
    return [out.loss.detach(), logits.detach(), *torch.autograd.grad(out.loss, list(model.parameters()))]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_loss_logits_and_gradients_are_those_of_eager(eager, ours, side, use_cache):
    inputs = {"input_ids": distinct(), "attention_mask": padded(side), "use_cache": use_cache}
    assert_close(loss_and_gradients(ours, **inputs), loss_and_gradients(eager, **inputs))


@pytest.mark.parametrize(
    "options", [{}, {"cache_implementation": "static"}, {"num_beams": 3}, {"use_cache": False}, {"prefill_chunk_size": 7}]
)
@pytest.mark.parametrize("side", [None, "left"])
def test_generated_tokens_are_those_of_eager(eager, ours, side, options):
    """No token comes twice, or scores would tie."""
    options = {"do_sample": False, "max_new_tokens": 12, "no_repeat_ngram_size": 1, "disable_compile": True} | options
    given = {"input_ids": distinct(), "attention_mask": padded(side) if side else torch.ones(2, 20, dtype=torch.int64)}
    assert torch.equal(ours.generate(**given, **options), eager.generate(**given, **options))


@pytest.fixture(scope="module")
def exact(eager):
    """The eager model with projections to values and scores that pick one number each, so that no rounding depends on how many tokens a
    product has: scores of equal tokens are equal to the last bit."""
    model = copy.deepcopy(eager)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.v_proj, layer.self_attn.dt_proj):
                rows, columns = projection.weight.shape
                picked = (torch.arange(rows) * columns // rows)[:, None]
                projection.weight.copy_(torch.zeros_like(projection.weight).scatter(1, picked, 0.5))
    return model


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("implementation", ["ours", "eager"])
def test_equal_tokens_give_the_same_with_and_without_a_cache(exact, implementation, cache):
    """Scores tie: the later key wins, at once and step by step. torch.topk leaves it open, so eager differs from itself here."""
    tokens = repeated()
    model = enable_dynamic_mask_attention(copy.deepcopy(exact)) if implementation == "ours" else exact
    with torch.no_grad():
        whole = model(input_ids=tokens).logits
        config = model.config
        held = (
            transformers.DynamicCache(config=config)
            if cache == "dynamic"
            else transformers.StaticCache(config=config, max_cache_len=180)
        )
        steps = [model(input_ids=part, past_key_values=held).logits for part in tokens.split([100, *[1] * 40, 20], dim=1)]
    steps = torch.cat(steps, dim=1)
    if implementation == "ours":
        assert_close(steps, whole)
        return
    with pytest.raises(AssertionError):
        assert_close(steps, whole)


@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_sequences(ours, use_cache):
    tokens, lengths = distinct(1), (7, 1, 12)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ends = torch.tensor([0, 7, 8, 20], dtype=torch.int32)
    with torch.no_grad():
        expected = torch.cat([ours(input_ids=part).logits for part in tokens.split(lengths, dim=1)], dim=1)
        assert_close(ours(input_ids=tokens, position_ids=positions, use_cache=use_cache).logits, expected)
        packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 12, "max_length_k": 12}
        assert_close(ours(input_ids=tokens, position_ids=positions, use_cache=use_cache, **packed).logits, expected)


def test_no_tensor_is_as_large_as_a_mask(eager, ours):
    tokens, length = distinct(1, 240).repeat(1, 4), 960
    sizes = {}
    for name, model in (("eager", eager), ("ours", ours)):
        with Watched() as largest:
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits.sum().backward()
        sizes[name] = largest.largest
    assert sizes["ours"] < length * length <= sizes["eager"]


def test_training_compiles_in_one_graph(ours):
    model = copy.deepcopy(ours).train()
    inputs = {"input_ids": distinct(), "attention_mask": padded("left"), "use_cache": False}
    expected = loss_and_gradients(model, **inputs)
    assert_close(loss_and_gradients(torch.compile(model, fullgraph=True, backend="eager"), **inputs), expected)


def test_saved_loaded_copied(eager, ours, tmp_path):
    ours.save_pretrained(tmp_path)
    loaded = enable_dynamic_mask_attention(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    again = pickle.loads(pickle.dumps(ours))
    with torch.no_grad():
        expected = ours(input_ids=distinct()).logits
        for model in (loaded, again, plain):
            assert_close(model(input_ids=distinct()).logits, expected)
    assert ours.state_dict().keys() == eager.state_dict().keys()


def test_what_cannot_be_honoured_is_refused(eager, ours):
    with pytest.raises(TypeError, match="bounded_cache: expected a bool, got int"):
        enable_dynamic_mask_attention(copy.deepcopy(eager), bounded_cache=1)
    with pytest.raises(
        ValueError,
        match=r"model: expected layers that do not slide, got config.sliding_window=8: a selection with a sliding window",
    ):
        enable_dynamic_mask_attention(doge(sliding_window=8))
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    with pytest.raises(ValueError, match="model: expected layers of type DogeAttention, got none in LlamaModel"):
        enable_dynamic_mask_attention(transformers.LlamaModel(transformers.LlamaConfig(**sizes)))
    with pytest.raises(TypeError, match=r"model: expected a transformers.PreTrainedModel, got Linear"):
        enable_dynamic_mask_attention(torch.nn.Linear(2, 2))
    seen = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"attention_mask: expected None or \[B, Sk\], got bool \[2, 1, 20, 20\] in a layer"):
        ours(input_ids=distinct(), attention_mask=seen)
    with pytest.raises(ValueError, match="output_attentions: expected False"):
        ours(input_ids=distinct(), output_attentions=True)
