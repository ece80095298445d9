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

constexpr uint32_t kWholeBlock = 1 << 15;  // lists alone decide who sees the keys of a block
static_assert(kPoolWords <= kWholeBlock);

struct UnionShared {
  uint32_t pool[kPoolWords];    // [words, blocks of the range]
  uint16_t needed[kPoolWords];  // the blocks of the range that are in the union; kWholeBlock may be added
  uint32_t spare[32];           // for each lane the word that takes bits of entries that are not in the range; nobody reads it
  int used[kMostUnionQueries];  // entries at the head of a list that lie before the range; -1: the list is not sorted
  int warp_counts[2][kWarps];
  ClassOrder order;  // of the keys that are sorted at a time
};
static_assert(sizeof(UnionShared) <= 99 * 1024);  // what a block has on any GPU

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

// A query's list of keys, or of blocks of keys, which a warp reads. kByFours: it begins at a multiple of 16 bytes, and has a
// multiple of four entries.
template <bool kByFours>
struct EntryList {
  const int32_t* const row;
  const int listed;

  // Four entries for each lane, of the 128 from `begin` on; behind the end -1, the greatest as an unsigned number.
  __device__ __forceinline__ uint4 read(int begin) const {
    const int at = begin + 4 * static_cast<int>(threadIdx.x % 32);
    uint4 entries = {0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu};
    if constexpr (kByFours) {
      if (at < listed) entries = *reinterpret_cast<const uint4*>(row + at);
    } else {
      if (at < listed) entries.x = static_cast<uint32_t>(row[at]);
      if (at + 1 < listed) entries.y = static_cast<uint32_t>(row[at + 1]);
      if (at + 2 < listed) entries.z = static_cast<uint32_t>(row[at + 2]);
      if (at + 3 < listed) entries.w = static_cast<uint32_t>(row[at + 3]);
    }
    return entries;
  }

  // Are its entries ascending as unsigned numbers, with -1 last?
  __device__ __forceinline__ bool is_ascending() const {
    constexpr int kRounds = 4;  // that are asked for before one is awaited
    bool ascends = true;
    uint32_t latest = 0;  // the last entry of the round before
#pragma unroll 1
    for (int begin = 0; begin < listed; begin += kRounds * kEntriesAtOnce) {
      uint4 entries[kRounds];
#pragma unroll
      for (int i = 0; i < kRounds; ++i) entries[i] = read(begin + i * kEntriesAtOnce);
#pragma unroll
      for (const uint4& entry : entries) {
        const uint32_t before = __shfl_up_sync(0xffffffffu, entry.w, 1);
        ascends &= entry.x >= (threadIdx.x % 32 == 0 ? latest : before);
        ascends &= entry.y >= entry.x && entry.z >= entry.y && entry.w >= entry.z;
        latest = __shfl_sync(0xffffffffu, entry.w, 31);
      }
      if (!__all_sync(0xffffffffu, ascends)) return false;
    }
    return true;
  }
};

// Sets the bits of a query for blocks of keys.
struct BitSetter {
  const uint32_t first, wanted;      // blocks of keys: the first of the range, and how many the query may see from there on
  const uint32_t words, spare, bit;  // shared addresses: of the first block's word, and of one for entries that are not wanted

  __device__ __forceinline__ void set(uint32_t entry) const {
    const uint32_t number = entry - first, at = number < wanted ? words + number * 4 : spare;  // so that no lane branches
    asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(at), "r"(bit) : "memory");
  }
  __device__ __forceinline__ void set(const uint4& entry) const { set(entry.x), set(entry.y), set(entry.z), set(entry.w); }

  // For all entries of a list in any order.
  template <class List>
  __device__ __forceinline__ void set_all(const List& list) const {
    uint4 next = list.read(0), after = list.read(kEntriesAtOnce);
#pragma unroll 1
    for (int begin = 0; begin < list.listed; begin += kEntriesAtOnce) {
      const uint4 entry = next;
      next = after, after = list.read(begin + 2 * kEntriesAtOnce);
      set(entry);
    }
  }
  // For the entries of an ascending list from number `used` on; returns how many of the list are less than `end`.
  template <class List>
  __device__ __forceinline__ int set_ascending(const List& list, int used, uint32_t end) const {
    int begin = used / 4 * 4;
    uint4 next = list.read(begin), after = list.read(begin + kEntriesAtOnce);
#pragma unroll 1
    for (;; begin += kEntriesAtOnce) {
      const uint4 entry = next;
      next = after, after = list.read(begin + 2 * kEntriesAtOnce);
      set(entry);
      if (__all_sync(0xffffffffu, entry.w < end)) continue;
      return begin + __reduce_add_sync(0xffffffffu, (entry.x < end) + (entry.y < end) + (entry.z < end) + (entry.w < end));
    }
  }
};

