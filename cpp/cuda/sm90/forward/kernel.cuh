// Attention forward for Hopper: a persistent, warp-specialised kernel. Scheduler warps find the keys of a tile and write
// descriptors, loading warps load what the descriptors say, and two or three warpgroups compute. The tensor cores multiply for
// one chunk while the threads do the softmax of another.
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

// The products of a computing warpgroup, whose operands are described by wgmma descriptors of tiles in shared memory. Each
// function issues one group of wgmma, which the caller waits for.
template <class T, int kDim, class Traits>
struct ForwardProducts {
  using Shared = ForwardShared<kDim, Traits>;
  static constexpr ForwardShape kShape = kForwardShape<kDim, Traits>;
  static constexpr int kRows = kShape.rows(), kN = kShape.keys / 8, kSteps = kShape.keys / 16, kOut = kDim / 8;
  static constexpr int kPart = kDim < 128 ? kDim : 128;  // columns of values that are multiplied at a time
  // Whether the last 64 columns of queries and keys, and the last 128 of values, are left out where narrower heads have none.
  static constexpr bool kSkips = kDim > 128;
  static constexpr uint32_t kStageStep = step_of(kShape.keys * kDim * 2), kTileStep = step_of(kRows * kDim * 2);
  bool has_last_panel, has_last_part;  // of the columns of queries and keys, and of those of values
  uint32_t query_tiles, key_tiles, value_tiles;
  uint32_t ones, thirds;  // operands of the key_bias: a float32 is the sum of three bfloat16 terms, each multiplied by one

  __device__ __forceinline__ ForwardProducts(const Shared& shared, int group, const AttentionParams& p)
      : has_last_panel(!kSkips || p.head_dim > kDim - 64),
        has_last_part(!kSkips || p.value_dim > kDim - kPart),
        query_tiles(describe_panels(shared_address(shared.query) + group * (64 * 128), kRows * 128)),
        key_tiles(describe_panels(shared_address(shared.key), kShape.keys * 128)),
        value_tiles(describe_panels(shared_address(shared.value), kShape.keys * 128)),
        ones(describe_narrow(shared_address(shared.bias_operands.ones))),
        thirds(describe_narrow(shared_address(shared.bias_operands.thirds))) {}

  // Issues scores = Q K^T. is_biased: scores hold the key_bias, and products are added to it; with kMultipliesBias a wgmma
  // initialises them with it first. Of a huge key_bias its operand is zero, and the bias is added later.
  __device__ __forceinline__ void begin_scores(float (&scores)[kN][4], uint32_t tile, uint32_t stage, bool is_biased) const {
    const uint32_t queries =
        __shfl_sync(0xffffffffu, query_tiles + tile % kShape.query_tiles * kTileStep, 0);  // the same in all lanes
    const uint32_t keys = key_tiles + stage * kStageStep;
    if constexpr (kMultipliesBias<Traits>) {
      Product<__nv_bfloat16, kShape.keys>::from_shared(
          scores, complete_narrow(ones), complete_narrow(thirds + stage * step_of(kShape.keys * kNarrowRowBytes)), 0);
    }
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      if (kSkips && k == kDim / 16 - 4 && !has_last_panel) break;
      Product<T, kShape.keys>::from_shared(scores, complete(queries + step_of_columns(k, kRows * 128)),
                                           complete(keys + step_of_columns(k, kShape.keys * 128)),
                                           kMultipliesBias<Traits> || is_biased || k > 0);
    }
    commit_products();
  }
  // Issues out += weights V.
  __device__ __forceinline__ void begin_sums(float (&out)[kOut][4], const uint32_t (&weights)[kSteps][4], uint32_t stage) const {
    const uint32_t values = value_tiles + stage * kStageStep;
    const auto multiply = [&](int part, int k) {
      Product<T, kPart>::from_registers(reinterpret_cast<float (&)[kPart / 8][4]>(out[part / 8]), weights[k],
                                        complete(values + step_of(part / 64 * (kShape.keys * 128) + k * (16 * 128))));
    };
    if constexpr (kSkips) {
#pragma unroll
      for (int part = 0; part < kDim; part += kPart) {
        if (part > 0 && !has_last_part) break;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) multiply(part, k);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int part = 0; part < kDim; part += kPart) multiply(part, k);
      }
    }
    commit_products();
  }
};

