"""The form of committed results: JSON with one row a line, so that a diff shows which measurement changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def to_json(result: Mapping[str, Any]) -> str:
    """JSON of ``result``: a line for each key, and for each element of a value that is a list of objects."""
    lines = []
    for key, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n  ".join(json.dumps(row) for row in value)
            lines.append(f"{json.dumps(key)}: [\n  {rows}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"
