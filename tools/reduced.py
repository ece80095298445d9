"""A pytest plugin for builds that hold some kernel instances only: draws what they take, and skips a test that needs another one.

DMATTN_REDUCED=bfloat16:64 says which dtype and which largest head size the build has. A drawn example that fails ends its test: nobody
wants to see a smaller one.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import hypothesis
import pytest
import torch
from dmattn.testing import strategies
from hypothesis import strategies as st

_dtype, _size = os.environ["DMATTN_REDUCED"].split(":")
_largest = int(_size)


def _head_dims() -> st.SearchStrategy[int]:
    return st.integers(1, _largest // 8).map(lambda n: 8 * n)


strategies.CUDA_DTYPES = (getattr(torch, _dtype),)
strategies.head_dims = _head_dims


def pytest_sessionstart() -> None:
    """After ``conftest`` has chosen its profile, and before a test is read."""
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("unshrunk", hypothesis.settings.default, phases=phases)
    hypothesis.settings.load_profile("unshrunk")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except RuntimeError as error:
        if "no kernel for head sizes" in str(error):
            pytest.skip("this build has no instance for it")
        raise
