// Attention backward for Hopper and head sizes from 129 to 256: blocks as in kernel.cuh, whose two computing warpgroups share
// one tile of 64 keys.
//
// The sums grad_key and grad_value of 64 keys by 256 columns are half of all registers, so each warpgroup has half of their
// columns, which needs the probabilities and the score gradients of all 64 queries of a chunk. Each computes them for half of the
// queries and leaves them in shared memory, where both read them as operands.
//
// Estimate for a chunk of 64 x 64: its five products take 2,560 cycles of the tensor cores, or 3,072 where the narrow products
// for scores wait for operands from shared memory. Query, grad_out and the sums of grad_query move 128 KiB between the
// multiprocessor and L2. 400 TFLOP/s on 132 multiprocessors are 5,900 cycles a chunk.
#pragma once

#include "kernel.cuh"

namespace dmattn::cuda::sm90 {

inline constexpr int kWideDim = 256;

template <bool kHasOptions>
struct alignas(1024) BackwardShared<kWideDim, kHasOptions> {
  static constexpr BackwardShape kShape = kBackwardShape<kWideDim, kHasOptions>;
  static constexpr bool kSplitsChunks = true;                       // grad_out of a chunk is announced after its query
  static constexpr int kPieces = 2;                                 // in which grad_query of a chunk is added
  static constexpr int kKeyDescriptors = 2, kQueryDescriptors = 8;  // as for smaller heads
  static_assert(kQueryDescriptors > kShape.query_stages + 2);
  uint16_t key[kShape.keys * kWideDim];
  uint16_t value[kShape.keys * kWideDim];
  uint16_t query[kShape.query_stages][kShape.queries * kWideDim];
  uint16_t grad_out[kShape.query_stages][kShape.queries * kWideDim];
  uint16_t weight[kShape.keys * kShape.queries];         // keys by queries: probabilities
  uint16_t grad_score[2][kShape.keys * kShape.queries];  // keys by queries
  alignas(128) float lse2[kShape.query_stages][kShape.queries];
  alignas(128) float delta[kShape.query_stages][kShape.queries];
  KeyDescriptor key_descriptors[kKeyDescriptors];
  QueryDescriptor query_descriptors[kQueryDescriptors];
  uint32_t work_tile, query_tile_visit;  // the work tile drawn last; the tile visit whose queries are loaded
  int row_flags;                         // a copy
  uint64_t descriptor_full[kKeyDescriptors], descriptor_empty[kKeyDescriptors];
  uint64_t key_full, value_full, tile_empty;
  uint64_t query_full[kShape.query_stages], grad_out_full[kShape.query_stages], query_empty[kShape.query_stages];
  uint64_t weight_full, weight_empty, score_full;
  // As for smaller heads.
  uint64_t semaphore_acquired, semaphore_released, tile_visit_loaded;
  alignas(128) uint32_t row_hash[kShape.query_stages][kShape.queries];
};

// As for smaller heads, but both warpgroups have the same keys, the second one the later half of the queries. The warpgroup's
// columns of grad_query, too, begin at first_column.
template <>
struct ScorePlace<kWideDim> {
  int lane, column, row, first_row, first_column;
  __device__ __forceinline__ ScorePlace() {
    const int thread = static_cast<int>(thread_index()), group = thread / kWarpgroup;
    lane = thread % 32, column = group * (kBackwardShape<kWideDim, false>.queries / kConsumers) + lane % 4 * 2;
    first_row = thread % kWarpgroup / 32 * 16, row = first_row + lane / 4, first_column = group * (kWideDim / kConsumers);
  }
  __device__ __forceinline__ int thread() const { return first_column + first_row * 2 + lane; }
  static_assert(kWideDim / kConsumers == kWarpgroup);  // so first_column is the warpgroup's first thread, too
};

// Probabilities or score gradients of the warp, 16 keys by half of the queries, to their tile in shared memory.
template <int kSteps>
__device__ __forceinline__ void put_scores(uint32_t tile, const uint32_t (&scores)[kSteps][4]) {
  const ScorePlace<kWideDim> place;
  const int tile_row = place.first_row + place.lane % 16;
  const uint32_t to = tile + tile_row * 128;
  const uint32_t swizzle = ((place.column / 8 + place.lane / 16) ^ (tile_row % 8)) * 16;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) store_matrix(to + (swizzle ^ k * 32), scores[k][0], scores[k][1], scores[k][2], scores[k][3]);
}