// Sets the bits of the queries for the blocks of keys [first, first + count), but not for blocks behind the query where the call
// is causal. Of a list that ascends each range reads its own part. kIsOnly: there is no other range.
template <bool kIsOnly, bool kByFours>
__device__ __forceinline__ void collect_bits(UnionShared& shared, const AttentionParams& p, const UnionTile& tile, int first,
                                             int count, int stride) {
  const IndexLists& lists = p.mask.index;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int query = static_cast<int>(threadIdx.x) / 32; query < tile.queries; query += kWarps) {
    const EntryList<kByFours> list = {tile.entries + query * lists.row_stride, static_cast<int>(lists.count)};
    const int last = p.mask.is_causal ? (tile.low + query) >> lists.log2_block : kLastPosition;
    const BitSetter setter = {static_cast<uint32_t>(first), static_cast<uint32_t>(max(min(count - 1, last - first) + 1, 0)),
                              shared_address(shared.pool + query / 32 * stride), shared_address(shared.spare + lane),
                              1u << query % 32};
    if constexpr (kIsOnly) {
      setter.set_all(list);
    } else {
      int used = first > 0 ? shared.used[query] : list.is_ascending() ? 0 : -1;
      if (used < 0) {
        setter.set_all(list);
      } else {
        used = setter.set_ascending(list, used, static_cast<uint32_t>(first + count));
      }
      if (lane == 0) shared.used[query] = used;
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
  int last_key, last_whole;  // beyond the first no query sees a key; up to the second nothing but lists hides one

  __device__ __forceinline__ bool has_more(int key, int keys) const {
    return key < p.mask.index.sinks || (key < local_to && key + keys > local_from);
  }
  __device__ __forceinline__ bool is_whole(int key, int keys) const {
    return !has_more(key, keys) && key + keys - 1 <= last_whole;
  }
  // How many of its blocks are whole before the first that is not.
  __device__ __forceinline__ int count_plain() const {
    const int from = first << p.mask.index.log2_block;
    if (from < p.mask.index.sinks) return 0;
    const int local = local_to > from ? local_from : kLastPosition, end = min(local, last_whole + 1);
    return min(max(end - from, 0) >> p.mask.index.log2_block, count);
  }
  __device__ __forceinline__ uint32_t listed_bits(int block, int key, int word) const {
    const IndexLists& lists = p.mask.index;
    const int first_local = lists.local > 0 ? key - tile.index_low : kLastPosition;
    if (key < lists.sinks) return 0xffffffffu;
    return shared.pool[word * stride + block] | bits_between(first_local, first_local + lists.local, word);
  }
};

// How many blocks of a range are in the union, and how many of those lie before the first one that lists alone do not decide
// about.
struct NeededBlocks {
  int all, plain;
};

// Finds the blocks of a range that are listed, or have local keys or sinks.
__device__ __forceinline__ NeededBlocks find_blocks(const UnionRange& range, int words, int& buffer) {
  UnionShared& shared = range.shared;
  const auto* const pieces = reinterpret_cast<const uint4*>(shared.pool);
  const int log2_block = range.p.mask.index.log2_block, plain = range.count_plain();
  constexpr int kPlain = 1 << 16;  // the two numbers are added up as one
  static_assert(kPoolWords < kPlain / 2);
  int found = 0;
  for (int begin = 0; begin < range.count; begin += kThreads * kAtOnce) {
    const int block = begin + static_cast<int>(threadIdx.x) * kAtOnce;
    uint32_t any[kAtOnce] = {};
    if (block < range.count) {
      for (int word = 0; word < words; ++word) {
        const uint4 piece = pieces[(word * range.stride + block) / kAtOnce];
        any[0] |= piece.x, any[1] |= piece.y, any[2] |= piece.z, any[3] |= piece.w;
      }
    }
    int own = 0, before = 0, more;
    bool is_whole[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int key = (range.first + block + i) << log2_block;
      is_whole[i] = block + i < plain || range.is_whole(key, 1 << log2_block);
      if (!is_whole[i] && block + i < range.count && range.has_more(key, 1 << log2_block)) any[i] = 1;
      const uint32_t some = __ballot_sync(0xffffffffu, any[i] != 0);
      const uint32_t of_plain = __ballot_sync(0xffffffffu, any[i] != 0 && block + i < plain);
      own += __popc(some) + __popc(of_plain) * kPlain, before += __popc(some & lanes_before());
    }
    buffer ^= 1;
    int to = found % kPlain + sum_before(shared, own, buffer, more) % kPlain + before;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (any[i] != 0) shared.needed[to++] = static_cast<uint16_t>((block + i) | (is_whole[i] ? kWholeBlock : 0));
    }
    found += more;
  }
  return {found % kPlain, found / kPlain};
}

