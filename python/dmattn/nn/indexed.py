"""IndexedAttention: multi-head self-attention in which an indexer chooses keys for each query."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmattn import checks
from dmattn.attention import attention
from dmattn.autograd import refuse_gradients
from dmattn.cache import BoundedCache, PaddingSide, rolled
from dmattn.cache_choice import Choice
from dmattn.cache_recent import RecentRows, check_recent
from dmattn.call import autocast
from dmattn.fake import accumulate_dtype
from dmattn.indexer import MAX_INDEX_HEADS
from dmattn.masks import IndexMask, IntervalMask
from dmattn.masks.interval import segment_ends
from dmattn.nn.convolution import CausalConvolution
from dmattn.nn.indexed_cache import IndexedCache
from dmattn.nn.indexer import Indexer, IndexProjections
from dmattn.nn.mixed_cache import MixedCache, cache_of_layer, check_cache_of_layer
from dmattn.nn.positions import checked_positions, documents_of
from dmattn.nn.projections import RotatedProjections
from dmattn.nn.recipe import IndexRecipe, recommended_sizes, refuse_fields
from dmattn.nn.scores import drawn_rows, explored, recency_of, slopes_of, with_dense_rows, with_recency
from dmattn.sharding import any_sharded

if torch.distributed.is_available():  # torch can be built without it
    from dmattn.distributed.gather import check_ranks, gather_sequence

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Chunk(NamedTuple):
    """The queries, keys and values of a call: the keys are those of the whole sequence, in which the first query stands at ``first``."""

    query: Tensor  # [B, H, S, D]
    key: Tensor  # [B, Hkv, N, D]
    value: Tensor  # [B, Hkv, N, D]
    key_bias: Tensor | None  # [1, Hkv, N]
    base: IntervalMask | None
    first: int | None  # None where that is 0
    ranks: Tensor | None = None  # [B, Hkv, S], what lifetimes are chosen by
    living: IntervalMask | None = None  # of the heads that select, with base: between which queries a key lives

    def of_heads(self, first: int | None, last: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Query, key, value and key_bias of some key heads, from ``first`` to before ``last``."""
        group = self.query.shape[1] // self.key.shape[1]
        heads, kv_heads = slice(*(None if n is None else n * group for n in (first, last))), slice(first, last)
        bias = None if self.key_bias is None else self.key_bias[:, kv_heads]
        return self.query[:, heads], self.key[:, kv_heads], self.value[:, kv_heads], bias


