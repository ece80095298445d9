"""SGLang on dmattn's kernels: a plugin that registers :class:`~dmattn.integrations.sglang.backend.PagedAttention` as ``dmattn``.

    python -m sglang.launch_server --model-path MODEL --attention-backend dmattn --page-size 16 --disable-cuda-graph

SGLang calls :func:`register` in each of its processes, through the entry point ``sglang.srt.plugins``. It was tested against SGLang's
classes on a CPU and has not run in its engine: that needs a GPU, or a build of SGLang's own CPU kernels.
"""

from __future__ import annotations

from sglang.srt import server_args
from sglang.srt.layers.attention.attention_registry import register_attention_backend

from dmattn.integrations.sglang.backend import PagedAttention


def register() -> None:
    """The plugin: the backend's name, for the registry and for the command line."""
    register_attention_backend("dmattn")(PagedAttention)
    server_args.add_attention_backend_choices(["dmattn"])
