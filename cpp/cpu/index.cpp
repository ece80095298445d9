// The best keys of an indexer on the CPU: a tile of queries at a time, all their scores, and then the exact choice in each row.
#include <array>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "../index_arguments.h"
#include "levels.h"
#include "limits.h"
#include "parallel.h"
#include "scratch.h"

namespace dmattn::cpu {
namespace {

constexpr int64_t kBins = 1024;

// Which of a row's numbers are chosen: those above the cut, and of those equal to it the ones from `index` on.
template <class R>
struct Cut {
  R score;
  int64_t index;
  bool takes(R x, int64_t i) const { return x > score || (x == score && i >= index); }
};

template <class R>
constexpr R kLowest = -std::numeric_limits<R>::infinity();

// The cut that leaves the k best of n numbers: exact, equal ones: the later. Bins of equal width find the few that have to be
// compared with each other.
template <class R>
Cut<R> find_cut(const R* scores, int64_t n, int64_t k, std::vector<std::pair<R, int64_t>>& some) {
  const Cut<R> all{kLowest<R>, n};
  R least = std::numeric_limits<R>::infinity(), most = kLowest<R>;
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!(scores[i] > kLowest<R>)) continue;
    ++count, least = std::min(least, scores[i]), most = std::max(most, scores[i]);
  }
  if (count <= k) return all;
  if (k == 0) return {std::numeric_limits<R>::infinity(), n};
  const R factor = static_cast<R>(kBins - 1) / (most - least);
  const bool has_bins = factor > 0 && factor <= std::numeric_limits<R>::max();  // no, where all are equal, or far apart
  const auto bin_of = [&](R x) { return has_bins ? static_cast<int64_t>((x - least) * factor) : 0; };
  std::array<int64_t, kBins> counts{};
  for (int64_t i = 0; i < n; ++i) {
    if (scores[i] > kLowest<R>) ++counts[static_cast<size_t>(bin_of(scores[i]))];
  }
  int64_t bin = kBins - 1, wanted = k;
  while (counts[static_cast<size_t>(bin)] < wanted) wanted -= counts[static_cast<size_t>(bin--)];
  some.clear();
  for (int64_t i = 0; i < n; ++i) {
    if (scores[i] > kLowest<R> && bin_of(scores[i]) == bin) some.emplace_back(scores[i], i);
  }
  std::nth_element(some.begin(), some.begin() + (wanted - 1), some.end(), std::greater<>());
  return {some[static_cast<size_t>(wanted - 1)].first, some[static_cast<size_t>(wanted - 1)].second};
}

template <class R>
void choose(const R* scores, int64_t n, int64_t k, int32_t* indices, R* chosen, std::vector<std::pair<R, int64_t>>& some) {
  const Cut<R> cut = find_cut(scores, n, k, some);
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!cut.takes(scores[i], i)) continue;
    indices[found] = static_cast<int32_t>(i);
    if (chosen) chosen[found] = scores[i];
    ++found;
  }
  std::fill(indices + found, indices + k, -1);
  if (chosen) std::fill(chosen + found, chosen + k, kLowest<R>);
}

template <class R>
void index_top_k(const IndexTopKParams& p) {
  const Kernels& kernels = best_kernels();
  const int64_t tiles = ceil_div(p.query_length, kIndexTileQueries), tasks = p.batch * p.groups * tiles;
  const int64_t blocks = p.is_pooled ? p.keys : ceil_div(p.keys, int64_t{1} << p.log2_block);
  const size_t row_bytes = static_cast<size_t>(kIndexTileQueries * blocks) * sizeof(R);
  const Scratch scratch(worker_count(tasks), kernels.index_scratch_bytes(p)), scores(worker_count(tasks), row_bytes);
  for_each_task(tasks, [&](int64_t task, int64_t worker) {
    const int64_t first = (tiles - 1 - task % tiles) * kIndexTileQueries, group = task / tiles % p.groups;
    const int64_t batch = task / tiles / p.groups;
    const int64_t length = p.lengths ? std::clamp<int64_t>(p.lengths[batch], 0, p.key_length) : p.key_length;
    const int64_t offset = p.query_offset ? p.query_offset[batch] : length - p.query_length;
    const IndexTile tile{batch, group, first, std::min(kIndexTileQueries, p.query_length - first), offset + first, length};
    R* const rows = static_cast<R*>(scores.of(worker));
    kernels.index_scores(p, tile, scratch.of(worker), rows, blocks);
    std::vector<std::pair<R, int64_t>> some;
    for (int64_t t = 0; t < tile.rows; ++t) {
      const int64_t list = ((batch * p.groups + group) * p.query_length + first + t) * p.top;
      choose(rows + t * blocks, blocks, p.top, p.indices + list, p.scores ? static_cast<R*>(p.scores) + list : nullptr, some);
    }
  });
}

std::tuple<Tensor, Tensor> index_top_k_op(const Tensor& query, const Tensor& key, const Tensor& weights,
                                          std::optional<Tensor> slope, std::optional<Tensor> start, std::optional<Tensor> end,
                                          std::optional<Tensor> query_offset, std::optional<Tensor> lengths, int64_t key_length,
                                          int64_t k, int64_t block_size, bool is_pooled, bool is_causal, int64_t local,
                                          int64_t sink, double scale, bool with_scores) {
  const CheckedIndexTopK checked =
      check_index_top_k(query, key, weights, std::move(slope), std::move(start), std::move(end), std::move(query_offset),
                        std::move(lengths), key_length, k, block_size, is_pooled, is_causal, local, sink, scale, with_scores);
  const IndexTopKParams& p = checked.params;
  if (p.top > 0) (p.dtype == DType::kFloat64 ? index_top_k<double> : index_top_k<float>)(p);
  return {checked.indices, checked.scores};
}

}  // namespace
}  // namespace dmattn::cpu

DMATTN_KERNELS(CPU, m) { m.impl("index_top_k", TORCH_BOX(&dmattn::cpu::index_top_k_op)); }
