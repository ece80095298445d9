"""Models of the Llama family converted to dynamic-mask attention: the same at first, fine-tuned like others, saved and loaded."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch._dynamo.testing
import transformers
from dmattn import IntervalMask
from dmattn.integrations.transformers import bounded_cache, convert, convert_indexed, load_converted, score_loss_of, set_window
from tiny_models import SIZES, distinct, padded, scattered
from torch.testing import assert_close
from transformers.models.doge.modeling_doge import DogeAttention

CONFIGS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
RECOMMENDED = {"local": 4, "sink_keys": 2, "local_heads": 1, "recency": 0.25, "score": "linear", "select_only": True}
ADDED = {"exp": ["A", "dt_proj.weight"], "linear": ["dt_proj.bias", "dt_proj.weight"]}


def built(name: str = "llama", **options):
    torch.manual_seed(0)
    config = CONFIGS[name](**SIZES | {"head_dim": 8, "sliding_window": None} | options)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def logits_of(model, tokens, mask=None) -> torch.Tensor:
    logits = model(input_ids=tokens, attention_mask=mask).logits
    return logits if mask is None else logits[mask.bool()]


# What is computed -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("mistral", {"local": 3, "sink_keys": 2}),
        ("qwen2", {"score": "linear"}),
        ("qwen3", RECOMMENDED | {"local": 20}),
    ],
)
def test_at_first_short_contexts_give_what_they_gave(name, options):
    model = built(name)
    for side in (None, "left", "right"):
        expected = logits_of(model, distinct(), padded(side))
        converted = convert(copy.deepcopy(model), 20, **options)
        assert_close(logits_of(converted, distinct(), padded(side)), expected)


@pytest.mark.parametrize(
    "options",
    [{"window": 6}, {"window": 4, "local": 2}, RECOMMENDED | {"window": 2, "local": 4, "sink_keys": 0, "local_heads": 0}],
    ids=str,
)
def test_at_first_the_window_slides(options):
    converted = convert(built("mistral"), **options)
    sliding = built("mistral", sliding_window=6)
    sliding.load_state_dict(converted.state_dict(), strict=False)
    tokens = torch.randint(3, 9, (2, 40), generator=torch.Generator().manual_seed(2))  # many equal ones
    assert_close(logits_of(converted, tokens), logits_of(sliding, tokens))


def test_a_converted_layer_is_that_of_doge():
    converted = scattered(convert(built("qwen3"), 5))
    layer = converted.model.layers[1].self_attn
    config = transformers.DogeConfig(**SIZES, head_dim=8, keep_window_size=5, attn_implementation="eager")
    doge = DogeAttention(config, 1)
    doge.load_state_dict(layer.state_dict())
    hidden = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(3))
    positions = converted.model.rotary_emb(hidden, torch.arange(20)[None])
    hidden_keys = torch.zeros(20, 20).masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), torch.finfo(torch.float32).min)
    expected = doge(hidden, positions, hidden_keys[None, None])[0]
    assert_close(layer(hidden, positions)[0], expected)


@pytest.mark.parametrize("options", [{"local": 3, "sink_keys": 2}, {"local": 3, "local_heads": 1}, RECOMMENDED], ids=str)
def test_a_layer_attends_to_what_its_settings_say(options):
    converted = scattered(convert(built(), 4, **options))
    layer = converted.model.layers[0].self_attn
    hidden = torch.randn(2, 30, 32, generator=torch.Generator().manual_seed(3))
    angles = converted.model.rotary_emb(hidden, torch.arange(30)[None])
    with torch.no_grad():
        query, key, value = (
            proj(hidden).unflatten(2, (-1, 8)).transpose(1, 2) for proj in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        query, key = transformers.models.llama.modeling_llama.apply_rotary_pos_emb(query, key, *angles)
        flat = value.transpose(1, 2).flatten(2)
        projected = layer.dt_proj(flat)
        scores = projected if layer.score == "linear" else torch.exp(layer.A * torch.nn.functional.softplus(projected))
        scores = scores.transpose(1, 2)
        ranks = scores if layer.log_slope is None else scores + layer.log_slope.exp()[:, None] * torch.arange(30.0)
        seen = IntervalMask.top_k(ranks, 4, local=layer.local, sink_keys=layer.sink_keys).to_bool(30, 30)
        streaming = IntervalMask.streaming(30, layer.sink_keys, layer.local).to_bool(30, 30)
        seen = torch.cat([streaming.expand(2, layer.local_heads, -1, -1), seen[:, layer.local_heads :]], 1)
        bias = torch.zeros_like(scores) if layer.select_only else scores
        mask = torch.where(seen, bias[:, :, None], -torch.inf).repeat_interleave(2, 1)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        assert_close(layer(hidden, angles)[0], layer.o_proj(out.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("options", [{"local": 3, "sink_keys": 2}, RECOMMENDED], ids=str)
def test_parts_and_packed_sequences_give_what_whole_ones_give(options):
    model, tokens = scattered(convert(built(), 4, **options)), distinct(1, 30)
    whole = logits_of(model, tokens)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        parts = [model(input_ids=part, past_key_values=cache).logits for part in tokens.split([14, 1, 1, 14], 1)]
        assert_close(torch.cat(parts, 1), whole)
        expected = torch.cat([model(input_ids=part).logits for part in tokens.split([12, 18], 1)], 1)
        positions = torch.cat([torch.arange(12), torch.arange(18)])[None]
        assert_close(model(input_ids=tokens, position_ids=positions, use_cache=False).logits, expected)


# Fine-tuning ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
def test_taught_scores_learn_from_a_loss_of_their_own(checkpointing):
    model, tokens = convert(built(), 4, **RECOMMENDED, score_queries=8).train(), distinct(2, 40)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    own = ("dt_proj.weight", "dt_proj.bias", "log_slope")
    names = [name for name, _ in model.named_parameters()]
    torch.manual_seed(5)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    gradients = dict(zip(names, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True), strict=True))
    assert all(x is not None for x in gradients.values())

    # The same by hand: without labels there is no loss to add to.
    torch.manual_seed(5)
    logits = model(input_ids=tokens, use_cache=False).logits
    taught = score_loss_of(model)
    plain = model.loss_function.loss(logits=logits, labels=tokens, vocab_size=256)
    assert_close(loss, plain + taught)
    for name, gradient in zip(
        names, torch.autograd.grad(plain, list(model.parameters()), allow_unused=True, retain_graph=True), strict=True
    ):
        if name.endswith(own):
            assert gradient is None
        else:
            assert_close(gradient, gradients[name])
    for name, gradient in zip(names, torch.autograd.grad(taught, list(model.parameters()), allow_unused=True), strict=True):
        assert (gradient is not None) == name.endswith(own)
    with torch.no_grad():
        evaluated = model.eval()(input_ids=tokens, labels=tokens).loss
    assert_close(evaluated, plain)


def test_the_loss_of_accumulated_parts_is_that_of_the_whole():
    """A trainer divides each part's sum by the number of all labels; the score losses are weighted alike."""
    model, tokens = convert(built(), 40, **RECOMMENDED, score_queries=64).train(), distinct(2, 33)
    labels = tokens.clone()
    labels[0, :17] = -100

    def taught(part, **options):
        torch.manual_seed(6)
        loss = model(input_ids=tokens[part], labels=labels[part], **options).loss
        torch.manual_seed(6)
        logits = model(input_ids=tokens[part]).logits
        alone = score_loss_of(model)
        return loss - model.loss_function.loss(logits=logits, labels=labels[part], vocab_size=256, **options), alone

    for part, share in ((slice(0, 1), 16 / 48), (slice(1, 2), 32 / 48)):
        added, alone = taught(part, num_items_in_batch=torch.tensor(48))
        assert_close(added, alone * share)


