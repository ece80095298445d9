// The scheduler of the portable kernels: finds the keys that a query tile sees, chunk by chunk, in order (all keys, those before
// the diagonal, or the live tiles of a block mask) or gathered from lists of live keys. common/scheduler.cuh says what it shares
// with the scheduler for Hopper, and why no more.
//
// Gathered keys go through two queues. Keys that every query of the tile sees and keys that only some see go into different
// chunks, in any order, so that all but one or two chunks need no test.
#pragma once

#include <new>

#include "../calls.h"
#include "../common/scheduler.cuh"
#include "tile.cuh"
#include "tiles.h"

namespace dmattn::cuda::sm80 {

// What is known of the keys of one chunk, in shared memory. There are two stages: the next chunk is prepared while one is
// computed.
template <int kQueries, int kKeys>
struct alignas(16) KeyStage {
  Span span[kKeys];      // filled in for chunks that need a test; empty for keys that no query of the tile sees
  int32_t index[kKeys];  // gathered: the key, -1 for none
  float key_bias[kKeys];
  int32_t gathered_needs_test;
  union alignas(8) {
    uint32_t bits[kQueries][kKeys / 32];               // filled in for chunks in a partial tile
    uint32_t union_seen[(kQueries + 31) / 32][kKeys];  // of a union: query q sees the key where bit q % 32 of word q / 32 is set
  };
};

// What a scheduler looks up, written once for each tile. It is in shared memory, because the kernels are short of registers.
struct KeySources {
  SpanSource spans;
  const float* key_bias;      // [Sk] or null
  const char *keys, *values;  // where the rows of the head begin
  int low, high;              // positions of the tile's first and last query
  // Keys in order.
  int limit, whole_limit;        // as in KeyLimits
  const int32_t *list, *states;  // the tile row of a block mask: its non-empty tiles, the states of all
  int entries, bits_row;
  // Keys gathered.
  const int32_t* index;  // the list of the segment
  const int2* span;
  int listed;
  const uint32_t* union_seen;  // of a union: [words, union_capacity]; null: the list is one of live keys
  int64_t union_capacity;
};

// How full the rings of gathered keys are.
struct RingState {
  int whole_head, whole_count, partial_head, partial_count;
};

// The queues of a scheduler, which all threads fill.
template <int kThreads, int kKeys>
struct KeyQueues {
  static constexpr int kRing = 1024;
  static_assert(kRing >= kListBlock + kKeys && kListBlock % kThreads == 0);
  int32_t whole[kRing];    // keys that every query of the tile sees; in order: the tiles of a block mask
  int32_t partial[kRing];  // places in the list of keys that some see; in order: the states of those tiles
  int32_t warp_counts[kThreads / 32];
  RingState rings;  // between two calls of next; in shared memory, because registers are short
  int cursor;       // how many entries of the list were read
  uint32_t seen[kThreads / 32][kKeys / 32];
  alignas(16) unsigned char sources[sizeof(KeySources)];
};

// A chunk; the same in all threads.
struct Chunk {
  int first_key = 0;        // of keys in order
  bool needs_test = false;  // spans are filled in and decide
  bool has_bits = false;    // bits are filled in and decide, too
  bool is_union = false;    // union_seen is filled in and decides
};

template <class Traits, int kThreads, int kQueries, int kKeys>
class KeyScheduler {
 public:
  using Stage = KeyStage<kQueries, kKeys>;
  using Queues = KeyQueues<kThreads, kKeys>;

  // A tile of the queries [first_query, first_query + kQueries) of a head.
  __device__ __forceinline__ KeyScheduler(const AttentionParams& p, const LiveKeys& live_keys, Queues& queues, int batch,
                                          int head, int kv_head, int first_query)
      : p_(p), queues_(queues), is_gathered_(live_keys.index || live_keys.unions.key), is_union_(live_keys.unions.key) {
    if (threadIdx.x == 0) {
      auto& sources = *new (queues.sources) KeySources{
          SpanSource(p.mask, static_cast<int>(p.key_length), batch, head), row_of<const float>(p.key_bias, batch, head),
          rows_of_head(p.key, batch, kv_head), rows_of_head(p.value, batch, kv_head)};
      queues.cursor = 0;
      queues.rings = {0, 0, 0, 0};
      const int shift = static_cast<int>(p.key_length - p.query_length);
      sources.low = first_query + shift;
      sources.high = min(first_query + kQueries, static_cast<int>(p.query_length)) - 1 + shift;
      if (gathered()) {
        find_list(sources, live_keys, batch, head, first_query);
      } else {
        find_tiles(sources, batch, head, first_query);
      }
    }
    if (!gathered() && p.mask.tiles.data) {
      const TileSource source(p.mask, batch, head);
      const int row = first_query / static_cast<int>(p.mask.tile_q), tiles = static_cast<int>(p.mask.tiles_k);
      load_tiles(source.rows + row * (tiles + 1) + 1, source.tiles + row * tiles, 0);
    }
    __syncthreads();
  }

