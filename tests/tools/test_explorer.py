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
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium")
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


def shown_by(settings: dict, tmp_path: Path, act: str = "") -> dict:
    """What the page knows of its picture after the script ``act``, which finds the picture as ``canvas``."""
    page, script = tmp_path / "page.html", f"<script>const canvas = document.querySelector('canvas'); {act}</script>"
    page.write_text(f'<html><body><div id="mask-explorer"></div><script src="{SCRIPT.as_uri()}"></script>{script}</body></html>')
    address = page.as_uri() + "#" + "&".join(f"{name}={value}" for name, value in settings.items())
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}", "--dump-dom")
    dumped = subprocess.run([BROWSER, *options, address], capture_output=True, text=True, timeout=120).stdout
    found = re.search(r'<pre id="mask-explorer-data"[^>]*>(.*?)</pre>', dumped, re.DOTALL)
    assert found is not None, dumped[-2000:]
    said = re.search(r'aria-valuetext="(.*?)"', dumped)
    return {**json.loads(html.unescape(found[1])), "said": said and said[1]}


@needs_browser
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings["kind"])
def test_the_explorer_shows_what_masks_show(settings, tmp_path):
    shown = shown_by(settings, tmp_path)
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


@needs_browser
@pytest.mark.parametrize(
    ("act", "query"),
    [
        ("for (const key of ['ArrowUp', 'ArrowUp', 'ArrowDown', 'x']) press(key);", 18),
        ("press('PageUp'); press('PageUp'); press('PageUp');", 0),
        ("press('Home'); press('ArrowDown');", 1),
        ("press('Home'); press('End'); press('PageDown');", 19),
        ("press('Home'); press('Escape');", 19),
        ("point('pointerdown', 'touch', 7);", 7),
        ("point('pointermove', 'touch', 3); point('pointerleave', 'touch', 9);", 3),
        ("point('pointermove', 'mouse', 3); point('pointerleave', 'mouse', 9);", 19),
        ("point('pointermove', 'mouse', 99);", 19),
    ],
    ids=["arrows", "a tile back", "first", "last", "escape", "tap", "drag", "mouse leaves", "below"],
)
def test_keys_and_fingers_choose_a_query(act, query, tmp_path):
    tools = """
        const press = (key) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key }));
        const point = (kind, pointerType, query) => {
          const box = canvas.getBoundingClientRect(), clientY = box.top + (query + 0.5) / 20 * box.height;
          canvas.dispatchEvent(new PointerEvent(kind, { pointerType, clientX: box.left + 1, clientY }));
        };
        canvas.focus();
        if (document.activeElement !== canvas) throw new Error("the picture takes no focus");
    """
    settings = {"kind": "window", "n": 20, "local": 3, "sinks": 2}
    shown = shown_by(settings, tmp_path, tools + act)
    assert shown["query"] == query
    assert shown["said"] == f"query {query} sees {int(visible(**settings)[query].sum())} keys"
