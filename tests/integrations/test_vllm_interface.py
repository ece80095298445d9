"""The backend for vLLM against its interface: vLLM's own classes where it can be imported, and stand-ins of the same shape elsewhere."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
from devices import DEVICE
from dmattn import attention, eviction

HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 16, 16
BACKEND, REGISTRY = "vllm.v1.attention.backend", "vllm.v1.attention.backends.registry"
SPECS = "vllm.v1.kv_cache_interface"
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


@dataclasses.dataclass(frozen=True)
class Spec:
    """The fields of a layer's spec that ours reads or sets."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: Any


@pytest.fixture
def backend(monkeypatch):
    """The backend's module, and what its plugin registered."""
    registered = {}
    if not IS_INSTALLED:
        names = ["vllm", "vllm.logger", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends", BACKEND, REGISTRY, SPECS]
        modules = {name: ModuleType(name) for name in names}
        modules["vllm.logger"].init_logger = logging.getLogger
        for name in ("AttentionBackend", "AttentionMetadata", "CommonAttentionMetadata"):
            setattr(modules[BACKEND], name, type(name, (), {}))
        modules[BACKEND].AttentionImpl, modules[BACKEND].AttentionMetadataBuilder = Impl, Builder
        modules[BACKEND].AttentionType = SimpleNamespace(DECODER="decoder")
        modules[BACKEND].MultipleOf = lambda number: ("multiple of", number)
        modules[REGISTRY].AttentionBackendEnum = SimpleNamespace(CUSTOM="CUSTOM", CPU_ATTN="CPU_ATTN")
        modules[REGISTRY].register_backend = registered.__setitem__
        modules[SPECS].AttentionSpec = modules[SPECS].CircularBufferSpec = Spec
        for name, module in modules.items():
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)
    ours = tuple(f"dmattn.integrations.vllm{part}" for part in ("", ".backend", ".evicting", ".listed"))
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    plugin, module, evicting, listed = (importlib.import_module(name) for name in ours)
    yield SimpleNamespace(plugin=plugin, module=module, evicting=evicting, listed=listed, registered=registered)
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.skipif(IS_INSTALLED, reason="vLLM's own registry is tested instead")
def test_the_plugin_registers(backend, monkeypatch):
    monkeypatch.delenv("DMATTN_VLLM_CPU", raising=False)
    for name, path in backend.plugin.OTHERS.items():
        monkeypatch.setenv(name, "{}")
        backend.plugin.register()
        monkeypatch.delenv(name)
        assert backend.registered == {"CUSTOM": path}
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


# Eviction, and lists ---------------------------------------------------------------------------------------------------------------------


def common_of(table, lengths, new):
    ends, held = torch.tensor([0, *new]).cumsum(0).int(), torch.tensor(lengths, dtype=torch.int32)
    return SimpleNamespace(
        causal=True, query_start_loc=ends, query_start_loc_cpu=ends, seq_lens=held, num_reqs=len(new), num_actual_tokens=sum(new),
        block_table_tensor=table, seq_lens_cpu_upper_bound=held,
    )  # fmt: skip


@pytest.mark.parametrize(
    "policy",
    [{"policy": "KeyNorm", "budget": 20, "every": 8, "sink_keys": 2}, {"policy": "H2O", "budget": 30, "every": 8, "floor": 0.5}],
    ids=["budgets of heads", "shared budgets"],
)
def test_a_policy_evicts_in_blocks_of_requests(backend, policy, monkeypatch):
    """Prompts in chunks beside decoding see what lifetimes say, in one block a request; the last request comes into a block that was used."""
    monkeypatch.setenv("DMATTN_VLLM_EVICT", json.dumps(policy))
    chosen = backend.evicting.policy_of()
    kind = importlib.import_module(SPECS).AttentionSpec
    given = kind(block_size=16, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float64)
    spec = backend.evicting.EvictingBackend.customize_spec(given)
    assert spec.block_size % PAGE == 0
    assert chosen.budget + chosen.every <= spec.block_size < chosen.budget + chosen.every + 2 * PAGE
    layer = backend.evicting.EvictingBackend.get_impl_cls()(HEADS, SIZE, 0.3, KV_HEADS)
    cache = torch.full((4, spec.block_size, KV_HEADS, 2 * SIZE), torch.nan, dtype=torch.float64).transpose(1, 2)
    config = SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=1), speculative_config=None)
    builder = backend.evicting.EvictingBackend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
    said: dict[str, list[torch.Tensor]] = {}
    # Which requests come with how many tokens; "c" gets the block of "b", which was aborted.
    for step in ({"a": 50}, {"a": 1, "b": 60}, {"a": 1, "b": 1}, {"a": 1, "c": 20}, {"a": 1, "c": 41}, {"a": 1, "c": 1}):
        new = list(step.values())
        query = torch.randn(sum(new) + 2, HEADS, SIZE, dtype=torch.float64)
        key, value = torch.randn(2, sum(new) + 2, KV_HEADS, SIZE, dtype=torch.float64)
        for name, *rows in zip(step, *(x[: sum(new)].split(new) for x in (query, key, value)), strict=True):
            said[name] = [torch.cat(both) for both in zip(said.get(name, [x[:0] for x in rows]), rows, strict=True)]
        table = torch.tensor([[{"a": 1, "b": 3, "c": 3}[name]] for name in step], dtype=torch.int32)
        layer.do_kv_cache_update(None, key, value, cache, torch.zeros(len(key), dtype=torch.int64))
        metadata = builder.build(0, common_of(table, [len(said[name][0]) for name in step], new))
        out = layer.forward(None, query, key, value, cache, metadata, torch.zeros_like(query))
        for name, own in zip(step, out[: sum(new)].split(new), strict=True):
            given = [x.transpose(0, 1)[None] for x in said[name]]
            whole = attention(*given, eviction.lifetimes(chosen, *given, scale=0.3), scale=0.3)
            torch.testing.assert_close(own, whole[0].transpose(0, 1)[-len(own) :])
    with pytest.raises(RuntimeError, match="a request goes on that has lost its block"):
        layer.forward(None, query, key, value, cache, builder.build(0, common_of(table, [50, 90], new)), out)


