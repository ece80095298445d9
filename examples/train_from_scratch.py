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
from dmattn.distributed import context_parallel_attention
from dmattn.nn import DynamicMaskAttention, ScoreRecipe, score_loss
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

    def forward(self, x: Tensor, positions: Tensor, documents: IntervalMask) -> tuple[Tensor, Tensor]:
        if WORLD == 1:
            out, loss = self.attention(self.norms[0](x), documents, position_ids=positions, with_score_loss=True)
        else:
            out, loss = self.shared(self.norms[0](x), positions, documents)
        return x + out + self.mlp(self.norms[1](x + out)), loss

    def shared(self, x: Tensor, positions: Tensor, documents: IntervalMask) -> tuple[Tensor, Tensor]:
        """The same for one chunk of the pack: all ranks know all scores, and the loss of the scores looks at this chunk alone."""
        layer, places = self.attention, torch.arange(RANK * x.shape[1], (RANK + 1) * x.shape[1], device=x.device)
        query, key, value = layer.projected(x, positions)
        recency = layer.log_slope.exp()[:, None] * places
        ranks = layer.scores(x.detach()) + recency
        loss = score_loss(
            query, key, ranks, key_bias=recency[None], base=IntervalMask.documents(x.shape[1], ids=(positions[0] == 0).cumsum(0)),
            local=layer.local, queries=64, last=0.5, sharp=True, first_head=layer.local_heads,
        )  # fmt: skip
        every = [torch.empty_like(ranks) for _ in range(WORLD)]
        dist.all_gather(every, ranks.detach())
        mask = layer.mask(torch.cat(every, 2), documents)
        out = context_parallel_attention(query, key, value, mask, key_bias=recency[None])
        return layer.o_proj(out.transpose(1, 2).flatten(2)), loss.mean()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(256, WIDTH), nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens: Tensor, positions: Tensor, documents: IntervalMask) -> tuple[Tensor, Tensor]:
        x, losses = self.embedding(tokens), []
        for block in self.blocks:
            x, loss = block(x, positions, documents)
            losses.append(loss)
        return self.head(x), torch.stack(losses).mean()


def main(given: list[str] | None = None) -> tuple[float, float]:
    """Returns the first and the last loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--quick", dest="steps", action="store_const", const=2, help="--steps 2: does it run")
    steps = parser.parse_args(given).steps
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
    data, _ = split(read_text(None, 0)[1])
    generator, own, losses = torch.Generator().manual_seed(0), LENGTH // WORLD, []
    for step in range(steps):
        text = sample(data, 1, LENGTH + 1, generator).to(DEVICE)  # the same on every rank
        ends = torch.cat(
            [
                torch.tensor([0]),
                (torch.randperm(LENGTH - 1, generator=generator)[: DOCUMENTS - 1] + 1).sort()[0],
                torch.tensor([LENGTH]),
            ]
        )
        documents = IntervalMask.documents(LENGTH, ends.int().to(DEVICE))
        positions = torch.cat([torch.arange(n) for n in ends.diff().tolist()])[None].to(DEVICE)
        # No document predicts the first byte of the next one.
        labels = text[:, 1:].masked_fill(F.pad(positions[:, 1:] == 0, (0, 1)), -100)
        tokens, positions, labels = (each[:, RANK * own : (RANK + 1) * own] for each in (text[:, :-1], positions, labels))
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            logits, teaching = model(tokens, positions, documents)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        (loss + teaching).backward()
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
    main()
