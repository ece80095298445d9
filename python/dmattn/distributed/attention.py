"""The public function: attention to a sequence whose chunks lie on several ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dmattn import checks
from dmattn.attention import attention
from dmattn.call import NO_MASK, Options, attend, autocast, options_of
from dmattn.distributed import agreement, failures, needs, pair, values
from dmattn.distributed.agreement import DTYPES, float_bits
from dmattn.distributed.chunks import Chunks, group_of
from dmattn.fake import accumulate_dtype
from dmattn.masks import ALWAYS, IntervalMask
from dmattn.masks.heads import same_heads
from dmattn.masks.interval import check_base, most_selected, select_interval
from dmattn.renamed import renamed
from dmattn.sizes import Sizes, check_scores, key_bias_rows, per_head, sizes_of, with_own_gradient

CAUSAL, MASK, SCORES = range(3)


class Arguments(NamedTuple):
    """What the public function was given, checked as far as one rank can."""

    sizes: Sizes
    kind: int  # CAUSAL, MASK or SCORES
    mask: IntervalMask | None  # of the whole sequence
    scores: Tensor | None
    bound: int | None  # the most earlier keys that a chunk sees, if the caller or the selection says so
    selection: tuple[int, int, int]  # window, local, sink_keys
    base: IntervalMask | None
    key_bias: Tensor | None  # [B, Hkv, n, 1 or H / Hkv], without scores

    def mask_length(self) -> int:
        """The length that the mask or base says the sequence has; 0 if none does."""
        given = self.mask if self.base is None else self.base
        return 0 if given is None or given.key_length is None else given.key_length

    def most_keys(self) -> int:
        """How many keys a query sees at most, 0 where that is not known."""
        if self.kind == SCORES:
            return most_selected(*self.selection, self.base)
        return checks.MAX_LENGTH if self.mask is None else self.mask.most_keys


@overload
def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: IntervalMask | None = None, *, scores: Tensor | None = None, window: int | None = None,
    local: int = 0, sink_keys: int = 0, mesh: DeviceMesh | None = None, group: dist.ProcessGroup | None = None, base: IntervalMask | None = None,
    key_bias: Tensor | None = None, scale: float | None = None, softcap: float | None = 0.0, dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None, deterministic: bool = False, return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: IntervalMask | None = None, *, scores: Tensor | None = None, window: int | None = None,
    local: int = 0, sink_keys: int = 0, mesh: DeviceMesh | None = None, group: dist.ProcessGroup | None = None, base: IntervalMask | None = None,
    key_bias: Tensor | None = None, scale: float | None = None, softcap: float | None = 0.0, dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None, deterministic: bool = False, return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@renamed(sink="sink_keys")
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: IntervalMask | None = None,
    *,
    scores: Tensor | None = None,
    window: int | None = None,
    local: int = 0,
    sink_keys: int = 0,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | None = None,
    base: IntervalMask | None = None,
    key_bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention to one sequence of which every rank holds a contiguous chunk; the same as one process computes.

    All ranks of the group call it together. Chunks follow each other in rank order, n positions on each rank, N together; they may differ in
    length. A rank receives the rows of earlier keys that some query of its chunk sees, and no others. With ``scores`` these are at most
    ``window + local + sink_keys`` rows a key head, however many ranks there are, and the scores; with ``mask`` they are what the mask says:
    few under a sliding window, a streaming mask or packed documents, every earlier row under plain causality (``mask=None``).

    Args:
        query: [B, H, n, D], this rank's chunk.
        key: [B, Hkv, n, D].
        value: [B, Hkv, n, Dv].
        mask: an IntervalMask of the whole sequence, [B|1, H|Hkv|1, N], the same on every rank. Causality is added to it. A mask is read once on
            the host and remembered, so make it once and not in each call; one made in inference mode is read in each call.
        scores: [B, Hkv, n], this rank's chunk: instead of mask, keys are selected by scores, which are added to their logits, as in
            :func:`dynamic_mask_attention`.
        window, local, sink_keys: with scores, as in :func:`dynamic_mask_attention`, where window is needed. With mask, their sum may say how
            many earlier keys a chunk sees at most; then the mask is not read on the host. Compiled calls with a mask need it.
        mesh: a one-dimensional DeviceMesh, its ranks in ascending order.
        group: instead of mesh, a ProcessGroup. Default: the world.
        base: with scores, documents and/or padding of the whole sequence, see :meth:`IntervalMask.top_k`.
        key_bias: added to every logit of a key, [B|1, H|Hkv|1, n], this rank's chunk, differentiable; with scores, in addition to these.
        scale, softcap, deterministic: as in :func:`attention`.
        dropout_p: as in :func:`attention`. Dropout counts the positions of the whole sequence, so that memory is O(N) with it.
        dropout_seed: as in :func:`attention`, the same on every rank. Default: the first rank draws one from torch's generator.
        return_lse: also return the log-sum-exp of each query's logits, differentiable.

    Returns:
        out [B, H, n, Dv], this rank's chunk, or (out, lse) with lse [B, H, n], as :func:`attention`.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, device or value; ranks that do not agree, on every rank; compiled, ranks whose chunks differ in length without
            a mask or base that says N.
        RuntimeError: a rank has failed, or does not answer within the group's timeout; on a GPU or compiled, a bound that is too small for the
            mask.
    """
    ranks = group_of(mesh, group)
    world, rank = dist.get_world_size(ranks), dist.get_rank(ranks)
    compiling = torch.compiler.is_compiling()
    try:
        checks.flags(False, deterministic, return_lse)
        query, key, value = autocast(query, key, value)
        given = _checked(query, key, value, mask, scores, window, local, sink_keys, base, key_bias)
        options = options_of(
            given.sizes, dropout_seed, True, scale, softcap, dropout_p, deterministic, most_keys=given.most_keys()
        )
    except Exception:  # whatever it is: the other ranks would wait for this one
        if not compiling and world > 1:
            agreement.fail(ranks)
        raise
    has_seed = dropout_seed is not None and options.dropout_seed is not None
    call_signature = _call_signature(given, (query, key, value, key_bias, scores), options, has_seed, compiling)
    # The others would wait for a rank that alone fails: for its rows, and in backward for its gradients.
    report_failures = contextlib.nullcontext() if compiling or world == 1 else failures.Reporting(ranks)
    report_failures_if_backward = (
        report_failures if _wants_gradients(query, key, value, key_bias, scores) else contextlib.nullcontext()
    )
    if compiling:
        lengths = _lengths_while_compiling(given, world, rank)
        given = _with_long_enough_mask(given, sum(lengths))
    else:
        lengths = agreement.agree(ranks, call_signature)
    chunks = Chunks(ranks.group_name, rank, lengths)
    if world == 2 and scores is not None and base is None and options.dropout_seed is None:
        with report_failures_if_backward:
            out, lse = _between_two(query, key, value, given, options, chunks, call_signature)
        return (out, lse) if return_lse else out

    with report_failures:
        rows, start, end, slots = _fetched((key, value), given, options, dropout_seed, chunks, call_signature)
    with report_failures_if_backward:
        out, lse = _attended(query, rows, start, end, slots, given, options, dropout_seed, chunks)
    return (out, lse) if return_lse else out


