// Attention backward on CUDA: the host side, which picks the kernels. Nothing here waits for the device.
//
// The Hopper kernel is key-major: it adds up grad_query in fp32 in global memory and, where live keys are gathered from more
// than one list or blocks share the heads of a group, rows of grad_key and grad_value too. In a deterministic call blocks do that
// in turns. The portable family takes the other calls. Without a mask its key-major kernel adds up grad_query; with gathered keys
// or a block mask its query-major kernel adds up rows of grad_key and grad_value. A deterministic call runs both, each without
// its adds to global memory.
#include <algorithm>

#include "../backward_arguments.h"
#include "calls.h"
#include "family.h"
#include "inputs.h"
#include "owned_live_keys.h"

namespace dmattn::cuda {
namespace {

// A gradient of shape [B|1, H|Hkv|1, ...] as a PerHead; null when it is not wanted. batch_stride is 0 where batches share it.
PerHead grad_per_head(void* data, const Tensor& grad, const AttentionParams& p, int64_t elements) {
  PerHead view;
  if (!data) return view;
  view.data = data;
  view.batch_stride = grad.size(0) < p.batch ? 0 : grad.size(1) * elements;
  view.head_stride = grad.size(1) == 1 ? 0 : elements;
  view.head_divisor = p.heads / grad.size(1);
  return view;
}

// For sums in a fixed order: batches or kv heads that add to the same elements are taken by one block, one after the other.
void keep_together(BackwardCall& call, const PerHead& grad) {
  const AttentionParams& p = call.b.forward;
  if (!grad.data) return;
  if (grad.batch_stride == 0) call.batches_per_block = p.batch;
  if (grad.head_divisor > p.heads / p.kv_heads) call.kv_heads_per_block = p.kv_heads;
}

constexpr int64_t kMostNarrowDim = 128;  // wider heads have a Hopper kernel of their own

int64_t width_of(const AttentionParams& p) { return std::max(p.head_dim, p.value_dim); }

// How many heads of a group may one launch of a deterministic call take? Those that share their intervals and, where keys are
// gathered or heads wide, their key_bias.
int64_t heads_in_order(const AttentionParams& p, bool is_gathered) {
  const int64_t heads = heads_that_share(p, {&p.mask.start, &p.mask.end});
  const bool needs_key_bias = is_gathered || width_of(p) > kMostNarrowDim;
  return needs_key_bias ? std::min(heads, heads_that_share(p, {&p.key_bias})) : heads;
}

bool sm90_needs_bias([[maybe_unused]] const AttentionParams& p) {
#ifdef DMATTN_WITH_SM90
  return sm90::backward_needs_bias(p);
#else
  return false;
#endif
}

bool sm90_has_backward([[maybe_unused]] const AttentionParams& p, [[maybe_unused]] bool deterministic) {
#ifdef DMATTN_WITH_SM90
  return sm90::has_backward(p, deterministic);
#else
  return false;
#endif
}

bool sm90_schedules_in_order([[maybe_unused]] const AttentionParams& p, [[maybe_unused]] bool deterministic,
                             [[maybe_unused]] const Device& device) {
#ifdef DMATTN_WITH_SM90
  return sm90::backward_schedules_in_order(p, deterministic, device_attribute<cudaDevAttrMultiProcessorCount>(device.index()));
#else
  return false;
#endif
}

int64_t sm90_heads_at_once([[maybe_unused]] const AttentionParams& p, [[maybe_unused]] const Device& device) {
#ifdef DMATTN_WITH_SM90
  return sm90::backward_heads_at_once(p, device_attribute<cudaDevAttrMultiProcessorCount>(device.index()));
#else
  return p.heads / p.kv_heads;
#endif
}

cudaError_t sm90_backward([[maybe_unused]] const BackwardCall& call, [[maybe_unused]] int* tile_counter,
                          [[maybe_unused]] const Device& device) {
#ifdef DMATTN_WITH_SM90
  return sm90::backward(call, tile_counter, device_attribute<cudaDevAttrMultiProcessorCount>(device.index()), device.stream());
#else
  return cudaErrorNotSupported;
#endif
}

// The part of a call that has some of its batches, or of one batch some query heads: whole groups, or some heads of one.
BackwardCall part_of(const BackwardCall& call, int64_t batch, int64_t batches, int64_t head, int64_t heads) {
  BackwardCall part = call;
  AttentionParams& p = part.b.forward;
  const int64_t group = p.heads / p.kv_heads, kv_head = head / group;
  const auto move = [&](TensorView& tensor, int64_t first) {
    tensor.data = static_cast<char*>(tensor.data) + (batch * tensor.batch_stride + first * tensor.head_stride) * 2;
  };
  for (TensorView* tensor : {&p.query, &p.out, &part.b.grad_out, &part.b.grad_query}) move(*tensor, head);
  for (TensorView* tensor : {&p.key, &p.value, &part.b.grad_key, &part.b.grad_value}) move(*tensor, kv_head);
  for (PerHead* row :
       {&p.mask.start, &p.mask.end, &p.mask.tiles, &p.mask.rows, &p.mask.columns, &p.key_bias, &part.grad_key_bias}) {
    if (row->data) row->data = static_cast<char*>(row->data) + row->offset(batch, head) * 4;
  }
  if (p.bias.data) {
    p.bias.data = static_cast<char*>(p.bias.data) + p.bias.offset(batch, head) * (p.bias_dtype == DType::kFloat32 ? 4 : 2);
  }
  if (part.grad_bias.data) {
    part.grad_bias.data = static_cast<char*>(part.grad_bias.data) + part.grad_bias.offset(batch, head) * 4;
  }
  LiveKeys& live_keys = part.live_keys;
  if (live_keys.index) {
    const int64_t mask_head = live_keys.mask_head_of(static_cast<int>(batch), static_cast<int>(head));
    live_keys.index += mask_head * live_keys.capacity, live_keys.span += mask_head * live_keys.capacity;
    live_keys.count += mask_head, live_keys.shift += mask_head, live_keys.lists += mask_head * live_keys.most_lists;
  }
  const int64_t terms = (batch * p.heads + head) * call.padded_queries;
  part.lse2 += terms, part.delta += terms;
  if (part.semaphores) part.semaphores += terms / kSemaphoreQueries;
  part.lse += terms, part.lse_rest2 += terms;
  if (part.row_hash) part.row_hash += terms;
  if (part.seen) part.seen += (batch * p.heads + head) / part.heads_at_once * part.seen_words;
  p.batch = batches, p.heads = heads, p.kv_heads = ceil_div(heads, group);
  return part;
}

// Is every live key in one list of the Hopper kernel alone? Then its gradients need no sums in memory. That takes one segment for
// all queries, which for few queries costs less than the sums, and a group of heads that share their mask. The kernel of wide
// heads adds sums.
bool has_one_tile_visit(const AttentionParams& p) {
  return heads_that_share(p, {&p.mask.start, &p.mask.end}) == p.heads / p.kv_heads && gathers(p) &&
         p.query_length <= kMostOneList && p.key_length <= kMostOneList && width_of(p) <= kMostNarrowDim;
}

// The sums in fp32 that the Hopper kernel adds up in memory. Where they would need more than kMostFloats, the call runs in parts,
// some batches or kv heads at a time, which use the same memory. Where keys have sums, and those of one kv head's group of heads
// would need more than kMostGroupFloats, some heads of the group run at a time. A fixed order is one within a launch, so batches
// or heads whose sums are added to the same elements run one after the other then.
struct Sums {
  int64_t head_floats, key_floats;          // of a query head and of a kv head
  int64_t batches, kv_heads, launch_heads;  // batches and kv heads of a part; query heads of a launch, all of the part or fewer

