"""One line puts any torch model's dense attention on dmattn's kernels; a training step is timed against what torch does without it.

python examples/torch_registry.py            # needs a GPU and a build with CUDA kernels; elsewhere it only trains

Prints milliseconds of a whole training step (forward, backward, optimizer), the median of several.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import AbstractContextManager, nullcontext

import dmattn  # adds "dmattn" to torch's registry
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

VOCABULARY = 512


class Block(nn.Module):
    """A transformer block without a line of dmattn in it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norms[0](hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.norms[1](hidden))


def model_of(width: int, heads: int, depth: int, device: str) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(width, heads) for _ in range(depth)]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY)).to(device, dtype)


def train(model: nn.Module, tokens: Tensor, steps: int) -> tuple[list[float], float]:
    """The loss of each step, and the median milliseconds of a step after the first three."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.064 / model[0].embedding_dim)
    losses, times = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU
        times.append(1e3 * (time.perf_counter() - begin))
    return losses, statistics.median(times[min(3, steps - 1) :])


def main(arguments: list[str] | None = None) -> dict[str, tuple[float, float]]:
    """Trains with each implementation. Returns its last loss and its milliseconds per step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--length", type=int, help="tokens of a sequence; default 8192 on a GPU, 64 on a CPU")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--quick", dest="steps", action="store_const", const=4, help="--steps 4: does it run")
    given = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    width, heads, depth, length = (2048, 16, 4, 8192) if device == "cuda" else (64, 4, 2, 64)
    length = given.length or length
    torch.manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (1, length + 1), device=device)
    found = {}

    def measure(name: str, context: AbstractContextManager[object]) -> None:
        with context:
            losses, milliseconds = train(model_of(width, heads, depth, device), tokens, given.steps)
        found[name] = (losses[-1], milliseconds)
        print(f"{name:28} {milliseconds:8.2f} ms a step, loss {losses[0]:.3f} -> {losses[-1]:.3f}")

    print(f"{depth} blocks of width {width}, {heads} heads, {length} tokens, torch {torch.__version__}, {device}")
    measure("torch, as it chooses", nullcontext())
    if device == "cpu" or not dmattn.build_info()["cuda"]:
        print("activate_flash_attention_impl changes CUDA kernels: it was not measured here")
        return found
    measure("torch, flash attention", sdpa_kernel(SDPBackend.FLASH_ATTENTION))
    measure("torch, cuDNN", sdpa_kernel(SDPBackend.CUDNN_ATTENTION))

    torch.nn.attention.activate_flash_attention_impl("dmattn")  # the one line
    measure("dmattn", nullcontext())
    torch.nn.attention.restore_flash_attention_impl()
    return found


if __name__ == "__main__":
    main()
