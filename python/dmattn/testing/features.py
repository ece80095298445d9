"""What an attention problem asks of an implementation, by name, so that tests can leave out what a function does not offer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

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


def _has_mask(kind: type, case: AttentionCase) -> bool:
    return isinstance(case.mask, kind)


# A case of dmattn.testing -> whether it has the feature.
PREDICATES: dict[str, Callable[[AttentionCase], bool]] = {
    "grouped_heads": lambda case: case.query.shape[1] != case.key.shape[1],
    "different_lengths": lambda case: case.query.shape[2] != case.key.shape[2],
    "empty_lengths": lambda case: 0 in (case.query.shape[2], case.key.shape[2]),
    "value_size": lambda case: case.value.shape[3] != case.query.shape[3],
    "strides": lambda case: not all(x.is_contiguous() for x in (case.query, case.key, case.value)),
    # Of gradients that enter through out and lse and are not contiguous; the gradient of a sum has stride 0.
    "gradient_strides": lambda case: case.grad_layout != "contiguous",
    # Queries that see nothing: masked out, before the first key, or only logits of -inf.
    "blind_queries": lambda case: not bool(sees_a_key(case).all()),
    **{name: partial(_has_mask, kind) for name, kind in MASK_TYPES.items()},
    # A key_bias or bias of several rows, keys or heads that are one in memory: stride 0.
    "expanded_biases": lambda case: any(is_expanded(given) for given in (case.key_bias, case.bias) if given is not None),
    "sinks": lambda case: case.sinks is not None,
    "query_offset": lambda case: case.query_offset is not None,
    "key_bias": lambda case: case.key_bias is not None,
    "bias": lambda case: case.bias is not None,
    "is_causal": lambda case: case.is_causal,
    "scale": lambda case: case.scale is not None,
    "softcap": lambda case: case.softcap != 0,
    "dropout": lambda case: case.dropout_p > 0,
    "deterministic": lambda case: case.deterministic,
}
FEATURES = tuple(PREDICATES)


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
    return frozenset(name for name, has in PREDICATES.items() if has(case))


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
