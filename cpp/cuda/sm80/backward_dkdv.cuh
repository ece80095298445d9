// The portable backward by keys: a block keeps a tile of keys and values and loops over the queries that see them. grad_key and
// grad_value stay in registers; grad_query is added in fp32 to global memory.
//
// It has a second job: without those adds (query_sums null) every sum has a fixed order. Together with the kernel of
// backward_dq.cuh, also without its adds, it is the deterministic backward.
//
// And a third: index lists of blocks (Keys::kQueryLists, key_lists/query_lists.h). The queries that list a tile are gathered,
// those of kRangeQueries at a time, and grad_key and grad_value are added to global memory, too.
#pragma once

#include <type_traits>

#include "../common/kernel_limits.cuh"
#include "backward_tile.cuh"
#include "listed_queries.cuh"

namespace dmattn::cuda::sm80 {

// The instance that takes every call, and tests spans, bits and options.
template <class Traits>
inline constexpr bool kIsGeneral = Traits::kKeys == Keys::kAny;

// What the general instance knows of its keys. The one without masks has keys in order and needs nothing.
template <int kQueries, int kKeys, int kWarpRows>
struct KeyTile {
  KeyStage<kQueries, kKeys> stage[2];  // spans, index and key_bias are the same in both stages
  float column_sums[kWarpRows][kKeys];
  float lse_rest2[2][kQueries];
  uint32_t seen[kKeys / 32];  // a bit for each key that some query sees, as far as a block mask says
  int32_t bounds[4];          // smallest and largest first, smallest and largest last of the tile's spans
};
struct PlainKeyTile {};

// How the warps of a block share a block of scores [queries, keys] and the gradients of the keys [keys, D or Dv].
template <int kDim, SmemBudget kSmemBudget>
struct BackwardDkdvLayout {
  static constexpr BackwardShape kShape = kBackwardDkdvShape<kDim, kSmemBudget>;
  static constexpr int kThreads = kShape.warps * 32, kWidth = kScoreWidth<kShape.keys>;
  // Scores: a grid of warps, each with 16 kM rows and 8 kN columns; of grad_query it has as many rows and 8 kDimN columns.
  static constexpr int kColumns = kShape.warps / kShape.warp_rows;
  static constexpr int kM = kShape.queries / kShape.warp_rows / 16, kN = kShape.keys / kColumns / 8;
  static constexpr int kDimN = kDim / kColumns / 8;
  // Gradients of the keys: 32 rows and 8 kRowN columns for a warp.
  static constexpr int kKeyWarps = kShape.keys / 32, kRowN = kDim / (kShape.warps / kKeyWarps) / 8;
};

template <int kDim, class Traits, SmemBudget kSmemBudget>
struct alignas(128) BackwardDkdvShared : BackwardDkdvLayout<kDim, kSmemBudget> {
  static constexpr BackwardShape kShape = kBackwardDkdvShape<kDim, kSmemBudget>;
  uint16_t key[kShape.keys * kDim];  // at the end grad_key and grad_value leave from the places of key and value
  uint16_t value[kShape.keys * kDim];
  uint16_t query[kShape.late_stages][kShape.queries * kDim];
  uint16_t grad_out[kShape.early_stages][kShape.queries * kDim];
  uint16_t probability[kShape.queries * kScoreWidth<kShape.keys>];
  uint16_t grad_score[kShape.queries * kScoreWidth<kShape.keys>];
  alignas(16) float lse2[2][kShape.queries];  // the general instance: lse as it is
  alignas(16) float delta[2][kShape.queries];
  std::conditional_t<kIsGeneral<Traits>, KeyTile<kShape.queries, kShape.keys, kShape.warp_rows>,
                     std::conditional_t<Traits::kGathersQueries, ListedQueryTile<kShape.queries>, PlainKeyTile>>
      tile;
};

// Schedules the queries that see a tile of keys in order: all of them, or with causality those from the tile on. A chunk is named
// by its first query, as those of listed queries (listed_queries.cuh) are by their first entry.
template <int kQueries, int kKeys>
class PlainQueryScheduler {
 public:
  // The query in a row of a chunk.
  static __device__ __forceinline__ int query_of(int first_query, int row) { return first_query + row; }
  static __device__ __forceinline__ int query_to_add(int first_query, int row) { return query_of(first_query, row); }
  // Starts the copies of what a chunk needs beside its rows and their terms, to a buffer.
  template <class Shared>
  __device__ __forceinline__ void copy_notes(Shared&, int, int) const {}

  __device__ __forceinline__ PlainQueryScheduler(const AttentionParams& p, int first_key)
      : stop_(static_cast<int>(p.query_length)) {
    const int shift = static_cast<int>(p.key_length - p.query_length);
    cursor_ = p.mask.is_causal ? max(0, first_key - shift) / kQueries * kQueries : 0;
    whole_from_ = p.mask.is_causal ? first_key + kKeys - 1 - shift : 0;
    if (first_key + kKeys > p.key_length) whole_from_ = stop_;
  }
  __device__ __forceinline__ bool next(int& first_query, Chunk& chunk) {
    if (cursor_ >= stop_) return false;
    first_query = cursor_;
    cursor_ += kQueries;
    chunk.needs_test = first_query < whole_from_;
    return true;
  }

