"""What the functions of flash-attn and its relatives share: tensors with heads behind the sequence, windows, packed sequences and ALiBi."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dmattn import checks
from dmattn.compat.merging import Pass
from dmattn.fake import accumulate_dtype
from dmattn.masks import IntervalMask
from dmattn.sizes import check_alike, padded

T = TypeVar("T")
HEADS_LAST = ("[B, Sq, H, D]", "[B, Sk, Hkv, D]", "[B, Sk, Hkv, Dv]")
HEADS_FIRST = ("[B, H, Sq, D]", "[B, Hkv, Sk, D]", "[B, Hkv, Sk, Dv]")
PACKED = ("[Tq, H, D]", "[Tk, Hkv, D]", "[Tk, Hkv, Dv]")
PAGED = ("[Tq, H, D]", "[pages, page_size, Hkv, D]", "[pages, page_size, Hkv, Dv]")


class Sequences(NamedTuple):
    """Which sequence each key of a call belongs to, and where it stands in it. Tensors are int32; what fits broadcasts.

    Args:
        number: [B|1, 1, Sk], the number of each key within its sequence.
        keys: [B|1, 1, Sk|1] or an int, how many keys the key's sequence has; keys with other numbers are padding.
        queries: the same for queries.
        first_row: [B|1, 1, Sk|1] or an int, the row of the first query of the key's sequence.
        offset: the position of row 0, Sk - Sq of the call.
        from_last: [B|1, 1, Sq], the number of each query within its sequence, counted from the last query, which is 0.
    """

    number: Tensor
    keys: Tensor | int
    queries: Tensor | int
    first_row: Tensor | int
    offset: int
    from_last: Tensor

    def shift(self) -> Tensor | int:
        """Position of a sequence's first query: its last query stands at its last key."""
        return self.keys - self.queries

    def mask(self, first: Tensor | int, end: Tensor | int) -> IntervalMask:
        """Keys that the queries from number ``first`` to number ``end - 1`` of their own sequence see."""
        zero = torch.zeros_like(self.number)
        begin = (zero + first).clamp(min=0) + self.first_row + self.offset
        behind = torch.minimum(zero + end, zero + self.queries) + self.first_row + self.offset
        behind = torch.where(self.number < self.keys, behind, begin)
        return IntervalMask(*torch.broadcast_tensors(begin, behind))

    def window(self, left: int | None, right: int | None) -> IntervalMask:
        """Keys from ``left`` before a query's position to ``right`` behind it; None is without end."""
        first = 0 if right is None else self.number - right - self.shift()
        end = self.queries if left is None else self.number + (left + 1) - self.shift()
        return self.mask(first, end)


def of_batch(queries: int, keys: int, lengths: Tensor | None, device: torch.device) -> Sequences:
    """Sequences that lie in rows of their own, with ``queries`` queries each; lengths: the number of keys of each, [B], None for all."""
    number = torch.arange(keys, dtype=torch.int32, device=device).view(1, 1, -1)
    from_last = torch.arange(1 - queries, 1, dtype=torch.int32, device=device).view(1, 1, -1)
    length: Tensor | int = keys if lengths is None else lengths.to(torch.int32).view(-1, 1, 1)
    return Sequences(number, length, queries, 0, keys - queries, from_last)


def packed(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, queries: int, keys: int, room: int = 0
) -> tuple[Sequences, Tensor, Tensor]:
    """Sequences that lie one after the other, and the numbers of the sequences of each key [Sk] and of each query [Sq].

    room: 0, or the number of keys that each sequence has room for, whatever its length.
    """
    device = cu_seqlens_k.device
    token = torch.arange(keys, dtype=torch.int32, device=device)
    of_key = token.long() // room if room else document_of(cu_seqlens_k, keys)
    of_query = document_of(cu_seqlens_q, queries)
    number = token % room if room else token - cu_seqlens_k[of_key].int()
    lengths_k, lengths_q = cu_seqlens_k.diff().int()[of_key], cu_seqlens_q.diff().int()[of_key]
    from_last = torch.arange(1, queries + 1, dtype=torch.int32, device=device) - cu_seqlens_q[of_query + 1].int()
    per_key = (number, lengths_k, lengths_q, cu_seqlens_q[of_key].int())
    number, lengths_k, lengths_q, first_row, from_last = (x.view(1, 1, -1) for x in (*per_key, from_last))
    return Sequences(number, lengths_k, lengths_q, first_row, keys - queries, from_last), of_key, of_query


def window_mask(left: int | None, right: int | None, keys: int, device: torch.device) -> IntervalMask:
    """A sliding window over so many keys; None is without end."""
    sides = (checks.MAX_LENGTH if side is None else side for side in (left, right))
    return IntervalMask.sliding_window(keys, *sides, device=device)


def document_of(cu_seqlens: Tensor, length: int) -> Tensor:
    """The sequence of each of ``length`` packed tokens, int64; those behind the last sequence count to it."""
    tokens = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True).clamp(max=max(cu_seqlens.shape[0] - 2, 0))


