"""SGLang's attention backend on dmattn's kernels: prompts whole or in chunks, decoding, grouped heads, sliding windows, sinks, logit caps.

With ``--page-size`` a multiple of 16, decoding reads pages where they lie; with other sizes keys are copied in every step. A pool of its
own for sliding-window layers is refused (``--disable-hybrid-swa-memory``), as are cross attention, encoders, speculative decoding and CUDA
graphs. Lifetimes of single heads and lists of keys stand where :mod:`dmattn.integrations.vllm.backend` says: a slot holds a token for all
heads here, too.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from dmattn.decode import PAGE_UNIT
from dmattn.integrations.paged import Paged


class PagedAttention(AttentionBackend):
    """One model runner's attention."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.requests, self.pool = model_runner.req_to_token_pool, model_runner.token_to_kv_pool
        self.page_size = int(getattr(model_runner, "page_size", 1) or 1)
        if hasattr(self.pool, "swa_kv_pool"):
            raise NotImplementedError(
                "dmattn: a pool of its own for sliding windows: start SGLang with --disable-hybrid-swa-memory"
            )
        self.forward_metadata: Paged | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """What all layers of a step share. A batch is decoding, one new token each, or none of it is."""
        batch, mode = forward_batch, forward_batch.forward_mode
        if batch.encoder_lens is not None or getattr(batch, "spec_info", None) is not None:
            raise NotImplementedError("dmattn: cross attention and speculative decoding: not supported by this backend")
        lengths = batch.seq_lens.int()
        host = batch.seq_lens.cpu() if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        is_decode = mode.is_decode()
        new = torch.ones_like(lengths) if is_decode else batch.extend_seq_lens.int()
        ends = torch.nn.functional.pad(new.cumsum(0, dtype=torch.int32), (1, 0))
        in_pages = is_decode and self.page_size % PAGE_UNIT == 0
        # Slots of pages are neighbours: the first slot of a page tells which it is.
        longest = int(host.max()) if len(host) else 0
        slots = self.requests.req_to_token[batch.req_pool_indices, : max(longest, 1)]
        table = torch.div(slots[:, :: self.page_size], self.page_size, rounding_mode="floor").int()
        prefixes = getattr(batch, "extend_prefix_lens_cpu", None)
        is_fresh = not is_decode and prefixes is not None and not any(prefixes)
        decodes, most_keys = (len(host), 0) if in_pages else (0, int(host.sum()))
        self.forward_metadata = Paged(ends, lengths, table, self.page_size, decodes, most_keys, is_fresh)

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
        sinks: Tensor | None = None, **more: Any,
    ) -> Tensor:  # fmt: skip
        """q [tokens, H * D], k and v [tokens, Hkv, D|Dv] -> [tokens, H * Dv]."""
        if layer.is_cross_attention or "encoder" in str(getattr(layer.attn_type, "value", layer.attn_type)):
            raise NotImplementedError("dmattn: cross attention and encoders: not supported by this backend")
        if any(given is not None for given in more.values()):
            raise NotImplementedError(f"dmattn: {', '.join(sorted(more))}: not supported by this backend")
        assert self.forward_metadata is not None
        new = None
        if k is not None and v is not None:
            new = (k.view(-1, layer.tp_k_head_num, layer.qk_head_dim), v.view(-1, layer.tp_v_head_num, layer.v_head_dim))
            if save_kv_cache:
                self.pool.set_kv_buffer(layer, forward_batch.out_cache_loc, *new)
        keys, values = (
            slots.view(-1, self.page_size, *slots.shape[1:])
            for slots in (self.pool.get_key_buffer(layer.layer_id), self.pool.get_value_buffer(layer.layer_id))
        )
        window = layer.sliding_window_size  # of earlier keys, the query's own not among them; -1: all
        out = self.forward_metadata.attend(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), keys, values, new=new, scale=layer.scaling,
            window=None if window is None or window < 0 else window + 1, softcap=float(layer.logit_cap or 0.0), sinks=sinks,
        )  # fmt: skip
        return out.reshape(q.shape[0], -1)

    forward_decode = forward_extend  # with one new token of each request

    def support_triton(self) -> bool:
        return False
