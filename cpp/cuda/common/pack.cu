// Mask packing kernels: a boolean mask to empty / full / partial tiles, their lists, and the bits of the partial ones.
//
// Slots are numbered in the order of the tiles, so that a mask always packs to the same bits. Tiles are classified first; then
// the partial tiles of each row of tiles are counted, one block adds the counts up, and each row numbers its own. Where the
// elements of a row are consecutive they are read 16 or 4 at a time, otherwise one by one.
//
// A table is the mask of one (batch, head).
#include <cub/block/block_scan.cuh>

#include "../launch.h"
#include "device.cuh"
#include "kernel_limits.cuh"

namespace dmattn::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr uint32_t kAllLanes = 0xffffffffU;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

__device__ int warp_index() { return static_cast<int>(threadIdx.x) / 32; }
__device__ int lane_index() { return static_cast<int>(threadIdx.x) % 32; }

// What a tile is when some of its elements are visible, or all.
__device__ int32_t tile_state(bool any_visible, bool all_visible) {
  return !any_visible ? kTileEmpty : all_visible ? kTileFull : kTilePartial;
}

__device__ const uint8_t* mask_of(const PackParams& p, int64_t table) {
  return p.mask + (table / p.heads) * p.batch_stride + (table % p.heads) * p.head_stride;
}

// The elements of a mask's row or column that stand for some of the queries or keys [from, to), each element for `block` of them.
// Along an expanded dimension, of stride 0, one element is all. Tiles beyond the lengths are empty ranges.
struct ElementRange {
  uint32_t first = 0, count = 0;
  __device__ ElementRange(uint32_t from, uint32_t to, uint32_t block, int64_t stride) {
    if (to <= from) return;
    first = from / block;
    count = stride == 0 ? 1U : (to - 1) / block + 1 - first;
  }
};

// Where a tile lies. Lengths stay far below 2^32, so only the number of the tile itself needs more bits.
struct TilePlace {
  int64_t table;
  uint32_t first_query, first_key;
  uint32_t query_end, key_end;  // where the tile or the length ends: in front of a tile that lies beyond the length
  __device__ TilePlace(const PackParams& p, int64_t tile) {
    const uint32_t tiles_q = static_cast<uint32_t>(p.tiles_q), tiles_k = static_cast<uint32_t>(p.tiles_k);
    const int64_t tile_row = tile / tiles_k;
    table = tile_row / tiles_q;
    first_query = static_cast<uint32_t>(tile_row - table * tiles_q) * static_cast<uint32_t>(p.tile_q);
    first_key = static_cast<uint32_t>(tile - tile_row * tiles_k) * static_cast<uint32_t>(p.tile_k);
    query_end = min(first_query + static_cast<uint32_t>(p.tile_q), static_cast<uint32_t>(p.query_length));
    key_end = min(first_key + static_cast<uint32_t>(p.tile_k), static_cast<uint32_t>(p.key_length));
  }
};

// kBytes consecutive mask elements of one byte each, four to a word; 0 is hidden, and any other byte is visible. With kAligned
// their address is a multiple of kBytes.
template <int kBytes, bool kAligned>
struct Elements {
  static_assert((kBytes == 16 && kAligned) || kBytes == 4);
  static constexpr int kWords = kBytes / 4;
  // With so many elements left in the row, every word that load_whole reads lies in the row.
  static constexpr int kWhole = kAligned ? kBytes : 7;
  uint32_t words[kWords];

