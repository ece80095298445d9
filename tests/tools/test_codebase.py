"""Habits of this code base that a program can watch; they need the checkout, and parts of them readelf or nm."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import dmattn
import pytest
import torch
from dmattn import fake

ROOT = Path(__file__).parents[2]


def tracked(*patterns: str) -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def output_of(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def schema_names() -> set[str]:
    return set(re.findall(r'm\.def\(\s*"(\w+)\(', (ROOT / "cpp/schema.cpp").read_text()))


def test_one_schema_block_in_one_file():
    """Blocks are those of cpp/library.h, because torch's own would not register in another namespace (docs/install.md)."""
    files = {path.name: path.read_text() for path in tracked("cpp")}
    blocks = {name: len(re.findall(r"^DMATTN_OPS\(", text, re.M)) for name, text in files.items()}
    assert {name: count for name, count in blocks.items() if count} == {"schema.cpp": 1}
    assert not [name for name, text in files.items() if re.search(r"^STABLE_TORCH_LIBRARY", text, re.M)]


def test_every_op_has_a_fake_an_opcheck_and_a_refusal():
    names = schema_names()
    checked = set(re.findall(r"opcheck\(\s*ops\.(\w+)\.default", (ROOT / "tests/ops/test_registration.py").read_text()))
    assert sorted(fake.OPS) == sorted(names)
    assert checked == names
    for name in names:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dmattn::{name}", "CPU")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dmattn::{name}", "CompositeExplicitAutograd")


# A cache in a graph is written where it is.
CHANGES_ITS_ARGUMENTS = {"cache_update", "cache_step", "cache_extend", "cache_rewind"}


def test_ops_are_functional_and_take_no_lists():
    for name in schema_names():
        schema = str(getattr(torch.ops.dmattn, name).default._schema)
        assert ("!" in schema) == (name in CHANGES_ITS_ARGUMENTS)
        assert "[]" not in schema
        assert "*" not in schema


def test_the_specification_is_short_and_calls_no_kernel():
    source = (ROOT / "python/dmattn/reference.py").read_text()
    assert len(source.splitlines()) < 80
    imported = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.name for node in imported if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in imported if isinstance(node, ast.ImportFrom)}
    assert modules <= {"__future__", "collections.abc", "torch"}
    assert "torch.ops" not in source


def included(path: Path, seen: set[Path]) -> set[str]:
    """Everything a file includes, through our own headers."""
    seen.add(path)
    found = set()
    for kind, name in re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)', path.read_text(), re.M):
        ours = (path.parent / name).resolve()
        if kind == '"' and ours.is_file():
            if ours not in seen:
                found |= included(ours, seen)
        else:
            found.add(name)
    return found


def test_no_torch_below_the_plain_data_border():
    below = [
        ROOT / "cpp/params.h",
        ROOT / "cpp/cpu/kernels.h",
        ROOT / "cpp/cpu/kernels.cpp",
        *tracked("cpp/cuda/**/*.cu", "cpp/cuda/**/*.cuh"),
    ]
    for path in below:
        wrong = [name for name in included(path, set()) if name.startswith(("torch/", "ATen/", "c10/"))]
        assert not wrong, f"{path.relative_to(ROOT)} includes {wrong}"


def test_plans_are_made_without_torch_and_cuda():
    """They are part of every build, and tested without a GPU."""
    files = tracked("cpp/cuda/host/*")
    assert ROOT / "cpp/cuda/host/plan.h" in files
    for path in files:
        system = {name for name in included(path, set()) if name != "instance_rows.h"}
        assert not [name for name in system if "/" in name or name.endswith(".h")], f"{path.relative_to(ROOT)} includes {system}"


