# ruff: noqa: E501  (one case a line, however long)
"""Masks as data: moved, indexed, joined, collated, saved, kept in modules, passed through pytrees; and what their constructors refuse."""

from __future__ import annotations

import copy
import io
import json
import re

import dmattn
import pytest
import torch
from dmattn import BlockMask, CombinedMask, IndexMask, IntervalMask
from dmattn.masks import collate
from dmattn.masks.data import MaskData
from dmattn.masks.heads import same_heads
from dmattn.nn import MaskBuffer
from dmattn.testing import AttentionCase, assert_matches_reference, per_query_head, strategies
from hypothesis import given
from hypothesis import strategies as st
from programs import assert_compiles_once, assert_exports, exported
from torch.export import Dim
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

SQ, SK = 40, 50


def bools(*size, seed=0):
    return torch.rand(size, generator=torch.Generator().manual_seed(seed)) < 0.5


def interval_of(batch=3):
    return IntervalMask.padding(SK, torch.arange(batch) * 10 + 5) & IntervalMask.sliding_window(SK, 9)


def block_of(batch=3, seed=0):
    return BlockMask.from_bool(bools(batch, 2, SQ, SK, seed=seed), 32)


def index_of(batch=3):
    lists = torch.randint(-1, SK // 2, (batch, 2, SQ, 7), generator=torch.Generator().manual_seed(2))
    return IndexMask(lists, 2, is_causal=True, local=3, sink_keys=1)


KINDS = {
    "interval": interval_of,
    "block": block_of,
    "index": index_of,
    "combined": lambda batch=3: interval_of(batch) & block_of(batch),
    "interval & index": lambda batch=3: interval_of(batch) & index_of(batch),
    "block & index": lambda batch=3: block_of(batch) & index_of(batch),
    "all three": lambda batch=3: interval_of(batch) & block_of(batch) & index_of(batch),
}
MASKS = {name: make() for name, make in KINDS.items()}


def says(mask, Sq=SQ, Sk=SK):
    """What a mask says, in booleans."""
    return mask.to_bool() if isinstance(mask, BlockMask) else mask.to_bool(Sq, Sk)


def same(a, b):
    return type(a) is type(b) and torch.equal(says(a), says(b))


def queries(batch=3, length=SQ, keys=SK, seed=0):
    sizes = ((batch, 4, length, 16), (batch, 2, keys, 16), (batch, 2, keys, 16))
    return [strategies.random_tensor(size, seed + i) for i, size in enumerate(sizes)]


@pytest.fixture(params=MASKS)
def mask(request):
    return MASKS[request.param]


# Devices ----------------------------------------------------------------------------------------------------------------------------


def test_to_another_device(mask):
    assert mask.device == torch.device("cpu")
    for device in ("meta", torch.device("meta")):
        moved = mask.to(device=device, non_blocking=True)
        assert type(moved) is type(mask)
        assert moved.device.type == "meta"
        assert all(leaf.is_meta for leaf in pytree.tree_leaves(moved) if isinstance(leaf, torch.Tensor))
        assert moved.shape == mask.shape
    assert mask.device == torch.device("cpu")


def test_to_where_it_is_already_is_the_mask_itself(mask):
    assert mask.to("cpu") is mask
    assert mask.cpu() is mask


@pytest.mark.parametrize("other", [torch.float16, torch.zeros(1), None, True])
def test_to_takes_a_device_only(mask, other):
    with pytest.raises(TypeError, match=r"device: expected a torch.device, a str or an int \(a mask keeps its dtype\), got"):
        mask.to(other)


def test_what_moves_keeps_all_it_knows():
    for made in (IntervalMask.documents(9, torch.tensor([0, 4, 9])), IntervalMask.padding(1, 1)):
        moved = made.to("meta")
        assert (moved.segments, moved.any_length) == (made.segments, made.any_length)
    table = BlockMask.from_blocks(bools(2, 2), 20)
    assert (table.to("meta").lengths, table.to("meta").block_size) == ((40, 40), (20, 20))


@pytest.mark.parametrize("kind", ["block", "combined"])
def test_on_the_way_to_a_gpu_small_tiles_become_tiles_of_128(kind):
    made = MASKS[kind] if kind == "combined" else BlockMask.from_blocks(bools(2, 2), (20, 25))
    ready = made._for_device(torch.device("cuda"))
    block = ready.block if kind == "combined" else ready
    assert block.tile == (128, 128)
    assert block.block_size == (made.block if kind == "combined" else made).block_size
    assert torch.equal(says(ready), says(made))
    assert ready._for_device(torch.device("cuda")) is ready


@pytest.mark.gpu
def test_to_a_gpu(mask):
    moved = mask.cuda()
    assert moved.device.type == "cuda"
    assert same(moved.cpu(), mask)
    pinned = mask.pin_memory()
    assert pinned.is_pinned()
    q, k, v = (t.bfloat16().cuda() for t in queries())
    visible = per_query_head(says(mask), 4).cuda()
    assert_matches_reference(AttentionCase(q, k, v, pinned.to("cuda", non_blocking=True), visible))


def test_pinning_reaches_every_tensor(mask, monkeypatch):
    pinned = set()

    def pin(tensor):
        copied = tensor.clone()
        pinned.add(id(copied))
        return copied

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: id(tensor) in pinned)
    assert not mask.is_pinned()
    made = torch.utils.data._utils.pin_memory.pin_memory({"mask": mask})["mask"]  # what a DataLoader does
    assert made.is_pinned()
    assert same(made, mask)


