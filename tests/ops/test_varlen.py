# ruff: noqa: E501  (one case a line, however long)
"""varlen_attention against the specification, document by document: lengths, alignment, selection, masks, parts, gradients, tracing."""

from __future__ import annotations

import itertools
import os
import types
import warnings

import dmattn
import pytest
import torch
from dmattn import IndexMask, IntervalMask, checks, varlen
from dmattn.compat import flash_attn
from dmattn.testing import AttentionCase, assert_matches_reference, strategies, top_k_visible
from dmattn_bench.two_ways import assert_same_by_another_way
from hypothesis import given
from hypothesis import strategies as st
from programs import assert_compiles_once, assert_exports
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode

tensor = strategies.random_tensor


def ends_of(lengths, device="cpu", dtype=torch.int32):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=device)


def visible_pairs(queries, keys, Tq, Tk, causal, *, scores=None, window=0, local=0, sink_keys=0, mask=None):
    """bool [1, Hkv|1, Tq, Tk], one document after the other; scores [Tk, Hkv]."""
    heads = 1 if scores is None else scores.shape[1]
    heads = max(heads, 1 if mask is None else mask.shape[1])
    visible = torch.zeros(1, heads, Tq, Tk, dtype=torch.bool)
    for (first_q, last_q), (first_k, last_k) in zip(*map(itertools.pairwise, (queries.tolist(), keys.tolist())), strict=True):
        Lq, Lk = last_q - first_q, last_k - first_k
        position = torch.arange(Lq) + Lk - Lq
        block = torch.ones(1, 1, Lq, Lk, dtype=torch.bool)
        if causal:
            block = (torch.arange(Lk) <= position[:, None])[None, None]
        if scores is not None or local or sink_keys:
            given_scores = torch.zeros(1, 1, Lk) if scores is None else scores[first_k:last_k].T[None]
            of_keys = top_k_visible(given_scores, window, causal, None, local, sink_keys)  # [1, Hkv, Lk, Lk]
            block = block & (of_keys[:, :, position.clamp(0)] if Lk else block)
        if mask is not None:
            whole = mask.to_tensor(Tk)
            p = (first_k + position)[:, None]
            start, end = (whole[:, :, side, None, first_k:last_k] for side in (0, 1))
            block = block & (start <= p) & (p < end)
        visible[:, :, first_q:last_q, first_k:last_k] = block
    return visible


def packed(device_ends_q, device_ends_k, **rules):
    """varlen_attention under attention's signature, for the tools of dmattn.testing."""

    def call(query, key, value, mask=None, *, key_bias=None, bias=None, is_causal=False, scale=None, softcap=0.0, dropout_p=0.0,
             dropout_seed=None, deterministic=False, return_lse=True):  # fmt: skip
        given_bias = {} if bias is None else {"bias": bias[0]}
        scored = {"scores" if "window" in rules else "key_bias": None if key_bias is None else key_bias[0].T}
        out, lse = dmattn.varlen_attention(
            *(given[0].transpose(0, 1) for given in (query, key, value)), device_ends_q, device_ends_k, **scored, **given_bias,
            scale=scale, softcap=softcap, dropout_p=dropout_p, dropout_seed=dropout_seed, deterministic=deterministic,
            return_lse=return_lse, **rules,
        )  # fmt: skip
        return out.transpose(0, 1)[None], lse[None]

    return call


def tokens(Tq, Tk, device, dtype, H=4, Hkv=2, D=16, Dv=24):
    return [tensor((1, heads, length, size), i, dtype, device)
            for i, (heads, length, size) in enumerate(((H, Tq, D), (Hkv, Tk, D), (Hkv, Tk, Dv)))]  # fmt: skip


