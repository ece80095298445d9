"""Mutations that ``planted_faults.py`` knows, by name: the edit and a reason.

EQUIVALENT change no result: they are recorded and not planted. UNFOUND are planted, and the record says why no test finds them."""

from __future__ import annotations

EQUIVALENT: dict[str, tuple[str, str]] = {
    "python/dmattn/cache_choice.py:attend_chunk: true, false 3": (
        "ask, key_bias=bias, is_causal=[True -> False], scale=scale, softcap=softcap",
        "The lists are causal already.",
    ),
    "python/dmattn/cache.py:BoundedCache._apply: true, false 1": (
        "or], Tensor], recurse: bool = [True -> False]) -> BoundedCache:",
        "A cache has no submodules.",
    ),
    "python/dmattn/cache.py:BoundedCache._take_steps: true, false 1": (
        "lots, None, bias, None, None, [False -> True], call.scale, call.softcap, *L",
        "Causality hides nothing from the last query of a sequence, and there is one query.",
    ),
    "cpp/cpu/backward_head.h:shared_bias_task: off by one 2": (
        "{tile, 1}, {nullptr, nullptr, [0 -> 1], true}, s);",
        "It is the stride of gradients that are not wanted.",
    ),
    "cpp/cpu/decode_split.h:merge_splits_task: off by one 5": (
        "R sum = 0, rest = [0 -> 1];",
        "log_sum sets it.",
    ),
    "cpp/cpu/mask.h:KeyScheduler.visit_range: and, or 2": (
        "block >= first / kSummaryKeys [&& -> ||] block < end_block) visit_bloc",
        "Of a block outside of the range no key is looked at.",
    ),
    "cpp/cpu/index_loss.h:index_loss_scratch_bytes: removed statement 2": (
        "[static_cast<void>(measured) -> ];",
        "It only tells the compiler that the variable is not used.",
    ),
    "cpp/cpu/mask.h:KeyScheduler.visit_range: dropped not 1": (
        "if ([! -> ]start_min_ && !end_max_) {",
        "Summaries of blocks only save the time of looking at their keys.",
    ),
    "cpp/cpu/backward_head.h:BackwardShared.BackwardShared: minimum, maximum 2": (
        "roup_size(p), kMaxPartBytes / [max_of -> min_of](1, bytes_each));",
        "Only the memory of a call depends on the quotient, which goes unused where there are no bytes.",
    ),
    "cpp/cpu/mask.h:KeyScheduler.classify: and, or 2": (
        "int64_t{end > first_position_ [&& -> ||] start <= last_position_} << j",
        "A key that no query of the tile sees is dropped later.",
    ),
    "cpp/params.h:competing_rows: comparison 2": (
        "const int64_t most = (seen [> -> >=] 0 ? seen : 0) >> log2_width, ",
        "For 0 both give 0.",
    ),
    "cpp/cpu/index.cpp:choose: comparison 2": (
        "if (best.count < k && bound [> -> >=] kLowest<R>) best.collect(row,",
        "The same numbers are collected once more.",
    ),
    "cpp/cpu/index_loss.h:find_blocks: off by one 5": (
        "int64_t column = -[1 -> 2];",
        "A negative column means none, and only its sign is tested.",
    ),
    "cpp/cpu/mask.h:KeyScheduler.visit_range: and, or 1": (
        "if (!start_min_ [&& -> ||] !end_max_) {",
        "Blocks that one summary would skip are classified one by one and found empty: slower, the same chunks.",
    ),
    "cpp/tensors.h:view_of: off by one 5": (
        "im() > 3 ? tensor.stride(2) : [0 -> 1]};",
        "Of tensors with three dimensions, the scores of select alone, nothing reads the row_stride.",
    ),
    "cpp/cpu/logits.h:lanes_in: arithmetic 1": (
        "ord = decltype(BitVec<R>{}[0] [+ -> -] 0);",
        "Only the type of the expression is read.",
    ),
    "cpp/cpu/list_rows.h:heads_share_mask: true, false 2": (
        "return [true -> false];",
        "Heads that see the same keys are computed one by one: slower, the same sums.",
    ),
    "cpp/cpu/list_rows.h:heads_share_mask: and, or 2": (
        "ata && view->head_stride != 0 [&& -> ||] view->head_divisor == 1) retu",
        "Heads that see the same keys are computed one by one: slower, the same sums.",
    ),
    "cpp/cpu/cache.cpp:extend: and, or 4": (
        "t bool is_there = key < first [&& -> ||] slot >= 0 && slot < visible &",
        "Cached keys that are no longer local keep their slots, so they are there.",
    ),
    "cpp/cpu/index_lists.h:list_entries: comparison 4": (
        "for (int64_t j = first; j [< -> <=] first + kBlock; j += kLineKey",
        "One line more is marked, for which there is room, and found empty.",
    ),
    "cpp/cpu/index.cpp:guess_bound: off by one 4": (
        "if (n < 4 * kSample || [2 -> 3] * k > n) return kLowest<R>;",
        "Without a bound all numbers are candidates: slower, the same choice.",
    ),
    "cpp/cpu/vecmath.h:small_tanh: off by one 3": (
        "kDepth = sizeof(R) == 8 ? 9 : [5 -> 6];",
        "One term more of a fraction that is exact to rounding already.",
    ),
    "cpp/forward_arguments.h:CheckedForward: swapped arguments 7": (
        "[is_in_order, most_keys -> most_keys, is_in_order],",
        "Both are hints for CUDA kernels, which the CPU build does not read.",
    ),
    "cpp/backward_arguments.h:check_backward: and, or 1": (
        "if (given.need_bias [&& -> ||] clears_bias) torch::stable::z",
        "A gradient that nobody wants has no elements, and one that the caller clears is only cleared twice.",
    ),
    "cpp/reduce_arguments.h:check_reduce: true, false 1": (
        "nput, Tensor(), Tensor(), {}, [false -> true]};",
        "It is set before anything reads it.",
    ),
    "cpp/cpu/cache.cpp:extend: comparison 13": (
        " < first && slot >= 0 && slot [< -> <=] visible && slots.position[slo",
        "Nothing is copied to a slot that there is not, whether its key is there or not.",
    ),
    "cpp/cpu/backward_tile.h:BackwardScratch.BackwardScratch: comparison 1": (
        "slope = p.softcap [> -> >=] 0 ? take_pairs<R>(arena, p) :",
        "Without softcap nothing looks at this memory.",
    ),
    "cpp/cpu/list_rows.h:joint_heads: minimum, maximum 1": (
        "data && heads_share_mask(p) ? [max_of -> min_of](1, min_of(group, kListHeads))",
        "Heads are computed one by one, which takes more time.",
    ),
    "cpp/cpu/list_rows.h:is_joined_cheaper: dropped not 1": (
        "if ([! -> ]listed.lines[line]) continue;",
        "It only decides whether queries are computed together or one by one, which takes more or less time.",
    ),
    "cpp/cuda/sm90/forward/kernel.cuh:Consumer.compute_first_scores: true, false 1": (
        "if (flags_ & kEnd) return [false -> true];",
        "A launch has no more blocks than tiles, and every tile has a chunk, if need be one without keys.",
    ),
    "cpp/cuda/select/short.cuh:order_alike: true, false 1": (
        "bool are_many = [false -> true];",
        "Where few are alike they are sorted twice, too: slower, the same order.",
    ),
    "cpp/cuda/indexer/few_heads.cu:launch: minimum, maximum 1": (
        "const dim3 grid(grid_of(std::[min -> max](most, (enough + call.tiles - ",
        "More blocks share the keys, and those without any end at once: slower, the same scores.",
    ),
    "cpp/cuda/indexer/choose.cu:index_choice_kernel: comparison 1": (
        "const bool is_short = count [< -> <=] call.p.top && call.bounds[own",
        "A row with just as many candidates as are wanted is scored again: slower, the same choice but for the rounding of scores.",
    ),
    "cpp/cuda/backward.cpp:backward_op: and, or 1": (
        "if (call.b.grad_bias [&& -> ||] !plan.stores_bias) torch::sta",
        "A gradient that nobody wants has no elements, and one that a kernel stores is only cleared before.",
    ),
    "cpp/cuda/key_lists/live_keys.cu:count_keys: true, false 1": (
        "bool has_partial = [false -> true];",
        "Live keys that all queries see are gathered, not copied side by side first: slower, the same keys in another order.",
    ),
    "cpp/cuda/sm80/scheduler.cuh:KeyScheduler.next_gathered: comparison 1": (
        "while (rings.whole_count [< -> <=] kKeys && rings.partial_count ",
        "The next keys are read one chunk earlier, for which the queues have room: the same chunks.",
    ),
    "cpp/cuda/sm80/scheduler.cuh:KeyScheduler.next_gathered: off by one 7": (
        "if (thread == [0 -> 1]) {  // read again after some ",
        "All threads hold the numbers that one of them writes.",
    ),
    "python/dmattn/cache.py:BoundedCache.attend: minimum, maximum 1": (
        "f torch.is_grad_enabled() and [any -> all](x is not None and x.requires_",
        "The op that takes the tokens in refuses gradients with the same words.",
    ),
    "python/dmattn/attention.py:selected_attention: true, false 1": (
        "sor | None, is_causal: bool = [True -> False],",
        "Both callers say whether they are causal.",
    ),
    "python/dmattn/varlen.py:packed_lists: comparison 4": (
        "inside = (entries >= 0) & ([entries < end_key - first_key -> (entries <= end_key - first_key)])",
        "Such an entry is the key behind the document, which is hidden from its queries, or no key at all, and stands for none.",
    ),
    "python/dmattn/testing/strategies.py:index_masks: true, false 1": (
        "lists.sort(dim=-1, descending=[True -> False]).values",
        "Sorted lists are as good in either order: a kernel may rely on neither.",
    ),
    "python/dmattn/testing/strategies.py:attention_cases: arithmetic 1": (
        "udes[n] * random_tensor(size, [seed + n -> (seed - n)], dtype, device),",
        "Any seeds that differ from each other draw numbers as good.",
    ),
    "python/dmattn/composed.py:visible_in_lists: arithmetic 1": (
        "blocks = [-(-keys[1] // block) - first -> (-(-keys[1] // block) + first)]",
        "The table gets more columns than there are blocks, which nothing reads.",
    ),
}

UNFOUND: dict[str, tuple[str, str]] = {
    "cpp/cpu/backward_head.h:BackwardShared.BackwardShared: comparison 3": (
        "== p.head_dim && value_stride [== -> !=] p.value_dim;",
        "Rows have padding only on a processor with AVX-512, which this machine lacks.",
    ),
    "cpp/cuda/indexer/choose.cu:write_list: removed barrier 3": (
        "[__syncthreads() -> ];",
        "Threads keep so close together that no result differs; racecheck, which is no test of the default set, names it.",
    ),
    "cpp/cuda/select/sort.cuh:sort_tiles: comparison 2": (
        "for (int i = 0; i [< -> <=] kItems; ++i) {",
        "It writes behind an array that is kept in registers, and the compiler leaves that out.",
    ),
}
