# ruff: noqa: E501  (one edit a line, however long)
"""Faults in the Python package."""

from __future__ import annotations

from faults import Fault


def in_file(name: str, old: str, new: str, wrong: str, tests: str = "", harmless: str = "") -> Fault:
    return Fault("python", f"python/dmattn/{name}", old, new, wrong, tests, harmless=harmless)


FORWARD, BACKWARD, MASKS = "test_forward.py::", "test_backward.py::", "test_masks.py::"
DYNAMIC, AUTOGRAD, REGISTRATION = "test_dynamic_mask_attention.py::", "test_autograd.py::", "test_registration.py::"

FAULTS = [
    # The public functions.
    in_file("attention.py", "torch.where(visible, FOREVER, ALWAYS)", "torch.where(visible, ALWAYS, FOREVER)",
            "a bool mask of keys alone is inverted", FORWARD + "test_what_nobody_sees_has_no_effect"),
    in_file("attention.py", "query.shape[3] ** -0.5 if scale is None", "value.shape[3] ** -0.5 if scale is None",
            "the default scale is that of the values' width", FORWARD + "test_head_sizes"),
    in_file("attention.py", "deterministic = deterministic or torch.are_deterministic_algorithms_enabled()", "deterministic = bool(deterministic)",
            "torch.use_deterministic_algorithms is ignored", "test_silence.py::test_use_deterministic_algorithms_is_obeyed"),
    in_file("attention.py", "device=q.device) + (k.shape[2] - q.shape[2])", "device=q.device)",
            "causal SDPA with Sq != Sk is aligned at the bottom right", "test_sdpa.py"),
    in_file("attention.py", "scale = size**-0.5", "scale = (-(-size // 8) * 8) ** -0.5",
            "SDPA scales by the padded head size", "test_sdpa.py"),
    in_file("attention.py", "from_bias if key_bias is None else torch.add(", "from_bias if key_bias is None else torch.maximum(",
            "a bias of one row replaces key_bias instead of adding to it", BACKWARD + "test_key_bias_gradients_sum_over_what_was_broadcast"),
    in_file("attention.py", 'causal = is_causal or (base is not None and base.segments == "causal")', "causal = is_causal",
            "dynamic masks over causal documents see later keys when is_causal is False", DYNAMIC + "test_equals_the_reference " + DYNAMIC + "test_equals_attention_with_a_top_k_mask"),
    in_file("attention.py", "torch.exp(A * F.softplus(dt))", "torch.exp(A * torch.relu(dt))",
            "scores use relu instead of softplus", DYNAMIC + "test_doge_formulas"),
    in_file("attention.py", "value.transpose(1, 2).flatten(2), proj, bias", "value.reshape(value.shape[0], value.shape[2], -1), proj, bias",
            "scores mix tokens and heads of the values", DYNAMIC + "test_doge_formulas"),
    in_file("attention.py", "dropout_p, dropout_seed if dropout_p > 0 else None", "dropout_p, None",
            "a given dropout seed is ignored", FORWARD + "test_dropout_is_a_function_of_the_seed"),
    in_file("attention.py", "is_causal=is_causal, scale=scale, dropout_p=dropout_p)", "is_causal=is_causal, scale=scale)",
            "SDPA forgets dropout", "test_silence.py::test_sdpa_drops_weights"),
    in_file("attention.py", "given.is_floating_point() and given.dtype != torch.float64", "given.is_floating_point()",
            "autocast takes float64 down", "test_silence.py::test_autocast_leaves_float64_alone"),
    # The gradient rule.
    in_file("autograd.py", "gradients[BIAS] = grad_bias.to(", "gradients[BIAS] = 2 * grad_bias.to(",
            "grad_bias is doubled", BACKWARD + "test_bias_gradients_sum_over_what_was_broadcast"),
    in_file("autograd.py", "ctx.needs_input_grad[KEY_BIAS], ctx.needs_input_grad[BIAS]", "ctx.needs_input_grad[BIAS], ctx.needs_input_grad[KEY_BIAS]",
            "who wants gradients of biases is mixed up", BACKWARD + "test_only_some_tensors_want_gradients"),
    in_file("autograd.py", "grad_out = torch.zeros_like(out)", "grad_out = torch.ones_like(out)",
            "a gradient through lse alone brings one through out", BACKWARD + "test_gradient_through_lse_alone"),
    in_file("ops.py", "        or torch._C._is_tracing()\n", "",
            "torch.jit.trace does not see the op", AUTOGRAD + "test_jit_trace_records_the_op"),
    in_file("autograd.py", "    if need_key_bias:\n", "    if need_bias:\n",
            "grad_key_bias is returned when grad_bias is wanted", AUTOGRAD + "test_both_ways_give_the_same " + BACKWARD + "test_only_some_tensors_want_gradients"),
    # Fakes.
    in_file("fake.py", "if like.stride(order[a]) < like.stride(order[b])", "if like.stride(order[a]) > like.stride(order[b])",
            "the fake output has another stride order", REGISTRATION + "test_opcheck_forward"),
    in_file("fake.py", "return length // tile + 2", "return length // tile + 1",
            "fake tables of tiles are a row short", REGISTRATION + "test_opcheck_pack " + MASKS + "test_from_blocks_there_and_back"),
    in_file("fake.py", "key_bias.shape if need_key_bias and", "key_bias.shape if need_bias and",
            "the fake backward has grad_key_bias when grad_bias is wanted", REGISTRATION + "test_opcheck_backward"),
    # Masks.
    in_file("masks/interval.py", "keys + (left + 1)", "keys + left",
            "a sliding window is a key short", MASKS + "test_to_bool_is_the_definition"),
    in_file("masks/interval.py", "torch.where(keys < sink, FOREVER, keys + local)", "torch.where(keys <= sink, FOREVER, keys + local)",
            "one sink too many", MASKS + "test_to_bool_is_the_definition"),
    in_file("masks/interval.py", "torch.searchsorted(ends.contiguous(), keys, right=True)", "torch.searchsorted(ends.contiguous(), keys, right=False)",
            "the first key of a document belongs to the one before", MASKS + "test_to_bool_is_the_definition"),
    in_file("masks/interval.py", "start = torch.where(keys < lengths, ALWAYS, keys)", "start = torch.where(keys <= lengths, ALWAYS, keys)",
            "a prefix is a key too long", MASKS + "test_to_bool_is_the_definition"),
    in_file("masks/interval.py", "end = torch.where(given >= 0, end, 0)", "end = torch.where(given >= -1, end, 0)",
            "padding of documents by ids is a document", MASKS + "test_to_bool_is_the_definition"),
    in_file("masks/interval.py", "start = torch.maximum(*same_heads(", "start = torch.minimum(*same_heads(",
            "a & b starts with the earlier start", MASKS + "test_and_is_the_intersection"),
    in_file("masks/interval.py", '"causal" if "causal" in (self.segments, other.segments)', '"causal" if self.segments == other.segments == "causal"',
            "a & b of documents and padding forgets that one of them is causal", "test_silence.py::test_and_keeps_the_causality_of_either"),
    in_file("masks/interval.py", "given.clamp(max=checks.MAX_LENGTH).to(torch.int32)", "given.to(torch.int32)",
            "int64 lengths wrap: 2^32 + 5 becomes 5", "test_silence.py::test_lengths_beyond_int32_do_not_wrap"),
    in_file("masks/interval.py", "torch.arange(Sk - Sq, Sk, device=self.start.device", "torch.arange(0, Sq, device=self.start.device",
            "to_bool aligns positions at the top left", MASKS + "test_to_bool_is_the_definition"),
    in_file("masks/block.py", "return all(-(-own // block) == -(-length // block)", "return any(-(-own // block) == -(-length // block)",
            "a block mask serves other lengths", "test_errors.py::test_public_call"),
    in_file("masks/block.py", "return max(2, int((tiles >= tables.TILE_PARTIAL).sum()))", "return int((tiles >= tables.TILE_PARTIAL).sum())",
            "a mask without partial tiles has tables of sizes on which tracing specialises", MASKS + "test_from_bool_there_and_back"),
    in_file("masks/block.py", "visible = fn(*index)", "visible = fn(index[0], index[1], index[3].mT, index[2].mT)",
            "a mask function gets keys for queries", MASKS + "test_to_bool_is_the_definition"),
    in_file("masks/block.py", "BlockMask.from_bool(a & b,", "BlockMask.from_bool(a | b,",
            "block masks are united instead of intersected", MASKS + "test_and_is_the_intersection"),
    in_file("masks/block.py", "block_mask.kv_indices) & block_mask.mask_mod(*index)", "block_mask.kv_indices)",
            "partial blocks of FlexAttention become full", MASKS + "test_from_flex"),
    in_file("masks/heads.py", "given.repeat_interleave(heads // given.shape[1], dim=1)", "given.repeat(1, heads // given.shape[1], *(1,) * (given.dim() - 2))",
            "query heads are dealt to key heads in turn instead of by groups", MASKS + "test_and_is_the_intersection"),
    # The rest.
    in_file("flops.py", "return forward * 5 // 2", "return forward * 2",
            "backward counts as many FLOPs as two forwards", REGISTRATION + "test_flop_counter_counts_visible_work"),
    in_file("flops.py", "count = (last - first).clamp(min=0)", "count = last - first",
            "empty intervals count as fewer than no pairs", MASKS + "test_visible_pairs_counts_the_mask"),
    in_file("nn.py", "first * cos - second * sin, second * cos + first * sin", "first * cos + second * sin, second * cos - first * sin",
            "RoPE turns the other way", "test_silence.py::test_rope_turns_as_published"),
    in_file("nn.py", "dropout_p=self.dropout if self.training else 0.0", "dropout_p=self.dropout",
            "the layer drops weights in evaluation, too", DYNAMIC + "test_layer_details"),
    in_file("nn.py", "base=base, softcap=self.softcap", "base=base",
            "the layer forgets its softcap", DYNAMIC + "test_layer_is_its_formula"),
    in_file("compat.py", "scale=softmax_scale", "scale=None",
            "flash_dma_attention ignores its scale", DYNAMIC + "test_flash_dma_attention"),
    in_file("checks.py", "query_length > MAX_LENGTH or key_length > MAX_LENGTH", "query_length >= MAX_LENGTH or key_length >= MAX_LENGTH",
            "a length of 2^20 itself is refused", "test_silence.py::test_the_largest_length_is_taken"),
    in_file("checks.py", "batch == 1 or batch == query.shape[0]", "batch <= query.shape[0]",
            "a mask of fewer batches is taken", "test_errors.py::test_public_call"),
    in_file("checks.py", "MAX_HEAD_DIM = 256", "MAX_HEAD_DIM = 264",
            "a head size that no kernel has is let through", "test_errors.py::test_public_call"),
    # What tests compare with.
    in_file("testing/tolerance.py", "        2 * eager_error\n", "        200 * eager_error\n",
            "the tolerance is loosened", "test_testing.py::test_the_rule_accepts_the_op_and_rejects_a_slightly_wrong_one"),
    in_file("testing/poison.py", "FILL_WITH_ONES = 256", "FILL_WITH_ONES = 0",
            "memory is not poisoned", "test_testing.py::test_poisoned_memory_reaches_what_a_stable_abi_library_allocates"),
    in_file("reference.py", "0x7FEB352D", "0x7FEB352F",
            "the specification's hash of dropout is another one", FORWARD + "test_dropout_is_a_function_of_the_seed"),
    in_file("reference.py", "order = length - 1 - row.flip(-1).sort(", "order = row.sort(",
            "the specification prefers the earlier of equal scores", "test_select.py::test_top_k_equals_brute_force"),
    # Harmless.
    in_file("masks/interval.py", "torch.where(keys < lengths, torch.full_like(keys, FOREVER), ALWAYS)", "torch.where(keys < lengths, FOREVER, ALWAYS).to(torch.int32)",
            "the end of padding is made of two numbers",
            harmless="torch.where of two Python ints gives int64, which holds both exactly, and the conversion gives the same int32 values."),
]  # fmt: skip
