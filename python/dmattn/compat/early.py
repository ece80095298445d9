"""The two functions earlier systems named, with their signatures: ``flash_dynamic_mask_attention`` and ``flash_dma_attention``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dmattn import checks
from dmattn.attention import attention, dynamic_mask_attention, scores_of
from dmattn.compat import layouts
from dmattn.compat.dense_masks import keep_of
from dmattn.masks import IntervalMask
from dmattn.masks.heads import repeat_heads, with_rank
from dmattn.sizes import sizes_of
from dmattn.weights import attention_weights


def flash_dynamic_mask_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
    *,
    enable_skip: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with a boolean mask and an additive bias, by the name and layout of flash-dmattn's v1.0.0 report.

    Args:
        q: [B, H, Sq, D].
        k: [B, Hkv, Sk, D].
        v: [B, Hkv, Sk, Dv].
        attn_mask: bool, broadcastable to [B, H|Hkv, Sq, Sk], True = keep; or in q's dtype, 1.0 = keep, 0.0 = hide.
        bias: broadcastable to [B, H|Hkv, Sq, Sk], differentiable.
        softcap: None or 0: none.
        causal: bottom-right aligned.
        return_lse: also return lse [B, H, Sq].
        enable_skip: False computes hidden tiles of attn_mask, too, for comparisons: the same result, and memory for a bias of every pair.

    Returns:
        out [B, H, Sq, Dv] in q's dtype, or (out, lse).

    Raises:
        TypeError, ValueError: as :func:`dmattn.attention`.
    """
    checks.flag("causal", causal)
    checks.each(checks.tensor, q=q, k=k, v=v)
    if attn_mask is not None and checks.tensor("attn_mask", attn_mask).dtype != torch.bool:
        sizes = sizes_of(q, k, v)
        attn_mask = keep_of("attn_mask", attn_mask, q, sizes.batch * sizes.heads * sizes.query_length * sizes.key_length)
    if not checks.flag("enable_skip", enable_skip) and attn_mask is not None:
        bias, attn_mask = _as_bias(attn_mask, bias, q, k), None
    if checks.flag("return_lse", return_lse):
        return attention(q, k, v, attn_mask, bias=bias, is_causal=causal, softcap=softcap, return_lse=True)
    return attention(q, k, v, attn_mask, bias=bias, is_causal=causal, softcap=softcap)


def _as_bias(keep: Tensor, bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """The bias, -inf where the mask hides: [B|1, H|Hkv|1, Sq|1, Sk|1]."""
    bias = query.new_zeros(()) if bias is None else checks.tensor("bias", bias, checks.DTYPES["cpu"])
    keep, bias = with_rank(keep, 4), with_rank(bias, 4)
    layouts.check_pairs("attn_mask", keep, query, key, "q")
    layouts.check_pairs("bias", bias, query, key, "q")
    more = max(keep.shape[1], bias.shape[1])
    return torch.where(repeat_heads(keep, more), repeat_heads(bias, more), -torch.inf)


def flash_dma_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dt_proj: Tensor | nn.Module,
    a_coef: Tensor,
    keep_window_size: int = 1024,
    dropout_p: float = 0.0,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Dynamic Mask Attention from projection weights, by the name and layout of the Flash-DMA integration document.

    Args:
        query: [B, S, H, D].
        key: [B, S, Hkv, D].
        value: [B, S, Hkv, D].
        dt_proj: [Hkv, Hkv * D], weight of the score projection, or the module itself.
        a_coef: [Hkv].
        keep_window_size: keys each query sees at most.
        dropout_p: probability of dropping a weight.
        causal: select among keys up to the query's position.
        softmax_scale: default D ** -0.5.
        return_attn_probs: also return the probabilities, which take memory for every pair: for small cases.

    Returns:
        out [B, S, H, D], or (out, probs), probs [B, H, S, S] of :func:`dmattn.attention_weights` in float32 (float64 for float64), before
        dropout.

    Raises:
        TypeError, ValueError: as :func:`dmattn.dynamic_mask_attention`.
    """
    checks.each(checks.flag, causal=causal, return_attn_probs=return_attn_probs)
    checks.positive_int("keep_window_size", keep_window_size)
    if softmax_scale is not None:
        checks.scale(softmax_scale, "softmax_scale")
    for name, given in (("query", query), ("key", key), ("value", value)):
        checks.shaped(name, given, "[B, S, heads, D]")
    scores = scores_of(value.transpose(1, 2), "dt_proj", dt_proj, "a_coef", a_coef, None)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out = dynamic_mask_attention(
        query, key, value, scores, keep_window_size, is_causal=causal, scale=softmax_scale, dropout_p=dropout_p
    ).transpose(1, 2)
    if not return_attn_probs:
        return out
    mask = IntervalMask.top_k(scores.detach(), keep_window_size, causal)
    return out, attention_weights(query, key, mask, key_bias=scores, is_causal=causal, scale=softmax_scale)


__all__ = ["flash_dma_attention", "flash_dynamic_mask_attention"]
