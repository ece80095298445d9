"""Context parallelism: chunks on several ranks give what one process gives, move few bytes, and a rank that differs is an error everywhere."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

import dmattn
import pytest
import torch
from dmattn import IntervalMask
from dmattn.distributed import context_parallel_attention, exchange
from dmattn.distributed.needs import checksum_of, weighed
from dmattn.testing import AttentionCase, strategies, tolerance, top_k_visible
from dmattn_bench import two_ways
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankError, Ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="ranks talk over gloo")
tensor = strategies.random_tensor
SEED = torch.tensor([11])


@pytest.fixture(scope="module")
def ranks():
    pool = Ranks(4)
    yield pool
    pool.close()


def cut(whole, cuts):
    """Each rank's part of [B, H, N, *] or [B, H, N] tensors; other values go to all ranks."""
    return [
        {name: x[:, :, first:last].clone() if isinstance(x, torch.Tensor) and x.dim() > 2 else x for name, x in whole.items()}
        for first, last in itertools.pairwise(cuts)
    ]


def even_cuts(length, world):
    return [length * rank // world for rank in range(world + 1)]


def run(ranks, case, cuts, options, bias_name):
    """Runs a case of the whole sequence on ranks and puts their results together."""
    named = {bias_name if name == "key_bias" else name: leaf for name, leaf in case.leaves().items()}
    grads = dict(zip(("grad_out", "grad_lse"), case.incoming_gradients(), strict=True))
    parts = zip(cut(named, cuts), cut(grads, cuts), strict=True)
    answers = ranks.run("rank_calls:attend", [(leaf, grad["grad_out"], grad["grad_lse"], options) for leaf, grad in parts])
    results = {name: torch.cat([answer[0][name] for answer in answers], dim=2) for name in answers[0][0]}
    if bias_name == "scores":
        results["grad_key_bias"] = results.pop("grad_scores")
    return results, [answer[1] for answer in answers]


@st.composite
def problems(draw):
    """A case of the whole sequence, where to cut it, and how ranks are called."""
    length = draw(st.integers(4, 70))
    world = draw(st.integers(2, 4))
    inner = draw(st.lists(st.integers(0, length), min_size=world - 1, max_size=world - 1)) if draw(st.booleans()) else None
    cuts = even_cuts(length, world) if inner is None else [0, *sorted(inner), length]
    batch, kv_heads, group = draw(st.sampled_from([(1, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 3)]))
    D, Dv = draw(st.sampled_from([(8, 8), (16, 8)]))
    dtype = draw(st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16]))
    seed = draw(st.integers(0, 1000))
    query, key, value = (
        tensor((batch, heads, length, size), seed + place, dtype, "cpu")
        for place, (heads, size) in enumerate([(kv_heads * group, D), (kv_heads, D), (kv_heads, Dv)])
    )
    ends = sorted(draw(st.lists(st.integers(0, length), max_size=4)))
    documents = IntervalMask.documents(length, torch.tensor([0, *ends, length]))
    padding = IntervalMask.padding(length, torch.tensor([draw(st.integers(0, length)) for _ in range(batch)]))
    window, local, sink_keys = (draw(st.integers(*bounds)) for bounds in ((1, 12), (0, 6), (0, 3)))
    options, key_bias, bias_name = {}, None, "key_bias"
    kind = draw(st.sampled_from(["scores", "scores", "causal", "mask"]))
    if kind == "scores":
        bias_name = "scores"
        key_bias = strategies.make_scores((batch, kv_heads, length), draw(st.sampled_from(["random", "ties", "constant"])), seed,
                                          torch.float64 if dtype == torch.float64 else torch.float32, "cpu")  # fmt: skip
        base = draw(st.sampled_from([None, documents, padding, documents & padding]))
        options |= {"window": window, "local": local, "sink_keys": sink_keys, "base": base}
        visible = top_k_visible(key_bias, window, local=local, sink_keys=sink_keys)
        if base is not None:
            ends, real = documents if base is not padding else None, padding if base is not documents else None
            visible = _within_documents(key_bias, window, ends, real, local, sink_keys)
    else:
        mask = None
        if kind == "mask":
            masks = [IntervalMask.sliding_window(length, window), IntervalMask.streaming(length, sink_keys, local), documents, padding,
                     IntervalMask.prefix(length, window), IntervalMask.sliding_window(length, window) & documents & padding,
                     IntervalMask.top_k(tensor((batch, kv_heads * group, length), seed, torch.float32, "cpu"), window)]  # fmt: skip
            mask = draw(st.sampled_from(masks))
        options["mask"] = mask
        visible = None if mask is None else mask.to_bool(length, length)
        heads = draw(st.sampled_from([None, kv_heads, kv_heads * group]))
        key_bias = None if heads is None else tensor((batch, heads, length), seed + 9, torch.float64, "cpu")
    shared = {"softcap": draw(st.sampled_from([0.0, 2.0])), "scale": draw(st.sampled_from([None, 0.3]))}
    if draw(st.booleans()):
        shared |= {"dropout_p": 0.5}  # 1 / (1 - p) is a number of every dtype
        options["dropout_seed"] = SEED
    case = AttentionCase(query, key, value, visible=visible, key_bias=key_bias, is_causal=True, dropout_seed=int(SEED), grad_seed=seed,
                         description=f"{kind} {options} cut at {cuts}", **shared)  # fmt: skip
    return case, cuts, options | shared, bias_name


