"""Says what became slower from one result to another by more than noise, and what is missing in the second."""

from __future__ import annotations

import dataclasses
import math
import statistics

from dmattn.bench.records import OURS, BadResultError, Measurement, Result, measurements

SIGMAS = 3.0
MEDIAN_OF_NORMAL = math.sqrt(math.pi / 2)  # standard error of a median over that of a mean, for normal samples


@dataclasses.dataclass(frozen=True)
class Change:
    """One measurement in both results; ratio is new / old of the medians, noise the ratio that chance could make."""

    old: Measurement
    new: Measurement
    ratio: float
    noise: float

    @property
    def line(self) -> str:
        words = f"{self.old.case}: {self.old.who}, {self.old.what}"
        times = " -> ".join(f"{median(found) * 1e3:.4g} ms" for found in (self.old, self.new))
        return f"{words}: {times} ({self.ratio - 1:+.1%}, noise {self.noise - 1:.1%})"


def median(found: Measurement) -> float:
    return statistics.median(found.samples)


def standard_error(found: Measurement) -> float:
    """Of the median, from the spread of the samples; 0 for one sample."""
    if len(found.samples) < 2:
        return 0.0
    return MEDIAN_OF_NORMAL * statistics.stdev(found.samples) / math.sqrt(len(found.samples))


def compared(old: Result, new: Result, least: float, with_peers: bool = False) -> tuple[list[Change], list[Change], list[str]]:
    """What became slower, what became faster, and what only the old result has.

    A time has changed when the medians differ by the part ``least`` of the old one, and by three standard errors of their difference.

    Raises:
        BadResultError: they have no measurement in common.
    """
    wanted = [{found.key: found for found in measurements(result) if with_peers or found.who == OURS} for result in (old, new)]
    slower, faster = [], []
    for key in wanted[0].keys() & wanted[1].keys():
        before, after = wanted[0][key], wanted[1][key]
        spread = SIGMAS * math.hypot(standard_error(before), standard_error(after))
        noise = max(least, spread / median(before))
        change = Change(before, after, median(after) / median(before), 1 + noise)
        if change.ratio - 1 > noise:
            slower.append(change)
        elif 1 - change.ratio > noise:
            faster.append(change)
    if not wanted[0].keys() & wanted[1].keys():
        raise BadResultError("the two results have no measurement in common: expected results of the same workloads")
    missing = sorted(", ".join(filter(None, key)) for key in wanted[0].keys() - wanted[1].keys())
    return sorted(slower, key=lambda c: -c.ratio), sorted(faster, key=lambda c: c.ratio), missing


def text(old: Result, new: Result, least: float, with_peers: bool = False, allow_missing: bool = False) -> tuple[str, bool]:
    """A report in words, and whether anything became slower or, unless that is allowed, is missing in the new result."""
    slower, faster, missing = compared(old, new, least, with_peers)
    lines = []
    for what in ("machine", "torch", "cuda"):
        names = [str(result.get(what, {}).get("name") if what == "machine" else result.get(what)) for result in (old, new)]
        if names[0] != names[1]:
            lines.append(f"note: not the same {what}: {names[0]} and {names[1]}")
    for title, changes in (("slower", slower), ("faster", faster)):
        lines.append(f"{len(changes)} {title} beyond noise" + (":" if changes else "."))
        lines += [f"  {change.line}" for change in changes]
    if missing:
        lines.append(f"{len(missing)} missing in the second result:")
        lines += [f"  {name}" for name in missing]
    return "\n".join(lines), bool(slower or (missing and not allow_missing))
