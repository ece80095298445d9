"""The tests' own tools: the rule rejects small errors, memory really is poisoned, strategies reach what they promise."""

from __future__ import annotations

import ctypes
import inspect
import math
import re
from pathlib import Path

import dmattn
import pytest
import torch
from dmattn.testing import (
    AttentionCase,
    assert_close_to_reference,
    assert_matches_reference,
    assert_same_bits,
    attention_cases,
    masks,
    poisoned_memory,
    run,
    run_reference,
    shapes,
    strategies,
    tolerance,
)
from hypothesis import find, given, settings

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


def test_the_rule_rejects_a_single_dropped_key():
    def forgets_a_key(query, key, value, mask, **options):
        hidden = torch.arange(60) != 13
        return dmattn.attention(query, key, value, hidden, **options)

    with pytest.raises(AssertionError):
        assert_matches_reference(CASES[torch.bfloat16], forgets_a_key)


def test_the_rule_has_nothing_to_turn():
    assert list(inspect.signature(assert_close_to_reference).parameters) == ["case", "results"]
    assert list(inspect.signature(assert_matches_reference).parameters) == ["case", "fn", "gradients"]
    for check in (tolerance.assert_same_by_another_way, tolerance.assert_same_in_another_order):
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
    tolerance.assert_same_by_another_way(one, other, dtype)
    nearly = (one.float() * (1 + 50 * torch.finfo(torch.float32).eps * strategies.random_tensor((400, 300), 3).sign())).to(dtype)
    tolerance.assert_same_in_another_order(nearly, one, dtype)
    with pytest.raises(AssertionError, match=r"distance .* allowed"):
        tolerance.assert_same_in_another_order(one, other, dtype)
    for check, share in ((tolerance.assert_same_by_another_way, 1.0), (tolerance.assert_same_in_another_order, 0.5)):
        with pytest.raises(AssertionError, match=r"distance .* allowed"):
            check(one.float() * (1 + share * eps), one, dtype)
        wrong = one.clone()
        wrong[7] = torch.nan
        with pytest.raises(AssertionError, match="distance nan"):
            check(wrong, one, dtype)
        with pytest.raises(AssertionError, match=r"expected shape \[400, 300\], got \[300\]"):
            check(one[0], one, dtype)


@settings(max_examples=15)
@given(case=attention_cases())
def test_the_reference_meets_its_own_rule(case):
    assert_close_to_reference(case, run_reference(case))


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
    find(masks(shape), lambda drawn: kind in drawn.kinds, settings=settings(max_examples=2000, database=None))


def test_a_case_prints_in_one_line():
    assert repr(CASES[torch.float32]).startswith("AttentionCase(query=float32[1, 2, 60, 16], key=float32")
    assert "\n" not in repr(CASES[torch.float32])


@pytest.mark.parametrize(
    ("header", "named"),
    [("cpp/cpu/limits.h", strategies.CPU_THRESHOLDS), ("cpp/cuda/live_keys.h", strategies.CUDA_THRESHOLDS)],
    ids=["cpu", "cuda"],
)
def test_thresholds_are_those_of_the_kernels(header, named):
    """The headers and the strategies name the same lengths; on the CPU, all that there are."""
    path = Path(__file__).parent.parent / header
    constants = {"kMaxWidth": None}  # a width, not a length
    for name, value in re.findall(r"^(?:inline )?constexpr \w+ (k\w+) = ([\w* ]+);", path.read_text(), re.M):
        product = 1
        for factor in value.split(" * "):
            product *= int(factor) if factor.isdigit() else constants[factor]
        constants.setdefault(name, product)
    assert {name: constants[name] for name in named} == named
    if "cpu" in header:
        assert set(constants) - set(named) == {"kMaxWidth"}
    for threshold in named.values():
        assert {threshold - 1, threshold, threshold + 1} <= set(strategies.edge_lengths())


@pytest.mark.parametrize("length", [257, 769, 1025])
def test_longer_cases_reach(length):
    found = find(
        shapes(max_length=1100, max_pairs=100_000), lambda s: length in (s.Sq, s.Sk) and min(s.Sq, s.Sk) > 40,
        settings=settings(max_examples=2000, database=None),
    )  # fmt: skip
    assert found.B * found.H * found.Sq * found.Sk <= 110_000
