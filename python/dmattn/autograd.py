"""Autograd rules: forward's gradient is the op ``dmattn::backward``; backward itself has no gradient and says so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The order of forward's arguments in cpp/schema.cpp.
TENSORS = ("query", "key", "value", "start", "end", "tiles", "rows", "columns", "bits", "key_bias", "bias", "dropout_seed")
KEY_BIAS, BIAS = TENSORS.index("key_bias"), TENSORS.index("bias")


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[: len(TENSORS)], *output)
    ctx.options = inputs[len(TENSORS) :]  # is_causal, scale, softcap, dropout_p, deterministic


def forward_gradients(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, *masks, out, lse = ctx.saved_tensors
    none = (None,) * (len(TENSORS) + len(ctx.options))
    if grad_out is None and grad_lse is None:
        return none
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    need_key_bias, need_bias = ctx.needs_input_grad[KEY_BIAS], ctx.needs_input_grad[BIAS]
    grad_query, grad_key, grad_value, grad_key_bias, grad_bias = torch.ops.dmattn.backward(
        grad_out, grad_lse, query, key, value, out, lse, *masks, *ctx.options, need_key_bias, need_bias
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
