"""Serves prompts by continuous batching in one pool of pages: sequences join, answer, are preempted where pages run out, and leave.

``python examples/serve_paged.py`` sends random prompts to a small untrained transformer whose layers share the pool; an eviction policy bounds
what each of them holds. All sequences that answer take a byte in one call. Where the next call needs more pages than are free, the
latest sequence goes to the CPU, and comes back when there are enough. ``--check`` compares every answer with what its prompt gives alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time

import torch
import torch.nn.functional as F
from dmattn import eviction
from dmattn.nn import rotate
from torch import Tensor, nn

BYTES = 256
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


class Layer(nn.Module):
    """Attention over a cache, and a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor, positions: Tensor, cache: eviction.PagedCache, names: list[int]) -> Tensor:
        """hidden [B, T, width] at positions [B, T] -> the same shape; the cache takes the tokens in."""
        heads = self.qkv(F.rms_norm(hidden, hidden.shape[2:])).unflatten(2, (-1, HEAD_DIM)).transpose(1, 2)
        query, key, value = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
        query, key = (rotate(x, 10000.0, positions) for x in (query, key))
        hidden = hidden + self.out(cache.attend(names, query, key, value).transpose(1, 2).flatten(2))
        return hidden + self.down(F.silu(self.up(F.rms_norm(hidden, hidden.shape[2:]))))


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, tokens: Tensor, caches: list[eviction.PagedCache], names: list[int]) -> Tensor:
        """tokens [B, T] of the sequences with these names -> logits [B, BYTES] behind the last one."""
        first = torch.tensor([caches[0].length(name) for name in names], device=tokens.device)
        positions = first[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer(hidden, positions, cache, names)
        logits: Tensor = self.head(F.rms_norm(hidden[:, -1], hidden.shape[2:]))
        return logits


@dataclasses.dataclass
class Request:
    """A prompt, and what was answered so far."""

    name: int
    prompt: bytes
    count: int  # bytes of the answer
    answer: list[int] = dataclasses.field(default_factory=list)


class Server:
    """Sequences that run, those that were preempted, and the pool that they share."""

    def __init__(self, model: Model, policy: eviction.Policy, pages: int, rows: int, device: str) -> None:
        self.model, self.rows, self.device = model, rows, device
        dtype = model.head.weight.dtype
        self.pool = eviction.PagePool(pages, 16, HEAD_DIM, dtype=dtype, device=device)
        self.caches = [eviction.PagedCache(policy, self.pool, HEADS, KV_HEADS) for _ in model.layers]
        if sum(cache.most_pages for cache in self.caches) > pages:
            raise SystemExit(
                f"--pages: expected at least {sum(cache.most_pages for cache in self.caches)}, what one sequence may need"
            )
        self.running: list[Request] = []
        self.preempted: list[Request] = []
        self.preemptions = 0

    def fits(self, names: list[int], tokens: int) -> bool:
        """Whether all layers can take so many tokens of each of these sequences in."""
        return sum(cache.pages_needed(names, tokens) for cache in self.caches) <= len(self.pool.free)

    def admit(self, waiting: list[Request]) -> None:
        """Sequences that were preempted come back, and then new ones join: their prompts are read at once."""
        while self.preempted and len(self.running) < self.rows and self.fits([self.preempted[0].name], 0):
            request = self.preempted.pop(0)
            for cache in self.caches:
                cache.swap_in(request.name)
            self.running.append(request)
        while waiting and not self.preempted and len(self.running) < self.rows:
            request = waiting[0]
            for cache in self.caches:
                cache.join(request.name)
            if not self.fits([request.name], len(request.prompt)):
                for cache in self.caches:
                    cache.leave(request.name)
                break
            self.running.append(waiting.pop(0))
            self.take_in([request], torch.tensor([list(request.prompt)], device=self.device))

    def step(self) -> None:
        """One byte of every sequence that runs."""
        while not self.fits([request.name for request in self.running], 1):
            request = self.running.pop()
            for cache in self.caches:
                cache.swap_out(request.name)
            self.preempted.insert(0, request)
            self.preemptions += 1
        self.take_in(self.running[:], torch.tensor([request.answer[-1:] for request in self.running], device=self.device))

    @torch.inference_mode()
    def take_in(self, requests: list[Request], tokens: Tensor) -> None:
        """Takes tokens [B, T] in, and appends the likeliest next byte of each sequence to its answer; who has answered leaves."""
        best = self.model(tokens, self.caches, [request.name for request in requests]).argmax(-1).tolist()
        for request, byte in zip(requests, best, strict=True):
            request.answer.append(byte)
            if len(request.answer) == request.count:
                self.running.remove(request)
                for cache in self.caches:
                    cache.leave(request.name)


def serve(server: Server, requests: list[Request]) -> None:
    """Answers all requests."""
    waiting = list(requests)
    while waiting or server.running or server.preempted:
        server.admit(waiting)
        if server.running:
            server.step()


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    rng = random.Random(0)
    model = Model(options.layers, 64).to(options.device, torch.bfloat16 if options.device == "cuda" else None).eval()
    policy = eviction.H2O(options.budget, every=8, local=8)
    requests = [
        Request(name, rng.randbytes(rng.randint(1, options.longest)), rng.randint(1, options.longest))
        for name in range(options.requests)
    ]
    server = Server(model, policy, options.pages, options.rows, options.device)
    began = time.perf_counter()
    serve(server, requests)
    seconds, count = time.perf_counter() - began, sum(len(request.answer) for request in requests)
    print(
        f"{len(requests)} answers, {count} bytes in {seconds:.1f} s; {server.preemptions} times a sequence was preempted;",
        end=" ",
    )
    print(f"{len(server.pool.free)} of {options.pages} pages are free, {server.pool.nbytes / 1024:.0f} kB at every length")
    if options.check:
        for request in requests:
            alone = Request(request.name, request.prompt, request.count)
            serve(server, [alone])
            if alone.answer != request.answer:
                raise SystemExit(f"request {request.name}: answered {request.answer} in the batch, and {alone.answer} alone")
        print("every answer is what its prompt gives alone")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100, help="number of prompts (default 100)")
    parser.add_argument("--rows", type=int, default=16, help="sequences that run side by side at most (default 16)")
    parser.add_argument("--pages", type=int, default=96, help="pages of 16 slots in the pool (default 96)")
    parser.add_argument("--budget", type=int, default=24, help="keys that a head keeps (default 24)")
    parser.add_argument("--longest", type=int, default=60, help="bytes of a prompt and of an answer, at most (default 60)")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model (default 2)")
    parser.add_argument("--quick", dest="requests", action="store_const", const=8, help="--requests 8: does it run")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--check", action="store_true", help="compare every answer with that of its prompt alone")
    options = parser.parse_args()
    for name in ("requests", "rows", "pages", "budget", "longest", "layers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(options, name)}")
    return options


if __name__ == "__main__":
    main()
