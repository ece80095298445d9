// Scores of an indexer for a few queries: the products of all their heads with a chunk of keys at once, and then the weighted sum
// over heads, lanes being queries.
#pragma once

#include "gemm.h"

namespace dmattn::cpu {
namespace {

DMATTN_INLINE int64_t index_columns(const IndexTopKParams& p) { return kIndexTileQueries * p.heads; }

template <class R>
struct IndexScratch {
  Matrix<R> query;     // [Di, heads * queries], times scale
  Matrix<R> key;       // [keys, Di]
  Matrix<R> products;  // [keys, heads * queries]
  Matrix<R> weights;   // [heads, queries]
  Matrix<R> scores;    // [keys, queries]
  Matrix<R> row;       // [1, Di]

  DMATTN_INLINE IndexScratch(Arena& arena, const IndexTopKParams& p)
      : query(take_matrix<R>(arena, p.head_dim, index_columns(p))),
        key(take_matrix<R>(arena, kIndexChunkKeys, p.head_dim)),
        products(take_matrix<R>(arena, kIndexChunkKeys, index_columns(p))),
        weights(take_matrix<R>(arena, p.heads, kIndexTileQueries)),
        scores(take_matrix<R>(arena, kIndexChunkKeys, kIndexTileQueries)),
        row(take_matrix<R>(arena, 1, p.head_dim)) {}
};

template <class R>
DMATTN_INLINE void load_index_queries(const IndexTopKParams& p, const IndexTile& tile, const IndexScratch<R>& s) {
  for (int64_t h = 0; h < p.heads; ++h) {
    for (int64_t t = 0; t < kIndexTileQueries; ++t) {
      const bool is_there = t < tile.rows;
      if (is_there) {
        TensorView of_head = p.query;
        of_head.data = static_cast<char*>(of_head.data) + h * p.query_head_stride * element_size(p.dtype);
        const char* from = row_at(of_head, p.dtype, tile.batch, tile.group, tile.first + t);
        with_stored(p.dtype, R(), [&](auto stored) { widen_row<decltype(stored)>(from, s.row.data, p.head_dim, p.head_dim); });
      }
      for (int64_t d = 0; d < p.head_dim; ++d)
        s.query.row(d)[h * kIndexTileQueries + t] = is_there ? s.row.data[d] * static_cast<R>(p.scale) : 0;
      const auto* weights = static_cast<const R*>(p.weights.data) + tile.batch * p.weights.batch_stride +
                            tile.group * p.weights.head_stride + (tile.first + t) * p.weights.row_stride;
      s.weights.row(h)[t] = is_there ? weights[h] : 0;
    }
  }
}

// Keys [first, first + count) as the products see them.
template <class R>
DMATTN_INLINE void load_index_keys(const IndexTopKParams& p, const IndexTile& tile, int64_t first, int64_t count,
                                   const IndexScratch<R>& s) {
  for (int64_t j = 0; j < count; ++j) {
    const char* from = row_at(p.key, p.dtype, tile.batch, tile.group, first + j);
    with_stored(p.dtype, R(), [&](auto stored) { widen_row<decltype(stored)>(from, s.key.row(j), p.head_dim, p.head_dim); });
  }
}

template <class R>
DMATTN_INLINE void weigh_index_products(const IndexTopKParams& p, const IndexTile& tile, int64_t first, int64_t count,
                                        const IndexScratch<R>& s) {
  const R slope = p.slope ? static_cast<const R*>(p.slope)[tile.group] : 0;
  const R half = p.is_pooled ? static_cast<R>((int64_t{1} << p.log2_block) - 1) / 2 : 0;  // to the middle of a block
  const int64_t step = p.is_pooled ? int64_t{1} << p.log2_block : 1;
  for (int64_t j = 0; j < count; ++j) {
    const R distance = static_cast<R>((first + j) * step - tile.position) + half;
    for (int64_t t = 0; t < kIndexTileQueries; t += kLanes<R>) {
      Vec<R> sum = {};
      for (int64_t h = 0; h < p.heads; ++h) {
        const Vec<R> product = load<R>(s.products.row(j) + h * kIndexTileQueries + t);
        // A product that is NaN stays NaN.
        sum += load<R>(s.weights.row(h) + t) * (product < 0 ? Vec<R>{} : product);
      }
      if (p.slope) {
        const Vec<R> query = __builtin_convertvector(lane_numbers<R>(), Vec<R>) + static_cast<R>(t);
        sum += (splat<R>(distance) - query) * slope;
      }
      store<R>(s.scores.row(j) + t, sum);
    }
  }
}

// Puts the scores of a chunk of keys, from `first` on, into the row of query t: for those keys of [from, to) that compete.
template <class R>
DMATTN_INLINE void put_index_scores(const IndexScratch<R>& s, int64_t t, int64_t first, int64_t from, int64_t to,
                                    int32_t position, const int32_t* start, const int32_t* end, int log2_fold, R* row) {
  const int64_t stride = s.scores.stride;
  const R* const scores = s.scores.data + t - first * stride;
  if (!start && !end && log2_fold == 0) {
    for (int64_t key = from; key < to; ++key) {
      const R score = scores[key * stride];
      row[key] = score > -static_cast<R>(kInfinity) ? score : -static_cast<R>(kInfinity);
    }
    return;
  }
  for (int64_t key = from; key < to; ++key) {
    if ((start && start[key] > position) || (end && end[key] <= position)) continue;
    const R score = scores[key * stride];
    R& best = row[key >> log2_fold];
    best = score > best ? score : best;
  }
}

// Scores of the tile's queries into rows of `out`, -inf for keys or blocks that do not compete. Returns how many numbers a row
// has: none of the later keys competes.
template <class R>
int64_t index_scores_tile(const IndexTopKParams& p, const IndexTile& tile, void* scratch, R* out, int64_t stride) {
  Arena arena(scratch);
  const IndexScratch<R> s(arena, p);
  load_index_queries(p, tile, s);
  const int log2_fold = p.is_pooled ? 0 : p.log2_block;  // of rows of key, whose largest score counts
  const CompetingRows of_last = competing_rows(p, tile.position + tile.rows - 1, tile.length);
  const int64_t keys = max_of(of_last.end, of_last.later_end), count_of_row = ceil_div(keys, int64_t{1} << log2_fold);
  for (int64_t t = 0; t < tile.rows; ++t) {
    for (int64_t n = 0; n < count_of_row; ++n) out[t * stride + n] = -static_cast<R>(kInfinity);
  }
  const int32_t* start =
      p.start.data ? static_cast<const int32_t*>(p.start.data) + head_offset(p.start, tile.batch, tile.group) : nullptr;
  const int32_t* end =
      p.end.data ? static_cast<const int32_t*>(p.end.data) + head_offset(p.end, tile.batch, tile.group) : nullptr;
  for (int64_t first = 0; first < keys; first += kIndexChunkKeys) {
    const int64_t count = min_of(kIndexChunkKeys, keys - first);
    load_index_keys(p, tile, first, count, s);
    multiply_in_pieces(count, index_columns(p), p.head_dim, R(1), s.key, s.query, s.products);
    weigh_index_products(p, tile, first, count, s);
    for (int64_t t = 0; t < tile.rows; ++t) {
      const int32_t position = static_cast<int32_t>(tile.position + t);
      const CompetingRows in = competing_rows(p, position, tile.length);
      const auto put = [&](int64_t from, int64_t to) {
        put_index_scores(s, t, first, max_of(from, first), min_of(to, first + count), position, start, end, log2_fold,
                         out + t * stride);
      };
      put(in.first, in.end), put(in.later, in.later_end);
    }
  }
  return count_of_row;
}

size_t index_scratch_bytes(const IndexTopKParams& p) {
  Arena arena(nullptr);
  if (p.dtype == DType::kFloat64) {
    const IndexScratch<double> measured(arena, p);
    static_cast<void>(measured);
  } else {
    const IndexScratch<float> measured(arena, p);
    static_cast<void>(measured);
  }
  return arena.used();
}

int64_t index_scores(const IndexTopKParams& p, const IndexTile& tile, void* scratch, void* out, int64_t stride) {
  if (p.dtype == DType::kFloat64) return index_scores_tile(p, tile, scratch, static_cast<double*>(out), stride);
  return index_scores_tile(p, tile, scratch, static_cast<float*>(out), stride);
}

}  // namespace
}  // namespace dmattn::cpu
