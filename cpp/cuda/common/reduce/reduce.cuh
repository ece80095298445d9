// Reduction kernels: chunks of sequences first, the results of chunks second. reduce_params.h has the order of additions.
//
// Pass one has three kernels: where the elements of a sequence lie next to each other, a warp reduces a chunk, or some short
// sequences at once; where those of neighbouring sequences do, a block reduces a chunk of several sequences. Pass two gives each
// sequence a block, a warp or a thread. No atomics: which block does what changes nothing.
//
// Memory is as fast as it can be where an SM waits for 64 KiB at any time. So a thread asks for kBytesAtOnce before it uses any,
// without branches: where nothing is left it reads the last place again and leaves that out. Blocks are small, so that some read
// while others join.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../../reduce.h"
#include "../dependent_launch.cuh"

namespace dmattn::cuda::reduction {

constexpr unsigned kAllLanes = 0xffffffffU;
constexpr int kLanes = static_cast<int>(kChunkLanes);
constexpr int kOwned = kLanes / 32;           // lanes of a chunk that a thread owns at once, in pass one
constexpr int kMostGroups = kLanes / kOwned;  // of so many lanes
constexpr int kBlock = 1024;                  // threads of the long form of pass two
constexpr int kOwnedPartials = static_cast<int>(kPartialLanes) / kBlock;
constexpr int64_t kShortPartials = 32 * kOwnedPartials;  // so many results of chunks are reduced by one warp

// What follows changes speed, never results.
constexpr int kBytesAtOnce = 128, kMostLoads = 32;  // that a thread of pass one asks for before it uses any
constexpr int kWarps = 8;                           // of a block of reduce_rows and of reduce_short_rows, at most
constexpr int kRowsPerSm = 4;                       // of those blocks: the compiler may use the registers that this leaves
constexpr int kColumnsBlock = 256;                  // threads of reduce_columns and of the shortest form of pass two
constexpr int kColumnsPerSm = 3;                    // blocks of reduce_columns
constexpr int kLeastColumns = 16;                   // so many threads of theirs read neighbours, where there are as many
constexpr int64_t kSms = 132;                       // of an H200: blocks are smaller where there would be fewer
constexpr int64_t kMostBlocks = int64_t{1} << 20;   // more work than that goes round in the same blocks
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

struct StoredInt8 : Stored<int8_t, int32_t> {
  __device__ static int32_t add_four(uint32_t four, int32_t to) { return __dp4a(static_cast<int>(four), 0x01010101, to); }
};

struct StoredUInt8 : Stored<uint8_t, int32_t> {
  __device__ static int32_t add_four(uint32_t four, int32_t to) {
    return static_cast<int32_t>(__dp4a(four, 0x01010101U, static_cast<unsigned>(to)));
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
  __device__ static int32_t add_four(uint32_t four, int32_t to) {
    const uint32_t high_bits = (((four & 0x7f7f7f7fU) + 0x7f7f7f7fU) | four) & 0x80808080U;  // of bytes other than 0
    return StoredUInt8::add_four(high_bits >> 7, to);
  }
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
using Narrow = typename K::In::Type;

template <class K>
using Wide = typename K::In::Wide;

// What pass two needs of a kind. Types that are alike in that share its kernels.
template <class K>
using PassTwo = Kind<Stored<Wide<K>, Wide<K>>, typename K::Join, typename K::Partial, typename K::Out>;

// Loads of kVector elements that a thread of pass one has on their way.
template <class K, int kVector>
constexpr int kLoadsAtOnce = std::min(kBytesAtOnce / (kVector * static_cast<int>(sizeof(Narrow<K>))), kMostLoads);

// Joins n values of each thread with those of the other threads of its warp, n a power of two: thread t has the result of value
// t % n. Of two values a thread keeps the one that a bit of its number names, and gives the other away.
template <class Join, int n, int away = 1, class T>
__device__ T join_warp(const T (&values)[n]) {
  if constexpr (away == 32) {
    return values[0];
  } else if constexpr (n == 1) {
    const T joined[] = {Join::join(values[0], __shfl_xor_sync(kAllLanes, values[0], away))};
    return join_warp<Join, 1, 2 * away>(joined);
  } else {
    const bool keeps_odd = threadIdx.x & away;
    T joined[n / 2];
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const T other = __shfl_xor_sync(kAllLanes, keeps_odd ? values[2 * i] : values[2 * i + 1], away);
      joined[i] = keeps_odd ? Join::join(other, values[2 * i + 1]) : Join::join(values[2 * i], other);
    }
    return join_warp<Join, n / 2, 2 * away>(joined);
  }
}

// Joins n neighbours that one thread owns, n a power of two.
template <class Join, int n, class T>
__device__ T join_own(T* values) {
#pragma unroll
  for (int away = 1; away < n; away *= 2) {
#pragma unroll
    for (int i = 0; i < n; i += 2 * away) values[i] = Join::join(values[i], values[i + away]);
  }
  return values[0];
}

template <class K>
__device__ const Narrow<K>* sequence(const ReduceParams& p, int64_t result) {
  const int64_t outer = p.outer == 1 ? 0 : result / p.inner;
  return static_cast<const Narrow<K>*>(p.input) + outer * p.outer_stride + (result - outer * p.inner) * p.inner_stride;
}

// Partials are stored as wide as they are within a chunk.
template <class K>
__device__ void store_chunk(const ReduceParams& p, int64_t result, int64_t chunk, int64_t chunks, Wide<K> value) {
  if (chunks == 1) {
    static_cast<typename K::Out::Type*>(p.out)[result] = K::Out::narrow(static_cast<typename K::Partial>(value));
  } else {
    static_cast<Wide<K>*>(p.partials)[result * chunks + chunk] = value;
  }
}

// kCount elements, in registers of 32 bits where they fill such.
template <class K, int kCount>
struct Vector {
  static constexpr int kBytes = kCount * static_cast<int>(sizeof(Narrow<K>));
  using Word = std::conditional_t<kBytes % 4 == 0, uint32_t, Narrow<K>>;
  Word words[kBytes / static_cast<int>(sizeof(Word))];

