// The tile tables of the sm90 family, forward's by head size and traits of an instance, backward's by head size and options: they
// change speed, never results.
//
// The 64K registers of a block are shared by warpgroups of unequal need. So a row says how many a thread of each role gets,
// and the sum is checked here.
#pragma once

#include <initializer_list>

#include "../sizes.h"
#include "../traits.h"

namespace dmattn::cuda::sm90 {

inline constexpr int kWarpgroup = 128;

// A block has two or three warpgroups that compute, each 64 rows of the tile, which are (query, head) pairs. The warps after
// those load, half of them keys and half of them values, or schedule the keys: a warpgroup for each of the two jobs, or one
// warpgroup for both.
struct ForwardShape {
  int consumers;
  int keys;         // of a chunk
  int stages;       // chunks of keys, of values, and of a bias that tensor copies bring, in flight
  int query_tiles;  // 2: the next tile's queries are loaded while one is computed, and its output leaves from their place
  int descriptors;  // chunks that may be described ahead of their use
  int loading_warps, scheduler_warps;
  int computing_registers, loading_registers, scheduler_registers;  // per thread

  constexpr int rows() const { return consumers * 64; }
  constexpr int threads() const { return consumers * kWarpgroup + (loading_warps + scheduler_warps) * 32; }
  constexpr int loaders() const { return loading_warps * 16; }  // threads that load keys; as many load values
  constexpr int scheduler_threads() const { return scheduler_warps * 32; }
  constexpr bool shares_warpgroup() const { return loading_warps + scheduler_warps == 4; }
};

// Columns of a panel of a bias in shared memory, so few that chunks may have any multiple of 32 keys.
inline constexpr int kBiasColumns = 32;

struct ForwardRow {
  int dim;
  InstanceTraits traits;
  ForwardShape shape;
};
// clang-format off
inline constexpr ForwardRow kForwardRows[] = {
    //                                                                                                      warps:               registers of a thread:
    //dim keys             logits            bias             consumers  keys  stages  query_tiles  descriptors  loading  scheduler  computing  loading  scheduler
    { 64, {Keys::kAll,       Logits::kScaled,  Bias::kNone  }, {        3,  128,      2,           2,           8,       2,         2,       160,      32,        32}},
    { 64, {Keys::kIntervals, Logits::kScaled,  Bias::kKey   }, {        2,  128,      2,           2,           8,       4,         4,       200,      56,        56}},
    { 64, {Keys::kInOrder,   Logits::kScaled,  Bias::kNone  }, {        2,  128,      2,           2,           8,       4,         4,       200,      40,        72}},
    { 64, {Keys::kGathered,  Logits::kScaled,  Bias::kKey   }, {        3,   96,      3,           2,           8,       2,         2,       144,      80,        80}},
    { 64, {Keys::kUnion,     Logits::kScaled,  Bias::kKey   }, {        3,   96,      3,           2,           8,       2,         2,       144,      80,        80}},
    { 64, {Keys::kAny,       Logits::kAny,     Bias::kPair  }, {        2,   64,      2,           2,           4,       4,         4,       184,      48,        96}},
    { 64, {Keys::kAll,       Logits::kCapped,  Bias::kNone  }, {        2,  128,      2,           2,           8,       4,         4,       200,      40,        72}},
    { 64, {Keys::kAll,       Logits::kDropout, Bias::kCopied}, {        2,  128,      2,           2,           8,       4,         4,       200,      40,        72}},
    { 64, {Keys::kGathered,  Logits::kCapped,  Bias::kKey   }, {        3,   96,      3,           2,           8,       2,         2,       144,      80,        80}},
    { 64, {Keys::kUnion,     Logits::kCapped,  Bias::kKey   }, {        3,   96,      3,           2,           8,       2,         2,       144,      80,        80}},
    { 64, {Keys::kRange,     Logits::kScaled,  Bias::kNone  }, {        3,   96,      3,           2,           8,       2,         2,       152,      56,        56}},
    {128, {Keys::kAll,       Logits::kScaled,  Bias::kNone  }, {        3,   80,      2,           2,           8,       2,         2,       152,      56,        56}},
    {128, {Keys::kIntervals, Logits::kScaled,  Bias::kKey   }, {        2,  128,      2,           2,           8,       4,         4,       200,      56,        56}},
    {128, {Keys::kInOrder,   Logits::kScaled,  Bias::kNone  }, {        2,  128,      2,           2,           8,       4,         4,       200,      40,        72}},
    {128, {Keys::kGathered,  Logits::kScaled,  Bias::kKey   }, {        3,   64,      3,           2,           8,       2,         2,       144,      80,        80}},
    {128, {Keys::kUnion,     Logits::kScaled,  Bias::kKey   }, {        3,   64,      3,           2,           8,       2,         2,       144,      80,        80}},
    {128, {Keys::kAny,       Logits::kAny,     Bias::kPair  }, {        2,   64,      2,           2,           4,       4,         4,       192,      48,        80}},
    {128, {Keys::kAll,       Logits::kCapped,  Bias::kNone  }, {        2,  128,      2,           2,           8,       4,         4,       200,      40,        72}},
    {128, {Keys::kAll,       Logits::kDropout, Bias::kCopied}, {        2,   96,      2,           2,           8,       4,         4,       200,      40,        72}},
    {128, {Keys::kGathered,  Logits::kCapped,  Bias::kKey   }, {        3,   64,      3,           2,           8,       2,         2,       144,      80,        80}},
    {128, {Keys::kUnion,     Logits::kCapped,  Bias::kKey   }, {        3,   64,      3,           2,           8,       2,         2,       144,      80,        80}},
    {128, {Keys::kRange,     Logits::kScaled,  Bias::kNone  }, {        3,   80,      2,           2,           8,       2,         2,       152,      56,        56}},
    {256, {Keys::kAll,       Logits::kScaled,  Bias::kNone  }, {        2,   80,      2,           1,           4,       4,         4,       216,      40,        40}},
    {256, {Keys::kInOrder,   Logits::kScaled,  Bias::kNone  }, {        2,   32,      4,           1,           4,       4,         4,       192,      48,        80}},
    {256, {Keys::kGathered,  Logits::kScaled,  Bias::kKey   }, {        2,   64,      2,           1,           4,       4,         4,       208,      56,        40}},
    {256, {Keys::kUnion,     Logits::kScaled,  Bias::kKey   }, {        2,   64,      2,           1,           4,       4,         4,       208,      56,        40}},
    {256, {Keys::kAll,       Logits::kCapped,  Bias::kNone  }, {        2,   80,      2,           1,           4,       4,         4,       216,      40,        40}},
    {256, {Keys::kGathered,  Logits::kCapped,  Bias::kKey   }, {        2,   64,      2,           1,           4,       4,         4,       208,      56,        40}},
    {256, {Keys::kUnion,     Logits::kCapped,  Bias::kKey   }, {        2,   64,      2,           1,           4,       4,         4,       208,      56,        40}},
    {256, {Keys::kAny,       Logits::kAny,     Bias::kPair  }, {        2,   32,      4,           1,           4,       4,         4,       200,      32,        80}},
};
// clang-format on

constexpr ForwardShape find_forward_shape(int dim, const InstanceTraits& traits) {
  for (const ForwardRow& row : kForwardRows) {
    if (row.dim == dim && row.traits == traits) return row.shape;
  }
  return {};  // no kernel compiles with it
}
template <int kDim, class Traits>
inline constexpr ForwardShape kForwardShape = find_forward_shape(kDim, Traits::kValue);

template <int kDim, class Traits>
inline constexpr int kForwardThreads = kForwardShape<kDim, Traits>.threads();

// Where a block mask may be given, chunks have to fill its tiles, and a thread of the scheduler looks at one key of a chunk and
// at one query. With fewer than three descriptors or two stages the warps would wait for each other for ever: the scheduler holds
// a descriptor back until the next is begun, and a chunk is computed beside the one before it.
constexpr bool is_valid(ForwardShape s, const InstanceTraits& traits) {
  for (const int registers : {s.computing_registers, s.loading_registers, s.scheduler_registers}) {
    if (registers % 8 != 0 || registers < 24 || registers > 256) return false;
  }
  const KeyProperties keys = properties_of(traits.keys);
  const bool is_split = s.loading_warps == 4 && s.scheduler_warps == 4,
             is_shared = s.loading_warps == 2 && s.scheduler_warps == 2;
  // At the start every thread has as many registers as divide evenly, in steps of 8.
  const int pool = 65536 / s.threads() / 8 * 8 * s.threads();
  const int others = s.shares_warpgroup() ? s.loading_registers : s.loading_registers + s.scheduler_registers;
  return (is_split || (is_shared && s.loading_registers == s.scheduler_registers)) &&
         (!keys.gathers || s.keys % s.loaders() == 0) && (s.consumers * s.computing_registers + others) * kWarpgroup <= pool &&
         kSegmentQueries % s.rows() == 0 && s.keys % (keys.is_dense || traits.keys == Keys::kRange ? 16 : 32) == 0 &&
         (traits.bias != Bias::kCopied || s.keys % kBiasColumns == 0) &&
         s.keys <= (keys.takes_blocks ? s.scheduler_threads() : 256) &&
         (!keys.takes_blocks || (128 % s.keys == 0 && s.rows() == 128 && s.scheduler_threads() >= 128)) && s.stages >= 2 &&
         s.descriptors >= 3 && (s.query_tiles == 1 || s.query_tiles == 2);
}
constexpr bool are_valid_rows() {
  for (const ForwardRow& row : kForwardRows) {
    if (!is_valid(row.shape, row.traits)) return false;
  }
  return true;
}
static_assert(are_valid_rows());

// Backward: a block is two warpgroups that compute 64 keys of the tile each, or half of the columns of the same 64 keys, and a
// third, of which two warps load keys and values, and one thread queries.
inline constexpr int kConsumers = 2, kLoaders = kWarpgroup / 2;
struct BackwardShape {
  int keys;                                    // of a tile
  int queries;                                 // of a chunk
  int query_stages;                            // chunks of queries in flight
  int computing_registers, loading_registers;  // per thread
};
inline constexpr int kBackwardKeys = kConsumers * 64, kBackwardThreads = (kConsumers + 1) * kWarpgroup;

struct BackwardRow {
  int dim;
  bool has_options;
  BackwardShape shape;
};
// clang-format off
inline constexpr BackwardRow kBackwardRows[] = {
    //                                           registers of a thread:
    //dim options  keys  queries  query_stages  computing  loading
    { 64, false, { 128,     128,            3,       232,      40}},
    { 64, true,  { 128,      64,            3,       232,      40}},
    {128, false, { 128,      64,            3,       232,      40}},
    {128, true,  { 128,      64,            3,       232,      40}},
    {256, false, {  64,      64,            2,       224,      56}},
    {256, true,  {  64,      64,            2,       232,      40}},
};
// clang-format on

constexpr BackwardShape find_backward_shape(int dim, bool has_options) {
  for (const BackwardRow& row : kBackwardRows) {
    if (row.dim == dim && row.has_options == has_options) return row.shape;
  }
  return {};  // no kernel compiles with it
}
template <int kDim, bool kHasOptions>
inline constexpr BackwardShape kBackwardShape = find_backward_shape(kDim, kHasOptions);

constexpr bool is_valid(BackwardShape s) {
  for (const int registers : {s.computing_registers, s.loading_registers}) {
    if (registers % 8 != 0 || registers < 24 || registers > 256) return false;
  }
  // At the start every thread has as many registers as divide evenly, in steps of 8.
  constexpr int kPool = 65536 / kBackwardThreads / 8 * 8 * kBackwardThreads;
  return (s.keys == 64 || s.keys == kBackwardKeys) && (s.queries == 64 || s.queries == 128) && s.query_stages >= 2 &&
         (kConsumers * s.computing_registers + s.loading_registers) * kWarpgroup <= kPool;
}
constexpr bool are_valid_backward_rows() {
  for (const BackwardRow& row : kBackwardRows) {
    if (!is_valid(row.shape)) return false;
  }
  return true;
}
static_assert(are_valid_backward_rows());

}  // namespace dmattn::cuda::sm90
