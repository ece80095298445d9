"""What an attention problem asks of an implementation, by name, so that tests can leave out what a function does not offer."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from dmattn import reference
from dmattn.masks import BlockMask, CombinedMask, IndexMask, IntervalMask
from dmattn.masks.heads import with_rank
from dmattn.testing.case import AttentionCase

MASK_TYPES = {
    "interval_mask": IntervalMask,
    "block_mask": BlockMask,
    "index_mask": IndexMask,
    "combined_mask": CombinedMask,
    "bool_mask": Tensor,
}
FEATURES = (
    "grouped_heads",  # fewer key heads than query heads
    "different_lengths",  # Sq != Sk
    "empty_lengths",  # Sq or Sk is 0
    "value_size",  # Dv != D
    "strides",  # a query, key or value that is not contiguous
    "gradient_strides",  # gradients that enter through out and lse and are not contiguous; the gradient of a sum has stride 0
    "blind_queries",  # queries that see nothing: masked out, before the first key, or only logits of -inf
    *MASK_TYPES,
    "expanded_biases",  # a key_bias or bias of several rows, keys or heads that are one in memory: stride 0
    "sinks", "query_offset",
    "key_bias", "bias", "is_causal", "scale", "softcap", "dropout", "deterministic",
)  # fmt: skip


def checked(features: Collection[str] | None) -> frozenset[str]:
    """The features as a set; None for all.

    Raises:
        TypeError: a single string.
        ValueError: a name that is none of FEATURES.
    """
    if isinstance(features, str):
        raise TypeError(f"features: expected several names of dmattn.testing.FEATURES, or None, got the string {features!r}")
    given = frozenset(FEATURES if features is None else features)
    unknown = sorted(given - set(FEATURES))
    if unknown:
        raise ValueError(f"features: expected names of {', '.join(FEATURES)}, got {', '.join(unknown)}")
    return given


def features_in(case: AttentionCase) -> frozenset[str]:
    """Which of FEATURES a case has."""
    query, key, value = case.query, case.key, case.value
    has = {
        "grouped_heads": query.shape[1] != key.shape[1],
        "different_lengths": query.shape[2] != key.shape[2],
        "empty_lengths": 0 in (query.shape[2], key.shape[2]),
        "value_size": query.shape[3] != value.shape[3],
        "strides": not all(tensor.is_contiguous() for tensor in (query, key, value)),
        "gradient_strides": case.grad_layout != "contiguous",
        "blind_queries": not bool(sees_a_key(case).all()),
        **{name: isinstance(case.mask, kind) for name, kind in MASK_TYPES.items()},
        "expanded_biases": any(is_expanded(given) for given in (case.key_bias, case.bias) if given is not None),
        "sinks": case.sinks is not None,
        "query_offset": case.query_offset is not None,
        "key_bias": case.key_bias is not None,
        "bias": case.bias is not None,
        "is_causal": case.is_causal,
        "scale": case.scale is not None,
        "softcap": case.softcap != 0,
        "dropout": case.dropout_p > 0,
        "deterministic": case.deterministic,
    }
    return frozenset(name for name in FEATURES if has[name])


def is_expanded(given: Tensor) -> bool:
    """Whether several numbers of a tensor are one in memory."""
    return any(size > 1 and stride == 0 for size, stride in zip(given.shape, given.stride(), strict=True))


def sees_a_key(case: AttentionCase) -> Tensor:
    """Which queries see a key whose logit is not -inf, bool [B, H, Sq]."""
    seen, heads = case.seen(), case.query.shape[1]
    if case.key_bias is not None:
        seen = seen & (reference.per_query_head(with_rank(case.key_bias, 3), heads)[:, :, None] > -torch.inf)
    if case.bias is not None:
        seen = seen & (reference.per_query_head(with_rank(case.bias, 4), heads) > -torch.inf)
    return seen.any(dim=-1)
