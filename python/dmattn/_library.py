"""Finds and loads the ops library: a plain shared object without Python in it, so that a C++ process can load it too."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

LIBRARY_NAME = "libdmattn_ops.so"
NAMESPACE = "dmattn"  # of the ops, in the ops library too; a copy for the kernels hub has another
_RULES = "_python_rules"  # where torch.ops.dmattn, which outlives the package, keeps them


@cache
def library_path() -> str:
    """Absolute path of the ops library.

    A process that runs a saved program with dmattn ops in it and does not import dmattn loads this file first: Python by
    ``torch.ops.load_library``, C++ by ``dlopen``. ``python -m dmattn library`` prints the path.

    Raises:
        ImportError: the library was not built or not installed with the package.
    """
    candidates = [Path(__file__).parent / LIBRARY_NAME]
    module = importlib.util.find_spec(f"{__package__}._C")  # an editable install keeps binaries elsewhere: beside the module
    if module is not None and module.origin is not None:
        candidates.append(Path(module.origin).parent / LIBRARY_NAME)
    for path in candidates:
        if path.is_file():
            return str(path)
    raise ImportError(f"dmattn: {LIBRARY_NAME} not found in {', '.join(str(p.parent) for p in candidates)}; reinstall dmattn")


def load() -> None:
    """Registers ``torch.ops.dmattn.*``, and makes room for the rules written in Python.

    Raises:
        ImportError: the process already has the ops of another copy of the library; names both files.
    """
    path = library_path()
    torch.ops.load_library(path)
    in_use = _text_from("dmattn_ops_file")
    if in_use != path and not os.path.samefile(in_use, path):
        raise ImportError(
            f"dmattn: expected to load the ops of {path}, but this process already has the ops of another copy, {in_use}: "
            "use one installation of dmattn in a process"
        )
    renewed(NAMESPACE)


def rules() -> torch.library.Library:
    """The object that this import's Python registers fakes, gradients and refusals with."""
    own: torch.library.Library = vars(torch.ops.dmattn)[_RULES]
    return own


def renewed(name: str) -> torch.library.Library:
    """A library of rules and ops in a namespace, without those of an earlier import: dmattn may be imported again after it was removed from
    ``sys.modules``."""
    namespace = vars(getattr(torch.ops, name))
    if _RULES in namespace:
        namespace[_RULES]._destroy()
    own: torch.library.Library = torch.library.Library(name, "FRAGMENT")
    namespace[_RULES] = own
    return own


@cache
def arguments_of(op: str) -> dict[str, Any]:
    """An op's arguments in the order of cpp/schema.cpp, with their defaults; None for those that have none."""
    arguments = getattr(torch.ops.dmattn, op).default._schema.arguments
    return {given.name: given.default_value if given.has_default_value() else None for given in arguments}


def by_name(op: str, inputs: tuple[Any, ...]) -> dict[str, Any]:
    """All arguments of a call of an op, of which last ones that have their defaults may be left out, by their names."""
    return arguments_of(op) | dict(zip(arguments_of(op), inputs, strict=False))


def build_info() -> dict[str, str]:
    """What the ops library was built with: version, built_with_torch, stable_abi_target, cuda, cuda_archs, cuda_choice,
    cpu_levels, compiler."""
    lines = _text_from("dmattn_build_facts").splitlines()
    return dict(line.split("=", 1) for line in lines)


def _text_from(function: str) -> str:
    """What a C function of the ops library says, cpp/library.cpp."""
    call = getattr(ctypes.CDLL(library_path()), function)
    call.restype = ctypes.c_char_p
    return os.fsdecode(call())
