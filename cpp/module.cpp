// The Python module `dmattn._C`: facts about this build, and not one op (ops are torch.ops.dmattn.*).
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "cuda/key_ways.h"

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
        info["cuda_choice"] = DMATTN_CUDA_CHOICE;
        info["cpu_levels"] = DMATTN_CPU_LEVELS;
        info["compiler"] = DMATTN_COMPILER;
        return info;
      },
      "Version, torch and CUDA this library was built with; lists are separated by commas.");
  m.def(
      "key_ways",
      [](int64_t queries, int64_t keys, int64_t most_keys, bool is_causal, int64_t heads, int64_t kv_heads, int64_t processors) {
        constexpr const char* kNames[] = {"lists", "spans", "all keys"};
        constexpr int64_t kRows = 192, kKeys = 128;  // of a tile, up to D = 128
        const auto name_of = [&](auto order_of, int64_t tiles) {
          return std::string(kNames[static_cast<int>(order_of({queries, keys, most_keys, is_causal, tiles, processors}))]);
        };
        return std::pair(name_of(dmattn::cuda::forward_way, (heads * queries + kRows - 1) / kRows),
                         name_of(dmattn::cuda::backward_way, (keys + kKeys - 1) / kKeys * kv_heads));
      },
      nb::arg("queries"), nb::arg("keys"), nb::arg("most_keys"), nb::arg("is_causal"), nb::arg("heads"), nb::arg("kv_heads"),
      nb::arg("processors") = 132,
      "How the Hopper kernels come to the keys of a call with intervals and a key_bias, forward and backward: by \"lists\" of "
      "live keys, by the \"spans\" of all keys, or by \"all keys\". Heads are counted over all batches; D up to 128.");
}