 private:
  int cursor_, stop_, whole_from_;  // queries from whole_from_ on see every key of the tile
};

// Hides keys beyond the end and, with causality, keys after the query. `query` and `key` are those of the thread's first element.
template <int kM, int kN>
__device__ __forceinline__ void hide_in_order(float (&scores)[kM][kN][4], const AttentionParams& p, int query, int key) {
  const int key_length = static_cast<int>(p.key_length), shift = key_length - static_cast<int>(p.query_length);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int seen = (p.mask.is_causal ? min(key_length, query + 16 * m + 8 * r + shift + 1) : key_length) - key;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        if (8 * n >= seen) scores[m][n][2 * r] = negative_infinity();
        if (8 * n + 1 >= seen) scores[m][n][2 * r + 1] = negative_infinity();
      }
    }
  }
}

// Schedules the queries of one head in the general instance. All threads hold the same state.
template <int kThreads, int kQueries, int kKeys>
class QueryScheduler {
 public:
  using Stage = KeyStage<kQueries, kKeys>;

  __device__ __forceinline__ QueryScheduler(const AttentionParams& p, const int32_t (&bounds)[4], int batch, int head,
                                            int first_key)
      : p_(p), bounds_(bounds), shift_(static_cast<int>(p.key_length - p.query_length)) {
    // Positions [smallest first, largest last) see some key of the tile.
    const int query_length = static_cast<int>(p.query_length);
    cursor_ = max(0, bounds[0] - shift_) / kQueries * kQueries;
    stop_ = min(query_length, bounds[3] - shift_);
    if (!has_tiles()) return;
    const TileSource source(p.mask, batch, head);
    const int tile_column = first_key / static_cast<int>(p.mask.tile_k);
    bits_column_ = first_key % static_cast<int>(p.mask.tile_k) / 32;
    list_ = source.columns + tile_column * (p.mask.tiles_q + 1) + 1;
    states_ = source.tiles + tile_column;
    entries_ = min(max(list_[-1], 0), static_cast<int>(p.mask.tiles_q));
    tile_stop_ = 0;
    begin_ = cursor_;
    cursor_ = 0;
  }

  // The query in a row of a chunk.
  static __device__ __forceinline__ int query_of(int first_query, int row) { return first_query + row; }
  static __device__ __forceinline__ int query_to_add(int first_query, int row) { return query_of(first_query, row); }

  // Gives the next chunk, or false when none is left.
  __device__ __forceinline__ bool next(int& first_query, Chunk& chunk) {
    const uint32_t*& bits = bits_of_chunk_;
    bits = nullptr;
    if (has_tiles()) {
      while (cursor_ >= tile_stop_) {
        if (entry_ >= entries_) return false;
        const int tile = list_[entry_++];
        const int state = tile >= 0 && tile < p_.mask.tiles_q ? states_[tile * p_.mask.tiles_k] : kTileEmpty;
        if (!is_live_tile(p_.mask, state)) continue;
        const int tile_begin = tile * static_cast<int>(p_.mask.tile_q);
        cursor_ = max(tile_begin, begin_);
        tile_stop_ = min(tile_begin + static_cast<int>(p_.mask.tile_q), stop_);
        bits_ = bits_of_tile(p_.mask, state);
      }
      if (bits_) bits = bits_ + cursor_ % p_.mask.tile_q * (p_.mask.tile_k / 32) + bits_column_;
    } else if (cursor_ >= stop_) {
      return false;
    }
    first_query = cursor_;
    cursor_ += kQueries;
    chunk.has_bits = bits != nullptr;
    const int low = first_query + shift_, high = min(first_query + kQueries, static_cast<int>(p_.query_length)) - 1 + shift_;
    chunk.needs_test = bits || !(bounds_[1] <= low && high < bounds_[2]);
    return true;
  }

  // Starts the copies of the bits of the last chunk that `next` gave.
  template <class Shared>
  __device__ __forceinline__ void copy_notes(Shared& shared, int buffer, int) const {
    if (!bits_of_chunk_) return;
    Stage& stage = shared.tile.stage[buffer];
    const uint32_t* const bits = bits_of_chunk_;
    for (int at = threadIdx.x; at < kQueries * (kKeys / 32); at += kThreads) {
      stage.bits[at / (kKeys / 32)][at % (kKeys / 32)] = bits[at / (kKeys / 32) * (p_.mask.tile_k / 32) + at % (kKeys / 32)];
    }
  }

 private:
  __device__ __forceinline__ bool has_tiles() const { return p_.mask.tiles.data; }

