// The work tiles of a call, forward and backward, and the order in which blocks take them.
//
// Where tiles meet few keys, the short ones of all heads are last, so that the blocks finish together.
#pragma once

#include "../calls.h"
#include "tiles.h"

namespace dmattn::cuda::sm90 {

// How the tiles of a call are numbered. A tile is 2^log2_heads_per_tile heads that share their keys, each with `queries` queries.
struct ForwardWork {
  int tiles, queries;            // tiles of each head group, and how many queries a tile has
  int first_tile;                // the number of the first of them, where a launch has not all tiles of queries
  uint32_t head_groups;          // batches x groups of heads
  uint32_t section_head_groups;  // head groups whose tiles are done together, so that their keys stay in L2
  int end_tiles;  // of queries, for all head groups at the very end: the first queries, whose tiles causality makes short
  int log2_heads_per_tile;
  int* tile_counter;  // tiles taken beyond the first of each block, zero at the start; null: no block takes any
  bool is_static;     // block b takes the tiles b, b + blocks, ..., and none by the counter

  // A row of a tile is a (query, head) pair, the heads of a query one after the other: which head, and which query, counted from
  // the tile's first.
  __device__ __forceinline__ int head_of_row(int row) const { return row & ((1 << log2_heads_per_tile) - 1); }
  __device__ __forceinline__ int query_of_row(int row) const { return row >> log2_heads_per_tile; }
};

// A tile by its number. Numbers run over sections of head groups, whose keys fit into L2 together; in a section from late queries
// to early ones, because causality makes late tiles long; then over head groups. The tiles at the very end are one section.
template <class Traits>
struct WorkTile {
  int batch, head, first_query;

  __device__ __forceinline__ WorkTile(const ForwardCall& call, const ForwardWork& work, uint32_t work_tile) {
    constexpr bool kHasEnd = Traits::kMayGather;
    const uint32_t end_tiles = kHasEnd ? static_cast<uint32_t>(work.end_tiles) : 0,
                   tiles = static_cast<uint32_t>(work.tiles) - end_tiles;
    const bool is_end = kHasEnd && work_tile >= tiles * work.head_groups;
    const uint32_t section = is_end ? 0 : work_tile / (tiles * work.section_head_groups);
    const uint32_t rest = work_tile - (is_end ? tiles * work.head_groups : section * tiles * work.section_head_groups);
    const uint32_t head_groups =
        is_end ? work.head_groups : min(work.section_head_groups, work.head_groups - section * work.section_head_groups);
    const uint32_t head_group = section * work.section_head_groups + rest % head_groups;
    const uint32_t tile = (is_end ? end_tiles : end_tiles + tiles) - 1 - rest / head_groups;
    first_query = (static_cast<int>(tile) + (kHasEnd ? work.first_tile : 0)) * work.queries;
    const uint32_t head_groups_per_batch = static_cast<uint32_t>(call.p.heads) >> work.log2_heads_per_tile;
    batch = static_cast<int>(head_group / head_groups_per_batch);
    head = static_cast<int>(head_group % head_groups_per_batch) << work.log2_heads_per_tile;
  }
};

// How the work tiles of a call are numbered: `heads` query heads that share their keys and their mask make a head group, which
// has `tiles` work tiles, each a tile of keys in order, or a share of the list of a segment of the queries. A block visits
// the tiles of keys of a work tile one after the other.
struct BackwardWork {
  uint32_t work_tiles;
  int tiles;
  uint32_t head_groups;          // batches x groups of heads
  uint32_t section_head_groups;  // head groups whose queries and sums fit into L2 together
  int heads;
  int shares;  // work tiles that share the list of a segment, or of a tile of keys (a range of the queries each)
  // This many work tiles, the first ones, are scheduled statically: block b takes tile b. None where sums have a fixed order: a
  // block then waits for work tiles with smaller numbers, and their blocks might start on the GPU only after it has ended.
  uint32_t static_work_tiles;
  int* tile_counter;  // work tiles taken beyond those, zero at the start; null: there are no others
  // Does a block draw a work tile only when it has asked for all queries of the one before? Then the block that is free first
  // draws a long work tile. Where sums have a fixed order it has to be so, because others wait for a work tile that is drawn.
  bool draws_late;
};

// A work tile by its number. Numbers run over sections of head groups; in a section from early tiles of keys to late ones, or
// from late segments to early ones, because causality makes those long; then over head groups.
struct BackwardWorkTile {
  int batch, head, kv_head, tile;

  __device__ __forceinline__ BackwardWorkTile(const AttentionParams& p, const BackwardWork& work, uint32_t work_tile) {
    const uint32_t tiles = static_cast<uint32_t>(work.tiles), section = work_tile / (tiles * work.section_head_groups);
    const uint32_t rest = work_tile - section * tiles * work.section_head_groups;
    const uint32_t head_groups = min(work.section_head_groups, work.head_groups - section * work.section_head_groups);
    const uint32_t head_group = section * work.section_head_groups + rest % head_groups;
    const uint32_t head_groups_per_batch = static_cast<uint32_t>(p.heads) / work.heads;
    tile = static_cast<int>(rest / head_groups);
    batch = static_cast<int>(head_group / head_groups_per_batch);
    head = static_cast<int>(head_group % head_groups_per_batch) * work.heads;
    kv_head = head / (static_cast<int>(p.heads) / static_cast<int>(p.kv_heads));
  }
};

}  // namespace dmattn::cuda::sm90
