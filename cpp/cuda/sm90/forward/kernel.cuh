// Attention forward for Hopper. A block stays on its multiprocessor and takes tile after tile. Its scheduler warps find the keys
// of a tile and write descriptors, its loading warps load what the descriptors say, and two or three warpgroups compute. The
// tensor cores multiply for one chunk while the threads do the softmax of another.
//
// To the computing warpgroups a chunk is some rows of keys in shared memory and a descriptor, whether the rows were loaded by a
// tensor copy or gathered one by one, and whether or not they belong to the next tile.
#pragma once

#include <type_traits>

#include "../../common/dependent_launch.cuh"
#include "../../common/kernel_limits.cuh"
#include "epilogue.cuh"
#include "producer.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"

namespace dmattn::cuda::sm90 {

// Issues scores = Q K^T. All operands are described tiles. is_biased: scores hold the key_bias, and products are added to it;
// with kMultipliesBias a product brings it first, whatever they hold, and a huge one has zeros for its thirds.
template <class T, int kDim, class Traits, int kN>
__device__ __forceinline__ void issue_scores(float (&scores)[kN][4], uint32_t queries, uint32_t keys, uint32_t ones,
                                             uint32_t thirds, bool is_biased) {
  constexpr ForwardShape kShape = kForwardShape<kDim, Traits>;
  if constexpr (kMultipliesBias<Traits>) {
    Product<__nv_bfloat16, kShape.keys>::from_shared(scores, complete_narrow(ones), complete_narrow(thirds), 0);
  }
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    Product<T, kShape.keys>::from_shared(scores, complete(queries + step_of_columns(k, kShape.rows() * 128)),
                                         complete(keys + step_of_columns(k, kShape.keys * 128)),
                                         kMultipliesBias<Traits> || is_biased || k > 0);
  }
  commit_products();
}

template <int kOut>
__device__ __forceinline__ void clear_sums(float (&out)[kOut][4]) {
#pragma unroll
  for (int i = 0; i < kOut; ++i) out[i][0] = out[i][1] = out[i][2] = out[i][3] = 0.0f;
}