  __device__ void load_whole(const uint8_t* from) {
    if constexpr (kBytes == 16) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else if constexpr (kAligned) {
      words[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
    } else {
      const uint32_t skipped = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from)) % 4;
      const auto* aligned = reinterpret_cast<const uint32_t*>(from - skipped);
      const uint32_t low = __ldg(aligned), high = __ldg(aligned + (skipped != 0));  // no branch: loads of many rows overlap
      words[0] = __funnelshift_r(low, high, 8 * skipped);
    }
  }

  // `limit` elements are left in the row; those behind them read as `beyond`.
  __device__ void load(const uint8_t* from, int limit, uint8_t beyond) {
    if (limit >= kWhole) return load_whole(from);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      words[w] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[w] |= static_cast<uint32_t>(4 * w + i < limit ? from[4 * w + i] : beyond) << (8 * i);
      }
    }
  }

  // Each byte becomes 0 or 1. Adding 0x7f to a byte's lower seven bits sets its highest one if any of them is set, without a
  // carry.
  __device__ static uint32_t normalised(uint32_t word) {
    return ((((word & 0x7f7f7f7fU) + 0x7f7f7f7fU) | word) >> 7) & 0x01010101U;
  }

  // Bit i is element i. The product moves the lowest bits of four bytes next to each other, and no two of its terms overlap.
  __device__ uint32_t bits() const {
    uint32_t result = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) result |= (((normalised(words[w]) * 0x01020408U) >> 24) & 0xfU) << (4 * w);
    return result;
  }
};

// A strip is what a block works on that reads kBytes elements at a time: of one row of tiles as many whole tiles as a warp reads
// at once, and at least one.
template <int kBytes>
struct Strip {
  int64_t tile_row;  // of all tables
  int64_t first_tile;
  int tiles, columns, rows;  // columns and rows of elements as far as the lengths go: 0 or less beyond them
  int tile_k;
  const uint8_t* corner;

  static __host__ __device__ int64_t tiles_per_strip(const PackParams& p) {
    return p.tile_k >= 32 * kBytes ? 1 : 32 * kBytes / p.tile_k;
  }

  __device__ explicit Strip(const PackParams& p) : tile_k(static_cast<int>(p.tile_k)) {
    const int64_t per_strip = tiles_per_strip(p), strips = (p.tiles_k + per_strip - 1) / per_strip;
    tile_row = blockIdx.x / strips;
    first_tile = (blockIdx.x % strips) * per_strip;
    tiles = static_cast<int>(min(per_strip, p.tiles_k - first_tile));
    columns = static_cast<int>(min(tiles * p.tile_k, p.key_length - first_tile * p.tile_k));
    const int64_t row = tile_row % p.tiles_q;
    rows = static_cast<int>(min(p.tile_q, p.query_length - row * p.tile_q));
    corner = mask_of(p, tile_row / p.tiles_q) + row * p.tile_q * p.row_stride + first_tile * p.tile_k;
  }
};

// mask [tables, Sq, Sk] with rows of consecutive elements -> tiles [tables, Nq, Nk]: empty, full, or partial without a slot. A
// block for each strip; a warp reads every kWarps-th row of it. A visible tile with bytes other than 1 may be called partial.
template <int kBytes, bool kAligned>
__global__ void __launch_bounds__(kThreads) classify_vectors(const PackParams p) {
  using Vector = Elements<kBytes, kAligned>;
  __shared__ uint32_t have_visible, have_hidden;  // bit t: tile t of the strip has a visible element; a hidden one
  const Strip<kBytes> strip(p);
  if (threadIdx.x == 0) have_visible = have_hidden = 0;
  __syncthreads();
  const int rows = p.row_stride == 0 ? min(1, strip.rows) : strip.rows;
  uint32_t visible_tiles = 0, hidden_tiles = 0;
  for (int column = lane_index() * kBytes; column < strip.columns; column += 32 * kBytes) {
    Vector any, all;
    for (int w = 0; w < Vector::kWords; ++w) any.words[w] = 0, all.words[w] = 0x01010101U;
    const int limit = strip.columns - column;
    const uint8_t* from = strip.corner + column;
    if (limit >= Vector::kWhole) {
#pragma unroll 8
      for (int row = warp_index(); row < rows; row += kWarps) {
        Vector v;
        v.load_whole(from + row * p.row_stride);
        for (int w = 0; w < Vector::kWords; ++w) any.words[w] |= v.words[w], all.words[w] &= v.words[w];
      }
    } else {
      for (int row = warp_index(); row < rows; row += kWarps) {
        Vector v;
        v.load(from + row * p.row_stride, limit, 0);
        for (int w = 0; w < Vector::kWords; ++w) any.words[w] |= v.words[w];
        v.load(from + row * p.row_stride, limit, 1);
        for (int w = 0; w < Vector::kWords; ++w) all.words[w] &= v.words[w];
      }
    }
    const uint32_t tile = 1U << (column / strip.tile_k);
    bool any_visible = false, all_visible = true;
    for (int w = 0; w < Vector::kWords; ++w) any_visible |= any.words[w] != 0, all_visible &= all.words[w] == 0x01010101U;
    visible_tiles |= any_visible ? tile : 0;
    hidden_tiles |= all_visible ? 0 : tile;
  }
  visible_tiles = __reduce_or_sync(kAllLanes, visible_tiles);
  hidden_tiles = __reduce_or_sync(kAllLanes, hidden_tiles);
  if (lane_index() == 0) {
    atomicOr(&have_visible, visible_tiles);
    atomicOr(&have_hidden, hidden_tiles);
  }
  __syncthreads();
  const int t = static_cast<int>(threadIdx.x);
  if (t < strip.tiles) {
    const bool any_visible = has_bit(have_visible, t), all_visible = !has_bit(have_hidden, t);
    p.tiles[strip.tile_row * p.tiles_k + strip.first_tile + t] = tile_state(any_visible, all_visible);
  }
}

