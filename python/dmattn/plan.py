"""Which kernels a call takes on a GPU, and why: ``python -m dmattn plan``, on any machine.

The decisions are those of ``cpp/cuda/host``, which ``dmattn._C`` shows; attention on a GPU makes the same ones. This module puts them into
words.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

# Compute capability, multiprocessors, and the shared memory that a block may have.
DEVICES: dict[str, dict[str, int]] = {
    "sm80": {"major": 8, "processors": 108, "shared_bytes": 163 * 1024},
    "sm86": {"major": 8, "processors": 84, "shared_bytes": 99 * 1024},
    "sm89": {"major": 8, "processors": 128, "shared_bytes": 99 * 1024},
    "sm90": {"major": 9, "processors": 132, "shared_bytes": 227 * 1024},
    "sm100": {"major": 10, "processors": 148, "shared_bytes": 227 * 1024},
    "sm120": {"major": 12, "processors": 170, "shared_bytes": 99 * 1024},
}

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}

# What the traits of an instance say (cpp/cuda/traits.h): which keys it takes, and which options and biases beside them.
KEYS = {
    "all": "all keys or causal ones",
    "intervals": "keys in order, intervals or not, no block mask",
    "range": "intervals whose keys are neighbours, from the first to the last that a tile sees",
    "in order": "keys in order; a block mask or intervals",
    "gathered": "live keys gathered from lists",
    "union": "index lists: the keys that a tile of queries lists, gathered",
    "query lists": "index lists of blocks: the queries that list a tile of keys, gathered",
    "any": "keys in order or gathered",
}
LOGITS = {"scaled": "", "dropout": "dropout", "capped": "softcap, dropout", "any": "any scale, softcap, dropout"}
BIASES = {"none": "", "key": "key_bias", "pair": "bias, key_bias", "copied": "a bias that tensor copies bring"}

SOURCES = {
    "all": "all keys in order; what the mask hides is skipped or tested",
    "block table": "the non-empty tiles of the block mask",
    "range": "in order from the first to the last key that a tile of queries sees",
    "direct": "each tile of queries looks at all keys and gathers those that it sees",
    "lists": "lists of live keys, made first, gathered row by row",
    "query lists": "keys in order, and for each tile of them the queries that list one of its blocks, made first, gathered row by row",
    "unions": "for each tile of queries the keys that some of them list, made first, gathered row by row",
    "compact": "lists of live keys, and copies of them side by side for heads that have few",
}


def forward_plan(call: Mapping[str, Any], device: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What attention forward does with a call on a GPU.

    Args:
        call: sizes ``batch``, ``heads``, ``kv_heads``, ``query_length``, ``key_length``, ``head_dim``, ``value_dim``; ``dtype``;
            ``interval_heads``, ``block_heads``, ``index_heads``, ``key_bias_heads``, ``bias_heads``: how many heads the mask or bias has,
            0 (default) where it is not given; ``index_count``, ``index_block``: entries of an index list, and keys of an entry;
            ``batches_differ``; ``is_causal``, ``is_in_order``, ``most_keys`` (how many keys a query sees at most, 0: not known),
            ``bias_dtype``, ``scale``, ``softcap``, ``dropout_p``, ``deterministic``.
        device: ``major`` of the compute capability, ``processors``, ``shared_bytes``, ``family`` ("auto", "sm80", "sm90"), ``has_sm90``
            (does the build have Hopper's kernels) and ``sizes`` (head sizes a build is trimmed to). Default: an H200.

    Raises:
        RuntimeError: no kernel takes the call; the text says why.
        ImportError: ``dmattn._C`` does not load.
    """
    return _planned("forward_plan", call, device)


