"""Attention backward against the reference: drawn cases, hostile cases, determinism, merging by lse."""

from __future__ import annotations

import dataclasses

import dmattn
import pytest
import torch
from cases import make, threads
from devices import DEVICE
from dmattn import BlockMask, IntervalMask
from dmattn.testing import (
    assert_close_to_reference,
    assert_matches_reference,
    assert_same_bits,
    attention_cases,
    run,
    strategies,
    tolerance,
)
from dmattn_bench.two_ways import assert_same_by_another_way
from hypothesis import given
from hypothesis import strategies as st


@given(data=st.data())
def test_drawn_cases(device, data):
    assert_matches_reference(data.draw(attention_cases(device)))


@pytest.mark.parametrize(("Sq", "Sk"), [(1, 1), (1, 1000), (1000, 1), (127, 129), (333, 65), (65, 333), (513, 513)])
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_lengths(device, dtype, Sq, Sk, causal):
    assert_matches_reference(make(device, dtype, Sq=Sq, Sk=Sk, is_causal=causal))


@pytest.mark.brief
@pytest.mark.parametrize(("B", "H", "Sq", "Sk"), [(0, 2, 5, 5), (2, 0, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0), (2, 2, 0, 0)])
def test_nothing_in_some_dimension(device, dtype, B, H, Sq, Sk):
    bias = torch.zeros(B, H, Sq, Sk, device=device)
    key_bias = torch.zeros(B, H, Sk, device=device)
    results = assert_matches_reference(make(device, dtype, B=B, H=H, Sq=Sq, Sk=Sk, bias=bias, key_bias=key_bias))
    if Sk == 0:
        assert not results["out"].any()
        assert (results["lse"] == -torch.inf).all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_many_keys_without_queries(device, dtype, deterministic):
    """A GPU copies a tile of keys before it knows that no query sees them. With a shared bias a block has the tiles of all heads."""
    key_bias = torch.zeros(2000, device=device) if deterministic else None
    results = run(make(device, dtype, B=8, H=4, Sq=0, Sk=2000, D=64, key_bias=key_bias, deterministic=deterministic))
    assert not any(results[f"grad_{name}"].any() for name in ("key", "value"))


@pytest.mark.parametrize(("H", "Hkv"), [(6, 1), (6, 2), (6, 3), (6, 6)])
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
    assert_matches_reference(dataclasses.replace(both, bias=None))  # alone, the op gets it with the heads it has


def test_only_some_tensors_want_gradients(device, dtype):
    case_bias = strategies.random_tensor((70, 70), 4, device=device)
    case = make(device, dtype, key_bias=strategies.random_tensor((70,), 3, device=device), bias=case_bias)
    everything = run(case)
    for name, leaf in case.leaves().items():
        wanted = leaf.detach().clone().requires_grad_()
        out, lse = case.with_leaves({name: wanted}).call()
        grad_out, grad_lse = (g.to(t.dtype) for g, t in zip(case.incoming_gradients(), (out, lse), strict=True))
        (gradient,) = torch.autograd.grad((out, lse), wanted, (grad_out, grad_lse))
        assert torch.equal(gradient, everything[f"grad_{name}"])


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


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("S", [2, 4, 64])
def test_cancelling_gradients_of_a_bias(half, S):
    """The gradient of a bias per key, where a row's gradients nearly cancel: out as it is saved, rounded, makes the error and bounds it.

    P (dP - delta), with delta from rounded out, is wrong by P * eps/2 * sum |grad_out * out|, however small the difference is.
    """
    device = "cpu"  # a GPU rounds the weights, too
    case = make(device, half, B=8, H=4, Sq=S, Sk=S, D=64, is_causal=True)
    case = case.with_leaves({**case.leaves(), "key_bias": torch.zeros(8, 4, S, device=device)})
    case = dataclasses.replace(case, grad_through_lse=False)
    exact = case.to(torch.float64)
    weights = tolerance._weights(exact)
    grad_out = exact.incoming_gradients()[0].double()
    grad_weights = grad_out @ exact.value.mT
    out = weights @ exact.value

    def gradient(delta):
        return (weights * (grad_weights - delta[..., None])).sum(2)

    truth = gradient((grad_out * out).sum(-1))
    from_rounded = gradient((grad_out * out.to(half).double()).sum(-1))
    bound = torch.finfo(half).eps / 2 * (weights * (grad_out * out).abs().sum(-1, keepdim=True)).sum(2)
    got = run(case)["grad_key_bias"].double()
    in_float32 = (
        64
        * torch.finfo(torch.float32).eps
        * (weights * (grad_weights.abs() + (grad_out * out).abs().sum(-1, keepdim=True))).sum(2)
    )
    assert ((got - truth).abs() <= bound + in_float32).all()
    # A saved out that float32 rounds the other way at a tie is rare: nearly all of the error is that of a rounded out.
    assert (got - from_rounded).norm() < 0.1 * (from_rounded - truth).norm()