  // Takes them from an address that their size divides.
  __device__ void load(const Narrow<K>* from) {
    using Bits = std::conditional_t<kBytes == 16, uint4, std::conditional_t<kBytes == 8, uint2, Word>>;
    static_assert(sizeof(Bits) == kBytes);
    const Bits bits = *reinterpret_cast<const Bits*>(from);
    memcpy(words, &bits, kBytes);
  }

  // Joins each to its lane.
  __device__ void join_to(Wide<K>* lanes) const {
    Narrow<K> elements[kCount];
    memcpy(elements, words, kBytes);
#pragma unroll
    for (int e = 0; e < kCount; ++e) lanes[e] = K::Join::join(lanes[e], K::In::widen(elements[e]));
  }

  // The same for lanes of one sequence. The order of integers changes nothing: four bytes are added to one lane.
  __device__ void join_to_sequence(Wide<K>* lanes) const {
    if constexpr (sizeof(Narrow<K>) == 1 && kCount > 1 && std::is_same_v<typename K::Join, Sum>) {
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) lanes[i] = K::In::add_four(words[i], lanes[i]);
    } else {
      join_to(lanes);
    }
  }
};

template <class K, int n>
__device__ void make_neutral(Wide<K> (&lanes)[n]) {
#pragma unroll
  for (Wide<K>& lane : lanes) lane = K::Join::template neutral<Wide<K>>();
}

// Joins the lanes of some sequences, kGroups of 32 vectors each; values: what threads have of those. The thread of number
// sequence * kGroups has the result.
template <class K, int kGroups, int n>
__device__ Wide<K> join_groups(Wide<K> (&values)[n]) {
  Wide<K> value = join_warp<typename K::Join>(values);
#pragma unroll
  for (int away = 1; away < kGroups; away *= 2) {
    value = K::Join::join(value, __shfl_xor_sync(kAllLanes, value, away));
  }
  return value;
}

// input: outer x inner sequences -> partials [outer, inner, chunks], or out [outer, inner]. A warp reduces a chunk. Thread t owns
// the lanes (v * 32 + t) * kVector + e, in owned[v * kVector + e]. kVector = 1: elements may have a stride.
//
// A chunk may begin within a vector: elements [begin, end) and lanes are counted from the vector's begin until lanes are joined.
template <class K, int kVector>
__global__ void __launch_bounds__(32 * kWarps, kVector == 1 ? 2 : kRowsPerSm) reduce_rows(ReduceParams p, int64_t tasks) {
  constexpr int kGroups = kOwned / kVector, kLoads = kLoadsAtOnce<K, kVector>;
  static_assert(kLoads % kGroups == 0);
  __shared__ Wide<K> shared[kVector == 1 ? 1 : kWarps][kLanes];
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int thread = static_cast<int>(threadIdx.x) % 32;
  const int64_t chunks = chunks_of(p), stride = kVector == 1 ? p.stride : 1;
  const auto lane_of = [=](int i) { return (i / kVector * 32 + thread) * kVector + i % kVector; };
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  for (int64_t task = int64_t{blockIdx.x} * warps + warp; task < tasks; task += int64_t{gridDim.x} * warps) {
    const int64_t result = tasks == chunks ? 0 : task / chunks, chunk = task - result * chunks;
    const auto* from = sequence<K>(p, result) + chunk * kChunk * p.stride;
    const int n = static_cast<int>(min(kChunk, p.count - chunk * kChunk));
    const int begin = kVector == 1 ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(from) / sizeof(*from) % kVector);
    const int end = begin + n, whole_begin = begin > 0, whole_end = end / kVector;
    from -= begin;
    Wide<K> owned[kOwned];
    make_neutral<K>(owned);

    // The elements of a vector that is not whole, one by one.
    const auto join_edge = [&](int vector) {
      if (vector % 32 != thread) return;
#pragma unroll
      for (int i = 0; i < kOwned; ++i) {
        const int at = vector * kVector + i % kVector;
        if (vector / 32 % kGroups == i / kVector && at >= begin && at < end) {
          owned[i] = K::Join::join(owned[i], K::In::widen(from[at]));
        }
      }
    };

    // Each lane takes its elements.
    if (begin > 0) join_edge(0);
    for (int first = 0; first < whole_end; first += 32 * kLoads) {
      const auto* at = from + (first + thread) * kVector * stride;
      const auto take = [&](auto is_whole) {
        Vector<K, kVector> loaded[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int there = min(max(first + thread + 32 * i, whole_begin), whole_end - 1);
          loaded[i].load(is_whole ? at + 32 * i * kVector * stride : from + there * kVector * stride);
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int vector = first + thread + 32 * i;
          const bool is_there = is_whole || (vector >= whole_begin && vector < whole_end);
          if (is_there) loaded[i].join_to_sequence(owned + i % kGroups * kVector);
        }
      };
      const bool are_whole = whole_begin <= first && first + 32 * kLoads <= whole_end;
      are_whole ? take(std::true_type()) : take(std::false_type());
    }
    if (end % kVector != 0 && whole_end >= whole_begin) join_edge(whole_end);

    // Count lanes from the first element again.
    if (begin > 0) {
#pragma unroll
      for (int i = 0; i < kOwned; ++i) shared[warp][lane_of(i)] = owned[i];
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kOwned; ++i) owned[i] = shared[warp][(lane_of(i) + begin) % kLanes];
      __syncwarp();  // before the next chunk is written there
    }

