"""Which tests run: ``--quick``, the marker ``gpu``, and DMATTN_SHARD=1/4, which runs the first of four parts of those selected.

``--quick`` is what ``make test`` runs: every test function that is not marked ``slow`` or ``long``, with at most a few of its cases, or
all of them if it is marked ``brief``. So a new test is part of it, and many cases of one test do not make it long.

A test that takes the fixture ``device`` runs on a GPU when there is one, and carries the marker then. Another that needs a GPU is marked
by hand. Forgetting that cannot pass unseen: without the marker it is not skipped where there is no GPU, and fails there.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence

import pytest
from devices import DEVICE

# With --quick: cases of a test function, the marker of those that run all of theirs, and markers of those that do not run.
QUICK_CASES = 2
BRIEF = "brief"
NOT_QUICK = {"slow", "long"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help=f"at most {QUICK_CASES} cases of each test function, fewer random examples, and no test marked slow or long (make test)",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
    for item in items:
        if DEVICE == "cuda" and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)
        if DEVICE != "cuda" and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU that this build has kernels for"))
    result = yield  # -m and -k choose
    chosen = quick_set(items) if config.getoption("--quick") else items
    mine = set(in_shard([item.nodeid for item in chosen], os.environ.get("DMATTN_SHARD", "1/1")))
    left_out = [item for item in items if item.nodeid not in mine]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in mine]
    return result


def quick_set(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """At most QUICK_CASES of each test function without a marker of NOT_QUICK, and all cases of one that is BRIEF: cases that run before
    those that are skipped here."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not any(item.get_closest_marker(name) for name in NOT_QUICK):
            functions[item.nodeid if item.get_closest_marker(BRIEF) else item.nodeid.partition("[")[0]].append(item)
    return [case for cases in functions.values() for case in sorted(cases, key=quick_order)[:QUICK_CASES]]


def quick_order(item: pytest.Item) -> tuple[bool, int]:
    """By a hash of the name: neighbouring cases differ little, so the first ones would leave the last parameters out."""
    return item.get_closest_marker("skip") is not None, zlib.crc32(item.nodeid.encode())


def in_shard(names: Sequence[str], shard: str) -> list[str]:
    """The names of one shard, K/N: distributed in an order without meaning, so that neighbours, which take equally long, are spread.

    Raises:
        pytest.UsageError: not two whole numbers with 1 <= K <= N.
    """
    part, _, parts = shard.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"DMATTN_SHARD: expected K/N with 1 <= K <= N, got {shard}")
    return sorted(names, key=lambda name: (zlib.crc32(name.encode()), name))[int(part) - 1 :: int(parts)]
