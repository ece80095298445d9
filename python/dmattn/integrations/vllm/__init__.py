"""vLLM on dmattn's kernels: a plugin that registers the attention backend :class:`~dmattn.integrations.vllm.backend.PagedBackend`.

    pip install ".[vllm]"        # in a checkout of dmattn
    vllm serve MODEL --attention-backend CUSTOM

On a CPU it gave the same tokens as vLLM's own attention, which took three quarters of the processor time with a tiny model
(``benchmarks/vllm_server.py``). It has not run on a GPU.

vLLM calls :func:`register` in each of its processes, through the entry point ``vllm.general_plugins``. Its CPU platform takes no backend by
name; ``DMATTN_VLLM_CPU=1`` puts ours in the place of its own there. ``DMATTN_VLLM_EVICT`` bounds the memory of a request
(:mod:`~dmattn.integrations.vllm.evicting`), ``DMATTN_VLLM_LISTS`` decodes with lists (:mod:`~dmattn.integrations.vllm.listed`).
"""

from __future__ import annotations

import os

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

BACKEND = "dmattn.integrations.vllm.backend.PagedBackend"
# By the variable that asks for them.
OTHERS = {
    "DMATTN_VLLM_EVICT": "dmattn.integrations.vllm.evicting.EvictingBackend",
    "DMATTN_VLLM_LISTS": "dmattn.integrations.vllm.listed.ListedBackend",
}


def register() -> None:
    """The plugin: the backend's path under the name CUSTOM, and under CPU_ATTN if DMATTN_VLLM_CPU is 1."""
    backend = next((path for name, path in OTHERS.items() if os.environ.get(name)), BACKEND)
    register_backend(AttentionBackendEnum.CUSTOM, backend)
    if os.environ.get("DMATTN_VLLM_CPU") == "1":
        register_backend(AttentionBackendEnum.CPU_ATTN, backend)
