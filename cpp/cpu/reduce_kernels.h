// The reduction kernels of one instruction set. reduce_kernels.cpp is compiled once for each set and exports one such table.
//
// Pass one reduces chunks, pass two the results of the chunks of each sequence. The tasks of a pass are independent.
#pragma once

#include "../reduce_params.h"

namespace dmattn::cpu {

struct ReduceKernels {
  int64_t (*tasks)(const ReduceParams&, int pass);
  void (*run)(const ReduceParams&, int pass, int64_t task);
};

}  // namespace dmattn::cpu
