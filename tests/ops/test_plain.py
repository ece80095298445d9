"""Plain calls go to an op at once. They give what the usual way gives, and say what it says."""

from __future__ import annotations

import functools
import math

import dmattn
import pytest
import torch
from dmattn import plain
from dmattn.testing import strategies
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

tensor = strategies.random_tensor


@pytest.fixture
def served(monkeypatch):
    """What plain calls came to: True where the op served one, False where the usual way did."""
    happened = []

    def watched(name):
        function = getattr(plain, name)

        def call(*given):
            result = function(*given)
            happened.append(result is not None)
            return result

        monkeypatch.setattr(plain, name, call)

    watched("attention"), watched("selected_attention")
    return happened


def usual(call):
    plain.is_enabled = False
    try:
        return call()
    finally:
        plain.is_enabled = True


def assert_equal(result, expected):
    """out, or (out, lse), in equal bits."""
    assert type(result) is type(expected)
    for found, wanted in zip(*(x if isinstance(x, tuple) else (x,) for x in (result, expected)), strict=True):
        assert torch.equal(found, wanted)


def inputs(device="cpu", dtype=torch.float32, queries=40):
    sizes = ((2, 4, queries, 16), (2, 2, 50, 16), (2, 2, 50, 24))
    return [tensor(size, i, dtype, device) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": 0.3}, {"softcap": 4.0, "scale": -0.2}, {"softcap": None, "return_lse": True}]
)
@pytest.mark.parametrize("queries", [0, 1, 40])
def test_attention(options, queries, device, served):
    given = inputs(device, torch.bfloat16 if device == "cuda" else torch.float32, queries)
    result = dmattn.attention(*given, **options)
    assert served == [True]
    assert_equal(result, usual(lambda: dmattn.attention(*given, **options)))


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": False}, {"local": 3, "sink_keys": 2, "window": 0}, {"softcap": 4.0}, {"return_lse": True}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dynamic_mask_attention(options, dtype, device, served):
    given = inputs(device, torch.bfloat16)
    options = {"window": 9} | options
    call = functools.partial(dmattn.dynamic_mask_attention, *given, tensor((2, 2, 50), 7, dtype, device), **options)
    result, expected = call(), usual(call)
    assert served == [True, False]
    assert_equal(result, expected)


def masks():
    """Masks by name, and on which devices the op takes them as they are."""
    lists = torch.randint(-1, 50, (2, 1, 40, 7), dtype=torch.int32)
    return {
        "interval": (dmattn.IntervalMask.top_k(tensor((2, 2, 50), 7), 9), ("cpu", "cuda")),
        "in order": (dmattn.IntervalMask.sliding_window(50, 9), ("cpu", "cuda")),
        "padding": (dmattn.IntervalMask.padding(50, torch.tensor([20, 50])), ("cpu", "cuda")),
        "block": (dmattn.BlockMask.from_bool(tensor((40, 50), 8) > 0), ("cpu", "cuda")),
        "shorter": (dmattn.BlockMask.from_blocks(torch.ones(2, 2, dtype=torch.bool), 32), ()),
        "lists": (dmattn.IndexMask(lists, local=3, sink_keys=1), ("cpu", "cuda")),
        "causal lists": (dmattn.IndexMask(lists, is_causal=True), ("cpu", "cuda")),
        "intersection": (dmattn.IndexMask(lists) & dmattn.IntervalMask.sliding_window(50, 9), ()),
        "bool": (tensor((40, 50), 8) > 0, ()),
    }


MASKS = masks()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("mask", "devices"), MASKS.values(), ids=MASKS)
def test_masks(mask, devices, is_causal, device, served):
    given, mask = inputs(device, torch.bfloat16), mask.to(device)
    out = dmattn.attention(*given, mask, is_causal=is_causal)
    assert served == [device in devices]
    assert torch.equal(out, usual(lambda: dmattn.attention(*given, mask, is_causal=is_causal)))


def test_sdpa(device, served):
    q, k, v = inputs(device, torch.bfloat16)
    sdpa = dmattn.scaled_dot_product_attention
    out = sdpa(q, k, v, enable_gqa=True)
    assert served == [True]
    assert torch.equal(out, usual(lambda: sdpa(q, k, v, enable_gqa=True)))
    served.clear()
    with pytest.raises(ValueError, match="head dimensions that broadcast"):  # two key heads for four
        sdpa(q, k, v)
    sdpa(q, k, v, is_causal=True, enable_gqa=True)  # which begins at the first key, where ours ends at the last
    assert served == []
    one = [given[:, :1] for given in (k, v)]
    assert torch.equal(sdpa(q, *one), sdpa(q, *[given.expand(-1, 4, -1, -1) for given in one]))


