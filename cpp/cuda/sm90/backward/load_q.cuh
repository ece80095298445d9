// The thread of the Hopper backward that loads the chunks of queries that see a tile of keys.
#pragma once

#include "../../common/visibility.cuh"
#include "../../ptx/tma.cuh"
#include "shared.cuh"

namespace dmattn::cuda::sm90 {

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

// Skips groups of rows of a block mask that have no live tile in this column: returns a row from `row` to `last` before which
// none is live. Many loads are in flight.
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

// Where sums have a fixed order and keys are in order: true if tiles of keys may skip chunks of queries that later tiles of keys
// process.
__device__ __forceinline__ bool leaves_out_chunks(const MaskParams& mask) {
  return mask.tiles.data || mask.start.data || mask.end.data;
}

// query, grad_out [B, H, Sq, D or Dv], lse2, delta [B, H, padded_queries] -> chunks of queries in shared memory for every
// tile visit, with descriptors. By one thread.
template <int kDim, class Traits>
__device__ __forceinline__ void load_queries(const BackwardCall& call, const BackwardWork& work, const BackwardMaps& maps,
                                             BackwardShared<kDim, Traits::kHasOptions>& shared) {
  using Shared = BackwardShared<kDim, Traits::kHasOptions>;
  constexpr BackwardShape kShape = Shared::kShape;
  constexpr int kQueries = kShape.queries;
  const AttentionParams& p = call.b.forward;
  const MaskParams& mask = p.mask;
  const Ring<Shared::kKeyDescriptors> descriptor_full{shared_address(shared.descriptor_full)},
      descriptor_empty{shared_address(shared.descriptor_empty)};
  const Ring<kShape.query_stages> full{shared_address(shared.query_full)}, empty{shared_address(shared.query_empty)};
  Ring<kShape.query_stages> grad_out_full = full;
  if constexpr (Shared::kSplitsChunks) grad_out_full.base = shared_address(shared.grad_out_full);
  uint32_t& tile_visit = shared.query_tile_visit;  // in shared memory, because registers are short
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
      const uint32_t* bits = Traits::kIsDense ? nullptr : bits_of_tile(mask, state);
      const int words = static_cast<int>(mask.tile_k) / 32;
      if (bits) bits += row_in_tile * words + descriptor.first_place / 32 % words;
      const int64_t row_offset = (descriptor.batch * p.heads + head) * call.padded_queries + first_query;
      shared.query_descriptors[n % Shared::kQueryDescriptors] = {
          bits,        call.query_sums + row_offset * sum_width(p.head_dim),
          first_query, head,
          false,       !is_whole || bits || Traits::kIsUnion,
          !is_whole,   (shared.row_flags & kBadRows) != 0};
      constexpr int kTileBytes = kQueries * kDim * 2, kTermBytes = kQueries * 4;
      const bool has_hashes = Traits::kHasOptions && call.row_hash;
      barrier_expect(full.at(n), (Shared::kSplitsChunks ? 1 : 2) * kTileBytes + (has_hashes ? 3 : 2) * kTermBytes);
      if (Shared::kSplitsChunks) barrier_expect(grad_out_full.at(n), kTileBytes);
      copy_bytes(shared_address(shared.lse2[stage]), call.lse2 + row_offset, kTermBytes, full.at(n));
      copy_bytes(shared_address(shared.delta[stage]), call.delta + row_offset, kTermBytes, full.at(n));
      if constexpr (Traits::kHasOptions) {
        if (has_hashes) copy_bytes(shared_address(shared.row_hash[stage]), call.row_hash + row_offset, kTermBytes, full.at(n));
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
    // head, causality would make each tile of keys wait for the semaphore of the tile before it. Where tile visits leave out
    // chunks, heads may differ in those, so chunks are taken head by head from the first to the last.
    const bool has_semaphores = !Traits::kGathers && call.semaphores,
               takes_heads_together = has_semaphores && !leaves_out_chunks(mask);
#pragma unroll 1
    for (int head = descriptor.head; head < descriptor.head + work.heads; ++head) {
      const bool has_blocks = !Traits::kGathers && !Traits::kIsDense && mask.tiles.data;
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
        // Without a block mask each tile visit starts at a rotated chunk, so that blocks do not add to the same rows of
        // grad_query at the same time.
        int chunks = (stop - first + kQueries - 1) / kQueries;
        asm volatile("" : "+r"(chunks));  // so that the compiler does not keep stop - first
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

}  // namespace dmattn::cuda::sm90
