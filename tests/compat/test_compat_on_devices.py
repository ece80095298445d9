"""Every kind of call of dmattn.compat on the device under test: masks, tables and positions are made there, and results obey the one rule."""

from __future__ import annotations

import torch
from dmattn.compat import block_sparse_attn, flash_attn, flash_dmattn, flashmask
from dmattn.testing import AttentionCase, assert_close_to_reference, run, strategies, top_k_visible

tensor = strategies.random_tensor
LENGTHS_Q, LENGTHS_K = (40, 1, 150), (70, 90, 100)


def case_of(queries, keys, device, dtype, batch=2, **fields) -> AttentionCase:
    shapes = ((batch, 4, queries, 64), (batch, 2, keys, 64), (batch, 2, keys, 64))
    q, k, v = (tensor(shape, i, dtype, device) for i, shape in enumerate(shapes))
    return AttentionCase(q, k, v, **fields)


def ends_of(lengths, device):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int().to(device)


def blocks_of(parts, device):
    return torch.block_diag(*(part.long() for part in parts)).bool()[None, None].to(device)


def band(queries, keys, left, right):
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    return (distance <= left) & (distance >= -right)


def test_windows_and_alibi(device, dtype):
    slopes = tensor((4,), 3, device=device).abs()
    distance = (torch.arange(130)[:, None] + 70 - torch.arange(200)).abs().to(device)
    for window, causal in (((50, 20), False), ((-1, -1), True), ((60, -1), True)):
        left, right = (1000 if side < 0 else side for side in window)
        visible = band(130, 200, left, 0 if causal else right).to(device)
        bias = -slopes.view(1, 4, 1, 1) * distance
        for given_slopes, given_bias in ((None, None), (slopes, bias)):
            case = case_of(130, 200, device, dtype, visible=visible[None, None], bias=given_bias)

            def fn(q, k, v, _, slopes=given_slopes, window=window, causal=causal, **__):
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
                out, lse, _ = flash_attn.flash_attn_func(
                    q, k, v, causal=causal, window_size=window, alibi_slopes=slopes, return_attn_probs=True
                )
                return out.transpose(1, 2), lse

            results = run(AttentionCase(case.query, case.key, case.value), fn)
            assert_close_to_reference(case, results)


def test_packed_sequences_and_pages(device, dtype):
    parts = [band(m, n, 30, 5) for m, n in zip(LENGTHS_Q, LENGTHS_K, strict=True)]
    case = case_of(sum(LENGTHS_Q), sum(LENGTHS_K), device, dtype, batch=1, visible=blocks_of(parts, device))
    ends = ends_of(LENGTHS_Q, device), ends_of(LENGTHS_K, device), 150, 100
    table = torch.randperm(21, generator=torch.Generator().manual_seed(0)).view(3, 7).int().to(device)

    def fn(q, k, v, _, paged=False, **__):
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        more = {}
        if paged:
            index = torch.cat(
                [table[b].repeat_interleave(16)[:n] * 16 + torch.arange(n, device=device) % 16 for b, n in enumerate(LENGTHS_K)]
            )
            k, v = (x.new_zeros(21 * 16, 2, 64).index_copy(0, index, x).unflatten(0, (21, 16)) for x in (k, v))
            more["block_table"] = table
        out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, *ends, window_size=(30, 5), return_attn_probs=True, **more)
        return out.transpose(0, 1)[None], lse[None]

    assert_close_to_reference(case, run(case, fn))
    assert_close_to_reference(case, run(case, lambda *a, **o: fn(*a, paged=True, **o)))


def test_masks_and_biases_of_earlier_versions(device, dtype):
    """Masks are 1.0 and 0.0 in the query's dtype; those of packs count the keys of the query's own sequence."""
    tokens, longest = sum(LENGTHS_Q), max(LENGTHS_K)
    keep = (tensor((tokens, 2, longest), 3, device=device) > -0.5).to(dtype)
    bias = tensor((tokens, 2, longest), 4, dtype, device)
    seen = torch.zeros(1, 2, tokens, sum(LENGTHS_K), dtype=torch.bool, device=device)
    wide = torch.zeros(1, 2, tokens, sum(LENGTHS_K), dtype=dtype, device=device)
    row = key = 0
    for m, n in zip(LENGTHS_Q, LENGTHS_K, strict=True):
        place = (0, slice(None), slice(row, row + m), slice(key, key + n))
        seen[place] = keep[row : row + m, :, :n].transpose(0, 1).bool()
        wide[place] = bias[row : row + m, :, :n].transpose(0, 1)
        row, key = row + m, key + n
    case = case_of(tokens, sum(LENGTHS_K), device, dtype, batch=1, visible=seen, bias=wide)
    ends = ends_of(LENGTHS_Q, device), ends_of(LENGTHS_K, device)

    def fn(q, k, v, _, **__):
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out, lse, _ = flash_dmattn.flash_dmattn_varlen_func(
            q, k, v, *ends, 150, 100, attn_mask=keep, attn_bias=bias, return_attn_probs=True
        )
        return out.transpose(0, 1)[None], lse[None]

    results = run(AttentionCase(case.query, case.key, case.value), fn)
    assert_close_to_reference(case, results)
    whole = case_of(70, 90, device, dtype, visible=(tensor((2, 4, 70, 90), 5, device=device) > 0))
    q, k, v = (x.transpose(1, 2) for x in (whole.query, whole.key, whole.value))
    out = flash_dmattn.flash_dmattn_func(q, k, v, whole.visible.to(dtype))
    assert_close_to_reference(whole, {"out": out.transpose(1, 2)})


