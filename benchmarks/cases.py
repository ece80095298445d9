"""The named workloads: a table is a device and its cases; every case says what dmattn computes and which peer stands beside it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import dmattn
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclasses.dataclass(frozen=True)
class Case:
    """window None: dense, causal or full. Otherwise each query sees the ``window`` best of the keys before it by random scores: the kept
    keys lie scattered, the hardest case."""

    length: int
    window: int | None
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    is_causal: bool = True
    backend: str = ""  # torch's SDPBackend for the peer; empty: torch's own choice

    @property
    def name(self) -> str:
        lengths = f"{self.batch} x {self.length}" if self.batch > 1 else f"{self.length}"
        kind = f"window {self.window}" if self.window is not None else "dense causal" if self.is_causal else "dense full"
        return f"{lengths}, {kind}" + (f", D={self.head_dim}" if self.backend else "")

    @property
    def peer(self) -> str:
        return "F.scaled_dot_product_attention" + (f" by {self.backend}" if self.backend else "")

    def resized(self, length: int) -> Case:
        """The same kind of case at another length, with the window in proportion."""
        window = None if self.window is None else max(1, self.window * length // self.length)
        return dataclasses.replace(self, length=length, window=window)


@dataclasses.dataclass(frozen=True)
class Table:
    device: str
    cases: tuple[Case, ...]
    repeats: int


def _gpu_sparse() -> list[Case]:
    sizes = ((4096, 410), (16384, 819), (32768, 1024), (131072, 2048))
    return [Case(n, w, heads=16, kv_heads=16, head_dim=128, dtype="bfloat16", backend="CUDNN_ATTENTION") for n, w in sizes]


def _gpu_dense() -> list[Case]:
    sizes = ((4, 4096), (1, 16384), (1, 32768))
    return [
        Case(n, None, batch=b, heads=16, kv_heads=16, head_dim=d, dtype="bfloat16", is_causal=causal, backend="FLASH_ATTENTION")
        for d in (128, 64)
        for b, n in sizes
        for causal in (False, True)
    ]


TABLES = {
    "cpu": Table("cpu", (Case(4096, 410), Case(16384, 819), Case(4096, None), Case(16384, None)), repeats=5),
    # Each beside the fastest peer of its kind: scattered keys beside cuDNN's dense causal kernel, dense beside FlashAttention-2.
    "cuda": Table("cuda", (*_gpu_sparse(), *_gpu_dense()), repeats=7),
}
QUICK_LENGTHS = {4096: 1024, 16384: 2048}


@dataclasses.dataclass(frozen=True)
class Workload:
    """Inputs of a case and the calls to time. ``differentiable`` are the inputs whose gradients a backward pass computes."""

    ours: Callable[[], Tensor]
    peer: Callable[[], Tensor]
    select: Callable[[], Tensor] | None
    differentiable: tuple[Tensor, ...]
    peer_differentiable: tuple[Tensor, ...]
    grad_out: Tensor
    scores: Tensor | None


def workload(case: Case, device: str, seed: int = 0) -> Workload:
    """Normal inputs and scores."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(case.batch, *shape, generator=generator, device=device).to(dtype)

    query = draw(case.heads, case.length, case.head_dim).requires_grad_()
    key = draw(case.kv_heads, case.length, case.head_dim).requires_grad_()
    value = draw(case.kv_heads, case.length, case.head_dim).requires_grad_()
    grad_out = draw(case.heads, case.length, case.head_dim)

    def peer() -> Tensor:
        with sdpa_kernel(SDPBackend[case.backend]) if case.backend else contextlib.nullcontext():
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=case.is_causal, enable_gqa=case.heads != case.kv_heads
            )

    if case.window is None:

        def dense() -> Tensor:
            out: Tensor = dmattn.attention(query, key, value, is_causal=case.is_causal)
            return out

        return Workload(dense, peer, None, (query, key, value), (query, key, value), grad_out, None)

    window = case.window
    scores = draw(case.kv_heads, case.length).float().requires_grad_()

    def sparse() -> Tensor:
        out = dmattn.dynamic_mask_attention(query, key, value, scores, window)
        assert isinstance(out, Tensor)
        return out

    def select() -> Tensor:
        return dmattn.IntervalMask.top_k(scores, window).end

    return Workload(sparse, peer, select, (query, key, value, scores), (query, key, value), grad_out, scores)
