"""A pytest plugin that writes how long each test takes, whether it passes, and which functions of dmattn it executes (Python 3.12 and later).

DMATTN_EXECUTED is the JSON file: name of the test -> [seconds, outcome, ["python/dmattn/file.py:function", ...]].
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import types
from collections.abc import Generator

import pytest

_tests: dict[str, list[object]] = {}
_functions: set[str] = set()


def _record(code: types.CodeType, _: int) -> object:
    """Adds a function that begins. It is asked for once per test."""
    if "/dmattn/" in code.co_filename:
        name = re.sub(r"\.?<\w+>", "", code.co_qualname)
        _functions.add(f"python/dmattn/{code.co_filename.rpartition('/dmattn/')[2]}:{name}")
    return sys.monitoring.DISABLE


if sys.version_info >= (3, 12):
    sys.monitoring.use_tool_id(4, "executed")
    sys.monitoring.register_callback(4, sys.monitoring.events.PY_START, _record)
    sys.monitoring.set_events(4, sys.monitoring.events.PY_START)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _functions.clear()
    if sys.version_info >= (3, 12):
        sys.monitoring.restart_events()
    began = time.monotonic()
    result = yield
    _, outcome, _ = _tests.get(item.nodeid, [0, "passed", []])
    _tests[item.nodeid] = [round(time.monotonic() - began, 2), outcome, sorted(_functions)]
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.passed:
        _tests[report.nodeid] = [0, report.outcome, []]


def pytest_sessionfinish() -> None:
    with open(os.environ["DMATTN_EXECUTED"], "w") as file:
        json.dump(_tests, file)