// Adds a piece of grad_query, 64 queries by kTiles * 8 columns, to global memory, in tiles of sums. to: the thread's place in the
// first tile; columns: how many of the piece there are.
template <int kTiles>
__device__ __forceinline__ void add_wide_grad_query(float* to, int columns, const float (&from)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    if (i * 8 >= columns) break;
    add_4(to + i * kSumTile, from[i][0], from[i][1], from[i][2], from[i][3]);
  }
}

// The products of a warpgroup. Each is issued; committing and waiting are up to the caller.
template <class T, bool kHasOptions>
struct WideProducts {
  using Shared = BackwardShared<kWideDim, kHasOptions>;
  static constexpr BackwardShape kShape = Shared::kShape;
  static constexpr int kMine = kShape.queries / kConsumers;  // queries of the warpgroup's scores
  static constexpr int kColumns = kWideDim / kConsumers;     // of the warpgroup's sums
  static constexpr int kPiece = 64;                          // columns of grad_query that are computed at a time
  static constexpr int kKeyPanel = kShape.keys * 128, kQueryPanel = kShape.queries * 128;
  static constexpr uint32_t kQueryStep = step_of(kShape.queries * kWideDim * 2);
  static constexpr uint32_t kToValues = step_of(offsetof(Shared, value) - offsetof(Shared, key));
  static constexpr uint32_t kToGradOuts = step_of(offsetof(Shared, grad_out) - offsetof(Shared, query));
  static constexpr uint32_t kScoreStep = step_of(kShape.keys * kShape.queries * 2);
  static constexpr uint32_t kToGradScores = step_of(offsetof(Shared, grad_score) - offsetof(Shared, weight));
  uint32_t keys, my_key_columns, my_queries, my_query_columns, weights;  // tiles, or parts of them, as they are described
  // Panels of 64 columns that hold the columns of queries and keys, and of values; whether any of the warpgroup's own panels do.
  // Products with the others are zero. They are left out, but for those of the first two panels, which D or Dv
  // fills, and those of grad_key.
  int head_panels, value_panels;
  bool has_second_piece, has_values;

  __device__ __forceinline__ WideProducts(const Shared& shared, const AttentionParams& p)
      : head_panels((static_cast<int>(p.head_dim) + 63) / 64), value_panels((static_cast<int>(p.value_dim) + 63) / 64) {
    const uint32_t group = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);  // the same in all lanes
    const int first_panel = static_cast<int>(group) * (kColumns / 64);
    has_second_piece = head_panels > first_panel + 1, has_values = value_panels > first_panel;
    keys = describe_panels(shared_address(shared.key), kKeyPanel);
    my_key_columns = keys + step_of(group * (kColumns / 64) * kKeyPanel);
    const uint32_t queries = describe_panels(shared_address(shared.query), kQueryPanel);
    my_queries = queries + step_of(group * kMine * 128);
    my_query_columns = queries + step_of(group * (kColumns / 64) * kQueryPanel);
    weights = describe_panels(shared_address(shared.weight), kKeyPanel);
  }

  // to = keys * queries^T, or values * grad_out^T, for half of the queries.
  __device__ __forceinline__ void begin_rows(float (&to)[kMine / 8][4], uint32_t a, uint32_t b, int panels) const {
#pragma unroll
    for (int k = 0; k < kWideDim / 16; ++k) {
      if (k >= kWideDim / 32 && k % 4 == 0 && k / 4 >= panels) break;
      Product<T, kMine>::from_shared(to, complete(a + step_of_columns(k, kKeyPanel)),
                                     complete(b + step_of_columns(k, kQueryPanel)), k > 0);
    }
  }
  __device__ __forceinline__ void begin_scores(float (&to)[kMine / 8][4], uint32_t stage) const {
    begin_rows(to, keys, my_queries + stage * kQueryStep, head_panels);
  }
  __device__ __forceinline__ void begin_grad_scores(float (&to)[kMine / 8][4], uint32_t stage) const {
    begin_rows(to, keys + kToValues, my_queries + kToGradOuts + stage * kQueryStep, value_panels);
  }

  // to += scores * queries, or scores * grad_out: half of the columns of a sum over queries.
  __device__ __forceinline__ void begin_sums(float (&to)[kColumns / 8][4], uint32_t a, uint32_t b) const {
#pragma unroll
    for (int k = 0; k < kShape.queries / 16; ++k) {
      Product<T, kColumns>::template from_shared<false, true>(to, complete(a + step_of(k * 32)),
                                                              complete(b + step_of(k * (16 * 128))), true);
    }
  }
  __device__ __forceinline__ void begin_grad_value(float (&to)[kColumns / 8][4], uint32_t stage) const {
    if (!has_values) return;
    begin_sums(to, weights, my_query_columns + kToGradOuts + stage * kQueryStep);
  }
  __device__ __forceinline__ void begin_grad_key(float (&to)[kColumns / 8][4], uint32_t stage, uint32_t chunk) const {
    begin_sums(to, weights + kToGradScores + chunk % 2 * kScoreStep, my_query_columns + stage * kQueryStep);
  }

  // to = grad_scores^T * keys: a piece of half of the columns.
  __device__ __forceinline__ void begin_grad_query(float (&to)[kPiece / 8][4], int piece, uint32_t chunk) const {
    if (piece > 0 && !has_second_piece) return;
    const uint32_t a = weights + kToGradScores + chunk % 2 * kScoreStep;
#pragma unroll
    for (int k = 0; k < kShape.keys / 16; ++k) {
      Product<T, kPiece>::template from_shared<true>(to, complete(a + step_of(k * (16 * 128))),
                                                     complete(my_key_columns + step_of(piece * kKeyPanel + k * (16 * 128))),
                                                     k > 0);
    }
  }
};

