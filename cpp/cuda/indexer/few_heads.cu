// Scores of an indexer with few heads, as models of grouped queries have them. A warp keeps 16 queries of all heads in registers,
// and chunk after chunk of keys passes by, read from global memory the way mma takes them: warps share nothing and never wait for
// one another. The four warps of a block have 64 queries; where a tile has no more than 16, as in decoding, each warp takes some
// of its keys.
#include "../common/kernel_limits.cuh"
#include "score_inputs.cuh"
#include "score_rows.cuh"

namespace dmattn::cuda {
namespace {

constexpr int kHeads = kFewIndexHeads, kWarps = 4, kThreads = kWarps * 32;
constexpr int kChunk = 32, kColumns = kChunk / 8;  // keys that a warp scores at once, in columns of mma
static_assert(kChunk == 1 << log2_keys_of_warp(kHeads, 64));

// Whether the warps of a block share the keys of a tile of so many queries, and have all of its queries each.
DMATTN_HOST_DEVICE constexpr bool shares_keys(int64_t queries) { return queries <= 16; }

// Candidates on their way into memory. A lane collects those that it finds in each of its rows in shared memory, and the warp
// writes them down together when some lane might run out of room.
struct StagedCandidates {
  static constexpr int kRoom = 20;                 // of a lane, for one row
  static constexpr int kNextBytes = (32 + 2) * 8;  // between two of a lane's: not 32 pairs, for reads without bank conflicts
  static constexpr int kRowBytes = kRoom * kNextBytes, kBytes = 2 * kRowBytes;  // scores and columns
  static constexpr int kFullBytes = (kRoom - 2 * kColumns) * kNextBytes;        // no room for all of a chunk behind this
  uint32_t first, next[2];  // shared addresses, of rows lane / 4 and lane / 4 + 8
  int first_row;            // of the warp, in this part

  __device__ __forceinline__ StagedCandidates(uint32_t memory, int row)
      : first(memory + threadIdx.x % 32 * 8), next{first, first + kRowBytes}, first_row(row) {
    asm volatile("" : "+r"(first));  // not to be computed again
  }

  // Takes the scores from `least` on, of columns from `column` on.
  __device__ __forceinline__ void add(const float (&x)[2][kColumns][2], const float (&least)[2], int column) {
#pragma unroll
    for (int i = 0; i < 2 * kColumns; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        asm volatile(
            "{\n.reg .pred kept;\nsetp.ge.f32 kept, %1, %2;\n@kept st.shared.v2.b32 [%0], {%1, %3};\n@kept add.u32 %0, %0, %4;\n}"
            : "+r"(next[r])
            : "f"(x[r][i / 2][i % 2]), "f"(least[r]), "r"(column + 8 * (i / 2) + i % 2), "n"(kNextBytes)
            : "memory");
      }
    }
  }
  __device__ __forceinline__ bool may_overflow() const {
    const uint32_t full = first + kFullBytes;
    return __any_sync(0xffffffffu, next[0] > full || next[1] > full + kRowBytes);
  }
  __device__ __forceinline__ void flush(const IndexCall& call) {
    const int lane = threadIdx.x % 32, capacity = static_cast<int>(call.sample.capacity);
    asm volatile("" : "+r"(first_row));  // so that nothing of this is kept in registers between calls
    int entries[2], from[2];             // from: the entry of the warp's candidates that the lane's first becomes
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane / 4 + 8 * r;
      entries[r] = static_cast<int>(next[r] - first - r * kRowBytes) / kNextBytes;
      next[r] = first + r * kRowBytes;
      int total, start = 0;
      const int sum = sum_in_row(entries[r], total);
      if (lane % 4 == 3 && total > 0) start = atomicAdd(call.counts + first_row + row, total);
      start = __shfl_sync(0xffffffffu, start, 3, 4) + sum - entries[r];
      entries[r] = min(entries[r], capacity - start), from[r] = row * capacity + start;
    }
    __syncwarp();
    const IndexEntry* const to = call.candidates + static_cast<int64_t>(first_row) * capacity;
    const int most = __reduce_max_sync(0xffffffffu, max(entries[0], entries[1]));
    uint32_t read = first - lane * 8 + lane % 8 * kNextBytes + lane / 8 * 8;
#pragma unroll 1
    for (int own = lane % 8; own - lane % 8 < most; own += 8, read += 8 * kNextBytes) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll 4
        for (int row = 0; row < 8; ++row) {
          // Eight lanes copy what one found.
          const int source = row * 4 + lane / 8;
          const int end = __shfl_sync(0xffffffffu, entries[r], source), at = __shfl_sync(0xffffffffu, from[r], source) + own;
          asm volatile(  // predicates, so that the warp stays together
              "{\n.reg .pred is_one;\n.reg .b32 score, column;\n.reg .b64 to;\nsetp.lt.s32 is_one, %0, %1;\n"
              "@is_one ld.shared.v2.b32 {score, column}, [%2];\nshr.s32 column, column, %5;\n"
              "mad.wide.s32 to, %4, 8, %3;\n@is_one st.global.v2.b32 [to], {score, column};\n}" ::"r"(own),
              "r"(end), "r"(read + r * kRowBytes + row * 32), "l"(to), "r"(at), "r"(call.log2_score_block)
              : "memory");
        }
      }
    }
    __syncwarp();
  }
};