@pytest.mark.parametrize("magnitude", [30.0, 1e2, 1e3, 1e4])
def test_huge_logits(device, dtype, magnitude):
    case = make(device, dtype, Sq=100, D=16, is_causal=True)
    case = case.with_leaves({"query": case.query * magnitude, "key": case.key * magnitude})
    assert_close_to_reference(case, run(case, gradients=False))
    for name, result in run(case).items():
        assert torch.isfinite(result).all(), name


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3, "dropout_seed": 4}, {"softcap": 3.0}])
def test_deterministic_gradients_are_equal_on_every_run_and_thread_count(device, dtype, options):
    rows = strategies.random_tensor((300, 300), 2, device=device)
    mask = IntervalMask.top_k(strategies.make_scores((2, 2, 300), "random", 0, device=device), 60)
    case = make(device, dtype, B=2, H=4, Hkv=2, Sq=300, is_causal=True, mask=mask, deterministic=True, **options)
    case = dataclasses.replace(case, key_bias=strategies.random_tensor((2, 300), 1, device=device), bias=rows)
    first = run(case)
    for count in (torch.get_num_threads(), 1, 2, 3, 8):
        with threads(count):
            assert_same_bits(run(case), first)


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
    assert abs(float(again - total.sum())) <= 2 * tolerance.STORAGE_ULPS * torch.finfo(dtype).eps * float(spread)


def test_compiled_gradients_of_inputs_that_had_to_be_copied():
    def run(q):
        return dmattn.attention(q, q, q)

    given = torch.randn(2, 10, 4, 8, 2)
    eager, compiled = (given[..., 0].transpose(1, 2).detach().requires_grad_() for _ in range(2))
    run(eager).sum().backward()
    torch.compile(run, fullgraph=True, backend="aot_eager")(compiled).sum().backward()
    torch.testing.assert_close(compiled.grad, eager.grad)


# Lengths, tiles and tables on which kernels change their way -------------------------------------------------------------------------


def random_intervals(heads, Sk, seed, device, width=150):
    """Intervals that differ by head; some never end, some are empty."""
    start = (strategies.random_tensor((1, heads, Sk), seed).abs() * Sk / 2).int()
    end = start + (strategies.random_tensor((1, heads, Sk), seed + 1) * width).int()
    end[:, :, ::37] = 2**31 - 1
    return IntervalMask(start.to(device), end.to(device))


@pytest.mark.parametrize("which", ["Sq", "Sk"])
@pytest.mark.parametrize("n", [n for n in strategies.edge_lengths("cpu" if DEVICE == "cpu" else "") if n < 2000])
def test_lengths_around_every_threshold(device, dtype, n, which):
    """Masks of their own for key heads, which query heads share; where there are many queries, by way of a summary of the mask."""
    Sq, Sk = (n, 200) if which == "Sq" else (70 if n % 2 else 300, n)
    mask = random_intervals(2, Sk, n, device)
    key_bias = strategies.random_tensor((1, 4, Sk), 3, device=device)
    assert_matches_reference(make(device, dtype, H=4, Hkv=2, Sq=Sq, Sk=Sk, D=16, mask=mask, key_bias=key_bias))
    assert_matches_reference(make(device, dtype, H=2, Hkv=1, Sq=Sq, Sk=Sk, D=24, is_causal=True))


@given(data=st.data())
def test_drawn_cases_of_longer_lengths(device, data):
    assert_matches_reference(data.draw(attention_cases(device, max_length=1100, max_pairs=150_000)))


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("Sq", [257, 400])
def test_summaries_are_those_of_the_heads_own_mask(device, dtype, Sq, heads):
    """Each head of the mask sees another part of the keys, so a wrong row would skip what is visible."""
    Sk = 600
    keys = torch.arange(Sk, device=device, dtype=torch.int32)[None, None]
    mine = keys // 64 % heads == torch.arange(heads, device=device)[None, :, None]
    for start, end in ((-1000, torch.where(mine, 10_000, -1000)), (torch.where(mine, -1000, 10_000), 20_000)):
        start, end = (torch.as_tensor(x, device=device).int().expand(1, heads, Sk) for x in (start, end))
        mask = IntervalMask(start.contiguous(), end.contiguous())
        assert_matches_reference(make(device, dtype, B=2, H=4, Hkv=2, Sq=Sq, Sk=Sk, D=16, mask=mask))


