"""The named workloads: a table is a device and its cases; every case says what dmattn computes and which peers stand beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import dmattn
import torch
from dmattn import reference
from peers import Call, peer_call
from torch import Tensor

BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload.

    Args:
        kind: dense; dma: each query sees the ``window`` best of the keys (before it, if causal) by ``scores``, which are added to the logits,
            of which the first ``sink`` and the last ``local`` for certain, so that ``window`` is how many keys are visible in any case;
            sliding: the last ``window`` keys; streaming: the first ``sink`` keys and the last ``window``; documents: ``documents`` packed
            sequences of unequal length; blocks: a random table of blocks of 128, of a given ``density``.
        scores: random: the kept keys lie scattered, the hardest case; recent: scores rise along the sequence, the kept keys are the last
            ones; drifting: a random walk, the kept keys come in runs.
        peers: names that ``peers.peer_call`` knows, the one to quote first.
        group: what ``run.py --only`` chooses by.
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
            "dma": f"window {self.window}"
            + (f" with {self.sink} + {self.local}" if self.sink or self.local else "")
            + ("" if self.is_causal else " of all"),
            "sliding": f"sliding window {self.window}",
            "streaming": f"streaming {self.sink} + {self.window}",
            "documents": f"{self.documents} documents",
            "blocks": f"blocks, density {self.density:g}",
        }[self.kind]
        scores = f", {self.scores} scores" if self.scores != "random" else ""
        heads = f", {self.heads} heads on {self.kv_heads}" if self.heads != self.kv_heads else ""
        return f"{lengths}, {what}{scores}{heads}" + (f", D={self.head_dim}" if self.dtype != "float32" else "")

    def resized(self, length: int) -> Case:
        """The same kind of case at another length, with the window and the documents in proportion."""
        shrink = lambda n: max(1, n * length // self.length) if n else n  # noqa: E731
        return dataclasses.replace(
            self,
            length=length,
            window=shrink(self.window),
            sink=shrink(self.sink),
            local=shrink(self.local),
            documents=min(self.documents, max(2, length // 64)) if self.documents else 0,
        )


@dataclasses.dataclass(frozen=True)
class Table:
    device: str
    cases: tuple[Case, ...]
    repeats: int

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(case.group for case in self.cases))


def _gpu(length: int, **options: object) -> Case:
    return dataclasses.replace(Case(length, heads=16, kv_heads=16, head_dim=128, dtype="bfloat16"), **options)  # type: ignore[arg-type]


def _gpu_dma() -> list[Case]:
    """Beside cuDNN's dense causal kernel, which is what one would run without a mask."""
    sizes = ((4096, 410), (16384, 819), (32768, 1024), (65536, 1638), (131072, 2048))
    cases = [_gpu(n, kind="dma", window=w, peers=("cudnn",), group="dma", in_readme=n in (4096, 32768, 131072)) for n, w in sizes]
    for n, w in sizes[1:]:
        more = [{"scores": "recent"}, {"scores": "drifting"}, {"heads": 32, "kv_heads": 8, "in_readme": n == 32768}]
        cases += [_gpu(n, kind="dma", window=w, peers=("cudnn",), group="dma", **options) for options in more]
    return cases


def _gpu_dma_local() -> list[Case]:
    """A quarter of the visible keys local, and four sinks, beside plain selection of as many keys."""
    sizes = ((16384, 819), (32768, 1024), (131072, 2048))
    beside = ({}, {"sink": 4, "local": 256})
    return [_gpu(n, kind="dma", window=w, peers=("cudnn",), group="dma-local", **more) for n, w in sizes for more in beside]


def _gpu_dma_full() -> list[Case]:
    """Not causal: one set of keys for all queries. Beside our own dense kernel and cuDNN's."""
    sizes = ((1024, 0.2), (4096, 0.1), (16384, 0.05), (65536, 0.025))
    return [
        _gpu(
            n,
            kind="dma",
            window=int(n * ratio),
            is_causal=False,
            peers=("dmattn", "cudnn"),
            group="dma-full",
            in_readme=n == 16384,
        )
        for n, ratio in sizes
    ]


def _gpu_intervals() -> list[Case]:
    """Beside our own dense causal kernel: the ideal is its time in proportion to the visible pairs."""
    kinds = (
        {"kind": "sliding", "window": 4096},
        {"kind": "streaming", "sink": 64, "window": 1024},
        {"kind": "documents", "documents": 64},
    )
    return [_gpu(65536, peers=("dmattn",), group="intervals", in_readme=True, **options) for options in kinds]


def _gpu_blocks() -> list[Case]:
    densities = (1.0, 0.5, 0.25, 0.1, 0.05)
    return [
        _gpu(16384, kind="blocks", density=d, is_causal=False, peers=("flex",), group="blocks", in_readme=d in (1.0, 0.1))
        for d in densities
    ]


def _gpu_dense() -> list[Case]:
    sizes = ((4, 4096), (1, 16384), (1, 32768))
    return [
        _gpu(n, batch=b, head_dim=d, is_causal=causal, peers=("cudnn", "flash"), group="dense", in_readme=d == 128 and n == 16384)
        for d in (128, 64)
        for b, n in sizes
        for causal in (False, True)
    ]