  // group_heads: how many of a group one launch may take. With fewer than all keys have sums.
  Sums(const BackwardCall& call, bool sums_keys, int64_t group_heads) {
    constexpr int64_t kMostFloats = int64_t{1} << 28, kMostGroupFloats = kMostFloats * 4;
    const AttentionParams& p = call.b.forward;
    const int64_t group = p.heads / p.kv_heads;
    head_floats = call.padded_queries * sum_width(p.head_dim);
    key_floats = sums_keys ? p.key_length * key_sum_width(p) : 0;
    const int64_t floats = group * head_floats + key_floats;
    const int64_t batch_parts = std::clamp<int64_t>(ceil_div(p.batch * p.kv_heads * floats, kMostFloats), 1, p.batch);
    batches = ceil_div(p.batch, batch_parts);
    const int64_t head_parts = batches > 1 ? 1 : std::clamp<int64_t>(ceil_div(p.kv_heads * floats, kMostFloats), 1, p.kv_heads);
    kv_heads = ceil_div(p.kv_heads, head_parts);
    if (call.b.deterministic) {
      BackwardCall together = call;
      keep_together(together, call.grad_key_bias);
      keep_together(together, call.grad_bias);
      if (together.kv_heads_per_block > 1 || group_heads < group) kv_heads = 1;
      if (together.batches_per_block > 1 || kv_heads < p.kv_heads || group_heads < group) batches = 1;
    }
    launch_heads = group_heads < group ? group_heads : kv_heads * group;
    const auto fits = [&] {
      const bool divides =
          group % launch_heads == 0 && (launch_heads % call.heads_at_once == 0 || call.heads_at_once % launch_heads == 0);
      return divides && launch_heads * head_floats + key_floats <= kMostGroupFloats;
    };
    if (sums_keys && floats > kMostGroupFloats) {
      while (launch_heads > 1 && !fits()) --launch_heads;
    }
  }
  int64_t query_floats() const { return batches * launch_heads * head_floats; }
  bool is_one_part(const AttentionParams& p) const { return batches == p.batch && launch_heads == p.heads; }
};

// Runs the Hopper kernel and what turns its sums into gradients; false where it does not take the call. Where the call is one
// part, launch_row_terms has cleared the sums of queries, and the tile counter is zero.
bool run_sm90(BackwardCall call, const Sums& sums, int32_t* tile_counter, const Tensor& like, const Device& device) {
  const AttentionParams& p = call.b.forward;
  const cudaStream_t stream = device.stream();
  const bool is_gathered = call.live_keys.index, is_one_part = sums.is_one_part(p);
  std::optional<Tensor> seen, key_sums;
  call.logit_scale = call.scale;
  if (p.softcap > 0) {
    call.cap_scale = static_cast<float>(p.scale / p.softcap);
    call.logit_scale = static_cast<float>(p.softcap), call.scale_2 = static_cast<float>(p.softcap * kLog2OfE);
  }
  if (p.dropout_seed) {
    call.threshold = dropout_threshold(p.dropout_p);
    call.keep_probability = static_cast<float>(1.0 - p.dropout_p);
    call.keep_scale = static_cast<float>(1.0 / (1.0 - p.dropout_p));
    call.scale *= call.keep_scale;
  }
  if (p.mask.tiles.data || (gathers(p) && !is_gathered)) {
    call.seen_words = static_cast<int>(ceil_div(p.key_length, 128) * 4);
    seen = empty_on(like, {p.batch * p.heads / call.heads_at_once * call.seen_words}, ScalarType::Int);
    call.seen = static_cast<uint32_t*>(seen->data_ptr());
    DMATTN_CUDA_CHECK(launch_find_seen(call, stream));
  }
  if (sums.key_floats > 0) {
    key_sums = empty_on(like, {sums.batches * sums.kv_heads * sums.key_floats + key_sum_width(p)}, ScalarType::Float);
    call.key_sums = static_cast<float*>(key_sums->data_ptr());
  }
  const int64_t group = p.heads / p.kv_heads, heads = sums.kv_heads * group;
  for (int64_t batch = 0; batch < p.batch; batch += sums.batches) {
    for (int64_t head = 0; head < p.heads; head += heads) {
      const BackwardCall part =
          part_of(call, batch, std::min(sums.batches, p.batch - batch), head, std::min(heads, p.heads - head));
      const AttentionParams& of_part = part.b.forward;
      if (call.key_sums) DMATTN_CUDA_CHECK(launch_clear_key_sums(part, stream));
      for (int64_t first = 0; first < of_part.heads; first += sums.launch_heads) {
        const BackwardCall launch = part_of(part, 0, of_part.batch, first, std::min(sums.launch_heads, of_part.heads - first));
        if (!is_one_part) {
          const int64_t floats = of_part.batch * launch.b.forward.heads * sums.head_floats;
          DMATTN_CUDA_CHECK(cudaMemsetAsync(call.query_sums, 0, static_cast<size_t>(floats) * sizeof(float), stream));
          DMATTN_CUDA_CHECK(cudaMemsetAsync(tile_counter, 0, sizeof(int32_t), stream));
        }
        const cudaError_t status = sm90_backward(launch, tile_counter, device);
        if (status == cudaErrorNotSupported) return false;
        check_cuda(status, "attention kernel");
        DMATTN_CUDA_CHECK(launch_store_query_sums(launch, stream));
      }
      if (is_gathered || call.key_sums) DMATTN_CUDA_CHECK(launch_store_key_sums(part, stream));
    }
  }
  return true;
}

// Runs the portable kernels and what turns their sums into gradients.
void run_sm80(BackwardCall call, const Tensor& like, const Device& device) {
  const AttentionParams& p = call.b.forward;
  const cudaStream_t stream = device.stream();
  const int shared_bytes = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(device.index());
  const sm80::SmemBudget smem_budget = shared_bytes >= 163 * 1024 ? sm80::SmemBudget::kLarge : sm80::SmemBudget::kSmall;
  if (call.b.deterministic) {
    BackwardCall by_keys = call, by_queries = call;
    by_queries.grad_key_bias = by_queries.grad_bias = {};
    keep_together(by_keys, call.grad_key_bias);
    keep_together(by_keys, call.grad_bias);
    // Heads of a group that see different keys cannot share a gathered tile, nor can a key be in different tiles of heads that
    // share a block.
    const bool shares_blocks =
        by_keys.batches_per_block * by_keys.kv_heads_per_block > 1 && call.live_keys.batches * call.live_keys.heads > 1;
    if (shares_blocks || call.live_keys.head_divisor % (p.heads / p.kv_heads) != 0) by_keys.live_keys = {};
    check_launch(sm80::backward_dkdv(by_keys, smem_budget, stream), p);
    if (by_keys.live_keys.index) {
      DMATTN_CUDA_CHECK(launch_store_key_sums(by_keys, stream));  // zeros for keys that were not gathered
    }
    check_launch(sm80::backward_dq(by_queries, smem_budget, stream), p);
  } else if (call.live_keys.index || p.mask.tiles.data) {
    const Tensor sums = empty_on(like, {(p.batch * p.kv_heads * p.key_length + 1) * key_sum_width(p)}, ScalarType::Float);
    call.key_sums = static_cast<float*>(sums.data_ptr());
    DMATTN_CUDA_CHECK(launch_clear_key_sums(call, stream));
    check_launch(sm80::backward_dq(call, smem_budget, stream), p);
    DMATTN_CUDA_CHECK(launch_store_key_sums(call, stream));
  } else {
    const Tensor sums = zeros_on(like, {(p.batch * p.heads * p.query_length + 1) * sum_width(p.head_dim)}, ScalarType::Float);
    call.query_sums = static_cast<float*>(sums.data_ptr());
    check_launch(sm80::backward_dkdv(call, smem_budget, stream), p);
    DMATTN_CUDA_CHECK(launch_store_query_sums(call, stream));
  }
}

BackwardResults backward_op(BackwardArguments given) {
  const Device device(given.forward.query);
  const cudaStream_t stream = device.stream();
  CheckedBackward checked = check_backward(std::move(given), false);
  const Tensor& query = checked.forward.given.query;
  BackwardCall call;
  call.b = checked.params;
  AttentionParams& p = call.b.forward;
  check_cuda_support(p);
  const Family family = choose_family(device.index());
  if (p.batch * p.heads * (p.query_length + p.key_length) == 0) {  // nothing to add up, but H = 0 leaves keys with zero gradients
    for (Tensor* grad : {&checked.grad_query, &checked.grad_key, &checked.grad_value, &checked.grad_bias}) {
      torch::stable::zero_(*grad);
    }
    return checked.results();
  }

  // Copy what has rows that 16-byte copies cannot read, and what tensor copies may refuse where no other kernels take the call.
  align_inputs(checked.forward);
  checked.grad_out = with_aligned_rows(checked.grad_out), checked.out = with_aligned_rows(checked.out);
  if (std::max(p.query_length, p.key_length) > kMaxLength && repeats_rows(checked.grad_out)) {
    checked.grad_out = torch::stable::clone(torch::stable::contiguous(checked.grad_out));
  }
  p.query = checked.forward.params.query, p.key = checked.forward.params.key, p.value = checked.forward.params.value;
  p.out = view_of(checked.out), call.b.grad_out = view_of(checked.grad_out);
  call.grad_key_bias = grad_per_head(call.b.grad_key_bias, checked.grad_key_bias, p, p.key_length);
  call.grad_bias = grad_per_head(call.b.grad_bias, checked.grad_bias, p, p.query_length * p.key_length);

  // Find the live keys.
  std::optional<Tensor> zeros;
  if (family != Family::kSm80 && sm90_needs_bias(p)) {
    zeros = zeros_on(query, {p.key_length}, ScalarType::Float);
    p.bias = {}, p.bias.data = zeros->data_ptr(), p.bias.head_divisor = p.heads;
    p.bias_row_stride = 0, p.bias_dtype = DType::kFloat32;
  }
  const bool is_sm90 = family != Family::kSm80 && sm90_has_backward(p, call.b.deterministic);
  LiveKeysOptions options;
  options.keeps_live = call.b.deterministic;
  options.orders = !is_sm90;
  // Long segments: what a tile of keys costs once is a smaller part then. In the longest sequences keys of which many die in
  // their segment come behind those that outlive it, so that few tiles meet all its queries; in others that costs more than it
  // gains.
  // Sums in a fixed order need lists in key order, and many of them.
  const bool is_fast = is_sm90 && !call.b.deterministic;
  if (is_fast && p.query_length >= 8192) options.shortest = 1;
  options.by_lifetime = is_fast && p.query_length >= 65536;
  const bool is_in_order = is_sm90 && sm90_schedules_in_order(p, call.b.deterministic, device);
  check_length_without_lists(p, is_in_order);
  options.is_one = is_fast && !is_in_order && has_one_tile_visit(p);
  const OwnedLiveKeys owned = is_in_order ? OwnedLiveKeys() : make_live_keys(p, query, stream, options);
  call.live_keys = owned.live_keys;

  // Compute the terms of each query.
  call.scale = static_cast<float>(p.scale), call.scale_2 = static_cast<float>(p.scale * kLog2OfE);
  call.padded_queries = ceil_div(p.query_length, kQueryPadding) * kQueryPadding;
  const int64_t terms = p.batch * p.heads * call.padded_queries;
  const bool is_gathered = call.live_keys.index;
  const int64_t group = p.heads / p.kv_heads;
  const int64_t group_heads = is_sm90 && call.b.deterministic ? heads_in_order(p, is_gathered) : group;
  const int64_t heads_at_once = is_fast && !is_gathered ? sm90_heads_at_once(p, device) : group_heads;
  call.heads_at_once = static_cast<int>(heads_at_once);
  const Sums sums(call, heads_at_once < group || (is_gathered && !options.is_one), group_heads);
  const bool has_hashes = is_sm90 && p.dropout_seed;
  const int64_t query_floats = is_sm90 ? sums.query_floats() : 0;
  const int64_t semaphores = is_sm90 && call.b.deterministic ? terms / kSemaphoreQueries : 0;
  const Tensor memory = empty_on(query, {query_floats + (has_hashes ? 5 : 4) * terms + 2 + semaphores}, ScalarType::Float);
  float* const floats = static_cast<float*>(memory.data_ptr());
  call.lse2 = floats + query_floats;
  call.delta = call.lse2 + terms;
  call.lse = call.delta + terms;
  call.lse_rest2 = call.lse + terms;
  if (has_hashes) call.row_hash = reinterpret_cast<uint32_t*>(call.lse_rest2 + terms);
  int32_t* tile_counter = owned.live_keys.tile_counter;
  call.row_flags = owned.live_keys.row_flags;
  if (!call.row_flags) {
    call.row_flags = reinterpret_cast<int32_t*>(call.lse_rest2 + (has_hashes ? 2 : 1) * terms), tile_counter = call.row_flags + 1;
    DMATTN_CUDA_CHECK(cudaMemsetAsync(call.row_flags, 0, 2 * sizeof(int32_t), stream));
  }
  if (semaphores > 0) {
    call.semaphores = reinterpret_cast<int32_t*>(call.lse_rest2 + (has_hashes ? 2 : 1) * terms) + 2;
    DMATTN_CUDA_CHECK(cudaMemsetAsync(call.semaphores, 0, static_cast<size_t>(semaphores) * sizeof(int32_t), stream));
  }
  if (is_sm90) call.query_sums = floats, call.query_sums_in_tiles = true;
  BackwardCall for_terms = call;
  if (!is_sm90 || !sums.is_one_part(p)) for_terms.query_sums = nullptr;  // nothing to clear
  DMATTN_CUDA_CHECK(launch_row_terms(for_terms, stream));

  // Without a mask and causality Hopper's kernel meets every pair, so it stores every element of a grad_bias that no two share.
  const bool is_whole = !p.mask.is_causal && !p.mask.tiles.data && !gathers(p);
  const bool writes_bias = call.b.grad_bias && is_sm90 && is_whole && owns_bias_gradient(call);
  if (call.b.grad_bias && !writes_bias) torch::stable::zero_(checked.grad_bias);
  if (is_sm90 && run_sm90(call, sums, tile_counter, query, device)) return checked.results();
  if (writes_bias) torch::stable::zero_(checked.grad_bias);
  check_length_without_lists(p, false);
  call.query_sums = nullptr, call.query_sums_in_tiles = false, call.semaphores = nullptr;
  run_sm80(call, query, device);
  return checked.results();
}

}  // namespace
}  // namespace dmattn::cuda

DMATTN_KERNELS(CUDA, m) { m.impl("backward", TORCH_BOX(&dmattn::unpack_backward<dmattn::cuda::backward_op>)); }
