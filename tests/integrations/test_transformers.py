"""dmattn in transformers: tiny models of many kinds with random weights give what they give with transformers' own attention."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
import transformers
from dmattn import IntervalMask
from dmattn.integrations import transformers as dmattn_transformers
from dmattn.integrations.transformers import attention_forward, make_mask, masks
from dmattn.testing import strategies
from tiny_models import padded
from torch.testing import assert_close
from transformers import masking_utils

# After transformers 5.24 chunks begin with each packed sequence, T5 calls attention functions, and Llama 4 generates from static caches.
AFTER_5_24 = hasattr(masking_utils, "packed_sequence_compatibility_function")
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
WINDOW = {"sliding_window": 6}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
DECODERS = {
    "llama": (transformers.LlamaConfig, {}),
    "llama, heads of 12": (transformers.LlamaConfig, {"head_dim": 12}),
    "qwen3": (transformers.Qwen3Config, {}),
    "mistral": (transformers.MistralConfig, WINDOW),
    "gemma2": (transformers.Gemma2Config, WINDOW | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}),
    "gemma3": (transformers.Gemma3TextConfig, WINDOW | {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt-oss": (transformers.GptOssConfig, WINDOW | {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": ROPE}),
    "llama4": (transformers.Llama4TextConfig, {
        "attention_chunk_size": 7, "num_local_experts": 2, "intermediate_size_mlp": 48, "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0], "interleave_moe_layer_step": 2,
    }),
}  # fmt: skip
DOGE = (transformers.DogeConfig, {"keep_window_size": 5})


@functools.cache
def built(name: str):
    """A model in eval mode with random weights. It is shared: leave it as it was."""
    torch.manual_seed(0)
    config, options = DOGE if name == "doge" else DECODERS[name]
    model = transformers.AutoModelForCausalLM.from_config(config(**SMALL | options)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("sinks", ".A")):
                parameter.normal_()
    return model


def tokens(batch: int = 2, length: int = 20, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def results(model, name: str, seen: torch.Tensor | None = None, gradients: bool = True, **inputs):
    """Logits of real tokens, and the gradients of all parameters, under an attention implementation."""
    model.set_attn_implementation(name)
    with torch.set_grad_enabled(gradients):
        out = model(**inputs)
        logits = out.logits if hasattr(out, "logits") else out.last_hidden_state
    logits = logits if seen is None else logits[seen.bool()]
    if not gradients:
        return [logits]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made = torch.autograd.grad(logits.square().mean(), parameters, allow_unused=True)
    return [logits.detach(), *(x for x in made if x is not None)]


# Models -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name, side):
    model, mask = built(name), padded(side)
    inputs = {"input_ids": tokens(), "attention_mask": mask}
    assert_close(results(model, "dmattn", mask, **inputs), results(model, "eager", mask, **inputs))


def encoders():
    """Name to (model, inputs, padding mask of the results)."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    mask = padded("right")
    torch.manual_seed(0)
    bert = transformers.BertModel(
        transformers.BertConfig(vocab_size=64, max_position_embeddings=64, initializer_range=0.2, **sizes)
    )
    decoder = transformers.BertLMHeadModel(
        transformers.BertConfig(vocab_size=64, max_position_embeddings=64, is_decoder=True, initializer_range=0.2, **sizes)
    )
    vit = transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=4, initializer_range=0.2, **sizes))
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0
        )
    )
    whisper = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=16, max_target_positions=32, init_std=0.2,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
        )
    )  # fmt: skip
    features = strategies.random_tensor((2, 8, 32), 5)
    return {
        "bert": (bert, {"input_ids": tokens(), "attention_mask": mask}, mask),
        "bert decoder": (decoder, {"input_ids": tokens(), "attention_mask": mask}, mask),
        "vit": (vit, {"pixel_values": strategies.random_tensor((2, 3, 16, 16), 4)}, None),
        "t5": (t5, {"input_ids": tokens(), "attention_mask": mask, "decoder_input_ids": tokens(length=9, seed=2)}, None),
        "whisper": (whisper, {"input_features": features, "decoder_input_ids": tokens(length=9, seed=2)}, None),
    }


ENCODERS = functools.cache(encoders)


