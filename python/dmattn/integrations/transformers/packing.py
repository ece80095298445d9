"""Packed sequences as transformers tells attention functions of them: ends of sequences, or positions that start again."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dmattn.masks import IntervalMask

T = TypeVar("T")


def packed_sequences(
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool,
    position_ids: Tensor | None,
    ends_q: Tensor | None,
    ends_k: Tensor | None,
) -> IntervalMask | None:
    """The mask within packed sequences, not causal by itself; None if there is one sequence.

    Ends count with any mask. Positions count in causal layers without a past: a token at position 0 that is not the first one begins another
    sequence. transformers' mask functions do so only without a cache and a 2-D mask, and some models do not tell them the positions.

    Args:
        query, key: [B, H, Sq, D], [B, Hkv, Sk, D].
        attention_mask: what the layer got.
        is_causal: whether queries see the keys up to their own.
        position_ids: [B|1, S].
        ends_q, ends_k: [sequences + 1], as the flattening collator gives them.

    Raises:
        ValueError: ends that cannot be honoured.
    """
    whole = query.shape[2] == key.shape[2]
    if ends_k is not None or ends_q is not None:
        if ends_k is None or ends_q is None or not whole or query.shape[0] != 1:
            raise ValueError(
                "cu_seq_lens_q, cu_seq_lens_k: expected both, for a batch of 1 and as many queries as keys, got a batch of "
                f"{query.shape[0]} with {query.shape[2]} queries and {key.shape[2]} keys; packed sequences cannot be continued from a cache"
            )
        return IntervalMask.documents(key.shape[2], ends_k.to(key.device), is_causal=False)
    if not is_causal or not whole or query.shape[2] == 1 or position_ids is None:
        return None
    if position_ids.dim() != 2 or position_ids.shape[1] != key.shape[2] or position_ids.shape[0] not in (1, query.shape[0]):
        return None
    if attention_mask is not None and attention_mask.dtype != torch.int32:
        return None  # a mask of the user's own
    return remembered(_sequences_of, position_ids, *(() if attention_mask is None else (attention_mask,)))


class Known(NamedTuple):
    """What some tensors gave, for as long as they are there and nobody has written to them."""

    given: tuple[weakref.ref[Tensor], ...]
    versions: tuple[int, ...]
    asked: tuple[Any, ...]  # the function that was asked, and its numbers
    found: Any

    def is_about(self, given: tuple[Tensor, ...], asked: tuple[Any, ...]) -> bool:
        same = len(given) == len(self.given) and all(seen() is x for seen, x in zip(self.given, given, strict=True))
        return same and asked == self.asked and self.versions == tuple(x._version for x in given)


# All layers of a model get the same tensors, or the same few, so a GPU is waited for once a forward pass. What lies on a CPU is read each
# time: NumPy can write to it without a version bump.
_known: deque[Known] = deque(maxlen=8)


def remembered(find: Callable[..., T], *given: Tensor, **numbers: int) -> T:
    """``find(*given, **numbers)``, which may wait for a GPU, or what it gave for the same tensors before."""
    # Inference tensors do not say when they are written to.
    if torch.compiler.is_compiling() or any(x.device.type == "cpu" or x.is_inference() for x in given):
        return find(*given, **numbers)
    asked = (find, *numbers.values())
    for known in tuple(_known):
        if known.is_about(given, asked):
            answer: T = known.found
            return answer
    found = find(*given, **numbers)
    _known.append(Known(tuple(weakref.ref(x) for x in given), tuple(x._version for x in given), asked, found))
    return found


def _sequences_of(position_ids: Tensor, mask: Tensor | None = None) -> IntervalMask | None:
    real = (
        torch.ones_like(position_ids, dtype=torch.bool)
        if mask is None
        else (mask[:, 0, 1] > mask[:, 0, 0])[:, : position_ids.shape[1]]
    )
    begins = real & (position_ids == 0) & (real.cumsum(1) > 1)
    if torch.compiler.is_compiling() or bool(begins.any()):
        return IntervalMask.documents(position_ids.shape[1], ids=begins.cumsum(1), is_causal=False)
    return None


def has_inner_padding(mask: Tensor, queries: int) -> bool:
    """Whether there is padding between tokens of a row, by what dmattn's mask function made of a causal mask, int32 [B, 1, 2, Sk]."""
    start, end = mask[:, 0].unbind(1)
    real = (end > start) & (start < queries)  # without the places of a static cache that no token has yet
    runs = real[:, 0].int() + (real[:, 1:] & ~real[:, :-1]).sum(1)
    return bool((runs > 1).any())
