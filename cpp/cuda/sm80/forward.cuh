// Attention forward for sm80 and later: a block for each (batch, head, query tile), with FlashAttention-2's schedule over chunks
// of keys.
//
// The keys of a chunk need not be neighbours: with intervals they are gathered row by row, so the work follows the number of
// keys that the tile sees, wherever they lie.
#pragma once

#include "../calls.h"
#include "../common/kernel_limits.cuh"
#include "../common/logits.cuh"
#include "../common/softmax.cuh"
#include "scheduler.cuh"

namespace dmattn::cuda::sm80 {

template <int kDim, class Traits>
struct alignas(128) ForwardShared {
  static constexpr ForwardShape kShape = kForwardShape<kDim, Traits>;
  uint16_t query[kShape.queries * kDim];  // at the end the output leaves from here
  uint16_t key[kShape.keys * kDim];
  uint16_t value[kShape.keys * kDim];
  KeyStage<kShape.queries, kShape.keys> stage[2];
  KeyQueues<kShape.warps * 32, kShape.keys> queues;
};

// Products become logits with key_bias. `column` is that of the thread's first score.
template <int kM, int kN>
__device__ __forceinline__ void add_key_bias(float (&scores)[kM][kN][4], const float* key_bias_of, int column, float scale) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float2 key_bias = *reinterpret_cast<const float2*>(&key_bias_of[column + 8 * n]);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[m][n][e] = fmaf(scores[m][n][e], scale, e % 2 == 0 ? key_bias.x : key_bias.y);
    }
  }
}

// Products become logits with everything that a call may have: softcap, key_bias, bias. `query` and `column` are those of the
// thread's first score, key_of(column) is a key of the chunk.
template <class T, int kM, int kN, class KeyOf>
__device__ __forceinline__ void add_terms(float (&scores)[kM][kN][4], const AttentionParams& p, const float* key_bias_of,
                                          int batch, int head, int first_query, int column, const KeyOf& key_of) {
  const LogitTerms<T> terms(p, batch, head);
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int at = column + 8 * n + e, key = key_of(at);
      const float key_bias = p.key_bias.data ? key_bias_of[at] : 0.0f;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& logit = scores[m][n][2 * r + e];
          logit =
              terms.capped(logit) + key_bias + terms.bias_at(first_query + 16 * m + 8 * r, key, static_cast<int>(p.query_length));
        }
      }
    }
  }
}

// Weights that dropout drops become 0.
template <int kM, int kN, class KeyOf>
__device__ __forceinline__ void drop_weights(float (&weights)[kM][kN][4], const Dropout& dropout, int first_query, int column,
                                             const KeyOf& key_of) {
  if (!dropout.is_on()) return;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t row_key = dropout.row_key(first_query + 16 * m + 8 * r);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = key_of(column + 8 * n + e);
          if (!dropout_keeps(row_key, static_cast<uint32_t>(key), dropout.threshold)) weights[m][n][2 * r + e] = 0.0f;
        }
      }
    }
  }
}

