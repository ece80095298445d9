// The kernels of reduce_max and their choice by type.
#include "reduce.cuh"

namespace dmattn::cuda {

using namespace reduction;

cudaError_t launch_reduce_max(const ReduceParams& p, cudaStream_t stream) {
  switch (p.dtype) {
    case Element::kFloat64: return launch<Kind<Float64, Max, double, Float64>>(p, stream);
    case Element::kFloat32: return launch<Kind<Float32, Max, float, Float32>>(p, stream);
    case Element::kBFloat16: return launch<Kind<StoredBFloat16, Max, float, StoredBFloat16>>(p, stream);
    case Element::kFloat16: return launch<Kind<StoredFloat16, Max, float, StoredFloat16>>(p, stream);
    case Element::kInt64: return launch<Kind<Int64, Max, int64_t, Int64>>(p, stream);
    case Element::kInt32: return launch<Kind<Int32, Max, int32_t, Int32>>(p, stream);
    case Element::kInt16: return launch<Kind<Int16, Max, int32_t, Int16>>(p, stream);
    case Element::kInt8: return launch<Kind<StoredInt8, Max, int32_t, StoredInt8>>(p, stream);
    case Element::kUInt8: return launch<Kind<StoredUInt8, Max, int32_t, StoredUInt8>>(p, stream);
    case Element::kBool: return launch<Kind<StoredBool, Max, int32_t, StoredBool>>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace dmattn::cuda
