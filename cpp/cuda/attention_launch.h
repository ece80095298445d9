// The border between the attention host files and every kernel family: plain structs and launch functions, no torch.
//
// A call is planned once (launch_plan: which keys does anybody see, and which does each segment of the queries see?), then a
// family runs it. Segments are as short as their lists fit into memory that grows with the number of keys alone, or somewhat
// longer (`lengthens`); a whole head's queries are one segment if need be, so no bound can overflow.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../params.h"

namespace dmattn::cuda {

inline constexpr int kPlanBlock = 512;     // keys of a list that the portable walk reads at once
inline constexpr int kQueryPadding = 128;  // rows per (batch, head) of the per-query terms are a multiple of this

inline constexpr int kSegmentQueries = 768;  // of the shortest segments: whole tiles of 64, 128 or 192 rows
inline constexpr int kMostSegments = 2048;   // of the queries
inline constexpr int kPlanPart = 4096;       // keys that a block of the plan's kernels looks at
inline constexpr int kPlanGroups = 32;       // of a part's live keys: kPlanPart / kPlanGroups in each, fewer or none in the last
inline constexpr int kPlanEntries = 6;       // of a row of the plan, for each key: the live keys, and room for lists
inline constexpr int kOneSegment = 24;       // the shift that says so: all queries see the same keys

// The live keys of each mask head, in key order, and those of each segment of the queries. Heads of the plan: as many as start
// and end together tell apart; a row is one of them.
struct Plan {
  int32_t* index = nullptr;  // [rows, capacity]: the live keys, where they are read, then the lists; null: no plan, all keys
                             // are taken in order
  int2* span = nullptr;      // [rows, capacity]: the key's span of positions, causality included
  int32_t* count = nullptr;  // [rows]: live keys
  int32_t* shift = nullptr;  // [rows]: a segment is 2^shift * kSegmentQueries queries
  int shortest = 0;          // shift of the shortest segments
  int2* lists = nullptr;     // [rows, most_lists]: where in the row the list of a segment begins, and its length
  int4* groups = nullptr;  // [rows, parts, kPlanGroups]: the plan's own: neighbouring live keys, where they begin, how many they
                           // are, and the positions between which some see some of them
  int64_t count_blocks = 0;      // that share the parts of a row where they are counted
  int32_t* counts = nullptr;     // [rows, count_blocks, 2, segments]: the plan's own; the next two as well
  int32_t* partial = nullptr;    // [rows, count_blocks]: are some of their keys seen by a part of the queries only?
  int32_t* live = nullptr;       // [rows, parts]: how many of the part's keys are seen at all
  int32_t* ticket = nullptr;     // one int: tiles handed out to blocks as they come free; launch_plan zeroes it
  int32_t* row_flags = nullptr;  // one int for backward (BackwardCall::row_flags); launch_plan zeroes it
  bool keeps_live = false;       // are the live keys read, even where no list is made of them?
  bool joins = false;            // are all queries one segment (of shift kOneSegment) when each of them sees all live keys?
  bool lengthens = false;        // are segments longer than they need be, where their lists are then hardly longer?
  int64_t capacity = 0;          // kPlanEntries * Sk, for one segment just Sk
  int64_t most_lists = 0;        // that a row may have
  int64_t parts = 0;             // of kPlanPart keys
  int64_t batch_stride = 0;      // 0 or plan_heads, in rows
  int64_t batches = 0, heads = 0, head_divisor = 1;