// The same for any strides and block sizes: mask [tables, ceil(Sq / block_q), ceil(Sk / block_k)]. kPerTile threads, one or a
// warp or a block, read the elements of a tile.
template <int kPerTile>
__global__ void __launch_bounds__(kThreads) classify_elements(const PackParams p, int64_t tiles) {
  const int64_t tile = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kPerTile;
  if (tile >= tiles) return;  // where threads reduce together, all of them or none return
  const TilePlace place(p, tile);
  const uint8_t* mask = mask_of(p, place.table);
  const ElementRange rows(place.first_query, place.query_end, static_cast<uint32_t>(p.block_q), p.row_stride);
  const ElementRange columns(place.first_key, place.key_end, static_cast<uint32_t>(p.block_k), p.column_stride);
  bool any_visible = false, all_visible = true;
  const bool by_column = p.row_stride < p.column_stride;  // neighbouring threads read neighbouring elements
  for (uint32_t e = threadIdx.x % kPerTile; e < rows.count * columns.count; e += kPerTile) {
    const int64_t row = rows.first + (by_column ? e % rows.count : e / columns.count);
    const int64_t column = columns.first + (by_column ? e / rows.count : e % columns.count);
    const bool visible = __ldg(mask + row * p.row_stride + column * p.column_stride) != 0;
    any_visible |= visible;
    all_visible &= visible;
  }
  if constexpr (kPerTile == 32)
    any_visible = __any_sync(kAllLanes, any_visible), all_visible = __all_sync(kAllLanes, all_visible);
  if constexpr (kPerTile == kThreads) any_visible = __syncthreads_or(any_visible), all_visible = __syncthreads_and(all_visible);
  if (threadIdx.x % kPerTile == 0) p.tiles[tile] = tile_state(any_visible, all_visible);
}

// Writes a list of non-empty tiles, 32 candidates at a time, one for each lane of a warp.
struct ListWriter {
  int32_t* list;
  int32_t count = 0;

  __device__ void add(bool occupied, int64_t index) {
    const uint32_t lanes = __ballot_sync(kAllLanes, occupied);
    if (occupied) list[1 + count + __popc(lanes & ((1U << lane_index()) - 1))] = static_cast<int32_t>(index);
    count += __popc(lanes);
  }
  __device__ void finish(int64_t capacity) {
    for (int64_t i = count + lane_index(); i < capacity; i += 32) list[1 + i] = 0;
    if (lane_index() == 0) list[0] = count;
  }
};