class IndexedAttention(RotatedProjections):
    """Self-attention in which every query reads the ``window`` keys that an indexer chooses for it, the latest and the first ones.

    :class:`DynamicMaskAttention` scores a key once for all queries; here each query chooses for itself, as in DeepSeek's sparse attention
    (arXiv 2512.02556). Generation keeps all keys, but reads few of them. Take

    ``IndexedAttention.recommended(E, H, visible)``

    and train it with ``out, loss = layer(hidden, with_index_loss=True)``: the indexer learns from the loss alone, which needs no weight.

    With ``lifetime_window=W`` the cache is bounded, too. As in :class:`DynamicMaskAttention`, ``lifetime_proj`` gives every key a score in each
    head, to which the head's recency is added, and a key dies when W better ones (of equal ones, the later) are older than ``local``
    (:meth:`IntervalMask.top_k`). Each query then chooses its ``window`` keys among those that live. So a head that selects keeps W keys, the
    local ones and the sinks, with their index keys, however long the sequence is. The loss is the sum of two, which teach different weights: the
    indexer's, over the keys that live, and :func:`score_loss` of the lifetimes, over all keys.

    First a short causal convolution (``conv``, :class:`IndexRecipe`) adds to each row of hidden states the rows just before it in its document;
    queries, keys, values, the indexer and lifetimes are computed from the sums. So :meth:`projected` and ``indexer`` take what ``layer.conv``
    gives.

    Args:
        embed_dim: size E of the hidden states.
        num_heads: query heads H.
        window: keys each query selects at most, a multiple of the recipe's ``block_size``.
        num_kv_heads: key heads Hkv, a divisor of H; default H.
        head_dim: size D of a head, a multiple of 8 up to 256; default E / H.
        bias: whether the projections have biases.
        dropout: probability of dropping an attention weight while training.
        rope_theta: base of the rotary position embedding, None for none.
        local: latest keys that every query sees.
        sink_keys: first keys of the sequence that every query sees.
        recipe: the indexer, and what teaches it, an :class:`IndexRecipe`; default ``IndexRecipe()``.
        lifetime_window: keys that live in a head, local ones and sinks aside, at least ``window``; None: all. Only with the recipe's
            ``groups="heads"`` and ``block_size=1``, because keys live one by one in each head, with ``index_heads`` below 128, and with
            ``head_dim + index_dim`` up to 256, because the cache keeps an index key in the same row as its value. With
            ``local=0`` a query whose own key dies at once teaches the indexer nothing.
        device, dtype: of the parameters.

    The lists are those of the selecting heads. Sinks are the first keys of a row, and blocks are counted from its beginning, with packed
    documents and padding, too. So with sinks or larger blocks pad a whole sequence on the right; a cache takes padding on either side. With
    ``lifetime_window`` the first ``sink_keys`` keys of later documents live as long as these, too, but are seen only where they are chosen.

    While training, ``with_index_loss=True`` changes the output, too: the queries that teach (``IndexRecipe.queries`` of a sequence) attend
    to all keys, unless ``IndexRecipe.explore`` is False. Evaluate in ``eval()``.

    Shape:
        hidden_states [B, S, E] -> [B, S, E].

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: sizes that do not divide, or a recipe with more local heads than there can be.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        window: int = 2048,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        rope_theta: float | None = 10000.0,
        local: int = 0,
        sink_keys: int = 0,
        recipe: IndexRecipe | None = None,
        lifetime_window: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = self._set_sizes(embed_dim, num_heads, num_kv_heads, head_dim)
        checks.selection(window, local, sink_keys, True)
        checks.each(checks.length, local=local, sink_keys=sink_keys)
        checks.instance("recipe", recipe, IndexRecipe | None, "None or an IndexRecipe")
        self.recipe = recipe = IndexRecipe() if recipe is None else recipe
        self.window, self.local, self.sink_keys = window, local, sink_keys
        self._set_options(rope_theta, dropout)
        self.partial_rotary_factor = recipe.rotary_factor
        self._set_local_heads(recipe.local_heads, local)
        linear = self._add_projections(bias, device, dtype)
        self.groups = num_kv_heads - self.local_heads if recipe.groups == "heads" else recipe.groups
        self.indexer: Indexer | None = None
        if self.groups:
            if window % recipe.block_size:
                raise ValueError(f"window: expected a multiple of block_size={recipe.block_size}, got {window}")
            self.indexer = Indexer(
                embed_dim, self.groups, k=window // recipe.block_size, num_heads=recipe.index_heads, head_dim=recipe.index_dim,
                block_size=recipe.block_size, block_score=recipe.block_score, local=local, sink_keys=sink_keys, device=device, dtype=dtype,
            )  # fmt: skip
        self.lifetime_window = lifetime_window
        if lifetime_window is not None:
            self._check_lifetimes(lifetime_window)
            self.lifetime_proj = nn.Linear(embed_dim, num_kv_heads, bias=False, device=device, dtype=dtype)
            nn.init.zeros_(self.lifetime_proj.weight)
        self._add_slopes(recipe.recency, device, dtype)
        self.o_proj = linear(num_heads * head_dim, embed_dim)
        self.conv: CausalConvolution | None = None
        if recipe.conv > 1:
            self.conv = CausalConvolution(embed_dim, recipe.conv, device=device, dtype=dtype)

    def _alike(self) -> dict[str, int]:
        recipe = self.recipe
        numbers = {"groups": self.groups, "training": int(self.training), "recency (0 none)": int(self.log_slope is not None)}
        numbers |= {"block_score (0 max, 1 mean_key)": int(recipe.block_score == "mean_key")}
        numbers |= {"index_heads": recipe.index_heads, "index_dim": recipe.index_dim, "block_size": recipe.block_size}
        numbers |= {"conv": self._conv_size}
        return super()._alike() | numbers

    def _check_lifetimes(self, lifetime_window: int) -> None:
        recipe = self.recipe
        checks.positive_int("lifetime_window", lifetime_window)
        checks.length("lifetime_window", lifetime_window)
        if lifetime_window < self.window:
            raise ValueError(f"lifetime_window: expected at least window={self.window}, got {lifetime_window}")
        if recipe.groups != "heads" or recipe.block_size != 1:
            raise ValueError(
                f"lifetime_window: expected None with a recipe of groups={recipe.groups!r} and block_size={recipe.block_size}, got"
                f" {lifetime_window}: keys live one by one in each head"
            )
        if self.head_dim + recipe.index_dim > checks.MAX_HEAD_DIM:
            raise ValueError(
                f"index_dim: expected at most {checks.MAX_HEAD_DIM} with head_dim={self.head_dim} together where there is a"
                f" lifetime_window, got {recipe.index_dim}"
            )
        if recipe.index_heads >= MAX_INDEX_HEADS:
            raise ValueError(f"index_heads: expected less than {MAX_INDEX_HEADS} with lifetime_window, got {recipe.index_heads}")

    @classmethod
    def recommended(
        cls, embed_dim: int, num_heads: int, visible: int, *, num_kv_heads: int | None = None, **options: Any
    ) -> IndexedAttention:
        """The settings to begin with, for ``visible`` keys that a head sees on average.

        A head sees the last ``visible / 2`` keys, and ``visible / 2`` before them that the indexer chooses, in whole blocks. With local heads,
        which see the last ones alone, the other heads choose more, so that ``visible`` is the mean. Train it with ``with_index_loss=True``.

        Args:
            embed_dim, num_heads, num_kv_heads: as in the constructor; at least two key heads with ``local_heads="half"``.
            visible: a multiple of 4.
            options: any others of the constructor; they take the place of what is recommended.

        Raises:
            TypeError, ValueError: as the constructor, or visible is no multiple of 4 or too small for a block.
        """
        refuse_fields(IndexRecipe, options)
        recipe = options.get("recipe")
        recipe = recipe if isinstance(recipe, IndexRecipe) else IndexRecipe()
        chosen = recommended_sizes(num_heads, num_kv_heads, visible, local_part=2, local_heads=recipe.local_heads)
        chosen["window"] -= chosen["window"] % recipe.block_size
        if chosen["window"] == 0 and "window" not in options:
            raise ValueError(f"visible: expected enough for a block of {recipe.block_size} keys that is chosen, got {visible}")
        return cls(embed_dim, num_heads, num_kv_heads=num_kv_heads, **chosen | options)

    # The whole sequence -----------------------------------------------------------------------------------------------------------

    def forward(
        self,
        hidden_states: Tensor,
        base: IntervalMask | None = None,
        cache: IndexedCache | BoundedCache | MixedCache | None = None,
        *,
        index_mask: IndexMask | None = None,
        with_index_loss: bool = False,
        return_index_mask: bool = False,
        lengths: Tensor | None = None,
        padding_side: PaddingSide = "right",
        position_ids: Tensor | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
        group: ProcessGroup | None = None,
    ) -> Any:
        """Causal attention of hidden states to each other or, with a cache, to all that came before, too.

        Args:
            hidden_states: [B, S, E]. With a cache they are the next S tokens of each sequence, S = 1 for a decode step.
            base: documents and/or padding, see :meth:`IntervalMask.top_k`; not with a cache.
            cache: what :meth:`new_cache` gives; it takes the tokens in. Only without gradients and dropout.
            index_mask: the lists of the heads that select, from another layer's ``return_index_mask=True``, in place of this layer's own; not
                with lifetime_window, because its keys live for this layer's own lists.
            with_index_loss: also return what teaches the indexer, a scalar; not with index_mask or a cache. While training, the queries that
                teach then attend to all keys.
            return_index_mask: also return the lists, an :class:`IndexMask` [B, G, S, K] without base, for the next layers. Not with the cache
                of a layer with lifetime_window, whose places are no positions.
            lengths, padding_side: with a cache, which of the S tokens are real, see :meth:`BoundedCache.attend`.
            position_ids: integers [B|1, S] or [S], the positions that query and key are rotated to; default 0, 1, ... in every sequence.
                Without ``base`` a document begins wherever they do not grow. Not with a cache, which counts by itself, nor with group.
            rotation: what :meth:`rotation` gave for these positions, to compute it once for all layers. Not with a cache.
            group: ranks that hold one sequence in chunks of S tokens each, in rank order (context parallelism). Keys, values and index keys
                of all chunks are gathered; base, if given, is that of the whole sequence. The loss is the mean over this rank's own
                queries, of which each rank draws its part. Not with a cache, index_mask or a layer with lifetime_window.

        Returns:
            [B, S, E]; or a tuple of that, the loss and the lists, as far as they were asked for.

        Raises:
            TypeError, ValueError: a wrong type or shape, a cache of other sizes, or arguments that do not go together.
            RuntimeError: a cache while gradients are on.
        """
        self._check_hidden(hidden_states)
        checks.each(checks.flag, with_index_loss=with_index_loss, return_index_mask=return_index_mask)
        if index_mask is None and self.indexer is None:
            raise ValueError("index_mask: expected the lists of another layer for a layer with groups=0, got None")
        given = {"base": base is not None, "with_index_loss": with_index_loss, "position_ids": position_ids is not None}
        given |= {"rotation": rotation is not None, "group": group is not None}
        if self.lifetime_window is not None:
            unfit = {"group": given["group"], "index_mask": index_mask is not None}
            unfit["return_index_mask"] = return_index_mask and cache is not None
            self._refuse(unfit, unfit, "lifetime_window" if cache is None else "lifetime_window and a cache")
        if cache is not None:
            self._refuse(given, given, "a cache, whose sequences and positions are its own")
            out, lists = self._generate(hidden_states, cache, index_mask, lengths, padding_side)
            return self._result(out, None, lists if return_index_mask else None)
        self._check_without_cache(lengths, padding_side)
        if index_mask is not None:
            self._refuse(given, ("with_index_loss", "group"), "index_mask")
        if group is not None:
            self._refuse(given, ("position_ids", "rotation"), "group, whose positions follow from the ranks")
        if position_ids is not None:
            position_ids = checked_positions(position_ids, hidden_states)
            base = documents_of(position_ids, True) if base is None else base
        if group is not None:
            group, base = check_ranks(hidden_states, group, self._alike() | {"with_index_loss": int(with_index_loss)}, base)
        hidden_states = self._convolved(hidden_states, self._document_ends(hidden_states, base, group), group)
        index = None if index_mask is not None or self.indexer is None else self.indexer(hidden_states)
        chunk, index = self._chunk(hidden_states, index, base, position_ids, rotation, group)
        if index is not None and self.indexer is not None:
            chunk = self._with_lifetimes(hidden_states, chunk)
            seen = base if chunk.living is None else chunk.living
            index_mask = self.indexer.select(index, seen, query_offset=chunk.first)
        assert index_mask is not None
        out = self._attended(chunk, index_mask)
        loss = None
        if with_index_loss and index is not None:
            out, loss = self._taught(chunk, index, out, 1 if group is None else group.size())
        return self._result(out, loss, index_mask if return_index_mask else None)

    def _result(self, out: Tensor, loss: Tensor | None, index_mask: IndexMask | None) -> Any:
        """What forward returns for out [B, H, S, D]."""
        result = self.o_proj(out.transpose(1, 2).flatten(2))
        beside = [given for given in (loss, index_mask) if given is not None]
        return (result, *beside) if beside else result

    @property
    def _conv_size(self) -> int:
        return 1 if self.conv is None else self.conv.weight.shape[0] + 1

    def _document_ends(self, hidden_states: Tensor, base: IntervalMask | None, group: ProcessGroup | None) -> Tensor | None:
        """int32 [B|1, N]: where the document of each key of the whole sequence ends, by base, which is refused if it differs between heads."""
        if base is None:
            return None
        length = hidden_states.shape[1] * (1 if group is None else group.size())
        like = hidden_states.new_empty(()).expand(hidden_states.shape[0], self.num_kv_heads, length)
        ends = segment_ends(base, like)
        if ends.shape[1] != 1:
            raise ValueError(f"base: expected one for all heads, got {checks.shape_of(base.end)}")
        return ends[:, 0]

    def _convolved(self, hidden_states: Tensor, ends: Tensor | None, group: ProcessGroup | None) -> Tensor:
        """Hidden states to which the rows before them were added, those of other ranks included: what everything else is computed from."""
        if self.conv is None:
            return hidden_states
        before, rank, length = None, 0, hidden_states.shape[1]
        if group is not None:  # the tails of all chunks, of which those of the ranks before count
            back, rank = self.conv.weight.shape[0], group.rank()
            tails = gather_sequence(hidden_states[:, max(0, length - back) :], 1, group)
            before = F.pad(tails[:, : rank * (tails.shape[1] // group.size())], (0, 0, back, 0))[:, -back:]
        convolved: Tensor = self.conv(hidden_states, before, ends, rank * length)
        return convolved

    def _chunk(
        self, hidden_states: Tensor, index: IndexProjections | None, base: IntervalMask | None, position_ids: Tensor | None,
        rotation: tuple[Tensor, Tensor] | None, group: ProcessGroup | None,
    ) -> tuple[Chunk, IndexProjections | None]:  # fmt: skip
        """Queries of this rank, keys and values of all, and the indexer's projections likewise."""
        length, first = hidden_states.shape[1], None
        if group is not None:
            first = group.rank() * length
            position_ids = torch.arange(first, first + length, device=hidden_states.device)[None]
        query, key, value = self.projected(hidden_states, position_ids if rotation is None else None, rotation=rotation)
        self._check_not_dealt_out(query, key, value)
        if group is not None:
            key, value = (gather_sequence(given, 2, group) for given in (key, value))
            index = None if index is None else index._replace(key=gather_sequence(index.key, 2, group))
        bias = None if self.log_slope is None else recency_of(self.log_slope, key.shape[2])
        return Chunk(query, key, value, bias, base, first), index

    def _with_lifetimes(self, hidden_states: Tensor, chunk: Chunk) -> Chunk:
        """The chunk with the lifetimes of its keys, if the layer has any."""
        if self.lifetime_window is None:
            return chunk
        ranks = self.lifetime_proj(hidden_states.detach()).transpose(1, 2)
        if self.log_slope is not None:
            ranks, _ = with_recency(ranks, self.log_slope)
        living = IntervalMask.top_k(
            ranks.detach()[:, self.local_heads :],
            self.lifetime_window,
            True,
            chunk.base,
            local=self.local,
            sink_keys=self.sink_keys,
        )
        return chunk._replace(ranks=ranks, living=living)

    def _check_not_dealt_out(self, *given: Tensor) -> None:
        if any_sharded(given) or given[1].shape[1] != self.num_kv_heads:
            raise ValueError(
                "IndexedAttention: expected all heads on every rank, got heads that are distributed to ranks (a DTensor, or tensor"
                " parallelism): its lists are not distributed; forward(group=) distributes a sequence"
            )

    def _attended(self, chunk: Chunk, index_mask: IndexMask) -> Tensor:
        """[B, H, S, D]. Local heads go into a call of their own: a sliding window is faster than lists, and lists of nothing need memory."""
        dropout = self.dropout if self.training else 0.0
        shared: dict[str, Any] = {"softcap": self.softcap, "dropout_p": dropout, "query_offset": chunk.first}
        index_mask = self._checked_lists(index_mask, chunk.query)
        masks: list[Any] = [index_mask]
        if self.local_heads:
            length = chunk.key.shape[2]
            masks.insert(0, IntervalMask.streaming(length, self.sink_keys, self.local, device=chunk.key.device))
        heads = ((None, self.local_heads), (self.local_heads, None)) if self.local_heads else ((None, None),)
        parts = []
        for bounds, mask in zip(heads, masks, strict=True):
            query, key, value, bias = chunk.of_heads(*bounds)
            base = chunk.base if mask is not index_mask or chunk.living is None else chunk.living
            seen = mask if base is None else mask & base
            parts.append(attention(query, key, value, seen, key_bias=bias, is_causal=True, **shared))
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]

    def _checked_lists(self, index_mask: Any, query: Tensor) -> IndexMask:
        """The lists with this layer's local window and sinks."""
        checks.instance("index_mask", index_mask, IndexMask, "an IndexMask")
        sizes = {"B": query.shape[0], "heads": self.num_kv_heads - self.local_heads, "S": query.shape[2]}
        checks.shaped("index_mask", index_mask.indices, "[B|1, heads|1, S, K]", **sizes)
        lists: IndexMask = index_mask
        return lists._replace(is_causal=True, local=self.local, sink_keys=self.sink_keys)

    def _taught(self, chunk: Chunk, index: IndexProjections, out: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
        """out, in which a few queries see all keys if the recipe says so, and the loss of the indexer for them."""
        recipe = self.recipe
        assert self.indexer is not None
        rows = drawn_rows(chunk.query.shape[2], max(1, recipe.queries // ranks), recipe.last, out.device)
        query, key, _, bias = chunk.of_heads(self.local_heads, None)
        base = chunk.base if chunk.living is None else chunk.living
        loss = self.indexer.loss(
            index, query, key, rows=rows, base=base, key_bias=bias, softcap=self.softcap, query_offset=chunk.first, sharp=recipe.sharp,
        )  # fmt: skip
        if chunk.ranks is not None:
            out, of_lifetimes = explored(
                chunk.query, chunk.key, chunk.value, out, chunk.ranks, recipe.explore and self.training, mean=True, key_bias=chunk.key_bias,
                base=chunk.base, local=self.local, sink_keys=self.sink_keys, queries=recipe.queries, last=recipe.last, sharp=recipe.sharp,
                first_head=self.local_heads, softcap=self.softcap,
            )  # fmt: skip
            return out, loss + of_lifetimes
        if recipe.explore and self.training:
            ends = None if chunk.base is None else segment_ends(chunk.base, chunk.key[..., 0])
            parts = autocast(chunk.query, chunk.key, chunk.value)
            out = with_dense_rows(
                *parts, out, rows, chunk.key_bias, ends, self.head_dim**-0.5, self.softcap, chunk.first or 0
            )  # fmt: skip
        return out, loss

    # Generation -------------------------------------------------------------------------------------------------------------------

    def new_cache(
        self, batch_size: int, max_length: int | None = None, *, rewind: int = 0, pages: int | None = None, page_size: int = 64
    ) -> IndexedCache | BoundedCache | MixedCache:
        """An empty cache for generating with this layer, on its device and in its dtype; with ``lifetime_window`` one of fixed size, a
        :class:`MixedCache`, or a :class:`dmattn.BoundedCache` without local heads.

        Args:
            batch_size: number of sequences B.
            max_length: tokens that a sequence can have; without effect with ``lifetime_window``.
            rewind: number of latest tokens that can be taken back. Only a cache that keeps all keys in all heads, of a layer without a
                convolution, can take back more.
            pages, page_size: as of :class:`IndexedCache`, whose memory then grows with its tokens; not with ``lifetime_window``.

        Raises:
            TypeError, ValueError: as :class:`IndexedCache`.
        """
        weight = self.k_proj.weight
        common: dict[str, Any] = {
            "local": self.local,
            "sink_keys": self.sink_keys,
            "index_dim": self.recipe.index_dim,
            "rewind": rewind,
        }
        common |= {"dtype": weight.dtype, "device": weight.device}
        if self.lifetime_window is not None:
            self._refuse({"pages": pages is not None}, ("pages",), "lifetime_window, whose cache does not grow")
            heads = (self.num_kv_heads, self.local_heads)
            cache: IndexedCache | BoundedCache | MixedCache = cache_of_layer(
                batch_size, *heads, self.lifetime_window, self.head_dim, **common
            )
        elif max_length is None:
            raise ValueError("max_length: expected a number of tokens for a layer without lifetime_window, got None")
        else:
            cache = IndexedCache(
                batch_size, self.num_kv_heads, max_length, self.head_dim, local_heads=self.local_heads, groups=self.groups, pages=pages,
                page_size=page_size, **common,
            )  # fmt: skip
        if self.conv is not None:
            counts = isinstance(cache, IndexedCache) and cache.streaming is None
            options: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
            cache.recent = RecentRows(batch_size, self._conv_size, self.embed_dim, rewind, counts=counts, **options)
        return cache

    def _generate(
        self, hidden_states: Tensor, cache: IndexedCache | BoundedCache | MixedCache, index_mask: IndexMask | None,
        lengths: Tensor | None, padding_side: PaddingSide,
    ) -> tuple[Tensor, IndexMask | None]:  # fmt: skip
        """[B, H, S, D]: attention of the next tokens to what the cache holds and to each other; and their lists, if the cache holds all keys."""
        is_bounded = self.lifetime_window is not None
        kinds, names = ((BoundedCache, MixedCache), "a dmattn.BoundedCache or a dmattn.nn.MixedCache") if is_bounded else (
            IndexedCache, "a dmattn.nn.IndexedCache"
        )  # fmt: skip
        checks.instance("cache", cache, kinds, names)
        self._check_generates(hidden_states, cache.batch_size)
        if isinstance(cache, IndexedCache):
            own = (0, 0, 0) if not self.local_heads else (self.local_heads, self.local, self.sink_keys)
            if cache._local_sizes != own:
                raise ValueError(
                    f"cache: expected one with local_heads, local and sink_keys = {own} like the layer, got {cache._local_sizes}"
                )
        else:
            sizes = (self.num_kv_heads, self.sink_keys, self.local, self.lifetime_window or 0, self.recipe.index_dim)
            check_cache_of_layer(cache, self.local_heads, *sizes)
        check_recent(cache.recent, self._conv_size, self.embed_dim)
        positions = cache.next_positions(hidden_states.shape[1], lengths, padding_side)  # refuses what are no lengths
        if self.conv is None or cache.recent is None:
            return self._attended_in_cache(hidden_states, positions, cache, index_mask, lengths, padding_side)
        rows, tokens, length_before, shift = hidden_states, hidden_states.shape[1], cache.length.clone(), None
        if lengths is not None and padding_side == "left" and tokens > 1:
            shift = tokens - lengths.long().clamp(0, tokens)
            rows = rolled(rows[:, None], shift)[:, 0]  # real tokens first
        convolved = self.conv(rows, cache.recent.before(length_before).to(rows.dtype))
        convolved = convolved if shift is None else rolled(convolved[:, None], -shift)[:, 0]
        result = self._attended_in_cache(convolved, positions, cache, index_mask, lengths, padding_side)
        cache.recent.take(rows, length_before, cache.length)  # last, so that a call that is refused changes nothing
        return result

    def _attended_in_cache(
        self, hidden_states: Tensor, positions: Tensor, cache: IndexedCache | BoundedCache | MixedCache, index_mask: IndexMask | None,
        lengths: Tensor | None, padding_side: PaddingSide,
    ) -> tuple[Tensor, IndexMask | None]:  # fmt: skip
        """What :meth:`_generate` returns, of hidden states to which the rows before them were added."""
        query, key, value = self.projected(hidden_states, None if self.rope_theta is None else positions)
        self._check_not_dealt_out(query, key, value)
        index = None if self.indexer is None else self.indexer(hidden_states)
        if torch.is_grad_enabled() and any(given.requires_grad for given in (query, key, value, *(index or ()))):
            refuse_gradients("IndexedAttention with a cache")
        slopes = None if self.log_slope is None else slopes_of(self.log_slope)
        if not isinstance(cache, IndexedCache):
            scores = self.lifetime_proj(hidden_states).transpose(1, 2)
            return self._attended_bounded(cache, query, key, value, index, scores, slopes, lengths, padding_side), None
        given = None if index_mask is None else self._checked_lists(index_mask, query)
        return cache.attend(
            query, key, value, index, self.indexer if given is None else given, slopes=slopes, softcap=self.softcap, lengths=lengths,
            padding_side=padding_side,
        )  # fmt: skip

    def _attended_bounded(
        self, cache: BoundedCache | MixedCache, query: Tensor, key: Tensor, value: Tensor, index: IndexProjections | None, scores: Tensor,
        slopes: Tensor | None, lengths: Tensor | None, padding_side: PaddingSide,
    ) -> Tensor:  # fmt: skip
        """[B, H, S, D] of the next tokens, which choose among the keys that live in the cache. Index keys lie behind values."""
        assert self.indexer is not None
        assert index is not None
        query, key, value, index_query, index_key = cache._autocast(query, key, value, index.query, index.key)
        value = torch.cat((value, F.pad(index_key, (0, 0, 0, 0, self.local_heads, 0))), 3)
        cache._check(query, key, value, scores, slopes)
        call = cache._checked_call(query, scores, slopes, lengths, padding_side, True, None, self.softcap)
        choice = Choice(index_query, index.weights.to(accumulate_dtype(key.dtype)), self.indexer.slope, self.indexer.k)
        return cache._attend(query, key, value, call._replace(choice=choice))[0]

    def extra_repr(self) -> str:
        names = ("embed_dim", "num_heads", "num_kv_heads", "window", "local", "sink_keys", "local_heads", "lifetime_window")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)
