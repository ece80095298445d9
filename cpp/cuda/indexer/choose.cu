// The k best of a row of scores, exactly: equal ones the later, the places in ascending order.
//
// A score is a number of 32 bits, in the order in which scores are chosen. Bins of equal width say in which of them the k-th
// falls; while it holds too many, it is binned again, by the places where all its scores are equal; then they are ranked. A block
// of threads has a row.
#include "../common/device.cuh"
#include "../common/kernel_limits.cuh"
#include "../common/visibility.cuh"
#include "query_rows.cuh"

namespace dmattn::cuda {
namespace {

constexpr float kLeast = -3.402823466e38f;  // of finite numbers

// A score in the order of scores, 0 if there is none, and the place of its block.
struct Number {
  uint32_t score;
  int place;
};

// -0 becomes +0, so that equal scores have equal bits; NaN is no score.
__device__ __forceinline__ uint32_t in_order(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return score > negative_infinity() ? (bits & 0x80000000u ? ~bits : bits | 0x80000000u) : 0;
}
__device__ __forceinline__ float score_of(uint32_t x) { return __uint_as_float(x & 0x80000000u ? x & 0x7fffffffu : ~x); }

// Greater is better: the score, then the place.
__device__ __forceinline__ uint64_t rank_of(Number x) {
  return static_cast<uint64_t>(x.score) << 32 | static_cast<uint32_t>(x.place);
}
constexpr uint64_t kAll = uint64_t{1} << 32;  // the least rank of a number with a score

// What a block of threads chooses among: `count` numbers that `read(i)` gives, kept in shared memory if there is room, or read
// again each time.
template <int kWarps, class Read>
struct Row {
  Read read;
  int count;
  bool is_kept;

  __device__ __forceinline__ Row(Read from, int n, int room) : read(from), count(n), is_kept(n <= room) {}
  static __device__ __forceinline__ uint2* kept() {
    extern __shared__ uint2 numbers[];
    return numbers;  // a thread reads what it wrote itself
  }
  // Calls use(x) for each of the thread's numbers: `each_first` the first time, which reads them, and `each` from then on.
  template <class Use>
  __device__ __forceinline__ void each_first(Use use) const {
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kWarps * 32) {
      const Number x = read(i);
      if (is_kept) kept()[i] = {x.score, static_cast<uint32_t>(x.place)};
      use(x);
    }
  }
  template <class Use>
  __device__ __forceinline__ void each(Use use) const {
    if (is_kept) {
#pragma unroll 4
      for (int i = static_cast<int>(threadIdx.x); i < count; i += kWarps * 32) {
        const uint2 x = kept()[i];
        use(Number{x.x, static_cast<int>(x.y)});
      }
    } else {
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x); i < count; i += kWarps * 32) use(read(i));
    }
  }
};

// The scores of all blocks, or of those of the sample; with kFolds a block may have several, `written` in all.
template <bool kFolds>
struct ReadScores {
  const float* from;
  int written, log2_fold;
  __device__ __forceinline__ Number operator()(int block) const {
    if constexpr (!kFolds) return {in_order(from[block]), block};
    const int first = block << log2_fold, last = min(first + (1 << log2_fold), written);
    float most = from[first];
    for (int part = first + 1; part < last; ++part) most = fmaxf(most, from[part]);
    return {in_order(most), block};
  }
};

struct ReadCandidates {
  const IndexEntry* from;
  __device__ __forceinline__ Number operator()(int i) const {
    const float2 entry = *reinterpret_cast<const float2*>(from + i);
    return {in_order(entry.x), __float_as_int(entry.y)};
  }
};

