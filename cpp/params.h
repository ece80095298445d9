// The border between torch and the kernels: plain structs, no torch include here or in anything below.
//
// Mask and bias tensors may have B or 1 batches and H, Hkv or 1 heads. With `PerHead` all six cases are one pointer formula,
// because a query head h reads row h / head_divisor and a broadcast dimension has stride 0.
#pragma once

#include <cstdint>

namespace dmattn {

enum class DType : int32_t { kFloat64, kFloat32, kBFloat16, kFloat16 };

// A [B, heads, S, width] tensor whose last stride is 1, as kernels see it. Strides count elements.
struct TensorView {
  void* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
};

// A [B|1, H|Hkv|1, ...] tensor read by query head; the dimensions after the head are contiguous unless a row_stride says
// otherwise.
struct PerHead {
  void* data = nullptr;  // null: the argument was not given
  int64_t batch_stride = 0, head_stride = 0, head_divisor = 1;

  int64_t offset(int64_t batch, int64_t query_head) const {
    return batch * batch_stride + (query_head / head_divisor) * head_stride;
  }
  template <class T>
  T* at(int64_t batch, int64_t query_head) const {
    return static_cast<T*>(data) + offset(batch, query_head);
  }
};

// For each query a list of the keys, or blocks of keys, that it sees. Entry n stands for keys n * block to n * block + block - 1;
// one that is negative or beyond the keys stands for none, and duplicates count once. Position p also sees keys j with
// p - local < j <= p, and those below `sinks`. `offset` is the position of query 0 for this purpose.
struct IndexLists {
  PerHead entries;                    // int32 [B|1, H|Hkv|1, Sq, K], row_stride between queries; null: no lists
  int64_t row_stride = 0, count = 0;  // count: K
  int32_t log2_block = 0, local = 0, sinks = 0;
  const int32_t* offset = nullptr;  // [B], or [1] with offset_stride 0; null: Sk - Sq
  int64_t offset_stride = 0;
};

// A key j is visible to position p when start_j <= p < end_j (and j <= p if causal), and the block mask and the lists agree.
struct MaskParams {
  PerHead start;  // int32 [B|1, H|Hkv|1, Sk], null: visible from the first position on
  PerHead end;    // int32 [B|1, H|Hkv|1, Sk], null: visible for ever
  bool is_causal = false;
  bool is_in_order = false;  // the keys that a query sees are neighbours, or nearly so: changes speed, never results

  PerHead tiles;    // int32 [B|1, H|Hkv|1, Nq, Nk]: kTileEmpty, kTileFull or kTilePartial + slot; null: no block mask
  PerHead rows;     // int32 [B|1, H|Hkv|1, Nq, 1 + Nk]: count, then the non-empty key tiles of a query tile, ascending
  PerHead columns;  // int32 [B|1, H|Hkv|1, Nk, 1 + Nq]: count, then the non-empty query tiles of a key tile, ascending
  const uint32_t* bits = nullptr;    // [slots, tile_q, tile_k / 32]: bit j % 32 of word j / 32 is key j of the tile
  int64_t slots = 0;                 // slots in bits: a corrupt table must not read beyond them
  int64_t tile_q = 0, tile_k = 0;    // multiples of 32
  int64_t tiles_q = 0, tiles_k = 0;  // Nq = Sq / tile_q + 2, Nk = Sk / tile_k + 2; tiles beyond the lengths are empty

  IndexLists index;
};

inline constexpr int32_t kTileEmpty = 0;
inline constexpr int32_t kTileFull = 1;
inline constexpr int32_t kTilePartial = 2;  // + slot

struct AttentionParams {
  int64_t batch = 0, heads = 0, kv_heads = 0, query_length = 0, key_length = 0, head_dim = 0, value_dim = 0;
  DType dtype = DType::kFloat32;  // of query, key, value, out and their gradients

  TensorView query;          // [B, H, Sq, D]
  TensorView key;            // [B, Hkv, Sk, D]
  TensorView value;          // [B, Hkv, Sk, Dv]
  TensorView out;            // [B, H, Sq, Dv]
  void* lse = nullptr;       // [B, H, Sq] contiguous; float, or double for kFloat64
  void* lse_rest = nullptr;  // like lse: the exact log-sum-exp minus lse; null: taken as 0