def test_accelerate_moves_masks(mask):
    operations = pytest.importorskip("accelerate.utils.operations")
    moved = operations.send_to_device({"x": torch.zeros(3), "mask": mask}, torch.device("meta"), non_blocking=True)
    assert moved["mask"].device.type == "meta"


# Batches ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 2, -1, -3])
def test_an_int_gives_one_sequence(mask, index):
    part = mask[index]
    assert part.shape[0] == 1
    assert torch.equal(says(part)[0], says(mask)[index])


@pytest.mark.parametrize("index", [slice(1, None), slice(None, None, 2), slice(3, 3), torch.tensor([2, 0, 2]), torch.tensor([True, False, True])],
                         ids=str)  # fmt: skip
def test_a_slice_or_a_tensor_gives_some(mask, index):
    part = mask[index]
    assert torch.equal(says(part), says(mask)[index])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [0, 7, -2, slice(0, 5), torch.tensor([0, 0])], ids=str)
def test_a_batch_of_one_serves_every_index(kind, index):
    one = KINDS[kind](1)
    assert one[index] is one


@pytest.mark.parametrize("index", [3, -4])
def test_an_index_outside_the_batch(mask, index):
    with pytest.raises(IndexError, match=f"index: expected -3 <= index < 3 for a mask with a batch of 3, got {index}"):
        mask[index]


@pytest.mark.parametrize(
    "index", [(0, 1), None, True, 1.0, "0", torch.tensor([1.0]), torch.tensor(1), torch.zeros(1, 1).long()], ids=str
)
def test_what_is_no_index(mask, index):
    with pytest.raises(TypeError, match="index: expected"):
        mask[index]


def test_masks_are_not_iterable(mask):
    with pytest.raises(TypeError, match="not iterable"):
        list(mask)


def test_cat_undoes_indexing(mask):
    joined = type(mask).cat([mask[0], mask[1:]])
    assert same(joined, mask)
    block = getattr(joined, "block", joined)
    if isinstance(block, BlockMask):  # parts of one mask share their bits, and still do
        assert block.bits.shape == getattr(mask, "block", mask).bits.shape
    assert same(type(mask).stack([mask[b] for b in range(3)]), mask)


@given(data=st.data())
def test_cat_says_what_its_parts_say(data):
    shape = data.draw(strategies.shapes(max_length=70))
    both = lambda shape: strategies.combined_masks(shape, kinds=("interval", "block"))  # noqa: E731
    kind = data.draw(st.sampled_from((strategies.interval_masks, strategies.block_masks, both)))
    drawn = data.draw(st.lists(kind(shape), min_size=1, max_size=3))
    masks = [d.mask.cut(shape.Sq, shape.Sk) if isinstance(d.mask, BlockMask) else d.mask for d in drawn]
    if isinstance(masks[0], CombinedMask):
        masks = [CombinedMask(m.interval, m.block.cut(shape.Sq, shape.Sk)) for m in masks]
    rows = (shape.H, shape.Sq, shape.Sk)
    expected = [per_query_head(d.visible, shape.H).expand(m.shape[0], *rows) for d, m in zip(drawn, masks, strict=True)]
    joined = type(masks[0]).cat(masks)
    assert joined.shape[0] == sum(m.shape[0] for m in masks)
    assert torch.equal(per_query_head(says(joined, shape.Sq, shape.Sk), shape.H).expand(-1, *rows), torch.cat(expected))


def test_cat_of_block_masks_in_different_tiles():
    small, large = BlockMask.from_bool(bools(SQ, SK, seed=1), 32), BlockMask.from_bool(bools(SQ, SK, seed=2), 128)
    assert small.tile != large.tile
    joined = BlockMask.cat([small, large])
    assert torch.equal(says(joined), torch.cat([says(small), says(large)]))


def test_cat_keeps_what_a_base_is_only_when_all_agree():
    a, b = IntervalMask.documents(9, torch.tensor([0, 4, 9])), IntervalMask.documents(9, torch.tensor([0, 9]))
    whole = IntervalMask.padding(9, 4)
    assert IntervalMask.cat([a, b]).segments == "causal"
    assert IntervalMask.cat([whole, whole]).segments == "whole"
    assert IntervalMask.cat([a, whole]).segments is None
    assert IntervalMask.cat([a, IntervalMask.sliding_window(9, 2)]).segments is None


def test_default_collate_stacks_masks(mask):
    samples = [{"x": torch.full((2,), b), "mask": mask[b]} for b in range(3)]
    batch = default_collate(samples)
    assert batch["x"].shape == (3, 2)
    assert same(batch["mask"], mask)
    assert same(collate([mask[b] for b in range(3)]), mask)


@pytest.mark.parametrize(
    "given", [[], [torch.ones(2)], torch.ones(2), MASKS["interval"]], ids=["nothing", "tensors", "tensor", "mask"]
)
def test_collate_of_something_else(given):
    with pytest.raises(TypeError, match="masks: expected a list of masks, got"):
        collate(given)


# What a mask says of itself ---------------------------------------------------------------------------------------------------------


