// Which query sees which key on a CPU: the one place that decides it. It walks the keys that some query of a tile sees, and hands
// them out in chunks.
//
// Keys that every query of the tile sees and keys that only some see go into different chunks, so that all but one or two chunks
// need no test of each pair. A key that no query of the tile sees is never handed out, so its NaN or inf has no effect.
#pragma once

#include "index_lists.h"
#include "summary.h"

namespace dmattn::cpu {
namespace {

// Bit q % 32 of word q / 32: query q of the tile sees the key.
struct RowMask {
  uint32_t words[kMaxTileQueries / 32];
};

// Every query of the tile sees keys [0, full); keys [full, count) are seen by the queries in their mask. The last key is
// repeated up to whole vectors.
struct KeyChunk {
  int64_t count, full;
  int32_t keys[kListChunkKeys];
  RowMask masks[kListChunkKeys];
};

// What a scheduler works with, in scratch memory: the two chunks that it is filling, and what index lists show to the queries of
// the tile, from query `first_listed` on, or to one query alone.
struct KeyLists {
  KeyChunk *full, *partial;
  int64_t chunk_keys;  // at most so many keys in a chunk
  ListedKeys listed;
  int64_t first_listed;
  AscendingList alone;
};

DMATTN_INLINE KeyLists take_key_lists(Arena& arena, const AttentionParams& p) {
  KeyChunk* const full = arena.take<KeyChunk>(1);
  return {full, arena.take<KeyChunk>(1), chunk_keys(p), take_listed_keys(arena, p), 0, {}};
}

template <class Word>
DMATTN_INLINE Word bits_below(int64_t n) {
  constexpr int64_t kBits = sizeof(Word) * 8;
  return n <= 0 ? Word(0) : n >= kBits ? ~Word(0) : static_cast<Word>((Word(1) << n) - 1);
}

DMATTN_INLINE RowMask rows_between(int64_t first, int64_t last) {
  RowMask mask;
  for (int w = 0; w < kMaxTileQueries / 32; ++w)
    mask.words[w] = bits_below<uint32_t>(last - 32 * w) & ~bits_below<uint32_t>(first - 32 * w);
  return mask;
}

DMATTN_INLINE RowMask intersect(const RowMask& a, const RowMask& b) {
  RowMask mask;
  for (int w = 0; w < kMaxTileQueries / 32; ++w) mask.words[w] = a.words[w] & b.words[w];
  return mask;
}

// Transposes 32 x 32 bits by swapping ever smaller quadrants.
DMATTN_INLINE void transpose_bits(uint32_t* rows) {
  uint32_t low = 0x0000ffffU;
  for (int size = 16; size > 0; size /= 2, low ^= low << size) {
    for (int i = 0; i < 32; i = (i + size + 1) & ~size) {
      const uint32_t swap = ((rows[i] >> size) ^ rows[i + size]) & low;
      rows[i] ^= swap << size;
      rows[i + size] ^= swap;
    }
  }
}

// Collects the keys that one tile of queries sees into chunks. `Use` is called with each chunk.
template <class Use>
class KeyScheduler {
 public:
  KeyScheduler(const AttentionParams& p, const Summaries& summaries, const QueryTile& tile, const KeyLists& lists, const Use& use)
      : params_(p), mask_(p.mask), tile_(tile), lists_(lists), use_(use), all_rows_(rows_between(0, tile.rows)) {
    first_position_ = static_cast<int32_t>(tile.position);
    last_position_ = static_cast<int32_t>(tile.position + tile.rows - 1);
    if (mask_.start.data)
      start_ = static_cast<const int32_t*>(mask_.start.data) + head_offset(mask_.start, tile.batch, tile.head);
    if (mask_.end.data) end_ = static_cast<const int32_t*>(mask_.end.data) + head_offset(mask_.end, tile.batch, tile.head);
    start_min_ = summary_row(summaries.start_min, mask_.start, tile.batch, tile.head);
    end_max_ = summary_row(summaries.end_max, mask_.end, tile.batch, tile.head);
    key_limit_ = mask_.is_causal ? max_of(0, min_of(p.key_length, last_position_ + int64_t{1})) : p.key_length;
  }

