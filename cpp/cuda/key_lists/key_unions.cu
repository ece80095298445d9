// Makes the unions of index lists: for each tile of queries the keys that some of them see, and bits that say which of them do.
//
// A block makes one union. It collects the bits of the queries for a range of blocks of keys in shared memory, which has a place
// for each block of the range, whatever order the lists have and however often an entry is repeated. The blocks that some query
// needs are spread out into keys, what other masks hide is taken away, and what is left is written down in order. Of a list that
// is sorted, each range reads only its own part.
#include <algorithm>

#include "../calls.h"
#include "../common/dependent_launch.cuh"
#include "../common/device.cuh"
#include "../common/kernel_limits.cuh"
#include "../common/visibility.cuh"

namespace dmattn::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32, kBlocksAtOnce = 2;  // so many on a multiprocessor
constexpr int kPoolWords = 16 * 1024;                                     // of bits, and most blocks of a range
constexpr int kEntriesAtOnce = 128;                                       // of a query's list, by a warp: four a lane
constexpr int kAtOnce = 4;                                                // keys or blocks of keys that a thread looks at

struct UnionShared {
  uint32_t pool[kPoolWords];    // [words, blocks of the range]
  uint16_t needed[kPoolWords];  // the blocks of the range that are in the union
  int used[kMostUnionQueries];  // entries at the head of a list that lie before the range; -1: the list is not sorted
  int warp_counts[2][kWarps];
  int class_chunks[1 << kMostUnionGroups], class_rest[1 << kMostUnionGroups];  // of the keys that are sorted at a time
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

// Four entries of a list from `at` on; behind its end -1, the greatest as an unsigned number.
__device__ __forceinline__ uint4 entries_from(const int32_t* row, int at, int listed) {
  if (at + 4 <= listed && reinterpret_cast<uintptr_t>(row + at) % 16 == 0) return *reinterpret_cast<const uint4*>(row + at);
  uint32_t entry[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) entry[i] = at + i < listed ? static_cast<uint32_t>(row[at + i]) : 0xffffffffu;
  return {entry[0], entry[1], entry[2], entry[3]};
}

// Sets `bit` in word `number` of those at the shared address `words`, if number is below `end`.
__device__ __forceinline__ void set_bit_below(uint32_t words, uint32_t number, uint32_t end, uint32_t bit) {
  asm volatile("{\n.reg .pred is_below;\nsetp.lt.u32 is_below, %1, %2;\n@is_below red.shared.or.b32 [%0], %3;\n}" ::"r"(
                   words + number * 4),
               "r"(number), "r"(end), "r"(bit)
               : "memory");
}

// Sets the bits of the queries for the blocks of keys [first, first + count), but not for blocks behind the query where the call
// is causal. With kHasLaterRanges a warp counts the entries that lie before the next range, and finds out in the first range
// whether a list is sorted, with -1 at its end.
template <bool kHasLaterRanges>
__device__ __forceinline__ void collect_bits(UnionShared& shared, const AttentionParams& p, const UnionTile& tile, int first,
                                             int count, int stride) {
  const IndexLists& lists = p.mask.index;
  const int listed = static_cast<int>(lists.count), lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t end = static_cast<uint32_t>(first + count);
  for (int query = static_cast<int>(threadIdx.x) / 32; query < tile.queries; query += kWarps) {
    const int32_t* const row = tile.entries + query * lists.row_stride;
    const int last = p.mask.is_causal ? (tile.low + query) >> lists.log2_block : kLastPosition;
    const uint32_t wanted = static_cast<uint32_t>(max(min(count - 1, last - first) + 1, 0)), bit = 1u << query % 32;
    const uint32_t bits = shared_address(shared.pool + query / 32 * stride);
    const int used = first == 0 ? 0 : shared.used[query];
    int before_end = 0;
    bool is_sorted = true;
    uint32_t latest = 0;  // the last entry of the round before
    const int from = max(used, 0) / 4 * 4;
    uint4 next = entries_from(row, from + 4 * lane, listed), after = entries_from(row, from + kEntriesAtOnce + 4 * lane, listed);
#pragma unroll 1
    for (int begin = from; begin < listed; begin += kEntriesAtOnce) {
      const uint32_t entry[4] = {next.x, next.y, next.z, next.w};
      next = after, after = entries_from(row, begin + 2 * kEntriesAtOnce + 4 * lane, listed);
#pragma unroll
      for (int i = 0; i < 4; ++i) set_bit_below(bits, entry[i] - static_cast<uint32_t>(first), wanted, bit);
      if constexpr (kHasLaterRanges) {
#pragma unroll
        for (int i = 0; i < 4; ++i) before_end += entry[i] < end;
        if (first == 0) {
          const uint32_t in_front = __shfl_up_sync(0xffffffffu, entry[3], 1);
          is_sorted = is_sorted && entry[0] >= (lane == 0 ? latest : in_front) && entry[1] >= entry[0] && entry[2] >= entry[1] &&
                      entry[3] >= entry[2];
          latest = __shfl_sync(0xffffffffu, entry[3], 31);
        }
      }
      if (used > 0 && __any_sync(0xffffffffu, entry[3] >= end)) break;
    }
    if constexpr (kHasLaterRanges) {
      before_end = __reduce_add_sync(0xffffffffu, before_end) + from;
      const bool all_sorted = first == 0 ? __all_sync(0xffffffffu, is_sorted) : used >= 0;
      if (lane == 0) shared.used[query] = all_sorted ? before_end : -1;
    }
  }
}

// Adds up what the warps of the block have, the same in all lanes: those before this one, and all. buffer alternates from call to
// call.
__device__ __forceinline__ int sum_before(UnionShared& shared, int own, int buffer, int& all) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) shared.warp_counts[buffer][warp] = own;
  __syncthreads();
  const int of_warp = lane < kWarps ? shared.warp_counts[buffer][lane] : 0;
  all = __reduce_add_sync(0xffffffffu, of_warp);
  return __reduce_add_sync(0xffffffffu, lane < warp ? of_warp : 0);
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

