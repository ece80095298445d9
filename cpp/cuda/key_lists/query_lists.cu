// Turns index lists over: queries that list blocks of keys become lists of queries for each tile of keys.
//
// A block of threads looks at kListQueries neighbouring queries and collects in shared memory, for each tile of keys and query, a
// byte that says which keys of the tile the query lists. It does so twice: first it counts the queries of each tile, and when the
// counts have become places, it writes the queries there. So lists are ascending, whatever order entries have and however often
// one is repeated.
#include <algorithm>
#include <cub/block/block_scan.cuh>
#include <numeric>

#include "../calls.h"
#include "../common/dependent_launch.cuh"
#include "../common/device.cuh"
#include "../common/kernel_limits.cuh"
#include "../common/visibility.cuh"

namespace dmattn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLog2TileKeys = 7, kLog2ListedKeys = 4;
static_assert(kListedTileKeys == 1 << kLog2TileKeys && kListedKeys == 1 << kLog2ListedKeys);
constexpr int kRangeTiles = 1024;                 // that are looked at at a time
constexpr int kTileWords = kListQueries / 4 + 1;  // of a byte for each query; one more, so that tiles have different banks
constexpr int kSharedBytes = kRangeTiles * kTileWords * 4;
using QueryBits = unsigned long long;
static_assert(kListQueries == 64 && kListedTileKeys / kListedKeys == 8);

// The bits of the queries first, .., last - 1 of a block.
__device__ __forceinline__ QueryBits queries_between(int first, int last) {
  const auto from = [](int i) { return i >= 64 ? 0ull : ~0ull << max(i, 0); };
  return from(first) & ~from(last);
}

// Some neighbouring queries of a mask head, and which of them a tile of keys meets.
struct QueryBlock {
  const AttentionParams& p;
  const QueryLists& lists;
  int64_t mask_head;
  int block, first_query, queries;
  int low;        // position of the first query
  int index_low;  // the same, as `local` counts it
  const int32_t* entries;

  __device__ __forceinline__ QueryBlock(const AttentionParams& params, const QueryLists& of) : p(params), lists(of) {
    mask_head = blockIdx.x / lists.query_blocks, block = static_cast<int>(blockIdx.x) % lists.query_blocks;
    const int batch = static_cast<int>(mask_head) / static_cast<int>(lists.heads);
    const int head = static_cast<int>(mask_head) % static_cast<int>(lists.heads) * static_cast<int>(lists.head_divisor);
    const IndexLists& index = p.mask.index;
    first_query = block * kListQueries, queries = min(kListQueries, static_cast<int>(p.query_length) - first_query);
    const int shift = static_cast<int>(p.key_length - p.query_length);
    low = first_query + shift;
    index_low = first_query + local_shift(index, batch, shift);
    entries = row_of<const int32_t>(index.entries, batch, head) + first_query * index.row_stride;
  }

  // Collects the bytes of the tiles [first, first + count) in shared memory.
  __device__ __forceinline__ void collect(uint32_t* bytes, int first, int count) const {
    const IndexLists& index = p.mask.index;
    const int thread = static_cast<int>(threadIdx.x), listed = static_cast<int>(index.count);
    const int log2_blocks = kLog2TileKeys - index.log2_block;  // blocks in a tile
    const uint32_t of_block = (1u << (1 << (index.log2_block - kLog2ListedKeys))) - 1;
    for (int i = thread; i < count * kTileWords; i += kThreads) bytes[i] = 0;
    __syncthreads();
#pragma unroll 4
    for (int item = thread; item < queries * listed; item += kThreads) {
      const int query = static_cast<int>(static_cast<uint32_t>(item) / static_cast<uint32_t>(listed));
      const int last = p.mask.is_causal ? (low + query) >> index.log2_block : kLastPosition;
      const int entry = entries[query * index.row_stride + item - query * listed], tile = (entry >> log2_blocks) - first;
      if (entry < 0 || entry > last || tile < 0 || tile >= count) continue;
      const int place = (entry & ((1 << log2_blocks) - 1)) << (index.log2_block - kLog2ListedKeys);
      atomicOr(&bytes[tile * kTileWords + query / 4], of_block << (place + query % 4 * 8));
    }
    __syncthreads();
  }

