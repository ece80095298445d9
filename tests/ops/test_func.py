"""Forward mode, torch.func, vmap and gradients of gradients: through the public functions, the layer and direct calls of the ops."""

from __future__ import annotations

import dataclasses
import math

import dmattn
import pytest
import torch
from dmattn import BlockMask, IntervalMask, composed, reference
from dmattn.testing import FEATURES, AttentionCase, assert_tangents_close, attention_cases, strategies
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils import _pytree as pytree
from watched import Watched

# What torch says of itself when forward mode or Inductor is first used.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Attempted to insert a get_attr Node:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed:UserWarning",
)

ops = torch.ops.dmattn
tensor = strategies.random_tensor
SIZES = ((2, 4, 7, 8), (2, 2, 9, 8), (2, 2, 9, 16), (1, 2, 9), (4, 7, 9))  # query, key, value, key_bias, bias
V = 3  # samples of a vmap


def leaves(dtype=torch.float64, device="cpu", first=0):
    return tuple(tensor(size, first + number, dtype, device) for number, size in enumerate(SIZES))


def tangents(dtype=torch.float64, device="cpu"):
    return leaves(dtype, device, first=20)


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles in both directions, ragged at the ends."""
    monkeypatch.setattr(composed, "BLOCK_QUERIES", 3)
    monkeypatch.setattr(composed, "BLOCK_KEYS", 4)


def drawn_bools(seed, share, shape=(7, 9)):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


OPTIONS = {
    "plain": {},
    "causal, softcap": {"is_causal": True, "softcap": 2.0},
    "interval": {"mask": IntervalMask.sliding_window(9, 3, 1)},
    "block": {"mask": BlockMask.from_bool(drawn_bools(0, 0.6), 32)},
    "combined": {"mask": IntervalMask.prefix(9, 4) & BlockMask.from_bool(drawn_bools(1, 0.8))},
    "mask of each head": {"mask": BlockMask.from_bool(drawn_bools(2, 0.6, (2, 4, 7, 9)))},
    "dropout": {"dropout_p": 0.4, "dropout_seed": torch.tensor([-(2**45) - 77])},
    "scale": {"deterministic": True, "scale": -0.7},
    "empty rows": {"mask": IntervalMask(torch.full((9,), 4, dtype=torch.int32), torch.full((9,), 6, dtype=torch.int32))},
}  # fmt: skip


def attend(**options):
    """(query, key, value, key_bias, bias) -> out, lse, 0 where lse is -inf: numbers, not infinities, are compared."""

    def fn(query, key, value, key_bias, bias):
        out, lse = dmattn.attention(query, key, value, key_bias=key_bias, bias=bias, return_lse=True, **options)
        return out, torch.where(torch.isinf(lse), 0.0, lse)

    return fn


# Numerical derivatives ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradcheck(options, fast, small_tiles):
    """In random directions, forward mode too; slowly, of every element backward."""
    given_leaves = [x.requires_grad_() for x in leaves()]
    assert torch.autograd.gradcheck(attend(**options), given_leaves, check_forward_ad=fast, fast_mode=fast)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradgradcheck(options, small_tiles):
    given_leaves = [x.requires_grad_() for x in leaves()]
    assert torch.autograd.gradgradcheck(attend(**options), given_leaves, check_fwd_over_rev=True, fast_mode=True)


def test_gradcheck_of_dynamic_mask_attention():
    sizes = [(1, 4, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8), (1, 2, 9)]
    given_leaves = [tensor(size, number, torch.float64).requires_grad_() for number, size in enumerate(sizes)]

    def fn(*given_leaves):
        return dmattn.dynamic_mask_attention(*given_leaves, 3, return_lse=True)

    assert torch.autograd.gradcheck(fn, given_leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(fn, given_leaves, check_fwd_over_rev=True, fast_mode=True)


# Transforms against the same transforms of the reference ---------------------------------------------------------------------------------

MASK = IntervalMask.sliding_window(9, 3)


def ours(query, key, value, key_bias, bias):
    return dmattn.attention(query, key, value, MASK, key_bias=key_bias, bias=bias, is_causal=True, softcap=3.0, return_lse=True)


def direct(query, key, value, key_bias, bias):
    masks = (MASK.start, MASK.end, *(None,) * 6)
    return ops.forward(query, key, value, *masks, key_bias, bias[None], None, True, 8**-0.5, 3.0, 0.0, False)[:2]


def specified(query, key, value, key_bias, bias):
    visible = MASK.to_bool(7, 9)
    return reference.attention(query, key, value, visible, key_bias=key_bias, bias=bias[None], is_causal=True, softcap=3.0)


ALL = tuple(range(5))


def loss(fn):
    def summed(*given):
        out, lse = fn(*given)
        return out.sin().sum() + (lse * lse).sum()

    return summed


def gradient_loss(fn):
    return lambda *given: sum(x.sin().sum() for x in grad(loss(fn), ALL)(*given))


def stacked(given):
    return tuple(torch.stack([x * (1 + 0.1 * number) for number in range(V)]) for x in given)


def duals(fn):
    with forward_ad.dual_level():
        results = fn(*(forward_ad.make_dual(x, t) for x, t in zip(leaves(), tangents(), strict=True)))
        return [forward_ad.unpack_dual(x).tangent for x in results]


def forward_mode_jacobian(fn):
    query, key, value, key_bias, bias = leaves()
    functional = torch.autograd.functional.jacobian
    return functional(lambda x: fn(query, key, value, x, bias), key_bias, strategy="forward-mode", vectorize=True)


def of_key_bias(fn):
    query, key, value, key_bias, bias = leaves()
    return lambda x: loss(fn)(query, key, value, x, bias), key_bias


TRANSFORMS = {
    "jvp": lambda fn: jvp(fn, leaves(), tangents()),
    "dual numbers": duals,
    "jacobian": forward_mode_jacobian,
    "linearize": lambda fn: linearize(fn, *leaves())[1](*tangents()),
    "jacfwd": lambda fn: jacfwd(fn, (0, 4))(*leaves()),
    "grad": lambda fn: grad(loss(fn), ALL)(*leaves()),
    "vjp": lambda fn: vjp(fn, *leaves())[1](specified(*tangents())),
    "jacrev": lambda fn: jacrev(fn, (0, 3))(*leaves()),
    "vmap": lambda fn: vmap(fn)(*stacked(leaves())),
    "vmap of grad": lambda fn: vmap(grad(loss(fn), ALL))(*stacked(leaves())),
    "gradients of each sample": lambda fn: vmap(grad(loss(fn), (0, 3, 4)), in_dims=(0, 0, 0, None, None))(
        *stacked(leaves())[:3], *leaves()[3:]
    ),
    "grad of vmap": lambda fn: grad(lambda *given: vmap(loss(fn))(*given).sum(), ALL)(*stacked(leaves())),
    "vmap of vmap": lambda fn: vmap(vmap(fn, in_dims=(0, None, 0, None, None)), in_dims=(0, 0, None, None, 0))(
        *stacked(stacked(leaves()[:1])), *stacked(leaves()[1:3]), leaves()[3], *stacked(leaves()[4:])
    ),
    "vmap of jvp": lambda fn: (lambda at: vmap(lambda *given: jvp(fn, at, given)[1])(*stacked(tangents())))(leaves()),
    "jvp of vmap": lambda fn: jvp(vmap(fn), stacked(leaves()), stacked(tangents())),
    "grad of grad": lambda fn: grad(gradient_loss(fn), ALL)(*leaves()),
    "vmap of grad of grad": lambda fn: vmap(grad(gradient_loss(fn), ALL))(*stacked(leaves())),
    "jvp of grad": lambda fn: jvp(grad(loss(fn), ALL), leaves(), tangents()),
    "jvp of jvp": lambda fn: jvp(lambda *given: jvp(fn, given, tangents())[1], leaves(), tangents()),
    "grad of jvp": lambda fn: grad(lambda *given: sum(x.sin().sum() for x in jvp(fn, given, tangents())[1]), ALL)(*leaves()),
    "hessian": lambda fn: (lambda f, x: hessian(f)(x))(*of_key_bias(fn)),
    "jacrev of jacrev": lambda fn: (lambda f, x: jacrev(jacrev(f))(x))(*of_key_bias(fn)),
    "third derivatives": lambda fn: (lambda f, x: grad(lambda y: grad(lambda z: grad(f)(z).sin().sum())(y).sin().sum())(x))(
        *of_key_bias(fn)
    ),
    "jvp of jvp of grad": lambda fn: jvp(
        lambda *given: jvp(grad(loss(fn), ALL), given, tangents())[1], leaves(), tangents()
    ),
}  # fmt: skip


def assert_close(ours, expected):
    assert pytree.tree_structure(ours) == pytree.tree_structure(expected)
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(expected), strict=True):
        assert b.any()
        torch.testing.assert_close(a, b)


def test_tangents_of_tangents(small_tiles):
    assert_close(TRANSFORMS["jvp of jvp"](ours), TRANSFORMS["jvp of jvp"](specified))


@pytest.mark.parametrize("fn", [ours, direct], ids=["attention", "the op"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name, fn, request):
    if name != "linearize":  # whose trace of many tiles takes seconds
        request.getfixturevalue("small_tiles")
    assert_close(TRANSFORMS[name](fn), TRANSFORMS[name](specified))


@given(case=attention_cases(max_length=70, features=set(FEATURES) - {"sinks"}), seed=st.integers(0, 100))
def test_drawn_tangents(case, seed):
    """Every kind of mask, bias, option and shape; contiguous, because torch has no dual numbers of expanded tensors."""
    case = case.to(case.query.dtype)
    compare_tangents(
        case, {name: tensor(leaf.shape, seed + i, leaf.dtype) for i, (name, leaf) in enumerate(case.leaves().items())}
    )


def compare_tangents(case: AttentionCase, directions, fn=dmattn.attention):
    """Tangents of out and lse of a case, by the one rule."""
    given_leaves = case.leaves()
    along = tuple(directions[name].to(leaf.dtype) for name, leaf in given_leaves.items())

    def call(*moved):
        return case.with_leaves(dict(zip(given_leaves, moved, strict=True))).call(fn)

    results = dict(zip(("out", "lse"), jvp(call, tuple(given_leaves.values()), along)[1], strict=True))
    assert_tangents_close(case, directions, results)


@pytest.mark.parametrize("Sq", [1, 130, 300])
@pytest.mark.parametrize("window", [None, 40])
def test_tangents_in_the_dtype_the_device_is_at_home_in(device, dtype, Sq, window):
    sizes = ((2, 4, Sq, 64), (2, 2, 300, 64), (2, 2, 300, 64), (2, 2, 300))
    query, key, value, key_bias = (tensor(size, number, dtype, device) for number, size in enumerate(sizes))
    mask = None if window is None else IntervalMask.sliding_window(300, window, device=device)
    visible = None if window is None else mask.to_bool(Sq, 300)
    case = AttentionCase(query, key, value, mask=mask, visible=visible, key_bias=key_bias, is_causal=True)
    changes = {name: tensor(leaf.shape, 9 + i, dtype, device) for i, (name, leaf) in enumerate(case.leaves().items())}
    compare_tangents(case, changes)


@pytest.mark.parametrize("value", [-6e4, -1e9, -1e30])
def test_tangents_beside_huge_biases(value):
    """The classic additive mask on some keys of row 4 hides them; on all keys of row 2 it rounds the logits away, so weights are equal."""
    given_leaves, directions = leaves(torch.float32)[:3], tangents(torch.float32)[:3]
    bias = torch.zeros(1, 1, 7, 9)
    bias[:, :, 2], bias[:, :, 4, :6] = value, value
    fn = lambda *given: dmattn.attention(*given, bias=bias, return_lse=True)  # noqa: E731
    out_t, lse_t = jvp(fn, given_leaves, directions)[1]
    assert torch.isfinite(out_t).all()
    assert torch.isfinite(lse_t).all()

    rows = torch.arange(7) != 2
    query, query_t = given_leaves[0][:, :, rows], directions[0][:, :, rows]
    case = AttentionCase(query, *given_leaves[1:], visible=(bias == 0)[:, :, rows])
    along = dict(zip(("query", "key", "value"), (query_t, *directions[1:]), strict=True))
    assert_tangents_close(case, along, {"out": out_t[:, :, rows], "lse": lse_t[:, :, rows]})
    if value < -1e8:
        query, key, v = (x.double() for x in given_leaves)
        query_t, key_t, v_t = (x.double() for x in directions)
        key, key_t, v, v_t = (reference.per_query_head(x, 4) for x in (key, key_t, v, v_t))
        logits_t = (query_t[:, :, 2:3] @ key.mT + query[:, :, 2:3] @ key_t.mT) * 8**-0.5
        flat = ((logits_t - logits_t.mean(-1, keepdim=True)) @ v / 9 + v_t.mean(-2, keepdim=True))[:, :, 0]
        torch.testing.assert_close(out_t[:, :, 2], flat.float())


# Rows that see nothing, keys that nobody sees --------------------------------------------------------------------------------------------


def half_blind():
    """Queries 0 to 2 see nothing, key 8 is seen by nobody; NaN stands wherever it must not matter."""
    end = torch.full((9,), 100, dtype=torch.int32)
    end[8] = -100
    mask = IntervalMask(torch.full((9,), 5, dtype=torch.int32), end)  # positions are 2 to 8
    given_leaves, directions = [x.clone() for x in leaves()], [x.clone() for x in tangents()]
    for query, key, value, key_bias, bias in (given_leaves, directions):
        query[:, :, :3] = math.nan
        key[:, :, 8], value[:, :, 8], key_bias[:, :, 8] = math.nan, math.inf, math.nan
        bias[:, :3] = math.nan
    return mask, given_leaves, directions


def test_rows_that_see_nothing_have_no_tangents():
    mask, given_leaves, directions = half_blind()
    fn = lambda q, k, v, kb, b: dmattn.attention(q, k, v, mask, key_bias=kb, bias=b, return_lse=True)  # noqa: E731
    (_, lse), (out_t, lse_t) = jvp(fn, tuple(given_leaves), tuple(directions))
    assert torch.isinf(lse[:, :, :3]).all()
    assert not out_t[:, :, :3].any()
    assert not lse_t[:, :, :3].any()
    clean = [torch.nan_to_num(x, posinf=0.0) for x in given_leaves], [torch.nan_to_num(x, posinf=0.0) for x in directions]
    assert_close((out_t, lse_t), jvp(fn, tuple(clean[0]), tuple(clean[1]))[1])


def test_rows_that_see_nothing_have_no_second_gradients():
    mask, given_leaves, _ = half_blind()

    def second(given_leaves, incoming):
        given_leaves = [x.requires_grad_() for x in given_leaves]
        query, key, value, key_bias, bias = given_leaves
        out = dmattn.attention(query, key, value, mask, key_bias=key_bias, bias=bias)
        gradients = torch.autograd.grad(out, given_leaves, incoming, create_graph=True)
        return torch.autograd.grad([g.sin().sum() for g in gradients], given_leaves)

    incoming = tensor((2, 4, 7, 16), 50, torch.float64)
    incoming[:, :, :3] = math.nan
    results = second(given_leaves, incoming)
    assert all(torch.isfinite(result).all() for result in results)
    assert not results[0][:, :, :3].any()
    assert not results[1][:, :, 8].any()
    clean = [torch.nan_to_num(x.detach(), posinf=0.0) for x in given_leaves]
    assert_close(results, second(clean, torch.nan_to_num(incoming)))


@pytest.mark.parametrize(("Sq", "Sk"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_in_some_dimension(Sq, Sk):
    given_leaves = [tensor(size, 0, torch.float64) for size in ((1, 2, Sq, 8), (1, 2, Sk, 8), (1, 2, Sk, 8))]
    out, out_t = jvp(dmattn.attention, tuple(given_leaves), tuple(given_leaves))
    assert out_t.shape == out.shape
    assert not out_t.any()
    wanted = [x.requires_grad_() for x in given_leaves]
    gradients = torch.autograd.grad(dmattn.attention(*wanted).sum(), wanted, create_graph=True)
    assert not any(x.any() for x in torch.autograd.grad([g.sum() for g in gradients], wanted))


# The other ways in ----------------------------------------------------------------------------------------------------------------------


def test_no_way_of_forward_mode_gives_silent_zeros(device, dtype):
    """Through everything public and through the ops themselves, on the device's own dtype."""
    query, key, value = (tensor((1, 2, 6, 16), number, dtype, device) for number in range(3))
    scores = tensor((1, 2, 6), 4, device=device)
    layer = dmattn.nn.DynamicMaskAttention(32, 2, window=3, dtype=dtype, device=device)
    hidden = tensor((1, 6, 32), 5, dtype, device)
    plain = (*(None,) * 11, True, 0.25, 0.0, 0.0, False)
    out, lse, _ = ops.forward(query, key, value, *plain)
    ways = {
        "attention": (lambda x: dmattn.attention(x, key, value), query),
        "dynamic_mask_attention": (lambda x: dmattn.dynamic_mask_attention(query, key, value, x, 3), scores),
        "scaled_dot_product_attention": (lambda x: dmattn.scaled_dot_product_attention(query, x, value, is_causal=True), key),
        "layer": (layer, hidden),
        "forward": (lambda x: ops.forward(query, x, value, *plain)[1], key),
        "backward": (lambda x: ops.backward(x, None, query, key, value, out, lse, *plain, False, False)[0], tensor(out.shape, 8, dtype, device)),
    }  # fmt: skip
    for name, (fn, given_leaf) in ways.items():
        direction = tensor(given_leaf.shape, 9, given_leaf.dtype, device)
        with forward_ad.dual_level():
            by_dual = forward_ad.unpack_dual(fn(forward_ad.make_dual(given_leaf, direction))).tangent
        assert by_dual is not None, name
        assert by_dual.any(), name
        by_jvp = jvp(fn, (given_leaf,), (direction,))[1]
        torch.testing.assert_close(by_jvp, by_dual, msg=name)


