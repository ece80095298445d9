"""What would be wrong without a word: arguments and settings whose neglect changes no shape and raises nothing."""

from __future__ import annotations

import math

import dmattn
import pytest
import torch
from dmattn import IntervalMask
from dmattn.nn import rotate
from dmattn.testing import strategies
from watched import Watched

tensor = strategies.random_tensor


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_use_deterministic_algorithms_is_obeyed(device, dtype, wanted, given):
    q = tensor((1, 2, 20, 16), 0, dtype, device).requires_grad_()
    scores = tensor((1, 2, 20), 1, device=device)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        with Watched() as options:
            dmattn.attention(q, q, q, deterministic=given).sum().backward()
            dmattn.dynamic_mask_attention(q, q, q, scores, 4, deterministic=given).sum().backward()
            dmattn.scaled_dot_product_attention(q, q, q).sum().backward()
    finally:
        torch.use_deterministic_algorithms(before)
    flags = [arguments["deterministic"] for name, arguments in options.calls if name in ("forward", "backward")]
    assert flags == [wanted or given] * 4 + [wanted] * 2


def test_autocast_leaves_float64_alone():
    q = tensor((1, 1, 5, 8), 0, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        out = dmattn.attention(q, q, q)
    assert out.dtype == torch.float64
    assert torch.equal(out, dmattn.attention(q, q, q))


@pytest.mark.parametrize("extra", [5, 2**31, 2**40])
def test_lengths_beyond_int32_do_not_wrap(extra):
    """They are refused where their values are known; where not, they are as good as all keys, not what their low 32 bits say."""
    lengths = torch.tensor([2**32 + extra, 3])
    for make in (IntervalMask.padding, IntervalMask.prefix):
        with pytest.raises(ValueError, match=f"lengths: expected lengths from 0 to 1048576, got {2**32 + extra}"):
            make(9, lengths)
        traced = torch.compile(
            lambda given, make=make: make(9, given).to_bool(9, 9)[:, 0, 0].sum(-1), fullgraph=True, backend="eager"
        )
        assert traced(lengths).tolist() == [9, 3]
    ids = torch.tensor([1, 1 + 2**32, 1 + 2**32, 2])
    assert IntervalMask.documents(4, ids=ids, is_causal=False).to_bool(4, 4)[0, 0].sum(-1).tolist() == [1, 2, 2, 1]


@pytest.mark.parametrize("first", [0, 10**6])
@pytest.mark.parametrize("theta", [100.0, 7.0])
def test_rope_turns_as_published(theta, first):
    """A pair (x, y) of dimensions d and d + D/2, as a complex number, is multiplied with exp(i * position * theta ** (-2d / D)).

    Angles of float32, the nearest to a position of a million and its fractions, would be off by a twentieth.
    """
    x, position = tensor((2, 3, 11, 16), 0, torch.float64), first + torch.arange(11)[:, None]
    turns = torch.polar(torch.ones(()).double(), position * theta ** (-2 * torch.arange(8).double() / 16))
    expected = torch.complex(x[..., :8], x[..., 8:]) * turns
    got = rotate(x, theta, position.T)
    torch.testing.assert_close(torch.complex(got[..., :8], got[..., 8:]).to(torch.complex64), expected.to(torch.complex64))
    # By numbers: one radian takes (1, 0) to (cos 1, sin 1).
    unit = torch.zeros(1, 1, 2, 8)
    unit[..., 0] = 1
    turned = rotate(unit, 10000.0)[0, 0, 1]
    assert turned[[0, 4]].tolist() == pytest.approx([math.cos(1), math.sin(1)])


def test_the_largest_length_is_taken(device, dtype):
    longest = 1 << 20
    row = torch.ones(1, 1, 1, 8, dtype=dtype, device=device)  # so that sums of a million of them are exact
    keys = row.expand(1, 1, longest, 8)
    assert torch.equal(dmattn.attention(row, keys, keys), row)
    few = torch.zeros(1, 1, longest, dtype=torch.int32, device=device)
    few[..., -3:] = 2**31 - 1
    out = dmattn.attention(keys, row.expand(1, 1, 3, 8), row.expand(1, 1, 3, 8), IntervalMask(few[..., -3:] * 0, few[..., -3:]))
    assert out.shape[2] == longest
    assert torch.equal(dmattn.attention(row, keys, keys, IntervalMask(few * 0, few)), row)
    for mask in (
        IntervalMask.causal(longest),
        IntervalMask.padding(longest, longest),
        IntervalMask.sliding_window(longest, longest),
    ):
        assert mask.end.shape[2] == longest
    assert IntervalMask.top_k(keys[..., 0], 5).end.shape[2] == longest


@pytest.mark.parametrize("order", [1, -1])
def test_and_keeps_the_causality_of_either(order):
    """Selection within causal documents and padding: later keys are hidden, whichever of the two is causal."""
    documents = IntervalMask.documents(12, torch.tensor([0, 5, 12]), is_causal=True)
    padding = IntervalMask.padding(12, 10)
    first, second = (documents, padding)[::order]
    scores = tensor((1, 2, 12), 0)
    selected = IntervalMask.top_k(scores, 3, False, first & second)
    assert not selected.to_bool(12, 12).triu(1).any()
    q, k = tensor((1, 2, 12, 8), 1), tensor((1, 2, 12, 8), 2)
    both = dmattn.dynamic_mask_attention(q, k, k, scores, 3, is_causal=False, base=first & second)
    torch.testing.assert_close(both, dmattn.attention(q, k, k, selected, key_bias=scores))
    assert torch.equal(both[:, :, 0], k[:, :, 0])


def test_sdpa_drops_weights(device, dtype):
    q = torch.zeros(1, 1, 400, 8, dtype=dtype, device=device)
    value = torch.eye(8, dtype=dtype, device=device).repeat(50, 1)[None, None]
    out = dmattn.scaled_dot_product_attention(q, q, value, dropout_p=0.5)
    assert torch.unique(out[0, 0, :, 0]).numel() > 10
    assert torch.equal(
        dmattn.scaled_dot_product_attention(q, q, value)[0, 0, :1].expand(400, 8),
        dmattn.scaled_dot_product_attention(q, q, value)[0, 0],
    )


def test_masks_and_biases_of_key_heads_meet_those_of_query_heads(device, dtype):
    """Query heads 0 and 1 share key head 0, not 0 and 2."""
    heads = torch.arange(4, device=device)
    of_key_heads = IntervalMask.padding(9, 9, device=device) & IntervalMask(
        torch.zeros(1, 2, 9, dtype=torch.int32, device=device),
        (torch.arange(2, device=device) * 5 + 3).int()[None, :, None].expand(1, 2, 9),
    )
    of_query_heads = IntervalMask(
        heads.int()[None, :, None].expand(1, 4, 9), torch.full((1, 4, 9), 2**31 - 1, dtype=torch.int32, device=device)
    )
    for both in (of_key_heads & of_query_heads, of_query_heads & of_key_heads):
        seen = both.to_bool(9, 9)[0, :, :, 0]
        position = torch.arange(9, device=device)
        assert torch.equal(seen, (position >= heads[:, None]) & (position < (heads // 2 * 5 + 3)[:, None]))
    q, k = (tensor((1, h, 9, 8), 0, dtype, device) for h in (4, 2))
    key_bias, bias = tensor((1, 2, 9), 1, device=device), tensor((1, 4, 1, 9), 2, device=device)
    summed = key_bias.repeat_interleave(2, dim=1) + bias[:, :, 0]
    assert torch.equal(dmattn.attention(q, k, k, key_bias=key_bias, bias=bias), dmattn.attention(q, k, k, key_bias=summed))


@pytest.mark.parametrize("batches", [0, 2, 4])
@pytest.mark.parametrize("which", ["mask", "key_bias", "bias", "block"])
def test_other_batches_are_refused_by_the_public_function(which, batches):
    q = torch.zeros(3, 2, 4, 8)
    given = {
        "mask": {
            "mask": IntervalMask(torch.zeros(batches, 1, 4, dtype=torch.int32), torch.ones(batches, 1, 4, dtype=torch.int32))
        },
        "key_bias": {"key_bias": torch.zeros(batches, 1, 4)},
        "bias": {"bias": torch.zeros(batches, 1, 4, 4)},
        "block": {"mask": torch.ones(batches, 1, 4, 4, dtype=torch.bool)},
    }[which]
    with pytest.raises(ValueError, match=r"expected \[B\|1, H\|Hkv\|1, .*\] with B=3, .*, got \[" + str(batches)):
        dmattn.attention(q, q, q, **given)
