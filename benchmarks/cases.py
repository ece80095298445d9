"""The named workloads: a table is a device and its cases; every case says what dmattn computes and which peer stands beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import dmattn
import torch
import torch.nn.functional as F
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Case:
    """window None: dense causal. Otherwise each query sees the ``window`` best of the keys before it by random scores, the hardest case:
    the kept keys lie scattered."""

    length: int
    window: int | None
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.length}, dense causal" if self.window is None else f"{self.length}, window {self.window}"

    def resized(self, length: int) -> Case:
        """The same kind of case at another length, with the window in proportion."""
        window = None if self.window is None else max(1, self.window * length // self.length)
        return dataclasses.replace(self, length=length, window=window)


@dataclasses.dataclass(frozen=True)
class Table:
    device: str
    cases: tuple[Case, ...]
    repeats: int


TABLES = {
    "cpu": Table("cpu", (Case(4096, 410), Case(16384, 819), Case(4096, None), Case(16384, None)), repeats=5),
}
QUICK_LENGTHS = {4096: 1024, 16384: 2048}
PEER = "F.scaled_dot_product_attention(is_causal=True)"


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
    """Normal inputs and scores, made on the CPU so that every device gets the same."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(case.batch, *shape, generator=generator).to(device, dtype)

    query = draw(case.heads, case.length, case.head_dim).requires_grad_()
    key = draw(case.kv_heads, case.length, case.head_dim).requires_grad_()
    value = draw(case.kv_heads, case.length, case.head_dim).requires_grad_()
    grad_out = draw(case.heads, case.length, case.head_dim)

    def peer() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=case.heads != case.kv_heads)

    if case.window is None:

        def dense() -> Tensor:
            out: Tensor = dmattn.attention(query, key, value, is_causal=True)
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