def _within_documents(scores, window, documents, padding, local, sink_keys):
    """What top_k_visible says of documents with padding, whose sinks and local window count positions."""
    mask = documents if padding is None else padding if documents is None else documents & padding
    length = scores.shape[2]
    return IntervalMask.top_k(scores, window, base=mask, local=local, sink_keys=sink_keys).to_bool(length, length)


def test_rows_are_copied_16_bytes_at_a_time_where_they_lie_so():
    rows = torch.zeros(2, 3, 16, 32, dtype=torch.bfloat16)
    assert exchange._can_be_wide(rows)
    assert exchange._can_be_wide(rows[:, 1:, 5:, 8:16])
    for other in (rows[..., :12], rows[..., 4:12], rows.mT, torch.zeros(4, 36, dtype=torch.bfloat16)[:, :32]):
        assert not exchange._can_be_wide(other)


def test_masks_whose_batches_or_heads_stand_in_another_order_have_other_checksums():
    end = torch.tensor([[[3, 9, 9], [4, 5, 9]], [[2, 7, 8], [1, 9, 6]]], dtype=torch.int32)
    checksums = {
        checksum_of(IntervalMask(torch.arange(3, dtype=torch.int32), x)) for x in (end, end.flip(0), end.flip(1), end.flip(2))
    }
    assert len(checksums) == 4


