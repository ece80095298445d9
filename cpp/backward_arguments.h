// Backward's arguments and results on the host, the same for all devices.
#pragma once

#include "attention_arguments.h"

namespace dmattn {

// grad_query, grad_key, grad_value, grad_key_bias, grad_bias
using BackwardResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Forward's arguments and what backward needs beyond them, by the names that schema.cpp gives them.
struct BackwardArguments {
  AttentionArguments forward;
  Tensor grad_out;
  std::optional<Tensor> grad_lse;
  Tensor out, lse;
  std::optional<Tensor> lse_rest;
  bool need_key_bias = false, need_bias = false;
};

// Backward as torch calls it. Its arguments are in the order of schema.cpp: a device registers
// TORCH_BOX(&unpack_backward<op>) for an `op` that takes them as one struct.
template <BackwardResults (*op)(BackwardArguments)>
BackwardResults unpack_backward(const Tensor& grad_out, std::optional<Tensor> grad_lse, const Tensor& query, const Tensor& key,
                                const Tensor& value, const Tensor& out, const Tensor& lse, std::optional<Tensor> start,
                                std::optional<Tensor> end, std::optional<Tensor> tiles, std::optional<Tensor> rows,
                                std::optional<Tensor> columns, std::optional<Tensor> bits, std::optional<Tensor> indices,
                                std::optional<Tensor> index_offset, std::optional<Tensor> key_bias, std::optional<Tensor> bias,
                                std::optional<Tensor> dropout_seed, bool is_causal, double scale, double softcap,
                                double dropout_p, bool deterministic, bool need_key_bias, bool need_bias,
                                std::optional<Tensor> lse_rest, bool is_in_order, int64_t most_keys, int64_t index_block,
                                int64_t index_local, int64_t index_sinks) {
  return op({{query,
              key,
              value,
              std::move(start),
              std::move(end),
              std::move(tiles),
              std::move(rows),
              std::move(columns),
              std::move(bits),
              std::move(indices),
              std::move(index_offset),
              std::move(key_bias),
              std::move(bias),
              std::move(dropout_seed),
              is_causal,
              scale,
              softcap,
              dropout_p,
              deterministic,
              is_in_order,
              most_keys,
              index_block,
              index_local,
              index_sinks},
             grad_out,
             std::move(grad_lse),
             out,
             lse,
             std::move(lse_rest),
             need_key_bias,
             need_bias});
}

// The checked inputs with the gradients, allocated and in params.
struct CheckedBackward {
  CheckedAttention forward;
  Tensor grad_out, out, lse;
  std::optional<Tensor> grad_lse, lse_rest;
  Tensor grad_query, grad_key, grad_value, grad_key_bias, grad_bias;
  BackwardParams params;

  BackwardResults results() const { return {grad_query, grad_key, grad_value, grad_key_bias, grad_bias}; }
};

// A contiguous tensor like lse, or none where none is given, or an empty one.
inline std::optional<Tensor> check_like_lse(const char* name, const std::optional<Tensor>& tensor,
                                            const CheckedAttention& forward, bool may_be_empty) {
  if (!tensor || (may_be_empty && tensor->numel() == 0)) return {};
  const AttentionParams& p = forward.params;
  check_shape(name, *tensor, {p.batch, p.heads, p.query_length}, "[B, H, Sq]");
  check_dtype(name, *tensor, accumulate_type(forward.query.scalar_type()));
  check_device(name, *tensor, forward.query);
  return as_contiguous(*tensor);
}

// A tensor in the shape of a bias, or nothing where its gradient is not wanted.
inline Tensor like_bias(const char* option, bool is_wanted, const char* name, const std::optional<Tensor>& bias,
                        const Tensor& query) {
  const ScalarType type = accumulate_type(query.scalar_type());
  check(!is_wanted || bias, option, ": expected ", name, " to be given, got none");
  if (!is_wanted) return empty_on(query, {0}, type);
  if (bias->dim() == 3) return empty_on(query, {bias->size(0), bias->size(1), bias->size(2)}, type);
  return empty_on(query, {bias->size(0), bias->size(1), bias->size(2), bias->size(3)}, type);
}

// grad_key_bias is zero. So is grad_bias if clears_bias; otherwise the caller writes or clears it.
inline CheckedBackward check_backward(BackwardArguments given, bool clears_bias = true) {
  CheckedBackward checked;
  checked.forward = check_attention(std::move(given.forward));
  const CheckedAttention& forward = checked.forward;
  const AttentionParams& p = forward.params;
  for (auto [name, tensor] : {std::pair{"grad_out", &given.grad_out}, {"out", &given.out}}) {
    check_shape(name, *tensor, {p.batch, p.heads, p.query_length, p.value_dim}, "[B, H, Sq, Dv]");
    check_dtype(name, *tensor, forward.query.scalar_type());
    check_device(name, *tensor, forward.query);
  }
  checked.grad_out = with_dense_rows(given.grad_out);
  checked.out = with_dense_rows(given.out);
  checked.lse = *check_like_lse("lse", given.lse, forward, false);
  checked.grad_lse = check_like_lse("grad_lse", given.grad_lse, forward, false);
  checked.lse_rest = check_like_lse("lse_rest", given.lse_rest, forward, true);
  const AttentionArguments& tensors = forward.given;
  checked.grad_key_bias = like_bias("need_key_bias", given.need_key_bias, "key_bias", tensors.key_bias, forward.query);
  checked.grad_bias = like_bias("need_bias", given.need_bias, "bias", tensors.bias, forward.query);
  if (given.need_key_bias) torch::stable::zero_(checked.grad_key_bias);
  if (given.need_bias && clears_bias) torch::stable::zero_(checked.grad_bias);
  checked.grad_query = empty_in_order_of(tensors.query, p.head_dim);
  checked.grad_key = empty_in_order_of(tensors.key, p.head_dim);
  checked.grad_value = empty_in_order_of(tensors.value, p.value_dim);

  const auto data_of = [](const std::optional<Tensor>& tensor) { return tensor ? tensor->data_ptr() : nullptr; };
  BackwardParams& b = checked.params;
  b.forward = p;
  b.forward.out = view_of(checked.out);
  b.forward.lse = checked.lse.data_ptr();
  b.forward.lse_rest = data_of(checked.lse_rest);
  b.grad_out = view_of(checked.grad_out);
  b.grad_lse = data_of(checked.grad_lse);
  b.grad_query = view_of(checked.grad_query);
  b.grad_key = view_of(checked.grad_key);
  b.grad_value = view_of(checked.grad_value);
  b.grad_key_bias = given.need_key_bias ? checked.grad_key_bias.data_ptr() : nullptr;
  b.grad_bias = given.need_bias ? checked.grad_bias.data_ptr() : nullptr;
  b.deterministic = tensors.deterministic;
  return checked;
}

}  // namespace dmattn
