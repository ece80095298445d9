"""The bounded cache in transformers: ``generate()`` gives the tokens of the full cache, and the cache does what transformers asks of one."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from dmattn.integrations.transformers import BoundedLayer, bounded_cache, convert, enable_dynamic_mask_attention
from tiny_models import SIZES, distinct, padded, scattered
from torch.testing import assert_close

GREEDY = {"do_sample": False, "max_new_tokens": 12, "disable_compile": True, "no_repeat_ngram_size": 1}


def built(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "doge":
        model = transformers.DogeForCausalLM(transformers.DogeConfig(**SIZES, keep_window_size=5))
        return scattered(enable_dynamic_mask_attention(model.eval()))
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, head_dim=12))  # no multiple of 8
    options = {"local_heads": 1, "recency": 0.25, "score": "linear", "select_only": True} if kind == "as recommended" else {}
    model = convert(plain, 4, local=3, sink_keys=2, **options)
    return scattered(model.eval())


@pytest.fixture(scope="module", params=["doge", "converted", "as recommended"])
def model(request):
    """It is shared: leave it as it was."""
    return built(request.param)


def automatic(model, rewind: int = 32) -> torch.nn.Module:
    """The same model that makes bounded caches by itself."""
    other = copy.deepcopy(model)
    if other.config.model_type == "doge":
        return enable_dynamic_mask_attention(other, bounded_cache=True, rewind=rewind)
    for layer in other.model.layers:
        layer.self_attn.cache_rewind = rewind
    return other


def prompt(side: str | None = None, batch: int = 2, length: int = 20) -> dict[str, torch.Tensor]:
    tokens = distinct(batch, length)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens) if side is None else padded(side, batch, length)}


def sizes_of(cache) -> list[int]:
    parts = [(layer.cache.selecting, layer.cache.streaming) if layer.local_heads else (layer.cache,) for layer in cache.layers]
    return [part.key.shape[2] for both in parts for part in both]


# Tokens -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "options"),
    [(None, {}), ("left", {}), ("left", {"num_beams": 2, "num_return_sequences": 2}), ("left", {"prefill_chunk_size": 7})],
)
def test_generated_tokens_are_those_of_the_full_cache(model, side, options):
    given = prompt(side) | GREEDY | options
    expected = model.generate(**given)
    cache = bounded_cache(model)
    assert torch.equal(model.generate(**given, past_key_values=cache), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1  # the last token has not been taken in


def test_a_model_makes_its_own_cache(model):
    made = automatic(model).generate(**prompt("left"), **GREEDY, return_dict_in_generate=True)
    assert torch.equal(made.sequences, model.generate(**prompt("left"), **GREEDY))
    assert all(isinstance(layer, BoundedLayer) for layer in made.past_key_values.layers)


@pytest.mark.parametrize("proposed", ["looked up", "by a model"])
def test_tokens_that_were_proposed_are_taken_back(model, proposed, monkeypatch):
    given = prompt(batch=1) | GREEDY
    given = {name: x.repeat(1, 2) if torch.is_tensor(x) else x for name, x in given.items() if name != "no_repeat_ngram_size"}
    expected = model.generate(**given)
    other = automatic(model)
    taken_back, crop = [], BoundedLayer.crop
    monkeypatch.setattr(BoundedLayer, "crop", lambda layer, count: (taken_back.append(-count), crop(layer, count)))
    stranger = "converted" if model.config.model_type == "doge" else "doge"
    options = {"prompt_lookup_num_tokens": 4} if proposed == "looked up" else {"assistant_model": automatic(built(stranger))}
    assert torch.equal(other.generate(**given, **options), expected)
    assert max(taken_back) > 0
    assert torch.equal(model.generate(**given, **options, past_key_values=bounded_cache(model, rewind=24)), expected)


def test_a_conversation_goes_on(model):
    cache = bounded_cache(model)
    first = model.generate(**prompt(), **GREEDY, past_key_values=cache)
    added = torch.cat([first, prompt()["input_ids"].flip(1)], dim=1)
    expected = model.generate(input_ids=added, attention_mask=torch.ones_like(added), **GREEDY)
    assert torch.equal(
        model.generate(input_ids=added, attention_mask=torch.ones_like(added), **GREEDY, past_key_values=cache), expected
    )
    assert sizes_of(cache)[0] < expected.shape[1]


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_logits_in_parts_are_those_of_one_pass(model, side):
    """Also with padding in the middle, where more tokens follow on padding: local windows and sinks count real tokens."""
    given = prompt(side, length=60)
    cache, parts = bounded_cache(model), (20, 1, 1, 12, 26)
    if side == "right":
        given["attention_mask"][1, 14:20] = 0
    positions = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    real = given["attention_mask"].bool()
    with torch.no_grad():
        alone = [model(input_ids=tokens[seen][None]).logits[0] for tokens, seen in zip(given["input_ids"], real, strict=True)]
        steps, first = [], 0
        for count in parts:
            last = first + count
            mask = given["attention_mask"][:, :last]
            part = model(
                input_ids=given["input_ids"][:, first:last],
                attention_mask=mask,
                position_ids=positions[:, first:last],
                past_key_values=cache,
            )
            steps.append(part.logits)
            first = last
            assert cache.get_seq_length() == last
            assert cache.get_mask_sizes(3, 0) == (3, last)
    assert_close(torch.cat(steps, dim=1)[real], torch.cat(alone))
    assert cache.layers[0].cache.length.tolist() == real.sum(1).tolist()


def test_the_cache_does_not_grow(model):
    cache = bounded_cache(model, rewind=0)
    tokens = torch.randint(3, 256, (1, 300), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        model(input_ids=tokens, past_key_values=cache)
        before = [layer.cache.nbytes for layer in cache.layers]
        model(input_ids=tokens[:, :100], past_key_values=cache)
    assert [layer.cache.nbytes for layer in cache.layers] == before
    assert max(sizes_of(cache)) <= 9
    assert cache.get_seq_length() == 400


def test_compiled_steps_are_one_graph():
    """As ``generate`` compiles on CUDA: the step's graph is whole, and none but the first step makes one."""
    model, given = built("as recommended"), prompt("left") | GREEDY
    expected = model.generate(**given)
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module

    compiled = transformers.CompileConfig(fullgraph=True, backend=backend, mode=None)
    compiled._compile_all_devices = True
    cache = bounded_cache(model)
    tokens = model.generate(**given | {"disable_compile": False}, compile_config=compiled, past_key_values=cache)
    assert torch.equal(tokens, expected)
    assert len(graphs) == 1
    assert cache.get_seq_length() == expected.shape[1] - 1
    # What changes lies where it lay, so that a step can be a CUDA graph.
    layer = cache.layers[0]
    tensors = [*layer.cache.buffers(), layer.length, layer.latest]
    places = [tensor.data_ptr() for tensor in tensors]
    with torch.no_grad():
        model(input_ids=tokens[:, -1:], past_key_values=cache)
    cache.crop(-3)
    assert [tensor.data_ptr() for tensor in (*layer.cache.buffers(), layer.length, layer.latest)] == places
    assert cache.get_seq_length() == expected.shape[1] - 3


