"""The indexer's loss in torch's ops, for CUDA until the kernel of ``torch.ops.dmattn.index_loss`` has run on a GPU."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dmattn.fake import accumulate_dtype
from dmattn.index_products import of_groups, rows_at
from dmattn.masks.heads import repeat_heads

ELEMENTS = 1 << 25  # of what is computed for a few queries at once, about


def composed_loss(
    index_query: Tensor, index_key: Tensor, weights: Tensor, slope: Tensor | None, query: Tensor, key: Tensor, key_bias: Tensor | None,
    rows: Tensor, lse: Tensor | None, lists: Tensor | None, start: Tensor | None, end: Tensor | None, offset: int, is_causal: bool,
    local: int, sink_keys: int, scale: float, softcap: float, index_factor: float, block_size: int, is_pooled: bool, sharp: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What ``dmattn_nn::index_loss`` returns."""
    batch, groups, count, index_heads, _ = index_query.shape
    heads, keys = query.shape[1], key.shape[2]
    dtype = accumulate_dtype(index_query.dtype)
    loss = weights.new_zeros(())
    gradients = [torch.zeros(given.shape, dtype=dtype, device=given.device) for given in (index_query, index_key, weights)]
    of_slope = weights.new_zeros(groups if slope is not None else 0)
    width = keys if lists is None else lists.shape[3] * block_size * max(1, key.shape[3] // 8)
    step = max(1, ELEMENTS // (width * max(heads // groups, index_heads) * batch * groups))
    choice = _Choice(offset, is_causal, local, sink_keys, block_size, is_pooled)
    query, key = query.unflatten(1, (groups, -1)), of_groups(key if lists is not None else key.to(dtype), groups)
    summed_index_key = index_key.to(dtype)
    if key_bias is not None:
        key_bias = key_bias[:, None] if key_bias.shape[1] == 1 else repeat_heads(key_bias, heads).unflatten(1, (groups, -1))
    lse = None if lse is None or lists is None else lse.unflatten(1, (groups, -1))
    for part in (slice(first, min(first + step, count)) for first in range(0, count, step)):
        candidates = choice.candidates(rows[part], None if lists is None else lists[:, :, part], (start, end), keys)
        attended = _attention_mass(
            query[..., part, :], key, key_bias, None if lse is None else lse[..., part], candidates, scale, softcap
        )
        mass = candidates.per_block(torch.where(candidates.competing, attended, 0.0)).sum(-1)
        scorer = _Scorer(
            index_query[:, :, part].to(dtype), summed_index_key, weights[:, :, part], slope, index_factor, candidates
        )
        divergence, of_scores = _divergence(mass, scorer.scores, candidates.blocks, sharp)
        loss += divergence / (batch * groups * count)
        of_query, of_key, of_weights, of_distance = scorer.gradients(of_scores / (batch * groups * count))
        gradients[0][:, :, part] = of_query
        gradients[1] += of_key
        gradients[2][:, :, part] = of_weights
        if slope is not None:
            of_slope += of_distance
    return loss, gradients[0].to(index_query.dtype), gradients[1].to(index_key.dtype), gradients[2], of_slope


def _at(given: Tensor, keys: Tensor) -> Tensor:
    """[b, g, Sk] at keys [M]: [b, g, 1, M]; or at keys [b', g', r, M], each b, b', g and g' a number or 1: [B, G, r, M]."""
    if keys.dim() == 1:
        return given[..., keys][:, :, None]
    batch, groups = (max(sizes) for sizes in zip(given.shape[:2], keys.shape[:2], strict=True))
    found: Tensor = (
        given.expand(batch, groups, -1).gather(2, keys.expand(batch, groups, -1, -1).flatten(2)).unflatten(2, keys.shape[2:])
    )
    return found


class _Candidates(NamedTuple):
    """The keys and blocks that the indexer chooses among for r queries of each group: n blocks of ``size`` keys, M = n * size of them or fewer.

    b is B where sequences differ, otherwise 1, and g is G or 1 likewise.
    """

    position: Tensor  # int64 [r, 1]
    keys: Tensor  # int64 [M], or [b, g, r, M] where each query has a list; those in lists may lie outside of the sequence
    visible: Tensor  # bool [b, g, r, M]
    competing: Tensor  # bool [b, g, r, M]
    blocks: Tensor  # bool [b, g, r, n]: which blocks compete
    block: Tensor | None  # int64 [b, g, r, n]: the blocks' numbers where each query has a list
    size: int
    is_pooled: bool

    def per_block(self, given: Tensor, beyond: float = 0.0) -> Tensor:
        """[.., M] as [.., n, size]."""
        whole = self.blocks.shape[-1] * self.size
        missing = whole - given.shape[-1]
        blocks: Tensor = (F.pad(given, (0, missing), value=beyond) if missing > 0 else given[..., :whole]).unflatten(
            -1, (-1, self.size)
        )
        return blocks


class _Choice(NamedTuple):
    """The options that say what competes."""

    offset: int
    is_causal: bool
    local: int
    sink_keys: int
    block_size: int
    is_pooled: bool

    def candidates(
        self, rows: Tensor, lists: Tensor | None, bounds_of_keys: tuple[Tensor | None, Tensor | None], count: int
    ) -> _Candidates:
        """For queries ``rows`` [r]: all ``count`` keys, or those in their lists [b, g, r, K], each once. bounds_of_keys: [b, g, Sk]."""
        position = rows[:, None] + self.offset
        block = None
        if lists is None:
            keys = torch.arange(count, device=rows.device)
        else:
            block = lists.long().sort(dim=-1).values
            block = torch.where(F.pad(block[..., 1:] == block[..., :-1], (1, 0)), -1, block)
            keys = (block[..., None] * self.block_size + torch.arange(self.block_size, device=rows.device)).flatten(-2)
        visible = ((keys >= 0) & (keys < count)).expand(*(keys.shape[:2] if lists is not None else (1, 1)), rows.shape[0], -1)
        visible = visible & (keys <= position) if self.is_causal else visible
        inside = keys.clamp(0, count - 1)
        for bound, is_start in zip(bounds_of_keys, (True, False), strict=True):
            if bound is not None:
                own = bound[..., position.clamp(0, count - 1)]  # a query whose own key is hidden is padding
                shown, is_real = ((ends <= position) if is_start else (position < ends) for ends in (_at(bound, inside), own))
                visible = visible & shown & (is_real | (position < 0) | (position >= count))
        forced = (keys < self.sink_keys) | ((keys <= position) & (keys > position - self.local))
        competing = visible & ~forced
        blocks = count // self.block_size if self.is_pooled else -(-count // self.block_size)
        blocks = blocks if block is None else block.shape[-1]
        made = _Candidates(
            position, keys, visible, competing, competing.new_empty(*competing.shape[:3], blocks), block, self.block_size, self.is_pooled
        )  # fmt: skip
        compete = made.per_block(competing).any(-1)
        compete = compete & made.per_block(visible).all(-1) if self.is_pooled else compete
        return made._replace(blocks=compete, competing=competing)


def _attention_mass(
    query: Tensor, key: Tensor, key_bias: Tensor | None, lse: Tensor | None, candidates: _Candidates, scale: float, softcap: float
) -> Tensor:
    """The mean weight of a group's h heads on each key, [B, G, r, M]; query [B, G, h, r, D], key [B, G, m, Sk, D] with h a multiple of m
    (in the dtype of sums where candidates are all keys), key_bias [B|1, G|1, h|1, Sk], lse [B, G, h, r] of
    all that queries see, or None where candidates are all keys."""
    dtype = accumulate_dtype(query.dtype)
    of_kv = query.to(dtype).unflatten(2, (key.shape[2], -1))  # [B, G, m, h / m, r, D]
    inside = candidates.keys.clamp(0, key.shape[3] - 1)
    if candidates.block is None:
        logits = (of_kv.flatten(3, 4) @ key.transpose(3, 4)).unflatten(3, of_kv.shape[3:5])
    else:
        logits = torch.einsum("bgmhrd,bgmrkd->bgmhrk", of_kv, rows_at(key, inside).to(dtype))
    logits = logits.flatten(2, 3) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if key_bias is not None:
        if candidates.block is None:
            logits = logits + key_bias[..., None, :].to(dtype)
        else:
            whole = key_bias.expand(*query.shape[:3], -1)[..., None]
            logits = logits + rows_at(whole, inside)[..., 0].to(dtype)
    logits = torch.where(candidates.visible[:, :, None], logits, -math.inf)
    if lse is None:
        most = logits.amax(-1, keepdim=True)
        lse = torch.where(most == -math.inf, 0.0, logits.logsumexp(-1, keepdim=True))
    else:
        lse = torch.where(lse == -math.inf, 0.0, lse)[..., None]
    return torch.exp(logits - lse).mean(2)


def _divergence(mass: Tensor, scores: Tensor, compete: Tensor, sharp: bool) -> tuple[Tensor, Tensor]:
    """The sum of the divergences of queries, and its gradient by their scores [B, G, r, n]; mass [B, G, r, n] is the attention on each block."""
    mass = torch.where(compete, mass, 0.0)
    total = mass.sum(-1, keepdim=True)
    teaches = total > 0
    weight = total * mass.amax(-1, keepdim=True) if sharp else teaches.to(mass.dtype)
    share = torch.where(teaches, mass / total, 0.0)
    scores = torch.where(compete, scores, -math.inf)
    predicted = torch.where(compete & teaches, scores.log_softmax(-1), 0.0)
    terms = torch.where(share > 0, share * (share.log() - predicted), 0.0)
    gradient = torch.where(compete & teaches, weight * (predicted.exp() - share), 0.0)
    return (weight * terms.sum(-1, keepdim=True)).sum(), gradient


class _Scorer:
    """The scores of the blocks that r queries of each group may choose, [B, G, r, n], and what their gradients are."""

    def __init__(
        self, query: Tensor, key: Tensor, weights: Tensor, slope: Tensor | None, factor: float, candidates: _Candidates
    ) -> None:
        """query [B, G, r, Hi, Di], key [B, G, Sk, Di] or of blocks, weights [B, G, r, Hi], slope [G]. What no query sees, and queries that
        see nothing, may hold anything."""
        given = candidates
        teaches = given.blocks.any(-1)[..., None]
        self.query = torch.where(teaches[..., None], query, 0.0).transpose(2, 3)  # [B, G, Hi, r, Di]
        self.weights = torch.where(teaches, weights, 0.0).transpose(2, 3)
        self.factor, self.candidates, self.keys = factor, candidates, key.shape[2]
        seen = given.blocks if given.is_pooled else given.visible
        place = given.keys if not given.is_pooled else given.block
        if given.block is None or place is None:
            self.place, self.key = None, torch.where(seen.any(2)[..., None], key, 0.0)
            products = (self.query.flatten(2, 3) @ self.key.transpose(2, 3)).unflatten(2, self.query.shape[2:4])
        else:
            self.place = place.clamp(0, max(self.keys - 1, 0))
            self.key = torch.where(seen[..., None], rows_at(key, self.place), 0.0)
            products = torch.einsum("bghrd,bgrkd->bghrk", self.query, self.key)
        self.active = (products * factor).relu()
        scores = (self.weights[..., None] * self.active).sum(2)
        if given.is_pooled:
            first = torch.arange(self.keys, device=key.device) if given.block is None else given.block
            where = first * given.size + (given.size - 1) / 2
        else:
            where = given.keys
        self.distance = (where - given.position).to(scores.dtype)
        scores = scores if slope is None else scores + slope[:, None, None] * self.distance
        self.best = None
        if not given.is_pooled and given.size > 1:
            competing = torch.where(given.competing, scores, -math.inf)
            scores, self.best = given.per_block(competing, -math.inf).max(-1)
        self.scores = scores

    def gradients(self, of_scores: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """By query [B, G, r, Hi, Di], key, weights and slope, from that by scores."""
        if self.best is not None:
            spread = of_scores.new_zeros(*of_scores.shape, self.candidates.size).scatter_(
                -1, self.best[..., None], of_scores[..., None]
            )
            of_scores = spread.flatten(-2)[..., : self.distance.shape[-1]]
        of_weights = (of_scores[:, :, None] * self.active).sum(-1).transpose(2, 3)
        of_products = of_scores[:, :, None] * self.weights[..., None] * (self.active > 0) * self.factor
        if self.place is None:
            rows = of_products.flatten(2, 3)
            of_query = (rows @ self.key).unflatten(2, self.query.shape[2:4])
            of_key = rows.transpose(2, 3) @ self.query.flatten(2, 3)
        else:
            of_query = torch.einsum("bghrk,bgrkd->bghrd", of_products, self.key)
            of_rows = torch.einsum("bghrk,bghrd->bgrkd", of_products, self.query).flatten(2, 3)
            place = self.place.expand(*of_rows.shape[:2], -1, -1).flatten(2)[..., None].expand(of_rows.shape)
            of_key = of_rows.new_zeros(*of_rows.shape[:2], self.keys, of_rows.shape[3]).scatter_add_(2, place, of_rows)
        return of_query.transpose(2, 3), of_key, of_weights, (of_scores * self.distance).sum((0, 2, 3))
