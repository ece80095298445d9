"""What every mask can do as data: move between devices, be indexed by batch, be joined with others, be collated."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, SupportsIndex, TypeVar

import torch
from torch import Tensor

from dmattn import checks
from dmattn.masks.heads import repeat_heads

M = TypeVar("M", bound="MaskData")


def unknown_operand(other: object) -> Any:
    """NotImplemented for what ``mask & other`` does not know, and a TypeError for a tensor, which many take for a mask."""
    if isinstance(other, Tensor):
        raise TypeError("other: expected a mask, got a tensor; make it one by BlockMask.from_bool or IndexMask.from_bool")
    return NotImplemented


class MaskData:
    """The part that all mask types share. A mask's tensors never change; every method here returns a mask."""

    LEAVES: ClassVar[tuple[str, ...]]  # fields that hold tensors, masks or lengths: the leaves of the pytree, in its order
    CONSTANTS: ClassVar[tuple[str, ...]]  # the other fields

    __iter__ = None  # else Python would iterate by index, for ever over a mask that serves any batch

    @classmethod
    def _build(cls: type[M], **fields: Any) -> M:
        """A mask from its fields without the constructor's checks: they were made together, or are placeholders of a pytree."""
        mask = object.__new__(cls)
        for name in (*cls.LEAVES, *cls.CONSTANTS):
            object.__setattr__(mask, name, fields[name])
        return mask

    @classmethod
    def _checked(cls: type[M], **fields: Any) -> M:
        """A mask from its fields as a file gives them. What the constructor refuses is refused."""
        kind: Any = cls  # a dataclass, as all masks are
        mask: M = kind(**{field.name: fields[field.name] for field in dataclasses.fields(kind) if field.init})
        return mask

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What ``torch.load``, pickle and copy call. A file of an earlier version may lack fields that have a default."""
        checks.instance("state", state, dict, "the fields of a mask")
        fields = {name: state[name] if name in state else getattr(type(self), name) for name in (*self.LEAVES, *self.CONSTANTS)}
        vars(self).update(vars(self._checked(**fields)))

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*self.LEAVES, *self.CONSTANTS)}

    def _leaf_names(self) -> tuple[str, ...]:
        """Those of LEAVES that this mask has."""
        return self.LEAVES

    def _replace(self: M, **changes: Any) -> M:
        return self._build(**{**self._fields(), **changes})

    def _map(self: M, fn: Callable[[Tensor], Tensor]) -> M:
        """The mask with ``fn`` applied to each of its tensors; itself when ``fn`` returns each of them as it is."""
        changes = {}
        for name in self._leaf_names():
            old = getattr(self, name)
            new = old._map(fn) if isinstance(old, MaskData) else fn(old) if isinstance(old, Tensor) else old
            if new is not old:
                changes[name] = new
        return self._replace(**changes) if changes else self

    def _tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        for name in self._leaf_names():
            value = getattr(self, name)
            found += value._tensors() if isinstance(value, MaskData) else [value] if isinstance(value, Tensor) else []
        return found

    def __repr__(self) -> str:
        """Sizes, device and kind, not the data; placeholders of a pytree as they are."""
        if self._holds_tensors():
            return f"{type(self).__name__}({self._describe()})"
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self._leaf_names())})"

    def _holds_tensors(self) -> bool:
        values = [getattr(self, name) for name in self._leaf_names() if not name.endswith("_length")]
        return all(value._holds_tensors() if isinstance(value, MaskData) else isinstance(value, Tensor) for value in values)

    def _describe(self) -> str:
        raise NotImplementedError

    # ``self & other`` for masks of two kinds: a CombinedMask, and NotImplemented for what is no mask. masks/combined.py says how, since it
    # knows all kinds.
    _beside: ClassVar[Callable[[Any, object], Any]]

    def __rand__(self, interval: Any) -> Any:
        """``interval & self``: an IntervalMask knows no other kind."""
        return self._beside(interval)

    # Devices ----------------------------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where the mask's tensors lie."""
        return self._tensors()[0].device

    def to(self: M, device: torch.device | str | int, *, non_blocking: bool = False) -> M:
        """The mask on a device; itself if it is there already. A mask has no dtype to choose: it is made of int32.

        Args:
            device: as :meth:`torch.Tensor.to` takes it.
            non_blocking: do not wait for copies from pinned memory.

        Raises:
            TypeError: device is a dtype, a tensor, or anything else that names no device.
        """
        if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
            raise TypeError(
                f"device: expected a torch.device, a str or an int (a mask keeps its dtype), got {type(device).__name__}"
            )
        return self._for_device(torch.device(device))._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def cuda(self: M, device: torch.device | str | int | None = None, *, non_blocking: bool = False) -> M:
        """The mask on a GPU, by default the current one; see :meth:`to`."""
        return self.to("cuda" if device is None else device, non_blocking=non_blocking)

    def cpu(self: M) -> M:
        """The mask in the host's memory; see :meth:`to`."""
        return self.to("cpu")

    def _for_device(self: M, device: torch.device) -> M:
        """The mask in the form that a device's kernels take."""
        return self

    def pin_memory(self: M) -> M:
        """A copy in page-locked memory of the host, from which ``.to(device, non_blocking=True)`` copies while other work runs."""
        return self._map(lambda tensor: tensor.pin_memory())

    def is_pinned(self) -> bool:
        """Whether all of the mask lies in page-locked memory."""
        return all(tensor.is_pinned() for tensor in self._tensors())

    # Pictures ---------------------------------------------------------------------------------------------------------------------

    def plot(self, Sq: int | None = None, head: int = 0, batch: int = 0, ax: Any = None) -> Any:
        """Draws the mask of one head with matplotlib (``pip install matplotlib``).

        An interval mask without ``Sq`` is drawn as lifetimes: a bar for each key, from its start to its end. With ``Sq``, and for all
        other masks, the picture says which query sees which key. In a block mask blue is a full tile, orange what a partial tile
        shows, pale orange what it hides. Of more than 1,024 keys or queries, 1,024 at equal distances are drawn.

        Args:
            Sq: number of queries; a block mask has its own.
            head, batch: which head (of the mask's largest number of heads) and sequence to draw; any where the mask serves all.
            ax: matplotlib Axes to draw on; None makes a figure.

        Returns:
            The matplotlib Axes.

        Raises:
            ImportError: matplotlib is not installed.
            TypeError, ValueError: Sq, head or batch is not an int >= 0, or Sq is not a length that the mask serves.
            IndexError: a head or a batch that the mask does not have.
        """
        raise NotImplementedError

    # Batches ----------------------------------------------------------------------------------------------------------------------

    def __getitem__(self: M, index: SupportsIndex | slice | Tensor) -> M:
        """A part of the batch. A mask with a batch of 1 serves every sequence, so any index gives that mask again.

        Args:
            index: an int (the result has a batch of 1), a slice, or a 1-dimensional tensor of integers or booleans.

        Raises:
            TypeError: another kind of index: heads and keys cannot be indexed.
            IndexError: an int outside the batch.
        """
        if isinstance(index, Tensor):
            if index.dim() != 1 or index.is_floating_point() or index.is_complex():
                raise TypeError(
                    f"index: expected one dimension of integers or booleans, got {index.dtype} {checks.shape_of(index)}"
                )
        elif not isinstance(index, int | slice | torch.SymInt) and hasattr(type(index), "__index__"):
            index = operator.index(index)  # an integer of NumPy
        elif isinstance(index, bool) or not isinstance(index, int | slice | torch.SymInt):
            raise TypeError(
                f"index: expected an int, a slice or a tensor that selects from the batch, got {type(index).__name__}"
            )
        batch = self.shape[0]
        if batch == 1:
            return self
        if not isinstance(index, slice | Tensor):
            if not -batch <= index < batch:
                raise IndexError(f"index: expected {-batch} <= index < {batch} for a mask with a batch of {batch}, got {index}")
            index = slice(index, index + 1) if index >= 0 else slice(index + batch, index + batch + 1)
        return self._select(index)

    def _select(self: M, index: slice | Tensor) -> M:
        return self._map(lambda tensor: tensor if tensor.shape[0] == 1 else tensor[index])

    @classmethod
    def cat(cls: type[M], masks: Sequence[M]) -> M:
        """Masks one after the other along the batch; a mask with a batch of 1 counts as one sequence.

        Args:
            masks: at least one mask, all of this type, of one length (index masks also of one block_size), and on one
                device. Heads are repeated where some have fewer.

        Raises:
            TypeError: a mask of another type.
            ValueError: no masks, or lengths, heads or devices that differ.
        """
        checks.instance("masks", masks, list | tuple, f"a list or tuple of {cls.__name__}")
        for mask in masks:
            checks.instance("masks", mask, cls, f"every one to be of type {cls.__name__}")
        if not masks:
            raise ValueError(f"masks: expected at least one {cls.__name__}, got none")
        for mask in masks:
            if mask.device != masks[0].device:
                raise ValueError(f"masks: expected one device, got {masks[0].device} and {mask.device}")
        return cls._cat(masks)

    def _expand(self: M, batch: int) -> M:
        """The mask of so many sequences; this one has as many, or one."""
        return self._map(lambda tensor: tensor.expand(batch, *tensor.shape[1:]))

    @classmethod
    def stack(cls: type[M], masks: Sequence[M]) -> M:
        """The masks of single sequences, each with a batch of 1, as the mask of a batch: ``stack(masks)[b]`` is ``masks[b]``.

        Raises:
            TypeError, ValueError: as :meth:`cat`; or a mask has another batch than 1.
        """
        made = cls.cat(masks)
        for mask in masks:
            if mask.shape[0] != 1:
                raise ValueError(f"masks: expected a batch of 1 in each (cat joins batches), got {mask!r}")
        return made

    @classmethod
    def _cat(cls: type[M], masks: Sequence[M]) -> M:
        raise NotImplementedError


def collate(masks: Sequence[M], **_: object) -> M:
    """The masks of a data set's samples as the mask of a batch: ``stack``. ``torch.utils.data.default_collate`` does it with masks.

    Args:
        masks: masks of one type, each with a batch of 1.

    Raises:
        TypeError, ValueError: as ``stack``.
    """
    if not isinstance(masks, list | tuple) or not masks or not issubclass(type(masks[0]), MaskData):
        raise TypeError(f"masks: expected a list of masks, got {type(masks).__name__}")
    stacked: M = type(masks[0]).stack(masks)
    return stacked


def join_batches(name: str, tensors: Sequence[Tensor], batches: Sequence[int], rest: Sequence[int]) -> Tensor:
    """[b|1, heads, *rest] tensors with these batches as one [sum of b, most heads, *rest]; ``name`` is for the error."""
    heads = max(tensor.shape[1] for tensor in tensors)
    for tensor in tensors:
        if tensor.shape[1] != heads and (tensor.shape[1] == 0 or heads % tensor.shape[1]):
            raise ValueError(f"{name}: expected numbers of heads that divide {heads}, got {tensor.shape[1]}")
    parts = [repeat_heads(t, heads).expand(b, heads, *rest) for t, b in zip(tensors, batches, strict=True)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]
