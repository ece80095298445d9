"""What tests have ranks do: functions of a process group and this rank's arguments."""

from __future__ import annotations

import contextlib
import os
from typing import Any
from unittest import mock

import dmattn
import torch
import torch.distributed as dist
from dmattn import IntervalMask, checks
from dmattn.distributed import Traffic, context_parallel_attention, record_traffic
from dmattn.testing.strategies import random_tensor
from dmattn_bench.two_ways import assert_same_by_another_way, assert_same_in_another_order, assert_same_sums_by_another_way
from rank_sharding import device_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def attend(
    group: dist.ProcessGroup, leaves: dict[str, Tensor], grad_out: Tensor, grad_lse: Tensor, options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """out, lse, the gradients of all leaves by their names, and the bytes received."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    with record_traffic() as traffic:
        out, lse = context_parallel_attention(**leaves, **options, group=group, return_lse=True)
        gradients = torch.autograd.grad((out, lse), list(leaves.values()), (grad_out.to(out.dtype), grad_lse.to(lse.dtype)))
    assert isinstance(traffic, Traffic)
    results = {"out": out.detach(), "lse": lse.detach()}
    results |= {f"grad_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return results, vars(traffic)


def gradients_of_two_passes(
    group: dist.ProcessGroup, leaves: dict[str, Tensor], options: dict[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """Of each leaf what two backward passes have added up, and twice the gradient of one."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    for _ in range(2):
        context_parallel_attention(**leaves, **options, group=group).square().sum().backward()
    out = context_parallel_attention(**leaves, **options, group=group)
    gradients = torch.autograd.grad(out.square().sum(), list(leaves.values()))
    return [(leaf.grad, 2 * gradient) for leaf, gradient in zip(leaves.values(), gradients, strict=True)]


def call(group: dist.ProcessGroup, arguments: dict[str, Any]) -> Tensor:
    return context_parallel_attention(**arguments, group=group).detach()


def call_compiled_on_the_last(group: dist.ProcessGroup, arguments: dict[str, Any]) -> Tensor:
    """A call that is compiled on one rank alone."""
    if dist.get_rank(group) < dist.get_world_size(group) - 1:
        return call(group, arguments)
    torch._dynamo.reset()
    with torch.no_grad():  # or a graph would keep the error's frames
        return torch.compile(call, fullgraph=True, backend="eager")(group, arguments)


def call_compiled(group: dist.ProcessGroup, arguments: dict[str, Any]) -> Tensor:
    torch._dynamo.reset()
    return torch.compile(lambda: call(group, arguments), fullgraph=True, backend="aot_eager")()


def call_without_comparing(group: dist.ProcessGroup, arguments: dict[str, Any]) -> Tensor:
    os.environ["DMATTN_COMPARE_RANKS"] = "0"
    try:
        return call(group, arguments)
    finally:
        del os.environ["DMATTN_COMPARE_RANKS"]


def calls_around_a_change(group: dist.ProcessGroup, arguments: dict[str, Any], later: int) -> list[Tensor]:
    """What a call gives before its mask's ends have moved, and after."""
    first = call(group, arguments)
    arguments["mask"].end.add_(later)
    return [first, call(group, arguments)]


def call_whose_attention_fails(group: dist.ProcessGroup, arguments: dict[str, Any]) -> str:
    """The name of the error of a call that finds no memory when its message has come."""
    with mock.patch("dmattn.distributed.attention._over_slots", side_effect=MemoryError):
        try:
            call(group, arguments)
        except MemoryError as error:
            return type(error).__name__
    return ""


def told_to_forward(group: dist.ProcessGroup, calls: list[dict[str, Any]]) -> list[int]:
    """What calls tell the op ``forward`` of the number of keys that a query sees at most."""
    told, op = [], dmattn.ops.FORWARD_OP
    place = [argument.name for argument in torch.ops.dmattn.forward.default._schema.arguments].index("most_keys")

    def forward(*inputs: Any) -> Any:
        told.append(inputs[place])
        return op(*inputs)

    with mock.patch.object(dmattn.ops, "FORWARD_OP", forward), mock.patch.object(dmattn.plain, "FORWARD_OP", forward):
        for arguments in calls:
            call(group, arguments)
    return told


def refusals_of_long_chunks(group: dist.ProcessGroup, most: int, arguments: dict[str, Any]) -> list[str]:
    """What two equal calls say where chunks may have ``most`` positions together."""
    said = []
    with mock.patch.object(checks, "MAX_LENGTH", most):
        for _ in range(2):
            try:
                call(group, arguments)
                said.append("")
            except ValueError as error:
                said.append(str(error))
    return said


def compare_beside_another_current_device(group: dist.ProcessGroup, length: int) -> None:
    """Two ranks whose own device is not the current one get what one process gets."""
    device, rank = device_of(group), dist.get_rank(group)
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    mask, cut = IntervalMask.sliding_window(length, 20, device=where), length // 2
    chunk = slice(0, cut) if rank == 0 else slice(cut, length)
    with torch.cuda.device(1 - rank) if device == "cuda" else contextlib.nullcontext():
        for seed in range(0, 9, 3):
            whole = [random_tensor((2, 2, length, 64), seed + place, torch.bfloat16, where) for place in range(3)]
            expected = dmattn.attention(*whole, mask, is_causal=True)[:, :, chunk]
            own = [x[:, :, chunk].contiguous() for x in whole]
            assert_same_by_another_way(context_parallel_attention(*own, mask, group=group), expected, torch.bfloat16)


def call_with_generators(group: dist.ProcessGroup, arguments: dict[str, Any]) -> Tensor:
    torch.manual_seed(dist.get_rank(group))
    return call(group, arguments)


def compare_compiled(group: dist.ProcessGroup, kind: str, lengths: list[list[int]], mask_length: int | None = None) -> list[bool]:
    """Whether compiled results and gradients are the eager ones, for several lengths of the ranks' chunks; a second graph is an error."""
    rank = dist.get_rank(group)

    def run(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: IntervalMask) -> Tensor:
        if kind == "scores":
            return context_parallel_attention(query, key, value, scores=bias, window=5, local=2, sink_keys=1, group=group)
        if kind == "base":
            return context_parallel_attention(query, key, value, scores=bias, window=5, base=mask, group=group)
        if kind == "mask":
            return context_parallel_attention(query, key, value, mask, window=7, key_bias=bias, group=group)
        return context_parallel_attention(query, key, value, key_bias=bias, group=group)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    same = []
    for chunks in lengths:
        generator = torch.Generator().manual_seed(rank)
        shapes = [(2, heads, chunks[rank], 8) for heads in (4, 2, 2)] + [(2, 2, chunks[rank])]
        leaves = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
        length = mask_length or sum(chunks)
        mask = IntervalMask.padding(length, torch.tensor([4, 5])) if kind == "base" else IntervalMask.sliding_window(length, 7)
        results = []
        for function in (compiled, run):
            with torch._dynamo.config.patch(error_on_recompile=True):
                out = function(*leaves, mask)
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
        same.append(all(torch.equal(*pair) for pair in zip(*results, strict=True)))
    return same


def on_meshes(group: dist.ProcessGroup, arguments: dict[str, Any]) -> Tensor:
    """One call on each row of a 2 x 2 mesh; the other dimension, both at once and another order of ranks are refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    out = context_parallel_attention(**arguments, mesh=mesh["cp"])
    turned = DeviceMesh("cpu", torch.tensor([[1, 0], [3, 2]]), mesh_dim_names=("dp", "cp"))
    for given, message in ((mesh, "mesh: expected one dimension"), (turned["cp"], "mesh: expected ranks in ascending order")):
        refused = ""
        try:
            context_parallel_attention(**arguments, mesh=given)
        except ValueError as error:
            refused = str(error)
        assert message in refused, refused
    return out.detach()


def leave(group: dist.ProcessGroup) -> None:
    os._exit(3)


def stay_away(group: dist.ProcessGroup) -> None:
    """Takes no part."""


def compare_with_one_process(group: dist.ProcessGroup, length: int, first: int, options: dict[str, Any], with_bias: bool) -> None:
    """Two ranks, twice, on their own devices: out and gradients of this rank's chunk are those of the whole sequence. Then a rank differs."""
    device, rank = device_of(group), dist.get_rank(group)
    dtype = torch.bfloat16 if device == "cuda" else torch.float64

    def same(result: Tensor, expected: Tensor) -> None:
        rule = assert_same_sums_by_another_way if expected.dim() == 3 else assert_same_by_another_way
        (rule if device == "cuda" else assert_same_in_another_order)(result, expected, dtype)

    chunk = slice(0, first) if rank == 0 else slice(first, length)
    shapes = {"query": (2, length, 4, 64), "key": (2, length, 2, 64), "value": (2, length, 2, 32)}
    # Heads lie side by side in memory, as projections leave them.
    leaves = {
        name: random_tensor(shape, seed, dtype, device).transpose(1, 2) for seed, (name, shape) in enumerate(shapes.items())
    }
    wide = torch.float32 if device == "cuda" else torch.float64
    leaves["scores"] = random_tensor((2, 2, length), 7, wide, device)
    leaves["scores"][:, :, 3 : first - 5] = -torch.inf
    if with_bias:
        leaves["key_bias"] = random_tensor((2, 2, length), 8, wide, device)
    grad_out = random_tensor((2, 4, length, 32), 9, dtype, device)
    own = {name: leaf[:, :, chunk].detach().requires_grad_() for name, leaf in leaves.items()}
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    bias = leaves["scores"] + leaves["key_bias"] if with_bias else leaves["scores"]
    mask = IntervalMask.top_k(leaves["scores"].detach(), **options)
    out = dmattn.attention(leaves["query"], leaves["key"], leaves["value"], mask, key_bias=bias, is_causal=True)
    wanted = [out, *torch.autograd.grad(out, list(leaves.values()), grad_out)]
    for _ in range(2):
        out = context_parallel_attention(**own, **options, group=group)
        got = [out, *torch.autograd.grad(out, list(own.values()), grad_out[:, :, chunk])]
        for ours, expected in zip(got, wanted, strict=True):
            same(ours, expected[:, :, chunk])
    for differing, message in (
        ({"window": options["window"] + rank}, "window: expected the same on every rank"),
        ({"window": options["window"] + 9 * (1 - rank)}, "window: expected the same on every rank"),
        ({"softcap": 2.0 * rank}, "softcap: expected the same on every rank"),
        ({"local": -1 if rank else options.get("local", 0)}, "local: expected" if rank else "rank 1 refused its own arguments"),
    ):  # fmt: skip
        refused = ""
        try:
            context_parallel_attention(**own, **{**options, **differing}, group=group)
        except ValueError as error:
            refused = str(error)
        assert refused.startswith(message), refused
        for _ in range(2):
            same(context_parallel_attention(**own, **options, group=group), wanted[0][:, :, chunk])