  // The queries that meet a tile: those that list a block of it, and by local keys and sinks.
  __device__ __forceinline__ QueryBits meet(const uint32_t* of_tile, int tile) const {
    const int key = tile * kListedTileKeys;
    const IndexLists& index = p.mask.index;
    QueryBits bits = 0;
#pragma unroll
    for (int word = 0; word < kListQueries / 4; ++word) {
      const uint32_t is_any = __vcmpgtu4(of_tile[word], 0) & 0x01010101u;  // one bit for each byte
      bits |= static_cast<QueryBits>((is_any * 0x10204080u) >> 28) << (word * 4);
    }
    if (index.local > 0) {
      const int64_t first = int64_t{key} - index_low, last = first + kListedTileKeys - 1 + index.local;
      const auto clamped = [](int64_t at) { return static_cast<int>(at < 0 ? 0 : at > kListQueries ? kListQueries : at); };
      bits |= queries_between(clamped(first), clamped(last));
    }
    if (key < index.sinks) bits = ~0ull;
    return bits & queries_between(p.mask.is_causal ? key - low : 0, queries);
  }

  // Calls use(tile, bytes of the tile) for each tile of keys, by the threads in turn.
  template <class Use>
  __device__ __forceinline__ void for_each_tile(uint32_t* bytes, const Use& use) const {
    for (int first = 0; first < lists.tiles; first += kRangeTiles) {
      const int count = min(kRangeTiles, lists.tiles - first);
      collect(bytes, first, count);
      for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) use(first + i, bytes + i * kTileWords);
      __syncthreads();
    }
  }
};

// indices int32 [B|1, H|Hkv|1, Sq, K] -> places: how many queries of each block of them meet each tile.
__global__ __launch_bounds__(kThreads) void count_kernel(const __grid_constant__ AttentionParams p,
                                                         const __grid_constant__ QueryLists lists) {
  extern __shared__ uint32_t bytes[];
  const QueryBlock block(p, lists);
  block.for_each_tile(bytes, [&](int tile, const uint32_t* of_tile) {
    lists.places[(block.mask_head * lists.tiles + tile) * lists.query_blocks + block.block] = __popcll(block.meet(of_tile, tile));
  });
}

// Replaces `count` numbers by the sums of those before them; returns the sum of all. By all threads of a block.
__device__ __forceinline__ int scan(int32_t* numbers, int count) {
  using Scan = cub::BlockScan<int32_t, kThreads>;
  __shared__ typename Scan::TempStorage scratch;
  int sum = 0;
  for (int base = 0; base < count; base += kThreads) {
    const int i = base + static_cast<int>(threadIdx.x);
    int before, all;
    Scan(scratch).ExclusiveSum(i < count ? numbers[i] : 0, before, all);
    __syncthreads();  // before the scratch is used again
    if (i < count) numbers[i] = sum + before;
    sum += all;
  }
  return sum;
}

// places: numbers of queries -> places in the list of the tile; begin: the length of the list. A block for each tile of a mask
// head.
__global__ __launch_bounds__(kThreads) void place_kernel(const __grid_constant__ QueryLists lists) {
  const int64_t list = blockIdx.x, mask_head = list / lists.tiles;
  const int length = scan(lists.places + list * lists.query_blocks, lists.query_blocks);
  if (threadIdx.x == 0) lists.begin[list + mask_head] = length;
}

// begin: lengths -> where lists begin, and at the end where the last one ends. A block for each mask head.
__global__ __launch_bounds__(kThreads) void begin_kernel(const __grid_constant__ QueryLists lists) {
  int32_t* const begin = lists.begin + static_cast<int64_t>(blockIdx.x) * (lists.tiles + 1);
  const int all = scan(begin, lists.tiles);
  if (threadIdx.x == 0) begin[lists.tiles] = all;
}