// tiles [tables, Nq, Nk] -> partial_counts [tables, Nq], columns [tables, Nk, 1 + Nq]. In the first row_blocks blocks a warp
// counts the partial tiles of a row of tiles; in the others it writes the list of a column.
__global__ void __launch_bounds__(kThreads)
    count_rows_and_list_columns(const PackParams p, int32_t* __restrict__ partial_counts, int64_t rows, int64_t row_blocks) {
  const int lane = lane_index();
  if (blockIdx.x < row_blocks) {
    const int64_t row = blockIdx.x * static_cast<int64_t>(kWarps) + warp_index();
    if (row >= rows) return;
    int count = 0;
    for (int64_t k = lane; k < p.tiles_k; k += 32) count += p.tiles[row * p.tiles_k + k] == kTilePartial;
    count = __reduce_add_sync(kAllLanes, count);
    if (lane == 0) partial_counts[row] = count;
    return;
  }
  const int64_t column = (blockIdx.x - row_blocks) * static_cast<int64_t>(kWarps) + warp_index();
  if (column >= p.batch * p.heads * p.tiles_k) return;
  const int32_t* tiles = p.tiles + column / p.tiles_k * p.tiles_q * p.tiles_k + column % p.tiles_k;
  ListWriter list{p.columns + column * (p.tiles_q + 1)};
  for (int64_t base = 0; base < p.tiles_q; base += 32) {
    const int64_t q = base + lane;
    list.add(q < p.tiles_q && tiles[q * p.tiles_k] != kTileEmpty, q);
  }
  list.finish(p.tiles_q);
}

// partial_counts [rows] -> how many partial tiles come before each row, in place, by one block.
__global__ void __launch_bounds__(1024) sum_partial_counts(int32_t* partial_counts, int64_t rows) {
  constexpr int kItems = 4;
  using Scan = cub::BlockScan<int32_t, 1024>;
  __shared__ typename Scan::TempStorage storage;
  int32_t before = 0;
  for (int64_t base = 0; base < rows; base += 1024 * kItems) {
    int32_t items[kItems], total = 0;
    for (int i = 0; i < kItems; ++i) {
      const int64_t row = base + threadIdx.x * kItems + i;
      items[i] = row < rows ? partial_counts[row] : 0;
    }
    Scan(storage).ExclusiveSum(items, items, total);
    for (int i = 0; i < kItems; ++i) {
      const int64_t row = base + threadIdx.x * kItems + i;
      if (row < rows) partial_counts[row] = before + items[i];
    }
    before += total;
    __syncthreads();
  }
}

// tiles, partial_counts -> tiles whose partial ones have slots, rows [tables, Nq, 1 + Nk]. A warp for each row of tiles.
__global__ void __launch_bounds__(kThreads)
    number_and_list_rows(const PackParams p, const int32_t* __restrict__ partial_counts, int64_t rows) {
  const int64_t row = blockIdx.x * static_cast<int64_t>(kWarps) + warp_index();
  if (row >= rows) return;
  int32_t* tiles = p.tiles + row * p.tiles_k;
  int32_t slot = partial_counts[row];
  ListWriter list{p.rows + row * (p.tiles_k + 1)};
  for (int64_t base = 0; base < p.tiles_k; base += 32) {
    const int64_t k = base + lane_index();
    const int32_t tile = k < p.tiles_k ? tiles[k] : kTileEmpty;
    const uint32_t partial = __ballot_sync(kAllLanes, tile == kTilePartial);
    if (tile == kTilePartial) tiles[k] = kTilePartial + slot + __popc(partial & ((1U << lane_index()) - 1));
    slot += __popc(partial);
    list.add(tile != kTileEmpty, k);
  }
  list.finish(p.tiles_k);
}

// The slot of a tile's bits, or -1 when it has none.
__device__ int64_t slot_of(const PackParams& p, int64_t tile) {
  const int64_t slot = static_cast<int64_t>(p.tiles[tile]) - kTilePartial;
  return slot >= 0 && slot < p.slots ? slot : -1;
}

