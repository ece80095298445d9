"""``python -m dmattn.bench``: list and run workloads, compare two results, make tables and plots of results.

Ends with 1 when a result is wrong, became slower, is missing or is not what a page says, and with 2 for a call that asks for what is not there;
with 141, as other tools do, when nobody reads what it prints any more.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from dmattn import checks
from dmattn.bench import compare, peers, report, suite, workloads
from dmattn.bench.cases import Case, trained_scores
from dmattn.bench.measure import SECONDS_A_CASE
from dmattn.bench.records import BadResultError, checkout, machine, read, write

DTYPES = ("float32", "bfloat16", "float16")
SHAPE = ("batch", "heads", "kv_heads", "head_dim", "dtype")
MOST = (1 << 31) - 1  # of any number that is asked for
MOST_THREADS = 1024
NOBODY_READS = 141  # 128 + SIGPIPE


class BadCallError(Exception):
    """A call that asks for what is not there; one sentence."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    commands = {"list": list_all, "run": run, "compare": compare_two, "report": make_report}
    try:
        options = parser().parse_args(arguments)
        status = commands[options.command](options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes once more at its end
        return NOBODY_READS
    except (BadCallError, BadResultError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


class Parser(argparse.ArgumentParser):
    """Raises BadCallError in place of printing how the program is used and ending it."""

    def error(self, message: str) -> NoReturn:
        raise BadCallError(message)


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="python -m dmattn.bench", description="Benchmarks of dmattn vs. its peers.")
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
        "--seconds", type=not_negative, default=SECONDS_A_CASE, help="of timed turns of each case, about (default %(default)g)"
    )
    run.add_argument(
        "--settle", type=not_negative, default=0.0, help="seconds of the same kernels before each timed one (default 0; CUDA)"
    )
    run.add_argument("--threads", type=positive, default=2, help="of a CPU (default 2)")
    run.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    run.add_argument("--output", type=Path, default=Path("bench-results"), help="folder of results (default %(default)s)")
    run.add_argument("--name", help="name of the files (default: the workloads'; pages: the device)")

    two = commands.add_parser(
        "compare",
        help="list what became slower beyond noise from one result to another, and what is missing there; 1 if anything is",
    )
    two.add_argument(
        "results",
        type=Path,
        nargs="+",
        metavar="RESULT",
        help="the old and the new one; one alone is compared with the committed result of its machine and file name",
    )
    two.add_argument("--least", type=not_negative, default=0.05, help="part of a time that is no change (default %(default)g)")
    two.add_argument("--with-peers", action="store_true", help="compare the peers' times as well")
    two.add_argument(
        "--allow-missing", action="store_true", help="list what the second result lacks, and do not end with 1 for it"
    )

    made = commands.add_parser("report", help="make tables and plots: of results, or in a checkout those of its pages")
    made.add_argument("results", type=Path, nargs="*", help="results (JSON) or training runs (JSONL); none: the committed ones")
    made.add_argument("--output", type=Path, help="folder of a report of results (default bench-report)")
    made.add_argument("--check", action="store_true", help="change no page; 1 when one is not what the committed results say")
    commands.metavar = f"{{{','.join(commands.choices)}}}"  # what an error calls a command that is missing
    return top


