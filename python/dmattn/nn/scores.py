"""What makes scores of keys learn which keys to keep: a bias by position, noise, and a loss that shows them dense attention."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from dmattn import checks
from dmattn._library import renewed
from dmattn.attention import attention
from dmattn.call import autocast, options_of
from dmattn.masks import FOREVER, IntervalMask
from dmattn.masks.interval import segment_ends
from dmattn.renamed import renamed
from dmattn.sharding import any_sharded, beside, refuse
from dmattn.sizes import key_bias_rows, sizes_of

STEEPEST_TO_FLATTEST = 2048.0  # quotient of the slopes of the first and the last key head at first


def initial_slopes(steepest: float, heads: int) -> Tensor:
    """Logarithms of the slopes of ``heads`` key heads, [heads]: each is the same part of the one before (ALiBi, arXiv 2108.12409)."""
    return torch.linspace(math.log(steepest), math.log(steepest / STEEPEST_TO_FLATTEST), heads)


def slopes_of(log_slope: Tensor) -> Tensor:
    """The slopes of key heads, [Hkv], in float32 or wider."""
    return log_slope.to(torch.promote_types(log_slope.dtype, torch.float32)).exp()


def recency_of(log_slope: Tensor, length: int) -> Tensor:
    """slope * position, [1, Hkv, length], in float32 or wider: to every query later keys of a head rank higher by the same amount."""
    slope = slopes_of(log_slope)
    return slope[None, :, None] * beside(slope, torch.arange(length, device=slope.device, dtype=slope.dtype))


def gumbel_like(scores: Tensor) -> Tensor:
    """Noise under which the best scores are a sample without replacement from softmax(scores), drawn from torch's generator."""
    uniform = torch.rand_like(scores, dtype=torch.promote_types(scores.dtype, torch.float32))
    return -torch.log(-torch.log(uniform.clamp(1e-6, 1 - 1e-6)))