// A range of blocks of keys that are in shared memory, and what lists show beside their entries.
struct UnionRange {
  UnionShared& shared;
  const AttentionParams& p;
  const UnionTile& tile;
  int first, count, stride;  // of the blocks; from one word to the next
  int local_from, local_to;  // keys that are local for some query

  __device__ __forceinline__ bool has_more(int key, int keys) const {
    return key < p.mask.index.sinks || (key < local_to && key + keys > local_from);
  }
  __device__ __forceinline__ uint32_t listed_bits(int block, int key, int word) const {
    const IndexLists& lists = p.mask.index;
    const int first_local = lists.local > 0 ? key - tile.index_low : kLastPosition;
    if (key < lists.sinks) return 0xffffffffu;
    return shared.pool[word * stride + block] | bits_between(first_local, first_local + lists.local, word);
  }
};

// Writes the keys of a range that some query sees, where each is a block of its own and nothing else hides keys: bits are what
// queries see then, but for sinks and local keys. Returns how many there are.
__device__ __forceinline__ int write_listed(const UnionRange& range, const OtherMasks& others, int words, int64_t capacity,
                                            int written, int& buffer, int32_t* keys, uint32_t* seen) {
  const int thread = static_cast<int>(threadIdx.x);
  const auto* const pieces = reinterpret_cast<const uint4*>(range.shared.pool);
  int found = 0;
  for (int begin = 0; begin < range.count; begin += kThreads * kAtOnce) {
    const int block = begin + thread * kAtOnce, key = range.first + block;
    const bool has_more = range.has_more(key, kAtOnce);
    const auto seen_bits = [&](int i, int word) {
      if (!has_more) return range.shared.pool[word * range.stride + block + i];
      if (block + i >= range.count) return 0u;
      return others.keep(range.listed_bits(block + i, key + i, word), others.spans.of_key(key + i), key + i, word);
    };
    uint32_t any[kAtOnce] = {}, some[kAtOnce];
    if (has_more) {
      for (int word = 0; word < words; ++word) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) any[i] |= seen_bits(i, word);
      }
    } else if (block < range.count) {
      for (int word = 0; word < words; ++word) {
        const uint4 piece = pieces[(word * range.stride + block) / kAtOnce];
        any[0] |= piece.x, any[1] |= piece.y, any[2] |= piece.z, any[3] |= piece.w;
      }
    }
    int own = 0, before = 0, more;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      some[i] = __ballot_sync(0xffffffffu, any[i] != 0);
      own += __popc(some[i]), before += __popc(some[i] & lanes_before());
    }
    buffer ^= 1;
    int to = written + found + sum_before(range.shared, own, buffer, more) + before;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (any[i] == 0) continue;
      if (to < capacity) {
        keys[to] = key + i;
        if (words == 1) {
          seen[to] = any[i];
        } else {
          for (int word = 0; word < words; ++word) seen[word * capacity + to] = seen_bits(i, word);
        }
      }
      ++to;
    }
    found += more;
  }
  return found;
}

