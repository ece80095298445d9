// The fixed order in which blocks of the dq kernel add gradients of the keys of a union (common/key_semaphore.cuh).
#pragma once

#include <algorithm>

#include "../calls.h"
#include "../common/device.cuh"
#include "../common/key_semaphore.cuh"
#include "../common/visibility.cuh"

namespace dmattn::cuda::sm80 {

// A block's place in its chain. Blocks are numbered as they start, so the block before has started when this one waits for it.
// One thread waits and releases; the others are held back by barriers of the block.
struct UnionOrder {
  bool is_ordered;
  int32_t* own = nullptr;           // the semaphore of the block
  const int32_t* before = nullptr;  // that of the block before; null: this is the first of its chain

  // number: of the block. tiles: of the queries of a head.
  __device__ __forceinline__ UnionOrder(const BackwardCall& call, uint32_t number, int64_t tiles) : is_ordered(call.semaphores) {
    if (!is_ordered) return;
    own = call.semaphores + number;
    if (number % static_cast<uint32_t>(call.chained_heads * tiles) != 0) before = own - 1;
  }

  // Waits before a chunk is added. last_key: the last of it, below 0 if the chunk is not full and so the last one.
  __device__ __forceinline__ void begin_chunk(int last_key) const {
    if (before && threadIdx.x == 0) wait_dkdv_semaphore(before, last_key >= 0 ? last_key : kLastPosition - 1);
  }
  // Tells the block behind, when all threads have added a chunk. next_key: the first of the next chunk. The block before may have
  // keys that this one has not: they count as added when that block has added them.
  __device__ __forceinline__ void end_chunk(int next_key) const {
    __threadfence();
    __syncthreads();
    if (threadIdx.x != 0) return;
    const int reached = before ? wait_dkdv_semaphore(before, -1) : kLastPosition;
    release_dkdv_semaphore(own, min(next_key, reached));
  }
  // The same at the end of the union.
  __device__ __forceinline__ void finish() const {
    __threadfence();
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (before) wait_dkdv_semaphore(before, kLastPosition - 1);
    release_dkdv_semaphore(own, kLastPosition);
  }
};

// The number of a block in the order of their starts.
__device__ __forceinline__ uint32_t draw_number(int32_t* counter, uint32_t& shared_number) {
  if (threadIdx.x == 0) shared_number = static_cast<uint32_t>(atomicAdd(counter, 1));
  __syncthreads();
  return shared_number;
}

}  // namespace dmattn::cuda::sm80
