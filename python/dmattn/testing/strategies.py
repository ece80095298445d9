"""Hypothesis strategies for attention: shapes, dtypes, strides, every kind of mask, scores with ties, biases, whole cases.

Small structural numbers are drawn, tensor data comes from a drawn seed: cheap to generate, quick to shrink. Every mask comes with its
meaning, built from the definition with index arithmetic and without the library's own conversions.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Collection, Sequence
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from dmattn import reference
from dmattn.masks import BlockMask, IndexMask, IntervalMask, Mask
from dmattn.masks.heads import with_rank
from dmattn.renamed import renamed
from dmattn.testing.case import AttentionCase, positions_from
from dmattn.testing.features import MASK_TYPES, checked, sees_a_key
from dmattn.testing.layouts import GRADIENT_LAYOUTS, LAYOUTS, laid_out

CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CUDA_DTYPES = (torch.bfloat16, torch.float16)
# Lengths at which kernels change their way, by the names they have in cpp/cpu/limits.h and cpp/cuda/live_keys.h.
CPU_THRESHOLDS = {
    "kSummaryKeys": 64, "kPieceDepth": 64, "kMaxTileQueries": 128, "kChunkKeys": 128, "kUnsummedQueries": 256, "kReduceKeys": 1024,
    "kListTileQueries": 32, "kListChunkKeys": 512, "kIndexTileQueries": 16, "kIndexChunkKeys": 32,
}  # fmt: skip
CUDA_THRESHOLDS = {"kQueryPadding": 128, "kListBlock": 512, "kSegmentQueries": 768, "kPartKeys": 4096}
MASK_KINDS = (
    "none", "intervals", "causal", "sliding_window", "streaming", "documents", "document_ids", "prefix", "padding", "chunked", "tree",
    "top_k", "top_k_beside",
    "from_bool", "from_blocks", "from_function", "index", "combined", "bool",
)  # fmt: skip
SCORE_KINDS = ("random", "ties", "constant", "increasing", "decreasing", "holes")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one attention problem."""

    B: int
    H: int
    Hkv: int
    Sq: int
    Sk: int
    D: int
    Dv: int


@dataclasses.dataclass(frozen=True)
class DrawnMask:
    """A mask and what it means.

    Args:
        mask: what an implementation gets.
        visible: its meaning, bool [B|1, H|Hkv|1, Sq, Sk], None for all.
        description: a few words for messages.
        kinds: which of the MASK_KINDS it is made of.
    """

    mask: Mask | Tensor | None
    visible: Tensor | None
    description: str
    kinds: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return self.description


# Sizes and data ---------------------------------------------------------------------------------------------------------------------


def dtypes(device: str = "cpu") -> st.SearchStrategy[torch.dtype]:
    """The dtypes a device has kernels for."""
    return st.sampled_from(CUDA_DTYPES if device.startswith("cuda") else CPU_DTYPES)


def seeds() -> st.SearchStrategy[int]:
    """Seeds for tensor data and for dropout."""
    return st.integers(0, 2**31 - 1)


def lengths(max_length: int = 300, min_length: int = 0) -> st.SearchStrategy[int]:
    """Lengths: short, ragged, and around every length up to ``max_length`` at which kernels change their way."""
    edges = [n for n in (*edge_lengths(), 200, 300) if min_length <= n <= max_length]
    small = st.integers(min_length, min(40, max_length))
    return small | st.sampled_from(edges) if edges else small


def edge_lengths(device: str = "") -> tuple[int, ...]:
    """The lengths just below, at and just above each threshold of the kernels of a device, or of all, and of vectors and tiles."""
    cpu, cuda = (
        [] if device.startswith(other) else [*named.values()]
        for other, named in (("cuda", CPU_THRESHOLDS), ("cpu", CUDA_THRESHOLDS))
    )
    return tuple(sorted({n + step for n in (32, 192, *cpu, *cuda) for step in (-1, 0, 1)}))


def head_dims() -> st.SearchStrategy[int]:
    """Multiples of 8 up to 256."""
    return st.sampled_from((8, 16, 32, 64)) | st.integers(1, 32).map(lambda n: 8 * n)


@st.composite
def shapes(
    draw: st.DrawFn, max_length: int = 300, min_length: int = 0, max_batch: int = 2, max_pairs: int | None = None
) -> Shape:
    """Sizes: GQA and MQA, 0-length, ragged, Sq != Sk both ways, D != Dv.

    Args:
        max_length, min_length: of Sq and Sk.
        max_batch: largest B.
        max_pairs: largest number of pairs of a query and a key, over all batches and heads; batches, groups, heads and then queries become
            fewer until it holds. None: no bound.
    """
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    keys = draw(lengths(max_length, min_length))
    queries = draw(st.just(keys) | lengths(max_length, min_length))
    size = draw(head_dims())
    value_size = draw(st.just(size) | head_dims())
    batch = draw(st.integers(1, max_batch))
    if max_pairs is not None:
        for _ in range(4):  # one of them a turn
            excess = batch * kv_heads * group * queries * keys / max_pairs
            if excess <= 1:
                break
            if batch > 1:
                batch = 1
            elif kv_heads > 1:
                kv_heads = 1
            elif group > 1 and excess > 2:
                group = 1
            else:
                queries = max(min_length, int(queries / excess))
    return Shape(batch, kv_heads * group, kv_heads, queries, keys, size, value_size)