@pytest.mark.parametrize("name", ["bert", "bert decoder", "vit", "t5", "whisper"])
def test_encoders_and_encoder_decoders(name):
    model, inputs, mask = ENCODERS()[name]
    model.eval()
    assert_close(results(model, "dmattn", mask, **inputs), results(model, "eager", mask, **inputs))


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_encoder_decoders_generate(name):
    model, inputs, _ = ENCODERS()[name]
    model.eval()
    inputs = {key: value for key, value in inputs.items() if key != "decoder_input_ids"}
    for beams in (1, 3):
        ours, theirs = (generated(model, name, **inputs, num_beams=beams) for name in ("dmattn", "eager"))
        assert torch.equal(ours, theirs)


def test_gradient_checkpointing_and_dropout():
    model = copy.deepcopy(built("mistral")).train()
    inputs = {"input_ids": tokens(), "attention_mask": padded("left"), "use_cache": False}
    expected = results(model, "dmattn", inputs["attention_mask"], **inputs)
    model.gradient_checkpointing_enable()
    assert_close(results(model, "dmattn", inputs["attention_mask"], **inputs), expected)
    model.gradient_checkpointing_disable()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert not torch.equal(
        results(model, "dmattn", None, gradients=False, **inputs)[0], results(model, "dmattn", None, gradients=False, **inputs)[0]
    )


def test_masks_of_four_dimensions():
    """A user's own: bool hides, float is added; neither has to be one of intervals."""
    model = built("llama")
    seen = torch.ones(20, 20, dtype=torch.bool).tril() & (strategies.random_tensor((2, 1, 20, 20), 3) > -0.5)
    seen |= torch.eye(20, dtype=torch.bool)
    added = torch.where(seen, strategies.random_tensor((2, 1, 20, 20), 4), torch.finfo(torch.float32).min)
    eager = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    for ours, theirs in ((seen, eager), (added, added), (eager, eager)):
        expected = results(model, "eager", input_ids=tokens(), attention_mask=theirs)
        assert_close(results(model, "dmattn", input_ids=tokens(), attention_mask=ours), expected)


def test_weights_are_returned_when_asked_for():
    model = built("gpt-oss")
    weights = {}
    for name in ("dmattn", "eager"):
        model.set_attn_implementation(name)
        weights[name] = model(input_ids=tokens(), output_attentions=True).attentions
    assert_close(weights["dmattn"], weights["eager"])


# Generation ---------------------------------------------------------------------------------------------------------------------------


def generated(model, name: str, new: int = 12, **options) -> torch.Tensor:
    model.set_attn_implementation(name)
    options = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 0, "eos_token_id": None} | options
    return model.generate(**options)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name, cache):
    if name == "llama4" and cache == "static" and not AFTER_5_24:
        pytest.skip("this release of transformers cannot")
    model = built(name)
    options = {"input_ids": tokens(), "attention_mask": padded("left"), "cache_implementation": cache, "disable_compile": True}
    assert torch.equal(generated(model, "dmattn", **options), generated(model, "eager", **options))


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"assistant": True}, {"use_cache": False}, {"prefill_chunk_size": 6}],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
def test_ways_to_generate(name, options):
    model, options = built(name), dict(options)
    options["input_ids"] = tokens(1) if "num_beams" not in options else tokens()
    if "prompt_lookup_num_tokens" in options:
        options["input_ids"] = torch.cat([tokens(1), tokens(1)], dim=1)
    if options.pop("assistant", False):
        options["assistant_model"] = built("llama")
    first = generated(model, "dmattn", **options)
    assert torch.equal(first, generated(model, "eager", **options))


# Packed sequences ---------------------------------------------------------------------------------------------------------------------

LENGTHS = (7, 1, 12)