def test_a_change_at_any_place_changes_the_digest():
    numbers = torch.randint(0, 1000, (200_000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    digest = int(weighed(numbers))
    for place in (0, 65_519, 65_520, 65_521, 131_041, 199_999):
        other = numbers.clone()
        other[place] += 1
        assert int(weighed(other)) != digest


@settings(max_examples=60)
@given(problem=problems())
def test_ranks_compute_what_one_process_computes(ranks, problem):
    case, cuts, options, bias_name = problem
    results, _ = run(ranks, case, cuts, options, bias_name)
    tolerance.assert_close_to_reference(case, results)


def dynamic_case(length, kv_heads=2, dtype=torch.float64, D=8, seed=0):
    query, key, value = (
        tensor((2, heads, length, D), seed + place, dtype, "cpu") for place, heads in enumerate((4, kv_heads, kv_heads))
    )
    return query, key, value, tensor((2, kv_heads, length), seed + 3, torch.float32, "cpu")


def arguments(length=8, window=4, dtype=torch.float64, **more):
    """Of a call on the whole sequence, which dynamic_mask_attention takes, too."""
    tensors = zip(("query", "key", "value", "scores"), dynamic_case(length, dtype=dtype), strict=True)
    return {**dict(tensors), "window": window, **more}


def on_ranks(ranks, whole, cuts, call="call"):
    """out of the whole sequence, put together."""
    return torch.cat(ranks.run(f"rank_calls:{call}", [(part,) for part in cut(whole, cuts)]), dim=2)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_at_most_window_rows_a_key_head_come_in(ranks, world):
    """The bytes of rows stay the same, however many ranks there are; scores are those of the other ranks."""
    length, window, local, sink_keys = 240, 9, 4, 2
    query, key, value, scores = dynamic_case(length, dtype=torch.float32)
    for options in ({"window": window}, {"window": window, "local": local, "sink_keys": sink_keys}):
        case = AttentionCase(query, key, value, key_bias=scores, is_causal=True)
        _, traffic = run(ranks, case, even_cuts(length, world), options, "scores")
        groups, row = 2 * 2, (8 + 8) * 4 + 4
        most = sum(options.values())
        assert [0 < one["rows"] <= groups * most * row for one in traffic] == [False] + [True] * (world - 1)
        # Two ranks select without the other's scores.
        assert [one["scores"] for one in traffic] == [groups * 4 * (length - length // world) if world > 2 else 0] * world
        if world > 2:  # exactly those that some query sees
            visible = top_k_visible(scores, **options)
            cuts = even_cuts(length, world)
            needed = [int(visible[:, :, first:last, :first].any(2).sum()) for first, last in itertools.pairwise(cuts)]
            assert [one["rows"] for one in traffic] == [rows * row for rows in needed]
        # Gradients go back the way that rows came.
        assert sum(one["gradients"] for one in traffic) == sum(one["rows"] for one in traffic)


@pytest.mark.parametrize("world", [2, 4])
def test_a_sliding_window_brings_in_its_left_side(ranks, world):
    length, left = 64, 5
    query, key, value, _ = dynamic_case(length, dtype=torch.float32)
    case = AttentionCase(query, key, value, is_causal=True)
    for options in ({}, {"window": left}):
        _, traffic = run(
            ranks, case, even_cuts(length, world), {"mask": IntervalMask.sliding_window(length, left), **options}, ""
        )
        assert [one["rows"] for one in traffic] == [0] + [2 * 2 * left * (8 + 8) * 4] * (world - 1)


@pytest.mark.parametrize("cuts", [[0, 20, 50], [0, 20, 21, 50]], ids=["two ranks", "three"])
@pytest.mark.parametrize("bias_heads", [2, 4])
def test_scores_and_key_bias_together(ranks, cuts, bias_heads):
    """Bias of each key head, whose gradient is the scores' one, or of each query head."""
    length = cuts[-1]
    query, key, value, scores = dynamic_case(length)
    bias = tensor((2, bias_heads, length), 5, torch.float64, "cpu")
    leaves = {"query": query, "key": key, "value": value, "scores": scores, "key_bias": bias}
    grad_out = tensor(query.shape, 7, torch.float64, "cpu")
    parts = zip(cut(leaves, cuts), cut({"out": grad_out, "lse": grad_out[..., 0]}, cuts), strict=True)
    answers = ranks.run("rank_calls:attend", [(leaf, grad["out"], grad["lse"], {"window": 6}) for leaf, grad in parts])
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    both = scores.double().repeat_interleave(bias_heads // 2, dim=1) + bias
    mask = IntervalMask.top_k(scores.detach(), 6)
    out, lse = dmattn.attention(query, key, value, mask, key_bias=both, is_causal=True, return_lse=True)
    wanted = [out, *torch.autograd.grad((out, lse), list(leaves.values()), (grad_out, grad_out[..., 0]))]
    for name, expected in zip(("out", *(f"grad_{name}" for name in leaves)), wanted, strict=True):
        got = torch.cat([answer[0][name] for answer in answers], dim=2)
        two_ways.assert_same_in_another_order(got, expected, expected.dtype)


@pytest.mark.parametrize("cuts", [[0, 20], [0, 10, 20], [0, 0, 20], [0, 20, 20], [0, 7, 8, 20]], ids=str)
@pytest.mark.parametrize(("heads", "bias_heads"), [(1, 1), (2, 2), (2, 1), (2, 4)])
def test_gradients_of_scores_and_key_bias_add_up_apart(ranks, cuts, heads, bias_heads):
    """Both leaves may get one gradient, but never one tensor that both go on adding to."""
    batch, length = 1 if heads == 1 else 2, cuts[-1]
    shapes = {"query": (batch, 2 * heads, length, 8), "key": (batch, heads, length, 8), "value": (batch, heads, length, 8)}
    shapes |= {"scores": (batch, heads, length), "key_bias": (batch, bias_heads, length)}
    leaves = {name: tensor(shape, seed, torch.float32, "cpu") for seed, (name, shape) in enumerate(shapes.items())}
    for pairs in ranks.run("rank_calls:gradients_of_two_passes", [(part, {"window": 5}) for part in cut(leaves, cuts)]):
        for got, expected in pairs:
            two_ways.assert_same_in_another_order(got, expected, torch.float32)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ["scores", "base", "mask"])
def test_no_sequences(ranks, world, kind):
    length = 5 * world
    whole = {name: torch.ones(0, heads, length, 8) for name, heads in (("query", 4), ("key", 2), ("value", 2))}
    if kind == "mask":
        whole["mask"] = IntervalMask.sliding_window(length, 2)
    else:
        base = IntervalMask.documents(length, torch.tensor([0, 7, length])) if kind == "base" and world > 1 else None
        whole |= {"scores": torch.ones(0, 2, length), "window": 3, "base": base}
    for out in ranks.run("rank_calls:call", [(part,) for part in cut(whole, even_cuts(length, world))]):
        assert out.shape == (0, 4, 5, 8)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_kernels_are_told_how_many_keys_a_query_sees(ranks, world):
    """As in one process; also where a mask belies it on one rank, which is no reason to refuse."""
    query, key, value, scores = dynamic_case(12 * world)
    length, rows = query.shape[2], {"query": query, "key": key, "value": value}
    selecting = {**rows, "scores": scores, "window": 5, "local": 2}
    chunks = IntervalMask.chunked(length, 4)
    calls = {
        7: selecting,
        4: {**selecting, "base": chunks},
        0: {**selecting, "base": IntervalMask.documents(length, torch.tensor([0, 5, length]))},
        3: {**rows, "mask": IntervalMask.sliding_window(length, 2)},
        2**20: rows,
    }
    parts = [cut(given, even_cuts(length, world)) for given in (*calls.values(), {**rows, "mask": chunks})]
    parts[-1][0]["mask"] = chunks._replace(most_keys=9)
    expected = [[*calls, 9 if rank == 0 else 4] for rank in range(world)]
    assert ranks.run("rank_calls:told_to_forward", [([own[rank] for own in parts],) for rank in range(world)]) == expected


def test_dropout_without_a_seed_takes_the_first_ranks(ranks):
    """Every rank has a generator in another state; the whole sequence gets the mask of the first one's seed."""
    whole = arguments(40, 8, dropout_p=0.5)
    out = on_ranks(ranks, whole, [0, 20, 40], "call_with_generators")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expected = dmattn.dynamic_mask_attention(**whole)
    two_ways.assert_same_in_another_order(out, expected, torch.float64)


@pytest.mark.parametrize(("kind", "lengths"), [("scores", [[16, 16], [40, 40]]), ("mask", [[16, 16, 10], [24, 24, 20]])])
def test_compiled_in_one_graph(ranks, kind, lengths):
    for same in ranks.run("rank_calls:compare_compiled", [(kind, lengths)] * len(lengths[0])):
        assert same == [True] * len(lengths)


@pytest.mark.parametrize("lengths", [[58, 1, 2], [1, 58, 1]], ids=str)
def test_compiled_chunks_that_no_rank_can_guess_are_refused_on_every_rank(ranks, lengths):
    """None fails while it traces, for which the others would wait. The mask is as long as all chunks together."""
    with pytest.raises(RankError) as raised:
        ranks.run("rank_calls:compare_compiled", [("mask", [lengths])] * 3)
    assert set(raised.value.errors) == {0, 1, 2}
    for error in raised.value.errors.values():
        assert error.startswith(f"ValueError: query: expected, while compiling, chunks of one length, got {lengths};"), error


@pytest.mark.parametrize(("kind", "lengths", "mask_length"), [("mask", [20, 5], 10), ("base", [8, 8], 7), ("mask", [8, 8], 12)])
def test_compiled_masks_of_another_length_are_refused_on_every_rank(ranks, kind, lengths, mask_length):
    """Also where one is shorter than a rank's own chunk: no rank fails while it traces."""
    with pytest.raises(RankError) as raised:
        ranks.run("rank_calls:compare_compiled", [(kind, [lengths], mask_length)] * len(lengths))
    message = (
        f"ValueError: {kind}: expected one for {sum(lengths)} keys, the sum of the chunks {lengths}, got one for {mask_length}"
    )
    assert [error.partition("\n")[0] for error in raised.value.errors.values()] == [message] * len(lengths)


def test_on_one_dimension_of_a_mesh(ranks):
    whole = arguments(30, 7)
    parts = cut(whole, [0, 10, 30])
    answers = ranks.run("rank_calls:on_meshes", [(parts[rank % 2],) for rank in range(4)])
    expected = dmattn.dynamic_mask_attention(**whole)
    for first in (0, 2):
        two_ways.assert_same_in_another_order(torch.cat(answers[first : first + 2], dim=2), expected, torch.float64)


@pytest.mark.parametrize(
    "options", [{"window": 9}, {"window": 9, "local": 4, "sink_keys": 2}], ids=["best", "local and sink_keys"]
)
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float64], ids=["narrow", "wide"])
def test_few_keys_that_can_be_selected(ranks, options, wide):
    """Fewer than a window are alive where the second chunk begins, so slots stay empty; scores of other dtypes than the query's select."""
    whole = arguments(60, dtype=torch.float32, **options)
    whole["scores"] = whole["scores"].to(wide)
    whole["scores"][:, :, 5:24] = -torch.inf
    expected = dmattn.dynamic_mask_attention(**whole)
    for cuts in ([0, 30, 60], [0, 50, 60], [0, 0, 60], [0, 60, 60], [0, 20, 30, 60]):
        two_ways.assert_same_in_another_order(on_ranks(ranks, whole, cuts), expected, torch.float32)


@pytest.mark.parametrize("with_bias", [False, True], ids=["scores", "scores and bias"])
@pytest.mark.parametrize(
    "options", [{"window": 24}, {"window": 24, "local": 8, "sink_keys": 2}], ids=["best", "local and sink_keys"]
)
def test_two_ranks_on_their_devices(device_ranks, options, with_bias):
    """Over gloo on the CPU, over NCCL on two GPUs."""
    device_ranks.run("rank_calls:compare_with_one_process", [(200, 90, options, with_bias)] * 2)


def test_two_ranks_whose_devices_are_not_the_current_ones(device_ranks):
    device_ranks.run("rank_calls:compare_beside_another_current_device", [(200,)] * 2)


def test_chunks_whose_lengths_change_between_calls(ranks):
    """A rank whose call_signature is that of its last call goes by the signatures of the others."""
    for length, cuts in ((40, [0, 20, 40]), (47, [0, 20, 47]), (25, [0, 5, 25]), (45, [0, 25, 45]), (23, [0, 3, 23])):
        whole = arguments(length, 7, local=2)
        expected = dmattn.dynamic_mask_attention(**whole)
        for _ in range(2):
            two_ways.assert_same_in_another_order(on_ranks(ranks, whole, cuts), expected, torch.float64)


@pytest.mark.parametrize("world", [2, 3])
def test_chunks_that_are_too_long_together_are_refused_each_time(ranks, world):
    """A rank that remembers what the others say refuses it as it did before."""
    length = 20 * world
    given = [(length - 1, part) for part in cut(arguments(length, 7, local=2), even_cuts(length, world))]
    message = f"query: expected chunks of at most {length - 1} positions together, got {length}"
    assert ranks.run("rank_calls:refusals_of_long_chunks", given) == [[message] * 2] * world


def test_a_group_of_one(ranks):
    whole = arguments(30, 7, local=2, dropout_p=0.2, dropout_seed=SEED)
    (got,) = ranks.run("rank_calls:call", [(whole,)])
    assert torch.equal(got, dmattn.dynamic_mask_attention(**whole))


# Faults --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
def test_a_mask_whose_tensors_change_is_read_again(ranks, world):
    length = 8 * world
    query, key, value = (strategies.random_tensor((1, heads, length, 8), heads) for heads in (4, 2, 1))
    value = value.expand(-1, 2, -1, -1)
    given = []
    for rank in range(world):
        chunk = slice(8 * rank, 8 * rank + 8)
        parts = {name: x[:, :, chunk] for name, x in (("query", query), ("key", key), ("value", value))}
        given.append(({**parts, "mask": IntervalMask.sliding_window(length, 1)}, 4))
    found = ranks.run("rank_calls:calls_around_a_change", given)
    for place, left in enumerate((1, 5)):
        whole = dmattn.attention(query, key, value, IntervalMask.sliding_window(length, left))
        two_ways.assert_same_in_another_order(torch.cat([one[place] for one in found], 2), whole, whole.dtype)


def every_rank_says(ranks, given, message, call="call"):
    with pytest.raises(RankError) as raised:
        ranks.run(f"rank_calls:{call}", [(one,) for one in given])
    assert sorted(raised.value.errors) == list(range(len(given)))
    for error in raised.value.errors.values():
        assert re.match(message, error), error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 5}, r"ValueError: window: expected the same on every rank, got 4 on rank 0 and 5 on rank 1"),
        ({"local": 1}, r"ValueError: local: expected the same on every rank, got 0 on rank 0 and 1 on rank 1"),
        ({"softcap": 2.0}, r"ValueError: softcap: expected the same on every rank, got 0.0 on rank 0 and 2.0 on rank 1"),
        ({"dtype": torch.float32}, r"ValueError: dtype: expected the same on every rank, got float64 on rank 0 and float32 on rank 1"),
        ({"batch": 1}, r"ValueError: batch size: expected the same on every rank, got 2 on rank 0 and 1 on rank 1"),
        ({"scores": None, "window": None}, r"ValueError: kind of mask .*: expected the same on every rank, got 2 on rank 0 and 0 on rank 1"),
        ({"requires_grad": True}, r"ValueError: tensors that require gradients .*, got 0 on rank 0 and 7 on rank 1"),
        ({"base": dmattn.IntervalMask.sliding_window(16, 3)}, r"ValueError: base: expected documents, padding or|ValueError: rank 1 refused"),
        ({"base": 5}, r"TypeError: base: expected an IntervalMask, got int|ValueError: rank 1 refused its own arguments"),
    ],
)  # fmt: skip
def test_a_rank_that_was_called_differently_is_an_error_on_every_rank(ranks, changes, message):
    differing = arguments()
    tensors = ("query", "key", "value")
    if "dtype" in changes:
        differing |= {name: differing[name].to(changes["dtype"]) for name in tensors}
    elif "batch" in changes:
        differing |= {name: differing[name][:1] for name in (*tensors, "scores")}
    elif "requires_grad" in changes:
        differing |= {name: differing[name].requires_grad_() for name in tensors}
    else:
        differing |= changes
    for world in (2, 3):
        every_rank_says(ranks, [arguments(), differing] + [arguments()] * (world - 2), message)


