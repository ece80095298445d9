// What the warps of a forward block share, and the warps that load: they bring keys, values and queries into shared memory as the
// descriptors say.
//
// A gathered chunk is announced late. Its rows are loaded by ordinary copies, which have to land and be fenced before the tensor
// cores may read them. Meanwhile the copies of the next chunk are started, if that need not wait.
#pragma once

#include "key_bias.cuh"
#include "maps.h"
#include "scheduler.cuh"

namespace dmattn::cuda::sm90 {

// A tile whose queries are in shared memory.
struct QueryTileDescriptor {
  int batch, head, first_query;
};

template <int kDim, Variant kVariant>
struct alignas(1024) ForwardShared {
  static constexpr ForwardShape kShape = kForwardShape<kDim, kVariant>;
  static constexpr int kRows = kShape.rows();
  static constexpr bool kByCopy = kShape.query_tiles > 1;  // the output leaves by tensor copies, from the place of the queries
  static constexpr int kQueryTileDescriptors = 4;  // the output of a tile is written while its second successor may be loading
  static_assert(kQueryTileDescriptors >= kShape.query_tiles + 2);
  uint16_t query[kShape.query_tiles][kRows * kDim];
  uint16_t key[kShape.stages][kShape.keys * kDim];
  uint16_t value[kShape.stages][kShape.keys * kDim];
  TileDescriptor<kDim, kVariant> descriptors[kShape.descriptors];
  QueryTileDescriptor tiles[kQueryTileDescriptors];
  uint32_t row_hash[kMayDrop<kVariant> ? kRows : 1];  // with dropout: dropout_row_hash of each row of the tile at hand
  SchedulerQueues<kDim, kVariant> queues;
  uint64_t query_full[kShape.query_tiles], query_empty[kShape.query_tiles];
  uint64_t key_full[kShape.stages], key_empty[kShape.stages];
  uint64_t value_full[kShape.stages], value_empty[kShape.stages];
  uint64_t descriptor_full[kShape.descriptors], descriptor_empty[kShape.descriptors];
  uint64_t landed[2][kVariant == Variant::kKeyBias ? kShape.stages : 1];  // keys, and values, of a chunk of which some are dead
  // The bias of chunks, in panels of kBiasColumns: 64 bytes for a row, and 16-byte piece c of row r at piece c ^ (r / 2 % 4).
  static constexpr int kBiasStages = copies_bias(kVariant) ? kShape.stages : 1;
  uint64_t bias_full[kBiasStages], bias_empty[kBiasStages];
  alignas(copies_bias(kVariant) ? 1024 : 2) uint16_t bias[kBiasStages][copies_bias(kVariant) ? kRows * kShape.keys : 1];
  BiasOperands<kDim, kVariant> bias_operands;
};

// A ring of barriers. The n-th use has barrier n % kCount, in phase n / kCount.
template <int kCount>
struct Ring {
  uint32_t base;
  __device__ __forceinline__ uint32_t at(uint32_t n) const { return base + 8 * (n % kCount); }
  __device__ __forceinline__ void wait_full(uint32_t n) const { barrier_wait(at(n), n / kCount % 2); }
  __device__ __forceinline__ void wait_empty(uint32_t n) const { barrier_wait(at(n), (n / kCount % 2) ^ 1); }
  // The same for warps that have time.
  __device__ __forceinline__ void sleep_full(uint32_t n) const { barrier_sleep(at(n), n / kCount % 2); }
  __device__ __forceinline__ void producer_acquire(uint32_t n) const { barrier_sleep(at(n), (n / kCount % 2) ^ 1); }
  __device__ __forceinline__ bool is_full(uint32_t n) const { return barrier_test(at(n), n / kCount % 2); }
};

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

// Writes the key_bias of a chunk, of which a thread has `bias_of`: into the chunk's descriptor, or its operand of a product. Says
// in the descriptor whether some of it is huge.
template <int kDim, Variant kVariant, int kEach>
__device__ __forceinline__ void write_key_bias(const ForwardCall& call, ForwardShared<kDim, kVariant>& shared,
                                               TileDescriptor<kDim, kVariant>& descriptor, int loader, int stage,
                                               const float (&bias_of)[kEach]) {
  constexpr ForwardShape kShape = kForwardShape<kDim, kVariant>;
  constexpr int kLoaders = kShape.loaders();
  using Descriptor = TileDescriptor<kDim, kVariant>;
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
    if constexpr (multiplies_bias(kVariant)) {
      shared.bias_operands.write(stage, thread + i * kLoaders, has_huge ? 0.0f : bias_of[i] * call.over_scale);
      if (!has_huge) continue;
    }
    descriptor.key_bias[Descriptor::bias_place(thread + i * kLoaders)] = has_huge ? bias_of[i] : bias_of[i] * call.over_scale;
  }
}

