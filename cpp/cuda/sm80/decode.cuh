// Decoding for sm80 and later: a block loops over some splits of a sequence's keys for all query heads that share a key head.
//
// What counts is that enough bytes are on their way all the time. So each slice of the keys has a team of warps with a ring of
// its own and meets the other teams at the end of a split alone, and the ring runs on over the splits of a block.
#pragma once

#include <type_traits>

#include "../common/kernel_limits.cuh"
#include "../common/logits.cuh"
#include "token_step.cuh"

namespace dmattn::cuda::sm80 {

inline constexpr int kDecodeLevels = 5;  // of the tree of a block's splits
static_assert(1 << kDecodeLevels >= kMostBlockSplits);

// Sizes that follow from a shape.
template <int kDim, DecodeRows kRows>
struct DecodeSizes {
  static constexpr DecodeShape kShape = kDecodeShape<kDim, kRows>;
  static constexpr int kKeys = kShape.keys, kStages = kShape.stages, kSlices = kShape.slices, kTeamWarps = kShape.row_warps;
  static constexpr int kTeamThreads = 32 * kTeamWarps, kThreads = kSlices * kTeamThreads;
  static constexpr int kTileRows = 16 * kTeamWarps, kChunkKeys = kKeys * kSlices;  // of a block
  static constexpr int kQuads = kDim / 4;                                          // groups of four columns in a row
  static constexpr int kQuadsPerThread = kTileRows * kQuads / kThreads;            // of a row, for each thread
};

template <int kDim, DecodeRows kRows>
struct alignas(128) DecodeShared {
  using Sizes = DecodeSizes<kDim, kRows>;
  DecodeStage<kDim, Sizes::kKeys> stages[Sizes::kSlices][Sizes::kStages];
  float key_bias[Sizes::kSlices][Sizes::kStages][Sizes::kKeys];
  float2 row_sums[Sizes::kSlices][Sizes::kTileRows];  // of one split: maximum, sum
};

// Waits for all threads of a team: those of a warp, or of the block where it has one team.
template <int kTeamWarps>
__device__ __forceinline__ void sync_team() {
  if constexpr (kTeamWarps == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Waits like sync_team, and says whether `holds` is true for any thread of the team; the threads of a warp give the same value.
// With lists the warps of a team share the keys, and each looks at the page numbers of its keys only.
template <int kTeamWarps>
__device__ __forceinline__ bool any_of_team(bool holds) {
  if constexpr (kTeamWarps == 1) {
    __syncwarp();
    return holds;
  } else {
    return __syncthreads_or(holds) != 0;
  }
}

// What makes logits of the products of a warp's rows.
struct ScoreTerms {
  float scale;
  LogitCap cap;
  const float* row_bias[2];  // [Smax] for each of this thread's rows where heads of the group differ in their key_bias, or null
  int end[2];                // the first key that each row does not see
  int whole_until;           // all rows see the keys before

  // Which keys do this thread's two rows see? `row` is the first, of the block's tile.
  template <class Tile>
  __device__ __forceinline__ void find_keys(const DecodeCall& call, const Tile& here, int row, bool bias_is_shared) {
    const DecodeParams& p = call.p;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowPlace place(call, here.head, here.first_row + min(row + 8 * r, here.rows - 1));
      end[r] = p.is_causal ? here.length - static_cast<int>(p.queries) + place.query + 1 : here.length;
      row_bias[r] = bias_is_shared ? nullptr : row_of<const float>(p.key_bias, here.batch, place.head);
    }
    whole_until = here.length - (p.is_causal ? static_cast<int>(p.queries) - 1 : 0);
  }

  // Products with keys first, first + 1, .. to logits. This thread has columns lane % 4 * 2 and the one after, of every eight.
  // shared_bias [keys] is the key_bias of the group, or null, and with lists -inf for places without a key; keys from last_key on
  // do not exist.
  template <bool kHasLists, int kN>
  __device__ __forceinline__ void apply(float (&scores)[kN][4], int first, const float* shared_bias, int last_key) const {
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] *= scale;
    }
    if (cap.softcap > 0.0f) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[n][e] = cap(scores[n][e]);
      }
    }
    if (shared_bias) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float2 bias = *reinterpret_cast<const float2*>(shared_bias + 8 * n + column);
        scores[n][0] += bias.x, scores[n][1] += bias.y, scores[n][2] += bias.x, scores[n][3] += bias.y;
#pragma unroll
        for (int e = 0; kHasLists && e < 4; ++e) {  // otherwise a score of NaN would stay
          if ((e % 2 ? bias.y : bias.x) == negative_infinity()) scores[n][e] = negative_infinity();
        }
      }
    } else if (row_bias[0]) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = first + 8 * n + column + e % 2;
          if (key < last_key) scores[n][e] += row_bias[e / 2][key];
        }
      }
    }
    if (first + 8 * kN > whole_until) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (first + 8 * n + column + e % 2 >= end[e / 2]) scores[n][e] = negative_infinity();
        }
      }
    }
  }
};

