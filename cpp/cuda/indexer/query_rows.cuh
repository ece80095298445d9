// Where a tile of index queries stands.
#pragma once

#include "index_call.h"

namespace dmattn::cuda {

struct IndexQueries {
  int batch, group, first;  // the first query of the tile
  int64_t length, offset;   // the sequence's number of keys, the position of query 0

  __device__ __forceinline__ IndexQueries(const IndexCall& call, int tile_of_part) {
    const IndexTopKParams& p = call.p;
    const uint32_t tile = static_cast<uint32_t>(call.first_tile + tile_of_part),
                   in_group = static_cast<uint32_t>(call.tiles_per_group);
    const uint32_t batch_group = tile / in_group, groups = static_cast<uint32_t>(p.groups);
    batch = static_cast<int>(batch_group / groups), group = static_cast<int>(batch_group % groups);
    first = static_cast<int>(tile % in_group) * kIndexTileQueries;
    length = p.key_length;
    if (p.lengths) length = max(int64_t{0}, min(length, static_cast<int64_t>(p.lengths[batch])));
    offset = p.query_offset ? p.query_offset[batch] : length - p.query_length;
  }
};

// The weights of the first query of a sequence.
__device__ __forceinline__ const float* weights_of(const IndexTopKParams& p, const IndexQueries& at) {
  return static_cast<const float*>(p.weights.data) + at.batch * p.weights.batch_stride + at.group * p.weights.head_stride;
}

}  // namespace dmattn::cuda