// The part of a union that is sorted at a time, in the place of the bits: key and seen, a word for each key in each of them. In
// the place of the blocks that are needed, what groups see each key, and for each 32 keys how many there are of each class: a
// class is the groups that see a key, a bit each.
struct SortedPart {
  static constexpr int kClasses = 1 << kMostUnionGroups, kMostKeys = kPoolWords / 2;
  UnionShared& shared;
  int stride;  // from one word to the next

  __device__ __forceinline__ uint32_t& word(int i, int number) const { return shared.pool[number * stride + i]; }
  __device__ __forceinline__ uint16_t& class_of(int i) const { return shared.needed[i]; }
  __device__ __forceinline__ uint16_t& count_of(int row, int c) const { return shared.needed[kMostKeys + row * kClasses + c]; }
};
static_assert(SortedPart::kMostKeys + SortedPart::kMostKeys / 32 * SortedPart::kClasses <= kPoolWords &&
              SortedPart::kClasses <= kWarps);

// Where keys of class c go: first whole chunks of the classes that most groups see, classes of as many groups by turns, then what
// is left of all classes. chunks, rest: how many whole chunks of keys each class has, and how many keys beside them.
struct ClassOrder {
  const int (&chunks)[SortedPart::kClasses];
  const int (&rest)[SortedPart::kClasses];
  const int classes, chunk, c;  // classes: one more than the last

  // The place of key number i of the class.
  __device__ __forceinline__ int place_of(int i) const {
    const int turn = i / chunk, level = __popc(c);
    const bool is_rest = turn >= chunks[c];
    int chunks_before = 0, rest_before = 0;
    for (int other = 1; other < classes; ++other) {
      const bool is_before = is_rest || __popc(other) > level;
      const int by_turns = __popc(other) == level ? min(chunks[other], turn + (other < c)) : 0;
      chunks_before += is_before ? chunks[other] : by_turns;
      rest_before += other < c ? rest[other] : 0;
    }
    return chunks_before * chunk + (is_rest ? rest_before + i - chunks[c] * chunk : i - turn * chunk);
  }
};

