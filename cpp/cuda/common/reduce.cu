// Reduction kernels: chunks of sequences first, the results of chunks second. reduce_params.h has the order of additions.
//
// Pass one has three kernels: where the elements of a sequence lie next to each other, a warp reduces a chunk, or some short
// sequences at once; where those of neighbouring sequences do, a block reduces a chunk of several sequences. Pass two gives each
// sequence a block or a warp. No atomics: which block does what changes nothing.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <limits>

#include "../reduce.h"
#include "dependent_launch.cuh"

namespace dmattn::cuda {
namespace {

constexpr unsigned kAllLanes = 0xffffffffU;
constexpr int kWarps = 8;                                   // of a block of reduce_rows and of reduce_short_rows
constexpr int kShortRows = 4;                               // sequences that a warp of reduce_short_rows reduces at once
constexpr int kOwned = static_cast<int>(kChunkLanes) / 32;  // lanes of a chunk that a thread owns, in pass one
constexpr int kBlock = 1024;                                // threads of reduce_columns and of the long form of pass two
constexpr int kOwnedPartials = static_cast<int>(kPartialLanes) / kBlock;
constexpr int64_t kShortPartials = 32 * kOwnedPartials;  // so many results of chunks are reduced by one warp
constexpr int64_t kMostBlocks = int64_t{1} << 20;        // more work than that goes round in the same blocks
static_assert(kOwned == 8 && kOwnedPartials == 4);

// What is stored, and what it is reduced as within a chunk. A chunk of integers of up to 16 bits cannot overflow an int32.
template <class T, class W>
struct Stored {
  using Type = T;
  using Wide = W;
  __device__ static W widen(T x) { return static_cast<W>(x); }
  template <class P>
  __device__ static T narrow(P x) {
    return static_cast<T>(x);
  }
};

struct StoredBFloat16 {
  using Type = uint16_t;
  using Wide = float;
  __device__ static float widen(uint16_t x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }
  __device__ static uint16_t narrow(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
};

struct StoredFloat16 {
  using Type = uint16_t;
  using Wide = float;
  __device__ static float widen(uint16_t x) { return __half2float(__ushort_as_half(x)); }
  __device__ static uint16_t narrow(float x) { return __half_as_ushort(__float2half_rn(x)); }
};

// A bool tensor that is a view of bytes may hold others than 0 and 1, and torch takes them for true.
struct StoredBool {
  using Type = uint8_t;
  using Wide = int32_t;
  __device__ static int32_t widen(uint8_t x) { return x != 0; }
  __device__ static uint8_t narrow(int32_t x) { return static_cast<uint8_t>(x); }
};

struct Sum {
  template <class T>
  __device__ static T neutral() {
    return 0;
  }
  template <class T>
  __device__ static T join(T a, T b) {
    return a + b;
  }
  __device__ static int64_t join(int64_t a, int64_t b) {  // wraps around, as torch's sums do
    return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
};

// The largest. NaN wins, the first of several; of equal numbers (0 and -0) the later one.
struct Max {
  template <class T>
  __device__ static T neutral() {
    using Limits = std::numeric_limits<T>;
    return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
  }
  template <class T>
  __device__ static T join(T a, T b) {
    return ((a != a) | (a > b)) ? a : b;
  }
};

// What a reduction reads, joins by, reduces partials in and writes.
template <class StoredType, class JoinType, class P, class OutType>
struct Kind {
  using In = StoredType;
  using Join = JoinType;
  using Partial = P;
  using Out = OutType;
};

template <class K>
using Wide = typename K::In::Wide;

// Joins lanes whose owners differ in one of the last five bits of their number in the warp: thread 0 has the result of all 32.
template <class Join, class T>
__device__ T join_warp(T value) {
#pragma unroll
  for (int away = 1; away < 32; away *= 2) value = Join::join(value, __shfl_xor_sync(kAllLanes, value, away));
  return value;
}

// Joins n neighbours that one thread owns, n a power of two.
template <class Join, int n, class T>
__device__ T join_own(T (&values)[n]) {
#pragma unroll
  for (int away = 1; away < n; away *= 2) {
#pragma unroll
    for (int i = 0; i < n; i += 2 * away) values[i] = Join::join(values[i], values[i + away]);
  }
  return values[0];
}

template <class K>
__device__ const typename K::In::Type* sequence(const ReduceParams& p, int64_t result) {
  const int64_t outer = p.outer == 1 ? 0 : result / p.inner;
  return static_cast<const typename K::In::Type*>(p.input) + outer * p.outer_stride + (result - outer * p.inner) * p.inner_stride;
}

template <class K>
__device__ void store_chunk(const ReduceParams& p, int64_t result, int64_t chunk, int64_t chunks, Wide<K> value) {
  const auto partial = static_cast<typename K::Partial>(value);
  if (chunks == 1) {
    static_cast<typename K::Out::Type*>(p.out)[result] = K::Out::narrow(partial);
  } else {
    static_cast<typename K::Partial*>(p.partials)[result * chunks + chunk] = partial;
  }
}

// kCount elements that lie one after the other at an address that their size divides.
template <int kCount, class T>
__device__ void load_vector(const T* from, T (&to)[kCount]) {
  if constexpr (kCount == 1) {
    to[0] = *from;
  } else if constexpr (kCount * sizeof(T) == 16) {
    const uint4 bits = *reinterpret_cast<const uint4*>(from);
    memcpy(to, &bits, sizeof(bits));
  } else if constexpr (kCount * sizeof(T) == 8) {
    const uint2 bits = *reinterpret_cast<const uint2*>(from);
    memcpy(to, &bits, sizeof(bits));
  } else {
    static_assert(kCount * sizeof(T) == 4);
    const uint32_t bits = *reinterpret_cast<const uint32_t*>(from);
    memcpy(to, &bits, sizeof(bits));
  }
}

// Elements [row * kChunkLanes, (row + 1) * kChunkLanes) of a chunk of n elements: thread t owns lanes
// (v * 32 + t) * kVector + e, in owned[v * kVector + e]. kVector = 1: elements may have a stride. kWhole: n is not looked at.
template <class K, int kVector, bool kWhole>
__device__ void join_row(const typename K::In::Type* from, int64_t stride, int row, int n, Wide<K> (&owned)[kOwned]) {
  const int thread = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int v = 0; v < kOwned / kVector; ++v) {
    const int first = row * static_cast<int>(kChunkLanes) + (v * 32 + thread) * kVector;
    if constexpr (kVector == 1) {
      if (kWhole || first < n) owned[v] = K::Join::join(owned[v], K::In::widen(from[first * stride]));
    } else if (kWhole || first + kVector <= n) {
      typename K::In::Type elements[kVector];
      load_vector(from + first, elements);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        Wide<K>& lane = owned[v * kVector + e];
        lane = K::Join::join(lane, K::In::widen(elements[e]));
      }
    } else {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        Wide<K>& lane = owned[v * kVector + e];
        if (first + e < n) lane = K::Join::join(lane, K::In::widen(from[first + e]));
      }
    }
  }
}

// Joins neighbours of a chunk of n elements: those of one vector, those of the warp's vectors, and then groups of 32 vectors.
// Groups without elements change nothing. Thread 0 has the result.
template <class K, int kVector>
__device__ Wide<K> join_lanes(const Wide<K> (&owned)[kOwned], int n) {
  constexpr int kGroups = kOwned / kVector;
  Wide<K> groups[kGroups];
#pragma unroll
  for (int v = 0; v < kGroups; ++v) {
    Wide<K> vector[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) vector[e] = owned[v * kVector + e];
    groups[v] = join_own<typename K::Join, kVector>(vector);
    if (v * 32 * kVector < n) groups[v] = join_warp<typename K::Join>(groups[v]);
  }
  return join_own<typename K::Join, kGroups>(groups);
}

// input: outer x inner sequences -> partials [outer, inner, chunks], or out [outer, inner]. A warp reduces a chunk.
template <class K, int kVector>
__global__ void __launch_bounds__(32 * kWarps) reduce_rows(ReduceParams p, int64_t tasks) {
  constexpr int kRows = static_cast<int>(kChunk / kChunkLanes);
  const int64_t chunks = chunks_of(p);
  int64_t task = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  for (; task < tasks; task += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t result = chunks == 1 ? task : task / chunks, chunk = task - result * chunks;
    const auto* from = sequence<K>(p, result) + chunk * kChunk * p.stride;
    const int n = static_cast<int>(min(kChunk, p.count - chunk * kChunk));

    // Each lane takes its elements.
    Wide<K> owned[kOwned];
#pragma unroll
    for (Wide<K>& lane : owned) lane = K::Join::template neutral<Wide<K>>();
    if (n == kChunk) {
#pragma unroll 4
      for (int row = 0; row < kRows; ++row) join_row<K, kVector, true>(from, p.stride, row, n, owned);
    } else {
      for (int row = 0; row * static_cast<int>(kChunkLanes) < n; ++row) {
        join_row<K, kVector, false>(from, p.stride, row, n, owned);
      }
    }

    const Wide<K> joined = join_lanes<K, kVector>(owned, n);
    if (threadIdx.x % 32 == 0) store_chunk<K>(p, result, chunk, chunks, joined);
  }
}

// The same where a sequence has one row of lanes at most: a warp reduces kShortRows sequences together, so that more bytes are on
// their way.
template <class K, int kVector>
__global__ void __launch_bounds__(32 * kWarps) reduce_short_rows(ReduceParams p, int64_t results) {
  const int n = static_cast<int>(p.count);
  int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32) * kShortRows;
  for (; first < results; first += static_cast<int64_t>(gridDim.x) * kWarps * kShortRows) {
    Wide<K> owned[kShortRows][kOwned];
#pragma unroll
    for (int s = 0; s < kShortRows; ++s) {
#pragma unroll
      for (Wide<K>& lane : owned[s]) lane = K::Join::template neutral<Wide<K>>();
      if (first + s < results) join_row<K, kVector, false>(sequence<K>(p, first + s), p.stride, 0, n, owned[s]);
    }
#pragma unroll
    for (int s = 0; s < kShortRows; ++s) {
      const Wide<K> joined = join_lanes<K, kVector>(owned[s], n);
      if (threadIdx.x % 32 == 0 && first + s < results) store_chunk<K>(p, first + s, 0, 1, joined);
    }
  }
}

