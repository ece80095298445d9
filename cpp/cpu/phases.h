// Runs an op's phases one after the other, the tasks of each on all workers.
#pragma once

#include "kernels.h"
#include "parallel.h"
#include "scratch.h"

namespace dmattn::cpu {

// Calls run(phase, task, scratch, shared) for every task of the plan.
template <class Run>
void run_phases(const Plan& plan, const Run& run) {
  const int64_t most_tasks = *std::max_element(plan.tasks, plan.tasks + kMaxPhases);
  const Scratch scratch(worker_count(most_tasks), plan.scratch_bytes), shared(1, plan.shared_bytes);
  for (int phase = 0; phase < kMaxPhases; ++phase) {
    for_each_task(plan.tasks[phase], [&](int64_t task, int64_t worker) { run(phase, task, scratch.of(worker), shared.of(0)); });
  }
}

}  // namespace dmattn::cpu
