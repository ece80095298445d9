"""Heads wider than any kernel takes, as in Gemma 4's global layers: torch's own attention, exact, in memory for all pairs."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dmattn import checks
from dmattn.masks import BlockMask, Mask


def is_wide(query: Tensor, value: Tensor) -> bool:
    """Whether the heads are wider than any kernel takes."""
    return max(query.shape[3], value.shape[3]) > checks.MAX_HEAD_DIM


def wide_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None,
    *,
    bias: Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    query_offset: int | None,
    dropout_p: float,
) -> Tensor:
    """out [B, H, Sq, Dv], as :func:`dmattn.attention` would give it with these arguments.

    Raises:
        ValueError: a softcap.
    """
    if softcap:
        raise ValueError(
            f"softcap: expected None with heads wider than {checks.MAX_HEAD_DIM}, got {softcap}; use attn_implementation='eager'"
        )
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    seen = None if mask is None else mask if isinstance(mask, Tensor) else _pairs(mask, queries, keys)
    if is_causal:
        by = keys - queries if query_offset is None else query_offset
        causal = torch.ones((queries, keys), dtype=torch.bool, device=query.device).tril(by)[None, None]
        seen = causal if seen is None else seen & causal

    # Hide by adding -inf, but not all keys of a query: what sees nothing becomes zero afterwards.
    added, nothing = bias, None
    if seen is not None:
        nothing = ~seen.any(3, keepdim=True)
        hidden = torch.zeros_like(seen, dtype=query.dtype).masked_fill(~(seen | nothing), -math.inf)
        added = hidden if bias is None else bias + hidden
    if sinks is not None:  # a sink is a key of zeros whose bias is the sink's logit and whose value is zero
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
        shape = (query.shape[0], heads, queries, keys)
        all_pairs = query.new_zeros(shape) if added is None else added.expand(shape)
        added = torch.cat([all_pairs, sinks.to(all_pairs.dtype)[None, :, None, None].expand(*shape[:3], 1)], dim=3)
    added = None if added is None else added.to(query.dtype)
    out = F.scaled_dot_product_attention(query, key, value, added, dropout_p, scale=scale)
    return out if nothing is None else out.masked_fill(nothing, 0.0)


def _pairs(mask: Mask, queries: int, keys: int) -> Tensor:
    """bool [B|1, H|1, Sq, Sk]."""
    return mask.to_bool() if isinstance(mask, BlockMask) else mask.to_bool(queries, keys)