# What transformers asks of a cache ------------------------------------------------------------------------------------------------------


def logits_after(model, cache, tokens) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, past_key_values=cache).logits


def test_crop_is_as_if_tokens_had_never_come(model):
    given = prompt("left", length=40)
    positions = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)

    def fed(cache, last, first=0):
        with torch.no_grad():
            return model(
                input_ids=given["input_ids"][:, first:last], attention_mask=given["attention_mask"][:, :last],
                position_ids=positions[:, first:last], past_key_values=cache,
            ).logits  # fmt: skip

    kept, cropped = bounded_cache(model, rewind=16), bounded_cache(model, rewind=16)
    fed(kept, 4)
    fed(cropped, 8)
    fed(cropped, 9, 8)
    cropped.crop(0)
    cropped.crop(-5)  # some of them padding of the first sequence
    assert cropped.get_seq_length() == 4
    assert_close(fed(cropped, 40, 4), fed(kept, 40, 4))
    cropped.crop(-7)
    # Token 33 after those before it.
    whole = model(
        input_ids=given["input_ids"][:, :34], attention_mask=given["attention_mask"][:, :34], position_ids=positions[:, :34]
    )
    assert_close(fed(cropped, 34, 33), whole.logits[:, 33:].detach())


def test_reset_and_rows(model):
    tokens = prompt(batch=3, length=30)["input_ids"]
    cache = bounded_cache(model)
    logits_after(model, cache, tokens[:, :20])
    cache.reset()
    assert cache.get_seq_length() == 0
    first = logits_after(model, cache, tokens[:, :20])
    assert_close(first, logits_after(model, bounded_cache(model), tokens[:, :20]))
    expected = logits_after(model, None, tokens)[:, 20:]
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.batch_select_indices(torch.tensor([1, 0]))  # what were sequences 0 and 2
    cache.batch_repeat_interleave(2)
    rows = torch.tensor([0, 0, 2, 2])
    assert cache.layers[0].batch_size == 4
    assert_close(logits_after(model, cache, tokens[rows, 20:]), expected[rows])
    cache.batch_select_indices(torch.tensor([False, True, False, False]))
    assert cache.layers[0].batch_size == 1
    cache.crop(-10)
    assert_close(logits_after(model, cache, tokens[:1, 20:]), expected[:1])


def test_a_cache_can_be_made_before_the_first_tokens(model):
    cache = bounded_cache(model)
    layer = cache.layers[0]
    assert not cache.is_initialized
    assert (layer.get_max_length(), layer.batch_size, cache.is_compileable, cache.is_croppable) == (-1, -1, True, True)
    cache.early_initialization(2, 2, model.model.layers[0].self_attn.head_dim, torch.float32, torch.device("cpu"))
    assert cache.is_initialized
    tokens = prompt()["input_ids"]
    assert_close(logits_after(model, cache, tokens), logits_after(model, None, tokens))
    assert "window=" in repr(cache)


