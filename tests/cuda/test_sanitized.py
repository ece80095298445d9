"""What ``tools/evidence.sh sanitizers`` runs under compute-sanitizer: every kind of CUDA kernel, each on an input as small as shows it.

The reference runs on the CPU, so that the GPU runs little but the kernels in question.
"""

from __future__ import annotations

import dataclasses
import itertools
import os

import dmattn
import pytest
import test_decode as decoding
import torch
from dmattn import BlockMask, IndexMask, IntervalMask
from dmattn.testing import strategies
from dmattn.testing.case import AttentionCase
from dmattn.testing.checks import run
from dmattn.testing.tolerance import assert_close_to_reference

pytestmark = pytest.mark.gpu

tensor = strategies.random_tensor
WINDOW = 400


def check(case, on_gpu, fn=dmattn.attention):
    is_hopper = os.environ.get("DMATTN_FAMILY") != "sm80" and torch.cuda.get_device_capability()[0] == 9
    if is_hopper and os.environ.get("DMATTN_SANITIZER") == "initcheck":
        # It does not see what tensor copies write: who reads the output, we or backward, would seem to read what nobody wrote.
        on_gpu.call(fn)
        torch.cuda.synchronize()
        return
    assert_close_to_reference(case, {name: result.cpu() for name, result in run(on_gpu, fn).items()})


def select_all(query, key, value, mask, *, key_bias, bias, is_causal, **options):
    """Dynamic-mask attention with a window of all keys, which come in order on Hopper."""
    return dmattn.dynamic_mask_attention(query, key, value, key_bias, key.shape[2], **options)


def problem(kind, size, value_size, deterministic, dtype=torch.bfloat16):
    """A case on the CPU and its mask on the GPU."""
    # Long enough that the rings of keys and values come round; gathered: more than one segment of queries; long: more
    # keys than one block that finds live keys looks at; compact: queries enough for copies of the keys that all of them see.
    lengths = {"plain": (150, 1333), "gathered": (800, 900), "long": (1100, 4500), "compact": (1030, 700)}
    queries, keys = lengths.get(kind, (200, 500))
    query = tensor((1, 8 if kind == "compact" else 2, queries, size), 0, dtype)
    key, value = tensor((1, 1, keys, size), 1, dtype), tensor((1, 1, keys, value_size), 2, dtype)
    case = AttentionCase(query, key, value, is_causal=True, scale=0.1, deterministic=deterministic, description=kind)
    if kind == "plain":
        return case, None
    if kind in ("gathered", "long", "compact"):
        causal = kind != "compact"
        mask = IntervalMask.top_k(tensor((1, 1, keys), 3), WINDOW if causal else keys // 5, causal)
        case = dataclasses.replace(case, key_bias=tensor((1, 1, keys), 3), visible=mask.to_bool(queries, keys), is_causal=causal)
        return case, IntervalMask(mask.start.cuda(), mask.end.cuda())
    blocks = tensor((1, 1, queries, keys), 4) > 0.5
    blocks[:, :, :140, 128:] = False
    if kind == "blocks":
        return dataclasses.replace(case, visible=blocks), BlockMask.from_bool(blocks.cuda())
    interval = IntervalMask.sliding_window(keys, 100)
    case = dataclasses.replace(
        case, visible=blocks & interval.to_bool(queries, keys), key_bias=tensor((1, 1, keys), 5), bias=tensor((1, 2, queries, keys), 6),
        softcap=5.0, dropout_p=0.2, dropout_seed=7,
    )  # fmt: skip
    return case, IntervalMask.sliding_window(keys, 100, device="cuda") & BlockMask.from_bool(blocks.cuda())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *itertools.product(["plain", "gathered", "blocks", "general"], [(64, 64), (128, 128), (40, 96), (256, 256)]),
        ("long", (64, 64)),
        ("compact", (64, 64)),
    ],
    ids=str,
)
def test_attention(kind, sizes, deterministic):
    case, mask = problem(kind, *sizes, deterministic)
    on_gpu = dataclasses.replace(case.with_leaves({name: leaf.cuda() for name, leaf in case.leaves().items()}), mask=mask)
    check(case, on_gpu)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 300, 1000, 1500, 2100, 5000, 40000])  # up to 4,096 keys there are four kernels
