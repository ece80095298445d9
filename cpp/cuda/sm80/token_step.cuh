// How a decoding kernel takes a new token into the bounded cache whose keys it reads.
//
// Keys are copied as they were, and the rows that the token changes are patched in shared memory. A block sees the scores of its
// own keys alone, and one block writes, when all have read.
#pragma once

#include "../common/cache_slots.cuh"
#include "../decode_call.h"
#include "../ptx/cluster.cuh"
#include "decode_parts.cuh"

namespace dmattn::cuda::sm80 {

// The new token's row and that of the local window's oldest key. What each warp of the block, or of the cluster, found lies
// behind: score, position and slot of the worst selected key.
template <int kDim, int kWarps>
struct alignas(128) TokenShared {
  static constexpr int kPieces = 2 * kDim / 8;  // of key and value
  uint4 rows[2][kPieces];
  DsmemExchange exchange;  // for what other blocks found
  __device__ __forceinline__ float4* worst() { return reinterpret_cast<float4*>(this + 1); }
  // A multiple of 128.
  static __host__ __device__ constexpr int bytes(int parts) {
    return static_cast<int>(sizeof(TokenShared)) + (parts * kWarps * static_cast<int>(sizeof(float4)) + 127) / 128 * 128;
  }
};

// What take_token decides, without writing anything: which rows change of those that queries see.
struct TokenPlan {
  int32_t step = 0, ring = -1;  // ring: the slot of the local window that the step overwrites, or -1
  float score_of_new = 0.0f, score_of_ring = 0.0f;
  bool ring_is_empty = true;
  Worst worst_selected{};
  int32_t selected_slot = -1, selected_row = kNewRow,
          young_slot = -1;  // young: of sinks or the local window, takes the new token
  const CacheParams& p;

  __device__ __forceinline__ explicit TokenPlan(const CacheParams& params) : p(params) {}
  __device__ __forceinline__ bool is_empty(int32_t) const { return ring_is_empty; }
  __device__ __forceinline__ float score_of(int32_t row) const { return row == kNewRow ? score_of_new : score_of_ring; }
  __device__ __forceinline__ Worst worst() const { return worst_selected; }
  __device__ __forceinline__ void set_entered(int32_t, int32_t) {}
  __device__ __forceinline__ void copy(int32_t row, int32_t slot) {
    if (slot >= first_log_slot(p)) return;
    if (slot >= first_selected_slot(p)) {
      selected_slot = slot, selected_row = row;
    } else {
      young_slot = slot;
    }
  }
};

// The same with writing, from rows in shared memory.
struct TokenSlots : Slots {
  const TokenPlan& plan;
  const uint4* rows;
  int row_pieces;  // pieces of a row in shared memory

  __device__ __forceinline__ TokenSlots(const CacheParams& params, int task, const TokenPlan& plan, const uint4* rows,
                                        int row_pieces)
      : Slots(params, task), plan(plan), rows(rows), row_pieces(row_pieces) {}
  __device__ __forceinline__ bool is_empty(int32_t) const { return plan.ring_is_empty; }
  __device__ __forceinline__ float score_of(int32_t row) const { return plan.score_of(row); }
  __device__ __forceinline__ Worst worst() const { return plan.worst_selected; }
  __device__ __forceinline__ void copy(int32_t row, int32_t slot) {
    if (row != kNewRow && row != plan.ring) return Slots::copy(row, slot);
    const uint4* const from = rows + (row == kNewRow ? 0 : row_pieces);
    const int64_t to = slot;
    if (thread < key_pieces) {
      key[to * key_pieces + thread] = from[thread];
    } else if (thread < key_pieces + value_pieces) {
      const int piece = thread - key_pieces;
      value[to * value_pieces + piece] = from[row_pieces / 2 + piece];
    }
    if (writes_numbers) {
      const int32_t at = row == kNewRow ? step : position[row];
      score[to] = plan.score_of(row), position[to] = at;
    }
  }
};

// The steps of a kernel whose blocks have kWarps warps. First the loads are begun, then keys are copied, then it is decided.
template <int kDim, int kWarps>
struct TokenStep {
  using Shared = TokenShared<kDim, kWarps>;
  static constexpr int kAtOnce = 16;  // scores that a lane loads at once
  static constexpr int kRowPieces = Shared::kPieces;
  static_assert(kRowPieces <= 32 * kWarps);

  const CacheParams& p;
  Shared& shared;
  TokenPlan plan;
  int task, first, last;  // the selected slots of this warp
  bool is_taken = false, has_length = true;
  float scores[kAtOnce];
  int32_t positions[kAtOnce];
  uint4 piece{};  // of the new token's row

  __device__ __forceinline__ TokenStep(const CacheParams& params, Shared& shared, int batch, int head)
      : p(params), shared(shared), plan(params), task(batch * static_cast<int>(params.kv_heads) + head) {}

