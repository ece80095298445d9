// Makes the unions of index lists: for each tile of queries the keys that some of them see, and bits that say which of them do.
//
// A block makes one union. It marks the listed blocks of keys in a bitmap in shared memory, counts the marks before each word of
// it, and so knows the place of every block in the union. Then it reads the lists again and collects the bits of the queries at
// those places. At the end the blocks are spread out into keys, and what other masks hide is taken away. All of that happens in
// shared memory, whatever order the lists have and however often an entry is repeated.
#include <algorithm>

#include "../calls.h"
#include "../common/dependent_launch.cuh"
#include "../common/device.cuh"
#include "../common/kernel_limits.cuh"
#include "../common/visibility.cuh"

namespace dmattn::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kRangeBlocks = 1 << 17;           // blocks of keys that are looked at at a time
constexpr int kRangeWords = kRangeBlocks / 64;  // of the bitmap
constexpr int kWordsPerThread = kRangeWords / kThreads;
constexpr int kEntriesAtOnce = 128;    // of a query's list, by a warp
constexpr int kPoolBytes = 64 * 1024;  // for blocks of the union and their bits

struct UnionShared {
  unsigned long long marked[kRangeWords];  // a bit for each block of keys of the range: is it in the union?
  int before[kRangeWords];                 // marks in front of each word
  int warp_counts[2][kWarps];
  uint32_t pool[kPoolBytes / 4];  // block of keys [places], bits [places, words]
};

// The bits from `first` on, none when first is 32 or more, all when it is 0 or less.
__device__ __forceinline__ uint32_t bits_from(int first) { return first >= 32 ? 0u : 0xffffffffu << max(first, 0); }

// The bits of word `word` for the queries first, .., last - 1 of a tile.
__device__ __forceinline__ uint32_t bits_between(int first, int last, int word) {
  return bits_from(first - 32 * word) & ~bits_from(last - 32 * word);
}

// The tile of queries that a block makes the union of.
struct UnionTile {
  int batch, head, first_query, queries;
  int low;                 // position of the first query
  int index_low;           // the same, as `local` counts it
  const int32_t* entries;  // the list of the first query

  __device__ __forceinline__ UnionTile(const AttentionParams& p, const KeyUnions& unions) {
    const int list = static_cast<int>(blockIdx.x), mask_head = list / unions.tiles,
              tile = unions.first_tile + list % unions.tiles;
    const IndexLists& lists = p.mask.index;
    batch = mask_head / static_cast<int>(unions.heads);
    head = mask_head % static_cast<int>(unions.heads) * static_cast<int>(unions.head_divisor);
    first_query = tile * unions.queries;
    queries = min(unions.queries, static_cast<int>(p.query_length) - first_query);
    const int shift = static_cast<int>(p.key_length - p.query_length);
    low = first_query + shift;
    index_low = first_query + local_shift(lists, batch, shift);
    entries = row_of<const int32_t>(lists.entries, batch, head) + first_query * lists.row_stride;
  }
};

// Calls use(block, query) for each entry of the lists of the tile that stands for one of the blocks of keys [first, first +
// count) and not only for keys behind the query, where the call is causal. All threads of the block take part.
template <class Use>
__device__ __forceinline__ void for_each_entry(const AttentionParams& p, const UnionTile& tile, int first, int count,
                                               const Use& use) {
  const IndexLists& lists = p.mask.index;
  const int listed = static_cast<int>(lists.count), pieces = (listed + kEntriesAtOnce - 1) / kEntriesAtOnce;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int item = static_cast<int>(threadIdx.x) / 32; item < tile.queries * pieces; item += kWarps) {
    const int query = item / pieces, begin = item % pieces * kEntriesAtOnce + lane;
    const int32_t* const row = tile.entries + query * lists.row_stride;
    const int last = p.mask.is_causal ? (tile.low + query) >> lists.log2_block : kLastPosition;
    int32_t entry[kEntriesAtOnce / 32];
#pragma unroll
    for (int i = 0; i < kEntriesAtOnce / 32; ++i) entry[i] = begin + 32 * i < listed ? row[begin + 32 * i] : -1;
#pragma unroll
    for (int i = 0; i < kEntriesAtOnce / 32; ++i) {
      const uint32_t block = static_cast<uint32_t>(entry[i]) - static_cast<uint32_t>(first);
      if (entry[i] >= 0 && entry[i] <= last && block < static_cast<uint32_t>(count)) use(static_cast<int>(block), query);
    }
  }
}

