"""Decisions of an eviction policy over a whole sequence, and the interval mask that they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from dmattn import checks
from dmattn.eviction.policy import Policy, Seen, check_policy
from dmattn.masks import FOREVER, IntervalMask


@torch.no_grad()
def lifetimes(
    policy: Policy,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
) -> IntervalMask:
    """The mask of a policy over whole sequences, for prefill and for training: a key that a decision drops at position t has ``end = t``.

    These are the visible sets of :class:`EvictionCache` and :class:`PagedCache`, bit for bit. Memory is what the cache needs, and weights are
    computed for those queries alone that the policy looks at; no tensor has S x S elements.

    Args:
        policy: a :class:`Policy` with ``every > 0``.
        query: [B, H, S, D].
        key, value: [B, Hkv, S, D or Dv].
        scores: [B, Hkv, S], for policies that rank by scores.
        scale, softcap: as in :func:`dmattn.attention`; default D ** -0.5 and 0.

    Returns:
        a mask [B, Hkv, S] for ``dmattn.attention(query, key, value, mask)``. It is causal, and has no gradient.

    Raises:
        TypeError, ValueError: tensors whose shapes do not belong together, or a policy that decides only when it is asked.
    """
    sizes = check_tokens(query, key, value, scores)
    return interval_of(decisions(policy, query, key, value, scores, scale=scale, softcap=softcap), sizes, key.device)


def interval_of(
    dropped: Iterable[tuple[int, Tensor]], shape: tuple[int, int, int], device: torch.device | str | None = None
) -> IntervalMask:
    """The mask of any sequence of decisions, however they came about: a key is visible from its own position on until it is dropped.

    Args:
        dropped: pairs of the position of the first query after a decision, and the positions of the keys that it drops, integers
            [B, Hkv, any number] with -1 for none. Of several decisions about one key the earliest counts.
        shape: (B, Hkv, S).
        device: of the mask.

    Raises:
        TypeError, ValueError: keys of another type or shape, or one beyond S; a position that is none.
    """
    batch, kv_heads, length = shape
    end = torch.full((batch, kv_heads, length + 1), FOREVER, dtype=torch.int32, device=device)
    for at, keys in dropped:
        checks.shaped("dropped", keys, "[B, Hkv, any number]", (torch.int32, torch.int64), B=batch, Hkv=kv_heads)
        checks.length("position", at)
        if checks.values_are_known(keys) and bool((keys >= length).any()):
            raise ValueError(f"dropped: expected positions below S={length}, got {int(keys.max())}")
        index = torch.where(keys < 0, length, keys).long()
        end.scatter_reduce_(2, index, torch.full_like(index, at, dtype=torch.int32), "amin")
    start = torch.arange(length, dtype=torch.int32, device=device).view(1, 1, -1)
    return IntervalMask.from_tensor(torch.stack((start.expand(shape), end[..., :length]), 2))


@torch.no_grad()
def decisions(
    policy: Policy,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Iterator[tuple[int, Tensor]]:
    """What :func:`interval_of` takes, one decision after another; arguments as of :func:`lifetimes`."""
    batch, kv_heads, length = check_tokens(query, key, value, scores)
    check_policy(policy)
    scale = query.shape[3] ** -0.5 if scale is None else checks.scale(scale)
    position = torch.full((batch, kv_heads, policy.slots(kv_heads)), -1, dtype=torch.int32, device=key.device)
    memory = torch.zeros(position.shape, device=key.device)
    for last in range(policy.every, length + 1, policy.every):
        # Put the new keys behind those that are held.
        new = torch.arange(last - policy.every, last, dtype=torch.int32, device=key.device).expand(batch, kv_heads, -1)
        index = (position >= 0).sum(2, keepdim=True) + torch.arange(policy.every, device=key.device)
        position.scatter_(2, index, new)
        memory.scatter_(2, index, torch.zeros(new.shape, device=key.device) if scores is None else scores[..., new[0, 0]].float())
        # Decide, and close the gaps.
        held_key, held_value = (held_rows(x, position) for x in (key, value))
        latest = latest_queries(query[:, :, :last], policy.queries)
        kept = policy.keeps(Seen(position, held_key, held_value, memory, latest, last, scale, checks.softcap(softcap)))
        yield last, torch.where(kept, -1, position)
        position, memory = closed_up(kept, position, memory, empty=(-1, 0))


def check_tokens(query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None) -> tuple[int, int, int]:
    """Refuses tensors that do not belong together, and gives (B, Hkv, T)."""
    batch, kv_heads, length, head_dim = checks.shaped("key", key, "[B, Hkv, T, D]").shape
    checks.shaped("query", query, "[B, H, T, D]", (), key, "key", B=batch, T=length, D=head_dim)
    checks.shaped("value", value, "[B, Hkv, T, Dv]", (), key, "key", B=batch, Hkv=kv_heads, T=length)
    if kv_heads == 0 or query.shape[1] % kv_heads:
        raise ValueError(f"query: expected [B, H, T, D] with a multiple H of Hkv={kv_heads}, got {checks.shape_of(query)}")
    if scores is not None:
        checks.shaped("scores", scores, "[B, Hkv, T]", (), key, "key", B=batch, Hkv=kv_heads, T=length)
    return batch, kv_heads, length


def held_rows(rows: Tensor, position: Tensor) -> Tensor:
    """rows [B, Hkv, S, D] at positions [B, Hkv, N]; zeros where a slot is empty."""
    index = position.clamp(min=0).long()[..., None].expand(-1, -1, -1, rows.shape[3])
    return rows.gather(2, index).masked_fill((position < 0)[..., None], 0)


def latest_queries(query: Tensor, count: int) -> Tensor:
    """The last ``count`` queries of [B, H, T, D], behind zeros if there are fewer."""
    latest = query[:, :, max(query.shape[2] - count, 0) :] if count else query[:, :, :0]
    return torch.nn.functional.pad(latest, (0, 0, count - latest.shape[2], 0))


def closed_up(kept: Tensor, *slots: Tensor, empty: tuple[float, ...]) -> list[Tensor]:
    """Each of slots [B, Hkv, N, ..] with the kept ones in front, in their order, and its ``empty`` number behind them."""
    order = kept.logical_not().to(torch.int8).argsort(dim=2, stable=True)
    is_gone = ~kept.gather(2, order)

    def as_shape(given: Tensor, like: Tensor) -> Tensor:
        return given.view(*given.shape, *[1] * (like.dim() - 3))

    return [
        x.gather(2, as_shape(order, x).expand_as(x)).masked_fill_(as_shape(is_gone, x), nothing)
        for x, nothing in zip(slots, empty, strict=True)
    ]
