// Checks of an op's arguments: what fails says which argument, what was expected and what came.
//
// A direct `torch.ops.dmattn.*` call meets these checks. The public functions raise ValueError or TypeError before it comes to
// that.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <initializer_list>
#include <sstream>
#include <string>

#include "errors.h"
#include "limits.h"
#include "params.h"

namespace dmattn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A tensor's shape for a message. It is written only when a check fails: writing it in every call took a sixth of an op's time.
struct ShapeText {
  const Tensor& tensor;
  friend std::ostream& operator<<(std::ostream& text, const ShapeText& shape) {
    text << "[";
    for (int64_t i = 0; i < shape.tensor.dim(); ++i) text << (i ? ", " : "") << shape.tensor.size(i);
    return text << "]";
  }
};

inline ShapeText shape_text(const Tensor& tensor) { return {tensor}; }

inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Double: return "float64";
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Short: return "int16";
    case ScalarType::Char: return "int8";
    case ScalarType::Byte: return "uint8";
    case ScalarType::UInt16: return "uint16";
    case ScalarType::UInt32: return "uint32";
    case ScalarType::UInt64: return "uint64";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    case ScalarType::Bool: return "bool";
    default: return torch::headeronly::toString(type);  // such as Float8_e4m3fn
  }
}

inline DType to_dtype(const char* name, ScalarType type) {
  switch (type) {
    case ScalarType::Double: return DType::kFloat64;
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Half: return DType::kFloat16;
    default: fail(name, ": expected dtype float64, float32, bfloat16 or float16, got ", dtype_name(type));
  }
}

inline void check_dtype(const char* name, const Tensor& tensor, ScalarType expected) {
  check(tensor.scalar_type() == expected, name, ": expected dtype ", dtype_name(expected), ", got ",
        dtype_name(tensor.scalar_type()));
}

inline void check_device(const char* name, const Tensor& tensor, const Tensor& like) {
  check(tensor.device() == like.device(), name, ": expected the device of the first argument, got another one");
}

inline void check_shape(const char* name, const Tensor& tensor, std::initializer_list<int64_t> shape, const char* meaning) {
  bool equal = tensor.dim() == static_cast<int64_t>(shape.size());
  int64_t axis = 0;
  for (int64_t size : shape) equal = equal && tensor.size(axis++) == size;
  if (equal) return;
  std::ostringstream text;
  axis = 0;
  for (int64_t size : shape) text << (axis++ ? ", " : "") << size;
  fail(name, ": expected ", meaning, " = [", text.str(), "], got ", shape_text(tensor));
}

// Refuses sizes whose product, zeros counted as ones, is beyond 2^54: an expanded or an empty tensor can have them, and products
// of its sizes with a head size must not overflow.
inline void check_extent(const char* name, const Tensor& tensor) {
  int64_t room = int64_t{1} << 54;
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) room /= tensor.size(axis) > 1 ? tensor.size(axis) : 1;
  check(room > 0, name, ": expected sizes whose product is at most 2^54, got ", shape_text(tensor));
}

// A query, key or value: four dimensions, and query's dtype and device.
inline void check_rows(const char* name, const Tensor& tensor, const Tensor& query, const char* meaning) {
  check(tensor.dim() == 4, name, ": expected 4 dimensions", meaning, ", got ", shape_text(tensor));
  check_dtype(name, tensor, query.scalar_type());
  check_device(name, tensor, query);
  check_extent(name, tensor);
}

// D or Dv.
inline void check_head_size(const char* name, int64_t size) {
  check(size > 0 && size % 8 == 0 && size <= kMaxHeadDim, name, ": expected a last dimension that is a multiple of 8 up to ",
        kMaxHeadDim, ", got ", size);
}

inline void check_head_counts(int64_t heads, int64_t kv_heads) {
  check(kv_heads > 0 ? heads % kv_heads == 0 : heads == 0, "key: expected a number of heads that divides H=", heads,
        ", got Hkv=", kv_heads);
}

inline void check_scale(double scale, const char* name = "scale") {
  check(std::abs(scale) <= kMaxFactor, name, ": expected a number of magnitude up to ", kMaxFactor, ", got ", scale);
}

inline void check_softcap(double softcap) {
  check(softcap == 0 || (softcap >= 1 / kMaxFactor && softcap <= kMaxFactor), "softcap: expected 0 or a number from ",
        1 / kMaxFactor, " to ", kMaxFactor, ", got ", softcap);
}

}  // namespace dmattn
