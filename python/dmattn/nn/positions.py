"""What position numbers say apart from the rotation of heads: where packed documents begin."""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn import checks
from dmattn.masks import IntervalMask


def checked_positions(position_ids: object, hidden_states: Tensor) -> Tensor:
    """position_ids as [B|1, S], for hidden states [B, S, E]."""
    given = checks.tensor("position_ids", position_ids, (torch.int32, torch.int64), hidden_states, "hidden_states")
    batch, length = hidden_states.shape[:2]
    rows = given[None] if given.dim() == 1 else given
    if rows.dim() != 2 or rows.shape[0] not in (1, batch) or rows.shape[1] != length:
        raise ValueError(
            f"position_ids: expected [S] or [B|1, S] with B={batch}, S={length} like hidden_states, got {checks.shape_of(given)}"
        )
    return rows


def documents_of(positions: Tensor, is_causal: bool) -> IntervalMask:
    """The documents of positions [B|1, S]: one begins wherever a position is not greater than the one before it."""
    before = torch.cat((positions[:, :1] - 1, positions[:, :-1]), dim=1)
    return IntervalMask.documents(positions.shape[1], ids=(positions <= before).cumsum(1), is_causal=is_causal)
