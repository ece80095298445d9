// Picks an instance of the sm80 kernels from flat tables, which cmake/instances.cmake generates.
//
// A table may leave out a special instance: the general one is taken in its place.
#include <sstream>

#include "backward_dkdv.cuh"
#include "backward_dq.cuh"
#include "decode.cuh"
#include "dispatch.h"
#include "forward.cuh"
#include "sm80_instances.h"

namespace dmattn::cuda::sm80 {
namespace {

template <class Call>
struct Instance {
  DType dtype;
  int dim;
  Variant variant;
  SmemBudget smem_budget;
  cudaError_t (*launch)(const Call&, cudaStream_t);
};

#define DMATTN_ROW(DTYPE, TYPE, DIM, VARIANT, SMEM_BUDGET) \
  {DType::DTYPE, DIM, Variant::VARIANT, SmemBudget::SMEM_BUDGET, launch_forward<TYPE, DIM, Variant::VARIANT>},
constexpr Instance<ForwardCall> kForward[] = {DMATTN_SM80_FORWARD(DMATTN_ROW)};
#undef DMATTN_ROW
#define DMATTN_ROW(DTYPE, TYPE, DIM, VARIANT, SMEM_BUDGET)       \
  {DType::DTYPE, DIM, Variant::VARIANT, SmemBudget::SMEM_BUDGET, \
   launch_backward_dq<TYPE, DIM, Variant::VARIANT, SmemBudget::SMEM_BUDGET>},
constexpr Instance<BackwardCall> kBackwardDq[] = {DMATTN_SM80_BACKWARD_DQ(DMATTN_ROW)};
#undef DMATTN_ROW
#define DMATTN_ROW(DTYPE, TYPE, DIM, VARIANT, SMEM_BUDGET)       \
  {DType::DTYPE, DIM, Variant::VARIANT, SmemBudget::SMEM_BUDGET, \
   launch_backward_dkdv<TYPE, DIM, Variant::VARIANT, SmemBudget::SMEM_BUDGET>},
constexpr Instance<BackwardCall> kBackwardDkdv[] = {DMATTN_SM80_BACKWARD_DKDV(DMATTN_ROW)};
#undef DMATTN_ROW

template <class Call>
struct DecodeInstance {
  DType dtype;
  int dim;
  DecodeRows rows;
  cudaError_t (*launch)(const Call&, cudaStream_t);
};
#define DMATTN_ROW(DTYPE, TYPE, DIM, ROWS, SMEM_BUDGET) \
  {DType::DTYPE, DIM, DecodeRows::ROWS, launch_decode<TYPE, DIM, DecodeRows::ROWS, DecodeCall>},
constexpr DecodeInstance<DecodeCall> kDecode[] = {DMATTN_SM80_DECODE(DMATTN_ROW)};
#undef DMATTN_ROW
#define DMATTN_ROW(DTYPE, TYPE, DIM, ROWS, SMEM_BUDGET) \
  {DType::DTYPE, DIM, DecodeRows::ROWS, launch_decode<TYPE, DIM, DecodeRows::ROWS, StepCall>},
constexpr DecodeInstance<StepCall> kStep[] = {DMATTN_SM80_STEP(DMATTN_ROW)};
#undef DMATTN_ROW

// The smallest instance that serves the call.
template <class Call, size_t kCount>
cudaError_t launch(const DecodeInstance<Call> (&instances)[kCount], const Call& given, cudaStream_t stream) {
  const DecodeParams& p = decode_of(given).p;
  const int64_t width = p.head_dim > p.value_dim ? p.head_dim : p.value_dim;
  const DecodeRows rows = decode_of(given).rows <= kMostFewRows ? DecodeRows::kFew : DecodeRows::kMany;
  const DecodeInstance<Call>* best = nullptr;
  for (const auto& instance : instances) {
    const bool fits = instance.dtype == p.dtype && instance.dim >= width && instance.rows == rows;
    if (fits && (!best || instance.dim < best->dim)) best = &instance;
  }
  return best ? best->launch(given, stream) : cudaErrorNotSupported;
}

template <class Call, size_t kCount>
cudaError_t launch(const Instance<Call> (&instances)[kCount], const AttentionParams& p, Variant variant, SmemBudget smem_budget,
                   const Call& call, cudaStream_t stream) {
  const int64_t width = p.head_dim > p.value_dim ? p.head_dim : p.value_dim;
  const Instance<Call>* best = nullptr;
  for (const auto& instance : instances) {
    if (instance.dtype != p.dtype || instance.dim < width || (best && instance.dim > best->dim)) continue;
    if (instance.smem_budget != SmemBudget::kAny && instance.smem_budget != smem_budget) continue;
    if (instance.variant != variant && instance.variant != Variant::kGeneral) continue;
    // Prefer less padding of the head size, then the shape that uses more shared memory, then the special variant.
    if (best && instance.dim == best->dim && best->smem_budget == smem_budget && instance.smem_budget != smem_budget) continue;
    if (best && instance.dim == best->dim && best->smem_budget == instance.smem_budget && best->variant == variant) continue;
    best = &instance;
  }
  return best ? best->launch(call, stream) : cudaErrorNotSupported;
}

template <class Call, size_t kCount>
void list(std::ostream& text, const char* name, const Instance<Call> (&instances)[kCount]) {
  constexpr const char *kVariants[] = {"plain", "gathered", "general"}, *kSmemBudgets[] = {"large", "small", "any"};
  text << name << ":";
  for (const auto& instance : instances) {
    text << " " << (instance.dtype == DType::kBFloat16 ? "bfloat16" : "float16") << "/" << instance.dim << "/"
         << kVariants[static_cast<int>(instance.variant)] << "/" << kSmemBudgets[static_cast<int>(instance.smem_budget)];
  }
  text << "; ";
}

}  // namespace

cudaError_t forward(const ForwardCall& call, cudaStream_t stream) {
  return launch(kForward, call.p, variant_of(call.p, call.live_keys), SmemBudget::kAny, call, stream);
}

cudaError_t backward_dq(const BackwardCall& call, SmemBudget smem_budget, cudaStream_t stream) {
  return launch(kBackwardDq, call.b.forward, variant_of(call.b.forward, call.live_keys), smem_budget, call, stream);
}

cudaError_t backward_dkdv(const BackwardCall& call, SmemBudget smem_budget, cudaStream_t stream) {
  const AttentionParams& p = call.b.forward;
  const Variant variant = variant_of(p, call.live_keys);
  const bool has_mask = p.mask.tiles.data || p.mask.start.data || p.mask.end.data;
  const bool is_plain = variant == Variant::kPlain && !has_mask && call.batches_per_block * call.kv_heads_per_block == 1;
  return launch(kBackwardDkdv, p, is_plain ? Variant::kPlain : Variant::kGeneral, smem_budget, call, stream);
}

cudaError_t decode(const DecodeCall& call, cudaStream_t stream) { return launch(kDecode, call, stream); }
cudaError_t step(const StepCall& call, cudaStream_t stream) { return launch(kStep, call, stream); }

std::string compiled() {
  std::ostringstream text;
  list(text, "forward", kForward);
  list(text, "query-major backward", kBackwardDq);
  list(text, "key-major backward", kBackwardDkdv);
  text << "decode:";
  for (const auto& instance : kDecode) {
    text << " " << (instance.dtype == DType::kBFloat16 ? "bfloat16" : "float16") << "/" << instance.dim << "/"
         << (instance.rows == DecodeRows::kFew ? "few" : "many");
  }
  return text.str();
}

}  // namespace dmattn::cuda::sm80
