"""Models of transformers that do more than pass a mask to an attention function: they give what eager attention gives, or say why not."""

from __future__ import annotations

import copy
import importlib
import pickle

import pytest
import torch
import transformers
from dmattn import IntervalMask
from dmattn.integrations.transformers import (
    attention_forward,
    enable_dynamic_mask_attention,
    enable_index_top_k,
    make_mask,
)
from dmattn.testing import strategies
from tiny_models import distinct
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close

COMMON = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
DECODER = COMMON | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
PAIR = COMMON | {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 64, "init_std": 0.2, "decoder_start_token_id": 1, "dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
DOGE = DECODER | {"keep_window_size": 5}
MODELS = {
    "doge": ("DogeForCausalLM", "DogeConfig", DOGE),  # without enable_dynamic_mask_attention
    "hy_v4": ("HYV4ForCausalLM", "HYV4Config", DECODER | {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "head_dim": 8, "n_routed_experts": 4, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "n_group": 1, "topk_group": 1,
    }),
    "gemma 4": ("Gemma4ForCausalLM", "Gemma4TextConfig", DECODER | {
        "head_dim": 8, "global_head_dim": 264, "sliding_window": 6, "layer_types": LAYERS, "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
    }),
    "bigbird_pegasus": ("BigBirdPegasusForConditionalGeneration", "BigBirdPegasusConfig", PAIR | {"attention_type": "original_full"}),
    "nllb-moe": ("NllbMoeForConditionalGeneration", "NllbMoeConfig", PAIR | {"num_experts": 4, "router_dtype": "float32"}),
    "pegasus_x": ("PegasusXForConditionalGeneration", "PegasusXConfig", PAIR | {"block_size": 8, "num_global_tokens": 4}),
}  # fmt: skip


def built(name: str) -> torch.nn.Module:
    cls, config, options = MODELS[name]
    if not hasattr(transformers, cls):
        pytest.skip("this release of transformers has no such model")
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**options)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith((".A", "layer_scalar")) or (parameter.dim() > 1 and name in PAIRS):
                parameter.normal_(std=0.2)
    return model


PAIRS = ("bigbird_pegasus", "nllb-moe", "pegasus_x")


@pytest.mark.parametrize("name", MODELS)
def test_models_give_what_eager_gives(name):
    model, padding = built(name), torch.ones(2, 20, dtype=torch.int64)
    inputs = {"input_ids": distinct(vocabulary=64), "attention_mask": padding, "use_cache": False}
    if name in PAIRS:
        padding[0, -6:] = 0
        inputs["decoder_input_ids"] = distinct(length=9, vocabulary=64, seed=2)
    else:
        padding[0, :6] = 0
    found = {}
    for implementation in ("eager", "dmattn"):
        model.set_attn_implementation(implementation)
        logits = model(**inputs).logits
        logits = logits if name in PAIRS else logits[padding.bool()]
        gradients = torch.autograd.grad(logits.square().mean(), list(model.parameters()), allow_unused=True)
        found[implementation] = [logits.detach(), *(x for x in gradients if x is not None)]
    assert_close(found["dmattn"], found["eager"])


def test_layers_that_call_no_attention_function_are_refused():
    options = {"vocab_size": 64, "hidden_size": 32, "n_layer": 1, "n_head": 4}
    model = transformers.AutoModelForCausalLM.from_config(transformers.BloomConfig(**options), attn_implementation="dmattn")
    with pytest.raises(
        ValueError, match=r"attn_implementation: expected one that the model has.*got dmattn for a model with BloomConfig"
    ):
        model(distinct(vocabulary=64))


def test_masks_of_a_model_that_is_not_of_transformers_are_intervals():
    """Nothing is known of its layers: if they call no attention function, none is there to notice."""

    class OwnConfig(transformers.PretrainedConfig):
        model_type = "own"

    mask = make_mask(2, 5, 5, config=OwnConfig(), allow_is_causal_skip=False)
    assert torch.equal(mask, make_mask(2, 5, 5, allow_is_causal_skip=False))
    assert mask.dtype == torch.int32