def positive(text: str) -> int:
    if not text.isdecimal() or not text.strip("0"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    if len(text.lstrip("0")) > len(str(MOST)) or int(text) > MOST:
        raise argparse.ArgumentTypeError(f"expected at most {MOST}, got {text}")
    return int(text)


def not_negative(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number >= 0, got {text}")
    return number


def made_folder(path: Path) -> None:
    """Raises BadCallError where there can be no such folder: before anything is measured for it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadCallError(f"--output: expected a folder, got {path} ({error.strerror})") from None


def check_written(path: Path) -> None:
    """Raises BadCallError where there can be no such file: before anything is measured for it."""
    made_folder(path.parent)
    is_new = not os.path.lexists(path)
    try:
        path.open("a").close()
    except OSError as error:
        raise BadCallError(
            f"--output: expected a folder where {path.name} can be written, got {path.parent} ({error.strerror})"
        ) from None
    if is_new:
        path.unlink()


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
    names = wanted_names(options)
    chosen = checked(options)
    check_heads(names, chosen)
    path = path_of(options, chosen)
    for each in (path, path.with_suffix(".csv")):
        check_written(each)
    result = suite.run(names, chosen)
    remarks = suite.remarks(result)  # they add to the rows
    write(result, path)
    print("\n".join([suite.table(result), *remarks, f"Written: {path} and {path.with_suffix('.csv').name}"]))
    if all("cannot_run" in row for row in result["rows"]):
        return 2
    return int(any("refused" in row for row in result["rows"]))


def path_of(options: argparse.Namespace, chosen: suite.Options) -> Path:
    """The JSON of a run."""
    if chosen.device == "cpu":
        torch.set_num_threads(chosen.threads)  # the machine's name has them
    family = os.environ.get("DMATTN_FAMILY", "auto")
    stem = options.name or "-".join(chosen.device if name == "pages" else name for name in options.names[:4])
    stem += f"-{family}" * (family != "auto") + "-settled" * bool(chosen.settle) + "-quick" * chosen.quick
    folder: Path = options.output / machine(chosen.device)["name"]
    return folder / f"{stem}.json"


def wanted_names(options: argparse.Namespace) -> list[str]:
    """The workloads to run, each once. What cannot run is left out of ``all``, with a line that says why.

    Raises:
        BadCallError: there is no such workload, or it has no scores to run with.
    """
    known = workloads.named(options.trained)
    for name in options.names:
        if name not in known and name not in ("pages", "all"):
            raise BadCallError(f"{name}: expected a workload, one of pages, all, {', '.join(known)}")
    names = list(dict.fromkeys(name for given in options.names for name in (known if given == "all" else (given,))))
    if "dynamic-trained" in names and (reason := without_scores(options.trained, known["dynamic-trained"])):
        if "dynamic-trained" in options.names:
            raise BadCallError(f"dynamic-trained: {reason}")
        print(f"bench: without dynamic-trained: {reason}", file=sys.stderr)
        names.remove("dynamic-trained")
    return names


def without_scores(path: str, named: workloads.Named) -> str:
    """Why there are no trained scores to run with; empty if there are."""
    assert named.cases is not None
    try:
        shape = list(trained_scores(path).shape)
        return "" if named.cases() else f"{path}: expected scores of 2,048 tokens or more, got {shape}"
    except ValueError as error:
        return str(error)


def check_sizes(options: argparse.Namespace, device: str) -> None:
    """Raises BadCallError for sizes that no kernel takes, and for options that a workload would not heed."""
    for length in options.lengths:
        if length > checks.MAX_LENGTH:
            raise BadCallError(f"--lengths: expected at most {checks.MAX_LENGTH}, got {length}")
    if options.head_dim and (options.head_dim % 8 or options.head_dim > checks.MAX_HEAD_DIM):
        raise BadCallError(f"--head-dim: expected a multiple of 8 up to {checks.MAX_HEAD_DIM}, got {options.head_dim}")
    if options.dtype == "float32" and device == "cuda":
        raise BadCallError("--dtype: expected bfloat16 or float16 on a GPU, got float32")
    given = ["--" + name.replace("_", "-") for name in ("peers", "lengths", *SHAPE) if getattr(options, name)]
    known = workloads.named(options.trained)
    fixed = [name for name in options.names if name == "pages" or (name in known and known[name].cases is None)]
    if given and fixed:
        raise BadCallError(f"{given[0]}: expected none with {fixed[0]}, which has cases of its own, got one")
    if given and "all" in options.names:
        jobs = ", ".join(name for name, each in known.items() if each.cases is None)
        print(f"bench: {given[0]} changes nothing in {jobs}, which have cases of their own", file=sys.stderr)


def check_heads(names: list[str], chosen: suite.Options) -> None:
    """Raises BadCallError where a workload has heads that are no multiple of the key heads asked for."""
    for name, step in suite.planned(names, chosen):
        if isinstance(step, Case) and step.heads % step.kv_heads:
            raise BadCallError(f"--kv-heads: expected a divisor of {step.heads}, the heads of {name}, got {step.kv_heads}")


def checked(options: argparse.Namespace) -> suite.Options:
    """Raises BadCallError."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise BadCallError("--device cuda: torch sees no GPU here")
    if options.settle and device == "cpu":
        raise BadCallError(f"--settle: expected seconds on a GPU, got {options.settle:g} on {device}; a CPU keeps its clock")
    if options.name and Path(options.name).name != options.name:
        raise BadCallError(f"--name: expected the name of a file, got {options.name}; --output names the folder")
    wanted = None if options.peers is None else () if options.peers == ["none"] else tuple(dict.fromkeys(options.peers))
    for name in wanted or ():
        if name not in peers.PEERS:
            raise BadCallError(f"--peers: expected some of {', '.join(peers.PEERS)}, or none alone, got {name}")
        if reason := peers.missing(name, device):
            raise BadCallError(f"--peers: {reason}")
    if options.threads > MOST_THREADS:
        raise BadCallError(f"--threads: expected at most {MOST_THREADS}, got {options.threads}")
    check_sizes(options, device)
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
    old, new = map(read, pair_to_compare(options.results))
    words, has_failed = compare.text(old, new, options.least, options.with_peers, options.allow_missing)
    print(words)
    return int(has_failed)


def pair_to_compare(given: list[Path]) -> tuple[Path, Path]:
    """The old and the new result. The old one of one alone is the committed result of the same machine and name.

    Raises:
        BadCallError: there are more than two, or there is no such committed result.
    """
    if len(given) > 2:
        raise BadCallError(f"compare: expected one result or two, got {len(given)}")
    if len(given) == 2:
        return given[0], given[1]
    root = checkout()
    if root is None:
        raise BadCallError(
            "compare: expected two results; one alone is compared with a committed one, which needs a checkout of dmattn"
        )
    place = Path(report.RESULTS) / read(given[0]).get("machine", {}).get("name", "") / given[0].name
    if not (root / place).is_file():
        raise BadCallError(
            f"compare: expected {place}, the committed result that {given[0].name} is compared with, got none; give two"
        )
    return root / place, given[0]


def make_report(options: argparse.Namespace) -> int:
    if options.results:
        if options.check:
            raise BadCallError(
                "--check: expected no results beside it, since it compares pages with the committed ones, got some"
            )
        folder = options.output or Path("bench-report")
        check_written(folder / "report.md")
        print(f"Written: {report.of_results(options.results, folder)}")
        return 0
    if options.output:
        raise BadCallError("--output: expected results beside it; without them the pages of a checkout are rewritten")
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
