// Tensors in, params out for reductions.
#pragma once

#include <algorithm>

#include "reduce_params.h"
#include "tensors.h"

namespace dmattn {

struct CheckedReduce {
  Tensor input, out, partials;
  ReduceParams params;
  bool is_empty = false;  // there is nothing to compute: no results, or sums of nothing, which are there already
};

inline Element to_element(ScalarType type) {
  switch (type) {
    case ScalarType::Double: return Element::kFloat64;
    case ScalarType::Float: return Element::kFloat32;
    case ScalarType::BFloat16: return Element::kBFloat16;
    case ScalarType::Half: return Element::kFloat16;
    case ScalarType::Long: return Element::kInt64;
    case ScalarType::Int: return Element::kInt32;
    case ScalarType::Short: return Element::kInt16;
    case ScalarType::Char: return Element::kInt8;
    case ScalarType::Byte: return Element::kUInt8;
    case ScalarType::Bool: return Element::kBool;
    default:
      fail("input: expected dtype float64, float32, bfloat16, float16, int64, int32, int16, int8, uint8 or bool, got ",
           dtype_name(type));
  }
}

inline bool is_floating(Element type) { return type <= Element::kFloat16; }

// The type of pass two. Sums of integers are exact modulo 2^64; the largest of narrow integers is one of them, as int32.
inline ScalarType partial_type(Element type, bool is_max) {
  if (is_floating(type)) return type == Element::kFloat64 ? ScalarType::Double : ScalarType::Float;
  return !is_max || type == Element::kInt64 ? ScalarType::Long : ScalarType::Int;
}

// Dimensions that can be walked with one stride.
struct Run {
  int64_t size = 1, stride = 0;
};

// Adds the dimensions [first, last) of a tensor to runs, outermost first: as few as strides allow. Dimensions of size 1 do not
// count.
inline void append_runs(std::vector<Run>& runs, const Tensor& tensor, int64_t first, int64_t last) {
  for (int64_t axis = first; axis < last; ++axis) {
    const Run next{tensor.size(axis), tensor.stride(axis)};
    if (next.size == 1) continue;
    if (!runs.empty() && runs.back().stride == next.size * next.stride) {
      runs.back() = {runs.back().size * next.size, next.stride};
    } else {
      runs.push_back(next);
    }
  }
}

// Writes sizes and strides of a tensor that is reduced over the dimensions [first, last). False if kernels cannot walk it.
inline bool describe(ReduceParams& p, const Tensor& tensor, int64_t first, int64_t last) {
  std::vector<Run> reduced, kept;
  append_runs(reduced, tensor, first, last);
  // What lies before and behind the reduced dimensions may be walked with one stride, too.
  append_runs(kept, tensor, 0, first), append_runs(kept, tensor, last, tensor.dim());
  if (reduced.size() > 1 || kept.size() > 2) return false;
  const Run sequence = reduced.empty() ? Run{} : reduced[0];
  const Run inner = kept.empty() ? Run{} : kept.back(), outer = kept.size() < 2 ? Run{} : kept[0];
  p.count = sequence.size, p.stride = sequence.stride;
  p.inner = inner.size, p.inner_stride = inner.stride;
  p.outer = outer.size, p.outer_stride = outer.stride;
  return true;
}

inline CheckedReduce check_reduce(const Tensor& input, std::optional<int64_t> dim, bool keepdim, bool is_max) {
  CheckedReduce checked{input, Tensor(), Tensor(), {}, false};
  ReduceParams& p = checked.params;
  p.dtype = to_element(input.scalar_type()), p.is_max = is_max;
  check_extent("input", input);
  const int64_t rank = input.dim(), places = std::max<int64_t>(rank, 1);  // a scalar has a dimension 0, as in torch
  if (dim) {
    check(*dim >= -places && *dim < places, "dim: expected a dimension from ", -places, " to ", places - 1, " of input ",
          shape_text(input), ", got ", *dim);
  }
  const int64_t first = !dim || rank == 0 ? 0 : (*dim + rank) % rank, last = !dim || rank == 0 ? rank : first + 1;

  // Allocate the result.
  std::vector<int64_t> sizes;
  int64_t count = 1, results = 1;
  for (int64_t axis = 0; axis < rank; ++axis) {
    const bool is_reduced = axis >= first && axis < last;
    (is_reduced ? count : results) *= input.size(axis);
    if (!is_reduced || keepdim) sizes.push_back(is_reduced ? 1 : input.size(axis));
  }
  check(count > 0 || !is_max, "reduce_max: expected at least one element to take the maximum of, got input ", shape_text(input));
  const ScalarType type = is_max || is_floating(p.dtype) ? input.scalar_type() : ScalarType::Long;
  checked.is_empty = count == 0 || results == 0;
  checked.out = checked.is_empty ? torch::stable::new_zeros(input, sizes, type) : torch::stable::new_empty(input, sizes, type);
  if (checked.is_empty) return checked;

  // Describe the sequences, of a copy where more strides are needed than kernels take.
  if (!describe(p, input, first, last)) {
    checked.input = torch::stable::contiguous(input);
    check(describe(p, checked.input, first, last), "input: a contiguous copy could not be walked");
  }
  p.input = checked.input.data_ptr(), p.out = checked.out.data_ptr();
  if (chunks_of(p) > 1) {
    checked.partials = empty_on(input, {results, chunks_of(p)}, partial_type(p.dtype, is_max));
    p.partials = checked.partials.data_ptr();
  }
  return checked;
}

}  // namespace dmattn
