// Tensors as kernels see them: views for params.h, copies where kernels cannot walk a tensor, and new tensors for results.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "checks.h"
#include "library.h"

namespace dmattn {

// The type of lse, biases and everything summed: float64 stays, the rest is float32.
inline ScalarType accumulate_type(ScalarType type) { return type == ScalarType::Double ? ScalarType::Double : ScalarType::Float; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tiles in a block table along a length: one or two more than touch it, and so never 0 or 1, sizes on which tracing would
// specialise.
inline int64_t table_size(int64_t length, int64_t tile) { return length / tile + 2; }

// The given tensor where it is contiguous, otherwise a copy. torch's own op costs an eager call a microsecond even for nothing.
inline Tensor as_contiguous(const Tensor& tensor) { return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor); }

// A tensor that kernels can walk: the given one, or a contiguous copy when its last dimension is strided.
inline Tensor with_dense_rows(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  return last < 0 || tensor.size(last) <= 1 || tensor.stride(last) == 1 ? tensor : torch::stable::contiguous(tensor);
}

inline TensorView view_of(const Tensor& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.dim() > 3 ? tensor.stride(2) : 0};
}

// An int32 [B] tensor as kernels read it. A strided one is replaced by a contiguous copy.
inline const int32_t* to_per_sequence(const char* name, Tensor& tensor, const Tensor& like) {
  check_dtype(name, tensor, ScalarType::Int);
  check_device(name, tensor, like);
  check_shape(name, tensor, {like.size(0)}, "[B]");
  tensor = as_contiguous(tensor);
  return static_cast<const int32_t*>(tensor.data_ptr());
}

// A [B|1, H|Hkv|1, ...] tensor as a PerHead; `rest` are the sizes after the head. Where kernels cannot walk the given tensor it
// is replaced by what `make_dense` gives, after its shape is checked.
inline PerHead to_per_head(const char* name, Tensor& tensor, const Tensor& like, int64_t batch, int64_t heads, int64_t kv_heads,
                           std::initializer_list<int64_t> rest, const char* meaning,
                           Tensor (*make_dense)(const Tensor&) = with_dense_rows) {
  check_device(name, tensor, like);
  bool fits = tensor.dim() == 2 + static_cast<int64_t>(rest.size());
  fits = fits && (tensor.size(0) == batch || tensor.size(0) == 1);
  fits = fits && (tensor.size(1) == heads || tensor.size(1) == kv_heads || tensor.size(1) == 1);
  int64_t axis = 2;
  for (int64_t size : rest) fits = fits && tensor.size(axis++) == size;
  if (!fits) {
    fail(name, ": expected ", meaning, " with B=", batch, ", H=", heads, ", Hkv=", kv_heads, ", got ", shape_text(tensor));
  }
  tensor = make_dense(tensor);
  PerHead view;
  view.data = tensor.data_ptr();
  view.batch_stride = tensor.size(0) == 1 ? 0 : tensor.stride(0);
  view.head_stride = tensor.size(1) == 1 ? 0 : tensor.stride(1);
  view.head_divisor = tensor.size(1) == heads ? 1 : tensor.size(1) == kv_heads ? heads / kv_heads : heads;
  view.head_divisor = view.head_divisor > 0 ? view.head_divisor : 1;  // H = 0
  return view;
}

// How an op is told to read lists.
struct ListOptions {
  int64_t block = 1, local = 0, sinks = 0;
};

