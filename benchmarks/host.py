"""Host time of one eager call, Python to last launch: ``python benchmarks/host.py [--device cuda]``. No JSON: for comparing two versions.

On a CPU the query has no rows, so the kernels have nothing to do. On CUDA 64 rows make kernels that end before the next call is launched, or
nearly so; calls are queued and only the queueing is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import dmattn
import torch
import torch.nn.functional as F
from torch import Tensor

CALLS, ROUNDS = 200, 15


def microseconds(call: Callable[[], object], device: str) -> float:
    """Median over rounds of the time a call takes to return."""
    rounds = []
    for _ in range(ROUNDS + 2):  # the first two warm up
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(rounds[2:])


def calls(device: str) -> list[tuple[str, Callable[[], object]]]:
    """What is timed, by name."""
    length, rows, dtype = (8, 0, torch.float32) if device == "cpu" else (64, 64, torch.bfloat16)
    draw = lambda n: torch.randn(1, 2, n, 64, device=device).to(dtype)  # noqa: E731
    query, key, value, grad_out = draw(rows), draw(length), draw(length), draw(rows)
    scores = torch.randn(1, 2, length, device=device)
    interval = dmattn.IntervalMask.causal(length, device=device)
    block = dmattn.BlockMask.from_bool(torch.ones(rows, length, dtype=torch.bool, device=device))
    lists = dmattn.IndexMask(torch.randint(0, length, (1, 2, rows, 16), device=device, dtype=torch.int32), is_causal=True)
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    learned = scores.clone().requires_grad_()

    def trained(out: Tensor, inputs: list[Tensor]) -> None:
        torch.autograd.grad(out, inputs, grad_out)

    return [
        ("torch's scaled_dot_product_attention", lambda: F.scaled_dot_product_attention(query, key, value)),
        ("  with gradients", lambda: F.scaled_dot_product_attention(*leaves)),
        ("  and backward", lambda: trained(F.scaled_dot_product_attention(*leaves), leaves)),
        ("attention", lambda: dmattn.attention(query, key, value)),
        ("  with gradients", lambda: dmattn.attention(*leaves)),
        ("  and backward", lambda: trained(dmattn.attention(*leaves), leaves)),
        ("attention, interval mask", lambda: dmattn.attention(query, key, value, interval)),
        ("attention, block mask", lambda: dmattn.attention(query, key, value, block)),
        ("attention, index mask", lambda: dmattn.attention(query, key, value, lists)),
        ("dynamic_mask_attention", lambda: dmattn.dynamic_mask_attention(query, key, value, scores, 4)),
        ("  with gradients", lambda: dmattn.dynamic_mask_attention(*leaves, learned, 4)),
        ("  and backward", lambda: trained(dmattn.dynamic_mask_attention(*leaves, learned, 4), [*leaves, learned])),
        ("IntervalMask.top_k", lambda: dmattn.IntervalMask.top_k(scores, 4)),
        ("the select op alone", lambda: torch.ops.dmattn.select(scores, None, 4, True)),
        ("scaled_dot_product_attention", lambda: dmattn.scaled_dot_product_attention(query, key, value)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device = parser.parse_args().device
    torch.set_num_threads(1)
    print(
        f"microseconds a call, median of {ROUNDS} rounds of {CALLS}, {device}, torch {torch.__version__}, dmattn {dmattn.__version__}"
    )
    for name, call in calls(device):
        print(f"{name:40s} {microseconds(call, device):7.1f}", flush=True)


if __name__ == "__main__":
    main()
