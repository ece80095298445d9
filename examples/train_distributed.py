"""Trains a byte-level language model on any number of ranks, weights sharded by FSDP2 and the sequence by context parallelism.

``torchrun --nproc-per-node 2 examples/train_distributed.py`` runs as it stands on CPUs (gloo) and on GPUs (NCCL). Ranks form a mesh [dp, cp]: a
row of ``--cp`` ranks shares its sequences, each rank holding a contiguous chunk of them; rows have sequences of their own. Weights are sharded
over all ranks. The losses do not depend on the number of ranks, but for rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dmattn.distributed import context_parallel_attention
from dmattn.nn import DynamicMaskAttention, ScoreRecipe
from model import BYTES, SwiGLU
from text import HELD_OUT, PIECES, read_text, sample, split
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm

SEED = 0


class ChunkLayer(nn.Module):
    """A layer of the model for one chunk of the sequences; ``cp`` is the mesh of the ranks that hold the other chunks."""

    def __init__(self, options: argparse.Namespace, cp: DeviceMesh) -> None:
        super().__init__()
        self.cp = cp
        self.attention_norm, self.mlp_norm = nn.RMSNorm(options.width), nn.RMSNorm(options.width)
        self.attention = DynamicMaskAttention(
            options.width,
            options.heads,
            options.window,
            num_kv_heads=options.kv_heads,
            local=options.local_window,
            recipe=ScoreRecipe.doge(score="linear"),
        )
        self.mlp = SwiGLU(options.width, 8 * options.width // 3 // 8 * 8)
        # Later keys rank higher, so that no two scores are equal.
        self.log_slope = nn.Parameter(torch.linspace(-2.0, -8.0, options.kv_heads))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, n, E] at positions [B, n] of the whole sequences."""
        normed, attention = self.attention_norm(x), self.attention
        query, key, value = attention.projected(normed, positions)
        recency = self.log_slope.float().exp()[:, None] * positions[:, None]
        scores = attention.scores(normed) + recency
        out = context_parallel_attention(
            query, key, value, scores=scores, window=attention.window, local=attention.local, mesh=self.cp
        )
        x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
        hidden: Tensor = x + self.mlp(self.mlp_norm(x))
        return hidden


class ChunkModel(nn.Module):
    """tokens [B, n] at positions [B, n] -> logits [B, n, 256] of the byte that follows each."""

    def __init__(self, options: argparse.Namespace, cp: DeviceMesh) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, options.width)
        self.layers = nn.ModuleList(ChunkLayer(options, cp) for _ in range(options.layers))
        self.norm = nn.RMSNorm(options.width)
        self.head = nn.Linear(options.width, BYTES, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        logits: Tensor = self.head(self.norm(x))
        return logits


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, help="a text file of your own (default: the topics of Python's help)")
    parser.add_argument("--cp", type=int, help="ranks that share a sequence (default: all)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--quick", dest="steps", action="store_const", const=2, help="--steps 2: does it run")
    parser.add_argument("--batch", type=int, default=2, help="sequences a step, of all ranks together")
    parser.add_argument("--length", type=int, default=1024, help="bytes of a sequence")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--local-window", type=int, default=32)  # torchrun would take --local for one of its own
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--compile", action="store_true", help="compile each layer")
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], help="default: bfloat16 on GPUs, float32 on CPUs")
    parser.add_argument("--output", type=Path, help="file for the losses, JSON")
    return parser.parse_args()


def main() -> None:
    options = parse()
    on_gpu = torch.cuda.is_available()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" not in os.environ:  # started without torchrun
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group()
    cp_size = options.cp or world
    if world % cp_size or options.batch % (world // cp_size) or options.length % cp_size:
        raise SystemExit(
            f"--cp, --batch, --length: {cp_size} ranks a sequence do not divide {world} ranks, the batch or the length evenly"
        )
    device = torch.device("cuda" if on_gpu else "cpu")
    mesh = init_device_mesh(device.type, (world // cp_size, cp_size), mesh_dim_names=("dp", "cp"))
    everyone = init_device_mesh(device.type, (world,))
    dtype = getattr(torch, options.dtype or ("bfloat16" if on_gpu else "float32"))

    # Build the same model on every rank, and shard its weights over all of them.
    torch.manual_seed(SEED)
    model = ChunkModel(options, mesh["cp"]).to(device, torch.promote_types(dtype, torch.float32))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.promote_types(dtype, torch.float32))
    for layer in model.layers:
        if options.compile:
            layer.compile(fullgraph=True)
        fully_shard(layer, mesh=everyone, mp_policy=policy)
    fully_shard(model, mesh=everyone, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.1)

    _, text = read_text(options.text, smallest=HELD_OUT * (options.length + 1) + PIECES)
    data, _ = split(text)
    generator = torch.Generator().manual_seed(SEED)  # the same on every rank: all draw the whole batch and take their part
    own, rows = options.length // cp_size, options.batch // (world // cp_size)
    first_row, first = mesh["dp"].get_local_rank() * rows, mesh["cp"].get_local_rank() * own
    positions = torch.arange(first, first + own, device=device).expand(rows, own)

    losses: list[float] = []
    began = time.perf_counter()
    bar = tqdm(total=options.steps, disable=rank != 0, unit="step")
    for step in range(options.steps):
        stretches = sample(data, options.batch, options.length + 1, generator)[first_row : first_row + rows].to(device)
        tokens, following = stretches[:, first : first + own], stretches[:, first + 1 : first + own + 1]
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(1.0, (step + 1) / 10)
        logits = model(tokens, positions)
        loss = F.cross_entropy(logits.flatten(0, 1).to(torch.promote_types(dtype, torch.float32)), following.flatten())
        loss.backward()  # FSDP averages gradients over ranks; each has as many bytes
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
        speed = options.batch * options.length * (step + 1) / (time.perf_counter() - began)
        bar.set_postfix_str(f"loss {losses[-1]:.4f}, {speed:,.0f} tokens/s")
        bar.update()
    bar.close()
    if rank == 0:
        speed = options.batch * options.length * options.steps / (time.perf_counter() - began)
        print(f"{world} ranks, {cp_size} a sequence: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {speed:,.0f} tokens/s")
        if options.output:
            options.output.write_text(json.dumps({"ranks": world, "losses": losses, "tokens_per_second": speed}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
