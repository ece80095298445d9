"""More tiles than a GPU has blocks, in whatever order they come, and tables of tiles with long or many rows."""

from __future__ import annotations

import dataclasses

import dmattn
import pytest
import torch
from cuda_inputs import inputs
from dmattn.testing.case import AttentionCase
from dmattn.testing.tolerance import assert_close_to_reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("density", ["uneven", "even"])
@pytest.mark.parametrize("tiles", ["one more", "three times", "32 for each thread", "too many to order"])
def test_block_masks_with_more_tiles_than_blocks(tiles, density, is_causal):
    """Whatever tile comes first, and however uneven they are: what a head gets when it is alone, bit for bit."""
    blocks = torch.cuda.get_device_properties("cuda").multi_processor_count
    heads, rows = {
        "one more": (blocks + 1, 1),
        "three times": (blocks // 11 * 2, 17),
        "32 for each thread": ((blocks + 4096) // 120, 120),
        "too many to order": (40, 118),
    }[tiles]
    q, k, v, _, _ = inputs(rows * 128 - 40, heads, heads, 64, batch=1)
    share = torch.rand(1, heads, rows, 1, device="cuda") ** 3 if density == "uneven" else 1.0
    table = torch.rand(1, heads, rows, rows, device="cuda") < share
    table[:, 1, :3] = False
    out = dmattn.attention(q, k, v, dmattn.BlockMask.from_blocks(table, 128), is_causal=is_causal)
    for head in range(0, heads, max(1, heads // 40)):
        one = slice(head, head + 1)
        alone = dmattn.BlockMask.from_blocks(table[:, one], 128)
        assert torch.equal(out[:, one], dmattn.attention(q[:, one], k[:, one], v[:, one], alone, is_causal=is_causal))


def test_block_masks_with_rows_of_many_entries():
    """More of them than a walk of the keys reads at once; captured in a graph as well."""
    q, k, v = (torch.randn(1, 70, n, 64, device="cuda").bfloat16() for n in (300, 20000, 20000))
    table = torch.rand(1, 70, 3, 157, device="cuda") < 0.95
    mask = dmattn.BlockMask.from_blocks(table, 128)
    visible = table.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :300, :20000]
    out = dmattn.attention(q, k, v, mask)
    for head in (0, 33, 69):
        one = slice(head, head + 1)
        case = AttentionCase(*(x[:, one].float() for x in (q, k, v)), visible=visible[:, one])
        assert_close_to_reference(case, {"out": out[:, one]})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dmattn.attention(q, k, v, mask)
    graph.replay()
    assert torch.equal(captured, out)


@pytest.mark.parametrize("kind", ["full", "causal", "gathered"])
def test_more_tiles_than_blocks(kind):
    """Every block computes several tiles, one after the other; each head gets, bit for bit, what it gets alone."""
    heads, length = 200, 700
    q, k, v, scores, _ = inputs(length, heads, heads, 64, batch=1)
    mask = dmattn.IntervalMask.top_k(scores, 60) if kind == "gathered" else None
    out = dmattn.attention(q, k, v, mask, is_causal=kind != "full")
    for head in range(0, heads, 7):
        one = slice(head, head + 1)
        alone = None if mask is None else dmattn.IntervalMask(mask.start, mask.end[:, one])
        assert torch.equal(out[:, one], dmattn.attention(q[:, one], k[:, one], v[:, one], alone, is_causal=kind != "full"))


def test_slots_of_many_rows_of_tiles():
    """More rows than are counted at once."""
    visible = torch.rand(1, 600, 1000, 200, device="cuda") < 0.5
    visible[:, ::3] = True
    arguments = (1000, 200, 1, 1, 128, 128)
    tiles = torch.ops.dmattn.pack_tiles(visible, *arguments)[0]
    assert torch.equal(tiles.cpu(), torch.ops.dmattn.pack_tiles(visible.cpu(), *arguments)[0])


@pytest.mark.parametrize("entry", [-(2**31), -1, 3, 1000, 2**31 - 1])
@pytest.mark.parametrize("which", ["tiles", "rows", "columns"])
def test_a_corrupt_table_reads_nothing_out_of_bounds(which, entry):
    """Lists as long as they were, with entries that make no sense: wrong results are fine, wrong accesses are not."""
    q, k, v, _, grad_out = inputs(500, 2, 2, 64, batch=1)
    mask = dmattn.BlockMask.from_bool(torch.rand(1, 1, 500, 500, device="cuda") < 0.5)
    table = getattr(mask, which).clone()
    (table if which == "tiles" else table[..., 1:]).fill_(entry)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = dmattn.attention(*leaves, dataclasses.replace(mask, **{which: table}))
    torch.autograd.grad(out, leaves, grad_out)
    torch.cuda.synchronize()