def test_the_score_loss_of_an_earlier_pass_is_not_added():
    """A pass with keys of a cache teaches no scores, and says so also where the pass before it did."""
    model, inputs = convert(built(), 4, **RECOMMENDED).train(), distinct()
    cache = model(input_ids=inputs[:, :5]).past_key_values
    with pytest.raises(ValueError, match="got no score loss from layer 0"):
        model(input_ids=inputs[:, 5:], past_key_values=cache, labels=inputs[:, 5:])


def test_training_compiles_in_one_graph():
    model = convert(built(), 4, **RECOMMENDED, score_queries=8).train()
    inputs = {"input_ids": distinct(), "attention_mask": padded("left"), "labels": distinct(), "use_cache": False}
    torch.manual_seed(7)
    expected = model(**inputs).loss
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    torch.manual_seed(7)
    loss = torch.compile(model, fullgraph=True, backend="eager")(**inputs).loss
    loss.backward()
    assert_close(loss, expected)
    assert_close([parameter.grad for parameter in model.parameters()], gradients)


@pytest.mark.long
@pytest.mark.parametrize("options", [{"local": 3}, RECOMMENDED], ids=["plain", "recommended"])
def test_windows_that_change_compile_twice(options):
    """Once for the first window and once for all others, and torch's setting is as it was."""
    model, tokens = convert(built(), 20, **options), distinct()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        for window in (20, 16, 12, 10, 9, 8, 7, 6, 5, 4):
            set_window(model, window)
            assert_close(compiled(input_ids=tokens, use_cache=False).logits, model(input_ids=tokens, use_cache=False).logits)
    assert counter.frame_count == 2
    assert not torch._dynamo.config.allow_unspec_int_on_nn_module