@pytest.mark.parametrize("local", [20, 5])
def test_lists_of_pages(backend, monkeypatch, local):
    """Decoding sees the pages that its queries choose by their mean keys, the latest keys and the first ones; prompts see all."""
    monkeypatch.setenv("DMATTN_VLLM_LISTS", f'{{"pages": 2, "local": {local}, "sink_keys": 3}}')
    layer = backend.listed.ListedBackend.get_impl_cls()(HEADS, SIZE, 0.3, KV_HEADS)
    cache = torch.full((20, KV_HEADS, PAGE, 2 * SIZE), torch.nan, dtype=torch.float64)
    table = (torch.randperm(18)[:8] + 1).view(1, 8).int()
    keys, values = torch.randn(2, 110, KV_HEADS, SIZE, dtype=torch.float64)
    differ = 0
    for first, last in ((0, 50), (50, 51), (51, 100), *((p, p + 1) for p in range(100, 110))):
        query, places = torch.randn(last - first, HEADS, SIZE, dtype=torch.float64), torch.arange(first, last)
        new = keys[first:last], values[first:last]
        layer.do_kv_cache_update(None, *new, cache, table[0, places // PAGE].long() * PAGE + places % PAGE)
        metadata = step_of(backend, table, [last], [last - first], True)
        out = layer.forward(None, query, *new, cache, metadata, torch.zeros_like(query))
        visible = places[:, None] >= torch.arange(last)
        if last - first == 1:
            pages = torch.arange(last) // PAGE
            score = query[0].unflatten(0, (KV_HEADS, -1)).mean(1)[:, None] @ keys[:last].permute(1, 2, 0)  # [Hkv, 1, keys]
            of_pages = torch.stack([score[:, 0, pages == page].mean(1) for page in range((last - local - 1) // PAGE + 1)], 1)
            chosen = (pages == of_pages.topk(2, 1).indices[..., None]).any(1)
            seen = chosen | (torch.arange(last) >= last - local) | (torch.arange(last) < 3)
            visible, differ = seen.repeat_interleave(HEADS // KV_HEADS, 0)[None, :, None], differ + int(not seen.all())
        given = (x.transpose(0, 1)[None] for x in (query, keys[:last], values[:last]))
        torch.testing.assert_close(out, attention(*given, visible, scale=0.3)[0].transpose(0, 1))
    assert differ == (10 if local == 20 else 11)


def test_what_eviction_and_lists_refuse(backend, monkeypatch):
    monkeypatch.setenv("DMATTN_VLLM_EVICT", '{"policy": "TOVA", "budget": 4}')
    monkeypatch.setenv("DMATTN_VLLM_LISTS", '{"pages": 0}')
    for given in ('{"policy": "Policy.rank"}', '["TOVA"]', '{"policy": "lifetimes"}'):
        with pytest.raises(ValueError, match="expected an object with the name of a policy"):
            backend.evicting.policy_of(given)
    with pytest.raises(ValueError, match="pages: expected"):
        backend.listed.ListedImpl(HEADS, SIZE, 1.0)
    monkeypatch.setenv("DMATTN_VLLM_LISTS", '{"pages": 1}')
    for kind in (backend.evicting.EvictingImpl, backend.listed.ListedImpl):
        with pytest.raises(NotImplementedError, match="share"):
            kind(HEADS, SIZE, 1.0, kv_sharing_target_layer_name="x")
    with pytest.raises(NotImplementedError, match="sliding windows"):
        backend.evicting.EvictingBackend.customize_spec(SimpleNamespace(sliding_window=5))
    layer, rows = backend.evicting.EvictingImpl(HEADS, SIZE, 1.0), torch.full((3, HEADS, SIZE), torch.nan)
    assert not layer.forward(None, rows, rows, rows, rows, None, rows).any()
    with pytest.raises(NotImplementedError, match="expected blocks of whole pages"):
        backend.evicting.BlockPool(torch.zeros(3, 2, 10, 8)[:, :, :8], 4)
