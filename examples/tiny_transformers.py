"""What the examples with transformers share: a text as tokens, tiny models of bytes, and a plain training loop."""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from text import read_text, sample, split
from torch import Tensor

SEED = 0


def arguments(doc: str | None, given: list[str] | None, **others: Any) -> argparse.Namespace:
    """The options of an example: ``--quick``, and others with their defaults."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])
    parser.add_argument(
        "--quick", action="store_true", help="everything smaller, in a few seconds; what is learned means nothing"
    )
    for name, default in others.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default {default}")
    return parser.parse_args(given)


def sizes(quick: bool, **others: Any) -> dict[str, Any]:
    """Sizes of a model that reads bytes, as configs take them."""
    small, usual = (32, 64, 2), (128, 384, 4)
    width, hidden, layers = small if quick else usual
    return {
        "vocab_size": 256, "hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 1 << 20, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
        "tie_word_embeddings": True,
    } | others  # fmt: skip


def text() -> tuple[Tensor, Tensor]:
    """(train, held out): the topics of Python's help as bytes."""
    return split(read_text(None, 0)[1])


def train(
    model: transformers.PreTrainedModel,
    data: Tensor,
    steps: int,
    length: int,
    rate: float = 2e-3,
    batch: int = 8,
    before: Callable[[int], object] | None = None,
) -> float:
    """Trains on random stretches, and prints ten lines about it; ``before`` is called with each step's number. Returns seconds."""
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, pct_start=0.1)
    began = time.perf_counter()
    model.train()
    for step in range(steps):
        if before is not None:
            before(step)
        tokens = sample(data, batch, length, generator)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(f"  step {step:4d}   loss {loss.item():.3f}   {time.perf_counter() - began:5.1f} s", flush=True)
    model.eval()
    return time.perf_counter() - began


@torch.no_grad()
def bits_per_byte(model: transformers.PreTrainedModel, data: Tensor, length: int, batches: int = 2) -> float:
    """How many bits per byte of held-out text costs, in stretches of ``length``."""
    losses = []
    for number in range(batches):
        tokens = sample(data, 8, length, torch.Generator().manual_seed(number))
        losses.append(model(input_ids=tokens, labels=tokens, use_cache=False).loss.item())
    return sum(losses) / batches / math.log(2)


def written(model: transformers.PreTrainedModel, prompt: bytes, count: int, **options: Any) -> str:
    """What the model writes after a prompt, always its likeliest byte."""
    tokens = torch.tensor([list(prompt)])
    out = model.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False, **options
    )
    return bytes(out[0].tolist()).decode(errors="replace")


def in_turns(*calls: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each call, the least of several; they take turns, after one turn of warm-up."""
    turns = []
    for turn in range(repeats + 1):
        marks = [time.perf_counter()]
        for call in calls:
            call()
            marks.append(time.perf_counter())
        if turn:
            turns.append([later - earlier for earlier, later in itertools.pairwise(marks)])
    return [min(column) for column in zip(*turns, strict=True)]