@pytest.mark.parametrize("kind", ["interval", "block", "both", "key by key"])
@pytest.mark.parametrize("is_long", [False, True])
def test_each_query_sees_one_key_alone(device, dtype, kind, is_long):
    """So that whatever takes a key or a query too many, or too few, is far off: weights are 1, and every key has one query's gradient."""
    Sq = 130 if not is_long else 270 if device == "cpu" else 800  # long enough for summaries, or for two segments of queries
    j = torch.arange(Sq, dtype=torch.int32, device=device)
    block = BlockMask.from_bool(torch.eye(Sq, dtype=torch.bool, device=device))
    mask = {"interval": IntervalMask(j, j + 1), "block": block, "both": IntervalMask.sliding_window(Sq, 3, 3, device=device) & block,
            "key by key": IntervalMask.sliding_window(Sq, 0, device=device)}[kind]  # fmt: skip
    visible = torch.eye(Sq, dtype=torch.bool, device=device)[None, None]
    key_bias = None if kind == "block" else strategies.random_tensor((1, 2, Sq), 4, device=device)
    for causal in (False, True):
        assert_matches_reference(
            make(device, dtype, H=4, Hkv=2, Sq=Sq, mask=mask, visible=visible, key_bias=key_bias, is_causal=causal)
        )


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-8])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"is_causal": True}], ids=str)
def test_any_scale(device, dtype, scale, options):
    case = make(device, dtype, B=2, H=4, Hkv=2, Sq=90, Sk=150, scale=scale, **options)
    assert_matches_reference(case)
    assert_matches_reference(dataclasses.replace(case, key_bias=strategies.random_tensor((2, 4, 150), 3, device=device)))
    mask = random_intervals(2, 150, 7, device)
    assert_matches_reference(dataclasses.replace(case, mask=mask, visible=mask.to_bool(90, 150)))


def test_softcap_is_that_of_forward(device, dtype):
    """Each query sees one key, whose weight is 1: a tangent that is off by a thousandth would make it 1.1. Large logits of both signs."""
    mask = IntervalMask.sliding_window(150, 0, device=device)
    for scale in (-2.0, 2.0):
        case = make(device, dtype, H=4, Hkv=2, Sq=150, Sk=150, D=64, softcap=200.0, scale=scale, mask=mask)
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in case.leaves().items()}
        out = case.with_leaves(leaves).call()[0]
        grad_out = strategies.random_tensor(out.shape, 3, dtype, device)
        grad_value = torch.autograd.grad(out, leaves["value"], grad_out)[0]
        assert_same_by_another_way(grad_value, grad_out.unflatten(1, (2, 2)).double().sum(2).to(dtype), dtype)


@pytest.mark.parametrize("softcap", [1e-4, 0.3, 4.0, 500.0])
@pytest.mark.parametrize(
    "options", [{}, {"dropout_p": 0.3, "dropout_seed": 9}, {"is_causal": True, "deterministic": True}], ids=str
)
def test_softcap_and_dropout(device, dtype, softcap, options):
    bias = strategies.random_tensor((2, 4, 90, 150), 4, device=device)
    assert_matches_reference(make(device, dtype, B=2, H=4, Hkv=2, Sq=90, Sk=150, softcap=softcap, **options))
    assert_matches_reference(make(device, dtype, B=2, H=4, Hkv=2, Sq=90, Sk=150, softcap=softcap, bias=bias, **options))


@pytest.mark.parametrize("kind", ["none", "interval", "block", "both"])
@pytest.mark.parametrize(
    "options", [{"softcap": 30.0}, {"softcap": 0.4}, {"dropout_p": 0.4}, {"softcap": 2.0, "dropout_p": 0.2}, {}], ids=str
)
def test_options_beside_every_mask(device, dtype, kind, options):
    """A GPU has kernels of their own for softcap and dropout, for bias, and for head sizes; several tiles of queries and of keys."""
    Sq, Sk, sizes = (300, 420, (64, 128, 256)) if device == "cuda" else (70, 90, (16,))
    block = BlockMask.from_bool(strategies.random_tensor((1, 2, Sq, Sk), 1, device=device) > 0.5)
    interval = random_intervals(1, Sk, 7, device)
    mask = {"none": None, "block": block, "both": interval & block}.get(kind, interval)
    key_bias = strategies.random_tensor((1, 4, Sk), 3, device=device)
    bias = strategies.random_tensor((1, 4, Sq, Sk), 4, device=device)
    options = {**options, "dropout_seed": 5} if "dropout_p" in options else options
    for D in sizes:
        case = make(device, dtype, B=2, H=4, Hkv=2, Sq=Sq, Sk=Sk, D=D, mask=mask, is_causal=True, **options)
        assert_matches_reference(case)
        assert_matches_reference(dataclasses.replace(case, key_bias=key_bias))
        assert_matches_reference(dataclasses.replace(case, bias=bias))


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("D", [64, 136])
def test_bias_beside_huge_logits_and_hidden_nan(device, dtype, softcap, D):
    """Rows whose lse is huge, pairs hidden by -inf, and NaN in a bias and in keys that no query sees."""
    Sq, Sk = 150, 200
    case = make(device, dtype, H=4, Hkv=2, Sq=Sq, Sk=Sk, D=D, is_causal=True, softcap=softcap)
    bias = strategies.random_tensor((1, 4, Sq, Sk), 4, device=device)
    bias[:, :2] -= 1e9
    bias[:, :, ::3, ::5] = -torch.inf
    bias[:, :, 7] = -torch.inf
    for start in (-1000, 30):
        mask = IntervalMask(
            torch.full((1, 1, Sk), start, dtype=torch.int32, device=device), case.key.new_full((1, 1, Sk), 5000).int()
        )
        mask.end[..., 40:70] = -2000
        visible = mask.to_bool(Sq, Sk)
        assert_matches_reference(dataclasses.replace(case, mask=mask, visible=visible, bias=bias))
        hidden = dataclasses.replace(case, mask=mask, visible=visible, bias=bias, key=case.key.clone(), value=case.value.clone())
        hidden.key[:, :, 40:70] = torch.nan
        hidden.value[:, :, 40:70] = torch.nan
        assert_matches_reference(hidden)