  const AttentionParams& p_;
  const int32_t (&bounds_)[4];
  const int shift_;
  int cursor_, stop_, begin_ = 0, tile_stop_ = 0, entry_ = 0, entries_ = 0, bits_column_ = 0;
  const int32_t *list_ = nullptr, *states_ = nullptr;
  const uint32_t* bits_ = nullptr;           // of the tile of the block mask
  const uint32_t* bits_of_chunk_ = nullptr;  // where those of the chunk begin; null: it has none
};

// By the bits of a block mask and the spans of the keys: which keys of the tile does some query of the kv head's group see? Left
// in shared.tile.seen.
template <class Shared>
__device__ __forceinline__ void find_seen_by_bits(const AttentionParams& p, Shared& shared, int batch, int kv_head, int first_key,
                                                  int key) {
  constexpr int kKeys = Shared::kShape.keys, kThreads = Shared::kThreads, kWords = kKeys / 32;
  const int group = static_cast<int>(p.heads / p.kv_heads), thread = threadIdx.x;
  if (thread < kWords) shared.tile.seen[thread] = 0;
  __syncthreads();
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const TileSource source(p.mask, batch, head);
    const Span span =
        thread < kKeys ? SpanSource(p.mask, static_cast<int>(p.key_length), batch, head).of_key(key) : Span::empty();
    if (thread < kKeys) shared.tile.stage[0].span[thread] = span;
    __syncthreads();
    const int words = static_cast<int>(p.mask.tile_k / 32), column = first_key / static_cast<int>(p.mask.tile_k);
    const int32_t* const list = source.columns + column * (p.mask.tiles_q + 1);
    for (int entry = 0; entry < min(list[0], static_cast<int>(p.mask.tiles_q)); ++entry) {
      const int row = list[1 + entry];
      const int state = row >= 0 && row < p.mask.tiles_q ? source.tiles[row * p.mask.tiles_k + column] : kTileEmpty;
      if (!is_live_tile(p.mask, state)) continue;
      const uint32_t* const bits = bits_of_tile(p.mask, state);
      const int first_row = row * static_cast<int>(p.mask.tile_q);
      const int rows = min(static_cast<int>(p.mask.tile_q), static_cast<int>(p.query_length) - first_row);
      const int low = first_row + static_cast<int>(p.key_length - p.query_length);
      const bool is_whole = __syncthreads_and(thread >= kKeys || span.covers(low, low + rows - 1));
      for (int at = thread; at < rows * kWords; at += kThreads) {
        const int word = at % kWords, tile_row = at / kWords;
        uint32_t seen = bits ? bits[tile_row * words + first_key % static_cast<int>(p.mask.tile_k) / 32 + word] : 0xffffffffu;
        if (!is_whole) seen = bits_seen_at(seen, &shared.tile.stage[0].span[word * 32], low + tile_row);
        if (seen) atomicOr(&shared.tile.seen[word], seen);
      }
    }
    __syncthreads();
  }
  __syncthreads();
}

// The keys of the tile, to both stages' index: -1 for those that no query of the kv head's group sees. False when the tile lies
// behind the list of live keys.
template <class Shared>
__device__ __forceinline__ bool find_keys(const BackwardCall& call, Shared& shared, int batch, int kv_head, int first_key) {
  constexpr int kKeys = Shared::kShape.keys;
  const AttentionParams& p = call.b.forward;
  const int group = static_cast<int>(p.heads / p.kv_heads), thread = threadIdx.x;
  int key = first_key + thread;
  bool is_live = false;
  if (call.live_keys.index) {
    const int64_t mask_head = call.live_keys.mask_head_of(batch, kv_head * group);
    const int live_count = call.live_keys.count[mask_head];
    if (first_key >= live_count) return false;
    is_live = thread < kKeys && first_key + thread < live_count;
    key = is_live ? call.live_keys.index[mask_head * call.live_keys.capacity + first_key + thread] : -1;
  } else if (thread < kKeys) {
    const int low = static_cast<int>(p.key_length - p.query_length), high = static_cast<int>(p.key_length) - 1;
    for (int head = kv_head * group; head < (kv_head + 1) * group && !is_live; ++head) {
      is_live = SpanSource(p.mask, static_cast<int>(p.key_length), batch, head).of_key(key).touches(low, high);
    }
  }
  if (p.mask.tiles.data) {
    find_seen_by_bits(p, shared, batch, kv_head, first_key, key);
    is_live = is_live && thread < kKeys && has_bit(shared.tile.seen[thread / 32], thread % 32);
  }
  if (thread < kKeys) {
    for (auto& stage : shared.tile.stage) stage.index[thread] = is_live ? key : -1;
  }
  __syncthreads();
  return true;
}