def test_repr_says_what_it_is_and_not_the_data():
    documents = IntervalMask.documents(4096, torch.tensor([0, 1000, 4096])) & IntervalMask.padding(4096, torch.tensor([7, 4096]))
    assert repr(documents) == (
        "IntervalMask(shape=[2, 1, 4096], start=[1, 1, 4096], end=[2, 1, 4096], dtype=int32, device='cpu', segments='causal')"
    )
    everywhere = IntervalMask(torch.zeros(1, dtype=torch.int32), torch.ones(2, 1, dtype=torch.int32))
    assert repr(everywhere).startswith("IntervalMask(shape=[1, 2, any], start=[1, 1, 1], end=[1, 2, 1]")
    block = BlockMask.from_blocks(bools(2, 1, 4, 3), (64, 128))
    assert repr(block) == (
        "BlockMask(shape=[2, 1, 256, 384], tiles=[2, 1, 6, 5] of 64x128, slots=2, block_size=(64, 128), dtype=int32, device='cpu')"
    )
    both = IntervalMask.causal(384) & block
    assert repr(both).startswith("CombinedMask(shape=[2, 1, 256, 384], interval=IntervalMask(shape=[1, 1, 384]")
    assert repr(block) in repr(both)
    assert repr(index_of()) == (
        "IndexMask(shape=[3, 2, 40, 7], block_size=2, is_causal=True, local=3, sink_keys=1, dtype=int32, device='cpu')"
    )
    assert repr(MASKS["block & index"]).startswith("CombinedMask(shape=[3, 2, 40, 50], block=BlockMask(")
    assert (everywhere & index_of()).shape == (3, 2, 40, 1)


def test_repr_of_placeholders(mask):
    assert "'leaf'" in repr(pytree.tree_map(lambda leaf: "leaf", mask))


def test_shapes(mask):
    assert mask.shape == {
        IntervalMask: (3, 1, SK), BlockMask: (3, 2, SQ, SK), IndexMask: (3, 2, SQ, 7), CombinedMask: (3, 2, SQ, SK)
    }[type(mask)]  # fmt: skip
    assert mask[0].shape == (1, *mask.shape[1:])


# Saving -----------------------------------------------------------------------------------------------------------------------------


def test_saved_copied_and_pickled(mask):
    file = io.BytesIO()
    torch.save({"mask": mask}, file)
    file.seek(0)
    assert same(torch.load(file, weights_only=True)["mask"], mask)
    assert same(copy.deepcopy(mask), mask)


class Windowed(torch.nn.Module):
    def __init__(self, mask, persistent=True):
        super().__init__()
        self.visible = MaskBuffer(mask, persistent=persistent)
        self.proj = torch.nn.Linear(16, 16)

    def forward(self, q, k, v):
        return dmattn.attention(self.proj(q), k, v, self.visible.mask)


def test_a_mask_moves_with_its_module(mask):
    module = Windowed(mask)
    assert same(module.visible.mask, mask)
    assert module.half().visible.mask.device == torch.device("cpu")
    assert all(t.dtype == torch.int32 for t in module.visible.mask._tensors())
    assert module.to("meta").visible.mask.device.type == "meta"
    assert module.visible.mask.shape == mask.shape
    assert not list(module.visible.parameters())


def test_a_module_saves_its_mask(mask):
    module = Windowed(mask)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(isinstance(value, torch.Tensor) for value in state.values())  # safetensors takes nothing else
    blanks = {  # of equal shapes: other values, one partial tile fewer
        "interval": interval_of()[torch.tensor([0, 0, 0])],
        "block": BlockMask.from_bool(torch.zeros(3, 2, SQ, SK, dtype=torch.bool), 32),
        "index": index_of()[torch.tensor([0, 0, 0])],
    }
    parts = {name: blank for name, blank in blanks.items() if type(blank) is type(mask) or getattr(mask, name, None) is not None}
    blank = CombinedMask(**parts) if isinstance(mask, CombinedMask) else next(iter(parts.values()))
    for assign in (False, True):
        other = Windowed(blank)
        assert not same(other.visible.mask, mask)
        other.load_state_dict(state, assign=assign)
        assert same(other.visible.mask, mask)
        assert torch.equal(other(*queries()), module(*queries()))
    assert same(copy.deepcopy(module).visible.mask, mask)


def test_loading_changes_no_mask_that_is_in_use(mask):
    module, before = Windowed(mask), copy.deepcopy(mask)
    held = module.visible.mask
    module.load_state_dict(
        {name: torch.zeros_like(value) for name, value in module.state_dict().items() if "_extra" not in name}, strict=False
    )
    assert not same(module.visible.mask, before)
    assert same(mask, before)
    assert same(held, before)


def test_a_state_dict_holds_what_is_not_in_the_tensors():
    base = IntervalMask.documents(12, torch.tensor([0, 5, 12]), is_causal=False)
    holder = MaskBuffer(IntervalMask.sliding_window(12, 3))
    holder.load_state_dict(MaskBuffer(base).state_dict())
    assert holder.mask.segments == "whole"
    holder.load_state_dict(MaskBuffer(IntervalMask.sliding_window(12, 3)).state_dict())
    assert holder.mask.segments is None
    block = MaskBuffer(BlockMask.from_blocks(bools(2, 2), 30))
    block.load_state_dict(MaskBuffer(BlockMask.from_bool(bools(50, 40))).state_dict())
    assert (block.mask.lengths, block.mask.block_size) == ((50, 40), (1, 1))
    with pytest.raises(ValueError, match="state_dict: expected the state of an IntervalMask"):
        holder.load_state_dict(block.state_dict(), strict=False)


def test_a_state_dict_from_before_masks_knew_how_many_keys_a_query_sees():
    holder, saved = (MaskBuffer(IntervalMask.documents(12, torch.tensor([0, size, 12]))) for size in (3, 5))
    holder.load_state_dict({**saved.state_dict(), "_extra_state": saved.state_dict()["_extra_state"][:2]})
    assert torch.equal(holder.mask.to_bool(12, 12), IntervalMask.documents(12, torch.tensor([0, 5, 12])).to_bool(12, 12))
    assert (holder.mask.segments, holder.mask.most_keys) == ("causal", 0)


