// Blocks that share a piece of work and see each other's shared memory: "thread block clusters" of the CUDA programming guide.
//
// Code written for a cluster also runs without: below compute capability 9.0, or launched without a cluster size, a block is a
// cluster of its own.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

namespace dmattn::cuda {

struct Cluster {
#if __CUDA_ARCH__ >= 900
  static __device__ __forceinline__ int32_t size() {
    return static_cast<int32_t>(cooperative_groups::this_cluster().num_blocks());
  }
  static __device__ __forceinline__ int32_t rank() {
    return static_cast<int32_t>(cooperative_groups::this_cluster().block_rank());
  }
  // Waits for all threads of all blocks; what they wrote to shared memory before can be read after it.
  static __device__ __forceinline__ void sync() { cooperative_groups::this_cluster().sync(); }
  // Another block's copy of a variable in shared memory.
  template <class T>
  static __device__ __forceinline__ T* of(T* mine, int32_t rank) {
    return cooperative_groups::this_cluster().map_shared_rank(mine, static_cast<unsigned>(rank));
  }
#else
  static __device__ __forceinline__ int32_t size() { return 1; }
  static __device__ __forceinline__ int32_t rank() { return 0; }
  static __device__ __forceinline__ void sync() { __syncthreads(); }
  template <class T>
  static __device__ __forceinline__ T* of(T* mine, int32_t) {
    return mine;
  }
#endif
};

}  // namespace dmattn::cuda
