"""Plain eager calls in less of the host's time: attention with or without a mask, or with one that scores select, and nothing unusual.

The public functions check arguments in Python, because their messages know more than an op's. A plain call goes to an op at once, which checks
sizes, dtypes, devices and numbers, too. These functions return None where the op refuses something, where a gradient is wanted, or where
anything but eager execution may want to see the call; the public function then takes its usual way, and says what is wrong.
"""

from __future__ import annotations

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

from dmattn.call import DECODE_DEVICES, DECODE_QUERIES, NO_MASK, MaskTensors
from dmattn.fake import accumulate_dtype
from dmattn.masks import BlockMask, IndexMask, IntervalMask

FORWARD_OP, PLAIN_OP = torch.ops.dmattn.forward.default, torch.ops.dmattn.forward_plain.default
is_enabled = True  # False where calls are printed or marked, as the functions of ops.py are


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    is_causal: bool,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor] | None:
    """out and lse of ``attention``."""
    if _is_watched() or not type(query) is type(key) is type(value) is Tensor:
        return None
    if is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return None
    try:
        if mask is not None:
            return _masked(query, key, value, mask, is_causal, scale, softcap, dropout_p)
        if query.shape[2] <= DECODE_QUERIES and query.device.type in DECODE_DEVICES:  # the op decode may be faster
            return None
        return _call(query, key, value, None, None, 0, is_causal, 0, 0, scale, softcap, dropout_p)
    except (RuntimeError, IndexError):
        return None


def selected_attention(
    query: Tensor, key: Tensor, value: Tensor, scores: Tensor, window: int, key_bias: Tensor | None, is_causal: bool, local: int,
    sink_keys: int, scale: float | None, softcap: float | None, dropout_p: float,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """out and lse of ``selected_attention`` without a base."""
    if _is_watched() or not type(query) is type(key) is type(value) is type(scores) is type(key_bias) is Tensor:
        return None
    if is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad or key_bias.requires_grad):
        return None
    if not type(window) is type(local) is type(sink_keys) is int:
        return None
    try:
        if key_bias.dtype == query.dtype:
            key_bias = key_bias.to(accumulate_dtype(query.dtype))
        return _call(query, key, value, scores, key_bias, window, is_causal, local, sink_keys, scale, softcap, dropout_p)
    except (RuntimeError, IndexError):
        return None


def _masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    is_causal: bool,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor] | None:
    """The op ``forward`` with a mask that it takes as it is."""
    scale = _scale(query, is_causal, scale, softcap, dropout_p)
    if scale is None:
        return None
    tensors: MaskTensors
    last: tuple[object, ...] = ()
    if isinstance(mask, IntervalMask) and mask.start.shape[-1] == mask.end.shape[-1]:
        tensors, last = (mask.start, mask.end, *NO_MASK[2:]), (mask.is_in_order, mask.most_keys)
    elif isinstance(mask, IndexMask) and mask.indices.is_cuda:  # the values of others are checked in Python
        tensors, is_causal = (*NO_MASK[:6], mask.indices, None), is_causal or mask.is_causal
        last = (False, 0, mask.block_size, mask.local, mask.sink_keys)
    elif isinstance(mask, BlockMask) and mask.lengths == (query.shape[2], key.shape[2]):
        tensors = (None, None, mask.tiles, mask.rows, mask.columns, mask.bits, None, None)
    else:
        return None
    with _AutoDispatchBelowAutograd():
        out, lse, _ = FORWARD_OP(query, key, value, *tensors, None, None, None, is_causal, scale, softcap, 0.0, False, *last)
    return out, lse


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


def _call(
    query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None, key_bias: Tensor | None, window: int, is_causal: bool, local: int,
    sink_keys: int, scale: float | None, softcap: float | None, dropout_p: float,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    scale = _scale(query, is_causal, scale, softcap, dropout_p)
    if scale is None:
        return None
    with _AutoDispatchBelowAutograd():
        out, lse = PLAIN_OP(query, key, value, scores, key_bias, window, is_causal, local, sink_keys, scale, softcap)
    return out, lse


def _scale(query: Tensor, is_causal: bool, scale: float | None, softcap: float | None, dropout_p: float) -> float | None:
    """The scale with its default filled in; None where an option is not plain."""
    if type(is_causal) is not bool or not type(softcap) is type(dropout_p) is float or dropout_p != 0.0:
        return None
    if scale is None:
        return float((query.shape[3] or 1) ** -0.5)
    return scale if type(scale) is float else None
