// Tensors in, params out for mask packing.
#pragma once

#include "tensors.h"

namespace dmattn {

struct CheckedPack {
  Tensor mask;
  PackParams params;
};

inline CheckedPack check_pack(const Tensor& mask, int64_t query_length, int64_t key_length, int64_t block_q, int64_t block_k,
                              int64_t tile_q, int64_t tile_k) {
  check(mask.dim() == 4, "mask: expected 4 dimensions [B|1, H|Hkv|1, ceil(Sq/block_q), ceil(Sk/block_k)], got ",
        shape_text(mask));
  check_dtype("mask", mask, ScalarType::Bool);
  check_extent("mask", mask);
  for (auto [name, length] : {std::pair{"query_length", query_length}, {"key_length", key_length}}) {
    check(length >= 0 && length <= kMaxLength, name, ": expected 0 <= ", name, " <= ", kMaxLength, ", got ", length);
  }
  for (auto [name, block] : {std::pair{"block_q", block_q}, {"block_k", block_k}}) {
    check(block > 0 && block <= kMaxLength, name, ": expected 0 < ", name, " <= ", kMaxLength, ", got ", block);
  }
  for (auto [name, tile] : {std::pair{"tile_q", tile_q}, {"tile_k", tile_k}}) {
    check(tile > 0 && tile % 32 == 0 && tile <= kMaxTile, name, ": expected a multiple of 32 up to ", kMaxTile, ", got ", tile);
  }
  check_shape("mask", mask, {mask.size(0), mask.size(1), ceil_div(query_length, block_q), ceil_div(key_length, block_k)},
              "[B|1, H|Hkv|1, ceil(Sq/block_q), ceil(Sk/block_k)]");
  CheckedPack checked{mask, {}};
  PackParams& p = checked.params;
  p.batch = mask.size(0), p.heads = mask.size(1), p.query_length = query_length, p.key_length = key_length;
  p.block_q = block_q, p.block_k = block_k, p.tile_q = tile_q, p.tile_k = tile_k;
  p.tiles_q = table_size(query_length, tile_q), p.tiles_k = table_size(key_length, tile_k);
  p.mask = static_cast<const uint8_t*>(mask.data_ptr());
  p.batch_stride = mask.stride(0), p.head_stride = mask.stride(1), p.row_stride = mask.stride(2),
  p.column_stride = mask.stride(3);
  return checked;
}

struct PackedTiles {
  Tensor tiles, rows, columns;
};

inline PackedTiles allocate_tiles(CheckedPack& checked) {
  PackParams& p = checked.params;
  PackedTiles packed{empty_on(checked.mask, {p.batch, p.heads, p.tiles_q, p.tiles_k}, ScalarType::Int),
                     empty_on(checked.mask, {p.batch, p.heads, p.tiles_q, p.tiles_k + 1}, ScalarType::Int),
                     empty_on(checked.mask, {p.batch, p.heads, p.tiles_k, p.tiles_q + 1}, ScalarType::Int)};
  p.tiles = static_cast<int32_t*>(packed.tiles.data_ptr());
  p.rows = static_cast<int32_t*>(packed.rows.data_ptr());
  p.columns = static_cast<int32_t*>(packed.columns.data_ptr());
  return packed;
}

inline Tensor allocate_bits(CheckedPack& checked, const Tensor& tiles, int64_t slots) {
  PackParams& p = checked.params;
  check_dtype("tiles", tiles, ScalarType::Int);
  check_device("tiles", tiles, checked.mask);
  check_shape("tiles", tiles, {p.batch, p.heads, p.tiles_q, p.tiles_k}, "[B|1, H|Hkv|1, Nq, Nk]");
  check(tiles.is_contiguous(), "tiles: expected the contiguous result of pack_tiles, got a strided view of shape ",
        shape_text(tiles));
  check(slots >= 0 && slots <= (int64_t{1} << 31), "slots: expected 0 <= slots <= 2^31, got ", slots);
  Tensor bits = empty_on(checked.mask, {slots, p.tile_q, p.tile_k / 32}, ScalarType::Int);
  p.tiles = static_cast<int32_t*>(tiles.data_ptr());
  p.bits = static_cast<uint32_t*>(bits.data_ptr());
  p.slots = slots;
  return bits;
}

}  // namespace dmattn
