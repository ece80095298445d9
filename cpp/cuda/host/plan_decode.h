// A plan of decoding: which kernel runs, how the keys of each sequence are cut into splits (splits.h), and what memory that
// needs.
#pragma once

#include "../splits.h"
#include "plan.h"

namespace dmattn::cuda {

struct DecodePlan {
  Instance instance;                                                   // Kernel::kNone: there are no queries
  int heads = 1, sharing = 1, queries_apart = 1, group = 1, rows = 0;  // as in DecodeCall
  int split_keys = 0;
  int block_splits = 1;  // neighbouring splits of a block, a power of two
  int parts = 1;         // blocks for the keys of a sequence; each finds a part of the sums
  // The blocks of a sequence are a cluster and add their parts up themselves. Then there are at most kMostClusterParts parts and
  // kMostFewRows rows.
  bool is_cluster = false;

  // What blocks leave for a kernel that adds it up; not there where a sequence has one block or one cluster.
  struct Workspace {
    Region part_out, part_sums;
    int64_t bytes = 0;
  } workspace;
};

// Only the driver knows whether the device has room for a cluster of so many blocks. Where it has not, plan again with kNever.
enum class Clusters : int32_t { kNever, kMayBe };

// A call that no kernel takes is refused here. There are clusters where Hopper's kernels may run, although decoding has portable
// kernels alone.
DecodePlan plan_decode(const DecodeParams& p, const Target& target, Clusters clusters = Clusters::kMayBe);

// One step of generation with a bounded cache, whose visible slots are the keys, by one kernel that takes the new token and then
// attends. There is one where one block or one cluster has all keys of a sequence; Kernel::kNone: there is none for this call, so
// the token is taken first, and decoding follows.
DecodePlan plan_step(const DecodeParams& p, const Target& target);

}  // namespace dmattn::cuda