// For one query head: the spans of the tile's keys and their bounds, key_bias, and zeros where its gradient is added up.
template <class Shared>
__device__ __forceinline__ void find_spans(const AttentionParams& p, Shared& shared, int batch, int head) {
  constexpr int kKeys = Shared::kShape.keys;
  const int thread = threadIdx.x, lane = thread % 32;
  if (thread < 4) shared.tile.bounds[thread] = thread % 2 == 0 ? kLastPosition : kFirstPosition;
  if (thread < kKeys) {
    for (int row = 0; row < Shared::kShape.warp_rows; ++row) shared.tile.column_sums[row][thread] = 0.0f;
  }
  __syncthreads();
  if (thread < kKeys) {
    const int key = shared.tile.stage[0].index[thread];
    const Span span = SpanSource(p.mask, static_cast<int>(p.key_length), batch, head).of_key(key);  // empty for -1
    const bool sees = span.first < span.last;
    const float key_bias = sees && p.key_bias.data ? row_of<const float>(p.key_bias, batch, head)[key] : 0.0f;
    for (auto& stage : shared.tile.stage) stage.span[thread] = span, stage.key_bias[thread] = key_bias;
    const int bounds[4] = {__reduce_min_sync(0xffffffffu, sees ? span.first : kLastPosition),
                           __reduce_max_sync(0xffffffffu, sees ? span.first : kLastPosition),
                           __reduce_min_sync(0xffffffffu, sees ? span.last : kFirstPosition),
                           __reduce_max_sync(0xffffffffu, sees ? span.last : kFirstPosition)};
    if (lane == 0) {
      atomicMin(&shared.tile.bounds[0], bounds[0]), atomicMax(&shared.tile.bounds[1], bounds[1]);
      atomicMin(&shared.tile.bounds[2], bounds[2]), atomicMax(&shared.tile.bounds[3], bounds[3]);
    }
  }
  __syncthreads();
}

// Starts the copies of rows of query or grad_out from first_query on into a tile.
template <int kDim, class Layout>
__device__ __forceinline__ void copy_queries(const AttentionParams& p, const TensorView& tensor, uint32_t to, int batch, int head,
                                             int first_query, int width) {
  const uint64_t row_bytes = static_cast<uint32_t>(tensor.row_stride * 2);
  const RowCopy<kDim, Layout::kThreads> copy(width);
  const int query = first_query + copy.row;
  const char* from = rows_of_head(tensor, batch, head) + static_cast<uint32_t>(query) * row_bytes;
  const int left = static_cast<int>(p.query_length) - query;
#pragma unroll
  for (int r = 0; r < Layout::kShape.queries; r += copy.kRows, from += copy.kRows * row_bytes) copy.start(to, r, from, r < left);
}

// Starts the copies of the terms of a chunk of queries.
template <class Traits, class Shared, class Scheduler>
__device__ __forceinline__ void copy_terms(const BackwardCall& call, Shared& shared, const Scheduler& scheduler, int buffer,
                                           int batch, int head, int first_query) {
  const int thread = static_cast<int>(thread_index());
  if (thread >= Shared::kShape.queries) return;
  const int query = scheduler.query_of(first_query, thread);
  const bool is_query = !Traits::kGathersQueries || query != kNoQuery;
  const int64_t at = (batch * call.b.forward.heads + head) * call.padded_queries + (is_query ? query : 0);
  copy_async_4(shared_address(&shared.lse2[buffer][thread]), (kIsGeneral<Traits> ? call.lse : call.lse2) + at, is_query);
  if constexpr (kIsGeneral<Traits>) {
    copy_async_4(shared_address(&shared.tile.lse_rest2[buffer][thread]), call.lse_rest2 + at, true);
  }
  copy_async_4(shared_address(&shared.delta[buffer][thread]), call.delta + at, is_query);
}

// Clears a row of a chunk of queries and its delta.
template <int kDim, class Shared>
__device__ __forceinline__ void clear_query(Shared& shared, int buffer, int row) {
  constexpr BackwardShape kShape = Shared::kShape;
  clear_row<kDim>(shared.query[kShape.late_stages == 2 ? buffer : 0], row);
  clear_row<kDim>(shared.grad_out[kShape.early_stages == 2 ? buffer : 0], row);
  shared.delta[buffer][row] = 0.0f;
}

