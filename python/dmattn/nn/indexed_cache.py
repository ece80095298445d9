"""IndexedCache: the cache of a layer whose indexer chooses keys for each query: all keys and index keys, of which a step reads few."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dmattn import checks
from dmattn.attention import attention
from dmattn.cache import (
    BoundedCache,
    PaddingSide,
    check_index,
    check_side,
    chosen_rows,
    positions_after,
    rolled,
    tokens_back,
)
from dmattn.cache_loaded import check_same_lengths
from dmattn.cache_recent import RecentRows, check_alike
from dmattn.decode import MAX_QUERIES, PAGE_UNIT, decode_attention
from dmattn.masks import IndexMask
from dmattn.nn.indexer import Indexer, IndexProjections
from dmattn.unsupported import scripting_refused


class IndexedCache(nn.Module):
    """Keys, values and index keys of an :class:`IndexedAttention` that generates; :meth:`IndexedAttention.new_cache` makes it.

    Heads that see local keys alone keep no others: theirs is a :class:`dmattn.BoundedCache`. The others keep all keys, because a later
    query may choose any of them. The state lies in buffers of fixed size, and no call waits for the device. Sequences may have different
    lengths; they leave and join by :meth:`reset`, or by ``lengths`` of 0.

    A layer that convolves hidden states needs their last rows, which lie in :attr:`recent` and on no page: a sequence that gets the pages and
    the length of another must get these rows, too. So a prefix can be shared only where its last rows were saved.

    With ``pages`` sequences take memory as they grow, from a pool of pages. Which pages a sequence has is the caller's to say, in
    ``page_table``, before tokens come that need them; no two sequences write to the same page. Layers may share one table
    (``cache.page_table = other.page_table``). Single tokens, and up to 16 without ``lengths``, read keys and values where they lie. Other
    calls, and the choice among index keys in every call, copy all pages of the table: make ``max_length`` no longer than needed, and give a
    long prompt alone, by :meth:`on_pages`.

    Args:
        batch_size: number of sequences B.
        num_kv_heads: key heads Hkv.
        max_length: tokens N that a sequence can have; with pages rounded up to whole ones.
        head_dim: size D of keys and values, a multiple of 8 up to 256.
        local_heads, local, sink_keys: as of the layer.
        groups, index_dim: lists of the layer's indexer, 0 for none, and the size Di of its keys.
        rewind: number of latest tokens that :meth:`rewind` can take back; all of them without local_heads and without a convolution.
        pages: number of pages P in the pool; None: memory for ``max_length`` tokens of every sequence.
        page_size: tokens of a page, a multiple of 16.
        dtype: of keys and values; default torch's.
        device: of all tensors.

    Attributes:
        key: [B, Hkv - local_heads, N + 1, D]; a token's place is its position, the last place is for tokens for which there is no room.
            With pages [P + 1, page_size, Hkv - local_heads, D], likewise with a last page.
        value: likewise.
        index_key: [B, G, N + 1, Di] or [P + 1, page_size, G, Di].
        page_table: int32 [B, N / page_size], the pages of each sequence in order, -1 for none; None without pages.
        length: int32 [B], how many tokens of each sequence were taken in.
        streaming: the cache of the local heads, or None.
        recent: the last rows of hidden states of each sequence, for a layer that convolves them; None for others. ``recent.empty(b)`` makes
            those of new sequences, ``recent[3:4].copy_(other)`` takes some over, ``recent.reorder(index)`` reorders them.

    Raises:
        TypeError, ValueError: a size of a wrong type or out of range.
    """

    key: Tensor
    value: Tensor
    index_key: Tensor
    length: Tensor
    page_table: Tensor | None

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        *,
        local_heads: int = 0,
        local: int = 0,
        sink_keys: int = 0,
        groups: int = 1,
        index_dim: int = 32,
        rewind: int = 0,
        pages: int | None = None,
        page_size: int = 64,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        checks.each(checks.positive_int, batch_size=batch_size, num_kv_heads=num_kv_heads, max_length=max_length)
        checks.each(checks.positive_int, head_dim=head_dim, index_dim=index_dim)
        checks.each(checks.head_size, head_dim=head_dim, index_dim=index_dim)
        checks.natural_int("groups", groups)
        checks.each(checks.length, local=local, sink_keys=sink_keys, rewind=rewind)
        if max_length >= checks.MAX_LENGTH:
            raise ValueError(f"max_length: expected less than {checks.MAX_LENGTH}, got {max_length}")
        checks.local_heads(local_heads, num_kv_heads, local)
        options: dict[str, Any] = {"dtype": torch.get_default_dtype() if dtype is None else dtype, "device": device}
        self.streaming: BoundedCache | None = None
        if local_heads:
            self.streaming = BoundedCache(
                batch_size, local_heads, 0, head_dim, local=local, sink_keys=sink_keys, rewind=rewind, **options
            )
        heads, table = num_kv_heads - local_heads, None
        if pages is None:
            shapes = [(batch_size, of, max_length + 1, size) for of, size in ((heads, head_dim), (groups, index_dim))]
        else:
            checks.each(checks.positive_int, pages=pages, page_size=page_size)
            if page_size % PAGE_UNIT:
                raise ValueError(f"page_size: expected a multiple of {PAGE_UNIT}, got {page_size}")
            most = -(-max_length // page_size)
            if most * page_size > checks.MAX_LENGTH:
                raise ValueError(
                    f"max_length: expected up to {checks.MAX_LENGTH} in whole pages of {page_size}, got {max_length}"
                )
            shapes = [(pages + 1, page_size, of, size) for of, size in ((heads, head_dim), (groups, index_dim))]
            table = torch.full((batch_size, most), -1, dtype=torch.int32, device=device)
        self.register_buffer("key", torch.zeros(*shapes[0], **options))
        checks.dtype("dtype", self.key, checks.DTYPES.get(self.key.device.type, checks.DTYPES["cpu"]))
        self.register_buffer("value", torch.zeros_like(self.key))
        self.register_buffer("index_key", torch.zeros(*shapes[1], **options))
        self.register_buffer("length", torch.zeros(batch_size, dtype=torch.int32, device=device))
        self.register_buffer("page_table", table)
        self.recent: RecentRows | None = None

    def on_pages(self, page_table: Tensor, length: Tensor, recent: RecentRows | None = None) -> IndexedCache:
        """A cache of other sequences on the same pages, for a batch of another size or a prompt alone.

        Args:
            page_table: int32 [b, n], as :attr:`page_table`, for up to ``n * page_size`` tokens.
            length: int32 [b], how many tokens each of them has. Calls write to it.
            recent: of a layer that convolves, the rows of the same sequences, which calls overwrite: ``cache.recent[:b]`` of sequences of
                this cache, ``cache.recent.empty(b)`` of new ones.

        Raises:
            TypeError, ValueError: a wrong type, shape or device, or a cache without pages or with local heads, which keep their own keys.
        """
        if self.page_table is None or self.streaming is not None:
            what = "without pages" if self.page_table is None else "with local heads"
            raise ValueError(f"cache: expected one with pages and without local heads, got one {what}")
        like = (self.length, "the cache")
        batch, _ = checks.shaped("page_table", page_table, "[b, n]", (torch.int32,), *like).shape
        tables = {"page_table": page_table, "length": checks.shaped("length", length, "[b]", (torch.int32,), *like, b=batch)}
        check_alike(self.recent, recent, length)
        other = copy.copy(self)
        other._buffers, other._modules = {**self._buffers, **tables}, {**self._modules, "recent": recent}
        return other

    # Use --------------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        index: IndexProjections | None,
        chooser: Indexer | IndexMask | None,
        *,
        slopes: Tensor | None = None,
        softcap: float = 0.0,
        lengths: Tensor | None = None,
        padding_side: PaddingSide = "right",
    ) -> tuple[Tensor, IndexMask]:
        """Takes the next T tokens of each sequence in, and gives their attention: a prefill, a part of one, or a decode step.

        Args:
            query: [B, H, T, D].
            key, value: [B, Hkv, T, D].
            index: what the indexer makes of the tokens; None without one.
            chooser: the indexer, or the lists of the T queries, none of which sees a later token.
            slopes: [Hkv], recency, as of :meth:`BoundedCache.attend`.
            softcap, lengths, padding_side: as of :meth:`BoundedCache.attend`.

        Returns:
            out [B, H, T, D], 0 for tokens that are not real, and the lists of the heads that select.

        Raises:
            TypeError, ValueError: a wrong type, shape or device. On a CPU, tokens for which there is no room or no page; on a GPU or compiled
                such a sequence takes none of the call's tokens in, its length stays, and its output means nothing.
        """
        query, key, value = self._autocast(query, key, value)
        self._check(query, key, value, index)
        tokens, first = query.shape[2], 0 if self.streaming is None else self.streaming.num_kv_heads
        check_side(padding_side)
        if lengths is not None:
            checks.per_sequence("lengths", lengths, self.length, "the cache")
        real = torch.full_like(self.length, tokens) if lengths is None else lengths.clamp(0, tokens)
        places = self._places(tokens)
        fits = self._fits(places, real)
        group = query.shape[1] // key.shape[1]
        of_streaming = (query[:, : first * group], key[:, :first], value[:, :first])
        query, key, value = query[:, first * group :], key[:, first:], value[:, first:]
        is_left = lengths is not None and padding_side == "left" and tokens > 1
        if is_left:
            shift = tokens - real.long()
            query, key, value = (rolled(given, shift) for given in (query, key, value))
            index = None if index is None else IndexProjections(*(rolled(given, shift) for given in index))
            if isinstance(chooser, IndexMask):
                chooser = chooser._replace(indices=rolled(chooser.indices.expand(self.batch_size, -1, -1, -1), shift))
        is_real = None if lengths is None else torch.arange(tokens, device=key.device) < real[:, None]
        self._write(places, key, value, index, is_real)
        after = torch.where(fits, self.length + real, self.length)
        mask = self._lists(index, chooser, after)
        out = self._attended(query, mask, None if slopes is None else slopes[first:], softcap, lengths is None, after)
        if is_real is not None:
            out = torch.where(is_real[:, None, :, None], out, 0.0)
        if is_left:
            out = rolled(out, -shift)
            mask = mask._replace(indices=rolled(mask.indices, -shift))
        if self.streaming is not None:
            options: dict[str, Any] = {
                "slopes": None if slopes is None else slopes[:first],
                "softcap": softcap,
                "select_only": True,
            }
            taken = lengths if checks.values_are_known(fits) else torch.where(fits, real, 0)
            side: PaddingSide = "right" if lengths is None else padding_side
            local = self.streaming.attend(*of_streaming, lengths=taken, padding_side=side, **options)
            out = torch.cat((local, out), 1)
        self.length.copy_(after)  # last, so that a call that is refused changes nothing
        return out, mask

    forward = attend

    def _autocast(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Under autocast, tensors in the cache's dtype."""
        if not torch._C._is_any_autocast_enabled():
            return tensors
        return tuple(x.to(self.key.dtype) if isinstance(x, Tensor) else x for x in tensors)

    def _check(self, query: Tensor, key: Tensor, value: Tensor, index: IndexProjections | None) -> None:
        """Refuses tensors that do not belong together or to the cache."""
        groups, index_dim = self._heads_of(self.index_key), self.index_key.shape[3]
        batch, kv_heads, head_dim, like = self.batch_size, self.num_kv_heads, self.key.shape[3], (self.key, "the cache")
        _, heads, tokens, _ = checks.shaped("query", query, "[B, H, T, D]", (), *like, B=batch, D=head_dim).shape
        if heads % kv_heads:
            raise ValueError(f"query: expected [B, H, T, D] with a multiple H of Hkv={kv_heads}, got {checks.shape_of(query)}")
        if tokens == 0:
            raise ValueError("query: expected at least one token a sequence, got T=0")
        for name, given in (("key", key), ("value", value)):
            checks.shaped(name, given, "[B, Hkv, T, D]", (), *like, B=batch, Hkv=kv_heads, T=tokens, D=head_dim)
        for name, given in (("query", query), ("key", key), ("value", value)):
            if given.dtype != self.key.dtype:
                raise TypeError(f"{name}: expected dtype {self.key.dtype} like the cache, got {given.dtype}")
        given_groups = 0 if index is None else index.key.shape[1]
        if given_groups != groups:
            raise ValueError(f"cache: expected one with {given_groups} groups of index keys like the layer, got {groups}")
        if index is not None:
            checks.shaped("index.key", index.key, "[B, G, T, Di]", (), *like, B=batch, G=groups, T=tokens, Di=index_dim)
        if self.page_table is not None:
            checks.shaped("cache.page_table", self.page_table, "[B, n]", (torch.int32,), *like, B=batch)

    def _heads_of(self, buffer: Tensor) -> int:
        return buffer.shape[1 if self.page_table is None else 2]

    def _places(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Where the next T tokens go: sequence and place, or page and row of it, int64 [B, T]; the last place or page where there is none."""
        position = self.length[:, None] + torch.arange(tokens, device=self.length.device)
        if self.page_table is None:
            sequence = torch.arange(self.batch_size, device=position.device)[:, None]
            return sequence.expand_as(position), position.clamp(max=self.max_length).long()
        pages, page_size = self.key.shape[0] - 1, self.key.shape[1]
        page = self.page_table.gather(1, (position.clamp(max=self.max_length - 1) // page_size).long())
        is_there = (page >= 0) & (page < pages) & (position < self.max_length)
        return torch.where(is_there, page, pages).long(), (position % page_size).long()

    def _fits(self, places: tuple[Tensor, Tensor], real: Tensor) -> Tensor:
        """bool [B]: whether there is room for the real tokens of each sequence, as many as ``real`` [B] says."""
        fits = self.length + real <= self.max_length
        if checks.values_are_known(fits) and not bool(fits.all()):
            raise ValueError(f"cache: expected room for all tokens, got sequences longer than max_length={self.max_length}")
        if self.page_table is not None:
            is_real = torch.arange(places[0].shape[1], device=real.device) < real[:, None]
            fits = fits & ((places[0] < self.key.shape[0] - 1) | ~is_real).all(1)
            if checks.values_are_known(fits) and not bool(fits.all()):
                raise ValueError(
                    f"cache.page_table: expected the numbers of pages below {self.key.shape[0] - 1} for all tokens, got none for sequence "
                    f"{int(fits.int().argmin())}"
                )
        return fits

    def _write(
        self, places: tuple[Tensor, Tensor], key: Tensor, value: Tensor, index: IndexProjections | None, is_real: Tensor | None
    ) -> None:
        """Puts T tokens of each sequence behind those that are there.

        Where ``is_real`` [B, T] is False, zeros are put in their place: padding queries read what lies there, and a NaN that an earlier sequence
        left would reach real queries of the same tile. On pages, which may be another sequence's there, nothing is put, and nothing read.
        """
        if self.page_table is not None and is_real is not None:
            places = torch.where(is_real, places[0], self.key.shape[0] - 1), places[1]
        buffers = [(self.key, key), (self.value, value)]
        buffers += [] if index is None else [(self.index_key, index.key.to(self.index_key.dtype))]
        for buffer, given in buffers:
            rows = given if is_real is None else torch.where(is_real[:, None, :, None], given, 0.0)
            by_place = buffer.transpose(1, 2) if self.page_table is None else buffer
            by_place[places] = rows.transpose(1, 2)

    def _lists(self, index: IndexProjections | None, chooser: Indexer | IndexMask | None, after: Tensor) -> IndexMask:
        """The lists of the queries of a call after which sequences have ``after`` [B] tokens."""
        if isinstance(chooser, IndexMask):
            return chooser._replace(is_causal=True)
        if index is None or chooser is None:
            raise ValueError("chooser: expected an indexer with its projections, or an IndexMask")
        keys = self.index_key[:, :, : self.max_length] if self.page_table is None else self.index_key
        index = index._replace(query=index.query.to(keys.dtype), key=keys)
        return chooser.select(index, query_offset=self.length, lengths=after, page_table=self.page_table)

    def _attended(
        self, query: Tensor, mask: IndexMask, slopes: Tensor | None, softcap: float, are_real: bool, after: Tensor
    ) -> Tensor:
        """Attention of queries [B, H, T, D], of which the first stand behind the tokens that were there."""
        tokens, bias, is_paged = query.shape[2], None, self.page_table is not None
        if slopes is not None:
            count = self.max_length if is_paged else self.max_length + 1
            bias = (slopes[:, None] * torch.arange(count, device=query.device, dtype=slopes.dtype))[None]
        if tokens == 1 or (are_real and tokens <= MAX_QUERIES):
            counts, table = self.length + tokens, self.page_table
            return decode_attention(
                query, self.key, self.value, counts, page_table=table, key_bias=bias, mask=mask, softcap=softcap
            )
        key, value = (self._gathered(each, after) if is_paged else each for each in (self.key, self.value))
        return attention(query, key, value, mask, key_bias=bias, softcap=softcap, query_offset=self.length)

    def _gathered(self, buffer: Tensor, after: Tensor) -> Tensor:
        """The rows of each sequence, [B, heads, N, size]; zeros from its ``after`` [B] tokens on, where others' may lie."""
        assert self.page_table is not None
        rows = buffer[self.page_table.long().clamp(0, buffer.shape[0] - 1)].flatten(1, 2).transpose(1, 2)
        is_own = torch.arange(rows.shape[2], device=rows.device) < after[:, None]
        return rows.masked_fill_(~is_own[:, None, :, None], 0.0)

    def rewind(self, n: int | Tensor) -> None:
        """Takes the last n tokens of each sequence back, see :meth:`dmattn.BoundedCache.rewind`."""
        if self.streaming is None:
            kept, recent = self.kept, self.recent
            count = tokens_back(n, kept, self.max_length if recent is None else recent.most_back)
            fits = (count >= 0) & (count <= kept)
            self.length.copy_(torch.where(fits, self.length - count, 0))
            if recent is not None and recent.kept is not None:
                recent.kept.copy_(torch.where(fits, kept - count, 0))
        else:
            self.streaming.rewind(n)
            self.length.copy_(self.streaming.length)

    def reorder(self, index: Tensor) -> None:
        """Sequence b becomes a copy of what sequence ``index[b]`` was: for beams. Not with pages, which beams share."""
        if self.page_table is not None:
            raise ValueError(
                "cache: expected one without pages, got one with them: write to page_table and length, copy pages that differ, and"
                " call cache.recent.reorder(index) where a layer convolves"
            )
        check_index(index, self.key)
        if self.streaming is not None:
            self.streaming.reorder(index)
        if self.recent is not None:
            self.recent.reorder(index)
        for buffer in (self.key, self.value, self.index_key, self.length):
            buffer.copy_(buffer.index_select(0, index))

    def reset(self, rows: Tensor | Sequence[int] | int | None = None) -> None:
        """Makes sequences empty, see :meth:`dmattn.BoundedCache.reset`."""
        chosen = chosen_rows(rows, self.length)
        if self.streaming is not None:
            self.streaming.reset(chosen)
        if self.recent is not None:
            self.recent.reset(chosen)
        self.length.masked_fill_(chosen, 0)

    def next_positions(self, tokens: int, lengths: Tensor | None = None, padding_side: PaddingSide = "right") -> Tensor:
        """int64 [B, T]: at which positions the next T tokens will stand, see :meth:`dmattn.BoundedCache.next_positions`."""
        return positions_after(self.length, tokens, lengths, padding_side)

    @property
    def kept(self) -> Tensor:
        """int32 [B]: how many tokens can be taken back; a copy."""
        if self.streaming is not None:
            return self.streaming.kept[:, 0].clone()
        return self.length.clone() if self.recent is None or self.recent.kept is None else self.recent.kept.minimum(self.length)

    @property
    def max_length(self) -> int:
        """Tokens that a sequence can have."""
        places, page_table = self.key.shape, self.page_table
        return places[2] - 1 if page_table is None else page_table.shape[1] * places[1]

    @property
    def batch_size(self) -> int:
        """Number of sequences B."""
        return self.length.shape[0]

    @property
    def _local_sizes(self) -> tuple[int, int, int]:
        """How many heads keep local keys alone, and the local window and the sinks of these; zeros without such heads."""
        if self.streaming is None:
            return 0, 0, 0
        return self.streaming.num_kv_heads, self.streaming.sizes.local, self.streaming.sizes.sink_keys

    @property
    def num_kv_heads(self) -> int:
        """Number of key heads Hkv."""
        return self._heads_of(self.key) + (0 if self.streaming is None else self.streaming.num_kv_heads)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; the same at every length."""
        own = sum(given.numel() * given.element_size() for given in self.buffers(recurse=False))
        return own + sum(part.nbytes for part in (self.streaming, self.recent) if part is not None)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        length = state_dict.get(f"{prefix}length")
        if isinstance(length, Tensor):
            checks.dtype(f"{prefix}length", length, (torch.int32,))
            if checks.values_are_known(length) and bool(((length < 0) | (length > self.max_length)).any()):
                raise ValueError(f"{prefix}length: expected numbers of tokens from 0 to {self.max_length}, got {length.tolist()}")
        if self.recent is not None:
            self.recent.check_loaded(f"{prefix}recent.", state_dict, length)
        check_same_lengths(prefix, state_dict, "length", "streaming.steps")
        super()._load_from_state_dict(state_dict, prefix, *others)

    __prepare_scriptable__ = scripting_refused  # torch.jit.script calls it first
