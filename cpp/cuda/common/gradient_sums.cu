// The small kernels around attention backward: before it the terms of each query and the keys that no query sees, after it sums
// in fp32 to gradients.
//
// The sums of keys that no query sees are neither cleared nor read: with a bounded window most keys are such keys, and their
// sums would be most of the memory traffic.
#include "../calls.h"
#include "device.cuh"
#include "kernel_limits.cuh"
#include "logits.cuh"
#include "scheduler.cuh"
#include "visibility.cuh"

namespace dmattn::cuda {
namespace {

constexpr int kThreads = 256;

// The number of lanes that share a row of `width` elements, eight for each lane: a power of two.
__host__ __device__ inline int lanes_of(int64_t width) {
  int lanes = 1;
  while (lanes * 8 < width) lanes *= 2;
  return lanes;
}

// This thread's row and the part of it that is its own.
struct RowShare {
  int64_t row;
  int part;
  __device__ explicit RowShare(int lanes)
      : row((static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / lanes), part(static_cast<int>(threadIdx.x) % lanes) {}
};

// Eight sums, times `factor`, as 16 bytes of gradients. The sums are pairs, a pair every 4 floats.
template <class T>
__device__ __forceinline__ void store_8(T* to, const float* sums, float factor) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = *reinterpret_cast<const float2*>(sums + i * 4);
    pairs[i] = Element<T>::narrow_pair(x.x * factor, x.y * factor);
  }
  *reinterpret_cast<uint4*>(to) = {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// out, grad_out [B, H, Sq, Dv], query [B, H, Sq, D], lse, lse_rest, grad_lse [B, H, Sq] -> lse2, delta, lse, lse_rest2
// [B, H, padded_queries], row_flags, and query_sums, where they are given, cleared. Some lanes share a row.
template <class T>
__global__ __launch_bounds__(kThreads) void row_terms_kernel(const __grid_constant__ BackwardCall call) {
  const AttentionParams& p = call.b.forward;
  const int lanes = lanes_of(p.value_dim);
  const RowShare share(lanes);
  const bool inside = share.row < p.batch * p.heads * call.padded_queries;
  if (call.query_sums && inside) {
    const int width = static_cast<int>(sum_width(p.head_dim));
    float* const to = call.query_sums + share.row * width;
    for (int i = share.part * 4; i < width; i += lanes * 4) *reinterpret_cast<float4*>(to + i) = {0.0f, 0.0f, 0.0f, 0.0f};
  }
  const int64_t query = share.row % call.padded_queries, batch_head = share.row / call.padded_queries;
  const int64_t head = batch_head % p.heads, batch = batch_head / p.heads;
  const bool is_query = inside && query < p.query_length;
  const int64_t dense_row = batch_head * p.query_length + query;
  const float lse = is_query ? static_cast<const float*>(p.lse)[dense_row] : negative_infinity();
  const bool is_empty = lse == negative_infinity();
  float sum = 0.0f;
  if (is_query && share.part * 8 < p.value_dim) {
    const auto at = [&](const TensorView& tensor) {
      const T* data = static_cast<const T*>(tensor.data) + batch * tensor.batch_stride + head * tensor.head_stride +
                      query * tensor.row_stride;
      return *reinterpret_cast<const uint4*>(data + share.part * 8);
    };
    const uint4 a = at(p.out), b = at(call.b.grad_out);
    const uint32_t *pairs_a = &a.x, *pairs_b = &b.x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = Element<T>::widen_pair(pairs_a[i]), y = Element<T>::widen_pair(pairs_b[i]);
      sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
    }
  }
  if (is_query && is_empty) {  // the sum is NaN, too, when the query is not finite
    const T* const row = static_cast<const T*>(p.query.data) + batch * p.query.batch_stride + head * p.query.head_stride +
                         query * p.query.row_stride;
    for (int i = share.part * 8; i < p.head_dim; i += lanes * 8) {
      for (int j = i; j < i + 8; ++j) sum = fmaf(Element<T>::widen(row[j]), 0.0f, sum);
    }
  }
  for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (!inside || share.part != 0) return;
  const float grad_lse = call.b.grad_lse && is_query ? static_cast<const float*>(call.b.grad_lse)[dense_row] : 0.0f;
  const float lse2 = is_empty ? -negative_infinity() : lse * kLog2e;
  call.lse2[share.row] = lse2;
  call.lse[share.row] = is_empty ? -negative_infinity() : lse;
  call.lse_rest2[share.row] = !is_empty && p.lse_rest ? static_cast<const float*>(p.lse_rest)[dense_row] * kLog2e : 0.0f;
  // A row that sees nothing has zeros in out, so its sum is 0. Or it is NaN, which says that its query or grad_out is not finite
  // and must not be multiplied.
  call.delta[share.row] = is_empty ? sum : sum - grad_lse;
  if (call.row_hash) {
    const Dropout dropout(p, static_cast<int>(batch), static_cast<int>(head));
    call.row_hash[share.row] = dropout_row_hash(dropout.row_key(static_cast<int>(query)));
  }
  const int flags = (!is_empty && fabsf(lse2) > kHugeExponent ? kHugeRows : 0) | (is_empty && sum != sum ? kBadRows : 0);
  if (flags) atomicOr(call.row_flags, flags);
}

// Does any query head of the kv head's group see the key?
__device__ __forceinline__ bool is_live_key(const AttentionParams& p, int batch, int kv_head, int key) {
  const int group = static_cast<int>(p.heads) / static_cast<int>(p.kv_heads);
  const int low = static_cast<int>(p.key_length - p.query_length), high = static_cast<int>(p.key_length) - 1;
  for (int h = 0; h < group; ++h) {
    const SpanSource spans(p.mask, static_cast<int>(p.key_length), batch, kv_head * group + h);
    if (spans.of_key(key).touches(low, high)) return true;
    const auto is_shared = [&](const PerHead& row) { return !row.data || row.head_divisor >= group; };
    if (is_shared(p.mask.start) && is_shared(p.mask.end)) break;
  }
  return false;
}

// This thread's keys: kEach of them, kStride apart, because with one each, starting the blocks would take longer than their work.
// Only a few lanes share a key, because each of them has to find out whether the key is live.
struct KeyShare {
  static constexpr int kLanes = 8, kEach = 4, kStride = kThreads / kLanes, kKeys = kStride * kEach;  // of a block
  int batch, head, lane, count;  // count: how many of the keys there are
  int key;                       // the first
  int64_t row;                   // of it
  __device__ explicit KeyShare(const AttentionParams& p) : lane(static_cast<int>(threadIdx.x) % kLanes) {
    const uint32_t heads = static_cast<uint32_t>(p.kv_heads), blocks = (static_cast<uint32_t>(p.key_length) + kKeys - 1) / kKeys;
    const uint32_t pair = blockIdx.x / blocks;
    batch = static_cast<int>(pair / heads), head = static_cast<int>(pair % heads);
    key = static_cast<int>(blockIdx.x % blocks * kKeys + threadIdx.x / kLanes);
    row = static_cast<int64_t>(pair) * p.key_length + key;
    count = min(kEach, (static_cast<int>(p.key_length) - key + kStride - 1) / kStride);
  }
  // Are the keys live? A bit for each.
  __device__ uint32_t live(const AttentionParams& p) const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i < count && is_live_key(p, batch, head, key + i * kStride)) bits |= 1u << i;
    }
    return bits;
  }
};

