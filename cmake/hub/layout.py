"""Lays out an installed dmattn as a kernel for the Hugging Face kernels hub, and checks the result. docs/install.md says what for.

    python cmake/hub/layout.py build/hub                    # one variant, of the backend that the ops library was built for
    python cmake/hub/layout.py build/hub --backend cu130 cpu
    python cmake/hub/layout.py build/hub --release          # what the hub requires of binaries is an error, too

Writes OUT/build.toml, OUT/CARD.md and, for each backend, OUT/build/torch-stable-abi210-BACKEND-ARCHITECTURE-linux/.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dmattn
import tomllib

HERE = Path(__file__).parent
PACKAGE = Path(dmattn.__file__).parent
# What a kernel may not import or does not need: it gets the standard library, torch and its own files.
LEFT_OUT = {"__main__.py", "_C.pyi", "integrations", "shape.py", "shape_times.py", "testing", "__pycache__"}
OTHER_NAMESPACES = ("_distributed", "_nn")  # of ops beside torch.ops.dmattn, what follows in their names
MARK = b"dmattn-ops-namespace="  # in the ops library, before the namespace of its ops; cpp/library.cpp
SLOT_BYTES = 96  # of the mark, the namespace and the zeros behind it
# The newest symbol versions that manylinux_2_28 has.
NEWEST_SYMBOLS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
ONE_LEVEL_DOWN = '''"""The names of the package one level up, for versions of `kernels` that look for them here."""

import importlib.util
import sys
from pathlib import Path

_package = sys.modules.get("{name}")
if _package is None:
    _spec = importlib.util.spec_from_file_location("{name}", Path(__file__).parent.parent / "__init__.py")
    _package = sys.modules["{name}"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_package)
__all__ = list(_package.__all__)
globals().update({{each: getattr(_package, each) for each in __all__}})
'''
# Loads a variant as the package `kernels` does, where no other dmattn can be imported, and runs attention forward and backward.
TRY = """
import importlib, importlib.util, json, sys
from pathlib import Path

class NoOther:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "dmattn":
            raise ImportError(f"{name}: a kernel of the hub imports its own files only")