  MaskParams mask;
  PerHead key_bias;  // [B|1, H|Hkv|1, Sk], float (double for kFloat64); may be null
  PerHead bias;      // [B|1, H|Hkv|1, Sq, Sk] with bias_row_stride between queries; may be null
  int64_t bias_row_stride = 0;
  DType bias_dtype = DType::kFloat32;

  double scale = 1.0, softcap = 0.0, dropout_p = 0.0;
  const int64_t* dropout_seed = nullptr;  // [1], on the device; null when dropout_p == 0

  // How many keys a query sees at most; 0 or less: not known. It changes speed, never results.
  int64_t most_keys = 0;
};

struct BackwardParams {
  AttentionParams forward;         // out and lse are inputs here
  TensorView grad_out;             // [B, H, Sq, Dv]
  const void* grad_lse = nullptr;  // [B, H, Sq] contiguous, type of lse; null: zero
  TensorView grad_query;           // [B, H, Sq, D]
  TensorView grad_key;             // [B, Hkv, Sk, D]
  TensorView grad_value;           // [B, Hkv, Sk, Dv]
  void* grad_key_bias = nullptr;   // shape of key_bias, contiguous, float (double for kFloat64); null: not wanted
  void* grad_bias = nullptr;       // shape of bias, contiguous, float (double for kFloat64); null: not wanted
  bool deterministic = false;
};

struct SelectParams {
  int64_t batch = 0, heads = 0, length = 0, window = 0;
  DType dtype = DType::kFloat32;
  TensorView scores;    // [B, Hkv, Sk]: row_stride unused
  PerHead segment_end;  // int32 [B|1, Hkv|1, Sk]: end of the key's document, <= j hides the key; null: one document
  bool is_causal = true;
  int32_t local = 0;       // every query sees its last `local` keys, at most length; a key competes when it is this old
  int32_t sink = 0;        // every query sees the first `sink` keys of its document, at most length; they never compete
  int32_t* end = nullptr;  // [B, Hkv, Sk] contiguous, output
};

// For each query the best keys of an indexer, or blocks of keys, of those that compete. The score of key s for a query at
// position t is sum_h weights[h] relu(scale <query[h], key[s]>) + slope (s - t); that of a block the largest of its keys that
// compete.
struct IndexTopKParams {
  int64_t batch = 0, groups = 0, query_length = 0, key_length = 0, heads = 0, head_dim = 0;
  int64_t keys = 0;               // rows of key: Sk, or whole blocks where keys are means of blocks
  int64_t top = 0;                // K: entries of a list
  DType dtype = DType::kFloat32;  // of query and key
  TensorView query;               // [B, G, Sq, Hi, Di]
  int64_t query_head_stride = 0;  // between index heads
  TensorView key;                 // [B, G, keys, Di]
  TensorView weights;             // [B, G, Sq, Hi], float (double for kFloat64)
  const void* slope = nullptr;    // [G], like weights; null: 0
  PerHead start, end;             // int32 [B|1, G|1, keys], as in MaskParams; for means of blocks those of the whole block
  const int32_t* query_offset = nullptr;  // [B]: the position of query 0; null: the number of keys minus Sq
  const int32_t* lengths = nullptr;       // [B], taken as within [0, Sk]; null: all are Sk
  int32_t log2_block = 0, local = 0, sinks = 0;
  bool is_pooled = false, is_causal = true;
  double scale = 1.0;
  int32_t* indices = nullptr;  // [B, G, Sq, K] contiguous, output: ascending, -1 behind them
  void* scores = nullptr;      // [B, G, Sq, K] contiguous, like weights, output: of the entries, -inf of -1; null: not wanted
};

// For each of some queries how far the softmax of an indexer's scores is from attention, a divergence KL(p || q) over the keys
// (or blocks) that compete, and its gradients. Both come as products: <query, key> of attention, <index query, index key> of the
// indexer. Columns of the first are keys: all of them, or those of the query's list; columns of the second likewise, or blocks.
// R is float, or double.
struct IndexLossParams {
  int64_t batch = 0, groups = 0, heads = 0, index_heads = 0, rows = 0;  // heads: of attention in a group
  int64_t key_length = 0;
  int64_t keys = 0;     // columns of logits: Sk, or those of a list's blocks
  int64_t choices = 0;  // columns of products: keys, or blocks where is_pooled
  int64_t blocks = 0;   // what is chosen among: keys in blocks, the last of which may be shorter, but not where is_pooled
  bool is_double = false;
  const void* logits = nullptr;    // R [B, G, heads, rows, keys] contiguous: products, before scale
  const void* products = nullptr;  // R [B, G, index_heads, rows, choices] contiguous
  const void* weights = nullptr;   // R [B, G, rows, index_heads] contiguous
  const void* slope = nullptr;     // R [G]; null: 0
  const void* key_bias = nullptr;  // R [B|1, G|1, heads|1, Sk], contiguous rows; null: 0
  int64_t bias_batch_stride = 0, bias_group_stride = 0, bias_head_stride = 0;
  const void* lse = nullptr;           // R [B, G, heads, rows] contiguous, of all that a query sees; null: of all columns
  const int64_t* positions = nullptr;  // [rows]
  PerHead lists;       // int32 [B|1, G|1, rows, blocks]: numbers of blocks, each once, -1 for none; null: all keys
  PerHead start, end;  // int32 [B|1, G|1, Sk], as in MaskParams; a query whose own key is hidden sees nothing
  int32_t log2_block = 0, local = 0, sinks = 0;
  bool is_pooled = false, is_causal = true;
  bool is_sharp = false;  // a query counts as much as its attention to competing keys times the largest to one; otherwise once
  double scale = 1.0, softcap = 0.0, index_scale = 1.0;
  void* losses = nullptr;       // R [B, G, rows]
  void* of_products = nullptr;  // like products, or bfloat16
  void* of_weights = nullptr;   // like weights
  void* of_slopes = nullptr;    // R [B, G, rows]: by the slope
  bool to_bfloat16 = false;     // of_products
};

// T queries of each sequence over a cache of keys. Query t stands at position length - T + t.
struct DecodeParams {
  int64_t batch = 0, heads = 0, kv_heads = 0, queries = 0, head_dim = 0, value_dim = 0;
  int64_t capacity = 0;  // Smax: keys that a sequence has room for; with pages max_pages * page_size
  DType dtype = DType::kFloat32;

