"""What makes scores of keys learn which keys to keep: a bias by position, and a loss that shows them dense attention."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from dmattn import checks
from dmattn.attention import attention
from dmattn.call import NO_MASK, autocast, options_of
from dmattn.fake import accumulate_dtype, empty_in_order_of
from dmattn.masks import FOREVER, IntervalMask
from dmattn.masks.bounds import moved
from dmattn.masks.heads import repeat_heads
from dmattn.masks.interval import segment_ends
from dmattn.nn.opaque import is_opaque, opaque
from dmattn.renamed import renamed
from dmattn.sharding import any_sharded, beside, refuse
from dmattn.sizes import check_scores, key_bias_rows, sizes_of

MOST_ROWS, LEAST_KEYS = 1 << 15, 1024  # of queries and heads that are computed at once, about; of keys in a part
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


def with_recency(scores: Tensor, log_slope: Tensor) -> tuple[Tensor, Tensor]:
    """(scores [B, Hkv, S] with recency, [B, Hkv, S], and the recency, [1, Hkv, S])."""
    if is_opaque(scores):
        both: tuple[Tensor, Tensor] = _with_recency(scores, log_slope)
        return both
    recency = recency_of(log_slope, scores.shape[2])
    return scores + recency, recency


def of_selecting_heads(ranks: Tensor, local_heads: int) -> Tensor:
    """Ranks [B, Hkv, S] in which those of the first ``local_heads`` heads are -inf, which never wins a place: local keys and sinks are all that
    these heads see."""
    if is_opaque(ranks):
        result: Tensor = _of_selecting_heads(ranks, local_heads)
        return result
    return F.pad(ranks[:, local_heads:], (0, 0, local_heads, 0), value=-math.inf)


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
    return explored(
        query, key, key, query, scores, False, key_bias=key_bias, base=base, local=local, sink_keys=sink_keys, queries=queries, last=last,
        sharp=sharp, first_head=first_head, scale=scale, softcap=softcap,
    )[1]  # fmt: skip


def explored(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, scores: Tensor, explore: bool = True, *, key_bias: Tensor | None = None,
    base: IntervalMask | None = None, local: int = 0, sink_keys: int = 0, queries: int = 64, last: float = 0.0, sharp: bool = False,
    first_head: int = 0, scale: float | None = None, softcap: float = 0.0, mean: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gives the queries that :func:`score_loss` draws the output of attention to all keys, so that queries and keys learn beyond the window.

    Args:
        query, key, scores and the others: as in :func:`score_loss`.
        value: [B, Hkv, S, Dv].
        out: [B, H, S, Dv], what attention with the windows gives.
        explore: if False, out stays as it is.
        mean: if True, the loss is its mean over heads, [].

    Returns:
        (out with the rows of the drawn queries in place of its own, with all gradients; the loss of :func:`score_loss`).

    Raises:
        TypeError, ValueError: as :func:`score_loss`, or value or out does not fit.
    """
    if any_sharded((query, key, value, scores, key_bias, getattr(base, "end", None))):
        refuse("score_loss")
    query, key, value = autocast(query, key, value)
    sizes = sizes_of(query, key, value)
    options = options_of(sizes, None, True, scale, softcap)
    batch, heads, length, _ = query.shape
    checks.shaped("out", out, "[B, H, S, Dv]", B=batch, H=heads, S=length, Dv=value.shape[3])
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
    check_scores(scores, query, key, "[B, Hkv, S]")
    ends = None if base is None else segment_ends(base, scores)
    of_heads = scores[:, first_head:].to(torch.promote_types(scores.dtype, torch.float32))
    if 0 in query.shape[:3]:
        of_none = of_heads[..., :0]  # scores may be there although no query is
        return out, of_none.sum() if mean else of_none.sum((0, 2))
    with torch.no_grad():
        certain = None  # up to where keys are visible without being selected
        if base is not None and (local or sink_keys):
            certain = IntervalMask.top_k(scores, 0, base=base, local=local, sink_keys=sink_keys).end
    others = (queries, last, sharp, first_head, local, sink_keys, options.scale, options.softcap)
    if is_opaque(scores):
        loss, rows, _ = _score_loss_op(query.detach(), key.detach(), scores, key_bias, ends, certain, *others, mean)
    else:
        with torch.no_grad():
            loss, rows, gradient = _score_loss(query, key, scores, key_bias, ends, certain, *others)
        loss = _with_gradient(loss, of_heads, gradient)
        loss = loss.mean() if mean else loss
    if explore:
        out = with_dense_rows(query, key, value, out, rows, key_bias, ends, options.scale, options.softcap)
    return out, loss


