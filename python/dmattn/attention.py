"""The public functions: check, bring the mask into the form the op takes, call the op ``dmattn::forward``."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmattn import checks, ops, unsupported
from dmattn.fake import accumulate_dtype
from dmattn.masks import BlockMask, CombinedMask, IntervalMask, Mask
from dmattn.masks.heads import same_heads
from dmattn.masks.interval import ALWAYS, FOREVER, select_interval, with_three_dims

# The function itself, not its name in torch.nn.functional, to which users assign ours.
_torch_attention = torch._C._nn.scaled_dot_product_attention


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None = None, *, key_bias: Tensor | None = None,
    bias: Tensor | None = None, is_causal: bool = False, scale: float | None = None, softcap: float = 0.0, dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None, deterministic: bool = False, return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None = None, *, key_bias: Tensor | None = None,
    bias: Tensor | None = None, is_causal: bool = False, scale: float | None = None, softcap: float = 0.0, dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None, deterministic: bool = False, return_lse: Literal[True],
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
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with an O(N) interval mask, a block mask, or both; only visible work is done.

    ``out_i = sum_j softmax_j(softcap(scale * <q_i, k_j>) + key_bias_j + bias_ij) v_j`` over the keys j visible to query i. Query i stands at
    position ``p = i + (Sk - Sq)``. A query that sees nothing gives 0 (and lse = -inf), never NaN.

    Differentiable any number of times, in reverse and forward mode, and under ``torch.func`` and vmap. First gradients have kernels; tangents
    and higher derivatives are composed of torch operations, in memory proportional to the lengths. Under vmap, dropout runs sample by sample.

    Args:
        query: [B, H, Sq, D]; float64, float32, bfloat16 or float16 on a CPU, bfloat16 or float16 on CUDA. Any strides with a dense last
            dimension; the output keeps the stride order.
        key: [B, Hkv, Sk, D] with H % Hkv == 0 (GQA, MQA).
        value: [B, Hkv, Sk, Dv]. D and Dv: multiples of 8 up to 256.
        mask: IntervalMask, BlockMask, ``interval & block``, or bool [B|1, H|Hkv|1, Sq|1, Sk] with leading dimensions optional, True = visible.
        key_bias: added to every logit of a key, [B|1, H|Hkv|1, Sk], differentiable.
        bias: added to the logits, [B|1, H|Hkv|1, Sq|1, Sk] with leading dimensions optional, differentiable.
        is_causal: also hide keys later than the query's position.
        scale: factor of the products, default D ** -0.5.
        softcap: if > 0, products become ``softcap * tanh(s / softcap)`` before biases are added.
        dropout_p: probability in [0, 1) with which an attention weight is dropped.
        dropout_seed: int64 tensor of one element; equal seeds give equal masks on every device. Default: drawn from torch's generator.
        deterministic: gradients bitwise equal from run to run; implied by ``torch.use_deterministic_algorithms(True)``.
        return_lse: also return the log-sum-exp of each query's logits, differentiable.

    Returns:
        out [B, H, Sq, Dv] in query's dtype, or (out, lse) with lse [B, H, Sq] float32 (float64 for float64 inputs), natural logarithm.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, device or value. Both name the argument, what was expected and what came.
    """
    checks.flags(is_causal, deterministic, return_lse)
    query, key, value = _autocast(query, key, value)
    checks.attention_inputs(query, key, value)
    scale, softcap, dropout_p, dropout_seed = _options(query, scale, softcap, dropout_p, dropout_seed)
    interval, block = _split_mask(mask, query, key)
    start = end = None
    if interval is not None:
        if not interval.serves(key.shape[2]):
            raise ValueError(f"mask: expected an IntervalMask for Sk={key.shape[2]} keys, got one for {interval.key_length}")
        start, end = (
            _interval_rows("mask.start", interval.start, query, key),
            _interval_rows("mask.end", interval.end, query, key),
        )
    return _call(query, key, value, start, end, block, key_bias, bias, is_causal, scale, softcap, dropout_p, dropout_seed,
                 deterministic, return_lse)  # fmt: skip


