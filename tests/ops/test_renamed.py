"""Old names of arguments and attributes: the same results as with the new names, one warning, and an error if both are given."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import json
import operator
import pickle
from pathlib import Path

import dmattn
import pytest
import torch
from dmattn import BoundedCache, IntervalMask, dynamic_mask_attention, varlen_attention
from dmattn.distributed import context_parallel_attention
from dmattn.nn import DynamicMaskAttention, MultiheadAttention, ScoreRecipe, score_loss
from dmattn.nn.attention import OLD_NAMES
from dmattn.renamed import renamed

Q, K, V = (torch.randn(2, heads, 12, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
SCORES = torch.randn(2, 2, 12, generator=torch.Generator().manual_seed(5))
ENDS = torch.tensor([0, 5, 12])
HIDDEN = torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(6))


def seeded(make):
    """A layer's output with weights that depend on the seed alone."""

    def call(**options):
        torch.manual_seed(0)
        return make(**options)(HIDDEN)

    return call


def seen(make):
    return lambda **options: make(**options).to_bool(12, 12)


def varlen(**options):
    query, key = Q[0].transpose(0, 1).contiguous(), K[0].transpose(0, 1).contiguous()
    return varlen_attention(query, key, key, ENDS.int(), ENDS.int(), is_causal=True, local=2, **options)


def loss(**options):
    torch.manual_seed(0)
    return score_loss(Q, K, SCORES, **options)


def multihead(**options):
    torch.manual_seed(0)
    return MultiheadAttention(16, 2, batch_first=True, **options)(HIDDEN, HIDDEN, HIDDEN, need_weights=False)[0]


# What is called, an old name, the new one, and a value that is not the default.
ALIASES = {
    "streaming": (seen(lambda **o: IntervalMask.streaming(12, local=3, **o)), "sink", "sink_keys", 2),
    "documents": (seen(lambda **o: IntervalMask.documents(12, ENDS, **o)), "causal", "is_causal", False),
    "chunked": (seen(lambda **o: IntervalMask.chunked(12, 4, **o)), "causal", "is_causal", False),
    "top_k, causal": (seen(lambda **o: IntervalMask.top_k(SCORES, 3, **o)), "causal", "is_causal", False),
    "top_k, sink": (seen(lambda **o: IntervalMask.top_k(SCORES, 3, **o)), "sink", "sink_keys", 2),
    "dynamic_mask_attention": (lambda **o: dynamic_mask_attention(Q, K, V, SCORES, 3, **o), "sink", "sink_keys", 2),
    "varlen_attention": (varlen, "sink", "sink_keys", 1),
    "score_loss": (loss, "sink", "sink_keys", 2),
    "BoundedCache": (lambda **o: BoundedCache(1, 1, 2, 8, **o).position, "sink", "sink_keys", 3),
    "layer, sink": (seeded(lambda **o: DynamicMaskAttention(16, 2, 3, **o)), "sink", "sink_keys", 2),
    "recommended": (seeded(lambda **o: DynamicMaskAttention.recommended(16, 2, 8, **o)), "sink", "sink_keys", 2),
    "MultiheadAttention": (multihead, "window", "sliding_window", 2),
}


@pytest.mark.parametrize(("call", "old", "new", "value"), ALIASES.values(), ids=ALIASES)
def test_an_old_name_gives_the_same_and_warns_once(call, old, new, value):
    with pytest.warns(FutureWarning, match=f"^{old} is called {new} now") as warned:
        got = call(**{old: value})
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert torch.equal(got, call(**{new: value}))


@pytest.mark.parametrize(("call", "old", "new", "value"), ALIASES.values(), ids=ALIASES)
def test_both_names_are_refused(call, old, new, value):
    with pytest.raises(TypeError, match=f"^{new}, {old}: expected one of them, got both"):
        call(**{old: value, new: value})


def test_a_value_by_place_and_by_its_old_name_is_refused():
    with pytest.raises(TypeError, match=r"^is_causal, causal: expected one of them, got both"):
        IntervalMask.documents(12, ENDS, True, causal=True)


def test_compiled_and_exported_calls_take_old_names_without_a_graph_break():
    expected = dynamic_mask_attention(Q, K, V, SCORES, 3, sink_keys=2)

    class Call(torch.nn.Module):
        def forward(self, query, scores):
            return dynamic_mask_attention(query, K, V, scores, 3, sink=2)

    torch.testing.assert_close(torch.compile(Call(), fullgraph=True, backend="aot_eager")(Q, SCORES), expected)
    torch.testing.assert_close(torch.export.export(Call(), (Q, SCORES)).module()(Q, SCORES), expected)