def with_dense_rows(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, rows: Tensor, key_bias: Tensor | None, ends: Tensor | None, scale: float,
    softcap: float, first: int = 0,
) -> Tensor:  # fmt: skip
    """out [B, H, Sq, Dv], in which the queries ``rows`` [R], in order, attend to all keys that they may see. Query i stands at ``first + i``;
    ends [B|1, Hkv|1, Sk] says where visibility of keys ends, None: nowhere."""
    given = (query, key, value, out, key_bias, ends, rows, scale, softcap, first)
    result: Tensor = _explored_op(*given)[0] if is_opaque(query) else _explored(*given)
    return result


def drawn_rows(length: int, queries: int, last: float, device: torch.device) -> Tensor:
    """Positions of queries in order, int64 [queries]: one from each part of the sequence, and then those from its last sixteenth.

    Of a sequence without tokens none are drawn.
    """
    queries = queries if length else 0
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


def _real(rows: Tensor, ends: Tensor | None) -> Tensor | None:
    """Which of the drawn queries are real, [B|1, Hkv|1, R] (None: all). One whose own key is hidden is padding: it teaches nothing and may
    hold anything."""
    return None if ends is None else ends[:, :, rows] > rows


def _drawn_queries(query: Tensor, rows: Tensor, is_real: Tensor | None) -> Tensor:
    """[B, H, R, D], 0 where they are padding."""
    drawn = query.index_select(2, rows)
    return drawn if is_real is None else torch.where(repeat_heads(is_real, query.shape[1])[..., None], drawn, 0.0)


