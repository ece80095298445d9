"""What tests of models of transformers share: sizes, scores that differ, tokens and padding."""

from __future__ import annotations

import torch

SIZES = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 1024, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip


def scattered(model):
    """The model with scores that differ from value to value, so that no two keys of distinct tokens tie."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".A", "dt_proj.weight")):
                parameter.normal_()
            elif name.endswith("log_slope"):  # else the last heads' slopes hardly count
                parameter.fill_(-1.0)
    return model


def distinct(batch: int = 2, length: int = 20, vocabulary: int = 256, seed: int = 1) -> torch.Tensor:
    """Tokens none of which comes twice in a sequence."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([3 + torch.randperm(vocabulary - 3, generator=generator)[:length] for _ in range(batch)])


def padded(side: str | None, batch: int = 2, length: int = 20) -> torch.Tensor | None:
    """A 2-D mask whose first sequence has six tokens of padding."""
    if side is None:
        return None
    mask = torch.ones((batch, length), dtype=torch.int64)
    mask[0, slice(0, 6) if side == "left" else slice(length - 6, length)] = 0
    return mask