  void run() {
    lists_.full->count = lists_.partial->count = 0;
    if (lists_.alone.count >= 0) {
      visit_list();
    } else if (mask_.tiles.data) {
      visit_mask_tiles();
    } else {
      visit_range(0, key_limit_);
    }
    finish();
  }

 private:
  // One bit per key of a block of up to 64.
  struct BlockBits {
    uint64_t live, full;
  };

  // The keys that one query sees, in ascending order: sinks, and then those of its list, with the local ones in their place.
  void visit_list() {
    const int64_t position = list_position(params_, tile_), sinks = min_of(mask_.index.sinks, key_limit_);
    const int64_t local_end = max_of(sinks, min_of(position + 1, key_limit_));
    const int64_t local = max_of(sinks, min_of(position - mask_.index.local + 1, local_end));
    push_range(0, sinks);
    visit_entries(sinks, local);
    push_range(local, local_end);
    visit_entries(local_end, key_limit_);
  }

  // The keys of a range that the list's blocks hold.
  void visit_entries(int64_t first_key, int64_t last_key) {
    if (first_key >= last_key) return;
    const AscendingList& list = lists_.alone;
    const int log2 = mask_.index.log2_block;
    const int64_t block = int64_t{1} << log2;
    const int64_t first = count_below(list.entries, list.count, static_cast<uint32_t>(first_key >> log2));
    const int64_t last = count_below(list.entries, list.count, static_cast<uint32_t>(ceil_div(last_key, block)));
    if (block == 1) return push_keys(last - first, [&](int64_t i) { return list.entries[first + i]; });
    for (int64_t i = first; i < last; ++i) {
      const int64_t key = int64_t{list.entries[i]} << log2;
      push_range(max_of(key, first_key), min_of(key + block, last_key));
    }
  }

  void push_range(int64_t first, int64_t last) {
    push_keys(last - first, [&](int64_t i) { return static_cast<int32_t>(first + i); });
  }

  // Keys key_at(0), ..: every query of the tile sees them.
  template <class KeyAt>
  void push_keys(int64_t count, const KeyAt& key_at) {
    KeyChunk& chunk = *lists_.full;
    for (int64_t i = 0; i < count;) {
      const int64_t part = min_of(count - i, lists_.chunk_keys - chunk.count);
      int32_t* const to = chunk.keys + chunk.count;
      for (int64_t k = 0; k < part; ++k) to[k] = key_at(i + k);
      i += part, chunk.count += part;
      if (chunk.count == lists_.chunk_keys) emit(chunk, chunk.count);
    }
  }

  // A table may hold anything: whatever lies outside its bounds counts as empty.
  void visit_mask_tiles() {
    const int64_t mask_row = tile_.first / mask_.tile_q;
    const int32_t* states = static_cast<const int32_t*>(mask_.tiles.data) + head_offset(mask_.tiles, tile_.batch, tile_.head) +
                            mask_row * mask_.tiles_k;
    const int32_t* list = static_cast<const int32_t*>(mask_.rows.data) + head_offset(mask_.rows, tile_.batch, tile_.head) +
                          mask_row * (mask_.tiles_k + 1);
    const int64_t words = mask_.tile_k / 32, count = min_of(list[0], mask_.tiles_k);
    for (int64_t i = 1; i <= count; ++i) {
      const int64_t column = list[i];
      if (column < 0 || column >= mask_.tiles_k) continue;
      const int64_t slot = int64_t{states[column]} - kTilePartial;
      if (states[column] != kTileFull && (slot < 0 || slot >= mask_.slots)) continue;
      bits_ = states[column] == kTileFull ? nullptr : mask_.bits + (slot * mask_.tile_q + tile_.first % mask_.tile_q) * words;
      range_first_ = column * mask_.tile_k;
      visit_range(range_first_, min_of(range_first_ + mask_.tile_k, key_limit_));
    }
  }