@pytest.mark.parametrize("facts", [[0, 3, 0], [0, -1, 0], [2, 0, 0], [0, 0, -1], [0, 3], [0], None], ids=str)
@pytest.mark.parametrize("made", [torch.tensor, list], ids=["tensor", "list"])
def test_facts_of_no_interval_mask_are_refused(facts, made):
    holder = MaskBuffer(IntervalMask.causal(5))
    facts = None if facts is None else made(facts)
    with pytest.raises(ValueError, match="state_dict: expected the state of an IntervalMask"):
        holder.load_state_dict({**holder.state_dict(), "_extra_state": facts})


@pytest.mark.parametrize(("kind", "facts"), [("a BlockMask", (2000, 40, 1, 1)), ("a BlockMask", (50, -40, 1, 1)),
                                             ("a BlockMask", (50, 40, 0, 1)), ("an IndexMask", (3, 1, 0, 0))], ids=str)  # fmt: skip
def test_facts_that_do_not_fit_the_tables_are_refused(kind, facts):
    holder = MaskBuffer(BlockMask.from_bool(bools(50, 40)) if kind == "a BlockMask" else index_of())
    with pytest.raises(ValueError, match=rf"state_dict: expected the state of {kind}, got \[{facts[0]}, "):
        holder.load_state_dict({**holder.state_dict(), "_extra_state": torch.tensor(facts)})


def test_the_state_of_an_index_mask_that_is_not_causal_is_loaded():
    mask = IndexMask(index_of().indices)
    holder = MaskBuffer(index_of())
    holder.load_state_dict(MaskBuffer(mask).state_dict())
    assert same(holder.mask, mask)


def test_a_mask_that_is_not_saved(mask):
    module = Windowed(mask, persistent=False)
    assert set(module.state_dict()) == {"proj.weight", "proj.bias"}
    module.load_state_dict(Windowed(mask, persistent=False).state_dict())
    assert same(module.visible.mask, mask)


def test_a_module_with_a_mask_compiles_and_exports(mask):
    module = Windowed(mask)
    expected = module(*queries())
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(*queries()), expected)
    program = torch.export.export(module, tuple(queries()))
    assert torch.equal(program.module()(*queries()), expected)


# Pytrees ----------------------------------------------------------------------------------------------------------------------------

LENGTH = Dim("length", min=2, max=4096)


class Attends(torch.nn.Module):
    def forward(self, q, k, v, mask):
        return dmattn.attention(q, k, v, mask)


class Selects(torch.nn.Module):
    def forward(self, q, k, v, scores, base):
        return dmattn.dynamic_mask_attention(q, k, v, scores, 8, base=base, is_causal=False)