@pytest.mark.parametrize("learns", [False, True])
def test_hints_are_told(monkeypatch, learns):
    q, k, v = inputs()
    q.requires_grad_(learns)
    sliding, told, op = dmattn.IntervalMask.sliding_window(50, 9), [], plain.FORWARD_OP
    short_attention = plain.autograd.short_attention
    monkeypatch.setattr(plain, "FORWARD_OP", lambda *given: told.append(given[19:21]) or op(*given))
    monkeypatch.setattr(plain.autograd, "short_attention", lambda given: told.append(given[19:21]) or short_attention(given))
    dmattn.attention(q, k, v, sliding)
    dmattn.attention(q, k, v, dmattn.IntervalMask.documents(50, torch.tensor([0, 20, 50])))
    assert told == [(False, 10), (True, 0)]


def test_a_window_beyond_all_numbers(served):
    q, k, v = inputs()
    scores = tensor((2, 2, 50), 7)
    out = dmattn.dynamic_mask_attention(q, k, v, scores, 2**63 - 1, local=2**63 - 1, sink_keys=2**63 - 1)
    assert served == [True]
    assert torch.equal(out, dmattn.dynamic_mask_attention(q, k, v, scores, 50))


def test_the_op_has_no_gradient():
    q, k, v = inputs()
    q.requires_grad_()
    with pytest.raises(RuntimeError, match=r"forward_plain has no gradient.*train with dmattn\.attention"):
        torch.ops.dmattn.forward_plain(q, k, v, None, None, 0, False, 0, 0, 1.0, 0.0)


class Strange(torch.Tensor):
    pass


def test_what_is_not_plain_takes_the_usual_way(served):
    q, k, v = inputs()
    scores = tensor((2, 2, 50), 7)
    dmattn.attention(q, k, v, key_bias=scores)
    dmattn.dynamic_mask_attention(q, k, v, scores, 9, base=dmattn.IntervalMask.padding(50, torch.tensor([20, 50])))
    torch.func.vmap(dmattn.attention)(q[None], k[None], v[None])
    dmattn.attention(q.as_subclass(Strange), k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert dmattn.attention(q, k, v).dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        dmattn.attention(q, k, v)
    assert counter.get_total_flops() > 0
    # The first two have arguments that plain calls do not have; vmap calls attention once.
    assert served == [False] * 4


def test_meta_tensors_have_the_usual_shapes():
    q, k, v = (torch.empty(size, device="meta") for size in ((1, 4, 8, 12), (3, 4, 8, 12), (3, 4, 8, 20)))
    out = dmattn.scaled_dot_product_attention(q, k, v)
    expected = usual(lambda: dmattn.scaled_dot_product_attention(q, k, v))
    assert (out.shape, out.stride()) == (expected.shape, expected.stride())


def test_errors_that_are_not_about_arguments_are_raised_at_once(monkeypatch):
    """Those of users' hooks, and of memory, which is not asked for twice."""
    q, k, v = inputs()
    packed = []

    def pack(given):
        packed.append(given)
        if len(packed) == 3:
            raise RuntimeError("the disk is full")
        return given

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda given: given),
        pytest.raises(RuntimeError, match="the disk is full"),
    ):
        dmattn.attention(q.clone().requires_grad_(), k, v)
    assert len(packed) == 3
    happened = []

    def without_memory(*given):
        happened.append(given)
        raise RuntimeError("dmattn: could not allocate a tensor of shape [9]")

    monkeypatch.setattr(plain, "PLAIN_OP", without_memory)
    with pytest.raises(RuntimeError, match="could not allocate"):
        dmattn.attention(q, k, v)
    assert len(happened) == 1


def test_a_trace_before_dispatch_has_the_op_with_a_gradient():
    q, k, v = inputs()
    graph = make_fx(lambda *given: dmattn.attention(*given), pre_dispatch=True)(q, k, v)
    assert not [node for node in graph.graph.nodes if "forward_plain" in str(node.target)]


