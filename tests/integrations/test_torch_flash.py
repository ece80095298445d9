"""torch's flash attention ops on dmattn's kernels: the registry, each op against torch's math, fallbacks, and a GPU's own dispatch."""

from __future__ import annotations

import inspect
import logging
import runpy
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE
from dmattn import attention, torch_flash, varlen_attention
from dmattn.composed import dropout_factors
from torch.nn import attention as registry

pytestmark = pytest.mark.skipif(not hasattr(registry, "activate_flash_attention_impl"), reason="this torch has no registry")
aten = torch.ops.aten


@pytest.fixture
def activated():
    """dmattn's kernels under the CPU's key, where torch has none for these ops; so everything above a kernel is torch's own."""
    handle = torch_flash.Activated("CPU")
    yield handle
    handle.remove()


def inputs(*shapes, dtype=torch.float64, requires_grad=True):
    return [torch.randn(shape, dtype=dtype).requires_grad_(requires_grad) for shape in shapes]


def math(query, key, value, visible=None, scale=None):
    """Attention of [B, heads, S, D] by its definition, (out, lse). Rows that see nothing are zero."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    logits = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if visible is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0) @ value, logits.logsumexp(-1)


def band(queries, keys, left, right):
    """bool [Sq, Sk]: the last query stands at the last key."""
    behind = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)
    end = queries + keys
    return (behind >= -(end if right < 0 else right)) & (behind <= (end if left < 0 else left))


def varlen(given, ends_q, ends_k, most_q, most_k, window):
    """(out, lse) of torch's public function, whose arguments have changed from release to release."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    named, aux = inspect.signature(varlen_attn).parameters, AuxRequest(lse=True)
    if "window_size" not in named and (window[0] >= 0 or window[1] > 0):
        pytest.skip("this torch's varlen_attn has no windows")
    more = {"window_size": window} if "window_size" in named else {"is_causal": window == (-1, 0)}
    if "enable_gqa" in named:
        more["enable_gqa"] = True
    return varlen_attn(*given, ends_q, ends_k, most_q, most_k, return_aux=aux, **more)


def same_gradients(out, expected, given):
    weights = torch.randn_like(out)
    ours = torch.autograd.grad((out * weights).sum(), given)
    torch.testing.assert_close(ours, torch.autograd.grad((expected * weights).sum(), given))


# The registry ----------------------------------------------------------------------------------------------------------------------------


def test_importing_registers_and_activates_nothing(run_python):
    program = (
        "import dmattn\nfrom torch.nn import attention\n"
        "print('dmattn' in attention.list_flash_attention_impls(), attention.current_flash_attention_impl())"
    )
    finished = run_python("-c", program)
    assert finished.stdout == "True None\n", finished.stderr


def test_a_torch_without_the_registry_is_left_alone(monkeypatch):
    monkeypatch.delattr(registry, "register_flash_attention_impl")
    torch_flash.register()


def test_a_build_without_cuda_refuses_to_be_activated(monkeypatch):
    monkeypatch.setattr(torch_flash, "build_info", lambda: {"cuda": ""})
    with pytest.raises(RuntimeError, match="expected a build with CUDA kernels"):
        registry.activate_flash_attention_impl("dmattn")
    assert registry.current_flash_attention_impl() is None


def test_activating_and_restoring(monkeypatch):
    if DEVICE != "cpu":
        pytest.skip("a GPU's own kernels are there before")
    monkeypatch.setattr(torch_flash, "build_info", lambda: {"cuda": "13.0"})
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for _ in range(2):
        registry.activate_flash_attention_impl("dmattn")
        assert registry.current_flash_attention_impl() == "dmattn"
        assert all(has_kernel(f"aten::{name}", "CUDA") for name in torch_flash.OPS)
        registry.restore_flash_attention_impl()
        assert registry.current_flash_attention_impl() is None
        assert not any(has_kernel(f"aten::{name}", "CUDA") for name in torch_flash.OPS)


def test_removing_twice_is_no_error(activated):
    activated.remove()
    activated.remove()
    with pytest.raises(NotImplementedError):
        aten._scaled_dot_product_flash_attention(*inputs((1, 1, 4, 8), (1, 1, 4, 8), (1, 1, 4, 8)))


