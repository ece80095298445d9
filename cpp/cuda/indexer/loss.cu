// The loss of an indexer and its gradients by the indexer's products. A block of threads has a query of a group.
//
// Its rows of products are read a few times, each time by the same steps as on the CPU (cpp/cpu/index_loss.h): the sums of
// attention's exponentials, attention of each key, blocks of keys, gradients by scores, gradients by products.
#include "../../index_loss_row.h"
#include "../common/device.cuh"
#include "../common/kernel_limits.cuh"
#include "../launch.h"

namespace dmattn::cuda {
namespace {

// Threads of a block. Long rows have more, because there may be few of them.
template <class R>
constexpr int kMostThreads = sizeof(R) == 8 ? 512 : 1024;
constexpr int kLeastThreads = 256;
constexpr int64_t kLongRow = 8192;

template <class R>
__device__ __forceinline__ R lowest() {
  return static_cast<R>(negative_infinity());
}

// What the threads found, combined in all of them; `shared` has room for a number of each warp.
template <class V, class Combine>
__device__ __forceinline__ V over_threads(V value, V* shared, Combine combine) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value = combine(value, value.from_lane(lanes));
  __syncthreads();  // the numbers of the call before were read
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
#pragma unroll 1
  for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) value = combine(value, shared[warp]);
  return value;
}

template <class R>
struct Number {
  R value;
  __device__ __forceinline__ Number from_lane(int lanes) const { return {__shfl_xor_sync(0xffffffffu, value, lanes)}; }
};

// The largest of some numbers x, and the sum of exp(x - base). -inf adds nothing, NaN makes the sum NaN.
template <class R>
struct Exponentials {
  R largest, sum;  // of nothing: -inf, 0

  __device__ __forceinline__ R base() const { return largest == lowest<R>() ? R(0) : largest; }
  // -inf adds nothing.
  template <int kCount>
  __device__ __forceinline__ void add(const R (&x)[kCount]) {
    R most = x[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) most = x[i] > most ? x[i] : most;
    if (most > largest) sum = sum > 0 ? sum * exp(largest - most) : sum, largest = most;
    const R from = base();
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += exp(x[i] - from);
  }
  __device__ __forceinline__ Exponentials from_lane(int lanes) const {
    return {__shfl_xor_sync(0xffffffffu, largest, lanes), __shfl_xor_sync(0xffffffffu, sum, lanes)};
  }
  static __device__ __forceinline__ Exponentials both(const Exponentials& a, const Exponentials& b) {
    Exponentials c;
    c.largest = a.largest > b.largest ? a.largest : b.largest;
    c.sum = a.sum * exp(a.largest - c.base()) + b.sum * exp(b.largest - c.base());
    return c;
  }
};

// Of the blocks that a query may choose: their attention, and their scores.
template <class R>
struct Totals {
  R mass, largest_mass;
  Exponentials<R> scores;

  __device__ __forceinline__ Totals from_lane(int lanes) const {
    return {__shfl_xor_sync(0xffffffffu, mass, lanes), __shfl_xor_sync(0xffffffffu, largest_mass, lanes),
            scores.from_lane(lanes)};
  }
  static __device__ __forceinline__ Totals both(const Totals& a, const Totals& b) {
    return {a.mass + b.mass, a.largest_mass > b.largest_mass ? a.largest_mass : b.largest_mass,
            Exponentials<R>::both(a.scores, b.scores)};
  }
};

template <class R>
struct Sums {
  R loss, of_slope;
  __device__ __forceinline__ Sums from_lane(int lanes) const {
    return {__shfl_xor_sync(0xffffffffu, loss, lanes), __shfl_xor_sync(0xffffffffu, of_slope, lanes)};
  }
};

// kIsPlain: the query has no list, nothing but causality hides keys, and blocks are single keys.
template <class R, class T, bool kIsPlain>
struct Query {
  const IndexLossParams& p;
  int64_t number, batch, group, of_group, query;
  IndexLossRow row;
  R *mass, *scores;  // [keys] of the workspace, whole blocks; those of a block lie where its keys begin
  int columns;  // of logits that may have a key that the query sees, the later ones have none; if kIsPlain it sees all of these
  int position, last_far;  // within [-1, keys]: keys behind the first and up to the second are no local ones

