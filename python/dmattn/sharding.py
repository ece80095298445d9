"""Attention of DTensors: every rank computes the batches and heads that it holds, and the results are DTensors again.

Batches and groups of heads do not touch each other, so the op on a rank's own part needs no other rank. Here a call's tensors are brought
to one layout, the ops run on local tensors, and torch's DTensor carries gradients back: that of an operand which several parts share, a bias
of all heads for example, is the sum of theirs. A plain tensor next to DTensors is taken to be the same on all ranks.

This module never imports torch.distributed.tensor: whoever made the DTensor has imported it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

SEED_STEP = 0x9E3779B97F4A7C1  # between the dropout seeds of parts: a large odd number


class Roles(NamedTuple):
    """Which dimension of a tensor counts batches and which one heads; None: it has none."""

    batch: int | None
    heads: int | None


USUAL = Roles(0, 1)
NONE = Roles(None, None)
PAGED = Roles(None, 2)  # [pages, page_size, Hkv, D]
PER_SEQUENCE = Roles(0, None)
PER_HEAD = Roles(None, 0)
# Of the op forward's tensors: query to columns, bits, indices, index_offset, key_bias, bias, dropout_seed.
FORWARD_ROLES = (*(USUAL,) * 8, NONE, USUAL, PER_SEQUENCE, USUAL, USUAL, NONE)


def is_sharded(given: object) -> bool:
    """Whether it is a DTensor; told by an attribute, so that torch.distributed.tensor need not be imported."""
    return isinstance(given, Tensor) and hasattr(given, "device_mesh")


def any_sharded(inputs: Sequence[object]) -> bool:
    return any(is_sharded(given) for given in inputs)


def beside(like: Tensor, given: Tensor) -> Tensor:
    """A plain tensor that is the same on all ranks, as a DTensor on the mesh of ``like`` if that is one."""
    return _replicated(given, like.device_mesh) if is_sharded(like) and not is_sharded(given) else given  # type: ignore[attr-defined]


def alike(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both as DTensors if one of them is."""
    return beside(second, first), beside(first, second)


def own_part(parameter: Tensor, like: Tensor) -> Tensor:
    """The rows of a layer's parameter that this rank holds: of a DTensor its local tensor, differentiable, unless ``like``, what it is computed
    with, is a DTensor, too; any other tensor whole."""
    to_local: Any = None if is_sharded(like) else getattr(parameter, "to_local", None)
    part: Tensor = parameter if to_local is None else to_local()
    return part


# The ops ------------------------------------------------------------------------------------------------------------------------------


