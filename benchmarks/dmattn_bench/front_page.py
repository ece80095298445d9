"""The README's table of six models that differ in attention alone, from the training runs in benchmarks/results.

``per-query`` is `nn.IndexedAttention.recommended`, whose convolution its runs of text have only in lines that say so, ``half local`` the
same with ``local_heads="half"``, ``per-key`` `nn.DynamicMaskAttention.recommended`, ``dense+`` the best dense model, ``sliding+`` the best
sliding window and ``hybrid`` the same with one dense layer in three. Memory of decoding is counted from the caches themselves.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from dmattn.cache import BoundedCache
from dmattn.nn import DynamicMaskAttention, IndexedAttention, IndexRecipe
from dmattn.nn.mixed_cache import MixedCache

from dmattn_bench.quality_report import NAMES, Run, latest, measured_on, model_of, prefer_layer_convolution, runs_of
from dmattn_bench.tables import markdown

MISSING = "not measured"
MODELS = tuple(dict.fromkeys(NAMES.values()))
LAYERS, WIDTH, HEADS, VISIBLE = 6, 512, 8, 512
SHORT = {"task": "text", "length": 8192, "visible": VISIBLE, "layers": LAYERS, "width": WIDTH, "steps": 2000, "seconds": 0.0}
CONVOLVED = {"layers": LAYERS, "width": WIDTH, "steps": 2000, "seconds": 0.0, "conv": 3, "conv_hidden": True}
HEADERS = {"task": "headers", "length": 8192, "visible": VISIBLE}
TOKENS_32768 = {"task": "text", "length": 32768, "kv_heads": 2}
LONG = {**TOKENS_32768, "layers": LAYERS, "width": WIDTH, "seconds": 250.0}
LARGER = {"task": "text", "length": 32768, "layers": 12, "width": 1024, "kv_heads": 4, "seconds": 1200.0}
RECALL = {"task": "mqar", "length": 2048, "visible": 256, "pairs": 16, "symbols": 64, "steps": 2500, "conv": 3}
SECRETS = {"task": "passkey", "length": 4096, "visible": 256, "steps": 2500, "conv": 3}


def bits(runs: list[Run]) -> str:
    """Mean over seeds, and the largest distance of one from it."""
    values = [run["curve"][-1]["held_bits"] for run in runs]
    mean = statistics.fmean(values)
    return f"{mean:.3f} " + (f"± {max(abs(value - mean) for value in values):.3f}" if len(values) > 1 else "(1 seed)")


def rate(runs: list[Run]) -> str:
    return f"{statistics.fmean(run['tokens_per_second'] for run in runs):,.0f}"


def right(runs: list[Run]) -> str:
    """The share that each seed got right, the best first; once if it is the same for all."""
    shares = sorted((run["curve"][-1]["held_accuracy"] for run in runs), reverse=True)
    shown = [f"{share:.1%}" if share < 0.1 else f"{share:.0%}" for share in shares]
    seeds = "1 seed" if len(shown) == 1 else f"{len(shown)} seeds"
    return f"{shown[0]} ({seeds})" if len(set(shown)) == 1 else ", ".join(shown)


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the table: the settings of its runs, and how a cell is computed from them."""

    title: str
    settings: dict[str, Any]
    cell: Callable[[list[Run]], str]


LINES = (
    Line("8,192 tokens: bits per byte, 2,000 steps", {**SHORT, "conv": 1}, bits),
    Line("8,192 tokens, convolved: bits per byte, 2,000 steps", {**SHORT, **CONVOLVED}, bits),
    Line("32,768 tokens, convolved: bits per byte, 2,000 steps", {**CONVOLVED, **TOKENS_32768}, bits),
    Line("8,192 tokens of C++ headers, convolved: bits per byte, 2,000 steps", {**CONVOLVED, **HEADERS}, bits),
    Line("32,768 tokens: bits per byte, 250 seconds", LONG, bits),
    Line("the same, 12 layers of 1,024, 16 heads on 4, 20 minutes", LARGER, bits),
    Line("32,768 tokens: tokens per second in training", LONG, rate),
    Line("associative recall (MQAR), 16 pairs in 2,048 tokens, 256 visible", RECALL, right),
    Line("passkey retrieval, 4 in 4,096 bytes, 256 visible", SECRETS, right),
)


def table(results: Path) -> str:
    """Markdown: a line for each measure, a column for each model, and what it was measured on."""
    runs = [run for run in runs_of(results) if run["complete"] and model_of(run)]
    lines, used = [], []
    for line in LINES:
        chosen = latest(prefer_layer_convolution([run for run in runs if line.settings.items() <= run["settings"].items()]))
        of_each = [[run for run in chosen if model_of(run) == model] for model in MODELS]
        lines.append([line.title, *(line.cell(found) if found else MISSING for found in of_each)])
        used += chosen
    lines[7:7] = [decode_memory(length) for length in (8192, 131_072)]
    return markdown(["", *MODELS], lines, texts=1) + "\n\n" + measured_on(used, with_commits=False)


def decode_memory(length: int) -> list[str]:
    """The line of keys, values and what else the caches of all layers hold after as many tokens of one sequence, bfloat16."""
    layer = DynamicMaskAttention.recommended(WIDTH, HEADS, VISIBLE).to(torch.bfloat16)
    local, half, size = layer.local, HEADS // 2, WIDTH // HEADS
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    sliding = MixedCache(*(BoundedCache(1, half, 0, size, local=keys, **options) for keys in (local, 2 * VISIBLE - local)))
    everything = 2 * HEADS * length * size * 2
    with torch.device("meta"):
        lists = [
            IndexedAttention.recommended(WIDTH, HEADS, VISIBLE, recipe=recipe).to(torch.bfloat16).new_cache(1, length)
            for recipe in (IndexRecipe(), IndexRecipe(local_heads="half"))
        ]
    every, half_local, bounded, window = (held(cache) for cache in (*lists, layer.new_cache(1), sliding))
    totals = [
        LAYERS * every,
        LAYERS * half_local,
        LAYERS * bounded,
        LAYERS * everything,
        (LAYERS * everything + 2 * LAYERS * window) // 3,
        LAYERS * window,
    ]
    return [f"decode memory after {length:,} tokens", *(f"{found / 1e6:,.1f} MB" for found in totals)]


def held(cache: torch.nn.Module) -> int:
    """Bytes of a cache's tensors."""
    return sum(buffer.nbytes for buffer in cache.buffers())
