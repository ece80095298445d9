"""dmattn.compat.flash_attn and triton_flashattn against plain definitions: windows, ALiBi, packed sequences, and caches that grow in place."""

from __future__ import annotations

import dataclasses
import math

import dmattn
import pytest
import torch
from dmattn.compat import flash_attn, flash_dmattn, triton_flashattn
from dmattn.compat.merging import merged
from dmattn.testing import AttentionCase, assert_close_to_reference, run, strategies
from hypothesis import given
from hypothesis import strategies as st

tensor = strategies.random_tensor
TRUTH = torch.float64
WINDOWS = [(-1, -1), (3, 0), (2, 4), (-1, 2), (5, -1), (0, 0)]


def seen_by_window(queries, keys, window, causal):
    """What flash-attn's documentation says, pair by pair."""
    left, right = window
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    return ((left < 0) | (distance <= left)) & ((right < 0) | (distance >= -right)) & ((not causal) | (distance >= 0))


def distances(queries, keys):
    return (torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)).abs()


def dense(case: AttentionCase, **options) -> dict[str, torch.Tensor]:
    """out, lse and gradients of flash_attn_func on a case in the layout of dmattn.attention."""
    if case.dropout_p:
        options["dropout_p"] = case.dropout_p

    def fn(query, key, value, _, *, softcap, scale, **__):
        out, lse, _ = flash_attn.flash_attn_func(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), softmax_scale=scale, softcap=softcap,
            return_attn_probs=True, **options,
        )  # fmt: skip
        return out.transpose(1, 2), lse

    return run(dataclasses.replace(case, bias=None), fn)


def case_of(queries, keys, *, heads=4, kv_heads=2, batch=2, size=16, dtype=TRUTH, device="cpu", **fields) -> AttentionCase:
    shapes = ((batch, heads, queries, size), (batch, kv_heads, keys, size), (batch, kv_heads, keys, size))
    q, k, v = (tensor(shape, 7 * queries + i, dtype, device) for i, shape in enumerate(shapes))
    return AttentionCase(q, k, v, **fields)


# One sequence a row -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("queries", "keys"), [(7, 12), (12, 7), (9, 9), (1, 5), (130, 200)])
def test_windows_and_causality(device, exact, queries, keys, window, causal):
    visible = seen_by_window(queries, keys, window, causal)[None, None].to(device)
    case = case_of(queries, keys, dtype=exact, device=device, visible=visible, scale=0.3, softcap=2.0)
    assert_close_to_reference(case, dense(case, window_size=window, causal=causal))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    case = case_of(70, 70, dtype=dtype, visible=seen_by_window(70, 70, (9, 3), False)[None, None])
    assert_close_to_reference(case, dense(case, window_size=(9, 3)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (3, 0), (4, 2), (-1, 1)])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_alibi_is_a_bias_of_distances(device, exact, window, causal, per_sequence):
    slopes = tensor((2, 4) if per_sequence else (4,), 3, torch.promote_types(exact, torch.float32), device).abs()
    bias = -slopes.view(-1, 4, 1, 1) * distances(9, 13).to(device)
    visible = seen_by_window(9, 13, window, causal)[None, None].to(device)
    case = case_of(9, 13, dtype=exact, device=device, visible=visible, bias=bias)
    assert_close_to_reference(case, dense(case, window_size=window, causal=causal, alibi_slopes=slopes))


def test_slopes_have_a_gradient():
    q, k, v = (tensor((1, 6, 2, 8), i, TRUTH) for i in range(3))

    def loss(slopes):
        out, lse, _ = flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes, return_attn_probs=True)
        return out.sin().sum() + lse.sum()

    assert torch.autograd.gradcheck(loss, tensor((2,), 9, TRUTH).abs().requires_grad_())


def test_head_sizes_are_padded():
    case = case_of(6, 8, size=11)
    q, k, v = (x.transpose(1, 2) for x in (case.query, case.key, case.value[..., :5]))
    out = flash_attn.flash_attn_func(q, k, v, causal=True)
    logits = q.transpose(1, 2) @ dmattn.testing.per_query_head(case.key, 4).mT / math.sqrt(11)
    weights = logits.masked_fill(distances(6, 8).tril(2).eq(0).triu(3), -torch.inf).softmax(-1)
    assert out.shape == (2, 6, 4, 5)
    torch.testing.assert_close(out.transpose(1, 2), weights @ dmattn.testing.per_query_head(case.value[..., :5], 4))


