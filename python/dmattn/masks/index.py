"""IndexMask: for each query a list of the keys, or blocks of keys, that it sees. A list costs what it holds: O(Sq x K) memory, never Sq x Sk."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from dmattn import checks
from dmattn.composed import visible_in_lists
from dmattn.masks import bounds, drawing, tables
from dmattn.masks.data import MaskData, join_batches
from dmattn.masks.detect import four_dims, spans
from dmattn.masks.heads import same_heads, with_rank
from dmattn.masks.interval import IntervalMask

MAX_BLOCK = 128
NONE = -1  # an entry that lists nothing
PLACE_BITS = 21  # of a selected key's number, below its score


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class IndexMask(MaskData):
    """A query sees a key that it lists, that is among its last ``local`` or among the first ``sink_keys``; with ``is_causal`` none beyond its
    own position, so that a listed block never shows the future.

    Query i stands at position ``i + Sk - Sq``, or ``query_offset + i``. The keys are those of the call, in :func:`dmattn.varlen_attention`
    those of the query's document, and in :func:`dmattn.decode_attention` those of its sequence.

    Entries that are in no sequence are refused where the values lie on the CPU (and nothing is being traced); elsewhere they list nothing.
    Do not write into the lists of a mask: decoding relies on lists that :func:`index_top_k`, ``top_k`` or ``from_bool`` made having no entry
    twice. For a tensor that changes, make ``IndexMask(tensor)`` again.

    Args:
        indices: int32 or int64 [B|1, H|Hkv|1, Sq, K], or with leading dimensions left out; kept as int32. Entry n lists the keys from
            ``n * block_size`` to ``n * block_size + block_size - 1``, as far as there are such; -1 lists nothing. In any order; what is
            listed twice counts once.
        block_size: a power of two from 1 to 128.
        is_causal: hide keys later than the query's position, as the argument of that name does.
        local: every query also sees the keys of its last ``local`` positions, its own included.
        sink_keys: every query also sees the first ``sink_keys`` keys.

    Raises:
        TypeError: indices is not a dense int32 or int64 tensor, or another argument has the wrong type.
        ValueError: a wrong shape, block_size, local or sink_keys; an entry below -1 or of keys beyond 2^20, where the values are known.
    """

    indices: Tensor
    block_size: int = 1
    is_causal: bool = dataclasses.field(default=False, kw_only=True)
    local: int = dataclasses.field(default=0, kw_only=True)
    sink_keys: int = dataclasses.field(default=0, kw_only=True)

    # Whether it is known that no list has an entry twice. What is made of a mask in another way than _of_lists does not know it.
    _is_distinct: ClassVar[bool] = False

    LEAVES: ClassVar[tuple[str, ...]] = ("indices",)
    CONSTANTS: ClassVar[tuple[str, ...]] = ("block_size", "is_causal", "local", "sink_keys")

    def __post_init__(self) -> None:
        given = checks.tensor("indices", self.indices, (torch.int32, torch.int64))
        if given.dim() not in (2, 3, 4) or max(given.shape[-2:]) > checks.MAX_LENGTH:
            raise ValueError(f"indices: expected [B|1, H|Hkv|1, Sq, K], got shape {checks.shape_of(given)}")
        check_block_size(self.block_size)
        checks.flag("is_causal", self.is_causal)
        checks.each(checks.length, local=self.local, sink_keys=self.sink_keys)
        if checks.values_are_known(given) and given.numel():
            least, most = (int(entry) for entry in given.aminmax())
            if least < NONE or most * self.block_size >= checks.MAX_LENGTH:
                raise ValueError(
                    f"indices: expected numbers of keys below {checks.MAX_LENGTH} in blocks of {self.block_size}, or -1 for none, "
                    f"got {least if least < NONE else most}"
                )
        object.__setattr__(self, "indices", with_rank(narrow(given), 4))

    # Constructors ---------------------------------------------------------------------------------------------------------------

    @classmethod
    def from_bool(cls, mask: Tensor, block_size: int = 1, max_entries: int | None = None) -> IndexMask:
        """From booleans, True = visible, where blocks of keys are visible whole or not at all. Entries are sorted, -1 behind them.

        Args:
            mask: bool [B|1, H|Hkv|1, Sq, Sk], or with leading dimensions left out.
            block_size: as of the mask.
            max_entries: room in each list. None: as many as the longest list needs, for which a GPU is waited for.

        Raises:
            TypeError: mask is not a bool tensor, or an argument of another type.
            ValueError: a wrong shape or size; a block that is visible in part, or a longer list than max_entries (where the values lie on a
                GPU and max_entries is given, the device raises it).
        """
        four = four_dims(mask)
        check_block_size(block_size)
        if max_entries is not None:
            checks.natural_int("max_entries", max_entries)
        elif not checks.values_can_be_read(mask):
            raise ValueError("max_entries: expected a number where the mask has no values that can be read, got None")
        some, every = (
            F.pad(four, (0, -four.shape[3] % block_size), value=beyond).unflatten(3, (-1, block_size)) for beyond in (False, True)
        )
        listed = some.any(4)
        lists = tables.occupied(listed)  # [.., 1 + blocks]: how many, and which
        counts, entries = lists[..., :1], lists[..., 1:]
        longest = counts.amax() if counts.numel() else counts.new_zeros(())
        in_part = (listed != every.all(4)).any()
        if max_entries is None or checks.values_are_known(mask):
            most, has_partial = torch.stack((longest, in_part.to(longest.dtype))).tolist()
            if has_partial:
                raise ValueError(
                    f"mask: expected blocks of {block_size} keys that are visible whole or not at all, got one that is visible in part"
                )
            if max_entries is not None and most > max_entries:
                raise ValueError(f"max_entries: expected room for the longest list, {most}, got {max_entries}")
        else:
            most = max_entries
            fits = (longest <= max_entries) & ~in_part
            torch.ops.aten._assert_async.msg(fits, "mask: expected whole blocks, and lists of at most max_entries")
        entries = torch.where(torch.arange(entries.shape[3], device=mask.device) < counts, entries, NONE)
        return cls._of_lists(entries[..., : most if max_entries is None else max_entries], block_size)

    @classmethod
    def top_k(
        cls,
        scores: Tensor,
        k: int,
        *,
        block_size: int = 1,
        key_length: int | None = None,
        is_causal: bool = True,
        base: IntervalMask | None = None,
        local: int = 0,
        sink_keys: int = 0,
        query_offset: int | Tensor | None = None,
    ) -> IndexMask:
        """Each query's ``k`` best-scored keys, or blocks, of those that it may see and that local window and sinks do not show it. Exact.

        Equal scores: the later one wins. NaN and -inf are never selected. A block takes part as long as one of its keys does. Selection has
        no gradient. The mask carries is_causal, local and sink_keys, but not base: ``top_k(..., base=base) & base`` hides what base hides in
        a block, a local window and among the sinks. Lists are sorted and without duplicates, -1 behind them.

        Args:
            scores: floating point [B|1, H|Hkv|1, Sq, n]: of every key, or of every block, for every query.
            k: how many are selected at most, >= 0.
            block_size: as of the mask.
            key_length: Sk, with n = ceil(Sk / block_size); default n * block_size.
            is_causal: select among keys up to the query's position.
            base: an interval mask of Sk keys that says what takes part: documents, padding, any.
            local, sink_keys: as of the mask.
            query_offset: position of the first query, an int, or integers [] or [B]; default Sk - Sq.

        Raises:
            TypeError: a wrong type or dtype.
            ValueError: a wrong shape, size or device.
        """
        checks.shaped("scores", scores, "[B|1, H|Hkv|1, Sq, n]", checks.DTYPES["cpu"])
        check_block_size(block_size)
        checks.natural_int("k", k)
        checks.flag("is_causal", is_causal)
        checks.each(checks.length, local=local, sink_keys=sink_keys)
        queries, places = scores.shape[2:]
        keys = places * block_size if key_length is None else key_length
        checks.each(checks.length, key_length=keys, Sq=queries)
        if -(-keys // block_size) != places:
            raise ValueError(
                f"scores: expected n={-(-keys // block_size)} for {keys} keys in blocks of {block_size}, got {checks.shape_of(scores)}"
            )
        checks.instance("base", base, IntervalMask | None, "an IntervalMask")
        if base is not None and not base.serves(keys):
            raise ValueError(f"base: expected a mask for {keys} keys, got one for {base.key_length}")
        batch = None if scores.shape[0] == 1 else scores.shape[0]
        offset = keys - queries if query_offset is None else bounds.position("query_offset", query_offset, scores.device, batch)
        if isinstance(offset, Tensor):
            offset = offset.view(-1, 1, 1, 1)
        scores = scores.detach()
        found = []
        of_a_query = scores.shape[0] * scores.shape[1] * places * (1 if base is None else block_size)
        for first, last in spans(queries, of_a_query) or [(0, 0)]:
            position = torch.arange(first, last, device=scores.device)[:, None] + offset
            takes_part = _takes_part(position, keys, block_size, is_causal, local, sink_keys, base)
            part, takes_part = same_heads(scores[:, :, first:last], takes_part, "base", "scores")
            found.append(_best(torch.where(takes_part, part, -torch.inf), k))
        lists = torch.cat(found, dim=2) if len(found) > 1 else found[0]
        return cls._of_lists(lists, block_size, is_causal, local, sink_keys)

    @classmethod
    def _of_lists(cls, lists: Tensor, block_size: int, is_causal: bool = False, local: int = 0, sink_keys: int = 0) -> IndexMask:
        """From int32 lists that were made here, none of which has an entry twice."""
        mask = cls._build(indices=lists, block_size=block_size, is_causal=is_causal, local=local, sink_keys=sink_keys)
        object.__setattr__(mask, "_is_distinct", True)
        return mask

    # Use ------------------------------------------------------------------------------------------------------------------------

    @overload
    def __and__(self, other: IndexMask) -> IndexMask: ...
    @overload
    def __and__(self, other: MaskData) -> Any: ...
    def __and__(self, other: object) -> Any:
        if not isinstance(other, IndexMask):
            return self._beside(other)
        if (self.local, self.sink_keys) != (other.local, other.sink_keys):
            raise ValueError(
                f"other: expected an index mask with local={self.local} and sink_keys={self.sink_keys}, since lists cannot say the "
                f"intersection of two windows, got local={other.local} and sink_keys={other.sink_keys}"
            )
        _check_queries([self, other], "other")
        unit = min(self.block_size, other.block_size)
        own, others = (
            mask if mask.block_size == unit else mask._replace(indices=narrow(mask.keys(unit)), block_size=unit)
            for mask in (self, other)
        )
        listed = own.indices.shape[3]
        a, b = _of_one_length([own.indices, others.indices])
        a, b = same_heads(a, b, "other")
        batch, heads = (m if n == 1 else n for m, n in zip(a.shape[:2], b.shape[:2], strict=True))
        a, b = (given.expand(batch, heads, -1, -1).contiguous() for given in (a[..., :listed], b))
        b = F.pad(b, (0, 1), value=bounds.FOREVER).sort(dim=-1).values  # so that every number of a has a place in b
        both = torch.where(b.gather(3, torch.searchsorted(b, a)) == a, a, NONE)
        return own._replace(indices=both, is_causal=self.is_causal or other.is_causal)

    def _without_repeats(self) -> IndexMask:
        """The mask with each entry once in its list; itself where that is known, otherwise its lists are sorted."""
        if self._is_distinct:
            return self
        ordered = self.indices.sort(dim=-1).values
        # Whole lists are compared: of slices an export would ask whether one has a single entry. Places are counted by cumsum, since a
        # DTensor of lists takes no plain tensor beside it.
        again = (ordered == ordered.roll(1, -1)) & (torch.ones_like(ordered).cumsum(-1, dtype=torch.int32) > 1)
        return self._of_lists(ordered.masked_fill(again, NONE), self.block_size, self.is_causal, self.local, self.sink_keys)

    @property
    def shape(self) -> torch.Size:
        """[B|1, H|Hkv|1, Sq, K], that of indices."""
        return self.indices.shape

    @property
    def query_length(self) -> int:
        """The number of queries Sq that the mask is for. It serves any number of keys."""
        return self.indices.shape[2]

    def fits(self, Sq: int) -> bool:
        """Whether the mask serves this number of queries."""
        return self.query_length == Sq

    def to_bool(self, Sq: int, Sk: int) -> Tensor:
        """The mask as booleans [B|1, H|Hkv|1, Sq, Sk], True = visible: N x N memory, for looking and for tests.

        Raises:
            TypeError, ValueError: lengths that are none, or another Sq than the mask's.
        """
        checks.each(checks.length, Sq=Sq, Sk=Sk)
        if not self.fits(Sq):
            raise ValueError(f"Sq: expected the mask's own number of queries {self.query_length}, got {Sq}")
        return self._rows(torch.arange(Sq, device=self.device), Sq, Sk)

    def _rows(self, rows: Tensor, Sq: int, Sk: int) -> Tensor:
        """Which keys these queries see, bool [B|1, H|Hkv|1, rows, Sk]."""
        position = rows[:, None] + (Sk - Sq)
        lists = (self.block_size, self.local, self.sink_keys)
        visible = visible_in_lists(self.indices[:, :, rows], lists, position, (0, Sk))
        return visible & (torch.arange(Sk, device=rows.device) <= position) if self.is_causal else visible

    def keys(self, unit: int = 1) -> Tensor:
        """The lists in blocks of ``unit`` keys, which divides block_size: int64 [B|1, H|Hkv|1, Sq, K * block_size / unit], none < 0.

        Raises:
            TypeError: unit is no int.
            ValueError: it does not divide block_size.
        """
        checks.positive_int("unit", unit)
        parts, rest = divmod(self.block_size, unit)
        if rest:
            raise ValueError(f"unit: expected a divisor of block_size {self.block_size}, got {unit}")
        entries = self.indices.long()
        if parts == 1:
            return entries
        return (entries[..., None] * parts + torch.arange(parts, device=entries.device)).flatten(3)

    def plot(self, Sq: int | None = None, head: int = 0, batch: int = 0, ax: Any = None, *, Sk: int | None = None) -> Any:
        """As :meth:`IntervalMask.plot`. Sk: number of keys; default: up to the last that is listed, Sq at least."""
        Sk = self._last_key() if Sk is None else Sk
        checks.length("Sk", Sk)
        return drawing.pairs(None, None, self._drawn_length(Sq), Sk, ax, self._of_head(head, batch, self.shape[1], Sk))

    def _last_key(self) -> int:
        """How many keys a picture has, if nobody says it."""
        last = int(self.indices.amax()) if self.indices.numel() else NONE
        return min(checks.MAX_LENGTH, max((last + 1) * self.block_size, self.query_length))

    def _drawn_length(self, Sq: int | None) -> int:
        if Sq is not None:
            checks.length("Sq", Sq)
        if Sq is not None and not self.fits(Sq):
            raise ValueError(f"Sq: expected the mask's own number of queries {self.query_length}, got {Sq}")
        return self.query_length

    def _of_head(self, head: int, batch: int, heads: int, Sk: int) -> Tensor:
        """Which keys the drawn queries of one head of ``heads`` see, bool [queries, keys] on the CPU."""
        lists = drawing.head_of(self.indices, head, batch, heads)
        alone = self._replace(indices=lists[None, None])
        rows, keys = drawing.sample(self.query_length), drawing.sample(Sk)
        return alone._rows(rows, self.query_length, Sk)[0, 0][:, keys]

    def _describe(self) -> str:
        facts = ", ".join(f"{name}={getattr(self, name)}" for name in self.CONSTANTS)
        return f"shape={list(self.shape)}, {facts}, dtype=int32, device={str(self.device)!r}"

    @classmethod
    def _cat(cls, masks: Sequence[IndexMask]) -> IndexMask:
        first = masks[0]
        for mask in masks:
            for name in cls.CONSTANTS:
                if getattr(mask, name) != getattr(first, name):
                    raise ValueError(f"masks: expected one {name}, got {getattr(first, name)} and {getattr(mask, name)}")
        _check_queries(masks, "masks")
        lists = _of_one_length([mask.indices for mask in masks])
        joined = join_batches("masks", lists, [mask.shape[0] for mask in masks], lists[0].shape[2:])
        return masks[0]._replace(indices=joined)


def check_block_size(block_size: object) -> None:
    checks.positive_int("block_size", block_size)
    assert isinstance(block_size, int)
    if block_size > MAX_BLOCK or block_size & (block_size - 1):
        raise ValueError(f"block_size: expected a power of two from 1 to {MAX_BLOCK}, got {block_size}")


def narrow(given: Tensor) -> Tensor:
    """Integers as int32; what does not fit becomes a number that no key has."""
    if given.dtype == torch.int32:
        return given
    return given.clamp(NONE, bounds.FOREVER).to(torch.int32)


def _check_queries(masks: Sequence[IndexMask], name: str) -> None:
    """Refuses other numbers of queries than the first's."""
    first = masks[0]
    for mask in masks:
        if not mask.fits(first.query_length):
            raise ValueError(f"{name}: expected index masks for Sq={first.query_length} queries, got one for {mask.query_length}")


