"""What generation costs without a bounded cache: all keys and values are kept, and torch's attention reads all of them at every step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from dmattn.nn import DynamicMaskAttention
from torch import Tensor


class GrowingCache:
    """Room for the keys and values of ``capacity`` tokens of each sequence; a layer sees all that are there, with its recency."""

    def __init__(self, attention: DynamicMaskAttention, batch: int, capacity: int) -> None:
        like = attention.k_proj.weight
        room = (batch, attention.num_kv_heads, capacity, attention.head_dim)
        self.key, self.value = (torch.zeros(room, dtype=like.dtype, device=like.device) for _ in range(2))
        self.length = 0

    def attend(self, attention: DynamicMaskAttention, hidden: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E]: takes the next T tokens in, and gives their attention to all tokens up to each."""
        batch, tokens, _ = hidden.shape
        first, last = self.length, self.length + tokens
        positions = torch.arange(first, last, device=hidden.device)
        query, self.key[:, :, first:last], self.value[:, :, first:last] = attention.projected(hidden, positions.expand(batch, -1))
        self.length = last
        distance = positions[:, None] - torch.arange(last, device=hidden.device)
        bias = torch.zeros(1, 1, 1, last, device=hidden.device)
        if attention.log_slope is not None:
            slopes = attention.log_slope.exp().repeat_interleave(attention.num_heads // attention.num_kv_heads)
            bias = -slopes[:, None, None] * distance
        if tokens > 1:
            bias = bias.masked_fill(distance < 0, -torch.inf)
        bias = bias.to(query.dtype).expand(batch, attention.num_heads, tokens, last)
        seen = self.key[:, :, :last], self.value[:, :, :last]
        out = F.scaled_dot_product_attention(query, *seen, attn_mask=bias, enable_gqa=True)
        projected: Tensor = attention.o_proj(out.transpose(1, 2).flatten(2))
        return projected

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens that were taken in."""
        return 2 * self.key[:, :, : self.length].numel() * self.key.element_size()
