"""The device that tests run on: a GPU when there is one and this build has kernels for it. Nowhere else do tests ask for it."""

from __future__ import annotations

import dmattn  # registers the ops
import torch


def has_kernels(op: str, backend: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{dmattn.__name__}::{op}", backend)


DEVICE = "cuda" if torch.cuda.is_available() and has_kernels("forward", "CUDA") else "cpu"
