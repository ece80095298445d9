// Decoding on CUDA: the host side. Nothing here waits for the device, so the op can be captured in a graph, and nothing depends
// on lengths or page numbers, so a graph serves all of them.
#include "decode.h"

#include <algorithm>

#include "cache.h"
#include "inputs.h"
#include "step.h"
#include "target.h"

namespace dmattn::cuda {
namespace {

void align_caches(CheckedDecode& checked) {
  DecodeParams& p = checked.params;
  checked.query = with_aligned_rows(checked.query), p.query = view_of(checked.query);
  checked.key = with_aligned_rows(checked.key), p.key = view_of_cache(checked.key, p.page_table);
  checked.value = with_aligned_rows(checked.value), p.value = view_of_cache(checked.value, p.page_table);
}

// How the keys of a sequence are cut; the workspace is asked for later.
DecodeCall call_of(const DecodeParams& p, int32_t device, bool may_be_cluster) {
  DecodeCall call{p};
  call.scale = static_cast<float>(p.scale);
  call.group = static_cast<int>(p.heads / p.kv_heads), call.rows = static_cast<int>(call.group * p.queries);
  call.split_keys = split_keys_of(p.capacity, call.rows);
  const int splits = static_cast<int>(std::max<int64_t>(1, ceil_div(p.capacity, call.split_keys)));
  const int64_t all_rows = p.batch * p.heads * p.queries;
  check(all_rows * splits < int64_t{1} << 31, "query: expected B x H x T x splits below 2^31, got ", p.batch, " x ", p.heads,
        " x ", p.queries, " x ", splits);
  group_splits(call, splits, device_attribute<cudaDevAttrMultiProcessorCount>(device), may_be_cluster);
  return call;
}

}  // namespace

void run_decode(CheckedDecode& checked, const Device& device, const CacheParams* cache) {
  const DecodeParams& p = checked.params;
  check_kernel_dtype(p.dtype);
  const int64_t all_rows = p.batch * p.heads * p.queries;
  const bool has_clusters = allowed_family(target_of(device)) != WantedFamily::kSm80;  // both families run the same kernels
  if (all_rows == 0) {
    if (cache && p.batch * p.kv_heads > 0) DMATTN_CUDA_CHECK(launch_cache_update(*cache, device.stream()));
    return;
  }
  align_caches(checked);
  DecodeCall call = call_of(p, device.index(), has_clusters);
  const auto check_decode_launch = [&](cudaError_t status) {
    check(status != cudaErrorNotSupported, "no kernel for head sizes D=", p.head_dim, " and Dv=", p.value_dim,
          "; compiled: ", sm80::compiled_decode());
    check_cuda(status, "decode kernel");
  };
  // Do everything in one kernel where a block or a cluster has all keys of a sequence.
  if (call.is_cluster || (cache && call.rows <= kMostFewRows && call.parts == 1)) {
    StepCall step{call, cache ? *cache : CacheParams{}};
    if (cache) step.decode.p.lengths = nullptr;  // the cache has them
    const cudaError_t status = cache ? sm80::step(step, device.stream()) : sm80::decode(call, device.stream());
    if (status != cudaErrorInvalidClusterSize) return check_decode_launch(status);
    call = call_of(p, device.index(), false);
  }
  if (cache) DMATTN_CUDA_CHECK(launch_cache_update(*cache, device.stream()));
  std::optional<Tensor> parts;
  if (call.parts > 1) {
    const int64_t count = all_rows * call.parts;
    parts = empty_on(checked.query, {count * (p.value_dim + 2)}, ScalarType::Float);
    call.part_out = static_cast<float*>(parts->data_ptr());
    call.part_sums = reinterpret_cast<float2*>(call.part_out + count * p.value_dim);
  }
  check_decode_launch(sm80::decode(call, device.stream()));
  if (call.part_out) DMATTN_CUDA_CHECK(launch_merge_parts(call, device.stream()));
}

namespace {

std::tuple<Tensor, Tensor> decode_op(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<Tensor> lengths,
                                     std::optional<Tensor> page_table, std::optional<Tensor> key_bias,
                                     std::optional<Tensor> sinks, bool is_causal, double scale, double softcap) {
  const Device device(query);
  CheckedDecode checked = check_decode(query, key, value, std::move(lengths), std::move(page_table), std::move(key_bias),
                                       std::move(sinks), is_causal, scale, softcap);
  run_decode(checked, device);
  return {checked.out, checked.lse};
}

}  // namespace
}  // namespace dmattn::cuda

DMATTN_KERNELS(CUDA, m) { m.impl("decode", TORCH_BOX(&dmattn::cuda::decode_op)); }
