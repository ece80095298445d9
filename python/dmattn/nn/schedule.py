"""The window of each training step: all keys at first, then fewer and fewer, then as many as will be served."""

from __future__ import annotations

import dataclasses
import math

from dmattn import checks


@dataclasses.dataclass(eq=False)
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

    window: int
    length: int
    _: dataclasses.KW_ONLY
    dense_steps: int = 0
    fall_steps: int = 0
    multiple: int = 64

    def __post_init__(self) -> None:
        checks.each(checks.positive_int, window=self.window, length=self.length, multiple=self.multiple)
        checks.each(checks.natural_int, dense_steps=self.dense_steps, fall_steps=self.fall_steps)
        if self.length < self.window:
            raise ValueError(f"length: expected at least window={self.window}, got {self.length}")

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
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Takes over a schedule.

        Raises:
            ValueError: not what :meth:`state_dict` gives.
        """
        if not isinstance(state, dict) or state.keys() != vars(self).keys():
            raise ValueError(f"state: expected a dict of {', '.join(vars(self))}, got {state!r}")
        vars(self).update(vars(WindowSchedule(**state)))
