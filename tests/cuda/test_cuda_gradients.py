"""Gradients of problems so long, or of so many heads, that CUDA kernels compute them in parts; and equal bits run to run."""

from __future__ import annotations

import dmattn
import pytest
import torch
from cuda_inputs import LONG_KINDS, assert_same_results, inputs, long_spans, step
from dmattn_bench.two_ways import assert_same_in_another_order

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(
    ("kind", "lengths"), [(k, n) for k, n in LONG_KINDS if n[0] > 1 and sum(n) > 4096 and n[0] * n[1] < 2e8], ids=str
)
def test_gradients_of_long_problems(kind, lengths, size, monkeypatch):
    """The kernels that add beside the portable ones with a fixed order of sums: they share neither walk nor sums."""
    queries, keys = lengths
    torch.manual_seed(0)
    shapes = (4, queries, size), (2, keys, size), (2, keys, size), (2, keys)
    q, k, v, key_bias = (torch.randn(2, *shape, device="cuda") for shape in shapes)
    leaves = [x.requires_grad_() for x in (q.bfloat16(), k.bfloat16(), v.bfloat16(), key_bias)]
    grad_out = torch.randn_like(leaves[0])
    start, end = long_spans(kind, 2, queries, keys)
    if queries > keys:
        start = start - 100000  # far below the first position, too

    def gradients(deterministic):
        out = dmattn.attention(
            *leaves[:3], dmattn.IntervalMask(start, end), key_bias=leaves[3], is_causal=kind in ("window", "top_k", "local", "most"),
            deterministic=deterministic,
        )  # fmt: skip
        return torch.autograd.grad(out, leaves, grad_out)

    result = gradients(False)
    monkeypatch.setenv("DMATTN_FAMILY", "sm80")
    assert_same_results(result, gradients(True))


@pytest.mark.parametrize(("batches", "kv_heads", "length"), [(1, 5, 130000), (3, 2, 90000)])
def test_gradients_of_heads_in_parts(batches, kv_heads, length):
    """So many floats of sums that backward takes some heads, or batches, after the others."""
    q, k, v, scores, grad_out = inputs(length, 2 * kv_heads, kv_heads, 128, batch=batches)
    together = step_of_heads(q, k, v, scores, grad_out)
    for batch, head in ((0, 0), (0, 1), (batches - 1, kv_heads - 1)):
        one, pair = slice(head, head + 1), slice(2 * head, 2 * head + 2)
        at, heads = slice(batch, batch + 1), (pair, one, one, one)
        alone = step_of_heads(*(x[at, h] for x, h in zip((q, k, v, scores), heads, strict=True)), grad_out[at, pair])
        for got, expected, h in zip(together, alone, heads, strict=True):
            assert_same_in_another_order(got[at, h], expected, torch.bfloat16)


def step_of_heads(q, k, v, scores, grad_out):
    leaves = [x.detach().requires_grad_() for x in (q, k, v, scores)]
    return torch.autograd.grad(dmattn.dynamic_mask_attention(*leaves, 512), leaves, grad_out)


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("kind", ["full", "causal", "blocks", "documents", "key_bias"])
@pytest.mark.parametrize(("batches", "kv_heads", "group"), [(1, 2, 8), (2, 12, 4), (4, 12, 2)], ids=str)
def test_gradients_of_groups_that_blocks_share_or_not(batches, kv_heads, group, kind, size):
    """Few keys: each head of a group is an item of its own; more: some heads together; many: all of them, and no sums in memory. Beside
    sums in a fixed order, which take groups together."""
    length = 1500
    q, k, v, scores, grad_out = inputs(length, kv_heads * group, kv_heads, size, batch=batches)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    mask, options = None, {"is_causal": kind != "full"}
    if kind == "blocks":
        mask = dmattn.BlockMask.from_bool(torch.rand(length, length, device="cuda") < 0.5)
    elif kind == "documents":
        ends = torch.tensor([300, 301, 1111, length], device="cuda")
        mask = dmattn.IntervalMask.documents(length, ends)
    elif kind == "key_bias":
        options["key_bias"] = scores.detach().requires_grad_()
        leaves.append(options["key_bias"])

    def gradients(deterministic):
        out = dmattn.attention(*leaves[:3], mask, deterministic=deterministic, **options)
        return torch.autograd.grad(out, leaves, grad_out)

    assert_same_results(gradients(False), gradients(True))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_bias_gradients_of_batches_in_parts(softcap, causal):
    """Batches that share a bias come some after the others, and add to what the first left."""
    batches, heads, length = 66, 16, 2048
    q, k, v, _, grad_out = inputs(length, heads, heads, 128, batch=batches)
    bias = torch.randn(1, heads, length, length, device="cuda").requires_grad_()  # its gradient is not rounded to 16 bits

    def gradient(of):
        out = dmattn.attention(q[of], k[of], v[of], bias=bias, is_causal=causal, softcap=softcap)
        return torch.autograd.grad(out, bias, grad_out[of])[0]

    both = gradient(slice(None, 33)) + gradient(slice(33, None))
    assert_same_in_another_order(gradient(slice(None)), both, torch.bfloat16)