// The score of a key, computed again, one product after the other. In a function of its own, because it is rarely wanted.
template <class T>
__device__ __noinline__ float score_again(const IndexCall& call, const IndexQueries& at, int query, int position, int key) {
  const IndexTopKParams& p = call.p;
  const auto row = [&at](const TensorView& tensor, int64_t number) {
    const int64_t from = at.batch * tensor.batch_stride + at.group * tensor.head_stride + number * tensor.row_stride;
    return static_cast<const T*>(tensor.data) + from;
  };
  const float* const weights = weights_of(p, at) + query * p.weights.row_stride;
  const T *const of_query = row(p.query, query), *const of_key = row(p.key, key);
  float sum = 0.0f;
  for (int64_t head = 0; head < p.heads; ++head) {
    float product = 0.0f;
    const uint4* const left = reinterpret_cast<const uint4*>(of_query + head * p.query_head_stride);
    for (int part = 0; part < static_cast<int>(p.head_dim) / 8; ++part) {
      const uint4 a = left[part], b = reinterpret_cast<const uint4*>(of_key)[part];
      const uint32_t pairs[4][2] = {{a.x, b.x}, {a.y, b.y}, {a.z, b.z}, {a.w, b.w}};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = Element<T>::widen_pair(pairs[i][0]), y = Element<T>::widen_pair(pairs[i][1]);
        product = fmaf(x.y, y.y, fmaf(x.x, y.x, product));
      }
    }
    product *= static_cast<float>(p.scale);
    sum = fmaf(weights[head], product < 0.0f ? 0.0f : product, sum);
  }
  const int log2_width = p.is_pooled ? p.log2_block : 0;
  const float distance = static_cast<float>((key << log2_width) - position) + static_cast<float>((1 << log2_width) - 1) * 0.5f;
  return fmaf(p.slope ? static_cast<const float*>(p.slope)[at.group] : 0.0f, distance, sum);
}

struct ReadAgain {
  const IndexCall& call;
  const IndexQueries& at;
  int query, position;
  CompetingRows in;

  __device__ __forceinline__ float score(int key) const {
    if (call.p.dtype == DType::kBFloat16) return score_again<__nv_bfloat16>(call, at, query, position, key);
    return score_again<__half>(call, at, query, position, key);
  }
  __device__ Number operator()(int block) const {
    const IndexTopKParams& p = call.p;
    const int32_t* const start = row_of<const int32_t>(p.start, at.batch, at.group);
    const int32_t* const end = row_of<const int32_t>(p.end, at.batch, at.group);
    const int log2_block = call.log2_score_block + call.log2_fold;
    uint32_t best = 0;
    for (int key = block << log2_block; key < static_cast<int>(p.keys) && key < (block + 1) << log2_block; ++key) {
      bool is_in = (key >= in.first && key < in.end) || (key >= in.later && key < in.later_end);
      if (start) is_in = is_in && start[key] <= position;
      if (end) is_in = is_in && position < end[key];
      if (is_in) best = max(best, in_order(score(key)));
    }
    return {best, block};
  }
};

template <int kWarps>
struct Shared {
  static constexpr int kThreads = kWarps * 32, kBins = kThreads * 8 < 1024 ? kThreads * 8 : 1024;
  static constexpr int kWords = kThreads * 8 < 2048 ? kThreads * 8 : 2048;  // their places are numbers of 16 bits
  static constexpr int kMostRanked = kWarps < 8 ? 64 * kWarps : 512, kListed = 2 * kWords;
  union {
    int counts[kBins];         // of a bin's numbers
    uint16_t listed[kListed];  // places in order
  };
  union {
    uint64_t ranked[kMostRanked];
    uint16_t before[kWords];  // how many places are chosen in front of a word's
  };
  uint32_t words[kWords];  // a bit for each place
  uint32_t least[kWarps], most[kWarps];
  uint64_t cut;
  int of_warp[kWarps];
  int ranked_count, bin, wanted;
};

