"""What ranks do with DTensors, and compare with the call on whole tensors: the part of test_sharding.py that runs in several processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import dmattn
import torch
import torch.distributed as dist
from dmattn import BlockMask, IndexMask, IntervalMask
from dmattn.nn import score_loss
from dmattn.testing import strategies
from dmattn_bench import two_ways
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

BATCH, QUERIES, KEYS = 3, 20, 24


def device_of(group: dist.ProcessGroup) -> str:
    return "cuda" if "nccl" in dist.get_backend_config(group) else "cpu"


def leaves_of(device: str, names: tuple[str, ...] = (), heads: int = 4, kv_heads: int = 2) -> dict[str, Tensor]:
    """query, key and value, and what is asked for beside, from fixed seeds."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    shapes = {
        "query": (BATCH, heads, QUERIES, 16),
        "key": (BATCH, kv_heads, KEYS, 16),
        "value": (BATCH, kv_heads, KEYS, 8),
        "scores": (BATCH, kv_heads, KEYS),
        "key_bias": (1, heads, KEYS),
        "bias": (BATCH, 1, QUERIES, KEYS),
        "sinks": (heads,),
    }
    wanted = ("query", "key", "value", *names)
    return {
        name: strategies.random_tensor(shapes[name], seed, dtype, device) for seed, name in enumerate(shapes) if name in wanted
    }


def rows(device: str, heads: int) -> IntervalMask:
    """Another interval for every sequence and head."""
    start = strategies.random_tensor((BATCH, heads, KEYS), 5, torch.float64, device).mul(6).int()
    return IntervalMask(start, start + 9)


def documents(device: str) -> IntervalMask:
    return IntervalMask.documents(KEYS, torch.tensor([0, 10, KEYS], device=device))


def pattern(device: str, heads: int) -> Tensor:
    return strategies.random_tensor((BATCH, heads, QUERIES, KEYS), 6, torch.float64, device) > 0


