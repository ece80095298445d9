// The k best of a row of scores, exactly: equal ones the later, the places in ascending order.
//
// Bins of equal width between the least and the largest score say in which of them the last place falls, and the scores there are
// ranked; while they are too many, they are binned again. A block of threads has a row. Each warp has neighbouring scores, 32 at
// a time, in registers where the row is short enough.
#include "../common/device.cuh"
#include "../common/kernel_limits.cuh"
#include "../common/visibility.cuh"
#include "query_rows.cuh"

namespace dmattn::cuda {
namespace {

constexpr int kBins = 1024, kMostRanked = 512;

struct Chosen {
  float score;
  int place;
  __device__ __forceinline__ bool is_behind(float x, int at) const { return x > score || (x == score && at >= place); }
};

// A row's scores as one thread sees them: kPerLane of them in registers, or read again each time (0).
template <int kWarps, int kPerLane>
struct Row {
  const float* from;
  int count, written, log2_fold, first, steps;  // this warp has [first, first + 32 * steps)
  float kept[kPerLane > 0 ? kPerLane : 1];

  // n scores, of the parts of which the first `parts` were written.
  __device__ __forceinline__ Row(const float* scores, int n, int parts, int fold)
      : from(scores), count(n), written(parts), log2_fold(fold) {
    steps = kPerLane > 0 ? kPerLane : (n + 32 * kWarps - 1) / (32 * kWarps);
    first = static_cast<int>(threadIdx.x / 32) * 32 * steps;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) kept[i] = read(i);
  }
  __device__ __forceinline__ int place(int i) const { return first + 32 * i + static_cast<int>(threadIdx.x % 32); }
  // A score of 0 is positive, so that those that are equal have the same bits.
  __device__ __forceinline__ float read(int i) const {
    const int at = place(i);
    if (at >= count) return negative_infinity();
    const int first_part = at << log2_fold, last_part = min(first_part + (1 << log2_fold), written);
    float most = from[first_part];
    for (int part = first_part + 1; part < last_part; ++part) most = fmaxf(most, from[part]);
    return most + 0.0f;
  }
  // Calls use(score, place, step) for each of the thread's scores, all lanes of a warp together.
  template <class Use>
  __device__ __forceinline__ void each(Use use) const {
    if constexpr (kPerLane > 0) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (first + 32 * i < count) use(kept[i], place(i), i);
      }
    } else {
      for (int i = 0; i < steps; ++i) {
        if (first + 32 * i < count) use(read(i), place(i), i);
      }
    }
  }
};

// A float's bits as a number in the order of floats.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The bins of scores from `least` to `most`, least < most: the first and the last of them fall into different bins.
struct Bins {
  float least, factor;
  uint32_t least_bits;
  int shift;

  __device__ __forceinline__ Bins(float low, float high)
      : least(low), factor((kBins - 1) / (high - low)), least_bits(ordered(low)), shift(-1) {
    if (factor >= 1.0e-30f && factor <= 1.0e30f) return;
    shift = max(0, 22 - __clz(static_cast<int>(ordered(high) - least_bits)));  // by their bits, which no range is too wide for
  }
  __device__ __forceinline__ int operator()(float x) const {
    if (shift >= 0) return static_cast<int>((ordered(x) - least_bits) >> shift);
    return min(kBins - 1, static_cast<int>((x - least) * factor));
  }
};

template <int kWarps>
struct Shared {
  int counts[kBins];
  float ranked_score[kMostRanked];
  int ranked_place[kMostRanked];
  float least[kWarps], most[kWarps];
  int of_warp[kWarps];
  int count, bin, wanted;
  Chosen cut;
};

template <int kWarps>
__device__ __forceinline__ void share_range(Shared<kWarps>& s, float& least, float& most, int& count) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    least = fminf(least, __shfl_xor_sync(0xffffffffu, least, step)), most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
  }
  count = __reduce_add_sync(0xffffffffu, count);
  if (threadIdx.x % 32 == 0)
    s.least[threadIdx.x / 32] = least, s.most[threadIdx.x / 32] = most, s.of_warp[threadIdx.x / 32] = count;
  __syncthreads();
  count = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    least = fminf(least, s.least[warp]), most = fmaxf(most, s.most[warp]), count += s.of_warp[warp];
  }
  __syncthreads();
}