def test_caches_refuse_tangents():
    cache, query = dmattn.BoundedCache(1, 2, 4, 8), torch.zeros(1, 2, 1, 8)
    with forward_ad.dual_level(), torch.no_grad():
        dual = forward_ad.make_dual(query, torch.ones_like(query))
        with pytest.raises(RuntimeError, match="has no gradient"):
            cache.attend(query, dual, query, torch.zeros(1, 2, 1))


def test_the_layer_with_gradients_of_each_sample():
    layer = dmattn.nn.DynamicMaskAttention(32, 4, window=5, num_kv_heads=2, dtype=torch.float64)
    with torch.no_grad():
        layer.A.copy_(tensor((2,), 3, torch.float64))
    parameters = dict(layer.named_parameters())
    hidden = tensor((V, 2, 11, 32), 1, torch.float64)

    def loss(parameters, sample):
        return functional_call(layer, parameters, (sample,)).sin().sum()

    of_samples = vmap(grad(loss), in_dims=(None, 0))(parameters, hidden)
    for number in range(V):
        expected = torch.autograd.grad(layer(hidden[number]).sin().sum(), list(parameters.values()))
        assert_close([of_samples[name][number] for name in parameters], list(expected))


# vmap --------------------------------------------------------------------------------------------------------------------------------------


