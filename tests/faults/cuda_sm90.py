# ruff: noqa: E501  (one edit a line, however long)
"""Faults in Hopper's own kernels."""

from __future__ import annotations

from faults import Fault


def in_file(
    name: str, old: str, new: str, wrong: str, tests: str = "", objects: str = "", *, harmless: str = "", size: int = 64
) -> Fault:
    return Fault("cuda_sm90", f"cpp/cuda/sm90/{name}", old, new, wrong, tests, objects, harmless=harmless, size=size)


FORWARD, BACKWARD = "test_forward.py::", "test_backward.py::"
LIVE_KEYS, CUDA_TILES = "test_cuda_live_keys.py::", "test_cuda_tiles.py::"
THRESHOLDS, ALONE = BACKWARD + "test_lengths_around_every_threshold", BACKWARD + "test_each_query_sees_one_key_alone"
GRADIENTS = "test_cuda_gradients.py::"
RAGGED, LISTS = BACKWARD + "test_ragged_lengths", LIVE_KEYS + "test_lists_of_long_problems"
WIDE, WIDE_OPTIONS = BACKWARD + "test_wide_heads", BACKWARD + "test_options_of_wide_heads"
ALL_KEYS = "test_key_ways.py::test_keys_that_are_never_selected_may_hold_anything"
TILES = BACKWARD + "test_tiles_larger_than_the_kernels_own"
COPIED, BIASED = BACKWARD + "test_biases_that_are_copied_tile_by_tile", "sm90_forward*kDenseBias"
RANGES, RANGED = "test_in_order.py::test_it_changes_no_result", "sm90_forward*kPlain sm90_forward*kRange"
ALL, GATHERED, GENERAL, IN_ORDER = (
    "sm90_forward",
    "sm90_forward*kGathered",
    "sm90_forward*kGeneral",
    "sm90_forward*kDense sm90_forward*kPlain",
)