# Old arguments of the layer, and values that are not the default.
OF_RECIPES = {
    "score": "linear", "select_only": True, "taught": True, "recency": 0.5, "local_heads": 1, "rotated_heads": 1, "score_queries": 9,
    "last_queries": 0.25, "sharp_queries": True, "explore": True,
}  # fmt: skip


@pytest.mark.parametrize(("old", "value"), OF_RECIPES.items(), ids=OF_RECIPES)
def test_old_arguments_of_the_layer_are_fields_of_its_recipe(old, value):
    new = OLD_NAMES[old]
    field = new.removeprefix("recipe.")
    with pytest.warns(FutureWarning, match=f"^{old} is called {new} now") as warned:
        layer = DynamicMaskAttention(16, 2, 3, local=2, **{old: value})
    assert [warning.filename for warning in warned] == [__file__]
    assert layer.recipe == ScoreRecipe.doge(**{field: value})
    with pytest.warns(FutureWarning, match=f"^{old} is called {new} now"):
        assert DynamicMaskAttention.recommended(16, 2, 8, **{old: value}).recipe == ScoreRecipe(**{field: value})
    with pytest.raises(TypeError, match=f"^{new}, {old}: expected one of them, got both"):
        DynamicMaskAttention(16, 2, 3, recipe=ScoreRecipe(), **{old: value})


def test_a_layer_and_one_of_old_arguments_are_the_same():
    assert len(inspect.signature(DynamicMaskAttention).parameters) == 14
    old = {"score": "linear", "select_only": True, "recency": 0.5, "local_heads": 1, "explore": True, "score_queries": 7}
    with pytest.warns(FutureWarning) as warned:
        layer = DynamicMaskAttention(16, 2, 3, local=2, **old)
    assert len(warned) == len(old)
    recipe = ScoreRecipe.doge(score="linear", select_only=True, recency=0.5, local_heads=1, explore=True, queries=7)
    other = DynamicMaskAttention(16, 2, 3, local=2, recipe=recipe)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(HIDDEN), layer(HIDDEN))
    assert (other.local_heads, other.rotated_heads) == (1, None)


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("sink", "sink_keys", 3), ("taught", "recipe.select_only", True), ("score_queries", "recipe.queries", 9),
        ("explore", "recipe.explore", True),
    ],
)  # fmt: skip
def test_attributes_of_layers_have_their_old_names_too(old, new, value):
    layer = DynamicMaskAttention(16, 2, 3, sink_keys=2)
    with pytest.warns(FutureWarning, match=f"^{old} is called {new} now"):
        assert getattr(layer, old) == operator.attrgetter(new)(layer)
    with pytest.warns(FutureWarning, match=f"^{old} is called {new} now"):
        setattr(layer, old, value)
    assert operator.attrgetter(new)(layer) == value
    with pytest.warns(FutureWarning):
        names = (layer.score_queries, layer.last_queries, layer.sharp_queries)
    assert names == operator.attrgetter("recipe.queries", "recipe.last", "recipe.sharp")(layer)


def test_layers_that_were_pickled_with_old_names_load():
    layer = DynamicMaskAttention(16, 2, 3, local=2, sink_keys=2, recipe=ScoreRecipe.doge(select_only=True, queries=9))
    old = copy.copy(layer)
    del old.__dict__["recipe"]
    old.__dict__ |= {"sink": old.__dict__.pop("sink_keys"), "taught": True, "score_queries": 9, "explore": False}
    loaded = pickle.loads(pickle.dumps(old))
    assert (loaded.sink_keys, loaded.recipe) == (2, layer.recipe)
    assert {"sink", "taught", "score_queries", "explore"}.isdisjoint(loaded.__dict__)
    assert torch.equal(loaded(HIDDEN), layer(HIDDEN))
    assert repr(loaded) == repr(layer)


def test_calls_over_several_ranks_take_the_old_name():
    """Without a group of ranks the call is refused, but its names are understood before."""
    with (
        pytest.warns(FutureWarning, match="^sink is called sink_keys now") as warned,
        pytest.raises(ValueError, match="group: expected"),
    ):
        context_parallel_attention(Q, K, V, scores=SCORES, window=3, sink=1)
    assert len(warned) == 1
    with pytest.raises(TypeError, match=r"^sink_keys, sink: expected one of them, got both"):
        context_parallel_attention(Q, K, V, scores=SCORES, window=3, sink=1, sink_keys=1)


