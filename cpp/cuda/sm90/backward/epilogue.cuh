// Where results of the Hopper backward go: grad_query is added to global memory chunk by chunk, grad_key and grad_value leave at
// the end of a tile visit.
#pragma once

#include "score_place.cuh"

namespace dmattn::cuda::sm90 {

// Where the thread's first sum of grad_query is in the rows of a chunk, of which the warpgroup has a part. The sums keep the
// order in which registers hold them: a warp adds 512 consecutive bytes at a time, and no register has to be moved.
template <class Shared, int kDim>
__device__ __forceinline__ uint32_t first_sum(uint32_t group, int head_dim) {
  const uint32_t part = Shared::kPartColumns < kDim ? Shared::kPartColumns : static_cast<uint32_t>(sum_width(head_dim));
  return group * 64 * part + thread_index() % kWarpgroup * 4;
}

// Adds the warpgroup's part of a chunk's grad_query to query_sums. to: of the thread's first sum.
template <class Shared, int kDim, int kTiles>
__device__ __forceinline__ void add_grad_query(float* to, const float (&from)[kTiles][4], uint32_t group, int head_dim) {
  const int columns = head_dim - static_cast<int>(group) * Shared::kPartColumns % kDim;
  const auto add = [&](int i) { add_4(to + i * kSumTile, from[i][0], from[i][1], from[i][2], from[i][3]); };
  if (columns >= kTiles * 8) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) add(i);
  } else {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (i * 8 < columns) add(i);
    }
  }
}

// The same where the queries are gathered: to their rows of query_sums, in the order of sum_place.
template <class Shared, int kDim, int kTiles, int kQueries>
__device__ __forceinline__ void add_listed_grad_query(const QueryDescriptor& descriptor, const ListedQueries<kQueries>& listed,
                                                      const float (&from)[kTiles][4], uint32_t group, int head_dim) {
  const int thread = static_cast<int>(thread_index() % kWarpgroup), lane = thread % 32;
  const int first_row = static_cast<int>(group) * Shared::kPartQueries % kQueries + thread / 32 * 16 + lane / 4;
  const int first_column = static_cast<int>(group) * Shared::kPartColumns % kDim, width = static_cast<int>(sum_width(head_dim));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = listed.query[index_place<kQueries>(first_row + 8 * r)];
    if (query < 0) continue;
    float* const to = descriptor.sums + static_cast<int64_t>(query) * width + first_column + lane % 4 * 4;
    const auto add = [&](int i) {
      add_4(to + i * 8, from[i][2 * r], from[i][2 * r + 1], from[i + 1][2 * r], from[i + 1][2 * r + 1]);
    };
    if (first_column + kTiles * 8 <= width) {
#pragma unroll
      for (int i = 0; i < kTiles; i += 2) add(i);
    } else {
#pragma unroll
      for (int i = 0; i < kTiles; i += 2) {
        if (first_column + i * 8 < width) add(i);
      }
    }
  }
}

// Adds grad_key and grad_value of the thread's two keys, and of its columns, to rows of key_sums. A missing key has the spare
// row, or where many may be missing, and would wait for each other there, none.
template <int kDim, bool kSkipsMissing, int kOut>
__device__ __forceinline__ void add_key_sums(const BackwardCall& call, int batch, int kv_head, const int (&keys_of_rows)[2],
                                             const float (&grad_key)[kOut][4], const float (&grad_value)[kOut][4]) {
  const AttentionParams& p = call.b.forward;
  const int64_t key_width = sum_width(p.head_dim), both = key_width + sum_width(p.value_dim);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = keys_of_rows[r];
    if (kSkipsMissing && key < 0) continue;
    const int64_t at = key >= 0 ? (batch * p.kv_heads + kv_head) * p.key_length + key : p.batch * p.kv_heads * p.key_length;
    const ScorePlace<kDim> place;
    float* const to = call.key_sums + at * both + place.first_column + place.lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < kOut; i += 2) {
      if (place.first_column + i * 8 < key_width) {
        add_4(to + i * 8, grad_key[i][2 * r], grad_key[i][2 * r + 1], grad_key[i + 1][2 * r], grad_key[i + 1][2 * r + 1]);
      }
      if (place.first_column + i * 8 < both - key_width) {
        add_4(to + key_width + i * 8, grad_value[i][2 * r], grad_value[i][2 * r + 1], grad_value[i + 1][2 * r],
              grad_value[i + 1][2 * r + 1]);
      }
    }
  }
}

// Writes grad_key and grad_value of the thread's two keys, and of its columns; keys below 0 or beyond the length have none.
template <class T, int kDim, int kOut>
__device__ __forceinline__ void store_key_gradients(const BackwardCall& call, int batch, int kv_head,
                                                    const int (&keys_of_rows)[2], const float (&grad_key)[kOut][4],
                                                    const float (&grad_value)[kOut][4]) {
  const AttentionParams& p = call.b.forward;
  const auto store = [&](const TensorView& tensor, int64_t dim, const float (&sums)[kOut][4], float factor, int r) {
    asm volatile("" ::: "memory");  // so that stores come one after the other: registers are short
    const ScorePlace<kDim> place;
    const int key = keys_of_rows[r];
    T* const to =
        static_cast<T*>(tensor.data) + batch * tensor.batch_stride + kv_head * tensor.head_stride + key * tensor.row_stride;
#pragma unroll
    for (int i = 0; i < kOut; i += 4) {
      uint32_t piece[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        piece[j] = Element<T>::narrow_pair(sums[i + j][2 * r] * factor, sums[i + j][2 * r + 1] * factor);
      transpose_quad(piece);
      const int at = place.first_column + (i + place.lane % 4) * 8;
      if (key >= 0 && key < p.key_length && at < dim)
        *reinterpret_cast<uint4*>(to + at) = {piece[0], piece[1], piece[2], piece[3]};
    }
  };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    store(call.b.grad_key, p.head_dim, grad_key, call.scale, r);
    store(call.b.grad_value, p.value_dim, grad_value, call.keep_scale, r);
  }
}

// Score gradients [keys, queries] of the warp to their tile in shared memory.
template <int kDim, int kSteps>
__device__ __forceinline__ void put_gradients(uint32_t tile, const uint32_t (&gradients)[kSteps][4]) {
  const ScorePlace<kDim> place;
  const int tile_row = place.first_row + place.lane % 16;
  // Rows are 128 bytes and begin at multiples of that, so an exclusive or moves the pieces within a row.
  const uint32_t to = tile + tile_row * 128 + ((place.lane / 16) ^ (tile_row % 8)) * 16;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    store_matrix((to ^ k % 4 * 32) + k / 4 * (kBackwardKeys * 128), gradients[k][0], gradients[k][1], gradients[k][2],
                 gradients[k][3]);
  }
}

}  // namespace dmattn::cuda::sm90
