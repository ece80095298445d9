// The rows of a cache that hold the keys which lists show to queries of a decode step, on CUDA: the host side. Nothing here waits
// for the device, so the op can be captured in a graph.
#include "../list_arguments.h"
#include "launch.h"
#include "runtime.h"

namespace dmattn::cuda {
namespace {

std::tuple<Tensor, Tensor> list_keys_op(const Tensor& indices, const Tensor& lengths, std::optional<Tensor> page_table,
                                        int64_t pages, int64_t page_size, int64_t capacity, int64_t heads, int64_t kv_heads,
                                        int64_t page_step, int64_t head_step, int64_t key_step, int64_t index_block,
                                        int64_t index_local, int64_t index_sinks) {
  const Device device(indices);
  const CheckedListKeys checked =
      check_list_keys(indices, lengths, std::move(page_table), pages, page_size, capacity, heads, kv_heads, page_step, head_step,
                      key_step, index_block, index_local, index_sinks);
  if (checked.params.batch * checked.params.heads * checked.params.queries > 0) {
    DMATTN_CUDA_CHECK(launch_list_keys(checked.params, device.stream()));
  }
  return {checked.rows, checked.counts};
}

}  // namespace
}  // namespace dmattn::cuda

DMATTN_KERNELS(CUDA, m) { m.impl("list_keys", TORCH_BOX(&dmattn::cuda::list_keys_op)); }
