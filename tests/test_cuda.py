"""What only a GPU can show: graph capture, side streams, repeated gradients, memory bounds, and the errors of the CUDA ops."""

from __future__ import annotations

import dmattn
import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def inputs(length=777, heads=4, kv_heads=2, size=64, seed=0, batch=2):
    generator = torch.Generator("cuda").manual_seed(seed)
    draw = lambda *shape: torch.randn(batch, *shape, generator=generator, device="cuda")  # noqa: E731
    q, k, v = (draw(h, length, size).bfloat16() for h in (heads, kv_heads, kv_heads))
    return q, k, v, draw(kv_heads, length), draw(heads, length, size).bfloat16()


def step(q, k, v, scores, grad_out, deterministic=True):
    leaves = [x.detach().requires_grad_() for x in (q, k, v, scores)]
    out = dmattn.dynamic_mask_attention(*leaves, 100, deterministic=deterministic)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def test_capture_new_inputs_replay():
    static = inputs()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*static)
    for seed in (1, 2):
        fresh = inputs(seed=seed)
        for old, new in zip(static, fresh, strict=True):
            old.copy_(new)
        graph.replay()
        for got, expected in zip(captured, step(*fresh), strict=True):
            assert torch.equal(got, expected)


def test_packing_is_captured_too():
    mask = torch.rand(1, 2, 300, 300, device="cuda") > 0.5
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block = dmattn.BlockMask.from_bool(mask)
    mask.copy_(torch.rand(1, 2, 300, 300, device="cuda") > 0.9)
    graph.replay()
    assert torch.equal(block.to_bool(), mask)


def test_side_stream():
    given = inputs()
    expected = step(*given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = step(*given)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("sparse", [True, False])
def test_deterministic_gradients_are_equal_over_twenty_runs(sparse):
    q, k, v, scores, grad_out = inputs(length=1500)

    def run():
        if sparse:
            return step(q, k, v, scores, grad_out)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(dmattn.attention(*leaves, is_causal=True, deterministic=True), leaves, grad_out)

    first = run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


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


def test_float32_says_what_is_supported():
    q = torch.randn(1, 1, 8, 8, device="cuda")
    with pytest.raises(TypeError, match="query: expected dtype bfloat16, float16, got float32"):
        dmattn.attention(q, q, q)
    with pytest.raises(RuntimeError, match="bfloat16"):
        torch.ops.dmattn.forward(q, q, q, *(None,) * 9, False, 1.0, 0.0, 0.0, False)


def test_impossible_family_is_an_error(run_python):
    program = "import torch, dmattn; q = torch.randn(1, 1, 8, 8, device='cuda').half(); dmattn.attention(q, q, q)"
    assert run_python("-c", program, DMATTN_FAMILY="sm80").returncode == 0
    done = run_python("-c", program, DMATTN_FAMILY="sm70")
    assert done.returncode != 0
    assert "DMATTN_FAMILY: expected" in done.stderr
