"""Models of the Llama family converted to attention whose queries choose their keys: the same at first, taught, generating, saved."""

from __future__ import annotations

import contextlib
import copy

import dmattn
import pytest
import torch
import transformers
from dmattn.integrations.transformers import bounded_cache, convert_indexed, load_converted, score_loss_of, set_dense, set_window
from test_transformers_convert import built, logits_of
from tiny_models import distinct, padded
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

SMALL = {"index_heads": 2, "index_dim": 8, "score_queries": 16}
OPTIONS = [
    {"local": 3, "sink_keys": 1},
    {"groups": 1, "block_size": 2},
    {"local": 2, "block_size": 2, "block_score": "mean_key"},
]


def converted_of(name="llama", window=4, **options):
    return convert_indexed(built(name), window, **SMALL, **options).eval()


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_at_first_short_contexts_give_what_they_gave(name):
    for side in (None, "left", "right"):
        expected = logits_of(built(name), distinct(), padded(side))
        assert_close(logits_of(converted_of(name, 20), distinct(), padded(side)), expected)
        dense = set_dense(converted_of(name, 4), True)
        assert_close(logits_of(dense, distinct(), padded(side)), expected)


@pytest.mark.parametrize("options", [{"block_score": "max"}, {"block_score": "mean_key", "local": 4}], ids=str)
def test_at_first_blocks_give_what_keys_gave(options):
    expected = logits_of(built("llama"), distinct())
    assert_close(logits_of(converted_of(window=20, block_size=4, **options), distinct()), expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_layer_attends_to_what_its_indexer_chooses(options):
    model = converted_of(**options)
    layer = model.model.layers[0].self_attn
    hidden = torch.randn(2, 30, 32, generator=torch.Generator().manual_seed(3))
    angles = model.model.rotary_emb(hidden, torch.arange(30)[None])
    with torch.no_grad():
        query, key, value = (
            proj(hidden).unflatten(2, (-1, 8)).transpose(1, 2) for proj in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *angles)
        lists = layer.indexer.select(hidden)
        assert lists.shape[1] == (1 if "groups" in options else 2)
        seen = lists.to_bool(30, 30)
        assert not seen.all(2).all()
        mask = seen.expand(-1, 2, -1, -1).repeat_interleave(2, 1)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        assert_close(layer(hidden, angles)[0], layer.o_proj(out.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_parts_and_packed_sequences_give_what_whole_ones_give(options):
    model, tokens = converted_of(**options), distinct(1, 30)
    whole = logits_of(model, tokens)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        parts = [model(input_ids=part, past_key_values=cache).logits for part in tokens.split([14, 1, 1, 14], 1)]
        assert_close(torch.cat(parts, 1), whole)
        if options.get("sink_keys"):
            return  # sinks are the first keys of the row
        expected = torch.cat([model(input_ids=part).logits for part in tokens.split([12, 18], 1)], 1)
        positions = torch.cat([torch.arange(12), torch.arange(18)])[None]
        packed = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        if options.get("block_size", 1) == 1 or 12 % options["block_size"] == 0:
            assert_close(packed, expected)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("beams", [1, 3])
def test_generation_is_that_of_the_whole_context(cache, beams):
    model, tokens = converted_of(local=2), distinct(2, 12)
    how = {"max_new_tokens": 10, "do_sample": False, "num_beams": beams}
    expected = model.generate(tokens, use_cache=False, **how)
    assert torch.equal(model.generate(tokens, cache_implementation=cache, **how), expected)


def test_padding_on_the_left_does_not_change_what_is_generated():
    model, tokens = converted_of(local=2), distinct(1, 12)
    how = {"max_new_tokens": 8, "do_sample": False}
    alone = model.generate(tokens, **how)[:, 12:]
    filled = torch.cat([torch.zeros_like(tokens[:, :5]), tokens], 1)
    mask = (torch.arange(17) >= 5).long()[None]
    assert torch.equal(model.generate(filled, attention_mask=mask, **how)[:, 17:], alone)


@pytest.mark.parametrize(
    ("options", "padding", "is_same"),
    [
        ({"local": 2}, 3, True),
        ({"block_size": 2}, 4, True),
        ({"block_size": 2}, 3, False),
        ({"sink_keys": 2}, 4, False),
    ],
    ids=str,
)
def test_sinks_and_blocks_count_from_the_beginning_of_the_row(options, padding, is_same):
    model, tokens = converted_of(**options), distinct(1, 30)
    filled = torch.cat([torch.zeros_like(tokens[:, :padding]), tokens], 1)
    mask = (torch.arange(30 + padding) >= padding).long()[None]
    with contextlib.nullcontext() if is_same else pytest.raises(AssertionError, match="not close"):
        assert_close(logits_of(model, filled, mask), logits_of(model, tokens)[0])


def test_weights_are_loaded_into_a_model_of_another_window():
    """As the error of set_window says."""
    model = converted_of(window=4)
    wider = converted_of(window=20)
    wider.load_state_dict(model.state_dict())
    assert_close(logits_of(wider, distinct()), logits_of(built(), distinct()))
    assert not torch.equal(logits_of(wider, distinct()), logits_of(model, distinct()))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_indexers_alone_learn_from_their_loss(checkpointing):
    model, tokens = converted_of(local=2).train(), distinct(2, 40)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(5)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    torch.manual_seed(5)
    logits = model(input_ids=tokens, use_cache=False).logits
    taught = score_loss_of(model)
    plain = model.loss_function.loss(logits=logits, labels=tokens, vocab_size=256)
    assert_close(loss, plain + taught)
    names, parameters = zip(*model.named_parameters(), strict=True)
    for loss, is_own in ((plain, False), (taught, True)):
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
        for name, gradient in zip(names, gradients, strict=True):
            assert (gradient is not None) == ((".indexer." in name) == is_own), name


def test_a_pass_without_a_loss_leaves_none_of_an_earlier_pass():
    model, tokens = converted_of().train(), distinct(1, 12)
    cache = transformers.DynamicCache(config=model.config)
    for part in tokens.split([8, 4], 1):
        model(input_ids=part, past_key_values=cache)
    with pytest.raises(ValueError, match="got no score loss from layer 0"):
        score_loss_of(model)


def test_a_dense_stage_teaches_the_indexers_what_the_sparse_one_reads():
    """The two stages of DeepSeek's: with the indexers trained alone, the sparse model is nearer to the dense one than it was."""
    model, tokens = set_dense(converted_of(window=8).train(), True), distinct(8, 60)
    original = built()
    with torch.no_grad():
        for layer, theirs in zip(model.model.layers, original.model.layers, strict=True):
            for each in (layer, theirs):
                each.self_attn.q_proj.weight.mul_(3)
    dense = logits_of(original, tokens)
    own = [parameter for name, parameter in model.named_parameters() if ".indexer." in name]
    before = {name: p.clone() for name, p in model.state_dict().items()}

    def distance():
        sparse = logits_of(set_dense(model.eval(), False), tokens)
        set_dense(model.train(), True)
        return (sparse - dense).square().mean().item()

    far, optimizer = distance(), torch.optim.Adam(own, lr=5e-3)
    for _ in range(150):
        score = model(input_ids=tokens, labels=tokens, use_cache=False)
        optimizer.zero_grad()
        score.loss.backward()
        optimizer.step()
    assert distance() < 0.8 * far
    for name, p in model.state_dict().items():
        assert (".indexer." in name) or torch.equal(p, before[name])


def test_what_is_saved_is_loaded(tmp_path):
    model = converted_of("qwen3", local=2, block_size=2)
    model.save_pretrained(tmp_path)
    loaded = load_converted(tmp_path).eval()
    assert type(loaded) is type(model)
    assert set(loaded.state_dict()) == set(model.state_dict())
    assert torch.equal(logits_of(loaded, distinct()), logits_of(model, distinct()))
    again = copy.deepcopy(loaded)
    assert torch.equal(logits_of(again, distinct()), logits_of(model, distinct()))


def test_a_model_that_reads_all_keys_is_saved_so(tmp_path):
    model = set_dense(converted_of(), True).eval()
    model.save_pretrained(tmp_path)
    loaded = load_converted(tmp_path).eval()
    assert torch.equal(logits_of(loaded, distinct()), logits_of(model, distinct()))
    sparse = logits_of(set_dense(model, False), distinct())
    assert not torch.equal(logits_of(loaded, distinct()), sparse)
    assert torch.equal(logits_of(set_dense(loaded, False), distinct()), sparse)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 5, "block_size": 2}, "window: expected a multiple of block_size=2"),
        ({"groups": 2}, "groups: expected 'heads' or 1"),
        ({"groups": 1, "index_dim": 9}, "index_dim: expected a multiple of the 2 key heads"),
        ({"index_dim": 12}, "index_dim: expected a multiple of 8"),
        ({"index_heads": 129}, "index_heads: expected at most 128"),
        ({"block_size": 3, "window": 6}, "block_size: expected a power of two"),
        ({"block_score": "mean"}, "block_score: expected 'max' or 'mean_key'"),
        ({"window": 0}, "window"),
        ({"score_queries": 0}, "score_queries"),
    ],
)
def test_conversions_that_cannot_be(options, words):
    """They are refused before anything has changed."""
    model = built()
    config = model.config
    with pytest.raises(ValueError, match=words):
        convert_indexed(model, **{"window": 4, **SMALL, **options})
    assert model.config is config
    assert not hasattr(config, "indexed_attention")


def test_calls_that_cannot_be():
    model = converted_of()
    with pytest.raises(ValueError, match="got one whose queries choose among all keys"):
        bounded_cache(model)
    with pytest.raises(
        ValueError, match=r"converted by convert\(\), .* by convert_indexed\(\), whose window stays; for another one"
    ):
        set_window(model, 5)
    with pytest.raises(ValueError, match=r"converted by convert_indexed\(\)"):
        set_dense(dmattn.integrations.transformers.convert(built(), 4), True)
    with pytest.raises(TypeError, match="dense: expected a bool"):
        set_dense(model, 1)
    with pytest.raises(ValueError, match="with dmattn's selection already"):
        convert_indexed(model, 4)
    early = transformers.StaticCache(model.config, max_cache_len=16)
    early.early_initialization(1, 2, 8, torch.float32, torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"past_key_values: expected keys of size 16, .* got 8; a static cache has to initialize itself"
    ):
        model(distinct()[:1, :4], past_key_values=early)
