"""A sequence in one piece on every rank, of the chunks that ranks hold; gradients return to the rank that a chunk came from."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd


def gather_sequence(chunk: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The chunks of all ranks side by side along ``dim``, in rank order; they are of one shape. Differentiable, once."""
    whole: Tensor = all_gather_tensor_autograd(chunk.movedim(dim, 0).contiguous(), 0, group)
    return whole.movedim(0, dim)
