"""What every rank has to give alike and hosts do not compare, because it lies on the device or in a compiled graph.

After the handshake, and before rows of keys travel, ranks exchange digests of these values. A difference is an error on every rank. On a GPU
the host does not wait for the comparison; the device raises the error. ``DMATTN_COMPARE_RANKS=0`` in the environment leaves it out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from dmattn import checks
from dmattn.distributed import exchange, failures, needs
from dmattn.distributed.chunks import Chunks, all_gather_flat
from dmattn.masks import IntervalMask

VARIABLE = "DMATTN_COMPARE_RANKS"

exchange.library.define(
    "digests(Tensor own, Tensor after, SymInt[] lengths, str group, SymInt[]? call_signature) -> (Tensor, Tensor)"
)


def compare(
    given: dict[str, IntervalMask | Tensor | float], after: Tensor, chunks: Chunks, call_signature: Sequence[int] | None
) -> tuple[Tensor, bool]:
    """Refuses values that differ between ranks.

    Args:
        given: masks, tensors of integers, and numbers, by the names of their arguments; every rank gives the same names.
        after: a tensor; what uses the copy that is returned runs after the exchange.
        call_signature: what ranks still have to compare on their hosts.

    Returns:
        (a copy of after, whether the call signature has been compared).

    Raises:
        ValueError: a value differs, where the digests can be read. Elsewhere the device or the graph raises it, as a RuntimeError.
    """
    if not given or os.environ.get(VARIABLE, "1") == "0":
        return after, False
    own = torch.stack([_digest(value, after.device) for value in given.values()])
    everyone, after = torch.ops.dmattn_distributed.digests(own, after, chunks.lengths, chunks.group, call_signature)
    same = (everyone == everyone[0]).all(0)
    is_known = checks.values_are_known(same)
    for place, name in enumerate(given):
        message = f"{name}: expected the same values on every rank, got different ones"
        if not is_known:
            torch.ops.aten._assert_async.msg(same[place], f"dmattn: {message}")
        elif not bool(same[place]):
            raise ValueError(message)
    return after, True


def _digest(value: IntervalMask | Tensor | float, device: torch.device) -> Tensor:
    """int64 []: a number that two different values seldom share."""
    if isinstance(value, IntervalMask):
        return needs.digest(value)
    if isinstance(value, Tensor):
        return needs.weighed(value.to(device))
    return torch.full((1,), value, dtype=torch.float64, device=device).view(torch.int64)[0]


def _digests(
    own: Tensor, after: Tensor, lengths: Sequence[int], group: str, call_signature: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """[n] of every rank -> [ranks, n]."""
    ranks = exchange.group_named(group)
    exchange.agreed(ranks, call_signature, lengths)
    received = own.new_empty(len(lengths) * own.numel())
    failures.wait(all_gather_flat(received, own, ranks), ranks, received)
    return received.view(len(lengths), -1), after.clone()


exchange.implement("digests", _digests)


@torch.library.register_fake("dmattn_distributed::digests", lib=exchange.library)
def _(own: Tensor, after: Tensor, lengths: Sequence[int], *_: object) -> tuple[Tensor, Tensor]:
    return own.new_empty(len(lengths), own.shape[0]), torch.empty_like(after)
