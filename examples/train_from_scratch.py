"""Trains a language model of bytes on packs of documents: less than a minute on two cores.

python examples/train_from_scratch.py
torchrun --nproc-per-node 2 examples/train_from_scratch.py         # context parallelism and FSDP2
CP=2 torchrun --nproc-per-node 8 examples/train_from_scratch.py    # two ranks share a pack, and four packs are a step
LISTS=1 python examples/train_from_scratch.py                      # every query chooses its keys
"""

import os
import pydoc_data.topics

import dmattn
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, LENGTH, WIDTH, HEADS, LAYERS, VISIBLE = 60, 1024, 128, 4, 2, 64
LAYER, LOSS = ("IndexedAttention", "with_index_loss") if "LISTS" in os.environ else ("DynamicMaskAttention", "with_score_loss")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
CP = int(os.environ.get("CP", WORLD))  # ranks that share a pack
DEVICE = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
group = init_device_mesh(DEVICE.type, (WORLD // CP, CP), mesh_dim_names=("dp", "cp")).get_group("cp") if WORLD > 1 else None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(WIDTH), getattr(dmattn.nn, LAYER).recommended(WIDTH, HEADS, VISIBLE)
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, documents):
        # Each rank of the group holds a chunk of the pack.
        out, choice_loss = self.attention(self.norm(x), documents, group=group, **{LOSS: True})
        x = x + out
        return x + self.mlp(x), choice_loss


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(256, WIDTH), nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens, labels, documents):
        x, choice_losses = self.embedding(tokens), 0
        for block in self.blocks:
            x, choice_loss = block(x, documents)
            choice_losses = choice_losses + choice_loss
        return nn.functional.cross_entropy(self.head(x)[0].float(), labels), choice_losses / LAYERS


torch.manual_seed(0)
model = Model().to(DEVICE)
for module in (*model.blocks, model) if WORLD > 1 else ():
    fully_shard(module)
others, slopes = ([p for name, p in model.named_parameters() if name.endswith("log_slope") is own] for own in (False, True))
optimizer = torch.optim.AdamW([{"params": others, "weight_decay": 0.1}, {"params": slopes, "weight_decay": 0.0}])
# The rates rise during a tenth of the steps and then fall along a cosine.
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [3e-3, 9e-3], STEPS, pct_start=0.1, cycle_momentum=False)

# The topics of Python's help, a document each: all their bytes, and the number of each byte's document.
topics = [topic.encode() for topic in pydoc_data.topics.topics.values()]
text = torch.tensor(list(b"".join(topics)))
ids = torch.arange(len(topics)).repeat_interleave(torch.tensor([len(topic) for topic in topics]))
starts = torch.randint(len(text) - LENGTH, (STEPS, WORLD // CP))[:, RANK // CP].tolist()  # of the packs of this rank's group
for step, first in enumerate(starts):
    pack, own = text[first : first + LENGTH + 1], ids[first : first + LENGTH + 1]
    documents = dmattn.IntervalMask.documents(LENGTH, ids=own[:-1].to(DEVICE))  # of the whole pack
    labels = pack[1:].masked_fill(own[1:] != own[:-1], -100)  # no document predicts the next one
    tokens, labels = (each.chunk(CP)[RANK % CP].to(DEVICE) for each in (pack[:-1], labels))  # of this rank
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
        loss, choice_loss = model(tokens[None], labels, documents)  # the second teaches which keys are chosen
    (loss + choice_loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if RANK == 0 and step % 10 in (0, 9):
        print(f"step {step + 1}: loss {loss.item():.3f}")
if WORLD > 1:
    torch.distributed.destroy_process_group()
