// The loss of an indexer on CUDA: the host side. Nothing here waits for the device.
#include "../index_loss_arguments.h"
#include "../index_loss_row.h"
#include "launch.h"
#include "runtime.h"

namespace dmattn::cuda {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> index_loss_op(
    const Tensor& logits, const Tensor& products, const Tensor& weights, std::optional<Tensor> slope,
    std::optional<Tensor> key_bias, std::optional<Tensor> lse, const Tensor& positions, std::optional<Tensor> lists,
    std::optional<Tensor> start, std::optional<Tensor> end, int64_t key_length, int64_t block_size, bool is_pooled,
    bool is_causal, int64_t local, int64_t sink, double scale, double softcap, double index_scale, bool sharp, bool to_bfloat16) {
  const Device device(logits);
  const CheckedIndexLoss checked(logits, products, weights, slope, key_bias, lse, positions, lists, start, end, key_length,
                                 block_size, is_pooled, is_causal, local, sink, scale, softcap, index_scale, sharp, to_bfloat16);
  const IndexLossParams& p = checked.params;
  const Tensor workspace = empty_on(logits, {2 * p.batch * p.groups * p.rows * index_loss_stride(p)}, logits.scalar_type());
  DMATTN_CUDA_CHECK(launch_index_loss(p, workspace.data_ptr(), device.stream()));
  return {checked.losses, checked.of_products, checked.of_weights, checked.of_slopes};
}

}  // namespace
}  // namespace dmattn::cuda

DMATTN_KERNELS(CUDA, m) { m.impl("index_loss", TORCH_BOX(&dmattn::cuda::index_loss_op)); }
