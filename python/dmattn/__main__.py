"""``python -m dmattn``: what this installation is and what this machine can use; ``library``: the ops library's path; ``plan``: kernels."""

from __future__ import annotations

import argparse
import importlib
import os
import platform

import torch

import dmattn
from dmattn import plan, profiling


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
    """Whether ``dmattn._C`` loads, which needs the package nanobind-backend."""
    try:
        importlib.import_module("dmattn._C")
    except ImportError as error:
        return f"dmattn._C does not load ({error}); no op needs it"
    return "dmattn._C"


def cuda_state() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device that torch can use"
    names = [f"{torch.cuda.get_device_name(i)} (sm_{''.join(map(str, torch.cuda.get_device_capability(i)))})"
             for i in range(torch.cuda.device_count())]  # fmt: skip
    return ", ".join(names) + ("" if has_cuda_kernels() else "; not usable: this build has no CUDA kernels")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dmattn", description="What this installation of dmattn is.")
    commands = parser.add_subparsers(title="commands", metavar="report | library | plan")
    parser.set_defaults(run=lambda _: print(report()))
    commands.add_parser("report", help="what was built, and what this machine can use (default)")
    library = commands.add_parser("library", help="the path of the ops library")
    library.set_defaults(run=lambda _: print(dmattn.library_path()))
    plan.add_parser(commands)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
