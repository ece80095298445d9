"""Plants faults in copies of the sources, one at a time, and says which of them the tests find.

    python tools/planted_faults.py --only python --only cpu         what a machine without a GPU can show
    python tools/planted_faults.py --only cuda_sm90 --timeout 90    on a GPU; needs nvcc, and no network
    python tools/planted_faults.py --only cpu --table faults.json --missing     plants what that table does not have as found, and adds to it
    python tools/planted_faults.py --list

The faults are data (``tools/faults/``). The sources are built once with CMake; a fault compiles again what includes its file, from a copy
of the sources, with the commands of that build, and runs the tests that should find it. CUDA is built for one architecture, one dtype
and the head sizes that faults name, so that a fault costs seconds. Ends with 1 when a fault survives or does not apply any more, and
when Ctrl-C ends it before the last fault.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import filecmp
import fnmatch
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dmattn_bench.rows import to_json
from faults import KINDS, Fault, all_faults

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "libdmattn_ops.so"
FAMILIES = {"cuda_sm80": "sm80", "cuda_sm90": "auto", "cuda_common": "auto"}


@dataclasses.dataclass
class Outcome:
    """What became of a fault: found, survived or an error, with a word about it."""

    fault: Fault
    state: str = ""
    detail: str = ""
    build_seconds: float = 0.0
    test_seconds: float = 0.0


def applied(fault: Fault, root: Path) -> str:
    """The file's text with the fault in it.

    Raises:
        ValueError: the old text does not occur exactly once.
    """
    text = (root / fault.file).read_text()
    count = text.count(fault.old)
    if count != 1:
        raise ValueError(f"{fault}: this fault must be rewritten: its old text occurs {count} times")
    return text.replace(fault.old, fault.new)


class Base:
    """The sources as they are, built once: where every fault begins.

    Args:
        work: folder to work in.
        size: the head size of the CUDA kernels to build; None: none.
        arch: what CUDA code is compiled for.
        jobs: files compiled side by side.
        built: a folder that CMake has built the same sources in, with more instances or as many; None: build them.
    """

    def __init__(self, work: Path, size: int | None, arch: str, jobs: int, built: Path | None = None) -> None:
        self.source, self.site = work / "source", work / "site"
        self.build, self.built_source = built or work / "build", self.source
        self.source.mkdir(parents=True, exist_ok=True)
        for name in ("cpp", "cmake", "python", "tests", "benchmarks/dmattn_bench"):
            shutil.copytree(ROOT / name, self.source / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("CMakeLists.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, self.source)
        beside = Path(sys.executable).parent  # cmake and ninja of a virtual environment come before those of the system
        self.cmake, self.ninja = (
            str(beside / tool) if (beside / tool).is_file() else shutil.which(tool) or tool for tool in ("cmake", "ninja")
        )
        if built is None:
            self.make(size, arch, jobs)
        else:
            self.built_source = self.source_of(built)
        shutil.rmtree(self.site, ignore_errors=True)
        shutil.copytree(self.source / "python/dmattn", self.site / "dmattn")
        for library in (self.build / LIBRARY, *self.build.glob("_C*.so")):
            shutil.copy(library, self.site / "dmattn")
        entries = json.loads(self.run([self.ninja, "-C", str(self.build), "-t", "compdb"]))
        self.commands = {entry["output"]: entry["command"] for entry in entries if entry["command"]}
        self.included = self.read_dependencies()
        self.level = subprocess.run(
            [sys.executable, "-c", LEVEL_PROGRAM], capture_output=True, text=True, check=True
        ).stdout.strip()  # fmt: skip

    def make(self, size: int | None, arch: str, jobs: int) -> None:
        """Builds the sources with CMake."""
        version = re.search(r'__version__ = "(.*)"', (ROOT / "python/dmattn/_version.py").read_text())
        assert version is not None
        options = {
            "CMAKE_MAKE_PROGRAM": self.ninja,
            "CMAKE_BUILD_TYPE": "Release",
            "Python_EXECUTABLE": sys.executable,
            "SKBUILD_PROJECT_VERSION": version[1],
            "DMATTN_MODULE": "OFF" if importlib.util.find_spec("nanobind") is None else "ON",
            "DMATTN_CUDA": "ON" if size else "OFF",
        }
        if size:
            options |= {"DMATTN_CUDA_TYPES": "kBFloat16", "DMATTN_CUDA_SIZES": str(size), "DMATTN_CUDA_ARCHS": arch}
        folders = ["-S", str(self.source), "-B", str(self.build)]
        self.run([self.cmake, *folders, "-G", "Ninja", *(f"-D{name}={value}" for name, value in options.items())])
        self.run([self.ninja, "-C", str(self.build), "-j", str(jobs)])

    def source_of(self, built: Path) -> Path:
        """The folder that a build was made from, whose sources have to be these."""
        home = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", (built / "CMakeCache.txt").read_text(), re.M)
        assert home is not None
        source = Path(home[1])
        for file in sorted(path.relative_to(self.source) for path in (self.source / "cpp").rglob("*") if path.is_file()):
            if not (source / file).is_file() or not filecmp.cmp(self.source / file, source / file, shallow=False):
                sys.exit(f"--build: expected a build of these sources, got one with another {file}: {built}")
        return source

    @staticmethod
    def run(command: list[str]) -> str:
        finished = subprocess.run(command, capture_output=True, text=True)
        if finished.returncode != 0:
            sys.exit(f"{' '.join(command)}\n{finished.stdout[-4000:]}\n{finished.stderr[-4000:]}")
        return finished.stdout

    def read_dependencies(self) -> dict[str, set[str]]:
        """Object file to the files of the repository that it is made of."""
        found: dict[str, set[str]] = {}
        current: set[str] = set()
        for line in self.run([self.ninja, "-C", str(self.build), "-t", "deps"]).splitlines():
            if line.startswith(" "):
                path = os.path.normpath(os.path.join(self.build, line.strip()))
                if path.startswith(f"{self.built_source}/"):
                    current.add(os.path.relpath(path, self.built_source))
            elif ": #deps" in line:
                current = found.setdefault(line.split(": #deps")[0], set())
        return found

    def objects_of(self, fault: Fault) -> list[str]:
        """The object files to build again for a fault."""
        dependent = [name for name, files in self.included.items() if fault.file in files]
        dependent = [name for name in dependent if is_tested(name, fault.size)]
        if fault.objects:
            globs = [f"*{glob}*" for glob in fault.objects.split()]
        elif fault.kind == "cpu":  # of the kernels, the instruction set that runs
            others = {"baseline", "avx2", "avx512"} - {self.level}
            return [name for name in dependent if not any(f"dmattn_cpu_{other}.dir" in name for other in others)]
        else:
            globs = ["*"]
        return [name for name in dependent if any(fnmatch.fnmatch(name, glob) for glob in globs)]


def is_tested(name: str, size: int) -> bool:
    """Whether tests for this head size run an object file: one of kernel instances has their head size in the name."""
    instance = re.search(r"sm\d0_[a-z_]+_(\d+)[_.]", name)
    return instance is None or int(instance[1]) == size


# The instruction set that cpp/cpu/levels.h picks.
LEVEL_PROGRAM = """
import os
flags = set(next((line for line in open("/proc/cpuinfo") if line.startswith("flags")), "").split())
needs = {"avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}, "avx2": {"avx2", "fma", "f16c"}, "baseline": set()}
print(os.environ.get("DMATTN_CPU_LEVEL") or next(level for level, needed in needs.items() if needed <= flags))
"""


class Planter:
    """Builds and tests faults side by side."""

    def __init__(self, options: argparse.Namespace, bases: dict[int, Base], work: Path) -> None:
        self.options, self.bases, self.work = options, bases, work
        self.compiling, self.testing = asyncio.Semaphore(options.jobs), asyncio.Semaphore(options.test_jobs)

    async def plant(self, number: int, fault: Fault) -> Outcome:
        outcome = Outcome(fault)
        place = self.work / f"fault{number}"
        shutil.rmtree(place, ignore_errors=True)
        try:
            library = await self.build(fault, place, outcome)
            if library is not None:
                await self.test(fault, place, outcome)
        except (OSError, ValueError) as error:
            outcome.state, outcome.detail = "error", str(error)
        finally:
            if not self.options.keep:
                shutil.rmtree(place, ignore_errors=True)
        print(line_of(outcome), flush=True)
        return outcome

    async def build(self, fault: Fault, place: Path, outcome: Outcome) -> Path | None:
        """Leaves a package in ``place/site``; None when the fault does not compile."""
        base = self.bases[fault.size]
        text = applied(fault, base.source)
        site = place / "site/dmattn"
        shutil.copytree(base.site / "dmattn", site)
        if fault.kind == "python":
            (place / "site" / fault.file.removeprefix("python/")).write_text(text)
            return site / LIBRARY
        source = place / "source"
        shutil.copytree(base.source / "cpp", source / "cpp")
        (source / fault.file).write_text(text)
        objects = base.objects_of(fault)
        if not objects:
            raise ValueError(f"{fault}: no object file of this build includes {fault.file}")
        made = {name: place / f"{index}.o" for index, name in enumerate(objects)}

        async def compile_one(name: str) -> tuple[int, str]:
            # Not what else lies in that folder: a virtual environment, and in a build folder generated sources.
            own = re.sub(re.escape(f"{base.built_source}/cpp") + r"\b", f"{source}/cpp", base.commands[name])
            command = own.replace(name, str(made[name]))
            if ".cpp.o" in name:
                command += " -Wno-error"
            async with self.compiling:
                began = time.monotonic()
                result = await self.shell(command, base.build)
                outcome.build_seconds += time.monotonic() - began
                return result

        for code, output in await asyncio.gather(*(compile_one(name) for name in objects)):
            if code != 0:
                outcome.state, outcome.detail = "error", f"does not compile: {output[-600:]}"
                return None
        missing = set(made)
        for library in (LIBRARY, *(name for name in base.commands if name.startswith("_C"))):
            link = base.commands[library].replace(f"-o {library}", f"-o {site / library}")
            words = [os.path.normpath(word) if word.endswith(".o") else word for word in link.split(" ")]
            if set(made).isdisjoint(words):
                continue
            missing -= set(words)
            code, output = await self.shell(" ".join(str(made.get(word, word)) for word in words), base.build)
            if code != 0:
                raise ValueError(f"{fault}: does not link: {output[-600:]}")
        if missing:
            raise ValueError(f"{fault}: no library is linked from {missing}")
        return site / LIBRARY

    async def shell(self, command: str, folder: Path) -> tuple[int, str]:
        process = await asyncio.create_subprocess_shell(
            command, cwd=folder, start_new_session=True, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await ended(process)
        return process.returncode or 0, output.decode(errors="replace")

    async def test(self, fault: Fault, place: Path, outcome: Outcome) -> None:
        tests = [] if self.options.all_tests else fault.tests.split()
        async with self.testing:
            began = time.monotonic()
            code, output = await self.pytest(place / "site", tests, *group_of(fault), self.options.timeout)
            outcome.test_seconds = time.monotonic() - began
        failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", output, re.M)
        passed = re.search(r"(\d+) passed", output)
        if code == -1:
            outcome.state, outcome.detail = "found", f"no end after {self.options.timeout} s"
        elif code == 0:
            outcome.state = "survived" if passed else "error"
            outcome.detail = "" if passed else "no test ran"
        elif code in (1, 2) or code < 0 or code > 5:
            outcome.state, outcome.detail = "found", failed[1] if failed else f"the tests ended with {code}"
        else:
            outcome.state, outcome.detail = "error", output[-600:]

    async def pytest(
        self, site: Path, tests: list[str], kind: str, size: int, environment: str, timeout: float | None
    ) -> tuple[int, str]:
        """Exit status and output; -1 when the time is up."""
        # Chosen tests run from a copy, which nobody edits meanwhile; some of the others need the checkout.
        root = self.bases[size].source if tests else ROOT
        paths = [str(root / "tests" / test) for test in tests] or [str(root / "tests")]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "--no-header",
            "--tb=line",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:benchmark",
        ]
        command += ["-p", "no:xdist"]
        extra = dict(item.split("=", 1) for item in environment.split())
        if kind.startswith("cuda"):
            command += ["-p", "faults.reduced"]
            extra = {"DMATTN_REDUCED": f"bfloat16:{size}", "DMATTN_FAMILY": FAMILIES[kind], **extra}
        extra.setdefault("OMP_NUM_THREADS", str(max(2, (os.cpu_count() or 2) // self.options.test_jobs)))
        # The copy of the sources comes before an installed package.
        extra["PYTHONPATH"] = os.pathsep.join([str(site), str(ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])])
        extra["PYTHONDONTWRITEBYTECODE"] = "1"
        process = await asyncio.create_subprocess_exec(
            *command, *paths, cwd=root, env={**os.environ, **extra}, start_new_session=True,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = await asyncio.wait_for(ended(process), timeout)
        except asyncio.TimeoutError:
            return -1, ""
        return process.returncode or 0, output.decode(errors="replace")


async def ended(process: asyncio.subprocess.Process) -> tuple[bytes, bytes]:
    """What a process says until it ends. Who waits no longer ends it, with all that it started: it leads a session of its own."""
    try:
        return await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def group_of(fault: Fault) -> tuple[str, int, str]:
    """Faults whose tests run in the same way: kind, head size and environment."""
    return fault.kind, fault.size, fault.environment


def line_of(outcome: Outcome) -> str:
    seconds = f"{outcome.build_seconds:6.1f} {outcome.test_seconds:6.1f}"
    return f"{outcome.state:9} {outcome.fault.kind:11} {seconds}  {outcome.fault}" + (
        f"  <- {outcome.detail}" if outcome.detail else ""
    )


def commit_of_sources() -> str:
    """What git says, or DMATTN_COMMIT where there is no git or no history."""
    known = shutil.which("git") and subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return (known.stdout.strip() if known else "") or os.environ.get("DMATTN_COMMIT", "")


def read_table(path: Path) -> dict[str, dict[str, str]]:
    """The rows of a table of outcomes, by fault; none where there is no such file."""
    rows = json.loads(path.read_text())["faults"] if path.exists() else []
    return {f"{row['kind']} {row['fault']}": row for row in rows}


def write_table(path: Path, outcomes: list[Outcome]) -> None:
    """Adds outcomes to a table, in place of earlier ones; rows of faults that are planted no longer are left out."""
    rows, commit = read_table(path), commit_of_sources()
    for outcome in outcomes:
        fault = outcome.fault
        row = {"outcome": outcome.state, "kind": fault.kind, "fault": str(fault), "found_by": outcome.detail}
        rows[f"{fault.kind} {fault}"] = row | {"commit": commit}
    kept = [rows[key] for key in (f"{fault.kind} {fault}" for fault in all_faults() if not fault.harmless) if key in rows]
    found = sum(row["outcome"] == "found" for row in kept)
    table = {
        "about": "Outcomes of tools/planted_faults.py; CUDA faults on a GPU, the others on a CPU.",
        "planted": len(kept),
        "found": found,
        "faults": kept,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(table))


def make_bases(options: argparse.Namespace, faults: list[Fault], work: Path) -> dict[int, Base]:
    """By head size what faults begin with, built side by side."""
    began = time.monotonic()
    sizes = sorted({fault.size for fault in faults})
    with_cuda = {fault.size for fault in faults if fault.kind.startswith("cuda")}
    if options.build is not None:
        base = Base(work / "base", None, options.arch, options.jobs, options.build.resolve())
        bases = dict.fromkeys(sizes, base)
    else:
        jobs = max(1, options.jobs // max(1, len(sizes)))

        def make(size: int) -> Base:
            return Base(work / f"base{size}", size if size in with_cuda else None, options.arch, jobs)

        with concurrent.futures.ThreadPoolExecutor() as pool:
            bases = dict(zip(sizes, pool.map(make, sizes), strict=True))
    levels = ", ".join({base.level for base in bases.values()})
    print(f"built in {time.monotonic() - began:.0f} s; CPU kernels: {levels}", flush=True)
    return bases


async def check_without_faults(planter: Planter, faults: list[Fault]) -> None:
    """Runs the faults' tests on the sources as they are: a test that fails without the fault finds nothing."""
    groups: dict[tuple[str, int, str], list[str]] = {}
    for fault in faults:
        tests = groups.setdefault(group_of(fault), [])
        tests.extend(test for test in fault.tests.split() if test not in tests)
    began = time.monotonic()
    checks = [
        planter.pytest(planter.bases[size].site, [] if planter.options.all_tests else tests, kind, size, environment, None)
        for (kind, size, environment), tests in groups.items()
    ]
    for code, output in await asyncio.gather(*checks):
        if code != 0:
            sys.exit(f"The tests fail without a fault:\n{output[-6000:]}")
    print(f"the tests pass without a fault, in {time.monotonic() - began:.0f} s", flush=True)


async def plant_all(options: argparse.Namespace, faults: list[Fault], bases: dict[int, Base], work: Path) -> int:
    """Plants faults and prints what became of them. Ctrl-C ends what runs and keeps what is known. Returns the exit status."""
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, this.cancel)
    planter = Planter(options, bases, work)
    outcomes: list[Outcome] = []
    planting: list[asyncio.Task[Outcome]] = []
    try:
        if not options.no_baseline:
            await check_without_faults(planter, faults)
        print(f"{'outcome':9} {'kind':11} {'build':>6} {'tests':>6}  fault  <- the test that failed")
        planting += [asyncio.ensure_future(planter.plant(number, fault)) for number, fault in enumerate(faults)]
        for planted in asyncio.as_completed(planting):
            outcomes.append(await planted)
            if options.table is not None:
                write_table(options.table, outcomes[-1:])  # at once, so that a run that is ended leaves what it knows
    except asyncio.CancelledError:
        for task in planting:
            task.cancel()
        await asyncio.gather(*planting, return_exceptions=True)
        print("\ninterrupted")
    count = {state: sum(outcome.state == state for outcome in outcomes) for state in ("found", "survived", "error")}
    for outcome in outcomes:
        if outcome.state != "found":
            print("\n" + line_of(outcome))
    words = f"{count['found']} found, {count['survived']} survived, {count['error']} not as they should be"
    rest = "" if len(outcomes) == len(faults) else f" of {len(faults)}"
    print(f"\n{len(outcomes)}{rest} planted: {words}")
    return 0 if count["found"] == len(faults) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the faults and plant none")
    parser.add_argument(
        "--only",
        action="append",
        choices=KINDS,
        help="faults of this kind; may be given again; default: all, or, without nvcc, those in Python and CPU kernels",
    )
    parser.add_argument("--match", default="", help="faults whose file, description or tests contain this")
    parser.add_argument("--table", type=Path, help="write outcomes into this JSON, beside those of other faults that it has")
    parser.add_argument(
        "--missing",
        action="store_true",
        help="only faults that the table does not have as found; first those that it has with another outcome",
    )
    parser.add_argument("--part", default="1/1", help="of the faults chosen, the K-th of N parts: K/N")
    parser.add_argument("--all-tests", action="store_true", help="run the whole suite for each fault")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="files compiled side by side")
    parser.add_argument(
        "--test-jobs", type=int, default=0, help="faults tested side by side; default: 4 on a GPU, else half of --jobs"
    )
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which a fault's tests count as failed")
    parser.add_argument("--arch", default="90a-real", help="what CUDA code is compiled for")
    parser.add_argument("--build", type=Path, help="a folder that CMake built these sources in; default: they are built")
    parser.add_argument("--work", type=Path, help="folder to work in and to leave behind; default: a temporary one")
    parser.add_argument("--keep", action="store_true", help="leave what was built for each fault in the working folder")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a fault first")
    options = parser.parse_args()
    kinds = options.only or (KINDS if options.list or shutil.which("nvcc") else KINDS[:2])
    faults = [f for f in all_faults() if f.kind in kinds and options.match.lower() in f"{f} {f.tests} {f.old}".lower()]
    if options.missing:
        if options.table is None:
            parser.error("--missing: expected --table too")
        known = read_table(options.table)
        faults = [f for f in faults if known.get(f"{f.kind} {f}", {}).get("outcome") != "found"]
        faults.sort(key=lambda f: f"{f.kind} {f}" not in known)
    part, parts = map(int, options.part.split("/"))
    faults = faults[part - 1 :: parts]
    if options.list:
        for fault in faults:
            print(f"{fault.kind:11} {fault}  [{'harmless: ' + fault.harmless if fault.harmless else fault.tests}]")
        counted = sum(not fault.harmless for fault in faults)
        print(f"{counted} faults, and {len(faults) - counted} provably harmless ones")
        return 0
    faults = [fault for fault in faults if not fault.harmless]
    if not options.test_jobs:
        options.test_jobs = 4 if any(f.kind.startswith("cuda") for f in faults) else max(1, options.jobs // 2)
    with contextlib.ExitStack() as stack:
        if options.work is not None:
            options.work.mkdir(parents=True, exist_ok=True)
        work = options.work.resolve() if options.work is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            return asyncio.run(plant_all(options, faults, make_bases(options, faults, work), work))
        except KeyboardInterrupt:
            print("interrupted before the first fault was planted")
            return 1


if __name__ == "__main__":
    sys.exit(main())