def test_an_op_that_this_torch_does_not_have_is_left_out(monkeypatch):
    monkeypatch.setitem(torch_flash.OPS, "_flash_attention_of_tomorrow", torch_flash.forward)
    handle = torch_flash.Activated("CPU")
    try:
        assert aten._scaled_dot_product_flash_attention(*inputs((1, 1, 4, 8), (1, 1, 4, 8), (1, 1, 4, 8)))[0].any()
    finally:
        handle.remove()


def test_flash_comes_first_in_the_order_of_backends():
    flash, cudnn = (int(registry.SDPBackend.__members__[name]) for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"))
    assert torch_flash._flash_first([cudnn, flash, 2, 0]) == [flash, cudnn, 2, 0]


def test_the_order_of_backends_is_put_back(monkeypatch):
    """As on a GPU, where torch chooses by that order."""
    given, zeros, before = torch_flash.Activated("CPU"), torch.zeros, torch._C._get_sdp_priority_order()
    monkeypatch.setattr(torch, "zeros", lambda size, *, dtype, device: zeros(size, dtype=dtype))
    try:
        given._put_flash_first()
        assert torch._C._get_sdp_priority_order() == torch_flash._flash_first(before)
    finally:
        given.remove()
    assert torch._C._get_sdp_priority_order() == before


# Dense calls -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "keys", "is_causal", "scale"),
    [(4, 4, 40, 40, True, None), (4, 2, 40, 40, False, 0.3), (4, 1, 20, 50, True, None), (2, 2, 50, 20, True, None)],
)
def test_scaled_dot_product(activated, heads, kv_heads, queries, keys, is_causal, scale):
    given = inputs((2, heads, queries, 16), (2, kv_heads, keys, 16), (2, kv_heads, keys, 16))
    out, lse, ends_q, ends_k, most_q, most_k, rng, unused, _ = aten._scaled_dot_product_flash_attention(
        *given, 0.0, is_causal, scale=scale
    )
    visible = band(queries, keys, -1, 0) if is_causal else None
    expected, expected_lse = math(*given, visible, scale)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert (ends_q, ends_k, most_q, most_k) == (None, None, queries, keys)
    assert (rng.dtype, rng.shape, unused.shape) == (torch.uint64, (2,), ())
    same_gradients(out, expected, given)


def test_the_output_has_the_strides_of_the_query(activated):
    """As torch's meta function says, which compiled programs rely on."""
    given = [x.transpose(1, 2) for x in inputs((2, 30, 4, 16), (2, 30, 4, 16), (2, 30, 4, 16))]
    results = aten._scaled_dot_product_flash_attention(*given, 0.0, True)
    expected = aten._scaled_dot_product_flash_attention(*(x.to("meta") for x in given), 0.0, True)
    assert results[0].stride() == expected[0].stride()
    assert [x.shape for x in results if isinstance(x, torch.Tensor)][:2] == [x.shape for x in expected[:2]]


def test_a_last_dimension_that_is_not_dense(activated):
    given = [x.transpose(2, 3) for x in inputs((1, 2, 16, 30), (1, 2, 16, 30), (1, 2, 16, 30))]
    out = aten._scaled_dot_product_flash_attention(*given, 0.0, True)[0]
    expected, _ = math(*given, band(30, 30, -1, 0))
    torch.testing.assert_close(out, expected)
    same_gradients(out, expected, given)


@pytest.mark.parametrize(
    ("left", "right", "is_causal"), [(-1, -1, False), (-1, 0, True), (5, 0, False), (5, 3, False), (7, -1, True)]
)
def test_dense_windows(activated, left, right, is_causal):
    given = inputs((2, 24, 4, 16), (2, 40, 2, 16), (2, 40, 2, 16))
    out, lse, *_ = aten._flash_attention_forward(
        *given, None, None, 24, 40, 0.0, is_causal, False, window_size_left=left, window_size_right=right
    )
    expected, expected_lse = math(*(x.transpose(1, 2) for x in given), band(24, 40, left, 0 if is_causal else right))
    torch.testing.assert_close(out, expected.transpose(1, 2))
    torch.testing.assert_close(lse, expected_lse)
    same_gradients(out, expected.transpose(1, 2), given)


