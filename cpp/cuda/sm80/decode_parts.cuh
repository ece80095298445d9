// What the decoding kernels share: which keys and rows a block has, the rings that keys are copied into, and how blocks combine
// their partial results.
#pragma once

#include "../common/dependent_launch.cuh"
#include "../common/parts.cuh"
#include "../ptx/cluster.cuh"
#include "tile.cuh"
#include "tiles.h"

namespace dmattn::cuda::sm80 {

inline constexpr int kPlaceKeys = 16;  // neighbouring keys that are surely in one page

// Which keys of which (batch, head of the call) a block has, and for which rows.
template <int kTileRows>
struct DecodeTile {
  int batch, head, kv_head, first_row, rows;  // `rows` of them exist
  int part;
  int length, first_key, last_key;

  __device__ __forceinline__ explicit DecodeTile(const DecodeCall& call) {
    const uint32_t tiles = (static_cast<uint32_t>(call.rows) + kTileRows - 1) / kTileRows;
    const uint32_t heads = static_cast<uint32_t>(call.heads), parts = static_cast<uint32_t>(call.parts);
    uint32_t index = block_index();
    part = static_cast<int>(index % parts), index /= parts;
    first_row = static_cast<int>(index % tiles) * kTileRows, index /= tiles;
    head = static_cast<int>(index % heads), batch = static_cast<int>(index / heads);
    kv_head = call.sharing > 1 ? head / call.sharing : head;
    rows = min(kTileRows, call.rows - first_row);
    first_key = part * call.block_splits * call.split_keys;
  }
  __device__ __forceinline__ void find_length(const DecodeCall& call) {
    length = keys_of(call.p, batch);
    last_key = min(first_key + call.block_splits * call.split_keys, length);
  }
};

// A chunk of keys and values in shared memory.
template <int kDim, int kKeys>
struct alignas(128) DecodeStage {
  uint16_t keys[kKeys * kDim], values[kKeys * kDim];
};

// Copies chunks of keys into the ring of a team of warps. A chunk has one place or more, of 16 keys each; lane i of a warp knows
// where place i begins. With lists a lane knows where one key lies that its warp copies, of this chunk or the next.
template <int kDim, int kKeys, int kStages, int kTeamThreads, bool kHasLists>
struct ChunkCopies {
  using Copy = RowCopy<kDim, kTeamThreads>;
  static constexpr int kPlaces = kKeys / kPlaceKeys, kChunksAtOnce = 32 / kPlaces;
  static constexpr int kStageBytes = sizeof(DecodeStage<kDim, kKeys>);
  static constexpr int kWarpKeys = kKeys * 32 / kTeamThreads;        // of a chunk
  static constexpr int kPassKeys = Copy::kRows * 32 / kTeamThreads;  // that a warp copies at once
  static constexpr int kListedAtOnce = 32 / kWarpKeys;               // chunks
  static_assert(kWarpKeys <= 32 && 32 % kWarpKeys == 0);

  const DecodeParams& p;
  int batch, kv_head;
  int first_key, step;  // the first chunk's first key, and keys from one chunk to the next
  int last_key = 0, chunks = 0;
  int thread = 0;                            // of the team
  uint32_t stages = 0, key_bias_stages = 0;  // the rings of this team
  const float* key_bias = nullptr;           // [Smax], null: nothing to copy
  const char *keys = nullptr, *values = {};  // where this lane's place begins
  bool has_bad_page = false;
  const int32_t* entries = nullptr;  // the list of the block's rows
  int end = 0;                       // behind the last key that it may show
  int entry = 0;                     // that this lane looks up next
  int key = -1, page = 0, row = 0;   // what it looked up: a key, -1 for none, its page, and its row there

  __device__ __forceinline__ void begin(int team_thread, uint32_t to, uint32_t to_key_bias, const float* shared_bias) {
    thread = team_thread, stages = to, key_bias_stages = to_key_bias, key_bias = shared_bias;
    if (!p.page_table && !kHasLists) find_places(0);
  }
  // Finds the list of a head of the call, and starts to read its first entries.
  __device__ __forceinline__ void begin_list(const DecodeCall& call, int head) {
    const RowPlace place(call, head, 0);
    entries = row_of<const int32_t>(p.index.entries, batch, place.head) + place.query * p.index.row_stride;
    end = length_of(p, batch) - static_cast<int>(p.queries) + place.query + 1;
    find_entries(0);
  }
  __device__ __forceinline__ int first_key_of(int chunk) const { return first_key + chunk * step; }

  // Looks up the places from this chunk on. Nothing is read any more when a page number is out of range.
  __device__ __forceinline__ void find_places(int chunk) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int key = first_key_of(chunk + lane / kPlaces) + lane % kPlaces * kPlaceKeys;
    int page = batch, row = key;
    if (p.page_table) {
      const int page_size = static_cast<int>(p.page_size), entry = key / page_size;
      page = key < last_key ? p.page_table[batch * p.table_stride + entry] : 0;
      row = key - entry * page_size;
      has_bad_page |= __any_sync(0xffffffffu, page < 0 || page >= p.pages) != 0;
      if (has_bad_page) last_key = first_key;
    }
    keys = rows_of_head(p.key, page, kv_head) + row * p.key.row_stride * 2;
    values = rows_of_head(p.value, page, kv_head) + row * p.value.row_stride * 2;
  }

