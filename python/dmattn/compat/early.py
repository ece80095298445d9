"""The two functions earlier systems named, with their signatures: ``flash_dynamic_mask_attention`` and ``flash_dma_attention``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dmattn import checks
from dmattn.attention import attention, dynamic_mask_attention, scores_of


def flash_dynamic_mask_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with a boolean mask and an additive bias, by the name and layout of flash-dmattn's v1.0.0 report.

    Args:
        q: [B, H, Sq, D].
        k: [B, Hkv, Sk, D].
        v: [B, Hkv, Sk, Dv].
        attn_mask: bool, broadcastable to [B, H|Hkv, Sq, Sk], True = keep.
        bias: broadcastable to [B, H|Hkv, Sq, Sk], differentiable.
        softcap: None or 0: none.
        causal: bottom-right aligned.
        return_lse: also return lse [B, H, Sq].

    Returns:
        out [B, H, Sq, Dv] in q's dtype, or (out, lse).

    Raises:
        TypeError, ValueError: as :func:`dmattn.attention`.
    """
    checks.flag("causal", causal)
    for name, given in (("q", q), ("k", k), ("v", v)):
        checks.tensor(name, given)
    if attn_mask is not None:
        checks.dtype("attn_mask", checks.tensor("attn_mask", attn_mask), (torch.bool,))
    if checks.flag("return_lse", return_lse):
        return attention(q, k, v, attn_mask, bias=bias, is_causal=causal, softcap=softcap, return_lse=True)
    return attention(q, k, v, attn_mask, bias=bias, is_causal=causal, softcap=softcap)


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
) -> Tensor | tuple[Tensor, Tensor, None]:
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
        return_attn_probs: return (out, lse, None); the third place held probabilities, which no fused kernel has.

    Returns:
        out [B, S, H, D], or (out, lse [B, H, S], None).

    Raises:
        TypeError, ValueError: as :func:`dmattn.dynamic_mask_attention`.
    """
    checks.flag("causal", causal)
    checks.flag("return_attn_probs", return_attn_probs)
    checks.positive_int("keep_window_size", keep_window_size)
    if softmax_scale is not None:
        checks.scale(softmax_scale, "softmax_scale")
    for name, given in (("query", query), ("key", key), ("value", value)):
        if checks.tensor(name, given).dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions [B, S, heads, D], got shape {checks.shape_of(given)}")
    scores = scores_of(value.transpose(1, 2), "dt_proj", dt_proj, "a_coef", a_coef, None)
    out, lse = dynamic_mask_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scores, keep_window_size,
        is_causal=causal, scale=softmax_scale, dropout_p=dropout_p, return_lse=True,
    )  # fmt: skip
    out = out.transpose(1, 2)
    return (out, lse, None) if return_attn_probs else out


__all__ = ["flash_dma_attention", "flash_dynamic_mask_attention"]