def test_dropout_takes_its_seed_to_the_backward_pass(activated):
    given = inputs((2, 3, 40, 16), (2, 3, 40, 16), (2, 3, 40, 16))
    torch.manual_seed(5)
    out, lse, *_, rng, _, _ = aten._scaled_dot_product_flash_attention(*given, 0.25, True)
    seed = rng[:1].view(torch.int64)
    expected = attention(*given, is_causal=True, dropout_p=0.25, dropout_seed=seed)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, math(*given, band(40, 40, -1, 0))[1])
    kept = dropout_factors(seed, 0.25, 2, 3, ((0, 40), (0, 40)))
    weights = (given[0] @ given[1].mT * 0.25).masked_fill(~band(40, 40, -1, 0), -torch.inf).softmax(-1)
    torch.testing.assert_close(out, (weights * kept).to(weights.dtype) @ given[2])
    same_gradients(out, expected, given)
    torch.manual_seed(5)
    again = aten._scaled_dot_product_flash_attention(*given, 0.25, True)[0]
    assert torch.equal(out, again)
    assert not torch.equal(out, aten._scaled_dot_product_flash_attention(*given, 0.25, True)[0])


@pytest.mark.long
@pytest.mark.parametrize("is_transposed", [False, True])
def test_compiled(activated, is_transposed):
    """Inductor trusts the shapes and strides that torch's meta functions have for these ops."""

    def twice(query, key, value):
        return 2 * aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]

    shapes = ((2, 4, 40, 16), (2, 2, 40, 16), (2, 2, 40, 16))
    given = inputs(*shapes, dtype=torch.float32)
    if is_transposed:
        given = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in given]
    out, expected = torch.compile(twice)(*given), twice(*given)
    assert torch.equal(out, expected)
    assert out.stride() == expected.stride()
    same_gradients(out, expected, given)


# Packed sequences ------------------------------------------------------------------------------------------------------------------------

LENGTHS = [7, 1, 0, 25, 12]


def ends_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed_math(query, key, value, lengths_q, lengths_k, left, right):
    """(out [Tq, H, D], lse [H, Tq]) document by document."""
    outs, lses = [], []
    documents = zip(query.split(lengths_q), key.split(lengths_k), value.split(lengths_k), strict=True)
    for document in documents:
        q, k, v = (x.transpose(0, 1)[None] for x in document)
        out, lse = math(q, k, v, band(q.shape[2], k.shape[2], left, right))
        outs.append(out[0].transpose(0, 1)), lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (4, 0), (3, 2)])
@pytest.mark.parametrize("lengths_k", [LENGTHS, [9, 4, 3, 25, 10]], ids=["same", "other"])
def test_varlen_attn(activated, window, lengths_k):
    """torch's public function, with its own op and gradients around ours."""
    given = inputs((sum(LENGTHS), 4, 16), (sum(lengths_k), 2, 16), (sum(lengths_k), 2, 16))
    ends_q = ends_of(LENGTHS)
    ends_k = ends_q if lengths_k is LENGTHS else ends_of(lengths_k)
    out, lse = varlen(given, ends_q, ends_k, max(LENGTHS), max(lengths_k), window)
    expected, expected_lse = packed_math(*given, LENGTHS, lengths_k, *window)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse, check_dtype=False)
    same_gradients(out, expected, given)


