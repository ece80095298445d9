"""dmattn as a kernel for the Hugging Face kernels hub: what cmake/hub/layout.py lays out loads under any name, and its check finds faults."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import dmattn
import pytest

pytest.importorskip("tomllib")
ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("hub_layout", ROOT / "cmake/hub/layout.py")
assert spec is not None
assert spec.loader is not None
layout = importlib.util.module_from_spec(spec)
spec.loader.exec_module(layout)

LOAD = """
import importlib.util, json, sys
from pathlib import Path
def load(folder, within=""):
    name = json.loads((Path(folder) / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name + within.replace("/", "_"), Path(folder) / within / "__init__.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return name, module
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def variant(out):
    return layout.lay_out(out, "cpu")


@pytest.fixture(scope="module")
def newer(tmp_path_factory):
    """The variant of a version with other contents."""
    files = layout.python_files()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "python_files", lambda: files | {"sizes.py": files["sizes.py"] + "\nNEWER = True\n"})
        return layout.lay_out(tmp_path_factory.mktemp("newer"), "cpu")


def metadata_of(variant):
    return json.loads((variant / "metadata.json").read_text())


def test_a_variant_loads_and_computes_where_no_other_dmattn_can_be_imported(variant):
    schema = (ROOT / "cpp/schema.cpp").read_text()
    count = len(re.findall(r"m\.def\(", schema))
    name = metadata_of(variant)["id"]
    assert layout.check(variant).startswith(f"{variant.name}: {count} ops in torch.ops.{name}")


def test_the_tree_is_as_the_hub_wants_it(out, variant):
    assert re.fullmatch(r"torch-stable-abi210-cpu-\w+-linux", variant.name)
    assert variant.parent == out / "build"
    assert {path.name for path in out.iterdir()} == {"build", "build.toml", "CARD.md"}
    about = metadata_of(variant)
    assert re.fullmatch(r"_dmattn_cpu_[0-9a-f]{12}", about["id"])
    assert set(about) == {"name", "id", "version", "license", "python-depends", "backend", "digest"}
    assert about["backend"] == {"type": "cpu"}
    assert {"__init__.py", "dmattn/__init__.py", "attention.py", "masks/interval.py"} < set(about["digest"]["files"])
    assert not any(path.startswith(("testing", "integrations", "__main__", "_C")) for path in about["digest"]["files"])


@pytest.mark.long
def test_two_versions_load_beside_an_installed_dmattn(run_python, variant, newer):
    """The first as older loaders do it, who look for the package one level down."""
    assert metadata_of(variant)["id"] != metadata_of(newer)["id"]
    program = LOAD + (
        "import torch\nq, scores = torch.randn(1, 2, 40, 16), torch.rand(1, 2, 40)\n"
        "for folder, within in zip(sys.argv[1:], ('dmattn', '')):\n"
        "    name, kernel = load(folder, within)\n"
        "    assert kernel.library_path().startswith(folder) and sorted(kernel.__all__) == sorted(sys.modules[name].__all__)\n"
        "    assert 'dmattn' not in sys.modules or kernel.IntervalMask is not dmattn.IntervalMask\n"
        "    out = kernel.dynamic_mask_attention(q, q, q, scores, 8)\n"
        "    traced = torch.compile(kernel.attention, fullgraph=True, backend='eager')(q, q, q, kernel.IntervalMask.causal(40))\n"
        "    import dmattn\n"
        "    assert torch.equal(out, dmattn.dynamic_mask_attention(q, q, q, scores, 8))\n"
        "    assert torch.equal(traced, dmattn.attention(q, q, q, is_causal=True))\n"
        "    print(name, hasattr(sys.modules[name + '.sizes'], 'NEWER'))\n"
    )
    finished = run_python("-W", "ignore", "-c", program, str(variant), str(newer))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == [f"{metadata_of(variant)['id']} False", f"{metadata_of(newer)['id']} True"]
    assert "not used" not in finished.stderr


def test_the_kernels_package_takes_it(run_python, out, variant):
    pytest.importorskip("kernels")
    program = (
        "import sys, kernels, torch\nfrom pathlib import Path\nfrom kernels._rust import Build, Digest, DigestAlgorithm, Metadata\n"
        "out, variant = map(Path, sys.argv[1:])\n"
        "print(Build.open(out).general)\n"
        "about = Metadata.read_from_file(variant / 'metadata.json')\n"
        "about.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))\n"
        "kernel = kernels.get_local_kernel(out)\nassert kernel.__name__ == about.id\n"
        "q = torch.randn(1, 1, 5, 8)\nassert kernel.attention(q, q, q).shape == q.shape\n"
    )
    finished = run_python("-c", program, str(out), str(variant))
    assert finished.returncode == 0, finished.stderr


# What the check finds --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(variant, tmp_path):
    return Path(shutil.copytree(variant, tmp_path / variant.name, ignore=shutil.ignore_patterns("__pycache__")))


def renew_digests(variant):
    (variant / "metadata.json").write_text(
        json.dumps(metadata_of(variant) | {"digest": {"algorithm": "sha256", "files": layout.digests(variant)}})
    )


def test_a_changed_file_is_found(copy):
    (copy / "sizes.py").write_text((copy / "sizes.py").read_text() + "\n")
    with pytest.raises(ValueError, match=r"expected the files that metadata\.json has digests of, got others"):
        layout.check(copy)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import numpy", "numpy"),
        ("from dmattn import sizes", "dmattn"),
        ("from .nowhere import x", r"\.nowhere"),
        ("from .masks import nothing", "nothing"),
    ],
)
def test_a_foreign_import_is_found(copy, line, found):
    (copy / "sizes.py").write_text(f"{line}\n")
    renew_digests(copy)
    with pytest.raises(ValueError, match=rf"expected imports of .* own files, got sizes\.py:1: {found}"):
        layout.check(copy)


