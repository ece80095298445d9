"""What two environment variables switch on at import: DMATTN_LOG=1 prints calls of attention, DMATTN_NVTX=1 marks the range of each op."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dmattn import autograd, ops, plain
from dmattn.call import NO_MASK
from dmattn.composed import LISTS
from dmattn.fake import OPS
from dmattn.stats import count

Call = Callable[..., Any]
VARIABLES = ("DMATTN_LOG", "DMATTN_NVTX")
ON, OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
# The functions of ops.py, and the op that each calls.
MARKED = {name: name for name in OPS if hasattr(ops, name)} | {"decode_if_plain": "decode"}


def is_on(name: str, environment: Mapping[str, str]) -> bool:
    value = environment.get(name, "").lower()
    if value not in ON + OFF:
        warnings.warn(
            f"{name}: expected 1, true, yes, on, 0, false, no or off, got {environment[name]!r}; it stays off", stacklevel=2
        )
    return value in ON


def install(environment: Mapping[str, str] = os.environ) -> None:
    """Replaces the functions that the public functions call by ones that print or mark, where the environment asks for it."""
    log, nvtx = (is_on(name, environment) for name in VARIABLES)
    if log or nvtx:
        plain.is_enabled = False
    if log:
        ops.forward = logged(ops.forward, lambda inputs: (inputs[3:11], inputs[14], inputs[21:24]))
        ops.decode_if_plain = logged(ops.decode_if_plain, lambda inputs: (NO_MASK, inputs[8], LISTS))
    if nvtx and torch.version.cuda is None:
        warnings.warn("DMATTN_NVTX: this torch was built without CUDA and has no NVTX, so nothing is marked", stacklevel=2)
    elif nvtx:
        for name, op in MARKED.items():
            setattr(ops, name, marked(f"dmattn.{op}", getattr(ops, name)))
        autograd._gradients = marked("dmattn.backward", autograd._gradients)


def logged(op: Call, mask_of: Callable[[tuple[Any, ...]], tuple[Any, bool, tuple[int, int, int]]]) -> Call:
    """An op of attention with a line on stderr for each eager call that it serves. Reading the mask waits for its device.

    Args:
        op: takes query, key, value and more.
        mask_of: from all of its arguments to the eight tensors of the mask that ``forward`` takes, is_causal, and how lists are read.
    """

    @functools.wraps(op)
    def call(*inputs: Any) -> Any:
        result = op(*inputs)
        if result is not None and not torch.compiler.is_compiling() and not ops._watched(inputs) and not inputs[0].is_meta:
            masks, is_causal, lists = mask_of(inputs)
            counted = count([given.shape for given in inputs[:3]], inputs[0].dtype, masks, is_causal, lists)
            print(f"dmattn: {counted.line}, on {inputs[0].device}", file=sys.stderr, flush=True)
        return result

    return call


def marked(name: str, op: Call) -> Call:
    """An op in an NVTX range of its name, for eager calls."""

    @functools.wraps(op)
    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return op(*inputs)
        torch.cuda.nvtx.range_push(name)
        try:
            return op(*inputs)
        finally:
            torch.cuda.nvtx.range_pop()

    return call
