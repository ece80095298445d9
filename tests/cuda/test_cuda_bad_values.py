"""NaN and infinities in queries, keys and values on a GPU reach only who sees them."""

from __future__ import annotations

import dmattn
import pytest
import torch
from cuda_inputs import inputs
from dmattn_bench.two_ways import assert_same_in_another_order

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_infinite_value_of_a_key_that_all_see(place):
    """Where the keys do not fill a chunk, what stands for those missing must not turn it into NaN."""
    q, k, v, _, _ = inputs(200, 2, 2, 64, batch=1)
    v[:, :, place, :5] = torch.inf
    j = torch.arange(200, device="cuda")
    end = torch.where(j < 3, 2**31 - 1, -(2**31)).int()[None, None]
    out = dmattn.attention(q, k, v, dmattn.IntervalMask(torch.full_like(end, -(2**31)), end))
    assert (out[..., :5] == torch.inf).all()
    assert torch.isfinite(out[..., 5:]).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["interval", "causal", "few keys"])
@pytest.mark.parametrize("size", [128, 256])
def test_queries_that_see_nothing_beside_bad_keys(size, kind, deterministic, bad):
    """The first 250 of 600, in tiles with queries that see bad keys; some of them are bad themselves."""
    keys = {"interval": 600, "causal": 350, "few keys": 20}[kind]
    q, k, v, scores, grad_out = inputs(600, 2, 2, size, batch=1)
    k, v = k[:, :, :keys].contiguous(), v[:, :, :keys].contiguous()
    k[:, :, 3], v[:, :, 5] = bad, bad
    q[:, :, 200] = bad
    key_bias = scores[:, :, :keys].float().contiguous() if kind == "few keys" else None
    start = torch.full((1, 1, keys), 250, dtype=torch.int32, device="cuda")
    mask = None if kind == "causal" else dmattn.IntervalMask(start, start + 1000)
    leaf = q.requires_grad_()
    out, lse = dmattn.attention(
        leaf, k, v, mask, key_bias=key_bias, is_causal=kind == "causal", return_lse=True, deterministic=deterministic
    )
    (grad,) = torch.autograd.grad(out, leaf, grad_out)
    assert torch.isneginf(lse[:, :, :250]).all()
    assert not out[:, :, :250].any()
    assert not grad[:, :, :250].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("keys", [20, 600, 3000])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_queries_that_see_nothing_beside_a_bad_key_bias(size, softcap, keys, bad):
    """The first 250 of 600, in tiles with queries that see such a key and others with a huge key_bias."""
    q, _, _, _, _ = inputs(600, 2, 2, size, batch=1)
    _, k, v, key_bias, _ = inputs(keys, 2, 2, size, batch=1)
    key_bias[:, :, 7], key_bias[:, :, 11] = bad, 1e6
    first = keys - 350  # the position of query 250
    start = torch.full((1, 1, keys), first, dtype=torch.int32, device="cuda")
    mask = dmattn.IntervalMask(start, start + 1000)
    out, lse = dmattn.attention(q, k, v, mask, key_bias=key_bias, softcap=softcap, return_lse=True)
    assert torch.isneginf(lse[:, :, :250]).all()
    assert not out[:, :, :250].any()
    assert torch.isnan(out[:, :, 250:]).all()


def test_a_bad_value_stays_among_queries_near_those_that_see_it():
    """Keys that all queries see beside one that only the last ones see."""
    q, k, v, scores, _ = inputs(9000, 2, 2, 64, batch=1)
    end = torch.ops.dmattn.select(scores.float(), None, 500, False)
    start = torch.full_like(end, -(2**31))
    end[:, :, 7], start[:, :, 7] = 2**31 - 1, 8800
    v[:, :, 7] = torch.nan
    out = dmattn.attention(q, k, v, dmattn.IntervalMask(start, end))
    assert torch.isfinite(out[:, :, :8576]).all()  # two tiles of 128 before the first that sees it
    assert torch.isnan(out[:, :, 8800:]).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("size", [128, 256])
def test_keys_that_a_block_mask_hides_from_all(size, bad):
    """In a tile that comes in one piece otherwise."""
    q, k, v, _, grad_out = inputs(500, 2, 2, size, batch=1)
    visible = torch.rand(1, 2, 500, 500, device="cuda") < 0.5
    visible[:, :, :, 3::7] = visible[:, :, 200:, 128:256] = False
    hidden = ~visible.any(-2)

    def gradients(fill):
        leaves = [x.masked_fill(hidden[..., None], fill).requires_grad_() for x in (k, v)]
        out = dmattn.attention(q, *leaves, dmattn.BlockMask.from_bool(visible))
        return torch.autograd.grad(out, leaves, grad_out)

    for got, expected in zip(gradients(bad), gradients(0.0), strict=True):
        assert_same_in_another_order(got, expected, torch.bfloat16)
        assert not got[hidden].any()
