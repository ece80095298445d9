"""A short causal convolution of hidden states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalConvolution(nn.Module):
    """Adds to each row of hidden states those just before it, each channel times a number of its own: a causal depthwise convolution.

    Args:
        embed_dim: size E of the hidden states.
        size: rows that are added up, at least 2.

    Attributes:
        weight: [size - 1, E], the factors of the row before, of the one before that, and so on; at first normal numbers with a standard
            deviation of 0.3.
    """

    def __init__(
        self, embed_dim: int, size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size - 1, embed_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.3)

    def forward(self, hidden_states: Tensor, before: Tensor | None = None, ends: Tensor | None = None, first: int = 0) -> Tensor:
        """Hidden states to which the rows before them were added.

        Args:
            hidden_states: [B, S, E].
            before: [B, size - 1, E], the rows in front of them; None: zeros.
            ends: int32 [B|1, N], for each row of the whole sequence where its document ends; None: one document.
            first: the place of ``hidden_states[:, 0]`` in the whole sequence.

        Returns:
            [B, S, E], in the dtype of hidden_states. A row adds those of its own document alone.
        """
        back, length = self.weight.shape[0], hidden_states.shape[1]
        weight, total = self.weight.to(hidden_states.dtype), hidden_states
        rows = F.pad(hidden_states, (0, 0, back, 0)) if before is None else torch.cat((before, hidden_states), 1)
        if ends is not None:
            position = torch.arange(first, first + length, device=hidden_states.device)
            ends = F.pad(ends, (back, 0))[:, first : first + back + length]
        for distance in range(1, back + 1):
            places = slice(back - distance, back - distance + length)
            earlier = rows[:, places]
            if ends is not None:
                earlier = torch.where((position < ends[:, places])[..., None], earlier, 0.0)
            total = torch.addcmul(total, earlier, weight[distance - 1])
        return total

    def extra_repr(self) -> str:
        return f"embed_dim={self.weight.shape[1]}, size={self.weight.shape[0] + 1}"
