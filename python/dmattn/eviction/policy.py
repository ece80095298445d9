"""Eviction policies: which keys a bounded cache keeps, decided every few tokens from what it holds."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dmattn import checks
from dmattn.masks import FOREVER, IntervalMask
from dmattn.weights import attention_weights


class Seen(NamedTuple):
    """What a policy decides from: the N slots of a cache's key heads, in the order of their keys' positions.

    Args:
        position: int32 [B, Hkv, N], the positions of the keys that are held, ascending, and -1 in the empty slots behind them.
        key, value: [B, Hkv, N, D or Dv].
        memory: float32 [B, Hkv, N], a number of each key that stays with it: its score or 0, until a policy writes another.
        query: [B, H, R, D], the latest R = ``policy.queries`` queries; zeros in front of the first one.
        length: tokens of each sequence so far, an int or int64 [B]; the next query stands at this position.
        scale, softcap: as in :func:`dmattn.attention`.
    """

    position: Tensor
    key: Tensor
    value: Tensor
    memory: Tensor
    query: Tensor
    length: int | Tensor
    scale: float
    softcap: float = 0.0

    @property
    def is_key(self) -> Tensor:
        """bool [B, Hkv, N], False in empty slots."""
        return self.position >= 0

    def weights(self) -> Tensor:
        """float32 [B, Hkv, H / Hkv, R, N], the attention weights of the latest R queries among the keys that are held, 0 for queries in front
        of the first one. They take memory for R x N pairs of a head."""
        mask = IntervalMask(self.position, torch.where(self.is_key, FOREVER, -1).to(torch.int32))
        first = self.length - self.query.shape[2]
        found = attention_weights(self.query, self.key, mask, scale=self.scale, softcap=self.softcap, query_offset=first)
        weights: Tensor = found.unflatten(1, (self.key.shape[1], -1)).float()
        return weights


@dataclasses.dataclass(frozen=True)
class Policy:
    """Decides which keys go: every ``every`` tokens each key head keeps its ``budget`` best keys, and the others are gone for good.

    A subclass says in :meth:`rank` how good a key is. A key that a decision drops is hidden from all later queries, so every policy makes an
    interval of each key (:func:`lifetimes`), and :class:`EvictionCache` and :class:`PagedCache` hold no more than is visible. A query sees
    the keys kept at the last decision and those after it: at most ``budget + every``.

    Args:
        budget: keys that a head keeps at a decision, at most.
        every: tokens between two decisions; 0: there is one only where :meth:`EvictionCache.evict` is called.
        local: latest keys that are kept whatever their rank.
        sink_keys: first keys that are kept whatever their rank.
        floor: the part of the budget that is each head's own. The rest goes to the best keys of all heads of a layer together, whose ranks
            must then be comparable: budgets differ from head to head as in Ada-KV (arXiv 2407.11550). 1: all heads keep equally many.

    Raises:
        TypeError, ValueError: a size is no int, negative, or the local and the first keys are more than the budget.
    """

    budget: int
    _: dataclasses.KW_ONLY
    every: int = 1
    local: int = 0
    sink_keys: int = 0
    floor: float = 1.0

    def __post_init__(self) -> None:
        checks.positive_int("budget", self.budget)
        for name in ("every", "local", "sink_keys", "queries"):
            checks.natural_int(name, getattr(self, name))
        checks.number("floor", self.floor, low=0.0, high=1.0)
        if self.local + self.sink_keys > self.budget:
            raise ValueError(
                f"budget: expected at least local + sink_keys = {self.local} + {self.sink_keys} keys, got {self.budget}"
            )

    @property
    def queries(self) -> int:
        """How many of the latest queries :meth:`rank` looks at."""
        return 0

    def rank(self, seen: Seen) -> Tensor:
        """How good each key is, floating point [B, Hkv, N]: higher ranks are kept, the later key where two are equal, and -inf or NaN never.

        ``seen.memory`` may be written in place. Empty slots may have any rank.
        """
        raise NotImplementedError

    @property
    def own_budget(self) -> int:
        """Keys that each head keeps before the heads compete."""
        return max(int(self.floor * self.budget), self.local + self.sink_keys)

    def slots(self, kv_heads: int) -> int:
        """Slots that a head of ``kv_heads`` needs at most: what it keeps, and the tokens until the next decision."""
        return self.own_budget + kv_heads * (self.budget - self.own_budget) + self.every

    def keeps(self, seen: Seen) -> Tensor:
        """The decision: bool [B, Hkv, N], which keys stay."""
        batch, heads, keys = seen.position.shape
        rank = checks.shaped("rank", self.rank(seen), "[B, Hkv, N]", checks.DTYPES["cpu"], B=batch, Hkv=heads, N=keys)
        rank = torch.where(seen.is_key & ~rank.isnan(), rank.clamp(max=torch.finfo(rank.dtype).max), -torch.inf)
        length = seen.length.view(-1, 1, 1) if isinstance(seen.length, Tensor) else seen.length
        is_forced = (seen.position < self.sink_keys) | (seen.position >= length - self.local)
        rank = torch.where(seen.is_key & is_forced, torch.inf, rank)
        kept = best(rank, self.own_budget)
        if self.own_budget < self.budget:
            rank = torch.where(kept & (rank > -torch.inf), torch.inf, rank)
            kept = best(rank.flatten(1), self.budget * rank.shape[1]).view_as(rank)
        return kept & (rank > -torch.inf)


def check_policy(policy: Any, num_heads: int = 1, num_kv_heads: int = 1, *, decides: bool = True) -> None:
    """Refuses what is no policy, or with ``decides`` none that decides every so many tokens, and heads that cannot be grouped."""
    checks.instance("policy", policy, Policy, "a dmattn.eviction.Policy")
    checks.each(checks.positive_int, num_heads=num_heads, num_kv_heads=num_kv_heads)
    if decides and policy.every < 1:
        raise ValueError(f"policy: expected one that decides every so many tokens, got every={policy.every}")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads: expected a multiple of num_kv_heads={num_kv_heads}, got {num_heads}")


def best(rank: Tensor, count: int) -> Tensor:
    """bool like rank [.., N], True for the ``count`` highest ones; where two are equal, the later one comes first."""
    order = rank.flip(-1).argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(rank, dtype=torch.bool).scatter(-1, order[..., :count], True).flip(-1)


# Policies that need no attention weights ----------------------------------------------------------------------------------------------


class Streaming(Policy):
    """StreamingLLM (arXiv 2309.17453): the first ``sink_keys`` keys and the latest ones."""

    def rank(self, seen: Seen) -> Tensor:
        return seen.position.double()


class Scored(Policy):
    """The keys with the best scores, given as ``scores``. With ``every=1`` this is :meth:`dmattn.IntervalMask.top_k`: a selection
    of ``window`` keys, ``local`` and ``sink_keys`` is ``Scored(window + local - 1 + sink_keys, local=local - 1, sink_keys=sink_keys)``."""

    def rank(self, seen: Seen) -> Tensor:
        return seen.memory


class Gated(Policy):
    """Dynamic memory sparsification (DMS, arXiv 2506.05345): a key whose gate is above 0 goes once it is ``local`` tokens old.

    Gates are learned logits that come as ``scores`` with the keys. The budget is a bound that memory needs: beyond it the keys with the highest
    gates go first, too.
    """

    def rank(self, seen: Seen) -> Tensor:
        return torch.where(seen.memory > 0, -torch.inf, -seen.memory)


class KeyNorm(Policy):
    """The keys of smallest L2 norm (arXiv 2406.11430)."""

    def rank(self, seen: Seen) -> Tensor:
        norm: Tensor = seen.key.float().norm(dim=-1)
        return -norm


# Policies that look at attention weights ---------------------------------------------------------------------------------------------


class H2O(Policy):
    """Heavy hitters (H2O, arXiv 2306.14048): the keys with the largest sums of attention weights over all queries since they came."""

    @property
    def queries(self) -> int:
        return self.every

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive_int("every", self.every)

    def rank(self, seen: Seen) -> Tensor:
        return seen.memory.add_(seen.weights().sum((2, 3)))


class TOVA(Policy):
    """Token omission via attention (TOVA, arXiv 2401.06104): the keys with the largest weights of the latest query, the mean over all heads."""

    @property
    def queries(self) -> int:
        return 1

    def rank(self, seen: Seen) -> Tensor:
        return seen.weights()[..., 0, :].mean((1, 2))[:, None].expand_as(seen.memory)


@dataclasses.dataclass(frozen=True)
class SnapKV(Policy):
    """SnapKV (arXiv 2404.14469): the latest ``local`` keys, and those with the largest mean weights of the latest ``local`` queries, averaged
    over ``pool`` neighbours among the keys that are held.

    Args:
        pool: an odd number.
    """

    _: dataclasses.KW_ONLY
    local: int = 32
    pool: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.each(checks.positive_int, local=self.local, pool=self.pool)
        if self.pool % 2 == 0:
            raise ValueError(f"pool: expected an odd number, got {self.pool}")

    @property
    def queries(self) -> int:
        return self.local

    def rank(self, seen: Seen) -> Tensor:
        return F.avg_pool1d(seen.weights().mean((2, 3)), self.pool, stride=1, padding=self.pool // 2)


@dataclasses.dataclass(frozen=True)
class ExpectedAttention(Policy):
    """Expected attention (arXiv 2510.00636): the keys to which queries like the latest ``observed`` will give the largest weights, times the
    norms of their values. Queries are taken to be normally distributed.

    The paper turns the distribution on to later positions; here it is that of the rotated queries themselves.

    Args:
        observed: number of queries, > 0.
    """

    _: dataclasses.KW_ONLY
    observed: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive_int("observed", self.observed)

    @property
    def queries(self) -> int:
        return self.observed

    def rank(self, seen: Seen) -> Tensor:
        kv_heads, count = seen.key.shape[1], seen.query.shape[2]
        real = torch.as_tensor(seen.length, device=seen.key.device).clamp(max=count).view(-1, 1, 1, 1)
        query = seen.query.float()
        mean = query.sum(2, keepdim=True) / real
        is_query = torch.arange(count, device=query.device).view(1, 1, -1, 1) >= count - real
        centred = torch.where(is_query, query - mean, 0.0)
        covariance = centred.transpose(2, 3) @ centred / real[..., :1]
        key = seen.key.float().repeat_interleave(query.shape[1] // kv_heads, dim=1)
        logits = seen.scale * (key @ mean.transpose(2, 3))[..., 0] + seen.scale**2 / 2 * ((key @ covariance) * key).sum(-1)
        logits = logits.unflatten(1, (kv_heads, -1)).masked_fill(~seen.is_key[:, :, None], -torch.inf)
        norm: Tensor = seen.value.float().norm(dim=-1)
        expected: Tensor = logits.softmax(-1).mean(2) * norm
        return expected
