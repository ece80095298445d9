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
from dmattn.masks.heads import with_rank
from dmattn.testing.layouts import laid_out

DIFFERENTIABLE = ("query", "key", "value", "key_bias", "bias", "sinks")


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionCase:
    """Arguments of :func:`dmattn.attention`, with ``visible`` saying independently what ``mask`` means.

    Args:
        query: [B, H, Sq, D].
        key: [B, Hkv, Sk, D].
        value: [B, Hkv, Sk, Dv].
        mask: what the implementation gets.
        visible: what the reference gets: bool [B|1, H|Hkv|1, Sq, Sk], None for all. It must say the same as ``mask`` does for queries that
            stand where ``query_offset`` says.
        key_bias, bias, is_causal, scale, softcap, dropout_p, deterministic, sinks, query_offset: as in :func:`dmattn.attention`.
        dropout_seed: the seed as an int; used when dropout_p > 0.
        grad_seed: seed of the random gradients that enter through out and lse.
        grad_through_lse: whether one enters through lse at all.
        grad_layout: how they lie in memory, one of ``dmattn.testing.layouts.GRADIENT_LAYOUTS``.
        description: how the mask was made, for messages.
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
    grad_layout: str = "contiguous"
    sinks: Tensor | None = None
    query_offset: int | Tensor | None = None
    description: str = ""

    def call(self, fn: Callable[..., Any] = attention) -> tuple[Tensor, Tensor]:
        """(out, lse) of an implementation with :func:`dmattn.attention`'s signature."""
        seed = torch.tensor([self.dropout_seed], dtype=torch.int64, device=self.query.device) if self.dropout_p > 0 else None
        # A function without these two arguments can be called with cases without them.
        named = {name: getattr(self, name) for name in ("sinks", "query_offset") if getattr(self, name) is not None}
        out, lse = fn(
            self.query, self.key, self.value, self.mask, key_bias=self.key_bias, bias=self.bias, is_causal=self.is_causal,
            scale=self.scale, softcap=self.softcap, dropout_p=self.dropout_p, dropout_seed=seed, deterministic=self.deterministic,
            return_lse=True, **named,
        )  # fmt: skip
        return out, lse

    def call_reference(self) -> tuple[Tensor, Tensor]:
        """(out, lse) of :mod:`dmattn.reference`, eagerly, in the dtypes the tensors have."""
        key_bias = None if self.key_bias is None else with_rank(self.key_bias, 3)
        bias = None if self.bias is None else with_rank(self.bias, 4)
        visible, is_causal = (self.visible, self.is_causal) if self.query_offset is None else (self.seen(), False)
        out, lse = reference.attention(
            self.query, self.key, self.value, visible, key_bias=key_bias, bias=bias, is_causal=is_causal, scale=self.scale,
            softcap=self.softcap, dropout_p=self.dropout_p, dropout_seed=self.dropout_seed,
        )  # fmt: skip
        if self.sinks is not None:
            out = out * self.share_of_keys(lse)[..., None].to(out.dtype)
        return out, lse

    def share_of_keys(self, lse: Tensor) -> Tensor:
        """Of a query's weights, what its keys keep with the sink of its head: exp(lse) / (exp(lse) + exp(sink)), [B, H, Sq]."""
        assert self.sinks is not None
        sees_none = lse == -torch.inf
        return torch.sigmoid(torch.where(sees_none, 0.0, lse) - self.sinks.to(lse.dtype)[:, None]).masked_fill(sees_none, 0.0)

    def seen(self) -> Tensor:
        """Who sees whom in the end, with is_causal: bool [B, H, Sq, Sk]."""
        batch, heads, queries, _ = self.query.shape
        keys = self.key.shape[2]
        seen = torch.ones((1, 1, queries, keys), dtype=torch.bool, device=self.query.device)
        seen = seen & (torch.arange(keys, device=seen.device) <= self.positions()) if self.is_causal else seen
        seen = seen if self.visible is None else seen & reference.per_query_head(self.visible, heads)
        return seen.expand(batch, heads, queries, keys)

    def positions(self) -> Tensor:
        """Where the queries stand, int64 [B|1, 1, Sq, 1]."""
        queries = self.query.shape[2]
        first = self.key.shape[2] - queries if self.query_offset is None else self.query_offset
        return positions_from(first, queries, self.query.device)

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
        # Rounded to both half precisions, they are the same numbers in every dtype.
        grad_out, grad_lse = (given.bfloat16().half().to(self.query.device) for given in (grad_out, grad_lse))
        if self.query.dtype == torch.bfloat16:
            grad_out, grad_lse = grad_out.bfloat16(), grad_lse.bfloat16()
        return self.laid_out_gradients(grad_out, grad_lse)

    def laid_out_gradients(self, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor]:
        """Both in ``grad_layout``, which a change of dtype does not keep."""
        return laid_out(grad_out, self.grad_layout), laid_out(grad_lse[..., None], self.grad_layout)[..., 0]

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


def positions_from(first: int | Tensor, queries: int, device: torch.device) -> Tensor:
    """Where so many queries stand, the first of each sequence at ``first``, a number or a tensor [] or [B]: int64 [B|1, 1, queries, 1]."""
    first = torch.as_tensor(first, device=device).long().reshape(-1, 1, 1, 1)
    return first + torch.arange(queries, device=device)[:, None]