# When a model makes its own -------------------------------------------------------------------------------------------------------------


def test_other_caches_and_gradients_keep_all_keys(model):
    other, given = automatic(model), prompt()
    with torch.no_grad():
        lazy = other(**given, past_key_values=transformers.DynamicCache()).past_key_values
        assert isinstance(lazy.layers[0], BoundedLayer)
        assert isinstance(other(**given).past_key_values.layers[1], BoundedLayer)
        filled = model(**given).past_key_values
        assert not isinstance(
            other(input_ids=given["input_ids"][:, :1], past_key_values=filled).past_key_values.layers[0], BoundedLayer
        )
    out = other(**given, labels=given["input_ids"])
    assert not isinstance(out.past_key_values.layers[0], BoundedLayer)
    out.loss.backward()
    expected = model.generate(**given, **GREEDY)
    assert torch.equal(other.generate(**given, **GREEDY, cache_implementation="static"), expected)
    assert torch.equal(other.generate(**given, **GREEDY, use_cache=False), expected)


def test_packed_sequences_keep_all_keys(model):
    tokens, lengths = prompt(batch=1)["input_ids"], (7, 13)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        expected = torch.cat([model(input_ids=part).logits for part in tokens.split(lengths, dim=1)], dim=1)
        out = automatic(model)(input_ids=tokens, position_ids=positions, use_cache=True)
    assert_close(out.logits, expected)
    with pytest.raises(ValueError, match="position_ids: expected one sequence a row with a bounded cache"), torch.no_grad():
        model(input_ids=tokens, position_ids=positions, past_key_values=bounded_cache(model))


# What is refused ------------------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_honoured_is_refused(model):
    tokens = prompt()["input_ids"]
    other = copy.deepcopy(model)
    other.set_attn_implementation("sdpa")
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with pytest.raises(ValueError, match="past_key_values: expected a cache that keeps all keys, got a BoundedLayer"):
        logits_after(plain, bounded_cache(model), tokens)
    with pytest.raises(ValueError, match="model: expected layers with dmattn's selection, got none in LlamaForCausalLM"):
        bounded_cache(plain)
    with pytest.raises(TypeError, match=r"model: expected a transformers.PreTrainedModel, got Linear"):
        bounded_cache(torch.nn.Linear(2, 2))
    wrong = transformers.Cache(layers=[BoundedLayer(9), BoundedLayer(9)])
    with pytest.raises(
        ValueError,
        match=r"past_key_values: expected \(window, local, sink_keys, local_heads\) = .* got a cache with \(9, 0, 0, 0\)",
    ):
        logits_after(model, wrong, tokens)
    offloaded = bounded_cache(model)
    offloaded.offloading = True
    with pytest.raises(ValueError, match="offloading: expected False with a bounded cache"):
        logits_after(model, offloaded, tokens)
    with torch.no_grad(), pytest.raises(ValueError, match=r"attention_mask: expected None or \[B, Sk\], got bool"):
        other(**prompt("left"), past_key_values=bounded_cache(model))
    seen = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"attention_mask: expected None or \[B, Sk\], got bool"):
        model(input_ids=tokens, attention_mask=seen, past_key_values=bounded_cache(model))
    ends = torch.tensor([0, 20], dtype=torch.int32)
    with torch.no_grad(), pytest.raises(ValueError, match="cu_seq_lens_q, cu_seq_lens_k: expected None with a bounded cache"):
        model(input_ids=tokens[:1], past_key_values=bounded_cache(model), cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    with pytest.raises(RuntimeError):  # gradients
        model(input_ids=tokens, past_key_values=bounded_cache(model))


def test_what_cannot_be_taken_back_is_refused(model):
    cache = bounded_cache(model, rewind=6)
    tokens = prompt(batch=1)["input_ids"]
    logits_after(model, cache, tokens[:, :4])
    with pytest.raises(ValueError, match="tokens_to_remove: expected at most 6 tokens, got 7: keys that died earlier are gone"):
        cache.crop(-7)
    with pytest.raises(ValueError, match="tokens_to_remove: expected at most as many tokens as can still be taken back, got 5"):
        cache.crop(-5)
    with pytest.raises(ValueError, match="tokens_to_remove: expected 0 or minus the number of tokens, got 3"):
        cache.crop(3)
    given = prompt(batch=1) | GREEDY
    with pytest.raises(ValueError, match="rewind: expected more than 0 for assisted or prompt-lookup generation"):
        model.generate(**given, prompt_lookup_num_tokens=4, past_key_values=bounded_cache(model, rewind=0))
    for wrong in (-1, True, 1.0):
        with pytest.raises((TypeError, ValueError), match="rewind: expected"):
            bounded_cache(model, rewind=wrong)
    with pytest.raises(ValueError, match="window: expected"):
        BoundedLayer(0)
