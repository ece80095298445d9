"""How much memory CUDA ops take, how large tensors may be, and which dtypes and families there are."""

from __future__ import annotations

import dmattn
import pytest
import torch
from cuda_inputs import inputs
from dmattn.testing.case import AttentionCase
from dmattn.testing.tolerance import assert_close_to_reference

pytestmark = pytest.mark.gpu


def test_extra_memory_at_131072():
    q, k, v, scores, grad_out = inputs(131072, 16, 16, 128, batch=1)
    end = dmattn.IntervalMask.top_k(scores, 2048).end
    mask = dmattn.IntervalMask(torch.arange(131072, dtype=torch.int32, device="cuda"), end)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def peak(run):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before - sum(r.nbytes for r in results)) / 1e9, results

    forward, (out,) = peak(lambda: (dmattn.attention(*leaves, mask),))
    backward, _ = peak(lambda: torch.autograd.grad(out, leaves, grad_out))
    assert forward < 0.3
    assert backward < 2.7


def test_more_than_two_to_the_31_elements():
    """The last queries of the last head, far beyond what 32 bits count, are a small problem of their own: their window, and no gradient
    enters anywhere else."""
    if torch.cuda.mem_get_info()[0] < 45e9:
        pytest.skip("needs 45 GB of free GPU memory")
    length, heads, kv_heads, size, left, tail = 65536, 264, 33, 128, 64, 200
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, h, length, size, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    )
    assert q.numel() > 2**31
    out, lse = dmattn.attention(q, k, v, dmattn.IntervalMask.sliding_window(length, left, device="cuda"), return_lse=True)

    keys = tail + left
    small = dmattn.IntervalMask.sliding_window(keys, left, device="cuda")
    case = AttentionCase(
        *(x.detach()[:, -1:, -n:] for x, n in ((q, tail), (k, keys), (v, keys))),
        visible=small.to_bool(tail, keys),
        grad_through_lse=False,
    )
    grad_out = torch.zeros_like(q)
    grad_out[:, -1:, -tail:] = case.incoming_gradients()[0]
    gradients = torch.autograd.grad(out, (q, k, v), grad_out)
    results = {"out": out.detach()[:, -1:, -tail:], "lse": lse.detach()[:, -1:, -tail:]}
    for name, gradient, rows in zip(("query", "key", "value"), gradients, (tail, keys, keys), strict=True):
        results[f"grad_{name}"] = gradient[:, -1:, -rows:]
    assert_close_to_reference(case, results)
    for gradient, rows in zip(gradients, (tail, keys, keys), strict=True):
        assert not gradient[:, :-1].any()
        assert not gradient[:, -1, :-rows].any()


def test_float32_says_what_is_supported():
    q = torch.randn(1, 1, 8, 8, device="cuda")
    with pytest.raises(TypeError, match="query: expected dtype bfloat16, float16, got float32"):
        dmattn.attention(q, q, q)
    with pytest.raises(RuntimeError, match="bfloat16"):
        torch.ops.dmattn.forward(q, q, q, *(None,) * 11, False, 1.0, 0.0, 0.0, False)


def test_impossible_family_is_an_error(run_python):
    program = "import torch, dmattn; q = torch.randn(1, 1, 8, 8, device='cuda').half(); dmattn.attention(q, q, q)"
    assert run_python("-c", program, DMATTN_FAMILY="sm80").returncode == 0
    done = run_python("-c", program, DMATTN_FAMILY="sm70")
    assert done.returncode != 0
    assert "DMATTN_FAMILY: expected" in done.stderr
    done = run_python("-c", program, DMATTN_FAMILY="sm90")
    if torch.cuda.get_device_capability()[0] == 9:
        assert done.returncode == 0, done.stderr
    else:
        assert "DMATTN_FAMILY: sm90 needs" in done.stderr or "DMATTN_FAMILY: expected auto or sm80" in done.stderr