// query [B, H, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv] -> out [B, H, Sq, Dv], lse [B, H, Sq].
// What a computing warpgroup does: 64 rows of a tile, rows being (query, head) pairs, against chunks of keys [keys, D] and values
// [keys, Dv] in shared memory, as the descriptors say. Scores [64, keys] and sums [64, Dv] stay in registers.
template <class T, int kDim, class Traits>
__device__ __forceinline__ void compute_tiles(const ForwardCall& call, const ForwardWork& work, const ForwardMaps& maps,
                                              ForwardShared<kDim, Traits>& shared) {
  constexpr ForwardShape kShape = kForwardShape<kDim, Traits>;
  using Descriptor = TileDescriptor<kDim, Traits>;
  constexpr int kRows = kShape.rows(), kN = kShape.keys / 8, kOut = kDim / 8, kSteps = kShape.keys / 16;
  const AttentionParams& p = call.p;
  // Taken from lane 0, so that the assembler knows it is the same in all lanes and keeps what follows from it in uniform
  // registers.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int warp = thread / 32, lane = thread % 32, column = lane % 4 * 2;
  const int row = group * 64 + warp * 16 + lane / 4;  // of the tile; the thread's other row is row + 8

  const Ring<kShape.descriptors> descriptor_empty{shared_address(shared.descriptor_empty)};
  const Ring<kShape.stages> key_full{shared_address(shared.key_full)}, key_empty{shared_address(shared.key_empty)},
      value_full{shared_address(shared.value_full)}, value_empty{shared_address(shared.value_empty)};
  const Ring<kShape.query_tiles> query_full{shared_address(shared.query_full)}, query_empty{shared_address(shared.query_empty)};
  const uint32_t query_tiles = describe_panels(shared_address(shared.query) + group * (64 * 128), kRows * 128);
  const uint32_t key_tiles = describe_panels(shared_address(shared.key), kShape.keys * 128);
  const uint32_t value_tiles = describe_panels(shared_address(shared.value), kShape.keys * 128);
  constexpr uint32_t kStageStep = step_of(kShape.keys * kDim * 2), kTileStep = step_of(kRows * kDim * 2);

  float out[1][kOut][4], scores[1][kN][4];
  uint32_t weights[kSteps][4];

  // Where keys are gathered, key_bias is what products are added to, unless they are capped. Threads read it into the scores, or
  // a product of its own brings it there.
  const bool has_bias = Traits::kKeys == Keys::kIntervals ||
                        (Traits::kBias == Bias::kKey && p.key_bias.data && (!Traits::kHasOptions || call.cap_scale == 0.0f));
  const bool reads_bias = has_bias && !kMultipliesBias<Traits>;
  const uint32_t ones = describe_narrow(shared_address(shared.bias_operands.ones)),
                 thirds = describe_narrow(shared_address(shared.bias_operands.thirds));
  auto read_bias = [&](const Descriptor& descriptor, int i) {
    const float2 pair = *reinterpret_cast<const float2*>(&descriptor.key_bias[Descriptor::bias_place(column + 8 * i)]);
    scores[0][i][0] = scores[0][i][2] = pair.x, scores[0][i][1] = scores[0][i][3] = pair.y;
  };
  auto begin_scores = [&](uint32_t tile, uint32_t stage, uint32_t flags) {
    const bool is_biased = has_bias && !(flags & kHuge);
    const uint32_t a = __shfl_sync(0xffffffffu, query_tiles + tile % kShape.query_tiles * kTileStep, 0);  // the same in all lanes
    const uint32_t b = key_tiles + stage * kStageStep;
    issue_scores<T, kDim, Traits>(scores[0], a, b, ones, thirds + stage * step_of(kShape.keys * kNarrowRowBytes), is_biased);
  };
  auto begin_sums = [&](uint32_t stage) {
    constexpr int kPart = kDim < 128 ? kDim : 128;  // columns at a time
    const uint32_t b = value_tiles + stage * kStageStep;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int part = 0; part < kDim; part += kPart) {
        Product<T, kPart>::from_registers(reinterpret_cast<float (&)[kPart / 8][4]>(out[0][part / 8]), weights[k],
                                          complete(b + step_of(part / 64 * (kShape.keys * 128) + k * (16 * 128))));
      }
    }
    commit_products();
  };
  // Narrows the weights of one chunk to operands; where threads read key_bias, that of the next chunk takes their place in
  // scores.
  auto narrow_weights = [&](const Descriptor& next) {
    auto narrow = [&](const auto& then) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto& pair = scores[0][2 * k + i / 2];
          weights[k][i] = Element<T>::narrow_pair(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
        }
        then(2 * k), then(2 * k + 1);
      }
    };
    if (reads_bias) {
      narrow([&](int i) { read_bias(next, i); });
      pin(scores[0]);
    } else {
      narrow([](int) {});
    }
  };

  using Softmax = OnlineSoftmaxInParts<Traits::kBias != Bias::kNone>;
  Softmax softmax;
  std::conditional_t<Traits::kBias == Bias::kCopied, CopiedBias<T, kN>, ChunkBias<T, kN>> pair_bias;
  float factor[2];
  bool moves = false;
  auto weigh = [&](const Descriptor& descriptor, uint32_t flags, uint32_t tile_number, const auto& between) {
    moves = weigh_scores<T, kDim, Traits>(call, work, shared, descriptor, flags, tile_number, scores, softmax, factor, row,
                                          column, has_bias, pair_bias, between);
  };

  constexpr bool kByCopy = ForwardShared<kDim, Traits>::kByCopy;
  auto store = [&](const Softmax& sums, uint32_t tile_number) {
    store_tile<T>(call, work, maps, shared, out, sums, tile_number, group, warp, lane, row);
  };
  // Says that the place of a tile's queries is free: when its last scores are done, or when its output has left from that place.
  bool is_storing = false;
  auto free_queries = [&](uint32_t tile_number) {
    if (kByCopy && lane == 0) wait_stores_read();
    barrier_arrive(query_empty.at(tile_number));
    is_storing = false;
  };

  // Compute the very first scores, beside which nothing else can run.
  uint32_t n = 0, tile = 0;
  key_full.wait_full(0);
  uint32_t flags = shared.descriptors[0].flags;
  if (flags & kEnd) return;
  query_full.wait_full(0);
  clear_sums(out[0]);
  if (reads_bias) {
#pragma unroll
    for (int i = 0; i < kN; ++i) read_bias(shared.descriptors[0], i);
  }
  pin(scores[0]);
  begin_products();
  begin_scores(0, 0, flags);
  read_pair_bias(pair_bias, call, work, shared, 0, flags, 0, group * 64 + warp * 16, row, column);
  wait_products<0>();
  pin(scores[0]);
  barrier_arrive(key_empty.at(0));
  if (!kByCopy && flags & kLast) free_queries(0);
  hash_rows(call, work, shared, 0, row);
  weigh(shared.descriptors[0], flags, 0, [] {});
  barrier_arrive(descriptor_empty.at(0));

  // Goes on to the next chunk's descriptor. Called before waiting for the products of the chunk before, so that the flags are
  // known in time.
  bool is_first = false;  // chunk n belongs to the next tile
  auto look_ahead = [&] {
    is_first = flags & kLast;
    ++n;
    key_full.wait_full(n);
    flags = shared.descriptors[n % kShape.descriptors].flags;
  };

  // From here on the scores of one chunk are computed beside the sums of the one before, which may belong to the tile before.
  look_ahead();
  // At the end the descriptor has no key_bias, and what is read is not used.
  narrow_weights(shared.descriptors[n % kShape.descriptors]);
  while (!(flags & kEnd)) {
    // Wait for the queries of the next tile, if chunk n is its first.
    if (is_first) {
      if (is_storing) free_queries(tile - 1);
      query_full.wait_full(tile + 1);
    }
    pin(scores[0]);
    pin(out[0]);
    begin_products();
    // Issue scores = Q K^T of chunk n.
    begin_scores(tile + is_first, n % kShape.stages, flags);
    // Wait for the values of chunk n - 1, and issue out += weights V.
    value_full.wait_full(n - 1);
    begin_sums((n - 1) % kShape.stages);
    if (is_storing) free_queries(tile - 1);
    read_pair_bias(pair_bias, call, work, shared, n, flags, tile + is_first, group * 64 + warp * 16, row, column);
    // Wait for the scores; the keys' place is free.
    wait_products<1>();
    pin(scores[0]);
    barrier_arrive(key_empty.at(n));
    if (!kByCopy && flags & kLast) free_queries(tile + is_first);
    // Turn the scores of chunk n into weights, beside the product with the values of chunk n - 1.
    const Softmax ended = softmax;
    if (is_first) softmax = Softmax(), hash_rows(call, work, shared, tile + 1, row);
    weigh(shared.descriptors[n % kShape.descriptors], flags, tile + is_first, [&] {
      if constexpr (Traits::kGathers) {  // such values are long in coming, so their place is freed early
        wait_products<0>();
        pin(out[0]);
        barrier_arrive(value_empty.at(n - 1));
      }
    });
    // The address waits for the sums, which are never negative: otherwise the assembler puts the exponentials behind the next
    // wait, where no product hides them.
    barrier_arrive(descriptor_empty.at(n) + (softmax.sum[0][0] + softmax.sum[0][1] < -1.0f));
    // Wait for the descriptor of chunk n + 1, then for the sums of chunk n - 1.
    const bool ends_tile = is_first;
    look_ahead();
    wait_products<0>();
    pin(out[0]);
    if constexpr (!Traits::kGathers) barrier_arrive(value_empty.at(n - 2));
    // Store the tile that has ended, or rescale its sums if a maximum moved.
    if (ends_tile) {
      store(ended, tile++);
      is_storing = kByCopy;
      clear_sums(out[0]);
    } else if (moves) {
      Softmax::rescale(out[0], factor);
    }
    // Narrow the weights to the operand of the next product.
    narrow_weights(shared.descriptors[n % kShape.descriptors]);
  }
  // Add the last chunk, and store the last tile.
  value_full.wait_full(n - 1);
  pin(out[0]);
  begin_products();
  begin_sums((n - 1) % kShape.stages);
  wait_products<0>();
  pin(out[0]);
  if (is_storing) free_queries(tile - 1);
  store(softmax, tile);
  if (kByCopy && lane == 0) wait_stores_read();
}

