"""What a generated token costs after contexts of different lengths: with bounded caches, and with caches that grow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from growing import GrowingCache
from model import ByteModel
from torch import Tensor

CHUNK = 2048


class Cost(NamedTuple):
    context: int
    bounded_bytes: int
    growing_bytes: int
    bounded_seconds: float  # of one token
    growing_seconds: float


@torch.inference_mode()
def costs(model: ByteModel, text: Tensor, contexts: tuple[int, ...], repeats: int) -> list[Cost]:
    """text [1, S] with S at least the longest context. Bounded caches read all of it, in chunks.

    Growing ones hold random numbers, because reading so many tokens takes long and a step takes the same time whatever they hold. Their memory
    is that of the tokens so far.
    """
    bounded = model.new_caches(1)
    growing = [GrowingCache(layer.attention, 1, max(contexts) + repeats + 2) for layer in model.layers]
    for cache in growing:
        cache.key.normal_(), cache.value.normal_()
    results, read, token = [], 0, text[:, -1:]
    for context in contexts:
        for first in range(read, context, CHUNK):
            model.generate(text[:, first : min(first + CHUNK, context)], bounded)
        read = context
        for cache in growing:
            cache.length = context
        nbytes = sum(cache.nbytes for cache in bounded), sum(cache.nbytes for cache in growing)
        saved = [{name: buffer.clone() for name, buffer in cache.named_buffers()} for cache in bounded]
        seconds = (
            seconds_of(lambda: model.generate(token, bounded), repeats),
            seconds_of(lambda: model.generate(token, growing), repeats),
        )
        for cache, state in zip(bounded, saved, strict=True):  # the text goes on where it was
            cache.load_state_dict(state)
        results.append(Cost(context, *nbytes, *seconds))
    return results


def seconds_of(step: Callable[[], Tensor], repeats: int) -> float:
    """The median; reading a number waits for the device."""
    samples = []
    for turn in range(repeats + 2):
        began = time.perf_counter()
        step()[0, -1, 0].item()
        if turn >= 2:
            samples.append(time.perf_counter() - began)
    return statistics.median(samples)
