// Tensors in, params out for the loss of an indexer.
#pragma once

#include "index_arguments.h"

namespace dmattn {

// Holds what params points to.
struct CheckedIndexLoss {
  Tensor logits, products, weights, positions;
  std::optional<Tensor> slope, key_bias, lse, lists, start, end;
  Tensor losses, of_products, of_weights, of_slopes;
  IndexLossParams params;

  CheckedIndexLoss(const Tensor& given_logits, const Tensor& given_products, const Tensor& given_weights,
                   std::optional<Tensor> given_slope, std::optional<Tensor> given_bias, std::optional<Tensor> given_lse,
                   const Tensor& given_positions, std::optional<Tensor> given_lists, std::optional<Tensor> given_start,
                   std::optional<Tensor> given_end, int64_t key_length, int64_t block_size, bool is_pooled, bool is_causal,
                   int64_t local, int64_t sink, double scale, double softcap, double index_scale, bool sharp, bool to_bfloat16)
      : logits(as_contiguous(given_logits)),
        products(as_contiguous(given_products)),
        weights(as_contiguous(given_weights)),
        positions(as_contiguous(given_positions)),
        slope(std::move(given_slope)),
        key_bias(std::move(given_bias)),
        lse(std::move(given_lse)),
        lists(std::move(given_lists)),
        start(std::move(given_start)),
        end(std::move(given_end)) {
    IndexLossParams& p = params;
    check(logits.dim() == 5, "logits: expected 5 dimensions [B, G, h, R, M], got ", shape_text(logits));
    check(products.dim() == 5, "products: expected 5 dimensions [B, G, Hi, R, N], got ", shape_text(products));
    if (lists) check(lists->dim() == 4, "lists: expected 4 dimensions [B|1, G|1, R, n], got ", shape_text(*lists));
    const ScalarType type = logits.scalar_type();
    check(type == ScalarType::Float || type == ScalarType::Double, "logits: expected dtype float32 or float64, got ",
          dtype_name(type));
    check_extent("logits", logits), check_extent("products", products);
    check_competition(key_length, block_size, local, sink);
    check_scale(scale), check_scale(index_scale, "index_scale"), check_softcap(softcap);
    check(!to_bfloat16 || type == ScalarType::Float, "to_bfloat16: expected False for float64, got True");
    while ((int64_t{1} << p.log2_block) < block_size) ++p.log2_block;
    p.batch = logits.size(0), p.groups = logits.size(1), p.heads = logits.size(2), p.rows = logits.size(3);
    p.index_heads = products.size(2), p.keys = logits.size(4), p.choices = products.size(4), p.key_length = key_length;
    p.blocks = lists ? lists->size(3) : is_pooled ? p.keys / block_size : ceil_div(p.keys, block_size);
    check(p.heads > 0 && p.index_heads > 0, "logits, products: expected at least one head, got ", shape_text(logits), ", ",
          shape_text(products));
    check(p.keys == (lists ? p.blocks * block_size : key_length),
          "logits: expected M=", lists ? p.blocks * block_size : key_length, ", got ", shape_text(logits));
    const int64_t choices = is_pooled ? p.blocks : p.keys;
    check_dtype("products", products, type), check_device("products", products, logits);
    check_dtype("weights", weights, type), check_device("weights", weights, logits);
    check_dtype("positions", positions, ScalarType::Long), check_device("positions", positions, logits);
    check_shape("products", products, {p.batch, p.groups, p.index_heads, p.rows, choices}, "[B, G, Hi, R, N]");
    check_shape("weights", weights, {p.batch, p.groups, p.rows, p.index_heads}, "[B, G, R, Hi]");
    check_shape("positions", positions, {p.rows}, "[R]");
    p.is_double = type == ScalarType::Double;
    p.logits = logits.data_ptr(), p.products = products.data_ptr(), p.weights = weights.data_ptr();
    p.positions = static_cast<const int64_t*>(positions.data_ptr());
    if (slope) {
      check_dtype("slope", *slope, type), check_device("slope", *slope, logits), check_shape("slope", *slope, {p.groups}, "[G]");
      slope = as_contiguous(*slope), p.slope = slope->data_ptr();
    }
    if (lse) {
      check_dtype("lse", *lse, type), check_device("lse", *lse, logits);
      check_shape("lse", *lse, {p.batch, p.groups, p.heads, p.rows}, "[B, G, h, R]");
      lse = as_contiguous(*lse), p.lse = lse->data_ptr();
    }
    if (key_bias) take_bias(type);
    take_integers("lists", lists, p.lists, {p.rows, p.blocks}, "[B|1, G|1, R, n]");
    take_integers("start", start, p.start, {key_length}, "[B|1, G|1, Sk]");
    take_integers("end", end, p.end, {key_length}, "[B|1, G|1, Sk]");
    // Beyond the longest sequence nothing changes.
    p.local = static_cast<int32_t>(std::min(local, int64_t{1} << 30)), p.sinks = static_cast<int32_t>(std::min(sink, kMaxLength));
    p.is_pooled = is_pooled, p.is_causal = is_causal, p.is_sharp = sharp, p.to_bfloat16 = to_bfloat16;
    p.scale = scale, p.softcap = softcap, p.index_scale = index_scale;
    losses = empty_on(logits, {p.batch, p.groups, p.rows}, type), p.losses = losses.data_ptr();
    of_slopes = empty_on(logits, {p.batch, p.groups, p.rows}, type), p.of_slopes = of_slopes.data_ptr();
    of_weights = empty_on(logits, {p.batch, p.groups, p.rows, p.index_heads}, type), p.of_weights = of_weights.data_ptr();
    const std::vector<int64_t> shape = {p.batch, p.groups, p.index_heads, p.rows, p.choices};
    of_products = torch::stable::new_empty(products, shape, to_bfloat16 ? ScalarType::BFloat16 : type);
    p.of_products = of_products.data_ptr();
  }

