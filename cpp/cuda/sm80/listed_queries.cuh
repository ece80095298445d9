// The queries that list a tile of keys (Keys::kQueryLists, key_lists/query_lists.h), for the portable backward by keys: their
// rows are gathered, in chunks.
#pragma once

#include "backward_tile.cuh"

namespace dmattn::cuda::sm80 {

inline constexpr int kNoQuery = static_cast<int>(kNoListedQuery);

// What the instance for query lists knows of the queries that list a tile: the entries of a chunk, of the one whose rows are
// being copied, and of the one after it, which are on their way.
template <int kQueries>
struct ListedQueryTile {
  uint32_t entries[3][kQueries];  // kNoListedQuery behind the end
};

// Schedules the queries of a range that list a tile of keys, in chunks. Their entries come a chunk before their rows, so that no
// copy waits for an address.
template <class Shared>
class ListedQueryScheduler {
 public:
  static constexpr int kQueries = Shared::kShape.queries, kKeys = Shared::kShape.keys;

  // Starts with the entries of the first chunk in shared memory. By all threads.
  __device__ __forceinline__ ListedQueryScheduler(const BackwardCall& call, Shared& shared, int batch, int head, int first_key,
                                                  int range)
      : call_(call), shared_(shared), batch_(batch), head_(head), first_key_(first_key) {
    const QueryLists& lists = call.live_keys.query_lists;
    const int64_t mask_head = lists.mask_head_of(batch, head);
    const int tile = first_key / kListedTileKeys, first = lists.first_entry(mask_head, tile, range * kRangeQueries);
    entries_ = lists.entries + mask_head * lists.capacity + first;
    count_ = lists.first_entry(mask_head, tile, (range + 1) * kRangeQueries) - first;
    copy_entries(0);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
  }

  // Gives the next chunk, by the place of its first entry, or false when none is left.
  __device__ __forceinline__ bool next(int& first, Chunk&) {
    if (cursor_ >= count_) return false;
    first = cursor_;
    cursor_ += kQueries;
    return true;
  }

  // Starts the copies of what is known of the chunk after the one at `first`.
  __device__ __forceinline__ void copy_notes(Shared&, int, int first) const { copy_entries(first + kQueries); }

  // Starts the copies of the entries of the chunk at `first`, which may lie behind the last.
  __device__ __forceinline__ void copy_entries(int first) const {
    const int thread = static_cast<int>(thread_index());
    if (thread >= kQueries) return;
    uint32_t* const to = &shared_.tile.entries[slot_of(first)][thread];
    if (first + thread < count_) {
      copy_async_4(shared_address(to), entries_ + first + thread, true);
    } else {
      *to = kNoListedQuery;
    }
  }

  // The query in a row of a chunk; kNoQuery: none.
  __device__ __forceinline__ int query_of(int first, int row) const {
    return static_cast<int>(shared_.tile.entries[slot_of(first)][row] & kNoListedQuery);
  }

  // The query to whose sums a row of a chunk is added. Rows of no query add zeros to those of others, since they would wait for
  // each other at a spare one.
  __device__ __forceinline__ int query_to_add(int first, int row) const {
    const int count = count_ - first;
    return query_of(first, row < count ? row : row % count);
  }

  // Starts the copies of the rows of a chunk.
  template <int kDim>
  __device__ __forceinline__ void copy_rows(uint32_t to, const TensorView& tensor, int first, int width) const {
    const RowCopy<kDim, Shared::kThreads> copy(width);
    const char* const from = rows_of_head(tensor, batch_, head_);
#pragma unroll
    for (int r = 0; r < kQueries; r += copy.kRows) {
      const int query = query_of(first, copy.row + r);
      const bool is_query = query != kNoQuery;
      copy.start(to, r, from + (is_query ? query : 0) * tensor.row_stride * 2, is_query);
    }
  }