def _score_loss(
    query: Tensor, key: Tensor, scores: Tensor, key_bias: Tensor | None, ends: Tensor | None, certain: Tensor | None, queries: int,
    last: float, sharp: bool, first_head: int, local: int, sink_keys: int, scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss of the h key heads from ``first_head`` on, [h], which queries were drawn [R], and the loss's gradient by these heads' scores
    [B, h, S]."""
    kv_heads, length = key.shape[1:3]
    rows = drawn_rows(length, queries, last, key.device)
    is_real = _real(rows, ends)
    if certain is None and (local or sink_keys):
        certain = IntervalMask.streaming(length, sink_keys, local, device=key.device).end

    def from_first(given: Any) -> Any:
        return given if given is None or given.shape[1] == 1 else given[:, given.shape[1] // kv_heads * first_head :]

    of_heads = scores[:, first_head:].to(torch.promote_types(scores.dtype, torch.float32))
    parts = (_drawn_queries(query, rows, is_real), key, of_heads, key_bias, rows, is_real, ends, certain)
    given: list[Any] = [part if part is of_heads or part is rows else from_first(part) for part in parts]
    given += [sharp, scale, softcap]
    if scores.device.type == "cpu" and not torch.compiler.is_exporting():
        loss, gradient = _in_parts(*given)
    else:
        loss, gradient = _loss_and_gradient(*given, batch=scores.shape[0])
    return loss, rows, gradient


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


def _explored(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, key_bias: Tensor | None, ends: Tensor | None, rows: Tensor, scale: float,
    softcap: float, first: int,
) -> Tensor:  # fmt: skip
    """:func:`with_dense_rows`."""
    positions = rows + first
    drawn = _drawn_queries(query, rows, _real(positions, ends))
    dense = _attended(drawn, key, value, positions, key_bias, ends, scale, softcap)
    # A product puts the rows in their places, because the gradient of index_copy does not compile with torch 2.11. Of a query that was
    # drawn more than once, it takes the first row: a mean of equal rows would be rounded.
    places = (rows == torch.arange(out.shape[2], device=rows.device)[:, None]) & _is_first(rows)  # [S, R]
    return torch.where(places.any(1)[:, None], places.to(dense.dtype) @ dense, out)


def _attended(
    drawn: Tensor, key: Tensor, value: Tensor, positions: Tensor, key_bias: Tensor | None, ends: Tensor | None, scale: float, softcap: float
) -> Tensor:  # fmt: skip
    """Attention of a few queries [B, H, R, D] at ``positions`` [R] to all keys that they may see. On a GPU parts of the keys are attended to
    side by side, as sequences of their own, because so few queries leave most of it idle."""
    batch, parts = drawn.shape[0], _parts(drawn, key)
    seen = IntervalMask(*_bounds(positions, key, ends, parts))
    if parts == 1:
        dense: Tensor = attention(drawn, key, value, seen, key_bias=key_bias, scale=scale, softcap=softcap)
        return dense

    def of_parts(given: Tensor) -> Tensor:
        """[B|1, heads, S, ..] as [B * parts, heads, S / parts, ..]."""
        made: Tensor = given.expand(batch, *given.shape[1:]).unflatten(2, (parts, -1)).transpose(1, 2).flatten(0, 1)
        return made

    out, lse = attention(
        drawn.repeat_interleave(parts, dim=0), of_parts(key), of_parts(value), IntervalMask(of_parts(seen.start), of_parts(seen.end)),
        key_bias=None if key_bias is None else of_parts(key_bias), scale=scale, softcap=softcap, return_lse=True,
    )  # fmt: skip
    lse = lse.unflatten(0, (batch, parts))
    whole = lse.logsumexp(1, keepdim=True)
    shares = (lse - whole.masked_fill(whole.isneginf(), 0.0)).exp()[..., None]
    together: Tensor = (shares * out.unflatten(0, (batch, parts))).sum(1).to(out.dtype)
    return together


def _parts(drawn: Tensor, key: Tensor) -> int:
    """A power of two that divides the keys. Compiled code for any number of keys makes no parts of them."""
    batch, heads, queries, _ = drawn.shape
    length, parts = key.shape[2], 1
    if not key.is_cuda or type(length) is not int:
        return 1
    while length % (2 * parts) == 0 and length // parts > LEAST_KEYS and batch * heads * queries * parts < MOST_ROWS:
        parts *= 2
    return parts


def _bounds(positions: Tensor, key: Tensor, ends: Tensor | None, parts: int = 1) -> list[Tensor]:
    """Start and end of each key's visibility to the drawn queries, int32 [B|1, Hkv|1, S], which the op takes for the last positions of each
    of the parts."""
    start = _place(positions, torch.arange(key.shape[2], device=key.device)[None, None])
    end = torch.full_like(start, FOREVER) if ends is None else _place(positions, ends)
    return [moved(bound, key.shape[2] // parts - positions.shape[0]) for bound in (start, end)]


def _is_first(rows: Tensor) -> Tensor:
    return F.pad(rows[1:] != rows[:-1], (1, 0), value=True)


# What compiled code calls on a CPU ----------------------------------------------------------------------------------------------------


@opaque("with_recency")
def _with_recency(scores: Tensor, log_slope: Tensor) -> tuple[Tensor, Tensor]:
    recency = recency_of(log_slope, scores.shape[2])
    return (scores + recency).contiguous(), recency


@opaque("with_recency_backward")
def _with_recency_backward(of_ranks: Tensor, of_recency: Tensor, log_slope: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradients of scores, in the order in which a linear layer left them, [B, S, Hkv], and of the slopes' logarithms."""
    of_both = (of_ranks.sum(0) + of_recency[0]) * torch.arange(of_ranks.shape[2], device=of_ranks.device)
    of_scores = of_ranks.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format, copy=True)
    return of_scores.transpose(1, 2), (of_both.sum(1) * slopes_of(log_slope)).to(log_slope.dtype)


def _save_slopes(ctx: Any, inputs: tuple[Tensor, Tensor], output: Any) -> None:
    ctx.dtype = inputs[0].dtype
    ctx.save_for_backward(inputs[1])


def _recency_gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
    both: tuple[Tensor, Tensor] = _with_recency_backward(*grads, *ctx.saved_tensors, ctx.dtype)
    return both


_with_recency.register_autograd(_recency_gradients, setup_context=_save_slopes)


@opaque("of_selecting_heads")
def _of_selecting_heads(ranks: Tensor, local_heads: int) -> Tensor:
    return F.pad(ranks[:, local_heads:], (0, 0, local_heads, 0), value=-math.inf)


