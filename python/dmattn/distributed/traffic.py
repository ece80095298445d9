"""Counts the bytes that ranks exchange: what :func:`record_traffic` gives."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass
class Traffic:
    """Bytes that this rank has received from other ranks.

    Attributes:
        scores: of scores, which select keys. Where there are two ranks, scores travel with the rows and count as such.
        rows: of rows of key, value and key_bias in forward.
        gradients: of gradients of such rows in backward.
    """

    scores: int = 0
    rows: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        """Bytes of all three."""
        return self.scores + self.rows + self.gradients


_listeners: list[Traffic] = []


@contextlib.contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Counts what :func:`context_parallel_attention` receives on this rank, forward and backward, compiled or not, while the context is open.

    The few hundred bytes by which ranks compare their arguments are not counted. ``as`` gives a :class:`Traffic`, in bytes, which grows
    while the context is open.
    """
    traffic = Traffic()
    _listeners.append(traffic)
    try:
        yield traffic
    finally:
        _listeners[:] = [listener for listener in _listeners if listener is not traffic]


def count(kind: str, received: int) -> None:
    for listener in _listeners:
        setattr(listener, kind, getattr(listener, kind) + received)