@overload
def dynamic_mask_attention(
    query: Tensor, key: Tensor, value: Tensor, scores: Tensor, window: int, *, is_causal: bool = True, base: IntervalMask | None = None,
    scale: float | None = None, softcap: float = 0.0, dropout_p: float = 0.0, dropout_seed: Tensor | None = None,
    deterministic: bool = False, return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def dynamic_mask_attention(
    query: Tensor, key: Tensor, value: Tensor, scores: Tensor, window: int, *, is_causal: bool = True, base: IntervalMask | None = None,
    scale: float | None = None, softcap: float = 0.0, dropout_p: float = 0.0, dropout_seed: Tensor | None = None,
    deterministic: bool = False, return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def dynamic_mask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    window: int,
    *,
    is_causal: bool = True,
    base: IntervalMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Dynamic Mask Attention: every query attends to the ``window`` best-scored keys it may see, and the scores are added to their logits.

    The same as ``attention(query, key, value, IntervalMask.top_k(scores, window, is_causal, base), key_bias=scores)``.

    Args:
        query: [B, H, Sq, D].
        key: [B, Hkv, Sk, D].
        value: [B, Hkv, Sk, Dv].
        scores: [B, Hkv, Sk], floating point; see :func:`key_scores`. Selection has no gradient; scores get theirs through the logits.
        window: number of keys each query sees at most, > 0.
        is_causal: select among keys up to the query's position; if False, one set of keys serves all queries.
        base: documents and/or padding, an :class:`IntervalMask`.
        scale, softcap, dropout_p, dropout_seed, deterministic, return_lse: as in :func:`attention`.

    Returns:
        As :func:`attention`.

    Raises:
        TypeError, ValueError: as :func:`attention` and :meth:`IntervalMask.top_k`.
    """
    checks.flags(is_causal, deterministic, return_lse)
    query, key, value = _autocast(query, key, value)
    checks.attention_inputs(query, key, value)
    scale, softcap, dropout_p, dropout_seed = _options(query, scale, softcap, dropout_p, dropout_seed)
    checks.tensor("scores", scores)
    checks.dtype("scores", scores, checks.DTYPES["cpu"])
    if scores.shape != key.shape[:3]:
        raise ValueError(f"scores: expected [B, Hkv, Sk] = {list(key.shape[:3])}, got {checks.shape_of(scores)}")
    checks.same_device("scores", scores, query)
    checks.positive_int("window", window)
    start, end = select_interval(scores, window, is_causal, base)
    start = start if start is None else _interval_rows("base.start", start, query, key)
    causal = is_causal or (base is not None and base.segments == "causal")
    return _call(query, key, value, start, end, None, scores, None, causal, scale, softcap, dropout_p, dropout_seed,
                 deterministic, return_lse)  # fmt: skip


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
    checks.tensor("value", value)
    checks.dtype("value", value, checks.DTYPES["cpu"])
    if value.dim() != 4:
        raise ValueError(f"value: expected 4 dimensions [B, Hkv, Sk, Dv], got shape {checks.shape_of(value)}")
    batch, kv_heads, length, size = value.shape
    if length > checks.MAX_LENGTH:
        raise ValueError(f"value: expected a length up to {checks.MAX_LENGTH}, got {length}")
    if not isinstance(proj, Tensor | nn.Module):
        raise TypeError(f"{proj_name}: expected a torch.Tensor or a torch.nn.Module, got {type(proj).__name__}")
    A = _score_parameter(factor_name, factor, value, [kv_heads])
    if isinstance(proj, nn.Module):
        if bias is not None:
            raise TypeError(f"dt_proj_bias: expected None with a module, which has its own bias, got {type(bias).__name__}")
        dt: Any = proj(value.transpose(1, 2).flatten(2))
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
    return torch.exp(A * F.softplus(dt)).transpose(1, 2)


def _score_parameter(name: str, given: object, value: Tensor, shape: list[int]) -> Tensor:
    parameter = checks.tensor(name, given)
    checks.dtype(name, parameter, checks.DTYPES["cpu"])
    checks.same_device(name, parameter, value, "value")
    if list(parameter.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape} for value {checks.shape_of(value)}, got {checks.shape_of(parameter)}")
    return parameter


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, signature and meaning, on dmattn's kernels.

    So ``is_causal`` is aligned at the top left, as torch has it, a bool mask hides where it is False, a float mask is added, leading
    dimensions broadcast, and any head size works (it is padded to a multiple of 8). What no kernel here covers (head sizes beyond 256,
    lengths beyond 2^20, a dtype, device or layout without kernels, nested tensors among them, key and value with different head counts,
    dropout_p = 1) is passed on to torch's own function. So it can take the place of torch's:
    ``torch.nn.functional.scaled_dot_product_attention = dmattn.scaled_dot_product_attention``.

    Args:
        query: [..., H, L, E] (or [..., L, E]).
        key: [..., H|Hkv, S, E].
        value: [..., H|Hkv, S, Ev].
        attn_mask: bool or float, broadcastable to [..., H, L, S].
        dropout_p: probability of dropping a weight; applied whenever > 0.
        is_causal: query i sees keys j <= i; not together with attn_mask.
        scale: default E ** -0.5.
        enable_gqa: key and value have fewer heads, which divide H.

    Raises:
        ValueError, TypeError: as :func:`attention`; or both attn_mask and is_causal are given.
    """
    checks.flag("is_causal", is_causal)
    checks.flag("enable_gqa", enable_gqa)
    if type(dropout_p) is not float:
        dropout_p = checks.number("dropout_p", dropout_p, low=0.0, high=1.0)
    for name, given in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(given, Tensor) and (given is not None or name != "attn_mask"):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(given).__name__}")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask, is_causal: expected at most one of them, got both")
    if not _is_covered(query, key, value, attn_mask, dropout_p, enable_gqa):
        passed_on: Tensor = _torch_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return passed_on
    size, value_size = query.shape[-1], value.shape[-1]
    if key.shape[-1] != size:
        raise ValueError(f"key: expected a last dimension E={size} like query, got {key.shape[-1]}")
    if scale is None:
        scale = size**-0.5
    lead = _broadcast("", query.shape[:-3], key.shape[:-3], value.shape[:-3])
    heads = query.shape[-3:-2]
    if not enable_gqa:
        heads = _broadcast("head ", heads, key.shape[-3:-2], value.shape[-3:-2])

    def four_dims(given: Tensor) -> Tensor:
        own = given.shape[-3:-2] if enable_gqa and given is not query else heads
        if given.dim() == 4 and given.shape[-1] % 8 == 0 and given.shape[:2] == (*lead, *own):
            return given
        given = given.expand(*lead, *own, *given.shape[-2:])
        given = given[(None,) * (4 - given.dim())] if given.dim() < 4 else given.flatten(0, -4)
        return F.pad(given, (0, -given.shape[-1] % 8)) if given.shape[-1] % 8 else given

    q, k, v = four_dims(query), four_dims(key), four_dims(value)
    mask: Mask | Tensor | None = None
    bias = None
    if is_causal and q.shape[2] == k.shape[2]:
        pass
    elif is_causal:
        keys = torch.arange(k.shape[2], dtype=torch.int32, device=q.device) + (k.shape[2] - q.shape[2])
        mask, is_causal = IntervalMask(keys, torch.full_like(keys, FOREVER)), False
    elif attn_mask is not None:
        attn_mask = _attn_mask(attn_mask, (*lead, *heads, query.shape[-2], key.shape[-2]))
        if attn_mask.dim() > 3 and len(lead) > 1:
            attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-3:]).flatten(0, -4)
        if attn_mask.dtype == torch.bool:
            mask = attn_mask
        else:
            bias = attn_mask
    out = attention(q, k, v, mask, bias=bias, is_causal=is_causal, scale=scale, dropout_p=dropout_p)
    if out.shape[3] != value_size:
        out = out[..., :value_size]
    return out if query.dim() == 4 and len(lead) == 1 else out.reshape(*lead, *heads, query.shape[-2], value_size)


