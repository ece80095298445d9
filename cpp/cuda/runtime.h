// What every CUDA host file needs of the runtime: the current stream, a device guard, error checks, device attributes.
//
// The reference to torch's current CUDA stream is a weak symbol: torch exports it only when it is built for CUDA, and this
// library loads into any torch. So the reference may stay null, and only an op that is called on CUDA tensors notices.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>

#include <array>
#include <atomic>

#include "../tensors.h"

extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace dmattn::cuda {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // an error that is reported is not left behind for the next caller
  if (status == cudaErrorInvalidConfiguration) {
    fail(what, ": expected batches, heads and lengths whose launch has fewer than 2^31 blocks, got more");
  }
  fail(what, ": CUDA says ", cudaGetErrorName(status), ": ", cudaGetErrorString(status));
}

#define DMATTN_CUDA_CHECK(call) ::dmattn::cuda::check_cuda((call), #call)

inline cudaStream_t current_stream(int32_t device) {
  check(aoti_torch_get_current_cuda_stream != nullptr,
        "expected a torch built with CUDA, got one without: it cannot name the current CUDA stream");
  void* stream = nullptr;
  check(aoti_torch_get_current_cuda_stream(device, &stream) == 0, "torch could not name the current stream of CUDA device ",
        device);
  return static_cast<cudaStream_t>(stream);
}

// Makes the tensor's device current while it lives, and knows its stream.
class Device {
 public:
  explicit Device(const Tensor& tensor) : index_(tensor.device().index()), guard_(index_), stream_(current_stream(index_)) {}
  int32_t index() const { return index_; }
  cudaStream_t stream() const { return stream_; }

 private:
  int32_t index_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

// The value of a device attribute, asked for once per device.
template <cudaDeviceAttr kAttribute>
inline int device_attribute(int32_t device) {
  static std::array<std::atomic<int>, 64> known{};  // value + 1; 0: not asked yet
  const bool has_place = device >= 0 && device < static_cast<int32_t>(known.size());
  if (has_place && known[device] > 0) return known[device] - 1;
  int value = 0;
  DMATTN_CUDA_CHECK(cudaDeviceGetAttribute(&value, kAttribute, device));
  if (has_place) known[device] = value + 1;
  return value;
}

}  // namespace dmattn::cuda