def test_select(length, causal):
    for dtype in (torch.float32, torch.bfloat16):
        scores = tensor((1, 2, length), 0, dtype)
        scores[:, 1, length // 3 :] = scores[0, 1, 0]  # so many are alike that they are sorted again
        half = torch.full((1, 1, length), length, dtype=torch.int32)
        half[..., : length // 2] = length // 2
        for segments in (None, half):
            for sizes in ((257, causal), (257, causal, 100, 3), (0, causal, 100, 3)) if causal else ((257, causal),):
                expected = torch.ops.dmattn.select(scores, segments, *sizes)
                got = torch.ops.dmattn.select(scores.cuda(), None if segments is None else segments.cuda(), *sizes)
                assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize(("keys", "head_dim"), [(1, 16), (300, 32), (2500, 72), (9000, 16), (300, 136)])
@pytest.mark.parametrize("block", [1, 4, 16, 128])
def test_index_top_k(keys, head_dim, block):
    """Small integers, whose scores are the same in any order of sums."""
    draw = torch.Generator().manual_seed(0)
    sizes = ((1, 2, 70, 3, head_dim), (1, 2, keys, head_dim), (1, 2, 70, 3))
    given = [torch.randint(-1, 2, size, generator=draw).bfloat16() for size in sizes]
    given[2] = given[2].float()
    end = torch.where(torch.arange(keys) % 3 == 0, 0, 2 * keys).int().view(1, 1, keys)
    for bounds in ((None, None), (end * 0, end)):
        sizes = (keys, 40, block, False, True, 3, 1, 0.25, True)
        arguments = (*given, None, *bounds, None, None)
        expected = torch.ops.dmattn.index_top_k(*arguments, *sizes)
        on_gpu = (None if x is None else x.cuda() for x in arguments)
        for got, wanted in zip(torch.ops.dmattn.index_top_k(*on_gpu, *sizes), expected, strict=True):
            assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize("way", ["all", "lists"])
@pytest.mark.parametrize(("block", "is_pooled"), [(1, False), (16, False), (16, True)])
@pytest.mark.parametrize("keys", [33, 83, 1000, 9000])
def test_index_loss(keys, block, is_pooled, way):
    draw = torch.Generator().manual_seed(0)
    rows, blocks = 5, keys // block if is_pooled else -(-keys // block)
    listed = min(9, blocks)
    columns = listed * block if way == "lists" else keys
    choices = (listed if way == "lists" else blocks) if is_pooled else columns
    sizes = ((2, 3, 2, rows, columns), (2, 3, 4, rows, choices), (2, 3, rows, 4), (3,), (1, 3, 1, keys), (2, 3, 2, rows))
    logits, products, weights, slope, key_bias, lse = (torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes)
    lists = (
        torch.stack([torch.randperm(blocks + 2, generator=draw)[:listed] - 1 for _ in range(2 * rows)])
        .int()
        .view(2, 1, rows, listed)
    )
    lists[0, 0, :, 0] = 1 << 28  # far behind the last key: in blocks of 16, 2^32 keys
    positions = torch.tensor([0, keys // 3, keys // 2, keys - 1, keys + 5])
    is_hidden = torch.arange(keys) // (block if is_pooled else 1) % 3 == 0  # only whole blocks compete by their means
    end = torch.where(is_hidden, 0, 2 * keys).int().view(1, 1, keys)
    given = (logits, products, weights, slope / keys, key_bias, None if way == "all" else lse + 9, positions)
    given = (*given, None if way == "all" else lists, end * 0, end)
    sizes = (keys, block, is_pooled, True, 3, 1, 0.5, 4.0, 0.25, True)
    expected = torch.ops.dmattn.index_loss(*given, *sizes, False)
    assert blocks < 3 or (expected[0] > 0).any()  # of two whole blocks one is hidden
    on_gpu = [None if x is None else x.cuda() for x in given]
    for got, wanted in zip(torch.ops.dmattn.index_loss(*on_gpu, *sizes, False), expected, strict=True):
        torch.testing.assert_close(got.cpu(), wanted)
    short = [x.float() if x is not None and x.is_floating_point() else x for x in on_gpu]
    for to_bfloat16 in (False, True):
        for got, wanted in zip(torch.ops.dmattn.index_loss(*short, *sizes, to_bfloat16), expected, strict=True):
            torch.testing.assert_close(got.cpu().bfloat16(), wanted.bfloat16())


@pytest.mark.parametrize("block", [1, 48, 128])
def test_pack(block):
    given = tensor((2, 3, -(-700 // block), -(-333 // block)), 0) > 0.3
    arguments = (700, 333, block, block, 128, 128)
    tiles = torch.ops.dmattn.pack_tiles(given, *arguments)
    on_gpu = torch.ops.dmattn.pack_tiles(given.cuda(), *arguments)
    mask, again = (
        BlockMask(*made, torch.ops.dmattn.pack_bits(source, made[0], *arguments, int((made[0] >= 2).sum())), 700, 333)
        for source, made in ((given, tiles), (given.cuda(), on_gpu))
    )
    assert torch.equal(again.to_bool().cpu(), mask.to_bool())
    for ours, theirs in zip(on_gpu[1:], tiles[1:], strict=True):  # counts, and that many indices
        count = theirs[..., :1]
        assert torch.equal(ours[..., :1].cpu(), count)
        listed = torch.arange(theirs.shape[-1] - 1) < count
        assert torch.equal(torch.where(listed, ours[..., 1:].cpu(), 0), torch.where(listed, theirs[..., 1:], 0))


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_window_of_all_keys(hidden, size):
    """Some keys have scores that are never selected, and are left out of the chunks of keys."""
    query = tensor((1, 2, 600, size), 0, torch.bfloat16)
    key, value = (tensor((1, 1, 700, size), seed, torch.bfloat16) for seed in (1, 2))
    scores = tensor((1, 1, 700), 3)
    if hidden:
        scores[:, :, 100:400:7] = -torch.inf
    visible = IntervalMask.top_k(scores, 700).to_bool(600, 700)
    case = AttentionCase(query, key, value, visible=visible, key_bias=scores)
    check(case, case.with_leaves({name: leaf.cuda() for name, leaf in case.leaves().items()}), select_all)


def test_float16():
    case, mask = problem("gathered", 64, 64, False, torch.float16)
    on_gpu = dataclasses.replace(case.with_leaves({name: leaf.cuda() for name, leaf in case.leaves().items()}), mask=mask)
    check(case, on_gpu)
    assert dmattn.attention(on_gpu.query, on_gpu.key, on_gpu.value).dtype == torch.float16


@pytest.mark.parametrize("page_size", [0, 48])
@pytest.mark.parametrize(("heads", "queries"), [(4, 1), (16, 3)])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 120), (256, 248)], ids=str)
def test_decode(page_size, heads, queries, sizes):
    """Sequences of all splits, of none and of some; page numbers out of range where no key is."""
    lengths = [48 * 9, 0, 150]
    case = decoding.make(
        "cpu", torch.bfloat16, lengths, heads, 2, queries, lengths[0], *sizes, bias=True, sinks=True, softcap=5.0
    )
    given = (case.key, case.value, None) if page_size == 0 else decoding.paged(case, page_size)
    key, value, table = (t if t is None else t.cuda() for t in given)
    out, lse = dmattn.decode_attention(
        case.query.cuda(), key, value, case.lengths.cuda(), key_bias=case.key_bias.cuda(), page_table=table, sinks=case.sinks.cuda(),
        softcap=case.softcap, return_lse=True,
    )  # fmt: skip
    decoding.assert_right(case, (out.cpu(), lse.cpu()))


@pytest.mark.parametrize("page_size", [0, 48])
@pytest.mark.parametrize(("heads", "queries", "own"), [(4, 1, 2), (4, 3, 4), (40, 2, 1)])
@pytest.mark.parametrize(("block", "entries", "local"), [(1, 300, 9), (16, 7, 40), (64, 0, 500)])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 120), (256, 248)], ids=str)
def test_decode_with_lists(page_size, heads, queries, own, block, entries, local, sizes):
    """Lists of more keys than a block reads, in any order."""
    lengths = [48 * 20, 0, 150]
    case = decoding.make(
        "cpu", torch.bfloat16, lengths, heads, 2, queries, lengths[0], *sizes, bias=True, sinks=True, softcap=5.0
    )
    blocks, generator = -(-lengths[0] // block), torch.Generator().manual_seed(0)
    lists = torch.rand(3, own, queries, blocks, generator=generator).argsort(-1)[..., :entries]
    mask = IndexMask(lists.int(), block, local=local, sink_keys=3)
    given = (case.key, case.value, None) if page_size == 0 else decoding.paged(case, page_size)
    key, value, table = (t if t is None else t.cuda() for t in given)
    out, lse = dmattn.decode_attention(
        case.query.cuda(), key, value, case.lengths.cuda(), mask=mask.cuda(), key_bias=case.key_bias.cuda(), page_table=table,
        sinks=case.sinks.cuda(), softcap=case.softcap, return_lse=True,
    )  # fmt: skip
    decoding.assert_right(dataclasses.replace(case, mask=mask), (out.cpu(), lse.cpu()))


@pytest.mark.parametrize("sizes", [(300, 20, 4, 7), (40, 0, 0, 0), (0, 30, 2, 3)], ids=str)
def test_cache(sizes):
    """Steps, a chunk of more tokens than places are found for at once, padding and a rewind, beside the same on the CPU."""
    window, local, sink_keys, rewind = sizes
    cpu, gpu = (
        dmattn.BoundedCache(
            2, 2, window, 64, 40, local=local, sink_keys=sink_keys, rewind=rewind, dtype=torch.bfloat16, device=device
        )
        for device in ("cpu", "cuda")
    )
    for seed, tokens in enumerate((1, 4500, 1, 20, 1)):
        shapes = ((2, 4, tokens, 64), (2, 2, tokens, 64), (2, 2, tokens, 40))
        given = [*(tensor(shape, seed, torch.bfloat16) for shape in shapes), tensor((2, 2, tokens), seed)]
        lengths = torch.tensor([tokens, tokens // 2], dtype=torch.int32)
        back = torch.tensor([0, min(rewind, tokens // 2, 2)], dtype=torch.int32)
        for cache in (cpu, gpu):
            cache.attend(*(x.to(cache.key.device) for x in given), lengths=lengths.to(cache.key.device))
            cache.rewind(back.to(cache.key.device))
    for name, state in cpu.state_dict().items():
        assert torch.equal(gpu.state_dict()[name].cpu(), state), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.int64], ids=str)
def test_reduce(dtype):
    """Rows with and without vectors, columns of few and of many elements, one and several chunks, and both forms of pass two."""
    shapes = [
        ((9000,), None),
        ((5, 300), 1),
        ((3, 4099), 1),
        ((7, 40), 0),
        ((300, 70), 0),
        ((2, 4100, 9), 1),
        ((4096 * 130,), None),
    ]
    for seed, (shape, dim) in enumerate(shapes):
        given = (tensor(shape, seed) * 50).to(dtype)
        for op in (torch.ops.dmattn.reduce_sum, torch.ops.dmattn.reduce_max):
            assert torch.equal(op(given.cuda(), dim).cpu(), op(given, dim))