def looped(fn, in_dims, *given):
    """What vmap means."""
    samples = [fn(*(x if dim is None else x.select(dim, v) for x, dim in zip(given, in_dims, strict=True))) for v in range(V)]
    return pytree.tree_map(lambda *x: torch.stack(x), *samples)


MAPPED = {
    "query": (0, None, None, None, None),
    "key": (None, 1, None, None, None),
    "value": (None, None, -1, None, None),
    "key_bias": (None, None, None, 0, None),
    "bias": (None, None, None, None, 2),
    "all": (1, 2, 0, 3, 0),
}


@pytest.mark.parametrize("in_dims", MAPPED.values(), ids=MAPPED)
@pytest.mark.parametrize("batch", [1, 2])
def test_vmap_over_any_argument_is_a_loop_in_one_call(device, dtype, in_dims, batch):
    given_leaves = [
        tensor((batch, *size[1:]) if number < 3 else size, number, dtype, device) for number, size in enumerate(SIZES)
    ]
    mapped = [
        x if dim is None else torch.stack([x * (1 + 0.1 * v) for v in range(V)]).movedim(0, dim)
        for x, dim in zip(given_leaves, in_dims, strict=True)
    ]
    mask = IntervalMask.sliding_window(9, 3, device=device)

    def fn(q, k, v, kb, b):
        return dmattn.attention(q, k, v, mask, key_bias=kb, bias=b, is_causal=True, return_lse=True)

    def gradients(*given_leaves):
        return grad(lambda *x: sum(y.float().sum() for y in fn(*x)), ALL)(*given_leaves)

    for call in (fn, gradients):
        with Watched() as counted:
            ours = vmap(call, in_dims=in_dims)(*mapped)
        assert counted.names == (["forward"] if call is fn else ["forward", "backward"])
        torch.testing.assert_close(ours, looped(call, in_dims, *mapped))


