// Lists of live keys with the memory they lie in.
#pragma once

#include "live_keys.h"
#include "runtime.h"

namespace dmattn::cuda {

// Lists of live keys and the memory they lie in. Without intervals, or with a block mask that names the tiles, there are none:
// keys come in order.
struct OwnedLiveKeys {
  std::optional<Tensor> memory;
  LiveKeys live_keys;
};

struct LiveKeysOptions {
  bool orders = true;       // for a family that starts tiles in a fixed order
  bool keeps_live = false;  // for kernels that walk keys, not queries
  bool joins = false;       // for kernels to which one long list is as good as many short ones
  bool lengthens = false;   // for kernels to which lists a sixteenth longer are as good
  int shortest = 0;         // a segment is 2^shortest * kSegmentQueries queries or more
};

OwnedLiveKeys make_live_keys(const AttentionParams& p, const Tensor& like, cudaStream_t stream, LiveKeysOptions options);

}  // namespace dmattn::cuda
