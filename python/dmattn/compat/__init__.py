"""The functions of earlier systems, with their names, arguments and layouts, computed by dmattn: docs/other_libraries.md says what differs.

``from dmattn.compat.flash_attn import flash_attn_func`` takes the place of ``from flash_attn import flash_attn_func``, and so on.
"""

from __future__ import annotations

from dmattn.compat import block_sparse_attn, flash_attn, flash_dmattn, flashkernel, flashmask, triton_flashattn
from dmattn.compat.early import flash_dma_attention, flash_dynamic_mask_attention

__all__ = [
    "block_sparse_attn",
    "flash_attn",
    "flash_dma_attention",
    "flash_dmattn",
    "flash_dynamic_mask_attention",
    "flashkernel",
    "flashmask",
    "triton_flashattn",
]
