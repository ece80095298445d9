// Attention forward for Hopper: persistent blocks of four warpgroups. One walks the keys of a tile and leaves notes, one loads
// what the notes say, two compute: products on the tensor cores run while the other warpgroup, or the softmax of this one, does
// its arithmetic.
//
// The one surprise is how little the computing warpgroups know: a chunk is 128 rows of keys in shared memory and a note, whether
// the rows came by tensor copy, were gathered one by one, or belong to the next tile.
#pragma once

#include "../common/logits.cuh"
#include "../common/softmax.cuh"
#include "walk.cuh"

namespace dmattn::cuda::sm90 {

struct Maps {
  CUtensorMap query;  // D, packed heads, Sq, packs, B
  CUtensorMap key;    // D, Sk, Hkv, B
  CUtensorMap value;  // Dv, Sk, Hkv, B
};

template <int kDim, Variant kVariant>
struct alignas(1024) ForwardShared {
  static constexpr ForwardShape kShape = kForwardShape<kDim, kVariant>;
  uint16_t query[kRows * kDim];
  uint16_t key[kShape.stages][kShape.keys * kDim];
  uint16_t value[kShape.stages][kShape.keys * kDim];
  Note<kShape.keys> notes[kShape.notes];
  WalkQueues queues;
  uint64_t query_full, query_empty;
  uint64_t key_full[kShape.stages], key_empty[kShape.stages];
  uint64_t value_full[kShape.stages], value_empty[kShape.stages];
  uint64_t note_full[kShape.notes], note_empty[kShape.notes];
};

// A ring of barriers: the barrier of the n-th use, and its phase.
template <int kCount>
struct Ring {
  uint32_t base;
  __device__ __forceinline__ uint32_t at(uint32_t n) const { return base + 8 * (n % kCount); }
  __device__ __forceinline__ void wait_full(uint32_t n) const { barrier_wait(at(n), n / kCount & 1); }
  __device__ __forceinline__ void wait_empty(uint32_t n) const { barrier_wait(at(n), (n / kCount & 1) ^ 1); }
};

// Copies rows of a chunk from anywhere into a tile of panels; rows without a key become zeros.
template <int kDim, int kKeys>
__device__ __forceinline__ void gather_rows(uint32_t tile, const int32_t* index, const char* rows, uint32_t row_bytes,
                                            int width) {
  constexpr int kChunks = kDim / 8, kPass = kWarpgroup / kChunks;  // rows at a time
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, chunk = thread % kChunks, first = thread / kChunks;
  const bool in_row = chunk * 8 < width;
  const char* const from = rows + (in_row ? chunk * 16 : 0);
  const uint32_t to = tile + chunk / 8 * (kKeys * 128) + first * 128;
#pragma unroll 8
  for (int r = 0; r < kKeys; r += kPass) {
    const int key = index[first + r];
    copy_async_16(to + r * 128 + ((chunk % 8 ^ (first + r) % 8) << 4),
                  from + static_cast<uint64_t>(static_cast<uint32_t>(max(key, 0))) * row_bytes, key >= 0 && in_row);
  }
}

template <int kDim, Variant kVariant>
__device__ __forceinline__ void load_tiles(const ForwardCall& call, const WorkPlan& work, const Maps& maps,
                                           ForwardShared<kDim, kVariant>& shared, bool is_single) {
  constexpr ForwardShape kShape = kForwardShape<kDim, kVariant>;
  constexpr int kPanels = kDim / 64;
  using Chunk = Note<kForwardShape<kDim, kVariant>.keys>;
  const AttentionParams& p = call.p;
  const bool is_leader = threadIdx.x % kWarpgroup == 0;
  if (is_single && !is_leader) return;
  const Ring<kShape.notes> note_full{shared_address(shared.note_full)}, note_empty{shared_address(shared.note_empty)};
  const Ring<kShape.stages> key_full{shared_address(shared.key_full)}, key_empty{shared_address(shared.key_empty)},
      value_full{shared_address(shared.value_full)}, value_empty{shared_address(shared.value_empty)};
  const int group = static_cast<int>(p.heads / p.kv_heads);

  // Rows of a chunk into a tile, the barrier told.
  auto load = [&](uint32_t tile, uint32_t full, const Chunk& note, bool in_order, const CUtensorMap& map, const Rows& rows,
                  int width) {
    const int kv_head = note.head / group;
    if (in_order) {
      if (is_leader) {
        barrier_expect(full, kShape.keys * kDim * 2);
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
          copy_box(tile + panel * (kShape.keys * 128), &map, full, panel * 64, note.base, kv_head, note.batch);
        }
      } else {
        barrier_arrive(full);
      }
    } else {
      const char* const from =
          static_cast<const char*>(rows.data) + (note.batch * rows.batch_stride + kv_head * rows.head_stride) * 2;
      gather_rows<kDim, kShape.keys>(tile, note.index, from, static_cast<uint32_t>(rows.row_stride * 2), width);
      barrier_arrive_after_copies(full);
    }
  };

