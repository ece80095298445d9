// The kernel instances of a family by name. A plan names one that this build has, so a miss is an error of the library.
#pragma once

#include <cstddef>

#include "../errors.h"
#include "host/instances.h"

namespace dmattn::cuda {

template <class Launch>
struct LaunchRow {
  Instance instance;
  Launch* launch;
};

template <class Launch, size_t kCount>
Launch* find_launch(const LaunchRow<Launch> (&table)[kCount], const Instance& instance) {
  for (const LaunchRow<Launch>& row : table) {
    if (row.instance == instance) return row.launch;
  }
  fail("internal error: the plan names the kernel ", name_of(instance), ", which this build does not have");
}

}  // namespace dmattn::cuda
