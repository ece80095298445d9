"""A program for torchrun: trains with a checkpoint after every step, and is killed once in the middle of an exchange, if asked to.

Arguments: a folder for checkpoints, a file for the losses, the step that is killed or -1.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dmattn.distributed import context_parallel_attention
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

STEPS, LENGTH, WIDTH = 6, 24, 16


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = torch.nn.Linear(WIDTH, 3 * WIDTH + 2, dtype=torch.float64)
        self.outputs = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        *rows, scores = self.inputs(hidden).split([WIDTH, WIDTH, WIDTH, 2], dim=-1)
        query, key, value = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in rows)
        out = context_parallel_attention(query, key, value, scores=scores.transpose(1, 2), window=6, local=2)
        mixed: torch.Tensor = self.outputs(out.transpose(1, 2).flatten(2))
        return mixed


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, output: Path, killed_step: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    state = {"step": torch.zeros((), dtype=torch.int64)}
    done = sorted(int(path.parent.name) for path in folder.glob("*/.metadata"))
    if done:
        state["model"], state["optimizer"] = get_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=str(folder / str(done[-1])))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    chunk = slice(LENGTH * rank // world, LENGTH * (rank + 1) // world)
    for step in range(int(state["step"]), STEPS):
        generator = torch.Generator().manual_seed(0)
        hidden, target = torch.randn(2, 2, LENGTH, WIDTH, generator=generator, dtype=torch.float64)[:, :, chunk]
        dies = step == killed_step and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == world - 1
        fault = mock.patch("dmattn.distributed.exchange._begin_exchange", side_effect=_die)
        with fault if dies else contextlib.nullcontext():
            loss = (model(hidden) - target).square().sum() / target.numel() / world
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        if rank == 0:
            with output.open("a") as file:
                file.write(json.dumps([int(os.environ["TORCHELASTIC_RESTART_COUNT"]), step, loss.item()]) + "\n")
        state["step"].fill_(step + 1)
        state["model"], state["optimizer"] = get_state_dict(model, optimizer)
        dcp.save(state, checkpoint_id=str(folder / str(step + 1)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