def packed() -> dict[str, torch.Tensor]:
    """Sequences in one row, told apart by positions alone."""
    return {"input_ids": tokens(1, sum(LENGTHS)), "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}


def one_by_one(model) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.cat([model(input_ids=part).logits for part in packed()["input_ids"].split(LENGTHS, dim=1)], dim=1)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt-oss", "llama4"])
def test_positions_that_start_again(name, use_cache):
    """transformers' own attention ignores them with use_cache=True, its default; here they count."""
    if name == "llama4" and (use_cache or not AFTER_5_24):
        pytest.skip("chunks are counted from the first token of a sequence, which is unknown beside a cache")
    model = built(name)
    logits = results(model, "dmattn", gradients=False, use_cache=use_cache, **packed())[0]
    assert_close(logits, one_by_one(model))
    if not use_cache and name != "gpt-oss":  # which does not tell its mask functions the positions
        assert_close(results(model, "dmattn", use_cache=False, **packed()), results(model, "eager", use_cache=False, **packed()))


def test_positions_are_read_anew_where_they_may_have_changed():
    """Layers share what one of them found: not with another mask, and not under inference mode, where nobody says who wrote."""
    model, positions = built("llama"), torch.tensor([[0, 0, 0, 0, *range(16)], [*range(20)]])
    inputs = {"input_ids": tokens(), "use_cache": False}
    for real in (2, 17, 19):  # the same positions: how many of the first tokens are real decides where a sequence begins
        mask = torch.ones((2, 20), dtype=torch.int64)
        mask[0, : 20 - real] = 0
        shared, anew = (
            results(model, "dmattn", mask, False, attention_mask=mask, position_ids=given, **inputs)
            for given in (positions, positions.clone())
        )
        assert torch.equal(shared[0], anew[0])
    expected = results(model, "dmattn", gradients=False, use_cache=False, **packed())[0]
    with torch.inference_mode():
        inputs = {name: given.clone() for name, given in packed().items()}
        assert torch.equal(model(use_cache=False, **inputs).logits, expected)
        inputs["position_ids"].copy_(torch.arange(sum(LENGTHS)))
        plain = model(use_cache=False, input_ids=inputs["input_ids"]).logits
        assert torch.equal(model(use_cache=False, **inputs).logits, plain)
    inputs = packed()
    with torch.no_grad():
        assert torch.equal(model(use_cache=False, **inputs).logits, expected)
        inputs["position_ids"].numpy()[:] = range(sum(LENGTHS))  # which no tensor notices
        assert torch.equal(model(use_cache=False, **inputs).logits, plain)


def test_positions_beside_a_mask_about_more_keys_than_there_are():
    seen = torch.ones(2, 12, dtype=torch.bool)
    seen[0, :3] = False
    query, key = strategies.random_tensor((2, 4, 8, 16), 1), strategies.random_tensor((2, 2, 8, 16), 2)
    mask, positions = make_mask(2, 8, 12, attention_mask=seen), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    wide, narrow = (
        attention_forward(torch.nn.Module(), query, key, key, x, position_ids=positions) for x in (mask, mask[..., :8])
    )
    assert torch.equal(wide[0], narrow[0])


@pytest.mark.parametrize("use_cache", [False, True])
def test_the_flattening_collator(use_cache):
    model = built("mistral")
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_position_ids=True)
    batch = collate([{"input_ids": part[0].tolist()} for part in packed()["input_ids"].split(LENGTHS, dim=1)])
    batch.pop("labels")
    assert "cu_seq_lens_q" in batch
    logits = results(model, "dmattn", gradients=False, use_cache=use_cache, **batch)[0]
    assert_close(logits, one_by_one(model))
    batch["position_ids"] = torch.arange(sum(LENGTHS))[None]  # ends alone tell the sequences apart
    plain = results(model, "dmattn", gradients=False, use_cache=use_cache, input_ids=batch["input_ids"])[0]
    logits = results(model, "dmattn", gradients=False, use_cache=use_cache, **batch)[0]
    assert_close(logits[:, :7], plain[:, :7])
    with pytest.raises(AssertionError):
        assert_close(logits, plain)


# Nothing is dropped -------------------------------------------------------------------------------------------------------------------


def without(**dropped):
    """dmattn's attention function with some arguments left out."""

    def forward(module, query, key, value, attention_mask, **options):
        attention_mask = dropped.get("attention_mask", attention_mask)
        return attention_forward(
            module, query, key, value, attention_mask, **{key: x for key, x in options.items() if key not in dropped}
        )

    return forward


