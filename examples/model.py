"""A byte-level causal language model in the shape of today's: RMSNorm, SwiGLU, and attention that learns which keys to keep in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from dmattn import BoundedCache
from dmattn.nn import DynamicMaskAttention, MixedCache, ScoreRecipe
from growing import GrowingCache
from torch import Tensor, nn

LayerCache = BoundedCache | MixedCache | GrowingCache

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
        self.attention = DynamicMaskAttention.recommended(
            width, heads, 4 * local, num_kv_heads=kv_heads, window=window, recipe=ScoreRecipe(queries=32)
        )
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

    def generate(self, x: Tensor, cache: LayerCache, lengths: Tensor | None) -> Tensor:
        """The next layer's input for the next tokens of each sequence."""
        normed = self.attention_norm(x)
        if isinstance(cache, GrowingCache):
            x = x + cache.attend(self.attention, normed)
        else:
            x = x + self.attention(normed, cache=cache, lengths=lengths)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class ByteModel(nn.Module):
    """tokens [B, S] int64 below 256 -> logits [B, S, 256] of the byte that follows each."""

    def __init__(self, layers: int, width: int, heads: int, kv_heads: int, window: int, local: int) -> None:
        super().__init__()
        self.sizes = (layers, width, heads, kv_heads, window, local)
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

    def new_caches(self, batch: int) -> nn.ModuleList:
        """A cache for each layer."""
        return nn.ModuleList(layer.attention.new_cache(batch) for layer in self.layers)

    def generate(self, tokens: Tensor, caches: Sequence[LayerCache] | nn.ModuleList, lengths: Tensor | None = None) -> Tensor:
        """Logits [B, T, 256] after the next T tokens of each sequence, of which lengths [B] are real; caches take them in."""
        x = self.embedding(tokens)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer.generate(x, cache, lengths)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def save(self, path: Path) -> None:
        torch.save({"sizes": self.sizes, "weights": self.state_dict()}, path)

    @classmethod
    def load(cls, path: Path) -> ByteModel:
        saved = torch.load(path, map_location="cpu")
        model = cls(*saved["sizes"]).to(saved["weights"]["head.weight"].dtype)
        model.load_state_dict(saved["weights"])
        return model

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
def generate(model: ByteModel, prompt: bytes, count: int, temperature: float, generator: torch.Generator) -> bytes:
    """Continues the prompt by ``count`` bytes, in memory that does not depend on how many there are."""
    device = model.head.weight.device
    caches = model.new_caches(1)
    text, new = list(prompt), list(prompt)
    for _ in range(count):
        logits = model.generate(torch.tensor([new], device=device), caches)[0, -1].float()
        new = [int(torch.multinomial(torch.softmax(logits / temperature, dim=-1).cpu(), 1, generator=generator))]
        text += new
    return bytes(text)
