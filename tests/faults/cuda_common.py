# ruff: noqa: E501  (one edit a line, however long)
"""Faults in what both families of CUDA kernels share: live keys, sums of gradients, packing, selection, visibility."""

from __future__ import annotations

from faults import Fault


def in_file(name: str, old: str, new: str, wrong: str, tests: str, objects: str = "", *, size: int = 64) -> Fault:
    return Fault("cuda_common", f"cpp/cuda/{name}", old, new, wrong, tests, objects, size=size)


CACHE, REDUCE = "test_cache.py::", "test_reduce.py::"
SHORT = "test_cuda_short.py::"
FORWARD, BACKWARD, LIVE_KEYS, CUDA_TILES, MASKS, SELECT = (
    "test_forward.py::",
    "test_backward.py::",
    "test_cuda_live_keys.py::",
    "test_cuda_tiles.py::",
    "test_masks.py::",
    "test_select.py::",
)
THRESHOLDS, ALONE = BACKWARD + "test_lengths_around_every_threshold", BACKWARD + "test_each_query_sees_one_key_alone"
LISTS, COMPACT = LIVE_KEYS + "test_lists_of_long_problems", LIVE_KEYS + "test_one_list_of_keys_for_all_queries"
RANGES = "test_in_order.py::test_it_changes_no_result"
EVERYTHING = "sm80_forward sm80_query_major sm90_forward sm90_backward"

