"""Rules of the ops ``reduce_sum`` and ``reduce_max``: gradients, tangents and vmap, composed of torch operations and of the ops themselves.

The gradient of a maximum is shared evenly among equal elements, as that of ``torch.amax``; a NaN that won shares it with other NaN.
"""

from __future__ import annotations

from functools import partial
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


class Reduction(torch.autograd.Function):
    """ "reduce_sum" or "reduce_max", input, dim, keepdim -> the result."""

    @staticmethod
    def forward(name: str, *inputs: Any) -> Tensor:
        result: Tensor = below_autograd(getattr(torch.ops.dmattn, name), inputs)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        name, given, ctx.dim, ctx.keepdim = inputs
        ctx.shape = given.shape
        saved = (given, output) if name == "reduce_max" else ()
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grad = kept(grad, len(ctx.shape), ctx.dim, ctx.keepdim)
        return None, _shares(ctx) * grad if ctx.saved_tensors else grad.expand(ctx.shape), None, None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *others: None) -> Tensor:
        tangent = _shares(ctx) * tangent if ctx.saved_tensors else tangent
        result: Tensor = torch.ops.dmattn.reduce_sum(tangent, ctx.dim, ctx.keepdim)
        return result

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], name: str, given: Tensor, dim: int | None, keepdim: bool) -> tuple[Tensor, int]:
        """One call for all samples: each has its own sequences, and the order of additions is theirs alone."""
        given = in_front(given, in_dims[1], info.batch_size)
        rank = given.dim() - 1
        check_dim(given.shape[1:], dim)
        if rank == 0:
            return Reduction.apply(name, given[:, None], 1, False), 0
        if dim is not None:
            return Reduction.apply(name, given, dim % rank + 1, keepdim), 0
        result = Reduction.apply(name, given.flatten(1), 1, False)
        return (result.reshape(-1, *(1,) * rank) if keepdim else result), 0


def _shares(ctx: Any) -> Tensor:
    given, output = ctx.saved_tensors
    return shares(given.detach(), output.detach(), ctx.dim, ctx.keepdim)


# The dispatcher leaves out arguments that have their default values.
def _rule(name: str, given: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    inputs, op = (given, dim, keepdim), getattr(torch.ops.dmattn, name)
    if not are_plain(inputs) and sharding.is_sharded(given):
        return sharding.reduce(op, *inputs)
    if has_tangent(inputs) or (torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)):
        return Reduction.apply(name, *inputs)
    return below_autograd(op, inputs)


def _transformed_rule(name: str, given: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    return Reduction.apply(name, given, dim, keepdim)


for _name in ("reduce_sum", "reduce_max"):
    rules().impl(_name, partial(_rule, _name), "Autograd")
    rules().impl(_name, partial(_transformed_rule, _name), "FuncTorchDynamicLayerFrontMode")
