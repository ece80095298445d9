"""The one tolerance rule. Nothing here takes a tolerance, so no test can loosen it.

With everything in float64 as the truth, a result may be wrong by

    2 * (error of the reference run eagerly in the same dtypes, the largest over the tensor)
    + STORAGE_ULPS    * eps(query's dtype)    * (largest element, and root of the sum of squares of what is rounded on the way to it)
    + ARITHMETIC_ULPS * eps(accumulate dtype) * (the same, each term weighted by how sensitive it is to rounding in its logit)

The two roots are the first-order rounding error of the algorithm, with roundings taken as independent, evaluated on the case itself: a small
tensor whose eager error is zero by luck still has an honest allowance, and a large one gains next to nothing from its size. A number below
the smallest normal one of its dtype is rounded to the same step as that. NaN and infinities must be where the truth, rounded to the result's
dtype, has them.

One rounding is evaluated exactly: that of out, which backward makes delta from. Where rows of out are alike (many queries, few keys) so are
their roundings, and add up. A gradient may lie anywhere between the truth and the truth for a rounded out; what it is wrong by counts from
there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from dmattn import reference
from dmattn.masks.heads import with_rank
from dmattn.testing.case import AttentionCase

# Half an ulp each for a result, a weight, a logit's gradient, and out as saved for backward; a few standard deviations.
STORAGE_ULPS: Final = 2
# A few roundings each for a product of D terms, exp, and a sum over keys; a few standard deviations.
ARITHMETIC_ULPS: Final = 8
TRUTH: Final = torch.float64


def assert_close_to_reference(case: AttentionCase, results: dict[str, Tensor]) -> None:
    """Compares results with the reference by the rule above.

    Args:
        case: the problem.
        results: any of out, lse and ``grad_query``, ``grad_key``, ``grad_value``, ``grad_key_bias``, ``grad_bias``, ``grad_sinks``,
            for the gradients ``case.incoming_gradients()``.

    Raises:
        AssertionError: names the result, the place, the error and what was allowed.
    """
    differentiated = any(name.startswith("grad_") for name in results)
    truth, eager = run_reference(case.to(TRUTH), differentiated), run_reference(case, differentiated)
    terms = terms_of(case, differentiated)
    for name, result in results.items():
        _compare(name, result, truth[name], eager[name], terms[name], case)


def run_reference(case: AttentionCase, differentiated: bool = True) -> dict[str, Tensor]:
    """out, lse and, if asked, all gradients of the reference in the case's dtypes."""
    return _run(case, differentiated, AttentionCase.call_reference)


