// Tensors in, params out for key selection.
#pragma once

#include <algorithm>

#include "tensors.h"

namespace dmattn {

struct CheckedSelect {
  Tensor scores;
  std::optional<Tensor> segment_end;
  Tensor end;
  SelectParams params;
};

inline CheckedSelect check_select(const Tensor& scores, std::optional<Tensor> segment_end, int64_t window, bool is_causal,
                                  int64_t local, int64_t sink) {
  check(scores.dim() == 3, "scores: expected 3 dimensions [B, Hkv, Sk], got ", shape_text(scores));
  check(local >= 0, "local: expected a number of keys >= 0, got ", local);
  check(sink >= 0, "sink: expected a number of keys >= 0, got ", sink);
  check(is_causal || (local == 0 && sink == 0), "local, sink: expected 0 where selection is not causal, got ", local, " and ",
        sink);
  if (local == 0 && sink == 0) {
    check(window > 0, "window: expected a positive number of keys, got ", window);
  } else {
    check(window >= 0, "window: expected a number of keys >= 0, got ", window);
  }
  check(scores.size(2) <= kMaxLength, "scores: expected a length up to ", kMaxLength, ", got ", scores.size(2));
  check_extent("scores", scores);
  CheckedSelect checked{with_dense_rows(scores), std::move(segment_end), Tensor(), {}};
  SelectParams& p = checked.params;
  p.batch = scores.size(0), p.heads = scores.size(1), p.length = scores.size(2), p.window = window;
  p.dtype = to_dtype("scores", scores.scalar_type());
  p.is_causal = is_causal;
  p.local = static_cast<int32_t>(std::min(local, p.length)), p.sink = static_cast<int32_t>(std::min(sink, p.length));
  p.scores = view_of(checked.scores);
  if (checked.segment_end) {
    check_dtype("segment_end", *checked.segment_end, ScalarType::Int);
    p.segment_end =
        to_per_head("segment_end", *checked.segment_end, scores, p.batch, p.heads, p.heads, {p.length}, "[B|1, Hkv|1, Sk]");
  }
  checked.end = empty_on(scores, {p.batch, p.heads, p.length}, ScalarType::Int);
  p.end = static_cast<int32_t*>(checked.end.data_ptr());
  return checked;
}

namespace cpu {
Tensor select_op(const Tensor& scores, std::optional<Tensor> segment_end, int64_t window, bool is_causal, int64_t local,
                 int64_t sink);
}
namespace cuda {
Tensor select_op(const Tensor& scores, std::optional<Tensor> segment_end, int64_t window, bool is_causal, int64_t local,
                 int64_t sink);
}

}  // namespace dmattn