// The bin that holds the `wanted`-th largest score, and how many of its scores are wanted: the first warp adds up the counts from
// the last bin down.
template <int kWarps>
__device__ __forceinline__ void find_bin(Shared<kWarps>& s, int wanted) {
  constexpr int kEach = kBins / 32;
  if (threadIdx.x < 32) {
    const int lane = static_cast<int>(threadIdx.x), last = kBins - 1 - lane * kEach;
    int own = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) own += s.counts[last - i];
    int before = own;  // in this lane's bins and those after them
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, before, step);
      before += lane >= step ? other : 0;
    }
    before -= own;
    if (before < wanted && wanted <= before + own) {
      int bin = last, left = wanted - before;
      while (s.counts[bin] < left) left -= s.counts[bin--];
      s.bin = bin, s.wanted = left;
    }
  }
  __syncthreads();
}

// Of the scores that are equal to `score`, the place of the `wanted`-th from the end.
template <int kWarps, class Scores>
__device__ __forceinline__ void find_equal(Shared<kWarps>& s, const Scores& row, float score, int wanted) {
  int own = 0;
  row.each([&](float x, int, int) { own += __popc(__ballot_sync(0xffffffffu, x == score)); });
  if (threadIdx.x % 32 == 0) s.of_warp[threadIdx.x / 32] = own;
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x / 32);
  int behind = 0;
  for (int other = warp + 1; other < kWarps; ++other) behind += s.of_warp[other];
  if (behind < wanted && wanted <= behind + own) {
    int from_start = own - (wanted - behind);  // equal ones of this warp in front of it
    row.each([&](float x, int place, int) {
      const uint32_t equal = __ballot_sync(0xffffffffu, x == score);
      if (x == score && __popc(equal & lanes_before()) == from_start) s.cut = {score, place};
      from_start -= __popc(equal);
      from_start = from_start < 0 ? 1 << 30 : from_start;
    });
  }
  __syncthreads();
}

// The worst score that is chosen, into s.cut.
template <int kWarps, class Scores>
__device__ __forceinline__ void find_cut(Shared<kWarps>& s, const Scores& row, int wanted) {
  constexpr int kThreads = kWarps * 32;
  const int thread = static_cast<int>(threadIdx.x);
  float least = -negative_infinity(), most = negative_infinity();
  int count = 0;
  row.each([&](float x, int, int) {
    if (!(x > negative_infinity())) return;
    least = fminf(least, x), most = fmaxf(most, x), ++count;
  });
  share_range(s, least, most, count);
  if (thread == 0) s.cut = wanted > 0 ? Chosen{negative_infinity(), 1 << 30} : Chosen{-negative_infinity(), 1 << 30};
  __syncthreads();
  if (count <= wanted || wanted == 0) return;
  while (least < most) {
    const Bins bin_of(least, most);
    for (int bin = thread; bin < kBins; bin += kThreads) s.counts[bin] = 0;
    if (thread == 0) s.count = 0;
    __syncthreads();
    row.each([&](float x, int, int) {
      if (x >= least && x <= most && x > negative_infinity()) atomicAdd(&s.counts[bin_of(x)], 1);
    });
    __syncthreads();
    find_bin(s, wanted);
    const int bin = s.bin;
    wanted = s.wanted;
    // Collect the bin's scores, and their range in case they are too many.
    float low = -negative_infinity(), high = negative_infinity();
    row.each([&](float x, int place, int) {
      if (!(x >= least && x <= most && x > negative_infinity()) || bin_of(x) != bin) return;
      low = fminf(low, x), high = fmaxf(high, x);
      const int at = atomicAdd(&s.count, 1);
      if (at < kMostRanked) s.ranked_score[at] = x, s.ranked_place[at] = place;
    });
    __syncthreads();
    const int found = s.count;
    if (found <= kMostRanked) {
      for (int i = thread; i < found; i += kThreads) {
        const Chosen own{s.ranked_score[i], s.ranked_place[i]};
        int better = 0;
        for (int j = 0; j < found; ++j) better += own.is_behind(s.ranked_score[j], s.ranked_place[j]);
        if (better == wanted) s.cut = own;  // itself among them
      }
      __syncthreads();
      return;
    }
    share_range(s, low, high, count);
    least = low, most = high;
  }
  find_equal(s, row, least, wanted);
}