def test_ops_under_another_name_are_found(copy):
    """A library whose namespace was not overwritten registers torch.ops.dmattn."""
    shutil.copy(dmattn.library_path(), copy)
    renew_digests(copy)
    with pytest.raises(ValueError, match="expected to load and to compute, got"):
        layout.check(copy)


def test_a_library_for_newer_systems_is_not_for_release(variant, monkeypatch):
    monkeypatch.setitem(layout.NEWEST_SYMBOLS, "GLIBC", (2, 2))
    with pytest.raises(ValueError, match=r"expected no symbols newer than manylinux_2_28 has, got .*GLIBC_2\.\d+"):
        layout.check(variant, release=True)


# Parts ------------------------------------------------------------------------------------------------------------------------------


def test_names_are_changed_where_they_name_the_package():
    source = (
        "from dmattn import ops, sizes\n    from dmattn.masks.block import BlockMask\n"
        'torch.ops.dmattn.forward(x); NAME = "dmattn"; f"dmattn::{name}"; f"dmattn.{cls}"; raise ValueError("dmattn: bad")\n'
        'torch.ops.dmattn_distributed.carry(x); Library("dmattn_distributed"); "dmattn_distributed::carry"; "dmattn_ops_file"\n'
    )
    expected = (
        "from .. import ops, sizes\n    from ..masks.block import BlockMask\n"
        'torch.ops._new.forward(x); NAME = "_new"; f"_new::{name}"; f"_new.{cls}"; raise ValueError("dmattn: bad")\n'
        'torch.ops._new_distributed.carry(x); Library("_new_distributed"); "_new_distributed::carry"; "dmattn_ops_file"\n'
    )
    assert layout.renamed(source, "masks/interval.py", "_new") == expected


def test_the_namespace_is_written_into_the_library():
    library = b"before" + b"dmattn-ops-namespace=dmattn".ljust(96, b"\0") + b"after"
    renamed = layout.renamed_library(library, "_dmattn_cpu_1")
    assert renamed == b"before" + b"dmattn-ops-namespace=_dmattn_cpu_1".ljust(96, b"\0") + b"after"
    for bad in (b"", library * 2):
        with pytest.raises(ValueError, match="expected dmattn-ops-namespace= in it once, got it"):
            layout.renamed_library(bad, "x")
    layout.renamed_library(library, "n" * 74)
    with pytest.raises(ValueError, match="expected at most 74 characters"):
        layout.renamed_library(library, "n" * 75)


def test_cuda_targets_have_the_names_of_the_hub():
    assert layout.architectures("80-real, 90a-real, 100-real, 80-virtual") == ["10.0", "8.0", "8.0+PTX", "9.0a"]
    assert layout.architectures("") == []


def test_a_cuda_variant_needs_a_cuda_build(out, monkeypatch):
    monkeypatch.setattr(dmattn, "build_info", lambda: {"cuda": ""})
    with pytest.raises(ValueError, match="expected cpu, because the ops library was built without CUDA, got cu130"):
        layout.lay_out(out, "cu130")
    assert layout.own_backend() == "cpu"
    monkeypatch.setattr(dmattn, "build_info", lambda: {"cuda": "13.0.88"})
    assert layout.own_backend() == "cu130"