  __device__ __forceinline__ Query(const IndexLossParams& params, R* workspace) : p(params), number(blockIdx.x) {
    of_group = number / p.rows, query = number % p.rows, group = of_group % p.groups, batch = of_group / p.groups;
    row = index_loss_row(p, batch, group, query);
    const int64_t stride = index_loss_stride(p);
    mass = workspace + 2 * number * stride, scores = mass + stride;
    position = static_cast<int>(max(int64_t{-1}, min(row.position, p.key_length)));
    last_far = static_cast<int>(max(int64_t{-1}, min(row.position - row.local, p.key_length)));
    columns = static_cast<int>(p.keys);
    if (!row.list && row.is_causal) columns = min(columns, position + 1);
  }

  // Some columns of a thread, the first and then every `threads`-th.
  static constexpr int kAtOnce = 4;
  struct Columns {
    int column[kAtOnce], key[kAtOnce];
    bool is_seen[kAtOnce];
    __device__ __forceinline__ Columns(const Query& of, int first, int threads) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        column[i] = first + i * threads;
        key[i] = column[i] < of.columns ? of.key_of(column[i]) : -1;
        is_seen[i] = column[i] < of.columns && of.sees_key(key[i]);
      }
    }
  };

  __device__ __forceinline__ int log2_block() const { return kIsPlain ? 0 : p.log2_block; }
  __device__ __forceinline__ bool is_pooled() const { return !kIsPlain && p.is_pooled; }
  __device__ __forceinline__ int key_of(int column) const {
    if constexpr (kIsPlain) return column;
    const int64_t key = key_of_column(row, column);
    return key < p.key_length ? static_cast<int>(key) : -1;  // a list may name any block
  }
  __device__ __forceinline__ bool sees_key(int key) const { return kIsPlain || sees(row, key); }
  __device__ __forceinline__ bool is_competing(int key) const { return key >= row.sinks && (key > position || key <= last_far); }

  __device__ __forceinline__ const R* logits(int64_t head) const {
    return static_cast<const R*>(p.logits) + ((of_group * p.heads + head) * p.rows + query) * p.keys;
  }
  __device__ __forceinline__ const R* biases(int64_t head) const {
    return p.key_bias ? static_cast<const R*>(p.key_bias) + batch * p.bias_batch_stride + group * p.bias_group_stride +
                            head * p.bias_head_stride
                      : nullptr;
  }
  // Of columns that the query sees; -inf elsewhere. Inputs are read by __ldg, which stores to the workspace need not wait for.
  __device__ __forceinline__ void read_logits(const R* of_head, const R* bias, const Columns& at, R (&x)[kAtOnce]) const {
    const R scale = static_cast<R>(p.scale), cap = static_cast<R>(p.softcap);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) x[i] = at.is_seen[i] ? __ldg(of_head + at.column[i]) * scale : lowest<R>();
    if (cap > 0) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) x[i] = at.is_seen[i] ? cap * tanh(x[i] / cap) : lowest<R>();
    }
    if (bias) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) x[i] = at.is_seen[i] ? x[i] + __ldg(bias + at.key[i]) : lowest<R>();
    }
  }
  __device__ __forceinline__ const R* products(int64_t head) const {
    return static_cast<const R*>(p.products) + ((of_group * p.index_heads + head) * p.rows + query) * p.choices;
  }
  __device__ __forceinline__ R weight(int64_t head) const {
    return static_cast<const R*>(p.weights)[number * p.index_heads + head];
  }
  __device__ __forceinline__ R distance(int column) const {
    if constexpr (kIsPlain) return static_cast<R>(column - static_cast<int>(row.position));
    return distance_of<R>(row, column, is_pooled());
  }
  __device__ __forceinline__ R score(int column) const {
    const R scale = static_cast<R>(p.index_scale);
    const R* product_at = products(0) + column;
    R sum = 0;
#pragma unroll 4
    for (int head = 0; head < static_cast<int>(p.index_heads); ++head, product_at += p.rows * p.choices) {
      const R product = __ldg(product_at) * scale;
      sum += weight(head) * (product < 0 ? R(0) : product);  // NaN stays NaN
    }
    if (p.slope) sum += static_cast<const R*>(p.slope)[group] * distance(column);
    return sum;
  }

  // Of each head what is subtracted from its logits, and what their exponentials are multiplied with then.
  __device__ __forceinline__ void find_sums(R* base, R* factor, Exponentials<R>* shared) const {
    const int threads = static_cast<int>(blockDim.x);
    for (int64_t head = 0; head < p.heads; ++head) {
      Exponentials<R> own{lowest<R>(), 0};
      if (p.lse) {
        own = {static_cast<const R*>(p.lse)[(of_group * p.heads + head) * p.rows + query], 1};
      } else {
        const R *const of_head = logits(head), *const bias = biases(head);
        for (int first = static_cast<int>(threadIdx.x); first < columns; first += kAtOnce * threads) {
          R x[kAtOnce];
          read_logits(of_head, bias, Columns(*this, first, threads), x);
          own.add(x);
        }
        own = over_threads(own, shared, Exponentials<R>::both);
      }
      // Where nothing is seen but logits of -inf, the sum is 0.
      if (threadIdx.x == 0)
        base[head] = own.base(), factor[head] = own.sum == 0 ? R(0) : R(1) / (own.sum * static_cast<R>(p.heads));
    }
    __syncthreads();
  }
  __device__ __forceinline__ void find_mass(const R* base, const R* factor) const {
    const int threads = static_cast<int>(blockDim.x);
    for (int first = static_cast<int>(threadIdx.x); first < columns; first += kAtOnce * threads) {
      Columns at(*this, first, threads);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) at.is_seen[i] = at.is_seen[i] && is_competing(at.key[i]);
      R sum[kAtOnce] = {};
      const R *of_head = logits(0), *bias = biases(0);
#pragma unroll 2
      for (int head = 0; head < static_cast<int>(p.heads); ++head) {
        R x[kAtOnce];
        read_logits(of_head, bias, at, x);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) sum[i] += at.is_seen[i] ? exp(x[i] - base[head]) * factor[head] : R(0);
        of_head += p.rows * p.keys, bias = bias ? bias + p.bias_head_stride : nullptr;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (at.column[i] < columns) mass[at.column[i]] = sum[i];
      }
    }
    __syncthreads();
  }

  // As find_blocks, where each key is a block.
  __device__ __forceinline__ Totals<R> find_keys() const {
    Totals<R> own{0, 0, {lowest<R>(), 0}};
    const R scale = static_cast<R>(p.index_scale), slope = p.slope ? static_cast<const R*>(p.slope)[group] : R(0);
    const int threads = static_cast<int>(blockDim.x);
    for (int first = static_cast<int>(threadIdx.x); first < columns; first += kAtOnce * threads) {
      const Columns at(*this, first, threads);
      R x[kAtOnce] = {};
      const R* product_at = products(0);
#pragma unroll 2
      for (int head = 0; head < static_cast<int>(p.index_heads); ++head, product_at += p.rows * p.choices) {
        const R factor = weight(head);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const R product = at.is_seen[i] ? __ldg(product_at + at.column[i]) * scale : R(0);
          x[i] += factor * (product < 0 ? R(0) : product);  // NaN stays NaN
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (slope != 0) x[i] += slope * distance(at.column[i]);
        const bool is_in = at.is_seen[i] && is_competing(at.key[i]);
        x[i] = is_in ? x[i] : lowest<R>();
        if (at.column[i] >= columns) continue;
        const R sum = is_in ? mass[at.column[i]] : R(-1);
        mass[at.column[i]] = sum, scores[at.column[i]] = x[i];
        if (!is_in) continue;
        own.mass += sum, own.largest_mass = sum > own.largest_mass ? sum : own.largest_mass;
      }
      own.scores.add(x);
    }
    return own;
  }

  // A block's attention and score in the place of its first key, -1 if it does not compete; and which of its keys has the score.
  __device__ __forceinline__ Totals<R> find_blocks(int blocks) const {
    if constexpr (kIsPlain) return find_keys();
    Totals<R> own{0, 0, {lowest<R>(), 0}};
#pragma unroll 2
    for (int n = static_cast<int>(threadIdx.x); n < blocks; n += static_cast<int>(blockDim.x)) {
      const int first = n << log2_block(), last = min(first + (1 << log2_block()), static_cast<int>(p.keys));
      R sum = 0, best = lowest<R>();
      int chosen = -1;
      bool is_whole = true;
      for (int column = first; column < last; ++column) {
        const int key = key_of(column);
        const bool is_seen = column < columns && sees_key(key);
        is_whole = is_whole && is_seen;
        if (!is_seen || !is_competing(key)) continue;
        sum += mass[column];
        if (is_pooled()) {
          chosen = first;
          continue;
        }
        const R own_score = score(column);
        if (chosen < 0 || own_score > best || own_score != own_score) best = own_score, chosen = column;
      }
      if (is_pooled()) chosen = is_whole ? chosen : -1;
      if (chosen < 0) {
        mass[first] = -1;
        continue;
      }
      if (is_pooled()) best = score(n);
      mass[first] = sum, scores[first] = best;
      if (log2_block() > 0 && !is_pooled()) scores[first + 1] = static_cast<R>(chosen - first);
      own.mass += sum, own.largest_mass = sum > own.largest_mass ? sum : own.largest_mass;
      own.scores.add({best});
    }
    return own;
  }

  // The gradient by the score of a column of products in the place of its (first) key, in mass.
  __device__ __forceinline__ Sums<R> find_gradients(int blocks, const Totals<R>& all, R weight) const {
    Sums<R> own{0, 0};
    const R log_sum = log(all.scores.sum);
#pragma unroll 4
    for (int n = static_cast<int>(threadIdx.x); n < blocks; n += static_cast<int>(blockDim.x)) {
      const int first = n << log2_block(), last = min(first + (1 << log2_block()), static_cast<int>(p.keys));
      const R sum = mass[first], best = scores[first];
      const bool is_one_of_many = log2_block() > 0 && !is_pooled();
      R gradient = 0;
      int chosen = first;
      if (sum != R(-1) && all.mass > 0) {
        const R share = sum / all.mass, predicted = best - all.scores.base() - log_sum;
        if (is_one_of_many) chosen += static_cast<int>(scores[first + 1]);
        gradient = weight * (exp(predicted) - share);
        if (share > 0) own.loss += share * (log(share) - predicted);
        if (p.slope) own.of_slope += gradient * distance(is_pooled() ? n : chosen);
      }
      if (is_one_of_many) {
        for (int column = first; column < last; ++column) mass[column] = 0;
      }
      mass[chosen] = gradient;
    }
    return own;
  }

  __device__ __forceinline__ void write_products(int choices, Number<R>* shared) const {
    const R scale = static_cast<R>(p.index_scale);
    const int log2_width = is_pooled() ? log2_block() : 0, threads = static_cast<int>(blockDim.x);
    for (int64_t head = 0; head < p.index_heads; ++head) {
      const R *const of_head = products(head), factor = weight(head) * scale;
      T* const to = static_cast<T*>(p.of_products) + (of_head - static_cast<const R*>(p.products));
      Number<R> of_weight{0};
#pragma unroll 8
      for (int c = static_cast<int>(threadIdx.x); c < choices; c += threads) {
        const R product = __ldg(of_head + c) * scale, gradient = mass[c << log2_width];
        const bool is_active = product > 0;
        of_weight.value += is_active ? gradient * product : R(0);
        to[c] = static_cast<T>(is_active ? gradient * factor : R(0));
      }
      for (int c = choices + static_cast<int>(threadIdx.x); c < static_cast<int>(p.choices); c += threads) {
        to[c] = static_cast<T>(R(0));
      }
      of_weight = over_threads(of_weight, shared, [](Number<R> a, Number<R> b) { return Number<R>{a.value + b.value}; });
      if (threadIdx.x == 0) static_cast<R*>(p.of_weights)[number * p.index_heads + head] = of_weight.value;
    }
  }
};

