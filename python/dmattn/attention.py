"""The public functions: attention with a given mask, and with one that is selected by scores of the keys."""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmattn import checks, plain, sharding
from dmattn.call import NO_MASK, MaskTensors, at_offset, attend, autocast, mask_tensors, options_of, with_mask
from dmattn.masks import IntervalMask, Mask
from dmattn.masks.interval import most_selected, select_interval
from dmattn.renamed import renamed
from dmattn.sinks import with_sinks
from dmattn.sizes import check_scores, interval_rows, sizes_of


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None = None, *, key_bias: Tensor | None = None,
    bias: Tensor | None = None, is_causal: bool = False, scale: float | None = None, softcap: float | None = 0.0, dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None, deterministic: bool = False, sinks: Tensor | None = None,
    query_offset: int | Tensor | None = None, return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None = None, *, key_bias: Tensor | None = None,
    bias: Tensor | None = None, is_causal: bool = False, scale: float | None = None, softcap: float | None = 0.0, dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None, deterministic: bool = False, sinks: Tensor | None = None,
    query_offset: int | Tensor | None = None, return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    key_bias: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    deterministic: bool = False,
    sinks: Tensor | None = None,
    query_offset: int | Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with an O(N) interval mask, a block mask, lists of keys, or several of them; only visible work is done.

    ``out_i = sum_j softmax_j(softcap(scale * <q_i, k_j>) + key_bias_j + bias_ij) v_j`` over the keys j visible to query i. Query i stands at
    position ``p = i + (Sk - Sq)``. A query that sees nothing gives 0 (and lse = -inf), never NaN.

    Differentiable any number of times, in reverse and forward mode, and under ``torch.func`` and vmap. First gradients have kernels; tangents
    and higher derivatives are composed of torch operations, in memory proportional to the lengths. Under vmap, dropout runs sample by sample.

    Args:
        query: [B, H, Sq, D]; float64, float32, bfloat16 or float16 on a CPU, bfloat16 or float16 on CUDA. Any strides with a dense last
            dimension; the output keeps the stride order.
        key: [B, Hkv, Sk, D] with H % Hkv == 0 (GQA, MQA).
        value: [B, Hkv, Sk, Dv]. D and Dv: multiples of 8 up to 256.
        mask: IntervalMask, BlockMask, IndexMask, an intersection of such (``interval & block``), or bool [B|1, H|Hkv|1, Sq|1, Sk] with leading
            dimensions optional, True = visible.
        key_bias: added to every logit of a key, [B|1, H|Hkv|1, Sk], differentiable.
        bias: added to the logits, [B|1, H|Hkv|1, Sq|1, Sk] with leading dimensions optional, differentiable.
        is_causal: also hide keys later than the query's position.
        scale: factor of the products, default D ** -0.5.
        softcap: if > 0 (None means 0), products become ``softcap * tanh(s / softcap)`` before biases are added.
        dropout_p: probability in [0, 1) with which an attention weight is dropped.
        dropout_seed: int64 tensor of one element; equal seeds give equal masks on every device. Default: drawn from torch's generator.
        deterministic: gradients bitwise equal from run to run; implied by ``torch.use_deterministic_algorithms(True)``.
        sinks: [H], a logit per head that takes part in the softmax and has no value, differentiable: ``out * sigmoid(lse - sinks)``.
        query_offset: position of the first query, an int, or integers [] or [B] (never read on the host); default Sk - Sq. Causality and
            intervals and the local window of an index mask follow; block masks, lists and bool masks of several rows count queries, so
            they stay.
        return_lse: also return the log-sum-exp of each query's logits, differentiable. The sink is not in it: :func:`lse_with_sink`.

    Returns:
        out [B, H, Sq, Dv] in query's dtype, or (out, lse) with lse [B, H, Sq] float32 (float64 for float64 inputs), natural logarithm.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, device or value. Both name the argument, what was expected and what it got.
    """
    if key_bias is bias is dropout_seed is sinks is query_offset is None and deterministic is False and type(return_lse) is bool:
        result = plain.attention(query, key, value, mask, is_causal, scale, softcap, dropout_p)
        if result is not None:
            return result if return_lse else result[0]
    checks.flags(is_causal, deterministic, return_lse)
    query, key, value = autocast(query, key, value)
    sizes = sizes_of(query, key, value)
    is_in_order, most_keys = (mask.is_in_order, mask.most_keys) if isinstance(mask, IntervalMask) else (False, 0)
    options = options_of(
        sizes, dropout_seed, is_causal, scale, softcap, dropout_p, deterministic, is_in_order=is_in_order, most_keys=most_keys
    )
    options = with_mask(options, mask)
    masks = NO_MASK if mask is None else mask_tensors(mask, sizes)
    if query_offset is not None:
        masks, options = at_offset(query_offset, masks, options, sizes)
    out, lse = attend(query, key, value, sizes, masks, key_bias, bias, options)
    if sinks is not None:
        out = with_sinks(out, lse, sinks, sizes)
    return (out, lse) if return_lse else out


@overload
def dynamic_mask_attention(
    query: Tensor, key: Tensor, value: Tensor, scores: Tensor, window: int, *, is_causal: bool = True, base: IntervalMask | None = None,
    local: int = 0, sink_keys: int = 0, scale: float | None = None, softcap: float | None = 0.0, dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None, deterministic: bool = False, sinks: Tensor | None = None, query_offset: int | Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def dynamic_mask_attention(
    query: Tensor, key: Tensor, value: Tensor, scores: Tensor, window: int, *, is_causal: bool = True, base: IntervalMask | None = None,
    local: int = 0, sink_keys: int = 0, scale: float | None = None, softcap: float | None = 0.0, dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None, deterministic: bool = False, sinks: Tensor | None = None, query_offset: int | Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@renamed(sink="sink_keys")
def dynamic_mask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    window: int,
    *,
    is_causal: bool = True,
    base: IntervalMask | None = None,
    local: int = 0,
    sink_keys: int = 0,
    scale: float | None = None,
    softcap: float | None = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    deterministic: bool = False,
    sinks: Tensor | None = None,
    query_offset: int | Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Dynamic Mask Attention: every query attends to the ``window`` best-scored keys it may see, and the scores are added to their logits.

    The same as ``attention(query, key, value, mask, key_bias=scores)`` with ``mask = IntervalMask.top_k(scores, window, is_causal, base,
    local=local, sink_keys=sink_keys)``.

    Because scores are logits, too, a score of -inf hides its key from all queries, also in the local window and as a sink, and NaN spreads to
    those that see it. A score of +inf is always selected, but as a logit it gives NaN, as in torch. To keep a key, give it a large finite
    score, or select with ``top_k`` and add other logits.

    Args:
        query: [B, H, Sq, D].
        key: [B, Hkv, Sk, D].
        value: [B, Hkv, Sk, Dv].
        scores: [B, Hkv, Sk], floating point; see :func:`key_scores`. Selection has no gradient; scores get theirs through the logits.
        window: number of keys each query selects at most, > 0; with local or sink_keys also 0.
        is_causal: select among keys up to the query's position; if False, one set of keys serves all queries.
        base: documents and/or padding, an :class:`IntervalMask`.
        local: every query also sees the keys of its last ``local`` positions, its own included; only with is_causal.
        sink_keys: every query also sees the first ``sink_keys`` keys of its document; only with is_causal. See :meth:`IntervalMask.top_k`.
        scale, softcap, dropout_p, dropout_seed, deterministic, sinks, query_offset, return_lse: as in :func:`attention`.

    Returns:
        As :func:`attention`.

    Raises:
        TypeError, ValueError: as :func:`attention` and :meth:`IntervalMask.top_k`.
    """
    checks.flag("return_lse", return_lse)
    out, lse = selected_attention(
        query, key, value, scores, window, scores, is_causal, base, local, sink_keys, scale, softcap, dropout_p, dropout_seed,
        deterministic, sinks, query_offset,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def selected_attention(
    query: Tensor, key: Tensor, value: Tensor, scores: Tensor, window: int, key_bias: Tensor | None, is_causal: bool = True,
    base: IntervalMask | None = None, local: int = 0, sink_keys: int = 0, scale: float | None = None, softcap: float | None = 0.0,
    dropout_p: float = 0.0, dropout_seed: Tensor | None = None, deterministic: bool = False, sinks: Tensor | None = None,
    query_offset: int | Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`dynamic_mask_attention` whose scores select alone: ``key_bias`` is what is added to the logits. Gives out and lse."""
    if base is None and dropout_seed is sinks is query_offset is None and deterministic is False:
        result = plain.selected_attention(
            query, key, value, scores, window, key_bias, is_causal, local, sink_keys, scale, softcap, dropout_p
        )
        if result is not None:
            return result
    checks.flags(is_causal, deterministic, False)
    query, key, value = autocast(query, key, value)
    sizes = sizes_of(query, key, value)
    check_scores(scores, query, key, "[B, Hkv, Sk]")
    checks.selection(window, local, sink_keys, is_causal)
    start, end = select_interval(scores, window, is_causal, base, local, sink_keys)
    start = start if start is None else interval_rows("base.start", start, sizes)
    causal = is_causal or (base is not None and base.segments == "causal")
    most_keys = most_selected(window, local, sink_keys, base)
    options = options_of(sizes, dropout_seed, causal, scale, softcap, dropout_p, deterministic, most_keys=most_keys)
    masks: MaskTensors = (start, end, *NO_MASK[2:])
    if query_offset is not None:
        masks, options = at_offset(query_offset, masks, options, sizes)
    out, lse = attend(query, key, value, sizes, masks, key_bias, None, options)
    if sinks is not None:
        out = with_sinks(out, lse, sinks, sizes)
    return out, lse


@overload
def key_scores(value: Tensor, dt_proj: Tensor | nn.Module, A: Tensor, dt_proj_bias: Tensor | None = None) -> Tensor: ...
@overload
def key_scores(value: Tensor, *, dt_proj_weight: Tensor, A: Tensor, dt_proj_bias: Tensor | None = None) -> Tensor: ...
def key_scores(
    value: Tensor,
    dt_proj: Tensor | nn.Module | None = None,
    A: Tensor | None = None,
    dt_proj_bias: Tensor | None = None,
    *,
    dt_proj_weight: Tensor | None = None,
) -> Tensor:
    """The score of each key from its value alone: ``exp(A * softplus(dt_proj(v)))`` (the Doge model), in plain torch operations.

    Args:
        value: [B, Hkv, Sk, Dv], floating point.
        dt_proj: weight [Hkv, Hkv * Dv] in value's dtype, or a module that takes [B, Sk, Hkv * Dv] to [B, Sk, Hkv]. A module is called,
            so adapters, hooks and quantisation of it work.
        A: [Hkv], floating point.
        dt_proj_bias: [Hkv] or None; None with a module, which has its own.
        dt_proj_weight: the older name of dt_proj, for a weight.

    Returns:
        [B, Hkv, Sk], differentiable.

    Raises:
        TypeError: a wrong type or dtype, or neither or both of dt_proj and dt_proj_weight.
        ValueError: a wrong shape or device.
    """
    if dt_proj_weight is None:
        return scores_of(value, "dt_proj", dt_proj, "A", A, dt_proj_bias)
    if dt_proj is not None:
        raise TypeError("dt_proj, dt_proj_weight: expected exactly one of them, got both")
    return scores_of(value, "dt_proj_weight", checks.tensor("dt_proj_weight", dt_proj_weight), "A", A, dt_proj_bias)


def scores_of(
    value: Tensor, proj_name: str, proj: Tensor | nn.Module | None, factor_name: str, factor: Tensor | None, bias: Tensor | None
) -> Tensor:
    """:func:`key_scores` for callers with other names for the projection and for A."""
    batch, kv_heads, length, size = checks.shaped("value", value, "[B, Hkv, Sk, Dv]", checks.DTYPES["cpu"]).shape
    if length > checks.MAX_LENGTH:
        raise ValueError(f"value: expected a length up to {checks.MAX_LENGTH}, got {length}")
    if not isinstance(proj, Tensor | nn.Module):
        raise TypeError(f"{proj_name}: expected a torch.Tensor or a torch.nn.Module, got {checks.type_of(proj)}")
    A = _score_parameter(factor_name, factor, value, [kv_heads])
    if isinstance(proj, nn.Module):
        if bias is not None:
            raise TypeError(f"dt_proj_bias: expected None with a module, which has its own bias, got {type(bias).__name__}")
        dt: Tensor = proj(value.transpose(1, 2).flatten(2))
        if not isinstance(dt, Tensor):
            raise TypeError(f"{proj_name}: expected a module that returns a torch.Tensor, got {type(dt).__name__}")
        if list(dt.shape) != [batch, length, kv_heads]:
            raise ValueError(
                f"{proj_name}: expected a module that returns [B, Sk, Hkv] = {[batch, length, kv_heads]}, got {checks.shape_of(dt)}"
            )
    else:
        parameters = [(proj_name, _score_parameter(proj_name, proj, value, [kv_heads, kv_heads * size]))]
        if bias is not None:
            parameters.append(("dt_proj_bias", _score_parameter("dt_proj_bias", bias, value, [kv_heads])))
        for name, given in parameters if not torch._C._is_any_autocast_enabled() else ():
            if given.dtype != value.dtype:
                raise TypeError(f"{name}: expected dtype {value.dtype} like value, got {given.dtype}")
        dt = F.linear(value.transpose(1, 2).flatten(2), proj, bias)
    softplus = sharding.softplus if sharding.is_sharded(dt) else F.softplus
    return torch.exp(A * softplus(dt)).transpose(1, 2)


def _score_parameter(name: str, given: object, value: Tensor, shape: list[int]) -> Tensor:
    parameter = checks.tensor(name, given, checks.DTYPES["cpu"], value, "value")
    if list(parameter.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape} for value {checks.shape_of(value)}, got {checks.shape_of(parameter)}")
    return parameter
