"""The public functions: check, bring the mask into the form the op takes, call the op ``dmattn::forward``."""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from dmattn import checks, ops
from dmattn.fake import accumulate_dtype
from dmattn.masks import BlockMask, CombinedMask, IntervalMask, Mask
from dmattn.masks.heads import same_heads
from dmattn.masks.interval import ALWAYS, FOREVER, select_interval, with_three_dims


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

    Differentiable any number of times, in reverse and forward mode, and under ``torch.func`` and vmap. First gradients have kernels; tangents and
    higher derivatives are composed of torch operations, in memory proportional to the lengths. Under vmap, dropout runs sample by sample.

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
    query, key, value = _autocast(query, key, value)
    checks.attention_inputs(query, key, value)
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
    query, key, value = _autocast(query, key, value)
    checks.attention_inputs(query, key, value)
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


def key_scores(value: Tensor, dt_proj_weight: Tensor, A: Tensor, dt_proj_bias: Tensor | None = None) -> Tensor:
    """The score of each key from its value alone: ``exp(A * softplus(dt_proj(v)))`` (the Doge model), in plain torch operations.

    Args:
        value: [B, Hkv, Sk, Dv].
        dt_proj_weight: [Hkv, Hkv * Dv].
        A: [Hkv].
        dt_proj_bias: [Hkv] or None.

    Returns:
        [B, Hkv, Sk], differentiable.
    """
    for name, given in (("value", value), ("dt_proj_weight", dt_proj_weight), ("A", A)):
        checks.tensor(name, given)
    if value.dim() != 4:
        raise ValueError(f"value: expected 4 dimensions [B, Hkv, Sk, Dv], got shape {checks.shape_of(value)}")
    kv_heads, width = value.shape[1], value.shape[1] * value.shape[3]
    expected = {"dt_proj_weight": (dt_proj_weight, [kv_heads, width]), "A": (A, [kv_heads])}
    if dt_proj_bias is not None:
        expected["dt_proj_bias"] = (checks.tensor("dt_proj_bias", dt_proj_bias), [kv_heads])
    for name, (given, shape) in expected.items():
        checks.same_device(name, given, value, "value")
        if list(given.shape) != shape:
            raise ValueError(f"{name}: expected shape {shape} for value {checks.shape_of(value)}, got {checks.shape_of(given)}")
    dt = F.linear(value.transpose(1, 2).flatten(2), dt_proj_weight, dt_proj_bias)  # [B, Sk, Hkv]
    return torch.exp(A * F.softplus(dt)).transpose(1, 2)


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
    lengths beyond 2^20, a dtype or device without kernels, key and value with different head counts, dropout_p = 1) is passed on to torch's
    own function.

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
    for name, given in (("query", query), ("key", key), ("value", value)):
        if checks.tensor(name, given).dim() < 2:
            raise ValueError(f"{name}: expected at least 2 dimensions [..., L, E], got shape {checks.shape_of(given)}")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask, is_causal: expected at most one of them, got both")
    size, value_size = query.shape[-1], value.shape[-1]
    if key.shape[-1] != size:
        raise ValueError(f"key: expected a last dimension E={size} like query, got {key.shape[-1]}")
    supported = query.device.type in checks.DTYPES and query.dtype in checks.DTYPES[query.device.type]
    supported = supported and max(query.shape[-2], key.shape[-2]) <= checks.MAX_LENGTH and dropout_p != 1
    supported = supported and not (enable_gqa and key.shape[-3:-2] != value.shape[-3:-2])
    if not supported or max(size, value_size) > checks.MAX_HEAD_DIM or min(size, value_size) == 0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if scale is None:
        scale = size**-0.5
    lead = _broadcast(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    heads = query.shape[-3:-2]
    if not enable_gqa:
        heads = _broadcast(heads, key.shape[-3:-2], value.shape[-3:-2])

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
        checks.tensor("attn_mask", attn_mask)
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


def _broadcast(a: torch.Size, b: torch.Size, c: torch.Size) -> torch.Size:
    return a if a == b == c else torch.broadcast_shapes(a, b, c)


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
    scale: float | None,
    softcap: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    deterministic: bool,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Brings biases and options into the op's form and calls it."""
    checks.flag("is_causal", is_causal)
    checks.flag("deterministic", deterministic)
    scale = query.shape[3] ** -0.5 if scale is None else checks.scale(scale)
    if softcap != 0.0 or type(softcap) is not float:
        softcap = checks.softcap(softcap)
    if dropout_p != 0.0 or type(dropout_p) is not float:
        dropout_p = checks.number("dropout_p", dropout_p, low=0.0, high=1.0, open_high=True)
    if key_bias is not None:
        key_bias = _key_bias_rows(key_bias, query, key)
    if bias is not None:
        from_bias, bias = _bias_rows(bias, query, key)
        if from_bias is not None:
            key_bias = from_bias if key_bias is None else torch.add(*same_heads(key_bias, from_bias, "bias", "key_bias"))
    if dropout_p > 0:
        dropout_seed = _seed(dropout_seed, query)
    else:
        dropout_seed = None
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    tables = (None, None, None, None) if block is None else (block.tiles, block.rows, block.columns, block.bits)
    out, lse = ops.forward(
        query, key, value, start, end, *tables, key_bias, bias, dropout_seed, is_causal, scale, softcap, dropout_p, deterministic
    )
    return (out, lse) if return_lse else out


def _seed(seed: Tensor | None, query: Tensor) -> Tensor:
    if seed is None:
        return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=query.device)
    checks.tensor("dropout_seed", seed)
    checks.dtype("dropout_seed", seed, (torch.int64,))
    if seed.numel() != 1:
        raise ValueError(f"dropout_seed: expected one element, got shape {checks.shape_of(seed)}")
    checks.same_device("dropout_seed", seed, query)
    return seed
