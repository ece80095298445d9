"""Faults to plant, as data: what is wrong where, and which tests should find it. ``tools/planted_faults.py`` plants them."""

from __future__ import annotations

import dataclasses

KINDS = ("python", "cpu", "cuda_common", "cuda_sm80", "cuda_sm90")


@dataclasses.dataclass(frozen=True)
class Fault:
    """One textual edit that makes the library wrong.

    Args:
        kind: one of KINDS: what has to be built, and where it runs.
        file: path in the repository.
        old: text that occurs exactly once in the file.
        new: what it becomes.
        wrong: what is wrong then, in one line.
        tests: pytest node ids below tests/ that should fail, separated by blanks.
        objects: of C++ and CUDA faults: which object files are built again, as a glob, or several separated by blanks; the rest stay
            as they are. Default: those of the instruction set that runs here, or of every CUDA instance that includes the file.
        environment: NAME=value for the tests, separated by blanks.
        harmless: a proof that no result changes. Such a fault is listed, not planted and not counted.
        size: of CUDA faults: the head size of the kernel instances that are built and tested, 64, 128 or 256.
    """

    kind: str
    file: str
    old: str
    new: str
    wrong: str
    tests: str = ""
    objects: str = ""
    environment: str = ""
    harmless: str = ""
    size: int = 64

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        assert bool(self.tests) != bool(self.harmless), f"{self.wrong}: expected tests, or a proof that it is harmless"

    def __str__(self) -> str:
        return f"{self.file.removeprefix('python/dmattn/').removeprefix('cpp/')}: {self.wrong}"


def all_faults() -> list[Fault]:
    """Every fault of every table."""
    from faults import cpu, cuda_common, cuda_sm80, cuda_sm90, python

    return [*python.FAULTS, *cpu.FAULTS, *cuda_common.FAULTS, *cuda_sm80.FAULTS, *cuda_sm90.FAULTS]