// Marks the blocks of keys that hold a key of [from, to).
__device__ __forceinline__ void mark_keys(UnionShared& shared, const AttentionParams& p, int from, int to, int first, int count) {
  const int key_length = static_cast<int>(p.key_length), log2_block = p.mask.index.log2_block;
  from = max(from, 0), to = min(to, key_length);
  if (from >= to) return;
  const int begin = max((from >> log2_block) - first, 0), end = min(((to - 1) >> log2_block) + 1 - first, count);
  for (int block = begin + static_cast<int>(threadIdx.x); block < end; block += kThreads) {
    atomicOr(reinterpret_cast<uint32_t*>(shared.marked) + block / 32, 1u << block % 32);
  }
}

// Adds up `mine` over the threads of the block: those before this one, and all. buffer alternates from call to call.
__device__ __forceinline__ int sum_before(UnionShared& shared, int mine, int buffer, int& all) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  int sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) shared.warp_counts[buffer][warp] = sum;
  __syncthreads();
  const int of_warp = lane < kWarps ? shared.warp_counts[buffer][lane] : 0;
  all = __reduce_add_sync(0xffffffffu, of_warp);
  return __reduce_add_sync(0xffffffffu, lane < warp ? of_warp : 0) + sum - mine;
}

// Counts the marks in front of each word of the bitmap; returns all of them.
__device__ __forceinline__ int count_marks(UnionShared& shared) {
  const int first = static_cast<int>(threadIdx.x) * kWordsPerThread;
  int mine = 0;
#pragma unroll
  for (int i = 0; i < kWordsPerThread; ++i) mine += __popcll(shared.marked[first + i]);
  int all, before = sum_before(shared, mine, 0, all);
#pragma unroll
  for (int i = 0; i < kWordsPerThread; ++i) {
    shared.before[first + i] = before;
    before += __popcll(shared.marked[first + i]);
  }
  __syncthreads();
  return all;
}

// Which queries of the tile see a key by the other masks, of those that have a bit in `bits`.
struct OtherMasks {
  const AttentionParams& p;
  const UnionTile& tile;
  const SpanSource spans;
  const TileSource tiles;

  __device__ __forceinline__ OtherMasks(const AttentionParams& params, const UnionTile& of)
      : p(params),
        tile(of),
        spans(params.mask, static_cast<int>(params.key_length), of.batch, of.head),
        tiles(params.mask, of.batch, of.head) {}

  __device__ __forceinline__ bool sees_in_blocks(int query, int key) const {
    const MaskParams& mask = p.mask;
    const int tile_q = static_cast<int>(mask.tile_q), tile_k = static_cast<int>(mask.tile_k);
    const int state = tiles.tiles[static_cast<int64_t>(query / tile_q) * mask.tiles_k + key / tile_k];
    if (!is_live_tile(mask, state)) return false;
    const uint32_t* const bits = bits_of_tile(mask, state);
    return !bits || has_bit(bits[query % tile_q * (tile_k / 32) + key % tile_k / 32], key % 32);
  }

  __device__ __forceinline__ uint32_t keep(uint32_t bits, Span span, int key, int word) const {
    bits &= bits_between(span.first - tile.low, min(span.last - tile.low, tile.queries), word);
    if (tiles.tiles) {
      for (uint32_t left = bits; left; left &= left - 1) {
        const int bit = __ffs(static_cast<int>(left)) - 1;
        if (!sees_in_blocks(tile.first_query + 32 * word + bit, key)) bits &= ~(1u << bit);
      }
    }
    return bits;
  }
};

