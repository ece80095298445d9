// Reductions: the border between torch and the kernels, and the order in which every device adds.
//
// The order. A sequence is cut into chunks of kChunk elements. In a chunk, element i goes to lane i % kChunkLanes; a lane starts
// at the neutral element and takes its elements one after the other. Then neighbours are joined: lanes 0 and 1, 2 and 3, ...,
// then those results in pairs, until one is left. That is pass one. Pass two does the same to the results of the chunks, in
// kPartialLanes lanes. Nothing of it depends on strides, threads, launches or the device. Lanes that get no element hold the
// neutral element and change nothing, so kernels may leave them out.
#pragma once

#include <cstdint>

namespace dmattn {

inline constexpr int64_t kChunk = 4096, kChunkLanes = 256, kPartialLanes = 4096;

enum class Element : int32_t { kFloat64, kFloat32, kBFloat16, kFloat16, kInt64, kInt32, kInt16, kInt8, kUInt8, kBool };

// outer x inner sequences of `count` elements each. Strides count elements.
struct ReduceParams {
  const void* input = nullptr;
  Element dtype = Element::kFloat32;
  bool is_max = false;
  int64_t outer = 1, inner = 1, count = 0;  // each at least 1
  int64_t outer_stride = 0, inner_stride = 0, stride = 0;
  void* out = nullptr;       // [outer, inner] contiguous; dtype of the input, int64 for sums of integers and bool
  void* partials = nullptr;  // [outer, inner, chunks] contiguous, no wider than in pass two; null where there is one chunk
};

// static: the CPU kernels are compiled once per instruction set, and the linker must not merge functions across them.
static constexpr int64_t ceil_of_quotient(int64_t a, int64_t b) { return (a + b - 1) / b; }

static constexpr int64_t chunks_of(const ReduceParams& p) { return ceil_of_quotient(p.count, kChunk); }

// Whether kernels reduce several neighbouring sequences at once, because those lie closer than the elements of one.
static constexpr bool reduces_columns(const ReduceParams& p) { return p.inner >= 8 && p.inner_stride < p.stride; }

}  // namespace dmattn
