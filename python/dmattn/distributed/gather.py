"""A sequence in one piece on every rank, of the chunks that ranks hold; gradients return to the rank that a chunk came from."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives

from dmattn.distributed.agreement import DTYPES, all_gather_ints, refuse_differences
from dmattn.distributed.chunks import Chunks, group_of
from dmattn.distributed.values import compare
from dmattn.masks import IntervalMask
from dmattn.masks.interval import check_base

# Newer releases of torch have another name for it.
_all_gather: Any = (
    getattr(_functional_collectives, "all_gather_single_autograd", None) or _functional_collectives.all_gather_tensor_autograd
)


def gather_sequence(chunk: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The chunks of all ranks side by side along ``dim``, in rank order; they are of one shape. Differentiable, once."""
    whole: Tensor = _all_gather(chunk.movedim(dim, 0).contiguous(), 0, group)
    return whole.movedim(0, dim)


def check_ranks(
    chunk: Tensor, group: object, alike: dict[str, int], base: IntervalMask | None = None
) -> tuple[dist.ProcessGroup, IntervalMask | None]:
    """Refuses calls that differ between ranks, on every rank: shapes would not match, or results of different calls would mix.

    It is one small exchange between hosts. Compiled calls compare the values of ``base`` alone. What a rank refuses before, it refuses alone.

    Args:
        chunk: [B, S, E]; B, S and the dtype are compared.
        group: what the caller gave as group.
        alike: more numbers that have to be the same, by their names.
        base: values that have to be the same, compared on their device in a second exchange.

    Returns:
        The group, and base, whose ends are there after the exchange.

    Raises:
        TypeError: group is no ProcessGroup, or base no IntervalMask.
        ValueError: ranks differ, or the group is one without this rank.
        RuntimeError: ``base`` differs, and the host cannot read its values.
    """
    ranks = group_of(None, group)
    if base is not None:
        check_base(base)
    size = dist.get_world_size(ranks)
    if size == 1:
        return ranks, base
    if not torch.compiler.is_compiling():
        shape = {f"hidden_states [B, S, E], {name}": length for name, length in zip("BS", chunk.shape, strict=False)}
        given = shape | {"dtype": DTYPES.index(chunk.dtype)} | alike
        given["length of base (0 none)"] = 0 if base is None else base.end.shape[-1]
        refuse_differences(given, all_gather_ints(ranks, list(given.values())))
    if base is not None:
        end, _ = compare({"base": base}, base.end, Chunks(ranks.group_name, ranks.rank(), [chunk.shape[1]] * size), None)
        base = base._replace(end=end)
    return ranks, base