FAULTS = [
    # A bounded cache.
    in_file("common/cache.cu", "slot < first_log_slot(p); slot += kUpdateThreads", "slot < first_log_slot(p) - 1; slot += kUpdateThreads",
            "the last selected key never dies where an update has a kernel of its own", CACHE + "test_a_step_is_an_update_and_the_attention_over_all_slots"),
    in_file("common/cache.cu", "link < 0 ? chunk.slot[victims[e]] : chunk.entered[link]", "chunk.slot[victims[e]]",
            "chains of slots end where a block's tokens do", CACHE + "test_the_gpu_keeps_what_the_cpu_keeps"),
    in_file("common/cache.cu", "((at == own) & (base + other < row))", "((at == own) & (base + other <= row))",
            "every cached key stands one place too far", CACHE + "test_steps_and_chunks_are_the_whole_history"),
    in_file("common/cache.cu", "is_done = !__syncthreads_or(moves);", "is_done = __syncthreads_or(moves) >= 0;",
            "chains of slots are followed for two steps", CACHE + "test_steps_and_chunks_are_the_whole_history"),
    in_file("common/cache.cu", "int empty = next_empty + sums.x;", "int empty = next_empty;",
            "threads take the same empty slots", CACHE + "test_steps_and_chunks_are_the_whole_history"),
    in_file("common/cache.cu", "const bool is_known = count > 0 && count <= kept;", "const bool is_known = count > 0;",
            "more is taken back than was kept", CACHE + "test_more_than_is_kept_is_refused_or_empties"),
    # Live keys.
    in_file("common/live_keys.cu", "(from > 0 ? ended[from - 1] : 0)", "(from > 0 ? ended[from] : 0)",
            "a segment's list is shorter than its keys", THRESHOLDS + " " + LISTS),
    in_file("common/live_keys.cu", "segment_of(min(span.last - 1 - mask_head.low, mask_head.queries - 1)", "segment_of(min(span.last - mask_head.low, mask_head.queries - 1)",
            "a key that ends where a segment begins is counted in that segment, whose list is then longer than what is written", ALONE + " " + LISTS),
    in_file("common/live_keys.cu", "+ sum_before(length, false) : 0;", "+ sum_before(length, true) : 0;",
            "a segment's list is written behind its place", THRESHOLDS + " " + ALONE),
    in_file("common/live_keys.cu", "lane < warp ? of_warp : 0", "lane <= warp ? of_warp : 0",
            "warps write their keys one warp's keys too far", THRESHOLDS),
    in_file("common/live_keys.cu", "group.y > 0 && Span{group.z, group.w}.touches(low, high)", "group.y > 0 && Span{group.z, group.w}.touches(low, high - 1)",
            "a group of keys that only a segment's last query sees is left out", LISTS + " " + LIVE_KEYS + "test_lists_of_many_heads " + LIVE_KEYS + "test_keys_that_the_last_query_of_a_segment_sees"),
    in_file("common/live_keys.cu", "from = min(from, span.first), to = max(to, span.last);", "from = min(from, span.first), to = max(from, span.last);",
            "a group's last position is that of its last key", LISTS),
    in_file("common/live_keys.cu", "    before += seen.all;\n    __syncthreads();", "    __syncthreads();",
            "the live keys of a part are written over those of the part before", LIVE_KEYS + "test_lists_of_many_heads " + LIVE_KEYS + "test_more_than_a_thousand_lists"),
    in_file("common/live_keys.cu", "front += all & 0xffff, back -= all >> 16;", "back -= all >> 16;",
            "later groups of a list are written over the first", LISTS),
    # Ranges of keys in order.
    in_file("common/key_ranges.cu", "spans[i] = source.of_key(first_key + i * 32 + lane);", "spans[i] = source.of_key(first_key + lane * kPerLane + i);",
            "keys of a warp stand at the places of others", RANGES),
    in_file("common/key_ranges.cu", "number * queries < end_query; ++number", "(number + 1) * queries <= end_query; ++number",
            "keys that end within a range of queries are not in it", RANGES),
    in_file("common/key_ranges.cu", "first = min(first, i * 32", "first = max(0, i * 32",
            "the first key of a range is one of a warp's last keys", RANGES),
    in_file("common/key_ranges.cu", "last = i * 32 + 31 - __clz", "last = 31 - __clz",
            "the last key of a range is one of a warp's first keys", RANGES),
    in_file("common/key_ranges.cu", "lane == 0 ? key_length - (first_key + first) : first_key + last + 1;", "lane == 0 ? key_length - (first_key + first) : first_key + last;",
            "the last key of a range is left out", RANGES),
    in_file("common/key_ranges.cu", "const SpanSource source(p.mask, key_length, mask_head / heads, head);", "const SpanSource source(p.mask, key_length, 0, head);",
            "every sequence has the ranges of the first", RANGES),
    in_file("common/key_ranges.cu", "mask_head % heads * static_cast<int>(live_keys.head_divisor);", "mask_head % heads;",
            "ranges are those of the first group's heads", RANGES, size=128),
    in_file("common/key_ranges.cu", "__reduce_max_sync(0xffffffffu, high) - shift,", "__reduce_max_sync(0xffffffffu, high) - abs(shift),",
            "ranges of queries that stand before the first key end early", RANGES, size=128),
    # Compact keys.
    in_file("common/compact_keys.cu", "call.compact.key_bias[to] = bias[key];", "call.compact.key_bias[to] = bias[at];",
            "compact keys have the key_bias of others", COMPACT),
    in_file("common/compact_keys.cu", "(batch * tensor.batch_stride + kv_head * tensor.head_stride) * 2 + piece * 16", "(batch * tensor.batch_stride + head * tensor.head_stride) * 2 + piece * 16",
            "rows are copied from the key head that has the query head's number", COMPACT),
    in_file("common/compact_keys.cuh", "call.live_keys.count[mask_head] <= call.compact.capacity", "call.live_keys.count[mask_head] <= 4 * call.compact.capacity",
            "more keys are copied than there is room", COMPACT, "compact_keys.cu sm90_forward*kGathered"),
    # Rows of gradients.
    in_file("common/gradient_sums.cu", "is_empty ? sum : sum - grad_lse", "is_empty ? sum : sum",
            "delta lacks the gradient of lse", BACKWARD + "test_ragged_lengths"),
    in_file("common/gradient_sums.cu", "query = share.row % call.padded_queries,", "query = share.row % p.query_length,",
            "terms of padded rows are those of others", BACKWARD + "test_ragged_lengths"),
    in_file("common/gradient_sums.cu", "sums + sum_width(p.head_dim), call.keep_scale);", "sums + sum_width(p.head_dim), call.scale);",
            "grad_value is scaled", THRESHOLDS),
    in_file("common/gradient_sums.cu", "for (int i = lane * 4; i < width; i += lanes * 4)", "for (int i = lane * 4; i < width; i += lanes * 8)",
            "sums are added to what the memory held", BACKWARD + "test_gathered_keys_of_other_widths"),
    in_file("common/gradient_sums.cu", "batch * tensor.batch_stride + head * tensor.head_stride +\n                      query", "batch * tensor.batch_stride + head * tensor.row_stride * p.query_length +\n                      query",
            "delta reads out and grad_out as if heads were packed", BACKWARD + "test_strides_of_incoming_gradients " + FORWARD + "test_strides"),
    in_file("common/gradient_sums.cu", "if (call.lse2[row] == -negative_infinity()) {", "if (call.lse2[row] == negative_infinity()) {",
            "grad_query of a row that sees nothing is NaN beside a bad key", BACKWARD + "test_rows_that_see_nothing_beside_a_bad_key"),
    in_file("common/gradient_sums.cu", "row * tile_q + r + shift + 1 - first_key", "row * tile_q + r + shift - first_key",
            "a key that only its own query sees counts as seen by none", ALONE),
    # Visibility, logits, sums.
    in_file("common/visibility.cuh", "return first <= high && low < last && first < last;", "return first < high && low < last && first < last;",
            "keys that only the last query of a tile sees are skipped", ALONE + " " + THRESHOLDS, EVERYTHING),
    in_file("common/visibility.cuh", "return first <= low && high < last;", "return first <= low && high <= last;",
            "a key that ends at a tile's last query is seen by it", THRESHOLDS + " " + ALONE, EVERYTHING),
    in_file("common/visibility.cuh", "first = max(first, is_causal ? key : kFirstPosition);", "first = max(first, is_causal ? key + 1 : kFirstPosition);",
            "causality hides a query's own key where there are intervals", ALONE, EVERYTHING + " live_keys.cu"),
    in_file("common/visibility.cuh", "(head / static_cast<int>(tensor.head_divisor)) * tensor.head_stride", "(head % static_cast<int>(tensor.head_divisor)) * tensor.head_stride",
            "masks and biases are read with the wrong head of the group", THRESHOLDS, EVERYTHING + " live_keys.cu gradient_sums.cu"),
    in_file("common/logits.cuh", "return 1.0f - t * t;", "return 1.0f - t * t * 0.5f;",
            "softcap's slope is wrong", BACKWARD + "test_softcap_and_dropout", "sm80_query_major sm80_key_major sm90_backward"),
    in_file("common/logits.cuh", "batch_head(static_cast<uint32_t>(batch * p.heads + head))", "batch_head(static_cast<uint32_t>(batch + head))",
            "batches drop what other heads drop", FORWARD + "test_dropout_is_a_function_of_the_seed", "sm80_forward sm90_forward"),
    in_file("common/logits.cuh", "query * bias_row_stride + key;", "static_cast<int64_t>(query) * key_length + key;",
            "a bias is read as if its rows were packed", BACKWARD + "test_biases_that_are_parts_of_wider_ones", EVERYTHING),
    in_file("common/softmax.cuh", "return x + __shfl_xor_sync(0xffffffffu, x, 2);", "return x;",
            "half of a row's sum is forgotten", FORWARD + "test_ragged_lengths", "sm80_forward sm90_forward"),
    # Selection.
    in_file("common/select/select.cu", "max(0, ordinals[index - base] - room)", "max(0, ordinals[index - base] - room - 1)",
            "a key dies a step before it has come", SELECT + "test_op_equals_brute_force_in_every_dtype " + SELECT + "test_scores_of_16_bits_are_selected_as_in_float32"),
    in_file("common/select/select.cu", "rank < work.window;", "rank <= work.window;",
            "one key too many lives where one set serves a document", SELECT + "test_top_k_equals_brute_force"),
    in_file("common/select/select.cu", "if (chunk_of(word) > death) continue;", "if (chunk_of(word) >= death) continue;",
            "keys that die in the chunk they come in are forgotten", SELECT + "test_op_equals_brute_force_in_every_dtype"),
    in_file("common/select/select.cu", "same_group ? later_by_local(p, head, index, cause, work.length) : lasting_end(head, index, work.length);", "later_by_local(p, head, index, cause, work.length);",
            "a key is dropped for one of the next document", SELECT + "test_documents_of_all_lengths"),
    in_file("common/select/select.cu", "same_group ? later_by_local(p, head, index, cause, work.length) :", "same_group ? cause :",
            "a key that loses its place leaves the local window at once", SELECT + "test_a_local_window_delays_and_sinks_do_not_compete"),
    in_file("common/select/select.cu", "work.window > 0 && code_of(", "code_of(",
            "a window of 0 keeps all keys", SELECT + "test_a_window_of_0_streams"),
    in_file("common/select/short.cuh", "max(0, index + 1 - window)", "max(0, index - window)",
            "a key of a short sequence dies a step before it has come", SHORT + "test_short_selection_is_the_same_as_on_a_cpu", "select.cu"),
    in_file("common/select/short.cuh", "rank -= shared.sort.codes[index_of_place(shared.sort.exchange[other])] > code;", "",
            "keys that are alike in the bits sorted by first share a rank", SHORT + "test_short_selection_is_the_same_as_on_a_cpu", "select.cu"),
    in_file("common/one_list.cu", "if (at >= count) break;", "if (at >= count - 1) break;",
            "the last key of the one list is left out", SHORT + "test_gradients_of_one_list", "one_list.cu"),
    in_file("common/select/keys.cuh", "min(cause + p.local, segment_end_of(head.segments, index, length))", "cause + p.local",
            "the local window reaches into the next document", SELECT + "test_local_window_and_sinks_end_with_their_document"),
    in_file("common/select/keys.cuh", "return index - (head.groups ? head.groups[index] : 0) <", "return index <",
            "only the first document has sinks", SELECT + "test_sinks_are_the_first_keys_of_a_document_that_are_there"),
    in_file("common/select/keys.cuh", "<= index || is_sink(p, head, index)) return 0;", "<= index) return 0;",
            "sinks of float64 scores and in documents compete for places of the window", SELECT + "test_local_window_and_sinks_end_with_their_document " + SELECT + "test_a_local_window_delays_and_sinks_do_not_compete"),
    in_file("common/select/sort.cuh", "offset >= 0 && first + offset >= p.sink ?", "offset >= 0 ?",
            "sinks compete for places of the window", SELECT + "test_a_local_window_delays_and_sinks_do_not_compete"),
    in_file("common/select/short.cuh", "codes[i] = index < length && index >= p.sink ? ~codes[i] : kAll;", "codes[i] = index < length ? ~codes[i] : kAll;",
            "sinks of a short sequence compete for places of the window", SELECT + "test_sinks_take_no_place_of_the_window", "select.cu"),
    # Packing.
    in_file("common/pack.cu", "static_cast<uint32_t>(4 * w + i < limit ? from[4 * w + i] : beyond)", "static_cast<uint32_t>(4 * w + i <= limit ? from[4 * w + i] : beyond)",
            "the element behind a row counts", MASKS + "test_from_bool_there_and_back"),
    in_file("common/pack.cu", "partial_counts[row] = before + items[i];", "partial_counts[row] = items[i];",
            "slots begin again after 4,096 rows of tiles", CUDA_TILES + "test_slots_of_many_rows_of_tiles"),
    in_file("common/pack.cu", "tiles[k] = kTilePartial + slot + __popc(", "tiles[k] = kTilePartial + slot + 1 + __popc(",
            "slots are numbered from one", MASKS + "test_from_bool_there_and_back"),
    in_file("common/pack.cu", "if (query >= place.query_end || key >= place.key_end) return 0;", "if (query > place.query_end || key > place.key_end) return 0;",
            "bits beyond a tile's end are read from the mask's next row", MASKS + "test_packing_ops_in_every_tile_shape " + MASKS + "test_bits_beyond_the_lengths_are_zero_in_parts_of_a_wider_mask"),
    # Reductions.
    in_file('common/reduce.cu', 'if (first + e < n) lane', 'if (first + e <= n) lane',
            'the element behind a sequence is added', REDUCE + 'test_dimensions_and_layouts'),
    in_file('common/reduce.cu', 'while (rows < 32 && rows * kOwned < p.count) rows *= 2;', 'while (rows < 16 && rows * kOwned < p.count) rows *= 2;',
            "half of the columns' lanes have no thread", REDUCE + 'test_many_neighbouring_sequences'),
    in_file('common/reduce.cu', 'value = join_warp<typename K::Join>(of_warps[thread % 32]);', 'value = of_warps[thread % 32];',
            "of long sequences the first warp's part alone is stored", REDUCE + 'test_the_order_of_more_chunks_than_lanes'),
    in_file("common/reduce.cu", "of_column[threadIdx.x + away * columns]);", "of_column[threadIdx.x]);",
            "rows of threads are joined with themselves", REDUCE + "test_many_neighbouring_sequences"),
]  # fmt: skip
