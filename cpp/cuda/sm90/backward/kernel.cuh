// Attention backward for Hopper. A block stays on its multiprocessor and takes tile after tile of keys. It has three warpgroups:
// two compute, each with 64 keys of a tile and all the queries that see it, and the third loads. grad_key and grad_value stay in
// registers, and grad_query is added in fp32 to global memory.
//
// Scores are kept transposed, keys by queries. Probabilities and score gradients are then operands of their products straight
// from registers, and only the score gradients go through shared memory, for grad_query.
#pragma once

#include "../../common/kernel_limits.cuh"
#include "epilogue.cuh"
#include "gather_q.cuh"
#include "gradients.cuh"
#include "load_kv.cuh"
#include "load_q.cuh"
#include "semaphore.cuh"

namespace dmattn::cuda::sm90 {

// Clears queries that see nothing, where query or grad_out is not finite: not even a weight of 0 may be multiplied with those.
// Their delta is NaN.
template <int kDim, bool kHasOptions>
__device__ __forceinline__ void clear_bad_rows(BackwardShared<kDim, kHasOptions>& shared, uint32_t stage) {
  constexpr int kQueries = BackwardShared<kDim, kHasOptions>::kShape.queries;
  constexpr int kThreads = kConsumers * kWarpgroup, kEach = kThreads / kQueries;
  group_sync(kClearBarrier, kThreads);
  const int thread = static_cast<int>(thread_index()), row = thread / kEach;
  const bool is_bad = shared.lse2[stage][row] == -negative_infinity() && shared.delta[stage][row] != shared.delta[stage][row];
  __syncwarp();
  if (is_bad) {
#pragma unroll 1
    for (int tensor = 0; tensor < 2; ++tensor) {
      uint16_t* const tile = tensor == 0 ? shared.query[stage] : shared.grad_out[stage];
#pragma unroll 1
      for (int panel = 0; panel < kDim / 64; ++panel) {
#pragma unroll 1
        for (int i = thread % kEach; i < 8; i += kEach) {
          reinterpret_cast<uint4*>(tile)[(panel * kQueries * 128 + row * 128) / 16 + i] = {0, 0, 0, 0};
        }
      }
    }
    if (thread % kEach == 0) shared.delta[stage][row] = 0.0f;
  }
  fence_async();
  group_sync(kClearBarrier, kThreads);
}

// The products of a computing warpgroup, by described tiles in shared memory. Each function issues one, and its end has to be
// awaited.
template <class T, int kDim, bool kHasOptions>
struct BackwardProducts {
  using Shared = BackwardShared<kDim, kHasOptions>;
  static constexpr int kQueries = Shared::kShape.queries, kN = kQueries / 8, kSteps = kQueries / 16, kOut = kDim / 8;
  static constexpr int kPart = Shared::kPartColumns;  // columns of grad_query that a warpgroup computes
  static constexpr int kKeyPanel = kBackwardKeys * 128, kQueryPanel = kQueries * 128;
  const uint32_t group = same_in_lanes(threadIdx.x / kWarpgroup);
  uint32_t keys, queries, scores;

  __device__ __forceinline__ explicit BackwardProducts(const Shared& shared)
      : keys(same_in_lanes(describe_panels(shared_address(shared.key), kKeyPanel))),
        queries(same_in_lanes(describe_panels(shared_address(shared.query), kQueryPanel))),
        scores(same_in_lanes(describe_panels(shared_address(shared.grad_score), kKeyPanel))) {}

  // The queries and the grad_out of the chunk with this descriptor.
  __device__ __forceinline__ uint32_t queries_of(uint32_t descriptor) const {
    return queries + descriptor % Shared::kShape.query_stages * step_of(kQueries * kDim * 2);
  }
  __device__ __forceinline__ uint32_t grad_outs_of(uint32_t descriptor) const {
    return queries_of(descriptor) + step_of(offsetof(Shared, grad_out) - offsetof(Shared, query));
  }