@pytest.mark.parametrize(
    "what", ["s_aux", "softcap", "attention_mask", "sliding_window", "position_bias", "position_ids", "scaling", "is_causal"]
)
def test_dropping_an_argument_would_be_seen(what, monkeypatch):
    if what == "position_bias" and not AFTER_5_24:
        pytest.skip("this release of transformers has no model that passes it")
    cases = {
        "s_aux": ("gpt-oss", {}), "softcap": ("gemma2", {}), "attention_mask": ("llama", {"attention_mask": padded("left")}),
        "sliding_window": ("mistral", {}), "position_bias": ("t5", {}), "position_ids": ("llama", packed()), "scaling": ("gemma2", {}),
        "is_causal": ("bert", {}),
    }  # fmt: skip
    name, extra = cases[what]
    model, inputs = (built(name), {"input_ids": tokens()} | extra) if name in DECODERS else ENCODERS()[name][:2]
    model.eval()
    if what == "scaling":
        monkeypatch.setattr(model.model.layers[0].self_attn, "scaling", 0.7)
    if what == "is_causal":  # the module's own, which says that an encoder is not causal
        inputs = {"input_ids": tokens()}
    if what == "sliding_window":  # the window is said by the mask; without one the argument counts
        monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, "dmattn_dropped", lambda **_: None)
        monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, "dmattn", lambda **_: None)
    else:
        monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, "dmattn_dropped", make_mask)
    fn = without(**{what: None})
    if what == "is_causal":
        fn = lambda *given, **options: attention_forward(*given, **options | {"is_causal": True})  # noqa: E731
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "dmattn_dropped", fn)
    mask = inputs.get("attention_mask") if name not in ("t5", "bert") else None
    expected = results(model, "eager", mask, gradients=False, **inputs)
    if what == "position_ids":
        expected = [one_by_one(model)]
    assert_close(results(model, "dmattn", mask, gradients=False, **inputs), expected)
    with pytest.raises(AssertionError):
        assert_close(results(model, "dmattn_dropped", mask, gradients=False, **inputs), expected)
    model.set_attn_implementation("eager")


class Layer(torch.nn.Module):
    is_causal = True


def call(**options):
    q, k = strategies.random_tensor((2, 4, 6, 8), 0), strategies.random_tensor((2, 2, 6, 8), 1)
    return attention_forward(Layer(), q, k, k, options.pop("attention_mask", None), **options)


REFUSED = [
    ({"block_indices": torch.zeros(2, 6, 3).int()}, ValueError, "block_indices: expected 4 dimensions [B, heads, Sq, n]"),
    ({"block_indices": torch.zeros(2, 3, 6, 3).int()}, ValueError, "block_indices: expected [B, heads, Sq, n] with a divisor of 4 heads"),
    ({"cache": object()}, ValueError, "cache: expected None, got object: paged caches have no kernel here"),
    ({"head_mask": torch.ones(4)}, ValueError, "head_mask: expected None"),
    ({"s_aux": torch.ones(4), "sinks": torch.ones(4)}, ValueError, "s_aux, sinks: expected at most one of them"),
    ({"sliding_window": 0}, ValueError, "sliding_window: expected None or an int > 0, got 0"),
    ({"attention_mask": IntervalMask.causal(6)}, TypeError, "attention_mask: expected a tensor, got IntervalMask"),
    ({"attention_mask": torch.ones(2, 1, 6, 6).long()}, TypeError, "attention_mask: expected bool, a floating-point dtype"),
    ({"attention_mask": torch.ones(2, 6).bool()}, ValueError, "attention_mask: expected [B|1, H|1, Sq|1, >= Sk] with Sk=6, got shape [2, 6]"),
    ({"attention_mask": torch.ones(2, 1, 2, 5).int()}, ValueError, "attention_mask: expected int32 [B, 1, 2, Sk] of dmattn's mask function"),
    ({"cu_seq_lens_k": torch.tensor([0, 6])}, ValueError, "cu_seq_lens_q, cu_seq_lens_k: expected both"),
    ({"cu_seq_lens_q": torch.tensor([0, 6]), "cu_seq_lens_k": torch.tensor([0, 6])}, ValueError, "for a batch of 1"),
    ({"sliding_window": 3, "is_causal": False}, ValueError, "sliding_window: expected a mask with a window of 3"),
    ({"indices": torch.zeros(2, 5, 3).int()}, ValueError, "indices: expected [B, Sq, n] with B=2, Sq=6"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "message"), REFUSED, ids=lambda given: " ".join(given) if isinstance(given, dict) else ""
)
def test_what_cannot_be_honoured_is_refused(options, error, message):
    with pytest.raises(error) as raised:
        call(**options)
    assert message in str(raised.value)


