// Attention forward on CUDA: the host side. Nothing here waits for the device, so the op can be captured in a graph.
#include <algorithm>

#include "../forward_arguments.h"
#include "calls.h"
#include "family.h"
#include "inputs.h"
#include "key_ways.h"
#include "owned_live_keys.h"

namespace dmattn::cuda {
namespace {

bool sm90_has_forward([[maybe_unused]] const AttentionParams& p) {
#ifdef DMATTN_WITH_SM90
  return sm90::has_forward(p);
#else
  return false;
#endif
}

KeyWay sm90_forward_way([[maybe_unused]] const AttentionParams& p, [[maybe_unused]] const Device& device) {
#ifdef DMATTN_WITH_SM90
  return sm90::forward_way(p, device_attribute<cudaDevAttrMultiProcessorCount>(device.index()));
#else
  return KeyWay::kLists;
#endif
}

int sm90_range_queries([[maybe_unused]] const AttentionParams& p) {
#ifdef DMATTN_WITH_SM90
  return sm90::forward_range_queries(p);
#else
  return 0;
#endif
}

cudaError_t sm90_forward([[maybe_unused]] const ForwardCall& call, [[maybe_unused]] const Device& device) {
#ifdef DMATTN_WITH_SM90
  return sm90::forward(call, device_attribute<cudaDevAttrMultiProcessorCount>(device.index()), device.stream());
#else
  return cudaErrorNotSupported;
#endif
}

void check_sm90(bool is_taken, const AttentionParams& p) {
  check(is_taken, "DMATTN_FAMILY: sm90 has no kernel for this call: head sizes D=", p.head_dim, " and Dv=", p.value_dim,
        ", or strides that tensor copies do not take (use auto)");
}

// Can compact keys take the place of gathered ones, and are they likely to help? All heads of a group have to share the mask and
// key_bias. Without causality the live keys are often the same for all queries. Few queries are not worth the copies.
bool may_compact(const AttentionParams& p) {
  constexpr int64_t kFewQueries = 8192;
  const int64_t group = p.heads / p.kv_heads;
  if (!gathers(p) || p.mask.is_causal || variant_of(p, true) != Variant::kGathered) return false;
  for (const PerHead* row : {&p.mask.start, &p.mask.end, &p.key_bias}) {
    if (row->data && row->head_divisor % group != 0) return false;
  }
  return p.query_length * group >= kFewQueries;
}

// Makes room for a quarter of the keys, at most kMostCompact, so that it stays small beside key and value. Heads with more live
// keys gather them.
Tensor make_compact_keys(ForwardCall& call, const Tensor& like, cudaStream_t stream) {
  const AttentionParams& p = call.p;
  CompactKeys& compact = call.compact;
  constexpr int64_t kMostCompact = 8192;
  compact.capacity = std::min(ceil_div(p.key_length, 4), kMostCompact);
  const int64_t rows = p.batch * p.kv_heads * compact.capacity;
  const int64_t key_bytes = rows * p.head_dim * 2, value_bytes = rows * p.value_dim * 2;
  const Tensor memory = empty_on(like, {key_bytes + value_bytes + (p.key_bias.data ? rows * 4 : 0)}, ScalarType::Byte);
  compact.key = memory.data_ptr();
  compact.value = static_cast<char*>(compact.key) + key_bytes;
  if (p.key_bias.data) compact.key_bias = reinterpret_cast<float*>(static_cast<char*>(compact.value) + value_bytes);
  DMATTN_CUDA_CHECK(launch_compact_keys(call, stream));
  return memory;
}

ForwardResults forward_op(AttentionArguments given) {
  const Device device(given.query);
  CheckedForward checked = check_forward(std::move(given));
  AttentionParams& p = checked.inputs.params;
  const Tensor& query = checked.inputs.given.query;
  check_cuda_support(p);
  const Family family = choose_family(device.index());
  if (p.batch * p.heads * p.query_length == 0) return checked.results();
  align_inputs(checked.inputs);
  const bool is_sm90 = family != Family::kSm80 && sm90_has_forward(p);
  // Without keys the result is zero in any family.
  if (family == Family::kSm90 && p.key_length > 0) check_sm90(is_sm90, p);
  LiveKeysOptions options;
  options.orders = !is_sm90;
  const KeyWay way = is_sm90 ? sm90_forward_way(p, device) : KeyWay::kLists;
  const int range_queries = is_sm90 && way == KeyWay::kLists ? sm90_range_queries(p) : 0;
  const bool has_ranges = range_queries > 0;
  const bool compacts = is_sm90 && way == KeyWay::kLists && !has_ranges && may_compact(p);
  check_length_without_lists(p, has_ranges);
  options.joins = compacts, options.lengthens = true;
  OwnedLiveKeys owned;
  if (way == KeyWay::kDirect) {
    owned.live_keys.is_direct = true;
  } else if (has_ranges) {
    owned = make_key_ranges(p, query, device.stream(), range_queries);
  } else if (way == KeyWay::kLists) {
    owned = make_live_keys(p, query, device.stream(), options);
  }
  ForwardCall call;
  call.p = p, call.live_keys = owned.live_keys;
  call.scale = static_cast<float>(p.scale), call.scale_2 = static_cast<float>(p.scale * kLog2OfE);
  call.over_scale = static_cast<float>(1.0 / p.scale);
  if (is_sm90) {
    std::optional<Tensor> tile_counter, compact;
    if (compacts) compact = make_compact_keys(call, query, device.stream());
    if (!call.live_keys.tile_counter) {
      tile_counter = empty_on(query, {1}, ScalarType::Int);
      call.live_keys.tile_counter = static_cast<int32_t*>(tile_counter->data_ptr());
    }
    const cudaError_t status = sm90_forward(call, device);
    if (family == Family::kSm90) check_sm90(status != cudaErrorNotSupported, p);
    if (status != cudaErrorNotSupported) {
      check_cuda(status, "attention kernel");
      return checked.results();
    }
    check_length_without_lists(p, false);
    if (has_ranges || way == KeyWay::kAllKeys) {
      owned = make_live_keys(p, query, device.stream(), {}), call.live_keys = owned.live_keys;
    }
    call.live_keys.tile_counter = nullptr;
  }
  check_launch(sm80::forward(call, device.stream()), p);
  return checked.results();
}

}  // namespace
}  // namespace dmattn::cuda

DMATTN_KERNELS(CUDA, m) { m.impl("forward", TORCH_BOX(&dmattn::unpack_forward<dmattn::cuda::forward_op>)); }
