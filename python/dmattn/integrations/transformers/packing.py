"""Packed sequences as transformers tells attention functions of them: ends of sequences, or positions that start again."""

from __future__ import annotations

import weakref
from typing import Any

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

    Ends count beside any mask. Positions count where flash attention of transformers counts them, too: without a mask and a past.

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
        return IntervalMask.documents(key.shape[2], ends_k.to(key.device), causal=False)
    if attention_mask is not None or not is_causal or not whole or position_ids is None:
        return None
    if position_ids.dim() != 2 or position_ids.shape[1] != key.shape[2] or position_ids.shape[0] not in (1, query.shape[0]):
        return None
    return _sequences_of(position_ids)


_last: list[Any] = [None, -1, None]  # the last position_ids, by a reference and a version, and what they gave


def _sequences_of(position_ids: Tensor) -> IntervalMask | None:
    """By positions that do not go up by one. The layers of a model get the same tensor, so its values are read once a forward pass."""
    compiling = torch.compiler.is_compiling()
    if not compiling and _last[0] is not None and _last[0]() is position_ids and _last[1] == position_ids._version:
        known: IntervalMask | None = _last[2]
        return known
    begins = torch.diff(position_ids, prepend=position_ids[:, :1] - 1) != 1
    mask = None
    if compiling or bool(begins.any()):
        mask = IntervalMask.documents(position_ids.shape[1], ids=begins.cumsum(1), causal=False)
    if not compiling:
        _last[:] = [weakref.ref(position_ids), position_ids._version, mask]
    return mask
