"""A byte-level causal language model in the shape of today's: RMSNorm, SwiGLU, and dynamic-mask attention in every layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from dmattn.nn import DynamicMaskAttention
from torch import Tensor, nn

BYTES = 256


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_and_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        down: Tensor = self.down(F.silu(gate) * up)
        return down


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, window: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = DynamicMaskAttention(width, heads, window, num_kv_heads=kv_heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = SwiGLU(width, 8 * width // 3 // 8 * 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ByteModel(nn.Module):
    """tokens [B, S] int64 below 256 -> logits [B, S, 256] of the byte that follows each."""

    def __init__(self, layers: int, width: int, heads: int, kv_heads: int, window: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.layers = nn.ModuleList(Layer(width, heads, kv_heads, window) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        for number, layer in enumerate(self.layers):
            # Every other layer keeps A at 0: all scores are equal and later keys win, so its window slides and it reads what is near.
            # The layers between learn what is worth keeping.
            chooses = number % 2 == 1
            nn.init.constant_(layer.attention.A, float(chooses))
            layer.attention.A.requires_grad_(chooses)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def attention_inputs(self, tokens: Tensor, layer: int) -> Tensor:
        """The hidden states [B, S, width] that the attention of one layer receives."""
        x = self.embedding(tokens)
        for before in self.layers[:layer]:
            x = before(x)
        normed: Tensor = self.layers[layer].attention_norm(x)
        return normed


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per byte, of predicting tokens[:, 1:] from what stands before; tokens [B, S + 1]."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@torch.no_grad()
def generate(model: ByteModel, prompt: bytes, count: int, context: int, temperature: float, generator: torch.Generator) -> bytes:
    """Continues the prompt by ``count`` bytes, each drawn after looking at the last ``context`` bytes."""
    device = model.head.weight.device
    text = list(prompt)
    for _ in range(count):
        tokens = torch.tensor([text[-context:]], device=device)
        chances = torch.softmax(model(tokens)[0, -1].float() / temperature, dim=-1).cpu()
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text)
