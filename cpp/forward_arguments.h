// Forward's arguments and results on the host, the same for all devices.
#pragma once

#include "attention_arguments.h"
#include "select_arguments.h"

namespace dmattn {

using ForwardResults = std::tuple<Tensor, Tensor, Tensor>;  // out, lse, lse_rest

// The checked inputs with the results, allocated and in params.
struct CheckedForward {
  CheckedAttention inputs;
  Tensor out, lse, lse_rest;

  ForwardResults results() const { return {out, lse, lse_rest}; }
};

// Forward as torch calls it. Its arguments are in the order of schema.cpp: a device registers
// TORCH_BOX(&unpack_forward<op>) for an `op` that takes them as one struct, and whether lse_rest is wanted.
template <CheckedForward (*op)(AttentionArguments, bool wants_rest)>
ForwardResults unpack_forward(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<Tensor> start,
                              std::optional<Tensor> end, std::optional<Tensor> tiles, std::optional<Tensor> rows,
                              std::optional<Tensor> columns, std::optional<Tensor> bits, std::optional<Tensor> indices,
                              std::optional<Tensor> index_offset, std::optional<Tensor> key_bias, std::optional<Tensor> bias,
                              std::optional<Tensor> dropout_seed, bool is_causal, double scale, double softcap, double dropout_p,
                              bool deterministic, bool is_in_order, int64_t most_keys, int64_t index_block, int64_t index_local,
                              int64_t index_sinks) {
  return op({query,
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
            true)
      .results();
}

// wants_rest: whether a gradient may be asked for, which takes lse_rest.
inline CheckedForward check_forward(AttentionArguments given, bool wants_rest) {
  CheckedForward checked{check_attention(std::move(given)), Tensor(), Tensor(), Tensor()};
  const Tensor& query = checked.inputs.given.query;
  AttentionParams& p = checked.inputs.params;
  checked.out = empty_in_order_of(query, p.value_dim);
  checked.lse = empty_on(query, {p.batch, p.heads, p.query_length}, accumulate_type(query.scalar_type()));
  p.out = view_of(checked.out);
  p.lse = checked.lse.data_ptr();
  if (!wants_rest) return checked;
  const bool has_bias = p.key_bias.data || p.bias.data;
  checked.lse_rest = has_bias ? empty_on(query, {p.batch, p.heads, p.query_length}, checked.lse.scalar_type())
                              : empty_on(query, {0}, checked.lse.scalar_type());
  p.lse_rest = has_bias ? checked.lse_rest.data_ptr() : nullptr;
  return checked;
}

// Attention without a mask, or with the one that `scores` [B, Hkv, Sk] select, in one call of torch.
template <CheckedForward (*op)(AttentionArguments, bool wants_rest),
          Tensor (*select)(const Tensor&, std::optional<Tensor>, int64_t, bool, int64_t, int64_t)>
std::tuple<Tensor, Tensor> unpack_forward_plain(const Tensor& query, const Tensor& key, const Tensor& value,
                                                std::optional<Tensor> scores, std::optional<Tensor> key_bias, int64_t window,
                                                bool is_causal, int64_t local, int64_t sink, double scale, double softcap) {
  AttentionArguments given;
  given.query = query, given.key = key, given.value = value, given.key_bias = std::move(key_bias);
  given.is_causal = is_causal, given.scale = scale, given.softcap = softcap;
  if (scores) {
    check(key.dim() == 4, "key: expected 4 dimensions [B, Hkv, Sk, D], got ", shape_text(key));
    check_shape("scores", *scores, {key.size(0), key.size(1), key.size(2)}, "[B, Hkv, Sk]");
    check_device("scores", *scores, query);
    given.end = select(*scores, std::nullopt, window, is_causal, local, sink);
    const auto cut = [](int64_t count) { return std::min<int64_t>(count, kMaxLength); };
    given.most_keys = cut(cut(window) + cut(local) + cut(sink));
  }
  const CheckedForward checked = op(std::move(given), false);
  return {checked.out, checked.lse};
}

}  // namespace dmattn
