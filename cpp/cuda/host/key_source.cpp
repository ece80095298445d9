// From which share of visible pairs on keys come in order, from lists or from the spans of all keys.
//
// The bounds are where one way became faster than another on an H200, for windows from 1/16 of the keys to all of them
// (research/lab/lists.md). Backward's bound beyond 4,096 keys is a guess above what was measured: lists have become faster since.
#include "key_source.h"

#include <algorithm>

namespace dmattn::cuda {
namespace {

// From which share of visible pairs on forward takes all keys in order. That costs what dense attention costs and somewhat more,
// whatever the share. Lists cost no more in long calls of many tiles, and few tiles may look at the spans up to 4,096 keys, so
// there the share has to be larger.
double least_share_in_order(const KeyCounts& counts, bool is_at_once, bool has_many_tiles) {
  if (!counts.is_causal) return 1.0;
  if (counts.keys < 2048) return 0.7;
  if (has_many_tiles) return counts.keys <= 8192 ? 0.9 : 0.97;
  const bool may_look_at_spans = is_at_once && counts.keys <= 4096;
  return counts.keys > 8192 || may_look_at_spans ? 0.9 : 0.8;
}

}  // namespace

double visible_share(const KeyCounts& counts) {
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

KeyChoice forward_source(const KeyCounts& counts) {
  const double share = visible_share(counts);
  const bool is_at_once = counts.tiles <= counts.processors, has_many_tiles = counts.tiles > 4 * counts.processors;
  if (counts.keys >= 512 && share >= least_share_in_order(counts, is_at_once, has_many_tiles)) {
    return {KeySource::kAll, "so many pairs are visible that lists would save nothing"};
  }
  const bool is_short = counts.keys <= (is_at_once ? 1024 : 512);
  if (is_short) return {KeySource::kDirect, "the keys are so few that looking at all of them is faster than making lists"};
  // Between few tiles and many, two or three of unequal length for each processor take longer than lists.
  const bool is_direct = (is_at_once && share >= 0.45) || (has_many_tiles && share >= 0.7);
  if (counts.keys <= 4096 && is_direct) {
    return {KeySource::kDirect, "up to 4,096 keys of which most are visible: looking at all of them is faster than making lists"};
  }
  return {KeySource::kLists,
          share > 0.0 ? "few pairs are visible" : "how many keys a query sees is not known, or decides nothing"};
}

KeyChoice backward_source(const KeyCounts& counts) {
  const double share = visible_share(counts);
  if (share == 0.0) return {KeySource::kLists, "how many keys a query sees is not known"};
  const bool is_at_once = counts.tiles <= counts.processors;
  bool takes_all = false;
  if (counts.keys <= 4096) {  // one list a head: lists cut no tile short of processors
    takes_all = is_at_once || share >= (counts.keys <= 512 ? 0.4 : 0.7);
  } else {  // lists are cut into shares, so that few heads are work for all processors
    takes_all = counts.tiles > 4 * counts.processors && share >= 0.85;
  }
  if (!takes_all) return {KeySource::kLists, "few pairs are visible"};
  return {KeySource::kAll, is_at_once ? "the processors take all tiles of keys at once, so lists would save no time"
                                      : "so many pairs are visible that lists would save nothing"};
}

}  // namespace dmattn::cuda
