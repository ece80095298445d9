"""The CPU ops under many threads: tasks that share sums, more workers than heads, and several callers at once."""

from __future__ import annotations

import concurrent.futures
import dataclasses

import pytest
import torch
from cases import make, threads
from dmattn import BlockMask, IntervalMask
from dmattn.testing import assert_close_to_reference, assert_same_bits, run, strategies

tensor = strategies.random_tensor
THREADS = (1, 2, 3, 8)


@pytest.mark.parametrize(
    ("B", "H", "Hkv", "lead"),
    [(1, 8, 1, (1, 1)), (2, 8, 2, (1, 2)), (2, 4, 2, (2, 2)), (8, 1, 1, (1, 1)), (2, 4, 1, (1, 4))],
    ids=str,
)
@pytest.mark.parametrize(("Sq", "Sk"), [(128, 1024), (300, 200)])
def test_bias_gradients_of_shared_heads_are_not_raced_for(B, H, Hkv, lead, Sq, Sk):
    """Heads of a group, or batches, in tasks of their own, have one bias: a lost sum shows within some of forty runs."""
    case = make("cpu", torch.float32, B=B, H=H, Hkv=Hkv, Sq=Sq, Sk=Sk, D=8, bias=tensor((*lead, Sq, Sk), 5), deterministic=True)
    with threads(1):
        alone = run(case)
    assert_close_to_reference(case, alone)
    bias = case.bias.clone().requires_grad_()
    with threads(8):
        results = case.with_leaves({"bias": bias}).call()
        incoming = [g.to(result.dtype) for g, result in zip(case.incoming_gradients(), results, strict=True)]
        for _ in range(40):
            (gradient,) = torch.autograd.grad(results, bias, incoming, retain_graph=True)
            assert torch.equal(gradient, alone["grad_bias"])


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("Sk", [1024, 1025, 2060])
@pytest.mark.parametrize("D", [16, 24])
def test_parts_of_a_head_add_up(count, Sk, D):
    """With fewer heads than threads, queries are distributed over several workers and their sums of keys added up, 1,024 keys a task."""
    case = make("cpu", torch.float32, H=2, Hkv=1, Sq=140, Sk=Sk, D=D, key_bias=tensor((1, 2, Sk), 6), is_causal=True)
    with threads(count):
        assert_close_to_reference(case, run(case))


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 2), (5, 5)], ids=str)
def test_every_number_of_threads_gives_the_same(heads):
    H, Hkv = heads
    block = BlockMask.from_bool(tensor((1, H, 260, 330), 8) > -1, 64)
    interval = IntervalMask.top_k(tensor((1, Hkv, 330), 9), 90)
    case = make("cpu", torch.float32, D=16, H=H, Hkv=Hkv, Sq=260, Sk=330, mask=interval & block, softcap=5.0,
                bias=tensor((1, 1, 260, 330), 5), key_bias=tensor((1, Hkv, 330), 6), dropout_p=0.3, deterministic=True)  # fmt: skip
    with threads(1):
        first = run(case)
    assert_close_to_reference(case, first)
    fast = dataclasses.replace(case, deterministic=False)
    for count in THREADS[1:]:
        with threads(count):
            assert_same_bits(run(case), first)
            assert_close_to_reference(case, run(fast))


def test_packing_and_selection_on_every_number_of_threads():
    mask, scores = tensor((2, 3, 300, 333), 0) > 0.2, strategies.make_scores((3, 5, 2000), "ties", 1)

    def made():
        block = BlockMask.from_bool(mask, 32)
        return [
            block.tiles,
            block.rows,
            block.columns,
            block.bits,
            *(IntervalMask.top_k(scores, 70, c).end for c in (True, False)),
        ]

    with threads(1):
        first = made()
    for count in THREADS[1:]:
        with threads(count):
            assert all(torch.equal(a, b) for a, b in zip(made(), first, strict=True))


def test_several_callers_at_once():
    """Ops keep nothing between calls that two Python threads could share."""
    given = {"device": "cpu", "dtype": torch.float32, "H": 4, "Hkv": 2, "Sk": 150, "D": 16, "deterministic": True}
    cases = [make(**given, Sq=20 + 61 * n, is_causal=n % 2 == 0, key_bias=tensor((1, 2, 150), n)) for n in range(4)]
    expected = [run(case) for case in cases]

    def several(number):
        case = cases[number % len(cases)]
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in case.leaves().items()}
        for _ in range(10):
            out, lse = case.with_leaves(leaves).call()
            incoming = [g.to(t.dtype) for g, t in zip(case.incoming_gradients(), (out, lse), strict=True)]
            gradients = torch.autograd.grad((out, lse), list(leaves.values()), incoming)
            results = {"out": out.detach(), "lse": lse.detach()}
            results |= {f"grad_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
            assert_same_bits(results, expected[number % len(cases)])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(several, range(8)))
