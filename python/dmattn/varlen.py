"""Attention of packed sequences: documents of any lengths lie one after the other in one tensor, without padding."""

from __future__ import annotations

import itertools
import os
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from dmattn import checks, ops
from dmattn._library import build_info
from dmattn.call import NO_MASK, MaskTensors, Options, attend, autocast, new_seed, options_of
from dmattn.fake import accumulate_dtype
from dmattn.masks import ALWAYS, CombinedMask, IndexMask, IntervalMask, bounds
from dmattn.masks.heads import same_heads, with_rank
from dmattn.renamed import renamed
from dmattn.sinks import with_sinks
from dmattn.sizes import Sizes, fitting_lists, interval_rows, key_bias_rows, sizes_of, with_own_gradient


@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *, is_causal: bool = False,
    mask: IntervalMask | IndexMask | CombinedMask | None = None, scores: Tensor | None = None, window: int | None = None,
    local: int = 0, sink_keys: int = 0, key_bias: Tensor | None = None, bias: Tensor | None = None, scale: float | None = None,
    softcap: float | None = 0.0, dropout_p: float = 0.0, dropout_seed: Tensor | None = None, deterministic: bool = False,
    sinks: Tensor | None = None, return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *, is_causal: bool = False,
    mask: IntervalMask | IndexMask | CombinedMask | None = None, scores: Tensor | None = None, window: int | None = None,
    local: int = 0, sink_keys: int = 0, key_bias: Tensor | None = None, bias: Tensor | None = None, scale: float | None = None,
    softcap: float | None = 0.0, dropout_p: float = 0.0, dropout_seed: Tensor | None = None, deterministic: bool = False,
    sinks: Tensor | None = None, return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@renamed(sink="sink_keys")
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    is_causal: bool = False,
    mask: IntervalMask | IndexMask | CombinedMask | None = None,
    scores: Tensor | None = None,
    window: int | None = None,
    local: int = 0,
    sink_keys: int = 0,
    key_bias: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    deterministic: bool = False,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of many sequences (documents) that are packed one after the other: no padding, no loop, no device sync.

    Query a of a document with Lq queries and Lk keys sees keys of its own document only. With ``is_causal`` these are its keys b with
    ``b <= a + Lk - Lq`` (bottom-right alignment). A query that sees nothing gives 0 (and lse = -inf). A key is visible to one interval
    of the packed queries, so all of this is one interval mask and one call of :func:`attention`'s kernels; see there for the formula.

    Tokens behind the last document are padding: such keys are hidden, such queries give 0. So a batch may be filled up to a fixed length.

    Args:
        query: [Tq, H, D]: the queries of all documents. Dtypes as in :func:`attention`.
        key: [Tk, Hkv, D] with H % Hkv == 0.
        value: [Tk, Hkv, Dv]. D and Dv: multiples of 8 up to 256.
        cu_seqlens_q: int32 or int64 [documents + 1]: 0, then the end of each document among the queries, at most Tq. On query's device, or on
            the CPU. A document may be empty.
        cu_seqlens_k: the same for keys; None (or the same tensor) where queries and keys are the same tokens.
        is_causal: also hide keys later than the query's position.
        mask: an :class:`IntervalMask` for Tk keys that is intersected. Its positions are those of packed keys: the query stands where key
            ``a + Lk - Lq`` of its document lies, so ``IntervalMask.sliding_window(Tk, left)`` is a sliding window within each document.
            Or an :class:`IndexMask` for Tq queries, whose entries count keys, or blocks of keys, from the beginning of the query's
            document, as its local window and its sinks do; or both, ``interval & index``.
        scores: [Tk, Hkv], floating point: each query sees the ``window`` best-scored keys of its document among those it may see, and the
            scores are added to the logits, as in :func:`dynamic_mask_attention`. Selection has no gradient; scores get theirs through the
            logits. To select without adding: ``mask=IntervalMask.top_k(scores.T[None], window, base=IntervalMask.documents(Tk, cu_seqlens_k))``.
        window: how many keys a query selects at most; given with scores, and only with them.
        local, sink_keys: keys that each query sees whatever their scores: of its last ``local`` positions, and the first ``sink_keys`` of its
            document; only with is_causal. Without scores each query sees these keys alone. See :meth:`IntervalMask.top_k`.
        key_bias: added to every logit of a key, [Tk] or [Tk, H|Hkv|1], differentiable.
        bias: added to the logits, [Tq|1, Tk] or [H|Hkv|1, Tq|1, Tk] over packed queries and keys, differentiable. It takes memory for
            every pair, those of different documents too.
        scale, softcap, dropout_p, dropout_seed, deterministic, sinks: as in :func:`attention`.
        return_lse: also return the log-sum-exp of each query's logits, natural logarithm, differentiable, without the sink.

    More than 2^20 packed tokens are computed in several calls, cut between documents. The host has to read where: cu_seqlens on a GPU are
    waited for then, those on the CPU are not. There is no mask and no bias, and such a call cannot be compiled or captured in a CUDA graph.
    Hopper GPUs take up to 2^27 tokens in one call, which waits for nothing, where nothing but cu_seqlens, is_causal, scale and sinks are given
    and D and Dv are at most 128.

    Returns:
        out [Tq, H, Dv] in query's dtype, or (out, lse) with lse [H, Tq] float32 (float64 for float64 inputs).

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, device or value, cu_seqlens that are no such numbers (checked where their values lie on the CPU; on another
            device malformed ones give a meaningless mask, never a wrong access), or arguments that do not go together.
    """
    checks.flags(is_causal, deterministic, return_lse)
    query, key, value = autocast(query, key, value)
    _check_packed(query, key, value)
    ends_q = _ends("cu_seqlens_q", cu_seqlens_q, query, query.shape[0])
    ends_k = None
    if cu_seqlens_k is not None and cu_seqlens_k is not cu_seqlens_q:
        ends_k = _ends("cu_seqlens_k", cu_seqlens_k, query, key.shape[0])
        if ends_k.shape != ends_q.shape:
            raise ValueError(
                f"cu_seqlens_k: expected [documents + 1] = {checks.shape_of(ends_q)} like cu_seqlens_q, got {checks.shape_of(ends_k)}"
            )
    elif key.shape[0] != query.shape[0]:
        ends_k = _ends("cu_seqlens_q", cu_seqlens_q, query, key.shape[0])
    mask, index = parts_of(mask)
    is_causal = is_causal or (index is not None and index.is_causal)
    window = _checked_window(scores, window, local, sink_keys, is_causal)
    if scores is not None:
        scores = _key_rows("scores", scores, query, key, (key.shape[1],), "[Tk, Hkv]")
    if key_bias is not None:
        key_bias = _key_rows("key_bias", key_bias, query, key, (query.shape[1], key.shape[1], 1), "[Tk] or [Tk, H|Hkv|1]")
    packed = Packed(query, key, value, ends_q, ends_k, scores, key_bias)
    rules = Rules(
        is_causal, mask, index, window, local, sink_keys, bias, sinks, scale, softcap, dropout_p, dropout_seed, deterministic
    )
    most = checks.MAX_LENGTH
    if max(query.shape[0], key.shape[0]) <= most:
        out, lse = attend_packed(packed, rules)
    elif takes_long_packs(packed, rules):
        out, lse = attend_packed(packed, rules, checks.MAX_LENGTH_IN_ORDER)
    else:
        out, lse = attend_in_parts(packed, rules, most)
    return (out, lse) if return_lse else out


class Packed(NamedTuple):
    """The tensors of packed documents; ends are as cu_seqlens."""

    query: Tensor  # [Tq, H, D]
    key: Tensor  # [Tk, Hkv, D]
    value: Tensor  # [Tk, Hkv, Dv]
    ends_q: Tensor  # [documents + 1]
    ends_k: Tensor | None  # [documents + 1]; None: queries and keys are the same tokens
    scores: Tensor | None  # [1, Hkv, Tk]
    key_bias: Tensor | None  # [1, H|Hkv|1, Tk]


class Rules(NamedTuple):
    """What :func:`varlen_attention` is told in addition to the tensors of the documents."""

    is_causal: bool
    mask: IntervalMask | None
    listed: IndexMask | None
    window: int | None  # None: nothing is selected
    local: int
    sink_keys: int
    bias: Tensor | None
    sinks: Tensor | None
    scale: float | None
    softcap: float | None
    dropout_p: float
    dropout_seed: Tensor | None
    deterministic: bool


def attend_packed(packed: Packed, rules: Rules, longest: int | None = None) -> tuple[Tensor, Tensor]:
    """out [Tq, H, Dv] and lse [H, Tq] of documents whose tokens fit into one call. longest: as in :func:`sizes_of`."""
    query, key, value, sizes, masks, key_bias, options = packed_call(packed, rules, longest)
    out, lse = attend(query, key, value, sizes, masks, key_bias, rules.bias, options)
    if rules.sinks is not None:
        out = with_sinks(out, lse, rules.sinks, sizes)
    # The gradient of squeeze is a view, that of an index a copy among zeros.
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0)


def packed_call(
    packed: Packed, rules: Rules, longest: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Sizes, MaskTensors, Tensor | None, Options]:
    """The arguments of :func:`dmattn.call.attend` for documents whose tokens fit into one call, without the bias of pairs."""
    query, key, value = (given.transpose(0, 1)[None] for given in packed[:3])
    sizes = sizes_of(query, key, value, longest=longest)
    start, end = interval_of(packed, rules, sizes)
    key_bias = packed.scores
    if packed.key_bias is not None:
        rows = key_bias_rows(packed.key_bias, sizes)
        if key_bias is not None:
            rows = torch.add(*same_heads(key_bias_rows(key_bias, sizes), with_own_gradient(rows), "key_bias"))
        key_bias = rows
    # The op's own causality, where positions are those of keys, hides later keys without a start for each key.
    is_causal = rules.is_causal and packed.ends_k is None
    options = options_of(
        sizes, rules.dropout_seed, is_causal, rules.scale, rules.softcap, rules.dropout_p, rules.deterministic,
        is_in_order=rules.listed is None and rules.window is None and (rules.mask is None or rules.mask.is_in_order),
    )  # fmt: skip
    masks: MaskTensors = (start, end, *NO_MASK[2:])
    if rules.listed is not None:
        lists, local = packed_lists(packed, rules.listed, sizes)
        masks = (start, end, *NO_MASK[2:6], lists, None)
        options = options._replace(index_local=local)
    return query, key, value, sizes, masks, key_bias, options


def interval_of(packed: Packed, rules: Rules, sizes: Sizes) -> tuple[Tensor | None, Tensor]:
    """start and end [1, H|Hkv|1, Tk] of the packed queries that see each key, as positions of :func:`dmattn.attention`: packed query i stands
    at i + Tk - Tq. start None: from the key's own position on.

    Selection and a given mask speak of positions among the packed keys, where the last query of a document stands at its last key. So what
    they say of a key moves by ``shift``, the way from there to the document's last query.
    """
    device = sizes.device
    ends_q = packed.ends_q.to(device, non_blocking=True).int()
    ends_k = ends_q if packed.ends_k is None else packed.ends_k.to(device, non_blocking=True).int()
    keys = torch.arange(sizes.key_length, dtype=torch.int32, device=device)
    # Counted from 1. Keys behind the last document are in one more, which is empty and ends where the last does.
    document = torch.searchsorted(ends_k, keys, right=True, out_int32=True)
    last_key = with_last_twice(ends_k).index_select(0, document)  # the position behind it
    # Its last query; where queries and keys are the same tokens, it stands at the last key.
    last_query, shift = last_key, None
    offset = sizes.key_length - sizes.query_length
    if packed.ends_k is not None:
        last_query = with_last_twice(ends_q).index_select(0, document) + offset
        shift = last_query - last_key

    # From which query to which does the key's document go? Of a key behind the last one the end is not behind the start, which
    # is the key itself under the op's own causality.
    start: Tensor | None = None
    end: Tensor = last_query
    if not rules.is_causal or shift is not None:
        start = F.pad(ends_q, (1, 0)).index_select(0, document) + offset
        if rules.is_causal and shift is not None:
            start = torch.maximum(start, keys + shift)
    start, end = None if start is None else start[None, None], end[None, None]

    # Which queries of the document select it?
    if rules.window is not None:
        scores = packed.scores
        if scores is None:
            scores = torch.zeros((1, 1, sizes.key_length), device=device)
        selected = ops.select(scores, last_key[None, None], rules.window, rules.is_causal, rules.local, rules.sink_keys)
        if rules.is_causal:
            end = selected if shift is None else selected + shift
        else:
            end = torch.where(selected > keys, last_query, ALWAYS)

    # And which does the mask show it to?
    if rules.mask is not None:
        if not rules.mask.serves(sizes.key_length):
            raise ValueError(
                f"mask: expected an IntervalMask for Tk={sizes.key_length} keys, got one for {rules.mask.key_length}"
            )
        checks.same_device("mask", rules.mask.start, packed.query)
        first, last = (
            bound if shift is None else bounds.moved(bound, shift)
            for bound in (interval_rows("mask.start", rules.mask.start, sizes), interval_rows("mask.end", rules.mask.end, sizes))
        )
        start = first if start is None else torch.maximum(*same_heads(start, first, "mask"))
        end = torch.minimum(*same_heads(end, last, "mask"))
    return start, end


def packed_lists(packed: Packed, index: IndexMask, sizes: Sizes) -> tuple[Tensor, int]:
    """The lists of an index mask with entries that are packed keys, int32 [1, H|Hkv|1, Tq, K'], and the op's local window.

    Entries count from the beginning of the query's document. Blocks become single keys, since documents begin anywhere; sinks, and a local
    window where queries and keys are not the same tokens, become entries.
    """
    ends_q = packed.ends_q.to(sizes.device, non_blocking=True).long()
    ends_k = ends_q if packed.ends_k is None else packed.ends_k.to(sizes.device, non_blocking=True).long()
    query = torch.arange(sizes.query_length, device=sizes.device)
    # Counted from 1. Queries behind the last document are in one more, which is empty.
    document = torch.searchsorted(ends_q, query, right=True)
    first_key, end_key = (with_last_twice(ends_k).index_select(0, document - before)[:, None] for before in (1, 0))
    fitting_lists(index, sizes)
    lists = with_rank(index.keys(), 4)
    sinks = torch.arange(bounds.fewer(index.sink_keys, sizes.key_length), device=sizes.device)
    own = [lists, sinks.expand(1, 1, query.shape[0], -1)]
    local = index.local
    if packed.ends_k is not None and local:
        # Where the query stands among its document's keys.
        behind = with_last_twice(ends_q).index_select(0, document) - query
        last = end_key - first_key - behind[:, None]
        own.append((last - torch.arange(bounds.fewer(local, sizes.key_length), device=sizes.device)).expand(1, 1, -1, -1))
        local = 0
    entries = torch.cat([given.expand(-1, lists.shape[1], -1, -1) for given in own], dim=3)
    inside = (entries >= 0) & (entries < end_key - first_key)
    return torch.where(inside, entries + first_key, -1).int(), local


def with_last_twice(ends: Tensor) -> Tensor:
    return torch.cat((ends, ends[-1:]))


HAS_HOPPER_KERNELS = "90a" in build_info()["cuda_archs"]


def takes_long_packs(packed: Packed, rules: Rules) -> bool:
    """Whether one call takes more than checks.MAX_LENGTH tokens: Hopper's kernels do where they take keys in order, which needs no lists.

    Forward and backward of the ops refuse such lengths otherwise.
    """
    if packed.query.device.type != "cuda" or max(packed.query.shape[0], packed.key.shape[0]) > checks.MAX_LENGTH_IN_ORDER:
        return False
    has_more = any(
        given is not None for given in (packed.scores, packed.key_bias, rules.mask, rules.listed, rules.window, rules.bias)
    )
    is_plain = not (has_more or rules.softcap or rules.dropout_p or rules.deterministic)
    return (
        is_plain
        and (rules.scale is None or rules.scale >= 1e-6)
        and packed.query.dtype in (torch.bfloat16, torch.float16)
        and max(packed.query.shape[2], packed.value.shape[2]) <= 128
        and all(0 not in given.stride() for given in packed[:3])
        and not torch.are_deterministic_algorithms_enabled()
        and HAS_HOPPER_KERNELS
        and os.environ.get("DMATTN_FAMILY", "auto") in ("", "auto", "sm90")
        and torch.cuda.get_device_capability(packed.query.device)[0] == 9
    )


def attend_in_parts(packed: Packed, rules: Rules, longest: int) -> tuple[Tensor, Tensor]:
    """:func:`attend_packed` for any number of tokens, in calls of at most ``longest``, cut between documents."""
    queries, keys = packed.query.shape[0], packed.key.shape[0]
    for name, left_out in (("mask", rules.mask), ("mask", rules.listed), ("bias", rules.bias)):
        if left_out is not None:
            raise ValueError(f"{name}: expected None for more than {longest} packed tokens, got Tq={queries}, Tk={keys}")
    device = packed.query.device
    if rules.dropout_p and rules.dropout_seed is None:
        rules = rules._replace(dropout_seed=new_seed(device))

    # Get the ends to the host. They may lie on a device, which is then waited for.
    ends_q = _read_ends("cu_seqlens_q", packed.ends_q, queries, longest)
    ends_k = ends_q if packed.ends_k is None else _read_ends("cu_seqlens_k", packed.ends_k, keys, longest)

    # Cut, and split all tensors at the cuts: the gradient of a split is one concatenation.
    cuts = cuts_between(ends_q.tolist(), ends_k.tolist(), longest)
    spans = list(itertools.pairwise(cuts))
    at_q, at_k = [int(ends_q[c]) for c in cuts] + [queries], [int(ends_k[c]) for c in cuts] + [keys]
    lengths_q, lengths_k = ([b - a for a, b in itertools.pairwise(at)] for at in (at_q, at_k))

    def split(given: Tensor | None, lengths: list[int], dim: int) -> list[Tensor | None]:
        return [None] * len(lengths) if given is None else list(given.split(lengths, dim))

    parts = zip(split(packed.query, lengths_q, 0), *(split(given, lengths_k, 0) for given in packed[1:3]),
                *(split(given, lengths_k, 2) for given in packed[5:]), strict=True)  # fmt: skip
    outs, lses = [], []
    for number, ((first, last), (query, key, value, scores, key_bias)) in enumerate(zip(spans, parts, strict=False)):
        of_q, of_k = (ends[first : last + 1] - ends[first] for ends in (ends_q, ends_k))
        part = Packed(query, key, value, of_q, None if packed.ends_k is None else of_k, scores, key_bias)
        seed = None if rules.dropout_seed is None else rules.dropout_seed + number
        out, lse = attend_packed(part, rules._replace(dropout_seed=seed))
        outs.append(out)
        lses.append(lse)

    # Queries behind the last document see nothing.
    behind = queries - at_q[-2]
    if behind:
        heads, value_dim = packed.query.shape[1], packed.value.shape[2]
        outs.append(packed.query.new_zeros((behind, heads, value_dim)))
        lses.append(torch.full((heads, behind), -torch.inf, dtype=accumulate_dtype(packed.query.dtype), device=device))
    return torch.cat(outs), torch.cat(lses, dim=1)


def _read_ends(name: str, ends: Tensor, tokens: int, longest: int) -> Tensor:
    """cu_seqlens on the CPU."""
    if checks.values_are_known(ends):
        return ends
    if not checks.values_can_be_read(ends):
        raise ValueError(
            f"{name}: expected numbers that can be read, without tracing, torch.func and the capture of a CUDA graph, for more than {longest} "
            f"packed tokens, which are computed in several calls, cut between documents; got {tokens} tokens and cu_seqlens on {ends.device}"
        )
    ends = ends.cpu()
    checks.document_ends(name, ends, tokens)
    return ends


def cuts_between(ends_q: list[int], ends_k: list[int], longest: int) -> list[int]:
    """Numbers of documents, from 0 to all, between which there are at most ``longest`` queries and keys: as few cuts as can be."""
    cuts = [0]
    for document in range(1, len(ends_q)):
        tokens = [ends[document] - ends[cuts[-1]] for ends in (ends_q, ends_k)]
        if max(tokens) > longest and document - 1 > cuts[-1]:
            cuts.append(document - 1)
            tokens = [ends[document] - ends[document - 1] for ends in (ends_q, ends_k)]
        if max(tokens) > longest:
            raise ValueError(f"query, key: expected documents of up to {longest} tokens, got one of {max(tokens)}")
    return [*cuts, len(ends_q) - 1]


# Checks -------------------------------------------------------------------------------------------------------------------------------


def _check_packed(query: Tensor, key: Tensor, value: Tensor) -> None:
    """What sizes_of says in terms of four dimensions, in terms of three; it checks the rest."""
    for name, given, layout in (("query", query, "[Tq, H, D]"), ("key", key, "[Tk, Hkv, D]"), ("value", value, "[Tk, Hkv, Dv]")):
        if checks.tensor(name, given).dim() != 3:
            raise ValueError(f"{name}: expected 3 dimensions {layout}, got shape {checks.shape_of(given)}")
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"key: expected [Tk, Hkv, D] with D={query.shape[2]}, got {checks.shape_of(key)}")
    if value.shape[:2] != key.shape[:2]:
        expected = f"Tk={key.shape[0]}, Hkv={key.shape[1]}"
        raise ValueError(f"value: expected [Tk, Hkv, Dv] with {expected}, got {checks.shape_of(value)}")


def parts_of(mask: Any) -> tuple[IntervalMask | None, IndexMask | None]:
    """The intervals and the lists of a mask."""
    if isinstance(mask, CombinedMask) and mask.block is None:
        return mask.interval, mask.index
    checks.instance("mask", mask, IntervalMask | IndexMask | None, "an IntervalMask, an IndexMask or interval & index")
    return (None, mask) if isinstance(mask, IndexMask) else (mask, None)


def _ends(name: str, given: object, query: Tensor, length: int) -> Tensor:
    """cu_seqlens, checked as far as costs no sync."""
    ends = checks.cu_seqlens(name, given, length)
    if ends.device.type != "cpu":
        checks.same_device(name, ends, query)
    return ends


def _checked_window(scores: object, window: int | None, local: int, sink_keys: int, is_causal: bool) -> int | None:
    """The window of a selection, None for none; without scores local keys and sinks alone are selected."""
    if scores is None and window is not None:
        raise ValueError(f"window: expected None without scores, got {window}")
    if scores is not None and window is None:
        raise ValueError("window: expected a number of keys with scores, got None")
    given = 0 if window is None else window
    if scores is not None or type(local) is not int or type(sink_keys) is not int or local != 0 or sink_keys != 0:
        checks.selection(given, local, sink_keys, is_causal)
        return given
    return None


def _key_rows(name: str, given: object, query: Tensor, key: Tensor, heads: tuple[int, ...], layout: str) -> Tensor:
    """Numbers of keys [Tk] or [Tk, heads] as [1, heads|1, Tk]."""
    rows = checks.tensor(name, given, checks.DTYPES["cpu"], query)
    fits = (rows.dim() == 2 and rows.shape[1] in heads) or (rows.dim() == 1 and 1 in heads)
    if not fits or rows.shape[0] != key.shape[0]:
        sizes = f"Tk={key.shape[0]}, H={query.shape[1]}, Hkv={key.shape[1]}"
        raise ValueError(f"{name}: expected {layout} with {sizes}, got {checks.shape_of(rows)}")
    return rows[None, None] if rows.dim() == 1 else rows.transpose(0, 1)[None]