// The same, where neighbouring sequences lie closer than the elements of one. A block reduces a chunk of kVector * kBlock / rows
// sequences; rows is a power of two, such that rows * kOwned lanes are all that have elements. Thread (row, column) owns the
// lanes row * kOwned + j of kVector neighbouring sequences, whose elements it loads at once: with kVector > 1 they lie one after
// the other.
template <class K, int kVector>
__global__ void __launch_bounds__(kBlock) reduce_columns(ReduceParams p, int rows, int64_t tasks) {
  __shared__ Wide<K> joined[kVector][kBlock];
  const int columns = kBlock / rows;
  const int row = static_cast<int>(threadIdx.x) / columns, own = static_cast<int>(threadIdx.x) % columns;
  const int64_t chunks = chunks_of(p), blocks = ceil_of_quotient(p.inner, columns * kVector);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t chunk = task / blocks % chunks, outer = task / blocks / chunks;
    const int64_t column = (task % blocks * columns + own) * kVector;
    const bool has_column = column < p.inner;
    const auto* from = static_cast<const typename K::In::Type*>(p.input) + outer * p.outer_stride + column * p.inner_stride +
                       chunk * kChunk * p.stride;
    const int n = has_column ? static_cast<int>(min(kChunk, p.count - chunk * kChunk)) : 0;

    // Each lane takes its elements.
    Wide<K> owned[kVector][kOwned];
#pragma unroll
    for (auto& lanes : owned) {
#pragma unroll
      for (Wide<K>& lane : lanes) lane = K::Join::template neutral<Wide<K>>();
    }
    for (int first = row * kOwned; first < n; first += static_cast<int>(kChunkLanes)) {
      const auto* element = from + first * p.stride;
#pragma unroll
      for (int j = 0; j < kOwned; ++j, element += p.stride) {
        if (first + j < n) {
          typename K::In::Type elements[kVector];
          load_vector(element, elements);
#pragma unroll
          for (int v = 0; v < kVector; ++v) owned[v][j] = K::Join::join(owned[v][j], K::In::widen(elements[v]));
        }
      }
    }

    // Join a thread's neighbours, then rows of threads.
#pragma unroll
    for (int v = 0; v < kVector; ++v) joined[v][threadIdx.x] = join_own<typename K::Join, kOwned>(owned[v]);
    __syncthreads();
    for (int away = 1; away < rows; away *= 2) {
      if (row % (2 * away) == 0) {
#pragma unroll
        for (auto& of_column : joined) {
          of_column[threadIdx.x] = K::Join::join(of_column[threadIdx.x], of_column[threadIdx.x + away * columns]);
        }
      }
      __syncthreads();
    }
    if (row == 0 && has_column) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) store_chunk<K>(p, outer * p.inner + column + v, chunk, chunks, joined[v][threadIdx.x]);
    }
    __syncthreads();  // before the next task writes there
  }
}