// Scores and their gradients of a chunk of queries against the tile of keys: probabilities and score gradients to shared memory.
// Of a block of scores the warp has the rows from warp_row and the columns from warp_column on.
template <class T, int kDim, class Traits, class Shared, class Scheduler>
__device__ __forceinline__ void put_scores(const BackwardCall& call, Shared& shared, const Scheduler& scheduler,
                                           const Chunk& chunk, int buffer, int batch, int head, int first_query, int first_key,
                                           int warp_row, int warp_column, int lane) {
  constexpr BackwardShape kShape = Shared::kShape;
  constexpr int kM = Shared::kM, kN = Shared::kN, kWidth = Shared::kWidth;
  const AttentionParams& p = call.b.forward;
  const uint32_t probability_tile = shared_address(shared.probability), grad_score_tile = shared_address(shared.grad_score);
  const int row = warp_row + lane / 4, column = warp_column + lane % 4 * 2;  // of this thread's first element
  const auto load_terms = [&](float (&to)[kM][2], const float* from) {
#pragma unroll
    for (int m = 0; m < kM; ++m) to[m][0] = from[row + 16 * m], to[m][1] = from[row + 16 * m + 8];
  };
  float scores[kM][kN][4], grad_scores[kM][kN][4], lse2[kM][2], delta[kM][2];
  clear(scores);
  multiply_by_rows<T, kDim / 16>(
      scores, Fragment<kDim>::tall(shared_address(shared.query[kShape.late_stages == 2 ? buffer : 0]), warp_row, 0),
      Fragment<kDim>::wide(shared_address(shared.key), warp_column, 0));
  if (Traits::kKeys == Keys::kAll && chunk.needs_test) hide_in_order(scores, p, first_query + row, first_key + column);
  if constexpr (Traits::kGathersQueries) scheduler.hide(scores, first_query, row, warp_column);
  load_terms(lse2, shared.lse2[buffer]);
  put_probabilities<T, Traits, false>(PairPlace<kWidth>(probability_tile, warp_row, warp_column), scores, lse2, call.scale_2,
                                      nullptr, column, 0, 1);
  clear(grad_scores);
  multiply_by_rows<T, kDim / 16>(
      grad_scores, Fragment<kDim>::tall(shared_address(shared.grad_out[kShape.early_stages == 2 ? buffer : 0]), warp_row, 0),
      Fragment<kDim>::wide(shared_address(shared.value), warp_column, 0));
  load_terms(delta, shared.delta[buffer]);
  // Turn them into gradients of the scores.
  ColumnSums<kN> sums;
  if constexpr (!kIsGeneral<Traits>) {
    to_gradients(scores, grad_scores, delta);
  } else {
    const auto& stage = shared.tile.stage[buffer];
    float lse_rest2[kM][2];
    load_terms(lse_rest2, shared.tile.lse_rest2[buffer]);
    to_gradients<T>(scores, grad_scores, lse2, lse_rest2, delta, sums, call, batch, head, stage, chunk, chunk.needs_test,
                    first_query, row, column, [&](int column) { return stage.index[column]; });
    if (call.grad_key_bias.data) {
      sums.finish(column, [&](int column, float sum) { shared.tile.column_sums[warp_row / (16 * kM)][column] += sum; });
    }
    put_tile<T, kWidth>(probability_tile, scores, warp_row, warp_column, [](int, int) { return 1.0f; });
  }
  put_tile<T, kWidth>(grad_score_tile, grad_scores, warp_row, warp_column, [](int, int) { return 1.0f; });
}

// The rows of query_sums of the thread's queries, of which the first is in row `row` of the chunk; a query that does not exist
// has the spare row.
template <class Scheduler, int kM>
__device__ __forceinline__ void find_query_sums(const BackwardCall& call, const Scheduler& scheduler, int batch, int head,
                                                int first_query, int row, float* (&rows)[kM][2]) {
  const AttentionParams& p = call.b.forward;
  const int width = static_cast<int>(sum_width(p.head_dim));
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = scheduler.query_to_add(first_query, row + 16 * m + 8 * r);
      const int64_t at =
          query < p.query_length ? (batch * p.heads + head) * p.query_length + query : p.batch * p.heads * p.query_length;
      rows[m][r] = call.query_sums + at * width;
    }
  }
}

// Adds this head's gradient of key_bias, which the warps left in column_sums.
template <class Shared>
__device__ __forceinline__ void add_key_bias_gradient(const BackwardCall& call, const Shared& shared, int batch, int head) {
  const int thread = threadIdx.x;
  if (!call.grad_key_bias.data || thread >= Shared::kShape.keys) return;
  const int key = shared.tile.stage[0].index[thread];
  float sum = 0.0f;
  for (int row = 0; row < Shared::kShape.warp_rows; ++row) sum += shared.tile.column_sums[row][thread];
  if (key >= 0) atomicAdd(row_of<float>(call.grad_key_bias, batch, head) + key, sum);
}