// Writes the keys of needed blocks about which lists alone decide: their bits are those of the block.
__device__ __forceinline__ void write_plain(const UnionRange& range, int items, const KeyUnions& unions, int written,
                                            int32_t* keys, uint32_t* seen) {
  const int log2_block = range.p.mask.index.log2_block;
  const int fitting = min(items, static_cast<int>(unions.capacity) - written);
  for (int item = static_cast<int>(threadIdx.x); item < fitting; item += kThreads) {
    const int block = range.shared.needed[item >> log2_block] & (kWholeBlock - 1);
    keys[written + item] = ((range.first + block) << log2_block) + (item & ((1 << log2_block) - 1));
    const uint32_t* from = range.shared.pool + block;
    uint32_t* to = seen + written + item;
    for (int word = 0; word < unions.words; ++word, from += range.stride, to += unions.capacity) *to = *from;
  }
}

// Spreads the needed blocks from number `plain` on out into keys, and writes those that some query sees. Returns how many there
// are.
__device__ __forceinline__ int write_blocks(const UnionRange& range, const OtherMasks& others, NeededBlocks needed,
                                            const KeyUnions& unions, int written, int& buffer, int32_t* keys, uint32_t* seen) {
  UnionShared& shared = range.shared;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, words = unions.words;
  const int log2_block = range.p.mask.index.log2_block;
  int found = 0;
  for (int begin = needed.plain << log2_block; begin < needed.all << log2_block; begin += kThreads * kAtOnce) {
    const int first_item = begin + warp * 32 * kAtOnce + lane;
    const auto key_of = [&](uint32_t block, int item) {
      return ((range.first + static_cast<int>(block)) << log2_block) + (item & ((1 << log2_block) - 1));
    };
    uint32_t some[kAtOnce];
    int own = 0, more;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int item = first_item + 32 * i, place = item >> log2_block;
      bool is_seen = false;
      if (place < needed.all) {
        const uint32_t entry = shared.needed[place], block = entry & (kWholeBlock - 1);
        is_seen = entry & kWholeBlock;
        const int key = key_of(block, item);
        if (!is_seen && key <= range.last_key) {
          const Span span = others.spans.of_key(key);
          for (int word = 0; word < words; ++word) {
            is_seen |= others.keep(range.listed_bits(block, key, word), span, key, word) != 0;
          }
        }
      }
      some[i] = __ballot_sync(0xffffffffu, is_seen);
      own += __popc(some[i]);
    }
    buffer ^= 1;
    int at = written + found + sum_before(shared, own, buffer, more);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int item = first_item + 32 * i, to = at + __popc(some[i] & lanes_before());
      at += __popc(some[i]);
      if (!has_bit(some[i], lane) || to >= unions.capacity) continue;
      const uint32_t entry = shared.needed[item >> log2_block], block = entry & (kWholeBlock - 1);
      const int key = key_of(block, item);
      keys[to] = key;
      if (entry & kWholeBlock) {
        for (int word = 0; word < words; ++word) {
          seen[word * unions.capacity + to] = shared.pool[word * range.stride + static_cast<int>(block)];
        }
      } else {
        const Span span = others.spans.of_key(key);
        for (int word = 0; word < words; ++word) {
          seen[word * unions.capacity + to] = others.keep(range.listed_bits(block, key, word), span, key, word);
        }
      }
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
  const int thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && thread == 0 && tile_counter) *tile_counter = 0;
  const UnionTile tile(p, unions);
  const IndexLists& lists = p.mask.index;
  const int key_length = static_cast<int>(p.key_length), log2_block = lists.log2_block, words = unions.words;
  const int last_key = p.mask.is_causal ? min(key_length, tile.low + tile.queries) - 1 : key_length - 1;
  const int blocks = (last_key >> log2_block) + 1,
            range = min(kPoolWords / words, blocks + 3) / 4 * 4;  // whole pieces of 16 bytes
  const bool by_fours = reinterpret_cast<uintptr_t>(tile.entries) % 16 == 0 && (lists.row_stride | lists.count) % 4 == 0;
  const OtherMasks others(p, tile);
  const bool has_others = others.spans.has_intervals() || others.tiles.tiles;
  const int last_whole = has_others ? -1 : p.mask.is_causal ? min(last_key, tile.low) : last_key;
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
    if (range >= blocks) {
      by_fours ? collect_bits<true, true>(shared, p, tile, first, count, range)
               : collect_bits<true, false>(shared, p, tile, first, count, range);
    } else {
      by_fours ? collect_bits<false, true>(shared, p, tile, first, count, range)
               : collect_bits<false, false>(shared, p, tile, first, count, range);
    }
    __syncthreads();
    const UnionRange here{shared, p, tile, first, count, range, local_from, local_to, last_key, last_whole};
    const NeededBlocks needed = find_blocks(here, words, buffer);
    __syncthreads();
    write_plain(here, needed.plain << log2_block, unions, written, keys, seen);
    written += needed.plain << log2_block;
    written += write_blocks(here, others, needed, unions, written, buffer, keys, seen);
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
