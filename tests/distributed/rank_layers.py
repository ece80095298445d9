"""What a rank does with its chunk of a sequence in a layer: the part of test_layer_chunks.py that runs in several processes."""

from __future__ import annotations

from typing import Any

import torch
from dmattn.nn import DynamicMaskAttention, IndexedAttention, IndexRecipe, ScoreRecipe
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def layer_of(recipe: dict[str, Any]) -> IndexedAttention:
    torch.manual_seed(0)
    fields = IndexRecipe(**{"index_heads": 2, "index_dim": 8, "local_heads": "half", "queries": 1 << 12, "last": 0.0, **recipe})
    return IndexedAttention(32, 8, 8, num_kv_heads=4, head_dim=8, local=3, sink_keys=1, recipe=fields, dtype=torch.float64)


def run(group, recipe, state, hidden, base, compiled):
    """out of this rank's chunk of hidden [B, N, E], its lists, the loss, the chunk's gradient and those of all parameters, added over ranks."""
    layer = layer_of(recipe)
    layer.load_state_dict(state)
    torch.manual_seed(group.rank())
    (out, loss, lists), *gradients = taught(group, layer, hidden, base, compiled, with_index_loss=True, return_index_mask=True)
    return out.detach(), lists.indices, loss.detach(), *gradients


def taught(group, layer, hidden, base, compiled, **wanted):
    """What a layer gives for this rank's chunk, the chunk's gradient, and those of all parameters, added over ranks."""
    chunk = hidden.chunk(group.size(), 1)[group.rank()].clone().requires_grad_()
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    results = call(chunk, base, **wanted, group=group)
    (results[0].square().sum() + results[1]).backward()
    gradients = {}
    for name, parameter in layer.named_parameters():
        torch.distributed.all_reduce(parameter.grad, group=group)
        gradients[name] = parameter.grad
    return results, chunk.grad, gradients


def scored_layer_of(recipe: dict[str, Any] | None) -> DynamicMaskAttention:
    torch.manual_seed(0)
    fields = ScoreRecipe.doge() if recipe is None else ScoreRecipe(queries=1 << 12, last=0.0, **recipe)
    return DynamicMaskAttention(32, 8, 6, num_kv_heads=4, head_dim=8, local=3, sink_keys=1, recipe=fields, dtype=torch.float64)


def run_scored(group, recipe, state, hidden, base, compiled):
    """out of this rank's chunk of hidden [B, N, E], the loss, the chunk's gradient and those of all parameters, added over ranks."""
    layer = scored_layer_of(recipe)
    layer.load_state_dict(state)
    torch.manual_seed(group.rank())
    (out, loss), *gradients = taught(group, layer, hidden, base, compiled, with_score_loss=True)
    return out.detach(), loss.detach(), *gradients


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


def said_of(group, layer, hidden, given):
    """What a layer raises whose call differs between ranks."""
    try:
        layer(hidden, **given, group=group)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def said_of_groups(group, layer, hidden):
    """What a layer raises for a group that is none."""
    said = []
    for given in (DeviceMesh.from_group(group, "cpu"), "cp", torch.distributed.GroupMember.NON_GROUP_MEMBER):
        try:
            layer(hidden, group=given)
        except (TypeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