// partials [results, chunks] -> out [results]. A block reduces a sequence: kBlock threads, or 32 where so few lanes have any.
// Thread t owns the lanes kOwnedPartials * t + j.
template <class K>
__global__ void __launch_bounds__(kBlock) reduce_partials(ReduceParams p, int64_t chunks) {
  using P = typename K::Partial;
  __shared__ P of_warps[kBlock / 32];
  const int thread = static_cast<int>(threadIdx.x);
  wait_for_kernel_before();
  for (int64_t result = blockIdx.x; result < p.outer * p.inner; result += gridDim.x) {
    const P* partials = static_cast<const P*>(p.partials) + result * chunks;
    P owned[kOwnedPartials];
#pragma unroll
    for (P& lane : owned) lane = K::Join::template neutral<P>();
#pragma unroll 4
    for (int64_t first = kOwnedPartials * thread; first < chunks; first += kPartialLanes) {
#pragma unroll
      for (int j = 0; j < kOwnedPartials; ++j) {
        if (first + j < chunks) owned[j] = K::Join::join(owned[j], partials[first + j]);
      }
    }
    P value = join_warp<typename K::Join>(join_own<typename K::Join, kOwnedPartials>(owned));
    if (blockDim.x > 32) {
      if (thread % 32 == 0) of_warps[thread / 32] = value;
      __syncthreads();
      value = join_warp<typename K::Join>(of_warps[thread % 32]);
      __syncthreads();  // before the next sequence's warps write there
    }
    if (thread == 0) static_cast<typename K::Out::Type*>(p.out)[result] = K::Out::narrow(value);
  }
}