  // Visits keys [first, last) in the blocks that summaries have.
  void visit_range(int64_t first, int64_t last) {
    if (first >= last) return;
    const int64_t end_block = ceil_div(last, kSummaryKeys);
    if (!start_min_ && !end_max_) {
      for (int64_t block = first / kSummaryKeys; block < end_block; ++block) visit_block(block, first, last);
      return;
    }
    for (int64_t group = first / kSummaryKeys / kLanes<float> * kLanes<float>; group < end_block; group += kLanes<float>) {
      Int32Vec may_live = Int32Vec{} - 1;
      if (end_max_) may_live &= load_int32(end_max_ + group) > first_position_;
      if (start_min_) may_live &= load_int32(start_min_ + group) <= last_position_;
      for (uint32_t bits = lane_bits(may_live); bits; bits &= bits - 1) {
        const int64_t block = group + __builtin_ctz(bits);
        if (block >= first / kSummaryKeys && block < end_block) visit_block(block, first, last);
      }
    }
  }

  void visit_block(int64_t block, int64_t range_first, int64_t range_last) {
    const int64_t first = max_of(block * kSummaryKeys, range_first),
                  count = min_of((block + 1) * kSummaryKeys, range_last) - first;
    if (lists_.listed.bytes && !lists_.listed.lines[block]) return;
    BlockBits block_bits = classify(first, count);
    const BlockBits listed = listed_keys(first);
    block_bits.live &= listed.live;
    if (block_bits.live == 0) return;
    RowMask columns[kSummaryKeys];
    if (bits_) transpose_columns(first, count, columns);
    const uint64_t sure = bits_ ? 0 : block_bits.live & block_bits.full & listed.full;
    push_full(static_cast<int32_t>(first), sure);
    for (uint64_t left = block_bits.live & ~sure; left; left &= left - 1) {
      const int k = __builtin_ctzll(left);
      const bool whole_interval = (block_bits.full >> k) & 1U;
      RowMask rows = whole_interval ? all_rows_ : interval_rows(first + k);
      if (bits_) rows = intersect(rows, columns[k]);
      if (lists_.listed.bytes) rows.words[0] &= lists_.listed.bytes[first + k] >> lists_.first_listed;
      push(static_cast<int32_t>(first + k), rows);
    }
  }

  // live: the key's interval touches the positions of the tile, as an empty interval may. full: it covers them.
  BlockBits classify(int64_t first, int64_t count) const {
    BlockBits bits = {bits_below<uint64_t>(count), bits_below<uint64_t>(count)};
    if (mask_.is_causal) bits.full &= bits_below<uint64_t>(first_position_ + int64_t{1} - first);
    if (!start_ && !end_) return bits;
    uint64_t live = 0, full = 0;
    int64_t j = 0;
    for (; j + kLanes<float> <= count; j += kLanes<float>) {
      Int32Vec touches = Int32Vec{} - 1, covers = touches;
      if (end_) {
        const Int32Vec end = load_int32(end_ + first + j);
        touches &= end > first_position_, covers &= end > last_position_;
      }
      if (start_) {
        const Int32Vec start = load_int32(start_ + first + j);
        touches &= start <= last_position_, covers &= start <= first_position_;
      }
      live |= static_cast<uint64_t>(lane_bits(touches)) << j;
      full |= static_cast<uint64_t>(lane_bits(covers)) << j;
    }
    for (; j < count; ++j) {
      const int32_t start = start_ ? start_[first + j] : kAlways, end = end_ ? end_[first + j] : kForever;
      live |= uint64_t{end > first_position_ && start <= last_position_} << j;
      full |= uint64_t{end > last_position_ && start <= first_position_} << j;
    }
    return {bits.live & live, bits.full & full};
  }

  // live: some query of the tile has the key in its list. full: every query has.
  BlockBits listed_keys(int64_t first) const {
    if (!lists_.listed.bytes) return {~uint64_t{0}, ~uint64_t{0}};
    BlockBits bits = {0, ~uint64_t{0}};
    for (int64_t i = 0; i < tile_.rows; ++i) {
      const uint64_t row = bytes_with(lists_.listed.bytes + first, static_cast<uint8_t>(1U << (lists_.first_listed + i)));
      bits.live |= row, bits.full &= row;
    }
    return bits;
  }

  RowMask interval_rows(int64_t key) const {
    int64_t first = start_ ? start_[key] - tile_.position : 0;
    if (mask_.is_causal) first = max_of(first, key - tile_.position);
    return rows_between(max_of(first, 0), end_ ? min_of(end_[key] - tile_.position, tile_.rows) : tile_.rows);
  }

