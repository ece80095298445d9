"""Layers whose scores or lists are learned, on ranks that share a pack: each gets its chunk of what one process computes.

torchrun --nproc-per-node 2 examples/layers_on_ranks.py
"""

import dmattn
import torch
import torch.distributed as dist
from dmattn.nn import DynamicMaskAttention, IndexedAttention
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
group = dist.group.WORLD
torch.manual_seed(0)  # the same weights and the same pack on every rank
pack = torch.randn(1, 512, 64)
documents = dmattn.IntervalMask.documents(512, torch.tensor([0, 200, 512]))  # of the whole pack
chunk = pack.chunk(group.size(), 1)[group.rank()]

for layer, loss_of in (
    (DynamicMaskAttention.recommended(64, 4, visible=32), "with_score_loss"),
    (IndexedAttention.recommended(64, 4, visible=32), "with_index_loss"),
):
    model = DistributedDataParallel(layer)  # or fully_shard: both average the chunks' gradients
    out, loss = model(chunk, documents, group=group, **{loss_of: True})
    (out.square().mean() + loss).backward()

    with torch.no_grad():
        expected = layer(pack, documents).chunk(group.size(), 1)[group.rank()]
        torch.testing.assert_close(layer(chunk, documents, group=group), expected)
    print(f"rank {group.rank()}, {type(layer).__name__}: loss {loss.item():.3f}, and the output of one process")
dist.destroy_process_group()
