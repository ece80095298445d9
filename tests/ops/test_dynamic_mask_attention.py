"""Dynamic Mask Attention: the call, the layer, the two functions with older names, and the Doge formulas written out."""

from __future__ import annotations

import dmattn
import pytest
import torch
import torch.nn.functional as F
from dmattn import IntervalMask
from dmattn.nn import DynamicMaskAttention, rotate
from dmattn.testing import (
    AttentionCase,
    assert_close_to_reference,
    assert_matches_reference,
    per_query_head,
    strategies,
    top_k_visible,
)
from hypothesis import given
from hypothesis import strategies as st

tensor = strategies.random_tensor


@given(data=st.data())
def test_equals_the_reference(device, dtype, data):
    shape = data.draw(strategies.shapes(max_length=150))
    sizes = (
        (shape.B, shape.H, shape.Sq, shape.D),
        (shape.B, shape.Hkv, shape.Sk, shape.D),
        (shape.B, shape.Hkv, shape.Sk, shape.Dv),
    )
    query, key, value = (tensor(size, i, dtype, device) for i, size in enumerate(sizes))
    scores = data.draw(strategies.scores((shape.B, shape.Hkv, shape.Sk), device=device))
    causal = data.draw(st.booleans())
    window, local, sink_keys = data.draw(strategies.selection_sizes(shape.Sk, causal))
    base, rows, description = data.draw(strategies.selection_bases(shape, device))
    case = AttentionCase(
        query, key, value, visible=strategies.selected_rows(scores, window, causal, rows, shape.Sq, local, sink_keys), key_bias=scores,
        dropout_p=data.draw(st.sampled_from((0.0, 0.3))), softcap=data.draw(st.sampled_from((0.0, 2.0))),
        description=f"window {window}, local {local}, sink_keys {sink_keys}, causal {causal}, base {description}",
    )  # fmt: skip

    def fn(query, key, value, mask, *, key_bias, bias, is_causal, **options):
        return dmattn.dynamic_mask_attention(
            query, key, value, key_bias, window, is_causal=causal, base=base, local=local, sink_keys=sink_keys, **options
        )

    assert_matches_reference(case, fn)


@pytest.mark.parametrize(("causal", "beside"), [(True, {}), (False, {}), (True, {"local": 7, "sink_keys": 2})])
def test_equals_attention_with_a_top_k_mask(device, dtype, causal, beside):
    query, key, value = (tensor((2, heads, 90, 32), i, dtype, device) for i, heads in enumerate((4, 2, 2)))
    scores = tensor((2, 2, 90), 5, device=device)
    base = IntervalMask.documents(90, torch.tensor([0, 30, 90], device=device), causal)
    for given_base in (None, base):
        ours = dmattn.dynamic_mask_attention(
            query, key, value, scores, 12, is_causal=causal, base=given_base, return_lse=True, **beside
        )
        mask = IntervalMask.top_k(scores, 12, causal, given_base, **beside)
        general = dmattn.attention(query, key, value, mask, key_bias=scores, is_causal=causal, return_lse=True)
        assert torch.equal(ours[0], general[0])
        assert torch.equal(ours[1], general[1])


def test_scores_of_local_keys_and_sinks_take_gradients(device, dtype):
    """A key has a gradient of its score as soon as it is seen, and it is seen before it competes."""
    query, key, value = (tensor((1, 1, 40, 16), i, dtype, device) for i in range(3))
    falling = torch.arange(40.0, 0.0, -1.0, device=device)  # so that plain selection keeps the first key
    scores = falling[None, None].requires_grad_()
    for beside, seen in (({}, 1), ({"local": 4}, 40), ({"sink_keys": 4}, 5)):
        out = dmattn.dynamic_mask_attention(query, key, value, scores, 1, **beside)
        (gradient,) = torch.autograd.grad(out[:, :, 1:].float().square().sum(), scores)
        assert not gradient[..., seen:].any(), beside
        # A key that is seen alone has weight 1 whatever its score.
        assert seen == 1 or bool((gradient[..., :seen] != 0).all()), beside


