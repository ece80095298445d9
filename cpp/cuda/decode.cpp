// Decoding on CUDA: the host side. Nothing here waits for the device, so the op can be captured in a graph, and nothing depends
// on lengths or page numbers, so a graph serves all of them.
#include <algorithm>

#include "../decode_arguments.h"
#include "family.h"
#include "inputs.h"
#include "splits.h"

namespace dmattn::cuda {
namespace {

void align_caches(CheckedDecode& checked) {
  DecodeParams& p = checked.params;
  checked.query = with_aligned_rows(checked.query), p.query = view_of(checked.query);
  checked.key = with_aligned_rows(checked.key), p.key = view_of_cache(checked.key, p.page_table);
  checked.value = with_aligned_rows(checked.value), p.value = view_of_cache(checked.value, p.page_table);
}

// How many neighbouring splits a block takes: as many as leave the device two rounds of blocks. Grouping changes no bits.
void group_splits(DecodeCall& call, int splits, int multiprocessors) {
  constexpr int kBlocksPerMultiprocessor = 2, kRounds = 2;
  const int64_t heads = call.p.batch * call.p.kv_heads;
  const auto parts_of = [&](int block_splits) { return ceil_div(splits, block_splits); };
  while (call.block_splits < kMostBlockSplits && call.block_splits < splits &&
         heads * parts_of(2 * call.block_splits) >= int64_t{kRounds} * kBlocksPerMultiprocessor * multiprocessors) {
    call.block_splits *= 2;
  }
  call.parts = static_cast<int>(parts_of(call.block_splits));
}

std::tuple<Tensor, Tensor> decode_op(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<Tensor> lengths,
                                     std::optional<Tensor> page_table, std::optional<Tensor> key_bias,
                                     std::optional<Tensor> sinks, bool is_causal, double scale, double softcap) {
  const Device device(query);
  CheckedDecode checked = check_decode(query, key, value, std::move(lengths), std::move(page_table), std::move(key_bias),
                                       std::move(sinks), is_causal, scale, softcap);
  const DecodeParams& p = checked.params;
  check_cuda_dtype(p.dtype);
  choose_family(device.index());  // there is one family; a wrong name is an error all the same
  const int64_t all_rows = p.batch * p.heads * p.queries;
  if (all_rows == 0) return {checked.out, checked.lse};
  align_caches(checked);

  DecodeCall call{p};
  call.scale = static_cast<float>(p.scale);
  call.group = static_cast<int>(p.heads / p.kv_heads), call.rows = static_cast<int>(call.group * p.queries);
  call.split_keys = split_keys_of(p.capacity, call.rows);
  const int splits = static_cast<int>(std::max<int64_t>(1, ceil_div(p.capacity, call.split_keys)));
  check(all_rows * splits < int64_t{1} << 31, "query: expected B x H x T x splits below 2^31, got ", p.batch, " x ", p.heads,
        " x ", p.queries, " x ", splits);
  group_splits(call, splits, device_attribute<cudaDevAttrMultiProcessorCount>(device.index()));
  std::optional<Tensor> parts;
  if (call.parts > 1) {
    const int64_t count = all_rows * call.parts;
    parts = empty_on(query, {count * (p.value_dim + 2)}, ScalarType::Float);
    call.part_out = static_cast<float*>(parts->data_ptr());
    call.part_sums = reinterpret_cast<float2*>(call.part_out + count * p.value_dim);
  }
  const cudaError_t status = sm80::decode(call, device.stream());
  check(status != cudaErrorNotSupported, "no kernel for head sizes D=", p.head_dim, " and Dv=", p.value_dim,
        "; compiled: ", sm80::compiled());
  check_cuda(status, "decode kernel");
  if (call.part_out) DMATTN_CUDA_CHECK(launch_merge_parts(call, device.stream()));
  return {checked.out, checked.lse};
}

}  // namespace
}  // namespace dmattn::cuda

DMATTN_KERNELS(CUDA, m) {
  if (!dmattn::is_first_copy()) return;
  m.impl("decode", TORCH_BOX(&dmattn::cuda::decode_op));
}
