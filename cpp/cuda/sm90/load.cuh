// What the warpgroups of a block share, and the warpgroup that loads: keys, values and queries into shared memory, as the notes
// say.
//
// The one surprise is that a gathered chunk is announced late: its rows come by ordinary copies, which have to land and be fenced
// before the tensor cores may read them, and until then the copies of the next chunk are started, if that can be done at once.
#pragma once

#include "walk.cuh"

namespace dmattn::cuda::sm90 {

struct Maps {
  CUtensorMap query;                     // D, packed heads, Sq, packs, B
  CUtensorMap key;                       // D, Sk, Hkv, B
  CUtensorMap value;                     // Dv, Sk, Hkv, B
  CUtensorMap out;                       // as query: Dv, packed heads, Sq, packs, B
  CUtensorMap packed_key, packed_value;  // D or Dv, capacity, Hkv, B
};

// The tile whose queries are in shared memory.
struct TileNote {
  int batch, head, first_query;
};

template <int kDim, Variant kVariant>
struct alignas(1024) ForwardShared {
  static constexpr ForwardShape kShape = kForwardShape<kDim, kVariant>;
  static constexpr int kTileNotes = 4;  // the output of a tile is written while its second successor may be loading
  static_assert(kTileNotes >= kShape.query_tiles + 2);
  uint16_t query[kShape.query_tiles][kRows * kDim];
  uint16_t key[kShape.stages][kShape.keys * kDim];
  uint16_t value[kShape.stages][kShape.keys * kDim];
  Note<kVariant, kShape.keys> notes[kShape.notes];
  TileNote tiles[kTileNotes];
  WalkQueues<kVariant> queues;
  uint64_t query_full[kShape.query_tiles], query_empty[kShape.query_tiles];
  uint64_t key_full[kShape.stages], key_empty[kShape.stages];
  uint64_t value_full[kShape.stages], value_empty[kShape.stages];
  uint64_t note_full[kShape.notes], note_empty[kShape.notes];
};

// A ring of barriers: the barrier of the n-th use, and its phase.
template <int kCount>
struct Ring {
  uint32_t base;
  __device__ __forceinline__ uint32_t at(uint32_t n) const { return base + 8 * (n % kCount); }
  __device__ __forceinline__ void wait_full(uint32_t n) const { barrier_wait(at(n), n / kCount & 1); }
  __device__ __forceinline__ void wait_empty(uint32_t n) const { barrier_wait(at(n), (n / kCount & 1) ^ 1); }
  __device__ __forceinline__ bool is_full(uint32_t n) const { return barrier_test(at(n), n / kCount & 1); }
  __device__ __forceinline__ bool is_empty(uint32_t n) const { return barrier_test(at(n), (n / kCount & 1) ^ 1); }
};

// Copies rows of a chunk from anywhere into a tile of panels, by half a warpgroup; with gaps, rows without a key become zeros. A
// thread copies every eighth row, where the swizzle is the same.
template <int kDim, int kKeys, bool kHasGaps, int kUnroll>
__device__ __forceinline__ void gather_rows(uint32_t tile, const int32_t* index, const char* rows, uint32_t row_bytes,
                                            int width) {
  constexpr int kChunks = kDim / 8, kGroups = kLoaders / kChunks;
  const int thread = static_cast<int>(threadIdx.x) % kLoaders, chunk = thread % kChunks;
  const bool in_row = chunk * 8 < width;
  const char* from = rows + (in_row ? chunk * 16 : 0);
  asm volatile("" : "+l"(from));  // one multiplication and addition gives a row's address
#pragma unroll kUnroll
  for (int residue = thread / kChunks; residue < 8; residue += kGroups) {
    const uint32_t to = tile + chunk / 8 * (kKeys * 128) + residue * 128 + (chunk % 8 ^ residue) * 16;
    const int4* const keys_of_residue = reinterpret_cast<const int4*>(&index[residue * (kKeys / 8)]);  // index_place
#pragma unroll
    for (int i = 0; i < kKeys / 8; i += 4) {
      const int4 four = keys_of_residue[i / 4];
      const int keys[4] = {four.x, four.y, four.z, four.w};
      const char* rows_from[4];  // all of them first: a copy holds its registers until it has read them
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        rows_from[j] = from + static_cast<uint64_t>(static_cast<uint32_t>(kHasGaps ? max(keys[j], 0) : keys[j])) * row_bytes;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) copy_async_16(to + (i + j) * 1024, rows_from[j], (!kHasGaps || keys[j] >= 0) && in_row);
    }
  }
}

