"""Times reduce_sum and reduce_max in CUDA graphs, vs. torch's sum, amax and copy: ``python benchmarks/reduce.py``. JSON with --output.

Rates count the bytes that a reduction reads; a copy's the bytes that it reads and writes. Torch's negation is timed as the copy, because in
a graph ``copy_`` becomes a copy by another engine, which is slower than a kernel. A graph holds runs over several inputs that are larger
than the L2 cache together, so that every run reads from memory. All of it takes a few seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from pathlib import Path

import torch
from dmattn_bench.measure import graphed
from dmattn_bench.records import provenance
from dmattn_bench.rows import to_json
from dmattn_bench.two_ways import assert_sum_close
from torch import Tensor

COLD_BYTES = 400 << 20
SMALL = 10**6  # elements whose sum is compared beside that of all: few enough that one left out would be seen


@dataclasses.dataclass(frozen=True)
class Case:
    """A contiguous input of that shape, reduced over ``dim``; ``transposed``: with its dimensions in the other order in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    dim: int | None = None
    transposed: bool = False

    @property
    def bytes(self) -> int:
        size: int = torch.Size(self.shape).numel() * self.dtype.itemsize
        return size

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}, dim {self.dim}" + (", transposed" * self.transposed)


HUNDRED_MILLION = (100_000_000,)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int8, torch.bool)
CASES = [
    *(Case(HUNDRED_MILLION, dtype) for dtype in DTYPES),
    *(Case((1_000_000,), dtype) for dtype in (torch.float32, torch.bfloat16)),
    *(Case((10_000, 10_000), dtype, dim) for dtype in (torch.float32, torch.bfloat16) for dim in (0, 1)),
    Case((10_000, 10_000), torch.float32, 1, transposed=True),
    Case((1_000_000, 100), torch.float32, 1),
    Case((1_000_000, 100), torch.float32, 0),
    Case((100, 1_000, 1_000), torch.float32, 1),
    Case((9_999, 10_001), torch.float32, 1),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    rows = []
    print(f"{'GB/s':44s} {'ours':>8s} {'torch':>8s} {'max':>8s} {'amax':>8s} {'copy':>8s} {'sum : copy':>10s}")
    for case in CASES:
        row = measured(case, options.repeats)
        rows.append(row)
        rates = " ".join(f"{row[name]:8.0f}" for name in ("reduce_sum", "torch_sum", "reduce_max", "torch_amax", "copy"))
        print(f"{case!s:44s} {rates} {row['sum_of_copy']:10.2f}", flush=True)
    if options.output:
        report = {
            **provenance("cuda"),
            "unit": "GB/s of bytes read; copy: read and written",
            "rows": rows,
        }
        options.output.write_text(to_json(report))


def draw(case: Case, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    numbers = torch.randn(case.shape, generator=generator, device="cuda", dtype=torch.float32)
    given = numbers > 0 if case.dtype == torch.bool else (numbers * 20).to(case.dtype)
    return given.mT.contiguous().mT if case.transposed else given


def measured(case: Case, repeats: int) -> dict[str, object]:
    """Rates of one case; refuses on sums outside of the tolerance rule, on maxima that differ and on bits that do."""
    inputs = [draw(case, seed) for seed in range(max(1, -(-COLD_BYTES // case.bytes)))]
    copies = [torch.empty_like(given) for given in inputs]
    dim = tuple(range(len(case.shape))) if case.dim is None else case.dim
    check(case, inputs[0], dim)
    runs = {
        "reduce_sum": lambda x, _: torch.ops.dmattn.reduce_sum(x, case.dim),
        "torch_sum": lambda x, _: torch.sum(x, dim),
        "reduce_max": lambda x, _: torch.ops.dmattn.reduce_max(x, case.dim),
        "torch_amax": lambda x, _: torch.amax(x, dim),
        "copy": lambda x, y: (torch.logical_not if x.dtype == torch.bool else torch.neg)(x, out=y),
    }
    row: dict[str, object] = {"case": str(case)}
    rates = {}
    for name, run in runs.items():
        us = graphed([functools.partial(run, x, y) for x, y in zip(inputs, copies, strict=True)], repeats)
        rates[name] = case.bytes * (2 if name == "copy" else 1) / us / 1e3
    return row | rates | {"sum_of_copy": rates["reduce_sum"] / rates["copy"]}


def check(case: Case, given: Tensor, dim: int | tuple[int, ...]) -> None:
    total, again = (torch.ops.dmattn.reduce_sum(given, case.dim) for _ in range(2))
    if not torch.equal(total, again):
        sys.exit(f"refused: {case}: two runs differ")
    if not torch.equal(torch.ops.dmattn.reduce_max(given, case.dim), torch.amax(given, dim)):
        sys.exit(f"refused: {case}: the maximum differs from torch's")
    if not given.is_floating_point():
        if not torch.equal(total, torch.sum(given, dim)):
            sys.exit(f"refused: {case}: the sum differs from torch's")
        return
    small = given.flatten()[:SMALL]
    try:
        assert_sum_close(small, None, False, torch.ops.dmattn.reduce_sum(small))
        assert_sum_close(given, case.dim, False, total)
    except AssertionError as reason:
        sys.exit(f"refused: {case}: {reason}")


if __name__ == "__main__":
    main()