def test_the_debug_mask_says_what_is_dropped(activated):
    """As torch's own tests use it: where it is not negative, math with that mask gives the same output."""
    given = inputs((2, 4, 9, 8), (2, 2, 12, 8), (2, 2, 12, 8))
    out, *_, debug = aten._scaled_dot_product_flash_attention(*given, 0.3, False, True)
    assert debug.shape == (2, 4, 9, 12)
    kept = (debug >= 0).double() / 0.7
    torch.testing.assert_close(out, (math_weights(*given[:2]) * kept) @ given[2].repeat_interleave(2, 1))
    assert aten._scaled_dot_product_flash_attention(*given, 0.0, False, True)[-1].numel() == 0

    lengths, most = [7, 1, 4], 7
    packed = inputs((12, 4, 8), (12, 4, 8), (12, 4, 8))
    ends = ends_of(lengths)
    out, *_, debug = aten._flash_attention_forward(*packed, ends, ends, most, most, 0.3, False, True)
    assert debug.shape == (3, 4, most, most)
    for number, parts in enumerate(zip(*(x.split(lengths) for x in (*packed, out)), strict=True)):
        query, key, value, found = (x.transpose(0, 1)[None] for x in parts)
        kept = (debug[number, :, : query.shape[2], : query.shape[2]] >= 0).double() / 0.7
        torch.testing.assert_close(found, (math_weights(query, key) * kept) @ value)


def math_weights(query, key):
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1)


def test_packed_dropout(activated):
    given = inputs((sum(LENGTHS), 4, 16), (sum(LENGTHS), 4, 16), (sum(LENGTHS), 4, 16))
    ends = ends_of(LENGTHS)
    out, _, rng, *_ = aten._flash_attention_forward(*given, ends, ends, 25, 25, 0.3, True, False)
    expected = varlen_attention(*given, ends, is_causal=True, dropout_p=0.3, dropout_seed=rng[:1].view(torch.int64))
    torch.testing.assert_close(out, expected)
    same_gradients(out, expected, given)


def test_writing_into_an_output(activated):
    given = inputs((sum(LENGTHS), 4, 16), (sum(LENGTHS), 4, 16), (sum(LENGTHS), 4, 16), requires_grad=False)
    ends, out = ends_of(LENGTHS), torch.full((sum(LENGTHS), 4, 16), torch.nan, dtype=torch.float64)
    lse = aten._flash_attention_forward_no_dropout_inplace(out, *given, ends, ends, 25, 25, 0.0, True, False)
    expected, expected_lse = packed_math(*given, LENGTHS, LENGTHS, -1, 0)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (4, 0)])
def test_keys_that_are_not_used(activated, window):
    room, used, lengths_q = [30, 20, 40], [30, 5, 0], [3, 5, 2]
    query, key, value = inputs((sum(lengths_q), 4, 16), (sum(room), 2, 16), (sum(room), 2, 16), requires_grad=False)
    out, lse, *_ = aten._flash_attention_forward(
        query, key, value, ends_of(lengths_q), ends_of(room), 5, 40, 0.0, window == (-1, 0), False,
        seqused_k=torch.tensor(used, dtype=torch.int32), window_size_left=window[0], window_size_right=window[1],
    )  # fmt: skip
    there = torch.cat([torch.arange(n) < m for n, m in zip(room, used, strict=True)])
    expected, expected_lse = packed_math(query, key[there], value[there], lengths_q, used, *window)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize(
    ("lengths_q", "window", "copies"),
    [([1, 1, 1], (-1, 0), False), ([4, 4, 4], (-1, 0), False), ([1, 1, 1], (-1, -1), False), ([4, 1, 6], (-1, 0), True),
     ([4, 4, 4], (9, 0), True), ([20, 20, 20], (-1, 0), True)],
)  # fmt: skip
def test_pages(activated, lengths_q, window, copies, monkeypatch):
    from dmattn.compat import flash_attn

    used, page_size = [30, 61, 20], 16
    pages = torch.randn(2, 14, page_size, 2, 16, dtype=torch.float64)
    table = torch.randperm(14)[:12].view(3, 4).int()
    query = torch.randn(sum(lengths_q), 4, 16, dtype=torch.float64)
    calls, original = [], flash_attn.flash_attn_varlen_func
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", lambda *a, **k: calls.append(1) or original(*a, **k))
    out, lse, *_ = aten._flash_attention_forward(
        query, *pages, ends_of(lengths_q), None, max(lengths_q), 64, 0.0, window == (-1, 0), False,
        seqused_k=torch.tensor(used, dtype=torch.int32), block_table=table, window_size_left=window[0], window_size_right=window[1],
    )  # fmt: skip
    rows = [torch.cat([x[table[b].long()].flatten(0, 1)[: used[b]] for b in range(3)]) for x in pages]
    expected, expected_lse = packed_math(query, *rows, lengths_q, used, *window)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert bool(calls) == copies