def test_vmap_over_masks(device, dtype):
    query, key, value = (tensor(size, number, dtype, device) for number, size in enumerate(SIZES[:3]))
    masks = [IntervalMask.sliding_window(9, 1 + v, device=device) for v in range(V)]
    start, end = torch.stack([m.start for m in masks]), torch.stack([m.end for m in masks])
    expected = torch.stack([dmattn.attention(query, key, value, mask) for mask in masks])

    mask = pytree.tree_map(lambda *parts: torch.stack(parts), *masks)
    torch.testing.assert_close(vmap(lambda mask: dmattn.attention(query, key, value, mask))(mask), expected)

    by_parts = vmap(lambda start, end: dmattn.attention(query, key, value, IntervalMask(start, end)))(start, end)
    torch.testing.assert_close(by_parts, expected)

    made_inside = vmap(lambda lengths: dmattn.attention(query, key, value, IntervalMask.padding(9, lengths)))
    lengths = torch.tensor([[9, 1], [5, 2], [0, 3]], device=device)
    each = [dmattn.attention(query, key, value, IntervalMask.padding(9, row)) for row in lengths]
    torch.testing.assert_close(made_inside(lengths), torch.stack(each))


@pytest.mark.parametrize("kind", ["interval", "block", "combined"])
def test_vmap_over_a_mask_as_a_pytree(device, dtype, kind):
    """in_dims has the mask's own structure: 0 where there is a tensor, None elsewhere."""
    query, key, value = (tensor(size, number, dtype, device) for number, size in enumerate(SIZES[:3]))

    def mask_of(v):
        interval = IntervalMask.sliding_window(9, 1 + v, device=device)
        elements = torch.rand(1, 4, 7, 9, generator=torch.Generator().manual_seed(v)) < 0.5
        block = BlockMask.from_bool(elements.to(device))
        bits = torch.cat([block.bits, block.bits[:1].expand(4 - block.bits.shape[0], -1, -1)])  # as many slots in every sample
        block = dataclasses.replace(block, bits=bits)
        return {"interval": interval, "block": block, "combined": interval & block}[kind]

    masks = [mask_of(v) for v in range(V)]
    stack = lambda *parts: torch.stack(parts) if isinstance(parts[0], torch.Tensor) else parts[0]  # noqa: E731
    mask = pytree.tree_map(stack, *masks)
    in_dims = pytree.tree_map(lambda leaf: 0 if isinstance(leaf, torch.Tensor) else None, mask)

    def gradients(query, mask):
        return grad(lambda q: dmattn.attention(q, key, value, mask).float().sin().sum())(query)

    for call in (lambda q, m: dmattn.attention(q, key, value, m), gradients):
        ours = vmap(call, in_dims=(None, in_dims))(query, mask)
        torch.testing.assert_close(ours, torch.stack([call(query, mask) for mask in masks]))