LENGTHS = {
    "the same tokens": ([5, 1, 0, 17, 9], None),
    "more keys": ([5, 1, 0, 7, 9], [8, 1, 3, 17, 9]),
    "more queries": ([8, 2, 3, 17, 9], [5, 1, 0, 7, 9]),
    "both": ([3, 12, 4, 6], [9, 2, 4, 0]),
    "one document": ([30], [30]),
    "only empty ones": ([0, 0], [0, 0]),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("behind", [0, 3])
def test_every_document_by_itself(device, dtype, causal, lengths, behind):
    """out, lse and all gradients, also with tokens behind the last document."""
    ends_q = ends_of(lengths[0])
    ends_k = ends_q if lengths[1] is None else ends_of(lengths[1], dtype=torch.int64)
    Tq, Tk = int(ends_q[-1]) + behind, int(ends_k[-1]) + behind
    visible = visible_pairs(ends_q, ends_k, Tq, Tk, causal).to(device)
    case = AttentionCase(*tokens(Tq, Tk, device, dtype), visible=visible)
    given_k = None if lengths[1] is None else ends_k.to(device)
    assert_matches_reference(case, packed(ends_q.to(device), given_k, is_causal=causal))


RULES = {
    "selected": {"window": 3},
    "selected, with a local window and sinks": {"window": 2, "local": 3, "sink_keys": 1},
    "local alone": {"local": 3},
    "streaming": {"local": 2, "sink_keys": 2},
    "sliding": {"mask": IntervalMask.sliding_window(37, 3, 1)},
    "selected and sliding": {"window": 4, "mask": IntervalMask.sliding_window(37, 6)},
    "a mask per head": {"mask": IntervalMask(torch.arange(37, dtype=torch.int32) - 2, torch.arange(37, dtype=torch.int32) + tensor((1, 2, 37), 4).mul(8).int())},
    "a mask of all": {"mask": IntervalMask(*torch.tensor([[dmattn.ALWAYS], [dmattn.FOREVER]], dtype=torch.int32))},
}  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("same", [True, False])
def test_selection_and_masks_are_those_of_each_document(device, dtype, causal, rules, same):
    if not causal and "local" in rules:
        pytest.skip("nothing is local without causality")
    ends_k = ends_of([9, 3, 8, 0, 14])  # and three tokens behind
    ends_q = ends_k if same else ends_of([5, 0, 15, 13, 6])
    Tq, Tk = 37 if same else 41, 37
    scores = tensor((37, 2), 7).round(decimals=1) if "window" in rules else None  # some are equal
    visible = visible_pairs(ends_q, ends_k, Tq, Tk, causal, scores=scores, **rules).to(device)
    key_bias = None if scores is None else scores.T[None].to(device)
    case = AttentionCase(*tokens(Tq, Tk, device, dtype), visible=visible, key_bias=key_bias)
    rules = rules if "mask" not in rules else {**rules, "mask": rules["mask"].to(device)}
    ends = (ends_q.to(device), None if same else ends_k.to(device))
    assert_matches_reference(case, packed(*ends, is_causal=causal, **rules))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=12), st.booleans(), st.integers(1, 9))
def test_drawn_documents(device, dtype, lengths, causal, window):
    ends_q, ends_k = (ends_of(given) for given in zip(*lengths, strict=True))
    Tq, Tk = int(ends_q[-1]), int(ends_k[-1])
    scores = tensor((Tk, 1), 7).round(decimals=1)
    visible = visible_pairs(ends_q, ends_k, Tq, Tk, causal, scores=scores, window=window).to(device)
    tensors = tokens(Tq, Tk, device, dtype, H=2, Hkv=1, D=8, Dv=8)
    case = AttentionCase(*tensors, visible=visible, key_bias=scores.T[None].to(device))
    assert_matches_reference(case, packed(ends_q.to(device), ends_k.to(device), is_causal=causal, window=window), gradients=False)


