"""What ranks tell each other before anything moves, so that ranks that were called differently are an error on every rank."""

from __future__ import annotations

import contextlib
import struct
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from dmattn.distributed.chunks import begin_all_gather_flat

# What a rank says, in this order. "length" is its own and may differ; the rest is the same on every rank.
FIELDS = (
    "failed",
    "length",
    "batch size",
    "number of query heads",
    "number of key heads",
    "head size",
    "value size",
    "dtype",
    "device type",
    "kind of mask (0 causal, 1 mask, 2 scores, 3 scores with base)",
    "length of the mask",
    "mask",
    "key_bias (0 none, else 1 + batches + 2^20 heads)",
    "scores' dtype",
    "window",
    "local",
    "sink",
    "scale",
    "softcap",
    "dropout_p",
    "tensors that require gradients (query 1, key 2, value 4, key_bias 8, scores 16)",
    "dropout_seed (0 none, 1 given)",
    "compiled",
)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FLOATS = ("scale", "softcap", "dropout_p")

MOST_ANSWERS = 64  # that are remembered for a group


class Answer(NamedTuple):
    """What every rank was called with, int64 [ranks * fields], and the lengths of their chunks."""

    everyone: torch.Tensor
    lengths: list[int]


_answers: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Answer]] = weakref.WeakKeyDictionary()
_host_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def float_bits(value: float) -> int:
    """A number as the integer with the same bits."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


class Question:
    """An exchange of arguments that has begun: this rank has said what it was called with, and the others' answers are on their way.

    The exchange is one between hosts, over gloo, so that it waits for no GPU. What a rank does meanwhile may build on :attr:`expected`, but
    nothing may leave the rank before :meth:`answer` has returned: ranks that differ would wait for each other in exchanges that do not fit.
    """

    def __init__(self, group: dist.ProcessGroup, said: Sequence[int]) -> None:
        world = dist.get_world_size(group)
        self._said = tuple(said)
        self._answers = _answers.setdefault(group, {})
        self._everyone = torch.empty(world * len(FIELDS), dtype=torch.int64)
        self._work = begin_all_gather_flat(self._everyone, torch.tensor(said, dtype=torch.int64), _host_group(group))

    @property
    def expected(self) -> list[int] | None:
        """The lengths of all chunks when this rank last said the same; None if it never has."""
        known = self._answers.get(self._said)
        return None if known is None else known.lengths

    def answer(self) -> list[int]:
        """The lengths of all chunks, after every rank has said what it was called with.

        Raises:
            ValueError: ranks differ; on every rank, with the argument, its values and ranks.
            RuntimeError: torch's own, where a rank does not answer within the group's timeout.
        """
        self._work.wait()
        known = self._answers.get(self._said)
        if known is not None and torch.equal(known.everyone, self._everyone):
            return known.lengths
        everyone = self._everyone.view(-1, len(FIELDS)).tolist()
        lengths = _compared(everyone)
        if len(self._answers) == MOST_ANSWERS:
            self._answers.clear()
        self._answers[self._said] = Answer(self._everyone, lengths)
        return lengths


def agree(group: dist.ProcessGroup, said: Sequence[int]) -> list[int]:
    """Asks a :class:`Question` and waits for the answer."""
    return Question(group, said).answer()


def _compared(everyone: list[list[int]]) -> list[int]:
    failed = [rank for rank, one in enumerate(everyone) if one[0]]
    if failed:
        raise ValueError(f"rank {failed[0]} refused its own arguments; its error says why")
    for place, name in enumerate(FIELDS):
        values = [one[place] for one in everyone]
        if name == "length" or len(set(values)) == 1:
            continue
        other = next(rank for rank, value in enumerate(values) if value != values[0])
        raise ValueError(
            f"{name}: expected the same on every rank, got {_shown(name, values[0])} on rank 0 and {_shown(name, values[other])} on rank {other}"
        )
    return [one[FIELDS.index("length")] for one in everyone]


def fail(group: dist.ProcessGroup) -> None:
    """Tells the other ranks that this one has refused its arguments."""
    with contextlib.suppress(ValueError):
        agree(group, [1, *(0 for _ in FIELDS[1:])])


def _shown(name: str, value: int) -> object:
    if name in FLOATS:
        return struct.unpack("<d", struct.pack("<q", value))[0]
    if name in ("dtype", "scores' dtype"):
        return "none" if value < 0 else str(DTYPES[value]).removeprefix("torch.")
    return value


def _host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
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
