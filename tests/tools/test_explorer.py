"""The mask explorer of the site, in a headless browser: it shows what dmattn's masks show, and counts what they count."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from dmattn import IndexMask, IntervalMask

SCRIPT = Path(__file__).parents[2] / "docs/_static/mask_explorer.js"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SETTINGS = [
    {"kind": "causal", "n": 13},
    {"kind": "window", "n": 40, "local": 5, "sinks": 3, "documents": 3},
    {"kind": "key", "n": 40, "window": 6, "local": 0, "sinks": 0, "seed": 3},
    {"kind": "key", "n": 64, "window": 5, "local": 4, "sinks": 2, "documents": 2, "seed": 7, "query": 20},
    {"kind": "lists", "n": 37, "window": 4, "local": 3, "sinks": 2, "documents": 2, "seed": 5},
]


def random_numbers(seed: int, count: int) -> torch.Tensor:
    numbers, x = [], seed
    for _ in range(count):
        x = (1664525 * x + 1013904223) % 2**32
        numbers.append(x / 2**32)
    return torch.tensor(numbers, dtype=torch.float64)


def visible(kind="key", n=40, window=6, local=4, sinks=2, documents=1, seed=1, query=-1) -> torch.Tensor:
    """[n, n] by dmattn's masks; the defaults are the page's."""
    size = -(-n // documents)
    base = IntervalMask.documents(n, ids=torch.arange(n) // size)
    streaming = IntervalMask.top_k(torch.zeros(1, 1, n), 0, base=base, local=local, sink_keys=sinks) if local + sinks else None
    if kind == "causal":
        mask = base
    elif kind == "window":
        mask = streaming
    elif kind == "key":
        mask = IntervalMask.top_k(random_numbers(seed, n).view(1, 1, n), window, base=base, local=local, sink_keys=sinks)
    else:
        pairs = random_numbers(seed, n * n).view(1, 1, n, n)
        mask = IndexMask.top_k(pairs, window, base=base, local=local, sink_keys=sinks) & base
    return mask.to_bool(n, n)[0, 0]


@pytest.mark.skipif(BROWSER is None, reason="no chromium")
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings["kind"])
def test_the_explorer_shows_what_masks_show(settings, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(f'<html><body><div id="mask-explorer"></div><script src="{SCRIPT.as_uri()}"></script></body></html>')
    address = page.as_uri() + "#" + "&".join(f"{name}={value}" for name, value in settings.items())
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'user'}",
        "--dump-dom",
        address,
    ]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    found = re.search(r'<pre id="mask-explorer-data"[^>]*>(.*?)</pre>', dumped, re.DOTALL)
    assert found is not None, dumped[-2000:]
    shown = json.loads(html.unescape(found[1]))
    bits = torch.tensor([[bit == "1" for bit in row] for row in shown["bits"]])
    wanted = visible(**settings)
    assert torch.equal(bits, wanted)
    n, query = settings["n"], settings.get("query", -1)
    assert shown["visible"] == int(wanted.sum())
    assert shown["dense"] == n * (n + 1) // 2
    starts = range(0, n, 8)
    assert shown["computed"] == sum(int(wanted[top : top + 8].any(0).sum()) * min(8, n - top) for top in starts)
    assert shown["tiles"] == sum(
        min(8, n - top) * min(8, n - left) for top in starts for left in starts if wanted[top : top + 8, left : left + 8].any()
    )
    last = query % n if query >= 0 else n - 1
    size = -(-n // settings.get("documents", 1))
    assert shown["cache"] == (last % size + 1 if settings["kind"] == "lists" else int(wanted[last].sum()))
