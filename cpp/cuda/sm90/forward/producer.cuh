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
// as the descriptors say. One object for each loading thread. One half of the threads brings keys and queries, the other values,
// by the same code; is_single: one thread of each half does, because tensor copies load all rows. loader: this thread's number
// among them.
template <int kDim, class Traits>
class Producer {
 public:
  using Shared = ForwardShared<kDim, Traits>;

  __device__ __forceinline__ Producer(const ForwardCall& call, const ForwardWork& work, const ForwardMaps& maps, Shared& shared,
                                      int loader, bool is_single)
      : call_(call), work_(work), maps_(maps), shared_(shared), loader_(loader), is_single_(is_single) {}

  __device__ __forceinline__ void run() {
    if (is_single_ && thread_ != 0) return;
    if (is_keys_ && thread_ == 0) {  // the first tile is known before the scheduler writes a descriptor
      const WorkTile<Traits> tile(call_, work_, blockIdx.x);
      load_queries(tile.batch, tile.head, tile.first_query);
    }
    for (uint32_t n = 0; load_chunk(n); ++n) {
    }
  }

 private:
  using Descriptor = TileDescriptor<kDim, Traits>;
  static constexpr ForwardShape kShape = kForwardShape<kDim, Traits>;
  static constexpr int kPanels = kDim / 64, kRows = kShape.rows(), kLoaders = kShape.loaders(),
                       kEach = (kShape.keys + kLoaders - 1) / kLoaders;  // kEach: keys of a thread
  static constexpr bool kHasIntervals = Traits::kKeys == Keys::kIntervals, kStartsWithBias = Traits::kBias == Bias::kKey,
                        kCopiesSeenRows = Traits::kKeys == Keys::kRange;
  static constexpr int kDeadWords = kHasIntervals ? (kShape.keys + 31) / 32 : 1;

