"""A serving engine's batch: requests with some new tokens each, whose keys and values lie in pages of a pool that all requests share.

Requests with one new token come first and are decoded where their pages lie, in one call of :func:`dmattn.decode_attention`. The others, whole
prompts and chunks of prompts, are one call of :func:`dmattn.varlen_attention` over a copy of their keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dmattn import checks
from dmattn.decode import PAGE_UNIT, decode_attention
from dmattn.masks import IndexMask, IntervalMask
from dmattn.varlen import varlen_attention


@dataclass
class Paged:
    """The requests of one step; made once, used by every layer. Nothing here waits for a GPU.

    Args:
        ends: int32 [requests + 1], 0 and then the end of each request's new tokens.
        lengths: int32 [requests], keys of each request, the new ones included.
        table: int32 [requests, max_pages]: key j of request r lies in page ``table[r, j // page_size]``.
        page_size: tokens of a page.
        decodes: how many of the requests, the first ones, have one new token.
        most_keys: at least the keys of the other requests together.
        is_fresh: the other requests have no keys but their new ones.
    """

    ends: Tensor
    lengths: Tensor
    table: Tensor
    page_size: int
    decodes: int
    most_keys: int
    is_fresh: bool = False
    _trimmed: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    _gathered: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        if self.decodes and self.page_size % PAGE_UNIT:
            raise ValueError(f"decodes: expected 0 for pages of {self.page_size}, no multiple of {PAGE_UNIT}, got {self.decodes}")

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        new: tuple[Tensor, Tensor] | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        choose: Callable[[Tensor, Tensor, Tensor, int], IndexMask | None] | None = None,
    ) -> Tensor:
        """Causal attention of the new tokens.

        Args:
            query: [T, H, D], the new tokens of all requests.
            keys, values: the pools, [pages, page_size, Hkv, D] and [pages, page_size, Hkv, Dv], which hold the new tokens already.
            new: keys and values [T, Hkv, D|Dv] of the new tokens, read instead of their pages where nothing else is needed.
            window: a query sees the last ``window`` keys, its own among them. None: all.
            scale, softcap, sinks: as in :func:`dmattn.attention`.
            choose: of the decodes' queries [B, H, 1, D], table, lengths and page size: which keys they see, None for all.

        Returns:
            [T, H, Dv].
        """
        outs: list[Tensor] = []
        shared: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
        if self.decodes:
            rows, table, lengths, key_bias = query[: self.decodes, :, None], *self._visible_pages(window)
            listed = None if choose is None else choose(rows, table, lengths, self.page_size)
            given: dict[str, Any] = {"page_table": table, "mask": listed, "key_bias": key_bias, **shared}
            out: Tensor = decode_attention(rows, keys, values, lengths, **given)
            outs.append(out[:, :, 0])
        if self.decodes < self.lengths.shape[0]:
            ends_q, ends_k, page, place = self._rows()
            if self.is_fresh and new is not None:
                own_keys, own_values, ends_k = new[0][self.decodes :], new[1][self.decodes :], ends_q
            else:
                own_keys, own_values = keys[page, place], values[page, place]
            mask = None
            if window is not None:
                mask = IntervalMask.sliding_window(own_keys.shape[0], min(window, checks.MAX_LENGTH) - 1, device=query.device)
            rows = query[self.decodes :]
            outs.append(varlen_attention(rows, own_keys, own_values, ends_q, ends_k, is_causal=True, mask=mask, **shared))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _visible_pages(self, window: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Table, lengths and key_bias [B, 1, keys] of the decodes: with a window, from the page of the first visible key on."""
        table, lengths = self.table[: self.decodes], self.lengths[: self.decodes]
        if window is None or window >= table.shape[1] * self.page_size:
            return table, lengths, None
        if window not in self._trimmed:
            first = (lengths - window).clamp(min=0)
            page = torch.div(first, self.page_size, rounding_mode="floor")
            count = min((window - 1) // self.page_size + 2, table.shape[1])
            pages = (page[:, None] + torch.arange(count, device=table.device)).clamp(max=table.shape[1] - 1)
            hidden = torch.arange(count * self.page_size, device=table.device) < (first - page * self.page_size)[:, None]
            bias = torch.zeros(hidden.shape, device=table.device).masked_fill(hidden, -torch.inf)
            self._trimmed[window] = (table.gather(1, pages.long()), (lengths - page * self.page_size).int(), bias[:, None])
        return self._trimmed[window]

    def _rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of the other requests: the ends of their new tokens and of their keys, and page and place in it of each key [most_keys]."""
        if self._gathered is None:
            lengths, table = self.lengths[self.decodes :], self.table[self.decodes :]
            ends_k = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
            keys = torch.arange(self.most_keys, dtype=torch.int32, device=table.device)
            request = torch.searchsorted(ends_k[1:], keys, right=True).clamp(max=lengths.shape[0] - 1)
            number = (keys - ends_k[request]).clamp(max=table.shape[1] * self.page_size - 1)
            page = table[request, torch.div(number, self.page_size, rounding_mode="floor").long()].long()
            self._gathered = self.ends[self.decodes :] - self.decodes, ends_k, page, (number % self.page_size).long()
        return self._gathered


def store(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor, spare: int) -> None:
    """Writes new keys and values [T, Hkv, D|Dv] to their slots, page * page_size + place, int64 [T].

    spare: a slot that nobody reads. What has a negative slot goes there.
    """
    slots = torch.where(slots < 0, spare, slots)
    page, place = torch.div(slots, keys.shape[1], rounding_mode="floor"), slots % keys.shape[1]
    keys[page, place] = new_keys[: slots.shape[0]].to(keys.dtype)
    values[page, place] = new_values[: slots.shape[0]].to(values.dtype)
