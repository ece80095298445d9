// The loss of an indexer for one query of a group, and its gradients by the indexer's products.
#pragma once

#include "../index_loss_row.h"
#include "tile.h"
#include "vecmath.h"

namespace dmattn::cpu {
namespace {

template <class R>
struct IndexLossScratch {
  R* visible;       // [keys]: 1, or 0 where a column has no key that the query sees; then the exponentials of scores
  R* competes;      // [keys]: likewise, of those that compete
  R* logits;        // [keys]; then the gradient by the scores of columns of products
  R* mass;          // [keys]: attention, the mean of the heads; then of blocks
  R* scores;        // [choices]; then of blocks, -inf for those that do not compete
  int32_t* column;  // [blocks]: that of products that a block's score comes from, -1 for those that do not compete

  DMATTN_INLINE IndexLossScratch(Arena& arena, const IndexLossParams& p)
      : visible(arena.take<R>(padded<R>(p.keys))),
        competes(arena.take<R>(padded<R>(p.keys))),
        logits(arena.take<R>(padded<R>(p.keys))),
        mass(arena.take<R>(padded<R>(p.keys))),
        scores(arena.take<R>(padded<R>(p.choices))),
        column(arena.take<int32_t>(p.blocks)) {}
};

template <class R>
R logarithm(R x) {
  return static_cast<R>(sizeof(R) == 8 ? __builtin_log(x) : __builtin_logf(static_cast<float>(x)));
}

// Which columns have keys that the query sees; returns how many columns there are up to the last of these.
template <class R>
int64_t find_visible(const IndexLossParams& p, const IndexLossRow& row, const IndexLossScratch<R>& s) {
  int64_t columns = 0;
  for (int64_t j = 0; j < p.keys; ++j) {
    const int64_t key = key_of_column(row, j);
    const bool is_visible = sees(row, key);
    s.visible[j] = is_visible, s.competes[j] = is_visible && competes(row, key);
    s.mass[j] = 0;
    if (is_visible) columns = j + 1;
  }
  for (int64_t j = p.keys; j < padded<R>(p.keys); ++j) s.visible[j] = s.competes[j] = s.mass[j] = 0;
  return columns;
}

// The logits of a head, -inf where the query sees no key, up to whole vectors.
template <class R>
void load_logits(const IndexLossParams& p, const IndexLossRow& row, const R* products, const R* bias, int64_t columns,
                 const IndexLossScratch<R>& s) {
  const R scale = static_cast<R>(p.scale), cap = static_cast<R>(p.softcap);
  for (int64_t j = 0; j < columns; ++j) s.logits[j] = products[j] * scale;
  for (int64_t j = columns; j < padded<R>(columns); ++j) s.logits[j] = 0;
  if (cap > 0) {
    for (int64_t j = 0; j < columns; j += kLanes<R>) store<R>(s.logits + j, tanh_of<R>(load<R>(s.logits + j) / cap) * cap);
  }
  for (int64_t j = 0; bias && j < columns; ++j) {
    if (s.visible[j] > 0) s.logits[j] += bias[key_of_column(row, j)];
  }
  for (int64_t j = 0; j < columns; j += kLanes<R>) {
    const Vec<R> logits = load<R>(s.logits + j);
    store<R>(s.logits + j, load<R>(s.visible + j) > 0 ? logits : splat<R>(-static_cast<R>(kInfinity)));
  }
}

// Adds the attention weights of all heads.
template <class R>
void find_mass(const IndexLossParams& p, const IndexLossRow& row, int64_t batch, int64_t group, int64_t query, int64_t columns,
               const IndexLossScratch<R>& s) {
  const int64_t of_group = batch * p.groups + group;
  for (int64_t head = 0; head < p.heads; ++head) {
    const int64_t number = (of_group * p.heads + head) * p.rows + query;
    const R* bias = static_cast<const R*>(p.key_bias);
    bias = bias ? bias + batch * p.bias_batch_stride + group * p.bias_group_stride + head * p.bias_head_stride : nullptr;
    load_logits(p, row, static_cast<const R*>(p.logits) + number * p.keys, bias, columns, s);
    R base, factor = R(1) / static_cast<R>(p.heads);
    if (p.lse) {
      base = static_cast<const R*>(p.lse)[number];
      base = base == -static_cast<R>(kInfinity) ? 0 : base;
    } else {
      Vec<R> largest = splat<R>(-static_cast<R>(kInfinity)), sums = {};
      for (int64_t j = 0; j < columns; j += kLanes<R>) largest = max_of<R>(load<R>(s.logits + j), largest);
      base = max_lanes<R>(largest);
      base = base == -static_cast<R>(kInfinity) ? 0 : base;
      for (int64_t j = 0; j < columns; j += kLanes<R>) sums += exp_of<R>(load<R>(s.logits + j) - base);
      const R sum = sum_lanes<R>(sums);  // 0, where the query sees nothing but logits of -inf
      factor = sum == 0 ? 0 : factor / sum;
    }
    for (int64_t j = 0; j < columns; j += kLanes<R>) {
      const Vec<R> weight = exp_of<R>(load<R>(s.logits + j) - base) * factor;
      store<R>(s.mass + j, load<R>(s.mass + j) + (load<R>(s.competes + j) > 0 ? weight : Vec<R>{}));
    }
  }
}

// Weighted sums of the products of a query's heads, and the slope.
template <class R>
void find_scores(const IndexLossParams& p, const IndexLossRow& row, const R* products, const R* weights, R slope, int64_t choices,
                 const IndexLossScratch<R>& s) {
  const R scale = static_cast<R>(p.index_scale);
  for (int64_t c = 0; c < choices; ++c) s.scores[c] = 0;
  for (int64_t head = 0; head < p.index_heads; ++head) {
    const R* const of_head = products + head * p.rows * p.choices;
    for (int64_t c = 0; c < choices; ++c) {
      const R product = of_head[c] * scale;
      s.scores[c] += weights[head] * (product < 0 ? 0 : product);  // NaN stays NaN
    }
  }
  if (p.slope) {
    for (int64_t c = 0; c < choices; ++c) s.scores[c] += slope * distance_of<R>(row, c, p.is_pooled);
  }
}

// Replaces the mass and the scores of keys by those of blocks, and returns the largest score.
template <class R>
R find_blocks(const IndexLossParams& p, int64_t blocks, const IndexLossScratch<R>& s) {
  R largest = -static_cast<R>(kInfinity);
  for (int64_t n = 0; n < blocks; ++n) {
    const int64_t first = n << p.log2_block, last = min_of(first + (int64_t{1} << p.log2_block), p.keys);
    R mass = 0, best = 0;
    int64_t column = -1;
    bool is_whole = true;
    for (int64_t j = first; j < last; ++j) {
      is_whole = is_whole && s.visible[j] > 0;
      if (!(s.competes[j] > 0)) continue;
      mass += s.mass[j];
      const R score = s.scores[p.is_pooled ? n : j];
      if (column < 0 || score > best || score != score) best = score, column = p.is_pooled ? n : j;
    }
    if (p.is_pooled && !is_whole) column = -1;
    s.mass[n] = column < 0 ? 0 : mass, s.scores[n] = column < 0 ? -static_cast<R>(kInfinity) : best;
    s.column[n] = static_cast<int32_t>(column);
    largest = s.scores[n] > largest ? s.scores[n] : largest;
  }
  return largest;
}

template <class R>
void index_loss_of(const IndexLossParams& p, int64_t task, void* scratch) {
  Arena arena(scratch);
  const IndexLossScratch<R> s(arena, p);
  const int64_t query = task % p.rows, of_group = task / p.rows, group = of_group % p.groups, batch = of_group / p.groups;
  const IndexLossRow row = index_loss_row(p, batch, group, query);
  const R* const products = static_cast<const R*>(p.products) + (of_group * p.index_heads * p.rows + query) * p.choices;
  const R* const weights = static_cast<const R*>(p.weights) + task * p.index_heads;
  const int64_t columns = find_visible(p, row, s), blocks = min_of(ceil_div(columns, int64_t{1} << p.log2_block), p.blocks);
  const int64_t choices = p.is_pooled ? blocks : columns;
  find_mass(p, row, batch, group, query, columns, s);
  find_scores(p, row, products, weights, p.slope ? static_cast<const R*>(p.slope)[group] : 0, choices, s);

  const R largest = find_blocks(p, blocks, s);
  R total = 0, largest_mass = 0;
  for (int64_t n = 0; n < blocks; ++n) total += s.mass[n], largest_mass = s.mass[n] > largest_mass ? s.mass[n] : largest_mass;
  // Where no key that competes has attention there is nothing to learn. NaN becomes the loss.
  const R weight = !(total > 0) ? total : p.is_sharp ? total * largest_mass : R(1);
  R* const exponentials = s.visible;
  R sum = 0, loss = 0, of_slope = 0;
  for (int64_t n = 0; n < blocks; n += kLanes<R>) store<R>(exponentials + n, exp_of<R>(load<R>(s.scores + n) - largest));
  for (int64_t n = 0; n < blocks; ++n) sum += exponentials[n];
  const R log_sum = logarithm(sum);
  R* const gradient = s.logits;
  for (int64_t c = 0; c < choices; ++c) gradient[c] = 0;
  for (int64_t n = 0; total > 0 && n < blocks; ++n) {
    if (s.column[n] < 0) continue;
    const R share = s.mass[n] / total, of_score = weight * (exponentials[n] / sum - share);
    if (share > 0) loss += share * (logarithm(share) - (s.scores[n] - largest - log_sum));
    gradient[s.column[n]] = of_score;
    if (p.slope) of_slope += of_score * distance_of<R>(row, s.column[n], p.is_pooled);
  }
  static_cast<R*>(p.losses)[task] = total > 0 ? weight * loss : weight;
  static_cast<R*>(p.of_slopes)[task] = of_slope;

  const R scale = static_cast<R>(p.index_scale);
  R* const of_products = static_cast<R*>(p.of_products) + (of_group * p.index_heads * p.rows + query) * p.choices;
  for (int64_t head = 0; head < p.index_heads; ++head) {
    const R* const of_head = products + head * p.rows * p.choices;
    R* const to = of_products + head * p.rows * p.choices;
    const R factor = weights[head] * scale;
    R of_weight = 0;
    for (int64_t c = 0; c < choices; ++c) {
      const bool is_active = of_head[c] * scale > 0;
      of_weight += is_active ? gradient[c] * (of_head[c] * scale) : 0;
      to[c] = is_active ? gradient[c] * factor : 0;
    }
    for (int64_t c = choices; c < p.choices; ++c) to[c] = 0;
    static_cast<R*>(p.of_weights)[task * p.index_heads + head] = of_weight;
  }
}

size_t index_loss_scratch_bytes(const IndexLossParams& p) {
  Arena arena(nullptr);
  if (p.is_double) {
    const IndexLossScratch<double> measured(arena, p);
    static_cast<void>(measured);
  } else {
    const IndexLossScratch<float> measured(arena, p);
    static_cast<void>(measured);
  }
  return arena.used();
}

void index_loss(const IndexLossParams& p, int64_t task, void* scratch) {
  (p.is_double ? index_loss_of<double> : index_loss_of<float>)(p, task, scratch);
}

}  // namespace
}  // namespace dmattn::cpu