// indices int32 [B|1, H|Hkv|1, Sq, K] -> key, seen, count of KeyUnions. A block makes the union of one tile of queries.
__global__ __launch_bounds__(kThreads) void union_kernel(const __grid_constant__ AttentionParams p,
                                                         const __grid_constant__ KeyUnions unions, int32_t* tile_counter) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<UnionShared*>(shared_bytes);
  const int thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && thread == 0 && tile_counter) *tile_counter = 0;
  const UnionTile tile(p, unions);
  const IndexLists& lists = p.mask.index;
  const int key_length = static_cast<int>(p.key_length), log2_block = lists.log2_block, words = unions.words;
  const int blocks = (key_length + (1 << log2_block) - 1) >> log2_block;
  const int places = kPoolBytes / 4 / (1 + words);  // that the pool has room for
  int32_t* const block_at = reinterpret_cast<int32_t*>(shared.pool);
  uint32_t* const bits_at = shared.pool + places;
  const OtherMasks others(p, tile);
  int32_t* const keys = unions.key + blockIdx.x * unions.capacity;
  uint32_t* const seen = unions.seen + blockIdx.x * unions.capacity * words;
  int written = 0, buffer = 0;

  for (int first = 0; first < blocks; first += kRangeBlocks) {
    const int count = min(blocks - first, kRangeBlocks);
    // Mark the blocks of keys that the lists, the local keys and the sinks need.
    for (int i = thread; i < kRangeWords; i += kThreads) shared.marked[i] = 0;
    __syncthreads();
    uint32_t* const marked = reinterpret_cast<uint32_t*>(shared.marked);
    for_each_entry(p, tile, first, count, [&](int block, int) {
      const uint32_t bit = 1u << block % 32;
      if (!(marked[block / 32] & bit)) atomicOr(&marked[block / 32], bit);
    });
    mark_keys(shared, p, tile.index_low - lists.local + 1, lists.local > 0 ? tile.index_low + tile.queries : 0, first, count);
    mark_keys(shared, p, 0, lists.sinks, first, count);
    __syncthreads();
    const int all = count_marks(shared);

    // Take as many blocks of the union at a time as the pool has room for.
    for (int base = 0; base < all; base += places) {
      const int taken = min(all - base, places);
      for (int i = thread; i < taken * words; i += kThreads) bits_at[i] = 0;
      for (int i = thread; i < kRangeWords; i += kThreads) {
        int place = shared.before[i] - base;
        for (unsigned long long left = shared.marked[i]; left && place < taken; left &= left - 1, ++place) {
          if (place >= 0) block_at[place] = first + 64 * i + __ffsll(static_cast<long long>(left)) - 1;
        }
      }
      __syncthreads();
      // Collect the bits of the queries.
      for_each_entry(p, tile, first, count, [&](int block, int query) {
        const unsigned long long in_front = shared.marked[block / 64] & ((1ull << block % 64) - 1);
        const int place = shared.before[block / 64] + __popcll(in_front) - base;
        if (place >= 0 && place < taken) atomicOr(&bits_at[place * words + query / 32], 1u << query % 32);
      });
      __syncthreads();
      // Spread the blocks out into keys, and write those that some query sees.
      for (int begin = 0; begin < taken << log2_block; begin += kThreads) {
        const int item = begin + thread, place = item >> log2_block;
        const bool is_item = place < taken;
        const int key = is_item ? (block_at[place] << log2_block) + (item & ((1 << log2_block) - 1)) : key_length;
        const Span span = key < key_length ? others.spans.of_key(key) : Span::empty();
        const int first_local = lists.local > 0 ? key - tile.index_low : kLastPosition;
        uint32_t bits[kMostUnionWords], any = 0;
#pragma unroll
        for (int word = 0; word < kMostUnionWords; ++word) {
          bits[word] = 0;
          if (word >= words || key >= key_length) continue;
          uint32_t listed = bits_at[place * words + word] | bits_between(first_local, first_local + lists.local, word);
          if (key < lists.sinks) listed = 0xffffffffu;
          bits[word] = others.keep(listed, span, key, word);
          any |= bits[word];
        }
        buffer ^= 1;
        int new_keys;
        const int at = written + sum_before(shared, any != 0, buffer, new_keys);
        if (any != 0 && at < unions.capacity) {
          keys[at] = key;
#pragma unroll
          for (int word = 0; word < kMostUnionWords; ++word) {
            if (word < words) seen[static_cast<int64_t>(at) * words + word] = bits[word];
          }
        }
        written += new_keys;
      }
      __syncthreads();
    }
  }
  if (thread == 0) unions.count[blockIdx.x] = written;
}

}  // namespace

cudaError_t launch_key_unions(const AttentionParams& p, const KeyUnions& unions, int32_t* tile_counter, cudaStream_t stream) {
  static KernelAttribute shared_bytes;
  const cudaError_t status = allow_shared_bytes(shared_bytes, union_kernel, sizeof(UnionShared));
  if (status != cudaSuccess) return status;
  return launch_dependent(union_kernel, grid_of(unions.batches * unions.heads * unions.tiles), kThreads, sizeof(UnionShared),
                          stream, p, unions, tile_counter);
}

}  // namespace dmattn::cuda
