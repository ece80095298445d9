"""Packed sequences as transformers tells attention functions of them: ends of sequences, or positions that start again."""

from __future__ import annotations

import weakref
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn.masks import IntervalMask


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
    return _sequences_of(position_ids, attention_mask)


class Known(NamedTuple):
    """What some tensors gave, for as long as they are there and nobody has written to them."""

    given: tuple[weakref.ref[Tensor], ...]
    versions: tuple[int, ...]
    found: IntervalMask | None

    def is_about(self, given: tuple[Tensor, ...]) -> bool:
        same = len(given) == len(self.given) and all(seen() is x for seen, x in zip(self.given, given, strict=True))
        return same and self.versions == tuple(x._version for x in given)


# All layers of a model get the same tensors, or the same few, so values are read once a forward pass.
_known: deque[Known] = deque(maxlen=4)


def _sequences_of(position_ids: Tensor, mask: Tensor | None) -> IntervalMask | None:
    compiling = torch.compiler.is_compiling()
    given = (position_ids,) if mask is None else (position_ids, mask)
    # Inference tensors do not say when they are written to.
    remembers = not compiling and not any(x.is_inference() for x in given)
    if remembers:
        for known in tuple(_known):
            if known.is_about(given):
                return known.found
    real = (
        torch.ones_like(position_ids, dtype=torch.bool)
        if mask is None
        else (mask[:, 0, 1] > mask[:, 0, 0])[:, : position_ids.shape[1]]
    )
    begins = real & (position_ids == 0) & (real.cumsum(1) > 1)
    found = None
    if compiling or bool(begins.any()):
        found = IntervalMask.documents(position_ids.shape[1], ids=begins.cumsum(1), is_causal=False)
    if remembers:
        _known.append(Known(tuple(weakref.ref(x) for x in given), tuple(x._version for x in given), found))
    return found
