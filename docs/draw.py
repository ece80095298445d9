"""Draws the diagrams of the documentation as SVG, in docs/figures/ (``make docs``)."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import torch
from dmattn import eviction
from dmattn.nn import WindowSchedule
from dmattn_bench.style import BASELINES, BLUE, GREEN, INK, LINE, ORANGE, OURS, OURS_TOO, PALE, WHITE, short

TRAFFIC = Path(__file__).parent.parent / "benchmarks/results/amd-epyc-2-threads/context_parallel_bytes.json"


class Drawing:
    """A list of SVG elements on a white sheet."""

    def __init__(self, width: int, height: int, about: str) -> None:
        self.width, self.height, self.about = width, height, about
        self.parts: list[str] = []

    def rect(self, x: float, y: float, w: float, h: float, fill: str, stroke: str = "none", radius: float = 0) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius:g}" fill="{fill}" stroke="{stroke}"/>'
        )

    def text(
        self, x: float, y: float, words: str, size: int = 14, anchor: str = "start", fill: str = INK, bold: bool = False
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        safe = words.replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{weight}>{safe}</text>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, stroke: str = LINE, arrow: bool = False, dashed: bool = False
    ) -> None:
        extra = (' marker-end="url(#arrow)"' if arrow else "") + (' stroke-dasharray="4 3"' if dashed else "")
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}" stroke-width="1.5"{extra}/>')

    def curve(self, points: list[tuple[float, float]], stroke: str, dashed: bool = False) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        extra = ' stroke-dasharray="6 4"' if dashed else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="2"{extra}/>')

    def area(self, points: list[tuple[float, float]], fill: str) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polygon points="{path}" fill="{fill}" fill-opacity="0.18"/>')

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'font-family="DejaVu Sans, Verdana, sans-serif">'
        )
        arrow = (
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 8 4 0 8z" fill="{LINE}"/></marker></defs>'
        )
        sheet = f'<rect width="{self.width}" height="{self.height}" rx="8" fill="{WHITE}"/>'
        return "\n".join([head, f"<title>{self.about}</title>", arrow, sheet, *self.parts, "</svg>", ""])


def lifetimes(scores: list[float], window: int) -> list[tuple[int, int]]:
    """[start, end) of each key under causal selection of the `window` best, the later key winning ties."""
    count = len(scores)
    ends = []
    for key in range(count):
        end = key
        while end < count and sum((scores[j], j) > (scores[key], key) for j in range(end + 1)) < window:
            end += 1
        ends.append((key, end))
    return ends


def picture(
    d: Drawing, x: float, y: float, cell: float, spans: list[tuple[int, int]], fill: str, marked: int | None = None
) -> None:
    """Queries down, keys across: each key's lifetime as one vertical bar."""
    count = len(spans)
    d.rect(x, y, count * cell, count * cell, "#f6f8fa", PALE)
    for i in range(1, count):
        d.line(x, y + i * cell, x + count * cell, y + i * cell, PALE)
    for key, (start, end) in enumerate(spans):
        if end > start:
            color = ORANGE if key == marked else fill
            d.rect(x + key * cell + 1, y + start * cell + 1, cell - 2, (end - start) * cell - 2, color, radius=3)


