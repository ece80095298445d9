"""One attention problem as a value: tensors and options, what its mask means, and how to run it on an implementation or on the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmattn import reference
from dmattn.attention import attention
from dmattn.masks import Mask

DIFFERENTIABLE = ("query", "key", "value", "key_bias", "bias")


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionCase:
    """Arguments of :func:`dmattn.attention`, with ``visible`` saying independently what ``mask`` means.

    Args:
        query: [B, H, Sq, D].
        key: [B, Hkv, Sk, D].
        value: [B, Hkv, Sk, Dv].
        mask: what the implementation gets.
        visible: what the reference gets: bool [B|1, H|Hkv|1, Sq, Sk], None for all. It must say the same as ``mask``.
        key_bias, bias, is_causal, scale, softcap, dropout_p, deterministic: as in :func:`dmattn.attention`.
        dropout_seed: the seed as an int; used when dropout_p > 0.
        grad_seed: seed of the random gradients that enter through out and lse.
        grad_through_lse: whether one enters through lse at all.
        description: where the mask came from, for messages.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | Tensor | None = None
    visible: Tensor | None = None
    key_bias: Tensor | None = None
    bias: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    dropout_seed: int = 0
    deterministic: bool = False
    grad_seed: int = 0
    grad_through_lse: bool = True
    description: str = ""

    def call(self, fn: Callable[..., Any] = attention) -> tuple[Tensor, Tensor]:
        """(out, lse) of an implementation with :func:`dmattn.attention`'s signature."""
        seed = torch.tensor([self.dropout_seed], dtype=torch.int64, device=self.query.device) if self.dropout_p > 0 else None
        out, lse = fn(
            self.query, self.key, self.value, self.mask, key_bias=self.key_bias, bias=self.bias, is_causal=self.is_causal,
            scale=self.scale, softcap=self.softcap, dropout_p=self.dropout_p, dropout_seed=seed, deterministic=self.deterministic,
            return_lse=True,
        )  # fmt: skip
        return out, lse

    def call_reference(self) -> tuple[Tensor, Tensor]:
        """(out, lse) of :mod:`dmattn.reference`, eagerly, in the dtypes the tensors have."""
        key_bias = None if self.key_bias is None else with_rank(self.key_bias, 3)
        bias = None if self.bias is None else with_rank(self.bias, 4)
        return reference.attention(
            self.query, self.key, self.value, self.visible, key_bias=key_bias, bias=bias, is_causal=self.is_causal, scale=self.scale,
            softcap=self.softcap, dropout_p=self.dropout_p, dropout_seed=self.dropout_seed,
        )  # fmt: skip

    def seen(self) -> Tensor:
        """Who sees whom in the end, with is_causal: bool [B, H, Sq, Sk]."""
        batch, heads, queries, _ = self.query.shape
        keys = self.key.shape[2]
        seen = torch.ones((1, 1, queries, keys), dtype=torch.bool, device=self.query.device)
        seen = seen.tril(keys - queries) if self.is_causal else seen
        seen = seen if self.visible is None else seen & reference.per_query_head(self.visible, heads)
        return seen.expand(batch, heads, queries, keys)

    def leaves(self) -> dict[str, Tensor]:
        """The tensors that have a gradient, by name."""
        given = {name: getattr(self, name) for name in DIFFERENTIABLE}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    def to(self, dtype: torch.dtype) -> AttentionCase:
        """The same numbers, contiguous, in another dtype."""
        return self.with_leaves({name: tensor.detach().to(dtype).contiguous() for name, tensor in self.leaves().items()})

    def with_leaves(self, leaves: dict[str, Tensor]) -> AttentionCase:
        """The same problem with other tensors."""
        changes: dict[str, Any] = dict(leaves)
        return dataclasses.replace(self, **changes)

    def incoming_gradients(self) -> tuple[Tensor, Tensor]:
        """The random (grad_out, grad_lse) of this case, the same numbers for every dtype."""
        batch, heads, queries, _ = self.query.shape
        generator = torch.Generator().manual_seed(self.grad_seed)
        grad_out = torch.randn((batch, heads, queries, self.value.shape[3]), generator=generator)
        grad_lse = torch.randn((batch, heads, queries), generator=generator) * self.grad_through_lse
        # Rounded to half precision first, they are the same numbers in every wider dtype.
        half = torch.bfloat16 if self.query.dtype == torch.bfloat16 else torch.float16
        return grad_out.to(half).to(self.query.device), grad_lse.to(half).to(self.query.device)

    def __repr__(self) -> str:
        def show(value: object) -> str:
            if isinstance(value, Tensor):
                dtype = str(value.dtype).removeprefix("torch.")
                return f"{dtype}{list(value.shape)}" + ("" if value.is_contiguous() else f" strides {list(value.stride())}")
            return repr(value)

        skipped = ("mask", "visible", "description")
        shown = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in skipped}
        changed = [f"{name}={show(value)}" for name, value in shown.items() if value is not None and value is not False]
        return f"AttentionCase({', '.join(changed)}, mask={self.description or type(self.mask).__name__})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # hypothesis would print every tensor
        printer.text(repr(self))


def with_rank(tensor: Tensor, rank: int) -> Tensor:
    """Leading dimensions of 1 added up to a rank."""
    return tensor[(None,) * (rank - tensor.dim())] if tensor.dim() < rank else tensor