    Wide<K> values[kGroups];
#pragma unroll
    for (int v = 0; v < kGroups; ++v) values[v] = join_own<typename K::Join, kVector>(owned + v * kVector);
    const Wide<K> joined = join_groups<K, kGroups>(values);
    if (thread == 0) store_chunk<K>(p, result, chunk, chunks, joined);
  }
}

// The same where a sequence has kGroups * 32 vectors at most: a warp reduces several together. kVector > 1: vectors are whole.
template <class K, int kVector, int kGroups>
__global__ void __launch_bounds__(32 * kWarps, kVector == 1 ? 2 : kRowsPerSm) reduce_short_rows(ReduceParams p, int64_t tasks) {
  constexpr int kLoads = kLoadsAtOnce<K, kVector>, kSequences = kLoads / kGroups;
  static_assert(kSequences > 0 && kLoads <= 32);
  const int thread = static_cast<int>(threadIdx.x) % 32, n = static_cast<int>(p.count);
  const int64_t per_outer = ceil_of_quotient(p.inner, kSequences), stride = kVector == 1 ? p.stride : 1;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  int64_t task = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  for (; task < tasks; task += int64_t{gridDim.x} * kWarps) {
    const int64_t outer = p.outer == 1 ? 0 : task / per_outer, first = (task - outer * per_outer) * kSequences;
    const int sequences = static_cast<int>(min(int64_t{kSequences}, p.inner - first));
    const auto* from = static_cast<const Narrow<K>*>(p.input) + outer * p.outer_stride + first * p.inner_stride;
    Vector<K, kVector> loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int element = (i % kGroups * 32 + thread) * kVector;
      loaded[i].load(from + min(i / kGroups, sequences - 1) * p.inner_stride + min(element, n - kVector) * stride);
    }
    Wide<K> values[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      Wide<K> owned[kVector];
      make_neutral<K>(owned);
      if ((i % kGroups * 32 + thread) * kVector < n) loaded[i].join_to_sequence(owned);
      values[i] = join_own<typename K::Join, kVector>(owned);
    }
    const Wide<K> joined = join_groups<K, kGroups>(values);
    if (thread < kGroups * sequences && thread % kGroups == 0) {
      store_chunk<K>(p, outer * p.inner + first + thread / kGroups, 0, 1, joined);
    }
  }
}

