"""The window of each training step: all keys at first, then fewer and fewer, then as many as will be served."""

from __future__ import annotations

import math

from dmattn import checks

FIELDS = ("window", "length", "dense_steps", "fall_steps", "multiple")


class WindowSchedule:
    """A function from the step to the window, ``schedule(step)``, to be passed to :class:`DynamicMaskAttention` as ``window=``.

    The window is ``length`` for ``dense_steps`` steps, so that every query sees all keys, falls geometrically over the next ``fall_steps``
    steps, and is ``window`` from then on. It depends on the step alone: a run that is taken up again gets the same windows.

    A compiled model takes windows as arguments. The second window makes it compile once more, for any window; after that, and from the
    start with ``torch.compile(dynamic=True)``, no window does.

    Args:
        window: the last window, > 0.
        length: the window of the dense steps, the length of the training sequences, at least ``window``.
        dense_steps: number of steps with ``length``, >= 0.
        fall_steps: number of steps over which the window falls, >= 0; with 0 it drops at once.
        multiple: while it falls, the window is a multiple of this many keys.

    Raises:
        TypeError, ValueError: an argument that is no int or out of range.
    """

    def __init__(self, window: int, length: int, *, dense_steps: int = 0, fall_steps: int = 0, multiple: int = 64) -> None:
        self._set(
            {"window": window, "length": length, "dense_steps": dense_steps, "fall_steps": fall_steps, "multiple": multiple}
        )

    def __call__(self, step: int) -> int:
        """The window of a step, counted from 0.

        Raises:
            TypeError, ValueError: step is not an int >= 0.
        """
        checks.natural_int("step", step)
        if step < self.dense_steps:
            return self.length
        fallen = step - self.dense_steps
        if fallen >= self.fall_steps:
            return self.window
        exact: float = self.length * (self.window / self.length) ** (fallen / self.fall_steps)
        return min(self.length, max(self.window, math.ceil(exact / self.multiple) * self.multiple))

    def state_dict(self) -> dict[str, int]:
        """What the schedule was made of."""
        return {name: getattr(self, name) for name in FIELDS}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Takes over a schedule.

        Raises:
            ValueError: not what :meth:`state_dict` gives.
        """
        if not isinstance(state, dict) or set(state) != set(FIELDS):
            raise ValueError(f"state: expected a dict of {', '.join(FIELDS)}, got {state!r}")
        self._set(state)

    def _set(self, state: dict[str, int]) -> None:
        for name in ("window", "length", "multiple"):
            checks.positive_int(name, state[name])
        for name in ("dense_steps", "fall_steps"):
            checks.natural_int(name, state[name])
        if state["length"] < state["window"]:
            raise ValueError(f"length: expected at least window={state['window']}, got {state['length']}")
        self.window, self.length, self.dense_steps = state["window"], state["length"], state["dense_steps"]
        self.fall_steps, self.multiple = state["fall_steps"], state["multiple"]

    def __repr__(self) -> str:
        return f"WindowSchedule({', '.join(f'{name}={value}' for name, value in self.state_dict().items())})"
