"""dmattn.compat.flash_dmattn against plain definitions: mask and bias, selections as masks, what models call, padding, and backends."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import dmattn
import pytest
import torch
from dmattn.compat import flash_attn, flash_dmattn
from dmattn.testing import AttentionCase, assert_close_to_reference, per_query_head, run, run_reference, strategies, top_k_visible
from hypothesis import given
from hypothesis import strategies as st

tensor = strategies.random_tensor
TRUTH = torch.float64
LEAST = torch.finfo(TRUTH).min


def case_of(queries, keys, dtype=TRUTH, size=16, device="cpu", **fields) -> AttentionCase:
    q, k, v = (tensor((2, h, n, size), h, dtype, device) for h, n in ((4, queries), (2, keys), (2, keys)))
    return AttentionCase(q, k, v, **fields)


def bernoulli(shape, seed):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6


# The function -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True, None])
@pytest.mark.parametrize("shape", [(2, 4, 9, 12), (1, 2, 1, 12), (2, 1, 9, 12), (1, 1, 9, 1), (2, 4, 1, 1)])
def test_mask_and_bias_broadcast(shape, causal):
    mask, bias = bernoulli(shape, 1), tensor(shape, 2, TRUTH)
    wide = (shape[0], shape[1], 9, 12)
    case = case_of(9, 12, visible=mask.expand(wide), bias=bias, is_causal=bool(causal), scale=0.3, softcap=1.5)
    expected = dataclasses.replace(case, bias=bias.expand(wide))

    def fn(query, key, value, _, *, bias, scale, softcap, **__):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, lse, weights = flash_dmattn.flash_dmattn_func(q, k, v, mask, bias, scale, causal, softcap, True, True)
        torch.testing.assert_close(weights @ per_query_head(value, 4), out.transpose(1, 2))
        return out.transpose(1, 2), lse

    results = run(case, fn)
    truth = run_reference(expected)
    truth["grad_bias"] = truth["grad_bias"].sum_to_size(shape)
    for name, result in results.items():
        torch.testing.assert_close(result, truth[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_names(dtype):
    mask, bias = bernoulli((2, 2, 70, 90), 1), tensor((2, 2, 70, 90), 2, dtype)
    case = case_of(70, 90, dtype, visible=mask, bias=bias, is_causal=True, scale=0.3)
    for function in (
        flash_dmattn.flash_dmattn_func,
        flash_dmattn.triton_dmattn_func,
        flash_dmattn.flex_dmattn_func,
        flash_dmattn.flash_sparse_attn_func,
        flash_dmattn.triton_sparse_attn_func,
        flash_dmattn.flex_sparse_attn_func,
    ):
        q, k, v = (x.transpose(1, 2) for x in (case.query, case.key, case.value))
        out = function(q, k, v, attn_mask=mask, attn_bias=bias, scale=0.3, is_causal=True)
        assert_close_to_reference(case, {"out": out.transpose(1, 2)})


def test_head_sizes_are_padded():
    case = case_of(6, 6, size=10)
    q, k, v = (x.transpose(1, 2) for x in (case.query, case.key, case.value))
    out = flash_dmattn.flash_dmattn_func(q, k, v, is_causal=True)
    expected = dataclasses.replace(case, is_causal=True).call_reference()[0]
    torch.testing.assert_close(out.transpose(1, 2), expected)


@pytest.mark.parametrize("causal", [None, True])
def test_varlen_is_each_sequence_alone(causal):
    lengths_q, lengths_k = [3, 7, 0], [5, 2, 4]
    q, k, v = (tensor((sum(n), h, 16), h, TRUTH) for n, h in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2)))
    ends = [torch.tensor([0, *n]).cumsum(0).int() for n in (lengths_q, lengths_k)]
    out, lse, none = flash_dmattn.flash_sparse_attn_varlen_func(
        q, k, v, *ends, 7, 5, softcap=2.0, is_causal=causal, scale=0.3, return_attn_probs=True
    )
    parts = zip(*(x.split(n) for x, n in ((q, lengths_q), (k, lengths_k), (v, lengths_k))), strict=True)
    alone = [
        flash_dmattn.flash_dmattn_func(*(x[None] for x in part), None, None, 0.3, causal, 2.0, return_attn_probs=True)
        for part in parts
    ]
    torch.testing.assert_close(out, torch.cat([each[0][0] for each in alone]))
    torch.testing.assert_close(lse, torch.cat([each[1][0] for each in alone], dim=1))
    assert none is None


# Versions 1.0.0 to 1.2.0 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flash_dmattn_func", "triton_dmattn_func", "flex_dmattn_func"])
def test_a_mask_may_have_the_dtype_of_the_query(device, dtype, name):
    case = case_of(70, 90, dtype, device=device)
    keep, bias = bernoulli((2, 2, 70, 90), 1).to(device), tensor((2, 2, 70, 90), 2, dtype, device)
    q, k, v = (x.transpose(1, 2) for x in (case.query, case.key, case.value))
    function = getattr(flash_dmattn, name)
    out = function(q, k, v, keep.to(dtype), bias, is_causal=True)
    assert torch.equal(out, function(q, k, v, keep, bias, is_causal=True))
    assert_close_to_reference(dataclasses.replace(case, visible=keep, bias=bias, is_causal=True), {"out": out.transpose(1, 2)})


@pytest.mark.parametrize("where", ["window_size", "keep_window_size", "module"])
@pytest.mark.parametrize("window", [1, 4, 11, 12, 20])
def test_a_window_from_the_module_or_by_its_earlier_name(where, window):
    scores = tensor((2, 2, 12), 1, TRUTH)
    case = case_of(9, 12, visible=top_k_visible(scores, window)[:, :, 3:], key_bias=scores, is_causal=True)
    held = {"keep_window_size": window} if where == "module" else {}
    named = {} if where == "module" else {where: window}
    out, _ = flash_dmattn.flash_dynamic_mask_attention_forward(
        SimpleNamespace(is_causal=True, **held), case.query, case.key, case.value, None, scores, **named
    )
    assert_close_to_reference(case, {"out": out.transpose(1, 2)})


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("given", ["mask", "bias", "both"])
def test_varlen_takes_mask_and_bias_of_earlier_versions(given, heads):
    """[Tq, heads, longest]: the last dimension counts the keys of the query's own sequence."""
    lengths_q, lengths_k = [3, 7, 0, 1], [5, 2, 4, 1]
    q, k, v = (tensor((sum(n), h, 16), h, TRUTH) for n, h in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2)))
    keep = bernoulli((sum(lengths_q), heads, 5), 3) if given != "bias" else None
    bias = tensor((sum(lengths_q), heads, 5), 4, TRUTH).requires_grad_() if given != "mask" else None
    ends = [torch.tensor([0, *n]).cumsum(0).int() for n in (lengths_q, lengths_k)]
    named = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), (*ends, 7, 5), strict=True))
    out, lse, none = flash_dmattn.flash_dmattn_varlen_func(
        q, k, v, attn_mask=None if keep is None else keep.to(TRUTH), attn_bias=bias, is_causal=True, scale=0.3, softcap=2.0,
        return_attn_probs=True, **named,
    )  # fmt: skip
    assert none is None
    parts = zip(*(x.split(n) for x, n in ((q, lengths_q), (k, lengths_k), (v, lengths_k))), strict=True)
    alone = []
    for number, (part, first, keys) in enumerate(zip(parts, ends[0], lengths_k, strict=False)):
        rows = slice(int(first), int(first) + lengths_q[number])
        own = (None if x is None else x[rows, :, :keys].transpose(0, 1)[None] for x in (keep, bias))
        alone.append(flash_dmattn.flash_dmattn_func(*(x[None] for x in part), *own, 0.3, True, 2.0, return_attn_probs=True))
    expected = torch.cat([each[0][0] for each in alone])
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, torch.cat([each[1][0] for each in alone], dim=1))
    if bias is not None:
        got, wanted = (torch.autograd.grad(x.square().sum(), bias)[0] for x in (out, expected))
        torch.testing.assert_close(got, wanted)


