// Which tiles a call has, and in which order blocks take them.
//
// The one surprise is the end: where tiles meet few keys, the short ones of all heads come last, so that the blocks finish
// together.
#pragma once

#include "../attention_launch.h"

namespace dmattn::cuda::sm90 {

// The variants that walk a plan's lists; the general one only where a call has a plan.
template <Variant kVariant>
inline constexpr bool kMayHavePlan = kVariant == Variant::kGathered || kVariant == Variant::kGeneral;

// How the tiles of a call are numbered. A tile is 2^pack_shift heads that share their keys, each with `queries` queries.
struct WorkPlan {
  int tiles, queries;      // tiles of so many queries
  uint32_t packs;          // batches x packs of heads
  uint32_t section_packs;  // packs whose tiles are done together, so that their keys stay in L2
  int end_tiles;           // of queries, for all packs at the very end: the first queries, whose tiles causality makes short
  int pack_shift;
  int* ticket;  // tiles handed out beyond the first of each block, zero at the start; null: no block has a second
};

// One number per tile: heads in sections whose keys fit into L2, late queries first because causality makes them long, then
// heads; what comes at the very end is one section.
template <Variant kVariant>
struct WorkTile {
  int batch, head, first_query;

  __device__ __forceinline__ WorkTile(const ForwardCall& call, const WorkPlan& work, uint32_t item) {
    constexpr bool kHasEnd = kMayHavePlan<kVariant>;
    const uint32_t end_tiles = kHasEnd ? static_cast<uint32_t>(work.end_tiles) : 0,
                   tiles = static_cast<uint32_t>(work.tiles) - end_tiles;
    const bool is_end = kHasEnd && item >= tiles * work.packs;
    const uint32_t section = is_end ? 0 : item / (tiles * work.section_packs);
    const uint32_t rest = item - (is_end ? tiles * work.packs : section * tiles * work.section_packs);
    const uint32_t packs = is_end ? work.packs : min(work.section_packs, work.packs - section * work.section_packs);
    const uint32_t pack = section * work.section_packs + rest % packs;
    first_query = static_cast<int>(((is_end ? end_tiles : end_tiles + tiles) - 1 - rest / packs) * work.queries);
    const uint32_t packs_per_batch = static_cast<uint32_t>(call.p.heads) >> work.pack_shift;
    batch = static_cast<int>(pack / packs_per_batch);
    head = static_cast<int>(pack % packs_per_batch) << work.pack_shift;
  }
};

}  // namespace dmattn::cuda::sm90