  // Hides the keys that a query of the chunk does not see. row: of the thread's first element; warp_column: the warp's first.
  template <int kM, int kN>
  __device__ __forceinline__ void hide(float (&scores)[kM][kN][4], int first, int row, int warp_column) const {
    const int first_bit = kListedQueryBits + (first_key_ % kListedTileKeys + warp_column) / kListedKeys;
    const auto hide_by = [&](const auto& sees) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint32_t entry = shared_.tile.entries[slot_of(first)][row + 16 * m + 8 * r];
#pragma unroll
          for (int i = 0; i < 2 * kN; ++i) {
            float& score = scores[m][i / 2][2 * r + i % 2];
            if (!sees(entry, has_bit(entry, first_bit + i / 2 * 8 / kListedKeys), i / 2 * 8 + i % 2)) score = negative_infinity();
          }
        }
      }
    };
    if (!needs_test(first)) {
      hide_by([](uint32_t, bool is_listed, int) { return is_listed; });
      return;
    }
    const AttentionParams& p = call_.b.forward;
    const IndexLists& index = p.mask.index;
    const int shift = static_cast<int>(p.key_length - p.query_length), last_local = local_shift(index, batch_, shift);
    const int first_key = first_key_ + warp_column + static_cast<int>(thread_index() % 4) * 2;
    const SpanSource spans(p.mask, static_cast<int>(p.key_length), batch_, head_);
    hide_by([&](uint32_t entry, bool is_listed, int column) {
      const int query = static_cast<int>(entry & kNoListedQuery), key = first_key + column, behind = query + last_local - key;
      const bool is_forced = key < index.sinks || (behind >= 0 && behind < index.local);
      return entry != kNoListedQuery && (is_listed || is_forced) && spans.of_key(key).sees(query + shift);
    });
  }

 private:
  static __device__ __forceinline__ int slot_of(int first) { return first / kQueries % 3; }

  // May something else than the lists decide about a pair of the chunk?
  __device__ __forceinline__ bool needs_test(int at) const {
    const AttentionParams& p = call_.b.forward;
    const IndexLists& index = p.mask.index;
    const int shift = static_cast<int>(p.key_length - p.query_length), last_local = local_shift(index, batch_, shift);
    const int first = query_of(at, 0), last = query_of(at, min(kQueries, count_ - at) - 1);
    const bool has_spans = p.mask.start.data || p.mask.end.data || first_key_ + kKeys > p.key_length ||
                           (p.mask.is_causal && first_key_ + kKeys - 1 > first + shift);
    const bool has_local =
        index.local > 0 && last + last_local >= first_key_ && first + last_local - first_key_ - kKeys < index.local;
    return has_spans || has_local || first_key_ < index.sinks;
  }

  const BackwardCall& call_;
  Shared& shared_;
  const int batch_, head_, first_key_;
  const uint32_t* entries_;
  int cursor_ = 0, count_;
};

// How many ranges of queries do blocks take one each of?
template <class Traits>
__host__ __device__ constexpr int query_ranges(const AttentionParams& p) {
  return Traits::kGathersQueries ? static_cast<int>((p.query_length + kRangeQueries - 1) / kRangeQueries) : 1;
}

// Does some query of the range meet the tile?
__device__ __forceinline__ bool is_met(const BackwardCall& call, int batch, int kv_head, int first_key, int range) {
  const AttentionParams& p = call.b.forward;
  const QueryLists& lists = call.live_keys.query_lists;
  const int group = static_cast<int>(p.heads / p.kv_heads), tile = first_key / kListedTileKeys;
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const int64_t mask_head = lists.mask_head_of(batch, head);
    if (lists.first_entry(mask_head, tile, range * kRangeQueries) <
        lists.first_entry(mask_head, tile, (range + 1) * kRangeQueries))
      return true;
  }
  return false;
}

// Does some query of the kv head's group see the key? Others stay out of the tile, since they need not be finite.
__device__ __forceinline__ bool is_seen_key(const BackwardCall& call, int batch, int kv_head, int key) {
  const AttentionParams& p = call.b.forward;
  return key < p.key_length && has_bit(call.seen[(batch * p.kv_heads + kv_head) * call.seen_words + key / 32], key % 32);
}

}  // namespace dmattn::cuda::sm80
