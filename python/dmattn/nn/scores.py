"""What makes scores of keys learn which keys to keep: a bias by position, noise, and a loss that shows them dense attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dmattn import checks
from dmattn.call import Options, autocast, options_of
from dmattn.masks import IntervalMask
from dmattn.sharding import beside
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


def score_loss(
    query: Tensor,
    key: Tensor,
    scores: Tensor,
    *,
    key_bias: Tensor | None = None,
    base: IntervalMask | None = None,
    local: int = 0,
    sink: int = 0,
    queries: int = 64,
    last: float = 0.0,
    sharp: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """How badly scores foretell which keys will be attended to: a loss, one number a key head, for causal self-attention.

    Selection has no gradient, and a key that nobody selects tells its score nothing. So a few queries, drawn at random, look at all keys.
    For each of them the loss is the cross-entropy between what it then pays to the keys that compete for the dynamic window (those that
    are older than ``local`` and no sinks), and the softmax of their scores. A query counts as much as it attends to such keys. The loss is
    least where scores are logarithms of the attention that later queries pay; the best of them then hold the most attention.

    Only ``scores`` get a gradient. Memory: ``queries`` rows of dense attention, [B, H, queries, S] in float32, a few times.

    Args:
        query: [B, H, S, D], as attention takes it (rotated).
        key: [B, Hkv, S, D].
        scores: [B, Hkv, S], what the selection goes by.
        key_bias: what attention adds to the logits of each key, [B|1, H|Hkv|1, S].
        base, local, sink: as in :meth:`IntervalMask.top_k`.
        queries: number of queries drawn, > 0; one from each part of the sequence, the same for all heads, from torch's generator.
        last: this part of them is drawn from the last sixteenth of the sequence, where what is asked about a text stands.
        sharp: whether a query's part of the loss is multiplied by the largest weight it pays to a key that competes. A query that looks for
            one key alone needs that key; one that looks at many is served by others, too.
        scale, softcap: as in :func:`dmattn.attention`.

    Returns:
        [Hkv], in nats, float32 (float64 for float64 scores): means over the batch and the drawn queries. Queries that
        ``base`` makes padding, because their own key is hidden, count as 0.

    Raises:
        TypeError, ValueError: as :func:`dmattn.dynamic_mask_attention`; or query and key differ in length.
    """
    return _taught(query, key, None, scores, key_bias, base, local, sink, queries, last, sharp, scale, softcap)[1]


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
    sink: int = 0,
    queries: int = 64,
    last: float = 0.0,
    sharp: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Gives the queries that :func:`score_loss` draws the output of attention to all keys, so that queries and keys learn beyond the window.

    Args:
        query, key, scores and the others: as in :func:`score_loss`.
        value: [B, Hkv, S, Dv].
        out: [B, H, S, Dv], what attention with the windows gives.

    Returns:
        (out with the rows of the drawn queries in place of its own, with all gradients; the loss [Hkv] of :func:`score_loss`).

    Raises:
        TypeError, ValueError: as :func:`score_loss`, or value or out does not fit.
    """
    checks.tensor("out", out)
    if out.shape != (*query.shape[:3], checks.tensor("value", value).shape[-1]):
        raise ValueError(f"out: expected [B, H, S, Dv] = {[*query.shape[:3], value.shape[-1]]}, got {checks.shape_of(out)}")
    dense, loss, rows = _taught(query, key, value, scores, key_bias, base, local, sink, queries, last, sharp, scale, softcap)
    if dense is None:
        return out, loss
    # A product puts the rows in their places, because the gradient of index_copy does not compile with torch 2.11.
    places = rows == torch.arange(out.shape[2], device=rows.device)[:, None]  # [S, R]
    spread = places / places.sum(1, keepdim=True).clamp(min=1)
    return torch.where(places.any(1)[:, None], spread.to(dense.dtype) @ dense, out), loss


