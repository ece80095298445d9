"""What position numbers say apart from the rotation of heads: where packed documents begin."""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn import checks
from dmattn.masks import IntervalMask
from dmattn.masks.heads import with_rank


def checked_positions(position_ids: object, hidden_states: Tensor) -> Tensor:
    """position_ids as [B|1, S], for hidden states [B, S, E]."""
    given = checks.tensor("position_ids", position_ids)
    dtypes, sizes = (torch.int32, torch.int64), {"B": hidden_states.shape[0], "S": hidden_states.shape[1]}
    if given.dim() < 2 and given.shape != hidden_states.shape[1:2]:
        raise ValueError(f"position_ids: expected [S] or [B|1, S] with B={sizes['B']}, S={sizes['S']}, got {list(given.shape)}")
    return checks.shaped("position_ids", with_rank(given, 2), "[B|1, S]", dtypes, hidden_states, "hidden_states", **sizes)


def documents_of(positions: Tensor, is_causal: bool) -> IntervalMask:
    """The documents of positions [B|1, S]: one begins wherever a position is not greater than the one before it."""
    before = torch.cat((positions[:, :1] - 1, positions[:, :-1]), dim=1)
    return IntervalMask.documents(positions.shape[1], ids=(positions <= before).cumsum(1), is_causal=is_causal)
