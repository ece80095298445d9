"""The named workloads of ``python -m dmattn.bench run``: lists of cases, and jobs that measure what is not one call of attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from dmattn.bench import context_parallel, decode, serve, training_step
from dmattn.bench.cases import Case, trained_scores
from dmattn.bench.measure import JobOptions
from dmattn.bench.peers import missing
from dmattn.bench.records import Row

MASK_PEERS = ("cudnn", "flash", "efficient", "flex", "eager", "torch")
DENSE_PEERS = ("cudnn", "flash", "efficient", "torch")
OTHER_LIBRARIES = ("fa3", "fa4", "flashinfer")
ON_CPU_ALONE = "torch"  # elsewhere its own choice is one of the other peers
LONGEST_ON_CPU = 4096
TRAINED = "demo-output/scores.pt"


@dataclasses.dataclass(frozen=True)
class Named:
    """One name: either cases, written for a GPU, or a job. about is a line for ``list``."""

    name: str
    about: str
    cases: Callable[[], list[Case]] | None = None
    job: Callable[[JobOptions], list[Row]] | None = None


def _gpu(length: int, **options: Any) -> Case:
    return dataclasses.replace(Case(length, heads=16, kv_heads=16, head_dim=128, dtype="bfloat16"), **options)


def _pages_dma() -> list[Case]:
    """Beside cuDNN's dense causal kernel, which is what one would run without a mask."""
    sizes = ((4096, 410), (16384, 819), (32768, 1024), (65536, 1638), (131072, 2048))
    cases = [_gpu(n, kind="dma", window=w, peers=("cudnn",), group="dma", in_readme=n in (4096, 32768, 131072)) for n, w in sizes]
    for n, w in sizes[1:]:
        more: list[dict[str, Any]] = [
            {"scores": "recent"},
            {"scores": "drifting"},
            {"heads": 32, "kv_heads": 8, "in_readme": n == 32768},
        ]
        cases += [_gpu(n, kind="dma", window=w, peers=("cudnn",), group="dma", **options) for options in more]
    return cases


def _pages_dma_local() -> list[Case]:
    """A quarter of the visible keys local, and four sinks, vs. plain selection of as many keys."""
    sizes = ((16384, 819), (32768, 1024), (131072, 2048))
    beside: tuple[dict[str, Any], ...] = ({}, {"sink": 4, "local": 256})
    return [_gpu(n, kind="dma", window=w, peers=("cudnn",), group="dma-local", **more) for n, w in sizes for more in beside]


def _pages_dma_full() -> list[Case]:
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


def _pages_intervals() -> list[Case]:
    """Beside our own dense causal kernel: the ideal is its time in proportion to the visible pairs."""
    kinds: tuple[dict[str, Any], ...] = (
        {"kind": "sliding", "window": 4096},
        {"kind": "streaming", "sink": 64, "window": 1024},
        {"kind": "documents", "documents": 64},
    )
    return [_gpu(65536, peers=("dmattn",), group="intervals", in_readme=True, **options) for options in kinds]


def _pages_blocks() -> list[Case]:
    densities = (1.0, 0.5, 0.25, 0.1, 0.05)
    return [
        _gpu(16384, kind="blocks", density=d, is_causal=False, peers=("flex",), group="blocks", in_readme=d in (1.0, 0.1))
        for d in densities
    ]


def _pages_dense() -> list[Case]:
    sizes = ((4, 4096), (1, 16384), (1, 32768))
    return [
        _gpu(n, batch=b, head_dim=d, is_causal=causal, peers=("cudnn", "flash"), group="dense", in_readme=d == 128 and n == 16384)
        for d in (128, 64)
        for b, n in sizes
        for causal in (False, True)
    ]


def pages(device: str) -> list[Case]:
    """What tables and plots of the pages are made of."""
    if device == "cpu":
        sizes = (4096, 16384)
        dma = [Case(n, "dma", w, group="dma", in_readme=True) for n, w in zip(sizes, (410, 819), strict=True)]
        return [*dma, *(Case(n, group="dense", in_readme=True) for n in sizes)]
    return [
        *_pages_dma(),
        *_pages_dma_local(),
        *_pages_dma_full(),
        *_pages_intervals(),
        *_pages_blocks(),
        *_pages_dense(),
    ]


