"""The text the demo learns: the topics of Python's own help, or a file of yours, as a tensor of bytes."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 0.1  # the last tenth of the text is never trained on


def read_text(path: Path | None, smallest: int) -> tuple[str, bytes]:
    """(what it is, its bytes).

    Raises:
        SystemExit: the file cannot be read or is shorter than ``smallest`` bytes; the message says which.
    """
    if path is None:
        return "the topics of Python's help()", "\n\n".join(pydoc_data.topics.topics.values()).encode()
    try:
        text = path.read_bytes()
    except OSError as error:
        raise SystemExit(f"--text {path}: cannot be read ({error.strerror or error})") from None
    if len(text) < smallest:
        raise SystemExit(f"--text {path}: expected at least {smallest:,} bytes of text, got {len(text):,}")
    return str(path), text


def split(text: bytes) -> tuple[Tensor, Tensor]:
    """(train, held out), uint8."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = int(len(data) * (1 - HELD_OUT))
    return data[:cut], data[cut:]


def sample(data: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """``batch`` random stretches of ``length`` bytes, int64 [batch, length]."""
    starts = torch.randint(0, len(data) - length + 1, (batch,), generator=generator)
    return data[starts[:, None] + torch.arange(length)].long()


def tiled(data: Tensor, length: int) -> Tensor:
    """The first ``length`` bytes, int64 [1, length]; a text that is too short is repeated."""
    return data.repeat(-(-length // len(data)))[:length].long()[None]
