"""Conversion of models that are trained already: dense attention of the Llama family becomes dynamic-mask attention, to be fine-tuned."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from dmattn import checks
from dmattn.integrations.transformers.cache import REWIND
from dmattn.integrations.transformers.indexed import (
    INDEXED,
    INDEXED_FIELD,
    IndexedSelectingAttention,
    add_indexer,
    check_index_settings,
)
from dmattn.integrations.transformers.layers import (
    SelectingAttention,
    check_layer,
    check_model,
    converted,
    selecting_layers,
    unwrapped,
)
from dmattn.nn.scores import initial_slopes
from dmattn.renamed import renamed, with_new_names

M = TypeVar("M", bound=PreTrainedModel)
W = TypeVar("W", bound=nn.Module)  # a model, or what torch.compile or peft made of it

FIELD = "dynamic_mask"
"""The field of a model's config that holds what :func:`convert` was told."""

SCORES = ("dt_proj", "A", "log_slope", "indexer")  # what a score loss teaches, in a layer

# What a loader passes on to find the config where it finds the weights.
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")


CONVERTED = converted(SelectingAttention, "DynamicMask", globals())


@renamed(sink="sink_keys", taught="select_only")
def convert(
    model: M,
    window: int,
    *,
    local: int = 0,
    sink_keys: int = 0,
    local_heads: int = 0,
    recency: float | None = None,
    score: Literal["exp", "linear"] = "exp",
    select_only: bool = False,
    score_queries: int = 64,
    bounded_cache: bool = False,
    rewind: int = REWIND,
) -> M:
    """Makes a trained model's attention dynamic-mask attention, in place: each query then sees the ``window`` best-scored keys.

    The weights stay, and every layer gets a score of its keys' values. At first all scores are equal. So the window slides, and on
    contexts of up to ``window`` tokens the model computes what it did. Fine-tuning teaches the scores which keys to keep.

    The state dict has, in each layer's ``self_attn``, these more: ``dt_proj.weight`` [Hkv, Hkv * D]; with score="exp" ``A`` [Hkv]; with
    score="linear" ``dt_proj.bias`` [Hkv]; with recency ``log_slope`` [Hkv]. The config says the rest (``config.dynamic_mask``), so
    ``save_pretrained`` saves all, and :func:`load_converted` loads it. The model gets a copy of its
    config, and the one it had stays as it was.

    Args:
        model: a transformers model with attention of Llama, Mistral, Qwen2 or Qwen3, without sliding layers.
        window: keys each query selects at most; 0 is allowed with local or sink_keys.
        local: latest keys that every query sees whatever their scores.
        sink_keys: first keys of each sequence that every query sees whatever their scores.
        local_heads: how many key heads, the first ones, fewer than there are, see the local keys and the sinks alone.
        recency: if given, every key head ranks keys by their score plus ``slope * position``, which favours late ones. This is the first
            head's slope at first; the others follow geometrically down to a 2048th of it. Only with select_only: other than in
            :class:`dmattn.nn.DynamicMaskAttention` it is not added to the logits, since the model knows positions already.
        score: "exp", the Doge model's ``exp(A * softplus(dt_proj(v)))`` with A = 0 at first; or "linear", ``dt_proj(v)``, zero at first.
        select_only: if True, scores select only: they are not added to the logits, and in training ``model(...).loss`` has the mean of the
            layers' :func:`dmattn.nn.score_loss` added, which is all that teaches them (and the slopes). If False they are added to the
            logits and learn from that.
        score_queries: number of queries that look at all keys for that loss.
        bounded_cache, rewind: as in :func:`enable_dynamic_mask_attention`.

    Returns:
        model.

    Raises:
        TypeError: model is no transformers model, or an argument of a wrong type.
        ValueError: no such layers, sliding ones, ones that were converted before, or arguments out of range or that do not go together.
    """
    settings = {
        "window": window, "local": local, "sink_keys": sink_keys, "local_heads": local_heads, "recency": recency, "score": score,
        "select_only": select_only, "score_queries": score_queries, "bounded_cache": bounded_cache, "rewind": rewind,
    }  # fmt: skip
    return _convert(model, settings, FIELD)


