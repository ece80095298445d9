// What the warpgroups of a backward block share, and the warps that load: half a warpgroup brings tiles of keys and values, one
// thread of the other half the chunks of queries that see them. Another warp of that half handles the semaphores, where sums
// have a fixed order.
//
// A tile of keys stays for one tile visit: while all the queries that see it pass or, where live keys are gathered, those of one
// segment. A tile visit ends with a descriptor that brings no queries.
#pragma once

#include "forward_load.cuh"

namespace dmattn::cuda::sm90 {

// A tile of keys and the queries that see it.
struct KeyDescriptor {
  int batch, head, kv_head;  // head: the first of the head group; -1: the work is done, no tile visit begins
  int first_place;           // of the tile, among all keys or, where keys are gathered, in their list
  int from, to;              // the queries [from, to) of the tile visit
  // For each warp that loads keys: of its keys' spans the smallest and the largest first, the smallest and the largest last.
  int bounds[kLoaders / 32][4];
  alignas(16) int32_t index[kBackwardKeys];  // by index_place; -1 for none
  alignas(8) Seen span[kBackwardKeys];
};

// A chunk of queries, or the end of a tile visit.
struct QueryDescriptor {
  const uint32_t* bits;  // those of the first query, from the tile's first key on; null: no bits have to be tested
  float* sums;           // of grad_query
  int first_query, head;
  bool ends_tile_visit;
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
  static constexpr int kKeyDescriptors = 2;     // the next tile visit's queries are loaded before this tile visit has ended
  static constexpr int kQueryDescriptors = 8;   // a descriptor is read until the chunk after it has been computed
  static_assert(kQueryDescriptors > kShape.query_stages + 2);
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
  KeyDescriptor key_descriptors[kKeyDescriptors];
  QueryDescriptor query_descriptors[kQueryDescriptors];
  uint32_t work_tile, query_tile_visit;  // the work tile taken last; the tile visit whose queries are loaded
  int row_flags;                         // a copy
  uint64_t descriptor_full[kKeyDescriptors], descriptor_empty[kKeyDescriptors];
  uint64_t key_full, value_full, tile_empty;
  uint64_t query_full[kShape.query_stages], query_empty[kShape.query_stages];
  uint64_t score_full[2], score_empty[2];
  uint64_t semaphore_acquired, semaphore_released;  // fixed order of sums: the computing warps may add; they have added
  uint64_t tile_visit_loaded;                       // all queries of a tile visit have been asked for
};

inline constexpr int kLoadBarrier = 1, kClearBarrier = 2;  // of the loading and of the computing warps; 0 is the whole block's

inline constexpr int kComputingThreads = kConsumers * kWarpgroup;

// Sets up the barriers between the warps that load and those that compute. By one thread.
template <class Shared>
__device__ __forceinline__ void init_barriers_of_loads(Shared& shared, bool has_semaphores) {
  for (int i = 0; i < Shared::kKeyDescriptors; ++i) {
    barrier_init(shared_address(&shared.descriptor_full[i]), kLoaders);
    barrier_init(shared_address(&shared.descriptor_empty[i]), kComputingThreads + (has_semaphores ? 2 : 1));
  }
  barrier_init(shared_address(&shared.semaphore_acquired), 1);
  barrier_init(shared_address(&shared.tile_visit_loaded), 1);
  barrier_init(shared_address(&shared.semaphore_released), kComputingThreads);
  barrier_init(shared_address(&shared.key_full), kLoaders);
  barrier_init(shared_address(&shared.value_full), kLoaders);
  barrier_init(shared_address(&shared.tile_empty), kComputingThreads);
  for (int i = 0; i < Shared::kShape.query_stages; ++i) {
    barrier_init(shared_address(&shared.query_full[i]), 1);
    barrier_init(shared_address(&shared.query_empty[i]), kComputingThreads);
  }
}

// Waits until `value` tiles of keys have added to a chunk of queries. What they added is visible then.
__device__ __forceinline__ void wait_dq_semaphore(const int32_t* counter, int value) {
  int reached;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(reached) : "l"(counter) : "memory");
  } while (reached != value);
}
// Counts one more tile, after all that is known to have been added.
__device__ __forceinline__ void release_dq_semaphore(int32_t* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

// Waits until the list before has added its keys up to last_key, and says that this one has added its own before next_key.
__device__ __forceinline__ void wait_dkdv_semaphore(const int32_t* next_key, int last_key) {
  int reached;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(reached) : "l"(next_key) : "memory");
  } while (reached <= last_key);
}
__device__ __forceinline__ void release_dkdv_semaphore(int32_t* to, int next_key) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(next_key) : "memory");
}

