"""Bounded caches whose slots lie on pages of a shared pool: a server's sequences join, grow, leave, and go to the CPU and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from dmattn import checks
from dmattn.attention import attention
from dmattn.autograd import refuse_gradients
from dmattn.decode import MAX_QUERIES, PAGE_UNIT, decode_attention
from dmattn.eviction.lifetimes import check_tokens, closed_up, latest_queries
from dmattn.eviction.policy import Policy, Seen, check_policy
from dmattn.masks import ALWAYS, FOREVER, IntervalMask


class OutOfPagesError(RuntimeError):
    """A pool has fewer free pages than a call needs. The call has changed nothing: free some, or swap a sequence out, and try again."""


class PagePool:
    """Pages for the slots of any number of caches, layers and sequences, and the list of those that are free.

    A page holds ``page_size`` slots of one key head of one sequence. Pages are taken as sequences grow and given back as policies evict.

    Args:
        pages: their number.
        page_size: slots of a page, a multiple of 16.
        head_dim, value_dim: D and Dv, multiples of 8 up to 256; Dv is D by default.
        dtype, device: of keys and values; default torch's.

    Attributes:
        key: [pages, page_size, 1, D], as :func:`dmattn.decode_attention` takes it.
        value: [pages, page_size, 1, Dv], likewise.
        position: int32 [pages, page_size], see :class:`Seen`.
        memory: float32 [pages, page_size], see :class:`Seen`.
        free: numbers of the free pages; the last one is taken next.

    Raises:
        TypeError, ValueError: a wrong type or size.
    """

    def __init__(
        self, pages: int, page_size: int, head_dim: int, value_dim: int | None = None, *, dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        value_dim = head_dim if value_dim is None else value_dim
        checks.each(checks.positive_int, pages=pages, page_size=page_size, head_dim=head_dim, value_dim=value_dim)
        if page_size % PAGE_UNIT:
            raise ValueError(f"page_size: expected a multiple of {PAGE_UNIT}, got {page_size}")
        self.page_size = page_size
        self.key = torch.zeros(pages, page_size, 1, head_dim, dtype=dtype, device=device)
        self.value = self.key.new_zeros(pages, page_size, 1, value_dim)
        self.position = torch.full((pages, page_size), -1, dtype=torch.int32, device=device)
        self.memory = torch.zeros(pages, page_size, device=device)
        self.free = list(range(pages - 1, -1, -1))
        self._is_taken = [False] * pages

    def take(self, count: int) -> list[int]:
        """Takes ``count`` of the free pages: their numbers.

        Raises:
            TypeError, ValueError: count is no int >= 0.
            OutOfPagesError: there are fewer.
        """
        checks.natural_int("count", count)
        if count > len(self.free):
            raise OutOfPagesError(
                f"pages: expected at least {count} that are free, got {len(self.free)} of {len(self._is_taken)}"
            )
        taken = [self.free.pop() for _ in range(count)]
        for page in taken:
            self._is_taken[page] = True
        return taken

    def give(self, pages: Iterable[int]) -> None:
        """Makes pages free again.

        Raises:
            ValueError: one of them is free already, or there is no such page.
        """
        for page in pages:
            if not 0 <= page < len(self._is_taken):
                raise ValueError(f"pages: expected numbers below {len(self._is_taken)}, got {page}")
            if not self._is_taken[page]:
                raise ValueError(f"pages: expected pages that were taken, got {page}, which is free")
            self._is_taken[page] = False
            self.free.append(page)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(x.numel() * x.element_size() for x in self._rows())

    def pages_for(self, slots: int) -> int:
        """How many pages hold so many slots."""
        return -(-slots // self.page_size)

    def _rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """key and value [slots of all pages, D or Dv], position and memory [slots of all pages], as views."""
        return self.key.flatten(0, 2), self.value.flatten(0, 2), self.position.flatten(), self.memory.flatten()


@dataclasses.dataclass
class _Sequence:
    """One sequence of a cache."""

    pages: list[list[int]]  # of each key head, in the order of slots
    counts: list[int]  # keys that each key head holds
    query: Tensor  # [H, R, D], the latest ones that the policy looks at
    length: int = 0
    swapped: tuple[Tensor, ...] | None = None  # rows of all heads on the CPU, while the sequence has no pages


class PagedCache:
    """The keys that a layer holds for many sequences while a policy evicts keys, on pages of a shared pool.

    Every key head of every sequence has pages of its own, as many as its keys need, so heads with small budgets and short sequences leave
    memory to others. A sequence sees what :func:`lifetimes` says, bit for bit, whatever else is in the batch, also after it was swapped
    out and in. Keys of a head lie in the order of their positions without gaps, so :func:`dmattn.decode_attention` reads the pages as
    they are: a sequence and head of ours is one of its sequences. Calls of more than 16 tokens gather the keys held before.

    Where torch's matrix products round differently with the size of a batch, as they can on a GPU, ranks that are computed from attention
    weights may differ in their last bits, and so may the choice between two keys that are about equally good.

    Lengths and page numbers lie on the host, as a scheduler has them: where a decision falls the host waits for the device to learn how many
    keys were kept. There is no gradient.

    Args:
        policy: a :class:`Policy` with ``every > 0``.
        pool: a :class:`PagePool`; layers with the same head sizes can share one.
        num_heads, num_kv_heads: H and Hkv.

    Raises:
        TypeError, ValueError: a wrong type or size, or a pool that is too small for one sequence.
    """

    def __init__(self, policy: Policy, pool: PagePool, num_heads: int, num_kv_heads: int) -> None:
        check_policy(policy, num_heads, num_kv_heads)
        checks.instance("pool", pool, PagePool, "a dmattn.eviction.PagePool")
        self.policy, self.pool, self.num_heads, self.num_kv_heads = policy, pool, num_heads, num_kv_heads
        if self.most_pages > len(pool._is_taken):
            raise ValueError(f"pool: expected the {self.most_pages} pages that a sequence may need, got {len(pool._is_taken)}")
        self._sequences: dict[Hashable, _Sequence] = {}

    # A sequence's life ----------------------------------------------------------------------------------------------------------

    def join(self, name: Hashable) -> None:
        """Begins an empty sequence. It has no pages until its first token.

        Raises:
            ValueError: there is one of this name.
        """
        if name in self._sequences:
            raise ValueError(f"name: expected one that no sequence has, got {name!r}")
        query = self.pool.key.new_zeros(self.num_heads, self.policy.queries, self.pool.key.shape[3])
        self._sequences[name] = _Sequence([[] for _ in range(self.num_kv_heads)], [0] * self.num_kv_heads, query)

    def leave(self, name: Hashable) -> None:
        """Ends a sequence and gives its pages back."""
        for pages in self._get(name).pages:
            self.pool.give(pages)
        del self._sequences[name]

    def swap_out(self, name: Hashable) -> None:
        """Moves a sequence's keys to the CPU and gives its pages back, so that others can run."""
        sequence = self._present(name)
        index = self._held_rows(sequence)
        sequence.swapped = (*(x[index].cpu() for x in self.pool._rows()), sequence.query.cpu())
        for pages in sequence.pages:
            self.pool.give(pages)
            pages.clear()

    def swap_in(self, name: Hashable) -> None:
        """Brings a sequence back that was swapped out; its pages may be others.

        Raises:
            OutOfPagesError: there are too few.
            ValueError: it was not swapped out.
        """
        sequence = self._get(name)
        if sequence.swapped is None:
            raise ValueError(f"name: expected a sequence that was swapped out, got {name!r}")
        self._take([sequence], 0)
        index = self._held_rows(sequence)
        *held, query = sequence.swapped
        for to, given in zip(self.pool._rows(), held, strict=True):
            to[index] = given.to(to.device)
        sequence.query, sequence.swapped = query.to(self.pool.key.device), None

    def length(self, name: Hashable) -> int:
        """How many tokens of a sequence were taken in."""
        return self._get(name).length

    def pages_held(self, name: Hashable) -> int:
        """How many pages a sequence has now."""
        return sum(len(pages) for pages in self._get(name).pages)

    def positions(self, name: Hashable) -> list[list[int]]:
        """The positions of the keys that each key head of a sequence holds. This waits for the device."""
        sequence = self._present(name)
        found = self.pool.position.flatten()[self._rows_of([sequence])[0]].tolist()
        return [row[:count] for row, count in zip(found, sequence.counts, strict=True)]

    @property
    def most_pages(self) -> int:
        """Pages that a sequence may need at most."""
        policy, heads = self.policy, self.num_kv_heads
        if policy.own_budget == policy.budget:
            return heads * self.pool.pages_for(policy.budget + policy.every)
        return heads * (policy.budget + policy.every) // self.pool.page_size + heads

    def pages_needed(self, names: Sequence[Hashable], tokens: int) -> int:
        """Pages that :meth:`attend` asks the pool for, in addition to those that these sequences have; for :meth:`swap_in` with 0 tokens."""
        return sum(self._needed(self._get(name), tokens) for name in names)

    # Attention ------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def attend(
        self,
        names: Sequence[Hashable],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: Tensor | None = None,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        """Takes the next T tokens of some sequences in, evicts where decisions fall, and gives the tokens' attention.

        Args:
            names: B different sequences, of any lengths.
            query: [B, H, T, D].
            key, value: [B, Hkv, T, D or Dv].
            scores: [B, Hkv, T], for policies that rank by scores; they are not added to logits.
            scale, softcap: as in :func:`dmattn.attention`. Give the same in every call.

        Returns:
            out [B, H, T, Dv].

        Raises:
            OutOfPagesError: the pool has fewer than :meth:`pages_needed`; nothing has changed.
            TypeError, ValueError: a wrong type, shape or name, or a sequence that is swapped out.
            RuntimeError: a tensor requires a gradient.
        """
        batch, _, tokens = check_tokens(query, key, value, scores)
        names = list(names)
        if any(x is not None and x.requires_grad for x in (query, key, value, scores)):
            refuse_gradients("PagedCache.attend")
        if len(set(names)) != batch or len(names) != batch:
            raise ValueError(f"names: expected B={batch} different sequences, got {list(names)}")
        size, value_size = self.pool.key.shape[3], self.pool.value.shape[3]
        like = ((self.pool.key.dtype,), self.pool.key, "the pool")
        checks.shaped("query", query, "[B, H, T, D]", *like, H=self.num_heads, D=size)
        checks.shaped("key", key, "[B, Hkv, T, D]", *like, Hkv=self.num_kv_heads, D=size)
        checks.shaped("value", value, "[B, Hkv, T, Dv]", *like, Hkv=self.num_kv_heads, Dv=value_size)
        sequences = [self._present(name) for name in names]
        needed = self.pages_needed(names, tokens)
        if needed > len(self.pool.free):
            raise OutOfPagesError(f"pages: expected at least {needed} that are free, got {len(self.pool.free)}")
        scale = query.shape[3] ** -0.5 if scale is None else checks.scale(scale)
        softcap = checks.softcap(softcap)
        every, parts, done = self.policy.every, [], 0
        while done < tokens and sequences:
            count = min(tokens - done, *(every - sequence.length % every for sequence in sequences))
            q, k, v = (x[:, :, done : done + count] for x in (query, key, value))
            new_scores = None if scores is None else scores[:, :, done : done + count]
            parts.append(self._attend(sequences, q, k, v, new_scores, scale, softcap))
            done += count
            due = [sequence for sequence in sequences if sequence.length % every == 0]
            if due:
                self._evict(due, scale, softcap)
        return torch.cat(parts, 2) if parts else query.new_zeros(*query.shape[:3], value.shape[3])

    def _attend(
        self,
        sequences: list[_Sequence],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: Tensor | None,
        scale: float,
        softcap: float,
    ) -> Tensor:
        """Writes tokens to their slots, and returns their attention; no decision falls among them."""
        tokens, device = key.shape[2], key.device
        held = self._counts(sequences)
        self._take(sequences, tokens)
        # Put the new keys behind those that are held.
        new = torch.arange(tokens, device=device)
        rows = self._rows_of(sequences).gather(2, held[..., None] + new)
        first = torch.tensor([sequence.length for sequence in sequences], dtype=torch.int32, device=device)
        position = (first.view(-1, 1, 1) + new.int()).expand(rows.shape)
        memory = torch.zeros(rows.shape, device=device) if scores is None else scores.float()
        old = None if tokens <= MAX_QUERIES else self._gathered(sequences, max(max(s.counts) for s in sequences))
        for to, given in zip(self.pool._rows(), (key, value, position, memory), strict=True):
            to[rows] = given
        for i, sequence in enumerate(sequences):
            sequence.length += tokens
            sequence.counts = [count + tokens for count in sequence.counts]
            if self.policy.queries:
                latest = torch.cat((sequence.query, query[i]), 1)[None]
                sequence.query = latest_queries(latest, self.policy.queries)[0].clone()
        if old is None:  # a sequence and head of ours is a sequence of one head to the op
            heads = query.unflatten(1, (self.num_kv_heads, -1)).flatten(0, 1)
            table, lengths = self._tables(sequences).flatten(0, 1), (held + tokens).int().flatten()
            out = decode_attention(heads, self.pool.key, self.pool.value, lengths, page_table=table, scale=scale, softcap=softcap)
            joined: Tensor = out.unflatten(0, (-1, self.num_kv_heads)).flatten(1, 2)
            return joined
        is_key = torch.cat((old[2] >= 0, torch.ones_like(position, dtype=torch.bool)), 2)
        end = torch.where(is_key, FOREVER, ALWAYS).to(torch.int32)
        mask = IntervalMask(torch.full_like(end, ALWAYS), end)
        key, value = torch.cat((old[0], key), 2), torch.cat((old[1], value), 2)
        return attention(query, key, value, mask, is_causal=True, scale=scale, softcap=softcap)

    def _evict(self, sequences: list[_Sequence], scale: float, softcap: float) -> None:
        """Lets the policy decide for some sequences, closes gaps, and gives back pages that hold nothing."""
        slots = self._gathered(sequences, self.policy.slots(self.num_kv_heads))
        key, value, position, memory = slots
        length = torch.tensor([sequence.length for sequence in sequences], device=key.device)
        query = torch.stack([sequence.query for sequence in sequences])
        kept = self.policy.keeps(Seen(position, key, value, memory, query, length, scale, softcap))
        closed = closed_up(kept, *slots, empty=(0, 0, -1, 0))
        counts = kept.sum(2)
        is_key = torch.arange(kept.shape[2], device=key.device) < counts[..., None]
        rows = self._rows_of(sequences)[..., : kept.shape[2]][is_key]
        for to, given in zip(self.pool._rows(), closed, strict=True):
            to[rows] = given[is_key]
        for sequence, of_heads in zip(sequences, counts.tolist(), strict=True):
            sequence.counts = of_heads
            for pages, count in zip(sequence.pages, of_heads, strict=True):
                needed = self.pool.pages_for(count)
                self.pool.give(pages[needed:])
                del pages[needed:]

    # Pages ----------------------------------------------------------------------------------------------------------------------

    def _get(self, name: Hashable) -> _Sequence:
        if name not in self._sequences:
            raise ValueError(f"name: expected a sequence that has joined, got {name!r}")
        return self._sequences[name]

    def _present(self, name: Hashable) -> _Sequence:
        sequence = self._get(name)
        if sequence.swapped is not None:
            raise ValueError(f"name: expected a sequence with pages, got {name!r}, which is swapped out")
        return sequence

    def _needed(self, sequence: _Sequence, tokens: int) -> int:
        slots = self.policy.slots(self.num_kv_heads)
        most = sum(self.pool.pages_for(min(count + tokens, slots)) for count in sequence.counts)
        return min(most, self.most_pages) - sum(len(pages) for pages in sequence.pages)

    def _take(self, sequences: list[_Sequence], tokens: int) -> None:
        """Gives each head the pages that so many more tokens need."""
        missing = [
            (pages, self.pool.pages_for(count + tokens) - len(pages))
            for sequence in sequences
            for pages, count in zip(sequence.pages, sequence.counts, strict=True)
        ]
        taken = self.pool.take(sum(count for _, count in missing))
        for pages, count in missing:
            pages.extend(taken.pop() for _ in range(count))

    def _counts(self, sequences: list[_Sequence]) -> Tensor:
        """int64 [B, Hkv], how many keys each head holds."""
        return torch.tensor([sequence.counts for sequence in sequences], device=self.pool.key.device)

    def _tables(self, sequences: list[_Sequence]) -> Tensor:
        """int32 [B, Hkv, pages of a head], 0 where a head has fewer."""
        width = self.pool.pages_for(self.policy.slots(self.num_kv_heads))
        tables = [[pages + [0] * (width - len(pages)) for pages in sequence.pages] for sequence in sequences]
        return torch.tensor(tables, dtype=torch.int32, device=self.pool.key.device)

    def _rows_of(self, sequences: list[_Sequence]) -> Tensor:
        """int64 [B, Hkv, slots]: where each slot of a head lies among the pool's; it means nothing beyond a head's pages."""
        slot = torch.arange(self.pool.page_size, device=self.pool.key.device)
        return (self._tables(sequences).long()[..., None] * self.pool.page_size + slot).flatten(2)

    def _held_rows(self, sequence: _Sequence) -> Tensor:
        """int64 [keys of all heads]: where they lie, head after head."""
        rows, counts = self._rows_of([sequence])[0], self._counts([sequence])[0]
        return rows[torch.arange(rows.shape[1], device=rows.device) < counts[:, None]]

    def _gathered(self, sequences: list[_Sequence], slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """key and value [B, Hkv, slots, D or Dv], position and memory [B, Hkv, slots]; zeros and position -1 where a slot is empty."""
        rows = self._rows_of(sequences)[..., :slots]
        is_empty = torch.arange(slots, device=rows.device) >= self._counts(sequences)[..., None]
        key, value, position, memory = (x[rows] for x in self.pool._rows())
        key.masked_fill_(is_empty[..., None], 0), value.masked_fill_(is_empty[..., None], 0)
        return key, value, position.masked_fill_(is_empty, -1), memory.masked_fill_(is_empty, 0)