// What a query head of the group adds to the gradients of the tile's keys, and to query_sums: loops over the chunks of queries
// that see the tile. Scores and their gradients are the warp's from warp_row and warp_column on, grad_key and grad_value its rows
// from key_row and its columns from row_part on. range: of listed queries.
template <class T, int kDim, class Traits, class Layout, class Shared>
__device__ __forceinline__ void add_head(const BackwardCall& call, Shared& shared, int batch, int head, int first_key, int range,
                                         int warp_row, int warp_column, int key_row, int row_part,
                                         float (&grad_key)[2][Layout::kRowN][4], float (&grad_value)[2][Layout::kRowN][4]) {
  constexpr BackwardShape kShape = Layout::kShape;
  constexpr int kThreads = Layout::kThreads, kColumns = Layout::kColumns, kWidth = Layout::kWidth, kM = Layout::kM,
                kDimN = Layout::kDimN;
  constexpr bool kIsPlain = Traits::kKeys == Keys::kAll, kIsListed = Traits::kGathersQueries;
  constexpr bool kHasEarlyStages = kShape.early_stages == 2;
  const AttentionParams& p = call.b.forward;
  const int head_dim = static_cast<int>(p.head_dim), value_dim = static_cast<int>(p.value_dim), warp = threadIdx.x / 32;
  const uint32_t key_tile = shared_address(shared.key);
  const uint32_t query_tile_0 = shared_address(shared.query), grad_out_tile_0 = shared_address(shared.grad_out);
  const uint32_t probability_tile = shared_address(shared.probability), grad_score_tile = shared_address(shared.grad_score);
  if constexpr (kIsGeneral<Traits>) find_spans(p, shared, batch, head);
  auto scheduler = [&] {
    if constexpr (kIsPlain) {
      return PlainQueryScheduler<kShape.queries, kShape.keys>(p, first_key);
    } else if constexpr (kIsListed) {
      return ListedQueryScheduler<Shared>(call, shared, batch, head, first_key, range);
    } else {
      return QueryScheduler<kThreads, kShape.queries, kShape.keys>(p, shared.tile.bounds, batch, head, first_key);
    }
  }();
  const auto copy_rows = [&](uint32_t to, const TensorView& tensor, int first, int width) {
    if constexpr (kIsListed) {
      scheduler.template copy_rows<kDim>(to, tensor, first, width);
    } else {
      copy_queries<kDim, Layout>(p, tensor, to, batch, head, first, width);
    }
  };
  constexpr uint32_t kTileBytes = kShape.queries * kDim * 2;
  const auto query_tile_of = [&](int buffer) { return query_tile_0 + (kShape.late_stages == 2 ? buffer : 0) * kTileBytes; };
  const auto grad_out_tile_of = [&](int buffer) {
    return grad_out_tile_0 + (kShape.early_stages == 2 ? buffer : 0) * kTileBytes;
  };
  int first_query = 0, coming_query = 0, buffer = 0;
  Chunk chunk, coming;
  bool has_chunk = scheduler.next(first_query, chunk);
  if (has_chunk) {
    copy_rows(query_tile_0, p.query, first_query, head_dim);
    copy_rows(grad_out_tile_0, call.b.grad_out, first_query, value_dim);
    scheduler.copy_notes(shared, 0, first_query);
    copy_terms<Traits>(call, shared, scheduler, 0, batch, head, first_query);
  }
  copy_async_commit();
  // What is copied for the coming chunk once nobody reads the tile of grad_out that it goes to.
  const auto copy_early = [&] {
    if (!has_chunk) return;
    copy_rows(grad_out_tile_of(buffer ^ 1), call.b.grad_out, coming_query, value_dim);
    scheduler.copy_notes(shared, buffer ^ 1, coming_query);
    copy_terms<Traits>(call, shared, scheduler, buffer ^ 1, batch, head, coming_query);
  };

  while (has_chunk) {
    const uint32_t query_tile = query_tile_of(buffer), grad_out_tile = grad_out_tile_of(buffer);
    copy_async_wait<0>();
    // Clear rows that see nothing but are not finite: each thread asks for the row whose terms it copied.
    const int own = static_cast<int>(thread_index());
    const bool is_bad = own < kShape.queries && is_bad_row(shared.lse2[buffer][own], shared.delta[buffer][own]);
    if (__syncthreads_or(is_bad)) {
      if (is_bad) clear_query<kDim>(shared, buffer, own);
      __syncthreads();
    }
    has_chunk = scheduler.next(coming_query, coming);
    if (has_chunk && kShape.late_stages == 2) copy_rows(query_tile_of(buffer ^ 1), p.query, coming_query, head_dim);
    if (kHasEarlyStages) {
      copy_early();
      copy_async_commit();
    }

    // Scores and their gradients, to shared memory.
    const int lane = static_cast<int>((kIsPlain ? threadIdx.x : thread_index()) % 32);  // fresh where registers are short
    const int row = warp_row + lane / 4;                                                // of this thread's first element
    put_scores<T, kDim, Traits>(call, shared, scheduler, chunk, buffer, batch, head, first_query, first_key, warp_row,
                                warp_column, lane);
    __syncthreads();

    if (!kHasEarlyStages) {
      // grad_value first: then grad_out is read, and the next one can come.
      accumulate<T, kShape.queries, kWidth, kDim>(grad_value, probability_tile, key_row, grad_out_tile, row_part);
      __syncthreads();
      copy_early();
      copy_async_commit();
    }
    // The rows of grad_query are added beside the product after it.
    if (call.query_sums) {
      float grad_query[kM][kDimN][4], *rows[kM][2];
      const int part_of_query = warp % kColumns * kDimN * 8, width = static_cast<int>(sum_width(p.head_dim));
      clear(grad_query);
      accumulate_queries<T, kShape.keys, kWidth, kDim>(grad_query, grad_score_tile, warp_row, key_tile, part_of_query);
      find_query_sums(call, scheduler, batch, head, first_query, row, rows);
      const AddRows<kM, kDimN> add{grad_query, rows, part_of_query, width};
      if (kHasEarlyStages) {
        accumulate<T, kShape.queries, kWidth, kDim>(grad_value, probability_tile, key_row, grad_out_tile, row_part, add);
        accumulate<T, kShape.queries, kWidth, kDim>(grad_key, grad_score_tile, key_row, query_tile, row_part);
      } else {
        accumulate<T, kShape.queries, kWidth, kDim>(grad_key, grad_score_tile, key_row, query_tile, row_part, add);
      }
    } else {
      if (kHasEarlyStages)
        accumulate<T, kShape.queries, kWidth, kDim>(grad_value, probability_tile, key_row, grad_out_tile, row_part);
      accumulate<T, kShape.queries, kWidth, kDim>(grad_key, grad_score_tile, key_row, query_tile, row_part);
    }
    if (kShape.late_stages == 1 && has_chunk) {
      __syncthreads();
      copy_rows(query_tile_0, p.query, coming_query, head_dim);
      copy_async_commit();
    }
    chunk = coming;
    first_query = coming_query;
    buffer ^= 1;
  }
}

