// Decoding for those who have checked its arguments.
#pragma once

#include "../params.h"

namespace dmattn::cpu {

void run_decode(const DecodeParams& p);

}  // namespace dmattn::cpu