def test_eager_calls_leave_the_settings_of_dynamo_alone(monkeypatch):
    monkeypatch.setattr(torch._dynamo, "patch_dynamo_config", None)
    convert(built(), 20, local=3)(input_ids=distinct(), use_cache=False)


def with_lora(model):
    return pytest.importorskip("peft").get_peft_model(
        model, pytest.importorskip("peft").LoraConfig(target_modules=["q_proj", "dt_proj"], r=2, init_lora_weights=False)
    )


@pytest.mark.parametrize(
    ("convert_to", "named", "teaching"),
    [
        (lambda model: convert(model, 4, **RECOMMENDED), "dt_proj.weight", {"target_modules": ["v_proj", "dt_proj"]}),
        (
            lambda model: convert_indexed(model, 4),
            "indexer.slope",
            {"target_modules": ["v_proj"], "modules_to_save": ["indexer"]},
        ),
    ],
    ids=["convert", "convert_indexed"],
)
def test_frozen_scores_are_named(convert_to, named, teaching):
    """peft freezes all that its config does not name. The model then trains without the scores, and says so."""
    peft, tokens = pytest.importorskip("peft"), distinct()
    model = peft.get_peft_model(convert_to(built()), peft.LoraConfig(target_modules=["v_proj"], r=2)).train()
    with pytest.warns(UserWarning, match=rf"what selects keys does not learn: .*{named}.* frozen .*LoraConfig\("):
        loss = model(input_ids=tokens, labels=tokens).loss
    model(input_ids=tokens, use_cache=False)
    with pytest.raises(ValueError, match=rf"expected scores that learn, but .*{named}.* of layer 0 are frozen"):
        score_loss_of(model)
    logits = model(input_ids=tokens, use_cache=False).logits
    plain = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    if named == "dt_proj.weight":  # lists of queries that teach are drawn anew
        assert_close(loss, plain)
    model = peft.get_peft_model(convert_to(built()), peft.LoraConfig(r=2, **teaching)).train()
    model(input_ids=tokens, use_cache=False)
    score_loss_of(model).backward()