// logits [B, G, h, rows, keys], products [B, G, Hi, rows, choices] -> losses [B, G, rows], of_products like products (T),
// of_weights [B, G, rows, Hi], of_slopes [B, G, rows]. A block of threads for each row of losses.
template <class R, class T, bool kIsPlain>
__global__ __launch_bounds__(kMostThreads<R>) void index_loss_kernel(const __grid_constant__ IndexLossParams p, R* workspace) {
  constexpr int kWarps = kMostThreads<R> / 32;
  extern __shared__ double dynamic[];  // aligned for either type
  R *const base = reinterpret_cast<R*>(dynamic), *const factor = base + p.heads;
  __shared__ Totals<R> totals[kWarps];
  __shared__ Exponentials<R> exponentials[kWarps];
  __shared__ Sums<R> sums[kWarps];
  __shared__ Number<R> numbers[kWarps];
  const Query<R, T, kIsPlain> of(p, workspace);
  of.find_sums(base, factor, exponentials);
  of.find_mass(base, factor);
  const int log2 = of.log2_block(), blocks = min((of.columns + (1 << log2) - 1) >> log2, static_cast<int>(p.blocks));
  const Totals<R> all = over_threads(of.find_blocks(blocks), totals, Totals<R>::both);
  // Where no key that competes has attention there is nothing to learn. NaN becomes the loss.
  const R weight = !(all.mass > 0) ? all.mass : p.is_sharp ? all.mass * all.largest_mass : R(1);
  const auto add = [](const Sums<R>& a, const Sums<R>& b) { return Sums<R>{a.loss + b.loss, a.of_slope + b.of_slope}; };
  const Sums<R> found = over_threads(of.find_gradients(blocks, all, weight), sums, add);
  if (threadIdx.x == 0) {
    static_cast<R*>(p.losses)[of.number] = all.mass > 0 ? weight * found.loss : weight;
    static_cast<R*>(p.of_slopes)[of.number] = found.of_slope;
  }
  of.write_products(of.is_pooled() ? blocks : of.columns, numbers);
}

