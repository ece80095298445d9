"""The ops library as a file: one copy in a process, imported twice, loaded without Python's part, and what ``python -m dmattn`` says."""

from __future__ import annotations

import shutil
from pathlib import Path

import dmattn
import pytest
import torch
from dmattn import __main__ as command
from dmattn.testing import strategies

tensor = strategies.random_tensor
ATTEND = "q = torch.ones(1, 1, 5, 8, requires_grad=True); dmattn.attention(q, q, q).sum().backward(); assert q.grad is not None\n"
PURGE = "for name in [name for name in sys.modules if name.split('.')[0] == 'dmattn']: del sys.modules[name]\n"


@pytest.fixture(scope="module")
def other_copy(tmp_path_factory):
    """A second installation: the package and its ops library in another folder."""
    folder = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(Path(dmattn.__file__).parent, folder / "dmattn", ignore=shutil.ignore_patterns("__pycache__"))
    library = folder / "dmattn" / Path(dmattn.library_path()).name
    shutil.copy(dmattn.library_path(), library)
    return library


def test_a_second_copy_of_the_library_registers_nothing_and_says_so(run_python, other_copy):
    program = (
        "import sys, torch, dmattn\n"
        f"torch.ops.load_library({str(other_copy)!r})\n{ATTEND}"
        f"assert sum(path.endswith({other_copy.name!r}) for path in torch.ops.loaded_libraries) == 2\n"
        "print('alive')"
    )
    finished = run_python("-c", program)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "alive\n"
    lines = [line for line in finished.stderr.splitlines() if line.startswith("dmattn: ")]
    expected = (
        f"dmattn: {other_copy}: not used, because this process already has the ops of another copy, {dmattn.library_path()}"
    )
    assert lines == [expected]


@pytest.mark.parametrize("first", ["library", "package"])
def test_importing_with_the_ops_of_another_copy_is_an_error(run_python, other_copy, first):
    load_first = {
        "library": f"import torch; torch.ops.load_library({str(other_copy)!r})\n",
        "package": f"sys.path.insert(0, {str(other_copy.parent.parent)!r}); import dmattn; del sys.path[0]\n{PURGE}",
    }[first]
    program = f"import sys\n{load_first}try: import dmattn\nexcept ImportError as error: print(error)"
    finished = run_python("-c", program)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == (
        f"dmattn: expected to load the ops of {dmattn.library_path()}, but this process already has the ops of another copy, "
        f"{other_copy}: use one installation of dmattn in a process\n"
    )


@pytest.mark.long
def test_importing_again_after_a_purge_of_sys_modules(run_python):
    """Fakes, gradients, FLOP formulas, pytrees and refusals are those of the last import."""
    program = (
        "import sys, torch, dmattn\nfrom torch.utils.flop_counter import FlopCounterMode\nfirst = dmattn\n"
        f"for _ in range(2):\n    {PURGE.strip()}\n    import dmattn\nassert dmattn is not first\n{ATTEND}"
        "mask = dmattn.IntervalMask.causal(5)\n"
        "assert dmattn.attention(*[q.detach().to('meta')] * 3).is_meta\n"
        "class Attends(torch.nn.Module):\n    def forward(self, q, mask): return dmattn.attention(q, q, q, mask)\n"
        "program = torch.export.export(Attends(), (q, mask)).module()\n"
        "assert torch.equal(program(q, mask), Attends()(q, mask))\n"
        "with FlopCounterMode(display=False) as counter: dmattn.attention(q, q, q, mask).sum().backward()\n"
        "assert counter.get_total_flops() == 15 * 16 * 2 * 7 // 2, counter.get_total_flops()\n"
        "try: torch.ops.dmattn.select(torch.zeros(1, 1, 4).to_sparse(), None, 1, True)\n"
        "except NotImplementedError as error: print(error)"
    )
    finished = run_python("-W", "ignore", "-c", program)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("dmattn::select: no kernel for a torch.sparse_coo tensor on cpu")


class Attends(torch.nn.Module):
    def forward(self, query, key, value, scores):
        return dmattn.dynamic_mask_attention(query, key, value, scores, 4)