OPTIONS = {
    "key_bias per query head": {"key_bias": (1, 4, 26)},
    "key_bias for all heads": {"key_bias": (1, 1, 26)},
    "bias": {"bias": (1, 4, 20, 26)},
    "bias for all heads": {"bias": (1, 1, 20, 26)},
    "scale and softcap": {"scale": 0.3, "softcap": 2.0},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 11},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(device, dtype, options):
    ends_q, ends_k = ends_of([5, 9, 6]), ends_of([9, 9, 8])
    made = {name: tensor(given, 5, device=device) if isinstance(given, tuple) else given for name, given in options.items()}
    visible = visible_pairs(ends_q, ends_k, 20, 26, True).to(device)
    case = AttentionCase(*tokens(20, 26, device, dtype), visible=visible, **made)
    assert_matches_reference(case, packed(ends_q.to(device), ends_k.to(device), is_causal=True))


@pytest.mark.parametrize("shape", [(11, 1), (11,)])
def test_gradients_of_leaves_that_are_added_lie_apart(device, dtype, shape):
    query, key, value = (tensor((11, 1, 8), seed, dtype, device) for seed in range(3))
    scores, key_bias = (tensor(size, 4, device=device).requires_grad_() for size in ((11, 1), shape))
    ends = ends_of((5, 6), device)
    sums = []
    for _ in range(2):
        out = dmattn.varlen_attention(
            query, key, value, ends, is_causal=True, scores=scores, window=3, key_bias=key_bias, deterministic=True
        )
        out.cos().sum().backward()
        sums.append((scores.grad.clone(), key_bias.grad.clone()))
    for once, twice in zip(*sums, strict=True):
        assert torch.equal(twice, 2 * once)


def test_sinks_and_one_number_for_each_key(device, dtype):
    ends = ends_of([9, 3, 8]).to(device)
    query, key, value = (given[0].transpose(0, 1) for given in tokens(22, 22, device, dtype))
    sinks, key_bias = tensor((4,), 7, device=device), tensor((22,), 8, device=device)
    out, lse = dmattn.varlen_attention(query, key, value, ends, is_causal=True, sinks=sinks, key_bias=key_bias, return_lse=True)
    mask = IntervalMask.documents(22, torch.cat([ends, ends.new_tensor([22])]))
    general = dmattn.attention(
        *(given.transpose(0, 1)[None] for given in (query, key, value)), mask, key_bias=key_bias, sinks=sinks, return_lse=True
    )
    assert torch.equal(out[:20], general[0][0].transpose(0, 1)[:20])
    assert torch.equal(lse[:, :20], general[1][0, :, :20])
    assert not out[20:].any()
    assert (lse[:, 20:] == -torch.inf).all()


# More tokens than a call takes --------------------------------------------------------------------------------------------------------


def take_parts_of_18(monkeypatch):
    """So that a call takes 18 tokens, on Hopper too, where it takes more if keys come in order."""
    monkeypatch.setattr(checks, "MAX_LENGTH", 18)
    monkeypatch.setattr(checks, "MAX_LENGTH_IN_ORDER", 18)


@pytest.mark.parametrize(("causal", "scored", "same"), [(True, True, True), (True, False, False), (False, True, False)])
def test_parts_equal_one_call(device, dtype, monkeypatch, causal, scored, same):
    """The same, gradients included, when a call takes 18 tokens. cu_seqlens are on the CPU."""
    ends_k = ends_of([9, 3, 8, 0, 14])  # and three tokens behind
    ends_q = ends_k if same else ends_of([5, 0, 15, 13, 6])
    Tq, Tk = 37 if same else 41, 37
    scores = tensor((37, 2), 7).round(decimals=1) if scored else None
    visible = visible_pairs(ends_q, ends_k, Tq, Tk, causal, scores=scores, window=3 if scored else 0).to(device)
    key_bias = None if scores is None else scores.T[None].to(device)
    case = AttentionCase(*tokens(Tq, Tk, device, dtype), visible=visible, key_bias=key_bias)
    take_parts_of_18(monkeypatch)
    called = []
    monkeypatch.setattr(varlen, "attend_packed", lambda *given, call=varlen.attend_packed: called.append(1) or call(*given))
    rules = {"window": 3} if scored else {}
    assert_matches_reference(case, packed(ends_q, None if same else ends_k, is_causal=causal, **rules))
    assert len(called) > 2


