"""The metadata that ranks exchange before anything moves, so that ranks that were called differently are an error on every rank."""

from __future__ import annotations

import contextlib
import struct
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from dmattn.distributed.chunks import begin_all_gather_flat, begin_message

COMPILED = "compiled (0 no, 1 yes)"  # before all that a compiled call does not know, and so does not send
KIND = "kind of mask (0 causal, 1 mask, 2 scores, 3 scores with base)"
# A call_signature: the metadata of a rank's call, in this order. "length" is its own and may differ; the rest is the same on every rank.
FIELDS = (
    "failed",
    "length",
    COMPILED,
    "batch size",
    "number of query heads",
    "number of key heads",
    "head size",
    "value size",
    "dtype",
    "device type",
    KIND,
    "length of the mask",
    "mask",
    "key_bias (0 none, else 1 + batches + 2^20 heads)",
    "scores' dtype",
    "window",
    "local",
    "sink_keys",
    "scale",
    "softcap",
    "dropout_p",
    "tensors that require gradients (query 1, key 2, value 4, key_bias 8, scores 16)",
    "dropout_seed (0 none, 1 given)",
)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FLOATS = ("scale", "softcap", "dropout_p")
DEVICE_TYPES = ("cpu", "cuda")

MOST_CALLS = 64  # that a group remembers

# What a rank sends about the message that its call exchanges before the answers have come: its bytes, or one of these.
WAITS, FORGOT = -1, -2

Call = tuple[tuple[int, ...], ...]  # the call_signature of every rank, in rank order


class Memory:
    """What a rank remembers of its group's calls. Only calls that all ranks have exchanged get in, so all ranks remember the same.

    Attributes:
        last: the last call; None before the first one, after an error, and while a call has asked and has no answer.
        followed: which call came after another one when that was last made.
        devices: of this rank's messages, by their type.
    """

    def __init__(self) -> None:
        self.last: Call | None = None
        self.followed: dict[Call, Call] = {}
        self.devices: dict[str, torch.device] = {}


_memories: weakref.WeakKeyDictionary[dist.ProcessGroup, Memory] = weakref.WeakKeyDictionary()
_host_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def float_bits(value: float) -> int:
    """A number as the integer with the same bits."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


class Question:
    """An exchange of arguments: each rank sends its call_signature, and compares those of all ranks.

    The exchange is one between hosts, over gloo, so that it waits for no GPU. A rank may send or receive the message of its call before it
    knows the answer, but only if it was called as it expected (:attr:`expected`). All ranks expect the same call, so those that go ahead fit
    each other. Those that wait learn from the answer that others have gone ahead, and take the other end of their message, so that it ends
    and nothing hangs; what it brings is thrown away, and all begin again or, if they differ, raise.
    """

    def __init__(self, group: dist.ProcessGroup, call_signature: Sequence[int], device: torch.device | None = None) -> None:
        self._group, self._call_signature, self._device = group, tuple(call_signature), device
        self._memory = _memories.setdefault(group, Memory())
        self._last = self._memory.last
        self._expected = None if self._last is None else self._memory.followed.get(self._last, self._last)

    @property
    def expected(self) -> list[int] | None:
        """The lengths of all chunks if this is the call that all ranks expect: the one that came after the last one before, or the last one."""
        if self._expected is None or self._expected[dist.get_rank(self._group)] != self._call_signature:
            return None
        return _lengths(self._expected)

    def ask(self, message: int = WAITS) -> None:
        """Sends this rank's call_signature. ``message``: the bytes of the message that it exchanges without waiting for the answer."""
        if message == WAITS and self._last is None:
            message = FORGOT
        # A call that fails before it has the answer has not remembered what the others have.
        self._memory.last = None
        self._message = message
        self._everyone = torch.empty(dist.get_world_size(self._group) * (len(FIELDS) + 1), dtype=torch.int64)
        call_signature = torch.tensor((*self._call_signature, message), dtype=torch.int64)
        self._work = begin_all_gather_flat(self._everyone, call_signature, _host_group(self._group))

    def answer(self) -> list[int]:
        """The lengths of all chunks, after every rank has sent its call_signature.

        Raises:
            ValueError: ranks differ; on every rank, with the argument, its values and ranks.
            RuntimeError: torch's own, where a rank does not answer within the group's timeout.
        """
        self._work.wait()
        everyone = self._everyone.view(-1, len(FIELDS) + 1).tolist()
        messages = [one.pop() for one in everyone]
        call = tuple(map(tuple, everyone))
        self.all_went_ahead = min(messages) >= 0
        if self._message < 0 <= max(messages):
            ahead = call[messages.index(max(messages))]
            self._end_message(max(messages), DEVICE_TYPES[ahead[FIELDS.index("device type")]])
        if call != self._expected:
            _compare(call)
        memory = self._memory
        if min(messages) == FORGOT or len(memory.followed) == MOST_CALLS:
            memory.followed.clear()
        elif self._last is not None:
            memory.followed[self._last] = call
        memory.last = call
        if self._device is not None:
            memory.devices[self._device.type] = self._device
        return _lengths(call)

    def _end_message(self, size: int, device_type: str) -> None:
        """Takes this rank's end of the message that the other of two ranks has begun. A sender sends zeros.

        The message goes over the backend of the other rank's device, which need not be that of this rank's call or of its last one.
        """
        if size:
            device = self._memory.devices.get(device_type, torch.device(device_type))
            begin_message(torch.zeros(size, dtype=torch.uint8, device=device), 0, self._group).wait()


def agree(group: dist.ProcessGroup, call_signature: Sequence[int]) -> list[int]:
    """Asks a :class:`Question` and waits for the answer."""
    question = Question(group, call_signature)
    question.ask()
    return question.answer()


def _lengths(call: Call) -> list[int]:
    return [one[FIELDS.index("length")] for one in call]


def _compare(everyone: Call) -> None:
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


def in_one_order(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether questions and messages of a device go over one backend, which then takes them in the same order on all ranks."""
    if device.type == "cpu":
        return True
    shared: bool = group._get_backend(device) is _host_group(group)._get_backend(torch.device("cpu"))
    return shared


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long the group waits for its ranks; None, torch's default, where its backend does not say."""
    options = getattr(group._get_backend(torch.device("cuda")), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout
