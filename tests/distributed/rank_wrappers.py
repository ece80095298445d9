"""What ranks do with a small model under torch's ways to shard one: the part of test_wrappers.py that runs in several processes.

Every rank also runs the whole model on the whole batch, and compares.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dmattn.distributed import context_parallel_attention
from dmattn_bench.two_ways import assert_same_by_another_way
from layers import layer_with
from rank_sharding import device_of
from rank_shards import dealt_out, whole
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from watched import Watched

WIDTH, HEADS, LENGTH, BATCH = 32, 4, 24, 4
KEPT = [torch.ops.dmattn.forward.default, torch.ops.dmattn.select.default]  # not computed again


class Block(nn.Module):
    """hidden [B, S, E] -> [B, S, E]. With a mesh ``cp`` hidden is this rank's chunk of the sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.attention = layer_with(WIDTH, HEADS, 5, num_kv_heads=2, local=2, score="linear", recency=0.25)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.cp: DeviceMesh | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden).to(hidden.dtype)
        hidden = hidden + (self.attention(normed) if self.cp is None else self.attend_in_chunks(normed, self.cp))
        out: Tensor = hidden + self.mlp(hidden)
        return out

    def attend_in_chunks(self, hidden: Tensor, cp: DeviceMesh) -> Tensor:
        layer, length = self.attention, hidden.shape[1]
        positions = length * cp.get_local_rank() + torch.arange(length, device=hidden.device)[None]
        query, key, value = layer.projected(hidden, positions)
        slope = layer.log_slope.to_local() if hasattr(layer.log_slope, "to_local") else layer.log_slope
        scores = layer.scores(hidden) + slope.exp()[:, None] * positions[:, None]
        out = context_parallel_attention(query, key, value, scores=scores, window=layer.window, local=layer.local, mesh=cp)
        projected: Tensor = layer.o_proj(out.transpose(1, 2).flatten(2))
        return projected


def model_of(device: str) -> nn.Sequential:
    """Two blocks whose scores differ from key to key, and the same on all ranks.

    On a GPU attention computes in bfloat16, under autocast. There the window holds all keys, because a rounding could make another key win.
    """
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    for block in model:
        nn.init.normal_(block.attention.score_proj.weight)
        block.attention.window = 5 if device == "cpu" else LENGTH
    return model.to(device, dtype_of(device))


def dtype_of(device: str) -> torch.dtype:
    return torch.float32 if device == "cuda" else torch.float64


def batch_of(device: str) -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).to(device, dtype_of(device))


def loss_of(out: Tensor, _: Tensor | None = None) -> Tensor:
    """The mean over this rank's part, of about the size of the sum over the whole batch."""
    return out.square().mean() * (BATCH * LENGTH * WIDTH)


def same(result: Tensor, wanted: Tensor) -> None:
    if wanted.dtype == torch.float64:
        torch.testing.assert_close(result, wanted)
    else:
        assert_same_by_another_way(result, wanted, torch.bfloat16)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """By the names that parameters have without wrappers."""
    named = {name.removeprefix("module."): parameter.grad for name, parameter in model.named_parameters()}
    return {name: whole(grad).detach().clone() for name, grad in named.items() if grad is not None}


