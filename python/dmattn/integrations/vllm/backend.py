"""vLLM's attention backend on dmattn's kernels: prompts whole or in chunks, decoding, grouped heads, sliding windows, sinks, softcap.

Memory that does not grow with a request, by a policy that evicts keys: :mod:`dmattn.integrations.vllm.evicting`. Lists of pages that each
query chooses: :mod:`dmattn.integrations.vllm.listed`. Models with an indexer of their own vLLM keeps for its own backends (``use_sparse``).

CUDA graphs hold what is around attention, not attention itself. ALiBi, encoders, quantised caches and context parallelism are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from dmattn import checks
from dmattn.integrations.paged import Paged, store
from dmattn.masks import IndexMask

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what stands below its own name


class PagedBackend(AttentionBackend):
    """What vLLM asks before it takes a backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PagedImpl]:
        return PagedImpl

    @staticmethod
    def get_builder_cls() -> type[PagedBuilder]:
        return PagedBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return dtype in cls.supported_dtypes and dtype in checks.DTYPES["cuda" if torch.cuda.is_available() else "cpu"]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 0 < head_size <= checks.MAX_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Decoding is, prompts are not: which queries share a tile depends on those before."""
        return False


@dataclass
class PagedMetadata(AttentionMetadata):
    """The requests of one step, for all layers of a group."""

    tokens: int
    paged: Paged


class PagedBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Makes :class:`PagedMetadata` of what vLLM knows of a step. vLLM puts requests with one new token first."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)
        logger.info("dmattn attends in %s", ", ".join(layer_names))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """Reads the numbers that vLLM has on the host; where it has no lengths there, waits for the device."""
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError("dmattn: expected causal attention, got a call that is not")
        new = common.query_start_loc_cpu.diff()
        longer = (new != 1).nonzero()
        decodes = int(longer[0]) if len(longer) else common.num_reqs
        upper = common.seq_lens_cpu_upper_bound
        lengths = common.seq_lens.cpu() if upper is None else upper
        paged = Paged(
            common.query_start_loc.int(), common.seq_lens.int(), common.block_table_tensor.int(), self.kv_cache_spec.block_size,
            decodes, int(lengths[decodes:].sum()), bool((lengths[decodes:] == new[decodes:]).all()),
        )  # fmt: skip
        return PagedMetadata(common.num_actual_tokens, paged)


class PagedImpl(AttentionImpl[PagedMetadata]):
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        refused = {"alibi_slopes": alibi_slopes is not None, "attn_type": attn_type != AttentionType.DECODER}
        refused["kv_cache_dtype"] = kv_cache_dtype not in PagedBackend.supported_kv_cache_dtypes
        for name, is_given in refused.items():
            if is_given:
                raise NotImplementedError(f"dmattn: {name}: not supported by this backend")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads or num_heads
        self.scale, self.kv_cache_dtype, self.softcap, self.sinks = float(scale), kv_cache_dtype, logits_soft_cap or 0.0, sinks
        self.window = sliding_window
        self.shares_cache = kv_sharing_target_layer_name is not None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [tokens, H, D], key and value [tokens, Hkv, D], kv_cache [pages, Hkv, page_size, 2 * D]; writes output [tokens, H, D]."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("dmattn: output_scale: not supported by this backend")
        if attn_metadata is None:  # a run that measures memory
            return output.fill_(0)
        tokens = attn_metadata.tokens
        keys, values = self._pools(kv_cache)
        new = None if self.shares_cache or key is None else (key[:tokens], value[:tokens])
        output[:tokens] = attn_metadata.paged.attend(
            query[:tokens], keys, values, new=new, scale=self.scale, window=self.window, softcap=self.softcap, sinks=self.sinks,
            choose=self.choose,
        )  # fmt: skip
        return output

    def choose(self, query: Tensor, table: Tensor, lengths: Tensor, page_size: int) -> IndexMask | None:
        """Which keys decoding reads, of those in a window; None: all."""
        return None

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Writes the new keys and values to their slots. vLLM keeps its first page free of tokens."""
        store(*self._pools(kv_cache), key, value, slot_mapping, spare=0)

    def _pools(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Views [pages, page_size, Hkv, D] of keys and values."""
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return keys, values