  // Loads chunk n, and the queries of the tile that it is the first of; false: there is no chunk n.
  __device__ __forceinline__ bool load_chunk(uint32_t n) {
    if (!__all_sync(0xffffffffu, descriptor_full_.is_full(n))) {
      settle();
      descriptor_full_.wait_full(n);
    }
    Descriptor& descriptor = shared_.descriptors[n % kShape.descriptors];
    const uint32_t flags = descriptor.flags;
    const bool in_order = Traits::kIsDense || (!Traits::kIsUnion && flags & kInOrder), has_dead = kHasIntervals && flags & kGaps;
    if (flags & kFirst) begin_tile(descriptor, flags);
    const bool has_bias = kStartsWithBias && bias_ && !(flags & kEnd);
    float bias_of[kEach];
    const int rows_present = Traits::kGathers && flags & (kSpans | kFew | kGaps) ? descriptor.rows_present : kShape.keys;
    if (has_bias) {  // read now, and written when the copies are under way
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int at = thread_ + i * kLoaders;
        const int key = in_order ? descriptor.first_key + at : descriptor.index[index_place<kShape.keys>(at)];
        const bool is_dead = has_dead && at < kShape.keys && has_bit(descriptor.dead[at / 32 % kDeadWords], at % 32);
        bias_of[i] = key >= 0 && at < rows_present && !is_dead ? bias_[key] : negative_infinity();
      }
    }
    const uint32_t stage_full = full_ + 8 * stage_;
    if (!__all_sync(0xffffffffu, barrier_test(empty_ + 8 * stage_, parity_))) {
      settle();
      barrier_wait(empty_ + 8 * stage_, parity_);
    }
    if (flags & kEnd) {
      settle();
      // Arrive as for a chunk: every thread once, the first one twice.
      barrier_arrive(stage_full);
      if (!is_single_ && thread_ == 0) barrier_arrive(stage_full);
      return false;
    }
    load_rows(n, descriptor, in_order, has_dead, rows_present, stage_full);
    if (has_bias) write_key_bias(call_, shared_, descriptor, loader_, stage_, bias_of);
    if (!is_single_) announce(n, flags, in_order && !has_dead, has_bias, stage_full);
    if (is_keys_ && flags & kFirst) {
      if (thread_ == 0 && tiles_ > 0) {
        query_empty_.wait_empty(tiles_);
        load_queries(batch_, descriptor.head, descriptor.first_query);
      }
      ++tiles_;
    }
    if (!has_dead) barrier_arrive(descriptor_empty_.at(n));
    if (++stage_ == kShape.stages) stage_ = 0, parity_ ^= 1;
    return true;
  }

  // Finds where the rows of a tile's keys and its biases are.
  __device__ __forceinline__ void begin_tile(const Descriptor& descriptor, uint32_t flags) {
    const AttentionParams& p = call_.p;
    batch_ = descriptor.batch, kv_head_ = descriptor.head / group_;
    from_ = static_cast<const char*>(tensor_.data) + (batch_ * tensor_.batch_stride + kv_head_ * tensor_.head_stride) * 2;
    if constexpr (Traits::kBias == Bias::kCopied) {
      bias_query_ = descriptor.first_query, bias_batch_ = p.bias.batch_stride != 0 ? batch_ : 0;
      bias_head_ = p.bias.head_stride != 0 ? descriptor.head / static_cast<int>(p.bias.head_divisor) : 0;
    }
    if constexpr (kStartsWithBias) bias_ = is_keys_ ? row_of<const float>(p.key_bias, batch_, descriptor.head) : nullptr;
    if constexpr (Traits::kGathers) {
      const bool is_from_compact = flags & kCompact;
      map_ = is_keys_ ? is_from_compact ? &maps_.compact_key : &maps_.key : is_from_compact ? &maps_.compact_value : &maps_.value;
      if (bias_ && is_from_compact) {
        bias_ = call_.compact.key_bias + (batch_ * p.kv_heads + kv_head_) * call_.compact.capacity;
      }
    }
  }

  // Starts the copies of chunk n.
  __device__ __forceinline__ void load_rows(uint32_t n, const Descriptor& descriptor, bool in_order, bool has_dead,
                                            int rows_present, uint32_t stage_full) {
    const uint32_t tile = tiles_from_ + stage_ * (kShape.keys * kDim * 2);
    const auto settle_before = [&] { settle(); };
    if (!Traits::kIsDense && !kCopiesSeenRows && !in_order) {
      // Where all keys are gathered there is separate code for chunks without missing rows.
      if (Traits::kGathers && rows_present == kShape.keys) {
        constexpr bool kReadsAhead = kShape.loading_registers >= 64;  // with fewer, 8 addresses and the next 8 keys are spilled
        gather_rows<kDim, kShape.keys, kLoaders, false, kReadsAhead, 8>(thread_, tile, descriptor.index, rows_present, from_,
                                                                        row_bytes_, width_, settle_before);
      } else {
        gather_rows<kDim, kShape.keys, kLoaders, true, false, 1>(thread_, tile, descriptor.index, rows_present, from_, row_bytes_,
                                                                 width_, settle_before);
      }
      if (thread_ == 0) barrier_arrive(stage_full);
    } else if (kCopiesSeenRows && !in_order) {
      if constexpr (kCopiesSeenRows)
        copy_seen_rows<kDim, kShape.keys, kLoaders>(thread_, tile, descriptor.index, from_, row_bytes_, width_);
      if (thread_ == 0) barrier_arrive(stage_full);
    } else if (thread_ == 0) {
      uint32_t to_tell = stage_full;
      if (has_dead) {
        barrier_arrive(stage_full);
        to_tell = shared_address(&shared_.landed[is_keys_ ? 0 : 1][kHasIntervals ? stage_ : 0]);
      }
      barrier_expect(to_tell, kShape.keys * kDim * 2);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        copy_box(tile + panel * (kShape.keys * 128), map_, to_tell, panel * 64, descriptor.first_key, kv_head_, batch_);
      }
      if constexpr (Traits::kBias == Bias::kCopied) {
        if (is_keys_) load_bias(n, descriptor.first_key);
      }
    }
  }

  // Announces the chunk before, and chunk n too where nothing of it has to be fenced or cleared (is_complete).
  __device__ __forceinline__ void announce(uint32_t n, uint32_t flags, bool is_complete, bool has_bias, uint32_t stage_full) {
    settle();
    if (is_complete) {
      if (kMultipliesBias<Traits> && has_bias) fence_async();
      barrier_arrive(stage_full);
    } else if constexpr (kHasIntervals) {
      due_ = stage_full, due_descriptor_ = n;
    } else {
      copy_async_commit();
      due_ = stage_full;
    }
    if (is_keys_ && flags & kFirst && tiles_ > 0) settle();  // what is waited for next may wait for these keys
  }

  // Copied rows have to be fenced before the tensor cores read them, so a chunk is announced when it has landed. That is waited
  // for when some copies of the next chunk have been started, or before anything else is waited for, because that may itself be
  // waiting for this chunk. With Keys::kIntervals it is so for chunks with dead rows, which are cleared when the tensor copy has
  // landed; so their descriptors are freed then.
  __device__ __forceinline__ void settle() {
    if (!due_) return;
    if constexpr (kHasIntervals) {
      const uint32_t due_stage = (due_ - full_) / 8;
      barrier_wait(shared_address(shared_.landed) + (is_keys_ ? 0 : sizeof(shared_.landed[0])) + 8 * due_stage,
                   landed_phases_ >> due_stage & 1);
      landed_phases_ ^= 1u << due_stage;
      clear_dead_rows<kDim, kShape.keys, kLoaders>(thread_, tiles_from_ + due_stage * (kShape.keys * kDim * 2),
                                                   shared_.descriptors[due_descriptor_ % kShape.descriptors].dead);
      barrier_arrive(descriptor_empty_.at(due_descriptor_));
    } else {
      copy_async_wait<0>();
    }
    fence_async();
    barrier_arrive(due_);
    due_ = 0;
  }

  // One thread loads the bias of chunk n.
  __device__ __forceinline__ void load_bias(uint32_t n, int first_key) {
    const Ring<kShape.stages> bias_full{shared_address(shared_.bias_full)}, bias_empty{shared_address(shared_.bias_empty)};
    const uint32_t to = shared_address(shared_.bias[n % kShape.stages]);
    bias_empty.wait_empty(n);
    barrier_expect(bias_full.at(n), kRows * kShape.keys * 2);
#pragma unroll
    for (int column = 0; column < kShape.keys; column += kBiasColumns) {
      copy_box(to + column * (kRows * 2), &maps_.bias, bias_full.at(n), first_key + column, bias_query_, bias_head_, bias_batch_);
    }
  }

  // One thread loads the queries of tile number tiles_ of this block.
  __device__ __forceinline__ void load_queries(int batch, int head, int first_query) {
    shared_.tiles[tiles_ % Shared::kQueryTileDescriptors] = {batch, head, first_query};
    barrier_expect(query_full_.at(tiles_), kRows * kDim * 2);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      copy_box(shared_address(shared_.query[tiles_ % kShape.query_tiles]) + panel * (kRows * 128), &maps_.query,
               query_full_.at(tiles_), panel * 64, 0, first_query, head >> work_.log2_heads_per_tile, batch);
    }
  }

  const ForwardCall& call_;
  const ForwardWork& work_;
  const ForwardMaps& maps_;
  Shared& shared_;
  const int loader_;
  const bool is_single_;
  const int thread_ = loader_ % kLoaders;
  const bool is_keys_ = __shfl_sync(0xffffffffu, loader_ < kLoaders, 0);  // known to be the same in all lanes
  const Ring<kShape.descriptors> descriptor_full_{shared_address(shared_.descriptor_full)},
      descriptor_empty_{shared_address(shared_.descriptor_empty)};
  const uint32_t full_ = shared_address(is_keys_ ? shared_.key_full : shared_.value_full);
  static constexpr uint32_t kToEmpty = sizeof(Shared::key_full);  // one address for both: a register less
  static_assert(offsetof(Shared, key_empty) == offsetof(Shared, key_full) + kToEmpty &&
                offsetof(Shared, value_empty) == offsetof(Shared, value_full) + kToEmpty);
  const uint32_t empty_ = full_ + kToEmpty;
  const Ring<kShape.query_tiles> query_full_{shared_address(shared_.query_full)},
      query_empty_{shared_address(shared_.query_empty)};
  const CUtensorMap* map_ = is_keys_ ? &maps_.key : &maps_.value;
  const TensorView& tensor_ = is_keys_ ? call_.p.key : call_.p.value;
  const uint32_t row_bytes_ = static_cast<uint32_t>(tensor_.row_stride * 2);
  const uint32_t tiles_from_ = shared_address(is_keys_ ? shared_.key : shared_.value);
  const int width_ = static_cast<int>(is_keys_ ? call_.p.head_dim : call_.p.value_dim),
            group_ = static_cast<int>(call_.p.heads / call_.p.kv_heads);
  uint32_t due_ = 0;             // the barrier of a chunk that is not announced yet; 0: there is none
  uint32_t due_descriptor_ = 0;  // the number of its descriptor
  uint32_t landed_phases_ = 0;   // the parity of each stage's landed barrier, a bit each
  // The tile at hand; the place of its bias in the tensor, 0 in a dimension that is broadcast; its rows and key_bias; and how
  // many tiles' queries were loaded.
  int batch_ = 0, kv_head_ = 0, bias_query_ = 0, bias_head_ = 0, bias_batch_ = 0;
  const char* from_ = nullptr;
  const float* bias_ = nullptr;
  uint32_t tiles_ = 0;
  int stage_ = 0;
  uint32_t parity_ = 1;  // the parity of the phase in which the stage was emptied
};

}  // namespace dmattn::cuda::sm90