def test_block_mask_gradients_of_heads_in_parts():
    q, k, v, _, grad_out = inputs(20000, 120, 60, 128, batch=1)
    table = torch.rand(1, 60, 157, 157, device="cuda") < 0.02

    def gradients(heads, kv_heads):
        leaves = [x[:, h].detach().requires_grad_() for x, h in ((q, heads), (k, kv_heads), (v, kv_heads))]
        out = dmattn.attention(*leaves, dmattn.BlockMask.from_blocks(table[:, kv_heads], 128))
        return torch.autograd.grad(out, leaves, grad_out[:, heads])

    together = gradients(slice(None), slice(None))
    for head in (0, 31, 59):
        one, pair = slice(head, head + 1), slice(2 * head, 2 * head + 2)
        for got, expected, h in zip(together, gradients(pair, one), (pair, one, one), strict=True):
            assert_same_in_another_order(got[:, h], expected, torch.bfloat16)


def assert_deterministic(gradients, monkeypatch):
    """Bits are equal over 20 runs, and right beside the portable kernels, which share neither walk nor sums."""
    first = gradients()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(gradients(), first, strict=True))
    monkeypatch.setenv("DMATTN_FAMILY", "sm80")
    assert_same_results(first, gradients())
    monkeypatch.undo()
    return first


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("length", "heads", "kv_heads"), [(1500, 4, 2), (9000, 4, 2), (1500, 40, 40), (9000, 8, 2)])
def test_deterministic_gradients_of_live_keys_are_equal_over_twenty_runs(length, heads, kv_heads, size, monkeypatch):
    """Few lists and many; lists of a head wait for each other's turn to add to grad_key and grad_value."""
    given = inputs(length, heads, kv_heads, size)
    assert_deterministic(lambda: step(*given), monkeypatch)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("kind", ["window", "top_k", "local", "any", "short", "most"])