@pytest.mark.parametrize("way", ["as it was", "copied", "pickled"])
def test_a_doge_model_keeps_its_selection(way):
    """One that was enabled takes intervals, however it was copied; one that was not takes masks of all pairs."""
    model = enable_dynamic_mask_attention(built("doge"))
    model = model if way == "as it was" else copy.deepcopy(model) if way == "copied" else pickle.loads(pickle.dumps(model))
    sizes = {"batch_size": 2, "q_length": 20, "kv_length": 20, "allow_is_causal_skip": False}
    assert make_mask(**sizes, config=model.config).dtype == torch.int32
    assert make_mask(**sizes, config=built("doge").config).dtype == torch.float32
    assert model(distinct(vocabulary=64)).logits.isfinite().all()


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("length", [2, 20])
def test_a_doge_model_compiles_whether_it_was_enabled_or_not(enabled, length):
    """And is not compiled anew when other models come and go."""
    model, others, counter = built("doge"), [], CompileCounter()
    if enabled:
        enable_dynamic_mask_attention(model)
    else:
        model.set_attn_implementation("dmattn")
    padding = torch.ones(2, length, dtype=torch.int64)
    padding[0, : length // 2] = 0
    inputs = {"input_ids": distinct(length=length, vocabulary=64), "attention_mask": padding, "use_cache": False}
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        expected = model(**inputs).logits[padding.bool()]
        for change in (lambda: others.append(enable_dynamic_mask_attention(built("doge"))), others.clear):
            assert_close(compiled(**inputs).logits[padding.bool()], expected)
            change()
        assert_close(compiled(**inputs).logits[padding.bool()], expected)
    assert counter.frame_count == 1


class Layer(torch.nn.Module):
    is_causal = True


def wide(size: int, queries: int = 6) -> tuple[torch.Tensor, ...]:
    """Tensors whose heads mean the same at any size: the further elements are zero."""
    shapes = ((2, 4, queries, 16), (2, 2, 9, 16), (2, 2, 9, 16))
    return tuple(
        torch.nn.functional.pad(strategies.random_tensor(shape, seed), (0, size - 16)).requires_grad_()
        for seed, shape in enumerate(shapes)
    )


def with_mask(name: str) -> dict[str, object]:
    hidden = torch.zeros(2, 1, 6, 9)
    hidden[0, :, :, 4:] = hidden[1, :, 2] = -torch.inf
    options: dict[str, dict[str, object]] = {
        "causal": {"attention_mask": None},
        "intervals": {"attention_mask": IntervalMask.sliding_window(9, 2).shift(-3).to_tensor()},
        "bool": {"attention_mask": hidden == 0},
        "floats": {"attention_mask": hidden.clamp(min=-1.5)},
        "sinks": {"attention_mask": None, "s_aux": strategies.random_tensor((4,), 7)},
        "sinks and intervals": {
            "attention_mask": IntervalMask.padding(9, 4).to_tensor(), "s_aux": strategies.random_tensor((4,), 7), "is_causal": False,
        },
        "listed keys": {"attention_mask": None, "is_causal": False, "indices": torch.tensor([[[0, 3]] * 6, [[1, -1]] * 6])},
    }  # fmt: skip
    return options[name]


@pytest.mark.parametrize("name", ["causal", "intervals", "bool", "floats", "sinks", "sinks and intervals", "listed keys"])
def test_heads_beyond_the_kernels_are_attended_to(name):
    options = with_mask(name) | {"scaling": 0.25}
    sinks = options.get("s_aux")
    leaves = () if sinks is None else (sinks.requires_grad_(),)
    found = []
    for size in (16, 264):
        given = wide(size)
        out, _ = attention_forward(Layer(), *given, **options)
        seed = strategies.random_tensor((2, 6, 4, 16), 9)
        gradients = torch.autograd.grad((out[..., :16] * seed).sum(), (*given, *leaves))
        found.append([out[..., :16], *(x[..., :16] for x in gradients)])
    assert_close(found[1], found[0])


def test_listed_blocks_of_a_layer_without_an_indexer_are_keys():
    listed = torch.tensor([[[0, 3]] * 6, [[1, -1]] * 6])
    expected, _ = attention_forward(Layer(), *wide(16), None, is_causal=False, indices=listed)
    out, _ = attention_forward(Layer(), *wide(16), None, is_causal=False, block_indices=listed[:, None])
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 2.0}, "softcap: expected None with heads wider than 256, got 2.0"),
        ({"output_attentions": True}, "output_attentions: "),
    ],
    ids=["softcap", "weights"],
)
def test_what_wide_heads_cannot_have_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        attention_forward(Layer(), *wide(264), None, **options)


