// Tensors in, params out for decoding: a few queries of each sequence over a cache of keys, in one piece or in pages.
#pragma once

#include "tensors.h"

namespace dmattn {

inline constexpr int64_t kMaxDecodeQueries = 16;
inline constexpr int64_t kPageUnit = 16;  // page sizes are multiples of it

struct CheckedDecode {
  Tensor query, key, value;
  std::optional<Tensor> lengths, page_table, key_bias, sinks, indices;
  Tensor out, lse;
  DecodeParams params;
};

// The rows of a cache [B, Hkv, Smax, width], or of pages [pages, page_size, Hkv, width].
inline TensorView view_of_cache(const Tensor& tensor, bool is_paged) {
  if (!is_paged) return view_of(tensor);
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(2), tensor.stride(1)};
}

inline void check_caches(const CheckedDecode& checked, DecodeParams& p) {
  const Tensor &key = checked.key, &value = checked.value;
  if (!checked.page_table) {
    p.kv_heads = key.size(1), p.capacity = key.size(2);
    check_shape("key", key, {p.batch, p.kv_heads, p.capacity, p.head_dim}, "[B, Hkv, Smax, D]");
    check_shape("value", value, {p.batch, p.kv_heads, p.capacity, p.value_dim}, "[B, Hkv, Smax, Dv]");
    return;
  }
  const Tensor& table = *checked.page_table;
  check_dtype("page_table", table, ScalarType::Int);
  check_device("page_table", table, checked.query);
  check(table.dim() == 2 && table.size(0) == p.batch, "page_table: expected [B, max_pages] with B=", p.batch, ", got ",
        shape_text(table));
  p.pages = key.size(0), p.page_size = key.size(1), p.kv_heads = key.size(2);
  check_shape("key", key, {p.pages, p.page_size, p.kv_heads, p.head_dim}, "[pages, page_size, Hkv, D]");
  check_shape("value", value, {p.pages, p.page_size, p.kv_heads, p.value_dim}, "[pages, page_size, Hkv, Dv]");
  check(p.page_size > 0 && p.page_size % kPageUnit == 0, "key: expected pages of a multiple of ", kPageUnit, " keys, got ",
        p.page_size);
  check(p.pages < int64_t{1} << 31, "key: expected fewer than 2^31 pages, got ", p.pages);
  check(p.page_size <= kMaxLength && table.size(1) <= kMaxLength, "page_table: expected room for up to ", kMaxLength,
        " keys, got ", shape_text(table), " pages of ", p.page_size);
  p.capacity = table.size(1) * p.page_size;
}

inline void fill_decode_lists(CheckedDecode& checked, const ListOptions& options, DecodeParams& p) {
  if (!checked.indices) return;
  p.index = to_index_lists(*checked.indices, checked.query, p.kv_heads, options, p.capacity, p.capacity, "[B|1, H|Hkv|1, T, K]");
  check(p.index.count <= kMaxLength, "indices: expected lists of up to ", kMaxLength, " entries, got ", p.index.count);
  p.places = (p.index.count << p.index.log2_block) + p.index.local + p.index.sinks;
  check(p.places <= kMaxLength, "indices: expected lists of up to ", kMaxLength, " keys, local ones and sinks included, got ",
        p.places);
  // Heads that share their keys read a list together, unless a key has a bias of its own for each.
  const int64_t group = p.heads > 0 ? p.heads / p.kv_heads : 1;
  const bool is_shared = p.index.entries.head_divisor % group == 0 && (!p.key_bias.data || p.key_bias.head_divisor % group == 0);
  p.list_heads = is_shared ? p.kv_heads : p.heads;
  p.is_causal = false;
}

inline CheckedDecode check_decode(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<Tensor> lengths,
                                  std::optional<Tensor> page_table, std::optional<Tensor> key_bias, std::optional<Tensor> sinks,
                                  std::optional<Tensor> indices, bool is_causal, double scale, double softcap,
                                  const ListOptions& lists = {}) {
  CheckedDecode checked{query,
                        key,
                        value,
                        std::move(lengths),
                        std::move(page_table),
                        std::move(key_bias),
                        std::move(sinks),
                        std::move(indices),
                        Tensor(),
                        Tensor(),
                        {}};
  DecodeParams& p = checked.params;
  for (auto [name, tensor] : {std::pair{"query", &query}, {"key", &key}, {"value", &value}}) {
    check_rows(name, *tensor, query, "");
  }
  p.batch = query.size(0), p.heads = query.size(1), p.queries = query.size(2), p.head_dim = query.size(3);
  p.value_dim = value.size(3);
  p.dtype = to_dtype("query", query.scalar_type());
  check(p.queries <= kMaxDecodeQueries, "query: expected at most ", kMaxDecodeQueries, " queries a sequence, got ", p.queries);
  check_caches(checked, p);
  check_head_counts(p.heads, p.kv_heads);
  check_head_size("query", p.head_dim), check_head_size("value", p.value_dim);
  check(p.capacity <= kMaxLength, "key: expected room for up to ", kMaxLength, " keys, got ", p.capacity);
  check_scale(scale), check_softcap(softcap);
  p.is_causal = is_causal, p.scale = scale, p.softcap = softcap;

  if (checked.lengths) p.lengths = to_per_sequence("lengths", *checked.lengths, query);
  const ScalarType sum_type = accumulate_type(query.scalar_type());
  if (checked.key_bias) {
    check_dtype("key_bias", *checked.key_bias, sum_type);
    p.key_bias =
        to_per_head("key_bias", *checked.key_bias, query, p.batch, p.heads, p.kv_heads, {p.capacity}, "[B|1, H|Hkv|1, Smax]");
  }
  fill_decode_lists(checked, lists, p);
  if (checked.sinks) {
    check_dtype("sinks", *checked.sinks, sum_type);
    check_device("sinks", *checked.sinks, query);
    check_shape("sinks", *checked.sinks, {p.heads}, "[H]");
    checked.sinks = as_contiguous(*checked.sinks);
    p.sinks = checked.sinks->data_ptr();
  }

  checked.query = with_dense_rows(query), checked.key = with_dense_rows(key), checked.value = with_dense_rows(value);
  p.query = view_of(checked.query);
  p.key = view_of_cache(checked.key, checked.page_table.has_value());
  p.value = view_of_cache(checked.value, checked.page_table.has_value());
  if (checked.page_table) {
    checked.page_table = with_dense_rows(*checked.page_table);
    p.page_table = static_cast<const int32_t*>(checked.page_table->data_ptr());
    p.table_stride = checked.page_table->stride(0);
  }
  checked.out = empty_in_order_of(query, p.value_dim);
  checked.lse = empty_on(query, {p.batch, p.heads, p.queries}, sum_type);
  p.out = view_of(checked.out);
  p.lse = checked.lse.data_ptr();
  return checked;
}

}  // namespace dmattn
