// The portable backward by queries: a block keeps 128 queries and loops over the keys they see. grad_query stays in registers;
// rows of grad_key and grad_value are added in fp32 to global memory.
//
// This is the kernel for scattered keys: the work follows the number of keys that the tile sees, and the gradient of a
// gathered key goes back to the place of its row.
#pragma once

#include <type_traits>

#include "../common/kernel_limits.cuh"
#include "backward_tile.cuh"
#include "union_order.cuh"

namespace dmattn::cuda::sm80 {

template <int kDim, SmemBudget kSmemBudget>
struct alignas(128) BackwardDqShared {
  static constexpr BackwardShape kShape = kBackwardDqShape<kDim, kSmemBudget>;
  static constexpr int kColumns = kShape.warps / kShape.warp_rows, kWidth = kScoreWidth<kShape.keys>;
  static constexpr int kM = kShape.queries / kShape.warp_rows / 16, kN = kShape.keys / kColumns / 8;  // of a warp's scores
  uint16_t query[kShape.queries * kDim];  // at the end grad_query leaves from here
  uint16_t grad_out[kShape.queries * kDim];
  uint16_t key[kShape.late_stages][kShape.keys * kDim];
  uint16_t value[kShape.keys * kDim];
  uint16_t probability[kShape.queries * kScoreWidth<kShape.keys>];
  uint16_t grad_score[kShape.queries * kScoreWidth<kShape.keys>];
  KeyStage<kShape.queries, kShape.keys> stage[2];
  KeyQueues<kShape.warps * 32, kShape.keys> queues;
  uint32_t number;                                 // of the block, where sums have a fixed order
  float bias_sums[kShape.warp_rows][kShape.keys];  // likewise: the gradient of key_bias
};

// The terms of a thread's rows. Instances that take any logits subtract lse as it is, the others in base 2.
template <int kM>
struct QueryTerms {
  float lse2[kM][2], lse_rest2[kM][2], delta[kM][2];

  // `row`: of the padded queries of all heads, the thread's first.
  template <class Traits>
  __device__ __forceinline__ void load(const BackwardCall& call, int64_t row) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int64_t at = row + 16 * m + 8 * r;
        lse2[m][r] = (Traits::kLogits == Logits::kAny ? call.lse : call.lse2)[at];
        lse_rest2[m][r] = Traits::kLogits == Logits::kAny ? call.lse_rest2[at] : 0.0f;
        delta[m][r] = call.delta[at];
      }
    }
  }
  // Rows that see nothing but are not finite have a delta of 0 then. Are there any?
  __device__ __forceinline__ bool clear_bad() {
    bool has_bad = false;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!is_bad_row(lse2[m][r], delta[m][r])) continue;
        has_bad = true;
        delta[m][r] = 0.0f;
      }
    }
    return has_bad;
  }
};

// Clears such rows in shared memory, when their copies have landed.
template <int kDim, class Shared>
__device__ __forceinline__ void clear_bad_rows(const BackwardCall& call, Shared& shared, int batch, int head, int first_query) {
  copy_async_wait<0>();
  __syncthreads();
  for (int row = threadIdx.x; row < Shared::kShape.queries; row += Shared::kShape.warps * 32) {
    const int64_t at = (batch * call.b.forward.heads + head) * call.padded_queries + first_query + row;
    if (!is_bad_row(call.lse2[at], call.delta[at])) continue;
    clear_row<kDim>(shared.query, row);
    clear_row<kDim>(shared.grad_out, row);
  }
}

// Adds the gradient of key_bias of a chunk of a union, the sums of the block's warps in their order. A thread takes a key.
template <class Shared, class Stage>
__device__ __forceinline__ void add_bias_in_order(const Shared& shared, const Stage& stage, const AttentionParams& p,
                                                  float* grad_key_bias) {
  if (threadIdx.x >= Shared::kShape.keys) return;
  const int key = stage.index[threadIdx.x];
  float sum = 0.0f;
#pragma unroll
  for (int row = 0; row < Shared::kShape.warp_rows; ++row) sum += shared.bias_sums[row][threadIdx.x];
  if (key >= 0 && key < p.key_length) atomicAdd(grad_key_bias + key, sum);
}

