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
from dmattn import IntervalMask, dynamic_mask_attention
from dmattn.nn import DynamicMaskAttention, ScoreRecipe
from dmattn.nn.attention import OLD_NAMES
from dmattn.renamed import renamed

Q, K, V = (torch.randn(2, heads, 12, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
SCORES = torch.randn(2, 2, 12, generator=torch.Generator().manual_seed(5))
ENDS = torch.tensor([0, 5, 12])
HIDDEN = torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(6))


# Calls with a value that is not the default under an old name: of a function, and of a class method below the decorator.
CALLS = {
    "dynamic_mask_attention": (lambda **o: dynamic_mask_attention(Q, K, V, SCORES, 3, **o), "sink", "sink_keys", 2),
    "documents": (lambda **o: IntervalMask.documents(12, ENDS, **o).to_bool(12, 12), "causal", "is_causal", False),
}


@pytest.mark.parametrize(("call", "old", "new", "value"), CALLS.values(), ids=CALLS)
def test_an_old_name_gives_the_same_and_warns_once(call, old, new, value):
    with pytest.warns(FutureWarning, match=f"^{old} is called {new} now") as warned:
        got = call(**{old: value})
    assert [warning.filename for warning in warned] == [__file__]
    assert torch.equal(got, call(**{new: value}))
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
    assert old not in dir(layer)
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


def old_names_of(source: str) -> set[tuple[str, str, str]]:
    """(function, old name, new name) of the decorated functions in a source; methods are called Class.method."""
    found = set()
    for outer in ast.walk(ast.parse(source)):
        for node in outer.body if isinstance(outer, ast.Module | ast.ClassDef) else ():
            for decorator in getattr(node, "decorator_list", ()):
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "renamed":
                    owner = f"{outer.name}." if isinstance(outer, ast.ClassDef) else ""
                    names = {keyword.arg: keyword.value for keyword in decorator.keywords}
                    known = names.keys() - {None, "into"}  # OLD_NAMES are OF_RECIPES
                    found |= {(owner + node.name, name, ast.literal_eval(names[name])) for name in known}
    return found


def test_which_functions_have_old_names():
    """What the decorator makes of them is tested above."""
    assert OF_RECIPES.keys() == OLD_NAMES.keys()
    folder = Path(dmattn.__file__).parent
    found = set().union(*(old_names_of(path.read_text()) for path in folder.rglob("*.py")))
    of_sinks = {
        "IntervalMask.streaming", "IntervalMask.top_k", "dynamic_mask_attention", "varlen_attention", "score_loss", "BoundedCache.__init__",
        "DynamicMaskAttention.__init__", "DynamicMaskAttention.recommended", "context_parallel_attention", "convert", "BoundedLayer.__init__",
    }  # fmt: skip
    of_causality = {"IntervalMask.documents", "IntervalMask.chunked", "IntervalMask.top_k", "document_masks", "top_k_masks"}
    assert found == {
        *((function, "sink", "sink_keys") for function in of_sinks),
        *((function, "causal", "is_causal") for function in of_causality),
        ("MultiheadAttention.__init__", "window", "sliding_window"),
        ("convert", "taught", "select_only"),
    }


def converted(**options):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    return importlib.import_module("dmattn.integrations.transformers").convert(model, 3, **options).eval()


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


def test_the_decorator_leaves_other_calls_alone():
    @renamed(old="new")
    def function(first, *, new=1, **others):
        """What it does."""
        return first, new, others

    assert function(1, new=2, more=3) == (1, 2, {"more": 3})
    assert (function.__name__, function.__doc__) == ("function", "What it does.")
