"""CUDA ops in captured graphs, on side streams and on a second device."""

from __future__ import annotations

import dmattn
import pytest
import torch
from cuda_inputs import inputs, step

pytestmark = pytest.mark.gpu


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


def arrive_late(given, device):
    """Copies that hold NaN until a while after the current stream of the device reaches them: another stream would read the NaN."""
    copies = [torch.full_like(x, torch.nan, device=device) for x in given]
    torch.cuda.synchronize(device)
    torch.cuda._sleep(100_000_000)  # cycles
    for copy, x in zip(copies, given, strict=True):
        copy.copy_(x)
    return copies


def test_side_stream():
    given = inputs()
    expected = step(*given)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        got = step(*arrive_late(given, "cuda"))
        torch.cuda.current_stream().synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("side", [False, True], ids=["its own stream", "a side stream"])
def test_a_second_device_while_the_first_is_current(side):
    given = inputs()
    window, visible = 100, torch.rand(1, 4, 777, 777, device="cuda:0") > 0.5

    def everything(q, k, v, scores, grad_out, visible):
        end = dmattn.IntervalMask.top_k(scores, window).end
        block = dmattn.BlockMask.from_bool(visible)
        return [*step(q, k, v, scores, grad_out), end, dmattn.attention(q, k, v, block), block.bits]

    expected = everything(*given, visible)
    torch.cuda.synchronize()
    there = torch.device("cuda:1")
    moved = visible.to(there)
    stream = torch.cuda.Stream(there) if side else torch.cuda.default_stream(there)
    with torch.cuda.stream(stream):
        late = arrive_late([x.to(there) for x in given], there)
        with torch.cuda.device(0):
            assert torch.cuda.current_device() == 0
            assert torch.cuda.current_stream(there) == stream
            got = everything(*late, moved)
            assert torch.cuda.current_device() == 0
        stream.synchronize()
    assert all(x.device == there for x in got)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, expected, strict=True))