// The end of a split: warps leave what they found in their slice's stage, and each thread adds up its quads over the slices.
template <int kDim, DecodeRows kRows>
struct Exchange {
  using Sizes = DecodeSizes<kDim, kRows>;
  DecodeShared<kDim, kRows>& shared;
  int stage;  // nobody reads it any more, and nothing is on its way into it

  // Four columns of a row in a stage, in a swizzled order: eight rows, or eight neighbouring quads, lie in different banks.
  __device__ __forceinline__ float* quad_of(int slice, int row, int quad) const {
    float* const sums = reinterpret_cast<float*>(&shared.stages[slice][stage]);
    return sums + row * kDim + ((quad ^ (row % 8 * 2)) * 4);
  }

  // The sums of this warp's rows from tile_row on; those below `rows` exist.
  __device__ __forceinline__ void leave(int slice, int tile_row, int rows, const OnlineSoftmax<1, true>& softmax,
                                        const float (&out)[kDim / 8][4], bool has_bad_page) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = tile_row + 8 * r + lane / 4;
      const float sum = sum_over_quad(softmax.sum[0][r]);
      if (row >= rows) continue;
      if (lane % 4 == 0) shared.row_sums[slice][row] = {softmax.maximum[0][r], has_bad_page ? kBadPage : sum};
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        float* const to = quad_of(slice, row, 2 * n + lane % 4 / 2) + lane % 2 * 2;
        *reinterpret_cast<float2*>(to) = {out[n][2 * r], out[n][2 * r + 1]};
      }
    }
  }

  // What all slices found for a quad.
  __device__ __forceinline__ Part take(int row, int quad) const {
    Part parts[Sizes::kSlices];
#pragma unroll
    for (int s = 0; s < Sizes::kSlices; ++s) {
      parts[s] = {shared.row_sums[s][row], *reinterpret_cast<const float4*>(quad_of(s, row, quad))};
    }
    return merge_all(parts);
  }
};

// Loads the rows of queries into the registers of a team, through the stage of its ring that is filled last.
template <class T, int kDim, DecodeRows kRows>
struct QueryRows {
  using Sizes = DecodeSizes<kDim, kRows>;
  uint32_t tile;

  __device__ __forceinline__ void start(const DecodeCall& call, const DecodeTile<Sizes::kTileRows>& here, int thread) const {
    const DecodeParams& p = call.p;
    const RowCopy<kDim, Sizes::kTeamThreads> copy(static_cast<int>(p.head_dim), thread);
#pragma unroll 1
    for (int r = 0; r < Sizes::kTileRows; r += copy.kRows) {
      const int row = copy.row + r;
      const bool wanted = row < here.rows;
      const char* from = static_cast<const char*>(p.query.data);
      if (wanted) {
        const RowPlace place(call, here.head, here.first_row + row);
        from = rows_of_head(p.query, here.batch, place.head) + place.query * p.query.row_stride * 2;
      }
      copy.start(tile, r, from, wanted);
    }
  }
  template <class Copies>
  __device__ __forceinline__ void start_with_chunks(const DecodeCall& call, const DecodeTile<Sizes::kTileRows>& here, int thread,
                                                    Copies& copies) const {
#pragma unroll 1
    for (int chunk = 0; chunk + 1 < Sizes::kStages; ++chunk) {
      copies.start(chunk);
      if (chunk == 0) start(call, here, thread);
      copy_async_commit();
    }
  }
  __device__ __forceinline__ void take(uint32_t (&query)[kDim / 16][4], int tile_row) const {
    const auto fragment = Fragment<kDim>::tall(tile, tile_row, 0);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) load_matrix(query[k], fragment.step(0, 2 * k));
  }
};

// The step of a StepCall, its loads begun; nothing for other calls.
template <int kDim, int kWarps, class Call, class Tile>
__device__ __forceinline__ auto begin_token(const Call& given, TokenShared<kDim, kWarps>& shared, const Tile& here) {
  if constexpr (std::is_same_v<Call, StepCall>) {
    TokenStep<kDim, kWarps> token(given.cache, shared, here.batch, here.kv_head);
    token.begin(here.batch, here.kv_head, here.first_key, given.decode.block_splits * given.decode.split_keys);
    return token;
  } else {
    return 0;
  }
}