  __device__ __forceinline__ bool gathered() const { return Traits::kGathers || (Traits::kMayGather && is_gathered_); }
  __device__ __forceinline__ bool is_union() const { return Traits::kIsUnion || (Traits::kMayBeUnion && is_union_); }
  __device__ __forceinline__ int low() const { return sources().low; }

  // Prepares the next chunk in `stage`; false when no chunk is left. All threads take part, and may read the stage on return.
  __device__ __forceinline__ bool next(Stage& stage, Chunk& chunk) {
    chunk.is_union = is_union();
    if (is_union()) return next_of_union(stage);
    return gathered() ? next_gathered(stage) : next_in_order(stage, chunk);
  }

  // Do spans and bits decide?
  __device__ __forceinline__ bool needs_test(const Stage& stage, const Chunk& chunk) const {
    return gathered() ? stage.gathered_needs_test : chunk.needs_test;
  }

  // The key in column `column` of a chunk.
  __device__ __forceinline__ int key_of(const Stage& stage, const Chunk& chunk, int column) const {
    return gathered() ? stage.index[column] : chunk.first_key + column;
  }

  // Starts copying the chunk's keys or values into a tile. Rows that no query of the tile sees become zeros.
  template <int kDim>
  __device__ __forceinline__ void load_keys(uint32_t tile, const Stage& stage, const Chunk& chunk) const {
    load<kDim>(tile, stage, chunk, sources().keys, static_cast<uint32_t>(p_.key.row_stride * 2), static_cast<int>(p_.head_dim));
  }
  template <int kDim>
  __device__ __forceinline__ void load_values(uint32_t tile, const Stage& stage, const Chunk& chunk) const {
    load<kDim>(tile, stage, chunk, sources().values, static_cast<uint32_t>(p_.value.row_stride * 2),
               static_cast<int>(p_.value_dim));
  }

 private:
  template <int kDim>
  __device__ __forceinline__ void load(uint32_t tile, const Stage& stage, const Chunk& chunk, const char* rows,
                                       uint32_t row_bytes, int width) const {
    using Copy = RowCopy<kDim, kThreads>;
    const Copy copy(width);
    if (gathered()) {
      // A thread has neighbouring rows, so that it reads up to four indices at once.
      constexpr int kPerThread = kKeys / Copy::kRows, kAtOnce = kPerThread < 4 ? kPerThread : 4;
      struct alignas(4 * kAtOnce) Indices {
        int32_t key[kAtOnce];
      };
#pragma unroll 1
      for (int r = copy.row * kPerThread; r < (copy.row + 1) * kPerThread; r += kAtOnce) {
        const Indices at = *reinterpret_cast<const Indices*>(&stage.index[r]);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const char* const from = rows + static_cast<uint64_t>(static_cast<uint32_t>(max(at.key[i], 0))) * row_bytes;
          copy.start_row(tile, r + i, from, at.key[i] >= 0);
        }
      }
    } else if (chunk.needs_test) {
      const int low = sources().low, high = sources().high;
#pragma unroll 2
      for (int r = 0; r < kKeys; r += Copy::kRows) {
        const bool wanted = stage.span[copy.row + r].touches(low, high);
        copy.start(tile, r,
                   rows + (wanted ? static_cast<uint64_t>(static_cast<uint32_t>(chunk.first_key + copy.row + r)) * row_bytes : 0),
                   wanted);
      }
    } else {
      const char* from = rows + static_cast<uint64_t>(static_cast<uint32_t>(chunk.first_key + copy.row)) * row_bytes;
#pragma unroll
      for (int r = 0; r < kKeys; r += Copy::kRows, from += Copy::kRows * row_bytes) copy.start(tile, r, from, true);
    }
  }

  // ---- keys in order ----