def test_listed_keys_beside_a_mask_of_keys():
    """A mask [B, 1, 1, Sk] is the same for all queries, also where it meets keys that are listed for each."""
    indices = torch.tensor([[[0, 2, 4]] * 6, [[1, 3, 5]] * 6], dtype=torch.int32)
    real = torch.tensor([1, 1, 1, 0, 0, 1], dtype=torch.bool)
    seen = torch.zeros(2, 6, 6, dtype=torch.bool)
    seen[0, :, [0, 2]] = True
    seen[1, :, [1, 5]] = True
    out = call(indices=indices, attention_mask=real.expand(2, 1, 1, 6))[0]
    assert_close(out, call(attention_mask=seen[:, None])[0])


def test_one_sequence_of_queries_for_a_batch_of_keys():
    q, k = strategies.random_tensor((1, 4, 6, 8), 0), strategies.random_tensor((2, 2, 6, 8), 1)
    out, _ = attention_forward(Layer(), q, k, k, None)
    assert torch.equal(out, attention_forward(Layer(), q.expand(2, -1, -1, -1), k, k, None)[0])


def test_listed_keys_are_those_that_causality_shows():
    """Models that select keys by an index pass them to every attention; a row that asks for later keys does not get them."""
    indices = torch.tensor([[[5, 0, -1]] * 6, [[1, 2, 3]] * 6], dtype=torch.int32)
    seen = torch.zeros(2, 6, 6, dtype=torch.bool)
    seen[0, :, [0, 5]] = True
    seen[1, :, [1, 2, 3]] = True
    seen &= torch.ones(6, 6, dtype=torch.bool).tril()
    assert_close(call(indices=indices)[0], call(attention_mask=seen[:, None])[0])
    assert (call(indices=indices)[0][1, 0] == 0).all()


def test_register():
    assert dmattn_transformers.register("mine") == "mine"
    model = built("llama")
    assert_close(
        results(model, "mine", gradients=False, input_ids=tokens()), results(model, "eager", gradients=False, input_ids=tokens())
    )
    for wrong in ("flash_dmattn", "sdpa2", "my_flex_attention", "", "paged|dmattn", "me/dmattn"):
        with pytest.raises(ValueError, match="name: expected a name without"):
            dmattn_transformers.register(wrong)
    with pytest.raises(TypeError, match="name: expected a str, got int"):
        dmattn_transformers.register(3)


def test_room_behind_the_first_tokens_is_not_seen():
    """Without a mask a causal layer counts keys from the first: what lies behind the queries' own is room in an empty static cache."""
    q, k = strategies.random_tensor((1, 2, 5, 8), 0), strategies.random_tensor((1, 2, 9, 8), 1)
    out = attention_forward(Layer(), q, k, k, None)[0]
    assert torch.equal(out, attention_forward(Layer(), q, k[:, :, :5], k[:, :, :5], None)[0])
    short = attention_forward(Layer(), q, k[:, :, :3], k[:, :, :3], None)[0]
    assert torch.equal(short[:, :3], attention_forward(Layer(), q[:, :, :3], k[:, :, :3], k[:, :, :3], None)[0])
    last = attention_forward(Layer(), q[:, :, 4:], k, k, None)[0]
    assert torch.equal(last, attention_forward(Layer(), q[:, :, 4:], k, k, torch.ones(1, 1, 1, 9, dtype=torch.bool))[0])


# Masks --------------------------------------------------------------------------------------------------------------------------------


