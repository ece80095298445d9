// Copies of single rows from anywhere in a tensor into a tile of panels in shared memory, for chunks that no tensor copy can
// load.
#pragma once

#include "tile_descriptor.cuh"

namespace dmattn::cuda::sm90 {

// The address of a row, by one multiplication and addition.
__device__ __forceinline__ const char* at_row(const char* from, int row, uint32_t row_bytes) {
  const char* to;
  asm volatile("{ .reg .b64 offset; mul.wide.u32 offset, %1, %2; add.s64 %0, offset, %3; }"
               : "=l"(to)
               : "r"(row), "r"(row_bytes), "l"(from));
  return to;
}

// Copies rows of a chunk from anywhere into a tile of panels, by kLoaders threads. With kHasGaps rows without a key, and those
// from `rows_present` on, become zeros. A thread copies the same piece of 16 bytes of all its rows. In a round it copies kAtOnce
// rows whose numbers have the same remainder by 8, because the swizzle of those is the same. With kReadsAhead it reads the keys
// of the next round before it copies. `early` is called after the first round.
template <int kDim, int kKeys, int kLoaders, bool kHasGaps, bool kReadsAhead, int kUnroll, class Early>
__device__ __forceinline__ void gather_rows(int thread, uint32_t tile, const int32_t* index, int rows_present, const char* rows,
                                            uint32_t row_bytes, int width, const Early& early) {
  constexpr int kPieces = kDim / 8, kGroups = kLoaders / kPieces, kRows = kKeys / 8, kAtOnce = kRows % 8 == 0 ? 8 : 4;
  // kGroups threads have the same piece. A remainder takes kParts rounds.
  constexpr int kParts = kRows / kAtOnce, kRounds = 8 / kGroups * kParts;
  static_assert(kGroups > 0 && 8 % kGroups == 0);
  const int piece = thread % kPieces, first = thread / kPieces;
  const bool in_row = piece * 8 < width;
  const char* from = rows + (in_row ? piece * 16 : 0);
  asm volatile("" : "+l"(from), "+r"(row_bytes));  // keeps them in registers, for at_row
  if (kHasGaps) asm volatile("" : "+r"(tile));     // so that no sum with it is kept from chunk to chunk: registers are short
  int4 four[kAtOnce / 4];
  auto read_keys = [&](int round) {
    const int remainder = first + round / kParts * kGroups;
    const int4* const keys =
        reinterpret_cast<const int4*>(&index[index_place<kKeys>(remainder)]) + round % kParts * (kAtOnce / 4);
#pragma unroll
    for (int j = 0; j < kAtOnce / 4; ++j) four[j] = keys[j];
  };
  if (kReadsAhead) read_keys(0);
#pragma unroll kUnroll
  for (int round = 0; round < kRounds; ++round) {
    const int remainder = first + round / kParts * kGroups, i = round % kParts * kAtOnce;
    const uint32_t to = tile + piece / 8 * (kKeys * 128) + remainder * 128 + ((piece % 8) ^ remainder) * 16;
    if (!kReadsAhead) read_keys(round);
    const char* rows_from[kAtOnce];  // all addresses first: a copy holds its registers until it has read them
    bool is_wanted[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int key = j % 4 == 0 ? four[j / 4].x : j % 4 == 1 ? four[j / 4].y : j % 4 == 2 ? four[j / 4].z : four[j / 4].w;
      is_wanted[j] = in_row && (!kHasGaps || (key >= 0 && remainder + 8 * (i + j) < rows_present));
      rows_from[j] = at_row(from, kHasGaps ? max(key, 0) : key, row_bytes);
    }
    if (kReadsAhead && round + 1 < kRounds) read_keys(round + 1);  // the copies hide their latency
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) copy_async_16(to + (i + j) * 1024, rows_from[j], is_wanted[j]);
    if (round == 0) early();
  }
}

// Copies the rows of a chunk of keys in order into a tile of panels, by kLoaders threads. Keys with index -1 become zeros. One
// piece of a row after the other: such chunks are few where this is called.
template <int kDim, int kKeys, int kLoaders>
__device__ __forceinline__ void copy_seen_rows(int thread, uint32_t tile, const int32_t* index, const char* from,
                                               uint32_t row_bytes, int width) {
  constexpr int kPieces = kDim / 8;
#pragma unroll 1
  for (int i = thread; i < kKeys * kPieces; i += kLoaders) {
    const int row = i / kPieces, piece = i % kPieces, key = index[row];
    const uint32_t to = tile + piece / 8 * (kKeys * 128) + row * 128 + ((piece % 8) ^ (row % 8)) * 16;
    const bool is_wanted = key >= 0 && piece * 8 < width;
    copy_async_16(to, from + static_cast<int64_t>(is_wanted ? key : 0) * row_bytes + (is_wanted ? piece * 16 : 0), is_wanted);
  }
}

// Fills the rows of a tile of panels that have a bit in `dead` with zeros, by kLoaders threads: each takes the same piece of 16
// bytes of several rows.
template <int kDim, int kKeys, int kLoaders>
__device__ __forceinline__ void clear_dead_rows(int thread, uint32_t tile, const uint32_t (&dead)[(kKeys + 31) / 32]) {
  constexpr int kPieces = kDim / 8, kAtOnce = kLoaders / kPieces;
  static_assert(32 % kAtOnce == 0);
  const int piece = thread % kPieces, first = thread / kPieces;
  const uint32_t to = tile + piece / 8 * (kKeys * 128) + first * 128 + piece % 8 * 16;
#pragma unroll
  for (int word = 0; word < (kKeys + 31) / 32; ++word) {
    const uint32_t bits = dead[word] >> first;
    if (dead[word] == 0) continue;
#pragma unroll
    for (int row = 0; row < 32 && word * 32 + row < kKeys; row += kAtOnce) {
      if (has_bit(bits, row)) store_zeros_16(to + (word * 32 + row) * 128);
    }
  }
}

}  // namespace dmattn::cuda::sm90
