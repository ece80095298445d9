"""flash-dmattn's functions (versions 1.x, also as flash_sparse_attn_*): the same names, arguments and layouts; docs/other_libraries.md says what
differs. New code has no need for a mask or bias of every pair: :func:`dmattn.dynamic_mask_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dmattn import checks
from dmattn._library import build_info
from dmattn.attention import attention
from dmattn.compat import flash_attn, layouts
from dmattn.compat.dense_masks import (
    block_smooth,
    create_mask,
    keep_of,
    of_padding,
    packed_bias,
    relu_mask,
    topk_indices,
    topk_mask,
)
from dmattn.compat.padding import pad_input, unpad_input
from dmattn.masks import BlockMask, IntervalMask, Mask
from dmattn.masks.heads import repeat_heads
from dmattn.sizes import padded
from dmattn.varlen import varlen_attention
from dmattn.weights import attention_weights

NAMES = ("query", "key", "value")
BACKENDS = ("cuda", "triton", "flex")
# Arguments of flash_dynamic_mask_attention_forward that say what is computed and have no form there.
REFUSED = (
    "head_mask",
    "sliding_window",
    "position_bias",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "cumulative_seqlens_q",
    "cumulative_seqlens_k",
)


def flash_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool | None = None,
    *,
    scale: float | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention with a boolean mask and an additive bias, by flash-dmattn's name.

    Args:
        query: [B, Sq, H, D].
        key: [B, Sk, Hkv, D] with H % Hkv == 0.
        value: [B, Sk, Hkv, Dv].
        attn_mask: bool [B|1, H|Hkv|1, Sq|1, Sk|1], True = keep; or, as in versions 1.0.0 to 1.0.6, in query's dtype, 1.0 = keep, 0.0 = hide.
        attn_bias: floating point, as attn_mask, differentiable.
        softmax_scale: default D ** -0.5; scale is its name up to version 1.2.0.
        is_causal: bottom-right aligned.
        softcap: > 0: ``softcap * tanh(s / softcap)`` before the bias is added.
        deterministic: gradients bitwise equal from run to run; None is False.
        return_attn_probs: also return lse and the weights.

    Returns:
        out [B, Sq, H, Dv], or (out, lse [B, H, Sq], weights [B, H, Sq, Sk]), which takes memory for every pair and is for tests.

    Raises:
        TypeError, ValueError: names the argument, what was expected and what it got.
    """
    query, key, value = layouts.checked(NAMES, query, key, value, layouts.HEADS_LAST)
    softmax_scale = layouts.one_of("softmax_scale", softmax_scale, "scale", scale)
    causal, probabilities = layouts.of_flag("is_causal", is_causal), layouts.of_flag("return_attn_probs", return_attn_probs)
    if attn_mask is not None:
        attn_mask = keep_of("attn_mask", attn_mask, query, _pairs(query, key))
    if attn_bias is not None:
        checks.tensor("attn_bias", attn_bias, checks.DTYPES["cpu"])
    for name, given in (("attn_mask", attn_mask), ("attn_bias", attn_bias)):
        if given is not None:
            layouts.check_pairs(name, given, query.transpose(1, 2), key.transpose(1, 2))
    options: dict[str, Any] = {
        "bias": attn_bias,
        "is_causal": causal,
        "scale": layouts.of_scale(softmax_scale, query.shape[-1]),
        "softcap": layouts.of_softcap(softcap),
    }
    value_size = value.shape[-1]
    query, key, value = layouts.heads_first(query, key, value)
    deterministic = layouts.of_flag("deterministic", deterministic)
    out, lse = attention(query, key, value, attn_mask, deterministic=deterministic, return_lse=True, **options)
    out = out.transpose(1, 2)[..., :value_size]
    return (out, lse, attention_weights(query, key, attn_mask, **options)) if probabilities else out


def triton_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    is_causal: bool | None = False,
    softmax_scale: float | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """:func:`flash_dmattn_func` with the order of arguments that the Triton function had. options: its other arguments, by name."""
    return flash_dmattn_func(query, key, value, attn_mask, attn_bias, softmax_scale, is_causal, **options)


