"""FlashKernel's attention and reductions: ``flash_attention_forward``, ``reduce_sum``, ``reduce_max`` and their ``triton_`` names.

Its other kernels (GeLU with a product, rotary embedding, pages of a cache) are torch operations, :func:`dmattn.nn.rotate` and
:func:`dmattn.decode_attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn import checks
from dmattn.attention import attention
from dmattn.fake import REDUCED

EVERYTHING = -1  # as a dimension


def flash_attention_forward(
    Q: Tensor, K: Tensor, V: Tensor, scale: float | None = None, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Dense attention and its log-sum-exp, with gradients through both.

    Args:
        Q, K, V: [B, H, N, D], D a multiple of 8 up to 256; float16 and bfloat16, on CPUs float32 and float64 too.
        scale: None or negative: D ** -0.5.
        is_causal: hide later keys.

    Returns:
        (O [B, H, N, D] in Q's dtype, L [B, H, N] float32, natural logarithm).

    Raises:
        TypeError, ValueError: names the argument, what was expected and what it got; shapes that differ are refused.
    """
    for name, given in (("Q", Q), ("K", K), ("V", V)):
        checks.shaped(name, given, "[B, H, N, D]")
        if given.shape != Q.shape:
            raise ValueError(f"{name}: expected {checks.shape_of(Q)} like Q, got {checks.shape_of(given)}")
    checks.flag("is_causal", is_causal)
    scale = None if scale is None else checks.scale(scale)
    out, lse = attention(Q, K, V, is_causal=is_causal, scale=None if scale is None or scale < 0 else scale, return_lse=True)
    return out, lse


def reduce_sum(input: Tensor, dim: int = EVERYTHING) -> Tensor:
    """The sum of all elements, or along one dimension: ``torch.ops.dmattn.reduce_sum``, whose ``dim=-1`` means the last dimension instead.

    Args:
        input: any shape and strides.
        dim: -1: all elements; 0 <= dim < rank: that dimension.

    Returns:
        [] or the input's shape without that dimension, in the dtype that ``torch.sum`` returns; the same bits run to run.

    Raises:
        TypeError, ValueError: dim is another number, or input no tensor of numbers.
        RuntimeError: :func:`reduce_max` of no elements; their sum is 0.
    """
    return _reduced(torch.ops.dmattn.reduce_sum, input, dim)


def reduce_max(input: Tensor, dim: int = EVERYTHING) -> Tensor:
    """The largest element of all, or along one dimension; arguments as of :func:`reduce_sum`. NaN wins."""
    return _reduced(torch.ops.dmattn.reduce_max, input, dim)


def triton_reduce_sum(input: Tensor, dim: int | None = None) -> Tensor:
    """As ``torch.ops.dmattn.reduce_sum``: None means all elements, and here -1 does mean the last dimension."""
    tensor = checks.tensor("input", input)
    if type(dim) is int and dim == EVERYTHING and tensor.dim() > 0:
        dim = tensor.dim() - 1
    return _reduced(torch.ops.dmattn.reduce_sum, tensor, EVERYTHING if dim is None else dim)


def _reduced(op: torch._ops.OpOverloadPacket, given: object, dim: object) -> Tensor:
    tensor = checks.tensor("input", given, REDUCED)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim: expected an int, got {type(dim).__name__}")
    if dim != EVERYTHING and not 0 <= dim < tensor.dim():
        raise ValueError(f"dim: expected -1 (all elements) or 0 <= dim < {tensor.dim()}, got {dim}")
    result: Tensor = op(tensor, None if dim == EVERYTHING else dim)
    return result


triton_flash_attention_forward = flash_attention_forward
triton_reduce_max = reduce_max

__all__ = [
    "flash_attention_forward",
    "reduce_max",
    "reduce_sum",
    "triton_flash_attention_forward",
    "triton_reduce_max",
    "triton_reduce_sum",
]