def passes_of(
    sequences: Sequences, left: int | None, right: int | None, key_slopes: Tensor | None, query_slopes: Tensor | None
) -> list[Pass]:
    """The passes of a window and of ALiBi, ``-slope * |p - j|``.

    Up to the query's position that is a bias of the key, ``slope * (j - c)``, and a lift of the query, ``slope * (c - p)``; behind it the
    other way round, in a second pass. c is the last key of the sequence, so that late keys have small biases.

    Args:
        left, right: the window; None is without end.
        key_slopes, query_slopes: [B|1, H, Sk|1] and [B|1, H, Sq|1], or None: no ALiBi.
    """
    if key_slopes is None or query_slopes is None:
        return [Pass(sequences.window(left, right))]
    near = (sequences.number - (sequences.keys - 1)).to(key_slopes.dtype) * key_slopes
    lift = sequences.from_last.to(query_slopes.dtype) * query_slopes
    passes = [Pass(sequences.window(left, 0), key_bias=near, lift=-lift)]
    if right != 0:
        passes.append(Pass(sequences.window(-1, right), key_bias=-near, lift=lift))
    return passes


def passes_of_batch(
    queries: int, keys: int, left: int | None, right: int | None, slopes: Tensor | None, device: torch.device
) -> list[Pass]:
    """:func:`passes_of` for a batch without padding, where causality alone needs no mask."""
    if slopes is None and left is None and right in (None, 0):
        return [Pass(is_causal=right == 0)]
    return passes_of(of_batch(queries, keys, None, device), left, right, slopes, slopes)


# Arguments ---------------------------------------------------------------------------------------------------------------------------


def of_window(window_size: object, causal: bool) -> tuple[int | None, int | None]:
    """(left, right) of a window; negative is without end, and causality ends it at the query."""
    pair = window_size if isinstance(window_size, tuple | list) else ()
    if len(pair) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) for side in pair):
        raise TypeError(f"window_size: expected two ints (left, right), got {window_size!r:.80}")
    left, right = (None if side < 0 else min(side, checks.MAX_LENGTH) for side in pair)
    return left, 0 if causal else right


def slopes_of(alibi_slopes: object, batch: int, heads: int, like: Tensor) -> Tensor | None:
    """ALiBi's slopes as [B|1, H, 1] in the dtype logits are summed in."""
    if alibi_slopes is None:
        return None
    slopes = checks.tensor("alibi_slopes", alibi_slopes, checks.DTYPES["cpu"], like, "q")
    shape = list(slopes.shape)  # `in` would not do: Dynamo finds no equal symbolic sizes with it
    if shape != [heads] and shape != [batch, heads]:
        raise ValueError(f"alibi_slopes: expected [H] or [B, H] with B={batch}, H={heads}, got {checks.shape_of(slopes)}")
    slopes = slopes.to(accumulate_dtype(like.dtype))[..., None]
    return slopes if slopes.dim() == 3 else slopes[None]


def of_softcap(softcap: object) -> float:
    """0 for None, 0 and less: none."""
    cap = 0.0 if softcap is None else checks.number("softcap", softcap)
    return checks.softcap(max(cap, 0.0))


def of_scale(scale: object, head_dim: int, name: str = "softmax_scale") -> float:
    """None is D ** -0.5, of the head size before it is padded."""
    return head_dim**-0.5 if scale is None else checks.scale(scale, name)


def of_dropout(name: str, value: object) -> float:
    return checks.number(name, value, low=0.0, high=1.0, open_high=True)


def of_flag(name: str, value: object) -> bool:
    """None is False."""
    return False if value is None else checks.flag(name, value)


