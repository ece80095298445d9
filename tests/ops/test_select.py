"""Key selection against brute force: the visible sets of all queries, exactly, ties included."""

from __future__ import annotations

import itertools
import time

import brute_check
import brute_force
import pytest
import torch
from dmattn import IntervalMask
from dmattn.testing import poisoned_memory, strategies
from hypothesis import given
from hypothesis import strategies as st

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def visible_sets(end: torch.Tensor) -> torch.Tensor:
    """bool [B, Hkv, Sk, Sk] of a causal selection."""
    return IntervalMask(torch.arange(end.shape[2], dtype=torch.int32, device=end.device), end).to_bool(end.shape[2], end.shape[2])


@pytest.mark.parametrize("causal", [True, False])
def test_equal_scores_keep_the_later_key(device, causal):
    visible = IntervalMask.top_k(torch.zeros(1, 1, 6, device=device), 2, is_causal=causal).to_bool(6, 6)[0, 0].cpu()
    latest = torch.tensor([j >= 4 for j in range(6)]).expand(6, 6)
    sliding = IntervalMask.sliding_window(6, 1).to_bool(6, 6)[0, 0]
    assert torch.equal(visible, sliding if causal else latest)


@pytest.mark.parametrize("kind", ["random", "ties", "constant", "increasing"])
@pytest.mark.parametrize("length", [1, 1023, 1025, 4097, 8192, 20_000, 131_072, 131_073])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_set_for_all_queries_is_the_best_keys(device, kind, length, dtype):
    scores = strategies.make_scores((2, 3, length), kind, length, dtype, device)
    scores[:, 1, ::3] = -torch.inf
    scores[:, 1, 1::3] = torch.nan
    for window in {1, length // 20 + 1, length // 2 + 1, length}:
        end = torch.ops.dmattn.select(scores, None, window, False)
        known = scores.cpu().double().nan_to_num(nan=-torch.inf, neginf=-torch.inf, posinf=torch.inf)
        # The later of equal scores is better: a stable sort of the keys from the last to the first.
        best = length - 1 - known.flip(2).sort(dim=2, descending=True, stable=True).indices[:, :, :window]
        expected = torch.zeros(2, 3, length, dtype=torch.bool).scatter(2, best, True) & (known > -torch.inf)
        assert torch.equal(end.cpu() > 0, expected), window


@pytest.mark.parametrize("kind", ["random", "ties", "increasing"])
@pytest.mark.parametrize("length", [1, 4000, 10_001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_16_bits_are_selected_as_in_float32(device, kind, length, dtype):
    scores = strategies.make_scores((1, 3, length), kind, length, dtype, device)
    scores[:, 1, ::3] = -torch.inf
    scores[:, 2, 1::3] = torch.nan
    for window in {1, length // 10 + 1}:
        ends = [torch.ops.dmattn.select(of, None, window, True) for of in (scores, scores.float())]
        assert torch.equal(*ends), window


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_nan_and_minus_inf_are_never_selected(device, bad, causal):
    scores = torch.tensor([[[bad, 1.0, bad, 0.5, bad]]], device=device)
    visible = IntervalMask.top_k(scores, 5, is_causal=causal).to_bool(5, 5)
    assert not visible[..., [0, 2, 4]].any()
    assert visible[0, 0, 4].tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("causal", [True, False])
def test_strided_scores(device, causal):
    room = torch.randn(2, 50, 3, 2, generator=torch.Generator().manual_seed(1)).to(device)
    for scores in (
        room[..., 0].transpose(1, 2),
        room[:, :, :1, 1].transpose(1, 2).expand(2, 3, 50),
        room[..., 0].transpose(1, 2)[:, 1:, 5:],
    ):
        assert not scores.is_contiguous()
        strided, dense = IntervalMask.top_k(scores, 7, causal), IntervalMask.top_k(scores.contiguous(), 7, causal)
        assert torch.equal(strided.end, dense.end)


@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 0, 5), (2, 2, 0), (1, 1, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_degenerate_shapes(device, shape, causal):
    mask = IntervalMask.top_k(torch.zeros(shape, device=device), 3, causal)
    assert mask.end.shape == shape


def test_segments_beyond_the_ends_are_clamped(device):
    scores = torch.ones(1, 1, 4, device=device)
    for causal in (True, False):
        wild = torch.tensor([[[2**31 - 1, -(2**31), 3, 2]]], dtype=torch.int32, device=device)
        end = torch.ops.dmattn.select(scores, wild, 2, causal)
        assert end.shape == (1, 1, 4)
        assert int(end.max()) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "constant", "increasing", "decreasing"])
@pytest.mark.parametrize("window", [64, 4096, 300_000])
def test_a_million_keys_in_a_second_per_head(kind, window):
    scores = strategies.make_scores((1, 1, 1 << 20), kind, 0)
    begin = time.perf_counter()
    end = torch.ops.dmattn.select(scores, None, window, True)
    elapsed = time.perf_counter() - begin
    alive_at_last = end[0, 0] == torch.iinfo(torch.int32).max
    assert int(alive_at_last.sum()) == window
    assert elapsed < 1.0


# Local window and sinks -----------------------------------------------------------------------------------------------------------------


@given(data=st.data(), dtype=st.sampled_from(DTYPES), kind=st.sampled_from(strategies.SCORE_KINDS))
def test_op_equals_brute_force(device, data, dtype, kind):
    """The op, over documents with hidden keys in front of them, between them and at their ends."""
    length = data.draw(strategies.lengths(130, min_length=1))
    window, local, sink_keys = data.draw(strategies.selection_sizes(length, True))
    generator = torch.Generator().manual_seed(data.draw(strategies.seeds()))
    scores = strategies.make_scores((2, 2, length), kind, data.draw(strategies.seeds()), dtype, device)
    scores[torch.rand(2, 2, length, generator=generator) < data.draw(st.sampled_from((0.0, 0.3)))] = torch.nan
    ids = torch.randint(-1, 3, (2, length), generator=generator).sort(dim=1).values.roll(data.draw(st.integers(0, length)), 1)
    documents = None
    seen = torch.ones(1, 1, length, length, dtype=torch.bool)
    if data.draw(st.booleans()):
        run = (ids.diff(dim=1, prepend=ids[:, :1]) != 0).cumsum(1)
        seen = ((run[:, :, None] == run[:, None, :]) & (ids >= 0)[:, None, :])[:, None]
        documents = IntervalMask.documents(length, ids=ids.to(device)).end
    with poisoned_memory(scores):
        end = torch.ops.dmattn.select(scores, documents, window, True, local, sink_keys)
    expected = brute_force.selected(brute_check.numbers(scores), window, True, seen.numpy(), local, sink_keys)
    assert torch.equal(visible_sets(end).cpu(), torch.from_numpy(expected))


@pytest.mark.parametrize(
    ("window", "local", "sink_keys"), [(5, 3, 0), (5, 0, 2), (5, 3, 2), (100, 30, 40), (3, 1000, 2), (0, 3, 2), (600, 9, 4)]
)
def test_a_query_sees_as_many_keys_as_it_is_told(device, window, local, sink_keys):
    scores = strategies.make_scores((1, 4, 500), "ties", 3, device=device)
    end = IntervalMask.top_k(scores, window, local=local, sink_keys=sink_keys).end
    counts = torch.arange(1, 501, device=device).clamp(max=window + local + sink_keys).expand(1, 4, 500)
    assert torch.equal(visible_sets(end).sum(-1), counts)


@pytest.mark.parametrize("sizes", [(4, 0), (4, 7), (0, 7), (1, 1), (300, 1), (1, 300), (2**40, 0)])
def test_a_window_of_0_streams(device, sizes):
    sink_keys, local = sizes
    scores = strategies.make_scores((2, 3, 70), "random", 3, device=device)
    streaming = IntervalMask.streaming(70, min(sink_keys, 70), local, device=device).to_bool(70, 70).expand(2, 3, 70, 70)
    assert torch.equal(IntervalMask.top_k(scores, 0, sink_keys=sink_keys, local=local).to_bool(70, 70), streaming)


def test_sinks_take_no_place_of_the_window(device):
    """Neither while they are sinks alone nor in the local window, and the keys behind the best one are no worse off for its being a sink."""
    scores = torch.tensor([[[9.0, 8.0, 1.0, 5.0, 3.0, 7.0, 2.0, 0.0]]], device=device)
    visible = IntervalMask.top_k(scores, 2, local=2, sink_keys=1).to_bool(8, 8)[0, 0]
    seen = [row.nonzero().flatten().tolist() for row in visible]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 3, 4, 5], [0, 1, 3, 5, 6], [0, 1, 5, 6, 7]]


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_local_window_and_sinks_show_what_is_never_selected(device, bad):
    scores = torch.tensor([[[bad, bad, 1.0, bad, 0.5, bad]]], device=device)
    visible = IntervalMask.top_k(scores, 6, local=2, sink_keys=1).to_bool(6, 6)[0, 0]
    seen = [row.nonzero().flatten().tolist() for row in visible]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 2, 3, 4], [0, 2, 4, 5]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["random", "ties", "decreasing"])
