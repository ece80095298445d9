// Tensors in, params out for the selection of keys by an indexer.
#pragma once

#include <algorithm>

#include "tensors.h"

namespace dmattn {

inline constexpr int64_t kMaxIndexHeads = 128;

struct CheckedIndexTopK {
  Tensor query, key, weights;
  std::optional<Tensor> slope, start, end, query_offset, lengths;
  Tensor indices, scores;
  IndexTopKParams params;
};

// What competes: options of the choice of keys and of the loss.
inline void check_competition(int64_t key_length, int64_t block_size, int64_t local, int64_t sink) {
  check(key_length >= 0 && key_length <= kMaxLength, "key_length: expected 0 <= key_length <= ", kMaxLength, ", got ",
        key_length);
  check(block_size > 0 && block_size <= kMaxIndexBlock && (block_size & (block_size - 1)) == 0,
        "block_size: expected a power of two up to ", kMaxIndexBlock, ", got ", block_size);
  check(local >= 0, "local: expected a number of keys >= 0, got ", local);
  check(sink >= 0, "sink: expected a number of keys >= 0, got ", sink);
}

inline void check_index_sizes(const Tensor& query, const Tensor& key, int64_t key_length, int64_t k, int64_t block_size,
                              int64_t local, int64_t sink, double scale) {
  check(query.dim() == 5, "index_query: expected 5 dimensions [B, G, Sq, Hi, Di], got ", shape_text(query));
  check(key.dim() == 4, "index_key: expected 4 dimensions [B, G, Sk, Di], got ", shape_text(key));
  check_extent("index_query", query), check_extent("index_key", key);
  check(query.size(2) <= kMaxLength, "index_query: expected up to ", kMaxLength, " queries, got ", shape_text(query));
  check(query.size(3) > 0 && query.size(3) <= kMaxIndexHeads, "index_query: expected 1 to ", kMaxIndexHeads, " heads, got ",
        shape_text(query));
  check_head_size("index_query", query.size(4));
  check(k >= 0, "k: expected a number of keys >= 0, got ", k);
  check_competition(key_length, block_size, local, sink);
  check_scale(scale);
}

inline CheckedIndexTopK check_index_top_k(const Tensor& query, const Tensor& key, const Tensor& weights,
                                          std::optional<Tensor> slope, std::optional<Tensor> start, std::optional<Tensor> end,
                                          std::optional<Tensor> query_offset, std::optional<Tensor> lengths, int64_t key_length,
                                          int64_t k, int64_t block_size, bool is_pooled, bool is_causal, int64_t local,
                                          int64_t sink, double scale, bool with_scores) {
  check_index_sizes(query, key, key_length, k, block_size, local, sink, scale);
  const ScalarType sum_type = accumulate_type(query.scalar_type());
  CheckedIndexTopK checked{with_dense_rows(query),
                           with_dense_rows(key),
                           with_dense_rows(weights),
                           std::move(slope),
                           std::move(start),
                           std::move(end),
                           std::move(query_offset),
                           std::move(lengths),
                           Tensor(),
                           Tensor(),
                           {}};
  IndexTopKParams& p = checked.params;
  p.batch = query.size(0), p.groups = query.size(1), p.query_length = query.size(2), p.key_length = key_length;
  p.heads = query.size(3), p.head_dim = query.size(4);
  p.keys = is_pooled ? key_length / block_size : key_length;
  const int64_t blocks = is_pooled ? p.keys : ceil_div(key_length, block_size);
  p.top = std::min(k, blocks);
  p.dtype = to_dtype("index_query", query.scalar_type());
  check_dtype("index_key", key, query.scalar_type()), check_dtype("weights", weights, sum_type);
  check_device("index_key", key, query), check_device("weights", weights, query);
  check_shape("index_key", key, {p.batch, p.groups, p.keys, p.head_dim}, "[B, G, n, Di]");
  check_shape("weights", weights, {p.batch, p.groups, p.query_length, p.heads}, "[B, G, Sq, Hi]");
  p.query = view_of(checked.query), p.query_head_stride = checked.query.stride(3);
  p.key = view_of(checked.key), p.weights = view_of(checked.weights);
  if (checked.slope) {
    check_dtype("slope", *checked.slope, sum_type), check_device("slope", *checked.slope, query);
    check_shape("slope", *checked.slope, {p.groups}, "[G]");
    checked.slope = as_contiguous(*checked.slope);
    p.slope = checked.slope->data_ptr();
  }
  for (auto [name, given, view] : {std::tuple{"start", &checked.start, &p.start}, {"end", &checked.end, &p.end}}) {
    if (!*given) continue;
    check_dtype(name, **given, ScalarType::Int);
    *view = to_per_head(name, **given, query, p.batch, p.groups, p.groups, {p.keys}, "[B|1, G|1, n]");
  }
  if (checked.query_offset) p.query_offset = to_per_sequence("query_offset", *checked.query_offset, query);
  if (checked.lengths) p.lengths = to_per_sequence("lengths", *checked.lengths, query);
  while ((int64_t{1} << p.log2_block) < block_size) ++p.log2_block;
  // Beyond the longest sequence and the latest position nothing changes.
  p.local = static_cast<int32_t>(std::min(local, int64_t{1} << 30)), p.sinks = static_cast<int32_t>(std::min(sink, kMaxLength));
  p.is_pooled = is_pooled, p.is_causal = is_causal, p.scale = scale;
  checked.indices = empty_on(query, {p.batch, p.groups, p.query_length, p.top}, ScalarType::Int);
  p.indices = static_cast<int32_t*>(checked.indices.data_ptr());
  if (with_scores) {
    checked.scores = empty_on(query, {p.batch, p.groups, p.query_length, p.top}, sum_type);
    p.scores = checked.scores.data_ptr();
  } else {
    checked.scores = empty_on(query, {0}, sum_type);
  }
  return checked;
}

}  // namespace dmattn
