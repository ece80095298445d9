// The family of kernels that runs a call, and the error of a call that no kernel takes.
#pragma once

#include <cstdlib>
#include <string_view>

#include "calls.h"
#include "runtime.h"
#include "sm80/dispatch.h"
#include "sm90/dispatch.h"

namespace dmattn::cuda {

// DMATTN_FAMILY = auto | sm80 | sm90 chooses the kernels. kAuto: those of sm90 where it has a kernel for the call. For backward
// kSm90 means the same as kAuto; forward fails where sm90 has no kernel.
enum class Family { kAuto, kSm80, kSm90 };

inline Family choose_family(int32_t device) {
  const char* const wanted = std::getenv("DMATTN_FAMILY");
  const std::string_view name = wanted ? wanted : "auto";
#ifdef DMATTN_WITH_SM90
  constexpr bool kIsBuilt = true;
#else
  constexpr bool kIsBuilt = false;
#endif
  const int major = device_attribute<cudaDevAttrComputeCapabilityMajor>(device);
  if (name == "sm80") return Family::kSm80;
  if (name == "sm90") {
    check(kIsBuilt, "DMATTN_FAMILY: expected auto or sm80, the kernels this build has, got sm90");
    check(major == 9, "DMATTN_FAMILY: sm90 needs a device of compute capability 9.x, this one has ", major,
          ".x (use auto or sm80)");
    return Family::kSm90;
  }
  check(name == "auto" || name.empty(), "DMATTN_FAMILY: expected auto, sm80 or sm90, got ", name);
  return kIsBuilt && major == 9 ? Family::kAuto : Family::kSm80;
}

// Only Hopper's kernels take more than kMaxLength queries or keys, and only in order: lists have no room for them.
inline void check_length_without_lists(const AttentionParams& p, bool takes_in_order) {
  check(takes_in_order || (p.query_length <= kMaxLength && p.key_length <= kMaxLength), "query, key: expected lengths up to ",
        kMaxLength, " for a call that does not take its keys in order on Hopper, got Sq=", p.query_length, ", Sk=", p.key_length);
}

// Checks a launch; where no kernel was found the error says what was compiled.
inline void check_launch(cudaError_t status, const AttentionParams& p) {
  check(status != cudaErrorNotSupported, "no kernel for head sizes D=", p.head_dim, " and Dv=", p.value_dim,
        "; compiled: ", sm80::compiled());
  check_cuda(status, "attention kernel");
}

}  // namespace dmattn::cuda
