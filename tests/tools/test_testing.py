"""The tests' own tools: the rule rejects small errors, memory really is poisoned, strategies reach what they promise."""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import math
import re
from pathlib import Path

import dmattn
import pytest
import torch
from dmattn.testing import (
    FEATURES,
    AttentionCase,
    DrawnMask,
    assert_close_to_reference,
    assert_function_matches,
    assert_matches_reference,
    assert_same_bits,
    attention_cases,
    features_in,
    features_of,
    masks,
    poisoned_memory,
    reference_attention,
    run,
    run_reference,
    shapes,
    strategies,
    tolerance,
)
from dmattn.testing.features import PREDICATES
from dmattn_bench import two_ways
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

CASES = {
    dtype: AttentionCase(*(strategies.random_tensor((1, 2, 60, 16), i, dtype) for i in range(3)), is_causal=True)
    for dtype in strategies.CPU_DTYPES
}
# A relative error each dtype's rule must see; the worst rounding of the dtype is eps / 2.
VISIBLE_ERROR = {torch.float64: 1e-13, torch.float32: 3e-5, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}


@pytest.mark.parametrize("name", ["out", "lse", "grad_query", "grad_key", "grad_value"])
@pytest.mark.parametrize("dtype", CASES)
def test_the_rule_accepts_the_op_and_rejects_a_slightly_wrong_one(dtype, name):
    results = run(CASES[dtype])
    assert_close_to_reference(CASES[dtype], results)
    results[name] = results[name] * (1 + VISIBLE_ERROR[dtype])
    with pytest.raises(AssertionError, match=rf"{name}\[.*allowed"):
        assert_close_to_reference(CASES[dtype], results)


