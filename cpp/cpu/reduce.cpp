// Reductions on the CPU: checks and allocation; the arithmetic is in reduce_kernels.cpp.
#include "../reduce_arguments.h"
#include "levels.h"
#include "parallel.h"
#include "reduce_kernels.h"

namespace dmattn::cpu {

extern const ReduceKernels kKernelsOfReduce_baseline;
#ifdef DMATTN_CPU_X86
extern const ReduceKernels kKernelsOfReduce_avx2;
extern const ReduceKernels kKernelsOfReduce_avx512;
#endif

namespace {

const ReduceKernels& best_reduce_kernels() {
#ifdef DMATTN_CPU_X86
  if (&best_kernels() == &kKernels_avx512) return kKernelsOfReduce_avx512;
  if (&best_kernels() == &kKernels_avx2) return kKernelsOfReduce_avx2;
#endif
  return kKernelsOfReduce_baseline;
}

template <bool kIsMax>
Tensor reduce_op(const Tensor& input, std::optional<int64_t> dim, bool keepdim) {
  const CheckedReduce checked = check_reduce(input, dim, keepdim, kIsMax);
  if (checked.is_empty) return checked.out;
  const ReduceParams& p = checked.params;
  const ReduceKernels& kernels = best_reduce_kernels();
  for (int pass = 0; pass < 2; ++pass) {
    for_each_task(kernels.tasks(p, pass), [&](int64_t task, int64_t) { kernels.run(p, pass, task); });
  }
  return checked.out;
}

}  // namespace
}  // namespace dmattn::cpu

DMATTN_KERNELS(CPU, m) {
  m.impl("reduce_sum", TORCH_BOX(&dmattn::cpu::reduce_op<false>));
  m.impl("reduce_max", TORCH_BOX(&dmattn::cpu::reduce_op<true>));
}