// Joins n neighbours that lie `step` apart, of which the first `count` hold something; both are powers of two.
template <class Join, int n, class T>
__device__ T join_column(const T* from, int step, int count) {
  if constexpr (n == 1) {
    return *from;
  } else {
    if (count < n) return join_column<Join, n / 2>(from, step, count);
    return Join::join(join_column<Join, n / 2>(from, step, n / 2), join_column<Join, n / 2>(from + n / 2 * step, step, n / 2));
  }
}

// The same, where neighbouring sequences lie closer than the elements of one. A block reduces a chunk of kVector * columns
// sequences, columns = kColumnsBlock / rows. `groups` of kOwned lanes have elements, a power of two. Thread (row, column) owns
// the lanes group * kOwned + j of kVector neighbouring sequences, group = row, row + rows, ..., one after the other. It loads
// elements of all those sequences at once: with kVector > 1 they lie one after the other.
template <class K, int kVector>
__global__ void __launch_bounds__(kColumnsBlock, kVector == 1 ? 2 : kColumnsPerSm)
    reduce_columns(ReduceParams p, int rows, int groups, int64_t tasks) {
  constexpr int kSteps = kLoadsAtOnce<K, kVector> > kOwned ? kLoadsAtOnce<K, kVector> / kOwned : 1;
  __shared__ Wide<K> joined[kMostGroups / (kColumnsBlock / kLeastColumns) * kColumnsBlock * kVector];  // [groups][sequences]
  const int columns = kColumnsBlock / rows, sequences = columns * kVector;
  const int row = static_cast<int>(threadIdx.x) / columns, own = static_cast<int>(threadIdx.x) % columns * kVector;
  const int64_t chunks = chunks_of(p), blocks = ceil_of_quotient(p.inner, sequences);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t chunk = task / blocks % chunks, outer = task / blocks / chunks, first_sequence = task % blocks * sequences;
    const auto* from = static_cast<const Narrow<K>*>(p.input) + outer * p.outer_stride + (first_sequence + own) * p.inner_stride +
                       chunk * kChunk * p.stride;
    const int n = first_sequence + own < p.inner ? static_cast<int>(min(kChunk, p.count - chunk * kChunk)) : 0;
    for (int group = row; group < groups; group += rows) {
      // Each lane takes its elements.
      Wide<K> owned[kOwned][kVector];
#pragma unroll
      for (auto& lanes : owned) make_neutral<K>(lanes);
      const auto* at = from + group * kOwned * p.stride;
      for (int left = n - group * kOwned; left > 0; left -= kSteps * kLanes, at += kSteps * kLanes * p.stride) {
        const auto take = [&](auto is_whole) {
          Vector<K, kVector> loaded[kSteps * kOwned];
#pragma unroll
          for (int i = 0; i < kSteps * kOwned; ++i) {
            const int element = i / kOwned * kLanes + i % kOwned;
            loaded[i].load(at + (is_whole ? element : min(element, left - 1)) * p.stride);
          }
#pragma unroll
          for (int i = 0; i < kSteps * kOwned; ++i) {
            if (is_whole || i / kOwned * kLanes + i % kOwned < left) loaded[i].join_to(owned[i % kOwned]);
          }
        };
        left >= (kSteps - 1) * kLanes + kOwned ? take(std::true_type()) : take(std::false_type());
      }
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        Wide<K> lanes[kOwned];
#pragma unroll
        for (int j = 0; j < kOwned; ++j) lanes[j] = owned[j][v];
        joined[group * sequences + own + v] = join_own<typename K::Join, kOwned>(lanes);
      }
    }

    // Join the groups.
    __syncthreads();
    for (int s = static_cast<int>(threadIdx.x); s < sequences && first_sequence + s < p.inner; s += kColumnsBlock) {
      const Wide<K> value = join_column<typename K::Join, kMostGroups>(joined + s, sequences, groups);
      store_chunk<K>(p, outer * p.inner + first_sequence + s, chunk, chunks, value);
    }
    __syncthreads();  // before the next task writes there
  }
}

