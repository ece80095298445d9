"""``python -m dmattn.bench``: list and run workloads, compare two results, make tables and plots of results.

Ends with 1 when a result is wrong, became slower or is not what a page says, and with 2 for a call that asks for what is not there.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from dmattn.bench import compare, peers, report, suite, workloads
from dmattn.bench.cases import trained_scores
from dmattn.bench.measure import SECONDS_A_CASE
from dmattn.bench.records import BadResultError, checkout, read, write

DTYPES = ("float32", "bfloat16", "float16")
SHAPE = ("batch", "heads", "kv_heads", "head_dim", "dtype")


class BadCallError(Exception):
    """A call that asks for what is not there; one sentence."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = parser().parse_args(arguments)
    commands = {"list": list_all, "run": run, "compare": compare_two, "report": make_report}
    try:
        return commands[options.command](options)
    except (BadCallError, BadResultError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m dmattn.bench", description="Benchmarks of dmattn beside its peers.")
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="say which workloads and peers there are")

    run = commands.add_parser("run", help="measure workloads; write JSON and CSV")
    run.add_argument("names", nargs="+", metavar="NAME", help="workloads; pages: what the documentation shows; all: every one")
    run.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    run.add_argument("--quick", action="store_true", help="short lengths, few repeats: does it run, roughly how fast")
    run.add_argument("--peers", nargs="+", metavar="PEER", help="instead of the workloads' own; none: without")
    run.add_argument("--lengths", nargs="+", type=positive, default=[], help="instead of the workloads' own")
    for name in SHAPE[:-1]:
        run.add_argument(f"--{name.replace('_', '-')}", type=positive, help="instead of the workloads' own")
    run.add_argument("--dtype", choices=DTYPES, help="instead of the workloads' own")
    run.add_argument("--trained", default=workloads.TRAINED, help=f"scores for dynamic-trained (default {workloads.TRAINED})")
    run.add_argument("--repeats", type=positive, help="turns of each case, at most")
    run.add_argument(
        "--seconds", type=float, default=SECONDS_A_CASE, help="of timed turns of each case, about (default %(default)g)"
    )
    run.add_argument(
        "--settle", type=float, default=0.0, help="seconds of the same kernels before each timed one (default 0; CUDA)"
    )
    run.add_argument("--threads", type=positive, default=2, help="of a CPU (default 2)")
    run.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    run.add_argument("--output", type=Path, default=Path("bench-results"), help="folder of results (default %(default)s)")
    run.add_argument("--name", help="name of the files (default: the workloads'; pages: the device)")

    two = commands.add_parser(
        "compare", help="list what became slower beyond noise from one result to another; 1 if anything did"
    )
    two.add_argument("old", type=Path)
    two.add_argument("new", type=Path)
    two.add_argument("--least", type=float, default=0.05, help="part of a time that is no change (default %(default)g)")
    two.add_argument("--with-peers", action="store_true", help="compare the peers' times as well")

    made = commands.add_parser("report", help="make tables and plots: of results, or in a checkout those of its pages")
    made.add_argument("results", type=Path, nargs="*", help="results (JSON) or training runs (JSONL); none: the committed ones")
    made.add_argument(
        "--output", type=Path, default=Path("bench-report"), help="folder of a report of results (default %(default)s)"
    )
    made.add_argument("--check", action="store_true", help="change no page; 1 when one is not what the committed results say")
    return top


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return number


def list_all(_: argparse.Namespace) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print("Workloads:")
    print(f"  {'pages':20} what the tables and plots of the documentation are made of")
    for each in workloads.named().values():
        print(f"  {each.name:20} {each.about}")
    print(f"\nPeers, on this machine's {device}:")
    for name, about in peers.PEERS.items():
        reason = peers.missing(name, device)
        print(f"  {name:20} {about}" + (f" (not here: {reason.split(': ', 1)[1]})" if reason else ""))
    return 0


def run(options: argparse.Namespace) -> int:
    chosen = checked(options)
    names = list(workloads.named()) if options.names == ["all"] else options.names
    result = suite.run(names, chosen)
    print(suite.table(result))
    for line in suite.remarks(result):
        print(line)
    stem = options.name or "-".join([*(chosen.device if name == "pages" else name for name in names[:4])])
    stem += f"-{result['family']}" * (result["family"] != "auto") + "-settled" * bool(chosen.settle) + "-quick" * chosen.quick
    path = options.output / result["machine"]["name"] / f"{stem}.json"
    write(result, path)
    print(f"Written: {path} and {path.with_suffix('.csv').name}")
    if all("cannot_run" in row for row in result["rows"]):
        return 2
    return int(any("refused" in row for row in result["rows"]))


def checked(options: argparse.Namespace) -> suite.Options:
    """Raises BadCallError."""
    known = workloads.named(options.trained)
    for name in options.names:
        if name not in known and name not in ("pages", "all"):
            raise BadCallError(f"{name}: expected a workload, one of pages, all, {', '.join(known)}")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise BadCallError("--device cuda: torch sees no GPU here")
    if options.settle < 0 or (options.settle and device == "cpu"):
        raise BadCallError(f"--settle: expected seconds on a GPU, got {options.settle:g} on {device}; a CPU keeps its clock")
    wanted = None if options.peers is None else () if options.peers == ["none"] else tuple(options.peers)
    for name in wanted or ():
        if name not in peers.PEERS:
            raise BadCallError(f"--peers: expected some of {', '.join(peers.PEERS)}, got {name}")
        if reason := peers.missing(name, device):
            raise BadCallError(f"--peers: {reason}")
    if "dynamic-trained" in options.names:
        try:
            trained_scores(options.trained)
        except ValueError as error:
            raise BadCallError(f"dynamic-trained: {error}") from None
    shape = {name: getattr(options, name) for name in SHAPE if getattr(options, name) is not None}
    if shape.get("heads", 0) % shape.get("kv_heads", 1):
        raise BadCallError(f"--heads: expected a multiple of --kv-heads {shape['kv_heads']}, got {shape['heads']}")
    if "heads" in shape:
        shape.setdefault("kv_heads", shape["heads"])
    return suite.Options(
        device=device,
        peers=wanted,
        lengths=tuple(options.lengths),
        shape=shape,
        memory=not options.no_memory,
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(suite.Options)
           if field.name in ("quick", "repeats", "seconds", "settle", "threads", "trained")},
    )  # fmt: skip


def compare_two(options: argparse.Namespace) -> int:
    words, has_slower = compare.text(read(options.old), read(options.new), options.least, options.with_peers)
    print(words)
    return int(has_slower)


def make_report(options: argparse.Namespace) -> int:
    if options.results:
        print(f"Written: {report.of_results(options.results, options.output)}")
        return 0
    root = checkout()
    if root is None:
        raise BadCallError("report: expected results to report on; without them it needs a checkout of dmattn")
    changed = report.pages(root, options.check)
    for name in changed:
        print(
            f"{name}: {'differs from benchmarks/results; python -m dmattn.bench report rewrites it' if options.check else 'rewritten'}"
        )
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
