// What the warpgroups of a backward block share, and the warps that load: half a warpgroup brings tiles of keys and values, one
// thread of the other half the chunks of queries that see them. Another warp of that half waits for turns (glossary), where
// sums have a fixed order.
//
// A tile of keys stays for one visit: while all the queries that see it pass or, where live keys are gathered, those of one
// segment. A visit ends with a note that brings no queries.
#pragma once

#include "forward_load.cuh"

namespace dmattn::cuda::sm90 {

// A tile of keys and the queries that see it.
struct KeyNote {
  int batch, head, kv_head;  // head: the first of the head group; -1: the work is done, no visit begins
  int first_place;           // of the tile, among all keys or, where keys are gathered, in their list
  int from, to;              // the queries [from, to) of the visit
  // For each warp that loads keys: of its keys' spans the smallest and the largest first, the smallest and the largest last.
  int bounds[kLoaders / 32][4];
  alignas(16) int32_t index[kBackwardKeys];  // by index_place; -1 for none
  alignas(8) Seen span[kBackwardKeys];
};

// A chunk of queries, or the end of a visit.
struct QueryNote {
  const uint32_t* bits;  // those of the first query, from the tile's first key on; null: no bits have to be tested
  float* sums;           // of grad_query
  int first_query, head;
  bool ends_visit;
  bool has_test;      // of spans, bits or both?
  bool needs_test;    // of spans?
  bool has_bad_rows;  // are there any in the call?
};

template <int kDim, bool kHasOptions>
struct alignas(1024) BackwardShared {
  static constexpr BackwardShape kShape = kBackwardShape<kDim, kHasOptions>;
  static_assert(kShape.keys == kBackwardKeys);
  static constexpr bool kSplitsChunks = false;  // query and grad_out of a chunk are announced together
  static constexpr int kPieces = 1;             // in which grad_query of a chunk is added
  static constexpr int kKeyNotes = 2;           // the next visit's queries come before this visit has ended
  static constexpr int kQueryNotes = 8;         // a note is read until the chunk after it has been computed
  static_assert(kQueryNotes > kShape.query_stages + 2);
  // The part of a chunk's grad_query that a warpgroup computes: half of its columns, or of its queries.
  static constexpr int kPartQueries = 64, kPartColumns = kDim * kShape.queries / (kConsumers * kPartQueries);
  uint16_t key[kBackwardKeys * kDim];
  uint16_t value[kBackwardKeys * kDim];
  uint16_t query[kShape.query_stages][kShape.queries * kDim];
  uint16_t grad_out[kShape.query_stages][kShape.queries * kDim];
  uint16_t grad_score[2][kBackwardKeys * kShape.queries];  // panels of 64 queries: keys by queries
  alignas(128) float lse2[kShape.query_stages][kShape.queries];
  alignas(128) float delta[kShape.query_stages][kShape.queries];
  alignas(128) uint32_t row_hash[kShape.query_stages][kShape.queries];  // with dropout
  KeyNote key_notes[kKeyNotes];
  QueryNote query_notes[kQueryNotes];
  uint32_t item, query_visit;  // the item drawn last; the visit whose queries are loaded
  int row_flags;               // a copy
  uint64_t note_full[kKeyNotes], note_empty[kKeyNotes];
  uint64_t key_full, value_full, tile_empty;
  uint64_t query_full[kShape.query_stages], query_empty[kShape.query_stages];
  uint64_t score_full[2], score_empty[2];
  uint64_t turn_begun, turn_ended;  // where sums have a fixed order: the computing warps may add; they have added
  uint64_t visit_loaded;            // all queries of a visit have been asked for
};

inline constexpr int kLoadBarrier = 1, kClearBarrier = 2;  // of the loading and of the computing warps; 0 is the whole block's

inline constexpr int kComputingThreads = kConsumers * kWarpgroup;

// Sets up the barriers between the warps that load and those that compute. By one thread.
template <class Shared>
__device__ __forceinline__ void init_barriers_of_loads(Shared& shared, bool has_turns) {
  for (int i = 0; i < Shared::kKeyNotes; ++i) {
    barrier_init(shared_address(&shared.note_full[i]), kLoaders);
    barrier_init(shared_address(&shared.note_empty[i]), kComputingThreads + (has_turns ? 2 : 1));
  }
  barrier_init(shared_address(&shared.turn_begun), 1);
  barrier_init(shared_address(&shared.visit_loaded), 1);
  barrier_init(shared_address(&shared.turn_ended), kComputingThreads);
  barrier_init(shared_address(&shared.key_full), kLoaders);
  barrier_init(shared_address(&shared.value_full), kLoaders);
  barrier_init(shared_address(&shared.tile_empty), kComputingThreads);
  for (int i = 0; i < Shared::kShape.query_stages; ++i) {
    barrier_init(shared_address(&shared.query_full[i]), 1);
    barrier_init(shared_address(&shared.query_empty[i]), kComputingThreads);
  }
}

// Waits until as many tiles of keys have added to a chunk of queries as `turn` says. What they added has arrived then.
__device__ __forceinline__ void wait_turn(const int32_t* counter, int turn) {
  int reached;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(reached) : "l"(counter) : "memory");
  } while (reached != turn);
}
// Counts one more tile, after all that is known to have been added.
__device__ __forceinline__ void end_turn(int32_t* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

// Waits until the list before has added its keys up to last_key, and says that this one has added its own before next_key.
__device__ __forceinline__ void wait_key_turn(const int32_t* next_key, int last_key) {
  int reached;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(reached) : "l"(next_key) : "memory");
  } while (reached <= last_key);
}
__device__ __forceinline__ void end_key_turn(int32_t* to, int next_key) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(next_key) : "memory");
}

