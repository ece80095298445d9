// Semaphores that give sums of the gradients of keys a fixed order. Each list of keys has one: the first key that it has not
// added to the sums. The lists that share sums are a chain, of which each adds a key after the list before it.
#pragma once

#include <cstdint>

namespace dmattn::cuda {

// Waits until the list before has added its keys up to last_key. Returns the first key that it has not added.
__device__ __forceinline__ int wait_dkdv_semaphore(const int32_t* next_key, int last_key) {
  int reached;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(reached) : "l"(next_key) : "memory");
  } while (reached <= last_key);
  return reached;
}

// Says that this list has added its keys before next_key.
__device__ __forceinline__ void release_dkdv_semaphore(int32_t* to, int next_key) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(next_key) : "memory");
}

}  // namespace dmattn::cuda