template <class R, class T, bool kIsPlain>
cudaError_t launch_kernel(const IndexLossParams& p, void* workspace, cudaStream_t stream) {
  static KernelAttribute known;
  const int bytes = static_cast<int>(2 * p.heads * static_cast<int64_t>(sizeof(R)));
  const cudaError_t status = allow_shared_bytes(known, index_loss_kernel<R, T, kIsPlain>, bytes);
  if (status != cudaSuccess) return status;
  const int threads = p.keys < kLongRow ? kLeastThreads : kMostThreads<R>;
  index_loss_kernel<R, T, kIsPlain>
      <<<grid_of(p.batch * p.groups * p.rows), threads, bytes, stream>>>(p, static_cast<R*>(workspace));
  return cudaGetLastError();
}

template <class R, class T>
cudaError_t launch(const IndexLossParams& p, void* workspace, cudaStream_t stream) {
  const bool is_plain = !p.lists.data && !p.start.data && !p.end.data && p.log2_block == 0 && !p.is_pooled;
  return is_plain ? launch_kernel<R, T, true>(p, workspace, stream) : launch_kernel<R, T, false>(p, workspace, stream);
}

}  // namespace

cudaError_t launch_index_loss(const IndexLossParams& p, void* workspace, cudaStream_t stream) {
  if (p.batch * p.groups * p.rows == 0) return cudaSuccess;
  if (p.is_double) return launch<double, double>(p, workspace, stream);
  return p.to_bfloat16 ? launch<float, __nv_bfloat16>(p, workspace, stream) : launch<float, float>(p, workspace, stream);
}

}  // namespace dmattn::cuda
