// Which scores a thread of the Hopper backward holds, and the keys of its rows.
#pragma once

#include "../../ptx/wgmma.cuh"
#include "shared.cuh"

namespace dmattn::cuda::sm90 {

// Of the thread's first score the key (row) and the query (column); its other key is row + 8. The warp's rows begin at
// first_row, the warpgroup's columns of grad_key and grad_value at first_column. Recomputed where they are needed, because
// registers are short.
template <int kDim>
struct ScorePlace {
  static constexpr int first_column = 0;
  int lane, column, row, first_row;
  __device__ __forceinline__ ScorePlace() {
    const uint32_t thread = thread_index();  // unsigned, so that the divisions are shifts
    lane = static_cast<int>(thread % 32), column = static_cast<int>(thread % 4 * 2);
    first_row = static_cast<int>(thread / 32 * 16), row = first_row + static_cast<int>(thread % 32 / 4);
  }
  // The thread's number among those that compute.
  __device__ __forceinline__ int thread() const { return first_row * 2 + lane; }
};

// lse or delta of the thread's queries, which come in pairs: 8 columns from one to the next. The first kEarly pairs are loaded at
// once, the others when they are asked for.
template <int kEarly>
struct QueryTerms {
  const float* from;  // of the first query, in shared memory
  float2 early[kEarly > 0 ? kEarly : 1];
  QueryTerms() = default;
  __device__ __forceinline__ explicit QueryTerms(const float* of_first) : from(of_first) {
#pragma unroll
    for (int i = 0; i < kEarly; ++i) early[i] = load(i);
  }
  __device__ __forceinline__ float2 pair(int i) const { return i < kEarly ? early[i] : load(i); }

 private:
  __device__ __forceinline__ float2 load(int i) const { return *reinterpret_cast<const float2*>(&from[8 * i]); }
};

// The key in a row of the tile, -1 for none.
template <int kDim>
__device__ __forceinline__ int key_at(const KeyDescriptor& tile, int row) {
  return tile.index[index_place<kBackwardShape<kDim, false>.keys>(row)];
}

}  // namespace dmattn::cuda::sm90
