"""Tests with transformers run offline, silence what it warns of itself, and are left out where it is not installed."""

from __future__ import annotations

import importlib.util
import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_transformers*.py"]
# Parts of transformers, accelerate, Inductor and Dynamo warn of themselves.
IGNORED = [f"ignore::{kind}" for kind in ("DeprecationWarning", "FutureWarning", "UserWarning", "RuntimeWarning")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name.startswith("test_transformers"):
            item.add_marker(pytest.mark.filterwarnings(*IGNORED))


@pytest.fixture(autouse=True)
def says_errors_alone(request: pytest.FixtureRequest) -> None:
    if request.path.name.startswith("test_transformers"):
        importlib.import_module("transformers").logging.set_verbosity_error()