  uint32_t tiles = 0;
  for (uint32_t n = 0;; ++n) {
    note_full.wait_full(n);
    const Chunk& note = shared.notes[n % kShape.notes];
    const uint32_t flags = note.flags;
    key_empty.wait_empty(n);
    if (flags & kEnd) {
      barrier_arrive(key_full.at(n));
      return;
    }
    load(shared_address(shared.key[n % kShape.stages]), key_full.at(n), note, flags & kInOrder, maps.key, p.key,
         static_cast<int>(p.head_dim));
    if (flags & kFirst) {
      if (is_leader) {
        barrier_wait(shared_address(&shared.query_empty), (tiles & 1) ^ 1);
        barrier_expect(shared_address(&shared.query_full), kRows * kDim * 2);
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
          copy_box(shared_address(shared.query) + panel * (kRows * 128), &maps.query, shared_address(&shared.query_full),
                   panel * 64, 0, note.first_query, note.head >> work.pack_shift, note.batch);
        }
      }
      ++tiles;
    }
    value_empty.wait_empty(n);
    load(shared_address(shared.value[n % kShape.stages]), value_full.at(n), note, flags & kInOrder, maps.value, p.value,
         static_cast<int>(p.value_dim));
    if (!is_single) __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(note_empty.at(n));
  }
}

// Four lanes hold a row's columns in pairs; afterwards lane i holds the eight columns 8i..8i+7 of 32.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t give = upper ? x[i] : x[i + step];
      const uint32_t got = __shfl_xor_sync(0xffffffffu, give, step);
      if (upper) {
        x[i] = got;
      } else {
        x[i + step] = got;
      }
    }
  }
}

// Hides what the note hides: x becomes -inf there. `positions` are those of the thread's two rows.
template <int kN, class Chunk>
__device__ __forceinline__ void hide(float (&x)[kN][4], const Chunk& note, uint32_t flags, bool is_causal, int column,
                                     const int (&positions)[2], const int (&queries)[2]) {
  auto keep = [&](int i, int r, bool left, bool right) {
    if (!left) x[i][2 * r] = negative_infinity();
    if (!right) x[i][2 * r + 1] = negative_infinity();
  };
  if (flags & kLimit) {
    const int base = note.base + column;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int last = is_causal ? positions[r] : kLastPosition;
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const int key = base + 8 * i;
        keep(i, r, key >= 0 && key <= last, key + 1 >= 0 && key + 1 <= last);
      }
    }
  } else if (flags & kSpans) {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const int4 spans = *reinterpret_cast<const int4*>(&note.span[column + 8 * i]);
      const Span left{spans.x, spans.y}, right{spans.z, spans.w};
#pragma unroll
      for (int r = 0; r < 2; ++r) keep(i, r, left.sees(positions[r]), right.sees(positions[r]));
      asm volatile("" ::: "memory");  // one load after the other: registers are short here
    }
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int w = 0; w < kN / 4; ++w) {
        const uint32_t bits = note.bits[queries[r]][w] >> column;
#pragma unroll
        for (int i = 0; i < 4; ++i) keep(4 * w + i, r, bits >> 8 * i & 1, bits >> 8 * i & 2);
        asm volatile("" ::: "memory");
      }
    }
  }
}

