// The warp of the Hopper backward that gives sums a fixed order, by semaphores in global memory.
#pragma once

#include "../../common/key_semaphore.cuh"
#include "load_q.cuh"

namespace dmattn::cuda::sm90 {

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

// Lists of live keys: waits until the list of the next segment has added the keys of a tile visit, lets the computing warps add
// them, and releases the own semaphore of that segment.
template <int kKeys>
__device__ __forceinline__ void pass_list_semaphore(const BackwardCall& call, const AttentionParams& p, const BackwardWork& work,
                                                    const KeyDescriptor& descriptor, const Ring<1>& acquired,
                                                    const Ring<1>& released, uint32_t tile_visit) {
  const LiveKeys& live_keys = call.live_keys;
  const int64_t mask_head = live_keys.mask_head_of(descriptor.batch, descriptor.head);
  const int shift = live_keys.shift[mask_head], segment = segment_of(descriptor.from, shift);
  const int2* const lists = live_keys.lists + mask_head * live_keys.most_lists;
  const int2 list = lists[segment];
  const int32_t* const index = live_keys.index + mask_head * live_keys.capacity + list.x;
  int32_t* const semaphore =
      call.semaphores + (descriptor.batch * static_cast<int>(p.kv_heads) + descriptor.kv_head) * work.tiles + segment;
  const int stop = descriptor.first_place + kKeys;
  // An empty list has no key of a later one either.
  if (segment + 1 < segments_at(static_cast<int>(p.query_length), shift) && lists[segment + 1].y > 0) {
    wait_dkdv_semaphore(semaphore + 1, index[min(stop, list.y) - 1]);
  }
  barrier_arrive(acquired.at(tile_visit));
  released.sleep_full(tile_visit);
  release_dkdv_semaphore(semaphore, stop < list.y ? index[stop] : kLastPosition);
}

// Unions of index lists: tiles of queries form a chain, each follows the next later tile that has keys, its predecessor. Waits
// until the predecessor has added the keys of a tile visit, lets the computing warps add them, and releases the own semaphore.
template <int kKeys>
__device__ __forceinline__ void pass_union_semaphore(const BackwardCall& call, const AttentionParams& p,
                                                     const KeyDescriptor& descriptor, const Ring<1>& acquired,
                                                     const Ring<1>& released, uint32_t tile_visit) {
  const KeyUnions& unions = call.live_keys.unions;
  const int64_t list = unions.list_of(descriptor.batch, descriptor.head, descriptor.from);
  const int tile = descriptor.from / unions.queries - unions.first_tile, count = unions.count[list];
  const int32_t* const index = unions.key + list * unions.capacity;
  int32_t* const semaphores =
      call.semaphores + (descriptor.batch * static_cast<int>(p.kv_heads) + descriptor.kv_head) * unions.tiles;
  int next = 1;
  while (tile + next < unions.tiles && unions.count[list + next] == 0) ++next;
  const int32_t* const predecessor = tile + next < unions.tiles ? semaphores + tile + next : nullptr;
  const int stop = descriptor.first_place + kKeys;
  const bool is_last = stop >= count;
  if (predecessor) wait_dkdv_semaphore(predecessor, index[min(stop, count) - 1]);
  barrier_arrive(acquired.at(tile_visit));
  released.sleep_full(tile_visit);
  // The predecessor may have keys that this tile has not: they count as added when it has added them.
  int reached = kLastPosition;
  if (predecessor) reached = wait_dkdv_semaphore(predecessor, is_last ? kLastPosition - 1 : 0);
  release_dkdv_semaphore(semaphores + tile, min(is_last ? kLastPosition : index[stop], reached));
}

// Where sums have a fixed order: waits for the semaphores of the block's tiles of keys, tells the computing warps when they may
// add, and releases the semaphores when they have added. By one warp: its first thread alone, or all lanes where tiles skip
// chunks.
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
// (Unions of index lists likewise, with tiles of queries in place of segments.)
// In front of a key that two of them share, that of the later segment has fewer keys, because more have died. So it reaches that
// key first.
template <int kDim, class Traits>
__device__ __forceinline__ void run_semaphore_warp(const BackwardCall& call, const BackwardWork& work,
                                                   BackwardShared<kDim, Traits::kHasOptions>& shared, int lane) {
  using Shared = BackwardShared<kDim, Traits::kHasOptions>;
  constexpr BackwardShape kShape = Shared::kShape;
  constexpr int kQueries = kShape.queries;
  static_assert(Shared::kPieces * kSemaphoreQueries <= kShape.queries && kShape.queries % kSemaphoreQueries == 0);
  const AttentionParams& p = call.b.forward;
  const MaskParams& mask = p.mask;
  const Ring<Shared::kKeyDescriptors> descriptor_full{shared_address(shared.descriptor_full)},
      descriptor_empty{shared_address(shared.descriptor_empty)};
  const Ring<1> acquired{shared_address(&shared.semaphore_acquired)}, released{shared_address(&shared.semaphore_released)};
  const bool leaves_out = !Traits::kGathers && leaves_out_chunks(mask);
  if (lane > 0 && !leaves_out) return;
  uint32_t n = 0;
  for (uint32_t tile_visit = 0;; ++tile_visit) {
    descriptor_full.sleep_full(tile_visit);
    const KeyDescriptor& descriptor = shared.key_descriptors[tile_visit % Shared::kKeyDescriptors];
    if (descriptor.head < 0) return;
    if constexpr (Traits::kGathers) {
      if constexpr (Traits::kIsUnion) {
        pass_union_semaphore<kShape.keys>(call, p, descriptor, acquired, released, tile_visit);
      } else {
        pass_list_semaphore<kShape.keys>(call, p, work, descriptor, acquired, released, tile_visit);
      }
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
        barrier_arrive(acquired.at(n));
        released.sleep_full(n);
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
    const bool has_blocks = !Traits::kIsDense && mask.tiles.data, is_empty = queries.from >= queries.to;
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