// -> rows of key_sums [B, Hkv, Sk] + [1] of live keys and the spare row: zeros.
__global__ __launch_bounds__(kThreads) void clear_key_sums_kernel(const __grid_constant__ BackwardCall call) {
  const AttentionParams& p = call.b.forward;
  const KeyShare share(p);
  const int width = static_cast<int>(key_sum_width(call.b.forward));
  const auto clear = [&](int64_t row, int lane, int lanes) {
    float* const sums = call.key_sums + row * width;
    for (int i = lane * 4; i < width; i += lanes * 4) *reinterpret_cast<float4*>(sums + i) = {0.0f, 0.0f, 0.0f, 0.0f};
  };
  if (blockIdx.x == 0) clear(p.batch * p.kv_heads * p.key_length, threadIdx.x, kThreads);  // for rows that do not exist
  const uint32_t live = share.live(p);
#pragma unroll
  for (int i = 0; i < share.kEach; ++i) {
    if (live >> i & 1) clear(share.row + i * share.kStride, share.lane, share.kLanes);
  }
}

// key_sums -> grad_key [B, Hkv, Sk, D], grad_value [B, Hkv, Sk, Dv], zeros for keys that no query sees; without key_sums only
// those.
template <class T>
__global__ __launch_bounds__(kThreads) void store_key_sums_kernel(const __grid_constant__ BackwardCall call) {
  const AttentionParams& p = call.b.forward;
  const KeyShare share(p);
  const uint32_t live = share.live(p);
#pragma unroll
  for (int i = 0; i < share.kEach; ++i) {
    const bool is_live = live >> i & 1;
    if (i >= share.count || (is_live && !call.key_sums)) continue;
    const float* const sums = call.key_sums + (share.row + i * share.kStride) * key_sum_width(call.b.forward);
    const auto store = [&](const TensorView& tensor, int dim, const float* from, float factor) {
      T* const to = static_cast<T*>(tensor.data) + share.batch * tensor.batch_stride + share.head * tensor.head_stride +
                    (share.key + i * share.kStride) * tensor.row_stride;
      for (int part = share.lane; part * 8 < dim; part += share.kLanes) {
        if (is_live) {
          store_8(to + part * 8, from + sum_place(part * 8), factor);
        } else {
          *reinterpret_cast<uint4*>(to + part * 8) = {0, 0, 0, 0};
        }
      }
    };
    store(call.b.grad_key, static_cast<int>(p.head_dim), sums, call.scale);
    store(call.b.grad_value, static_cast<int>(p.value_dim), sums + sum_width(p.head_dim), call.keep_scale);
  }
}