def _run(case: AttentionCase, differentiated: bool, call: Callable[[AttentionCase], tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    leaves = {name: tensor.detach().requires_grad_(differentiated) for name, tensor in case.leaves().items()}
    out, lse = call(case.with_leaves(leaves))
    results = {"out": out.detach(), "lse": lse.detach()}
    if differentiated:
        grad_out, grad_lse = case.incoming_gradients()
        incoming = case.laid_out_gradients(grad_out.to(out.dtype), grad_lse.to(lse.dtype))
        gradients = torch.autograd.grad((out, lse), list(leaves.values()), incoming)
        results |= {f"grad_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return results


@dataclasses.dataclass(frozen=True)
class Terms:
    """For each element of a result what half-precision storage and what arithmetic can do to it, in ulps of either, and how much it
    moves when out is rounded before delta is made from it."""

    storage: Tensor
    arithmetic: Tensor
    by_rounded_out: Tensor | float = 0.0


def terms_of(case: AttentionCase, differentiated: bool = True) -> dict[str, Terms]:
    """The roots of the sums of squared terms of out, lse and, if asked, all gradients, in float64."""
    exact = case.to(TRUTH)
    heads, kv_heads = exact.query.shape[1], exact.key.shape[1]
    seen = exact.seen()
    hidden = ~seen.any(dim=2)[..., None]
    query = _finite(exact.query)
    key = _finite(reference.per_query_head(exact.key, heads).masked_fill(hidden, 0.0))
    value = _finite(reference.per_query_head(exact.value, heads).masked_fill(hidden, 0.0))
    scale = abs(query.shape[-1] ** -0.5 if exact.scale is None else exact.scale)
    logits = (query.abs() @ key.abs().transpose(-1, -2)) * scale
    for given, rank in ((exact.key_bias, 3), (exact.bias, 4)):
        if given is not None:
            wide = reference.per_query_head(with_rank(given, rank), heads).abs()
            logits = logits + _finite(wide[:, :, None] if rank == 3 else wide)

    _, lse = exact.call_reference()
    finite_lse = torch.where(torch.isfinite(lse), lse, 0.0).abs()
    weights = _finite(_weights(exact))
    kept = torch.ones_like(weights)
    if exact.dropout_p > 0:
        kept = reference.dropout_multiplier(exact.dropout_seed, exact.dropout_p, tuple(seen.shape), seen.device).to(TRUTH)
    # What keys keep of their weights beside a sink, and what that is wrong by for an lse that is wrong by 1.
    share = torch.ones_like(lse)[..., None] if exact.sinks is None else exact.share_of_keys(lse)[..., None]
    lost = 1.0 - share
    out = (weights * share * kept) @ value

    # A logit is wrong in proportion to its absolute terms, a weight as its logit, and all weights of a row as their sum.
    logits = torch.where(weights > 0, logits, 0.0)
    row = (weights * logits).square().sum(dim=-1, keepdim=True).sqrt()
    stored, summed = torch.finfo(case.query.dtype), torch.finfo(accumulate_dtype(case.query.dtype))
    wrong_weights = torch.where(seen, weights * (1.0 + logits + row) + summed.tiny / summed.eps, 0.0)
    wrong_share = lost * (finite_lse[..., None] + 1.0 + row + _sinks_of(exact).abs())
    kept_weights = weights * share * kept
    out_storage = _rss(_rounded(kept_weights, stored.tiny), value) + lost * out.abs()
    out_arithmetic = _rss(wrong_weights * share * kept, value) + (row + wrong_share) * out.abs()
    terms = {"out": Terms(out_storage, out_arithmetic), "lse": Terms(finite_lse, finite_lse + 1.0 + row[..., 0])}
    if not differentiated:
        return terms

    grad_out, grad_lse = (g.to(TRUTH) for g in exact.incoming_gradients())
    dp = (grad_out @ value.transpose(-1, -2)) * kept
    inner = (grad_out * out).sum(-1, keepdim=True)
    delta = share * inner - grad_lse[..., None]
    ds = weights * (share * dp - delta)
    wrong_dp = share * _rss(grad_out, value.transpose(-1, -2)) * kept
    wrong_ds = wrong_weights * (share * dp - delta).abs() + weights * (wrong_dp + wrong_share * share * (dp - inner).abs())
    # delta is wrong for a whole row at once: out is rounded when it is saved, and computed with rounding
    wrong_delta = {
        "storage": _root_of_squares(grad_out * _rounded(out, stored.tiny)),
        "arithmetic": _root_of_squares(grad_out * out_arithmetic) + delta.abs() + lost * inner.abs(),
    }
    # Beside a sink the gradient that comes in is multiplied and rounded, too.
    rounded_ds = ds.abs() + weights * wrong_dp if exact.sinks is not None else ds
    wrong_kept = (wrong_weights + weights * wrong_share) * share * kept
    made: dict[str, dict[str, Tensor]] = {}
    for kind, p, s, least in (
        ("storage", kept_weights, rounded_ds, stored.tiny),
        ("arithmetic", wrong_kept, wrong_ds, summed.tiny),
    ):
        common = weights * wrong_delta[kind]
        p, s = _rounded(p, least), torch.where(weights > 0, s.abs() + least, 0.0)
        scaled_query = scale * query.abs() + least  # kernels may multiply the query by the scale first
        made[kind] = {
            "grad_query": scale * (_rss(s, key) + common @ key.abs() + row * (ds @ key).abs()),
            "grad_key": _to_kv_heads(_rss(s.mT, scaled_query) + _rss(common.mT, scaled_query), kv_heads),
            "grad_value": _to_kv_heads(_rss(p.mT, grad_out), kv_heads),
        }
        if exact.key_bias is not None:
            shape = (*with_rank(exact.key_bias, 3).shape[:2], 1, exact.key_bias.shape[-1])
            made[kind]["grad_key_bias"] = (_to_shape(s, shape) + _to_shape(common, shape)).reshape(exact.key_bias.shape)
        if exact.bias is not None:
            by_row = common.sum(-1, keepdim=True) if exact.bias.shape[-1] == 1 else common
            made[kind]["grad_bias"] = _to_shape(s, exact.bias.shape) + _to_shape(by_row, exact.bias.shape)
        if kind == "arithmetic" and case.grad_layout == "one_number":  # a running sum of n equal terms may be n / 4 ulps off
            like = query.shape[2] / (4 * ARITHMETIC_ULPS)
            made[kind]["grad_value"] += like * _to_kv_heads(kept_weights.mT @ grad_out.abs(), kv_heads)
        if exact.sinks is not None:
            by_row = lost * wrong_delta[kind] + (wrong_share * inner.abs() if kind == "arithmetic" else 0.0)
            made[kind]["grad_sinks"] = by_row.sum((0, 2, 3))
    # delta is made from out as it was saved; a wrong delta counts like an incoming gradient of lse
    wrong_inner = (grad_out * (_finite(out.to(case.query.dtype).to(TRUTH)) - out)).sum(-1, keepdim=True)
    by_rounded_out = _gradients_through_lse(exact, -(share * wrong_inner)[..., 0])
    if exact.sinks is not None:
        by_rounded_out["grad_sinks"] = -(lost * wrong_inner).sum((0, 2, 3))
    return terms | {
        name: Terms(made["storage"][name], made["arithmetic"][name], by_rounded_out[name]) for name in made["storage"]
    }


def _gradients_through_lse(exact: AttentionCase, grad_lse: Tensor) -> dict[str, Tensor]:
    """Of all leaves, for an incoming gradient of lse, finite numbers alone."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in exact.leaves().items()}
    with torch.enable_grad():
        _, lse = exact.with_leaves(leaves).call_reference()
        gradients = torch.autograd.grad(lse, list(leaves.values()), grad_lse, allow_unused=True, materialize_grads=True)
    return {f"grad_{name}": _finite(gradient) for name, gradient in zip(leaves, gradients, strict=True)}


def assert_tangents_close(case: AttentionCase, directions: dict[str, Tensor], tangents: dict[str, Tensor]) -> None:
    """The rule for forward mode.

    Args:
        case: the problem, without sinks.
        directions: tangents of the case's leaves, by name.
        tangents: what an implementation makes of them, of out and lse; 0 where lse is -inf.

    Raises:
        AssertionError: names the tangent, the place, the error and what was allowed.
        ValueError: the case has sinks.
    """

    def expected(given: AttentionCase) -> dict[str, Tensor]:
        leaves = given.leaves()

        def call(*moved: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = given.with_leaves(dict(zip(leaves, moved, strict=True))).call_reference()
            return out, torch.where(torch.isinf(lse), 0.0, lse)

        along = tuple(directions[name].to(leaf.dtype) for name, leaf in leaves.items())
        return dict(zip(("out", "lse"), torch.func.jvp(call, tuple(leaves.values()), along)[1], strict=True))

    truth, eager, terms = expected(case.to(TRUTH)), expected(case), tangent_terms(case, directions)
    for name, tangent in tangents.items():
        _compare(name, tangent, truth[name], eager[name], terms[name], case)


def tangent_terms(case: AttentionCase, directions: dict[str, Tensor]) -> dict[str, Terms]:
    """What arithmetic can do to the tangents of out and lse: sums of absolute terms, weighted by how wrong a weight can be."""
    if case.sinks is not None:
        raise ValueError("case: expected none with sinks, whose tangents the rule does not know, got sinks")
    exact = case.to(TRUTH)
    along = {name: given.to(TRUTH) for name, given in directions.items()}
    heads = exact.query.shape[1]
    seen = exact.seen()
    hidden = ~seen.any(dim=2)[..., None]

    def wide(given: Tensor) -> Tensor:
        return _finite(reference.per_query_head(given, heads).masked_fill(hidden, 0.0)).abs()

    query, key, value = _finite(exact.query).abs(), wide(exact.key), wide(exact.value)
    query_t, key_t, value_t = _finite(along["query"]).abs(), wide(along["key"]), wide(along["value"])
    scale = abs(query.shape[-1] ** -0.5 if exact.scale is None else exact.scale)
    logits = query @ key.mT * scale
    logits_t = (query_t @ key.mT + query @ key_t.mT) * scale
    for name, rank in (("key_bias", 3), ("bias", 4)):
        if name in along:
            bias, bias_t = (
                _finite(reference.per_query_head(with_rank(given, rank), heads)).abs()
                for given in (exact.leaves()[name], along[name])
            )
            logits = logits + (bias[:, :, None] if rank == 3 else bias)
            logits_t = logits_t + (bias_t[:, :, None] if rank == 3 else bias_t)
    weights = _finite(_weights(exact))
    logits, logits_t = (torch.where(weights > 0, given, 0.0) for given in (logits, logits_t))
    wrong = weights * (1.0 + logits + (weights * logits).sum(-1, keepdim=True))
    kept = torch.ones_like(weights)
    if exact.dropout_p > 0:
        kept = reference.dropout_multiplier(exact.dropout_seed, exact.dropout_p, tuple(seen.shape), seen.device).to(TRUTH)
    moved = logits_t + (weights * logits_t).sum(-1, keepdim=True)
    return {
        "out": Terms(torch.zeros((), dtype=TRUTH), (wrong * kept * moved) @ value + (wrong * kept) @ value_t),
        "lse": Terms(torch.zeros((), dtype=TRUTH), (wrong * moved).sum(-1)),
    }


def _weights(exact: AttentionCase) -> Tensor:
    """The softmax before dropout, [B, H, Sq, Sk]: the gradient of lse with respect to the logits."""
    shape = exact.seen().shape
    logits = torch.zeros(shape, dtype=TRUTH, device=exact.query.device)
    if exact.bias is not None:
        logits += reference.per_query_head(with_rank(exact.bias, 4), shape[1])
    with torch.enable_grad():
        _, lse = dataclasses.replace(exact, bias=logits.requires_grad_(), dropout_p=0.0).call_reference()
        return torch.autograd.grad(lse, logits, torch.ones_like(lse))[0]


def _sinks_of(exact: AttentionCase) -> Tensor:
    """The sinks as [H, 1, 1]; 0 for those that take nothing, and where there are none."""
    return torch.zeros((), dtype=TRUTH) if exact.sinks is None else _finite(exact.sinks)[:, None, None]


def _scaled(given: Tensor) -> tuple[Tensor, float]:
    """A tensor over its largest number, and that: squares of tiny numbers would be 0, those of huge ones infinite."""
    size = min(max(_largest(given.abs()), torch.finfo(TRUTH).tiny), torch.finfo(TRUTH).max)
    return given / size, size


def _root_of_squares(given: Tensor) -> Tensor:
    given, size = _scaled(given)
    return given.square().sum(-1, keepdim=True).sqrt() * size


def _rss(a: Tensor, b: Tensor) -> Tensor:
    """Root of the sum of squares of the products that a @ b sums."""
    (a, a_size), (b, b_size) = _scaled(a), _scaled(b)
    return (a.square() @ b.square()).sqrt() * a_size * b_size


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype products are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _compare(name: str, result: Tensor, truth: Tensor, eager: Tensor, terms: Terms, case: AttentionCase) -> float:
    return compare_in(case.query.dtype, name, result, truth, eager, terms, case)


def compare_in(dtype: torch.dtype, name: str, result: Tensor, truth: Tensor, eager: Tensor, terms: Terms, case: object) -> float:
    """The largest error as a part of what is allowed; dtype: what the inputs are stored in."""
    assert result.shape == truth.shape, f"{name}: expected shape {list(truth.shape)}, got {list(result.shape)} in {case}"
    if result.numel() == 0:
        return 0.0
    summed = torch.finfo(accumulate_dtype(dtype))
    stored = torch.finfo(result.dtype)
    if name != "lse":  # inside a gradient there are weights and out in query's dtype, whatever dtype the gradient has
        stored = max(stored, torch.finfo(dtype), key=lambda info: info.eps)
    rounded = truth.to(result.dtype).to(TRUTH)
    given = result.detach().to(TRUTH)
    finite = torch.isfinite(rounded)
    same = torch.where(torch.isnan(rounded), torch.isnan(given), rounded == given)
    wrong = ~finite & ~same | finite & ~torch.isfinite(given)
    if bool(wrong.any()):
        where = tuple(wrong.nonzero()[0].tolist())
        count = int(wrong.sum())
        raise AssertionError(
            f"{name}{list(where)}: expected {rounded[where]:.6g}, got {given[where]:.6g} ({count} such elements) in {case}"
        )
    comparable = finite & torch.isfinite(eager)
    eager_error = _largest(torch.where(comparable, eager.to(TRUTH) - truth, 0.0).abs())
    size = _largest(torch.where(finite, truth, 0.0).abs())
    allowed = (
        2 * eager_error
        + STORAGE_ULPS * stored.eps * (_largest(terms.storage) + size + stored.tiny)
        + ARITHMETIC_ULPS * (summed.eps * (_largest(terms.arithmetic) + size) + summed.tiny)
    )
    error = torch.where(finite, given - truth, 0.0)
    by_out = error.new_zeros(()) + terms.by_rounded_out
    error = (error - error.clamp(by_out.clamp(max=0.0), by_out.clamp(min=0.0))).abs()
    if not _largest(error) <= allowed:  # NaN is not, either
        where = tuple(torch.unravel_index(error.argmax(), error.shape))
        raise AssertionError(
            f"{name}{[int(i) for i in where]}: expected {truth[where]:.9g}, got {given[where]:.9g}: error {error[where]:.3g}, allowed "
            f"{allowed:.3g} (eager {eager_error:.3g}); {int((error > allowed).sum())} of {error.numel()} elements are off in {case}"
        )
    return _largest(error) / allowed


def _rounded(given: Tensor, least: float) -> Tensor:
    """How large a number counts where it is rounded: ``least``, the smallest normal number, more than it is, or 0 for 0, which is exact."""
    return torch.where(given == 0.0, 0.0, given.abs() + least)


def _finite(given: Tensor) -> Tensor:
    """0 for NaN and infinities: what they reach is compared by place, and what they do not reach is allowed no more for their sake."""
    return torch.where(torch.isfinite(given), given, 0.0)


def _largest(tensor: Tensor) -> float:
    return float(tensor.max()) if tensor.numel() else 0.0


def _to_kv_heads(given: Tensor, kv_heads: int) -> Tensor:
    """Independent errors of the query heads of a group add up to their key head's."""
    given, size = _scaled(given)
    return (given.unflatten(1, (kv_heads, -1)).square().sum(dim=2).sqrt() if kv_heads else given) * size


def _to_shape(given: Tensor, shape: Sequence[int]) -> Tensor:
    """Independent errors of a [B, H, ...] tensor, added up over what was broadcast from ``shape``."""
    wanted = (1,) * (given.dim() - len(shape)) + tuple(shape)
    given, given_size = _scaled(given)
    squares = given.square()
    for axis, size in enumerate(wanted):
        if size == 1 and squares.shape[axis] != 1:
            squares = squares.sum(dim=axis, keepdim=True)
    if wanted[1] != squares.shape[1]:
        squares = squares.unflatten(1, (wanted[1], -1)).sum(dim=2)
    return squares.sqrt().reshape(tuple(shape)) * given_size
