"""How a sequence is cut: which group of ranks holds it, and how many positions each rank holds."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dmattn import checks

_host_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


class Chunks(NamedTuple):
    """Rank r of the group holds positions [first(r), first(r + 1))."""

    group: str  # its name
    rank: int
    lengths: Sequence[int]  # of every rank's chunk

    def length(self) -> int:
        return sum(self.lengths)

    def first(self, rank: int) -> int:
        """The position of a rank's first query; the length of the sequence for the rank behind the last."""
        return sum(self.lengths[:rank])

    def firsts(self) -> list[int]:
        """:meth:`first` of every rank and of the one behind the last."""
        return [0, *itertools.accumulate(self.lengths)]


def group_of(mesh: object, group: object) -> dist.ProcessGroup:
    """The group that ``mesh`` or ``group`` means; the world without either.

    Raises:
        TypeError: a mesh that is no DeviceMesh, or a group that is no ProcessGroup.
        ValueError: both given, a mesh of several dimensions, ranks of a mesh that are not in ascending order, a group without this rank, or no
            group at all because torch.distributed is not initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("group: expected torch.distributed to be initialised (torch.distributed.init_process_group), it is not")
    if mesh is not None and group is not None:
        raise ValueError("mesh, group: expected at most one of them, got both")
    if mesh is not None:
        return _group_of_mesh(mesh)
    if group is None:
        world = dist.group.WORLD
        assert world is not None
        return world
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: expected a group that this rank is a member of, got one without it")
    if not isinstance(group, dist.ProcessGroup):
        instead = "; give mesh.get_group()" if isinstance(group, DeviceMesh) else ""
        raise TypeError(f"group: expected a torch.distributed.ProcessGroup, got {checks.type_of(group)}{instead}")
    if not torch.compiler.is_compiling() and dist.get_rank(group) < 0:
        raise ValueError("group: expected a group that this rank is a member of, got one without it")
    return group


def _group_of_mesh(mesh: object) -> dist.ProcessGroup:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a torch.distributed.device_mesh.DeviceMesh, got {checks.type_of(mesh)}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, such as mesh['cp'], got {mesh.ndim}")
    group = mesh.get_group()
    if not torch.compiler.is_compiling():
        ranks = mesh.mesh.tolist()
        if ranks != sorted(ranks):
            raise ValueError(f"mesh: expected ranks in ascending order, as chunks follow each other in rank order, got {ranks}")
        if dist.get_rank() not in ranks:
            raise ValueError(f"mesh: expected one with this rank {dist.get_rank()}, got one of {ranks}")
    return group


def all_gather_flat(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begins to gather everybody's ``sent`` [n], in rank order, into ``received`` [ranks * n]."""
    # Newer releases of torch have another name for it.
    all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = all_gather(received, sent, group=group, async_op=True)
    return work


def begin_message(packed: Tensor, source: int, group: dist.ProcessGroup) -> dist.Work:
    """Begins to send bytes from one rank of two to the other."""
    rank, sent, received = dist.get_rank(group), [0, 0], [0, 0]
    (sent if rank == source else received)[1 - rank] = packed.numel()
    incoming, outgoing = (packed[:0], packed) if rank == source else (packed, packed[:0])
    work: dist.Work = dist.all_to_all_single(incoming, outgoing, received, sent, group=group, async_op=True)
    return work


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks that exchanges tensors on the CPU: the group itself, or one that is made on first use."""
    if "cpu" in dist.get_backend_config(group):
        return group
    made = _host_groups.get(group)
    if made is None:
        made = dist.new_group(
            dist.get_process_group_ranks(group), timeout=_timeout_of(group), backend="gloo", use_local_synchronization=True
        )
        assert made is not None
        _host_groups[group] = made
    return made


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long the group waits for its ranks; None, torch's default, where its backend does not say."""
    options = getattr(group._get_backend(torch.device("cuda")), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout
