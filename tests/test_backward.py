"""Attention backward against the reference: drawn cases, gradcheck, hostile cases, determinism, merging by lse."""

from __future__ import annotations

import dataclasses

import dmattn
import pytest
import torch
from dmattn import BlockMask, IntervalMask
from dmattn.testing import (
    AttentionCase,
    assert_close_to_reference,
    assert_matches_reference,
    assert_same_bits,
    attention_cases,
    run,
    strategies,
)
from hypothesis import given
from hypothesis import strategies as st


def make(device, dtype, B=1, H=2, Hkv=None, Sq=70, Sk=None, D=32, Dv=None, seed=0, **options) -> AttentionCase:
    Hkv, Sk, Dv = H if Hkv is None else Hkv, Sq if Sk is None else Sk, D if Dv is None else Dv
    sizes = ((B, H, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv))
    tensors = (strategies.random_tensor(size, seed + i, dtype, device) for i, size in enumerate(sizes))
    return AttentionCase(*tensors, **options)


@given(data=st.data())
def test_drawn_cases(device, data):
    assert_matches_reference(data.draw(attention_cases(device)))


@given(data=st.data())
def test_drawn_cases_in_one_dtype(device, dtype, data):
    assert_matches_reference(data.draw(attention_cases(device, dtype=dtype)))


@pytest.mark.parametrize(("Sq", "Sk"), [(1, 1), (1, 500), (500, 1), (127, 129), (333, 65), (65, 333)])
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_lengths(device, dtype, Sq, Sk, causal):
    assert_matches_reference(make(device, dtype, Sq=Sq, Sk=Sk, is_causal=causal))


@pytest.mark.parametrize(("B", "H", "Sq", "Sk"), [(0, 2, 5, 5), (2, 0, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0), (2, 2, 0, 0)])
def test_nothing_in_some_dimension(device, dtype, B, H, Sq, Sk):
    bias = torch.zeros(B, H, Sq, Sk, device=device)
    key_bias = torch.zeros(B, H, Sk, device=device)
    assert_matches_reference(make(device, dtype, B=B, H=H, Sq=Sq, Sk=Sk, bias=bias, key_bias=key_bias))


@pytest.mark.parametrize(("H", "Hkv"), [(6, 1), (6, 2), (6, 3)])
@pytest.mark.parametrize(("D", "Dv"), [(8, 64), (72, 16)])
def test_grouped_heads_add_up(device, dtype, H, Hkv, D, Dv):
    assert_matches_reference(make(device, dtype, B=2, H=H, Hkv=Hkv, D=D, Dv=Dv, is_causal=True))


@pytest.mark.parametrize("lead", [(), (1,), (4,), (2,), (1, 1), (3, 1), (1, 4), (1, 2), (3, 2), (3, 4)])
@pytest.mark.parametrize("rows", [1, 45])
@pytest.mark.parametrize("columns", [1, 53])
def test_bias_gradients_sum_over_what_was_broadcast(device, dtype, lead, rows, columns):
    bias = strategies.random_tensor((*lead, rows, columns), 7, device=device)
    assert_matches_reference(make(device, dtype, B=3, H=4, Hkv=2, Sq=45, Sk=53, bias=bias, is_causal=True))


@pytest.mark.parametrize("lead", [(), (4,), (2,), (1, 1), (3, 1), (1, 4), (1, 2), (3, 2), (3, 4)])
def test_key_bias_gradients_sum_over_what_was_broadcast(device, dtype, lead):
    key_bias = strategies.random_tensor((*lead, 53), 7, device=device)
    both = make(
        device,
        dtype,
        B=3,
        H=4,
        Hkv=2,
        Sq=45,
        Sk=53,
        key_bias=key_bias,
        bias=strategies.random_tensor((1, 2, 1, 53), 8, device=device),
    )
    assert_matches_reference(both)


def test_only_some_tensors_want_gradients(device, dtype):
    case_bias = strategies.random_tensor((70, 70), 4, device=device)
    case = make(
        device,
        dtype,
        key_bias=strategies.random_tensor((70,), 3, device=device),
        bias=case_bias,
    )
    everything = run(case)
    for name, leaf in case.leaves().items():
        wanted = leaf.detach().clone().requires_grad_()
        out, lse = case.with_leaves({name: wanted}).call()
        grad_out, grad_lse = (g.to(t.dtype) for g, t in zip(case.incoming_gradients(), (out, lse), strict=True))
        (gradient,) = torch.autograd.grad((out, lse), wanted, (grad_out, grad_lse))
        assert torch.equal(gradient, everything[f"grad_{name}"])


def test_gradient_through_out_alone(device, dtype):
    case = make(device, dtype, is_causal=True, grad_through_lse=False)
    assert_matches_reference(case)
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in case.leaves().items()}
    out = case.with_leaves(leaves).call()[0]
    gradients = torch.autograd.grad(out, list(leaves.values()), case.incoming_gradients()[0].to(out.dtype))
    assert_close_to_reference(case, {f"grad_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)})


def test_gradient_through_lse_alone(device, dtype):
    """The same as with a gradient of zero through out, and value gets none."""
    case = make(device, dtype, is_causal=True)
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in case.leaves().items()}
    out, lse = case.with_leaves(leaves).call()
    grad_lse = case.incoming_gradients()[1].to(lse.dtype)
    alone = torch.autograd.grad(lse, list(leaves.values()), grad_lse, retain_graph=True)
    both = torch.autograd.grad((out, lse), list(leaves.values()), (torch.zeros_like(out), grad_lse))
    assert all(torch.equal(a, b) for a, b in zip(alone, both, strict=True))
    assert not alone[2].any()


@pytest.mark.parametrize("kind", ["expanded", "transposed", "strided"])
def test_strides_of_incoming_gradients(device, dtype, kind):
    case = make(device, dtype, B=2, H=3, Sq=40)
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in case.leaves().items()}
    out, lse = case.with_leaves(leaves).call()
    grad_out, grad_lse = (g.to(t.dtype) for g, t in zip(case.incoming_gradients(), (out, lse), strict=True))
    if kind == "expanded":
        grad_out, grad_lse = grad_out[:1, :1, :1, :1].expand_as(out), grad_lse[:1, :1, :1].expand_as(lse)
    elif kind == "transposed":
        grad_out, grad_lse = (g.transpose(1, 2).contiguous().transpose(1, 2) for g in (grad_out, grad_lse))
    else:
        grad_out = strategies.laid_out(grad_out, "strided")
        grad_lse = grad_lse.repeat_interleave(2, dim=-1)[..., ::2]
    strided = torch.autograd.grad((out, lse), list(leaves.values()), (grad_out, grad_lse), retain_graph=True)
    dense = torch.autograd.grad((out, lse), list(leaves.values()), (grad_out.contiguous(), grad_lse.contiguous()))
    for a, b in zip(strided, dense, strict=True):
        assert torch.equal(a, b)


GRADCHECK = {
    "plain": {},
    "causal, softcap": {"is_causal": True, "softcap": 2.0},
    "interval": {"mask": IntervalMask.sliding_window(9, 3, 1)},
    "block": {"mask": BlockMask.from_bool(torch.rand(7, 9, generator=torch.Generator().manual_seed(0)) < 0.6)},
    "combined": {
        "mask": IntervalMask.prefix(9, 4)
        & BlockMask.from_bool(torch.rand(7, 9, generator=torch.Generator().manual_seed(1)) < 0.8)
    },
    "dropout": {"dropout_p": 0.4, "dropout_seed": torch.tensor([5])},
    "deterministic": {"deterministic": True, "scale": -0.7},
    "empty rows": {"mask": IntervalMask(torch.full((9,), 4, dtype=torch.int32), torch.full((9,), 6, dtype=torch.int32))},
}


@pytest.mark.parametrize("options", GRADCHECK.values(), ids=GRADCHECK)
def test_gradcheck(options):
    """Numerical derivatives of out and lse with respect to everything, in float64 on the CPU."""
    sizes = {"query": (1, 4, 7, 8), "key": (1, 2, 9, 8), "value": (1, 2, 9, 16), "key_bias": (1, 2, 9), "bias": (4, 7, 9)}
    leaves = [strategies.random_tensor(size, i, torch.float64).requires_grad_() for i, size in enumerate(sizes.values())]

    def fn(query, key, value, key_bias, bias):
        out, lse = dmattn.attention(query, key, value, key_bias=key_bias, bias=bias, return_lse=True, **options)
        return out, torch.where(torch.isinf(lse), 0.0, lse)

    assert torch.autograd.gradcheck(fn, leaves)


