"""The style of all pictures: ours always has one colour, each baseline one of its own, lengths are written 4k and 128k."""

from __future__ import annotations

INK, PALE, LINE, WHITE = "#1f2933", "#e4e9f0", "#9aa5b1", "#ffffff"
BLUE, ORANGE, GREEN, VIOLET, RED = "#2f6fb0", "#e08e45", "#4d9a6a", "#8d5fa8", "#b5483d"
OURS = BLUE
OURS_TOO = "#8fb8de"  # another measure of ours in the same plot
BASELINES = {
    "cuDNN": "#5f6b78",
    "torch's SDPA": "#5f6b78",
    "FlashAttention-2": RED,
    "FlexAttention": VIOLET,
    "dmattn dense": LINE,
}
MODELS = {"per-key": OURS, "per-query": OURS_TOO, "half local": ORANGE, "dense+": INK, "sliding+": GREEN, "hybrid": VIOLET}
RC = {"svg.hashsalt": "dmattn", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
      "axes.titlesize": 10, "figure.titlesize": 11, "legend.fontsize": 8, "legend.frameon": False}  # fmt: skip


def short(count: float) -> str:
    """A number of tokens: 512, 4k, 1M."""
    for unit, name in ((2**20, "M"), (2**10, "k")):
        if count >= unit:
            return f"{count / unit:g}{name}"
    return f"{count:g}"


def baseline(name: str) -> str:
    """The colour of a baseline."""
    return BASELINES.get(name, BASELINES["cuDNN"])
