"""MaskBuffer: a mask that lives in a module, moves with it, and is saved in its state dict."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dmattn import checks
from dmattn.fake import table_size
from dmattn.masks import BlockMask, CombinedMask, IndexMask, IntervalMask, Mask
from dmattn.masks.block import GPU_TILE
from dmattn.masks.interval import SEGMENTS


class MaskBuffer(nn.Module):
    """Holds a mask's tensors as buffers of a module, so that ``module.to(device)`` moves them and ``module.state_dict()`` holds them.

    ``self.window = MaskBuffer(IntervalMask.sliding_window(4096, 255))``, then ``dmattn.attention(q, k, v, self.window.mask)``.

    A state dict holds the tensors and, as one more tensor ``_extra_state``, what else the mask knows (lengths, block size, segments). Loading
    takes all of them over. As with any buffer the shapes must be those of the mask that is there; only the number of partial tiles of a
    block mask may be another.

    Args:
        mask: IntervalMask, BlockMask, IndexMask, or an intersection of such.
        persistent: whether the state dict holds the mask.

    Raises:
        TypeError: mask is not one of these, or persistent is not a bool.
    """

    def __init__(self, mask: Mask, *, persistent: bool = True) -> None:
        super().__init__()
        checks.instance(
            "mask",
            mask,
            IntervalMask | BlockMask | IndexMask | CombinedMask,
            "an IntervalMask, a BlockMask, an IndexMask or an intersection",
        )
        checks.flag("persistent", persistent)
        self._type: type[IntervalMask] | type[BlockMask] | type[IndexMask] | type[CombinedMask] = type(mask)
        self._persistent = persistent
        self._facts: dict[str, Any] = {}
        self._before: list[tuple[MaskBuffer, dict[str, Tensor | None], dict[str, Any]]] = []  # while a state dict is loaded
        if isinstance(mask, BlockMask) and any(size % GPU_TILE for size in mask.tile):
            mask = mask._with_tiles((GPU_TILE, GPU_TILE))  # tiles that every device takes
        for name, value in mask._fields().items():
            if isinstance(value, IntervalMask | BlockMask | IndexMask):
                self.add_module(name, MaskBuffer(value, persistent=persistent))
            elif isinstance(value, Tensor):
                self.register_buffer(name, value, persistent=persistent)
            else:
                self._facts[name] = value
        if self._type is CombinedMask:
            self.register_load_state_dict_post_hook(_check_parts)

    @property
    def mask(self) -> Mask:
        """The mask, made of the buffers as they are now."""
        return self._type._build(**self._mask_fields())

    def _mask_fields(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self._type.LEAVES if name not in self._facts}
        return {name: value.mask if isinstance(value, MaskBuffer) else value for name, value in fields.items()} | self._facts

    def get_extra_state(self) -> Tensor:
        """The facts that are no tensors, int64 [4 or less]."""
        numbers: list[int] = []
        for name, fact in self._own_facts().items():
            numbers += fact if isinstance(fact, tuple) else [SEGMENTS.index(fact) if name == "segments" else int(fact)]
        return torch.tensor(numbers, dtype=torch.int64)

    def set_extra_state(self, state: Tensor) -> None:
        """Takes over what :meth:`get_extra_state` gave.

        Raises:
            ValueError: it is of another type of mask, or of a mask whose tables have other sizes.
        """
        given = state.tolist() if isinstance(state, Tensor) else state
        if self._type is IntervalMask and isinstance(given, list) and len(given) == 2:
            given = [*given, 0]  # saved before masks knew how many keys a query sees
        if not self._fits(given):
            article = "an" if self._type in (IntervalMask, IndexMask) else "a"
            raise ValueError(f"state_dict: expected the state of {article} {self._type.__name__}, got {given}")
        numbers, facts = iter(given), dict(self._facts)
        for name, fact in self._own_facts().items():
            number: Any = tuple(next(numbers) for _ in fact) if isinstance(fact, tuple) else next(numbers)
            facts[name] = SEGMENTS[number] if name == "segments" else type(fact)(number)
        self._facts = facts

    def _own_facts(self) -> dict[str, Any]:
        """The facts, but for parts that an intersection does not have."""
        return {} if self._type is CombinedMask else self._facts

    def _fits(self, state: object) -> bool:
        """Whether facts can be those of a mask with the tensors that are here."""
        if not isinstance(state, list) or len(state) != self.get_extra_state().numel():
            return False
        if self._type is IntervalMask:
            return state[0] in (0, 1) and state[1] in range(len(SEGMENTS)) and state[2] >= 0
        if self._type is IndexMask:
            return state[0] in [1 << n for n in range(8)] and state[1] in (0, 1) and min(state[2:]) >= 0
        if not state:
            return True
        _, tile_q, words = self.get_buffer("bits").shape
        tiles = [table_size(length, size) for length, size in zip(state[:2], (tile_q, words * 32), strict=True)]
        return tiles == [*self.get_buffer("tiles").shape[2:]] and min(state[2:]) > 0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._persistent:
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        if not self._persistent:
            return
        held, facts = dict(self._buffers), self._facts
        if self._type is CombinedMask:  # its parts are loaded after this, and compared after that
            self._before = [(part, dict(part._buffers), part._facts) for part in self._parts()]
        try:
            for name, own in held.items():
                loaded = state_dict.get(prefix + name)
                if own is not None and isinstance(loaded, Tensor):  # new tensors: a mask that is in use may have the old ones
                    checks.dtype(prefix + name, loaded, (own.dtype,))
                    any_slots = name == "bits" and loaded.shape[1:] == own.shape[1:]
                    if any_slots or loaded.shape == own.shape:  # else torch refuses it
                        self._buffers[name] = own.new_empty(loaded.shape)
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
            if self._type is not CombinedMask:
                self._type._checked(**self._mask_fields())
        except (TypeError, ValueError):
            self._buffers.update(held)
            self._facts = facts
            raise

    def extra_repr(self) -> str:
        return "" if self._type is CombinedMask else repr(self.mask)

    def _parts(self) -> list[MaskBuffer]:
        return [part for part in self.children() if isinstance(part, MaskBuffer)]


def _check_parts(module: MaskBuffer, _: object) -> None:
    """Refuses parts that were loaded each for itself and do not fit each other."""
    before, module._before = module._before, []
    try:
        CombinedMask._checked(**module._mask_fields())
    except (TypeError, ValueError):
        for part, buffers, facts in before:
            part._buffers.update(buffers)
            part._facts = facts
        raise
