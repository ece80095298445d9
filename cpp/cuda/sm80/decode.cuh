// Decoding for sm80 and later: a block walks one split of a sequence's keys for all query heads that share a key head.
//
// Nothing here waits for a product: what counts is that enough bytes are on their way. So keys and values come through one ring
// of units by asynchronous copies, and warps divide the keys of a chunk, because there are too few queries to divide.
#pragma once

#include "../common/dependent_launch.cuh"
#include "../common/logits.cuh"
#include "../common/splits.cuh"
#include "tile.cuh"
#include "tiles.h"

namespace dmattn::cuda::sm80 {

inline constexpr int kPlaceKeys = 16;  // neighbouring keys that are surely in one page

template <int kDim, DecodeRows kRows>
struct alignas(128) DecodeShared {
  static constexpr DecodeShape kShape = kDecodeShape<kDim, kRows>;
  static constexpr int kSumWidth = kDim + 8;  // so that eight rows fall on different banks
  union {
    uint16_t units[kShape.units][kShape.keys * kDim];
    float sums[kShape.warps * 16][kSumWidth];  // at the end: of each slice of the keys, each row
  };
  int2 places[kMostSplitKeys / kPlaceKeys];  // page, and row in it
  float key_bias[3][kShape.keys];            // of chunk c in c % 3
  float2 row_sums[kShape.warps * 16];        // maximum, sum of each slice and row
};

// One split of the keys of one (batch, kv head) for a tile of rows. A row is a query of a head of the group.
template <int kTileRows>
struct DecodeTile {
  int batch, kv_head, split, first_row, rows;  // `rows` of them exist
  int length, first_key, last_key;