def test_which_long_packs_are_one_call(monkeypatch):
    """Asked of what looks like tensors on a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.delenv("DMATTN_FAMILY", raising=False)
    query = types.SimpleNamespace(
        device=types.SimpleNamespace(type="cuda"), shape=(1 << 21, 8, 64), dtype=torch.bfloat16, stride=lambda: (512, 64, 1)
    )
    documents = varlen.Packed(query, query, query, None, None, None, None)
    plain = varlen.Rules(True, None, None, None, 0, 0, None, None, None, 0.0, 0.0, None, False)
    monkeypatch.setattr(varlen, "HAS_HOPPER_KERNELS", True)
    assert varlen.takes_long_packs(documents, plain)
    for changed in ({"scale": 1e-7}, {"softcap": 1.0}, {"dropout_p": 0.1}, {"deterministic": True}, {"window": 5}):
        assert not varlen.takes_long_packs(documents, plain._replace(**changed))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert not varlen.takes_long_packs(documents, plain)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(varlen, "HAS_HOPPER_KERNELS", False)  # of a build without 90a
    assert not varlen.takes_long_packs(documents, plain)


@pytest.mark.gpu
@pytest.mark.parametrize(("causal", "same"), [(True, True), (False, True), (True, False)])
def test_a_long_pack_is_one_call_on_hopper(device, causal, same):
    """Beside the same documents in several calls. Nothing waits for the device. Calls that need lists are refused so many tokens."""
    if torch.cuda.get_device_capability()[0] != 9 or os.environ.get("DMATTN_FAMILY") == "sm80":
        pytest.skip("several calls on this GPU, or by the portable kernels")
    lengths = torch.randint(0, 3000, (900,), generator=torch.Generator().manual_seed(1))
    lengths_q = lengths if same else lengths // 2
    Tq, Tk = int(lengths_q.sum()) + 3, int(lengths.sum()) + 3
    assert Tk > checks.MAX_LENGTH
    ends_q, ends_k = (ends_of(given.tolist(), device) for given in (lengths_q, lengths))
    leaves = [tensor((length, 2, 64), i, torch.bfloat16, device).requires_grad_() for i, length in enumerate((Tq, Tk, Tk))]
    documents = varlen.Packed(*leaves, ends_q, None if same else ends_k, None, None)
    rules = varlen.Rules(causal, None, None, None, 0, 0, None, None, None, 0.0, 0.0, None, False)
    assert varlen.takes_long_packs(documents, rules)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        one = dmattn.varlen_attention(*leaves, ends_q, None if same else ends_k, is_causal=causal, return_lse=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    parts = varlen.attend_in_parts(documents, rules, checks.MAX_LENGTH)
    grad = [tensor(given.shape, 7 + i, given.dtype, device) for i, given in enumerate(one)]
    results, expected = ([*given, *torch.autograd.grad(given, leaves, grad, retain_graph=True)] for given in (one, parts))
    for ours, theirs in zip(results, expected, strict=True):
        assert_same_by_another_way(ours.nan_to_num(neginf=0), theirs.nan_to_num(neginf=0), torch.bfloat16)
    # A gradient whose rows are one row of memory, which tensor copies may refuse.
    shared = tensor((1, 2, 64), 9, torch.bfloat16, device).expand(Tq, 2, 64)
    (ours,), (theirs,) = (
        torch.autograd.grad(one[0], leaves[:1], given, retain_graph=True) for given in (shared, shared.contiguous())
    )
    assert_same_by_another_way(ours, theirs, torch.bfloat16)
    with pytest.raises(RuntimeError, match="query, key: expected lengths up to 1048576 for a call that does not take"):
        dmattn.ops.forward(
            *(given.detach().transpose(0, 1)[None] for given in leaves), *(None,) * 11, False, 1.0, 0.0, 0.0, False, True
        )


def test_parts_read_ends_that_lie_on_a_device(device, monkeypatch):
    """They are waited for, and then checked, too; on a CPU as if they were known of a device alone."""
    query, key, value = (
        given[0].transpose(0, 1) for given in tokens(37, 37, device, torch.float32 if device == "cpu" else torch.float16)
    )
    ends = ends_of([9, 3, 8, 0, 14])
    expected = dmattn.varlen_attention(query, key, value, ends, is_causal=True)
    take_parts_of_18(monkeypatch)
    monkeypatch.setattr(checks, "values_are_known", lambda ends: False)
    out = dmattn.varlen_attention(query, key, value, ends.to(device), is_causal=True)
    assert_same_by_another_way(out, expected, query.dtype)
    with pytest.raises(ValueError, match=r"cu_seqlens_q: expected 0 = c\[0\] .* <= 37 tokens, got \[0, 12, 9, 37\]"):
        dmattn.varlen_attention(query, key, value, torch.tensor([0, 12, 9, 37], device=device))


def test_parts_draw_different_dropout(monkeypatch):
    """Two equal documents in two parts."""
    query, key, value = (given[0].transpose(0, 1).repeat(2, 1, 1) for given in tokens(16, 16, "cpu", torch.float32))
    take_parts_of_18(monkeypatch)
    for seed in (None, torch.tensor([5])):
        first, second = dmattn.varlen_attention(query, key, value, ends_of([16, 16]), dropout_p=0.5, dropout_seed=seed).split(16)
        assert not torch.equal(first, second)
    again = dmattn.varlen_attention(query, key, value, ends_of([16, 16]), dropout_p=0.5, dropout_seed=seed)
    assert torch.equal(again, torch.cat([first, second]))


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10)), min_size=1, max_size=30))
def test_cuts_are_as_few_as_can_be(lengths):
    ends_q, ends_k = (ends_of(given).tolist() for given in zip(*lengths, strict=True))
    cuts = varlen.cuts_between(ends_q, ends_k, 10)
    assert (cuts[0], cuts[-1]) == (0, len(lengths))
    for ends in (ends_q, ends_k):
        assert all(ends[b] - ends[a] <= 10 for a, b in itertools.pairwise(cuts))
    for a, b in itertools.pairwise(cuts[:-1]):  # the next document would not have fitted
        assert max(ends[b + 1] - ends[a] for ends in (ends_q, ends_k)) > 10


@pytest.mark.parametrize(("queries", "keys"), [(3, 11), (11, 3)])
def test_a_document_that_is_too_long_for_a_call_is_refused(queries, keys):
    with pytest.raises(ValueError, match="expected documents of up to 10 tokens, got one of 11"):
        varlen.cuts_between([0, 5, 5 + queries], [0, 5, 5 + keys], 10)


def test_more_than_a_million_tokens():
    """In two calls, and as a batch."""
    length, documents = 7, 160_000
    query = tensor((length * documents, 1, 8), 0)
    out = dmattn.varlen_attention(query, query, query, torch.arange(0, query.shape[0] + 1, length), is_causal=True)
    rows = query.view(documents, 1, length, 8)
    assert_same_by_another_way(out.view_as(rows), dmattn.attention(rows, rows, rows, is_causal=True), query.dtype)


# torch around it ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_compile_without_recompiling(device, dtype):
    """One graph for any number of tokens and documents, forward and backward; also where queries and keys differ."""

    def both(query, key, value, ends_q, ends_k, scores):
        own = dmattn.varlen_attention(key, key, value, ends_k, is_causal=True, scores=scores, window=4)
        return own.sum() + dmattn.varlen_attention(query, key, value, ends_q, ends_k, is_causal=True).square().sum()

    def step(call, lengths_q, lengths_k):
        rows = tokens(sum(lengths_q), sum(lengths_k), device, dtype, H=2, Hkv=2, Dv=16)
        query, key, value = (given[0].transpose(0, 1).requires_grad_() for given in rows)
        scores = tensor((key.shape[0], 2), 5, device=device).requires_grad_()
        result = call(query, key, value, ends_of(lengths_q, device), ends_of(lengths_k, device), scores)
        return result, *torch.autograd.grad(result, (query, key, value, scores))

    assert_compiles_once(both, (([5, 9, 6], [9, 9, 8]), ([4, 4, 4, 60], [9, 8, 7, 40])), step)


def test_export_with_other_documents(tmp_path):
    class Model(torch.nn.Module):
        def forward(self, query, key, ends_q, ends_k):
            return dmattn.varlen_attention(query, key, key, ends_q, ends_k, is_causal=True, local=4, sink_keys=1)

    def example(lengths_q, lengths_k):
        query, key, _ = (given[0].transpose(0, 1) for given in tokens(sum(lengths_q), sum(lengths_k), "cpu", torch.float32))
        return query, key, ends_of(lengths_q), ends_of(lengths_k)

    count = Dim("count", min=2, max=1000)
    shapes = ({0: Dim("Tq", max=1 << 20)}, {0: Dim("Tk", max=1 << 20)}, {0: count}, {0: count})
    others = [example([3, 0, 20, 8], [4, 7, 2, 11])]
    assert_exports(Model(), example([5, 9, 6], [9, 9, 8]), others, tmp_path / "packed.pt2", dynamic_shapes=shapes)


def test_backward_copies_no_gradient(monkeypatch):
    """The op gets the memory of the gradient that torch has."""
    given, gradients = [], dmattn.autograd._gradients
    monkeypatch.setattr(dmattn.autograd, "_gradients", lambda inputs: given.append(inputs) or gradients(inputs))
    leaf = tensor((20, 2, 16), 0).requires_grad_()
    incoming = tensor((20, 2, 16), 1)
    calls = (
        dmattn.varlen_attention(leaf, leaf, leaf, ENDS_Q, is_causal=True),
        flash_attn.flash_attn_varlen_func(leaf, leaf, leaf, ENDS_Q, ENDS_Q, 9, 9, causal=True),
    )
    for out in calls:
        out.backward(incoming)
    assert [inputs[0].data_ptr() for inputs in given] == [incoming.data_ptr()] * 2


def test_autocast(device):
    ends = ends_of([9, 3, 8], device)
    query, key, value = (given[0].transpose(0, 1) for given in tokens(20, 20, device, torch.float32))
    with torch.autocast(device, torch.bfloat16):
        out = dmattn.varlen_attention(query, key, value, ends)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, dmattn.varlen_attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), ends))


def test_nan_in_tokens_that_no_query_sees(device, dtype):
    ends_q, ends_k = ends_of([5, 0, 6], device), ends_of([4, 7, 8], device)
    query, key, value = (given[0].transpose(0, 1) for given in tokens(11, 22, device, dtype))
    clean = dmattn.varlen_attention(query, key, value, ends_q, ends_k, is_causal=True)
    key[4:11], value[4:11], key[19:], value[19:] = (torch.nan,) * 4
    assert torch.equal(clean, dmattn.varlen_attention(query, key, value, ends_q, ends_k, is_causal=True))


def test_malformed_ends_that_nobody_reads_are_no_wrong_access():
    """As on a GPU, where reading them would wait for the device."""
    query, key, value = (given[0].transpose(0, 1) for given in tokens(20, 20, "cpu", torch.float32))
    for wrong in ([5, 3, 90], [-4, 7, 2], [2**31 - 1, -(2**31), 4], [9, 9, 9]):
        given = varlen.Packed(query, key, value, torch.tensor(wrong, dtype=torch.int32), None, None, None)
        for ends_k in (None, torch.tensor([7, 30, -1])):
            for causal in (True, False):
                rules = varlen.Rules(causal, None, None, 3, 0, 0, None, None, None, 0.0, 0.0, None, False)
                out, _ = varlen.attend_packed(given._replace(ends_k=ends_k), rules)
                assert out.isfinite().all()


# Bad input ----------------------------------------------------------------------------------------------------------------------------

Q, K, V = tensor((20, 4, 16), 0), tensor((26, 2, 16), 1), tensor((26, 2, 8), 2)
ENDS_Q, ENDS_K = ends_of([5, 9, 6]), ends_of([9, 9, 8])


def attend(query=Q, key=K, value=V, cu_seqlens_q=ENDS_Q, cu_seqlens_k=ENDS_K, **options):
    return dmattn.varlen_attention(query, key, value, cu_seqlens_q, cu_seqlens_k, **options)


def in_parts(**changes):
    return varlen.attend_in_parts(
        varlen.Packed(Q, K, V, changes.get("ends_q", ENDS_Q), ENDS_K, None, None),
        varlen.Rules(False, changes.get("mask"), None, None, 0, 0, changes.get("bias"), None, None, 0.0, 0.0, None, False),
        changes.get("longest", 10),
    )


def test_windows_longer_than_the_keys_need_no_more_memory():
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            result = function(*arguments, **(options or {}))
            for each in result if isinstance(result, tuple | list) else [result]:
                self.numel = max(self.numel, each.numel() if isinstance(each, torch.Tensor) else 0)
            return result

    outs = []
    for windows in (26, 2**20):
        mask = IndexMask(torch.zeros(20, 1, dtype=torch.int32), local=windows, sink_keys=windows)
        with Largest() as largest:
            outs.append(dmattn.varlen_attention(Q, K, V, ENDS_Q, ENDS_K, mask=mask))
        assert largest.numel < 2**12
    assert torch.equal(*outs)


BAD = {
    "query of four dimensions": (lambda: attend(query=Q[None]), ValueError, r"query: expected 3 dimensions \[Tq, H, D\], got shape \[1, 20, 4, 16\]"),
    "key of another size": (lambda: attend(key=K[..., :8]), ValueError, r"key: expected \[Tk, Hkv, D\] with D=16, got \[26, 2, 8\]"),
    "value of another length": (lambda: attend(value=V[:9]), ValueError, r"value: expected \[Tk, Hkv, Dv\] with Tk=26, Hkv=2, got \[9, 2, 8\]"),
    "heads that do not divide": (lambda: attend(query=Q[:, :3]), ValueError, "key: expected a number of heads that divides H=3"),
    "nested": (lambda: attend(query=torch.nested.nested_tensor([Q[0], Q[0]], layout=torch.jagged)), TypeError, "query: expected a dense tensor, got a nested one; dmattn.varlen_attention takes packed sequences"),
    "ends as a list": (lambda: attend(cu_seqlens_q=[0, 20]), TypeError, "cu_seqlens_q: expected a torch.Tensor, got list"),
    "ends as floats": (lambda: attend(cu_seqlens_k=ENDS_K.float()), TypeError, "cu_seqlens_k: expected dtype int32, int64, got float32"),
    "ends of two dimensions": (lambda: attend(cu_seqlens_q=ENDS_Q[None]), ValueError, r"cu_seqlens_q: expected one dimension \[documents \+ 1\] with at least one document, got shape \[1, 4\]"),
    "no document": (lambda: attend(cu_seqlens_q=ENDS_Q[:1]), ValueError, "cu_seqlens_q: expected one dimension"),
    "other numbers of documents": (lambda: attend(cu_seqlens_k=ends_of([26])), ValueError, r"cu_seqlens_k: expected \[documents \+ 1\] = \[4\] like cu_seqlens_q, got \[2\]"),
    "ends that begin late": (lambda: attend(cu_seqlens_q=ENDS_Q[1:], cu_seqlens_k=ENDS_K[1:]), ValueError, r"cu_seqlens_q: expected 0 = c\[0\]"),
    "ends that fall": (lambda: attend(cu_seqlens_q=torch.tensor([0, 9, 5, 20])), ValueError, r"<= 20 tokens, got \[0, 9, 5, 20\]"),
    "ends beyond the tokens": (lambda: attend(cu_seqlens_q=torch.tensor([0, 9, 15, 21])), ValueError, "<= 20 tokens"),
    "ends of queries for fewer keys": (lambda: attend(query=tensor((30, 4, 16), 0), cu_seqlens_q=ends_of([30]), cu_seqlens_k=None), ValueError, "cu_seqlens_q: expected .* <= 26 tokens"),
    "ends on another device": (lambda: attend(cu_seqlens_q=ENDS_Q.to("meta")), ValueError, "cu_seqlens_q: expected device cpu like query, got meta"),
    "a bool mask": (
        lambda: attend(mask=torch.ones(20, 26).bool()),
        TypeError,
        "mask: expected an IntervalMask, an IndexMask or interval & index, got Tensor",
    ),
    "a mask of another length": (lambda: attend(mask=IntervalMask.causal(20)), ValueError, "mask: expected an IntervalMask for Tk=26 keys, got one for 20"),
    "a window without scores": (lambda: attend(window=3), ValueError, "window: expected None without scores, got 3"),
    "scores without a window": (lambda: attend(scores=K[..., 0]), ValueError, "window: expected a number of keys with scores, got None"),
    "an empty window": (lambda: attend(scores=K[..., 0], window=0), ValueError, "window: expected a positive int, got 0"),
    "local without causality": (lambda: attend(local=3), ValueError, "local, sink_keys: expected 0 and 0 with is_causal=False, got 3 and 0"),
    "scores of query heads": (lambda: attend(scores=tensor((26, 4), 0), window=3), ValueError, r"scores: expected \[Tk, Hkv\] with Tk=26, H=4, Hkv=2, got \[26, 4\]"),
    "scores of one dimension": (lambda: attend(scores=tensor((26,), 0), window=3), ValueError, r"scores: expected \[Tk, Hkv\]"),
    "integer scores": (lambda: attend(scores=torch.ones(26, 2).int(), window=3), TypeError, "scores: expected dtype"),
    "key_bias of three dimensions": (lambda: attend(key_bias=tensor((1, 2, 26), 0)), ValueError, r"key_bias: expected \[Tk\] or \[Tk, H\|Hkv\|1\]"),
    "key_bias of another length": (lambda: attend(key_bias=tensor((25,), 0)), ValueError, r"key_bias: expected \[Tk\] or"),
    "bias of another length": (lambda: attend(bias=tensor((20, 25), 0)), ValueError, "bias: expected"),
    "sinks of another number": (lambda: attend(sinks=tensor((3,), 0)), ValueError, r"sinks: expected \[H\] with H=4"),
    "many tokens on a device": (lambda: in_parts(ends_q=ENDS_Q.to("meta")), ValueError, "cu_seqlens_q: expected numbers that can be read, without tracing, .* for more than 10 packed tokens, .* got 20 tokens and cu_seqlens on meta"),
    "many tokens and a mask": (lambda: in_parts(mask=IntervalMask.causal(26)), ValueError, "mask: expected None for more than 10 packed tokens, got Tq=20, Tk=26"),
    "many tokens and a bias": (lambda: in_parts(bias=Q), ValueError, "bias: expected None for more than 10 packed tokens"),
    "a document that is too long": (lambda: in_parts(longest=8), ValueError, "query, key: expected documents of up to 8 tokens, got one of 9"),
}  # fmt: skip


@pytest.mark.brief
@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
