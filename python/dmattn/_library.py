"""Finds and loads the ops library: a plain shared object without Python in it, so that a C++ process can load it too."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import torch

LIBRARY_NAME = "libdmattn_ops.so"


@cache
def library_path() -> str:
    """Absolute path of the ops library.

    A C++ process that runs an AOTInductor package with dmattn ops in it must ``dlopen`` this file first.

    Raises:
        ImportError: the library was not built or not installed beside the package.
    """
    candidates = [Path(__file__).parent / LIBRARY_NAME]
    module = importlib.util.find_spec("dmattn._C")  # an editable install keeps binaries elsewhere: beside the module
    if module is not None and module.origin is not None:
        candidates.append(Path(module.origin).parent / LIBRARY_NAME)
    for path in candidates:
        if path.is_file():
            return str(path)
    raise ImportError(f"dmattn: {LIBRARY_NAME} not found in {', '.join(str(p.parent) for p in candidates)}; reinstall dmattn")


def load() -> None:
    """Registers ``torch.ops.dmattn.*``."""
    torch.ops.load_library(library_path())


def build_info() -> dict[str, str]:
    """What this library was built with: version, built_with_torch, stable_abi_target, cuda, cuda_archs, cpu_levels, compiler.

    Raises:
        ImportError: the optional module ``dmattn._C`` (or its run-time dependency nanobind-backend) is not installed.
    """
    from dmattn import _C

    return dict(_C.build_info())
