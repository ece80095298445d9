// Makes the tensor maps of a call on the host: what the copy engine has to know of a tensor.
//
// cuTensorMapEncodeTiled is a function of the driver, which is asked for it at run time, because the library does not link the
// driver.
#pragma once

#include <cuda.h>

#include "tiles.h"

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

// A tensor of 16-bit elements, its inner dimension contiguous, copied in boxes of 64 columns with a swizzle of 128 bytes, or, a
// bias, of 32 columns with one of 64. Strides count elements.
template <int kRank>
inline bool encode(CUtensorMap* map, const void* data, const int64_t (&sizes)[kRank], const int64_t (&strides)[kRank],
                   const int (&box)[kRank]) {
  static const Encode function = find_encode();
  if (!function) return false;
  cuuint64_t extents[kRank], steps[kRank];
  cuuint32_t boxes[kRank], unit[kRank];
  for (int i = 0; i < kRank; ++i) {
    extents[i] = static_cast<cuuint64_t>(sizes[i]);
    // A dimension of one element may have any stride, also one that cuTensorMapEncodeTiled refuses.
    steps[i] = sizes[i] == 1 ? 16 : static_cast<cuuint64_t>(strides[i]) * 2;
    boxes[i] = static_cast<cuuint32_t>(box[i]);
    unit[i] = 1;
  }
  return function(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, kRank, const_cast<void*>(data), extents, steps + 1, boxes, unit,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, box[0] == kBiasColumns ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// [B, heads, S, width] in boxes of `box` rows.
inline bool encode_rows(CUtensorMap* map, const TensorView& tensor, int64_t width, int64_t length, int64_t heads, int64_t batch,
                        int box) {
  return encode<4>(map, tensor.data, {width, length, heads, batch},
                   {1, tensor.row_stride, tensor.head_stride, tensor.batch_stride}, {64, box, 1, 1});
}

// The bias in boxes of `box` rows. A dimension that is broadcast has one element.
inline bool encode_bias(CUtensorMap* map, const AttentionParams& p, int box) {
  const int64_t heads = p.bias.head_stride != 0 ? p.heads / p.bias.head_divisor : 1,
                batch = p.bias.batch_stride != 0 ? p.batch : 1;
  return encode<4>(map, p.bias.data, {p.key_length, p.query_length, heads, batch},
                   {1, p.bias_row_stride, p.bias.head_stride, p.bias.batch_stride}, {kBiasColumns, box, 1, 1});
}

inline bool encode_compact(CUtensorMap* map, const CompactKeys& compact, void* data, const AttentionParams& p, int64_t width,
                           int box) {
  TensorView tensor;
  tensor.data = data;
  tensor.row_stride = width, tensor.head_stride = width * compact.capacity, tensor.batch_stride = tensor.head_stride * p.kv_heads;
  return encode_rows(map, tensor, width, compact.capacity, p.kv_heads, p.batch, box);
}

}  // namespace dmattn::cuda::sm90
