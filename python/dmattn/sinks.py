"""Attention sinks: a learned logit per head that takes part of the softmax's denominator and has no value, from out and lse alone."""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn import checks
from dmattn.fake import accumulate_dtype
from dmattn.sharding import beside
from dmattn.sizes import Sizes


def lse_with_sink(lse: Tensor, sinks: Tensor) -> Tensor:
    """The log-sum-exp of each query's logits and its head's sink: what the weights of :func:`attention` with ``sinks`` are divided by.

    :func:`attention` itself returns lse without the sink, so that partial results over disjoint keys can be merged before the sink is
    taken in once.

    Args:
        lse: [B, H, Sq], natural logarithm, as :func:`attention` returns it.
        sinks: [H], floating point.

    Returns:
        [B, H, Sq] in lse's dtype, differentiable.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape or device.
    """
    checks.shaped("lse", lse, "[B, H, Sq]", (torch.float64, torch.float32))
    column = beside(lse, sinks_of_heads(sinks, lse.shape[1], lse.device, lse.dtype))[:, None]
    absent = column == -torch.inf  # or the derivative of -inf beside -inf would be NaN
    return torch.where(absent, lse, torch.logaddexp(lse, torch.where(absent, 0.0, column)))


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor, sizes: Sizes) -> Tensor:
    """out once the sink has taken its part of the weights: ``out * sigmoid(lse - sink)``. Queries that see nothing stay zero, and what comes
    in for them backward, NaN too, goes nowhere."""
    column = beside(lse, sinks_of_heads(sinks, sizes.heads, sizes.device, accumulate_dtype(sizes.dtype)))[:, None]
    share = share_of_keys(lse, column)
    return (out * share[..., None]).masked_fill((lse == -torch.inf)[..., None], 0.0).to(out.dtype)


def share_of_keys(lse: Tensor, column: Tensor) -> Tensor:
    """Of a query's weights, what the keys keep with the sinks [heads, 1]."""
    return torch.sigmoid(lse.clamp(min=torch.finfo(lse.dtype).min) - column)


def sinks_of_heads(sinks: object, heads: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Checks that sinks has a logit for each of so many heads, and returns it in the dtype things are summed in."""
    given = checks.shaped("sinks", sinks, "[H]", checks.DTYPES["cpu"], H=heads)
    if given.device != device:
        raise ValueError(f"sinks: expected device {device} like query, got {given.device}")
    return given.to(dtype)
