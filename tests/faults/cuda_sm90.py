"""Faults."""

from faults import Fault

FAULTS: list[Fault] = []
