"""Plants drawn mutations in copies of the sources, one at a time, and records which test finds each.

    python tools/planted_faults.py --area python --area cpu             what a machine without a GPU can show
    python tools/planted_faults.py --area cuda_sm90                     on a GPU; needs nvcc, and no network
    python tools/planted_faults.py --area cpu --unfound --full          the survivors in the record again, with whole tests
    python tools/planted_faults.py --list --count 100                   print the sample

``mutations.py`` makes and draws them. The sources are built once with CMake. A mutation compiles again what includes its file, with the
commands of that build, and runs the tests that TESTS names for its file until one fails that passes without it; after a survey, those that
execute its function first (``executed.py``). CUDA is built for one architecture, one dtype and one head size, so that a mutation costs
seconds. Ends with 1 when one survives.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dmattn_bench.rows import to_json
from equivalent_mutations import EQUIVALENT, UNFOUND
from mutations import AREAS, ROOT, SEED, Mutation, mutations_of, sample

LIBRARY = "libdmattn_ops.so"
RECORD = ROOT / "benchmarks/results/planted_faults.json"
FIRST = 30.0  # seconds of tests that run before the rest of them
FAILED = r"^(?:FAILED|ERROR) (tests/[^\n]+?)(?: - .*)?$"
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "pytest", "numpy", "torch._dynamo"])
MEMORY = 16 << 30  # bytes that tests may map: a mutation may allocate without end
CUDA = (
    "sanitized cuda_tiles cuda_live_keys key_sources in_order most_keys cuda_bad_values cuda_gradients cuda_limits index_calls "
)
OPS = "forward backward select dynamic_mask_attention decode huge_biases errors limits silence autograd func fuzz"
# The test files, test_*.py below tests/, that look for a mutation: those of the first pattern that a file's path matches.
TESTS = (
    (r"cpp/.*cache", "cache cache_errors mixed_cache fuzz"),
    (r"cpp/.*decode", "decode errors cache fuzz"),
    (r"cpp/.*reduce", "reduce fuzz"),
    (r"cpp/.*(select|key_order)", "select cuda_short sanitized dynamic_mask_attention errors limits fuzz"),
    (r"cpp/.*pack", "errors masks limits masks_as_data forward fuzz"),
    (r"cpp/(cpu/)?list", "index_calls index decode errors registration limits fuzz"),
    (r"cpp/(cpu/)?index", "indexer index_loss index index_calls registration errors limits fuzz"),
    (r"cpp/params\.h", "errors forward decode cache select masks reduce backward index_calls indexer index_loss limits fuzz"),
    (r"cpp/(\w+_arguments|checks|errors|tensors)\.h", "errors forward decode cache select masks reduce backward index_calls limits fuzz"),
    (r"cpp/cpu/levels", "levels"),
    (r"cpp/cuda/host/plan", "plan forward backward"),
    (r"cpp/cuda/index", "sanitized indexer index_loss fuzz"),
    (r"cpp/cuda/.*token_step", "sanitized cache fuzz"),
    (r"cpp/cuda/", CUDA + OPS),
    (r"cpp/", OPS + " index index_calls rounding threads"),
    (r"distributed/(failures|agreement)", "failures context_parallel"),
    (r"distributed/", "context_parallel failures"),
    (r"sharding", "sharding shards wrappers"),
    (r"integrations/transformers/(packing|cache)", "transformers_cache serving_examples transformers"),
    (r"integrations/vllm", "vllm vllm_interface"),
    (r"integrations/(sglang|paged|kvpress)", r"\1 paged"),
    (r"integrations/transformers/(sparse|indexed)", "transformers_indexed transformers_odd_models"),
    (r"integrations/", "transformers transformers_doge transformers_convert transformers_cache transformers_odd_models"),
    (r"compat/flash_attn|compat/padding", "compat_errors compat_flash_attn"),
    (r"compat/(flashmask|block_sparse|flashkernel)", "compat_errors compat_flashmask compat_block_sparse compat_flashkernel"),
    (r"compat/", "compat_errors compat_flash_dmattn compat_block_sparse compat_flash_attn"),
    (r"masks/(data|buffer|heads|__init__)", "masks_as_data masks registration hostile_files"),
    (r"masks/drawing", "plot"),
    (r"masks/(index|combined)", "index plot index_calls masks_as_data hostile_files"),
    (r"masks/", "masks masks_as_data most_keys in_order errors varlen"),
    (r"nn/multihead", "multihead"),
    (r"nn/index", "indexed indexer index_loss lifetime_window hostile_files"),
    (r"nn/mixed_cache", "mixed_cache cache_in_layer"),
    (r"nn/scores", "scores layer indexed errors"),
    (r"nn/", "layer scores cache_in_layer model_arguments renamed errors"),
    (r"dmattn/cache", "cache cache_errors mixed_cache lifetime_window hostile_files"),
    (r"eviction/", "eviction pages hostile_files"),
    (r"dmattn/index", "indexer index_loss indexed errors"),
    (r"dmattn/torch_flash", "torch_flash"),
    (r"dmattn/(decode|sdpa|varlen|stats|profiling|plan|renamed|reductions|shape)", r"\1"),
    (r"dmattn/ops\.py", "cache_errors decode forward backward select cache sharding"),
    (r"dmattn/sinks|dmattn/weights", "model_arguments func multihead"),
    (r"dmattn/flops", "decode cache stats registration"),
    (r"dmattn/testing/", "testing fuzz"),
    (r"dmattn/(_library|__main__)", "library"),
    (r"dmattn/(batching|composed|autograd)", "func autograd registration"),
    (r"dmattn/fake", "registration aot_inductor reduce"),
    (r"dmattn/", OPS),
)  # fmt: skip
RENAMED = {"reductions": "reduce", "shape_times": "shape"}


def tests_of(file: str) -> list[str]:
    """Names of the test files that look for mutations of a source file."""
    found, names = next((found, names) for pattern, names in TESTS if (found := re.search(pattern, file)))
    return tests_named(found.expand(names))


def tests_named(names: str) -> list[str]:
    return [f"test_{RENAMED.get(name, name)}.py" for name in names.split()]


def run(command: list[str], folder: Path) -> tuple[int, str]:
    """Exit status and output."""
    done = subprocess.run(command, cwd=folder, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


class Build:
    """The sources as they are, built once: where every mutation begins. ``size`` is the head size of CUDA kernels, None without them.

    ``made`` is a folder that CMake has built these sources in; with None that is done here.
    """

    def __init__(self, work: Path, size: int | None, arch: str, jobs: int, made: Path | None = None) -> None:
        self.source, self.build, self.site, self.size = work / "source", work / "build", work / "site", size
        self.compiled = self.source  # the folder whose sources the commands of the build name
        shutil.rmtree(self.source, ignore_errors=True)
        shutil.copytree(ROOT, self.source, ignore=shutil.ignore_patterns(".*", "build", "dist", "results", "__pycache__"))
        beside = Path(sys.executable).parent  # cmake and ninja of a virtual environment come before those of the system
        cmake, ninja = (str(beside / tool) if (beside / tool).is_file() else tool for tool in ("cmake", "ninja"))
        version = re.findall(r'__version__ = "(.*)"', (ROOT / "python/dmattn/_version.py").read_text())[0]
        options = {
            "CMAKE_MAKE_PROGRAM": ninja, "CMAKE_BUILD_TYPE": "Release", "Python_EXECUTABLE": sys.executable,
            "SKBUILD_PROJECT_VERSION": version, "DMATTN_CUDA": "ON" if size else "OFF",
        }  # fmt: skip
        if size:
            options |= {"DMATTN_CUDA_TYPES": "kBFloat16", "DMATTN_CUDA_SIZES": str(size), "DMATTN_CUDA_ARCHS": arch}
        if made is not None:
            self.build, self.compiled = made.resolve(), ROOT
        else:
            folders = ["-S", str(self.source), "-B", str(self.build)]
            self.output([cmake, *folders, "-G", "Ninja", *(f"-D{name}={value}" for name, value in options.items())])
            self.output([ninja, "-C", str(self.build), "-j", str(jobs)])
        shutil.rmtree(self.site, ignore_errors=True)
        shutil.copytree(self.source / "python/dmattn", self.site / "dmattn")
        for library in (self.build / LIBRARY, *self.build.glob("_C*.so")):
            shutil.copy(library, self.site / "dmattn")
        entries = json.loads(self.output([ninja, "-C", str(self.build), "-t", "compdb"]))
        self.commands = {entry["output"]: entry["command"] for entry in entries if entry["command"]}
        self.dependencies = self.output([ninja, "-C", str(self.build), "-t", "deps"])
        self.level = self.output([sys.executable, "-c", LEVEL_PROGRAM]).strip()

    def output(self, command: list[str]) -> str:
        status, output = run(command, self.source)
        if status != 0:
            sys.exit(f"{' '.join(command)}\n{output[-4000:]}")
        return output

    def objects_of(self, file: str) -> list[str]:
        """The object files that are made of a file and that tests run: of the CPU kernels one instruction set, of the CUDA kernels one size."""
        found = []
        for entry in self.dependencies.split("\n\n"):
            name, _, files = entry.partition(": #deps")
            level = re.search(r"dmattn_cpu_(\w+)\.dir", name)
            instance = re.search(r"sm\d0_[a-z_]+_(\d+)[_.]", name)
            if (level and level[1] != self.level) or (instance and int(instance[1]) != self.size):
                continue
            paths = (os.path.normpath(self.build / line.strip()) for line in files.splitlines()[1:])
            if str(self.compiled / file) in paths:
                found.append(name.strip())
        return found


# The instruction set that cpp/cpu/levels.h picks.
LEVEL_PROGRAM = """
import os
flags = set(next((line for line in open("/proc/cpuinfo") if line.startswith("flags")), "").split())
needs = {"avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}, "avx2": {"avx2", "fma", "f16c"}, "baseline": set()}
print(os.environ.get("DMATTN_CPU_LEVEL") or next(level for level, needed in needs.items() if needed <= flags))
"""


class Planter:
    """Plants mutations of one area."""

    def __init__(self, base: Build, options: argparse.Namespace, area: str) -> None:
        self.base, self.options, self.is_cuda = base, options, base.size is not None
        self.family = "sm80" if area == "cuda_sm80" else "auto"
        self.compiling = threading.Semaphore(options.compilers)
        self.passing: dict[str, tuple[float, frozenset[str]]] = {}  # seconds, and functions executed, by the name of the test
        self.failing: set[str] = set()  # tests that fail without a mutation

    def plant(self, mutation: Mutation) -> tuple[str, str]:
        """What became of it, found, survived or invalid, and the test that found it or what is wrong with it."""
        with tempfile.TemporaryDirectory(dir=self.base.site.parent) as folder:
            site = Path(folder) / "site"
            shutil.copytree(self.base.site, site, copy_function=os.link)
            text = mutation.applied((self.base.source / mutation.file).read_text())
            if mutation.area == "python":
                file = site / mutation.file.removeprefix("python/")
                file.unlink()
                file.write_text(text)
            elif wrong := self.build(mutation.file, text, Path(folder)):
                return "invalid", wrong
            return self.test(site, mutation)

    def build(self, file: str, text: str, folder: Path) -> str:
        """Leaves libraries with a changed file in ``folder/site``. Returns what is wrong, if something is."""
        base, source = self.base, folder / "source"
        shutil.copytree(base.source / "cpp", source / "cpp")
        (source / file).write_text(text)
        made = {name: str(folder / f"{i}.o") for i, name in enumerate(base.objects_of(file))}
        if not made:
            return "no object file of this build includes it"

        def compile_one(name: str) -> int | None:
            command = base.commands[name].replace(f"{base.compiled}/cpp", f"{source}/cpp").replace(name, made[name])
            with self.compiling:
                return run(["sh", "-c", command + (" -Wno-error" if ".cpp.o" in name else "")], base.build)[0]

        with ThreadPoolExecutor(len(made)) as pool:
            if any(pool.map(compile_one, made)):
                return "does not compile"
        for library in (LIBRARY, *(name for name in base.commands if name.startswith("_C"))):
            target = folder / "site/dmattn" / Path(library).name
            words = [made.get(os.path.normpath(word), word) for word in base.commands[library].split(" ")]
            if not set(made.values()).isdisjoint(words):
                target.unlink()
                status, output = run(["sh", "-c", " ".join(words).replace(f"-o {library}", f"-o {target}")], base.build)
                if status != 0:
                    return f"does not link: {output[-300:]}"
        return ""

    def survey(self, drawn: list[Mutation]) -> None:
        """Runs the quick set of the test files that look for mutations, without one: what passes, how long, and what it executes."""
        names = {name for mutation in drawn for name in tests_of(mutation.file)}
        files = [path for path in (self.base.source / "tests").rglob("test_*.py") if path.name in names]
        folder = self.base.site.parent / "executed"
        folder.mkdir(exist_ok=True)

        def run_file(file: Path) -> None:
            output = folder / f"{file.stem}.json"
            if not output.exists():
                self.pytest(
                    self.base.site, [str(file.relative_to(self.base.source))], "--quick", "-p", "executed", executed=output
                )
            if output.exists():
                for name, (seconds, outcome, functions) in json.loads(output.read_text()).items():
                    if outcome == "passed":
                        self.passing[name] = seconds, frozenset(functions)
                    elif outcome == "failed":
                        self.failing.add(name)

        with ThreadPoolExecutor(self.options.jobs) as pool:
            list(pool.map(run_file, sorted(files, key=lambda path: -path.stat().st_size)))
        print(f"{len(self.passing)} tests pass without a mutation", flush=True)

    def tests_for(self, mutation: Mutation) -> list[list[str]]:
        """Tests of the quick set in the order in which they run, a first part of a few seconds and the rest. Without a survey, files."""
        if not self.passing:
            return [[file] for file in self.files_of(mutation.file)]
        named = tests_of(mutation.file)
        own = {test for test in self.passing if test.partition("::")[0].rpartition("/")[2] in named}
        function = f"{mutation.file}:{mutation.function}"
        executing = {test for test, (_, functions) in self.passing.items() if function in functions}
        ordered = sorted(own | executing, key=lambda test: (test not in executing, test not in own, self.passing[test][0]))
        sums = list(itertools.accumulate(self.passing[test][0] for test in ordered))
        first = sum(seconds < FIRST for seconds in sums)
        return [ordered[:first], ordered[first:]]

    def test(self, site: Path, mutation: Mutation) -> tuple[str, str]:
        outcome = "invalid", "no test ran"
        parts = self.tests_for(mutation)
        if self.options.full:  # all cases of the functions that run, and of the test files named for the source file
            functions = sorted({test.partition("[")[0] for part in parts for test in part})
            parts = [functions, *([test] for test in self.files_of(mutation.file))]
        for tests in filter(None, parts):
            while True:
                options = ["-x", "--quick"] if not (self.options.full or "::" in tests[0]) else ["-x"]
                status, output = self.pytest(site, tests, *options, *(f"--deselect={test}" for test in self.failing))
                failed = (re.findall(FAILED, output, re.M) or [""])[0]
                if status in (0, 5):
                    outcome = ("survived", "") if status == 0 else outcome
                    break
                if not failed and self.pytest(self.base.site, tests, *options)[0] == status:
                    sys.exit(f"{tests[0]} does not run without a mutation, either:\n{output[-4000:]}")
                if not failed or failed in self.passing or not self.fails_without(failed):
                    ended = f"no end after {self.options.timeout:.0f} s" if status is None else f"exit status {status}"
                    return "found", failed or ended
                self.failing.add(failed)
        return outcome

    def files_of(self, file: str) -> list[str]:
        paths = (path for name in tests_of(file) for path in (self.base.source / "tests").rglob(name))
        return [str(path.relative_to(self.base.source)) for path in paths]

    def fails_without(self, test: str) -> bool:
        """Whether a test that the survey did not run fails without a mutation, too."""
        return self.pytest(self.base.site, [test])[0] != 0

    def pytest(self, site: Path, tests: list[str], *options: str, executed: Path | None = None) -> tuple[int | None, str]:
        """Exit status, None when the time is up, and output, of a process that begins with torch already imported."""
        arguments = [*tests, *options, *["-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]]
        path = [str(site), str(self.base.source / "tools"), str(self.base.source / "benchmarks")]
        environment = {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "300"}
        environment["DMATTN_EXECUTED"] = str(executed)
        if self.is_cuda:
            arguments += ["-p", "reduced"]
            environment["DMATTN_REDUCED"] = f"bfloat16:{self.base.size}"
            environment["DMATTN_FAMILY"] = self.family
        with tempfile.NamedTemporaryFile("r", errors="replace") as output:
            process = FORKS.Process(
                target=run_tests, args=(self.base.source, arguments, environment, path, output.name, not self.is_cuda)
            )
            process.start()
            process.join(self.options.timeout)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)  # with all that it started
            return process.exitcode, output.read()


def run_tests(
    folder: Path, arguments: list[str], environment: dict[str, str], path: list[str], output: str, is_limited: bool
) -> None:
    """What a forked process does: pytest, on the packages in ``path``."""
    os.setsid()
    os.chdir(folder)
    os.environ.update(environment)
    sys.path[:0] = path
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if is_limited:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    import pytest

    status = pytest.main(arguments)
    sys.stdout.flush()
    os._exit(status)


def commit_of_sources() -> str:
    """What git says, or DMATTN_COMMIT where there is no git or no history."""
    known = shutil.which("git") and subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return (known.stdout.strip() if known else "") or os.environ.get("DMATTN_COMMIT", "")


def read_record(path: Path) -> dict[str, dict[str, object]]:
    """The rows of a record by the names of their mutations; none where there is no such file."""
    rows = json.loads(path.read_text())["mutations"] if path.exists() else []
    return {f"{row['file']}:{row['function']}: {row['operator']} {row['occurrence']}": row for row in rows}


def write_record(path: Path, rows: dict[str, dict[str, object]]) -> None:
    """Writes rows by area, with counts for each area. An area without rows was not run."""
    kept = sorted(rows.values(), key=lambda row: list(AREAS).index(str(row["area"])))
    outcomes = ("found", "survived", "equivalent")
    counts = {a: {o: sum((row["area"], row["outcome"]) == (a, o) for row in kept) for o in outcomes} for a in AREAS}
    areas = {area: count if any(count.values()) else "not run" for area, count in counts.items()}
    about = "Mutations that tools/planted_faults.py drew and planted, and the tests that found them."
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json({"about": about, "seed": SEED, "areas": areas, "mutations": kept}))


def plant_all(planter: Planter, drawn: list[Mutation], count: int, path: Path) -> int:
    """Plants mutations until ``count`` are found or survive, writing the record after each. Returns how many survived."""
    queue, lock = iter(drawn), threading.Lock()
    done, survivors = [0], [0]

    def take() -> Mutation | None:
        with lock:
            return next(queue, None) if done[0] < count else None

    def work() -> None:
        while mutation := take():
            began = time.monotonic()
            known = EQUIVALENT.get(mutation.name)
            outcome, detail = ("equivalent", known[1]) if known and known[0] == mutation.edit else planter.plant(mutation)
            if outcome == "survived" and UNFOUND.get(mutation.name, ("",))[0] == mutation.edit:
                detail = UNFOUND[mutation.name][1]
            row = {name: getattr(mutation, name) for name in ("area", "file", "function", "operator", "occurrence", "edit")}
            row |= {
                "outcome": outcome,
                "found_by": detail,
                "seconds": round(time.monotonic() - began),
                "commit": commit_of_sources(),
            }
            with lock:
                print(f"{outcome:10} {row['seconds']:4} s  {mutation.name}  {mutation.edit}  <- {detail}", flush=True)
                if outcome != "invalid":
                    done[0] += 1
                    survivors[0] += outcome == "survived"
                    write_record(path, read_record(path) | {mutation.name: row})

    with ThreadPoolExecutor(planter.options.jobs) as pool:
        try:
            for future in [pool.submit(work) for _ in range(planter.options.jobs)]:
                future.result()
        finally:
            done[0] = count  # so that Ctrl-C waits only for those that are planted
    return survivors[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--area", action="append", choices=AREAS, help="may be given again; default: python and cpu")
    parser.add_argument("--count", type=int, default=50, help="mutations of each area")
    parser.add_argument("--match", default="", help="mutations whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the sample and plant nothing")
    parser.add_argument("--record", type=Path, default=RECORD, help="JSON that outcomes are added to")
    parser.add_argument("--new", action="store_true", help="only mutations that the record does not have")
    parser.add_argument("--unfound", action="store_true", help="only mutations that the record has as survived")
    parser.add_argument("--full", action="store_true", help="all cases of every test, not at most two")
    parser.add_argument(
        "--survey", action="store_true", help="run the quick set first, so that tests come in the best order: for many mutations"
    )
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which tests count as failed")
    parser.add_argument("--jobs", type=int, default=1, help="mutations planted side by side")
    parser.add_argument("--compilers", type=int, default=os.cpu_count() or 1, help="files compiled side by side")
    parser.add_argument("--threads", type=int, default=1, help="threads of each test process")
    parser.add_argument(
        "--size", type=int, default=64, choices=(64, 128, 256), help="head size of the CUDA kernels that are built"
    )
    parser.add_argument("--arch", default="90a-real", help="what CUDA code is compiled for")
    parser.add_argument("--build", type=Path, help="a folder in which these sources have been built without CUDA: taken as it is")
    parser.add_argument("--work", type=Path, help="folder to build in and to leave behind; default: a temporary one")
    options = parser.parse_args()
    options.area = options.area or ["python", "cpu"]
    survivors = 0
    with tempfile.TemporaryDirectory() as temporary:
        work, bases = (options.work or Path(temporary)).resolve(), {}
        os.environ["OMP_NUM_THREADS"] = str(options.threads)  # before torch is imported
        for area in options.area:
            drawn = [m for m in sample(mutations_of(area)) if options.match in m.name]
            known = read_record(options.record)
            if options.new:
                drawn = [m for m in drawn if m.name not in known]
            if options.unfound:
                drawn = [m for m in drawn if known.get(m.name, {}).get("outcome") == "survived"]
            if options.list:
                print("\n".join(f"{m.name}  {m.edit}" for m in drawn[: options.count]))
                continue
            size = options.size if area.startswith("cuda") else None
            if size not in bases:
                bases[size] = Build(work / f"{size or 'cpu'}", size, options.arch, options.compilers, options.build)
            planter = Planter(bases[size], options, area)
            if options.survey:
                planter.survey(drawn[: options.count])
            survivors += plant_all(planter, drawn, options.count, options.record)
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
