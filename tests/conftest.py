"""What all tests share: the device they run on, and how hard hypothesis tries (HYPOTHESIS_PROFILE=ci, nightly)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import dmattn
import hypothesis
import pytest
import torch
import torch._dynamo
import torch._inductor.config
from devices import DEVICE
from selection import pytest_addoption, pytest_collection_modifyitems  # noqa: F401  (hooks)

_slow_is_fine = [
    hypothesis.HealthCheck.too_slow,
    hypothesis.HealthCheck.data_too_large,
    hypothesis.HealthCheck.large_base_example,
]
# ci draws the same examples every time: a failure is about the change, not about luck.
hypothesis.settings.register_profile(
    "ci", max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=_slow_is_fine
)
hypothesis.settings.register_profile(
    "nightly", max_examples=5000, deadline=None, print_blob=True, suppress_health_check=_slow_is_fine
)
hypothesis.settings.register_profile("quick", hypothesis.settings.get_profile("ci"), max_examples=8)


# No programs from torch's caches: they have the guards of the run that compiled them, and some tests count compilations.
for _cache in ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE"):
    os.environ[_cache] = "0"
torch._inductor.config.fx_graph_cache = False
torch._functorch.config.enable_autograd_cache = False


def pytest_configure(config: pytest.Config) -> None:
    default = "quick" if config.getoption("--quick") else "ci"
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", default))


def pytest_runtest_setup() -> None:
    """No test sees what an earlier one compiled, nor the lengths that made its programs dynamic."""
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def device() -> str:
    """The device a test runs on. Who takes this fixture carries the marker ``gpu`` where it is a GPU (``selection``)."""
    return DEVICE


@pytest.fixture(scope="session")
def dtype(device: str) -> torch.dtype:
    """A dtype the device is at home in."""
    return torch.bfloat16 if device == "cuda" else torch.float32


@pytest.fixture(scope="session")
def exact(device: str) -> torch.dtype:
    """The dtype in which the device is as exact as it can be."""
    return torch.bfloat16 if device == "cuda" else torch.float64


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no ranks")),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]),
    ],
)
def device_ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Four processes on the CPU, over gloo; and one process on each of two GPUs, over NCCL."""
    from rank_pool import Ranks

    pool = Ranks(4 if request.param == "cpu" else 2, device=request.param)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def run_python(pytestconfig: pytest.Config) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program in a new process with the same dmattn and what tests share, for what a process decides once. Returns the process."""
    package_parent = os.path.dirname(os.path.dirname(dmattn.__file__))
    shared = [str(path) for path in pytestconfig.getini("pythonpath")]

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([package_parent, *shared, *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=600,
        )

    return run


@pytest.fixture
def short_warm_ups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Benchmarks warm up for no time, and leave as many threads as there were."""
    from dmattn_bench import measure

    monkeypatch.setattr(measure, "WARM_UP_SECONDS", 0.0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