def test_the_rule_rejects_misplaced_infinities_and_nan():
    case = CASES[torch.float32]
    for bad in (math.nan, math.inf, -math.inf):
        results = run(case, gradients=False)
        results["lse"][0, 1, 7] = bad
        with pytest.raises(AssertionError, match=r"lse\[0, 1, 7\]: expected .*, got .*\(1 such elements\)"):
            assert_close_to_reference(case, results)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["query", "key", "value", "key_bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rule_rejects_wrong_numbers_beside_infinities_and_nan(dtype, name, bad):
    """What a bad number does not reach is compared as if it were not there."""
    query, key, value, key_bias = (strategies.random_tensor((1, 1, 9, 8), seed, dtype) for seed in range(4))
    case = AttentionCase(query, key, value, key_bias=key_bias[..., 0].clone(), is_causal=True)
    case.leaves()[name][(0, 0, 7) if name == "key_bias" else (0, 0, 7, 3)] = bad
    right = run_reference(case)
    assert_close_to_reference(case, right)
    for wrong in ("out", "lse"):
        assert right[wrong][0, 0, 2].isfinite().any()
        with pytest.raises(AssertionError, match=rf"{wrong}\[.*allowed"):
            assert_close_to_reference(case, {wrong: right[wrong] + 1})


def test_the_rule_rejects_a_single_dropped_key():
    def forgets_a_key(query, key, value, mask, **options):
        hidden = torch.arange(60) != 13
        return dmattn.attention(query, key, value, hidden, **options)

    with pytest.raises(AssertionError):
        assert_matches_reference(CASES[torch.bfloat16], forgets_a_key)


def test_the_rule_allows_for_the_rounding_of_large_sinks():
    case = dataclasses.replace(CASES[torch.float64], sinks=torch.tensor([9.0, -9.0], dtype=torch.float64))
    out, lse = case.call_reference()
    wrong = 9 * (1 - case.share_of_keys(lse)[..., None]) * out.abs()
    assert (tolerance.terms_of(case, False)["out"].arithmetic >= wrong).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_rule_covers_sinks_and_offsets(dtype):
    """Two batches whose queries stand elsewhere, and sinks that take about half of the weights."""
    sinks, first = torch.tensor([2.0, 3.0], dtype=dtype), torch.tensor([3, 40])
    three = (torch.cat([tensor, tensor.flip(2)]) for tensor in (CASES[dtype].query, CASES[dtype].key, CASES[dtype].value))
    case = AttentionCase(*three, is_causal=True, sinks=sinks, query_offset=first, grad_layout="one_number")
    results = assert_matches_reference(case)
    sees = case.positions() >= torch.arange(60)
    assert torch.equal(case.seen(), sees.expand(2, 2, 60, 60))
    share = results["out"][0, 1, 0].norm() / run(dataclasses.replace(case, sinks=None))["out"][0, 1, 0].norm()
    assert 0.02 < share < 0.9
    for name in ("out", "grad_query", "grad_key", "grad_value", "grad_sinks"):
        with pytest.raises(AssertionError, match=rf"{name}\[.*allowed"):
            assert_close_to_reference(case, {name: results[name] * (1 + VISIBLE_ERROR[dtype])})

    def moved(query, key, value, mask, *, query_offset, **options):
        return dmattn.attention(query, key, value, mask, query_offset=query_offset + 1, **options)

    for wrong in (moved, lambda *given, sinks, **options: dmattn.attention(*given, sinks=sinks + 1, **options)):
        with pytest.raises(AssertionError, match="allowed"):
            assert_matches_reference(case, wrong)
    with pytest.raises(ValueError, match="case: expected none with sinks"):
        tolerance.assert_tangents_close(case, case.leaves(), {})


@pytest.mark.parametrize(("sizes", "seed", "magnitude"), [((12, 8), 1, 1.0), ((17, 24), 6, 4.0)])
def test_the_rule_knows_how_coarse_subnormal_numbers_are(sizes, seed, magnitude):
    """Values so small that out, which backward reads, has few bits: by relative errors alone the gradients were not close enough."""
    length, size = sizes
    query = magnitude * strategies.random_tensor((1, 1, length, size), seed, torch.float16)
    key = magnitude * strategies.random_tensor((1, 1, 1, size), seed + 1, torch.float16)
    value = strategies.random_tensor((1, 1, 1, size), seed + 2, torch.float16) * (torch.finfo(torch.float16).tiny / 8)
    assert_matches_reference(AttentionCase(query, key, value, dropout_p=0.2, grad_seed=seed, grad_through_lse=False))


@pytest.mark.parametrize("length", [191, 1025])
def test_the_rule_knows_that_equal_terms_are_rounded_alike(length):
    for seed in (1, 3):
        query, key, value = (strategies.random_tensor((1, 1, length, 8), 4 * seed + i, torch.float64) for i in range(3))
        case = AttentionCase(query, key, value, scale=0.0, grad_seed=seed, grad_layout="one_number")
        results = assert_matches_reference(case)
        with pytest.raises(AssertionError, match=r"grad_value\[.*allowed"):
            assert_close_to_reference(
                case, {"grad_value": results["grad_value"] * (1 + VISIBLE_ERROR[torch.float64] * length / 100)}
            )


def test_the_rule_knows_that_equal_rows_of_out_are_rounded_alike():
    """With one key the gradient of a logit is 0, and what kernels find is out's rounding, the same for all queries."""
    value = strategies.random_tensor((1, 2, 1, 8), 1, torch.float16)
    query, key = torch.ones(1, 4, 500, 8, dtype=torch.float16), torch.ones(1, 2, 1, 8, dtype=torch.float16)
    case = AttentionCase(query, key, value, dropout_p=0.3, grad_seed=1, grad_layout="one_number", grad_through_lse=False)
    results = assert_matches_reference(case)
    for factor in (-1.0, 2.0):
        with pytest.raises(AssertionError, match=r"grad_key\[.*allowed"):
            assert_close_to_reference(case, {"grad_key": results["grad_key"] * factor})


def test_the_rule_has_nothing_to_turn():
    assert list(inspect.signature(assert_close_to_reference).parameters) == ["case", "results"]
    assert list(inspect.signature(assert_matches_reference).parameters) == ["case", "fn", "gradients"]
    for check in (
        two_ways.assert_same_by_another_way, two_ways.assert_same_sums_by_another_way, two_ways.assert_same_lse_by_another_way,
        two_ways.assert_same_in_another_order,
    ):  # fmt: skip
        assert list(inspect.signature(check).parameters) == ["result", "expected", "dtype"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_tell_rounding_from_errors(dtype):
    """Numbers in three roundings, twice, pass as two ways to one result; those of one order pass as the other only when they hardly differ."""
    exact = strategies.random_tensor((400, 300), 0, torch.float64)
    eps = torch.finfo(dtype).eps

    def rounded(seed):
        noise = strategies.random_tensor((2, 400, 300), seed, torch.float64).sum(0) * eps / 12**0.5
        return (exact * (1 + noise)).to(dtype)

    one, other = rounded(1), rounded(2)
    two_ways.assert_same_by_another_way(one, other, dtype)
    nearly = (one.float() * (1 + 50 * torch.finfo(torch.float32).eps * strategies.random_tensor((400, 300), 3).sign())).to(dtype)
    two_ways.assert_same_in_another_order(nearly, one, dtype)
    with pytest.raises(AssertionError, match=r"distance .* allowed"):
        two_ways.assert_same_in_another_order(one, other, dtype)
    for check, share in ((two_ways.assert_same_by_another_way, 1.0), (two_ways.assert_same_in_another_order, 0.5)):
        with pytest.raises(AssertionError, match=r"distance .* allowed"):
            check(one.float() * (1 + share * eps), one, dtype)
        wrong = one.clone()
        wrong[7] = torch.nan
        with pytest.raises(AssertionError, match="distance nan"):
            check(wrong, one, dtype)
        with pytest.raises(AssertionError, match=r"expected shape \[400, 300\], got \[300\]"):
            check(one[0], one, dtype)


@pytest.mark.parametrize("size", [1e-290, 1e-250, 1e-160, 1e150])
def test_the_rule_allows_rounding_of_tiny_and_huge_numbers(size):
    # Squares of such numbers are 0 or infinite.
    for number in (48, 49, 59, 67):
        query, key, value = (strategies.random_tensor((1, 1, 2, 128), 4 * number + i, torch.float64) for i in range(3))
        key_bias = torch.randn(1, 1, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        assert_matches_reference(AttentionCase(query * size, key, value, key_bias=key_bias))


def test_one_wrong_row_among_many_is_seen():
    """Rows are as large as means over all keys so far, as of causal attention to keys that are all alike: the last ones are small."""
    heads, length = 16, 4096
    values = strategies.random_tensor((1, heads, length, 32), 0, torch.float64)
    exact = values.cumsum(2) / torch.arange(1, length + 1)[:, None]
    right = exact.bfloat16()
    for row in ((0, 3, length - 1), (0, 15, 2000), (0, 7, 3000)):
        for wrong in (0.0, right[0, row[1] - 1, row[2]]):
            result = right.clone()
            result[row] = wrong
            with pytest.raises(AssertionError, match=rf"row {re.escape(str(list(row)))}: distance .* 1 of 65536 rows"):
                two_ways.assert_same_by_another_way(result, right, torch.bfloat16)
    two_ways.assert_same_by_another_way(exact.float(), right, torch.bfloat16)
    for few in (right[0, 0, 0], right[0, 0, :1], right[:, :, :0], right[..., 0], right[0, 0, 0, 0]):
        two_ways.assert_same_by_another_way(few.float(), few, torch.bfloat16)


@pytest.mark.parametrize("check", [two_ways.assert_same_sums_by_another_way, two_ways.assert_same_lse_by_another_way])
@pytest.mark.parametrize("place", [(0, 0, 0), (0, 3, 19999), (0, 2, 7000)])
def test_one_wrong_number_among_many_is_seen(check, place):
    """A norm hides it, of all numbers and of a head's."""
    right = strategies.random_tensor((1, 4, 20000), 0)
    right[place] = 1.0
    for wrong in (0.0, 2.0, torch.nan):
        result = right.clone()
        result[place] = wrong
        with pytest.raises(AssertionError, match="distance"):
            check(result, right, torch.bfloat16)
    if check is two_ways.assert_same_sums_by_another_way:  # what rows alone would say
        result[place] = 1.5
        two_ways.assert_same_by_another_way(result, right, torch.bfloat16)
        with pytest.raises(AssertionError, match=rf"row {re.escape(str([*place]))}: .* 1 of 80000 rows"):
            check(result, right, torch.bfloat16)
    check(right * (1 + 4 * torch.finfo(torch.float32).eps), right, torch.bfloat16)


@settings(max_examples=15)
@given(case=attention_cases())
def test_the_reference_meets_its_own_rule(case):
    results = run_reference(case)
    assert set(results) == {"out", "lse", *(f"grad_{name}" for name in case.leaves())}
    assert_close_to_reference(case, results)


def test_the_reference_is_torchs_attention():
    query, key, value = (strategies.random_tensor((2, 3, 40, 16), i, torch.float64) for i in range(3))
    out, lse = reference_attention(query, key, value, is_causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    logits = (query @ key.mT / 4).masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), -torch.inf)
    two_ways.assert_same_in_another_order(out, expected, torch.float64)
    two_ways.assert_same_in_another_order(lse, logits.logsumexp(-1), torch.float64)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc's malloc")
@pytest.mark.parametrize("length", [1, 100, 10_000, 300_000])
def test_poisoned_memory_reaches_what_a_stable_abi_library_allocates(length):
    """The allocation function that the ops call, called the same way."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    handle, pointer = ctypes.c_void_p(), ctypes.c_void_p()
    one = ctypes.c_int64 * 1
    float32 = 6  # torch's number of the dtype
    with poisoned_memory():
        status = library.aoti_torch_empty_strided(ctypes.c_int64(1), one(length), one(1), float32, 0, 0, ctypes.byref(handle))
    assert status == 0
    library.aoti_torch_get_data_ptr(handle, ctypes.byref(pointer))
    given_memory = (ctypes.c_float * length).from_address(pointer.value)
    everything_is_nan = all(math.isnan(number) for number in given_memory)
    library.aoti_torch_delete_tensor_object(handle)
    if not everything_is_nan and "asan" in str(dmattn.library_path()):
        pytest.skip("under AddressSanitizer malloc fills by itself")
    assert everything_is_nan


def test_same_bits_means_bits():
    a = run(CASES[torch.float32])
    b = dict(a) | {"out": torch.nextafter(a["out"], torch.tensor(9.0))}
    assert_same_bits(a, dict(a))
    with pytest.raises(AssertionError, match="out: expected bitwise equal"):
        assert_same_bits(a, b)
    numbers = torch.tensor([0.0, torch.finfo(torch.float32).max, 1.0])
    for bad in (math.nan, math.inf):
        others = torch.tensor([bad, bad, 1.0])
        assert_same_bits({"out": others}, {"out": others.clone()})
        for at in (0, 1):
            with pytest.raises(AssertionError, match="out: expected bitwise equal"):
                assert_same_bits({"out": numbers[at]}, {"out": others[at]})


@pytest.mark.parametrize(
    "reached",
    [
        lambda s: s.Sq == 0, lambda s: s.Sk == 0, lambda s: s.Sq > s.Sk > 0, lambda s: s.Sk > s.Sq > 0, lambda s: s.Sk % 32 > 0,
        lambda s: s.Hkv == 1 < s.H, lambda s: 1 < s.Hkv < s.H, lambda s: s.Dv != s.D, lambda s: s.D == 256,
    ],
)  # fmt: skip
def test_shapes_reach(reached):
    find(shapes(), reached, settings=settings(max_examples=2000, database=None))


@pytest.mark.parametrize("kind", strategies.MASK_KINDS)
def test_masks_reach(kind):
    shape = strategies.Shape(2, 4, 2, 20, 30, 8, 8)
    found = find(masks(shape), lambda drawn: kind in drawn.kinds, settings=settings(max_examples=2000, database=None))
    assert isinstance(found, DrawnMask)


@pytest.mark.parametrize(
    ("header", "named"),
    [("cpp/cpu/limits.h", strategies.CPU_THRESHOLDS), ("cpp/cuda/sizes.h", strategies.CUDA_THRESHOLDS)],
    ids=["cpu", "cuda"],
)
def test_thresholds_are_those_of_the_kernels(header, named):
    """The headers and the strategies name the same lengths; on the CPU, all that there are."""
    path = Path(__file__).parents[2] / header
    constants = {"kMaxWidth": None, "kListHeads": None}  # no lengths
    for name, value in re.findall(r"^(?:inline )?constexpr \w+ (k\w+) = ([\w* ]+);", path.read_text(), re.M):
        product = 1
        for factor in value.split(" * "):
            product *= int(factor) if factor.isdigit() else constants[factor]
        constants.setdefault(name, product)
    assert {name: constants[name] for name in named} == named
    if "cpu" in header:
        assert set(constants) - set(named) == {"kMaxWidth", "kListHeads"}
    for threshold in named.values():
        assert {threshold - 1, threshold, threshold + 1} <= set(strategies.edge_lengths())


@given(strategies.shapes(max_length=60, max_pairs=400))
def test_shapes_keep_to_the_pairs_that_are_allowed(shape):
    assert shape.B * shape.H * shape.Sq * shape.Sk <= 400


# Features, and functions with fewer arguments ------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(features=st.sets(st.sampled_from(FEATURES)), data=st.data())
def test_a_case_has_only_the_features_that_are_allowed(features, data):
    case = data.draw(attention_cases(max_length=20, features=features))
    assert features_in(case) <= features
    assert_close_to_reference(case, run_reference(case, differentiated=False))


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_is_reached_alone(feature):
    others = {"empty_lengths": {"blind_queries"}, "blind_queries": {"interval_mask"}, "expanded_biases": {"key_bias"}}
    needed = others.get(feature, set())
    cases = attention_cases(max_length=20, dtype=torch.float32, features={feature} | needed)
    found = settings(max_examples=500, database=None, phases=[Phase.generate])
    find(cases, lambda case: feature in features_in(case), settings=found)


def test_features_that_are_none_are_refused():
    with pytest.raises(ValueError, match=r"features: expected names of grouped_heads, .*, got alibi, rope"):
        strategies.checked({"alibi", "rope", "bias"})
    with pytest.raises(TypeError, match=r"expected several names .* got the string 'bias'"):
        strategies.checked("bias")
    assert strategies.checked(None) == set(FEATURES)
    assert strategies.checked(()) == set()


def torch_attention(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    if is_causal and attn_mask is not None:
        attn_mask, is_causal = attn_mask & torch.ones(attn_mask.shape[-2:], dtype=torch.bool).tril(), False
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, **options)


SDPA_FEATURES = features_of(torch_attention) - {"blind_queries", "different_lengths"}


def test_one_blind_query_makes_a_case_with_blind_queries():
    query = torch.zeros(1, 1, 3, 8)
    for queries, is_blind in ((3, False), (2, True)):
        visible = torch.ones(1, 1, 3, 3, dtype=torch.bool)
        visible[:, :, queries:] = False
        assert ("blind_queries" in features_in(AttentionCase(query, query, query, visible=visible))) == is_blind


def test_features_are_those_of_the_arguments():
    general = {
        "grouped_heads",
        "different_lengths",
        "empty_lengths",
        "value_size",
        "strides",
        "gradient_strides",
        "blind_queries",
    }
    boolean = {"interval_mask", "block_mask", "index_mask", "combined_mask", "bool_mask"}
    assert features_of(lambda q, k, v: q) == general
    assert features_of(lambda q, k, v, attn_mask: q) == general | boolean | {"is_causal"}
    assert features_of(torch_attention) == general | boolean | {"is_causal", "scale"}
    assert features_of(dmattn.attention) == set(FEATURES)


def test_one_tensor_in_another_order_has_strides():
    tensors = [torch.zeros(1, 2, 3, 8) for _ in range(3)]
    assert not PREDICATES["strides"](AttentionCase(*tensors))
    tensors[1] = torch.zeros(1, 2, 8, 3).transpose(2, 3)
    assert PREDICATES["strides"](AttentionCase(*tensors))


@settings(max_examples=15)
@given(case=attention_cases(max_length=60, dtype=torch.float32, features=SDPA_FEATURES - {"scale"}))
def test_torchs_attention_matches(case):
    assert_function_matches(case, torch_attention)


@settings(max_examples=15)
@given(case=attention_cases(max_length=60))
def test_our_attention_matches_as_a_function(case):
    def attention(
        query, key, value, mask, key_bias, bias, sinks, query_offset, *, is_causal, scale, softcap, dropout_p, dropout_seed, deterministic
    ):  # fmt: skip
        return dmattn.attention(
            query, key, value, mask, key_bias=key_bias, bias=bias, is_causal=is_causal, scale=scale, softcap=softcap,
            dropout_p=dropout_p, dropout_seed=dropout_seed, deterministic=deterministic, sinks=sinks, query_offset=query_offset,
        )  # fmt: skip

    results = assert_function_matches(case, attention)
    assert set(results) == {"out"} | {f"grad_{name}" for name in case.leaves()}


def test_a_causal_mask_comes_with_the_bools_where_a_function_has_no_other_argument_for_it():
    def attention(query, key, value, attn_mask):
        return dmattn.attention(query, key, value, attn_mask)

    assert_function_matches(CASES[torch.float32], attention)
    with pytest.raises(AssertionError, match=r"out\[.*allowed"):
        assert_function_matches(CASES[torch.float32], lambda query, key, value, attn_mask: dmattn.attention(query, key, value))
    with pytest.raises(AssertionError, match=r"grad_key\[.*allowed"):
        assert_function_matches(
            CASES[torch.float32], lambda query, key, value, attn_mask: attention(query, 2 * key - key.detach(), value, attn_mask)
        )


def test_a_case_that_needs_an_argument_the_function_does_not_take_is_an_error():
    message = r"fn: expected arguments for is_causal, got a function of \(scale\): draw cases by attention_cases\(features=features_of\(fn\)\)"
    with pytest.raises(TypeError, match=message):
        assert_function_matches(CASES[torch.float32], lambda query, key, value, scale: query)


def test_an_output_of_another_dtype_is_found():
    case = AttentionCase(*(strategies.random_tensor((1, 1, 6, 8), i, torch.bfloat16) for i in range(3)))
    with pytest.raises(AssertionError, match=r"out: expected torch\.bfloat16, got torch\.float32"):
        assert_function_matches(case, lambda q, k, v: dmattn.attention(q, k, v).float(), gradients=False)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda q, k, v: (q, None), r"out: expected one torch\.Tensor, got tuple"),
        (lambda q, k, v: q[:, :, :3], r"out: expected \[B, H, Sq, Dv\] = \[1, 1, 6, 8\], got \[1, 1, 3, 8\]"),
        (lambda q, k, v: dmattn.attention(q, k, v).detach(), "out: expected one with gradients, got none; gradients=False"),
        (lambda q, k, v: dmattn.attention(q, k.detach(), v), r"grad_key\[.*allowed"),
    ],
    ids=["a tuple", "another shape", "no gradient", "no gradient of one input"],
)
def test_an_output_that_cannot_be_compared_is_named(wrong, message):
    case = AttentionCase(*(strategies.random_tensor((1, 1, 6, 8), i) for i in range(3)))
    with pytest.raises(AssertionError, match=message):
        assert_function_matches(case, wrong)


@pytest.mark.parametrize("fn", [torch.nn.functional.scaled_dot_product_attention, None])
def test_what_has_no_named_arguments_is_an_error(fn):
    with pytest.raises(TypeError, match="fn: expected a function of Python, whose arguments have names, got"):
        features_of(fn)
