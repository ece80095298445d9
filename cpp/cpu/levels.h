// Picks the kernels for this machine's instruction set, once; DMATTN_CPU_LEVEL=baseline|avx2|avx512 forces a set for tests.
#pragma once

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace dmattn::cpu {

extern const Kernels kKernels_baseline;
#ifdef DMATTN_CPU_X86
extern const Kernels kKernels_avx2;
extern const Kernels kKernels_avx512;
#endif

inline const Kernels& choose_kernels() {
  const char* forced = std::getenv("DMATTN_CPU_LEVEL");
  const auto allowed = [&](const char* name, bool supported) {
    if (!forced || !*forced) return supported;
    if (std::strcmp(forced, name) != 0) return false;
    if (!supported)
      throw std::runtime_error(std::string("dmattn: DMATTN_CPU_LEVEL=") + name + ", but this processor does not support it");
    return true;
  };
#ifdef DMATTN_CPU_X86
  if (allowed("avx512", __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))) {
    return kKernels_avx512;
  }
  if (allowed("avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))) {
    return kKernels_avx2;
  }
#endif
  if (allowed("baseline", true)) return kKernels_baseline;
  throw std::runtime_error(std::string("dmattn: DMATTN_CPU_LEVEL: expected one of the levels `python -m dmattn` lists, got ") +
                           forced);
}

inline const Kernels& best_kernels() {
  static const Kernels& kernels = choose_kernels();
  return kernels;
}

}  // namespace dmattn::cpu
