"""Mutations that change no result, by name: the edit, and why nothing can find it. ``planted_faults.py`` records them and plants them not."""

from __future__ import annotations

EQUIVALENT: dict[str, tuple[str, str]] = {
    "python/dmattn/cache.py:BoundedCache._take_steps: true, false 1": (
        ":2], slots, None, bias, None, [False -> True], call.scale, call.softcap))",
        "Causality hides nothing from the last query of a sequence, and there is one query.",
    ),
    "cpp/cpu/mask.h:KeyScheduler.visit_range: and, or 1": (
        "if (!start_min_ [&& -> ||] !end_max_) {",
        "Blocks that one summary would skip are classified one by one and found empty: slower, the same chunks.",
    ),
    "cpp/tensors.h:view_of: off by one 5": (
        "im() > 3 ? tensor.stride(2) : [0 -> 1]};",
        "Of tensors with three dimensions, the scores of select alone, nothing reads the row_stride.",
    ),
}