@pytest.mark.parametrize("length", [1, 1025, 4700, 20_000])
def test_a_local_window_delays_and_sinks_do_not_compete(device, dtype, kind, length):
    """What a plain selection without the sinks says, `local` steps later: at lengths that a GPU sorts and cuts in pieces."""
    scores = strategies.make_scores((2, 2, length), kind, length, dtype, device)
    scores[:, 1, ::3] = torch.nan
    keys, forever = torch.arange(length, device=device), torch.iinfo(torch.int32).max
    for window, local, sink_keys in ((1, 1, 1), (length // 20 + 1, 100, 5), (length + 1, 7, 1030), (length // 3 + 1, 0, 4)):
        others = scores.clone()
        others[:, :, :sink_keys] = -torch.inf
        plain = torch.ops.dmattn.select(others, None, window, True).long()
        expected = torch.where((plain == forever) | (keys < sink_keys), forever, plain + min(local, length))
        assert torch.equal(torch.ops.dmattn.select(scores, None, window, True, local, sink_keys).long(), expected)


@pytest.mark.parametrize("sizes", [(0, 5, 2), (3, 0, 0), (3, 5, 2), (3, 200, 0), (200, 0, 0), (200, 0, 40), (200, 200, 40)])
@pytest.mark.parametrize("length", [300, 5000, 20000])
def test_what_a_selection_shows_ends_with_its_document(device, length, sizes):
    """Selection starts anew with each document, wherever its borders lie among the chunks that a GPU works in."""
    window, local, sink_keys = sizes
    generator = torch.Generator().manual_seed(length + window)
    borders = torch.randperm(length - 1, generator=generator)[: max(length // 150, 2)].sort().values + 1
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), borders, torch.tensor([length])])
    scores = torch.randint(0, 50, (1, 2, length), generator=generator).float()
    base = IntervalMask.documents(length, ends.to(device))
    mask = IntervalMask.top_k(scores.to(device), window, base=base, local=local, sink_keys=sink_keys)
    for first, last in itertools.pairwise(ends.tolist()):
        alone = IntervalMask.top_k(scores[:, :, first:last], window, local=local, sink_keys=sink_keys)
        assert torch.equal(mask.end[:, :, first:last].cpu(), (alone.end.long() + first).clamp(max=last).int())


@pytest.mark.parametrize("window", [1, 40])
@pytest.mark.parametrize("length", [300, 5000, 20000])
def test_each_document_has_one_set_of_keys(device, length, window):
    """Not causal: a GPU finds where documents begin by following their ends, many of them at a time."""
    generator = torch.Generator().manual_seed(length + window)
    borders = torch.randperm(length - 1, generator=generator)[: length // 50].sort().values + 1
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), borders, torch.tensor([length])])
    scores = torch.randint(0, 50, (1, 2, length), generator=generator).float()
    base = IntervalMask.documents(length, ends.to(device), is_causal=False)
    end = IntervalMask.top_k(scores.to(device), window, is_causal=False, base=base).end.cpu()
    for first, last in itertools.pairwise(ends.tolist()):
        alone = IntervalMask.top_k(scores[:, :, first:last], window, is_causal=False).end
        assert torch.equal(end[:, :, first:last], torch.where(alone > 0, last, alone))


def test_sinks_are_the_first_keys_of_a_document_that_are_there(device):
    ids = torch.tensor([-1, -1, 0, 0, 0, -1, 1, 1, 1, 1], device=device)
    scores = torch.zeros(1, 1, 10, device=device)
    base = IntervalMask.documents(10, ids=ids) & IntervalMask.padding(10, 9, device=device)
    visible = IntervalMask.top_k(scores, 0, base=base, sink_keys=1, local=1).to_bool(10, 10)[0, 0]
    seen = [row.nonzero().flatten().tolist() for row in visible]
    assert seen == [[], [], [2], [2, 3], [2, 4], [], [6], [6, 7], [6, 8], [6]]