def test_deterministic_gradients_of_any_lists_are_equal_over_twenty_runs(kind, size, monkeypatch):
    """Lists that are empty, and those that share keys with many others; with dropout and softcap, too."""
    q, k, v, scores, grad_out = inputs(9000, size=size)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, scores)]
    mask = dmattn.IntervalMask(*long_spans(kind, 2, 9000, 9000))
    seed = torch.tensor(5, device="cuda")
    for options in ({}, {"dropout_p": 0.3, "dropout_seed": seed, "softcap": 3.0}):

        def gradients(options=options):
            out = dmattn.attention(
                *leaves[:3], mask, key_bias=leaves[3], is_causal=kind in ("window", "top_k", "local", "most"),
                deterministic=True, **options,
            )  # fmt: skip
            return torch.autograd.grad(out, leaves, grad_out)

        assert_deterministic(gradients, monkeypatch)


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(1500, 1500), (1500, 700), (700, 1500), (8200, 8200), (70, 9000)], ids=str)
def test_deterministic_gradients_of_all_keys_are_equal_over_twenty_runs(lengths, causal, size, monkeypatch):
    """Tiles of keys wait for each other's turn to add to grad_query; more of them than a GPU has multiprocessors, too."""
    queries, keys = lengths
    q, k, v, _, grad_out = inputs(max(lengths), size=size)
    leaves = [x.detach().requires_grad_() for x in (q[:, :, :queries], k[:, :, :keys], v[:, :, :keys])]

    def gradients():
        out = dmattn.attention(*leaves, is_causal=causal, deterministic=True)
        return torch.autograd.grad(out, leaves, grad_out[:, :, :queries])

    assert_deterministic(gradients, monkeypatch)


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("option", ["softcap", "dropout", "key_bias", "key_bias of all heads", "bias", "bias of all heads"])
@pytest.mark.parametrize("heads", [4, 2])  # on 2
def test_deterministic_gradients_with_options_are_equal_over_twenty_runs(option, heads, size, monkeypatch):
    q, k, v, scores, grad_out = inputs(1100, heads, size=size)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    options = {"softcap": {"softcap": 3.0}, "dropout": {"dropout_p": 0.3, "dropout_seed": torch.tensor(5, device="cuda")}}.get(
        option, {}
    )
    if "bias" in option:
        name = option.split()[0]
        kept = slice(0, 1) if "all heads" in option else slice(None)
        of_heads = scores.repeat_interleave(heads // 2, 1)[:, :, None]
        added = scores[:, kept] if name == "key_bias" else grad_out[..., :1].float() * of_heads
        options = {name: added[:, kept].detach().requires_grad_()}
        leaves.append(options[name])

    def gradients():
        out = dmattn.attention(*leaves[:3], is_causal=True, deterministic=True, **options)
        return torch.autograd.grad(out, leaves, grad_out)

    assert_deterministic(gradients, monkeypatch)


def test_deterministic_gradients_of_heads_in_parts_are_equal_over_twenty_runs(monkeypatch):
    """So many floats of sums that some heads come after the others, which take turns anew."""
    q, k, v, _, grad_out = inputs(2100, 1200, 600, 128, batch=1)

    def gradients(part=slice(None), kv_part=slice(None)):
        given = [x[:, h].detach().requires_grad_() for x, h in zip((q, k, v), (part, kv_part, kv_part), strict=True)]
        return torch.autograd.grad(dmattn.attention(*given, is_causal=True, deterministic=True), given, grad_out[:, part])

    together = assert_deterministic(gradients, monkeypatch)
    for head in (0, 333, 599):
        one, pair = slice(head, head + 1), slice(2 * head, 2 * head + 2)
        for got, expected, h in zip(together, gradients(pair, one), (pair, one, one), strict=True):
            assert torch.equal(got[:, h], expected)


MASKS_IN_ORDER = {
    "blocks": lambda length: dmattn.BlockMask.from_bool(torch.rand(length, length, device="cuda") < 0.3),
    "blocks of heads": lambda length: dmattn.BlockMask.from_blocks(
        torch.rand(1, 4, -(-length // 128), -(-length // 128)) < 0.3, 128
    ),
    "blocks and lifetimes": lambda length: dmattn.IntervalMask(*long_spans("short", 2, length, length)) & sparse_blocks(length),
    "lifetimes": lambda length: dmattn.IntervalMask(*long_spans("short", 2, length, length)),
    "lifetimes of heads": lambda length: dmattn.IntervalMask(*long_spans("short", 4, length, length)),
    "nothing": lambda length: dmattn.IntervalMask(
        *(torch.full((1, 1, length), 5, device="cuda", dtype=torch.int32) for _ in range(2))
    ),
}


def sparse_blocks(length):
    return dmattn.BlockMask.from_blocks(torch.rand(1, 1, -(-length // 256), -(-length // 384)) < 0.5, (256, 384)).to("cuda")


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("option", [None, "key_bias", "bias"])
@pytest.mark.parametrize("mask", MASKS_IN_ORDER)
def test_deterministic_gradients_beside_masks_are_equal_over_twenty_runs(mask, option, causal, size, monkeypatch):
    """Tiles of keys pass on turns at the chunks of queries that they leave out."""
    torch.manual_seed(0)
    length = 1100
    q, k, v, scores, grad_out = inputs(length, size=size)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    given = MASKS_IN_ORDER[mask](length).to("cuda")
    options = {}
    if option:
        options = {option: scores if option == "key_bias" else torch.randn(1, 1, length, length, device="cuda")}
        options[option] = options[option].detach().requires_grad_()
        leaves.append(options[option])

    def gradients():
        out = dmattn.attention(*leaves[:3], given, is_causal=causal, deterministic=True, **options)
        return torch.autograd.grad(out, leaves, grad_out)

    assert_deterministic(gradients, monkeypatch)


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("of", ["intervals", "key_bias", "both"])
@pytest.mark.parametrize(("kv_heads", "length"), [(1, 300), (2, 300), (1, 9000), (2, 9000)])
def test_deterministic_gradients_of_heads_that_differ_are_equal_over_twenty_runs(kv_heads, length, of, size, monkeypatch):
    """Heads of a group that share neither intervals nor key_bias run one after the other; keys in order and gathered."""
    torch.manual_seed(0)
    q, k, v, _, grad_out = inputs(length, 4, kv_heads, size)
    key_bias = torch.randn(2, kv_heads if of == "intervals" else 4, length, device="cuda")
    leaves = [x.detach().requires_grad_() for x in (q, k, v, key_bias)]
    mask = dmattn.IntervalMask(*long_spans("top_k", kv_heads if of == "key_bias" else 4, length, length))

    def gradients():
        out = dmattn.attention(*leaves[:3], mask, key_bias=leaves[3], is_causal=True, deterministic=True)
        return torch.autograd.grad(out, leaves, grad_out)

    assert_deterministic(gradients, monkeypatch)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_bad_key_has_no_effect_on_heads_that_do_not_see_it(deterministic):
    """A key full of NaN that one head of a group sees, beside a bias and beside a block mask."""
    length = 300
    q, k, v, _, grad_out = inputs(length, 4, 2, batch=1)
    k[:, :, 130], v[:, :, 131] = float("nan"), float("nan")
    start = torch.zeros(1, 4, length, device="cuda", dtype=torch.int32)
    end = torch.full_like(start, length)
    end[:, 1::2, 130:132] = 0  # the second head of each group
    mask = dmattn.IntervalMask(start, end)
    for options in ({"bias": torch.randn(1, 4, length, length, device="cuda")}, {}):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        blocks = dmattn.BlockMask.from_bool(torch.rand(length, length, device="cuda") < 0.9)
        out = dmattn.attention(*leaves[:3], mask if options else mask & blocks, deterministic=deterministic, **options)
        grad_query = torch.autograd.grad(out, leaves, grad_out)[0]
        assert torch.isfinite(out[:, 1::2]).all()
        assert torch.isfinite(grad_query[:, 1::2]).all()
        assert grad_query[:, ::2].isnan().any()


@pytest.mark.slow
def test_gradients_of_a_group_whose_sums_are_too_large():
    """A million queries of nine heads that share their keys: some heads of the group add to the sums of keys after the others."""
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB")
    length, heads = 1 << 20, 9
    q, k, v, scores, grad_out = inputs(length, heads, 1, 128, batch=1)
    together = step_of_heads(q, k, v, scores, grad_out)
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in (k, v, scores)]
    for head in range(heads):
        one = slice(head, head + 1)
        alone = step_of_heads(q[:, one], k, v, scores, grad_out[:, one])
        if head in (0, 4, heads - 1):
            assert_same_in_another_order(together[0][:, one], alone[0], torch.bfloat16)
        for total, part in zip(sums, alone[1:], strict=True):
            total += part
    for got, total in zip(together[1:], sums, strict=True):
        error = (got.float() - total).norm() / total.norm()
        assert error < 0.01, float(error)  # each head's gradient is rounded to bfloat16