def lifetime() -> Drawing:
    d = Drawing(860, 470, "The lifetime of a key")
    values = random.Random(5)
    count, cell, x, y = 16, 20, 96, 116
    scores = [values.random() for _ in range(count)]
    spans = lifetimes(scores, 4)
    marked = max((key for key in range(count) if spans[key][1] < count), key=lambda key: spans[key][1] - spans[key][0])
    d.text(x, 32, "Every query sees the 4 best-scored keys up to its own", 16, bold=True)
    for key, score in enumerate(scores):
        d.rect(x + key * cell + 3, y - 12 - 44 * score, cell - 6, 44 * score, ORANGE if key == marked else LINE)
    d.text(x - 10, y - 18, "scores", 12, "end")
    picture(d, x, y, cell, spans, BLUE, marked)
    for i in (0, 4, 8, 12):
        d.text(x - 10, y + i * cell + 15, f"query {i}", 12, "end")
        d.text(x + i * cell + 10, y + count * cell + 18, f"key {i}", 12, "middle")
    start, end = spans[marked]
    side = x + count * cell + 40
    d.line(x + count * cell, y + start * cell, side + 60, y + start * cell, ORANGE, dashed=True)
    d.line(x + count * cell, y + end * cell, side + 60, y + end * cell, ORANGE, dashed=True)
    d.text(side, y + start * cell + 18, f"start = {start}: query {marked} is the first to see key {marked}", 14)
    d.text(side, y + end * cell + 18, f"end = {end}: by query {end}, four better keys have arrived.", 14)
    d.text(side, y + end * cell + 38, "The set before a query only grows, so", 14)
    d.text(side, y + end * cell + 58, "the key never comes back.", 14)
    d.text(side, y - 34, "A key is visible to the queries of one interval.", 14, bold=True)
    d.text(side, y - 14, "Two integers a key are the whole mask, exactly.", 14, bold=True)
    return d


def composition() -> Drawing:
    d = Drawing(860, 300, "Masks compose: documents and a sliding window")
    count, cell, y = 14, 15, 60
    limits = (0, 6, 14)
    documents = [(j, next(end for end in limits if end > j)) for j in range(count)]
    window = [(j, min(j + 4, count)) for j in range(count)]
    both = [(max(a, c), min(b, e)) for (a, b), (c, e) in zip(documents, window, strict=True)]
    for number, (name, spans, fill) in enumerate(
        (("documents", documents, GREEN), ("sliding window", window, BLUE), ("both", both, ORANGE))
    ):
        x = 40 + number * 285
        d.text(x + count * cell / 2, 40, name, 16, "middle", bold=True)
        picture(d, x, y, cell, spans, fill)
        if number < 2:
            d.text(x + count * cell + 37, y + count * cell / 2 + 8, "&="[number], 26, "middle")
    d.text(430, 292, "start = the later start, end = the earlier end: an interval again", 14, "middle")
    return d


def slots_over_time(scores: list[float], sink: int, local: int, window: int) -> list[list[tuple[int, bool]]]:
    """For each token the slots of a bounded cache after it: the key in each, -1 for none, and whether it has just been written."""
    slots, history = [-1] * (sink + local + window), []

    def badness(slot: int) -> tuple[float, int, int]:
        return scores[slots[slot]] if slots[slot] >= 0 else -1.0, slots[slot], slot

    for token in range(len(scores)):
        before = list(slots)
        if token < sink:
            slots[token] = token
        else:
            ring = sink + (token - sink) % local
            leaver = slots[ring]
            if leaver >= 0:
                worst = min(range(sink + local, len(slots)), key=badness)
                if slots[worst] < 0 or scores[leaver] >= scores[slots[worst]]:
                    slots[worst] = leaver
            slots[ring] = token
        history.append([(key, key != old) for key, old in zip(slots, before, strict=True)])
    return history


def slots() -> Drawing:
    d = Drawing(860, 452, "The slots of a bounded cache over time")
    values = random.Random(8)
    sink, local, window, count, cell, x, y = 1, 3, 4, 16, 34, 150, 112
    scores = [values.random() for _ in range(count)]
    d.text(40, 32, "Eight slots hold all that a query sees, whatever the length", 16, bold=True)
    for token, score in enumerate(scores):
        d.rect(x + token * cell + 8, y - 14 - 44 * score, cell - 16, 44 * score, LINE)
    d.text(x - 12, y - 22, "scores", 12, "end")
    names = ["sink"] * sink + ["latest"] * local + ["selected"] * window
    fills = {"sink": GREEN, "latest": BLUE, "selected": ORANGE}
    for token, column in enumerate(slots_over_time(scores, sink, local, window)):
        for slot, (key, is_new) in enumerate(column):
            top = y + slot * cell
            d.rect(x + token * cell + 1, top + 1, cell - 2, cell - 2, PALE if key < 0 else fills[names[slot]], radius=4)
            if key >= 0:
                d.text(x + token * cell + cell / 2, top + 22, str(key), 13, "middle", WHITE, bold=is_new)
            if is_new:
                d.rect(x + token * cell + 3, top + 3, cell - 6, cell - 6, "none", WHITE, radius=3)
        d.text(x + token * cell + cell / 2, y + len(names) * cell + 20, str(token), 12, "middle")
    for slot, name in enumerate(names):
        d.text(x - 12, y + slot * cell + 22, f"slot {slot}, {name}", 12, "end")
    d.text(x - 12, y + len(names) * cell + 20, "after token", 12, "end")
    below = y + len(names) * cell + 46
    d.text(
        40,
        below,
        "A framed key was written by that token. A key that leaves the latest takes the slot of the worst selected key,",
        13,
    )
    d.text(40, below + 18, "if its score is no worse; otherwise it is gone for good, and no later query would have seen it.", 13)
    return d