# Lists of cases, on a GPU ------------------------------------------------------------------------------------------------------------

LENGTHS = tuple(2**power for power in range(7, 18))  # 128 to 131,072
WINDOWS = ((4096, 410), (16384, 819), (32768, 1024), (131072, 2048))
ANCESTOR = ((1024, 0.2), (4096, 0.1), (16384, 0.05), (65536, 0.025))


def _dense(is_causal: bool) -> list[Case]:
    sizes = ((4, 4096), (1, 16384), (1, 32768))
    return [_gpu(n, batch=b, head_dim=d, is_causal=is_causal, peers=DENSE_PEERS) for d in (128, 64) for b, n in sizes]


def _dynamic(scores: str) -> list[Case]:
    return [_gpu(n, kind="dma", window=w, scores=scores, peers=MASK_PEERS) for n, w in WINDOWS]


def _lengths() -> list[Case]:
    """The window grows slowly with the length."""
    dynamic = [_gpu(n, kind="dma", window=min(n // 2, int(6 * n**0.5)), peers=("cudnn", "flash", "torch")) for n in LENGTHS]
    return [*dynamic, *(_gpu(n, peers=("cudnn", "flash", "torch")) for n in LENGTHS)]


def _batches() -> list[Case]:
    sizes = ((1, 16, 16), (4, 16, 16), (16, 16, 16), (64, 12, 12), (4, 32, 8), (4, 32, 1))
    return [
        _gpu(2048, batch=b, heads=h, kv_heads=hkv, peers=("cudnn", "flash", "torch"), **mask)
        for b, h, hkv in sizes
        for mask in ({"kind": "dma", "window": 256}, {})
    ]


def _intervals(**mask: Any) -> list[Case]:
    return [_gpu(n, peers=MASK_PEERS, **mask) for n in (16384, 65536)]


def _blocks(densities: tuple[float, ...] = (1.0, 0.5, 0.25, 0.1, 0.05), blocks: tuple[int, ...] = (128,)) -> list[Case]:
    return [
        _gpu(16384, kind="blocks", density=density, block=block, is_causal=False, peers=("flex", "dmattn", "torch"))
        for density in densities
        for block in blocks
    ]


def _ancestor() -> list[Case]:
    """Its own table of lengths and shares of keys, causal and not."""
    return [
        _gpu(n, kind="dma", window=int(n * ratio), is_causal=is_causal, peers=MASK_PEERS)
        for is_causal in (True, False)
        for n, ratio in ANCESTOR
    ]


def _patches() -> list[Case]:
    """1,024 pixels in patches of 16: 4,096 of them and a class token."""
    shape = {"heads": 12, "kv_heads": 12, "head_dim": 64, "is_causal": False, "peers": MASK_PEERS}
    return [*(_gpu(4097, kind="patches", radius=r, **shape) for r in (3, 8)), _gpu(4097, **shape)]


def _trained(path: str) -> list[Case]:
    most = trained_scores(path).shape[1]
    return [
        _gpu(n, kind="dma", window=w, scores="trained", trained=path, peers=MASK_PEERS)
        for n, w in ((2048, 256), *WINDOWS)
        if n <= most
    ]


def _ratios() -> list[Case]:
    ratios = (0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625)
    return [_gpu(16384, kind="dma", window=int(16384 * ratio), peers=("dmattn", "torch")) for ratio in ratios]


def _thresholds() -> list[Case]:
    """Lengths and shares of keys around which gathered keys and the dense kernel take as long."""
    return [
        _gpu(n, kind="dma", window=int(n * ratio), peers=("dmattn", "torch"))
        for n in (1024, 2048, 4096, 8192)
        for ratio in (0.75, 0.5, 0.25, 0.125)
    ]


def named(trained: str = TRAINED) -> dict[str, Named]:
    """All workloads by name; ``trained`` is the file of scores of ``dynamic-trained``."""
    vit = {"batch": 64, "heads": 12, "kv_heads": 12, "head_dim": 64, "is_causal": False}
    found = [
        Named("dense", "every query sees every key", lambda: _dense(False)),
        Named("causal", "every query sees the keys before it", lambda: _dense(True)),
        Named("dynamic-random", "dynamic masks, random scores: kept keys lie scattered", lambda: _dynamic("random")),
        Named("dynamic-rising", "dynamic masks, scores that rise: the last keys are kept", lambda: _dynamic("recent")),
        Named("dynamic-walk", "dynamic masks, scores of a random walk: kept keys come in runs", lambda: _dynamic("drifting")),
        Named("dynamic-trained", f"dynamic masks, scores of a trained model, from {trained} (make demo writes it)",
              lambda: _trained(trained)),
        Named("streaming", "the first 64 keys and the last 1,024", lambda: _intervals(kind="streaming", sink=64, window=1024)),
        Named("sliding", "the last 4,096 keys", lambda: _intervals(kind="sliding", window=4096)),
        Named("documents", "64 packed documents", lambda: _intervals(kind="documents", documents=64)),
        Named("trees", "a random tree in depth-first order",
              lambda: [_gpu(n, kind="tree", peers=MASK_PEERS) for n in (4096, 16384)]),
        Named("blocks", "random tables of blocks of 128, density 1 to 0.05", _blocks),
        Named("lengths", "dynamic masks and causal, 128 to 131,072 tokens", _lengths),
        Named("batches", "batches, heads and shared key heads at 2,048 tokens", _batches),
        Named("selection", "which keys are kept, without attention",
              lambda: [_gpu(n, kind="select", window=w, scores=s, peers=("sort",)) for s in ("random", "recent") for n, w in WINDOWS]),
        Named("ancestor", "the ancestor's table: 1,024 at 0.2, 4,096 at 0.1, 16,384 at 0.05, 65,536 at 0.025", _ancestor),
        Named("vision-1024", "4,096 patches of an image and a class token, neighbourhoods as a block mask", _patches),
        Named("vision-vit", "the 197 tokens of ViT-B, a batch of 64", lambda: [_gpu(197, **vit, peers=DENSE_PEERS)]),
        Named("document-attention", "dynamic masks within 16 long documents",
              lambda: [_gpu(n, kind="dma", window=w, documents=16, peers=MASK_PEERS) for n, w in WINDOWS[2:]]),
        Named("ablation-ratio", "16,384 tokens, the kept share from 1/2 to 1/64, beside our dense kernel", _ratios),
        Named("ablation-block", "block masks of density 0.1 in blocks of 16 to 256", lambda: _blocks((0.1,), (16, 32, 64, 128, 256))),
        Named("ablation-threshold", "where gathered keys and our dense kernel take as long", _thresholds),
        Named("decode", "one token beside long caches, in one piece and in pages", job=decode.rows),
        Named("serving", "generation with a bounded cache", job=serve.rows),
        Named("training-step", "training steps of a 12-layer model", job=training_step.rows),
        Named("document-model", "training steps of a 12-layer language model on long documents", job=training_step.document_rows),
        Named("context-parallel", "one sequence on several ranks, beside torch's context_parallel", job=context_parallel.rows),
    ]  # fmt: skip
    return {each.name: each for each in found}


def for_device(case: Case, device: str) -> Case:
    """The case as it is measured here: smaller on a CPU; without peers that are not here, with other libraries that are."""
    if device == "cpu":
        group = case.heads // case.kv_heads
        heads = max(group, min(4, case.heads))
        short = case.resized(min(case.length, LONGEST_ON_CPU))
        batch = min(case.batch, 4)
        case = dataclasses.replace(
            short, batch=batch, heads=heads, kv_heads=heads // group, head_dim=min(case.head_dim, 64), dtype="float32"
        )
    unmasked = case.kind in ("dense", "dma", "sliding") and case.peers
    wanted = (*case.peers, *(OTHER_LIBRARIES if unmasked else ()))
    here = tuple(name for name in wanted if name == "sort" or not missing(name, device))
    return dataclasses.replace(case, peers=tuple(name for name in here if name != ON_CPU_ALONE or device == "cpu"))