// key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv] -> a tile of 128 keys [keys, D or Dv] in shared memory for each visit, with a note.
// By half a warpgroup.
template <int kDim, Variant kVariant>
__device__ __forceinline__ void load_keys(const BackwardCall& call, const BackwardWork& work, const BackwardMaps& maps,
                                          BackwardShared<kDim, has_options(kVariant)>& shared) {
  using Shared = BackwardShared<kDim, has_options(kVariant)>;
  constexpr int kKeys = Shared::kShape.keys;
  constexpr bool kIsGathered = gathers_keys(kVariant);
  const AttentionParams& p = call.b.forward;
  const Ring<Shared::kKeyNotes> note_full{shared_address(shared.note_full)}, note_empty{shared_address(shared.note_empty)};
  const Ring<1> key_full{shared_address(&shared.key_full)}, value_full{shared_address(&shared.value_full)},
      tile_empty{shared_address(&shared.tile_empty)};
  uint32_t visit = 0;

  // Begins a visit: leaves the note, then brings the tile. key_of(row) and span_of(row, key) are its keys, -1 for none, and their
  // spans. A tile without gaps comes in one piece.
  auto load = [&](const BackwardItem& item, int first_place, int from, int to, auto key_of, auto span_of) {
    const int thread = static_cast<int>(thread_index() % kLoaders);  // anew: registers are short
    note_empty.sleep_empty(visit);
    KeyNote& note = shared.key_notes[visit % Shared::kKeyNotes];
    int bounds[4] = {kLastPosition, kFirstPosition, kLastPosition, kFirstPosition};
    bool has_gaps = kIsGathered;
#pragma unroll 1
    for (int row = thread; row < kKeys; row += kLoaders) {
      const int key = key_of(row);
      const Span span = key >= 0 ? span_of(row, key) : Span::empty();
      const bool is_key = span.first < span.last;
      has_gaps |= key < 0;
      note.index[index_place<kKeys>(row)] = key < p.key_length ? key : -1;
      note.span[row] = Seen::of(span);
      bounds[0] = min(bounds[0], is_key ? span.first : kLastPosition);
      bounds[1] = max(bounds[1], is_key ? span.first : kLastPosition);
      bounds[2] = min(bounds[2], is_key ? span.last : kFirstPosition);
      bounds[3] = max(bounds[3], is_key ? span.last : kFirstPosition);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int bound = i % 2 == 0 ? __reduce_min_sync(0xffffffffu, bounds[i]) : __reduce_max_sync(0xffffffffu, bounds[i]);
      if (thread % 32 == 0) note.bounds[thread / 32][i] = bound;
    }
    if (thread == 0) {
      note.batch = item.batch, note.head = item.head, note.kv_head = item.kv_head;
      note.first_place = first_place, note.from = from, note.to = to;
    }
    barrier_arrive(note_full.at(visit));
    has_gaps = group_any(kLoadBarrier, kLoaders, has_gaps);  // also waits until all of index is written
    tile_empty.sleep_empty(visit);
    const auto bring = [&](const uint16_t* to, const CUtensorMap* map, const TensorView& tensor, int64_t width, uint32_t full) {
      const uint32_t tile = shared_address(to);
      if (has_gaps) {
        const char* const data =
            static_cast<const char*>(tensor.data) + (note.batch * tensor.batch_stride + note.kv_head * tensor.head_stride) * 2;
        gather_rows<kDim, kKeys, kLoaders, true, false, 1>(
            thread, tile, note.index, kKeys, data, static_cast<uint32_t>(tensor.row_stride * 2), static_cast<int>(width), [] {});
        copy_async_commit();
      } else if (thread == 0) {
        barrier_expect(full, kKeys * kDim * 2);
#pragma unroll
        for (int panel = 0; panel < kDim / 64; ++panel) {
          copy_box(tile + panel * (kKeys * 128), map, full, panel * 64, first_place, note.kv_head, note.batch);
        }
      } else {
        barrier_arrive(full);
      }
    };
    bring(shared.key, &maps.key, p.key, p.head_dim, key_full.at(0));
    bring(shared.value, &maps.value, p.value, p.value_dim, value_full.at(0));
    if (has_gaps) {  // rows that were copied have to be fenced before the tensor cores read them
      copy_async_wait<1>();
      fence_async();
      barrier_arrive(key_full.at(0));
      copy_async_wait<0>();
      fence_async();
      barrier_arrive(value_full.at(0));
    }
    ++visit;
  };

  for (bool draws = work.dealt == 0;; draws = true) {
    // Take the item that was dealt to the block, or draw one.
    uint32_t number = blockIdx.x;
    if (draws) {
      if (thread_index() % kLoaders == 0) {
        shared.item = work.ticket ? work.dealt + static_cast<uint32_t>(atomicAdd(read_anew(&work)->ticket, 1)) : work.items;
      }
      group_sync(kLoadBarrier, kLoaders);
      number = shared.item;
      group_sync(kLoadBarrier, kLoaders);
    }
    if (number >= work.items) break;
    const BackwardItem item(*read_anew(&p), *read_anew(&work), number);
    const int query_length = static_cast<int>(p.query_length);
    if constexpr (kIsGathered) {
      const LiveKeys& live_keys = read_anew(&call)->live_keys;
      const int64_t mask_head = live_keys.mask_head_of(item.batch, item.head);
      const int shift = live_keys.shift[mask_head], segment = work.tiles / work.shares - 1 - item.tile / work.shares;
      if (segment < segments_at(query_length, shift)) {
        const int2 list = live_keys.lists[mask_head * live_keys.most_lists + segment];
        const int64_t begin = mask_head * live_keys.capacity + list.x;
        const int to = static_cast<int>(min(p.query_length, (static_cast<int64_t>(segment + 1) * kSegmentQueries) << shift));
#pragma unroll 1
        for (int base = item.tile % work.shares * kKeys; base < list.y; base += work.shares * kKeys) {
          load(
              item, base, first_query_of(segment, shift), to,
              [&](int row) { return base + row < list.y ? read_anew(&call)->live_keys.index[begin + base + row] : -1; },
              [&](int row, int) { return Span::of(read_anew(&call)->live_keys.span[begin + base + row]); });
        }
      }
    } else {
      const int first_key = item.tile * kKeys;
      load(
          item, first_key, 0, query_length,
          [&](int row) {
            if (!call.seen) return first_key + row;
            const int seen_row = (item.batch * static_cast<int>(p.heads) + item.head) / call.heads_at_once;
            return has_bit(call.seen[seen_row * call.seen_words + (first_key + row) / 32], row % 32) ? first_key + row : -1;
          },
          [&](int, int key) { return SpanSource(p.mask, static_cast<int>(p.key_length), item.batch, item.head).of_key(key); });
    }
    // Wait until the next draw is due (BackwardWork::draws_late). What is left to compute hides its latency.
    if (kIsGathered && read_anew(&call)->turns) {
      tile_empty.sleep_empty(visit);
    } else if (read_anew(&work)->draws_late) {
      Ring<1>{shared_address(&shared.visit_loaded)}.sleep_empty(visit);
    }
  }
  note_empty.sleep_empty(visit);
  if (thread_index() % kLoaders == 0) shared.key_notes[visit % Shared::kKeyNotes].head = -1;
  barrier_arrive(note_full.at(visit));
}

