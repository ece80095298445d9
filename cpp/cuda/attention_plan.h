// What the two attention host files share: what CUDA takes, rows that 16-byte copies can read, the plan of a call, the family
// that runs it.
//
// The one surprise is that tensors whose rows are not aligned to 16 bytes are copied: a view that starts at an odd element is
// rare.
#pragma once

#include <cstdlib>
#include <string_view>

#include "attention_launch.h"
#include "runtime.h"
#include "sm80/family.h"
#include "sm90/family.h"

namespace dmattn::cuda {

inline constexpr double kLog2OfE = 1.4426950408889634;

inline void check_cuda_support(const AttentionParams& p) {
  check(p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16,
        "query: expected dtype bfloat16 or float16 on CUDA (float32 and float64 are supported on the CPU only), got ",
        p.dtype == DType::kFloat32 ? "float32" : "float64");
  if (p.mask.tiles.data) {
    check(p.mask.tile_q % 128 == 0 && p.mask.tile_k % 128 == 0,
          "bits: expected tile sizes that are multiples of 128 on CUDA, got ", p.mask.tile_q, " x ", p.mask.tile_k);
  }
}

// DMATTN_FAMILY = auto | sm80 | sm90 chooses the kernels. kAuto: those of sm90 where they fit. Backward takes kSm90 as kAuto.
enum class Family { kAuto, kSm80, kSm90 };

inline Family choose_family(int32_t device) {
  const char* const wanted = std::getenv("DMATTN_FAMILY");
  const std::string_view name = wanted ? wanted : "auto";
#ifdef DMATTN_WITH_SM90
  constexpr bool kIsBuilt = true;
#else
  constexpr bool kIsBuilt = false;
#endif
  const int major = device_attribute<cudaDevAttrComputeCapabilityMajor>(device);
  if (name == "sm80") return Family::kSm80;
  if (name == "sm90") {
    check(kIsBuilt, "DMATTN_FAMILY: expected auto or sm80, the kernels this build has, got sm90");
    check(major == 9, "DMATTN_FAMILY: sm90 needs a device of compute capability 9.x, this one has ", major,
          ".x (use auto or sm80)");
    return Family::kSm90;
  }
  check(name == "auto" || name.empty(), "DMATTN_FAMILY: expected auto, sm80 or sm90, got ", name);
  return kIsBuilt && major == 9 ? Family::kAuto : Family::kSm80;
}

// Reads as rows of 16-byte pieces: the given tensor, or a copy of it.
inline Tensor with_aligned_rows(const Tensor& tensor) {
  bool is_aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
  for (int64_t axis = 0; axis < 3; ++axis) is_aligned = is_aligned && (tensor.size(axis) <= 1 || tensor.stride(axis) % 8 == 0);
  is_aligned = is_aligned && tensor.stride(2) >= 0 && tensor.stride(2) < (int64_t{1} << 31);
  return is_aligned ? tensor : torch::stable::clone(torch::stable::contiguous(tensor));
}

inline void align_inputs(CheckedAttention& checked) {
  AttentionParams& p = checked.params;
  checked.query = with_aligned_rows(checked.query), p.query = to_rows(checked.query);
  checked.key = with_aligned_rows(checked.key), p.key = to_rows(checked.key);
  checked.value = with_aligned_rows(checked.value), p.value = to_rows(checked.value);
}

// A plan and the memory it lies in. Without intervals, or with a block mask that names the tiles, there is none: keys come in
// order.
struct OwnedPlan {
  std::optional<Tensor> memory;
  Plan plan;
};

// With a block mask the plan is only an order of the query tiles, and few tiles need none.
inline OwnedPlan make_order(const AttentionParams& p, const Tensor& like, cudaStream_t stream) {
  constexpr int64_t kFewTiles = 512;
  const int64_t tiles = p.batch * p.heads * ceil_div(p.query_length, kQueryPadding);
  if (tiles <= kFewTiles) return {};
  const Tensor memory = empty_on(like, {tiles}, ScalarType::Int);
  Plan plan;
  plan.order = static_cast<int32_t*>(memory.data_ptr());
  DMATTN_CUDA_CHECK(launch_order(p, plan, stream));
  return {memory, plan};
}

struct PlanNeeds {
  bool order = true;       // for a family that starts tiles in a fixed order
  bool live_keys = false;  // for kernels that walk keys, not queries
  bool joined = false;     // for kernels to which one long list is as good as many short ones
  bool longer = false;     // for kernels to which lists a sixteenth longer are as good
  int shortest = 0;        // a segment is 2^shortest * kSegmentQueries queries or more
};

inline OwnedPlan make_plan(const AttentionParams& p, const Tensor& like, cudaStream_t stream, PlanNeeds needs) {
  const PerHead &start = p.mask.start, &end = p.mask.end;
  if (p.mask.tiles.data && needs.order && p.query_length > 0 && p.key_length > 0) return make_order(p, like, stream);
  if (!gathers(p)) return {};
  Plan plan;
  plan.keeps_live = needs.live_keys, plan.joins = needs.joined, plan.lengthens = needs.longer;
  plan.shortest = needs.shortest;
  static_assert(kMostSegments * kSegmentQueries >= 1 << 20);
  check(p.query_length <= int64_t{1} << 20, "query: expected at most 2^20 queries, got ", p.query_length);
  const int64_t segments = segments_at(static_cast<int>(p.query_length), plan.shortest);
  plan.capacity = segments > 1 ? kPlanEntries * p.key_length : p.key_length;  // a single segment's list is that of the live keys
  plan.most_lists = segments;
  plan.parts = ceil_div(p.key_length, kPlanPart);
  plan.head_divisor = p.heads;
  for (const PerHead* row : {&start, &end}) {
    if (row->data && row->head_divisor < plan.head_divisor) plan.head_divisor = row->head_divisor;
  }
  plan.heads = p.heads / plan.head_divisor;
  plan.batches = start.batch_stride != 0 || end.batch_stride != 0 ? p.batch : 1;
  plan.batch_stride = plan.batches > 1 ? plan.heads : 0;
  const int64_t rows = plan.batches * plan.heads;
  plan.count_blocks = blocks_per_row(plan.parts, rows, 0);
  const int64_t row_parts = rows * plan.parts, row_blocks = rows * plan.count_blocks;
  const int64_t for_rows = rows * (3 * plan.capacity + 2 * plan.most_lists + 2);
  const Tensor memory =
      empty_on(like, {row_parts * (4 * kPlanGroups + 1) + row_blocks * (2 * segments + 1) + for_rows + 2}, ScalarType::Int);
  plan.groups = static_cast<int4*>(memory.data_ptr());  // first, because it has to be aligned to 16 bytes, the next two to 8
  plan.span = reinterpret_cast<int2*>(plan.groups + row_parts * kPlanGroups);
  plan.lists = plan.span + rows * plan.capacity;
  plan.index = reinterpret_cast<int32_t*>(plan.lists + rows * plan.most_lists);
  plan.counts = plan.index + rows * plan.capacity;
  plan.partial = plan.counts + row_blocks * 2 * segments;
  plan.live = plan.partial + row_blocks;
  plan.count = plan.live + row_parts;
  plan.shift = plan.count + rows;
  plan.ticket = plan.shift + rows;
  plan.row_flags = plan.ticket + 1;
  DMATTN_CUDA_CHECK(launch_plan(p, plan, stream));
  return {memory, plan};
}

// A launch by a family: a miss says what was compiled.
inline void check_launch(cudaError_t status, const AttentionParams& p) {
  check(status != cudaErrorNotSupported, "no kernel for head sizes D=", p.head_dim, " and Dv=", p.value_dim,
        "; compiled: ", sm80::compiled());
  check_cuda(status, "attention kernel");
}

}  // namespace dmattn::cuda