def values_that_differ(world):
    """Arguments of two ranks that differ in a value alone, by its name."""
    whole = {name: x for name, x in arguments().items() if name not in ("scores", "window")}
    masks = [dmattn.IntervalMask.sliding_window(8 * world, left) for left in (3, 2)]
    documents = [dmattn.IntervalMask.documents(8 * world, torch.tensor([0, first, 8 * world])) for first in (5, 6)]
    return {
        "mask": [{**whole, "mask": mask, "window": 3} for mask in masks],
        "base": [{**arguments(), "base": base} for base in documents],
        "dropout_seed": [{**arguments(), "dropout_p": 0.2, "dropout_seed": SEED + n} for n in (0, 1)],
    }


@pytest.mark.parametrize("name", values_that_differ(2))
@pytest.mark.parametrize("call", ["call", "call_compiled"])
@pytest.mark.parametrize("world", [2, 3])
def test_values_that_differ_between_ranks_are_an_error_on_every_rank(ranks, name, call, world):
    message = rf"(ValueError|RuntimeError): (dmattn: )?{name}: expected the same values on every rank, got different ones"
    one, other = values_that_differ(world)[name]
    every_rank_says(ranks, [one] * (world - 1) + [other], message, call)
    ranks.run(f"rank_calls:{call}", [(other,)] * world)


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_p"])
@pytest.mark.parametrize("world", [2, 3])
def test_numbers_of_compiled_calls_that_differ_are_an_error_on_every_rank(ranks, name, world):
    seed = {"dropout_seed": SEED} if name == "dropout_p" else {}
    given = [{**arguments(), **seed, name: 0.5 if rank == 1 else 0.25} for rank in range(world)]
    message = rf"(ValueError|RuntimeError): (dmattn: )?{name}: expected the same values on every rank, got different ones"
    every_rank_says(ranks, given, message, "call_compiled")