@pytest.mark.parametrize("convert_to", [convert, convert_indexed])
@pytest.mark.parametrize("is_two_turns", [False, True])
def test_padding_between_tokens_is_refused_where_positions_count(convert_to, is_two_turns):
    """A second turn behind a padded first one: columns of a row are no positions any more."""
    model, tokens, padding = convert_to(built(), 4, local=3).eval(), distinct(2, 12), torch.ones(2, 12, dtype=torch.int64)
    padding[0, 5:8] = 0
    cache = None
    with torch.no_grad():
        if is_two_turns:
            cache = model(input_ids=tokens[:, :8], attention_mask=padding[:, :8], use_cache=True).past_key_values
            tokens = tokens[:, 8:]
        with pytest.raises(ValueError, match="attention_mask: expected padding on one side of each row"):
            model(input_ids=tokens, attention_mask=padding, past_key_values=cache)
        plain = convert_to(built(), 4).eval()
        assert plain(input_ids=distinct(2, 12), attention_mask=padding).logits.isfinite().all()
    if convert_to is convert:
        row = model(input_ids=distinct(2, 12)[:1, padding[0].bool()]).logits
        given = {"input_ids": distinct(2, 12), "attention_mask": padding, "position_ids": padding.cumsum(1) - 1}
        with torch.no_grad():
            assert_close(model(**given, past_key_values=bounded_cache(model)).logits[:1, padding[0].bool()], row)


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    "wrap",
    [compiled, with_lora, lambda model: compiled(with_lora(model)), lambda model: with_lora(compiled(model))],
    ids=["compiled", "LoRA", "compiled LoRA", "LoRA of compiled"],
)
def test_wrapped_models(wrap):
    """set_window, score_loss_of and bounded_cache reach the model in what torch.compile and peft make of it."""
    model, inputs = convert(built(), 9, **RECOMMENDED, score_queries=8), distinct()
    wrapped = wrap(model).train()
    assert set_window(wrapped, 4) is wrapped
    assert model.config.dynamic_mask["window"] == 4 == model.model.layers[0].self_attn.window
    wrapped(input_ids=inputs, use_cache=False)
    score_loss_of(wrapped).backward()
    wrapped.eval()
    with torch.no_grad():
        out = wrapped(input_ids=inputs, past_key_values=bounded_cache(wrapped), use_cache=True).logits
        assert_close(out, wrapped(input_ids=inputs, use_cache=False).logits)
    for refused in (torch.compile(torch.nn.Linear(2, 2)), "model"):
        with pytest.raises(TypeError, match=r"model: expected a transformers.PreTrainedModel, got (OptimizedModule|str)"):
            set_window(refused, 4)


def test_trainer(tmp_path):
    pytest.importorskip("accelerate")
    model = convert(built(), 4, **RECOMMENDED, score_queries=8)
    before = copy.deepcopy(model.state_dict())
    rows = [{"input_ids": row, "labels": row} for row in distinct(8, 24)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-3, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:2])
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.save_model(str(tmp_path / "saved"))
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == set(before)
    assert_close(logits_of(load_converted(tmp_path / "saved").eval(), distinct()), logits_of(model.eval(), distinct()))


# Saved and loaded -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {"local": 3, "sink_keys": 2, "bounded_cache": True, "rewind": 5}) for name in CONFIGS] + [("llama", RECOMMENDED)],
)
def test_saved_and_loaded(name, options, tmp_path):
    plain = built(name)
    model = scattered(convert(copy.deepcopy(plain), 4, **options))
    score = options.get("score", "exp")
    added = ADDED[score] + (["log_slope"] if "recency" in options else [])
    names = {f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in added}
    assert set(model.state_dict()) == set(plain.state_dict()) | names
    model.save_pretrained(tmp_path)
    loaded = load_converted(tmp_path).eval()
    assert type(loaded) is type(model)
    assert type(loaded.model.layers[1].self_attn) is type(model.model.layers[1].self_attn)
    assert loaded.config.dynamic_mask == model.config.dynamic_mask
    assert torch.equal(logits_of(loaded, distinct()), logits_of(model, distinct()))
    assert loaded.model.layers[0].self_attn.cache_rewind == options.get("rewind")
    assert (type(loaded.loss_function).__name__ == "LossWithScores") == options.get("select_only", False)
    assert loaded.loss_type == model.loss_type == "ForCausalLM"
    lower = load_converted(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in lower.parameters()} == {torch.bfloat16}
    by_hand = convert(copy.deepcopy(plain), **model.config.dynamic_mask)
    by_hand.load_state_dict(model.state_dict())
    assert torch.equal(logits_of(by_hand, distinct()), logits_of(model, distinct()))


BOTH_KINDS = pytest.mark.parametrize("convert_to", [convert, convert_indexed])