def backward_plan(call: Mapping[str, Any], device: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What attention backward does; arguments and errors as in :func:`forward_plan`. All gradients are wanted."""
    return _planned("backward_plan", call, device)


def decode_plan(call: Mapping[str, Any], device: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What :func:`dmattn.decode_attention` does with a call on a GPU.

    Args:
        call: ``batch``, ``heads``, ``kv_heads``, ``query_length`` (new tokens), ``key_length`` (room in the cache), ``head_dim``,
            ``value_dim``, ``dtype``; ``takes_token``: a step of a bounded cache, which takes the new token first; ``listed_keys``: with a
            mask, the keys that a list has room for, local ones and sinks included, and ``list_heads``, heads with lists of their own.
        device: as in :func:`forward_plan`; ``has_room_for_clusters``, of which the driver decides.

    Errors as in :func:`forward_plan`.
    """
    return _planned("decode_plan", call, device)


def _planned(name: str, call: Mapping[str, Any], device: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a function of ``dmattn._C`` says, which no op needs: it may lack its package nanobind-backend."""
    planned: dict[str, Any] = getattr(importlib.import_module("dmattn._C"), name)(dict(call), dict(device or {}))
    return planned


def in_words(name: str, plan: Mapping[str, Any]) -> str:
    """A plan of forward or backward as lines of text."""
    if plan["family"] == "none":
        return f"{name}: nothing to compute, because {plan['why_family']}."
    family = "Hopper's kernels (sm90)" if plan["family"] == "sm90" else "the portable kernels (sm80)"
    lines = [f"{name}: {family}, because {plan['why_family']}."]
    for kernel in plan["kernels"]:
        lines.append(
            f"  kernel     {kernel['kernel']}, {kernel['traits']} for heads up to {kernel['size']}: {abilities(kernel['traits'])}"
        )
        lines.append(f"  tile       {kernel['rows']} rows by {kernel['keys']} keys")
    lines.append(f"  keys       {SOURCES[plan['keys']]}" + (f", because {plan['why_keys']}" if plan["why_keys"] else ""))
    if plan.get("adds_zero_bias"):
        lines.append("  bias       zeros are added, because only the kernels with a bias take this scale or softcap")
    if plan["family"] == "sm90" and "parts" in plan:
        batches, kv_heads, heads = plan["parts"]
        lines.append(f"  launches   of up to {batches} batches and {heads} query heads, in parts of {kv_heads} kv heads")
    regions = sorted(plan["workspace"]["regions"].items(), key=lambda region: -region[1][1])
    pieces = ", ".join(f"{region} {in_bytes(size)}" for region, (_, size) in regions)
    lines.append(f"  workspace  {in_bytes(plan['workspace']['bytes'])}" + (f": {pieces}" if pieces else ""))
    return "\n".join(lines)


def decode_in_words(plan: Mapping[str, Any]) -> str:
    """A plan of decoding as lines of text."""
    if plan["kernel"] == "none":
        return "decode: nothing to compute, because there are no queries."
    if plan["is_cluster"]:
        merged = f"a cluster of {plan['parts']} blocks a sequence and key head adds up its parts"
    elif plan["parts"] > 1:
        merged = f"{plan['parts']} blocks a sequence and key head, whose parts a second kernel adds up"
    else:
        merged = "one block a sequence and key head"
    return "\n".join((
        "decode: the portable kernels (sm80), which are the only ones.",
        f"  kernel     {plan['kernel']}, {plan['rows']}, for heads up to {plan['size']}",
        f"  keys       splits of {plan['split_keys']} keys, {plan['block_splits']} to a block; {merged}",
        f"  workspace  {in_bytes(plan['workspace']['bytes'])}",
    ))  # fmt: skip


def abilities(traits: str) -> str:
    """What an instance with such traits, like "gathered/scaled/key", takes."""
    keys, logits, bias = traits.split("/")
    return "; ".join(filter(None, (KEYS[keys], LOGITS[logits], BIASES[bias])))


def in_bytes(count: int) -> str:
    """A number of bytes, short."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def described(arguments: argparse.Namespace) -> dict[str, Any]:
    """The call that the command line describes."""
    heads, kv_heads = arguments.heads, arguments.kv_heads or arguments.heads
    queries = arguments.queries or arguments.length
    call = {name: getattr(arguments, name) for name in ("batch", "head_dim", "softcap", "deterministic")}
    call["dtype"] = DTYPES[arguments.dtype]
    call |= {"heads": heads, "kv_heads": kv_heads, "query_length": queries, "key_length": arguments.length}
    call |= {"value_dim": arguments.value_dim or arguments.head_dim, "is_causal": not arguments.not_causal}
    call |= {"dropout_p": arguments.dropout, "scale": arguments.scale or arguments.head_dim**-0.5}
    if arguments.window:  # a dynamic mask: scores of each kv head select keys and are added to their logits
        call |= {"interval_heads": kv_heads, "key_bias_heads": kv_heads, "most_keys": arguments.window}
    if arguments.documents:
        call |= {"interval_heads": 1, "is_in_order": True}
    call |= {"bias_heads": heads} if arguments.bias else {}
    call |= {"key_bias_heads": kv_heads} if arguments.key_bias else {}
    call |= {"block_heads": 1} if arguments.block_mask else {}
    if arguments.index_keys:
        block = arguments.index_block
        call |= {"index_heads": kv_heads, "index_count": -(-arguments.index_keys // block), "index_block": block}
    return call


def add_parser(subparsers: Any) -> None:
    """Adds ``plan`` to the commands of ``python -m dmattn``."""
    parser = subparsers.add_parser(
        "plan", help="which kernels a call takes on a GPU, and why", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--batch", type=int, default=1)
    add("--heads", type=int, default=32)
    add("--kv-heads", type=int, default=0, help="0: as many as heads")
    add("--head-dim", type=int, default=128)
    add("--value-dim", type=int, default=0, help="0: as large as head-dim")
    add("--length", type=int, default=8192, help="keys, and queries unless --queries says otherwise")
    add("--queries", type=int, default=0)
    add("--dtype", choices=tuple(DTYPES), default="bf16")
    add("--window", type=int, default=0, help="a dynamic mask of so many keys; 0: none")
    add("--documents", action="store_true", help="packed documents")
    add("--block-mask", action="store_true")
    add("--index-keys", type=int, default=0, help="an index mask: every query lists so many keys; 0: none")
    add("--index-block", type=int, default=1, help="keys of an entry of its lists")
    add("--not-causal", action="store_true")
    add("--bias", action="store_true", help="a bias [B, H, Sq, Sk]")
    add("--key-bias", action="store_true", help="a key_bias [B, Hkv, Sk]; a dynamic mask has one")
    add("--scale", type=float, default=0.0, help="0: 1 / sqrt(head-dim)")
    add("--softcap", type=float, default=0.0)
    add("--dropout", type=float, default=0.0)
    add("--deterministic", action="store_true")
    add("--decode", action="store_true", help="generation: --queries new tokens (1) after a cache of --length keys")
    add("--family", choices=("auto", "sm80", "sm90"), default="auto", help="what DMATTN_FAMILY says")
    add("--device", choices=tuple(DEVICES), default="sm90")


def run(arguments: argparse.Namespace) -> int:
    """Prints the plans of forward and backward, or of decoding, or why a kernel does not take the call."""
    device = {**DEVICES[arguments.device], "family": arguments.family}
    call = described(arguments)
    plans: dict[str, Callable[[], str]] = {
        "forward": lambda: in_words("forward", forward_plan(call, device)),
        "backward": lambda: in_words("backward", backward_plan(call, device)),
    }
    if arguments.decode:
        call["query_length"] = arguments.queries or 1
        plans = {"decode": lambda: decode_in_words(decode_plan(call, device))}
    for name, in_text in plans.items():
        try:
            print(in_text())
        except RuntimeError as error:
            print(f"{name}: refused: {error}")
        except ImportError as error:
            print(f"python -m dmattn plan: {str(error).splitlines()[0]}", file=sys.stderr)
            return 2
    return 0
