// The signature of every op, and nothing else: kernels register themselves from their own files, fakes and autograd are Python.
//
// Shapes (B batch, H query heads, Hkv key heads, S lengths, D head size, Dv value size):
//   scores [B, Hkv, Sk]              segment_end int32 [B|1, Hkv|1, Sk]     local, sink: numbers of keys beside the window
//   mask   bool [B|1, H|Hkv|1, ceil(Sq/block_q), ceil(Sk/block_k)]
//   tiles  int32 [B|1, H|Hkv|1, Nq, Nk]     rows int32 [.., Nq, 1+Nk]     columns int32 [.., Nk, 1+Nq]
//   bits   int32 [slots, tile_q, tile_k/32]      Nq = Sq / tile_q + 2, Nk = Sk / tile_k + 2 (rounded down)
//   query  [B, H, Sq, D]   key [B, Hkv, Sk, D]   value [B, Hkv, Sk, Dv]   out [B, H, Sq, Dv]   lse [B, H, Sq]
//   start, end int32 [B|1, H|Hkv|1, Sk]     key_bias [B|1, H|Hkv|1, Sk]   bias [B|1, H|Hkv|1, Sq, Sk]
//   indices int32 [B|1, H|Hkv|1, Sq, K]: entry n stands for keys n * index_block, .., n * index_block + index_block - 1
//     index_local, index_sinks: a query sees its last keys and the first ones, too, so many
//     index_offset int32 [1] or [B]: the position of query 0 that index_local counts from; none: Sk - Sq
//   dropout_seed int64, one element
//   lse_rest [B, H, Sq], what rounding left out of lse; [0] where there is no key_bias and no bias
//   hints, which change speed, never results: is_in_order, the keys that a query sees are neighbours, or nearly so, by start and
//   end; most_keys, a query sees at most so many keys, 0 where that is not known
//   forward_plain: select, where there are scores, and forward, with fewer arguments, which torch reads in less time
//   index_top_k: index_query [B, G, Sq, Hi, Di]   index_key [B, G, n, Di], n = Sk, or with is_pooled the means of Sk / block_size
//   whole blocks   weights [B, G, Sq, Hi], slope [G], of the type of lse   start, end int32 [B|1, G|1, n]
//   query_offset, lengths int32 [B]   indices int32, scores [B, G, Sq, min(k, blocks)]; scores [0] without with_scores
//   index_loss: R queries with their h heads of a group; logits [B, G, h, R, M], products [B, G, Hi, R, N], before their scales
//   weights [B, G, R, Hi], slope [G], key_bias [B|1, G|1, h|1, Sk], lse [B, G, h, R]   positions int64 [R]
//   lists int32 [B|1, G|1, R, n]: blocks, each once, M = n * block_size; none: M = Sk   N = M, or with is_pooled n
//   start, end int32 [B|1, G|1, Sk]   losses, of_slopes [B, G, R], of_products and of_weights like what they are of
//   decode: query [B, H, T, D]   key, value [B, Hkv, Smax, D or Dv], with page_table [pages, page_size, Hkv, D or Dv]
//   lengths int32 [B]   page_table int32 [B, max_pages]   key_bias [B|1, H|Hkv|1, Smax]   sinks [H]
//   indices int32 [B|1, H|Hkv|1, T, K], no list has an entry twice; queries then see no key behind their position
//   cache_update, cache_step, cache_join, cache_extend, cache_rewind: a bounded cache (docs/serving.md), N = sink + local +
//   window + rewind slots
//     key_cache [B, Hkv, N, D]   value_cache [B, Hkv, N, Dv]   score_cache [B, Hkv, N]   position int32 [B, Hkv, N]
//     entered int32 [B, Hkv, rewind]   steps, kept int32 [B, Hkv]
//     key [B, Hkv, 1, D]   value [B, Hkv, 1, Dv]   scores [B, Hkv, 1]   lengths, count int32 [B]
//     cache_step is cache_update and then decode over the visible slots, with their scores for key_bias: query [B, H, 1, D]
//     cache_extend: visible = sink + local + window cached keys in the order of their positions, empty slots in front, and then
//     T new ones: key [B, Hkv, visible + T, D], value likewise, scores and int32 key_position, end [B, Hkv, visible + T]
//     slot int32 [B, Hkv, visible]: where the cached keys lie
//     cache_join gives these, from N >= visible slots and T new tokens, and int32 segment_end [B, Hkv, visible + T] for select
//   reduce_sum, reduce_max: input of any shape and strides; dim None: over all dimensions
// Ops are positional and take no list: see docs/semantics.md for what each argument means. They are functional but for four of
// the bounded cache, which declare what they write.
#include "library.h"