def checked(
    names: tuple[str, str, str], q: object, k: object, v: object, layouts: tuple[str, str, str]
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value whose ranks, sizes, dtypes and devices go together, under the names that a function has for them."""
    tensors = tuple(checks.tensor(name, given) for name, given in zip(names, (q, k, v), strict=True))
    query = tensors[0]
    cast = torch._C._is_any_autocast_enabled()  # and then attention gives all of them the dtype that it needs
    dtypes = checks.DTYPES["cpu"] if cast else checks.DTYPES.get(query.device.type, checks.DTYPES["cpu"])
    with_batch = layouts in (HEADS_LAST, HEADS_FIRST)
    of_length, of_heads = (2, 1) if layouts is HEADS_FIRST else (1, -2)  # dimensions
    checks.dtype(names[0], query, dtypes)
    check_alike(*zip(names, tensors, layouts, strict=True), any_dtype=cast)
    for name, given in zip(names, tensors, strict=True):
        checks.dtype(name, given, dtypes)
        if not 0 < given.shape[-1] <= checks.MAX_HEAD_DIM:
            raise ValueError(f"{name}: expected a head size from 1 to {checks.MAX_HEAD_DIM}, got {given.shape[-1]}")
        if with_batch and given.shape[of_length] > checks.MAX_LENGTH:
            raise ValueError(f"{name}: expected a length up to {checks.MAX_LENGTH}, got {given.shape[of_length]}")
    _, key, value = tensors
    heads, kv_heads, size = query.shape[of_heads], key.shape[of_heads], query.shape[-1]
    if key.shape[-1] != size or (with_batch and key.shape[0] != query.shape[0]):
        batch = f"B={query.shape[0]}, " if with_batch else ""
        raise ValueError(f"{names[1]}: expected {layouts[1]} with {batch}D={size}, got {checks.shape_of(key)}")
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(f"{names[2]}: expected {layouts[2]} = {[*key.shape[:-1], 'Dv']}, got {checks.shape_of(value)}")
    if (heads % kv_heads if kv_heads else heads) != 0:
        raise ValueError(f"{names[1]}: expected a number of heads that divides H={heads} of {names[0]}, got Hkv={kv_heads}")
    return tensors[0], tensors[1], tensors[2]


def check_pairs(name: str, given: Tensor, query: Tensor, key: Tensor, like_name: str = "query") -> None:
    """Checks [B|1, H|Hkv|1, Sq|1, Sk|1] against query [B, H, Sq, D] and key [B, Hkv, Sk, D]."""
    sizes = {"B": query.shape[0], "H": query.shape[1], "Hkv": key.shape[1], "Sq": query.shape[2], "Sk": key.shape[2]}
    checks.shaped(name, given, "[B|1, H|Hkv|1, Sq|1, Sk|1]", (), query, like_name, **sizes)


def check_cu_seqlens(ends_q: object, ends_k: object, q: Tensor, keys: int | None) -> tuple[Tensor, Tensor]:
    """cu_seqlens_q and cu_seqlens_k [B + 1]: 0 and the end of each sequence, up to the number of queries of q and of keys (None: unknown).
    Values are checked on the CPU."""
    checked = []
    for name, given, tokens in (("cu_seqlens_q", ends_q, q.shape[0]), ("cu_seqlens_k", ends_k, keys)):
        ends = checks.cu_seqlens(name, given, tokens)
        checks.same_device(name, ends, q, "q")
        checked.append(ends)
    if checked[1].shape != checked[0].shape:
        shapes = [checks.shape_of(ends) for ends in checked]
        raise ValueError(f"cu_seqlens_k: expected shape {shapes[0]} like cu_seqlens_q, got {shapes[1]}")
    return checked[0], checked[1]


def check_longest(name: str, ends: Tensor, most: int) -> None:
    """Refuses a greatest length that a sequence exceeds, where values lie on the CPU."""
    if checks.values_are_known(ends) and ends.shape[0] > 1 and int(ends.diff().max()) > most:
        raise ValueError(f"{name}: expected at least {int(ends.diff().max())}, the longest sequence, got {most}")


def one_of(name: str, given: T | None, other_name: str, other: T | None) -> T | None:
    """An argument with two names."""
    if given is not None and other is not None:
        raise TypeError(f"{name}, {other_name}: expected one of them at most, got both")
    return other if given is None else given


def per_sequence(name: str, given: object, q: Tensor, below: int) -> Tensor:
    """Integers [B] from 0 to below - 1; values are checked on the CPU."""
    numbers = checks.per_sequence(name, given, q, "q", (torch.int32, torch.int64))
    checks.numbers_below(name, numbers, below)
    return numbers


def check_table(name: str, given: object, batch: int, like: Tensor) -> Tensor:
    return checks.shaped(name, given, "[B, max_pages]", (torch.int32, torch.int64), like, "q", B=batch)


def check_pages(name: str, table: Tensor, lengths: Tensor, pages: Tensor) -> None:
    """Refuses a table without room for sequences of these lengths [B], or that sends their keys to pages which are not there. Values are
    checked on the CPU; what lies behind a sequence's end is never read and may be any number."""
    if not (checks.values_are_known(table) and checks.values_are_known(lengths)):
        return
    number, page_size = pages.shape[:2]
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest > table.shape[1] * page_size:
        raise ValueError(f"{name}: expected room for {longest} keys, got {table.shape[1]} pages of {page_size}")
    used = torch.arange(table.shape[1]) * page_size < lengths[:, None]
    wrong = table[used & ((table < 0) | (table >= number))]
    if wrong.numel():
        raise ValueError(f"{name}: expected pages from 0 to {number - 1}, got {int(wrong[0])}")


def from_pages(pages: Tensor, table: Tensor, batch: int) -> Tensor:
    """The rows of pages [pages, page_size, ...] in the order of their sequences, [B, max_pages * page_size, ...]: a copy."""
    if pages.shape[0] == 0:
        return pages.new_zeros((batch, 0, *pages.shape[2:]))
    return pages[table.long().clamp(0, pages.shape[0] - 1)].flatten(1, 2)


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, S, heads, D] or [T, heads, D] as [B|1, heads, S, D], D padded."""
    q, k, v = (padded(x).transpose(-3, -2) for x in (q, k, v))
    return (q, k, v) if q.dim() == 4 else (q[None], k[None], v[None])
