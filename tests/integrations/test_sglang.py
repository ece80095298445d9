"""The adapter for SGLang against its interface: its own classes where SGLang can be imported, and stand-ins of the same shape elsewhere."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from dmattn import attention

HEADS, KV_HEADS, SIZE, LAYER = 4, 2, 16, 3
REGISTRY, BASE = "sglang.srt.layers.attention.attention_registry", "sglang.srt.layers.attention.base_attn_backend"

IS_INSTALLED = importlib.util.find_spec("sglang") is not None


class StandIn:
    """What the base class of SGLang 0.5.23 does with a call."""

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        run = self.forward_decode if forward_batch.forward_mode.is_decode() else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


@pytest.fixture
def backend(monkeypatch):
    """The adapter's module, and the registry and the command line's choices that its plugin writes to."""
    registered, choices = {}, []
    if not IS_INSTALLED:
        names = [
            "sglang",
            "sglang.srt",
            "sglang.srt.layers",
            "sglang.srt.layers.attention",
            REGISTRY,
            BASE,
            "sglang.srt.server_args",
        ]
        modules = {name: ModuleType(name) for name in names}
        modules[BASE].AttentionBackend = StandIn
        modules[REGISTRY].register_attention_backend = lambda name: lambda made: registered.setdefault(name, made)
        modules["sglang.srt.server_args"].add_attention_backend_choices = choices.extend
        modules["sglang.srt"].server_args = modules["sglang.srt.server_args"]
        for name, module in modules.items():
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)
    else:
        registry = importlib.import_module(REGISTRY)
        arguments = importlib.import_module("sglang.srt.server_args")
        registered, choices = registry.ATTENTION_BACKENDS, arguments.ATTENTION_BACKEND_CHOICES
    for name in ("dmattn.integrations.sglang", "dmattn.integrations.sglang.backend"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    plugin = importlib.import_module("dmattn.integrations.sglang")
    yield SimpleNamespace(plugin=plugin, make=plugin.PagedAttention, registered=registered, choices=choices)
    for name in ("dmattn.integrations.sglang", "dmattn.integrations.sglang.backend"):
        monkeypatch.delitem(sys.modules, name, raising=False)


class Pool:
    """Keys and values of one layer by slot."""

    def __init__(self, slots):
        self.keys, self.values = (torch.full((slots, KV_HEADS, SIZE), torch.nan, dtype=torch.float64) for _ in range(2))

    def set_kv_buffer(self, layer, loc, keys, values):
        assert layer.layer_id == LAYER
        self.keys[loc], self.values[loc] = keys, values

    def get_key_buffer(self, layer_id):
        return self.keys

    def get_value_buffer(self, layer_id):
        return self.values


def mode_of(is_decode):
    return SimpleNamespace(is_decode=lambda: is_decode, is_idle=lambda: False, is_mixed=lambda: False)


class Server:
    """A runner whose requests grow step by step, and what each of them has said so far."""

    def __init__(self, page_size, requests=3, most=96):
        pages = torch.randperm(requests * most // page_size) + 1
        slots = (pages[:, None] * page_size + torch.arange(page_size)).view(requests, most)
        self.table = torch.zeros(requests + 2, most, dtype=torch.int32)
        self.rows = torch.tensor([4, 1, 2])
        self.table[self.rows] = slots.int()
        self.pool, self.lengths = Pool((requests * most // page_size + 2) * page_size), [0] * requests
        self.runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=self.pool,
            page_size=page_size,
            device="cpu",
        )
        self.said = [torch.zeros(2, 0, KV_HEADS, SIZE, dtype=torch.float64) for _ in range(requests)]

    def step(self, new, is_decode=False):
        """A batch, q, k and v for ``new`` tokens of each request."""
        places = [self.table[row, n : n + m].long() for row, n, m in zip(self.rows, self.lengths, new, strict=True)]
        prefixes = list(self.lengths)
        keys = [torch.randn(2, m, KV_HEADS, SIZE, dtype=torch.float64) for m in new]
        self.said = [torch.cat([old, more], 1) for old, more in zip(self.said, keys, strict=True)]
        self.lengths = [n + m for n, m in zip(self.lengths, new, strict=True)]
        lengths = torch.tensor(self.lengths)
        batch = SimpleNamespace(
            forward_mode=mode_of(is_decode), encoder_lens=None, spec_info=None, seq_lens=lengths, seq_lens_cpu=lengths,
            req_pool_indices=self.rows, out_cache_loc=torch.cat(places), extend_seq_lens=None if is_decode else torch.tensor(new),
            extend_prefix_lens=None if is_decode else torch.tensor(prefixes), extend_prefix_lens_cpu=None if is_decode else prefixes,
        )  # fmt: skip
        k, v = torch.cat(keys, 1).flatten(2)
        return batch, torch.randn(sum(new), HEADS * SIZE, dtype=torch.float64), k, v

    def expected(self, q, new, window, options):
        outs = []
        for own, (key, value) in zip(q.view(-1, HEADS, SIZE).split(new), self.said, strict=True):
            behind = torch.arange(key.shape[0])[-len(own) :, None] - torch.arange(key.shape[0])
            visible = (behind >= 0) & ((behind <= window) if window >= 0 else True)
            rows = (x.transpose(0, 1)[None] for x in (own, key, value))
            outs.append(attention(*rows, visible, **options)[0].transpose(0, 1))
        return torch.cat(outs).flatten(1)


def layer_of(window=-1, cap=0.0, **more):
    usual = {
        "layer_id": LAYER, "tp_q_head_num": HEADS, "tp_k_head_num": KV_HEADS, "tp_v_head_num": KV_HEADS, "qk_head_dim": SIZE,
        "v_head_dim": SIZE, "scaling": 0.2, "logit_cap": cap, "sliding_window_size": window, "is_cross_attention": False,
        "attn_type": SimpleNamespace(value="decoder"),
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **more})


STEPS = [([20, 3, 40], False), ([7, 30, 1], False), ([1, 1, 1], True), ([1, 1, 1], True)]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("window", "cap", "has_sinks"), [(-1, 0.0, False), (9, 0.0, True), (-1, 4.0, False)])
def test_a_prompt_in_chunks_and_decoding(backend, page_size, window, cap, has_sinks):
    server, layer = Server(page_size), layer_of(window, cap)
    ours = backend.make(server.runner)
    more = {"sinks": torch.randn(HEADS)} if has_sinks else {}
    for new, is_decode in STEPS:
        batch, q, k, v = server.step(new, is_decode)
        ours.init_forward_metadata(batch)
        assert ours.forward_metadata.decodes == (3 if is_decode and page_size == 16 else 0)
        out = ours.forward(q, k, v, layer, batch, **more)
        torch.testing.assert_close(out, server.expected(q, new, window, {"scale": 0.2, "softcap": cap, **more}))
    for row, keys in zip(server.rows, server.said, strict=True):
        slots = server.table[row, : keys.shape[1]].long()
        assert torch.equal(server.pool.keys[slots], keys[0])
        assert torch.equal(server.pool.values[slots], keys[1])


def test_the_plugin_registers(backend):
    backend.plugin.register()
    assert backend.registered["dmattn"] is backend.make
    assert "dmattn" in backend.choices


def test_what_is_refused(backend):
    server = Server(16)
    with pytest.raises(NotImplementedError, match="disable-hybrid-swa-memory"):
        backend.make(SimpleNamespace(**{**vars(server.runner), "token_to_kv_pool": SimpleNamespace(swa_kv_pool=None)}))
    ours, (batch, q, k, v) = backend.make(server.runner), server.step([2, 2, 2])
    for name in ("encoder_lens", "spec_info"):
        with pytest.raises(NotImplementedError, match="cross attention and speculative decoding"):
            ours.init_forward_metadata(SimpleNamespace(**{**vars(batch), name: object()}))
    ours.init_forward_metadata(batch)
    for wrong in ({"is_cross_attention": True}, {"attn_type": SimpleNamespace(value="encoder_only")}):
        with pytest.raises(NotImplementedError, match="cross attention and encoders"):
            ours.forward_extend(q, k, v, layer_of(**wrong), batch)
    with pytest.raises(NotImplementedError, match="k_rope: not supported"):
        ours.forward_extend(q, k, v, layer_of(), batch, k_rope=k)
    assert not ours.support_triton()


@pytest.mark.skipif(not IS_INSTALLED, reason="SGLang is not installed")
def test_as_sglang_s_own_backend(backend):
    """Its torch_native backend on the same requests."""
    native = importlib.import_module("sglang.srt.layers.attention.torch_native_backend")
    server, layer = Server(16), layer_of(5)
    layer.attn_type = native.AttentionType.DECODER
    other = SimpleNamespace(**{**vars(server.runner), "token_to_kv_pool": Pool(len(server.pool.keys))})
    other.token_to_kv_pool.set_kv_buffer = lambda *given: None  # they share the slots, and ours writes them
    other.token_to_kv_pool.keys, other.token_to_kv_pool.values = server.pool.keys, server.pool.values
    ours, theirs = backend.make(server.runner), native.TorchNativeAttnBackend(other)
    for new, is_decode in STEPS:
        batch, q, k, v = server.step(new, is_decode)
        for each in (ours, theirs):
            each.init_forward_metadata(batch)
        out = ours.forward(q, k, v, layer, batch)
        torch.testing.assert_close(out, theirs.forward(q, k, v, layer, batch))