// Loads what the notes say: one half of the warpgroup keys and queries, the other values. Without gathering, one thread of each
// does.
template <bool kIsKeys, int kDim, Variant kVariant>
__device__ __forceinline__ void load_tiles(const ForwardCall& call, const WorkPlan& work, const Maps& maps,
                                           ForwardShared<kDim, kVariant>& shared, bool is_single) {
  constexpr ForwardShape kShape = kForwardShape<kDim, kVariant>;
  constexpr int kPanels = kDim / 64, kTileNotes = ForwardShared<kDim, kVariant>::kTileNotes;
  const AttentionParams& p = call.p;
  const int thread = static_cast<int>(threadIdx.x) % kLoaders;
  if (is_single && thread != 0) return;
  const Ring<kShape.notes> note_full{shared_address(shared.note_full)}, note_empty{shared_address(shared.note_empty)};
  const Ring<kShape.stages> full{shared_address(kIsKeys ? shared.key_full : shared.value_full)},
      empty{shared_address(kIsKeys ? shared.key_empty : shared.value_empty)};
  const Ring<kShape.query_tiles> query_full{shared_address(shared.query_full)}, query_empty{shared_address(shared.query_empty)};
  const CUtensorMap* map = kIsKeys ? &maps.key : &maps.value;
  const Rows& rows = kIsKeys ? p.key : p.value;
  const int width = static_cast<int>(kIsKeys ? p.head_dim : p.value_dim), group = static_cast<int>(p.heads / p.kv_heads);

  // Copied rows have to be fenced before the tensor cores read them. So a chunk is announced when it has landed, which is looked
  // at after the copies of the next one have been started, or before that has to wait.
  bool is_due = false;
  auto announce = [&](uint32_t n) {
    fence_async();
    barrier_arrive(full.at(n));
  };
  constexpr int kUnroll = kVariant == Variant::kGathered ? 8 : 1;  // the others have no registers to spare, nor much to gather
  constexpr bool kCanHaveBias = kIsKeys && kVariant == Variant::kGathered;
  // Of the tile.
  int batch = 0, kv_head = 0;
  const char* from = nullptr;
  const float* bias = nullptr;
  uint32_t tiles = 0;
  // Before waiting for something else, or what waits for that chunk would wait with us.
  auto announce_due = [&](uint32_t n, bool is_ready) {
    if (!is_due || __all_sync(0xffffffffu, is_ready)) return;
    copy_async_wait<0>();
    announce(n - 1);
    is_due = false;
  };
  for (uint32_t n = 0;; ++n) {
    if (is_due) announce_due(n, note_full.is_full(n));
    note_full.wait_full(n);
    auto& note = shared.notes[n % kShape.notes];
    const uint32_t flags = note.flags, stage = n % kShape.stages;
    if (is_due) announce_due(n, empty.is_empty(n));
    empty.wait_empty(n);
    if (flags & kEnd) {
      copy_async_wait<0>();
      if (is_due) announce(n - 1);
      barrier_arrive(full.at(n));
      if (!is_single && thread == 0) barrier_arrive(full.at(n));  // as for every chunk: each thread once, the first twice
      return;
    }
    if (flags & kFirst) {
      batch = note.batch, kv_head = note.head / group;
      from = static_cast<const char*>(rows.data) + (batch * rows.batch_stride + kv_head * rows.head_stride) * 2;
      if (kCanHaveBias) bias = row_of<const float>(p.key_bias, batch, note.head);
      if constexpr (kVariant == Variant::kGathered) {
        const bool is_from_packed = flags & kPacked;
        map = kIsKeys ? is_from_packed ? &maps.packed_key : &maps.key : is_from_packed ? &maps.packed_value : &maps.value;
        if (kCanHaveBias && bias && is_from_packed) {
          bias = call.packed.key_bias + (batch * p.kv_heads + kv_head) * call.packed.capacity;
        }
      }
    }
    const bool has_bias = kCanHaveBias && bias, in_order = flags & kInOrder;
    if (has_bias) {
      for (int i = thread; i < kShape.keys; i += kLoaders) {
        const int key = in_order ? note.base + i : note.index[Note<kVariant, kShape.keys>::index_place(i)];
        float* const to = &note.key_bias[Note<kVariant, kShape.keys>::bias_place(i)];
        if (key >= 0) {
          copy_async_4(shared_address(to), bias + key, true);
        } else {
          *to = negative_infinity();
        }
      }
    }
    const uint32_t tile = shared_address(kIsKeys ? shared.key[stage] : shared.value[stage]);
    if (kVariant != Variant::kDense && !in_order) {
      const uint32_t row_bytes = static_cast<uint32_t>(rows.row_stride * 2);
      if (flags & (kSpans | kBits | kGaps)) {
        gather_rows<kDim, kShape.keys, true, kUnroll>(tile, note.index, from, row_bytes, width);
      } else {
        gather_rows<kDim, kShape.keys, false, kUnroll>(tile, note.index, from, row_bytes, width);
      }
      if (thread == 0) barrier_arrive(full.at(n));
    } else if (thread == 0) {
      barrier_expect(full.at(n), kShape.keys * kDim * 2);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        copy_box(tile + panel * (kShape.keys * 128), map, full.at(n), panel * 64, note.base, kv_head, batch);
      }
    }
    if (!is_single) {
      const bool has_copies = has_bias || !in_order;
      copy_async_commit();
      if (is_due) {
        copy_async_wait<1>();
        announce(n - 1);
      }
      is_due = has_copies;
      if (!has_copies) barrier_arrive(full.at(n));
      if (is_due && kIsKeys && flags & kFirst) {  // at once: what is waited for next may wait for these keys
        copy_async_wait<0>();
        announce(n);
        is_due = false;
      }
    }
    if (kIsKeys && flags & kFirst) {
      if (thread == 0) {
        query_empty.wait_empty(tiles);
        shared.tiles[tiles % kTileNotes] = {batch, note.head, note.first_query};
        barrier_expect(query_full.at(tiles), kRows * kDim * 2);
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
          copy_box(shared_address(shared.query[tiles % kShape.query_tiles]) + panel * (kRows * 128), &maps.query,
                   query_full.at(tiles), panel * 64, 0, note.first_query, note.head >> work.pack_shift, batch);
        }
      }
      ++tiles;
    }
    barrier_arrive(note_empty.at(n));
  }
}

}  // namespace dmattn::cuda::sm90
