"""Processes that stand for the ranks of a job: started once, they run what tests send them, each its own part."""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 30.0  # seconds for which a rank waits for another one


class RankError(AssertionError):
    """What ranks raised: ``errors`` by rank, as text with the type in front."""

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in errors.items()))
        self.errors = errors


class Ranks:
    """``size`` processes with a group each of the first 1, 2, ... of them, over gloo or, on GPUs, over NCCL."""

    def __init__(self, size: int, timeout: float = TIMEOUT, device: str = "cpu") -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self._folder.name, timeout, device, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, function: str, given: list[Any]) -> list[Any]:
        """Calls ``module:function(group, *given[rank])`` on the first ``len(given)`` ranks and returns what they return.

        Raises:
            RankError: some of them raised.
        """
        for rank, arguments in enumerate(given):
            self.ask(rank, function, len(given), arguments)
        answers = [self.answer(rank) for rank in range(len(given))]
        errors = {rank: error for rank, (_, error) in enumerate(answers) if error is not None}
        if errors:
            raise RankError(errors)
        return [answer for answer, _ in answers]

    def ask(self, rank: int, function: str, world: int, arguments: Any) -> None:
        """Has one rank call ``module:function(group of the first world ranks, *arguments)``."""
        self._pipes[rank].send_bytes(pickle.dumps((function, world, arguments)))

    def answer(self, rank: int) -> tuple[Any, str | None]:
        """What a rank's call returned, and what it raised."""
        try:
            answer: tuple[Any, str | None] = pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            return None, "the process is gone"
        return answer

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def _serve(rank: int, size: int, folder: str, timeout: float, device: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    store = dist.FileStore(str(Path(folder) / "store"), size)
    wait = timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
    groups = {world: dist.new_group(list(range(world)), timeout=wait, backend=backend) for world in range(1, size + 1)}
    while True:
        try:
            name, world, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        module, function = name.split(":")
        try:
            answer, error = getattr(importlib.import_module(module), function)(groups[world], *arguments), None
        except Exception as raised:
            answer, error = None, f"{type(raised).__name__}: {raised}\n{traceback.format_exc(limit=-6)}"
        pipe.send_bytes(pickle.dumps((answer, error)))
