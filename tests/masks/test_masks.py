"""Every mask against its definition, composition with &, and packing of block masks there and back."""

from __future__ import annotations

import re

import dmattn
import pytest
import torch
from dmattn import BlockMask, IntervalMask
from dmattn.masks import detect
from dmattn.testing import per_query_head, poisoned_memory, strategies
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

KINDS = {
    "causal": strategies.causal_masks,
    "sliding_window": strategies.sliding_window_masks,
    "streaming": strategies.streaming_masks,
    "documents": strategies.document_masks,
    "prefix": strategies.prefix_masks,
    "padding": strategies.padding_masks,
    "chunked": strategies.chunked_masks,
    "tree": strategies.tree_masks,
    "top_k": strategies.top_k_masks,
    "raw": strategies.raw_interval_masks,
    "from_bool": strategies.block_masks_from_bool,
    "from_blocks": strategies.block_masks_from_blocks,
    "from_function": strategies.block_masks_from_function,
    "index": strategies.index_masks,
    "combined": strategies.combined_masks,
}


def as_bool(mask, shape):
    """What the mask says, bool [B|1, H|1, Sq, Sk]."""
    made = mask.to_bool()[:, :, : shape.Sq, : shape.Sk] if isinstance(mask, BlockMask) else mask.to_bool(shape.Sq, shape.Sk)
    return per_query_head(made, shape.H)


def assert_same_mask(mask, visible, shape):
    full = (shape.B, shape.H, shape.Sq, shape.Sk)
    assert torch.equal(as_bool(mask, shape).expand(full), per_query_head(visible, shape.H).expand(full))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_to_bool_is_the_definition(device, kind, data):
    shape = data.draw(strategies.shapes())
    drawn = data.draw(KINDS[kind](shape, device))
    assert_same_mask(drawn.mask, drawn.visible, shape)