def test_instruction_set_objects_export_their_table_only():
    """A weak symbol compiled for AVX-512 could be the one the linker keeps for everybody."""
    objects = [path for path in ROOT.glob("build/**/dmattn_cpu_*.dir/**/*.o") if "asan" not in str(path)]
    if not objects:
        pytest.skip("no build tree at hand")
    for path in objects:
        shared = [
            line.split()[-1]
            for line in output_of("nm", "--defined-only", "--extern-only", str(path)).splitlines()
            if line.strip()
        ]
        weak = [line for line in output_of("nm", str(path)).splitlines() if re.search(r" [VWu] ", line)]
        defined_weak = [line for line in weak if line.split()[0] not in ("w", "v", "W", "V")]
        assert not defined_weak, f"{path.name}: weak symbols {defined_weak[:5]}"
        assert all("kKernels" in name for name in shared), f"{path.name} exports {shared[:5]}"


def test_one_version_in_one_place():
    quoted = re.compile(rf'["\']{re.escape(dmattn.__version__)}["\']')
    stated = [path for path in tracked("*.py", "*.toml", "*.txt", "*.cmake", "*.cpp", "*.h") if quoted.search(path.read_text())]
    assert [str(path.relative_to(ROOT)) for path in stated] == ["python/dmattn/_version.py"]


def test_no_paths_of_a_machine():
    places = re.compile(r"(/home/|/root/|/Users/|/mnt/|/work" + r"/|\b[A-Z]:\\\\Users)")
    text = (".py", ".h", ".cpp", ".cu", ".cuh", ".cmake", ".txt", ".toml", ".md", ".sh", ".yml", ".yaml", "")
    for path in tracked():
        if path.suffix in text and path != Path(__file__):
            found = places.search(path.read_text(errors="ignore"))
            assert not found, f"{path.relative_to(ROOT)}: {found.group(0)}"


def test_the_ops_library_needs_libtorch_and_no_other_torch_or_cuda_library():
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", output_of("readelf", "-d", dmattn.library_path()))
    assert [name for name in needed if re.search(r"torch|c10|cuda|nv|gomp|omp", name)] == ["libtorch.so"]
    assert not re.search(r"RPATH|RUNPATH", output_of("readelf", "-d", dmattn.library_path()))


def test_the_stable_abi_audit_passes():
    program = Path(sys.executable).parent / "torch-abi-audit"
    if not program.is_file():
        pytest.skip("torch-abi-audit is not installed")
    audited = subprocess.run([str(program), "--check", "both", dmattn.library_path()], capture_output=True, text=True)
    assert audited.returncode == 0, audited.stdout + audited.stderr


def test_every_file_opens_by_saying_what_it_is():
    for path in tracked("*.py", "*.h", "*.cpp", "*.cu", "*.cuh", "*.cmake", "*.sh"):
        lines = [
            line for line in path.read_text().splitlines() if line.strip() and not re.match(r"#!|# ruff:|#pragma once", line)
        ]
        opens = {".py": ('"""', 'r"""')}.get(path.suffix, ("//", "#"))
        assert lines, f"{path.relative_to(ROOT)} is empty"
        assert lines[0].startswith(opens), f"{path.relative_to(ROOT)} opens with: {lines[0]}"


def test_a_tensor_story_stands_above_each_kernel():
    """What comes in, what leaves, and who computes which part."""
    count = 0
    for path in tracked("cpp/cuda/**/*.cu", "cpp/cuda/**/*.cuh"):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            if re.match(r"(?:static )?__global__ ", line):
                above = [before for before in lines[: number - 1] if not before.startswith("template <")]
                assert above[-1].startswith("// "), f"{path.relative_to(ROOT)}:{number}: {line}"
                count += 1
    assert count > 20


# Files ---------------------------------------------------------------------------------------------------------------------------------


def test_both_families_have_the_same_stems_for_the_same_jobs():
    def stems(folder: str) -> set[str]:
        return {path.stem for path in tracked(f"cpp/cuda/{folder}") if path.parent == ROOT / "cpp/cuda" / folder}

    assert stems("sm80") & stems("sm90") == {"dispatch", "tiles"}
    assert stems("sm90/forward") & stems("sm90/backward") == {"bias", "epilogue", "kernel", "shared"}


