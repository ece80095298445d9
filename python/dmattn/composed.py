"""Attention composed of torch operations, tile by tile: what the derivatives that have no kernel are computed with.

Kernels give ``out``, ``lse`` and first gradients. Tangents (forward mode), gradients of gradients and every mix of the two are sums over
tiles of queries and keys. A :class:`TileSum` is such a sum: it saves its operands alone, computes one tile at a time, and its own derivatives
are again sums over tiles. So any order of differentiation takes memory in proportion to the lengths, never to their product.

With ``m_i`` the largest logit of row i, held constant, and ``w_ij = exp(logit_ij - m_i)``, the two sums everything starts from are

    numerator_i = sum_j w_ij * dropout_ij * v_j      denominator_i = sum_j w_ij
    out_i = numerator_i / denominator_i              lse_i = m_i + log(denominator_i)
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dmattn.fake import accumulate_dtype

BLOCK_QUERIES = 256  # queries of a tile, at most
BLOCK_KEYS = 1024  # keys of a tile, at most
TILE_ELEMENTS = 1 << 22  # elements of a tile over all batches and heads, about
SMALLEST_SIDE = 16
LISTS = (1, 0, 0)  # the defaults of index_block, index_local and index_sinks

# What a tensor is sliced along: dimension -2 by queries, dimension -2 by keys, or dimensions -2 and -1 by both.
QUERIES, KEYS, PAIRS = "queries", "keys", "pairs"
# Tensors of a TileSum that are no variables: start, end, tiles, bits, indices, index_offset, dropout_seed.
CONSTANTS = 7


@dataclasses.dataclass(frozen=True)
class Problem:
    """The options of one attention call, and which of its optional tensors are there."""

    is_causal: bool
    scale: float
    softcap: float
    dropout_p: float
    has_key_bias: bool
    has_bias: bool
    lists: tuple[int, int, int] = LISTS  # index_block, index_local, index_sinks

    @property
    def kinds(self) -> tuple[str, ...]:
        """How query, key, value, key_bias and bias, those that are there, are sliced."""
        return (QUERIES, KEYS, KEYS) + (KEYS,) * self.has_key_bias + (PAIRS,) * self.has_bias


@dataclasses.dataclass(frozen=True)
class Tile:
    """Queries [first_query, last_query) and keys [first_key, last_key), and what about them is no variable.

    visible: bool [.., B|1, H|1, queries, keys], None for all. kept: dropout's factors [.., B, H, queries, keys], None without dropout.
    largest: the largest logit of each row [.., B, H, queries, 1], 0 where a row sees nothing.
    """

    visible: Tensor | None
    kept: Tensor | None
    largest: Tensor | None


class TileFunction(Protocol):
    """A pure function of the operands' slices. Its results along queries are summed over tiles of keys, and the other way round."""

    @property
    def inputs(self) -> tuple[str, ...]: ...

    @property
    def outputs(self) -> tuple[str, ...]: ...

    def __call__(self, problem: Problem, tile: Tile, *operands: Tensor) -> Sequence[Tensor]: ...


# Functions of a tile ------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sums:
    """query, key, value[, key_bias][, bias] -> numerator, denominator."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = (QUERIES, QUERIES)

    def __call__(self, problem: Problem, tile: Tile, *operands: Tensor) -> Sequence[Tensor]:
        query, key, value, key_bias, bias = _named(problem, operands)
        query, key, value = _without_unseen(tile, query, key, value)
        logits, _ = _products(problem, query, key)
        weights, sees = _weights(tile, _add_biases(logits, key_bias, bias, query), has_biases=len(operands) > 3)
        kept = weights if tile.kept is None else weights * tile.kept
        return torch.where(sees, kept @ value, 0.0), torch.where(sees, weights.sum(-1, keepdim=True), 0.0)


@dataclasses.dataclass(frozen=True)
class SumsAndTangents:
    """The operands of :class:`Sums`, then their tangents -> numerator, denominator, then their tangents, by formula."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = (QUERIES, QUERIES, QUERIES, QUERIES)

    def __call__(self, problem: Problem, tile: Tile, *operands: Tensor) -> Sequence[Tensor]:
        half = len(operands) // 2
        query, key, value, key_bias, bias = _named(problem, operands[:half])
        query_t, key_t, value_t, key_bias_t, bias_t = _named(problem, operands[half:])
        query, key, value = _without_unseen(tile, query, key, value)
        query_t, key_t, value_t = _without_unseen(tile, query_t, key_t, value_t)
        logits, slope = _products(problem, query, key)
        logits_t = (query_t @ key.transpose(-1, -2) + query @ key_t.transpose(-1, -2)) * problem.scale
        logits_t = _add_biases(logits_t if slope is None else logits_t * slope, key_bias_t, bias_t, query)
        weights, sees = _weights(tile, _add_biases(logits, key_bias, bias, query), has_biases=half > 3)
        weights_t = torch.where(weights > 0, weights * logits_t, 0.0)
        kept, kept_t = (weights, weights_t) if tile.kept is None else (weights * tile.kept, weights_t * tile.kept)
        sums = (kept @ value, weights.sum(-1, keepdim=True))
        tangents = (kept_t @ value + kept @ value_t, weights_t.sum(-1, keepdim=True))
        return tuple(torch.where(sees, given, 0.0) for given in (*sums, *tangents))