// The places behind the cut, in ascending order, and then -1.
template <int kWarps, class Scores>
__device__ __forceinline__ void write_list(Shared<kWarps>& s, const Scores& row, int top, int32_t* indices, float* scores) {
  const Chosen cut = s.cut;
  const auto is_chosen = [&](float x, int place) { return x > negative_infinity() && cut.is_behind(x, place); };
  int own = 0;
  row.each([&](float x, int place, int) { own += __popc(__ballot_sync(0xffffffffu, is_chosen(x, place))); });
  if (threadIdx.x % 32 == 0) s.of_warp[threadIdx.x / 32] = own;
  __syncthreads();
  int at = 0, total = 0;
  for (int warp = 0; warp < kWarps; ++warp) {
    at += warp < static_cast<int>(threadIdx.x / 32) ? s.of_warp[warp] : 0, total += s.of_warp[warp];
  }
  row.each([&](float x, int place, int) {
    const bool chosen = is_chosen(x, place);
    const uint32_t all = __ballot_sync(0xffffffffu, chosen);
    if (chosen) {
      const int to = at + __popc(all & lanes_before());
      indices[to] = place;
      if (scores) scores[to] = x;
    }
    at += __popc(all);
  });
  for (int i = total + static_cast<int>(threadIdx.x); i < top; i += kWarps * 32) {
    indices[i] = -1;
    if (scores) scores[i] = negative_infinity();
  }
}

// scores [rows of this part, row_stride] -> indices and scores [B, G, Sq, K]. A block of threads for each row.
template <int kWarps, int kPerLane>
__global__ __launch_bounds__(kWarps * 32) void index_choice_kernel(const __grid_constant__ IndexCall call) {
  __shared__ Shared<kWarps> s;
  const IndexTopKParams& p = call.p;
  const int row_of_part = static_cast<int>(blockIdx.x);
  const IndexQueries at(call, row_of_part / kIndexTileQueries);
  const int query = at.first + row_of_part % kIndexTileQueries, top = static_cast<int>(p.top);
  if (query >= p.query_length) return;
  const CompetingRows in = competing_rows(p, at.offset + query, at.length);
  const int log2_block = call.log2_score_block + call.log2_fold;
  const int end = max(in.end, in.later_end), count = (end + (1 << log2_block) - 1) >> log2_block;
  const int written = (end + (1 << call.log2_score_block) - 1) >> call.log2_score_block;
  const Row<kWarps, kPerLane> row(call.scores + row_of_part * call.row_stride, count, written, call.log2_fold);
  find_cut(s, row, top);
  const int64_t list = ((at.batch * p.groups + at.group) * p.query_length + query) * p.top;
  write_list(s, row, top, p.indices + list, p.scores ? static_cast<float*>(p.scores) + list : nullptr);
}

template <int kWarps, int kPerLane>
cudaError_t launch_choice(const IndexCall& call, cudaStream_t stream) {
  index_choice_kernel<kWarps, kPerLane><<<grid_of(call.tiles * kIndexTileQueries), kWarps * 32, 0, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_index_choice(const IndexCall& call, cudaStream_t stream) {
  const int64_t blocks = scores_of_row(call.p, call.log2_score_block + call.log2_fold);
  if (blocks <= 4 * 32 * 16) return launch_choice<4, 16>(call, stream);
  if (blocks <= 16 * 32 * 16) return launch_choice<16, 16>(call, stream);
  if (blocks <= 16 * 32 * 64) return launch_choice<16, 64>(call, stream);
  return launch_choice<32, 0>(call, stream);
}

}  // namespace dmattn::cuda
