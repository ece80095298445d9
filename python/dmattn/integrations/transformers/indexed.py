"""Converted layers whose queries choose their keys by an indexer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dmattn import checks
from dmattn.attention import attention
from dmattn.integrations.transformers.cache import BoundedLayer
from dmattn.integrations.transformers.layers import SelectingAttention, base_of, converted, selecting_layers, unwrapped
from dmattn.masks.interval import segment_ends
from dmattn.nn.indexer import Indexer
from dmattn.nn.recipe import IndexRecipe
from dmattn.nn.scores import drawn_rows, with_dense_rows
from dmattn.sizes import padded

W = TypeVar("W", bound=nn.Module)

INDEXED_FIELD = "indexed_attention"
"""The field of a model's config that holds what ``convert_indexed`` was told."""


class IndexedSelectingAttention(SelectingAttention):
    """The forward pass of a converted layer: a base in addition to the layer's own class, as :class:`SelectingAttention`.

    Attributes:
        indexer: a :class:`dmattn.nn.Indexer` of the hidden states.
        is_dense: whether queries read all keys while the indexer learns.

    Index keys stand behind the keys in the model's own cache, which is one of larger head size for it.
    """

    indexer: Indexer
    log_slope = None
    padding_advice = "pad on the left"
    is_dense = False
    select_only = True

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, past_key_values: Any, packing: Any, hidden: Tensor
    ) -> Tensor:  # fmt: skip
        index = self.indexer(hidden)
        offset = self._offset(past_key_values)
        if past_key_values is not None:
            batch, heads, tokens = key.shape[:3]
            # A part of the index keys lies next to the keys of each head.
            beside = index.key.transpose(1, 2).reshape(batch, tokens, heads, -1).transpose(1, 2)
            beside = torch.cat((key, beside.to(key.dtype)), 3)
            check_kept(past_key_values, self.layer_idx, beside.shape[3])
            both, value = past_key_values.update(beside, value, self.layer_idx)
            key, beside = both[..., : key.shape[3]], both[..., key.shape[3] :]
            whole = beside.transpose(1, 2).reshape(batch, both.shape[2], *index.key.shape[1::2])
            index = index._replace(key=whole.transpose(1, 2).to(index.query.dtype))
        self._check_padding(attention_mask, query)
        base = base_of(attention_mask, offset, query, key, packing)
        query, key, value = padded(query), padded(key), padded(value)
        dropout = self.attention_dropout if self.training else 0.0
        shared: dict[str, Any] = {"is_causal": True, "scale": self.scaling, "dropout_p": dropout, "query_offset": offset}
        mask: Any = base
        if not self.is_dense:
            lists = self.indexer.select(index, base, query_offset=offset)
            mask = lists if base is None else lists & base
        out: Tensor = attention(query, key, value, mask, **shared)
        if self.training and torch.is_grad_enabled():
            self.last_score_loss = None  # an earlier pass's
            if query.shape[2] == key.shape[2]:
                rows = drawn_rows(query.shape[2], self.score_queries, 0.5, query.device)
                self.last_score_loss = self.indexer.loss(index, query, key, rows=rows, base=base, scale=self.scaling, sharp=True)
                if not self.is_dense:
                    ends = None if base is None else segment_ends(base, key[..., 0])
                    out = with_dense_rows(query, key, value, out, rows, None, ends, self.scaling, 0.0)
        return out

    def _bounded(self, cache: Any, query: Tensor, attention_mask: Tensor | None, packing: Any) -> None:
        """No cache that drops keys: a later query may choose any of them."""
        held: Any = getattr(cache, "layers", ())
        if self.layer_idx < len(held) and hasattr(held[self.layer_idx], "next_positions"):
            raise ValueError("past_key_values: expected a cache that keeps all keys, got a bounded cache")

    def bounded_layer(self, rewind: int) -> BoundedLayer:
        raise ValueError(
            "model: expected one whose keys have lifetimes, by convert(), got one whose queries choose among all keys"
        )


INDEXED = converted(IndexedSelectingAttention, "Indexed", globals())


def set_dense(model: W, dense: bool) -> W:
    """Whether all layers of a model of ``convert_indexed`` read all keys: True while the indexers learn alone, then False. The config says it,
    so a saved model loads as it was.

    Args:
        model: what ``convert_indexed`` returned, or what ``torch.compile`` or peft made of it.

    Returns:
        model.

    Raises:
        TypeError: no transformers model, or dense is no bool.
        ValueError: a model without such layers.
    """
    checks.flag("dense", dense)
    for layer in selecting_layers(model):
        if not isinstance(layer, IndexedSelectingAttention):
            raise ValueError(f"model: expected a model converted by convert_indexed(), got {type(model).__name__}")
        layer.is_dense = dense
    for module in unwrapped(model).modules():
        if isinstance(module, PreTrainedModel):
            getattr(module.config, INDEXED_FIELD)["is_dense"] = dense
    return model


def check_kept(cache: Any, layer: int, size: int) -> None:
    """Refuses a cache whose keys were made for a model without an indexer."""
    layers = getattr(cache, "layers", ())
    keys = getattr(layers[layer], "keys", None) if layer < len(layers) else None
    if isinstance(keys, Tensor) and keys.dim() == 4 and keys.shape[3] != size:
        raise ValueError(
            f"past_key_values: expected keys of size {size}, a head's and its part of the index keys, got {keys.shape[3]}; a static cache has"
            " to initialize itself at the first call, not early"
        )


def check_index_settings(heads: int, given: SimpleNamespace) -> None:
    """Refuses settings that do not go together, or that no indexer takes."""
    window, groups, block_size = given.window, given.groups, given.block_size
    checks.selection(window, given.local, given.sink_keys, True)
    checks.each(checks.length, local=given.local, sink_keys=given.sink_keys)
    checks.number_drawn("score_queries", given.score_queries)
    if groups not in (1, "heads") or isinstance(groups, bool):
        raise ValueError(f"groups: expected 'heads' or 1, got {groups!r}")
    checks.positive_int("block_size", block_size)
    if window % block_size:
        raise ValueError(f"window: expected a multiple of block_size={block_size}, got {window}")
    checks.positive_int("index_dim", given.index_dim)
    if groups == 1 and given.index_dim % heads:
        raise ValueError(
            f"index_dim: expected a multiple of the {heads} key heads, in whose cache it lies, got {given.index_dim}"
        )
    IndexRecipe(**{name: getattr(given, name) for name in ("index_heads", "index_dim", "block_size", "block_score")})


def add_indexer(layer: Any, settings: dict[str, Any]) -> None:
    """Puts an indexer into a layer, in the dtype and on the device of its weights."""
    weight, config = layer.k_proj.weight, layer.config
    dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
    groups = config.num_key_value_heads if settings["groups"] == "heads" else 1
    layer.indexer = Indexer(
        config.hidden_size, groups, k=settings["window"] // settings["block_size"], num_heads=settings["index_heads"],
        head_dim=settings["index_dim"], block_size=settings["block_size"], block_score=settings["block_score"], local=settings["local"],
        sink_keys=settings["sink_keys"], device=weight.device, dtype=dtype,
    )  # fmt: skip
    for name in ("window", "local", "sink_keys", "score_queries"):
        setattr(layer, name, settings[name])
    layer.is_dense = settings.get("is_dense", False)
