"""Every instruction set the CPU kernels are built for gives right results; DMATTN_CPU_LEVEL picks one, a wrong name is refused."""

from __future__ import annotations

import re

import dmattn
import pytest

NEEDS = {"baseline": (), "avx2": ("avx2", "fma", "f16c"), "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl")}

PROGRAM = """
from hypothesis import given, settings, strategies as st
from dmattn.testing import AttentionCase, assert_matches_reference, attention_cases, strategies
@given(attention_cases())
@settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(__import__("hypothesis").HealthCheck))
def drawn(case):
    assert_matches_reference(case)
drawn()
for dtype in strategies.CPU_DTYPES:
    for size in (8, 24, 64, 136):
        tensors = [strategies.random_tensor((1, 4, 150, size), i, dtype) for i in range(3)]
        assert_matches_reference(AttentionCase(*tensors, is_causal=True))
print("right")
"""


def cpu_flags() -> set[str]:
    with open("/proc/cpuinfo") as file:
        return next((set(line.split()) for line in file if line.startswith("flags")), set())


def levels() -> list[str]:
    return re.split(r"[;, ]+", dmattn.build_info()["cpu_levels"])


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
