// The loading warps of the Hopper forward: they bring keys, values and queries into shared memory as the descriptors say.
//
// A gathered chunk is announced late. Its rows are loaded by ordinary copies, which have to land and be fenced before the tensor
// cores may read them. Meanwhile the copies of the next chunk are started, if that need not wait.
#pragma once

#include "../../key_lists/compact_keys.cuh"
#include "../../ptx/tma.cuh"
#include "../gather.cuh"
#include "../maps.h"
#include "shared.cuh"

namespace dmattn::cuda::sm90 {

// Writes the key_bias of a chunk, of which a thread has `bias_of`: into the chunk's descriptor, or its operand of a product. Says
// in the descriptor whether some of it is huge.
template <int kDim, class Traits, int kEach>
__device__ __forceinline__ void write_key_bias(const ForwardCall& call, ForwardShared<kDim, Traits>& shared,
                                               TileDescriptor<kDim, Traits>& descriptor, int loader, int stage,
                                               const float (&bias_of)[kEach]) {
  constexpr ForwardShape kShape = kForwardShape<kDim, Traits>;
  constexpr int kLoaders = kShape.loaders();
  using Descriptor = TileDescriptor<kDim, Traits>;
  const int thread = loader % kLoaders;
  bool has_huge = false;
#pragma unroll
  for (int i = 0; i < kEach; ++i) has_huge |= fabsf(bias_of[i]) > kHugeBias && bias_of[i] != negative_infinity();
  has_huge = __any_sync(0xffffffffu, has_huge);
  if (Descriptor::kBiasWarps > 1 && thread % 32 == 0) descriptor.has_huge[thread / 32] = has_huge;
  if (has_huge && thread % 32 == 0) atomicOr(&descriptor.flags, kHuge);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (kShape.keys % kLoaders != 0 && thread + i * kLoaders >= kShape.keys) continue;
    if constexpr (kMultipliesBias<Traits>) {
      shared.bias_operands.write(stage, thread + i * kLoaders, has_huge ? 0.0f : bias_of[i] * call.over_scale);
      if (!has_huge) continue;
    }
    descriptor.key_bias[Descriptor::bias_place(thread + i * kLoaders)] = has_huge ? bias_of[i] : bias_of[i] * call.over_scale;
  }
}