  __device__ __forceinline__ void find_tiles(KeySources& to, int batch, int head, int first_query) {
    const KeyLimits limits(p_.mask, static_cast<int>(p_.key_length), to.low, to.high);
    to.limit = limits.limit, to.whole_limit = limits.whole_limit;
    if (!p_.mask.tiles.data) return;
    const TileSource source(p_.mask, batch, head);
    const int tile_row = first_query / static_cast<int>(p_.mask.tile_q);
    to.bits_row = first_query % static_cast<int>(p_.mask.tile_q);
    to.list = source.rows + tile_row * (p_.mask.tiles_k + 1) + 1;
    to.states = source.tiles + tile_row * p_.mask.tiles_k;
    to.entries = min(max(to.list[-1], 0), static_cast<int>(p_.mask.tiles_k));
  }

  // Fills a ring with the list from `entry` on. It need not know the number of entries, because a list has room for all tiles.
  __device__ __forceinline__ void load_tiles(const int32_t* list, const int32_t* states, int entry) {
    const int tiles = static_cast<int>(p_.mask.tiles_k);
    for (int i = threadIdx.x; i < min(Queues::kRing, tiles - entry); i += kThreads) {
      const int tile = list[entry + i];
      queues_.whole[i] = tile;
      queues_.partial[i] = tile >= 0 && tile < tiles ? states[tile] : kTileEmpty;
    }
  }

  __device__ __forceinline__ bool next_in_order(Stage& stage, Chunk& chunk) {
    for (;;) {
      const uint32_t* bits = nullptr;
      if (p_.mask.tiles.data) {
        while (cursor_ >= tile_stop_) {
          if (entry_ >= sources().entries) return false;
          if (entry_ > 0 && entry_ % Queues::kRing == 0) {
            __syncthreads();
            load_tiles(sources().list, sources().states, entry_);
            __syncthreads();
          }
          const int place = entry_++ % Queues::kRing, begin = queues_.whole[place] * static_cast<int>(p_.mask.tile_k);
          const bool is_live = is_live_tile(p_.mask, queues_.partial[place]);
          tile_stop_ = is_live ? min(begin + static_cast<int>(p_.mask.tile_k), sources().limit) : 0;
          cursor_ = is_live ? begin : 0;  // that of a tile number that makes no sense may be negative
        }
        bits = bits_of_tile(p_.mask, queues_.partial[(entry_ - 1) % Queues::kRing]);
        if (bits) bits += sources().bits_row * (p_.mask.tile_k / 32) + cursor_ % p_.mask.tile_k / 32;
      } else if (cursor_ >= sources().limit) {
        return false;
      }
      chunk.first_key = cursor_;
      cursor_ += kKeys;
      chunk.has_bits = bits != nullptr;
      chunk.needs_test = bits || chunk.first_key + kKeys > sources().whole_limit || sources().spans.has_intervals();
      if (!chunk.needs_test || prepare_test(stage, chunk, bits)) {
        copy_key_bias(stage, chunk);
        return true;
      }
    }
  }

  // Fills in spans and bits; false when no query of the tile sees any key of the chunk.
  __device__ __forceinline__ bool prepare_test(Stage& stage, Chunk& chunk, const uint32_t* bits) {
    const int thread = threadIdx.x, low = sources().low, high = sources().high;
    bool touches = false, covers = true;
    if (thread < kKeys) {
      const Span span = sources().spans.of_key(chunk.first_key + thread);
      stage.span[thread] = span;
      touches = span.touches(low, high);
      covers = span.covers(low, high);
    }
    if (!__syncthreads_or(touches)) return false;
    const bool is_whole = __syncthreads_and(covers);
    if (!bits) {
      chunk.needs_test = !is_whole;
      return true;
    }
    // Bits and span together may hide a key from every query, so what a span hides is cleared in the bits.
#pragma unroll
    for (int w = 0; w < kKeys / 32; ++w) {
      uint32_t word = thread <= high - low && thread < kQueries ? bits[thread * (p_.mask.tile_k / 32) + w] : 0;
      if (!is_whole) word = bits_seen_at(word, &stage.span[w * 32], low + thread);
      if (thread < kQueries) stage.bits[thread][w] = word;
      const uint32_t seen = __reduce_or_sync(0xffffffffu, word);
      if (thread % 32 == 0) queues_.seen[thread / 32][w] = seen;
    }
    __syncthreads();
    bool is_seen = false;
    if (thread < kKeys) {
      uint32_t seen = 0;
      for (int warp = 0; warp < kThreads / 32; ++warp) seen |= queues_.seen[warp][thread / 32];
      is_seen = has_bit(seen, thread % 32);
      if (!is_seen) stage.span[thread] = Span::empty();
    }
    return __syncthreads_or(is_seen);
  }

  // ---- live keys gathered ----