@pytest.mark.parametrize("kind", ["none", "interval", "block", "both", "heads apart"])
@pytest.mark.parametrize("lengths", [(300, 300), (150, 400), (400, 150)], ids=str)
def test_deterministic_is_the_gradient_too(device, dtype, kind, lengths):
    """A GPU has kernels of its own for it."""
    Sq, Sk = lengths
    block = BlockMask.from_bool(strategies.random_tensor((1, 4, Sq, Sk), 1, device=device) > 0.5)
    interval = random_intervals(4 if kind == "heads apart" else 2, Sk, 7, device)
    mask = {"none": None, "block": block, "both": interval & block}.get(kind, interval)
    key_bias = strategies.random_tensor((1, 4, Sk), 3, device=device)
    case = make(
        device,
        dtype,
        B=2,
        H=4,
        Hkv=2,
        Sq=Sq,
        Sk=Sk,
        D=24,
        Dv=40,
        mask=mask,
        is_causal=kind != "block",
        deterministic=True,
    )
    assert_matches_reference(case)
    assert_matches_reference(dataclasses.replace(case, key_bias=key_bias))


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("Sk", [257, 1300])
def test_lists_that_all_queries_see(device, dtype, step, Sk):
    """Every second or third key is live, all its life; one of those is missing, so that runs have gaps."""
    j = torch.arange(Sk, device=device)
    live = (j % step == 0) & (j != 66 * step) & (j != 130)
    always = torch.full((1, 1, Sk), -5000, dtype=torch.int32, device=device)
    mask = IntervalMask(always, torch.where(live, 5000, always).int())
    key_bias = strategies.random_tensor((1, 1, Sk), 3, device=device)
    for Sq in (64, 200):
        assert_matches_reference(make(device, dtype, H=2, Hkv=1, Sq=Sq, Sk=Sk, D=16, mask=mask, key_bias=key_bias))


@pytest.mark.parametrize("few", [1, 31, 32, 33, 40, 64, 90])
def test_some_keys_beside_those_that_all_see(device, dtype, few):
    """So many keys that only the second half of the queries see, or the first, and more that all do."""
    Sq, Sk = 300, 420
    j = torch.arange(Sk, device=device)
    some = j % 4 == 1
    some &= some.cumsum(0) <= few
    start = torch.where(some & (j % 8 == 1), Sk - Sq + 97, -1000).int()
    end = torch.where(some & (j % 8 != 1), Sk - Sq + 203, 5000).int()
    mask = IntervalMask(start, end)
    assert_matches_reference(make(device, dtype, H=2, Hkv=1, Sq=Sq, Sk=Sk, D=16, mask=mask))


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("Sk", [40, 100, 190])
def test_very_negative_logits_beside_keys_that_do_not_exist(device, dtype, Sk, deterministic):
    """What fills a tile beyond the last key has logit 0: beside logits near -360 its weight would be infinite."""
    case = make(device, dtype, Sq=90, Sk=Sk, deterministic=deterministic)
    far = dataclasses.replace(case, query=(case.query / 8 + 8), key=(case.key / 8 - 8))
    assert_matches_reference(far)


@pytest.mark.parametrize("alone", [3, 40, 70, 100, 127])
@pytest.mark.parametrize("grows", [False, True])
def test_one_key_of_a_tile_is_seen_longer_than_the_others(device, dtype, alone, grows):
    """Or by earlier queries than the others."""
    position = torch.arange(128, dtype=torch.int32, device=device)
    start, end = (position * 0 + 300, position * 0 + 600) if grows else (position * 0 - 1000, position * 0 + 70)
    if grows:
        start[alone] = 10
    else:
        end[alone] = 600
    mask = IntervalMask(torch.cat([start, start[:1] + 0 * start]), torch.cat([end, end[:1] + 0 * end]))
    key_bias = strategies.random_tensor((256,), 3, device=device)
    key_bias[alone] += 8  # a query that sees it by mistake is far off
    assert_matches_reference(make(device, dtype, Sq=256, D=16, mask=mask, key_bias=key_bias))