// Sorts the keys of a union by the groups of queries that see them, as many at a time as there is room for.
__device__ __forceinline__ void sort_by_groups(UnionShared& shared, const KeyUnions& unions, int32_t* keys, uint32_t* seen,
                                               int written) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int classes = 1 << unions.groups, words = unions.words, of_group = unions.queries / unions.groups;
  const int most = min(kPoolWords / (1 + words), SortedPart::kMostKeys) / unions.chunk * unions.chunk;
  const SortedPart part{shared, most};
  for (int begin = 0; begin < written; begin += most) {
    const int count = min(most, written - begin), rows = (count + 31) / 32;
    __syncthreads();  // what other threads wrote is there, and nobody reads the part before
    for (int i = thread; i < rows * 32; i += kThreads) {
      int c = 0;
      if (i < count) {
        uint32_t bits[kMostUnionWords];  // all are asked for before one is awaited
#pragma unroll
        for (int word = 0; word < kMostUnionWords; ++word) {
          bits[word] = word < words ? seen[word * unions.capacity + begin + i] : 0;
        }
        part.word(i, 0) = static_cast<uint32_t>(keys[begin + i]);
#pragma unroll
        for (int word = 0; word < kMostUnionWords; ++word) {
          if (word < words) part.word(i, 1 + word) = bits[word];
          for (int group = 0; group < unions.groups; ++group) {
            if (bits[word] & bits_between(group * of_group, (group + 1) * of_group, word)) c |= 1 << group;
          }
        }
        part.class_of(i) = static_cast<uint16_t>(c);
      }
      for (int other = 1; other < classes; ++other) {
        const uint32_t same = __ballot_sync(0xffffffffu, c == other);
        if (lane == other) part.count_of(i / 32, other) = static_cast<uint16_t>(__popc(same));
      }
    }
    __syncthreads();
    // Of each class, how many lie before the rows; a warp takes a class. Sums of the rows before them replace the numbers.
    if (warp > 0 && warp < classes) {
      int before = 0;
      for (int row = 0; row < rows; row += 32) {
        const int own = row + lane < rows ? part.count_of(row + lane, warp) : 0;
        int sum = own;
        for (int step = 1; step < 32; step *= 2) {
          const int other = __shfl_up_sync(0xffffffffu, sum, step);
          sum += lane >= step ? other : 0;
        }
        if (row + lane < rows) part.count_of(row + lane, warp) = static_cast<uint16_t>(before + sum - own);
        before += __shfl_sync(0xffffffffu, sum, 31);
      }
      if (lane == 0) shared.class_chunks[warp] = before / unions.chunk, shared.class_rest[warp] = before % unions.chunk;
    }
    __syncthreads();
    for (int i = thread; i < rows * 32; i += kThreads) {
      const int c = i < count ? part.class_of(i) : 0;
      const uint32_t same = __match_any_sync(0xffffffffu, c);
      if (c == 0 || shared.class_chunks[c] * unions.chunk + shared.class_rest[c] == count) continue;  // all are of one class
      const ClassOrder order = {shared.class_chunks, shared.class_rest, classes, unions.chunk, c};
      const int to = begin + order.place_of(part.count_of(i / 32, c) + __popc(same & lanes_before()));
      keys[to] = static_cast<int32_t>(part.word(i, 0));
      for (int word = 0; word < words; ++word) seen[word * unions.capacity + to] = part.word(i, 1 + word);
    }
  }
}