  TensorView query;  // [B, H, T, D]
  // [B, Hkv, Smax, D or Dv]. With pages [pages, Hkv, page_size, D or Dv] by their strides: a page is in the place of a sequence.
  TensorView key, value;
  const int32_t* lengths = nullptr;     // [B], taken as within [0, Smax]; null: all are Smax
  bool lengths_are_flags = false;       // a length above 0 stands for Smax
  const int32_t* page_table = nullptr;  // [B, max_pages], table_stride between sequences; null: no pages
  int64_t table_stride = 0, pages = 0, page_size = 0;
  // With lists a query sees what its own shows, up to its position, and is_causal is false. No list has an entry twice.
  IndexLists index;
  int64_t list_heads = 0;       // heads with a list of their own: Hkv, or H
  int64_t places = 0;           // of a list: count << log2_block listed keys, then `local` and `sinks`
  PerHead key_bias;             // [B|1, H|Hkv|1, Smax], float (double for kFloat64); may be null
  const void* sinks = nullptr;  // [H], like key_bias: logits in the denominator alone; may be null

  TensorView out;       // [B, H, T, Dv]
  void* lse = nullptr;  // [B, H, T] contiguous; float, or double for kFloat64
  bool is_causal = true;
  double scale = 1.0, softcap = 0.0;
};

// The slots of a bounded cache, for each key head: sinks, the ring of the local window, selected keys, and the log of what died
// in the last `rewind` steps. All tensors are contiguous. A slot whose position is kNoPosition is empty: zeros, and a score of
// -inf.
struct CacheParams {
  int64_t batch = 0, kv_heads = 0, head_dim = 0, value_dim = 0;
  int32_t sink = 0, local = 0, window = 0, rewind = 0, slots = 0;  // slots = sink + local + window + rewind
  DType dtype = DType::kFloat32;                                   // of keys and values

  void* key = nullptr;          // [B, Hkv, slots, D]
  void* value = nullptr;        // [B, Hkv, slots, Dv]
  void* score = nullptr;        // [B, Hkv, slots], float, or double for kFloat64
  int32_t* position = nullptr;  // [B, Hkv, slots]
  int32_t* entered = nullptr;   // [B, Hkv, rewind]: the slot that a logged step's competitor took, kNoSlot if it took none
  int32_t* steps = nullptr;     // [B, Hkv]: tokens taken so far, the same for all heads of a sequence
  int32_t* kept = nullptr;      // [B, Hkv]: steps that can be taken back

