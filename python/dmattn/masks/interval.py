"""IntervalMask: a key's visibility as one interval of query positions, so that a mask costs O(N) memory.

The one surprise: positions are absolute. Query i of Sq stands at position ``p = i + (Sk - Sq)`` (bottom-right alignment), which is
negative for the first queries when Sq > Sk; "visible from the beginning" is therefore the smallest int32, not 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dmattn import checks, ops
from dmattn.masks import bounds, detect, drawing, tree
from dmattn.masks.bounds import ALWAYS as ALWAYS
from dmattn.masks.bounds import FOREVER as FOREVER
from dmattn.masks.data import MaskData, join_batches, unknown_operand
from dmattn.masks.heads import same_heads, with_rank
from dmattn.renamed import renamed
from dmattn.sharding import alike

Segments = Literal["causal", "whole"]
SEGMENTS = (None, "causal", "whole")  # their places here are what a state dict holds


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class IntervalMask(MaskData):
    """Key j is visible to the query at position p when ``start[j] <= p < end[j]``.

    Masks compose: ``a & b`` is the intersection (an interval again), and ``interval & block`` is accepted wherever a mask is.
    ``mask.to(device)``, ``mask[b]``, ``IntervalMask.cat`` and the like treat a mask as data; see docs/masks.md.

    Args:
        start: int32, broadcastable to [B, H|Hkv, Sk].
        end: int32, broadcastable to [B, H|Hkv, Sk].

    Attributes:
        any_length: whether the mask serves any number of keys: start and end were given with a last dimension of 1. What the
            constructors below make serves the Sk that it was made for and no other, also when that is 1.
        segments: None, or "causal" or "whole" for a mask whose ``end`` is the end of each key's segment (a document, or what is not padding) and
            before every position for padding: what ``top_k`` accepts as ``base``. In a causal segment a query sees no later keys.
        most_keys: how many keys a query sees at most, as far as the constructors below know it: 2^20 where only the number of keys bounds it,
            0 where nothing is known (start and end as given, documents, padding). It is a hint to kernels, which list live keys
            where they are few: it changes their speed, never a result.

    Raises:
        TypeError: start or end is not a dense int32 tensor.
        ValueError: their shapes do not broadcast together, they have more than 2^20 keys, or they lie on different devices.
    """

    start: Tensor
    end: Tensor
    any_length: bool = dataclasses.field(init=False, default=False)
    segments: Segments | None = dataclasses.field(init=False, default=None)
    most_keys: int = dataclasses.field(init=False, default=0)

    LEAVES: ClassVar[tuple[str, ...]] = ("start", "end")
    CONSTANTS: ClassVar[tuple[str, ...]] = ("any_length", "segments", "most_keys")

    def __post_init__(self) -> None:
        for name, given in (("start", self.start), ("end", self.end)):
            checks.tensor(name, given, (torch.int32,))
            if given.dim() > 3 or given.dim() < 1:
                raise ValueError(f"{name}: expected a shape that broadcasts to [B, H|Hkv, Sk], got {checks.shape_of(given)}")
            if given.shape[-1] > checks.MAX_LENGTH:
                raise ValueError(f"{name}: expected at most {checks.MAX_LENGTH} keys, got {checks.shape_of(given)}")
        start, end = with_rank(self.start, 3), with_rank(self.end, 3)
        same_heads(start, end, "end", "start")
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "end", end)
        object.__setattr__(self, "any_length", start.shape[2] == 1 and end.shape[2] == 1)

    @classmethod
    def _checked(cls, **fields: Any) -> IntervalMask:
        mask = super()._checked(**fields)
        any_length, segments, most_keys = (fields[name] for name in cls.CONSTANTS)
        if checks.flag("any_length", any_length) and not mask.any_length:
            raise ValueError(
                f"any_length: expected False for a mask of {max(mask.start.shape[2], mask.end.shape[2])} keys, got True"
            )
        if segments not in SEGMENTS:
            raise ValueError(f"segments: expected one of {SEGMENTS}, got {segments!r}")
        checks.natural_int("most_keys", most_keys)
        return mask._replace(any_length=any_length, segments=segments, most_keys=most_keys)

    @classmethod
    def _of_length(cls, start: Tensor, end: Tensor, segments: Segments | None = None, most_keys: int = 0) -> IntervalMask:
        """What the constructors below make: a mask of [.., .., Sk] tensors made together, which serves its own number of keys only."""
        return cls._build(start=start, end=end, any_length=False, segments=segments, most_keys=most_keys)

    # Constructors ---------------------------------------------------------------------------------------------------------------

    @classmethod
    def causal(cls, Sk: int, *, device: torch.device | str | None = None) -> IntervalMask:
        """Keys up to the query's own position. ``is_causal=True`` says the same without a tensor.

        Raises:
            TypeError, ValueError: Sk, the number of keys, is not an int from 0 to 2^20.
        """
        keys = _keys(Sk, device)
        return cls._of_length(keys, torch.full_like(keys, FOREVER), "causal", checks.MAX_LENGTH)

    @classmethod
    def sliding_window(cls, Sk: int, left: int, right: int = 0, *, device: torch.device | str | None = None) -> IntervalMask:
        """Keys j with ``p - left <= j <= p + right``: at most ``left + right + 1``.

        Raises:
            TypeError, ValueError: Sk, left or right is not an int from 0 to 2^20.
        """
        keys = _keys(Sk, device)
        checks.each(checks.length, left=left, right=right)
        return cls._of_length(keys - right, keys + (left + 1), most_keys=left + right + 1)

    @classmethod
    @renamed(sink="sink_keys")
    def streaming(cls, Sk: int, sink_keys: int, local: int, *, device: torch.device | str | None = None) -> IntervalMask:
        """Causal keys that are among the first ``sink_keys`` or the last ``local``: ``j <= p and (j < sink_keys or p - j < local)``.

        Raises:
            TypeError, ValueError: Sk, sink_keys or local is not an int from 0 to 2^20.
        """
        keys = _keys(Sk, device)
        checks.each(checks.length, sink_keys=sink_keys, local=local)
        return cls._of_length(keys, torch.where(keys < sink_keys, FOREVER, keys + local), most_keys=sink_keys + local)

    @classmethod
    @renamed(causal="is_causal")
    def documents(
        cls,
        Sk: int,
        cu_seqlens: Tensor | None = None,
        is_causal: bool = True,
        *,
        ids: Tensor | None = None,
    ) -> IntervalMask:
        """Packed documents: query and key in the same document (and causal, by default).

        Args:
            Sk: number of keys.
            cu_seqlens: int32 or int64 [documents + 1]: 0, the end of each document in turn, the last being Sk.
            is_causal: also hide later keys of the same document.
            ids: instead of cu_seqlens, integers [Sk] or [B, Sk]: neighbours with equal ids share a document; negative ids are padding.

        Raises:
            ValueError: neither or both given; or cu_seqlens is malformed (checked when its values lie on the CPU; on another device a
                malformed one gives a meaningless mask, never a wrong access).
        """
        checks.length("Sk", Sk)
        checks.flag("is_causal", is_causal)
        if (cu_seqlens is None) == (ids is None):
            raise ValueError("cu_seqlens, ids: expected exactly one of them, got " + ("none" if ids is None else "both"))
        start, end = _segments_from_ends(Sk, cu_seqlens) if cu_seqlens is not None else _segments_from_ids(Sk, ids)
        keys = _keys(Sk, start.device)
        visible_end = torch.where(end > keys, end, ALWAYS)
        first = torch.maximum(start, keys) if is_causal else start
        return cls._of_length(first, visible_end, "causal" if is_causal else "whole")

    @classmethod
    def prefix(cls, Sk: int, prefix_lengths: Tensor | int, *, device: torch.device | str | None = None) -> IntervalMask:
        """Prefix-LM: keys ``j < prefix_lengths[b]`` are seen by all, the rest causally.

        Args:
            Sk: number of keys.
            prefix_lengths: int, or integers [B].

        Raises:
            TypeError, ValueError: neither, or lengths that are not from 0 to 2^20 (checked where their values lie on the CPU).
        """
        lengths = _lengths("prefix_lengths", prefix_lengths, device)
        keys = _keys(Sk, lengths.device)
        start = torch.where(keys < lengths, ALWAYS, keys)
        return cls._of_length(start, torch.full_like(keys, FOREVER))

    @classmethod
    def padding(
        cls,
        Sk: int,
        lengths: Tensor | int,
        side: Literal["left", "right"] = "right",
        *,
        device: torch.device | str | None = None,
    ) -> IntervalMask:
        """All but the first (or, with ``side="left"``, the last) ``lengths[b]`` keys are hidden from all; no causality.

        Args:
            lengths: number of real tokens, an int or integers [B].
            side: where the padding is.

        Raises:
            TypeError, ValueError: lengths is neither an int nor such a tensor, or side is neither "left" nor "right".
        """
        checks.one_of("side", side, "left", "right")
        lengths = _lengths("lengths", lengths, device)
        keys = _keys(Sk, lengths.device)
        real = keys < lengths if side == "right" else keys >= Sk - lengths
        end = torch.where(real, torch.full_like(keys, FOREVER), ALWAYS)
        return cls._of_length(torch.full_like(keys, ALWAYS), end, "whole")

    @classmethod
    @renamed(causal="is_causal")
    def chunked(cls, Sk: int, size: int, is_causal: bool = True, *, device: torch.device | str | None = None) -> IntervalMask:
        """Query and key in the same chunk of ``size`` positions, counted from 0 (and causal, by default): ``p // size == j // size``.

        Raises:
            TypeError, ValueError: size is not an int > 0.
        """
        keys = _keys(Sk, device)
        checks.positive_int("size", size)
        checks.flag("is_causal", is_causal)
        size = min(size, checks.MAX_LENGTH)  # so that the end of the last chunk is an int32
        first = keys - keys % size
        return cls._of_length(keys if is_causal else first, first + size, "causal" if is_causal else "whole", size)

    @classmethod
    def tree(cls, enter: Tensor, leave: Tensor) -> IntervalMask:
        """A tree in depth-first order: each key is seen by itself and its descendants, ``enter[k] <= enter[q] < leave[k]``.

        For drafts of speculative decoding and for prompts that share prefixes. Tokens with equal ``enter`` (those of one node) see
        each other; ``& IntervalMask.causal(Sk)`` hides later ones. :meth:`tree_from_parents` takes parents instead.

        Args:
            enter: integers [Sk] or [B, Sk]: when a depth-first walk reaches the key's node. It never decreases along the keys.
            leave: as enter: the walk's first time after the node's last descendant.

        Raises:
            TypeError: not int32 or int64.
            ValueError: shapes, dtypes or devices that differ, or keys out of order (checked when their values lie on the CPU).
        """
        return cls._of_length(*tree.interval_of(enter, leave))

    @classmethod
    def tree_from_parents(cls, parents: Tensor) -> IntervalMask:
        """A tree in depth-first order: each key is seen by itself and its descendants.

        Args:
            parents: integers [Sk] or [B, Sk]: the index of each key's parent, -1 for a root. Depth-first order: the parent of a key is
                the key before it or an ancestor of that. A text is a tree, too: the parent of each token is the one before it.

        Raises:
            TypeError: not int32 or int64.
            ValueError: a wrong shape; or keys out of order (checked when their values lie on the CPU; elsewhere such a tree gives a
                meaningless mask, never a wrong access).
        """
        end = tree.subtree_ends(parents)
        return cls._of_length(_keys(end.shape[2], end.device), end)

    @classmethod
    def from_bool(cls, mask: Tensor) -> IntervalMask:
        """From booleans, True = visible, if each key is visible to one unbroken run of queries. On a GPU this waits for the device.

        Args:
            mask: bool [B|1, H|Hkv|1, Sq, Sk], leading dimensions optional. Its queries are those at the last Sq positions; at other
                positions keys are hidden.

        Raises:
            TypeError: not a bool tensor.
            ValueError: a wrong shape, or a key for which there is no interval (:class:`BlockMask` takes any mask).
        """
        four = detect.four_dims(mask)
        batch, heads, queries, keys = four.shape
        found = detect.interval_of("mask", (batch, heads, queries, keys), lambda first, last: four[:, :, first:last], four.device)
        return cls._of_length(*found)

    @classmethod
    def from_function(
        cls,
        fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        B: int | None,
        H: int | None,
        Sq: int,
        Sk: int,
        *,
        device: torch.device | str | None = None,
    ) -> IntervalMask:
        """From ``fn(b, h, q, k) -> bool`` (FlexAttention's ``mask_mod``), if each key is visible to one unbroken run of queries.

        ``fn`` is called for some queries at a time, so memory is O(N). ``q`` counts queries from 0, whatever Sk is; query q stands at
        position ``q + Sk - Sq``. B or H None: the mask is the same for all. On a GPU this waits for the device.

        Raises:
            TypeError, ValueError: as :meth:`BlockMask.from_function`; or there is a key without an interval.
        """
        sizes = detect.function_sizes(B, H, Sq, Sk)
        place = torch.empty(0, device=device).device
        found = detect.interval_of("fn", sizes, lambda first, last: detect.on_grid(fn, sizes, first, last, place), place)
        return cls._of_length(*found)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> IntervalMask:
        """The mask that :meth:`to_tensor` gave, int32 [B|1, H|Hkv|1, 2, Sk]. It serves Sk keys and no other number.

        Raises:
            TypeError: not a dense int32 tensor.
            ValueError: another shape.
        """
        checks.shaped("tensor", tensor, "[B|1, H|Hkv|1, 2, Sk]", (torch.int32,))
        checks.length("Sk", tensor.shape[3])
        return cls._of_length(tensor[:, :, 0], tensor[:, :, 1])

    @classmethod
    @renamed(causal="is_causal", sink="sink_keys")
    def top_k(
        cls,
        scores: Tensor,
        window: int,
        is_causal: bool = True,
        base: IntervalMask | None = None,
        *,
        local: int = 0,
        sink_keys: int = 0,
    ) -> IntervalMask:
        """Dynamic Mask Attention: each query sees the ``window`` best-scored keys among those it may see. Exact.

        A key that falls out of the best ``window`` never comes back, so it is visible to one interval of queries. Of equal scores, +inf
        too, the later key wins. NaN and -inf are never selected. With ``is_causal=False`` one set of keys (per document) serves all queries.

        With ``local`` and ``sink_keys`` the query at position p sees up to ``sink_keys + local + window`` keys of its document: the
        document's first ``sink_keys`` keys, those that the base lets it see in (p - local, p], and the best ``window`` of the others. The
        others are older than the local window and no sinks: a sink never competes and takes no place of the ``window``, also while it lies
        in the local window, and a key competes from the position on at which it leaves the local window. So its interval is
        ``[j, e + local)``, cut at the end of its document, where ``[j, e)`` is its interval in a plain selection without the sinks (e = j
        if it never wins). Local window and sinks show keys of any score, NaN and -inf included.

        Args:
            scores: [B, Hkv, Sk], floating point.
            window: number of keys a query selects at most, > 0; with ``local`` or ``sink_keys`` 0 is allowed: then scores decide nothing.
            is_causal: each query selects among the keys up to its own position.
            base: documents, padding, or their intersection: selection restarts with each document and skips padding.
            local: number of latest positions, the query's own included, whose keys are visible whatever their scores, >= 0.
            sink_keys: number of positions from the first key of each document on, likewise, >= 0.

        Raises:
            TypeError: scores is not a floating-point tensor, is_causal not a bool, or base not an IntervalMask.
            ValueError: wrong rank, more than 2^20 keys, window <= 0 (< 0 with local or sink_keys), local or sink_keys < 0, either of them > 0
                with ``is_causal=False``, or a base under which a dropped key could come back (sliding window, prefix, ...): intersect with such
                a mask after selecting, ``top_k(scores, window) & other``.
        """
        checks.shaped("scores", scores, "[B, Hkv, Sk]", checks.DTYPES["cpu"])
        if scores.shape[2] > checks.MAX_LENGTH:
            raise ValueError(f"scores: expected at most {checks.MAX_LENGTH} keys, got shape {checks.shape_of(scores)}")
        checks.flag("is_causal", is_causal)
        checks.selection(window, local, sink_keys, is_causal)
        start, end = select_interval(scores, window, is_causal, base, local, sink_keys)
        if start is None and not is_causal and base is None:
            start = torch.full((1, 1, 1), ALWAYS, dtype=torch.int32, device=scores.device)
        elif start is None:
            start = _keys(scores.shape[2], scores.device)
        return cls._of_length(start, end, most_keys=most_selected(window, local, sink_keys, base))

    # Use ------------------------------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """[B|1, H|Hkv|1, Sk], what start and end broadcast to; the last is 1 when the mask serves any number of keys."""
        return torch.Size(
            m if n == 1 or m == n else n if m == 1 else max(m, n) for m, n in zip(self.start.shape, self.end.shape, strict=True)
        )

    @property
    def key_length(self) -> int | None:
        """The number of keys Sk that the mask serves; None when it serves any."""
        return None if self.any_length else self._length

    @property
    def _length(self) -> int:
        length = self.end.shape[-1]
        return length if length != 1 else self.start.shape[-1]

    @property
    def is_in_order(self) -> bool:
        """Whether each query is known to see keys that lie side by side, as under masks of segments. It is a hint to kernels, which then take
        keys in order instead of listing them: it changes their speed, never a result."""
        return self.segments is not None

    def serves(self, Sk: int) -> bool:
        """Whether the mask can be used with this number of keys."""
        return self._length == Sk or self.any_length

    def _check_served(self, Sk: int) -> None:
        checks.length("Sk", Sk)
        if not self.serves(Sk):
            raise ValueError(f"Sk: expected the mask's own number of keys {self.key_length}, got {Sk}")

    def __and__(self, other: IntervalMask) -> IntervalMask:
        both: IntervalMask = _intersection(self, other)
        return both

    def to_bool(self, Sq: int, Sk: int) -> Tensor:
        """The mask as booleans [B|1, H|Hkv|1, Sq, Sk], True = visible: N x N memory, for looking and for tests."""
        checks.length("Sq", Sq)
        self._check_served(Sk)
        position = torch.arange(Sk - Sq, Sk, device=self.start.device, dtype=torch.int32)[:, None]
        start, end = same_heads(self.start, self.end, "end")
        visible = (start[:, :, None, :] <= position) & (position < end[:, :, None, :])
        return visible.expand(*visible.shape[:3], Sk)

    def to_tensor(self, Sk: int | None = None) -> Tensor:
        """start and end as one tensor, int32 [B|1, H|Hkv|1, 2, Sk], for code that passes tensors only; :meth:`from_tensor` takes it.

        Args:
            Sk: number of keys; needed for a mask that serves any number.

        Raises:
            TypeError, ValueError: Sk is not a number of keys that the mask serves.
        """
        if Sk is None and self.any_length:
            raise ValueError("Sk: expected the number of keys for a mask that serves any, got None")
        if Sk is not None:
            self._check_served(Sk)
        length = self._length if Sk is None else Sk
        start, end = same_heads(self.start, self.end, "end")
        shape = (*self.shape[:2], length)
        return torch.stack((start.expand(shape), end.expand(shape)), dim=2)

    def as_base(self, segments: Segments) -> IntervalMask:
        """The same mask, marked as one of segments, so that ``top_k`` takes it as ``base``: for masks that were given as numbers.

        It is up to the caller that each key is visible until the end of its segment, from its own position on ("causal") or from the
        segment's beginning ("whole"), and hidden if it is padding. Under another mask the selection is one that no base would give.

        Raises:
            ValueError: segments is neither "causal" nor "whole".
        """
        checks.one_of("segments", segments, "causal", "whole")
        return self._replace(segments=segments)

    def shift(self, n: int | Tensor) -> IntervalMask:
        """What this mask shows at a position, shown ``n`` positions later: start and end move, keys stay.

        It brings a mask that counts positions from elsewhere to the positions of :func:`attention`; ``attention(query_offset=)`` does the same.

        Args:
            n: an int, or integers [] or [B]; may be negative.

        Raises:
            TypeError, ValueError: n is neither, has another B than the mask, or lies on another device.
        """
        by = bounds.position("n", n, self.device, None if self.shape[0] == 1 else self.shape[0])
        start, end = (bounds.moved(bound, by) for bound in (self.start, self.end))
        return self._build(start=start, end=end, any_length=self.any_length, segments=None, most_keys=self.most_keys)

    def _chunk(self, first: int, length: int) -> IntervalMask:
        """What ``length`` queries and keys from position ``first`` on see of each other."""
        keys = slice(first, first + length)
        start, end = (
            bounds.moved(bound[..., keys] if bound.shape[-1] > 1 else bound, -first) for bound in (self.start, self.end)
        )
        return self._build(start=start, end=end, any_length=self.any_length, segments=self.segments, most_keys=self.most_keys)

    def alive(self, position: int | Tensor) -> Tensor:
        """Which keys the query at a position sees: bool [B|1, H|Hkv|1, Sk]. What a cache has to hold for it, for example.

        Args:
            position: an int, or integers [] or [B].

        Raises:
            TypeError, ValueError: position is neither, has another B than the mask, or lies on another device.
        """
        p = bounds.position("position", position, self.device, None if self.shape[0] == 1 else self.shape[0])
        start, end = same_heads(self.start, self.end, "end")
        seen: Tensor = (start <= p) & (p < end)
        return seen

    def plot(self, Sq: int | None = None, head: int = 0, batch: int = 0, ax: Any = None) -> Any:
        if Sq is not None:
            checks.length("Sq", Sq)
        start, end = self._of_head(head, batch, max(self.start.shape[1], self.end.shape[1]), Sq)
        if Sq is None:
            return drawing.lifetimes(start, end, ax)
        return drawing.pairs((start, end), None, Sq, end.shape[0], ax)

    def _of_head(self, head: int, batch: int, heads: int, any_length: int | None = None) -> tuple[Tensor, Tensor]:
        """start and end of one head of ``heads``, int32 [Sk] on the CPU; a mask that serves any length gives ``any_length`` keys."""
        start, end = (drawing.head_of(given, head, batch, heads) for given in (self.start, self.end))
        length = self._length if not self.any_length or any_length is None else any_length
        return start.expand(length), end.expand(length)

    def _describe(self) -> str:
        shape: list[object] = [*self.shape[:-1], "any" if self.any_length else self.shape[-1]]
        sizes = f"shape=[{', '.join(map(str, shape))}], start={checks.shape_of(self.start)}, end={checks.shape_of(self.end)}"
        return f"{sizes}, dtype=int32, device={str(self.device)!r}, segments={self.segments!r}"

    @classmethod
    def _cat(cls, masks: Sequence[IntervalMask]) -> IntervalMask:
        length = next((mask.shape[2] for mask in masks if not mask.any_length), 1)
        for mask in masks:
            if not mask.serves(length):
                raise ValueError(f"masks: expected one number of keys, got {length} and {mask.key_length}")
        batches = [mask.shape[0] for mask in masks]
        start, end = (
            join_batches("masks", [getattr(mask, name) for mask in masks], batches, (length,)) for name in ("start", "end")
        )
        kinds, known = {mask.segments for mask in masks}, [mask.most_keys for mask in masks]
        return cls._build(
            start=start,
            end=end,
            any_length=all(mask.any_length for mask in masks),
            segments=kinds.pop() if len(kinds) == 1 else None,
            most_keys=max(known) if all(count > 0 for count in known) else 0,
        )


def _intersection(mask: IntervalMask, other: object) -> Any:
    """``mask & other``: an interval mask again, and NotImplemented for what is no interval mask, after which Python asks ``other``."""
    if not isinstance(other, IntervalMask):
        if torch.compiler.is_compiling() and isinstance(other, MaskData):  # torch 2.10 does not ask while compiling
            return other.__rand__(mask)
        return unknown_operand(other)
    if not (mask.any_length or other.any_length or mask.serves(other._length)):
        raise ValueError(f"other: expected a mask for Sk={mask.key_length} keys like the first, got one for {other.key_length}")
    start = torch.maximum(*alike(*same_heads(mask.start, other.start, "other")))
    end = torch.minimum(*alike(*same_heads(mask.end, other.end, "other")))
    segments: Segments | None = None
    if mask.segments is not None and other.segments is not None:
        segments = "causal" if "causal" in (mask.segments, other.segments) else "whole"
    any_length = mask.any_length and other.any_length
    # Nothing is known (0) beside a mask of which nothing is known: a document may be shorter than a window by far.
    most_keys = bounds.fewer(mask.most_keys, other.most_keys)
    return mask._build(start=start, end=end, any_length=any_length, segments=segments, most_keys=most_keys)


def check_base(base: Any) -> None:
    """Refuses what selection cannot start from."""
    checks.instance("base", base, IntervalMask, "an IntervalMask")
    if base.segments is None:
        raise ValueError(
            "base: expected documents, padding or their intersection (under another mask a dropped key could come back, "
            "which no interval can say); select first and intersect afterwards: IntervalMask.top_k(scores, window) & other; "
            "documents that were given as numbers are a base by mask.as_base('causal')"
        )


def most_selected(window: int, local: int, sink_keys: int, base: IntervalMask | None) -> int:
    """How many keys a query sees at most under top-k selection, 0 where that is not known: as far as ``top_k(...) & base`` knows it."""
    most = bounds.fewer(window + local + sink_keys, checks.MAX_LENGTH)  # the sum may be too large for an op
    return most if base is None else bounds.fewer(most, base.most_keys)


def segment_ends(base: IntervalMask, scores: Tensor) -> Tensor:
    """The end of each key's segment, for selection among scores [B, Hkv, Sk]; refuses what is no base for them."""
    check_base(base)
    batch, heads, keys = scores.shape
    like = ((), scores, "scores")
    return checks.shaped("base", with_rank(base.end, 3), "[B|1, Hkv|1, Sk]", *like, B=batch, Hkv=heads, Sk=keys)


def select_interval(
    scores: Tensor, window: int, is_causal: bool, base: IntervalMask | None, local: int, sink_keys: int
) -> tuple[Tensor | None, Tensor]:
    """The interval of each key under top-k selection; start None means: from the key's own position on, or, without causality, always."""
    segment_end = None
    if base is not None:
        segment_end = segment_ends(base, scores)
        if torch.compiler.is_exporting():
            _assert_segments(base, is_causal)
        is_causal = is_causal or base.segments == "causal"
    end = ops.select(scores, segment_end, window, is_causal, local, sink_keys)
    return (None if is_causal or base is None else base.start), end


def _assert_segments(base: IntervalMask, is_causal: bool) -> None:
    """Puts into an exported program the check that a later mask's intervals end as segments do.

    The kind of mask is checked while the program is traced. Its tree says nothing of it, so that one program serves every kind; here the
    values tell what the program may select among.
    """
    start, end = base.start, base.end
    keys = _keys(end.shape[-1], end.device)
    present = end > keys
    ends = torch.where(present, end, ALWAYS).cummax(-1).values
    ends_before = torch.cat([torch.full_like(ends[..., :1], ALWAYS), ends], dim=-1)[..., :-1]  # the latest end of earlier keys
    first = ends_before <= keys  # of a segment
    fits = first | (end == ends_before)
    if not is_causal and base.segments == "causal":
        fits = fits & (start >= keys)
    elif not is_causal:  # every query of a segment sees all of the segment's keys
        first_key = torch.where(present & first, keys, ALWAYS).cummax(-1).values
        fits = fits & (start <= first_key)
    torch.ops.aten._assert_async.msg(
        (fits | ~present).all(), "base: expected documents, padding or their intersection, as when the program was exported"
    )


def _keys(Sk: int, device: torch.device | str | None) -> Tensor:
    checks.length("Sk", Sk)
    return torch.arange(Sk, dtype=torch.int32, device=device).view(1, 1, Sk)


def _lengths(name: str, given: Any, device: torch.device | str | None) -> Tensor:
    """[B, 1, 1] int32 from an int or a [B] tensor of integers."""
    if isinstance(given, Tensor):
        checks.tensor(name, given, (torch.int32, torch.int64))
        if given.dim() > 1:
            raise ValueError(f"{name}: expected an int or a tensor [B], got shape {checks.shape_of(given)}")
        if checks.values_are_known(given) and given.numel() > 0:
            least, most = (int(bound) for bound in given.aminmax())
            if least < 0 or most > checks.MAX_LENGTH:
                raise ValueError(f"{name}: expected lengths from 0 to {checks.MAX_LENGTH}, got {least if least < 0 else most}")
        return given.clamp(max=checks.MAX_LENGTH).to(torch.int32).reshape(-1, 1, 1)
    checks.instance(name, given, int, "an int or a tensor [B]")
    checks.length(name, given)
    return torch.full((1, 1, 1), given, dtype=torch.int32, device=device)


def _segments_from_ends(Sk: int, cu_seqlens: object) -> tuple[Tensor, Tensor]:
    ends = checks.tensor("cu_seqlens", cu_seqlens)
    if ends.dim() == 1 and ends.shape[0] > checks.MAX_LENGTH + 1:
        raise ValueError(f"cu_seqlens: expected at most {checks.MAX_LENGTH} documents, got shape {checks.shape_of(ends)}")
    checks.cu_seqlens("cu_seqlens", ends, Sk, exactly=True)
    keys = torch.arange(Sk, dtype=ends.dtype, device=ends.device)
    document = (torch.searchsorted(ends.contiguous(), keys, right=True) - 1).clamp(0, ends.shape[0] - 2)
    start, end = ends[document].to(torch.int32), ends[document + 1].to(torch.int32)
    return start[None, None], end[None, None]


def _segments_from_ids(Sk: int, ids: object) -> tuple[Tensor, Tensor]:
    given = checks.tensor("ids", ids, (torch.int32, torch.int64))
    if given.dim() not in (1, 2) or given.shape[-1] != Sk:
        raise ValueError(f"ids: expected [Sk] or [B, Sk] with Sk={Sk}, got shape {checks.shape_of(given)}")
    given = with_rank(given, 2)
    keys = torch.arange(Sk, dtype=torch.int32, device=given.device).expand_as(given)
    changes = torch.cat([torch.ones_like(given[:, :1], dtype=torch.bool), given[:, 1:] != given[:, :-1]], dim=1)
    start = torch.where(changes, keys, 0).cummax(dim=1).values
    next_change = torch.where(changes, keys, Sk).flip(1).cummin(dim=1).values.flip(1)  # first change at or after each key
    end = torch.cat([next_change[:, 1:], torch.full_like(next_change[:, :1], Sk)], dim=1)
    end = torch.where(given >= 0, end, 0)
    return start[:, None].to(torch.int32), end[:, None].to(torch.int32)
