"""What was tried and is no part of the library: noise where scores select, and gates that evict keys, as a layer and in parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from dmattn import ALWAYS, FOREVER, IntervalMask
from dmattn.compat.merging import Pass, run
from dmattn.nn import DynamicMaskAttention, ScoreRecipe
from torch import Tensor, nn


def gumbel_like(scores: Tensor) -> Tensor:
    """Noise under which the best scores are a sample without replacement from softmax(scores), drawn from torch's generator."""
    uniform = torch.rand_like(scores, dtype=torch.promote_types(scores.dtype, torch.float32))
    return -torch.log(-torch.log(uniform.clamp(1e-6, 1 - 1e-6)))


TEMPERATURE = 0.5  # of gates in training


def gated_attention(
    query: Tensor, key: Tensor, value: Tensor, scores: Tensor, bias: Tensor | None, local: int, sink_keys: int, plain_heads: int,
    plain_local: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention while gates learn to evict (DMS, arXiv 2506.05345): a key that has left the local window stays with a chance, whose logarithm is
    added to its logits.

    The chance is a Gumbel-sigmoid of the score, drawn from torch's generator: near 0 or 1, and differentiable. Two calls, one of the local
    keys and one of the older ones, are merged by their lse, so memory is O(S). The first ``plain_heads`` key heads see ``plain_local`` keys and
    the sinks alone.

    Args:
        query: [B, H, S, D].
        key, value: [B, Hkv, S, D].
        scores: [B, Hkv, S], logits that a key stays.
        bias: added to logits, [B|1, Hkv, S], or None.

    Returns:
        out [B, H, S, D], and [B, Hkv - plain_heads]: how many older keys a query sees on average.
    """
    heads, length = scores.shape[1:]
    uniform = torch.rand_like(scores, dtype=torch.float32).clamp(1e-6, 1 - 1e-6)
    kept = F.logsigmoid((scores.float() + torch.log(uniform) - torch.log1p(-uniform)) / TEMPERATURE)
    keys = torch.arange(length, dtype=torch.int32, device=key.device)
    is_sink, is_plain = keys < sink_keys, torch.arange(heads, device=key.device)[:, None] < plain_heads
    near = torch.where(is_sink, FOREVER, torch.where(is_plain, keys + plain_local, keys + local)).int()
    far = torch.where(is_sink | is_plain, ALWAYS, FOREVER).int()
    passes = [
        Pass(IntervalMask(keys, near[None]), key_bias=bias),
        Pass(IntervalMask(keys + local, far[None]), key_bias=kept if bias is None else bias + kept),
    ]
    later = (length - local - keys).clamp(min=0) / length  # of the queries, those to which a key is an older one
    return run(query, key, value, passes)[0], (kept.exp() * later.masked_fill(is_sink, 0.0)).sum(2)[:, plain_heads:]


def budget_loss(older: Tensor, window: int) -> Tensor:
    """0 where a query sees up to ``window`` older keys on average, and the part that is too much beyond; the mean over heads."""
    return (older / window - 1).clamp(min=0).mean()


def gate_scores(scores: Tensor) -> Tensor:
    """What keys are selected by where gates are hard: -inf, which is never selected, where a key is more likely to go than to stay."""
    return scores.masked_fill(scores < 0, -torch.inf)


class GatedAttention(DynamicMaskAttention):
    """The recommended layer with gates in place of taught scores: dynamic memory sparsification (DMS, arXiv 2506.05345).

    A key's gate decides whether it is evicted once it has left the local window, a delay of ``local`` tokens. In training gates are soft and
    learn from the model's own loss, or from a teacher's logits, and from a budget: call with ``with_score_loss=True`` and add the loss.
    In eval mode they are hard, and the budget is one: of the keys that stay a query sees the best ``window``. So the layer generates with
    the same bounded caches.

    Args:
        given, options: as of DynamicMaskAttention, except ``recipe``.
    """

    def __init__(self, *given: Any, recipe: ScoreRecipe | None = None, **options: Any) -> None:
        super().__init__(*given, recipe=ScoreRecipe() if recipe is None else recipe, **options)
        nn.init.constant_(self.score_proj.bias, 4.0)  # at first keys stay

    def scores(self, source: Tensor) -> Tensor:
        scores = super().scores(source)
        return scores if self.training else gate_scores(scores)

    def forward(self, hidden_states: Tensor, base: Any = None, cache: Any = None, **options: Any) -> Any:
        window, with_loss = options.pop("window", None), options.pop("with_score_loss", False)
        if not self.training:
            if with_loss:
                raise ValueError("with_score_loss: expected False in eval mode, got True")
            return super().forward(hidden_states, base, cache, window=window, **options)
        if base is not None or cache is not None or options:
            raise ValueError("hidden_states: expected no other argument but window and with_score_loss in training")
        query, key, value = self.projected(hidden_states)
        ranks, bias = self.ranked(hidden_states, value)
        scores = ranks if bias is None else ranks - bias
        out, older = gated_attention(query, key, value, scores, bias, self.local, self.sink_keys, self.local_heads, self.local)
        out = self.o_proj(out.transpose(1, 2).flatten(2))
        return (out, budget_loss(older, self.window if window is None else window)) if with_loss else out