def test_comparing_values_can_be_left_out(ranks):
    given = values_that_differ(2)["dropout_seed"]
    ranks.run("rank_calls:call_without_comparing", [(one,) for one in given])


@pytest.mark.parametrize("world", [2, 3])
def test_a_seed_on_one_rank_alone_is_an_error_on_every_rank(ranks, world):
    given = [{**arguments(), "dropout_p": 0.2, **({"dropout_seed": SEED} if rank == 1 else {})} for rank in range(world)]
    every_rank_says(
        ranks, given, r"ValueError: dropout_seed .*: expected the same on every rank, got 0 on rank 0 and 1 on rank 1"
    )


def differing_calls():
    """Arguments in place of others, with messages of the same bytes, of more, of fewer, or with another kind of exchange."""
    one, tensors = arguments(), ("query", "key", "value", "scores")
    yield from ({"window": 5}, {"window": 2}, {"softcap": 1.0}, {"window": 0}, {"scores": None, "window": None})
    yield {name: one[name][:1] for name in tensors}
    yield {name: one[name].float() for name in tensors}
    yield {"key_bias": one["scores"].double()}
    yield {"dropout_p": 0.2, "dropout_seed": SEED}


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_whose_call_is_compiled_is_named_so_on_every_rank(ranks, world):
    """And not by what a compiled call does not say, such as its scale."""
    message = r"ValueError: compiled \(0 no, 1 yes\): expected the same on every rank, got 0 on rank 0 and 1 on rank \d"
    for _ in range(2):
        every_rank_says(ranks, [arguments()] * world, message, "call_compiled_on_the_last")