def test_a_cache_in_rows_and_pages(device, dtype):
    case = case_of(3, 96, device, dtype)
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


def test_kinds_of_heads(device, dtype):
    kinds, info = torch.tensor([0, 1, -1, -1], device=device), torch.tensor([0, 0, 0, 0, 1, 1, 0, 2], device=device)
    tables = torch.rand(3, 1, 2, 1, generator=torch.Generator().manual_seed(0)).to(device) < 0.7
    seen = torch.zeros(1, 4, sum(LENGTHS_Q), sum(LENGTHS_K), dtype=torch.bool)
    for h in range(4):
        parts = []
        for n, (m, k) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
            part = band(m, k, 1000, 0)
            if h == 1:
                part = part & tables[n, 0].cpu().repeat_interleave(128, 0)[:m]
            parts.append(part)  # every sequence has one block of keys, which streaming heads see
        seen[0, h] = blocks_of(parts, "cpu")[0, 0]
    case = case_of(sum(LENGTHS_Q), sum(LENGTHS_K), device, dtype, batch=1, visible=seen.to(device))

    def fn(q, k, v, _, **__):
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        ends = ends_of(LENGTHS_Q, device), ends_of(LENGTHS_K, device)
        out, lse, _ = block_sparse_attn.block_sparse_attn_func(
            q, k, v, *ends, kinds, info, tables, 150, 100, 0.0, is_causal=True, return_attn_probs=True
        )
        return out.transpose(0, 1)[None], torch.cat([row[:, :n] for row, n in zip(lse, LENGTHS_Q, strict=True)], 1)[None]

    assert_close_to_reference(case, run(case, fn))


def test_columns_of_rows_in_several_passes(device, dtype):
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, 181, (2, 2, 180, 4), generator=generator, dtype=torch.int32)
    row = torch.arange(180)[:, None]
    first, end, later, final = (column[:, :, None] for column in indices.unbind(3))
    visible = ~(((row >= first) & (row < end)) | ((row >= later) & (row < final)))
    case = case_of(180, 180, device, dtype, visible=visible.to(device))

    def fn(q, k, v, _, **__):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = flashmask.flashmask_attention(q, k, v, indices.to(device), return_softmax_lse=True)
        return out.transpose(1, 2), lse

    assert_close_to_reference(case, run(case, fn))


def test_masks_biases_and_selections(device, dtype):
    scores = tensor((2, 2, 200), 5, device=device)
    padding = torch.arange(200, device=device) < torch.tensor([[200], [120]], device=device)
    visible = top_k_visible(scores, 30, True, padding[:, None, None].expand(-1, -1, 200, -1))[:, :, 70:]
    case = case_of(130, 200, device, dtype, visible=visible, key_bias=scores)

    def forward(q, k, v, _, *, key_bias, **__):
        out, _ = flash_dmattn.flash_dynamic_mask_attention_forward(None, q, k, v, padding, key_bias, window_size=30)
        return out.transpose(1, 2), out[..., 0].float().transpose(1, 2)

    results = run(AttentionCase(case.query, case.key, case.value, key_bias=scores, grad_through_lse=False), forward)
    results.pop("lse")
    assert_close_to_reference(
        AttentionCase(case.query, case.key, case.value, visible=visible, key_bias=scores, grad_through_lse=False), results
    )

    bias = tensor((1, 2, 130, 200), 6, dtype, device)
    dense = case_of(130, 200, device, dtype, visible=visible, bias=bias, is_causal=True)

    def masked(q, k, v, _, *, bias, **__):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, _ = flash_dmattn.flash_dmattn_func(q, k, v, visible, bias, is_causal=True, return_attn_probs=True)
        return out.transpose(1, 2), lse

    assert_close_to_reference(dense, run(dense, masked))
