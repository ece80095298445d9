"""One trained layer's attention against F.scaled_dot_product_attention with the same mask as a dense tensor: memory and time.

The comparison favours SDPA: its mask is built beforehand and not timed (ours includes choosing the keys), is stored once per key head, and
gets no gradient (ours carries the gradient of the scores).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import dmattn
import torch
import torch.nn.functional as F
from dmattn.nn import DynamicMaskAttention, rotate
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
        query, key, value = (
            proj(hidden).unflatten(2, (-1, attention.head_dim)).transpose(1, 2)
            for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = rotate(query, attention.rope_theta), rotate(key, attention.rope_theta)
        scores = attention.scores(value).float()
        mask = dmattn.IntervalMask.top_k(scores, attention.window)
        dense = mask.to_bool(length, length)  # [1, Hkv, S, S]
        dense = torch.where(dense, scores[:, :, None, :], -torch.inf).to(query.dtype).transpose(0, 1)  # [Hkv, 1, S, S]
    our_bytes = mask.end.nbytes + scores.nbytes
    query, key, value, scores = (x.requires_grad_() for x in (query, key, value, scores))

    def ours() -> Tensor:
        out = dmattn.dynamic_mask_attention(query, key, value, scores, attention.window)
        assert isinstance(out, Tensor)
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
