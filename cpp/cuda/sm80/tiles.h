// The tile table of the sm80 family, one row per kernel and head size: it changes speed, never results.
//
// A100, H100 and B200 offer a block 163 KB of shared memory or more, other GPUs 99 KB. So a row that needs more has a smaller
// sibling that runs there.
#pragma once

#include "../traits.h"

namespace dmattn::cuda::sm80 {

struct ForwardShape {
  int queries, keys;  // of a tile, of a chunk
  int warps, blocks_per_sm;
};

// The general instance holds more for each score, so it takes fewer keys at a time.
struct ForwardRow {
  int dim;
  InstanceTraits traits;
  ForwardShape shape;
};
// clang-format off
inline constexpr ForwardRow kForwardRows[] = {
    //dim traits             queries  keys  warps  blocks_per_sm
    { 64, kPlainTraits,    {    128,  128,     4,             2}},
    { 64, kGatheredTraits, {    128,   64,     4,             2}},
    { 64, kUnionTraits,    {    128,   64,     4,             2}},
    { 64, kGeneralTraits,  {    128,   32,     4,             2}},
    {128, kPlainTraits,    {    128,   64,     4,             2}},
    {128, kGatheredTraits, {    128,   64,     4,             2}},
    {128, kUnionTraits,    {    128,   64,     4,             2}},
    {128, kGeneralTraits,  {    128,   32,     4,             2}},
    {256, kPlainTraits,    {     64,   32,     4,             1}},
    {256, kGatheredTraits, {     64,   32,     4,             1}},
    {256, kGeneralTraits,  {     64,   32,     4,             1}},
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

constexpr bool is_valid(ForwardShape s) {
  return s.queries > 0 && s.queries % (16 * s.warps) == 0 && s.keys % 32 == 0 && 128 % s.keys == 0 && 128 % s.queries == 0 &&
         s.keys <= s.warps * 32;
}

// Backward: `queries` by `keys` scores at a time, held by warps in a grid of `warp_rows` rows. backward_dq keeps its queries and
// loops over the keys, backward_dkdv the other way round. Of each chunk one tile is read early (values, grad_out) and one late
// (keys, queries); each has as many buffers as stages.
struct BackwardShape {
  int queries, keys, warps, warp_rows, early_stages, late_stages, blocks_per_sm;
};

// Shared memory of a backward kernel. kLarge: up to 163 KB. kSmall: up to 99 KB, for GPUs without the kLarge one. kAny: up to 99
// KB, on all GPUs, because there is no kLarge one.
enum class SmemBudget : int32_t { kLarge, kSmall, kAny };

struct BackwardRow {
  int dim;
  SmemBudget smem_budget;
  BackwardShape shape;
};
// clang-format off
inline constexpr BackwardRow kBackwardDqRows[] = {
    //dim smem_budget          queries  keys  warps  warp_rows  early_stages  late_stages  blocks_per_sm
    { 64, SmemBudget::kLarge, {    128,   64,     8,         4,            1,           1,             1}},
    { 64, SmemBudget::kSmall, {    128,   64,     8,         4,            1,           1,             1}},
    {128, SmemBudget::kLarge, {    128,   64,     8,         4,            1,           2,             1}},
    {128, SmemBudget::kSmall, {     64,   64,     8,         4,            1,           1,             1}},
    {256, SmemBudget::kLarge, {     64,   32,     8,         4,            1,           1,             1}},
    {256, SmemBudget::kSmall, {     32,   32,     4,         2,            1,           1,             1}},
};

inline constexpr BackwardRow kBackwardDkdvRows[] = {
    //dim smem_budget          queries  keys  warps  warp_rows  early_stages  late_stages  blocks_per_sm
    { 64, SmemBudget::kLarge, {    128,  128,     8,         4,            2,           2,             1}},
    { 64, SmemBudget::kSmall, {     64,  128,     8,         2,            1,           2,             1}},
    {128, SmemBudget::kLarge, {     64,  128,     8,         2,            2,           2,             1}},
    {128, SmemBudget::kSmall, {     64,   64,     8,         2,            1,           1,             1}},
    {256, SmemBudget::kLarge, {     32,   64,     8,         2,            1,           1,             1}},
    {256, SmemBudget::kSmall, {     32,   32,     4,         2,            1,           1,             1}},
};
// clang-format on

template <int kCount>
constexpr BackwardShape find_backward_shape(const BackwardRow (&rows)[kCount], int dim, SmemBudget smem_budget) {
  for (const BackwardRow& row : rows) {
    if (row.dim == dim && (row.smem_budget == SmemBudget::kLarge) == (smem_budget == SmemBudget::kLarge)) return row.shape;
  }
  return {};  // no kernel compiles with it
}
template <int kDim, SmemBudget kSmemBudget>
inline constexpr BackwardShape kBackwardDqShape = find_backward_shape(kBackwardDqRows, kDim, kSmemBudget);
template <int kDim, SmemBudget kSmemBudget>
inline constexpr BackwardShape kBackwardDkdvShape = find_backward_shape(kBackwardDkdvRows, kDim, kSmemBudget);

constexpr bool is_valid(BackwardShape s) {
  if (s.queries == 0) return false;
  const int columns = s.warps / s.warp_rows;
  return s.warps % s.warp_rows == 0 && s.queries % (16 * s.warp_rows) == 0 && s.keys % (16 * columns) == 0 && 128 % s.keys == 0 &&
         128 % s.queries == 0 && s.keys % 32 == 0 && s.queries % 32 == 0 && s.warps % (s.keys / 32) == 0 &&
         s.keys <= s.warps * 32 && s.queries <= s.warps * 32;
}

// Every row of a table.
template <class Row, int kCount>
constexpr bool are_valid(const Row (&rows)[kCount]) {
  for (const Row& row : rows) {
    if (!is_valid(row.shape)) return false;
  }
  return true;
}
static_assert(are_valid(kForwardRows) && are_valid(kBackwardDqRows) && are_valid(kBackwardDkdvRows));

// Decode: a block has 16 rows of queries and heads, or (kMany) as many as `row_warps` warps of 16 rows have. Its warps form a
// grid of row_warps by slices. Slice s takes chunks s, s + slices, ... of `keys`; each has a ring of its own with room for as
// many chunks as there are stages.
enum class DecodeRows : int32_t { kFew, kMany };

struct DecodeShape {
  int keys, stages, slices, row_warps, blocks_per_sm;
};

struct DecodeRow {
  int dim;
  DecodeRows rows;
  DecodeShape shape;
};
// clang-format off
inline constexpr DecodeRow kDecodeRows[] = {
    //dim rows                 keys  stages  slices  row_warps  blocks_per_sm
    { 64, DecodeRows::kFew,  {   16,      3,      4,         1,             4}},
    { 64, DecodeRows::kMany, {   64,      3,      1,         4,             4}},
    {128, DecodeRows::kFew,  {   16,      3,      4,         1,             2}},
    {128, DecodeRows::kMany, {   64,      3,      1,         4,             2}},
    {256, DecodeRows::kFew,  {   16,      3,      2,         1,             2}},
    {256, DecodeRows::kMany, {   32,      3,      1,         2,             2}},
};
// clang-format on

constexpr DecodeShape find_decode_shape(int dim, DecodeRows rows) {
  for (const DecodeRow& row : kDecodeRows) {
    if (row.dim == dim && row.rows == rows) return row.shape;
  }
  return {};  // no kernel compiles with it
}
template <int kDim, DecodeRows kRows>
inline constexpr DecodeShape kDecodeShape = find_decode_shape(kDim, kRows);

constexpr bool is_valid(DecodeShape s) {
  return s.keys >= 16 * s.row_warps &&  // a stage has room for the sums of its rows
         s.keys % 16 == 0 && 32 % (s.keys / 16) == 0 && s.keys <= 32 * s.row_warps && 128 % (s.keys * s.slices) == 0 &&
         s.stages >= 2;
}
static_assert(are_valid(kDecodeRows));

}  // namespace dmattn::cuda::sm80