// indices int32 [B|1, H|Hkv|1, Sq, K] -> key, seen, count of KeyUnions. A block makes the union of one tile of queries.
__global__ __launch_bounds__(kThreads, kBlocksAtOnce) void union_kernel(const __grid_constant__ AttentionParams p,
                                                                        const __grid_constant__ KeyUnions unions,
                                                                        int32_t* tile_counter) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<UnionShared*>(shared_bytes);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  if (blockIdx.x == 0 && thread == 0 && tile_counter) *tile_counter = 0;
  const UnionTile tile(p, unions);
  const IndexLists& lists = p.mask.index;
  const int key_length = static_cast<int>(p.key_length), log2_block = lists.log2_block, words = unions.words;
  const int last_key = p.mask.is_causal ? min(key_length, tile.low + tile.queries) - 1 : key_length - 1;
  const int blocks = (last_key >> log2_block) + 1,
            range = min(kPoolWords / words, blocks + 3) / 4 * 4;  // whole pieces of 16 bytes
  const OtherMasks others(p, tile);
  const bool is_plain = log2_block == 0 && !others.spans.has_intervals() && !others.tiles.tiles;
  const int local_from = lists.local > 0 ? max(tile.index_low - lists.local + 1, 0) : key_length,
            local_to = lists.local > 0 ? tile.index_low + tile.queries : 0;
  int32_t* const keys = unions.key + blockIdx.x * unions.capacity;
  uint32_t* const seen = unions.seen_of(blockIdx.x);
  int written = 0, buffer = 0;

  for (int first = 0; first < blocks; first += range) {
    const int count = min(blocks - first, range);
    uint4* const pieces = reinterpret_cast<uint4*>(shared.pool);
    for (int i = thread; i < range * words / 4; i += kThreads) pieces[i] = {0, 0, 0, 0};
    __syncthreads();
    if (first + count < blocks) {
      collect_bits<true>(shared, p, tile, first, count, range);
    } else {
      collect_bits<false>(shared, p, tile, first, count, range);
    }
    __syncthreads();
    const UnionRange here{shared, p, tile, first, count, range, local_from, local_to};
    if (is_plain) {
      written += write_listed(here, others, words, unions.capacity, written, buffer, keys, seen);
      __syncthreads();
      continue;
    }
    // Find the blocks that are listed, or have local keys or sinks.
    int needed = 0;
    for (int begin = 0; begin < count; begin += kThreads * kAtOnce) {
      uint32_t some[kAtOnce];  // a bit for each lane
      int own = 0, more;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int block = begin + warp * 32 * kAtOnce + 32 * i + lane, key = (first + block) << log2_block;
        bool is_needed = here.has_more(key, 1 << log2_block);
        for (int word = 0; word < words && block < count; ++word) is_needed |= shared.pool[word * range + block] != 0;
        some[i] = __ballot_sync(0xffffffffu, is_needed && block < count);
        own += __popc(some[i]);
      }
      buffer ^= 1;
      int at = needed + sum_before(shared, own, buffer, more);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (has_bit(some[i], lane)) {
          shared.needed[at + __popc(some[i] & lanes_before())] =
              static_cast<uint16_t>(begin + warp * 32 * kAtOnce + 32 * i + lane);
        }
        at += __popc(some[i]);
      }
      needed += more;
    }
    __syncthreads();
    // Spread them out into keys, and write those that some query sees.
    for (int begin = 0; begin < needed << log2_block; begin += kThreads * kAtOnce) {
      uint32_t some[kAtOnce];
      int own = 0, more;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int item = begin + warp * 32 * kAtOnce + 32 * i + lane, place = item >> log2_block;
        uint32_t any = 0;
        if (place < needed) {
          const int block = shared.needed[place], key = ((first + block) << log2_block) + (item & ((1 << log2_block) - 1));
          const Span span = key <= last_key ? others.spans.of_key(key) : Span::empty();
          for (int word = 0; word < words; ++word) any |= others.keep(here.listed_bits(block, key, word), span, key, word);
        }
        some[i] = __ballot_sync(0xffffffffu, any != 0);
        own += __popc(some[i]);
      }
      buffer ^= 1;
      int at = written + sum_before(shared, own, buffer, more);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int item = begin + warp * 32 * kAtOnce + 32 * i + lane, to = at + __popc(some[i] & lanes_before());
        at += __popc(some[i]);
        if (!has_bit(some[i], lane) || to >= unions.capacity) continue;
        const int block = shared.needed[item >> log2_block],
                  key = ((first + block) << log2_block) + (item & ((1 << log2_block) - 1));
        const Span span = others.spans.of_key(key);
        keys[to] = key;
        for (int word = 0; word < words; ++word) {
          seen[word * unions.capacity + to] = others.keep(here.listed_bits(block, key, word), span, key, word);
        }
      }
      written += more;
    }
    __syncthreads();
  }
  if (unions.groups > 1) sort_by_groups(shared, unions, keys, seen, min(written, static_cast<int>(unions.capacity)));
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