// partials [results, chunks] -> out [results]. A block reduces a sequence: kBlock threads, or 32 where so few lanes have any.
// Thread t owns the lanes j * threads + t.
template <class K>
__global__ void __launch_bounds__(kBlock) reduce_partials(ReduceParams p, int64_t chunks) {
  using P = typename K::Partial;
  __shared__ P of_groups[kOwnedPartials * kBlock / 32];  // of 32 lanes each
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x), warps = threads / 32;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  for (int64_t result = blockIdx.x; result < p.outer * p.inner; result += gridDim.x) {
    const auto* partials = static_cast<const Wide<K>*>(p.partials) + result * chunks;
    P owned[kOwnedPartials];
#pragma unroll
    for (P& lane : owned) lane = K::Join::template neutral<P>();
#pragma unroll 4
    for (int64_t first = thread; first < chunks; first += kPartialLanes) {
#pragma unroll
      for (int j = 0; j < kOwnedPartials; ++j) {
        const int64_t at = first + j * threads;
        if (at < chunks) owned[j] = K::Join::join(owned[j], static_cast<P>(partials[at]));
      }
    }

    // Join lanes of warps, then groups of 32 lanes.
    const P of_group = join_warp<typename K::Join>(owned);
    if (thread % 32 < kOwnedPartials) of_groups[thread % 32 * warps + thread / 32] = of_group;
    __syncthreads();
    if (thread < 32) {
#pragma unroll
      for (int j = 0; j < kOwnedPartials; ++j) {
        const int group = kOwnedPartials * thread + j;
        owned[j] = group < kOwnedPartials * warps ? of_groups[group] : K::Join::template neutral<P>();
      }
      P value[] = {join_own<typename K::Join, kOwnedPartials>(owned)};
      const P joined = join_warp<typename K::Join>(value);
      if (thread == 0) static_cast<typename K::Out::Type*>(p.out)[result] = K::Out::narrow(joined);
    }
    __syncthreads();  // before the next sequence's warps write there
  }
}

// The same where a sequence has kOwnedPartials chunks at most: a thread reduces them.
template <class K>
__global__ void __launch_bounds__(kColumnsBlock) reduce_few_partials(ReduceParams p, int64_t chunks) {
  using P = typename K::Partial;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  int64_t result = static_cast<int64_t>(blockIdx.x) * kColumnsBlock + threadIdx.x;
  for (; result < p.outer * p.inner; result += static_cast<int64_t>(gridDim.x) * kColumnsBlock) {
    const auto* partials = static_cast<const Wide<K>*>(p.partials) + result * chunks;
    P lanes[kOwnedPartials];
#pragma unroll
    for (int j = 0; j < kOwnedPartials; ++j) {
      lanes[j] = K::Join::template neutral<P>();
      if (j < chunks) lanes[j] = K::Join::join(lanes[j], static_cast<P>(partials[j]));
    }
    static_cast<typename K::Out::Type*>(p.out)[result] = K::Out::narrow(join_own<typename K::Join, kOwnedPartials>(lanes));
  }
}

inline unsigned blocks_for(int64_t tasks) { return static_cast<unsigned>(tasks < kMostBlocks ? tasks : kMostBlocks); }

// Whether `bytes` divides the address of the input and, where they are used, these strides.
inline bool is_aligned(const ReduceParams& p, int64_t element_bytes, int64_t bytes, int64_t inner_stride, int64_t stride) {
  const auto divides = [&](int64_t size, int64_t step) { return size == 1 || step * element_bytes % bytes == 0; };
  return reinterpret_cast<uintptr_t>(p.input) % static_cast<uintptr_t>(bytes) == 0 && divides(p.outer, p.outer_stride) &&
         divides(p.inner, inner_stride) && divides(p.count, stride);
}

