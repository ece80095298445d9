"""What a test asserts: forward and all gradients equal the reference, within the one tolerance rule, out of poisoned memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmattn.attention import attention
from dmattn.testing.case import AttentionCase
from dmattn.testing.poison import poisoned_memory
from dmattn.testing.tolerance import _run, assert_close_to_reference


def run(case: AttentionCase, fn: Callable[..., Any] = attention, *, gradients: bool = True) -> dict[str, Tensor]:
    """out, lse and, by default, all gradients of an implementation, computed in NaN-poisoned memory."""
    with poisoned_memory(case.query):
        return _run(case, gradients, lambda given: given.call(fn))


def assert_matches_reference(
    case: AttentionCase, fn: Callable[..., Any] = attention, *, gradients: bool = True
) -> dict[str, Tensor]:
    """Runs a case, with random gradients entering through out and lse, and compares everything with the reference.

    Args:
        case: the problem.
        fn: an implementation with :func:`dmattn.attention`'s signature.
        gradients: also run and compare backward.

    Returns:
        The results, for further checks.

    Raises:
        AssertionError: a wrong shape, dtype, stride order or value.
    """
    results = run(case, fn, gradients=gradients)
    assert results["out"].dtype == case.query.dtype, f"out: expected {case.query.dtype}, got {results['out'].dtype}"
    lse_dtype = torch.float64 if case.query.dtype == torch.float64 else torch.float32
    assert results["lse"].dtype == lse_dtype, f"lse: expected {lse_dtype}, got {results['lse'].dtype}"
    for name, leaf in case.leaves().items():
        if gradients:
            gradient = results[f"grad_{name}"]
            assert gradient.dtype == leaf.dtype, f"grad_{name}: expected {leaf.dtype}, got {gradient.dtype}"
    assert_close_to_reference(case, results)
    return results


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Every result of two runs is bitwise equal (NaN equals NaN).

    Raises:
        AssertionError: names the first result that differs.
    """
    assert a.keys() == b.keys(), f"expected the same results, got {sorted(a)} and {sorted(b)}"
    for name in a:
        equal = torch.equal(a[name].isnan(), b[name].isnan()) and torch.equal(_without_nan(a[name]), _without_nan(b[name]))
        assert equal, f"{name}: expected bitwise equal results, got a difference of up to {(a[name] - b[name]).abs().max():.3g}"


def _without_nan(given: Tensor) -> Tensor:
    return given.masked_fill(given.isnan(), 0.0)