def flex_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    is_causal: bool | None = None,
    softmax_scale: float | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """:func:`triton_dmattn_func`, causal unless ``is_causal=False``, as the FlexAttention function was."""
    is_causal = True if is_causal is None else is_causal
    return flash_dmattn_func(query, key, value, attn_mask, attn_bias, softmax_scale, is_causal, **options)


def flash_dmattn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool | None = None,
    block_table: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    scale: float | None = None,
) -> flash_attn.Results:
    """Attention over packed sequences, by flash-dmattn's name. See :func:`flash_attn_varlen_func`.

    Versions 1.0.0 to 1.0.6 had attn_mask and attn_bias in front of cu_seqlens_q. Here they are keywords, and calls by position are refused.
    They take memory for every pair of packed tokens, those of different sequences too.

    Args:
        query: [Tq, H, D].
        key: [Tk, Hkv, D], or with block_table [pages, page_size, Hkv, D].
        value: as key, with Dv.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table: as in :func:`flash_attn_varlen_func`.
        softmax_scale, is_causal, softcap, deterministic, scale: as in :func:`flash_dmattn_func`.
        return_attn_probs: also return lse.
        attn_mask: [Tq, H|Hkv|1, max_seqlen_k], bool or in query's dtype, as in :func:`flash_dmattn_func`: which keys of its own sequence a
            query sees. Not with block_table.
        attn_bias: floating point, as attn_mask, differentiable.

    Returns:
        out [Tq, H, Dv], or (out, lse [H, Tq], None).

    Raises:
        TypeError, ValueError: names the argument, what was expected and what it got.
    """
    third: object = max_seqlen_q
    if isinstance(third, Tensor):
        raise TypeError(
            "max_seqlen_q: expected an int, got Tensor: attn_mask and attn_bias, which stood in front of cu_seqlens_q in versions 1.0.0 to "
            "1.0.6, and all that follows them must be given by name"
        )
    form = layouts.PACKED if block_table is None else layouts.PAGED
    query, key, value = layouts.checked(NAMES, query, key, value, form)
    flags = {"is_causal": is_causal, "deterministic": deterministic, "return_attn_probs": return_attn_probs}
    causal, repeatable, probabilities = (layouts.of_flag(name, flag) for name, flag in flags.items())
    scale, softcap = layouts.one_of("softmax_scale", softmax_scale, "scale", scale), layouts.of_softcap(softcap)
    if attn_mask is None and attn_bias is None:
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return flash_attn.flash_attn_varlen_func(
            query, key, value, *lengths, softmax_scale=scale, causal=causal, softcap=softcap, deterministic=repeatable,
            return_attn_probs=probabilities, block_table=block_table,
        )  # fmt: skip
    if block_table is not None:
        raise ValueError("block_table: expected None with attn_mask or attn_bias, got a table")
    checks.each(checks.natural_int, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    ends_q, ends_k = layouts.check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, query, key.shape[0])
    bias = packed_bias(attn_mask, attn_bias, query, key, ends_q, ends_k, max_seqlen_k)
    out, lse = varlen_attention(
        padded(query), padded(key), padded(value), ends_q, ends_k, is_causal=causal, bias=bias, softcap=softcap, deterministic=repeatable,
        scale=layouts.of_scale(scale, query.shape[-1]), return_lse=True,
    )  # fmt: skip
    out = out[..., : value.shape[-1]]
    return (out, lse, None) if probabilities else out


def get_available_backends() -> list[str]:
    """The names that :func:`flash_dmattn_func_auto` takes here: "triton" and "flex", and "cuda" where there are kernels and a GPU for them."""
    return [name for name in BACKENDS if name != "cuda" or _cuda_available()]


