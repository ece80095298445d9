// Runs an op's phases one after the other, the tasks of each on all workers.
#pragma once

#include "kernels.h"
#include "parallel.h"
#include "scratch.h"

namespace dmattn::cpu {

// Calls run(phase, task, scratch, shared) for every task of every phase.
template <class Run>
void run_phases(const PhaseSizes& sizes, const Run& run) {
  const int64_t most_tasks = *std::max_element(sizes.tasks, sizes.tasks + kMaxPhases);
  const Scratch scratch(worker_count(most_tasks), sizes.scratch_bytes), shared(1, sizes.shared_bytes);
  for (int phase = 0; phase < kMaxPhases; ++phase) {
    for_each_task(sizes.tasks[phase], [&](int64_t task, int64_t worker) { run(phase, task, scratch.of(worker), shared.of(0)); });
  }
}

}  // namespace dmattn::cpu