@pytest.mark.parametrize("sizes", [((2, 3), (4, 2)), ((1, 1), (3, 3))], ids=str)
def test_block_masks_intersect(device, sizes):
    generator = torch.Generator().manual_seed(3)
    shown = [(torch.rand(2, 3, 7, 9, generator=generator) > 0.3).to(device) for _ in sizes]
    blocks = [x[:, :, : -(-7 // rows), : -(-9 // columns)] for x, (rows, columns) in zip(shown, sizes, strict=True)]
    wide = [
        x.repeat_interleave(rows, 2).repeat_interleave(columns, 3)[:, :, :7, :9]
        for x, (rows, columns) in zip(blocks, sizes, strict=True)
    ]
    a, b = (BlockMask.from_blocks(x, size).cut(7, 9) for x, size in zip(blocks, sizes, strict=True))
    assert torch.equal((a & b).cut(7, 9).to_bool(), wide[0] & wide[1])


@pytest.mark.parametrize("kind", ["causal", "from_bool", "combined"])
def test_and_asks_an_operand_that_masks_do_not_know(kind):
    class Stranger:
        def __rand__(self, mask):
            return "asked"

    block = BlockMask.from_bool(torch.ones(4, 4, dtype=torch.bool))
    mask = {"causal": IntervalMask.causal(4), "from_bool": block, "combined": IntervalMask.causal(4) & block}[kind]
    assert mask.__and__(3) is NotImplemented
    assert mask & Stranger() == "asked"
    with pytest.raises(TypeError, match="unsupported operand"):
        mask & 3


def test_the_intersection_of_tables_of_blocks_serves_what_both_serve():
    small, large = (
        BlockMask.from_blocks(torch.ones(1, 1, *shape, dtype=torch.bool), size) for shape, size in (((2, 3), 16), ((1, 2), 40))
    )
    both = small & large
    assert both.lengths == (32, 48)
    served = [(Sq, Sk) for Sq in range(1, 60) for Sk in range(1, 90) if both.fits(Sq, Sk)]
    assert served == [(Sq, Sk) for Sq in range(17, 33) for Sk in range(41, 49)]
    interval = IntervalMask.causal(41)
    assert torch.equal(((interval & small) & large).to_bool(20, 41), interval.to_bool(20, 41))
    assert torch.equal((small & (large & interval)).to_bool(20, 41), interval.to_bool(20, 41))


def test_interval_and_interval_stays_a_base_for_selection():
    documents = IntervalMask.documents(8, torch.tensor([0, 5, 8]))
    both = documents & IntervalMask.padding(8, torch.tensor([6, 8]))
    assert both.segments == "causal"
    assert (both & IntervalMask.causal(8)).segments == "causal"
    assert (both & IntervalMask.sliding_window(8, 3)).segments is None
    assert IntervalMask.padding(8, 3).segments == "whole"


def test_device_argument_and_defaults():
    for mask in (
        IntervalMask.causal(5, device="meta"), IntervalMask.sliding_window(5, 2, device="meta"), IntervalMask.prefix(5, 2, device="meta"),
        IntervalMask.streaming(5, 1, 2, device="meta"), IntervalMask.padding(5, 3, device="meta"), IntervalMask.chunked(5, 2, device="meta"),
    ):  # fmt: skip
        assert mask.start.is_meta
        assert mask.end.is_meta


# Intervals found in other masks -----------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_from_bool_and_from_function_find_the_intervals(device, data):
    shape = data.draw(strategies.shapes(max_length=130))
    drawn = data.draw(strategies.interval_masks(shape, device))
    visible = drawn.visible.expand(-1, -1, shape.Sq, shape.Sk)
    assert torch.equal(IntervalMask.from_bool(visible).to_bool(shape.Sq, shape.Sk), visible)
    B, H = visible.shape[:2]
    made = IntervalMask.from_function(lambda b, h, q, k: visible[b, h, q, k], B, H, shape.Sq, shape.Sk, device=device)
    assert torch.equal(made.to_bool(shape.Sq, shape.Sk), visible)


@given(data=st.data())
def test_from_bool_raises_if_and_only_if_a_key_has_no_interval(device, data):
    shape = data.draw(strategies.shapes(max_length=70, min_length=1))
    visible = data.draw(strategies.bool_patterns((shape.B, shape.H, shape.Sq, shape.Sk), device))
    rises = (visible[:, :, 1:] & ~visible[:, :, :-1]).sum(2) + visible[:, :, 0]
    try:
        mask = IntervalMask.from_bool(visible)
    except ValueError as error:
        b, h, k = (int(n) for n in re.search(r"key (\d+) of batch (\d+), head (\d+)", str(error)).group(2, 3, 1))
        assert rises[b, h, k] > 1
    else:
        assert (rises <= 1).all()
        assert torch.equal(mask.to_bool(shape.Sq, shape.Sk), visible)


@pytest.mark.parametrize("gap", [1, 2])
def test_from_bool_finds_a_gap(device, gap):
    visible = torch.zeros(1, 2, 9, 4, dtype=torch.bool, device=device)
    visible[:, :, 2:8] = True
    assert torch.equal(IntervalMask.from_bool(visible).to_bool(9, 4), visible)
    visible[0, 1, 4 : 4 + gap, 3] = False
    with pytest.raises(ValueError, match=rf"key 3 of batch 0, head 1 visible to {6 - gap} of the queries from 2 to 7"):
        IntervalMask.from_bool(visible)


def test_from_function_looks_at_few_queries_at_a_time(monkeypatch):
    monkeypatch.setattr(detect, "PAIRS_AT_ONCE", 300)
    blocks = []

    def window(b, h, q, k):
        blocks.append(q.numel())
        return (k <= q + 20) & (q + 20 - k <= 11)

    mask = IntervalMask.from_function(window, None, None, 37, 57)
    assert max(blocks) == 300 // 57
    assert sum(blocks) == 37
    assert torch.equal(mask.to_bool(37, 57), IntervalMask.sliding_window(57, 11).to_bool(37, 57))


def test_from_bool_while_tracing_checks_when_the_program_runs():
    traced = torch.compile(
        lambda mask: IntervalMask.from_bool(mask).to_bool(*mask.shape), fullgraph=True, backend="eager", dynamic=True
    )
    good = torch.ones(9, 12, dtype=torch.bool).tril(3)
    assert torch.equal(traced(good)[0, 0], good)
    with pytest.raises(RuntimeError, match="one unbroken run"):
        traced(good.flip(0) ^ good)


# Other forms ------------------------------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_to_tensor_there_and_back(device, data):
    shape = data.draw(strategies.shapes(max_length=130))
    drawn = data.draw(strategies.interval_masks(shape, device))
    tensor = drawn.mask.to_tensor(shape.Sk)
    assert tensor.dtype == torch.int32
    assert tensor.shape == (*drawn.mask.shape[:2], 2, shape.Sk)
    assert tensor.is_contiguous()
    assert_same_mask(IntervalMask.from_tensor(tensor), drawn.visible, shape)


@given(data=st.data())
def test_shift_and_alive_are_the_definitions(device, data):
    """What a mask shows at position p it shows at p + n when shifted by n; alive(p) is one row of it."""
    shape = data.draw(strategies.shapes(max_length=130, min_length=1))
    mask = data.draw(strategies.interval_masks(shape, device)).mask
    numbers = data.draw(st.lists(st.integers(-shape.Sk - 2, shape.Sk + 2), min_size=shape.B, max_size=shape.B))
    as_int = data.draw(st.booleans())
    n = numbers[0] if as_int else torch.tensor(numbers, device=device)
    shifted = mask.shift(n)
    heads = mask.shape[1]
    for b, by in enumerate([numbers[0]] * shape.B if as_int else numbers):
        for p in (-3, 0, shape.Sk // 2, shape.Sk - 1, shape.Sk + 5):
            start, end = (per_query_head(x, heads).expand(shape.B, -1, -1)[b].long() for x in (mask.start, mask.end))
            row = ((start <= p) & (p < end)).expand(heads, -1)
            if mask.any_length:
                row = row.expand(-1, 1)
            assert torch.equal(mask.alive(p).expand(shape.B, -1, -1)[b], row)
            assert torch.equal(mask.alive(torch.tensor(p)), mask.alive(p))
            assert torch.equal(shifted.alive(p + by).expand(shape.B, -1, -1)[b], row)


def test_shift_keeps_what_has_no_end_and_never_wraps():
    start = torch.tensor([dmattn.ALWAYS, 3, 2**31 - 5, dmattn.FOREVER], dtype=torch.int32)
    end = torch.tensor([dmattn.FOREVER, dmattn.ALWAYS, 9, 7], dtype=torch.int32)
    keys = IntervalMask(start, end)
    for n in (2**31 - 2, -(2**31) + 2, 100, torch.tensor(2**40), torch.tensor([-(2**62)])):
        moved = keys.shift(n)
        assert moved.start[0, 0, 0] == dmattn.ALWAYS
        assert moved.end[0, 0, 0] == dmattn.FOREVER
        assert moved.end[0, 0, 1] == dmattn.ALWAYS
        assert moved.start[0, 0, 3] == dmattn.FOREVER
        later = int(n) > 0
        assert (moved.start[0, 0, 2] >= 2**31 - 5) if later else (moved.start[0, 0, 2] < 2**31 - 5)
    assert IntervalMask.documents(8, torch.tensor([0, 5, 8])).shift(1).segments is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_hidden(side):
    real = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    seen = IntervalMask.padding(5, real.sum(1), side).to_bool(2, 5)
    assert torch.equal(seen, (real if side == "right" else real.flip(1))[:, None, None].expand(3, 1, 2, 5))


def test_positions_of_other_sequences_are_refused():
    mask = IntervalMask.padding(8, torch.tensor([3, 8]))
    for name, call in (("n", mask.shift), ("position", mask.alive)):
        with pytest.raises(ValueError, match=rf"{name}: expected an int or a tensor \[\] or \[B\] with B=2, got \[3\]"):
            call(torch.tensor([1, 2, 3]))


def test_tokens_of_one_node_see_each_other():
    enter = torch.tensor([0, 0, 1, 1, 2])  # a node of two tokens, its child of two, and that one's child
    leave = torch.tensor([3, 3, 3, 3, 3])
    seen = IntervalMask.tree(enter, leave).to_bool(5, 5)[0, 0]
    assert seen.int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    causal = IntervalMask.tree(enter, leave) & IntervalMask.causal(5)
    assert torch.equal(causal.to_bool(5, 5)[0, 0], torch.ones(5, 5, dtype=torch.bool).tril())


def test_a_chain_as_long_as_can_be_is_causal():
    parents = torch.arange(-1, (1 << 20) - 1, dtype=torch.int32)
    assert (IntervalMask.tree_from_parents(parents).end == 1 << 20).all()


def test_trees_trace_with_any_length():
    traced = torch.compile(
        lambda parents: IntervalMask.tree_from_parents(parents).to_tensor(), fullgraph=True, backend="eager", dynamic=True
    )
    for nodes in (7, 12, 40):
        parents = torch.tensor(strategies.random_tree(nodes, nodes, 0.5)[0])
        assert torch.equal(traced(parents), IntervalMask.tree_from_parents(parents).to_tensor())


# Packing ----------------------------------------------------------------------------------------------------------------------------


def assert_consistent(mask: BlockMask) -> None:
    """tiles, rows, columns and bits say the same, and only partial tiles have bits."""
    tiles = mask.tiles
    tables, tiles_q, tiles_k = tiles.flatten(0, 1), tiles.shape[2], tiles.shape[3]
    partial = tiles[tiles >= 2]
    assert sorted(partial.tolist()) == list(range(2, 2 + partial.numel()))
    assert mask.bits.shape[0] == max(2, partial.numel())  # never 0 or 1, sizes on which tracing would specialise
    for lists, table in ((mask.rows, tables), (mask.columns, tables.transpose(1, 2))):
        occupied = table != 0
        flat = lists.flatten(0, 1)
        assert torch.equal(flat[..., 0].long(), occupied.sum(-1))
        for listed, row in zip(flat.flatten(0, 1), occupied.flatten(0, 1), strict=True):
            assert listed[1 : 1 + int(listed[0])].tolist() == row.nonzero()[:, 0].tolist()
    assert mask.rows.shape == (*tiles.shape[:2], tiles_q, tiles_k + 1)
    assert mask.columns.shape == (*tiles.shape[:2], tiles_k, tiles_q + 1)


@pytest.mark.parametrize("queries", [1, 129, 257])
def test_a_tile_of_a_single_row_is_partial_where_the_row_is(device, queries):
    visible = torch.ones(1, 1, queries, 300, dtype=torch.bool, device=device)
    visible[..., -1, ::3] = False
    assert torch.equal(BlockMask.from_bool(visible).to_bool(), visible)
    alike = visible[:, :, -1:].expand(-1, -1, queries, -1)  # one row stands for all
    assert torch.equal(BlockMask.from_bool(alike).to_bool(), alike)


@pytest.mark.parametrize("tile", [(32, 32), (64, 32), (32, 128), (128, 128), (96, 64)])
def test_packing_ops_in_every_tile_shape(device, tile):
    mask = torch.rand(2, 3, 150, 170, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[:, :, 20:140, 30:150] = True
    mask[:, :, :, 165:] = False
    mask = mask.to(device).transpose(0, 1).contiguous().transpose(0, 1)
    with poisoned_memory(mask):
        tiles, rows, columns = torch.ops.dmattn.pack_tiles(mask, 150, 170, 1, 1, *tile)
        bits = torch.ops.dmattn.pack_bits(mask, tiles, 150, 170, 1, 1, *tile, int((tiles >= 2).sum()))
    packed = BlockMask(tiles, rows, columns, bits, 150, 170)
    assert torch.equal(packed.to_bool(), mask)
    assert_consistent(packed)


@pytest.mark.parametrize("layout", ["rows", "parts of rows", "columns"])
def test_every_byte_but_0_is_true(device, layout):
    """A bool tensor that is a view of bytes may hold others than 0 and 1; torch takes them for true."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (200, 304), dtype=torch.uint8, generator=generator)
    data *= torch.rand(200, 304, generator=generator) < 0.5
    data[:128, :128] = 2
    data = data.to(device)
    data = {"rows": data, "parts of rows": data[:, 3:-2], "columns": data.t()}[layout]
    assert torch.equal(BlockMask.from_bool(data.view(torch.bool)).to_bool()[0, 0], data != 0)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_bits_beyond_the_lengths_are_zero_in_parts_of_a_wider_mask(device, is_transposed):
    """Where memory beyond the last query and key holds more of the mask, all of it True; its strides fit no fast way."""
    wide = torch.ones(1, 2, 90, 91, dtype=torch.bool, device=device)
    wide[:, :, 3, 3] = False  # else the tile is full and has no bits
    part = (wide.transpose(2, 3) if is_transposed else wide)[:, :, :37, :41]
    mask = BlockMask.from_bool(part)
    tiles = mask.bits[: int((mask.tiles >= 2).sum())]
    assert tiles.numel()
    assert not tiles[:, 37:].any()
    assert not tiles[:, :, 2:].any()
    assert not (tiles[:, :, 1] >> (41 - 32)).any()


def test_too_few_slots_leave_bits_out_and_touch_nothing_else(device):
    mask = torch.rand(1, 1, 64, 64, generator=torch.Generator().manual_seed(0)).to(device) < 0.5
    tiles, _, _ = torch.ops.dmattn.pack_tiles(mask, 64, 64, 1, 1, 32, 32)
    all_bits = torch.ops.dmattn.pack_bits(mask, tiles, 64, 64, 1, 1, 32, 32, 4)
    assert torch.equal(torch.ops.dmattn.pack_bits(mask, tiles, 64, 64, 1, 1, 32, 32, 2), all_bits[:2])
    assert torch.equal(torch.ops.dmattn.pack_bits(mask, tiles, 64, 64, 1, 1, 32, 32, 6)[4:], torch.zeros_like(all_bits[:2]))


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(256, 256), (200, 300), (128, 77)])
@pytest.mark.parametrize("name", ["causal", "sliding", "per_head", "documents"])
def test_from_flex(name, lengths):
    Sq, Sk = lengths
    document = torch.arange(max(lengths)) // 50
    functions = {
        "causal": lambda b, h, q, k: q >= k,
        "sliding": lambda b, h, q, k: (q >= k) & (q - k < 40),
        "per_head": lambda b, h, q, k: (q + h) % 3 <= k % 3 + b,
        "documents": lambda b, h, q, k: document[q] == document[k],
    }
    flex = create_block_mask(functions[name], 2, 3, Sq, Sk, device="cpu", BLOCK_SIZE=64)
    grid = torch.meshgrid(*(torch.arange(n) for n in (2, 3, Sq, Sk)), indexing="ij")
    mask = BlockMask.from_flex(flex)
    assert torch.equal(mask.to_bool(), functions[name](*grid))
    assert_consistent(mask)


def test_from_flex_default_block_size_and_no_batch():
    flex = create_block_mask(lambda b, h, q, k: q >= k, None, None, 300, 300, device="cpu")
    assert torch.equal(BlockMask.from_flex(flex).to_bool()[0, 0], torch.ones(300, 300, dtype=torch.bool).tril())


def test_documents_are_in_order_and_every_mask_serves_its_own_lengths():
    documents, ends = IntervalMask.documents(30, torch.tensor([0, 10, 30])), torch.arange(1, 31, dtype=torch.int32)[None, None]
    assert documents.is_in_order
    assert not IntervalMask(torch.zeros_like(ends), ends).is_in_order
    assert documents.serves(30)
    assert not documents.serves(31)


@given(data=st.data())
def test_visible_pairs_counts_the_mask(data):
    shape = data.draw(strategies.shapes(max_length=130))
    drawn = data.draw(strategies.masks(shape).filter(lambda m: not isinstance(m.mask, torch.Tensor)))
    causal = data.draw(st.booleans())
    full = torch.ones(shape.B, shape.H, shape.Sq, shape.Sk, dtype=torch.bool)
    expected = full if drawn.visible is None else full & per_query_head(drawn.visible, shape.H)
    expected = expected.tril(shape.Sk - shape.Sq) if causal else expected
    count = dmattn.visible_pairs(drawn.mask, shape.Sq, shape.Sk, is_causal=causal, batch=shape.B, heads=shape.H)
    assert count == int(expected.sum())


def test_tiles_beyond_the_lengths_are_empty_though_a_block_reaches_them(device):
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    tiles, rows, _ = torch.ops.dmattn.pack_tiles(mask, 53, 53, 200, 200, 64, 64)
    assert tiles[0, 0].tolist() == [[1, 0], [0, 0]]
    assert rows[0, 0, :, 0].tolist() == [1, 0]


def test_documents_are_told_by_ids():
    """Neighbours with equal ids, 0 among them, are a document; negative ids are padding."""
    ids = torch.tensor([[0, 0, 3, 3, 0, -1], [-2, 1, 1, 0, 0, 0]])
    expected = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, None]
    expected[0, :2, 4] = expected[0, 4, :2] = False  # another document with the same id
    assert torch.equal(IntervalMask.documents(6, ids=ids, is_causal=False).to_bool(6, 6)[:, 0], expected)


def test_a_table_of_blocks_beyond_the_longest_sequence_is_refused():
    with pytest.raises(ValueError, match=r"block_size: expected blocks that cover lengths up to \d+, got 3 of 1048576"):
        BlockMask.from_blocks(torch.ones(1, 3, dtype=torch.bool), (128, 1 << 20))