def test_packed_tensors_are_their_parts():
    qkv = tensor((2, 9, 3, 4, 16), 0, TRUTH)
    q, k, v = qkv.unbind(2)
    options = {"causal": True, "window_size": (4, 0)}
    expected = flash_attn.flash_attn_func(q, k, v, **options)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv, **options), expected)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], **options), expected)
    ends = torch.tensor([0, 9, 18], dtype=torch.int32)
    flat = qkv.flatten(0, 1)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(flat, ends, 9, **options)
    assert torch.equal(packed, flash_attn.flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], ends, ends, 9, 9, **options))
    torch.testing.assert_close(packed, expected.flatten(0, 1))


def test_autocast_casts_first():
    q, k, v = (tensor((1, 9, 4, 16), i) for i in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn.flash_attn_func(q, k.bfloat16(), v, window_size=(3, 3))
    expected = flash_attn.flash_attn_func(q.bfloat16(), k.bfloat16(), v.bfloat16(), window_size=(3, 3))
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_no_tokens(queries, keys):
    q, k = torch.ones(2, queries, 4, 16), torch.ones(2, keys, 2, 16)
    for options in ({}, {"window_size": (2, 1)}, {"alibi_slopes": torch.ones(4)}):
        out, lse, _ = flash_attn.flash_attn_func(q, k, k, return_attn_probs=True, **options)
        assert torch.equal(out, torch.zeros(2, queries, 4, 16))
        assert torch.equal(lse, torch.full((2, 4, queries), -torch.inf))
        ends = torch.tensor([0, 0, queries * 2]), torch.tensor([0, keys, keys * 2])
        packed = flash_attn.flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1), *ends, 10, 5, **options)
        assert torch.equal(packed, torch.zeros(2 * queries, 4, 16))


@pytest.mark.parametrize("alibi", [False, True])
def test_weights_say_what_was_dropped(alibi):
    """Signed weights give the output, and a fraction of them near dropout_p is negative."""
    q, k, v = (tensor((2, s, h, 16), s, TRUTH) for s, h in ((40, 4), (50, 2), (50, 2)))
    slopes = torch.rand(4) if alibi else None
    torch.manual_seed(1)
    out, lse, signed = flash_attn.flash_attn_func(q, k, v, 0.3, alibi_slopes=slopes, window_size=(30, 30), return_attn_probs=True)
    kept = signed.clamp(min=0.0) / 0.7
    torch.testing.assert_close(out.transpose(1, 2), kept @ dmattn.testing.per_query_head(v.transpose(1, 2), 4))
    torch.testing.assert_close(signed.abs().sum(-1), torch.ones_like(lse))
    visible = seen_by_window(40, 50, (30, 30), False).expand_as(signed)
    dropped = (signed[visible] < 0).double().mean()
    assert abs(dropped - 0.3) < 4 * math.sqrt(0.21 / int(visible.sum()))
    assert flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)[2] is None


# Packed sequences ---------------------------------------------------------------------------------------------------------------------

LENGTHS_Q, LENGTHS_K = (3, 0, 8, 5), (6, 4, 5, 0)


def ends_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def seen_when_packed(window, causal, rows=0, columns=0):
    """Sequences on the diagonal, and rows and columns behind them that see nothing."""
    blocks = [seen_by_window(m, n, window, causal) for m, n in zip(LENGTHS_Q, LENGTHS_K, strict=True)]
    return torch.nn.functional.pad(torch.block_diag(*(b.long() for b in blocks)).bool(), (0, columns, 0, rows))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (2, 1), (-1, 3), (-1, 0)])