// The queries [from, to) that see a key of the tile with this note. `from` is rounded down to a multiple of kQueries.
template <int kQueries>
struct QueriesOfVisit {
  int from, to;

  __device__ __forceinline__ QueriesOfVisit(const AttentionParams& p, const KeyNote& note) {
    const int shift = static_cast<int>(p.key_length - p.query_length);
    from = max(note.from, min(note.bounds[0][0], note.bounds[1][0]) - shift) / kQueries * kQueries;
    to = min(note.to, max(note.bounds[0][3], note.bounds[1][3]) - shift);
  }
  __device__ __forceinline__ int chunks() const { return (to - from + kQueries - 1) / kQueries; }
};

// A row from `row` on, `last` at most, before which no tile of a block mask is live in this column. Many loads are in flight.
__device__ __forceinline__ int skip_dead_rows(const MaskParams& mask, const int32_t* tiles, int row, int last, int column) {
  constexpr int kAtOnce = 8;
  while (row + kAtOnce <= last) {
    bool is_live = false;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) is_live |= is_live_tile(mask, tiles[(row + i) * static_cast<int>(mask.tiles_k) + column]);
    if (is_live) break;
    row += kAtOnce;
  }
  return row;
}

// Where sums have a fixed order and keys come in order: may visits leave out chunks that a later tile of keys sees?
__device__ __forceinline__ bool leaves_out_chunks(const MaskParams& mask) {
  return mask.tiles.data || mask.start.data || mask.end.data;
}

