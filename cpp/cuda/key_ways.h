// How the Hopper kernels come to the keys of a call with intervals. Plain C++, no torch: the host decides by what it knows
// without asking the device, and dmattn._C shows the decision.
//
// Lists name the keys that live for some queries. Forward can also look at the spans of all keys for each tile of queries, or
// take all keys in order and test those that some query does not see; backward can take all keys in order, too. Lists save most
// where few pairs are visible. They cost launches, rows that are gathered one by one, and in backward sums in memory.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dmattn::cuda {

enum class KeyWay { kLists, kDirect, kAllKeys };

// What the decision is made from. Tiles are counted over all batches and heads: of queries in forward, as large as those of
// gathered keys, of keys in backward.
struct KeyCounts {
  int64_t queries = 0, keys = 0;
  int64_t most_keys = 0;  // how many keys a query sees at most; 0 or less: not known
  bool is_causal = false;
  int64_t tiles = 0, processors = 0;
};

// Of the pairs of a query and a key that the call has without intervals, the share that may be visible; 0: not known.
inline double visible_share(const KeyCounts& counts) {
  if (counts.most_keys <= 0 || counts.queries <= 0 || counts.keys <= 0) return 0.0;
  const double most = static_cast<double>(std::min(counts.most_keys, counts.keys)), keys = static_cast<double>(counts.keys);
  if (most == keys) return 1.0;
  if (!counts.is_causal) return most / keys;
  // The query at the n-th position sees n keys without a bound. Sums over the first n positions.
  const auto pairs = [](double n, double bound) {
    return n <= bound ? n * (n + 1) / 2 : bound * (bound + 1) / 2 + (n - bound) * bound;
  };
  const double before = static_cast<double>(std::max<int64_t>(counts.keys - counts.queries, 0));
  return (pairs(keys, most) - pairs(before, most)) / (pairs(keys, keys) - pairs(before, keys));
}

// The bounds below are where one way became faster than another on an H200, for windows from 1/16 of the keys to all of them
// (docs/lab/lists.md). Backward's bound beyond 4,096 keys is a guess above what was measured: lists have become faster since.

// From which share of visible pairs on forward takes all keys in order. That costs what dense attention costs and somewhat more,
// whatever the share. Lists cost no more in long calls of many tiles, and few tiles may look at the spans up to 4,096 keys, so
// there the share has to be larger.
inline double least_share_in_order(const KeyCounts& counts, bool is_at_once, bool has_many_tiles) {
  if (!counts.is_causal) return 1.0;
  if (counts.keys < 2048) return 0.7;
  if (has_many_tiles) return counts.keys <= 8192 ? 0.9 : 0.97;
  const bool may_look_at_spans = is_at_once && counts.keys <= 4096;
  return counts.keys > 8192 || may_look_at_spans ? 0.9 : 0.8;
}

inline KeyWay forward_way(const KeyCounts& counts) {
  const double share = visible_share(counts);
  const bool is_at_once = counts.tiles <= counts.processors, has_many_tiles = counts.tiles > 4 * counts.processors;
  if (counts.keys >= 512 && share >= least_share_in_order(counts, is_at_once, has_many_tiles)) return KeyWay::kAllKeys;
  const bool is_short = counts.keys <= (is_at_once ? 1024 : 512);
  // Between few tiles and many, two or three of unequal length for each processor take longer than lists.
  const bool is_direct = (is_at_once && share >= 0.45) || (has_many_tiles && share >= 0.7);
  return is_short || (counts.keys <= 4096 && is_direct) ? KeyWay::kDirect : KeyWay::kLists;
}

inline KeyWay backward_way(const KeyCounts& counts) {
  const double share = visible_share(counts);
  if (share == 0.0) return KeyWay::kLists;
  const bool is_at_once = counts.tiles <= counts.processors;
  bool takes_all = false;
  if (counts.keys <= 4096) {  // one list a head: lists cut no tile short of processors
    takes_all = is_at_once || share >= (counts.keys <= 512 ? 0.4 : 0.7);
  } else {  // lists are cut into shares, so that few heads are work for all processors
    takes_all = counts.tiles > 4 * counts.processors && share >= 0.85;
  }
  return takes_all ? KeyWay::kAllKeys : KeyWay::kLists;
}

}  // namespace dmattn::cuda