@pytest.mark.parametrize("world", [2, 3])
def test_what_ranks_remember_of_each_other_hides_no_difference(ranks, world):
    """After calls that agreed, a rank that differs is an error on every rank, and the next calls that agree work."""
    same = [arguments() for _ in range(world)]
    for changes in differing_calls() if world == 2 else itertools.islice(differing_calls(), 5):
        first = ranks.run("rank_calls:call", [(one,) for one in same])
        for place in range(world):
            ranks.run("rank_calls:call", [(one,) for one in same])  # which all expect
            given = [{**one, **changes} if rank == place else one for rank, one in enumerate(same)]
            every_rank_says(
                ranks, given, r"ValueError: (.* expected the same on every rank|window: expected a pos|rank \d refused)"
            )
        for out, again in zip(first, ranks.run("rank_calls:call", [(one,) for one in same]), strict=True):
            assert torch.equal(out, again)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_whose_attention_fails_has_taken_part_in_the_exchange(ranks, failing):
    same = [(arguments(),)] * 2
    first = ranks.run("rank_calls:call", same)
    ranks.ask(failing, "rank_calls:call_whose_attention_fails", 2, same[0])
    ranks.ask(1 - failing, "rank_calls:call", 2, same[0])
    (error, _), (out, refusal) = ranks.answer(failing), ranks.answer(1 - failing)
    assert error == "MemoryError"
    assert refusal is None
    assert torch.equal(out, first[1 - failing])
    for out, again in zip(first, ranks.run("rank_calls:call", same), strict=True):
        assert torch.equal(out, again)


