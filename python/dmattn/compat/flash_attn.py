"""flash-attn's functions (version 2): the same names, arguments and layouts; docs/other_libraries.md says what differs.

Head sizes up to 256 are padded to multiples of 8. ``window_size``, grouped heads and bottom-right causality are flash-attn's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmattn import checks
from dmattn.call import new_seed
from dmattn.compat import layouts
from dmattn.compat.flash_attn_cache import flash_attn_with_kvcache
from dmattn.compat.merging import run
from dmattn.compat.padding import index_first_axis, pad_input, unpad_input
from dmattn.composed import dropout_factors
from dmattn.sizes import padded
from dmattn.varlen import varlen_attention
from dmattn.weights import attention_weights

Results = Tensor | tuple[Tensor, Tensor, Tensor | None]
NAMES = ("q", "k", "v")


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Attention over [B, S, H, D], by flash-attn's name.

    Args:
        q: [B, Sq, H, D].
        k: [B, Sk, Hkv, D] with H % Hkv == 0.
        v: [B, Sk, Hkv, Dv].
        dropout_p: probability of dropping a weight.
        softmax_scale: default D ** -0.5.
        causal: bottom-right aligned.
        window_size: (left, right): the query at position p = i + Sk - Sq sees the keys from p - left to p + right; negative is without end.
        softcap: > 0: ``softcap * tanh(s / softcap)``.
        alibi_slopes: [H] or [B, H], adds ``-slope * |p - j|``, differentiable; one pass, or two without causality, merged by lse.
        deterministic: gradients bitwise equal from run to run.
        return_attn_probs: also return lse and the weights.

    Returns:
        out [B, Sq, H, Dv], or (out, lse [B, H, Sq], weights). Without dropout weights is None; with dropout it is [B, H, Sq, Sk], the softmax
        before dropout, negative where a weight was dropped: memory for every pair, for tests.

    Raises:
        TypeError, ValueError: names the argument, what was expected and what it got.
    """
    q, k, v = layouts.checked(NAMES, q, k, v, layouts.HEADS_LAST)
    checks.flag("causal", causal), checks.flag("deterministic", deterministic)
    dropout_p = layouts.of_dropout("dropout_p", dropout_p)
    scale, cap = layouts.of_scale(softmax_scale, q.shape[-1]), layouts.of_softcap(softcap)
    left, right = layouts.of_window(window_size, causal)
    batch, queries, heads, _ = q.shape
    slopes = layouts.slopes_of(alibi_slopes, batch, heads, q)
    passes = layouts.passes_of_batch(queries, k.shape[1], left, right, slopes, q.device)
    query, key, value = layouts.heads_first(q, k, v)
    signed = checks.flag("return_attn_probs", return_attn_probs) and dropout_p > 0
    seed = new_seed(q.device) if signed else None
    out, lse = run(
        query, key, value, passes, scale=scale, softcap=cap, dropout_p=dropout_p, dropout_seed=seed, deterministic=deterministic
    )
    out = out.transpose(1, 2)[..., : v.shape[-1]]
    if not return_attn_probs:
        return out
    if seed is None:
        return out, lse, None
    bias, sequences = None, layouts.of_batch(queries, k.shape[1], None, q.device)
    if slopes is not None:
        behind = sequences.from_last[..., None] - (sequences.number - (k.shape[1] - 1))[:, :, None]
        bias = -slopes[..., None] * behind.abs()
    weights = attention_weights(query, key, sequences.window(left, right), bias=bias, scale=scale, softcap=cap)
    kept = dropout_factors(seed, dropout_p, batch, heads, ((0, queries), (0, k.shape[1])))
    return out, lse, torch.where(kept > 0, weights, -weights)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Results:
    """Attention over packed sequences, by flash-attn's name. Positions are those within each sequence, aligned bottom-right.

    Args:
        q: [Tq, H, D], sequences one after the other.
        k: [Tk, Hkv, D], or with block_table [pages, page_size, Hkv, D].
        v: as k, with Dv.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 [B + 1]: 0 and the end of each sequence. Values are checked where they lie on the CPU.
        max_seqlen_q, max_seqlen_k: the greatest lengths; results do not depend on them.
        block_table: integers [B, max_pages]: key j of sequence b lies in page ``block_table[b, j // page_size]``; such pages are copied.
            Values are checked where they lie on the CPU.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as in :func:`flash_attn_func`.
        return_attn_probs: also return lse.

    Returns:
        out [Tq, H, Dv], zero behind the last sequence, or (out, lse [H, Tq], None), without weights.

    Raises:
        TypeError, ValueError: names the argument, what was expected and what it got.
    """
    q, k, v = layouts.checked(NAMES, q, k, v, layouts.PACKED if block_table is None else layouts.PAGED)
    dropout_p = layouts.of_dropout("dropout_p", dropout_p)
    checks.each(checks.flag, causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    checks.each(checks.natural_int, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    ends_q, ends_k = layouts.check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, q, None if block_table is not None else k.shape[0])
    batch, heads = ends_q.shape[0] - 1, q.shape[1]
    scale, cap = layouts.of_scale(softmax_scale, q.shape[-1]), layouts.of_softcap(softcap)
    left, right = layouts.of_window(window_size, causal)
    slopes = layouts.slopes_of(alibi_slopes, batch, heads, q)
    value_size = v.shape[-1]
    if slopes is None and block_table is None:
        query, key, value = padded(q), padded(k), padded(v)
        window = None if left is None and right in (None, 0) else layouts.window_mask(left, right, k.shape[0], k.device)
        out, packed_lse = varlen_attention(
            query, key, value, ends_q, ends_k, is_causal=right == 0, mask=window, scale=scale, softcap=cap, dropout_p=dropout_p,
            deterministic=deterministic, return_lse=True,
        )  # fmt: skip
        return (out[..., :value_size], packed_lse, None) if return_attn_probs else out[..., :value_size]
    room = 0
    if block_table is not None:
        table = layouts.check_table("block_table", block_table, batch, q)
        layouts.check_pages("block_table", table, ends_k.diff(), k)
        k, v = (layouts.from_pages(pages, table, batch) for pages in (k, v))
        room = k.shape[1]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    sequences, of_key, of_query = layouts.packed(ends_q, ends_k, q.shape[0], k.shape[0], room)
    key_slopes = query_slopes = slopes
    if slopes is not None and slopes.shape[0] > 1:
        key_slopes, query_slopes = (slopes[of, :, 0].T[None] for of in (of_key, of_query))
    passes = layouts.passes_of(sequences, left, right, key_slopes, query_slopes)
    query, key, value = layouts.heads_first(q, k, v)
    out, lse = run(query, key, value, passes, scale=scale, softcap=cap, dropout_p=dropout_p, deterministic=deterministic)
    out = out.squeeze(0).transpose(0, 1)[..., :value_size]
    return (out, lse.squeeze(0), None) if return_attn_probs else out


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Results:
    """:func:`flash_attn_func` of qkv [B, S, 3, H, D]; args and options: its arguments from dropout_p on."""
    q, k, v = _parts("qkv", qkv, "[B, S, 3, H, D]")
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Results:
    """:func:`flash_attn_func` of q [B, Sq, H, D] and kv [B, Sk, 2, Hkv, D]; args and options: its arguments from dropout_p on."""
    k, v = _parts("kv", kv, "[B, Sk, 2, Hkv, D]")
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any) -> Results:
    """:func:`flash_attn_varlen_func` of qkv [T, 3, H, D]; args and options: its arguments from dropout_p on."""
    q, k, v = _parts("qkv", qkv, "[T, 3, H, D]")
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **options)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Results:
    """:func:`flash_attn_varlen_func` of q [Tq, H, D] and kv [Tk, 2, Hkv, D]; args and options: its arguments from cu_seqlens_q on."""
    k, v = _parts("kv", kv, "[Tk, 2, Hkv, D]")
    return flash_attn_varlen_func(q, k, v, *args, **options)


def _parts(name: str, given: object, layout: str) -> tuple[Tensor, ...]:
    return checks.shaped(name, given, layout).unbind(-3)


__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "index_first_axis",
    "pad_input",
    "unpad_input",
]
