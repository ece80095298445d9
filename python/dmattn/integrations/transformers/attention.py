"""dmattn as an attention function of transformers: every argument is honoured or refused, none dropped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dmattn import checks
from dmattn.attention import attention
from dmattn.integrations.transformers.masks import interval_of
from dmattn.integrations.transformers.packing import packed_sequences
from dmattn.integrations.transformers.wide import is_wide, wide_attention
from dmattn.masks import BlockMask, IndexMask, IntervalMask, Mask
from dmattn.masks.heads import repeat_heads
from dmattn.sizes import padded
from dmattn.weights import attention_weights

# Arguments that say what is computed and have no form here, with what to do instead.
REFUSED = {
    "block_table": "paged caches have no kernel here; generate without continuous batching",
    "k_cache": "paged caches have no kernel here; generate without continuous batching",
    "cache": "paged caches have no kernel here; generate without continuous batching, or with attn_implementation='paged|sdpa'",
    "head_mask": "heads cannot be masked here; use attn_implementation='eager'",
    "layer_head_mask": "heads cannot be masked here; use attn_implementation='eager'",
}


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    output_attentions: bool | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function for dmattn.

    Args:
        module: the attention layer; its ``is_causal`` (default True) counts where is_causal is None.
        query, key, value: [B, H, Sq, D], [B, Hkv, Sk, D], [B, Hkv, Sk, Dv]; head sizes that are no multiples of 8 are padded,
            and those beyond 256 are left to torch's attention, in memory for all pairs.
        attention_mask: None, what dmattn's mask function made, or bool or float [B|1, H|1, Sq|1, >= Sk].
        dropout, scaling, softcap: as transformers has them; softcap None is none.
        is_causal: as in transformers' SDPA: without a mask, several queries see the keys up to their own number.
        s_aux, sinks: [H], sinks by either name.
        position_bias: [B|1, H|1, Sq|1, >= Sk], added to the logits.
        sliding_window: counts without a mask only; a mask says it already.
        position_ids: [B|1, S]; in a causal layer without a past, position 0 again begins another packed sequence.
        cu_seq_lens_q, cu_seq_lens_k: ends of packed sequences in a batch of 1, as the flattening collator gives them.
        indices: [B, Sq, n], the keys that each query may see in addition to the mask; negative ones stand for none.
        block_indices: [B, heads, Sq, n], blocks of ``module.indexer.block_size`` keys instead, where heads divides H or Hkv. They count from
            a row's beginning, so there has to be one sequence in it; compiled calls do not check that.
        output_attentions: also return the weights (before dropout), computed again and slowly.

    Returns:
        out [B, Sq, H, Dv] and None or the weights [B, H, Sq, Sk].

    Raises:
        TypeError, ValueError: names the argument that cannot be honoured and says what to do.
    """
    for name, given in options.items():
        if given is not None and name in REFUSED:
            raise ValueError(f"{name}: expected None, got {type(given).__name__}: {REFUSED[name]}")
    if s_aux is not None and sinks is not None:
        raise ValueError("s_aux, sinks: expected at most one of them, which are two names for the same, got both")
    check_dtype(query)
    query_length, value_size, size = query.shape[2], value.shape[3], query.shape[3]
    if query.shape[0] != key.shape[0]:
        query, key, value = (x.expand(max(query.shape[0], key.shape[0]), -1, -1, -1) for x in (query, key, value))

    # Without a mask several queries are causal, counted from the first key: later keys are room in an empty static cache.
    causal_layer = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    is_causal = causal_layer and attention_mask is None
    if is_causal and query_length > 1 and key.shape[2] > query_length:
        key, value = key[:, :, :query_length], value[:, :, :query_length]
    mask, bias = _mask_and_bias(attention_mask, position_bias, query_length, key.shape[2])
    mask = _with_window(mask, attention_mask, sliding_window, is_causal, key)
    sequences = packed_sequences(query, key, attention_mask, causal_layer, position_ids, cu_seq_lens_q, cu_seq_lens_k)
    mask = _both(mask, sequences, query_length)
    if indices is not None:
        mask = _both(mask, _listed("indices", indices, query, key), query_length)
    if block_indices is not None:
        if sequences is not None and not torch.compiler.is_compiling():
            raise ValueError(
                "position_ids: expected one sequence in each row with block_indices, which count from a row's beginning, got packed ones"
            )
        size_of_block = int(getattr(getattr(module, "indexer", None), "block_size", 1))
        mask = _both(mask, _listed("block_indices", block_indices, query, key, size_of_block), query_length)

    scaling = size**-0.5 if scaling is None else scaling
    shared: dict[str, Any] = {
        "bias": bias,
        "is_causal": is_causal and query_length > 1,
        "scale": scaling,
        "softcap": softcap,
        "sinks": sinks if s_aux is None else s_aux,
        "query_offset": 0 if is_causal and query_length > key.shape[2] else None,
    }
    if is_wide(query, value):
        if output_attentions:
            raise ValueError(
                f"output_attentions: expected False with heads wider than {checks.MAX_HEAD_DIM}, got True; use attn_implementation='eager'"
            )
        out = wide_attention(query, key, value, mask, dropout_p=dropout, **shared)
        return out.transpose(1, 2).contiguous(), None
    query, key = padded(query), padded(key)
    out, lse = attention(query, key, padded(value), mask, dropout_p=dropout, return_lse=True, **shared)
    out = out[..., :value_size].transpose(1, 2).contiguous()
    weights = attention_weights(query, key, mask, lse, **shared).to(query.dtype) if output_attentions else None
    return out, weights


