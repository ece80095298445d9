"""Attention in several passes over disjoint keys, merged by lse: for masks and biases that one pass cannot say. Exact, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn.attention import attention
from dmattn.call import new_seed
from dmattn.masks import Mask


class Pass(NamedTuple):
    """What one call of :func:`dmattn.attention` sees.

    Args:
        mask: its keys; no pair of a query and a key may be in two passes.
        is_causal: also hide keys later than the query's position.
        key_bias: as in :func:`dmattn.attention`.
        lift: added to all logits of a query, [B|1, H|1, Sq]; it changes lse, and the weight of this pass among others.
    """

    mask: Mask | None = None
    is_causal: bool = False
    key_bias: Tensor | None = None
    lift: Tensor | None = None


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    passes: Sequence[Pass],
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out, lse) over the keys of all passes, as :func:`dmattn.attention`. A seed drops the same pairs in one pass or in many."""
    if dropout_p > 0 and dropout_seed is None and len(passes) > 1:
        dropout_seed = new_seed(query.device)
    parts = []
    for each in passes:
        out, lse = attention(
            query, key, value, each.mask, key_bias=each.key_bias, is_causal=each.is_causal, scale=scale, softcap=softcap,
            dropout_p=dropout_p, dropout_seed=dropout_seed, deterministic=deterministic, return_lse=True,
        )  # fmt: skip
        parts.append((out, lse if each.lift is None else lse + each.lift))
    return merged(parts)


def merged(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One (out, lse) from those over disjoint keys, summed in the dtype of lse: ``sum_n exp(lse_n - lse) * out_n``.

    Args:
        parts: at least one (out [B, H, Sq, Dv], lse [B, H, Sq]); lse is -inf where a query saw nothing.
    """
    if len(parts) == 1:
        return parts[0]
    each = torch.stack([lse for _, lse in parts])
    seen = each > -torch.inf
    finite = torch.where(seen, each, torch.finfo(each.dtype).min)  # -inf beside -inf would have NaN for its derivative
    total = torch.logsumexp(finite, dim=0)
    weights = torch.exp(finite - total)[..., None]
    out = sum(weight * out for weight, (out, _) in zip(weights, parts, strict=True))
    assert isinstance(out, Tensor)
    return out.to(parts[0][0].dtype), torch.where(seen.any(dim=0), total, -torch.inf)
