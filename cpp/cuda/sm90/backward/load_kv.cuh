// The warps of the Hopper backward that load tiles of keys and values.
#pragma once

#include "../../common/visibility.cuh"
#include "../../ptx/tma.cuh"
#include "../gather.cuh"
#include "shared.cuh"

namespace dmattn::cuda::sm90 {

// Begins a tile visit: writes the descriptor, then loads the tile. key_of(row) and span_of(row, key) are its keys, -1 for none,
// and their spans. A tile without gaps is loaded in one piece.
template <int kDim, class Traits, class KeyOf, class SpanOf>
__device__ __forceinline__ void load_key_tile(const BackwardCall& call, const BackwardMaps& maps,
                                              BackwardShared<kDim, Traits::kHasOptions>& shared, uint32_t& tile_visit,
                                              const BackwardWorkTile& work_tile, int first_place, int from, int to,
                                              const KeyOf& key_of, const SpanOf& span_of) {
  using Shared = BackwardShared<kDim, Traits::kHasOptions>;
  constexpr int kKeys = Shared::kShape.keys;
  const AttentionParams& p = call.b.forward;
  const Ring<Shared::kKeyDescriptors> descriptor_full{shared_address(shared.descriptor_full)},
      descriptor_empty{shared_address(shared.descriptor_empty)};
  const Ring<1> key_full{shared_address(&shared.key_full)}, value_full{shared_address(&shared.value_full)},
      tile_empty{shared_address(&shared.tile_empty)};
  const int thread = static_cast<int>(thread_index() % kLoaders);  // recomputed: registers are short
  descriptor_empty.producer_acquire(tile_visit);
  KeyDescriptor& descriptor = shared.key_descriptors[tile_visit % Shared::kKeyDescriptors];
  int bounds[4] = {kLastPosition, kFirstPosition, kLastPosition, kFirstPosition};
  bool has_gaps = Traits::kGathers;
#pragma unroll 1
  for (int row = thread; row < kKeys; row += kLoaders) {
    const int key = key_of(row);
    const Span span = key >= 0 ? span_of(row, key) : Span::empty();
    const bool is_key = span.first < span.last;
    has_gaps |= key < 0;
    descriptor.index[index_place<kKeys>(row)] = key < p.key_length ? key : -1;
    descriptor.span[row] = Seen::of(span);
    if constexpr (Traits::kIsUnion) {
      const KeyUnions& unions = opaque_reload(&call)->live_keys.unions;
      const int64_t list = unions.list_of(work_tile.batch, work_tile.head, from);
      const uint32_t* const seen = unions.seen_of(list) + first_place + row;
      // Two words of 64 queries, or four of 128 (plan_unions_of_part).
      const auto word = [&](int i) { return key >= 0 && i < unions.words ? seen[i * unions.capacity] : 0u; };
      *reinterpret_cast<uint4*>(descriptor.union_seen[row]) = {word(0), word(1), word(2), word(3)};
    }
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
}

// key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv] -> a tile of 128 keys [keys, D or Dv] in shared memory for each tile visit, with a
// descriptor. By half a warpgroup.
template <int kDim, class Traits>
__device__ __forceinline__ void load_keys(const BackwardCall& call, const BackwardWork& work, const BackwardMaps& maps,
                                          BackwardShared<kDim, Traits::kHasOptions>& shared) {
  using Shared = BackwardShared<kDim, Traits::kHasOptions>;
  constexpr int kKeys = Shared::kShape.keys;
  constexpr bool kIsGathered = Traits::kGathers;
  const AttentionParams& p = call.b.forward;
  const Ring<Shared::kKeyDescriptors> descriptor_full{shared_address(shared.descriptor_full)},
      descriptor_empty{shared_address(shared.descriptor_empty)};
  const Ring<1> tile_empty{shared_address(&shared.tile_empty)};
  uint32_t tile_visit = 0;
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
    if constexpr (Traits::kIsUnion) {
      const KeyUnions& unions = opaque_reload(&call)->live_keys.unions;
      const int from = (unions.first_tile + work.tiles / work.shares - 1 - work_tile.tile / work.shares) * unions.queries;
      const int64_t list = unions.list_of(work_tile.batch, work_tile.head, from), begin = list * unions.capacity;
      const int count = unions.count[list], to = min(query_length, from + unions.queries);
#pragma unroll 1
      for (int base = work_tile.tile % work.shares * kKeys; base < count; base += work.shares * kKeys) {
        load_key_tile<kDim, Traits>(
            call, maps, shared, tile_visit, work_tile, base, from, to,
            [&](int row) { return base + row < count ? opaque_reload(&call)->live_keys.unions.key[begin + base + row] : -1; },
            // Of two groups of queries: the span begins at the first that sees the key and ends behind the last.
            [&](int row, int) {
              const KeyUnions& unions = opaque_reload(&call)->live_keys.unions;
              Span span = {kFirstPosition, kLastPosition};
              if (unions.groups == 1) return span;
              static_assert(kBackwardUnionWords == 4);  // two for each group
              const uint32_t* const seen = unions.seen_of(list) + base + row;
              const int middle = from + unions.queries / 2 + static_cast<int>(p.key_length - p.query_length);
              if ((seen[0] | seen[unions.capacity]) == 0) span.first = middle;
              if ((seen[2 * unions.capacity] | seen[3 * unions.capacity]) == 0) span.last = middle;
              return span;
            });
      }
    } else if constexpr (kIsGathered) {
      const LiveKeys& live_keys = opaque_reload(&call)->live_keys;
      const int64_t mask_head = live_keys.mask_head_of(work_tile.batch, work_tile.head);
      const int shift = live_keys.shift[mask_head], segment = work.tiles / work.shares - 1 - work_tile.tile / work.shares;
      if (segment < segments_at(query_length, shift)) {
        const int2 list = live_keys.lists[mask_head * live_keys.most_lists + segment];
        const int64_t begin = mask_head * live_keys.capacity + list.x;
        const int to = static_cast<int>(min(p.query_length, (static_cast<int64_t>(segment + 1) * kSegmentQueries) << shift));
#pragma unroll 1
        for (int base = work_tile.tile % work.shares * kKeys; base < list.y; base += work.shares * kKeys) {
          load_key_tile<kDim, Traits>(
              call, maps, shared, tile_visit, work_tile, base, first_query_of(segment, shift), to,
              [&](int row) { return base + row < list.y ? opaque_reload(&call)->live_keys.index[begin + base + row] : -1; },
              [&](int row, int) { return Span::of(opaque_reload(&call)->live_keys.span[begin + base + row]); });
        }
      }
    } else {
      int tile = work_tile.tile, from = 0, to = query_length;
      if constexpr (Traits::kGathersQueries) {
        // Late ranges of queries first, whose lists are long, and for each of them all tiles of keys.
        const QueryLists& lists = opaque_reload(&call)->live_keys.query_lists;
        from = (work.shares - 1 - tile / lists.tiles) * kRangeQueries, to = from + kRangeQueries, tile %= lists.tiles;
        const int64_t mask_head = lists.mask_head_of(work_tile.batch, work_tile.head);
        if (lists.first_entry(mask_head, tile, from) == lists.first_entry(mask_head, tile, to)) continue;
      }
      const int first_key = tile * kKeys;
      load_key_tile<kDim, Traits>(
          call, maps, shared, tile_visit, work_tile, first_key, from, to,
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

}  // namespace dmattn::cuda::sm90