 private:
  void take_bias(ScalarType type) {
    IndexLossParams& p = params;
    check_dtype("key_bias", *key_bias, type), check_device("key_bias", *key_bias, logits);
    const auto is_size = [&](int64_t axis, int64_t size) { return key_bias->size(axis) == size || key_bias->size(axis) == 1; };
    check(key_bias->dim() == 4 && is_size(0, p.batch) && is_size(1, p.groups) && is_size(2, p.heads) &&
              key_bias->size(3) == p.key_length,
          "key_bias: expected [B|1, G|1, h|1, Sk] with B=", p.batch, ", G=", p.groups, ", h=", p.heads, ", Sk=", p.key_length,
          ", got ", shape_text(*key_bias));
    key_bias = with_dense_rows(*key_bias);
    p.key_bias = key_bias->data_ptr();
    const auto stride = [&](int64_t axis) { return key_bias->size(axis) == 1 ? 0 : key_bias->stride(axis); };
    p.bias_batch_stride = stride(0), p.bias_group_stride = stride(1), p.bias_head_stride = stride(2);
  }
  void take_integers(const char* name, std::optional<Tensor>& given, PerHead& view, std::initializer_list<int64_t> rest,
                     const char* meaning) {
    if (!given) return;
    check_dtype(name, *given, ScalarType::Int);
    view = to_per_head(name, *given, logits, params.batch, params.groups, params.groups, rest, meaning, as_contiguous);
  }
};

// The op on a device, which computes what was checked by `run`.
template <void (*run)(const CheckedIndexLoss&)>
std::tuple<Tensor, Tensor, Tensor, Tensor> index_loss_op(
    const Tensor& logits, const Tensor& products, const Tensor& weights, std::optional<Tensor> slope,
    std::optional<Tensor> key_bias, std::optional<Tensor> lse, const Tensor& positions, std::optional<Tensor> lists,
    std::optional<Tensor> start, std::optional<Tensor> end, int64_t key_length, int64_t block_size, bool is_pooled,
    bool is_causal, int64_t local, int64_t sink, double scale, double softcap, double index_scale, bool sharp, bool to_bfloat16) {
  const CheckedIndexLoss checked(logits, products, weights, std::move(slope), std::move(key_bias), std::move(lse), positions,
                                 std::move(lists), std::move(start), std::move(end), key_length, block_size, is_pooled, is_causal,
                                 local, sink, scale, softcap, index_scale, sharp, to_bfloat16);
  run(checked);
  return {checked.losses, checked.of_products, checked.of_weights, checked.of_slopes};
}

}  // namespace dmattn