// Reads the key_bias of two columns into the scores that products are added to. `column` is that of the thread's first score.
template <int kN, class Descriptor>
__device__ __forceinline__ void read_bias(float (&scores)[kN][4], const Descriptor& descriptor, int column, int i) {
  const float2 pair = *reinterpret_cast<const float2*>(&descriptor.key_bias[Descriptor::bias_place(column + 8 * i)]);
  scores[i][0] = scores[i][2] = pair.x, scores[i][1] = scores[i][3] = pair.y;
}

// Converts the weights of one chunk to operands of 16 bits; where threads read key_bias, that of the next chunk then takes
// their place in the accumulators.
template <class T, int kSteps, int kN, class Descriptor>
__device__ __forceinline__ void narrow_weights(float (&scores)[kN][4], uint32_t (&weights)[kSteps][4], const Descriptor& next,
                                               int column, bool reads_bias) {
  const auto narrow = [&](const auto& then) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto& pair = scores[2 * k + i / 2];
        weights[k][i] = Element<T>::narrow_pair(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
      }
      then(2 * k), then(2 * k + 1);
    }
  };
  if (reads_bias) {
    narrow([&](int i) { read_bias(scores, next, column, i); });
    pin(scores);
  } else {
    narrow([](int) {});
  }
}

template <int kOut>
__device__ __forceinline__ void clear_sums(float (&out)[kOut][4]) {
#pragma unroll
  for (int i = 0; i < kOut; ++i) out[i][0] = out[i][1] = out[i][2] = out[i][3] = 0.0f;
}

// query [B, H, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv] -> out [B, H, Sq, Dv], lse [B, H, Sq].
// A computing warpgroup, one object for each thread: 64 rows of a tile, rows being (query, head) pairs, against chunks of keys
// [keys, D] and values [keys, Dv] in shared memory, as the descriptors say. Scores [64, keys] and sums [64, Dv] stay in
// registers.
template <class T, int kDim, class Traits>
class Consumer {
 public:
  using Shared = ForwardShared<kDim, Traits>;