  static __device__ __forceinline__ void find_list(KeySources& to, const LiveKeys& live_keys, int batch, int head,
                                                   int first_query) {
    to.union_seen = nullptr;
    if (live_keys.unions.key) {
      const KeyUnions& unions = live_keys.unions;
      const int64_t list = unions.list_of(batch, head, first_query);
      to.index = unions.key + list * unions.capacity, to.listed = unions.count[list];
      to.union_seen = unions.seen_of(list), to.union_capacity = unions.capacity;
      return;
    }
    const int64_t mask_head = live_keys.mask_head_of(batch, head);
    const KeyList list(live_keys, mask_head, first_query);
    to.index = list.index, to.span = list.span, to.listed = list.count;
  }

  // Reads the next keys of the list into the queues; false at the end.
  __device__ __forceinline__ bool refill(RingState& rings) {
    const int first = queues_.cursor + static_cast<int>(threadIdx.x);
    if (queues_.cursor >= sources().listed) return false;

    constexpr int kPerThread = kListBlock / kThreads;  // only keys are kept: spans are read again, because registers are short
    int key[kPerThread];
    uint32_t whole[kPerThread], partial[kPerThread];
    int counts = 0;  // whole in the low half, partial in the high half
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int at = first + i * kThreads;
      const Span span = at < sources().listed ? Span::of(sources().span[at]) : Span::empty();
      key[i] = at < sources().listed ? sources().index[at] : 0;
      const bool touches = span.touches(sources().low, sources().high), covers = span.covers(sources().low, sources().high);
      whole[i] = __ballot_sync(0xffffffffu, touches && covers);
      partial[i] = __ballot_sync(0xffffffffu, touches && !covers);
      counts += __popc(whole[i]) + (__popc(partial[i]) << 16);
    }
    if (threadIdx.x % 32 == 0) queues_.warp_counts[threadIdx.x / 32] = counts;
    __syncthreads();
    if (threadIdx.x == 0) queues_.cursor = first + kListBlock;
    int place, total;
    add_counts(queues_.warp_counts, static_cast<int>(threadIdx.x) / 32, place, total);
    int whole_place = rings.whole_head + rings.whole_count + (place & 0xffff),
        partial_place = rings.partial_head + rings.partial_count + (place >> 16);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int at = first + i * kThreads;
      if (has_bit(whole[i], threadIdx.x % 32)) {
        queues_.whole[(whole_place + __popc(whole[i] & lanes_before())) % Queues::kRing] = key[i];
      }
      if (has_bit(partial[i], threadIdx.x % 32)) {
        queues_.partial[(partial_place + __popc(partial[i] & lanes_before())) % Queues::kRing] = at;
      }
      whole_place += __popc(whole[i]);
      partial_place += __popc(partial[i]);
    }
    rings.whole_count += total & 0xffff;
    rings.partial_count += total >> 16;
    __syncthreads();
    return true;
  }

  __device__ __forceinline__ bool next_gathered(Stage& stage) {
    RingState rings = queues_.rings;
    while (rings.whole_count < kKeys && rings.partial_count < kKeys && refill(rings)) {
    }
    const bool is_whole = rings.whole_count >= kKeys;
    const int from_partial = is_whole ? 0 : min(rings.partial_count, kKeys);
    const int from_whole = min(rings.whole_count, kKeys - from_partial);
    if (from_partial + from_whole == 0) return false;
    const int thread = threadIdx.x;
    if (thread == 0) stage.gathered_needs_test = !is_whole;
    if (thread < kKeys) {
      int key = -1;
      Span span = Span::empty();
      if (thread < from_partial) {
        const int at = queues_.partial[(rings.partial_head + thread) % Queues::kRing];
        key = sources().index[at];
        span = Span::of(sources().span[at]);
      } else if (thread < from_partial + from_whole) {
        key = queues_.whole[(rings.whole_head + thread - from_partial) % Queues::kRing];
        span = {kFirstPosition, kLastPosition};
      }
      stage.index[thread] = key;
      if (!is_whole) stage.span[thread] = span;
      if (sources().key_bias) {
        copy_async_4(shared_address(&stage.key_bias[thread]), sources().key_bias + max(key, 0), key >= 0);
      } else {
        stage.key_bias[thread] = 0.0f;
      }
    }
    __syncthreads();
    if (thread == 0) {  // read again after some later barrier
      queues_.rings = {rings.whole_head + from_whole, rings.whole_count - from_whole, rings.partial_head + from_partial,
                       rings.partial_count - from_partial};
    }
    return true;
  }

  // The next keys of a union, and which queries see them.
  __device__ __forceinline__ bool next_of_union(Stage& stage) {
    constexpr int kWords = (kQueries + 31) / 32;
    const int first = queues_.cursor, thread = threadIdx.x;
    if (first >= sources().listed) return false;
    if (thread < kKeys) {
      const bool is_key = first + thread < sources().listed;
      const uint32_t* from = sources().union_seen + first + thread;
      const int32_t* const index = sources().index + first + thread;
      const int64_t capacity = sources().union_capacity;
      const bool has_next = first + kKeys + thread < sources().listed;
      uint32_t seen[kWords];  // all are asked for before one is awaited, and those of the next chunk brought closer
#pragma unroll
      for (int word = 0; word < kWords; ++word, from += capacity) {
        seen[word] = is_key ? *from : 0;
        if (has_next) prefetch_l1(from + kKeys);
      }
      const int key = is_key ? *index : -1;
      if (has_next) prefetch_l1(index + kKeys);
#pragma unroll
      for (int word = 0; word < kWords; ++word) stage.union_seen[word][thread] = seen[word];
      stage.index[thread] = key;
      if (sources().key_bias) {
        copy_async_4(shared_address(&stage.key_bias[thread]), sources().key_bias + max(key, 0), is_key);
      } else {
        stage.key_bias[thread] = 0.0f;
      }
    }
    if (thread == 0) stage.gathered_needs_test = true;
    __syncthreads();
    if (thread == 0) queues_.cursor = first + kKeys;  // read again after some later barrier
    return true;
  }

  __device__ __forceinline__ void copy_key_bias(Stage& stage, const Chunk& chunk) {
    if (Traits::kBias == Bias::kNone || !sources().key_bias || threadIdx.x >= kKeys) return;
    const int key = chunk.first_key + static_cast<int>(threadIdx.x);
    const bool is_key = key < p_.key_length;
    copy_async_4(shared_address(&stage.key_bias[threadIdx.x]), sources().key_bias + (is_key ? key : 0), is_key);
  }

  __device__ __forceinline__ const KeySources& sources() const { return *reinterpret_cast<const KeySources*>(queues_.sources); }

  const AttentionParams& p_;
  Queues& queues_;
  const bool is_gathered_, is_union_;
  int cursor_ = 0, tile_stop_ = 0, entry_ = 0;  // in order: the next key, the end of its tile, the entry after the tile's
};

