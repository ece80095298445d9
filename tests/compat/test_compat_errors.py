# ruff: noqa: E501  (one case a line, however long)
"""Bad arguments of the functions of earlier systems: refused with TypeError or ValueError, in the caller's names and layouts."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from dmattn.compat import block_sparse_attn, flash_attn, flash_dmattn, flashkernel, flashmask, triton_flashattn
from strange import STRANGE, assert_taken_or_refused

Q, K, V = torch.randn(2, 5, 4, 16), torch.randn(2, 6, 2, 16), torch.randn(2, 6, 2, 8)
PQ, PK, PV = Q.flatten(0, 1), K.flatten(0, 1), V.flatten(0, 1)
ENDS_Q, ENDS_K = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 6, 12], dtype=torch.int32)
ROWS = torch.zeros(2, 1, 6, 4, dtype=torch.int32)
BIAS = torch.randn(2, 2, 1, 6)
CACHE = [torch.zeros(2, 32, 2, 16), torch.zeros(2, 32, 2, 8)]
KINDS, INFO = torch.tensor([0, -1, 1, 0], dtype=torch.int32), torch.ones(8, dtype=torch.int32)
TABLES = torch.ones(2, 1, 1, 1, dtype=torch.bool)
PAGES = torch.zeros(2, 2, dtype=torch.int32)
FLAT = torch.zeros(2 * 3 * 4, 8)

ATTENTION = {"q": Q, "k": K, "v": V, "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
             "alibi_slopes": None, "deterministic": False, "return_attn_probs": False}  # fmt: skip
PACKED = ATTENTION | {"q": PQ, "k": PK, "v": PV, "cu_seqlens_q": ENDS_Q, "cu_seqlens_k": ENDS_K, "max_seqlen_q": 5, "max_seqlen_k": 6,
                      "block_table": None}  # fmt: skip
SPARSE = {"q": PQ, "k": PK, "v": PV, "cu_seqlens_q": ENDS_Q, "cu_seqlens_k": ENDS_K, "head_mask_type": KINDS, "streaming_info": INFO,
          "base_blockmask": TABLES, "max_seqlen_q_": 5, "max_seqlen_k_": 6, "p_dropout": 0.0, "deterministic": False, "softmax_scale": None,
          "is_causal": False, "exact_streaming": False, "return_attn_probs": False}  # fmt: skip
ARGUMENTS = {
    flash_attn.flash_attn_func: ATTENTION,
    flash_attn.flash_attn_varlen_func: PACKED,
    flash_attn.flash_attn_qkvpacked_func: {"qkv": torch.randn(2, 5, 3, 4, 16)},
    flash_attn.flash_attn_varlen_kvpacked_func: {"q": PQ, "kv": torch.randn(12, 2, 2, 16), "cu_seqlens_q": ENDS_Q, "cu_seqlens_k": ENDS_K,
                                                 "max_seqlen_q": 5, "max_seqlen_k": 6},
    flash_attn.flash_attn_with_kvcache: {"q": Q, "k_cache": CACHE[0], "v_cache": CACHE[1], "k": K[:, :5], "v": V[:, :5], "rotary_cos": None,
                                         "rotary_sin": None, "cache_seqlens": 0, "cache_batch_idx": None, "cache_leftpad": None,
                                         "block_table": None, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
                                         "rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False,
                                         "page_table": None},
    flash_attn.unpad_input: {"hidden_states": Q, "attention_mask": torch.ones(2, 5, dtype=torch.int64), "unused_mask": None},
    flash_attn.index_first_axis: {"hidden_states": PQ, "indices": torch.arange(10)},
    flash_attn.pad_input: {"hidden_states": PQ, "indices": torch.arange(10), "batch": 2, "seqlen": 5},
    flash_dmattn.flash_dmattn_func: {"query": Q, "key": K, "value": V, "attn_mask": None, "attn_bias": None, "softmax_scale": None,
                                     "is_causal": None, "softcap": None, "deterministic": None, "return_attn_probs": None, "scale": None},
    flash_dmattn.flash_dmattn_varlen_func: {"query": PQ, "key": PK, "value": PV, "cu_seqlens_q": ENDS_Q, "cu_seqlens_k": ENDS_K,
                                            "max_seqlen_q": 5, "max_seqlen_k": 6, "softmax_scale": None, "is_causal": None, "softcap": None,
                                            "deterministic": None, "return_attn_probs": None, "block_table": None, "attn_mask": None,
                                            "attn_bias": None},
    flash_dmattn.flash_dynamic_mask_attention_forward: {"module": None, "query": Q.transpose(1, 2), "key": K.transpose(1, 2),
                                                        "value": V.transpose(1, 2), "attention_mask": None, "attention_bias": BIAS,
                                                        "scaling": None, "window_size": None, "softcap": None, "keep_window_size": None,
                                                        "is_causal": None,
                                                        "dropout": 0.0, "s_aux": None, "deterministic": None},
    flash_dmattn.create_mask: {"attention_bias": BIAS, "attention_mask": None, "batch_size": 2, "query_len": 5, "key_len": 6,
                               "window_size": 3, "min_dtype": -1e9, "block_size": None, "type": "topk"},
    flash_dmattn.relu_mask: {"attention_bias": BIAS, "attention_mask": None, "min_dtype": -1e9, "block_size": None},
    flash_dmattn.topk_indices: {"attention_bias": BIAS, "window_size": 3},
    flash_dmattn.block_smooth: {"attention_mask": torch.ones(3, 6, dtype=torch.bool), "key_len": 6, "block_size": 2},
    flash_dmattn.flash_dmattn_func_auto: {"backend": None},
    block_sparse_attn.block_sparse_attn_func: SPARSE,
    flashmask.flashmask_attention: {"query": Q, "key": K, "value": V, "startend_row_indices": ROWS, "dropout": 0.1, "causal": False,
                                    "window_size": None, "return_softmax_lse": False, "return_seed_offset": False,
                                    "fixed_seed_offset": None, "rng_name": "", "training": True, "softmax_scale": None, "block_mask": None},
    flashmask.interval_masks: {"startend_row_indices": ROWS, "query_length": 5, "causal": False},
    flashkernel.flash_attention_forward: {"Q": Q.transpose(1, 2), "K": Q.transpose(1, 2), "V": Q.transpose(1, 2), "scale": None,
                                          "is_causal": False},
    triton_flashattn.flash_attention: {"q": Q, "k": Q, "v": Q, "scale": None},
    triton_flashattn._attn_bwd_prep[()]: {"O": FLAT, "DO": FLAT, "Delta": FLAT[:, 0].contiguous(), "Z": 2, "H": 3, "N": 4, "HEAD_DIM": 8},
}  # fmt: skip
DENSE = (flash_dmattn.create_mask, flash_dmattn.relu_mask, flash_dmattn.topk_indices)
NUMBER, WHOLE, NONE, FLAG = (frozenset(x) for x in (("an int", "a float"), ("an int",), ("None",), ("a bool",)))
TAKEN = {
    **dict.fromkeys(("softmax_scale", "scale", "scaling"), NONE | NUMBER),
    **dict.fromkeys(("causal", "deterministic", "return_attn_probs", "is_causal", "exact_streaming", "rotary_interleaved", "training",
                     "return_softmax_lse", "return_seed_offset"), FLAG),
    **dict.fromkeys(("alibi_slopes", "block_table", "page_table", "unused_mask", "attn_mask", "attn_bias", "attention_mask", "base_blockmask",
                     "startend_row_indices", "fixed_seed_offset", "block_mask", "cache_batch_idx", "cache_leftpad", "rotary_cos",
                     "rotary_sin", "attention_bias", "s_aux", "backend"), NONE),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "max_seqlen_q_", "max_seqlen_k_", "num_splits", "batch_size", "query_length"), WHOLE),
    "softcap": NONE | NUMBER, "cache_seqlens": WHOLE, "block_size": NONE | WHOLE,
    "window_size": NONE | WHOLE, "keep_window_size": NONE | WHOLE, "min_dtype": NUMBER, "module": set(STRANGE), "query_len": WHOLE, "key_len": WHOLE,
}  # fmt: skip
# Where an argument is refused that is taken elsewhere, or another way round.
EXCEPT = {
    (flash_attn.flash_attn_func, "window_size"): set(),
    (flash_attn.flash_attn_varlen_func, "window_size"): set(),
    (flash_attn.flash_attn_with_kvcache, "window_size"): set(),
    (flash_dmattn.create_mask, "window_size"): WHOLE,
    (flash_dmattn.topk_indices, "window_size"): WHOLE,
    **{(function, "attention_bias"): {"no elements", "no batch", "no keys", "another device"} for function in DENSE},
    (triton_flashattn._attn_bwd_prep[()], "H"): WHOLE,
    (flash_dmattn.block_smooth, "attention_mask"): set(),
    (flash_dmattn.block_smooth, "block_size"): WHOLE,
    (flash_dmattn.block_smooth, "key_len"): set(),
    (flash_attn.unpad_input, "attention_mask"): set(),
    (flash_attn.pad_input, "batch"): WHOLE,
    (flash_attn.index_first_axis, "hidden_states"): {"no keys", "2^40 elements", "2^40 batches and heads"},  # whose rows are there
    (block_sparse_attn.block_sparse_attn_func, "base_blockmask"): set(),
    (block_sparse_attn.block_sparse_attn_func, "streaming_info"): set(),
    (block_sparse_attn.block_sparse_attn_func, "max_seqlen_q_"): set(),
    (block_sparse_attn.block_sparse_attn_func, "max_seqlen_k_"): set(),
    (flashmask.interval_masks, "startend_row_indices"): set(),
    (flashmask.flashmask_attention, "window_size"): {"None"},
    **{(f, name): {"None", "a bool"} for f in (flash_dmattn.flash_dmattn_func, flash_dmattn.flash_dmattn_varlen_func,
                                               flash_dmattn.flash_dynamic_mask_attention_forward)
       for name in ("is_causal", "deterministic", "return_attn_probs")},
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "argument"),
    [(function, argument) for function, arguments in ARGUMENTS.items() for argument in arguments],
    ids=lambda given: given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__),
)
def test_anything_for_any_argument(function, argument):
    """It is taken by the arguments that say so, or refused with TypeError or ValueError, and the message opens with an argument's name."""
    names = [*ARGUMENTS[function], "query", "key", "value", "sinks", "dropout_p", "q, k, v", "query, key"]
    # There is memory for every element of a bias, or torch's error.
    left_out = {what for what in STRANGE if what.startswith("2^40") and argument == "attention_bias" and function in DENSE}
    taken = EXCEPT.get((function, argument), TAKEN.get(argument, ()))
    assert_taken_or_refused(function, ARGUMENTS[function], argument, names, taken, left_out)