def test_packed_masks_and_biases(device, dtype):
    """Masks are 1.0 and 0.0 in the query's dtype; those of packs count the keys of the query's own sequence."""
    tokens, longest = 191, 100
    keep = (tensor((tokens, 2, longest), 3, device=device) > -0.5).to(dtype)
    bias = tensor((tokens, 2, longest), 4, dtype, device)
    seen = torch.zeros(1, 2, tokens, 260, dtype=torch.bool, device=device)
    wide = torch.zeros(1, 2, tokens, 260, dtype=dtype, device=device)
    row = key = 0
    for m, n in ((40, 70), (1, 90), (150, 100)):
        place = (0, slice(None), slice(row, row + m), slice(key, key + n))
        seen[place] = keep[row : row + m, :, :n].transpose(0, 1).bool()
        wide[place] = bias[row : row + m, :, :n].transpose(0, 1)
        row, key = row + m, key + n
    q, k, v = (tensor((1, h, n, 64), h, dtype, device) for h, n in ((4, tokens), (2, 260), (2, 260)))
    case = AttentionCase(q, k, v, visible=seen, bias=wide)
    ends = [torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([0, 40, 41, 191], [0, 70, 160, 260])]

    def fn(q, k, v, _, **__):
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out, lse, _ = flash_dmattn.flash_dmattn_varlen_func(
            q, k, v, *ends, 150, 100, attn_mask=keep, attn_bias=bias, return_attn_probs=True
        )
        return out.transpose(0, 1)[None], lse[None]

    results = run(AttentionCase(case.query, case.key, case.value), fn)
    assert_close_to_reference(case, results)


