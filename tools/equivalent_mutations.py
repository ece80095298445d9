"""Mutations that change no result, by name: the edit, and why nothing can find it. ``planted_faults.py`` records them and plants them not."""

from __future__ import annotations

EQUIVALENT: dict[str, tuple[str, str]] = {}
