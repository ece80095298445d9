"""The short way to ops: what the public functions call instead of ``torch.ops.dmattn.*``; what plain.py serves does not come here.

The dispatcher and a registered autograd rule cost an eager call some 50 us of Python. Where nobody watches (no trace, dispatch mode, subclass,
torch.func transform or forward-mode level), kernels are called directly, or through an ``autograd.Function`` when a gradient is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dmattn import autograd, sharding, unsupported

# Overloads: torch calls them in less time than names of ops.
FORWARD_OP, SELECT_OP, DECODE_OP = (getattr(torch.ops.dmattn, name).default for name in ("forward", "select", "decode"))


def forward(*inputs: object) -> tuple[Tensor, Tensor]:
    """``torch.ops.dmattn.forward(*inputs)`` in less time: all of the op's arguments in, (out, lse) with their derivatives out."""
    if _watched(inputs):
        unsupported.refuse_onnx()
        if sharding.any_sharded(inputs):
            out, lse, _ = sharding.forward(inputs)
        elif torch.compiler.is_compiling() or not autograd.transforms_are_active():
            out, lse, _ = torch.ops.dmattn.forward(*inputs)
        else:
            out, lse, _ = autograd.Attention.apply(*inputs)
    elif torch.is_grad_enabled() and autograd.wants_gradient(inputs):
        out, lse, _ = autograd.short_attention(inputs)
    else:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, _ = FORWARD_OP(*inputs)
    return out, lse


def select(scores: Tensor, segment_end: Tensor | None, window: int, is_causal: bool, local: int = 0, sink: int = 0) -> Tensor:
    """``torch.ops.dmattn.select``, likewise; selection has no derivative."""
    if _watched((scores, segment_end, window, local, sink)):
        unsupported.refuse_onnx()
        if sharding.any_sharded((scores, segment_end)):
            return sharding.select(scores, segment_end, window, is_causal, local, sink)
        end: Tensor = torch.ops.dmattn.select(scores.detach(), segment_end, window, is_causal, local, sink)
        return end
    with torch._C._AutoDispatchBelowAutograd():
        end = SELECT_OP(scores, segment_end, window, is_causal, local, sink)
    return end


def index_top_k(*inputs: Any) -> tuple[Tensor, Tensor]:
    """``torch.ops.dmattn.index_top_k``, likewise; the choice and its scores have no derivative."""
    inputs = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
    if _watched(inputs):
        unsupported.refuse_onnx()
        indices, scores = torch.ops.dmattn.index_top_k(*inputs)
    else:
        indices, scores = autograd.below_autograd(torch.ops.dmattn.index_top_k, inputs)
    return indices, scores


def decode(*inputs: object) -> tuple[Tensor, Tensor]:
    """``torch.ops.dmattn.decode``, likewise; decoding has no derivative."""
    if _watched(inputs):
        if sharding.any_sharded(inputs):
            return sharding.decode(inputs)
        out, lse = torch.ops.dmattn.decode(*inputs)
        return out, lse
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        autograd.refuse_gradients()
    with torch._C._AutoDispatchBelowAutograd():
        out, lse = DECODE_OP(*inputs)
    return out, lse


def decode_if_plain(*inputs: object) -> tuple[Tensor, Tensor] | None:
    """``torch.ops.dmattn.decode`` where nobody watches and no gradient is wanted, otherwise None: forward has both."""
    if _watched(inputs) or (torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)):
        return None
    with torch._C._AutoDispatchBelowAutograd():
        out, lse = DECODE_OP(*inputs)
    return out, lse


def _changing(name: str, caller: str) -> Callable[..., Any]:
    """``torch.ops.dmattn.<name>``, likewise: it writes tensors of a cache and has no derivative. ``caller`` is for errors."""

    def change(*inputs: object) -> Any:
        op = getattr(torch.ops.dmattn, name)
        if _watched(inputs):
            if sharding.any_sharded(inputs):
                sharding.refuse(caller)
            return op(*inputs)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            autograd.refuse_gradients(caller)
        return autograd.below_autograd(op, inputs)

    return change


cache_update, cache_step, cache_join, cache_extend = (
    _changing(f"cache_{name}", "BoundedCache.attend") for name in ("update", "step", "join", "extend")
)
cache_rewind = _changing("cache_rewind", "BoundedCache.rewind")


def _watched(inputs: tuple[object, ...]) -> bool:
    """Whether anything but plain eager execution may want to see the op as it is registered."""
    return _is_watched() or not autograd.are_plain(inputs)


def _is_watched() -> bool:
    """Whether a trace, a dispatch mode, torch.func or a forward-mode level is there, which may want to see ops as they are registered."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
    )