template <class T, int kDim, Variant kVariant>
__device__ __forceinline__ void compute_tiles(const ForwardCall& call, const WorkPlan& work,
                                              ForwardShared<kDim, kVariant>& shared, bool has_copies) {
  constexpr ForwardShape kShape = kForwardShape<kDim, kVariant>;
  using Chunk = Note<kForwardShape<kDim, kVariant>.keys>;
  constexpr int kN = kShape.keys / 8, kOut = kDim / 8, kSteps = kShape.keys / 16;
  const AttentionParams& p = call.p;
  const int group = static_cast<int>(threadIdx.x) / kWarpgroup, thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int warp = thread / 32, lane = thread % 32, column = lane % 4 * 2;
  const int row = group * 64 + warp * 16 + lane / 4;  // of the tile; and row + 8

  const Ring<kShape.notes> note_empty{shared_address(shared.note_empty)};
  const Ring<kShape.stages> key_full{shared_address(shared.key_full)}, key_empty{shared_address(shared.key_empty)},
      value_full{shared_address(shared.value_full)}, value_empty{shared_address(shared.value_empty)};
  const uint32_t query_full = shared_address(&shared.query_full), query_empty = shared_address(&shared.query_empty);
  const uint64_t query_tile = describe_panels(shared_address(shared.query) + group * (64 * 128), kRows * 128);
  const uint64_t key_tiles = describe_panels(shared_address(shared.key), kShape.keys * 128);
  const uint64_t value_tiles = describe_panels(shared_address(shared.value), kShape.keys * 128);
  constexpr uint32_t kStageStep = kShape.keys * kDim * 2 >> 4;  // in units of a description

  float out[1][kOut][4], x[1][kN][4];
  uint32_t weights[kSteps][4];
  uint32_t n = 0, tiles = 0;

  auto arrive = [&](uint32_t barrier) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  };
  auto begin_scores = [&](uint32_t stage) {
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      Product<T, kShape.keys>::from_shared(x[0], query_tile + (k / 4 * (kRows * 128) + k % 4 * 32 >> 4),
                                           key_tiles + stage * kStageStep + (k / 4 * (kShape.keys * 128) + k % 4 * 32 >> 4),
                                           k > 0);
    }
    commit_products();
  };
  auto begin_sums = [&](uint32_t stage) {
    constexpr int kPart = kDim < 128 ? kDim : 128;  // columns at a time
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int part = 0; part < kDim; part += kPart) {
        Product<T, kPart>::from_registers(
            reinterpret_cast<float (&)[kPart / 8][4]>(out[0][part / 8]), weights[k],
            value_tiles + stage * kStageStep + (part / 64 * (kShape.keys * 128) + k * (16 * 128) >> 4));
      }
    }
    commit_products();
  };
  auto pack_weights = [&] {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto& pair = x[0][2 * k + i / 2];
        weights[k][i] = Element<T>::pack(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
      }
    }
  };

  for (;;) {
    key_full.wait_full(n);
    if (shared.notes[n % kShape.notes].flags & kEnd) break;
    barrier_wait(query_full, tiles & 1);
    const int batch = shared.notes[n % kShape.notes].batch, first_head = shared.notes[n % kShape.notes].head;
    const int first_query = shared.notes[n % kShape.notes].first_query;
    const int shift = static_cast<int>(p.key_length - p.query_length);

    OnlineSoftmax<1> softmax;
    float factor[1][2];
    bool moves = false;
#pragma unroll
    for (int i = 0; i < kOut; ++i) out[0][i][0] = out[0][i][1] = out[0][i][2] = out[0][i][3] = 0.0f;

    // Products to weights: logits, what is hidden, the running maximum, exponentials, dropout.
    auto weigh = [&](const Chunk& note, uint32_t flags) {
      const int query[2] = {first_query + (row >> work.pack_shift), first_query + (row + 8 >> work.pack_shift)};
      float to_base_2 = call.scale_2;
      if constexpr (kVariant == Variant::kGathered) {
        if (p.key_bias.data) {
          const float to_logit = to_base_2;
          to_base_2 = 1.0f;
#pragma unroll
          for (int i = 0; i < kN; ++i) {
            const float2 bias = *reinterpret_cast<const float2*>(&note.key_bias[column + 8 * i]);
            x[0][i][0] = fmaf(x[0][i][0], to_logit, bias.x), x[0][i][1] = fmaf(x[0][i][1], to_logit, bias.y);
            x[0][i][2] = fmaf(x[0][i][2], to_logit, bias.x), x[0][i][3] = fmaf(x[0][i][3], to_logit, bias.y);
          }
        }
      }
      auto key_of = [&](int at) { return flags & kInOrder ? note.base + at : note.index[at]; };
      if constexpr (kVariant == Variant::kGeneral) {
        to_base_2 = 1.0f;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const LogitTerms<T> terms(p, batch, first_head + (row + 8 * r & (1 << work.pack_shift) - 1));
#pragma unroll
          for (int i = 0; i < kN; ++i) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int at = column + 8 * i + e;
              float& logit = x[0][i][2 * r + e];
              const float bias = terms.bias ? terms.bias_at(query[r], key_of(at), static_cast<int>(p.query_length)) : 0.0f;
              logit = fmaf(terms.capped(logit) + bias, kLog2e, note.key_bias[at]);
            }
          }
        }
      }
      if (flags & (kLimit | kSpans | kBits))
        hide(x[0], note, flags, p.mask.is_causal, column, {query[0] + shift, query[1] + shift},
             {row >> work.pack_shift, row + 8 >> work.pack_shift});
      moves = softmax.move_maximum(x, to_base_2, factor);
      softmax.exponentiate(x, to_base_2);
      if constexpr (kVariant == Variant::kGeneral) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const Dropout dropout(p, batch, first_head + (row + 8 * r & (1 << work.pack_shift) - 1));
          if (dropout.is_on()) {
            const uint32_t row_key = dropout.row_key(query[r]);
#pragma unroll
            for (int i = 0; i < kN; ++i) {
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                const uint32_t key = static_cast<uint32_t>(key_of(column + 8 * i + e));
                if (!dropout_keeps(row_key, key, dropout.threshold)) x[0][i][2 * r + e] = 0.0f;
              }
            }
          }
        }
      }
    };

    // The first chunk: nothing to overlap with yet.
    uint32_t flags = shared.notes[n % kShape.notes].flags;
    if (has_copies) fence_async();  // gathered rows came by ordinary copies
    pin(x[0]);
    begin_products();
    begin_scores(n % kShape.stages);
    wait_products<0>();
    pin(x[0]);
    arrive(key_empty.at(n));
    if (flags & kLast) arrive(query_empty);
    weigh(shared.notes[n % kShape.notes], flags);
    arrive(note_empty.at(n));
    pack_weights();

    while (!(flags & kLast)) {
      ++n;
      key_full.wait_full(n);
      flags = shared.notes[n % kShape.notes].flags;
      if (has_copies) fence_async();
      group_sync(2 + group, kConsumers * kWarpgroup);  // take turns at the tensor cores
      pin(x[0]);
      pin(out[0]);
      begin_products();
      begin_scores(n % kShape.stages);
      value_full.wait_full(n - 1);
      if (has_copies) fence_async();
      begin_sums((n - 1) % kShape.stages);
      group_arrive(3 - group, kConsumers * kWarpgroup);
      wait_products<1>();
      pin(x[0]);
      arrive(key_empty.at(n));
      if (flags & kLast) arrive(query_empty);
      weigh(shared.notes[n % kShape.notes], flags);
      arrive(note_empty.at(n));
      wait_products<0>();
      pin(out[0]);
      arrive(value_empty.at(n - 1));
      if (moves) softmax.rescale(out, factor);
      pack_weights();
    }
    value_full.wait_full(n);
    if (has_copies) fence_async();
    pin(out[0]);
    begin_products();
    begin_sums(n % kShape.stages);
    wait_products<0>();
    pin(out[0]);
    arrive(value_empty.at(n));

    // Normalise and write: a row in pieces of 16 bytes.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = first_head + (row + 8 * r & (1 << work.pack_shift) - 1),
                query = first_query + (row + 8 * r >> work.pack_shift);
      float log_sum, scale;
      softmax.finish(0, r, log_sum, scale);
      if constexpr (kVariant == Variant::kGeneral) scale *= Dropout(p, batch, head).keep_scale;
      const bool is_row = query < p.query_length;
      if (is_row && lane % 4 == 0) static_cast<float*>(p.lse)[(batch * p.heads + head) * p.query_length + query] = log_sum;
      T* const to =
          static_cast<T*>(p.out.data) + batch * p.out.batch_stride + head * p.out.head_stride + query * p.out.row_stride;