// The sum of `own` over the threads in front of this one, and over all.
template <int kWarps>
__device__ __forceinline__ int sum_before(Shared<kWarps>& s, int own, int& total) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  int sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, step);
    sum += lane >= step ? other : 0;
  }
  if (lane == 31) s.of_warp[warp] = sum;
  __syncthreads();
  int before = sum - own;
  total = 0;
  for (int other = 0; other < kWarps; ++other) {
    before += other < warp ? s.of_warp[other] : 0, total += s.of_warp[other];
  }
  __syncthreads();
  return before;
}

// The bin that holds the `wanted`-th best number, the last bin's being the best, and its rank within that bin.
template <int kWarps>
__device__ __forceinline__ void find_bin(Shared<kWarps>& s, int wanted) {
  constexpr int kBins = Shared<kWarps>::kBins, kEach = kBins / Shared<kWarps>::kThreads;
  const int last = kBins - 1 - static_cast<int>(threadIdx.x) * kEach;
  int own = 0, total = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) own += s.counts[last - i];
  const int before = sum_before(s, own, total);
  if (before < wanted && wanted <= before + own) {
    int bin = last, left = wanted - before;
    while (s.counts[bin] < left) left -= s.counts[bin--];
    s.bin = bin, s.wanted = left;
  }
  __syncthreads();
}

// Values from `least` to `most`, of which `wanted` are to be chosen.
struct Range {
  uint32_t least, most;
  int wanted;
  __device__ __forceinline__ bool has(uint32_t x) const { return x - least <= most - least; }
};

// Narrows the range to one bin after the other until it has few numbers or a single value; returns how many numbers it has.
template <int kWarps, class Numbers, class Value>
__device__ __forceinline__ int narrow(Shared<kWarps>& s, const Numbers& row, Range& range, Value value_of) {
  constexpr int kThreads = Shared<kWarps>::kThreads, kBins = Shared<kWarps>::kBins;
  for (;;) {
    const uint32_t least = range.least, width = range.most - least;
    const int shift = max(0, 32 - __clz(static_cast<int>(width)) - (31 - __clz(kBins)));
    for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kThreads) s.counts[bin] = 0;
    __syncthreads();
    row.each([&](Number x) {
      const uint32_t from_least = value_of(x) - least;
      if (from_least <= width) atomicAdd(&s.counts[from_least >> shift], 1);
    });
    __syncthreads();
    find_bin(s, range.wanted);
    const int bin = s.bin, found = s.counts[bin];
    range.wanted = s.wanted;
    range.least += static_cast<uint32_t>(bin) << shift;
    range.most = range.least + min(range.most - range.least, (1u << shift) - 1);
    if (found <= Shared<kWarps>::kMostRanked || shift == 0) return found;
    __syncthreads();
  }
}

// The least rank that is chosen: that of the `wanted`-th best, or a lower one that admits at most `spare` more; kAll where there
// are no more numbers than wanted.
template <int kWarps, class Numbers>
__device__ __forceinline__ uint64_t find_cut(Shared<kWarps>& s, const Numbers& row, int wanted, int spare) {
  constexpr int kThreads = Shared<kWarps>::kThreads, kMostRanked = Shared<kWarps>::kMostRanked;
  const int thread = static_cast<int>(threadIdx.x);
  Range range{~0u, 0, wanted};
  int own = 0, count = 0;
  row.each_first([&](Number x) {
    range.most = max(range.most, x.score);
    range.least = min(range.least, x.score - 1);  // 0, no score, becomes the greatest
    own += x.score != 0;
  });
  range.least = __reduce_min_sync(0xffffffffu, range.least), range.most = __reduce_max_sync(0xffffffffu, range.most);
  if (thread % 32 == 0) s.least[thread / 32] = range.least, s.most[thread / 32] = range.most;
  if (thread == 0) s.ranked_count = 0;
  sum_before(s, own, count);
  for (int warp = 0; warp < kWarps; ++warp)
    range.least = min(range.least, s.least[warp]), range.most = max(range.most, s.most[warp]);
  range.least += 1;
  if (count <= wanted) return kAll;
  int found = narrow(s, row, range, [](Number x) { return x.score; });
  if (found - range.wanted <= spare) return static_cast<uint64_t>(range.least) << 32;
  if (found <= kMostRanked) {
    row.each([&](Number x) {
      if (range.has(x.score)) s.ranked[atomicAdd(&s.ranked_count, 1)] = rank_of(x);
    });
  } else {  // of equal scores
    __syncthreads();
    const uint32_t score = range.least;
    Range places{1, 0x7fffffffu, range.wanted};
    const auto place_of = [score](Number x) { return x.score == score ? static_cast<uint32_t>(x.place) + 1 : 0; };
    found = narrow(s, row, places, place_of);
    range.wanted = places.wanted;
    row.each([&](Number x) {
      if (places.has(place_of(x))) s.ranked[atomicAdd(&s.ranked_count, 1)] = rank_of(x);
    });
  }
  __syncthreads();
  for (int i = thread; i < found; i += kThreads) {
    const uint64_t x = s.ranked[i];
    int better = 0;
    for (int j = 0; j < found; ++j) better += s.ranked[j] >= x;
    if (better == range.wanted) s.cut = x;  // itself among them
  }
  __syncthreads();
  return s.cut;
}