def test_gradcheck_of_dynamic_mask_attention():
    sizes = [(1, 4, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8), (1, 2, 9)]
    leaves = [strategies.random_tensor(size, i, torch.float64).requires_grad_() for i, size in enumerate(sizes)]

    def fn(*given_leaves):
        return dmattn.dynamic_mask_attention(*given_leaves, 3, return_lse=True)

    assert torch.autograd.gradcheck(fn, leaves)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_dead_keys_full_of_nan_leave_gradients_alone(device, dtype, bad):
    """Keys that fall out of the window before any query of the block sees them, and padding."""
    N = 200
    scores = torch.ones(1, 2, N, device=device)
    dead = torch.zeros(N, dtype=torch.bool, device=device)
    dead[[0, 17, 64, 65, 128]] = True
    dead[180:] = True
    scores[:, :, dead] = float("nan")
    clean = make(device, dtype, H=4, Hkv=2, Sq=N)
    mask = IntervalMask.top_k(scores, 20)
    case = dataclasses.replace(clean, mask=mask, visible=mask.to_bool(N, N), is_causal=True)
    dirty = {name: leaf.clone() for name, leaf in case.leaves().items()}
    for name in ("key", "value"):
        dirty[name][:, :, dead] = bad
    results = assert_matches_reference(case.with_leaves(dirty))
    assert not results["grad_key"][:, :, dead].any()
    assert not results["grad_value"][:, :, dead].any()
    assert_same_bits(results, run(case))


@pytest.mark.parametrize("magnitude", [30.0, 1e3])
def test_huge_logits(device, dtype, magnitude):
    case = make(device, dtype, Sq=60, D=16)
    results = run(case.with_leaves({"query": case.query * magnitude, "key": case.key * magnitude}))
    for name, result in results.items():
        assert torch.isfinite(result).all(), name


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3, "dropout_seed": 4}, {"softcap": 3.0}])
def test_deterministic_gradients_are_equal_on_every_run_and_thread_count(device, dtype, options):
    rows = strategies.random_tensor((300, 300), 2, device=device)
    mask = IntervalMask.top_k(strategies.make_scores((2, 2, 300), "random", 0, device=device), 60)
    case = make(device, dtype, B=2, H=4, Hkv=2, Sq=300, is_causal=True, mask=mask, deterministic=True, **options)
    case = dataclasses.replace(
        case,
        key_bias=strategies.random_tensor((2, 300), 1, device=device),
        bias=rows,
    )
    first = run(case)
    threads = torch.get_num_threads()
    try:
        for count in (threads, 1, 2, 3, 8):
            torch.set_num_threads(count)
            assert_same_bits(run(case), first)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("cut", [1, 40, 64, 99])
def test_two_halves_of_the_keys_merge_by_lse(device, dtype, cut):
    """What ring attention and decoding with a split cache do; the merged result has the gradients of the whole."""
    case = make(device, dtype, H=4, Hkv=2, Sq=50, Sk=100)

    def merged(query, key, value, mask=None, *, return_lse, **options):
        parts = [
            dmattn.attention(query, key[:, :, s], value[:, :, s], return_lse=True, **options)
            for s in (slice(0, cut), slice(cut, None))
        ]
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        out = sum(out.to(lse.dtype) * torch.exp(part_lse - lse)[..., None] for out, part_lse in parts)
        return out.to(query.dtype), lse

    def without_biases(*tensors, **options):
        options = {name: value for name, value in options.items() if name not in ("key_bias", "bias")}
        return merged(*tensors, **options)

    assert_matches_reference(case, without_biases)


def test_is_the_gradient_of_what_forward_drew(device, dtype):
    """Dropout without a given seed: backward drops the weights that forward dropped."""
    case = make(device, dtype, Sq=50)
    value = case.value.detach().requires_grad_()
    out = dmattn.attention(case.query, case.key, value, dropout_p=0.5)
    out.backward(torch.ones_like(out))
    again = (value.grad.to(torch.float64) * value.detach().to(torch.float64)).sum()  # out is linear in value
    total = out.detach().to(torch.float64)
    spread = (value.grad.abs() * value.detach().abs()).to(torch.float64).sum()
    assert abs(float(again - total.sum())) <= 4 * torch.finfo(dtype).eps * float(spread)


def test_compiled_gradients_of_inputs_that_had_to_be_copied():
    def run(q):
        return dmattn.attention(q, q, q)

    given = torch.randn(2, 10, 4, 8, 2)
    eager, compiled = (given[..., 0].transpose(1, 2).detach().requires_grad_() for _ in range(2))
    run(eager).sum().backward()
    torch.compile(run, fullgraph=True, backend="aot_eager")(compiled).sum().backward()
    torch.testing.assert_close(compiled.grad, eager.grad)
