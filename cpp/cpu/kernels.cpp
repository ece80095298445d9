// The CPU attention kernels of one instruction set, as a table of phases; DMATTN_CPU_LEVEL names the set.
#include "kernels.h"

#include "backward_head.h"
#include "decode_split.h"
#include "forward_lists.h"
#include "index_loss.h"
#include "index_scores.h"

namespace dmattn::cpu {
namespace {

// Forward: phase 0 summarises the mask, phase 1 computes query tiles, the longest of a causal head first.
template <class R>
PhaseSizes forward_sizes_as(const AttentionParams& p) {
  Arena shared(nullptr), scratch(nullptr);
  const Summaries summaries = take_summaries(shared, p);
  ForwardScratch<R> measured(scratch, p);
  static_cast<void>(measured);
  return {
      {summary_tasks(summaries), p.batch * p.kv_heads * joint_sets(p) * query_tiles(p), 0, 0, 0}, scratch.used(), shared.used()};
}

template <class R>
void forward_as(const AttentionParams& p, int phase, int64_t task, void* scratch, void* shared) {
  Arena arena(shared);
  const Summaries summaries = take_summaries(arena, p);
  if (phase == 0) return summarise(p, summaries, task);
  const int64_t tiles = query_tiles(p), sets = joint_sets(p), head = task / tiles / sets;
  const ListTile tile = list_tile(p, head / p.kv_heads, head % p.kv_heads, task / tiles % sets, tiles - 1 - task % tiles);
  if (p.mask.index.entries.data) return forward_list_tile<R>(p, summaries, tile, scratch);
  forward_tile<R>(p, summaries, tile.tile, scratch);
}

// Backward: phase 0 summarises the mask, 1 computes, 2 adds up parts, 3 and 4 finish the gradients of key_bias and of a shared
// bias.
template <class R>
PhaseSizes backward_sizes_as(const BackwardCall& c) {
  const AttentionParams& p = c.params.forward;
  Arena shared_arena(nullptr), scratch(nullptr);
  const BackwardShared<R> shared(shared_arena, c);
  BackwardScratch<R> measured(scratch, p);
  static_cast<void>(measured);
  if (!shared.direct && shared.parts == 1)
    scratch.take<R>(p.key_length * (shared.key_stride + shared.value_stride) + kVectorBytes);
  const int64_t groups = p.batch * p.kv_heads;
  const int64_t key_bias_tasks =
      c.params.grad_key_bias && p.heads > 0 ? c.key_bias_batches * (p.heads / p.key_bias.head_divisor) : 0;
  return {{summary_tasks(shared.summaries), groups * shared.parts, shared.parts > 1 ? groups * reduce_blocks(p) : 0,
           key_bias_tasks, shared_bias_tasks(c, shared.parts)},
          scratch.used(),
          shared_arena.used()};
}

template <class R>
void backward_as(const BackwardCall& c, int phase, int64_t task, void* scratch, void* shared_memory) {
  Arena arena(shared_memory);
  const BackwardShared<R> shared(arena, c);
  switch (phase) {
    case 0: return summarise(c.params.forward, shared.summaries, task);
    case 1: return backward_task<R>(c, shared, task, scratch);
    case 2: return reduce_parts_task<R>(c, shared, task);
    case 3: return reduce_key_bias_task<R>(c, shared.parts, shared.key_bias_sums, task);
    default: return shared_bias_task<R>(c, shared.summaries, task, scratch);
  }
}

// Decode: phase 0 computes splits of the keys, phase 1 adds them up.
template <class R>
PhaseSizes decode_sizes_as(const DecodeParams& p) {
  Arena shared_arena(nullptr), scratch(nullptr);
  const DecodeShared<R> shared(shared_arena, p);
  DecodeScratch<R> measured(scratch, p);
  static_cast<void>(measured);
  const int64_t heads = p.batch * decode_heads(p);
  return {{heads * shared.splits * decode_tiles(p), heads, 0, 0, 0}, scratch.used(), shared_arena.used()};
}

template <class R>
void decode_as(const DecodeParams& p, int phase, int64_t task, void* scratch, void* shared_memory) {
  Arena arena(shared_memory);
  const DecodeShared<R> shared(arena, p);
  if (phase == 0) return decode_split_task<R>(p, shared, task, scratch);
  merge_splits_task<R>(p, shared, task, scratch);
}

PhaseSizes forward_sizes(const AttentionParams& p) {
  return p.dtype == DType::kFloat64 ? forward_sizes_as<double>(p) : forward_sizes_as<float>(p);
}

void forward(const AttentionParams& p, int phase, int64_t task, void* scratch, void* shared) {
  (p.dtype == DType::kFloat64 ? forward_as<double> : forward_as<float>)(p, phase, task, scratch, shared);
}

PhaseSizes backward_sizes(const BackwardCall& c) {
  return c.params.forward.dtype == DType::kFloat64 ? backward_sizes_as<double>(c) : backward_sizes_as<float>(c);
}

void backward(const BackwardCall& c, int phase, int64_t task, void* scratch, void* shared) {
  (c.params.forward.dtype == DType::kFloat64 ? backward_as<double> : backward_as<float>)(c, phase, task, scratch, shared);
}

PhaseSizes decode_sizes(const DecodeParams& p) {
  return p.dtype == DType::kFloat64 ? decode_sizes_as<double>(p) : decode_sizes_as<float>(p);
}

void decode(const DecodeParams& p, int phase, int64_t task, void* scratch, void* shared) {
  (p.dtype == DType::kFloat64 ? decode_as<double> : decode_as<float>)(p, phase, task, scratch, shared);
}

}  // namespace

#define DMATTN_TEXT_OF(x) #x
#define DMATTN_TEXT(x) DMATTN_TEXT_OF(x)
#define DMATTN_JOIN_OF(a, b) a##b
#define DMATTN_JOIN(a, b) DMATTN_JOIN_OF(a, b)

extern const Kernels DMATTN_JOIN(kKernels_, DMATTN_CPU_LEVEL);
const Kernels DMATTN_JOIN(kKernels_, DMATTN_CPU_LEVEL) = {DMATTN_TEXT(DMATTN_CPU_LEVEL),
                                                          forward_sizes,
                                                          forward,
                                                          backward_sizes,
                                                          backward,
                                                          decode_sizes,
                                                          decode,
                                                          index_scratch_bytes,
                                                          index_scores,
                                                          index_loss_scratch_bytes,
                                                          index_loss};

}  // namespace dmattn::cpu
