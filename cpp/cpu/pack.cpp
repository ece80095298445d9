// Mask packing on the CPU: a boolean mask, or a table of blocks, to tiles (empty, full, partial) and the bits of the partial
// ones.
#include <algorithm>

#include "../pack_arguments.h"
#include "parallel.h"

namespace dmattn::cpu {
namespace {

struct Span {
  int64_t first, last;
};

Span tile_span(int64_t tile, int64_t size, int64_t length) { return {tile * size, std::min((tile + 1) * size, length)}; }

const uint8_t* mask_of(const PackParams& p, int64_t table) {
  return p.mask + (table / p.heads) * p.batch_stride + (table % p.heads) * p.head_stride;
}

// Empty, full or partial, from the mask elements that touch the tile. A tile's part beyond the lengths counts as neither.
int32_t classify(const PackParams& p, const uint8_t* mask, Span queries, Span keys) {
  if (queries.first >= queries.last || keys.first >= keys.last)
    return kTileEmpty;  // a whole tile beyond, though a block may reach it
  // Along an expanded dimension, one element stands for all.
  const int64_t first_row = queries.first / p.block_q, first_column = keys.first / p.block_k;
  const int64_t last_row = p.row_stride == 0 ? first_row : (queries.last - 1) / p.block_q;
  const int64_t last_column = p.column_stride == 0 ? first_column : (keys.last - 1) / p.block_k;
  bool any = false, all = true;
  for (int64_t row = first_row; row <= last_row; ++row) {
    for (int64_t column = first_column; column <= last_column; ++column) {
      const bool visible = mask[row * p.row_stride + column * p.column_stride] != 0;
      any |= visible;
      all &= visible;
    }
    if (any && !all) return kTilePartial;
  }
  return any ? kTileFull : kTileEmpty;
}

// Turns the kTilePartial marks into kTilePartial + slot, counted over the whole table in order.
void number_slots(int32_t* tiles, int64_t count) {
  int32_t slot = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (tiles[i] == kTilePartial) tiles[i] += slot++;
  }
}

// lists[i] = count, then the j with a non-empty tile at i * stride_i + j * stride_j.
void list_occupied(const int32_t* tiles, int64_t count_i, int64_t stride_i, int64_t count_j, int64_t stride_j, int32_t* lists) {
  for (int64_t i = 0; i < count_i; ++i) {
    int32_t* list = lists + i * (count_j + 1);
    int32_t count = 0;
    for (int64_t j = 0; j < count_j; ++j) {
      if (tiles[i * stride_i + j * stride_j] != kTileEmpty) list[++count] = static_cast<int32_t>(j);
    }
    list[0] = count;
    std::fill(list + 1 + count, list + 1 + count_j, 0);
  }
}

std::tuple<Tensor, Tensor, Tensor> pack_tiles_op(const Tensor& mask, int64_t query_length, int64_t key_length, int64_t block_q,
                                                 int64_t block_k, int64_t tile_q, int64_t tile_k) {
  CheckedPack checked = check_pack(mask, query_length, key_length, block_q, block_k, tile_q, tile_k);
  const PackedTiles packed = allocate_tiles(checked);
  const PackParams& p = checked.params;
  const int64_t tables = p.batch * p.heads;
  for_each_task(tables * p.tiles_q, [&](int64_t task, int64_t) {
    const int64_t table = task / p.tiles_q, row = task % p.tiles_q;
    const Span queries = tile_span(row, p.tile_q, p.query_length);
    for (int64_t column = 0; column < p.tiles_k; ++column) {
      p.tiles[task * p.tiles_k + column] = classify(p, mask_of(p, table), queries, tile_span(column, p.tile_k, p.key_length));
    }
  });
  number_slots(p.tiles, tables * p.tiles_q * p.tiles_k);
  for_each_task(tables, [&](int64_t table, int64_t) {
    const int32_t* tiles = p.tiles + table * p.tiles_q * p.tiles_k;
    list_occupied(tiles, p.tiles_q, p.tiles_k, p.tiles_k, 1, p.rows + table * p.tiles_q * (p.tiles_k + 1));
    list_occupied(tiles, p.tiles_k, 1, p.tiles_q, p.tiles_k, p.columns + table * p.tiles_k * (p.tiles_q + 1));
  });
  return {packed.tiles, packed.rows, packed.columns};
}

Tensor pack_bits_op(const Tensor& mask, const Tensor& tiles, int64_t query_length, int64_t key_length, int64_t block_q,
                    int64_t block_k, int64_t tile_q, int64_t tile_k, int64_t slots) {
  CheckedPack checked = check_pack(mask, query_length, key_length, block_q, block_k, tile_q, tile_k);
  const Tensor bits = allocate_bits(checked, tiles, slots);
  const PackParams& p = checked.params;
  const int64_t words = p.tile_k / 32;
  std::fill(p.bits, p.bits + slots * p.tile_q * words, 0U);
  for_each_task(p.batch * p.heads * p.tiles_q, [&](int64_t task, int64_t) {
    const uint8_t* mask_data = mask_of(p, task / p.tiles_q);
    const Span queries = tile_span(task % p.tiles_q, p.tile_q, p.query_length);
    for (int64_t column = 0; column < p.tiles_k; ++column) {
      const int64_t slot = p.tiles[task * p.tiles_k + column] - kTilePartial;
      if (slot < 0 || slot >= slots) continue;
      const Span keys = tile_span(column, p.tile_k, p.key_length);
      uint32_t* tile_bits = p.bits + slot * p.tile_q * words;
      for (int64_t i = queries.first; i < queries.last; ++i) {
        const uint8_t* row = mask_data + (i / p.block_q) * p.row_stride;
        for (int64_t j = keys.first; j < keys.last; ++j) {
          const uint32_t visible = row[(j / p.block_k) * p.column_stride] != 0 ? 1 : 0;
          tile_bits[(i - queries.first) * words + (j - keys.first) / 32] |= visible << ((j - keys.first) % 32);
        }
      }
    }
  });
  return bits;
}

}  // namespace
}  // namespace dmattn::cpu

DMATTN_KERNELS(CPU, m) {
  m.impl("pack_tiles", TORCH_BOX(&dmattn::cpu::pack_tiles_op));
  m.impl("pack_bits", TORCH_BOX(&dmattn::cpu::pack_bits_op));
}