#pragma unroll
      for (int i = 0; i < kOut; i += 4) {
        uint32_t piece[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) piece[j] = Element<T>::pack(out[0][i + j][2 * r] * scale, out[0][i + j][2 * r + 1] * scale);
        transpose_quad(piece);
        const int at = (i + lane % 4) * 8;
        if (is_row && at < p.value_dim) *reinterpret_cast<uint4*>(to + at) = {piece[0], piece[1], piece[2], piece[3]};
      }
    }
    ++n;
    ++tiles;
  }
}

template <class T, int kDim, Variant kVariant>
__global__ __launch_bounds__(kThreads, 1) void forward_kernel(const __grid_constant__ ForwardCall call,
                                                              const __grid_constant__ WorkPlan work,
                                                              const __grid_constant__ Maps maps) {
  constexpr ForwardShape kShape = kForwardShape<kDim, kVariant>;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardShared<kDim, kVariant>*>(shared_bytes);
  // Without gathering, one thread loads everything.
  const bool is_single = !call.plan.index && !call.p.mask.tiles.data;
  if (threadIdx.x == 0) {
    const int loaders = is_single ? 1 : kWarpgroup, loading_warps = is_single ? 1 : 4, warps = kConsumers * 4;
    barrier_init(shared_address(&shared.query_full), 1);
    barrier_init(shared_address(&shared.query_empty), warps);
    for (int i = 0; i < kShape.stages; ++i) {
      barrier_init(shared_address(&shared.key_full[i]), loaders);
      barrier_init(shared_address(&shared.value_full[i]), loaders);
      barrier_init(shared_address(&shared.key_empty[i]), warps);
      barrier_init(shared_address(&shared.value_empty[i]), warps);
    }
    for (int i = 0; i < kShape.notes; ++i) {
      barrier_init(shared_address(&shared.note_full[i]), kWarpgroup);
      barrier_init(shared_address(&shared.note_empty[i]), warps + loading_warps);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const int role = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (role < kConsumers) {
    take_registers<kConsumerRegisters>();
    if (role == 1) group_arrive(2, kConsumers * kWarpgroup);  // the first turn is warpgroup 0's
    compute_tiles<T, kDim, kVariant>(call, work, shared, !is_single);
  } else if (role == kConsumers) {
    give_registers<kLoaderRegisters>();
    load_tiles<kDim, kVariant>(call, work, maps, shared, is_single);
  } else {
    give_registers<kWalkerRegisters>();
    Walk<kVariant, kShape.keys, kShape.notes>(call, work, shared.queues, shared.notes, shared_address(shared.note_full),
                                              shared_address(shared.note_empty))
        .run();
  }
}

template <class T, int kDim, Variant kVariant>
cudaError_t launch_forward(const ForwardCall& call, const WorkPlan& work, const Maps& maps, int blocks, cudaStream_t stream) {
  constexpr int kBytes = sizeof(ForwardShared<kDim, kVariant>);
  static_assert(kBytes <= 227 * 1024);
  const auto kernel = forward_kernel<T, kDim, kVariant>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(blocks), kThreads, kBytes, stream>>>(call, work, maps);
  return cudaGetLastError();
}

}  // namespace dmattn::cuda::sm90