# Selections as masks ------------------------------------------------------------------------------------------------------------------


def chosen_one_by_one(row, eligible, window):
    """The window largest of a row, the later one among equals, by repeated search."""
    shown = torch.zeros_like(eligible)
    for _ in range(window):
        best = None
        for j in range(len(row)):
            if eligible[j] and not shown[j] and row[j] > -math.inf and (best is None or row[j] >= row[best]):
                best = j
        if best is not None:
            shown[best] = True
    return shown


@given(data=st.data())
def test_topk_mask_by_search(data):
    keys, window = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 11))
    values = st.sampled_from([-math.inf, math.nan, LEAST, -1.0, 0.0, 0.5, 2.0])
    bias = torch.tensor(data.draw(st.lists(values, min_size=2 * keys, max_size=2 * keys)), dtype=TRUTH).view(1, 2, 1, keys)
    mask = bernoulli((1, 1, 3, keys), data.draw(st.integers(0, 99))) if data.draw(st.booleans()) else None
    got = flash_dmattn.topk_mask(bias, mask, window, LEAST)
    rows = 1 if mask is None else 3
    assert got.shape == (1, 2, rows, keys)
    for h in range(2):
        for i in range(rows):
            eligible = (bias[0, h, 0] > LEAST) & (True if mask is None else mask[0, 0, i])
            assert torch.equal(got[0, h, i], chosen_one_by_one(bias[0, h, 0], eligible, window))


def test_topk_indices_and_relu():
    bias = torch.tensor([[[3.0, 1.0, 3.0, 2.0, 3.0]]])
    assert flash_dmattn.topk_indices(bias, 2).tolist() == [[[2, 4]]]
    assert flash_dmattn.topk_indices(bias, 9).tolist() == [[[0, 1, 2, 3, 4]]]
    mask = torch.tensor([True, True, True, False, True])
    signs = torch.tensor([-1.0, 2.0, 0.0, 3.0, 4.0])
    assert flash_dmattn.relu_mask(signs, mask).tolist() == [False, True, False, False, True]


@pytest.mark.parametrize(("keys", "size"), [(10, 4), (8, 4), (3, 5), (6, 1), (7, 2)])
def test_blocks_become_what_most_of_them_is(keys, size):
    mask = bernoulli((2, 1, 3, keys), 0)
    before = mask.clone()
    smooth = flash_dmattn.block_smooth(mask, keys, size)
    assert torch.equal(mask, before)
    for first in range(0, keys, size):
        block = mask[..., first : first + size]
        majority = block.double().mean(-1, keepdim=True) > 0.5
        assert torch.equal(smooth[..., first : first + size], majority.expand_as(block))
    bias = tensor((2, 1, 3, keys), 1)
    for kind in ("topk", "relu"):
        fine = flash_dmattn.create_mask(bias, mask, 2, 3, keys, 2, -1e9, type=kind)
        coarse = flash_dmattn.create_mask(bias, mask, 2, 3, keys, 2, -1e9, size, kind)
        assert torch.equal(coarse, flash_dmattn.block_smooth(fine, keys, size))