def _fetched(
    rows: Sequence[Tensor],
    given: Arguments,
    options: Options,
    dropout_seed: Tensor | None,
    chunks: Chunks,
    call_signature: list[int],
) -> tuple[list[Tensor], Tensor | None, Tensor, Tensor]:
    """Own rows of key, value and bias behind those in slots; start and end of the whole sequence; slots."""
    compiling, world, counts = torch.compiler.is_compiling(), len(chunks.lengths), _slot_counts(given, chunks)

    # Know the mask of the whole sequence.
    to_compare = call_signature if compiling else None
    start, end = _whole_mask(given, chunks, to_compare)
    if given.mask is not None and given.bound is not None:
        _check_bound(given, chunks, start, end, counts)
    unverified_signature = to_compare if given.scores is None else None
    if world > 1:
        end, has_compared = values.compare(
            _uncompared(given, options, dropout_seed, compiling), end, chunks, unverified_signature
        )
        unverified_signature = None if has_compared else unverified_signature

    # Say who needs which rows, and fetch them.
    slots = needs.slots_of(start, end, chunks, given.sizes.kv_heads, counts[chunks.rank])
    bias = _added_to_logits(given)
    fetched = list(rows) if bias is None else [*rows, bias]
    if world > 1:
        fetched, _ = torch.ops.dmattn_distributed.carry(
            fetched, start, end, slots, counts, chunks.lengths, chunks.rank, chunks.group, unverified_signature
        )
    return fetched, start, end, slots


