"""Trains torchtitan's Llama with dynamic masks: a model converter puts an inner attention of its own into every layer. Seconds on a CPU.

pip install torchtitan
python examples/with_torchtitan.py

torchtitan packs documents. Its masks for ``varlen`` attention are the ends of the documents, and so are ours. Its own dense ``varlen`` attention
calls torch's flash attention ops. For these, on a GPU, activate_flash_attention_impl("dmattn") is enough, after the model is built: on Hopper
and newer torchtitan activates another implementation while it builds.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from dmattn import key_scores, varlen_attention
from torch import Tensor, nn
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.module import Module

LENGTH, PERIOD = 128, 40


class DynamicMaskAttention(VarlenAttention):
    """Each query sees its last tokens and the best-scored keys of its document; scores are learned from the values."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        kv_heads: int
        head_dim: int
        window: int = 32
        local: int = 16
        param_init: dict | None = field(
            default_factory=lambda: {"A": nn.init.ones_, "dt_proj": partial(nn.init.normal_, std=0.02)}
        )

    def __init__(self, config: Config) -> None:
        Module.__init__(self)  # that of VarlenAttention activates a flash attention of torchtitan's choice
        self.window, self.local = config.window, config.local
        self.A = nn.Parameter(torch.empty(config.kv_heads))
        self.dt_proj = nn.Parameter(torch.empty(config.kv_heads, config.kv_heads * config.head_dim))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        **more: Any,
    ) -> Tensor:
        """query [B, S, H, D], key and value [B, S, Hkv, D] -> [B, S, H, D]."""
        scores = key_scores(value.transpose(1, 2), self.dt_proj, self.A).transpose(1, 2)
        packed = (given.flatten(0, 1) for given in (query, key, value))
        out = varlen_attention(
            *packed, attention_masks.cu_seq_q, is_causal=True, scores=scores.flatten(0, 1), window=self.window, local=self.local,
            scale=scale,
        )  # fmt: skip
        return out.view(query.shape)


class WithDynamicMasks(ModelConfigConverter):
    """Replaces the inner attention of every layer; goes into ``model_registry(converters=[...])`` like quantisation or LoRA."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        window: int = 32

    def __init__(self, config: Config) -> None:
        self.window = config.window

    def convert(self, model_config: Any) -> Any:
        for layer in model_config.layers:
            given = layer.attention
            heads, kv_heads = given.n_heads, given.n_kv_heads or given.n_heads
            given.inner_attention = DynamicMaskAttention.Config(
                kv_heads=kv_heads, head_dim=given.head_dim or model_config.dim // heads, window=self.window
            )
        return model_config


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    """Trains on sequences that repeat. Returns the loss of the first and of the last step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--quick", dest="steps", action="store_const", const=2, help="--steps 2: does it run")
    given = parser.parse_args(arguments)

    config = model_registry("debugmodel", attn_backend="varlen", converters=[WithDynamicMasks.Config(window=32)]).model
    del config.layers[2:]
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    positions = (torch.arange(LENGTH) % (LENGTH // 2)).expand(4, LENGTH)  # two documents in each sequence
    masks = model.get_attention_masks(positions)
    losses = []
    for step in range(given.steps):
        tokens = torch.randint(0, 64, (4, 2, PERIOD)).repeat(1, 1, 2)[:, :, : LENGTH // 2 + 1]
        logits = model(tokens[:, :, :-1].flatten(1), positions=positions, attention_masks=masks)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, :, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1}: loss {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
