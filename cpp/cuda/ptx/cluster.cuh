// Blocks that share a piece of work and see each other's shared memory: "thread block clusters" of the CUDA programming guide.
//
// Code written for a cluster also runs without: below compute capability 9.0, or launched without a cluster size, a block is a
// cluster of its own.
#pragma once

#include <cooperative_groups.h>

#include "../common/device.cuh"

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

// An exchange of values between the blocks of a cluster through distributed shared memory (DSMEM). Each block announces how many
// bytes it expects, waits until all blocks have done so, sends, and waits for the bytes that the others send. Needs compute
// capability 9.0; elsewhere nothing happens.
//
// No second cluster barrier is needed: values leave from registers, and a block stays until its own bytes have arrived.
struct DsmemExchange {
  uint64_t barrier;

#if __CUDA_ARCH__ >= 900
  // By one thread: announces how many bytes will arrive.
  __device__ __forceinline__ void expect(int bytes) {
    const uint32_t at = shared_address(&barrier);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
  }
  // By all threads of all blocks: a cluster barrier, after which every block expects its bytes. Code between the two calls waits
  // for no other block.
  static __device__ __forceinline__ void cluster_arrive() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
  static __device__ __forceinline__ void cluster_wait() {
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
  // Stores values in another block's copy of a variable in shared memory, of which *mine is this block's.
  __device__ __forceinline__ void send(float4* mine, int rank, float4 x) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(
                     address_in(mine, rank)),
                 "r"(address_in(&barrier, rank)), "r"(__float_as_uint(x.x)), "r"(__float_as_uint(x.y)), "r"(__float_as_uint(x.z)),
                 "r"(__float_as_uint(x.w))
                 : "memory");
  }
  __device__ __forceinline__ void send(float2* mine, int rank, float2 x) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%2, %3}, [%1];" ::"r"(address_in(mine, rank)),
        "r"(address_in(&barrier, rank)), "r"(__float_as_uint(x.x)), "r"(__float_as_uint(x.y))
        : "memory");
  }
  // Waits for all bytes that this block expects.
  __device__ __forceinline__ void wait() {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "wait:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
        "@!done bra wait;\n"
        "}\n" ::"r"(shared_address(&barrier))
        : "memory");
  }

 private:
  static __device__ __forceinline__ uint32_t address_in(const void* mine, int rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(mine)), "r"(rank));
    return address;
  }
#else
  __device__ __forceinline__ void expect(int) {}
  static __device__ __forceinline__ void cluster_arrive() {}
  static __device__ __forceinline__ void cluster_wait() {}
  template <class T>
  __device__ __forceinline__ void send(T*, int, T) {}
  __device__ __forceinline__ void wait() {}
#endif
};

}  // namespace dmattn::cuda