def test_a_rank_that_refuses_its_arguments_tells_the_others(ranks):
    wrong = {**arguments(), "window": 0}
    every_rank_says(
        ranks, [arguments(), wrong, arguments()], r"ValueError: (rank 1 refused|window: expected a positive int, got 0)"
    )


def test_masks_of_another_length_or_content(ranks):
    whole = {name: x for name, x in arguments().items() if name not in ("scores", "window")}

    def given(*lengths):
        return [{**whole, "mask": IntervalMask.causal(length)} for length in lengths]

    every_rank_says(
        ranks, given(17, 17), r"ValueError: mask: expected one for 16 keys, the sum of the chunks \[8, 8\], got one for 17"
    )
    every_rank_says(
        ranks, given(16, 17), r"ValueError: length of the mask: expected the same on every rank, got 16 on rank 0 and 17"
    )
    other = {**whole, "mask": IntervalMask.sliding_window(16, 3)}
    every_rank_says(ranks, [*given(16), other], r"ValueError: mask: expected the same on every rank")


def test_a_bound_that_is_too_small(ranks):
    whole = {name: x for name, x in arguments().items() if name != "scores"}
    given = [{**whole, "mask": IntervalMask.sliding_window(16, 5)}] * 2
    every_rank_says(ranks, given, r"ValueError: window: expected at least 5, the most earlier keys that a chunk sees, got 4")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mask": IntervalMask.causal(16)}, ValueError, "mask, scores: expected at most one"),
        (
            {"scores": None, "mask": torch.ones(16, dtype=torch.bool)},
            TypeError,
            "mask: expected an IntervalMask of the whole sequence",
        ),
        ({"scores": None, "base": IntervalMask.causal(16)}, ValueError, "base: expected None without scores"),
        ({"scores": None, "window": None, "local": 2}, ValueError, "local, sink_keys: expected 0 and 0 without window"),
        ({"scores": None}, ValueError, "window: expected None without scores and mask, got"),
        ({"scores": torch.ones(2, 2, 9)}, ValueError, r"scores: expected \[B, Hkv, n\] = \[2, 2, 8\], got \[2, 2, 9\]"),
        ({"window": None}, TypeError, "window: expected a positive int, got NoneType"),
        ({"group": 3}, TypeError, r"group: expected a torch\.distributed\.ProcessGroup, got int"),
        ({"mesh": 3}, TypeError, r"mesh: expected a torch\.distributed\.device_mesh\.DeviceMesh, got int"),
        ({"query": torch.ones(2, 4, 9, 8)}, ValueError, r"key: expected \[B, Hkv, n, D\] with n=9 like query"),
        (
            {"scores": None, "mask": IntervalMask.top_k(torch.ones(3, 1, 16), 2)},
            ValueError,
            r"mask: expected \[B|1, H|Hkv|1, N\]",
        ),
    ],
)
def test_arguments_that_one_rank_can_refuse(alone, changes, error, message):
    given = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in arguments().items()}
    with pytest.raises(error, match=message):
        context_parallel_attention(**{**given, **changes})