TABLES = {
    "cpu": Table(
        "cpu",
        (
            Case(4096, "dma", 410, group="dma", in_readme=True),
            Case(16384, "dma", 819, group="dma", in_readme=True),
            Case(4096, group="dense", in_readme=True),
            Case(16384, group="dense", in_readme=True),
        ),
        repeats=5,
    ),
    "cuda": Table(
        "cuda", (*_gpu_dma(), *_gpu_dma_local(), *_gpu_dma_full(), *_gpu_intervals(), *_gpu_blocks(), *_gpu_dense()), repeats=7
    ),
}
QUICK_LENGTHS = {4096: 1024, 16384: 2048, 32768: 2048, 65536: 4096, 131072: 4096}


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


def workload(case: Case, device: str, with_peers: bool = True) -> Workload:
    """Normal inputs, always the same for a case."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(case.batch, *shape, generator=generator, device=device).to(dtype)

    query = draw(case.heads, case.length, case.head_dim).requires_grad_()
    key = draw(case.kv_heads, case.length, case.head_dim).requires_grad_()
    value = draw(case.kv_heads, case.length, case.head_dim).requires_grad_()
    grad_out = draw(case.heads, case.length, case.head_dim)
    scores = _scores(case, draw(case.kv_heads, case.length).float()).requires_grad_() if case.kind == "dma" else None
    table = None
    if case.kind == "blocks":
        blocks = -(-case.length // BLOCK)
        table = torch.rand(1, case.heads, blocks, blocks, generator=generator, device=device) < case.density

    build = _mask_builder(case, device, scores, table)
    mask = None if build is None else build()
    causal = case.is_causal and case.kind in ("dense", "dma")

    def attend() -> Tensor:
        if scores is not None:
            assert case.window is not None
            window = case.window - case.local - case.sink
            out = dmattn.dynamic_mask_attention(
                query, key, value, scores, window, is_causal=causal, local=case.local, sink=case.sink
            )
        else:
            out = dmattn.attention(query, key, value, mask, is_causal=causal)
        assert isinstance(out, Tensor)
        return out

    inputs = (query, key, value) if scores is None else (query, key, value, scores)
    ours = Call("dmattn", attend, inputs)
    made = [peer_call(name, query, key, value, case.is_causal, table) for name in case.peers] if with_peers else []
    sizes = {"batch": case.batch, "heads": case.heads}
    return Workload(
        ours=ours,
        peers=tuple(made),
        build=build,
        grad_out=grad_out,
        key_bias=scores,
        pairs=dmattn.visible_pairs(mask, case.length, case.length, is_causal=causal, **sizes)
        if table is None
        else int(table.sum()) * BLOCK * BLOCK,
        dense_pairs=dmattn.visible_pairs(None, case.length, case.length, is_causal=case.is_causal, **sizes),
        visible=lambda: _visible(case, device, scores, table),
    )


def _scores(case: Case, noise: Tensor) -> Tensor:
    if case.scores == "recent":
        return torch.linspace(0, 1, case.length, device=noise.device).expand_as(noise).clone()
    if case.scores == "drifting":
        return noise.cumsum(-1) / case.length**0.5
    return noise


def _document_ends(case: Case) -> Tensor:
    """int32 [documents + 1]: every document has at least one key, their lengths differ by much."""
    generator = torch.Generator().manual_seed(1)
    cuts = torch.randperm(case.length - 1, generator=generator)[: case.documents - 1] + 1
    ends = torch.cat([torch.zeros(1), cuts.sort().values, torch.full((1,), case.length)])
    return ends.to(torch.int32)


def _mask_builder(
    case: Case, device: str, scores: Tensor | None, table: Tensor | None
) -> Callable[[], dmattn.IntervalMask | dmattn.BlockMask] | None:
    length, window = case.length, case.window or 0
    if scores is not None:
        best = window - case.local - case.sink
        return lambda: dmattn.IntervalMask.top_k(scores, best, causal=case.is_causal, local=case.local, sink=case.sink)
    if table is not None:
        return lambda: dmattn.BlockMask.from_blocks(table, BLOCK)
    if case.kind == "documents":
        ends = _document_ends(case).to(device)
        return lambda: dmattn.IntervalMask.documents(length, ends)
    if case.kind == "sliding":
        return lambda: dmattn.IntervalMask.sliding_window(length, window - 1, device=device)
    if case.kind == "streaming":
        return lambda: dmattn.IntervalMask.streaming(length, case.sink, window, device=device)
    return None


def _visible(case: Case, device: str, scores: Tensor | None, table: Tensor | None) -> Tensor | None:
    if scores is not None:
        assert case.window is not None
        best = case.window - case.local - case.sink
        return reference.top_k_visible(scores.detach(), best, case.is_causal, local=case.local, sink=case.sink)
    if table is not None:
        return table.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)[:, :, : case.length, : case.length]
    query, key = torch.arange(case.length, device=device)[:, None], torch.arange(case.length, device=device)
    window = case.window or case.length
    visible = (key <= query) & ((query - key < window) | (key < case.sink)) if case.is_causal else torch.ones_like(key <= query)
    if case.kind == "documents":
        document = torch.bucketize(key, _document_ends(case).to(device), right=True)
        visible &= document == document[:, None]
    return visible[None, None]
