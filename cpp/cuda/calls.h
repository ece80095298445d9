// What a kernel gets: the forward call, the backward call, and the launches of kernels that both families share.
// Plain structs, no torch.
#pragma once

#include "live_keys.h"
#include "traits.h"

namespace dmattn::cuda {

inline constexpr double kLog2OfE = 1.4426950408889634;

// An exponent in base 2 of this size is right to 2^-12 when it is rounded to float; beyond it logits are subtracted first.
inline constexpr float kHugeExponent = 4096.0f;

// What backward has to expect of its rows. kHugeRows: some lse is beyond kHugeExponent. kBadRows: some row sees nothing, and its
// query or grad_out is not finite.
enum RowFlag : int32_t { kHugeRows = 1, kBadRows = 2 };

// Copies of the live keys and values in the order of their list, for kernels that load rows in order faster than gathered ones.
// The device makes them for the heads whose queries are one segment with at most `capacity` live keys; the host does not know
// which.
struct CompactKeys {
  void *key = nullptr, *value = nullptr;  // [B, Hkv, capacity, D or Dv]; null: no copies
  float* key_bias = nullptr;              // [B, Hkv, capacity]; null: there is none
  int64_t capacity = 0;
};

struct ForwardCall {
  AttentionParams p;
  LiveKeys live_keys;
  float scale = 0.0f, scale_2 = 0.0f, over_scale = 0.0f;  // scale_2 = scale * log2(e), over_scale = 1 / scale
  // For instances with options and a softcap: scale / softcap. What is multiplied by `scale` there is tanh, so scale is
  // the softcap. 0: no softcap.
  float cap_scale = 0.0f;
  // For instances with options. threshold: dropout_threshold, 0 without dropout. keep_scale: 1 / (1 - dropout_p).
  uint32_t threshold = 0;
  float keep_scale = 1.0f;
  CompactKeys compact;
  bool has_bias_pairs = false;  // do two neighbours in a row of bias, the first at an even key, lie where one load reads both?
};

struct BackwardCall {
  BackwardParams b;
  LiveKeys live_keys;
  float scale = 0.0f, scale_2 = 0.0f;  // scale_2 = scale * log2(e)
  // Of Hopper's kernels. tanh or, without softcap, a product times logit_scale is a logit. Sums of gradients times `scale`
  // are grad_query and grad_key, and times keep_scale grad_value and the gradient of key_bias.
  float logit_scale = 0.0f, keep_scale = 1.0f;
  // For instances with options. cap_scale: scale / softcap, 0 without softcap. threshold: dropout_threshold, 0 without dropout.
  // keep_probability: 1 - dropout_p, which the scores' gradients are multiplied with, because keep_scale comes at the end.
  float cap_scale = 0.0f, keep_probability = 1.0f;
  uint32_t threshold = 0;
  uint32_t* row_hash = nullptr;  // [B, H, padded_queries]: dropout_row_hash of each query; null: no dropout
  float* lse2 = nullptr;         // [B, H, padded_queries]: lse in base 2, +inf for a row that sees nothing or is padding
  // [B, H, padded_queries]: <dout, out> - dlse; of a row that sees nothing 0, or NaN when its query or grad_out is not finite.
  float* delta = nullptr;
  int32_t* row_flags = nullptr;  // one int: kHugeRows and kBadRows, zero before launch_row_terms
  // For rows whose lse is beyond kHugeExponent, where rounding lse2 would scale the probabilities of the row.
  float* lse = nullptr;        // [B, H, padded_queries]: as it came, +inf as in lse2
  float* lse_rest2 = nullptr;  // [B, H, padded_queries]: what rounding left out of it, in base 2
  int64_t padded_queries = 0;  // Sq rounded up to kQueryPadding
  PerHead grad_key_bias;       // float [B|1, H|Hkv|1, Sk]; null: not wanted, or not from this kernel
  PerHead grad_bias;           // float [B|1, H|Hkv|1, Sq, Sk]
  // Sums in fp32 in global memory; null: this kernel does not add there. Both end with a spare row for what is computed for rows
  // that do not exist.
  float* query_sums = nullptr;  // [B, H, Sq] + [1] rows of sum_width(D): grad_query of kernels that loop over queries, zeroed
  float* key_sums = nullptr;    // [B, Hkv, Sk] + [1] rows of sum_width(D) + sum_width(Dv): grad_key | grad_value
  bool query_sums_in_tiles = false;  // [B, H, padded_queries / 64, sum_width(D) / 8] tiles instead, in the order of tile_place
  // Semaphores that fix the order of sums, zeroed; null: sums have no fixed order. Keys in order (dq semaphore): how many tiles
  // of keys have added to the chunk of queries that begins here, and at the next element to its second piece. Gathered keys (dkdv
  // semaphore), [B, Hkv, segments] of it: the first key that a segment's list has not added to key_sums.
  // Of the portable kernel with index lists: the first key that a block has not added, by the numbers of blocks.
  int32_t* semaphores = nullptr;  // [B, H, padded_queries / kSemaphoreQueries]
  int32_t* tile_counter =
      nullptr;                // of the portable kernel with index lists, where sums have a fixed order: blocks that have started
  int64_t chained_heads = 1;  // likewise: query heads whose blocks add to the same sums
  // Where keys come in order, and where queries are listed: how many query heads of a group a block takes one after the other.
  int heads_at_once = 1;
  // With a block mask, intervals and keys in order, or listed queries: which keys does some query of those heads see? The others
  // stay out of tiles of keys.
  uint32_t* seen = nullptr;  // [B, H / heads_at_once, seen_words] bits; null: all keys
  int seen_words = 0;        // 4 for each 128 keys
  // Batches and kv heads that one block takes one after the other, so that what is added to the same element of a broadcast bias
  // gradient is added in a fixed order.
  int64_t batches_per_block = 1, kv_heads_per_block = 1;
};

// Has each pair of a query and a key its own element of grad_bias? In a call done in parts this is asked of the whole call,
// because parts may share elements.
DMATTN_HOST_DEVICE static inline bool owns_bias_gradient(const BackwardCall& call) {
  return call.grad_bias.head_divisor == 1 && call.grad_bias.batch_stride != 0;
}

// The place of element i in a row of sums. A lane of mma.sync holds two pairs of columns of 16. They are neighbours here, so that
// the lane adds 16 bytes at once.
constexpr int64_t sum_place(int64_t i) { return i / 16 * 16 + i % 8 / 2 * 4 + i % 16 / 8 * 2 + i % 2; }

// Floats in a tile of sums, 64 rows by 8 columns, and the place of an element. A tile is what the lanes of Hopper's warpgroup
// hold in four registers each, lane by lane: rows 8 apart are 2 floats apart.
inline constexpr int kSumTile = 64 * 8;
constexpr int tile_place(int row, int column) {
  return row / 16 * 128 + row % 8 * 16 + column / 2 * 4 + row % 16 / 8 * 2 + column % 2;
}

// Common kernels.
cudaError_t launch_compact_keys(const ForwardCall& call, cudaStream_t stream);
cudaError_t launch_row_terms(const BackwardCall& call, cudaStream_t stream);         // lse2, delta; clears query_sums if given
cudaError_t launch_find_seen(const BackwardCall& call, cudaStream_t stream);         // seen
cudaError_t launch_listed_seen(const BackwardCall& call, cudaStream_t stream);       // the same by query lists
cudaError_t launch_clear_key_sums(const BackwardCall& call, cudaStream_t stream);    // rows of key_sums that some query sees
cudaError_t launch_store_query_sums(const BackwardCall& call, cudaStream_t stream);  // query_sums -> grad_query
// key_sums -> grad_key and grad_value, zeros for keys nobody sees; without key_sums only those zeros.
cudaError_t launch_store_key_sums(const BackwardCall& call, cudaStream_t stream);

}  // namespace dmattn::cuda