def forward(inputs: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The op ``forward`` on DTensors: out, lse, lse_rest."""
    query, key, value = inputs[:3]
    plan = ShardingPlan(
        inputs, (("query", query, USUAL), ("key", key, USUAL), ("value", value, USUAL)), query.shape[1], key.shape[1]
    )
    tensors = [plan.own(given, roles) for given, roles in zip(inputs[: len(FORWARD_ROLES) - 1], FORWARD_ROLES, strict=False)]
    seed = inputs[len(FORWARD_ROLES) - 1]
    tensors.append(None if seed is None else plan.own_seed(seed))
    out, lse, rest = torch.ops.dmattn.forward(*tensors, *inputs[len(FORWARD_ROLES) :])
    shape = query.shape[:3]
    whole_rest = plan.whole(rest, shape) if rest.dim() == 3 else _replicated(rest, plan.mesh)
    return plan.whole(out, (*shape, value.shape[3])), plan.whole(lse, shape), whole_rest


def select(scores: Tensor, segment_end: Tensor | None, *options: object) -> Tensor:
    """The op ``select`` on DTensors: end."""
    plan = ShardingPlan((scores, segment_end), (("scores", scores, USUAL),), scores.shape[1], scores.shape[1])
    end = torch.ops.dmattn.select(plan.own(scores.detach(), USUAL), plan.own(segment_end, USUAL), *options)
    return plan.whole(end, scores.shape)


def decode(inputs: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """The op ``decode`` on DTensors: out, lse."""
    query, key, value, page_table = *inputs[:3], inputs[4]
    cache = USUAL if page_table is None else PAGED
    parts = (("query", query, USUAL), ("key_cache", key, cache), ("value_cache", value, cache))
    plan = ShardingPlan(inputs, parts, query.shape[1], key.shape[1 if page_table is None else 2])
    roles = (USUAL, cache, cache, PER_SEQUENCE, PER_SEQUENCE, USUAL, PER_HEAD, USUAL)
    tensors = [plan.own(given, role) for given, role in zip(inputs[: len(roles)], roles, strict=True)]
    out, lse = torch.ops.dmattn.decode(*tensors, *inputs[len(roles) :])
    shape = query.shape[:3]
    return plan.whole(out, (*shape, value.shape[3])), plan.whole(lse, shape)


def reduce(op: Any, given: Any, dim: int | None, keepdim: bool) -> Tensor:
    """The ops ``reduce_sum`` and ``reduce_max`` on a DTensor.

    Every rank reduces the sequences that it holds. What is distributed along a reduced dimension, or is a partial result, is gathered first: the
    order of additions, and so the bits, are those of one process.
    """
    dtensor = _tensor_module()
    rank = given.dim()
    reduced = None if dim is None or rank == 0 else dim % rank
    placements: list[Any] = [dtensor.Replicate()] * given.device_mesh.ndim
    results = list(placements)
    if reduced is not None:
        for at, placement in enumerate(given.placements):
            if type(placement) is dtensor.Shard and placement.dim != reduced:
                placements[at] = placement
                results[at] = dtensor.Shard(placement.dim - (placement.dim > reduced and not keepdim))
    local = given.redistribute(given.device_mesh, placements).to_local(grad_placements=placements)
    result = op(local, dim, keepdim)
    sizes = [1 if reduced in (None, at) else size for at, size in enumerate(given.shape)]
    if not keepdim and rank:
        sizes = [] if reduced is None else sizes[:reduced] + sizes[reduced + 1 :]
    shape = torch.Size(sizes)
    whole: Tensor = dtensor.DTensor.from_local(
        result, given.device_mesh, results, run_check=False, shape=shape, stride=_strides_in_order_of(result, shape)
    )
    return whole


def softplus(given: Tensor) -> Tensor:
    """torch's softplus of a DTensor, which torch 2.10 does not compute, from operations that it does."""
    return torch.where(given > 20, given, torch.logaddexp(given, torch.zeros_like(given)))


def refuse(name: str) -> None:
    """For what keeps a rank's state."""
    raise TypeError(f"{name}: expected plain tensors, got a DTensor: give this rank's part, tensor.to_local()")


# Who computes what --------------------------------------------------------------------------------------------------------------------


class ShardingPlan:
    """How a call's batches and heads are distributed over a mesh, and a rank's own part of its tensors.

    Every mesh dimension distributes batches or heads, or nothing, as the first sharded one of the leading tensors has it.

    Args:
        inputs: all arguments; the first DTensor among them gives the mesh.
        leading: (name, tensor, roles) of those that decide.
        heads, kv_heads: H and Hkv.

    Raises:
        ValueError: a leading tensor is sharded otherwise, heads cannot be distributed by whole groups, or there are two meshes.
    """

    def __init__(self, inputs: Sequence[Any], leading: Sequence[tuple[str, Tensor, Roles]], heads: int, kv_heads: int) -> None:
        self.mesh: Any = next(given.device_mesh for given in inputs if is_sharded(given))
        for given in inputs:
            if is_sharded(given) and given.device_mesh != self.mesh:
                raise ValueError(f"query, key, value: expected DTensors of one mesh, got {self.mesh} and {given.device_mesh}")
        batch = leading[0][1].shape[0]
        shares = [_share(dim, self.mesh, leading) for dim in range(self.mesh.ndim)]
        self.shares = [None if (batch if share == "batch" else heads) == 1 else share for share in shares]
        self.kv_heads = kv_heads
        parts = self._parts("heads")
        # Fewer key heads than ranks: every rank takes the one key head that its query heads belong to.
        self.shared_heads = 1 < kv_heads < parts and parts % kv_heads == 0
        if heads != kv_heads and (heads % parts or not (kv_heads % parts == 0 or self.shared_heads or kv_heads == 1)):
            raise ValueError(
                f"query: expected numbers of heads that {parts} ranks can share by whole groups, got H={heads}, Hkv={kv_heads}"
            )

    def _parts(self, share: str) -> int:
        parts = 1
        for dim, own in enumerate(self.shares):
            parts *= self.mesh.size(dim) if own == share else 1
        return parts

    def _index(self, share: str | None = None) -> int:
        """Which part of the batches, of the heads, or of all, this rank has."""
        index = 0
        for dim, own in enumerate(self.shares):
            if own is not None and share in (own, None):
                index = index * self.mesh.size(dim) + self.mesh.get_local_rank(dim)
        return index

    def own(self, given: Tensor | None, roles: Roles) -> Any:
        """The part of a tensor that this rank computes with; where all parts share it, its gradient is the sum of theirs."""
        if given is None:
            return None
        dtensor = _tensor_module()
        narrowed = self.shared_heads and roles.heads is not None and given.shape[roles.heads] == self.kv_heads
        placements: list[Any] = []
        gradients: list[Any] = []
        for share in self.shares:
            dim = None if share is None else roles.batch if share == "batch" else roles.heads
            if dim is None or given.shape[dim] == 1 or (narrowed and share == "heads"):
                placements.append(dtensor.Replicate())
                gradients.append(dtensor.Replicate() if share is None else dtensor.Partial())
            else:
                placements.append(dtensor.Shard(dim))
                gradients.append(dtensor.Shard(dim))
        whole: Any = given if is_sharded(given) else _replicated(given, self.mesh)
        if tuple(whole.placements) != tuple(placements):
            whole = whole.redistribute(self.mesh, placements)
        local: Tensor = whole.to_local(grad_placements=gradients)
        if narrowed:
            head = self._index("heads") * self.kv_heads // self._parts("heads")
            local = local.narrow(roles.heads or 0, head, 1)
        return local

    def own_seed(self, seed: Tensor) -> Tensor:
        """A dropout seed of this rank's part: one that all ranks agree on, and another one for each part."""
        dtensor = _tensor_module()
        drawn: Any = seed
        if not is_sharded(seed):  # ranks may have drawn different ones
            drawn = dtensor.DTensor.from_local(seed, self.mesh, [dtensor.Partial("max")] * self.mesh.ndim, run_check=False)
        agreed: Tensor = drawn.redistribute(self.mesh, [dtensor.Replicate()] * self.mesh.ndim).to_local()
        return agreed + SEED_STEP * self._index()

    def whole(self, local: Tensor, shape: Sequence[int]) -> Tensor:
        """A result [B, H, ...] of this rank's part as a DTensor of the given shape."""
        dtensor = _tensor_module()
        dims = {"batch": 0, "heads": 1}
        placements = [dtensor.Replicate() if share is None else dtensor.Shard(dims[share]) for share in self.shares]
        size: dict[str, Any] = {}
        # Without a shape, torch takes all parts to be as large as this one.
        if any(shape[dim] % self._parts(share) for share, dim in dims.items()):
            size = {"shape": torch.Size(shape), "stride": _strides_in_order_of(local, shape)}
        result: Tensor = dtensor.DTensor.from_local(local, self.mesh, placements, run_check=False, **size)
        return result


def _share(dim: int, mesh: Any, leading: Sequence[tuple[str, Any, Roles]]) -> str | None:
    """What a mesh dimension distributes: "batch", "heads" or None."""
    shares: list[str] = []
    for name, given, roles in leading:
        placement = given.placements[dim] if is_sharded(given) else None
        if placement is None or placement.is_replicate() or placement.is_partial():
            continue
        role = {roles.batch: "batch", roles.heads: "heads"}.get(placement.dim) if placement.is_shard() else None
        if role is None:
            raise ValueError(_refusal(name, placement, dim, mesh, roles))
        shares.append(role)
    return shares[0] if shares else None


def _refusal(name: str, placement: Any, dim: int, mesh: Any, roles: Roles) -> str:
    usable = [f"Shard({at}) ({what})" for what, at in (("batch", roles.batch), ("heads", roles.heads)) if at is not None]
    where = f"dimension {dim if mesh.mesh_dim_names is None else mesh.mesh_dim_names[dim]!r} of its mesh"
    text = f"{name}: expected {', '.join(usable)} or Replicate() on {where}, got {placement!r}"
    if roles == USUAL and placement.is_shard(2):
        text += "; dmattn.distributed.context_parallel_attention computes with a sequence that ranks share"
    return text


def _tensor_module() -> Any:
    """torch.distributed.tensor, which whoever has a DTensor has imported."""
    return torch.distributed.tensor


def _replicated(given: Tensor, mesh: Any) -> Tensor:
    dtensor = _tensor_module()
    whole: Tensor = dtensor.DTensor.from_local(given, mesh, [dtensor.Replicate()] * mesh.ndim, run_check=False)
    return whole


def _strides_in_order_of(local: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions lie in memory in the order of another one's."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda at: (local.stride(at), -at)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