def test_vmap_over_masks_in_second_gradients(small_tiles):
    """The composed derivatives fold a mask of every sample as well."""
    query, key, value = leaves()[:3]
    visible = torch.stack([drawn_bools(v, 0.6) for v in range(V)])

    def second(fn):
        return lambda visible: grad(lambda q: grad(lambda q: fn(q, visible).sin().sum())(q).sin().sum())(query)

    ours = vmap(second(lambda q, m: dmattn.attention(q, key, value, m)))(visible)
    expected = [second(lambda q, m: reference.attention(q, key, value, m[None, None])[0])(row) for row in visible]
    assert_close(ours, torch.stack(expected))


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (1, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_vmap_of_select(device, in_dims, causal):
    scores, segments = (tensor((V, V, 2, 20), 0, device=device), torch.full((V, V, 1, 20), 20, dtype=torch.int32, device=device))
    segments[0, :, :, :7] = 7
    given_tensors = [x[0] if dim is None else x for x, dim in zip((scores, segments), in_dims, strict=True)]
    for beside in ((), (3, 2)) if causal else ((),):
        select = lambda scores, segments, beside=beside: ops.select(scores, segments, 4, causal, *beside)  # noqa: E731
        assert torch.equal(vmap(select, in_dims=in_dims)(*given_tensors), looped(select, in_dims, *given_tensors))
    top_k = lambda scores: IntervalMask.top_k(scores, 4, causal).end  # noqa: E731
    assert torch.equal(
        vmap(vmap(top_k))(scores[:, :, None]).flatten(0, 1),
        top_k(scores.flatten(0, 1)[:, None].flatten(0, 1)).view(V * V, 1, 2, 20),
    )


@pytest.mark.parametrize("in_dim", [0, 2])
@pytest.mark.parametrize("block", [1, 16])
def test_vmap_of_packing(device, in_dim, block):
    tile = 32 if device == "cpu" else 128
    mask = torch.stack([tensor((2, 3, -(-140 // block), -(-300 // block)), v, device=device) > v - 1 for v in range(V)])
    mask[2] = True
    sizes = (140, 300, block, block, tile, tile)

    def pack(mask):
        tiles, rows, columns = ops.pack_tiles(mask, *sizes)
        bits = ops.pack_bits(mask, tiles, *sizes, tiles.numel())
        return tiles, rows, columns, BlockMask(tiles, rows, columns, bits, 140, 300).to_bool()

    mapped = mask.movedim(0, in_dim)
    for ours, expected in zip(vmap(pack, in_dims=in_dim)(mapped), looped(pack, (in_dim,), mapped), strict=True):
        assert torch.equal(ours, expected)


def test_vmap_with_dropout_honours_randomness(device, dtype):
    query, key = tensor((2, 2, 40, 16), 0, dtype, device), tensor((V, 2, 2, 50, 16), 1, dtype, device)
    key = key[:1].expand_as(key).contiguous()  # samples are alike
    seed = torch.tensor([11], device=device)
    seeded = lambda key, seed: dmattn.attention(query, key, key, dropout_p=0.5, dropout_seed=seed)  # noqa: E731
    torch.testing.assert_close(vmap(seeded, in_dims=(0, None))(key, seed), torch.stack([seeded(k, seed) for k in key]))
    seeds = torch.tensor([[1], [2], [3]], device=device)
    torch.testing.assert_close(vmap(seeded)(key, seeds), torch.stack([seeded(*each) for each in zip(key, seeds, strict=True)]))

    drawn = lambda key: dmattn.attention(query, key, key, dropout_p=0.5)  # noqa: E731
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(drawn)(key)
    same, different = (vmap(drawn, randomness=randomness)(key) for randomness in ("same", "different"))
    assert torch.equal(same[0], same[1])
    assert not torch.equal(different[0], different[1])


def test_factors_of_dropout_have_all_digits_of_float64():
    """As in the kernels for float64, beside which tangents stand."""
    expected = torch.tensor([0.0, 1.0 / (1.0 - 0.3)], dtype=torch.float64)
    factors = composed.dropout_factors(torch.tensor([5]), 0.3, 1, 2, ((0, 9), (0, 9)))
    assert torch.equal(factors.unique(), expected)
    assert torch.equal(reference.dropout_multiplier(5, 0.3, (1, 2, 9, 9), torch.device("cpu")).unique(), expected)


def test_vmap_with_dropout_has_the_gradients_of_a_loop(small_tiles):
    given_leaves, directions, seeds = stacked(leaves()), tangents(), torch.tensor([[5], [6], [5]])

    def fn(seed, *given_leaves):
        return attend(dropout_p=0.4, dropout_seed=seed)(*given_leaves)

    for call in (
        lambda seed, *given: grad(loss(lambda *x: fn(seed, *x)), ALL)(*given),
        lambda seed, *given: grad(gradient_loss(lambda *x: fn(seed, *x)), ALL)(*given),
        lambda seed, *given: jvp(lambda *x: fn(seed, *x), given, directions)[1],
    ):
        assert_close(vmap(call)(seeds, *given_leaves), looped(call, (0,) * 6, seeds, *given_leaves))


# The op of the gradients, called directly --------------------------------------------------------------------------------------------------


def test_the_backward_op_is_differentiable():
    """out and lse are what forward gives for the other arguments; all derivatives are in those of the others."""
    query, key, value, key_bias, bias = leaves()
    grad_out, grad_lse = tensor((2, 4, 7, 16), 30, torch.float64), tensor((2, 4, 7), 31, torch.float64)
    options = (*(None,) * 8, key_bias, bias[None], None, True, 0.3, 0.0, 0.0, False)

    def gradients(grad_out, grad_lse, query, key, value):
        with torch.no_grad():
            out, lse, lse_rest = ops.forward(query, key, value, *options)
        return ops.backward(grad_out, grad_lse, query, key, value, out, lse, *options, True, True, lse_rest)

    def expected(grad_out, grad_lse, query, key, value):
        fn = lambda q, k, v, kb, b: reference.attention(q, k, v, key_bias=kb, bias=b, is_causal=True, scale=0.3)  # noqa: E731
        return vjp(fn, query, key, value, key_bias, bias[None])[1]((grad_out, grad_lse))

    given_tensors = (grad_out, grad_lse, query, key, value)
    directions = tuple(tensor(x.shape, 40 + i, torch.float64) for i, x in enumerate(given_tensors))
    for transform in (
        lambda fn: jvp(fn, given_tensors, directions),
        lambda fn: vjp(fn, *given_tensors)[1](expected(*directions)),
        lambda fn: vmap(fn, in_dims=(0, None, None, 0, None))(*stacked((grad_out,)), grad_lse, query, *stacked((key,)), value),
        lambda fn: grad(lambda *x: sum(y.sin().sum() for y in fn(*x)), ALL)(*given_tensors),
    ):
        assert_close(transform(gradients), transform(expected))
    wanted = [x.clone().requires_grad_() for x in given_tensors]
    eager = torch.autograd.grad(sum(y.sin().sum() for y in gradients(*wanted)), wanted)
    assert_close(eager, grad(lambda *x: sum(y.sin().sum() for y in expected(*x)), ALL)(*given_tensors))


def test_the_backward_op_without_its_last_arguments():
    """The dispatcher leaves out what has its default."""
    query, key, value = leaves()[:3]
    options = (*(None,) * 11, True, 0.3, 0.0, 0.0, False)
    out, lse, _ = ops.forward(query, key, value, *options)
    call = lambda grad_out: ops.backward(grad_out, None, query, key, value, out, lse, *options, False, False)[:3]  # noqa: E731
    (grads,) = stacked((tensor(out.shape, 30, torch.float64),))
    assert_close(vmap(call)(grads), looped(call, (0,), grads))


# Memory ------------------------------------------------------------------------------------------------------------------------------------


class Live:
    """Counts elements that graphs keep alive: use pack and unpack as saved-tensor hooks."""

    def __init__(self):
        self.now = self.most = 0

    def pack(self, given):
        counter, size = self, given.numel()

        class Kept:
            def __del__(self):
                counter.now -= size

        kept = Kept()
        kept.tensor = given
        self.now += size
        self.most = max(self.most, self.now)
        return kept

    @staticmethod
    def unpack(kept):
        return kept.tensor


def test_no_pass_holds_all_pairs_at_once(monkeypatch):
    """The largest tensor and what graphs keep alive grow with the length, not with its square, up to third derivatives."""
    monkeypatch.setattr(composed, "BLOCK_QUERIES", 16)
    monkeypatch.setattr(composed, "BLOCK_KEYS", 16)

    def measured(length):
        given_leaves = [tensor((1, 2, length, 8), number) for number in range(3)]
        call = lambda *given: dmattn.attention(*given, is_causal=True)  # noqa: E731
        live = Live()
        with Watched() as counted, torch.autograd.graph.saved_tensors_hooks(live.pack, live.unpack):
            wanted = [x.clone().requires_grad_() for x in given_leaves]
            gradients = torch.autograd.grad(call(*wanted).sin().sum(), wanted, create_graph=True)
            second = torch.autograd.grad([g.sin().sum() for g in gradients], wanted, create_graph=True)
            torch.autograd.grad([g.sum() for g in second], wanted)
        with counted:
            jvp(call, tuple(given_leaves), tuple(given_leaves))
        return counted.largest, live.most

    short, long = measured(64), measured(192)
    assert long[0] <= 2 * 192 * 16  # H x length x block
    assert long[1] <= 3 * short[1]


def test_invisible_tiles_are_left_out(monkeypatch):
    monkeypatch.setattr(composed, "BLOCK_QUERIES", 64)
    monkeypatch.setattr(composed, "BLOCK_KEYS", 64)
    tiles = []
    compute = composed.SumsAndTangents.__call__
    monkeypatch.setattr(composed.SumsAndTangents, "__call__", lambda *given: tiles.append(1) or compute(*given))
    query = tensor((1, 1, 512, 8), 0)
    window = IntervalMask.sliding_window(512, 30)
    block = BlockMask.from_bool(window.to_bool(512, 512), 64)
    dense, causal = IntervalMask.padding(512, 512), {"is_causal": True}
    tangents = []
    for mask, options, expected in ((dense, {}, 64), (None, causal, 36), (window, causal, 15), (window, {}, 15), (block, {}, 15)):
        tiles.clear()
        call = lambda q, mask=mask, options=options: dmattn.attention(q, query, query, mask, **options)  # noqa: E731
        tangents.append(jvp(call, (query,), (query,))[1])
        assert len(tiles) == expected
    torch.testing.assert_close(tangents[-1], tangents[-2])


# Compiled ----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["jvp", "dual numbers", "grad", "vmap of grad"])
def test_transforms_inside_compiled_code(device, dtype, name):
    key = tensor((2, 2, 9, 16), 1, dtype, device)

    def attend(query):
        return dmattn.attention(query, key, key, is_causal=True)

    def by_dual(query):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(attend(forward_ad.make_dual(query, key))).tangent

    call = {
        "jvp": lambda query: jvp(attend, (query,), (key,))[1],
        "dual numbers": by_dual,
        "grad": lambda query: grad(lambda query: attend(query).float().sin().sum())(query),
        "vmap of grad": lambda query: vmap(grad(lambda query: attend(query).float().sin().sum()))(torch.stack([query, key])),
    }[name]
    query = tensor((2, 4, 9, 16), 0, dtype, device)[:, :2]
    ours, expected = torch.compile(call, backend="aot_eager", fullgraph=True)(query), call(query)
    assert expected.any()
    torch.testing.assert_close(ours, expected)
