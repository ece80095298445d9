// Picks an instance of the sm90 kernels, describes the tensors to the copy engine and lays out the work.
//
// The one surprise is where cuTensorMapEncodeTiled comes from: the driver, asked for at run time, because the library links no
// CUDA.
#include <cuda.h>

#include <algorithm>

#include "family.h"
#include "forward.cuh"
#include "sm90_instances.h"

namespace dmattn::cuda::sm90 {
namespace {

struct Instance {
  DType dtype;
  int dim;
  Variant variant;
  cudaError_t (*launch)(const ForwardCall&, const WorkPlan&, const Maps&, int, cudaStream_t);
  int keys;
};

#define DMATTN_ROW(DTYPE, TYPE, DIM, VARIANT) \
  {DType::DTYPE, DIM, Variant::VARIANT, launch_forward<TYPE, DIM, Variant::VARIANT>, kForwardShape<DIM, Variant::VARIANT>.keys},
constexpr Instance kForward[] = {DMATTN_SM90_FORWARD(DMATTN_ROW)};
#undef DMATTN_ROW

const Instance* find_instance(const AttentionParams& p, Variant variant) {
  const int64_t width = std::max(p.head_dim, p.value_dim);
  const Instance* best = nullptr;
  for (const Instance& instance : kForward) {
    if (instance.dtype != p.dtype || instance.dim < width || (best && instance.dim > best->dim)) continue;
    if (instance.variant != variant && instance.variant != Variant::kGeneral) continue;
    if (best && instance.dim == best->dim && best->variant == variant) continue;
    best = &instance;
  }
  return best;
}

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<Encode>(function);
}

// A tensor of 16-bit elements, its inner dimension contiguous, copied in boxes of 64 columns. Strides count elements.
template <int kRank>
bool encode(CUtensorMap* map, const void* data, const int64_t (&sizes)[kRank], const int64_t (&strides)[kRank],
            const int (&box)[kRank]) {
  static const Encode function = find_encode();
  if (!function) return false;
  cuuint64_t extents[kRank], steps[kRank];
  cuuint32_t boxes[kRank], unit[kRank];
  for (int i = 0; i < kRank; ++i) {
    extents[i] = static_cast<cuuint64_t>(sizes[i]);
    // The stride of a dimension of one element is anything.
    steps[i] = sizes[i] == 1 ? 16 : static_cast<cuuint64_t>(strides[i]) * 2;
    boxes[i] = static_cast<cuuint32_t>(box[i]);
    unit[i] = 1;
  }
  return function(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, kRank, const_cast<void*>(data), extents, steps + 1, boxes, unit,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Heads of a group share their keys, so they go into one tile, as long as masks and key_bias do not tell them apart.
int find_pack_shift(const AttentionParams& p) {
  const int64_t group = p.heads / p.kv_heads;
  int shift = 0;
  while (shift < 7 && group % (int64_t{2} << shift) == 0) ++shift;
  for (const PerHead* row : {&p.mask.start, &p.mask.end, &p.mask.tiles, &p.mask.rows, &p.key_bias}) {
    while (row->data && row->head_divisor % (int64_t{1} << shift) != 0) --shift;
  }
  return shift;
}

}  // namespace

cudaError_t forward(const ForwardCall& call, int processors, cudaStream_t stream) {
  constexpr int64_t kSectionBytes = 32 << 20;  // of L2
  const AttentionParams& p = call.p;
  const Instance* const instance = find_instance(p, variant_of(p, call.plan));
  if (!instance || p.key_length == 0) return cudaErrorNotSupported;

  WorkPlan work;
  work.pack_shift = find_pack_shift(p);
  const int64_t pack = int64_t{1} << work.pack_shift, queries = kRows >> work.pack_shift, packs = p.batch * p.heads / pack;
  work.tiles = static_cast<int>((p.query_length + queries - 1) / queries);
  work.packs = static_cast<uint32_t>(packs);
  const int64_t pack_bytes = p.key_length * (p.head_dim + p.value_dim) * 2 * pack * p.kv_heads / p.heads;
  const bool is_local = call.plan.index != nullptr;  // tiles of few keys
  work.section_packs =
      static_cast<uint32_t>(is_local ? packs : std::clamp<int64_t>(kSectionBytes / std::max<int64_t>(pack_bytes, 1), 1, packs));
  const int64_t items = work.tiles * packs;
  if (items >= int64_t{1} << 31) return cudaErrorNotSupported;
  const int blocks = static_cast<int>(std::min<int64_t>(items, processors));
  work.ticket = items > blocks ? call.plan.ticket : nullptr;

  Maps maps;
  const int keys = instance->keys, warp_pack = static_cast<int>(std::min<int64_t>(pack, 16));
  const bool is_encoded =
      encode<5>(&maps.query, p.query.data, {p.head_dim, pack, p.query_length, p.heads / pack, p.batch},
                {1, p.query.head_stride, p.query.row_stride, p.query.head_stride * pack, p.query.batch_stride},
                {64, static_cast<int>(pack), static_cast<int>(queries), 1, 1}) &&
      encode<4>(&maps.key, p.key.data, {p.head_dim, p.key_length, p.kv_heads, p.batch},
                {1, p.key.row_stride, p.key.head_stride, p.key.batch_stride}, {64, keys, 1, 1}) &&
      encode<4>(&maps.value, p.value.data, {p.value_dim, p.key_length, p.kv_heads, p.batch},
                {1, p.value.row_stride, p.value.head_stride, p.value.batch_stride}, {64, keys, 1, 1}) &&
      encode<5>(&maps.out, p.out.data, {p.value_dim, pack, p.query_length, p.heads / pack, p.batch},
                {1, p.out.head_stride, p.out.row_stride, p.out.head_stride * pack, p.out.batch_stride},
                {64, warp_pack, 16 / warp_pack, 1, 1});  // a warp's 16 rows
  if (!is_encoded) return cudaErrorNotSupported;
  if (work.ticket && !call.plan.index) {
    const cudaError_t status = cudaMemsetAsync(work.ticket, 0, sizeof(int), stream);
    if (status != cudaSuccess) return status;
  }
  return instance->launch(call, work, maps, blocks, stream);
}

}  // namespace dmattn::cuda::sm90
