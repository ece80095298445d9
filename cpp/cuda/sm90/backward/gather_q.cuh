// The warps of the Hopper backward that gather the chunks of queries that list a tile of keys (key_lists/query_lists.h).
#pragma once

#include "../../common/visibility.cuh"
#include "../gather.cuh"
#include "shared.cuh"

namespace dmattn::cuda::sm90 {

inline constexpr int kQueryLoaders = kWarpgroup - kLoaders;

// query, grad_out [B, H, Sq, D or Dv], lse2, delta [B, H, padded_queries] -> rows of them in shared memory, for every tile visit
// those of the queries in its list, head by head, with descriptors. By half a warpgroup.
template <int kDim, class Traits>
class QueryGatherer {
 public:
  using Shared = BackwardShared<kDim, Traits::kHasOptions>;

  __device__ __forceinline__ QueryGatherer(const BackwardCall& call, const BackwardWork& work, Shared& shared, int thread)
      : call_(call), work_(work), shared_(shared), thread_(thread) {}

  __device__ __forceinline__ void run() {
    const AttentionParams& p = call_.b.forward;
    for (uint32_t tile_visit = 0;; ++tile_visit) {
      descriptor_full_.sleep_full(tile_visit);
      const KeyDescriptor& tile = shared_.key_descriptors[tile_visit % Shared::kKeyDescriptors];
      if (tile.head < 0) return;
#pragma unroll 1
      for (int head = tile.head; head < tile.head + work_.heads; ++head) {
        const QueryLists& lists = opaque_reload(&call_)->live_keys.query_lists;
        const int64_t mask_head = lists.mask_head_of(tile.batch, head);
        const uint32_t* const entries = lists.entries + mask_head * lists.capacity;
        const int number = tile.first_place / kShape.keys, end = lists.first_entry(mask_head, number, tile.to);
#pragma unroll 1
        for (int at = lists.first_entry(mask_head, number, tile.from); at < end; at += kQueries) {
          gather_chunk(tile, head, entries + at, end - at);
        }
      }
      copy_async_wait<0>();
      announce();
      // The end of the tile visit.
      empty_.producer_acquire(n_);
      if (thread_ == 0) shared_.query_descriptors[n_ % Shared::kQueryDescriptors].ends_tile_visit = true;
      group_sync(kQueryBarrier, kQueryLoaders);  // nobody reads the tile's descriptor any more
      barrier_arrive(full_.at(n_++));
      if (thread_ == 0) {
        barrier_arrive(descriptor_empty_.at(tile_visit));
        barrier_arrive(shared_address(&shared_.tile_visit_loaded));
      }
    }
  }

 private:
  static constexpr BackwardShape kShape = Shared::kShape;
  static constexpr int kQueries = kShape.queries;

  // Says of the chunk before, if it was not said yet, that its rows are there.
  __device__ __forceinline__ void announce() {
    if (!is_announced_) {
      fence_async();
      barrier_arrive(full_.at(n_ - 1));
    }
    is_announced_ = true;
  }

  // Does a span hide a key of the tile from some query of the chunk, or is one a local key or a sink?
  __device__ __forceinline__ bool needs_test(const KeyDescriptor& tile, const ListedQueries<kQueries>& listed, int count) const {
    const AttentionParams& p = call_.b.forward;
    const IndexLists& index = p.mask.index;
    const int first = listed.query[index_place<kQueries>(0)], last = listed.query[index_place<kQueries>(count - 1)];
    const int shift = static_cast<int>(p.key_length - p.query_length), last_local = local_shift(index, tile.batch, shift);
    const bool is_whole =
        max(tile.bounds[0][1], tile.bounds[1][1]) <= first + shift && last + shift < min(tile.bounds[0][2], tile.bounds[1][2]);
    const bool has_local = index.local > 0 && last + last_local >= tile.first_place &&
                           first + last_local - tile.first_place - kShape.keys < index.local;
    return !is_whole || has_local || tile.first_place < index.sinks;
  }

