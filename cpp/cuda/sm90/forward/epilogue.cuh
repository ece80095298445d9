// The end of a tile in the Hopper forward: normalises the sums and writes out and lse.
#pragma once

#include "../../common/softmax.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/wgmma.cuh"
#include "../maps.h"
#include "bias.cuh"
#include "shared.cuh"

namespace dmattn::cuda::sm90 {

// Normalises and writes a tile. Where a block has room for two tiles of queries, a warp's rows of the output take the place of
// its rows of the queries in shared memory, and a tensor copy writes them out. `row` is the thread's first row.
template <class T, int kDim, class Traits, class Softmax>
__device__ __forceinline__ void store_tile(const ForwardCall& call, const ForwardWork& work, const ForwardMaps& maps,
                                           ForwardShared<kDim, Traits>& shared, float (&out)[1][kDim / 8][4], const Softmax& sums,
                                           uint32_t tile_number, int group, int warp, int lane, int row) {
  using Shared = ForwardShared<kDim, Traits>;
  constexpr ForwardShape kShape = Shared::kShape;
  constexpr int kRows = Shared::kRows, kOut = kDim / 8, kQueryTileDescriptors = Shared::kQueryTileDescriptors;
  constexpr bool kByCopy = Shared::kByCopy, kNatural = Traits::kBias != Bias::kNone;
  const AttentionParams& p = call.p;
  const QueryTileDescriptor tile = shared.tiles[tile_number % kQueryTileDescriptors];
  // Find the factor and the log-sum-exp of the thread's two rows.
  float scales[2];
  LogSum log_sums[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sums.finish(0, r, log_sums[r], scales[r]);
    if constexpr (Traits::kMayDrop) scales[r] *= call.keep_scale;
  }
  // Clear rows that see nothing: NaN of keys that other rows see must not reach them.
  if (__any_sync(0xffffffffu, scales[0] == 0.0f || scales[1] == 0.0f)) {
#pragma unroll
    for (int i = 0; i < kOut; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[0][i][e] = scales[e / 2] == 0.0f ? 0.0f : out[0][i][e];
    }
  }
  // Write the rows straight to global memory, or by way of shared memory and a tensor copy.
  if constexpr (!kByCopy) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = tile.head + work.head_of_row(row + 8 * r);
      const int query = tile.first_query + work.query_of_row(row + 8 * r);
      T* const to =
          static_cast<T*>(p.out.data) + tile.batch * p.out.batch_stride + head * p.out.head_stride + query * p.out.row_stride;
#pragma unroll
      for (int i = 0; i < kOut; i += 4) {
        uint32_t piece[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          piece[j] = Element<T>::narrow_pair(out[0][i + j][2 * r] * scales[r], out[0][i + j][2 * r + 1] * scales[r]);
        }
        transpose_quad(piece);
        const int at = (i + lane % 4) * 8;
        if (query < p.query_length && at < p.value_dim) {
          *reinterpret_cast<uint4*>(to + at) = {piece[0], piece[1], piece[2], piece[3]};
        }
      }
    }
  }
  if constexpr (kByCopy) {
    const int first_row = row & ~15;  // of the warp
    const uint32_t rows = shared_address(shared.query[tile_number % kShape.query_tiles]) + first_row * 128;
    const int own = read_lane();
    const uint32_t to = rows + own % 16 * 128, swizzle = ((own / 16) ^ (own % 8)) * 16;
#pragma unroll
    for (int i = 0; i < kOut; i += 2) {
      store_matrix(to + i / 8 * (kRows * 128) + (swizzle ^ (i % 8 * 16)),
                   Element<T>::narrow_pair(out[0][i][0] * scales[0], out[0][i][1] * scales[0]),
                   Element<T>::narrow_pair(out[0][i][2] * scales[1], out[0][i][3] * scales[1]),
                   Element<T>::narrow_pair(out[0][i + 1][0] * scales[0], out[0][i + 1][1] * scales[0]),
                   Element<T>::narrow_pair(out[0][i + 1][2] * scales[1], out[0][i + 1][3] * scales[1]));
    }
    fence_async();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int panel = 0; panel < kDim / 64; ++panel) {
        store_box(&maps.out, rows + panel * (kRows * 128), panel * 64, work.head_of_row(first_row),
                  tile.first_query + work.query_of_row(first_row), tile.head >> work.log2_heads_per_tile, tile.batch);
      }
      commit_stores();
    }
  }
  // Write lse, after the fence, which waits for stores.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = tile.head + work.head_of_row(row + 8 * r);
    const int query = tile.first_query + work.query_of_row(row + 8 * r);
    if (query < p.query_length && lane % 4 == 0) {
      const int64_t at = (tile.batch * p.heads + head) * p.query_length + query;
      static_cast<float*>(p.lse)[at] = log_sums[r].value;
      if (kNatural && p.lse_rest) static_cast<float*>(p.lse_rest)[at] = log_sums[r].rest;
    }
  }
}

}  // namespace dmattn::cuda::sm90