  // With a block mask: in which order to start tiles of kQueryPadding queries, null: as they are numbered.
  int32_t* order = nullptr;  // [B * H * ceil(Sq / kQueryPadding)]
};

// The segment of a query, with kOneSegment the first for any; how many segments some queries are; the first query of one of
// several.
__host__ __device__ constexpr int segment_of(int query, int shift) { return query / kSegmentQueries >> shift; }
__host__ __device__ constexpr int segments_at(int queries, int shift) { return segment_of(queries - 1, shift) + 1; }
__host__ __device__ constexpr int first_query_of(int segment, int shift) { return segment * kSegmentQueries << shift; }

// So many blocks for the parts of a row that the parts are soonest done, beside `others` blocks and on an H200, which has place
// for kAtOnce: a second round takes as long as the first, and a block as such about as long as a part.
inline int64_t blocks_per_row(int64_t parts, int64_t rows, int64_t others) {
  constexpr int64_t kAtOnce = 132;
  int64_t best = 1, least = INT64_MAX;
  for (int64_t blocks = 1; blocks <= (parts < kAtOnce ? parts : kAtOnce); ++blocks) {
    const int64_t rounds = (rows * blocks + others + kAtOnce - 1) / kAtOnce, each = (parts + blocks - 1) / blocks;
    if (rounds * (1 + each) < least) best = blocks, least = rounds * (1 + each);
  }
  return best;
}

// What a kernel instance can do at compile time; everything else is a run-time flag.
enum class Variant : int32_t {
  kPlain,     // keys in order: full, causal, block masks (and intervals beside them); nothing added to the logits
  kGathered,  // live keys of the plan, key_bias
  kGeneral,   // both, and bias, softcap, dropout, any scale
  kDense,     // all keys, or causal ones, and nothing else; only where a family has more for them than kPlain
};

// An exponent in base 2 of this size is right to 2^-12 when it is rounded to float; beyond it logits are subtracted first.
inline constexpr float kHugeExponent = 4096.0f;

// What backward may meet among its rows: an lse beyond kHugeExponent; rows that see nothing, and are not finite (delta).
enum RowFlag : int32_t { kHugeRows = 1, kBadRows = 2 };

// Does a call gather live keys by a plan? With a block mask keys come in order, intervals or not.
inline bool gathers(const AttentionParams& p) {
  return (p.mask.start.data || p.mask.end.data) && !p.mask.tiles.data && p.query_length > 0 && p.key_length > 0;
}

// The variant that just suffices.
inline Variant variant_of(const AttentionParams& p, bool is_gathered) {
  const bool is_simple = p.scale >= 1e-6 && p.softcap == 0 && p.dropout_p == 0 && !p.bias.data;
  if (is_simple && is_gathered) return Variant::kGathered;
  return is_simple && !p.key_bias.data ? Variant::kPlain : Variant::kGeneral;
}
inline Variant variant_of(const AttentionParams& p, const Plan& plan) { return variant_of(p, plan.index != nullptr); }

// Copies of the live keys and values in the order of their list, for kernels that copy rows in order faster than gathered ones.
// Made on the device where all queries are one segment and `capacity` is enough: not for every head, nor known here.
struct PackedRows {
  void *key = nullptr, *value = nullptr;  // [B, Hkv, capacity, D or Dv]; null: no copies
  float* key_bias = nullptr;              // [B, Hkv, capacity]; null: there is none
  int64_t capacity = 0;
};

struct ForwardCall {
  AttentionParams p;
  Plan plan;
  float scale = 0.0f, scale_2 = 0.0f, over_scale = 0.0f;  // scale * log2(e), 1 / scale
  PackedRows packed;
};

struct BackwardCall {
  BackwardParams b;
  Plan plan;
  float scale = 0.0f, scale_2 = 0.0f;  // scale_2 = scale * log2(e)
  float* lse2 = nullptr;               // [B, H, padded_queries]: lse in base 2, +inf for a row that sees nothing or is padding
  // [B, H, padded_queries]: <dout, out> - dlse; of a row that sees nothing 0, or NaN when its query or grad_out is not finite.
  float* delta = nullptr;
  int32_t* row_flags = nullptr;  // one int: kHugeRows and kBadRows, zero before launch_row_terms
  // For rows whose lse is beyond kHugeExponent, where rounding lse2 would scale the probabilities of the row.
  float* lse = nullptr;        // [B, H, padded_queries]: as it came, +inf as in lse2
  float* lse_rest2 = nullptr;  // [B, H, padded_queries]: what rounding left out of it, in base 2
  int64_t padded_queries = 0;  // Sq rounded up to kQueryPadding
  PerHead grad_key_bias;       // float [B|1, H|Hkv|1, Sk]; null: not wanted, or not from this kernel
  PerHead grad_bias;           // float [B|1, H|Hkv|1, Sq, Sk]
  // fp32 sums in global memory, null: not accumulated there. Both have one more row, to which rows that do not exist are added.
  float* query_sums = nullptr;       // [B, H, Sq] + [1] rows of sum_width(D): grad_query of kernels that walk queries, zeroed
  float* key_sums = nullptr;         // [B, Hkv, Sk] + [1] rows of sum_width(D) + sum_width(Dv): grad_key | grad_value
  bool query_sums_in_tiles = false;  // [B, H, padded_queries] instead, tiles of 8 rows by 16 columns one after the other
  // With a block mask, for kernels that load a tile of keys in one piece: which keys does some query of the group see?
  uint32_t* seen = nullptr;  // [B, Hkv, seen_words] bits; null: all keys
  int seen_words = 0;        // 4 for each 128 keys
  // How a call with broadcast bias gradients is cut so that sums have a fixed order: batches and kv heads that one CTA walks in
  // turn.
  int64_t batches_in_turn = 1, kv_heads_in_turn = 1;
};

// Floats in a row of sums of `dim` elements, and where element i is, `step` floats from one 16 columns to the next. A lane of
// mma.sync holds two pairs of columns of 16: they are neighbours here, so that it adds 16 bytes at once.
constexpr int64_t sum_width(int64_t dim) { return (dim + 15) / 16 * 16; }
constexpr int64_t sum_place(int64_t i, int64_t step = 16) { return i / 16 * step + i % 8 / 2 * 4 + i % 16 / 8 * 2 + i % 2; }

// Floats of a row of key_sums.
constexpr int64_t key_sum_width(const AttentionParams& p) { return sum_width(p.head_dim) + sum_width(p.value_dim); }

// Common kernels.
cudaError_t launch_plan(const AttentionParams& p, const Plan& plan, cudaStream_t stream);
cudaError_t launch_order(const AttentionParams& p, const Plan& plan, cudaStream_t stream);
cudaError_t launch_pack_rows(const ForwardCall& call, cudaStream_t stream);
cudaError_t launch_row_terms(const BackwardCall& call, cudaStream_t stream);         // lse2 and delta
cudaError_t launch_find_seen(const BackwardCall& call, cudaStream_t stream);         // seen, without intervals
cudaError_t launch_clear_key_sums(const BackwardCall& call, cudaStream_t stream);    // rows of key_sums that some query sees
cudaError_t launch_store_query_sums(const BackwardCall& call, cudaStream_t stream);  // query_sums -> grad_query
// key_sums -> grad_key and grad_value, zeros for keys nobody sees; without key_sums only those zeros.
cudaError_t launch_store_key_sums(const BackwardCall& call, cudaStream_t stream);

}  // namespace dmattn::cuda
