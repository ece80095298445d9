"""A sequence in one piece on every rank, of the chunks that ranks hold; gradients return to the rank that a chunk came from."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives

from dmattn.distributed.agreement import DTYPES, all_gather_ints

# Newer releases of torch have another name for it.
_all_gather: Any = (
    getattr(_functional_collectives, "all_gather_single_autograd", None) or _functional_collectives.all_gather_tensor_autograd
)


def gather_sequence(chunk: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The chunks of all ranks side by side along ``dim``, in rank order; they are of one shape. Differentiable, once."""
    whole: Tensor = _all_gather(chunk.movedim(dim, 0).contiguous(), 0, group)
    return whole.movedim(0, dim)


def check_chunks(chunk: Tensor, group: dist.ProcessGroup) -> None:
    """Refuses chunks [B, S, E] that differ between ranks, on every rank, because what they exchange would not fit.

    It is one small exchange between hosts. Compiled calls are not compared.

    Raises:
        ValueError: ranks differ in B, S or dtype.
    """
    if torch.compiler.is_compiling() or dist.get_world_size(group) == 1:
        return
    everyone = all_gather_ints(group, [*chunk.shape[:2], DTYPES.index(chunk.dtype)])
    for name, *values in zip(("B", "S", "dtype"), *everyone, strict=True):
        shown = [DTYPES[value] if name == "dtype" else value for value in values]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise ValueError(
                f"hidden_states: expected [B, S, E] with the same {name} on every rank, got {shown[0]} on rank 0 and {shown[other]} on"
                f" rank {other}"
            )
