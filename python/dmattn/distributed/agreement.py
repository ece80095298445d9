"""The handshake of a call: ranks compare the metadata of their calls, so that calls that differ are an error on every rank.

It is an all-gather between hosts, over gloo, and waits for no GPU. Between two ranks it is optimistic: a rank that repeats the call that all
ranks last agreed on starts the call's message ahead of the handshake. Any two ranks that do so agree on that message. Where only one does, the
other learns so from the handshake and takes its end of the message, so that nothing hangs, and what the message brings is thrown away.
"""

from __future__ import annotations

import contextlib
import struct
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dmattn import checks
from dmattn.distributed import failures
from dmattn.distributed.chunks import all_gather_flat, begin_message, host_group

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

Call = list[list[int]]  # the call_signature of every rank, in rank order


class Memory:
    """What a rank remembers of a group.

    Attributes:
        last: the last call on which all ranks agreed, and so the same on every rank; None before the first one.
        devices: of this rank's messages, by their type.
    """

    def __init__(self) -> None:
        self.last: Call | None = None
        self.devices: dict[str, torch.device] = {}


_memories: weakref.WeakKeyDictionary[dist.ProcessGroup, Memory] = weakref.WeakKeyDictionary()


def expected_lengths(group: dist.ProcessGroup, call_signature: Sequence[int]) -> list[int] | None:
    """The lengths of all chunks, if this is the call that all ranks last agreed on; None otherwise."""
    memory = _memories.get(group)
    if memory is None or memory.last is None or memory.last[dist.get_rank(group)] != call_signature:
        return None
    return _field(memory.last, "length")


class Handshake:
    """Sends this rank's call_signature, and compares it with those of the others in :meth:`finish`.

    Args:
        device: of the call's message, if it is one between two ranks.
        ahead: the bytes of that message, if it does not wait for the handshake; else 0.
    """

    def __init__(
        self, group: dist.ProcessGroup, call_signature: Sequence[int], device: torch.device | None = None, ahead: int = 0
    ) -> None:
        failures.check(group)
        self._group, self._ahead = group, ahead
        self._memory = _memories.setdefault(group, Memory())
        if device is not None:
            self._memory.devices[device.type] = device
        self._everyone = torch.empty(dist.get_world_size(group) * (len(FIELDS) + 1), dtype=torch.int64)
        sent = torch.tensor([*call_signature, ahead], dtype=torch.int64)
        self._work = all_gather_flat(self._everyone, sent, host_group(group))

    def finish(self) -> list[int]:
        """The lengths of all chunks. ``all_went_ahead`` says afterwards whether the message has been exchanged.

        Raises:
            ValueError: ranks differ, or their lengths are refused; on every rank.
            RuntimeError: a rank has failed, or does not answer within the group's timeout.
        """
        failures.wait(self._work, self._group, self._everyone)
        call: Call = self._everyone.view(-1, len(FIELDS) + 1).tolist()
        ahead = [one.pop() for one in call]
        self.all_went_ahead = min(ahead) > 0
        if max(ahead) and not self._ahead:
            self._end_message(max(ahead), DEVICE_TYPES[_field(call, "device type")[ahead.index(max(ahead))]])
        _compare(call)
        _check_lengths(call)
        self._memory.last = call
        return _field(call, "length")

    def _end_message(self, size: int, device_type: str) -> None:
        """Takes this rank's end of the message that the other of two ranks has begun. A sender sends zeros.

        The message goes over the backend of the other rank's device, which need not be that of this rank's call or of its last one.
        """
        device = self._memory.devices.get(device_type, torch.device(device_type))
        zeros = torch.zeros(size, dtype=torch.uint8, device=device)
        failures.wait(begin_message(zeros, 0, self._group), self._group, zeros)


def agree(group: dist.ProcessGroup, call_signature: Sequence[int], device: torch.device | None = None) -> list[int]:
    """A whole :class:`Handshake`: the lengths of all chunks."""
    return Handshake(group, call_signature, device).finish()


def fail(group: dist.ProcessGroup) -> None:
    """Tells the other ranks that this one has refused its arguments."""
    with contextlib.suppress(ValueError, RuntimeError):
        agree(group, [1, *(0 for _ in FIELDS[1:])])


def float_bits(value: float) -> int:
    """A number as the integer with the same bits."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _field(call: Call, name: str) -> list[int]:
    return [one[FIELDS.index(name)] for one in call]


def _compare(call: Call) -> None:
    failed = _field(call, "failed")
    if any(failed):
        raise ValueError(f"rank {failed.index(1)} refused its own arguments; its error says why")
    for name, *values in zip(FIELDS, *call, strict=True):
        if name == "length" or len(set(values)) == 1:
            continue
        other = next(rank for rank, value in enumerate(values) if value != values[0])
        raise ValueError(
            f"{name}: expected the same on every rank, got {_shown(name, values[0])} on rank 0 and {_shown(name, values[other])} on rank {other}"
        )


def _check_lengths(call: Call) -> None:
    """Refuses chunks that are too long together, or a mask of another length."""
    lengths, mask_length = _field(call, "length"), _field(call, "length of the mask")[0]
    if mask_length not in (0, sum(lengths)):
        name = "base" if _field(call, KIND)[0] == 3 else "mask"
        raise ValueError(
            f"{name}: expected one for {sum(lengths)} keys, the sum of the chunks {lengths}, got one for {mask_length}"
        )
    if sum(lengths) > checks.MAX_LENGTH:
        raise ValueError(f"query: expected chunks of at most {checks.MAX_LENGTH} positions together, got {sum(lengths)}")


def _shown(name: str, value: int) -> object:
    if name in FLOATS:
        return struct.unpack("<d", struct.pack("<q", value))[0]
    if name in ("dtype", "scores' dtype"):
        return "none" if value < 0 else str(DTYPES[value]).removeprefix("torch.")
    return value


def in_one_order(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether handshakes and messages of a device go over one backend, which then takes them in the same order on all ranks."""
    if device.type == "cpu":
        return True
    shared: bool = group._get_backend(device) is host_group(group)._get_backend(torch.device("cpu"))
    return shared
