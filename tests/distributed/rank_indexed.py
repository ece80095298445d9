"""What a rank does with its chunk of a sequence in IndexedAttention: the part of test_indexed_chunks.py that runs in several processes."""

from __future__ import annotations

from typing import Any

import torch
from dmattn.nn import IndexedAttention, IndexRecipe
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def layer_of(recipe: dict[str, Any]) -> IndexedAttention:
    torch.manual_seed(0)
    fields = IndexRecipe(index_heads=2, index_dim=8, queries=1 << 12, last=0.0, **recipe)
    return IndexedAttention(32, 8, 8, num_kv_heads=4, head_dim=8, local=3, sink_keys=1, recipe=fields, dtype=torch.float64)


def run(group, recipe, state, hidden, base, compiled):
    """out of this rank's chunk of hidden [B, N, E], its lists, the loss, the chunk's gradient and those of all parameters, added over ranks."""
    layer = layer_of(recipe)
    layer.load_state_dict(state)
    chunk = hidden.chunk(group.size(), 1)[group.rank()].clone().requires_grad_()
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    torch.manual_seed(group.rank())
    out, loss, lists = call(chunk, base, with_index_loss=True, return_index_mask=True, group=group)
    (out.square().sum() + loss).backward()
    gradients = {}
    for name, parameter in layer.named_parameters():
        torch.distributed.all_reduce(parameter.grad, group=group)
        gradients[name] = parameter.grad
    return out.detach(), lists.indices, loss.detach(), chunk.grad, gradients


def with_distributed_heads(group, hidden):
    """What tensor parallelism raises."""
    mesh = DeviceMesh.from_group(group, "cpu")
    plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"o_proj": RowwiseParallel()}
    layer = parallelize_module(layer_of({}), mesh, plan)
    try:
        layer(hidden)
    except ValueError as error:
        return str(error)
    return None
