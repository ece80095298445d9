"""Dynamic masks whose keys come to Hopper's kernels in different ways: every source of keys gives the same (test_plan.py: which is chosen)."""

from __future__ import annotations

import functools
import os

import dmattn
import pytest
import torch
from cuda_inputs import assert_same_results
from devices import DEVICE
from dmattn.testing import AttentionCase, assert_matches_reference

# The results --------------------------------------------------------------------------------------------------------------------------


def selecting(window, is_causal=True, **beside):
    def fn(query, key, value, mask, *, key_bias, bias, is_causal=is_causal, **options):
        return dmattn.dynamic_mask_attention(query, key, value, key_bias, window, is_causal=causal, **beside, **options)

    causal = is_causal
    return fn


def problem(lengths, heads, size, dtype, device, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator, device=device)
    (queries, keys), (query_heads, kv_heads) = lengths, heads
    shapes = (2, query_heads, queries, size), (2, kv_heads, keys, size), (2, kv_heads, keys, size)
    return [draw(*shape).to(dtype) for shape in shapes], draw(2, kv_heads, keys)


def unknown(mask):
    """The mask without what it knows of itself."""
    return dmattn.IntervalMask(mask.start, mask.end)


def short(lengths, device):
    """As long as a test may take where there is no GPU."""
    return lengths if device.startswith("cuda") else tuple(-(-length // 8) for length in lengths)


@pytest.mark.parametrize("window", [0.1, 0.5, 0.8, 1.0, 2.0])
@pytest.mark.parametrize("lengths", [(512, 512), (900, 900), (300, 1100), (1025, 1000), (40, 700)], ids=str)
@pytest.mark.parametrize(("heads", "size"), [((4, 4), 128), ((4, 2), 64), ((2, 1), 72), ((2, 2), 256)], ids=str)
def test_every_window_gives_what_the_reference_gives(device, dtype, heads, size, lengths, window):
    lengths = short(lengths, str(device))
    (query, key, value), scores = problem(lengths, heads, size, dtype, device)
    count = max(1, int(lengths[1] * window))
    visible = dmattn.IntervalMask.top_k(scores, count).to_bool(*lengths)
    assert_matches_reference(AttentionCase(query, key, value, visible=visible, key_bias=scores), selecting(count))


@pytest.mark.parametrize(
    "options", [{"softcap": 5.0}, {"dropout_p": 0.2, "dropout_seed": 3}, {"deterministic": True}, {"scale": 0.5}], ids=str
)
@pytest.mark.parametrize("window", [0.5, 1.0])
def test_options_beside_large_windows(device, dtype, options, window):
    lengths = short((700, 700), str(device))
    (query, key, value), scores = problem(lengths, (4, 2), 64, dtype, device)
    count = int(lengths[1] * window)
    visible = dmattn.IntervalMask.top_k(scores, count).to_bool(*lengths)
    assert_matches_reference(AttentionCase(query, key, value, visible=visible, key_bias=scores, **options), selecting(count))


@pytest.mark.parametrize("window", [0.3, 1.0])
def test_large_windows_without_causality(device, dtype, window):
    lengths = short((600, 800), str(device))
    (query, key, value), scores = problem(lengths, (4, 2), 128, dtype, device)
    count = int(lengths[1] * window)
    visible = dmattn.IntervalMask.top_k(scores, count, is_causal=False).to_bool(*lengths)
    case = AttentionCase(query, key, value, visible=visible, key_bias=scores)
    assert_matches_reference(case, selecting(count, is_causal=False))


@pytest.mark.parametrize("size", [64, 128])
def test_a_key_is_hidden_from_its_end_on(device, dtype, size):
    """Keys in order, because the mask says that a query sees all of them. An even and an odd key have nearly all weight while they are seen."""
    lengths = short((600, 600), str(device))
    (query, key, value), scores = problem(lengths, (4, 2), size, dtype, device)
    end = torch.full((1, 1, lengths[1]), 2**31 - 1, dtype=torch.int32, device=device)
    for place, last in ((6, lengths[0] // 2), (9, lengths[0] * 2 // 3)):
        scores[:, :, place], end[:, :, place] = 30.0, last
    mask = dmattn.IntervalMask(torch.zeros_like(end), end)
    case = AttentionCase(query, key, value, mask._replace(most_keys=lengths[1]), mask.to_bool(*lengths), key_bias=scores)
    assert_matches_reference(case)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("hidden", ["some", "most", "a run", "all"])
def test_keys_that_are_never_selected_may_hold_anything(device, dtype, hidden, size, bad):
    """A window of all keys, of which scores of NaN and -inf select none: keys come in order all the same, and these are left out."""
    lengths = short((800, 800), str(device))
    (query, key, value), scores = problem(lengths, (4, 2), size, dtype, device)
    place = torch.arange(lengths[1], device=device)
    never = {
        "some": place % 17 == 5, "most": place % 5 != 0, "a run": (place > lengths[1] // 4) & (place < lengths[1] // 2),
        "all": place >= 0,
    }[hidden]  # fmt: skip
    chosen = scores.masked_fill(never & (place % 2 == 0), float("nan")).masked_fill(never & (place % 2 == 1), -float("inf"))
    visible = dmattn.IntervalMask.top_k(chosen, lengths[1]).to_bool(*lengths)
    key[:, :, never], value[:, :, never] = bad, bad
    case = AttentionCase(query, key, value, visible=visible, key_bias=chosen)
    assert_matches_reference(case, selecting(lengths[1]))


@pytest.mark.parametrize("huge", [-1e9, 9000.0, -1e30])
def test_huge_scores_beside_a_window_of_all_keys(device, dtype, huge):
    lengths = short((700, 700), str(device))
    (query, key, value), scores = problem(lengths, (2, 2), 128, dtype, device)
    scores[:, :, ::7] = huge
    visible = dmattn.IntervalMask.top_k(scores, lengths[1]).to_bool(*lengths)
    assert_matches_reference(AttentionCase(query, key, value, visible=visible, key_bias=scores), selecting(lengths[1]))


# On a Hopper GPU ----------------------------------------------------------------------------------------------------------------------


def is_hopper():
    family = os.environ.get("DMATTN_FAMILY", "auto")
    return DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9 and family != "sm80"


@pytest.mark.gpu
@pytest.mark.skipif(not is_hopper(), reason="needs the kernels for Hopper")
def test_a_window_of_all_keys_needs_neither_lists_nor_sums_of_keys():
    """Beside the same start and end by themselves, of which nobody knows how many keys a query sees."""
    length, heads, size = 8192, 16, 128
    generator = torch.Generator("cuda").manual_seed(0)
    leaves = [torch.randn(1, heads, length, size, generator=generator, device="cuda").bfloat16() for _ in range(3)]
    scores = torch.randn(1, heads, length, generator=generator, device="cuda")
    grad_out = torch.randn(leaves[0].shape, generator=generator, device="cuda").bfloat16()
    mask = unknown(dmattn.IntervalMask.top_k(scores, length))
    inputs = [x.requires_grad_() for x in (*leaves, scores)]

    def measured(call):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, result

    ways = (
        lambda: dmattn.dynamic_mask_attention(*inputs, length),
        lambda: dmattn.attention(*inputs[:3], mask, key_bias=inputs[3], is_causal=True),
    )
    results = []
    for way in ways:
        forward, out = measured(way)
        backward, gradients = measured(functools.partial(torch.autograd.grad, out, inputs, grad_out))
        results.append((forward, backward, [out.detach(), *gradients]))
    (few, fewer, got), (many, more, expected) = results
    lists = 3 * heads * length * 4  # at least an index and a span for each key
    sums_of_keys = heads * length * 2 * size * 4
    assert many - few > lists
    assert more - fewer > sums_of_keys
    assert_same_results(got, expected)


LONG = [(1500, 1, 1000), (4096, 40, 2048), (16384, 1, 8192), (9000, 12, 9000), (16384, 8, 14000), (16384, 1, 16384)]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("length", "heads", "window"), LONG)
def test_long_problems_are_the_same_by_lists(length, heads, window, size):
    """The same start and end by themselves are listed, because nobody knows how many keys a query sees."""
    generator = torch.Generator("cuda").manual_seed(0)
    draw = functools.partial(torch.randn, 1, generator=generator, device="cuda")
    inputs = [x.requires_grad_() for x in (*(draw(heads, length, size).bfloat16() for _ in range(3)), draw(heads, length))]
    grad_out = draw(heads, length, size).bfloat16()
    mask = unknown(dmattn.IntervalMask.top_k(inputs[3].detach(), window))
    out = dmattn.dynamic_mask_attention(*inputs, window)
    listed = dmattn.attention(*inputs[:3], mask, key_bias=inputs[3], is_causal=True)
    results = [out, *torch.autograd.grad(out, inputs, grad_out)]
    expected = [listed, *torch.autograd.grad(listed, inputs, grad_out)]
    assert_same_results(results, expected)