// The places of the numbers from the cut on, all below `places`, in ascending order, and then -1: a bit for each in shared
// memory, for a part of the places at a time, says how many are in front of it. They are put in order there, too, so that
// neighbours in the list are written by neighbours.
template <int kWarps, class Numbers>
__device__ __forceinline__ void write_list(Shared<kWarps>& s, const Numbers& row, uint64_t cut, int places, int top,
                                           int32_t* indices, float* scores) {
  using S = Shared<kWarps>;
  constexpr int kThreads = S::kThreads, kWords = S::kWords, kEach = kWords / kThreads, kPlaces = 32 * kWords;
  const int thread = static_cast<int>(threadIdx.x);
  int written = 0;
  for (int first = 0; first < places; first += kPlaces) {
    // use(x, place) for the chosen numbers of this part.
    const auto each_chosen = [&](auto use) {
      row.each([&](Number x) {
        const uint32_t place = static_cast<uint32_t>(x.place - first);
        if (rank_of(x) >= cut && place < kPlaces) use(x, place);
      });
    };
#pragma unroll
    for (int i = 0; i < kEach; ++i) s.words[thread + i * kThreads] = 0;
    __syncthreads();
    each_chosen([&](Number, uint32_t place) { atomicOr(&s.words[place / 32], 1u << place % 32); });
    __syncthreads();
    int counts[kEach], own = 0, total = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) counts[i] = __popc(s.words[thread * kEach + i]), own += counts[i];
    int before = sum_before(s, own, total);
#pragma unroll
    for (int i = 0; i < kEach; ++i) s.before[thread * kEach + i] = static_cast<uint16_t>(before), before += counts[i];
    for (int begin = 0; begin < total; begin += S::kListed) {
      __syncthreads();
      each_chosen([&](Number x, uint32_t place) {
        const int at = s.before[place / 32] + __popc(s.words[place / 32] & ((1u << place % 32) - 1));
        if (at < begin || at >= begin + S::kListed) return;
        s.listed[at - begin] = static_cast<uint16_t>(place);
        if (scores) scores[written + at] = score_of(x.score);
      });
      __syncthreads();
      const int count = min(S::kListed, total - begin);
      for (int i = thread; i < count; i += kThreads) indices[written + begin + i] = first + s.listed[i];
    }
    written += total;
    __syncthreads();
  }
  for (int i = written + thread; i < top; i += kThreads) {
    indices[i] = -1;
    if (scores) scores[i] = negative_infinity();
  }
}

// Rows of a tile that have a block of threads: not all, where there are few queries.
static inline __host__ __device__ int rows_of_tile(const IndexCall& call) {
  return call.p.query_length < kIndexTileQueries ? static_cast<int>(call.p.query_length) : kIndexTileQueries;
}