@renamed(sink="sink_keys")
def score_loss(
    query: Tensor,
    key: Tensor,
    scores: Tensor,
    *,
    key_bias: Tensor | None = None,
    base: IntervalMask | None = None,
    local: int = 0,
    sink_keys: int = 0,
    queries: int = 64,
    last: float = 0.0,
    sharp: bool = False,
    first_head: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """How badly scores predict which keys will be attended to: a loss, one number a key head, for causal self-attention.

    Selection has no gradient, and a key that nobody selects tells its score nothing. So a few queries, drawn at random, look at all keys.
    For each of them the loss is the cross-entropy between its attention mass on the keys that compete for the dynamic window (those that
    are older than ``local`` and no sinks), and the softmax of their scores. A query counts as much as it attends to such keys. The loss is
    least where scores are logarithms of the attention mass that later queries give; the best of them then hold the most attention.

    Only ``scores`` get a gradient, and in forward mode only their tangents count. The gradient is computed together with the loss, so that
    nothing but its [B, Hkv, S] numbers is kept for backward, and it cannot be differentiated again. Memory during the call: ``queries``
    rows of dense attention, [B, H, queries, S] in float32, a few times.

    Args:
        query: [B, H, S, D], as attention takes it (rotated).
        key: [B, Hkv, S, D].
        scores: [B, Hkv, S], what the selection goes by. A key whose score is +inf, -inf or NaN does not compete, because it has its place
            or never gets one, and its score gets no gradient.
        key_bias: what attention adds to the logits of each key, [B|1, H|Hkv|1, S].
        base, local, sink_keys: as in :meth:`IntervalMask.top_k`.
        queries: number of queries drawn, > 0; one from each part of the sequence, the same for all heads, from torch's generator.
        last: this part of them is drawn from the last sixteenth of the sequence, where what is asked about a text stands.
        sharp: whether a query's part of the loss is multiplied by its largest weight on a key that competes. A query that looks for
            one key alone needs that key; one that looks at many is served by others, too.
        first_head: the key heads from this one on have a loss; the work for those before is saved.
        scale, softcap: as in :func:`dmattn.attention`.

    Returns:
        [Hkv - first_head], in nats, float32 (float64 for float64 scores, whatever query and key are): means over the batch and the drawn
        queries. Queries that ``base`` makes padding, because their own key is hidden, count as 0.

    Raises:
        TypeError, ValueError: as :func:`dmattn.dynamic_mask_attention`; a DTensor; or query and key differ in length.
    """
    return _taught(query, key, None, scores, key_bias, base, local, sink_keys, queries, last, sharp, first_head, scale, softcap)[
        1
    ]


def explored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    scores: Tensor,
    *,
    key_bias: Tensor | None = None,
    base: IntervalMask | None = None,
    local: int = 0,
    sink_keys: int = 0,
    queries: int = 64,
    last: float = 0.0,
    sharp: bool = False,
    first_head: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Gives the queries that :func:`score_loss` draws the output of attention to all keys, so that queries and keys learn beyond the window.

    Args:
        query, key, scores and the others: as in :func:`score_loss`.
        value: [B, Hkv, S, Dv].
        out: [B, H, S, Dv], what attention with the windows gives.

    Returns:
        (out with the rows of the drawn queries in place of its own, with all gradients; the loss of :func:`score_loss`).

    Raises:
        TypeError, ValueError: as :func:`score_loss`, or value or out does not fit.
    """
    checks.tensor("query", query), checks.tensor("out", out)
    if out.shape != (*query.shape[:3], checks.tensor("value", value).shape[-1]):
        raise ValueError(f"out: expected [B, H, S, Dv] = {[*query.shape[:3], value.shape[-1]]}, got {checks.shape_of(out)}")
    dense, loss, rows = _taught(
        query, key, value, scores, key_bias, base, local, sink_keys, queries, last, sharp, first_head, scale, softcap
    )
    if dense is None:
        return out, loss
    # A product puts the rows in their places, because the gradient of index_copy does not compile with torch 2.11. Of a query that was
    # drawn more than once, it takes the first row: a mean of equal rows would be rounded.
    is_first = F.pad(rows[1:] != rows[:-1], (1, 0), value=True)
    places = (rows == torch.arange(out.shape[2], device=rows.device)[:, None]) & is_first  # [S, R]
    return torch.where(places.any(1)[:, None], places.to(dense.dtype) @ dense, out), loss


def _taught(
    query: Tensor, key: Tensor, value: Tensor | None, scores: Tensor, key_bias: Tensor | None, base: IntervalMask | None, local: int,
    sink_keys: int, queries: int, last: float, sharp: bool, first_head: int, scale: float | None, softcap: float,
) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
    """(the drawn queries' attention to all keys [B, H, R, Dv] if value is given, the loss of each head, which queries were drawn [R])."""
    if any_sharded((query, key, value, scores, key_bias, getattr(base, "end", None))):
        refuse("score_loss")
    query, key, values = autocast(query, key, key if value is None else value)
    sizes = sizes_of(query, key, values)
    options = options_of(sizes, None, True, scale, softcap)
    key_bias = None if key_bias is None else key_bias_rows(key_bias, sizes)
    checks.number_drawn("queries", queries)
    checks.number("last", last, low=0.0, high=1.0)
    checks.flag("sharp", sharp)
    checks.selection(1, local, sink_keys, True)
    checks.natural_int("first_head", first_head)
    if first_head >= key.shape[1]:
        raise ValueError(f"first_head: expected less than the number of key heads {key.shape[1]}, got {first_head}")
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"key: expected as many keys as queries, {query.shape[2]}, got {key.shape[2]}")
    checks.dtype("scores", checks.tensor("scores", scores), checks.DTYPES["cpu"])
    if scores.shape != key.shape[:3]:
        raise ValueError(f"scores: expected [B, Hkv, S] = {list(key.shape[:3])}, got {checks.shape_of(scores)}")
    checks.same_device("scores", scores, query)
    ends = None if base is None else segment_ends(base, scores)
    rows = _drawn(key.shape[2], queries, last, key.device)
    of_heads = scores[:, first_head:].to(torch.promote_types(scores.dtype, torch.float32))
    if 0 in query.shape[:3]:
        return None, of_heads.sum((0, 2)), rows

    # A query whose own key is hidden is padding: it teaches nothing and may hold anything.
    group, drawn = query.shape[1] // key.shape[1], query.index_select(2, rows)  # [B, H, R, D]
    is_real = None if ends is None else ends[:, :, rows] > rows
    if is_real is not None:
        of_query_heads = is_real.repeat_interleave(group, 1) if is_real.shape[1] > 1 else is_real
        drawn = torch.where(of_query_heads[..., None], drawn, 0.0)
    dense = None
    if value is not None:
        start = _place(rows, torch.arange(key.shape[2], device=key.device)[None, None])
        seen = IntervalMask(start, torch.full_like(start, FOREVER) if ends is None else _place(rows, ends))
        dense = attention(
            drawn, key, values, seen, key_bias=key_bias, scale=options.scale, softcap=options.softcap, query_offset=0
        )

    def from_first(given: Tensor | None, heads: int = key.shape[1]) -> Tensor | None:
        return given if given is None or given.shape[1] == 1 else given[:, first_head * given.shape[1] // heads :]

    with torch.no_grad():
        certain = _certain(scores, base, local, sink_keys) if local or sink_keys else None
        given = (
            drawn[:, first_head * group :], key[:, first_head:], of_heads, from_first(key_bias), rows, from_first(is_real),
            from_first(ends), from_first(certain), sharp, options.scale, options.softcap,
        )  # fmt: skip
        loss, gradient = _whole_or_in_parts(*given)
    return dense, _with_gradient(loss, of_heads, gradient), rows


def _drawn(length: int, queries: int, last: float, device: torch.device) -> Tensor:
    """Positions of queries in order, int64 [queries]: one from each part of the sequence, and then those from its last sixteenth."""
    late = round(queries * last)
    spread = queries - late
    drawn = torch.cat((
        (torch.arange(spread, device=device) + torch.rand(spread, device=device)) * (length / max(spread, 1)),
        length * (1 - torch.rand(late, device=device) / 16),
    ))  # fmt: skip
    return drawn.long().clamp(max=max(length - 1, 0)).sort().values


def _place(rows: Tensor, positions: Tensor) -> Tensor:
    """How many of ``rows`` stand before each position, int32."""
    return (rows < positions[..., None]).sum(-1, dtype=torch.int32)


def _certain(scores: Tensor, base: IntervalMask | None, local: int, sink_keys: int) -> Tensor:
    """The end of each key's interval where scores decide nothing, int32 [B|1, Hkv|1, S]."""
    if base is None:
        return IntervalMask.streaming(scores.shape[2], sink_keys, local, device=scores.device).end
    return IntervalMask.top_k(scores, 0, base=base, local=local, sink_keys=sink_keys).end


def _whole_or_in_parts(*given: Any) -> tuple[Tensor, Tensor]:
    """:func:`_loss_and_gradient`, on a CPU in parts, for which compiled code calls an op: to compile what is in it takes a CPU longer than
    most runs save."""
    scores: Tensor = given[2]
    if scores.device.type != "cpu" or torch.compiler.is_exporting():
        return _loss_and_gradient(*given, batch=scores.shape[0])
    if torch.compiler.is_compiling():
        loss, gradient = torch.ops.dmattn_nn.score_loss(*(x.detach() if isinstance(x, Tensor) else x for x in given))
        return loss, gradient
    return _in_parts(*given)


def _in_parts(drawn: Tensor, key: Tensor, scores: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """:func:`_loss_and_gradient` of one sequence and key head after the other, whose weights stay in the CPU's cache."""
    batch, heads = scores.shape[:2]

    def part(x: Any, b: int, h: int) -> Any:
        """Of [B|1, n * h|1, ...]; ``rows`` and options, which are tensors under torch.jit.trace, belong to all."""
        if not isinstance(x, Tensor) or x.dim() < 2:
            return x
        x, n = x if x.shape[0] == 1 else x[b : b + 1], x.shape[1] // heads
        return x if x.shape[1] == 1 else x[:, h * n : (h + 1) * n]

    parts = [
        [_loss_and_gradient(*(part(x, b, h) for x in (drawn, key, scores, *given)), batch=batch) for h in range(heads)]
        for b in range(batch)
    ]
    losses = torch.stack([torch.cat([loss for loss, _ in row]) for row in parts])
    return losses.sum(0), torch.cat([torch.cat([gradient for _, gradient in row], 1) for row in parts])


library = renewed("dmattn_nn")
library.define(
    "score_loss(Tensor drawn, Tensor key, Tensor scores, Tensor? key_bias, Tensor rows, Tensor? is_real, Tensor? ends, Tensor? certain, "
    "bool sharp, float scale, float softcap) -> (Tensor, Tensor)"
)
library.impl("score_loss", _in_parts, "CPU")


@partial(torch.library.register_fake, "dmattn_nn::score_loss", lib=library)
def _(drawn: Tensor, key: Tensor, scores: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return scores.new_empty(scores.shape[1]), scores.new_empty(scores.shape)


def _loss_and_gradient(
    drawn: Tensor, key: Tensor, scores: Tensor, key_bias: Tensor | None, rows: Tensor, is_real: Tensor | None, ends: Tensor | None,
    certain: Tensor | None, sharp: bool, scale: float, softcap: float, *, batch: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss of each head, [h], and its gradient by ``scores``, [B, h, S].

    drawn [B, H, R, D] are the queries at ``rows`` [R], ``is_real`` [B|1, h|1, R] those that teach (None: all); key [B, h, S, D].
    ``ends`` [B|1, h|1, S] says where visibility of keys ends and
    ``certain`` up to which position they are visible without being selected; None: nowhere. ``batch`` sequences share the mean.
    """
    heads, length = scores.shape[1:]
    seen = (torch.arange(length, device=rows.device) <= rows[:, None])[None, None]  # [B|1, h|1, R, S]
    if ends is not None:
        seen = seen & (rows[:, None] < ends[:, :, None])
    competing = seen & scores.isfinite()[:, :, None]
    if certain is not None:
        competing = competing & (rows[:, None] >= certain[:, :, None])

    # The attention mass of these queries on each key when they see all.
    logits = drawn.unflatten(1, (heads, -1)) @ key[:, :, None].transpose(3, 4)  # [B, h, H / h, R, S]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if key_bias is not None:
        logits = logits + key_bias.unflatten(1, (heads if key_bias.shape[1] > 1 else 1, -1))[..., None, :]
    logits = torch.where(seen[:, :, None], logits, -math.inf)
    weights = logits.softmax(4)
    if key_bias is not None:  # which may hide all keys of a query: its mass is 0
        weights.masked_fill_(logits.amax(4, keepdim=True) == -math.inf, 0.0)
    weights = weights.mean(2)
    counted = competing if is_real is None else competing & is_real[..., None]
    mass = torch.where(counted, weights, 0.0)
    if sharp:
        mass = mass * mass.amax(3, keepdim=True)

    predicted = torch.log_softmax(torch.where(competing, scores[:, :, None], -math.inf), dim=3)
    predicted = torch.where(competing, predicted, -1e9)  # finite, and nothing after exp; NaN where no key competes
    # A mean whose parts are small before they are added: scores may be as far below the others as their dtype allows.
    mass = mass / (batch * rows.shape[0])
    gradient = (mass.sum(3, keepdim=True) * predicted.exp() - mass).sum(2)
    # Float64 queries beside float32 scores make wider sums.
    return -(mass * predicted).sum((0, 2, 3)).to(scores.dtype), gradient.to(scores.dtype)


def _with_gradient(loss: Tensor, scores: Tensor, gradient: Tensor) -> Tensor:
    """The loss [h] of scores [B, h, S] whose gradient is known. To differentiate that once more raises in eager calls."""
    if torch.compiler.is_compiling():  # the compiler warns of the class below
        given = torch.where(gradient != 0, scores, 0.0)  # not where scores are -inf
        # no_grad stops gradients, but no tangents, which the second term has alone.
        return loss.detach() + (gradient * (given - given.detach())).sum((0, 2))
    known: Tensor = _KnownGradient.apply(scores, loss, gradient)
    return known


class _KnownGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[2])
        ctx.save_for_forward(inputs[0], inputs[2])

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor, None, None]:
        scores, gradient = ctx.saved_tensors
        first: Tensor = _OnlyOnce.apply(of_loss[:, None] * gradient, scores)
        return first, None, None

    @staticmethod
    def jvp(ctx: Any, of_scores: Tensor, *_: object) -> Tensor:
        scores, gradient = ctx.saved_tensors
        first: Tensor = _OnlyOnce.apply(torch.where(gradient != 0, of_scores, 0.0) * gradient, scores)
        return first.sum((0, 2))


class _OnlyOnce(torch.autograd.Function):
    """A derivative by ``scores`` that was computed without them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, scores: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> NoReturn:
        raise RuntimeError("score_loss: its gradient cannot be differentiated again")

    @staticmethod
    def jvp(ctx: Any, *_: object) -> NoReturn:
        raise RuntimeError("score_loss: its gradient cannot be differentiated again")
