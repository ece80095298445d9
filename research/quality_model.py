"""The transformer that `quality.py` trains: one model, whose attention differs by settings alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import dmattn
import torch
import torch.nn.functional as F
from dmattn.masks.interval import FOREVER
from dmattn.nn import rotate
from dmattn.nn.scores import drawn_rows, explored, with_dense_rows
from experiments import budget_loss, gate_scores, gated_attention, gumbel_like
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that tells one run from another. Tasks and variants are sets of these; a job or `--set` overrides them one by one."""

    task: str = "text"
    variant: str = "dense"
    name: str = ""  # what tables call the run; empty: the variant
    seed: int = 1
    # Model
    length: int = 8192
    batch: int = 4
    layers: int = 6
    width: int = 512
    heads: int = 8
    kv_heads: int = 0  # key heads; 0: as many as query heads. Masks, scores and slopes belong to key heads
    conv: int = 1  # positions of a causal convolution over queries, keys and values, before rotation; 1: none
    conv_hidden: bool = False  # whether it is over what queries, keys, values and the indexer are computed from, instead
    rope_theta: float = 10000.0
    rope_share: float = 1.0  # part of the dimensions of a head that rotate
    rope_plain: bool = False  # whether the plain heads alone rotate
    # Mask: every query sees at most `visible` keys, of which the last `local` and the first `sink` for certain
    mask: str = "dense"  # dense, sliding, streaming, dynamic, query
    visible: int = 512
    local: int = 0
    sink: int = 0
    # So many key heads see the last `plain_local` keys and the sinks; the others see more, so that the mean is `visible`
    plain_heads: int = 0
    plain_local: int = 128
    plain_layers: int = 0  # so many layers, the first ones, have plain heads; 0: all
    dense_every: int = 0  # if > 0, every so many layers one is dense, the last of them: what hybrid models do
    # Lists of a mask by query: what the indexer chooses
    index_block: int = 1  # keys chosen together
    index_pooled: bool = False  # whether blocks are chosen by their mean key
    index_shared: bool = False  # one list for all heads of a layer, not one for each head
    index_layers: int = 1  # so many neighbouring layers have the same lists, which the first of them chooses
    lifetime_window: int = 0  # if > 0, queries choose among the keys that live in a bounded cache of so many (and the local ones)
    index_heads: int = 4
    index_dim: int = 32
    # Recency: slope * position on every logit, a learned slope a head (ALiBi, arXiv 2108.12409)
    recency: float = 0.0  # steepest slope at first; 0: none
    recency_flat: float = 0.0  # flattest slope at first; 0: 1 / length
    flat_heads: int = 0  # so many heads, the last ones, have no slope at all
    recency_selects: bool = True  # whether selection goes by score + slope * position, or by the score alone
    # Scores of a dynamic mask
    score: str = "exp"  # exp: exp(A * softplus(.)) as the Doge model has it; linear
    score_source: str = "value"  # value, key, hidden
    score_hidden: int = 0  # units of a hidden layer before the score; 0: none
    # Keys after a key, at most `local`, whose mean source the score also reads (a key competes only once `local` old)
    lookahead: int = 0
    bias: str = "score"  # what is added to a key's logits: score, scaled (times a learned number a head, 0 at first), none
    score_trunk: bool = True  # whether gradients of scores reach the layers below
    noise: float = 0.0  # Gumbel noise on the scores while they select in training
    noise_until: float = 1.0  # part of the run after which the noise, falling linearly, is 0
    dense_until: float = 0.0  # part of the run in which layers that select are dense
    index_warm_up: int = 0  # steps after that part in which the indexers alone learn; not counted among the steps
    distill: bool = False  # whether, after that part, the model learns its own dense predictions instead of the targets
    anneal_until: float = 0.0  # part of the run until which the window falls, geometrically, from the length to its size
    teach: float = 0.0  # weight of a loss that teaches the scores the dense attention of `teach_rows` queries a step
    teach_rows: int = 64
    teach_last: float = 0.0  # part of those queries that are drawn from the last sixteenth of the sequence
    teach_from: float = 0.0  # the others are drawn from behind this part of the sequence
    teach_peak: bool = False  # whether a query counts as much as its largest weight on one key that competes
    explore: bool = False  # whether those queries really attend densely in that step, so that queries and keys learn from it too
    # Training
    steps: int = 3000
    seconds: float = 0.0  # if > 0, instead of steps: seconds of training, without compilation and evaluation
    lr: float = 1e-3
    gate_lr: float = 3.0  # factor of lr for the logarithms of slopes and for scales, which are few and have far to go
    warm_up: int = 100
    lr_end: float = 0.1
    weight_decay: float = 0.1
    beta2: float = 0.95
    clip: float = 1.0
    compile: bool = True
    replayed: bool = False  # whether a CUDA graph has the loss and gradients of a step: the host's speed does not matter
    evaluations: int = 10
    eval_batches: int = 8
    # Tasks of recall
    pairs: int = 32  # statements in a sequence, each asked for once
    symbols: int = 128  # kinds of names and kinds of values (mqar); length of a secret (passkey)
    near: float = 0.5  # part of the training sequences that ask soon after a statement, so that every variant can learn to recall
    text_weight: float = 0.0  # weight of the loss of all other bytes (passkey)

    def __post_init__(self) -> None:
        choices = {
            "mask": ("dense", "sliding", "streaming", "dynamic", "query", "gated"),
            "score": ("exp", "linear"),
            "score_source": ("value", "key", "hidden"),
            "bias": ("score", "scaled", "none"),
        }
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field}: expected one of {', '.join(allowed)}, got {getattr(self, field)!r}")
        if self.replayed and (self.noise or self.anneal_until):
            raise ValueError("replayed: expected False where many steps differ (noise, anneal_until), got True")
        if self.heads % self.kv:
            raise ValueError(f"kv_heads: expected a divisor of heads={self.heads}, got {self.kv_heads}")
        if self.mask == "gated" and self.kv != self.heads:
            raise ValueError(f"kv_heads: expected as many as heads={self.heads} for a gated mask, got {self.kv_heads}")
        if self.distill and (self.mask != "gated" or not 0 < self.dense_until < 1):
            raise ValueError(f"distill: expected False, or a gated mask with dense_until between 0 and 1, got {self.dense_until}")
        if self.mask in ("dynamic", "query", "gated") and self.window < 1:
            raise ValueError(f"local, sink: expected fewer than visible={self.visible} together, got {self.local} + {self.sink}")
        if self.lifetime_window and (self.mask != "query" or self.index_shared or self.score != "linear"):
            raise ValueError("lifetime_window: expected 0, or a linear score and a list for each head of a mask by query")
        if self.index_layers != 1 and (self.mask != "query" or self.lifetime_window or self.dense_every):
            raise ValueError(f"index_layers: expected 1, or lists of every layer without lifetimes, got {self.index_layers}")
        if self.mask == "query" and self.dense_until and (self.index_layers != 1 or self.lifetime_window or self.dense_every):
            raise ValueError(f"dense_until: expected 0, or lists of every layer without lifetimes, got {self.dense_until}")
        if self.index_warm_up and not (self.mask == "query" and self.dense_until):
            raise ValueError(f"index_warm_up: expected 0, or a mask by query with dense_until, got {self.index_warm_up}")
        if self.plain_layers and not (self.mask == "query" and self.plain_heads and self.index_layers == 1):
            raise ValueError(f"plain_layers: expected 0, or lists of every layer with plain heads, got {self.plain_layers}")
        if self.mask == "query" and self.window % self.index_block:
            raise ValueError(f"index_block: expected a divisor of the {self.window} keys that are chosen, got {self.index_block}")
        if self.lookahead > self.local or (self.lookahead and self.bias != "none"):
            raise ValueError(f"lookahead: expected at most local={self.local}, and bias=none, got {self.lookahead}, {self.bias}")
        if self.mask == "dynamic" and self.bias == "none" and not self.teach:
            raise ValueError("bias: expected score or scaled where teach=0, or nothing would teach the scores, got none")

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def window(self) -> int:
        """Keys that compete heads keep beside the local ones and the sinks."""
        spared = self.plain_heads * (self.visible - self.plain_local - self.sink) // max(1, self.kv - self.plain_heads)
        return self.visible + spared - self.local - self.sink

    def window_at(self, progress: float) -> int | None:
        """The window after a part of the run, a multiple of 64 while it falls; None: dense."""
        if progress < self.dense_until:
            return None
        if progress >= self.anneal_until:
            return self.window
        share = (progress - self.dense_until) / (self.anneal_until - self.dense_until)
        return max(self.window, round(math.exp((1 - share) * math.log(self.length) + share * math.log(self.window)) / 64) * 64)


