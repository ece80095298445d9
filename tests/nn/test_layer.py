"""What makes the layer learn: scores of other kinds, recency, heads that stay local, the loss of scores, windows that change."""

from __future__ import annotations

import math

import dmattn
import pytest
import torch
import torch.nn.functional as F
from dmattn import IntervalMask
from dmattn.nn import DynamicMaskAttention, ScoreRecipe, WindowSchedule, rotate, score_loss
from dmattn.testing import AttentionCase, strategies, top_k_visible
from functorch.compile import make_boxed_func
from layers import layer_with
from programs import assert_compiles_once
from torch._dynamo.backends.common import aot_autograd

tensor = strategies.random_tensor
RECOMMENDED = {"local": 4, "local_heads": 1, "score": "linear", "select_only": True, "recency": 0.25}


def layer_of(dtype=torch.float32, **options):
    """A layer whose scores differ from key to key."""
    torch.manual_seed(0)
    layer = layer_with(64, 4, **{"window": 5, "num_kv_heads": 2, "dtype": dtype, **options})
    for name, parameter in layer.named_parameters():
        if name == "A" or name.startswith("score_proj"):
            torch.nn.init.normal_(parameter)
    return layer


def turned(layer, x, heads):
    """x [B, heads, S, D] whose first heads, those of so many key heads, are rotated."""
    count = x.shape[1] * heads // layer.num_kv_heads
    return torch.cat([rotate(x[:, :count], layer.rope_theta, factor=layer.partial_rotary_factor), x[:, count:]], 1)


# What it computes -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": 4, "head_dim": 24, "bias": True},
        {"partial_rotary_factor": 0.5, "softcap": 3.0},
        {"rope_theta": None, "local": 3, "sink_keys": 2},
        {"recency": 0.5},
        {"recency": 0.1, "local": 3, "sink_keys": 2},
        {"score": "linear", "local": 3},
        {"score": torch.nn.Linear(64, 2, dtype=torch.float64), "recency": 0.1, "softcap": 3.0},
        {"select_only": True, "recency": 0.1},
        {"select_only": True, "score": "linear", "sink_keys": 1},
        {"local": 4, "local_heads": 1, "recency": 0.1},
        {**RECOMMENDED, "sink_keys": 2, "rope_theta": None},
        {**RECOMMENDED, "rotated_heads": 1},
    ],
    ids=str,
)
def test_layer_is_its_formula(options):
    layer = layer_of(torch.float64, **options)
    hidden = tensor((2, 30, 64), 0, torch.float64).requires_grad_()
    out = layer(hidden)
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    query, key, value = (proj(hidden).unflatten(2, (-1, layer.head_dim)).transpose(1, 2) for proj in projections)
    if layer.rope_theta is not None:
        query, key = (turned(layer, x, options.get("rotated_heads", layer.num_kv_heads)) for x in (query, key))
    if "score" in options:
        scores = layer.score_proj(hidden).transpose(1, 2)
    else:
        scores = torch.exp(layer.A * F.softplus(layer.dt_proj(value.transpose(1, 2).flatten(2)))).transpose(1, 2)
    recency = 0.0
    if "recency" in options:
        assert layer.log_slope.exp()[0].item() == pytest.approx(options["recency"])
        recency = layer.log_slope.exp()[:, None] * torch.arange(30)
    ranks = (scores + recency).detach()
    beside = {name: options.get(name, 0) for name in ("local", "sink_keys")}
    visible = top_k_visible(ranks, 5, **beside)
    if "local_heads" in options:
        visible[:, 0] = top_k_visible(ranks, 0, **beside)[:, 0]
    bias = recency + torch.zeros_like(scores) if options.get("select_only") else scores + recency
    attended, _ = AttentionCase(
        query, key, value, visible=visible, key_bias=bias, softcap=options.get("softcap", 0.0)
    ).call_reference()
    expected = layer.o_proj(attended.transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, expected)
    leaves = [hidden, *layer.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(out.square().sum(), leaves, allow_unused=True),
        torch.autograd.grad(expected.square().sum(), leaves, allow_unused=True),
        strict=True,
    ):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