// query, grad_out [B, H, Sq, D or Dv], key, value [B, Hkv, Sk, D or Dv], lse2, delta [B, H, padded_queries] -> grad_key,
// grad_value (or rows of key_sums), query_sums. A computing warpgroup, one object for each thread: a tile of 64 keys against
// chunks of 64 queries. Its scores and their gradients are [64 keys, 32 queries], its sums have 128 columns.
template <class T, class Traits>
class WideGradientConsumer {
 public:
  using Shared = BackwardShared<kWideDim, Traits::kHasOptions>;

  __device__ __forceinline__ WideGradientConsumer(const BackwardCall& call, Shared& shared)
      : call_(call), shared_(shared), products_(shared, call.b.forward) {}

  __device__ __forceinline__ void run() {
    for (;; ++tile_visit_) {
      descriptor_full_.wait_full(tile_visit_);
      const KeyDescriptor& tile = shared_.key_descriptors[tile_visit_ % Shared::kKeyDescriptors];
      if (tile.head < 0) break;
      compute_tile(tile);
    }
  }

 private:
  using Products = WideProducts<T, Traits::kHasOptions>;
  static constexpr BackwardShape kShape = Shared::kShape;
  static constexpr int kDim = kWideDim, kN = Products::kMine / 8, kSteps = Products::kMine / 16, kOut = Products::kColumns / 8,
                       kPieceN = Products::kPiece / 8;
  static constexpr bool kIsGathered = Traits::kGathers, kHasOptions = Traits::kHasOptions,
                        kHasBias = Traits::kBias != Bias::kNone;

