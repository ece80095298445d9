// What one token does to the slots of a key head, and how that is taken back: the same steps on the CPU and on a GPU. No torch.
//
// A device says how it copies a row and how it finds the worst selected key; everything here is decided alike by all threads.
#pragma once

#include <limits>

#include "params.h"

namespace dmattn {

// Rows of a step are named by slot; this is the new token's row, and this the row of an empty slot.
inline constexpr int32_t kNewRow = -2;
inline constexpr int32_t kEmptyRow = -3;

DMATTN_HOST_DEVICE static inline int32_t ring_slot(const CacheParams& p, int32_t position) {
  return p.sink + (position - p.sink) % p.local;
}
DMATTN_HOST_DEVICE static inline int32_t first_selected_slot(const CacheParams& p) { return p.sink + p.local; }
DMATTN_HOST_DEVICE static inline int32_t first_log_slot(const CacheParams& p) { return p.sink + p.local + p.window; }

// A key among those that compete, by the order in which they lose: lower scores first, then earlier keys, then lower slots. An
// empty slot has a score of -inf, so it is worse than every key that was selected, and the first empty slot is the worst.
template <class Score>
struct Competitor {
  Score score;
  int32_t position, slot;
  DMATTN_HOST_DEVICE bool is_worse_than(const Competitor& other) const {
    if (score != other.score) return score < other.score;
    return position != other.position ? position < other.position : slot < other.slot;
  }
};

// Takes token number `step` in. Slots is what a device offers:
//   is_empty(slot), score_of(row)    row: a slot or kNewRow
//   worst()                          the worst Competitor in the slots of selected keys; only with a window
//   copy(row, slot)                  key, value, score and position; row: a slot, kNewRow or kEmptyRow
//   entered_of(row of the log), set_entered(row of the log, slot)
template <class Score, class Slots>
DMATTN_HOST_DEVICE void take_token(const CacheParams& p, int32_t step, Slots& slots) {
  int32_t died = kEmptyRow, entered = kNoSlot;
  const int32_t log = p.rewind > 0 ? step % p.rewind : 0;
  const auto write_log = [&](int32_t row) {
    if (p.rewind > 0) slots.copy(row, first_log_slot(p) + log);
  };
  if (step < p.sink) {
    write_log(died);
    slots.copy(kNewRow, step);
  } else {
    // The key that leaves the local window competes; without a local window the new key does at once.
    const int32_t ring = p.local > 0 ? ring_slot(p, step) : 0;
    const int32_t competitor = p.local == 0 ? kNewRow : ring;
    if (p.local == 0 || !slots.is_empty(ring)) {
      const Score score = slots.score_of(competitor);
      bool wins = false;
      if (p.window > 0) {
        const Competitor<Score> worst = slots.worst();
        // Among equal scores the later key wins. NaN and -inf never do.
        wins = score >= worst.score && score > -std::numeric_limits<Score>::infinity();
        if (wins) entered = worst.slot, died = worst.position == kNoPosition ? kEmptyRow : worst.slot;
      }
      if (!wins) died = competitor;
    }
    write_log(died);
    if (entered != kNoSlot) slots.copy(competitor, entered);
    if (p.local > 0) slots.copy(kNewRow, ring);
  }
  if (p.rewind > 0) slots.set_entered(log, entered);
}

// Takes token number `step`, the last one, back.
template <class Slots>
DMATTN_HOST_DEVICE void take_back(const CacheParams& p, int32_t step, Slots& slots) {
  const int32_t row = step % p.rewind, log = first_log_slot(p) + row, entered = slots.entered_of(row);
  const bool has_entered = entered >= first_selected_slot(p) && entered < first_log_slot(p);
  if (step < p.sink) {
    slots.copy(kEmptyRow, step);
  } else {
    if (p.local > 0) slots.copy(has_entered ? entered : log, ring_slot(p, step));
    if (has_entered) slots.copy(log, entered);
  }
  slots.copy(kEmptyRow, log);
  slots.set_entered(row, kNoSlot);
}

}  // namespace dmattn
