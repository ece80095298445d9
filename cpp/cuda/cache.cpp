// A bounded cache on CUDA: the host side. Nothing here waits for the device, so the ops can be captured in a graph.
#include "cache.h"

#include "../cache_arguments.h"
#include "decode.h"
#include "inputs.h"

namespace dmattn::cuda {
namespace {

// Rows are copied in pieces of 16 bytes, and a head is a block.
void check_cuda_cache(const CacheParams& p) {
  check_kernel_dtype(p.dtype);
  for (auto [name, data] : {std::pair{"key_cache", p.key}, {"value_cache", p.value}}) {
    check(reinterpret_cast<uintptr_t>(data) % 16 == 0, name, ": expected data aligned to 16 bytes, got another address");
  }
  check(p.batch * p.kv_heads * p.slots < int64_t{1} << 31, "key_cache: expected B x Hkv x N below 2^31, got ", p.batch, " x ",
        p.kv_heads, " x ", p.slots);
}

// Takes the new token of each sequence, and enqueues the attention of `checked`: in one kernel where there is one for both.
void run_step(CheckedDecode& checked, const CacheParams& cache, const Device& device) {
  const DecodePlan plan = plan_step(checked.params, target_of(device));
  Clusters clusters = Clusters::kMayBe;
  if (plan.instance.kernel != Kernel::kNone) {
    align_caches(checked);
    StepCall step{call_of(checked.params, plan, nullptr), cache};
    step.decode.p.lengths = nullptr;  // the cache has them
    const cudaError_t status = sm80::step(step, plan.instance, device.stream());
    if (!plan.is_cluster || status != cudaErrorInvalidClusterSize) return check_cuda(status, "decode kernel");
    clusters = Clusters::kNever;
  }
  if (cache.batch * cache.kv_heads > 0) DMATTN_CUDA_CHECK(launch_cache_update(cache, device.stream()));
  run_decode(checked, device, clusters);
}

void update_op(const Tensor& key_cache, const Tensor& value_cache, const Tensor& score_cache, const Tensor& position,
               const Tensor& entered, const Tensor& steps, const Tensor& kept, const Tensor& key, const Tensor& value,
               std::optional<Tensor> scores, std::optional<Tensor> lengths, int64_t window, int64_t local, int64_t sink) {
  const Device device(key_cache);
  CheckedUpdate checked = check_update({key_cache, value_cache, score_cache, position, entered, steps, kept}, key, value,
                                       std::move(scores), std::move(lengths), window, local, sink);
  CacheParams& p = checked.params;
  check_cuda_cache(p);
  if (p.batch * p.kv_heads == 0) return;
  checked.key = with_aligned_rows(checked.key), p.new_key = view_of(checked.key);
  checked.value = with_aligned_rows(checked.value), p.new_value = view_of(checked.value);
  DMATTN_CUDA_CHECK(launch_cache_update(p, device.stream()));
}

std::tuple<Tensor, Tensor> step_op(const Tensor& key_cache, const Tensor& value_cache, const Tensor& score_cache,
                                   const Tensor& position, const Tensor& entered, const Tensor& steps, const Tensor& kept,
                                   const Tensor& query, const Tensor& key, const Tensor& value, std::optional<Tensor> scores,
                                   std::optional<Tensor> lengths, int64_t window, int64_t local, int64_t sink, double scale,
                                   double softcap) {
  const Device device(key_cache);
  const CacheTensors cache{key_cache, value_cache, score_cache, position, entered, steps, kept};
  CheckedUpdate update = check_update(cache, key, value, std::move(scores), std::move(lengths), window, local, sink);
  CheckedDecode attention = check_step(update, cache, query, scale, softcap);
  CacheParams& p = update.params;
  check_cuda_cache(p);
  update.key = with_aligned_rows(update.key), p.new_key = view_of(update.key);
  update.value = with_aligned_rows(update.value), p.new_value = view_of(update.value);
  run_step(attention, p, device);
  return {attention.out, attention.lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> join_op(const Tensor& key_cache, const Tensor& value_cache,
                                                                   const Tensor& score_cache, const Tensor& position,
                                                                   const Tensor& steps, const Tensor& key, const Tensor& value,
                                                                   std::optional<Tensor> scores, std::optional<Tensor> lengths,
                                                                   int64_t visible) {
  const Device device(key_cache);
  CheckedJoin c = check_join(key_cache, value_cache, score_cache, position, steps, key, value, std::move(scores),
                             std::move(lengths), visible);
  CacheParams& p = c.params.cache;
  check_cuda_cache(p);
  check(p.batch * p.kv_heads * (visible + p.tokens) < int64_t{1} << 31, "key: expected B x Hkv x (visible + T) below 2^31, got ",
        p.batch, " x ", p.kv_heads, " x ", visible + p.tokens);
  c.key = with_aligned_rows(c.key), p.new_key = view_of(c.key);
  c.value = with_aligned_rows(c.value), p.new_value = view_of(c.value);
  if (p.batch * p.kv_heads > 0) DMATTN_CUDA_CHECK(launch_cache_join(c.params, device.stream()));
  return {c.all_key, c.all_value, c.all_scores, c.key_position, c.slot, c.segment_end};
}

void extend_op(const Tensor& key_cache, const Tensor& value_cache, const Tensor& score_cache, const Tensor& position,
               const Tensor& entered, const Tensor& steps, const Tensor& kept, const Tensor& key, const Tensor& value,
               const Tensor& scores, const Tensor& key_position, const Tensor& slot, const Tensor& end,
               std::optional<Tensor> lengths, int64_t window, int64_t local, int64_t sink) {
  const Device device(key_cache);
  CheckedExtend checked = check_extend({key_cache, value_cache, score_cache, position, entered, steps, kept}, key, value, scores,
                                       key_position, slot, end, std::move(lengths), window, local, sink);
  CacheParams& p = checked.params;
  check_cuda_cache(p);
  if (p.batch * p.kv_heads == 0) return;
  checked.key = with_aligned_rows(checked.key), p.all_key = view_of(checked.key);
  checked.value = with_aligned_rows(checked.value), p.all_value = view_of(checked.value);
  const Tensor workspace = empty_on(key_cache, {cache_workspace(p)}, ScalarType::Int);
  DMATTN_CUDA_CHECK(launch_cache_extend(p, static_cast<int32_t*>(workspace.data_ptr()), device.stream()));
}

void rewind_op(const Tensor& key_cache, const Tensor& value_cache, const Tensor& score_cache, const Tensor& position,
               const Tensor& entered, const Tensor& steps, const Tensor& kept, const Tensor& count, int64_t window, int64_t local,
               int64_t sink) {
  const Device device(key_cache);
  CacheParams p = check_cache({key_cache, value_cache, score_cache, position, entered, steps, kept}, window, local, sink);
  check_cuda_cache(p);
  Tensor counts = count;
  p.count = to_per_sequence("count", counts, key_cache);
  if (p.batch * p.kv_heads == 0) return;
  DMATTN_CUDA_CHECK(launch_cache_rewind(p, device.stream()));
}

}  // namespace
}  // namespace dmattn::cuda

DMATTN_KERNELS(CUDA, m) {
  m.impl("cache_update", TORCH_BOX(&dmattn::cuda::update_op));
  m.impl("cache_step", TORCH_BOX(&dmattn::cuda::step_op));
  m.impl("cache_join", TORCH_BOX(&dmattn::cuda::join_op));
  m.impl("cache_extend", TORCH_BOX(&dmattn::cuda::extend_op));
  m.impl("cache_rewind", TORCH_BOX(&dmattn::cuda::rewind_op));
}
