# ruff: noqa: E501  (one edit a line, however long)
"""Faults in the portable family of CUDA kernels."""

from __future__ import annotations

from faults import Fault


def in_file(name: str, old: str, new: str, wrong: str, tests: str, objects: str = "", environment: str = "") -> Fault:
    return Fault("cuda_sm80", f"cpp/cuda/{name}", old, new, wrong, tests, objects, environment)


FORWARD, BACKWARD = "ops/test_forward.py::", "ops/test_backward.py::"
LIVE_KEYS, CUDA_TILES = "cuda/test_cuda_live_keys.py::", "cuda/test_cuda_tiles.py::"
THRESHOLDS, ALONE = BACKWARD + "test_lengths_around_every_threshold", BACKWARD + "test_each_query_sees_one_key_alone"
RAGGED, CAPPED = BACKWARD + "test_ragged_lengths", BACKWARD + "test_softcap_and_dropout"
LISTS = LIVE_KEYS + "test_lists_of_long_problems"
SCHEDULED = "sm80_forward sm80_backward_dq"
DECODE, STEP = "ops/test_decode.py::", "cache/test_cache.py::test_a_step_is_an_update_and_the_attention_over_all_slots"
FAR_APART = DECODE + "test_few_keys_far_apart"
IN_CLUSTERS = "DMATTN_FAMILY=auto"  # where blocks decode together; with sm80 none does