// What a block of threads has to do: a row of the part.
struct RowOfPart {
  int tile;
  IndexQueries at;
  int query;
  int64_t number;
  bool is_real;
  CompetingRows in;
  int blocks;  // of the row that may compete

  __device__ __forceinline__ explicit RowOfPart(const IndexCall& call)
      : tile(static_cast<int>(blockIdx.x) / rows_of_tile(call)), at(call, tile) {
    const int row = static_cast<int>(blockIdx.x) % rows_of_tile(call);
    query = at.first + row, number = static_cast<int64_t>(tile) * kIndexTileQueries + row, is_real = query < call.p.query_length;
    in = competing_rows(call.p, at.offset + query, at.length);
    const int log2_block = call.log2_score_block + call.log2_fold;
    blocks = (max(in.end, in.later_end) + (1 << log2_block) - 1) >> log2_block;
  }
  template <bool kFolds>
  __device__ __forceinline__ ReadScores<kFolds> scores(const IndexCall& call) const {
    const int written = (max(in.end, in.later_end) + (1 << call.log2_score_block) - 1) >> call.log2_score_block;
    return {call.scores + number * call.row_stride, written, call.log2_fold};
  }
};

// scores [rows of this part, row_stride] of the sample -> bounds. room: for so many numbers in shared memory.
template <int kWarps>
__global__ __launch_bounds__(kWarps * 32,
                             kWarps == 1 ? 24 : 32 / kWarps) void index_bounds_kernel(const __grid_constant__ IndexCall call,
                                                                                      int room) {
  __shared__ Shared<kWarps> s;
  const RowOfPart own(call);
  if (!own.is_real) return;
  const int log2 = call.sample.log2;
  const Row<kWarps, ReadScores<false>> row(own.scores<false>(call), (own.blocks + (1 << log2) - 1) >> log2, room);
  constexpr int kSpare = 4;  // of the sample, far fewer than the candidates have room for
  const uint64_t cut = find_cut(s, row, call.sample.rank, kSpare);
  if (threadIdx.x > 0) return;
  call.counts[own.number] = 0;
  const int place = static_cast<int>(static_cast<uint32_t>(cut));
  call.bounds[own.number] =
      cut == kAll ? IndexEntry{kLeast, 0} : IndexEntry{score_of(static_cast<uint32_t>(cut >> 32)), sampled_block(place, log2)};
}

template <int kWarps, class Read>
__device__ __forceinline__ void choose(Shared<kWarps>& s, const IndexCall& call, const RowOfPart& own, Read read, int count,
                                       int room) {
  const IndexTopKParams& p = call.p;
  const Row<kWarps, Read> row(read, count, room);
  const uint64_t cut = find_cut(s, row, static_cast<int>(p.top), 0);
  const int64_t list = ((own.at.batch * p.groups + own.at.group) * p.query_length + own.query) * p.top;
  write_list(s, row, cut, own.blocks, static_cast<int>(p.top), p.indices + list,
             p.scores ? static_cast<float*>(p.scores) + list : nullptr);
}

// Finds its row again: what a function takes by reference is kept in local memory, for the other rows, too.
template <int kWarps>
__device__ __noinline__ void choose_again(Shared<kWarps>& s, const IndexCall& call, int room) {
  const RowOfPart own(call);
  const ReadAgain read{call, own.at, own.query, static_cast<int>(own.at.offset) + own.query, own.in};
  choose<kWarps>(s, call, own, read, own.blocks, room);
}

