// What forward and backward have in common: their arguments, checked, as AttentionParams.
#pragma once

#include <algorithm>
#include <optional>
#include <string_view>
#include <tuple>

#include "tensors.h"

namespace dmattn {

// The arguments that forward and backward share, by the names that schema.cpp gives them.
struct AttentionArguments {
  Tensor query, key, value;
  std::optional<Tensor> start, end, tiles, rows, columns, bits, indices, index_offset, key_bias, bias, dropout_seed;
  bool is_causal = false;
  double scale = 1.0, softcap = 0.0, dropout_p = 0.0;
  bool deterministic = false;
  bool is_in_order = false;
  int64_t most_keys = 0;
  int64_t index_block = 1, index_local = 0, index_sinks = 0;
};

// The arguments with what kernels see of them. Copies made for the kernels stay alive in this struct.
struct CheckedAttention {
  AttentionArguments given;  // masks and biases are replaced by copies where kernels cannot walk them
  Tensor query, key, value;  // the given ones, or copies where kernels cannot walk them
  AttentionParams params;
};

inline void check_sizes(const AttentionArguments& given, AttentionParams& p) {
  const Tensor &query = given.query, &key = given.key, &value = given.value;
  for (auto [name, tensor] : {std::pair{"query", &query}, {"key", &key}, {"value", &value}}) {
    check_rows(name, *tensor, query, " [B, heads, S, size]");
  }
  p.batch = query.size(0), p.heads = query.size(1), p.query_length = query.size(2), p.head_dim = query.size(3);
  p.kv_heads = key.size(1), p.key_length = key.size(2), p.value_dim = value.size(3);
  p.dtype = to_dtype("query", query.scalar_type());
  check_shape("key", key, {p.batch, p.kv_heads, p.key_length, p.head_dim}, "[B, Hkv, Sk, D]");
  check_shape("value", value, {p.batch, p.kv_heads, p.key_length, p.value_dim}, "[B, Hkv, Sk, Dv]");
  check_head_counts(p.heads, p.kv_heads);
  check_head_size("query", p.head_dim), check_head_size("value", p.value_dim);
  const int64_t longest = given.is_in_order && query.is_cuda() ? kMaxLengthInOrder : kMaxLength;
  check(p.query_length <= longest, "query: expected a length up to ", longest, ", got ", p.query_length);
  check(p.key_length <= longest, "key: expected a length up to ", longest, ", got ", p.key_length);
}

inline void check_factors(const AttentionArguments& given, AttentionParams& p) {
  const double dropout_p = given.dropout_p;
  check_scale(given.scale), check_softcap(given.softcap);
  check(dropout_p >= 0 && dropout_p < 1, "dropout_p: expected 0 <= dropout_p < 1, got ", dropout_p);
  p.scale = given.scale, p.softcap = given.softcap, p.dropout_p = dropout_p;
  p.most_keys = given.most_keys;
}

// A tensor [B|1, H|Hkv|1, Sk], or null where it is not given.
inline PerHead view_of_keys(const char* name, std::optional<Tensor>& tensor, ScalarType type, const Tensor& query,
                            const AttentionParams& p) {
  if (!tensor) return {};
  check_dtype(name, *tensor, type);
  return to_per_head(name, *tensor, query, p.batch, p.heads, p.kv_heads, {p.key_length}, "[B|1, H|Hkv|1, Sk]");
}

inline void fill_block_mask(AttentionArguments& given, AttentionParams& p) {
  const int count = given.tiles.has_value() + given.rows.has_value() + given.columns.has_value() + given.bits.has_value();
  check(count == 0 || count == 4, "tiles, rows, columns, bits: expected all four of a block mask or none, got ", count);
  if (count == 0) return;
  MaskParams& mask = p.mask;
  const auto in_order = [](const Tensor& tensor) { return as_contiguous(tensor); };
  for (auto [name, tensor] :
       {std::pair{"tiles", &given.tiles}, {"rows", &given.rows}, {"columns", &given.columns}, {"bits", &given.bits}}) {
    check_dtype(name, **tensor, ScalarType::Int);
    check_device(name, **tensor, given.query);
  }
  check(given.bits->dim() == 3 && given.bits->size(1) > 0 && given.bits->size(2) > 0 && given.bits->size(1) <= kMaxTile &&
            given.bits->size(2) <= kMaxTile / 32,
        "bits: expected [slots, tile_q, tile_k/32] with tiles up to ", kMaxTile, ", got ", shape_text(*given.bits));
  mask.tile_q = given.bits->size(1);
  mask.tile_k = given.bits->size(2) * 32;
  check(mask.tile_q % 32 == 0, "bits: expected a tile_q that is a multiple of 32, got ", mask.tile_q);
  mask.tiles_q = table_size(p.query_length, mask.tile_q);
  mask.tiles_k = table_size(p.key_length, mask.tile_k);
  const auto view = [&](const char* name, Tensor& tensor, int64_t rows, int64_t columns, const char* meaning) {
    return to_per_head(name, tensor, given.query, p.batch, p.heads, p.kv_heads, {rows, columns}, meaning, in_order);
  };
  mask.tiles = view("tiles", *given.tiles, mask.tiles_q, mask.tiles_k, "[B|1, H|Hkv|1, Nq, Nk]");
  mask.rows = view("rows", *given.rows, mask.tiles_q, mask.tiles_k + 1, "[B|1, H|Hkv|1, Nq, 1 + Nk]");
  mask.columns = view("columns", *given.columns, mask.tiles_k, mask.tiles_q + 1, "[B|1, H|Hkv|1, Nk, 1 + Nq]");
  check_extent("bits", *given.bits);
  given.bits = in_order(*given.bits);
  mask.bits = static_cast<const uint32_t*>(given.bits->data_ptr());
  mask.slots = given.bits->size(0);
}

inline void fill_index_lists(AttentionArguments& given, AttentionParams& p) {
  check(given.indices || !given.index_offset, "index_offset: expected none without indices");
  if (!given.indices) return;
  // Local keys are not cut to the number of keys: by index_offset a query may stand far behind the last one. Kernels add
  // positions to it.
  IndexLists& lists = p.mask.index;
  lists = to_index_lists(*given.indices, given.query, p.kv_heads, {given.index_block, given.index_local, given.index_sinks},
                         int64_t{1} << 30, p.key_length, "[B|1, H|Hkv|1, Sq, K]");
  if (!given.index_offset) return;
  Tensor& offset = *given.index_offset;
  check_dtype("index_offset", offset, ScalarType::Int);
  check_device("index_offset", offset, given.query);
  check(offset.dim() == 1 && (offset.size(0) == 1 || offset.size(0) == p.batch),
        "index_offset: expected [1] or [B] with B=", p.batch, ", got ", shape_text(offset));
  offset = as_contiguous(offset);
  lists.offset = static_cast<const int32_t*>(offset.data_ptr()), lists.offset_stride = offset.size(0) == 1 ? 0 : 1;
}

inline void fill_bias(AttentionArguments& given, AttentionParams& p) {
  if (!given.bias) return;
  const ScalarType type = given.bias->scalar_type(), sum_type = accumulate_type(given.query.scalar_type());
  check(type == sum_type || type == given.query.scalar_type(), "bias: expected dtype ", dtype_name(sum_type), " or ",
        dtype_name(given.query.scalar_type()), ", got ", dtype_name(type));
  p.bias = to_per_head("bias", *given.bias, given.query, p.batch, p.heads, p.kv_heads, {p.query_length, p.key_length},
                       "[B|1, H|Hkv|1, Sq, Sk]");
  p.bias_row_stride = given.bias->stride(2);
  p.bias_dtype = to_dtype("bias", type);
}

inline void fill_dropout(const AttentionArguments& given, AttentionParams& p) {
  if (given.dropout_p == 0) return;
  const std::optional<Tensor>& seed = given.dropout_seed;
  check(seed.has_value(), "dropout_seed: expected an int64 tensor of one element when dropout_p > 0, got none");
  check_dtype("dropout_seed", *seed, ScalarType::Long);
  check_device("dropout_seed", *seed, given.query);
  check(seed->numel() == 1, "dropout_seed: expected one element, got ", shape_text(*seed));
  p.dropout_seed = static_cast<const int64_t*>(seed->data_ptr());
}

inline CheckedAttention check_attention(AttentionArguments arguments) {
  CheckedAttention checked{std::move(arguments), Tensor(), Tensor(), Tensor(), {}};
  AttentionArguments& given = checked.given;
  AttentionParams& p = checked.params;
  check_sizes(given, p);
  check_factors(given, p);
  checked.query = with_dense_rows(given.query), p.query = view_of(checked.query);
  checked.key = with_dense_rows(given.key), p.key = view_of(checked.key);
  checked.value = with_dense_rows(given.value), p.value = view_of(checked.value);
  p.mask.is_causal = given.is_causal;
  p.mask.is_in_order = given.is_in_order;
  p.mask.start = view_of_keys("start", given.start, ScalarType::Int, given.query, p);
  p.mask.end = view_of_keys("end", given.end, ScalarType::Int, given.query, p);
  fill_block_mask(given, p);
  fill_index_lists(given, p);
  p.key_bias = view_of_keys("key_bias", given.key_bias, accumulate_type(given.query.scalar_type()), given.query, p);
  fill_bias(given, p);
  fill_dropout(given, p);
  return checked;
}

}  // namespace dmattn
