"""Ways in which the numbers of a tensor can lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = ("contiguous", "bshd", "sliced", "expanded", "strided")
GRADIENT_LAYOUTS = (*LAYOUTS, "one_number")


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """A [B, heads, S, size] tensor in one of the GRADIENT_LAYOUTS; memory around slices and between strided elements is NaN.

    ``expanded`` repeats the first head's rows for all heads (stride 0), and ``one_number`` one number everywhere, as the gradient of a sum
    does: their numbers differ from the given ones.
    """
    batch, heads, length, size = tensor.shape
    if layout == "bshd":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        room = tensor.new_full((batch, heads + 1, length + 3, size + 8), torch.nan)
        view = room[:, :heads, 1 : length + 1, 8:]
        view.copy_(tensor)
        return view
    if layout == "expanded":
        return tensor[:, :1].expand(batch, heads, length, size)
    if layout == "one_number":
        return tensor[:1, :1, :1, :1].expand(tensor.shape)
    if layout == "strided":
        room = tensor.new_full((batch, heads, length, 2 * size), torch.nan)
        room[..., ::2] = tensor
        return room[..., ::2]
    return tensor