  __device__ __forceinline__ explicit DecodeTile(const DecodeCall& call) {
    const DecodeParams& p = call.p;
    const uint32_t tiles = (static_cast<uint32_t>(call.rows) + kTileRows - 1) / kTileRows;
    const uint32_t kv_heads = static_cast<uint32_t>(p.kv_heads), splits = static_cast<uint32_t>(call.splits);
    uint32_t index = block_index();
    first_row = static_cast<int>(index % tiles) * kTileRows, index /= tiles;
    kv_head = static_cast<int>(index % kv_heads), index /= kv_heads;
    split = static_cast<int>(index % splits), batch = static_cast<int>(index / splits);
    rows = min(kTileRows, call.rows - first_row);
    length = length_of(p, batch);
    first_key = split * call.split_keys;
    last_key = min(first_key + call.split_keys, length);
  }
};

// Adds up what the slices of a block found, `softmax` and `out` of each warp, and writes it: a part, or the end result when there
// is one split. Nothing may be on its way into the ring.
template <class T, int kDim, DecodeRows kRows>
__device__ __forceinline__ void hand_on(const DecodeCall& call, const DecodeTile<16 * kDecodeShape<kDim, kRows>.row_warps>& here,
                                        DecodeShared<kDim, kRows>& shared, const OnlineSoftmax<1, true>& softmax,
                                        const float (&out)[kDim / 8][4], bool is_bad) {
  constexpr DecodeShape kShape = kDecodeShape<kDim, kRows>;
  constexpr int kThreads = kShape.warps * 32, kTileRows = 16 * kShape.row_warps, kSlices = kShape.warps / kShape.row_warps;
  const DecodeParams& p = call.p;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int slice = warp / kShape.row_warps, tile_row = warp % kShape.row_warps * 16;  // of this warp

  // Exchange maxima and sums among the slices.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = sum_over_quad(softmax.sum[0][r]);
    if (lane % 4 == 0) shared.row_sums[slice * kTileRows + tile_row + lane / 4 + 8 * r] = {softmax.maximum[0][r], sum};
  }
  __syncthreads();
  const auto maximum_of = [&](int row) {
    float maximum = negative_infinity();
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      const float2 found = shared.row_sums[s * kTileRows + row];
      if (found.y != 0.0f) maximum = fmaxf(maximum, found.x);
    }
    return maximum;
  };
  // Leave the values of each slice, relative to the largest maximum.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = tile_row + lane / 4 + 8 * r;
    if (row >= here.rows) continue;
    const float2 own = shared.row_sums[slice * kTileRows + row];
    const float factor = own.y == 0.0f ? 0.0f : rebase(own.x, maximum_of(row));
    float* const to = shared.sums[slice * kTileRows + row] + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      // A slice of which the row sees nothing may have a NaN.
      const float left = factor == 0.0f ? 0.0f : out[n][2 * r] * factor;
      const float right = factor == 0.0f ? 0.0f : out[n][2 * r + 1] * factor;
      *reinterpret_cast<float2*>(to + 8 * n) = {left, right};
    }
  }
  __syncthreads();

  // Add the slices up, and write what the rows' sums are.
  const auto sums_of = [&](int row) {
    float2 sums{maximum_of(row), 0.0f};
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      const float2 found = shared.row_sums[s * kTileRows + row];
      if (found.y != 0.0f) sums.y += found.y * rebase(found.x, sums.x);
    }
    return sums;
  };
  const int quads = static_cast<int>(p.value_dim) / 4;
  const int64_t first_row = (here.batch * p.kv_heads + here.kv_head) * call.rows + here.first_row;
  for (int at = thread; at < here.rows * quads; at += kThreads) {
    const int row = at / quads, column = at % quads * 4;
    float4 total{};
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      const float4 x = *reinterpret_cast<const float4*>(shared.sums[s * kTileRows + row] + column);
      total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
    }
    if (call.part_out) {
      *reinterpret_cast<float4*>(call.part_out + ((first_row + row) * call.splits + here.split) * p.value_dim + column) = total;
    } else {
      const RowPlace place(p, here.kv_head, here.first_row + row);
      const float2 sums = sums_of(row);
      store_out<T>(p, here.batch, place, column, total, end_factor(sums.x, sums.y, sink_of(p, place.head)));
    }
  }
  if (thread < here.rows) {
    const float2 sums = sums_of(thread);
    if (call.part_out) {
      call.part_sums[(first_row + thread) * call.splits + here.split] = is_bad ? float2{0.0f, -1.0f} : sums;
    } else {
      store_lse(p, here.batch, RowPlace(p, here.kv_head, here.first_row + thread), end_lse(sums.x, sums.y));
    }
  }
}

