"""Times several builds of dmattn against each other: ``python benchmarks/builds.py old=FOLDER new=FOLDER --cases dense grouped``.

FOLDER holds an installed dmattn (``pip install --target FOLDER``); ``new=FOLDER,DMATTN_FAMILY=sm80`` sets variables for it. Each build runs in
a process of its own, because a process has one copy of the ops; processes take turns for --rounds rounds. Times are of kernels alone, from
CUDA graphs, in microseconds. Where cuDNN has a kernel for the shape, it takes turns with ours in the same process, and its time over ours
stands beside: that ratio depends less on the clock of the GPU. Prints a table, writes medians with --output. Says nothing
of results: run the tests on each build.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dmattn
import torch
from dmattn_bench.measure import by_turns, captured
from dmattn_bench.records import provenance
from dmattn_bench.rows import to_json
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Medians = dict[str, dict[str, float]]  # microseconds by case, and by run
# Batch, heads, heads of keys, length, head size, then what mask_of and attend take.
GROUPS: dict[str, list[dict[str, Any]]] = {
    "dense": [
        {"length": 16384},
        {"length": 16384, "causal": True},
        {"length": 4096, "batch": 4, "causal": True},
        {"length": 16384, "dim": 64},
        {"length": 16384, "dim": 64, "causal": True},
    ],
    "wide": [{"length": 16384, "heads": 8, "dim": 256}, {"length": 16384, "heads": 8, "dim": 256, "causal": True}],
    "gathered": [
        {"length": 16384, "window": 819},
        {"length": 32768, "window": 1024},
        {"length": 131072, "heads": 8, "window": 2048},
        {"length": 32768, "dim": 64, "window": 1024},
    ],
    "short": [
        {"length": 512, "batch": 32, "window": 128},
        {"length": 1024, "batch": 16, "window": 205},
        {"length": 4096, "batch": 4, "window": 410},
        {"length": 4096, "window": 410},
    ],
    "same-keys": [  # for all queries
        {"length": 1024, "window": 205, "causal": False},
        {"length": 4096, "window": 410, "causal": False},
    ],
    "grouped": [
        {"length": 16384, "heads": 16, "kv_heads": 4, "causal": True},
        {"length": 16384, "heads": 16, "kv_heads": 4},
        {"length": 4096, "batch": 4, "heads": 32, "kv_heads": 8, "causal": True},
        {"length": 4096, "heads": 32, "kv_heads": 2, "causal": True},
        {"length": 16384, "dim": 64, "heads": 16, "kv_heads": 4, "causal": True},
        {"length": 8192, "heads": 8, "kv_heads": 2, "dim": 256, "causal": True},
    ],
    "deterministic": [
        {"length": 16384, "causal": True, "deterministic": True},
        {"length": 16384, "deterministic": True},
        {"length": 16384, "dim": 64, "causal": True, "deterministic": True},
        {"length": 4096, "batch": 4, "causal": True, "deterministic": True},
        {"length": 16384, "window": 819, "deterministic": True},
        {"length": 32768, "window": 1024, "deterministic": True},
        {"length": 16384, "blocks": 0.1, "deterministic": True},
        {"length": 16384, "heads": 8, "dim": 256, "window": 819, "deterministic": True},
    ],
    "wide-windows": [
        {"length": length, "batch": batch, "heads": heads, "window": int(length * share)}
        for length, batch, heads in ((256, 1, 16), (1024, 1, 16), (1024, 4, 16), (4096, 1, 1), (4096, 1, 16), (8192, 1, 16))
        for share in (0.25, 0.5, 0.75, 1.0)
    ],
    "bias": [
        {"length": 8192, "bias": True},
        {"length": 8192, "bias": True, "causal": True},
    ],
    "options": [
        {"length": 16384, "causal": True, "softcap": 30.0},
        {"length": 16384, "causal": True, "dropout_p": 0.1},
        {"length": 32768, "window": 1024, "softcap": 30.0},
        {"length": 32768, "window": 1024, "dropout_p": 0.1},
        {"length": 16384, "heads": 8, "dim": 256, "causal": True, "softcap": 30.0},
        {"length": 8192, "heads": 8, "dim": 256, "causal": True, "bias": True},
        {"length": 8192, "causal": True, "softcap": 30.0, "bias": True},
    ],
}


def name_of(case: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in case.items())


# In the process of one build -------------------------------------------------------------------------------------------------------


def block_mask(length: int, density: float) -> dmattn.BlockMask:
    """Tiles of 128 by 128, so many of them drawn, the same for all heads."""
    tiles = -(-length // 128)
    generator = torch.Generator("cuda").manual_seed(1)
    return dmattn.BlockMask.from_blocks(torch.rand(1, 1, tiles, tiles, generator=generator, device="cuda") < density, 128)


def runs_of(case: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """Forward and backward by name: of the case; of cuDNN; of our dense attention beside a window, and of our plain call beside options."""
    heads, dim, length = case.get("heads", 16), case.get("dim", 128), case["length"]
    kv_heads, batch, window = case.get("kv_heads", heads), case.get("batch", 1), case.get("window")
    is_causal = case.get("causal", window is not None)
    options = {name: case[name] for name in ("softcap", "dropout_p", "deterministic") if name in case}
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    query, grad_out = (draw(batch, heads, length, dim).bfloat16().requires_grad_() for _ in range(2))
    key, value = (draw(batch, kv_heads, length, dim).bfloat16().requires_grad_() for _ in range(2))
    scores = draw(batch, kv_heads, length).requires_grad_() if window is not None else None
    bias = draw(1, heads, length, length).bfloat16().requires_grad_() if case.get("bias") else None
    mask = block_mask(length, case["blocks"]) if "blocks" in case else None

    def ours(window: int | None = window, bias: Tensor | None = bias, **options: Any) -> Tensor:
        if scores is not None and window is not None:
            return dmattn.dynamic_mask_attention(query, key, value, scores, window, is_causal=is_causal, **options)
        return dmattn.attention(query, key, value, mask, is_causal=is_causal, bias=bias, **options)

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=is_causal, enable_gqa=kv_heads != heads
            )

    inputs = [query, key, value]
    contestants = {"": (functools.partial(ours, **options), inputs + [x for x in (scores, bias) if x is not None])}
    if dim <= 128:  # cuDNN's backward takes no wider heads here
        contestants["cudnn "] = (functools.partial(cudnn), inputs)
    if window is not None:
        contestants["dense "] = (functools.partial(ours, window=None), inputs)
    if options or bias is not None:
        contestants["plain "] = (functools.partial(ours, bias=None), inputs + [x for x in (scores,) if x is not None])

    def runs(call: Callable[[], Tensor], leaves: list[Tensor]) -> tuple[Callable[[], object], Callable[[], object]]:
        out = call()
        return torch.no_grad()(call), lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

    found = {}
    for prefix, (call, leaves) in contestants.items():
        found[f"{prefix}forward"], found[f"{prefix}backward"] = runs(call, leaves)
    return found


def measure(groups: list[str], seconds: float) -> Medians:
    """Median microseconds of each run of each case."""
    found = {}
    stream = torch.cuda.Stream()  # the default stream cannot be captured
    with torch.cuda.stream(stream):
        for case in (case for group in groups for case in GROUPS[group]):
            try:
                runs = runs_of(case)
                for run in runs.values():
                    run()
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                samples = by_turns({name: captured(run) for name, run in runs.items()}, "cuda", 100, most_seconds=seconds)
            except (RuntimeError, ValueError, TypeError) as error:
                print(f"{name_of(case)}: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            finally:
                runs = {}
                torch.cuda.empty_cache()
            found[name_of(case)] = {name: statistics.median(times) * 1e6 for name, times in samples.items()}
    return found


# All builds ------------------------------------------------------------------------------------------------------------------------


def measured_by(build: str, groups: list[str], seconds: float) -> dict[str, Any]:
    """By FOLDER[,VARIABLE=VALUE...]; no cases where its process fails, which says why itself."""
    folder, *variables = build.split(",")
    environment = {**os.environ, "PYTHONPATH": folder, **dict(each.split("=", 1) for each in variables)}
    command = [sys.executable, __file__, "--inside", "--seconds", str(seconds), "--cases", *groups]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    return dict(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else {"cases": {}}


def medians_of(case: str, rounds: list[Medians]) -> dict[str, float]:
    """Over rounds, of each run of a case."""
    found = [one[case] for one in rounds if case in one]
    return {name: statistics.median(one[name] for one in found if name in one) for name in found[0]}


def table(results: dict[str, list[Medians]]) -> str:
    """A line for each case and pass: of each build the median over rounds in microseconds, cuDNN's and the dense call's time over it, and the
    first build's time over it."""
    lines = []
    first = next(iter(results))
    cases = dict.fromkeys(case for rounds in results.values() for one in rounds for case in one)
    for case in cases:
        for direction in ("forward", "backward"):
            cells = []
            for build, rounds in results.items():
                here = [one[case] for one in rounds if direction in one.get(case, {})]
                if not here:
                    cells.append(f"{build}: -")
                    continue
                ours = statistics.median(one[direction] for one in here)
                cell = f"{build}: {ours:8.1f}"
                for peer in ("cudnn", "dense", "plain"):
                    if f"{peer} {direction}" in here[0]:
                        cell += f" {peer} {statistics.median(one[f'{peer} {direction}'] / one[direction] for one in here):5.3f}"
                base = [one[case][direction] for one in results[first] if direction in one.get(case, {})]
                if build != first and base:
                    cell += f" x{statistics.median(base) / ours:5.3f}"
                cells.append(cell)
            lines.append(f"{case} {direction}\n    " + "\n    ".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("builds", nargs="*", metavar="NAME=FOLDER", help="what each build is called and where it is")
    parser.add_argument("--cases", nargs="+", choices=list(GROUPS), default=list(GROUPS), help="groups of cases (default: all)")
    parser.add_argument("--rounds", type=int, default=2, help="times that every build runs (default 2)")
    parser.add_argument("--seconds", type=float, default=0.4, help="of timed turns of a case, about (default 0.4)")
    parser.add_argument("--output", type=Path, help="file for the JSON of all rounds")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps({**provenance("cuda"), "cases": measure(options.cases, options.seconds)}))
        return
    if not options.builds or not all("=" in build for build in options.builds):
        parser.error("expected builds as NAME=FOLDER")
    folders = dict(build.split("=", 1) for build in options.builds)
    results: dict[str, list[Medians]] = {name: [] for name in folders}
    for _ in range(options.rounds):
        for name, folder in folders.items():
            measured = measured_by(folder, options.cases, options.seconds)
            results[name].append(measured.pop("cases"))
            if options.output:
                rows = [
                    {"build": build, "case": case, "us": medians_of(case, rounds)}
                    for build, rounds in results.items()
                    for case in dict.fromkeys(case for one in rounds for case in one)
                ]
                options.output.write_text(to_json({**measured, "rows": rows}))
    print(table(results))


if __name__ == "__main__":
    main()