// Scores and their gradients of a chunk of keys against the tile of queries: probabilities and score gradients to shared memory.
// Of a block of scores the warp has the rows from warp_row and the columns from warp_column on. grad_key_bias: of the head, null:
// not wanted. rows_are_huge: some lse may be.
template <class T, int kDim, class Traits, class Shared, class Scheduler, class Stage, int kM>
__device__ __forceinline__ void put_chunk(const BackwardCall& call, Shared& shared, const Scheduler& scheduler,
                                          const Stage& stage, const Chunk& chunk, const QueryTerms<kM>& terms, int batch,
                                          int head, int first_query, uint32_t key_tile, int warp_row, int warp_column, int lane,
                                          bool rows_are_huge, float* grad_key_bias) {
  constexpr int kN = Shared::kN, kWidth = Shared::kWidth;
  const AttentionParams& p = call.b.forward;
  const uint32_t query_tile = shared_address(shared.query), grad_out_tile = shared_address(shared.grad_out),
                 value_tile = shared_address(shared.value);
  const uint32_t probability_tile = shared_address(shared.probability), grad_score_tile = shared_address(shared.grad_score);
  float scores[kM][kN][4], grad_scores[kM][kN][4];
  clear(scores);
  multiply_by_rows<T, kDim / 16>(scores, Fragment<kDim>::tall(query_tile, warp_row, 0),
                                 Fragment<kDim>::wide(key_tile, warp_column, 0));
  if (Traits::kIsUnion) {
    hide_of_union(scores, stage, warp_row + lane / 4, warp_column + lane % 4 * 2);
  } else if (Traits::kLogits != Logits::kAny && scheduler.needs_test(stage, chunk)) {
    hide(scores, stage, chunk, warp_row + lane / 4, warp_column + lane % 4 * 2, scheduler.low());
  }
  const int column = warp_column + lane % 4 * 2;  // of the thread's first element
  const auto compare_values = [&](auto are_exponents) {
    clear(grad_scores);
    multiply_by_rows<T, kDim / 16>(grad_scores, Fragment<kDim>::tall(grad_out_tile, warp_row, 0),
                                   Fragment<kDim>::wide(value_tile, warp_column, 0), [&](int part, int total) {
                                     put_probabilities<T, Traits, decltype(are_exponents)::value>(
                                         PairPlace<kWidth>(probability_tile, warp_row, warp_column), scores, terms.lse2,
                                         call.scale_2, stage.key_bias, column, part, total);
                                   });
  };
  if (Traits::kBias == Bias::kKey && rows_are_huge) {
    to_exponents(scores, call, stage.key_bias, (batch * p.heads + head) * call.padded_queries + first_query + warp_row + lane / 4,
                 column);
    compare_values(std::true_type{});
  } else {
    compare_values(std::false_type{});
  }
  // Turn them into gradients of the scores.
  ColumnSums<kN> sums;
  if constexpr (Traits::kLogits == Logits::kAny) {
    to_gradients<T>(scores, grad_scores, terms.lse2, terms.lse_rest2, terms.delta, sums, call, batch, head, stage, chunk,
                    scheduler.needs_test(stage, chunk), first_query, warp_row + lane / 4, warp_column + lane % 4 * 2,
                    [&](int column) { return scheduler.key_of(stage, chunk, column); });
  } else {
    to_gradients(scores, grad_scores, terms.delta);
    if (Traits::kBias == Bias::kKey) sums.add(grad_scores);
  }
  // Add the gradient of key_bias.
  if (Traits::kBias != Bias::kNone && grad_key_bias) {
    sums.finish(warp_column + lane % 4 * 2, [&](int column, float sum) {
      const int key = scheduler.key_of(stage, chunk, column);
      if (Traits::kMayBeUnion && call.semaphores) {
        shared.bias_sums[warp_row / (16 * kM)][column] = sum;
      } else if (key >= 0 && key < p.key_length) {
        atomicAdd(grad_key_bias + key, sum);
      }
    });
  }
  if (Traits::kLogits == Logits::kAny)
    put_tile<T, kWidth>(probability_tile, scores, warp_row, warp_column, [](int, int) { return 1.0f; });
  put_tile<T, kWidth>(grad_score_tile, grad_scores, warp_row, warp_column, [](int, int) { return 1.0f; });
}