  // to = keys * queries^T
  __device__ __forceinline__ void begin_scores(float (&to)[kN][4], uint32_t descriptor) const {
    begin_rows(to, keys + group * step_of(64 * 128), queries_of(descriptor));
  }
  // to = values * grad_out^T, or to -= values * grad_out^T
  template <bool kSubtracts>
  __device__ __forceinline__ void begin_grad_scores(float (&to)[kN][4], uint32_t descriptor) const {
    begin_rows<kSubtracts>(to, keys + step_of(offsetof(Shared, value) - offsetof(Shared, key)) + group * step_of(64 * 128),
                           grad_outs_of(descriptor));
  }
  template <bool kSubtracts = false>
  __device__ __forceinline__ void begin_rows(float (&to)[kN][4], uint32_t a, uint32_t b) const {
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      Product<T, kQueries>::template from_shared<false, false, kSubtracts ? -1 : 1>(
          to, complete(a + step_of_columns(k, kKeyPanel)), complete(b + step_of_columns(k, kQueryPanel)), kSubtracts || k > 0);
    }
    commit_products();
  }
  // A sum over queries: to += operand * rows, which are queries or grad_out.
  __device__ __forceinline__ void begin_sums(float (&to)[kOut][4], const uint32_t (&operand)[kSteps][4], uint32_t rows) const {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) Product<T, kDim>::from_registers(to, operand[k], complete(rows + step_of(k * (16 * 128))));
    commit_products();
  }
  // The sum over keys: this warpgroup's part of grad_query, of the score gradients of this chunk.
  __device__ __forceinline__ void begin_grad_query(float (&to)[kPart / 8][4], uint32_t chunk) const {
    const uint32_t a = scores + step_of((group * Shared::kPartQueries) % kQueries / 64 * kKeyPanel) +
                       chunk % 2 * step_of(kBackwardKeys * kQueries * 2);
    const uint32_t b = keys + step_of((group * kPart) % kDim / 64 * kKeyPanel + (group * kPart) % kDim % 64 * 2);
#pragma unroll
    for (int k = 0; k < kBackwardKeys / 16; ++k) {
      Product<T, kPart>::template from_shared<true>(to, complete(a + step_of(k * (16 * 128))),
                                                    complete(b + step_of(k * (16 * 128))), k > 0);
    }
    commit_products();
  }
};

// query, grad_out [B, H, Sq, D or Dv], key, value [B, Hkv, Sk, D or Dv], lse2, delta [B, H, padded_queries] -> grad_key,
// grad_value (or rows of key_sums), query_sums. A computing warpgroup, one object for each thread: 64 keys of a tile against
// chunks of queries. Scores and their gradients are [64 keys, queries].
template <class T, int kDim, class Traits>
class GradientConsumer {
 public:
  using Shared = BackwardShared<kDim, Traits::kHasOptions>;

  __device__ __forceinline__ GradientConsumer(const BackwardCall& call, Shared& shared)
      : call_(call), shared_(shared), products_(shared) {}

  __device__ __forceinline__ void run() {
    if (kTakesTurns && products_.group == 1) end_turn();
    for (;; ++tile_visit_) {
      descriptor_full_.wait_full(tile_visit_);
      const KeyDescriptor& tile = shared_.key_descriptors[tile_visit_ % Shared::kKeyDescriptors];
      if (tile.head < 0) break;
      compute_tile(tile);
    }
  }

 private:
  using Products = BackwardProducts<T, kDim, Traits::kHasOptions>;
  static constexpr BackwardShape kShape = Shared::kShape;
  static constexpr int kN = Products::kN, kSteps = Products::kSteps, kOut = Products::kOut, kPart = Products::kPart;
  static constexpr bool kIsGathered = Traits::kGathers, kHasOptions = Traits::kHasOptions,
                        kHasBias = Traits::kBias != Bias::kNone;
  // An order of the loop in which a warpgroup never waits for shared memory with no product begun. It takes more instructions,
  // and other instances were slower with it (research/lab/backward.md).
  static constexpr bool kIsPlain = Traits::kValue == kPlainTraits,
                        kIsOverlapped = (kIsPlain && kDim == 128) || (Traits::kKeys == Keys::kGathered && !kHasOptions);
  // The warpgroups weigh scores by turns, so that one's products run beside the other's exponentials.
  static constexpr bool kTakesTurns = kIsPlain || kIsOverlapped;
  // Without options gradients of the weights start at delta, from which the product is subtracted; overlapped they start at 0.
  static constexpr bool kSubtracts = !kHasOptions && !kIsOverlapped;
  static constexpr int kEarly = kIsOverlapped ? 8 : 0;  // see QueryTerms
  // The bits of unions are read beside the product.
  static constexpr bool kHidesEarly = Traits::kIsUnion && !kHasOptions;

