// Attention backward on CUDA: executes a plan (host/plan_backward.cpp says what runs when). Nothing here waits for the device.
#include <algorithm>

#include "../backward_arguments.h"
#include "calls.h"
#include "find_keys.h"
#include "inputs.h"
#include "target.h"

namespace dmattn::cuda {
namespace {

// A gradient of shape [B|1, H|Hkv|1, ...] as a PerHead; null when it is not wanted. batch_stride is 0 where batches share it.
PerHead grad_per_head(void* data, const Tensor& grad, const AttentionParams& p, int64_t elements) {
  PerHead view;
  if (!data || p.heads == 0) return view;
  view.data = data;
  view.batch_stride = grad.size(0) < p.batch ? 0 : grad.size(1) * elements;
  view.head_stride = grad.size(1) == 1 ? 0 : elements;
  view.head_divisor = p.heads / grad.size(1);
  return view;
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
  IndexLists& index = p.mask.index;
  if (index.entries.data) {
    index.entries.data = static_cast<char*>(index.entries.data) + index.entries.offset(batch, head) * 4;
    if (index.offset) index.offset += batch * index.offset_stride;
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

// Clears what is there and has to be zero at the start.
void clear(const Region& region, void* memory, cudaStream_t stream) {
  if (region.bytes == 0) return;
  DMATTN_CUDA_CHECK(cudaMemsetAsync(region.in<char>(memory), 0, static_cast<size_t>(region.bytes), stream));
}

// Sets what the instances with options of Hopper's kernels read.
void set_options(BackwardCall& call) {
  const AttentionParams& p = call.b.forward;
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
}

// Runs the Hopper kernel, some batches and heads at a time, and what turns its sums into gradients. Where the call is one part,
// launch_row_terms has cleared the sums of queries, and the tile counter is zero.
void run_sm90(BackwardCall call, const BackwardPlan& plan, void* memory, int32_t* tile_counter, cudaStream_t stream) {
  const AttentionParams& p = call.b.forward;
  const BackwardParts& parts = plan.parts;
  set_options(call);
  const bool is_listed = plan.keys == KeySource::kQueryLists;
  if (call.seen && !is_listed) DMATTN_CUDA_CHECK(launch_find_seen(call, stream));
  const int64_t heads = parts.kv_heads * (p.heads / p.kv_heads);
  for (int64_t batch = 0; batch < p.batch; batch += parts.batches) {
    for (int64_t head = 0; head < p.heads; head += heads) {
      const BackwardCall part =
          part_of(call, batch, std::min(parts.batches, p.batch - batch), head, std::min(heads, p.heads - head));
      const AttentionParams& of_part = part.b.forward;
      if (call.key_sums) DMATTN_CUDA_CHECK(launch_clear_key_sums(part, stream));
      for (int64_t first = 0; first < of_part.heads; first += parts.launch_heads) {
        BackwardCall launch = part_of(part, 0, of_part.batch, first, std::min(parts.launch_heads, of_part.heads - first));
        launch.live_keys.query_lists = find_query_lists(launch.b.forward, plan.query_lists, memory, stream);
        if (is_listed) DMATTN_CUDA_CHECK(launch_listed_seen(launch, stream));
        if (!parts.is_one) {
          const int64_t floats = of_part.batch * launch.b.forward.heads * parts.head_floats;
          DMATTN_CUDA_CHECK(cudaMemsetAsync(call.query_sums, 0, static_cast<size_t>(floats) * sizeof(float), stream));
          DMATTN_CUDA_CHECK(cudaMemsetAsync(tile_counter, 0, sizeof(int32_t), stream));
        }
        if constexpr (kHasSm90) {
          for_each_round(launch, launch.b.forward, plan.unions, memory, tile_counter, stream, [&](const BackwardCall& round) {
            if (round.semaphores && round.live_keys.unions.first_tile > 0) clear(plan.workspace.semaphores, memory, stream);
            check_cuda(sm90::backward(round, plan, tile_counter, stream), "attention kernel");
          });
        }
        DMATTN_CUDA_CHECK(launch_store_query_sums(launch, stream));
      }
      if (call.live_keys.index || call.key_sums) DMATTN_CUDA_CHECK(launch_store_key_sums(part, stream));
    }
  }
}

// Runs the portable kernels and what turns their sums into gradients.
void run_sm80(const BackwardCall& call, const BackwardPlan& plan, void* memory, cudaStream_t stream) {
  if (plan.deterministic && plan.keys != KeySource::kUnions) {
    BackwardCall by_keys = call, by_queries = call;
    by_queries.grad_key_bias = by_queries.grad_bias = {};
    by_keys.batches_per_block = plan.batches_per_block, by_keys.kv_heads_per_block = plan.kv_heads_per_block;
    if (!plan.backward_dkdv_takes_lists) by_keys.live_keys = {};
    check_cuda(sm80::backward_dkdv(by_keys, plan.backward_dkdv, stream), "attention kernel");
    // Zeros for keys that were not gathered.
    if (by_keys.live_keys.index) DMATTN_CUDA_CHECK(launch_store_key_sums(by_keys, stream));
    check_cuda(sm80::backward_dq(by_queries, plan.backward_dq, stream), "attention kernel");
  } else if (call.key_sums && !call.query_sums) {
    DMATTN_CUDA_CHECK(launch_clear_key_sums(call, stream));
    for_each_round(call, call.b.forward, plan.unions, memory, call.tile_counter, stream, [&](const BackwardCall& round) {
      if (round.live_keys.unions.first_tile > 0) clear(plan.workspace.semaphores, memory, stream);
      check_cuda(sm80::backward_dq(round, plan.backward_dq, stream), "attention kernel");
    });
    DMATTN_CUDA_CHECK(launch_store_key_sums(call, stream));
  } else {
    BackwardCall by_keys = call;
    clear(plan.workspace.query_sums, memory, stream);
    if (call.key_sums) {
      by_keys.live_keys.query_lists = find_query_lists(call.b.forward, plan.query_lists, memory, stream);
      DMATTN_CUDA_CHECK(launch_listed_seen(by_keys, stream));
      DMATTN_CUDA_CHECK(launch_clear_key_sums(call, stream));
    }
    check_cuda(sm80::backward_dkdv(by_keys, plan.backward_dkdv, stream), "attention kernel");
    DMATTN_CUDA_CHECK(launch_store_query_sums(call, stream));
    if (call.key_sums) DMATTN_CUDA_CHECK(launch_store_key_sums(call, stream));
  }
}

// Gives the call its places in the workspace.
void lay_out(BackwardCall& call, const BackwardPlan::Workspace& workspace, void* memory) {
  call.query_sums = workspace.query_sums.in<float>(memory);
  call.key_sums = workspace.key_sums.in<float>(memory);
  call.lse2 = workspace.lse2.in<float>(memory);
  call.delta = workspace.delta.in<float>(memory);
  call.lse = workspace.lse.in<float>(memory);
  call.lse_rest2 = workspace.lse_rest2.in<float>(memory);
  call.row_hash = workspace.row_hash.in<uint32_t>(memory);
  call.semaphores = workspace.semaphores.in<int32_t>(memory);
  call.seen = workspace.seen.in<uint32_t>(memory);
}

// A bias [1, 1, 1, Sk] of zeros, whose rows all queries share.
PerHead bias_of_zeros(float* zeros, const AttentionParams& p) {
  PerHead bias;
  bias.data = zeros, bias.head_divisor = p.heads;
  return bias;
}

// Copies what has rows that 16-byte copies cannot read, and what tensor copies may refuse where no other kernels take the call.
void align_rows(CheckedBackward& checked) {
  BackwardParams& b = checked.params;
  const AttentionParams& p = b.forward;
  align_inputs(checked.forward);
  checked.grad_out = with_aligned_rows(checked.grad_out), checked.out = with_aligned_rows(checked.out);
  if (std::max(p.query_length, p.key_length) > kMaxLength && repeats_rows(checked.grad_out)) {
    checked.grad_out = torch::stable::clone(torch::stable::contiguous(checked.grad_out));
  }
  const AttentionParams& aligned = checked.forward.params;
  b.forward.query = aligned.query, b.forward.key = aligned.key, b.forward.value = aligned.value;
  b.forward.out = view_of(checked.out), b.grad_out = view_of(checked.grad_out);
}

BackwardResults backward_op(BackwardArguments given) {
  const Device device(given.forward.query);
  const cudaStream_t stream = device.stream();
  CheckedBackward checked = check_backward(std::move(given), false);
  align_rows(checked);
  BackwardCall call;
  call.b = checked.params;
  AttentionParams& p = call.b.forward;
  call.grad_key_bias = grad_per_head(call.b.grad_key_bias, checked.grad_key_bias, p, p.key_length);
  call.grad_bias = grad_per_head(call.b.grad_bias, checked.grad_bias, p, p.query_length * p.key_length);
  const BackwardPlan plan = plan_backward(call.b, {call.grad_key_bias, call.grad_bias}, target_of(device));
  if (plan.family == Family::kNone) {  // nothing to add up, but H = 0 leaves keys with zero gradients
    for (Tensor* grad : {&checked.grad_query, &checked.grad_key, &checked.grad_value, &checked.grad_bias}) {
      torch::stable::zero_(*grad);
    }
    return checked.results();
  }
  if (call.b.grad_bias && !plan.stores_bias) torch::stable::zero_(checked.grad_bias);

  const BackwardPlan::Workspace& workspace = plan.workspace;
  const OwnedWorkspace memory(checked.forward.given.query, workspace.bytes);
  lay_out(call, workspace, memory.data());
  clear(workspace.zero_bias, memory.data(), stream);
  clear(workspace.flags, memory.data(), stream);
  clear(workspace.semaphores, memory.data(), stream);
  if (plan.adds_zero_bias) {
    p.bias = bias_of_zeros(workspace.zero_bias.in<float>(memory.data()), p);
    p.bias_row_stride = 0, p.bias_dtype = DType::kFloat32;
  }
  call.live_keys = find_keys(p, plan.lists, workspace.lists.in<int32_t>(memory.data()), stream);
  int32_t* const flags = workspace.flags.in<int32_t>(memory.data());
  call.row_flags = flags ? flags : call.live_keys.row_flags;
  int32_t* const tile_counter = flags ? flags + 1 : call.live_keys.tile_counter;
  call.scale = static_cast<float>(p.scale), call.scale_2 = static_cast<float>(p.scale * kLog2OfE);
  call.padded_queries = plan.padded_queries;
  call.heads_at_once = static_cast<int>(plan.heads_at_once), call.seen_words = static_cast<int>(plan.seen_words);

  call.tile_counter = tile_counter, call.chained_heads = plan.chained_heads;

  const bool is_sm90 = plan.family == Family::kSm90;
  call.query_sums_in_tiles = is_sm90 && plan.keys != KeySource::kQueryLists;
  BackwardCall for_terms = call;
  if (!is_sm90 || !plan.parts.is_one) for_terms.query_sums = nullptr;  // nothing to clear
  DMATTN_CUDA_CHECK(launch_row_terms(for_terms, stream));
  if (is_sm90) {
    run_sm90(call, plan, memory.data(), tile_counter, stream);
  } else {
    run_sm80(call, plan, memory.data(), stream);
  }
  return checked.results();
}

}  // namespace
}  // namespace dmattn::cuda

DMATTN_KERNELS(CUDA, m) { m.impl("backward", TORCH_BOX(&dmattn::unpack_backward<dmattn::cuda::backward_op>)); }
