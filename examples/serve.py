"""Serves several prompts at once with continuous batching: a row that has finished its answer takes the next prompt at once.

``python examples/serve.py --weights demo-output/weights.pt`` answers with the model that the demo trained; without weights the model is an
untrained one, and what it writes means nothing. A call takes one byte of every row that is answering and up to ``--chunk`` bytes of every row
that still reads its prompt. Memory is the same however long prompts and answers are. ``--check`` compares every answer with what the same prompt
gives alone. In half precision rounding may decide between two bytes that are about as likely; in float32 it hardly ever does.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

import torch
from model import ByteModel
from tqdm import tqdm

SEED = 0
PROMPTS = (
    b"The statement ", b"If the object is ", b"A function can ", b"Names refer to ", b"The class ", b"When an exception is raised, ",
    b"Lists and tuples are ", b"An iterator ", b"Modules are ", b"The import system ", b"Strings ", b"The return value of a call is ",
)  # fmt: skip


@dataclasses.dataclass
class Request:
    """A prompt, and what was answered so far."""

    prompt: bytes
    read: int = 0  # bytes of the prompt that the caches have taken in
    answer: list[int] = dataclasses.field(default_factory=list)

    def next_bytes(self, most: int) -> bytes:
        """What the caches take in next: a part of the prompt, or the latest byte of the answer."""
        return self.prompt[self.read : self.read + most] or bytes(self.answer[-1:])


class Server:
    """A batch whose rows are at different places of different requests."""

    def __init__(self, model: ByteModel, rows: int, chunk: int, count: int) -> None:
        self.model, self.chunk, self.count = model, chunk, count
        self.device = model.head.weight.device
        self.caches = model.new_caches(rows)
        self.rows: list[Request | None] = [None] * rows

    @property
    def is_busy(self) -> bool:
        return any(request is not None for request in self.rows)

    def take(self, waiting: list[Request]) -> None:
        """Gives rows that are free to the requests that wait, the first first; what such a row held before is forgotten."""
        fresh = []
        for row, request in enumerate(self.rows):
            if request is None and waiting:
                self.rows[row] = waiting.pop(0)
                fresh.append(row)
        if fresh:
            for cache in self.caches:
                cache.reset(fresh)

    @torch.inference_mode()
    def step(self) -> int:
        """One call of the model for all rows. Returns how many bytes were answered."""
        parts = [b"" if request is None else request.next_bytes(self.chunk) for request in self.rows]
        # Write the parts side by side. Only `lengths` of the numbers are real; rows that wait have none.
        longest = max(map(len, parts))
        tokens = torch.tensor([list(part) + [0] * (longest - len(part)) for part in parts], device=self.device)
        lengths = torch.tensor([len(part) for part in parts], dtype=torch.int32, device=self.device)
        logits = self.model.generate(tokens, self.caches, lengths)
        # The last real number of each row predicts the next byte; of a prompt only where all of it has been read.
        last = (lengths.long() - 1).clamp(min=0)
        best = logits[torch.arange(len(parts), device=self.device), last].argmax(-1).tolist()
        answered = 0
        for row, request in enumerate(self.rows):
            if request is None:
                continue
            request.read = min(request.read + len(parts[row]), len(request.prompt))
            if request.read < len(request.prompt):
                continue
            request.answer.append(best[row])
            answered += 1
            if len(request.answer) == self.count:
                self.rows[row] = None
        return answered


def serve(model: ByteModel, prompts: tuple[bytes, ...], rows: int, chunk: int, count: int) -> list[bytes]:
    """The answers, each of ``count`` bytes, the most likely one at every place."""
    requests = [Request(prompt) for prompt in prompts]
    waiting, server = list(requests), Server(model, rows, chunk, count)
    with tqdm(total=count * len(prompts), unit="B", desc=f"{len(prompts)} prompts in {rows} rows", disable=None) as bar:
        while waiting or server.is_busy:
            server.take(waiting)
            bar.update(server.step())
    return [bytes(request.answer) for request in requests]


def main() -> None:
    options = parse()
    torch.manual_seed(SEED)
    model = ByteModel(2, 64, 4, 2, 48, 16) if options.weights is None else ByteModel.load(options.weights)
    model = model.to(options.device, torch.bfloat16 if options.device == "cuda" else None).eval()
    prompts = tuple(PROMPTS[i % len(PROMPTS)] * (1 + 2 * (i % 3)) for i in range(options.prompts))
    began = time.perf_counter()
    answers = serve(model, prompts, options.rows, options.chunk, options.bytes)
    seconds = time.perf_counter() - began
    for prompt, answer in list(zip(prompts, answers, strict=True))[: options.show]:
        print(f"  {prompt!r} -> {answer!r}")
    held = sum(cache.nbytes for cache in model.new_caches(options.rows))
    print(
        f"{len(answers)} answers of {options.bytes} bytes in {seconds:.1f} s, {len(answers) * options.bytes / seconds:.0f} bytes/s;",
        end=" ",
    )
    print(f"caches of {options.rows} rows: {held / 1024:.0f} kB at every length")
    if options.check:
        for prompt, answer in zip(prompts, answers, strict=True):
            (alone,) = serve(model, (prompt,), 1, len(prompt), options.bytes)
            if answer != alone:
                raise SystemExit(f"{prompt!r}: answered {answer!r} in the batch, and {alone!r} alone")
        print("every answer is what its prompt gives alone")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, help="weights.pt of the demo; default: an untrained model")
    parser.add_argument("--prompts", type=int, default=12, help="number of prompts (default 12)")
    parser.add_argument("--rows", type=int, default=4, help="sequences in a batch (default 4)")
    parser.add_argument("--chunk", type=int, default=16, help="bytes of a prompt that a call reads at most (default 16)")
    parser.add_argument("--bytes", type=int, default=120, help="bytes of an answer (default 120)")
    parser.add_argument("--quick", dest="bytes", action="store_const", const=8, help="--bytes 8: does it run")
    parser.add_argument("--show", type=int, default=4, help="answers that are printed (default 4)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--check", action="store_true", help="compare every answer with that of its prompt alone")
    options = parser.parse_args()
    for name in ("prompts", "rows", "chunk", "bytes"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(options, name)}")
    return options


if __name__ == "__main__":
    main()