def convert_indexed(
    model: M,
    window: int,
    *,
    local: int = 0,
    sink_keys: int = 0,
    groups: int | Literal["heads"] = "heads",
    index_heads: int = 4,
    index_dim: int = 32,
    block_size: int = 1,
    block_score: Literal["max", "mean_key"] = "max",
    score_queries: int = 256,
) -> M:
    """Makes a trained model's attention one whose queries choose their keys, in place: each reads the ``window`` keys that an indexer chooses.

    The weights stay, and every layer gets an indexer of its hidden states, whose parameters have ``.indexer.`` in their names. In training
    ``model(...).loss`` has the mean of the layers' losses of indexers added (:func:`dmattn.index_loss`); nothing else teaches them, and they
    teach nothing else. On contexts of up to ``window`` tokens the model computes what it did, with ``block_score="mean_key"`` if local is at
    least block_size: otherwise a query misses keys of the block it stands in. As DeepSeek's sparse attention was made:

    1. ``set_dense(model, True)``, and train the indexers alone: all keys are read, and nothing else changes;
    2. ``set_dense(model, False)``, and fine-tune all.

    ``save_pretrained`` saves all, and :func:`load_converted` loads it. Generation takes any cache of transformers' that keeps all keys: index
    keys lie in it next to the keys. The model gets a copy of its config, as by :func:`convert`.

    Sinks are the first places of each row, and blocks count from the row's beginning. So with left padding the sinks are padding and blocks
    begin elsewhere: with sink_keys > 0 or block_size > 1 a left-padded row may compute something else than the row alone.

    Args:
        model: a transformers model with attention of Llama, Mistral, Qwen2 or Qwen3, without sliding layers.
        window: keys each query selects at most, a multiple of block_size.
        local, sink_keys: latest keys that every query sees, and first keys of each row.
        groups: "heads", a list for each key head, or 1, one for all; then index_dim is a multiple of the number of key heads.
        index_heads, index_dim, block_size, block_score: as of :class:`dmattn.nn.IndexRecipe`.
        score_queries: number of queries that look at all keys for the loss.

    Returns:
        model.

    Raises:
        TypeError: model is no transformers model, or an argument of a wrong type.
        ValueError: no such layers, sliding ones, ones that were converted before, or arguments out of range or that do not go together.
    """
    settings = {
        "window": window, "local": local, "sink_keys": sink_keys, "groups": groups, "index_heads": index_heads, "index_dim": index_dim,
        "block_size": block_size, "block_score": block_score, "score_queries": score_queries,
    }  # fmt: skip
    return _convert(model, settings, INDEXED_FIELD)


def load_converted(path: str | os.PathLike[str], **options: Any) -> Any:
    """Loads what ``save_pretrained`` of a converted model saved, as the class that the model had.

    Args:
        path: a folder, or a name on the hub.
        options: of ``from_pretrained``.

    Returns:
        The model, converted, as ``from_pretrained`` returns it: with ``output_loading_info=True`` in a tuple.

    Raises:
        TypeError: the recorded settings have a wrong type.
        ValueError: the config has no record of a conversion, or records of both kinds, or one whose settings are not complete or out of
            range.
    """
    config = options.pop("config", None)
    if config is None:
        config = AutoConfig.from_pretrained(path, **{name: options[name] for name in HUB_OPTIONS if name in options})
    fields = [name for name in KINDS if getattr(config, name, None) is not None]
    if not fields:
        raise ValueError(
            f"path: expected a model saved after convert() or convert_indexed(), got a config with neither {FIELD!r} nor {INDEXED_FIELD!r} "
            f"at {os.fspath(path)!r}"
        )
    if len(fields) > 1:
        raise ValueError(
            f"path: expected a config with the record of one conversion, got both {FIELD!r} and {INDEXED_FIELD!r} at {os.fspath(path)!r}; "
            f"the weights of convert_indexed() have '.indexer.' in their names: if there are such, delete {FIELD!r} from config.json, "
            f"otherwise {INDEXED_FIELD!r}"
        )
    field = fields[0]
    settings = _recorded(config, field)
    cls = getattr(transformers, config.architectures[0])

    class Converting(cls):  # type: ignore[misc, valid-type]
        """The model's class, whose instances are converted before weights are loaded into them."""

        def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            _convert_layers(self, _dense_layers(self, settings, field), settings, field)

    # transformers chooses by these: by the name a loss, and by the module whether weights are renamed as in its own models.
    Converting.__name__, Converting.__module__ = cls.__name__, cls.__module__
    loaded = Converting.from_pretrained(path, config=config, **options)
    model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info=True
    model.__class__ = cls
    return loaded