INTERVALS = {
    "causal": lambda n: IntervalMask.causal(n),
    "sliding_window": lambda n: IntervalMask.sliding_window(n, 3),
    "streaming": lambda n: IntervalMask.streaming(n, 2, 5),
    "documents": lambda n: IntervalMask.documents(n, torch.tensor([0, n // 3, n])),
    "documents, not causal": lambda n: IntervalMask.documents(n, torch.tensor([0, n // 3, n]), is_causal=False),
    "prefix": lambda n: IntervalMask.prefix(n, 4),
    "padding": lambda n: IntervalMask.padding(n, n // 2),
    "top_k": lambda n: IntervalMask.top_k(strategies.random_tensor((1, 1, n), 5), 4),
    "top_k, local": lambda n: IntervalMask.top_k(strategies.random_tensor((1, 1, n), 5), 4, local=3, sink_keys=2),
    "hand-made": lambda n: IntervalMask(torch.zeros(n, dtype=torch.int32), torch.full((n,), 7, dtype=torch.int32)),
}


def test_leaves_of_interval_masks_are_tensors_and_all_trees_equal():
    trees = [pytree.tree_flatten(make(9)) for make in INTERVALS.values()]
    for leaves, spec in trees:
        assert len(leaves) == 2
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        assert spec == trees[0][1]
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    assert pytree.tree_flatten(IntervalMask(torch.zeros(1).int(), torch.zeros(1).int()))[1] != trees[0][1]


def test_a_tree_of_a_masks_tensors(mask):
    leaves, spec = pytree.tree_flatten(mask)
    assert not any(leaf is None or isinstance(leaf, MaskData) for leaf in leaves)
    assert same(pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec))), mask)


def test_masks_of_no_heads_go_together():
    assert [bound.shape[1] for bound in same_heads(torch.zeros(1, 0, 5), torch.zeros(1, 0, 5), "end")] == [0, 0]


def test_trees_of_earlier_programs_name_no_parts():
    both = MASKS["combined"]
    version, spec = json.loads(pytree.treespec_dumps(pytree.tree_flatten(both)[1]))
    old = json.dumps([version, spec | {"context": None}])
    assert same(pytree.tree_unflatten(pytree.tree_leaves(both), pytree.treespec_loads(old)), both)


@pytest.mark.parametrize("kind", INTERVALS)
def test_a_tree_keeps_what_a_mask_is(kind):
    made = INTERVALS[kind](9)
    leaves, spec = pytree.tree_flatten(made)
    for again in (spec.unflatten(leaves), pytree.treespec_loads(pytree.treespec_dumps(spec)).unflatten(leaves)):
        assert (again.segments, again.any_length) == (made.segments, made.any_length)
        assert torch.equal(says(again, 9, 9), says(made, 9, 9))


def test_a_program_exported_with_one_interval_mask_takes_all(tmp_path):
    arguments = (*queries(2, 40, 40), IntervalMask.sliding_window(40, 5))
    others = [(*queries(2, n, n), make(n)) for n, make in enumerate(INTERVALS.values(), 20)]
    shapes = (*({2: LENGTH},) * 3, [{2: LENGTH}, {2: LENGTH}])
    assert_exports(Attends(), arguments, others, tmp_path / "attends.pt2", dynamic_shapes=shapes)


@pytest.mark.parametrize("causal", [True, False])
def test_a_program_exported_with_a_base_takes_bases_of_its_kind_only(tmp_path, causal):
    def arguments(n, base):
        return *queries(2, n, n), strategies.random_tensor((2, 2, n), 9), base

    def base(n):
        return IntervalMask.documents(n, torch.tensor([0, n // 2, n]), causal) & IntervalMask.padding(n, torch.tensor([n, n - 3]))

    shapes = (*({2: LENGTH},) * 4, [{2: LENGTH}, {2: LENGTH}])
    loaded = exported(Selects(), arguments(40, base(40)), tmp_path / "selects.pt2", dynamic_shapes=shapes)
    for n in (30, 77):
        assert torch.equal(loaded(*arguments(n, base(n))), Selects()(*arguments(n, base(n))))
    n = 30
    everywhere = IntervalMask(torch.full((1,), -(2**31), dtype=torch.int32), torch.full((2, 1, 1), 2**31 - 1, dtype=torch.int32))
    wrong = {
        "sliding": IntervalMask.sliding_window(n, 3),
        "streaming": IntervalMask.streaming(n, 2, 5),
        "the other causality": IntervalMask.documents(n, torch.tensor([0, n]), not causal),
    }
    for other in wrong.values():
        with pytest.raises(RuntimeError, match="base: expected documents, padding or their intersection"):
            loaded(*arguments(n, other & everywhere))


def test_a_compiled_function_takes_bases_and_makes_them():
    def attend(q, k, v, scores, base, lengths):
        inner = base & IntervalMask.padding(k.shape[2], lengths)
        return dmattn.dynamic_mask_attention(q, k, v, scores, 8, base=inner), inner

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (40, 61, 90):
        base = IntervalMask.documents(n, torch.tensor([0, n // 3, n]))
        arguments = (*queries(2, n, n), strategies.random_tensor((2, 2, n), 9), base, torch.tensor([n - 2, n]))
        with torch._dynamo.config.patch(error_on_recompile=n > 40):
            out, inner = compiled(*arguments)
        expected, eager_inner = attend(*arguments)
        assert torch.equal(out, expected)
        assert inner.segments == eager_inner.segments == "causal"  # and is a base again
        assert torch.equal(
            IntervalMask.top_k(arguments[3], 4, base=inner).end, IntervalMask.top_k(arguments[3], 4, base=eager_inner).end
        )


# Lengths ----------------------------------------------------------------------------------------------------------------------------

ONE_KEY = {
    "causal": lambda: IntervalMask.causal(1),
    "sliding_window": lambda: IntervalMask.sliding_window(1, 3),
    "streaming": lambda: IntervalMask.streaming(1, 1, 1),
    "documents": lambda: IntervalMask.documents(1, torch.tensor([0, 1])),
    "prefix": lambda: IntervalMask.prefix(1, 1),
    "padding": lambda: IntervalMask.padding(1, 0),
    "top_k": lambda: IntervalMask.top_k(torch.zeros(1, 1, 1), 1),
    "top_k of all": lambda: IntervalMask.top_k(torch.zeros(1, 1, 1), 1, is_causal=False),
    "both": lambda: IntervalMask.causal(1) & IntervalMask.padding(1, 1),
    "with any": lambda: IntervalMask.causal(1) & IntervalMask(torch.zeros(1).int(), torch.ones(1).int()),
}


@pytest.mark.parametrize("kind", ONE_KEY)
def test_a_mask_of_one_key_serves_one_key(kind):
    made = ONE_KEY[kind]()
    assert made.key_length == 1
    assert dmattn.attention(*queries(1, 2, 1), made).shape == (1, 4, 2, 16)
    with pytest.raises(ValueError, match="mask: expected an IntervalMask for Sk=50 keys, got one for 1"):
        dmattn.attention(*queries(1), made)
    with pytest.raises(ValueError, match="Sk: expected the mask's own number of keys 1, got 5"):
        made.to_bool(5, 5)
    with pytest.raises(ValueError, match="other: expected a mask for Sk=1 keys like the first, got one for 5"):
        made & IntervalMask.sliding_window(5, 2)
    with pytest.raises(ValueError, match="other: expected a mask for Sk=5 keys like the first, got one for 1"):
        IntervalMask.sliding_window(5, 2) & made
    with pytest.raises(ValueError, match="mask: expected an IntervalMask for Sk=9 keys, got one for 1"):
        dmattn.visible_pairs(made, 9, 9)
    with pytest.raises(ValueError, match="block: expected a BlockMask for Sk=1 keys like the interval mask, got one for 50"):
        made & MASKS["block"]


def test_a_hand_made_mask_of_one_key_serves_any_number():
    everywhere = IntervalMask(torch.full((1,), 3, dtype=torch.int32), torch.full((1,), 20, dtype=torch.int32))
    assert everywhere.any_length
    assert everywhere.key_length is None
    p = torch.arange(SK - SQ, SK)
    expected = ((p >= 3) & (p < 20))[:, None].expand(SQ, SK)
    assert torch.equal(says(everywhere)[0, 0], expected)
    assert torch.equal(
        says(everywhere & IntervalMask.causal(SK))[0, 0], expected & torch.ones(SQ, SK, dtype=torch.bool).tril(SK - SQ)
    )
    both = everywhere & everywhere
    assert both.any_length
    assert torch.equal(dmattn.attention(*queries(1), both), dmattn.attention(*queries(1), expected))


def test_one_of_start_and_end_may_be_the_same_for_all_keys():
    made = IntervalMask(torch.zeros(1, dtype=torch.int32), torch.arange(SK, dtype=torch.int32))
    assert made.key_length == SK
    assert dmattn.attention(*queries(1), made).shape == (1, 4, SQ, 16)
    with pytest.raises(ValueError, match="mask: expected an IntervalMask for Sk=1 keys, got one for 50"):
        dmattn.attention(*queries(1, 1, 1), made)


def test_a_length_is_remembered_under_compile():
    def made_inside(q, k, v, n):
        return dmattn.attention(q, k, v, IntervalMask.sliding_window(n, 3))

    assert_compiles_once(made_inside, [(*queries(1, n, n), n) for n in (40, 41, 90)])
    for call, last in ((made_inside, 1), (dmattn.attention, IntervalMask.causal(1))):
        with pytest.raises(Exception, match="expected an IntervalMask for Sk="):
            torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")(*queries(1, 30, 30), last)


# Constructors -----------------------------------------------------------------------------------------------------------------------


def sparse(tensor):
    return tensor.to_sparse()


def nested(tensor):
    return torch.nested.nested_tensor([tensor, tensor], layout=torch.jagged)


INTS = torch.arange(1, 6, dtype=torch.int32)
TOO_LONG = (1 << 20) + 1
REFUSED = {
    "sparse start": (lambda: IntervalMask(sparse(INTS), INTS), TypeError, "start: expected a dense tensor, got torch.sparse_coo"),
    "nested end": (lambda: IntervalMask(INTS, nested(INTS)), TypeError, "end: expected a dense tensor, got a nested one"),
    "sparse cu_seqlens": (lambda: IntervalMask.documents(5, sparse(INTS)), TypeError, "cu_seqlens: expected a dense tensor"),
    "sparse ids": (lambda: IntervalMask.documents(5, ids=sparse(INTS)), TypeError, "ids: expected a dense tensor"),
    "sparse lengths": (lambda: IntervalMask.padding(5, sparse(INTS)), TypeError, "lengths: expected a dense tensor"),
    "nested prefix": (lambda: IntervalMask.prefix(5, nested(INTS)), TypeError, "prefix_lengths: expected a dense tensor"),
    "sparse scores": (lambda: IntervalMask.top_k(sparse(torch.ones(1, 1, 5)), 2), TypeError, "scores: expected a dense tensor"),
    "sparse mask": (lambda: BlockMask.from_bool(sparse(bools(4, 4))), TypeError, "mask: expected a dense tensor"),
    "nested table": (lambda: BlockMask.from_blocks(nested(bools(4, 4)), 4), TypeError, "table: expected a dense tensor"),
    "Sk a tensor": (lambda: IntervalMask.causal(torch.tensor(5)), TypeError, "Sk: expected an int >= 0, got Tensor"),
    "left a tensor": (lambda: IntervalMask.sliding_window(5, torch.tensor(1)), TypeError, "left: expected an int >= 0, got Tensor"),
    "window a tensor": (lambda: IntervalMask.top_k(torch.ones(1, 1, 5), torch.tensor(2)), TypeError, "window: expected a positive int, got Tensor"),
    "block size a tensor": (lambda: BlockMask.from_bool(bools(4, 4), torch.tensor(2)), TypeError, "block_size: expected a positive int, got Tensor"),
    "B a tensor": (lambda: BlockMask.from_function(lambda b, h, q, k: q > k, torch.tensor(1), 1, 4, 4), TypeError, "B: expected an int >= 0, got Tensor"),
    "too many keys": (lambda: IntervalMask.causal(TOO_LONG), ValueError, "Sk: expected 0 <= Sk <= 1048576, got 1048577"),
    "start too long": (lambda: IntervalMask(INTS[:1].expand(TOO_LONG), INTS[:1]), ValueError, "start: expected at most 1048576 keys, got [1048577]"),
    "end of 2^40": (lambda: IntervalMask(INTS[:1], INTS[:1].expand(1, 1, 1 << 40)), ValueError, "end: expected at most 1048576 keys, got [1, 1, 1099511627776]"),
    "scores too long": (lambda: IntervalMask.top_k(torch.ones(1).expand(1, 1, TOO_LONG), 2), ValueError, "scores: expected at most 1048576 keys"),
    "documents of 2^40": (lambda: IntervalMask.documents(5, INTS[:1].expand(1 << 40)), ValueError, "cu_seqlens: expected at most 1048576 documents"),
    "mask too long": (lambda: BlockMask.from_bool(bools(1, 1).expand(1, TOO_LONG)), ValueError, "mask: expected [B|1, H|Hkv|1, Sq, Sk] with lengths up to 1048576, got shape [1, 1048577]"),
    "mask of 2^40": (lambda: BlockMask.from_bool(bools(1, 1).expand(1 << 40, 1)), ValueError, "mask: expected [B|1, H|Hkv|1, Sq, Sk] with lengths up to 1048576, got shape [1099511627776, 1]"),
    "lengths that wrap": (lambda: IntervalMask.padding(8, torch.tensor([8, 2**32 + 5])), ValueError, "lengths: expected lengths from 0 to 1048576, got 4294967301"),
    "prefixes that wrap": (lambda: IntervalMask.prefix(8, torch.tensor([2**32 + 5])), ValueError, "prefix_lengths: expected lengths from 0 to 1048576, got 4294967301"),
    "documents that wrap": (lambda: IntervalMask.documents(5, torch.tensor([0, 2**32 + 5])), ValueError, "cu_seqlens: expected 0 = c[0] <= c[1] <= ... <= c[-1] = Sk = 5"),
    "length that wraps": (lambda: IntervalMask.padding(8, 2**32 + 5), ValueError, "lengths: expected 0 <= lengths <= 1048576, got 4294967301"),
    "causal a text": (lambda: IntervalMask.documents(5, torch.tensor([0, 5]), "x"), TypeError, "causal: expected a bool, got str"),
    "causal a number": (lambda: IntervalMask.top_k(torch.ones(1, 1, 5), 2, 0), TypeError, "causal: expected a bool, got int"),
    "causal None": (lambda: IntervalMask.top_k(torch.ones(1, 1, 5), 2, None), TypeError, "causal: expected a bool, got NoneType"),
    "cat of other lengths": (lambda: IntervalMask.cat([IntervalMask.causal(5), IntervalMask.causal(6)]), ValueError, "masks: expected one number of keys, got 5 and 6"),
    "cat with a single key": (lambda: IntervalMask.cat([IntervalMask.causal(5), IntervalMask.causal(1)]), ValueError, "masks: expected one number of keys, got 5 and 1"),
    "cat of nothing": (lambda: IntervalMask.cat([]), ValueError, "masks: expected at least one IntervalMask, got none"),
    "cat of two kinds": (lambda: IntervalMask.cat([IntervalMask.causal(5), MASKS["block"]]), TypeError, "masks: expected every one to be of type IntervalMask, got BlockMask"),
    "cat of a mask": (lambda: BlockMask.cat(MASKS["block"]), TypeError, "masks: expected a list or tuple of BlockMask, got BlockMask"),
    "cat of two devices": (lambda: IntervalMask.cat([IntervalMask.causal(5), IntervalMask.causal(5).to("meta")]), ValueError, "masks: expected one device, got cpu and meta"),
    "cat of other blocks": (lambda: BlockMask.cat([MASKS["block"], BlockMask.from_bool(bools(SK, SQ))]), ValueError, "masks: expected one (Sq, Sk), got (40, 50) and (50, 40)"),
    "cat of other heads": (lambda: BlockMask.cat([MASKS["block"], BlockMask.from_bool(bools(3, SQ, SK))]), ValueError, "masks: expected numbers of heads that divide 3, got 2"),
    "stack of batches": (lambda: IntervalMask.stack([MASKS["interval"]]), ValueError, "masks: expected a batch of 1 in each (cat joins batches), got IntervalMask(shape=[3, 1, 50]"),
    "buffer of booleans": (lambda: MaskBuffer(torch.ones(3, 3, dtype=torch.bool)), TypeError, "mask: expected an IntervalMask, a BlockMask, an IndexMask or an intersection, got Tensor"),
    "buffer that is saved or not": (lambda: MaskBuffer(IntervalMask.causal(5), persistent="no"), TypeError, "persistent: expected a bool, got str"),
    "combined of tensors": (lambda: CombinedMask(INTS, MASKS["block"]), TypeError, "interval: expected an IntervalMask, got Tensor"),
    "combined of intervals": (lambda: CombinedMask(MASKS["interval"], MASKS["interval"]), TypeError, "block: expected a BlockMask, got IntervalMask"),
    "combined elsewhere": (lambda: MASKS["interval"].to("meta") & MASKS["block"], ValueError, "block: expected device meta like the interval mask, got cpu"),
}  # fmt: skip


@pytest.mark.brief
@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_refused(call, error, message):
    with pytest.raises(error, match=re.escape(message)) as caught:
        call()
    assert type(caught.value) is error


def test_the_longest_masks_there_may_be():
    assert IntervalMask.causal(1 << 20).key_length == 1 << 20
    assert IntervalMask.padding(5, torch.tensor([1 << 20])).shape == (1, 1, 5)
    assert IntervalMask.sliding_window(9, 1 << 20).to_bool(9, 9).sum() == 45


# Hand-made block masks ---------------------------------------------------------------------------------------------------------------


def parts_of(mask, **changes):
    names = ("tiles", "rows", "columns", "bits", "query_length", "key_length", "block_size")
    return {name: getattr(mask, name) for name in names} | changes


def put(tensor, place, value):
    changed = tensor.clone()
    changed[place] = value
    return changed


CHECKERS = BlockMask.from_blocks(torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1]]).bool(), 64) & BlockMask.from_bool(
    bools(192, 192), 64
)
WRONG = {
    "duplicate in rows": ({"rows": put(CHECKERS.rows, (0, 0, 0, 2), 0)}, "rows: expected the number of non-empty tiles and their indices, ascending: at [0, 0, 0] [2, 0, 1], got [2, 0, 0]"),
    "duplicate in columns": ({"columns": put(CHECKERS.columns, (0, 0, 1, 1), 1)}, "columns: expected the number of non-empty tiles and their indices, ascending: at [0, 0, 1] [2, 0, 1], got [2, 1, 1]"),
    "count too large": ({"rows": put(CHECKERS.rows, (0, 0, 1, 0), 3)}, "rows: expected the number of non-empty tiles and their indices, ascending: at [0, 0, 1] [2, 1, 2], got [3, 1, 2]"),
    "count too small": ({"columns": put(CHECKERS.columns, (0, 0, 2, 0), 0)}, "columns: expected the number of non-empty tiles"),
    "descending": ({"rows": CHECKERS.rows[..., [0, 2, 1, 3, 4, 5]]}, "rows: expected the number of non-empty tiles and their indices, ascending: at [0, 0, 0] [2, 0, 1], got [2, 1, 0]"),
    "tile not listed": ({"tiles": put(CHECKERS.tiles, (0, 0, 0, 2), 1)}, "rows: expected the number of non-empty tiles and their indices, ascending: at [0, 0, 0] [3, 0, 1, 2], got [2, 0, 1, "),
    "slot beyond bits": ({"tiles": put(CHECKERS.tiles, (0, 0, 0, 0), 8)}, "tiles: expected 0, 1 or 2 + slot with slots below 6 in bits, got 8 at [0, 0, 0, 0]"),
    "negative tile": ({"tiles": put(CHECKERS.tiles, (0, 0, 0, 0), -1)}, "got -1 at [0, 0, 0, 0]"),
    "no slots": ({"bits": CHECKERS.bits[:0]}, "tiles: expected 0, 1 or 2 + slot with slots below 0 in bits, got 2 at [0, 0, 0, 0]"),
    "tile beyond the lengths": ({"tiles": put(CHECKERS.tiles, (0, 0, 4, 0), 1)}, "tiles: expected 0 beyond the lengths 192, 192, got 1 at [0, 0, 4, 0]"),
    "shorter than its tiles": ({"tiles": CHECKERS.tiles[..., :4]}, "tiles: expected [B|1, H|Hkv|1, Nq, Nk] with Nq=5, Nk=5 for lengths 192, 192, got shape [1, 1, 5, 4]"),
    "other lengths": ({"key_length": 300}, "tiles: expected [B|1, H|Hkv|1, Nq, Nk] with Nq=5, Nk=6 for lengths 192, 300"),
    "tiles of rank 3": ({"tiles": CHECKERS.tiles[0]}, "tiles: expected [B|1, H|Hkv|1, Nq, Nk]"),
    "rows of other shape": ({"rows": CHECKERS.rows[..., 1:]}, "rows: expected shape [1, 1, 5, 6] with tiles, got [1, 1, 5, 5]"),
    "columns of another batch": ({"columns": CHECKERS.columns.expand(2, 1, 5, 6)}, "columns: expected shape [1, 1, 5, 6] with tiles, got [2, 1, 5, 6]"),
    "bits of rank 2": ({"bits": CHECKERS.bits[0]}, "bits: expected [slots, tile_q, tile_k / 32] with tiles of multiples of 32 up to 4096, got shape [64, 2]"),
    "tile of 33": ({"bits": torch.zeros(2, 33, 2, dtype=torch.int32)}, "bits: expected [slots, tile_q, tile_k / 32]"),
    "bits elsewhere": ({"bits": CHECKERS.bits.to("meta")}, "bits: expected device cpu like tiles, got meta"),
    "negative length": ({"query_length": -1}, "query_length: expected 0 <= query_length <= 1048576, got -1"),
    "block size 0": ({"block_size": (0, 1)}, "block_size: expected a positive int, got 0"),
}  # fmt: skip


@pytest.mark.brief
@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_a_hand_made_block_mask_is_checked(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BlockMask(**parts_of(CHECKERS, **changes))


@pytest.mark.parametrize("name", ["tiles", "rows", "columns", "bits"])
def test_a_hand_made_block_mask_of_other_types(name):
    value = getattr(CHECKERS, name)
    for wrong, message in (
        (value.long(), f"{name}: expected dtype int32, got int64"), (value.tolist(), f"{name}: expected a torch.Tensor, got list"),
        (value.to_sparse(), f"{name}: expected a dense tensor, got torch.sparse_coo"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=re.escape(message)):
            BlockMask(**parts_of(CHECKERS, **{name: wrong}))
    with pytest.raises(TypeError, match="key_length: expected an int >= 0, got float"):
        BlockMask(**parts_of(CHECKERS, key_length=192.0))


@given(data=st.data())
def test_a_block_mask_of_its_own_parts_is_right(data):
    shape = data.draw(strategies.shapes())
    made = data.draw(strategies.block_masks(shape)).mask
    again = BlockMask(**parts_of(made))
    assert torch.equal(again.to_bool(), made.to_bool())
    cut = made.cut(shape.Sq, shape.Sk)
    assert torch.equal(BlockMask(**parts_of(cut)).to_bool(), cut.to_bool())
    BlockMask(**parts_of(BlockMask.cat([made, made])))


def test_entries_past_the_count_may_be_anything():
    rows = put(CHECKERS.rows, (0, 0, 0, slice(3, None)), 77)
    assert torch.equal(BlockMask(**parts_of(CHECKERS, rows=rows)).to_bool(), CHECKERS.to_bool())


def test_values_are_not_read_where_that_costs_or_cannot_be():
    on_meta = BlockMask(**parts_of(CHECKERS.to("meta")))
    assert on_meta.shape == (1, 1, 192, 192)

    def made_inside(q, tiles, rows, columns, bits):
        return dmattn.attention(q, q, q, BlockMask(tiles, rows, columns, bits, 192, 192))

    q = strategies.random_tensor((1, 2, 192, 16), 0)
    arguments = (q, CHECKERS.tiles, CHECKERS.rows, CHECKERS.columns, CHECKERS.bits)
    compiled = torch.compile(made_inside, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), made_inside(*arguments))


def test_our_own_constructors_do_not_check_what_they_made(monkeypatch):
    def never(*arguments):
        raise AssertionError("read the values of tables that were made together")

    monkeypatch.setattr("dmattn.masks.tables.check_values", never)
    made = BlockMask.from_bool(bools(SQ, SK)) & BlockMask.from_blocks(bools(2, 2), (20, 25))
    BlockMask.cat([made, made])[0].to("meta")
    (IntervalMask.causal(SK) & made).to_bool(SQ, SK)
    with pytest.raises(AssertionError, match="read the values"):
        BlockMask(**parts_of(made))