def old_names_of(source: str) -> set[tuple[str, str]]:
    """(function, old name) of the decorated functions in a source; methods are called Class.method."""
    found = set()
    for outer in ast.walk(ast.parse(source)):
        for node in outer.body if isinstance(outer, ast.Module | ast.ClassDef) else ():
            for decorator in getattr(node, "decorator_list", ()):
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "renamed":
                    owner = f"{outer.name}." if isinstance(outer, ast.ClassDef) else ""
                    names = {keyword.arg for keyword in decorator.keywords} - {None, "into"}  # OLD_NAMES are OF_RECIPES
                    found |= {(owner + node.name, name) for name in names}
    return found


def test_no_alias_is_forgotten_here():
    assert OF_RECIPES.keys() == OLD_NAMES.keys()
    folder = Path(dmattn.__file__).parent
    assert set().union(*(old_names_of(path.read_text()) for path in folder.rglob("*.py"))) == {
        ("IntervalMask.streaming", "sink"), ("IntervalMask.documents", "causal"), ("IntervalMask.chunked", "causal"),
        ("IntervalMask.top_k", "causal"), ("IntervalMask.top_k", "sink"), ("dynamic_mask_attention", "sink"),
        ("varlen_attention", "sink"), ("score_loss", "sink"), ("BoundedCache.__init__", "sink"), ("document_masks", "causal"),
        ("top_k_masks", "causal"), ("DynamicMaskAttention.__init__", "sink"), ("DynamicMaskAttention.recommended", "sink"),
        ("MultiheadAttention.__init__", "window"), ("context_parallel_attention", "sink"),
        ("convert", "sink"), ("convert", "taught"), ("BoundedLayer.__init__", "sink"),
    }  # fmt: skip


def converted(**options):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    return importlib.import_module("dmattn.integrations.transformers").convert(model, 3, **options).eval()


@pytest.mark.parametrize(("old", "new", "value"), [("sink", "sink_keys", 2), ("taught", "select_only", True)])
def test_converted_models(old, new, value):
    tokens = torch.arange(8)[None]
    with pytest.warns(FutureWarning, match=f"^{old} is called {new} now") as warned:
        model = converted(**{old: value})
    assert len(warned) == 1
    assert model.config.dynamic_mask == converted(**{new: value}).config.dynamic_mask
    assert torch.equal(model(tokens).logits, converted(**{new: value})(tokens).logits)
    with pytest.raises(TypeError, match=f"^{new}, {old}: expected one of them, got both"):
        converted(**{old: value, new: value})
    with pytest.warns(FutureWarning, match=f"^{old} is called {new} now"):
        assert getattr(model.model.layers[0].self_attn, old) == value


def test_a_converted_model_that_was_saved_with_old_names_loads(tmp_path):
    model = converted(sink_keys=2, select_only=True)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    settings = saved["dynamic_mask"]
    settings["sink"], settings["taught"] = settings.pop("sink_keys"), settings.pop("select_only")
    (tmp_path / "config.json").write_text(json.dumps(saved))
    module = importlib.import_module("dmattn.integrations.transformers")
    loaded = module.load_converted(tmp_path).eval()
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    module.set_window(loaded, 2)
    assert loaded.config.dynamic_mask == model.config.dynamic_mask | {"window": 2}


def test_layers_of_caches():
    pytest.importorskip("transformers")
    layer_of = importlib.import_module("dmattn.integrations.transformers.cache").BoundedLayer
    with pytest.warns(FutureWarning, match="^sink is called sink_keys now") as warned:
        layer = layer_of(3, sink=2)
    assert len(warned) == 1
    assert (layer.sink_keys, copy.deepcopy(layer).sink_keys) == (2, 2)
    with pytest.raises(TypeError, match=r"^sink_keys, sink: expected one of them, got both"):
        layer_of(3, 0, 2, sink=2)


def test_the_decorator_leaves_other_calls_alone():
    @renamed(old="new")
    def function(first, *, new=1, **others):
        """What it does."""
        return first, new, others

    assert function(1, new=2, more=3) == (1, 2, {"more": 3})
    assert (function.__name__, function.__doc__) == ("function", "What it does.")
