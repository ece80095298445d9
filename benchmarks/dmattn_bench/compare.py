"""Says what became slower from one result to another by more than noise, and what is missing in the second."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics

import torch

from dmattn_bench.records import OURS, BadResultError, Measurement, Result, measurements

FALSE_ALARMS = 0.01  # how often chance alone may make anything slower in a comparison of two results
FEWEST_SAMPLES = 3  # on either side; fewer do not say how much they spread
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


def has_enough(*pair: Measurement) -> bool:
    return min(len(found.samples) for found in pair) >= FEWEST_SAMPLES


@functools.lru_cache(maxsize=1000)
def t_quantile(tail: float, freedom: int) -> float:
    """What Student's t exceeds with this probability, from the integral of its density, where t = sqrt(freedom) / tan(angle)."""
    angle = torch.linspace(0, 1, 1 << 14, dtype=torch.float64) ** 2 * (math.pi / 2)
    beyond = torch.cumulative_trapezoid(angle.sin() ** (freedom - 1), angle)  # at the end for t > 0: half of all
    place = max(1, int(torch.searchsorted(beyond, 2 * tail * beyond[-1])))
    return math.sqrt(freedom) / math.tan(angle[place])


def chance(before: Measurement, after: Measurement, tail: float) -> float:
    """By how much the median grows by chance with this probability, if nothing changed: both spread alike, so their spreads are pooled."""
    counts = [len(found.samples) for found in (before, after)]
    squares = sum((len(found.samples) - 1) * statistics.variance(found.samples) for found in (before, after))
    freedom = sum(counts) - 2
    error = MEDIAN_OF_NORMAL * math.sqrt(squares / freedom * sum(1 / count for count in counts))
    return t_quantile(tail, freedom) * error


def compared(
    old: Result, new: Result, least: float, with_peers: bool = False
) -> tuple[list[Change], list[Change], list[str], list[str]]:
    """What became slower, what became faster, what only the old result has, and what has too few samples to tell.

    A time has changed when the medians differ by the part ``least`` of the old one, and by more than chance makes: where nothing changed,
    independent samples make anything slower in about one of a hundred comparisons of results, however many times these have.

    Raises:
        BadResultError: they have no measurement in common, or one of them has two of the same name.
    """
    wanted = [by_key([found for found in measurements(result) if with_peers or found.who == OURS]) for result in (old, new)]
    common = sorted(wanted[0].keys() & wanted[1].keys())
    pairs = {key: (wanted[0][key], wanted[1][key]) for key in common}
    told = [pair for pair in pairs.values() if has_enough(*pair)]
    few = [named(key) for key, pair in pairs.items() if not has_enough(*pair)]
    slower, faster = [], []
    for before, after in told:
        noise = max(least, chance(before, after, FALSE_ALARMS / len(told)) / median(before))
        change = Change(before, after, median(after) / median(before), 1 + noise)
        if change.ratio - 1 > noise:
            slower.append(change)
        elif 1 - change.ratio > noise:
            faster.append(change)
    if not common:
        raise BadResultError("the two results have no measurement in common: expected results of the same workloads")
    missing = [named(key) for key in sorted(wanted[0].keys() - wanted[1].keys())]
    return sorted(slower, key=lambda c: -c.ratio), sorted(faster, key=lambda c: c.ratio), missing, few


def by_key(found: list[Measurement]) -> dict[tuple[str, ...], Measurement]:
    """Raises BadResultError where two have the same key: a comparison would leave one of them out."""
    unique = {each.key: each for each in found}
    if len(unique) < len(found):
        twice = next(key for key in unique if sum(each.key == key for each in found) > 1)
        raise BadResultError(f"expected one measurement of each name in a result, got two of {named(twice)}")
    return unique


def named(key: tuple[str, ...]) -> str:
    return ", ".join(part for part in key if part.strip())


def text(old: Result, new: Result, least: float, with_peers: bool = False, allow_missing: bool = False) -> tuple[str, bool]:
    """A report in words, and whether anything became slower or, unless that is allowed, is missing in the new result."""
    slower, faster, missing, few = compared(old, new, least, with_peers)
    lines = []
    for what in ("machine", "torch", "cuda"):
        names = [str(result.get(what, {}).get("name") if what == "machine" else result.get(what)) for result in (old, new)]
        if names[0] != names[1]:
            lines.append(f"note: not the same {what}: {names[0]} and {names[1]}")
    for title, changes in (("slower", slower), ("faster", faster)):
        lines.append(f"{len(changes)} {title} beyond noise" + (":" if changes else "."))
        lines += [f"  {change.line}" for change in changes]
    for title, names in (
        (f"with too few samples (at least {FEWEST_SAMPLES} in each result), no verdict", few),
        ("missing in the second result", missing),
    ):
        if names:
            lines.append(f"{len(names)} {title}:")
            lines += [f"  {name}" for name in names]
    return "\n".join(lines), bool(slower or (missing and not allow_missing))
