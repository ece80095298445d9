"""Trains a language model of bytes on packs of documents: less than a minute on two cores.

python examples/train_from_scratch.py
torchrun --nproc-per-node 2 examples/train_from_scratch.py    # context parallelism and FSDP2
"""

import os
import pydoc_data.topics

import dmattn
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

STEPS, LENGTH, WIDTH, HEADS, LAYERS, VISIBLE = 60, 1024, 128, 4, 2, 64
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DEVICE = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.attention = dmattn.nn.DynamicMaskAttention.recommended(WIDTH, HEADS, VISIBLE)
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, documents):
        # Each rank of the group holds a chunk of the pack. Without torchrun the group is None.
        out, score_loss = self.attention(self.norm(x), documents, with_score_loss=True, group=dist.group.WORLD)
        x = x + out
        return x + self.mlp(x), score_loss


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(256, WIDTH), nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens, labels, documents):
        x, score_losses = self.embedding(tokens), 0
        for block in self.blocks:
            x, score_loss = block(x, documents)
            score_losses = score_losses + score_loss
        return nn.functional.cross_entropy(self.head(x)[0].float(), labels), score_losses / LAYERS


torch.manual_seed(0)
model = Model().to(DEVICE)
if "RANK" in os.environ:
    dist.init_process_group()
    for module in (*model.blocks, model):
        fully_shard(module)
slopes = [block.attention.log_slope for block in model.blocks]
others = [weight for name, weight in model.named_parameters() if not name.endswith("log_slope")]
groups = [{"params": others, "weight_decay": 0.1}, {"params": slopes, "lr": 6e-3, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=2e-3)

# The topics of Python's help, a document each: all their bytes, and the number of each byte's document.
topics = [topic.encode() for topic in pydoc_data.topics.topics.values()]
text = torch.tensor(list(b"".join(topics)))
ids = torch.arange(len(topics)).repeat_interleave(torch.tensor([len(topic) for topic in topics]))
starts = torch.randint(len(text) - LENGTH, (STEPS,)).tolist()  # of the packs, the same on every rank
for step, first in enumerate(starts):
    pack, own = text[first : first + LENGTH + 1], ids[first : first + LENGTH + 1]
    documents = dmattn.IntervalMask.documents(LENGTH, ids=own[:-1].to(DEVICE))  # of the whole pack
    labels = pack[1:].masked_fill(own[1:] != own[:-1], -100)  # no document predicts the next one
    tokens, labels = (each.chunk(WORLD)[RANK].to(DEVICE) for each in (pack[:-1], labels))  # of this rank
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
        loss, score_loss = model(tokens[None], labels, documents)
    (loss + score_loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if RANK == 0 and step % 10 in (0, 9):
        print(f"step {step + 1}: loss {loss.item():.3f}")
if dist.is_initialized():
    dist.destroy_process_group()