  // Starts to read the entries of chunks from this one on.
  __device__ __forceinline__ void find_entries(int chunk) { entry = listed_entry(p.index, entries, place_of_lane(chunk)); }

  // Starts to copy a chunk's keys and values. Rows that do not exist become zeros.
  __device__ __forceinline__ void start(int chunk) {
    if (chunk >= chunks) return;
    if constexpr (kHasLists) {
      if (chunk % kListedAtOnce == 0) find_listed(chunk);
      start_listed(chunk);
      if ((chunk + 1) % kListedAtOnce == 0) find_entries(chunk + 1);
    } else {
      if (chunk % kChunksAtOnce == 0 && (chunk > 0 || p.page_table)) find_places(chunk);
      const int stage = chunk % kStages, first = first_key_of(chunk);
      uint32_t to = stages + stage * kStageBytes;
#pragma unroll
      for (int place = 0; place < kPlaces; ++place) {
        const int lane = chunk % kChunksAtOnce * kPlaces + place, count = last_key - first - place * kPlaceKeys;
        start_rows(to, from_lane(keys, lane), p.key.row_stride, p.head_dim, count);
        start_rows(to + kStageBytes / 2, from_lane(values, lane), p.value.row_stride, p.value_dim, count);
        to += kPlaceKeys * kDim * 2;
      }
      start_key_bias(chunk);
    }
  }

 private:
  // Which of a chunk's keys a lane looks up, and in what place it is of the list.
  __device__ __forceinline__ int key_of_lane() const {
    const int lane = thread % kWarpKeys;
    return lane / kPassKeys * Copy::kRows + thread / 32 * kPassKeys + lane % kPassKeys;
  }
  __device__ __forceinline__ int place_of_lane(int chunk) const {
    return first_key_of(chunk + thread % 32 / kWarpKeys) + key_of_lane();
  }
  __device__ __forceinline__ void find_listed(int chunk) {
    key = listed_key(p.index, entry, end, place_of_lane(chunk));
    page = p.page_table ? 0 : batch, row = max(key, 0);
    bool is_bad = false;
    if (key >= 0 && p.page_table) {
      const int page_size = static_cast<int>(p.page_size), number = key / page_size;
      page = p.page_table[batch * p.table_stride + number], row = key - number * page_size;
      is_bad = page < 0 || page >= p.pages;
      if (is_bad) key = -1, page = 0;
    }
    has_bad_page |= __any_sync(0xffffffffu, is_bad) != 0;
  }
  // A place without a key gets zeros, and a bias of -inf.
  __device__ __forceinline__ void start_listed(int chunk) const {
    const int stage = chunk % kStages, first_lane = chunk % kListedAtOnce * kWarpKeys;
    if (thread % 32 / kWarpKeys == chunk % kListedAtOnce) {
      const uint32_t to = key_bias_stages + (stage * kKeys + key_of_lane()) * 4;
      if (key >= 0 && key_bias) {
        copy_async_4(to, key_bias + key, true);
      } else {
        store_shared_4(to, __float_as_uint(key < 0 ? negative_infinity() : 0.0f));
      }
    }
    const uint32_t to = stages + stage * kStageBytes;
    const Copy of_keys(static_cast<int>(p.head_dim), thread), of_values(static_cast<int>(p.value_dim), thread);
    const int lane = first_lane + of_keys.row % kPassKeys;
#pragma unroll
    for (int pass = 0; pass < kWarpKeys / kPassKeys; ++pass) {
      const int from = lane + pass * kPassKeys, r = pass * Copy::kRows;
      const bool wanted = __shfl_sync(0xffffffffu, key, from) >= 0;
      const int from_page = __shfl_sync(0xffffffffu, page, from);
      const int64_t in_page = __shfl_sync(0xffffffffu, row, from);
      of_keys.start(to, r, rows_of_head(p.key, from_page, kv_head) + in_page * p.key.row_stride * 2, wanted);
      of_values.start(to + kStageBytes / 2, r, rows_of_head(p.value, from_page, kv_head) + in_page * p.value.row_stride * 2,
                      wanted);
    }
  }
  __device__ __forceinline__ void start_key_bias(int chunk) const {
    const int first = first_key_of(chunk), stage = chunk % kStages;
    if (key_bias && thread < kKeys) {
      copy_async_4(key_bias_stages + (stage * kKeys + thread) * 4, key_bias + first + thread, first + thread < last_key);
    }
  }
  static __device__ __forceinline__ const char* from_lane(const char* mine, int lane) {
    return reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(mine), lane));
  }
  __device__ __forceinline__ void start_rows(uint32_t tile, const char* from, int64_t row_stride, int64_t width,
                                             int count) const {
    const Copy copy(static_cast<int>(width), thread);
    const int wanted = copy.in_row ? count : 0;
    from += copy.row * row_stride * 2 + copy.part * 16;
#pragma unroll
    for (int r = 0; r < kPlaceKeys; r += Copy::kRows) {
      copy_async_16(tile + copy.offset(r), from, copy.row + r < wanted);
      from += Copy::kRows * row_stride * 2;
    }
  }
};