# What is left to the kernel before -------------------------------------------------------------------------------------------------------


def test_what_is_not_taken_goes_to_the_kernel_before_and_is_said_once(caplog):
    seen = []

    def before(query, key, value, *args, **options):
        seen.append((args, options))
        return torch.zeros_like(query), query.new_zeros(query.shape[:3]), None, None, 1, 1, None, None, None

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", before, "CPU")
    handle = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, that a kernel is overridden
            handle = torch_flash.Activated("CPU")
        with caplog.at_level(logging.WARNING, "dmattn.torch_flash"):
            odd = inputs((1, 2, 9, 12), (1, 2, 9, 12), (1, 2, 9, 12), requires_grad=False)
            for _ in range(2):
                assert not aten._scaled_dot_product_flash_attention(*odd, 0.0, True, scale=0.5)[0].any()
            assert len(caplog.records) == 1
            assert "expected a last dimension that is a multiple of 8 up to 256, got 12" in caplog.text
            assert seen == [((0.0, True), {"scale": 0.5})] * 2
            even = inputs((1, 2, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8), requires_grad=False)
            assert aten._scaled_dot_product_flash_attention(*even)[0].any()
            assert len(seen) == 2
        handle.remove()
        assert not aten._scaled_dot_product_flash_attention(*even)[0].any()
    finally:
        if handle is not None:
            handle.remove()
        library._destroy()


FOUR, NO_DROPOUT = torch.zeros(4, 1, 8), (4, 4, 0.0, False, False)


@pytest.mark.brief
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"alibi_slopes": torch.ones(2)}, "alibi_slopes is left to torch"),
        ({"seqused_k": torch.ones(1, dtype=torch.int32)}, "seqused_k, block_table: expected both"),
        ({"window_size_left": 3, "scale": float("inf")}, "scale: expected"),
    ],
)
def test_reasons(activated, more, message):
    given = inputs((1, 9, 2, 8), (1, 9, 2, 8), (1, 9, 2, 8), requires_grad=False)
    with pytest.raises(NotImplementedError, match=message):
        aten._flash_attention_forward(*given, None, None, 9, 9, 0.0, False, False, **more)


@pytest.mark.brief
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("_scaled_dot_product_flash_attention", [torch.zeros(1, 1, 4, 8, dtype=torch.int32)] * 3, "expected dtype"),
        ("_scaled_dot_product_flash_attention", [*[torch.zeros(1, 1, 4, 8)] * 3, 1.0], "dropout_p"),
        ("_flash_attention_forward", [*[FOUR] * 3, ends_of([4]), None, *NO_DROPOUT], "cum_seq_k: expected a tensor"),
        (
            "_flash_attention_forward",
            [FOUR[None], FOUR, FOUR, *[ends_of([4])] * 2, *NO_DROPOUT],
            r"expected \[T, heads, D\] with cum_seq_q",
        ),
    ],
)
def test_more_reasons(activated, name, arguments, message):
    with pytest.raises(NotImplementedError, match=message):
        getattr(aten, name)(*arguments)


# On a GPU: torch's own dispatch ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_gpu():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, that kernels are overridden
        registry.activate_flash_attention_impl("dmattn")
    yield registry._registry._FLASH_ATTENTION_ACTIVE[1]
    if registry.current_flash_attention_impl() is not None:
        registry.restore_flash_attention_impl()


def within_twice_the_error(ours, theirs, exact):
    """The error against float64 math is at most twice that of torch's kernel, and a little where that is none."""
    for a, b, c in zip(ours, theirs, exact, strict=True):
        error, usual = ((x.double() - c).abs().max() for x in (a, b))
        assert error <= 2 * usual + 1e-3 * c.abs().max(), (error, usual)


def results(function, given):
    given = [x.detach().requires_grad_() for x in given]
    out = function(*given)
    torch.manual_seed(3)
    weights = torch.randn_like(out, dtype=torch.bfloat16).to(out.dtype)  # the same numbers in every dtype
    return [out, *torch.autograd.grad(out, given, weights)]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11, of itself
