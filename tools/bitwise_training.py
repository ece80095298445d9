"""Trains a small model twice with ``deterministic=True`` and compares all parameters, bit for bit.

    python tools/bitwise_training.py --steps 300 --device cuda --length 1024
    python tools/bitwise_training.py --ranks 2             on two GPUs, which train on data of their own and add up gradients

Of its 12 layers the first selects keys by per-key scores, the second has an index mask, the third attends within packed documents, and so on;
all drop weights. Ends with 1 when a loss or a parameter differs, also between ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path

import dmattn
import torch
import torch.distributed as dist
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
    """Losses and parameters of one run; the data of a rank and the seeds of dropout are the same in every run."""
    torch.manual_seed(0)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    blocks = nn.ModuleList(Layer(KINDS[n % 3], deterministic=True, dropout_p=DROPOUT) for n in range(layers))
    model = nn.ModuleDict({"embed": nn.Embedding(SYMBOLS, WIDTH), "layers": blocks, "head": nn.Linear(WIDTH, SYMBOLS)})
    model = model.to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1 + rank)
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
        if ranks > 1:
            for gradient in (p.grad for p in model.parameters() if p.grad is not None):
                dist.all_reduce(gradient.div_(ranks))
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses], [parameter.detach().clone() for parameter in model.parameters()]


def compared(options: argparse.Namespace, device: str) -> dict[str, object]:
    """What two runs in this process say.

    A step before them is not compared: in one of twenty processes on a CPU torch's first optimizer step rounded otherwise than the
    same step did later, with equal gradients.
    """
    torch.use_deterministic_algorithms(True)
    began = time.monotonic()
    try:
        sizes = options.steps, options.layers, options.length, device, getattr(torch, options.dtype)
        train(1, *sizes[1:])
        (first_losses, first), (second_losses, second) = train(*sizes), train(*sizes)
    finally:
        torch.use_deterministic_algorithms(False)
    differing = sum(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    digest = hashlib.sha256(b"".join(p.contiguous().view(torch.uint8).cpu().numpy().tobytes() for p in second))
    return {
        "first_loss": first_losses[0], "last_loss": first_losses[-1], "parameters": len(first), "differing": differing,
        "equal": first_losses == second_losses and not differing, "digest": digest.hexdigest()[:16],
        "seconds": round(time.monotonic() - began, 1), "torch": torch.__version__,
    }  # fmt: skip


def run_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    is_cuda = options.device == "cuda"
    if is_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks
    )
    found = compared(options, f"cuda:{rank}" if is_cuda else "cpu")
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args(arguments)
    if options.ranks == 1:
        found = compared(options, options.device)
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(run_rank, (options, folder), nprocs=options.ranks)
            of_ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.ranks)]
        alike = len({one["digest"] for one in of_ranks}) == 1
        found = {**of_ranks[0], "differing": sum(one["differing"] for one in of_ranks), "ranks_alike": alike,
                 "equal": alike and all(one["equal"] for one in of_ranks)}  # fmt: skip
    print(json.dumps(vars(options) | found))
    return int(not found["equal"])


if __name__ == "__main__":
    sys.exit(main())
