"""Two ways to one rule: what an eager call takes gives what the registered op gives, and whoever watches sees the op as registered."""

from __future__ import annotations

import dmattn
import pytest
import torch
from dmattn import BlockMask, IntervalMask, ops
from dmattn.testing import strategies
from torch.fx.experimental.proxy_tensor import make_fx
from watched import Watched

tensor = strategies.random_tensor
SHORT = "ShortAttentionBackward"


def leaves(device, dtype):
    sizes = ((2, 4, 40, 16), (2, 2, 50, 16), (2, 2, 50, 24))
    return [tensor(size, number, dtype, device).requires_grad_() for number, size in enumerate(sizes)]


def arguments(device, dtype):
    """Name to all arguments of the op and the places of those with a gradient."""
    q, k, v = leaves(device, dtype)
    block = BlockMask.from_bool(tensor((4, 40, 50), 7, device=device) > -0.5)
    tables = (block.tiles, block.rows, block.columns, block.bits)
    end = IntervalMask.top_k(tensor((2, 2, 50), 8, device=device), 9).end
    key_bias, bias = (
        tensor((2, 2, 50), 5, device=device).requires_grad_(),
        tensor((1, 4, 40, 50), 6, dtype, device).requires_grad_(),
    )
    seed = torch.tensor([3], device=device)
    plain = (False, 0.25, 0.0, 0.0, True)
    return {
        "plain": ((q, k, v, *(None,) * 11, *plain), (0, 1, 2)),
        "key alone": ((q.detach(), k, v.detach(), *(None,) * 11, *plain), (1,)),
        "key_bias alone": ((q.detach(), k.detach(), v.detach(), *(None,) * 8, key_bias, None, None, *plain), (11,)),
        "bias alone": ((q.detach(), k.detach(), v.detach(), *(None,) * 9, bias, None, *plain), (12,)),
        "everything": (
            (q, k, v, None, end, *tables, None, None, key_bias, bias, seed, True, 0.25, 4.0, 0.3, True),
            (0, 1, 2, 11, 12),
        ),
    }


NAMES = ("plain", "key alone", "key_bias alone", "bias alone", "everything")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("through", ["out", "lse", "both"])
def test_both_ways_give_the_same(device, dtype, name, through):
    given, places = arguments(device, dtype)[name]

    def results(call):
        out, lse = call(*given)[:2]
        assert out.grad_fn is not None
        assert out.grad_fn.name() == SHORT
        chosen = {"out": (out,), "lse": (lse,), "both": (out, lse)}[through]
        incoming = [tensor(x.shape, 11, x.dtype, device) for x in chosen]
        wanted = [given[place] for place in places]
        return [out, lse, *torch.autograd.grad(chosen, wanted, incoming, allow_unused=True)]

    for short, registered in zip(results(ops.forward), results(torch.ops.dmattn.forward), strict=True):
        assert (short is None) == (registered is None)
        assert short is None or torch.equal(short, registered)


def test_no_gradient_no_graph(device, dtype):
    q, k, v = leaves(device, dtype)
    with torch.no_grad():
        assert dmattn.attention(q, k, v).grad_fn is None
    with torch.inference_mode():
        assert dmattn.attention(q, k, v).is_inference()
    assert dmattn.attention(q.detach(), k.detach(), v.detach()).grad_fn is None
    scores = tensor((2, 2, 50), 3, device=device).requires_grad_()
    assert IntervalMask.top_k(scores, 5).end.grad_fn is None
    assert dmattn.dynamic_mask_attention(q.detach(), k.detach(), v.detach(), scores, 5).grad_fn.name() == SHORT


def step(q, k, v, scores):
    out = dmattn.dynamic_mask_attention(q, k, v, scores, 5, deterministic=True)
    return torch.autograd.grad(out.float().sum(), (q, k, v, scores))


OPS = ["select", "forward", "backward"]


def test_a_dispatch_mode_sees_every_op_once(device, dtype):
    given = (*leaves(device, dtype), tensor((2, 2, 50), 3, device=device).requires_grad_())
    with Watched() as seen:
        watched = step(*given)
    assert seen.names == OPS
    assert all(torch.equal(a, b) for a, b in zip(watched, step(*given), strict=True))


def test_make_fx_traces_the_ops(device, dtype):
    given = (*leaves(device, dtype), tensor((2, 2, 50), 3, device=device).requires_grad_())
    graph = make_fx(step)(*given)
    assert [node.target._opname for node in graph.graph.nodes if str(node.target).startswith("dmattn")] == OPS
    assert all(torch.equal(a, b) for a, b in zip(graph(*given), step(*given), strict=True))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace_records_the_op(device, dtype):
    q, k, v = leaves(device, dtype)
    traced = torch.jit.trace(lambda q, k, v: dmattn.attention(q, k, v), (q, k, v))
    assert "dmattn::forward" in str(traced.graph)
    assert torch.equal(traced(q, k, v), dmattn.attention(q, k, v))


def test_a_subclass_is_not_hidden_from(device, dtype):
    class Named(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            Named.calls += "dmattn" in str(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    q, k, v = (t.detach() for t in leaves(device, dtype))
    out = dmattn.attention(q.as_subclass(Named), k, v)
    assert Named.calls == 1
    assert torch.equal(out.as_subclass(torch.Tensor), dmattn.attention(q, k, v))


def test_parameters_take_the_short_way(device, dtype):
    q, k, v = (torch.nn.Parameter(t.detach()) for t in leaves(device, dtype))
    assert dmattn.attention(q, k, v).grad_fn.name() == SHORT


def test_saved_tensor_hooks_see_what_is_saved(device, dtype):
    packed = []

    def pack(given):
        packed.append(given.shape)
        return given

    q, k, v = leaves(device, dtype)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda given: given):
        out = dmattn.attention(q, k, v)
    assert {q.shape, k.shape, v.shape, out.shape} <= set(packed)
    torch.autograd.grad(out.float().sum(), (q, k, v))


def test_a_changed_input_is_noticed(device, dtype):
    q, k, v = leaves(device, dtype)
    out = dmattn.attention(q * 1, k, v)
    with torch.no_grad():
        k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.float().sum().backward()