def test_groups_that_are_refused(alone):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    with pytest.raises(ValueError, match="mesh, group: expected at most one of them, got both"):
        context_parallel_attention(**arguments(), mesh=mesh, group=torch.distributed.group.WORLD)
    with pytest.raises(ValueError, match="group: expected a group that this rank is a member of"):
        context_parallel_attention(**arguments(), group=torch.distributed.GroupMember.NON_GROUP_MEMBER)


def test_masks_and_scores_of_another_device_are_refused(alone):
    with pytest.raises(ValueError, match="scores: expected device cpu like query, got meta"):
        context_parallel_attention(**arguments() | {"scores": arguments()["scores"].to("meta")})
    given = {name: x for name, x in arguments().items() if name not in ("scores", "window")}
    mask = IntervalMask.sliding_window(8, 2).to("meta")
    with pytest.raises(ValueError, match="mask: expected device cpu like query, got meta"):
        context_parallel_attention(**given, mask=mask)


def test_without_a_process_group():
    with pytest.raises(ValueError, match=r"group: expected torch\.distributed to be initialised"):
        context_parallel_attention(**arguments())


@pytest.fixture
def alone(tmp_path):
    """This process as a world of one rank."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_rank_that_is_missing_or_gone_is_torchs_own_error():
    """Nothing hangs longer than the group's timeout."""
    pool = Ranks(2, timeout=3.0)
    try:
        pool.run("rank_calls:stay_away", [()] * 2)
        pool.run("rank_calls:call", [(arguments(),)] * 2)  # each now knows what the other one says
        for absent in ("stay_away", "leave"):
            pool.ask(1, f"rank_calls:{absent}", 2, ())
            pool.ask(0, "rank_calls:call", 2, (arguments(),))
            _, error = pool.answer(0)
            assert error.startswith(("RuntimeError", "DistBackendError", "DistNetworkError")), error
            if absent == "stay_away":
                assert pool.answer(1) == (None, None)
    finally:
        pool.close()


# Programs ------------------------------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


def started(world, script, *arguments):
    """A program of the checkout, or a module of its benchmarks, on so many ranks."""
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    what = ["-m", script] if script.startswith("dmattn_bench.") else [str(ROOT / script)]
    command = [sys.executable, *(starter if world > 1 else []), *what, *map(str, arguments)]
    path = os.pathsep.join([str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}, stdout=PIPE, stderr=STDOUT)


def test_training_loses_the_same_on_any_number_of_ranks(tmp_path):
    """One process, two that share each sequence, and two pairs with sequences of their own; weights sharded over all of them."""
    sizes = {"steps": 3, "length": 64, "width": 32, "layers": 2, "window": 12, "local-window": 4, "dtype": "float64"}
    given = [x for name, value in sizes.items() for x in (f"--{name}", value)]
    outputs, losses = [tmp_path / f"{number}.json" for number in range(3)], []
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(started(world, "examples/train_distributed.py", *given, "--cp", cp, "--output", output))
            for (world, cp), output in zip(((1, 1), (2, 2), (4, 2)), outputs, strict=True)
        ]
        for process, output in zip(runs, outputs, strict=True):
            printed, _ = process.communicate(timeout=600)
            assert process.returncode == 0, printed.decode()
            losses.append(torch.tensor(json.loads(output.read_text())["losses"], dtype=torch.float64))
    assert losses[0][-1] < losses[0][0]
    for other in losses[1:]:
        two_ways.assert_same_in_another_order(other, losses[0], torch.float64)


def test_the_benchmark_runs_on_two_ranks(tmp_path):
    """It compares with one process first, and refuses to time what differs."""
    output = tmp_path / "times.json"
    sizes = ["--lengths", "1024", "--window", "64", "--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--repeats", "1",
             "--output"]  # fmt: skip
    with started(2, "dmattn_bench.context_parallel", *sizes, output) as process:
        printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed.decode()
    (row,) = json.loads(output.read_text())["rows"]
    assert row["bytes_in"]["rows"] == row["most_bytes_of_rows"] == 64 * (2 * 16 * 2 + 4)
    assert row["bytes_in"]["scores"] == 0
    assert row["ours"]["forward_ms"] > 0
