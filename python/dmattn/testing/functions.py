"""Tests somebody's own attention function, which takes fewer arguments than dmattn's and returns its output alone."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmattn.testing.case import AttentionCase
from dmattn.testing.features import FEATURES, MASK_TYPES, features_in
from dmattn.testing.poison import poisoned_memory
from dmattn.testing.tolerance import assert_close_to_reference

# Which features an argument of a function offers, by its name. All others need no argument.
OFFERED_BY = {
    "mask": set(MASK_TYPES),
    "attn_mask": {*MASK_TYPES, "is_causal"},
    "key_bias": {"key_bias", "expanded_biases"},
    "bias": {"bias", "expanded_biases"},
    "is_causal": {"is_causal"},
    "scale": {"scale"},
    "softcap": {"softcap"},
    "dropout_seed": {"dropout"},
    "deterministic": {"deterministic"},
    "sinks": {"sinks"},
    "query_offset": {"query_offset"},
}
NEED_AN_ARGUMENT = set().union(*OFFERED_BY.values())


def features_of(fn: Callable[..., Any]) -> frozenset[str]:
    """The features that a function can be tested with, from the names of its arguments.

    What needs no argument (grouped heads, different lengths, strides, ...) is counted as offered; take away what the function does not
    do: ``features_of(fn) - {"grouped_heads"}``.

    Args:
        fn: takes query, key, value, and then any of these by name:
            ``mask`` (a mask of dmattn's, a bool tensor or None), ``attn_mask`` (bool [B, H, Sq, Sk], True = visible, or None),
            ``key_bias``, ``bias``, ``is_causal``, ``scale``, ``softcap``, ``dropout_p``, ``dropout_seed``, ``deterministic``,
            ``sinks``, ``query_offset``, as :func:`dmattn.attention` has them, and ``enable_gqa`` (a bool: fewer key heads).
    """
    offered = set().union(*(OFFERED_BY.get(name, set()) for name in _names(fn)))
    return frozenset(name for name in FEATURES if name in offered or name not in NEED_AN_ARGUMENT)


def assert_function_matches(case: AttentionCase, fn: Callable[..., Tensor], *, gradients: bool = True) -> dict[str, Tensor]:
    """As :func:`assert_matches_reference`, for a function that takes some of the arguments, and returns the output alone.

    >>> from hypothesis import given
    >>> from dmattn.testing import assert_function_matches, attention_cases, features_of
    >>> @given(attention_cases(features=features_of(my_attention) - {"blind_queries"}))
    ... def test_my_attention(case):
    ...     assert_function_matches(case, my_attention)

    Args:
        case: the problem.
        fn: called as ``fn(query, key, value, **named)`` with those arguments that it names; see :func:`features_of`.
        gradients: also run and compare backward.

    Returns:
        The output, and the gradients for a random gradient of the output, as ``grad_query`` and so on.

    Raises:
        TypeError: the case needs an argument that the function does not name.
        AssertionError: a wrong shape, dtype or value.
    """
    case = dataclasses.replace(case, grad_through_lse=False)
    names = _names(fn)
    missing = (features_in(case) & NEED_AN_ARGUMENT) - set().union(*(OFFERED_BY.get(name, set()) for name in names))
    if missing:
        raise TypeError(
            f"fn: expected arguments for {', '.join(sorted(missing))}, got a function of ({', '.join(names)}): draw cases by "
            "attention_cases(features=features_of(fn))"
        )
    leaves = {name: tensor.detach().requires_grad_(gradients) for name, tensor in case.leaves().items()}
    given = case.with_leaves(leaves)
    offered = _offered(given, has_causal="is_causal" in names)
    with poisoned_memory(case.query):
        out = fn(given.query, given.key, given.value, **{name: offered[name] for name in names if name in offered})
        _check_output(out, case, gradients)
        results = {"out": out.detach()}
        if gradients:
            # An input that the output does not depend on has a gradient of zeros.
            grad_out, grad_lse = case.incoming_gradients()
            incoming = case.laid_out_gradients(grad_out.to(out.dtype), grad_lse)[0]
            made = torch.autograd.grad(out, list(leaves.values()), incoming, allow_unused=True, materialize_grads=True)
            results |= {f"grad_{name}": gradient for name, gradient in zip(leaves, made, strict=True)}
    assert_close_to_reference(case, results)
    return results


def _check_output(out: object, case: AttentionCase, gradients: bool) -> None:
    """Says what is wrong with an output that cannot be compared."""
    assert isinstance(out, Tensor), f"out: expected one torch.Tensor, got {type(out).__name__}"
    shape = (*case.query.shape[:3], case.value.shape[3])
    assert out.shape == shape, f"out: expected [B, H, Sq, Dv] = {[*shape]}, got {[*out.shape]}"
    assert out.dtype == case.query.dtype, f"out: expected {case.query.dtype}, got {out.dtype}"
    assert out.requires_grad or not gradients, (
        "out: expected one with gradients, got none; gradients=False compares outputs alone"
    )


def _names(fn: Callable[..., Any]) -> list[str]:
    """The names of all arguments after the first three."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # no function, or a built-in one such as torch's scaled_dot_product_attention
        raise TypeError(
            f"fn: expected a function of Python, whose arguments have names, got {fn!r:.80}; wrap a built-in one in such a function"
        ) from None
    return [name for name, parameter in list(parameters.items())[3:] if parameter.kind in kinds]


def _offered(case: AttentionCase, has_causal: bool) -> dict[str, Any]:
    """The arguments a function may name."""
    attn_mask = None
    if case.visible is not None or (case.is_causal and not has_causal):
        attn_mask = dataclasses.replace(case, is_causal=case.is_causal and not has_causal).seen()
    seed = torch.tensor([case.dropout_seed], dtype=torch.int64, device=case.query.device) if case.dropout_p > 0 else None
    named = ("mask", "key_bias", "bias", "is_causal", "scale", "softcap", "dropout_p", "deterministic", "sinks", "query_offset")
    others = {"attn_mask": attn_mask, "dropout_seed": seed, "enable_gqa": case.query.shape[1] != case.key.shape[1]}
    return {name: getattr(case, name) for name in named} | others