// query, grad_out [B, H, Sq, D or Dv], lse2, delta [B, H, padded_queries] -> chunks of queries in shared memory for every visit,
// with notes. By one thread.
template <int kDim, Variant kVariant>
__device__ __forceinline__ void load_queries(const BackwardCall& call, const BackwardWork& work, const BackwardMaps& maps,
                                             BackwardShared<kDim, has_options(kVariant)>& shared) {
  using Shared = BackwardShared<kDim, has_options(kVariant)>;
  constexpr BackwardShape kShape = Shared::kShape;
  constexpr int kQueries = kShape.queries;
  const AttentionParams& p = call.b.forward;
  const MaskParams& mask = p.mask;
  const Ring<Shared::kKeyNotes> note_full{shared_address(shared.note_full)}, note_empty{shared_address(shared.note_empty)};
  const Ring<kShape.query_stages> full{shared_address(shared.query_full)}, empty{shared_address(shared.query_empty)};
  Ring<kShape.query_stages> grad_out_full = full;
  if constexpr (Shared::kSplitsChunks) grad_out_full.base = shared_address(shared.grad_out_full);
  uint32_t& visit = shared.query_visit;  // not in a register, because those are short
  uint32_t n = 0;
  for (visit = 0;; ++visit) {
    note_full.sleep_full(visit);
    const KeyNote& note = shared.key_notes[visit % Shared::kKeyNotes];
    if (note.head < 0) return;
    const int shift = static_cast<int>(p.key_length - p.query_length);
    const auto [from, to] = QueriesOfVisit<kQueries>(p, note);

    auto send = [&](int first_query, int head, int state, int row_in_tile) {
      const uint32_t stage = n % kShape.query_stages;
      empty.sleep_empty(n);
      const int low = first_query + shift;
      const int high = min(first_query + kQueries, static_cast<int>(p.query_length)) - 1 + shift;
      const bool is_whole = max(note.bounds[0][1], note.bounds[1][1]) <= low && high < min(note.bounds[0][2], note.bounds[1][2]);
      const uint32_t* bits = is_dense(kVariant) ? nullptr : bits_of_tile(mask, state);
      const int words = static_cast<int>(mask.tile_k) / 32;
      if (bits) bits += row_in_tile * words + note.first_place / 32 % words;
      const int64_t terms = (note.batch * p.heads + head) * call.padded_queries + first_query;
      shared.query_notes[n % Shared::kQueryNotes] = {bits,        call.query_sums + terms * sum_width(p.head_dim),
                                                     first_query, head,
                                                     false,       !is_whole || bits,
                                                     !is_whole,   (shared.row_flags & kBadRows) != 0};
      constexpr int kTileBytes = kQueries * kDim * 2, kTermBytes = kQueries * 4;
      const bool has_hashes = has_options(kVariant) && call.row_hash;
      barrier_expect(full.at(n), (Shared::kSplitsChunks ? 1 : 2) * kTileBytes + (has_hashes ? 3 : 2) * kTermBytes);
      if (Shared::kSplitsChunks) barrier_expect(grad_out_full.at(n), kTileBytes);
      copy_bytes(shared_address(shared.lse2[stage]), call.lse2 + terms, kTermBytes, full.at(n));
      copy_bytes(shared_address(shared.delta[stage]), call.delta + terms, kTermBytes, full.at(n));
      if constexpr (has_options(kVariant)) {
        if (has_hashes) copy_bytes(shared_address(shared.row_hash[stage]), call.row_hash + terms, kTermBytes, full.at(n));
      }
#pragma unroll
      for (int panel = 0; panel < kDim / 64; ++panel) {
        copy_box(shared_address(shared.query[stage]) + panel * (kQueries * 128), &maps.query, full.at(n), panel * 64, first_query,
                 head, note.batch);
      }
#pragma unroll
      for (int panel = 0; panel < kDim / 64; ++panel) {
        copy_box(shared_address(shared.grad_out[stage]) + panel * (kQueries * 128), &maps.grad_out, grad_out_full.at(n),
                 panel * 64, first_query, head, note.batch);
      }
      ++n;
    };

    // Where sums have a fixed order, chunks are taken from the last to the first, and each for all heads of the group: head by
    // head, causality would let each tile of keys catch up with the one that it follows. Where visits leave out chunks, heads may
    // differ in those, so chunks are taken head by head from the first to the last.
    const bool has_turns = !gathers_keys(kVariant) && call.turns, takes_heads_together = has_turns && !leaves_out_chunks(mask);
#pragma unroll 1
    for (int head = note.head; head < note.head + work.heads; ++head) {
      const bool has_blocks = !gathers_keys(kVariant) && !is_dense(kVariant) && mask.tiles.data;
      const TileSource source(mask, note.batch, head);
      const int tile_q = static_cast<int>(mask.tile_q), tiles_q = static_cast<int>(mask.tiles_q);
      const int tile_column = has_blocks ? note.first_place / static_cast<int>(mask.tile_k) : 0;
      const int32_t* const list = source.columns + tile_column * (tiles_q + 1);
      // The list may have any order.
      const int entries = !has_blocks ? 1 : has_turns ? tiles_q : min(list[0], tiles_q);
#pragma unroll 1
      for (int entry = 1; entry <= entries; ++entry) {
        // Find the queries [first, stop): all of the visit, or those of a tile of the block mask.
        int state = kTileFull, first = from, stop = to, first_of_tile = 0;
        if (has_blocks) {
          if (has_turns) entry = skip_dead_rows(mask, source.tiles, entry - 1, tiles_q - 1, tile_column) + 1;
          const int row = has_turns ? entry - 1 : list[entry];
          state = row >= 0 && row < tiles_q ? source.tiles[row * static_cast<int>(mask.tiles_k) + tile_column] : kTileEmpty;
          if (!is_live_tile(mask, state)) continue;
          first_of_tile = row * tile_q, first = max(first_of_tile, from), stop = min(first_of_tile + tile_q, to);
        }
        // Without a block mask each visit begins with another chunk, so that blocks do not add to the same rows of grad_query at
        // the same time.
        int chunks = (stop - first + kQueries - 1) / kQueries;
        asm volatile("" : "+r"(chunks));  // so that the difference need not be kept
        int at = !has_blocks && !has_turns && chunks > 0 ? note.first_place / kShape.keys % chunks : 0;
        if (takes_heads_together) at = chunks - 1;
#pragma unroll 1
        for (int left = chunks; left > 0;) {
          send(first + at * kQueries, head, state, first + at * kQueries - first_of_tile);
          if (takes_heads_together) {
            if (++head < note.head + work.heads) continue;
            head = note.head;
          }
          --left;
          at = takes_heads_together ? at - 1 : at + 1 < chunks ? at + 1 : 0;
        }
        if (takes_heads_together) head += work.heads;
      }
    }
    empty.sleep_empty(n);
    shared.query_notes[n % Shared::kQueryNotes].ends_visit = true;
    barrier_arrive(full.at(n));
    if (Shared::kSplitsChunks) barrier_arrive(grad_out_full.at(n));
    ++n;
    barrier_arrive(note_empty.at(visit));
    barrier_arrive(shared_address(&shared.visit_loaded));
  }
}

