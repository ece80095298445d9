"""Multi-head self-attention whose keys are chosen by a learned score: the Doge model's attention, and what makes it learn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dmattn import checks
from dmattn.attention import key_scores, selected_attention
from dmattn.cache import BoundedCache, PaddingSide
from dmattn.masks import IntervalMask
from dmattn.nn.mixed_cache import MixedCache, cache_of_layer, check_cache_of_layer
from dmattn.nn.positions import checked_positions, documents_of
from dmattn.nn.projections import RotatedProjections
from dmattn.nn.recipe import ScoreRecipe, recommended_sizes, refuse_fields
from dmattn.nn.scores import explored, of_selecting_heads, slopes_of, with_recency
from dmattn.renamed import HidesOldNames, renamed, renamed_attribute, with_new_names
from dmattn.sharding import own_part

if torch.distributed.is_available():
    from dmattn.distributed.attention import context_parallel_attention
    from dmattn.distributed.gather import check_ranks, gather_sequence

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# What is in the recipe now.
OLD_NAMES = {name: f"recipe.{name}" for name in ("score", "select_only", "recency", "local_heads", "rotated_heads", "explore")}
OLD_NAMES |= {
    "taught": "recipe.select_only",
    "score_queries": "recipe.queries",
    "last_queries": "recipe.last",
    "sharp_queries": "recipe.sharp",
}


class DynamicMaskAttention(HidesOldNames, RotatedProjections):
    """Self-attention in which every query sees the ``window`` best-scored keys, and the latest and the first ones if wanted; the scores are
    learned.

    By default this is the Doge model's attention: scores are ``exp(A * softplus(dt_proj(v)))``, one per key and key head, and are added to
    the logits. A starts at zero: at first all scores are equal, so the window slides; training lets it pick. What learned better is

    ``DynamicMaskAttention.recommended(E, H, visible)``

    trained with ``out, loss = layer(hidden, with_score_loss=True)``; the page "Does it learn?" says how much and why.

    Args:
        embed_dim: size E of the hidden states.
        num_heads: query heads H.
        window: keys each query selects at most; 0 is allowed with local or sink_keys.
        num_kv_heads: key heads Hkv, a divisor of H; default H.
        head_dim: size D of a head, a multiple of 8 up to 256; default E / H.
        bias: whether the projections have biases.
        dropout: probability of dropping an attention weight while training.
        rope_theta: base of the rotary position embedding (Su et al., arXiv 2104.09864), None for none.
        is_causal: whether queries select among the keys up to their own position.
        local: latest keys that every query sees whatever their scores; only with is_causal.
        sink_keys: first keys of each document that every query sees whatever their scores; only with is_causal.
        recipe: how keys are scored and what teaches the scores, a :class:`ScoreRecipe`; default ``ScoreRecipe.doge()``.
        device, dtype: of the parameters.

    Two attributes may be set afterwards: ``softcap`` (0.0), as in :func:`dmattn.attention`, and ``partial_rotary_factor`` (1.0), the part of
    the dimensions of a head, the first ones, that rotate. Head counts in ``forward`` follow the projections' weights, so heads can be
    distributed to ranks (tensor parallelism); see :doc:`many_gpus`.

    Shape:
        hidden_states [B, S, E] -> [B, S, E].

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: sizes that do not divide, a window <= 0 without local and sink_keys, one of these or recency without is_causal, or
            a recipe with more local or rotated heads than there can be.
    """

    @renamed(into=ScoreRecipe.doge, sink="sink_keys", **OLD_NAMES)
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
        is_causal: bool = True,
        local: int = 0,
        sink_keys: int = 0,
        recipe: ScoreRecipe | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = self._set_sizes(embed_dim, num_heads, num_kv_heads, head_dim)
        checks.flag("is_causal", is_causal)
        checks.selection(window, local, sink_keys, is_causal)
        self.window, self.local, self.sink_keys, self.is_causal = window, local, sink_keys, is_causal
        self._set_options(rope_theta, dropout)
        checks.instance("recipe", recipe, ScoreRecipe | None, "None or a ScoreRecipe")
        self.recipe = recipe = ScoreRecipe.doge() if recipe is None else recipe
        self._set_heads(recipe)
        linear = self._add_projections(bias, device, dtype)
        self.scores_values = recipe.score == "exp"
        if self.scores_values:
            self.dt_proj = linear(num_kv_heads * head_dim, num_kv_heads)
            self.A = nn.Parameter(torch.zeros(num_kv_heads, device=device, dtype=dtype))
        elif isinstance(recipe.score, nn.Module):
            self.score_proj = recipe.score
        else:
            self.score_proj = nn.Linear(embed_dim, num_kv_heads, device=device, dtype=dtype)
            nn.init.zeros_(self.score_proj.weight), nn.init.zeros_(self.score_proj.bias)
        self._add_slopes(recipe.recency, device, dtype)
        self.o_proj = linear(num_heads * head_dim, embed_dim)

    @classmethod
    @renamed(into=ScoreRecipe, sink="sink_keys", **OLD_NAMES)
    def recommended(
        cls, embed_dim: int, num_heads: int, visible: int, *, num_kv_heads: int | None = None, **options: Any
    ) -> DynamicMaskAttention:
        """The settings that learned best, for ``visible`` keys that a head sees on average; see the page "Does it learn?".

        ``recipe=ScoreRecipe()``, where half of the key heads (rounded down where their number is odd) see the last ``visible / 4`` keys
        alone, the others these and the best ``3 / 2 * visible`` (fewer where the number is odd). Train it with ``with_score_loss=True``.
        While the loss is computed each of the 256 queries that teach holds S weights a head that selects in float32, a few times: give very
        long sequences ``recipe=ScoreRecipe(queries=...)`` with fewer.

        Args:
            embed_dim, num_heads, num_kv_heads: as in the constructor; at least two key heads.
            visible: a multiple of 4.
            options: any others of the constructor; they take the place of what is recommended.

        Raises:
            TypeError, ValueError: as the constructor, or visible is no multiple of 4, or there is one key head alone.
        """
        refuse_fields(ScoreRecipe, options)
        sizes = recommended_sizes(num_heads, num_kv_heads, visible, local_part=4, local_heads="half")
        chosen: dict[str, Any] = {**sizes, "recipe": ScoreRecipe()}
        return cls(embed_dim, num_heads, num_kv_heads=num_kv_heads, **chosen | options)

    sink = renamed_attribute("sink", "sink_keys")
    taught = renamed_attribute("taught", "recipe.select_only")
    select_only = renamed_attribute("select_only", "recipe.select_only")
    score_queries = renamed_attribute("score_queries", "recipe.queries")
    last_queries = renamed_attribute("last_queries", "recipe.last")
    sharp_queries = renamed_attribute("sharp_queries", "recipe.sharp")
    explore = renamed_attribute("explore", "recipe.explore")

    def __setstate__(self, state: dict[str, Any]) -> None:  # of copies and pickles, which may hold old names
        state = with_new_names(state, sink="sink_keys", taught="select_only")
        if "recipe" not in state:
            old = {"select_only", "score_queries", "last_queries", "sharp_queries", "explore"} & state.keys()
            fields = {OLD_NAMES[name].removeprefix("recipe."): state.pop(name) for name in old}
            state["recipe"] = ScoreRecipe.doge(**fields)
        super().__setstate__(state)

    def _set_heads(self, recipe: ScoreRecipe) -> None:
        """Says which heads are local and which rotate."""
        self._set_local_heads(recipe.local_heads, self.local)
        if recipe.recency is not None and not self.is_causal:
            raise ValueError(f"recency: expected None with is_causal=False, got {recipe.recency}")
        if recipe.rotated_heads == "local":
            self.rotated_heads = (self.local_heads or None) if self.rope_theta is not None else None
            return
        self.rotated_heads = recipe.rotated_heads
        if self.rotated_heads is not None and (self.rope_theta is None or self.rotated_heads > self.num_kv_heads):
            raise ValueError(
                f"rotated_heads: expected None, or at most {self.num_kv_heads} key heads of a layer with rope_theta, got"
                f" {self.rotated_heads} with rope_theta={self.rope_theta}"
            )

    def scores(self, source: Tensor) -> Tensor:
        """The scores of keys, [B, Hkv, S], without recency: of values [B, Hkv, S, D] where the recipe's score is "exp", and of hidden states
        [B, S, E] otherwise."""
        if self.scores_values:
            return key_scores(source, self.dt_proj, own_part(self.A, source))
        return checks.shaped("score", self.score_proj(source), "[B, S, Hkv]").transpose(1, 2)

    def _scores(self, hidden_states: Tensor, value: Tensor) -> Tensor:
        """The scores of this rank's key heads, of which value [B, Hkv, S, D] says how many there are."""
        batch, heads, length = value.shape[:3]
        self._check_dealt_out(heads)
        source = value if self.scores_values else hidden_states
        scores = self.scores(source.detach() if self.recipe.select_only else source)
        checks.shaped("score", scores.transpose(1, 2), "[B, S, Hkv]", B=batch, S=length, Hkv=heads)
        return scores

    def ranked(self, hidden_states: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """What keys are selected by, and what is added to their logits (None: nothing), [B|1, Hkv, S]; value [B, Hkv, S, D]."""
        ranks = self._scores(hidden_states, value)
        if self.log_slope is None:
            return ranks, None if self.recipe.select_only else ranks
        ranks, recency = with_recency(ranks, own_part(self.log_slope, value))
        return ranks, recency if self.recipe.select_only else ranks

    def mask(self, ranks: Tensor, base: IntervalMask | None = None, *, window: int | None = None) -> IntervalMask:
        """Which queries see which key, from what keys are selected by; see :meth:`ranked`."""
        window = self.window if window is None else window
        return IntervalMask.top_k(self.selecting(ranks), window, self.is_causal, base, local=self.local, sink_keys=self.sink_keys)

    def selecting(self, ranks: Tensor) -> Tensor:
        """What keys are selected by, [B|1, Hkv, S], from :meth:`ranked`, whose gradient ends here: -inf in local heads."""
        return of_selecting_heads(ranks.detach(), self.local_heads) if self.local_heads else ranks.detach()

    def new_cache(self, batch_size: int, *, rewind: int = 0, num_kv_heads: int | None = None) -> BoundedCache | MixedCache:
        """An empty cache for generating with this layer, on its device and in its dtype; with ``local_heads`` a :class:`MixedCache`.

        Args:
            batch_size, rewind: as of :class:`dmattn.BoundedCache`.
            num_kv_heads: key heads that this rank holds, where they are distributed; default all.

        Raises:
            TypeError, ValueError: as :class:`dmattn.BoundedCache`, a layer without is_causal, or with ``local_heads`` and distributed heads.
        """
        self._check_cached()
        weight = self.k_proj.weight
        heads = self.num_kv_heads if num_kv_heads is None else num_kv_heads
        checks.positive_int("num_kv_heads", heads)
        self._check_dealt_out(heads)
        return cache_of_layer(
            batch_size, heads, self.local_heads, self.window, self.head_dim, local=self.local, sink_keys=self.sink_keys, rewind=rewind,
            dtype=weight.dtype, device=weight.device,
        )  # fmt: skip

    def forward(
        self,
        hidden_states: Tensor,
        base: IntervalMask | None = None,
        cache: BoundedCache | MixedCache | None = None,
        *,
        window: int | None = None,
        with_score_loss: bool = False,
        lengths: Tensor | None = None,
        padding_side: PaddingSide = "right",
        position_ids: Tensor | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
        group: ProcessGroup | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of hidden states to each other or, with a cache, to all that came before, too; and the loss that teaches the scores if
        asked for.

        Args:
            hidden_states: [B, S, E]. With a cache they are the next S tokens of each sequence, S = 1 for a decode step.
            base: documents and/or padding, see :meth:`IntervalMask.top_k`; not with a cache.
            cache: what :meth:`new_cache` gives; it takes the tokens in. Only causally, without gradients
                and dropout, and with a ``score`` module that looks at each token alone.
            window: takes the place of the layer's own for this call; see :class:`WindowSchedule`. Not with a cache.
            with_score_loss: also return the mean of :func:`score_loss` over the heads that select, a scalar; only with is_causal, and not
                with a cache.
            lengths, padding_side: with a cache, which of the S tokens are real, see :meth:`BoundedCache.attend`.
            position_ids: integers [B|1, S] or [S], the positions that query and key are rotated to; default 0, 1, ... in every sequence.
                Without ``base`` a document begins wherever they do not grow: packed documents whose positions restart are kept apart.
                Not with a cache, which counts by itself.
            rotation: what :meth:`rotation` gave for these positions, to compute it once for all layers. Not with a cache.
            group: ranks that hold one sequence in chunks of S tokens each, in rank order (context parallelism). base, if given, is that of
                the whole sequence, and positions follow from the ranks. Scores of all chunks are gathered; of keys and values a rank gets
                those that its queries see. Queries that teach the scores look at the keys of their own chunk, for the loss alone
                (``explore`` has no effect). Only with is_causal, and not with a cache.

        Returns:
            [B, S, E], or (that, the loss).

        Raises:
            TypeError, ValueError: a wrong type or shape, a cache of other sizes, or arguments that do not go together.
            RuntimeError: a cache while gradients are on.
        """
        self._check_hidden(hidden_states)
        if checks.flag("with_score_loss", with_score_loss) and not self.is_causal:
            raise ValueError("with_score_loss: expected False with is_causal=False, got True")
        given = {"base": base is not None, "window": window is not None, "with_score_loss": with_score_loss}
        given |= {"position_ids": position_ids is not None, "rotation": rotation is not None, "group": group is not None}
        if cache is not None:
            self._refuse(given, given, "a cache, whose sequences, positions and window are its own")
            generated: Tensor = self.o_proj(
                self._generate(hidden_states, cache, lengths, padding_side).transpose(1, 2).flatten(2)
            )
            return generated
        self._check_without_cache(lengths, padding_side)
        if group is not None:
            self._refuse(given, ("position_ids", "rotation"), "group, whose positions follow from the ranks")
            return self._of_chunk(hidden_states, base, self.window if window is None else window, with_score_loss, group)
        if position_ids is not None:
            position_ids = checked_positions(position_ids, hidden_states)
            base = documents_of(position_ids, self.is_causal) if base is None else base
        rows = self.projected(hidden_states, position_ids if rotation is None else None, rotation=rotation, heads_first=False)
        query, key, value = (each.transpose(1, 2) for each in rows)
        # Scores read values as another view, so that compiled layers add up both gradients as the values lie in memory.
        ranks, bias = self.ranked(hidden_states, rows[2].transpose(1, 2))
        dropout = self.dropout if self.training else 0.0
        out, _ = selected_attention(
            query, key, value, self.selecting(ranks), self.window if window is None else window, bias, self.is_causal, base, self.local,
            self.sink_keys, softcap=self.softcap, dropout_p=dropout,
        )  # fmt: skip
        if not with_score_loss:
            result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
            return result
        out, loss = self._taught(query, key, value, out, ranks, bias, base, self.recipe.explore and self.training)
        return self.o_proj(out.transpose(1, 2).flatten(2)), loss

    def _taught(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, ranks: Tensor, bias: Tensor | None, base: IntervalMask | None,
        explore: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """out [B, H, S, D] and the loss of the scores, with what the recipe says of both."""
        recipe = self.recipe
        return explored(
            query, key, value, out, ranks, explore, mean=True, key_bias=bias, base=base, local=self.local, sink_keys=self.sink_keys,
            queries=recipe.queries, last=recipe.last, sharp=recipe.sharp, first_head=self.local_heads, softcap=self.softcap,
        )  # fmt: skip

    def _of_chunk(
        self, hidden_states: Tensor, base: IntervalMask | None, window: int, with_score_loss: bool, group: ProcessGroup
    ) -> Tensor | tuple[Tensor, Tensor]:
        """:meth:`forward` of this rank's chunk of a sequence."""
        if not self.is_causal:
            raise ValueError("group: expected a causal layer, got one with is_causal=False")
        group, _ = check_ranks(hidden_states, group, self._alike() | {"with_score_loss": int(with_score_loss)})
        length = hidden_states.shape[1]
        first = group.rank() * length
        positions = torch.arange(first, first + length, device=hidden_states.device)[None]
        query, key, value = self.projected(hidden_states, positions)
        ranks, bias = self.ranked(hidden_states, value)
        if self.log_slope is not None:
            before = slopes_of(own_part(self.log_slope, value))[:, None] * first  # the recency of the chunk's first position
            ranks, bias = ranks + before, None if bias is None else bias + before
        mask = self.mask(gather_sequence(ranks.detach(), 2, group), base, window=window)
        out = context_parallel_attention(
            query, key, value, mask, window=window, local=self.local, sink_keys=self.sink_keys, group=group, key_bias=bias,
            softcap=self.softcap, dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        if not with_score_loss:
            return result
        own = None if base is None else base._chunk(first, length)
        return result, self._taught(query, key, value, out, ranks, bias, own, False)[1]

    def _check_cached(self) -> None:
        if not self.is_causal:
            raise ValueError("cache: expected a causal layer, got one with is_causal=False")

    def _generate(
        self, hidden_states: Tensor, cache: BoundedCache | MixedCache, lengths: Tensor | None, padding_side: PaddingSide
    ) -> Tensor:
        """[B, H, S, D]: attention of the next tokens to what the cache holds and to each other."""
        checks.instance("cache", cache, (BoundedCache, MixedCache), "a dmattn.BoundedCache or a dmattn.nn.MixedCache")
        self._check_cached()
        self._check_generates(hidden_states, cache.batch_size)
        positions = None if self.rope_theta is None else cache.next_positions(hidden_states.shape[1], lengths, padding_side)
        query, key, value = self.projected(hidden_states, positions)
        check_cache_of_layer(cache, self.local_heads, key.shape[1], self.sink_keys, self.local, self.window, 0)
        scores = self._scores(hidden_states, value)
        slopes = None if self.log_slope is None else slopes_of(own_part(self.log_slope, value))
        return cache.attend(
            query, key, value, scores, softcap=self.softcap, lengths=lengths, padding_side=padding_side, slopes=slopes,
            select_only=self.recipe.select_only,
        )  # fmt: skip

    def extra_repr(self) -> str:
        sizes = {name: getattr(self, name) for name in ("local", "sink_keys", "local_heads", "rotated_heads")}
        sizes |= {"select_only": self.recipe.select_only}
        beside = "".join(f", {name}={size}" for name, size in sizes.items() if size)
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, window={self.window}{beside}"