@opaque("score_loss", tags=(torch.Tag.nondeterministic_seeded,))
def _score_loss_op(
    query: Tensor, key: Tensor, scores: Tensor, key_bias: Tensor | None, ends: Tensor | None, certain: Tensor | None, queries: int,
    last: float, sharp: bool, first_head: int, local: int, sink_keys: int, scale: float, softcap: float, mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """:func:`_score_loss`, or the mean of its losses, []."""
    loss, rows, gradient = _score_loss(
        query, key, scores, key_bias, ends, certain, queries, last, sharp, first_head, local, sink_keys, scale, softcap
    )
    return (loss.mean(), rows, gradient / loss.shape[0]) if mean else (loss, rows, gradient)


@_score_loss_op.register_fake
def _(query: Tensor, key: Tensor, scores: Tensor, *others: Any) -> tuple[Tensor, ...]:
    queries, first_head, mean = others[3], others[6], others[-1]
    gradient = scores.new_empty(scores[:, first_head:].shape, dtype=torch.promote_types(scores.dtype, torch.float32))
    return gradient.new_empty(() if mean else gradient.shape[1]), scores.new_empty(queries, dtype=torch.int64), gradient


def _save_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(output[2])
    ctx.first_head, ctx.dtype = inputs[9], inputs[2].dtype


def _score_loss_gradient(ctx: Any, of_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    of_scores = _score_loss_backward(of_loss, *ctx.saved_tensors, ctx.first_head, ctx.dtype)
    return None, None, of_scores, *(None,) * 12


@opaque("score_loss_backward")
def _score_loss_backward(of_loss: Tensor, gradient: Tensor, first_head: int, dtype: torch.dtype) -> Tensor:
    return F.pad(of_loss[..., None] * gradient, (0, 0, first_head, 0)).to(dtype)


_score_loss_op.register_autograd(_score_loss_gradient, setup_context=_save_gradient)


@opaque("explored")
def _explored_op(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, key_bias: Tensor | None, ends: Tensor | None, rows: Tensor, scale: float,
    softcap: float, first: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """:func:`_explored`, and what its gradient needs of the attention of the drawn queries."""
    positions = rows + first
    drawn, seen = _drawn_queries(query, rows, _real(positions, ends)), _bounds(positions, key, ends)
    options = (key_bias, None, None, False, scale, softcap, 0.0, False)
    dense, lse, rest = torch.ops.dmattn.forward(drawn, key, value, *seen, *NO_MASK[2:], *options)
    places = _is_first(rows)
    return out.clone().index_copy_(2, rows[places], dense[:, :, places].to(out.dtype)), dense, lse, rest


@_explored_op.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, key_bias: Tensor | None, ends: Any, rows: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    dense = query.new_empty((*query.shape[:2], rows.shape[0], value.shape[3]))
    lse = dense.new_empty(dense.shape[:3], dtype=accumulate_dtype(query.dtype))
    return torch.empty_like(out), dense, lse, lse.new_empty((0,) if key_bias is None else lse.shape)


@opaque("explored_backward")
def _explored_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None, ends: Tensor | None, rows: Tensor, dense: Tensor,
    lse: Tensor, rest: Tensor, scale: float, softcap: float, first: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    is_real = _real(rows + first, ends)
    of_dense = torch.where(_is_first(rows)[:, None], grad.index_select(2, rows), 0.0).to(dense.dtype)
    options = (key_bias, None, None, False, scale, softcap, 0.0, False, key_bias is not None, False, rest)
    given = (of_dense, None, _drawn_queries(query, rows, is_real), key, value, dense, lse)
    seen = _bounds(rows + first, key, ends)
    of_drawn, of_key, of_value, of_bias, _ = torch.ops.dmattn.backward(*given, *seen, *NO_MASK[2:], *options)
    if is_real is not None:
        of_drawn = torch.where(repeat_heads(is_real, query.shape[1])[..., None], of_drawn, 0.0)
    of_query = torch.zeros_like(query).index_add_(2, rows, of_drawn)
    return of_query, of_key, of_value, grad.clone().index_fill_(2, rows, 0.0), of_bias


@_explored_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    of_key, of_value = (empty_in_order_of(x, x.shape[3]) for x in (key, value))
    of_bias = key.new_empty((0,) if key_bias is None else key_bias.shape, dtype=accumulate_dtype(key.dtype))
    return torch.empty_like(query), of_key, of_value, torch.empty_like(grad), of_bias


def _save_explored(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, _, *others = inputs
    ctx.save_for_backward(query, key, value, *others[:3], *output[1:])
    ctx.options = others[3:]


def _explored_gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    *gradients, of_bias = _explored_backward(grad, *saved, *ctx.options)
    return *gradients, None if saved[3] is None else of_bias, *(None,) * 5


_explored_op.register_autograd(_explored_gradients, setup_context=_save_explored)


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
