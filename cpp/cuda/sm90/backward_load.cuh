// What the warpgroups of a backward block share, and the warpgroup that loads: half of it tiles of keys and values, one thread of the
// other half the chunks of queries that see them.
//
// The one surprise is the turn: a tile of keys is kept for one turn, which is all the queries that see it, or, where live keys are
// gathered, those of one segment. A turn ends with a note that brings no queries.
#pragma once

#include "load.cuh"

namespace dmattn::cuda::sm90 {

struct BackwardMaps {
  CUtensorMap query;     // D, Sq, H, B
  CUtensorMap grad_out;  // Dv, Sq, H, B
  CUtensorMap key;       // D, Sk, Hkv, B
  CUtensorMap value;     // Dv, Sk, Hkv, B
};

// How the turns of a call are numbered: `heads` query heads that share their keys and their mask make a pack; a pack has `tiles`
// items, each a tile of keys in order, or a part of the list of a segment of the queries.
struct BackwardWork {
  uint32_t items;
  int tiles;
  uint32_t packs;          // batches x packs of heads
  uint32_t section_packs;  // packs whose queries and sums fit into L2 together
  int heads;
  int parts;    // items that share the list of a segment
  int* ticket;  // items handed out beyond the first of each block, zero at the start; null: no block has a second
};

// An item: packs in sections, early tiles of keys first because causality makes them long, late segments first for the same reason.
struct BackwardItem {
  int batch, head, kv_head, tile;

  __device__ __forceinline__ BackwardItem(const AttentionParams& p, const BackwardWork& work, uint32_t item) {
    const uint32_t tiles = static_cast<uint32_t>(work.tiles), section = item / (tiles * work.section_packs);
    const uint32_t rest = item - section * tiles * work.section_packs;
    const uint32_t packs = min(work.section_packs, work.packs - section * work.section_packs);
    const uint32_t pack = section * work.section_packs + rest % packs;
    const uint32_t packs_per_batch = static_cast<uint32_t>(p.heads) / work.heads;
    tile = static_cast<int>(rest / packs);
    batch = static_cast<int>(pack / packs_per_batch);
    head = static_cast<int>(pack % packs_per_batch) * work.heads;
    kv_head = head / static_cast<int>(p.heads / p.kv_heads);
  }
};

// A tile of keys: whose, and who sees it.
struct KeyNote {
  int batch, head, kv_head;            // head: the first of the pack; -1: there is no turn, the work is done
  int first_key;                       // of keys in order; gathered: of the list
  int from, to;                        // queries of the turn
  int bounds[kLoaders / 32][4];        // by loading warp: smallest and largest first, smallest and largest last of its keys' spans
  alignas(16) int32_t index[kBackwardKeys];  // by index_place; -1 for none
  alignas(8) Seen span[kBackwardKeys];
};

// A chunk of queries, or the end of a turn.
struct QueryNote {
  const uint32_t* bits;  // of the first query and the tile's first key; null: no bits to test
  int first_query, head;
  bool ends_turn, needs_test;
};

template <int kDim, Variant kVariant>
struct alignas(1024) BackwardShared {
  static constexpr BackwardShape kShape = kBackwardShape<kDim, kVariant>;
  static constexpr int kQueryNotes = 8;  // one is read until the next chunk is begun, or the turn has ended
  static_assert(kQueryNotes > kShape.query_stages + 1);
  uint16_t key[kShape.key_stages][kBackwardKeys * kDim];
  uint16_t value[kShape.key_stages][kBackwardKeys * kDim];
  uint16_t query[kShape.query_stages][kShape.queries * kDim];
  uint16_t grad_out[kShape.query_stages][kShape.queries * kDim];
  uint16_t grad_score[kBackwardKeys * kShape.queries];  // keys by queries
  // By warp, on its way to global memory: tiles of 8 queries by 16 columns.
  float grad_query[kConsumers * 4][kShape.adds_by_copy ? 16 * (kDim / kConsumers) : 1];
  alignas(128) float lse2[kShape.query_stages][kShape.queries];
  alignas(128) float delta[kShape.query_stages][kShape.queries];
  KeyNote key_notes[kShape.key_stages];
  QueryNote query_notes[kQueryNotes];
  uint32_t item;
  uint64_t note_full[kShape.key_stages];  // a tile's note, before the tile has come
  uint64_t key_full[kShape.key_stages], key_empty[kShape.key_stages];
  uint64_t query_full[kShape.query_stages], query_empty[kShape.query_stages];
  uint64_t score_full, score_empty;
};

inline constexpr int kLoadBarrier = 1;  // 0 is the whole block's

// Which keys of a tile under a block mask does some query see? By half a warpgroup, each thread for its keys.
template <int kEach>
__device__ __forceinline__ void find_seen(const AttentionParams& p, const BackwardItem& item, int heads, int first_key,
                                          const Span (&spans)[kEach], bool (&is_seen)[kEach]) {
  const MaskParams& mask = p.mask;
  const int tile_q = static_cast<int>(mask.tile_q), words = static_cast<int>(mask.tile_k) / 32;
  const int tiles_q = static_cast<int>(mask.tiles_q), query_length = static_cast<int>(p.query_length);
  const int thread = static_cast<int>(threadIdx.x) % kLoaders, shift = static_cast<int>(p.key_length) - query_length;
  const int tile_column = first_key / static_cast<int>(mask.tile_k), first_bit = first_key % static_cast<int>(mask.tile_k);
  for (int head = item.head; head < item.head + heads; ++head) {
    const TileSource source(mask, item.batch, head);
    const int32_t* const list = source.columns + tile_column * (tiles_q + 1) + 1;
    const int entries = min(max(list[-1], 0), tiles_q);
    for (int entry = 0; entry < entries; ++entry) {
      const int row = list[entry];
      const int state = row >= 0 && row < tiles_q ? source.tiles[row * static_cast<int>(mask.tiles_k) + tile_column] : kTileEmpty;
      if (!is_live_tile(mask, state)) continue;
      const uint32_t* const bits = bits_of_tile(mask, state);
      const int rows = min(tile_q, query_length - row * tile_q), low = row * tile_q + shift;
      bool misses = false;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int at = first_bit + thread + i * kLoaders;
        if (!bits) {
          is_seen[i] |= spans[i].touches(low, low + rows - 1);
        } else {
#pragma unroll 4
          for (int r = 0; r < rows; ++r) is_seen[i] |= (bits[r * words + at / 32] >> at % 32 & 1) && spans[i].sees(low + r);
        }
        misses |= !is_seen[i] && spans[i].first < spans[i].last;
      }
      if (!group_any(kLoadBarrier, kLoaders, misses)) return;
    }
  }
}