def _taught(
    query: Tensor, key: Tensor, value: Tensor | None, scores: Tensor, key_bias: Tensor | None, base: IntervalMask | None, local: int,
    sink: int, queries: int, last: float, sharp: bool, scale: float | None, softcap: float,
) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
    """(the drawn queries' attention to all keys [B, H, R, Dv] if value is given, the loss [Hkv], which queries were drawn [R])."""
    query, key, values = autocast(query, key, key if value is None else value)
    value = None if value is None else values
    sizes = sizes_of(query, key, values)
    options = options_of(sizes, None, True, scale, softcap)
    key_bias = None if key_bias is None else key_bias_rows(key_bias, sizes)
    checks.positive_int("queries", queries)
    checks.number("last", last, low=0.0, high=1.0)
    checks.flag("sharp", sharp)
    checks.selection(1, local, sink, True)
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"key: expected as many keys as queries, {query.shape[2]}, got {key.shape[2]}")
    checks.dtype("scores", checks.tensor("scores", scores), checks.DTYPES["cpu"])
    if scores.shape != key.shape[:3]:
        raise ValueError(f"scores: expected [B, Hkv, S] = {list(key.shape[:3])}, got {checks.shape_of(scores)}")
    checks.same_device("scores", scores, query)
    rows = _drawn(key.shape[2], queries, last, key.device)
    if key.shape[2] == 0 or key.shape[0] == 0:
        return None, scores.to(torch.promote_types(scores.dtype, torch.float32)).sum((0, 2)), rows
    seen, competing = _visibility(scores, rows, base, local, sink)
    # A query whose own key is hidden is padding: it teaches nothing and may hold anything.
    is_real = seen.expand(*scores.shape[:2], *seen.shape[2:]).gather(
        3, rows[None, None, :, None].expand(*scores.shape[:2], -1, 1)
    )
    if value is not None:  # a hidden key may hold anything, NaN too, and 0 times NaN is NaN in a gradient
        anyone = seen.any(2)[..., None]
        key, value = torch.where(anyone, key, 0.0), torch.where(anyone, value, 0.0)
    with torch.set_grad_enabled(value is not None and torch.is_grad_enabled()):
        weights = _dense_rows(query, key, key_bias, seen, is_real, rows, options)
        dense = None if value is None else (weights.to(value.dtype) @ value[:, :, None]).flatten(1, 2)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))[:, :, None]
    competing = competing & (wide > -math.inf)
    foretold = torch.log_softmax(torch.where(competing, wide, -1e9), dim=3)
    paid = weights.detach().mean(2) * (competing & is_real)
    if sharp:
        paid = paid * paid.amax(3, keepdim=True)
    return dense, -(paid * foretold).sum(3).mean((0, 2)), rows


def _drawn(length: int, queries: int, last: float, device: torch.device) -> Tensor:
    """Positions of queries, int64 [queries]: one from each part of the sequence, and then those from its last sixteenth."""
    late = round(queries * last)
    spread = queries - late
    drawn = torch.cat((
        (torch.arange(spread, device=device) + torch.rand(spread, device=device)) * (length / max(spread, 1)),
        length * (1 - torch.rand(late, device=device) / 16),
    ))  # fmt: skip
    return drawn.long().clamp(max=max(length - 1, 0))


def _visibility(scores: Tensor, rows: Tensor, base: IntervalMask | None, local: int, sink: int) -> tuple[Tensor, Tensor]:
    """Which keys the queries at ``rows`` [R] may see, and which of these compete for their windows, bool [B|1, Hkv|1, R, S]."""
    seen = (torch.arange(scores.shape[2], device=scores.device) <= rows[:, None])[None, None]
    if base is None and not local and not sink:
        return seen, seen
    certain = IntervalMask.top_k(scores.detach(), 0 if local or sink else 1, base=base, local=local, sink=sink)
    if base is not None:
        seen = seen & (rows[:, None] < base.end[..., None, :])
    return seen, seen & (rows[:, None] >= certain.end[..., None, :]) if local or sink else seen


def _dense_rows(
    query: Tensor, key: Tensor, key_bias: Tensor | None, seen: Tensor, is_real: Tensor, rows: Tensor, options: Options
) -> Tensor:
    """Attention weights [B, Hkv, H / Hkv, R, S] that the queries at ``rows`` pay where they see all keys; those that are not real count as
    zeros."""
    grouped = (key.shape[1], -1)  # key heads, query heads of each
    drawn = torch.where(is_real[:, :, None], query.index_select(2, rows).unflatten(1, grouped), 0.0)  # [B, Hkv, G, R, D]
    logits = (drawn @ key[:, :, None].transpose(3, 4)).to(torch.promote_types(query.dtype, torch.float32)) * options.scale
    if options.softcap:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    if key_bias is not None:
        by_query_head = key_bias.shape[1] == query.shape[1]
        logits = logits + (key_bias.unflatten(1, grouped) if by_query_head else key_bias[:, :, None])[..., None, :]
    logits = torch.where(seen[:, :, None], logits, -1e30)  # finite, or a query that sees nothing has a gradient of NaN
    return torch.where(seen[:, :, None], logits.softmax(4), 0.0)  # of queries that see nothing, too