unsigned blocks_for(int64_t tasks) { return static_cast<unsigned>(tasks < kMostBlocks ? tasks : kMostBlocks); }

// Whether `bytes` divides the address of the input and, where they are used, these strides.
bool is_aligned(const ReduceParams& p, int64_t element_bytes, int64_t bytes, int64_t inner_stride, int64_t stride) {
  const auto divides = [&](int64_t size, int64_t step) { return size == 1 || step * element_bytes % bytes == 0; };
  return reinterpret_cast<uintptr_t>(p.input) % static_cast<uintptr_t>(bytes) == 0 && divides(p.outer, p.outer_stride) &&
         divides(p.inner, inner_stride) && divides(p.count, stride);
}

// Whether all sequences begin at an address that `bytes` divides, and have no stride.
bool has_vectors(const ReduceParams& p, int64_t element_bytes, int64_t bytes) {
  return p.stride == 1 && is_aligned(p, element_bytes, bytes, p.inner_stride, 0);
}

// Whether elements of neighbouring sequences lie one after the other, and vectors of them at addresses that their size divides.
bool has_vectors_across(const ReduceParams& p, int64_t element_bytes, int64_t vector) {
  return p.inner_stride == 1 && p.inner % vector == 0 && is_aligned(p, element_bytes, vector * element_bytes, 0, p.stride);
}

template <class K, int kVector>
void launch_columns(const ReduceParams& p, cudaStream_t stream) {
  int rows = 1;
  while (rows < 32 && rows * kOwned < p.count) rows *= 2;
  const int64_t tasks = p.outer * ceil_of_quotient(p.inner, kVector * kBlock / rows) * chunks_of(p);
  reduce_columns<K, kVector><<<blocks_for(tasks), kBlock, 0, stream>>>(p, rows, tasks);
}

template <class K, int kVector>
void launch_rows(const ReduceParams& p, cudaStream_t stream) {
  const int64_t tasks = p.outer * p.inner * chunks_of(p);
  if (p.count <= kChunkLanes) {
    reduce_short_rows<K, kVector><<<blocks_for(ceil_of_quotient(tasks, kShortRows * kWarps)), 32 * kWarps, 0, stream>>>(p, tasks);
  } else {
    reduce_rows<K, kVector><<<blocks_for(ceil_of_quotient(tasks, kWarps)), 32 * kWarps, 0, stream>>>(p, tasks);
  }
}

