"""Who stands beside dmattn: torch's attention kernels, FlexAttention, and dmattn's own dense kernel."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from functools import cache

import dmattn
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

BLOCK = 128
SDPA = "F.scaled_dot_product_attention"
BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}


@dataclasses.dataclass(frozen=True)
class Call:
    """One contestant.

    Args:
        name: what the JSON and the tables call it.
        run: makes out [B, H, S, D].
        inputs: the tensors whose gradients its backward pass computes.
        masked: whether it computes the case's own mask; else it is dense.
        build: what makes its mask, alone, if it has one.
    """

    name: str
    run: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]
    masked: bool = False
    build: Callable[[], object] | None = None


def peer_call(name: str, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, table: Tensor | None) -> Call:
    """The peer of a short name: torch (its own choice of kernel), cudnn, flash, dmattn (dense) or flex (with the table of blocks).

    Args:
        query: [B, H, S, D]; key, value: [B, Hkv, S, D].
        is_causal: of the dense peers.
        table: bool [1, H, S / 128, S / 128] for flex.
    """
    if name == "flex":
        assert table is not None
        return _flex(query, key, value, table)
    if name == "dmattn":

        def dense() -> Tensor:
            out: Tensor = dmattn.attention(query, key, value, is_causal=is_causal)
            return out

        return Call("dmattn.attention, dense", dense, (query, key, value))
    return _sdpa(BACKENDS.get(name), query, key, value, is_causal)


def _sdpa(backend: str | None, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Call:
    title = SDPA + (f" by {backend}" if backend else "")
    grouped = query.shape[1] != key.shape[1]

    def attend(k: Tensor, v: Tensor, grouped: bool) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)) if backend else contextlib.nullcontext():
            return F.scaled_dot_product_attention(query, k, v, is_causal=is_causal, enable_gqa=grouped)

    if grouped and not _takes_grouped_heads(backend, query.device, query.dtype):
        group = query.shape[1] // key.shape[1]
        k, v = (t.detach().repeat_interleave(group, dim=1).requires_grad_() for t in (key, value))
        return Call(f"{title}, key heads repeated beforehand", lambda: attend(k, v, False), (query, k, v))
    return Call(title, lambda: attend(key, value, grouped), (query, key, value))


@cache
def _takes_grouped_heads(backend: str | None, device: torch.device, dtype: torch.dtype) -> bool:
    query, key = (torch.zeros(1, heads, 256, 128, device=device, dtype=dtype) for heads in (4, 2))
    try:
        with sdpa_kernel(getattr(SDPBackend, backend)) if backend else contextlib.nullcontext():
            F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    except RuntimeError:
        return False
    return True


# FlexAttention --------------------------------------------------------------------------------------------------------------------


def _flex(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Call:
    """All its blocks are full ones, so it evaluates no mask inside them: the fastest way it has for a table of blocks."""
    compiled, inside, current = _compiled_flex(tuple(table.shape), table.device)
    current.copy_(table)

    def build() -> object:
        counts = table.sum(-1, dtype=torch.int32)
        indices = table.int().argsort(dim=-1, descending=True, stable=True).int()
        partial = torch.zeros_like(counts), torch.zeros_like(indices)
        return flex_attention.BlockMask.from_kv_blocks(
            *partial, counts, indices, BLOCK_SIZE=BLOCK, mask_mod=inside, seq_lengths=(query.shape[2], key.shape[2])
        )

    mask = build()

    def attend() -> Tensor:
        out: Tensor = compiled(query, key, value, block_mask=mask)
        return out

    return Call("flex_attention, compiled", attend, (query, key, value), masked=True, build=build)


@cache
def _compiled_flex(shape: tuple[int, ...], device: torch.device) -> tuple[Callable[..., Tensor], Callable[..., Tensor], Tensor]:
    """One compiled function and one mask function for each shape of table: another density must not compile again."""
    current = torch.zeros(shape, dtype=torch.bool, device=device)

    def inside(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return current[0, h, q // BLOCK, k // BLOCK]

    return torch.compile(flex_attention.flex_attention, dynamic=False), inside, current