// mask [tables, Sq, Sk] with rows of consecutive elements, tiles -> bits [slots, tile_q, tile_k / 32]. A block for each strip; a
// warp packs every kWarps-th row of it.
template <int kBytes, bool kAligned>
__global__ void __launch_bounds__(kThreads, 4) pack_vectors(const PackParams p) {
  constexpr int kLanesPerWord = 32 / kBytes;
  const Strip<kBytes> strip(p);
  const int lane = lane_index();
  const int64_t words = p.tile_k / 32;
  for (int base = 0; base < strip.columns; base += 32 * kBytes) {
    const int column = base + lane * kBytes, limit = strip.columns - column;
    const int tile = min(column / strip.tile_k, strip.tiles - 1);
    const int64_t slot =
        column < strip.tiles * strip.tile_k ? slot_of(p, strip.tile_row * p.tiles_k + strip.first_tile + tile) : -1;
    if (!__any_sync(kAllLanes, slot >= 0)) continue;
    uint32_t* to = p.bits + slot * p.tile_q * words + (column - tile * strip.tile_k) / 32;
    const uint8_t* from = strip.corner + column;
    const bool reads = slot >= 0 && limit > 0, writes = slot >= 0 && lane % kLanesPerWord == 0;
#pragma unroll 2
    for (int row = warp_index(); row < strip.rows; row += kWarps) {
      uint32_t word = 0;
      if (reads) {
        Elements<kBytes, kAligned> v;
        v.load(from + row * p.row_stride, limit, 0);
        word = v.bits() << (lane % kLanesPerWord * kBytes);
      }
#pragma unroll
      for (int step = 1; step < kLanesPerWord; step *= 2) word |= __shfl_xor_sync(kAllLanes, word, step);
      if (writes) to[row * words] = word;
    }
  }
}

// The same for any strides and block sizes, a block for each tile. A warp packs squares of 32 x 32 elements: row by row with a
// lane for each column or, where the elements of a column are closer in memory, column by column with a lane for each row.
__global__ void __launch_bounds__(kThreads) pack_elements(const PackParams p) {
  const int64_t tile = blockIdx.x, slot = slot_of(p, tile);
  if (slot < 0) return;
  const TilePlace place(p, tile);
  const uint8_t* mask = mask_of(p, place.table);
  const uint32_t words = static_cast<uint32_t>(p.tile_k / 32), squares = static_cast<uint32_t>(p.tile_q / 32) * words;
  const uint32_t block_q = static_cast<uint32_t>(p.block_q), block_k = static_cast<uint32_t>(p.block_k);
  const uint32_t lane = static_cast<uint32_t>(lane_index());
  const bool by_column = p.row_stride < p.column_stride;
  const auto visible = [&](uint32_t row, uint32_t column) -> uint32_t {
    const uint32_t query = place.first_query + row, key = place.first_key + column;
    if (query >= place.query_end || key >= place.key_end) return 0;
    return __ldg(mask + query / block_q * p.row_stride + key / block_k * p.column_stride) != 0;
  };
  uint32_t* to = p.bits + slot * p.tile_q * words;
  for (uint32_t square = static_cast<uint32_t>(warp_index()); square < squares; square += kWarps) {
    const uint32_t row = square / words * 32, column = square % words * 32;
    uint32_t word = 0;  // of row + lane
#pragma unroll 16
    for (uint32_t i = 0; i < 32; ++i) {
      if (by_column) {
        word |= visible(row + lane, column + i) << i;
      } else {
        const uint32_t bits = __ballot_sync(kAllLanes, visible(row + i, column + lane) != 0);
        if (lane == i) word = bits;
      }
    }
    to[(row + lane) * words + column / 32] = word;
  }
}

// How the elements of a mask can be read.
enum class Access { kAligned16, kAligned4, kNeighbours, kOneByOne };

Access access_of(const PackParams& p) {
  if (p.block_q != 1 || p.block_k != 1 || (p.column_stride != 1 && p.key_length > 1)) return Access::kOneByOne;
  const uint64_t misaligned = reinterpret_cast<uint64_t>(p.mask) | static_cast<uint64_t>(p.batch_stride) |
                              static_cast<uint64_t>(p.head_stride) | static_cast<uint64_t>(p.row_stride);
  return misaligned % 16 == 0 ? Access::kAligned16 : misaligned % 4 == 0 ? Access::kAligned4 : Access::kNeighbours;
}

