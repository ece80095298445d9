// A sort of up to 4,096 different numbers by one block, in few steps: for kernels that wait for nothing else.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dmattn::cuda {

// Sorts kThreads * kEach numbers, of which a thread has kEach neighbours, ascending, by a bitonic network: neighbours in
// registers, lanes by shuffles, warps by way of shared memory. All numbers are different.
template <int kThreads, int kEach>
__device__ __forceinline__ void sort_numbers(uint32_t (&numbers)[kEach], uint32_t* exchange) {
  constexpr int kKeys = kThreads * kEach;
  const int thread = static_cast<int>(threadIdx.x), first = thread * kEach;
#pragma unroll
  for (int size = 2; size <= kKeys; size *= 2) {
#pragma unroll
    for (int step = size / 2; step > 0; step /= 2) {
      if (step < kEach) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          if (i & step) continue;
          const bool rises = size < kEach ? !(i & size) : !(first & size);
          const uint32_t low = min(numbers[i], numbers[i ^ step]), high = max(numbers[i], numbers[i ^ step]);
          numbers[i] = rises ? low : high, numbers[i ^ step] = rises ? high : low;
        }
        continue;
      }
      const bool keeps_low = !(first & step) == !(first & size);
      uint32_t others[kEach];
      if (step < 32 * kEach) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) others[i] = __shfl_xor_sync(0xffffffffU, numbers[i], step / kEach);
      } else {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kEach; ++i) exchange[first + i] = numbers[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kEach; ++i) others[i] = exchange[(first ^ step) + i];
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        numbers[i] = keeps_low ? min(numbers[i], others[i]) : max(numbers[i], others[i]);
      }
    }
  }
}

}  // namespace dmattn::cuda
