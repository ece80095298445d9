// The CPU reduction kernels of one instruction set; DMATTN_CPU_LEVEL names the set. reduce_params.h has the order of additions.
#include "reduce_kernels.h"

#include "convert.h"

namespace dmattn::cpu {
namespace {

constexpr int64_t kTaskElements = 1 << 16;
constexpr int64_t kColumns = 128;  // neighbouring sequences that are reduced at once
constexpr int kChunkLevels = 8;
static_assert((1 << kChunkLevels) == kChunkLanes);
constexpr int64_t kLanesAtOnce = kStep, kRowsAtOnce = 4;
constexpr int64_t kPrefetched = 1 << 13;  // bytes ahead

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t power_of_two_from(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

// Eight integers.
template <class T>
using Eight __attribute__((vector_size(8 * sizeof(T)))) = T;

// The stored types of integers, like those of convert.h: an element is widened to W.
template <class T, class W>
struct StoredInteger {
  using Element = T;
  DMATTN_INLINE static W widen(T x) { return static_cast<W>(x); }
  DMATTN_INLINE static Eight<W> load(const T* from) { return __builtin_convertvector(load_as<Eight<T>>(from), Eight<W>); }
};

// A bool tensor that is a view of bytes may hold others than 0 and 1, and torch takes them for true.
struct StoredBool {
  using Element = uint8_t;
  DMATTN_INLINE static int32_t widen(uint8_t x) { return x != 0; }
  DMATTN_INLINE static Eight<int32_t> load(const uint8_t* from) {
    return -(__builtin_convertvector(load_as<Eight<uint8_t>>(from), Eight<int32_t>) != 0);
  }
};

template <class T>
struct Lowest {
  static constexpr T value = -__builtin_huge_val();
};
template <>
struct Lowest<int32_t> {
  static constexpr int32_t value = INT32_MIN;
};
template <>
struct Lowest<int64_t> {
  static constexpr int64_t value = INT64_MIN;
};

// Sums: signed integers wrap around, as torch's do. V is a number or a vector of them.
struct Sum {
  template <class T>
  static constexpr T neutral = 0;
  template <class V>
  DMATTN_INLINE static V join(V a, V b) {
    return a + b;
  }
  DMATTN_INLINE static int64_t join(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
  DMATTN_INLINE static Eight<int64_t> join(Eight<int64_t> a, Eight<int64_t> b) {
    return (Eight<int64_t>)((Eight<uint64_t>)a + (Eight<uint64_t>)b);
  }
};

// The largest. NaN wins, the first of several; of equal numbers (0 and -0) the later one.
struct Max {
  template <class T>
  static constexpr T neutral = Lowest<T>::value;
  template <class V>
  DMATTN_INLINE static V join(V a, V b) {
    return ((a != a) | (a > b)) ? a : b;
  }
};

// Joins neighbours in pairs until one of `count` lanes is left, count a power of two. spare: room for count / 2.
template <class Join, class W>
W join_neighbours(W* lanes, W* spare, int64_t count) {
  for (; count > 1; count /= 2) {
    for (int64_t i = 0; i < count / 2; ++i) spare[i] = Join::join(lanes[2 * i], lanes[2 * i + 1]);
    W* joined = spare;
    spare = lanes, lanes = joined;
  }
  return lanes[0];
}

// Joins eight elements of each of two vectors in memory.
template <class Join, class V, class W>
DMATTN_INLINE void join_into(W* to, V v) {
  const V joined = Join::join(load_as<V>(to), v);
  __builtin_memcpy(to, &joined, sizeof(joined));
}

// Elements [0, n) of one sequence, n <= kChunk.
template <class Stored, class Join>
auto reduce_chunk(const typename Stored::Element* from, int64_t stride, int64_t n) {
  using W = decltype(Stored::widen(*from));
  alignas(64) W lanes[kChunkLanes], spare[kChunkLanes / 2];
  const int64_t used = power_of_two_from(least(n, kChunkLanes));
  for (int64_t i = 0; i < used; ++i) lanes[i] = Join::template neutral<W>;
  int64_t i = 0;
  if (stride == 1) {
    // Several rows of lanes at once: a lane is loaded and stored once for all of them.
    for (; i + kRowsAtOnce * kChunkLanes <= n; i += kRowsAtOnce * kChunkLanes) {
      for (int64_t lane = 0; lane < kChunkLanes; lane += kLanesAtOnce) {
        auto joined = load_as<decltype(Stored::load(from))>(lanes + lane);
        DMATTN_UNROLL
        for (int64_t row = 0; row < kRowsAtOnce; ++row) {
          const auto* elements = from + i + row * kChunkLanes + lane;
          __builtin_prefetch(elements + kPrefetched / static_cast<int64_t>(sizeof(*from)));
          joined = Join::join(joined, Stored::load(elements));
        }
        __builtin_memcpy(lanes + lane, &joined, sizeof(joined));
      }
    }
    // Whole vectors of the rows that are left.
    for (; i + kLanesAtOnce <= n; i += kLanesAtOnce) join_into<Join>(lanes + i % kChunkLanes, Stored::load(from + i));
  }
  for (; i < n; ++i) lanes[i % kChunkLanes] = Join::join(lanes[i % kChunkLanes], Stored::widen(from[i * stride]));
  return join_neighbours<Join>(lanes, spare, used);
}

// Elements [0, n) of `columns` neighbouring sequences, n <= kChunk, columns <= kColumns; results to sums[columns].
//
// Lanes come in their order, one row of columns each. A lane whose number ends in t ones is the last of groups of 2, 4, ..., 2^t
// neighbours: joined[level] holds, until then, what 2^level lanes have given.
template <class Stored, class Join, class W>
void reduce_columns(const typename Stored::Element* from, int64_t stride, int64_t column_stride, int64_t n, int64_t columns,
                    W* sums) {
  alignas(64) W joined[kChunkLevels][kColumns];
  const int64_t used = power_of_two_from(least(n, kChunkLanes));
  for (int64_t lane = 0; lane < used; ++lane) {
    for (int64_t column = 0; column < columns; ++column) sums[column] = Join::template neutral<W>;
    for (int64_t i = lane; i < n; i += kChunkLanes) {
      const auto* row = from + i * stride;
      int64_t column = 0;
      if (column_stride == 1) {
        for (; column + kLanesAtOnce <= columns; column += kLanesAtOnce)
          join_into<Join>(sums + column, Stored::load(row + column));
      }
      for (; column < columns; ++column) sums[column] = Join::join(sums[column], Stored::widen(row[column * column_stride]));
    }
    int level = 0;
    for (; (lane >> level) & 1; ++level) {
      for (int64_t column = 0; column < columns; ++column) sums[column] = Join::join(joined[level][column], sums[column]);
    }
    if (lane + 1 == used) return;
    for (int64_t column = 0; column < columns; ++column) joined[level][column] = sums[column];
  }
}

// The results of the chunks of one sequence.
template <class Join, class P>
P reduce_partials(const P* partials, int64_t chunks) {
  alignas(64) P lanes[kPartialLanes], spare[kPartialLanes / 2];
  const int64_t used = power_of_two_from(least(chunks, kPartialLanes));
  for (int64_t i = 0; i < used; ++i) lanes[i] = Join::template neutral<P>;
  for (int64_t first = 0; first < chunks; first += kPartialLanes) {
    const int64_t n = least(chunks - first, kPartialLanes);
    for (int64_t i = 0; i < n; ++i) lanes[i] = Join::join(lanes[i], partials[first + i]);
  }
  return join_neighbours<Join>(lanes, spare, used);
}

// Stores a result in the dtype of the output.
template <class Stored, class P>
void store_result(P value, void* out, int64_t index) {
  static_cast<typename Stored::Element*>(out)[index] = static_cast<typename Stored::Element>(value);
}
template <>
void store_result<StoredBFloat16, float>(float value, void* out, int64_t index) {
  static_cast<uint16_t*>(out)[index] = narrow_bfloat16(Float8{value})[0];
}
template <>
void store_result<StoredFloat16, float>(float value, void* out, int64_t index) {
  static_cast<uint16_t*>(out)[index] = narrow_float16(Float8{value})[0];
}

// What a reduction reads, joins by, reduces partials in and writes.
template <class StoredType, class JoinType, class P, class OutType>
struct Kind {
  using Stored = StoredType;
  using Join = JoinType;
  using Partial = P;
  using Out = OutType;
};

// Calls use(a Kind).
template <class Use>
void with_kind(const ReduceParams& p, const Use& use) {
  using Int64 = StoredInteger<int64_t, int64_t>;
  using Int32 = StoredInteger<int32_t, int32_t>;
  using Int16 = StoredInteger<int16_t, int32_t>;
  using Int8 = StoredInteger<int8_t, int32_t>;
  using UInt8 = StoredInteger<uint8_t, int32_t>;
  if (p.is_max) {
    switch (p.dtype) {
      case Element::kFloat64: return use(Kind<StoredFloat64, Max, double, StoredFloat64>());
      case Element::kFloat32: return use(Kind<StoredFloat32, Max, float, StoredFloat32>());
      case Element::kBFloat16: return use(Kind<StoredBFloat16, Max, float, StoredBFloat16>());
      case Element::kFloat16: return use(Kind<StoredFloat16, Max, float, StoredFloat16>());
      case Element::kInt64: return use(Kind<Int64, Max, int64_t, Int64>());
      case Element::kInt32: return use(Kind<Int32, Max, int32_t, Int32>());
      case Element::kInt16: return use(Kind<Int16, Max, int32_t, Int16>());
      case Element::kInt8: return use(Kind<Int8, Max, int32_t, Int8>());
      case Element::kUInt8: return use(Kind<UInt8, Max, int32_t, UInt8>());
      case Element::kBool: return use(Kind<StoredBool, Max, int32_t, StoredBool>());
    }
  }
  // A chunk of integers of up to 16 bits cannot overflow an int32.
  switch (p.dtype) {
    case Element::kFloat64: return use(Kind<StoredFloat64, Sum, double, StoredFloat64>());
    case Element::kFloat32: return use(Kind<StoredFloat32, Sum, float, StoredFloat32>());
    case Element::kBFloat16: return use(Kind<StoredBFloat16, Sum, float, StoredBFloat16>());
    case Element::kFloat16: return use(Kind<StoredFloat16, Sum, float, StoredFloat16>());
    case Element::kInt64: return use(Kind<Int64, Sum, int64_t, Int64>());
    case Element::kInt32: return use(Kind<StoredInteger<int32_t, int64_t>, Sum, int64_t, Int64>());
    case Element::kInt16: return use(Kind<Int16, Sum, int64_t, Int64>());
    case Element::kInt8: return use(Kind<Int8, Sum, int64_t, Int64>());
    case Element::kUInt8: return use(Kind<UInt8, Sum, int64_t, Int64>());
    case Element::kBool: return use(Kind<StoredBool, Sum, int64_t, Int64>());
  }
}

// Work of pass one comes in units: a chunk of a sequence, or of up to kColumns neighbouring ones. A task is several units.
int64_t column_blocks(const ReduceParams& p) { return ceil_of_quotient(p.inner, kColumns); }

int64_t units_of(const ReduceParams& p) { return p.outer * (reduces_columns(p) ? column_blocks(p) : p.inner) * chunks_of(p); }

int64_t units_per_task(const ReduceParams& p) {
  const int64_t width = reduces_columns(p) ? least(p.inner, kColumns) : 1;
  return ceil_of_quotient(kTaskElements, width * least(p.count, kChunk));
}

int64_t results_per_task(const ReduceParams& p) { return ceil_of_quotient(kTaskElements, chunks_of(p)); }

int64_t tasks(const ReduceParams& p, int pass) {
  if (pass == 0) return ceil_of_quotient(units_of(p), units_per_task(p));
  return p.partials ? ceil_of_quotient(p.outer * p.inner, results_per_task(p)) : 0;
}

template <class K, class W>
void store_chunk(const ReduceParams& p, int64_t result, int64_t chunk, int64_t chunks, W value) {
  const auto partial = static_cast<typename K::Partial>(value);
  if (chunks == 1) return store_result<typename K::Out>(partial, p.out, result);
  static_cast<typename K::Partial*>(p.partials)[result * chunks + chunk] = partial;
}

template <class K>
void reduce_unit(const ReduceParams& p, int64_t unit) {
  using Stored = typename K::Stored;
  const auto* input = static_cast<const typename Stored::Element*>(p.input);
  const int64_t chunks = chunks_of(p), chunk = unit % chunks, place = unit / chunks;
  const int64_t n = least(p.count - chunk * kChunk, kChunk);
  input += chunk * kChunk * p.stride;
  if (!reduces_columns(p)) {
    const auto* from = input + place / p.inner * p.outer_stride + place % p.inner * p.inner_stride;
    return store_chunk<K>(p, place, chunk, chunks, reduce_chunk<Stored, typename K::Join>(from, p.stride, n));
  }
  const int64_t outer = place / column_blocks(p), first = place % column_blocks(p) * kColumns;
  const int64_t columns = least(p.inner - first, kColumns);
  alignas(64) decltype(Stored::widen(*input)) sums[kColumns];
  reduce_columns<Stored, typename K::Join>(input + outer * p.outer_stride + first * p.inner_stride, p.stride, p.inner_stride, n,
                                           columns, sums);
  for (int64_t i = 0; i < columns; ++i) store_chunk<K>(p, outer * p.inner + first + i, chunk, chunks, sums[i]);
}

void run(const ReduceParams& p, int pass, int64_t task) {
  with_kind(p, [&](auto kind) {
    using K = decltype(kind);
    if (pass == 0) {
      const int64_t each = units_per_task(p), last = least((task + 1) * each, units_of(p));
      for (int64_t unit = task * each; unit < last; ++unit) reduce_unit<K>(p, unit);
      return;
    }
    const int64_t each = results_per_task(p), last = least((task + 1) * each, p.outer * p.inner), chunks = chunks_of(p);
    for (int64_t result = task * each; result < last; ++result) {
      const auto* partials = static_cast<const typename K::Partial*>(p.partials) + result * chunks;
      store_result<typename K::Out>(reduce_partials<typename K::Join>(partials, chunks), p.out, result);
    }
  });
}

}  // namespace

#define DMATTN_JOIN_OF(a, b) a##b
#define DMATTN_JOIN(a, b) DMATTN_JOIN_OF(a, b)

extern const ReduceKernels DMATTN_JOIN(kKernelsOfReduce_, DMATTN_CPU_LEVEL);
const ReduceKernels DMATTN_JOIN(kKernelsOfReduce_, DMATTN_CPU_LEVEL) = {tasks, run};

}  // namespace dmattn::cpu
