// The kernels of one instruction set as a table. kernels.cpp is compiled once for each set and exports one such table; levels.h
// picks one at run time.
//
// An op runs in phases. The tasks of a phase are independent, and a phase starts when the one before has ended. What a task
// computes depends on its number alone, so results do not depend on the order in which tasks run.
#pragma once

#include <cstddef>

#include "../params.h"

namespace dmattn::cpu {

inline constexpr int kMaxPhases = 5;

struct PhaseSizes {
  int64_t tasks[kMaxPhases];  // of each phase
  size_t scratch_bytes;       // a worker's, aligned to 64, uninitialised, used by one task at a time
  size_t shared_bytes;        // of the call, aligned to 64, uninitialised: how phases hand on results
};

// A backward call, with what only the CPU kernels have to know.
struct BackwardCall {
  BackwardParams params;
  int64_t workers;           // splits the work into parts when there are fewer heads than workers
  int64_t key_bias_batches;  // sizes of dimension 0 of grad_key_bias and grad_bias: B or 1
  int64_t bias_batches;
};

// Queries [first, first + rows) of one group's indexer; `position` is that of query `first`, `length` its sequence's number of
// keys.
struct IndexTile {
  int64_t batch, group, first, rows, position, length;
};

struct Kernels {
  const char* name;
  PhaseSizes (*forward_sizes)(const AttentionParams&);
  void (*forward)(const AttentionParams&, int phase, int64_t task, void* scratch, void* shared);
  PhaseSizes (*backward_sizes)(const BackwardCall&);
  void (*backward)(const BackwardCall&, int phase, int64_t task, void* scratch, void* shared);
  PhaseSizes (*decode_sizes)(const DecodeParams&);
  void (*decode)(const DecodeParams&, int phase, int64_t task, void* scratch, void* shared);
  size_t (*index_scratch_bytes)(const IndexTopKParams&);
  int64_t (*index_scores)(const IndexTopKParams&, const IndexTile&, void* scratch, void* out, int64_t stride);
  size_t (*index_loss_scratch_bytes)(const IndexLossParams&);
  void (*index_loss)(const IndexLossParams&, int64_t task, void* scratch);  // a task is a query of a group
};

}  // namespace dmattn::cpu
