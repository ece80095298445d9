"""Trains a language model of bytes from scratch with the recommended settings, on packs of documents. A minute on two cores.

python examples/train_from_scratch.py
torchrun --nproc-per-node 2 examples/train_from_scratch.py      # the ranks share each pack: context parallelism and FSDP2
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dmattn import IntervalMask
from dmattn.nn import DynamicMaskAttention, ScoreRecipe
from text import read_text, sample, split
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
LENGTH, DOCUMENTS, WIDTH, HEADS, LAYERS, VISIBLE = 1024, 4, 128, 4, 2, 64
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.attention = DynamicMaskAttention.recommended(WIDTH, HEADS, VISIBLE, recipe=ScoreRecipe(queries=64))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, documents: IntervalMask) -> tuple[Tensor, Tensor]:
        group = dist.group.WORLD if WORLD > 1 else None  # each rank has a chunk of the pack
        out, score_loss = self.attention(self.norms[0](x), documents, with_score_loss=True, group=group)
        return x + out + self.mlp(self.norms[1](x + out)), score_loss


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(256, WIDTH), nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens: Tensor, documents: IntervalMask) -> tuple[Tensor, Tensor]:
        x, losses = self.embedding(tokens), []
        for block in self.blocks:
            x, loss = block(x, documents)
            losses.append(loss)
        return self.head(x), torch.stack(losses).mean()


def pack(data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, IntervalMask]:
    """A text cut into documents, the same on every rank: tokens and labels [1, LENGTH / WORLD] of this rank, and the whole pack's mask."""
    text = sample(data, 1, LENGTH + 1, generator)
    cuts = (torch.randperm(LENGTH - 1, generator=generator)[: DOCUMENTS - 1] + 1).sort()[0]
    labels = text[:, 1:].clone()
    labels[:, cuts - 1] = -100  # no document predicts the first byte of the next one
    ends = F.pad(F.pad(cuts, (1, 0)), (0, 1), value=LENGTH)
    tokens, labels = (each.chunk(WORLD, 1)[RANK].to(DEVICE) for each in (text[:, :-1], labels))
    return tokens, labels, IntervalMask.documents(LENGTH, ends.int().to(DEVICE))


def main(steps: int = 60) -> tuple[float, float]:
    """Returns the first and the last loss."""
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    if WORLD > 1:
        dist.init_process_group()
        for part in (*model.blocks, model):
            fully_shard(part)
    slopes = [weight for name, weight in model.named_parameters() if name.endswith("log_slope")]
    others = [weight for name, weight in model.named_parameters() if not name.endswith("log_slope")]
    optimizer = torch.optim.AdamW(
        [{"params": others, "lr": 2e-3, "weight_decay": 0.1}, {"params": slopes, "lr": 6e-3, "weight_decay": 0.0}]
    )
    data, generator, losses = split(read_text(None, 0)[1])[0], torch.Generator().manual_seed(0), []
    for step in range(steps):
        tokens, labels, documents = pack(data, generator)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            logits, score_loss = model(tokens, documents)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        (loss + score_loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if RANK == 0 and step % 10 in (0, 9):
            print(f"step {step + 1}: loss {losses[-1]:.3f}")
    if WORLD > 1:
        dist.destroy_process_group()
    return losses[0], losses[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--quick", dest="steps", action="store_const", const=2, help="--steps 2: does it run")
    main(parser.parse_args().steps)