def _attended(
    query: Tensor,
    rows: Sequence[Tensor],
    start: Tensor | None,
    end: Tensor,
    slots: Tensor,
    given: Arguments,
    options: Options,
    dropout_seed: Tensor | None,
    chunks: Chunks,
) -> tuple[Tensor, Tensor]:
    """out and lse of attention to slots and own keys."""
    key, value, *biases = rows
    flat_bias = _by_head(biases[0]) if biases else None
    seed = options.dropout_seed
    if seed is not None and dropout_seed is None and len(chunks.lengths) > 1:
        seed = torch.ops.dmattn_distributed.share_seed(seed, chunks.group)
    common: dict[str, Any] = {
        "is_causal": True, "scale": options.scale, "softcap": options.softcap, "dropout_p": options.dropout_p, "dropout_seed": seed,
        "deterministic": options.deterministic,
    }  # fmt: skip
    if seed is None:
        local_mask = needs.local_mask(start, end, slots, chunks)._replace(most_keys=options.most_keys)
        out, lse = attention(query, key, value, local_mask, key_bias=flat_bias, return_lse=True, **common)
    else:
        out, lse = _at_positions(query, key, value, flat_bias, start, end, slots, chunks, common)
    return out, lse


def _wants_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scores: Tensor | None,
    window: int | None,
    local: int,
    sink_keys: int,
    base: IntervalMask | None,
    key_bias: Tensor | None,
) -> Arguments:
    sizes = sizes_of(query, key, value)
    if sizes.key_length != sizes.query_length:
        raise ValueError(f"key: expected [B, Hkv, n, D] with n={sizes.query_length} like query, got {checks.shape_of(key)}")
    if mask is not None and scores is not None:
        raise ValueError("mask, scores: expected at most one of them, got both")
    checks.instance("mask", mask, IntervalMask | None, "an IntervalMask of the whole sequence")
    if base is not None and scores is None:
        raise ValueError("base: expected None without scores, got one")
    if base is not None:
        check_base(base)
    kind = SCORES if scores is not None else CAUSAL if mask is None else MASK
    checks.each(checks.natural_int, local=local, sink_keys=sink_keys)
    bound = None
    if scores is not None:
        check_scores(scores, query, key, "[B, Hkv, n]")
        checks.selection(window, local, sink_keys, True)
        assert window is not None
        bound = window + local + sink_keys
    elif window is not None:
        checks.natural_int("window", window)
        if mask is None:
            raise ValueError(
                f"window: expected None without scores and mask, got {window}; "
                "for a sliding window give mask=IntervalMask.sliding_window(N, left)"
            )
        bound = window + local + sink_keys
    elif local or sink_keys:
        raise ValueError(f"local, sink_keys: expected 0 and 0 without window, got {local} and {sink_keys}")
    for name, given in (("mask", mask), ("base", base)):
        for side in (given.start, given.end) if isinstance(given, IntervalMask) else ():
            per_head(name, side, sizes, side.shape[2:], "[B|1, H|Hkv|1, N]")
    bias = None if key_bias is None else _bias_rows(key_bias, sizes)
    return Arguments(sizes, kind, mask, scores, bound, (window or 0, local, sink_keys), base, bias)


def _added_to_logits(given: Arguments) -> Tensor | None:
    """key_bias and scores together, [B, Hkv, n, 1 or H / Hkv]."""
    if given.scores is None:
        return given.key_bias
    scores = given.scores.to(accumulate_dtype(given.sizes.dtype))[..., None]
    return scores if given.key_bias is None else given.key_bias + with_own_gradient(scores)


def _by_head(bias: Tensor) -> Tensor:
    """[B, Hkv, keys, 1 or H / Hkv] to [B, Hkv|H, keys]."""
    return bias[..., 0] if bias.shape[3] == 1 else bias.transpose(2, 3).flatten(1, 2)


def _bias_rows(key_bias: Tensor, sizes: Sizes) -> Tensor:
    """[B, Hkv, n, 1 or H / Hkv]."""
    rows = key_bias_rows(key_bias, sizes).expand(sizes.batch, -1, -1)
    if rows.shape[1] in (1, sizes.kv_heads):
        return rows.expand(-1, sizes.kv_heads, -1)[..., None]
    grouped: Tensor = rows.unflatten(1, (sizes.kv_heads, -1))
    return grouped.transpose(2, 3)