// Rows of queries and keys as operands of mma. A product is a sum over dimensions in any order, so that a lane reads 16 bytes of
// a row at once: of each 32 dimensions the lanes lane % 4 have 8, two for each half of a step of mma, in two steps.
template <int kSteps>
struct Pieces {
  static_assert(kSteps % 2 == 0);
  uint32_t of[kSteps / 2][4];
  static __device__ __forceinline__ int first_dim() { return static_cast<int>(threadIdx.x) % 4 * 8; }
  // From where the row's dimension first_dim() stands; what is not wanted stays as it is.
  __device__ __forceinline__ void load(const char* from, const bool (&wanted)[kSteps / 2]) {
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) {
      asm volatile("{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %5, 0;\n@wanted ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
                   : "+r"(of[i][0]), "+r"(of[i][1]), "+r"(of[i][2]), "+r"(of[i][3])
                   : "l"(from + 64 * i), "r"(static_cast<int>(wanted[i])));
    }
  }
  // Word `half` of step k.
  __device__ __forceinline__ uint32_t word(int k, int half) const { return of[k / 2][k % 2 * 2 + half]; }
};

// The 16 queries of a warp, of all heads; zero where there is no query, head or dimension. Where the scale is negative, so are
// they, for the sum takes what is positive in a product times the scale.
template <int kSteps>
__device__ __forceinline__ void load_queries(const IndexCall& call, const IndexQueries& at, int warp_row, int rows,
                                             uint32_t (&a)[kHeads][kSteps][4], float (&weight)[kHeads][2]) {
  const IndexTopKParams& p = call.p;
  const char* const from = sm80::rows_of_head(p.query, at.batch, at.group);
  const float* const weights = weights_of(p, at);
  const float size = fabsf(static_cast<float>(p.scale));
  const uint32_t sign = p.scale < 0.0 ? 0x80008000u : 0u;
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp_row + 8 * r + static_cast<int>(threadIdx.x) % 32 / 4;
      const bool is_real = row < rows && head < p.heads;
      weight[head][r] = is_real ? weights[(at.first + row) * p.weights.row_stride + head] * size : 0.0f;
      Pieces<kSteps> pieces = {};
      bool wanted[kSteps / 2];
#pragma unroll
      for (int i = 0; i < kSteps / 2; ++i) wanted[i] = is_real && Pieces<kSteps>::first_dim() + 32 * i < p.head_dim;
      pieces.load(from + ((at.first + row) * p.query.row_stride + head * p.query_head_stride + Pieces<kSteps>::first_dim()) * 2,
                  wanted);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        a[head][k][r] = pieces.word(k, 0) ^ sign, a[head][k][2 + r] = pieces.word(k, 1) ^ sign;
      }
    }
  }
}

// The keys of a chunk. Places behind the last key hold earlier keys, or zero: their scores become -inf with all that do not
// compete.
template <int kSteps, bool kFindsCandidates>
struct KeyChunk {
  Pieces<kSteps> of[kColumns] = {};
  const char *from, *at;      // the lane's pieces of the group's first key, and of the next to load
  int64_t row_bytes, step;    // step: from one key of the lane to its next
  int last[kSteps / 2], key;  // last: -1 where the lane has no dimensions; key: the first of the chunk to load