// Adds the gradients of a warp's keys, of which `key` is the first, to rows of key_sums.
template <int kN>
__device__ __forceinline__ void add_key_gradients(const BackwardCall& call, int batch, int kv_head, int key, int column,
                                                  const float (&grad_key)[2][kN][4], const float (&grad_value)[2][kN][4]) {
  const AttentionParams& p = call.b.forward;
  const int key_width = static_cast<int>(sum_width(p.head_dim)), value_width = static_cast<int>(sum_width(p.value_dim));
  float *key_rows[2][2], *value_rows[2][2];
  find_key_sums(
      call, batch, kv_head, key_width, value_width, static_cast<int>(threadIdx.x % 32 / 4), [&](int row) { return key + row; },
      key_rows, value_rows);
  add_rows(grad_key, key_rows, column, key_width, 0, 1);
  add_rows(grad_value, value_rows, column, value_width, 0, 1);
}

// query, grad_out [B, H, Sq, D or Dv], key, value [B, Hkv, Sk, D or Dv], lse2, delta [B, H, padded_queries] -> grad_key,
// grad_value [B, Hkv, Sk, D or Dv], or rows of key_sums, and rows of query_sums. A block has one tile of keys of one kv head and
// loops over the queries of its group (listed ones: over those of one range), head by head, chunk by chunk; scores are
// [queries, keys].
template <class T, int kDim, class Traits, SmemBudget kSmemBudget>
__global__ __launch_bounds__(
    kBackwardDkdvShape<kDim, kSmemBudget>.warps * 32,
    kBackwardDkdvShape<kDim, kSmemBudget>.blocks_per_sm) void backward_dkdv_kernel(const __grid_constant__ BackwardCall call) {
  if constexpr (!is_chosen(kSmemBudget)) {
    __trap();
    return;
  }
  using Layout = BackwardDkdvLayout<kDim, kSmemBudget>;
  constexpr BackwardShape kShape = Layout::kShape;
  constexpr int kThreads = Layout::kThreads, kColumns = Layout::kColumns, kM = Layout::kM, kN = Layout::kN;
  constexpr int kKeyWarps = Layout::kKeyWarps, kRowN = Layout::kRowN;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardDkdvShared<kDim, Traits, kSmemBudget>*>(shared_bytes);
  const AttentionParams& p = call.b.forward;
  const int head_dim = static_cast<int>(p.head_dim), value_dim = static_cast<int>(p.value_dim);
  const int group = static_cast<int>(p.heads / p.kv_heads), thread = threadIdx.x, warp = thread / 32;
  const int warp_row = warp / kColumns * kM * 16, warp_column = warp % kColumns * kN * 8;
  const int key_row = warp % kKeyWarps * 32, row_part = warp / kKeyWarps * kRowN * 8;  // of this warp's grad_key and grad_value
  constexpr bool kIsListed = Traits::kGathersQueries;
  const bool is_gathered = kIsGeneral<Traits> && call.live_keys.index;

  const uint32_t key_tile = shared_address(shared.key), value_tile = shared_address(shared.value);

  // Find this block's tile: early tiles come first, because causality makes them long, and late ranges of listed queries, whose
  // lists are long.
  const int tiles = static_cast<int>((p.key_length + kShape.keys - 1) / kShape.keys);
  const int tile = static_cast<int>(blockIdx.x % tiles), first_key = tile * kShape.keys;
  const int ranges = query_ranges<Traits>(p);
  const int range = kIsListed ? ranges - 1 - static_cast<int>(blockIdx.x) / tiles % ranges : 0;
  const int64_t pairs_per_block = kIsGeneral<Traits> ? call.batches_per_block * call.kv_heads_per_block : 1;
  const int64_t kv_heads_apart = p.kv_heads / (kIsGeneral<Traits> ? call.kv_heads_per_block : 1);
  const auto pair_of = [&](int64_t index) {
    const int64_t pair = block_index() / static_cast<uint32_t>(tiles * ranges);
    const int batch = static_cast<int>(pair / kv_heads_apart), kv_head = static_cast<int>(pair % kv_heads_apart);
    if constexpr (!kIsGeneral<Traits>) return int2{batch, kv_head};
    return int2{batch * static_cast<int>(call.batches_per_block) + static_cast<int>(index / call.kv_heads_per_block),
                kv_head * static_cast<int>(call.kv_heads_per_block) + static_cast<int>(index % call.kv_heads_per_block)};
  };
  for (int64_t index = 0; index < pairs_per_block; ++index) {
    const int2 pair = pair_of(index);
    const int batch = pair.x, kv_head = pair.y;

    // Find the keys of the tile that some query sees.
    if constexpr (kIsGeneral<Traits>) {
      if (!find_keys(call, shared, batch, kv_head, first_key)) continue;
    }
    if constexpr (kIsListed) {
      if (!is_met(call, batch, kv_head, first_key, range)) continue;
    }
    // The key in a row of the tile, -1 for none.
    const auto key_at = [&](int row) {
      const int key = first_key + row;
      if constexpr (kIsGeneral<Traits>) return shared.tile.stage[0].index[row];
      if constexpr (kIsListed) return is_seen_key(call, batch, kv_head, key) ? key : -1;
      return key < p.key_length ? key : -1;
    };
    const auto copy_keys = [&](uint32_t to, const TensorView& tensor, int width) {
      const char* const from = rows_of_head(tensor, batch, kv_head);
      const RowCopy<kDim, kThreads> copy(width);
#pragma unroll 4
      for (int r = 0; r < kShape.keys; r += copy.kRows) {
        const int at = key_at(copy.row + r);
        copy.start(to, r, from + max(at, 0) * tensor.row_stride * 2, at >= 0);
      }
    };
    // Start the copies of the tile's keys and values.
    copy_keys(key_tile, p.key, head_dim);
    copy_keys(value_tile, p.value, value_dim);

    float grad_key[2][kRowN][4], grad_value[2][kRowN][4];
    clear(grad_key);
    clear(grad_value);
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      add_head<T, kDim, Traits, Layout>(call, shared, batch, head, first_key, range, warp_row, warp_column, key_row, row_part,
                                        grad_key, grad_value);
      __syncthreads();
      if constexpr (kIsGeneral<Traits>) add_key_bias_gradient(call, shared, batch, head);
    }

    copy_async_wait<0>();
    if constexpr (kIsListed) {
      add_key_gradients(call, batch, kv_head, first_key + key_row, row_part, grad_key, grad_value);
      continue;
    }
    // Leave the gradients in the places of the keys and values, and write them out from there.
    __syncthreads();
    put_tile<T, kDim>(key_tile, grad_key, key_row, row_part, [&](int, int) { return call.scale; });
    put_tile<T, kDim>(value_tile, grad_value, key_row, row_part, [](int, int) { return 1.0f; });
    __syncthreads();
    const int2 to = pair_of(index);
    const auto store = [&](const void* from, const TensorView& tensor, int width) {
      store_tile<kDim, kThreads, kShape.keys>(from, width, [&](int r) -> char* {
        const int in_order = static_cast<int>(block_index() % static_cast<uint32_t>(tiles)) * kShape.keys + r;
        int at = in_order;
        if constexpr (kIsGeneral<Traits>) at = is_gathered ? shared.tile.stage[0].index[r] : in_order;
        return at >= 0 && at < p.key_length ? rows_of_head(tensor, to.x, to.y) + at * tensor.row_stride * 2 : nullptr;
      });
    };
    store(shared.key, call.b.grad_key, head_dim);
    store(shared.value, call.b.grad_value, value_dim);
    __syncthreads();
  }
}

