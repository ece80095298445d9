// A bounded cache on the CPU: takes one token in, puts cached and new keys in order, takes many tokens in, or takes tokens back.
// A task is one key head.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../cache_arguments.h"
#include "../cache_step.h"
#include "decode.h"
#include "parallel.h"

namespace dmattn::cpu {
namespace {

int64_t bytes_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

// The score of a new token.
template <class Score>
Score new_score(const CacheParams& p, int64_t batch, int64_t head, int64_t token = 0) {
  if (!p.new_scores.data) return 0;
  const int64_t at = p.new_scores.offset(batch, head) + token;
  switch (p.scores_dtype) {
    case DType::kFloat64: return static_cast<Score>(static_cast<const double*>(p.new_scores.data)[at]);
    case DType::kFloat32: return static_cast<const float*>(p.new_scores.data)[at];
    case DType::kBFloat16: return static_cast<float>(static_cast<const torch::headeronly::BFloat16*>(p.new_scores.data)[at]);
    case DType::kFloat16: break;
  }
  return static_cast<float>(static_cast<const torch::headeronly::Half*>(p.new_scores.data)[at]);
}

// The slots of one key head, for take_token and take_back.
template <class Score>
struct HeadSlots {
  const CacheParams& p;
  int64_t batch, head, task;
  int32_t step;
  int64_t key_bytes, value_bytes;
  char *key, *value;
  Score* score;
  int32_t *position, *entered;

  HeadSlots(const CacheParams& params, int64_t index)
      : p(params), batch(index / params.kv_heads), head(index % params.kv_heads), task(index), step(params.steps[index]) {
    key_bytes = p.head_dim * bytes_of(p.dtype), value_bytes = p.value_dim * bytes_of(p.dtype);
    key = static_cast<char*>(p.key) + task * p.slots * key_bytes;
    value = static_cast<char*>(p.value) + task * p.slots * value_bytes;
    score = static_cast<Score*>(p.score) + task * p.slots;
    position = p.position + task * p.slots;
    entered = p.entered + task * p.rewind;
  }

  bool is_empty(int32_t slot) const { return position[slot] < 0; }
  Score score_of(int32_t row) const { return row == kNewRow ? new_score<Score>(p, batch, head) : score[row]; }
  int32_t entered_of(int32_t row) const { return entered[row]; }
  void set_entered(int32_t row, int32_t slot) { entered[row] = slot; }

  Competitor<Score> worst() const {
    const int32_t first = first_selected_slot(p);
    Competitor<Score> found{score[first], position[first], first};
    for (int32_t slot = first + 1; slot < first_log_slot(p); ++slot) {
      const Competitor<Score> other{score[slot], position[slot], slot};
      if (other.is_worse_than(found)) found = other;
    }
    return found;
  }

