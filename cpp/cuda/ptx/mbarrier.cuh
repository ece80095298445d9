// Barriers in shared memory (mbarrier) and named barriers as functions. A phase of an mbarrier ends when all arrivals and all
// announced bytes have arrived.
#pragma once

#include "../common/device.cuh"

namespace dmattn::cuda {

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and announces bytes that tensor copies will bring.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase with this parity; a fresh barrier has just ended its phase of parity 1.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

inline constexpr unsigned kSleep = 64;  // nanoseconds

// Has the phase with this parity ended?
__device__ __forceinline__ bool barrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2; selp.b32 %0, 1, 0, done; }"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

// Waits as barrier_wait does, but sleeps between looks: a look keeps the products from shared memory for a moment.
__device__ __forceinline__ void barrier_sleep(uint32_t barrier, uint32_t parity) {
  while (!barrier_test(barrier, parity)) __nanosleep(kSleep);
}

// Named barriers of `threads` threads of the block: arrive and wait for all; does any thread say so; how many do.
__device__ __forceinline__ void group_sync(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ bool group_any(int id, int threads, bool mine) {
  int any;
  asm volatile("{ .reg .pred p, q; setp.ne.b32 p, %3, 0; barrier.red.or.pred q, %1, %2, p; selp.b32 %0, 1, 0, q; }"
               : "=r"(any)
               : "r"(id), "r"(threads), "r"(static_cast<int>(mine))
               : "memory");
  return any != 0;
}
__device__ __forceinline__ int group_count(int id, int threads, bool mine) {
  int count;
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %3, 0; barrier.red.popc.u32 %0, %1, %2, p; }"
               : "=r"(count)
               : "r"(id), "r"(threads), "r"(static_cast<int>(mine))
               : "memory");
  return count;
}
// Arrives at a named barrier at which others of its threads wait by group_sync. All lanes of a warp have to call it together.
__device__ __forceinline__ void group_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Makes what ordinary stores and copies wrote to shared memory visible to products and tensor copies.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

}  // namespace dmattn::cuda