def expected(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model = copy.deepcopy(model)
    out = model(batch)
    loss_of(out).backward()
    return out.detach(), gradients_of(model)


def case_of(group: dist.ProcessGroup) -> tuple[str, nn.Sequential, Tensor, Tensor, dict[str, Tensor]]:
    """The device, a model, a batch, and what one process makes of it: out and gradients."""
    device = device_of(group)
    model, batch = model_of(device), batch_of(device)
    return device, model, batch, *expected(model, batch)


def compare(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
    if any(grad.dtype != torch.float64 for grad in wanted.values()):  # some are sums that cancel
        same(torch.cat([got[name].flatten() for name in wanted]), torch.cat([grad.flatten() for grad in wanted.values()]))
        return
    for name, grad in wanted.items():
        try:
            same(got[name], grad)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def mine(batch: Tensor, group: dist.ProcessGroup) -> Tensor:
    return batch.chunk(group.size())[dist.get_rank(group)]


def in_bfloat16_on_gpus(function: Callable[..., None]) -> Callable[..., None]:
    @wraps(function)
    def call(group: dist.ProcessGroup, *arguments: Any) -> None:
        device = device_of(group)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            function(group, *arguments)

    return call


@in_bfloat16_on_gpus
def replicated(group: dist.ProcessGroup) -> None:
    """DDP: a module that wraps, and a function that marks."""
    _, model, batch, out, gradients = case_of(group)
    for wrap in (partial(DistributedDataParallel, process_group=group), partial(replicate, process_group=group)):
        wrapped = wrap(copy.deepcopy(model))
        got = wrapped(mine(batch, group))
        loss_of(got).backward()
        same(got, mine(out, group))
        compare(gradients_of(wrapped), gradients)


class Checkpointed(nn.Module):
    """A block that is computed again in backward, but for the ops in ``KEPT``."""

    def __init__(self, block: nn.Module, kept: list[Any]) -> None:
        super().__init__()
        self.block, self.kept = block, kept

    def forward(self, hidden: Tensor) -> Tensor:
        context = partial(create_selective_checkpoint_contexts, self.kept)
        result: Tensor = checkpoint(self.block, hidden, use_reentrant=False, context_fn=context)
        return result


@in_bfloat16_on_gpus
def fully_sharded(group: dist.ProcessGroup, compiled: bool) -> None:
    """FSDP2, eager or compiled block by block, plain and with activation checkpointing that keeps what our ops return."""
    device, model, batch, out, gradients = case_of(group)
    mesh = DeviceMesh.from_group(group, device, mesh_dim_names=("dp",))
    for kept in (None, KEPT, []):
        if compiled and kept == []:
            continue
        torch._dynamo.reset()
        sharded = copy.deepcopy(model)
        if kept is not None:
            sharded = nn.Sequential(*(Checkpointed(block, kept) for block in sharded))
        for block in sharded:
            if compiled:
                block.compile(fullgraph=True, backend="aot_eager")
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        calls = Watched()
        if compiled:  # graphs hide their ops from modes
            got = sharded(mine(batch, group))
            loss_of(got).backward()
        else:
            with calls:
                got = sharded(mine(batch, group))
                loss_of(got).backward()
            again = 4 if kept == [] else 2
            assert Counter(calls.names) == {"forward": again, "select": again, "backward": 2}, calls.names
        same(got, mine(out, group))
        compare({name.replace("block.", ""): grad for name, grad in gradients_of(sharded).items()}, gradients)


@in_bfloat16_on_gpus
def in_chunks_with_tensor_parallelism(group: dist.ProcessGroup, shape: tuple[int, int]) -> None:
    """Rows of the mesh distribute heads, columns chunks of the sequence."""
    device, model, batch, out, gradients = case_of(group)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("cp", "tp"))
    for block in model:
        block.attention = dealt_out(block.attention, mesh["tp"])
        block.cp = mesh["cp"]
    rank = mesh["cp"].get_local_rank()
    got = model(batch.chunk(shape[0], dim=1)[rank])
    loss_of(got).backward()
    same(got, out.chunk(shape[0], dim=1)[rank])
    sums = gradients_of(model)
    for grad in sums.values():  # every rank has its chunk's part of the mean
        dist.all_reduce(grad, group=mesh["cp"].get_group())
        grad /= shape[0]
    compare(sums, gradients)


@in_bfloat16_on_gpus
def in_chunks_fully_sharded(group: dist.ProcessGroup, shape: tuple[int, int]) -> None:
    """Rows of the mesh have batches of their own, columns chunks of their sequences; weights are sharded over all ranks."""
    device, model, batch, out, gradients = case_of(group)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "cp"))
    everyone = init_device_mesh(device, (group.size(),))
    for block in model:
        block.cp = mesh["cp"]
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)
    row, column = mesh["dp"].get_local_rank(), mesh["cp"].get_local_rank()

    def part(x: Tensor) -> Tensor:
        return x.chunk(shape[0])[row].chunk(shape[1], dim=1)[column]

    got = model(part(batch))
    loss_of(got).backward()
    same(got, part(out))
    compare(gradients_of(model), gradients)


def saved_and_loaded(group: dist.ProcessGroup, folder: str) -> None:
    """What heads distributed to ranks saved, weights sharded by FSDP2 load, and the other way round; and one process loads both."""
    device = device_of(group)
    mesh = DeviceMesh.from_group(group, device, mesh_dim_names=("ranks",))
    model = model_of(device)

    def by_heads(given: nn.Sequential) -> nn.Module:
        for block in given:
            block.attention = dealt_out(block.attention, mesh)
        return given

    def fully(given: nn.Sequential) -> nn.Module:
        return fully_shard(given, mesh=mesh)

    ways: list[Callable[[nn.Sequential], nn.Module]] = [by_heads, fully, lambda given: given]
    for number, (save, load) in enumerate(zip(ways, ways[1:] + ways[:1], strict=True)):
        path = f"{folder}/{number}"
        dcp.save({"model": get_model_state_dict(save(copy.deepcopy(model)))}, checkpoint_id=path, process_group=group)
        other = load(copy.deepcopy(model))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        state = {"model": get_model_state_dict(other)}
        dcp.load(state, checkpoint_id=path, process_group=group)
        set_model_state_dict(other, state["model"])
        for name, parameter in other.named_parameters():
            assert torch.equal(whole(parameter), model.get_parameter(name)), name


@in_bfloat16_on_gpus
def in_stages(group: dist.ProcessGroup) -> None:
    """A pipeline: a block on each rank, the batch in micro-batches."""
    device, model, batch, out, gradients = case_of(group)
    rank = dist.get_rank(group)
    stage = PipelineStage(model[rank], rank, group.size(), torch.device(device), group=group)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss_of)
    if rank == 0:
        schedule.step(batch)
    else:
        losses: list[Tensor] = []
        got = schedule.step(target=out, losses=losses)
        same(got, out)
        same(torch.stack(losses).mean(), loss_of(out))
    own = {name: grad for name, grad in gradients.items() if name.startswith(f"{rank}.")}
    compare({f"{rank}.{name}": grad for name, grad in gradients_of(model[rank]).items()}, own)
