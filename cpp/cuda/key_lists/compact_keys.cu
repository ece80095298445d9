// Makes compact keys: live keys, their values and their key_bias, copied in the order of their list.
#include "../calls.h"
#include "../common/dependent_launch.cuh"
#include "../common/kernel_limits.cuh"
#include "../common/visibility.cuh"
#include "compact_keys.cuh"

namespace dmattn::cuda {
namespace {

constexpr int kCompactPlaces = 16, kCompactBlocks = 64, kCompactThreads = 256;

// key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv] -> compact key, value [B, Hkv, capacity, D or Dv]. kCompactBlocks blocks for each
// kv head copy kCompactPlaces rows at a time; they are few, because often no head has compact keys.
__global__ __launch_bounds__(kCompactThreads) void compact_keys_kernel(const __grid_constant__ ForwardCall call) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const AttentionParams& p = call.p;
  const LiveKeys& live_keys = call.live_keys;
  const int thread = static_cast<int>(threadIdx.x), kv_heads = static_cast<int>(p.kv_heads),
            kv_pair = static_cast<int>(blockIdx.x);
  const int batch = kv_pair / kv_heads, kv_head = kv_pair % kv_heads, head = kv_head * (static_cast<int>(p.heads) / kv_heads);
  const int64_t mask_head = live_keys.mask_head_of(batch, head);
  if (!is_compact(call, mask_head)) return;
  const int32_t* const list =
      live_keys.index + mask_head * live_keys.capacity + live_keys.lists[mask_head * live_keys.most_lists].x;
  const float* const bias = row_of<const float>(p.key_bias, batch, head);
  const int count = live_keys.count[mask_head];
  // 2^shift threads share a row: as many as it has pieces of 16 bytes, rounded up to a power of two.
  const int key_pieces = static_cast<int>(p.head_dim) / 8, value_pieces = static_cast<int>(p.value_dim) / 8;
  const int shift = 32 - __clz(max(key_pieces, value_pieces) - 1), piece = thread & ((1 << shift) - 1);
  const auto rows_of = [&](const TensorView& tensor) {
    return static_cast<const char*>(tensor.data) + (batch * tensor.batch_stride + kv_head * tensor.head_stride) * 2 + piece * 16;
  };
  const char *const keys = rows_of(p.key), *const values = rows_of(p.value);
  for (int first = static_cast<int>(blockIdx.y) * kCompactPlaces; first < count; first += kCompactBlocks * kCompactPlaces) {
    for (int at = first + (thread >> shift); at < min(first + kCompactPlaces, count); at += kCompactThreads >> shift) {
      const int key = list[at];
      const int64_t to = kv_pair * call.compact.capacity + at;
      uint4 key_piece{}, value_piece{};
      if (piece < key_pieces) key_piece = *reinterpret_cast<const uint4*>(keys + key * p.key.row_stride * 2);
      if (piece < value_pieces) value_piece = *reinterpret_cast<const uint4*>(values + key * p.value.row_stride * 2);
      if (bias && piece == 0) call.compact.key_bias[to] = bias[key];
      if (piece < key_pieces) static_cast<uint4*>(call.compact.key)[to * key_pieces + piece] = key_piece;
      if (piece < value_pieces) static_cast<uint4*>(call.compact.value)[to * value_pieces + piece] = value_piece;
    }
  }
}

}  // namespace

cudaError_t launch_compact_keys(const ForwardCall& call, cudaStream_t stream) {
  const dim3 grid(grid_of(call.p.batch * call.p.kv_heads), kCompactBlocks);
  return launch_dependent(compact_keys_kernel, grid, kCompactThreads, 0, stream, call);
}

}  // namespace dmattn::cuda
