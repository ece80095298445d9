"""triton-flashattn's kernels by their names: causal attention over contiguous [Z * H * N, HEAD_DIM] buffers that the caller provides.

``_attn_fwd[grid](...)`` and the others are called as the Triton kernels were; the grid has no effect. For code that differentiates,
:func:`flash_attention` is the same attention with gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dmattn import checks
from dmattn.attention import attention
from dmattn.fake import accumulate_dtype


def flash_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Causal attention of [Z, H, N, HEAD_DIM] tensors, with gradients.

    Args:
        q, k, v: [Z, H, N, HEAD_DIM].
        scale: default HEAD_DIM ** -0.5.

    Returns:
        [Z, H, N, HEAD_DIM].

    Raises:
        TypeError, ValueError: as :func:`dmattn.attention`.
    """
    checks.each(checks.tensor, q=q, k=k, v=v)
    return attention(q, k, v, is_causal=True, scale=scale)


class Kernel:
    """A function that is called as ``kernel[grid](...)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.function


def _forward(
    scale: float, ptr_b: Tensor, Z: int, H: int, N: int, ptr_q: Tensor, ptr_k: Tensor, ptr_v: Tensor, ptr_o: Tensor, HEAD_DIM: int,
    **_: int,
) -> None:  # fmt: skip
    """Writes the output to ptr_o [Z * H * N, HEAD_DIM] and each row's log-sum-exp, to base 2, to ptr_b [Z * H * N]."""
    names = {"ptr_q": ptr_q, "ptr_k": ptr_k, "ptr_v": ptr_v, "ptr_o": ptr_o}
    q, k, v, o = (_heads(name, given, Z, H, N, HEAD_DIM) for name, given in names.items())
    b = _heads("ptr_b", ptr_b, Z, H, N, 1)
    with torch.no_grad():
        out, lse = attention(q, k, v, is_causal=True, scale=checks.scale(scale), return_lse=True)
        o.copy_(out)
        b.copy_(lse[..., None] / math.log(2.0))


def _prepare(O: Tensor, DO: Tensor, Delta: Tensor, Z: int, H: int, N: int, HEAD_DIM: int, **_: int) -> None:  # noqa: E741  (its name there)
    """Writes each row's sum of O * DO to Delta [Z * H * N]."""
    o, grad = _heads("O", O, Z, H, N, HEAD_DIM), _heads("DO", DO, Z, H, N, HEAD_DIM)
    dtype = accumulate_dtype(o.dtype)
    with torch.no_grad():
        _heads("Delta", Delta, Z, H, N, 1).copy_((o.to(dtype) * grad.to(dtype)).sum(dim=-1, keepdim=True))


def _backward(
    Q: Tensor, K: Tensor, V: Tensor, scale: float, DO: Tensor, DQ: Tensor, DK: Tensor, DV: Tensor, B: Tensor, D: Tensor, Z: int, H: int,
    N: int, HEAD_DIM: int, **_: int,
) -> None:  # fmt: skip
    """Writes the gradients to DQ, DK and DV. B and D, what the other two kernels wrote, are computed again."""
    names = {"Q": Q, "K": K, "V": V, "DO": DO, "DQ": DQ, "DK": DK, "DV": DV}
    q, k, v, grad, *results = (_heads(name, given, Z, H, N, HEAD_DIM) for name, given in names.items())
    _heads("B", B, Z, H, N, 1), _heads("D", D, Z, H, N, 1)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, is_causal=True, scale=checks.scale(scale))
        gradients = torch.autograd.grad(out, leaves, grad.to(out.dtype))
    with torch.no_grad():
        for result, gradient in zip(results, gradients, strict=True):
            result.copy_(gradient)


def _heads(name: str, given: object, Z: int, H: int, N: int, size: int) -> Tensor:
    """A buffer as [Z, H, N, size], without a copy."""
    for size_name, number in (("Z", Z), ("H", H), ("N", N), ("HEAD_DIM", size)):
        checks.natural_int(size_name, number)
    buffer = checks.tensor(name, given)
    if not buffer.is_contiguous() or buffer.numel() != Z * H * N * size:
        expected = f"{Z * H * N * size} contiguous elements for Z={Z}, H={H}, N={N}"
        raise ValueError(f"{name}: expected {expected}, got shape {checks.shape_of(buffer)} with strides {list(buffer.stride())}")
    return buffer.view(Z, H, N, size)


_attn_fwd, _attn_bwd_prep, _attn_bwd = Kernel(_forward), Kernel(_prepare), Kernel(_backward)

__all__ = ["_attn_bwd", "_attn_bwd_prep", "_attn_fwd", "flash_attention"]
