"""``python -m dmattn``: what this installation is and what this machine can use; ``library``: the ops library's path; ``shape``: is a dynamic
mask faster for one shape? ``plan``: which kernels does a call take?"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys

import torch

import dmattn
from dmattn import plan, profiling, shape


def report() -> str:
    info = dmattn.build_info()
    lines = [
        ("dmattn", dmattn.__version__),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("built with", f"torch {info['built_with_torch']}, {info['compiler']}"),
        ("stable ABI target", f"torch {info['stable_abi_target']}"),
        ("cpu kernels", info["cpu_levels"]),
        ("cuda kernels", f"CUDA {info['cuda']}: {info['cuda_archs']}" if has_cuda_kernels() else "not built"),
        ("cuda choice", info["cuda_choice"]),
        ("ops library", dmattn.library_path()),
        ("python module", module_state()),
        ("cpu", f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"),
        ("cuda here", cuda_state()),
    ]
    lines += [
        (name, os.environ[name]) for name in ("DMATTN_CPU_LEVEL", "DMATTN_FAMILY", *profiling.VARIABLES) if name in os.environ
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}} : {value}" for name, value in lines)


def has_cuda_kernels() -> bool:
    """Whether the ops library has registered attention for CUDA."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("dmattn::forward", "CUDA")


def module_state() -> str:
    """Whether ``dmattn._C`` loads, which needs nanobind-backend, a package that dmattn does not require."""
    try:
        importlib.import_module("dmattn._C")
    except ImportError as error:
        is_missing = importlib.util.find_spec("nanobind_backend") is None
        reason = "it needs nanobind-backend: pip install nanobind-backend" if is_missing else error
        return f"optional, not loaded ({reason}); no op needs it"
    return "dmattn._C"


def cuda_state() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device that torch can use"
    names = [f"{torch.cuda.get_device_name(i)} (sm_{''.join(map(str, torch.cuda.get_device_capability(i)))})"
             for i in range(torch.cuda.device_count())]  # fmt: skip
    return ", ".join(names) + ("" if has_cuda_kernels() else "; not usable: this build has no CUDA kernels")


def print_report(_: argparse.Namespace) -> int:
    print(report())
    return 0


def print_library(_: argparse.Namespace) -> int:
    print(dmattn.library_path())
    return 0


def parser() -> argparse.ArgumentParser:
    """One subparser for each subcommand; ``run`` takes the arguments and returns the exit status."""
    whole = argparse.ArgumentParser(prog="python -m dmattn", description="What this installation of dmattn is and does.")
    whole.set_defaults(run=print_report)
    commands = whole.add_subparsers(metavar="report | library | shape | plan")
    what = "what was built, and what this machine can use (default)"
    commands.add_parser("report", help=what, description=what).set_defaults(run=print_report)
    what = "the path of the ops library"
    commands.add_parser("library", help=what, description=what).set_defaults(run=print_library)
    what = "is a dynamic mask faster than dense attention for one shape, on this machine?"
    of_shape = commands.add_parser("shape", help=what, description=what)
    shape.add_arguments(of_shape)
    of_shape.set_defaults(run=shape.run)
    plan.add_parser(commands)
    return whole


def main() -> int:
    given = parser().parse_args()
    status: int = given.run(given)
    return status


if __name__ == "__main__":
    sys.exit(main())