@pytest.mark.parametrize("slopes", [None, "by head", "by sequence"])
@pytest.mark.parametrize("behind", [0, 3])
def test_varlen(device, exact, window, causal, slopes, behind):
    seen, wide = seen_when_packed(window, causal, behind, behind).to(device), torch.promote_types(exact, torch.float32)
    given = None if slopes is None else tensor((4, 4) if slopes == "by sequence" else (4,), 3, wide, device).abs()
    bias = None
    if given is not None:
        bias = torch.zeros(1, 4, *seen.shape, dtype=wide, device=device)
        for n, (q, k) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
            i, j = sum(LENGTHS_Q[:n]), sum(LENGTHS_K[:n])
            bias[0, :, i : i + q, j : j + k] = -given.expand(4, 4)[n][:, None, None] * distances(q, k).to(device)
    case = case_of(*seen.shape, batch=1, dtype=exact, device=device, visible=seen[None, None], bias=bias)

    def fn(query, key, value, _, **__):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            q, k, v, ends_of(LENGTHS_Q).to(device), ends_of(LENGTHS_K).long().to(device), 8, 6,
            causal=causal, window_size=window, alibi_slopes=given, return_attn_probs=True,
        )  # fmt: skip
        return out.transpose(0, 1)[None], lse[None]

    assert_close_to_reference(case, run(dataclasses.replace(case, bias=None), fn))


@given(data=st.data())
def test_varlen_is_each_sequence_alone(data):
    count = data.draw(st.integers(1, 5))
    lengths_q, lengths_k = ([data.draw(st.integers(0, 40)) for _ in range(count)] for _ in range(2))
    left, right = data.draw(st.integers(-1, 20)), data.draw(st.integers(-1, 20))
    causal = data.draw(st.booleans())
    q, k, v = (tensor((sum(n), h, 8), h, TRUTH) for n, h in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2)))
    options = {"causal": causal, "window_size": (left, right)}
    out = flash_attn.flash_attn_varlen_func(q, k, v, ends_of(lengths_q), ends_of(lengths_k), 40, 40, **options)
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    alone = [flash_attn.flash_attn_func(a[None], b[None], c[None], **options)[0] for a, b, c in parts]
    torch.testing.assert_close(out, torch.cat(alone))