# The Doge model -------------------------------------------------------------------------------------------------------------------


def doge(query, key, value, dt_weight, dt_bias, A, window, causal=True):
    """Attention of ``modeling_doge.py`` written out: an additive [B, H, Sq, Sk] mask, torch.topk per query, softmax.

    torch.topk leaves ties open; the scores here are distinct. value [B, Hkv, S, D].
    """
    batch, kv_heads, length, size = value.shape
    dt = F.linear(value.transpose(1, 2).reshape(batch, length, kv_heads * size), dt_weight, dt_bias)
    scores = torch.exp(A * F.softplus(dt)).transpose(-1, -2)
    lowest = torch.finfo(query.dtype).min
    mask = scores[:, :, None, :].expand(-1, -1, length, -1)
    if causal:
        mask = mask.masked_fill(torch.ones(length, length).triu(1).bool(), lowest)
    if length > window:
        keep = torch.zeros_like(mask).scatter(-1, torch.topk(mask, window, dim=-1).indices, 1.0).bool()
        mask = mask.masked_fill(~keep, lowest)
    groups = query.shape[1] // kv_heads
    key, value, mask = (t.repeat_interleave(groups, dim=1) for t in (key, value, mask))
    logits = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + mask
    return F.softmax(logits, dim=-1) @ value, scores