// indices, places, begin -> entries.
__global__ __launch_bounds__(kThreads) void write_kernel(const __grid_constant__ AttentionParams p,
                                                         const __grid_constant__ QueryLists lists) {
  extern __shared__ uint32_t bytes[];
  const QueryBlock block(p, lists);
  block.for_each_tile(bytes, [&](int tile, const uint32_t* of_tile) {
    const int64_t list = block.mask_head * lists.tiles + tile;
    int64_t at = block.mask_head * lists.capacity + lists.begin[list + block.mask_head] +
                 lists.places[list * lists.query_blocks + block.block];
    for (QueryBits left = block.meet(of_tile, tile); left; left &= left - 1, ++at) {
      const int query = __ffsll(static_cast<long long>(left)) - 1;
      const uint32_t seen = of_tile[query / 4] >> (query % 4 * 8) & 0xffu;
      lists.entries[at] = static_cast<uint32_t>(block.first_query + query) | seen << kListedQueryBits;
    }
  });
}

// How many of 32 ascending numbers, one of each lane, are less than `bound`? By a whole warp; bound differs between lanes.
__device__ __forceinline__ int count_below(int number, int bound) {
  int below = 0;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) below += __shfl_sync(0xffffffffu, number, below + step - 1) < bound ? step : 0;
  return below + (__shfl_sync(0xffffffffu, number, below) < bound);
}

// Does a query of the head see the key of this lane? The keys of a warp are neighbours in a tile.
__device__ __forceinline__ bool is_seen_by_some(const BackwardCall& call, int batch, int head, int tile, int key) {
  const AttentionParams& p = call.b.forward;
  const QueryLists& lists = call.live_keys.query_lists;
  const IndexLists& index = p.mask.index;
  const int shift = static_cast<int>(p.key_length - p.query_length), queries = static_cast<int>(p.query_length);
  const Span span = SpanSource(p.mask, static_cast<int>(p.key_length), batch, head).of_key(key);
  // The queries that may see the key are first, .., last - 1. Sinks and local keys need no list.
  const int first = max(span.first - shift, 0), last = min(span.last - shift, queries);
  const int64_t first_local = int64_t{key} - local_shift(index, batch, shift);
  bool is_seen =
      first < last && (key < index.sinks || (first_local < last && first_local + index.local > first && index.local > 0));
  const bool is_open = first < last && !is_seen;
  if (!__any_sync(0xffffffffu, is_open)) return is_seen;
  // Of the queries that list the key the last are looked at first, 32 at a time. More entries are loaded at once, since one that
  // lists the key may be far from the end.
  constexpr int kAtOnce = 8;
  const int64_t mask_head = lists.mask_head_of(batch, head);
  const int after = __reduce_max_sync(0xffffffffu, is_open ? last : 0) + kListQueries - 1;
  const int begin = lists.first_entry(mask_head, tile, 0), lane = static_cast<int>(threadIdx.x) % 32;
  const int bit = kListedQueryBits + key % kListedTileKeys / kListedKeys, first_bit = bit - lane / 16;  // of the first 16 lanes
  const uint32_t* const entries = lists.entries + mask_head * lists.capacity;
  for (int end = lists.first_entry(mask_head, tile, after / kListQueries * kListQueries);; end -= 32 * kAtOnce) {
    uint32_t entry[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = end - 32 * (i + 1) + lane;
      entry[i] = at >= begin ? entries[at] : 0;
    }
    int earliest = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int query = end - 32 * (i + 1) + lane >= begin ? static_cast<int>(entry[i] & kNoListedQuery) : -1;
      const uint32_t of_first = __ballot_sync(0xffffffffu, has_bit(entry[i], first_bit)),
                     of_second = __ballot_sync(0xffffffffu, has_bit(entry[i], first_bit + 1));
      earliest = query;
      if ((of_first | of_second) == 0) continue;
      const int from = count_below(query, first), to = count_below(query, last);
      const uint32_t listing = lane < 16 ? of_first : of_second;
      is_seen |= is_open && from < to && (listing & (0xffffffffu << from) & (0xffffffffu >> (32 - to)));
      if (!__any_sync(0xffffffffu, is_open && !is_seen)) return is_seen;
    }
    earliest = __shfl_sync(0xffffffffu, earliest, 0);
    if (end - 32 * kAtOnce <= begin || !__any_sync(0xffffffffu, is_open && !is_seen && first <= earliest)) return is_seen;
  }
}

