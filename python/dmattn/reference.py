"""The specification of dmattn as a program: eager, quadratic, and calling no kernel. Every test compares with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def per_query_head(given: Tensor, heads: int) -> Tensor:
    """[B|1, H|Hkv|1, ...] to [B|1, H|1, ...]: query heads of a group share a key head's row."""
    return given if given.shape[1] in (1, heads) else given.repeat_interleave(heads // given.shape[1], dim=1)


def top_k_visible(
    scores: Tensor, window: int, is_causal: bool = True, base: Tensor | None = None, local: int = 0, sink_keys: int = 0
) -> Tensor:
    """For each query its first ``sink_keys``, its last ``local`` and the ``window`` best other keys; equal scores: the later key wins. scores
    [B, Hkv, Sk], base bool [B|1, 1, Sk, Sk] (what a query may see) -> bool [B, Hkv, Sk, Sk]. Not causal: within the base's row."""
    every = torch.ones(*scores.shape[-1:] * 2, dtype=torch.bool, device=scores.device)
    allowed = (every.tril() if is_causal else every) & (every if base is None else base)
    always = allowed & (every.triu(1 - local).tril() | (allowed.cumsum(-1) <= sink_keys))
    competes = allowed & ~always & (scores > -torch.inf)[:, :, None, :]
    row = torch.where(competes, scores[:, :, None, :].to(torch.float64), -torch.inf).flip(-1)
    order = row.shape[-1] - 1 - row.sort(dim=-1, descending=True, stable=True).indices  # later keys first among equals
    return always | (competes & torch.zeros_like(competes).scatter(-1, order[..., :window], True))


def dropout_multiplier(seed: int, p: float, shape: Sequence[int], device: torch.device) -> Tensor:
    """0 or 1 / (1 - p) for every element of a [B, H, Sq, Sk] matrix: the counter-based hash of cpp/params.h."""

    def spread(x: Tensor) -> Tensor:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        return ((x ^ (x >> 15)) * (0x846CA68B - (1 << 32))) & 0xFFFFFFFF

    mix = lambda x: spread(x) ^ (spread(x) >> 16)  # noqa: E731
    batch, heads, queries, keys = shape
    count = lambda n: torch.arange(n, dtype=torch.int64, device=device)  # noqa: E731
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    seed_key = mix(mix(torch.tensor(low ^ 0x9E3779B9, device=device)) ^ high)
    head_key = mix(seed_key ^ mix(count(batch * heads).view(batch, heads, 1, 1) + 0x85EBCA6B))
    key = mix(head_key ^ mix(count(queries).view(-1, 1) + 0xC2B2AE35))
    hashed = spread(key ^ ((count(keys) * 0x9E3779B9) & 0xFFFFFFFF))
    return (hashed >= min(int(p * 2**32), 2**32 - 1)).double() / (1.0 - p)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None = None,
    *,
    key_bias: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """out [B, H, Sq, Dv] and lse [B, H, Sq] by the formulas of docs/semantics.md, visible bool [B|1, H|Hkv|1, Sq, Sk]."""
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    seen = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device)
    seen = seen.tril(keys - queries) if is_causal else seen
    seen = seen if visible is None else seen & per_query_head(visible, heads)
    hidden_from_all = ~seen.expand(query.shape[0], heads, queries, keys).any(dim=2)[..., None]
    key = per_query_head(key, heads).masked_fill(hidden_from_all, 0.0)
    value = per_query_head(value, heads).masked_fill(hidden_from_all, 0.0)
    logits = (query @ key.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    logits = softcap * torch.tanh(logits / softcap) if softcap > 0 else logits
    logits = logits if key_bias is None else logits + per_query_head(key_bias, heads)[:, :, None, :]
    logits = logits if bias is None else logits + per_query_head(bias, heads)
    logits = logits.masked_fill(~seen | (logits == -torch.inf), -torch.inf)  # a bias of -inf hides, gradients too
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - torch.where(torch.isinf(lse), 0.0, lse)[..., None])
    if dropout_p > 0:
        weights = weights * dropout_multiplier(dropout_seed, dropout_p, (*weights.shape,), query.device).to(weights.dtype)
    return weights.to(value.dtype) @ value, lse