def set_window(model: W, window: int) -> W:
    """Gives all converted layers of a model another window, for a schedule such as :class:`dmattn.nn.WindowSchedule`.

    Args:
        model: what :func:`convert` returned, or what ``torch.compile`` or peft made of it.
        window: as of :func:`convert`.

    Returns:
        model.

    Raises:
        TypeError, ValueError: as :func:`convert`.
    """
    inner = unwrapped(model)
    layers = selecting_layers(inner)
    for layer in layers:
        if isinstance(layer, IndexedSelectingAttention):
            raise ValueError(
                f"model: expected a model converted by convert(), got {type(inner).__name__} converted by convert_indexed(), whose window "
                "stays; for another one, call convert_indexed(window=...) on an unconverted model, with the other settings as they were, "
                "then its load_state_dict with this model's state_dict()"
            )
        if not isinstance(layer, tuple(CONVERTED.values())):
            raise ValueError(f"model: expected a model converted by convert(), got {type(inner).__name__}")
        checks.selection(window, layer.local, layer.sink_keys, True)
    _record(inner, _recorded(inner.config, FIELD) | {"window": window}, FIELD)
    for layer in layers:
        layer.window = window
    return model


# Inside -----------------------------------------------------------------------------------------------------------------------------


def _recorded(config: PreTrainedConfig, field: str) -> dict[str, Any]:
    """The settings in a config, which may have been saved with old names."""
    saved = getattr(config, field)
    settings = with_new_names(saved, sink="sink_keys", taught="select_only") if isinstance(saved, dict) else {}
    options = inspect.signature(convert if field == FIELD else convert_indexed).parameters
    missing = [name for name in options if name != "model" and name not in settings]
    if missing:
        raise ValueError(
            f"config: expected all settings of a conversion in its {field!r}, got {saved!r}, which lacks {', '.join(missing)}"
        )
    return settings


def _record(model: PreTrainedModel, settings: dict[str, Any], field: str) -> None:
    """Writes settings into the configs of a model and of the models in it, in place of what another conversion wrote there."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            for name in KINDS:
                if name in vars(module.config):
                    delattr(module.config, name)
            setattr(module.config, field, dict(settings))


def _convert(model: M, settings: dict[str, Any], field: str) -> M:
    check_model(model)
    layers = _dense_layers(model, settings, field)
    _copy_configs(model)
    _convert_layers(model, layers, settings, field)
    _record(model, settings, field)
    return model


def _copy_configs(model: PreTrainedModel) -> None:
    """Gives a model its own copies of its configs, since other models may share them. Modules that share one share its copy."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                setattr(module, name, copy.deepcopy(value, copies))


def _dense_layers(model: PreTrainedModel, settings: dict[str, Any], field: str) -> list[Any]:
    """The layers to be converted. Models and settings that cannot be are refused here, before anything changes."""
    layers: list[Any] = [module for module in model.modules() if type(module) in CONVERTED]
    if not layers:
        if any(isinstance(module, SelectingAttention) for module in model.modules()):
            raise ValueError(
                f"model: expected a model with dense attention, got {type(model).__name__} with dmattn's selection already"
            )
        known = ", ".join(cls.__name__ for cls in CONVERTED)
        raise ValueError(f"model: expected layers of type {known}, got none in {type(model).__name__}")
    for layer in layers:
        check_layer(layer)
    heads = layers[0].config.num_key_value_heads
    _, check_settings, _ = KINDS[field]
    check_settings(heads, SimpleNamespace(**settings))
    return layers


def _convert_layers(model: PreTrainedModel, layers: list[Any], settings: dict[str, Any], field: str) -> None:
    classes, _, add = KINDS[field]
    for layer in layers:
        add(layer, settings)
        layer.__class__ = classes[type(layer)]
    model.set_attn_implementation("dmattn")
    if settings.get("select_only", True):
        model.loss_function = LossWithScores(model)


def _check_settings(heads: int, given: SimpleNamespace) -> None:
    checks.selection(given.window, given.local, given.sink_keys, True)
    checks.local_heads(given.local_heads, heads, given.local)
    checks.each(checks.flag, select_only=given.select_only, bounded_cache=given.bounded_cache)
    recency, select_only = given.recency, given.select_only
    if recency is not None and (checks.number("recency", recency, low=0.0) == 0 or not select_only):
        raise ValueError(
            f"recency: expected None, or a number > 0 with select_only=True, got {recency} with select_only={select_only}"
        )
    checks.one_of("score", given.score, "exp", "linear")
    checks.number_drawn("score_queries", given.score_queries)
    checks.natural_int("rewind", given.rewind)


def _add_scores(layer: Any, settings: dict[str, Any]) -> None:
    """Puts what scores keys into a layer, in the dtype and on the device of its weights."""
    weight = layer.v_proj.weight
    heads = layer.config.num_key_value_heads
    like = {"device": weight.device, "dtype": weight.dtype if weight.is_floating_point() else torch.get_default_dtype()}
    linear = settings["score"] == "linear"
    layer.dt_proj = nn.Linear(heads * layer.head_dim, heads, bias=linear, **like)
    if linear:
        nn.init.zeros_(layer.dt_proj.weight), nn.init.zeros_(layer.dt_proj.bias)
    else:
        nn.init.normal_(layer.dt_proj.weight, std=layer.config.initializer_range)
        layer.A = nn.Parameter(torch.zeros(heads, **like))
    recency = settings["recency"]
    slopes = None if recency is None else nn.Parameter(initial_slopes(recency, heads).to(**like))
    layer.register_parameter("log_slope", slopes)
    for name in ("window", "local", "sink_keys", "local_heads", "score", "select_only", "score_queries"):
        setattr(layer, name, settings[name])
    layer.cache_rewind = settings["rewind"] if settings["bounded_cache"] else None