// query [B, H, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv] -> tiles [rows, D], chunks [keys, D or Dv] in shared memory,
// as the descriptors say. One half of the loading threads brings keys and queries, the other values, by the same code; is_single:
// one thread of each half does, because tensor copies load all rows. loader: this thread's number among them.
template <int kDim, Variant kVariant>
__device__ __forceinline__ void load_tiles(const ForwardCall& call, const ForwardWork& work, const ForwardMaps& maps,
                                           ForwardShared<kDim, kVariant>& shared, int loader, bool is_single) {
  constexpr ForwardShape kShape = kForwardShape<kDim, kVariant>;
  using Descriptor = TileDescriptor<kDim, kVariant>;
  constexpr int kPanels = kDim / 64, kRows = kShape.rows(), kLoaders = kShape.loaders(),
                kQueryTileDescriptors = ForwardShared<kDim, kVariant>::kQueryTileDescriptors;
  const AttentionParams& p = call.p;
  const int thread = loader % kLoaders;
  const bool is_keys = __shfl_sync(0xffffffffu, loader < kLoaders, 0);  // known to be the same in all lanes
  if (is_single && thread != 0) return;
  const Ring<kShape.descriptors> descriptor_full{shared_address(shared.descriptor_full)},
      descriptor_empty{shared_address(shared.descriptor_empty)};
  const uint32_t full = shared_address(is_keys ? shared.key_full : shared.value_full);
  using Shared = ForwardShared<kDim, kVariant>;
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
  // for when some copies of the next chunk have been started, or before anything else is waited for. With kKeyBias it is so for
  // chunks with dead rows, which are cleared when the tensor copy has landed; so their descriptors are freed then.
  uint32_t due = 0;             // the barrier of a chunk that is not announced yet; 0: there is none
  uint32_t due_descriptor = 0;  // the number of its descriptor
  uint32_t landed_phases = 0;   // the parity of each stage's landed barrier, a bit each
  constexpr int kDeadWords = kVariant == Variant::kKeyBias ? (kShape.keys + 31) / 32 : 1;
  // Announces it. Called before anything else is waited for, because that may itself be waiting for this chunk.
  auto settle = [&] {
    if (!due) return;
    if constexpr (kVariant == Variant::kKeyBias) {
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
  constexpr bool kIsGathered = gathers_keys(kVariant), kHasKeyBias = kVariant == Variant::kKeyBias,
                 kStartsWithBias = starts_with_bias(kVariant), kCopiesSeenRows = kVariant == Variant::kRange;
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
    const WorkTile<kVariant> tile(call, work, blockIdx.x);
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
    const bool in_order = is_dense(kVariant) || flags & kInOrder, has_dead = kHasKeyBias && flags & kGaps;
    if (flags & kFirst) {
      batch = descriptor.batch, kv_head = descriptor.head / group;
      from = static_cast<const char*>(tensor.data) + (batch * tensor.batch_stride + kv_head * tensor.head_stride) * 2;
      if constexpr (copies_bias(kVariant)) {
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
    if (!is_dense(kVariant) && !kCopiesSeenRows && !in_order) {
      // The gathered variant has separate code for chunks without missing rows.
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
        to_tell = shared_address(&shared.landed[is_keys ? 0 : 1][kHasKeyBias ? stage : 0]);
      }
      barrier_expect(to_tell, kShape.keys * kDim * 2);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        copy_box(tile + panel * (kShape.keys * 128), map, to_tell, panel * 64, descriptor.first_key, kv_head, batch);
      }
      if constexpr (copies_bias(kVariant)) {
        if (is_keys) load_bias(n, descriptor.first_key);
      }
    }
    if (has_bias) write_key_bias(call, shared, descriptor, loader, stage, bias_of);
    if (!is_single) {
      settle();
      if (in_order && !has_dead) {
        if (multiplies_bias(kVariant) && has_bias) fence_async();
        barrier_arrive(stage_full);
      } else if constexpr (kHasKeyBias) {
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
