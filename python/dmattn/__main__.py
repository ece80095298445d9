"""``python -m dmattn``: what this installation is and what this machine can use."""

from __future__ import annotations

import os
import platform

import torch

import dmattn


def report() -> str:
    lines = [("dmattn", dmattn.__version__), ("python", platform.python_version()), ("torch", torch.__version__)]
    try:
        info = dmattn.build_info()
    except ImportError as error:
        lines.append(("build", f"unknown: the module dmattn._C does not load ({error})"))
        info = {}
    if info:
        lines += [
            ("built with", f"torch {info['built_with_torch']}, {info['compiler']}"),
            ("stable ABI target", f"torch {info['stable_abi_target']}"),
            ("cpu kernels", info["cpu_levels"]),
            ("cuda kernels", f"CUDA {info['cuda']}: {info['cuda_archs']}" if info["cuda"] else "not built"),
        ]
    lines += [
        ("ops library", dmattn.library_path()),
        ("cpu", f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"),
        ("cuda here", cuda_state(info.get("cuda", ""))),
    ]
    lines += [(name, os.environ[name]) for name in ("DMATTN_CPU_LEVEL", "DMATTN_FAMILY") if name in os.environ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}} : {value}" for name, value in lines)


def cuda_state(built_with: str) -> str:
    if not torch.cuda.is_available():
        return "no CUDA device that torch can use"
    names = [f"{torch.cuda.get_device_name(i)} (sm_{''.join(map(str, torch.cuda.get_device_capability(i)))})"
             for i in range(torch.cuda.device_count())]  # fmt: skip
    return ", ".join(names) + ("" if built_with else "; not usable: this build has no CUDA kernels")


if __name__ == "__main__":
    print(report())
