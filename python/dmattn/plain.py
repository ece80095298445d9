"""Plain eager calls in less of the host's time: of attention, by a mask or by scores that select, without biases, dropout, sinks, an offset,
a fixed order or a base.

The public functions check arguments in Python, because their messages know more than an op's. A plain call goes to an op at once, which checks
sizes, dtypes, devices and numbers, too. These functions return None where the op refuses something, or where anything but eager execution may
want to see the call; the public function then takes its usual way, and says what is wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import DispatchKey, _AutoDispatchBelowAutograd, _is_any_autocast_enabled
from torch._C import _dispatch_tls_is_dispatch_key_included as _is_included

from dmattn import autograd, call, ops
from dmattn.call import NO_MASK, MaskTensors
from dmattn.composed import LISTS
from dmattn.fake import accumulate_dtype
from dmattn.masks import BlockMask, IndexMask, IntervalMask
from dmattn.masks.interval import most_selected
from dmattn.sizes import entry_beyond

FORWARD_OP, PLAIN_OP = torch.ops.dmattn.forward.default, torch.ops.dmattn.forward_plain.default
SELECT_OP = torch.ops.dmattn.select.default
NO_HINTS = (False, 0)  # is_in_order, most_keys
is_enabled = True  # False where calls are printed or marked, as the functions of ops.py are


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: object, is_causal: bool, scale: float | None, softcap: float | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """out and lse of ``attention``."""
    if _is_watched() or not _are_plain(query, key, value):
        return None
    needs_gradient = is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    try:
        options = _options(query, value, is_causal, scale, softcap, dropout_p)
        if options is None:
            return None
        if mask is None and not needs_gradient:
            few = query.shape[2] <= call.DECODE_QUERIES and query.device.type in call.DECODE_DEVICES
            if few and key.shape[2] >= call.DECODE_LEAST_KEYS:
                return ops.decode_if_plain(query, key, value, *(None,) * 5, is_causal, *options, *LISTS)
            with _AutoDispatchBelowAutograd():
                out, lse = PLAIN_OP(query, key, value, None, None, 0, is_causal, 0, 0, *options)
            return out, lse
        found = _mask_inputs(mask, query, key)
        if found is None:
            return None
        tensors, last = found
        is_causal = is_causal or (isinstance(mask, IndexMask) and mask.is_causal)
        return _forward((query, key, value, *tensors, None, None, None, is_causal, *options, 0.0), last, needs_gradient)
    except RuntimeError as problem:
        _raise_unless_refused(problem)
        return None


def selected_attention(
    query: Tensor, key: Tensor, value: Tensor, scores: Tensor, window: int, key_bias: Tensor | None, is_causal: bool, local: int,
    sink_keys: int, scale: float | None, softcap: float | None, dropout_p: float,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """out and lse of ``selected_attention`` without a base."""
    if _is_watched() or not _are_plain(query, key, value) or not type(scores) is type(key_bias) is Tensor:
        return None
    if not type(window) is type(local) is type(sink_keys) is int:
        return None
    needs_gradient = is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad or key_bias.requires_grad
    )
    try:
        options, summed = _options(query, value, is_causal, scale, softcap, dropout_p), accumulate_dtype(query.dtype)
        if options is None or scores.shape != key.shape[:3] or key_bias.dtype not in (summed, query.dtype):
            return None
        if key_bias.dtype != summed:
            key_bias = key_bias.to(summed)
        with _AutoDispatchBelowAutograd():
            if not needs_gradient:
                out, lse = PLAIN_OP(query, key, value, scores, key_bias, window, is_causal, local, sink_keys, *options)
                return out, lse
            end = SELECT_OP(scores, None, window, is_causal, local, sink_keys)
        inputs = (query, key, value, None, end, *NO_MASK[2:], key_bias, None, None, is_causal, *options, 0.0)
        return _forward(inputs, (False, most_selected(window, local, sink_keys, None)), True)
    except RuntimeError as problem:
        _raise_unless_refused(problem)
        return None


def _raise_unless_refused(problem: RuntimeError) -> None:
    """Raises all but an op's errors about its arguments: those of hooks, of devices, and of memory, which is not asked for twice."""
    if "dmattn" not in str(problem) or "could not allocate" in str(problem):
        raise problem


def _is_watched() -> bool:
    return not is_enabled or _is_any_autocast_enabled() or ops._is_watched() or _is_included(DispatchKey.PreDispatch)


def _are_plain(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Not on meta, where ops check nothing, and of four dimensions."""
    if not type(query) is type(key) is type(value) is Tensor or query.is_meta or query.is_nested:
        return False
    return query.dim() == key.dim() == value.dim() == 4


def _options(
    query: Tensor, value: Tensor, is_causal: bool, scale: float | None, softcap: float | None, dropout_p: float
) -> tuple[float, float] | None:
    """scale and softcap with their defaults filled in; None where an option or a head size is not plain."""
    if type(is_causal) is not bool or type(dropout_p) is not float or dropout_p != 0.0:
        return None
    size = query.shape[3]
    if size % 8 or value.shape[3] % 8 or not size or not query.is_floating_point():
        return None
    scale = float(size**-0.5) if scale is None else scale
    softcap = 0.0 if softcap is None else softcap
    return (scale, softcap) if type(scale) is type(softcap) is float else None


def _mask_inputs(mask: object, query: Tensor, key: Tensor) -> tuple[MaskTensors, tuple[object, ...]] | None:
    """The tensors of a mask that the op ``forward`` takes as it is, and the op's last arguments; None for other masks."""
    if mask is None:
        return NO_MASK, NO_HINTS
    if isinstance(mask, IntervalMask):
        start, end = mask.start, mask.end
        if type(start) is type(end) is Tensor and start.shape[-1] == end.shape[-1] == key.shape[2]:
            return (start, end, *NO_MASK[2:]), (mask.is_in_order, mask.most_keys)
    elif isinstance(mask, BlockMask):
        tables = mask.tiles, mask.rows, mask.columns, mask.bits
        if {*map(type, tables)} == {Tensor} and mask.lengths == (query.shape[2], key.shape[2]):
            return (None, None, *tables, None, None), NO_HINTS
    elif isinstance(mask, IndexMask) and type(mask.indices) is Tensor and entry_beyond(mask, key.shape[2]) is None:
        return (*NO_MASK[:6], mask.indices, None), (*NO_HINTS, mask.block_size, mask.local, mask.sink_keys)
    return None


def _forward(inputs: tuple[Any, ...], last: tuple[object, ...], needs_gradient: bool) -> tuple[Tensor, Tensor]:
    """The op ``forward``, from its arguments up to ``dropout_p``, and the last ones."""
    if needs_gradient:
        out, lse, _ = autograd.short_attention((*inputs, torch.are_deterministic_algorithms_enabled(), *last))
        return out, lse
    with _AutoDispatchBelowAutograd():
        out, lse, _ = FORWARD_OP(*inputs, False, *last)
    return out, lse