def test_the_plain_layer_has_the_parameters_of_the_doge_model():
    names = ["A", *(f"{proj}.weight" for proj in ("q_proj", "k_proj", "v_proj", "dt_proj", "o_proj"))]
    assert list(DynamicMaskAttention(64, 4, window=5).state_dict()) == names
    assert list(layer_with(64, 4, window=5, local=2, sink_keys=1, local_heads=1).state_dict()) == names
    others = set(layer_with(64, 4, window=5, **RECOMMENDED).state_dict()) ^ set(names)
    assert others == {"A", "dt_proj.weight", "score_proj.weight", "score_proj.bias", "log_slope"}


@pytest.mark.parametrize(
    "options", [RECOMMENDED, {"recency": 0.5, "sink_keys": 1}, {"window": 50}, {"window": 2, "local": 3, "sink_keys": 1}], ids=str
)
def test_documents_are_kept_apart(options):
    layer = layer_of(rope_theta=None, **options)
    hidden = tensor((1, 40, 64), 0)
    packed = layer(hidden, IntervalMask.documents(40, torch.tensor([0, 12, 40])))
    torch.testing.assert_close(packed, torch.cat([layer(hidden[:, :12]), layer(hidden[:, 12:])], dim=1))


def test_slopes_fall_geometrically_from_head_to_head():
    slopes = layer_with(64, 4, recency=0.25).log_slope.exp()
    torch.testing.assert_close(slopes[1:] / slopes[:-1], torch.full((3,), 2048 ** (-1 / 3)))
    assert slopes[-1].item() == pytest.approx(0.25 / 2048)


def test_fresh_linear_scores_are_equal_so_that_the_window_slides():
    layer = layer_with(64, 4, window=6, score="linear", select_only=True)
    scores = layer.scores(tensor((2, 20, 64), 0))
    assert not scores.any()
    assert torch.equal(layer.mask(scores).to_bool(20, 20)[0, 0], IntervalMask.sliding_window(20, 5).to_bool(20, 20)[0, 0])


# Gradients --------------------------------------------------------------------------------------------------------------------------


def test_scores_take_gradients_wherever_their_key_is_visible():
    """In a local window, too, where keys are that never win a place."""
    layer = layer_of(score="linear", local=8)
    hidden = tensor((1, 40, 64), 0)
    scores = layer.scores(hidden).detach().requires_grad_()
    layer.scores = lambda source: scores
    layer(hidden).square().sum().backward()
    never = layer.mask(scores).end[0] == torch.arange(40) + 8
    assert never.any()
    assert (scores.grad[0] != 0).all()


def test_taught_scores_learn_from_their_loss_alone_and_send_nothing_further():
    layer = layer_of(**RECOMMENDED)
    hidden = tensor((2, 40, 64), 0).requires_grad_()
    out, loss = layer(hidden, with_score_loss=True)
    assert torch.equal(out, layer(hidden))
    learners = {"score_proj.weight", "score_proj.bias", "log_slope"}
    for name, parameter in [("hidden", hidden), *layer.named_parameters()]:
        (from_loss,) = torch.autograd.grad(loss, parameter, retain_graph=True, allow_unused=True)
        (from_out,) = torch.autograd.grad(out.square().sum(), parameter, retain_graph=True, allow_unused=True)
        assert (from_loss is not None and bool(from_loss.any())) == (name in learners), name
        assert (from_out is None) == name.startswith("score_proj"), name


def test_the_loss_of_a_layer_is_that_of_its_selecting_heads():
    layer = layer_of(**RECOMMENDED, sink_keys=1, queries=40)
    hidden = tensor((2, 40, 64), 0)
    _, loss = layer(hidden, with_score_loss=True)
    query, key, value = layer.projected(hidden)
    ranks, bias = layer.ranked(hidden, value)
    every_query = score_loss(query, key, ranks, key_bias=bias, local=4, sink_keys=1, queries=40)
    torch.testing.assert_close(loss, every_query[1])


# The loss of scores -----------------------------------------------------------------------------------------------------------------


