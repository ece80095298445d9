"""A bounded cache for transformers' ``generate()``: each layer keeps the keys that later queries can see, and no others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from dmattn import checks
from dmattn.cache import BoundedCache
from dmattn.nn.mixed_cache import MixedCache, cache_of_layer
from dmattn.renamed import HidesOldNames, renamed, renamed_attribute, with_new_names

REWIND = 32
"""How many tokens can be taken back unless another number is asked for: more than assisted generation proposes by default."""


class BoundedLayer(HidesOldNames, CacheLayerMixin):  # type: ignore[misc]
    """One layer of a transformers cache, held in a :class:`dmattn.BoundedCache` of fixed size (or, with local heads, a ``MixedCache``).

    Only layers with dmattn's selection can use it: which keys are kept is decided by their scores. It counts all tokens it was given,
    padding and keys that are gone included, so positions go on as with a cache that keeps everything. All that changes with a token lies in
    tensors that are written in place, so one compiled step serves all steps, also as a CUDA graph.

    Args:
        window, local, sink_keys, local_heads: as the attention layer has them.
        rewind: how many of the latest tokens :meth:`crop` can take back.

    Attributes:
        cache: what holds the keys; None before the first tokens. transformers' ``keys`` and ``values`` stay None.
        length: int64 [], how many tokens were taken in.
        latest: int8 [B, rewind], the latest tokens: 1, or 0 for padding, or -1 where none can be taken back.

    Raises:
        TypeError, ValueError: a size is no int or out of range.
    """

    is_sliding = False
    is_compileable = True

    length: Tensor
    latest: Tensor

    @renamed(sink="sink_keys")
    def __init__(self, window: int, local: int = 0, sink_keys: int = 0, local_heads: int = 0, rewind: int = REWIND) -> None:
        super().__init__()
        checks.selection(window, local, sink_keys, True)
        checks.each(checks.natural_int, local_heads=local_heads, rewind=rewind)
        self.window, self.local, self.sink_keys, self.local_heads, self.rewind = window, local, sink_keys, local_heads, rewind
        self.cache: BoundedCache | MixedCache | None = None

    sink = renamed_attribute("sink", "sink_keys")

    def __setstate__(self, state: dict[str, Any]) -> None:  # of copies and pickles, which may hold old names
        self.__dict__.update(with_new_names(state, sink="sink_keys"))

    def __repr__(self) -> str:
        return (
            f"BoundedLayer(window={self.window}, local={self.local}, sink_keys={self.sink_keys}, "
            f"local_heads={self.local_heads}, rewind={self.rewind}, length={int(self.get_seq_length())})"
        )

    # Use by attention layers ----------------------------------------------------------------------------------------------------

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: Tensor,
        real: Tensor | None,
        scale: float,
        select_only: bool = False,
    ) -> Tensor:
        """Takes T new tokens in, and gives their attention to all that is visible.

        Args:
            query: [B, H, T, D], D and Dv multiples of 8.
            key, value: [B, Hkv, T, D], [B, Hkv, T, Dv].
            scores: [B, Hkv, T].
            real: bool [B|1, T], False for padding, wherever it stands; None if there is none.
            scale, select_only: as in :meth:`dmattn.BoundedCache.attend`.

        Returns:
            [B, H, T, Dv], zeros where a token is padding.
        """
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        assert self.cache is not None
        batch, tokens = key.shape[0], key.shape[2]
        if real is not None:
            real = None if checks.values_are_known(real) and bool(real.all()) else real.expand(batch, -1)
        lengths = None if real is None else real.sum(1, dtype=torch.int32)
        order = None
        if real is not None and tokens > 1:
            # Bring the real tokens to the front, in their order, and the outputs back to where their tokens stood.
            order = real.logical_not().to(torch.int8).argsort(dim=1, stable=True)
            query, key, value, scores = (_taken(x, order) for x in (query, key, value, scores))
        out = self.cache.attend(query, key, value, scores, scale=scale, select_only=select_only, lengths=lengths)
        if order is not None:
            out = _taken(out, order.argsort(dim=1))
        self._count(tokens, real)
        return out

    def next_positions(self, tokens: int, real: Tensor | None, device: torch.device) -> Tensor:
        """int64 [B|1, T]: at which positions of their sequences, counted without padding, the next T tokens will stand."""
        steps = torch.arange(tokens, device=device)[None] if real is None else (real.cumsum(1) - 1).clamp(min=0)
        return steps if self.cache is None else steps + self.cache.length[:, None]

    def _count(self, tokens: int, real: Tensor | None) -> None:
        self.length.add_(tokens)
        if self.rewind == 0:
            return
        if real is None:
            self.latest.copy_(F.pad(self.latest, (0, tokens), value=1)[:, tokens:])
        else:
            self.latest.copy_(torch.cat((self.latest, real.to(torch.int8)), 1)[:, tokens:])

    # What transformers asks of a layer -------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Makes the cache for keys [B, Hkv, any, D] and values [B, Hkv, any, Dv]; head sizes are padded to multiples of 8."""
        self.dtype, self.device, self.heads = key_states.dtype, key_states.device, key_states.shape[1]
        self.head_dims = [-(-states.shape[3] // 8) * 8 for states in (key_states, value_states)]
        self.length = torch.zeros((), dtype=torch.int64, device=self.device)
        latest = torch.full((key_states.shape[0], self.rewind), -1, dtype=torch.int8, device=self.device)
        self._hold(self._new(key_states.shape[0]), latest)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Refuses: other attention would need all keys.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "past_key_values: expected a cache that keeps all keys, got a BoundedLayer for an attention layer without dmattn's selection; "
            "see enable_dynamic_mask_attention and convert in dmattn.integrations.transformers"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int | Tensor]:
        """Masks are about the new tokens alone: (number of new tokens, number of tokens before)."""
        return query_length, self.get_seq_length()

    def get_seq_length(self) -> int | Tensor:
        """How many tokens were taken in, padding and those included whose keys are gone: int64 [], as of a static cache; 0 before the first."""
        return self.length.clone() if self.is_initialized else 0

    def get_max_length(self) -> int:
        """-1: there is no longest sequence."""
        return -1

    @property
    def batch_size(self) -> int:
        return -1 if self.cache is None else self.cache.batch_size

    @property
    def is_croppable(self) -> bool:
        return self.rewind > 0

    def activate_past_recording(self) -> None:
        """Called before tokens are proposed that may be taken back.

        Raises:
            ValueError: this layer cannot take any back.
        """
        if self.rewind == 0:
            raise ValueError(
                "rewind: expected more than 0 for assisted or prompt-lookup generation, which takes tokens back, got a cache with rewind=0"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last tokens back, as if they had never come.

        Args:
            tokens_to_remove: 0, or minus the number of tokens, at most ``rewind``.

        Raises:
            ValueError: it is positive, or there is more to take back than is kept.
        """
        count = -int(tokens_to_remove)
        if count < 0:
            raise ValueError(f"tokens_to_remove: expected 0 or minus the number of tokens, got {tokens_to_remove}")
        if count == 0 or self.cache is None:
            return
        if count > self.rewind:
            raise ValueError(
                f"tokens_to_remove: expected at most {self.rewind} tokens, got {count}: keys that died earlier are gone; make the cache with "
                f"rewind={count}"
            )
        if count > int((self.latest[0] >= 0).sum()):
            raise ValueError(f"tokens_to_remove: expected at most as many tokens as can still be taken back, got {count}")
        real = (self.latest[:, self.rewind - count :] == 1).sum(1, dtype=torch.int32)
        self.latest.copy_(F.pad(self.latest, (count, 0), value=-1)[:, : self.rewind])
        self.length.sub_(count)
        self.cache.rewind(real)

    def reset(self) -> None:
        """Makes all sequences empty."""
        if self.cache is not None:
            self.cache.reset()
            self.length.zero_()
            self.latest.fill_(-1)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence b becomes a copy of what sequence ``beam_idx[b]`` was."""
        if self.cache is not None:
            beam_idx = beam_idx.to(self.device)
            self.cache.reorder(beam_idx)
            self.latest.copy_(self.latest[beam_idx])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence comes ``repeats`` times, one after the other."""
        if self.cache is not None:
            self.batch_select_indices(torch.arange(self.cache.batch_size, device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences with these numbers, int [n], or True in this mask, bool [B]."""
        if self.cache is None:
            return
        rows = torch.arange(self.cache.batch_size, device=self.device)[indices.to(self.device)]
        state = self.cache.state_dict()
        cache = self._new(rows.shape[0])
        cache.load_state_dict({name: x if name.endswith("sizes_saved") else x[rows] for name, x in state.items()})
        self._hold(cache, self.latest[rows])

    def offload(self) -> None:
        raise ValueError("offloading: expected False with a bounded cache, which is as small as it will ever be, got True")

    prefetch = offload

    # Inside ---------------------------------------------------------------------------------------------------------------------

    def _new(self, batch: int) -> BoundedCache | MixedCache:
        return cache_of_layer(
            batch, self.heads, self.local_heads, self.window, *self.head_dims, local=self.local, sink_keys=self.sink_keys, rewind=self.rewind,
            dtype=self.dtype, device=self.device,
        )  # fmt: skip

    def _hold(self, cache: BoundedCache | MixedCache, latest: Tensor) -> None:
        """Takes these tensors, and tells compilers that they stay where they are: else no step could become a CUDA graph."""
        self.cache, self.latest = cache, latest
        if not torch.compiler.is_compiling():
            for tensor in (*cache.buffers(), latest, self.length):
                torch._dynamo.mark_static_address(tensor)


def _taken(given: Tensor, order: Tensor) -> Tensor:
    """given [B, heads, T, ..] with its tokens in the order [B, T] of each sequence."""
    index = order.view(order.shape[0], 1, order.shape[1], *[1] * (given.dim() - 3))
    return given.gather(2, index.expand_as(given))
