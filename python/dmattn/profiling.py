"""What two environment variables switch on at import: DMATTN_LOG=1 prints each call, DMATTN_NVTX=1 marks the range of each op."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dmattn import autograd, ops
from dmattn.stats import count

Call = Callable[..., Any]
VARIABLES = ("DMATTN_LOG", "DMATTN_NVTX")
# The functions of ops.py, by the names of their ops.
MARKED = ("select", "forward", "decode", "cache_update", "cache_join", "cache_extend", "cache_rewind")


def install(environment: Mapping[str, str] = os.environ) -> None:
    """Replaces the functions that the public functions call by ones that print or mark, where the environment asks for it."""
    log, nvtx = (environment.get(name, "") not in ("", "0") for name in VARIABLES)
    if log:
        ops.forward = logged(ops.forward)
    if nvtx and torch.version.cuda is None:
        warnings.warn("DMATTN_NVTX: this torch was built without CUDA and has no NVTX, so nothing is marked", stacklevel=2)
    elif nvtx:
        for name in MARKED:
            setattr(ops, name, marked(f"dmattn.{name}", getattr(ops, name)))
        autograd._gradients = marked("dmattn.backward", autograd._gradients)


def logged(forward: Call) -> Call:
    """The op ``forward`` with a line on stderr for each eager call. Reading the mask waits for its device."""

    @functools.wraps(forward)
    def call(*inputs: Any) -> Any:
        if not torch.compiler.is_compiling() and not ops._watched(inputs) and not inputs[0].is_meta:
            query, key, value, *masks = inputs[:9]
            counted = count((query.shape, key.shape, value.shape), query.dtype, tuple(masks), inputs[12])
            print(f"dmattn: {counted.line}, on {query.device}", file=sys.stderr, flush=True)
        return forward(*inputs)

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
