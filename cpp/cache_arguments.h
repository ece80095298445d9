// Tensors in, params out for the ops that change a bounded cache.
#pragma once

#include "decode_arguments.h"

namespace dmattn {

// What the ops that change a cache write, in the order of the schema.
struct CacheTensors {
  const Tensor &key, &value, &score, &position, &entered, &steps, &kept;
};

inline int32_t cache_size(const char* name, int64_t size) {
  check(size >= 0 && size <= kMaxLength, name, ": expected a number of keys from 0 to ", kMaxLength, ", got ", size);
  return static_cast<int32_t>(size);
}

// The sizes that keys [B, Hkv, N, D] and values [B, Hkv, N, Dv] of a cache have, and their dtype, into params.
inline void fill_sizes(const Tensor& key, const Tensor& value, CacheParams& p) {
  check(key.dim() == 4, "key_cache: expected 4 dimensions [B, Hkv, N, D], got ", shape_text(key));
  check(value.dim() == 4, "value_cache: expected 4 dimensions [B, Hkv, N, Dv], got ", shape_text(value));
  check_extent("key_cache", key), check_extent("value_cache", value);
  p.batch = key.size(0), p.kv_heads = key.size(1), p.head_dim = key.size(3), p.value_dim = value.size(3);
  check_head_size("key_cache", p.head_dim), check_head_size("value_cache", p.value_dim);
  p.dtype = to_dtype("key_cache", key.scalar_type());
}

// Checks what is written: it is written in place, so nothing may be copied, and all of it is contiguous.
inline CacheParams check_cache(const CacheTensors& cache, int64_t window, int64_t local, int64_t sink) {
  const auto& [key, value, score, position, entered, steps, kept] = cache;
  CacheParams p;
  fill_sizes(key, value, p);
  check(entered.dim() == 3, "entered: expected 3 dimensions [B, Hkv, rewind], got ", shape_text(entered));
  p.window = cache_size("window", window), p.local = cache_size("local", local), p.sink = cache_size("sink", sink);
  p.rewind = cache_size("entered", entered.size(2));
  const int64_t slots = window + local + sink + entered.size(2);
  check(window + local + sink > 0, "window: expected window + local + sink > 0, got 0");
  p.slots = cache_size("key_cache", slots);
  check_dtype("value_cache", value, key.scalar_type());
  check_dtype("score_cache", score, accumulate_type(key.scalar_type()));
  check_shape("key_cache", key, {p.batch, p.kv_heads, slots, p.head_dim}, "[B, Hkv, N, D], N = window + local + sink + rewind,");
  check_shape("value_cache", value, {p.batch, p.kv_heads, slots, p.value_dim}, "[B, Hkv, N, Dv]");
  check_shape("score_cache", score, {p.batch, p.kv_heads, slots}, "[B, Hkv, N]");
  check_shape("position", position, {p.batch, p.kv_heads, slots}, "[B, Hkv, N]");
  check_shape("entered", entered, {p.batch, p.kv_heads, p.rewind}, "[B, Hkv, rewind]");
  check_shape("steps", steps, {p.batch, p.kv_heads}, "[B, Hkv]");
  check_shape("kept", kept, {p.batch, p.kv_heads}, "[B, Hkv]");
  for (auto [name, tensor] : {std::pair{"position", &position}, {"entered", &entered}, {"steps", &steps}, {"kept", &kept}}) {
    check_dtype(name, *tensor, ScalarType::Int);
  }
  for (auto [name, tensor] : {std::pair{"key_cache", &key},
                              {"value_cache", &value},
                              {"score_cache", &score},
                              {"position", &position},
                              {"entered", &entered},
                              {"steps", &steps},
                              {"kept", &kept}}) {
    check_device(name, *tensor, key);
    check(tensor->is_contiguous(), name, ": expected a contiguous tensor, because it is written in place");
  }
  p.key = key.data_ptr(), p.value = value.data_ptr(), p.score = score.data_ptr();
  p.position = static_cast<int32_t*>(position.data_ptr()), p.entered = static_cast<int32_t*>(entered.data_ptr());
  p.steps = static_cast<int32_t*>(steps.data_ptr()), p.kept = static_cast<int32_t*>(kept.data_ptr());
  return p;
}

// The scores [B, Hkv, T] of new tokens, into params; a copy replaces them where kernels cannot walk them. Only a cache of float64
// keys takes float64 scores.
inline void fill_new_scores(Tensor& scores, int64_t tokens, const char* meaning, const Tensor& key_cache, CacheParams& p) {
  check_device("scores", scores, key_cache);
  check_shape("scores", scores, {p.batch, p.kv_heads, tokens}, meaning);
  p.scores_dtype = to_dtype("scores", scores.scalar_type());
  check(p.scores_dtype != DType::kFloat64 || p.dtype == DType::kFloat64,
        "scores: expected float32, bfloat16 or float16 for keys that are not float64, got float64");
  scores = with_dense_rows(scores);
  p.new_scores = {scores.data_ptr(), scores.stride(0), scores.stride(1), 1};
}

struct CheckedUpdate {
  Tensor key, value;
  std::optional<Tensor> scores, lengths;
  CacheParams params;
};

inline CheckedUpdate check_update(const CacheTensors& cache, const Tensor& key, const Tensor& value, std::optional<Tensor> scores,
                                  std::optional<Tensor> lengths, int64_t window, int64_t local, int64_t sink) {
  CheckedUpdate checked{key, value, std::move(scores), std::move(lengths), check_cache(cache, window, local, sink)};
  CacheParams& p = checked.params;
  for (auto [name, tensor] : {std::pair{"key", &key}, {"value", &value}}) {
    check_dtype(name, *tensor, cache.key.scalar_type());
    check_device(name, *tensor, cache.key);
  }
  check_shape("key", key, {p.batch, p.kv_heads, 1, p.head_dim}, "[B, Hkv, 1, D]");
  check_shape("value", value, {p.batch, p.kv_heads, 1, p.value_dim}, "[B, Hkv, 1, Dv]");
  checked.key = with_dense_rows(key), checked.value = with_dense_rows(value);
  p.new_key = view_of(checked.key), p.new_value = view_of(checked.value);
  check(checked.scores || window == 0, "scores: expected [B, Hkv, 1] with a window of ", window, ", got none");
  if (checked.scores) fill_new_scores(*checked.scores, 1, "[B, Hkv, 1]", cache.key, p);
  if (checked.lengths) p.lengths = to_per_sequence("lengths", *checked.lengths, cache.key);
  return checked;
}

// The attention of a new token over the slots that it may see. Where it is not taken in, its row sees nothing.
inline CheckedDecode check_step(const CheckedUpdate& update, const CacheTensors& cache, const Tensor& query, double scale,
                                double softcap) {
  check(query.dim() == 4 && query.size(2) == 1, "query: expected [B, H, 1, D], got ", shape_text(query));
  CheckedDecode checked = check_decode(query, cache.key, cache.value, update.lengths, std::nullopt, cache.score, std::nullopt,
                                       std::nullopt, /*is_causal=*/false, scale, softcap);
  const CacheParams& p = update.params;
  checked.params.capacity = int64_t{p.window} + p.local + p.sink;
  checked.params.lengths_are_flags = true;
  return checked;
}

struct CheckedExtend {
  Tensor key, value, scores, position, slot, end;
  std::optional<Tensor> lengths;
  CacheParams params;
};

inline CheckedExtend check_extend(const CacheTensors& cache, const Tensor& key, const Tensor& value, const Tensor& scores,
                                  const Tensor& position, const Tensor& slot, const Tensor& end, std::optional<Tensor> lengths,
                                  int64_t window, int64_t local, int64_t sink) {
  const auto dense = [](const Tensor& tensor) { return as_contiguous(tensor); };
  CheckedExtend checked{key, value, scores, position, slot, end, std::move(lengths), check_cache(cache, window, local, sink)};
  CacheParams& p = checked.params;
  const int64_t visible = window + local + sink;
  check(key.dim() == 4 && key.size(2) > visible && key.size(2) <= kMaxLength, "key: expected [B, Hkv, S, D] with ", visible,
        " < S <= ", kMaxLength, ", got ", shape_text(key));
  const int64_t keys = key.size(2);
  p.tokens = static_cast<int32_t>(keys - visible);
  check_shape("key", key, {p.batch, p.kv_heads, keys, p.head_dim}, "[B, Hkv, S, D]");
  check_shape("value", value, {p.batch, p.kv_heads, keys, p.value_dim}, "[B, Hkv, S, Dv]");
  check_shape("slot", slot, {p.batch, p.kv_heads, visible}, "[B, Hkv, window + local + sink]");
  for (auto [name, tensor] : {std::pair{"scores", &scores}, {"key_position", &position}, {"end", &end}}) {
    check_shape(name, *tensor, {p.batch, p.kv_heads, keys}, "[B, Hkv, S]");
  }
  check_dtype("key", key, cache.key.scalar_type()), check_dtype("value", value, cache.key.scalar_type());
  check_dtype("scores", scores, cache.score.scalar_type());
  check_dtype("key_position", position, ScalarType::Int), check_dtype("end", end, ScalarType::Int);
  check_dtype("slot", slot, ScalarType::Int);
  for (auto [name, tensor] : {std::pair{"key", &key},
                              {"value", &value},
                              {"scores", &scores},
                              {"key_position", &position},
                              {"slot", &slot},
                              {"end", &end}}) {
    check_device(name, *tensor, cache.key);
  }
  checked.key = with_dense_rows(key), checked.value = with_dense_rows(value);
  checked.scores = dense(scores), checked.position = dense(position), checked.slot = dense(slot), checked.end = dense(end);
  p.all_key = view_of(checked.key), p.all_value = view_of(checked.value);
  p.all_score = checked.scores.data_ptr();
  p.all_position = static_cast<const int32_t*>(checked.position.data_ptr());
  p.all_slot = static_cast<const int32_t*>(checked.slot.data_ptr());
  p.all_end = static_cast<const int32_t*>(checked.end.data_ptr());
  if (checked.lengths) p.lengths = to_per_sequence("lengths", *checked.lengths, cache.key);
  return checked;
}

struct CheckedJoin {
  Tensor key_cache, value_cache, score_cache, position, steps, key, value;
  std::optional<Tensor> scores, lengths;
  Tensor all_key, all_value, all_scores, key_position, slot, segment_end;
  JoinParams params;
};

inline CheckedJoin check_join(const Tensor& key_cache, const Tensor& value_cache, const Tensor& score_cache,
                              const Tensor& position, const Tensor& steps, const Tensor& key, const Tensor& value,
                              std::optional<Tensor> scores, std::optional<Tensor> lengths, int64_t visible) {
  const auto dense = [](const Tensor& tensor) { return as_contiguous(tensor); };
  CheckedJoin checked;
  JoinParams& join = checked.params;
  CacheParams& p = join.cache;
  fill_sizes(key_cache, value_cache, p);
  check(key.dim() == 4, "key: expected 4 dimensions [B, Hkv, T, D], got ", shape_text(key));
  check_extent("key", key);
  const int64_t slots = key_cache.size(2), tokens = key.size(2), keys = visible + tokens;
  p.slots = cache_size("key_cache", slots), p.tokens = cache_size("key", tokens);
  check(visible > 0 && visible <= slots, "visible: expected 1 to N=", slots, " slots, got ", visible);
  check(keys <= kMaxLength, "key: expected up to ", kMaxLength - visible, " tokens with ", visible, " slots, got ", tokens);
  join.visible = static_cast<int32_t>(visible);
  check_shape("value_cache", value_cache, {p.batch, p.kv_heads, slots, p.value_dim}, "[B, Hkv, N, Dv]");
  check_shape("score_cache", score_cache, {p.batch, p.kv_heads, slots}, "[B, Hkv, N]");
  check_shape("position", position, {p.batch, p.kv_heads, slots}, "[B, Hkv, N]");
  check_shape("steps", steps, {p.batch, p.kv_heads}, "[B, Hkv]");
  check_shape("key", key, {p.batch, p.kv_heads, tokens, p.head_dim}, "[B, Hkv, T, D]");
  check_shape("value", value, {p.batch, p.kv_heads, tokens, p.value_dim}, "[B, Hkv, T, Dv]");
  check_dtype("score_cache", score_cache, accumulate_type(key_cache.scalar_type()));
  check_dtype("position", position, ScalarType::Int), check_dtype("steps", steps, ScalarType::Int);
  for (auto [name, tensor] : {std::pair{"value_cache", &value_cache}, {"key", &key}, {"value", &value}}) {
    check_dtype(name, *tensor, key_cache.scalar_type());
  }
  for (auto [name, tensor] : {std::pair{"value_cache", &value_cache},
                              {"score_cache", &score_cache},
                              {"position", &position},
                              {"steps", &steps},
                              {"key", &key},
                              {"value", &value}}) {
    check_device(name, *tensor, key_cache);
  }
  checked.key_cache = dense(key_cache), checked.value_cache = dense(value_cache), checked.score_cache = dense(score_cache);
  checked.position = dense(position), checked.steps = dense(steps);
  checked.key = with_dense_rows(key), checked.value = with_dense_rows(value);
  p.key = checked.key_cache.data_ptr(), p.value = checked.value_cache.data_ptr(), p.score = checked.score_cache.data_ptr();
  p.position = static_cast<int32_t*>(checked.position.data_ptr()), p.steps = static_cast<int32_t*>(checked.steps.data_ptr());
  p.new_key = view_of(checked.key), p.new_value = view_of(checked.value);
  checked.scores = std::move(scores), checked.lengths = std::move(lengths);
  if (checked.scores) fill_new_scores(*checked.scores, tokens, "[B, Hkv, T]", key_cache, p);
  if (checked.lengths) p.lengths = to_per_sequence("lengths", *checked.lengths, key_cache);
  checked.all_key = empty_on(key_cache, {p.batch, p.kv_heads, keys, p.head_dim}, key_cache.scalar_type());
  checked.all_value = empty_on(key_cache, {p.batch, p.kv_heads, keys, p.value_dim}, key_cache.scalar_type());
  checked.all_scores = empty_on(key_cache, {p.batch, p.kv_heads, keys}, score_cache.scalar_type());
  checked.key_position = empty_on(key_cache, {p.batch, p.kv_heads, keys}, ScalarType::Int);
  checked.slot = empty_on(key_cache, {p.batch, p.kv_heads, visible}, ScalarType::Int);
  checked.segment_end = empty_on(key_cache, {p.batch, p.kv_heads, keys}, ScalarType::Int);
  join.key = checked.all_key.data_ptr(), join.value = checked.all_value.data_ptr(), join.score = checked.all_scores.data_ptr();
  join.position = static_cast<int32_t*>(checked.key_position.data_ptr());
  join.slot = static_cast<int32_t*>(checked.slot.data_ptr());
  join.segment_end = static_cast<int32_t*>(checked.segment_end.data_ptr());
  return checked;
}

}  // namespace dmattn