  // One visit of a tile of keys: by all queries that see it.
  //
  // The tensor cores always have a product to do beside what the threads do. Scores are begun beside the sums of the chunk
  // before. The two pieces of grad_query have the same registers one after the other and are added a chunk late, each beside
  // products that last as long. A tile visit's first chunk computes a piece that means nothing, and its last begins scores that
  // mean nothing, so that registers are the same on all ways through the loop.
  __device__ __forceinline__ void compute_tile(const KeyDescriptor& tile) {
    head_ = -1;
#pragma unroll
    for (int i = 0; i < kOut; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) grad_key_[i][e] = grad_value_[i][e] = 0.0f;
    }
    const uint32_t first_chunk = n_ - tile_visit_;  // descriptors that ended a tile visit do not count
    float scores[kN][4], grad_scores[kN][4], grad_query[kPieceN][4];
    float* to = nullptr;  // where the warp's part of grad_query of the last chunk is added
    key_full_.wait_full(tile_visit_);
    bool has_chunk = begin_scores(scores);
    value_full_.wait_full(tile_visit_);
    wait_products<0>();
    while (has_chunk) has_chunk = compute_chunk(tile, first_chunk, scores, grad_scores, grad_query, to);
    end_tile(tile, first_chunk, scores, grad_query, to);
  }

  // Computes chunk n of queries, of which scores are there, and the scores of the next one. True: that one is a chunk.
  __device__ __forceinline__ bool compute_chunk(const KeyDescriptor& tile, uint32_t first_chunk, float (&scores)[kN][4],
                                                float (&grad_scores)[kN][4], float (&grad_query)[kPieceN][4], float*& to) {
    const uint32_t stage = n_ % kShape.query_stages, chunk = n_ - tile_visit_;
    const QueryDescriptor& descriptor = shared_.query_descriptors[n_ % Shared::kQueryDescriptors];
    uint32_t weights[kSteps][4], gradients[kSteps][4];
    uint32_t slopes[kSteps][4], cap_slopes[kSteps][4];  // as for smaller heads
    // Scores = K Q^T are there. Issue grad_scores = V dO^T.
    grad_out_full_.wait_full(n_);
    pin(scores);
    pin(grad_query);
    if (shared_.row_flags & kBadRows) clear_bad_rows(shared_, stage);
    pin(grad_scores);
    begin_products();
    products_.begin_grad_scores(grad_scores, stage);
    commit_products();
    // Hide scores, and turn the others into probabilities.
    if (kHasBias && descriptor.head != head_) {
      flush_bias<kDim>(call_, tile, head_, bias_sum_);
      read_key_bias<kDim>(call_.b.forward, tile, ScorePlace<kDim>().row, descriptor.head,
                          kHasOptions && (shared_.row_flags & kHugeRows), bias_2_);
    }
    head_ = descriptor.head;
    const int column = weigh(tile, descriptor, stage, scores, weights, slopes, cap_slopes);
    // Leave them in shared memory, and issue grad_value += weights dO when the other warpgroup has, too.
    weight_empty_.wait_empty(chunk);
    put_scores(shared_address(shared_.weight), weights);
    fence_async();
    barrier_arrive(weight_full_.at(chunk));
    weight_full_.wait_full(chunk);
    pin(grad_value_);
    begin_products();
    products_.begin_grad_value(grad_value_, stage);
    commit_products();

    // Add the first piece of grad_query = grad_scores^T K of the chunk before to global memory, and issue the second.
    if (chunk > first_chunk) add(to, grad_query, 0, chunk - 1);
    pin(grad_query);
    begin_products();
    products_.begin_grad_query(grad_query, 1, chunk - 1);
    commit_products();
    // Wait for grad_scores. Compute the gradients of the scores from the probabilities in 16 bits.
    wait_products<2>();
    pin(grad_scores);
    const QueryTerms<0> delta(&shared_.delta[stage][column]);
    differentiate_scores<T, Traits, false>(call_, grad_scores, weights, slopes, delta, bias_sum_);
    differentiate_bias<T, kDim, Traits>(call_, tile, descriptor, grad_scores, slopes, cap_slopes);
    narrow<T>(gradients, grad_scores);
    // Leave them in shared memory, and issue grad_key += grad_scores Q. Both warpgroups have read those of two chunks ago,
    // because both have left the weights of this chunk.
    put_scores(shared_address(shared_.grad_score[chunk % 2]), gradients);
    fence_async();
    barrier_arrive(score_full_.at(chunk));
    score_full_.wait_full(chunk);
    pin(grad_key_);
    begin_products();
    products_.begin_grad_key(grad_key_, stage, chunk);
    commit_products();
    // Issue the scores of the next chunk. Add the second piece of the chunk before, and issue the first of this one.
    ++n_;
    const bool has_chunk = begin_scores(scores);
    wait_products<2>();
    pin(grad_value_);
    pin(grad_query);
    barrier_arrive(weight_empty_.at(chunk));
    if (chunk > first_chunk) add(to, grad_query, 1, chunk - 1);
    const ScorePlace<kDim> place;
    to = descriptor.sums + place.first_column * 64 + place.first_row / 16 * 128 + place.lane * 4;
    pin(grad_query);
    begin_products();
    products_.begin_grad_query(grad_query, 0, chunk);
    commit_products();
    // The chunk's place is free when grad_key is there.
    wait_products<2>();
    pin(grad_key_);
    barrier_arrive(query_empty_.at(n_ - 1));
    wait_products<0>();
    return has_chunk;
  }

  // Adds the last pieces of grad_query, then writes grad_key and grad_value.
  __device__ __forceinline__ void end_tile(const KeyDescriptor& tile, uint32_t first_chunk, float (&scores)[kN][4],
                                           float (&grad_query)[kPieceN][4], float* to) {
    const bool is_empty = n_ - tile_visit_ == first_chunk;
    pin(scores);
    pin(grad_query);
    if (!is_empty) {
      add(to, grad_query, 0, n_ - 1 - tile_visit_);
      pin(grad_query);
      begin_products();
      products_.begin_grad_query(grad_query, 1, n_ - 1 - tile_visit_);
      commit_products();
      wait_products<0>();
      pin(grad_query);
      add(to, grad_query, 1, n_ - 1 - tile_visit_);
    }
    barrier_arrive(tile_empty_.at(tile_visit_));
    barrier_arrive(query_empty_.at(n_));
    if (kHasBias) flush_bias<kDim>(call_, tile, head_, bias_sum_);
    const int batch = tile.batch, kv_head = tile.kv_head, first_key = tile.first_place;
    const int keys_of_rows[2] = {key_at<kDim>(tile, ScorePlace<kDim>().row), key_at<kDim>(tile, ScorePlace<kDim>().row + 8)};
    barrier_arrive(descriptor_empty_.at(tile_visit_));
    ++n_;
    if (kIsGathered || call_.key_sums) {
      if (is_empty) return;  // nothing was added
      add_key_sums<kDim, false>(call_, batch, kv_head, keys_of_rows, grad_key_, grad_value_);
    } else {
      const int row = first_key + ScorePlace<kDim>().row;
      store_key_gradients<T, kDim>(call_, batch, kv_head, {row, row + 8}, grad_key_, grad_value_);
    }
  }

  // Waits for the queries of chunk n, and issues scores = K Q^T; false: there is no such chunk.
  __device__ __forceinline__ bool begin_scores(float (&scores)[kN][4]) const {
    query_full_.wait_full(n_);
    pin(scores);
    begin_products();
    products_.begin_scores(scores, n_ % kShape.query_stages);
    commit_products();
    return !shared_.query_descriptors[n_ % Shared::kQueryDescriptors].ends_tile_visit;
  }
  // Hides scores, and turns the others into probabilities. Gives the column of the thread's first query.
  __device__ __forceinline__ int weigh(const KeyDescriptor& tile, const QueryDescriptor& descriptor, uint32_t stage,
                                       float (&scores)[kN][4], uint32_t (&weights)[kSteps][4], uint32_t (&slopes)[kSteps][4],
                                       uint32_t (&cap_slopes)[kSteps][4]) {
    const int column = ScorePlace<kDim>().column;
    weigh_chunk<T, kDim, Traits>(call_, shared_, tile, descriptor, stage, true, scores, bias_2_, bias_sum_, weights, slopes,
                                 cap_slopes, [&] { return QueryTerms<0>(&shared_.lse2[stage][column]); });
    return column;
  }
  // Adds a piece of grad_query of a chunk. Where sums have a fixed order, when the semaphore allows it.
  __device__ __forceinline__ void add(float* to, const float (&grad_query)[kPieceN][4], int piece, uint32_t chunk) const {
    const int width = static_cast<int>(sum_width(call_.b.forward.head_dim));  // floats in a row
    const int columns = width - ScorePlace<kDim>().first_column - piece * Products::kPiece;
    const uint32_t number = chunk * Shared::kPieces + piece;
    if (!kIsGathered && call_.semaphores) semaphore_acquired_.wait_full(number);
    add_wide_grad_query(to + piece * Products::kPiece * 64, columns, grad_query);
    if (!kIsGathered && call_.semaphores) barrier_arrive(semaphore_released_.at(number));
  }

  const BackwardCall& call_;
  Shared& shared_;
  const Ring<Shared::kKeyDescriptors> descriptor_full_{shared_address(shared_.descriptor_full)},
      descriptor_empty_{shared_address(shared_.descriptor_empty)};
  const Ring<1> key_full_{shared_address(&shared_.key_full)}, value_full_{shared_address(&shared_.value_full)},
      tile_empty_{shared_address(&shared_.tile_empty)};
  const Ring<kShape.query_stages> query_full_{shared_address(shared_.query_full)},
      query_empty_{shared_address(shared_.query_empty)}, grad_out_full_{shared_address(shared_.grad_out_full)};
  const Ring<1> weight_full_{shared_address(&shared_.weight_full)}, weight_empty_{shared_address(&shared_.weight_empty)},
      score_full_{shared_address(&shared_.score_full)};
  const Ring<1> semaphore_acquired_{shared_address(&shared_.semaphore_acquired)},
      semaphore_released_{shared_address(&shared_.semaphore_released)};
  const Products products_;
  float grad_key_[kOut][4], grad_value_[kOut][4];
  // key_bias of the thread's two keys in base 2, and the gradient of it, for the head at hand.
  float bias_2_[2] = {}, bias_sum_[2] = {};
  int head_ = -1;
  uint32_t n_ = 0, tile_visit_ = 0;  // the numbers of the descriptors of queries, and of keys
};

