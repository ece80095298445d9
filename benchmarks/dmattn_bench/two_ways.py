"""Rules for results that are compared with each other or with torch, where the reference would be too slow; no caller gives a tolerance.

Each allows what the roundings on the way can do, as :mod:`dmattn.testing.tolerance` does beside the reference.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.nn.functional as F
from dmattn.testing.tolerance import TRUTH, Terms, accumulate_dtype, compare_in
from torch import Tensor

# To the dtype of query, of two ways to one result.
ROUNDINGS: Final = 6
# Terms of a sum, at most.
LONGEST: Final = 2**20


def assert_sum_close(given: Tensor, dim: int | None, keepdim: bool, result: Tensor) -> None:
    """The rule for a sum of floating-point numbers: eager is torch.sum, and every term takes part in what is rounded on the way.

    Args:
        given: what was summed.
        dim, keepdim: as for torch.sum.
        result: the sum.

    Raises:
        AssertionError: names the place, the error and what was allowed.
    """
    dims = list(range(given.dim())) if dim is None else [dim]
    exact = given.detach().to(TRUTH)
    truth, size = exact.sum(dims, keepdim=keepdim), exact.abs().sum(dims, keepdim=keepdim)
    size = torch.where(torch.isfinite(size), size, 0.0)
    assert result.dtype == given.dtype, f"sum: expected dtype {given.dtype}, got {result.dtype}"
    eager = given.detach().sum(dims, keepdim=keepdim)
    terms = Terms(torch.zeros((), dtype=TRUTH, device=given.device), size)
    compare_in(given.dtype, "sum", result, truth, eager, terms, f"{list(given.shape)} over {dim}")


def assert_same_by_another_way(result: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """The rule for two ways to compute one result of a problem that is too large for the reference.

    Either way rounds to the dtype of query at most three times: a weight or a logit's gradient, out as saved for backward, the result. A
    rounding is off by up to half an ulp to either side, eps / sqrt(12) in the root mean square. Six of them, taken as independent, make
    eps / sqrt(2) of the result's norm.

    That norm hides one wrong row (along the last dimension) among many, so each row is compared as well. Of one row nothing can be taken as
    independent: six halves of an ulp make 3 eps of its terms. Terms can cancel, as in the gradient of a query that sees one key, so a row's
    size is the largest norm among the rows near it, which see about the same keys: up to sqrt(n) before and behind it in either of the two
    dimensions before the last, n rows long. To that comes what sums in the accumulate dtype are off by, as in
    :func:`assert_same_in_another_order`, of the largest row of all.

    Args:
        result, expected: tensors of one shape.
        dtype: that of query.

    Raises:
        AssertionError: gives the distance, relative in the Euclidean norm, and what was allowed; of a row its index, too.
    """
    eps = torch.finfo(dtype).eps
    _compare_norms(result, expected, eps * (ROUNDINGS / 12) ** 0.5)
    _compare_rows(result, expected, eps * ROUNDINGS / 2, LONGEST**0.5 * torch.finfo(accumulate_dtype(dtype)).eps)


def assert_same_sums_by_another_way(result: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """The rule of :func:`assert_same_by_another_way` for results with one number for each key, as the gradient of key_bias [B, H, Sk].

    The last dimension is no vector of a head, so each number is compared by itself, as a row of one. It is the sum over queries of a
    weight times a difference. Six halves of an ulp of each term, of either sign, make 3 eps of the root of the sum of their squares. Where
    what comes in is random, a number is about as large as that root for its key; where it happens to be small, numbers near it are not.

    Args:
        result, expected: tensors of one shape, [.., S].
        dtype: that of query.

    Raises:
        AssertionError: as :func:`assert_same_by_another_way`.
    """
    assert_same_by_another_way(result[..., None], expected[..., None], dtype)


def assert_same_lse_by_another_way(result: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """The rule for lse [B, H, Sq] of two ways to one result: nothing on the way to it is rounded to the dtype of query.

    So the whole is compared as in :func:`assert_same_in_another_order`, and each number by itself: sums in the accumulate dtype are off by
    2^10 ulps of the largest of all.

    Args:
        result, expected: tensors of one shape, without infinities.
        dtype: that of query.

    Raises:
        AssertionError: as :func:`assert_same_by_another_way`.
    """
    summed = accumulate_dtype(dtype)
    assert_same_in_another_order(result, expected, summed)
    _compare_rows(result[..., None], expected[..., None], 0.0, LONGEST**0.5 * torch.finfo(summed).eps)


def assert_same_in_another_order(result: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """The rule for two results that are rounded alike, and differ only in the order of their sums in the accumulate dtype.

    2^20 roundings, taken as independent, take a sum 2^10 ulps away. A number that moves by a part of the ulp it is stored with is stored
    an ulp off with that part as its probability. So the root mean square of what is stored moves by the root of the product of both.

    Args:
        result, expected: tensors of one shape.
        dtype: that of query.

    Raises:
        AssertionError: gives the distance, relative in the Euclidean norm, and what was allowed.
    """
    moved = LONGEST**0.5 * torch.finfo(accumulate_dtype(dtype)).eps
    _compare_norms(result, expected, (moved * torch.finfo(dtype).eps) ** 0.5)


def _compare_norms(result: Tensor, expected: Tensor, allowed: float) -> None:
    assert result.shape == expected.shape, f"expected shape {list(expected.shape)}, got {list(result.shape)}"
    given, wanted = result.detach().to(TRUTH), expected.detach().to(TRUTH)
    error, norm = float(torch.linalg.vector_norm(given - wanted)), float(torch.linalg.vector_norm(wanted))
    if not error <= allowed * norm:  # NaN is not, either
        raise AssertionError(f"{list(result.shape)}: distance {error:.3g} of a norm of {norm:.3g}, allowed {allowed:.3g} of it")


def _compare_rows(result: Tensor, expected: Tensor, of_near: float, of_all: float) -> None:
    if expected.dim() < 2 or expected.numel() == 0:
        return  # one row, or none
    given, wanted = (x.detach().to(TRUTH) for x in (result, expected))
    errors, norms = torch.linalg.vector_norm(given - wanted, dim=-1), torch.linalg.vector_norm(wanted, dim=-1)
    near = _largest_near(norms, -1)
    near = _largest_near(near, -2) if near.dim() > 1 else near
    allowed = of_near * near + of_all * norms.max()
    wrong = (~(errors <= allowed)).nonzero().tolist()  # NaN is wrong, too
    if wrong:
        row = tuple(wrong[0])
        raise AssertionError(
            f"{list(result.shape)}: row {wrong[0]}: distance {errors[row]:.3g} beside rows of norms up to {near[row]:.3g}, allowed"
            f" {allowed[row]:.3g}; {len(wrong)} of {norms.numel()} rows are wrong"
        )


def _largest_near(norms: Tensor, dim: int) -> Tensor:
    """For each of n numbers along a dimension the largest of those up to sqrt(n) before and behind it."""
    along = norms.movedim(dim, -1)
    reach = math.isqrt(along.shape[-1])
    largest = F.max_pool1d(along.reshape(1, -1, along.shape[-1]), 2 * reach + 1, stride=1, padding=reach)
    return largest.view(along.shape).movedim(-1, dim)