def chunks() -> Drawing:
    d = Drawing(860, 440, "How the keys of a tile become chunks")
    values = random.Random(11)
    first, last = 26, 29  # the tile's queries
    spans = lifetimes([values.random() for _ in range(last + 1)], 12)
    states = ["whole" if s <= first and last < e else "partial" if e > first and s <= last else "hidden" for s, e in spans]
    fills = {"whole": BLUE, "partial": ORANGE, "hidden": PALE}
    cell, x = 26, 40
    d.text(x, 32, f"1. Look at each key: which of the tile's queries, {first} to {last}, see it?", 15, bold=True)
    for key, state in enumerate(states):
        d.rect(x + key * cell, 46, cell - 3, 34, fills[state], radius=3)
        d.text(x + key * cell + 11, 68, str(key), 11, "middle", INK if state == "hidden" else WHITE)
    for number, (state, words) in enumerate(
        (
            ("whole", "whole: all of them see it"),
            ("partial", "partial: some of them do"),
            ("hidden", "hidden: no query of the tile sees it, never loaded"),
        )
    ):
        d.rect(x + number * 230, 96, 14, 14, fills[state], radius=2)
        d.text(x + number * 230 + 20, 108, words, 13)
    queues = {state: [key for key, own in enumerate(states) if own == state] for state in ("whole", "partial")}
    d.text(x, 156, "2. Put live keys into two queues", 15, bold=True)
    for row, (state, keys) in enumerate(queues.items()):
        top = 170 + row * 44
        d.text(x, top + 22, state, 13)
        for place, key in enumerate(keys):
            d.rect(x + 70 + place * cell, top, cell - 3, 34, fills[state], radius=3)
            d.text(x + 81 + place * cell, top + 22, str(key), 11, "middle", WHITE)
    d.text(x, 300, "3. Compute chunks of equal size, first the whole keys, then the rest", 15, bold=True)
    order = [(key, "whole") for key in queues["whole"]] + [(key, "partial") for key in queues["partial"]]
    size = 4
    for chunk in range(-(-len(order) // size)):
        left = x + chunk * (size * cell + 22)
        held = order[chunk * size : (chunk + 1) * size]
        d.rect(left - 6, 314, size * cell + 9, 50, WHITE, LINE, 5)
        for place, (key, state) in enumerate(held):
            d.rect(left + place * cell, 322, cell - 3, 34, fills[state], radius=3)
            d.text(left + place * cell + 11, 344, str(key), 11, "middle", WHITE)
        test = any(state == "partial" for _, state in held) or len(held) < size
        d.text(left + size * cell / 2 - 2, 384, "test each pair" if test else "no test", 12, "middle")
    d.text(x, 422, "Whole keys come first, so that only the last chunks are tested pair by pair.", 13)
    return d


def pipeline() -> Drawing:
    d = Drawing(860, 400, "The pipeline of the Hopper forward kernel")
    x, unit = 170, 128
    d.text(20, 32, "One thread block, over time: each row is a group of warps", 16, bold=True)
    lanes = ("scheduler warps", "loading warps", "warpgroup A", "warpgroup B")
    for row, name in enumerate(lanes):
        d.text(20, 92 + row * 76, name, 14)
        d.line(x, 118 + row * 76, 845, 118 + row * 76, PALE)

    def box(row: int, start: float, length: float, words: str, fill: str) -> None:
        d.rect(x + start * unit, 62 + row * 76, length * unit - 4, 42, fill, radius=4)
        d.text(x + start * unit + (length * unit - 4) / 2, 88 + row * 76, words, 12, "middle", WHITE)

    for n in range(5):
        box(0, n * 0.95, 0.75, f"chunk {n}", GREEN)
    for n in range(4):
        box(1, 0.75 + n * 1.08, 1.0, f"K, V of chunk {n}", BLUE)
    for row, offset in ((2, 1.9), (3, 2.4)):
        for n in range(2):
            at = offset + n * 1.5
            products = "S0 = Q K0" if n == 0 else "S1, O += P0 V0"
            if at + 0.9 <= 5.28:
                box(row, at, 0.9, products, INK)
            if at + 1.5 <= 5.28:
                box(row, at + 0.9, 0.6, f"softmax {n}", ORANGE)
    for x1, y1, x2, y2 in ((0.75, 104, 0.85, 136), (1.75, 180, 1.95, 212)):
        d.line(x + x1 * unit, y1, x + x2 * unit, y2, LINE, arrow=True)
    for number, (fill, words) in enumerate(
        ((GREEN, "which keys"), (BLUE, "rows into shared memory"), (INK, "tensor cores"), (ORANGE, "ordinary arithmetic"))
    ):
        d.rect(20 + number * 205, 366, 14, 14, fill, radius=2)
        d.text(40 + number * 205, 378, words, 13)
    return d


def ranks() -> Drawing:
    d = Drawing(860, 440, "Which keys travel to a rank")
    values = random.Random(11)
    world, own, window, cell, x, y = 4, 5, 3, 17, 96, 56
    count = world * own
    spans = lifetimes([values.random() for _ in range(count)], window)
    third = 2 * own
    carried = [key for key in range(third) if spans[key][1] > third]
    d.text(x, 32, f"20 keys on 4 ranks, window {window}: what rank 2 receives", 16, bold=True)
    picture(d, x, y, cell, spans, BLUE)
    for key in carried:
        start, end = spans[key]
        d.rect(x + key * cell + 1, y + start * cell + 1, cell - 2, (end - start) * cell - 2, ORANGE, radius=3)
    for rank in range(world):
        d.text(x - 10, y + (rank + 0.5) * own * cell + 4, f"queries of {rank}", 12, "end")
        d.text(x + (rank + 0.5) * own * cell, y + count * cell + 18, f"keys of {rank}", 12, "middle")
        if rank:
            at = rank * own * cell
            d.line(x, y + at, x + count * cell, y + at, INK, dashed=True)
            d.line(x + at, y, x + at, y + count * cell, LINE, dashed=True)
    side = x + count * cell + 36
    d.line(x + count * cell, y + third * cell, side - 8, y + third * cell, ORANGE, dashed=True)
    d.text(side, y + third * cell - 62, "At the first query of rank 2", 14, bold=True)
    d.text(side, y + third * cell - 42, f"{len(carried)} of the {third} earlier keys are still alive,", 14)
    d.text(side, y + third * cell - 22, "as at every query: the window.", 14)
    d.text(side, y + third * cell + 6, "Their rows of key and value come in.", 14, bold=True, fill=ORANGE)
    d.text(side, y + third * cell + 26, "All others are dead and never come back,", 14)
    d.text(side, y + third * cell + 46, "so no query of rank 2 or later needs them.", 14)
    d.text(side, y + third * cell + 86, "Every later rank receives as much,", 14)
    d.text(side, y + third * cell + 106, "however long the sequence is.", 14)
    return d


def traffic() -> Drawing:
    """Bytes in per rank and key head against the number of ranks, both axes logarithmic; points were counted."""
    d = Drawing(860, 440, "Bytes that a rank receives, by the number of ranks")
    x, y, width, height = 96, 60, 520, 310
    measured = json.loads(TRAFFIC.read_text())["rows"]
    first = measured[0]
    length, window, row = first["length"], first["window"], 2 * first["head_dim"] * 2
    least, most = 5e5, 1e9

    def at(world: float, received: float) -> tuple[float, float]:
        across = (math.log2(world) - 1) / 9
        up = (math.log10(received) - math.log10(least)) / (math.log10(most) - math.log10(least))
        return x + across * width, y + (1 - up) * height

    d.text(
        x,
        32,
        f"{short(length)} tokens, window {short(window)}, a key head of {first['head_dim']} in bfloat16, forward",
        16,
        bold=True,
    )
    d.rect(x, y, width, height, "#f6f8fa", PALE)
    for received, name in ((1e6, "1 MB"), (1e7, "10 MB"), (1e8, "100 MB"), (1e9, "1 GB")):
        d.line(x, at(2, received)[1], x + width, at(2, received)[1], PALE)
        d.text(x - 10, at(2, received)[1] + 4, name, 12, "end")
    worlds = [2**n for n in range(1, 11)]
    for world in worlds:
        d.text(at(world, least)[0], y + height + 20, str(world), 12, "middle")
    d.text(x + width / 2, y + height + 44, "ranks", 13, "middle")
    d.text(x - 10, y - 8, "bytes in", 12, "end")

    def others(world: int) -> float:
        return length * (world - 1) / world

    lines: list[tuple[str, str, Callable[[int], float]]] = [
        ("ring: all rows", BASELINES["cuDNN"], lambda world: others(world) * row),
        ("ours: rows and scores", OURS, lambda world: window * (row + 4) + (others(world) * 4 if world > 2 else 0)),
        ("ours: rows", OURS_TOO, lambda world: window * (row + 4)),
    ]
    for name, color, received in lines:
        d.curve([at(world, received(world)) for world in worlds], color)
        d.text(x + width + 12, at(1024, received(1024))[1] + 4, name, 13, fill=color)
    for each in measured:
        given = each["bytes_in"]
        for color, received in ((OURS, given["rows"] + given["scores"]), (OURS_TOO, given["rows"])):
            across, up = at(each["ranks"], received)
            d.rect(across - 4, up - 4, 8, 8, color, radius=4)
    d.text(x + width + 12, y + height - 6, "Points: counted on ranks.", 12)
    d.text(x + width + 12, y + height + 12, "Lines: the model.", 12)
    return d


def teaching() -> Drawing:
    d = Drawing(860, 420, "What heads of the recommended layer see, and the queries that teach")
    values = random.Random(5)
    count, cell, local, y = 16, 18, 3, 84
    selected = [(key, end + local) for key, end in lifetimes([values.random() for _ in range(count)], 4)]
    heads = [("half of the heads: the last keys", [(key, key + local) for key in range(count)])]
    heads.append(("the others: these and the best before", selected))
    for i, (title, spans) in enumerate(heads):
        x = 90 + i * 400
        d.text(x, 32, title, 15, bold=True)
        picture(d, x, y, cell, [(start, min(end, count)) for start, end in spans], BLUE)
        for query in (6, 13):
            d.rect(x, y + query * cell, (query + 1) * cell, cell, "none", ORANGE, 3)
            d.text(x - 8, y + query * cell + 14, f"query {query}", 11, "end", ORANGE)
        for key in (0, 4, 8, 12):
            d.text(x + key * cell + 9, y - 8, f"key {key}", 11, "middle")
    d.text(
        90,
        y + count * cell + 34,
        "Orange: a query that teaches attends to all keys before it, and scores learn how much each of them got.",
        13,
    )
    return d


def schedule() -> Drawing:
    d = Drawing(860, 250, "The window while a converted model is fine-tuned")
    steps, length, window, x, y, width, height = 300, 8192, 1024, 110, 50, 560, 140
    falls = WindowSchedule(window, length=length, dense_steps=100, fall_steps=100, multiple=128)

    def at(step: int, keys: int) -> tuple[float, float]:
        return x + step / steps * width, y + height * (1 - keys / length)

    d.text(x, 28, "Scores learn under the full window before it falls", 15, bold=True)
    for keys in (0, 2048, 4096, 8192):
        d.line(x, at(0, keys)[1], x + width, at(0, keys)[1], PALE)
        d.text(x - 10, at(0, keys)[1] + 4, short(keys) if keys else "0", 12, "end")
    for step in range(0, steps + 1, 100):
        d.text(at(step, 0)[0], y + height + 20, str(step), 12, "middle")
    d.text(x + width / 2, y + height + 42, "steps", 13, "middle")
    d.curve([at(step, falls(step)) for step in range(steps + 1)], OURS)
    d.text(x + width + 12, at(0, window)[1] + 4, "window, in keys", 13, fill=OURS)
    return d


def gradients() -> Drawing:
    d = Drawing(860, 250, "What forward stores and what backward computes")
    names = ["s = scale q k", "P = exp(logit - lse)", "out = P v"]
    derived = ["dq, dk from ds", "dlogit = P (dP - delta)", "dv, dP from dout"]
    for i, (name, back) in enumerate(zip(names, derived, strict=True)):
        x = 40 + i * 270
        d.rect(x, 60, 220, 44, PALE, BLUE if i < 2 else GREEN, 6)
        d.text(x + 110, 87, name, 14, "middle")
        d.rect(x, 150, 220, 44, WHITE, ORANGE, 6)
        d.text(x + 110, 177, back, 14, "middle")
        if i + 1 < len(names):
            d.line(x + 220, 82, x + 268, 82, arrow=True)
            d.line(x + 270, 172, x + 222, 172, arrow=True)
        d.line(x + 110, 104, x + 110, 148, dashed=True, arrow=True)
    d.text(40, 34, "Forward", 15, bold=True)
    d.text(40, 226, "Backward, from right to left. Green: stored, with lse. Blue: computed again, tile by tile.", 13)
    return d


def evicted() -> Drawing:
    d = Drawing(860, 430, "Keys that a policy evicts, and the slots that a cache needs")
    torch.manual_seed(9)
    count, budget, every, cell, x, y = 16, 5, 4, 18, 96, 64
    policy = eviction.H2O(budget=budget, every=every, local=2)
    mask = eviction.lifetimes(policy, *(2 * torch.randn(1, 1, count, 8) for _ in range(3)))
    spans = [(key, min(int(end), count)) for key, end in enumerate(mask.end[0, 0])]
    d.text(x, 32, f"After every {every} tokens the {budget} best keys stay, and the others are evicted", 16, bold=True)
    picture(d, x, y, cell, spans, BLUE)
    side, bottom, slot = x + count * cell + 90, y + count * cell, 22
    for query in range(0, count, every):
        d.text(x - 10, y + query * cell + 13, f"query {query}", 12, "end")
        d.text(x + query * cell + cell / 2, bottom + 18, f"key {query}", 12, "middle")
        if query:
            d.line(x, y + query * cell, side - 22, y + query * cell, ORANGE, dashed=True)
            d.text(side - 18, y + query * cell + 4, "decision", 12, fill=ORANGE)
    side += 60
    for query in range(count):
        held = sum(start <= query < end for start, end in spans)
        d.rect(side, y + query * cell + 2, held * slot, cell - 4, GREEN, radius=3)
    most = side + (budget + every) * slot
    d.line(most, y - 8, most, bottom, INK, dashed=True)
    d.text(most, y - 14, f"{budget} + {every} slots", 12, "middle")
    d.text(side, bottom + 18, "keys in the cache, by query", 12)
    d.text(
        x,
        bottom + 46,
        "A bar is a key, from the query at its own position to the last one before the decision that evicts it.",
        13,
    )
    d.text(
        x,
        bottom + 64,
        "It never comes back, so the policy is an interval mask, and a cache needs no more slots than the dashed line.",
        13,
    )
    return d


def backward() -> Drawing:
    d = Drawing(860, 420, "How a backward kernel divides the work")
    count, cell, x, y, own = 5, 50, 110, 84, 2
    d.text(40, 32, "A block owns one tile of keys and loops over the queries that see it", 16, bold=True)
    right, bottom = x + count * cell, y + count * cell
    for tile in range(count):
        d.text(x + (tile + 0.5) * cell, y - 10, f"keys {tile}", 12, "middle")
        d.text(x - 10, y + (tile + 0.5) * cell + 4, f"queries {tile}", 12, "end")
        for row in range(count):
            seen = row >= tile
            fill = (ORANGE if tile == own else BLUE) if seen else PALE
            d.rect(x + tile * cell + 2, y + row * cell + 2, cell - 4, cell - 4, fill, radius=4)
            if seen:
                d.text(x + (tile + 0.5) * cell, y + (row + 0.5) * cell + 5, str(tile + 1), 14, "middle", WHITE)
    for row in range(own, count):
        d.line(right + 6, y + (row + 0.5) * cell, right + 66, y + (row + 0.5) * cell, arrow=True)
    for row in range(count):
        d.rect(right + 70, y + row * cell + 4, 150, cell - 8, WHITE, GREEN, 6)
        d.text(right + 145, y + (row + 0.5) * cell + 5, f"grad_query {row}", 13, "middle")
    d.text(right + 240, y + 22, "float32 sums in global memory:", 13)
    d.text(right + 240, y + 42, "the block adds its part to", 13)
    d.text(right + 240, y + 62, "every row that it visits", 13)
    d.line(x + (own + 0.5) * cell, bottom + 4, x + (own + 0.5) * cell, bottom + 24, arrow=True)
    d.rect(x + (own + 0.5) * cell - 105, bottom + 28, 210, 36, WHITE, ORANGE, 6)
    d.text(x + (own + 0.5) * cell, bottom + 51, f"grad_key {own}, grad_value {own}", 13, "middle")
    d.text(x + (own + 0.5) * cell + 122, bottom + 51, "sums in registers, written once, when the loop ends", 13)
    d.text(right + 240, y + 112, "Numbers: with deterministic=True", 13)
    d.text(right + 240, y + 132, "a row takes its parts in this", 13)
    d.text(right + 240, y + 152, "order; else as blocks get there", 13)
    return d


def alignment() -> Drawing:
    d = Drawing(860, 300, "Which key a query stands at")
    cases = (("Sq = Sk", 6, 6, 0), ("Sq < Sk", 3, 6, 3), ("Sq > Sk", 8, 5, -3), ("torch's SDPA, Sq < Sk", 3, 6, 0))
    cell, y = 22, 84
    d.text(40, 32, "Causal: the last query stands at the last key", 16, bold=True)
    for number, (name, queries, keys, offset) in enumerate(cases):
        x = 40 + number * 200
        d.text(x, y - 18, name, 14)
        for query in range(queries):
            for key in range(keys):
                at = key == query + offset
                fill = (ORANGE if at else BLUE) if key <= query + offset else PALE
                d.rect(x + key * cell + 1, y + query * cell + 1, cell - 2, cell - 2, fill, radius=3)
    words = (
        (BLUE, "visible"),
        (ORANGE, "the key at the query's own position"),
        (PALE, "hidden; with Sq > Sk the first queries see no key"),
    )
    for fill, name, x in zip(*zip(*words, strict=True), (40, 150, 460), strict=True):
        d.rect(x, 272, 14, 14, fill, radius=2)
        d.text(x + 20, 284, name, 13)
    return d


FIGURES = {
    "lifetime": lifetime,
    "composition": composition,
    "chunks": chunks,
    "pipeline": pipeline,
    "ranks": ranks,
    "slots": slots,
    "traffic": traffic,
    "teaching": teaching,
    "schedule": schedule,
    "gradients": gradients,
    "evicted": evicted,
    "backward": backward,
    "alignment": alignment,
}


def draw_all(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (folder / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    draw_all(Path(__file__).parent / "figures")
