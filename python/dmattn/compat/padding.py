"""Padded batches to packed sequences and back, with the names and results that flash-attn and flash-dmattn have for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dmattn import checks


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch that are real, one after the other. Reads a length from the device.

    Args:
        hidden_states: [B, S, ...].
        attention_mask: bool or integers [B, S], nonzero = real.
        unused_mask: the same for tokens that have room and are not used; they are packed, too.

    Returns:
        (tokens [T, ...], indices int64 [T] of the tokens in the flattened batch, cu_seqlens int32 [B + 1], the greatest length,
        the number of tokens that are real of each sequence int32 [B]).

    Raises:
        TypeError, ValueError: names the argument, what was expected and what it got.
    """
    if checks.tensor("hidden_states", hidden_states).dim() < 2:
        raise ValueError(f"hidden_states: expected [B, S, ...], got shape {checks.shape_of(hidden_states)}")
    real = _mask("attention_mask", attention_mask, hidden_states)
    packed = real if unused_mask is None else real | _mask("unused_mask", unused_mask, hidden_states)
    lengths = packed.sum(dim=1, dtype=torch.int32)
    indices = packed.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, longest, real.sum(dim=1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """What :func:`unpad_input` packed, back in its places; zeros elsewhere.

    Args:
        hidden_states: [T, ...].
        indices: int64 [T], as :func:`unpad_input` returned them.
        batch, seqlen: B and S.

    Returns:
        [B, S, ...], differentiable.

    Raises:
        TypeError, ValueError: names the argument, what was expected and what it got.
    """
    tokens = hidden_states.shape[0] if checks.tensor("hidden_states", hidden_states).dim() else 0
    checks.each(checks.natural_int, batch=batch, seqlen=seqlen)
    checks.numbers_below(
        "indices", checks.shaped("indices", indices, "[T]", (torch.int32, torch.int64), T=tokens), batch * seqlen
    )
    padded: Tensor = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:])).index_copy(
        0, indices.long(), hidden_states
    )
    return padded.reshape(batch, seqlen, *hidden_states.shape[1:])


def index_first_axis(hidden_states: Tensor, indices: Tensor) -> Tensor:
    """The rows of a flattened batch that :func:`unpad_input` kept, for further tensors of the same batch.

    Args:
        hidden_states: [B * S, ...].
        indices: int32 or int64 [T], as :func:`unpad_input` returned them.

    Returns:
        [T, ...], differentiable.

    Raises:
        TypeError, ValueError: names the argument, what was expected and what it got.
    """
    if checks.tensor("hidden_states", hidden_states).dim() < 1:
        raise ValueError(f"hidden_states: expected [B * S, ...], got shape {checks.shape_of(hidden_states)}")
    checks.shaped("indices", indices, "[T]", (torch.int32, torch.int64), hidden_states, "hidden_states")
    checks.numbers_below("indices", indices, hidden_states.shape[0])
    return hidden_states.index_select(0, indices)


def _mask(name: str, given: object, hidden_states: Tensor) -> Tensor:
    dtypes = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    (batch, length), like = hidden_states.shape[:2], (hidden_states, "hidden_states")
    return checks.shaped(name, given, "[B, S]", dtypes, *like, B=batch, S=length) != 0