def _of_one_length(lists: Sequence[Tensor]) -> list[Tensor]:
    """Lists filled up with -1 to the longest."""
    longest = max(given.shape[3] for given in lists)
    return [F.pad(given, (0, longest - given.shape[3]), value=NONE) for given in lists]


def _takes_part(
    position: Tensor, keys: int, block: int, is_causal: bool, local: int, sink_keys: int, base: IntervalMask | None
) -> Tensor:
    """Which blocks have a key that the query may see and that neither its local window nor the sinks show: bool [B|1, H|Hkv|1, q, blocks]."""

    def between(first: Tensor, last: Tensor) -> Tensor:
        """For keys from first to last, of each block."""
        first, newest = first.clamp(min=sink_keys), position - local
        free: Tensor = first <= torch.minimum(last, newest)
        return free if is_causal else free | (torch.maximum(first, position + 1) <= last)

    if base is None:
        first = torch.arange(-(-keys // block), device=position.device) * block
        return with_rank(between(first, (first + (block - 1)).clamp(max=keys - 1)), 4)
    key = torch.arange(keys, device=position.device)
    start, end = same_heads(base.start, base.end, "end")
    checks.same_device("base", start, position, "scores")
    seen = (start[:, :, None] <= position) & (position < end[:, :, None]) & between(key, key)
    blocks: Tensor = F.pad(seen, (0, -keys % block)).unflatten(3, (-1, block))
    return blocks.any(4)


def _best(scores: Tensor, k: int) -> Tensor:
    """The places of the k largest of each row, equal ones: the later; neither NaN nor -inf: int32 [.., min(k, n)], ascending, -1 behind."""
    n = scores.shape[-1]
    k = bounds.fewer(k, n)
    real, place = scores > -torch.inf, torch.arange(n, device=scores.device)
    if scores.dtype == torch.float64:
        order = n - 1 - torch.where(real, scores, -torch.inf).flip(-1).sort(dim=-1, descending=True, stable=True).indices
        best = order[..., :k]
        best = torch.where(real.gather(-1, best), best, n)
    else:
        # One integer for the score, in whose bits the order is that of floats, and the place: no two are equal.
        bits = (scores.float() + 0.0).view(torch.int32).long()
        ranked = torch.where(bits < 0, bits ^ bounds.FOREVER, bits) * (1 << PLACE_BITS) + place
        ranked = torch.where(real, ranked, torch.iinfo(torch.int64).min)
        chosen = ranked.topk(k, dim=-1, sorted=False).values
        best = torch.where(chosen == torch.iinfo(torch.int64).min, n, chosen & ((1 << PLACE_BITS) - 1))
    best = best.sort(dim=-1).values
    return torch.where(best == n, NONE, best).to(torch.int32)