// Says what the other blocks of the cluster will send, and that they may begin to.
template <int kDim, int kWarps, bool kTakesToken, class Token, class Tile>
__device__ __forceinline__ void join_cluster(const DecodeCall& call, const Tile& here, [[maybe_unused]] Token& token,
                                             uint8_t* inbox) {
  if (threadIdx.x == 0) {
    if constexpr (kTakesToken) token.exchange.expect(call.parts * kWarps * static_cast<int>(sizeof(float4)));
    ClusterReduceLayout<kDim>(call.parts, here.rows).expect(inbox, here.part);
  }
  DsmemExchange::cluster_arrive();
}

// query [B, H, T, D], key, value [B, Hkv, Smax, D or Dv] or pages -> out, lse, or part_sums, part_out. A warp has 16 rows, and
// the keys of one slice; its team are the warps of the slice. A StepCall takes a new token into the cache on the way; a
// ListedCall reads the keys of lists.
template <class T, int kDim, DecodeRows kRows, class Call>
__global__ __launch_bounds__(DecodeSizes<kDim, kRows>::kThreads,
                             kDecodeShape<kDim, kRows>.blocks_per_sm) void decode_kernel(const __grid_constant__ Call given) {
  constexpr bool kTakesToken = std::is_same_v<Call, StepCall>, kHasLists = std::is_same_v<Call, ListedCall>;
  const DecodeCall& call = decode_of(given);
  using Shared = DecodeShared<kDim, kRows>;
  using Sizes = DecodeSizes<kDim, kRows>;
  constexpr int kStages = Sizes::kStages;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const DecodeParams& p = call.p;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, team_thread = thread % Sizes::kTeamThreads;
  const int slice = thread / Sizes::kTeamThreads, tile_row = team_thread / 32 * 16;
  DecodeTile<Sizes::kTileRows> here(call);
  const bool bias_is_shared = static_cast<int>(p.key_bias.head_divisor) % call.group == 0;
  using Token = TokenShared<kDim, Sizes::kThreads / 32>;
  [[maybe_unused]] auto& token_shared = *reinterpret_cast<Token*>(shared_bytes + sizeof(Shared));
  uint8_t* const inbox = shared_bytes + sizeof(Shared) + (kTakesToken ? Token::bytes(call.parts) : 0);
  if (call.is_cluster) join_cluster<kDim, Sizes::kThreads / 32, kTakesToken>(call, here, token_shared, inbox);
  ChunkCopies<kDim, Sizes::kKeys, kStages, Sizes::kTeamThreads, kHasLists> copies{
      p, here.batch, here.kv_head, here.first_key + slice * Sizes::kKeys, Sizes::kChunkKeys};
  copies.begin(team_thread, shared_address(&shared.stages[slice][0]), shared_address(&shared.key_bias[slice][0][0]),
               bias_is_shared ? row_of<const float>(p.key_bias, here.batch, RowPlace(call, here.head, 0).head) : nullptr);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  [[maybe_unused]] auto token = begin_token<kDim, Sizes::kThreads / 32>(given, token_shared, here);
  here.find_length(call);
  if constexpr (kHasLists) copies.begin_list(call, here.head);
  if (here.first_key >= here.last_key && call.part_out) return;
  copies.last_key = here.last_key;
  copies.chunks = (here.last_key - here.first_key + Sizes::kChunkKeys - 1) / Sizes::kChunkKeys;
  // Start the copies: the first chunk with the queries, and as many chunks as there is room for.
  const QueryRows<T, kDim, kRows> query_rows{shared_address(&shared.stages[slice][kStages - 1])};
  query_rows.start_with_chunks(call, here, team_thread, copies);

  // Decide where the new token goes.
  if constexpr (kTakesToken) {
    token.decide(call.is_cluster, call.parts, here.part);
    if (!token.has_length) here.length = 0, here.last_key = here.first_key, copies.chunks = 0;
  }

  ScoreTerms terms{call.scale, LogitCap(p.softcap)};
  terms.find_keys(call, here, tile_row + lane / 4, bias_is_shared);
  const bool has_rows = tile_row < here.rows;

  // Take the queries.
  copy_async_wait<kStages - 2>();
  sync_team<Sizes::kTeamWarps>();
  uint32_t query[kDim / 16][4];
  query_rows.take(query, tile_row);

  float out[1][kDim / 8][4];
  clear(out);
  OnlineSoftmax<1, true> softmax;
  Part split_sums[Sizes::kQuadsPerThread][kDecodeLevels];  // sums of splits that wait for their neighbours
#pragma unroll 1
  for (int i = 0; copies.chunks <= 0 && i < Sizes::kQuadsPerThread; ++i) split_sums[i][0] = Part::nothing();
  const int split_chunks = call.split_keys / Sizes::kChunkKeys;
  int splits = 0, until = split_chunks;  // done, and the chunk behind the present one

  for (int chunk = 0; chunk < copies.chunks; ++chunk) {
    // Wait for the chunk. Nobody reads the one before any more: start one in its place.
    copy_async_wait<kStages - 2>();
    sync_team<Sizes::kTeamWarps>();
    copies.start(chunk + kStages - 1);
    copy_async_commit();
    if constexpr (kTakesToken) {
      token.patch_token(shared.stages[slice][chunk % kStages], shared.key_bias[slice][chunk % kStages],
                        copies.first_key_of(chunk));
    }
    const uint32_t key_tile = copies.stages + chunk % kStages * copies.kStageBytes,
                   value_tile = key_tile + copies.kStageBytes / 2;
    if (has_rows) {
      // Multiply scores = Q K^T.
      float scores[1][Sizes::kKeys / 8][4];
      clear(scores);
      multiply_held<T>(scores[0], query, Fragment<kDim>::wide(key_tile, 0, 0));
      const float* const bias = copies.key_bias || kHasLists ? shared.key_bias[slice][chunk % kStages] : nullptr;
      terms.template apply<kHasLists>(scores[0], copies.first_key_of(chunk), bias, here.last_key);
      // Turn scores into weights, and rescale the sums if a maximum moved.
      softmax.update(scores, 1.0f, out);
      // Multiply out += weights V.
      multiply_by_columns<T, Sizes::kKeys / 16>(
          out, [&](int k, int m, uint32_t (&a)[4]) { as_operand<T>(scores[m], k, a); }, Fragment<kDim>::tall(value_tile, 0, 0));
    }
    const bool is_last = chunk + 1 == copies.chunks;
    if (chunk + 1 < until && !is_last) continue;

    // End the split: add up the slices, then add them to the splits before.
    copies.has_bad_page = any_of_team<Sizes::kTeamWarps>(copies.has_bad_page);
    const Exchange<kDim, kRows> exchange{shared, chunk % kStages};
    if (has_rows) exchange.leave(slice, tile_row, here.rows, softmax, out[0], copies.has_bad_page);
    __syncthreads();
    for (int i = 0, at = thread; at < here.rows * Sizes::kQuads; at += Sizes::kThreads, ++i) {
      add_part(split_sums[i], splits, is_last, exchange.take(at / Sizes::kQuads, at % Sizes::kQuads));
    }
    __syncthreads();
    clear(out);
    softmax = {};
    ++splits, until += split_chunks;
  }
  copy_async_wait<0>();
  const auto part_at = [&](int i) { return split_sums[i][0]; };
  if constexpr (kRows == DecodeRows::kFew) {
    if (call.is_cluster) {
      if constexpr (!kTakesToken) DsmemExchange::cluster_wait();
      cluster_reduce<T, kDim, Sizes::kThreads>(call, here, inbox, part_at);
    }
  }
  if (!call.is_cluster) write_partial<T, kDim, Sizes::kThreads>(call, here, part_at);
  if constexpr (kTakesToken) {
    if (here.part == 0) token.write();
  }
}

