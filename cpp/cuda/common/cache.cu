// A bounded cache on CUDA: kernels that take one token in, put cached and new keys in order, find the places of many new tokens,
// or take tokens back.
#include <algorithm>

#include "../cache.h"
#include "cache_slots.cuh"
#include "dependent_launch.cuh"
#include "kernel_limits.cuh"

namespace dmattn::cuda {
namespace {

constexpr int kUpdateThreads = 256, kPlaceThreads = 1024, kCopyThreads = 256;
constexpr int kJoinThreads = 128, kJoinRows = 32, kJoinLanes = kJoinThreads / kJoinRows;
constexpr int kPerThread = 4, kPiece = kPlaceThreads * kPerThread;  // tokens whose places are found at once
constexpr int32_t kUnchanged = -1;

// The slots of a key head (cache_slots.cuh) and a new token; all that a step asks for is read before anything is written.
struct StepSlots : Slots {
  const uint4 *new_key, *new_value;
  float score_of_new, score_of_ring = 0.0f;
  bool ring_is_empty = true;
  Worst worst_selected{};

  __device__ StepSlots(const CacheParams& params, int index, Worst* shared) : Slots(params, index) {
    new_key = row_of_chunk(p.new_key, batch, head, 0), new_value = row_of_chunk(p.new_value, batch, head, 0);
    score_of_new = new_score(p, batch, head);
    if (p.local > 0 && step >= p.sink) {
      const int32_t ring = ring_slot(p, step);
      ring_is_empty = position[ring] < 0, score_of_ring = score[ring];
    }
    // Find the worst selected key: of this thread, of the warp, of the block.
    Worst found = none_is_worst(p);
#pragma unroll 4
    for (int32_t slot = first_selected_slot(p) + thread; slot < first_log_slot(p); slot += kUpdateThreads) {
      const Worst other{score[slot], position[slot], slot};
      if (other.is_worse_than(found)) found = other;
    }
    found = worst_of_warp(found);
    if (thread % 32 == 0) shared[thread / 32] = found;
    __syncthreads();
    worst_selected = shared[0];
#pragma unroll
    for (int warp = 1; warp < kUpdateThreads / 32; ++warp) {
      if (shared[warp].is_worse_than(worst_selected)) worst_selected = shared[warp];
    }
  }

  __device__ bool is_empty(int32_t) const { return ring_is_empty; }
  __device__ float score_of(int32_t row) const { return row == kNewRow ? score_of_new : score_of_ring; }
  __device__ Worst worst() const { return worst_selected; }

  __device__ void copy(int32_t row, int32_t slot) {
    if (row != kNewRow) return Slots::copy(row, slot);
    const int64_t to = slot;
    if (thread < key_pieces) {
      key[to * key_pieces + thread] = new_key[thread];
    } else if (thread < key_pieces + value_pieces) {
      value[to * value_pieces + thread - key_pieces] = new_value[thread - key_pieces];
    }
    if (writes_numbers) score[to] = score_of_new, position[to] = step;
  }
};

// One new token of each sequence -> the slots of each head.
__global__ __launch_bounds__(kUpdateThreads) void update_kernel(const __grid_constant__ CacheParams p) {
  __shared__ Worst shared[kUpdateThreads / 32];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int task = static_cast<int>(blockIdx.x);
  if (p.lengths && p.lengths[task / static_cast<int>(p.kv_heads)] <= 0) return;
  StepSlots slots(p, task, shared);
  if (slots.step < 0 || slots.step == 0x7fffffff) return;
  take_token<float>(p, slots.step, slots);
  if (threadIdx.x == 0) {
    p.steps[task] = slots.step + 1;
    p.kept[task] = min(p.kept[task], p.rewind - 1) + 1;
  }
}

// count [B] -> the slots as they were so many tokens ago, or empty where that is not known.
__global__ __launch_bounds__(kUpdateThreads) void rewind_kernel(const __grid_constant__ CacheParams p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int task = static_cast<int>(blockIdx.x);
  Slots slots(p, task);
  const int32_t count = p.count[slots.batch], kept = min(min(p.kept[task], p.rewind), slots.step);
  __syncthreads();
  if (count == 0) return;
  const bool is_known = count > 0 && count <= kept;
  if (is_known) {
    for (int32_t i = 0; i < count; ++i) take_back(p, --slots.step, slots);
  } else {
    for (int32_t slot = 0; slot < p.slots; ++slot) slots.copy(kEmptyRow, slot);
    for (int32_t row = 0; row < p.rewind; ++row) slots.set_entered(row, kNoSlot);
  }
  if (threadIdx.x == 0) {
    p.steps[task] = is_known ? slots.step : 0;
    p.kept[task] = is_known ? kept - count : 0;
  }
}

// The keys of a chunk for one head, by their index among cached and new ones, and the scratch for their places.
struct ChunkKeys {
  int visible, first, keys, taken;  // `first` competes at the first token
  const int32_t *position, *end;    // [keys]
  const int32_t* slot;              // [visible]
  int32_t* victim;                  // [tokens]: the key that dies at a token, -1 for none
  int32_t* entered;                 // [tokens]: the slot that the key takes which competes at a token, or kNoSlot
  int32_t* source;                  // [slots]: the key that a slot takes, kUnchanged or kEmptyRow

