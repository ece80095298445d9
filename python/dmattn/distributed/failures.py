"""Ranks that fail in the middle of a call: the others raise an error that names them, instead of waiting for the group's timeout.

A rank that raises between two exchanges says so in the group's store, where ranks look that have waited for a second. A process that has
ended closes its connections: over gloo, which carries every handshake, the ranks next to it notice at once and tell the others. Where a rank
waits over NCCL, only the device does; there the next handshake raises, or torch's own watchdog after the group's timeout.
"""

from __future__ import annotations

import contextlib
import weakref
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from dmattn.distributed.chunks import host_group

INTERVAL = timedelta(seconds=1)  # between two looks into the store, of a rank that waits
KEY = "dmattn/failure"
PROBE_TAG = 1_836_016  # of messages that nobody receives

_failures: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
# Groups with exchanges that will not end, kept alive: destroying one blocks until its timeout.
_abandoned: list[dist.ProcessGroup] = []


class Reporting:
    """A context that can be entered again. It tells the other ranks of an error that this rank raises within it, except of a TypeError or a
    ValueError: those refuse arguments, and every rank raises them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, (ValueError, TypeError)) and self._group not in _failures:
            first_line = str(error).partition("\n")[0]
            _tell(self._group, f"rank {dist.get_rank(self._group)} failed: {type(error).__name__}: {first_line}")


def check(group: dist.ProcessGroup) -> None:
    """Refuses a group of which this rank knows that a rank has failed.

    Raises:
        RuntimeError: with the name of the failed rank.
    """
    failure = _failures.get(group)
    if failure is not None:
        raise RuntimeError(f"{failure}; its group cannot be used any more: make a new one")


def wait(work: dist.Work, group: dist.ProcessGroup, message: Tensor) -> None:
    """``work.wait()`` that ends when a rank of the group has failed. ``message``: what the work exchanges.

    Raises:
        RuntimeError: with the name of the failed rank; or torch's own, where a rank does not answer within the group's timeout.
    """
    if message.device.type == "cuda" and group._get_backend(message.device).name() != "gloo":
        work.wait()  # the device waits, the host does not
        return
    has_ended = False
    while True:
        try:
            work.wait(INTERVAL)
        except RuntimeError:
            if has_ended:
                _find_out(group)
                check(group)
                raise
            has_ended = work.is_completed()  # if so, wait again for its own error
            if not has_ended:
                _look(group)
                if group in _failures:
                    _abandoned.extend((group, host_group(group)))
                check(group)
        else:
            return


def _find_out(group: dist.ProcessGroup) -> None:
    """Remembers what other ranks say of an exchange that has ended with an error, or else tells them who is gone."""
    _look(group)
    if group in _failures:
        return
    gone = [rank for rank in range(dist.get_world_size(group)) if rank != dist.get_rank(group) and _is_gone(group, rank)]
    if gone:
        _tell(group, f"rank {gone[0]} failed: its process is gone")


def _is_gone(group: dist.ProcessGroup, rank: int) -> bool:
    """Whether a rank has closed its connection, which the first attempt to send says."""
    try:
        dist.isend(torch.zeros(1), group=host_group(group), group_dst=rank, tag=PROBE_TAG)
    except RuntimeError:
        return True
    return False


def _look(group: dist.ProcessGroup) -> None:
    """Remembers what another rank has told. A store whose process is gone says nothing; who held it is found out like any other rank."""
    try:
        store = _store(group)
        if store.check([KEY]):
            _failures[group] = store.get(KEY).decode()
    except RuntimeError:
        if dist.get_rank(group) != 0 and _is_gone(group, 0):
            _failures[group] = "rank 0 failed: its process is gone"


def _tell(group: dist.ProcessGroup, failure: str) -> None:
    """The first failure that any rank tells is what all raise: later ones follow from it."""
    with contextlib.suppress(RuntimeError):  # of a store that is gone with its rank, which the others see
        failure = _store(group).compare_set(KEY, "", failure).decode()
    _failures[group] = failure


def _store(group: dist.ProcessGroup) -> Any:
    return distributed_c10d._get_process_group_store(group)
