"""An indexer chooses for each query among the keys that a bounded cache holds; their index keys lie behind the values, in the same rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dmattn import ops
from dmattn.attention import attention
from dmattn.composed import LISTS
from dmattn.indexer import index_top_k
from dmattn.masks import ALWAYS, FOREVER, IndexMask, IntervalMask
from dmattn.masks.index import NONE

# An age is written as three digits in base 128, which bfloat16 and float16 hold exactly. Keys older than this count as of this age.
OLDEST = 128**3 - 1


class Choice(NamedTuple):
    """What the indexer makes of the new tokens, for key heads that choose one by one."""

    query: Tensor  # [B, Hkv, T, Hi, Di]
    weights: Tensor  # [B, Hkv, T, Hi]
    slope: Tensor  # [Hkv]
    k: int

    def of_token(self, t: int) -> Choice:
        return self._replace(query=self.query[:, :, t : t + 1], weights=self.weights[:, :, t : t + 1])

    def lists(self, index_key: Tensor, position: Tensor, base: IntervalMask, local: int, is_causal: bool) -> Tensor:
        """int32 [B, Hkv, T, k]: the places of the best keys of index_key [B, Hkv, S, Di] that ``base`` shows, -1 for none.

        position [B, Hkv, S] is not a key's place, by which ``index_top_k`` counts the slope. So one more index head adds it: its query
        reads the digits of a key's age, which are numbers of their own behind the index key.
        """
        scale = index_key.shape[3] ** -0.5
        age = (position.amax(2, keepdim=True) - position).clamp(max=OLDEST)
        digits = torch.stack((age >> 14, (age >> 7) & 127, age & 127), 3).to(index_key.dtype)
        values = (1 << 7 * torch.arange(2, -1, -1, device=age.device)).to(index_key.dtype)  # of the digits; no copy from the host
        reads_age = F.pad(values, (index_key.shape[3], 5)).expand(*self.query.shape[:3], 1, -1)
        query = torch.cat((F.pad(self.query, (0, 8)), reads_age), 3)
        slope = (-self.slope.to(self.weights.dtype) / scale)[:, None, None].expand(*self.weights.shape[:3], 1)
        return index_top_k(
            query, torch.cat((index_key, F.pad(digits, (0, 5))), 3), torch.cat((self.weights, slope), 3), self.k, base=base, local=local,
            is_causal=is_causal, scale=scale,
        ).indices  # fmt: skip


def attend_step(
    choice: Choice, query: Tensor, key: Tensor, value: Tensor, position: Tensor, lengths: Tensor | None, bias: Tensor, certain: int,
    scale: float, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [B, H, 1, Dv] and lse of one query [B, H, 1, D], which reads the first ``certain`` slots and those that it chooses.

    key, value [B, Hkv, N, D or Dv + Di], position and bias [B, Hkv, N] are the visible slots of a cache; lengths [B] is 0 for idle sequences.
    """
    index_dim = choice.query.shape[4]
    # In the order of their positions: of equal scores the later key wins.
    in_order, slot = position.sort(2)
    index_key = value[..., -index_dim:].gather(2, slot[..., None].expand(-1, -1, -1, index_dim))
    end = torch.where((slot >= certain) & (in_order >= 0), FOREVER, ALWAYS).to(torch.int32)
    best = choice.lists(index_key, in_order, IntervalMask(torch.full_like(end, ALWAYS), end), 0, False)[:, :, 0]
    best = torch.where(best >= 0, slot.gather(2, best.clamp(min=0).long()), NONE)
    ring = torch.arange(certain, device=best.device)
    ring = torch.where(position[..., :certain] >= 0, ring, NONE)
    lists = torch.cat((ring, best), 2)[:, :, None].int()
    if lengths is None:
        lengths = position.new_full(position.shape[:1], position.shape[2])
    return ops.decode(query, key, value[..., :-index_dim], lengths, None, bias, None, lists, True, scale, softcap, *LISTS)


def attend_chunk(
    choice: Choice, query: Tensor, key: Tensor, value: Tensor, position: Tensor, end: Tensor, bias: Tensor | None, sizes: tuple[int, int],
    scale: float, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [B, H, T, Dv] and lse of the last T of S tokens, which choose among the keys that live, ``sizes`` sinks and local ones aside.

    key, value [B, Hkv, S, D or Dv + Di], position and end [B, Hkv, S] are cached keys in the order of their positions, and then T new ones.
    """
    index_dim, (sink_keys, local), length = choice.query.shape[4], sizes, key.shape[2]
    start = torch.arange(length, dtype=torch.int32, device=end.device)[None, None]
    competes = IntervalMask(start, torch.where(position < sink_keys, 0, end))
    lists = choice.lists(value[..., -index_dim:], position, competes, local, True)
    # The sinks stand behind the empty slots.
    empty = (position[..., : length - query.shape[2]] < 0).sum(2, dtype=torch.int32)
    sinks = empty[..., None] + torch.arange(sink_keys, dtype=torch.int32, device=end.device)
    sinks = torch.where(sinks < length, sinks, NONE)[:, :, None].expand(-1, -1, lists.shape[2], -1)
    mask = IndexMask._of_lists(torch.cat((sinks, lists), 3), 1, True, local) & IntervalMask(start, end)
    return attention(
        query, key, value[..., :-index_dim], mask, key_bias=bias, is_causal=True, scale=scale, softcap=softcap, return_lse=True
    )