  __device__ ChunkKeys(const CacheParams& p, int task, int batch, int32_t* workspace) {
    visible = first_log_slot(p), first = visible - p.local, keys = visible + p.tokens;
    taken = p.lengths ? max(0, min(p.lengths[batch], p.tokens)) : p.tokens;
    const int64_t at = task;
    position = p.all_position + at * keys, end = p.all_end + at * keys, slot = p.all_slot + at * visible;
    victim = workspace + at * (2 * static_cast<int64_t>(p.tokens) + p.slots);
    entered = victim + p.tokens, source = entered + p.tokens;
  }
};

// Exclusive sums over the block's threads, and the total.
__device__ int2 sums_before(int count, int* warp_sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int sum = count;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += other;
  }
  __syncthreads();  // the sums of the call before have been read
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0, total = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
    before += w < warp ? warp_sums[w] : 0;
    total += warp_sums[w];
  }
  return {before + sum - count, total};
}

// Finds the slots that keys take at tokens base, base + 1, ...: a key takes the slot of the one that dies, who may have taken it
// from another one since `base`. Such chains are followed in steps of doubled length. Returns the next empty slot.
__device__ int find_piece(const CacheParams& p, const ChunkKeys& chunk, int base, int next_empty, int* begin, int* before,
                          int* warp_sums) {
  const int first_token = static_cast<int>(threadIdx.x) * kPerThread;
  bool has_entered[kPerThread];
  int victims[kPerThread], empties = 0;
#pragma unroll
  for (int e = 0; e < kPerThread; ++e) {
    const int token = base + first_token + e;
    const bool exists = token < chunk.taken;
    victims[e] = exists ? chunk.victim[token] : -1;
    // A key that dies before it competes is a wrong end: nothing takes its place, and no chain leads to a later token.
    has_entered[e] = exists && chunk.position[chunk.first + token] >= p.sink && victims[e] < chunk.first + token;
    empties += has_entered[e] && victims[e] < 0;
  }
  const int2 sums = sums_before(empties, warp_sums);
  int empty = next_empty + sums.x;
#pragma unroll
  for (int e = 0; e < kPerThread; ++e) {
    const int link = victims[e] - chunk.first;  // the token at which the victim was selected, if it was in this chunk
    const bool is_linked = has_entered[e] && link >= base;
    int slot = kNoSlot;
    if (has_entered[e] && victims[e] < 0) slot = empty++;
    if (has_entered[e] && victims[e] >= 0 && !is_linked) {
      slot = link < 0 ? chunk.slot[victims[e]] : chunk.entered[link];
    }
    begin[first_token + e] = slot;
    before[first_token + e] = is_linked ? link - base : first_token + e;
  }
  for (bool is_done = false; !is_done;) {
    __syncthreads();
    int further[kPerThread];
    bool moves = false;
#pragma unroll
    for (int e = 0; e < kPerThread; ++e) {
      const int here = before[first_token + e];
      further[e] = before[here];
      moves |= further[e] != here;
    }
    is_done = !__syncthreads_or(moves);
#pragma unroll
    for (int e = 0; e < kPerThread; ++e) before[first_token + e] = further[e];
  }
#pragma unroll
  for (int e = 0; e < kPerThread; ++e) {
    const int token = base + first_token + e;
    if (token < chunk.taken) chunk.entered[token] = has_entered[e] ? begin[before[first_token + e]] : kNoSlot;
  }
  __syncthreads();
  return next_empty + sums.y;
}

