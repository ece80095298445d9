// Rows that 16-byte copies can read.
//
// Tensors whose rows are not aligned to 16 bytes are copied. Such tensors are rare: views that start at an odd element, for
// instance.
#pragma once

#include "../attention_arguments.h"
#include "runtime.h"

namespace dmattn::cuda {

// The given tensor where its rows can be read in pieces of 16 bytes, otherwise a copy of it.
inline Tensor with_aligned_rows(const Tensor& tensor) {
  bool is_aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
  for (int64_t axis = 0; axis < 3; ++axis) is_aligned = is_aligned && (tensor.size(axis) <= 1 || tensor.stride(axis) % 8 == 0);
  is_aligned = is_aligned && tensor.stride(2) >= 0 && tensor.stride(2) < (int64_t{1} << 31);
  return is_aligned ? tensor : torch::stable::clone(torch::stable::contiguous(tensor));
}

// Are heads or rows of a [B, H, S, size] the same memory, as those of an expanded tensor?
inline bool repeats_rows(const Tensor& tensor) {
  return (tensor.size(1) > 1 && tensor.stride(1) == 0) || (tensor.size(2) > 1 && tensor.stride(2) == 0);
}

inline void align_inputs(CheckedAttention& checked) {
  AttentionParams& p = checked.params;
  checked.query = with_aligned_rows(checked.query), p.query = view_of(checked.query);
  checked.key = with_aligned_rows(checked.key), p.key = view_of(checked.key);
  checked.value = with_aligned_rows(checked.value), p.value = view_of(checked.value);
}

}  // namespace dmattn::cuda
