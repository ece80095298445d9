"""The drop-in against torch's own function: ranks, masks, alignment, head sizes, groups, gradients."""

from __future__ import annotations

import inspect

import dmattn
import pytest
import torch
import torch.nn.functional as F
from dmattn.testing import AttentionCase, assert_close_to_reference, strategies

tensor = strategies.random_tensor


def assert_equals_torchs(device, query, key, value, attn_mask=None, *, is_causal=False, scale=None, enable_gqa=False):
    """Ours meets the one rule on the same problem in four dimensions, and torch's function says that it is the same problem."""
    lead = query.shape[:-3]
    batch, heads = lead.numel(), query.shape[-3:-2].numel()
    L, S = query.shape[-2], key.shape[-2]
    if attn_mask is not None and attn_mask.dim() > 3 and len(lead) > 1:
        attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-3:])
        flat = attn_mask.flatten(0, -4)
    else:
        flat = attn_mask
    visible = bias = None
    if is_causal:
        visible = torch.ones(1, 1, L, S, dtype=torch.bool, device=device).tril()
    elif flat is not None and flat.dtype == torch.bool:
        visible = flat[(None,) * (4 - flat.dim())].expand(-1, -1, L, S)
    elif flat is not None:
        bias = flat
    four = [t.reshape(batch, -1, *t.shape[-2:]) for t in (query, key, value)]
    case = AttentionCase(*four, visible=visible, bias=bias, scale=scale, grad_through_lse=False)

    def call(fn, given):
        mask = attn_mask if given.bias is None else given.bias.reshape(attn_mask.shape)
        tensors = (
            t.reshape(like.shape) for t, like in zip((given.query, given.key, given.value), (query, key, value), strict=True)
        )
        out = fn(*tensors, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        assert out.shape == (*query.shape[:-1], value.shape[-1])
        return out.reshape(batch, heads, *out.shape[-2:])

    leaves = {name: leaf.detach().requires_grad_() for name, leaf in case.leaves().items()}
    out = call(dmattn.scaled_dot_product_attention, case.with_leaves(leaves))
    gradients = torch.autograd.grad(out, list(leaves.values()), case.incoming_gradients()[0].to(out.dtype))
    results = {"out": out.detach()} | {f"grad_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    assert_close_to_reference(case, results)
    exact = case.to(torch.float64)
    torch.testing.assert_close(call(F.scaled_dot_product_attention, exact), exact.call_reference()[0])


def test_signature_is_torchs():
    ours = inspect.signature(dmattn.scaled_dot_product_attention).parameters
    assert list(ours) == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    defaults = {name: p.default for name, p in ours.items() if p.default is not p.empty}
    assert defaults == {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_ranks_two_to_five(device, dtype, lead, causal):
    assert_equals_torchs(device, *(tensor((*lead, 20, 16), i, dtype, device) for i in range(3)), is_causal=causal)


@pytest.mark.parametrize(("L", "S"), [(5, 9), (9, 5), (1, 7), (7, 1), (130, 70)])
@pytest.mark.parametrize("causal", [True, False])
def test_causal_is_aligned_at_the_top_left(device, dtype, L, S, causal):
    q, k, v = (tensor((2, 3, n, 16), i, dtype, device) for i, n in enumerate((L, S, S)))
    assert_equals_torchs(device, q, k, v, is_causal=causal)


@pytest.mark.parametrize(
    "shape",
    [
        (11, 13),
        (1, 13),
        (11, 1),
        (3, 11, 13),
        (1, 11, 13),
        (2, 3, 11, 13),
        (2, 1, 11, 13),
        (1, 3, 1, 13),
        (2, 3, 11, 1),
        (2, 1, 1, 13),
    ],
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_broadcast(device, dtype, shape, kind):
    q, k, v = (tensor((2, 3, n, 24), i, dtype, device) for i, n in enumerate((11, 13, 13)))
    mask = tensor(shape, 7, dtype, device)
    if kind == "bool":
        mask = mask > -0.5
        mask[..., 0] = True  # torch releases differ on rows that see nothing
    assert_equals_torchs(device, q, k, v, mask)


@pytest.mark.parametrize(
    "shape", [(11, 13), (3, 11, 13), (2, 3, 11, 13), (2, 1, 11, 13), (1, 2, 3, 11, 13), (4, 1, 3, 11, 13), (4, 2, 1, 11, 13)]
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_five_dimensions(device, dtype, shape, kind):
    q, k, v = (tensor((4, 2, 3, n, 16), i, dtype, device) for i, n in enumerate((11, 13, 13)))
    mask = tensor(shape, 7, dtype, device)
    if kind == "bool":
        mask = mask > -0.5
        mask[..., 0] = True
    assert_equals_torchs(device, q, k, v, mask)


def test_minus_infinite_entries_of_a_float_mask(device, dtype):
    q, k, v = (tensor((1, 2, 12, 16), i, dtype, device) for i in range(3))
    mask = torch.zeros(12, 12, dtype=dtype, device=device).masked_fill(
        torch.ones(12, 12, device=device).triu(1).bool(), float("-inf")
    )
    assert_equals_torchs(device, q, k, v, mask)


def test_rows_that_see_nothing_give_zero(device, dtype):
    q, k, v = (tensor((1, 1, 6, 8), i, dtype, device) for i in range(3))
    mask = torch.ones(6, 6, dtype=torch.bool, device=device)
    mask[2] = False
    assert not dmattn.scaled_dot_product_attention(q, k, v, mask)[:, :, 2].any()


@pytest.mark.parametrize(("E", "Ev"), [(1, 1), (5, 7), (13, 16), (40, 33), (100, 3)])
def test_odd_head_sizes(device, dtype, E, Ev):
    q, k, v = (tensor((2, 2, n, size), i, dtype, device) for i, (n, size) in enumerate(((9, E), (10, E), (10, Ev))))
    assert_equals_torchs(device, q, k, v)
    assert_equals_torchs(device, q, k, v, scale=0.3)


@pytest.mark.parametrize("lead", [(), (2,)])
def test_grouped_heads(device, dtype, lead):
    q, k, v = (tensor((*lead, heads, 14, 16), i, dtype, device) for i, heads in enumerate((6, 2, 2)))
    assert_equals_torchs(device, q, k, v, enable_gqa=True, is_causal=True)
    mask = tensor((*(1,) * len(lead), 6, 14, 14), 4, dtype, device)
    assert_equals_torchs(device, q, k, v, mask, enable_gqa=True)


def test_leading_dimensions_broadcast(device, dtype):
    q, k, v = (
        tensor((2, 3, 9, 16), 0, dtype, device),
        tensor((2, 1, 10, 16), 1, dtype, device),
        tensor((1, 3, 10, 16), 2, dtype, device),
    )
    full = [t.expand(2, 3, -1, -1) for t in (q, k, v)]
    assert torch.equal(dmattn.scaled_dot_product_attention(q, k, v), dmattn.scaled_dot_product_attention(*full))


@pytest.mark.parametrize(("L", "S"), [(0, 5), (5, 0)])
def test_empty(device, dtype, L, S):
    q, k, v = (tensor((2, 3, n, 16), i, dtype, device) for i, n in enumerate((L, S, S)))
    out = dmattn.scaled_dot_product_attention(q, k, v)
    assert out.shape == (2, 3, L, 16)
    assert not out.any()


def test_mask_and_causal_together_are_refused():
    q = tensor((1, 1, 4, 8), 0)
    with pytest.raises(ValueError, match="attn_mask, is_causal: expected at most one of them, got both"):
        dmattn.scaled_dot_product_attention(q, q, q, torch.ones(4, 4, dtype=torch.bool), is_causal=True)


# The function itself, whatever torch.nn.functional's name for it is assigned to.
TORCHS = torch._C._nn.scaled_dot_product_attention


@pytest.fixture
def in_torchs_place(monkeypatch):
    """What users write to run a model on our kernels."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", dmattn.scaled_dot_product_attention)


def jagged(length_of_last, size=16):
    """[2, 3, ragged, size]."""
    parts = [tensor((length, 3, size), length) for length in (4, length_of_last)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)


PASSED_ON = {
    "head size": lambda: ([tensor((1, 2, 9, 300), i) for i in range(3)], {}),
    "dropout of 1": lambda: ([tensor((1, 2, 9, 16), i) for i in range(3)], {"dropout_p": 1.0}),
    "dropout of 1 as an int": lambda: ([tensor((1, 2, 9, 16), i) for i in range(3)], {"dropout_p": 1}),
    "lengths beyond 2^20": lambda: ([tensor((1, 1, 1, 8), 0), *[tensor((1, 1, 1, 8), 1).expand(1, 1, (1 << 20) + 1, 8)] * 2], {}),
}


@pytest.mark.parametrize("case", PASSED_ON.values(), ids=PASSED_ON)
def test_in_torchs_place_the_rest_is_still_torchs(in_torchs_place, case):
    tensors, options = case()
    out = F.scaled_dot_product_attention(*tensors, **options)
    expected = TORCHS(*tensors, **options)
    assert out.shape == expected.shape
    torch.testing.assert_close(out, expected, equal_nan=True)


def test_in_torchs_place_under_a_module_of_torch(in_torchs_place, device, dtype):
    layer = torch.nn.MultiheadAttention(64, 4, batch_first=True, device=device, dtype=dtype)
    hidden = tensor((2, 12, 64), 0, dtype, device)
    with torch.no_grad():
        q, k, v = (t.unflatten(2, (4, 16)).transpose(1, 2) for t in F.linear(hidden, layer.in_proj_weight).chunk(3, dim=2))
        expected = layer.out_proj(dmattn.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    assert torch.equal(layer.train()(hidden, hidden, hidden, need_weights=False)[0], expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_nested_tensors_are_passed_on(in_torchs_place):
    query, key = jagged(7), jagged(7)
    out = F.scaled_dot_product_attention(query, key, key)
    assert out.is_nested
    for ours, theirs in zip(out.unbind(), TORCHS(query, key, key).unbind(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("mask", [True, False, 0.5, float("-inf")])
def test_a_mask_of_no_dimensions(mask):
    """torch's own function takes one with three dimensions, and on a CPU not with four."""
    q, k, v = (tensor((3, n, 16), i, torch.float64) for i, n in enumerate((5, 7, 7)))
    given = torch.tensor(mask, dtype=torch.bool if isinstance(mask, bool) else torch.float64)
    out = dmattn.scaled_dot_product_attention(q, k, v, given)
    assert torch.equal(out, dmattn.scaled_dot_product_attention(q[None], k[None], v[None], given)[0])
    if mask in (True, 0.5):
        torch.testing.assert_close(out, TORCHS(q, k, v, given))
    else:  # releases of torch differ on rows that see nothing
        assert not out.any()
