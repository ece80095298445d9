"""Which tests run: the marker ``gpu``, and DMATTN_SHARD=1/4, which runs the first of four parts of those selected.

A test that takes the fixture ``device`` runs on a GPU when there is one, and carries the marker then. Another that needs a GPU is marked
by hand. Forgetting that cannot pass unseen: without the marker it is not skipped where there is no GPU, and fails there.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Generator, Sequence

import pytest
from devices import DEVICE


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
    for item in items:
        if DEVICE == "cuda" and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)
        if DEVICE != "cuda" and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU that this build has kernels for"))
    result = yield  # -m and -k choose
    mine = set(in_shard([item.nodeid for item in items], os.environ.get("DMATTN_SHARD", "1/1")))
    left_out = [item for item in items if item.nodeid not in mine]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in mine]
    return result


def in_shard(names: Sequence[str], shard: str) -> list[str]:
    """The names of one shard, K/N: dealt in an order without meaning, so that neighbours, which take equally long, are spread.

    Raises:
        pytest.UsageError: not two whole numbers with 1 <= K <= N.
    """
    part, _, parts = shard.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"DMATTN_SHARD: expected K/N with 1 <= K <= N, got {shard}")
    return sorted(names, key=lambda name: (zlib.crc32(name.encode()), name))[int(part) - 1 :: int(parts)]