SHORT, LATE = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([1, 5, 10], dtype=torch.int32)
FALLING, BEYOND = torch.tensor([0, 7, 5], dtype=torch.int32), torch.tensor([0, 5, 11], dtype=torch.int32)


def new(**changes):
    return flash_attn.flash_attn_with_kvcache(**ARGUMENTS[flash_attn.flash_attn_with_kvcache] | changes)


def model(**changes):
    arguments = ARGUMENTS[flash_dmattn.flash_dynamic_mask_attention_forward] | changes
    return flash_dmattn.flash_dynamic_mask_attention_forward(**arguments)


def old(**changes):
    return flash_dmattn.flash_dmattn_varlen_func(**ARGUMENTS[flash_dmattn.flash_dmattn_varlen_func] | changes)


def packed(**changes):
    return flash_attn.flash_attn_varlen_func(**PACKED | changes)


def sparse(**changes):
    return block_sparse_attn.block_sparse_attn_func(**SPARSE | changes)


def mask(**changes):
    return flashmask.flashmask_attention(**ARGUMENTS[flashmask.flashmask_attention] | changes)


def long(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


BAD = {
    "batch": (lambda: flash_attn.flash_attn_func(Q, K[:1], V[:1]), ValueError, "k: expected [B, Sk, Hkv, D] with B=2, D=16, got [1, 6, 2, 16]"),
    "value length": (lambda: flash_attn.flash_attn_func(Q, K, V[:, 1:]), ValueError, "v: expected [B, Sk, Hkv, Dv] = [2, 6, 2, 'Dv'], got [2, 5, 2, 8]"),
    "heads": (lambda: flash_attn.flash_attn_func(Q[:, :, :3], K, V), ValueError, "k: expected a number of heads that divides H=3 of q, got Hkv=2"),
    "dtype": (lambda: flash_attn.flash_attn_func(Q, K.double(), V), TypeError, "k: expected dtype torch.float32 like q, got torch.float64"),
    "rank": (lambda: flash_dmattn.flash_dmattn_func(Q, K[0], V), ValueError, "key: expected 4 dimensions [B, Sk, Hkv, D], got shape [6, 2, 16]"),
    "window of three": (lambda: flash_attn.flash_attn_func(Q, K, V, window_size=(1, 2, 3)), TypeError, "window_size: expected two ints (left, right), got (1, 2, 3)"),
    "slopes": (lambda: flash_attn.flash_attn_func(Q, K, V, alibi_slopes=torch.ones(2)), ValueError, "alibi_slopes: expected [H] or [B, H] with B=2, H=4, got [2]"),
    "qkv": (lambda: flash_attn.flash_attn_qkvpacked_func(torch.ones(2, 5, 2, 4, 16)), ValueError, "qkv: expected [B, S, 3, H, D], got [2, 5, 2, 4, 16]"),
    "ends": (lambda: packed(cu_seqlens_q=SHORT), ValueError, "cu_seqlens_k: expected shape [2] like cu_seqlens_q, got [3]"),
    "ends begin late": (lambda: packed(cu_seqlens_q=LATE), ValueError, "cu_seqlens_q: expected 0 = c[0] <= c[1] <= ... <= c[-1] <= 10 tokens, got [1, 5, 10]"),
    "ends fall": (lambda: packed(cu_seqlens_q=FALLING), ValueError, "cu_seqlens_q: expected 0 = c[0] <= c[1] <= ... <= c[-1] <= 10 tokens, got [0, 7, 5]"),
    "ends beyond": (lambda: packed(cu_seqlens_q=BEYOND), ValueError, "cu_seqlens_q: expected 0 = c[0] <= c[1] <= ... <= c[-1] <= 10 tokens, got [0, 5, 11]"),
    "table of pages": (lambda: packed(k=CACHE[0], v=CACHE[1], block_table=PAGES[:1]), ValueError, "block_table: expected [B, max_pages] with B=2, got [1, 2]"),
    "no room": (lambda: new(cache_seqlens=28), ValueError, "cache_seqlens: expected 0 <= cache_seqlens <= 27, the cache's room, got 28"),
    "no room for one": (lambda: new(cache_seqlens=long(3, 28)), ValueError, "cache_seqlens: expected numbers from 0 to 27, got [3, 28]"),
    "no length": (lambda: new(cache_seqlens=None), ValueError, "cache_seqlens: expected an int or a tensor with k, got None"),
    "k alone": (lambda: new(v=None), TypeError, "v: expected a torch.Tensor, got NoneType"),
    "v of another length": (lambda: new(v=V[:, :4]), ValueError, "v: expected [B, n, Hkv, Dv] with B=2, Hkv=2, Dv=8, n=5, got [2, 4, 2, 8]"),
    "row of the cache": (lambda: new(cache_batch_idx=long(0, 2)), ValueError, "cache_batch_idx: expected numbers from 0 to 1, got [0, 2]"),
    "pages without room": (lambda: packed(k=CACHE[0][:, :4], v=CACHE[1][:, :4], cu_seqlens_k=torch.tensor([0, 2, 8], dtype=torch.int32), block_table=PAGES[:, :1]), ValueError, "block_table: expected room for 6 keys, got 1 pages of 4"),
    "a page that is not there": (lambda: packed(k=CACHE[0], v=CACHE[1], block_table=PAGES + 2), ValueError, "block_table: expected pages from 0 to 1, got 2"),
    "a cache's page that is not there": (lambda: new(block_table=PAGES + 2), ValueError, "block_table: expected pages from 0 to 1, got 2"),
    "a page below 0": (lambda: new(block_table=PAGES - 1), ValueError, "block_table: expected pages from 0 to 1, got -1"),
    "a page below 0 to read": (lambda: new(k=None, v=None, cache_seqlens=1, window_size=(1, 1), block_table=PAGES - 1), ValueError, "block_table: expected pages from 0 to 1, got -1"),
    "rows of pages": (lambda: new(cache_batch_idx=long(0, 1), block_table=PAGES), ValueError, "cache_batch_idx: expected None with block_table, got a tensor"),
    "two tables": (lambda: new(page_table=PAGES, block_table=PAGES), TypeError, "block_table, page_table: expected one of them at most, got both"),
    "turned and padded": (lambda: new(rotary_cos=Q[0, :, 0], rotary_sin=Q[0, :, 0], cache_leftpad=long(0, 0)), ValueError, "rotary_cos: expected None with cache_leftpad"),
    "turned without k": (lambda: new(k=None, v=None, rotary_cos=Q[0, :, 0]), ValueError, "rotary_cos: expected None without k"),
    "few positions": (lambda: new(rotary_cos=torch.ones(4, 4), rotary_sin=torch.ones(4, 4)), ValueError, "rotary_cos: expected at least 5 positions, got 4"),
    "a gradient": (lambda: new(q=Q.clone().requires_grad_()), RuntimeError, "flash_attn_with_kvcache has no gradient"),
    "two scales": (lambda: flash_dmattn.flash_dmattn_func(Q, K, V, softmax_scale=1.0, scale=1.0), TypeError, "softmax_scale, scale: expected one of them at most"),
    "mask": (lambda: flash_dmattn.flash_dmattn_func(Q, K, V, torch.ones(2, 3, 5, 6) > 0), ValueError, "attn_mask: expected [B|1, H|Hkv|1, Sq|1, Sk|1] with B=2, H=4, Hkv=2, Sq=5, Sk=6, got [2, 3, 5, 6]"),
    "window without scores": (lambda: model(window_size=3, attention_bias=None), ValueError, "attention_bias: expected scores, of which a window of 3 keys is selected, got None"),
    "a module's window without scores": (lambda: model(module=SimpleNamespace(keep_window_size=3), attention_bias=None), ValueError, "attention_bias: expected scores, of which a window of 3 keys is selected, got None"),
    "a module's window": (lambda: model(module=SimpleNamespace(keep_window_size=0)), ValueError, "module.keep_window_size: expected a positive int, got 0"),
    "two windows": (lambda: model(window_size=3, keep_window_size=3), TypeError, "window_size, keep_window_size: expected one of them at most, got both"),
    "an additive mask": (lambda: flash_dmattn.flash_dmattn_func(Q, K, V, torch.full((1, 1, 5, 6), -1e9)), ValueError, "attn_mask: expected 1.0 (keep) and 0.0 (hide), or bool, got other values"),
    "a mask of another dtype": (lambda: flash_dmattn.flash_dmattn_func(Q, K, V, torch.ones(1, 1, 5, 6).half()), TypeError, "attn_mask: expected dtype bool, float32, got float16"),
    "an additive mask of a model": (lambda: model(attention_mask=torch.full((1, 1, 5, 6), -1e9)), ValueError, "attention_mask: expected 1.0 (keep) and 0.0 (hide), or bool, got other values"),
    "mask and bias by position": (lambda: flash_dmattn.flash_dmattn_varlen_func(PQ, PK, PV, None, None, ENDS_Q, ENDS_K, 5, 6), TypeError, "max_seqlen_q: expected an int, got Tensor: attn_mask and attn_bias, which stood in front of cu_seqlens_q in versions 1.0.0 to 1.0.6, and all that follows them must be given by name"),
    "a packed mask": (lambda: old(attn_mask=torch.ones(10, 2, 5) > 0), ValueError, "attn_mask: expected [Tq, H|Hkv|1, max_seqlen_k] with Tq=10, H=4, Hkv=2, max_seqlen_k=6, got [10, 2, 5]"),
    "a packed bias": (lambda: old(attn_bias=torch.ones(10, 3, 6)), ValueError, "attn_bias: expected [Tq, H|Hkv|1, max_seqlen_k] with Tq=10, H=4, Hkv=2, max_seqlen_k=6, got [10, 3, 6]"),
    "a packed mask and pages": (lambda: old(attn_mask=torch.ones(10, 2, 6) > 0, key=CACHE[0], value=CACHE[1], block_table=PAGES), ValueError, "block_table: expected None with attn_mask or attn_bias, got a table"),
    "too short for its keys": (lambda: old(attn_bias=torch.ones(10, 2, 5), max_seqlen_k=5), ValueError, "max_seqlen_k: expected at least 6, the longest sequence, got 5"),
    "shapes of FlashKernel": (lambda: flashkernel.flash_attention_forward(Q, K, K), ValueError, "K: expected [2, 5, 4, 16] like Q, got [2, 6, 2, 16]"),
    "no dimension": (lambda: flashkernel.reduce_sum(Q, None), TypeError, "dim: expected an int, got NoneType"),
    "a flag for a dimension": (lambda: flashkernel.reduce_max(Q, True), TypeError, "dim: expected an int, got bool"),
    "a list": (lambda: flashkernel.reduce_sum([1.0]), TypeError, "input: expected a torch.Tensor, got list"),
    "complex numbers": (lambda: flashkernel.triton_reduce_sum(Q + 1j), TypeError, "input: expected dtype float64, float32,"),
    "the last dimension": (lambda: flashkernel.reduce_sum(Q, -2), ValueError, "dim: expected -1 (all elements) or 0 <= dim < 4, got -2"),
    "a dimension that is not there": (lambda: flashkernel.reduce_max(Q, 4), ValueError, "dim: expected -1 (all elements) or 0 <= dim < 4, got 4"),
    "key of a model": (lambda: model(key=K.transpose(1, 2)[..., :8]), ValueError, "key: expected [B, Hkv, Sk, D] with B=2, D=16, got [2, 2, 6, 8]"),
    "value of a model": (lambda: model(value=V.transpose(1, 2)[:, :, :4]), ValueError, "value: expected [B, Hkv, Sk, Dv] = [2, 2, 6, 'Dv'], got [2, 2, 4, 8]"),
    "weights": (lambda: model(output_attentions=True), ValueError, "output_attentions: expected False, got True"),
    "head mask": (lambda: model(head_mask=torch.ones(4)), ValueError, "head_mask: expected None, got Tensor"),
    "sequences": (lambda: model(cu_seq_lens_q=ENDS_Q), ValueError, "cu_seq_lens_q: expected None, got Tensor"),
    "padding": (lambda: model(attention_mask=torch.ones(2, 4) > 0), ValueError, "attention_mask: expected [B, Sk] = [2, 6] or [B, Sq] = [2, 5], got [2, 4]"),
    "backend": (lambda: flash_dmattn.flash_dmattn_func_auto("rocm"), ValueError, "backend: expected None, cuda, triton, flex, got 'rocm'"),
    "arguments of a backend": (lambda: flash_dmattn.flash_dmattn_func_auto(None, scale=1.0), TypeError, "scale: expected no arguments with backend"),
    "a mask for more keys": (lambda: flash_dmattn.create_mask(BIAS, None, 2, 5, 7, 3, 0.0), ValueError, "attention_bias: expected [B|1, H|Hkv|1, Sq|1, Sk] with B=2, Sq=5, Sk=7, got [2, 2, 1, 6]"),
    "a mask for a larger batch": (lambda: flash_dmattn.create_mask(BIAS, None, 3, 5, 6, 3, 0.0), ValueError, "attention_bias: expected [B|1, H|Hkv|1, Sq|1, Sk] with B=3, Sq=5, Sk=6, got [2, 2, 1, 6]"),
    "kind of mask": (lambda: flash_dmattn.create_mask(BIAS, None, 2, 5, 6, 3, 0.0, type="max"), ValueError, "type: expected 'topk' or 'relu', got 'max'"),
    "indices": (lambda: flash_attn.pad_input(PQ, torch.arange(10) + 1, 2, 5), ValueError, "indices: expected numbers from 0 to 9, got [1, 2, 3, 4, 5, 6, 7, 8]"),
    "rows": (lambda: flash_attn.index_first_axis(PQ, torch.arange(10) - 1), ValueError, "indices: expected numbers from 0 to 9, got [-1, 0, 1, 2, 3, 4, 5, 6]"),
    "tables": (lambda: sparse(base_blockmask=TABLES[:1]), ValueError, "base_blockmask: expected [B, tables, blocks_q, blocks_k] with B=2, blocks_q=1, blocks_k=1, got [1, 1, 1, 1]"),
    "no tables": (lambda: sparse(base_blockmask=None), ValueError, "base_blockmask: expected a table for each head with head_mask_type > 0, got None"),
    "few tables": (lambda: sparse(head_mask_type=long(1, 1, 0, 0)), ValueError, "base_blockmask: expected at least 2 tables for head_mask_type, got 1"),
    "no streaming": (lambda: sparse(streaming_info=None), ValueError, "streaming_info: expected [2 * H] for streaming heads, got None"),
    "exact, not causal": (lambda: sparse(exact_streaming=True), ValueError, "exact_streaming: expected False without is_causal, got True"),
    "too short": (lambda: sparse(max_seqlen_q_=4), ValueError, "max_seqlen_q_: expected at least 5, the longest sequence, got 4"),
    "columns": (lambda: mask(causal=True), ValueError, "startend_row_indices: expected [B|1, H|Hkv|1, Sk, columns] with 1 or 2 columns with causal, got [2, 1, 6, 4]"),
    "one column": (lambda: mask(startend_row_indices=ROWS[..., :1]), ValueError, "startend_row_indices: expected [B|1, H|Hkv|1, Sk, columns] with 2 or 4 columns without causal"),
    "window and rows": (lambda: mask(window_size=3), ValueError, "window_size: expected None with startend_row_indices, got a window"),
    "a generator": (lambda: mask(rng_name="local"), ValueError, "rng_name: expected \"\", torch has no generators by name, got 'local'"),
    "blocks": (lambda: mask(block_mask=torch.ones(2, 1, 2, 1).int()), ValueError, "block_mask: expected [B|1, H|Hkv|1, blocks_q, blocks_k] with B=2, H=4, Hkv=2, blocks_q=1, blocks_k=1, got [2, 1, 2, 1]"),
    "a buffer": (lambda: triton_flashattn._attn_bwd_prep[()](FLAT, FLAT.T, FLAT, 2, 3, 4, 8), ValueError, "DO: expected 192 contiguous elements for Z=2, H=3, N=4"),
}  # fmt: skip


@pytest.mark.brief
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=re.escape(message)):
        call()


