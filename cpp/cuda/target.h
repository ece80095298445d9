// What a call is planned for: the device it runs on, the kernels of this build, and DMATTN_FAMILY.
#pragma once

#include <cstdlib>

#include "host/plan.h"
#include "runtime.h"
#include "sm80/dispatch.h"
#include "sm90/dispatch.h"

namespace dmattn::cuda {

#ifdef DMATTN_WITH_SM90
inline constexpr bool kHasSm90 = true;
#else
inline constexpr bool kHasSm90 = false;  // sm90::... is declared, and not defined
#endif

inline Target target_of(const Device& device) {
  Target target;
  target.wanted = parse_family(std::getenv("DMATTN_FAMILY"));
  target.build = configured_build(kHasSm90);
  target.device.major = device_attribute<cudaDevAttrComputeCapabilityMajor>(device.index());
  target.device.processors = device_attribute<cudaDevAttrMultiProcessorCount>(device.index());
  target.device.shared_bytes = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(device.index());
  if constexpr (kHasSm90) target.device.has_tensor_maps = sm90::has_tensor_maps();
  return target;
}

// The memory of a call beside its arguments and results; none where the plan needs none.
class OwnedWorkspace {
 public:
  OwnedWorkspace(const Tensor& like, int64_t bytes)
      : memory_(bytes > 0 ? std::optional(empty_on(like, {bytes}, ScalarType::Byte)) : std::nullopt) {}
  void* data() const { return memory_ ? memory_->data_ptr() : nullptr; }

 private:
  std::optional<Tensor> memory_;
};

}  // namespace dmattn::cuda