FAULTS = [
    # Tiles.
    in_file("sm80/tile.cuh", "kv_head = head / static_cast<int>(group);", "kv_head = head % static_cast<int>(p.kv_heads);",
            "query heads are assigned to key heads round-robin", FORWARD + "test_grouped_heads", SCHEDULED),
    in_file("sm80/tile.cuh", "if (to && part * 8 < width) {", "if (to && part * 8 + 8 < width) {",
            "the last eight columns of a row are not written", RAGGED),
    in_file("sm80/tile.cuh", "const int at = column + 8 * n < width ? column + 8 * n : 0;", "const int at = 8 * n < width ? 8 * n : 0;",
            "all warps add to the first columns of a row of sums", BACKWARD + "test_gathered_keys_of_other_widths", "sm80_backward_dq sm80_backward_dkdv"),
    in_file("sm80/tile.cuh", "const float left = f == 0.0f ? 0.0f : x[m][n][2 * r] * f,", "const float left = x[m][n][2 * r] * f,",
            "a row that sees nothing is NaN beside a bad key", BACKWARD + "test_rows_that_see_nothing_beside_a_bad_key " + FORWARD + "test_a_row_that_sees_nothing_is_zero_beside_an_infinite_value"),
    in_file("sm80/tile.cuh", "a[3] = Element<T>::narrow_pair(x[2 * k + 1][2], x[2 * k + 1][3]);", "a[3] = Element<T>::narrow_pair(x[2 * k + 1][0], x[2 * k + 1][1]);",
            "a quarter of the weights is that of other rows", FORWARD + "test_ragged_lengths", "sm80_forward"),
    # Forward.
    in_file("sm80/forward.cuh", "    scheduler.template load_values<kDim>(value_tile, stage, chunk);", "    if (buffer == 0) scheduler.template load_values<kDim>(value_tile, stage, chunk);",
            "every second chunk has the values of the one before", FORWARD + "test_ragged_lengths " + FORWARD + "test_rising_logits_rescale_the_sum " + THRESHOLDS, "sm80_forward"),
    in_file("sm80/forward.cuh", "const int key = key_of(column + 8 * n + e);", "const int key = key_of(column + 8 * n + e) + 1;",
            "dropout draws for the key beside", FORWARD + "test_dropout_is_a_function_of_the_seed"),
    in_file("sm80/forward.cuh", "dropout.row_key(first_query + 16 * m + 8 * r)", "dropout.row_key(first_query + 16 * m)",
            "half of the rows drop what others drop", FORWARD + "test_dropout_is_a_function_of_the_seed"),
    in_file("sm80/forward.cuh", "return factor * keep_scale;", "return factor;",
            "kept weights are not scaled", FORWARD + "test_dropout_is_a_function_of_the_seed"),
    in_file("sm80/tile.cuh", "const bool wanted = query < query_length;", "const bool wanted = query + 1 < query_length;",
            "the last query reads as zero", FORWARD + "test_ragged_lengths"),
    # Which keys a tile meets.
    in_file("common/scheduler.cuh", "max(0, min(key_length, high + 1))", "max(0, min(key_length, high))",
            "the last key of a causal tile is left out", FORWARD + "test_ragged_lengths " + RAGGED, SCHEDULED),
    in_file("sm80/scheduler.cuh", "bits || chunk.first_key + kKeys > sources().whole_limit ||", "bits || chunk.first_key > sources().whole_limit ||",
            "the chunk on the diagonal is not tested", FORWARD + "test_ragged_lengths", SCHEDULED),
    in_file("sm80/scheduler.cuh", "queues_.cursor = first + kListBlock;", "queues_.cursor = first + kListBlock - 1;",
            "a key comes twice where a list is read on", THRESHOLDS + " " + LISTS, SCHEDULED),
    in_file("sm80/scheduler.cuh", "rings.whole_count += total & 0xffff;", "rings.whole_count += total & 0xff;",
            "keys are lost when more than 255 come at once", THRESHOLDS + " " + LISTS, SCHEDULED),
    in_file("sm80/scheduler.cuh", "queues_.whole[(rings.whole_head + thread - from_partial) % Queues::kRing]", "queues_.whole[(rings.whole_head + thread) % Queues::kRing]",
            "the ring is read past its head in mixed chunks", THRESHOLDS, SCHEDULED),
    in_file("sm80/scheduler.cuh", "sources().key_bias + max(key, 0), key >= 0)", "sources().key_bias + max(thread, 0), key >= 0)",
            "gathered keys have the key_bias of the first keys", THRESHOLDS, SCHEDULED),
    in_file("sm80/scheduler.cuh", "mask_head = live_keys.mask_head_of(batch, head);", "mask_head = batch * live_keys.batch_stride + head % static_cast<int>(live_keys.heads);",
            "a head reads the list of another one", THRESHOLDS, SCHEDULED),
    in_file("sm80/scheduler.cuh", "to.bits_row = first_query % static_cast<int>(p_.mask.tile_q);", "to.bits_row = 0;",
            "tiles of 256 queries use the bits of their first 128 twice", BACKWARD + "test_tiles_larger_than_the_kernels_own", SCHEDULED),
    in_file("sm80/scheduler.cuh", "const bool wanted = stage.span[copy.row + r].touches(low, high);", "const bool wanted = stage.span[copy.row + r].first <= high || true;",
            "keys that no query sees are loaded, NaN and all", FORWARD + "test_what_nobody_sees_has_no_effect", SCHEDULED),
    in_file("sm80/scheduler.cuh", "if (!(bits & 2)) scores[m][n][2 * r + 1] = negative_infinity();", "if (!(bits & 1)) scores[m][n][2 * r + 1] = negative_infinity();",
            "odd keys have the bits of even ones", BACKWARD + "test_tiles_larger_than_the_kernels_own " + FORWARD + "test_each_mask_with_everything_else_plain", SCHEDULED),
    in_file("sm80/scheduler.cuh", "entry_++ % Queues::kRing, begin", "++entry_ % Queues::kRing, begin",
            "the first tile of a row of a block mask is left out", BACKWARD + "test_tiles_larger_than_the_kernels_own", SCHEDULED),
    in_file("sm80/scheduler.cuh", "if (!is_seen) stage.span[thread] = Span::empty();", "if (!is_seen) stage.span[thread] = stage.span[thread];",
            "keys that bits hide from all are loaded, NaN and all", FORWARD + "test_what_nobody_sees_has_no_effect", SCHEDULED),
    # Backward.
    in_file("sm80/backward_tile.cuh", "gradient = grad_logit * terms.slope(capped);", "gradient = grad_logit;",
            "gradients lack softcap's slope", CAPPED),
    in_file("sm80/backward_tile.cuh", "for (int step = 4; step < 32; step *= 2) total +=", "for (int step = 4; step < 16; step *= 2) total +=",
            "half of a warp's rows are missing in the gradient of key_bias", THRESHOLDS + " " + RAGGED),
    in_file("sm80/backward_tile.cuh", "(gradient * kept - delta[m][r])", "(gradient - delta[m][r])",
            "gradients of logits ignore what was dropped", CAPPED),
    in_file("sm80/backward_dq.cuh", "value_rows[m][r] = key_rows[m][r] + key_width;", "value_rows[m][r] = key_rows[m][r] + value_width;",
            "grad_value is added at the wrong place of a row when D and Dv differ", BACKWARD + "test_grouped_heads_add_up " + BACKWARD + "test_drawn_cases"),
    in_file("sm80/backward_dq.cuh", "(batch * p.kv_heads + kv_head) * p.key_length * row_bytes;", "(batch * p.kv_heads + head % p.kv_heads) * p.key_length * row_bytes;",
            "gradients of keys go to another key head", THRESHOLDS),
    in_file("sm80/backward_dq.cuh", "has_chunk = scheduler.next(shared.stage[buffer ^ 1], coming);", "has_chunk = scheduler.next(shared.stage[buffer], coming);",
            "the next chunk's stage overwrites this one's", THRESHOLDS),
    in_file("sm80/backward_dkdv.cuh", "whole_from_ = p.mask.is_causal ? first_key + kKeys - 1 - shift : 0;", "whole_from_ = p.mask.is_causal ? first_key - shift : 0;",
            "the chunk on the diagonal is not tested in backward_dkdv", RAGGED),
    in_file("sm80/backward_dkdv.cuh", "if (first_key + kKeys > p.key_length) whole_from_ = stop_;", "",
            "keys beyond the end get weights in backward_dkdv", BACKWARD + "test_very_negative_logits_beside_keys_that_do_not_exist", "sm80_backward_dkdv"),
    in_file("sm80/backward_dkdv.cuh", "if (8 * n + 1 >= seen) scores[m][n][2 * r + 1]", "if (8 * n + 1 > seen) scores[m][n][2 * r + 1]",
            "odd keys see one query too many", RAGGED),
    in_file("sm80/backward_dkdv.cuh", "stop_ = min(query_length, bounds[3] - shift_);", "stop_ = min(query_length, bounds[2] - shift_);",
            "the loop over queries ends with the first key that does", BACKWARD + "test_dead_keys_full_of_nan_leave_gradients_alone " + BACKWARD + "test_rows_that_see_nothing_beside_a_bad_key " + BACKWARD + "test_deterministic_is_the_gradient_too"),
    in_file("sm80/backward_dkdv.cuh", "first_key, warp_row, warp_column, lane);\n    __syncthreads();", "first_key, warp_row, warp_column, lane);",
            "warps do not wait for the scores of the others", RAGGED + " " + BACKWARD + "test_deterministic_is_the_gradient_too"),
    in_file("sm80/backward_dkdv.cuh", "put_tile<T, kDim>(key_tile, grad_key, key_row, row_part, [&](int, int) { return call.scale; });", "put_tile<T, kDim>(key_tile, grad_key, key_row, row_part, [&](int, int) { return 1.0f; });",
            "grad_key lacks the scale in backward_dkdv", RAGGED),
    in_file("sm80/backward_dkdv.cuh", "for (int row = 0; row < Shared::kShape.warp_rows; ++row) sum +=", "for (int row = 1; row < Shared::kShape.warp_rows; ++row) sum +=",
            "some queries are missing in the deterministic gradient of key_bias", BACKWARD + "test_deterministic_is_the_gradient_too " + BACKWARD + "test_key_bias_gradients_sum_over_what_was_broadcast"),
    in_file("key_lists/tile_order.cu", "if (!keeps && work_tile < work_tiles) live_keys.order", "if (work_tile < work_tiles) live_keys.order",
            "an order of tiles names some twice and others never", CUDA_TILES + "test_block_masks_with_more_tiles_than_blocks", "tile_order.cu"),
    # Decoding, and a bounded cache's step in the same kernel.
    in_file("sm80/decode.cuh", "++splits, until += split_chunks;", "until += split_chunks;",
            "every split is taken for the first", FAR_APART + " " + DECODE + "test_shapes", "sm80_decode"),
    in_file("sm80/decode.cuh", "whole_until = here.length - (p.is_causal ? static_cast<int>(p.queries) - 1 : 0);", "whole_until = here.length;",
            "earlier queries see later ones' keys in all chunks but the last", DECODE + "test_shapes", "sm80_decode"),
    in_file("sm80/decode.cuh", "if (!token.has_length) here.length = 0, here.last_key = here.first_key, copies.chunks = 0;", "",
            "a sequence that takes no token attends all the same", STEP, "sm80_step"),
    in_file("sm80/decode_parts.cuh", "page < 0 || page >= p.pages", "page < 0 || page > p.pages",
            "the page behind the last one is read", DECODE + "test_a_page_number_out_of_range_empties_its_sequence", "sm80_decode"),
    in_file("sm80/decode_parts.cuh", "if (i < call.parts) parts[i]", "if (i + 1 < call.parts) parts[i]",
            "what the last block of a cluster found is lost", FAR_APART, "sm80_decode", IN_CLUSTERS),
    in_file("common/merge_parts.cu", "while (run * kMergeWarps < call.parts) run *= 2;", "while (2 * run * kMergeWarps < call.parts) run *= 2;",
            "half of many parts are left out", FAR_APART, "merge_parts.cu"),
    in_file("common/parts.cuh", "return late == 0.0f ? first : fmaf(y, late, first);", "return fmaf(y, late, first);",
            "a sum of nothing makes its neighbour NaN", DECODE + "test_values_that_only_later_queries_see_may_be_infinite", "sm80_decode merge_parts.cu"),
    in_file("sm80/token_step.cuh", "plan.selected_row == kNewRow ? 0 : 1", "0",
            "the key that leaves the local window is read as the new token", STEP, "sm80_step"),
    in_file("sm80/token_step.cuh", "if (lane == 0) key_bias[row] = score;", "",
            "a new key has the score of the one that it pushed out", STEP, "sm80_step"),
    in_file("sm80/token_step.cuh", "for (int at = lane; at < parts * kWarps; at += 32) {", "for (int at = lane; at < kWarps; at += 32) {",
            "the worst key of a cluster's first block dies", STEP, "sm80_step", IN_CLUSTERS),
    in_file("sm80/token_step.cuh", "if (begin != first) load_scores(begin);", "",
            "later slots of a warp have the scores of the first ones", STEP, "sm80_step"),
]  # fmt: skip
