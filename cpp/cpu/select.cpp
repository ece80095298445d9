// Key selection on the CPU: scores to the end of each key's lifetime.
//
// Causal: one pass over the keys with a heap of the `window` best so far. Whatever falls out at step i is visible to no query
// from i on, and it never comes back, so its end is i: O(N log window). A key competes when it has left the local window, `local`
// steps late, so its end is `local` later, too. Not causal: one set of keys for all queries of a document.
#include <algorithm>
#include <limits>
#include <vector>

#include "../select_arguments.h"
#include "parallel.h"

namespace dmattn::cpu {
namespace {

constexpr int32_t kForever = std::numeric_limits<int32_t>::max();
constexpr int32_t kNever = std::numeric_limits<int32_t>::min();

template <class Score>
struct Candidate {
  Score score;
  int32_t index;
  // The order of preference: higher scores first, then later keys. A heap under it has its worst candidate on top.
  bool operator<(const Candidate& other) const { return score != other.score ? score > other.score : index > other.index; }
};

float widen(float x) { return x; }
double widen(double x) { return x; }
float widen(torch::headeronly::BFloat16 x) { return static_cast<float>(x); }
float widen(torch::headeronly::Half x) { return static_cast<float>(x); }

template <class Score>
bool is_selectable(Score score) {
  return score > -std::numeric_limits<Score>::infinity();  // false for NaN as well
}

// The end of the segment that key `index` lies in; a key whose segment ends at or before it is hidden.
int32_t segment_end_of(const int32_t* segment_end, int64_t index, int64_t length) {
  return segment_end ? static_cast<int32_t>(std::clamp<int64_t>(segment_end[index], 0, length)) : kForever;
}

template <class Stored, class Score>
void select_causal(const SelectParams& p, const Stored* scores, const int32_t* segment_end, size_t window, int32_t* end,
                   std::vector<Candidate<Score>>& heap) {
  heap.clear();
  int32_t current = kNever, first = 0;  // the segment's end and its first key
  for (int64_t i = 0; i < p.length; ++i) {
    const int32_t index = static_cast<int32_t>(i), segment = segment_end_of(segment_end, i, p.length);
    const Score score = widen(scores[i]);
    end[i] = index;
    if (segment <= index) continue;
    if (segment != current) {
      heap.clear();
      current = segment, first = index;
    }
    if (index - first < p.sink) {
      end[i] = segment;
      continue;
    }
    // The end of a key that this one beats, or its own if it never wins: neither sum exceeds twice the longest length.
    const int32_t beaten = std::min(index + p.local, segment);
    end[i] = beaten;
    if (!is_selectable(score) || window == 0) continue;
    const Candidate<Score> candidate{score, index};
    if (heap.size() == window) {
      if (!(candidate < heap.front())) continue;
      std::pop_heap(heap.begin(), heap.end());
      end[heap.back().index] = beaten;
      heap.back() = candidate;
    } else {
      heap.push_back(candidate);
    }
    std::push_heap(heap.begin(), heap.end());
    end[i] = segment;
  }
}

template <class Stored, class Score>
void select_for_all(const SelectParams& p, const Stored* scores, const int32_t* segment_end, size_t window, int32_t* end,
                    std::vector<Candidate<Score>>& candidates) {
  const int64_t length = p.length;
  for (int64_t first = 0; first < length;) {
    const int32_t segment = segment_end_of(segment_end, first, length);
    const int64_t last = segment_end && segment <= first ? first + 1 : std::min<int64_t>(segment, length);
    candidates.clear();
    for (int64_t i = first; i < last; ++i) {
      const bool hidden = segment_end && (segment_end_of(segment_end, i, length) <= i);
      const Score score = widen(scores[i]);
      if (!hidden && is_selectable(score)) candidates.push_back({score, static_cast<int32_t>(i)});
      end[i] = kNever;
    }
    if (candidates.size() > window) {
      std::nth_element(candidates.begin(), candidates.begin() + static_cast<int64_t>(window), candidates.end());
      candidates.resize(window);
    }
    for (const auto& chosen : candidates) end[chosen.index] = segment;
    first = last;
  }
}

template <class Stored>
void select(const SelectParams& p) {
  using Score = decltype(widen(Stored()));
  const size_t window = static_cast<size_t>(std::min(p.window, p.length));
  for_each_task(p.batch * p.heads, [&](int64_t task, int64_t) {
    const int64_t batch = task / p.heads, head = task % p.heads;
    const auto* scores = static_cast<const Stored*>(p.scores.data) + batch * p.scores.batch_stride + head * p.scores.head_stride;
    const int32_t* segment_end = p.segment_end.data ? p.segment_end.at<const int32_t>(batch, head) : nullptr;
    int32_t* end = p.end + task * p.length;
    std::vector<Candidate<Score>> scratch;
    (p.is_causal ? select_causal<Stored, Score> : select_for_all<Stored, Score>)(p, scores, segment_end, window, end, scratch);
  });
}

}  // namespace

Tensor select_op(const Tensor& scores, std::optional<Tensor> segment_end, int64_t window, bool is_causal, int64_t local,
                 int64_t sink) {
  const CheckedSelect checked = check_select(scores, std::move(segment_end), window, is_causal, local, sink);
  if (checked.params.length == 0) return checked.end;
  switch (checked.params.dtype) {
    case DType::kFloat64: select<double>(checked.params); break;
    case DType::kFloat32: select<float>(checked.params); break;
    case DType::kBFloat16: select<torch::headeronly::BFloat16>(checked.params); break;
    case DType::kFloat16: select<torch::headeronly::Half>(checked.params); break;
  }
  return checked.end;
}

}  // namespace dmattn::cpu

DMATTN_KERNELS(CPU, m) { m.impl("select", TORCH_BOX(&dmattn::cpu::select_op)); }
