// Biases in the Hopper backward: reads key_bias and the bias of single pairs, and adds their gradients.
#pragma once

#include "../../common/logits.cuh"
#include "score_place.cuh"

namespace dmattn::cuda::sm90 {

// The bias [Sq, Sk] of the thread's scores, and where its gradient goes. Addresses are counted on from row to row: a product of
// 64 bits for each would take longer than all else.
template <class T, int kDim>
struct BiasOfScores {
  static constexpr BackwardShape kShape = kBackwardShape<kDim, true>;
  const BackwardCall& call;
  const KeyDescriptor& tile;
  const QueryDescriptor& descriptor;
  const ScorePlace<kDim> place;

  // Products become logits without key_bias. Keys that do not exist get some bias; they are hidden afterwards.
  template <int kN>
  __device__ __forceinline__ void add_to(float (&scores)[kN][4]) const {
    const AttentionParams& p = call.b.forward;
    if (p.bias_dtype == DType::kFloat32) {
      add_to(scores, row_of<const float>(p.bias, tile.batch, descriptor.head), [](float x) { return x; });
    } else {
      add_to(scores, row_of<const T>(p.bias, tile.batch, descriptor.head), [](T x) { return Element<T>::widen(x); });
    }
  }
  // Adds the gradients of the logits of pairs that exist and whose weight is not 0, or stores them and zeros for the others: not
  // NaN, where a hidden key is beside it.
  template <int kN, int kSteps>
  __device__ __forceinline__ void add_gradients(const float (&gradients)[kN][4], const uint32_t (&slopes)[kSteps][4]) const {
    const AttentionParams& p = call.b.forward;
    const int first_query = descriptor.first_query + place.column, first_key = tile.first_place + place.row;
    float* even = row_of<float>(call.grad_bias, tile.batch, descriptor.head) + first_query * p.key_length + first_key;
    float* odd = even + p.key_length;
    // How many queries there are from the thread's first one on; none for a key that does not exist.
    const int count = static_cast<int>(p.query_length) - first_query;
    const int queries[2] = {key_at<kDim>(tile, place.row) >= 0 ? count : 0, key_at<kDim>(tile, place.row + 8) >= 0 ? count : 0};
    const auto each = [&](const auto& put) {
#pragma unroll
      for (int i = 0; i < kN; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool has_weight = slopes[i / 2][i % 2 * 2 + e / 2] & (e % 2 == 0 ? 0x7fffu : 0x7fff0000u);
          float* const to = (e % 2 == 0 ? even : odd) + e / 2 * 8;  // keys are in order
          if (8 * i + e % 2 < queries[e / 2]) put(to, has_weight, gradients[i][e] * call.keep_scale);
        }
        even += 8 * p.key_length, odd += 8 * p.key_length;
      }
    };
    if (owns_bias_gradient(call)) {
      each([](float* to, bool has_weight, float gradient) { *to = has_weight ? gradient : 0.0f; });
    } else {
      each([](float* to, bool has_weight, float gradient) {
        if (has_weight) atomicAdd(to, gradient);
      });
    }
  }

 private:
  template <int kN, class Stored, class Widen>
  __device__ __forceinline__ void add_to(float (&scores)[kN][4], const Stored* bias, const Widen& widen) const {
    const AttentionParams& p = call.b.forward;
    const int last = static_cast<int>(p.query_length) - 1;
    // Bring the bias of what is likely to be the next chunk from memory into L2. Some threads share a row.
    constexpr int kQueries = kShape.queries, kThreadsPerRow = kConsumers * kWarpgroup / kQueries,
                  kKeysPerThread = kShape.keys / kThreadsPerRow;
    const int thread = place.thread();
    const int ahead = descriptor.first_query + kQueries + thread / kThreadsPerRow,
              at = tile.first_place + thread % kThreadsPerRow * kKeysPerThread;
    if (ahead <= last && at < p.key_length) prefetch_l2(bias + ahead * p.bias_row_stride + at);
    const int first_query = descriptor.first_query + place.column, first_key = tile.first_place + place.row;
    if (descriptor.first_query + kQueries <= p.query_length && tile.first_place + kShape.keys <= p.key_length) {
      const Stored* even = bias + first_query * p.bias_row_stride + first_key;
      const Stored* odd = even + p.bias_row_stride;
#pragma unroll
      for (int i = 0; i < kN; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          scores[i][e] = fmaf(scores[i][e], call.logit_scale, widen((e % 2 == 0 ? even : odd)[e / 2 * 8]));
        }
        even += 8 * p.bias_row_stride, odd += 8 * p.bias_row_stride;
      }
      return;
    }
    const int keys[2] = {max(key_at<kDim>(tile, place.row), 0), max(key_at<kDim>(tile, place.row + 8), 0)};
#pragma unroll
    for (int i = 0; i < kN; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int query = first_query + 8 * i + e % 2;
        const float x = widen(bias[min(query, last) * p.bias_row_stride + keys[e / 2]]);
        scores[i][e] = fmaf(scores[i][e], call.logit_scale, query <= last ? x : 0.0f);
      }
    }
  }
};

// key_bias of the thread's two keys in base 2; with is_natural a logit, for rows whose lse is huge. For one head.
template <int kDim>
__device__ __forceinline__ void read_key_bias(const AttentionParams& p, const KeyDescriptor& tile, int row, int head,
                                              bool is_natural, float (&bias_2)[2]) {
  const float* const bias = row_of<const float>(p.key_bias, tile.batch, head);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = key_at<kDim>(tile, row + 8 * r);
    bias_2[r] = bias && key >= 0 ? bias[key] * (is_natural ? 1.0f : kLog2e) : 0.0f;
  }
}

// Adds the gradient of key_bias for the thread's two keys and one head to global memory, and starts a new sum.
template <int kDim>
__device__ __forceinline__ void flush_bias(const BackwardCall& call, const KeyDescriptor& tile, int head, float (&bias_sum)[2]) {
  if (!call.grad_key_bias.data || head < 0) return;
  const ScorePlace<kDim> place;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = bias_sum[r] * call.keep_scale;
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int key = key_at<kDim>(tile, place.row + 8 * r);
    if (place.lane % 4 == 0 && key >= 0) atomicAdd(row_of<float>(call.grad_key_bias, tile.batch, head) + key, sum);
    bias_sum[r] = 0.0f;
  }
}

}  // namespace dmattn::cuda::sm90