// The lists of an op's queries; no more than `most_local` local keys, and of sinks no more than `keys`.
inline IndexLists to_index_lists(Tensor& indices, const Tensor& query, int64_t kv_heads, const ListOptions& options,
                                 int64_t most_local, int64_t keys, const char* meaning) {
  IndexLists lists;
  check_dtype("indices", indices, ScalarType::Int);
  lists.count = indices.dim() == 4 ? indices.size(3) : 0;
  lists.entries =
      to_per_head("indices", indices, query, query.size(0), query.size(1), kv_heads, {query.size(2), lists.count}, meaning);
  lists.row_stride = indices.stride(2);
  static int32_t nothing = 0;  // an empty tensor may have no address, and lists without entries are lists, too
  if (!lists.entries.data) lists.entries.data = &nothing;
  check(options.block >= 1 && options.block <= kMaxIndexBlock && (options.block & (options.block - 1)) == 0,
        "index_block: expected a power of two from 1 to ", kMaxIndexBlock, ", got ", options.block);
  while (int64_t{1} << lists.log2_block < options.block) ++lists.log2_block;
  const std::pair<const char*, int64_t> numbers[] = {{"index_local", options.local}, {"index_sinks", options.sinks}};
  for (auto [name, number] : numbers) check(number >= 0, name, ": expected a number of keys, 0 or more, got ", number);
  lists.local = static_cast<int32_t>(std::min(options.local, most_local));
  lists.sinks = static_cast<int32_t>(std::min(options.sinks, keys));
  return lists;
}

// The number that torch's C functions have for a type that new tensors can have.
inline int32_t dtype_code(ScalarType type) {
  switch (type) {
    case ScalarType::Double: return aoti_torch_dtype_float64();
    case ScalarType::Float: return aoti_torch_dtype_float32();
    case ScalarType::BFloat16: return aoti_torch_dtype_bfloat16();
    case ScalarType::Half: return aoti_torch_dtype_float16();
    case ScalarType::Long: return aoti_torch_dtype_int64();
    case ScalarType::Int: return aoti_torch_dtype_int32();
    case ScalarType::Byte: return aoti_torch_dtype_uint8();
    default: fail("no tensor of dtype ", dtype_name(type), " is made here");
  }
}

// A new tensor on the device of `like`. In one call of torch, because an op takes an eager call a microsecond or two.
template <class Sizes>
inline Tensor empty_strided_on(const Tensor& like, const Sizes& sizes, const std::array<int64_t, 4>& strides, ScalarType type) {
  check(sizes.size() <= strides.size(), "expected at most 4 dimensions, got ", sizes.size());
  const int64_t* const first = sizes.size() > 0 ? &*sizes.begin() : strides.data();
  AtenTensorHandle handle = nullptr;
  const auto device = like.device();
  const int32_t status = aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), first, strides.data(), dtype_code(type),
                                                  static_cast<int32_t>(device.type()), device.index(), &handle);
  if (status != 0) {
    std::ostringstream shape;
    for (int64_t size : sizes) shape << (shape.tellp() > 0 ? ", " : "") << size;
    fail("could not allocate a tensor of shape [", shape.str(), "]");
  }
  return Tensor(handle);
}

// An empty [B, heads, S, width] tensor whose dimensions lie in memory in the order of `like`'s (python/dmattn/fake.py has the
// same rule).
inline Tensor empty_in_order_of(const Tensor& like, int64_t width) {
  std::array<int64_t, 3> order = {0, 1, 2};  // outermost first
  const auto swap_if_inner = [&](int a, int b) {
    if (like.stride(order[a]) < like.stride(order[b])) std::swap(order[a], order[b]);
  };
  swap_if_inner(0, 1);
  swap_if_inner(1, 2);
  swap_if_inner(0, 1);
  const std::array<int64_t, 4> sizes = {like.size(0), like.size(1), like.size(2), width};
  std::array<int64_t, 4> strides = {0, 0, 0, 1};
  int64_t step = width > 0 ? width : 1;
  for (int i = 2; i >= 0; --i) {
    strides[order[i]] = step;
    step *= sizes[order[i]] > 0 ? sizes[order[i]] : 1;
  }
  return empty_strided_on(like, sizes, strides, like.scalar_type());
}

// A contiguous tensor of up to 4 dimensions.
inline Tensor empty_on(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType type) {
  std::array<int64_t, 4> strides = {};
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = step;
    step *= shape.begin()[i] > 0 ? shape.begin()[i] : 1;
  }
  return empty_strided_on(like, shape, strides, type);
}

inline Tensor zeros_on(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType type) {
  const std::vector<int64_t> sizes(shape);
  return torch::stable::new_zeros(like, sizes, type);
}

}  // namespace dmattn