// query_sums -> grad_query [B, H, Sq, D].
template <class T>
__global__ __launch_bounds__(kThreads) void store_query_sums_kernel(const __grid_constant__ BackwardCall call) {
  const AttentionParams& p = call.b.forward;
  const int lanes = lanes_of(p.head_dim);
  const RowShare share(lanes);
  // Neighbours in a warp take rows 8 apart, because those share their 32 bytes of a tile of sums.
  const int64_t dense_row = share.row / 16 * 16 + share.row % 2 * 8 + share.row % 16 / 2;
  if (dense_row >= p.batch * p.heads * p.query_length || share.part * 8 >= p.head_dim) return;
  const int64_t query = dense_row % p.query_length, head = dense_row / p.query_length % p.heads,
                batch = dense_row / p.query_length / p.heads;
  const TensorView& tensor = call.b.grad_query;
  T* const to =
      static_cast<T*>(tensor.data) + batch * tensor.batch_stride + head * tensor.head_stride + query * tensor.row_stride;
  const int width = static_cast<int>(sum_width(p.head_dim));
  const int64_t row = (batch * p.heads + head) * call.padded_queries + query;
  if (call.lse2[row] == -negative_infinity()) {  // sees nothing: NaN of keys that other rows see must not reach it
    *reinterpret_cast<uint4*>(to + share.part * 8) = {0, 0, 0, 0};
  } else if (call.query_sums_in_tiles) {
    const float* const tiles = call.query_sums + row / 64 * 64 * width;
    store_8(to + share.part * 8, tiles + share.part * kSumTile + tile_place(static_cast<int>(row % 64), 0), call.scale);
  } else {
    store_8(to + share.part * 8, call.query_sums + dense_row * width + sum_place(share.part * 8), call.scale);
  }
}

constexpr int kSeenKeys = 128, kSeenWords = kSeenKeys / 32;

// A block mask's columns, tiles and bits, intervals, causality -> seen [B, H / heads_at_once, seen_words]: which keys does some
// query of these heads see? A block for each kSeenKeys keys of heads_at_once heads.
__global__ __launch_bounds__(kSeenKeys) void find_seen_kernel(const __grid_constant__ BackwardCall call) {
  __shared__ uint32_t seen[kSeenWords];
  __shared__ Span spans[kSeenKeys];
  const AttentionParams& p = call.b.forward;
  const MaskParams& mask = p.mask;
  const int blocks = call.seen_words / kSeenWords, pair = static_cast<int>(blockIdx.x / blocks);
  const int pairs = static_cast<int>(p.heads) / call.heads_at_once, batch = pair / pairs;
  const int first_head = pair % pairs * call.heads_at_once, first_key = blockIdx.x % blocks * kSeenKeys;
  const int tile_q = static_cast<int>(mask.tile_q), tiles_q = static_cast<int>(mask.tiles_q);
  const int words = static_cast<int>(mask.tile_k) / 32;
  const int column = mask.tiles.data ? first_key / static_cast<int>(mask.tile_k) : 0;
  const int shift = static_cast<int>(p.key_length - p.query_length), thread = threadIdx.x;
  const auto first_bits = [](int count) { return count >= 32 ? 0xffffffffu : count > 0 ? (1u << count) - 1 : 0u; };
  // Keys beyond the end count as seen, so that the last tile of keys has no gaps.
  if (thread < kSeenWords) seen[thread] = ~first_bits(static_cast<int>(p.key_length) - first_key - thread * 32);
  __syncthreads();
  bool is_done = false;
  for (int head = first_head; head < first_head + call.heads_at_once && !is_done; ++head) {
    const SpanSource span_source(mask, static_cast<int>(p.key_length), batch, head);
    const bool has_intervals = span_source.has_intervals();
    const Span span = span_source.of_key(first_key + thread);
    spans[thread] = span;
    __syncthreads();
    // Of this warp's keys those that some query in [first, last] sees by their spans alone.
    const auto touched_by = [&](int first, int last) {
      const uint32_t of_warp = __ballot_sync(0xffffffffu, span.touches(first + shift, last + shift));
      if (thread % 32 == 0 && of_warp) atomicOr(&seen[thread / 32], of_warp);
    };
    if (!mask.tiles.data) {
      touched_by(0, static_cast<int>(p.query_length) - 1);
      __syncthreads();
      continue;
    }
    const TileSource source(mask, batch, head);
    const int32_t* const list = source.columns + static_cast<int64_t>(column) * (tiles_q + 1);
    const int entries = min(list[0], tiles_q);
    for (int entry = 1; entry <= entries && !is_done; ++entry) {
      const int row = list[entry];
      const int state = row >= 0 && row < tiles_q ? source.tiles[row * mask.tiles_k + column] : kTileEmpty;
      if (!is_live_tile(mask, state)) continue;
      const uint32_t* const bits = bits_of_tile(mask, state);
      const int rows = min(tile_q, static_cast<int>(p.query_length) - row * tile_q);
      if (has_intervals && !bits) touched_by(row * tile_q, row * tile_q + rows - 1);
      uint32_t mine[kSeenWords] = {};
      for (int r = has_intervals && !bits ? rows : thread; r < rows; r += kSeenKeys) {
        const uint32_t* const of_row = bits ? bits + r * words + first_key / 32 % words : nullptr;
        // So many of these keys, by causality.
        const int visible = mask.is_causal ? row * tile_q + r + shift + 1 - first_key : kSeenKeys;
#pragma unroll
        for (int w = 0; w < kSeenWords; ++w) {
          const uint32_t word = (of_row ? of_row[w] : 0xffffffffu) & first_bits(visible - w * 32);
          mine[w] |= has_intervals ? bits_seen_at(word & ~mine[w], &spans[w * 32], row * tile_q + r + shift) : word;
        }
      }
#pragma unroll
      for (int w = 0; w < kSeenWords; ++w) {
        const uint32_t of_warp = __reduce_or_sync(0xffffffffu, mine[w]);
        if (thread % 32 == 0 && of_warp) atomicOr(&seen[w], of_warp);
      }
      __syncthreads();
      is_done = (seen[0] & seen[1] & seen[2] & seen[3]) == 0xffffffffu;
      __syncthreads();
    }
  }
  if (thread < kSeenWords) call.seen[pair * call.seen_words + first_key / 32 + thread] = seen[thread];
}