@pytest.mark.parametrize("window", [1, 7, 39, 40, 64])
def test_doge_formulas(window):
    """In float64, where nothing but the order of sums differs."""
    query, key, value = (tensor((2, heads, 40, 16), i, torch.float64).requires_grad_() for i, heads in enumerate((4, 2, 2)))
    dt_weight, A = tensor((2, 32), 5, torch.float64).requires_grad_(), tensor((2,), 6, torch.float64).requires_grad_()
    dt_bias = tensor((2,), 7, torch.float64).requires_grad_()
    leaves = (query, key, value, dt_weight, A, dt_bias)
    expected, expected_scores = doge(query, key, value, dt_weight, dt_bias, A, window)
    scores = dmattn.key_scores(value, dt_weight, A, dt_bias)
    assert torch.equal(scores, expected_scores)
    out = dmattn.dynamic_mask_attention(query, key, value, scores, window)
    grad_out = tensor(out.shape, 8, torch.float64)
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(
        torch.autograd.grad(out, leaves, grad_out), torch.autograd.grad(expected, leaves, grad_out), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


# The layer ------------------------------------------------------------------------------------------------------------------------


def test_layer_details():
    layer = DynamicMaskAttention(64, 4, window=5, num_kv_heads=2, dropout=0.5)
    assert not layer.A.any()
    assert layer.dt_proj.weight.shape == (2, 32)
    hidden = tensor((1, 20, 64), 0)
    assert not torch.equal(layer(hidden), layer(hidden))
    assert torch.equal(layer.eval()(hidden), layer(hidden))
    assert "window=5" in repr(layer)
    assert "local" not in repr(layer)
    beside = DynamicMaskAttention(64, 4, window=0, local=6, sink_keys=1)
    assert "window=0, local=6, sink_keys=1" in repr(beside)
    assert beside.state_dict().keys() == layer.state_dict().keys()


# Modules are called -----------------------------------------------------------------------------------------------------------------


class Adapted(torch.nn.Module):
    """A linear layer with a low-rank addition that is trained, as LoRA has it."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.weight = base.weight  # libraries show the frozen weight under its old name
        self.bias = base.bias
        self.down = torch.nn.Linear(base.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False)

    def forward(self, given):
        return self.base(given) + self.up(self.down(given))


PROJECTIONS = ["q_proj", "k_proj", "v_proj", "dt_proj", "o_proj"]


@pytest.fixture
def layer():
    torch.manual_seed(0)
    layer = DynamicMaskAttention(64, 4, window=5, num_kv_heads=2)
    torch.nn.init.normal_(layer.A)
    return layer


@pytest.mark.parametrize("name", PROJECTIONS)
def test_an_adapter_of_a_projection_is_used_and_trained(layer, name):
    hidden = tensor((2, 20, 64), 0)
    before = layer(hidden)
    adapted = Adapted(getattr(layer, name))
    setattr(layer, name, adapted)
    after = layer(hidden)
    assert not torch.equal(after, before)
    after.sum().backward()
    assert adapted.up.weight.grad.any()
    assert adapted.down.weight.grad.any()


@pytest.mark.parametrize("name", PROJECTIONS)
def test_hooks_of_a_projection_fire(layer, name):
    seen = []
    getattr(layer, name).register_forward_pre_hook(lambda module, given: seen.append("before"))
    getattr(layer, name).register_forward_hook(lambda module, given, out: seen.append(tuple(out.shape)))
    layer(tensor((2, 20, 64), 0))
    width = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "dt_proj": 2, "o_proj": 64}[name]
    assert seen == ["before", (2, 20, width)]


def test_key_scores_of_as_many_keys_as_there_may_be():
    scores = dmattn.key_scores(torch.zeros(1, 1, 1, 8).expand(1, 1, 2**20, 8), torch.zeros(1, 8), torch.ones(1))
    assert scores.shape == (1, 1, 2**20)


def test_key_scores_of_a_module_a_weight_and_the_older_keyword():
    value, A = tensor((2, 2, 9, 8), 0), tensor((2,), 1)
    module = torch.nn.Linear(16, 2)
    expected = torch.exp(A * F.softplus(module(value.transpose(1, 2).flatten(2)))).transpose(1, 2)
    for scores in (
        dmattn.key_scores(value, module, A),
        dmattn.key_scores(value, module.weight, A, module.bias),
        dmattn.key_scores(value, dt_proj=module.weight, A=A, dt_proj_bias=module.bias),
        dmattn.key_scores(value, dt_proj_weight=module.weight, A=A, dt_proj_bias=module.bias),
    ):
        assert torch.equal(scores, expected)


def test_a_part_of_the_dimensions_rotates_as_if_it_were_all():
    x = tensor((2, 3, 5, 24), 0, torch.float64)
    expected = torch.cat((rotate(x[..., :6], 100.0), x[..., 6:]), 3)
    assert torch.equal(rotate(x, 100.0, factor=0.3), expected)


# Older names ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 0.0, 4.0])
@pytest.mark.parametrize("causal", [True, False])
def test_flash_dynamic_mask_attention(device, dtype, softcap, causal):
    query, key, value = (tensor((2, heads, n, 16), i, dtype, device) for i, (heads, n) in enumerate(((4, 20), (2, 33), (2, 33))))
    keep, bias = tensor((2, 2, 20, 33), 4, device=device) > -0.5, tensor((1, 4, 20, 33), 5, dtype, device)
    case = AttentionCase(query, key, value, visible=keep, bias=bias, is_causal=causal, softcap=softcap or 0.0)
    out, lse = dmattn.flash_dynamic_mask_attention(query, key, value, keep, bias, softcap, causal, return_lse=True)
    assert_close_to_reference(case, {"out": out, "lse": lse})
    assert torch.equal(dmattn.flash_dynamic_mask_attention(query, key, value, keep, bias, softcap, causal), out)


@pytest.mark.parametrize("shape", [(2, 2, 20, 33), (4, 20, 33), (20, 33), (1, 1, 1, 33)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_without_skipping_the_result_is_the_same(device, dtype, shape, with_bias):
    query, key, value = (tensor((2, heads, n, 16), i, dtype, device) for i, (heads, n) in enumerate(((4, 20), (2, 33), (2, 33))))
    keep = tensor(shape, 4, device=device) > -0.5
    keep[..., :1] = False
    bias = tensor((1, 4, 1, 33), 5, dtype, device) if with_bias else None
    visible = keep.expand(*(1,) * (4 - keep.dim()), *keep.shape).expand(-1, -1, 20, -1)
    case = AttentionCase(query, key, value, visible=visible, bias=None if bias is None else bias.expand(-1, -1, 20, -1))
    for mask in (keep, keep.to(dtype)):
        out, lse = dmattn.flash_dynamic_mask_attention(query, key, value, mask, bias, return_lse=True, enable_skip=False)
        assert_close_to_reference(case, {"out": out, "lse": lse})


@pytest.mark.parametrize("causal", [True, False])
def test_flash_dma_attention(device, dtype, causal):
    query, key, value = (tensor((2, 40, heads, 16), i, dtype, device) for i, heads in enumerate((4, 2, 2)))
    dt_proj, a_coef = tensor((2, 32), 5, dtype, device), tensor((2,), 6, dtype, device)
    scores = dmattn.key_scores(value.transpose(1, 2), dt_proj, a_coef)
    visible = top_k_visible(scores, 9, causal)
    case = AttentionCase(*(t.transpose(1, 2) for t in (query, key, value)), visible=visible, key_bias=scores, scale=0.2)
    out, probs = dmattn.flash_dma_attention(query, key, value, dt_proj, a_coef, 9, 0.0, causal, 0.2, True)
    assert out.shape == query.shape
    assert_close_to_reference(case, {"out": out.transpose(1, 2)})
    assert probs.shape == (2, 4, 40, 40)
    assert torch.equal(probs > 0, per_query_head(visible, 4))
    torch.testing.assert_close(probs.sum(-1), torch.ones_like(probs[..., 0]))
    assert_close_to_reference(case, {"out": (probs @ per_query_head(case.value, 4).to(probs.dtype)).to(dtype)})
    assert torch.equal(dmattn.flash_dma_attention(query, key, value, dt_proj, a_coef, 9, causal=causal, softmax_scale=0.2), out)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"theta": 0.0}, ValueError, "theta: expected a number > 0, got 0.0"),
        ({"theta": -1.0}, ValueError, "theta: expected"),
        ({"theta": float("nan")}, ValueError, "theta: expected a finite number"),
        ({"factor": 2.0}, ValueError, "factor: expected 0 <= factor <= 1, got 2.0"),
        ({"factor": -1.0}, ValueError, "factor: expected"),
        ({"positions": torch.zeros(1, 5, dtype=torch.bool)}, TypeError, "positions: expected dtype"),
        ({"positions": torch.zeros(1, 5, dtype=torch.complex64)}, TypeError, "positions: expected dtype"),
        ({"positions": torch.zeros(1, 5, device="meta")}, ValueError, "positions: expected device cpu like x, got meta"),
    ],
    ids=str,
)
def test_rotate_refuses_what_gives_no_angle(options, error, words):
    with pytest.raises(error, match=words):
        rotate(torch.ones(1, 2, 5, 8), **{"theta": 10000.0} | options)


@pytest.mark.parametrize(
    ("name", "given", "error"),
    [
        ("attn_mask", torch.ones(1, 3, 9, 9, dtype=torch.bool), ValueError),
        ("attn_mask", torch.ones(1, 4, 9, 8, dtype=torch.bool), ValueError),
        ("attn_mask", torch.ones(1, 1, 4, 9, 9, dtype=torch.bool), ValueError),
        ("attn_mask", torch.ones(9, 9, dtype=torch.bool, device="meta"), ValueError),
        ("bias", torch.zeros(1, 3, 9, 9), ValueError),
        ("bias", torch.zeros(1, 4, 9, 5), ValueError),
        ("bias", torch.zeros(1, 4, 9, 9, dtype=torch.int32), TypeError),
    ],
    ids=lambda each: str(list(each.shape)) if isinstance(each, torch.Tensor) else None,
)
def test_what_does_not_fit_without_skipping_is_refused_by_its_name(name, given, error):
    query, key = torch.zeros(1, 4, 9, 8), torch.zeros(1, 2, 9, 8)
    options = {"attn_mask": torch.ones(9, 9, dtype=torch.bool)} | {name: given}
    with pytest.raises(error, match=f"^{name}: expected"):
        dmattn.flash_dynamic_mask_attention(query, key, key, enable_skip=False, **options)