def configs_of(model) -> list:
    return [
        value for part in model.modules() for value in vars(part).values() if isinstance(value, transformers.PreTrainedConfig)
    ]


@BOTH_KINDS
def test_a_shared_config_stays_as_it_was(convert_to):
    plain = built(attn_implementation="eager")
    shared = plain.config
    before, places = copy.deepcopy(shared), len(configs_of(plain))
    other = transformers.LlamaForCausalLM(shared).eval()
    expected = logits_of(other, distinct())
    generation_config = plain.generation_config
    with pytest.raises((TypeError, ValueError), match="window: expected"):
        convert_to(plain, -1)
    assert all(config is shared for config in configs_of(plain))
    model = convert_to(plain, 4)
    own = model.config
    assert shared.to_dict() == before.to_dict()
    assert (shared._attn_implementation, own._attn_implementation) == ("eager", "dmattn")
    assert own is not shared
    assert len(configs_of(model)) == places
    assert all(config is own for config in configs_of(model))
    assert model.generation_config is generation_config
    assert torch.equal(logits_of(other, distinct()), expected)
    assert model.generate(distinct(), max_new_tokens=2).shape == (2, 22)


def test_configs_in_configs_are_copied_once():
    """A model of text and images holds its language model's config twice: in that model, and in its own config."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    shared = transformers.LlavaConfig(vision_config=vision, text_config=transformers.LlamaConfig(**SIZES), image_token_index=255)
    model = convert(transformers.LlavaForConditionalGeneration(shared), 4)
    language = model.model.language_model
    assert language.config is model.config.text_config is language.layers[0].self_attn.config
    assert language.config is not shared.text_config
    assert model.config.dynamic_mask == language.config.dynamic_mask
    for config in (shared, shared.text_config):
        assert not hasattr(config, "dynamic_mask")
    assert logits_of(model, distinct()).shape == (2, 20, 256)


@BOTH_KINDS
def test_weights_whose_names_transformers_changes_are_loaded(convert_to, tmp_path):
    """Llava's output weights are saved under another name than they have, which transformers undoes for its own classes alone."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    text = transformers.LlamaConfig(**SIZES)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=255, tie_word_embeddings=False)
    model = convert_to(transformers.LlavaForConditionalGeneration(config), 4).eval()
    model.save_pretrained(tmp_path)
    loaded, told = load_converted(tmp_path, output_loading_info=True)
    assert not any(told.values())
    assert torch.equal(logits_of(loaded.eval(), distinct()), logits_of(model, distinct()))


@BOTH_KINDS
def test_models_of_one_config_are_loaded_as_what_they_were(convert_to, tmp_path):
    """Whether the config that they share is a plain one, or one that a saved model of the other kind had."""
    config = built().config
    first = (convert_indexed if convert_to is convert else convert)(transformers.LlamaForCausalLM(config), 4)
    for given in (config, first.config):
        model = convert_to(transformers.LlamaForCausalLM(given), 4).eval()
        model.save_pretrained(tmp_path)
        loaded = load_converted(tmp_path).eval()
        assert type(loaded.model.layers[0].self_attn) is type(model.model.layers[0].self_attn)
        assert torch.equal(logits_of(loaded, distinct()), logits_of(model, distinct()))
    model.config.dynamic_mask = model.config.indexed_attention = {"window": 4}
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="path: expected a config with the record of one conversion, got both 'dynamic_mask' and"
    ):
        load_converted(tmp_path)


@BOTH_KINDS
def test_settings_in_a_config_that_do_not_suffice_are_refused(convert_to, tmp_path):
    model = convert_to(built(), 4)
    field = "dynamic_mask" if convert_to is convert else "indexed_attention"
    settings = getattr(model.config, field)
    missing = "config: expected all settings of a conversion in its '{}', got .*, which lacks {}"
    for damaged, message in (
        ({name: settings[name] for name in settings if name != "local"}, missing.format(field, "local$")),
        ([4], missing.format(field, "window, local")),
        (settings | {"window": "4"}, "window: expected"),
    ):
        setattr(model.config, field, damaged)
        model.save_pretrained(tmp_path)
        with pytest.raises((TypeError, ValueError), match=message):
            load_converted(tmp_path)