  // group: of the computing warpgroups. Taken from lane 0, so that ptxas knows it is the same in all lanes and keeps what
  // follows from it in uniform registers.
  __device__ __forceinline__ Consumer(const ForwardCall& call, const ForwardWork& work, const ForwardMaps& maps, Shared& shared)
      : call_(call),
        work_(work),
        maps_(maps),
        shared_(shared),
        group_(__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0)),
        products_(shared, group_, call.p),
        has_bias_(Traits::kKeys == Keys::kIntervals ||
                  (Traits::kBias == Bias::kKey && call.p.key_bias.data && (!Traits::kHasOptions || call.cap_scale == 0.0f))) {}

  __device__ __forceinline__ void run() {
    if (!compute_first_scores()) return;
    // From here on the scores of one chunk are computed beside the sums of the one before, which may belong to the tile before.
    look_ahead();
    narrow();  // at the end the descriptor has no key_bias, and what is read is not used
    while (!(flags_ & kEnd)) {
      if constexpr (Traits::kIsUnion) {
        if (leaves_out()) {
          leave_out_chunks();
          continue;
        }
      }
      compute_chunk();
    }
    compute_last_sums();
  }

 private:
  using Descriptor = TileDescriptor<kDim, Traits>;
  using Softmax = OnlineSoftmaxInParts<Traits::kBias != Bias::kNone>;
  static constexpr ForwardShape kShape = kForwardShape<kDim, Traits>;
  static constexpr int kN = kShape.keys / 8, kOut = kDim / 8, kSteps = kShape.keys / 16;
  static constexpr bool kByCopy = Shared::kByCopy;

  // The very first scores, beside which nothing else can run; false: there is no chunk.
  __device__ __forceinline__ bool compute_first_scores() {
    key_full_.wait_full(0);
    flags_ = shared_.descriptors[0].flags;
    if (flags_ & kEnd) return false;
    query_full_.wait_full(0);
    clear_sums(out_[0]);
    if (reads_bias()) {
#pragma unroll
      for (int i = 0; i < kN; ++i) read_bias(scores_[0], shared_.descriptors[0], column_, i);
    }
    pin(scores_[0]);
    begin_products();
    begin_scores(0, 0);
    read_pair_bias(pair_bias_, call_, work_, shared_, 0, flags_, 0, group_ * 64 + warp_ * 16, row_, column_);
    wait_products<0>();
    pin(scores_[0]);
    barrier_arrive(key_empty_.at(0));
    if (!kByCopy && flags_ & kLast) free_queries(0);
    hash_rows(call_, work_, shared_, 0, row_);
    weigh(0, [] {});
    barrier_arrive(descriptor_empty_.at(0));
    return true;
  }

  // The scores of chunk n beside the sums of chunk n - 1.
  __device__ __forceinline__ void compute_chunk() {
    // Wait for the queries of the next tile, if chunk n is its first.
    if (is_first_) {
      if (is_storing_) free_queries(tile_ - 1);
      query_full_.wait_full(tile_ + 1);
    }
    pin(scores_[0]);
    pin(out_[0]);
    begin_products();
    // Issue scores = Q K^T of chunk n.
    begin_scores(tile_ + is_first_, n_ % kShape.stages);
    // Wait for the values of chunk n - 1, and issue out += weights V.
    value_full_.wait_full(n_ - 1);
    products_.begin_sums(out_[0], weights_, (n_ - 1) % kShape.stages);
    if (is_storing_) free_queries(tile_ - 1);
    read_pair_bias(pair_bias_, call_, work_, shared_, n_, flags_, tile_ + is_first_, group_ * 64 + warp_ * 16, row_, column_);
    // Wait for the scores; the keys' place is free.
    wait_products<1>();
    pin(scores_[0]);
    barrier_arrive(key_empty_.at(n_));
    if (!kByCopy && flags_ & kLast) free_queries(tile_ + is_first_);
    // Turn the scores of chunk n into weights, beside the product with the values of chunk n - 1.
    const Softmax ended = softmax_;
    if (is_first_) softmax_ = Softmax(), hash_rows(call_, work_, shared_, tile_ + 1, row_);
    weigh(tile_ + is_first_, [&] {
      if constexpr (Traits::kGathers) {  // such values are long in coming, so their place is freed early
        wait_products<0>();
        pin(out_[0]);
        barrier_arrive(value_empty_.at(n_ - 1));
      }
    });
    // A dependency on the sums, which are never negative, so it adds 0: otherwise ptxas puts the exponentials behind the next
    // wait, where no product hides them.
    barrier_arrive(descriptor_empty_.at(n_) + (softmax_.sum[0][0] + softmax_.sum[0][1] < -1.0f));
    // Wait for the descriptor of chunk n + 1, then for the sums of chunk n - 1.
    const bool ends_tile = is_first_;
    look_ahead();
    wait_products<0>();
    pin(out_[0]);
    if constexpr (!Traits::kGathers) barrier_arrive(value_empty_.at(n_ - 2));
    // Store the tile that has ended, or rescale its sums if a maximum moved.
    if (ends_tile) {
      store(ended, tile_++);
      is_storing_ = kByCopy;
      clear_sums(out_[0]);
    } else if (moves_) {
      Softmax::rescale(out_[0], factor_);
    }
    narrow();
  }

  // Does no row of this warpgroup see a key of the chunk? The first and the last chunk of a tile are computed all the same, so
  // that tiles begin and end together.
  __device__ __forceinline__ bool leaves_out() const {
    return !(flags_ & (kFirst | kLast | kEnd)) && !has_bit(flags_ / kSeenByFirst, group_);
  }

  // Adds the sums of chunk n - 1, says of the chunks from n on that are left out that their places are free, and computes the
  // scores of the one after them. The values of those are waited for, since a place is freed only once in each round of its ring.
  __device__ __forceinline__ void leave_out_chunks() {
    add_sums();
    barrier_arrive(value_empty_.at(n_ - 1));
    for (; leaves_out(); look_ahead()) {
      value_full_.wait_full(n_);
      barrier_arrive(key_empty_.at(n_));
      barrier_arrive(value_empty_.at(n_));
      barrier_arrive(descriptor_empty_.at(n_));
    }
    if (reads_bias()) {
#pragma unroll
      for (int i = 0; i < kN; ++i) read_bias(scores_[0], shared_.descriptors[n_ % kShape.descriptors], column_, i);
    }
    pin(scores_[0]);
    begin_products();
    begin_scores(tile_, n_ % kShape.stages);
    wait_products<0>();
    pin(scores_[0]);
    barrier_arrive(key_empty_.at(n_));
    if (!kByCopy && flags_ & kLast) free_queries(tile_);
    weigh(tile_, [] {});
    barrier_arrive(descriptor_empty_.at(n_));
    look_ahead();
    if (moves_) Softmax::rescale(out_[0], factor_);
    narrow();
  }

  // Adds the last chunk, and stores the last tile.
  __device__ __forceinline__ void compute_last_sums() {
    add_sums();
    store(softmax_, tile_);
    if (kByCopy && lane_ == 0) wait_stores_read();
  }

  // The sums of chunk n - 1, beside which nothing else runs.
  __device__ __forceinline__ void add_sums() {
    value_full_.wait_full(n_ - 1);
    pin(out_[0]);
    begin_products();
    products_.begin_sums(out_[0], weights_, (n_ - 1) % kShape.stages);
    wait_products<0>();
    pin(out_[0]);
    if (is_storing_) free_queries(tile_ - 1);
  }

  // Goes on to the next chunk's descriptor. Called before waiting for the products of the chunk before, so that the flags are
  // known in time.
  __device__ __forceinline__ void look_ahead() {
    is_first_ = flags_ & kLast;
    ++n_;
    key_full_.wait_full(n_);
    flags_ = shared_.descriptors[n_ % kShape.descriptors].flags;
  }
  __device__ __forceinline__ void begin_scores(uint32_t tile, uint32_t stage) {
    products_.begin_scores(scores_[0], tile, stage, has_bias_ && !(flags_ & kHuge));
  }
  template <class Between>
  __device__ __forceinline__ void weigh(uint32_t tile, const Between& between) {
    moves_ = weigh_scores<T, kDim, Traits>(call_, work_, shared_, shared_.descriptors[n_ % kShape.descriptors], flags_, tile,
                                           scores_, softmax_, factor_, row_, column_, has_bias_, pair_bias_, between);
  }
  // Narrows the weights to the operand of the next product.
  __device__ __forceinline__ void narrow() {
    narrow_weights<T>(scores_[0], weights_, shared_.descriptors[n_ % kShape.descriptors], column_, reads_bias());
  }
  __device__ __forceinline__ void store(const Softmax& sums, uint32_t tile) {
    store_tile<T>(call_, work_, maps_, shared_, out_, sums, tile, group_, warp_, lane_, row_);
  }
  // Says that the place of a tile's queries is free: when its last scores are done, or when its output has left from that place.
  __device__ __forceinline__ void free_queries(uint32_t tile) {
    if (kByCopy && lane_ == 0) wait_stores_read();
    barrier_arrive(query_empty_.at(tile));
    is_storing_ = false;
  }
  // Products are added to key_bias where has_bias_. Threads read it into the scores, or a product of its own brings it there.
  __device__ __forceinline__ bool reads_bias() const { return has_bias_ && !kMultipliesBias<Traits>; }

  const ForwardCall& call_;
  const ForwardWork& work_;
  const ForwardMaps& maps_;
  Shared& shared_;
  const int group_;
  const int thread_ = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int warp_ = thread_ / 32, lane_ = thread_ % 32, column_ = lane_ % 4 * 2;
  const int row_ = group_ * 64 + warp_ * 16 + lane_ / 4;  // of the tile; the thread's other row is row + 8
  const Ring<kShape.descriptors> descriptor_empty_{shared_address(shared_.descriptor_empty)};
  const Ring<kShape.stages> key_full_{shared_address(shared_.key_full)}, key_empty_{shared_address(shared_.key_empty)},
      value_full_{shared_address(shared_.value_full)}, value_empty_{shared_address(shared_.value_empty)};
  const Ring<kShape.query_tiles> query_full_{shared_address(shared_.query_full)},
      query_empty_{shared_address(shared_.query_empty)};
  const ForwardProducts<T, kDim, Traits> products_;
  const bool has_bias_;
  float out_[1][kOut][4], scores_[1][kN][4];
  uint32_t weights_[kSteps][4];
  Softmax softmax_;
  std::conditional_t<Traits::kBias == Bias::kCopied, CopiedBias<T, kN>, ChunkBias<T, kN>> pair_bias_;
  float factor_[2];
  bool moves_ = false;                     // has a maximum moved?
  uint32_t n_ = 0, tile_ = 0, flags_ = 0;  // the chunk, the tile of the chunk before, the flags of the chunk
  bool is_first_ = false;                  // chunk n belongs to the next tile
  bool is_storing_ = false;
};

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
    Consumer<T, kDim, Traits>(call, work, maps, shared).run();
    return;
  }
  constexpr int kLoading = 2 * kShape.loaders();
  if (kShape.shares_warpgroup() || thread < kLoading) give_registers<kShape.loading_registers>();
  if (thread < kLoading) {
    Producer<kDim, Traits>(call, work, maps, shared, thread, is_single).run();
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
