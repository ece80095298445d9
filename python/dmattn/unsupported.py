"""What an op says on a device it has no kernel for: a fallback behind the kernels, so that the answer names what works."""

from __future__ import annotations

from typing import Any

import torch

OPS = ("select", "pack_tiles", "pack_bits", "forward", "backward")
_fallbacks = torch.library.Library("dmattn", "IMPL")


def _refusal(name: str) -> Any:
    def refuse(*args: Any) -> Any:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        device = tensors[0].device if tensors else "this device"
        kernels = [key for key in ("CPU", "CUDA") if torch._C._dispatch_has_kernel_for_dispatch_key(f"dmattn::{name}", key)]
        raise NotImplementedError(
            f"dmattn::{name}: no kernel for a {tensors[0].layout if tensors else ''} tensor on {device}; "
            f"this build has kernels for strided tensors on {', '.join(kernels) or 'no device'}"
        )

    return refuse


for _name in OPS:
    _fallbacks.impl(_name, _refusal(_name), "CompositeExplicitAutograd")