// A fragment, because a second copy of this library must not claim the namespace again.
DMATTN_OPS(m) {
  m.def(
      "select(Tensor scores, Tensor? segment_end, SymInt window, bool is_causal, SymInt local=0, SymInt sink=0) "
      "-> Tensor");

  m.def(
      "pack_tiles(Tensor mask, SymInt query_length, SymInt key_length, SymInt block_q, SymInt block_k, "
      "int tile_q, int tile_k) -> (Tensor tiles, Tensor rows, Tensor columns)");

  m.def(
      "pack_bits(Tensor mask, Tensor tiles, SymInt query_length, SymInt key_length, SymInt block_q, SymInt block_k, "
      "int tile_q, int tile_k, SymInt slots) -> Tensor");

  m.def(
      "forward(Tensor query, Tensor key, Tensor value, Tensor? start, Tensor? end, "
      "Tensor? tiles, Tensor? rows, Tensor? columns, Tensor? bits, Tensor? indices, Tensor? index_offset, "
      "Tensor? key_bias, Tensor? bias, Tensor? dropout_seed, "
      "bool is_causal, float scale, float softcap, float dropout_p, bool deterministic, bool is_in_order=False, "
      "SymInt most_keys=0, int index_block=1, SymInt index_local=0, SymInt index_sinks=0) "
      "-> (Tensor out, Tensor lse, Tensor lse_rest)");

  m.def(
      "forward_plain(Tensor query, Tensor key, Tensor value, Tensor? scores, Tensor? key_bias, SymInt window, bool is_causal, "
      "SymInt local, SymInt sink, float scale, float softcap) -> (Tensor out, Tensor lse)");

  m.def(
      "backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
      "Tensor? start, Tensor? end, Tensor? tiles, Tensor? rows, Tensor? columns, Tensor? bits, Tensor? indices, "
      "Tensor? index_offset, Tensor? key_bias, Tensor? bias, Tensor? dropout_seed, "
      "bool is_causal, float scale, float softcap, float dropout_p, bool deterministic, "
      "bool need_key_bias, bool need_bias, Tensor? lse_rest=None, bool is_in_order=False, SymInt most_keys=0, "
      "int index_block=1, SymInt index_local=0, SymInt index_sinks=0) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_key_bias, Tensor grad_bias)");

  m.def(
      "index_top_k(Tensor index_query, Tensor index_key, Tensor weights, Tensor? slope, Tensor? start, Tensor? end, "
      "Tensor? query_offset, Tensor? lengths, SymInt key_length, SymInt k, int block_size, bool is_pooled, bool is_causal, "
      "SymInt local, SymInt sink, float scale, bool with_scores) -> (Tensor indices, Tensor scores)");

  m.def(
      "index_loss(Tensor logits, Tensor products, Tensor weights, Tensor? slope, Tensor? key_bias, Tensor? lse, "
      "Tensor positions, Tensor? lists, Tensor? start, Tensor? end, SymInt key_length, int block_size, bool is_pooled, "
      "bool is_causal, SymInt local, SymInt sink, float scale, float softcap, float index_scale, bool sharp, bool to_bfloat16) "
      "-> (Tensor losses, Tensor of_products, Tensor of_weights, Tensor of_slopes)");

  m.def(
      "decode(Tensor query, Tensor key, Tensor value, Tensor? lengths, Tensor? page_table, Tensor? key_bias, Tensor? sinks, "
      "Tensor? indices, bool is_causal, float scale, float softcap, int index_block, SymInt index_local, SymInt index_sinks) "
      "-> (Tensor out, Tensor lse)");

  m.def(
      "cache_update(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!) score_cache, Tensor(d!) position, "
      "Tensor(e!) entered, Tensor(f!) steps, Tensor(g!) kept, "
      "Tensor key, Tensor value, Tensor? scores, Tensor? lengths, SymInt window, SymInt local, SymInt sink) -> ()");

  m.def(
      "cache_step(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!) score_cache, Tensor(d!) position, "
      "Tensor(e!) entered, Tensor(f!) steps, Tensor(g!) kept, "
      "Tensor query, Tensor key, Tensor value, Tensor? scores, Tensor? lengths, SymInt window, SymInt local, SymInt sink, "
      "float scale, float softcap) -> (Tensor out, Tensor lse)");

  m.def(
      "cache_join(Tensor key_cache, Tensor value_cache, Tensor score_cache, Tensor position, Tensor steps, "
      "Tensor key, Tensor value, Tensor? scores, Tensor? lengths, SymInt visible) "
      "-> (Tensor all_key, Tensor all_value, Tensor all_scores, Tensor key_position, Tensor slot, Tensor segment_end)");

  m.def(
      "cache_extend(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!) score_cache, Tensor(d!) position, "
      "Tensor(e!) entered, Tensor(f!) steps, Tensor(g!) kept, "
      "Tensor key, Tensor value, Tensor scores, Tensor key_position, Tensor slot, Tensor end, Tensor? lengths, "
      "SymInt window, SymInt local, SymInt sink) -> ()");

  m.def(
      "cache_rewind(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!) score_cache, Tensor(d!) position, "
      "Tensor(e!) entered, Tensor(f!) steps, Tensor(g!) kept, "
      "Tensor count, SymInt window, SymInt local, SymInt sink) -> ()");

  m.def("reduce_sum(Tensor input, int? dim=None, bool keepdim=False) -> Tensor");

  m.def("reduce_max(Tensor input, int? dim=None, bool keepdim=False) -> Tensor");
}
