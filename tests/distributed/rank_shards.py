"""What a rank does with its share of a layer's heads: the part of test_shards.py that runs in several processes."""

from __future__ import annotations

import dmattn
import torch
from layers import layer_with
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

OPTIONS = {"num_kv_heads": 2, "dtype": torch.float64}


def dealt_out(layer, mesh, local=True):
    """The plan of the page on training: heads are distributed, and what there is per key head with them. Not local: DTensors run through it."""
    columns = {"use_local_output": local}
    plan = {name: ColwiseParallel(**columns) for name in ("q_proj", "k_proj", "v_proj")} | {"o_proj": RowwiseParallel()}
    if layer.scores_values:
        plan["dt_proj"] = RowwiseParallel(output_layouts=Shard(-1), **columns)
        layer.A = nn.Parameter(distribute_tensor(layer.A, mesh, [Shard(0)]))
    else:
        plan["score_proj"] = ColwiseParallel(**columns)
    if layer.log_slope is not None:
        layer.log_slope = nn.Parameter(distribute_tensor(layer.log_slope, mesh, [Shard(0)]))
    return parallelize_module(layer, mesh, plan)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(group, options, state, hidden, position_ids, local=True):
    """out, all gradients by name, and what a cache gives (of local tensors), from one rank's share of the layer."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    layer = layer_with(64, 4, window=5, **OPTIONS, **options)
    layer.load_state_dict(state)
    layer = dealt_out(layer, mesh, local)
    hidden.requires_grad_()
    out = layer(hidden, position_ids=position_ids)
    out.square().sum().backward()
    gradients = {name: whole(parameter.grad) for name, parameter in layer.named_parameters()}
    if not local:
        return out.detach(), hidden.grad, gradients, None
    with torch.no_grad():
        cache = layer.new_cache(hidden.shape[0], num_kv_heads=layer.num_kv_heads // group.size())
        assert isinstance(cache, dmattn.BoundedCache)
        generated = torch.cat([layer(token, cache=cache) for token in hidden.split(7, 1)], 1)
    return out.detach(), hidden.grad, gradients, generated
