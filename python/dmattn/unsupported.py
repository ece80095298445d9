"""What is refused with a sentence: ops on a device or layout without kernels, torch.jit.script, and ONNX export."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NoReturn

import torch

from dmattn import _library
from dmattn.fake import OPS


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: object) -> NoReturn:
        kernels = [key for key in ("CPU", "CUDA") if torch._C._dispatch_has_kernel_for_dispatch_key(f"dmattn::{name}", key)]
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        unusual = [t for t in tensors if t.is_nested or t.is_quantized or t.layout != torch.strided]
        given = [f"a {_layout(t)} tensor on {t.device}" for t in (unusual or tensors)[:1]]
        raise NotImplementedError(
            f"dmattn::{name}: no kernel for {given[0] if given else 'a call without a tensor'}; "
            f"this build has kernels for strided tensors on {', '.join(kernels) or 'no device'}"
        )

    return refuse


# A fallback behind the kernels, which nested tensors would not come to.
for _name, _key in itertools.product(
    OPS, ("CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA", "AutogradNestedTensor")
):
    _library.rules().impl(_name, _refusal(_name), _key)


def _layout(given: torch.Tensor) -> str:
    return "nested" if given.is_nested else "quantised" if given.is_quantized else str(given.layout)


def refuse_scripting(*functions: Callable[..., object]) -> None:
    """Makes torch.jit.script say that it cannot take these functions: torch calls ``__prepare_scriptable__`` before it compiles one."""
    for function in functions:
        setattr(function, "__prepare_scriptable__", scripting_refused)  # noqa: B010  (functions have no such attribute for mypy)


def scripting_refused(*self: object) -> NoReturn:
    raise NotImplementedError("dmattn: torch.jit.script is not supported; use torch.compile, torch.export or torch.jit.trace")


def refuse_onnx() -> None:
    """Called while a public function is traced: torch's own error would name the op alone."""
    if torch.onnx.is_in_onnx_export():
        raise NotImplementedError(
            "dmattn: ONNX has no operator for dmattn's attention; export with torch.export or AOTInductor, or register a translation "
            "of torch.ops.dmattn.forward and call that op"
        )