@pytest.mark.long
def test_an_exported_program_runs_with_the_library_alone(run_python, tmp_path):
    example = (*(tensor((1, 2, 12, 8), i) for i in range(3)), tensor((1, 2, 12), 3))
    torch.export.save(torch.export.export(Attends(), example), tmp_path / "program.pt2")
    torch.save((example, Attends()(*example)), tmp_path / "case.pt")
    program = (
        "import sys, torch\ntorch.ops.load_library(sys.argv[1])\n"
        "program = torch.export.load('program.pt2').module()\n"
        "example, expected = torch.load('case.pt')\n"
        "assert torch.equal(program(*example), expected)\nassert 'dmattn' not in sys.modules\nprint('equal')"
    )
    path = run_python("-m", "dmattn", "library").stdout.strip()
    assert path == dmattn.library_path()
    finished = run_python("-W", "ignore", "-c", f"import os; os.chdir({str(tmp_path)!r})\n{program}", path)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "equal\n"


# python -m dmattn -------------------------------------------------------------------------------------------------------------------


def line(report: str, name: str) -> str:
    return next(text.split(" : ", 1)[1] for text in report.splitlines() if text.startswith(name + " "))


def test_an_unknown_subcommand_prints_the_usage(run_python):
    finished = run_python("-m", "dmattn", "libary")
    assert finished.returncode == 2
    assert finished.stderr.startswith("usage: python -m dmattn")
    assert finished.stdout == ""


def test_build_facts_do_not_need_the_python_module(monkeypatch):
    whole = command.report()
    monkeypatch.setitem(__import__("sys").modules, "dmattn._C", None)
    monkeypatch.delattr(dmattn, "_C", raising=False)
    without = command.report()
    assert line(without, "python module").startswith("optional, not loaded (")
    assert line(without, "python module").endswith("no op needs it")
    same = ("built with", "stable ABI target", "cpu kernels", "cuda kernels", "cuda here")
    assert [line(without, name) for name in same] == [line(whole, name) for name in same]
    assert "unknown" not in without


WITHOUT_THE_BACKEND = "import sys; sys.modules['nanobind_backend'] = None\n"


def test_everything_but_the_python_module_works_without_its_backend(run_python):
    """dmattn._C alone needs nanobind-backend, which an installation of dmattn does not bring; the report says how to get it."""
    program = (
        f"{WITHOUT_THE_BACKEND}import torch, dmattn\n{ATTEND}"
        "out = dmattn.dynamic_mask_attention(q, q, q, torch.zeros(1, 1, 5), 2)\n"
        "torch.testing.assert_close(dmattn.attention(q, q, q, dmattn.IntervalMask.sliding_window(5, 1, 0)), out)\n"
        "compiled = torch.compile(dmattn.attention, fullgraph=True, backend='eager')\n"
        "torch.testing.assert_close(compiled(q, q, q), dmattn.attention(q, q, q))\n"
        "from dmattn import __main__ as command\nprint(command.report())"
    )
    finished = run_python("-W", "ignore", "-c", program)
    assert finished.returncode == 0, finished.stderr
    state = "optional, not loaded (it needs nanobind-backend: pip install nanobind-backend); no op needs it"
    assert line(finished.stdout, "python module") == state
    refused = run_python("-c", f"{WITHOUT_THE_BACKEND}import dmattn._C")
    assert refused.returncode != 0
    assert "nanobind" in refused.stderr
    plan = "sys.argv = ['x', 'plan', '--heads', '2']\nfrom dmattn import __main__\nsys.exit(__main__.main())"
    refused = run_python("-W", "ignore", "-c", WITHOUT_THE_BACKEND + plan)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert refused.stderr.startswith("python -m dmattn plan: ")


def test_the_python_module_says_the_same_as_the_library():
    module = pytest.importorskip("dmattn._C", exc_type=ImportError)
    assert dict(module.build_info()) == dmattn.build_info()


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_device_is_usable_when_the_library_has_kernels_for_it(monkeypatch, has_kernels):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    asked = []

    def answers(op: str, key: str) -> bool:
        asked.append((op, key))
        return has_kernels

    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", answers)
    monkeypatch.setitem(__import__("sys").modules, "dmattn._C", None)
    expected = "a GPU (sm_90)" + ("" if has_kernels else "; not usable: this build has no CUDA kernels")
    assert line(command.report(), "cuda here") == expected
    assert set(asked) == {("dmattn::forward", "CUDA")}


# Importing --------------------------------------------------------------------------------------------------------------------------


def test_importing_loads_no_optional_package(run_python):
    optional = {
        "transformers", "matplotlib", "hypothesis", "accelerate", "triton", "numpy.testing", "sympy",
        "torch._dynamo", "torch._inductor", "torch.utils.flop_counter", "torch.nn.attention.flex_attention",
    }  # fmt: skip
    program = f"import sys, torch; had = set(sys.modules); import dmattn; print(sorted({optional!r} & (set(sys.modules) - had)))"
    finished = run_python("-c", program)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "[]\n"
