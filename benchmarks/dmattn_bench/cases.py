"""One case: what dmattn computes, on which inputs, which peers it is compared with, and what its mask is by definition."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path

import dmattn
import torch
from dmattn import reference
from torch import Tensor

from dmattn_bench.peers import BLOCK, Call, PeerError, Problem, peer_call


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload.

    Args:
        kind: dense; dma: each query sees the ``window`` best of the keys (before it, if causal) by ``scores``, which are added to the logits,
            of which the first ``sink`` and the last ``local`` for certain, so that ``window`` is how many keys are visible in any case;
            with ``documents``, within each; sliding: the last ``window`` keys; streaming: the first ``sink`` keys and the last ``window``;
            documents: ``documents`` packed sequences of unequal length; tree: a random tree in depth-first order, of which a token sees its
            ancestors; blocks: a random table of blocks of ``block``, of a given ``density``; patches: a class token that sees and is seen by
            all, and the patches of a square image in rows, which see those at most ``radius`` rows and columns away; select: no attention,
            the selection of dma alone.
        scores: random: the kept keys lie scattered, the hardest case; recent: scores rise along the sequence, the kept keys are the last
            ones; drifting: a random walk, the kept keys come in runs; trained: those in the file ``trained``, [heads, tokens].
        peers: names that ``peers.peer_call`` knows, the one to quote first.
        group: what belongs together in a table.
        in_readme: whether tables of results show it; all cases are in the JSON.
    """

    length: int
    kind: str = "dense"
    window: int | None = None
    scores: str = "random"
    sink: int = 0
    local: int = 0
    documents: int = 0
    density: float = 1.0
    block: int = BLOCK
    radius: int = 0
    trained: str = ""
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    is_causal: bool = True
    peers: tuple[str, ...] = ("torch",)
    group: str = ""
    in_readme: bool = False

    @property
    def name(self) -> str:
        lengths = f"{self.batch} x {self.length}" if self.batch > 1 else f"{self.length}"
        what = {
            "dense": "dense " + ("causal" if self.is_causal else "full"),
            "dma": self._window,
            "select": f"selection, {self._window}",
            "sliding": f"sliding window {self.window}",
            "streaming": f"streaming {self.sink} + {self.window}",
            "documents": f"{self.documents} documents",
            "tree": "tree",
            "blocks": f"blocks, density {self.density:g}" + (f", blocks of {self.block}" if self.block != BLOCK else ""),
            "patches": f"patches within {self.radius}",
        }[self.kind]
        scores = f", {self.scores} scores" if self.scores != "random" else ""
        heads = f", {self.heads} heads on {self.kv_heads}" if self.heads != self.kv_heads else ""
        return f"{lengths}, {what}{scores}{heads}" + (f", D={self.head_dim}" if self.dtype != "float32" else "")

    @property
    def _window(self) -> str:
        return (
            f"window {self.window}"
            + (f" with {self.sink} + {self.local}" if self.sink or self.local else "")
            + (f" in {self.documents} documents" if self.documents else "")
            + ("" if self.is_causal else " of all")
        )

    @property
    def selects(self) -> bool:
        return self.kind in ("dma", "select")

    @property
    def best(self) -> int:
        """How many keys are selected by score."""
        assert self.window is not None
        return self.window - self.local - self.sink

    def resized(self, length: int) -> Case:
        """The same kind of case at another length, with the window in proportion, and as many documents while they hold 64 tokens on average; an
        image keeps its radius."""
        if self.kind == "patches":
            length = max(2, math.isqrt(length - 1)) ** 2 + 1

        def in_proportion(keys: int) -> int:
            return max(1, keys * length // self.length) if keys else 0

        return dataclasses.replace(
            self,
            length=length,
            window=None if self.window is None else in_proportion(self.window),
            sink=in_proportion(self.sink),
            local=in_proportion(self.local),
            documents=min(self.documents, max(2, length // 64)) if self.documents else 0,
        )


@dataclasses.dataclass(frozen=True)
class Workload:
    """Inputs of a case and the calls to time.

    Args:
        ours: dmattn's call.
        peers: the peers' calls, in the order of ``case.peers``.
        build: what makes the mask, alone: the selection, which ``ours`` includes, or a mask that is made once and not timed with ``ours``.
        grad_out: [B, H, S, D], the gradient that enters.
        key_bias: [B, Hkv, S] fp32, what is added to the logits, or None.
        pairs: visible query-key pairs, over all batches and heads.
        dense_pairs: what a dense peer computes, likewise.
        visible: makes the mask as booleans by its definition, [B|1, H|Hkv|1, S, S] or None for all: for short lengths.
    """

    ours: Call
    peers: tuple[Call, ...]
    build: Callable[[], object] | None
    grad_out: Tensor
    key_bias: Tensor | None
    pairs: int
    dense_pairs: int
    visible: Callable[[], Tensor | None]


def workload(case: Case, device: str, with_peers: bool = True, left_out: dict[str, str] | None = None) -> Workload:
    """Normal inputs, always the same for a case.

    Args:
        left_out: takes the names of the peers that cannot do this, with the reason; without it such a peer is an error.

    Raises:
        PeerError: a peer cannot do this.
        ValueError: the file of trained scores has too few tokens or is no such file.
    """
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(case.batch, *shape, generator=generator, device=device).to(dtype)

    query = draw(case.heads, case.length, case.head_dim).requires_grad_()
    key = draw(case.kv_heads, case.length, case.head_dim).requires_grad_()
    value = draw(case.kv_heads, case.length, case.head_dim).requires_grad_()
    grad_out = draw(case.heads, case.length, case.head_dim)
    scores = _scores(case, draw(case.kv_heads, case.length).float()).requires_grad_() if case.selects else None
    table = None
    if case.kind == "blocks":
        blocks = -(-case.length // case.block)
        table = torch.rand(1, case.heads, blocks, blocks, generator=generator, device=device) < case.density

    build = _mask_builder(case, device, scores, table)
    mask = None if build is None else build()
    if case.kind == "select":
        assert scores is not None
        return _selection(case, scores, build, grad_out)
    causal = case.is_causal and case.kind in ("dense", "dma")
    base = _base(case, device)

    def attend() -> Tensor:
        if scores is not None:
            out = dmattn.dynamic_mask_attention(
                query, key, value, scores, case.best, is_causal=causal, base=base, local=case.local, sink_keys=case.sink
            )
        else:
            out = dmattn.attention(query, key, value, mask, is_causal=causal)
        assert isinstance(out, Tensor)
        return out

    inputs = (query, key, value) if scores is None else (query, key, value, scores)
    problem = Problem(
        query, key, value, case.is_causal, mask, key_bias=scores, table=table, block=case.block,
        window=case.window if case.kind == "sliding" else None, visible_at=patches_see(case) if case.kind == "patches" else None,
    )  # fmt: skip
    sizes = {"batch": case.batch, "heads": case.heads}
    return Workload(
        ours=Call("dmattn", attend, inputs),
        peers=tuple(_peers(case.peers, problem, left_out)) if with_peers else (),
        build=build,
        grad_out=grad_out,
        key_bias=scores,
        pairs=dmattn.visible_pairs(mask, case.length, case.length, is_causal=causal, **sizes)
        if table is None
        else _pairs_of_table(case, table),
        dense_pairs=dmattn.visible_pairs(None, case.length, case.length, is_causal=case.is_causal, **sizes),
        visible=lambda: _visible(case, device, scores, table),
    )


def _pairs_of_table(case: Case, table: Tensor) -> int:
    """What a table of blocks shows, over all batches and heads; the last blocks end with the sequence."""
    sizes = torch.full(table.shape[-1:], case.block, device=table.device)
    sizes[-1] = case.length - (table.shape[-1] - 1) * case.block
    return case.batch * int((table.sum((0, 1)) * sizes[:, None] * sizes).sum())


def _peers(names: tuple[str, ...], problem: Problem, left_out: dict[str, str] | None) -> list[Call]:
    made = []
    for name in names:
        try:
            made.append(peer_call(name, problem))
        except (PeerError, RuntimeError) as error:
            if left_out is None:
                raise
            left_out[name] = str(error).split("\n")[0]
    return made


def _selection(case: Case, scores: Tensor, build: Callable[[], object] | None, grad_out: Tensor) -> Workload:
    """Selection alone, vs. a full sort of the scores, which is less than any selection by sorting does."""
    assert build is not None

    def select() -> Tensor:
        mask = build()
        assert isinstance(mask, dmattn.IntervalMask)
        return mask.end

    def sort() -> Tensor:
        return torch.sort(scores.detach(), dim=-1, descending=True, stable=True).indices

    peers = (Call("torch.sort of the scores", sort, ()),) if case.peers else ()
    visible = functools.partial(_visible, case, scores.device.type, scores, None)
    return Workload(Call("IntervalMask.top_k", select, ()), peers, None, grad_out, None, 0, 0, visible)


def _scores(case: Case, noise: Tensor) -> Tensor:
    if case.scores == "recent":
        return torch.linspace(0, 1, case.length, device=noise.device).expand_as(noise).clone()
    if case.scores == "drifting":
        walk: Tensor = noise.cumsum(-1) / case.length**0.5
        return walk
    if case.scores == "trained":
        given = trained_scores(case.trained)
        if given.shape[1] < case.length:
            raise ValueError(f"{case.trained}: expected scores of {case.length} tokens or more, got {given.shape[1]}")
        heads = torch.arange(case.kv_heads) % given.shape[0]
        return given[heads, : case.length].to(noise.device).expand_as(noise).clone()
    return noise


@functools.cache
def trained_scores(path: str) -> Tensor:
    """float32 [heads, tokens], which the demo writes.

    Raises:
        ValueError: there is no such file, or something else in it.
    """
    try:
        given = torch.load(Path(path), weights_only=True)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); `make demo` writes trained scores") from None
    except Exception:
        raise ValueError(f"{path}: expected a tensor that torch.save wrote, got something else") from None
    if not isinstance(given, Tensor) or given.dim() != 2 or not given.shape[0] or not given.is_floating_point():
        raise ValueError(f"{path}: expected a floating tensor [heads, tokens], got something else")
    scores = given.float()
    if not scores.isfinite().all():
        raise ValueError(f"{path}: expected finite scores in float32, got {int((~scores.isfinite()).sum())} that are not")
    return scores


def _document_ends(case: Case) -> Tensor:
    """int32 [documents + 1]: every document has at least one key, their lengths differ by much."""
    generator = torch.Generator().manual_seed(1)
    cuts = torch.randperm(case.length - 1, generator=generator)[: case.documents - 1] + 1
    ends = torch.cat([torch.zeros(1), cuts.sort().values, torch.full((1,), case.length)])
    return ends.to(torch.int32)


def _base(case: Case, device: str) -> dmattn.IntervalMask | None:
    """What selection starts from."""
    if not case.documents:
        return None
    return dmattn.IntervalMask.documents(case.length, _document_ends(case).to(device), is_causal=case.is_causal)


def tree_parents(length: int) -> Tensor:
    """int64 [length]: a tree in depth-first order; a token follows the one before it, or, one time in eight, an ancestor drawn at random."""
    generator = torch.Generator().manual_seed(2)
    branches = (torch.rand(length, generator=generator) < 1 / 8).tolist()
    shares = torch.rand(length, generator=generator).tolist()
    parents, path = [], list[int]()  # the path from the root to the last token
    for token in range(length):
        if branches[token] and path:
            path = path[: 1 + int(shares[token] * len(path))]
        parents.append(path[-1] if path else -1)
        path.append(token)
    return torch.tensor(parents)


def patches_see(case: Case) -> Callable[[Tensor, Tensor], Tensor]:
    """Which queries see which keys in an image: a function of indices that broadcast."""
    side, radius = math.isqrt(case.length - 1), case.radius

    def see(query: Tensor, key: Tensor) -> Tensor:
        q, k = query - 1, key - 1
        near = ((q // side - k // side).abs() <= radius) & ((q % side - k % side).abs() <= radius)
        return near | (query == 0) | (key == 0)

    return see


def _mask_builder(
    case: Case, device: str, scores: Tensor | None, table: Tensor | None
) -> Callable[[], dmattn.IntervalMask | dmattn.BlockMask] | None:
    length, window = case.length, case.window or 0
    if scores is not None:
        base = _base(case, device)
        return lambda: dmattn.IntervalMask.top_k(
            scores, case.best, is_causal=case.is_causal, base=base, local=case.local, sink_keys=case.sink
        )
    if table is not None:
        return lambda: dmattn.BlockMask.from_blocks(table, case.block)
    if case.kind == "documents":
        ends = _document_ends(case).to(device)
        return lambda: dmattn.IntervalMask.documents(length, ends)
    if case.kind == "sliding":
        return lambda: dmattn.IntervalMask.sliding_window(length, window - 1, device=device)
    if case.kind == "streaming":
        return lambda: dmattn.IntervalMask.streaming(length, case.sink, window, device=device)
    if case.kind == "tree":
        parents = tree_parents(length).to(device)
        return lambda: dmattn.IntervalMask.tree_from_parents(parents)
    if case.kind == "patches":
        see = patches_see(case)
        return lambda: dmattn.BlockMask.from_function(lambda b, h, q, k: see(q, k), None, None, length, length, device=device)
    return None


def _visible(case: Case, device: str, scores: Tensor | None, table: Tensor | None) -> Tensor | None:
    query, key = torch.arange(case.length, device=device)[:, None], torch.arange(case.length, device=device)
    document = torch.bucketize(key, _document_ends(case).to(device), right=True) if case.documents else torch.zeros_like(key)
    together = (document == document[:, None])[None, None]
    if scores is not None:
        if case.documents:
            return _best_of_each(case, scores.detach(), document) & together
        return reference.top_k_visible(scores.detach(), case.best, case.is_causal, local=case.local, sink_keys=case.sink)
    if table is not None:
        whole = table.repeat_interleave(case.block, 2).repeat_interleave(case.block, 3)
        return whole[:, :, : case.length, : case.length]
    if case.kind == "patches":
        return patches_see(case)(query, key)[None, None]
    window = case.window or case.length
    visible = (key <= query) & ((query - key < window) | (key < case.sink)) if case.is_causal else torch.ones_like(key <= query)
    if case.kind == "tree":
        parents = tree_parents(case.length).tolist()
        visible = torch.zeros_like(visible)
        for token, parent in enumerate(parents):
            if parent >= 0:
                visible[token] = visible[parent]
            visible[token, token] = True
    return visible[None, None] & together


def _best_of_each(case: Case, scores: Tensor, document: Tensor) -> Tensor:
    """bool [B, Hkv, S, S]: selection within each document by itself."""
    visible = torch.zeros(*scores.shape, case.length, dtype=torch.bool, device=scores.device)
    for number in document.unique().tolist():
        tokens = (document == number).nonzero()[:, 0]
        first, last = int(tokens[0]), int(tokens[-1]) + 1
        visible[:, :, first:last, first:last] = reference.top_k_visible(
            scores[:, :, first:last], case.best, case.is_causal, local=case.local, sink_keys=case.sink
        )
    return visible
