// Which selections are short, with a kernel of their own each: counts.cuh and short.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "../../params.h"

namespace dmattn::cuda::selection {

constexpr int kMostShort = 4096;     // keys of a head
constexpr int kMostShortSet = 1024;  // the same, where one set of keys serves all queries: more are not worth a sort (best.cuh)

// Neither documents nor float64 scores: their sort keys are wide.
inline bool is_short(const SelectParams& p) {
  const int64_t most = p.is_causal ? kMostShort : kMostShortSet;
  return p.segment_end.data == nullptr && p.dtype != DType::kFloat64 && p.length <= most;
}

constexpr int kMostCounted = 4096;         // keys of a head
constexpr int64_t kMostCountBlocks = 256;  // of all heads; with 512 sorting was faster on an H200
constexpr int kCountThreads = 256;

// A key has a thread for each part of the others.
constexpr int count_parts(int64_t keys) { return keys <= 1024 ? 4 : keys <= 2048 ? 8 : 16; }

// Blocks for the keys of a head.
inline int64_t count_blocks(const SelectParams& p) {
  const int block_keys = kCountThreads / count_parts(p.length);
  return (p.length + block_keys - 1) / block_keys;
}

inline bool is_counted(const SelectParams& p) {
  return is_short(p) && p.is_causal && p.length <= kMostCounted && p.batch * p.heads * count_blocks(p) <= kMostCountBlocks;
}

// Selects where is_short, for 0 < window < p.length.
cudaError_t launch_short(const SelectParams& p, int32_t window, cudaStream_t stream);

}  // namespace dmattn::cuda::selection
