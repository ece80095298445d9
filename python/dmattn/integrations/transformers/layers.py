"""Attention layers of transformers' models whose keys are selected by scores: what Doge's own layers and converted ones share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from dmattn import checks
from dmattn.attention import attention, dynamic_mask_attention, key_scores
from dmattn.call import autocast
from dmattn.integrations.transformers.attention import check_dtype
from dmattn.integrations.transformers.cache import BoundedLayer
from dmattn.integrations.transformers.packing import has_inner_padding, packed_sequences, remembered
from dmattn.masks import IntervalMask
from dmattn.nn.scores import of_selecting_heads, recency_of, score_loss, slopes_of
from dmattn.renamed import HidesOldNames, renamed_attribute, with_new_names
from dmattn.sizes import padded


class SelectingAttention(HidesOldNames, nn.Module):
    """The forward pass of a transformers attention layer in the Llama family, with the keys that its scores select.

    A base in addition to the layer's own class, for layers that are there already: it has no parameters, and defaults stand in the class.

    Attributes:
        window, local, sink_keys, local_heads, select_only, score_queries: as in :class:`dmattn.nn.DynamicMaskAttention`.
        score: "exp", ``exp(A * softplus(dt_proj(v)))``; or "linear", ``dt_proj(v)``. Either reads the values, which every cache keeps.
        log_slope: [Hkv], logarithms of slopes: slope * position is added where keys are ranked. Only with select_only; None for none.
        cache_rewind: of the bounded caches that take the place of the model's own while gradients are off; None to keep the model's own.
        last_score_loss: what teaches the scores, of the last forward pass in training.
    """

    config: Any
    layer_idx: int
    head_dim: int
    scaling: float
    attention_dropout: float
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    dt_proj: nn.Module
    A: nn.Parameter
    window: int
    local = sink_keys = local_heads = 0
    score = "exp"
    select_only = False
    score_queries = 64
    log_slope: nn.Parameter | None
    cache_rewind: int | None = None
    last_score_loss: Tensor | None = None
    padding_advice = "pad on the left, or give a cache of bounded_cache(model), which counts tokens"

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        output_attentions: bool | None = None,
        cache: Any = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """As the layer it replaces; attention_mask is None or what dmattn's mask function made. transformers 5.24 calls ``cache`` what
        earlier ones call ``past_key_values``."""
        past_key_values = past_key_values if cache is None else cache
        if output_attentions:
            raise ValueError(
                "output_attentions: expected False, since no weights are kept; look at some with dmattn.attention_weights"
            )
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (proj(hidden_states).view(heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        check_dtype(query)
        packing = (position_ids, cu_seq_lens_q, cu_seq_lens_k)
        bounded = None if past_key_values is None else self._bounded(past_key_values, query, attention_mask, packing)
        if bounded is not None:
            out = self._attend_bounded(bounded, query, key, value, attention_mask)
        else:
            out = self._attend(query, key, value, attention_mask, past_key_values, packing, hidden_states)
        return self.o_proj(out[..., : self.head_dim].transpose(1, 2).flatten(2)), None

    def scores(self, value: Tensor) -> Tensor:
        """The scores of keys with these values [B, Hkv, S, D]: [B, Hkv, S], without recency."""
        if self.score == "exp":
            return key_scores(value, self.dt_proj, self.A)
        projected: Tensor = self.dt_proj(value.transpose(1, 2).flatten(2))
        return projected.transpose(1, 2)

    sink = renamed_attribute("sink", "sink_keys")
    taught = renamed_attribute("taught", "select_only")

    def __setstate__(self, state: dict[str, Any]) -> None:  # pickles may hold old names
        super().__setstate__(with_new_names(state, sink="sink_keys", taught="select_only"))

    def __getstate__(self) -> dict[str, Any]:  # of copies and pickles: a loss belongs to its graph
        return {name: value for name, value in self.__dict__.items() if name != "last_score_loss"}

    # With a cache that keeps all keys, or none ------------------------------------------------------------------------------------

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, past_key_values: Any, packing: Any, hidden: Tensor
    ) -> Tensor:  # fmt: skip
        """[B, H, Sq, D or more]: attention to the selected keys of the cache and of this call."""
        offset = self._offset(past_key_values)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        self._check_padding(attention_mask, query)
        base = base_of(attention_mask, offset, query, key, packing)

        # A key's score depends on its value alone, so the keys of the cache keep theirs.
        scores = self.scores(value.detach() if self.select_only else value)
        added = None if self.select_only else scores
        dropout = self.attention_dropout if self.training else 0.0
        sizes: dict[str, Any] = {"base": base, "local": self.local, "sink_keys": self.sink_keys}
        query, key, value = padded(query), padded(key), padded(value)
        shared: dict[str, Any] = {"scale": self.scaling, "dropout_p": dropout, "query_offset": offset}
        if added is not None and not self.local_heads:
            plain: Tensor = dynamic_mask_attention(query, key, value, scores, self._window(), **sizes, **shared)
            return plain
        ranks = scores if self.log_slope is None else scores + recency_of(self.log_slope, scores.shape[2])
        competing = of_selecting_heads(ranks.detach(), self.local_heads) if self.local_heads else ranks.detach()
        mask = IntervalMask.top_k(competing, self._window(), **sizes)
        # The mask is causal by itself. Kernels are told, too, where that takes no operation more.
        is_causal = not isinstance(offset, Tensor)
        out: Tensor = attention(query, key, value, mask, key_bias=added, is_causal=is_causal, **shared)
        if self.select_only and self.training and torch.is_grad_enabled():
            self.last_score_loss = None  # an earlier pass's
            if query.shape[2] == key.shape[2]:
                losses = score_loss(
                    query, key, ranks, queries=self.score_queries, first_head=self.local_heads, scale=self.scaling, **sizes
                )
                self.last_score_loss = losses.mean()
        return out

    def _check_padding(self, mask: Tensor | None, query: Tensor) -> None:
        """Refuses padding between tokens where positions count, since they are places of the row. On a GPU it looks at prompts alone."""
        if mask is None or not checks.values_can_be_read(mask):
            return
        # Inference tensors would be read in each layer, and masks of single tokens in each step.
        if not checks.values_are_known(mask) and (query.shape[2] == 1 or mask.is_inference()):
            return
        if self.local or self.sink_keys or self.log_slope is not None:
            _check_mask(mask)
            if remembered(has_inner_padding, mask, queries=query.shape[2]):
                raise ValueError(
                    "attention_mask: expected padding on one side of each row with local, sink_keys or recency, which count places of a row, "
                    f"got padding between tokens; {self.padding_advice}"
                )

    def _offset(self, past_key_values: Any) -> int | Tensor:
        """The position of the first query: how many tokens a cache holds."""
        offset: int | Tensor = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
        return offset.clone() if isinstance(offset, Tensor) else offset  # a static cache counts on in the same tensor

    def _window(self) -> int:
        """The window as a number that may change. Dynamo takes ints of modules for constants, and would compile again for each window."""
        if not torch.compiler.is_compiling():
            return self.window
        with torch._dynamo.patch_dynamo_config(allow_unspec_int_on_nn_module=True):
            # Dynamo looks at a number where it is computed with, since torch 2.15 where it is checked.
            window = self.window + 0
            checks.natural_int("window", window)
            return window

    # With a bounded cache ---------------------------------------------------------------------------------------------------------

    def _bounded(self, cache: Any, query: Tensor, attention_mask: Tensor | None, packing: Any) -> BoundedLayer | None:
        """This layer's part of a bounded cache, or None where the cache keeps all keys.

        An empty part of a model's own cache becomes a bounded one here if the layer is to make its own: before the first tokens both are
        the same to everybody else. With gradients, dropout or packed sequences it does not, and keeps all keys.

        Raises:
            ValueError: a bounded cache of another layer, or packed sequences with one.
        """
        layers: Any = getattr(cache, "layers", ())
        held: Any = layers[self.layer_idx] if self.layer_idx < len(layers) else None
        if isinstance(held, BoundedLayer):
            if getattr(cache, "offloading", False):
                held.offload()
            sizes, given = ((x.window, x.local, x.sink_keys, x.local_heads) for x in (self, held))
            if sizes != given:
                raise ValueError(
                    f"past_key_values: expected (window, local, sink_keys, local_heads) = {sizes} like the layer, got a cache with {given}"
                )
            position_ids, ends_q, ends_k = packing
            if ends_q is not None or ends_k is not None:
                raise ValueError("cu_seq_lens_q, cu_seq_lens_k: expected None with a bounded cache, which has one sequence a row")
            is_known = not torch.compiler.is_compiling()
            if is_known and packed_sequences(query, query, attention_mask, True, position_ids, None, None) is not None:
                raise ValueError(
                    "position_ids: expected one sequence a row with a bounded cache, got positions that start again at 0: packed sequences; "
                    "give each a row, or leave past_key_values out"
                )
            return held
        if self.cache_rewind is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if getattr(cache, "offloading", False) or (self.training and self.attention_dropout > 0):
            return None
        lazy: Any = getattr(cache, "layer_class_to_replicate", None)
        if held is None and lazy is DynamicLayer:
            layers.extend(lazy() for _ in range(self.layer_idx + 1 - len(layers)))
            held = layers[self.layer_idx]
        if type(held) is not DynamicLayer or held.is_initialized:
            return None
        if packed_sequences(query, query, attention_mask, True, *packing) is not None:
            return None
        made = self.bounded_layer(self.cache_rewind)
        layers[self.layer_idx] = made
        return made

    def bounded_layer(self, rewind: int) -> BoundedLayer:
        """An empty part of a bounded cache for this layer."""
        return BoundedLayer(self.window, self.local, self.sink_keys, self.local_heads, rewind)

    def _attend_bounded(
        self, cache: BoundedLayer, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None
    ) -> Tensor:
        if self.training and self.attention_dropout > 0:
            raise ValueError(
                f"past_key_values: expected eval mode with a bounded cache, got dropout of {self.attention_dropout} in training"
            )
        real = None
        if attention_mask is not None:
            _check_mask(attention_mask)
            if attention_mask.shape[3] != key.shape[2]:
                raise ValueError(
                    f"attention_mask: expected one about the {key.shape[2]} new tokens, got one about {attention_mask.shape[3]} keys"
                )
            real = attention_mask[:, 0, 1] > attention_mask[:, 0, 0]
        ranks = self.scores(value)
        if self.log_slope is not None:
            slopes, positions = slopes_of(self.log_slope), cache.next_positions(key.shape[2], real, key.device)
            ranks = ranks + slopes[:, None] * positions[:, None].to(slopes.dtype)
        query, key, value = autocast(padded(query), padded(key), padded(value))
        return cache.attend(query, key, value, ranks, real, self.scaling, self.select_only)


FAMILY: tuple[type[nn.Module], ...] = (LlamaAttention, MistralAttention, Qwen2Attention, Qwen3Attention)


def converted(
    base: type[SelectingAttention], prefix: str, namespace: dict[str, Any]
) -> dict[type[nn.Module], type[SelectingAttention]]:
    """What each attention class of the Llama family becomes: ``base`` in addition to it. Pickles find the classes in ``namespace``."""
    module = {"__module__": namespace["__name__"]}
    classes = {
        cls: type(f"{prefix}{cls.__name__}", (base, cls), {"__doc__": f"A converted ``{cls.__name__}``.", **module})
        for cls in FAMILY
    }
    namespace.update({made.__name__: made for made in classes.values()})
    return classes


def base_of(mask: Tensor | None, offset: int | Tensor, query: Tensor, key: Tensor, packing: Any) -> IntervalMask | None:
    """Padding and documents, of a causal mask by dmattn's mask function or packed, as what a selection chooses from."""
    sequences = packed_sequences(query, key, mask, True, *packing)
    if mask is None:
        return sequences
    _check_mask(mask)
    bounds = mask[..., : key.shape[2]] + torch.as_tensor(offset, dtype=torch.int32, device=mask.device)
    base = IntervalMask.from_tensor(bounds).as_base("causal")
    return base if sequences is None else base & sequences


