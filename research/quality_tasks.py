"""What `quality.py` trains on: bytes of Python sources or C++ headers, series of sensors, associative recall, secrets in a long text."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import string
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from quality_model import Settings
from torch import Generator, Tensor

# Settings of each task, on top of the defaults. All variants of a task share them.
TASKS: dict[str, dict[str, Any]] = {
    "text": {},
    "headers": {},
    "series": {"length": 4096, "visible": 256},
    "mqar": {"length": 2048, "visible": 256, "batch": 32, "layers": 2, "width": 256, "heads": 4, "conv": 3, "steps": 3000, "lr": 1e-3,
             "weight_decay": 0.01},
    "passkey": {"length": 4096, "visible": 256, "batch": 8, "layers": 4, "width": 256, "heads": 4, "conv": 3, "steps": 3000,
                "pairs": 4, "symbols": 6, "weight_decay": 0.01},
}  # fmt: skip
STREAMS = ("text", "headers", "series")  # every token is a target, none is an answer
CHAPTER = 1 << 19  # bytes; every twentieth chapter of the corpus is held out
HELD_OUT_EVERY = 20


@dataclasses.dataclass(frozen=True)
class Batch:
    """tokens and targets (-1: none) [B, S] int64, and which targets the task is about, bool [B, S]."""

    tokens: Tensor
    targets: Tensor
    asked: Tensor


@dataclasses.dataclass(frozen=True)
class Task:
    vocabulary: int
    group: int  # so many asked targets in a row make one answer
    # A batch for "train", "held", or "near": held out, but asked soon after the statement.
    draw: Callable[[Generator, str], Batch]
    about: dict[str, Any]

    @property
    def has_answers(self) -> bool:
        return self.group > 0


def task_of(settings: Settings, device: str) -> Task:
    """Raises ValueError for an unknown task, and where a sliding window could reach a statement from its question layer by layer."""
    if settings.task not in TASKS:
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {settings.task!r}")
    reach, gap = settings.layers * settings.visible, settings.length // 4
    if settings.task not in STREAMS and reach > gap:
        raise ValueError(f"visible: expected at most length / 4 / layers = {gap // settings.layers}, got {settings.visible}")
    tasks = {"text": text, "headers": headers, "series": series, "mqar": mqar, "passkey": passkey}
    return tasks[settings.task](settings, device)


# Text ------------------------------------------------------------------------------------------------------------------------------


@functools.cache
def corpus(suffix: str = ".py", limit: int = 400_000) -> tuple[bytes, bytes, str]:
    """(training, held out, hash): the files with this suffix of the standard library and of torch, in the order of their paths.

    Files of up to `limit` bytes in the order of their paths, so that neighbours belong together, make chapters of half a million bytes.
    Every twentieth chapter is held out.
    """
    roots = [Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent]
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    chapter, filled = 0, 0
    for root in roots:
        for path in sorted(root.rglob(f"*{suffix}"), key=lambda path: path.relative_to(root).parts):
            if "site-packages" in path.relative_to(root).parts or not 1000 < path.stat().st_size <= limit:
                continue
            text = path.read_bytes()
            parts[chapter % HELD_OUT_EVERY == HELD_OUT_EVERY // 2].append(text)
            filled += len(text)
            if filled >= CHAPTER:
                chapter, filled = chapter + 1, 0
    train, held = (b"".join(part) for part in parts)
    return train, held, hashlib.sha256(train + held).hexdigest()[:12]


def corpus_on(device: str, suffix: str = ".py") -> tuple[dict[str, Tensor], dict[str, Any]]:
    train, held, digest = corpus(suffix)
    data = {"train": train, "held": held, "near": held}
    tensors = {name: torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device) for name, text in data.items()}
    return tensors, {"train_bytes": len(train), "held_bytes": len(held), "corpus": digest}


def excerpts(data: Tensor, count: int, length: int, generator: Generator) -> Tensor:
    """[count, length] int64 from random places."""
    first = torch.randint(0, len(data) - length, (count, 1), generator=generator, device=data.device)
    return data[first + torch.arange(length, device=data.device)].long()


def headers(s: Settings, device: str) -> Task:
    """The C++ headers that torch brings."""
    return text(s, device, ".h")


def text(s: Settings, device: str, suffix: str = ".py") -> Task:
    data, about = corpus_on(device, suffix)

    def draw(generator: Generator, split: str) -> Batch:
        taken = excerpts(data[split], s.batch, s.length + 1, generator)
        tokens, targets = taken[:, :-1], taken[:, 1:].contiguous()
        return Batch(tokens, targets, torch.ones_like(targets, dtype=torch.bool))

    return Task(256, 0, draw, about)


# Series ----------------------------------------------------------------------------------------------------------------------------

WAVES, MOTIF, COMINGS, NOISE = 3, 64, 8, 0.03


def series(s: Settings, device: str) -> Task:
    """What a sensor might say, in 256 levels: waves of three periods between 16 tokens and a quarter of the sequence, noise, and a motif
    of 64 tokens that comes eight times, far apart: whoever has kept its first coming can tell the others. No two sequences are alike."""
    length = s.length + 1
    room = length // COMINGS
    if room <= MOTIF:
        raise ValueError(f"length: expected more than {MOTIF * COMINGS} for {COMINGS} motifs of {MOTIF}, got {s.length}")

    def draw(generator: Generator, split: str) -> Batch:
        def random(*shape: int) -> Tensor:
            return torch.rand(s.batch, *shape, generator=generator, device=device)

        moments = torch.arange(length, device=device)
        periods = 16 * (s.length / 64) ** random(WAVES, 1)
        waves = (0.2 + 0.8 * random(WAVES, 1)) * torch.sin(2 * torch.pi * (moments / periods + random(WAVES, 1)))
        signal = waves.sum(1) / WAVES
        first = torch.arange(COMINGS, device=device) * room + (random(COMINGS) * (room - MOTIF)).long()
        places = (first[..., None] + torch.arange(MOTIF, device=device)).flatten(1)
        motif = (2 * random(MOTIF) - 1).repeat(1, COMINGS)
        signal = signal.scatter(1, places, motif)
        noise = torch.randn(s.batch, length, generator=generator, device=device)
        values = (128 + 100 * (signal + NOISE * noise)).round().clamp(0, 255).long()
        return Batch(values[:, :-1], values[:, 1:].contiguous(), torch.ones_like(values[:, 1:], dtype=torch.bool))

    return Task(256, 0, draw, {})


# Recall ----------------------------------------------------------------------------------------------------------------------------


def mqar(s: Settings, device: str) -> Task:
    """Multi-query associative recall (arXiv 2312.04927): pairs of a name and a value in the first quarter, every name once more in the
    second half, filler elsewhere. The target of a name's second coming is its value.

    Symbols: `symbols` names, as many values, as many kinds of filler. Pairs and questions stand at even positions. In a near sequence both
    are in the second half, each question next after its pair among them.
    """
    places, half = s.length // 2, s.length // 4  # two tokens a place
    if s.pairs > min(s.symbols, s.length // 8):
        raise ValueError(f"pairs: expected at most symbols={s.symbols} and length / 8 = {s.length // 8}, got {s.pairs}")

    def distinct(rows: int, count: int, among: int, generator: Generator) -> Tensor:
        return torch.rand(rows, among, generator=generator, device=device).argsort(1)[:, :count]

    def draw(generator: Generator, split: str) -> Batch:
        names = distinct(s.batch, s.pairs, s.symbols, generator)
        values = s.symbols + torch.randint(0, s.symbols, (s.batch, s.pairs), generator=generator, device=device)
        far_pairs = distinct(s.batch, s.pairs, s.length // 8, generator)
        far_questions = half + distinct(s.batch, s.pairs, places - half, generator)
        together = half + distinct(s.batch, 2 * s.pairs, places - half, generator).sort(1).values
        near_share = {"train": s.near, "held": 0.0, "near": 1.0}[split]
        is_near = torch.rand(s.batch, 1, generator=generator, device=device) < near_share
        stated = 2 * torch.where(is_near, together[:, 0::2], far_pairs)
        asked = 2 * torch.where(is_near, together[:, 1::2], far_questions)
        tokens = 2 * s.symbols + torch.randint(0, s.symbols, (s.batch, s.length), generator=generator, device=device)
        for place in (stated, asked):
            tokens.scatter_(1, place, names).scatter_(1, place + 1, values)
        targets = torch.full_like(tokens, -1).scatter_(1, asked, values)
        return Batch(tokens, targets, targets >= 0)

    return Task(3 * s.symbols, 1, draw, {"chance": 1 / s.symbols})


def passkey(s: Settings, device: str) -> Task:
    """Secrets in Python sources: `# key A is x3k9ab` in the first quarter, and all of them again, in another order, at the end.

    The targets are the letters of the secrets at the end. In a near sequence the statements stand shortly before the end.
    """
    data, about = corpus_on(device)
    letters = torch.tensor(list((string.ascii_lowercase + string.digits).encode()), device=device)
    before, after = (torch.tensor(list(part), device=device) for part in (b"\n# key ", b" is "))
    line = len(before) + 1 + len(after) + s.symbols + 1
    first_letter = len(before) + 1 + len(after)
    block = s.pairs * line
    if s.pairs > 26 or s.pairs * 2 * line > s.length // 4:
        raise ValueError(f"pairs: expected at most 26, and {line} bytes each to fit in length / 8, got {s.pairs}")

    def draw(generator: Generator, split: str) -> Batch:
        B = s.batch

        def random(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, device=device)

        names = ord("A") + random(B, 26).argsort(1)[:, : s.pairs]
        secrets = letters[(random(B, s.pairs, s.symbols) * len(letters)).long()]
        lines = torch.cat((before.expand(B, s.pairs, -1), names[..., None], after.expand(B, s.pairs, -1), secrets,
                           torch.full((B, s.pairs, 1), ord("\n"), device=device)), 2)  # fmt: skip
        order = random(B, s.pairs).argsort(1)
        again = lines.gather(1, order[..., None].expand(-1, -1, line))
        tokens = excerpts(data[split], B, s.length + 1, generator)
        # A statement begins somewhere in its own part of the first quarter; in a near sequence they follow one another before the end.
        room = s.length // 4 // s.pairs
        parts = torch.arange(s.pairs, device=device)
        far = parts * room + (random(B, s.pairs) * (room - line)).long()
        near = s.length + 1 - 2 * block - (random(B, 1) * (s.visible // 4)).long() + parts * line
        is_near = random(B, 1) < {"train": s.near, "held": 0.0, "near": 1.0}[split]
        steps = torch.arange(line, device=device)
        stated = torch.where(is_near, near, far)[..., None] + steps
        asked = s.length + 1 - block + parts[:, None] * line + steps
        tokens.scatter_(1, stated.flatten(1), lines.flatten(1)).scatter_(1, asked.flatten().expand(B, -1), again.flatten(1))
        is_letter = torch.zeros_like(tokens, dtype=torch.bool)
        is_letter[:, asked[:, first_letter : first_letter + s.symbols].flatten()] = True
        return Batch(tokens[:, :-1], tokens[:, 1:].contiguous(), is_letter[:, 1:])

    return Task(256, s.symbols, draw, {**about, "chance": 1 / len(letters)})
