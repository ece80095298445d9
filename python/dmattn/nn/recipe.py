"""Recipes of layers: ScoreRecipe and IndexRecipe say how keys are chosen, and what teaches the choice."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from torch import nn

from dmattn import checks
from dmattn.indexer import MAX_INDEX_HEADS, checked_block_score


@dataclasses.dataclass(frozen=True)
class ScoreRecipe:
    """How a :class:`DynamicMaskAttention` scores keys, and how it learns to: the ``recipe`` of its constructor.

    The defaults learned best over text and recall together; the page "Does it learn?" says what each of them is for.
    ``dataclasses.replace(recipe, explore=False)`` gives another.

    Args:
        score: "linear", a linear map of the hidden state that starts at zero; "exp", the Doge model's score of a key's value; or a module
            that takes hidden states [B, S, E] to scores [B, S, Hkv]. A score of +inf keeps its key; only with ``select_only``, because a
            logit of +inf makes NaN.
        select_only: if True, scores select only: they are not added to the logits and send no gradient into what they read, so all they learn
            is what the loss from ``with_score_loss=True`` teaches, see :func:`score_loss`. If False they are added to the logits and
            learn from that, wherever their key is visible.
        recency: if given, every key head adds ``slope * position`` to scores and logits (ALiBi, arXiv 2108.12409), which favours late keys.
            Slopes are learned (``log_slope``, their logarithms). This is the first head's at first; the others follow geometrically down to
            a 2048th of it. Only in causal layers.
        local_heads: how many key heads, the first ones, fewer than Hkv, see the local keys and the sinks alone. "half": half of them, rounded
            down, in a layer with ``local``.
        rotated_heads: how many key heads, the first ones, rotate with their query heads, where the layer has a ``rope_theta``; None for all.
            "local": the local heads, so that those that select know positions by ``recency`` alone; all where there are no local ones.
        queries, last, sharp: which queries look at all keys for the loss and how they count, as in :func:`score_loss`.
        explore: if True, these queries attend to all keys in all heads, without dropout, in training calls that ask for the loss. So
            queries and keys also learn from what lies beyond the window.

    Raises:
        TypeError, ValueError: a wrong type, or a number out of range.
    """

    score: Literal["linear", "exp"] | nn.Module = "linear"
    select_only: bool = True
    recency: float | None = 0.25
    local_heads: int | Literal["half"] = "half"
    rotated_heads: int | Literal["local"] | None = "local"
    queries: int = 256
    last: float = 0.5
    sharp: bool = True
    explore: bool = True

    @classmethod
    def doge(cls, **others: Any) -> ScoreRecipe:
        """The Doge model's: scores of values that are added to the logits, no recency, all heads select and rotate. What a layer without a
        recipe has; ``others`` take the place of its fields."""
        plain: dict[str, Any] = {
            "score": "exp", "select_only": False, "recency": None, "local_heads": 0, "rotated_heads": None, "queries": 64, "last": 0.0,
            "sharp": False, "explore": False,
        }  # fmt: skip
        return cls(**plain | others)

    def __post_init__(self) -> None:
        checks.instance("score", self.score, nn.Module | str, "'exp', 'linear' or a torch.nn.Module")
        if isinstance(self.score, str) and self.score not in ("exp", "linear"):
            raise ValueError(f"score: expected 'exp', 'linear' or a torch.nn.Module, got {self.score!r}")
        if self.rotated_heads is not None and (not isinstance(self.rotated_heads, str) or self.rotated_heads != "local"):
            checks.positive_int("rotated_heads", self.rotated_heads)
        checks.flag("select_only", self.select_only)
        _check_common(self)


@dataclasses.dataclass(frozen=True)
class IndexRecipe:
    """How an :class:`IndexedAttention` chooses keys for each query, and how it learns to: the ``recipe`` of its constructor.

    Args:
        groups: which lists there are: "heads", one for each key head that selects; 1, one for all of them, which costs less; 0, none: the
            layer has no indexer, and takes the lists of another by ``index_mask``.
        index_heads, index_dim: heads of the indexer, at most 128, and their size, a multiple of 8 up to 256.
        block_size: keys that are chosen together, a power of two from 1 to 128.
        block_score: what a block is chosen by, "max" or "mean_key", see :func:`dmattn.index_top_k`.
        recency, local_heads: as of :class:`ScoreRecipe`; recency is added to logits alone. With "half" steps and caches are smaller, but not
            every model of the study learned to recall names (docs/learning.md).
        rotary_factor: the part of the dimensions of a head, the first ones, that rotate.
        conv: rows of hidden states that a causal depthwise convolution adds up before all else is computed, 2 to 16; 1: no convolution.
            Without one, two models of the study failed at associative recall.
        queries, last: how many queries look at all keys for the loss, and which part of them is drawn from the last sixteenth. They are
            drawn with replacement, of whole rows: right padding takes its part of them, and teaches nothing.
        sharp: how they count, see :func:`dmattn.index_loss`.
        explore: if True, these queries attend to all keys in all heads, without dropout, in training calls that ask for the loss. So
            queries and keys also learn from what no list shows.

    Raises:
        TypeError, ValueError: a wrong type, or a number out of range.
    """

    groups: int | Literal["heads"] = "heads"
    index_heads: int = 4
    index_dim: int = 32
    block_size: int = 1
    block_score: Literal["max", "mean_key"] = "max"
    recency: float | None = 0.25
    local_heads: int | Literal["half"] = 0
    rotary_factor: float = 0.25
    conv: int = 3
    queries: int = 256
    last: float = 0.5
    sharp: bool = True
    explore: bool = True

    def __post_init__(self) -> None:
        if self.groups not in (0, 1, "heads") or not (type(self.groups) is int or isinstance(self.groups, str)):
            raise ValueError(f"groups: expected 'heads', 1 or 0, got {self.groups!r}")
        checks.each(checks.positive_int, index_heads=self.index_heads, index_dim=self.index_dim)
        checks.head_size("index_dim", self.index_dim)
        checks.positive_int("conv", self.conv)
        if self.conv > 16:
            raise ValueError(f"conv: expected at most 16, got {self.conv}")
        if self.index_heads > MAX_INDEX_HEADS:
            raise ValueError(f"index_heads: expected at most {MAX_INDEX_HEADS}, got {self.index_heads}")
        checked_block_score(self.block_score, self.block_size)
        checks.number("rotary_factor", self.rotary_factor, low=0.0, high=1.0)
        _check_common(self)


def _check_common(recipe: ScoreRecipe | IndexRecipe) -> None:
    if recipe.recency is not None and checks.number("recency", recipe.recency, low=0.0, high=checks.MAX_FACTOR) == 0:
        raise ValueError(f"recency: expected None, or a number > 0, got {recipe.recency}")
    if not isinstance(recipe.local_heads, str) or recipe.local_heads != "half":
        checks.natural_int("local_heads", recipe.local_heads)
    checks.each(checks.flag, sharp=recipe.sharp, explore=recipe.explore)
    checks.number_drawn("queries", recipe.queries)
    checks.number("last", recipe.last, low=0.0, high=1.0)


def refuse_fields(recipe: type[ScoreRecipe | IndexRecipe], options: dict[str, Any]) -> None:
    """Refuses options of a layer that belong in its recipe."""
    for field in dataclasses.fields(recipe):
        if field.name in options:
            raise TypeError(f"{field.name}: expected it in the recipe, recipe={recipe.__name__}({field.name}=...)")


def recommended_sizes(
    num_heads: int, num_kv_heads: int | None, visible: int, local_part: int, local_heads: int | Literal["half"]
) -> dict[str, int]:
    """window and local of layers with so many local heads whose heads see ``visible`` keys on average; local is visible / local_part."""
    heads = num_heads if num_kv_heads is None else num_kv_heads
    checks.positive_int("visible", visible)
    checks.length("visible", visible)
    checks.positive_int("num_heads" if num_kv_heads is None else "num_kv_heads", heads)
    if visible % 4:
        raise ValueError(f"visible: expected a multiple of 4, got {visible}")
    if local_heads == "half" and heads < 2:
        raise ValueError(f"num_kv_heads: expected at least 2, half of which see the last keys alone, got {heads}")
    local, selecting = visible // local_part, heads - (heads // 2 if local_heads == "half" else local_heads)
    return {"window": (visible - local) * heads // max(1, selecting), "local": local}
