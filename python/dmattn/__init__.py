"""dmattn: sparse attention for PyTorch, with dynamic masks in O(N) memory, forward and backward.

Start at :func:`attention` and :func:`dynamic_mask_attention`; masks are :class:`IntervalMask`, :class:`BlockMask` and :class:`IndexMask`;
the layer is :class:`dmattn.nn.DynamicMaskAttention`. ``python -m dmattn`` prints what this installation can do.
"""

import torch

from dmattn import _library

_library.load()

from dmattn import autograd, batching, fake, flops, profiling, reductions, torch_flash, unsupported  # noqa: E402, F401  (they register rules for the ops)
from dmattn import nn as nn  # noqa: E402
from dmattn._library import build_info, library_path  # noqa: E402
from dmattn._version import __version__  # noqa: E402
from dmattn.attention import attention, dynamic_mask_attention, key_scores  # noqa: E402
from dmattn.cache import BoundedCache  # noqa: E402
from dmattn.compat import flash_dma_attention, flash_dynamic_mask_attention  # noqa: E402
from dmattn.decode import decode_attention  # noqa: E402
from dmattn.flops import visible_pairs  # noqa: E402
from dmattn.index_loss import index_loss  # noqa: E402
from dmattn.indexer import index_scores, index_top_k  # noqa: E402
from dmattn.masks import ALWAYS, FOREVER, BlockMask, CombinedMask, IndexMask, IntervalMask  # noqa: E402
from dmattn.sdpa import scaled_dot_product_attention  # noqa: E402
from dmattn.sinks import lse_with_sink  # noqa: E402
from dmattn.stats import Stats, stats  # noqa: E402
from dmattn.varlen import varlen_attention  # noqa: E402
from dmattn.weights import attention_weights  # noqa: E402

from dmattn import eviction as eviction  # noqa: E402, isort: skip  (it is made of what stands above)

profiling.install()
torch_flash.register()
if torch.distributed.is_available():  # torch can be built without it
    from dmattn import distributed as distributed

unsupported.refuse_scripting(
    attention,
    decode_attention,
    dynamic_mask_attention,
    flash_dma_attention,
    flash_dynamic_mask_attention,
    key_scores,
    scaled_dot_product_attention,
    varlen_attention,
)

__all__ = [
    "ALWAYS",
    "FOREVER",
    "BlockMask",
    "BoundedCache",
    "CombinedMask",
    "IndexMask",
    "IntervalMask",
    "Stats",
    "__version__",
    "attention",
    "attention_weights",
    "build_info",
    "decode_attention",
    "dynamic_mask_attention",
    "eviction",
    "flash_dma_attention",
    "flash_dynamic_mask_attention",
    "index_loss",
    "index_scores",
    "index_top_k",
    "key_scores",
    "library_path",
    "lse_with_sink",
    "nn",
    "scaled_dot_product_attention",
    "stats",
    "varlen_attention",
    "visible_pairs",
]
