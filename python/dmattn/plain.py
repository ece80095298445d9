"""Plain eager calls in less of the host's time: attention with or without a mask, or with one that scores select, and nothing unusual.

The public functions check arguments in Python, because their messages know more than an op's. A plain call goes to an op at once, which checks
sizes, dtypes, devices and numbers, too. These functions return None where the op refuses something, or where anything but eager execution may
want to see the call; the public function then takes its usual way, and says what is wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import (
    _are_functorch_transforms_active,
    _AutoDispatchBelowAutograd,
    _is_any_autocast_enabled,
    _is_tracing,
    _len_torch_dispatch_stack,
)
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from dmattn import autograd, call
from dmattn.call import NO_MASK, MaskTensors
from dmattn.fake import accumulate_dtype
from dmattn.masks import BlockMask, IndexMask, IntervalMask
from dmattn.masks.interval import most_selected

FORWARD_OP, PLAIN_OP = torch.ops.dmattn.forward.default, torch.ops.dmattn.forward_plain.default
SELECT_OP = torch.ops.dmattn.select.default
NO_HINTS = (False, 0)  # is_in_order, most_keys
is_enabled = True  # False where calls are printed or marked, as the functions of ops.py are


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: object, is_causal: bool, scale: float | None, softcap: float | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """out and lse of ``attention``."""
    if _is_watched() or not type(query) is type(key) is type(value) is Tensor:
        return None
    learns = is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    try:
        scale = _scale(query, is_causal, scale, softcap, dropout_p)
        if scale is None:
            return None
        if mask is None and not learns:
            if query.shape[2] <= call.DECODE_QUERIES and query.device.type in call.DECODE_DEVICES:  # the op decode may be faster
                return None
            with _AutoDispatchBelowAutograd():
                out, lse = PLAIN_OP(query, key, value, None, None, 0, is_causal, 0, 0, scale, softcap)
            return out, lse
        found = _mask_inputs(mask, query, key)
        if found is None:
            return None
        tensors, last = found
        is_causal = is_causal or (isinstance(mask, IndexMask) and mask.is_causal)
        return _forward((query, key, value, *tensors, None, None, None, is_causal, scale, softcap, 0.0), last, learns)
    except (RuntimeError, IndexError):
        return None


def selected_attention(
    query: Tensor, key: Tensor, value: Tensor, scores: Tensor, window: int, key_bias: Tensor | None, is_causal: bool, local: int,
    sink_keys: int, scale: float | None, softcap: float | None, dropout_p: float,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """out and lse of ``selected_attention`` without a base."""
    if _is_watched() or not type(query) is type(key) is type(value) is type(scores) is type(key_bias) is Tensor:
        return None
    if not type(window) is type(local) is type(sink_keys) is int:
        return None
    learns = query.requires_grad or key.requires_grad or value.requires_grad or key_bias.requires_grad
    try:
        scale = _scale(query, is_causal, scale, softcap, dropout_p)
        if scale is None or scores.shape != key.shape[:3]:
            return None
        if key_bias.dtype == query.dtype:
            key_bias = key_bias.to(accumulate_dtype(query.dtype))
        if not (learns and is_grad_enabled()):
            with _AutoDispatchBelowAutograd():
                out, lse = PLAIN_OP(query, key, value, scores, key_bias, window, is_causal, local, sink_keys, scale, softcap)
            return out, lse
        with _AutoDispatchBelowAutograd():
            end = SELECT_OP(scores, None, window, is_causal, local, sink_keys)
        inputs = (query, key, value, None, end, *NO_MASK[2:], key_bias, None, None, is_causal, scale, softcap, 0.0)
        return _forward(inputs, (False, most_selected(window, local, sink_keys, None)), True)
    except (RuntimeError, IndexError):
        return None


def _is_watched() -> bool:
    return (
        is_compiling()
        or not is_enabled
        or _is_any_autocast_enabled()
        or _len_torch_dispatch_stack() > 0
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _is_tracing()
    )


def _scale(query: Tensor, is_causal: bool, scale: float | None, softcap: float | None, dropout_p: float) -> float | None:
    """The scale with its default filled in; None where an option is not plain."""
    if type(is_causal) is not bool or not type(softcap) is type(dropout_p) is float or dropout_p != 0.0:
        return None
    if scale is None:
        return float((query.shape[3] or 1) ** -0.5)
    return scale if type(scale) is float else None


def _mask_inputs(mask: object, query: Tensor, key: Tensor) -> tuple[MaskTensors, tuple[object, ...]] | None:
    """The tensors of a mask that the op ``forward`` takes as it is, and the op's last arguments; None for other masks."""
    if mask is None:
        return NO_MASK, NO_HINTS
    if isinstance(mask, IntervalMask) and mask.start.shape[-1] == mask.end.shape[-1]:
        return (mask.start, mask.end, *NO_MASK[2:]), (mask.is_in_order, mask.most_keys)
    if isinstance(mask, BlockMask) and mask.lengths == (query.shape[2], key.shape[2]):
        return (None, None, mask.tiles, mask.rows, mask.columns, mask.bits, None, None), NO_HINTS
    if isinstance(mask, IndexMask) and (mask.indices.is_cuda or _are_below(mask.indices, -(-key.shape[2] // mask.block_size))):
        return (*NO_MASK[:6], mask.indices, None), (*NO_HINTS, mask.block_size, mask.local, mask.sink_keys)
    return None


def _are_below(lists: Tensor, blocks: int) -> bool:
    """Whether all entries of lists on a CPU are below ``blocks``; on other devices nobody reads them."""
    return lists.device.type == "cpu" and (lists.numel() == 0 or int(lists.amax()) < blocks)


def _forward(inputs: tuple[Any, ...], last: tuple[object, ...], learns: bool) -> tuple[Tensor, Tensor]:
    """The op ``forward``, from its arguments up to ``dropout_p``, and the last ones."""
    if learns:
        out, lse, _ = autograd.short_attention((*inputs, torch.are_deterministic_algorithms_enabled(), *last))
        return out, lse
    with _AutoDispatchBelowAutograd():
        out, lse, _ = FORWARD_OP(*inputs, False, *last)
    return out, lse