  // The new token, for the op cache_update.
  TensorView new_key, new_value;  // [B, Hkv, 1, D or Dv]
  PerHead new_scores;             // [B, Hkv, 1]; null: 0
  DType scores_dtype = DType::kFloat32;
  const int32_t* lengths = nullptr;  // [B]: a sequence with 0 or less takes nothing; null: all take the token

  const int32_t* count = nullptr;  // [B]: steps to take back, for the op cache_rewind

  // For the op cache_extend: cached keys in the order of their positions, empty slots in front, and then `tokens` new ones.
  int32_t tokens = 0;
  TensorView all_key, all_value;          // [B, Hkv, visible + tokens, D or Dv], visible = sink + local + window
  const void* all_score = nullptr;        // [B, Hkv, visible + tokens] contiguous, like score
  const int32_t* all_position = nullptr;  // [B, Hkv, visible + tokens] contiguous, kNoPosition where there is no key
  const int32_t* all_slot = nullptr;      // [B, Hkv, visible] contiguous: where the cached keys lie
  // [B, Hkv, visible + tokens] contiguous: the index of the first query that does not see the key, at most that behind the last
  // token that is taken.
  const int32_t* all_end = nullptr;
};

// The cached keys of a bounded cache in the order of their positions, empty slots in front, and then `cache.tokens` new ones. Of
// the cache only key, value, score, position, steps, what is new, and its sizes are given; visible <= slots.
struct JoinParams {
  CacheParams cache;
  int32_t visible = 0;
  // Outputs, contiguous; S = visible + tokens.
  void *key = nullptr, *value = nullptr;  // [B, Hkv, S, D or Dv]
  void* score = nullptr;                  // [B, Hkv, S], like the cache's
  int32_t* position = nullptr;            // [B, Hkv, S], kNoPosition where there is no key
  int32_t* slot = nullptr;                // [B, Hkv, visible]
  int32_t* segment_end = nullptr;         // [B, Hkv, S]: the index behind the last token that is taken, 0 where there is no key
};

inline constexpr int32_t kNoPosition = -1;
inline constexpr int32_t kNoSlot = -1;

struct PackParams {
  int64_t batch = 0, heads = 0;  // of the mask: B|1, H|Hkv|1
  int64_t query_length = 0, key_length = 0;
  int64_t block_q = 1, block_k = 1;                          // one mask element covers block_q x block_k (query, key) pairs
  int64_t tile_q = 0, tile_k = 0, tiles_q = 0, tiles_k = 0;  // as in MaskParams
  // [batch, heads, ceil(Sq / block_q), ceil(Sk / block_k)] by the strides below. A byte that is not 0 is visible: a bool tensor
  // that is a view of bytes may hold others than 0 and 1, and torch takes them for true.
  const uint8_t* mask = nullptr;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0, column_stride = 0;
  int32_t* tiles = nullptr;    // [batch, heads, Nq, Nk] contiguous
  int32_t* rows = nullptr;     // [batch, heads, Nq, 1 + Nk] contiguous
  int32_t* columns = nullptr;  // [batch, heads, Nk, 1 + Nq] contiguous
  uint32_t* bits = nullptr;    // [slots, tile_q, tile_k / 32] contiguous
  int64_t slots = 0;
};

#if defined(__CUDACC__)
#define DMATTN_HOST_DEVICE __host__ __device__
#else
#define DMATTN_HOST_DEVICE
#endif

// What a query sees by its list has places: for the listed keys first, then for its last ones, then for the sinks. The entry of a
// place; any number where it has none.
DMATTN_HOST_DEVICE static inline int32_t listed_entry(const IndexLists& lists, const int32_t* list, int32_t place) {
  return place < lists.count << lists.log2_block ? list[place >> lists.log2_block] : 0;
}

// The key in a place, -1 where there is none, or where it has another place. `end` is behind the last key that the query may see.
DMATTN_HOST_DEVICE static inline int32_t listed_key(const IndexLists& lists, int32_t entry, int32_t end, int32_t place) {
  const int32_t listed = static_cast<int32_t>(lists.count << lists.log2_block);
  const int32_t sinks = lists.sinks < end ? lists.sinks : end;
  int32_t key = place - listed - lists.local, first = 0, last = sinks;
  if (place < listed) {
    if (entry < 0 || entry >= end) return -1;  // before it is shifted
    key = (entry << lists.log2_block) + (place & ((1 << lists.log2_block) - 1));
    first = sinks, last = end - lists.local;
  } else if (key < 0) {
    key += end;
    first = sinks, last = end;
  }
  return key >= first && key < last ? key : -1;
}

// The rows of key that an indexer may choose for a query, [first, end) and [later, later_end): those that the query may see and
// that neither its local window nor the sinks show it. A mean of a block competes while one of the block's keys does and the
// query may see all of them.
struct CompetingRows {
  int32_t first, end, later, later_end;
};

DMATTN_HOST_DEVICE static inline CompetingRows competing_rows(const IndexTopKParams& p, int64_t position, int64_t length) {
  const int log2_width = p.is_pooled ? p.log2_block : 0;
  const int64_t seen = p.is_causal && position + 1 < length ? position + 1 : length;
  const int64_t most = (seen > 0 ? seen : 0) >> log2_width, oldest = position - p.local;  // of those outside of the local window
  int64_t first = p.sinks >> log2_width, end = 0, later = 0, later_end = 0;
  if (oldest >= p.sinks) end = (oldest >> log2_width) + 1 < most ? (oldest >> log2_width) + 1 : most;
  if (!p.is_causal) {
    later = position + 1 > 0 ? (position + 1) >> log2_width : 0;
    later = later > first ? later : first;
    later = later > end ? later : end;
    later = later < most ? later : most;  // a query may stand behind the last key
    later_end = most;
  }
  first = first < end ? first : end;
  return {static_cast<int32_t>(first), static_cast<int32_t>(end), static_cast<int32_t>(later), static_cast<int32_t>(later_end)};
}

// Dropout is a counter-based hash of (seed, batch * H + head, query, key), so every backend and both passes draw the same mask.
// Mixing is the 32-bit finaliser of C. Wellons' hash-prospector (two multiplications, bias 0.17). Every number is mixed before it
// is combined with the others, so that no sum or difference of seeds, heads or queries gives the same key again. static: the CPU
// kernels are compiled once per instruction set, and the linker must not merge these functions across them.

// The first step of x ^ y is that of x combined with that of y.
DMATTN_HOST_DEVICE static inline uint32_t mix32_begin(uint32_t x) { return x ^ (x >> 16); }
DMATTN_HOST_DEVICE static inline uint32_t mix32_middle(uint32_t x) {
  x *= 0x7feb352dU;
  return (x ^ (x >> 15)) * 0x846ca68bU;
}
DMATTN_HOST_DEVICE static inline uint32_t mix32(uint32_t x) {
  x = mix32_middle(mix32_begin(x));
  return x ^ (x >> 16);
}

DMATTN_HOST_DEVICE static inline uint32_t dropout_row_key(uint64_t seed, uint32_t batch_head, uint32_t query) {
  const uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
  const uint32_t seed_key = mix32(mix32(low ^ 0x9e3779b9U) ^ high);
  const uint32_t head_key = mix32(seed_key ^ mix32(batch_head + 0x85ebca6bU));
  return mix32(head_key ^ mix32(query + 0xc2b2ae35U));
}

// What a query, and a key, bring to the hash: computed once for each, so that a pair of them costs little.
DMATTN_HOST_DEVICE static inline uint32_t dropout_row_hash(uint32_t row_key) { return mix32_begin(row_key); }
DMATTN_HOST_DEVICE static inline uint32_t dropout_key_hash(uint32_t key_index) { return mix32_begin(key_index * 0x9e3779b9U); }

// Kept when the hash reaches the threshold: dropout_threshold(p) = floor(p * 2^32), saturated. The last step of mix32 changes the
// lower half of a number alone; here, where size decides, it is left out.
DMATTN_HOST_DEVICE static inline bool dropout_keeps_pair(uint32_t row_hash, uint32_t key_hash, uint32_t threshold) {
  return mix32_middle(row_hash ^ key_hash) >= threshold;
}
DMATTN_HOST_DEVICE static inline bool dropout_keeps(uint32_t row_key, uint32_t key_index, uint32_t threshold) {
  return dropout_keeps_pair(dropout_row_hash(row_key), dropout_key_hash(key_index), threshold);
}

DMATTN_HOST_DEVICE static inline uint32_t dropout_threshold(double p) {
  const double t = p * 4294967296.0;
  return t >= 4294967295.0 ? 4294967295U : static_cast<uint32_t>(t);
}

}  // namespace dmattn