  __device__ __forceinline__ KeyChunk(const IndexTopKParams& p, const IndexQueries& queries)
      : from(sm80::rows_of_head(p.key, queries.batch, queries.group) + Pieces<kSteps>::first_dim() * 2),
        row_bytes(p.key.row_stride * 2),
        step(8 * row_bytes) {
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) {
      last[i] = Pieces<kSteps>::first_dim() + 32 * i < p.head_dim ? static_cast<int>(p.keys) - 1 : -1;
    }
  }
  // The chunk to load begins with this column.
  __device__ __forceinline__ void go_to(int column) {
    key = column + static_cast<int>(threadIdx.x) % 32 / 4, at = from + key * row_bytes;
  }
  // The chunk to load begins so many columns behind the one that was loaded; bytes: from the one's end to the other.
  __device__ __forceinline__ void skip(int columns, int64_t bytes) { key += columns, at += bytes; }
  // The keys of its next eight columns, n columns of mma behind the first. Those of a sample do not stand side by side.
  __device__ __forceinline__ void load_next(const IndexCall& call, int n) {
    bool wanted[kSteps / 2];
    const int own = kFindsCandidates ? key + 8 * n : key_of_column<kFindsCandidates>(call, key + 8 * n);
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) wanted[i] = own <= last[i] && (kFindsCandidates || own >= 0);
    of[n].load(kFindsCandidates ? at : from + own * row_bytes, wanted);
    at += step;
  }
};

// The weighted sums of 16 queries and a chunk of keys: x[r] of row lane / 4 + 8 r, as finish_rows takes them. The next chunk's
// keys come in as these have been used. Heads that there are not count for nothing, also where a key is
// infinite: kAllHeads says that there are kHeads, so that all products can be on their way at once.
template <class T, bool kAllHeads, int kSteps, bool kFindsCandidates>
__device__ __forceinline__ void sum_heads(const IndexCall& call, const uint32_t (&a)[kHeads][kSteps][4],
                                          const float (&weight)[kHeads][2], KeyChunk<kSteps, kFindsCandidates>& keys,
                                          float (&x)[2][kColumns][2]) {
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      if (!kAllHeads && head >= call.p.heads) break;
      float products[4];
      Element<T>::product(products, a[head][0], keys.of[n].word(0, 0), keys.of[n].word(0, 1));
#pragma unroll
      for (int k = 1; k < kSteps; ++k) Element<T>::mma(products, a[head][k], keys.of[n].word(k, 0), keys.of[n].word(k, 1));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& sum = x[e / 2][n][e % 2];
        const float part = positive(products[e]);
        sum = head == 0 ? weight[0][e / 2] * part : fmaf(weight[head][e / 2], part, sum);
      }
    }
    keys.load_next(call, n);
  }
}