  void copy(int32_t row, int32_t slot) {
    char *to_key = key + slot * key_bytes, *to_value = value + slot * value_bytes;
    if (row == kEmptyRow) {
      std::memset(to_key, 0, static_cast<size_t>(key_bytes)), std::memset(to_value, 0, static_cast<size_t>(value_bytes));
      score[slot] = -std::numeric_limits<Score>::infinity(), position[slot] = kNoPosition;
      return;
    }
    const bool is_new = row == kNewRow;
    const int64_t key_at = batch * p.new_key.batch_stride + head * p.new_key.head_stride;
    const int64_t value_at = batch * p.new_value.batch_stride + head * p.new_value.head_stride;
    const char* const from_key =
        is_new ? static_cast<const char*>(p.new_key.data) + key_at * bytes_of(p.dtype) : key + row * key_bytes;
    const char* const from_value =
        is_new ? static_cast<const char*>(p.new_value.data) + value_at * bytes_of(p.dtype) : value + row * value_bytes;
    std::memcpy(to_key, from_key, static_cast<size_t>(key_bytes)),
        std::memcpy(to_value, from_value, static_cast<size_t>(value_bytes));
    score[slot] = score_of(row), position[slot] = is_new ? step : position[row];
  }
};

template <class Score>
void update(const CacheParams& p) {
  for_each_task(p.batch * p.kv_heads, [&](int64_t task, int64_t) {
    if (p.lengths && p.lengths[task / p.kv_heads] <= 0) return;
    HeadSlots<Score> slots(p, task);
    if (slots.step < 0 || slots.step == std::numeric_limits<int32_t>::max()) return;
    take_token<Score>(p, slots.step, slots);
    p.steps[task] = slots.step + 1;
    p.kept[task] = std::min(p.kept[task], p.rewind - 1) + 1;
  });
}

template <class Score>
void rewind(const CacheParams& p) {
  for_each_task(p.batch * p.kv_heads, [&](int64_t task, int64_t) {
    HeadSlots<Score> slots(p, task);
    const int32_t count = p.count[task / p.kv_heads], kept = std::min({p.kept[task], p.rewind, slots.step});
    if (count == 0) return;
    if (count < 0 || count > kept) {  // more than is kept: the sequence starts anew
      for (int32_t slot = 0; slot < p.slots; ++slot) slots.copy(kEmptyRow, slot);
      for (int32_t row = 0; row < p.rewind; ++row) slots.set_entered(row, kNoSlot);
      p.steps[task] = 0, p.kept[task] = 0;
      return;
    }
    for (int32_t i = 0; i < count; ++i) take_back(p, --slots.step, slots);
    p.steps[task] = slots.step, p.kept[task] = kept - count;
  });
}

// Where the keys of a chunk come to lie, for one key head. Keys are named by their index among cached and new ones.
struct Places {
  std::vector<int32_t> victim;   // [tokens]: the key that dies at a token, -1 for none
  std::vector<int32_t> slot_of;  // [keys]: the slot of a selected key
  std::vector<int32_t> entered;  // [tokens]: the slot that the key takes which competes at a token, kNoSlot if it is not selected
};

// Follows the tokens in order: the key that competes takes the slot of the key that dies, or the next empty one.
void find_places(const CacheParams& p, int64_t task, int32_t taken, Places& places) {
  const int32_t visible = first_log_slot(p), first = visible - p.local, keys = visible + p.tokens;
  const int32_t* const position = p.all_position + task * keys;
  const int32_t* const end = p.all_end + task * keys;
  const int32_t* const slot = p.all_slot + task * visible;
  places.victim.assign(static_cast<size_t>(p.tokens), -1), places.entered.assign(static_cast<size_t>(p.tokens), kNoSlot);
  places.slot_of.assign(static_cast<size_t>(keys), kNoSlot);
  int32_t next_empty = first_selected_slot(p);
  for (int32_t i = 0; i < keys; ++i) {
    const bool dies = position[i] >= 0 && end[i] >= visible && end[i] < visible + taken;
    if (dies) places.victim[static_cast<size_t>(end[i] - visible)] = i;
    if (i < first) places.slot_of[static_cast<size_t>(i)] = slot[i];
    next_empty += i < visible && position[i] >= 0 && slot[i] >= first_selected_slot(p);
  }
  for (int32_t token = 0; token < taken; ++token) {
    const int32_t competitor = first + token, victim = places.victim[static_cast<size_t>(token)];
    if (position[competitor] < p.sink || victim == competitor) continue;
    const int32_t taken_slot = victim >= 0 ? places.slot_of[static_cast<size_t>(victim)] : next_empty++;
    places.slot_of[static_cast<size_t>(competitor)] = places.entered[static_cast<size_t>(token)] = taken_slot;
  }
}

// A slot takes what a key of the chunk is.
template <class Score>
void copy_from_chunk(const CacheParams& p, HeadSlots<Score>& slots, int32_t key, int32_t slot) {
  const auto from = [&](const TensorView& rows) {
    const int64_t at = slots.batch * rows.batch_stride + slots.head * rows.head_stride + key * rows.row_stride;
    return static_cast<const char*>(rows.data) + at * bytes_of(p.dtype);
  };
  const int64_t at = slots.task * (first_log_slot(p) + p.tokens) + key;
  std::memcpy(slots.key + slot * slots.key_bytes, from(p.all_key), static_cast<size_t>(slots.key_bytes));
  std::memcpy(slots.value + slot * slots.value_bytes, from(p.all_value), static_cast<size_t>(slots.value_bytes));
  slots.score[slot] = static_cast<const Score*>(p.all_score)[at], slots.position[slot] = p.all_position[at];
}

template <class Score>
void extend(const CacheParams& p) {
  const int32_t visible = first_log_slot(p), first = visible - p.local, keys = visible + p.tokens;
  std::vector<Places> room(static_cast<size_t>(worker_count(p.batch * p.kv_heads)));
  for_each_task(p.batch * p.kv_heads, [&](int64_t task, int64_t worker) {
    HeadSlots<Score> slots(p, task);
    const int32_t taken = p.lengths ? std::clamp(p.lengths[slots.batch], 0, p.tokens) : p.tokens;
    if (slots.step < 0 || slots.step > std::numeric_limits<int32_t>::max() - taken) return;
    Places& places = room[static_cast<size_t>(worker)];
    find_places(p, task, taken, places);
    // Log the last tokens.
    for (int32_t token = std::max(0, taken - p.rewind); token < taken; ++token) {
      const int32_t row = (slots.step + token) % p.rewind, victim = places.victim[static_cast<size_t>(token)];
      if (victim >= 0) {
        copy_from_chunk(p, slots, victim, visible + row);
      } else {
        slots.copy(kEmptyRow, visible + row);
      }
      slots.set_entered(row, places.entered[static_cast<size_t>(token)]);
    }
    // Put what is alive into its slot, unless it lies there.
    const int32_t after = slots.step + taken;
    for (int32_t key = 0; key < keys; ++key) {
      const int32_t position = p.all_position[task * keys + key];
      if (position < 0 || p.all_end[task * keys + key] != visible + taken) continue;
      const bool is_local = p.local > 0 && position >= after - p.local;
      const int32_t slot = position < p.sink ? position
                           : is_local        ? ring_slot(p, position)
                                             : places.slot_of[static_cast<size_t>(key)];
      const bool is_there = key < first && slot >= 0 && slot < visible && slots.position[slot] == position;
      if (slot >= 0 && slot < visible && !is_there) copy_from_chunk(p, slots, key, slot);
    }
    p.steps[task] = after;
    p.kept[task] = std::min(p.kept[task], p.rewind - taken) + taken;
  });
}

template <class Score>
void join(const JoinParams& join) {
  const CacheParams& p = join.cache;
  const int64_t key_bytes = p.head_dim * bytes_of(p.dtype), value_bytes = p.value_dim * bytes_of(p.dtype);
  const int64_t keys = join.visible + p.tokens;
  for_each_task(p.batch * p.kv_heads, [&](int64_t task, int64_t) {
    const int64_t batch = task / p.kv_heads, head = task % p.kv_heads;
    const int32_t taken = p.lengths ? std::clamp(p.lengths[batch], 0, p.tokens) : p.tokens;
    constexpr int64_t last_position = std::numeric_limits<int32_t>::max();
    const int32_t* const position = p.position + task * p.slots;
    int32_t* const slot = join.slot + task * join.visible;
    for (int32_t i = 0; i < join.visible; ++i) slot[i] = i;
    std::sort(slot, slot + join.visible,
              [&](int32_t a, int32_t b) { return position[a] != position[b] ? position[a] < position[b] : a < b; });
    const auto put = [&](int64_t key, const char* from_key, const char* from_value, Score score, int32_t at) {
      const int64_t to = task * keys + key;
      std::memcpy(static_cast<char*>(join.key) + to * key_bytes, from_key, static_cast<size_t>(key_bytes));
      std::memcpy(static_cast<char*>(join.value) + to * value_bytes, from_value, static_cast<size_t>(value_bytes));
      static_cast<Score*>(join.score)[to] = score, join.position[to] = at;
      join.segment_end[to] = at >= 0 ? join.visible + taken : 0;
    };
    for (int32_t i = 0; i < join.visible; ++i) {
      const int64_t from = task * p.slots + slot[i];
      put(i, static_cast<const char*>(p.key) + from * key_bytes, static_cast<const char*>(p.value) + from * value_bytes,
          static_cast<const Score*>(p.score)[from], position[slot[i]]);
    }
    const auto row = [&](const TensorView& rows, int32_t token) {
      const int64_t at = batch * rows.batch_stride + head * rows.head_stride + token * rows.row_stride;
      return static_cast<const char*>(rows.data) + at * bytes_of(p.dtype);
    };
    for (int32_t token = 0; token < p.tokens; ++token) {
      put(join.visible + token, row(p.new_key, token), row(p.new_value, token), new_score<Score>(p, batch, head, token),
          token < taken ? static_cast<int32_t>(std::min(int64_t{p.steps[task]} + token, last_position)) : kNoPosition);
    }
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> join_op(const Tensor& key_cache, const Tensor& value_cache,
                                                                   const Tensor& score_cache, const Tensor& position,
                                                                   const Tensor& steps, const Tensor& key, const Tensor& value,
                                                                   std::optional<Tensor> scores, std::optional<Tensor> lengths,
                                                                   int64_t visible) {
  const CheckedJoin c = check_join(key_cache, value_cache, score_cache, position, steps, key, value, std::move(scores),
                                   std::move(lengths), visible);
  c.params.cache.dtype == DType::kFloat64 ? join<double>(c.params) : join<float>(c.params);
  return {c.all_key, c.all_value, c.all_scores, c.key_position, c.slot, c.segment_end};
}

void update_op(const Tensor& key_cache, const Tensor& value_cache, const Tensor& score_cache, const Tensor& position,
               const Tensor& entered, const Tensor& steps, const Tensor& kept, const Tensor& key, const Tensor& value,
               std::optional<Tensor> scores, std::optional<Tensor> lengths, int64_t window, int64_t local, int64_t sink) {
  const CheckedUpdate checked = check_update({key_cache, value_cache, score_cache, position, entered, steps, kept}, key, value,
                                             std::move(scores), std::move(lengths), window, local, sink);
  checked.params.dtype == DType::kFloat64 ? update<double>(checked.params) : update<float>(checked.params);
}

std::tuple<Tensor, Tensor> step_op(const Tensor& key_cache, const Tensor& value_cache, const Tensor& score_cache,
                                   const Tensor& position, const Tensor& entered, const Tensor& steps, const Tensor& kept,
                                   const Tensor& query, const Tensor& key, const Tensor& value, std::optional<Tensor> scores,
                                   std::optional<Tensor> lengths, int64_t window, int64_t local, int64_t sink, double scale,
                                   double softcap) {
  const CacheTensors cache{key_cache, value_cache, score_cache, position, entered, steps, kept};
  const CheckedUpdate update_of = check_update(cache, key, value, std::move(scores), std::move(lengths), window, local, sink);
  const CheckedDecode attention = check_step(update_of, cache, query, scale, softcap);
  update_of.params.dtype == DType::kFloat64 ? update<double>(update_of.params) : update<float>(update_of.params);
  run_decode(attention.params);
  return {attention.out, attention.lse};
}

void extend_op(const Tensor& key_cache, const Tensor& value_cache, const Tensor& score_cache, const Tensor& position,
               const Tensor& entered, const Tensor& steps, const Tensor& kept, const Tensor& key, const Tensor& value,
               const Tensor& scores, const Tensor& key_position, const Tensor& slot, const Tensor& end,
               std::optional<Tensor> lengths, int64_t window, int64_t local, int64_t sink) {
  const CheckedExtend checked = check_extend({key_cache, value_cache, score_cache, position, entered, steps, kept}, key, value,
                                             scores, key_position, slot, end, std::move(lengths), window, local, sink);
  checked.params.dtype == DType::kFloat64 ? extend<double>(checked.params) : extend<float>(checked.params);
}

void rewind_op(const Tensor& key_cache, const Tensor& value_cache, const Tensor& score_cache, const Tensor& position,
               const Tensor& entered, const Tensor& steps, const Tensor& kept, const Tensor& count, int64_t window, int64_t local,
               int64_t sink) {
  CacheParams p = check_cache({key_cache, value_cache, score_cache, position, entered, steps, kept}, window, local, sink);
  Tensor counts = count;
  p.count = to_per_sequence("count", counts, key_cache);
  p.dtype == DType::kFloat64 ? rewind<double>(p) : rewind<float>(p);
}

}  // namespace
}  // namespace dmattn::cpu

DMATTN_KERNELS(CPU, m) {
  m.impl("cache_update", TORCH_BOX(&dmattn::cpu::update_op));
  m.impl("cache_step", TORCH_BOX(&dmattn::cpu::step_op));
  m.impl("cache_join", TORCH_BOX(&dmattn::cpu::join_op));
  m.impl("cache_extend", TORCH_BOX(&dmattn::cpu::extend_op));
  m.impl("cache_rewind", TORCH_BOX(&dmattn::cpu::rewind_op));
}
