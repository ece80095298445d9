"""Rules of the ops ``reduce_sum`` and ``reduce_max``: gradients, tangents and vmap, composed of torch operations and of the ops themselves.

The gradient of a maximum is shared evenly among equal elements, as that of ``torch.amax``; a NaN that won shares it with other NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmattn import sharding
from dmattn._library import rules
from dmattn.autograd import are_plain, below_autograd, has_tangent
from dmattn.composed import in_front
from dmattn.fake import check_dim


def kept(result: Tensor, rank: int, dim: int | None, keepdim: bool) -> Tensor:
    """A result with the reduced dimensions as ones, so that it broadcasts to the input."""
    if keepdim or rank == 0:
        return result
    return result.reshape((1,) * rank) if dim is None else result.unsqueeze(dim)


def shares(given: Tensor, result: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    """What part each element has in the maximum, in the input's dtype: 1 / n for each of n that are equal to it."""
    largest = kept(result, given.dim(), dim, keepdim)
    wins = (given == largest) | (given.isnan() & largest.isnan())
    counts = wins.sum() if dim is None else wins.sum(dim, keepdim=True)
    return wins.to(given.dtype) / counts


def folded(
    function: Any, info: Any, in_dims: tuple[Any, ...], given: Tensor, dim: int | None, keepdim: bool
) -> tuple[Tensor, int]:
    """One call for all samples of vmap: each has its own sequences, and the order of additions is theirs alone."""
    given = in_front(given, in_dims[0], info.batch_size)
    rank = given.dim() - 1
    check_dim(given.shape[1:], dim)
    if rank == 0:
        return function.apply(given[:, None], 1, False), 0
    if dim is not None:
        return function.apply(given, dim % rank + 1, keepdim), 0
    result = function.apply(given.flatten(1), 1, False)
    return (result.reshape(-1, *(1,) * rank) if keepdim else result), 0


class Sum(torch.autograd.Function):
    """input, dim, keepdim -> the sum."""

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        result: Tensor = below_autograd(torch.ops.dmattn.reduce_sum, inputs)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.shape, (_, ctx.dim, ctx.keepdim) = inputs[0].shape, inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return kept(grad, len(ctx.shape), ctx.dim, ctx.keepdim).expand(ctx.shape), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        result: Tensor = torch.ops.dmattn.reduce_sum(tangent, ctx.dim, ctx.keepdim)
        return result

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        return folded(Sum, info, in_dims, *inputs)


class Max(torch.autograd.Function):
    """input, dim, keepdim -> the maximum."""

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        result: Tensor = below_autograd(torch.ops.dmattn.reduce_max, inputs)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)
        _, ctx.dim, ctx.keepdim = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        given, result = ctx.saved_tensors
        part = shares(given.detach(), result.detach(), ctx.dim, ctx.keepdim)
        return part * kept(grad, given.dim(), ctx.dim, ctx.keepdim), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        given, output = ctx.saved_tensors
        part = shares(given.detach(), output.detach(), ctx.dim, ctx.keepdim)
        result: Tensor = torch.ops.dmattn.reduce_sum(part * tangent, ctx.dim, ctx.keepdim)
        return result

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        return folded(Max, info, in_dims, *inputs)


# The dispatcher leaves out arguments that have their default values.
def sum_rule(given: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    return _ruled(Sum, torch.ops.dmattn.reduce_sum, (given, dim, keepdim))


def max_rule(given: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    return _ruled(Max, torch.ops.dmattn.reduce_max, (given, dim, keepdim))


def transformed_sum_rule(given: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    return Sum.apply(given, dim, keepdim)


def transformed_max_rule(given: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    return Max.apply(given, dim, keepdim)


def _ruled(function: Any, op: Any, inputs: tuple[Any, ...]) -> Any:
    if not are_plain(inputs) and sharding.is_sharded(inputs[0]):
        return sharding.reduce(op, *inputs)
    if has_tangent(inputs) or (torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)):
        return function.apply(*inputs)
    return below_autograd(op, inputs)


_rules = rules()
_rules.impl("reduce_sum", sum_rule, "Autograd")
_rules.impl("reduce_sum", transformed_sum_rule, "FuncTorchDynamicLayerFrontMode")
_rules.impl("reduce_max", max_rule, "Autograd")
_rules.impl("reduce_max", transformed_max_rule, "FuncTorchDynamicLayerFrontMode")