// Whether all sequences are whole vectors.
inline bool has_vectors(const ReduceParams& p, int64_t element_bytes, int64_t vector) {
  return p.stride == 1 && p.count % vector == 0 && is_aligned(p, element_bytes, vector * element_bytes, p.inner_stride, 0);
}

// Whether elements of neighbouring sequences lie one after the other, and vectors of them at addresses that their size divides.
inline bool has_vectors_across(const ReduceParams& p, int64_t element_bytes, int64_t vector) {
  return p.inner_stride == 1 && p.inner % vector == 0 && is_aligned(p, element_bytes, vector * element_bytes, 0, p.stride);
}

template <class K, int kVector>
cudaError_t launch_columns(const ReduceParams& p, cudaStream_t stream) {
  int groups = 1, rows = 1;
  while (groups < kMostGroups && groups * kOwned < p.count) groups *= 2;
  const auto has_room = [&](int columns) { return columns >= kLeastColumns || columns * kVector >= p.inner; };
  while (rows < groups && has_room(kColumnsBlock / rows / 2)) rows *= 2;
  const int64_t tasks = p.outer * ceil_of_quotient(p.inner, kVector * kColumnsBlock / rows) * chunks_of(p);
  return launch_dependent(reduce_columns<K, kVector>, blocks_for(tasks), kColumnsBlock, 0, stream, p, rows, groups, tasks);
}

template <class K, int kVector>
cudaError_t launch_rows(const ReduceParams& p, cudaStream_t stream) {
  const int64_t tasks = p.outer * p.inner * chunks_of(p);
  int warps = kWarps;
  while (warps > 1 && tasks < kSms * warps) warps /= 2;
  return launch_dependent(reduce_rows<K, kVector>, blocks_for(ceil_of_quotient(tasks, warps)), 32 * warps, 0, stream, p, tasks);
}

template <class K, int kVector, int kGroups>
cudaError_t launch_short_rows(const ReduceParams& p, cudaStream_t stream) {
  const int64_t tasks = p.outer * ceil_of_quotient(p.inner, kLoadsAtOnce<K, kVector> / kGroups);
  return launch_dependent(reduce_short_rows<K, kVector, kGroups>, blocks_for(ceil_of_quotient(tasks, kWarps)), 32 * kWarps, 0,
                          stream, p, tasks);
}

template <class K>
cudaError_t launch_pass_one(const ReduceParams& p, cudaStream_t stream) {
  constexpr int kSize = static_cast<int>(sizeof(Narrow<K>)), kVector = kSize == 1 ? 8 : 16 / kSize;
  constexpr int kAcross = sizeof(Wide<K>) == 8 ? 2 : 4;  // sequences of a thread that reduces several
  if (reduces_columns(p)) {
    return has_vectors_across(p, kSize, kAcross) ? launch_columns<K, kAcross>(p, stream) : launch_columns<K, 1>(p, stream);
  }
  if (p.count > kChunkLanes) return p.stride == 1 ? launch_rows<K, kVector>(p, stream) : launch_rows<K, 1>(p, stream);
  if (!has_vectors(p, kSize, kVector)) return launch_short_rows<K, 1, kOwned>(p, stream);
  if (p.count <= 32 * kVector) return launch_short_rows<K, kVector, 1>(p, stream);
  return launch_short_rows<K, kVector, kOwned / kVector>(p, stream);
}

template <class K>
cudaError_t launch(const ReduceParams& p, cudaStream_t stream) {
  const int64_t results = p.outer * p.inner, chunks = chunks_of(p);
  const cudaError_t status = launch_pass_one<K>(p, stream);
  if (status != cudaSuccess || chunks == 1) return status;
  if (chunks <= kOwnedPartials) {
    const unsigned blocks = blocks_for(ceil_of_quotient(results, kColumnsBlock));
    return launch_dependent(reduce_few_partials<PassTwo<K>>, blocks, kColumnsBlock, 0, stream, p, chunks);
  }
  const unsigned threads = chunks <= kShortPartials ? 32 : kBlock;
  return launch_dependent(reduce_partials<PassTwo<K>>, blocks_for(results), threads, 0, stream, p, chunks);
}

using Float64 = Stored<double, double>;
using Float32 = Stored<float, float>;
using Int64 = Stored<int64_t, int64_t>;
using Int32 = Stored<int32_t, int32_t>;
using Int16 = Stored<int16_t, int32_t>;

}  // namespace dmattn::cuda::reduction