  // One visit of a tile of keys: by all queries that see it.
  //
  // The tensor cores always have a product to do beside what the threads do. Scores are begun at the end of the chunk before, and
  // grad_query is computed a chunk late, from score gradients that wait in shared memory. A tile visit's first chunk computes a
  // grad_query that means nothing, and its last begins scores that mean nothing, so that registers are the same on all ways
  // through the loop.
  __device__ __forceinline__ void compute_tile(const KeyDescriptor& tile) {
    head_ = -1;
#pragma unroll
    for (int i = 0; i < kOut; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) grad_key_[i][e] = grad_value_[i][e] = 0.0f;
    }
    has_chunk_before_ = false, has_test_ = false, is_new_head_ = false;
    float scores[kN][4], grad_scores[kN][4];
    key_full_.wait_full(tile_visit_);
    bool has_chunk = await_and_begin_scores(scores);
    if constexpr (kHidesEarly) seen_ = read_seen<kDim, kN>(tile, shared_.query_descriptors[n_ % Shared::kQueryDescriptors]);
    QueryTerms<kEarly> lse2;
    if (kIsOverlapped) lse2 = terms_of_queries(shared_.lse2);
    value_full_.wait_full(tile_visit_);
    if (kSubtracts) start_grad_scores(grad_scores);
    wait_products<0>();
    pin(scores);
    while (has_chunk) has_chunk = compute_chunk(tile, scores, grad_scores, lse2);
    end_tile(tile);
  }

  // Computes chunk n of queries, of which scores are there and lse2, and the scores of the next one. True: that one is a chunk.
  __device__ __forceinline__ bool compute_chunk(const KeyDescriptor& tile, float (&scores)[kN][4], float (&grad_scores)[kN][4],
                                                QueryTerms<kEarly>& lse2) {
    // Descriptors that ended a tile visit do not count as chunks.
    const uint32_t stage = n_ % kShape.query_stages, chunk = n_ - tile_visit_;
    const QueryDescriptor& descriptor = shared_.query_descriptors[n_ % Shared::kQueryDescriptors];
    float grad_query[kPart / 8][4];
    uint32_t weights[kSteps][4], gradients[kSteps][4];
    uint32_t slopes[kSteps][4], cap_slopes[kSteps][4];  // with options; with softcap beside a bias of single pairs
    // With options registers do not suffice for both products before the scores are weighed.
    if (!kHasOptions) begin_grad_scores(grad_scores);
    if (kHasBias && is_new_head_) {
      if (!kIsGathered || !call_.semaphores) flush_bias<kDim>(call_, tile, head_, bias_sum_);
      read_key_bias<kDim>(call_.b.forward, tile, ScorePlace<kDim>().row, descriptor.head,
                          kHasOptions && (shared_.row_flags & kHugeRows), bias_2_);
    }
    if (kHasBias) head_ = descriptor.head;

    float* sums = nullptr;
    if (kIsOverlapped) sums = place_of_sums(n_ - 1);
    if (kTakesTurns) group_sync(kTurnBarrier + static_cast<int>(products_.group), kComputingThreads);
    if constexpr (kHidesEarly) seen_.hide(scores);
    weigh_chunk<T, kDim, Traits>(call_, shared_, tile, descriptor, stage, has_test_ && !kHidesEarly, scores, bias_2_, bias_sum_,
                                 weights, slopes, cap_slopes,
                                 [&] { return kIsOverlapped ? lse2 : terms_of_queries(shared_.lse2); });
    if (kTakesTurns) end_turn();
    if (kHasOptions) begin_grad_scores(grad_scores);
    QueryTerms<kEarly> delta;
    if (kIsOverlapped) delta = terms_of_queries(shared_.delta);
    // Issue grad_value += weights dO, and wait for grad_scores.
    pin(grad_value_);
    begin_products();
    products_.begin_sums(grad_value_, weights, products_.grad_outs_of(n_));
    wait_products<1>();
    pin(grad_scores);
    // Compute the gradients of the scores from the probabilities in 16 bits, as the product before has them: a second copy in
    // fp32 would not fit into registers.
    if (!kIsOverlapped) delta = terms_of_queries(shared_.delta);
    differentiate_scores<T, Traits, kSubtracts>(call_, grad_scores, weights, slopes, delta, bias_sum_);
    differentiate_bias<T, kDim, Traits>(call_, tile, descriptor, grad_scores, slopes, cap_slopes);
    narrow<T>(gradients, grad_scores);
    // Issue grad_query = grad_scores^T K of the chunk before, and grad_key += grad_scores Q of this one.
    if (has_chunk_before_) score_full_.wait_full(chunk - 1);
    pin(grad_query);
    pin(grad_key_);
    begin_products();
    products_.begin_grad_query(grad_query, chunk - 1);
    products_.begin_sums(grad_key_, gradients, products_.queries_of(n_));
    // Leave the score gradients in shared memory for grad_query. Overlapped they are announced at once, by a fence that takes
    // some 200 cycles beside the products.
    score_empty_.wait_empty(chunk);
    put_gradients<kDim>(shared_address(shared_.grad_score[chunk % 2]), gradients);
    if (kIsOverlapped) announce_gradients(chunk);
    // Wait for the three products; the chunk's place is free.
    wait_products<0>();
    pin(grad_value_);
    pin(grad_query);
    pin(grad_key_);
    barrier_arrive(query_empty_.at(n_));
    ++n_;
    // Issue the scores of the next chunk. Beside them add grad_query of the chunk before to global memory, which holds its
    // registers for some 500 cycles.
    const bool has_chunk = await_and_begin_scores(scores);
    if (!kIsOverlapped) announce_gradients(chunk);  // they have reached shared memory, and the fence takes no time
    if (has_chunk_before_) {
      barrier_arrive(score_empty_.at(chunk - 1));
      add_grad_query_of(grad_query, n_ - 2, sums);
    }
    has_chunk_before_ = true;
    if constexpr (kHidesEarly) seen_ = read_seen<kDim, kN>(tile, shared_.query_descriptors[n_ % Shared::kQueryDescriptors]);
    if (kIsOverlapped) lse2 = terms_of_queries(shared_.lse2);
    if (kSubtracts) start_grad_scores(grad_scores);
    wait_products<0>();
    pin(scores);
    return has_chunk;
  }

  // Computes the last chunk's grad_query, then writes grad_key and grad_value.
  __device__ __forceinline__ void end_tile(const KeyDescriptor& tile) {
    const uint32_t chunks = n_ - tile_visit_;
    if (has_chunk_before_) score_full_.wait_full(chunks - 1);
    float grad_query[kPart / 8][4];
    pin(grad_query);
    begin_products();
    products_.begin_grad_query(grad_query, chunks - 1);
    wait_products<0>();
    pin(grad_query);
    barrier_arrive(tile_empty_.at(tile_visit_));
    barrier_arrive(query_empty_.at(n_));
    if (kIsGathered && call_.semaphores) semaphore_acquired_.wait_full(tile_visit_);
    if (kHasBias) flush_bias<kDim>(call_, tile, head_, bias_sum_);
    const int batch = tile.batch, kv_head = tile.kv_head, first_key = tile.first_place;
    const int keys_of_rows[2] = {key_at<kDim>(tile, ScorePlace<kDim>().row), key_at<kDim>(tile, ScorePlace<kDim>().row + 8)};
    if (has_chunk_before_) {
      barrier_arrive(score_empty_.at(chunks - 1));
      add_grad_query_of(grad_query, n_ - 1);
    }
    barrier_arrive(descriptor_empty_.at(tile_visit_));
    ++n_;
    if (call_.key_sums) {
      if (has_chunk_before_)
        add_key_sums<kDim, Traits::kGathersQueries>(call_, batch, kv_head, keys_of_rows, grad_key_, grad_value_);
      if (kIsGathered && call_.semaphores) barrier_arrive(semaphore_released_.at(tile_visit_));
    } else if constexpr (kIsGathered) {  // this tile visit is the only one of its keys
      store_key_gradients<T, kDim>(call_, batch, kv_head, keys_of_rows, grad_key_, grad_value_);
    } else {
      const int row = first_key + ScorePlace<kDim>().row;
      store_key_gradients<T, kDim>(call_, batch, kv_head, {row, row + 8}, grad_key_, grad_value_);
    }
  }

  // Lets the other warpgroup weigh its scores.
  __device__ __forceinline__ void end_turn() const {
    group_arrive(kTurnBarrier + 1 - static_cast<int>(products_.group), kComputingThreads);
  }
  // Waits for the next chunk of queries, or the end of the tile visit, and issues its scores. False: it is the end. Overlapped,
  // the descriptor is read beside the product.
  __device__ __forceinline__ bool await_and_begin_scores(float (&scores)[kN][4]) {
    query_full_.wait_full(n_);
    const QueryDescriptor& descriptor = shared_.query_descriptors[n_ % Shared::kQueryDescriptors];
    bool has_chunk = false;
    const auto read = [&] {
      has_chunk = !descriptor.ends_tile_visit, has_test_ = descriptor.has_test;
      if (kHasBias) is_new_head_ = descriptor.head != head_;
    };
    if (!kIsOverlapped) read();
    const bool has_bad_rows = kIsOverlapped ? has_bad_rows_ && !descriptor.ends_tile_visit : descriptor.has_bad_rows && has_chunk;
    if (has_bad_rows) clear_bad_rows(shared_, n_ % kShape.query_stages);
    begin_scores(scores);
    if (kIsOverlapped) read();
    return has_chunk;
  }
  // Lets both warpgroups read the score gradients of a chunk that this thread has left in shared memory.
  __device__ __forceinline__ void announce_gradients(uint32_t chunk) const {
    fence_async();
    barrier_arrive(score_full_.at(chunk));
  }
  // Starts grad_scores at delta.
  __device__ __forceinline__ void start_grad_scores(float (&grad_scores)[kN][4]) const {
    const QueryTerms<0> delta(&shared_.delta[n_ % kShape.query_stages][ScorePlace<kDim>().column]);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const float2 pair = delta.pair(i);
      grad_scores[i][0] = grad_scores[i][2] = pair.x, grad_scores[i][1] = grad_scores[i][3] = pair.y;
    }
  }
  // lse2 or delta of the thread's queries in chunk n.
  __device__ __forceinline__ QueryTerms<kEarly> terms_of_queries(
      const float (&terms)[kShape.query_stages][kShape.queries]) const {
    const int column = kIsOverlapped ? static_cast<int>(threadIdx.x % 4 * 2) : ScorePlace<kDim>().column;
    return QueryTerms<kEarly>(&terms[n_ % kShape.query_stages][column]);
  }
  // Issues grad_scores = V dO^T, or grad_scores -= V dO^T.
  __device__ __forceinline__ void begin_grad_scores(float (&grad_scores)[kN][4]) const {
    pin(grad_scores);
    begin_products();
    products_.template begin_grad_scores<kSubtracts>(grad_scores, n_);
  }
  // Issues scores = K Q^T.
  __device__ __forceinline__ void begin_scores(float (&scores)[kN][4]) const {
    pin(scores);
    begin_products();
    products_.begin_scores(scores, n_);
  }
  // Where the thread's part of grad_query goes of the chunk with this descriptor.
  __device__ __forceinline__ float* place_of_sums(uint32_t descriptor) const {
    return shared_.query_descriptors[descriptor % Shared::kQueryDescriptors].sums +
           first_sum<Shared, kDim>(products_.group, static_cast<int>(call_.b.forward.head_dim));
  }
  // Adds grad_query of the chunk with this descriptor. Where sums have a fixed order, when the semaphore allows it. sums: null,
  // or place_of_sums.
  __device__ __forceinline__ void add_grad_query_of(const float (&grad_query)[kPart / 8][4], uint32_t descriptor,
                                                    float* sums = nullptr) const {
    const int head_dim = static_cast<int>(call_.b.forward.head_dim);
    if constexpr (Traits::kGathersQueries) {
      const uint32_t slot = descriptor % Shared::kQueryDescriptors;
      add_listed_grad_query<Shared, kDim>(shared_.query_descriptors[slot], shared_.listed[slot], grad_query, products_.group,
                                          head_dim);
      return;
    }
    if (!kIsGathered && call_.semaphores) semaphore_acquired_.wait_full(descriptor - tile_visit_);
    if (!sums) sums = place_of_sums(descriptor);
    add_grad_query<Shared, kDim>(sums, grad_query, products_.group, head_dim);
    if (!kIsGathered && call_.semaphores) barrier_arrive(semaphore_released_.at(descriptor - tile_visit_));
  }

  const BackwardCall& call_;
  Shared& shared_;
  const Ring<Shared::kKeyDescriptors> descriptor_full_{shared_address(shared_.descriptor_full)},
      descriptor_empty_{shared_address(shared_.descriptor_empty)};
  const Ring<1> key_full_{shared_address(&shared_.key_full)}, value_full_{shared_address(&shared_.value_full)},
      tile_empty_{shared_address(&shared_.tile_empty)};
  const Ring<kShape.query_stages> query_full_{shared_address(shared_.query_full)},
      query_empty_{shared_address(shared_.query_empty)};
  const Ring<2> score_full_{shared_address(shared_.score_full)}, score_empty_{shared_address(shared_.score_empty)};
  const Ring<1> semaphore_acquired_{shared_address(&shared_.semaphore_acquired)},
      semaphore_released_{shared_address(&shared_.semaphore_released)};
  const Products products_;
  float grad_key_[kOut][4], grad_value_[kOut][4];
  // key_bias of the thread's two keys in base 2, and the gradient of it, for the head at hand.
  float bias_2_[2] = {}, bias_sum_[2] = {};
  int head_ = -1;
  uint32_t n_ = 0, tile_visit_ = 0;  // the numbers of the descriptors of queries, and of keys
  bool has_chunk_before_ = false;    // of the tile visit
  const bool has_bad_rows_ = shared_.row_flags & kBadRows;
  SeenBits<kN> seen_;                            // with kHidesEarly, of the chunk
  bool has_test_ = false, is_new_head_ = false;  // of the chunk: known early, so that nothing waits for them
};