  // Bits are stored by query: 32 keys in a word. Here they are turned into one mask of queries for each key.
  void transpose_columns(int64_t first, int64_t count, RowMask* columns) const {
    const int64_t stride = mask_.tile_k / 32;
    for (int64_t j = 0; j < count; j += 32) {
      const uint32_t* word = bits_ + (first + j - range_first_) / 32;
      for (int w = 0; w < kMaxTileQueries / 32; ++w) {
        uint32_t square[32];
        for (int i = 0; i < 32; ++i) square[i] = 32 * w + i < tile_.rows ? word[(32 * w + i) * stride] : 0;
        transpose_bits(square);
        for (int i = 0; i < 32; ++i) columns[j + i].words[w] = square[i];
      }
    }
  }

  void push(int32_t key, const RowMask& rows) {
    uint32_t any = 0, missing = 0;
    for (int w = 0; w < kMaxTileQueries / 32; ++w) any |= rows.words[w], missing |= rows.words[w] ^ all_rows_.words[w];
    if (any == 0) return;
    if (missing == 0) return push_full(key);
    KeyChunk& chunk = *lists_.partial;
    chunk.keys[chunk.count] = key;
    chunk.masks[chunk.count++] = rows;
    if (chunk.count == lists_.chunk_keys) emit(chunk, 0);
  }

  void push_full(int32_t key) {
    KeyChunk& chunk = *lists_.full;
    chunk.keys[chunk.count++] = key;
    if (chunk.count == lists_.chunk_keys) emit(chunk, chunk.count);
  }

  // Keys first + k of all bits k that are set.
  void push_full(int32_t first, uint64_t bits) {
    KeyChunk& chunk = *lists_.full;
    const int64_t count = __builtin_popcountll(bits);
    if (chunk.count + count >= lists_.chunk_keys) {
      for (; bits; bits &= bits - 1) push_full(first + static_cast<int32_t>(__builtin_ctzll(bits)));
      return;
    }
    for (int32_t* key = chunk.keys + chunk.count; bits; bits &= bits - 1) {
      *key++ = first + static_cast<int32_t>(__builtin_ctzll(bits));
    }
    chunk.count += count;
  }

  // Hands out what is left of both chunks, as one chunk when it fits.
  void finish() {
    KeyChunk &full = *lists_.full, &partial = *lists_.partial;
    const int64_t sure = full.count;
    if (sure > 0 && sure + partial.count <= lists_.chunk_keys) {
      for (int64_t k = 0; k < partial.count; ++k) {
        full.keys[full.count] = partial.keys[k];
        full.masks[full.count++] = partial.masks[k];
      }
      partial.count = 0;
    }
    if (full.count > 0) emit(full, sure);
    if (partial.count > 0) emit(partial, 0);
  }

  void emit(KeyChunk& chunk, int64_t full) {
    chunk.full = full;
    for (int64_t k = chunk.count; k < padded<float>(chunk.count); ++k) chunk.keys[k] = chunk.keys[k - 1];
    use_(static_cast<const KeyChunk&>(chunk));
    chunk.count = 0;
  }

  const AttentionParams& params_;
  const MaskParams& mask_;
  const QueryTile& tile_;
  const KeyLists& lists_;
  const Use& use_;
  const RowMask all_rows_;
  const int32_t *start_ = nullptr, *end_ = nullptr;          // [Sk]
  const int32_t *start_min_ = nullptr, *end_max_ = nullptr;  // [blocks]
  int32_t first_position_, last_position_;
  int64_t key_limit_;               // keys from here on are hidden by causality
  const uint32_t* bits_ = nullptr;  // [rows, tile_k / 32] of the partial mask tile at hand
  int64_t range_first_ = 0;         // first key of that tile
};

template <class Use>
DMATTN_INLINE void for_each_chunk(const AttentionParams& p, const Summaries& summaries, const QueryTile& tile,
                                  const KeyLists& lists, const Use& use) {
  KeyScheduler<Use>(p, summaries, tile, lists, use).run();
}

}  // namespace
}  // namespace dmattn::cpu
