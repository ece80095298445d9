// How many blocks a launch has, and attributes of kernels, set once for each kernel and device.
//
// cudaFuncSetAttribute takes a microsecond of the host at every call.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

namespace dmattn::cuda {

// The blocks of a launch along x. Where there are more than a grid can have, it ends with cudaErrorInvalidConfiguration, which
// check_cuda explains; a cast alone would run a few of the blocks and leave the other results unwritten.
inline unsigned grid_of(int64_t blocks) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  return static_cast<unsigned>(blocks <= kMost ? blocks : kMost + 1);
}

// What was asked for so far, by device; a launcher keeps one for each kernel and attribute as a static.
class KernelAttribute {
 public:
  // Makes the attribute at least `value` on the current device.
  template <class... Parameters>
  cudaError_t raise(void (*kernel)(Parameters...), cudaFuncAttribute attribute, int value) {
    int device = 0;
    const cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess) return status;
    if (device >= static_cast<int>(known_.size())) return cudaFuncSetAttribute(kernel, attribute, value);
    if (known_[device].load(std::memory_order_acquire) >= value) return cudaSuccess;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (known_[device].load(std::memory_order_relaxed) >= value) return cudaSuccess;
    const cudaError_t set = cudaFuncSetAttribute(kernel, attribute, value);
    if (set == cudaSuccess) known_[device].store(value, std::memory_order_release);
    return set;
  }

 private:
  std::array<std::atomic<int>, 64> known_{};
  std::mutex mutex_;
};

// Lets a kernel have so much dynamic shared memory.
template <class... Parameters>
cudaError_t allow_shared_bytes(KernelAttribute& known, void (*kernel)(Parameters...), int bytes) {
  return known.raise(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace dmattn::cuda
