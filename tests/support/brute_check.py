"""Holds results of the package against tests/support/brute_force.py, within the one tolerance rule of dmattn.testing."""

from __future__ import annotations

import dataclasses

import brute_force
import numpy as np
import torch
from dmattn.testing import AttentionCase, tolerance

# Where neighbouring floats are so far apart, every logit that is made of one huge bias and usual numbers is that bias.
HUGE_ULP = 32


def numbers(tensor):
    """A tensor as numpy float64."""
    return tensor.detach().to(torch.float64).cpu().numpy()


def with_rank(tensor, rank):
    return tensor[(None,) * (rank - tensor.dim())] if tensor.dim() < rank else tensor


def problem_of(case: AttentionCase, visible=None, rounded: bool = False) -> brute_force.Problem:
    """The case in numpy. visible: bool [B, H, Sq, Sk] with is_causal in it; by default from case.visible. rounded: logits as kernels round."""
    batch, heads, queries, size = case.query.shape
    if visible is None:
        block = None if case.visible is None else case.visible.cpu().numpy()
        visible = brute_force.visibility(batch, heads, queries, case.key.shape[2], block=block, is_causal=case.is_causal)
    return brute_force.Problem(
        *(numbers(tensor) for tensor in (case.query, case.key, case.value)),
        visible,
        key_bias=None if case.key_bias is None else numbers(with_rank(case.key_bias, 3)),
        bias=None if case.bias is None else numbers(with_rank(case.bias, 4)),
        scale=size**-0.5 if case.scale is None else case.scale,
        softcap=case.softcap,
        dropout_p=case.dropout_p,
        dropout_seed=case.dropout_seed,
        rounds=getattr(np, str(tolerance.accumulate_dtype(case.query.dtype)).removeprefix("torch.")) if rounded else None,
    )


def truth_of(case: AttentionCase, problem: brute_force.Problem, gradients: bool = True) -> dict[str, torch.Tensor]:
    """out, lse and gradients by brute force, float64 on the CPU, in the shapes of the case's tensors."""
    out, lse = brute_force.forward(problem)
    results = {"out": out, "lse": lse}
    if gradients:
        results |= brute_force.backward(problem, *(numbers(gradient) for gradient in case.incoming_gradients()))
    shapes = {f"grad_{name}": leaf.shape for name, leaf in case.leaves().items()}
    return {name: torch.from_numpy(x).reshape(shapes.get(name, x.shape)) for name, x in results.items()}


def assert_right(case: AttentionCase, results, problem=None, *, rounded: bool = False, exact_from: float | None = None) -> float:
    """Every result is what brute force says, by the tolerance rule; brute force takes the reference's place as the truth.

    Args:
        case: the problem; its reference is only asked how large the rule's allowance is.
        results: any of out, lse and gradients, for the gradients case.incoming_gradients().
        problem: the same for brute force; by default made of the case.
        rounded: the truth's logits are rounded after every step as in kernels, and a row whose biases are all at least ``exact_from``
            has the allowance of the same row with biases near 0, a shift that no softmax notices: nothing swells with the huge numbers.
        exact_from: by default where neighbouring floats lie HUGE_ULP apart.

    Returns:
        The largest error of all results as a part of what is allowed.
    """
    gradients = any(name.startswith("grad_") for name in results)
    problem = problem_of(case, rounded=rounded) if problem is None else problem
    truth = truth_of(case, problem, gradients)
    given_case, case = case, _on_the_cpu(case)  # so that the device runs little but what is tested
    similar = _near_zero(case, problem, exact_from) if rounded else case
    exact, eager = (tolerance.run_reference(c, gradients) for c in (similar.to(torch.float64), similar))
    terms = tolerance.terms_of(similar, gradients)
    worst = 0.0
    for name, result in results.items():
        given, error, term = truth[name], eager[name].double() - exact[name], terms[name]
        if error.shape != given.shape:
            error = torch.from_numpy(brute_force.summed_to(with_rank(given, 4).shape, numbers(error))).reshape(given.shape)
            term = tolerance.Terms(*(tolerance._to_shape(t, given.shape) for t in (term.storage, term.arithmetic)))
        if name == "lse" and rounded:
            size = torch.where(torch.isfinite(given), given, 0.0).abs()
            term = tolerance.Terms(size, size + 1.0)
        error = torch.where(torch.isfinite(error), error, 0.0)
        worst = max(worst, tolerance._compare(name, result.cpu(), given, given + error, term, given_case))
    return worst


def _on_the_cpu(case: AttentionCase) -> AttentionCase:
    visible = None if case.visible is None else case.visible.cpu()
    leaves = {name: leaf.detach().cpu() for name, leaf in case.leaves().items()}
    return dataclasses.replace(case, mask=None, visible=visible, **leaves)


def _near_zero(case: AttentionCase, problem: brute_force.Problem, exact_from: float | None) -> AttentionCase:
    """The case with the largest bias of every row taken off that row's biases, where it is huge."""
    dtype = tolerance.accumulate_dtype(case.query.dtype)
    exact_from = HUGE_ULP / torch.finfo(dtype).eps if exact_from is None else exact_from
    total = np.zeros(problem.visible.shape)
    for given, axis in ((problem.key_bias, 2), (problem.bias, None)):
        if given is not None:
            wide = brute_force.by_query_head(given, *total.shape[:2])
            total = total + (wide if axis is None else wide[:, :, None])
    largest = np.where(problem.visible, total, -np.inf).max(axis=3, keepdims=True, initial=-np.inf)
    moved = total - np.where(np.isfinite(largest) & (abs(largest) >= exact_from), largest, 0.0)
    lowest = float(torch.finfo(dtype).min)
    near = torch.from_numpy(np.where(moved == -np.inf, moved, np.maximum(moved, lowest))).to(case.query.device, dtype)
    zeros = None if case.key_bias is None else torch.zeros_like(case.key_bias, dtype=dtype)
    return dataclasses.replace(case, key_bias=zeros, bias=near)
