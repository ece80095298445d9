// The best keys of an indexer on the CPU: a tile of queries at a time, all their scores, and then the exact choice in each row.
#include <array>
#include <cmath>
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
  bool takes(R x, int64_t i) const { return (x > score) | ((x == score) & (i >= index)); }
};

template <class R>
constexpr R kLowest = -std::numeric_limits<R>::infinity();

// The cut that leaves the k best of n numbers, none of them NaN or -inf: exact, equal ones: the later. Bins of equal width find
// the few that have to be compared with each other.
template <class R>
Cut<R> find_cut(const R* scores, int64_t n, int64_t k, std::vector<std::pair<R, int64_t>>& some) {
  if (n <= k) return {kLowest<R>, n};
  const auto [smallest, largest] = std::minmax_element(scores, scores + n);
  const R least = *smallest, most = *largest;
  const R factor = static_cast<R>(kBins - 1) / (most - least);
  const bool has_bins = factor > 0 && factor <= std::numeric_limits<R>::max();  // no, where all are equal, or far apart
  const auto bin_of = [&](R x) { return has_bins ? static_cast<int64_t>((x - least) * factor) : 0; };
  std::array<int64_t, kBins> counts{};
  for (int64_t i = 0; i < n; ++i) ++counts[static_cast<size_t>(bin_of(scores[i]))];
  int64_t bin = kBins - 1, wanted = k;
  while (counts[static_cast<size_t>(bin)] < wanted) wanted -= counts[static_cast<size_t>(bin--)];
  some.clear();
  for (int64_t i = 0; i < n; ++i) {
    if (bin_of(scores[i]) == bin) some.emplace_back(scores[i], i);
  }
  std::nth_element(some.begin(), some.begin() + (wanted - 1), some.end(), std::greater<>());
  return {some[static_cast<size_t>(wanted - 1)].first, some[static_cast<size_t>(wanted - 1)].second};
}

// Numbers of a row with their places, in order.
template <class R>
struct Candidates {
  std::vector<R> scores;
  std::vector<int32_t> places;
  int64_t count = 0;

  explicit Candidates(int64_t most) : scores(static_cast<size_t>(most)), places(static_cast<size_t>(most)) {}

  // Those above a bound; NaN is above none.
  void collect(const R* row, int64_t n, R bound) {
    R* const to = scores.data();
    int32_t* const at = places.data();
    int64_t found = 0;
    for (int64_t i = 0; i < n; ++i) {
      const R x = row[i];
      to[found] = x, at[found] = static_cast<int32_t>(i);
      found += x > bound;
    }
    count = found;
  }
};

// A bound that more than k of a row's n numbers are probably above, but not many more, from a sample of them; -inf where a
// sample would save nothing.
template <class R>
R guess_bound(const R* row, int64_t n, int64_t k) {
  constexpr int64_t kSample = 128, kSpread = 2;  // numbers in the sample; standard deviations of the rank on the safe side
  if (n < 4 * kSample || 2 * k > n) return kLowest<R>;
  std::array<R, kSample> sample;
  for (int64_t i = 0; i < kSample; ++i) {
    const R x = row[i * n / kSample];
    sample[static_cast<size_t>(i)] = x > kLowest<R> ? x : kLowest<R>;
  }
  const double share = static_cast<double>(k) / static_cast<double>(n);
  const double rank = kSample * share + kSpread * std::sqrt(kSample * share * (1 - share)) + 1;
  if (rank >= kSample) return kLowest<R>;
  const auto bound = sample.begin() + static_cast<int64_t>(rank);
  std::nth_element(sample.begin(), bound, sample.end(), std::greater<>());
  return *bound;
}

template <class R>
void choose(const R* row, int64_t n, int64_t k, int32_t* indices, R* chosen, Candidates<R>& best,
            std::vector<std::pair<R, int64_t>>& some) {
  const R bound = guess_bound(row, n, k);
  best.collect(row, n, bound);
  if (best.count < k && bound > kLowest<R>) best.collect(row, n, kLowest<R>);
  const R* const scores = best.scores.data();
  const Cut<R> cut = find_cut(scores, best.count, k, some);
  int64_t found = 0;
  for (int64_t i = 0; i < best.count && found < k; ++i) {
    indices[found] = best.places[static_cast<size_t>(i)];
    if (chosen) chosen[found] = scores[i];
    found += cut.takes(scores[i], i);
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
    const int64_t count = kernels.index_scores(p, tile, scratch.of(worker), rows, blocks);
    Candidates<R> best(count + 1);  // one is written behind the last
    std::vector<std::pair<R, int64_t>> some;
    for (int64_t t = 0; t < tile.rows; ++t) {
      const int64_t list = ((batch * p.groups + group) * p.query_length + first + t) * p.top;
      choose(rows + t * blocks, count, p.top, p.indices + list, p.scores ? static_cast<R*>(p.scores) + list : nullptr, best,
             some);
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