// query, grad_out [B, H, Sq, D or Dv], key, value [B, Hkv, Sk, D or Dv], lse2, delta [B, H, padded_queries] -> grad_key,
// grad_value (or rows of key_sums), query_sums. The roles of warps are those of backward_kernel.
template <class T, int kDim, class Traits>
__global__ __launch_bounds__(kBackwardThreads, 1) void backward_wide_kernel(const __grid_constant__ BackwardCall call,
                                                                            const __grid_constant__ BackwardWork work,
                                                                            const __grid_constant__ BackwardMaps maps) {
  using Shared = BackwardShared<kDim, Traits::kHasOptions>;
  constexpr BackwardShape kShape = Shared::kShape;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared*>(shared_bytes);
  // Set up the barriers.
  if (threadIdx.x == 0) {
    init_barriers_of_loads(shared, !Traits::kGathers && call.semaphores);
    for (int i = 0; i < kShape.query_stages; ++i) barrier_init(shared_address(&shared.grad_out_full[i]), 1);
    for (uint64_t* const barrier : {&shared.weight_full, &shared.weight_empty, &shared.score_full}) {
      barrier_init(shared_address(barrier), kComputingThreads);
    }
    fence_barrier_init();
    shared.row_flags = *call.row_flags;
  }
  __syncthreads();
  // Give each warp its role.
  if (threadIdx.x < kConsumers * kWarpgroup) {
    take_registers<kShape.computing_registers>();
    WideGradientConsumer<T, Traits>(call, shared).run();
  } else {
    give_registers<kShape.loading_registers>();
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    if (thread < kLoaders) {
      load_keys<kDim, Traits>(call, work, maps, shared);
    } else if (thread == kLoaders) {
      load_queries<kDim, Traits>(call, work, maps, shared);
    } else if (!Traits::kGathers && thread >= kLoaders + 32 && call.semaphores) {
      run_semaphore_warp<kDim, Traits>(call, work, shared, thread - kLoaders - 32);
    }
  }
}

template <class T, int kDim, class Traits>
cudaError_t launch_backward_wide(const BackwardCall& call, const BackwardWork& work, const BackwardMaps& maps, int blocks,
                                 cudaStream_t stream) {
  constexpr int kBytes = sizeof(BackwardShared<kDim, Traits::kHasOptions>);
  static_assert(kBytes <= 227 * 1024 && is_valid(kBackwardShape<kDim, Traits::kHasOptions>));
  const auto kernel = backward_wide_kernel<T, kDim, Traits>;
  static KernelAttribute shared_bytes;
  const cudaError_t status = allow_shared_bytes(shared_bytes, kernel, kBytes);
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(blocks), kBackwardThreads, kBytes, stream>>>(call, work, maps);
  return cudaGetLastError();
}

}  // namespace dmattn::cuda::sm90
