// How the Hopper kernels come to the keys of a call with intervals: the host decides by what it knows without asking the device.
//
// Lists name the keys that live for some queries. Forward can also look at the spans of all keys for each tile of queries, or
// take all keys in order and test those that some query does not see; backward can take all keys in order, too. Lists save most
// where few pairs are visible. They cost launches, rows that are gathered one by one, and in backward sums in memory.
#pragma once

#include "plan.h"

namespace dmattn::cuda {

// What the decision is made from. Tiles are counted over all batches and heads: of queries in forward, as large as those of
// gathered keys, of keys in backward.
struct KeyCounts {
  int64_t queries = 0, keys = 0;
  int64_t most_keys = 0;  // how many keys a query sees at most; 0 or less: not known
  bool is_causal = false;
  int64_t tiles = 0, processors = 0;
};

struct KeyChoice {
  KeySource keys;
  const char* why;
};

// Of the pairs of a query and a key that the call has without intervals, the share that may be visible; 0: not known.
double visible_share(const KeyCounts& counts);

KeyChoice forward_source(const KeyCounts& counts);   // kLists, kDirect or kAll
KeyChoice backward_source(const KeyCounts& counts);  // kLists or kAll

}  // namespace dmattn::cuda