// query [B, H, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv] -> out [B, H, Sq, Dv], lse [B, H, Sq]. The first warpgroups of
// a block compute; the other warps load or schedule.
template <class T, int kDim, class Traits>
__global__ __launch_bounds__(kForwardThreads<kDim, Traits>, 1) void forward_kernel(const __grid_constant__ ForwardCall call,
                                                                                   const __grid_constant__ ForwardWork work,
                                                                                   const __grid_constant__ ForwardMaps maps) {
  constexpr ForwardShape kShape = kForwardShape<kDim, Traits>;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardShared<kDim, Traits>*>(shared_bytes);
  // Where tensor copies bring all rows, and none has to be cleared, one thread loads all keys and queries, another all values.
  const bool is_single = Traits::kKeys != Keys::kIntervals &&
                         (Traits::kIsDense || (!call.live_keys.gathers() && !call.live_keys.ranges && !call.p.mask.tiles.data));
  // Set up the barriers.
  if (threadIdx.x == 0) {
    // Every thread arrives for itself: one for its warp is not faster, and hides from compute-sanitizer what the others did.
    constexpr int kComputing = kShape.consumers * kWarpgroup;
    const int loaders = is_single ? 1 : kShape.loaders() + 1, loading = is_single ? 2 : 2 * kShape.loaders();
    for (int i = 0; i < kShape.query_tiles; ++i) {
      barrier_init(shared_address(&shared.query_full[i]), 1);
      barrier_init(shared_address(&shared.query_empty[i]), kComputing);
    }
    for (int i = 0; i < kShape.stages; ++i) {
      barrier_init(shared_address(&shared.key_full[i]), loaders);
      barrier_init(shared_address(&shared.value_full[i]), loaders);
      barrier_init(shared_address(&shared.key_empty[i]), kComputing);
      barrier_init(shared_address(&shared.value_empty[i]), kComputing);
      if constexpr (Traits::kBias == Bias::kCopied) {
        barrier_init(shared_address(&shared.bias_full[i]), 1);
        barrier_init(shared_address(&shared.bias_empty[i]), kComputing);
      }
      if constexpr (Traits::kKeys == Keys::kIntervals) {
        for (int half = 0; half < 2; ++half) barrier_init(shared_address(&shared.landed[half][i]), 1);
      }
    }
    for (int i = 0; i < kShape.descriptors; ++i) {
      barrier_init(shared_address(&shared.descriptor_full[i]), kShape.scheduler_threads());
      barrier_init(shared_address(&shared.descriptor_empty[i]), kComputing + loading);
    }
    fence_barrier_init();
    for (const CUtensorMap* const map : {&maps.query, &maps.key, &maps.value, &maps.out}) prefetch_map(map);
    if constexpr (Traits::kBias == Bias::kCopied) prefetch_map(&maps.bias);
  }
  shared.bias_operands.set_up();
  __syncthreads();
  griddepcontrol_wait();
  // Give each warp its role.
  const int thread = static_cast<int>(threadIdx.x) - kShape.consumers * kWarpgroup;  // of those that do not compute
  if (thread < 0) {
    take_registers<kShape.computing_registers>();
    compute_tiles<T, kDim, Traits>(call, work, maps, shared);
    return;
  }
  constexpr int kLoading = 2 * kShape.loaders();
  if (kShape.shares_warpgroup() || thread < kLoading) give_registers<kShape.loading_registers>();
  if (thread < kLoading) {
    load_tiles<kDim, Traits>(call, work, maps, shared, thread, is_single);
  } else {
    if constexpr (!kShape.shares_warpgroup()) give_registers<kShape.scheduler_registers>();
    Scheduler<kDim, Traits>(call, work, thread - kLoading, shared.queues, shared.descriptors,
                            shared_address(shared.descriptor_full), shared_address(shared.descriptor_empty))
        .run();
  }
}

template <class T, int kDim, class Traits>
cudaError_t launch_forward(const ForwardCall& call, const ForwardWork& work, const ForwardMaps& maps, int blocks,
                           cudaStream_t stream) {
  constexpr int kBytes = sizeof(ForwardShared<kDim, Traits>);
  static_assert(kBytes <= 227 * 1024);
  const auto kernel = forward_kernel<T, kDim, Traits>;
  static KernelAttribute shared_bytes;
  const cudaError_t status = allow_shared_bytes(shared_bytes, kernel, kBytes);
  if (status != cudaSuccess) return status;
  return launch_dependent(kernel, static_cast<unsigned>(blocks), kForwardThreads<kDim, Traits>, kBytes, stream, call, work, maps);
}

}  // namespace dmattn::cuda::sm90