KINDS: dict[str, tuple[dict[type[nn.Module], type[SelectingAttention]], Callable[..., None], Callable[..., None]]] = {
    FIELD: (CONVERTED, _check_settings, _add_scores),
    INDEXED_FIELD: (INDEXED, check_index_settings, add_indexer),
}


def _of_scores(layer: SelectingAttention) -> dict[str, nn.Parameter]:
    """The parameters that a layer's score loss teaches, by their names in the layer."""
    return {name: each for name, each in layer.named_parameters() if name.partition(".")[0] in SCORES}


def _learns(layer: SelectingAttention) -> bool:
    return any(parameter.requires_grad for parameter in _of_scores(layer).values())


def _frozen(layer: SelectingAttention) -> str:
    """Which of these parameters are frozen, and what to do."""
    names = [name for name, each in _of_scores(layer).items() if not each.requires_grad]
    named = "modules_to_save=['indexer']" if isinstance(layer, IndexedSelectingAttention) else "target_modules=[..., 'dt_proj']"
    return (
        f"{', '.join(names)} of layer {layer.layer_idx} are frozen (requires_grad=False); with peft, which freezes what its config does not "
        f"name, give LoraConfig({named})"
    )


class LossWithScores:
    """A model's loss function, to whose loss the mean of the layers' score losses is added in training, unless all that it trains is frozen.

    A trainer that accumulates gradients divides each part's sum of losses by the number of labels of all parts (``num_items_in_batch``); the
    score loss of a part then counts by its share of the labels.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.loss = model, model.loss_function

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = self.loss(*args, **kwargs)
        if not self.model.training or not torch.is_grad_enabled():
            return loss
        layers = selecting_layers(self.model)
        if not any(_learns(layer) for layer in layers):
            for layer in layers:
                layer.last_score_loss = None
            warnings.warn(f"what selects keys does not learn: {_frozen(layers[0])}", stacklevel=2)
            return loss
        score_loss = _taken_losses(layers).to(loss.device)
        total, labels = kwargs.get("num_items_in_batch"), kwargs.get("labels")
        if total is not None and labels is not None:
            score_loss = score_loss * (labels[..., 1:] != -100).sum().to(loss.device) / torch.as_tensor(total, device=loss.device)
        return loss + score_loss


def score_loss_of(model: nn.Module) -> Tensor:
    """What teaches the scores in the last forward pass in training, a mean over layers: for a loss of your own, after ``select_only=True``.

    A pass with labels adds it to ``.loss`` by itself, and leaves none.

    Args:
        model: what :func:`convert` or :func:`convert_indexed` returned, or what ``torch.compile`` or peft made of it.

    Returns:
        A scalar. It can be had once.

    Raises:
        TypeError: no transformers model.
        ValueError: there is none: the model was converted by :func:`convert` without select_only=True, is in eval mode, or was called with
            labels or with a cache that held tokens; or it has no gradient, as with ``gradient_checkpointing_kwargs={"use_reentrant": True}``
            or if what it teaches is frozen, as by peft; a pass with labels then warns.
    """
    return _taken_losses(selecting_layers(model))


def _taken_losses(layers: list[SelectingAttention]) -> Tensor:
    """The mean of the losses that layers hold since their last pass, and no longer after this."""
    losses: list[Tensor] = []
    for layer in layers:
        loss, layer.last_score_loss = layer.last_score_loss, None
        if loss is not None and not _learns(layer):
            raise ValueError(f"model: expected scores that learn, but {_frozen(layer)}")
        if loss is None or not loss.requires_grad:
            made = "convert_indexed()" if isinstance(layer, IndexedSelectingAttention) else "convert(select_only=True)"
            raise ValueError(
                f"model: expected a forward pass in training after {made}, with gradients, without a cache that held tokens, and with "
                "use_reentrant=False under gradient checkpointing, "
                f"got {'no score loss' if loss is None else 'one without a gradient'} from layer {layer.layer_idx}; "
                "a pass with labels adds the score loss to .loss by itself, and leaves none"
            )
        losses.append(loss.to(losses[0].device) if losses else loss)
    return torch.stack(losses).mean()
