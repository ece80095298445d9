"""A byte-level causal language model in the shape of today's: RMSNorm, SwiGLU, and attention that learns which keys to keep in every layer."""

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
    def __init__(self, width: int, heads: int, kv_heads: int, window: int, local: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        # The layer's recommended settings: half of the key heads see the last `local` keys, the others these and the `window` best before.
        # Scores select only. They learn from a loss of their own which keys later queries would look at.
        self.attention = DynamicMaskAttention(
            width,
            heads,
            window,
            num_kv_heads=kv_heads,
            local=local,
            local_heads=kv_heads // 2,
            score="linear",
            taught=True,
            score_queries=16,
            recency=0.25,
        )  # fmt: skip
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = SwiGLU(width, 8 * width // 3 // 8 * 8)

    def forward(self, x: Tensor, window: int | None, teach: bool) -> tuple[Tensor, Tensor]:
        """The next layer's input, and the loss of the scores (0 unless they are taught)."""
        normed, loss = self.attention_norm(x), x.new_zeros(())
        if teach:
            attended, loss = self.attention(normed, window=window, with_score_loss=True)
        else:
            attended = self.attention(normed, window=window)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), loss


class ByteModel(nn.Module):
    """tokens [B, S] int64 below 256 -> logits [B, S, 256] of the byte that follows each."""

    def __init__(self, layers: int, width: int, heads: int, kv_heads: int, window: int, local: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.layers = nn.ModuleList(Layer(width, heads, kv_heads, window, local) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)) and not name.endswith("score_proj"):  # scores stay equal at first
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.with_scores_loss(tokens, None, False)[0]

    def with_scores_loss(self, tokens: Tensor, window: int | None, teach: bool) -> tuple[Tensor, Tensor]:
        """Logits, and the mean over layers of what teaches the scores; a window takes the place of the layers' own."""
        x = self.embedding(tokens)
        total = x.new_zeros(())
        for layer in self.layers:
            x, loss = layer(x, window, teach)
            total = total + loss
        return self.head(self.norm(x)), total / len(self.layers)

    def attention_inputs(self, tokens: Tensor, layer: int) -> Tensor:
        """The hidden states [B, S, width] that the attention of one layer receives."""
        x = self.embedding(tokens)
        for before in self.layers[:layer]:
            x, _ = before(x, None, False)
        normed: Tensor = self.layers[layer].attention_norm(x)
        return normed


def loss_of(model: ByteModel, tokens: Tensor, window: int | None = None, teach: bool = False) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy, in nats per byte, of predicting tokens[:, 1:] from what stands before, and the loss of the scores."""
    logits, score_loss = model.with_scores_loss(tokens[:, :-1], window, teach)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()), score_loss


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