// query [B, H, T, D], key, value [B, Hkv, Smax, D or Dv] or pages -> part_sums, part_out, or out and lse when one split has all
// keys. Warps form a grid of `row_warps` rows by slices of the keys: a warp has 16 rows, and scores [16, keys of its slice].
template <class T, int kDim, DecodeRows kRows>
__global__ __launch_bounds__(kDecodeShape<kDim, kRows>.warps * 32, kDecodeShape<kDim, kRows>.blocks_per_sm) void decode_kernel(
    const __grid_constant__ DecodeCall call) {
  using Shared = DecodeShared<kDim, kRows>;
  constexpr DecodeShape kShape = kDecodeShape<kDim, kRows>;
  constexpr int kThreads = kShape.warps * 32, kTileRows = 16 * kShape.row_warps, kSlices = kShape.warps / kShape.row_warps;
  constexpr int kSliceKeys = kShape.keys / kSlices, kN = kSliceKeys / 8, kUnitBytes = kShape.keys * kDim * 2;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const DecodeParams& p = call.p;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int slice = warp / kShape.row_warps, tile_row = warp % kShape.row_warps * 16;  // of this warp
  const uint32_t ring = shared_address(shared.units);
  wait_for_kernel_before();
  let_kernel_after_come();

  const DecodeTile<kTileRows> here(call);
  if (here.first_key >= here.last_key && call.part_out) return;
  const int group = static_cast<int>(p.heads / p.kv_heads);
  const bool is_paged = p.page_table, has_bias = p.key_bias.data, bias_is_shared = p.key_bias.head_divisor % group == 0;
  int chunks = (here.last_key - here.first_key + kShape.keys - 1) / kShape.keys;

  // Look up the pages. Where a number is out of range, nothing is read.
  bool is_bad = false;
  if (is_paged) {
    for (int at = thread; at < chunks * (kShape.keys / kPlaceKeys); at += kThreads) {
      const int key = here.first_key + at * kPlaceKeys, entry = key / static_cast<int>(p.page_size);
      const int page = key < here.last_key ? p.page_table[here.batch * p.table_stride + entry] : 0;
      is_bad |= page < 0 || page >= p.pages;
      shared.places[at] = {page, key - entry * static_cast<int>(p.page_size)};
    }
    is_bad = __syncthreads_or(is_bad);
    if (is_bad) chunks = 0;
  }

  // Copies a chunk's keys or values into their unit of the ring.
  const auto start_unit = [&](int chunk, bool is_value) {
    if (chunk < chunks) {
      const TensorView& rows = is_value ? p.value : p.key;
      const RowCopy<kDim, kThreads> copy(static_cast<int>(is_value ? p.value_dim : p.head_dim), thread);
      const uint32_t to = ring + (2 * chunk + is_value) % kShape.units * kUnitBytes;
      const char* const from = rows_of_head(rows, is_paged ? 0 : here.batch, here.kv_head);
      const int first = here.first_key + chunk * kShape.keys;
#pragma unroll
      for (int r = 0; r < kShape.keys; r += kPlaceKeys) {
        int64_t place = (first + r) * rows.row_stride;
        if (is_paged) {
          const int2 in_page = shared.places[(chunk * kShape.keys + r) / kPlaceKeys];
          place = in_page.x * rows.batch_stride + in_page.y * rows.row_stride;
        }
#pragma unroll
        for (int i = 0; i < kPlaceKeys; i += copy.kRows) {
          const int row = copy.row + i;
          copy.start(to, r + i, from + (place + row * rows.row_stride) * 2, first + r + row < here.last_key);
        }
      }
      if (!is_value && has_bias && bias_is_shared && thread < kShape.keys) {
        const float* const bias = row_of<const float>(p.key_bias, here.batch, here.kv_head * group);
        copy_async_4(shared_address(&shared.key_bias[chunk % 3][thread]), bias + first + thread, first + thread < here.last_key);
      }
    }
    copy_async_commit();
  };

  // Start the copies: the queries into the unit that the ring reaches last, then all other units.
  const uint32_t query_tile = ring + (kShape.units - 1) * kUnitBytes;
  {
    const RowCopy<kDim, kThreads> copy(static_cast<int>(p.head_dim), thread);
#pragma unroll
    for (int r = 0; r < kTileRows; r += copy.kRows) {
      const int row = copy.row + r;
      const bool wanted = row < here.rows;
      const RowPlace place(p, here.kv_head, here.first_row + (wanted ? row : 0));
      copy.start(query_tile, r, rows_of_head(p.query, here.batch, place.head) + place.query * p.query.row_stride * 2, wanted);
    }
    copy_async_commit();
  }
#pragma unroll
  for (int unit = 0; unit + 1 < kShape.units; ++unit) start_unit(unit / 2, unit % 2);

  // Which keys do this thread's two rows see?
  const auto place_of = [&](int r) {
    return RowPlace(p, here.kv_head, here.first_row + min(tile_row + lane / 4 + 8 * r, here.rows - 1));
  };
  int end[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    end[r] = p.is_causal ? here.length - static_cast<int>(p.queries) + place_of(r).query + 1 : here.length;
  }
  const int whole_until = here.length - (p.is_causal ? static_cast<int>(p.queries) - 1 : 0);  // all rows see the keys before
  const bool has_rows = tile_row < here.rows;

  // Take the queries into registers.
  copy_async_wait<kShape.units - 1>();
  __syncthreads();
  uint32_t query[kDim / 16][4];
  const auto query_fragment = Fragment<kDim>::tall(query_tile, tile_row, 0, lane);
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) load_matrix(query[k], query_fragment.step(0, 2 * k));

  float out[1][kDim / 8][4];
  clear(out);
  OnlineSoftmax<1, true> softmax;
  const LogitCap cap(p.softcap);

  for (int chunk = 0; chunk < chunks; ++chunk) {
    // Keys are here, and nobody reads the unit before them any more: start the one that takes its place.
    copy_async_wait<kShape.units - 2>();
    __syncthreads();
    constexpr int kLater = kShape.units - 1;
    start_unit(chunk + kLater / 2, kLater % 2);

    float scores[1][kN][4];
    const int first = here.first_key + chunk * kShape.keys + slice * kSliceKeys, column = lane % 4 * 2;
    if (has_rows) {
      // Multiply scores = Q K^T.
      clear(scores);
      const uint32_t key_tile = ring + (2 * chunk) % kShape.units * kUnitBytes;
      multiply_held<T>(scores[0], query, Fragment<kDim>::wide(key_tile, slice * kSliceKeys, 0, lane));
      // Scale and cap them, add key_bias.
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        float2 bias{};
        if (has_bias && bias_is_shared) {
          bias = *reinterpret_cast<const float2*>(&shared.key_bias[chunk % 3][slice * kSliceKeys + 8 * n + column]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& logit = scores[0][n][e];
          logit *= call.scale;
          if (cap.softcap > 0.0f) logit = cap(logit);
          logit += e % 2 == 0 ? bias.x : bias.y;
        }
      }
      if (has_bias && !bias_is_shared) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float* const bias = row_of<const float>(p.key_bias, here.batch, place_of(r).head) + first + column;
          const int keys = here.last_key - first - column;
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            if (8 * n < keys) scores[0][n][2 * r] += bias[8 * n];
            if (8 * n + 1 < keys) scores[0][n][2 * r + 1] += bias[8 * n + 1];
          }
        }
      }
      // Hide keys behind a row's position, and those that do not exist.
      if (first + kSliceKeys > whole_until) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (first + 8 * n + column + e % 2 >= end[e / 2]) scores[0][n][e] = negative_infinity();
          }
        }
      }
      // Turn scores into weights, and rescale the sums if a maximum moved.
      softmax.update(scores, 1.0f, out);
    }

    // Values are here, and nobody reads the keys any more.
    copy_async_wait<kShape.units - 2>();
    __syncthreads();
    start_unit(chunk + (kLater + 1) / 2, (kLater + 1) % 2);
    // Multiply out += weights V.
    if (has_rows) {
      const uint32_t value_tile = ring + (2 * chunk + 1) % kShape.units * kUnitBytes;
      multiply_by_columns<T, kSliceKeys / 16>(
          out, [&](int k, int m, uint32_t (&a)[4]) { as_operand<T>(scores[m], k, a); },
          Fragment<kDim>::tall(value_tile, slice * kSliceKeys, 0, lane));
    }
  }

  copy_async_wait<0>();
  hand_on<T, kDim, kRows>(call, here, shared, softmax, out[0], is_bad);
}

template <class T, int kDim, DecodeRows kRows>
cudaError_t launch_decode(const DecodeCall& call, cudaStream_t stream) {
  constexpr DecodeShape kShape = kDecodeShape<kDim, kRows>;
  constexpr int kBytes = sizeof(DecodeShared<kDim, kRows>), kTileRows = 16 * kShape.row_warps;
  static_assert(kBytes <= 99 * 1024);
  static_assert(kTileRows <= kShape.warps * 32);
  const auto kernel = decode_kernel<T, kDim, kRows>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  const int64_t tiles = (call.rows + kTileRows - 1) / kTileRows;
  const int64_t blocks = call.p.batch * call.p.kv_heads * call.splits * tiles;
  return launch_dependent(kernel, dim3(static_cast<unsigned>(blocks)), kShape.warps * 32, kBytes, stream, call);
}

}  // namespace dmattn::cuda::sm80