// query, grad_out [B, H, Sq, D or Dv], key, value [B, Hkv, Sk, D or Dv], lse2, delta [B, H, padded_queries] -> grad_query [B, H,
// Sq, D], and rows of key_sums. A block has one tile of queries of one head and loops over chunks of keys; scores are [queries,
// keys].
template <class T, int kDim, class Traits, SmemBudget kSmemBudget>
__global__ __launch_bounds__(
    kBackwardDqShape<kDim, kSmemBudget>.warps * 32,
    kBackwardDqShape<kDim, kSmemBudget>.blocks_per_sm) void backward_dq_kernel(const __grid_constant__ BackwardCall call) {
  if constexpr (!is_chosen(kSmemBudget)) {
    __trap();
    return;
  }
  using Shared = BackwardDqShared<kDim, kSmemBudget>;
  constexpr BackwardShape kShape = Shared::kShape;
  constexpr int kThreads = kShape.warps * 32, kColumns = Shared::kColumns, kWidth = Shared::kWidth;
  constexpr int kM = Shared::kM, kN = Shared::kN, kDimN = kDim / kColumns / 8;
  constexpr int kKeyWarps = kShape.keys / 32, kRowN = kDim / (kShape.warps / kKeyWarps) / 8;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const AttentionParams& p = call.b.forward;
  const int head_dim = static_cast<int>(p.head_dim), value_dim = static_cast<int>(p.value_dim);

  uint32_t number = block_index();
  if (Traits::kMayBeUnion && call.semaphores) number = draw_number(call.tile_counter, shared.number);
  const QueryTile<kShape.queries> here(p, call.live_keys, number);
  const UnionOrder order(call, number, query_tiles_of(p, call.live_keys, kShape.queries));
  const bool is_ordered = Traits::kMayBeUnion && order.is_ordered;
  const int batch = here.batch, head = here.head, kv_head = here.kv_head, first_query = here.first_query;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / kColumns * kM * 16, warp_column = warp % kColumns * kN * 8;
  const int key_row = warp % kKeyWarps * 32, row_part = warp / kKeyWarps * kRowN * 8;  // of this warp's grad_key and grad_value

  const uint32_t query_tile = shared_address(shared.query), grad_out_tile = shared_address(shared.grad_out);
  const uint32_t value_tile = shared_address(shared.value), key_tile_0 = shared_address(shared.key);
  const uint32_t probability_tile = shared_address(shared.probability), grad_score_tile = shared_address(shared.grad_score);

  // Start the copies of the queries and of the first chunk's keys and values.
  copy_tile<kDim, kThreads, kShape.queries>(query_tile, p.query, p.query_length, batch, head, first_query, head_dim);
  copy_tile<kDim, kThreads, kShape.queries>(grad_out_tile, call.b.grad_out, p.query_length, batch, head, first_query, value_dim);
  KeyScheduler<Traits, kThreads, kShape.queries, kShape.keys> scheduler(p, call.live_keys, shared.queues, batch, head, kv_head,
                                                                        first_query);
  Chunk chunk, coming;
  int buffer = 0;
  const auto copy_keys = [&](int to, const Chunk& of) {
    scheduler.template load_keys<kDim>(key_tile_0 + (kShape.late_stages == 2 ? to : 0) * kShape.keys * kDim * 2, shared.stage[to],
                                       of);
  };
  const auto copy_values = [&](int to, const Chunk& of) {
    scheduler.template load_values<kDim>(value_tile, shared.stage[to], of);
  };
  bool has_chunk = scheduler.next(shared.stage[0], chunk);
  if (has_chunk) copy_keys(0, chunk), copy_values(0, chunk);
  copy_async_commit();

  QueryTerms<kM> terms;
  terms.template load<Traits>(call, (batch * p.heads + head) * call.padded_queries + first_query + warp_row + lane / 4);
  if (__syncthreads_or(terms.clear_bad())) clear_bad_rows<kDim>(call, shared, batch, head, first_query);
  float grad_query[kM][kDimN][4];
  clear(grad_query);
  const int key_width = static_cast<int>(sum_width(p.head_dim)), value_width = static_cast<int>(sum_width(p.value_dim));
  const bool rows_are_huge = Traits::kBias == Bias::kKey && (*call.row_flags & kHugeRows) != 0;
  float* const grad_key_bias = Traits::kBias == Bias::kNone ? nullptr : row_of<float>(call.grad_key_bias, batch, head);

  while (has_chunk) {
    auto& stage = shared.stage[buffer];
    const uint32_t key_tile = key_tile_0 + (kShape.late_stages == 2 ? buffer : 0) * kShape.keys * kDim * 2;
    if (is_ordered) order.begin_chunk(stage.index[kShape.keys - 1]);
    copy_async_wait<0>();
    __syncthreads();

    // Scores and their gradients, to shared memory.
    put_chunk<T, kDim, Traits>(call, shared, scheduler, stage, chunk, terms, batch, head, first_query, key_tile, warp_row,
                               warp_column, lane, rows_are_huge, grad_key_bias);
    __syncthreads();
    if (is_ordered && Traits::kBias != Bias::kNone && grad_key_bias) add_bias_in_order(shared, stage, p, grad_key_bias);

    // The values are read: start on the next chunk.
    has_chunk = scheduler.next(shared.stage[buffer ^ 1], coming);
    if (has_chunk) copy_values(buffer ^ 1, coming);
    if (has_chunk && kShape.late_stages == 2) copy_keys(buffer ^ 1, coming);
    copy_async_commit();

    // Rows of grad_value and grad_key, and grad_query. The rows of one product are added beside the next.
    const int part_of_query = warp % kColumns * kDimN * 8;
    if (call.key_sums) {
      float *key_rows[2][2], *value_rows[2][2];
      find_key_sums(
          call, batch, kv_head, key_width, value_width, key_row + lane / 4,
          [&](int row) { return scheduler.key_of(stage, chunk, row); }, key_rows, value_rows);
      float grad_value[2][kRowN][4], grad_key[2][kRowN][4];
      clear(grad_value);
      accumulate<T, kShape.queries, kWidth, kDim>(grad_value, probability_tile, key_row, grad_out_tile, row_part);
      clear(grad_key);
      accumulate<T, kShape.queries, kWidth, kDim>(grad_key, grad_score_tile, key_row, query_tile, row_part,
                                                  AddRows<2, kRowN>{grad_value, value_rows, row_part, value_width});
      accumulate_queries<T, kShape.keys, kWidth, kDim>(grad_query, grad_score_tile, warp_row, key_tile, part_of_query,
                                                       AddRows<2, kRowN>{grad_key, key_rows, row_part, key_width});
    } else {
      accumulate_queries<T, kShape.keys, kWidth, kDim>(grad_query, grad_score_tile, warp_row, key_tile, part_of_query);
    }
    if (kShape.late_stages == 1 && has_chunk) {
      __syncthreads();
      copy_keys(buffer ^ 1, coming);
      copy_async_commit();
    }
    chunk = coming;
    buffer ^= 1;
    if (is_ordered && has_chunk) order.end_chunk(shared.stage[buffer].index[0]);
  }
  if (is_ordered) order.finish();

  copy_async_wait<0>();
  __syncthreads();
  put_tile<T, kDim>(query_tile, grad_query, warp_row, warp % kColumns * kDimN * 8,
                    [&](int m, int r) { return terms.lse2[m][r] == -negative_infinity() ? 0.0f : call.scale; });
  __syncthreads();
  store_tile<kDim, kThreads, kShape.queries>(shared.query, head_dim, [&](int r) {
    const int query = first_query + r;
    return query < p.query_length ? rows_of_head(call.b.grad_query, batch, head) + query * call.b.grad_query.row_stride * 2
                                  : nullptr;
  });
}

template <class T, int kDim, class Traits, SmemBudget kSmemBudget>
cudaError_t launch_backward_dq(const BackwardCall& call, cudaStream_t stream) {
  constexpr BackwardShape kShape = kBackwardDqShape<kDim, kSmemBudget>;
  constexpr int kBytes = sizeof(BackwardDqShared<kDim, kSmemBudget>);
  static_assert(kBytes <= (kSmemBudget == SmemBudget::kLarge ? 163 : 99) * 1024);
  const auto kernel = backward_dq_kernel<T, kDim, Traits, kSmemBudget>;
  static KernelAttribute shared_bytes;
  const cudaError_t status = allow_shared_bytes(shared_bytes, kernel, kBytes);
  if (status != cudaSuccess) return status;
  const AttentionParams& p = call.b.forward;
  const int64_t blocks = query_tiles_of(p, call.live_keys, kShape.queries) * p.batch * p.heads;
  if (blocks == 0) return cudaSuccess;
  kernel<<<grid_of(blocks), kShape.warps * 32, kBytes, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace dmattn::cuda::sm80
