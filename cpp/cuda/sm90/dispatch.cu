// Picks an instance of the sm90 kernels and lays out the work.
#include <algorithm>
#include <cmath>

#include "backward/kernel_wide.cuh"
#include "dispatch.h"
#include "encode_maps.h"
#include "forward/kernel.cuh"
#include "sm90_instances.h"

namespace dmattn::cuda::sm90 {
namespace {

struct ForwardInstance {
  DType dtype;
  int dim;
  Variant variant;
  cudaError_t (*launch)(const ForwardCall&, const ForwardWork&, const ForwardMaps&, int, cudaStream_t);
  ForwardShape shape;
};

struct BackwardInstance {
  DType dtype;
  int dim;
  Variant variant;
  cudaError_t (*launch)(const BackwardCall&, const BackwardWork&, const BackwardMaps&, int, cudaStream_t);
  BackwardShape shape;
};

#define DMATTN_ROW(DTYPE, TYPE, DIM, VARIANT) \
  {DType::DTYPE, DIM, Variant::VARIANT, launch_forward<TYPE, DIM, Variant::VARIANT>, kForwardShape<DIM, Variant::VARIANT>},
constexpr ForwardInstance kForward[] = {DMATTN_SM90_FORWARD(DMATTN_ROW)};
#undef DMATTN_ROW
#define DMATTN_ROW(DTYPE, TYPE, DIM, VARIANT)                                         \
  {DType::DTYPE, DIM, Variant::VARIANT, launch_backward<TYPE, DIM, Variant::VARIANT>, \
   kBackwardShape<DIM, has_options(Variant::VARIANT)>},
#define DMATTN_WIDE_ROW(DTYPE, TYPE, DIM, VARIANT)                                         \
  {DType::DTYPE, DIM, Variant::VARIANT, launch_backward_wide<TYPE, DIM, Variant::VARIANT>, \
   kBackwardShape<DIM, has_options(Variant::VARIANT)>},
constexpr BackwardInstance kBackward[] = {DMATTN_SM90_BACKWARD(DMATTN_ROW) DMATTN_SM90_BACKWARD_WIDE(DMATTN_WIDE_ROW)};
#undef DMATTN_WIDE_ROW
#undef DMATTN_ROW

// Finds an instance of the smallest head size that is large enough, and of the special variant rather than the general one.
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

// Heads of a group share their keys, so they go into one tile, unless masks or key_bias tell them apart.
int find_log2_heads_per_tile(const AttentionParams& p, int rows) {
  const int64_t group = p.heads / p.kv_heads;
  int shift = 0;
  while (rows % (2 << shift) == 0 && group % (int64_t{2} << shift) == 0) ++shift;
  for (const PerHead* row : {&p.mask.start, &p.mask.end, &p.mask.tiles, &p.mask.rows, &p.key_bias}) {
    while (row->data && row->head_divisor % (int64_t{1} << shift) != 0) --shift;
  }
  return shift;
}

// Bytes of L2 for the keys of a section. Less without causality: the more keys come from memory, the less power is left for the
// clock.
constexpr int64_t kSectionBytes = 32 << 20, kNonCausalSectionBytes = 12 << 20;

// Head groups of a section where tiles meet few keys. Then the keys of all tiles at work have to fit into L2 together, and fewer
// head groups at a time have fewer keys.
constexpr uint32_t kLocalSectionHeadGroups = 4;

// Forward's chunks of wider heads are short where keys come in order, and forward has no instance of kKeyBias for them.
constexpr int kMostInOrderDim = 128;

// How many head groups of head_group_bytes fit into section_bytes, at least one.
uint32_t head_groups_in_section(int64_t head_groups, int64_t head_group_bytes, int64_t section_bytes) {
  return static_cast<uint32_t>(std::clamp<int64_t>(section_bytes / std::max<int64_t>(head_group_bytes, 1), 1, head_groups));
}

// Would the hardware's tangent times softcap not be exact enough? It also has to be the one that forward has, which takes small
// scales and those below 0 in kGeneral.
bool needs_exact_tanh(const AttentionParams& p) {
  constexpr double kLeastSoftcap = 1e-3, kMostSoftcap = 256, kLeastScale = 1e-6, kMostScale = 1e6;
  return p.softcap != 0 &&
         (p.softcap < kLeastSoftcap || p.softcap > kMostSoftcap || p.scale < kLeastScale || p.scale > kMostScale);
}

// The variant that the call would have without softcap and dropout. kGeneral where it needs an exact tanh.
Variant variant_without_options(const AttentionParams& p, bool is_gathered) {
  AttentionParams plain = p;
  plain.softcap = 0, plain.dropout_p = 0;
  return needs_exact_tanh(p) ? Variant::kGeneral : variant_of(plain, is_gathered);
}

// Can tensor copies bring the bias of the call, are its keys all seen or causal, and is dropout the only option? Tensor copies
// take no stride of 0, so rows must not be broadcast; heads and batches may be. Chunks of a bias begin and end at multiples of 8
// keys, so what a tile sees by causality has to end there too: a key behind that may hold NaN, which a weight of 0 does not hide.
// Each head has a tile of its own there, which few queries would leave mostly empty.
bool has_copied_bias(const AttentionParams& p, bool is_gathered) {
  constexpr int64_t kFewQueries = 128;
  AttentionParams rest = p;
  rest.bias = {};
  const bool ends_at_pieces = !p.mask.is_causal || (p.key_length - p.query_length) % 8 == 0;
  return p.bias.data && p.softcap == 0 && !p.mask.tiles.data && !gathers(p) &&
         variant_without_options(rest, is_gathered) == Variant::kPlain && p.bias_dtype == p.dtype &&
         reinterpret_cast<uintptr_t>(p.bias.data) % 16 == 0 &&
         (p.bias_row_stride | p.bias.batch_stride | p.bias.head_stride) % 8 == 0 &&
         (p.bias_row_stride > 0 || p.query_length == 1) && ends_at_pieces &&
         (p.heads == p.kv_heads || p.query_length >= kFewQueries);
}

// Is kKeyBias the variant of the call if its keys come in order, and if there is an instance?
bool has_only_key_bias(const AttentionParams& p) {
  return p.key_bias.data && !p.mask.tiles.data && variant_of(p, true) == Variant::kGathered;
}

// rows: of a tile of (query, head) pairs in forward, 0 for the tiles of keys in backward. Where keys are known to come in order,
// their number decides nothing.
KeyCounts counts_of(const AttentionParams& p, int rows, int processors) {
  const int64_t tiles = rows > 0 ? (p.batch * p.heads * p.query_length + rows - 1) / rows
                                 : (p.key_length + kBackwardKeys - 1) / kBackwardKeys * p.batch * p.kv_heads;
  const int64_t most_keys = p.mask.is_in_order ? 0 : p.most_keys;
  return {p.query_length, p.key_length, most_keys, p.mask.is_causal, tiles, processors};
}

// The instance that takes the keys of the call in order, although it has a key_bias, and intervals or not; null: there is none.
const ForwardInstance* find_key_bias(const AttentionParams& p) {
  const ForwardInstance* const instance = has_only_key_bias(p) ? find_instance(kForward, p, Variant::kKeyBias) : nullptr;
  return instance && instance->variant == Variant::kKeyBias ? instance : nullptr;
}

// Have documents so many queries that few tiles have those of two? Such a tile meets the keys of both, and the more so the more
// rows it has. With all tokens as queries tiles of 192 rows were 7 % faster than those of 128, with a quarter of them 5 % slower.
bool has_long_runs(const AttentionParams& p) { return 2 * p.query_length >= p.key_length; }

const ForwardInstance* find_forward(const AttentionParams& p, bool is_gathered) {
  if (const ForwardInstance* const instance = is_gathered ? nullptr : find_key_bias(p)) return instance;
  Variant variant = variant_of(p, is_gathered);
  if (has_copied_bias(p, is_gathered)) {
    variant = Variant::kDenseBias;
  } else if (p.softcap != 0 || p.dropout_p != 0) {
    variant = variant_without_options(p, is_gathered);
    if (variant == Variant::kGathered) variant = Variant::kGatheredOptions;
    if (variant == Variant::kPlain) variant = p.mask.tiles.data ? Variant::kGeneral : Variant::kDenseOptions;
  }
  if (variant == Variant::kPlain && gathers(p) && has_long_runs(p)) variant = Variant::kRange;
  const bool is_dense = variant == Variant::kPlain && !p.mask.tiles.data && !gathers(p);
  const ForwardInstance* const dense = is_dense ? find_instance(kForward, p, Variant::kDense) : nullptr;
  return dense && dense->variant == Variant::kDense ? dense : find_instance(kForward, p, variant);
}

}  // namespace

KeyWay forward_way(const AttentionParams& p, int processors) {
  const ForwardInstance* const instance = find_forward(p, true);
  if (!instance || instance->variant != Variant::kGathered || p.mask.tiles.data || p.key_length == 0) return KeyWay::kLists;
  const bool may_come_in_order = find_key_bias(p);
  // With a key_bias and no intervals the gathered variant takes keys in order for head sizes without kKeyBias.
  if (!gathers(p)) return p.key_bias.data && !may_come_in_order ? KeyWay::kDirect : KeyWay::kLists;
  KeyCounts counts = counts_of(p, instance->shape.rows(), processors);
  // Without a key_bias, and in long calls with D=64, lists are no slower, however many keys a query sees.
  if (!may_come_in_order || (instance->dim <= 64 && p.key_length > 8192)) counts.most_keys = 0;
  const KeyWay way = forward_way(counts);
  return way == KeyWay::kDirect && instance->dim > kMostDirectDim ? KeyWay::kLists : way;
}

int forward_range_queries(const AttentionParams& p) {
  if (!p.mask.is_in_order || !gathers(p) || variant_of(p, false) != Variant::kPlain) return 0;
  const ForwardInstance* const instance = find_forward(p, false);
  const bool takes_ranges = instance && (instance->variant == Variant::kRange || instance->variant == Variant::kPlain);
  return takes_ranges && instance->dim <= kMostInOrderDim ? instance->shape.rows() : 0;
}

bool has_forward(const AttentionParams& p) {
  return p.key_length > 0 && p.query_length > 0 && find_forward(p, gathers(p) || p.key_bias.data) != nullptr;
}

cudaError_t forward(const ForwardCall& given, int processors, cudaStream_t stream) {
  const AttentionParams& p = given.p;
  const ForwardInstance* const instance = find_forward(p, given.live_keys.gathers());
  if (!instance || p.key_length == 0) return cudaErrorNotSupported;
  ForwardCall call = given;
  if (p.bias.data) {
    const int64_t pair_bytes = p.bias_dtype == DType::kFloat32 ? 8 : 4;
    call.has_bias_pairs = reinterpret_cast<uintptr_t>(p.bias.data) % static_cast<uintptr_t>(pair_bytes) == 0 &&
                          (p.bias_row_stride | p.bias.batch_stride | p.bias.head_stride) % 2 == 0;
  }
  if (p.dropout_seed) {
    call.threshold = dropout_threshold(p.dropout_p);
    call.keep_scale = static_cast<float>(1.0 / (1.0 - p.dropout_p));
  }
  if (has_options(instance->variant) && p.softcap > 0) {
    call.cap_scale = static_cast<float>(p.scale / p.softcap);
    call.scale = static_cast<float>(p.softcap), call.scale_2 = static_cast<float>(p.softcap * kLog2OfE);
    call.over_scale = static_cast<float>(1.0 / p.softcap);
  }

  ForwardWork work;
  work.log2_heads_per_tile = copies_bias(instance->variant) ? 0 : find_log2_heads_per_tile(p, instance->shape.rows());
  const int64_t heads_per_tile = int64_t{1} << work.log2_heads_per_tile,
                queries = instance->shape.rows() >> work.log2_heads_per_tile, head_groups = p.batch * p.heads / heads_per_tile;
  work.queries = static_cast<int>(queries);
  work.tiles = static_cast<int>((p.query_length + queries - 1) / queries);
  work.head_groups = static_cast<uint32_t>(head_groups);
  const int64_t head_group_bytes = p.key_length * (p.head_dim + p.value_dim) * 2 * heads_per_tile * p.kv_heads / p.heads;
  const bool is_local = (call.live_keys.gathers() || call.live_keys.ranges) && gathers(p);  // tiles of few keys
  const int64_t section_bytes = p.mask.is_causal ? kSectionBytes : kNonCausalSectionBytes;
  work.section_head_groups = is_local ? std::min(kLocalSectionHeadGroups, work.head_groups)
                                      : head_groups_in_section(head_groups, head_group_bytes, section_bytes);
  work.end_tiles = is_local ? work.tiles / 8 : 0;
  const int64_t work_tiles = work.tiles * head_groups;
  if (work_tiles >= int64_t{1} << 31) return cudaErrorNotSupported;
  const int blocks = static_cast<int>(std::min<int64_t>(work_tiles, processors));
  // Where there is no tile counter that another kernel has cleared, and tiles are short, clearing one takes longer than blocks
  // would wait for each other.
  constexpr int64_t kFewRounds = 32;
  work.has_static_schedule = call.live_keys.is_direct && is_local && work_tiles <= kFewRounds * blocks;
  work.tile_counter = work_tiles > blocks && !work.has_static_schedule ? call.live_keys.tile_counter : nullptr;

  ForwardMaps maps;
  const int keys = instance->shape.keys, heads_per_warp = static_cast<int>(std::min<int64_t>(heads_per_tile, 16));
  const bool is_encoded =
      encode<5>(&maps.query, p.query.data, {p.head_dim, heads_per_tile, p.query_length, p.heads / heads_per_tile, p.batch},
                {1, p.query.head_stride, p.query.row_stride, p.query.head_stride * heads_per_tile, p.query.batch_stride},
                {64, static_cast<int>(heads_per_tile), static_cast<int>(queries), 1, 1}) &&
      encode_rows(&maps.key, p.key, p.head_dim, p.key_length, p.kv_heads, p.batch, keys) &&
      encode_rows(&maps.value, p.value, p.value_dim, p.key_length, p.kv_heads, p.batch, keys) &&
      encode<5>(&maps.out, p.out.data, {p.value_dim, heads_per_tile, p.query_length, p.heads / heads_per_tile, p.batch},
                {1, p.out.head_stride, p.out.row_stride, p.out.head_stride * heads_per_tile, p.out.batch_stride},
                {64, heads_per_warp, 16 / heads_per_warp, 1, 1}) &&  // a warp's 16 rows
      (!call.compact.key || (encode_compact(&maps.compact_key, call.compact, call.compact.key, p, p.head_dim, keys) &&
                             encode_compact(&maps.compact_value, call.compact, call.compact.value, p, p.value_dim, keys)));
  if (!is_encoded || (copies_bias(instance->variant) && !encode_bias(&maps.bias, p, instance->shape.rows()))) {
    return cudaErrorNotSupported;
  }
  if (work.tile_counter && !call.live_keys.index && !call.live_keys.ranges) {
    const cudaError_t status = cudaMemsetAsync(work.tile_counter, 0, sizeof(int), stream);
    if (status != cudaSuccess) return status;
  }
  return instance->launch(call, work, maps, blocks, stream);
}

namespace {

const BackwardInstance* find_backward(const AttentionParams& given, bool is_gathered) {
  AttentionParams p = given;
  p.scale = 1;  // backward takes any, with a bias (backward_needs_bias)
  Variant variant = variant_of(p, is_gathered);
  if (p.bias.data) {  // whose kernels take keys in order
    variant = p.softcap != 0 ? Variant::kCappedBias : Variant::kPlainBias;
  } else if (!is_gathered && has_only_key_bias(p)) {
    variant = Variant::kKeyBias;
  } else if (variant == Variant::kGeneral) {
    p.key_bias = {};
    variant = variant_without_options(p, is_gathered);
    if (variant == Variant::kGathered) variant = Variant::kGatheredOptions;
    if (variant == Variant::kPlain) variant = Variant::kPlainOptions;
  }
  return find_instance(kBackward, p, variant);
}

// How many heads of a group share their intervals? Keys in order are read once for them.
int64_t heads_that_share_intervals(const AttentionParams& p) { return heads_that_share(p, {&p.mask.start, &p.mask.end}); }

// Can sums have a fixed order where keys are gathered? A block takes the whole list of a segment and the heads of a group
// together. There have to be so many lists that most of the GPU has work.
bool has_ordered_lists(const AttentionParams& p) {
  constexpr int64_t kFewLists = 32;
  const BackwardInstance* const instance = find_backward(p, true);
  const int64_t lists = segments_at(static_cast<int>(p.query_length), 0) * p.batch * p.kv_heads;
  return instance && gathers_keys(instance->variant) && instance->shape.keys == kBackwardKeys && lists >= kFewLists;
}

}  // namespace

bool backward_schedules_in_order(const AttentionParams& p, bool deterministic, int processors) {
  if (p.bias.data) return true;
  if (!gathers(p)) return false;
  if (deterministic) return !has_ordered_lists(p);
  if (heads_that_share_intervals(p) < p.heads / p.kv_heads) return false;
  const BackwardInstance* const instance = find_backward(p, false);
  if (!instance || instance->shape.keys != kBackwardKeys) return false;  // not measured for wide heads
  return p.mask.is_in_order || backward_way(counts_of(p, 0, processors)) == KeyWay::kAllKeys;
}

int64_t backward_heads_at_once(const AttentionParams& p, int processors) {
  constexpr int64_t kWorkTilesPerProcessor = 3;
  const BackwardInstance* const instance = find_backward(p, false);
  const int64_t group = p.heads / p.kv_heads, most = heads_that_share_intervals(p);
  if (!instance) return group;
  const int64_t tiles = (p.key_length + instance->shape.keys - 1) / instance->shape.keys * p.batch * p.kv_heads;
  for (int64_t parts = group / most; parts < group; ++parts) {
    if (group % parts == 0 && tiles * parts >= kWorkTilesPerProcessor * processors) return group / parts;
  }
  return 1;
}

bool backward_needs_bias(const AttentionParams& p) {
  constexpr double kLeastScale = 1e-30;
  return !p.bias.data && (needs_exact_tanh(p) || p.scale < kLeastScale);
}

bool has_backward(const AttentionParams& p, bool deterministic) {
  // A product times cap_scale has to be a number.
  constexpr double kMostCapScale = 1e30;
  if (p.softcap != 0 && !(std::abs(p.scale) <= p.softcap * kMostCapScale)) return false;
  const BackwardInstance* const instance = find_backward(p, gathers(p));
  if (!instance || !find_backward(p, false) || p.key_length == 0 || p.query_length == 0) return false;
  // Two warpgroups have the same keys of a wide tile, and nothing orders what they add to the gradient of key_bias. Two numbers
  // have the same sum in either order, those of several heads or batches do not.
  const bool adds_two = p.key_bias.head_divisor == 1 && (p.key_bias.batch_stride != 0 || p.batch == 1);
  // Gathered, wide keys have no semaphores. To take them in order is slower than the portable kernels, which gather.
  const bool has_semaphores = (!p.key_bias.data || adds_two) && (!gathers(p) || p.bias.data);
  return !deterministic || instance->shape.keys == kBackwardKeys || has_semaphores;
}

cudaError_t backward(const BackwardCall& call, int* tile_counter, int processors, cudaStream_t stream) {
  const AttentionParams& p = call.b.forward;
  const BackwardInstance* const instance = find_backward(p, call.live_keys.index != nullptr);
  if (!instance) return cudaErrorNotSupported;

  const int keys = instance->shape.keys, queries = instance->shape.queries;
  BackwardWork work;
  const bool is_gathered = gathers_keys(instance->variant);
  if (is_gathered && !call.key_sums && keys != kBackwardKeys) return cudaErrorNotSupported;  // the kernel of wide heads adds sums
  const int64_t group = p.heads / p.kv_heads;
  work.heads = static_cast<int>(std::min<int64_t>(group, is_gathered ? call.live_keys.head_divisor : call.heads_at_once));
  const int64_t head_groups = p.batch * p.heads / work.heads;
  int64_t tiles = (p.key_length + keys - 1) / keys;
  work.shares = 1;
  if (is_gathered) {
    // Cut each list into enough shares that no block has much more to do than others, even if the call has few segments.
    const int64_t segments = segments_at(static_cast<int>(p.query_length), call.live_keys.shortest),
                  few = head_groups * std::min<int64_t>(segments, 4);
    const int64_t rounds = call.key_sums ? 4 : 8;  // without sums a share costs little more than its tiles
    work.shares = static_cast<int>(std::clamp<int64_t>(rounds * processors / few, 8, std::max<int64_t>(tiles, 8)));
    if (call.semaphores) work.shares = 1;  // one block adds all that is added to the queries of a segment
    tiles = segments * work.shares;
  }
  const int64_t work_tiles = tiles * head_groups;
  if (work_tiles >= int64_t{1} << 31) return cudaErrorNotSupported;
  work.tiles = static_cast<int>(tiles);
  work.head_groups = static_cast<uint32_t>(head_groups);
  work.work_tiles = static_cast<uint32_t>(work_tiles);
  // What the keys of a head all meet: its queries, their gradients and their sums.
  const int64_t head_group_bytes = p.query_length * (p.head_dim * 6 + p.value_dim * 2) * work.heads;
  work.section_head_groups = head_groups_in_section(head_groups, head_group_bytes, kSectionBytes);
  const int blocks = static_cast<int>(std::min<int64_t>(work_tiles, processors));
  work.static_work_tiles = call.semaphores ? 0 : static_cast<uint32_t>(blocks);
  work.tile_counter = work_tiles > work.static_work_tiles ? tile_counter : nullptr;
  // A work tile of fewer chunks of queries does not hide the latency of a late draw, and those of lists of several segments are
  // short.
  constexpr int64_t kLongWorkTile = 32;
  const bool has_segments = is_gathered && call.key_sums;
  work.draws_late = call.semaphores || (!has_segments && p.query_length * work.heads >= kLongWorkTile * queries);

  BackwardMaps maps;
  const bool is_encoded = encode_rows(&maps.query, p.query, p.head_dim, p.query_length, p.heads, p.batch, queries) &&
                          encode_rows(&maps.grad_out, call.b.grad_out, p.value_dim, p.query_length, p.heads, p.batch, queries) &&
                          encode_rows(&maps.key, p.key, p.head_dim, p.key_length, p.kv_heads, p.batch, keys) &&
                          encode_rows(&maps.value, p.value, p.value_dim, p.key_length, p.kv_heads, p.batch, keys);
  if (!is_encoded) return cudaErrorNotSupported;
  return instance->launch(call, work, maps, blocks, stream);
}

}  // namespace dmattn::cuda::sm90
