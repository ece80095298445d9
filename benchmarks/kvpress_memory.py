"""Peak memory of reading a long prompt with kvpress, and with its presses on dmattn's eviction caches: ``python benchmarks/kvpress_memory.py``.

Each way runs in a process of its own on a CPU, after a short prompt that warms it up. What counts is how far the process's resident memory
grows at most, and the largest sum of the tensors that hold keys and values. A prompt comes in one call to kvpress, whose presses choose at
its end. To dmattn it comes in parts, and the press chooses behind each. The model is a small random Llama of 8 layers. Linux only.

Needs kvpress, and a version of transformers that it runs with (``cache_position`` among the arguments of attention layers: 5.2 does).
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
import transformers
from dmattn.integrations.kvpress import pressed
from dmattn_bench.records import provenance
from dmattn_bench.rows import to_json

LENGTHS = (8192, 32768)
KEPT, PART = 1024, 1024
WAYS = ("kvpress, one call", "dmattn, parts")


def model_of() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    config = transformers.LlamaConfig(vocab_size=256, num_hidden_layers=8, max_position_embeddings=1 << 17, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


def press_of(name: str, length: int) -> Any:
    return {"knorm": kvpress.KnormPress, "snapkv": kvpress.SnapKVPress}[name](1 - (KEPT + 0.5) / length)


def bytes_of(cache: Any, way: str) -> int:
    """Bytes of all tensors that a cache holds now."""
    if way == WAYS[1]:
        return sum(layer.nbytes for layer in cache.layers)
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values) if x is not None)


def read(model: Any, way: str, name: str, length: int) -> dict[str, int]:
    """Reads a prompt of so many tokens, and returns what its cache holds at most and at the end."""
    ids = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(0))
    most = 0

    def look(cache: Any) -> None:
        nonlocal most
        most = max(most, bytes_of(cache, way))

    with torch.inference_mode():
        if way == WAYS[0]:
            cache = transformers.DynamicCache()
            for layer in model.model.layers:  # before the press drops keys
                layer.self_attn.register_forward_hook(lambda *_: look(cache))
            with press_of(name, length)(model):
                model(ids, past_key_values=cache, logits_to_keep=1)
            return {"most": most, "end": bytes_of(cache, way)}
        with pressed(model, press_of(name, length), budget=KEPT, every=PART) as own:
            for first in range(0, length, PART):
                at = torch.arange(first, min(first + PART, length))[None]
                model(ids[:, at[0]], position_ids=at, past_key_values=own, logits_to_keep=1)
                look(own)
            return {"most": most, "end": bytes_of(own, way)}


def resident(field: str) -> int:
    """Resident memory of this process in kB: now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def one(way: str, name: str, length: int) -> dict[str, Any]:
    """What this process measures."""
    read(model_of(), way, name, 2 * PART)
    model = model_of()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the largest resident memory is counted from here on
    before = resident("VmRSS")
    began = time.perf_counter()
    cache = read(model, way, name, length)
    seconds, after = time.perf_counter() - began, resident("VmHWM")
    return {
        "way": way, "press": name, "length": length, "kept": KEPT, "part": PART, "cache_mb_at_most": round(cache["most"] / 1e6, 2),
        "cache_mb_at_the_end": round(cache["end"] / 1e6, 2), "process_grew_mb": round((after - before) / 1e3, 1), "seconds": round(seconds, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(**json.loads(options.one))))
        return
    rows = []
    for name in ("knorm", "snapkv"):
        for length in LENGTHS:
            for way in WAYS:
                job = json.dumps({"way": way, "name": name, "length": length})
                run = subprocess.run([sys.executable, __file__, "--one", job], capture_output=True, text=True, check=True)
                rows.append(json.loads(run.stdout.splitlines()[-1]))
                print(rows[-1], flush=True)
    if options.output:
        versions = {name: version(name) for name in ("kvpress", "transformers")}
        options.output.write_text(to_json({**provenance("cpu"), **versions, "rows": rows}))


if __name__ == "__main__":
    sys.exit(main())
