"""The Python of README.md and pages under docs/ runs as printed, the README's tables are what the results give, and its files exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/masks.md", "docs/export.md"])
def test_python_blocks_run(page, tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)  # one of them writes a file
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    assert isinstance(names["out"], torch.Tensor)
    assert names["out"].isfinite().all()


def test_table_is_what_the_results_say():
    report = Path(__file__).parent.parent / "benchmarks" / "report.py"
    done = subprocess.run([sys.executable, str(report), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_named_files_exist():
    root = Path(__file__).parent.parent
    for name in re.findall(r"`((?:cpp|python|docs|examples|benchmarks|tests|cmake)/[\w./]*)`", README):
        assert (root / name).exists(), name