def test_create_mask_takes_padding():
    bias = tensor((2, 2, 1, 6), 0)
    of_keys = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    expected = flash_dmattn.topk_mask(bias, of_keys[:, None, None], 3, -1e9)
    assert torch.equal(flash_dmattn.create_mask(bias, of_keys, 2, 4, 6, 3, -1e9), expected)
    assert torch.equal(flash_dmattn.create_mask(bias, of_keys[:, 2:], 2, 4, 6, 3, -1e9), expected)


# What models call ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [9, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("padding", [None, "of keys", "of queries", "by head"])
def test_a_model_selects_by_bias(device, exact, queries, causal, rank, padding):
    """A causal selection never sees what comes later, whether the bias has a row a query or one for all."""
    keys, window = 12, 4
    scores = tensor((2, 2, keys), 1, torch.promote_types(exact, torch.float32), device)
    shown = torch.ones(2, 1, 1, keys, dtype=torch.bool, device=device)
    mask = None
    if padding == "of keys":
        mask = bernoulli((2, keys), 5).to(device)
        shown = mask[:, None, None]
    elif padding == "of queries":
        mask = bernoulli((2, queries), 5).to(device)
        shown[:, 0, 0, keys - queries :] = mask
    elif padding == "by head":
        mask = shown = bernoulli((2, 4, 1, keys), 5).to(device)
    late = causal and queries > 1
    allowed = shown.expand(-1, -1, keys, -1)
    wide = scores if shown.shape[1] == 1 else scores.repeat_interleave(2, 1)
    visible = (
        torch.cat(
            [
                top_k_visible(wide[:, h : h + 1], window, late, allowed[:, h % shown.shape[1] : h % shown.shape[1] + 1])
                for h in range(wide.shape[1])
            ],
            1,
        )[:, :, keys - queries :]
        & shown
    )
    case = case_of(queries, keys, exact, device=device, visible=visible, key_bias=scores, scale=0.3)

    def fn(query, key, value, _, *, key_bias, scale, **__):
        given_bias = key_bias if rank == 3 else key_bias[:, :, None]
        module = SimpleNamespace(is_causal=causal)
        out, nothing = flash_dmattn.flash_dynamic_mask_attention_forward(
            module, query, key, value, mask, given_bias, scale, window, layer_idx=3, position_ids=None
        )
        assert nothing is None
        return out.transpose(1, 2), torch.zeros_like(query[..., 0]) + 0 * key_bias.sum()

    results = run(dataclasses.replace(case, grad_through_lse=False), fn)
    results.pop("lse")
    assert_close_to_reference(dataclasses.replace(case, grad_through_lse=False), results)


