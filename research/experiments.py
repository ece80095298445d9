"""Layers of experiments: what was tried beside the recommended settings and did not help, as subclasses of the layer."""

from __future__ import annotations

from typing import Any

import torch
from dmattn.nn import DynamicMaskAttention
from torch import Tensor


def gumbel_like(scores: Tensor) -> Tensor:
    """Noise under which the best scores are a sample without replacement from softmax(scores), drawn from torch's generator."""
    uniform = torch.rand_like(scores, dtype=torch.promote_types(scores.dtype, torch.float32))
    return -torch.log(-torch.log(uniform.clamp(1e-6, 1 - 1e-6)))


class NoisyAttention(DynamicMaskAttention):
    """A layer that adds Gumbel noise to scores where they select in training, from torch's generator.

    Args:
        noise: its factor, > 0.
        given, options: as of DynamicMaskAttention.
    """

    def __init__(self, *given: Any, noise: float, **options: Any) -> None:
        super().__init__(*given, **options)
        self.noise = noise

    def selecting(self, ranks: Tensor) -> Tensor:
        if self.training:
            ranks = ranks.detach() + self.noise * gumbel_like(ranks)
        return super().selecting(ranks)

    def forward(self, hidden_states: Tensor, *given: Any, cache: Any = None, **options: Any) -> Any:
        if self.training and cache is not None:
            raise ValueError(f"cache: expected a layer in eval mode, got one that trains with noise={self.noise}")
        return super().forward(hidden_states, *given, cache=cache, **options)
