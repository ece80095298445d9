"""The ops that run in a piece of code, as their kernels get them."""

from __future__ import annotations

from typing import Any

import torch
from dmattn._library import by_name
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Watched(TorchDispatchMode):
    """Notes the calls of our ops, a name and all arguments by their names each, and how many elements the largest tensor has that any op
    makes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.largest = 0

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "dmattn":
            assert not kwargs
            self.calls.append((func._opname, by_name(func._opname, args)))
        results = func(*args, **(kwargs or {}))
        made = (x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor))
        self.largest = max([self.largest, *(x.untyped_storage().nbytes() // x.element_size() for x in made)])
        return results