FAULTS = [
    # Notes.
    in_file("note.cuh", "static_cast<uint32_t>(position - first) < length;", "static_cast<uint32_t>(position - first) <= length;",
            "a key is seen by the query it ends at", ALONE + " " + THRESHOLDS, ALL + " sm90_backward"),
    in_file("note.cuh", "return row % 8 * (kKeys / 8) + row / 8;", "return row % 8 * (kKeys / 8) + row / 8 % 4;",
            "keys of a chunk's rows are written over each other", THRESHOLDS + " " + ALONE, ALL + " sm90_backward"),
    # Which keys a tile meets.
    in_file("walk.cuh", "int end = (limits.limit + kWhole - 1) / kWhole * kWhole; end > 0;", "int end = (limits.limit - p.mask.is_causal + kWhole - 1) / kWhole * kWhole; end > 0;",
            "the last key of a causal tile is left out", FORWARD + "test_ragged_lengths", IN_ORDER),
    in_file("walk.cuh", "accept(kInOrder | (end > limits.whole_limit || base < 0 ? kLimit : 0));", "accept(kInOrder | (end > limits.whole_limit ? kLimit : 0));",
            "zeros in front of the first key count as keys", FORWARD + "test_ragged_lengths", IN_ORDER),
    in_file("walk.cuh", "note.index[index_place<kKeys>(thread_)] = touches ? base + thread_ : -1;", "note.index[index_place<kKeys>(thread_)] = base + thread_;",
            "keys that no query sees are loaded, NaN and all", FORWARD + "test_what_nobody_sees_has_no_effect " + BACKWARD + "test_bad_keys_behind_a_block_mask", ALL),
    in_file("walk.cuh", "Seen::of(is_new ? span : Span::empty());", "Seen::of(span);",
            "keys that two chunks of a range have count twice", RANGES, RANGED),
    in_file("walk.cuh", "note.index[Note::key_place(row)] = is_seen ? key : -1;", "note.index[Note::key_place(row)] = min(max(key, 0), key_length - 1);",
            "keys of a range that no query of the tile sees are loaded", RANGES, RANGED),
    in_file("forward_load.cuh", "if (has_bit(bits, row)) store_zeros_16(", "if (row < 0) store_zeros_16(",
            "keys in order that no query of a tile sees stay what they are, NaN and all", ALL_KEYS, "sm90_forward*kKeyBias"),
    in_file("walk.cuh", "(min(span[i].last - low_, work_.queries) << shift) / 16;", "(work_.queries << shift) / 16;",
            "keys in order that the last queries of a tile do not see are not tested", "test_key_ways.py::test_every_window_gives_what_the_reference_gives test_most_keys.py::test_a_wrong_number_changes_no_result", "sm90_forward*kKeyBias"),
    in_file("walk.cuh", "if (!is_seen) note.index[index_place<kKeys>(thread_)] = -1;", "",
            "keys that bits hide from all are loaded, NaN and all", FORWARD + "test_what_nobody_sees_has_no_effect " + BACKWARD + "test_bad_keys_behind_a_block_mask", ALL),
    in_file("walk.cuh", "bits += first_query_ % tile_q * (tile_k / 32);", "bits += 0 * (tile_k / 32);",
            "tiles of 256 queries use the bits of their first rows again", TILES, ALL),
    in_file("walk.cuh", "base < min(first + tile_k, limits.limit); base += kKeys", "base + kKeys <= min(first + tile_k, limits.limit); base += kKeys",
            "the last partial chunk of a mask's tile is dropped", TILES + " " + FORWARD + "test_each_mask_with_everything_else_plain", ALL),
    in_file("walk.cuh", "min(range.y, limits.limit)", "min(range.y, limits.limit) - 1",
            "the last key of a tile's range is left out", RANGES, RANGED),
    in_file("walk.cuh", "key_length - range.x", "key_length - range.x + kKeys",
            "the first keys of a tile's range are left out", RANGES, RANGED),
    in_file("walk.cuh", "live_keys.range_count + first_query_ / kRows", "live_keys.range_count",
            "every tile takes the range of the first queries", RANGES, RANGED),
    in_file("walk.cuh", "live_keys.mask_head_of(batch_, head_) * live_keys.range_count", "live_keys.mask_head_of(0, head_) * live_keys.range_count",
            "tiles of every sequence take the ranges of the first", RANGES, RANGED),
    in_file("walk.cuh", "partial_head_ += from_partial, partial_count_ -= from_partial;", "partial_count_ -= from_partial;",
            "keys that some see come twice", THRESHOLDS + " " + LISTS, GATHERED),
    in_file("walk.cuh", "whole_head_ += kKeys, whole_count_ -= kKeys;", "whole_head_ += kKeys - 1, whole_count_ -= kKeys;",
            "a key that all see comes twice, and another never", LISTS + " " + BACKWARD + "test_lists_that_all_queries_see", GATHERED),
    in_file("walk.cuh", "const bool is_run = last - first == kKeys - 1;", "const bool is_run = last - first <= kKeys;",
            "keys with a gap count as a run", BACKWARD + "test_lists_that_all_queries_see", GATHERED),
    in_file("walk.cuh", "int whole_place = whole_head_ + whole_count_ + (place & 0xffff);", "int whole_place = whole_head_ + (place & 0xffff);",
            "keys are put over those still in the ring", BACKWARD + "test_lists_that_all_queries_see " + LISTS, GATHERED),
    in_file("walk.cuh", "mask_head = live_keys.mask_head_of(batch_, head_);", "mask_head = batch_ * live_keys.batch_stride + head_ % static_cast<int>(live_keys.heads);",
            "a head walks the list of another one", THRESHOLDS, ALL),
    in_file("walk.cuh", "to_warp = last / 16;", "to_warp = (last + 15) / 16;",
            "a warp with one row that does not see a key is not tested", THRESHOLDS + " " + ALONE, GATHERED),
    in_file("walk.cuh", "static_cast<uint16_t>(rows >> 16);", "static_cast<uint16_t>(rows);",
            "every second warp tests as the one before", THRESHOLDS + " " + ALONE, GATHERED),
    in_file("walk.cuh", "from_partial <= kFewRows && from_whole > 0", "from_partial <= 2 * kFewRows && from_whole > 0",
            "only the first 32 of 64 keys that some see are tested", BACKWARD + "test_some_keys_beside_those_that_all_see", GATHERED),
    # Loading.
    in_file("forward_load.cuh", "query_full.at(tiles), panel * 64, 0, first_query, head >> work.log2_heads_per_tile, tile_batch);", "query_full.at(tiles), panel * 64, 0, first_query, head, tile_batch);",
            "queries of a pack are those of a later one", FORWARD + "test_grouped_heads " + THRESHOLDS, ALL),
    in_file("forward_load.cuh", "batch = note.batch, kv_head = note.head / group;", "batch = note.batch, kv_head = note.head % static_cast<int>(p.kv_heads);",
            "query heads are dealt to key heads in turn", FORWARD + "test_grouped_heads", ALL),
    in_file("forward_load.cuh", "      copy_async_wait<0>();\n    }\n    fence_async();", "    }\n    fence_async();",
            "gathered rows are announced before they have landed", THRESHOLDS + " " + LISTS, ALL),
    in_file("forward_load.cuh", "in_order ? note.first_key + at : note.index[index_place<kShape.keys>(at)];", "in_order ? note.first_key + at : note.index[at % kShape.keys];",
            "gathered keys have the key_bias of their neighbours", THRESHOLDS, GATHERED),
    in_file("forward_load.cuh", "        query_empty.wait_empty(tiles);\n", "",
            "queries are overwritten while they are used", CUDA_TILES + "test_block_masks_with_more_tiles_than_blocks " + LIVE_KEYS + "test_edges_of_tiles_and_segments " + CUDA_TILES + "test_more_tiles_than_blocks", ALL),
    # Computing.
    in_file("forward.cuh", "const uint32_t bits = note.bits[queries[r]][w] >> column;", "const uint32_t bits = note.bits[queries[0]][w] >> column;",
            "rows 8 further down have the bits of the first", TILES, ALL),
    in_file("forward.cuh", "return flags & kInOrder ? note.first_key + column + 8 * i + e :", "return flags & kInOrder ? note.first_key + column + 8 * i :",
            "dropout and bias of odd keys are those of even ones", BACKWARD + "test_softcap_and_dropout " + FORWARD + "test_drawn_cases", GENERAL),
    in_file("forward.cuh", "e % 2 == 0 ? hashes.x : hashes.y, threshold)", "hashes.x, threshold)",
            "dropout of odd keys is that of even ones, dense and gathered", FORWARD + "test_dropout_is_a_function_of_the_seed", ALL),
    in_file("forward.cuh", "if (is_biased && !(flags & kHuge)) {", "if (false) {",
            "key_bias is left out where there is a softcap", BACKWARD + "test_options_beside_every_mask", GATHERED + "Options"),
    in_file("walk.cuh", "for (int row = thread_; row < kKeys; row += kThreads) note_hash(note, row, first_key + row);", "if (thread_ < kKeys) note_hash(note, thread_, first_key + thread_);",
            "the last keys of a chunk have the hashes of an earlier one",
            harmless="Keys in order have hashes in kDenseOptions and kDenseBias alone, where a chunk has as many keys as threads walk, or fewer: the loop runs once."),
    in_file("walk.cuh", "note_hash(note, row, first_key + row);", "note_hash(note, row, row);",
            "chunks of keys in order have the hashes of the first one", BACKWARD + "test_options_beside_every_mask", "sm90_forward*kDenseOptions"),
    in_file("forward.cuh", "dropout.row_key(tile.first_query + work.query_of_row(row + 8 * r))", "dropout.row_key(tile.first_query + row + 8 * r)",
            "dropout draws by row instead of by query where heads share a tile", BACKWARD + "test_softcap_and_dropout", "sm90_forward*kDenseOptions"),
    in_file("forward.cuh", "row_at<const float>(p, work, tile, row), row_at<const float>(p, work, tile, row + 8)", "row_at<const float>(p, work, tile, row), row_at<const float>(p, work, tile, row)",
            "rows 8 further down have the bias of the first", BACKWARD + "test_biases_that_are_parts_of_wider_ones", GENERAL),
    in_file("forward.cuh", "(piece ^ (i % 4 * 16))", "(piece ^ (i % 4 * 8))",
            "keys have the bias of others", COPIED, BIASED),
    in_file("forward.cuh", "((lane / 16) ^ (lane % 8 / 2)) * 16;", "((lane / 16) ^ (lane % 4)) * 16;",
            "a bias is read with another swizzle than it was copied with", COPIED, BIASED),
    in_file("forward_load.cuh", "bias_head = p.bias.head_stride != 0 ? note.head / static_cast<int>(p.bias.head_divisor) : 0;", "bias_head = p.bias.head_stride != 0 ? note.head : 0;",
            "heads of a group have the bias of later groups", COPIED, BIASED),
    in_file("forward_load.cuh", "bias_full.at(n), first_key + column, bias_query,", "bias_full.at(n), first_key, bias_query,",
            "all keys of a chunk have the bias of its first 32", COPIED, BIASED),
    in_file("dispatch.cu", "Variant::kPlain && p.bias_dtype == p.dtype &&", "Variant::kPlain &&",
            "a bias in float32 is copied as one of 16 bits", COPIED, "sm90/dispatch.cu"),
    in_file("dispatch.cu", "ends_at_pieces &&", "true &&",
            "keys that a tile does not see come beside a bias", FORWARD + "test_a_bad_key_has_no_effect_on_queries_far_before_it", "sm90/dispatch.cu"),
    in_file("backward_scores.cuh", "if (owns_bias_gradient(call)) {", "if (true) {",
            "heads that share a bias get the gradient of one of them", BACKWARD + "test_bias_gradients_sum_over_what_was_broadcast", "sm90_backward*kPlainBias"),
    in_file("backward_scores.cuh", "even += 8 * p.bias_row_stride, odd", "even += 8 * p.key_length, odd",
            "queries have the bias of others where rows are further apart", COPIED, "sm90_backward*kPlainBias"),
    in_file("forward.cuh", "    } else if (moves) {", "    } else if (moves && n > 1000) {",
            "sums are not rescaled when a maximum grows", "test_huge_biases.py::test_good_keys_in_a_later_chunk " + FORWARD + "test_rising_logits_rescale_the_sum " + FORWARD + "test_huge_logits", ALL),
    # Backward.
    in_file("backward.cuh", "        if (!kIsGathered || !call.turns) flush_bias<kDim>(call, tile, head, bias_sum);", "",
            "heads of a group get each other's gradient of key_bias", THRESHOLDS + " " + BACKWARD + "test_key_bias_gradients_sum_over_what_was_broadcast"),
    in_file("backward_scores.cuh", "if (!has_bit(word, 8)) scores[i][2 + e]", "if (!has_bit(word, 7)) scores[i][2 + e]",
            "keys 8 further on have the bits of others", TILES),
    in_file("backward.cuh", "const int key = keys_of_rows[r];\n    T* const", "const int key = keys_of_rows[0];\n    T* const",
            "grad_key of eight rows is written over that of the eight before", RAGGED),
    in_file("backward.cuh", "if (place.first_column + i * 8 < both - key_width) {", "if (place.first_column + i * 8 < key_width) {",
            "grad_value of gathered keys has the width of keys", BACKWARD + "test_grouped_heads_add_up " + BACKWARD + "test_gathered_keys_of_other_widths"),
    in_file("backward.cuh", "note.sums + (group * 64 *", "note.sums + (group * 8 *",
            "half of grad_query is added at the wrong place", BACKWARD + "test_gathered_keys_of_other_widths"),
    in_file("backward.cuh", "begin_grad_query(grad_query, chunk - 1);", "begin_grad_query(grad_query, chunk);",
            "grad_query is computed before the chunk's scores are there", RAGGED + " " + THRESHOLDS),
    in_file("backward.cuh", "add(grad_query, n - 1, visit);", "add(grad_query, n - 2, visit);",
            "the last chunk's grad_query goes to the queries before", RAGGED),
    in_file("backward_load.cuh", "max(note.bounds[0][3], note.bounds[1][3]) - shift);", "note.bounds[0][3] - shift);",
            "queries that only later keys of a tile see are left out", BACKWARD + "test_one_key_of_a_tile_is_seen_longer_than_the_others"),
    in_file("backward_load.cuh", "high < min(note.bounds[0][2], note.bounds[1][2]);", "high <= min(note.bounds[0][2], note.bounds[1][2]);",
            "a chunk of queries whose last sees a key no more is not tested", BACKWARD + "test_one_key_of_a_tile_ends_with_a_chunk_of_queries"),
    in_file("backward_load.cuh", "bits += row_in_tile * words + note.first_place / 32 % words;", "bits += row_in_tile * words;",
            "tiles of 256 keys use the bits of their first 128 twice", TILES),
    in_file("backward_load.cuh", "at + 1 < chunks ? at + 1 : 0;", "at + 1 < chunks ? at + 1 : 1;",
            "a chunk of queries comes twice and the first never", THRESHOLDS + " " + RAGGED),
    in_file("backward_load.cuh", "terms = (note.batch * p.heads + head) * call.padded_queries + first_query;", "terms = (note.batch * p.heads + head) * p.query_length + first_query;",
            "lse and delta are those of other queries", RAGGED),
    in_file("backward_wide.cuh", "my_queries = queries + step_of(group * kMine * 128);", "my_queries = queries;",
            "both warpgroups compute the scores of the earlier queries", WIDE, "sm90_backward_wide", size=256),
    in_file("backward_wide.cuh", "      pin(grad_query);\n      add(1, n - 1 - visit);", "      pin(grad_query);",
            "a piece of grad_query of a visit's last chunk is left out", WIDE, "sm90_backward_wide", size=256),
    in_file("backward_wide.cuh", "products.begin_grad_key(grad_key, stage, chunk);", "products.begin_grad_key(grad_key, stage, chunk + 1);",
            "grad_key is made of the score gradients of the chunk before", WIDE, "sm90_backward_wide", size=256),
    in_file("backward_wide.cuh", "first_column = group * (kWideDim / kConsumers);", "first_column = 0;",
            "both warpgroups write the first half of the columns", WIDE, "sm90_backward_wide", size=256),
    in_file("backward_wide.cuh", "    if (kHasBias) flush_bias<kDim>(call, tile, head, bias_sum);\n    const int batch", "    if (kIsGathered) flush_bias<kDim>(call, tile, head, bias_sum);\n    const int batch",
            "the last head's gradient of key_bias goes to the next tile's keys", WIDE_OPTIONS, "sm90_backward_wide", size=256),
    in_file("backward_wide.cuh", "      if (!kHasOptions) subtract_from_delta(grad_scores, delta);", "      subtract_from_delta(grad_scores, delta);",
            "gradients of the weights come in twice subtracted", WIDE_OPTIONS, "sm90_backward_wide", size=256),
    in_file("backward_scores.cuh", "gradients[i][2 * r] *= slope.x, gradients[i][2 * r + 1] *= slope.y;", "gradients[i][2 * r] *= slope.y, gradients[i][2 * r + 1] *= slope.x;",
            "neighbouring queries have each other's slope of softcap beside a bias", WIDE_OPTIONS, "sm90_backward*kCappedBias", size=256),
    in_file("schedule.cuh", "head = static_cast<int>(head_group % head_groups_per_batch) * work.heads;", "head = static_cast<int>(head_group % head_groups_per_batch);",
            "head groups overlap", RAGGED + " " + THRESHOLDS),
    in_file("backward_load.cuh", "base < list.y; base += work.shares * kKeys", "base + kKeys <= list.y; base += work.shares * kKeys",
            "the last keys of a list are dropped", THRESHOLDS),
    # Sums in a fixed order.
    in_file("backward_load.cuh", "while (reached != turn);", "while (reached < 0);",
            "tiles of keys add in any order", GRADIENTS + "test_deterministic_gradients_of_all_keys_are_equal_over_twenty_runs"),
    in_file("backward_load.cuh", "while (reached <= last_key);", "while (reached < 0);",
            "lists add keys in any order", GRADIENTS + "test_deterministic_gradients_of_live_keys_are_equal_over_twenty_runs"),
    # Laying out the work.
    in_file("dispatch.cu", "{&p.mask.start, &p.mask.end, &p.mask.tiles, &p.mask.rows, &p.key_bias}", "{&p.mask.start, &p.mask.end, &p.mask.tiles, &p.mask.rows}",
            "heads with a key_bias of their own share one", THRESHOLDS, "sm90/dispatch.cu"),
    in_file("encode_maps.h", "steps[i] = sizes[i] == 1 ? 16 : static_cast<cuuint64_t>(strides[i]) * 2;", "steps[i] = sizes[i] == 1 ? 16 : static_cast<cuuint64_t>(i > 1 ? sizes[i - 1] * strides[i - 1] : strides[i]) * 2;",
            "tensors are read as if they were packed", FORWARD + "test_strides", "sm90/dispatch.cu"),
]  # fmt: skip