sys.meta_path.insert(0, NoOther())
import torch
variant = Path(sys.argv[1])
name = json.loads((variant / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
kernel = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
named = {op for op in torch._C._dispatch_get_all_op_names() if op.startswith((name, "dmattn"))}
assert not any(op.startswith("dmattn") for op in named), named
ops = {op for op in named if op.startswith(name + "::")}
assert ops and all(torch._C._dispatch_has_kernel_for_dispatch_key(op, "CPU") for op in ops), ops
q, k, v = (torch.randn(1, 2, 50, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
scores = torch.rand(1, 2, 50, dtype=torch.float64, requires_grad=True)
out = kernel.dynamic_mask_attention(q, k, v, scores, 8)
mask = kernel.IntervalMask.top_k(scores, 8)
reference = importlib.import_module(name + ".reference")
expected, _ = reference.attention(q, k, v, mask.to_bool(50, 50), key_bias=scores, is_causal=True)
torch.testing.assert_close(out, expected)
ours = torch.autograd.grad(out.square().sum(), (q, k, v, scores))
torch.testing.assert_close(ours, torch.autograd.grad(expected.square().sum(), (q, k, v, scores)))
meta = kernel.attention(*(each.detach().to("meta") for each in (q, k, v)))
assert meta.shape == out.shape and meta.is_meta
print(f"{variant.name}: {len(ops)} ops in torch.ops.{name}")
"""


def python_files() -> dict[str, str]:
    """The package's Python, by path within it."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(PACKAGE).parts)]
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in paths}


def renamed(source: str, path: str, name: str) -> str:
    """A file's Python as part of a package that may have any name: relative imports, and ops and registered names under ``name``."""
    dots = "." * (path.count("/") + 1)
    source = re.sub(r"^(\s*)from dmattn(?:\.([\w.]+))? import", rf"\1from {dots}\2 import", source, flags=re.M)
    source = re.sub(r"\btorch\.ops\.dmattn(?=_|\b)", f"torch.ops.{name}", source)
    # What is registered by name: ops, types of masks. Names of C functions also begin with dmattn_, and stay.
    return re.sub(rf"""(?<=["'])dmattn(?=(?:{"|".join(OTHER_NAMESPACES)})?(?:["'.]|::))""", name, source)


def renamed_library(library: bytes, name: str) -> bytes:
    """The ops library with another namespace for its ops, written over the one that it has."""
    if library.count(MARK) != 1:
        raise ValueError(f"the ops library: expected {MARK.decode()} in it once, got it {library.count(MARK)} times")
    slot = MARK + name.encode()
    if len(slot) >= SLOT_BYTES:
        raise ValueError(f"namespace: expected at most {SLOT_BYTES - len(MARK) - 1} characters, got {name}")
    at = library.index(MARK)
    return library[:at] + slot.ljust(SLOT_BYTES, b"\0") + library[at + SLOT_BYTES :]


def architectures(listed: str) -> list[str]:
    """CMake's names of CUDA targets as the hub has them: "80-real, 90a-real, 80-virtual" gives 8.0, 8.0+PTX, 9.0a."""
    found = re.findall(r"(\d+)(\d)([af]?)-(real|virtual)", listed)
    return sorted({f"{major}.{minor}{kind}" + ("+PTX" if code == "virtual" else "") for major, minor, kind, code in found})


def own_backend() -> str:
    """What the ops library was built for, as the hub has it: "cpu", or "cu130" for CUDA 13.0."""
    version = dmattn.build_info()["cuda"]
    return "cu" + "".join(version.split(".")[:2]) if version else "cpu"


def lay_out(out: Path, backend: str) -> Path:
    """Writes the variant of one backend, and what all variants share, below ``out``. Returns the variant's folder."""
    info, general = dmattn.build_info(), tomllib.loads((HERE / "build.toml").read_text())["general"]
    kind = "cpu" if backend == "cpu" else "cuda"
    if kind == "cuda" and not info["cuda"]:
        raise ValueError(f"backend: expected cpu, because the ops library was built without CUDA, got {backend}")
    files, library = python_files(), Path(dmattn.library_path()).read_bytes()
    contents = hashlib.sha256(b"".join([library, *(text.encode() for text in files.values())])).hexdigest()
    name = f"_dmattn_{kind}_{contents[:12]}"  # another name for other contents: several versions can be loaded at once
    target = info["stable_abi_target"].replace(".", "")
    variant = out / "build" / f"torch-stable-abi{target}-{backend}-{platform.machine()}-linux"
    shutil.rmtree(variant, ignore_errors=True)
    for path, text in files.items():
        place = variant / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(renamed(text, path, name))
    (variant / Path(dmattn.library_path()).name).write_bytes(renamed_library(library, name))
    (variant / "dmattn").mkdir()
    (variant / "dmattn" / "__init__.py").write_text(ONE_LEVEL_DOWN.format(name=name))
    about = {"type": kind} | ({"archs": architectures(info["cuda_archs"])} if kind == "cuda" else {})
    metadata = {key: general[key] for key in ("name", "version", "license")}
    metadata |= {"id": name, "python-depends": [], "backend": about, "digest": {"algorithm": "sha256", "files": digests(variant)}}
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    for shared in ("build.toml", "CARD.md"):
        shutil.copy(HERE / shared, out / shared)
    return variant


def files_of(variant: Path) -> list[Path]:
    """The files of a variant that its digest covers."""
    found = [path for path in sorted(variant.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    return [path for path in found if path != variant / "metadata.json"]


def digests(variant: Path) -> dict[str, str]:
    """SHA-256 of each file, in base64."""
    return {
        path.relative_to(variant).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in files_of(variant)
    }


def wrong_imports(variant: Path) -> Iterator[str]:
    """Imports of anything but the standard library, torch, and a file of the variant."""
    for path in variant.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                wrong = [alias.name for alias in node.names if not is_allowed(alias.name)]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                wrong = [] if is_allowed(node.module or "") else [node.module or ""]
            elif isinstance(node, ast.ImportFrom):
                wrong = unknown_names(path, node)
            else:
                continue
            yield from (f"{path.relative_to(variant)}:{node.lineno}: {each}" for each in wrong)


def is_allowed(module: str) -> bool:
    return module.partition(".")[0] in {*sys.stdlib_module_names, "torch"}


def unknown_names(path: Path, node: ast.ImportFrom) -> list[str]:
    """Modules that a relative import names and that are not there."""
    folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
    if folder.with_suffix(".py").is_file():
        return []
    if not (folder / "__init__.py").is_file():
        return [f"{'.' * node.level}{node.module or ''}"]
    defined = (folder / "__init__.py").read_text()
    modules = {each.stem for each in folder.iterdir()}
    return [alias.name for alias in node.names if alias.name not in modules and not re.search(rf"\b{alias.name}\b", defined)]


def newer_symbols(library: Path) -> list[str]:
    """Symbol versions that a library needs and manylinux_2_28 does not have, "GLIBC_2.34" for one."""
    listed = subprocess.run(["readelf", "-V", str(library)], capture_output=True, text=True, check=True).stdout
    needed = {(kind, tuple(map(int, number.split(".")))) for kind, number in re.findall(r"Name: ([A-Z]+)_([\d.]+)", listed)}
    return sorted(
        f"{kind}_{'.'.join(map(str, number))}" for kind, number in needed if number > NEWEST_SYMBOLS.get(kind, (sys.maxsize,))
    )


def check(variant: Path, release: bool = False) -> str:
    """What a variant is, in a line.

    Raises:
        ValueError: something in it is not as the hub wants it; says what.
    """
    metadata = json.loads((variant / "metadata.json").read_text())
    if metadata["digest"]["files"] != digests(variant):
        raise ValueError(f"{variant.name}: expected the files that metadata.json has digests of, got others")
    wrong = list(wrong_imports(variant))
    if wrong:
        raise ValueError(f"{variant.name}: expected imports of the standard library, torch and own files, got {'; '.join(wrong)}")
    newer = newer_symbols(next(variant.glob("*.so")))
    if newer and release:
        raise ValueError(f"{variant.name}: expected no symbols newer than manylinux_2_28 has, got {', '.join(newer)}")
    tried = subprocess.run([sys.executable, "-B", "-c", TRY, str(variant)], capture_output=True, text=True)
    if tried.returncode != 0:
        raise ValueError(f"{variant.name}: expected to load and to compute, got\n{tried.stderr}")
    return tried.stdout.strip() + (f"; not for upload, because the library needs {', '.join(newer)}" if newer else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("out", type=Path, help="where to")
    parser.add_argument("--backend", nargs="+", default=[own_backend()], metavar="NAME", help="cpu, cu130, ...")
    parser.add_argument("--release", action="store_true", help="fail where the library needs a newer system than the hub allows")
    given = parser.parse_args()
    for backend in given.backend:
        print(check(lay_out(given.out, backend), given.release))


if __name__ == "__main__":
    main()
