// The tensors of a call as the copy engine knows them. Dimensions are listed from the inside out.
#pragma once

#include <cuda.h>

namespace dmattn::cuda::sm90 {

struct ForwardMaps {
  CUtensorMap query;                       // D, heads of a tile, Sq, groups of heads, B
  CUtensorMap key;                         // D, Sk, Hkv, B
  CUtensorMap value;                       // Dv, Sk, Hkv, B
  CUtensorMap out;                         // as query: Dv, heads of a tile, Sq, groups of heads, B
  CUtensorMap compact_key, compact_value;  // D or Dv, capacity, Hkv, B
  CUtensorMap bias;                        // of Bias::kCopied: Sk, Sq, H|Hkv|1, B|1
};

struct BackwardMaps {
  CUtensorMap query;     // D, Sq, H, B
  CUtensorMap grad_out;  // Dv, Sq, H, B
  CUtensorMap key;       // D, Sk, Hkv, B
  CUtensorMap value;     // Dv, Sk, Hkv, B
};

}  // namespace dmattn::cuda::sm90
