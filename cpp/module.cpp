// The Python module `dmattn._C`: facts about this build, and not one op (ops are torch.ops.dmattn.*).
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

namespace nb = nanobind;

NB_MODULE(_C, m) {
  m.doc() = "Facts about this build of dmattn.";
  m.def(
      "build_info",
      [] {
        nb::dict info;
        info["version"] = DMATTN_VERSION;
        info["built_with_torch"] = DMATTN_TORCH_BUILD_VERSION;
        info["stable_abi_target"] = "2.10";
        info["cuda"] = DMATTN_CUDA_VERSION;
        info["cuda_archs"] = DMATTN_CUDA_ARCHS;
        info["cpu_levels"] = DMATTN_CPU_LEVELS;
        info["compiler"] = DMATTN_COMPILER;
        return info;
      },
      "Version, torch and CUDA this library was built with; lists are separated by commas.");
}