template <class T, int kDim, class Traits, SmemBudget kSmemBudget>
cudaError_t launch_backward_dkdv(const BackwardCall& call, cudaStream_t stream) {
  constexpr BackwardShape kShape = kBackwardDkdvShape<kDim, kSmemBudget>;
  constexpr int kBytes = sizeof(BackwardDkdvShared<kDim, Traits, kSmemBudget>);
  static_assert(kBytes <= (kSmemBudget == SmemBudget::kLarge ? 163 : 99) * 1024);
  const auto kernel = backward_dkdv_kernel<T, kDim, Traits, kSmemBudget>;
  static KernelAttribute shared_bytes;
  const cudaError_t status = allow_shared_bytes(shared_bytes, kernel, kBytes);
  if (status != cudaSuccess) return status;
  const AttentionParams& p = call.b.forward;
  const int64_t pairs_per_block = kIsGeneral<Traits> ? call.batches_per_block * call.kv_heads_per_block : 1;
  const int64_t tiles = (p.key_length + kShape.keys - 1) / kShape.keys;
  const int64_t blocks = tiles * query_ranges<Traits>(p) * (p.batch * p.kv_heads / pairs_per_block);
  if (blocks == 0) return cudaSuccess;
  kernel<<<grid_of(blocks), kShape.warps * 32, kBytes, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace dmattn::cuda::sm80