// Scores or candidates -> indices and scores [B, G, Sq, K]. A block of threads for each row.
template <int kWarps, bool kSampled>
__global__ __launch_bounds__(kWarps * 32,
                             kWarps == 1 ? 24 : 32 / kWarps) void index_choice_kernel(const __grid_constant__ IndexCall call,
                                                                                      int room) {
  __shared__ Shared<kWarps> s;
  const RowOfPart own(call);
  if (!own.is_real) return;
  if constexpr (kSampled) {
    const int count = call.counts[own.number], capacity = static_cast<int>(call.sample.capacity);
    // is_short: the bound let too few through
    const bool is_short = count < call.p.top && call.bounds[own.number].score > kLeast;
    if (!is_short && count <= capacity) {
      choose<kWarps>(s, call, own, ReadCandidates{call.candidates + own.number * capacity}, count, room);
    } else {
      choose_again(s, call, room);
    }
  } else {
    choose<kWarps>(s, call, own, own.scores<true>(call), own.blocks, room);
  }
}

// Launches a kernel with a block of threads for each row, and shared memory for `count` numbers, as far as there is room.
template <int kWarps>
cudaError_t launch_rows(void (*kernel)(IndexCall, int), KernelAttribute& known, const IndexCall& call, int64_t count,
                        cudaStream_t stream) {
  constexpr int64_t kMostBytes = 72 << 10;  // two blocks of 16 warps fit, with the rest of their shared memory
  const int room = static_cast<int>(std::min<int64_t>(count, kMostBytes / 8));
  const cudaError_t status = allow_shared_bytes(known, kernel, static_cast<int>(kMostBytes));
  if (status != cudaSuccess) return status;
  kernel<<<grid_of(call.tiles * rows_of_tile(call)), kWarps * 32, room * 8, stream>>>(call, room);
  return cudaGetLastError();
}

// How many warps a row of `count` numbers has: more where there are fewer rows than multiprocessors.
static int warps_of_row(const IndexCall& call, int64_t count) {
  constexpr int64_t kFewRows = 128;
  if (call.tiles * rows_of_tile(call) <= kFewRows) count *= 4;
  return count <= 1024 ? 1 : count <= 4096 ? 4 : 16;
}

template <int kWarps>
cudaError_t launch_bounds_of(const IndexCall& call, int64_t count, cudaStream_t stream) {
  static KernelAttribute known;
  return launch_rows<kWarps>(index_bounds_kernel<kWarps>, known, call, count, stream);
}

template <int kWarps, bool kSampled>
cudaError_t launch_choice_of(const IndexCall& call, int64_t count, cudaStream_t stream) {
  static KernelAttribute known;
  return launch_rows<kWarps>(index_choice_kernel<kWarps, kSampled>, known, call, count, stream);
}

template <bool kSampled>
cudaError_t launch_choice(const IndexCall& call, int64_t count, cudaStream_t stream) {
  const int warps = warps_of_row(call, count);
  if (warps == 1) return launch_choice_of<1, kSampled>(call, count, stream);
  if (warps == 4) return launch_choice_of<4, kSampled>(call, count, stream);
  return launch_choice_of<16, kSampled>(call, count, stream);
}

}  // namespace

cudaError_t launch_index_bounds(const IndexCall& call, cudaStream_t stream) {
  const int64_t count = (scores_of_row(call.p, call.log2_score_block) >> call.sample.log2) + 1;
  const int warps = warps_of_row(call, count - 1);
  if (warps == 1) return launch_bounds_of<1>(call, count, stream);
  if (warps == 4) return launch_bounds_of<4>(call, count, stream);
  return launch_bounds_of<16>(call, count, stream);
}

cudaError_t launch_index_choice(const IndexCall& call, cudaStream_t stream) {
  if (call.sample.log2 > 0) {  // with room for the candidates of most rows: three standard deviations above the mean
    const double rank = call.sample.rank, most = (rank + 3.0 * std::sqrt(rank)) * (1 << call.sample.log2);
    return launch_choice<true>(call, std::min(call.sample.capacity, static_cast<int64_t>(most)), stream);
  }
  return launch_choice<false>(call, scores_of_row(call.p, call.log2_score_block + call.log2_fold), stream);
}

}  // namespace dmattn::cuda
