// Launches of kernels that follow each other closely. On compute capability 9.0 the blocks of a kernel start on the SMs while
// those of the kernel before finish, and wait there ("programmatic dependent launch", CUDA programming guide).
//
// Nobody else waits: a kernel launched by launch_dependent calls griddepcontrol_wait in every thread, before it reads or
// writes anything global. As every kernel of a chain waits, the end of the last is the end of all. What the chain writes is read
// by plain loads: __ldg and __restrict__ promise that nobody has written it since the kernel began.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>

namespace dmattn::cuda {

// Waits for the end of the kernel before and for all that it wrote.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks start on the SMs from now on. Where both kernels have few blocks and two of the next one's fit
// on an SM, those may share the SMs that are free now and leave the others idle afterwards: measure it then.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Does the current device run code that waits by itself and knows clusters? Other devices may run code that was compiled for an
// older architecture.
inline bool has_dependent_launch() {
#ifdef DMATTN_WITH_SM90
  static std::array<std::atomic<int>, 64> majors{};  // 0: not asked yet
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  const bool has_place = device < static_cast<int>(majors.size());
  if (has_place) major = majors[device];
  if (major == 0) {
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return false;
    if (has_place) majors[device] = major;
  }
  return major == 9;
#else
  return false;
#endif
}

// Which cluster sizes of up to 16 blocks a kernel's devices can hold: bit size - 1 says yes, bit size + 15 no.
using ClusterSizes = std::array<std::atomic<uint32_t>, 64>;

// Does the current device hold a cluster of so many blocks at once? One of more than 8 needs that many multiprocessors beside
// each other, which some devices lack. Asked once for each size.
template <class... Parameters>
bool cluster_fits(void (*kernel)(Parameters...), unsigned cluster, unsigned threads, size_t shared_bytes, ClusterSizes& known) {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  const bool has_place = device < static_cast<int>(known.size());
  const uint32_t yes = 1u << (cluster - 1), no = yes << 16;
  if (has_place && known[device] & (yes | no)) return known[device] & yes;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(cluster), config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute, config.numAttrs = 1;
  int count = 0;
  if (cudaOccupancyMaxActiveClusters(&count, kernel, &config) != cudaSuccess) {
    cudaGetLastError();
    count = 0;
  }
  if (has_place) known[device] |= count > 0 ? yes : no;
  return count > 0;
}

// Launches blocks in clusters of `cluster` along x. More than one needs has_dependent_launch().
template <class... Parameters, class... Arguments>
cudaError_t launch_dependent_clusters(void (*kernel)(Parameters...), unsigned cluster, dim3 grid, unsigned threads,
                                      size_t shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  const bool is_dependent = has_dependent_launch();
  if (cluster > 1 && !is_dependent) return cudaErrorInvalidClusterSize;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes, config.stream = stream;
  config.attrs = attributes, config.numAttrs = !is_dependent ? 0 : cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

template <class... Parameters, class... Arguments>
cudaError_t launch_dependent(void (*kernel)(Parameters...), dim3 grid, unsigned threads, size_t shared_bytes, cudaStream_t stream,
                             const Arguments&... arguments) {
  return launch_dependent_clusters(kernel, 1, grid, threads, shared_bytes, stream, arguments...);
}

}  // namespace dmattn::cuda