def mask_functions():
    """Name to (a mask function, sizes): all that transformers makes."""
    m = masking_utils
    left = torch.tensor([0, 3])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 2], [4, 5, 6, 7, 8, 0, 1, 2, 3, 4]])
    sequences = m.find_packed_sequence_indices(positions)
    sliding = m.sliding_window_causal_mask_function(4)

    def pack(function):
        if AFTER_5_24:
            return m.packed_sequence_compatibility_function(function, positions, sequences)
        return m.and_masks(function, m.packed_sequence_mask_function(sequences))

    odd = lambda b, h, q, k: (q % 2 == k % 2) | (q < 0)  # noqa: E731
    whole, step, chunk = {}, {"q_length": 1, "q_offset": 9}, {"q_length": 4, "q_offset": 6}
    later = {"q_length": 3, "q_offset": 20, "kv_offset": 13}
    static = {"q_length": 3, "q_offset": torch.tensor(4)}
    cases = {
        "causal": (m.causal_mask_function, (whole, step, chunk, later, static)),
        "bidirectional": (m.bidirectional_mask_function, (whole, chunk)),
        "sliding": (sliding, (whole, step, chunk, later, static)),
        "wide": (m.sliding_window_causal_mask_function(100), (whole, chunk)),
        "sliding, bidirectional": (m.sliding_window_bidirectional_mask_function(3), (whole,)),
        "chunked": (m.chunked_causal_mask_function(4, left), (whole, step, chunk, later, static)),
        "packed": (pack(m.causal_mask_function), (whole,)),
        "packed, sliding": (pack(sliding), (whole,)),
        "packed, chunked": (pack(m.chunked_causal_mask_function(2, torch.zeros(2, dtype=torch.int64))), (whole,)),
        "blocks": (
            m.or_masks(m.causal_mask_function, m.blockwise_overlay(torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1, -1]] * 2))),
            (whole,),
        ),
        "none of intervals": (odd, (whole, chunk)),
    }
    return {f"{name} {i}": (fn, sizes) for name, (fn, all_sizes) in cases.items() for i, sizes in enumerate(all_sizes)}


MASKS = mask_functions()
EVALUATED = ("packed, chunked", "blocks", "none of intervals")


def seen_by(mask, q_length, kv_length):
    """What a mask for the attention function says, bool [2, 1, Sq, Sk]."""
    if mask.dtype == torch.bool:
        return mask.expand(2, 1, q_length, kv_length)
    return masks.interval_of(mask, q_length, kv_length).to_bool(q_length, kv_length).expand(2, 1, -1, -1)


def test_masks_that_depend_on_the_distance_only():
    """They hold inside of packed sequences, too, where positions begin again; others are not recognised there."""
    keys, positions = masks.Keys(torch.arange(9)[None, None]), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])

    def is_recognised(function):
        remapped = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
        return masks.recognised(remapped(function, positions), keys, 9) is not None if remapped else None

    near = masking_utils.and_masks(masking_utils.sliding_window_overlay(3), masking_utils.causal_mask_function)
    chunked = masking_utils.chunked_overlay(3, torch.zeros(1, dtype=torch.int64))
    for function in (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function, near):
        assert masks._depends_on_distance_only(function)
        assert is_recognised(function) in (True, None)
    for function in (chunked, masking_utils.and_masks(chunked, masking_utils.causal_mask_function)):
        assert not masks._depends_on_distance_only(function)
        assert is_recognised(function) in (False, None)


@pytest.mark.parametrize(
    ("way", "padding"), [*itertools.product(["recognised", "evaluated"], [None, "left", "right"]), ("compiled", "left")]
)
@pytest.mark.parametrize("name", MASKS)
def test_masks_say_what_those_of_sdpa_say(name, way, padding, monkeypatch):
    function, sizes = MASKS[name]
    sizes = {"batch_size": 2, "q_length": 10, "kv_length": 10} | sizes
    if padding is not None:
        total = sizes["kv_length"] + sizes.get("kv_offset", 0)
        sizes["attention_mask"] = padded(padding, 2, total).bool()[:, : total - 1 if padding == "right" else None]
    never = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    expected = masking_utils.sdpa_mask(mask_function=function, **sizes, **never)
    if way == "recognised" and not name.startswith(EVALUATED):
        monkeypatch.setattr(masks.detect, "interval_of", None)
    if way == "evaluated":
        monkeypatch.setattr(masks, "recognised", lambda *_: None)
    make = functools.partial(make_mask, mask_function=function, **sizes, **never)
    if way == "compiled":
        torch._dynamo.reset()
        if name.startswith("none"):
            with pytest.raises(RuntimeError, match="one unbroken run"):
                torch.compile(make, fullgraph=True, backend="eager")()
            return
        make = torch.compile(make, fullgraph=True, backend="eager")
    mask = make()
    assert mask.dtype == (torch.bool if name.startswith("none") else torch.int32)
    assert torch.equal(seen_by(mask, sizes["q_length"], 10), expected.expand(2, 1, -1, -1))