// query, grad_out [B, H, Sq, D or Dv], key, value [B, Hkv, Sk, D or Dv], lse2, delta [B, H, padded_queries] -> grad_key,
// grad_value (or rows of key_sums), query_sums. The first warpgroups of a block compute; of the last one two warps load tiles of
// keys, one thread loads chunks of queries, and another warp handles the semaphores where sums have a fixed order. Where queries
// are gathered, both of these warps do that.
template <class T, int kDim, class Traits>
__global__ __launch_bounds__(kBackwardThreads, 1) void backward_kernel(const __grid_constant__ BackwardCall call,
                                                                       const __grid_constant__ BackwardWork work,
                                                                       const __grid_constant__ BackwardMaps maps) {
  using Shared = BackwardShared<kDim, Traits::kHasOptions>;
  constexpr BackwardShape kShape = Shared::kShape;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared*>(shared_bytes);
  // Set up the barriers.
  if (threadIdx.x == 0) {
    init_barriers_of_loads(shared, call.semaphores, Traits::kGathersQueries ? kQueryLoaders : 1);
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared_address(&shared.score_full[i]), kComputingThreads);
      barrier_init(shared_address(&shared.score_empty[i]), kComputingThreads);
    }
    fence_barrier_init();
    shared.row_flags = *call.row_flags;
  }
  __syncthreads();
  // Give each warp its role.
  if (threadIdx.x < kConsumers * kWarpgroup) {
    take_registers<kShape.computing_registers>();
    GradientConsumer<T, kDim, Traits>(call, shared).run();
  } else {
    give_registers<kShape.loading_registers>();
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    if (thread < kLoaders) {
      load_keys<kDim, Traits>(call, work, maps, shared);
    } else if constexpr (Traits::kGathersQueries) {
      QueryGatherer<kDim, Traits>(call, work, shared, thread - kLoaders).run();
    } else if (thread == kLoaders) {
      load_queries<kDim, Traits>(call, work, maps, shared);
    } else if (thread >= kLoaders + 32 && call.semaphores) {
      run_semaphore_warp<kDim, Traits>(call, work, shared, thread - kLoaders - 32);
    }
  }
}

template <class T, int kDim, class Traits>
cudaError_t launch_backward(const BackwardCall& call, const BackwardWork& work, const BackwardMaps& maps, int blocks,
                            cudaStream_t stream) {
  constexpr int kBytes = sizeof(BackwardShared<kDim, Traits::kHasOptions>);
  static_assert(kBytes <= 227 * 1024 && is_valid(kBackwardShape<kDim, Traits::kHasOptions>));
  const auto kernel = backward_kernel<T, kDim, Traits>;
  static KernelAttribute shared_bytes;
  const cudaError_t status = allow_shared_bytes(shared_bytes, kernel, kBytes);
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(blocks), kBackwardThreads, kBytes, stream>>>(call, work, maps);
  return cudaGetLastError();
}

}  // namespace dmattn::cuda::sm90