// query [B, H, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv] -> tiles [rows, D], chunks [keys, D or Dv] in shared memory,
// as the descriptors say. One half of the loading threads brings keys and queries, the other values, by the same code; is_single:
// one thread of each half does, because tensor copies load all rows. loader: this thread's number among them.
template <int kDim, class Traits>
__device__ __forceinline__ void load_tiles(const ForwardCall& call, const ForwardWork& work, const ForwardMaps& maps,
                                           ForwardShared<kDim, Traits>& shared, int loader, bool is_single) {
  constexpr ForwardShape kShape = kForwardShape<kDim, Traits>;
  using Descriptor = TileDescriptor<kDim, Traits>;
  constexpr int kPanels = kDim / 64, kRows = kShape.rows(), kLoaders = kShape.loaders(),
                kQueryTileDescriptors = ForwardShared<kDim, Traits>::kQueryTileDescriptors;
  const AttentionParams& p = call.p;
  const int thread = loader % kLoaders;
  const bool is_keys = __shfl_sync(0xffffffffu, loader < kLoaders, 0);  // known to be the same in all lanes
  if (is_single && thread != 0) return;
  const Ring<kShape.descriptors> descriptor_full{shared_address(shared.descriptor_full)},
      descriptor_empty{shared_address(shared.descriptor_empty)};
  const uint32_t full = shared_address(is_keys ? shared.key_full : shared.value_full);
  using Shared = ForwardShared<kDim, Traits>;
  constexpr uint32_t kToEmpty = sizeof(Shared::key_full);  // one address for both: a register less
  static_assert(offsetof(Shared, key_empty) == offsetof(Shared, key_full) + kToEmpty &&
                offsetof(Shared, value_empty) == offsetof(Shared, value_full) + kToEmpty);
  const uint32_t empty = full + kToEmpty;
  const Ring<kShape.query_tiles> query_full{shared_address(shared.query_full)}, query_empty{shared_address(shared.query_empty)};
  const CUtensorMap* map = is_keys ? &maps.key : &maps.value;
  const TensorView& tensor = is_keys ? p.key : p.value;
  const uint32_t row_bytes = static_cast<uint32_t>(tensor.row_stride * 2);
  const uint32_t tiles_from = shared_address(is_keys ? shared.key : shared.value);
  const int width = static_cast<int>(is_keys ? p.head_dim : p.value_dim), group = static_cast<int>(p.heads / p.kv_heads);

  // Copied rows have to be fenced before the tensor cores read them, so a chunk is announced when it has landed. That is waited
  // for when some copies of the next chunk have been started, or before anything else is waited for. With Keys::kIntervals it is
  // so for chunks with dead rows, which are cleared when the tensor copy has landed; so their descriptors are freed then.
  uint32_t due = 0;             // the barrier of a chunk that is not announced yet; 0: there is none
  uint32_t due_descriptor = 0;  // the number of its descriptor
  uint32_t landed_phases = 0;   // the parity of each stage's landed barrier, a bit each
  constexpr int kDeadWords = Traits::kKeys == Keys::kIntervals ? (kShape.keys + 31) / 32 : 1;
  // Announces it. Called before anything else is waited for, because that may itself be waiting for this chunk.
  auto settle = [&] {
    if (!due) return;
    if constexpr (Traits::kKeys == Keys::kIntervals) {
      const uint32_t due_stage = (due - full) / 8;
      barrier_wait(shared_address(shared.landed) + (is_keys ? 0 : sizeof(shared.landed[0])) + 8 * due_stage,
                   landed_phases >> due_stage & 1);
      landed_phases ^= 1u << due_stage;
      clear_dead_rows<kDim, kShape.keys, kLoaders>(thread, tiles_from + due_stage * (kShape.keys * kDim * 2),
                                                   shared.descriptors[due_descriptor % kShape.descriptors].dead);
      barrier_arrive(descriptor_empty.at(due_descriptor));
    } else {
      copy_async_wait<0>();
    }
    fence_async();
    barrier_arrive(due);
    due = 0;
  };
  constexpr bool kIsGathered = Traits::kGathers, kHasIntervals = Traits::kKeys == Keys::kIntervals,
                 kStartsWithBias = Traits::kBias == Bias::kKey, kCopiesSeenRows = Traits::kKeys == Keys::kRange;
  // The tile at hand; the place of its bias in the tensor, 0 in a dimension that is broadcast; its rows and key_bias; and how
  // many tiles' queries were loaded.
  int batch = 0, kv_head = 0, bias_query = 0, bias_head = 0, bias_batch = 0;
  const char* from = nullptr;
  const float* bias = nullptr;
  uint32_t tiles = 0;
  // One thread loads the bias of chunk n.
  auto load_bias = [&](uint32_t n, int first_key) {
    const Ring<kShape.stages> bias_full{shared_address(shared.bias_full)}, bias_empty{shared_address(shared.bias_empty)};
    const uint32_t to = shared_address(shared.bias[n % kShape.stages]);
    bias_empty.wait_empty(n);
    barrier_expect(bias_full.at(n), kRows * kShape.keys * 2);
#pragma unroll
    for (int column = 0; column < kShape.keys; column += kBiasColumns) {
      copy_box(to + column * (kRows * 2), &maps.bias, bias_full.at(n), first_key + column, bias_query, bias_head, bias_batch);
    }
  };
  // One thread loads the queries of tile number `tiles` of this block.
  auto load_queries = [&](int tile_batch, int head, int first_query) {
    shared.tiles[tiles % kQueryTileDescriptors] = {tile_batch, head, first_query};
    barrier_expect(query_full.at(tiles), kRows * kDim * 2);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      copy_box(shared_address(shared.query[tiles % kShape.query_tiles]) + panel * (kRows * 128), &maps.query,
               query_full.at(tiles), panel * 64, 0, first_query, head >> work.log2_heads_per_tile, tile_batch);
    }
  };
  if (is_keys && thread == 0) {  // the first tile is known before the scheduler writes a descriptor
    const WorkTile<Traits> tile(call, work, blockIdx.x);
    load_queries(tile.batch, tile.head, tile.first_query);
  }
  int stage = 0;
  uint32_t parity = 1;  // the parity of the phase in which the stage was emptied
  for (uint32_t n = 0;; ++n) {
    if (!__all_sync(0xffffffffu, descriptor_full.is_full(n))) {
      settle();
      descriptor_full.wait_full(n);
    }
    auto& descriptor = shared.descriptors[n % kShape.descriptors];
    const uint32_t flags = descriptor.flags;
    const bool in_order = Traits::kIsDense || flags & kInOrder, has_dead = kHasIntervals && flags & kGaps;
    if (flags & kFirst) {
      batch = descriptor.batch, kv_head = descriptor.head / group;
      from = static_cast<const char*>(tensor.data) + (batch * tensor.batch_stride + kv_head * tensor.head_stride) * 2;
      if constexpr (Traits::kBias == Bias::kCopied) {
        bias_query = descriptor.first_query, bias_batch = p.bias.batch_stride != 0 ? batch : 0;
        bias_head = p.bias.head_stride != 0 ? descriptor.head / static_cast<int>(p.bias.head_divisor) : 0;
      }
      if constexpr (kStartsWithBias) bias = is_keys ? row_of<const float>(p.key_bias, batch, descriptor.head) : nullptr;
      if constexpr (kIsGathered) {
        const bool is_from_compact = flags & kCompact;
        map = is_keys ? is_from_compact ? &maps.compact_key : &maps.key : is_from_compact ? &maps.compact_value : &maps.value;
        if (bias && is_from_compact) {
          bias = call.compact.key_bias + (batch * p.kv_heads + kv_head) * call.compact.capacity;
        }
      }
    }
    const bool has_bias = kStartsWithBias && bias && !(flags & kEnd);
    constexpr int kEach = (kShape.keys + kLoaders - 1) / kLoaders;
    float bias_of[kEach];
    const int rows_present = kIsGathered && flags & (kSpans | kFew | kGaps) ? descriptor.rows_present : kShape.keys;
    if (has_bias) {  // read now, and written when the copies are under way
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int at = thread + i * kLoaders;
        const int key = in_order ? descriptor.first_key + at : descriptor.index[index_place<kShape.keys>(at)];
        const bool is_dead = has_dead && at < kShape.keys && has_bit(descriptor.dead[at / 32 % kDeadWords], at % 32);
        bias_of[i] = key >= 0 && at < rows_present && !is_dead ? bias[key] : negative_infinity();
      }
    }
    const uint32_t stage_full = full + 8 * stage;
    if (!__all_sync(0xffffffffu, barrier_test(empty + 8 * stage, parity))) {
      settle();
      barrier_wait(empty + 8 * stage, parity);
    }
    if (flags & kEnd) {
      settle();
      // Arrive as for a chunk: every thread once, the first one twice.
      barrier_arrive(stage_full);
      if (!is_single && thread == 0) barrier_arrive(stage_full);
      return;
    }
    const uint32_t tile = tiles_from + stage * (kShape.keys * kDim * 2);
    if (!Traits::kIsDense && !kCopiesSeenRows && !in_order) {
      // Where all keys are gathered there is separate code for chunks without missing rows.
      if (kIsGathered && rows_present == kShape.keys) {
        constexpr bool kReadsAhead = kShape.loading_registers >= 64;  // with fewer, 8 addresses and the next 8 keys are spilled
        gather_rows<kDim, kShape.keys, kLoaders, false, kReadsAhead, 8>(thread, tile, descriptor.index, rows_present, from,
                                                                        row_bytes, width, settle);
      } else {
        gather_rows<kDim, kShape.keys, kLoaders, true, false, 1>(thread, tile, descriptor.index, rows_present, from, row_bytes,
                                                                 width, settle);
      }
      if (thread == 0) barrier_arrive(stage_full);
    } else if (kCopiesSeenRows && !in_order) {
      if constexpr (kCopiesSeenRows)
        copy_seen_rows<kDim, kShape.keys, kLoaders>(thread, tile, descriptor.index, from, row_bytes, width);
      if (thread == 0) barrier_arrive(stage_full);
    } else if (thread == 0) {
      uint32_t to_tell = stage_full;
      if (has_dead) {
        barrier_arrive(stage_full);
        to_tell = shared_address(&shared.landed[is_keys ? 0 : 1][kHasIntervals ? stage : 0]);
      }
      barrier_expect(to_tell, kShape.keys * kDim * 2);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        copy_box(tile + panel * (kShape.keys * 128), map, to_tell, panel * 64, descriptor.first_key, kv_head, batch);
      }
      if constexpr (Traits::kBias == Bias::kCopied) {
        if (is_keys) load_bias(n, descriptor.first_key);
      }
    }
    if (has_bias) write_key_bias(call, shared, descriptor, loader, stage, bias_of);
    if (!is_single) {
      settle();
      if (in_order && !has_dead) {
        if (kMultipliesBias<Traits> && has_bias) fence_async();
        barrier_arrive(stage_full);
      } else if constexpr (kHasIntervals) {
        due = stage_full, due_descriptor = n;
      } else {
        copy_async_commit();
        due = stage_full;
      }
      if (is_keys && flags & kFirst && tiles > 0) settle();  // what is waited for next may wait for these keys
    }
    if (is_keys && flags & kFirst) {
      if (thread == 0 && tiles > 0) {
        query_empty.wait_empty(tiles);
        load_queries(batch, descriptor.head, descriptor.first_query);
      }
      ++tiles;
    }
    if (!has_dead) barrier_arrive(descriptor_empty.at(n));
    if (++stage == kShape.stages) stage = 0, parity ^= 1;
  }
}

}  // namespace dmattn::cuda::sm90
