"""Trains a small model twice with ``deterministic=True`` and compares all parameters, bit for bit.

    python tools/bitwise_training.py --steps 300 --device cuda --length 1024

Of its 12 layers the first selects keys by per-key scores, the second has an index mask, the third attends within packed documents, and so on;
all drop weights. Ends with 1 when a loss or a parameter differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import dmattn
import torch
from torch import Tensor, nn

KINDS = ("selected", "listed", "packed")
WIDTH, HEADS, SYMBOLS, LISTED, DROPOUT = 128, 4, 64, 16, 0.1


class Layer(nn.Module):
    """Attention of one kind, with these options, and a small MLP, each after a normalisation."""

    def __init__(self, kind: str, **options: object) -> None:
        super().__init__()
        self.kind, self.options = kind, options
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.score = nn.Linear(WIDTH, HEADS)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor, cu_seqlens: Tensor, seed: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        x = self.norms[0](hidden)
        query, key, value = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = self.score(x).transpose(1, 2)
        common = {"is_causal": True, **self.options, "dropout_seed": seed}
        if self.kind == "selected":
            window = max(1, length // 4)
            mask = dmattn.IntervalMask.top_k(scores.detach(), window, is_causal=True)
            out = dmattn.attention(query, key, value, mask, key_bias=scores, **common)
        elif self.kind == "listed":
            best = scores.detach().topk(min(LISTED, length), sorted=True).indices[:, :, None].expand(-1, -1, length, -1)
            mask = dmattn.IndexMask(best.int(), is_causal=True, local=8)
            out = dmattn.attention(query, key, value, mask, key_bias=scores, **common)
        else:
            packed = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
            out = dmattn.varlen_attention(*packed, cu_seqlens, **common).view(batch, length, HEADS, -1).transpose(1, 2)
        hidden = hidden + self.out(out.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.norms[1](hidden))


def train(steps: int, layers: int, length: int, device: str, dtype: torch.dtype) -> tuple[list[float], list[Tensor]]:
    """Losses and parameters of one run; the data and the seeds of dropout are the same in every run."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Layer(KINDS[n % 3], deterministic=True, dropout_p=DROPOUT) for n in range(layers))
    model = nn.ModuleDict({"embed": nn.Embedding(SYMBOLS, WIDTH), "layers": blocks, "head": nn.Linear(WIDTH, SYMBOLS)})
    model = model.to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        tokens = torch.randint(SYMBOLS, (2, length + 1), generator=generator).cumsum(1).remainder(SYMBOLS).to(device)
        cuts = torch.randint(1, 2 * length, (3,), generator=generator).tolist()
        cu_seqlens = torch.tensor(sorted({0, *cuts, length, 2 * length}), dtype=torch.int32, device=device)
        hidden = model["embed"](tokens[:, :-1])
        for number, layer in enumerate(model["layers"]):
            hidden = layer(hidden, cu_seqlens, torch.tensor([step * layers + number], device=device))
        loss = nn.functional.cross_entropy(model["head"](hidden).flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses], [parameter.detach().clone() for parameter in model.parameters()]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args(arguments)
    torch.use_deterministic_algorithms(True)
    began = time.monotonic()
    try:
        sizes = options.steps, options.layers, options.length, options.device, getattr(torch, options.dtype)
        (first_losses, first), (second_losses, second) = train(*sizes), train(*sizes)
    finally:
        torch.use_deterministic_algorithms(False)
    differing = sum(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    is_equal = first_losses == second_losses and not differing
    print(json.dumps(vars(options) | {
        "first_loss": first_losses[0], "last_loss": first_losses[-1], "parameters": len(first), "differing": differing,
        "equal": is_equal, "seconds": round(time.monotonic() - began, 1), "torch": torch.__version__,
    }))  # fmt: skip
    return int(not is_equal)


if __name__ == "__main__":
    sys.exit(main())
