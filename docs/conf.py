"""How Sphinx builds the site: pages are Markdown (MyST), the API reference comes from the docstrings, any warning is an error (make docs)."""

from __future__ import annotations

import dmattn

project = "dmattn"
author = "the dmattn authors"
copyright = author
version = release = dmattn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "dmattn"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

autodoc_typehints = "none"  # the docstrings say shapes and dtypes, which say more
autodoc_member_order = "bysource"
napoleon_use_ivar = True
nitpicky = False