template <class T, int kDim, DecodeRows kRows, class Call>
cudaError_t launch_decode(const Call& given, cudaStream_t stream) {
  const DecodeCall& call = decode_of(given);
  if constexpr (std::is_same_v<Call, DecodeCall>) {
    if (call.p.index.entries.data) return launch_decode<T, kDim, kRows>(ListedCall{call}, stream);
  }
  using Sizes = DecodeSizes<kDim, kRows>;
  constexpr int kBytes = sizeof(DecodeShared<kDim, kRows>);
  constexpr bool kTakesToken = std::is_same_v<Call, StepCall>;
  using Token = TokenShared<kDim, Sizes::kThreads / 32>;
  static_assert(kBytes + (kTakesToken ? Token::bytes(1) : 0) <= 99 * 1024);
  const int bytes = kBytes + (kTakesToken ? Token::bytes(call.parts) : 0) +
                    (call.is_cluster ? ClusterReduceLayout<kDim>(call.parts, call.rows).bytes() : 0);
  const auto kernel = decode_kernel<T, kDim, kRows, Call>;
  static KernelAttribute shared_bytes, large_clusters;
  cudaError_t status = allow_shared_bytes(shared_bytes, kernel, bytes);
  const unsigned cluster = call.is_cluster ? static_cast<unsigned>(call.parts) : 1;
  if (status == cudaSuccess && cluster > 8) {
    status = large_clusters.raise(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (status != cudaSuccess) return status;
  static ClusterSizes known{};
  if (cluster > 1 && !cluster_fits(kernel, cluster, Sizes::kThreads, bytes, known)) return cudaErrorInvalidClusterSize;
  const int64_t tiles = (call.rows + Sizes::kTileRows - 1) / Sizes::kTileRows;
  const int64_t blocks = call.p.batch * call.heads * call.parts * tiles;
  return launch_dependent_clusters(kernel, cluster, grid_of(blocks), Sizes::kThreads, bytes, stream, given);
}

}  // namespace dmattn::cuda::sm80
