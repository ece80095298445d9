"""The backend for vLLM against its interface: vLLM's own classes where it can be imported, and stand-ins of the same shape elsewhere."""

from __future__ import annotations

import importlib.util
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Generic, TypeVar

import pytest
import torch
from devices import DEVICE
from dmattn import attention

HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 16, 16
BACKEND, REGISTRY = "vllm.v1.attention.backend", "vllm.v1.attention.backends.registry"
IS_INSTALLED = importlib.util.find_spec("vllm") is not None
Metadata = TypeVar("Metadata")


class Builder(Generic[Metadata]):
    """What the base class of vLLM 0.32 does."""

    reorder_batch_threshold = None

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names

    def _init_reorder_batch_threshold(self, threshold):
        self.reorder_batch_threshold = threshold


class Impl(Generic[Metadata]):
    pass


@pytest.fixture
def backend(monkeypatch):
    """The backend's module, and what its plugin registered."""
    registered = {}
    if not IS_INSTALLED:
        names = ["vllm", "vllm.logger", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends", BACKEND, REGISTRY]
        modules = {name: ModuleType(name) for name in names}
        modules["vllm.logger"].init_logger = logging.getLogger
        for name in ("AttentionBackend", "AttentionMetadata", "CommonAttentionMetadata"):
            setattr(modules[BACKEND], name, type(name, (), {}))
        modules[BACKEND].AttentionImpl, modules[BACKEND].AttentionMetadataBuilder = Impl, Builder
        modules[BACKEND].AttentionType = SimpleNamespace(DECODER="decoder")
        modules[BACKEND].MultipleOf = lambda number: ("multiple of", number)
        modules[REGISTRY].AttentionBackendEnum = SimpleNamespace(CUSTOM="CUSTOM", CPU_ATTN="CPU_ATTN")
        modules[REGISTRY].register_backend = registered.__setitem__
        for name, module in modules.items():
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)
    ours = ("dmattn.integrations.vllm", "dmattn.integrations.vllm.backend")
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    plugin, module = (importlib.import_module(name) for name in ours)
    yield SimpleNamespace(plugin=plugin, module=module, registered=registered)
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.skipif(IS_INSTALLED, reason="vLLM's own registry is tested instead")
def test_the_plugin_registers(backend, monkeypatch):
    monkeypatch.delenv("DMATTN_VLLM_CPU", raising=False)
    backend.plugin.register()
    assert backend.registered == {"CUSTOM": backend.plugin.BACKEND}
    monkeypatch.setenv("DMATTN_VLLM_CPU", "1")
    backend.plugin.register()
    assert backend.registered == dict.fromkeys(("CUSTOM", "CPU_ATTN"), backend.plugin.BACKEND)


def test_what_the_backend_says_of_itself(backend):
    paged = backend.module.PagedBackend
    assert (paged.get_name(), paged.get_impl_cls(), paged.get_builder_cls()) == (
        "CUSTOM", backend.module.PagedImpl, backend.module.PagedBuilder,
    )  # fmt: skip
    assert [paged.supports_head_size(size) for size in (8, 80, 256, 0, 12, 264)] == [True, True, True, False, False, False]
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    assert [paged.supports_dtype(dtype) for dtype in dtypes] == [DEVICE == "cpu", True, True, False]
    assert paged.supports_sink()
    assert paged.supports_sliding_window()
    assert not paged.supports_batch_invariance()
    assert paged.get_supported_kernel_block_sizes()


def step_of(backend, table, lengths, new, knows_lengths):
    """One step's metadata, as a runner builds it. lengths and new: of each request, those with one new token first."""
    ends = torch.tensor([0, *new]).cumsum(0).int()
    held = torch.tensor(lengths, dtype=torch.int32)
    common = SimpleNamespace(
        causal=True, query_start_loc=ends, query_start_loc_cpu=ends, seq_lens=held, num_reqs=len(new), num_actual_tokens=sum(new),
        block_table_tensor=table, seq_lens_cpu_upper_bound=held if knows_lengths else None,
    )  # fmt: skip
    config = SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=1), speculative_config=None)
    builder = backend.module.PagedBuilder(SimpleNamespace(block_size=PAGE), ["layer"], config, torch.device("cpu"))
    assert builder.reorder_batch_threshold == 1
    with pytest.raises(NotImplementedError, match="expected causal attention"):
        builder.build(0, SimpleNamespace(**{**vars(common), "causal": False}))
    return builder.build(0, common)


