// Tensors in, params out for the keys that lists show to a few queries of each sequence.
#pragma once

#include <algorithm>

#include "tensors.h"

namespace dmattn {

struct CheckedListKeys {
  Tensor indices, lengths;
  std::optional<Tensor> page_table;
  Tensor rows, counts;
  ListKeysParams params;
};

inline CheckedListKeys check_list_keys(const Tensor& indices, const Tensor& lengths, std::optional<Tensor> page_table,
                                       int64_t pages, int64_t page_size, int64_t capacity, int64_t heads, int64_t kv_heads,
                                       int64_t page_step, int64_t head_step, int64_t key_step, int64_t index_block,
                                       int64_t index_local, int64_t index_sinks) {
  check(indices.dim() == 4, "indices: expected 4 dimensions [B|1, H|Hkv|1, T, K], got ", shape_text(indices));
  check_dtype("indices", indices, ScalarType::Int);
  check_extent("indices", indices);
  check(lengths.dim() == 1, "lengths: expected [B], got ", shape_text(lengths));
  check_dtype("lengths", lengths, ScalarType::Int), check_device("lengths", lengths, indices);
  check(capacity >= 0 && capacity <= kMaxLength, "capacity: expected 0 <= capacity <= ", kMaxLength, ", got ", capacity);
  check(index_block > 0 && index_block <= kMaxIndexBlock && (index_block & (index_block - 1)) == 0,
        "index_block: expected a power of two up to ", kMaxIndexBlock, ", got ", index_block);
  check(index_local >= 0 && index_sinks >= 0, "index_local, index_sinks: expected numbers of keys >= 0, got ", index_local,
        " and ", index_sinks);
  CheckedListKeys checked{with_dense_rows(indices), as_contiguous(lengths), std::move(page_table), Tensor(), Tensor(), {}};
  ListKeysParams& p = checked.params;
  p.batch = lengths.size(0), p.heads = heads, p.queries = indices.size(2), p.entries = indices.size(3);
  check(kv_heads > 0 && heads >= 0 && heads % kv_heads == 0, "heads: expected a multiple of kv_heads > 0, got ", heads, " and ",
        kv_heads);
  check(indices.size(1) == heads || indices.size(1) == 1, "indices: expected [B|1, heads|1, T, K] with heads=", heads, ", got ",
        shape_text(indices));
  p.kv_heads = kv_heads, p.page_step = page_step, p.head_step = head_step, p.key_step = key_step;
  check(indices.size(0) == p.batch || indices.size(0) == 1, "indices: expected [B|1, H|Hkv|1, T, K] with B=", p.batch, ", got ",
        shape_text(indices));
  check(p.entries <= kMaxLength, "indices: expected lists of up to ", kMaxLength, " entries, got ", shape_text(indices));
  p.capacity = capacity;
  p.local = static_cast<int32_t>(std::min(index_local, capacity)),
  p.sinks = static_cast<int32_t>(std::min(index_sinks, capacity));
  p.most = std::min(p.entries * index_block + p.local + p.sinks, capacity);
  while ((int64_t{1} << p.log2_block) < index_block) ++p.log2_block;
  p.lists.data = checked.indices.data_ptr();
  p.lists.batch_stride = checked.indices.size(0) == 1 ? 0 : checked.indices.stride(0);
  p.lists.head_stride = checked.indices.size(1) == 1 ? 0 : checked.indices.stride(1), p.row_stride = checked.indices.stride(2);
  p.lengths = static_cast<const int32_t*>(checked.lengths.data_ptr());
  if (checked.page_table) {
    Tensor& table = *checked.page_table;
    check_dtype("page_table", table, ScalarType::Int), check_device("page_table", table, indices);
    check(table.dim() == 2 && table.size(0) == p.batch, "page_table: expected [B, max_pages] with B=", p.batch, ", got ",
          shape_text(table));
    check(page_size > 0 && pages >= 0 && table.size(1) * page_size == capacity,
          "page_table: expected room for capacity=", capacity, " keys, got ", shape_text(table), " pages of ", page_size);
    table = with_dense_rows(table);
    p.page_table = static_cast<const int32_t*>(table.data_ptr());
    p.table_stride = table.stride(0), p.pages = pages, p.page_size = page_size;
  }
  checked.rows = empty_on(indices, {p.batch, p.heads, p.queries, p.most}, ScalarType::Int);
  checked.counts = empty_on(indices, {p.batch, p.heads, p.queries}, ScalarType::Int);
  p.rows = static_cast<int32_t*>(checked.rows.data_ptr()), p.counts = static_cast<int32_t*>(checked.counts.data_ptr());
  return checked;
}

}  // namespace dmattn
