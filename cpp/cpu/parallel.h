// Runs independent tasks on torch's threads, handing out one at a time: causal tiles differ in cost, so equal shares would not.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace dmattn::cpu {

inline int64_t worker_count(int64_t tasks) {
  return std::max<int64_t>(1, std::min<int64_t>(tasks, torch::stable::get_num_threads()));
}

// Calls run(task, worker) for every task in [0, tasks); worker < worker_count(tasks) names a workspace no one else uses
// meanwhile.
template <class Run>
void for_each_task(int64_t tasks, const Run& run) {
  if (tasks <= 0) return;
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, worker_count(tasks), 1, [&](int64_t first, int64_t last) {
    for (int64_t worker = first; worker < last; ++worker) {
      for (int64_t task = next++; task < tasks; task = next++) run(task, worker);
    }
  });
}

}  // namespace dmattn::cpu