@pytest.mark.parametrize("causal", [False, True])
def test_varlen_over_pages(device, exact, causal):
    """Pages in any order, and numbers of pages that are not needed may be anything."""
    q = tensor((sum(LENGTHS_Q), 4, 16), 0, exact, device)
    k, v = (tensor((sum(LENGTHS_K), 2, 16), i, exact, device) for i in (1, 2))
    table = torch.tensor([[5, 2, -7], [0, 99, 1], [3, 1, 0], [9, 9, 9]], dtype=torch.int32, device=device)
    pages = torch.full((2, 6, 4, 2, 16), math.nan, dtype=exact, device=device)
    for of, packed in zip(pages, (k, v), strict=True):
        for b, rows in enumerate(packed.split(LENGTHS_K)):
            for j, row in enumerate(rows):
                of[table[b, j // 4], j % 4] = row
    options = {"causal": causal, "softmax_scale": 0.2}
    ends = ends_of(LENGTHS_Q).to(device), ends_of(LENGTHS_K).to(device), 8, 6
    paged = flash_attn.flash_attn_varlen_func(q, *pages, *ends, block_table=table, **options)
    torch.testing.assert_close(paged, flash_attn.flash_attn_varlen_func(q, k, v, *ends, **options))
    options["is_causal"] = options.pop("causal")
    assert torch.equal(flash_dmattn.flash_dmattn_varlen_func(q, *pages, *ends, block_table=table, **options), paged)


# Caches -------------------------------------------------------------------------------------------------------------------------------

BATCH, ROOM = 3, 32
CACHED = (5, 0, 20)


def expected_from_cache(q, keys, values, lengths, *, causal, window=(-1, -1), slopes=None, pad=(0, 0, 0), softcap=0.0):
    """Each sequence alone, by the definition: keys [lengths] of each row, the last query at the last key."""
    outs, lses = [], []
    for b, length in enumerate(lengths):
        case = AttentionCase(
            q[b : b + 1].transpose(1, 2), keys[b : b + 1, :length].transpose(1, 2), values[b : b + 1, :length].transpose(1, 2),
            visible=(seen_by_window(q.shape[1], length, window, causal) & (torch.arange(length) >= pad[b]))[None, None],
            bias=None if slopes is None else -slopes.view(-1, 4, 1, 1) * distances(q.shape[1], length), softcap=softcap,
        )  # fmt: skip
        out, lse = case.call_reference()
        outs.append(out.transpose(1, 2)), lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


@pytest.mark.parametrize("where", ["in a row", "in chosen rows", "in pages"])
@pytest.mark.parametrize("how", ["plain", "window", "alibi", "not causal", "softcap"])
@pytest.mark.parametrize("room", [32, 28])
def test_kvcache_appends_in_place_and_attends(where, how, room):
    q = tensor((BATCH, 3, 4, 16), 0, TRUTH)
    new = [tensor((BATCH, 3, 2, 16), i, TRUTH) for i in (1, 2)]
    old = [tensor((BATCH, room, 2, 16), i, TRUTH) for i in (3, 4)]
    lengths = torch.tensor(CACHED, dtype=torch.int32)
    options = {"causal": how != "not causal", "cache_seqlens": lengths}
    more = {}
    if how == "window":
        options["window_size"] = more["window"] = (4, 1)
    if how == "alibi":
        options["alibi_slopes"] = more["slopes"] = tensor((4,), 8, TRUTH).abs()
    if how == "softcap":
        options["softcap"] = more["softcap"] = 1.5

    # Lay the caches out; what nobody wrote is NaN.
    chosen = torch.tensor([4, 0, 2])
    if where == "in a row":
        caches = [torch.full((BATCH, room, 2, 16), math.nan, dtype=TRUTH) for _ in old]
        index = torch.arange(BATCH)
    elif where == "in chosen rows":
        caches = [torch.full((5, room, 2, 16), math.nan, dtype=TRUTH) for _ in old]
        options["cache_batch_idx"], index = chosen.int(), chosen
    else:
        size = room // 2 if room == 32 else 7
        table = torch.randperm(BATCH * room // size, generator=torch.Generator().manual_seed(0)).view(BATCH, -1).int()
        caches = [torch.full((BATCH * room // size, size, 2, 16), math.nan, dtype=TRUTH) for _ in old]
        options["block_table" if room == 32 else "page_table"] = table
    wanted = [x.clone() for x in old]
    for b, length in enumerate(CACHED):
        for cache, x, full, fresh in zip(caches, old, wanted, new, strict=True):
            full[b, length : length + 3] = fresh[b]
            if where == "in pages":
                for j in range(length):
                    cache[table[b, j // size], j % size] = x[b, j]
            else:
                cache[index[b], :length] = x[b, :length]
    caches_before = [cache.data_ptr() for cache in caches]

    out, lse = flash_attn.flash_attn_with_kvcache(q, *caches, *new, return_softmax_lse=True, **options)
    expected, expected_lse = expected_from_cache(q, *wanted, [n + 3 for n in CACHED], causal=options["causal"], **more)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert [cache.data_ptr() for cache in caches] == caches_before
    for cache, full in zip(caches, wanted, strict=True):
        for b, length in enumerate(CACHED):
            for j in range(length + 3):
                row = cache[table[b, j // size], j % size] if where == "in pages" else cache[index[b], j]
                assert torch.equal(row, full[b, j])
        assert int(cache.isnan().any(-1).any(-1).sum()) == cache.shape[0] * cache.shape[1] - sum(CACHED) - 9


def test_kvcache_without_new_keys():
    q, k, v = tensor((BATCH, 1, 4, 16), 0, TRUTH), *(tensor((BATCH, ROOM, 2, 16), i, TRUTH) for i in (1, 2))
    out = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=7)
    torch.testing.assert_close(out, expected_from_cache(q, k, v, [7] * 3, causal=False)[0])
    out = flash_attn.flash_attn_with_kvcache(q, k, v)
    torch.testing.assert_close(out, expected_from_cache(q, k, v, [ROOM] * 3, causal=False)[0])


@pytest.mark.parametrize("causal", [False, True])
def test_kvcache_left_padding(causal):
    q, k, v = tensor((BATCH, 2, 4, 16), 0, TRUTH), *(tensor((BATCH, ROOM, 2, 16), i, TRUTH) for i in (1, 2))
    lengths, pad = (9, 2, 30), torch.tensor([3, 2, 0], dtype=torch.int32)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=torch.tensor(lengths, dtype=torch.int32), cache_leftpad=pad, causal=causal, return_softmax_lse=True
    )
    expected = expected_from_cache(q, k, v, lengths, causal=causal, pad=pad.tolist())
    torch.testing.assert_close((out, lse), expected)
    assert bool((lse[1] == -torch.inf).all())


def test_a_cache_in_rows_and_pages(device, dtype):
    case = case_of(3, 96, size=64, dtype=dtype, device=device)
    lengths = torch.tensor([80, 20], dtype=torch.int32, device=device)
    position = lengths.view(2, 1, 1, 1) + torch.arange(3, device=device)[:, None]
    keys = torch.arange(96, device=device)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (case.query, case.key, case.value))
    new = [torch.stack([x[b, n : n + 3] for b, n in enumerate((80, 20))]) for x in (k, v)]
    table = torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32, device=device)
    for window in ((-1, -1), (25, 0)):
        visible = keys <= position if window[0] < 0 else (keys <= position) & (keys >= position - 25)
        expected = AttentionCase(case.query, case.key, case.value, visible=visible)
        for paged in (False, True):
            caches = [x.clone() for x in (k, v)]
            for cache in caches:
                cache[0, 80:], cache[1, 20:] = 0, 0
            more = {}
            if paged:
                pages = [x.new_empty(6, 32, 2, 64) for x in caches]
                for page, cache in zip(pages, caches, strict=True):
                    page[table.flatten().long()] = cache.reshape(6, 32, 2, 64)
                caches, more = pages, {"block_table": table}
            out, lse = flash_attn.flash_attn_with_kvcache(
                q, *caches, *new, cache_seqlens=lengths, causal=True, window_size=window, return_softmax_lse=True, **more
            )
            assert_close_to_reference(expected, {"out": out.transpose(1, 2), "lse": lse})


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_kvcache_turns_new_keys_and_queries(interleaved, causal):
    """Rotary embedding as complex numbers."""
    q, k, v = (tensor((BATCH, 2, h, 16), h, TRUTH) for h in (4, 2, 2))
    cache = [tensor((BATCH, ROOM, 2, 16), i, TRUTH) for i in (3, 4)]
    lengths = torch.tensor(CACHED)
    angles = tensor((40, 6), 5, TRUTH)
    turned = []
    for x, moves in ((q, causal), (k, True)):
        pairs = x[..., :12]
        first, second = (pairs[..., ::2], pairs[..., 1::2]) if interleaved else (pairs[..., :6], pairs[..., 6:])
        at = lengths[:, None] + (torch.arange(2) if moves else torch.zeros(2, dtype=torch.int64))
        numbers = torch.complex(first, second) * torch.polar(torch.ones(()).double(), angles[at][:, :, None])
        parts = (numbers.real, numbers.imag)
        both = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
        turned.append(torch.cat((both, x[..., 12:]), -1))
    expected = flash_attn.flash_attn_with_kvcache(
        turned[0], *(x.clone() for x in cache), turned[1], v, cache_seqlens=lengths, causal=causal
    )
    out = flash_attn.flash_attn_with_kvcache(
        q, *cache, k, v, angles.cos(), angles.sin(), lengths, causal=causal, rotary_interleaved=interleaved
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(cache[0][2, 20:22], turned[1][2])


def test_kvcache_at_once_is_kvcache_step_by_step():
    """A prompt in one call and the rest token by token give what one causal call over everything gives."""
    q, k, v = (tensor((2, 30, h, 16), h, torch.float32) for h in (4, 2, 2))
    caches = torch.zeros(2, 2, ROOM, 2, 16)
    outs = []
    for first, last in [(0, 22), *((n, n + 1) for n in range(22, 30))]:
        part = slice(first, last)
        outs.append(
            flash_attn.flash_attn_with_kvcache(q[:, part], *caches, k[:, part], v[:, part], cache_seqlens=first, causal=True)
        )
    case = AttentionCase(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
    assert_close_to_reference(case, {"out": torch.cat(outs, 1).transpose(1, 2)})


# Merging ------------------------------------------------------------------------------------------------------------------------------


def test_merging_empty_parts_is_exact_and_has_no_nan():
    outs = [tensor((1, 1, 3, 8), i, TRUTH) for i in range(2)]
    lses = [
        torch.tensor([[[0.5, -torch.inf, -torch.inf]]], dtype=TRUTH),
        torch.tensor([[[-torch.inf, 2.0, -torch.inf]]], dtype=TRUTH),
    ]
    outs = [torch.where(lse[..., None] > -torch.inf, out, 0.0).requires_grad_() for out, lse in zip(outs, lses, strict=True)]
    leaves = [lse.requires_grad_() for lse in lses]
    out, lse = merged(list(zip(outs, leaves, strict=True)))
    assert torch.equal(out, outs[0] + outs[1])
    assert torch.equal(lse, torch.maximum(*leaves))
    gradients = torch.autograd.grad(out.sum() + torch.where(lse > -torch.inf, lse, 0.0).sum(), (*outs, *leaves))
    assert all(bool(g.isfinite().all()) for g in gradients)
    assert torch.equal(gradients[2], torch.tensor([[[1.0, 0.0, 0.0]]], dtype=TRUTH))


# triton-flashattn ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_triton_kernels_by_name(dtype):
    Z, H, N, D = 2, 3, 40, 16
    case = case_of(N, N, heads=H, kv_heads=H, size=D, dtype=dtype, is_causal=True, grad_through_lse=False, scale=0.2)
    q, k, v = (x.reshape(Z * H * N, D) for x in (case.query, case.key, case.value))
    grad = case.incoming_gradients()[0].to(dtype).reshape(Z * H * N, D)
    o, dq, dk, dv = (torch.full_like(q, math.nan) for _ in range(4))
    b, delta = torch.empty(Z * H * N, dtype=torch.promote_types(dtype, torch.float32)), torch.empty(Z * H * N, dtype=dtype)
    triton_flashattn._attn_fwd[(1,)](0.2, b, Z, H, N, q, k, v, o, HEAD_DIM=D)
    triton_flashattn._attn_bwd_prep[(1,)](o, grad, delta, Z, H, N, HEAD_DIM=D)
    triton_flashattn._attn_bwd[(1,)](q, k, v, 0.2, grad, dq, dk, dv, b, delta, Z, H, N, HEAD_DIM=D)
    shaped = {"out": o, "grad_query": dq, "grad_key": dk, "grad_value": dv}
    results = {name: x.view(Z, H, N, D) for name, x in shaped.items()} | {"lse": (b * math.log(2.0)).view(Z, H, N)}
    assert_close_to_reference(case, results)
    wide = b.dtype
    assert torch.equal(delta, (o.to(wide) * grad.to(wide)).sum(-1).to(dtype))

    def fn(query, key, value, _, *, scale, **__):
        return triton_flashattn.flash_attention(query, key, value, scale), torch.zeros(())

    out = fn(case.query, case.key, case.value, None, scale=0.2)[0]
    assert torch.equal(out.reshape(Z * H * N, D), o)


def test_calls_compile_in_one_graph():
    ends_q, ends_k = torch.tensor([0, 5, 20], dtype=torch.int32), torch.tensor([0, 6, 24], dtype=torch.int32)
    slopes = torch.tensor([0.5, 0.25, 1.0, 2.0])

    def calls(q, k):
        packed = (q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1), ends_q, ends_k, 15, 18)
        return (
            flash_attn.flash_attn_func(q, k, k, causal=True, window_size=(3, 0)),
            flash_attn.flash_attn_func(q, k, k, alibi_slopes=slopes),
            flash_attn.flash_attn_varlen_func(*packed, window_size=(3, 1)),
            flash_attn.flash_attn_varlen_func(*packed, causal=True, alibi_slopes=slopes),
            flash_dmattn.flash_dmattn_func(q, k, k, is_causal=True),
        )

    compiled = torch.compile(calls, fullgraph=True, dynamic=True, backend="eager")
    for queries, keys in ((10, 12), (10, 13)):
        q, k = tensor((2, queries, 4, 16), 0), tensor((2, keys, 2, 16), 1)
        torch.testing.assert_close(compiled(q, k), calls(q, k))
