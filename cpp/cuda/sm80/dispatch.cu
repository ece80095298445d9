// The instances of the sm80 kernels in flat tables, which cmake/instances.cmake generates. For attention a plan names the
// instance.
#include <sstream>

#include "../launch_table.h"
#include "backward_dkdv.cuh"
#include "backward_dq.cuh"
#include "decode.cuh"
#include "dispatch.h"
#include "forward.cuh"
#include "sm80_instances.h"

namespace dmattn::cuda::sm80 {
namespace {

using ForwardLaunch = cudaError_t(const ForwardCall&, cudaStream_t);
using BackwardLaunch = cudaError_t(const BackwardCall&, cudaStream_t);

// The last argument of a row is its traits, KernelTraits<...>, commas and all.
#define DMATTN_ROW(DTYPE, TYPE, DIM, SMEM_BUDGET, ...)                                      \
  {{Kernel::kSm80Forward, DType::DTYPE, DIM, __VA_ARGS__::kValue, SmemBudget::SMEM_BUDGET}, \
   launch_forward<TYPE, DIM, __VA_ARGS__>},
constexpr LaunchRow<ForwardLaunch> kForward[] = {DMATTN_SM80_FORWARD(DMATTN_ROW)};
#undef DMATTN_ROW
#define DMATTN_ROW(DTYPE, TYPE, DIM, SMEM_BUDGET, ...)                                         \
  {{Kernel::kSm80BackwardDq, DType::DTYPE, DIM, __VA_ARGS__::kValue, SmemBudget::SMEM_BUDGET}, \
   launch_backward_dq<TYPE, DIM, __VA_ARGS__, SmemBudget::SMEM_BUDGET>},
constexpr LaunchRow<BackwardLaunch> kBackwardDq[] = {DMATTN_SM80_BACKWARD_DQ(DMATTN_ROW)};
#undef DMATTN_ROW
#define DMATTN_ROW(DTYPE, TYPE, DIM, SMEM_BUDGET, ...)                                           \
  {{Kernel::kSm80BackwardDkdv, DType::DTYPE, DIM, __VA_ARGS__::kValue, SmemBudget::SMEM_BUDGET}, \
   launch_backward_dkdv<TYPE, DIM, __VA_ARGS__, SmemBudget::SMEM_BUDGET>},
constexpr LaunchRow<BackwardLaunch> kBackwardDkdv[] = {DMATTN_SM80_BACKWARD_DKDV(DMATTN_ROW)};
#undef DMATTN_ROW

template <class Call>
struct DecodeInstance {
  DType dtype;
  int dim;
  DecodeRows rows;
  cudaError_t (*launch)(const Call&, cudaStream_t);
};
#define DMATTN_ROW(DTYPE, TYPE, DIM, SMEM_BUDGET, ROWS) \
  {DType::DTYPE, DIM, DecodeRows::ROWS, launch_decode<TYPE, DIM, DecodeRows::ROWS, DecodeCall>},
constexpr DecodeInstance<DecodeCall> kDecode[] = {DMATTN_SM80_DECODE(DMATTN_ROW)};
#undef DMATTN_ROW
#define DMATTN_ROW(DTYPE, TYPE, DIM, SMEM_BUDGET, ROWS) \
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

}  // namespace

cudaError_t forward(const ForwardCall& call, const Instance& instance, cudaStream_t stream) {
  return find_launch(kForward, instance)(call, stream);
}

cudaError_t backward_dq(const BackwardCall& call, const Instance& instance, cudaStream_t stream) {
  return find_launch(kBackwardDq, instance)(call, stream);
}

cudaError_t backward_dkdv(const BackwardCall& call, const Instance& instance, cudaStream_t stream) {
  return find_launch(kBackwardDkdv, instance)(call, stream);
}

cudaError_t decode(const DecodeCall& call, cudaStream_t stream) { return launch(kDecode, call, stream); }
cudaError_t step(const StepCall& call, cudaStream_t stream) { return launch(kStep, call, stream); }

std::string compiled_decode() {
  std::ostringstream text;
  text << "decode:";
  for (const auto& instance : kDecode) {
    text << " " << name_of(instance.dtype) << "/" << instance.dim << "/" << (instance.rows == DecodeRows::kFew ? "few" : "many");
  }
  return text.str();
}

}  // namespace dmattn::cuda::sm80
