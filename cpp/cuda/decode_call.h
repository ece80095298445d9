// What decoding kernels get: a call, and one step of generation with a bounded cache, in which a new token goes in and its
// queries attend. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../params.h"
#include "splits.h"

namespace dmattn::cuda {

struct DecodeCall {
  DecodeParams p;
  float scale = 0.0f;
  // Rows that read the same keys are a head of the call: without lists those of a key head, where query t of the group's head g
  // is row t * group + g. With lists a head is one query of the heads that share a list.
  int heads = 1;          // of a sequence
  int sharing = 1;        // heads that read the same key head
  int queries_apart = 1;  // queries that are heads by themselves: 1, or T with lists
  int group = 1;          // query heads of a head
  int rows = 0;           // of a head
  int split_keys = 0;
  int block_splits = 1;  // neighbouring splits of a block, a power of two
  int parts = 1;         // blocks for the keys of a sequence; each finds a part of the sums
  // The blocks of a sequence are a cluster and add their parts up themselves. Then there are at most kMostClusterParts parts and
  // kMostFewRows rows.
  bool is_cluster = false;
  // What blocks found, null when they need not leave it. A sum is of weights, relative to a maximum. Blocks whose keys begin
  // behind the length write nothing.
  float2* part_sums = nullptr;  // [B, heads, rows, parts]: maximum, sum
  float* part_out = nullptr;    // [B, heads, rows, parts, Dv]
};

// A call with lists.
struct ListedCall : DecodeCall {};

// decode.p has the visible slots for its keys, their scores for its key_bias, no lengths and no pages. There are at most
// kMostFewRows rows, and one block or one cluster has all keys of a sequence.
struct StepCall {
  DecodeCall decode;
  CacheParams cache;
};

#if defined(__CUDACC__)
__host__ __device__
#endif
    inline const DecodeCall& decode_of(const DecodeCall& call) {
  return call;
}
#if defined(__CUDACC__)
__host__ __device__
#endif
    inline const DecodeCall& decode_of(const StepCall& call) {
  return call.decode;
}

// Adds up the parts: part_sums, part_out -> out, lse.
cudaError_t launch_merge_parts(const DecodeCall& call, cudaStream_t stream);

}  // namespace dmattn::cuda
