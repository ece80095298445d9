"""Indexer: a module that learns which keys, or blocks of keys, attention should read for each query."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dmattn import checks
from dmattn.index_loss import index_loss
from dmattn.indexer import MAX_INDEX_HEADS, BlockScore, checked_block_score, index_top_k
from dmattn.masks import IndexMask, IntervalMask


class IndexProjections(NamedTuple):
    """What an :class:`Indexer` computes from hidden states, as :func:`dmattn.index_top_k` takes it."""

    query: Tensor  # [B, G, S, Hi, Di]
    key: Tensor  # [B, G, S, Di]
    weights: Tensor  # [B, G, S, Hi]


class Indexer(nn.Module):
    """Small queries and keys of hidden states, whose scores (:func:`dmattn.index_scores`) choose keys for each query.

    It reads hidden states without a gradient, so it learns from :meth:`loss` alone, and the loss needs no weight.

    Args:
        embed_dim: size E of the hidden states.
        groups: lists of keys that each query has, G: one for each group of heads that choose together.
        k: keys, or blocks, that each list holds at most, >= 0.
        num_heads: index heads Hi of a group, at most 128.
        head_dim: their size Di, a multiple of 8 up to 256.
        block_size, block_score, local, sink_keys: as of :func:`dmattn.index_top_k`.
        device, dtype: of the parameters.

    ``slope`` [G], what a key gains by each position that it stands later, is learned, and 0.001 at first.

    Shape:
        hidden_states [B, S, E] -> :class:`IndexProjections`: query [B, G, S, Hi, Di], key [B, G, S, Di], weights [B, G, S, Hi].

    Raises:
        TypeError, ValueError: a wrong type or size.
    """

    def __init__(
        self,
        embed_dim: int,
        groups: int,
        *,
        k: int,
        num_heads: int = 4,
        head_dim: int = 32,
        block_size: int = 1,
        block_score: BlockScore = "max",
        local: int = 0,
        sink_keys: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.each(checks.positive_int, embed_dim=embed_dim, groups=groups, num_heads=num_heads, head_dim=head_dim)
        if num_heads > MAX_INDEX_HEADS:
            raise ValueError(f"num_heads: expected at most {MAX_INDEX_HEADS}, got {num_heads}")
        checks.head_size("head_dim", head_dim)
        checks.natural_int("k", k)
        checks.each(checks.length, local=local, sink_keys=sink_keys)
        checked_block_score(block_score, block_size)
        self.embed_dim, self.groups, self.k, self.num_heads, self.head_dim = embed_dim, groups, k, num_heads, head_dim
        self.block_size, self.block_score, self.local, self.sink_keys = block_size, block_score, local, sink_keys
        linear = partial(nn.Linear, embed_dim, device=device, dtype=dtype)
        self.q_proj = linear(groups * num_heads * head_dim, bias=False)
        self.k_proj = linear(groups * head_dim, bias=False)
        self.weights_proj = linear(groups * num_heads)
        self.slope = nn.Parameter(torch.full((groups,), 1e-3, device=device, dtype=dtype))

    def forward(self, hidden_states: Tensor) -> IndexProjections:
        """The projections of hidden states [B, S, E], see the class."""
        checks.shaped("hidden_states", hidden_states, "[B, S, E]", E=self.embed_dim)
        checks.like_weights("hidden_states", hidden_states, self.k_proj)
        given = hidden_states.detach()
        query = self.q_proj(given).unflatten(2, (self.groups, self.num_heads, self.head_dim))
        key = self.k_proj(given).unflatten(2, (self.groups, self.head_dim))
        weights = self.weights_proj(given).unflatten(2, (self.groups, self.num_heads))
        return IndexProjections(query.transpose(1, 2), key.transpose(1, 2), weights.transpose(1, 2))

    @torch.no_grad()
    def select(
        self,
        given: Tensor | IndexProjections,
        base: IntervalMask | None = None,
        *,
        query_offset: int | Tensor | None = None,
        lengths: Tensor | None = None,
        page_table: Tensor | None = None,
    ) -> IndexMask:
        """The lists of all queries, [B, G, S, K]; attend with ``mask``, or with ``mask & base``.

        Args:
            given: hidden states [B, S, E], or their projections. Their ``key`` may be that of more tokens: a cache.
            base, query_offset, lengths, page_table: as of :func:`dmattn.index_top_k`.

        Raises:
            TypeError, ValueError: as :func:`dmattn.index_top_k`.
        """
        query, key, weights = (part.detach() for part in self._projections(given))
        return index_top_k(
            query, key, weights, self.k, block_size=self.block_size, block_score=self.block_score, base=base, local=self.local,
            sink_keys=self.sink_keys, slope=self.slope.detach(), query_offset=query_offset, lengths=lengths, page_table=page_table,
        )  # fmt: skip

    def loss(
        self,
        given: Tensor | IndexProjections,
        query: Tensor,
        key: Tensor,
        *,
        rows: Tensor | None = None,
        mask: IndexMask | None = None,
        base: IntervalMask | None = None,
        key_bias: Tensor | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        query_offset: int | None = None,
        sharp: bool = False,
    ) -> Tensor:
        """What teaches the indexer, a scalar: :func:`dmattn.index_loss` of attention's query [B, H, S, D] and key [B, Hkv, Sk, D].

        Args:
            given: as of :meth:`select`.
            rows, mask, base, key_bias, scale, softcap, query_offset, sharp: as of :func:`dmattn.index_loss`.

        Raises:
            TypeError, ValueError: as :func:`dmattn.index_loss`.
        """
        parts = self._projections(given)
        return index_loss(
            *parts, query, key, rows=rows, mask=mask, base=base, local=self.local, sink_keys=self.sink_keys, scale=scale, softcap=softcap,
            key_bias=key_bias, block_size=self.block_size, block_score=self.block_score, slope=self.slope, query_offset=query_offset,
            sharp=sharp,
        )  # fmt: skip

    def _projections(self, given: Tensor | IndexProjections) -> IndexProjections:
        if isinstance(given, IndexProjections):
            return given
        parts: IndexProjections = self(given)
        return parts

    def extra_repr(self) -> str:
        names = ("groups", "k", "num_heads", "head_dim", "block_size", "local", "sink_keys")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)