def test_a_model_selects_by_a_bias_of_every_pair():
    queries, keys, window = 7, 10, 3
    bias, mask = tensor((2, 2, queries, keys), 1, TRUTH), bernoulli((2, 4, queries, keys), 2)
    causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    visible = torch.zeros(2, 4, queries, keys, dtype=torch.bool)
    for b in range(2):
        for h in range(4):
            for i in range(queries):
                visible[b, h, i] = chosen_one_by_one(bias[b, h // 2, i], mask[b, h, i] & causal[i], window)
    case = case_of(queries, keys, visible=visible, bias=bias)
    out, _ = flash_dmattn.flash_sparse_attention_forward(
        None, case.query, case.key, case.value, mask, bias, window_size=window, is_causal=True
    )
    assert_close_to_reference(case, {"out": out.transpose(1, 2)})


def test_a_model_has_sinks_dropout_and_windows_longer_than_the_text():
    case = case_of(8, 8)
    scores, sinks = tensor((2, 2, 8), 1, TRUTH), tensor((4,), 2, TRUTH)
    module = SimpleNamespace(is_causal=True)
    tensors = (case.query, case.key, case.value)
    out, _ = flash_dmattn.flash_dynamic_mask_attention_forward(
        module, *tensors, None, scores, window_size=8, s_aux=sinks, dropout=0.0
    )
    expected = dmattn.attention(*tensors, key_bias=scores, is_causal=True, sinks=sinks)
    assert torch.equal(out.transpose(1, 2), expected)
    torch.manual_seed(0)
    dropped, _ = flash_dmattn.flash_dynamic_mask_attention_forward(module, *tensors, None, scores, dropout=0.5)
    torch.manual_seed(0)
    assert torch.equal(dropped.transpose(1, 2), dmattn.attention(*tensors, key_bias=scores, is_causal=True, dropout_p=0.5))


# Padding ------------------------------------------------------------------------------------------------------------------------------


def test_unpad_and_pad_are_inverse():
    x = tensor((3, 5, 2, 4), 0, TRUTH).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]])
    tokens, indices, ends, longest, used = flash_dmattn.unpad_input(x, mask)
    assert torch.equal(tokens, x[mask.bool()])
    assert torch.equal(flash_attn.index_first_axis(x.flatten(0, 1), indices), tokens)
    assert (indices.tolist(), ends.tolist(), longest, used.tolist()) == ([0, 1, 7, 8, 9], [0, 2, 5, 5], 3, [2, 3, 0])
    assert ends.dtype == torch.int32
    back = flash_attn.pad_input(tokens, indices, 3, 5)
    assert torch.equal(back, x * mask[:, :, None, None])
    assert torch.equal(torch.autograd.grad(back.sum(), x)[0], mask[:, :, None, None].expand_as(x).double())
    _, _, ends, longest, used = flash_dmattn.unpad_input(x, mask, 1 - mask)
    assert (ends.tolist(), longest, used.tolist()) == ([0, 5, 10, 15], 5, [2, 3, 0])


# Backends -----------------------------------------------------------------------------------------------------------------------------


def test_triton_and_flex_have_orders_and_defaults_of_their_own():
    case = case_of(9, 12, size=8)
    mask, bias = bernoulli((2, 2, 9, 12), 1), tensor((2, 2, 9, 12), 2, TRUTH)
    given = (*(x.transpose(1, 2) for x in (case.query, case.key, case.value)), mask, bias)
    causal, full = (flash_dmattn.flash_dmattn_func(*given, 0.3, is_causal) for is_causal in (True, False))
    assert torch.equal(flash_dmattn.triton_dmattn_func(*given, True, 0.3), causal)
    assert torch.equal(flash_dmattn.triton_dmattn_func(*given, softmax_scale=0.3), full)
    assert torch.equal(flash_dmattn.flex_dmattn_func(*given, None, 0.3), causal)
    assert torch.equal(flash_dmattn.flex_dmattn_func(*given, False, scale=0.3), full)
    assert len(flash_dmattn.flex_sparse_attn_func(*given, softcap=2.0, return_attn_probs=True)) == 3


def test_backends_are_names_of_functions(monkeypatch):
    for name, function in ((None, "flash"), ("triton", "triton"), ("flex", "flex")):
        assert flash_dmattn.flash_dmattn_func_auto(name) is getattr(flash_dmattn, f"{function}_dmattn_func")
    for available in (False, True):
        monkeypatch.setattr(flash_dmattn, "_cuda_available", lambda available=available: available)
        assert flash_dmattn.CUDA_AVAILABLE is available
        assert flash_dmattn.get_available_backends() == ["cuda", "triton", "flex"][1 - available :]
    assert flash_dmattn.flash_sparse_attn_func_auto("cuda") is flash_dmattn.flash_dmattn_func
    monkeypatch.setattr(flash_dmattn, "_cuda_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA kernels"):
        flash_dmattn.flash_dmattn_func_auto("cuda")
    with pytest.raises(AttributeError, match="ROCM_AVAILABLE"):
        _ = flash_dmattn.ROCM_AVAILABLE