// all_position, all_slot, all_end -> what each slot takes (in the workspace), entered, steps, kept.
__global__ __launch_bounds__(kPlaceThreads) void places_kernel(const __grid_constant__ CacheParams p, int32_t* workspace) {
  __shared__ int begin[kPiece], before[kPiece], warp_sums[kPlaceThreads / 32];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int task = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const Slots slots(p, task);
  const ChunkKeys chunk(p, task, slots.batch, workspace);
  const bool is_wrong = slots.step < 0 || slots.step > 0x7fffffff - chunk.taken;
  // Note who dies at which token, and count the selected keys.
  for (int slot = thread; slot < p.slots; slot += kPlaceThreads) chunk.source[slot] = kUnchanged;
  if (is_wrong) return;
  for (int token = thread; token < chunk.taken; token += kPlaceThreads) chunk.victim[token] = -1;
  __syncthreads();
  int selected = 0;
  for (int key = thread; key < chunk.keys; key += kPlaceThreads) {
    const bool exists = chunk.position[key] >= 0;
    const int token = chunk.end[key] - chunk.visible;
    if (exists && token >= 0 && token < chunk.taken) chunk.victim[token] = key;
    selected += exists && key < chunk.visible && chunk.slot[key] >= first_selected_slot(p);
  }
  int next_empty = first_selected_slot(p) + sums_before(selected, warp_sums).y;
  __syncthreads();
  // Find the slots of newly selected keys.
  for (int base = 0; base < chunk.taken; base += kPiece) {
    next_empty = find_piece(p, chunk, base, next_empty, begin, before, warp_sums);
  }
  // Say what each slot takes. What lies in its slot already stays there.
  const int after = slots.step + chunk.taken;
  for (int key = thread; key < chunk.keys; key += kPlaceThreads) {
    const int position = chunk.position[key];
    if (position < 0 || chunk.end[key] != chunk.visible + chunk.taken) continue;
    const bool is_local = p.local > 0 && position >= after - p.local;
    const int slot = position < p.sink                 ? position
                     : is_local                        ? ring_slot(p, position)
                     : key < chunk.first               ? chunk.slot[key]
                     : key - chunk.first < chunk.taken ? chunk.entered[key - chunk.first]
                                                       : kNoSlot;
    if (slot < 0 || slot >= chunk.visible) continue;
    if (key >= chunk.first || slots.position[slot] != position) chunk.source[slot] = key;
  }
  // Log the last tokens.
  for (int token = max(0, chunk.taken - p.rewind) + thread; token < chunk.taken; token += kPlaceThreads) {
    const int row = (slots.step + token) % p.rewind;
    chunk.source[chunk.visible + row] = chunk.victim[token] < 0 ? kEmptyRow : chunk.victim[token];
    slots.entered[row] = chunk.entered[token];
  }
  if (thread == 0) {
    p.steps[task] = after;
    p.kept[task] = min(p.kept[task], p.rewind - chunk.taken) + chunk.taken;
  }
}

// What places_kernel says -> slots. A warp copies a row.
__global__ __launch_bounds__(kCopyThreads) void copy_kernel(const __grid_constant__ CacheParams p, int32_t* workspace) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kCopyThreads / 32) + threadIdx.x / 32;
  if (row >= p.batch * p.kv_heads * p.slots) return;
  const int task = static_cast<int>(row / p.slots), slot = static_cast<int>(row % p.slots);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Slots slots(p, task);
  const ChunkKeys chunk(p, task, slots.batch, workspace);
  const int source = chunk.source[slot];
  if (source == kUnchanged) return;
  const bool is_empty = source == kEmptyRow;
  const uint4* const key = row_of_chunk(p.all_key, slots.batch, slots.head, is_empty ? 0 : source);
  const uint4* const value = row_of_chunk(p.all_value, slots.batch, slots.head, is_empty ? 0 : source);
  uint4* const to_key = slots.key + static_cast<int64_t>(slot) * slots.key_pieces;
  uint4* const to_value = slots.value + static_cast<int64_t>(slot) * slots.value_pieces;
  for (int at = lane; at < slots.key_pieces + slots.value_pieces; at += 32) {
    const int in_value = at - slots.key_pieces;
    uint4& to = in_value < 0 ? to_key[at] : to_value[in_value];
    to = is_empty ? uint4{} : in_value < 0 ? key[at] : value[in_value];
  }
  if (lane == 0) {
    const float* const scores = static_cast<const float*>(p.all_score) + static_cast<int64_t>(task) * chunk.keys;
    slots.score[slot] = is_empty ? negative_infinity() : scores[source];
    slots.position[slot] = is_empty ? kNoPosition : chunk.position[source];
  }
}

