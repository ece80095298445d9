"""What ``python -m dmattn shape`` prints: the table, how it was measured, and one sentence of advice."""

from __future__ import annotations

from collections.abc import Sequence

from dmattn.shape.times import Row, Shape

ALIKE = 1.05  # ratios of times up to it count as no difference
HEADER = ("", "forward", "backward", "decode", "memory", "cache")
MEMORY = {
    "cuda": "peak allocated in a training step beyond its inputs",
    "cpu": "computed sizes of the output, of what is saved for backward, and of the gradients",
}
CLOCK = {
    "cuda": "CUDA events, a cold L2 cache and an idle GPU before each call, so launching counts (not so in a CUDA graph)",
    "cpu": "wall clock",
}


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, factor in (("us", 1e6), ("ms", 1e3), ("s", 1.0)):
        if seconds * factor < 999.5 or unit == "s":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def size(count: float | None) -> str:
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def title(shape: Shape, machine: str) -> str:
    parts = [f"window {shape.window:,}"]
    parts += [f"{shape.local:,} local"] if shape.local else []
    parts += [f"{shape.sink_keys:,} sink keys"] if shape.sink_keys else []
    dtype = str(shape.dtype).removeprefix("torch.")
    sizes = f"batch {shape.batch}, {shape.heads} heads on {shape.kv_heads}, head size {shape.head_dim}, {shape.length:,} tokens"
    return f"{sizes}, {' + '.join(parts)}, {dtype}, {machine}"


def table(rows: Sequence[Row]) -> str:
    """Columns aligned, numbers to the right."""
    cells = [list(HEADER)]
    for row in rows:
        times = [duration(seconds) for seconds in (row.forward, row.backward, row.decode)]
        cells.append([row.name, *times, size(row.memory), size(row.cache)])
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADER))]
    aligned = [
        [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        for line in cells
    ]
    return "\n".join("  ".join(line).rstrip() for line in aligned)


def legend(shape: Shape, rounds: int) -> str:
    calls = "one whole eager call" if rounds == 1 else f"medians of {rounds} whole eager calls"
    return (
        f"Times: {calls}, {CLOCK[shape.device]}; random normal inputs; forward of dmattn includes the selection of keys.\n"
        f"Decode: one token of each sequence; dmattn updates its bounded cache of {shape.keys:,} slots, SDPA reads {shape.length:,} keys.\n"
        f"Memory: {MEMORY[shape.device]}. Cache: keys and values (and scores and positions) that decode keeps."
    )


def ratio(theirs: float | None, ours: float | None) -> float | None:
    """How many times longer theirs takes."""
    return None if theirs is None or ours is None else theirs / ours


def compared(factor: float) -> str:
    """A ratio of their time to ours in words."""
    if 1 / ALIKE <= factor <= ALIKE:
        return "as fast"
    larger = max(factor, 1 / factor)
    number = f"{larger:.2g}" if larger < 10 else f"{larger:.0f}"
    return f"{number}x {'faster' if factor > 1 else 'slower'}"


def verdict(training: float | None, decoding: float | None) -> str:
    """What the ratios of a training step and of a decode step say together."""
    better = [factor is not None and factor > ALIKE for factor in (training, decoding)]
    worse = [factor is not None and factor < 1 / ALIKE for factor in (training, decoding)]
    if better[0] and worse[1]:
        return "Dynamic masks are faster in training and slower in decoding for this shape"
    if worse[0] and better[1]:
        return "Dynamic masks are slower in training and faster in decoding for this shape"
    if any(better):
        return "Dynamic masks are faster for this shape"
    return "Dense attention is faster for this shape" if any(worse) else "Neither is clearly faster for this shape"


def advice(ours: Row, dense: Row | None, sliding: Row | None) -> str:
    """One sentence that says nothing but what the rows say."""
    if dense is None or (dense.forward is None and dense.decode is None):
        return "Dense attention was not measured, so these numbers do not say which is faster for this shape."
    columns = (
        ("forward", dense.forward, ours.forward),
        ("backward", dense.backward, ours.backward),
        ("in decoding", dense.decode, ours.decode),
    )
    ratios = [(where, ratio(theirs, own)) for where, theirs, own in columns]
    said = [f"{compared(factor)} {where}" for where, factor in ratios if factor is not None]
    listed = said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"
    sentence = f"{verdict(ratio(dense.step(), ours.step()), ratio(dense.decode, ours.decode))}: dmattn is {listed}, compared with {dense.name}"
    if ours.cache is not None and dense.cache:
        sentence += f", and its cache takes {100 * ours.cache / dense.cache:.0f} % of the bytes"
    if sliding is not None:
        where, theirs, own = "in a training step", sliding.step(), ours.step()
        if theirs is None:
            where, theirs, own = "forward", sliding.forward, ours.forward
        factor = ratio(own, theirs)
        sentence += (
            f"; FlexAttention's sliding window is {compared(factor)} {where}, compared with dmattn" if factor is not None else ""
        )
    return sentence + "."
