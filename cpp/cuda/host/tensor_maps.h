// The tensors of a call as Hopper's copy engine knows them: sizes, strides and boxes, before the driver encodes them.
#pragma once

#include <array>

#include "../sm90/tiles.h"

namespace dmattn::cuda {

// A tensor of 16-bit elements. Dimensions are listed from the inside out; strides count elements, and the first is 1.
struct TensorMapShape {
  const void* data = nullptr;
  int rank = 0;
  std::array<int64_t, 5> sizes = {}, strides = {};
  std::array<int, 5> box = {};  // what one copy brings
};

// [B, heads, S, width] in boxes of `box` rows and 64 columns.
inline TensorMapShape map_of_rows(const TensorView& tensor, int64_t width, int64_t length, int64_t heads, int64_t batch,
                                  int box) {
  return {tensor.data,
          4,
          {width, length, heads, batch},
          {1, tensor.row_stride, tensor.head_stride, tensor.batch_stride},
          {64, box, 1, 1}};
}

// [B, H, Sq, width] of which `heads_per_tile` heads come together, in boxes of `box_heads` heads of `box_queries` queries.
inline TensorMapShape map_of_groups(const TensorView& tensor, int64_t width, const AttentionParams& p, int64_t heads_per_tile,
                                    int box_heads, int box_queries) {
  return {tensor.data,
          5,
          {width, heads_per_tile, p.query_length, p.heads / heads_per_tile, p.batch},
          {1, tensor.head_stride, tensor.row_stride, tensor.head_stride * heads_per_tile, tensor.batch_stride},
          {64, box_heads, box_queries, 1, 1}};
}

// The bias in boxes of `box` rows. A dimension that is broadcast has one element.
inline TensorMapShape map_of_bias(const AttentionParams& p, int box) {
  const int64_t heads = p.bias.head_stride != 0 ? p.heads / p.bias.head_divisor : 1,
                batch = p.bias.batch_stride != 0 ? p.batch : 1;
  return {p.bias.data,
          4,
          {p.key_length, p.query_length, heads, batch},
          {1, p.bias_row_stride, p.bias.head_stride, p.bias.batch_stride},
          {sm90::kBiasColumns, box, 1, 1}};
}

// Does cuTensorMapEncodeTiled take it? The address and strides are multiples of 16 bytes, strides below 2^40 bytes (0 is one of
// them: the heads of an expanded tensor), sizes from 1 to 2^32, boxes up to 256. A dimension of one element may have any stride.
bool is_encodable(const TensorMapShape& shape);

}  // namespace dmattn::cuda
