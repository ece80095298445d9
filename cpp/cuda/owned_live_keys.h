// Allocates lists of live keys on the host and has the device make them.
#pragma once

#include "live_keys.h"
#include "runtime.h"

namespace dmattn::cuda {

// Lists of live keys and the memory they lie in. A call without intervals, or with a block mask, has no lists: its keys come in
// order.
struct OwnedLiveKeys {
  std::optional<Tensor> memory;
  LiveKeys live_keys;
};

// What a kernel wants of its lists; the fields of the same names in LiveKeys say what each means.
struct LiveKeysOptions {
  bool orders = true;        // with a block mask, an order of the query tiles: for kernels whose blocks have one tile each
  bool keeps_live = false;   // for kernels that loop over keys, not queries
  bool joins = false;        // for kernels that read one long list as fast as many short ones
  bool lengthens = false;    // for kernels that do not mind lists a sixteenth longer
  bool is_one = false;       // one list for all queries, in the order of launch_one_list
  bool by_lifetime = false;  // for kernels that loop over the queries of a tile of keys, in any order of keys
  int shortest = 0;          // segments have at least 2^shortest * kSegmentQueries queries
};

// Ranges of keys, in place of lists, each of so many queries.
OwnedLiveKeys make_key_ranges(const AttentionParams& p, const Tensor& like, cudaStream_t stream, int queries);
OwnedLiveKeys make_live_keys(const AttentionParams& p, const Tensor& like, cudaStream_t stream, LiveKeysOptions options);

}  // namespace dmattn::cuda