def random_tensor(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Normal numbers, the same for a seed on every device."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def make_scores(shape: Sequence[int], kind: str, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Scores [B, Hkv, Sk] of one of the SCORE_KINDS. ``holes`` are -inf."""
    random = random_tensor(shape, seed)
    if kind == "constant":
        random = torch.ones_like(random)
    elif kind in ("increasing", "decreasing"):
        random = random.sort(dim=-1, descending=kind == "decreasing").values
    elif kind in ("ties", "holes"):
        generator = torch.Generator().manual_seed(seed)
        small = torch.randint(0, 3, tuple(shape), generator=generator).float()
        random = small if kind == "ties" else torch.where(small == 0, -torch.inf, random)
    return random.to(dtype).to(device)


@st.composite
def scores(
    draw: st.DrawFn,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    kinds: Sequence[str] = SCORE_KINDS,
) -> Tensor:
    """Scores [B, Hkv, Sk]: random, tied, constant, monotone, with -inf; sometimes a strided view."""
    made = make_scores(shape, draw(st.sampled_from(kinds)), draw(seeds()), dtype, device)
    if draw(st.booleans()):
        made = made.transpose(1, 2).contiguous().transpose(1, 2)
    return made


# Masks ------------------------------------------------------------------------------------------------------------------------------


def positions(Sq: int, Sk: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Query positions p [Sq, 1] and key indices j [1, Sk] of the definitions."""
    return torch.arange(Sk - Sq, Sk, device=device)[:, None], torch.arange(Sk, device=device)[None]


def no_masks(shape: Shape, device: str = "cpu") -> st.SearchStrategy[DrawnMask]:
    """No mask at all."""
    return st.just(DrawnMask(None, None, "None", frozenset({"none"})))


def causal_masks(shape: Shape, device: str = "cpu") -> st.SearchStrategy[DrawnMask]:
    """``IntervalMask.causal``."""
    p, j = positions(shape.Sq, shape.Sk, device)
    visible, kinds = (j <= p)[None, None], frozenset({"causal"})
    return st.builds(lambda: DrawnMask(IntervalMask.causal(shape.Sk, device=device), visible, "causal", kinds))


@st.composite
def sliding_window_masks(draw: st.DrawFn, shape: Shape, device: str = "cpu") -> DrawnMask:
    """``IntervalMask.sliding_window``."""
    left, right = draw(st.integers(0, shape.Sk + 2)), draw(st.integers(0, 4))
    p, j = positions(shape.Sq, shape.Sk, device)
    visible = (p - left <= j) & (j <= p + right)
    mask = IntervalMask.sliding_window(shape.Sk, left, right, device=device)
    return DrawnMask(mask, visible[None, None], f"sliding_window({left}, {right})", frozenset({"sliding_window"}))


@st.composite
def streaming_masks(draw: st.DrawFn, shape: Shape, device: str = "cpu") -> DrawnMask:
    """``IntervalMask.streaming``."""
    sink_keys, local = draw(st.integers(0, 5)), draw(st.integers(0, shape.Sk + 2))
    p, j = positions(shape.Sq, shape.Sk, device)
    visible = (j <= p) & ((j < sink_keys) | (p - j < local))
    mask = IntervalMask.streaming(shape.Sk, sink_keys, local, device=device)
    return DrawnMask(mask, visible[None, None], f"streaming({sink_keys}, {local})", frozenset({"streaming"}))


@renamed(causal="is_causal")
@st.composite
def document_masks(draw: st.DrawFn, shape: Shape, device: str = "cpu", is_causal: bool | None = None) -> DrawnMask:
    """``IntervalMask.documents`` from cu_seqlens (empty documents too) or from ids (padding too)."""
    is_causal = draw(st.booleans()) if is_causal is None else is_causal
    cuts = sorted(draw(st.lists(st.integers(0, shape.Sk), max_size=5)))
    ends = [0, *cuts, shape.Sk]
    run = torch.zeros(shape.Sk, dtype=torch.int64)
    for number, (first, last) in enumerate(itertools.pairwise(ends)):
        run[first:last] = number
    real = torch.ones(shape.Sk, dtype=torch.bool)
    if draw(st.booleans()):
        cu_seqlens = torch.tensor(ends, dtype=draw(st.sampled_from((torch.int32, torch.int64))), device=device)
        mask = IntervalMask.documents(shape.Sk, cu_seqlens, is_causal)
        kind, description = "documents", f"documents({ends}, is_causal={is_causal})"
    else:
        padded = draw(st.integers(0, len(ends)))
        ids = torch.where(run == padded, -1, run * 7 % 5)  # neighbours differ, ids come again
        real = run != padded
        run = torch.where(real, run, -1)
        ids = ids[None].expand(shape.B, -1) if draw(st.booleans()) else ids
        mask = IntervalMask.documents(shape.Sk, ids=ids.to(device), is_causal=is_causal)
        kind, description = "document_ids", f"documents(ids of {ends}, padding {padded}, is_causal={is_causal})"
    visible = _document_rows(run, real, is_causal, shape.Sq).to(device)[None, None]
    return DrawnMask(mask, visible, description, frozenset({kind}))


def _document_rows(run: Tensor, real: Tensor, is_causal: bool, Sq: int) -> Tensor:
    p, j = positions(Sq, run.shape[0])
    if run.shape[0] == 0:
        return torch.zeros((Sq, 0), dtype=torch.bool)
    same = (run[p.clamp(min=0)] == run[j]) & (p >= 0) & real[j]
    return same & (j <= p) if is_causal else same


@st.composite
def prefix_masks(draw: st.DrawFn, shape: Shape, device: str = "cpu") -> DrawnMask:
    """``IntervalMask.prefix``."""
    prefixes = draw(st.lists(st.integers(0, shape.Sk + 1), min_size=shape.B, max_size=shape.B))
    p, j = positions(shape.Sq, shape.Sk, device)
    if shape.B == 1 and draw(st.booleans()):
        mask = IntervalMask.prefix(shape.Sk, prefixes[0], device=device)
    else:
        mask = IntervalMask.prefix(shape.Sk, torch.tensor(prefixes, device=device))
    visible = torch.stack([(j < n) | (j <= p) for n in prefixes])[:, None]
    return DrawnMask(mask, visible, f"prefix({prefixes})", frozenset({"prefix"}))


@st.composite
def padding_masks(draw: st.DrawFn, shape: Shape, device: str = "cpu") -> DrawnMask:
    """``IntervalMask.padding``."""
    real = draw(st.lists(st.integers(0, shape.Sk + 1), min_size=shape.B, max_size=shape.B))
    side: Literal["left", "right"] = draw(st.sampled_from(("right", "left")))
    _, j = positions(shape.Sq, shape.Sk, device)
    mask = IntervalMask.padding(shape.Sk, torch.tensor(real, dtype=torch.int32, device=device), side)
    hidden = [j >= n if side == "right" else shape.Sk - j > n for n in real]
    visible = torch.stack([~padded.expand(shape.Sq, shape.Sk) for padded in hidden])[:, None]
    return DrawnMask(mask, visible, f"padding({real}, {side})", frozenset({"padding"}))


@st.composite
def chunked_masks(draw: st.DrawFn, shape: Shape, device: str = "cpu") -> DrawnMask:
    """``IntervalMask.chunked``."""
    size, is_causal = draw(st.integers(1, shape.Sk + 2)), draw(st.booleans())
    p, j = positions(shape.Sq, shape.Sk, device)
    visible = torch.div(p, size, rounding_mode="floor") == torch.div(j, size, rounding_mode="floor")
    visible = visible & (j <= p) if is_causal else visible
    mask = IntervalMask.chunked(shape.Sk, size, is_causal, device=device)
    return DrawnMask(mask, visible[None, None], f"chunked({size}, is_causal={is_causal})", frozenset({"chunked"}))


@st.composite
def tree_masks(draw: st.DrawFn, shape: Shape, device: str = "cpu") -> DrawnMask:
    """``IntervalMask.tree_from_parents`` and ``IntervalMask.tree``: a key is seen by itself and its descendants."""
    dtype = draw(st.sampled_from((torch.int32, torch.int64)))
    trees = [
        random_tree(shape.Sk, draw(seeds()), draw(st.sampled_from((0.0, 0.1, 0.6)))) for _ in range(draw(_either(1, shape.B)))
    ]
    parents = torch.tensor([parents for parents, _ in trees], dtype=dtype).view(len(trees), shape.Sk)
    lines = torch.stack([line for _, line in trees])  # [trees, Sk, Sk]: the keys on the way from the root to each node
    p = torch.arange(shape.Sk - shape.Sq, shape.Sk)
    visible = (
        lines[:, p.clamp(min=0)] & (p >= 0)[:, None] if shape.Sk else torch.zeros((len(trees), shape.Sq, 0), dtype=torch.bool)
    )
    if draw(st.booleans()):
        mask = IntervalMask.tree_from_parents((parents[0] if len(trees) == 1 and draw(st.booleans()) else parents).to(device))
        return DrawnMask(mask, visible[:, None].to(device), "tree_from_parents", frozenset({"tree"}))
    enter = 3 * torch.arange(shape.Sk, dtype=dtype) + 5  # any increasing numbers
    leave = enter + 3 * lines.sum(1).to(dtype) - 1  # a column counts the node's descendants and itself
    mask = IntervalMask.tree(enter.expand_as(leave).to(device), leave.to(device))
    return DrawnMask(mask, visible[:, None].to(device), "tree", frozenset({"tree"}))


def random_tree(nodes: int, seed: int, back: float) -> tuple[list[int], Tensor]:
    """Parents of a tree (or several) in depth-first order, and for each node the nodes from its root to itself, bool [nodes, nodes].

    Args:
        nodes: how many.
        seed: of the random choices.
        back: probability of going back towards the root by one generation, again and again, before a node is added; 0 gives a chain.
    """
    generator = torch.Generator().manual_seed(seed)
    parents: list[int] = []
    line = torch.zeros((nodes, nodes), dtype=torch.bool)
    for node in range(nodes):
        parent = node - 1
        while parent >= 0 and float(torch.rand((), generator=generator)) < back:
            parent = parents[parent]
        parents.append(parent)
        if parent >= 0:
            line[node] = line[parent]
        line[node, node] = True
    return parents, line


@renamed(causal="is_causal")
@st.composite
def top_k_masks(draw: st.DrawFn, shape: Shape, device: str = "cpu", is_causal: bool | None = None) -> DrawnMask:
    """``IntervalMask.top_k``, causal and not, over documents, padding, both or nothing, with a local window and sinks or without."""
    is_causal = draw(st.booleans()) if is_causal is None else is_causal
    window, local, sink_keys = draw(selection_sizes(shape.Sk, is_causal))
    given = draw(scores((shape.B, shape.Hkv, shape.Sk), device=device))
    base, rows, description = draw(selection_bases(shape, device))
    mask = IntervalMask.top_k(given, window, is_causal, base, local=local, sink_keys=sink_keys)
    visible = selected_rows(given, window, is_causal, rows, shape.Sq, local, sink_keys)
    sizes = f"window={window}, local={local}, sink_keys={sink_keys}" if local or sink_keys else f"window={window}"
    kinds = frozenset({"top_k_beside"} if local or sink_keys else {"top_k"})
    return DrawnMask(mask, visible, f"top_k({sizes}, is_causal={is_causal}, base={description})", kinds)


@st.composite
def selection_sizes(draw: st.DrawFn, length: int, is_causal: bool) -> tuple[int, int, int]:
    """(window, local, sink_keys) of a selection; only a causal one has the last two, and the first may be 0 with them only."""
    local = draw(st.just(0) | st.integers(0, length + 2)) if is_causal else 0
    sink_keys = draw(st.just(0) | st.integers(0, 5)) if is_causal else 0
    return draw(st.integers(0 if local or sink_keys else 1, length + 2)), local, sink_keys


@st.composite
def selection_bases(draw: st.DrawFn, shape: Shape, device: str = "cpu") -> tuple[IntervalMask | None, DrawnMask | None, str]:
    """What ``top_k`` may select within: (base, its meaning over Sk positions, a few words)."""
    square = dataclasses.replace(shape, Sq=shape.Sk)
    kind = draw(st.sampled_from(("None", "documents", "padding", "both")))
    if kind == "None":
        return None, None, kind
    parts = [draw(document_masks(square, device))] if kind != "padding" else []
    parts += [draw(padding_masks(square, device))] if kind != "documents" else []
    both = _intersection(parts, frozenset())
    assert isinstance(both.mask, IntervalMask)
    return both.mask, both, both.description


def _intersection(parts: Sequence[DrawnMask], kinds: frozenset[str], heads: int | None = None) -> DrawnMask:
    """``a & b & ..`` and its meaning, per query head if their number is given."""
    masks: list[Any] = [part.mask for part in parts]
    visible: list[Any] = [part.visible for part in parts]
    visible = visible if heads is None else [reference.per_query_head(rows, heads) for rows in visible]
    mask, seen = (functools.reduce(operator.and_, given) for given in (masks, visible))
    return DrawnMask(mask, seen, " & ".join(part.description for part in parts), kinds.union(*(part.kinds for part in parts)))


def selected_rows(
    given: Tensor, window: int, is_causal: bool, base: DrawnMask | None, Sq: int, local: int = 0, sink_keys: int = 0
) -> Tensor:
    """Brute force: the selected keys of every query, bool [B, Hkv, Sq, Sk]."""
    Sk = given.shape[2]
    visible = reference.top_k_visible(given, window, is_causal, None if base is None else base.visible, local, sink_keys)
    p = torch.arange(Sk - Sq, Sk, device=given.device)
    if Sk == 0:
        return visible.new_zeros((*given.shape[:2], Sq, 0))
    # Without causality and documents one set of keys serves all queries, those before position 0, too.
    before = not is_causal and (base is None or base.kinds.isdisjoint({"documents", "document_ids"}))
    return visible[:, :, p.clamp(min=0)] & ((p >= 0) | before)[:, None]


@st.composite
def raw_interval_masks(draw: st.DrawFn, shape: Shape, device: str = "cpu") -> DrawnMask:
    """``IntervalMask(start, end)`` from random numbers, empty intervals included, with every broadcast."""
    bounds = []
    for _ in range(2):
        size = (draw(_either(1, shape.B)), draw(_either(1, shape.Hkv, shape.H)), draw(_either(1, shape.Sk, shape.Sk)))
        generator = torch.Generator().manual_seed(draw(seeds()))
        bounds.append(torch.randint(-shape.Sq - 3, 2 * shape.Sk + 3, size, generator=generator, dtype=torch.int32).to(device))
    start, end = torch.minimum(*bounds) if draw(st.booleans()) and bounds[0].shape == bounds[1].shape else bounds[0], bounds[1]
    p, _ = positions(shape.Sq, shape.Sk, device)
    visible = _rows_between(start, end, p, shape)
    words = f"intervals(start {list(start.shape)}, end {list(end.shape)})"
    return DrawnMask(IntervalMask(start, end), visible, words, frozenset({"intervals"}))


@st.composite
def bool_patterns(draw: st.DrawFn, size: Sequence[int], device: str = "cpu") -> Tensor:
    """Random booleans of a size [.., Sq, Sk]: scattered, in blocks (so that tiles are empty and full), all or nothing."""
    kind = draw(st.sampled_from(("scattered", "blocks", "blocks and scattered", "all", "nothing")))
    if kind in ("all", "nothing"):
        return torch.full(tuple(size), kind == "all", device=device)
    generator = torch.Generator().manual_seed(draw(seeds()))
    density = draw(st.sampled_from((0.02, 0.3, 0.5, 0.9)))
    made = torch.rand(tuple(size), generator=generator) < density
    if kind != "scattered":
        block = draw(st.sampled_from((16, 32, 64, 128)))
        table = torch.rand((*size[:-2], -(-size[-2] // block), -(-size[-1] // block)), generator=generator) < 0.5
        blocks = table.repeat_interleave(block, -2).repeat_interleave(block, -1)[..., : size[-2], : size[-1]]
        made = blocks if kind == "blocks" else blocks & made
    return made.to(device)


def block_sizes() -> st.SearchStrategy[int | tuple[int, int]]:
    """Block sizes: tile-sized, odd, and pairs."""
    one = st.sampled_from((16, 32, 64, 128, 100, 40))
    return one | st.tuples(one, one)


@st.composite
def block_masks_from_bool(draw: st.DrawFn, shape: Shape, device: str = "cpu") -> DrawnMask:
    """``BlockMask.from_bool``."""
    lead = draw(_lead(shape))
    visible = draw(bool_patterns((*lead, shape.Sq, shape.Sk), device))
    size = draw(block_sizes())
    words = f"BlockMask.from_bool({list(lead)}, block_size={size})"
    return DrawnMask(BlockMask.from_bool(visible, size), visible, words, frozenset({"from_bool"}))


@st.composite
def block_masks_from_blocks(draw: st.DrawFn, shape: Shape, device: str = "cpu") -> DrawnMask:
    """``BlockMask.from_blocks``, with lengths that end within a block."""
    lead, size = draw(_lead(shape)), draw(block_sizes())
    bq, bk = (size, size) if isinstance(size, int) else size
    table = draw(bool_patterns((*lead, -(-shape.Sq // bq), -(-shape.Sk // bk)), device))
    p, j = torch.arange(shape.Sq, device=device)[:, None], torch.arange(shape.Sk, device=device)
    visible = table[:, :, p // bq, j // bk]
    words = f"BlockMask.from_blocks({list(table.shape)}, {size})"
    return DrawnMask(BlockMask.from_blocks(table, size), visible, words, frozenset({"from_blocks"}))


@st.composite
def block_masks_from_function(draw: st.DrawFn, shape: Shape, device: str = "cpu") -> DrawnMask:
    """``BlockMask.from_function``."""
    B, H = draw(st.sampled_from((None, shape.B))), draw(st.sampled_from((None, shape.H)))
    a, b, modulus = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 7))

    def fn(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return (a * q + b * k + batch + head) % modulus < 1

    mask = BlockMask.from_function(fn, B, H, shape.Sq, shape.Sk, block_size=draw(block_sizes()), device=device)
    grid = [torch.arange(n, device=device) for n in (B or 1, H or 1, shape.Sq, shape.Sk)]
    visible = fn(*torch.meshgrid(*grid, indexing="ij"))
    words = f"BlockMask.from_function(({a} q + {b} k + b + h) % {modulus} < 1, B={B}, H={H})"
    return DrawnMask(mask, visible, words, frozenset({"from_function"}))


@st.composite
def index_masks(draw: st.DrawFn, shape: Shape, device: str = "cpu") -> DrawnMask:
    """``IndexMask``: lists in no order, with duplicates, -1 anywhere, future keys, and empty ones, of none to more entries than keys."""
    block = draw(st.sampled_from((1, 1, 2, 4, 8, 16, 32, 64, 128)))
    blocks = -(-shape.Sk // block)
    entries = draw(st.integers(0, min(blocks + 2, 40)))
    generator = torch.Generator().manual_seed(draw(seeds()))
    size = (*draw(_lead(shape)), shape.Sq, entries)
    lists = torch.randint(-1, max(1, blocks), size, generator=generator, dtype=draw(st.sampled_from((torch.int32, torch.int64))))
    lists = lists if blocks else torch.full_like(lists, -1)
    empty = draw(st.sampled_from((0.0, 0.1, 1.0)))
    lists = torch.where(torch.rand((*size[:3], 1), generator=generator) < empty, -1, lists)
    if draw(st.booleans()):
        lists = lists.sort(dim=-1, descending=True).values
    numbers = st.just(0) | st.integers(0, shape.Sk + 2)
    mask = IndexMask(lists.to(device), block, is_causal=draw(st.booleans()), local=draw(numbers), sink_keys=draw(numbers))
    p, _ = positions(shape.Sq, shape.Sk, device)
    words = f"IndexMask({list(size)}, {block}, is_causal={mask.is_causal}, local={mask.local}, sink_keys={mask.sink_keys})"
    return DrawnMask(mask, listed_rows(mask, p, shape.Sk), words, frozenset({"index"}))


def listed_rows(mask: IndexMask, p: Tensor, Sk: int) -> Tensor:
    """Brute force: the keys that queries at positions p [.., Sq, 1] see, bool [B|1, H|Hkv|1, Sq, Sk]."""
    j = torch.arange(Sk, device=p.device)
    seen = (p - mask.local < j) & (j <= p) | (j < mask.sink_keys)
    for entry in mask.indices.unbind(-1):
        seen = seen | (entry[..., None] == j // mask.block_size)
    seen = seen & (j <= p) if mask.is_causal else seen
    return seen.expand(*torch.broadcast_shapes(seen.shape, (*mask.indices.shape[:3], Sk)))


@st.composite
def combined_masks(
    draw: st.DrawFn, shape: Shape, device: str = "cpu", kinds: Sequence[str] = ("interval", "block", "index")
) -> DrawnMask:
    """``interval & block``, ``interval & index``, ``block & index`` and all three, in every order; of the kinds given, two at least."""
    by_kind = {
        "interval": interval_masks,
        "block": lambda shape, device: block_masks_from_bool(shape, device) | block_masks_from_blocks(shape, device),
        "index": index_masks,
    }
    chosen = draw(st.lists(st.sampled_from(tuple(kinds)), min_size=2, max_size=len(kinds), unique=True))
    parts = [draw(by_kind[kind](shape, device)) for kind in chosen]
    return _intersection(parts, frozenset({"combined"}), shape.H)


@st.composite
def bool_tensor_masks(draw: st.DrawFn, shape: Shape, device: str = "cpu") -> DrawnMask:
    """Plain bool tensors with every broadcast, leading dimensions left out too, and strided."""
    size = (*draw(_lead(shape)), draw(_either(1, shape.Sq, shape.Sq)), draw(_either(1, shape.Sk, shape.Sk)))
    made = draw(bool_patterns(size, device))
    visible = made.expand(-1, -1, shape.Sq, shape.Sk)
    while made.dim() > 1 and made.shape[0] == 1 and draw(st.booleans()):
        made = made[0]
    if made.dim() >= 2 and draw(st.booleans()):
        made = made.transpose(-1, -2).contiguous().transpose(-1, -2)
    return DrawnMask(made, visible, f"bool{list(made.shape)}", frozenset({"bool"}))


@st.composite
def interval_masks(draw: st.DrawFn, shape: Shape, device: str = "cpu") -> DrawnMask:
    """Every kind of IntervalMask, with and without what is known of the number of keys that a query sees."""
    kinds = (
        raw_interval_masks, causal_masks, sliding_window_masks, streaming_masks, document_masks, prefix_masks, padding_masks, top_k_masks,
        chunked_masks, tree_masks,
    )  # fmt: skip
    drawn: DrawnMask = draw(st.one_of(*(kind(shape, device) for kind in kinds)))
    if isinstance(drawn.mask, IntervalMask) and drawn.mask.most_keys and draw(st.booleans()):
        return dataclasses.replace(drawn, mask=drawn.mask._replace(most_keys=0))
    return drawn


def block_masks(shape: Shape, device: str = "cpu") -> st.SearchStrategy[DrawnMask]:
    """Every kind of BlockMask."""
    kinds = (block_masks_from_bool, block_masks_from_blocks, block_masks_from_function)
    return st.one_of(*(kind(shape, device) for kind in kinds))


def masks(shape: Shape, device: str = "cpu") -> st.SearchStrategy[DrawnMask]:
    """Every kind of mask that :func:`dmattn.attention` takes, None included."""
    return some_masks(shape, device, MASK_TYPES)


# Biases and cases -------------------------------------------------------------------------------------------------------------------


@st.composite
def key_biases(draw: st.DrawFn, shape: Shape, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """key_bias with every broadcast, leading dimensions left out too; some entries -inf."""
    return draw(_biases((draw(_lead(shape)), (shape.Sk,)), dtype, device))


@st.composite
def biases(draw: st.DrawFn, shape: Shape, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """bias with every broadcast, leading dimensions left out too; some entries -inf."""
    rows = (draw(_either(1, shape.Sq, shape.Sq)), draw(_either(1, shape.Sk, shape.Sk)))
    return draw(_biases((draw(_lead(shape)), rows), dtype, device))


@st.composite
def _biases(draw: st.DrawFn, size: tuple[tuple[int, int], tuple[int, ...]], dtype: torch.dtype, device: str) -> Tensor:
    lead, rest = size
    seed = draw(seeds())
    made = random_tensor((*lead, *rest), seed, draw(st.sampled_from((dtype, torch.float32))), device)
    if draw(st.booleans()):
        made = torch.where(random_tensor(made.shape, seed + 1, device=device) > 1.5, -torch.inf, made)
    while made.dim() > len(rest) and made.shape[0] == 1 and draw(st.booleans()):
        made = made[0]
    if made.dim() >= 2 and draw(st.booleans()):
        made = made.transpose(-1, -2).contiguous().transpose(-1, -2)
    return made


@st.composite
def attention_cases(
    draw: st.DrawFn,
    device: str = "cpu",
    max_length: int = 200,
    dtype: torch.dtype | None = None,
    max_pairs: int | None = None,
    features: Collection[str] | None = None,
) -> AttentionCase:
    """Whole problems: everything above at once.

    Args:
        device: where the tensors live.
        max_length: longest Sq and Sk.
        dtype: one dtype instead of all the device has kernels for.
        max_pairs: as in :func:`shapes`.
        features: the features, of ``dmattn.testing.FEATURES``, that a case may have; None for all, ``()`` for plain dense attention. Where
            queries may not be blind and a drawn mask would make them so, the case has no mask, or is not causal.

    Raises:
        TypeError, ValueError: features that are none.
    """
    allowed = checked(features)

    def chosen(feature: str, strategy: st.SearchStrategy[Any], otherwise: Any) -> Any:
        return draw(strategy) if feature in allowed else otherwise

    dtype = draw(dtypes(device)) if dtype is None else dtype
    least = 0 if {"empty_lengths", "blind_queries"} <= allowed else 1
    shape = _without(draw(shapes(max_length, least, max_pairs=max_pairs)), allowed)
    subnormal, huge = torch.finfo(dtype).tiny / 8, 64.0 if dtype == torch.float16 else 1e30
    seed, magnitude = draw(seeds()), draw(st.sampled_from((1.0, 1.0, 4.0, 0.0, subnormal)))
    magnitudes = (magnitude, magnitude, draw(st.sampled_from((magnitude, magnitude, subnormal, huge))))
    sizes = (
        (shape.B, shape.H, shape.Sq, shape.D),
        (shape.B, shape.Hkv, shape.Sk, shape.D),
        (shape.B, shape.Hkv, shape.Sk, shape.Dv),
    )
    query, key, value = (
        laid_out(
            magnitudes[n] * random_tensor(size, seed + n, dtype, device),
            chosen("strides", st.sampled_from(LAYOUTS), "contiguous"),
        )
        for n, size in enumerate(sizes)
    )
    # In float64 the truth is rounded like a result, and in sums of equal numbers all roundings may go one way.
    layouts = LAYOUTS if dtype == torch.float64 and magnitude < 1 else GRADIENT_LAYOUTS
    drawn = draw(some_masks(shape, device, allowed))
    offset = None
    if "combined" not in drawn.kinds and chosen("query_offset", st.sampled_from((False, False, True)), False):
        offset = draw(query_offsets(shape, device))
    case = AttentionCase(
        query,
        key,
        value,
        mask=drawn.mask,
        visible=drawn.visible if offset is None else _moved(drawn, offset, shape),
        key_bias=chosen("key_bias", st.none() | key_biases(shape, dtype, device), None),
        bias=chosen("bias", st.none() | biases(shape, dtype, device), None),
        is_causal=chosen("is_causal", st.booleans(), False),
        scale=chosen("scale", st.sampled_from((None, None, 0.3, 1.0, -0.5, 0.0)), None),
        softcap=chosen("softcap", st.sampled_from((0.0, 0.0, 0.5, 8.0)), 0.0),
        dropout_p=chosen("dropout", st.sampled_from((0.0, 0.0, 0.2, 0.9)), 0.0),
        dropout_seed=draw(st.integers(-(2**63), 2**63 - 1)),
        deterministic=chosen("deterministic", st.booleans(), False),
        grad_seed=seed,
        grad_layout=chosen("gradient_strides", st.sampled_from(layouts), "contiguous"),
        sinks=chosen("sinks", st.none() | sinks_of_heads(shape, dtype, device), None),
        query_offset=offset,
        description=drawn.description,
    )
    case = case if "blind_queries" in allowed else _seeing(case)
    return with_expanded_biases(case) if chosen("expanded_biases", st.booleans(), False) else case


def query_offsets(shape: Shape, device: str = "cpu") -> st.SearchStrategy[int | Tensor]:
    """Positions of the first query, an int or a tensor [] or [B]: far before the keys, among them and beyond."""
    numbers = st.integers(-shape.Sq - 2, shape.Sk + 3)
    several = st.lists(numbers, min_size=shape.B, max_size=shape.B).map(lambda drawn: torch.tensor(drawn, device=device))
    return numbers | numbers.map(lambda drawn: torch.tensor(drawn, device=device)) | several


@st.composite
def sinks_of_heads(draw: st.DrawFn, shape: Shape, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """sinks [H], small and large; some -inf, which take nothing."""
    seed = draw(seeds())
    made = draw(st.sampled_from((1.0, 8.0))) * random_tensor(
        (shape.H,), seed, draw(st.sampled_from((dtype, torch.float32))), device
    )
    return torch.where(random_tensor((shape.H,), seed + 1, device=device) > 1.0, -torch.inf, made)


def with_expanded_biases(case: AttentionCase) -> AttentionCase:
    """The same biases with a number for each batch, head, query and key that they are broadcast to, which are one in memory."""
    batch, heads, queries, _ = case.query.shape
    sizes = {"key_bias": (batch, heads, case.key.shape[2]), "bias": (batch, heads, queries, case.key.shape[2])}
    expanded = {}
    for name, leaf in case.leaves().items():
        if name in sizes:
            of_leaf = zip(leaf.shape, sizes[name][-leaf.dim() :], strict=True)
            expanded[name] = leaf.expand([full if size == 1 else size for size, full in of_leaf])
    return case.with_leaves(expanded)


def _moved(drawn: DrawnMask, offset: int | Tensor, shape: Shape) -> Tensor | None:
    """What a mask means for queries that stand elsewhere: intervals and what an index mask says besides lists are of positions, all else
    counts queries."""
    if isinstance(drawn.mask, IndexMask):
        return listed_rows(drawn.mask, positions_from(offset, shape.Sq, drawn.mask.device), shape.Sk)
    if not isinstance(drawn.mask, IntervalMask):
        return drawn.visible
    start, end = (with_rank(bound, 3) for bound in (drawn.mask.start, drawn.mask.end))
    return _rows_between(start, end, positions_from(offset, shape.Sq, start.device), shape)


def _rows_between(start: Tensor, end: Tensor, p: Tensor, shape: Shape) -> Tensor:
    """Who sees a key at the positions [.., Sq, 1] from start to end [B|1, H|Hkv|1, Sk|1]."""
    start, end = (reference.per_query_head(bound, shape.H)[:, :, None] for bound in (start, end))
    return ((start <= p) & (p < end)).expand(-1, -1, shape.Sq, shape.Sk)


def some_masks(shape: Shape, device: str, kinds: Collection[str]) -> st.SearchStrategy[DrawnMask]:
    """None, and masks of the kinds ``interval_mask``, ``block_mask``, ``index_mask``, ``combined_mask`` and ``bool_mask``."""
    by_kind = {
        "interval_mask": interval_masks,
        "block_mask": block_masks,
        "index_mask": index_masks,
        "combined_mask": combined_masks,
        "bool_mask": bool_tensor_masks,
    }
    return st.one_of(no_masks(shape, device), *(of_kind(shape, device) for kind, of_kind in by_kind.items() if kind in kinds))


def _without(shape: Shape, allowed: frozenset[str]) -> Shape:
    """A shape without the features that are not allowed."""
    if "grouped_heads" not in allowed:
        shape = dataclasses.replace(shape, Hkv=shape.H)
    if "different_lengths" not in allowed:
        shape = dataclasses.replace(shape, Sq=min(shape.Sq, shape.Sk), Sk=min(shape.Sq, shape.Sk))
    return shape if "value_size" in allowed else dataclasses.replace(shape, Dv=shape.D)


def _seeing(case: AttentionCase) -> AttentionCase:
    """A case like this in which every query sees a key."""
    finite = {name: leaf.clamp(min=-4.0) for name, leaf in case.leaves().items() if name in ("key_bias", "bias")}
    case = case.with_leaves(finite)
    if not bool(sees_a_key(case).all()):
        case = dataclasses.replace(case, mask=None, visible=None, description="None")
    if not bool(sees_a_key(case).all()):
        case = dataclasses.replace(case, is_causal=False)
    return case


def _either(*sizes: int) -> st.SearchStrategy[int]:
    return st.sampled_from(sizes)


def _lead(shape: Shape) -> st.SearchStrategy[tuple[int, int]]:
    """[B|1, H|Hkv|1]."""
    return st.tuples(_either(1, shape.B), _either(1, shape.Hkv, shape.H))
