"""One trained layer's attention against F.scaled_dot_product_attention with the same mask as a dense tensor: memory and time.

The comparison favours SDPA: its mask is built beforehand and not timed (ours includes choosing the keys), is stored once per key head, and
gets no gradient (ours carries the gradient of the recency slopes).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import dmattn
import torch
import torch.nn.functional as F
from dmattn.nn import DynamicMaskAttention
from torch import Tensor


class Row(NamedTuple):
    length: int
    our_bytes: int
    dense_bytes: int
    our_seconds: float
    dense_seconds: float
    difference: float  # largest difference of the outputs


def compare(attention: DynamicMaskAttention, hidden: Tensor, repeats: int) -> Row:
    """hidden [1, S, E]: what the layer receives for a real text. Forward and backward."""
    length = hidden.shape[1]
    with torch.no_grad():
        query, key, value = attention.projected(hidden)
        ranks, key_bias = attention.ranked(hidden, value)
        mask = attention.mask(ranks)
        dense = mask.to_bool(length, length)  # [1, Hkv, S, S]
        dense = torch.where(dense, key_bias[:, :, None, :], -torch.inf).to(query.dtype).transpose(0, 1)  # [Hkv, 1, S, S]
    our_bytes = mask.end.nbytes + key_bias.nbytes
    query, key, value, key_bias = (x.requires_grad_() for x in (query, key, value, key_bias))

    def ours() -> Tensor:
        out: Tensor = dmattn.attention(query, key, value, attention.mask(ranks), key_bias=key_bias)
        return out

    def theirs() -> Tensor:  # key heads as the batch, so that the query heads of a group share one mask
        q = query.unflatten(1, (key.shape[1], -1))[0]
        k, v = (x.transpose(0, 1).expand(-1, q.shape[1], -1, -1) for x in (key, value))
        return F.scaled_dot_product_attention(q, k, v, dense).flatten(0, 1)[None]

    with torch.no_grad():
        difference = (ours() - theirs()).abs().max().item()
    our_seconds, dense_seconds = alternate(ours, theirs, repeats)
    return Row(length, our_bytes, dense.nbytes, our_seconds, dense_seconds, difference)


def alternate(a: Callable[[], Tensor], b: Callable[[], Tensor], repeats: int) -> tuple[float, float]:
    """Median seconds of forward + backward, the two taking turns after one turn of warm-up each."""

    def seconds(run: Callable[[], Tensor]) -> float:
        start = time.perf_counter()
        out = run()
        out.backward(torch.ones_like(out))
        if out.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    turns = [(seconds(a), seconds(b)) for _ in range(repeats + 1)][1:]
    return statistics.median(t[0] for t in turns), statistics.median(t[1] for t in turns)


def readable(size: int) -> str:
    value, unit = float(size), "B"
    for larger in ("KB", "MB", "GB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
