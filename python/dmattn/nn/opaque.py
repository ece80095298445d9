"""Ops written in Python, for what torch.compile takes longer to compile for a CPU than most runs save: compiled code calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmattn.autograd import transforms_are_active
from dmattn.sharding import is_sharded


def opaque(name: str, **options: Any) -> Any:
    """A decorator that makes a function the op ``torch.ops.dmattn_nn.<name>`` of CPU tensors, see torch.library.custom_op. It is its own fake,
    unless another one is registered."""

    def made(function: Callable[..., Any]) -> Any:
        op: Any = torch.library.custom_op(f"dmattn_nn::{name}", function, mutates_args=(), device_types="cpu", **options)
        op.register_fake(function)
        return op

    return made


def is_opaque(like: Tensor) -> bool:
    """Whether code that is traced now should call such ops. Exported programs run without Python, and torch.func looks into what it
    transforms."""
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    return like.device.type == "cpu" and not is_sharded(like) and not transforms_are_active()