def check_dtype(query: Tensor) -> None:
    if query.device.type == "cuda" and query.dtype not in checks.DTYPES["cuda"] and not torch.is_autocast_enabled("cuda"):
        raise TypeError(
            f"query: expected dtype bfloat16 or float16 on CUDA, got {query.dtype}; load the model with dtype=torch.bfloat16, or run it under "
            "torch.autocast('cuda', torch.bfloat16)"
        )


def _mask_and_bias(
    attention_mask: Tensor | None, position_bias: Tensor | None, query_length: int, key_length: int
) -> tuple[Mask | Tensor | None, Tensor | None]:
    """The mask that hides and the bias that is added, out of masks that may do either."""
    mask: Mask | Tensor | None = None
    bias = None if position_bias is None else position_bias[..., :key_length]
    if attention_mask is None:
        return None, bias
    if not isinstance(attention_mask, Tensor):
        raise TypeError(
            f"attention_mask: expected a tensor, got {type(attention_mask).__name__}; a mask made for another attn_implementation has to be "
            "made again"
        )
    if attention_mask.dtype == torch.int32:
        return interval_of(attention_mask, query_length, key_length), bias
    if attention_mask.dim() != 4 or attention_mask.shape[3] < key_length:
        raise ValueError(
            f"attention_mask: expected [B|1, H|1, Sq|1, >= Sk] with Sk={key_length}, got shape {list(attention_mask.shape)}"
        )
    given = attention_mask[..., :key_length]
    if given.dtype == torch.bool:
        mask = given
    elif given.is_floating_point():
        bias = given if bias is None else bias + given
    else:
        raise TypeError(
            f"attention_mask: expected bool, a floating-point dtype, or int32 of dmattn's mask function, got {given.dtype}"
        )
    return mask, bias


def _with_window(
    mask: Mask | Tensor | None, attention_mask: Tensor | None, window: int | None, is_causal: bool, key: Tensor
) -> Mask | Tensor | None:
    """A sliding window that no mask has yet."""
    if window is None or attention_mask is not None or key.shape[2] <= window:
        return mask
    if window < 1:
        raise ValueError(f"sliding_window: expected None or an int > 0, got {window}")
    if not is_causal:
        raise ValueError(
            f"sliding_window: expected a mask with a window of {window} in a layer that is not causal, got none; make masks with "
            "transformers.masking_utils"
        )
    return IntervalMask.sliding_window(key.shape[2], window - 1, device=key.device)


def _both(mask: Mask | Tensor | None, other: IntervalMask | IndexMask | None, query_length: int) -> Mask | Tensor | None:
    """The intersection, where either may be missing."""
    if other is None or mask is None:
        return mask if other is None else other
    if isinstance(mask, Tensor):
        mask = BlockMask.from_bool(mask.expand(-1, -1, query_length, -1))
    both: Mask = mask & other
    return both


def _listed(name: str, indices: Tensor, query: Tensor, key: Tensor, block_size: int = 1) -> IndexMask:
    """The mask of listed keys, or blocks of keys, which may be more than causality shows."""
    sizes, keys = {"B": query.shape[0], "Sq": query.shape[2]}, key.shape[2]
    layout = "[B, Sq, n]" if name == "indices" else "[B, heads, Sq, n]"
    lists = checks.shaped(name, indices, layout, (torch.int32, torch.int64), **sizes)
    lists = lists[:, None] if name == "indices" else lists
    heads = next((heads for heads in (key.shape[1], query.shape[1]) if lists.shape[1] and heads % lists.shape[1] == 0), None)
    if heads is None:
        raise ValueError(f"{name}: expected {layout} with a divisor of {query.shape[1]} heads, got {checks.shape_of(indices)}")
    lists = repeat_heads(lists, heads)
    lists = torch.where((lists < 0) | (lists * block_size >= keys), -1, lists)
    unit = next(unit for unit in (128, 64, 32, 16, 8, 4, 2, 1) if block_size % unit == 0)
    if unit != block_size:  # blocks that no mask has are listed in parts
        parts = lists[..., None] * (block_size // unit) + torch.arange(block_size // unit, device=lists.device)
        lists = torch.where((lists[..., None] < 0) | (parts * unit >= keys), -1, parts).flatten(3)
    return IndexMask(lists, unit)
