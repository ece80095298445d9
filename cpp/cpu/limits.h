// Sizes at which the CPU kernels take another way. Tests draw lengths around each: python/dmattn/testing/strategies.py repeats
// the numbers, tests/tools/test_testing.py compares.
#pragma once

#include <stdint.h>

namespace dmattn::cpu {
namespace {

constexpr int64_t kSummaryKeys = 64;                       // per entry of a mask's summary
constexpr int64_t kPieceDepth = 64;                        // terms of a product that are summed before pieces are
constexpr int64_t kMaxTileQueries = 128;                   // changes speed, never results
constexpr int64_t kChunkKeys = 128;                        // live keys computed at once; changes speed, never results
constexpr int64_t kListChunkKeys = 512;                    // the same for a few queries with index lists
constexpr int64_t kListHeads = 8;                          // of a group, computed at once for a query with an index list
constexpr int64_t kListTileQueries = 32;                   // of a tile whose queries have index lists
constexpr int64_t kUnsummedQueries = 2 * kMaxTileQueries;  // up to here no summary is made of a mask
constexpr int64_t kMaxWidth = 256;                         // of D and Dv
constexpr int64_t kIndexTileQueries = 16;                  // of a tile whose index scores are computed at once
constexpr int64_t kIndexChunkKeys = 32;                    // keys whose index scores are computed at once
constexpr int64_t kReduceKeys = 1024;                      // keys per task when parts of a backward call are added up

}  // namespace
}  // namespace dmattn::cpu