// Where sums have a fixed order: waits for the turns of the block's tiles of keys, tells the warps that compute when they may
// add, and counts when they have. By one warp, whose first thread alone does this.
//
// Keys in order take turns at each chunk of queries, from the first tile of keys to the last. Without a mask every tile begins
// with the last chunk, which causality lets all of them see, and follows the one before it, so that tiles come to a chunk in
// their order.
//
// Under a block mask those tiles of keys have turns at a chunk whose tile of the mask is live, and the warp counts how many come
// before. Under intervals alone all tiles have turns at all chunks. A tile passes on its turn at a chunk that it leaves out: as
// many turns at a time as the warp has threads. Nobody needs the turns that causality leaves out, but those of a tile without a
// visible key.
//
// One block has the whole list of a segment where keys are gathered, so it takes turns only where it adds grad_key and
// grad_value: the lists of a head add a key from the last segment to the first. Lists are in key order. In front of a key that
// two of them share, that of the later segment has fewer keys, because more have died. So it comes to that key first.
template <int kDim, Variant kVariant>
__device__ __forceinline__ void take_turns(const BackwardCall& call, const BackwardWork& work,
                                           BackwardShared<kDim, has_options(kVariant)>& shared, int lane) {
  using Shared = BackwardShared<kDim, has_options(kVariant)>;
  constexpr BackwardShape kShape = Shared::kShape;
  constexpr int kQueries = kShape.queries;
  static_assert(Shared::kPieces * kTurnQueries <= kShape.queries && kShape.queries % kTurnQueries == 0);
  const AttentionParams& p = call.b.forward;
  const MaskParams& mask = p.mask;
  const Ring<Shared::kKeyNotes> note_full{shared_address(shared.note_full)}, note_empty{shared_address(shared.note_empty)};
  const Ring<1> begun{shared_address(&shared.turn_begun)}, ended{shared_address(&shared.turn_ended)};
  const bool leaves_out = !gathers_keys(kVariant) && leaves_out_chunks(mask);
  if (lane > 0 && !leaves_out) return;
  uint32_t n = 0;
  for (uint32_t visit = 0;; ++visit) {
    note_full.sleep_full(visit);
    const KeyNote& note = shared.key_notes[visit % Shared::kKeyNotes];
    if (note.head < 0) return;
    if constexpr (gathers_keys(kVariant)) {
      const LiveKeys& live_keys = call.live_keys;
      const int64_t mask_head = live_keys.mask_head_of(note.batch, note.head);
      const int shift = live_keys.shift[mask_head], segment = segment_of(note.from, shift);
      const int2* const lists = live_keys.lists + mask_head * live_keys.most_lists;
      const int2 list = lists[segment];
      const int32_t* const index = live_keys.index + mask_head * live_keys.capacity + list.x;
      int32_t* const turn = call.turns + (note.batch * static_cast<int>(p.kv_heads) + note.kv_head) * work.tiles + segment;
      const int stop = note.first_place + kShape.keys;
      // An empty list has no key of a later one either.
      if (segment + 1 < segments_at(static_cast<int>(p.query_length), shift) && lists[segment + 1].y > 0) {
        wait_key_turn(turn + 1, index[min(stop, list.y) - 1]);
      }
      barrier_arrive(begun.at(visit));
      ended.sleep_full(visit);
      end_key_turn(turn, stop < list.y ? index[stop] : kLastPosition);
      barrier_arrive(note_empty.at(visit));
      continue;
    }
    const QueriesOfVisit<kQueries> queries(p, note);
    const int tile = note.first_place / kShape.keys;
    const auto turns_of = [&](int head) {
      return call.turns + (note.batch * p.heads + head) * call.padded_queries / kTurnQueries;
    };
    // Lets the computing warps add to a chunk when `before` tiles have.
    const auto take = [&](int32_t* turn, int before) {
#pragma unroll 1
      for (int piece = 0; piece < Shared::kPieces; ++piece, ++n, ++turn) {
        wait_turn(turn, before);
        barrier_arrive(begun.at(n));
        ended.sleep_full(n);
        end_turn(turn);
      }
    };
    if (!leaves_out) {
#pragma unroll 1
      for (int chunk = queries.chunks() - 1; chunk >= 0; --chunk) {
#pragma unroll 1
        for (int head = note.head; head < note.head + work.heads; ++head) {
          take(turns_of(head) + (queries.from + chunk * kQueries) / kTurnQueries, tile);
        }
      }
      barrier_arrive(note_empty.at(visit));
      continue;
    }
    const bool has_blocks = !is_dense(kVariant) && mask.tiles.data, is_empty = queries.from >= queries.to;
    const bool has_intervals = mask.start.data || mask.end.data;
#pragma unroll 1
    for (int head = note.head; head < note.head + work.heads; ++head) {
      // Passes on the turns at the chunks in [first, stop).
      const auto pass = [&](int first, int stop, int before) {
#pragma unroll 1
        for (int query = first + lane * kQueries; query < stop && (is_empty || has_intervals); query += 32 * kQueries) {
          int32_t* const turn = turns_of(head) + query / kTurnQueries;
#pragma unroll 1
          for (int piece = 0; piece < Shared::kPieces; ++piece) {
            wait_turn(turn + piece, before);
            end_turn(turn + piece);
          }
        }
        __syncwarp();
      };
#pragma unroll 1
      for (int row = 0; row < (has_blocks ? static_cast<int>(mask.tiles_q) : 1); ++row) {
        // Find the queries [first, stop) at whose chunks the tile has turns, and how many tiles have theirs before.
        int first = 0, stop = static_cast<int>(p.query_length), before = tile;
        if (has_blocks) {
          const int32_t* states = row_of<const int32_t>(mask.tiles, note.batch, head);
          const int tile_q = static_cast<int>(mask.tile_q), tile_k = static_cast<int>(mask.tile_k);
          const int column = note.first_place / tile_k;
          row = skip_dead_rows(mask, states, row, static_cast<int>(mask.tiles_q) - 1, column);
          states += row * static_cast<int>(mask.tiles_k);
          if (!is_live_tile(mask, states[column])) continue;
          int live = 0;
#pragma unroll 4
          for (int at = lane; at < column; at += 32) live += is_live_tile(mask, states[at]) ? 1 : 0;
          before = __reduce_add_sync(0xffffffffu, live) * (tile_k / kShape.keys) + note.first_place % tile_k / kShape.keys;
          first = row * tile_q, stop = min(first + tile_q, stop);
        }
        // Without intervals all tiles before this one that are live see what comes behind its first key, and nobody waits for
        // turns in front of that.
        const int shift = static_cast<int>(p.key_length - p.query_length);
        if (mask.is_causal && !has_intervals) first = max(first, max(note.first_place - shift, 0) / kQueries * kQueries);
        // The tile sees those of [query, to).
        int query = is_empty ? stop : min(max(queries.from, first), stop);
        const int to = min(queries.to, stop);
        pass(first, query, before);
#pragma unroll 1
        for (; query < to; query += kQueries) {
          if (lane == 0) take(turns_of(head) + query / kTurnQueries, before);
        }
        __syncwarp();  // others do not look for turns to pass on while the first thread waits for one
        pass(query, stop, before);
      }
    }
    __syncwarp();  // no thread may still be reading a note that the first one gives back
    if (lane == 0) barrier_arrive(note_empty.at(visit));
  }
}

}  // namespace dmattn::cuda::sm90
