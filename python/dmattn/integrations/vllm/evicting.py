"""vLLM's attention while a policy of :mod:`dmattn.eviction` evicts keys, head by head, in memory that does not grow with a request.

    DMATTN_VLLM_EVICT='{"policy": "H2O", "budget": 480, "every": 32, "sink_keys": 4}' vllm serve MODEL --attention-backend CUSTOM

A request has one block of ``budget + every`` slots in each layer for its whole life (vLLM's ``CircularBufferSpec``), so vLLM's allocator owns
the memory, and admits as many requests as there are blocks. Heads share the pages of their block: with ``floor`` below 1 their budgets
differ. A query sees what :func:`dmattn.eviction.lifetimes` says. vLLM turns prefix caching off for such blocks. Windows, sinks and
layers that share a cache are refused. A position and a number a slot, and the latest queries of a policy that looks at some, lie outside
vLLM's memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec

from dmattn import eviction
from dmattn.decode import PAGE_UNIT
from dmattn.eviction.pages import PagedCache, PagePool
from dmattn.integrations.vllm.backend import PagedBackend, PagedImpl

logger = init_logger(f"vllm.{__name__}")


def policy_of(text: str | None = None) -> eviction.Policy:
    """The policy that DMATTN_VLLM_EVICT describes: a JSON object of its class's name and its arguments.

    Raises:
        TypeError, ValueError: it is no such object.
    """
    given = json.loads(os.environ["DMATTN_VLLM_EVICT"] if text is None else text)
    name = given.pop("policy", None) if isinstance(given, dict) else None
    kind = getattr(eviction, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, eviction.Policy)):
        raise ValueError(f"DMATTN_VLLM_EVICT: expected an object with the name of a policy of dmattn.eviction, got {name!r}")
    return kind(**given)


class EvictingBackend(PagedBackend):
    """One block a request, of as many slots as the policy needs."""

    @staticmethod
    def get_impl_cls() -> type[EvictingImpl]:
        return EvictingImpl

    @staticmethod
    def get_builder_cls() -> type[EvictingBuilder]:
        return EvictingBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """vLLM's spec of a layer, with one block that holds what all heads may keep."""
        if getattr(spec, "sliding_window", None) is not None:
            raise NotImplementedError("dmattn: sliding windows: not supported while a policy evicts")
        pages = most_pages(policy_of(), spec.num_kv_heads)
        given = {field.name: getattr(spec, field.name) for field in dataclasses.fields(CircularBufferSpec)}
        return CircularBufferSpec(**{**given, "block_size": -(-pages // spec.num_kv_heads) * PAGE_UNIT})

    @classmethod
    def supports_sink(cls) -> bool:
        return False


def most_pages(policy: eviction.Policy, kv_heads: int) -> int:
    """Pages of 16 slots that a sequence needs at most."""
    return PagedCache(policy, PagePool(1 << 20, PAGE_UNIT, 8, device="meta"), kv_heads, kv_heads).most_pages


class BlockPool(PagePool):
    """vLLM's blocks [blocks, Hkv, slots, 2 * D] of a layer as pages of 16 slots; a sequence is named by its block and has the pages in it.

    Which head a part of a block belongs to is ours to say, so the block's memory is taken as it lies.
    """

    def __init__(self, blocks: Tensor, head_size: int) -> None:
        number, kv_heads, slots, width = blocks.shape
        self.page_size, self.in_block, page = PAGE_UNIT, kv_heads * slots // PAGE_UNIT, PAGE_UNIT * width
        self.step, rest = divmod(blocks.stride(0), page)  # pages from a block to the next
        if rest or self.step < self.in_block or blocks.stride(3) != 1:
            raise NotImplementedError(f"dmattn: kv_cache: expected blocks of whole pages, got strides {blocks.stride()}")
        pages = (number - 1) * self.step + self.in_block
        self.key, self.value = blocks.as_strided((pages, PAGE_UNIT, 1, width), (page, width, width, 1)).split(head_size, 3)
        self.position = torch.full((pages, PAGE_UNIT), -1, dtype=torch.int32, device=blocks.device)
        self.memory = torch.zeros(pages, PAGE_UNIT, device=blocks.device)
        self.free: list[int] = []
        self._is_taken = [True] * pages

    def give(self, pages: Iterable[int]) -> None:
        """Nothing: a page stays with its block."""


class BlockCache(PagedCache):
    """A layer's sequences, each in a block of its own."""

    pool: BlockPool

    def restart(self, block: int) -> None:
        """Begins an empty sequence in a block, in place of one that has ended."""
        self._sequences.pop(block, None)
        self.join(block)

    def pages_needed(self, names: Sequence[Hashable], tokens: int) -> int:
        return 0

    def _take(self, sequences: list[Any], tokens: int) -> None:
        blocks = {id(sequence): block for block, sequence in self._sequences.items()}
        for sequence in sequences:
            first = cast("int", blocks[id(sequence)]) * self.pool.step
            used = {page for pages in sequence.pages for page in pages}
            unused = [page for page in range(first, first + self.pool.in_block) if page not in used]
            for pages, count in zip(sequence.pages, sequence.counts, strict=True):
                pages.extend(unused.pop() for _ in range(self.pool.pages_for(count + tokens) - len(pages)))


@dataclasses.dataclass
class Step(AttentionMetadata):
    """One step: block, first token, number of tokens and length behind them, of each request."""

    requests: list[tuple[int, int, int, int]]


class EvictingBuilder(AttentionMetadataBuilder[Step]):
    """Reads a step's requests to the host: a decision about keys waits for the device anyway."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        logger.info("dmattn evicts by %s in %s", policy_of(), ", ".join(layer_names))

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> Step:
        common = common_attn_metadata
        ends, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens.tolist()
        blocks = common.block_table_tensor[:, 0].tolist()
        rows = zip(blocks, ends[:-1], ends[1:], lengths, strict=False)
        return Step([(block, first, last - first, length) for block, first, last, length in rows if last > first])


class EvictingImpl(PagedImpl):
    """One layer's attention."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        if self.window is not None or self.sinks is not None or self.shares_cache:
            raise NotImplementedError("dmattn: windows, sinks and shared caches: not supported while a policy evicts")
        self.cache: BlockCache | None = None

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any, output: Tensor,
        output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As of :class:`PagedImpl`; kv_cache [blocks, Hkv, slots, 2 * D]."""
        if attn_metadata is None:  # a run that measures memory
            return output.fill_(0)
        if self.cache is None or self.cache.pool.key.data_ptr() != kv_cache.data_ptr():
            self.cache = BlockCache(policy_of(), BlockPool(kv_cache, self.head_size), self.num_heads, self.num_kv_heads)
        for block, _, tokens, length in attn_metadata.requests:
            if tokens == length:
                self.cache.restart(block)
        single = [request for request in attn_metadata.requests if request[2] == 1]
        for group in [single, *([request] for request in attn_metadata.requests if request[2] > 1)]:
            if not group:
                continue
            rows = torch.tensor([range(first, first + tokens) for _, first, tokens, _ in group], device=query.device)
            given = (x[rows].transpose(1, 2) for x in (query, key, value))
            out = self.cache.attend([block for block, *_ in group], *given, scale=self.scale, softcap=self.softcap)
            output[rows] = out.transpose(1, 2).to(output.dtype)
            if any(self.cache.length(block) != length for block, _, _, length in group):
                raise RuntimeError("dmattn: a request goes on that has lost its block")
        return output

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Nothing: :meth:`forward` writes keys where the policy has room."""