// The kernels count in 32 bits. A block that is longer than every length may as well be 2^30 long.
PackParams with_small_blocks(PackParams p) {
  constexpr int64_t kLargest = int64_t{1} << 30;
  if (p.block_q > kLargest) p.block_q = kLargest;
  if (p.block_k > kLargest) p.block_k = kLargest;
  return p;
}

template <int kBytes>
unsigned strips(const PackParams& p) {
  return grid_of(p.batch * p.heads * p.tiles_q * ceil_div(p.tiles_k, Strip<kBytes>::tiles_per_strip(p)));
}

// Elements of the mask that touch one tile, at most.
int64_t elements_per_tile(const PackParams& p) {
  const auto touched = [](int64_t tile, int64_t block, int64_t stride) {
    return stride == 0 ? 1 : ceil_div(tile - 1, block) + 1;
  };
  return touched(p.tile_q, p.block_q, p.row_stride) * touched(p.tile_k, p.block_k, p.column_stride);
}

}  // namespace

cudaError_t launch_pack_tiles(const PackParams& params, int32_t* partial_counts, cudaStream_t stream) {
  const PackParams p = with_small_blocks(params);
  const int64_t tables = p.batch * p.heads, rows = tables * p.tiles_q, columns = tables * p.tiles_k, tiles = rows * p.tiles_k;
  if (rows == 0 && columns == 0) return cudaSuccess;
  if (tiles > 0) {
    const int64_t elements = elements_per_tile(p);
    switch (access_of(p)) {
      case Access::kAligned16: classify_vectors<16, true><<<strips<16>(p), kThreads, 0, stream>>>(p); break;
      case Access::kAligned4: classify_vectors<4, true><<<strips<4>(p), kThreads, 0, stream>>>(p); break;
      case Access::kNeighbours: classify_vectors<4, false><<<strips<4>(p), kThreads, 0, stream>>>(p); break;
      case Access::kOneByOne:
        if (elements <= 4) {
          classify_elements<1><<<grid_of(ceil_div(tiles, kThreads)), kThreads, 0, stream>>>(p, tiles);
        } else if (elements <= 1024) {
          classify_elements<32><<<grid_of(ceil_div(tiles, kWarps)), kThreads, 0, stream>>>(p, tiles);
        } else {
          classify_elements<kThreads><<<grid_of(tiles), kThreads, 0, stream>>>(p, tiles);
        }
        break;
    }
  }
  const int64_t row_blocks = ceil_div(rows, kWarps), column_blocks = ceil_div(columns, kWarps);
  count_rows_and_list_columns<<<grid_of(row_blocks + column_blocks), kThreads, 0, stream>>>(p, partial_counts, rows, row_blocks);
  if (rows > 0) {
    sum_partial_counts<<<1, 1024, 0, stream>>>(partial_counts, rows);
    number_and_list_rows<<<grid_of(row_blocks), kThreads, 0, stream>>>(p, partial_counts, rows);
  }
  return cudaGetLastError();
}

cudaError_t launch_pack_bits(const PackParams& params, cudaStream_t stream) {
  const PackParams p = with_small_blocks(params);
  const int64_t rows = p.batch * p.heads * p.tiles_q, tiles = rows * p.tiles_k;
  if (p.slots == 0) return cudaSuccess;
  const size_t bytes = static_cast<size_t>(p.slots * p.tile_q * (p.tile_k / 32)) * sizeof(uint32_t);
  if (const cudaError_t status = cudaMemsetAsync(p.bits, 0, bytes, stream)) return status;
  if (tiles == 0) return cudaSuccess;
  switch (access_of(p)) {
    case Access::kAligned16: pack_vectors<16, true><<<strips<16>(p), kThreads, 0, stream>>>(p); break;
    case Access::kAligned4: pack_vectors<4, true><<<strips<4>(p), kThreads, 0, stream>>>(p); break;
    case Access::kNeighbours: pack_vectors<4, false><<<strips<4>(p), kThreads, 0, stream>>>(p); break;
    case Access::kOneByOne: pack_elements<<<grid_of(tiles), kThreads, 0, stream>>>(p); break;
  }
  return cudaGetLastError();
}

}  // namespace dmattn::cuda