@pytest.mark.parametrize("alone", [0, 5, 40, 100])
@pytest.mark.parametrize("last", [126, 127, 128, 190, 191, 192])
def test_one_key_of_a_tile_ends_with_a_chunk_of_queries(device, dtype, alone, last):
    end = torch.full((256,), 10_000, dtype=torch.int32, device=device)
    end[alone] = last
    mask = IntervalMask(end * 0, end)
    key_bias = strategies.random_tensor((256,), 3, device=device)
    key_bias[alone] += 8  # a query that sees it by mistake is far off
    for causal in (False, True):
        case = make(device, dtype, Sq=256, D=16, mask=mask, key_bias=key_bias, is_causal=causal)
        assert_matches_reference(case)


@pytest.mark.parametrize(("D", "Dv"), [(16, 64), (64, 8), (40, 56)])
@pytest.mark.parametrize("mask_heads", [2, 4])
def test_gathered_keys_of_other_widths(device, dtype, D, Dv, mask_heads):
    """Heads of a group share their intervals, or have intervals of their own: then a GPU adds gradients of keys up in memory."""
    mask = random_intervals(mask_heads, 300, 5, device)
    assert_matches_reference(make(device, dtype, H=4, Hkv=2, Sq=250, Sk=300, D=D, Dv=Dv, mask=mask))


@pytest.mark.parametrize("Dv", [16, 40])
def test_a_bad_query_leaves_gradients_of_later_keys_alone(device, dtype, Dv):
    """On a GPU sums of a key's gradients lie beside those of the next key, and narrow values have a part of a tile's columns alone."""
    case = make(device, dtype, Hkv=1, Sq=256, D=64, Dv=Dv, is_causal=True)
    query = case.query.clone()
    query[:, :, 127] = torch.nan  # sees the first 128 keys, a whole tile
    results = run(case.with_leaves({"query": query}))
    assert results["grad_key"][:, :, :128].isnan().any()
    assert not any(results[name][:, :, 128:].isnan().any() for name in ("grad_key", "grad_value"))


@pytest.mark.parametrize(("D", "Dv"), [(136, 256), (256, 136), (200, 192)])
@pytest.mark.parametrize(("Sq", "Sk"), [(70, 200), (200, 70)])
@pytest.mark.parametrize("kind", ["full", "causal", "block", "interval"])
def test_wide_heads(device, dtype, D, Dv, Sq, Sk, kind):
    """Sizes beyond 128, where tiles and chunks are smaller and two warpgroups of a GPU share the columns of a tile's gradients."""
    case = make(device, dtype, H=4, Hkv=2, Sq=Sq, Sk=Sk, D=D, Dv=Dv, is_causal=kind == "causal")
    if kind == "block":
        visible = strategies.random_tensor((1, 2, Sq, Sk), 1, device=device) > -0.3
        case = dataclasses.replace(case, mask=BlockMask.from_bool(visible), visible=visible)
    if kind == "interval":
        mask = random_intervals(2, Sk, 5, device)
        key_bias = strategies.random_tensor((1, 2, Sk), 4, device=device)
        case = dataclasses.replace(case, mask=mask, visible=mask.to_bool(Sq, Sk), key_bias=key_bias)
    assert_matches_reference(case)


@pytest.mark.parametrize(("D", "Dv"), [(136, 256), (256, 136)])
@pytest.mark.parametrize(("Sq", "Sk"), [(70, 200), (200, 75)])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"dropout_p": 0.3}, {"softcap": 2.0, "dropout_p": 0.3}], ids=str)
def test_options_of_wide_heads(device, dtype, D, Dv, Sq, Sk, options):
    """Without a mask, where a GPU stores gradients of a bias, and with causality, where it adds them; biases of heads, groups or all."""
    D, Dv = (D, Dv) if device == "cuda" else (24, 40)  # a CPU has one kernel for all sizes
    options = {**options, "dropout_seed": 5} if "dropout_p" in options else options
    key_bias = strategies.random_tensor((1, 4, Sk), 3, device=device)
    for causal in (False, True):
        case = make(device, dtype, H=4, Hkv=2, Sq=Sq, Sk=Sk, D=D, Dv=Dv, is_causal=causal, **options)
        assert_matches_reference(case)
        assert_matches_reference(dataclasses.replace(case, key_bias=key_bias))
        for heads, own in ((4, dtype), (2, torch.float32), (1, dtype)):
            bias = strategies.random_tensor((1, heads, Sq, Sk), 4, own, device)
            assert_matches_reference(dataclasses.replace(case, bias=bias))
        assert_matches_reference(dataclasses.replace(case, bias=bias, key_bias=key_bias))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("interval", [False, True])
