// Picks an instance of the sm90 kernels, describes the tensors to the copy engine and lays out the work.
//
// The one surprise is where cuTensorMapEncodeTiled comes from: the driver, asked for at run time, because the library links no
// CUDA.
#include <cuda.h>

#include <algorithm>

#include "backward.cuh"
#include "family.h"
#include "forward.cuh"
#include "sm90_instances.h"

namespace dmattn::cuda::sm90 {
namespace {

struct ForwardInstance {
  DType dtype;
  int dim;
  Variant variant;
  cudaError_t (*launch)(const ForwardCall&, const WorkPlan&, const Maps&, int, cudaStream_t);
  ForwardShape shape;
};

struct BackwardInstance {
  DType dtype;
  int dim;
  Variant variant;
  cudaError_t (*launch)(const BackwardCall&, const BackwardWork&, const BackwardMaps&, int, cudaStream_t);
  int queries;
};

#define DMATTN_ROW(DTYPE, TYPE, DIM, VARIANT) \
  {DType::DTYPE, DIM, Variant::VARIANT, launch_forward<TYPE, DIM, Variant::VARIANT>, kForwardShape<DIM, Variant::VARIANT>},
constexpr ForwardInstance kForward[] = {DMATTN_SM90_FORWARD(DMATTN_ROW)};
#undef DMATTN_ROW
#define DMATTN_ROW(DTYPE, TYPE, DIM, VARIANT) \
  {DType::DTYPE, DIM, Variant::VARIANT, launch_backward<TYPE, DIM, Variant::VARIANT>, kBackwardShape<DIM>.queries},
constexpr BackwardInstance kBackward[] = {DMATTN_SM90_BACKWARD(DMATTN_ROW)};
#undef DMATTN_ROW

// The smallest head size that is large enough, then the special variant before the general one.
template <class Instance, size_t kCount>
const Instance* find_instance(const Instance (&instances)[kCount], const AttentionParams& p, Variant variant) {
  const int64_t width = std::max(p.head_dim, p.value_dim);
  const Instance* best = nullptr;
  for (const Instance& instance : instances) {
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
int find_pack_shift(const AttentionParams& p, int rows) {
  const int64_t group = p.heads / p.kv_heads;
  int shift = 0;
  while (rows % (2 << shift) == 0 && group % (int64_t{2} << shift) == 0) ++shift;
  for (const PerHead* row : {&p.mask.start, &p.mask.end, &p.mask.tiles, &p.mask.rows, &p.key_bias}) {
    while (row->data && row->head_divisor % (int64_t{1} << shift) != 0) --shift;
  }
  return shift;
}

// [B, heads, S, width] in boxes of `rows` rows.
bool encode_rows(CUtensorMap* map, const Rows& rows, int64_t width, int64_t length, int64_t heads, int64_t batch, int box) {
  return encode<4>(map, rows.data, {width, length, heads, batch}, {1, rows.row_stride, rows.head_stride, rows.batch_stride},
                   {64, box, 1, 1});
}

bool encode_packed(CUtensorMap* map, const PackedRows& packed, void* data, const AttentionParams& p, int64_t width, int box) {
  Rows rows;
  rows.data = data;
  rows.row_stride = width, rows.head_stride = width * packed.capacity, rows.batch_stride = rows.head_stride * p.kv_heads;
  return encode_rows(map, rows, width, packed.capacity, p.kv_heads, p.batch, box);
}

// Of L2. Less where nothing is causal: the more keys come from memory, the lower the clock that the power leaves.
constexpr int64_t kSectionBytes = 32 << 20, kNonCausalSectionBytes = 12 << 20;

// Where tiles meet few keys, those of all tiles at work have to fit together: the fewer packs at a time, the fewer keys.
constexpr uint32_t kLocalSectionPacks = 4;

// Packs of heads that fit into so much of L2 together, each with so many bytes.
uint32_t packs_in_section(int64_t packs, int64_t pack_bytes, int64_t section_bytes) {
  return static_cast<uint32_t>(std::clamp<int64_t>(section_bytes / std::max<int64_t>(pack_bytes, 1), 1, packs));
}

}  // namespace

cudaError_t forward(const ForwardCall& call, int processors, cudaStream_t stream) {
  const AttentionParams& p = call.p;
  const Variant variant = variant_of(p, call.plan);
  const bool is_dense = variant == Variant::kPlain && !p.mask.tiles.data;
  const ForwardInstance* instance = is_dense ? find_instance(kForward, p, Variant::kDense) : nullptr;
  if (!instance || instance->variant != Variant::kDense) instance = find_instance(kForward, p, variant);
  if (!instance || p.key_length == 0) return cudaErrorNotSupported;

  WorkPlan work;
  work.pack_shift = find_pack_shift(p, instance->shape.rows());
  const int64_t pack = int64_t{1} << work.pack_shift, queries = instance->shape.rows() >> work.pack_shift,
                packs = p.batch * p.heads / pack;
  work.queries = static_cast<int>(queries);
  work.tiles = static_cast<int>((p.query_length + queries - 1) / queries);
  work.packs = static_cast<uint32_t>(packs);
  const int64_t pack_bytes = p.key_length * (p.head_dim + p.value_dim) * 2 * pack * p.kv_heads / p.heads;
  const bool is_local = call.plan.index != nullptr;  // tiles of few keys
  const int64_t section_bytes = p.mask.is_causal ? kSectionBytes : kNonCausalSectionBytes;
  work.section_packs = is_local ? std::min(kLocalSectionPacks, work.packs) : packs_in_section(packs, pack_bytes, section_bytes);
  work.end_tiles = is_local ? work.tiles / 8 : 0;
  const int64_t items = work.tiles * packs;
  if (items >= int64_t{1} << 31) return cudaErrorNotSupported;
  const int blocks = static_cast<int>(std::min<int64_t>(items, processors));
  work.ticket = items > blocks ? call.plan.ticket : nullptr;

  Maps maps;
  const int keys = instance->shape.keys, warp_pack = static_cast<int>(std::min<int64_t>(pack, 16));
  const bool is_encoded =
      encode<5>(&maps.query, p.query.data, {p.head_dim, pack, p.query_length, p.heads / pack, p.batch},
                {1, p.query.head_stride, p.query.row_stride, p.query.head_stride * pack, p.query.batch_stride},
                {64, static_cast<int>(pack), static_cast<int>(queries), 1, 1}) &&
      encode_rows(&maps.key, p.key, p.head_dim, p.key_length, p.kv_heads, p.batch, keys) &&
      encode_rows(&maps.value, p.value, p.value_dim, p.key_length, p.kv_heads, p.batch, keys) &&
      encode<5>(&maps.out, p.out.data, {p.value_dim, pack, p.query_length, p.heads / pack, p.batch},
                {1, p.out.head_stride, p.out.row_stride, p.out.head_stride * pack, p.out.batch_stride},
                {64, warp_pack, 16 / warp_pack, 1, 1}) &&  // a warp's 16 rows
      (!call.packed.key || (encode_packed(&maps.packed_key, call.packed, call.packed.key, p, p.head_dim, keys) &&
                            encode_packed(&maps.packed_value, call.packed, call.packed.value, p, p.value_dim, keys)));
  if (!is_encoded) return cudaErrorNotSupported;
  if (work.ticket && !call.plan.index) {
    const cudaError_t status = cudaMemsetAsync(work.ticket, 0, sizeof(int), stream);
    if (status != cudaSuccess) return status;
  }
  return instance->launch(call, work, maps, blocks, stream);
}

bool has_backward(const AttentionParams& p, bool deterministic) {
  // Intervals beside a block mask are the portable family's.
  const bool has_both = p.mask.tiles.data && (p.mask.start.data || p.mask.end.data);
  return !deterministic && !has_both && p.key_length > 0 && p.query_length > 0 &&
         find_instance(kBackward, p, variant_of(p, gathers(p)));
}

cudaError_t backward(const BackwardCall& call, int* ticket, int processors, cudaStream_t stream) {
  const AttentionParams& p = call.b.forward;
  const Variant variant = variant_of(p, call.plan);
  const BackwardInstance* const instance = find_instance(kBackward, p, variant);
  if (!instance) return cudaErrorNotSupported;

  BackwardWork work;
  const bool is_gathered = variant == Variant::kGathered;
  const int64_t group = p.heads / p.kv_heads;
  work.heads = static_cast<int>(is_gathered ? std::min(group, call.plan.head_divisor) : group);
  const int64_t packs = p.batch * p.heads / work.heads;
  int64_t tiles = (p.key_length + kBackwardKeys - 1) / kBackwardKeys;
  work.shares = 1;
  if (is_gathered) {
    // So many that no block has much more to do than the others, if there are only a few segments as well.
    const int64_t segments = segments_at(static_cast<int>(p.query_length), call.plan.shortest),
                  few = packs * std::min<int64_t>(segments, 4);
    work.shares = static_cast<int>(std::clamp<int64_t>(2 * processors / few, 4, std::max<int64_t>(tiles, 4)));
    tiles = segments * work.shares;
  }
  const int64_t items = tiles * packs;
  if (items >= int64_t{1} << 31) return cudaErrorNotSupported;
  work.tiles = static_cast<int>(tiles);
  work.packs = static_cast<uint32_t>(packs);
  work.items = static_cast<uint32_t>(items);
  // What the keys of a head all meet: its queries, their gradients and their sums.
  const int64_t pack_bytes = p.query_length * (p.head_dim * 6 + p.value_dim * 2) * work.heads;
  work.section_packs = packs_in_section(packs, pack_bytes, kSectionBytes);
  const int blocks = static_cast<int>(std::min<int64_t>(items, processors));
  work.ticket = items > blocks ? ticket : nullptr;

  BackwardMaps maps;
  const bool is_encoded =
      encode_rows(&maps.query, p.query, p.head_dim, p.query_length, p.heads, p.batch, instance->queries) &&
      encode_rows(&maps.grad_out, call.b.grad_out, p.value_dim, p.query_length, p.heads, p.batch, instance->queries) &&
      encode_rows(&maps.key, p.key, p.head_dim, p.key_length, p.kv_heads, p.batch, kBackwardKeys) &&
      encode_rows(&maps.value, p.value, p.value_dim, p.key_length, p.kv_heads, p.batch, kBackwardKeys);
  if (!is_encoded) return cudaErrorNotSupported;
  const cudaError_t status = work.ticket ? cudaMemsetAsync(work.ticket, 0, sizeof(int), stream) : cudaSuccess;
  return status == cudaSuccess ? instance->launch(call, work, maps, blocks, stream) : status;
}

}  // namespace dmattn::cuda::sm90
