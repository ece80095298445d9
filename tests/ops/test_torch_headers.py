"""The C functions of torch that cpp/ calls by name are declared and exported by the installed torch as they are called.

torch promises to keep them. Where a release breaks the promise, this test says which function, before a build or a user finds out.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
CPP = [path for path in (ROOT / "cpp").rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
TORCH = Path(torch.__file__).parent
HEADERS = [
    TORCH / "include/torch/csrc" / name for name in ("inductor/aoti_torch/c/shim.h", "stable/c/shim.h", "stable/library.h")
]
LIBRARY, ERROR = "TorchLibraryHandle", "AOTITorchError"
# What each returns, and what it takes.
EXPECTED = {
    "aoti_torch_library_init_impl": f"{ERROR}(const char*, const char*, const char*, uint32_t, {LIBRARY}*)",
    "aoti_torch_library_init_fragment": f"{ERROR}(const char*, const char*, uint32_t, {LIBRARY}*)",
    "aoti_torch_library_def": f"{ERROR}({LIBRARY}, const char*)",
    "torch_library_impl": f"{ERROR}({LIBRARY}, const char*, void(*)(StableIValue*, uint64_t, uint64_t), uint64_t)",
    "aoti_torch_delete_library_object": f"{ERROR}({LIBRARY})",
    "aoti_torch_empty_strided": (
        f"{ERROR}(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, AtenTensorHandle*)"
    ),
    **{
        f"aoti_torch_dtype_{name}": "int32_t()"
        for name in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8")
    },
    "aoti_torch_get_current_cuda_stream": f"{ERROR}(int32_t, void**)",
}
OF_CUDA = "aoti_torch_get_current_cuda_stream"  # exported by the torch that has CUDA; cpp/cuda/runtime.h asks whether it is there


def without_comments(source: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.S)


def called(sources: list[str]) -> set[str]:
    """The C functions of torch that sources name."""
    return {name for text in sources for name in re.findall(r"\b(?:aoti_torch|torch_library)_\w+", without_comments(text))}


def declared(name: str, header: str) -> str | None:
    """A function's result and the types of its parameters as a header declares them, without names; None where it does not."""
    found = re.search(rf"AOTI_TORCH_EXPORT\s+(\w+)\s+{name}\((.*?)\);", without_comments(header), re.S)
    if found is None:
        return None
    function_pointers = re.sub(r"\(\*\w+\)", "(*)", found[2])
    types = re.sub(r"(?<=[\w*&)]) +\w+\s*(?=,|$)|(?<=\*)\w+\s*(?=,|$)", "", re.sub(r"\s+", " ", function_pointers).strip())
    return f"{found[1]}({types})".replace("void (*)", "void(*)").replace(" *", "*")


def test_a_declaration_is_read_without_its_names():
    header = """
        // AOTI_TORCH_EXPORT int other(int);
        AOTI_TORCH_EXPORT AOTITorchError f(
            Handle self,
            const char* name,  // a comment
            void (*fn)(StableIValue*, uint64_t, uint64_t),
            int64_t *sizes);
        AOTI_TORCH_EXPORT int32_t g();
    """
    assert declared("f", header) == "AOTITorchError(Handle, const char*, void(*)(StableIValue*, uint64_t, uint64_t), int64_t*)"
    assert declared("g", header) == "int32_t()"
    assert declared("other", header) is None


def test_every_function_that_is_called_is_in_the_table():
    assert len(CPP) > 50
    assert called([path.read_text() for path in CPP]) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_installed_torch_declares_it_as_it_is_called(name):
    found = next(filter(None, (declared(name, path.read_text()) for path in HEADERS)), None)
    assert found == EXPECTED[name], (
        f"torch {torch.__version__} declares {name} as {found}, and cpp/ calls it as {EXPECTED[name]}: "
        "change the call for torches from this one on, and this table"
    )


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - {OF_CUDA}))
def test_the_installed_torch_exports_it(name):
    library = ctypes.CDLL(str(TORCH / "lib/libtorch_cpu.so"))
    assert hasattr(library, name), f"torch {torch.__version__} exports no {name}, which the ops library calls"


def test_kernels_are_boxed_by_a_public_macro_and_nothing_else_is_taken_from_its_details():
    """torch::stable::detail may change with any release. What TORCH_BOX becomes is compiled into the ops library."""
    assert re.search(r"#define TORCH_BOX\(func\)", HEADERS[2].read_text()), f"torch {torch.__version__} has no TORCH_BOX(func)"
    named = [path.name for path in CPP if re.search(r"stable::detail|\bdetail::", without_comments(path.read_text()))]
    assert not named
