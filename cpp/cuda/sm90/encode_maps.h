// Makes the tensor maps of a call on the host: what the copy engine has to know of a tensor.
//
// cuTensorMapEncodeTiled is a function of the driver, which is asked for it at run time, because the library does not link the
// driver.
#pragma once

#include <cuda.h>

#include "../../errors.h"
#include "../host/tensor_maps.h"

namespace dmattn::cuda::sm90 {

using Encode = decltype(&cuTensorMapEncodeTiled);

inline Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<Encode>(function);
}

// Swizzled over 128 bytes where a box has 64 columns, over 64 bytes where it has the columns of a bias. A plan has checked what
// the driver demands, so a refusal is an error of the library.
inline void encode(CUtensorMap* map, const TensorMapShape& shape) {
  static const Encode function = find_encode();
  cuuint64_t sizes[5], steps[5];
  cuuint32_t boxes[5], unit[5];
  for (int i = 0; i < shape.rank; ++i) {
    sizes[i] = static_cast<cuuint64_t>(shape.sizes[i]);
    // A dimension of one element may have any stride, also one that cuTensorMapEncodeTiled refuses.
    steps[i] = shape.sizes[i] == 1 ? 16 : static_cast<cuuint64_t>(shape.strides[i]) * 2;
    boxes[i] = static_cast<cuuint32_t>(shape.box[i]);
    unit[i] = 1;
  }
  const bool is_bias = shape.box[0] == kBiasColumns;
  const CUresult status = function(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, static_cast<cuuint32_t>(shape.rank),
                                   const_cast<void*>(shape.data), sizes, steps + 1, boxes, unit, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                   is_bias ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(status == CUDA_SUCCESS, "internal error: cuTensorMapEncodeTiled refuses a tensor that the plan takes, of sizes ",
        shape.sizes[0], ", ", shape.sizes[1], ", ", shape.sizes[2], ", ", shape.sizes[3], " and strides ", shape.strides[1], ", ",
        shape.strides[2], ", ", shape.strides[3], " from the inside out");
}

}  // namespace dmattn::cuda::sm90
