// The keys that lists show to queries of a decode step: a bit for each key in shared memory, and then the rows of the keys whose
// bit is set. Lists as an indexer makes them, ascending between sinks and local window, need no bits.
#include "../common/dependent_launch.cuh"
#include "../common/device.cuh"
#include "../common/kernel_limits.cuh"
#include "../launch.h"

namespace dmattn::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kRangeWords = 8192, kRangeKeys = kRangeWords * 32;  // keys that have a bit at once

// Sets the bits of keys first, .., last - 1, as far as they lie in the range that begins at `range`. `step` threads share the
// work.
__device__ __forceinline__ void set_bits(uint32_t* bits, int first, int last, int range, int range_end, int thread, int step) {
  first = max(first, range) - range, last = min(last, range_end) - range;
  for (int word = first / 32 + thread; word * 32 < last; word += step) {
    const int low = max(first - word * 32, 0), high = min(last - word * 32, 32);
    if (low < high) atomicOr(bits + word, (high == 32 ? 0xffffffffu : (1u << high) - 1) & (0xffffffffu << low));
  }
}

// Are all entries of a list ascending, behind the sinks and before the local keys, and then -1? count: of those before. All
// threads of the block ask together.
__device__ __forceinline__ bool is_ascending(const int32_t* list, int entries, int log2_block, int sinks, int recent,
                                             int& shared_count, int& count) {
  if (threadIdx.x == 0) shared_count = entries;
  __syncthreads();
  bool holds = true;
  for (int i = static_cast<int>(threadIdx.x); i < entries; i += kThreads) {
    const int entry = list[i], before = i > 0 ? list[i - 1] : -1;
    if (entry >= 0) {
      const bool follows = entry > before && (i == 0 || before >= 0);
      holds = holds && follows && entry >= (sinks + (1 << log2_block) - 1) >> log2_block && entry < recent >> log2_block;
    } else if (i == 0 || before >= 0) {
      atomicMin(&shared_count, i);
    }
  }
  holds = __syncthreads_and(holds) != 0;
  count = shared_count;
  return holds;
}

// lists [B|1, heads|1, T, K], lengths [B] -> rows [B, heads, T, M], counts [B, heads, T]. A block of threads for each query of
// each head.
__global__ __launch_bounds__(kThreads) void list_keys_kernel(const __grid_constant__ ListKeysParams p) {
  __shared__ uint32_t bits[kRangeWords];
  __shared__ int of_warp[kWarps];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int64_t task = blockIdx.x;
  const int query = static_cast<int>(task % p.queries), head = static_cast<int>(task / p.queries % p.heads);
  const int batch = static_cast<int>(task / p.queries / p.heads);
  const int capacity = static_cast<int>(p.capacity), most = static_cast<int>(p.most);
  const int length = max(0, min(p.lengths[batch], capacity));
  // A page number that is out of range empties its sequence.
  bool is_bad = false;
  if (p.page_table) {
    for (int64_t at = thread; at * p.page_size < length; at += kThreads) {
      const int page = p.page_table[batch * p.table_stride + at];
      is_bad = is_bad || page < 0 || page >= p.pages;
    }
  }
  is_bad = __syncthreads_or(is_bad) != 0;
  const int end = is_bad || length == 0 ? 0 : max(0, length - static_cast<int>(p.queries) + query + 1);
  const int32_t* const list = static_cast<const int32_t*>(p.lists.data) + batch * p.lists.batch_stride +
                              head * p.lists.head_stride + query * p.row_stride;
  int32_t* const rows = p.rows + task * p.most;
  const int sinks = min(p.sinks, end), recent = max(sinks, end - p.local);
  __shared__ int listed_count;
  if (int listed; is_ascending(list, static_cast<int>(p.entries), p.log2_block, sinks, recent, listed_count, listed)) {
    listed <<= p.log2_block;
    const int total = sinks + listed + end - recent;
    for (int i = thread; i < most; i += kThreads) {
      const int at = i - sinks, block_key = at & ((1 << p.log2_block) - 1);
      const int key = at < 0 ? i : at < listed ? (list[at >> p.log2_block] << p.log2_block) + block_key : recent + at - listed;
      rows[i] = i < total ? cache_row(p, batch, head, key) : -1;
    }
    if (thread == 0) p.counts[task] = total;
    return;
  }
  const int blocks = (end + (1 << p.log2_block) - 1) >> p.log2_block;
  int found = 0;
  for (int range = 0; range < end; range += kRangeKeys) {
    const int range_end = min(range + kRangeKeys, end), words = (range_end - range + 31) / 32;
    for (int word = thread; word < words; word += kThreads) bits[word] = 0;
    __syncthreads();
    for (int i = thread; i < p.entries; i += kThreads) {
      const int entry = list[i];
      if (entry < 0 || entry >= blocks) continue;
      const int first = entry << p.log2_block;
      if (first < range_end && first + (1 << p.log2_block) > range) {
        set_bits(bits, first, first + (1 << p.log2_block), range, range_end, 0, 1);
      }
    }
    set_bits(bits, end - p.local, end, range, range_end, thread, kThreads);
    set_bits(bits, 0, p.sinks, range, range_end, thread, kThreads);
    __syncthreads();
    // Each thread has neighbouring words; find how many keys lie before its own.
    const int each = (words + kThreads - 1) / kThreads, first_word = min(thread * each, words);
    const int last_word = min(first_word + each, words);
    int own = 0;
    for (int word = first_word; word < last_word; ++word) own += __popc(bits[word]);
    int before = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, before, step);
      before += lane >= step ? other : 0;
    }
    if (lane == 31) of_warp[warp] = before;
    __syncthreads();
    int at = found + before - own, total = 0;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) {
      at += other < warp ? of_warp[other] : 0, total += of_warp[other];
    }
    for (int word = first_word; word < last_word; ++word) {
      for (uint32_t left = bits[word]; left; left &= left - 1) {
        rows[at++] = cache_row(p, batch, head, range + word * 32 + __ffs(static_cast<int>(left)) - 1);
      }
    }
    found += total;
    __syncthreads();
  }
  for (int i = found + thread; i < most; i += kThreads) rows[i] = -1;
  if (thread == 0) p.counts[task] = found;
}

}  // namespace

cudaError_t launch_list_keys(const ListKeysParams& p, cudaStream_t stream) {
  return launch_dependent(list_keys_kernel, grid_of(p.batch * p.heads * p.queries), kThreads, 0, stream, p);
}

}  // namespace dmattn::cuda
