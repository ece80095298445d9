// Tensors in, params out: every check and every allocation an op does on the host, the same for all devices.
//
// A direct `torch.ops.dmattn.*` call meets these checks; the public functions raise ValueError or TypeError before it comes to
// that. Each message names the argument, what was expected and what came.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cmath>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "library.h"
#include "params.h"

namespace dmattn {

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Parts>
[[noreturn]] inline void fail(const Parts&... parts) {
  std::ostringstream text;
  text << "dmattn: ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

template <class... Parts>
inline void check(bool condition, const Parts&... parts) {
  if (!condition) fail(parts...);
}

inline std::string shape_text(const Tensor& tensor) {
  std::ostringstream text;
  text << "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  text << "]";
  return text.str();
}

inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Double: return "float64";
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    default: return "another dtype";
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

// The type of lse, biases and everything summed: float64 stays, the rest is float32.
inline ScalarType accumulate_type(ScalarType type) { return type == ScalarType::Double ? ScalarType::Double : ScalarType::Float; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tiles in a block table along a length: one or two more than touch it, and so never 0 or 1, sizes on which tracing would
// specialise.
inline int64_t table_size(int64_t length, int64_t tile) { return length / tile + 2; }

inline constexpr int64_t kMaxLength = int64_t{1} << 20;
inline constexpr int64_t kMaxHeadDim = 256;
inline constexpr int64_t kMaxTile = 4096;   // of a block mask
inline constexpr double kMaxFactor = 1e30;  // of scale and softcap: products with it stay finite in float32

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

// A tensor that kernels can walk: the given one, or a contiguous copy when its last dimension is strided.
inline Tensor with_dense_rows(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  return last < 0 || tensor.size(last) <= 1 || tensor.stride(last) == 1 ? tensor : torch::stable::contiguous(tensor);
}

inline Rows to_rows(const Tensor& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.dim() > 3 ? tensor.stride(2) : 0};
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
  AtenTensorHandle handle = nullptr;
  const auto device = like.device();
  const int32_t status = aoti_torch_empty_strided(
      4, sizes.data(), strides.data(), torch::stable::detail::to<int32_t>(torch::stable::detail::from(like.scalar_type())),
      static_cast<int32_t>(device.type()), device.index(), &handle);
  check(status == 0, "could not allocate an output of shape [", sizes[0], ", ", sizes[1], ", ", sizes[2], ", ", sizes[3], "]");
  return Tensor(handle);
}

inline Tensor empty_on(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType type) {
  const std::vector<int64_t> sizes(shape);
  return torch::stable::new_empty(like, sizes, type);
}

inline Tensor zeros_on(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType type) {
  const std::vector<int64_t> sizes(shape);
  return torch::stable::new_zeros(like, sizes, type);
}

// The optional mask and bias arguments shared by forward and backward, in schema order.
struct MaskArguments {
  std::optional<Tensor> start, end, tiles, rows, columns, bits, key_bias, bias, dropout_seed;
};

// Checks everything forward and backward have in common and fills params. Tensors made here (dense copies) stay alive in this
// struct.
struct CheckedAttention {
  Tensor query, key, value;
  Tensor given_query, given_key, given_value;  // as they came: results and gradients take their stride order
  MaskArguments mask;
  AttentionParams params;
};

inline PerHead optional_intervals(const char* name, std::optional<Tensor>& tensor, const Tensor& query, int64_t batch,
                                  int64_t heads, int64_t kv_heads, int64_t key_length) {
  if (!tensor) return {};
  check_dtype(name, *tensor, ScalarType::Int);
  return to_per_head(name, *tensor, query, batch, heads, kv_heads, {key_length}, "[B|1, H|Hkv|1, Sk]");
}

inline void fill_block_mask(MaskArguments& given, AttentionParams& p, const Tensor& query) {
  const int count = given.tiles.has_value() + given.rows.has_value() + given.columns.has_value() + given.bits.has_value();
  check(count == 0 || count == 4, "tiles, rows, columns, bits: expected all four of a block mask or none, got ", count);
  if (count == 0) return;
  MaskParams& mask = p.mask;
  const auto in_order = [](const Tensor& tensor) { return torch::stable::contiguous(tensor); };
  for (auto [name, tensor] :
       {std::pair{"tiles", &given.tiles}, {"rows", &given.rows}, {"columns", &given.columns}, {"bits", &given.bits}}) {
    check_dtype(name, **tensor, ScalarType::Int);
    check_device(name, **tensor, query);
  }
  check(given.bits->dim() == 3 && given.bits->size(1) > 0 && given.bits->size(2) > 0 && given.bits->size(1) <= kMaxTile &&
            given.bits->size(2) <= kMaxTile / 32,
        "bits: expected [slots, tile_q, tile_k/32] with tiles up to ", kMaxTile, ", got ", shape_text(*given.bits));
  mask.tile_q = given.bits->size(1);
  mask.tile_k = given.bits->size(2) * 32;
  check(mask.tile_q % 32 == 0, "bits: expected a tile_q that is a multiple of 32, got ", mask.tile_q);
  mask.tiles_q = table_size(p.query_length, mask.tile_q);
  mask.tiles_k = table_size(p.key_length, mask.tile_k);
  mask.tiles = to_per_head("tiles", *given.tiles, query, p.batch, p.heads, p.kv_heads, {mask.tiles_q, mask.tiles_k},
                           "[B|1, H|Hkv|1, Nq, Nk]", in_order);
  mask.rows = to_per_head("rows", *given.rows, query, p.batch, p.heads, p.kv_heads, {mask.tiles_q, mask.tiles_k + 1},
                          "[B|1, H|Hkv|1, Nq, 1 + Nk]", in_order);
  mask.columns = to_per_head("columns", *given.columns, query, p.batch, p.heads, p.kv_heads, {mask.tiles_k, mask.tiles_q + 1},
                             "[B|1, H|Hkv|1, Nk, 1 + Nq]", in_order);
  check_extent("bits", *given.bits);
  given.bits = in_order(*given.bits);
  mask.bits = static_cast<const uint32_t*>(given.bits->data_ptr());
  mask.slots = given.bits->size(0);
}

inline CheckedAttention check_attention(const Tensor& query, const Tensor& key, const Tensor& value, MaskArguments given,
                                        bool is_causal, double scale, double softcap, double dropout_p) {
  CheckedAttention checked{query, key, value, query, key, value, std::move(given), {}};
  AttentionParams& p = checked.params;
  for (auto [name, tensor] : {std::pair{"query", &query}, {"key", &key}, {"value", &value}}) {
    check(tensor->dim() == 4, name, ": expected 4 dimensions [B, heads, S, size], got ", shape_text(*tensor));
    check_dtype(name, *tensor, query.scalar_type());
    check_device(name, *tensor, query);
    check_extent(name, *tensor);
  }
  p.batch = query.size(0), p.heads = query.size(1), p.query_length = query.size(2), p.head_dim = query.size(3);
  p.kv_heads = key.size(1), p.key_length = key.size(2), p.value_dim = value.size(3);
  p.dtype = to_dtype("query", query.scalar_type());
  check_shape("key", key, {p.batch, p.kv_heads, p.key_length, p.head_dim}, "[B, Hkv, Sk, D]");
  check_shape("value", value, {p.batch, p.kv_heads, p.key_length, p.value_dim}, "[B, Hkv, Sk, Dv]");
  check(p.kv_heads > 0 ? p.heads % p.kv_heads == 0 : p.heads == 0, "key: expected a number of heads that divides H=", p.heads,
        ", got Hkv=", p.kv_heads);
  for (auto [name, size] : {std::pair{"query", p.head_dim}, {"value", p.value_dim}}) {
    check(size > 0 && size % 8 == 0 && size <= kMaxHeadDim, name, ": expected a last dimension that is a multiple of 8 up to ",
          kMaxHeadDim, ", got ", size);
  }
  check(p.query_length <= kMaxLength, "query: expected a length up to ", kMaxLength, ", got ", p.query_length);
  check(p.key_length <= kMaxLength, "key: expected a length up to ", kMaxLength, ", got ", p.key_length);
  check(std::abs(scale) <= kMaxFactor, "scale: expected a number of magnitude up to ", kMaxFactor, ", got ", scale);
  check(softcap == 0 || (softcap >= 1 / kMaxFactor && softcap <= kMaxFactor), "softcap: expected 0 or a number from ",
        1 / kMaxFactor, " to ", kMaxFactor, ", got ", softcap);
  check(dropout_p >= 0 && dropout_p < 1, "dropout_p: expected 0 <= dropout_p < 1, got ", dropout_p);

  checked.query = with_dense_rows(query);
  checked.key = with_dense_rows(key);
  checked.value = with_dense_rows(value);
  p.query = to_rows(checked.query), p.key = to_rows(checked.key), p.value = to_rows(checked.value);
  p.scale = scale, p.softcap = softcap, p.dropout_p = dropout_p;

  MaskArguments& mask = checked.mask;
  p.mask.is_causal = is_causal;
  p.mask.start = optional_intervals("start", mask.start, query, p.batch, p.heads, p.kv_heads, p.key_length);
  p.mask.end = optional_intervals("end", mask.end, query, p.batch, p.heads, p.kv_heads, p.key_length);
  fill_block_mask(mask, p, query);
  const ScalarType sum_type = accumulate_type(query.scalar_type());
  if (mask.key_bias) {
    check_dtype("key_bias", *mask.key_bias, sum_type);
    p.key_bias =
        to_per_head("key_bias", *mask.key_bias, query, p.batch, p.heads, p.kv_heads, {p.key_length}, "[B|1, H|Hkv|1, Sk]");
  }
  if (mask.bias) {
    const ScalarType type = mask.bias->scalar_type();
    check(type == sum_type || type == query.scalar_type(), "bias: expected dtype ", dtype_name(sum_type), " or ",
          dtype_name(query.scalar_type()), ", got ", dtype_name(type));
    p.bias = to_per_head("bias", *mask.bias, query, p.batch, p.heads, p.kv_heads, {p.query_length, p.key_length},
                         "[B|1, H|Hkv|1, Sq, Sk]");
    p.bias_row_stride = mask.bias->stride(2);
    p.bias_dtype = to_dtype("bias", type);
  }
  if (dropout_p > 0) {
    check(mask.dropout_seed.has_value(), "dropout_seed: expected an int64 tensor of one element when dropout_p > 0, got none");
    check_dtype("dropout_seed", *mask.dropout_seed, ScalarType::Long);
    check_device("dropout_seed", *mask.dropout_seed, query);
    check(mask.dropout_seed->numel() == 1, "dropout_seed: expected one element, got ", shape_text(*mask.dropout_seed));
    p.dropout_seed = static_cast<const int64_t*>(mask.dropout_seed->data_ptr());
  }
  return checked;
}

// Forward's checked inputs with its results, allocated and in params.
struct CheckedForward {
  CheckedAttention inputs;
  Tensor out, lse, lse_rest;
};

inline CheckedForward check_forward(const Tensor& query, const Tensor& key, const Tensor& value, MaskArguments given,
                                    bool is_causal, double scale, double softcap, double dropout_p) {
  CheckedForward checked{check_attention(query, key, value, std::move(given), is_causal, scale, softcap, dropout_p), Tensor(),
                         Tensor(), Tensor()};
  AttentionParams& p = checked.inputs.params;
  checked.out = empty_in_order_of(query, p.value_dim);
  checked.lse = empty_on(query, {p.batch, p.heads, p.query_length}, accumulate_type(query.scalar_type()));
  p.out = to_rows(checked.out);
  p.lse = checked.lse.data_ptr();
  const bool has_bias = checked.inputs.mask.key_bias || checked.inputs.mask.bias;
  checked.lse_rest = has_bias ? torch::stable::empty_like(checked.lse) : empty_on(query, {0}, checked.lse.scalar_type());
  p.lse_rest = has_bias ? checked.lse_rest.data_ptr() : nullptr;
  return checked;
}

// What backward needs beyond forward: the saved results, the incoming gradients and the tensors that receive the new ones.
struct CheckedBackward {
  CheckedAttention forward;
  Tensor grad_out, out, lse;
  std::optional<Tensor> grad_lse, lse_rest;
  Tensor grad_query, grad_key, grad_value, grad_key_bias, grad_bias;
  BackwardParams params;
};

inline CheckedBackward check_backward(const Tensor& grad_out, const std::optional<Tensor>& grad_lse, CheckedAttention forward,
                                      const Tensor& out, const Tensor& lse, const std::optional<Tensor>& lse_rest,
                                      bool deterministic, bool need_key_bias, bool need_bias) {
  const AttentionParams p = forward.params;
  const Tensor query = forward.query, given_query = forward.given_query;
  for (auto [name, tensor] : {std::pair{"grad_out", &grad_out}, {"out", &out}}) {
    check_shape(name, *tensor, {p.batch, p.heads, p.query_length, p.value_dim}, "[B, H, Sq, Dv]");
    check_dtype(name, *tensor, query.scalar_type());
    check_device(name, *tensor, query);
  }
  const ScalarType sum_type = accumulate_type(query.scalar_type());
  check_shape("lse", lse, {p.batch, p.heads, p.query_length}, "[B, H, Sq]");
  check_dtype("lse", lse, sum_type);
  check_device("lse", lse, query);
  std::optional<Tensor> dense_grad_lse;
  if (grad_lse) {
    check_shape("grad_lse", *grad_lse, {p.batch, p.heads, p.query_length}, "[B, H, Sq]");
    check_dtype("grad_lse", *grad_lse, sum_type);
    check_device("grad_lse", *grad_lse, query);
    dense_grad_lse = torch::stable::contiguous(*grad_lse);
  }
  std::optional<Tensor> dense_lse_rest;
  if (lse_rest && lse_rest->numel() > 0) {
    check_shape("lse_rest", *lse_rest, {p.batch, p.heads, p.query_length}, "[B, H, Sq]");
    check_dtype("lse_rest", *lse_rest, sum_type);
    check_device("lse_rest", *lse_rest, query);
    dense_lse_rest = torch::stable::contiguous(*lse_rest);
  }
  check(!need_key_bias || forward.mask.key_bias, "need_key_bias: expected key_bias to be given, got none");
  check(!need_bias || forward.mask.bias, "need_bias: expected bias to be given, got none");

  const auto zeros_like = [&](bool wanted, const std::optional<Tensor>& tensor, bool is_bias) {
    if (!wanted) return empty_on(query, {0}, sum_type);
    const Tensor& t = *tensor;
    return is_bias ? zeros_on(query, {t.size(0), t.size(1), t.size(2), t.size(3)}, sum_type)
                   : zeros_on(query, {t.size(0), t.size(1), t.size(2)}, sum_type);
  };
  CheckedBackward checked{std::move(forward),
                          with_dense_rows(grad_out),
                          with_dense_rows(out),
                          torch::stable::contiguous(lse),
                          dense_grad_lse,
                          dense_lse_rest,
                          empty_in_order_of(given_query, p.head_dim),
                          Tensor(),
                          Tensor(),
                          Tensor(),
                          Tensor(),
                          {}};
  checked.grad_key = empty_in_order_of(checked.forward.given_key, p.head_dim);
  checked.grad_value = empty_in_order_of(checked.forward.given_value, p.value_dim);
  checked.grad_key_bias = zeros_like(need_key_bias, checked.forward.mask.key_bias, false);
  checked.grad_bias = zeros_like(need_bias, checked.forward.mask.bias, true);

  BackwardParams& b = checked.params;
  b.forward = checked.forward.params;
  b.forward.out = to_rows(checked.out);
  b.forward.lse = checked.lse.data_ptr();
  b.forward.lse_rest = checked.lse_rest ? checked.lse_rest->data_ptr() : nullptr;
  b.grad_out = to_rows(checked.grad_out);
  b.grad_lse = checked.grad_lse ? checked.grad_lse->data_ptr() : nullptr;
  b.grad_query = to_rows(checked.grad_query);
  b.grad_key = to_rows(checked.grad_key);
  b.grad_value = to_rows(checked.grad_value);
  b.grad_key_bias = need_key_bias ? checked.grad_key_bias.data_ptr() : nullptr;
  b.grad_bias = need_bias ? checked.grad_bias.data_ptr() : nullptr;
  b.deterministic = deterministic;
  return checked;
}

}  // namespace dmattn
