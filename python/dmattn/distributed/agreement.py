"""The handshake of a call: ranks compare the metadata of their calls, so that calls that differ are an error on every rank.

It is an all-gather between hosts, over gloo, and waits for no GPU.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from dmattn import checks
from dmattn.distributed import failures
from dmattn.distributed.chunks import all_gather_flat, host_group

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

Call = list[list[int]]  # the call_signature of every rank, in rank order


def all_gather_ints(group: dist.ProcessGroup, numbers: Sequence[int]) -> list[list[int]]:
    """The numbers of every rank, in rank order; all tell equally many.

    Raises:
        RuntimeError: a rank has failed, or does not answer within the group's timeout.
    """
    failures.check(group)
    everyone = torch.empty(dist.get_world_size(group) * len(numbers), dtype=torch.int64)
    sent = torch.tensor(numbers, dtype=torch.int64)
    failures.wait(all_gather_flat(everyone, sent, host_group(group)), group, everyone)
    by_rank: list[list[int]] = everyone.view(-1, len(numbers)).tolist()
    return by_rank


def agree(group: dist.ProcessGroup, call_signature: Sequence[int]) -> list[int]:
    """The lengths of all chunks, of ranks whose calls agree.

    Raises:
        ValueError: ranks differ, or their lengths are refused; on every rank.
        RuntimeError: as :func:`all_gather_ints`.
    """
    call: Call = all_gather_ints(group, call_signature)
    _compare(call)
    _check_lengths(call)
    return _field(call, "length")


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
    refuse_differences(FIELDS, call, but="length")


def refuse_differences(names: Iterable[str], call: Call, but: str = "") -> None:
    """Refuses numbers of ranks, called ``names``, that are not the same on all of them; the one called ``but`` may differ."""
    for name, *values in zip(names, *call, strict=True):
        if name == but or len(set(values)) == 1:
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
