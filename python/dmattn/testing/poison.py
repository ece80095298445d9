"""Memory that starts as NaN: a result a kernel forgot to write cannot look right by luck."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

M_PERTURB = -6  # <malloc.h>: new memory is filled with the complement of the value's low byte
FILL_WITH_ONES = 256  # so the low byte 0 means 0xff: NaN in every floating-point type, -1 in every integer


@contextmanager
def poisoned_memory(like: torch.Tensor | None = None) -> Iterator[None]:
    """Inside, memory that ops allocate starts as NaN.

    torch's own switch (``torch.utils.deterministic.fill_uninitialized_memory``) does not reach tensors that a stable-ABI library allocates.
    On a CPU this asks glibc's malloc to fill what it hands out, scratch memory included; with another C library it has no effect. On
    CUDA it frees NaN-filled blocks of ``like``'s size and of small sizes, which the caching allocator then hands out first.
    """
    if like is not None and like.is_cuda:
        # Blocks of tensors like the given one and of small ones; then what the allocator cuts other sizes from: whole segments of the
        # 2 MB that small sizes come from, and one large block.
        sizes = [max(like.numel() * like.element_size(), 512) * factor // 8 for factor in (1, 2, 4, 8)] * 4
        sizes += [1 << 10, 1 << 14, 1 << 18] * 4 + [1 << 20] * 8 + [1 << 25]
        blocks = [torch.full((-(-size // 8),), torch.nan, dtype=torch.float64, device=like.device) for size in sizes]
        del blocks
        yield
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_PERTURB, FILL_WITH_ONES)
    try:
        yield
    finally:
        if mallopt is not None:
            mallopt(M_PERTURB, 0)