def _check_mask(mask: Tensor) -> None:
    if mask.dtype != torch.int32 or mask.dim() != 4 or mask.shape[2] != 2:
        raise ValueError(
            f"attention_mask: expected None or [B, Sk], got {str(mask.dtype).removeprefix('torch.')} {checks.shape_of(mask)} in a layer; "
            "a selection is among the keys of a document that are no padding, which other masks cannot say"
        )


def unwrapped(model: Any) -> PreTrainedModel:
    """The transformers model in what ``torch.compile`` and peft make of one, in any order.

    Raises:
        TypeError: there is none.
    """
    inner = model
    while not isinstance(inner, PreTrainedModel):
        if getattr(inner, "_orig_mod", None) is not None:  # torch.compile
            inner = inner._orig_mod
        elif hasattr(inner, "get_base_model"):  # peft
            inner = inner.get_base_model()
        else:
            check_model(model)
    return inner


def selecting_layers(model: nn.Module) -> list[SelectingAttention]:
    """The layers with dmattn's selection, in their order, of a transformers model; see :func:`unwrapped`.

    Raises:
        TypeError: model is no transformers model.
        ValueError: there is no such layer.
    """
    model = unwrapped(model)
    layers = [module for module in model.modules() if isinstance(module, SelectingAttention)]
    if not layers:
        raise ValueError(
            f"model: expected layers with dmattn's selection, got none in {type(model).__name__}; see enable_dynamic_mask_attention and convert"
        )
    return layers


def check_layer(layer: Any) -> None:
    """Refuses attention that is something else as well, which would no longer be so."""
    config = layer.config
    types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if types[layer.layer_idx] == "sliding_attention" if types else window is not None:
        raise ValueError(
            f"model: expected layers that do not slide, got config.sliding_window={window}: a selection with a sliding window has no interval "
            "for each key; set config.sliding_window = None first, and layer_types to 'full_attention' where there are any"
        )
    if not getattr(config, "is_causal", True):
        raise ValueError("model: expected config.is_causal=True, got False: a layer with dmattn's selection is causal")


def check_model(model: object) -> None:
    """Raises TypeError for what is no transformers model itself."""
    checks.instance("model", model, PreTrainedModel, "a transformers.PreTrainedModel")