// As index_scores_kernel. Blocks of threads share the chunks of keys (x) of a tile of queries (y).
template <class T, int kSteps, bool kFindsCandidates>
__global__ __launch_bounds__(kThreads, kSteps <= 2 ? kFindsCandidates ? 3 : 4
                                                   : 2) void few_heads_kernel(const __grid_constant__ IndexCall call) {
  extern __shared__ __align__(128) uint8_t shared[];
  const IndexTopKParams& p = call.p;
  const int tile = static_cast<int>(gridDim.y - 1 - blockIdx.y);  // the longest first
  const IndexQueries at(call, tile);
  const int rows = min(kIndexTileQueries, static_cast<int>(p.query_length) - at.first);
  const bool is_shared = shares_keys(rows);
  const int warp = static_cast<int>(threadIdx.x / 32), lane = threadIdx.x % 32, warp_row = is_shared ? 0 : warp * 16;
  const int sharers = is_shared ? kWarps : 1;
  int step = static_cast<int>(gridDim.x) * sharers * kChunk;
  int first = static_cast<int>(blockIdx.x) * sharers * kChunk + (is_shared ? warp * kChunk : 0);
  const CompetingRows of_last = competing_rows(p, at.offset + at.first + min(rows, warp_row + 16) - 1, at.length);
  const int end = max(of_last.end, of_last.later_end);
  if (warp_row >= rows || least_key_from<kFindsCandidates>(call, first) >= end) return;

  KeyChunk<kSteps, kFindsCandidates> keys(p, at);
  keys.go_to(first);
#pragma unroll
  for (int n = 0; n < kColumns; ++n) keys.load_next(call, n);
  uint32_t a[kHeads][kSteps][4];
  float weight[kHeads][2];
  load_queries(call, at, warp_row, rows, a, weight);
  const ScoreGroup group(p, at);
  const ScoreRow<kFindsCandidates> of_lane[2] = {{call, at, tile, warp_row + lane / 4, rows},
                                                 {call, at, tile, warp_row + lane / 4 + 8, rows}};
  const CommonKeys<kFindsCandidates> common_keys(call, group, of_lane);
  const Bounds bounds(call, of_lane);
  StagedCandidates candidates(shared_address(shared) + warp * StagedCandidates::kBytes, tile * kIndexTileQueries + warp_row);

  int64_t skipped = (step - kChunk) * keys.row_bytes;
  int has_all_heads = p.heads == kHeads;
  asm volatile("" : "+r"(step), "+l"(skipped), "+r"(has_all_heads));  // not to be computed again
  for (; least_key_from<kFindsCandidates>(call, first) < end; first += step) {
    float x[2][kColumns][2];  // of rows lane / 4 and lane / 4 + 8
    if (kFindsCandidates) {
      keys.skip(step, skipped);
    } else {
      keys.go_to(first + step);
    }
    if (has_all_heads) {
      sum_heads<T, true>(call, a, weight, keys, x);
    } else {
      sum_heads<T, false>(call, a, weight, keys, x);
    }
    const int own = first + lane % 4 * 2;
    finish_rows(call, group, of_lane, x, first, common_keys.hold(call, first, kChunk));
    if constexpr (kFindsCandidates) {
      float least[2];
      if (bounds.least_of(first, kChunk, least)) bounds.drop_equal(x, own);
      if (candidates.may_overflow()) candidates.flush(call);
      candidates.add(x, least, own);
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (of_lane[r].is_real) store_scores(call, x[r], call.scores + of_lane[r].number * call.row_stride, first);
      }
    }
  }
  if constexpr (kFindsCandidates) candidates.flush(call);
}

template <class T, int kSteps, bool kFindsCandidates>
cudaError_t launch(const IndexCall& call, cudaStream_t stream) {
  constexpr int kBytes = kFindsCandidates ? kWarps * StagedCandidates::kBytes : 0;
  static KernelAttribute known;
  const cudaError_t status = allow_shared_bytes(known, few_heads_kernel<T, kSteps, kFindsCandidates>, kBytes);
  if (status != cudaSuccess) return status;
  // Each warp of a tile of few queries reads all of them before its first key, so few blocks take less time than many.
  const int64_t enough = shares_keys(call.p.query_length) ? 2 * call.processors : 2048;
  const int64_t most = (columns_of<kFindsCandidates>(call) + kChunk - 1) / kChunk;
  const dim3 grid(grid_of(std::min(most, (enough + call.tiles - 1) / call.tiles)), static_cast<unsigned>(call.tiles));
  few_heads_kernel<T, kSteps, kFindsCandidates><<<grid, kThreads, kBytes, stream>>>(call);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_of(const IndexCall& call, bool finds_candidates, cudaStream_t stream) {
  if (call.p.head_dim <= 32) return finds_candidates ? launch<T, 2, true>(call, stream) : launch<T, 2, false>(call, stream);
  return finds_candidates ? launch<T, 4, true>(call, stream) : launch<T, 4, false>(call, stream);
}

}  // namespace

cudaError_t launch_few_heads(const IndexCall& call, bool finds_candidates, cudaStream_t stream) {
  if (call.p.dtype == DType::kBFloat16) return launch_of<__nv_bfloat16>(call, finds_candidates, stream);
  return launch_of<__half>(call, finds_candidates, stream);
}

}  // namespace dmattn::cuda
