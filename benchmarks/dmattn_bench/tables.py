"""Markdown tables, and numbers as the tables and the terminal show them."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(titles: Sequence[str], lines: Sequence[Sequence[str]], texts: int) -> str:
    """A table; its first ``texts`` columns are words, the others numbers, which stand at the right."""
    rule = "|" + "---|" * texts + "---:|" * (len(titles) - texts)
    title, *rest = (f"| {' | '.join(cells)} |" for cells in (titles, *lines))
    return "\n".join([title, rule, *rest])


def duration(seconds: float) -> str:
    """Three digits, in the unit that suits."""
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms") if seconds >= 1e-3 else (seconds * 1e6, "us")
    return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"


def ratio(times: float) -> str:
    return f"{times:.2f}x" if times < 10 else f"{times:.1f}x"


def number(value: float | None) -> str:
    """Three digits, and all before the point."""
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plain_ratio(times: float) -> str:
    """Two digits are what can be relied on."""
    return f"{times:.0f}x" if times >= 10 else f"{times:.1f}x" if times >= 1 else f"{times:.2f}x"