def _is_covered(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, enable_gqa: bool) -> bool:
    """Whether there are kernels here for torch's call; the rest is torch's own."""
    for given in (query, key, value) if attn_mask is None else (query, key, value, attn_mask):
        if given.layout is not torch.strided or given.is_nested:
            return False
    for name, given in (("query", query), ("key", key), ("value", value)):
        if given.dim() < 2:
            raise ValueError(f"{name}: expected at least 2 dimensions [..., L, E], got shape {checks.shape_of(given)}")
    if query.dtype not in checks.DTYPES.get(query.device.type, ()) or dropout_p == 1:
        return False
    if max(query.shape[-2], key.shape[-2]) > checks.MAX_LENGTH or (enable_gqa and key.shape[-3:-2] != value.shape[-3:-2]):
        return False
    size, value_size = query.shape[-1], value.shape[-1]
    return max(size, value_size) <= checks.MAX_HEAD_DIM and min(size, value_size) > 0


def _broadcast(kind: str, query: torch.Size, key: torch.Size, value: torch.Size) -> torch.Size:
    if query == key == value:
        return query
    try:
        return torch.Size(torch.broadcast_shapes(query, key, value))
    except RuntimeError:
        raise ValueError(
            f"query, key, value: expected {kind}dimensions that broadcast, got {list(query)}, {list(key)} and {list(value)}"
        ) from None