@BOTH_KINDS
@pytest.mark.parametrize("use_cache", [True, False])
def test_after_labels_the_score_loss_is_in_the_loss(convert_to, use_cache):
    options = {"select_only": True} if convert_to is convert else {}
    model, tokens = convert_to(built(), 4, **options).train(), distinct()
    model(input_ids=tokens, labels=tokens, use_cache=use_cache).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    made = r"convert\(select_only=True\)" if convert_to is convert else r"convert_indexed\(\)"
    with pytest.raises(ValueError, match=rf"after {made}, .* a pass with labels adds the score loss to \.loss by itself"):
        score_loss_of(model)


def test_copied_and_pickled_after_training():
    model, tokens = convert(built(), 4, **RECOMMENDED).train(), distinct()
    model(input_ids=tokens).logits.sum().backward()  # the score loss has not been taken
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.loss_function.model is other
        assert_close(logits_of(other.eval(), tokens), logits_of(model.eval(), tokens))
        with pytest.raises(ValueError, match="got no score loss from layer 0"):
            score_loss_of(other)


# What is refused ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window: expected"),
        ({"window": 1.5}, "window: expected a positive int"),
        ({"local": -1}, "local: expected"),
        ({"sink_keys": True}, "sink_keys: expected an int"),
        ({"local_heads": 1}, "local_heads: expected fewer than the 2 key heads, and local > 0, got 1 with local=0"),
        ({"local_heads": 2, "local": 3}, "local_heads: expected fewer than the 2 key heads"),
        ({"recency": 0.25}, "recency: expected None, or a number > 0 with select_only=True, got 0.25 with select_only=False"),
        ({"recency": 0.0, "select_only": True}, "recency: expected"),
        ({"score": "log"}, "score: expected 'exp' or 'linear', got 'log'"),
        ({"select_only": 1}, "select_only: expected a bool"),
        ({"score_queries": 0}, "score_queries: expected"),
        ({"bounded_cache": None}, "bounded_cache: expected a bool"),
        ({"rewind": -1}, "rewind: expected"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_are_refused(options, message):
    model = built()
    before = set(model.state_dict())
    with pytest.raises((TypeError, ValueError), match=message):
        convert(model, **{"window": 4} | options)
    assert set(model.state_dict()) == before
    assert not hasattr(model.config, "dynamic_mask")


def test_models_that_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"model: expected layers that do not slide, got config.sliding_window=4: .*sliding_window = None first"
    ):
        convert(built("mistral", sliding_window=4), 4)
    qwen = built("qwen3", sliding_window=4, use_sliding_window=True, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(ValueError, match="model: expected layers that do not slide"):
        convert(qwen, 4)
    with pytest.raises(
        ValueError, match="model: expected a model with dense attention, got LlamaForCausalLM with dmattn's selection already"
    ):
        convert(convert(built(), 4), 4)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    with pytest.raises(ValueError, match=r"model: expected layers of type LlamaAttention, .* got none in BertModel"):
        convert(transformers.BertModel(transformers.BertConfig(vocab_size=64, **sizes)), 4)
    with pytest.raises(TypeError, match=r"model: expected a transformers.PreTrainedModel, got Linear"):
        convert(torch.nn.Linear(2, 2), 4)
    built().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"path: expected a model saved after convert\(\) or convert_indexed\(\), got a config with neither"
    ):
        load_converted(tmp_path)
    with pytest.raises(ValueError, match="model: expected layers with dmattn's selection"):
        set_window(built(), 4)
    with pytest.raises(ValueError, match="window: expected"):
        set_window(convert(built(), 4), 0)
    both_ways = built()
    both_ways.config.is_causal = False
    with pytest.raises(ValueError, match=r"model: expected config.is_causal=True, got False"):
        convert(both_ways, 4)
    taught = convert(built(), 4, **RECOMMENDED)
    with pytest.raises(ValueError, match="got no score loss from layer 0"):
        score_loss_of(taught)
    with pytest.raises(ValueError, match="output_attentions: expected False"):
        taught(input_ids=distinct(), output_attentions=True)
