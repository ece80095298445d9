"""What position numbers say apart from the rotation of heads: where packed documents begin."""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn import checks
from dmattn.masks import IntervalMask
from dmattn.masks.heads import with_rank


def checked_positions(position_ids: object, hidden_states: Tensor) -> Tensor:
    """position_ids as [B|1, S], for hidden states [B, S, E]."""
    rows = with_rank(checks.tensor("position_ids", position_ids), 2)
    like, sizes = (hidden_states, "hidden_states"), {"B": hidden_states.shape[0], "S": hidden_states.shape[1]}
    return checks.shaped("position_ids", rows, "[B|1, S]", (torch.int32, torch.int64), *like, **sizes)


def documents_of(positions: Tensor, is_causal: bool) -> IntervalMask:
    """The documents of positions [B|1, S]: one begins wherever a position is not greater than the one before it."""
    before = torch.cat((positions[:, :1] - 1, positions[:, :-1]), dim=1)
    return IntervalMask.documents(positions.shape[1], ids=(positions <= before).cumsum(1), is_causal=is_causal)