def _call_signature(
    given: Arguments, tensors: Sequence[Tensor | None], options: object, has_seed: bool, compiling: bool
) -> list[int]:
    """This call in numbers, see :data:`agreement.FIELDS`."""
    query, _, value, key_bias, scores = tensors
    assert query is not None
    assert value is not None
    sizes = given.sizes
    bias = (
        0 if key_bias is None else 1 + key_bias.dim() if key_bias.dim() < 3 else 1 + key_bias.shape[0] + (key_bias.shape[1] << 20)
    )
    floats = [getattr(options, name) for name in agreement.FLOATS]
    wanted = [tensor is not None and tensor.requires_grad for tensor in tensors] if torch.is_grad_enabled() else []
    is_read = given.kind == MASK and given.bound is None and not compiling
    return [
        0, sizes.query_length, int(compiling), sizes.batch, sizes.heads, sizes.kv_heads, sizes.head_dim, value.shape[3],
        DTYPES.index(sizes.dtype), int(sizes.device.type == "cuda"), given.kind + int(given.base is not None), given.mask_length(),
        needs.checksum_of(given.mask) if is_read and given.mask else 0, bias, -1 if scores is None else DTYPES.index(scores.dtype),
        -1 if given.bound is None else given.selection[0], *given.selection[1:],
        *(0 if compiling else float_bits(number) for number in floats), sum(wants << place for place, wants in enumerate(wanted)),
        int(has_seed),
    ]  # fmt: skip


def _uncompared(
    given: Arguments, options: Options, seed: Tensor | None, compiling: bool
) -> dict[str, IntervalMask | Tensor | float]:
    """What the call signatures do not say, by the names of the arguments."""
    found: dict[str, IntervalMask | Tensor | float] = {}
    if compiling:
        found |= {name: getattr(options, name) for name in agreement.FLOATS}
    if given.base is not None:
        found["base"] = given.base
    if given.mask is not None and (given.bound is not None or compiling):
        found["mask"] = given.mask
    if seed is not None:
        found["dropout_seed"] = seed
    return found