template <class K>
cudaError_t launch(const ReduceParams& p, cudaStream_t stream) {
  constexpr int kSize = static_cast<int>(sizeof(typename K::In::Type)), kVector = kSize == 1 ? 8 : 16 / kSize;
  constexpr int kAcross = sizeof(Wide<K>) == 8 ? 2 : 4;  // sequences of a thread that walks several
  const int64_t results = p.outer * p.inner, chunks = chunks_of(p);

  // Pass one.
  if (walks_columns(p)) {
    has_vectors_across(p, kSize, kAcross) ? launch_columns<K, kAcross>(p, stream) : launch_columns<K, 1>(p, stream);
  } else {
    has_vectors(p, kSize, kVector * kSize) ? launch_rows<K, kVector>(p, stream) : launch_rows<K, 1>(p, stream);
  }
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess || chunks == 1) return status;

  // Pass two.
  const unsigned threads = chunks <= kShortPartials ? 32 : kBlock;
  return launch_dependent(reduce_partials<K>, dim3(blocks_for(results)), threads, 0, stream, p, chunks);
}

using Float64 = Stored<double, double>;
using Float32 = Stored<float, float>;
using Int64 = Stored<int64_t, int64_t>;
using Int32 = Stored<int32_t, int32_t>;
using Int16 = Stored<int16_t, int32_t>;
using Int8 = Stored<int8_t, int32_t>;
using UInt8 = Stored<uint8_t, int32_t>;

cudaError_t launch_max(const ReduceParams& p, cudaStream_t stream) {
  switch (p.dtype) {
    case Element::kFloat64: return launch<Kind<Float64, Max, double, Float64>>(p, stream);
    case Element::kFloat32: return launch<Kind<Float32, Max, float, Float32>>(p, stream);
    case Element::kBFloat16: return launch<Kind<StoredBFloat16, Max, float, StoredBFloat16>>(p, stream);
    case Element::kFloat16: return launch<Kind<StoredFloat16, Max, float, StoredFloat16>>(p, stream);
    case Element::kInt64: return launch<Kind<Int64, Max, int64_t, Int64>>(p, stream);
    case Element::kInt32: return launch<Kind<Int32, Max, int32_t, Int32>>(p, stream);
    case Element::kInt16: return launch<Kind<Int16, Max, int32_t, Int16>>(p, stream);
    case Element::kInt8: return launch<Kind<Int8, Max, int32_t, Int8>>(p, stream);
    case Element::kUInt8: return launch<Kind<UInt8, Max, int32_t, UInt8>>(p, stream);
    case Element::kBool: return launch<Kind<StoredBool, Max, int32_t, StoredBool>>(p, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_sum(const ReduceParams& p, cudaStream_t stream) {
  switch (p.dtype) {
    case Element::kFloat64: return launch<Kind<Float64, Sum, double, Float64>>(p, stream);
    case Element::kFloat32: return launch<Kind<Float32, Sum, float, Float32>>(p, stream);
    case Element::kBFloat16: return launch<Kind<StoredBFloat16, Sum, float, StoredBFloat16>>(p, stream);
    case Element::kFloat16: return launch<Kind<StoredFloat16, Sum, float, StoredFloat16>>(p, stream);
    case Element::kInt64: return launch<Kind<Int64, Sum, int64_t, Int64>>(p, stream);
    case Element::kInt32: return launch<Kind<Stored<int32_t, int64_t>, Sum, int64_t, Int64>>(p, stream);
    case Element::kInt16: return launch<Kind<Int16, Sum, int64_t, Int64>>(p, stream);
    case Element::kInt8: return launch<Kind<Int8, Sum, int64_t, Int64>>(p, stream);
    case Element::kUInt8: return launch<Kind<UInt8, Sum, int64_t, Int64>>(p, stream);
    case Element::kBool: return launch<Kind<StoredBool, Sum, int64_t, Int64>>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_reduce(const ReduceParams& p, cudaStream_t stream) {
  return p.is_max ? launch_max(p, stream) : launch_sum(p, stream);
}

}  // namespace dmattn::cuda