def flash_dmattn_func_auto(backend: str | None = None, **kwargs: Any) -> Callable[..., Any]:
    """The attention function by a backend's name, whose arguments and defaults it has. All of them run on the device of their tensors.

    Args:
        backend: None, "cuda", "triton" or "flex".
        kwargs: none; arguments belong to the function that is returned.

    Raises:
        ValueError: another name.
        RuntimeError: "cuda" without kernels or GPU.
        TypeError: further arguments.
    """
    if kwargs:
        raise TypeError(f"{next(iter(kwargs))}: expected no arguments with backend; the function returned takes them")
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise ValueError(f"backend: expected None, {', '.join(BACKENDS)}, got {backend!r:.80}")
    if backend == "cuda" and not _cuda_available():
        raise RuntimeError('backend: expected another than "cuda": this installation has no CUDA kernels, or there is no GPU')
    return {"triton": triton_dmattn_func, "flex": flex_dmattn_func}.get(backend or "", flash_dmattn_func)


def flash_dynamic_mask_attention_forward(
    module: nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attention_bias: Tensor | None,
    scaling: float | None = None,
    window_size: int | None = None,
    softcap: float | None = None,
    *,
    keep_window_size: int | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    deterministic: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Dynamic mask attention as a model of transformers calls it, by flash-dmattn's name.

    Each query sees, among the keys that mask and causality show it, the ``window_size`` with the largest bias (equal ones: the later key), and
    the bias is added to their logits. Where bias and mask are about keys alone, the selection takes O(N) memory. Where one of them is about
    every pair, it is a dense mask.

    Args:
        module: the layer; its ``is_causal`` (default True) counts where is_causal is None, and its ``keep_window_size``, if it has one, where
            no window is given, as in versions 1.0.1 to 1.2.0.
        query: [B, H, Sq, D].
        key: [B, Hkv, Sk, D].
        value: [B, Hkv, Sk, Dv].
        attention_mask: None; bool [B, Sk] or [B, Sq] (padding); or [B|1, H|Hkv|1, Sq|1, Sk], bool or in query's dtype, as in
            :func:`flash_dmattn_func`.
        attention_bias: None; [B|1, H|Hkv|1, Sk]; or [B|1, H|Hkv|1, Sq|1, Sk], differentiable.
        scaling: default D ** -0.5.
        window_size: number of keys each query sees at most; None, or not less than Sk: all.
        softcap: as in :func:`flash_dmattn_func`. Versions before 1.2.1 had it in the place of window_size: give it by name.
        keep_window_size: window_size by its name in versions 1.0.1 to 1.2.0.
        is_causal: bottom-right aligned; a single query sees every key.
        dropout: probability of dropping a weight.
        s_aux: [H], sinks as in :func:`dmattn.attention`.
        deterministic: as in :func:`flash_dmattn_func`.
        kwargs: what models pass along and means nothing here. What would mean something raises.

    Returns:
        (out [B, Sq, H, Dv], None).

    Raises:
        TypeError, ValueError: names the argument, what was expected and what it got.
    """
    for name in REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: expected None, got {type(kwargs[name]).__name__}: it has no form here")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions: expected False, got True: dmattn.attention_weights computes weights for looking")
    query, key, value = (x.transpose(1, 2) for x in layouts.checked(NAMES, query, key, value, layouts.HEADS_FIRST))
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else checks.flag("is_causal", is_causal)
    batch, queries, _, size = query.shape
    keys = key.shape[1]

    # Bring mask and bias into four dimensions.
    mask: Tensor | None = None if attention_mask is None else checks.tensor("attention_mask", attention_mask)
    if mask is not None and mask.dim() == 2:
        mask = of_padding(mask, batch, queries, keys)[:, None, None]
    elif mask is not None:
        mask = keep_of("attention_mask", mask, query, _pairs(query, key))
    bias: Tensor | None = None if attention_bias is None else checks.tensor("attention_bias", attention_bias)
    if bias is not None:
        checks.dtype("attention_bias", bias, checks.DTYPES["cpu"])
        bias = bias[:, :, None] if bias.dim() == 3 else bias
    for name, shown in (("attention_mask", mask), ("attention_bias", bias)):
        if shown is not None:
            layouts.check_pairs(name, shown, query.transpose(1, 2), key.transpose(1, 2))

    selected: Mask | Tensor | None = mask
    window = _window(module, window_size, keep_window_size)
    causal = causal and (checks.is_traced() or queries > 1)
    if window is not None and ((bias is not None and checks.is_traced()) or window < keys):
        if bias is None:
            raise ValueError(f"attention_bias: expected scores, of which a window of {window} keys is selected, got None")
        selected = _select(mask, bias, window, causal, queries, keys)
    out = attention(
        *layouts.heads_first(query, key, value), selected, bias=bias, is_causal=causal,
        scale=layouts.of_scale(scaling, size, "scaling"), softcap=layouts.of_softcap(softcap), dropout_p=dropout, sinks=s_aux,
        deterministic=layouts.of_flag("deterministic", deterministic),
    )  # fmt: skip
    return out[..., : value.shape[3]].transpose(1, 2), None


def _window(module: nn.Module | None, window_size: int | None, keep_window_size: int | None) -> int | None:
    """The window by its name since 1.2.1, by its earlier name, or as the module has it."""
    layouts.one_of("window_size", window_size, "keep_window_size", keep_window_size)
    held = getattr(module, "keep_window_size", None)
    names = {"window_size": window_size, "keep_window_size": keep_window_size, "module.keep_window_size": held}
    name, window = next(((name, given) for name, given in names.items() if given is not None), ("", None))
    if window is not None:
        checks.positive_int(name, window)
    return window


def _select(mask: Tensor | None, bias: Tensor, window: int, causal: bool, queries: int, keys: int) -> Mask | Tensor:
    """The keys with the largest biases among those that mask and causality show."""
    if mask is not None:
        more = max(mask.shape[1], bias.shape[1])
        mask, bias = (repeat_heads(x, more) for x in (mask, bias))
    if bias.shape[2] == 1 and (mask is None or mask.shape[2] == 1):
        scores = bias if mask is None else torch.where(mask, bias, -torch.inf)
        return IntervalMask.top_k(scores[:, :, 0].expand(-1, -1, keys).detach(), window, causal)
    shown = torch.ones((1, 1, queries, keys), dtype=torch.bool, device=bias.device)
    shown = shown.tril(keys - queries) if causal else shown
    return BlockMask.from_bool(topk_mask(bias, shown if mask is None else shown & mask, window, torch.finfo(torch.float64).min))


def _pairs(query: Tensor, key: Tensor) -> int:
    """Of query [B, Sq, H, D] and key [B, Sk, Hkv, D]."""
    batch, queries, heads, _ = query.shape
    return batch * queries * heads * key.shape[1]


def __getattr__(name: str) -> bool:
    """CUDA_AVAILABLE, asked for when it is used: to ask for GPUs at import would start CUDA in every process."""
    if name == "CUDA_AVAILABLE":
        return _cuda_available()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _cuda_available() -> bool:
    return build_info()["cuda"] not in ("", "none") and torch.cuda.is_available()


TRITON_AVAILABLE = True
FLEX_AVAILABLE = True

flash_sparse_attn_func = flash_dmattn_func
triton_sparse_attn_func = triton_dmattn_func
flex_sparse_attn_func = flex_dmattn_func
flash_sparse_attn_varlen_func = flash_dmattn_varlen_func
flash_sparse_attn_func_auto = flash_dmattn_func_auto
flash_sparse_attention_forward = flash_dynamic_mask_attention_forward

__all__ = [
    "CUDA_AVAILABLE",  # noqa: F822  (see __getattr__)
    "FLEX_AVAILABLE",
    "TRITON_AVAILABLE",
    "block_smooth",
    "create_mask",
    "flash_dmattn_func",
    "flash_dmattn_func_auto",
    "flash_dmattn_varlen_func",
    "flash_dynamic_mask_attention_forward",
    "flash_sparse_attention_forward",
    "flash_sparse_attn_func",
    "flash_sparse_attn_func_auto",
    "flash_sparse_attn_varlen_func",
    "flex_dmattn_func",
    "flex_sparse_attn_func",
    "get_available_backends",
    "pad_input",
    "relu_mask",
    "topk_indices",
    "topk_mask",
    "triton_dmattn_func",
    "triton_sparse_attn_func",
    "unpad_input",
]