def _attn_mask(given: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A mask of torch's function that broadcasts to [..., H, L, S], with at least one dimension."""
    checks.dtype("attn_mask", given, (torch.bool, *checks.DTYPES["cpu"]))
    fits = given.dim() <= len(shape) and all(
        n in (1, size) for n, size in zip(reversed(given.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(f"attn_mask: expected a shape that broadcasts to {list(shape)}, got {checks.shape_of(given)}")
    return given if given.dim() > 0 else given[None]


# Steps ------------------------------------------------------------------------------------------------------------------------------


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under torch.autocast, query, key and value take its dtype; masks and biases stay as they are."""
    if not torch._C._is_any_autocast_enabled():
        return query, key, value
    if not isinstance(query, Tensor) or query.device.type == "meta":  # meta has no autocast, and asking raises
        return query, key, value
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)

        def cast(given: Tensor) -> Tensor:
            eligible = isinstance(given, Tensor) and given.is_floating_point() and given.dtype != torch.float64
            return given.to(dtype) if eligible else given

        return cast(query), cast(key), cast(value)
    return query, key, value


def _options(
    query: Tensor, scale: float | None, softcap: float, dropout_p: float, dropout_seed: Tensor | None
) -> tuple[float, float, float, Tensor | None]:
    """The numbers an op takes, checked. A seed is checked even where it has no effect, and then left out."""
    scale = query.shape[3] ** -0.5 if scale is None else checks.scale(scale)
    if type(softcap) is not float or softcap != 0.0:
        softcap = checks.softcap(softcap)
    if type(dropout_p) is not float or dropout_p != 0.0:
        dropout_p = checks.number("dropout_p", dropout_p, low=0.0, high=1.0, open_high=True)
    if dropout_seed is not None:
        checks.tensor("dropout_seed", dropout_seed)
        checks.dtype("dropout_seed", dropout_seed, (torch.int64,))
        if dropout_seed.numel() != 1:
            raise ValueError(f"dropout_seed: expected one element, got shape {checks.shape_of(dropout_seed)}")
        checks.same_device("dropout_seed", dropout_seed, query)
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        unsupported.refuse_onnx()
    return scale, softcap, dropout_p, dropout_seed if dropout_p > 0 else None


def _split_mask(mask: object, query: Tensor, key: Tensor) -> tuple[IntervalMask | None, BlockMask | None]:
    if mask is None:
        return None, None
    if isinstance(mask, IntervalMask):
        return mask, None
    if isinstance(mask, BlockMask):
        return None, _fitting(mask, query, key)
    if isinstance(mask, CombinedMask):
        return mask.interval, _fitting(mask.block, query, key)
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"mask: expected an IntervalMask, a BlockMask, interval & block or a bool tensor, got {type(mask).__name__}"
        )
    checks.tensor("mask", mask)
    checks.dtype("mask", mask, (torch.bool,))
    mask = _four_dims("mask", mask, query, key)
    if mask.shape[2] == 1 and query.shape[2] != 1:  # a mask of keys alone is an interval: O(N)
        visible = mask[:, :, 0]
        return IntervalMask(
            torch.full_like(visible, ALWAYS, dtype=torch.int32), torch.where(visible, FOREVER, ALWAYS).int()
        ), None
    return None, BlockMask.from_bool(mask)


def _four_dims(name: str, given: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask or bias broadcastable to [B, H|Hkv, Sq, Sk] as [B|1, H|Hkv|1, Sq|1, Sk]."""
    layout = "[B|1, H|Hkv|1, Sq|1, Sk]"
    query_length, key_length = query.shape[2], key.shape[2]
    if given.dim() > 4 or given.dim() < 1:
        raise ValueError(f"{name}: expected {layout}, got shape {checks.shape_of(given)}")
    given = given[(None,) * (4 - given.dim())] if given.dim() < 4 else given
    if given.shape[3] == 1 and key_length != 1:
        given = given.expand(-1, -1, -1, key_length)
    rows = query_length if given.shape[2] != 1 else 1
    checks.per_head(name, given, query, key, (rows, key_length), layout)
    return given


def _fitting(block: BlockMask, query: Tensor, key: Tensor) -> BlockMask:
    if not block.fits(query.shape[2], key.shape[2]):
        raise ValueError(
            f"mask: expected a BlockMask for Sq={query.shape[2]}, Sk={key.shape[2]}, "
            f"got one for Sq={block.query_length}, Sk={block.key_length}"
        )
    tiles = block.tiles
    checks.per_head("mask", tiles, query, key, tiles.shape[2:], "[B|1, H|Hkv|1, Sq, Sk]")
    return block.cut(query.shape[2], key.shape[2])


def _interval_rows(name: str, given: Tensor, query: Tensor, key: Tensor) -> Tensor:
    if given.dim() != 3:  # under torch.vmap over a mask's batch
        given = with_three_dims(given)
    if given.shape[2] == 1 and key.shape[2] != 1:
        given = given.expand(-1, -1, key.shape[2])
    checks.per_head(name, given, query, key, (key.shape[2],), "[B|1, H|Hkv|1, Sk]")
    return given


def _key_bias_rows(key_bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    checks.tensor("key_bias", key_bias)
    checks.dtype("key_bias", key_bias, checks.DTYPES["cpu"])
    if key_bias.dim() > 3 or key_bias.dim() < 1:
        raise ValueError(f"key_bias: expected [B|1, H|Hkv|1, Sk], got shape {checks.shape_of(key_bias)}")
    key_bias = key_bias[(None,) * (3 - key_bias.dim())] if key_bias.dim() < 3 else key_bias
    checks.per_head("key_bias", key_bias, query, key, (key.shape[2],), "[B|1, H|Hkv|1, Sk]")
    return key_bias.to(accumulate_dtype(query.dtype))


def _bias_rows(bias: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """A bias as (key_bias part, bias part): one that is the same for all queries belongs to the keys."""
    checks.tensor("bias", bias)
    checks.dtype("bias", bias, checks.DTYPES["cpu"])
    bias = _four_dims("bias", bias, query, key)
    summed = accumulate_dtype(query.dtype)
    if bias.shape[2] == 1:
        return bias[:, :, 0].to(summed), None
    return None, bias if bias.dtype == query.dtype else bias.to(summed)


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    block: BlockMask | None,
    key_bias: Tensor | None,
    bias: Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    deterministic: bool,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Brings biases into the op's form, draws a missing seed and calls the op. Options are as :func:`_options` gives them."""
    if key_bias is not None:
        key_bias = _key_bias_rows(key_bias, query, key)
    if bias is not None:
        from_bias, bias = _bias_rows(bias, query, key)
        if from_bias is not None:
            key_bias = from_bias if key_bias is None else torch.add(*same_heads(key_bias, from_bias, "bias", "key_bias"))
    if dropout_p > 0 and dropout_seed is None:
        dropout_seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=query.device)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    tables = (None, None, None, None) if block is None else (block.tiles, block.rows, block.columns, block.bits)
    out, lse = ops.forward(
        query, key, value, start, end, *tables, key_bias, bias, dropout_seed, is_causal, scale, softcap, dropout_p, deterministic
    )
    return (out, lse) if return_lse else out