def _lengths_while_compiling(given: Arguments, world: int, rank: int) -> list[int]:
    """Equal chunks; or, where a mask says N and the ranks' chunks are not equal, equal ones and a shorter last one."""
    own, whole = given.sizes.query_length, given.mask_length()
    if not whole or whole == own * world or world == 1 or whole < own:
        return [own] * world
    if rank < world - 1 and own * (world - 1) <= whole:
        return [own] * (world - 1) + [whole - own * (world - 1)]
    # Where the others' parts cannot be equal, they add up all the same: a graph can be made, and its first exchange refuses on every rank.
    lengths = [(whole - own) // (world - 1)] * world
    lengths[rank] = own
    lengths[world - 2 if rank == world - 1 else world - 1] += whole - sum(lengths)
    return lengths


def _with_long_enough_mask(given: Arguments, length: int) -> Arguments:
    """Instead of a mask or base shorter than this rank's chunk, one of this length under which nothing is visible.

    A graph can be made with it, and its first exchange refuses the mask's length on every rank.
    """
    if not 0 < given.mask_length() < given.sizes.query_length:
        return given
    nothing = torch.zeros(1, 1, length, dtype=torch.int32, device=given.sizes.device)
    return given._replace(mask=None if given.mask is None else IntervalMask(nothing, nothing), base=None)


def _whole_mask(given: Arguments, chunks: Chunks, call_signature: list[int] | None) -> tuple[Tensor | None, Tensor]:
    """start (None: the key's own position) and end of the whole sequence. ``call_signature``: what ranks still have to compare."""
    if given.scores is not None:
        scores = given.scores.detach()
        if len(chunks.lengths) > 1:
            scores = torch.ops.dmattn_distributed.gather_scores(scores, chunks.lengths, chunks.rank, chunks.group, call_signature)
        window, local, sink_keys = given.selection
        start, end = select_interval(scores, window, True, given.base, local, sink_keys)
        if start is not None:
            start, end = same_heads(start, end, "base")
            start = start.expand(-1, -1, chunks.length())
        return start, end
    mask = IntervalMask.causal(chunks.length(), device=given.sizes.device) if given.mask is None else given.mask
    start, end = same_heads(mask.start, mask.end, "mask")
    return start.expand(-1, -1, chunks.length()), end.expand(-1, -1, chunks.length())


def _slot_counts(given: Arguments, chunks: Chunks) -> list[int]:
    """The number of slots of each rank."""
    if len(chunks.lengths) == 1:
        return [0]
    if given.kind == CAUSAL:
        return chunks.firsts()[:-1]
    if given.bound is not None:
        return needs.slots_from_bound(given.bound, chunks)
    if torch.compiler.is_compiling():
        raise ValueError(
            "window: expected, with a mask while compiling, the number of earlier keys that a chunk sees at most, got None; "
            "for a sliding window that is its left side"
        )
    assert given.mask is not None
    return needs.slots_from_mask(given.mask, chunks, given.sizes.kv_heads)


def _check_bound(given: Arguments, chunks: Chunks, start: Tensor | None, end: Tensor, counts: list[int]) -> None:
    """Refuses a bound given with a mask that is too small for it: on every rank where the mask's values are known."""
    assert given.mask is not None
    if not checks.values_are_known(end):
        needs.assert_fits(start, end, chunks, given.sizes.kv_heads, counts)
    elif len(chunks.lengths) > 1:
        seen = max(needs.slots_from_mask(given.mask, chunks, given.sizes.kv_heads))
        if seen > (given.bound or 0):
            raise ValueError(f"window: expected at least {seen}, the most earlier keys that a chunk sees, got {given.bound}")


def _between_two(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    given: Arguments,
    options: Options,
    chunks: Chunks,
    call_signature: list[int],
) -> tuple[Tensor, Tensor]:
    """Attention to keys that scores select, on one of two ranks; see :mod:`.pair`."""
    assert given.scores is not None
    # A wider dtype has the same order and ties, and its gradients are added in float32.
    scores = given.scores.to(torch.promote_types(given.scores.dtype, accumulate_dtype(given.sizes.dtype)))[..., None]
    rows = [scores, key, value] if given.key_bias is None else [scores, key, value, given.key_bias]
    if torch.compiler.is_compiling():
        place = chunks.lengths, chunks.rank, chunks.group, call_signature
        rows, end, _ = torch.ops.dmattn_distributed.fetch(rows, *given.selection, *place)
        end, _ = values.compare(_uncompared(given, options, None, True), end, chunks, None)
        return _over_slots(query, rows, end, options)
    pending = pair.begin(rows, pair.Selection(*given.selection), chunks)
    *fetched, end = pair.Fetch.apply(pending, *rows)
    result = _over_slots(query, fetched, end, options)
    pair.wait_sent(pending)
    return result


def _over_slots(query: Tensor, rows: list[Tensor], end: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Attention to slots and own keys, of which the rows are scores, key, value and, if given, key_bias, [B, Hkv, M + n, *]."""
    scores, key, value, *biases = rows
    bias = _by_head(biases[0] + scores if biases else scores)
    return attend(query, key, value, sizes_of(query, key, value), (None, end, *NO_MASK[2:]), bias, None, options)


def _at_positions(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor | None,
    start: Tensor | None,
    end: Tensor,
    slots: Tensor,
    chunks: Chunks,
    common: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Attention with every query and key at its index in the whole sequence, which dropout's hash counts by: rows between slots are zeros."""
    first, last = chunks.first(chunks.rank), chunks.first(chunks.rank + 1)
    count = slots.shape[-1]
    batch, kv_heads = key.shape[:2]
    places = torch.where(slots == needs.EMPTY, first, slots).long().expand(batch, kv_heads, count)

    def spread(rows: Tensor) -> Tensor:
        """[B, Hkv, M + n, *] -> [B, Hkv, first + n, *]; what empty slots hold is dropped."""
        earlier = rows.new_zeros(batch, kv_heads, first + 1, rows.shape[3])
        filled = earlier.scatter(2, places[..., None].expand(-1, -1, -1, rows.shape[3]), rows[:, :, :count])
        return torch.cat((filled[:, :, :first], rows[:, :, count:]), dim=2)

    if key_bias is not None:
        columns = key_bias.unflatten(1, (kv_heads, -1)).transpose(2, 3)
        key_bias = spread(columns).transpose(2, 3).flatten(1, 2)
    # Queries of earlier ranks see nothing.
    since = end.new_full((1, 1, last), ALWAYS) if start is None else start[..., :last]
    mask = IntervalMask(since.clamp(min=first), end[..., :last])
    query = F.pad(query, (0, 0, first, 0))
    out, lse = attention(query, spread(key), spread(value), mask, key_bias=key_bias, return_lse=True, **common)
    return out[:, :, first:], lse[:, :, first:]