@pytest.mark.parametrize(("kv_heads", "is_causal", "size"), [(8, True, 64), (2, True, 128), (8, False, 80), (2, False, 256)])
def test_sdpa_on_a_gpu(kv_heads, is_causal, size, on_gpu):
    given = [torch.randn(2, heads, 512, size, device="cuda", dtype=torch.bfloat16) for heads in (8, kv_heads, kv_heads)]

    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ours = results(sdpa, given)
    names = {event.key for event in profile.key_averages()}
    assert "dmattn::forward" in names
    assert "dmattn::backward" in names
    assert on_gpu.reasons == set()
    registry.restore_flash_attention_impl()
    with registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
        theirs = results(sdpa, given)
    assert not any(torch.equal(a, b) for a, b in zip(ours[1:], theirs[1:], strict=True))  # the kernels are others

    def definition(q, k, v):
        visible = band(512, 512, -1, 0).cuda() if is_causal else None
        return math(q, k, v, visible)[0]

    within_twice_the_error(ours, theirs, results(definition, [x.double() for x in given]))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 0)])
def test_varlen_attn_on_a_gpu(window, on_gpu):
    lengths = [300, 1, 77, 646]
    ends = ends_of(lengths).cuda()
    given = [torch.randn(sum(lengths), 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    def call(q, k, v):
        return varlen((q, k, v), ends, ends, 646, 646, window)[0]

    ours = results(call, given)
    assert on_gpu.reasons == set()
    registry.restore_flash_attention_impl()
    theirs = results(call, given)

    def definition(q, k, v):
        outs = []
        for document in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            a, b, c = (x.transpose(0, 1)[None] for x in document)
            outs.append(math(a, b, c, band(a.shape[2], a.shape[2], *window).cuda())[0][0].transpose(0, 1))
        return torch.cat(outs)

    within_twice_the_error(ours, theirs, results(definition, [x.double() for x in given]))


@pytest.mark.gpu
def test_dropout_on_a_gpu(on_gpu):
    given = [torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3)]
    assert aten._scaled_dot_product_flash_attention(*(x.detach() for x in given), 0.1, False, True)[-1].numel()
    torch.manual_seed(0)
    out = F.scaled_dot_product_attention(*given, dropout_p=0.25, is_causal=True)
    out.square().sum().backward()
    torch.manual_seed(0)
    assert torch.equal(out, F.scaled_dot_product_attention(*given, dropout_p=0.25, is_causal=True))
    mean = torch.stack([F.scaled_dot_product_attention(*given, dropout_p=0.25) for _ in range(400)]).float().mean(0)
    expected = F.scaled_dot_product_attention(*given).float()
    assert (mean - expected).abs().mean() < 0.05 * expected.abs().mean() + 0.01
    compiled = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    torch.testing.assert_close(compiled(*given), F.scaled_dot_product_attention(*given, is_causal=True))


@pytest.mark.gpu
def test_restoring_on_a_gpu_brings_back_the_order_and_the_bits():
    given = [torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.float16) for _ in range(3)]
    before = F.scaled_dot_product_attention(*given, is_causal=True)
    order = torch._C._get_sdp_priority_order()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        registry.activate_flash_attention_impl("dmattn")
    assert torch._C._get_sdp_priority_order()[0] == int(registry.SDPBackend.FLASH_ATTENTION)
    registry.restore_flash_attention_impl()
    assert torch._C._get_sdp_priority_order() == order
    assert torch.equal(before, F.scaled_dot_product_attention(*given, is_causal=True))


def test_the_example_trains_and_says_what_it_did_not_measure(capsys):
    with torch.random.fork_rng(devices=[]):
        found = runpy.run_path(str(Path(__file__).parents[2] / "examples/torch_registry.py"))["main"](["--steps", "10"])
    loss, milliseconds = found["torch, as it chooses"]
    assert loss < 5
    assert milliseconds > 0
    printed = capsys.readouterr().out
    assert printed.count("ms a step") == len(found)
    assert ("dmattn" in found) != ("it was not measured here" in printed)
