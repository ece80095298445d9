// Attention forward on CUDA: the host side. Nothing here waits for the device, so the op can be captured in a graph.
#include <algorithm>

#include "attention_plan.h"

namespace dmattn::cuda {
namespace {

cudaError_t sm90_forward([[maybe_unused]] const ForwardCall& call, [[maybe_unused]] const Device& device) {
#ifdef DMATTN_WITH_SM90
  return sm90::forward(call, device_attribute<cudaDevAttrMultiProcessorCount>(device.index()), device.stream());
#else
  return cudaErrorNotSupported;
#endif
}

// Can packed rows help, and can they stand for the gathered ones? Without causality the live keys are often the same for all
// queries; few queries are not worth the copies. All heads of a group have to share mask and key_bias.
bool may_pack(const AttentionParams& p, Family family) {
  constexpr int64_t kFewQueries = 8192;
  const int64_t group = p.heads / p.kv_heads;
  if (family == Family::kSm80 || !gathers(p) || p.mask.is_causal || variant_of(p, true) != Variant::kGathered) return false;
  for (const PerHead* row : {&p.mask.start, &p.mask.end, &p.key_bias}) {
    if (row->data && row->head_divisor % group != 0) return false;
  }
  return p.query_length * group >= kFewQueries;
}

// Room for a quarter of the keys, and for so many that it stays small beside key and value: where more are live, they are
// gathered.
Tensor pack_rows(ForwardCall& call, const Tensor& like, cudaStream_t stream) {
  const AttentionParams& p = call.p;
  PackedRows& packed = call.packed;
  constexpr int64_t kMostPacked = 8192;
  packed.capacity = std::min(ceil_div(p.key_length, 4), kMostPacked);
  const int64_t rows = p.batch * p.kv_heads * packed.capacity;
  const int64_t key_bytes = rows * p.head_dim * 2, value_bytes = rows * p.value_dim * 2;
  const Tensor memory = empty_on(like, {key_bytes + value_bytes + (p.key_bias.data ? rows * 4 : 0)}, ScalarType::Byte);
  packed.key = memory.data_ptr();
  packed.value = static_cast<char*>(packed.key) + key_bytes;
  if (p.key_bias.data) packed.key_bias = reinterpret_cast<float*>(static_cast<char*>(packed.value) + value_bytes);
  DMATTN_CUDA_CHECK(launch_pack_rows(call, stream));
  return memory;
}

std::tuple<Tensor, Tensor, Tensor> forward_op(const Tensor& query, const Tensor& key, const Tensor& value,
                                              std::optional<Tensor> start, std::optional<Tensor> end, std::optional<Tensor> tiles,
                                              std::optional<Tensor> rows, std::optional<Tensor> columns,
                                              std::optional<Tensor> bits, std::optional<Tensor> key_bias,
                                              std::optional<Tensor> bias, std::optional<Tensor> dropout_seed, bool is_causal,
                                              double scale, double softcap, double dropout_p,
                                              bool /*deterministic: for backward*/) {
  const Device device(query);
  CheckedForward checked =
      check_forward(query, key, value, {start, end, tiles, rows, columns, bits, key_bias, bias, dropout_seed}, is_causal, scale,
                    softcap, dropout_p);
  AttentionParams& p = checked.inputs.params;
  check_cuda_support(p);
  const Family family = choose_family(device.index());
  if (p.batch * p.heads * p.query_length == 0) return {checked.out, checked.lse, checked.lse_rest};
  align_inputs(checked.inputs);
  PlanNeeds needs;
  needs.order = family == Family::kSm80;
  const bool packs = may_pack(p, family);
  needs.joined = packs, needs.longer = true;
  const OwnedPlan plan = make_plan(p, query, device.stream(), needs);
  ForwardCall call{
      p, plan.plan, static_cast<float>(p.scale), static_cast<float>(p.scale * kLog2OfE), static_cast<float>(1.0 / p.scale), {}};
  if (family != Family::kSm80 && p.key_length > 0) {  // without keys there is nothing to choose between
    std::optional<Tensor> ticket, packed;
    if (packs) packed = pack_rows(call, query, device.stream());
    if (!call.plan.ticket) {
      ticket = empty_on(query, {1}, ScalarType::Int);
      call.plan.ticket = static_cast<int32_t*>(ticket->data_ptr());
    }
    const cudaError_t status = sm90_forward(call, device);
    check(status != cudaErrorNotSupported || family == Family::kAuto,
          "DMATTN_FAMILY: sm90 has no kernel for this call: head sizes D=", p.head_dim, " and Dv=", p.value_dim,
          ", or strides that tensor copies do not take (use auto)");
    if (status != cudaErrorNotSupported) {
      check_cuda(status, "attention kernel");
      return {checked.out, checked.lse, checked.lse_rest};
    }
    call.plan.ticket = nullptr;
  }
  check_launch(sm80::forward(call, device.stream()), p);
  return {checked.out, checked.lse, checked.lse_rest};
}

}  // namespace
}  // namespace dmattn::cuda

STABLE_TORCH_LIBRARY_IMPL(dmattn, CUDA, m) {
  if (!dmattn::is_first_copy()) return;
  m.impl("forward", TORCH_BOX(&dmattn::cuda::forward_op));
}
