"""Every instruction set the CPU kernels are built for gives right results; DMATTN_CPU_LEVEL picks one, a wrong name is refused."""

from __future__ import annotations

import re

import dmattn
import pytest

NEEDS = {"baseline": (), "avx2": ("avx2", "fma", "f16c"), "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl")}

PROGRAM = """
import dataclasses
import test_rounding
from dmattn import BlockMask, IntervalMask
from dmattn.testing import AttentionCase, assert_matches_reference, attention_cases, strategies
from hypothesis import HealthCheck, given, settings

options = dict(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(attention_cases())
@settings(max_examples=35, **options)
def drawn(case):
    assert_matches_reference(case)
@given(attention_cases(max_length=1100, max_pairs=100_000))
@settings(max_examples=15, **options)
def drawn_longer(case):
    assert_matches_reference(case)
def tensors(dtype, Sq, Sk, size, heads=(4, 2)):
    shapes = ((1, heads[0], Sq, size), (1, heads[1], Sk, size), (1, heads[1], Sk, size))
    return [strategies.random_tensor(shape, i, dtype) for i, shape in enumerate(shapes)]
def masked():
    # Long enough for summaries of the mask, 64 keys an entry: each a vector's lane, some of them alone.
    for length in (257, 700):
        for seed in range(2):
            start = strategies.random_tensor((1, 2, length), seed).mul(400).int()
            end = start + strategies.random_tensor((1, 2, length), seed + 9).abs().mul(60).int()
            end[:, :, 64 * seed::192] = 2**31 - 1
            mask = IntervalMask(start, end)
            rows = tensors(strategies.torch.float32, length, length, 8)
            assert_matches_reference(AttentionCase(*rows, mask=mask, visible=mask.to_bool(length, length)))
        for key in range(0, length, 64):  # the one block that anybody sees
            end = strategies.torch.full((1, 2, length), -1000, dtype=strategies.torch.int32)
            end[:, key // 64 % 2, key] = 2**31 - 1
            start = strategies.torch.full_like(end, -1000)
            mask = IntervalMask(start, end)
            case = AttentionCase(*tensors(strategies.torch.float32, 257, length, 8), mask=mask, visible=mask.to_bool(257, length))
            assert_matches_reference(case, gradients=False)
drawn()
drawn_longer()
masked()
for dtype in strategies.CPU_DTYPES:
    for size in (8, 24, 64, 136):
        assert_matches_reference(AttentionCase(*tensors(dtype, 150, 150, size), is_causal=True))
for check in test_rounding.CHECKS:
    check()
print("right")
"""


def cpu_flags() -> set[str]:
    with open("/proc/cpuinfo") as file:
        return next((set(line.split()) for line in file if line.startswith("flags")), set())


def levels() -> list[str]:
    return re.split(r"[;, ]+", dmattn.build_info()["cpu_levels"])


@pytest.mark.long
@pytest.mark.parametrize("level", NEEDS)
def test_level(run_python, level):
    if level not in levels():
        pytest.skip(f"{level} kernels are not part of this build")
    missing = set(NEEDS[level]) - cpu_flags()
    if missing:
        pytest.skip(f"this processor lacks {', '.join(sorted(missing))}")
    finished = run_python("-c", PROGRAM, DMATTN_CPU_LEVEL=level)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "right\n"


def test_every_level_of_the_build_is_tested():
    assert set(levels()) <= set(NEEDS)


@pytest.mark.parametrize("name", ["sse9", "AVX2", "avx"])
def test_a_wrong_name_is_an_error_that_says_why(run_python, name):
    program = "import torch, dmattn; x = torch.zeros(1, 1, 4, 8); dmattn.attention(x, x, x)"
    finished = run_python("-c", program, DMATTN_CPU_LEVEL=name)
    assert finished.returncode != 0
    assert f"DMATTN_CPU_LEVEL: expected one of the levels `python -m dmattn` lists, got {name}" in finished.stderr


def test_a_level_the_processor_lacks_is_an_error_that_says_why(run_python):
    lacking = [level for level in levels() if set(NEEDS[level]) - cpu_flags()]
    if not lacking:
        pytest.skip("this processor has every level of the build")
    program = "import torch, dmattn; x = torch.zeros(1, 1, 4, 8); dmattn.attention(x, x, x)"
    finished = run_python("-c", program, DMATTN_CPU_LEVEL=lacking[0])
    assert finished.returncode != 0
    assert f"DMATTN_CPU_LEVEL={lacking[0]}, but this processor does not support it" in finished.stderr


@pytest.mark.long
def test_levels_agree_on_who_is_dropped(run_python):
    """Dropout is the same on every level, bit for bit: a row of weights shows who was kept."""
    program = """
import torch, dmattn
query, key = torch.zeros(1, 2, 100, 8), torch.zeros(1, 2, 64, 8)
value = torch.eye(64).expand(1, 2, 64, 64)
out = dmattn.attention(query, key, value, dropout_p=0.5, dropout_seed=torch.tensor([123456789012345]))
print(hash(tuple((out != 0).flatten().tolist())))
"""
    usable = [level for level in levels() if not set(NEEDS[level]) - cpu_flags()]
    outputs = {run_python("-c", program, DMATTN_CPU_LEVEL=level).stdout for level in usable}
    assert len(outputs) == 1
    assert outputs != {""}