// entries, intervals, causality -> seen [B, H / heads_at_once, seen_words]: which keys does some query of these heads see? Keys
// beyond the end count as seen, so that the last tile has no gaps. A block for each tile of as many heads as share a row of bits,
// or see the same: every `alike` of them do.
__global__ __launch_bounds__(kListedTileKeys) void seen_kernel(const __grid_constant__ BackwardCall call, int alike) {
  const AttentionParams& p = call.b.forward;
  const int tiles = call.live_keys.query_lists.tiles, tile = static_cast<int>(blockIdx.x) % tiles;
  const int heads = max(call.heads_at_once, alike), of_batch = static_cast<int>(p.heads) / heads;
  const int set = static_cast<int>(blockIdx.x) / tiles, batch = set / of_batch, first_head = set % of_batch * heads;
  const int thread = static_cast<int>(threadIdx.x), key = tile * kListedTileKeys + thread, rows = heads / call.heads_at_once;
  uint32_t seen = __ballot_sync(0xffffffffu, key >= p.key_length);
  for (int head = first_head; head < first_head + heads && ~seen; head += alike) {
    seen |= __ballot_sync(0xffffffffu, is_seen_by_some(call, batch, head, tile, key));
  }
  for (int row = thread % 32; row < rows; row += 32) call.seen[(set * rows + row) * call.seen_words + key / 32] = seen;
}

}  // namespace

cudaError_t launch_listed_seen(const BackwardCall& call, cudaStream_t stream) {
  const AttentionParams& p = call.b.forward;
  int64_t alike = std::gcd(p.heads, call.live_keys.query_lists.head_divisor);  // heads whose lists and intervals are the same
  for (const PerHead* row : {&p.mask.start, &p.mask.end}) alike = row->data ? std::gcd(alike, row->head_divisor) : alike;
  const int64_t sets = p.batch * p.heads / std::max<int64_t>(alike, call.heads_at_once);
  seen_kernel<<<grid_of(call.live_keys.query_lists.tiles * sets), kListedTileKeys, 0, stream>>>(call, static_cast<int>(alike));
  return cudaGetLastError();
}

cudaError_t launch_query_lists(const AttentionParams& p, const QueryLists& lists, cudaStream_t stream) {
  static KernelAttribute count_bytes, write_bytes;
  cudaError_t status = allow_shared_bytes(count_bytes, count_kernel, kSharedBytes);
  if (status == cudaSuccess) status = allow_shared_bytes(write_bytes, write_kernel, kSharedBytes);
  if (status != cudaSuccess) return status;
  const int64_t mask_heads = lists.batches * lists.heads;
  const dim3 blocks = grid_of(mask_heads * lists.query_blocks);
  const int bytes = std::min(lists.tiles, kRangeTiles) * kTileWords * 4;
  count_kernel<<<blocks, kThreads, bytes, stream>>>(p, lists);
  place_kernel<<<grid_of(mask_heads * lists.tiles), kThreads, 0, stream>>>(lists);
  begin_kernel<<<grid_of(mask_heads), kThreads, 0, stream>>>(lists);
  write_kernel<<<blocks, kThreads, bytes, stream>>>(p, lists);
  return cudaGetLastError();
}

}  // namespace dmattn::cuda
