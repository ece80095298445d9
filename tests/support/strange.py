# ruff: noqa: E501
"""What an argument may be given by mistake, and the rule for it: taken where the function says so, or refused in one sentence."""

from __future__ import annotations

import re

import numpy as np
import torch
from dmattn import BlockMask, IntervalMask

JAGGED = torch.nested.nested_tensor([torch.ones(3, 64), torch.ones(5, 64)], layout=torch.jagged)
BLOCK = BlockMask.from_bool(torch.ones(10, 12, dtype=torch.bool))

STRANGE = {
    "None": None, "a bool": True, "an int": 3, "a huge int": 10**400, "a float": 2.5, "NaN": float("nan"), "inf": float("inf"), "a complex number": 1j,
    "text": "x", "a list": [1.0], "a dict": {}, "a numpy array": np.ones((2, 4, 10, 16), np.float32), "a numpy float": np.float32(0.5),
    "a numpy int": np.int64(3), "a dtype": torch.float32, "a function": len, "a module": torch.nn.Linear(16, 2),
    "an interval mask": IntervalMask.causal(7), "a block mask": BLOCK, "a number in a tensor": torch.tensor(1.0), "an int in a tensor": torch.tensor(3),
    "no elements": torch.empty(0), "no batch": torch.empty(0, 4, 10, 16), "no keys": torch.empty(2**36, 4, 0, 16),
    "booleans": torch.ones(4, 5, dtype=torch.bool), "integers": torch.ones(2, 4, 10, 16, dtype=torch.int64),
    "complex": torch.ones(2, 4, 10, 16, dtype=torch.complex64), "8-bit floats": torch.ones(2, 4, 10, 16).to(torch.float8_e4m3fn),
    "another device": torch.empty(2, 4, 10, 16, device="meta"), "sparse": torch.ones(2, 4, 10, 16).to_sparse(), "nested": JAGGED,
    "2^40 elements": torch.zeros(1).expand(2**40), "2^40 in three dimensions": torch.zeros(1, 1, 1).expand(1, 1, 2**40),
    "2^40 batches and heads": torch.zeros(1, 1, 1, 16).expand(2**20, 2**20, 1, 16),
}  # fmt: skip


def assert_taken_or_refused(function, arguments, argument, names, taken, left_out=()):
    """Refusals are TypeErrors or ValueErrors that open with one of these names."""
    opening = re.compile("(" + "|".join(map(re.escape, names)) + "): expected ")
    wrong = []
    for what in STRANGE.keys() - left_out:
        try:
            function(**arguments | {argument: STRANGE[what]})
        except (TypeError, ValueError) as error:
            if not opening.match(str(error)):
                wrong.append(f"{what}: {error}")
        else:
            if what not in taken:
                wrong.append(f"{what} was taken")
    assert not wrong, "\n".join(wrong)
