// What kernels on a GPU take at all, and which family of them a device, a build and DMATTN_FAMILY leave.
#include <iterator>
#include <string_view>

#include "../../errors.h"
#include "plan.h"

namespace dmattn::cuda {

const char* name_of(Family family) {
  constexpr const char* kNames[] = {"none", "sm80", "sm90"};
  return kNames[static_cast<int>(family)];
}

const char* name_of(KeySource keys) {
  constexpr const char* kNames[] = {"all", "block table", "range", "direct", "lists", "compact", "query lists", "unions"};
  static_assert(std::size(kNames) == static_cast<size_t>(KeySource::kUnions) + 1);
  return kNames[static_cast<int>(keys)];
}

void check_kernel_dtype(DType dtype) {
  check(dtype == DType::kBFloat16 || dtype == DType::kFloat16,
        "query: expected dtype bfloat16 or float16 on CUDA (float32 and float64 are supported on the CPU only), got ",
        name_of(dtype));
}

WantedFamily parse_family(const char* name) {
  const std::string_view wanted = name ? name : "";
  if (wanted.empty() || wanted == "auto") return WantedFamily::kAuto;
  if (wanted == "sm80") return WantedFamily::kSm80;
  check(wanted == "sm90", "DMATTN_FAMILY: expected auto, sm80 or sm90, got ", wanted);
  return WantedFamily::kSm90;
}

WantedFamily allowed_family(const Target& target) {
  const bool is_built = target.build.has_sm90, is_hopper = target.device.major == 9;
  if (target.wanted == WantedFamily::kSm90) {
    check(is_built, "DMATTN_FAMILY: expected auto or sm80, the kernels this build has, got sm90");
    check(is_hopper, "DMATTN_FAMILY: sm90 needs a device of compute capability 9.x, this one has ", target.device.major,
          ".x (use auto or sm80)");
  }
  return is_built && is_hopper ? target.wanted : WantedFamily::kSm80;
}

}  // namespace dmattn::cuda