// Tiles of keys and values, one after the other, by half a warpgroup.
template <int kDim, Variant kVariant>
__device__ __forceinline__ void load_keys(const BackwardCall& call, const BackwardWork& work, const BackwardMaps& maps,
                                          BackwardShared<kDim, kVariant>& shared) {
  constexpr BackwardShape kShape = kBackwardShape<kDim, kVariant>;
  constexpr int kEach = kBackwardKeys / kLoaders;
  constexpr bool kIsGathered = kVariant == Variant::kGathered;
  const AttentionParams& p = call.b.forward;
  const int thread = static_cast<int>(threadIdx.x) % kLoaders, warp = thread / 32;
  const Ring<kShape.key_stages> note_full{shared_address(shared.note_full)}, full{shared_address(shared.key_full)},
      empty{shared_address(shared.key_empty)};
  uint32_t turn = 0;

  // One turn: leaves the note, then brings the tile. With gaps, or gathered, row by row.
  auto load = [&](const BackwardItem& item, int first_key, int from, int to, const int (&keys)[kEach], const Span (&spans)[kEach],
                  bool by_rows) {
    const uint32_t stage = turn % kShape.key_stages;
    empty.wait_empty(turn);
    KeyNote& note = shared.key_notes[stage];
    int bounds[4] = {kLastPosition, kFirstPosition, kLastPosition, kFirstPosition};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = thread + i * kLoaders;
      const bool is_key = spans[i].first < spans[i].last;
      note.index[Note<Variant::kGathered, kBackwardKeys>::index_place(row)] = keys[i];
      note.span[row] = Seen::of(spans[i]);
      bounds[0] = min(bounds[0], is_key ? spans[i].first : kLastPosition);
      bounds[1] = max(bounds[1], is_key ? spans[i].first : kLastPosition);
      bounds[2] = min(bounds[2], is_key ? spans[i].last : kFirstPosition);
      bounds[3] = max(bounds[3], is_key ? spans[i].last : kFirstPosition);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int bound = i % 2 == 0 ? __reduce_min_sync(0xffffffffu, bounds[i]) : __reduce_max_sync(0xffffffffu, bounds[i]);
      if (thread % 32 == 0) note.bounds[warp][i] = bound;
    }
    if (thread == 0) {
      note.batch = item.batch, note.head = item.head, note.kv_head = item.kv_head;
      note.first_key = first_key, note.from = from, note.to = to;
    }
    barrier_arrive(note_full.at(turn));
    const uint32_t key_tile = shared_address(shared.key[stage]), value_tile = shared_address(shared.value[stage]);
    if (by_rows) {
      group_sync(kLoadBarrier, kLoaders);  // everyone's index
      const auto gather = [&](uint32_t tile, const Rows& rows, int64_t width) {
        const char* const data =
            static_cast<const char*>(rows.data) + (item.batch * rows.batch_stride + item.kv_head * rows.head_stride) * 2;
        gather_rows<kDim, kBackwardKeys, true, 1>(tile, note.index, data, static_cast<uint32_t>(rows.row_stride * 2),
                                                  static_cast<int>(width));
      };
      gather(key_tile, p.key, p.head_dim);
      gather(value_tile, p.value, p.value_dim);
      copy_async_commit();
      copy_async_wait<0>();
      fence_async();
      barrier_arrive(full.at(turn));
    } else if (thread == 0) {
      barrier_expect(full.at(turn), 2 * kBackwardKeys * kDim * 2);
#pragma unroll
      for (int panel = 0; panel < kDim / 64; ++panel) {
        const int at = panel * (kBackwardKeys * 128);
        copy_box(key_tile + at, &maps.key, full.at(turn), panel * 64, first_key, item.kv_head, item.batch);
        copy_box(value_tile + at, &maps.value, full.at(turn), panel * 64, first_key, item.kv_head, item.batch);
      }
    } else {
      barrier_arrive(full.at(turn));
    }
    ++turn;
  };

  for (uint32_t number = blockIdx.x; number < work.items;) {
    // Drawn now and looked at later, so that its latency is hidden.
    uint32_t next = work.items;
    if (work.ticket && thread == 0) next = gridDim.x + static_cast<uint32_t>(atomicAdd(work.ticket, 1));
    const BackwardItem item(p, work, number);
    const int query_length = static_cast<int>(p.query_length), key_length = static_cast<int>(p.key_length);
    int keys[kEach];
    Span spans[kEach];
    if constexpr (kIsGathered) {
      const Plan& plan = call.plan;
      const int64_t row = item.batch * plan.batch_stride + item.head / static_cast<int>(plan.head_divisor);
      const int shift = plan.shift[row], segment = work.tiles / work.parts - 1 - item.tile / work.parts;
      if (segment <= query_length - 1 >> shift) {
        const int2 list = reinterpret_cast<const int2*>(plan.lists)[row * plan.most_lists + segment];
        const int64_t begin = row * plan.capacity + list.x;
        const int from = segment << shift;
        const int to = static_cast<int>(min(p.query_length, static_cast<int64_t>(segment + 1) << shift));
        for (int base = item.tile % work.parts * kBackwardKeys; base < list.y; base += work.parts * kBackwardKeys) {
#pragma unroll
          for (int i = 0; i < kEach; ++i) {
            const int at = base + thread + i * kLoaders;
            keys[i] = at < list.y ? plan.index[begin + at] : -1;
            spans[i] = at < list.y ? Span{plan.first[begin + at], plan.last[begin + at]} : Span::empty();
          }
          load(item, base, from, to, keys, spans, true);
        }
      }
    } else {
      const int first_key = item.tile * kBackwardKeys;
      const SpanSource source(p.mask, key_length, item.batch, item.head);
      bool has_gaps = false;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        keys[i] = first_key + thread + i * kLoaders;
        spans[i] = source.of_key(keys[i]);
      }
      if (p.mask.tiles.data) {
        bool is_seen[kEach] = {};
        find_seen(p, item, work.heads, first_key, spans, is_seen);
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          has_gaps |= !is_seen[i] && keys[i] < key_length;
          if (!is_seen[i]) keys[i] = -1, spans[i] = Span::empty();
        }
        has_gaps = group_any(kLoadBarrier, kLoaders, has_gaps);
      }
      load(item, first_key, 0, query_length, keys, spans, has_gaps);
    }
    if (thread == 0) shared.item = next;
    group_sync(kLoadBarrier, kLoaders);
    number = shared.item;
    group_sync(kLoadBarrier, kLoaders);
  }
  empty.wait_empty(turn);
  if (thread == 0) shared.key_notes[turn % kShape.key_stages].head = -1;
  barrier_arrive(note_full.at(turn));
  barrier_arrive(full.at(turn));
}

