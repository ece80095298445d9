// Mask packing on CUDA: the host side. Nothing here waits for the device, so both ops can be captured in a graph.
#include "../pack_arguments.h"
#include "launch.h"
#include "runtime.h"

namespace dmattn::cuda {
namespace {

std::tuple<Tensor, Tensor, Tensor> pack_tiles_op(const Tensor& mask, int64_t query_length, int64_t key_length, int64_t block_q,
                                                 int64_t block_k, int64_t tile_q, int64_t tile_k) {
  CheckedPack checked = check_pack(mask, query_length, key_length, block_q, block_k, tile_q, tile_k);
  const Device device(mask);
  const PackedTiles packed = allocate_tiles(checked);
  const PackParams& p = checked.params;
  const Tensor partial_counts = empty_on(mask, {p.batch * p.heads * p.tiles_q}, ScalarType::Int);
  DMATTN_CUDA_CHECK(launch_pack_tiles(p, static_cast<int32_t*>(partial_counts.data_ptr()), device.stream()));
  return {packed.tiles, packed.rows, packed.columns};
}

Tensor pack_bits_op(const Tensor& mask, const Tensor& tiles, int64_t query_length, int64_t key_length, int64_t block_q,
                    int64_t block_k, int64_t tile_q, int64_t tile_k, int64_t slots) {
  CheckedPack checked = check_pack(mask, query_length, key_length, block_q, block_k, tile_q, tile_k);
  const Device device(mask);
  const Tensor bits = allocate_bits(checked, tiles, slots);
  DMATTN_CUDA_CHECK(launch_pack_bits(checked.params, device.stream()));
  return bits;
}

}  // namespace
}  // namespace dmattn::cuda

DMATTN_KERNELS(CUDA, m) {
  m.impl("pack_tiles", TORCH_BOX(&dmattn::cuda::pack_tiles_op));
  m.impl("pack_bits", TORCH_BOX(&dmattn::cuda::pack_bits_op));
}
