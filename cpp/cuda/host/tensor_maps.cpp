// What the driver demands of a tensor map, checked before it is asked.
#include "tensor_maps.h"

namespace dmattn::cuda {

bool is_encodable(const TensorMapShape& shape) {
  constexpr int64_t kMostSize = int64_t{1} << 32, kEndOfStrides = int64_t{1} << 40;
  constexpr int kMostBox = 256;
  if (reinterpret_cast<uintptr_t>(shape.data) % 16 != 0) return false;
  for (int i = 0; i < shape.rank; ++i) {
    if (shape.sizes[i] < 1 || shape.sizes[i] > kMostSize || shape.box[i] < 1 || shape.box[i] > kMostBox) return false;
    if (i == 0 || shape.sizes[i] == 1) continue;
    const int64_t bytes = shape.strides[i] * 2;
    if (bytes % 16 != 0 || bytes < 0 || bytes >= kEndOfStrides) return false;
  }
  return true;
}

}  // namespace dmattn::cuda