// The chunks of queries of every turn, by one thread.
template <int kDim, Variant kVariant>
__device__ __forceinline__ void load_queries(const BackwardCall& call, const BackwardWork& work, const BackwardMaps& maps,
                                             BackwardShared<kDim, kVariant>& shared) {
  constexpr BackwardShape kShape = kBackwardShape<kDim, kVariant>;
  const AttentionParams& p = call.b.forward;
  const MaskParams& mask = p.mask;
  const int query_length = static_cast<int>(p.query_length), shift = static_cast<int>(p.key_length) - query_length;
  const Ring<kShape.key_stages> note_full{shared_address(shared.note_full)}, key_empty{shared_address(shared.key_empty)};
  const Ring<kShape.query_stages> full{shared_address(shared.query_full)}, empty{shared_address(shared.query_empty)};
  uint32_t n = 0;
  for (uint32_t turn = 0;; ++turn) {
    note_full.wait_full(turn);
    const KeyNote& note = shared.key_notes[turn % kShape.key_stages];
    if (note.head < 0) return;
    const int first_whole = max(note.bounds[0][1], note.bounds[1][1]), last_whole = min(note.bounds[0][2], note.bounds[1][2]);
    const int from = max(note.from, min(note.bounds[0][0], note.bounds[1][0]) - shift);
    const int to = min(note.to, max(note.bounds[0][3], note.bounds[1][3]) - shift);
    const int batch = note.batch, first_head = note.head, first_key = note.first_key;

    auto send = [&](int first_query, int head, const uint32_t* bits) {
      const uint32_t stage = n % kShape.query_stages;
      empty.wait_empty(n);
      const int low = first_query + shift, high = min(first_query + kShape.queries, query_length) - 1 + shift;
      shared.query_notes[n % BackwardShared<kDim, kVariant>::kQueryNotes] = {bits, first_query, head, false, !(first_whole <= low && high < last_whole)};
      constexpr int kTileBytes = kShape.queries * kDim * 2, kTermBytes = kShape.queries * 4;
      barrier_expect(full.at(n), 2 * kTileBytes + 2 * kTermBytes);
#pragma unroll
      for (int panel = 0; panel < kDim / 64; ++panel) {
        copy_box(shared_address(shared.query[stage]) + panel * (kShape.queries * 128), &maps.query, full.at(n), panel * 64,
                 first_query, head, batch);
      }
      const int64_t terms = (batch * p.heads + head) * call.padded_queries + first_query;
      copy_bytes(shared_address(shared.lse2[stage]), call.lse2 + terms, kTermBytes, full.at(n));
#pragma unroll
      for (int panel = 0; panel < kDim / 64; ++panel) {
        copy_box(shared_address(shared.grad_out[stage]) + panel * (kShape.queries * 128), &maps.grad_out, full.at(n), panel * 64,
                 first_query, head, batch);
      }
      copy_bytes(shared_address(shared.delta[stage]), call.delta + terms, kTermBytes, full.at(n));
      ++n;
    };

    for (int head = first_head; head < first_head + work.heads; ++head) {
      if (!mask.tiles.data) {
        // Each tile begins elsewhere, so that blocks do not all add to the same rows of grad_query at the same time.
        const int first = from / kShape.queries, chunks = (to + kShape.queries - 1) / kShape.queries - first;
        for (int i = 0, at = chunks > 0 ? first_key / kBackwardKeys % chunks : 0; i < chunks; ++i) {
          send((first + at) * kShape.queries, head, nullptr);
          if (++at == chunks) at = 0;
        }
        continue;
      }
      const TileSource source(mask, batch, head);
      const int tile_q = static_cast<int>(mask.tile_q), tile_k = static_cast<int>(mask.tile_k);
      const int tiles_q = static_cast<int>(mask.tiles_q), tiles_k = static_cast<int>(mask.tiles_k);
      const int tile_column = first_key / tile_k;
      const int32_t *const list = source.columns + tile_column * (tiles_q + 1) + 1, *const states = source.tiles + tile_column;
      const int entries = min(max(list[-1], 0), tiles_q);
      int coming = 0, coming_state = kTileEmpty;
      auto fetch = [&](int entry) {  // one entry ahead, so that its latency is hidden
        coming = entry < entries ? list[entry] : -1;
        coming_state = coming >= 0 && coming < tiles_q ? states[coming * tiles_k] : kTileEmpty;
      };
      fetch(0);
      for (int entry = 0; entry < entries; ++entry) {
        const int first = coming * tile_q, state = coming_state;
        fetch(entry + 1);
        if (!is_live_tile(mask, state)) continue;
        const uint32_t* const bits = bits_of_tile(mask, state);
        const int begin = max(first, from / kShape.queries * kShape.queries), end = min(first + tile_q, to);
        for (int query = begin; query < end; query += kShape.queries) {
          send(query, head, bits ? bits + (query - first) * (tile_k / 32) + first_key % tile_k / 32 : nullptr);
        }
      }
    }
    empty.wait_empty(n);
    shared.query_notes[n % BackwardShared<kDim, kVariant>::kQueryNotes].ends_turn = true;
    barrier_arrive(full.at(n));
    ++n;
    barrier_arrive(key_empty.at(turn));
  }
}

}  // namespace dmattn::cuda::sm90
