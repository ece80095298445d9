"""Attention problems of given sizes, for tests that say what is hostile about theirs, and numbers of threads."""

from __future__ import annotations

import contextlib

import torch
from dmattn import BlockMask
from dmattn.testing import AttentionCase, strategies


def make(device, dtype, B=1, H=2, Hkv=None, Sq=70, Sk=None, D=32, Dv=None, seed=0, mask=None, **options) -> AttentionCase:
    """Random query, key and value; what a mask that is no tensor means is asked of its to_bool, unless ``visible`` says it."""
    Hkv, Sk, Dv = H if Hkv is None else Hkv, Sq if Sk is None else Sk, D if Dv is None else Dv
    sizes = ((B, H, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv))
    tensors = (strategies.random_tensor(size, seed + i, dtype, device) for i, size in enumerate(sizes))
    if mask is not None and "visible" not in options:
        options["visible"] = mask.to_bool() if isinstance(mask, BlockMask) else mask.to_bool(Sq, Sk)
    return AttentionCase(*tensors, mask=mask, **options)


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
