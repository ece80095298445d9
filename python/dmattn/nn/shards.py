"""Parameters of a layer whose heads are distributed to several ranks: each rank computes with its own part."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dmattn.sharding import is_sharded


def own_part(parameter: Tensor, like: Tensor) -> Tensor:
    """The rows of a parameter that this rank holds: of a DTensor its local tensor, differentiable; any other tensor whole.

    Where ``like``, what it is computed with, is a DTensor too, the parameter stays what it is.
    """
    to_local: Any = None if is_sharded(like) else getattr(parameter, "to_local", None)
    part: Tensor = parameter if to_local is None else to_local()
    return part
