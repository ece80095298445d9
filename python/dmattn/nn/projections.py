"""The projections of a self-attention layer: queries, keys and values of hidden states, rotated to their positions."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dmattn import checks
from dmattn.nn.opaque import is_opaque
from dmattn.nn.rotation import both_turned, rotated, rotation_table, turning_pairs
from dmattn.nn.scores import initial_slopes
from dmattn.unsupported import scripting_refused


class RotatedProjections(nn.Module):
    """``q_proj``, ``k_proj`` and ``v_proj`` with their sizes and rotation: what layers of self-attention have in common."""

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    local_heads: int
    rope_theta: float | None
    softcap: float = 0.0
    partial_rotary_factor: float = 1.0
    rotated_heads: int | None = None  # layers pickled before there was a choice have none of their own

    def _set_sizes(self, embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> int:
        """Checks them, and gives the head size."""
        checks.each(checks.positive_int, embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads={num_heads}, got {num_kv_heads}")
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"embed_dim: expected a multiple of num_heads={num_heads} when head_dim is not given, got {embed_dim}"
            )
        head_dim = embed_dim // num_heads if head_dim is None else head_dim
        checks.positive_int("head_dim", head_dim)
        checks.head_size("head_dim", head_dim)
        self.embed_dim, self.num_heads, self.num_kv_heads, self.head_dim = embed_dim, num_heads, num_kv_heads, head_dim
        return head_dim

    def _set_options(self, rope_theta: float | None, dropout: float) -> None:
        if rope_theta is not None:
            rope_theta = checks.number("rope_theta", rope_theta, low=0.0, high=checks.MAX_FACTOR)
            if rope_theta < 1 / checks.MAX_FACTOR:
                raise ValueError(f"rope_theta: expected None or a number > 0, got {rope_theta}")
        self.rope_theta = rope_theta
        self.dropout = checks.number("dropout", dropout, low=0.0, high=1.0, open_high=True)

    def _add_projections(self, bias: bool, device: Any, dtype: Any) -> partial[nn.Linear]:
        """Makes those of queries, keys and values, and gives what makes others like them."""
        linear = partial(nn.Linear, bias=checks.flag("bias", bias), device=device, dtype=dtype)
        self.q_proj = linear(self.embed_dim, self.num_heads * self.head_dim)
        self.k_proj = linear(self.embed_dim, self.num_kv_heads * self.head_dim)
        self.v_proj = linear(self.embed_dim, self.num_kv_heads * self.head_dim)
        return linear

    def _set_local_heads(self, wanted: int | Literal["half"], local: int) -> None:
        """How many key heads see ``local`` keys and sinks alone, of what a recipe says."""
        self.local_heads = wanted if wanted != "half" else self.num_kv_heads // 2 if local else 0
        checks.local_heads(self.local_heads, self.num_kv_heads, local)

    def _add_slopes(self, recency: float | None, device: Any, dtype: Any) -> None:
        slopes = None if recency is None else nn.Parameter(initial_slopes(recency, self.num_kv_heads).to(device, dtype))
        self.log_slope: nn.Parameter | None = slopes

    def _check_generates(self, hidden_states: Tensor, batch: int) -> None:
        """Refuses what does not go with a cache of so many sequences."""
        if self.training and self.dropout > 0:
            raise ValueError(
                f"cache: expected a layer in eval mode or without dropout, got one that trains with dropout={self.dropout}"
            )
        checks.shaped("hidden_states", hidden_states, "[B, S, E]", B=batch)

    def _check_hidden(self, hidden_states: object) -> None:
        given = checks.shaped("hidden_states", hidden_states, "[B, S, E]", E=self.embed_dim)
        checks.like_weights("hidden_states", given, self.k_proj)

    def _check_without_cache(self, lengths: Tensor | None, padding_side: object) -> None:
        if lengths is not None:
            raise ValueError("lengths: expected None without a cache; give base=IntervalMask.padding(S, lengths) instead")
        if padding_side != "right":
            raise ValueError(
                f"padding_side: expected its default without a cache, got {padding_side!r}; base says where padding is"
            )

    def _alike(self) -> dict[str, int]:
        """What has to be the same on all ranks that share a sequence."""
        names = ("num_heads", "num_kv_heads", "head_dim", "window", "local", "sink_keys", "local_heads")
        return {name: int(getattr(self, name)) for name in names} | {"torch.is_grad_enabled()": int(torch.is_grad_enabled())}

    @staticmethod
    def _refuse(given: dict[str, bool], names: Iterable[str], other: str) -> None:
        """Refuses arguments that are given although they do not go together with another one; ``other`` says which one, and why."""
        for name in names:
            if given[name]:
                raise ValueError(f"{name}: expected its default with {other}")

    def _check_dealt_out(self, heads: int) -> None:
        if heads != self.num_kv_heads:
            if self.local_heads:
                raise ValueError(f"local_heads: expected 0 where key heads are distributed to ranks, got {self.local_heads}")
            if self.rotated_heads is not None:
                raise ValueError(
                    f"rotated_heads: expected None where key heads are distributed to ranks, got {self.rotated_heads}"
                )

    def projected(
        self,
        hidden_states: Tensor,
        positions: Tensor | None = None,
        *,
        rotation: tuple[Tensor, Tensor] | None = None,
        heads_first: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """query [B, H, S, D], key and value [B, Hkv, S, D] as attention takes them: query and key are rotated to positions [B|1, S], by
        default 0, 1, ... in every sequence, or by ``rotation`` instead, what :meth:`rotation` of any layer with the same heads gave.

        ``heads_first=False`` gives [B, S, H|Hkv, D], as projections leave them. A model that has scores of values transposes these for
        attention and again for :meth:`scores`: then torch.compile adds up both gradients of values without a copy.
        """
        query, key, value = (
            proj(hidden_states).unflatten(2, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if rotation is not None:
            if positions is not None:
                raise ValueError("positions, rotation: expected at most one of them, got both")
            self._check_rotation(rotation, query)
        if self.rope_theta is not None:
            heads = key.shape[2] if self.rotated_heads is None else self.rotated_heads
            if self.rotated_heads is not None:
                self._check_dealt_out(key.shape[2])
            batch, length = query.shape[:2]
            if positions is not None:
                checks.shaped("positions", positions, "[B|1, S]", B=batch, S=length)
            if rotation is not None:
                query, key = both_turned(query, key, rotation, heads)
            elif is_opaque(query) and turning_pairs(self.head_dim, self.partial_rotary_factor):
                query, key = rotated(query, key, positions, self.rope_theta, self.partial_rotary_factor, heads)
            else:
                positions = torch.arange(length, device=query.device)[None] if positions is None else positions
                query, key = both_turned(query, key, self.rotation(positions, query.dtype), heads)
        if not heads_first:
            return query, key, value
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def rotation(self, positions: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines that rotate to positions [B|1, S], for :meth:`projected`. A model whose layers are compiled one by one computes
        them once: a layer that computes them itself does so for every head, forward and backward.

        Args:
            positions: integers.
            dtype: of query and key; default: that of the projections.

        Returns:
            two tensors [B|1, S, 1, number of pairs that rotate].

        Raises:
            TypeError, ValueError: positions or dtype are no such things, or a layer that does not rotate.
        """
        if self.rope_theta is None:
            raise ValueError("rotation: expected a layer with rope_theta, got one with None")
        checks.shaped("positions", positions, "[B|1, S]")
        dtype = self.q_proj.weight.dtype if dtype is None else dtype
        if dtype not in checks.DTYPES["cpu"]:
            raise TypeError(f"dtype: expected that of query and key, a floating-point one, got {dtype}")
        return rotation_table(positions, self.head_dim, self.rope_theta, self.partial_rotary_factor, dtype)

    def _check_rotation(self, rotation: object, query: Tensor) -> None:
        """Refuses cosines and sines that are not those of this layer's heads for a query [B, S, H, D]."""
        if self.rope_theta is None:
            raise ValueError("rotation: expected None for a layer with rope_theta=None, got cosines and sines")
        if not isinstance(rotation, tuple | list) or [isinstance(part, Tensor) for part in rotation] != [True, True]:
            raise TypeError(
                f"rotation: expected the two tensors that layer.rotation(positions) gives, got {checks.type_of(rotation)}"
            )
        sizes = {"B": query.shape[0], "S": query.shape[1], "pairs": turning_pairs(self.head_dim, self.partial_rotary_factor)}
        for part in rotation:
            checks.shaped("rotation", part, "[B|1, S, 1, pairs]", (), query, **sizes)
            if part.dtype != query.dtype and not torch._C._is_any_autocast_enabled():
                expected = str(query.dtype).removeprefix("torch.")
                got = str(part.dtype).removeprefix("torch.")
                raise TypeError(
                    f"rotation: expected dtype {expected} like query, got {got}; layer.rotation(positions, dtype) takes one"
                )

    __prepare_scriptable__ = scripting_refused  # torch.jit.script calls it first