// key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv] -> a tile of 128 keys [keys, D or Dv] in shared memory for each tile visit, with a
// descriptor. By half a warpgroup.
template <int kDim, Variant kVariant>
__device__ __forceinline__ void load_keys(const BackwardCall& call, const BackwardWork& work, const BackwardMaps& maps,
                                          BackwardShared<kDim, has_options(kVariant)>& shared) {
  using Shared = BackwardShared<kDim, has_options(kVariant)>;
  constexpr int kKeys = Shared::kShape.keys;
  constexpr bool kIsGathered = gathers_keys(kVariant);
  const AttentionParams& p = call.b.forward;
  const Ring<Shared::kKeyDescriptors> descriptor_full{shared_address(shared.descriptor_full)},
      descriptor_empty{shared_address(shared.descriptor_empty)};
  const Ring<1> key_full{shared_address(&shared.key_full)}, value_full{shared_address(&shared.value_full)},
      tile_empty{shared_address(&shared.tile_empty)};
  uint32_t tile_visit = 0;

  // Begins a tile visit: writes the descriptor, then loads the tile. key_of(row) and span_of(row, key) are its keys, -1 for
  // none, and their spans. A tile without gaps is loaded in one piece.
  auto load = [&](const BackwardWorkTile& work_tile, int first_place, int from, int to, auto key_of, auto span_of) {
    const int thread = static_cast<int>(thread_index() % kLoaders);  // recomputed: registers are short
    descriptor_empty.producer_acquire(tile_visit);
    KeyDescriptor& descriptor = shared.key_descriptors[tile_visit % Shared::kKeyDescriptors];
    int bounds[4] = {kLastPosition, kFirstPosition, kLastPosition, kFirstPosition};
    bool has_gaps = kIsGathered;
#pragma unroll 1
    for (int row = thread; row < kKeys; row += kLoaders) {
      const int key = key_of(row);
      const Span span = key >= 0 ? span_of(row, key) : Span::empty();
      const bool is_key = span.first < span.last;
      has_gaps |= key < 0;
      descriptor.index[index_place<kKeys>(row)] = key < p.key_length ? key : -1;
      descriptor.span[row] = Seen::of(span);
      bounds[0] = min(bounds[0], is_key ? span.first : kLastPosition);
      bounds[1] = max(bounds[1], is_key ? span.first : kLastPosition);
      bounds[2] = min(bounds[2], is_key ? span.last : kFirstPosition);
      bounds[3] = max(bounds[3], is_key ? span.last : kFirstPosition);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int bound = i % 2 == 0 ? __reduce_min_sync(0xffffffffu, bounds[i]) : __reduce_max_sync(0xffffffffu, bounds[i]);
      if (thread % 32 == 0) descriptor.bounds[thread / 32][i] = bound;
    }
    if (thread == 0) {
      descriptor.batch = work_tile.batch, descriptor.head = work_tile.head, descriptor.kv_head = work_tile.kv_head;
      descriptor.first_place = first_place, descriptor.from = from, descriptor.to = to;
    }
    barrier_arrive(descriptor_full.at(tile_visit));
    has_gaps = group_any(kLoadBarrier, kLoaders, has_gaps);  // also waits until all of index is written
    tile_empty.producer_acquire(tile_visit);
    const auto bring = [&](const uint16_t* to, const CUtensorMap* map, const TensorView& tensor, int64_t width, uint32_t full) {
      const uint32_t tile = shared_address(to);
      if (has_gaps) {
        const char* const data = static_cast<const char*>(tensor.data) +
                                 (descriptor.batch * tensor.batch_stride + descriptor.kv_head * tensor.head_stride) * 2;
        gather_rows<kDim, kKeys, kLoaders, true, false, 1>(thread, tile, descriptor.index, kKeys, data,
                                                           static_cast<uint32_t>(tensor.row_stride * 2), static_cast<int>(width),
                                                           [] {});
        copy_async_commit();
      } else if (thread == 0) {
        barrier_expect(full, kKeys * kDim * 2);
#pragma unroll
        for (int panel = 0; panel < kDim / 64; ++panel) {
          copy_box(tile + panel * (kKeys * 128), map, full, panel * 64, first_place, descriptor.kv_head, descriptor.batch);
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
    ++tile_visit;
  };

  for (bool draws = work.static_work_tiles == 0;; draws = true) {
    // Take the block's statically scheduled work tile, or the next one by the counter.
    uint32_t number = blockIdx.x;
    if (draws) {
      if (thread_index() % kLoaders == 0) {
        shared.work_tile = work.tile_counter
                               ? work.static_work_tiles + static_cast<uint32_t>(atomicAdd(opaque_reload(&work)->tile_counter, 1))
                               : work.work_tiles;
      }
      group_sync(kLoadBarrier, kLoaders);
      number = shared.work_tile;
      group_sync(kLoadBarrier, kLoaders);
    }
    if (number >= work.work_tiles) break;
    const BackwardWorkTile work_tile(*opaque_reload(&p), *opaque_reload(&work), number);
    const int query_length = static_cast<int>(p.query_length);
    if constexpr (kIsGathered) {
      const LiveKeys& live_keys = opaque_reload(&call)->live_keys;
      const int64_t mask_head = live_keys.mask_head_of(work_tile.batch, work_tile.head);
      const int shift = live_keys.shift[mask_head], segment = work.tiles / work.shares - 1 - work_tile.tile / work.shares;
      if (segment < segments_at(query_length, shift)) {
        const int2 list = live_keys.lists[mask_head * live_keys.most_lists + segment];
        const int64_t begin = mask_head * live_keys.capacity + list.x;
        const int to = static_cast<int>(min(p.query_length, (static_cast<int64_t>(segment + 1) * kSegmentQueries) << shift));
#pragma unroll 1
        for (int base = work_tile.tile % work.shares * kKeys; base < list.y; base += work.shares * kKeys) {
          load(
              work_tile, base, first_query_of(segment, shift), to,
              [&](int row) { return base + row < list.y ? opaque_reload(&call)->live_keys.index[begin + base + row] : -1; },
              [&](int row, int) { return Span::of(opaque_reload(&call)->live_keys.span[begin + base + row]); });
        }
      }
    } else {
      const int first_key = work_tile.tile * kKeys;
      load(
          work_tile, first_key, 0, query_length,
          [&](int row) {
            if (!call.seen) return first_key + row;
            const int seen_row = (work_tile.batch * static_cast<int>(p.heads) + work_tile.head) / call.heads_at_once;
            return has_bit(call.seen[seen_row * call.seen_words + (first_key + row) / 32], row % 32) ? first_key + row : -1;
          },
          [&](int, int key) {
            return SpanSource(p.mask, static_cast<int>(p.key_length), work_tile.batch, work_tile.head).of_key(key);
          });
    }
    // Wait until the next draw is due (BackwardWork::draws_late). What is left to compute hides its latency.
    if (kIsGathered && opaque_reload(&call)->semaphores) {
      tile_empty.producer_acquire(tile_visit);
    } else if (opaque_reload(&work)->draws_late) {
      Ring<1>{shared_address(&shared.tile_visit_loaded)}.producer_acquire(tile_visit);
    }
  }
  descriptor_empty.producer_acquire(tile_visit);
  if (thread_index() % kLoaders == 0) shared.key_descriptors[tile_visit % Shared::kKeyDescriptors].head = -1;
  barrier_arrive(descriptor_full.at(tile_visit));
}

// The queries [from, to) that see a key of the tile with this descriptor. `from` is rounded down to a multiple of kQueries.
template <int kQueries>
struct QueriesOfTileVisit {
  int from, to;

  __device__ __forceinline__ QueriesOfTileVisit(const AttentionParams& p, const KeyDescriptor& descriptor) {
    const int shift = static_cast<int>(p.key_length - p.query_length);
    from = max(descriptor.from, min(descriptor.bounds[0][0], descriptor.bounds[1][0]) - shift) / kQueries * kQueries;
    to = min(descriptor.to, max(descriptor.bounds[0][3], descriptor.bounds[1][3]) - shift);
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

// Where sums have a fixed order and keys are in order: may tile visits leave out chunks that a later tile of keys sees?
__device__ __forceinline__ bool leaves_out_chunks(const MaskParams& mask) {
  return mask.tiles.data || mask.start.data || mask.end.data;
}

// query, grad_out [B, H, Sq, D or Dv], lse2, delta [B, H, padded_queries] -> chunks of queries in shared memory for every
// tile visit, with descriptors. By one thread.
template <int kDim, Variant kVariant>
__device__ __forceinline__ void load_queries(const BackwardCall& call, const BackwardWork& work, const BackwardMaps& maps,
                                             BackwardShared<kDim, has_options(kVariant)>& shared) {
  using Shared = BackwardShared<kDim, has_options(kVariant)>;
  constexpr BackwardShape kShape = Shared::kShape;
  constexpr int kQueries = kShape.queries;
  const AttentionParams& p = call.b.forward;
  const MaskParams& mask = p.mask;
  const Ring<Shared::kKeyDescriptors> descriptor_full{shared_address(shared.descriptor_full)},
      descriptor_empty{shared_address(shared.descriptor_empty)};
  const Ring<kShape.query_stages> full{shared_address(shared.query_full)}, empty{shared_address(shared.query_empty)};
  Ring<kShape.query_stages> grad_out_full = full;
  if constexpr (Shared::kSplitsChunks) grad_out_full.base = shared_address(shared.grad_out_full);
  uint32_t& tile_visit = shared.query_tile_visit;  // not in a register, because those are short
  uint32_t n = 0;
  for (tile_visit = 0;; ++tile_visit) {
    descriptor_full.sleep_full(tile_visit);
    const KeyDescriptor& descriptor = shared.key_descriptors[tile_visit % Shared::kKeyDescriptors];
    if (descriptor.head < 0) return;
    const int shift = static_cast<int>(p.key_length - p.query_length);
    const auto [from, to] = QueriesOfTileVisit<kQueries>(p, descriptor);

    auto send = [&](int first_query, int head, int state, int row_in_tile) {
      const uint32_t stage = n % kShape.query_stages;
      empty.producer_acquire(n);
      const int low = first_query + shift;
      const int high = min(first_query + kQueries, static_cast<int>(p.query_length)) - 1 + shift;
      const bool is_whole = max(descriptor.bounds[0][1], descriptor.bounds[1][1]) <= low &&
                            high < min(descriptor.bounds[0][2], descriptor.bounds[1][2]);
      const uint32_t* bits = is_dense(kVariant) ? nullptr : bits_of_tile(mask, state);
      const int words = static_cast<int>(mask.tile_k) / 32;
      if (bits) bits += row_in_tile * words + descriptor.first_place / 32 % words;
      const int64_t terms = (descriptor.batch * p.heads + head) * call.padded_queries + first_query;
      shared.query_descriptors[n % Shared::kQueryDescriptors] = {bits,        call.query_sums + terms * sum_width(p.head_dim),
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
                 head, descriptor.batch);
      }
#pragma unroll
      for (int panel = 0; panel < kDim / 64; ++panel) {
        copy_box(shared_address(shared.grad_out[stage]) + panel * (kQueries * 128), &maps.grad_out, grad_out_full.at(n),
                 panel * 64, first_query, head, descriptor.batch);
      }
      ++n;
    };

    // Where sums have a fixed order, chunks are taken from the last to the first, and each for all heads of the group: head by
    // head, causality would let each tile of keys catch up with the one that it follows. Where tile visits leave out chunks,
    // heads may differ in those, so chunks are taken head by head from the first to the last.
    const bool has_semaphores = !gathers_keys(kVariant) && call.semaphores,
               takes_heads_together = has_semaphores && !leaves_out_chunks(mask);
#pragma unroll 1
    for (int head = descriptor.head; head < descriptor.head + work.heads; ++head) {
      const bool has_blocks = !gathers_keys(kVariant) && !is_dense(kVariant) && mask.tiles.data;
      const TileSource source(mask, descriptor.batch, head);
      const int tile_q = static_cast<int>(mask.tile_q), tiles_q = static_cast<int>(mask.tiles_q);
      const int tile_column = has_blocks ? descriptor.first_place / static_cast<int>(mask.tile_k) : 0;
      const int32_t* const list = source.columns + tile_column * (tiles_q + 1);
      // The list may have any order.
      const int entries = !has_blocks ? 1 : has_semaphores ? tiles_q : min(list[0], tiles_q);
#pragma unroll 1
      for (int entry = 1; entry <= entries; ++entry) {
        // Find the queries [first, stop): all of the tile visit, or those of a tile of the block mask.
        int state = kTileFull, first = from, stop = to, first_of_tile = 0;
        if (has_blocks) {
          if (has_semaphores) entry = skip_dead_rows(mask, source.tiles, entry - 1, tiles_q - 1, tile_column) + 1;
          const int row = has_semaphores ? entry - 1 : list[entry];
          state = row >= 0 && row < tiles_q ? source.tiles[row * static_cast<int>(mask.tiles_k) + tile_column] : kTileEmpty;
          if (!is_live_tile(mask, state)) continue;
          first_of_tile = row * tile_q, first = max(first_of_tile, from), stop = min(first_of_tile + tile_q, to);
        }
        // Without a block mask each tile visit begins with another chunk, so that blocks do not add to the same rows of
        // grad_query at the same time.
        int chunks = (stop - first + kQueries - 1) / kQueries;
        asm volatile("" : "+r"(chunks));  // so that the difference need not be kept
        int at = !has_blocks && !has_semaphores && chunks > 0 ? descriptor.first_place / kShape.keys % chunks : 0;
        if (takes_heads_together) at = chunks - 1;
#pragma unroll 1
        for (int left = chunks; left > 0;) {
          send(first + at * kQueries, head, state, first + at * kQueries - first_of_tile);
          if (takes_heads_together) {
            if (++head < descriptor.head + work.heads) continue;
            head = descriptor.head;
          }
          --left;
          at = takes_heads_together ? at - 1 : at + 1 < chunks ? at + 1 : 0;
        }
        if (takes_heads_together) head += work.heads;
      }
    }
    empty.producer_acquire(n);
    shared.query_descriptors[n % Shared::kQueryDescriptors].ends_tile_visit = true;
    barrier_arrive(full.at(n));
    if (Shared::kSplitsChunks) barrier_arrive(grad_out_full.at(n));
    ++n;
    barrier_arrive(descriptor_empty.at(tile_visit));
    barrier_arrive(shared_address(&shared.tile_visit_loaded));
  }
}

// Where sums have a fixed order: waits for the semaphores of the block's tiles of keys, tells the computing warps when they may
// add, and releases the semaphores when they have added. By one warp, whose first thread alone does this.
//
// Keys in order: each chunk of queries has a dq semaphore, which counts the tiles of keys that have added to the chunk's
// grad_query. Tiles add from the first to the last. Without a mask every tile begins with the last chunk, which causality lets
// all of them see, and follows the tile before it, so that tiles reach a chunk in their order.
//
// Under a block mask only tiles of keys whose tile of the mask is live add to a chunk, and the warp counts how many of them are
// before this one. Under intervals alone all tiles count at all chunks. Where a tile leaves out a chunk, the warp releases the
// semaphore without adding, 32 chunks at a time. No other tile waits at chunks that causality leaves out, except for those of a
// tile without a visible key.
//
// Gathered keys: one block has the whole list of a segment, so no other block adds to its grad_query. The dkdv semaphore orders
// the adds to grad_key and grad_value: the lists of a head add a key from the last segment to the first. Lists are in key order.
// In front of a key that two of them share, that of the later segment has fewer keys, because more have died. So it reaches that
// key first.
template <int kDim, Variant kVariant>
__device__ __forceinline__ void run_semaphore_warp(const BackwardCall& call, const BackwardWork& work,
                                                   BackwardShared<kDim, has_options(kVariant)>& shared, int lane) {
  using Shared = BackwardShared<kDim, has_options(kVariant)>;
  constexpr BackwardShape kShape = Shared::kShape;
  constexpr int kQueries = kShape.queries;
  static_assert(Shared::kPieces * kSemaphoreQueries <= kShape.queries && kShape.queries % kSemaphoreQueries == 0);
  const AttentionParams& p = call.b.forward;
  const MaskParams& mask = p.mask;
  const Ring<Shared::kKeyDescriptors> descriptor_full{shared_address(shared.descriptor_full)},
      descriptor_empty{shared_address(shared.descriptor_empty)};
  const Ring<1> begun{shared_address(&shared.semaphore_acquired)}, ended{shared_address(&shared.semaphore_released)};
  const bool leaves_out = !gathers_keys(kVariant) && leaves_out_chunks(mask);
  if (lane > 0 && !leaves_out) return;
  uint32_t n = 0;
  for (uint32_t tile_visit = 0;; ++tile_visit) {
    descriptor_full.sleep_full(tile_visit);
    const KeyDescriptor& descriptor = shared.key_descriptors[tile_visit % Shared::kKeyDescriptors];
    if (descriptor.head < 0) return;
    if constexpr (gathers_keys(kVariant)) {
      const LiveKeys& live_keys = call.live_keys;
      const int64_t mask_head = live_keys.mask_head_of(descriptor.batch, descriptor.head);
      const int shift = live_keys.shift[mask_head], segment = segment_of(descriptor.from, shift);
      const int2* const lists = live_keys.lists + mask_head * live_keys.most_lists;
      const int2 list = lists[segment];
      const int32_t* const index = live_keys.index + mask_head * live_keys.capacity + list.x;
      int32_t* const semaphore =
          call.semaphores + (descriptor.batch * static_cast<int>(p.kv_heads) + descriptor.kv_head) * work.tiles + segment;
      const int stop = descriptor.first_place + kShape.keys;
      // An empty list has no key of a later one either.
      if (segment + 1 < segments_at(static_cast<int>(p.query_length), shift) && lists[segment + 1].y > 0) {
        wait_dkdv_semaphore(semaphore + 1, index[min(stop, list.y) - 1]);
      }
      barrier_arrive(begun.at(tile_visit));
      ended.sleep_full(tile_visit);
      release_dkdv_semaphore(semaphore, stop < list.y ? index[stop] : kLastPosition);
      barrier_arrive(descriptor_empty.at(tile_visit));
      continue;
    }
    const QueriesOfTileVisit<kQueries> queries(p, descriptor);
    const int tile = descriptor.first_place / kShape.keys;
    const auto semaphores_of = [&](int head) {
      return call.semaphores + (descriptor.batch * p.heads + head) * call.padded_queries / kSemaphoreQueries;
    };
    // Lets the computing warps add to a chunk when `before` tiles have added.
    const auto take = [&](int32_t* semaphore, int before) {
#pragma unroll 1
      for (int piece = 0; piece < Shared::kPieces; ++piece, ++n, ++semaphore) {
        wait_dq_semaphore(semaphore, before);
        barrier_arrive(begun.at(n));
        ended.sleep_full(n);
        release_dq_semaphore(semaphore);
      }
    };
    if (!leaves_out) {
#pragma unroll 1
      for (int chunk = queries.chunks() - 1; chunk >= 0; --chunk) {
#pragma unroll 1
        for (int head = descriptor.head; head < descriptor.head + work.heads; ++head) {
          take(semaphores_of(head) + (queries.from + chunk * kQueries) / kSemaphoreQueries, tile);
        }
      }
      barrier_arrive(descriptor_empty.at(tile_visit));
      continue;
    }
    const bool has_blocks = !is_dense(kVariant) && mask.tiles.data, is_empty = queries.from >= queries.to;
    const bool has_intervals = mask.start.data || mask.end.data;
#pragma unroll 1
    for (int head = descriptor.head; head < descriptor.head + work.heads; ++head) {
      // Releases the semaphores of the chunks in [first, stop) without adding.
      const auto pass = [&](int first, int stop, int before) {
#pragma unroll 1
        for (int query = first + lane * kQueries; query < stop && (is_empty || has_intervals); query += 32 * kQueries) {
          int32_t* const semaphore = semaphores_of(head) + query / kSemaphoreQueries;
#pragma unroll 1
          for (int piece = 0; piece < Shared::kPieces; ++piece) {
            wait_dq_semaphore(semaphore + piece, before);
            release_dq_semaphore(semaphore + piece);
          }
        }
        __syncwarp();
      };
#pragma unroll 1
      for (int row = 0; row < (has_blocks ? static_cast<int>(mask.tiles_q) : 1); ++row) {
        // Find the queries [first, stop) whose chunks the tile counts at, and how many tiles add before it.
        int first = 0, stop = static_cast<int>(p.query_length), before = tile;
        if (has_blocks) {
          const int32_t* states = row_of<const int32_t>(mask.tiles, descriptor.batch, head);
          const int tile_q = static_cast<int>(mask.tile_q), tile_k = static_cast<int>(mask.tile_k);
          const int column = descriptor.first_place / tile_k;
          row = skip_dead_rows(mask, states, row, static_cast<int>(mask.tiles_q) - 1, column);
          states += row * static_cast<int>(mask.tiles_k);
          if (!is_live_tile(mask, states[column])) continue;
          int live = 0;
#pragma unroll 4
          for (int at = lane; at < column; at += 32) live += is_live_tile(mask, states[at]) ? 1 : 0;
          before = __reduce_add_sync(0xffffffffu, live) * (tile_k / kShape.keys) + descriptor.first_place % tile_k / kShape.keys;
          first = row * tile_q, stop = min(first + tile_q, stop);
        }
        // Without intervals all live tiles before this one see the queries from this tile's first key on, and no tile waits for
        // the semaphores in front of that.
        const int shift = static_cast<int>(p.key_length - p.query_length);
        if (mask.is_causal && !has_intervals) first = max(first, max(descriptor.first_place - shift, 0) / kQueries * kQueries);
        // The tile sees those of [query, to).
        int query = is_empty ? stop : min(max(queries.from, first), stop);
        const int to = min(queries.to, stop);
        pass(first, query, before);
#pragma unroll 1
        for (; query < to; query += kQueries) {
          if (lane == 0) take(semaphores_of(head) + query / kSemaphoreQueries, before);
        }
        __syncwarp();  // the other threads release no semaphore while the first thread waits for one
        pass(query, stop, before);
      }
    }
    __syncwarp();  // no thread may still be reading a descriptor that the first one gives back
    if (lane == 0) barrier_arrive(descriptor_empty.at(tile_visit));
  }
}

}  // namespace dmattn::cuda::sm90
