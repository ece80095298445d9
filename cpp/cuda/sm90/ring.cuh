// Rings of barriers, by which warps that produce and warps that consume hand stages of shared memory to each other.
#pragma once

#include "../ptx/mbarrier.cuh"

namespace dmattn::cuda::sm90 {

// A ring of barriers. The n-th use has barrier n % kCount, in phase n / kCount.
template <int kCount>
struct Ring {
  uint32_t base;
  __device__ __forceinline__ uint32_t at(uint32_t n) const { return base + 8 * (n % kCount); }
  __device__ __forceinline__ void wait_full(uint32_t n) const { barrier_wait(at(n), n / kCount % 2); }
  __device__ __forceinline__ void wait_empty(uint32_t n) const { barrier_wait(at(n), (n / kCount % 2) ^ 1); }
  // The same for warps that have time.
  __device__ __forceinline__ void sleep_full(uint32_t n) const { barrier_sleep(at(n), n / kCount % 2); }
  __device__ __forceinline__ void producer_acquire(uint32_t n) const { barrier_sleep(at(n), (n / kCount % 2) ^ 1); }
  __device__ __forceinline__ bool is_full(uint32_t n) const { return barrier_test(at(n), n / kCount % 2); }
};

}  // namespace dmattn::cuda::sm90
