// Makes the unions of index lists: for each tile of queries the keys that some of them see, and bits that say which of them do.
//
// A block makes one union. It collects the bits of the queries for a range of blocks of keys in shared memory, which has a place
// for each block of the range, whatever order the lists have and however often an entry is repeated. The blocks that some query
// needs are spread out into keys, what other masks hide is taken away, and what is left is written down in order, then sorted by
// groups of queries if the union has some. Of a list that is sorted, each range reads only its own part.
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

// A class of keys is the groups of queries that see them, a bit each. Keys are sorted so: first whole chunks of the classes that
// most groups see, those of as many groups by turns, then what is left of all classes.
struct ClassOrder {
  static constexpr int kClasses = 1 << kMostUnionGroups, kMostChunks = kPoolWords / 64;
  int chunks[kClasses], rest[kClasses];             // whole chunks of keys that a class has, and keys beside them
  int first_chunk[kClasses], first_rest[kClasses];  // where in `places` its chunks are, and where the rest of its keys goes
  uint16_t places[kMostChunks];                     // of whole chunks, counted in chunks

  // Finds places, of which each thread takes one, when chunks and rest are there.
  __device__ __forceinline__ void find_places(int classes, int chunk) {
    const int i = static_cast<int>(threadIdx.x);
    int all = 0, c = 0, turn = 0, rest_before = 0;
    for (int other = 1; other < classes; ++other) {
      if (i == other) first_chunk[i] = all;
      if (i >= all && i < all + chunks[other]) c = other, turn = i - all;
      rest_before += other < i ? rest[other] : 0;
      all += chunks[other];
    }
    if (i > 0 && i < classes) first_rest[i] = all * chunk + rest_before;
    int before = 0;
    for (int other = 1; other < classes; ++other) {
      if (__popc(other) > __popc(c)) before += chunks[other];
      if (__popc(other) == __popc(c)) before += min(chunks[other], turn + (other < c));
    }
    if (i < all) places[i] = static_cast<uint16_t>(before);
  }
  // The place of key number i of class c.
  __device__ __forceinline__ int place_of(int c, int i, int chunk) const {
    const int number = i / chunk;
    return number < chunks[c] ? places[first_chunk[c] + number] * chunk + i - number * chunk
                              : first_rest[c] + i - chunks[c] * chunk;
  }
};
static_assert(ClassOrder::kMostChunks <= kThreads);

struct UnionShared {
  uint32_t pool[kPoolWords];    // [words, blocks of the range]
  uint16_t needed[kPoolWords];  // the blocks of the range that are in the union
  int used[kMostUnionQueries];  // entries at the head of a list that lie before the range; -1: the list is not sorted
  int warp_counts[2][kWarps];
  ClassOrder order;  // of the keys that are sorted at a time
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
// the place of the blocks that are needed, the class of each key, and for each 32 keys how many there are of each class.
struct SortedPart {
  static constexpr int kClasses = ClassOrder::kClasses, kMostKeys = kPoolWords / 2;
  UnionShared& shared;
  int stride;  // from one word to the next

  __device__ __forceinline__ uint32_t& word(int i, int number) const { return shared.pool[number * stride + i]; }
  __device__ __forceinline__ uint16_t& class_of(int i) const { return shared.needed[i]; }
  __device__ __forceinline__ uint16_t& count_of(int row, int c) const { return shared.needed[kMostKeys + row * kClasses + c]; }
};
static_assert(SortedPart::kMostKeys + SortedPart::kMostKeys / 32 * SortedPart::kClasses <= kPoolWords);

// Reads a part of a union, of `count` keys, and finds their classes.
__device__ __forceinline__ void read_classes(const SortedPart& part, const KeyUnions& unions, const int32_t* keys,
                                             const uint32_t* seen, int count) {
  const int group_queries = unions.queries / unions.groups, lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t group_bits[kMostUnionGroups][kMostUnionWords];
#pragma unroll
  for (int group = 0; group < kMostUnionGroups; ++group) {
#pragma unroll
    for (int word = 0; word < kMostUnionWords; ++word) {
      group_bits[group][word] =
          group < unions.groups ? bits_between(group * group_queries, (group + 1) * group_queries, word) : 0;
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i < (count + 31) / 32 * 32; i += kThreads) {
    uint32_t of_group[kMostUnionGroups] = {};
    if (i < count) {
      part.word(i, 0) = static_cast<uint32_t>(keys[i]);
#pragma unroll
      for (int word = 0; word < kMostUnionWords; ++word) {
        if (word >= unions.words) break;
        const uint32_t bits = seen[word * unions.capacity + i];
        part.word(i, 1 + word) = bits;
#pragma unroll
        for (int group = 0; group < kMostUnionGroups; ++group) of_group[group] |= bits & group_bits[group][word];
      }
    }
    int c = 0;
#pragma unroll
    for (int group = 0; group < kMostUnionGroups; ++group) c |= of_group[group] ? 1 << group : 0;
    if (i < count) part.class_of(i) = static_cast<uint16_t>(c);
    int own = 0;  // how many of the 32 keys are of the class that has the lane's number
#pragma unroll
    for (int other = 1; other < SortedPart::kClasses; ++other) {
      const uint32_t same = __ballot_sync(0xffffffffu, c == other);
      own = lane == other ? __popc(same) : own;
    }
    if (lane < SortedPart::kClasses) part.count_of(i / 32, lane) = static_cast<uint16_t>(own);
  }
}

// Replaces the counts of class c by the sums of those of the rows before them; returns the sum of all. By a warp.
__device__ __forceinline__ int sum_counts(const SortedPart& part, int c, int rows) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int before = 0;
  for (int row = lane; row - lane < rows; row += 32) {
    const int own = row < rows ? part.count_of(row, c) : 0;
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      sum += lane >= step ? other : 0;
    }
    if (row < rows) part.count_of(row, c) = static_cast<uint16_t>(before + sum - own);
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
  return before;
}

// Sorts the keys of a union by the groups of queries that see them, as many at a time as there is room for.
__device__ __forceinline__ void sort_by_groups(UnionShared& shared, const KeyUnions& unions, int32_t* keys, uint32_t* seen,
                                               int written) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, chunk = unions.chunk;
  const int classes = 1 << unions.groups, words = unions.words;
  const int most = min(kPoolWords / (1 + words), SortedPart::kMostKeys) / chunk * chunk;
  const SortedPart part{shared, most};
  ClassOrder& order = shared.order;
  for (int left = written; left > 0; left -= most, keys += most, seen += most) {
    const int count = min(most, left), rows = (count + 31) / 32;
    __syncthreads();  // what other threads wrote is there, and nobody reads the part before
    read_classes(part, unions, keys, seen, count);
    __syncthreads();
    if (warp > 0 && warp < classes) {
      const int all = sum_counts(part, warp, rows);
      if (thread % 32 == 0) order.chunks[warp] = all / chunk, order.rest[warp] = all % chunk;
    }
    __syncthreads();
    order.find_places(classes, chunk);
    __syncthreads();
    for (int i = thread; i < rows * 32; i += kThreads) {
      const int c = i < count ? part.class_of(i) : 0;
      const uint32_t same = __match_any_sync(0xffffffffu, c);
      if (c == 0) continue;
      const int to = order.place_of(c, part.count_of(i / 32, c) + __popc(same & lanes_before()), chunk);
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
