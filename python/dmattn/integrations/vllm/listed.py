"""vLLM's attention with lists: in decoding, each key head reads the pages that its queries choose by their mean keys, and the latest keys.

    DMATTN_VLLM_LISTS='{"pages": 32, "local": 128, "sink_keys": 4}' vllm serve MODEL --attention-backend CUSTOM --block-size 64

The pages are vLLM's own, so the cache is whole and prefix caching works: a step does less, memory is the same. Prompts attend to all keys, but
for a chunk of one token, which counts as decoding. The sum of each page's keys lies outside vLLM's memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import torch
from torch import Tensor

from dmattn import checks
from dmattn.integrations.vllm.backend import PagedBackend, PagedImpl
from dmattn.masks import IndexMask
from dmattn.masks.index import check_block_size


@dataclasses.dataclass(frozen=True)
class Lists:
    """How many pages a key head lists, and how many of the latest and of the first keys it sees besides."""

    pages: int
    local: int = 64
    sink_keys: int = 0

    def __post_init__(self) -> None:
        checks.each(checks.positive_int, pages=self.pages, local=self.local)
        checks.natural_int("sink_keys", self.sink_keys)

    def mask(self, query: Tensor, sums: Tensor, table: Tensor, lengths: Tensor, page_size: int) -> IndexMask:
        """The lists of queries [B, H, 1, D], of pages whose keys have the sums [pages, Hkv, D]. Pages that are all local do not compete."""
        wanted = query.unflatten(1, (sums.shape[1], -1)).mean((2, 3)).float()
        scores = torch.einsum("bhd,bphd->bhp", wanted, sums[table.long()])
        number = torch.arange(table.shape[1], device=table.device)
        held = (lengths[:, None] - number * page_size).clamp(1, page_size)
        scores = scores / held[:, None]
        scores = scores.masked_fill((number * page_size >= (lengths - self.local)[:, None])[:, None], -torch.inf)
        best = scores.topk(min(self.pages, table.shape[1]), 2)
        listed = torch.where(best.values > -torch.inf, best.indices, -1).int()
        check_block_size(page_size)
        return IndexMask._of_lists(listed[:, :, None], page_size, local=self.local, sink_keys=self.sink_keys)


class ListedBackend(PagedBackend):
    """What vLLM asks before it takes a backend."""

    @staticmethod
    def get_impl_cls() -> type[ListedImpl]:
        return ListedImpl


class ListedImpl(PagedImpl):
    """One layer's attention. Layers with a window attend to it, without lists."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.rules = Lists(**json.loads(os.environ["DMATTN_VLLM_LISTS"]))
        if self.shares_cache:
            raise NotImplementedError("dmattn: layers that share a cache: not supported with lists")
        self.sums = torch.empty(0)  # float32 [pages, Hkv, D]

    def choose(self, query: Tensor, table: Tensor, lengths: Tensor, page_size: int) -> IndexMask | None:
        return None if self.window is not None else self.rules.mask(query, self.sums, table, lengths, page_size)

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Also adds new keys to the sums of their pages; a page's sum begins at 0 with its first slot."""
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        keys = self._pools(kv_cache)[0]
        if self.sums.shape[0] != keys.shape[0]:
            self.sums = torch.zeros(keys.shape[0], *keys.shape[2:], device=keys.device)
        slots = slot_mapping.clamp(min=0)  # page 0 holds no tokens
        page, place = torch.div(slots, keys.shape[1], rounding_mode="floor"), slots % keys.shape[1]
        self.sums[torch.where(place == 0, page, 0)] = 0.0
        self.sums.index_add_(0, page, key[: slots.shape[0]].float())