# Variants --------------------------------------------------------------------------------------------------------------------------

DYNAMIC = {"mask": "dynamic"}
LINEAR = {**DYNAMIC, "score": "linear", "score_source": "hidden"}
TAUGHT = {**LINEAR, "bias": "none", "teach": 1.0, "score_trunk": False}
RECENCY = {"recency": 0.25}
GATE = 4.0  # added to scores that are gates, which begin at 0: at first keys stay
QUERY = {"mask": "query", "teach": 1.0}
GATED = {"mask": "gated", "score": "linear", "score_source": "hidden", "teach": 1.0, "anneal_until": 0.7}


def variant(name: str, visible: int, heads: int) -> dict[str, Any]:
    """The settings of a variant, for numbers of visible keys and of key heads. Parts joined by "+" add up: `dynamic+local+recency`.

    Raises:
        ValueError: a part that is not one of PARTS.
    """
    parts: dict[str, dict[str, Any]] = {
        "dense": {"mask": "dense"},
        "sliding": {"mask": "sliding"},
        "streaming": {"mask": "streaming", "sink": 4},
        "dynamic": DYNAMIC,  # the layer as it is: exp score from the value, added to the logits
        "linear": LINEAR,
        "gated": GATED,  # a gate evicts keys once they have left the local window
        "distilled": {"distill": True, "dense_until": 0.4, "anneal_until": 0.8},  # behind "gated": gates come into a dense model
        "query": QUERY,  # an indexer chooses keys for each query
        **{f"block{size}": {"index_block": size} for size in (4, 16, 64)},
        "pooled": {"index_pooled": True},
        "shared": {"index_shared": True},
        "pairs": {"index_layers": 2},
        "triples": {"index_layers": 3},
        **{  # a bounded cache, in which lists choose
            f"living{n}": {"lifetime_window": n * visible, "score": "linear", "score_source": "hidden", "score_trunk": False}
            for n in (1, 2, 4)
        },
        "converted": {"dense_until": 0.9, "index_warm_up": 200},  # behind "query": a model trained dense gets lists
        "hybrid": {"dense_every": 3},
        "taught": TAUGHT,
        "local": {"local": visible // 2},
        "local4": {"local": visible // 4},
        "local8": {"local": visible // 8},
        "sink": {"sink": 4},
        "recency": RECENCY,
        "value": {"score_source": "value"},
        "key": {"score_source": "key"},
        "mlp": {"score_hidden": 128},
        "scaled": {"bias": "scaled"},
        "biased": {"bias": "score", "score_trunk": True},
        "warm": {"dense_until": 0.2},  # dense first, then at once the window
        "anneal": {"dense_until": 0.05, "anneal_until": 0.5},
        "noise": {"noise": 1.0, "noise_until": 0.7},
        "explore": {"explore": True},
        "rows4": {"teach_rows": 256},
        "peak": {"teach_peak": True},
        "last": {"teach_last": 0.5},
        "late": {"teach_from": 0.5},
        "mixed": {"plain_heads": heads // 2},
        "quarter": {"plain_heads": heads // 4},
        "flat": {"flat_heads": heads // 4},  # beside recency: heads that look for content wherever it is
        "unrotated": {"rope_share": 0.0},  # beside recency, which says how far away a key is
        "barely": {"rope_share": 0.25},
        "nearby": {"rope_plain": True},  # beside "mixed": heads that look far away know positions by recency alone
        "ahead": {"lookahead": visible // 8},
    }
    chosen: dict[str, Any] = {}
    for part in name.split("+"):
        if part not in parts:
            raise ValueError(f"variant: expected parts among {', '.join(parts)}, got {part!r}")
        chosen |= parts[part]
    return chosen


# Model -----------------------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """[B, S, E] -> [B, S, E], and the loss that teaches the scores (0 where there is none)."""

    def __init__(self, settings: Settings, chooses: bool = True) -> None:
        super().__init__()
        self.settings = s = settings
        self.size, self.group = s.width // s.heads, s.heads // s.kv
        self.watched = False  # whether to keep, of every head, the share of dense attention that the mask shows
        self.sizes = [s.heads, s.kv, s.kv]
        self.qkv = nn.Linear(s.width, sum(self.sizes) * self.size, bias=False)
        self.out = nn.Linear(s.width, s.width, bias=False)
        if s.conv > 1:
            self.taps = nn.Parameter(torch.zeros(s.conv - 1, s.width if s.conv_hidden else self.qkv.out_features))
        if s.recency:
            flat = s.recency_flat or 1 / s.length
            self.log_slope = nn.Parameter(torch.linspace(math.log(s.recency), math.log(flat), s.kv - s.flat_heads))
        if s.mask == "query" and chooses:
            self.indexer = dmattn.nn.Indexer(
                s.width, 1 if s.index_shared else s.kv - s.plain_heads, k=s.window // s.index_block, num_heads=s.index_heads,
                head_dim=s.index_dim, block_size=s.index_block, block_score="mean_key" if s.index_pooled else "max", local=s.local,
                sink_keys=s.sink,
            )  # fmt: skip
        if s.mask in ("dynamic", "gated") or s.lifetime_window:
            width = s.width if s.score_source == "hidden" else s.kv * self.size
            inner, sources = s.score_hidden or width, 2 if s.lookahead else 1
            self.before_score = nn.Linear(sources * width, inner) if s.score_hidden or s.lookahead else nn.Identity()
            self.to_score = nn.Linear(inner, s.kv)
            self.A = nn.Parameter(torch.zeros(s.kv))
            self.scale = nn.Parameter(torch.zeros(s.kv))

    def forward(
        self, x: Tensor, window: int | None, noise: Tensor, lists: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        s = self.settings
        x = self.convolved(x) if s.conv_hidden else x
        query, key, value = self.projected(x)
        positions = torch.arange(x.shape[1], device=x.device)
        recency = F.pad(self.log_slope.exp(), (0, s.flat_heads))[None, :, None] * positions if s.recency else None
        if s.mask == "query":
            out, loss, lists = self.by_query(x, query, key, value, recency, lists, window)
            return self.out(out.transpose(1, 2).flatten(2)), loss, lists
        if s.mask == "gated" and window is not None:
            out, loss = self.gated(x, query, key, value, recency, window)
            return self.out(out.transpose(1, 2).flatten(2)), loss, None
        score = None
        bias, mask = recency, self.fixed_mask(x) if s.mask != "dynamic" else None
        if s.mask == "dynamic":
            score = self.scores(x if s.score_source == "hidden" else key if s.score_source == "key" else value)
            own = {"score": score, "scaled": self.scale[:, None] * score, "none": None}[s.bias]
            bias = own if recency is None else recency if own is None else own + recency
            if recency is not None and s.recency_selects:
                score = score + recency
            if window is not None:
                mask = self.selected(
                    score.detach() + noise * gumbel_like(score) if s.noise and self.training else score.detach(), window
                )
        if mask is None and bias is None:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.group > 1)
        else:
            mask = dmattn.IntervalMask.causal(x.shape[1], device=x.device) if mask is None else mask  # kernels that take key_bias
            out = dmattn.attention(query, key, value, mask, key_bias=bias)
        loss = torch.zeros((), device=x.device)
        if score is not None and self.training and (s.teach or s.explore):
            out, loss = self.explored(query, key, value, bias, score, out)
        if self.watched and mask is not None:
            self.covered = self.coverage(query, key, bias, mask)
        return self.out(out.transpose(1, 2).flatten(2)), loss, None

    def by_query(
        self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, given: Tensor | None, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """[B, H, S, D] where each query chooses its keys, as in :class:`dmattn.nn.IndexedAttention`; the loss of the indexer; and the lists:
        those given, or chosen here. Without a window all queries see all keys, and there are no lists."""
        s, length, first = self.settings, x.shape[1], self.settings.plain_heads
        parts = None if given is not None else self.indexer(x)
        ranks, living = None, None
        if s.lifetime_window:
            ranks = self.scores(x) if bias is None else self.scores(x) + bias
            living = dmattn.IntervalMask.top_k(ranks.detach()[:, first:], s.lifetime_window, local=s.local, sink_keys=s.sink)
        lists: Any = None
        if window is not None and parts is not None:
            lists = self.indexer.select(parts, living)
        elif window is not None:
            lists = dmattn.IndexMask(given, s.index_block, is_causal=True, local=s.local, sink_keys=s.sink)
        out = torch.cat([
            dmattn.attention(
                query[:, begin * self.group : end * self.group], key[:, begin:end], value[:, begin:end], mask,
                key_bias=None if bias is None else bias[:, begin:end], is_causal=True,
            )
            for begin, end, mask in self.masks_of_heads(lists, living, length, x.device)
        ], 1)  # fmt: skip
        loss, indices = torch.zeros((), device=x.device), None if lists is None else lists.indices
        if not self.training:
            return out, loss, indices
        rows = drawn_rows(length, s.teach_rows, s.teach_last, x.device)
        own_bias = None if bias is None else bias[:, first:]
        if parts is not None:
            loss = self.indexer.loss(
                parts,
                query[:, first * self.group :],
                key[:, first:],
                rows=rows,
                base=living,
                key_bias=own_bias,
                sharp=s.teach_peak,
            )
        if ranks is not None:
            out, of_scores = explored(
                query, key, value, out, ranks, s.explore, mean=True, key_bias=bias, local=s.local, sink_keys=s.sink, queries=s.teach_rows,
                last=s.teach_last, sharp=s.teach_peak, first_head=first,
            )  # fmt: skip
            loss = loss + of_scores
        elif s.explore and lists is not None:
            out = with_dense_rows(query, key, value, out, rows, bias, None, self.size**-0.5, 0.0)
        return out, loss, indices

    def masks_of_heads(
        self, lists: dmattn.IndexMask | None, living: dmattn.IntervalMask | None, length: int, device: torch.device
    ) -> list[tuple[int, int, Any]]:
        """Ranges of key heads, each as its first head, the head behind its last, and their mask. Without lists all heads see all keys."""
        s = self.settings
        if lists is None:
            return [(0, s.kv, dmattn.IntervalMask.causal(length, device=device))]
        ranges: list[tuple[int, int, Any]] = [(s.plain_heads, s.kv, lists if living is None else lists & living)]
        if s.plain_heads:
            ranges.insert(0, (0, s.plain_heads, dmattn.IntervalMask.streaming(length, s.sink, s.plain_local, device=device)))
        return ranges

    def gated(
        self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, window: int
    ) -> tuple[Tensor, Tensor]:
        """[B, H, S, D] where gates evict keys, as in :class:`experiments.GatedAttention`, and the loss of more than ``window`` older keys."""
        s, score = self.settings, self.scores(x) + GATE
        if self.training:
            out, older = gated_attention(query, key, value, score, bias, s.local, s.sink, s.plain_heads, s.plain_local)
            return out, budget_loss(older, window)
        mask = self.selected(gate_scores(score.detach()), window)
        if self.watched:
            self.covered = self.coverage(query, key, bias, mask)
        return dmattn.attention(query, key, value, mask, key_bias=bias), torch.zeros((), device=x.device)

    def projected(self, x: Tensor) -> list[Tensor]:
        """query, key, value [B, H, S, D]; query and key know their positions."""
        qkv = self.qkv(x)
        if not self.settings.conv_hidden:
            qkv = self.convolved(qkv)
        query, key, value = qkv.unflatten(2, (-1, self.size)).transpose(1, 2).split(self.sizes, 1)
        return [self.rotated(query), self.rotated(key), value]

    def convolved(self, x: Tensor) -> Tensor:
        """x [B, S, N] and the rows before each one, times what is learned for each channel. Of queries, keys and values the factors are
        applied to the sum so far, so that their products reach further back."""
        total = x
        for back in range(1, self.settings.conv):
            source = x if self.settings.conv_hidden else total
            total = total + self.taps[back - 1].to(x.dtype) * F.pad(source, (0, 0, back, 0))[:, :-back]
        return total

    def rotated(self, x: Tensor) -> Tensor:
        turning = int(self.size * self.settings.rope_share) // 2 * 2
        if not turning:
            return x
        heads = x.shape[1] // self.settings.kv * (self.settings.plain_heads if self.settings.rope_plain else self.settings.kv)
        turned = torch.cat((rotate(x[:, :heads, :, :turning], self.settings.rope_theta), x[:, :heads, :, turning:]), 3)
        return turned if heads == x.shape[1] else torch.cat((turned, x[:, heads:]), 1)

    def scores(self, source: Tensor) -> Tensor:
        """[B, H, S], float32."""
        s = self.settings
        source = source if source.dim() == 3 else source.transpose(1, 2).flatten(2)
        source = source if s.score_trunk else source.detach()
        if s.lookahead:  # the mean of the sources of the keys after each key, 0 beyond the end
            total = F.pad(source.float(), (0, 0, 1, s.lookahead)).cumsum(1)
            later = (total[:, 1 + s.lookahead :] - total[:, 1 : -s.lookahead]) / s.lookahead
            source = torch.cat((source, later.to(source.dtype)), 2)
        if s.score_hidden or s.lookahead:
            source = F.silu(self.before_score(source))
        z = self.to_score(source).float().transpose(1, 2)
        return torch.exp(self.A[:, None] * F.softplus(z)) if s.score == "exp" else z

    def fixed_mask(self, x: Tensor) -> dmattn.IntervalMask | None:
        s = self.settings
        if s.mask not in ("sliding", "streaming"):
            return None
        keys = torch.arange(x.shape[1], device=x.device, dtype=torch.int32)
        local = self.per_head(torch.full_like(keys, s.window + s.local))
        return dmattn.IntervalMask(keys, torch.where(keys < s.sink, FOREVER, keys + local))

    def selected(self, score: Tensor, window: int) -> dmattn.IntervalMask:
        """The interval of each key: it is local first, then competes for a place among `window`; a sink is always there."""
        s = self.settings
        if not s.plain_heads:
            return dmattn.IntervalMask.top_k(score, window, local=s.local, sink_keys=s.sink)
        mask = dmattn.IntervalMask.top_k(score[:, s.plain_heads :], window, local=s.local, sink_keys=s.sink)
        keys = torch.arange(score.shape[2], device=score.device, dtype=torch.int32)
        plain = torch.where(keys < s.sink, FOREVER, keys + s.plain_local).expand(score.shape[0], s.plain_heads, -1)
        return dmattn.IntervalMask(keys, torch.cat((plain, mask.end.expand(score.shape[0], -1, -1)), 1))

    def per_head(self, number: Tensor) -> Tensor:
        """[S] to [1, Hkv, S], `plain_local` in the plain heads; as it is where there are none."""
        s = self.settings
        if not s.plain_heads:
            return number
        plain = torch.full_like(number, s.plain_local).expand(1, s.plain_heads, -1)
        return torch.cat((plain, number.expand(1, s.kv - s.plain_heads, -1)), 1)

    def explored(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, score: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What a few queries attend to where they see all: the output with their dense rows, and the loss of the scores.

        The loss is the cross-entropy, over the keys that have left the local window and are no sinks, between a query's dense attention and
        the softmax of the scores; a query counts as much as it attends to such keys. It is least where a key's score is the logarithm of
        the attention mass that later queries give it, and the best `window` keys then hold the most attention.
        """
        s, length = self.settings, score.shape[2]
        late, begin = round(s.teach_rows * s.teach_last), length * s.teach_from
        spread = s.teach_rows - late
        rows = torch.cat((
            begin + (torch.arange(spread, device=score.device) + torch.rand(spread, device=score.device)) * ((length - begin) / max(spread, 1)),
            length * (1 - torch.rand(late, device=score.device) / 16),
        ))  # fmt: skip
        rows = rows.long().clamp(max=length - 1)
        with torch.set_grad_enabled(s.explore and torch.is_grad_enabled()):
            chances, age = dense_rows(query, key, bias, rows)
        if s.explore:  # a product that puts the rows in their places: the gradient of index_copy does not compile with torch 2.11
            places = rows == torch.arange(length, device=rows.device)[:, None]
            spread = places / places.sum(1, keepdim=True).clamp(min=1)
            dense = spread.to(value.dtype) @ (chances.to(value.dtype) @ value.repeat_interleave(self.group, 1))
            out = torch.where(places.any(1)[:, None], dense.to(out.dtype), out)
        competes = (age >= s.local) & (torch.arange(length, device=age.device) >= s.sink)
        target = chances.detach().unflatten(1, (s.kv, -1)).mean(2) * competes
        if s.teach_peak:
            target = target * target.amax(3, keepdim=True)
        predicted = F.log_softmax(score[:, :, None].masked_fill(~competes, -1e9), 3)
        return out, -(target * predicted).sum(3)[:, s.plain_heads :].mean()

    @torch.no_grad()
    def coverage(self, query: Tensor, key: Tensor, bias: Tensor | None, mask: dmattn.IntervalMask) -> Tensor:
        """Of the attention that 64 queries of the second half would give if they saw all, the share that the mask shows: [H]."""
        length = key.shape[2]
        rows = torch.linspace(length // 2, length - 1, 64, device=key.device).long()
        chances, age = dense_rows(query, key, bias, rows)
        end = mask.end if mask.end.shape[1] == 1 else mask.end.repeat_interleave(self.group, 1)
        shown = (age >= 0) & (rows[:, None] < end[:, :, None])
        return (chances * shown).sum(3).mean((0, 2))


def dense_rows(query: Tensor, key: Tensor, bias: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention weights [B, H, R, S] of the queries at rows [R], and age [R, S], how many positions ago each key was. key and bias have
    Hkv heads."""
    group = query.shape[1] // key.shape[1]
    logits = (query.index_select(2, rows) @ key.repeat_interleave(group, 1).transpose(2, 3)).float() * query.shape[3] ** -0.5
    age = rows[:, None] - torch.arange(key.shape[2], device=key.device)
    logits = logits if bias is None else logits + bias.repeat_interleave(group, 1)[:, :, None]
    return logits.masked_fill(age < 0, -torch.inf).softmax(3), age


class Block(nn.Module):
    def __init__(self, settings: Settings, chooses: bool = True) -> None:
        super().__init__()
        width = settings.width
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(settings, chooses)
        self.gate_and_up = nn.Linear(width, 6 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(
        self, x: Tensor, window: int | None, noise: Tensor, lists: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        mixed, loss, lists = self.attention(self.attention_norm(x), window, noise, lists)
        x = x + mixed
        gate, up = self.gate_and_up(self.mlp_norm(x)).chunk(2, 2)
        return x + self.down(F.silu(gate) * up), loss, lists


class Model(nn.Module):
    """tokens [B, S] and targets [B, S] (-1: none) to the loss of each target in nats, whether it is the likeliest, and the scores' loss."""

    def __init__(self, settings: Settings, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, settings.width)
        every, upper = settings.dense_every, dataclasses.replace(settings, plain_heads=0, plain_layers=0)
        dense = dataclasses.replace(upper, mask="dense", lifetime_window=0, index_layers=1, index_warm_up=0, distill=False)
        self.blocks = nn.ModuleList()
        for layer in range(settings.layers):
            of_layer = upper if 0 < settings.plain_layers <= layer else settings
            of_layer = dense if every and layer % every == every - 1 else of_layer
            self.blocks.append(Block(of_layer, layer % settings.index_layers == 0))
        self.index_layers = settings.index_layers
        self.norm = nn.RMSNorm(settings.width)
        self.head = nn.Linear(settings.width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if (
                parameter.dim() == 2
            ):  # outputs that are added up begin smaller; scores begin equal, so that windows slide at first
                added_up = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * settings.layers) if added_up else 0.02)
            if "to_score" in name:
                nn.init.zeros_(parameter)
            if name.endswith("taps"):
                nn.init.normal_(parameter, std=0.3)
        # One block is compiled and serves all: a model of many layers costs no more time to compile.
        self.run_block, self.read, self.divergence = run_block, read, divergence
        if settings.compile:
            self.run_block, self.read = torch.compile(run_block, fullgraph=True), torch.compile(read, fullgraph=True)
            self.divergence = torch.compile(divergence, fullgraph=True)

    def forward(
        self, tokens: Tensor, targets: Tensor, window: int | None, noise: Tensor, teacher: Model | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """With a teacher, the loss of each target is the divergence from what the teacher predicts with dense attention."""
        x, taught = self.hidden(tokens, window, noise)
        if teacher is None:
            return *self.read(self.norm, self.head, x, targets), taught
        with torch.no_grad():
            theirs = teacher.head(teacher.norm(teacher.hidden(tokens, None, noise)[0]))
        return *self.divergence(self.norm, self.head, x, theirs), taught

    def hidden(self, tokens: Tensor, window: int | None, noise: Tensor) -> tuple[Tensor, Tensor]:
        x, taught = self.embedding(tokens), torch.zeros((), device=tokens.device)
        lists = None
        for number, block in enumerate(self.blocks):
            lists = None if number % self.index_layers == 0 else lists
            x, loss, lists = self.run_block(block, x, window, noise, lists)
            taught = taught + loss
        return x, taught / len(self.blocks)


def run_block(
    block: Block, x: Tensor, window: int | None, noise: Tensor, lists: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    result: tuple[Tensor, Tensor, Tensor | None] = block(x, window, noise, lists)
    return result


def read(norm: nn.Module, head: nn.Module, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = head(norm(x)).float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
    return losses.view_as(targets), logits.argmax(2) == targets


def divergence(norm: nn.Module, head: nn.Module, x: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token: how far its prediction is from a teacher's logits, and whether the likeliest is the same."""
    logits = head(norm(x)).float()
    far = F.kl_div(logits.log_softmax(2), teacher.float().log_softmax(2), log_target=True, reduction="none").sum(2)
    return far, logits.argmax(2) == teacher.argmax(2)