def test_a_layer_that_is_taught_selects_a_key_with_a_score_of_plus_inf_and_learns_from_the_others():
    class Pinning(torch.nn.Linear):
        def forward(self, hidden):
            return torch.where(torch.arange(hidden.shape[1])[:, None] == 3, math.inf, super().forward(hidden))

    layer = layer_of(**{**RECOMMENDED, "score": Pinning(64, 2)}, explore=True)
    hidden = tensor((2, 40, 64), 0)
    out, loss = layer(hidden, with_score_loss=True)
    assert (layer.mask(layer.ranked(hidden, layer.projected(hidden)[2])[0]).end[:, 1, 3] > 40).all()
    (out.square().mean() + loss).backward()
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    assert layer.score_proj.weight.grad.any()


def test_queries_that_explore_see_all_keys_and_teach_what_lies_beyond_the_window():
    """At the drawn queries the output is that of dense attention, elsewhere the window's, and early keys have gradients."""
    layer = layer_of(**RECOMMENDED, queries=8, explore=True)
    hidden = tensor((2, 64, 64), 0)
    windowed = layer(hidden)
    torch.manual_seed(3)
    rows = dmattn.nn.scores.drawn_rows(64, 8, 0.0, torch.device("cpu"))
    torch.manual_seed(3)
    out, _ = layer(hidden, with_score_loss=True)
    query, key, value = layer.projected(hidden)
    dense = dmattn.attention(query, key, value, is_causal=True, key_bias=layer.ranked(hidden, value)[1])
    dense = layer.o_proj(dense.transpose(1, 2).flatten(2))
    drawn = (torch.arange(64)[:, None] == rows).any(1)
    assert 0 < drawn.sum() < 64
    torch.testing.assert_close(out[:, drawn], dense[:, drawn])
    torch.testing.assert_close(out[:, ~drawn], windowed[:, ~drawn])
    (far,) = torch.autograd.grad(out[:, drawn][:, -1].square().sum(), layer.k_proj.weight, retain_graph=True)
    assert far.any()
    assert torch.equal(layer.eval()(hidden, with_score_loss=True)[0], windowed)


def test_a_large_base_of_the_rotation_may_be_an_int():
    layers = [layer_of(rope_theta=base) for base in (2**70, 2.0**70)]
    layers[1].load_state_dict(layers[0].state_dict())
    hidden = tensor((1, 8, layers[0].embed_dim), 0)
    assert torch.equal(*(layer(hidden) for layer in layers))


@pytest.mark.parametrize("rubbish", [1.0, 1e4])
def test_padding_teaches_nothing(rubbish):
    """Whatever padding holds, the loss and what real queries explore are the same, and so are the gradients of real tokens."""
    hidden, base, results = tensor((2, 64, 64), 0), IntervalMask.padding(64, torch.tensor([40, 0])), []
    for scale in (0.0, rubbish):
        layer = layer_of(**RECOMMENDED, explore=True, queries=64)
        given = hidden.clone()
        given[0, 40:] *= scale
        given[1] *= scale
        given.requires_grad_()
        torch.manual_seed(1)
        out, loss = layer(given, base, with_score_loss=True)
        gradients = torch.autograd.grad(out[0, :40].square().sum() + loss, [given, *layer.parameters()])
        assert all(gradient.isfinite().all() for gradient in gradients)
        results.append((out[0, :40], loss, gradients[0][0, :40]))
    assert results[0][1] > 0
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("options", "rotated"),
    [({}, 2), ({"rope_theta": None}, None), ({"local_heads": 0}, None), ({"local_heads": 1}, 1), ({"rotated_heads": 4}, 4)],
    ids=str,
)
def test_the_recommended_layer_rotates_its_local_heads(options, rotated):
    theta = {name: options.pop(name) for name in options.keys() & {"rope_theta"}}
    layer = DynamicMaskAttention.recommended(64, 4, 16, recipe=ScoreRecipe(**options), **theta)
    assert layer.rotated_heads == rotated


def test_the_recommended_layer_shows_so_many_keys_on_average():
    recipe = ScoreRecipe(explore=False)
    layer = DynamicMaskAttention.recommended(64, 4, 32, num_kv_heads=4, dropout=0.5, recipe=recipe)
    assert (layer.dropout, layer.recipe.explore, layer.local, layer.local_heads, layer.window) == (0.5, False, 8, 2, 48)
    mask = layer.mask(tensor((1, 4, 400), 0))
    alive = (mask.start <= 399) & (mask.end > 399)
    assert alive.expand(1, 4, 400).sum() == 4 * 32