// Does the query in tile row `row` (tile row 0 is at position `low`) see the key in `column` of a chunk that needs a test?
template <class Stage>
__device__ __forceinline__ bool is_visible(const Stage& stage, const Chunk& chunk, int row, int column, int low) {
  if (chunk.is_union) return has_bit(stage.union_seen[row / 32][column], row % 32);
  if (!stage.span[column].sees(low + row)) return false;
  return !chunk.has_bits || has_bit(stage.bits[row][column / 32], column % 32);
}

// Scores that the chunk's spans and bits hide become -inf. `row` and `column` are the tile row and the chunk column of the
// thread's first element.
template <int kM, int kN, class Stage>
__device__ __forceinline__ void hide(float (&scores)[kM][kN][4], const Stage& stage, const Chunk& chunk, int row, int column,
                                     int low) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const Span left = stage.span[column + 8 * n], right = stage.span[column + 8 * n + 1];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int position = low + row + 16 * m + 8 * r;
        if (!left.sees(position)) scores[m][n][2 * r] = negative_infinity();
        if (!right.sees(position)) scores[m][n][2 * r + 1] = negative_infinity();
      }
    }
  }
  if (!chunk.has_bits) return;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t bits = stage.bits[row + 16 * m + 8 * r][(column + 8 * n) / 32] >> (column + 8 * n) % 32;
        if (!(bits & 1)) scores[m][n][2 * r] = negative_infinity();
        if (!(bits & 2)) scores[m][n][2 * r + 1] = negative_infinity();
      }
    }
  }
}

// Likewise, for a chunk of a union.
template <int kM, int kN, class Stage>
__device__ __forceinline__ void hide_of_union(float (&scores)[kM][kN][4], const Stage& stage, int row, int column) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at = row + 16 * m + 8 * r;
        const uint2 pair = *reinterpret_cast<const uint2*>(&stage.union_seen[at / 32][column + 8 * n]);
        if (!has_bit(pair.x, at % 32)) scores[m][n][2 * r] = negative_infinity();
        if (!has_bit(pair.y, at % 32)) scores[m][n][2 * r + 1] = negative_infinity();
      }
    }
  }
}

}  // namespace dmattn::cuda::sm80