def test_bad_keys_behind_a_block_mask(device, dtype, bad, interval):
    """Hidden by bits, or by bits and intervals together, from every query, among keys that are seen."""
    visible = strategies.random_tensor((1, 1, 300, 400), 1, device=device) > -0.3
    visible[..., 3::7] = visible[..., 130:140] = False
    mask = BlockMask.from_bool(visible)
    if interval:
        window = IntervalMask.sliding_window(400, 150, device=device)
        visible[..., 5::11] &= ~window.to_bool(300, 400)[..., 5::11]
        mask = window & BlockMask.from_bool(visible)
        visible = visible & window.to_bool(300, 400)
    case = make(device, dtype, H=2, Sq=300, Sk=400, D=24, mask=mask, visible=visible)
    hidden = ~visible.any(2)[..., None]
    assert bool(hidden.any())
    dirty = case.with_leaves({name: getattr(case, name).masked_fill(hidden, bad) for name in ("key", "value")})
    assert_matches_reference(dirty)


@pytest.mark.parametrize("lead", [(2, 4), (1, 2), (2, 1)], ids=str)
def test_biases_that_are_parts_of_wider_ones(device, dtype, lead):
    """Rows further apart than there are keys, and heads further than there are rows."""
    room = strategies.random_tensor((*lead, 60, 80), 3, device=device)
    rows = strategies.random_tensor((*lead, 80), 4, device=device)
    case = make(device, dtype, B=2, H=4, Hkv=2, Sq=45, Sk=70, bias=room[:, :, 7:52, 5:75], key_bias=rows[..., 10:])
    assert not case.bias.is_contiguous()
    assert_matches_reference(case)


