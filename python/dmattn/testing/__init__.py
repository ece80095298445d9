"""Property tests for attention: hypothesis strategies, the reference, and one tolerance rule. Needs hypothesis.

>>> from hypothesis import given
>>> from dmattn.testing import assert_matches_reference, attention_cases
>>> @given(attention_cases())
... def test_my_attention(case):
...     assert_matches_reference(case, my_attention)

``my_attention`` has the signature of :func:`dmattn.attention`; for one with fewer arguments there is :func:`assert_function_matches`.
"""

from dmattn.reference import attention as reference_attention
from dmattn.reference import dropout_multiplier, per_query_head, top_k_visible
from dmattn.testing import strategies
from dmattn.testing.case import AttentionCase
from dmattn.testing.checks import assert_matches_reference, assert_same_bits, run
from dmattn.testing.features import FEATURES, features_in
from dmattn.testing.functions import assert_function_matches, features_of
from dmattn.testing.poison import poisoned_memory
from dmattn.testing.strategies import DrawnMask, Shape, attention_cases, masks, scores, shapes
from dmattn.testing.tolerance import assert_close_to_reference, assert_tangents_close, run_reference

__all__ = [
    "FEATURES",
    "AttentionCase",
    "DrawnMask",
    "Shape",
    "assert_close_to_reference",
    "assert_function_matches",
    "assert_matches_reference",
    "assert_same_bits",
    "assert_tangents_close",
    "attention_cases",
    "dropout_multiplier",
    "features_in",
    "features_of",
    "masks",
    "per_query_head",
    "poisoned_memory",
    "reference_attention",
    "run",
    "run_reference",
    "scores",
    "shapes",
    "strategies",
    "top_k_visible",
]
