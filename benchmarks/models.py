"""Times forward and backward of transformers models with dmattn's selection vs. transformers' own attention: ``python benchmarks/models.py
--model doge`` (sizes of Doge-320M) or ``deepseek_v32`` (attention and indexer of DeepSeek-V3.2's sizes with an eighth of its heads, dense MLPs).

Random weights, bfloat16, one sequence. Transformers' attention makes masks of [B, H, S, S] or [B, 1, S, S], and its indexer scores of all pairs;
lengths grow until it does not fit. Nothing is timed before the logits of both were compared with those of eager attention in float32. Writes
JSON with --output.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from dmattn_bench.records import Row, provenance
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import transformers
from dmattn.integrations.transformers import enable_dynamic_mask_attention, enable_index_top_k
from dmattn_bench.rows import to_json
from transformers import DogeConfig, DogeForCausalLM

HEAD_DIM = 128
# Of the comparison before anything is timed: long enough for a selection, short enough for a CPU.
CHECKED_LENGTH, CHECKED_WINDOW, CHECKED_LAYERS = 300, 64, 2


def doge(layers: int, window: int, options: argparse.Namespace) -> DogeForCausalLM:
    """A is not 0, as a fresh one's is, so that scores scatter the selected keys."""
    config = DogeConfig(
        vocab_size=options.vocabulary, hidden_size=options.width, intermediate_size=2 * options.width, num_hidden_layers=layers,
        num_attention_heads=options.width // HEAD_DIM, num_key_value_heads=max(1, options.width // HEAD_DIM // 2), keep_window_size=window,
        max_position_embeddings=max(options.lengths), initializer_range=0.05,
    )  # fmt: skip
    model = DogeForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.A)
    return model


def deepseek_v32(layers: int, window: int, options: argparse.Namespace) -> Any:
    heads = options.width // HEAD_DIM
    config = transformers.DeepseekV32Config(
        vocab_size=options.vocabulary, hidden_size=options.width, intermediate_size=2 * options.width, num_hidden_layers=layers,
        first_k_dense_replace=layers, num_attention_heads=heads, num_key_value_heads=heads, q_lora_rank=1536, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, index_n_heads=64, index_head_dim=128, index_topk=window,
        max_position_embeddings=max(options.lengths), initializer_range=0.05,
    )  # fmt: skip
    return transformers.DeepseekV32ForCausalLM(config)


@dataclasses.dataclass(frozen=True)
class Family:
    """How models of one kind are made, and what they are timed with."""

    build: Callable[[int, int, argparse.Namespace], Any]  # layers, keys that a query sees, options
    enable: Callable[[Any], Any]
    peers: tuple[str, ...]  # implementations of attention
    width: int
    layers: tuple[int, ...]  # that are timed on a GPU


FAMILIES = {
    "doge": Family(doge, enable_dynamic_mask_attention, ("eager",), 1024, (32, 1)),
    "deepseek_v32": Family(deepseek_v32, enable_index_top_k, ("sdpa", "eager"), 2048, (2,)),
}


def built(name: str, layers: int, window: int, options: argparse.Namespace, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model with random weights, the same for all names: "dmattn" or an implementation of transformers."""
    family = FAMILIES[options.model]
    torch.manual_seed(0)
    with torch.device(options.device):
        model = family.build(layers, window, options).to(torch.bfloat16).to(dtype)
    model.set_attn_implementation("eager" if name == "dmattn" else name)
    return family.enable(model) if name == "dmattn" else model


def tokens_of(length: int, options: argparse.Namespace) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, options.vocabulary, (1, length), generator=generator).to(options.device)


def compare(options: argparse.Namespace) -> None:
    """Refuses unless dmattn's logits are about as near to those of eager attention in float32 as those of eager attention in bfloat16 are."""
    tokens = tokens_of(CHECKED_LENGTH, options)
    logits = []
    for name, dtype in (("eager", torch.float32), ("eager", torch.bfloat16), ("dmattn", torch.bfloat16)):
        with torch.no_grad():
            logits.append(built(name, CHECKED_LAYERS, CHECKED_WINDOW, options, dtype)(input_ids=tokens).logits.float())
    truth, eager, ours = logits
    errors = [(given - truth).square().mean().sqrt().item() for given in (eager, ours)]
    print(f"rms error of logits: eager {errors[0]:.2e}, dmattn {errors[1]:.2e}", flush=True)
    if not errors[1] <= 2 * errors[0]:
        sys.exit("refused: dmattn's logits are more than twice as far from float32 as those of eager attention")


def measured(name: str, layers: int, length: int, options: argparse.Namespace) -> Row:
    """Milliseconds of forward and backward, and the peak memory of both; or that they do not fit."""
    row: Row = {"name": name, "layers": layers, "length": length, "window": options.window}
    is_cuda = options.device == "cuda"

    def clock() -> float:
        if is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    try:
        model = built(name, layers, options.window, options).train()
        tokens = tokens_of(length, options)
        taken = []
        for turn in range(1 + options.repeats):
            if turn == 1 and is_cuda:
                torch.cuda.reset_peak_memory_stats()
            began = clock()
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            between = clock()
            loss.backward()
            taken.append((between - began, clock() - between))
            model.zero_grad()
    except torch.cuda.OutOfMemoryError:
        row["out_of_memory"] = True
        return row
    forward, backward = (statistics.median(times) * 1e3 for times in zip(*taken[1:], strict=True))
    row |= {"forward_ms": forward, "backward_ms": backward}
    if is_cuda:
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(FAMILIES), default="doge")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--lengths", type=int, nargs="+", help="growing; default 2048 to 32768 on CUDA, 512 and 1024 on a CPU")
    parser.add_argument(
        "--layers", type=int, nargs="+", help="numbers of layers; default 32 and 1 on CUDA (2 of deepseek_v32), 1 on a CPU"
    )
    parser.add_argument("--width", type=int, help="default 1024, 2048 of deepseek_v32")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    is_cuda, family = options.device == "cuda", FAMILIES[options.model]
    options.lengths = options.lengths or ([2048, 4096, 8192, 16_384, 32_768] if is_cuda else [512, 1024])
    options.layers = options.layers or (family.layers if is_cuda else [1])
    options.width = options.width or family.width
    transformers.logging.set_verbosity_error()
    compare(options)
    facts = {
        **provenance(options.device),
        "transformers": transformers.__version__,
        "model": options.model,
        "width": options.width,
    }
    rows: list[Row] = []
    for layers in options.layers:
        for name in ("dmattn", *family.peers):
            for length in options.lengths:
                rows.append(measured(name, layers, length, options))
                print(
                    "  ".join(f"{key} {x:.1f}" if isinstance(x, float) else f"{key} {x}" for key, x in rows[-1].items()),
                    flush=True,
                )
                if options.output:  # after each row, since a long run may be cut off
                    options.output.parent.mkdir(parents=True, exist_ok=True)
                    options.output.write_text(to_json({**facts, "rows": rows}))
                gc.collect()  # models refer to themselves
                if is_cuda:
                    torch.cuda.empty_cache()
                if "out_of_memory" in rows[-1]:
                    break


if __name__ == "__main__":
    main()