@pytest.mark.parametrize("lead", ["all", "groups", "none"])
@pytest.mark.parametrize(("Sq", "Sk"), [(300, 421), (300, 420), (130, 72), (130, 74), (7, 200)])
@pytest.mark.parametrize("D", [40, 128])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.3, "dropout_seed": 9}], ids=str)
def test_biases_that_are_copied_tile_by_tile(device, dtype, lead, Sq, Sk, D, options):
    """In the dtype of query and with rows whole pieces of 16 bytes apart, a GPU copies them; others it reads pair by pair, and causal
    ones unless keys and queries differ by a multiple of 8."""
    H, Hkv = (4, 2) if Sq > 128 else (2, 2)  # few queries of grouped heads are read pair by pair, too
    size = {"all": (2, H), "groups": (1, Hkv), "none": (1, 1)}[lead]
    width = 24 + -(-Sk // 8) * 8
    for own, room in dict.fromkeys([(dtype, width), (dtype, width + 1), (torch.float32, width)]):
        bias = strategies.random_tensor((*size, Sq + 9, room), 3, own, device)[:, :, 9:, 16 : 16 + Sk]
        assert_matches_reference(make(device, dtype, B=2, H=H, Hkv=Hkv, Sq=Sq, Sk=Sk, D=D, bias=bias, **options))


@pytest.mark.parametrize("which", ["start", "end"])
@pytest.mark.parametrize("Sk", [600, 1100])
def test_summaries_of_single_keys(device, dtype, which, Sk):
    """One key of every 64 is seen, the first, the last or one between; each batch sees those of another entry of the summary."""
    entries = -(-Sk // 64)
    place = (torch.arange(entries) * 21 % 64).clamp(max=Sk - 64 * (entries - 1) - 1)
    place[::3] = 0
    only = torch.arange(entries) * 64 + place
    mine = torch.zeros(1, 2, Sk, dtype=torch.bool, device=device)
    mine[:, 0, only[::2]] = mine[:, 1, only[1::2]] = True
    start, end = torch.full_like(mine, -5000, dtype=torch.int32), torch.full_like(mine, 10_000, dtype=torch.int32)
    mask = (
        IntervalMask(start, torch.where(mine, end, start))
        if which == "end"
        else IntervalMask(torch.where(mine, start, end), end * 2)
    )
    assert_matches_reference(make(device, dtype, H=4, Hkv=2, Sq=300, Sk=Sk, D=16, mask=mask))


def test_batches_have_summaries_of_their_own(device, dtype):
    lengths = torch.tensor([600, 5, 70], device=device)
    mask = IntervalMask.padding(600, lengths)
    assert_matches_reference(make(device, dtype, B=3, Sq=300, Sk=600, D=16, mask=mask))
    late = IntervalMask(mask.start, mask.end.flip(2).contiguous())
    assert_matches_reference(make(device, dtype, B=3, Sq=300, Sk=600, D=16, mask=late))


@pytest.mark.parametrize("block", [32, 96, 128])
def test_combined_masks_with_summaries(device, dtype, block):
    """Tiles of the mask that begin within a summary's 64 keys, and intervals that leave few of them."""
    visible = strategies.random_tensor((1, 2, 400, 500), 1, device=device) > -0.5
    visible[:, :, 100:, 96:288] = False
    mask = random_intervals(2, 500, 5, device, 400) & BlockMask.from_bool(visible, block)
    assert_matches_reference(make(device, dtype, H=4, Hkv=2, Sq=400, Sk=500, D=16, mask=mask))


def packed(visible, tile):
    """A block mask whose tiles have a size of their own, by the ops."""
    tile_q, tile_k = tile
    lengths = visible.shape[2:]
    tiles, rows, columns = torch.ops.dmattn.pack_tiles(visible, *lengths, 1, 1, *tile)
    slots = int((tiles >= 2).sum())
    bits = torch.ops.dmattn.pack_bits(visible, tiles, *lengths, 1, 1, *tile, slots)
    assert bits.shape == (slots, tile_q, tile_k // 32)
    return tiles, rows, columns, bits


def call_op(case, tables, gradients=True):
    """The ops themselves with a block mask: out, lse and gradients."""
    tensors = (case.query, case.key, case.value)
    options = (case.is_causal, case.query.shape[3] ** -0.5, 0.0, 0.0, True)
    masks = (None, None, *tables, *(None,) * 5)
    out, lse, *rest = torch.ops.dmattn.forward(*tensors, *masks, *options)
    results = {"out": out, "lse": lse}
    if gradients:
        grad_out, grad_lse = (g.to(t.dtype) for g, t in zip(case.incoming_gradients(), (out, lse), strict=True))
        made = torch.ops.dmattn.backward(grad_out, grad_lse, *tensors, out, lse, *masks, *options, False, False, *rest)
        results |= dict(zip(("grad_query", "grad_key", "grad_value"), made[:3], strict=True))
    return results


@pytest.mark.parametrize("tile", [(256, 256), (384, 128), (128, 512), (1024, 128), (160, 96), (224, 32), (96, 160)], ids=str)
def test_tiles_larger_than_the_kernels_own(device, dtype, tile):
    """A tile of the mask is then several tiles of queries, each with its own rows of the bits."""
    if device == "cuda" and any(size % 128 for size in tile):
        pytest.skip("tiles of multiples of 128 on CUDA")
    Sq, Sk = 700, 530
    visible = strategies.random_tensor((1, 2, Sq, Sk), 5) > 0.3
    visible[:, :, :256, 128:384] = False
    visible[:, 0, 300:, :256] = True
    case = make(device, dtype, H=4, Hkv=2, Sq=Sq, Sk=Sk, D=16, visible=visible.to(device))
    assert_close_to_reference(case, call_op(case, packed(visible.to(device), tile)))


@pytest.mark.parametrize("copied", [False, True], ids=["a view", "a copy"])
@pytest.mark.parametrize("fewer", [1, 3, 4])
def test_a_slot_beyond_the_last_is_an_empty_tile(device, dtype, copied, fewer):
    """What lies behind the bits is never read: in a view it would show, in a copy AddressSanitizer sees it."""
    Sq = Sk = 500
    visible = torch.ones(1, 1, Sq, Sk, dtype=torch.bool).tril()
    tiles, rows, columns, bits = packed(visible.to(device), (128, 128))
    kept = bits.shape[0] - fewer
    cut = bits[:kept].clone() if copied else bits[:kept]
    for tile in (tiles >= 2 + kept).nonzero().tolist():
        visible[:, :, tile[2] * 128 : tile[2] * 128 + 128, tile[3] * 128 : tile[3] * 128 + 128] = False
    case = make(device, dtype, H=2, Sq=Sq, Sk=Sk, D=16, visible=visible.to(device))
    assert_close_to_reference(case, call_op(case, (tiles, rows, columns, cut)))


# What is not finite ------------------------------------------------------------------------------------------------------------------


def with_bad_rows(case, bad):
    """The case with ``bad`` wherever nobody looks: keys no query sees, queries that see no key, and what comes in for those.

    Returns:
        The case, and the incoming gradients of such queries replaced.
    """
    seen = case.seen()
    kv_heads = case.key.shape[1]
    hidden = ~seen.any(2).unflatten(1, (kv_heads, -1)).any(2)  # [B, Hkv, Sk]
    blind = ~seen.any(3)  # [B, H, Sq]
    leaves = {
        "query": case.query.masked_fill(blind[..., None], bad),
        "key": case.key.masked_fill(hidden[..., None], bad),
        "value": case.value.masked_fill(hidden[..., None], bad),
    }
    if case.key_bias is not None and case.key_bias.shape == hidden.shape:
        leaves["key_bias"] = case.key_bias.masked_fill(hidden, bad)
    if case.bias is not None and case.bias.shape == seen.shape:
        leaves["bias"] = case.bias.masked_fill(blind[..., None], bad)
    grad_out, grad_lse = case.incoming_gradients()
    return case.with_leaves(leaves), (grad_out.masked_fill(blind[..., None], bad), grad_lse.masked_fill(blind, bad)), blind


def gradients_of(case, incoming):
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in case.leaves().items()}
    out, lse = case.with_leaves(leaves).call()
    made = torch.autograd.grad(
        (out, lse), list(leaves.values()), [g.to(t.dtype) for g, t in zip(incoming, (out, lse), strict=True)]
    )
    return {"out": out.detach(), "lse": lse.detach()} | {f"grad_{n}": g for n, g in zip(leaves, made, strict=True)}


@given(data=st.data(), bad=st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_what_nobody_sees_may_hold_anything(device, data, bad):
    case = dataclasses.replace(data.draw(attention_cases(device)), deterministic=True)
    dirty, incoming, _ = with_bad_rows(case, bad)
    assert_same_bits(gradients_of(dirty, incoming), gradients_of(case, case.incoming_gradients()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["interval", "block", "causal", "beside -inf"])
@pytest.mark.parametrize("size", [8, 40])
def test_gradients_beside_rows_that_see_nothing(device, dtype, kind, bad, size):
    """Such rows, and the gradients that come in for them, are NaN or infinite; they lie in one tile with rows that see much."""
    case = make(device, dtype, B=2, H=4, Hkv=2, Sq=150, Sk=90, D=size, deterministic=True,
                bias=strategies.random_tensor((2, 4, 150, 90), 8, device=device))  # fmt: skip
    visible = strategies.random_tensor((1, 4, 150, 90), 9) > -0.5
    visible[:, :, 3::7] = False
    visible[:, 1, 64:130] = False
    empty = torch.zeros(90, dtype=torch.int32, device=device)
    case = {
        "interval": dataclasses.replace(case, mask=IntervalMask(empty + 20, empty + 50)),
        "block": dataclasses.replace(case, mask=BlockMask.from_bool(visible.to(device)), visible=visible.to(device)),
        "causal": dataclasses.replace(case, is_causal=True),
        "beside -inf": dataclasses.replace(case, mask=visible.to(device), visible=visible.to(device)),
    }[kind]
    if kind == "interval":
        case = dataclasses.replace(case, visible=case.mask.to_bool(150, 90))
    if kind == "beside -inf":
        case.bias[:, :, 5::11] = -torch.inf
    dirty, incoming, blind = with_bad_rows(case, bad)
    assert bool(blind.any())
    results = gradients_of(dirty, incoming)
    assert_same_bits(results, gradients_of(case, case.incoming_gradients()))
    assert_close_to_reference(case, results)
    assert not results["grad_query"].masked_select(blind.expand(2, 4, 150)[..., None]).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("is_biased", [True, False])
def test_rows_that_see_nothing_beside_a_bad_key(device, dtype, bad, options, which, deterministic, is_biased):
    """Neighbours in their tile see an infinite key or value. Queries of other tiles keep, bit for bit, the gradients they have without it."""
    visible = torch.ones(1, 1, 600, 30, dtype=torch.bool, device=device)
    visible[:, :, 5:9] = visible[:, :, 140:145] = False  # sees nothing
    visible[:, :, 256:, 7] = False  # does not see the bad key, tiles apart from who does
    bias, key_bias = (
        strategies.random_tensor((1, 2, 600, 30), 6, device=device),
        strategies.random_tensor((1, 2, 30), 7, device=device),
    )
    case = make(
        device,
        dtype,
        Sq=600,
        Sk=30,
        D=16,
        mask=visible,
        visible=visible,
        deterministic=deterministic,
        **({"bias": bias, "key_bias": key_bias} if is_biased else {}),
        **options,
    )
    clean = run(case)
    leaf = getattr(case, which).clone()
    leaf[:, :, 7] = bad
    results = run(case.with_leaves({which: leaf}))
    for rows in (slice(5, 9), slice(140, 145)):
        for name in ("out", "grad_query", *(["grad_bias"] if is_biased else [])):
            assert not results[name][:, :, rows].any(), name
        assert torch.isneginf(results["lse"][:, :, rows]).all()
    for name in (
        "out",
        "lse",
        *(["grad_query"] if device == "cpu" else []),
        *(["grad_bias"] if device == "cpu" and is_biased else []),
    ):  # on a GPU backward may tell other tiles
        assert torch.equal(results[name][:, :, 256:], clean[name][:, :, 256:]), name
