// The rows of a cache that hold the keys which lists show to queries of a decode step, on the CPU: a mark for each key, and then
// the marked ones in order.
#include <vector>

#include "../list_arguments.h"
#include "parallel.h"

namespace dmattn::cpu {
namespace {

// A page number that is out of range empties its sequence.
int64_t length_of(const ListKeysParams& p, int64_t batch) {
  const int64_t length = std::clamp<int64_t>(p.lengths[batch], 0, p.capacity);
  if (!p.page_table) return length;
  for (int64_t at = 0; at * p.page_size < length; ++at) {
    const int64_t page = p.page_table[batch * p.table_stride + at];
    if (page < 0 || page >= p.pages) return 0;
  }
  return length;
}

void list_keys(const ListKeysParams& p) {
  const int64_t sharing = p.lists.head_stride == 0 ? std::max<int64_t>(1, p.heads) : 1,
                lists = p.heads / sharing;  // heads that share a list
  for_each_task(p.batch * lists * p.queries, [&](int64_t task, int64_t) {
    const int64_t query = task % p.queries, first_head = task / p.queries % lists * sharing, batch = task / p.queries / lists;
    const int64_t length = length_of(p, batch), end = std::max<int64_t>(0, length == 0 ? 0 : length - p.queries + query + 1);
    std::vector<bool> is_seen(static_cast<size_t>(end));
    const auto mark = [&](int64_t first, int64_t last) {
      for (int64_t key = std::max<int64_t>(0, first); key < std::min(last, end); ++key) is_seen[static_cast<size_t>(key)] = true;
    };
    const int32_t* const list = static_cast<const int32_t*>(p.lists.data) + batch * p.lists.batch_stride +
                                first_head * p.lists.head_stride + query * p.row_stride;
    for (int64_t i = 0; i < p.entries; ++i) {
      const int64_t first = int64_t{list[i]} << p.log2_block;
      if (list[i] >= 0) mark(first, first + (int64_t{1} << p.log2_block));
    }
    mark(end - p.local, end), mark(0, p.sinks);
    std::vector<int32_t> keys;
    keys.reserve(static_cast<size_t>(std::min(p.most, end)));
    for (int64_t key = 0; key < end; ++key) {
      if (is_seen[static_cast<size_t>(key)]) keys.push_back(static_cast<int32_t>(key));
    }
    for (int64_t head = first_head; head < first_head + sharing; ++head) {
      const int64_t place = (batch * p.heads + head) * p.queries + query;
      int32_t* const rows = p.rows + place * p.most;
      std::fill(std::transform(keys.begin(), keys.end(), rows, [&](int32_t key) { return cache_row(p, batch, head, key); }),
                rows + p.most, -1);
      p.counts[place] = static_cast<int32_t>(keys.size());
    }
  });
}

std::tuple<Tensor, Tensor> list_keys_op(const Tensor& indices, const Tensor& lengths, std::optional<Tensor> page_table,
                                        int64_t pages, int64_t page_size, int64_t capacity, int64_t heads, int64_t kv_heads,
                                        int64_t page_step, int64_t head_step, int64_t key_step, int64_t index_block,
                                        int64_t index_local, int64_t index_sinks) {
  const CheckedListKeys checked =
      check_list_keys(indices, lengths, std::move(page_table), pages, page_size, capacity, heads, kv_heads, page_step, head_step,
                      key_step, index_block, index_local, index_sinks);
  list_keys(checked.params);
  return {checked.rows, checked.counts};
}

}  // namespace
}  // namespace dmattn::cpu

DMATTN_KERNELS(CPU, m) { m.impl("list_keys", TORCH_BOX(&dmattn::cpu::list_keys_op)); }
