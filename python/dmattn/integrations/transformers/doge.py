"""Doge models with dmattn's selection: their layers build no [B, Hkv, Sq, Sk] mask any more."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.doge.modeling_doge import DogeAttention, apply_rotary_pos_emb

from dmattn import checks
from dmattn.attention import dynamic_mask_attention, key_scores
from dmattn.integrations.transformers.attention import padded
from dmattn.integrations.transformers.packing import packed_sequences
from dmattn.masks import IntervalMask

M = TypeVar("M", bound=PreTrainedModel)


class DynamicMaskDogeAttention(DogeAttention):  # type: ignore[misc]
    """transformers' ``DogeAttention``, parameters and all, whose keys are selected and attended to by ``dynamic_mask_attention``."""

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
        **options: Any,
    ) -> tuple[Tensor, None]:
        """As the layer it replaces; attention_mask is None or what dmattn's mask function made."""
        if output_attentions:
            raise ValueError(
                "output_attentions: expected False, since no weights are kept; look at some with dmattn.attention_weights"
            )
        shape = hidden_states.shape[:-1]
        heads = (*shape, -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(heads)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(heads)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        offset: int | Tensor = 0
        if past_key_values is not None:
            offset = past_key_values.get_seq_length(self.layer_idx)
            offset = offset.clone() if isinstance(offset, Tensor) else offset  # a static cache counts on in the same tensor
            key, value = past_key_values.update(key, value, self.layer_idx)

        # A key's score depends on its value alone, so the keys of the cache keep theirs.
        scores = key_scores(value, self.dt_proj, self.A)
        base = _base_of(attention_mask, offset, key.shape[2])
        sequences = packed_sequences(query, key, attention_mask, True, position_ids, cu_seq_lens_q, cu_seq_lens_k)
        if sequences is not None:
            base = sequences if base is None else base & sequences
        out = dynamic_mask_attention(
            padded(query), padded(key), padded(value), scores, self.keep_window_size, base=base, scale=self.scaling,
            dropout_p=self.attention_dropout if self.training else 0.0, query_offset=offset,
        )  # fmt: skip
        return self.o_proj(out[..., : self.head_dim].transpose(1, 2).reshape(*shape, -1)), None


def _base_of(mask: Tensor | None, offset: int | Tensor, key_length: int) -> IntervalMask | None:
    """Padding and documents of a causal mask by dmattn's mask function, as what a selection chooses from."""
    if mask is None:
        return None
    if mask.dtype != torch.int32 or mask.dim() != 4 or mask.shape[2] != 2:
        raise ValueError(
            f"attention_mask: expected None or [B, Sk], got {str(mask.dtype).removeprefix('torch.')} {checks.shape_of(mask)} in a layer; "
            "a selection is among the keys of a document that are no padding, which other masks cannot say"
        )
    bounds = mask[..., :key_length] + torch.as_tensor(offset, dtype=torch.int32, device=mask.device)
    return IntervalMask.from_tensor(bounds).as_base("causal")


def enable_dynamic_mask_attention(model: M, bounded_cache: bool = False) -> M:
    """Makes the Doge layers of a model select and attend with dmattn, in place: the same parameters, logits, gradients and tokens.

    Exactly transformers' eager attention where the scores of a layer are distinct. Where they tie (equal tokens have equal values, hence
    equal scores, in the first layer), the later key wins, with and without a cache; torch.topk, which transformers uses, leaves it open.

    Args:
        model: any transformers model with ``DogeAttention`` layers.
        bounded_cache: keep the selected keys only; not available yet.

    Returns:
        model.

    Raises:
        TypeError: model is no transformers model.
        ValueError: no such layer, a sliding window beside the selection, or bounded_cache=True.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a transformers.PreTrainedModel, got {type(model).__name__}")
    if checks.flag("bounded_cache", bounded_cache):
        raise ValueError(
            "bounded_cache: expected False: this release has no bounded cache yet; generate with the model's own cache"
        )
    layers = [module for module in model.modules() if isinstance(module, DogeAttention)]
    if not layers:
        raise ValueError(f"model: expected layers of type DogeAttention, got none in {type(model).__name__}")
    for layer in layers:
        if getattr(layer.config, "sliding_window", None) is not None:
            raise ValueError(
                f"model: expected config.sliding_window=None, got {layer.config.sliding_window}: selection beside a sliding window "
                "has no interval for each key"
            )
        if not getattr(layer.config, "is_causal", True):
            raise ValueError("model: expected config.is_causal=True, got False: the layers of Doge are causal")
    model.set_attn_implementation("dmattn")
    for layer in layers:
        layer.__class__ = DynamicMaskDogeAttention
    return model