// How the blocks of a cluster add up their partial results: each block reduces a share of the quads (four columns of a row), and
// the others send it their parts of them. The inbox lies behind what else a block has in shared memory.
template <int kDim>
struct ClusterReduceLayout {
  static constexpr int kQuads = kDim / 4;
  int parts, quads, share;  // share: quads of a block, less for the last

  __host__ __device__ __forceinline__ ClusterReduceLayout(int parts, int rows)
      : parts(parts), quads(rows * kQuads), share((quads + parts - 1) / parts) {}
  __host__ __device__ __forceinline__ int bytes() const { return kHead + parts * share * kQuadBytes; }
  __device__ __forceinline__ int quads_of(int part) const { return max(0, min(share, quads - part * share)); }
  __device__ __forceinline__ DsmemExchange& exchange(uint8_t* inbox) const { return *reinterpret_cast<DsmemExchange*>(inbox); }
  __device__ __forceinline__ void expect(uint8_t* inbox, int part) const {
    exchange(inbox).expect(quads_of(part) * parts * kQuadBytes);
  }
  // What `part` found for a quad of the share.
  __device__ __forceinline__ float4* values(uint8_t* inbox, int part, int quad) const {
    return reinterpret_cast<float4*>(inbox + kHead) + part * share + quad;
  }
  __device__ __forceinline__ float2* sums(uint8_t* inbox, int part, int quad) const {
    return reinterpret_cast<float2*>(inbox + kHead + parts * share * sizeof(float4)) + part * share + quad;
  }

 private:
  static constexpr int kHead = 16, kQuadBytes = sizeof(float4) + sizeof(float2);
  static_assert(sizeof(DsmemExchange) <= kHead);
};

// Writes what a block found, part_at(i) for quad i of each thread: the end result where the block has all keys, otherwise its
// part.
template <class T, int kDim, int kThreads, class Tile, class PartAt>
__device__ __forceinline__ void write_partial(const DecodeCall& call, const Tile& here, PartAt part_at) {
  constexpr int kQuads = kDim / 4;
  const DecodeParams& p = call.p;
  const int64_t first_row = (static_cast<int64_t>(here.batch) * call.heads + here.head) * call.rows + here.first_row;
  for (int i = 0, at = static_cast<int>(threadIdx.x); at < here.rows * kQuads; at += kThreads, ++i) {
    const int row = at / kQuads, column = at % kQuads * 4;
    if (column >= p.value_dim) continue;
    const Part part = part_at(i);
    if (call.part_out) {
      const int64_t place = (first_row + row) * call.parts + here.part;
      *reinterpret_cast<float4*>(call.part_out + place * p.value_dim + column) = part.values;
      if (column == 0) call.part_sums[place] = part.sums;
    } else {
      finish_row<T>(p, here.batch, RowPlace(call, here.head, here.first_row + row), column, part);
    }
  }
}

// The same for the blocks of a cluster: each sends its parts to those who add them up, and writes the end result of its share.
// All blocks have passed the cluster barrier.
template <class T, int kDim, int kThreads, class Tile, class PartAt>
__device__ __forceinline__ void cluster_reduce(const DecodeCall& call, const Tile& here, uint8_t* inbox, PartAt part_at) {
  constexpr int kQuads = kDim / 4;
  const ClusterReduceLayout<kDim> shares(call.parts, here.rows);
  DsmemExchange& exchange = shares.exchange(inbox);
  for (int i = 0, at = static_cast<int>(threadIdx.x); at < shares.quads; at += kThreads, ++i) {
    const int to = at / shares.share, quad = at - to * shares.share;
    const Part part = part_at(i);
    exchange.send(shares.values(inbox, here.part, quad), to, part.values);
    exchange.send(shares.sums(inbox, here.part, quad), to, part.sums);
  }
  exchange.wait();
  for (int quad = static_cast<int>(threadIdx.x); quad < shares.quads_of(here.part); quad += kThreads) {
    Part parts[kMostClusterParts];
#pragma unroll
    for (int i = 0; i < kMostClusterParts; ++i) {
      parts[i] = Part::nothing();
      if (i < call.parts) parts[i] = {*shares.sums(inbox, i, quad), *shares.values(inbox, i, quad)};
    }
    const int at = here.part * shares.share + quad, row = at / kQuads, column = at % kQuads * 4;
    if (column >= call.p.value_dim) continue;
    finish_row<T>(call.p, here.batch, RowPlace(call, here.head, here.first_row + row), column, merge_all(parts));
  }
}

}  // namespace dmattn::cuda::sm80
