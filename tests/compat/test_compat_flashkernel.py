"""dmattn.compat.flashkernel against plain definitions: attention with lse, and reductions whose dimension -1 is all of them."""

from __future__ import annotations

import pytest
import torch
from dmattn.compat import flashkernel
from dmattn.testing import AttentionCase, assert_close_to_reference, run, strategies

tensor = strategies.random_tensor


@pytest.mark.parametrize("name", ["flash_attention_forward", "triton_flash_attention_forward"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("size", "length"), [(64, 65), (128, 33), (40, 1)])
def test_attention_and_lse(device, dtype, name, causal, size, length):
    case = AttentionCase(*(tensor((2, 3, length, size), i, dtype, device) for i in range(3)), is_causal=causal)

    def fn(query, key, value, _, *, is_causal, **__):
        return getattr(flashkernel, name)(query, key, value, None, is_causal)

    assert_close_to_reference(case, run(case, fn))


@pytest.mark.parametrize("scale", [None, -1.0, 0.3, 0.0])
def test_a_negative_scale_is_none(scale):
    q, k, v = (tensor((1, 2, 9, 16), i, torch.float64) for i in range(3))
    out, lse = flashkernel.flash_attention_forward(q, k, v, scale)
    logits = q @ k.mT * (16**-0.5 if scale in (None, -1.0) else scale)
    torch.testing.assert_close(out, logits.softmax(-1) @ v)
    torch.testing.assert_close(lse, logits.logsumexp(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(7,), (5, 6), (2, 3, 4)])
def test_minus_one_is_everything(shape, dtype):
    given = tensor(shape, 0).mul(4).round().to(dtype)  # whole numbers: sums are exact
    for found in (flashkernel.reduce_sum(given), flashkernel.reduce_sum(given, -1), flashkernel.triton_reduce_sum(given)):
        assert torch.equal(found, given.sum())
    for found in (flashkernel.reduce_max(given), flashkernel.reduce_max(given, -1), flashkernel.triton_reduce_max(given)):
        assert torch.equal(found, given.max())
    for dim in range(len(shape)):
        assert torch.equal(flashkernel.reduce_sum(given, dim), given.sum(dim))
        assert torch.equal(flashkernel.reduce_max(given, dim), given.amax(dim))
