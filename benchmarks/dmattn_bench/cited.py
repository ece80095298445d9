"""Numbers in the sentences of pages, each read from a committed result, so that none can fall behind.

A page has ``<!-- n: FILE PATH | FORMAT -->NUMBER<!-- /n -->``, as in ``<!-- n: wheel_matrix.json rows[0].passed | int -->2,631<!-- /n -->``.
FILE lies in benchmarks/results. PATH is a chain of names, places ``[0]``, rows by a value ``[case=16384, window 819]``, ``.#``, a count, and
``.max(name)`` or ``.sum(name)`` over rows. Two paths with `` / `` between them are divided.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dmattn_bench.records import BadResultError
from dmattn_bench.tables import duration, ratio

PLACE = re.compile(r"<!-- n: (\S+) (.+?) \| (\w+) -->.*?<!-- /n -->", re.DOTALL)
STEP = re.compile(r"\[([^]=]+)=([^]]*)\]|\[(\d+)\]|\.(max|sum)\((\w+)\)|\.?([\w-]+|#)")
TABLE = re.compile(r"<!-- bench:([\w-]+) -->.*?<!-- /bench:\1 -->", re.DOTALL)
# Times, sizes in bytes, rates, shares and speedups, in digits or in words: "12 ms", "2 to 3 times", "1.5-2x", "9%", "twice", "five minutes".
NUMBER = r"(?<![\w.^/-])\d[\d,.]*"
WORD = r"\b(?:an?|one|two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|fifty|hundred|few|several|many)"
RANGE = r"(?:\s?(?:-|\u2013|to|or|and)\s?(?:a|\d[\d,.]*))*"
UNIT = (
    r"(?:[nuµm]s|s|sec(?:ond)?s?|min(?:ute)?s?|hours?|days?|[KMGT]i?B(?:/s)?|[KMGT]?FLOPs?(?:/s)?|percent|per cent|times|fold"
    r"|tokens(?:/s| (?:per|a) second)|bits per byte)(?!\w)"
)
MEASURED = re.compile(
    rf"{NUMBER}{RANGE}(?:\s?%(?!\w)|\s?[x\u00d7](?!\w|\s?\d)|[\s-]{UNIT})"
    rf"|{WORD}(?: (?:to|or) {WORD[2:]})?[\s-](?:minutes?|hours?|days?|percent|per cent|times)\b|{WORD[:2]}\w+fold\b"
    r"|\b(?:twice|thrice|doubles?|doubled|triples?|tripled|halves|halved|half as|orders? of magnitude)\b",
    re.IGNORECASE,
)
FORMATS: dict[str, Callable[[float], str]] = {
    "int": lambda value: f"{value:,.0f}",
    "x": ratio,
    "share": lambda value: f"{value:.2%}".replace("%", " %"),
    "seconds": duration,
    "ms": lambda value: duration(value / 1e3),
    "us": lambda value: duration(value / 1e6),
    "two": lambda value: f"{value:.2f}",
}


def rewritten(text: str, results: Path) -> str:
    """The text with every number as the results have it.

    Raises:
        BadResultError: a file, a path or a format that is not there, or a number at the head of a line, where Markdown would end the sentence.
    """
    if wrong := re.search(r"^ {0,3}<!-- n: .*", text, re.MULTILINE):
        raise BadResultError(f"{wrong[0]}: expected a word in front of a number, got the head of a line")
    return PLACE.sub(
        lambda found: f"<!-- n: {found[1]} {found[2]} | {found[3]} -->{number(*found.groups(), results=results)}<!-- /n -->", text
    )


def without_marks(text: str) -> str:
    """The text with numbers alone where they stand with what they were read from."""
    return re.sub(r"<!-- n: [^>]*? -->(.*?)<!-- /n -->", r"\1", text)


def unsourced(text: str) -> list[str]:
    """Measured numbers of a page that no result stands behind: whatever :data:`MEASURED` finds outside of tables, code and marks."""
    text = re.sub(r"<!-- n: .*?<!-- /n -->|```.*?```|`[^`\n]+`", " ", TABLE.sub(" ", text), flags=re.DOTALL)
    return MEASURED.findall(text)


def number(file: str, paths: str, form: str, *, results: Path) -> str:
    """Raises BadResultError: as :func:`rewritten`."""
    if not (results / file).is_file():
        raise BadResultError(f"n: expected a file in {results}, got {file}")
    if form not in FORMATS:
        raise BadResultError(f"n: expected one of {', '.join(FORMATS)}, got {form}")
    result = json.loads((results / file).read_text())
    above, *below = (value_at(result, path, file) for path in paths.split(" / "))
    return FORMATS[form](above / below[0] if below else above)


def value_at(result: Any, path: str, file: str) -> float:
    """Raises BadResultError: the path does not lead to one number."""
    at, value = 0, result
    while at < len(path):
        found = STEP.match(path, at)
        try:
            if found is None:
                raise LookupError
            key, wanted, place, fold, field, name = found.groups()
            if key is not None:
                (value,) = [row for row in value if str(row.get(key)) == wanted]
            elif fold is not None:
                fields = [row[field] for row in value]
                value = max(fields) if fold == "max" else sum(fields)
            else:
                value = value[int(place)] if place is not None else len(value) if name == "#" else value[name]
        except (LookupError, TypeError, ValueError, AttributeError):
            raise BadResultError(f"n: expected a number at {path} of {file}, got nothing from {path[at:]!r} on") from None
        at = found.end()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadResultError(f"n: expected a number at {path} of {file}, got {type(value).__name__}")
    return float(value)
