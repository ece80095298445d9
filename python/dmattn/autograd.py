"""Autograd rules: forward's gradient is the op ``dmattn::backward``; backward itself has no gradient and says so.

The one surprise: there are two ways to the same rule. ``torch.library.register_autograd`` serves traces, functorch, dispatch modes, tensor
subclasses and direct calls of the op; it costs some 0.1 ms of Python a step. An eager call on plain tensors that nobody watches takes the
short way, :func:`forward`: an ``autograd.Function`` of our own, and kernels called below torch's registration.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The order of forward's arguments in cpp/schema.cpp.
TENSORS = ("query", "key", "value", "start", "end", "tiles", "rows", "columns", "bits", "key_bias", "bias", "dropout_seed")
KEY_BIAS, BIAS = TENSORS.index("key_bias"), TENSORS.index("bias")
PLAIN = frozenset(
    {Tensor, torch.nn.Parameter, type(None), bool, int, float}
)  # nothing symbolic, fake, wrapped or otherwise special


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[: len(TENSORS)], *output)
    ctx.options = inputs[len(TENSORS) :]  # is_causal, scale, softcap, dropout_p, deterministic


def forward_gradients(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    query, key, value, *masks, out, lse, lse_rest = ctx.saved_tensors
    none = (None,) * (len(TENSORS) + len(ctx.options))
    if grad_out is None and grad_lse is None:
        return none
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    need_key_bias, need_bias = ctx.needs_input_grad[KEY_BIAS], ctx.needs_input_grad[BIAS]
    grad_query, grad_key, grad_value, grad_key_bias, grad_bias = _backward(
        (grad_out, grad_lse, query, key, value, out, lse, *masks, *ctx.options, need_key_bias, need_bias, lse_rest)
    )
    gradients = list(none)
    gradients[:3] = grad_query, grad_key, grad_value
    if need_key_bias:
        gradients[KEY_BIAS] = grad_key_bias
    if need_bias:
        gradients[BIAS] = grad_bias.to(masks[BIAS - 3].dtype)
    return tuple(gradients)


def refuse_second_gradient(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    raise RuntimeError("dmattn: gradients of gradients are not implemented; call backward() without create_graph=True")


torch.library.register_autograd("dmattn::forward", forward_gradients, setup_context=save_for_backward)
torch.library.register_autograd("dmattn::backward", refuse_second_gradient)


# The short way ----------------------------------------------------------------------------------------------------------------------


def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    """``torch.ops.dmattn.forward(*inputs)`` in less time: all of the op's arguments in, (out, lse) with their gradients out."""
    if _watched(inputs):
        out, lse, _ = torch.ops.dmattn.forward(*inputs)
    elif torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        out, lse, _ = _Attention.apply(*inputs)
    else:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, _ = torch.ops.dmattn.forward(*inputs)
    return out, lse


def select(scores: Tensor, segment_end: Tensor | None, window: int, is_causal: bool) -> Tensor:
    """``torch.ops.dmattn.select``, likewise; selection has no gradient."""
    if _watched((scores, segment_end, window)):
        end: Tensor = torch.ops.dmattn.select(scores.detach(), segment_end, window, is_causal)
        return end
    with torch._C._AutoDispatchBelowAutograd():
        end = torch.ops.dmattn.select(scores, segment_end, window, is_causal)
    return end


def _backward(inputs: tuple[Any, ...]) -> Any:
    """``torch.ops.dmattn.backward``, likewise; where a graph of the gradients is recorded, the registered one, which refuses to go on."""
    if torch.is_grad_enabled() or _watched(inputs):
        return torch.ops.dmattn.backward(*inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.dmattn.backward(*inputs)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            results: tuple[Tensor, Tensor, Tensor] = torch.ops.dmattn.forward(*inputs)
        save_for_backward(ctx, inputs, results)
        return results

    backward = staticmethod(forward_gradients)


def _watched(inputs: tuple[Any, ...]) -> bool:
    """Whether anything but plain eager execution may want to see the op as it is registered."""
    return (
        torch.compiler.is_compiling()
        or not PLAIN.issuperset(map(type, inputs))
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()
    )
