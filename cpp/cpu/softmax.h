// Online softmax over chunks of keys: running maximum and sum per query, one query per lane.
#pragma once

#include "logits.h"

namespace dmattn::cpu {
namespace {

template <class R>
struct SoftmaxState {
  R *max, *sum;  // [queries]

  DMATTN_INLINE void reset(int64_t width) const {
    for (int64_t i = 0; i < width; ++i) max[i] = static_cast<R>(-kInfinity), sum[i] = 0;
  }
  // The logarithm of the sum of all exponentials; -inf for a query that saw nothing. `rest` becomes what rounding left out of it:
  // with a maximum of -1e9 that is all of log(sum).
  DMATTN_INLINE R log_sum(int64_t i, R& rest) const {
    rest = 0;
    if (sum[i] == 0) return static_cast<R>(-kInfinity);
    const R log = static_cast<R>(sizeof(R) == 8 ? __builtin_log(sum[i]) : __builtin_logf(static_cast<float>(sum[i])));
    const R total = max[i] + log, from_log = total - max[i];
    rest = (max[i] - (total - from_log)) + (log - from_log);
    return total;
  }
};

// Turns logits into unnormalised probabilities, in place. correction[i] becomes the factor for older sums of query i.
template <class R>
void update_softmax(const KeyChunk& chunk, int64_t width, const Dropout<R>& dropout, const SoftmaxState<R>& state, R* correction,
                    const Matrix<R>& logits) {
  for (int64_t i = 0; i < width; i += kLanes<R>) {
    R* column = logits.data + i;
    const Vec<R> old_max = load<R>(state.max + i);
    Vec<R> max = old_max;
    for (int64_t k = 0; k < chunk.count; ++k) max = max_of<R>(load<R>(column + k * logits.stride), max);
    const Vec<R> base = max == static_cast<R>(-kInfinity) ? Vec<R>{} : max;
    const Vec<R> scale = exp_of<R>(old_max - base);
    Vec<R> sum = load<R>(state.sum + i) * scale;
    for (int64_t k = 0; k < chunk.count; ++k) {
      const Vec<R> probability = exp_of<R>(load<R>(column + k * logits.stride) - base);
      sum += probability;
      store<R>(column + k * logits.stride, dropout.active ? probability * dropout.scales(chunk.keys[k], i) : probability);
    }
    store<R>(state.max + i, max);
    store<R>(state.sum + i, sum);
    store<R>(correction + i, scale);
  }
}

}  // namespace
}  // namespace dmattn::cpu