template <class Kernel>
cudaError_t launch_rows(Kernel kernel, const BackwardCall& call, int64_t rows, int lanes, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  const int64_t rows_per_block = kThreads / lanes;
  kernel<<<grid_of((rows + rows_per_block - 1) / rows_per_block), kThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

template <class Kernel>
cudaError_t launch_keys(Kernel kernel, const BackwardCall& call, cudaStream_t stream) {
  const AttentionParams& p = call.b.forward;
  const int64_t blocks = (p.key_length + KeyShare::kKeys - 1) / KeyShare::kKeys * p.batch * p.kv_heads;
  if (blocks == 0) return cudaSuccess;
  kernel<<<grid_of(blocks), kThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

bool is_bfloat16(const BackwardCall& call) { return call.b.forward.dtype == DType::kBFloat16; }

}  // namespace

cudaError_t launch_row_terms(const BackwardCall& call, cudaStream_t stream) {
  const AttentionParams& p = call.b.forward;
  return launch_rows(is_bfloat16(call) ? row_terms_kernel<__nv_bfloat16> : row_terms_kernel<__half>, call,
                     p.batch * p.heads * call.padded_queries, lanes_of(p.value_dim), stream);
}

cudaError_t launch_find_seen(const BackwardCall& call, cudaStream_t stream) {
  const AttentionParams& p = call.b.forward;
  const int64_t blocks = p.batch * p.heads / call.heads_at_once * (call.seen_words / kSeenWords);
  if (blocks == 0) return cudaSuccess;
  find_seen_kernel<<<grid_of(blocks), kSeenKeys, 0, stream>>>(call);
  return cudaGetLastError();
}

cudaError_t launch_clear_key_sums(const BackwardCall& call, cudaStream_t stream) {
  return launch_keys(clear_key_sums_kernel, call, stream);
}

cudaError_t launch_store_key_sums(const BackwardCall& call, cudaStream_t stream) {
  return launch_keys(is_bfloat16(call) ? store_key_sums_kernel<__nv_bfloat16> : store_key_sums_kernel<__half>, call, stream);
}

cudaError_t launch_store_query_sums(const BackwardCall& call, cudaStream_t stream) {
  const AttentionParams& p = call.b.forward;
  return launch_rows(is_bfloat16(call) ? store_query_sums_kernel<__nv_bfloat16> : store_query_sums_kernel<__half>, call,
                     (p.batch * p.heads * p.query_length + 15) / 16 * 16, lanes_of(p.head_dim), stream);
}

}  // namespace dmattn::cuda
