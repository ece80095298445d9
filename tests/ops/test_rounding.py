"""How the CPU kernels store bfloat16 and float16, halfway values, subnormals, infinities, NaN.

One or two keys with equal logits make results that are exact in float32, so that what is stored is torch's own rounding, bit for bit.
tests/ops/test_levels.py runs the checks for each instruction set.
"""

from __future__ import annotations

import struct

import dmattn
import pytest
import torch
from dmattn.testing import strategies


def every_bit_pattern(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of a 16-bit dtype below 2^126, so that sums of two stay finite, [8192, 8]."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    return torch.where(numbers.double().abs() < 2.0**126, numbers, torch.zeros_like(numbers)).view(-1, 8)


def mean_of(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention makes of two values with equal weights [rows, 8], and what it should: their exact mean, rounded once."""
    value = torch.stack([a, b], dim=1)[:, None]  # [rows, 1, 2, 8]
    query, key = torch.zeros(value.shape[0], 1, 1, 8, dtype=a.dtype), torch.zeros_like(value)
    return dmattn.attention(query, key, value)[:, 0, 0], ((a.double() + b.double()) / 2).float().to(a.dtype)


def check_means() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        numbers = every_bit_pattern(dtype)
        alone, _ = mean_of(numbers, numbers)
        assert torch.equal(alone, numbers), f"{dtype}: a value alone changes"
        # A neighbour: the mean lies halfway between the two, and ties go to the even one.
        bits = numbers.view(torch.int16)
        neighbour = torch.where(torch.isfinite((bits + 1).view(dtype)), (bits + 1).view(dtype), numbers)
        got, expected = mean_of(numbers, neighbour)
        assert torch.equal(got, expected), f"{dtype}: halfway values are rounded otherwise"
        # Any other: for bfloat16 only such as float32 holds the sum of exactly.
        other = numbers.flatten()[torch.randperm(numbers.numel(), generator=torch.Generator().manual_seed(0))].view(-1, 8)
        total = numbers.double() + other.double()
        other = torch.where(total == total.float().double(), other, numbers)
        got, expected = mean_of(numbers, other)
        small = expected.double().abs() < 2.0**-126  # half of it is a subnormal float32: exact as well
        assert torch.equal(got, expected), (
            f"{dtype}: {int((got != expected).sum())} means are off, {int(small.sum())} of all small"
        )


def check_gradients() -> None:
    """grad_value is half of grad_out; lse is exactly log 2, so a weight is 0.5 or next to it."""
    for dtype in (torch.bfloat16, torch.float16):
        value = torch.zeros(8192, 1, 1, 8, dtype=dtype, requires_grad=True)
        query = torch.zeros(8192, 1, 1, 8, dtype=dtype)
        out = dmattn.attention(query, torch.zeros_like(query), value)  # one key: lse is 0, the weight 1
        numbers = every_bit_pattern(dtype)
        (gradient,) = torch.autograd.grad(out, value, numbers[:, None, None])
        assert torch.equal(gradient[:, 0, 0], numbers), f"{dtype}: a gradient alone changes"
        # Two queries of one key: their sum, rounded once.
        bits = numbers.view(torch.int16)
        neighbour = torch.where(torch.isfinite((bits + 1).view(dtype)), (bits + 1).view(dtype), numbers)
        out = dmattn.attention(query.expand(-1, -1, 2, -1), torch.zeros_like(query), value)
        (gradient,) = torch.autograd.grad(out, value, torch.stack([numbers, neighbour], 1)[:, None])
        assert torch.equal(gradient[:, 0, 0], (numbers.double() + neighbour.double()).float().to(dtype)), dtype


def check_infinities_and_nan() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        zeros = torch.zeros(1, 1, 1, 8, dtype=dtype)
        for bad in (torch.inf, -torch.inf, torch.nan):
            value = torch.full((1, 1, 1, 8), bad, dtype=dtype)
            out = dmattn.attention(zeros, zeros, value)
            assert torch.equal(torch.nan_to_num(out, nan=7.0), torch.nan_to_num(value, nan=7.0)), (dtype, bad)
        # A float32 NaN of whatever bits stays NaN: rounded as a number, 0x7fffffff would become -0 and 0xffffffff 0.
        for bits in (0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFC00000, 0x7FC08000):
            payload = torch.tensor(struct.unpack("<i", struct.pack("<I", bits)), dtype=torch.int32).view(torch.float32)
            assert torch.isnan(dmattn.attention(zeros, zeros, zeros + 1, key_bias=payload)).all(), (dtype, hex(bits))
            leaf = zeros.clone().requires_grad_()
            out, lse = dmattn.attention(leaf, zeros + 1, zeros + 1, return_lse=True)
            (gradient,) = torch.autograd.grad(lse, leaf, payload.view(1, 1, 1))
            assert torch.isnan(gradient).all(), (dtype, hex(bits))
    # Beyond the largest float16 lies infinity, from 65520 on.
    large = torch.tensor([65504.0, 65504.0, -65504.0, -65504.0, 60000.0, 2048.0, 1.0, 0.0]).half().view(1, 1, 1, 8)
    zeros, value = torch.zeros(1, 1, 1, 8, dtype=torch.float16), torch.zeros(1, 1, 1, 8, dtype=torch.float16, requires_grad=True)
    out = dmattn.attention(zeros.expand(1, 1, 2, 8), zeros, value)
    (gradient,) = torch.autograd.grad(out, value, torch.cat([large, torch.full_like(large, 16.0)], 2))
    assert torch.equal(gradient, (large.float() + 16).half())


def check_no_bias() -> None:
    """Roundings go up as often as down: the mean error of many results is far below half a unit in the last place."""
    for dtype in (torch.bfloat16, torch.float16):
        query, key, value = (strategies.random_tensor((4, 4, 64, 64), i, dtype) for i in range(3))
        out = dmattn.attention(query, key, value)
        exact = dmattn.attention(query.double(), key.double(), value.double())
        unit = torch.finfo(dtype).eps * exact.abs()  # at least one in the last place, at most two
        towards_zero = ((exact.abs() - out.double().abs()) / unit).mean()
        assert abs(float(towards_zero)) < 0.02, (dtype, float(towards_zero))


CHECKS = (check_means, check_gradients, check_infinities_and_nan, check_no_bias)


@pytest.mark.parametrize("check", CHECKS)
def test_what_is_stored_is_rounded_as_torch_rounds(check):
    check()