// query [B, H, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv] -> out [B, H, Sq, Dv], lse [B, H, Sq]. A block has one tile of
// queries of one head; each warp has some rows of it, with scores [rows, keys] and sums [rows, Dv] in registers.
template <class T, int kDim, class Traits>
__global__ __launch_bounds__(
    kForwardShape<kDim, Traits>.warps * 32,
    kForwardShape<kDim, Traits>.blocks_per_sm) void forward_kernel(const __grid_constant__ ForwardCall call) {
  constexpr ForwardShape kShape = kForwardShape<kDim, Traits>;
  constexpr int kThreads = kShape.warps * 32, kM = kShape.queries / kShape.warps / 16, kN = kShape.keys / 8;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardShared<kDim, Traits>*>(shared_bytes);
  const AttentionParams& p = call.p;

  const QueryTile<kShape.queries> here(p, call.live_keys);
  const int batch = here.batch, head = here.head, first_query = here.first_query;
  const int warp = threadIdx.x / 32;

  const uint32_t query_tile = shared_address(shared.query), key_tile = shared_address(shared.key),
                 value_tile = shared_address(shared.value);

  // Start the copies of the query tile and of the first chunk's keys.
  copy_tile<kDim, kThreads, kShape.queries>(query_tile, p.query, p.query_length, batch, head, first_query,
                                            static_cast<int>(p.head_dim));
  KeyScheduler<Traits, kThreads, kShape.queries, kShape.keys> scheduler(p, call.live_keys, shared.queues, batch, head,
                                                                        here.kv_head, first_query);
  Chunk chunk, coming;
  int buffer = 0;
  bool has_chunk = scheduler.next(shared.stage[0], chunk);
  if (has_chunk) scheduler.template load_keys<kDim>(key_tile, shared.stage[0], chunk);
  copy_async_commit();

  float out[kM][kDim / 8][4];
  clear(out);
  constexpr bool kNatural = Traits::kBias != Bias::kNone;  // scores become the logits themselves
  OnlineSoftmax<kM, kNatural> softmax;
  const auto query_fragment = Fragment<kDim>::tall(query_tile, warp * kM * 16, 0);
  const auto key_fragment = Fragment<kDim>::wide(key_tile, 0, 0);

  while (has_chunk) {
    auto& stage = shared.stage[buffer];
    // Fresh thread indices, here and below: registers are too few to keep what follows from one.
    const int lane = static_cast<int>(thread_index() % 32), tile_row = warp * kM * 16 + lane / 4,
              column = lane % 4 * 2;  // of this thread's first element
    const int thread = static_cast<int>(thread_index());
    const auto queries = [&] {
      if constexpr (kN == 16) return Fragment<kDim>::tall(query_tile, thread / 32 * kM * 16, 0, thread % 32);
      if constexpr (kN != 16) return query_fragment;
    };
    // Wait for the keys; no warp reads the values of the chunk before any more, so start the copies of this chunk's.
    copy_async_wait<0>();
    __syncthreads();
    scheduler.template load_values<kDim>(value_tile, stage, chunk);
    copy_async_commit();
    // Scheduling gathered keys needs many registers, so it is done here, where few are in use.
    if (Traits::kGathers) has_chunk = scheduler.next(shared.stage[buffer ^ 1], coming);

    // Multiply scores = Q K^T.
    float scores[kM][kN][4];
    clear(scores);
    multiply_by_rows<T, kDim / 16>(scores, queries(), key_fragment);

    // Add biases, and cap the scores.
    [[maybe_unused]] const auto key_of = [&](int at) { return scheduler.key_of(stage, chunk, at); };
    if constexpr (Traits::kBias == Bias::kKey) add_key_bias(scores, stage.key_bias, column, call.scale);
    if constexpr (Traits::kLogits == Logits::kAny)
      add_terms<T>(scores, p, stage.key_bias, batch, head, first_query + tile_row, column, key_of);
    // Hide what some queries of the tile do not see.
    if (scheduler.is_union()) {
      hide_of_union(scores, stage, tile_row, column);
    } else if (scheduler.needs_test(stage, chunk)) {
      hide(scores, stage, chunk, tile_row, column, scheduler.low());
    }

    // Wait for the values; no warp reads these keys any more, so start the copies of the next ones.
    copy_async_wait<0>();
    __syncthreads();
    if (!Traits::kGathers) has_chunk = scheduler.next(shared.stage[buffer ^ 1], coming);
    if (has_chunk) scheduler.template load_keys<kDim>(key_tile, shared.stage[buffer ^ 1], coming);
    copy_async_commit();

    // Turn scores into weights, and rescale the sums if a maximum moved.
    softmax.update(scores, call.scale_2, out);
    if constexpr (Traits::kLogits == Logits::kAny)
      drop_weights(scores, Dropout(p, batch, head), first_query + tile_row, column, key_of);
    // Multiply out += weights V.
    multiply_by_columns<T, kShape.keys / 16>(
        out, [&](int k, int m, uint32_t (&a)[4]) { as_operand<T>(scores[m], k, a); },
        Fragment<kDim>::tall(value_tile, 0, 0, (Traits::kGathers || kN == 16 ? thread_index() : threadIdx.x) % 32));
    chunk = coming;
    buffer ^= 1;
  }

  // Normalise, and write out by way of shared memory so that rows leave in 16-byte pieces.
  copy_async_wait<0>();
  __syncthreads();
  const QueryTile<kShape.queries> tile(p, call.live_keys);
  float keep_scale = 1.0f;
  if constexpr (Traits::kLogits == Logits::kAny) keep_scale = Dropout(p, tile.batch, tile.head).keep_scale;
  put_tile<T, kDim>(query_tile, out, warp * kM * 16, 0, [&](int m, int r) {
    const int lane = threadIdx.x % 32, row = warp * kM * 16 + lane / 4 + 16 * m + 8 * r;
    LogSum log_sum;
    float factor;
    softmax.finish(m, r, log_sum, factor);
    if (lane % 4 == 0 && tile.first_query + row < p.query_length) {
      const int64_t at = (tile.batch * p.heads + tile.head) * p.query_length + tile.first_query + row;
      static_cast<float*>(p.lse)[at] = log_sum.value;
      if (kNatural && p.lse_rest) static_cast<float*>(p.lse_rest)[at] = log_sum.rest;
    }
    return factor * keep_scale;
  });
  __syncthreads();
  store_tile<kDim, kThreads, kShape.queries>(shared.query, static_cast<int>(p.value_dim), [&](int r) {
    const int query = tile.first_query + r;
    return query < p.query_length ? rows_of_head(p.out, tile.batch, tile.head) + query * p.out.row_stride * 2 : nullptr;
  });
}

template <class T, int kDim, class Traits>
cudaError_t launch_forward(const ForwardCall& call, cudaStream_t stream) {
  constexpr ForwardShape kShape = kForwardShape<kDim, Traits>;
  constexpr int kBytes = sizeof(ForwardShared<kDim, Traits>);
  static_assert(kBytes <= 99 * 1024);
  const auto kernel = forward_kernel<T, kDim, Traits>;
  static KernelAttribute shared_bytes;
  const cudaError_t status = allow_shared_bytes(shared_bytes, kernel, kBytes);
  if (status != cudaSuccess) return status;
  const int64_t blocks = query_tiles_of(call.p, call.live_keys, kShape.queries) * call.p.batch * call.p.heads;
  if (blocks == 0) return cudaSuccess;
  kernel<<<grid_of(blocks), kShape.warps * 32, kBytes, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace dmattn::cuda::sm80
