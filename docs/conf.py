"""How Sphinx builds the site: pages are Markdown (MyST), the API reference comes from docstrings, the errors from the source, numbers from
benchmarks/results; any warning is an error (make docs)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import dmattn

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "docs"), str(ROOT / "benchmarks")]

import errors_of  # noqa: E402
from dmattn_bench import cited, report  # noqa: E402

project = "dmattn"
author = "the dmattn authors"
copyright = author
version = release = dmattn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "generated/*.md"]
html_theme = "furo"
html_title = "dmattn"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

autodoc_typehints = "none"  # the docstrings say shapes and dtypes, which say more
autodoc_member_order = "bysource"
napoleon_use_ivar = True
nitpicky = False

MOVED = {"explorer": "masks.html#try-one", "adding_an_op": "code.html#add-an-op"}


def with_numbers(app: Any, name: str, source: list[str]) -> None:
    """Every table and number as the committed results have it; one that is missing, or has no result behind it, fails the build."""
    if found := cited.unsourced(source[0]):
        raise ValueError(f"{name}: expected a result behind every measured number, got {', '.join(found)}")
    source[0] = cited.without_marks(report.rewritten(source[0], ROOT / report.RESULTS))


def redirect(app: Any, error: Exception | None) -> None:
    """Pages that were merged into others still open."""
    for name, target in MOVED.items():
        (Path(app.outdir) / f"{name}.html").write_text(f'<meta http-equiv="refresh" content="0; url={target}">\n')


def setup(app: Any) -> None:
    app.connect("builder-inited", lambda _: errors_of.write(ROOT / "docs/generated"))
    app.connect("source-read", with_numbers)
    app.connect("build-finished", redirect)