def test_a_mask_without_tensors_is_no_mask(served):
    q, k, v = inputs()
    empty = tree_map(
        lambda leaf: None if isinstance(leaf, torch.Tensor) else leaf, dmattn.BlockMask.from_bool(torch.ones(40, 50) > 0)
    )
    with pytest.raises(AttributeError):
        dmattn.attention(q, k, v, empty)
    assert served == [False]


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_gradients(is_deterministic, device, served):
    """With ``torch.use_deterministic_algorithms`` in equal bits on all devices."""
    leaves = [given.requires_grad_() for given in (*inputs(device, torch.bfloat16), tensor((2, 2, 50), 7, torch.float32, device))]
    q, k, v, scores = leaves

    def gradients(call):
        return torch.autograd.grad(call().sum(), leaves, allow_unused=True)

    torch.use_deterministic_algorithms(is_deterministic)
    try:
        for call in (
            lambda: dmattn.attention(q, k, v),
            lambda: dmattn.attention(q, k, v, return_lse=True)[1],
            lambda: dmattn.attention(q, k, v, dmattn.IntervalMask.top_k(scores, 9), is_causal=True),
            lambda: dmattn.dynamic_mask_attention(q, k, v, scores, 9, local=2),
        ):
            found = gradients(call)
            expected = usual(functools.partial(gradients, call))
            torch.testing.assert_close(found, expected)
            if is_deterministic:
                assert all(a is b or torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
    assert served == [True, False] * 4


def bad_calls(device):
    """Calls that are wrong, by name; none gives a result."""
    q, k, v = inputs(device)
    scores = tensor((2, 2, 50), 7, device=device)
    elsewhere = functools.partial(torch.empty_like, device="meta" if device == "cpu" else "cpu")
    attend, select = dmattn.attention, dmattn.dynamic_mask_attention
    return {
        "number": lambda: attend(3, k, v),
        "rank 0": lambda: attend(torch.tensor(1.0), k, v),
        "rank": lambda: attend(q[0], k, v),
        "dtype": lambda: attend(q, k.double(), v),
        "integers": lambda: attend(q.int(), k.int(), v.int()),
        "heads": lambda: attend(q[:, :3], k, v),
        "length": lambda: attend(q, k[:, :, 1:], v),
        "head size": lambda: attend(q[..., :12], k[..., :12], v),
        "no head size": lambda: attend(q[..., :0], k[..., :0], v),
        "sparse": lambda: attend(q.to_sparse(), k, v),
        "nested": lambda: attend(torch.nested.nested_tensor(list(q), layout=torch.jagged), k, v),
        "device": lambda: attend(q, elsewhere(k), v),
        "scale": lambda: attend(q, k, v, scale=math.nan),
        "scale's type": lambda: attend(q, k, v, scale="1"),
        "softcap": lambda: attend(q, k, v, softcap=-1.0),
        "softcap's type": lambda: attend(q, k, v, softcap=q),
        "dropout": lambda: attend(q, k, v, dropout_p=1.5),
        "dropout's type": lambda: attend(q, k, v, dropout_p=torch.tensor(0.0)),
        "causal": lambda: attend(q, k, v, is_causal=1),
        "scores' shape": lambda: select(q, k, v, scores[:, :1], 9),
        "scores' length": lambda: select(q, k, v, scores[:, :, 1:], 9),
        "scores' dtype": lambda: select(q, k, v, scores.int(), 9),
        "complex scores": lambda: select(q, k, v, scores.to(torch.complex64), 9),
        "complex numbers": lambda: select(*(given.to(torch.complex64) for given in (q, k, v, scores)), 9),
        "scores' device": lambda: select(q, k, v, elsewhere(scores), 9),
        "window": lambda: select(q, k, v, scores, 0),
        "large window": lambda: select(q, k, v, scores, 2**70, local=-1),
        "window's type": lambda: select(q, k, v, scores, True),
        "local": lambda: select(q, k, v, scores, 9, local=-1),
        "local without causality": lambda: select(q, k, v, scores, 9, is_causal=False, local=4),
        "interval's length": lambda: attend(q, k, v, dmattn.IntervalMask.sliding_window(49, 9)),
        "interval's heads": lambda: attend(q, k, v, dmattn.IntervalMask.top_k(scores[:, :1].expand(-1, 3, -1), 9)),
        "block's length": lambda: attend(q, k, v, dmattn.BlockMask.from_bool(torch.ones(39, 50, dtype=torch.bool))),
        "lists' rows": lambda: attend(q, k, v, dmattn.IndexMask(torch.zeros(1, 1, 39, 3, dtype=torch.int32))),
        "lists' entries": lambda: attend(q, k, v, dmattn.IndexMask(torch.full((1, 1, 40, 3), 50, dtype=torch.int32))),
        "keys of a selection": lambda: select(q, k[0], v, scores, 9),
    }


BAD = {f"{name} on {device}": call for device in ("cpu", "meta") for name, call in bad_calls(device).items()}
del BAD["sparse on meta"]  # torch makes no such tensor


@pytest.mark.brief
@pytest.mark.parametrize("call", BAD.values(), ids=BAD)
def test_a_wrong_call_is_refused_with_the_same_sentence(call):
    with pytest.raises((TypeError, ValueError)) as expected:
        usual(call)
    with pytest.raises(type(expected.value)) as found:
        call()
    assert str(found.value) == str(expected.value)
    assert type(found.value) is type(expected.value)