@pytest.mark.parametrize("sliding", ["sliding_window_causal_mask_function", "sliding_window_bidirectional_mask_function"])
def test_offsets_that_are_tensors_are_not_read(sliding, monkeypatch):
    """On a GPU each reading would wait for the device."""
    sizes = {"batch_size": 2, "q_length": 3, "kv_length": 10, "mask_function": getattr(masking_utils, sliding)(4)}
    sizes["attention_mask"] = padded("left", 2, 23).bool()
    expected = make_mask(**sizes, q_offset=20, kv_offset=13)
    offsets = {"q_offset": torch.tensor(20), "kv_offset": torch.tensor(13)}
    for name in ("__bool__", "__int__", "__index__", "item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, None)
    made = make_mask(**sizes, **offsets)
    monkeypatch.undo()
    assert torch.equal(made, expected)


def test_masks_are_left_out_where_none_says_as_much():
    sizes = {"batch_size": 1, "q_length": 10, "kv_length": 10}
    ones = torch.ones(1, 10, dtype=torch.bool)
    assert make_mask(**sizes) is None
    assert make_mask(**sizes, attention_mask=ones) is None
    assert make_mask(**sizes, allow_is_causal_skip=False) is not None
    assert make_mask(**sizes, attention_mask=ones.logical_not()) is not None
    assert make_mask(1, 1, 10, 9) is None
    assert make_mask(1, 1, 10, 5) is not None  # room behind
    assert make_mask(1, 4, 10, 0) is None  # an empty static cache
    assert make_mask(1, 4, 10, 6) is not None  # a chunk of a prompt
    assert make_mask(1, 4, 10, torch.tensor(0)) is not None  # not read
    assert make_mask(1, 4, 10, 0, torch.tensor(0)) is not None
    assert make_mask(**sizes, mask_function=masking_utils.sliding_window_causal_mask_function(4)) is not None
    bidirectional = {"mask_function": masking_utils.bidirectional_mask_function, "allow_is_causal_skip": False}
    assert make_mask(**sizes, **bidirectional, allow_is_bidirectional_skip=True) is None
    assert make_mask(**sizes, **bidirectional) is not None


def test_a_users_mask_function_is_taken_as_it_is():
    def odd(b, h, q, k):
        return torch.where(q > 3, k % 2 == 0, k <= q)

    expected = masking_utils.sdpa_mask(2, 9, 9, mask_function=odd, use_vmap=True, allow_is_causal_skip=False)
    assert torch.equal(seen_by(make_mask(2, 9, 9, mask_function=odd, use_vmap=True), 9, 9), expected)
    window = lambda b, h, q, k: (q >= k) & (q - k < 3)  # noqa: E731
    made = make_mask(2, 9, 9, mask_function=window, use_vmap=True)
    assert made.dtype == torch.int32
    assert torch.equal(seen_by(made, 9, 9)[0, 0], IntervalMask.sliding_window(9, 2).to_bool(9, 9)[0, 0])


# Compiled -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "backend"), [("mistral", "aot_eager"), ("gemma2", "eager"), ("gpt-oss", "eager")])
def test_training_compiles_in_one_graph(name, backend):
    model = copy.deepcopy(built(name)).train()
    inputs = {"input_ids": tokens(), "attention_mask": padded("left"), "use_cache": False}
    expected = results(model, "dmattn", inputs["attention_mask"], **inputs)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    logits = compiled(**inputs).logits[inputs["attention_mask"].bool()]
    gradients = torch.autograd.grad(logits.square().mean(), list(model.parameters()), allow_unused=True)
    assert_close([logits, *(x for x in gradients if x is not None)], expected)


@pytest.mark.long
@pytest.mark.parametrize("name", ["mistral", "gpt-oss"])
def test_decoding_from_a_static_cache_compiles_in_one_graph(name):
    model, prompt = built(name), tokens(2, 8)
    expected = generated(model, "eager", new=4, input_ids=prompt, attention_mask=padded("left", 2, 8))
    model.set_attn_implementation("dmattn")
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(model.forward, fullgraph=True, backend=counted)
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    mask = padded("left", 2, 8)
    made, given = prompt, prompt
    with torch.no_grad():
        for number in range(4):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -given.shape[1] :]
            forward = model.forward if number == 0 else step
            logits = forward(input_ids=given, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
            given = logits[:, -1:].argmax(-1)
            made = torch.cat([made, given], dim=1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    assert torch.equal(made, expected)
    assert len(graphs) <= 2