@dataclasses.dataclass(frozen=True)
class Vjp:
    """The operands of a function, then gradients of its results -> gradients of the wanted operands."""

    function: TileFunction
    wanted: tuple[bool, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.function.inputs + self.function.outputs

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(kind for kind, wanted in zip(self.function.inputs, self.wanted, strict=True) if wanted)

    def __call__(self, problem: Problem, tile: Tile, *operands: Tensor) -> Sequence[Tensor]:
        count = len(self.function.inputs)
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad():
            leaves = _leaves(operands[:count], differentiable)
            results = self.function(problem, tile, *leaves)
            chosen = [leaf for leaf, wanted in zip(leaves, self.wanted, strict=True) if wanted]
            return _gradients(results, chosen, operands[count:], differentiable)


@dataclasses.dataclass(frozen=True)
class Jvp:
    """The operands of a function, then their tangents -> tangents of its results.

    The gradients of a function are linear in what comes in, so their own gradient with respect to it (a vjp of the vjp), applied to
    tangents, is the jvp.
    """

    function: TileFunction

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.function.inputs * 2

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.function.outputs

    def __call__(self, problem: Problem, tile: Tile, *operands: Tensor) -> Sequence[Tensor]:
        count = len(self.function.inputs)
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad():
            leaves = _leaves(operands[:count], differentiable)
            results = self.function(problem, tile, *leaves)
            incoming = [torch.zeros_like(result).requires_grad_() for result in results]
            gradients = _gradients(results, leaves, incoming, True)
            pairs = [
                (gradient, tangent)
                for gradient, tangent in zip(gradients, operands[count:], strict=True)
                if gradient.requires_grad
            ]
            return _gradients([g for g, _ in pairs], incoming, [t for _, t in pairs], differentiable)


def _leaves(operands: Sequence[Tensor], differentiable: bool) -> list[Tensor]:
    """The operands as variables: themselves where a graph is recorded through them, else detached."""
    return [x if differentiable and x.requires_grad else x.detach().requires_grad_() for x in operands]


def _gradients(
    results: Sequence[Tensor], wanted: Sequence[Tensor], incoming: Sequence[Tensor], create_graph: bool
) -> Sequence[Tensor]:
    if not results:
        return [torch.zeros_like(x) for x in wanted]
    return torch.autograd.grad(results, wanted, incoming, create_graph=create_graph, allow_unused=True, materialize_grads=True)


def _named(problem: Problem, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    query, key, value, *biases = operands
    key_bias = biases[0] if problem.has_key_bias else None
    return query, key, value, key_bias, biases[-1] if problem.has_bias else None


def _without_unseen(tile: Tile, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values by query heads; zeros for rows and keys that nobody in the tile sees or is seen by: they may hold NaN."""
    heads = query.shape[-3]
    key, value = per_query_head(key, heads), per_query_head(value, heads)
    if tile.visible is None:
        return query, key, value
    seen = tile.visible.any(-2)[..., None]
    return torch.where(tile.visible.any(-1, keepdim=True), query, 0.0), torch.where(seen, key, 0.0), torch.where(seen, value, 0.0)


def _products(problem: Problem, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor | None]:
    """The capped products, and how fast each grows with its uncapped one (None: as fast)."""
    products = (query @ key.transpose(-1, -2)) * problem.scale
    if problem.softcap == 0:
        return products, None
    share = torch.tanh(products / problem.softcap)
    return problem.softcap * share, 1.0 - share * share


def _add_biases(logits: Tensor, key_bias: Tensor | None, bias: Tensor | None, query: Tensor) -> Tensor:
    heads = query.shape[-3]
    if key_bias is not None:
        logits = logits + per_query_head(key_bias, heads).transpose(-1, -2)
    return logits if bias is None else logits + per_query_head(bias, heads).to(logits.dtype)


def _hide(tile: Tile, logits: Tensor, has_biases: bool) -> Tensor:
    """-inf where a pair is invisible; a bias of -inf hides as well, from gradients, too."""
    if has_biases:
        logits = torch.where(logits == -torch.inf, -torch.inf, logits)
    return logits if tile.visible is None else torch.where(tile.visible, logits, -torch.inf)


def _weights(tile: Tile, logits: Tensor, has_biases: bool) -> tuple[Tensor, Tensor]:
    """Weights before they are divided by their sum, and which rows see something in this tile [.., B, H, queries, 1]."""
    assert tile.largest is not None
    logits = _hide(tile, logits, has_biases)
    return torch.exp(logits - tile.largest), (logits != -torch.inf).any(-1, keepdim=True)


def per_query_head(given: Tensor, heads: int) -> Tensor:
    """[.., H|Hkv|1, x, y] to [.., H|1, x, y]."""
    return given if given.shape[-3] in (1, heads) else given.repeat_interleave(heads // given.shape[-3], dim=-3)


# The sum over tiles -------------------------------------------------------------------------------------------------------------------


class TileSum(torch.autograd.Function):
    """``apply(function, problem, start, end, tiles, bits, indices, index_offset, dropout_seed, *operands)`` -> the function's results, summed
    over tiles.

    Operands are [.., B, heads, S, size] (key_bias and lse with size 1), masks as in the op ``forward``. What stands before B
    are dimensions that were vmapped over: every operand and every mask but bits has them, each with its full size.
    """

    @staticmethod
    def forward(function: TileFunction, problem: Problem, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        with without_autocast(tensors[CONSTANTS]):
            return _sum_over_tiles(function, problem, tensors[:CONSTANTS], tensors[CONSTANTS:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.function, ctx.problem, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Any, ...]:
        before = 2 + CONSTANTS
        wanted = tuple(ctx.needs_input_grad[before:])
        gradients = iter(TileSum.apply(Vjp(ctx.function, wanted), ctx.problem, *ctx.saved_tensors, *incoming))
        return (*(None,) * before, *(next(gradients) if w else None for w in wanted))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        with primals(ctx) as tensors:
            pairs = zip(tensors[CONSTANTS:], tangents[2 + CONSTANTS :], strict=True)
            given = [_zeros(x) if t is None else t for x, t in pairs]
            results: tuple[Tensor, ...] = TileSum.apply(Jvp(ctx.function), ctx.problem, *tensors, *given)
        return results

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], function: TileFunction, problem: Problem, *tensors: Tensor | None) -> Any:
        size, dims = info.batch_size, list(in_dims[2:])
        bits, bits_dim = tensors[3], dims[3]
        moved = [None if x is None else in_front(x, dim, size) for x, dim in zip(tensors, dims, strict=True)]
        moved[3] = bits
        if bits is not None and bits_dim is not None:
            assert moved[2] is not None
            moved[2], moved[3] = in_one_pool(moved[2], bits.movedim(bits_dim, 0))
        results = TileSum.apply(function, problem, *moved)
        return results, (0,) * len(results)


def _sum_over_tiles(
    function: TileFunction, problem: Problem, constants: Sequence[Tensor | None], operands: Sequence[Any]
) -> tuple[Tensor, ...]:
    grid = _grid(problem, constants, operands)
    largest = _largest_logits(problem, grid, constants, operands)
    parts: list[dict[Any, Tensor]] = [{} for _ in function.outputs]
    for row, column in grid.occupied:
        place = grid.place(row, column)
        tile = _tile(problem, place, constants, operands, largest[row])
        results = function(problem, tile, *_slices(function.inputs, operands, place))
        for part, kind, result in zip(parts, function.outputs, results, strict=True):
            where = {QUERIES: row, KEYS: column, PAIRS: (row, column)}[kind]
            part[where] = part[where] + result if where in part else result
    return tuple(_joined(part, kind, grid) for part, kind in zip(parts, function.outputs, strict=True))


def without_autocast(query: Any) -> AbstractContextManager[Any]:
    """Products are of the dtype things are summed in, also where autocast would round their factors."""
    device = query.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


@contextmanager
def primals(ctx: Any) -> Iterator[list[Any]]:
    """What a Function saved for its jvp, without the tangents of that jvp.

    Inside, forward mode is on: torch turns it off around a jvp, for transforms further out as well, whose tangents would be lost.
    """
    level = 0  # torch has no other, and compiled code does not say that it has opened it
    with forward_ad._set_fwd_grad_enabled(True):
        yield [None if x is None else forward_ad.unpack_dual(x, level=level).primal for x in ctx.saved_tensors]


def in_front(given: Tensor, dim: int | None, size: int) -> Tensor:
    """The vmapped dimension first; what does not have one is repeated without a copy."""
    return given.expand(size, *given.shape) if dim is None else given.movedim(dim, 0)


def in_one_pool(tiles: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """tiles [V, ..] with bits [V, slots, ..] of their own each as tiles [V, ..] that share bits [V * slots, ..]."""
    slots = bits.shape[1]
    offset = (torch.arange(tiles.shape[0], device=tiles.device, dtype=tiles.dtype) * slots).view(-1, *(1,) * (tiles.dim() - 1))
    known = (tiles >= 2) & (tiles < 2 + slots)  # 0 empty, 1 full, 2 + slot partial
    return torch.where(known, tiles + offset, torch.where(tiles >= 2, 0, tiles)), bits.flatten(0, 1)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)


Span = tuple[int, int]  # first, and the one behind the last
Place = tuple[Span, Span]  # queries, keys


@dataclasses.dataclass(frozen=True)
class Grid:
    """The tiles: spans of queries and of keys, and the (row, column) of those in which somebody may see something."""

    rows: list[Span]
    columns: list[Span]
    occupied: list[tuple[int, int]]

    def place(self, row: int, column: int) -> Place:
        return self.rows[row], self.columns[column]


def _slices(kinds: Sequence[str], operands: Sequence[Any], place: Place) -> list[Tensor]:
    (first_query, last_query), (first_key, last_key) = place

    def sliced(given: Tensor, kind: str) -> Tensor:
        if kind == KEYS:
            return given.narrow(-2, first_key, last_key - first_key)
        given = given.narrow(-2, first_query, last_query - first_query)
        return given if kind == QUERIES else given.narrow(-1, first_key, last_key - first_key)

    return [sliced(x, kind) for x, kind in zip(operands, kinds, strict=True)]


def _joined(parts: dict[Any, Tensor], kind: str, grid: Grid) -> Tensor:
    """The results of all tiles side by side, zeros where there was no tile."""
    like = next(iter(parts.values()))

    def line(kept: dict[int, Tensor], spans: list[Span], dim: int, shape: list[int]) -> Tensor:
        pieces = []
        for number, (first, last) in enumerate(spans):
            shape[dim] = last - first
            pieces.append(kept[number] if number in kept else like.new_zeros(shape))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)

    shape = list(like.shape)
    if kind != PAIRS:
        return line(parts, grid.rows if kind == QUERIES else grid.columns, -2, shape)
    lines = {}
    for row, (first, last) in enumerate(grid.rows):
        shape[-2] = last - first
        lines[row] = line({c: x for (r, c), x in parts.items() if r == row}, grid.columns, -1, list(shape))
    return line(lines, grid.rows, -2, shape)


def _largest_logits(
    problem: Problem, grid: Grid, constants: Sequence[Tensor | None], operands: Sequence[Any]
) -> dict[int, Tensor]:
    """For each row of tiles the largest logit of each query, [.., B, H, queries, 1], 0 where it sees nothing."""
    kinds, largest = problem.kinds, dict[int, Tensor]()
    for row, column in grid.occupied:
        place = grid.place(row, column)
        tile = _tile(problem, place, constants, operands, None)
        query, key, value, key_bias, bias = _named(problem, _slices(kinds, operands[: len(kinds)], place))
        query, key, _ = _without_unseen(tile, query, key, value)
        logits = _hide(tile, _add_biases(_products(problem, query, key)[0], key_bias, bias, query), len(kinds) > 3)
        most = logits.amax(-1, keepdim=True) if logits.shape[-1] else torch.zeros_like(query[..., :1])
        largest[row] = torch.maximum(largest[row], most) if row in largest else most
    return {row: torch.where(torch.isinf(most), 0.0, most) for row, most in largest.items()}


def _tile(
    problem: Problem, place: Place, constants: Sequence[Tensor | None], operands: Sequence[Any], largest: Tensor | None
) -> Tile:
    query, key = operands[:2]
    seed = constants[CONSTANTS - 1]
    kept = None
    if problem.dropout_p > 0 and seed is not None and largest is not None:
        kept = dropout_factors(seed, problem.dropout_p, query.shape[-4], query.shape[-3], place).to(query.dtype)
    masks, shift = Masks(*constants[: CONSTANTS - 1]), key.shape[-2] - query.shape[-2]
    rows = torch.arange(*place[0], device=query.device)
    visible = pairs_seen(masks, problem.is_causal, problem.lists, rows, place[1], shift, query.shape[-3])
    return Tile(visible, kept, largest)


class Masks(NamedTuple):
    """What the op ``forward`` gets of a mask, but for the lists of occupied tiles."""

    start: Tensor | None
    end: Tensor | None
    tiles: Tensor | None
    bits: Tensor | None
    indices: Tensor | None
    index_offset: Tensor | None


def pairs_seen(
    masks: Masks, is_causal: bool, lists: tuple[int, int, int], rows: Tensor, keys: Span, shift: int, heads: int
) -> Tensor | None:
    """Which queries of these numbers [queries], which stand ``shift`` behind them, see which of these keys: bool
    [.., B|1, H|1, queries, keys], None for all."""
    start, end, tiles, bits, indices, index_offset = masks
    first_key, last_key = keys
    column, row = torch.arange(*keys, device=rows.device), rows[:, None]
    position = row + shift
    parts = []
    if is_causal:
        parts.append(column <= position)
    if start is not None:
        parts.append(per_query_head(start[..., None, first_key:last_key], heads) <= position)
    if end is not None:
        parts.append(position < per_query_head(end[..., None, first_key:last_key], heads))
    if tiles is not None and bits is not None:
        parts.append(per_query_head(visible_in_blocks(tiles, bits, row, column), heads))
    if indices is not None:
        own = position if index_offset is None else row + index_offset[..., None, None, None]
        listed = visible_in_lists(indices[..., rows, :], lists, own, keys)
        parts.append(per_query_head(listed, heads))
    if not parts:
        return None
    return functools.reduce(operator.and_, parts)


def visible_in_blocks(tiles: Tensor, bits: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """What a block mask says of these queries [queries, 1] and keys [keys], bool [.., B|1, H|Hkv|1, queries, keys]; 0 empty, 1 full, 2 + slot
    partial."""
    slots, tile_q, words = bits.shape
    state = tiles[..., row // tile_q, column // (words * 32)].long()
    if slots == 0:
        return state == 1
    word = ((state - 2).clamp(0, slots - 1) * tile_q + row % tile_q) * words + column % (words * 32) // 32
    bit = (bits.flatten()[word] >> (column % 32)) & 1
    return (state == 1) | ((state >= 2) & (state < 2 + slots) & (bit != 0))


def visible_in_lists(indices: Tensor, lists: tuple[int, int, int], position: Tensor, keys: Span) -> Tensor:
    """What an index mask says of some keys: bool [.., B|1, H|Hkv|1, queries, keys].

    Args:
        indices: the lists of the queries, [.., B|1, H|Hkv|1, queries, K].
        lists: keys of a block, of the local window, and sinks.
        position: where the queries stand, [.., queries, 1].
        keys: the first, and the one behind the last.
    """
    block, local, sinks = lists
    column = torch.arange(*keys, device=indices.device)
    first = keys[0] // block
    blocks = -(-keys[1] // block) - first
    entry = indices.long() - first
    entry = torch.where((entry >= 0) & (entry < blocks), entry, blocks)  # one column more, for what is listed elsewhere
    listed = torch.zeros((*entry.shape[:-1], blocks + 1), dtype=torch.bool, device=indices.device)
    seen = listed.scatter(-1, entry, True)[..., column // block - first]
    if local:
        seen = seen | ((position - local < column) & (column <= position))
    return seen | (column < sinks) if sinks else seen


def dropout_factors(seed: Tensor, p: float, batch: int, heads: int, place: Place) -> Tensor:
    """0 or 1 / (1 - p) for a tile's pairs, [.., B, H, queries, keys]: the counter-based hash of cpp/params.h. seed: int64 [.., 1]."""

    def spread(x: Tensor) -> Tensor:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        return ((x ^ (x >> 15)) * (0x846CA68B - (1 << 32))) & 0xFFFFFFFF

    def mix(x: Tensor) -> Tensor:
        x = spread(x)
        return x ^ (x >> 16)

    device = seed.device
    seed = seed[..., None, None, None]
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    head = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    row, column = (torch.arange(*span, device=device) for span in place)
    key = mix(mix(mix(low ^ 0x9E3779B9) ^ high) ^ mix(head + 0x85EBCA6B))
    key = mix(key ^ mix(row[:, None] + 0xC2B2AE35))
    hashed = spread(key ^ ((column * 0x9E3779B9) & 0xFFFFFFFF))
    return (hashed >= min(int(p * 2**32), 2**32 - 1)).double() / (1.0 - p)


# Which tiles there are ----------------------------------------------------------------------------------------------------------------


def _grid(problem: Problem, constants: Sequence[Tensor | None], operands: Sequence[Any]) -> Grid:
    """The tiles; each row has one at least, so that every row has results."""
    query, key = operands[:2]
    queries, keys, many = query.shape[-2], key.shape[-2], query.shape[:-2].numel()
    height, width = BLOCK_QUERIES, BLOCK_KEYS
    while many * height * width > TILE_ELEMENTS and max(height, width) > SMALLEST_SIDE:
        height, width = (height // 2, width) if height > width else (height, width // 2)
    rows = [(first, min(first + height, queries)) for first in range(0, queries, height)] or [(0, 0)]
    columns = [(first, min(first + width, keys)) for first in range(0, keys, width)] or [(0, 0)]
    shift = keys - queries
    table = _occupied(problem, constants, rows, columns, shift)
    occupied = []
    for r, row in enumerate(rows):
        reach = row[1] + shift if problem.is_causal else keys
        chosen = [c for c, column in enumerate(columns) if column[0] < reach and (table is None or table[r][c])]
        occupied += [(r, c) for c in chosen or [0]]
    return Grid(rows, columns, occupied)


def _occupied(
    problem: Problem, constants: Sequence[Tensor | None], rows: list[Span], columns: list[Span], shift: int
) -> list[list[bool]] | None:
    """For each tile whether its interval and block masks may let something through; None when their values cannot be read now."""
    start, end, tiles, bits = constants[:4]
    given = [x for x in (start, end, tiles) if x is not None and x.numel()]
    if not given or len(rows) * len(columns) == 1 or not all(_readable(x) for x in given):
        return None
    device = given[0].device
    table = torch.ones(len(rows), len(columns), dtype=torch.bool, device=device)
    first, last = (torch.tensor([row[side] for row in rows], device=device)[:, None] + shift for side in (0, 1))
    cuts = [stop - begin for begin, stop in columns]
    if start is not None and start.numel():
        table &= torch.stack([part.amin() for part in start.split(cuts, dim=-1)]) < last
    if end is not None and end.numel():
        table &= torch.stack([part.amax() for part in end.split(cuts, dim=-1)]) > first
    if tiles is not None and tiles.numel() and bits is not None:
        tile_q, tile_k = bits.shape[-2], bits.shape[-1] * 32
        occupied = (tiles != 0).flatten(0, -3).any(0)
        by_row = torch.stack([occupied[a // tile_q : (b - 1) // tile_q + 1].any(0) for a, b in rows])
        table &= torch.stack([by_row[:, a // tile_k : (b - 1) // tile_k + 1].any(1) for a, b in columns], dim=1)
    visible: list[list[bool]] = table.tolist()
    return visible


def _readable(given: Tensor) -> bool:
    """Whether values can be asked for: not while something traces, nor while a CUDA graph is captured."""
    if torch.compiler.is_compiling() or type(given) is not Tensor or torch._C._is_tracing():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active() or given.is_meta:
        return False
    return not (given.is_cuda and torch.cuda.is_current_stream_capturing())


# Derivatives of the ops ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the op ``forward`` in the form that sums over tiles take."""

    problem: Problem
    constants: tuple[Tensor | None, ...]
    operands: tuple[Tensor, ...]
    dtype: torch.dtype

    def sum(self, function: TileFunction, *more: Tensor) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = TileSum.apply(function, self.problem, *self.constants, *self.operands, *more)
        return results

    def alike(self, given: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Tangents or gradients of query, key, value, key_bias, bias as operands are; zeros for those that are None."""
        query, key, value, key_bias, bias = given
        chosen = [query, key, value]
        if self.problem.has_key_bias:
            chosen.append(None if key_bias is None else key_bias[..., None])
        if self.problem.has_bias:
            chosen.append(bias)
        return tuple(_zeros(like) if x is None else x.to(like.dtype) for x, like in zip(chosen, self.operands, strict=True))


def call_of(inputs: Sequence[Any]) -> Call:
    """From all arguments of the op ``forward``, in its order; last ones that have their defaults may be left out."""
    query, key, value, start, end, tiles, _, _, bits, indices, index_offset, key_bias, bias, dropout_seed, *options = inputs
    is_causal, scale, softcap, dropout_p, _, *more = options
    lists = (*more[2:], *LISTS[len(more[2:]) :])  # behind the hints
    summed = accumulate_dtype(query.dtype)
    problem = Problem(is_causal, scale, softcap, dropout_p, key_bias is not None, bias is not None, lists)
    biases = [key_bias[..., None]] if key_bias is not None else []
    biases += [bias] if bias is not None else []
    seed = dropout_seed.reshape(1) if dropout_p > 0 and dropout_seed is not None else None
    operands = (query.to(summed), key.to(summed), value.to(summed), *biases)
    return Call(problem, (start, end, tiles, bits, indices, index_offset, seed), operands, query.dtype)


def _inverse(denominator: Tensor) -> Tensor:
    """1 / denominator, 0 for a row that sees nothing."""
    sees = denominator > 0
    return torch.where(sees, 1.0 / torch.where(sees, denominator, 1.0), 0.0)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def tangents(inputs: Sequence[Any], given: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Forward mode through the op ``forward``.

    Args:
        inputs: all of the op's arguments.
        given: tangents of query, key, value, key_bias and bias, None for zero.

    Returns:
        Tangents of out [B, H, Sq, Dv] in query's dtype and of lse [B, H, Sq]; both 0 for a query that sees nothing.
    """
    call = call_of(inputs)
    both = SumsAndTangents(call.problem.kinds * 2)
    numerator, denominator, numerator_t, denominator_t = call.sum(both, *call.alike(given))
    inverse = _inverse(denominator)
    lse_t = denominator_t * inverse
    return ((numerator_t - lse_t * numerator) * inverse).to(call.dtype), lse_t[..., 0]


def _incoming(grad_out: Tensor | None, grad_lse: Tensor | None, numerator: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients, or their tangents, of out and of lse [.., B, H, Sq, 1]: zeros for None, and where a row sees nothing.

    Those of numerator and denominator are then grad_out / denominator and (grad_lse - <grad_out, out>) / denominator.
    """
    grad_lse = None if grad_lse is None else grad_lse[..., None]
    grad_out, grad_lse = (
        torch.zeros_like(like) if given is None else torch.where(denominator > 0, given.to(like.dtype), 0.0)
        for given, like in ((grad_out, numerator), (grad_lse, denominator))
    )
    return grad_out, grad_lse


def _needed(problem: Problem, need_key_bias: bool, need_bias: bool) -> tuple[bool, ...]:
    """Which operands the op ``backward`` gives gradients of, the first three in any case."""
    return (True, True, True) + (need_key_bias,) * problem.has_key_bias + (need_bias,) * problem.has_bias


def _by_name(problem: Problem, needed: Sequence[bool], given: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients of the needed operands as those of query, key, value, key_bias, bias."""
    rest = iter(given)
    query, key, value, *biases = (next(rest) if wanted else None for wanted in needed)
    key_bias = biases[0] if problem.has_key_bias else None
    return [query, key, value, None if key_bias is None else key_bias[..., 0], biases[-1] if problem.has_bias else None]


def gradients_of_gradients(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    inputs: Sequence[Any],
    need: tuple[bool, bool],
    given: Sequence[Tensor | None],
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Reverse mode through the op ``backward``, with out and lse as functions of the other arguments.

    Args:
        grad_out, grad_lse: what the op was given.
        inputs: all arguments of the op ``forward``.
        need: the op's need_key_bias and need_bias.
        given: incoming gradients of the op's five results, None for zero.
        wanted: whether gradients of key_bias and bias are wanted.

    Returns:
        Gradients of grad_out, of grad_lse [B, H, Sq], and of query, key, value, key_bias and bias, in the dtypes things are summed in.
    """
    call = call_of(inputs)
    problem = call.problem
    once = _needed(problem, *need)
    twice = _needed(problem, *wanted)
    sums = Sums(problem.kinds)
    numerator, denominator = call.sum(sums)
    inverse = _inverse(denominator)
    grad_out, of_lse = _incoming(grad_out, grad_lse, numerator, denominator)
    out, square = numerator * inverse, inverse * inverse
    bars = (grad_out * inverse, (of_lse - _dot(grad_out, out)) * inverse)

    # Through the gradients as functions of operands, numerator_bar and denominator_bar.
    gradients = call.sum(Vjp(Vjp(sums, once), (*twice, True, True)), *bars, *(
        x for x, needed in zip(call.alike(given), once, strict=True) if needed))  # fmt: skip
    *direct, numerator_bar_bar, denominator_bar_bar = gradients

    # Through numerator_bar and denominator_bar as functions of grad_out, grad_lse, numerator and denominator.
    grad_out_bar = numerator_bar_bar * inverse - denominator_bar_bar * out * inverse
    grad_lse_bar = denominator_bar_bar * inverse
    more_numerator_bar = -denominator_bar_bar * grad_out * square
    more_denominator_bar = -_dot(numerator_bar_bar, grad_out) * square
    more_denominator_bar = more_denominator_bar + denominator_bar_bar * square * (2.0 * _dot(grad_out, out) - of_lse)

    # Through numerator and denominator as functions of operands.
    indirect = call.sum(Vjp(sums, twice), more_numerator_bar, more_denominator_bar)
    total = [a + b for a, b in zip(direct, indirect, strict=True)]
    return grad_out_bar, grad_lse_bar[..., 0], _by_name(problem, twice, total)


def tangents_of_gradients(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    inputs: Sequence[Any],
    need: tuple[bool, bool],
    grad_out_t: Tensor | None,
    grad_lse_t: Tensor | None,
    given: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Forward mode through the op ``backward``, with out and lse as functions of the other arguments.

    Args:
        grad_out, grad_lse, inputs, need: as in :func:`gradients_of_gradients`.
        grad_out_t, grad_lse_t: tangents of the first two, None for zero.
        given: tangents of query, key, value, key_bias and bias, None for zero.

    Returns:
        Tangents of the op's five results, None for those that are not needed.
    """
    call = call_of(inputs)
    problem = call.problem
    needed = _needed(problem, *need)
    operands_t = call.alike(given)
    numerator, denominator, numerator_t, denominator_t = call.sum(SumsAndTangents(problem.kinds * 2), *operands_t)
    inverse = _inverse(denominator)
    inverse_t = -denominator_t * inverse * inverse
    grad_out, of_lse = _incoming(grad_out, grad_lse, numerator, denominator)
    of_out_t, of_lse_t = _incoming(grad_out_t, grad_lse_t, numerator, denominator)
    out, out_t = numerator * inverse, numerator_t * inverse + numerator * inverse_t
    rest = of_lse - _dot(grad_out, out)
    rest_t = of_lse_t - _dot(of_out_t, out) - _dot(grad_out, out_t)
    bars_t = (of_out_t * inverse + grad_out * inverse_t, rest_t * inverse + rest * inverse_t)

    function = Jvp(Vjp(Sums(problem.kinds), needed))
    results = call.sum(function, grad_out * inverse, rest * inverse, *operands_t, *bars_t)
    return _by_name(problem, needed, results)