  // Asks for the rows of a chunk, of `left` entries of a list and at most kQueries, and announces the chunk before.
  __device__ __forceinline__ void gather_chunk(const KeyDescriptor& tile, int head, const uint32_t* entries, int left) {
    const AttentionParams& p = call_.b.forward;
    const int batch = tile.batch;
    const uint32_t stage = n_ % kShape.query_stages, slot = n_ % Shared::kQueryDescriptors;
    const int64_t batch_head = batch * p.heads + head, terms = batch_head * call_.padded_queries;
    ListedQueries<kQueries>& listed = shared_.listed[slot];
    constexpr int kEach = kQueries / kQueryLoaders;
    uint32_t entry[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = thread_ + i * kQueryLoaders;
      entry[i] = row < left ? entries[row] : kNoListedQuery;
    }
    empty_.producer_acquire(n_);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = thread_ + i * kQueryLoaders, query = static_cast<int>(entry[i] & kNoListedQuery);
      const bool is_query = row < left;
      listed.query[index_place<kQueries>(row)] = is_query ? query : -1;
      // A row is a lane here, and its bits become a bit in each of the words.
      uint32_t word = 0;
#pragma unroll
      for (int keys = 0; keys < kListedTileKeys / kListedKeys; ++keys) {
        const uint32_t of_rows = __ballot_sync(0xffffffffu, has_bit(entry[i], kListedQueryBits + keys));
        if (thread_ % 32 == keys) word = of_rows;
      }
      if (thread_ % 32 < kListedTileKeys / kListedKeys) listed.listed[thread_ % 32][row / 32] = word;
      const int64_t at = terms + (is_query ? query : 0);
      copy_async_4(shared_address(&shared_.lse2[stage][row]), call_.lse2 + at, is_query);
      copy_async_4(shared_address(&shared_.delta[stage][row]), call_.delta + at, is_query);
      if constexpr (Traits::kHasOptions) {
        if (call_.row_hash) copy_async_4(shared_address(&shared_.row_hash[stage][row]), call_.row_hash + at, is_query);
      }
    }
    group_sync(kQueryBarrier, kQueryLoaders);
    if (thread_ == 0) {
      shared_.query_descriptors[slot] = {nullptr,
                                         call_.query_sums + batch_head * p.query_length * sum_width(p.head_dim),
                                         0,
                                         head,
                                         false,
                                         true,
                                         needs_test(tile, listed, min(left, kQueries)),
                                         (shared_.row_flags & kBadRows) != 0};
    }
    gather(p.query, p.head_dim, batch, head, shared_.query[stage], listed);
    gather(call_.b.grad_out, p.value_dim, batch, head, shared_.grad_out[stage], listed);
    copy_async_commit();
    copy_async_wait<1>();
    announce();
    ++n_;
    is_announced_ = false;
  }

  __device__ __forceinline__ void gather(const TensorView& tensor, int64_t width, int batch, int head, const uint16_t* to,
                                         const ListedQueries<kQueries>& listed) const {
    const char* const rows =
        static_cast<const char*>(tensor.data) + (batch * tensor.batch_stride + head * tensor.head_stride) * 2;
    gather_rows<kDim, kQueries, kQueryLoaders, true, false, 1>(thread_, shared_address(to), listed.query, kQueries, rows,
                                                               static_cast<uint32_t>(tensor.row_stride * 2),
                                                               static_cast<int>(width), [] {});
  }

  const BackwardCall& call_;
  const BackwardWork& work_;
  Shared& shared_;
  const int thread_;
  const Ring<Shared::kKeyDescriptors> descriptor_full_{shared_address(shared_.descriptor_full)},
      descriptor_empty_{shared_address(shared_.descriptor_empty)};
  const Ring<kShape.query_stages> full_{shared_address(shared_.query_full)}, empty_{shared_address(shared_.query_empty)};
  uint32_t n_ = 0;  // the number of the descriptor
  bool is_announced_ = true;
};

}  // namespace dmattn::cuda::sm90
