"""What lies at the limits: the longest lengths, no work at all, lengths that would wrap in 32 bits, and what is refused with a sentence."""

from __future__ import annotations

import time

import dmattn
import pytest
import torch
from dmattn import IntervalMask
from dmattn.compat import flash_dmattn
from dmattn.compat.flash_attn import flash_attn_func
from dmattn.compat.flash_dmattn import flash_dmattn_func
from dmattn.testing import strategies

ops = torch.ops.dmattn
tensor = strategies.random_tensor
LONGEST = 1 << 20
OPTIONS = (False, 1.0, 0.0, 0.0, False)


def repeated(length, heads=1, size=8, dtype=torch.float32, device="cpu"):
    """[1, heads, length, size] whole numbers in the memory of one row."""
    return tensor((1, heads, 1, size), length % 7, dtype, device).round().expand(1, heads, length, size)


# The longest lengths ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", [(4096, 32), (32, 4096)])
def test_the_largest_tile_is_taken(device, tiles):
    mask = torch.ones(1, 1, 40, 4100, dtype=torch.bool, device=device)
    table = ops.pack_tiles(mask, 40, 4100, 1, 1, *tiles)[0]
    inside = (-(-40 // tiles[0]), -(-4100 // tiles[1]))
    assert (table[0, 0, : inside[0], : inside[1]] == 1).all()  # full
    with pytest.raises(RuntimeError, match=r"tile_[qk]: expected a multiple of 32 up to 4096, got 4128"):
        ops.pack_tiles(mask, 40, 4100, 1, 1, *(tile + 32 if tile == 4096 else tile for tile in tiles))


def test_gradients_of_more_keys_than_tasks_may_sum_apart():
    """On a CPU each task sums gradients of keys in memory of its own, unless all of it would be more than 256 MB, as here."""
    length = (1 << 19) + 1
    query, key, value = (tensor((1, 1, 1, 32), seed, torch.float64).requires_grad_() for seed in range(3))
    out = dmattn.attention(query, key.expand(1, 1, length, 32), value.expand(1, 1, length, 32))
    grad_out = tensor(out.shape, 3, torch.float64)
    grad_query, grad_key, grad_value = torch.autograd.grad(out, (query, key, value), grad_out)
    torch.testing.assert_close(out, value)
    torch.testing.assert_close(grad_value, grad_out)
    torch.testing.assert_close(torch.cat((grad_query, grad_key)), torch.zeros(2, 1, 1, 32, dtype=torch.float64))  # keys are alike


def test_what_is_exactly_at_the_limit_is_taken(device):
    query = repeated(9, device=device)
    out, _ = dmattn.attention(query, query, query, is_causal=True, scale=1e30, return_lse=True)
    torch.testing.assert_close(out, query)
    indexed = repeated(LONGEST, device=device)[:, :, :, None]
    weights = torch.ones(1, 1, 1, 1, device=device).expand(1, 1, LONGEST, 1)
    assert dmattn.index_top_k(indexed, repeated(LONGEST, device=device), weights, 0).indices.shape == (1, 1, LONGEST, 0)


@pytest.mark.parametrize("window", [2**31, 2**32 + 2, 2**63 - 1])
def test_a_local_window_and_sinks_beyond_32_bits_keep_every_key(device, window):
    scores = torch.full((1, 2, 40), -torch.inf, device=device)
    causal = IntervalMask.causal(40, device=device).to_bool(40, 40).expand(1, 2, 40, 40)
    for sizes in ({"local": window}, {"sink_keys": window}, {"local": window, "sink_keys": window}):
        for own in (0, 3, window):
            assert torch.equal(IntervalMask.top_k(scores, own, **sizes).to_bool(40, 40), causal)


@pytest.mark.parametrize("window", [2**31, 2**32 + 2, 2**63 - 1])
def test_a_window_beyond_32_bits_keeps_every_key(device, window):
    scores = tensor((1, 2, 40), 0, device=device)
    for causal in (True, False):
        expected = IntervalMask.top_k(scores, 40, causal).end
        assert torch.equal(IntervalMask.top_k(scores, window, causal).end, expected)
        assert torch.equal(ops.select(scores, None, window, causal), expected)


# No work ------------------------------------------------------------------------------------------------------------------------------


def empty(*sizes, device, dtype=torch.float32):
    return torch.empty(sizes, device=device, dtype=dtype)


EMPTY = {
    "select": lambda d, t: [ops.select(empty(2**36, 1, 0, device=d), None, 3, causal) for causal in (True, False)],
    "select with segments": lambda d, t: [
        ops.select(empty(2**36, 1, 0, device=d), empty(1, 1, 0, device=d, dtype=torch.int32), 3, causal) for causal in (True, False)
    ],
    "top_k": lambda d, t: IntervalMask.top_k(empty(1, 2**36, 0, device=d), 3),
    "pack": lambda d, t: ops.pack_tiles(empty(0, 2**36, 0, 0, device=d, dtype=torch.bool), 0, 0, 1, 1, 128, 128),
    "forward": lambda d, t: attended(empty(2**36, 1, 0, 8, device=d, dtype=t), empty(2**36, 1, 0, 8, device=d, dtype=t)),
    "forward of no queries": lambda d, t: attended(
        empty(2**36, 1, 0, 8, device=d, dtype=t), repeated(5, dtype=t, device=d).expand(2**36, 1, 5, 8), IntervalMask.causal(5, device=d)
    ),
    "backward": lambda d, t: gradients(empty(2**30, 1, 0, 8, device=d, dtype=t)),
    "backward of many heads": lambda d, t: gradients(empty(1, 2**30, 0, 8, device=d, dtype=t)),
    "backward with key_bias": lambda d, t: gradients(
        empty(2**30, 1, 0, 8, device=d, dtype=t), key_bias=empty(2**30, 1, 0, device=d).requires_grad_(), is_causal=True
    ),
    "the drop-in": lambda d, t: dmattn.scaled_dot_product_attention(*[empty(2**30, 1, 0, 8, device=d, dtype=t)] * 3),
}  # fmt: skip


def attended(query, key, mask=None):
    out, lse = dmattn.attention(query, key, key, mask, return_lse=True)
    assert out.shape == query.shape
    assert lse.shape == query.shape[:3]


def gradients(query, **options):
    query.requires_grad_()
    dmattn.attention(query, query, query, **options).sum().backward()
    assert query.grad.shape == query.shape


@pytest.mark.parametrize("call", EMPTY.values(), ids=EMPTY)
def test_no_work_takes_no_time(device, dtype, call):
    start = time.monotonic()
    call(device, dtype)
    assert time.monotonic() - start < 10  # one step for each batch would take minutes


@pytest.mark.parametrize("expanded", [(0,), (1,), (0, 1), ()])
def test_an_expanded_mask_packs_as_its_copy(device, expanded):
    mask = tensor([1 if axis in expanded else n for axis, n in enumerate((300, 200))], 3, device=device) > 0
    mask = mask.expand(300, 200)
    for block in (1, 16):
        size = [-(-n // block) for n in mask.shape]
        given = (mask[: size[0], : size[1]][None, None], *mask.shape, block, block, 128, 128)
        copied = (given[0].contiguous(), *given[1:])
        tables = ops.pack_tiles(*given)
        assert all(torch.equal(a, b) for a, b in zip(tables, ops.pack_tiles(*copied), strict=True))
        slots = int((tables[0] >= 2).sum())
        bits = [ops.pack_bits(of[0], tables[0], *of[1:], slots) for of in (given, copied)]
        assert torch.equal(*bits)


def test_an_expanded_mask_is_read_once_a_tile(device):
    length = 1 << 18
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device).expand(1, 1, length, length)
    start = time.monotonic()
    tiles = ops.pack_tiles(mask, length, length, 1, 1, 128, 128)[0]
    assert (tiles[..., : length // 128, : length // 128] == 1).all()
    assert time.monotonic() - start < 10  # 2^36 elements would take longer


# What is refused with a sentence ------------------------------------------------------------------------------------------------------


def calls_attention(query: torch.Tensor):
    return dmattn.attention(query, query, query)


class HoldsLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = dmattn.nn.DynamicMaskAttention(16, 2, 4)

    def forward(self, hidden):
        return self.layer(hidden)


PUBLIC = (
    dmattn.attention, dmattn.dynamic_mask_attention, dmattn.key_scores, dmattn.scaled_dot_product_attention, dmattn.flash_dma_attention,
    dmattn.flash_dynamic_mask_attention, calls_attention, HoldsLayer(),
)  # fmt: skip


@pytest.mark.parametrize("what", PUBLIC, ids=lambda what: getattr(what, "__name__", "layer"))
def test_scripting_is_refused(what):
    with pytest.raises(
        NotImplementedError, match=r"dmattn: torch.jit.script is not supported; use torch.compile, torch.export or"
    ):
        torch.jit.script(what)


TRACING = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")


class Attends(torch.nn.Module):
    def forward(self, query):
        return calls_attention(query)


class Calls(torch.nn.Module):
    """A module and how it is called, so that its parameters are parameters of what is traced."""

    def __init__(self, call, module=None):
        super().__init__()
        self.call, self.module = call, module

    def forward(self, *given):
        return self.call(*given) if self.module is None else self.call(self.module, *given)


def traced_calls():
    """name: (a call, how to make its arguments of so many tokens)."""
    sdpa, multihead = dmattn.scaled_dot_product_attention, dmattn.nn.MultiheadAttention
    hidden = torch.arange(9) > torch.tensor([[8], [5]])
    lengths = torch.tensor([9, 6])

    def rows(tokens):
        return (tensor((2, tokens, 12), 0),)

    def heads(tokens):  # of a size that is padded
        return tuple(tensor((2, 4, tokens, 12), i) for i in range(3))

    def flash(tokens):
        return tuple(tensor((2, tokens, 4, 16), i) for i in range(3))

    def attends(**options):
        return lambda module, x: module(x, x, x, need_weights=False, **options)[0]

    layer = dmattn.nn.DynamicMaskAttention.recommended(12, 2, 4, head_dim=8)
    return {
        "MultiheadAttention": (Calls(attends(), multihead(12, 1, batch_first=True)), rows),
        "with a window": (Calls(attends(), multihead(12, 1, batch_first=True, sliding_window=3)), rows),
        "causal": (Calls(attends(is_causal=True), multihead(12, 1, batch_first=True)), rows),
        "with weights": (Calls(lambda m, x: m(x, x, x), multihead(12, 1, batch_first=True, sliding_window=3)), rows),
        "with padding": (Calls(attends(key_padding_mask=hidden), multihead(12, 1, batch_first=True)), rows),
        "recommended": (Calls(lambda m, x: m(x), layer), rows),
        "of padded": (Calls(lambda m, x: m(x, IntervalMask.padding(9, lengths)), layer), rows),
        "sdpa": (Calls(sdpa), heads),
        "causal sdpa": (Calls(lambda q, k, v: sdpa(q[:, :, :-3], k, v, is_causal=True)), heads),
        "flash-attn": (Calls(lambda q, k, v: flash_attn_func(q, k, v, causal=True, window_size=(3, 0))), flash),
        "flash-dmattn": (Calls(lambda q, k, v: flash_dmattn_func(q, k, v, is_causal=True)), flash),
        "masks": (Calls(lambda q, k, v: dmattn.attention(q, k, v, IntervalMask.streaming(k.shape[2], 1, 2))), flash),
    }


@TRACING
@pytest.mark.parametrize("name", traced_calls())
def test_traced_programs_compute_the_same(name):
    call, given = traced_calls()[name]
    given = given(9)
    traced, expected = torch.jit.trace(call, given)(*given), call(*given)
    both = ((traced, expected),) if isinstance(expected, torch.Tensor) else zip(traced, expected, strict=True)
    assert all(torch.equal(one, other) for one, other in both)


def lengths_of_traced_calls():
    """Calls whose program depends on lengths: (call, what it is given for Sq and Sk)."""
    layer = dmattn.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    forward = flash_dmattn.flash_dynamic_mask_attention_forward

    def attends(layer, query, key):
        return layer(query, key, key, is_causal=True, need_weights=False)[0]

    def heads(queries, keys):
        return tuple(tensor((1, 2, length, 8), seed) for seed, length in enumerate((queries, keys, keys)))

    return {
        "MultiheadAttention": (
            Calls(attends, layer).eval(),
            lambda queries, keys: (tensor((1, queries, 16), 0), tensor((1, keys, 16), 1)),
        ),
        "sdpa": (lambda q, k, v: dmattn.scaled_dot_product_attention(q, k, v, is_causal=True), heads),
        "flash-dmattn's forward": (
            lambda q, k, v, scores: forward(None, q, k, v, None, scores, window_size=12)[0],
            lambda queries, keys: (*heads(queries, keys), tensor((1, 2, keys), 3)),
        ),
    }


@TRACING
@pytest.mark.parametrize("example", [(9, 9), (9, 12), (1, 9)], ids=str)
@pytest.mark.parametrize("name", ["MultiheadAttention", "sdpa", "flash-dmattn's forward"])
def test_causal_programs_do_not_depend_on_the_lengths_of_the_example(name, example):
    call, given = lengths_of_traced_calls()[name]
    with torch.no_grad():
        traced = torch.jit.trace(call, given(*example))
        for lengths in ((9, 9), (5, 20), (20, 20), (1, 30)):
            torch.testing.assert_close(traced(*given(*lengths)), call(*given(*lengths)))


@TRACING
@pytest.mark.parametrize("capture", [lambda model, query: torch.export.export(model, (query,), strict=False), torch.jit.trace])
def test_onnx_is_refused_while_the_model_is_captured(monkeypatch, capture):
    """As torch.onnx.export does it, dynamo=True or False, without the packages that it needs."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(
        NotImplementedError, match=r"dmattn: ONNX has no operator for dmattn's attention; export with torch.export"
    ):
        capture(Attends(), tensor((1, 2, 9, 8), 0))
