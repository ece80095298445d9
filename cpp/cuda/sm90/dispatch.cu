// Launches the instances of the sm90 kernels that plans name.
#include <algorithm>

#include "../launch_table.h"
#include "backward/kernel_wide.cuh"
#include "dispatch.h"
#include "encode_maps.h"
#include "forward/kernel.cuh"
#include "sm90_instances.h"

namespace dmattn::cuda::sm90 {
namespace {

using ForwardLaunch = cudaError_t(const ForwardCall&, const ForwardWork&, const ForwardMaps&, int, cudaStream_t);
using BackwardLaunch = cudaError_t(const BackwardCall&, const BackwardWork&, const BackwardMaps&, int, cudaStream_t);

// The last argument of a row is its traits, KernelTraits<...>, commas and all.
#define DMATTN_ROW(DTYPE, TYPE, DIM, ...) \
  {{Kernel::kSm90Forward, DType::DTYPE, DIM, __VA_ARGS__::kValue}, launch_forward<TYPE, DIM, __VA_ARGS__>},
constexpr LaunchRow<ForwardLaunch> kForward[] = {DMATTN_SM90_FORWARD(DMATTN_ROW)};
#undef DMATTN_ROW
#define DMATTN_ROW(DTYPE, TYPE, DIM, ...) \
  {{Kernel::kSm90Backward, DType::DTYPE, DIM, __VA_ARGS__::kValue}, launch_backward<TYPE, DIM, __VA_ARGS__>},
#define DMATTN_WIDE_ROW(DTYPE, TYPE, DIM, ...) \
  {{Kernel::kSm90Backward, DType::DTYPE, DIM, __VA_ARGS__::kValue}, launch_backward_wide<TYPE, DIM, __VA_ARGS__>},
constexpr LaunchRow<BackwardLaunch> kBackward[] = {DMATTN_SM90_BACKWARD(DMATTN_ROW) DMATTN_SM90_BACKWARD_WIDE(DMATTN_WIDE_ROW)};
#undef DMATTN_WIDE_ROW
#undef DMATTN_ROW

// What the options of the call are in the kernel.
void set_options(ForwardCall& call, const InstanceTraits& traits) {
  const AttentionParams& p = call.p;
  if (p.bias.data) {
    const int64_t pair_bytes = p.bias_dtype == DType::kFloat32 ? 8 : 4;
    call.has_bias_pairs = reinterpret_cast<uintptr_t>(p.bias.data) % static_cast<uintptr_t>(pair_bytes) == 0 &&
                          (p.bias_row_stride | p.bias.batch_stride | p.bias.head_stride) % 2 == 0;
  }
  if (p.dropout_seed) {
    call.threshold = dropout_threshold(p.dropout_p);
    call.keep_scale = static_cast<float>(1.0 / (1.0 - p.dropout_p));
  }
  if (has_options(traits.logits) && p.softcap > 0) {
    call.cap_scale = static_cast<float>(p.scale / p.softcap);
    call.scale = static_cast<float>(p.softcap), call.scale_2 = static_cast<float>(p.softcap * kLog2OfE);
    call.over_scale = static_cast<float>(1.0 / p.softcap);
  }
}

ForwardWork work_of(const ForwardSchedule& schedule, const KeyUnions& unions, int* tile_counter) {
  ForwardWork work;
  work.tiles = unions.key ? unions.tiles : schedule.tiles, work.queries = schedule.queries;
  work.first_tile = unions.first_tile;
  work.head_groups = schedule.head_groups, work.section_head_groups = schedule.section_head_groups;
  work.end_tiles = schedule.end_tiles, work.log2_heads_per_tile = schedule.log2_heads_per_tile;
  work.tile_counter = schedule.draws_tiles ? tile_counter : nullptr;
  work.is_static = schedule.is_static;
  return work;
}

BackwardWork work_of(const BackwardSchedule& schedule, int* tile_counter) {
  BackwardWork work;
  work.work_tiles = schedule.work_tiles, work.tiles = schedule.tiles;
  work.head_groups = schedule.head_groups, work.section_head_groups = schedule.section_head_groups;
  work.heads = schedule.heads, work.shares = schedule.shares;
  work.static_work_tiles = schedule.static_work_tiles;
  work.tile_counter = schedule.work_tiles > schedule.static_work_tiles ? tile_counter : nullptr;
  work.draws_late = schedule.draws_late;
  return work;
}

// Copies of live keys, side by side.
TensorMapShape map_of_compact(const CompactKeys& compact, void* data, const AttentionParams& p, int64_t width, int box) {
  TensorView tensor;
  tensor.data = data;
  tensor.row_stride = width, tensor.head_stride = width * compact.capacity, tensor.batch_stride = tensor.head_stride * p.kv_heads;
  return map_of_rows(tensor, width, compact.capacity, p.kv_heads, p.batch, box);
}

}  // namespace

bool has_tensor_maps() {
  static const bool has_them = find_encode() != nullptr;
  return has_them;
}

cudaError_t forward(const ForwardCall& given, const ForwardPlan& plan, cudaStream_t stream) {
  const AttentionParams& p = given.p;
  ForwardCall call = given;
  set_options(call, plan.instance.traits);
  const ForwardWork work = work_of(plan.schedule, call.live_keys.unions, call.live_keys.tile_counter);
  const int keys = plan.tile.keys, heads_per_tile = 1 << work.log2_heads_per_tile, heads_per_warp = std::min(heads_per_tile, 16);
  ForwardMaps maps;
  encode(&maps.query, map_of_groups(p.query, p.head_dim, p, heads_per_tile, heads_per_tile, work.queries));
  encode(&maps.key, map_of_rows(p.key, p.head_dim, p.key_length, p.kv_heads, p.batch, keys));
  encode(&maps.value, map_of_rows(p.value, p.value_dim, p.key_length, p.kv_heads, p.batch, keys));
  // Out leaves in boxes of a warp's 16 rows.
  encode(&maps.out, map_of_groups(p.out, p.value_dim, p, heads_per_tile, heads_per_warp, 16 / heads_per_warp));
  if (call.compact.key) {
    encode(&maps.compact_key, map_of_compact(call.compact, call.compact.key, p, p.head_dim, keys));
    encode(&maps.compact_value, map_of_compact(call.compact, call.compact.value, p, p.value_dim, keys));
  }
  if (plan.instance.traits.bias == Bias::kCopied) encode(&maps.bias, map_of_bias(p, plan.tile.rows));
  // Nothing has cleared the counter where there are neither lists nor ranges.
  if (work.tile_counter && plan.lists.kind == KeyLists::Kind::kNone && !call.live_keys.unions.key) {
    const cudaError_t status = cudaMemsetAsync(work.tile_counter, 0, sizeof(int), stream);
    if (status != cudaSuccess) return status;
  }
  const int64_t work_tiles = int64_t{work.tiles} * work.head_groups;
  const int blocks = static_cast<int>(std::min<int64_t>(plan.schedule.blocks, work_tiles));
  return find_launch(kForward, plan.instance)(call, work, maps, blocks, stream);
}

cudaError_t backward(const BackwardCall& call, const BackwardPlan& plan, int* tile_counter, cudaStream_t stream) {
  const AttentionParams& p = call.b.forward;
  const BackwardSchedule schedule = schedule_backward(plan, p, p.batch, p.heads, call.live_keys.unions.tiles);
  const int keys = plan.tile.keys, queries = plan.tile.rows;
  BackwardMaps maps;
  encode(&maps.query, map_of_rows(p.query, p.head_dim, p.query_length, p.heads, p.batch, queries));
  encode(&maps.grad_out, map_of_rows(call.b.grad_out, p.value_dim, p.query_length, p.heads, p.batch, queries));
  encode(&maps.key, map_of_rows(p.key, p.head_dim, p.key_length, p.kv_heads, p.batch, keys));
  encode(&maps.value, map_of_rows(p.value, p.value_dim, p.key_length, p.kv_heads, p.batch, keys));
  return find_launch(kBackward, plan.instance)(call, work_of(schedule, tile_counter), maps, schedule.blocks, stream);
}

}  // namespace dmattn::cuda::sm90