# Models that choose keys themselves ---------------------------------------------------------------------------------------------------

DSA = DECODER | {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 3, "index_topk": 5, "index_n_heads": 8, "index_head_dim": 16,
}  # fmt: skip
CHOOSING = {
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DeepseekV32Config", DSA),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", DSA | {"indexer_types": ["full", "shared", "full"]}),
    "axk2": ("AXK2ForCausalLM", "AXK2Config", DSA),
    "dots3_note": ("Dots3NoteTextModel", "Dots3NoteTextConfig", DSA),
    "mistral_large4": ("MistralLarge4TextModel", "MistralLarge4TextConfig", DSA),
    "hy_v4_vl": ("HYV4VLTextModel", "HYV4VLTextConfig", DSA | {
        "head_dim": 8, "num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }),
    "qwen4_exp": ("Qwen4ExpForCausalLM", "Qwen4ExpTextConfig", DECODER | {
        "head_dim": 16, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 6, "indexer_compress_ratio": 2,
        "layer_types": ["indexed_attention"] * 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "hc_lowrank": 8, "ple_layer_ids": [], "ngram_vocab_size_base": 64,
    }),
    "minimax_m3_vl": ("MiniMaxM3VLForCausalLM", "MiniMaxM3VLTextConfig", DECODER | {
        "head_dim": 16, "rotary_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 2,
        "num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 48, "shared_intermediate_size": 16,
        "layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "dense"],
    }),
}  # fmt: skip
ENABLED = ("axk2", "deepseek_v32", "glm_moe_dsa", "qwen4_exp")


def choosing(name: str, **changed: int) -> torch.nn.Module:
    cls, config, options = CHOOSING[name]
    parts = [f"transformers.models.{name}.{part}_{name}" for part in ("modeling", "configuration")]
    try:
        modeling, configuration = (importlib.import_module(part) for part in parts)
    except ImportError:
        pytest.skip("this release of transformers has no such model")
    torch.manual_seed(0)
    return getattr(modeling, cls)(getattr(configuration, config)(**options | changed)).eval()


@pytest.mark.parametrize(("name", "enabled"), [*((name, False) for name in CHOOSING), *((name, True) for name in ENABLED)])
def test_models_whose_indexer_chooses_keys_give_what_eager_gives(name, enabled):
    model, padding = choosing(name), torch.ones(2, 20, dtype=torch.int64)
    padding[0, slice(14, 20) if name == "minimax_m3_vl" else slice(0, 6)] = 0  # its blocks shift with padding on the left
    inputs = {"input_ids": distinct(vocabulary=64), "attention_mask": padding, "use_cache": False}
    how = {"input_ids": inputs["input_ids"], "attention_mask": padding, "max_new_tokens": 8, "do_sample": False}
    found, tokens = [], []
    for is_ours in (False, True):
        if is_ours and enabled:
            model = enable_index_top_k(model)
        else:
            model.set_attn_implementation("dmattn" if is_ours else "eager")
        result = model(**inputs)[0][padding.bool()]
        gradients = torch.autograd.grad(result.square().mean(), list(model.parameters()), allow_unused=True)
        found.append([result.detach(), *(x for x in gradients if x is not None)])
        if hasattr(model, "generate"):
            tokens.append(model.generate(**how))
    assert_close(*found)
    assert all(torch.equal(tokens[0], x) for x in tokens)


@pytest.mark.parametrize("name", [*ENABLED, "minimax_m3_vl"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_models_that_choose_generate_with_every_cache(name, cache):
    """A static cache has room for more tokens than there are. Prompts come in two parts, which is no different."""
    tokens, how = distinct(vocabulary=64), {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    model = choosing(name)
    model.set_attn_implementation("eager")
    expected = model.generate(input_ids=tokens, **how)
    model = choosing(name)
    if name in ENABLED:
        enable_index_top_k(model)
    else:
        model.set_attn_implementation("dmattn")
    assert torch.equal(model.generate(input_ids=tokens, **how), expected)
    assert torch.equal(model.generate(input_ids=tokens, prefill_chunk_size=13, **how), expected)


@pytest.mark.parametrize("name", ENABLED)
def test_an_enabled_indexer_makes_nothing_for_all_pairs(name):
    model = enable_index_top_k(choosing(name))
    length = 59

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        pairs = 0

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            result = function(*arguments, **(options or {}))
            parts = result if isinstance(result, tuple | list) else [result]
            self.pairs += sum(isinstance(x, torch.Tensor) and list(x.shape[-2:]) == [length, length] for x in parts)
            return result

    with torch.no_grad(), Watch() as watch:
        model(input_ids=torch.randint(3, 64, (1, length)), use_cache=False)
    assert watch.pairs == 0
    copied = pickle.loads(pickle.dumps(model))
    tokens = distinct(vocabulary=64)
    assert_close(copied(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_blocks_are_counted_from_the_first_token():
    model, tokens = enable_index_top_k(choosing("qwen4_exp")), distinct(1, vocabulary=64)
    filled, padding = torch.nn.functional.pad(tokens, (3, 0)), (torch.arange(23) >= 3).long()[None]
    with torch.no_grad():
        alone = model(input_ids=tokens, use_cache=False).logits
        assert_close(model(input_ids=filled, attention_mask=padding, use_cache=False).logits[:, 3:], alone)
        model = choosing("qwen4_exp")
        model.set_attn_implementation("eager")
        assert_close(alone, model(input_ids=tokens, use_cache=False).logits)


def test_blocks_of_packed_sequences_are_refused():
    model = enable_index_top_k(choosing("qwen4_exp"))
    positions = torch.cat((torch.arange(12), torch.arange(8))).expand(2, -1)
    with pytest.raises(ValueError, match="position_ids: expected one sequence in each row for Qwen4's indexer"):
        model(input_ids=distinct(vocabulary=64), position_ids=positions, use_cache=False)
    hidden, beside_padding = torch.zeros(1, 4, 32), IntervalMask.documents(4, ids=torch.tensor([-1, 0, 0, 1])).to_tensor()
    angles = model.model.rotary_emb(hidden, torch.arange(4)[None])
    with pytest.raises(ValueError, match="position_ids: expected one sequence in each row for Qwen4's indexer"):
        model.model.layers[0].self_attn(hidden, angles, beside_padding)
    model = choosing("qwen4_exp")
    for layer in model.model.layers:
        layer.self_attn.indexer.compress_ratio = 3
    with pytest.raises(ValueError, match="indexer_compress_ratio: expected a power of two up to 128, got 3"):
        enable_index_top_k(model)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_lists_of_other_groups_than_key_heads(heads):
    """Eager attention takes as many lists as divide the query heads, of which there are 4, on 2 key heads."""
    model = choosing("minimax_m3_vl", index_n_heads=heads)
    found = []
    for implementation in ("eager", "dmattn"):
        model.set_attn_implementation(implementation)
        found.append(model(input_ids=distinct(vocabulary=64), use_cache=False).logits)
    assert_close(*found)


def test_blocks_of_a_row_with_packed_sequences_are_refused():
    """They count from the row's beginning, and the indexer compares them with positions."""
    model = choosing("minimax_m3_vl")
    model.set_attn_implementation("dmattn")
    positions = torch.cat((torch.arange(12), torch.arange(8))).expand(2, -1)
    with pytest.raises(ValueError, match="position_ids: expected one sequence in each row with block_indices"):
        model(input_ids=distinct(vocabulary=64), position_ids=positions, use_cache=False)


def test_a_model_without_such_an_indexer():
    with pytest.raises(ValueError, match="model: expected indexers of type"):
        enable_index_top_k(built("doge"))


def test_an_enabled_model_keeps_its_implementation():
    model = enable_index_top_k(choosing(ENABLED[0]))
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"attn_implementation: expected 'dmattn' after enable_index_top_k\(\), got 'eager'"):
        model(input_ids=distinct(vocabulary=64))