def test_launches_check_how_many_blocks_they_have():
    """grid_of says so where a product of batches and heads does not fit; a cast would start some of the blocks."""
    launches = 0
    for folder in ("sm80", "common", "key_lists", "select"):
        for path in tracked(f"cpp/cuda/{folder}"):
            source = path.read_text()
            unchecked = re.findall(
                r"(?:<<<|dim3\(|= |, )static_cast<unsigned>\([^;]*\b(?:batch|batches|batch_heads|blocks|rows)\b[^;]*;", source
            )
            assert not unchecked, f"{path.relative_to(ROOT)}: {unchecked}"
            launches += source.count("grid_of(")
    assert launches > 20


def test_ops_have_the_same_stems_in_every_room():
    for stem in {"forward", "backward", "select", *(name.split("_")[0] for name in schema_names())}:
        for name in (f"cpp/cpu/{stem}.cpp", f"cpp/cuda/{stem}.cpp"):
            assert (ROOT / name).is_file(), f"expected {name}"


# Python --------------------------------------------------------------------------------------------------------------------------------


def imported_modules(path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules among these that a file imports; what it takes from a package is the package's unless it is a module itself."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in inner}
    return found & set(modules)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Names that lead back to the first of them, or none."""
    done: set[str] = set()

    def follow(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return []
        for after in sorted(graph[name]):
            found = follow(after, [*trail, name])
            if found:
                return found
        done.add(name)
        return []

    return next(filter(None, (follow(name, []) for name in sorted(graph))), [])


def test_no_import_circles():
    modules = {}
    for path in tracked("python/dmattn/*.py", "python/dmattn/**/*.py"):
        parts = path.relative_to(ROOT / "python").with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    assert len(modules) > 20
    assert circle({name: imported_modules(path, modules) for name, path in modules.items()}) == []


def test_circles_are_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_imports_stand_at_the_head_of_files():
    for path in tracked("python/*.py", "benchmarks/*.py", "docs/*.py", "examples/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = [n.lineno for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
                assert not inner, f"{path.relative_to(ROOT)}:{inner}: an import in {node.name}"


def test_comments_stand_where_the_formatter_leaves_them():
    """A comment longer than its line may grow makes the formatter wrap the code and hang the comment on a closing bracket."""
    torn = re.compile(r"^\s*(?:[)\]}]+,?|[\w.]+)\s+#(?! fmt:| noqa| type:)")
    for path in tracked("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            alone = torn.match(line) and not line.strip().startswith(
                ("else", "pass", "return", "yield", "break", "continue", "...")
            )
            assert not alone, f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def patched_settings(source: str) -> list[str]:
    """Calls in a test's source by which pytest's monkeypatch changes a setting of a module of torch's settings."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("setattr", "delattr") and node.args:
            target = node.args[0]
            named_by_text = isinstance(target, ast.Constant) and isinstance(target.value, str)
            name = str(target.value).rpartition(".")[0] if named_by_text else ast.unparse(target)
            found += [ast.unparse(node)] if re.search(r"(^|[._])config$", name) else []
    return found


def test_settings_of_torch_are_changed_by_their_own_patch():
    """``torch._dynamo.config.patch(...)`` and the like: pytest's monkeypatch leaves such a setting missing when it takes its change back."""
    found = {path.name: patched_settings(path.read_text()) for path in tracked("tests/*.py")}
    assert not {name: calls for name, calls in found.items() if calls}


def test_patched_settings_are_found():
    source = """
monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 1)
monkeypatch.setattr(peers.functorch_config, "donated_buffer", True)
monkeypatch.setattr("torch._inductor.config.fallback_random", True)
monkeypatch.delattr(config, "verbose")
monkeypatch.setattr(torch, "compile", lambda function: config)
monkeypatch.setattr("torch.compile", None)
"""
    assert len(patched_settings(source)) == 4


def own_tolerances(source: str) -> list[str]:
    """What in a test's source holds results to a number of its own: rtol and the like, and, in an assertion, a small number or so many eps."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            named = {keyword.arg for keyword in node.keywords} & {"rtol", "atol", "rel", "abs_tol", "rel_tol"}
            if named or getattr(node.func, "attr", "") == "allclose":
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Assert):
            for part in ast.walk(node.test):
                if isinstance(part, ast.Compare):
                    sides = [side.value for side in (part.left, *part.comparators) if isinstance(side, ast.Constant)]
                    # A number below every dtype's eps is no tolerance: it says that a result vanishes.
                    small = any(
                        isinstance(value, float) and torch.finfo(torch.float64).eps < abs(value) < 0.01 for value in sides
                    )
                    found += [ast.unparse(part)] if small else []
                elif isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult):
                    sides = (part.left, part.right)
                    of_eps = any(isinstance(side, ast.Attribute) and side.attr == "eps" for side in sides)
                    found += [ast.unparse(part)] if of_eps and any(isinstance(side, ast.Constant) for side in sides) else []
    return found


def test_numeric_tests_use_the_one_tolerance_rule():
    """The rule is in dmattn.testing.tolerance: no test holds results to numbers of its own."""
    found = {path.name: own_tolerances(path.read_text()) for path in tracked("tests/*/test_*.py")}
    assert not {name: places for name, places in found.items() if places}


def test_own_tolerances_are_found():
    source = """
assert torch.allclose(a, b)
assert a == approx(b, rel=2)
assert (a - b).abs().max() < 1e-3
assert error <= 4 * torch.finfo(dtype).eps * size
assert 0.02 < share < 0.5 and weight < 1e-20 and error <= tolerance.STORAGE_ULPS * torch.finfo(dtype).eps
"""
    expected = {"torch.allclose(a, b)", "approx(b, rel=2)", "(a - b).abs().max() < 0.001", "4 * torch.finfo(dtype).eps"}
    assert set(own_tolerances(source)) == expected


# Words ---------------------------------------------------------------------------------------------------------------------------------

# Names and phrases that are nobody's but were ours, and what to write. Ordinary English (a note, a turn, to say) is free.
PRIVATE_WORDS = {
    r"\bChunkNote\b": "TileDescriptor",
    r"\btake_turns\b": "wait_dq_semaphore",
    r"\btickets?\b": "tile counter",
    r"\benum class Room\b": "SmemBudget",
    r"\blet_kernel_after_come\b": "griddepcontrol_launch_dependents",
    r"\bwait_for_kernel_before\b": "griddepcontrol_wait",
    r"\bsleep_empty\b": "producer_acquire",
    r"\b_?read_anew\(": "opaque_reload",
    r"\bmailbox(es)?\b": "DSMEM exchange",
    r"\bdealt\b|\bdeals? out\b": "distributed, assigned; for tiles a static schedule",
    r"\bclass Deal\b|\bDeal\(": "ShardingPlan",
    r"\bwhat (every rank|all ranks) (has|have) said\b|\b_said\b|\bsaid: (Sequence|list)\[int\]": "metadata, call_signature",
    r"\bfore(tell|tells|told|telling)\b": "predict",
    r"\bpaid\b": "attention mass",
    r"\bpulled back\b|\bPulledBack\b": "vjp",
    r"\bpushed forward\b|\bPushedForward\b": "jvp",
    r"\btaught=(True|False|self|taught)\b|\bself\.taught\b|\blayer\.taught\b": "select_only",
    r"\b(top_k|streaming|\w+_attention|BoundedCache|DynamicMaskAttention|score_loss|convert)\([^()]*\bsink=": "sink_keys",
    r"\btimes as fast\b": "speedup over the baseline",
    r"\bwhat was expected and what came\b|\bexpected .{1,40} and what came\b": "expected vs. got",
    r"\bas it comes\b": "default",
    r"\bof the plain rate\b": "relative to the unmasked call",
    r"\brun that was not kept\b": "unrecorded: measure it, or delete the sentence",
    r"\b[Ff]airest\b": "strongest baseline",
}
# C++ has words of its own still; the changelog and the lab tell what was.
OTHER_WORDS = (
    "CHANGELOG.md",
    "cpp/",
    "research/lab/",
    "docs/generated/",
    "tests/tools/test_codebase.py",
    "tests/ops/test_renamed.py",
)


def private_words(text: str) -> list[str]:
    """The words of a text that the field has others for, each with these."""
    found = ((match.group(0), words) for pattern, words in PRIVATE_WORDS.items() for match in re.finditer(pattern, text))
    return [f"{was}: write {words}" for was, words in found]


def test_words_are_the_fields():
    wrong = {}
    for path in tracked("*.py", "*.md", "*.toml", "*.cmake", "*.sh", "*.yml"):
        name = str(path.relative_to(ROOT))
        if not name.startswith(OTHER_WORDS):
            wrong[name] = private_words(path.read_text())
    assert not {name: found for name, found in wrong.items() if found}


# Words that a reader of pages and docstrings stumbles over, in addition.
STIFF_WORDS = re.compile(r"\b(beside|anew|said|fairest|the plain rate|as it comes|what came)\b")


def test_pages_and_docstrings_are_in_plain_words():
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in tracked("docs/*.md", "README.md")}
    for path in tracked("python/*.py"):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
        texts[str(path.relative_to(ROOT))] = "\n".join(ast.get_docstring(node) or "" for node in nodes)
    assert len(texts) > 120
    assert not {name: found for name, text in texts.items() if (found := STIFF_WORDS.findall(text) + private_words(text))}


def test_private_words_are_found_and_english_is_not():
    private = (
        "The scores foretell. self.taught top_k(scores, sink=3) class Deal: Heads are dealt out. 3 times as fast. said: list[int]"
    )
    assert len(private_words(private)) == 7
    assert (
        private_words("Note that it is your turn to say what came: sinks=3, sink_keys=2, a kitchen sink, as it is said to be")
        == []
    )


# Functions -----------------------------------------------------------------------------------------------------------------------------

MOST_LINES = 120


def without_comments(source: str) -> str:
    """C++ with its comments, strings and preprocessor lines blanked out, line by line as long as before."""
    blanked = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|^[ \t]*#(?:\\\n|[^\n])*', re.S | re.M)
    return blanked.sub(lambda found: "\n" * found.group(0).count("\n"), source)


def functions_of(source: str) -> list[tuple[str, int]]:
    """(name, lines) of the functions that C++ or CUDA source defines, methods too; lambdas are part of the function around them."""
    found: list[tuple[str, int]] = []
    text = without_comments(source)
    open_functions: list[tuple[str, int, int]] = []  # name, first line, depth
    depth, begin = 0, 0
    for at, letter in enumerate(text):
        if letter == "{":
            head = text[begin:at].strip()
            named = re.search(r"(\w+)\s*\((?:[^()]|\([^()]*\))*\)\s*(?:const|noexcept|override|->[\w\s:<>,*&]+|:[^{;]*)*$", head)
            if named and not open_functions and not re.match(r"(?:namespace|struct|class|enum|union)\b", head):
                first = at - len(text[begin:at].lstrip())
                open_functions.append((named.group(1), text.count("\n", 0, first), depth))
            depth += 1
        elif letter == "}":
            depth -= 1
            if open_functions and open_functions[-1][2] == depth:
                name, first_line, _ = open_functions.pop()
                found.append((name, text.count("\n", 0, at) - first_line + 1))
        if letter in "{};":
            begin = at + 1
    return found


def test_functions_of_cpp_are_found():
    source = """
    // void none() {
    namespace a {
    template <int n>
    __global__ void __launch_bounds__(n, 1) kernel(const Params p, int (*f)(int)) {
      auto inner = [&](int x) { return x; };  // {
      if (x) {
      }
    }
    struct B {
      B(int x) : y(x), z(x) {
      }
      int get() const {
        return "{"[0];
      }
    };
    const int table[] = {1, 2};
    }
    """
    assert functions_of(source) == [("kernel", 6), ("B", 2), ("get", 3)]


def test_functions_are_short():
    long = set()
    for path in tracked("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                long |= {f"{path.relative_to(ROOT)}: {node.name}"} if lines > MOST_LINES else set()
    count = 0
    for path in tracked("cpp/*.h", "cpp/*.cpp", "cpp/*.cu", "cpp/*.cuh"):
        functions = functions_of(path.read_text())
        count += len(functions)
        long |= {f"{path.relative_to(ROOT)}: {name}" for name, lines in functions if lines > MOST_LINES}
    assert count > 300
    assert long == set()
