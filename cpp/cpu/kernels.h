// What one instruction set offers: kernels.cpp is compiled once per set and exports one such table; levels.h picks one at run time.
//
// Tasks are independent. `scratch` is the caller's, `scratch_bytes` long, aligned to 64, uninitialised, and used by one task at a time.
#pragma once

#include <cstddef>

#include "../params.h"

namespace dmattn::cpu {

struct Kernels {
  const char* name;

  // One task = one (batch, head, query tile): writes that tile of out and lse.
  int64_t (*forward_tasks)(const AttentionParams&);
  size_t (*forward_scratch)(const AttentionParams&);
  void (*forward)(const AttentionParams&, int64_t task, void* scratch);

  // One task = the gradients of one (batch, kv head), or a part of one; see backward.h for how parts are added up in a fixed order.
  // `shared` is zeroed memory all tasks of a call see; it holds the sums of parts.
  int64_t (*backward_tasks)(const BackwardParams&, int64_t workers);
  size_t (*backward_scratch)(const BackwardParams&, int64_t workers);
  size_t (*backward_shared)(const BackwardParams&, int64_t workers);
  void (*backward)(const BackwardParams&, int64_t workers, int64_t task, void* scratch, void* shared);
  // Second phase, after every task of the first: one task writes some of grad_key, grad_value, grad_key_bias and grad_bias from `shared`.
  int64_t (*backward_finish_tasks)(const BackwardParams&, int64_t workers);
  void (*backward_finish)(const BackwardParams&, int64_t workers, int64_t task, void* scratch, void* shared);
};

}  // namespace dmattn::cpu