def test_a_layer_keeps_what_its_queries_look_for():
    """Hidden states of which some are marked: all queries look for them, and the loss makes the scores keep them."""
    torch.manual_seed(0)
    layer = layer_with(16, 2, window=4, local=8, score="linear", select_only=True, rope_theta=None)
    hidden = torch.randn(4, 96, 16)
    hidden[..., 0] = 0.0
    hidden[:, 3:12:3, 0] = 8.0
    with torch.no_grad():  # queries and keys read the mark
        for proj in (layer.q_proj, layer.k_proj):
            proj.weight.mul_(0.1)
        layer.q_proj.weight[:, 1] = 1.0
        layer.k_proj.weight[:, 0] = 1.0
        hidden[..., 1] = 1.0
    marked = [3, 6, 9]
    kept_before = layer.mask(layer.scores(hidden)).end[:, :, marked] > 96
    optimizer = torch.optim.Adam(layer.score_proj.parameters(), lr=0.05)
    for _ in range(40):
        _, loss = layer(hidden, with_score_loss=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    kept = layer.mask(layer.scores(hidden)).end[:, :, marked] > 96
    assert not kept_before.any()
    assert kept.all()


# Windows that change ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, RECOMMENDED], ids=["plain", "recommended"])
def test_a_window_for_one_call(options):
    layer, hidden = layer_of(**options), tensor((2, 50, 64), 0)
    wide = layer_of(**options)
    wide.window = 20
    assert torch.equal(layer(hidden, window=20), wide(hidden))
    assert not torch.equal(layer(hidden), wide(hidden))


@pytest.mark.long
def test_windows_and_lengths_change_without_recompiling():
    layer = layer_of(**RECOMMENDED, explore=True)

    def step(call, length, window):
        torch.manual_seed(3)
        out, loss = call(tensor((2, length, 64), length), window=window, with_score_loss=True)
        return out, *torch.autograd.grad(out.square().sum() + loss, list(layer.parameters()))

    assert_compiles_once(layer, ((90, 80), (90, 33), (70, 12), (130, 9)), step)


def test_the_compiled_layer_is_small():
    """What torch.compile has to lower decides how long the first call takes: the loss is one node on a CPU."""
    graphs = []

    def counted(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    layer = DynamicMaskAttention.recommended(64, 8, 32)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend=aot_autograd(fw_compiler=counted))
    out, loss = compiled(tensor((2, 128, 64), 0), with_score_loss=True)
    (out.sum() + loss).backward()
    forward = graphs[0]
    assert forward.count("dmattn_nn.score_loss.default") == forward.count("dmattn_nn.explored.default") == 1
    # Of all but views and products Inductor writes loops, each group of which g++ compiles for a second or more.
    free = {"view", "t", "unsqueeze", "transpose", "_unsafe_view", "permute", "slice", "detach", "mm", "addmm"}
    loops = [[name for name in graph if name.startswith("aten.") and name.split(".")[1] not in free] for graph in graphs]
    assert loops[0] == []
    assert set(loops[1]) <= {"aten.add.Tensor", "aten.sum.dim_IntList"}
    assert len(loops[1]) <= 8


@pytest.mark.parametrize("base", [None, IntervalMask.padding(60, torch.tensor([45, 60]))], ids=["all", "padded"])
def test_compiled_ops_compute_what_the_eager_layer_does(base):
    """Rotation, recency, the loss and exploring queries, some of them drawn twice, forward and backward."""
    layer, hidden = layer_of(**RECOMMENDED, rotated_heads=1, explore=True, queries=80), tensor((2, 60, 64), 0).requires_grad_()
    results = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(4)
        out, loss = call(hidden, base, with_score_loss=True)
        results.append((out, loss, *torch.autograd.grad(out.square().sum() + 10 * loss, [hidden, *layer.parameters()])))
    torch.testing.assert_close(*results)


def test_ops_of_the_layer_are_what_their_fakes_say():
    def transposed(*shape):
        return tensor(shape, 0).transpose(1, 2).requires_grad_()

    query, key, scores = transposed(2, 20, 4, 8), transposed(2, 20, 2, 8), transposed(2, 20, 2)
    out, slopes, ends = transposed(2, 20, 4, 8), torch.zeros(2, requires_grad=True), torch.full((2, 1, 20), 15, dtype=torch.int32)
    rows, bias = torch.tensor([1, 4, 4, 17]), torch.zeros(1, 2, 20, requires_grad=True)
    loss = (query.detach(), key.detach(), scores, bias.detach(), ends, None, 5, 0.5, True, 1, 3, 1, 0.3, 0.0)
    calls = [
        ("rotated", (*(x.detach().transpose(1, 2).requires_grad_() for x in (query, key)), None, 1e4, 0.5, 1)),
        ("with_recency", (scores, slopes)),
        ("of_selecting_heads", (scores.detach(), 1)),
        ("explored", (query, key, key, out, None, None, rows, 0.3, 0.0, 0)),
        ("explored", (query, key, key, out, bias, ends, rows, 0.3, 2.0, 0)),
        ("score_loss", (*loss, False)),
        ("score_loss", (*loss, True)),
    ]
    for name, given in calls:
        tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        random = name == "score_loss"  # which draws anew in every call
        torch.library.opcheck(getattr(torch.ops.dmattn_nn, name), given, test_utils=tests[:3] if random else tests)


def test_compiled_gradients_of_values_are_added_where_they_lie():
    """Attention's gradient of values, [B, Hkv, S, D], is turned before that of the scores is added: Inductor would copy the sum otherwise."""
    graphs = []

    def kept(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    layer = layer_of()
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=kept)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    compiled(tensor((1, 40, 64), 0)).sum().backward()
    (backward,) = graphs[0].graph.find_nodes(op="call_function", target=torch.ops.dmattn.backward.default)
    of_value = next(node for node in backward.users if node.args[1] == 2)
    assert [node.target for node in of_value.users] == [torch.ops.aten.transpose.int]


@pytest.mark.long
def test_a_second_window_compiles_once_more_and_a_third_no_more():
    """With the default of torch.compile, without dynamic=True."""
    counter = torch._dynamo.testing.CompileCounter()
    layer = layer_of(**RECOMMENDED)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    hidden = tensor((1, 90, 64), 0)
    schedule = WindowSchedule(8, 90, dense_steps=2, fall_steps=10, multiple=2)
    windows = [schedule(step) for step in range(15)]
    assert len(set(windows)) > 8
    for window in windows:
        assert torch.equal(compiled(hidden, window=window), layer(hidden, window=window))
    assert counter.frame_count <= 2


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no ranks")
def test_a_group_of_one_rank_changes_nothing():
    layer, hidden = DynamicMaskAttention.recommended(64, 4, 8, num_kv_heads=2), tensor((2, 20, 64), 0)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        found = []
        for group in (None, torch.distributed.group.WORLD):
            torch.manual_seed(1)
            found.append(layer.eval()(hidden, with_score_loss=True, group=group))
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close(found[1], found[0])


def test_export_with_a_dynamic_length():
    layer = layer_of(**RECOMMENDED).eval()
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(layer, (tensor((1, 40, 64), 0),), dynamic_shapes=({1: length}, None, None, None)[:1])
    for n in (12, 333):
        hidden = tensor((1, n, 64), n)
        torch.testing.assert_close(program.module()(hidden), layer(hidden))


def test_a_schedule_falls_from_all_keys_to_the_window():
    schedule = WindowSchedule(384, 8192, dense_steps=100, fall_steps=400)
    windows = [schedule(step) for step in range(600)]
    assert windows[:101] == [8192] * 101
    assert windows[500:] == [384] * 100
    falling = windows[100:500]
    assert falling == sorted(falling, reverse=True)
    assert all(window % 64 == 0 for window in falling)
    middle = (8192 * 384) ** 0.5
    assert middle <= windows[300] < middle + 64
    assert WindowSchedule(10, 100, dense_steps=3)(3) == 10
    assert WindowSchedule(10, 100)(0) == 10


def test_a_schedule_is_saved_and_taken_up():
    schedule = WindowSchedule(384, 8192, dense_steps=100, fall_steps=400, multiple=32)
    other = WindowSchedule(1, 1)
    other.load_state_dict(schedule.state_dict())
    assert [other(step) for step in range(0, 600, 7)] == [schedule(step) for step in range(0, 600, 7)]
    assert repr(other) == "WindowSchedule(window=384, length=8192, dense_steps=100, fall_steps=400, multiple=32)"
    with pytest.raises(ValueError, match="state: expected a dict of window, length"):
        other.load_state_dict({"window": 3})


def test_autocast_selects_in_float32():
    layer, hidden = layer_of(**RECOMMENDED), tensor((1, 300, 64), 0)
    with torch.autocast("cpu", torch.bfloat16):
        out, loss = layer(hidden, with_score_loss=True)
    assert out.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert dmattn.nn.scores.recency_of(layer.log_slope.bfloat16(), 5).dtype == torch.float32


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_some_heads_rotate_and_the_others_do_not(kv_heads):
    layers = [
        layer_of_heads(kv_heads, rotated_heads=kv_heads // 2), layer_of_heads(kv_heads), layer_of_heads(kv_heads, rope_theta=None)
    ]  # fmt: skip
    hidden = torch.randn(2, 20, 64)
    some, rotated, plain = (layer.projected(hidden)[:2] for layer in layers)
    for ours, turned, unturned in zip(some, rotated, plain, strict=True):  # query, then key
        half = ours.shape[1] // 2
        assert torch.equal(ours[:, :half], turned[:, :half])
        assert torch.equal(ours[:, half:], unturned[:, half:])
        assert not torch.equal(turned[:, half:], unturned[:, half:])
        assert ours.transpose(1, 2).is_contiguous()
    every = layer_of_heads(kv_heads, rotated_heads=kv_heads)
    assert torch.equal(every(hidden), layers[1](hidden))


def layer_of_heads(kv_heads, **options):
    torch.manual_seed(0)
    return layer_with(64, 4, 8, num_kv_heads=kv_heads, **options)


def test_a_rotation_that_is_shared_is_the_layers_own():
    """One table turns the heads of any layer; heads lie side by side in memory, so attention's output does, too."""
    layer = layer_with(64, 4, 8, num_kv_heads=2, partial_rotary_factor=0.5)
    hidden, positions = torch.randn(2, 20, 64), torch.randint(0, 1000, (2, 20))
    table = layer_with(32, 2, 8, partial_rotary_factor=0.5).rotation(positions)
    for own, shared in zip(layer.projected(hidden, positions), layer.projected(hidden, rotation=table), strict=True):
        assert torch.equal(own, shared)
        assert own.transpose(1, 2).is_contiguous()
    causal = torch.arange(20)[None]
    assert torch.equal(layer(hidden, rotation=layer.rotation(causal)), layer(hidden))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(layer(hidden, rotation=layer.rotation(causal))).all()
    with pytest.raises(ValueError, match="rotation: expected its default with a cache"), torch.no_grad():
        layer(hidden, cache=layer.new_cache(2), rotation=layer.rotation(causal))


def test_a_chunk_of_a_sequence_is_refused_what_ranks_decide():
    layer, hidden, group = layer_with(32, 2, 8), torch.randn(2, 20, 32), object()
    for name, given in {"position_ids": torch.arange(20), "rotation": layer.rotation(torch.arange(20)[None])}.items():
        with pytest.raises(ValueError, match=f"{name}: expected its default with group, whose positions follow from the ranks"):
            layer(hidden, group=group, **{name: given})
    with pytest.raises(ValueError, match="group: expected a causal layer, got one with is_causal=False"):
        layer_with(32, 2, 8, is_causal=False)(hidden, group=group)
    with pytest.raises(ValueError, match="group: expected its default with a cache"), torch.no_grad():
        layer(hidden, cache=layer.new_cache(2), group=group)


def test_a_layer_says_whether_scores_only_select():
    assert "select_only=True" in layer_of(select_only=True).extra_repr()
    assert "select_only" not in layer_of().extra_repr()