  // Begins to load what the step depends on; the block has the keys from first_key on.
  __device__ __forceinline__ void begin(int batch, int head, int first_key, int keys) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int share = (keys + kWarps - 1) / kWarps;
    first = max(first_key + warp * share, first_selected_slot(p)) + lane;
    last = min(min(first_key + (warp + 1) * share, first_key + keys), first_log_slot(p));
    plan.step = p.steps[task];
    has_length = !p.lengths || p.lengths[batch] > 0;
    plan.score_of_new = new_score(p, batch, head);
    load_scores(first);
    const int at = static_cast<int>(threadIdx.x), in_half = at % (kDim / 8);
    const bool is_value = at >= kDim / 8;
    const int pieces = pieces_of(is_value ? p.value_dim : p.head_dim);
    if (at < kRowPieces && in_half < pieces) piece = row_of_chunk(is_value ? p.new_value : p.new_key, batch, head, 0)[in_half];
  }
  // Finds the worst selected key of all blocks from what each warp finds among its own, and decides who is pushed out.
  __device__ __forceinline__ void decide(bool is_cluster, int parts, int part) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    is_taken = has_length && plan.step >= 0 && plan.step < 0x7fffffff;
    read_rows();
    Worst found = none_is_worst(p);
    for (int begin = first; begin - lane < last; begin += 32 * kAtOnce) {
      if (begin != first) load_scores(begin);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const Worst other{scores[i], positions[i], begin + 32 * i};
        if (begin + 32 * i < last && other.is_worse_than(found)) found = other;
      }
    }
    found = worst_of_warp(found);
    const float4 message{found.score, __int_as_float(found.position), __int_as_float(found.slot), 0.0f};
    if (is_cluster) {
      DsmemExchange::cluster_wait();
      if (lane < parts) shared.exchange.send(&shared.worst()[part * kWarps + warp], lane, message);
      shared.exchange.wait();
    } else {
      parts = 1;
      if (lane == 0) shared.worst()[warp] = message;
    }
    __syncthreads();
    found = none_is_worst(p);
    for (int at = lane; at < parts * kWarps; at += 32) {
      const float4 x = shared.worst()[at];
      const Worst other{x.x, __float_as_int(x.y), __float_as_int(x.z)};
      if (other.is_worse_than(found)) found = other;
    }
    plan.worst_selected = worst_of_warp(found);
    if (is_taken) take_token<float>(p, plan.step, plan);
  }
  // Puts the rows that change into a chunk of keys first, first + 1, .. that was copied before they did.
  template <int kKeys>
  __device__ __forceinline__ void patch_token(DecodeStage<kDim, kKeys>& stage, float* key_bias, int first) const {
    patch_row(stage, key_bias, plan.selected_slot - first, plan.selected_row == kNewRow ? 0 : 1,
              plan.score_of(plan.selected_row));
    patch_row(stage, key_bias, plan.young_slot - first, 0, plan.score_of_new);
  }
  // Writes the token, by all threads of one block.
  __device__ __forceinline__ void write() const {
    if (!is_taken) return;
    TokenSlots slots(p, task, plan, shared.rows[0], kRowPieces);
    take_token<float>(p, plan.step, slots);
    if (slots.writes_numbers) {
      p.steps[task] = plan.step + 1;
      p.kept[task] = min(p.kept[task], p.rewind - 1) + 1;
    }
  }

 private:
  __device__ __forceinline__ void load_scores(int begin) {
    const int64_t at = static_cast<int64_t>(task) * p.slots;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int slot = begin + 32 * i;
      if (slot < last) scores[i] = static_cast<const float*>(p.score)[at + slot], positions[i] = p.position[at + slot];
    }
  }
  // Brings the new token's row and that of the local window's oldest key to where all threads find them.
  __device__ __forceinline__ void read_rows() {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kRowPieces) shared.rows[0][thread] = piece;
    if (p.local == 0 || plan.step < p.sink) return;
    plan.ring = ring_slot(p, plan.step);
    const Slots slots(p, task);
    plan.ring_is_empty = slots.position[plan.ring] < 0, plan.score_of_ring = slots.score[plan.ring];
    if (thread < kRowPieces) {
      const bool is_value = thread >= kDim / 8;
      const int in_half = thread % (kDim / 8), pieces = is_value ? slots.value_pieces : slots.key_pieces;
      uint4 x{};
      if (in_half < pieces) x = (is_value ? slots.value : slots.key)[static_cast<int64_t>(plan.ring) * pieces + in_half];
      shared.rows[1][thread] = x;
    }
  }
  template <int kKeys>
  __device__ __forceinline__ void patch_row(DecodeStage<kDim, kKeys>& stage, float* key_bias, int row, int which,
                                            float score) const {
    if (row < 0 || row >= kKeys) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int at = lane; at < kRowPieces; at += 32) {
      uint16_t* const tile = at < kDim / 8 ? stage.keys : stage.values;
      uint8_t* const to = reinterpret_cast<uint8_t*>(tile) + Tile<kDim>::offset(row, at % (kDim / 8));
      *reinterpret_cast<uint4*>(to) = shared.rows[which][at];
    }
    if (lane == 0) key_bias[row] = score;
    __syncwarp();
  }
};

}  // namespace dmattn::cuda::sm80
