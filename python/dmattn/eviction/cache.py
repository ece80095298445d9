"""EvictionCache: generating with a policy that evicts keys, in a bounded cache of fixed size."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from dmattn import checks
from dmattn.autograd import refuse_gradients
from dmattn.cache import BoundedCache
from dmattn.eviction.lifetimes import check_tokens, closed_up, latest_queries
from dmattn.eviction.policy import Policy, Seen, check_policy


class EvictionCache(nn.Module):
    """Keys and values of a layer that generates while a policy evicts keys: exactly the visible sets of :func:`lifetimes`, bit for bit.

    It drives a :class:`dmattn.BoundedCache` of ``policy.slots(num_kv_heads)`` slots, so memory is the same at every length. All sequences
    of the batch are equally long; :class:`PagedCache` takes sequences of different lengths. How a history is cut into calls changes no
    decision: they fall behind every ``policy.every`` tokens.

    Args:
        policy: a :class:`Policy`.
        batch_size, num_heads, num_kv_heads: B, H and Hkv.
        head_dim, value_dim: D and Dv, multiples of 8 up to 256; Dv is D by default.
        slots: keys that a head has room for; default what the policy needs. A policy with ``every=0`` needs this number.
        dtype, device: as of :class:`dmattn.BoundedCache`.

    Attributes:
        cache: the BoundedCache. Its keys lie in the order of their positions.
        memory: float32 [B, Hkv, N], see :class:`Seen`.
        query: [B, H, R, D], the latest queries that the policy looks at.
        length: how many tokens were taken in, an int.

    Raises:
        TypeError, ValueError: a wrong type or size.
    """

    memory: Tensor
    query: Tensor

    def __init__(
        self,
        policy: Policy,
        batch_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        slots: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_policy(policy, num_heads, num_kv_heads, decides=False)
        if slots is None and policy.every == 0:
            raise ValueError("slots: expected a number for a policy with every=0, got None")
        needed = policy.slots(num_kv_heads)
        slots = needed if slots is None else slots
        checks.positive_int("slots", slots)
        if slots < needed:
            raise ValueError(f"slots: expected at least the {needed} that the policy needs, got {slots}")
        self.policy, self.length = policy, 0
        self.cache = BoundedCache(batch_size, num_kv_heads, slots, head_dim, value_dim, dtype=dtype, device=device)
        self.register_buffer("memory", torch.zeros(self.cache.position.shape, device=device))
        self.register_buffer("query", self.cache.key.new_zeros(batch_size, num_heads, policy.queries, head_dim))

    @overload
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None = None, *, scale: float | None = None,
        softcap: float = 0.0, return_lse: Literal[False] = False,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None = None, *, scale: float | None = None,
        softcap: float = 0.0, return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: Tensor | None = None,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Takes the next T tokens of each sequence in, evicts where a decision falls, and gives the tokens' attention. There is no gradient.

        Args:
            query: [B, H, T, D].
            key, value: [B, Hkv, T, D or Dv].
            scores: [B, Hkv, T], for policies that rank by scores; they are not added to logits.
            scale, softcap: as in :func:`dmattn.attention`. Give the same in every call.
            return_lse: also return the log-sum-exp of each query's logits.

        Returns:
            out [B, H, T, Dv], or (out, lse [B, H, T]).

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`dmattn.BoundedCache.attend`; or more tokens than slots where ``every=0``.
        """
        checks.flag("return_lse", return_lse)
        batch, kv_heads, tokens = check_tokens(query, key, value, scores)
        if query.shape[1] != self.query.shape[1]:
            raise ValueError(f"query: expected H={self.query.shape[1]} heads like the cache, got {query.shape[1]}")
        if tokens == 0:
            raise ValueError("query: expected at least one token, got T=0")
        if scores is not None and scores.requires_grad and torch.is_grad_enabled():
            refuse_gradients("EvictionCache.attend")
        every, slots = self.policy.every, self.cache.key.shape[2]
        parts, done = [], 0
        while done < tokens:
            count = min(tokens - done, every - self.length % every) if every else tokens
            if not every and bool((self.held + count > slots).any()):
                raise ValueError(f"slots: expected room for {count} more tokens, got a cache of {slots} slots")
            q, k, v = (x[:, :, done : done + count] for x in (query, key, value))
            new = k.new_zeros((batch, kv_heads, count), dtype=torch.float32)
            parts.append(self.cache.attend(q, k, v, new, scale=scale, softcap=softcap, return_lse=True))
            if scores is not None:
                new = scores[:, :, done : done + count].float()
            place = (self.cache.position - self.length).clamp(0, count - 1).long()
            self.memory.copy_(torch.where(self.cache.position >= self.length, new.gather(2, place), self.memory))
            if self.policy.queries:
                self.query.copy_(latest_queries(torch.cat((self.query, q), 2), self.policy.queries))
            self.length, done = self.length + count, done + count
            if every and self.length % every == 0:
                self.evict(scale=scale, softcap=softcap)
        out, lse = parts[0] if len(parts) == 1 else (torch.cat(part, 2) for part in zip(*parts, strict=True))
        return (out, lse) if return_lse else out

    forward = attend

    @torch.no_grad()
    def evict(self, *, scale: float | None = None, softcap: float = 0.0) -> None:
        """Lets the policy decide now. :meth:`attend` does so behind every ``policy.every`` tokens.

        Args:
            scale, softcap: as of :meth:`attend`.
        """
        cache = self.cache
        scale = cache.key.shape[3] ** -0.5 if scale is None else checks.scale(scale)
        seen = Seen(cache.position, cache.key, cache.value, self.memory, self.query, self.length, scale, checks.softcap(softcap))
        slots = (cache.key, cache.value, cache.score, cache.position, self.memory)
        for slot, closed in zip(slots, closed_up(self.policy.keeps(seen), *slots, empty=(0, 0, -torch.inf, -1, 0)), strict=True):
            slot.copy_(closed)

    def reset(self) -> None:
        """Makes all sequences empty."""
        self.cache.reset()
        self.memory.zero_(), self.query.zero_()
        self.length = 0

    @property
    def held(self) -> Tensor:
        """int64 [B, Hkv]: keys that each head holds now."""
        return (self.cache.position >= 0).sum(2)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; the same at every length."""
        return self.cache.nbytes + sum(x.numel() * x.element_size() for x in (self.memory, self.query))

    def get_extra_state(self) -> dict[str, Any]:
        return {"length": self.length, **self._sizes()}

    def set_extra_state(self, state: Any) -> None:
        self.length = state["length"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        saved = state_dict.get(f"{prefix}_extra_state")
        if saved is not None:
            earlier = "an earlier version's, without sizes"
            sizes = {name: saved.get(name) for name in self._sizes()} if isinstance(saved, dict) else earlier
            if sizes != self._sizes():
                raise ValueError(
                    f"{prefix}state_dict: expected that of a cache whose policy has {self._sizes()}, got one with {sizes}"
                )
            checks.natural_int("length", saved.get("length"))
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _sizes(self) -> dict[str, Any]:
        """What a policy's caches have in common."""
        numbers = {name: getattr(self.policy, name) for name in ("budget", "every", "local", "sink_keys", "queries")}
        return {"kind": type(self.policy).__name__} | numbers