def lists(device: str, heads: int) -> IndexMask:
    """Other lists for every sequence, head and query."""
    entries = strategies.random_tensor((BATCH, heads, QUERIES, 4), 7, torch.float64, device).abs().mul(4).int()
    return IndexMask(entries.clamp(max=KEYS // 2 - 1), 2, is_causal=True, local=3, sink_keys=1)


# A call of leaves by their names, the names beside query, key and value, and what makes a plain mask, which is the same on all ranks.
Case = tuple[Callable[..., Any], tuple[str, ...]]
CASES: dict[str, Case] = {
    "causal": (lambda **given: dmattn.attention(**given, is_causal=True, return_lse=True), ()),
    "top-k": (lambda **given: dmattn.dynamic_mask_attention(**given, window=5, local=2, return_lse=True), ("scores",)),
    "top-k in documents": (
        lambda scores, **given: dmattn.attention(
            **given,
            mask=IntervalMask.top_k(scores.detach(), 5, base=documents(scores.device.type))
            & IntervalMask.sliding_window(KEYS, 9).to(scores.device),
            key_bias=scores,
        ),
        ("scores",),
    ),
    "rows of heads, key_bias": (
        lambda query, **given: dmattn.attention(query, **given, mask=rows(query.device.type, query.shape[1]), softcap=3.0),
        ("key_bias",),
    ),
    "rows of key heads, bias": (
        lambda query, key, **given: dmattn.attention(query, key, **given, mask=rows(query.device.type, key.shape[1])),
        ("bias",),
    ),
    "block mask": (
        lambda query, **given: dmattn.attention(
            query, **given, mask=BlockMask.from_bool(pattern(query.device.type, query.shape[1])) & rows(query.device.type, 1)
        ),
        (),
    ),
    "bool mask, offset": (
        lambda query, **given: dmattn.attention(query, **given, mask=pattern(query.device.type, 1), is_causal=True, query_offset=3),
        (),
    ),
    "lists, offset": (
        lambda query, key, **given: dmattn.attention(
            query, key, **given, mask=lists(query.device.type, key.shape[1]), query_offset=torch.arange(BATCH, device=query.device.type) + 3
        ),
        (),
    ),
    "lists in documents": (
        lambda query, **given: dmattn.attention(
            query, **given, mask=lists(query.device.type, query.shape[1]) & documents(query.device.type)
        ),
        ("key_bias",),
    ),
    "sinks": (lambda **given: dmattn.attention(**given, is_causal=True), ("sinks",)),
    "sdpa": (lambda query, key, value: dmattn.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True), ()),
}  # fmt: skip


def same(result: Tensor, expected: Tensor, name: str = "result 0") -> None:
    if expected.dtype == torch.float64:
        return two_ways.assert_same_in_another_order(result, expected, torch.float64)
    rules = {
        "result 1": two_ways.assert_same_lse_by_another_way,
        "gradient of key_bias": two_ways.assert_same_sums_by_another_way,
        "gradient of scores": two_ways.assert_same_sums_by_another_way,
    }
    rules.get(name, two_ways.assert_same_by_another_way)(result, expected, torch.bfloat16)


def results_of(call: Callable[..., Any], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """out, lse and all gradients."""
    given = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    outs = call(**given)
    outs = outs if isinstance(outs, tuple) else (outs,)
    sum((out * out).sum() for out in outs).backward()
    named = {f"result {i}": out.detach() for i, out in enumerate(outs)}
    return named | {f"gradient of {name}": leaf.grad for name, leaf in given.items() if leaf.grad is not None}


def placed(name: str, leaf: Tensor, mesh: DeviceMesh, layout: tuple[str, ...]) -> DTensor:
    """A leaf distributed by batch, by heads or not at all, along each mesh dimension."""
    dims = {"batch": None if name == "sinks" else 0, "heads": 0 if name == "sinks" else 1, "none": None}
    placements = []
    for share in layout:
        dim = dims[share]
        placements.append(Replicate() if dim is None or leaf.shape[dim] == 1 else Shard(dim))
    return distribute_tensor(leaf, mesh, placements)


def compare(
    call: Callable[..., Any], leaves: dict[str, Tensor], sharded: dict[str, Tensor], compiled: bool = False
) -> dict[str, Tensor]:
    expected = results_of(call, leaves)
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    got = results_of(call, sharded)
    assert got.keys() == expected.keys()
    for name, result in got.items():
        try:
            same(result.full_tensor() if isinstance(result, DTensor) else result, expected[name], name)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    return got


def mesh_of(group: dist.ProcessGroup, shape: tuple[int, ...] | None = None) -> DeviceMesh:
    if shape is None:
        return DeviceMesh.from_group(group, device_of(group), mesh_dim_names=("tp",))
    return init_device_mesh(device_of(group), shape, mesh_dim_names=("dp", "tp"))


def attend(group: dist.ProcessGroup, layouts: list[tuple[str, ...]], names: list[str], compiled: bool = False) -> None:
    """Cases under layouts; every result is laid out as its call was."""
    mesh = mesh_of(group, (2, 2) if len(layouts[0]) == 2 else None)
    for layout in layouts:
        for name in names:
            call, others = CASES[name]
            leaves = leaves_of(device_of(group), others)
            sharded = {leaf: placed(leaf, given, mesh, layout) for leaf, given in leaves.items()}
            try:
                got = compare(call, leaves, sharded, compiled)
            except Exception as error:
                raise AssertionError(f"{name} by {layout}: {error}") from error
            wanted = tuple({"batch": Shard(0), "heads": Shard(1), "none": Replicate()}[share] for share in layout)
            assert got["result 0"].placements == wanted, f"{name} by {layout}: {got['result 0'].placements}"


def attend_with_few_key_heads(group: dist.ProcessGroup) -> None:
    """Query heads are distributed over more ranks than there are key heads; key and value are whole, as DTensors or plain tensors."""
    mesh = mesh_of(group)
    for kv_heads in (1, 2, 4):
        for name in ("causal", "top-k", "rows of key heads, bias", "rows of heads, key_bias"):
            call, others = CASES[name]
            leaves = leaves_of(device_of(group), others, heads=8, kv_heads=kv_heads)
            for plain in (False, True):
                sharded: dict[str, Tensor] = {"query": distribute_tensor(leaves["query"], mesh, [Shard(1)])}
                for leaf, given in list(leaves.items())[1:]:
                    sharded[leaf] = given if plain else distribute_tensor(given, mesh, [Replicate()])
                compare(call, leaves, sharded)


def attend_to_sums(group: dist.ProcessGroup) -> None:
    """Partial sums are added up before they are attended to."""
    mesh, leaves = mesh_of(group), leaves_of(device_of(group))
    out = dmattn.attention(*leaves.values(), is_causal=True)
    parts = [DTensor.from_local(leaf / group.size(), mesh, [Partial()]) for leaf in leaves.values()]
    got = dmattn.attention(*parts, is_causal=True)
    same(got.full_tensor(), out)


def run_other_functions(group: dist.ProcessGroup) -> None:
    """Decoding over both kinds of caches, packed sequences, selection, the ops themselves, without gradients and in inference mode."""
    mesh, device = mesh_of(group), device_of(group)
    leaves = leaves_of(device, ("scores", "sinks"), heads=4, kv_heads=2)
    token, lengths = leaves["query"][:, :, :2], torch.tensor([9, 24, 3], dtype=torch.int32, device=device)
    pages = {name: leaves[name].transpose(1, 2)[:, :16].contiguous() for name in ("key", "value")}  # [pages, 16, Hkv, D]
    table = torch.tensor([[2, 0], [1, 2], [0, 1]], dtype=torch.int32, device=device)

    def shard(given: Tensor, dim: int | None) -> DTensor:
        return distribute_tensor(given, mesh, [Replicate() if dim is None else Shard(dim)])

    for context in (torch.no_grad(), torch.inference_mode()):
        for dim, sinks in ((0, None), (1, 0), (None, None)):
            cached = [leaves["key"], leaves["value"]]
            with context:
                expected = dmattn.decode_attention(token, *cached, lengths, sinks=leaves["sinks"])
                given = [shard(x, dim) for x in (token, *cached)]
                same(dmattn.decode_attention(*given, lengths, sinks=shard(leaves["sinks"], sinks)).full_tensor(), expected)
                for lists in (1, token.shape[1]):
                    chosen = torch.arange(lists * 12, device=device).view(1, lists, 2, 6) * 5 % 7
                    mask = dmattn.IndexMask(chosen, local=2, is_causal=True)
                    expected = dmattn.decode_attention(token, *cached, lengths, mask=mask, sinks=leaves["sinks"])
                    sharded_sinks = shard(leaves["sinks"], sinks)
                    same(dmattn.decode_attention(*given, lengths, mask=mask, sinks=sharded_sinks).full_tensor(), expected)
                    mask = dmattn.IndexMask(shard(chosen, 0), local=2, is_causal=True)  # one rank has all of one sequence's lists
                    same(dmattn.decode_attention(*given, lengths, mask=mask, sinks=sharded_sinks).full_tensor(), expected)
                expected = dmattn.decode_attention(token, *pages.values(), lengths, page_table=table)
                given = [shard(token, dim), *(shard(x, 2 if dim == 1 else None) for x in pages.values())]
                same(dmattn.decode_attention(*given, lengths, page_table=table).full_tensor(), expected)
                mask = IntervalMask.top_k(shard(leaves["scores"], dim), 5)
                assert torch.equal(mask.end.full_tensor(), IntervalMask.top_k(leaves["scores"], 5).end)
    packed = {name: leaves[name][0].transpose(0, 1) for name in ("query", "key", "value")}  # [tokens, heads, D]
    ends = torch.tensor([0, 7, QUERIES], dtype=torch.int32, device=device)

    def varlen(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return dmattn.varlen_attention(query, key[:QUERIES], value[:QUERIES], ends, ends, is_causal=True)

    compare(varlen, packed, {name: shard(given, 1) for name, given in packed.items()})
    inputs = [shard(leaves[name], 1) for name in ("query", "key", "value")]
    options = (*(None,) * 11, True, 0.25, 0.0, 0.0, False)
    out, lse, rest = torch.ops.dmattn.forward(*inputs, *options)
    plain = torch.ops.dmattn.forward(*(leaves[name] for name in ("query", "key", "value")), *options)
    for got, wanted in zip((out, lse, rest), plain, strict=True):
        assert (got.shape, got.stride()) == (wanted.shape, wanted.stride())
        same(got.full_tensor(), wanted)


def reduce(group: dist.ProcessGroup) -> None:
    """Sums and maxima have the bits of one process, and stay where they are; gradients too."""
    mesh, device = mesh_of(group), device_of(group)
    x = torch.randn(7, 6, 900, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    for op in (torch.ops.dmattn.reduce_sum, torch.ops.dmattn.reduce_max):
        for dim, keepdim in itertools.product((None, 0, 1, -1), (False, True)):
            leaf = x.clone().requires_grad_()
            wanted = op(leaf, dim, keepdim)
            weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2)).to(device, x.dtype)
            (wanted_grad,) = torch.autograd.grad(wanted, leaf, weights)
            for placement in (Replicate(), Shard(0), Shard(1), Shard(2), Partial()):
                if placement.is_partial():  # of zeros on all ranks but the first
                    mine = x if dist.get_rank(group) == 0 else torch.zeros_like(x)
                    given = DTensor.from_local(mine, mesh, [placement]).requires_grad_()
                else:
                    given = distribute_tensor(x, mesh, [placement]).requires_grad_()
                got = op(given, dim, keepdim)
                what = f"{op} over {dim}, keepdim={keepdim}, of {placement}"
                assert got.shape == wanted.shape, what
                is_kept = dim is not None and placement.is_shard() and placement.dim != dim % 3
                expected = Shard(placement.dim - (placement.dim > dim % 3 and not keepdim)) if is_kept else Replicate()
                assert got.placements == (expected,), f"{what}: {got.placements}"
                assert torch.equal(got.full_tensor(), wanted), what
                (grad,) = torch.autograd.grad(got, given, distribute_tensor(weights, mesh, list(got.placements)))
                assert torch.equal(grad.full_tensor(), wanted_grad), what
    assert torch.equal(torch.ops.dmattn.reduce_sum(distribute_tensor(x > 0, mesh, [Shard(2)]), 1).full_tensor(), (x > 0).sum(1))


def drop(group: dist.ProcessGroup) -> None:
    """Replicated parts drop the same weights without a seed from the caller; parts of their own drop others."""
    mesh, device = mesh_of(group), device_of(group)
    one = torch.ones(2, 2, 64, 16, dtype=torch.bfloat16 if device == "cuda" else torch.float64, device=device)
    torch.manual_seed(dist.get_rank(group))
    for dim in (0, 1, None):
        given = [distribute_tensor(one, mesh, [Replicate() if dim is None else Shard(dim)]) for _ in range(3)]
        whole = dmattn.attention(*given, is_causal=True, dropout_p=0.5).full_tensor()
        everywhere = [torch.empty_like(whole) for _ in range(group.size())]
        dist.all_gather(everywhere, whole, group=group)
        assert all(torch.equal(whole, other) for other in everywhere)
        if dim is not None:
            first, second = whole.unbind(dim)
            assert not torch.equal(first, second)
        seed = torch.tensor([7], device=device)
        repeated = [dmattn.attention(*given, is_causal=True, dropout_p=0.5, dropout_seed=seed).full_tensor() for _ in range(2)]
        assert torch.equal(*repeated)


def refused(group: dist.ProcessGroup) -> dict[str, str]:
    """What each bad call says."""
    mesh, device = mesh_of(group), device_of(group)
    leaves = leaves_of(device, ("scores",))
    query, key, value, scores = leaves.values()
    three = leaves_of(device, heads=6, kv_heads=3)
    # A mesh of no new group, which all processes would have to make.
    other = DeviceMesh.from_group(group, device, mesh_dim_names=("other",))

    def shard(given: Tensor, dim: int) -> DTensor:
        return distribute_tensor(given, mesh, [Shard(dim)])

    cache = dmattn.BoundedCache(BATCH, 2, 4, 16, value_dim=8, dtype=key.dtype, device=device)
    token = [shard(x[:, :, :1], 1) for x in (query, key, value)]
    calls: dict[str, Callable[[], object]] = {
        "sequence": lambda: dmattn.attention(shard(query, 2), shard(key, 2), shard(value, 2)),
        "sequence of keys": lambda: dmattn.attention(query, shard(key, 2), value),
        "sequence of scores": lambda: dmattn.dynamic_mask_attention(query, key, value, shard(scores, 2), 5),
        "head size": lambda: dmattn.attention(shard(query, 3), shard(key, 3), value),
        "groups": lambda: dmattn.attention(*(shard(x, 1) for x in three.values())),
        "pages": lambda: dmattn.decode_attention(
            query[:, :, :1], *(shard(x.transpose(1, 2)[:, :16].contiguous(), 0) for x in (key, value)),
            torch.full((BATCH,), 3, dtype=torch.int32, device=device), page_table=torch.zeros(BATCH, 1, dtype=torch.int32, device=device),
        ),
        "two meshes": lambda: dmattn.attention(shard(query, 1), DTensor.from_local(key, other, [Replicate()]), value),
        "bool mask": lambda: dmattn.attention(query, key, value, shard(pattern(device, 1), 0)),
        "cache": lambda: cache.attend(*token, shard(scores[:, :, :1], 1)),
        "queries of the loss": lambda: score_loss(shard(query, 1), shard(key[:, :, :QUERIES], 1), scores[:, :, :QUERIES]),
        "scores of the loss": lambda: score_loss(query, key[:, :, :QUERIES], shard(scores[:, :, :QUERIES], 0)),
    }  # fmt: skip
    answers = {}
    with torch.no_grad():
        for name, call in calls.items():
            try:
                call()
                answers[name] = "nothing"
            except Exception as error:
                answers[name] = f"{type(error).__name__}: {error}"
    return answers