// The slots of each head and its new tokens -> both joined, slot, segment_end. A block takes kJoinRows slots, finds how many keys
// stand in front of each by comparing it with all others, and copies them; or it copies as many new tokens. kJoinLanes threads
// share a row.
__global__ __launch_bounds__(kJoinThreads) void join_kernel(const __grid_constant__ JoinParams join) {
  __shared__ int positions[kJoinThreads], index[kJoinRows];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const CacheParams& p = join.cache;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kJoinLanes;
  const int old_blocks = (join.visible + kJoinRows - 1) / kJoinRows;
  const int blocks = old_blocks + (p.tokens + kJoinRows - 1) / kJoinRows;
  const int task = static_cast<int>(blockIdx.x) / blocks, block = static_cast<int>(blockIdx.x) % blocks;
  const bool is_new = block >= old_blocks;
  const int first = (is_new ? block - old_blocks : block) * kJoinRows;
  const int rows = min(kJoinRows, (is_new ? p.tokens : join.visible) - first), row = first + thread / kJoinLanes;
  const Slots slots(p, task);
  const int taken = p.lengths ? max(0, min(p.lengths[slots.batch], p.tokens)) : p.tokens;
  const int64_t keys = join.visible + p.tokens, head_first = task * keys;
  // Find the row's place: new tokens stand behind all slots.
  int place = join.visible + row;
  if (!is_new) {
    const int own = row < join.visible ? slots.position[row] : 0;
    place = 0;
    for (int base = 0; base < join.visible; base += kJoinThreads) {
      __syncthreads();
      positions[thread] = base + thread < join.visible ? slots.position[base + thread] : 0x7fffffff;
      __syncthreads();
#pragma unroll 8
      for (int other = lane; other < kJoinThreads; other += kJoinLanes) {
        const int at = positions[other];
        place += (at < own) | ((at == own) & (base + other < row));
      }
    }
#pragma unroll
    for (int distance = 1; distance < kJoinLanes; distance *= 2) place += __shfl_xor_sync(~0u, place, distance);
  }
  if (lane == 0) index[thread / kJoinLanes] = place;
  // Write the numbers of the row.
  if (lane == 0 && row < first + rows) {
    const int next = slots.step > 0x7fffffff - row ? 0x7fffffff : slots.step + row;
    const int at = is_new ? row < taken ? next : kNoPosition : slots.position[row];
    static_cast<float*>(join.score)[head_first + place] = is_new ? new_score(p, slots.batch, slots.head, row) : slots.score[row];
    join.position[head_first + place] = at;
    join.segment_end[head_first + place] = at >= 0 ? join.visible + taken : 0;
    if (!is_new) join.slot[static_cast<int64_t>(task) * join.visible + place] = row;
  }
  __syncthreads();
  // Copy keys and values: neighbouring threads take neighbouring pieces of a row, and some pieces are on their way at once.
  const auto copy_rows = [&](const uint4* cached, const TensorView& fresh, void* joined, int pieces) {
    constexpr int kAtOnce = 4;
    uint4* const to = static_cast<uint4*>(joined) + head_first * pieces;
    for (int begin = thread; begin < rows * pieces; begin += kJoinThreads * kAtOnce) {
      uint4 piece[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = begin + i * kJoinThreads, from = at / pieces;
        if (at >= rows * pieces) break;
        const uint4* const source = is_new ? row_of_chunk(fresh, slots.batch, slots.head, first + from)
                                           : cached + static_cast<int64_t>(first + from) * pieces;
        piece[i] = source[at - from * pieces];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = begin + i * kJoinThreads, from = at / pieces;
        if (at < rows * pieces) to[static_cast<int64_t>(index[from]) * pieces + at - from * pieces] = piece[i];
      }
    }
  };
  copy_rows(slots.key, p.new_key, join.key, slots.key_pieces);
  copy_rows(slots.value, p.new_value, join.value, slots.value_pieces);
}

unsigned heads_of(const CacheParams& p) { return grid_of(p.batch * p.kv_heads); }

}  // namespace

cudaError_t launch_cache_update(const CacheParams& p, cudaStream_t stream) {
  return launch_dependent(update_kernel, heads_of(p), kUpdateThreads, 0, stream, p);
}

cudaError_t launch_cache_rewind(const CacheParams& p, cudaStream_t stream) {
  return launch_dependent(rewind_kernel, heads_of(p), kUpdateThreads, 0, stream, p);
}

cudaError_t launch_cache_join(const JoinParams& join, cudaStream_t stream) {
  const int blocks = (join.visible + kJoinRows - 1) / kJoinRows + (join.cache.tokens + kJoinRows - 1) / kJoinRows;
  const unsigned grid = grid_of(join.cache.batch * join.cache.kv_heads * blocks);
  return launch_dependent(join_kernel, grid, kJoinThreads, 0, stream, join);
}

cudaError_t launch_cache_extend(const CacheParams& p, int32_t* workspace, cudaStream_t stream) {
  const cudaError_t status = launch_dependent(places_kernel, heads_of(p), kPlaceThreads, 0, stream, p, workspace);
  if (status != cudaSuccess) return status;
  const int64_t rows = p.batch * p.kv_heads * p.slots, warps = kCopyThreads / 32;
  return launch_dependent(copy_kernel, grid_of((rows + warps - 1) / warps), kCopyThreads, 0, stream, p, workspace);
}

}  // namespace dmattn::cuda
