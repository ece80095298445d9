// The kernels of reduce_sum and their choice by type.
#include "reduce.cuh"

namespace dmattn::cuda {

using namespace reduction;

cudaError_t launch_reduce_sum(const ReduceParams& p, cudaStream_t stream) {
  switch (p.dtype) {
    case Element::kFloat64: return launch<Kind<Float64, Sum, double, Float64>>(p, stream);
    case Element::kFloat32: return launch<Kind<Float32, Sum, float, Float32>>(p, stream);
    case Element::kBFloat16: return launch<Kind<StoredBFloat16, Sum, float, StoredBFloat16>>(p, stream);
    case Element::kFloat16: return launch<Kind<StoredFloat16, Sum, float, StoredFloat16>>(p, stream);
    case Element::kInt64: return launch<Kind<Int64, Sum, int64_t, Int64>>(p, stream);
    case Element::kInt32: return launch<Kind<Stored<int32_t, int64_t>, Sum, int64_t, Int64>>(p, stream);
    case Element::kInt16: return launch<Kind<Int16, Sum, int64_t, Int64>>(p, stream);
    case Element::kInt8: return launch<Kind<StoredInt8, Sum, int64_t, Int64>>(p, stream);
    case Element::kUInt8: return launch<Kind<StoredUInt8, Sum, int64_t, Int64>>(p, stream);
    case Element::kBool: return launch<Kind<StoredBool, Sum, int64_t, Int64>>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace dmattn::cuda