@pytest.mark.parametrize(
    "more", [{}, {"sliding_window": 20}, {"logits_soft_cap": 5.0}, {"sinks": True}, {"kv_sharing_target_layer_name": "x"}]
)
@pytest.mark.parametrize("knows_lengths", [True, False])
def test_steps_of_a_server(backend, more, knows_lengths):
    """A prompt alone, then a chunk of another beside decoding, then decoding; padded tokens behind."""
    more = dict(more)
    if "sinks" in more:
        more["sinks"] = torch.randn(HEADS)
    layer = backend.module.PagedImpl(HEADS, SIZE, 0.3, KV_HEADS, **more)
    cache = torch.full((20, KV_HEADS, PAGE, 2 * SIZE), torch.nan, dtype=torch.float64)
    table = (torch.randperm(18)[:12] + 1).view(2, 6).int()  # page 0 is vLLM's own
    said = [torch.zeros(2, 0, KV_HEADS, SIZE, dtype=torch.float64) for _ in range(2)]
    for new in ([40], [1, 30], [1, 9], [1, 1]):
        tokens, rows = sum(new), len(new)
        key, value = torch.randn(2, tokens + 3, KV_HEADS, SIZE, dtype=torch.float64)
        query = torch.randn(tokens + 3, HEADS, SIZE, dtype=torch.float64)
        slots = []
        for row, (own_key, own_value) in enumerate(zip(key[:tokens].split(new), value[:tokens].split(new), strict=True)):
            places = said[row].shape[1] + torch.arange(len(own_key))
            slots.append(table[row, places // PAGE].long() * PAGE + places % PAGE)
            said[row] = torch.cat([said[row], torch.stack([own_key, own_value])], 1)
        layer.do_kv_cache_update(None, key, value, cache, torch.cat([*slots, torch.tensor([-1])]))
        metadata = step_of(backend, table[:rows], [each.shape[1] for each in said[:rows]], new, knows_lengths)
        assert metadata.paged.decodes == sum(n == 1 for n in new)
        out = torch.full_like(query, torch.nan)
        assert layer.forward(None, query, key, value, cache, metadata, out) is out
        expected = []
        for own, (own_key, own_value) in zip(query[:tokens].split(new), said, strict=False):
            behind = torch.arange(own_key.shape[0])[-len(own) :, None] - torch.arange(own_key.shape[0])
            visible = (behind >= 0) & (behind < more.get("sliding_window", 10**6))
            given = (x.transpose(0, 1)[None] for x in (own, own_key, own_value))
            whole = attention(*given, visible, scale=0.3, softcap=more.get("logits_soft_cap", 0.0), sinks=more.get("sinks"))
            expected.append(whole[0].transpose(0, 1))
        torch.testing.assert_close(out[:tokens], torch.cat(expected))
        assert out[tokens:].isnan().all()


def test_what_is_refused(backend):
    for name, value in {"alibi_slopes": [1.0], "attn_type": "encoder_only", "kv_cache_dtype": "fp8"}.items():
        with pytest.raises(NotImplementedError, match=name):
            backend.module.PagedImpl(HEADS, SIZE, 1.0, KV_HEADS, **{name: value})
    layer, rows = backend.module.PagedImpl(HEADS, SIZE, 1.0), torch.full((3, HEADS, SIZE), torch.nan)
    with pytest.raises(NotImplementedError, match="output_scale"):
        layer.forward(None, rows, rows, rows, rows, None, rows, torch.ones(1))
    assert not layer.forward(None, rows, rows, rows, rows, None, rows).any()  # a run that measures memory
