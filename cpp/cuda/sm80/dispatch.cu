// The instances of the sm80 kernels in flat tables, which cmake/instances.cmake generates. A plan names the instance.
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
using DecodeLaunch = cudaError_t(const DecodeCall&, cudaStream_t);
using StepLaunch = cudaError_t(const StepCall&, cudaStream_t);

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

#define DMATTN_ROW(DTYPE, TYPE, DIM, SMEM_BUDGET, ROWS)                                     \
  {{Kernel::kSm80Decode, DType::DTYPE, DIM, {}, SmemBudget::SMEM_BUDGET, DecodeRows::ROWS}, \
   launch_decode<TYPE, DIM, DecodeRows::ROWS, DecodeCall>},
constexpr LaunchRow<DecodeLaunch> kDecode[] = {DMATTN_SM80_DECODE(DMATTN_ROW)};
#undef DMATTN_ROW
#define DMATTN_ROW(DTYPE, TYPE, DIM, SMEM_BUDGET, ROWS)                                   \
  {{Kernel::kSm80Step, DType::DTYPE, DIM, {}, SmemBudget::SMEM_BUDGET, DecodeRows::ROWS}, \
   launch_decode<TYPE, DIM, DecodeRows::ROWS, StepCall>},
constexpr LaunchRow<StepLaunch> kStep[] = {DMATTN_SM80_STEP(DMATTN_ROW)};
#undef DMATTN_ROW

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

cudaError_t decode(const DecodeCall& call, const Instance& instance, cudaStream_t stream) {
  return find_launch(kDecode, instance)(call, stream);
}

cudaError_t step(const StepCall& call, const Instance& instance, cudaStream_t stream) {
  return find_launch(kStep, instance)(call, stream);
}

}  // namespace dmattn::cuda::sm80