ELSEWHERE = {
    flash_attn.flash_attn_func: {"k": K, "alibi_slopes": torch.zeros(4)},
    flash_attn.flash_attn_varlen_func: {"cu_seqlens_q": ENDS_Q, "cu_seqlens_k": ENDS_K},
    flash_attn.flash_attn_with_kvcache: {
        name: torch.zeros(2, dtype=torch.int32) for name in ("cache_seqlens", "cache_batch_idx")
    },
    flash_attn.unpad_input: {"attention_mask": torch.ones(2, 5, dtype=torch.int64)},
    flash_attn.index_first_axis: {"indices": torch.arange(10)},
    flash_dmattn.flash_dmattn_func: {"attn_mask": torch.ones(2, 1, 5, 6, dtype=torch.bool), "attn_bias": torch.zeros(2, 4, 5, 6)},
    flash_dmattn.create_mask: {"attention_mask": torch.ones(2, 1, 5, 6, dtype=torch.bool)},
    block_sparse_attn.block_sparse_attn_func: {"head_mask_type": KINDS, "streaming_info": INFO, "base_blockmask": TABLES},
    flashmask.flashmask_attention: {"startend_row_indices": ROWS, "block_mask": torch.ones(2, 1, 1, 1, dtype=torch.int32)},
}


@pytest.mark.parametrize(("function", "name"), [(function, name) for function, given in ELSEWHERE.items() for name in given])
def test_a_tensor_on_another_device(function, name):
    with pytest.raises(ValueError, match=f"{name}: expected device cpu like"):
        function(**ARGUMENTS[function] | {name: ELSEWHERE[function][name].to("meta")})
